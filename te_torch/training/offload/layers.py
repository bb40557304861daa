"""One layer of one pass: what it saved for backward, and how far on its way that is."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from te_core.errors import UnsupportedError
from te_torch.offloading import OF_WEIGHT, STAYS
from te_torch.quantized import QuantizedTorch
from te_torch.training.offload import device
from te_torch.training.offload.blocks import Block, HostBuffers, Quantized, Stays
from te_torch.training.offload.device import THRESHOLD, Moved, Pair, Side
from te_torch.training.offload.weights import Weight, Weights, parameter_of

HERE, STARTED, FINISHED, RELOADING = "not_offloaded", "offload_started", "offload_finished", "reload_started"


@dataclass(eq=False)
class Rules:
    """What travels, over which stream, into which memory; for all layers of a context."""

    activations: bool = True
    weights: Weights | None = None
    stream: Any = None
    hosts: HostBuffers = field(default_factory=lambda: HostBuffers(False))
    _sides: dict[torch.device, Side | None] = field(default_factory=dict)

    def side_of(self, where: torch.device) -> Side | None:
        """The side of a device whose tensors travel."""
        if where not in self._sides:
            self._sides[where] = device.side_of(where, self.stream)
        return self._sides[where]


class OffloadableLayerState:
    """What a layer saved for backward, on its way to the host and back.

    `state` goes from "not_offloaded" over "offload_started" (the copy was begun), "offload_finished" (the device's
    memory was let go of) and "reload_started" (the copy back was begun) to "not_offloaded" again, when the first tensor
    is read. The wrong order is an error.
    """

    def __init__(
        self,
        offload_stream: Any = None,
        retain_pinned_cpu_buffers: bool = False,
        *,
        rules: Rules | None = None,
        index: int = 0,
        blocks: weakref.WeakValueDictionary[int, Block] | None = None,
    ) -> None:
        self.rules = rules or Rules(stream=offload_stream, hosts=HostBuffers(retain_pinned_cpu_buffers))
        self.index = index
        self.state = HERE
        self.offloaded_bytes = 0
        self._known = weakref.WeakValueDictionary() if blocks is None else blocks  # of the whole pass, by storage
        self._blocks: list[weakref.ref[Block]] = []
        self._weights: dict[int, Weight] = {}
        self._tickets: list[tuple[Side, Any]] = []
        self._moving: list[weakref.ref[Moved]] = []  # of what copies are on their way

    # ------------------------------------------------------------------------------------ what is saved

    def push_tensor(self, t: torch.Tensor) -> Any:
        """What the graph holds in the place of a tensor."""
        parameter = parameter_of(t)
        weights = self.rules.weights
        if parameter is not None:
            if weights is not None and not hasattr(parameter, STAYS):
                for weight in weights.of(parameter, self.rules.side_of):
                    self._weights[id(weight)] = weight
                    weight.users.add(self)
            return Stays(t)
        travels = self.rules.activations if not hasattr(t, OF_WEIGHT) else weights is not None
        if not travels or hasattr(t, STAYS) or (t._is_view() and hasattr(t._base, STAYS)):
            return self._stays(t)
        if isinstance(t, QuantizedTorch):
            return self._push_quantized(t)
        side = self._side(t)
        return Stays(t) if side is None else self._block(t, side).add(t)

    def _side(self, t: torch.Tensor) -> Side | None:
        """Where the tensor's memory travels; None: it stays."""
        if type(t) is not torch.Tensor or t.layout is not torch.strided or t.is_conj() or t.is_neg():
            return None
        small = t.untyped_storage().nbytes() < THRESHOLD  # whatever is a view of it is, too
        return None if small or not t.numel() else self.rules.side_of(t.device)

    def _push_quantized(self, t: Any) -> Any:
        if t.numel() < THRESHOLD:
            return self._stays(t)
        names, meta = t.__tensor_flatten__()
        buffers = {id(buffer) for buffer in t.flatten_inner()}
        inner = {name: getattr(t, name) for name in names}
        # What a quantizer reads and raises is its state's: that does not travel.
        parts = {name: (self.push_tensor if id(b) in buffers else self._stays)(b) for name, b in inner.items()}
        return Quantized(t, meta, parts)

    def _block(self, t: torch.Tensor, side: Side) -> Block:
        """The memory that the tensor is a view of."""
        key = t.untyped_storage()._cdata
        block = self._known.get(key)
        if block is None or not block.takes(t):
            block = self._known[key] = Block(t, side)
        if self not in block.users:
            block.users.add(self)
            self._blocks.append(weakref.ref(block))
        return block

    def _stays(self, t: torch.Tensor) -> Stays:
        """A tensor that is not to travel: neither does any other view of its memory."""
        side = None if isinstance(t, QuantizedTorch) else self._side(t)
        kept = Stays(t)
        if side is not None:
            block = self._known.get(t.untyped_storage()._cdata)
            if block is not None:
                block.stays = True
        return kept

    def pop_tensor(self, held: Any) -> torch.Tensor:
        """The tensor of which `push_tensor` made this."""
        if self.state == FINISHED:
            raise _wrong_order("pop_tensor", self, "start_reload", RELOADING)
        if self.state == RELOADING:
            self._land()
            self.state = HERE
        found: torch.Tensor = held.tensor()
        return found

    # ---------------------------------------------------------------------------------------- its journey

    def start_offload(self) -> None:
        """Begin to copy what was saved to the host."""
        self._expect(HERE, "start_offload")
        blocks = [block for ref in self._blocks if (block := ref()) is not None and block.worth_it()]
        self.rules.hosts.give(self.index, blocks)
        pairs: list[tuple[Moved, Pair]] = []
        for block in blocks:
            block.started = True
            assert block.host is not None
            pairs.append((block, (block.host, block.source())))
        leaving = [w for w in self._weights.values() if not w.away and w.leaving is not self._known]
        pairs += [(w, w.leave(self._known)) for w in leaving]
        self.offloaded_bytes = sum(source.numel() for _, (_, source) in pairs)
        self._copy(pairs, of_device=1)
        self.state = STARTED

    def release_activation_forward_gpu_memory(self) -> None:
        """Let go of the device's memory; what the current stream does next waits for the copies."""
        self._expect(STARTED, "release_activation_forward_gpu_memory")
        self._land()
        for ref in self._blocks:
            block = ref()
            if block is not None:
                block.users.discard(self)
                if not block.users:
                    block.release()
        if self.rules.weights is not None:
            self.rules.weights.release(self, self._known, self._weights.values())
        self.state = FINISHED

    def start_reload(self) -> None:
        """Begin to copy back what was let go of."""
        self._expect(FINISHED, "start_reload")
        pairs: list[tuple[Moved, Pair]] = []
        back = [block for ref in self._blocks if (block := ref()) is not None and block.away]
        pairs += [(block, block.come_back()) for block in back]
        if self.rules.weights is not None:
            pairs += self.rules.weights.returning(list(self._weights.values()))
        tickets = self._copy(pairs, of_device=0)
        for block in back:
            block.ticket = tickets[id(block.side)]
        self.state = RELOADING

    def keep(self) -> None:
        """What was copied and never let go of stays: the copies were for nothing."""
        if self.state == STARTED:
            self._land()
            self.state = HERE

    def release_all_memory(self) -> None:
        """Forget the layer: what the graph does not hold of it is gone, and its weights are back."""
        self._land()
        if self.rules.weights is not None:
            self.rules.weights.bring_back(list(self._weights.values()))
        self._blocks.clear()
        self._weights.clear()
        self.state = HERE

    def _copy(self, pairs: list[tuple[Moved, Pair]], of_device: int) -> dict[int, Any]:
        """Begin the copies, those of a side together; `of_device` says which of a pair is on the device."""
        by_side: dict[int, tuple[Side, list[Pair]]] = {}
        for moved, pair in pairs:
            by_side.setdefault(id(moved.side), (moved.side, []))[1].append(pair)
            moved.moving = pair[of_device]
            self._moving.append(weakref.ref(moved))
        tickets = {}
        for key, (side, of_side) in by_side.items():
            tickets[key] = side.copy(of_side)
            self._tickets.append((side, tickets[key]))
        return tickets

    def _land(self) -> None:
        """Let the current stream wait for the copies on their way."""
        for side, ticket in self._tickets:
            side.wait(ticket)
        for moving in self._moving:
            moved = moving()
            if moved is not None:
                moved.moving = None
        self._tickets, self._moving = [], []
        if self.state == RELOADING:
            for ref in self._blocks:
                block = ref()
                if block is not None and block.device is not None:
                    block.arrived()

    def _expect(self, state: str, step: str) -> None:
        if self.state != state:
            raise _wrong_order(step, self, _BEFORE[state], state)


_BEFORE: dict[str, str] = {
    HERE: "nothing else",
    STARTED: "start_offload",
    FINISHED: "release_activation_forward_gpu_memory",
}


def _wrong_order(step: str, layer: OffloadableLayerState, before: str, state: str) -> UnsupportedError:
    return UnsupportedError(
        step,
        f"layer {layer.index} in state {layer.state!r}",
        f"state {state!r}",
        f"call {before} before it" if before != "nothing else" else "call it once a pass, before the other steps",
    )
