"""When layers leave and come back: entries into the context count layers, and backward counts them down again."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_torch.doors import door
from te_torch.offloading import active
from te_torch.reruns import in_backward
from te_torch.training.offload.layers import FINISHED, STARTED, OffloadableLayerState, Rules

_OPERATION = "get_cpu_offload_context"


@dataclass(frozen=True)
class Schedule:
    """Of layers 0 to `count` - 1, layer i is copied when layer i + 1 is entered, released when layer i + `lag` is,
    and on its way back before the backward of layer i + `lead`. `layers` is how many a pass has, if that is known.
    """

    layers: int | None
    count: int
    lag: int
    lead: int

    @classmethod
    def of(cls, layers: int, count: int, double: bool) -> Schedule:
        """At most layers - count layers are on the device, with `double` one more in backward."""
        lag = layers - count
        return cls(layers, count, lag, lag - 1 + double)

    @classmethod
    def unknown(cls, count: int, double: bool) -> Schedule:
        """Where nobody has said how many layers there are: each has a layer's time for its copies, both ways."""
        return cls(None, count, 2, 1 + double)


class Pass:
    """One forward through all layers, and the backward of it."""

    def __init__(self, schedule: Schedule, rules: Rules) -> None:
        self.schedule, self.rules = schedule, rules
        self.layers: list[OffloadableLayerState] = []
        self.blocks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.ended = False  # its backward has begun: no layer follows
        self.synced = True  # the layer entered last
        self._next_back: int | None = None  # the last layer that is not on its way back

    def enter(self) -> int:
        """A further layer."""
        index = len(self.layers)
        self.layers.append(OffloadableLayerState(rules=self.rules, index=index, blocks=self.blocks))
        return index

    def forward_step(self, entered: int) -> None:
        """What the schedule has for this entry."""
        schedule = self.schedule
        if 1 <= entered <= schedule.count:
            self.layers[entered - 1].start_offload()
        released = entered - schedule.lag
        if 0 <= released < schedule.count:
            self.layers[released].release_activation_forward_gpu_memory()

    def backward_step(self, index: int) -> None:
        """What has to be on its way back before the backward of this layer."""
        self.ended = True
        if self._next_back is None:
            self._next_back = min(self.schedule.count, len(self.layers)) - 1
        if self.rules.weights is not None:
            self.rules.weights.at_end_of_backward()
        while self._next_back >= max(0, index - self.schedule.lead):
            layer = self.layers[self._next_back]
            if layer.state == FINISHED:
                layer.start_reload()
            else:
                layer.keep()
            self._next_back -= 1

    def abandon(self) -> None:
        """No further layer of it will run. Nothing is on its way out, weights are here; its backward is still right."""
        self.ended = self.synced = True
        for layer in self.layers:
            layer.keep()
        if self.rules.weights is not None:
            self.rules.weights.bring_back()


class OffloadSynchronizer:
    """The context of a model: entered once a layer, in the order of the forward. It counts layers and moves none.

    An entry without gradients (`torch.no_grad()`) does nothing and counts for nothing.
    """

    def __init__(self, model_layers: int | None = None, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.model_layers = model_layers
        self.inside_context = False
        self.current: Pass | None = None
        self._hooks: Any = None
        self._outer: Any = None
        self._begun = 0

    # -------------------------------------------------------------------------------------------- entries

    def __enter__(self) -> OffloadSynchronizer:
        self._check_entry()
        self._hooks = None
        if torch.is_grad_enabled():
            self._begin_layer()
            self._begun = 0
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
            self._outer, active.context = (active.context, active.noting), self
            active.noting = True
        self.inside_context = True
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.inside_context = False
        if self._hooks is not None:
            self._hooks.__exit__(kind, error, trace)
            self._hooks = None
            (active.context, active.noting), self._outer = self._outer, None
        if kind is not None:
            self.reset()

    def reset(self) -> None:
        """Begin anew with layer 0; a pass that was not finished is given up. An error inside of the context does so."""
        if self.current is not None:
            self.current.abandon()
            self.current = None

    def _check_entry(self) -> None:
        if self.inside_context:
            raise UnsupportedError(
                _OPERATION, "an entry while the context is entered already", "one layer at a time",
                "leave it, call sync_fn on the layer's output, and enter it for the next layer",
            )  # fmt: skip
        if in_backward():
            raise UnsupportedError(
                _OPERATION, "an entry inside of a backward pass", "entries in forward",
                "put the checkpoint inside of the context: with context: y = te.checkpoint(layer, x)",
            )  # fmt: skip

    def _begin_layer(self) -> None:
        state = self.current
        if state is None or state.ended or len(state.layers) == self.model_layers:
            self.current = state = Pass(self._schedule(state), self.rules)
        self.forward_step(state.enter())

    @partial(door, traced=lambda self: None)
    def transformer_layer_begins(self) -> None:
        """Called by each TransformerLayer inside of the context.

        Where nobody has said how many layers there are the context may be entered once around the whole model: then
        each TransformerLayer in it is a layer.
        """
        self._begun += 1
        if self._begun > 1 and self.model_layers is None:
            self._begin_layer()

    def _schedule(self, last: Pass | None) -> Schedule:
        """That of a pass after this one."""
        return Schedule(self.model_layers, 0, 0, 0)

    def _pass(self) -> Pass:
        if self.current is None:
            raise UnsupportedError(
                "sync_fn", "a call before the context was entered", "a call behind each entry",
                "write: with context: y = layer(x), then y = sync_fn(y)",
            )  # fmt: skip
        return self.current

    # ----------------------------------------------------------------------------------------- the steps

    def forward_step(self, index: int) -> None:
        """Called when layer `index` is entered."""

    def backward_step(self, state: Pass, index: int) -> None:
        """Called before the backward of layer `index`."""

    def _pack(self, t: torch.Tensor) -> tuple[Pass, OffloadableLayerState, Any]:
        state = self._pass()
        layer = state.layers[-1]
        return state, layer, layer.push_tensor(t)

    def _unpack(self, held: tuple[Pass, OffloadableLayerState, Any]) -> torch.Tensor:
        state, layer, kept = held
        self.backward_step(state, layer.index)
        return layer.pop_tensor(kept)

    def sync(self, tensor: torch.Tensor | None = None) -> torch.Tensor | None:
        """Called behind each entry, with the layer's output, which it returns.

        Before the layer's backward begins this has begun to bring back what the schedule says. Without an argument the
        layer's backward is noticed when it reads its first saved tensor.
        """
        if not torch.is_grad_enabled():
            return tensor
        if self.inside_context:
            raise UnsupportedError(
                "sync_fn", "a call inside of the context", "a call behind it", "leave the context before"
            )
        state = self._pass()
        index = len(state.layers) - 1
        if tensor is not None:
            if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
                raise ArgumentError(
                    "sync_fn",
                    "a tensor that requires no gradient" if isinstance(tensor, torch.Tensor) else repr(tensor),
                    "the output of the layer, through which its backward begins",
                    "call it on that; where no gradient is wanted run under torch.no_grad()",
                )
            tensor.register_hook(lambda grad: self.backward_step(state, index))
        state.synced = True
        return tensor


class DefaultOffloadSynchronizer(OffloadSynchronizer):
    """Moves the first `num_layers` of `model_layers` layers by the documented schedule.

    Without `model_layers` the first pass finds out how many there are: its end is where its backward begins.
    """

    def __init__(
        self,
        num_layers: int,
        model_layers: int | None = None,
        *,
        double_buffering: bool = False,
        rules: Rules | None = None,
    ) -> None:
        super().__init__(model_layers, rules)
        self.num_layers, self.double_buffering = num_layers, double_buffering

    def _schedule(self, last: Pass | None) -> Schedule:
        layers = self.model_layers
        if layers is not None:
            return Schedule.of(layers, self.num_layers, self.double_buffering)
        if last is None or not last.ended:
            return Schedule.unknown(self.num_layers, self.double_buffering)
        found = len(last.layers)
        if found == 1 and last.schedule.layers is None:
            warnings.warn(
                f"{_OPERATION}: a pass entered the context once, so nothing of it can be offloaded; enter it for each "
                "layer by itself",
                stacklevel=4,
            )
        return Schedule.of(found, max(0, min(self.num_layers, found - 2)), self.double_buffering)

    def _check_entry(self) -> None:
        super()._check_entry()
        state = self.current
        if state is not None and not state.synced and torch.is_grad_enabled():
            index = len(state.layers) - 1
            self.reset()
            raise UnsupportedError(
                _OPERATION, f"an entry without sync_fn behind layer {index}", "sync_fn behind each entry",
                "write: with context: y = layer(x), then y = sync_fn(y)",
            )  # fmt: skip

    def forward_step(self, index: int) -> None:
        """Begin to copy the layer before, and release what the schedule says."""
        state = self._pass()
        state.synced = False
        state.forward_step(index)

    def backward_step(self, state: Pass, index: int) -> None:
        """Begin to bring back what the schedule says."""
        if not state.synced:
            raise UnsupportedError(
                _OPERATION, f"a backward without sync_fn behind layer {len(state.layers) - 1}",
                "sync_fn behind each entry", "write: with context: y = layer(x), then y = sync_fn(y)",
            )  # fmt: skip
        state.backward_step(index)


class ManualOffloadSynchronizer(OffloadSynchronizer):
    """The caller says when layers leave and come back; those of which it says nothing stay."""

    def _layer(self, layer: int) -> OffloadableLayerState:
        state = self._pass()
        if not isinstance(layer, int) or not 0 <= layer < len(state.layers):
            raise ArgumentError(
                "ManualOffloadSynchronizer", f"layer {layer!r}", f"0 to {len(state.layers) - 1}, the layers entered",
                "count the entries of this pass from 0",
            )  # fmt: skip
        return state.layers[layer]

    def start_offload_layer(self, layer_id: int) -> None:
        """Begin to copy what this layer of the running pass saved; it has been left."""
        layer = self._layer(layer_id)
        if self.inside_context and layer is self._pass().layers[-1]:
            raise UnsupportedError(
                "start_offload_layer", f"layer {layer_id}, which still runs", "a layer that has been left",
                "call it behind the with block",
            )  # fmt: skip
        layer.start_offload()

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Let go of the device's memory of this layer; the current stream waits for the copies."""
        self._layer(layer_id).release_activation_forward_gpu_memory()

    def start_reload_layer(self, layer_id: int) -> None:
        """Begin to bring this layer back; called before its backward reads it."""
        self._layer(layer_id).start_reload()

    def backward_step(self, state: Pass, index: int) -> None:
        """A pass ends where its backward begins; what was copied and not released stays."""
        state.ended = True
        if self.rules.weights is not None:
            self.rules.weights.at_end_of_backward()
        if state.layers[index].state == STARTED:
            state.layers[index].keep()
