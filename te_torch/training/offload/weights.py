"""Parameters that travel: their memory goes to the host and comes back, the parameter stays the same object.

A parameter's storage is made empty and filled again, so that whoever holds the parameter, or a view of it, sees it
leave and return. Whoever reads a parameter in between has it back first (`absent.py`); each module that is called gets
its own back at once, and an optimizer that is about to step all. At the end of a backward pass all are back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from te_core.errors import UnsupportedError
from te_torch.module_names import warn_outside
from te_torch.quantized import QuantizedTorch
from te_torch.training.offload import absent
from te_torch.training.offload.device import THRESHOLD, Moved, Pair, Side

_OPERATION = "get_cpu_offload_context(offload_weights=True)"


class Weight(Moved):
    """The memory of a parameter."""

    __slots__ = ("away", "flat", "host", "leaving", "nbytes", "tensors", "users")

    def __init__(self, storage: torch.UntypedStorage, side: Side) -> None:
        super().__init__(side)
        self.nbytes = storage.nbytes()
        # A view of the storage, which it keeps: where its bytes are is asked anew for every copy.
        self.flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.host: torch.Tensor | None = None
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # layers that have not let go of it
        self.tensors: dict[int, weakref.ref[torch.Tensor]] = {}  # by which it is read, by their ids
        self.leaving: Any = None  # the pass for which it was copied and may be let go of
        self.away = False

    @property
    def storage(self) -> torch.UntypedStorage:
        """The memory itself."""
        return self.flat.untyped_storage()

    def leave(self, of_pass: Any) -> Pair:
        """The copy that has to be made before it is released."""
        if self.host is None:
            self.host = self.side.host(self.nbytes)
        self.leaving = of_pass
        return self.host, self.flat

    def release(self, bring_back: Callable[[], None]) -> None:
        """Let go of the device's memory. The copy must have been waited for. Who reads it calls `bring_back`."""
        self.storage.resize_(0)
        self.leaving, self.away = None, True
        for t in self._alive():
            absent.went(t, bring_back)

    def come_back(self) -> Pair:
        """Memory on the device, and the copy on the host that is to fill it."""
        assert self.host is not None
        for t in self._alive():
            absent.came(t)
        self.storage.resize_(self.nbytes)
        self.away = False
        return self.flat, self.host

    def _alive(self) -> Iterator[torch.Tensor]:
        for ref in self.tensors.values():
            t = ref()
            if t is not None:
                yield t


class Weights:
    """The weights of a context: which there are, which are away, and who brings them back."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()
        self._away: dict[int, Weight] = {}
        self._hooks: list[Any] = []
        self._of_pass = -1  # the backward pass at whose end all come back
        self._said: set[str] = set()  # why weights stay

    def of(self, parameter: torch.nn.Parameter, side_of: Any) -> list[Weight]:
        """What of a parameter travels: of one that is held quantized, its codes with what lies beside them."""
        found = []
        for t in _tensors(parameter):
            side = side_of(t.device)
            if side is None or t.numel() < THRESHOLD:
                continue
            storage = _storage_of(t)
            weight = self._known.get(storage._cdata)
            if weight is None:
                why = _stays(parameter, t, side)
                if why and why not in self._said:
                    self._said.add(why)
                    warn_outside(f"{_OPERATION}: these stay on the device: {why}")
                if why:
                    continue
                weight = self._known[storage._cdata] = Weight(storage, side)
            weight.tensors[id(t)] = weakref.ref(t)
            found.append(weight)
        return found

    def release(self, layer: Any, of_pass: Any, weights: Iterable[Weight]) -> None:
        """Let go of what no other layer wants on the device, and watch over who might read it."""
        for weight in weights:
            weight.users.discard(layer)
            if weight.leaving is of_pass and not weight.users:
                weight.release(partial(self.bring_back, [weight]))
                self._away[weight.storage._cdata] = weight
        if self._away and not self._hooks:
            self._hooks = [
                register_module_forward_pre_hook(self._before_module),
                register_optimizer_step_pre_hook(lambda *_: self.bring_back()),
            ]

    def returning(self, weights: Sequence[Weight]) -> list[tuple[Weight, Pair]]:
        """The copies that bring back those of them that are away; they count as here from now on."""
        found = []
        for weight in weights:
            if self._away.get(weight.storage._cdata) is weight:
                if weight.side.capturing():
                    raise UnsupportedError(
                        _OPERATION,
                        "a read of a weight that is away in a capture of a CUDA graph",
                        "offload_weights outside of captures: a graph keeps the addresses of weights",
                        "leave offload_weights out of what is captured, and capture when all weights are here",
                    )
                del self._away[weight.storage._cdata]
                found.append((weight, weight.come_back()))
        if not self._away:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
        return found

    def bring_back(self, weights: Sequence[Weight] | None = None) -> None:
        """Have them, or all, here for what the current stream does from now on."""
        for weight, pair in self.returning(list(self._away.values()) if weights is None else weights):
            weight.side.wait(weight.side.copy([pair]))

    def at_end_of_backward(self) -> None:
        """Called within a backward pass: at its end all are back, also those that it did not read."""
        task = torch._C._current_graph_task_id()
        if task != -1 and task != self._of_pass:
            self._of_pass = task
            torch.autograd.Variable._execution_engine.queue_callback(self.bring_back)

    def _before_module(self, module: torch.nn.Module, args: Any) -> None:
        """A module is called while weights are away: in a pass of its own, or run again by a checkpoint."""
        mine = []
        for parameter in module.parameters():
            for t in _tensors(parameter):
                weight = self._away.get(_storage_of(t)._cdata)
                if weight is not None:
                    mine.append(weight)
        if mine:
            self.bring_back(mine)


def parameter_of(t: torch.Tensor) -> torch.nn.Parameter | None:
    """The parameter that a tensor is, or is a view of."""
    if isinstance(t, torch.nn.Parameter):
        return t
    base = t._base if t._is_view() else None
    return base if isinstance(base, torch.nn.Parameter) else None


def _tensors(parameter: Any) -> Iterator[torch.Tensor]:
    """The tensors that a parameter's values lie in."""
    if not isinstance(parameter, QuantizedTorch):
        yield parameter
        return
    buffers = parameter._buffers  # type: ignore[attr-defined]
    yield from (t for t in (buffers.row_data, buffers.col_data) if t is not None)


def _storage_of(t: torch.Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunctionSubclass():  # no read: an absent tensor stays where it is
        return t.untyped_storage()


def _stays(parameter: Any, t: torch.Tensor, side: Side) -> str:
    """Why a weight's memory has to stay where it is; "" where nobody else moves it or knows its address."""
    storage = t.untyped_storage()
    if type(parameter) is not torch.nn.Parameter and not isinstance(parameter, QuantizedTorch):
        return f"weights of type {type(parameter).__name__}"
    if side.capturing():
        return "weights in a capture of a CUDA graph, which keeps their addresses"
    if not storage.nbytes():
        return "weights whose memory somebody else takes away, as FSDP does"
    if not isinstance(parameter, QuantizedTorch) and storage.nbytes() > t.numel() * t.element_size():
        return "weights that are pieces of one buffer"
    return ""
