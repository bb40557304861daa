"""Partial results of one attention: over some of the keys each, put together. What context parallelism adds up.

A partial output comes with its statistics, the logs of its sums of exponentials (te_core/ops/attention.py). Outputs are
weighted by them, in float32; a sink is a term of the sum that no partial has. Gradients of q, k and v are plain sums.

Tensors may have any strides whose last one is 1, so halves of rows are views. In and out may be one tensor: each
element is read by whom it is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from te_core import dtypes
from te_core.attention import FORMATS, SOFTMAX
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.ops import _check
from te_core.runtime import Runtime
from te_core.tensor import Tensor

_DIMENSIONS = 5  # that a sum takes at most
#: Where token, batch and head are in an output, and in its statistics [b, h, s] or [t, h].
_PLACES = {"sbhd": ((0, 1, 2), (2, 0, 1)), "bshd": ((1, 0, 2), (2, 0, 1)), "thd": ((0, None, 1), (0, None, 1))}

Steps = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SumSpec:
    """Sizes from the outermost dimension to the last, and of a, b and out the type and the strides; b may be None."""

    sizes: Steps
    types: tuple[DType, DType | None, DType]
    steps: tuple[Steps, Steps, Steps]
    off: int  # how far addresses are off the 16-byte grid


@dataclass(frozen=True, slots=True)
class MergeSpec:
    """A sum over (token, batch, head, width), with the strides over (token, batch, head) of each one's statistics."""

    sum: SumSpec
    stats: tuple[Steps, Steps, Steps]
    softmax: str
    form: str


@dataclass(frozen=True, slots=True)
class SinkGradSpec:
    """Sizes (token, batch, head, width); of dy, out and stats the strides over them."""

    sizes: tuple[int, int, int, int]
    dtype: DType
    steps: tuple[Steps, Steps, Steps]
    off: int
    form: str


class MergeOperands(NamedTuple):
    """What a merge reads and writes."""

    a: Tensor
    a_stats: Tensor
    b: Tensor | None
    b_stats: Tensor | None
    out: Tensor
    stats: Tensor | None
    sink: Tensor | None


def attention_merge(
    rt: Runtime,
    a: Tensor,
    a_stats: Tensor,
    b: Tensor | None,
    b_stats: Tensor | None,
    *,
    out: Tensor,
    stats: Tensor | None,
    form: str,
    softmax: str = "vanilla",
    sink: Tensor | None = None,
) -> None:
    """The output over the keys of both, into `out`, and its statistics, into `stats`:

        s = log(exp(a_stats) + exp(b_stats) + sink term),   out = a exp(a_stats - s) + b exp(b_stats - s)

    in float32, rounded once to the type of out. a, b and out [.., h, d] in the format `form`, each float32 or the
    activation dtype; statistics float32 [b, h, s] or thd [t, h]. out may be a or b, and stats their statistics.
    Without b the output of a alone is rounded and gets the sink. The sink term is nothing ("vanilla"), exp(0)
    ("off-by-one") or exp(sink) ("learnable": float32 [h]): ask for it once, in the last merge.

    Statistics of +infinity or -infinity say that the row has seen no key: what stands there, NaN too, counts for
    nothing. Rows that no partial has a key for get zeros and +infinity, with a sink too.
    """
    op = "attention_merge"
    off = _check.off(a, b, out)
    key = (op, form, softmax, off, *_check.seen(a, a_stats, b, b_stats, out, stats, sink))
    plan = rt.plans.get(key)
    if plan is None:
        _check.one_of(op, "form", form, FORMATS)
        _check.one_of(op, "softmax", softmax, SOFTMAX)
        _check_alike(op, {"a": a, "b": b, "out": out}, 3 if form == "thd" else 4)
        _check.require(
            (b is None) == (b_stats is None), op, f"b = {b!r}, b_stats = {b_stats!r}", "both or none", "pass both"
        )
        token, batch, head = (None if i is None else a.shape[i] for i in _PLACES[form][0])
        shape = (token, head) if batch is None else (batch, head, token)
        for name, t in (("a_stats", a_stats), ("b_stats", b_stats), ("stats", stats)):
            _check.require(
                t is None or (t.shape == shape and t.dtype is dtypes.float32),
                op,
                f"{name} = {t!r}",
                f"float32 {shape}, as attention_forward gives them",
                f"correct {name}",
            )
        _check.require(
            (sink is not None) == (softmax == "learnable"),
            op,
            f"sink = {sink!r} for softmax {softmax!r}",
            "a sink with 'learnable', none otherwise",
            "correct sink or softmax",
        )
        _check.vector(op, "sink", sink, a.shape[-2], (dtypes.float32,))
        _check.on_device(op, rt.device, a, a_stats, b, b_stats, out, stats, sink)
        steps = tuple(_stats_steps(t, form) for t in (a_stats, b_stats, stats))
        spec = MergeSpec(_sum_spec(form, a, b, out, off), steps, softmax, form)  # type: ignore[arg-type]
        plan = rt.plans.put(key, rt.backend.plan_attention_merge(rt, spec))
    _check.written(op, "out", out)
    _check.written(op, "stats", stats)
    rt.backend.attention_merge(rt, plan, MergeOperands(a, a_stats, b, b_stats, out, stats, sink))


def context_sum(rt: Runtime, a: Tensor, b: Tensor | None, *, out: Tensor) -> None:
    """out = a + b in float32, rounded once to the type of out; without b, a copy or a cast.

    All of one shape of 1 to 5 dimensions, each float32 or the activation dtype; out may be a or b.
    """
    op = "context_sum"
    off = _check.off(a, b, out)
    key = (op, off, *_check.seen(a, b, out))
    plan = rt.plans.get(key)
    if plan is None:
        _check_alike(op, {"a": a, "b": b, "out": out}, None)
        _check.on_device(op, rt.device, a, b, out)
        plan = rt.plans.put(key, rt.backend.plan_context_sum(rt, _sum_spec("", a, b, out, off)))
    _check.written(op, "out", out)
    rt.backend.context_sum(rt, plan, a, b, out)


def attention_sink_grad(rt: Runtime, dy: Tensor, out: Tensor, stats: Tensor, sink: Tensor, *, form: str) -> Tensor:
    """The gradient float32 [h] of a learnable sink: - sum over tokens of exp(sink - stats) * (dy . out).

    dy and out [.., h, d] are those of the whole attention, and `stats` those that count the sink. Of a rank's tokens it
    is the rank's summand. Rows of infinite statistics, which have seen no key, give nothing, whatever stands in them.
    """
    op = "attention_sink_grad"
    off = _check.off(dy, out)
    key = (op, form, off, *_check.seen(dy, out, stats, sink))
    plan = rt.plans.get(key)
    if plan is None:
        _check.one_of(op, "form", form, FORMATS)
        _check_alike(op, {"dy": dy, "out": out}, 3 if form == "thd" else 4)
        _check.require(
            dy.dtype is out.dtype, op, f"dy {dy!r}, out {out!r}", "one dtype", "convert dy to the type of the output"
        )
        where, of_stats = _PLACES[form]
        shape = [0] * (2 if form == "thd" else 3)
        for i, j in zip(where, of_stats, strict=True):
            if i is not None and j is not None:
                shape[j] = out.shape[i]
        _check.require(
            stats.shape == tuple(shape) and stats.dtype is dtypes.float32,
            op,
            f"stats = {stats!r}",
            f"float32 {tuple(shape)}, as forward gave them",
            "pass forward's stats",
        )
        _check.vector(op, "sink", sink, out.shape[-2], (dtypes.float32,))
        _check.on_device(op, rt.device, dy, out, stats, sink)
        sizes = tuple(1 if i is None else out.shape[i] for i in where)
        steps = (_steps(dy, form), _steps(out, form), _stats_steps(stats, form))
        spec = SinkGradSpec((*sizes, out.shape[-1]), out.dtype, steps, off, form)  # type: ignore[arg-type]
        plan = rt.plans.put(key, rt.backend.plan_attention_sink_grad(rt, spec))
    dsink = rt.empty(sink.shape, dtypes.float32)
    rt.backend.attention_sink_grad(rt, plan, dy, out, stats, sink, dsink)
    return dsink


def _check_alike(op: str, tensors: dict[str, Tensor | None], dims: int | None) -> None:
    """All of one shape, each float32 or one activation dtype, with a last stride of 1."""
    given = {name: t for name, t in tensors.items() if t is not None}
    first = next(iter(given.values()))
    wanted = f"{dims} dimensions" if dims is not None else f"1 to {_DIMENSIONS} dimensions"
    narrow = {t.dtype for t in given.values()} - {dtypes.float32}
    for name, t in given.items():
        _check.one_of(op, f"dtype of {name}", t.dtype, ACTIVATION_DTYPES)
        _check.require(
            t.shape == first.shape
            and (t.ndim == dims if dims is not None else 1 <= t.ndim <= _DIMENSIONS)
            and (t.shape[-1] < 2 or t.row_major_strides()[-1] == 1)
            and len(narrow) < 2,
            op,
            ", ".join(f"{n} = {other!r}" for n, other in given.items()),
            f"one shape of {wanted}, float32 or one activation dtype, last strides of 1",
            f"correct {name}",
        )


def _steps(t: Tensor | None, form: str) -> Steps:
    """Strides over (token, batch, head); with no format over all dimensions."""
    if t is None:
        return ()
    strides = t.row_major_strides()
    return tuple(0 if i is None else strides[i] for i in _PLACES[form][0]) if form else strides


def _stats_steps(t: Tensor | None, form: str) -> Steps:
    if t is None:
        return ()
    strides = t.row_major_strides()
    return tuple(0 if i is None else strides[i] for i in _PLACES[form][1])


def _sum_spec(form: str, a: Tensor, b: Tensor | None, out: Tensor, off: int) -> SumSpec:
    sizes = a.shape
    if form:
        sizes = (*(1 if i is None else a.shape[i] for i in _PLACES[form][0]), a.shape[-1])
    _check.require(prod(sizes) < 1 << 40, "attention_merge", f"a = {a!r}", "less than 2^40 elements", "split it")
    types = a.dtype, None if b is None else b.dtype, out.dtype
    return SumSpec(tuple(sizes), types, (_steps(a, form), _steps(b, form), _steps(out, form)), off)
