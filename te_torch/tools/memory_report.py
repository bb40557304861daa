"""What a model holds in memory, layer by layer: `memory_report`, and `measure_saved` for what backward keeps.

    with measure_saved(model) as saved:
        loss = model(x).sum()
    loss.backward()
    print(memory_report(model, saved))

Bytes are those of the tensors themselves, not of an allocator's rounding. Whatever is shared (tied weights, a tensor
that two layers keep) is counted once, at the first layer that has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from te_core.errors import ArgumentError
from te_core.tensor import Tensor
from te_torch.listing import table
from te_torch.reruns import in_backward
from te_torch.state import ScalingState
from te_torch.values import check_model

#: Kinds of memory: name -> heading of its column.
KINDS = {
    "parameters": "parameters",
    "rowwise": "quantized rowwise",
    "columnwise": "quantized columnwise",
    "scales": "scales",
    "cached_weights": "cached weights",
    "fp8_state": "fp8 state",
    "buffers": "buffers",
    "gradients": "gradients",
    "main_grad": "main_grad",
    "saved": "saved for backward",
}

#: The row of what was saved by operations outside of every module.
OUTSIDE = "(outside)"


class MemoryReport:
    """Bytes by layer and kind (`KINDS`). Printable; `as_dict()` for programs."""

    def __init__(self, layers: dict[str, dict[str, int]], measured: bool) -> None:
        self.layers = layers  # only what is not zero
        self.measured = measured  # whether saved activations were

    @property
    def totals(self) -> dict[str, int]:
        """Bytes by kind, of all layers together."""
        return {kind: sum(counts.get(kind, 0) for counts in self.layers.values()) for kind in KINDS}

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.totals.values())

    def as_dict(self) -> dict[str, Any]:
        """{"layers": {name: {kind: bytes}}, "totals": {kind: bytes}, "total": bytes, "measured": bool}."""
        layers = {name: dict(counts) for name, counts in self.layers.items()}
        return {"layers": layers, "totals": self.totals, "total": self.total, "measured": self.measured}

    def __str__(self) -> str:
        totals = self.totals
        kinds = [kind for kind in KINDS if totals[kind]]
        rows = []
        for name, counts in [*self.layers.items(), ("total", totals)]:
            cells = [f"{counts[kind]:,}" if counts.get(kind) else "" for kind in kinds]
            rows.append([name or "(model)", *cells, f"{sum(counts.values()):,}"])
        text = table(["bytes", *[KINDS[kind] for kind in kinds], "total"], rows, right=True)
        if self.measured and totals["saved"]:
            return text
        nothing = "nothing: no forward that needs a gradient ran"
        return f"{text}\nsaved for backward: {nothing if self.measured else 'not measured (te_torch.measure_saved)'}"


def memory_report(model: torch.nn.Module, saved: measure_saved | None = None) -> MemoryReport:
    """What the model's layers hold now; with `saved`, also what a measured forward kept for backward.

    Returns:
        A printable report with a row for each layer, in bytes.

    Example:
        layer = te.LayerNormMLP(64, 256, device="cpu")
        with te.measure_saved(layer) as saved:
            layer(torch.randn(32, 64))
        print(te.memory_report(layer, saved))
    """
    check_model("memory_report", model)
    if saved is not None and getattr(saved, "model", None) is not model:
        raise ArgumentError("memory_report", "saved of another model", "measure_saved(model)", "measure this model")
    sizes: dict[str, dict[str, int]] = {}
    seen: set[Any] = set()
    state_of = {id(child): name for name, m in model.named_modules() for child in m.children() if _is_state(child)}
    for name, module in model.named_modules():
        counts = sizes.setdefault(state_of.get(id(module), name), dict.fromkeys(KINDS, 0))
        for kind, size in _of_module(module, seen):
            counts[kind] += size
    for name, size in {} if saved is None else saved.by_layer.items():
        sizes.setdefault(name, dict.fromkeys(KINDS, 0))["saved"] += size
    layers = {name: {k: n for k, n in counts.items() if n} for name, counts in sizes.items()}
    return MemoryReport({name: counts for name, counts in layers.items() if counts}, saved is not None)


def _is_state(module: torch.nn.Module) -> bool:
    return isinstance(module, ScalingState)


def _of_module(module: torch.nn.Module, seen: set[Any]) -> Iterator[tuple[str, int]]:
    """(kind, bytes) of everything that the module itself holds and nothing before it did."""
    for parameter in module.parameters(recurse=False):
        yield from _of_tensor(parameter, "parameters", seen)
        for kind, grad in (("gradients", parameter.grad), ("main_grad", getattr(parameter, "main_grad", None))):
            if isinstance(grad, torch.Tensor):
                yield from _of_tensor(grad, kind, seen)
    for buffer in module.buffers(recurse=False):
        yield from _of_tensor(buffer, "fp8_state" if _is_state(module) else "buffers", seen)
    for cached in _weight_cache(module).values():
        yield "cached_weights", sum(size for _, size in _of_quantized(cached, seen))


def _weight_cache(module: torch.nn.Module) -> dict[str, Any]:
    """The quantized weights that a module keeps between microbatches."""
    return getattr(module, "_weight_cache", None) or {}


def _of_tensor(t: torch.Tensor, kind: str, seen: set[Any]) -> Iterator[tuple[str, int]]:
    if hasattr(t, "to_core"):  # one of te_torch.tensors: only its copies have memory
        yield from _of_quantized(t, seen)
    elif t.device.type != "meta":
        yield kind, _once(("torch", t.device, t.data_ptr()), t.numel() * t.element_size(), seen)


def _of_quantized(t: Any, seen: set[Any]) -> Iterator[tuple[str, int]]:
    for kind, piece in _pieces(t):
        yield kind, _once(("core", piece.device, piece.ptr), piece.nbytes, seen)


def _pieces(t: Any) -> Iterator[tuple[str, Tensor]]:
    """(kind, memory) of a quantized tensor by copy. Both copies of a per-tensor format have the same scale.

    Copies of two formats come as a pair, one of which may be in high precision.
    """
    for q in t.to_core_pair() if hasattr(t, "to_core_pair") else (t.to_core(),):
        if isinstance(q, Tensor):
            yield "parameters", q
        elif q is not None:
            pieces = (
                ("rowwise", q.rowwise),
                ("columnwise", q.columnwise),
                ("scales", q.rowwise_scale),
                ("scales", q.columnwise_scale),
                ("scales", q.rowwise_amax),
                ("scales", q.columnwise_amax),
            )
            yield from ((kind, piece) for kind, piece in pieces if piece is not None)


def _once(place: tuple[Any, ...], size: int, seen: set[Any]) -> int:
    if place in seen or not size:  # an empty tensor has no place of its own
        return 0
    seen.add(place)
    return size


class measure_saved:  # noqa: N801  a context, named as a function
    """Context: counts what autograd saves in the forwards inside, by the innermost module that was running.

    Each storage is counted whole and once; parameters and buffers of the model are not. What a checkpoint keeps
    outside of autograd's saved tensors is not seen, and what it computes again in backward is not counted.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        check_model("measure_saved", model)
        self.model = model
        self.by_layer: dict[str, int] = {}
        self._running: list[str] = []
        self._hooks: list[Any] = []
        self._packing: Any = None
        # Weak references, so that nothing lives longer for having been counted; while one exists, no later storage
        # can have the same key.
        self._seen: dict[int, StorageWeakRef] = {}

    @property
    def total(self) -> int:
        """Bytes saved by all layers."""
        return sum(self.by_layer.values())

    def __enter__(self) -> measure_saved:
        if self._hooks:
            raise RuntimeError("this measure_saved is already active: make another one")
        self.by_layer.clear()
        self._seen.clear()
        caches = (_weight_cache(module).values() for module in self.model.modules())
        for t in itertools.chain(self.model.parameters(), self.model.buffers(), *caches):
            for storage in _storages(t):
                self._is_new(storage)
        for name, module in self.model.named_modules():
            self._hooks += [
                module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name), prepend=True),
                module.register_forward_hook(lambda *_: self._left(), always_call=True),
            ]
        self._packing = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)
        self._packing.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._packing.__exit__(*exc)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._running.clear()

    def _left(self) -> None:
        self._running.pop()

    def _pack(self, t: torch.Tensor) -> torch.Tensor:
        if not in_backward():
            layer = self._running[-1] if self._running else OUTSIDE
            size = sum(storage.nbytes() for storage in _storages(t) if self._is_new(storage))
            if size:
                self.by_layer[layer] = self.by_layer.get(layer, 0) + size
        return t

    def _is_new(self, storage: torch.UntypedStorage) -> bool:
        reference = StorageWeakRef(storage)
        return self._seen.setdefault(reference.cdata, reference) is reference


def _storages(t: Any) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor; of a quantized one, those of its copies."""
    if not hasattr(t, "to_core"):
        if t.device.type != "meta":
            yield t.untyped_storage()
        return
    for _, piece in _pieces(t):
        owner: Any = piece
        while isinstance(owner, Tensor):
            owner = owner.owner
        yield from _storages(owner)
