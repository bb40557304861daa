"""Weights that are quantized once for several microbatches: their casts are a graph of their own, replayed on the first
microbatch; what is captured of the modules reads the results.

So later microbatches launch nothing for their weights, and no activation is kept twice. A flag on the device that tells
the casts to do nothing would launch them all the same, and every cast would have to read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from te_torch.base.module import BaseModule
from te_torch.base.weights import CachedWeight, cache_again
from te_torch.training.graphs import device as seam


class Weights:
    """The casts of the cached weights of some modules, captured together."""

    def __init__(self, modules: Iterable[BaseModule]) -> None:
        self.names = [(m, name) for m in modules for name in m._weight_cache]
        self.graph: Any = None
        self.values: list[CachedWeight] = []
        self.users = 0  # callables that read them
        self.versions: list[Any] | None = None  # of the weights when they were cast last

    def capture(self, generators: Iterable[torch.Generator], pool: Any) -> None:
        """Cast all of them into memory that stays, where the modules find it from now on."""
        if self.names:
            self.graph = seam.device.graph(generators)
            self.values = self.graph.capture(self._cast, pool)

    def _cast(self) -> list[CachedWeight]:
        for module, name in self.names:
            cache_again(module, name)
        return [module._weight_cache[name] for module, name in self.names]

    def due(self, first: bool) -> list[Any]:
        """The graph, if it has to be replayed now: in a first microbatch, or since a weight has changed."""
        if self.graph is None:
            return []
        versions = [p._version for module, name in self.names for p in module._parts_of(name)]
        if not first and versions == self.versions:
            return []
        self.versions = versions
        return [self.graph]

    def reset(self) -> None:
        """Let go of the graph and of the copies."""
        if self.graph is not None:
            self.graph.reset()
        self.graph, self.values = None, []


def weights_of(modules: Iterable[torch.nn.Module]) -> tuple[list[Weights], dict[int, list[Weights]]]:
    """(all, those that each module reads, by its id): a part that several modules share is cast with the first."""
    owners: dict[BaseModule, Weights] = {}
    everything: list[Weights] = []
    read: dict[int, list[Weights]] = {}
    for module in modules:
        ours = [part for part in module.modules() if isinstance(part, BaseModule)]
        own = [part for part in ours if part not in owners and part._weight_cache]
        if own:
            made = Weights(own)
            everything.append(made)
            owners.update(dict.fromkeys(own, made))
        read[id(module)] = list(dict.fromkeys(owners[part] for part in ours if part in owners))
    return everything, read
