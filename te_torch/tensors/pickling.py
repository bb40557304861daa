"""Quantized tensors in files: plain tuples and buffers, rebuilt by one function for each class.

`torch.load(weights_only=True)` takes them, since the functions and quantizers are registered as safe. For formats that
know plain tensors only, save `get_metadata()`'s tensors by name and build the tensor from them.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from te_core import naming
from te_torch.tensors import kinds
from te_torch.tensors.base import Quantizer
from te_torch.tensors.buffers import Buffers, form_key, form_of, matrix_of, packed
from te_torch.tensors.dtype import DType
from te_torch.tensors.views import Seen
from te_torch.tensors.whole import check_loaded, check_whole, loading


def reduced(t: Any) -> tuple[Any, tuple[Any, ...]]:
    """What pickle needs of a tensor, or of a storage. A user's own subclass comes back as itself."""
    kind = kinds.of_class(type(t))
    a_tensor = isinstance(t, torch.Tensor)
    arguments = t._to_pickle(a_tensor and t.requires_grad, a_tensor and bool(getattr(t, "_is_param", False)))
    if type(t) is kind.tensor:
        return kind.maker, arguments
    return of_kind, (None if type(t) is kind.storage else type(t), kind.maker, arguments)


def of_kind(kind: Any, maker: Any, arguments: tuple[Any, ...]) -> Any:
    """A tensor of a subclass, or (without a kind) a storage, over the buffers that its format's maker puts together."""
    with loading():
        made = maker(*arguments)
        kind = kind or kinds.of_class(type(made)).storage
        other = made._like(made.shape, made._buffers, kind=kind)
        if not isinstance(other, torch.Tensor):
            return other
        return marked(other, made.requires_grad, getattr(made, "_is_param", False))


def marked(made: Any, requires_grad: bool, is_param: bool) -> Any:
    """A tensor as it was: whether it requires a gradient, and whether torch takes it for a parameter."""
    if is_param:
        made._is_param = True
    return made.requires_grad_(requires_grad)


def contents(t: Any) -> tuple[Any, ...]:
    """Format, buffers and options of a tensor or storage, as plain values.

    torch.save refuses views of several types into one memory: float32 scales go as copies of their own.
    """
    own = (b.clone() if b is not None and b.dtype is torch.float32 else b for b in t._buffers)
    matrix = t._folded()
    return form_key(t._format), tuple(own), t._options if matrix is None else (*t._options, matrix)


def put_together(kind: Any, dtype: torch.dtype, shape: Any, state: Any, quantizer: Any) -> Any:
    """A tensor or storage of this class from what `contents` said."""
    with loading():
        key, buffers, options = state
        check_loaded(key, buffers, shape, dtype)
        plain, folded = [o for o in options if type(o) is not tuple], [o for o in options if type(o) is tuple]
        matrix = folded[0] if folded else matrix_of(shape)
        form, given = form_of(key), Buffers(*buffers)
        if quantizer is not None and not isinstance(quantizer, Quantizer):
            raise TypeError(f"a quantizer of type {type(quantizer).__name__}")
        if prod(matrix) != prod(shape) or kind not in kinds.of_format(form)[:2]:
            raise TypeError(f"{kind.__name__} of {form} in the matrix {matrix}")
        check_whole("load a quantized tensor", form, matrix, given)
        made = kind._of(tuple(shape), dtype, form, packed(given), quantizer, tuple(plain))
        if folded:
            made._seen = Seen(matrix)
        return made


def rebuilt(kind: Any, dtype: torch.dtype, shape: Any, state: Any, quantizer: Any, marks: Any) -> Any:
    """A tensor of this class from what `reduced` said."""
    with loading():
        return marked(put_together(kind, dtype, shape, state, quantizer), *marks)


torch.serialization.add_safe_globals([naming.named, of_kind, (DType, f"{naming.home_of(DType)}.{DType.__qualname__}")])
