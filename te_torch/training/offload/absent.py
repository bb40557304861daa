"""Tensors whose memory is away: whoever reads one has it back first.

While it is away such a tensor is of a class of ours, to which torch hands every function that is called with it. What
reads nothing (shapes, gradients, hooks) is done as it is; before everything else its memory comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_BRINGS_BACK = "_te_brings_back"


def _of_tensors(*names: str) -> list[Any]:
    return [getattr(torch.Tensor, name).__get__ for name in names]


_T = torch.Tensor
#: What is done with an absent tensor as it is.
_LOOKS = frozenset(
    (
        *_of_tensors("_backward_hooks", "_base", "_version", "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda"),
        *_of_tensors("is_leaf", "is_meta", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape"),
        _T.grad.__set__,  # type: ignore[union-attr]
        _T.requires_grad.__set__,  # type: ignore[attr-defined]
        _T.dim, _T.element_size, _T.get_device, _T.is_contiguous, _T.is_floating_point, _T.numel, _T.register_hook,
        _T.register_post_accumulate_grad_hook, _T.requires_grad_, _T.size, _T.storage_offset, _T.stride, _T.__len__,
        torch.numel, torch.is_floating_point,
    )
)  # fmt: skip


class _Absent:
    """What tensors whose memory is away do in the place of torch's own."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, _Absent):
                _bring_back(t)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        _bring_back(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _bring_back(self)
        return self.__reduce_ex__(protocol)


class _AbsentParameter(_Absent, torch.nn.Parameter):
    pass


class _AbsentTensor(_Absent, torch.Tensor):
    pass


_KINDS: dict[type, type] = {torch.nn.Parameter: _AbsentParameter, torch.Tensor: _AbsentTensor}
_OWN = {absent: own for own, absent in _KINDS.items()}


def went(t: torch.Tensor, bring_back: Callable[[], None]) -> None:
    """The memory of this tensor has gone; `bring_back` has it here again, and says so by `came`."""
    kind = _KINDS.get(type(t))
    if kind is not None:
        t.__dict__[_BRINGS_BACK] = bring_back
        t.__class__ = kind


def came(t: torch.Tensor) -> None:
    """Its memory is here again, or on its way ahead of whatever the current stream does next."""
    own = _OWN.get(type(t))
    if own is not None:
        t.__class__ = own
        t.__dict__.pop(_BRINGS_BACK, None)


def _bring_back(t: Any) -> None:
    t.__dict__[_BRINGS_BACK]()
