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

_MAKERS: dict[Any, Any] = {
    float8.Float8Tensor: float8._make_float8_tensor_in_reduce_ex,
    float8_blockwise.Float8BlockwiseQTensor: float8_blockwise._make_float8_blockwise_tensor_in_reduce_ex,
    mxfp8.MXFP8Tensor: mxfp8._make_mxfp8_tensor_in_reduce_ex,
    nvfp4.NVFP4Tensor: nvfp4._make_nvfp4_tensor_in_reduce_ex,
}


def reduced(t: Any) -> tuple[Any, tuple[Any, ...]]:
    """What pickle needs of a tensor."""
    marks = (t.requires_grad, bool(getattr(t, "_is_param", False)))
    if isinstance(t, identity.IdentityTensor):
        maker: Any = identity._make_identity_tensor_in_reduce_ex
        return maker, (t._hp_data, t.dtype, tuple(t.shape), t._quantizer, *marks)
    if isinstance(t, hybrid.HybridQuantizedTensor):
        parts = [None if s is None else _part(s) for s in t._parts]
        maker = hybrid._make_hybrid_quantized_tensor_in_reduce_ex
        return maker, (t.dtype, tuple(t.shape), *parts, t._quantizer, *marks)
    return _MAKERS[type(t)], (t.dtype, tuple(t.shape), held(t), t._quantizer, marks)


def _part(storage: Any) -> tuple[Any, ...]:
    if isinstance(storage, identity.IdentityTensorStorage):
        return "identity", storage._hp_data, storage._quantizer
    return (*held(storage), storage._quantizer)


def held(t: Any) -> tuple[Any, ...]:
    """Format, buffers and options of a tensor or storage, as plain values.

    torch.save refuses views of several types into one memory: float32 scales go as copies of their own.
    """
    own = (b.clone() if b is not None and b.dtype is torch.float32 else b for b in t._buffers)
    return form_key(t._format), tuple(own), t._options


def rebuilt(kind: Any, dtype: torch.dtype, shape: Any, state: Any, quantizer: Any, marks: Any) -> Any:
    """A tensor of this class from what `reduced` said."""
    form, buffers, options = state
    requires_grad, is_param = marks
    own = packed(Buffers(*buffers))
    made = kind._of(tuple(shape), dtype, form_of(tuple(form)), own, quantizer, tuple(options), requires_grad)
    if is_param:
        made._is_param = True
    return made


# By the name that files have, which is not what a class says while te_torch.compat is installed.
torch.serialization.add_safe_globals([
    naming.named, *_MAKERS.values(), identity._make_identity_tensor_in_reduce_ex,
    hybrid._make_hybrid_quantized_tensor_in_reduce_ex,
    *((cls, f"{naming.home_of(cls)}.{cls.__qualname__}") for cls in (
        DType, float8.Float8Quantizer, float8.Float8CurrentScalingQuantizer, mxfp8.MXFP8Quantizer,
        float8_blockwise.Float8BlockQuantizer, nvfp4.NVFP4Quantizer, hybrid.HybridQuantizer, identity.IdentityQuantizer,
    )),
])  # fmt: skip
