"""What a module's parts ran, noted while it looks whether they can run as one (te_torch/base/graph.py)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Of(NamedTuple):
    """Source of a layer's input: a parameter of a part of the module, or several that are joined."""

    unit: Any
    names: tuple[str, ...]


class Drawn(NamedTuple):
    """Source of a layer's input that is a random pair, drawn in this fork; those of a low `order` are drawn first."""

    fork: Any
    order: int = 0


class Noted(NamedTuple):
    """A call that ran while somebody noted calls."""

    call: Any  # te_torch.calls.Call
    inputs: Sequence[torch.Tensor | None]
    outputs: Sequence[torch.Tensor]
    unit: Any = None  # the module that made it
    sources: Sequence[Any] = ()  # where the module's inputs of the layer came from (te_torch/base/plans.py)
    state: Any = None
    extra: Any = None  # te_torch.function.Extra
    again: bool = False  # a checkpoint ran it once more
    weights: Sequence[str] = ()  # whose `_extra` the module asked for, with this `is_first_microbatch`
    first_microbatch: Any = None


class Notes:
    """What was noted while a module ran."""

    def __init__(self) -> None:
        self.calls: list[Noted] = []
        #: Where tensors came from that no call gave: by their ids, which they hold.
        self.sources: dict[int, tuple[torch.Tensor, Any]] = {}


class _Noting(threading.local):
    """Where the calling thread's calls are noted; nearly always nowhere."""

    notes: Notes | None = None

    @contextmanager
    def begun(self) -> Iterator[Notes]:
        """Note what runs inside; who noted before does not see it."""
        before, self.notes = self.notes, Notes()
        try:
            yield self.notes
        finally:
            self.notes = before

    def by(self, unit: Any, sources: Sequence[Any], weights: Sequence[str] = (), first_microbatch: Any = None) -> None:
        """Say which module made the last call, where its inputs came from, and whose `_extra` it asked for."""
        if self.notes is not None and self.notes.calls:
            last = self.notes.calls[-1]
            first = first_microbatch if weights else None
            self.notes.calls[-1] = last._replace(unit=unit, sources=sources, weights=weights, first_microbatch=first)

    def came(self, t: torch.Tensor, source: Any) -> None:
        """Say where a tensor came from that a later call may take."""
        if self.notes is not None:
            self.notes.sources[id(t)] = t, source

    def drawn(self, pair: torch.Tensor, fork: Any) -> None:
        """Say that a random pair was drawn in this fork, behind those that were drawn before."""
        if self.notes is not None:
            self.notes.sources[id(pair)] = pair, Drawn(fork, len(self.notes.sources))


noting = _Noting()
