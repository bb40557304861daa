"""Tensors that are changed in place again and again, as optimizers do: what each change needs is made once.

A change reads the values, lets an operator change them, and quantizes them into the same memory: between the two the
core's views of buffers and values stay, and so does the cast. Tensors of a list, which fused and foreach optimizers
change, are quantized in one launch where they are alike. Shards of one tensor with current scaling agree on its
maximum: those of a list in one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_core.ops import raw as ops
from te_core.quantize.state import element
from te_core.quantized import Cast
from te_torch.exchange import all_reduce
from te_torch.runtime import TO_CORE, runtime_for, to_core, to_torch
from te_torch.tensors import run
from te_torch.tensors.views import OfOneTensor

_AGREEMENT = "maxima of shards"  # in errors


@dataclass(slots=True, eq=False)
class Kept(OfOneTensor):
    """What all changes of a tensor share, for as long as it has these buffers and this quantizer."""

    views: Any
    q: Any
    rule: Any
    nominal: torch.dtype
    kind: Any
    group: Any
    lasting: tuple[torch.Tensor, ...]
    pointers: tuple[int, ...]
    cast: Cast
    sort: tuple[Any, ...]  # what tensors have in common that are quantized in one launch

    @classmethod
    def of(cls, t: Any) -> Kept | None:
        """That of a tensor; None where a change has to look at more."""
        if not t._CHANGES or t._memory.margin is not None:
            return None
        kept = t._kept
        if kept is None or not kept.fits(t):
            kept = t._kept = cls._made(t)
        return kept if kept is None or not t._seen.part or not t._shares_scale() else None

    @classmethod
    def _made(cls, t: Any) -> Kept | None:
        quantizer, group = t._quantizer, t._group_of_shards
        lasting = None if quantizer is None else quantizer._lasting()
        first = t._row_data
        if lasting is None or first is None or t.dtype not in TO_CORE or not t.numel() or t._folded() is not None:
            return None
        if not run.is_real(first) or first.is_meta or (t._format.scaling == "tensor" and t._col_data is not None):
            return None  # a transpose may have fallen behind
        rule, q = quantizer.operand, t.to_core()
        if t._core_views is None or rule.format is not t._format:
            return None
        scale, amax = [to_core(s.view(1)) for s in lasting] or (None, None)
        cast = Cast(
            rule.format,
            rowwise=True,
            columnwise=q.columnwise is not None,
            epsilon=rule.epsilon,
            power_of_two=rule.power_of_two,
            scale=scale,
            amax=amax,
        )
        pointers = tuple([s.data_ptr() for s in lasting])
        sort = (first.device, q.shape[1], t.dtype, cast.key, rule.epsilon, rule.power_of_two)
        return cls(t._core_views, q, rule, t.dtype, TO_CORE[t.dtype], group, lasting, pointers, cast, sort)

    def fits(self, t: Any) -> bool:
        """Whether a change of the tensor now is one as before."""
        quantizer = t._quantizer
        if quantizer is None or self.views is not t._core_views or self.nominal is not t.dtype:
            return False
        if quantizer.operand is not self.rule or not self.views.fit(t):
            return False
        lasting = quantizer._lasting()
        if lasting is None or len(lasting) != len(self.lasting) or t._group_of_shards is not self.group:
            return False
        for now, then, at in zip(lasting, self.lasting, self.pointers, strict=True):
            if now is not then or now.data_ptr() != at:
                return False
        return True


class Change(NamedTuple):
    """A tensor, its values in memory of their own, and, where there is one, the core's view of them."""

    t: Any
    kept: Kept | None
    dense: torch.Tensor
    core: Any
    amax: torch.Tensor | None = None  # the maximum of the values, where it is known: float32 [1]

    @classmethod
    def of(cls, t: Any) -> Change:
        """That which begins now."""
        kept = Kept.of(t)
        if kept is None:
            return cls(t, None, t._dense_values(t.dtype), None)
        core = ops.dequantize(runtime_for(t._row_data), kept.q, kept.kind)
        dense = to_torch(core)
        return cls(t, kept, dense if dense.shape == t.shape else dense.view(t.shape), core)

    def end(self) -> None:
        """Quantize the values into the tensor."""
        kept = self.kept
        if kept is None or not self._in_place():
            self.t._requantize(self.dense)
            return
        rt, cast = runtime_for(self.dense), kept.cast
        if kept.group is not None:
            amax = ops.amax(rt, self.core)
            all_reduce(_AGREEMENT, to_torch(amax), kept.group, "max")
            cast = cast.scaled_by(amax)
        ops.quantize(rt, self.core, cast, out=kept.q)
        self.t._wrote()

    def _in_place(self) -> bool:
        """Whether the operator left the values where they were."""
        dense = self.dense
        return dense.data_ptr() == self.core.ptr and dense.shape == self.t.shape and dense.is_contiguous()


def change_to(t: Any, values: torch.Tensor, amax: torch.Tensor | None = None) -> Change:
    """The change of a tensor to given values, dense and of its shape, in any activation type."""
    kept = Kept.of(t)
    return Change(t, kept, values, None if kept is None else to_core(values).matrix(), amax)


def end_all(changes: Sequence[Change]) -> None:
    """End several changes. Which of them agree together must not depend on what a rank has of a tensor."""
    agreeing: dict[Any, list[Change]] = {}
    alike: dict[Any, list[tuple[Change, Cast]]] = {}
    for change in changes:
        t, kept = change.t, change.kept
        group = t._group_of_shards if kept is None else kept.group
        if kept is None and group is not None and t._shares_scale():
            group = None
        if group is not None:
            agreeing.setdefault((group, t.device), []).append(change)
        elif kept is not None and change._in_place():
            cast, amax = kept.cast, change.amax
            known = amax is not None and cast.format.scaling == "tensor" and cast.scale is None
            alike.setdefault((*kept.sort, known), []).append(
                (change, cast.scaled_by(to_core(amax)) if known and amax is not None else cast)
            )
        else:
            change.end()
    for (group, _), some in agreeing.items():
        _agree(group, some, alike)
    for pairs in alike.values():  # values of one width and type, by one rule: in one launch where the format has such
        rt = runtime_for(pairs[0][0].dense)
        outs = [change.kept.q for change, _ in pairs]  # type: ignore[union-attr]
        ops.quantize_many(rt, [change.core for change, _ in pairs], [cast for _, cast in pairs], outs=outs)
        for change, _ in pairs:
            change.t._wrote()


def _agree(group: Any, changes: list[Change], alike: dict[Any, list[tuple[Change, Cast]]]) -> None:
    """Find the maxima of all shards in one message, and end what is not to be quantized with others."""
    maxima = torch.empty(len(changes), dtype=torch.float32, device=changes[0].dense.device)
    rt, whole = runtime_for(maxima), to_core(maxima)
    there = [change.kept is not None and change._in_place() for change in changes]
    cores = [c.core if known else to_core(run.plain(c.dense)) for c, known in zip(changes, there, strict=True)]
    given = [change.amax for change in changes if change.amax is not None]
    if len(given) == len(changes):
        torch.cat(given, out=maxima)
    elif len({core.dtype for core in cores}) == 1:
        ops.amax_many(rt, cores, out=whole)
    else:
        for i, core in enumerate(cores):
            ops.amax(rt, core, out=element(whole, i))
    all_reduce(_AGREEMENT, maxima, group, "max")
    for i, (change, known) in enumerate(zip(changes, there, strict=True)):
        kept = change.kept
        if known and kept is not None:
            alike.setdefault((*kept.sort, group), []).append((change, kept.cast.scaled_by(element(whole, i))))
        else:
            quantizer = change.t._quantizer.copy()
            quantizer.agreed = maxima[i : i + 1]
            change.t._update(quantizer, change.dense, None)
