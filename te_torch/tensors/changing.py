"""Tensors that are changed in place again and again, as optimizers do: what each change needs is made once.

A change reads the values, lets an operator change them, and quantizes them into the same memory: between the two the
core's views of buffers and values stay, and so does the cast. Shards of one tensor with current scaling agree on its
maximum: those of a list, which fused and foreach optimizers change, in one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_core import dtypes
from te_core.ops import raw as ops
from te_core.quantized import Cast
from te_core.tensor import Tensor
from te_torch.runtime import TO_CORE, runtime_for, to_core, to_torch
from te_torch.tensors import run


class Kept:
    """What all changes of a tensor share, for as long as it has these buffers and this quantizer."""

    __slots__ = ("cast", "group", "kind", "lasting", "nominal", "pointers", "q", "rule", "views")

    @classmethod
    def of(cls, t: Any) -> Kept | None:
        """That of a tensor; None where a change has to look at more."""
        if not t._CHANGES:
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
        made = cls()
        made.views, made.q, made.rule = t._core_views, q, rule
        made.nominal, made.kind, made.group = t.dtype, TO_CORE[t.dtype], group
        made.lasting, made.pointers = lasting, tuple([s.data_ptr() for s in lasting])
        scale, amax = [to_core(s.view(1)) for s in lasting] or (None, None)
        made.cast = Cast(
            rule.format,
            rowwise=True,
            columnwise=q.columnwise is not None,
            epsilon=rule.epsilon,
            power_of_two=rule.power_of_two,
            scale=scale,
            amax=amax,
        )
        return made

    cast: Cast
    group: Any
    kind: Any
    lasting: tuple[torch.Tensor, ...]
    nominal: torch.dtype
    pointers: tuple[int, ...]
    q: Any
    rule: Any
    views: Any

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
            dist.all_reduce(to_torch(amax), dist.ReduceOp.MAX, group=kept.group)
            cast = cast.scaled_by(amax)
        ops.quantize(rt, self.core, cast, out=kept.q)
        self.t._wrote()

    def _in_place(self) -> bool:
        """Whether the operator left the values where they were."""
        dense = self.dense
        return dense.data_ptr() == self.core.ptr and dense.shape == self.t.shape and dense.is_contiguous()

    def end_with(self, amax: torch.Tensor, core: Tensor) -> None:
        """The same, once the maximum of all shards is known."""
        kept = self.kept
        if kept is None or not self._in_place():
            quantizer = self.t._quantizer.copy()
            quantizer.agreed = amax
            self.t._update(quantizer, self.dense, None)
            return
        ops.quantize(runtime_for(self.dense), self.core, kept.cast.scaled_by(core), out=kept.q)
        self.t._wrote()


def end_all(changes: Sequence[Change]) -> None:
    """End several changes. Which of them agree together must not depend on what a rank has of a tensor."""
    together: dict[Any, list[Change]] = {}
    for change in changes:
        t = change.t
        group = t._group_of_shards
        if group is None or t._shares_scale():
            change.end()
        else:
            together.setdefault((group, t.device), []).append(change)
    for (group, _), some in together.items():
        _end_together(group, some)


def _end_together(group: Any, changes: list[Change]) -> None:
    first = changes[0].dense
    maxima = torch.empty(len(changes), dtype=torch.float32, device=first.device)
    rt, whole = runtime_for(maxima), to_core(maxima)
    places = [Tensor(whole.ptr + 4 * i, (1,), dtypes.float32, whole.device, maxima) for i in range(len(changes))]
    for change, place in zip(changes, places, strict=True):
        ops.amax(rt, change.core if change.kept is not None and change._in_place() else _core(change.dense), out=place)
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    for change, amax, place in zip(changes, maxima.split(1), places, strict=True):
        change.end_with(amax, place)


def _core(dense: torch.Tensor) -> Tensor:
    return to_core(run.plain(dense))
