"""What a tracing compiler needs of quantized tensors: a quantizer as a constant, core views of listed buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_torch.runtime import to_core, to_core_shape
from te_torch.tensors.buffers import Buffers, core_of, form_of


@dataclass(slots=True, eq=False)
class AsConstant:
    """A quantizer as a compiler's constant: guarded by its rule, and by the tensors it reads, not copied."""

    quantizer: Any

    def _key(self) -> tuple[Any, ...]:
        q = self.quantizer
        if q is None or q._VALUE is not None:
            return (q,)

        def plain(v: Any) -> Any:
            return id(v) if isinstance(v, torch.Tensor) else AsConstant(v) if hasattr(v, "rowwise_usage") else v

        return (type(q), *sorted((k, plain(v)) for k, v in vars(q).items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AsConstant) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __deepcopy__(self, memo: Any) -> AsConstant:
        return self


def core_from_inner(meta: tuple[Any, ...], tensors: Sequence[torch.Tensor], *, shapes_only: bool = False) -> Any:
    """The core's view of what `flatten_inner()` and `inner_meta()` of a storage gave.

    Of an identity storage: the plain matrix; of a hybrid one: the pair of its copies.
    """
    if meta[0] == "identity":
        convert = to_core_shape if shapes_only or tensors[0].is_meta else to_core
        return convert(tensors[0].contiguous()).matrix()
    if meta[0] == "hybrid":
        made, at = [], 0
        for part in meta[1:]:
            count, inner = part or (0, None)
            made.append(inner and core_from_inner(inner, tensors[at : at + count], shapes_only=shapes_only))
            at += count
        return tuple(made)
    key, shape, there = meta
    given = iter(tensors)
    buffers = Buffers(*[next(given) if h else None for h in there])
    return core_of(form_of(key), shape, buffers, shapes_only)
