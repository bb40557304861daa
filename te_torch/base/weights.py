"""What GEMM weights need beyond a plain call: the cache of quantized weights, `main_grad`, delayed gradients.

Without `is_first_microbatch`, `fuse_wgrad_accumulation` and `delay_wgrad_compute` nothing here runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.product import LinearSpec, Needs, Product, weight_operand
from te_core.precision import Precision
from te_core.quantize.state import Scales
from te_core.quantized import QuantizedTensor
from te_torch.base.quantized_init import initialising
from te_torch.base.replicated import check_reduced
from te_torch.function import Extra
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import TO_CORE, outside_autocast, runtime_for, to_core
from te_torch.surroundings import check_surroundings
from te_torch.values import check_flags


@dataclass(eq=False, repr=False, slots=True)
class CachedWeight:
    """A weight quantized for several microbatches, and of which contents of which memory it is the copy."""

    key: tuple[Any, ...]
    storages: list[Any]  # held, so that no other tensor gets their address
    product: Product  # by which it is quantized
    dtype: torch.dtype  # of what is quantized
    value: QuantizedTensor

    def fits(self, key: tuple[Any, ...], columnwise: bool) -> bool:
        """Whether weights of this key are what was quantized, and every copy is there that will be read."""
        return self.key == key and (not columnwise or self.value.columnwise is not None)

    def to_core(self) -> QuantizedTensor:
        """The quantized weight."""
        return self.value


def _key(module: Any, weights: Sequence[torch.Tensor], precision: Precision) -> tuple[Any, ...]:
    return (precision.serial, *[module._contents_of(w) for w in weights])


class Gradients:
    """Weight gradients that wait for `backward_dw()`, by weight, oldest first."""

    def __init__(self, count: int) -> None:
        self.queues: list[list[Any]] = [[] for _ in range(count)]

    def __deepcopy__(self, memo: Any) -> Gradients:
        return Gradients(len(self.queues))

    def __getstate__(self) -> dict[str, Any]:
        return {"queues": [[] for _ in self.queues]}

    def pop(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Compute the oldest waiting gradient of each weight; None where it went into `main_grad`."""
        made: list[torch.Tensor | None] = []
        for queue, weight in zip(self.queues, weights, strict=True):
            if not queue:
                made.append(None)
                continue
            dw = queue.pop(0)(runtime_for(weight))
            made.append(None if dw is None else dw.owner.view(weight.shape))
        return made


def extra_for(
    module: Any,
    names: Sequence[str],
    weights: Sequence[torch.Tensor],
    parts: Sequence[Sequence[torch.Tensor]],
    precisions: Sequence[Precision | None],
    scales: Scales | None,
    first_microbatch: bool | None,
) -> Extra | None:
    """The `Extra` of a forward with these weights (each made of its `parts`), or None for a plain call."""
    ready: list[QuantizedTensor | None] | None = None
    if first_microbatch is not None and first_microbatch is not True and first_microbatch is not False:
        check_flags(f"{type(module).__name__}.forward", is_first_microbatch=first_microbatch)
        first_microbatch = bool(first_microbatch)
    if first_microbatch is not None and any(p is not None for p in precisions):
        ready = [
            _cached(module, name, i, weight, part, precision, scales, first_microbatch)
            for i, (name, weight, part, precision) in enumerate(zip(names, weights, parts, precisions, strict=True))
        ]
    queue = module.wgrad_store.queues if module.delay_wgrad_compute else None
    if queue is not None and module._gathered and torch.is_grad_enabled() and any(w.requires_grad for w in weights):
        raise UnsupportedError(
            type(module).__name__,
            "delay_wgrad_compute with weights that fully_shard has sharded",
            "gradients that backward computes: FSDP2 sums and scatters them there",
            "leave delay_wgrad_compute out, or shard another unit",
        )
    if ready is None and queue is None and not module.fuse_wgrad_accumulation:
        return None
    parameters = [part[0] if len(part) == 1 else weight for part, weight in zip(parts, weights, strict=True)]
    return Extra(ready, module.fuse_wgrad_accumulation, first_microbatch, queue, parameters=parameters)


def _cached(
    module: Any,
    name: str,
    gemm: int,
    weight: torch.Tensor,
    parts: Sequence[torch.Tensor],
    precision: Precision | None,
    scales: Scales | None,
    first_microbatch: bool,
) -> QuantizedTensor | None:
    """The quantized weight of the running group of microbatches: made in the first, found in the others."""
    if precision is None or precision.weight is None or isinstance(weight, QuantizedTorch):
        return None
    key = _key(module, parts, precision)
    if None in key:  # nothing would tell that they have changed
        return None
    columnwise = torch.is_grad_enabled() and precision.backward is None
    cached: CachedWeight | None = module._weight_cache.get(name)
    if first_microbatch or cached is None or not cached.fits(key, columnwise):
        needs = Needs(input=columnwise, weight=False, bias=False)
        spec = LinearSpec(TO_CORE[weight.dtype], precision, needs, module._requests()[gemm])
        product = Product(spec, scales, gemm)
        value = _quantized(weight, product)
        if value is None:
            return None
        storages = [module._storage_of(part) for part in parts]
        cached = module._weight_cache[name] = CachedWeight(key, storages, product, weight.dtype, value)
    return cached.value


def _quantized(weight: torch.Tensor, product: Product) -> QuantizedTensor | None:
    """The copy that every microbatch can read; None where a recipe asks for two formats."""
    check_surroundings()
    with torch.no_grad():
        uses = weight_operand(runtime_for(weight), to_core(weight.detach().contiguous()), product, None)
    return uses.rows if isinstance(uses.rows, QuantizedTensor) and uses.columns is uses.rows else None


def cache_again(module: Any, name: str) -> None:
    """Quantize a weight that is in the cache anew, as a first microbatch does, into memory of its own."""
    cached: CachedWeight = module._weight_cache[name]
    parts = module._parts_of(name)
    with torch.no_grad(), outside_autocast(parts[0]):
        weight = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(cached.dtype)
        value = _quantized(weight, cached.product)
    assert value is not None  # it was one before
    key = _key(module, parts, cached.product.spec.precision)  # type: ignore[arg-type]
    storages = [module._storage_of(part) for part in parts]
    module._weight_cache[name] = CachedWeight(key, storages, cached.product, cached.dtype, value)


@torch.no_grad()
def add_gradients(module: Any, weights: Sequence[torch.Tensor]) -> None:
    """Compute the oldest waiting gradients of a module's weights, and give them theirs."""
    check_reduced(module)
    for weight, dw in zip(weights, module.wgrad_store.pop(weights), strict=True):
        add_gradient(weight, dw)


def add_gradient(weight: torch.Tensor, dw: torch.Tensor | None) -> None:
    """Give a weight a gradient that was computed later."""
    if dw is None:
        return
    if weight.grad is None:
        weight.grad = dw if dw.dtype == weight.dtype else dw.to(weight.dtype)
    else:
        weight.grad.add_(dw)


def check_whole(operation: str, parts: Collection[str], special: bool) -> None:
    """Fused and delayed weight gradients (`special`) need a weight in one piece, as does one that is held quantized."""
    if len(parts) > 1 and special:
        raise ArgumentError(
            operation,
            f"fuse_wgrad_accumulation or delay_wgrad_compute with a weight of {len(parts)} parts",
            "a weight in one piece",
            "leave parameters_split out",
        )
    if len(parts) > 1 and initialising():
        raise UnsupportedError(
            operation,
            f"parameters_split with {len(parts)} parts inside quantized_model_init",
            "a weight in one piece: it is held as one quantized tensor",
            "leave parameters_split out, or construct the module outside",
        )
