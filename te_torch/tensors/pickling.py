"""Quantized tensors in files: plain tuples and buffers, rebuilt by one function for each class.

`torch.load(weights_only=True)` takes them, since the functions and quantizers are registered as safe. For formats that
know plain tensors only, save `get_metadata()`'s tensors by name and build the tensor from them.
"""

from __future__ import annotations

from typing import Any

import torch

from te_core import naming
from te_torch.tensors import float8, float8_blockwise, hybrid, identity, mxfp8, nvfp4
from te_torch.tensors.buffers import Buffers, form_key, form_of, packed
from te_torch.tensors.dtype import DType
from te_torch.tensors.views import Seen

_MAKERS: dict[Any, Any] = {
    float8.Float8Tensor: float8._make_float8_tensor_in_reduce_ex,
    float8_blockwise.Float8BlockwiseQTensor: float8_blockwise._make_float8_blockwise_tensor_in_reduce_ex,
    mxfp8.MXFP8Tensor: mxfp8._make_mxfp8_tensor_in_reduce_ex,
    nvfp4.NVFP4Tensor: nvfp4._make_nvfp4_tensor_in_reduce_ex,
    identity.IdentityTensor: identity._make_identity_tensor_in_reduce_ex,
    hybrid.HybridQuantizedTensor: hybrid._make_hybrid_quantized_tensor_in_reduce_ex,
}
#: The tensor class over a storage class.
_TENSORS: dict[Any, Any] = {c: t for t in _MAKERS for c in t.__mro__ if c.__name__ == f"{t.__name__}Storage"}


def reduced(t: Any) -> tuple[Any, tuple[Any, ...]]:
    """What pickle needs of a tensor, or of a storage. A user's own subclass comes back as itself."""
    kind = next(c for c in type(t).__mro__ if c in _MAKERS or c in _TENSORS)
    marks = (False, False)
    if kind in _MAKERS:
        marks = (t.requires_grad, bool(getattr(t, "_is_param", False)))
    arguments: tuple[Any, ...]
    if issubclass(kind, identity.IdentityTensorStorage):
        arguments = (t._hp_data, t.dtype, tuple(t.shape), t._quantizer, *marks)
    elif issubclass(kind, hybrid.HybridQuantizedTensorStorage):
        parts = [None if s is None else _part(s) for s in t._parts]
        arguments = (t.dtype, tuple(t.shape), *parts, t._quantizer, *marks)
    else:
        arguments = (t.dtype, tuple(t.shape), held(t), t._quantizer, marks)
    maker = _MAKERS[_TENSORS.get(kind, kind)]
    if type(t) in _MAKERS:
        return maker, arguments
    return of_kind, (None if type(t) in _TENSORS else type(t), maker, arguments)


def of_kind(kind: Any, maker: Any, arguments: tuple[Any, ...]) -> Any:
    """A tensor of a subclass, or (without a kind) a storage, over the buffers that its format's maker puts together."""
    made = maker(*arguments)
    kind = kind or next(c for c in type(made).__mro__ if c in _TENSORS)
    other = made._like(made.shape, made._buffers, kind=kind)
    if not isinstance(other, torch.Tensor):
        return other
    if getattr(made, "_is_param", False):
        other._is_param = True
    return other.requires_grad_(made.requires_grad)


def _part(storage: Any) -> tuple[Any, ...]:
    if isinstance(storage, identity.IdentityTensorStorage):
        return "identity", storage._hp_data, storage._quantizer
    return (*held(storage), storage._quantizer)


def held(t: Any) -> tuple[Any, ...]:
    """Format, buffers and options of a tensor or storage, as plain values.

    torch.save refuses views of several types into one memory: float32 scales go as copies of their own.
    """
    own = (b.clone() if b is not None and b.dtype is torch.float32 else b for b in t._buffers)
    matrix = t._folded()
    return form_key(t._format), tuple(own), t._options if matrix is None else (*t._options, matrix)


def put_together(kind: Any, dtype: torch.dtype, shape: Any, state: Any, quantizer: Any, **more: Any) -> Any:
    """A tensor or storage of this class from what `held` said."""
    key, buffers, options = state
    plain, folded = [o for o in options if type(o) is not tuple], [o for o in options if type(o) is tuple]
    form, own = form_of(tuple(key)), packed(Buffers(*buffers))
    made = kind._of(tuple(shape), dtype, form, own, quantizer, tuple(plain), **more)
    if folded:
        made._seen = Seen(folded[0])
    return made


def rebuilt(kind: Any, dtype: torch.dtype, shape: Any, state: Any, quantizer: Any, marks: Any) -> Any:
    """A tensor of this class from what `reduced` said."""
    requires_grad, is_param = marks
    made = put_together(kind, dtype, shape, state, quantizer, requires_grad=requires_grad)
    if is_param:
        made._is_param = True
    return made


# By the name that files have, which is not what a class says while te_torch.compat is installed.
torch.serialization.add_safe_globals(
    [
        naming.named,
        *_MAKERS.values(),
        of_kind,
        *(
            (cls, f"{naming.home_of(cls)}.{cls.__qualname__}")
            for cls in (
                DType,
                *_MAKERS,
                *_TENSORS,
                float8.Float8Quantizer,
                float8.Float8CurrentScalingQuantizer,
                mxfp8.MXFP8Quantizer,
                float8_blockwise.Float8BlockQuantizer,
                nvfp4.NVFP4Quantizer,
                hybrid.HybridQuantizer,
                identity.IdentityQuantizer,
            )
        ),
    ]
)
