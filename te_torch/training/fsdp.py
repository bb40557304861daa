"""FSDP1 with our modules: the quantized copy of a weight that backward reads is held by all ranks together, too.

FSDP1 frees a gathered weight between forward and backward, but not the quantized copy that a module made of it. That
copy is the same on every rank, so each keeps a piece of it, and backward gathers the pieces. What else is saved differs
from rank to rank, as their batches do, and stays.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_core.errors import UnsupportedError
from te_torch import offloading
from te_torch.base.module import BaseModule
from te_torch.doors import door
from te_torch.exchange import all_gather
from te_torch.module_names import name_of
from te_torch.reruns import in_backward


def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Spread the saved quantized copies of weights over the ranks of FSDP1's groups, in each module of ours below.

    `fsdp_root` is wrapped in torch's FullyShardedDataParallel. Weights that are held quantized (`quantized_model_init`)
    are refused: FSDP1 flattens parameters; fully_shard takes them. What a checkpoint runs again, and what
    torch.compile traces, keeps its copies whole.
    """
    operation, wrapper = "prepare_te_modules_for_fsdp", _wrapper()
    if not isinstance(fsdp_root, wrapper):
        raise TypeError(
            f"{operation}: {type(fsdp_root).__name__}; it is a module that torch.distributed.fsdp's "
            "FullyShardedDataParallel wraps (FSDP1). With fully_shard (FSDP2) nothing has to be prepared."
        )
    found = list(_with_groups(fsdp_root, fsdp_root.process_group, wrapper))
    for module, _ in found:
        if module.primary_weights_in_fp8:
            raise UnsupportedError(
                operation,
                f"{name_of(module)}, whose weights are held quantized",
                "weights in high precision below FSDP1, which flattens its parameters",
                "construct the model outside quantized_model_init, or shard it with torch.distributed.fsdp.fully_shard",
            )
    for module, group in found:
        if module.fsdp_group is None:
            module.register_forward_pre_hook(door(_begin, lambda module, args: _enter(None)))
            module.register_forward_hook(_end, always_call=True)
        module.fast_setattr("fsdp_wrapped", True)
        module.fast_setattr("fsdp_group", group)


class _Later:
    """torch's FullyShardedDataParallel (FSDP1), whose modules are prepared: a class, made as it is first asked for.

    torch's own takes a second to import. Calls, static methods, isinstance and inheritance are those of the class.
    """

    __name__ = __qualname__ = "FullyShardedDataParallel"

    def __call__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """The module in torch's wrapper, prepared."""
        made: torch.nn.Module = _prepared()(module, *args, **kwargs)
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_prepared(), name)

    def __instancecheck__(self, other: Any) -> bool:
        return isinstance(other, _prepared())

    def __subclasscheck__(self, other: Any) -> bool:
        return issubclass(other, _prepared())

    @property
    def __bases__(self) -> tuple[type]:
        return (_prepared(),)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type]:
        return (_prepared(),)

    def __reduce__(self) -> str:
        return self.__name__


FullyShardedDataParallel = _Later()


_preparing = threading.RLock()


def _prepared() -> Any:
    with _preparing:  # one class for all threads
        kept = vars(FullyShardedDataParallel)
        if "made" not in kept:

            class Prepared(_wrapper()):  # type: ignore[misc]
                """torch's FullyShardedDataParallel, whose modules are prepared."""

                def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
                    super().__init__(module, *args, **kwargs)
                    prepare_te_modules_for_fsdp(self)

            Prepared.__name__ = Prepared.__qualname__ = FullyShardedDataParallel.__name__
            kept["made"] = Prepared
        return kept["made"]


def _wrapper() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper  # half a second

    return Wrapper


def _with_groups(module: torch.nn.Module, group: Any, wrapper: Any) -> Iterator[tuple[BaseModule, Any]]:
    """Our modules below, each with the group of the wrapper that is next above it."""
    if isinstance(module, wrapper):
        group = module.process_group
    if isinstance(module, BaseModule):
        yield module, group
    for child in module.children():
        yield from _with_groups(child, group, wrapper)


# ------------------------------------------------------------------------------------------- around a forward


def _begin(module: Any, args: Any) -> None:
    spreads = torch.is_grad_enabled() and not in_backward() and dist.get_world_size(module.fsdp_group) > 1
    _enter(torch.autograd.graph.saved_tensors_hooks(_Spread(module.fsdp_group), _whole) if spreads else None)


def _enter(entered: Any) -> None:
    if entered is not None:
        entered.__enter__()
    _open.stack.append((entered, offloading.active.noting))
    offloading.active.noting |= entered is not None


def _end(module: Any, args: Any, output: Any) -> None:
    if _open.stack:
        entered, offloading.active.noting = _open.stack.pop()
        if entered is not None:
            entered.__exit__()


class _Open(threading.local):
    """The forwards that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


_open = _Open()


class _Piece(NamedTuple):
    """This rank's part of a tensor that all ranks have."""

    data: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    group: Any


class _Spread:
    """What autograd keeps in the place of a tensor: this rank's piece, of a quantized copy of a weight."""

    def __init__(self, group: Any) -> None:
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def __call__(self, t: torch.Tensor) -> Any:
        if not hasattr(t, offloading.OF_WEIGHT) or t.dtype is not torch.uint8 or not t.is_contiguous():
            return t
        each = -(-t.numel() // self.ranks)
        piece = t.new_zeros(each)
        mine = t.view(-1)[self.rank * each : (self.rank + 1) * each]
        piece[: mine.numel()] = mine
        return _Piece(piece, t.shape, t.stride(), self.group)


def _whole(kept: Any) -> Any:
    if not isinstance(kept, _Piece):
        return kept
    gathered = kept.data.new_empty(dist.get_world_size(kept.group) * kept.data.numel())
    all_gather("a weight's copy under FSDP1", gathered, kept.data, kept.group)
    return gathered[: kept.shape.numel()].view(kept.shape)
