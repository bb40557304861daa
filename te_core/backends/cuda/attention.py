"""Attention by cuDNN; see te_core.ops.attention and attention_scored for the contract, te_core.attention_rules for what
is refused.

A call is one run of a graph (attention_graph.py); with lengths, a small kernel before and one after it; with ALiBi
that is not cuDNN's own, a bias written before; with the largest logits, a kernel that makes them of the maxima and
sums that cuDNN then writes in place of statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from te_core import dtypes
from te_core.attention import AttentionSpec, Sizes, bucket
from te_core.backends.cuda import cudnn
from te_core.backends.cuda.attention_graph import CONSTANTS, Four, Given, GraphSpec, Layout
from te_core.backends.cuda.attention_plan import (
    Around,
    Frame,
    Named,
    around,
    band_of,
    dense_like,
    frame_of,
    graph_of,
    graph_spec,
    layouts,
    output_of,
    require,
    run_graph,
    scratch_tensor,
    statistics_strides,
    sums,
)
from te_core.errors import UnsupportedError
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Device, Tensor

if TYPE_CHECKING:
    from te_core.ops.attention import Asked, BackwardOperands, ForwardOperands
    from te_core.ops.attention_scored import ScoredAsked
    from te_core.ops.attention_terms import Terms

_LOGITS_ARGS = "ppp" + "qqqq" + "pppp" + "iiiiiii"
_LEAST_TOKENS = 1024  # packed ones that a graph is made for
_BIAS_ARGS = "pp" + "ii" + "pp" + "iiiiii"


@dataclass(frozen=True, eq=False, slots=True)
class Slopes:
    """ALiBi as a bias: the kernel that writes it."""

    kernel: Kernel
    shape: Four
    per_sequence: bool
    fixed: tuple[int, ...]

    def write(self, rt: Runtime, terms: Terms) -> Tensor:
        """The bias, for the time of a call."""
        batch, heads, rows, columns = self.shape
        bias = rt.empty(self.shape, dtypes.float32)
        cu_q, cu_kv, _, _ = sums(terms.lengths)
        sizes = (self.per_sequence, columns, cu_q, cu_kv, *self.fixed)
        self.kernel(rt, (rows, heads, batch), 128, terms.slopes, bias, *sizes)
        return bias


@dataclass(frozen=True, eq=False, slots=True)
class AttentionPlan:
    """All that was decided about one attention, forward or backward."""

    spec: AttentionSpec
    size: Sizes
    graph: cudnn.Graph | None  # None: nothing to attend to
    around: Around
    slopes: Slopes | None = None
    logits: Kernel | None = None
    stats: tuple[int, ...] = ()  # the shape of the statistics
    constants: tuple[int, ...] = ()  # the addresses of a soft-cap's

    @property
    def numbers(self) -> dict[str, int]:
        """The addresses of a soft-cap's numbers, as its graph calls them."""
        return dict(zip(CONSTANTS, self.constants, strict=False))

    def explain(self) -> str:
        """What runs."""
        s = self.size
        lines = [f"attention of {s.batch} x {s.heads} ({s.groups}) heads, {s.sq} x {s.skv}, width {s.d_qk}/{s.d_v}"]
        if self.graph is None:
            return lines[0] + "\n  nothing to do"
        number = ".".join(map(str, cudnn.frontend().version))
        lines.append(f"  runs cuDNN {number}, workspace {self.graph.workspace}, a plan {self.graph.source}")
        for kernel, name in (
            (self.around.lengths, "lengths"),
            (self.slopes, "bias"),
            (self.logits, "logits"),
            (self.around.rows, "rows"),
        ):
            lines += [f"  and attention_{name}.cu"] if kernel is not None else []
        return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- forward


def plan_attention_forward(rt: Runtime, asked: Asked) -> AttentionPlan:
    """Find or build the graph."""
    spec, q, k, _, terms, *_ = asked
    size = asked.size
    require(rt, "attention_forward", asked, training=False)
    frame = frame_of(asked, backward=False)
    found = layouts(frame, asked, asked.stats or spec.max_logit)
    near = around(rt, frame, found, (output_of(asked),), spec.softmax == "off-by-one")
    logits = loader.get(rt, "attention_logits", args=_LOGITS_ARGS) if spec.max_logit else None
    if not q.size or not k.size:
        return AttentionPlan(spec, size, None, near, logits=logits)
    slopes, added = _added(rt, frame, terms)
    pages = terms.pages
    wants = graph_spec(
        frame,
        q.dtype,
        found,
        maxima=spec.max_logit,
        **added,
        pages=None if pages is None else (size.batch, pages.shape[1], size.skv),
    )
    graph = graph_of(rt, wants)
    constants = _constants(rt, wants)
    packed = spec.q_format == "thd"
    shape = (q.shape[0], size.heads) if packed else (size.batch, size.heads, size.sq)
    return AttentionPlan(spec, size, graph, near, slopes, logits, shape, constants)


def _constants_held(device: Device) -> dict[tuple[float, ...], int]:
    """Numbers of soft-caps, for good, as graphs are: a captured CUDA graph reads them after its plan has gone."""
    return {}


def constants_at(device: Device, address: int) -> tuple[int, bytes] | None:
    """(where they begin, their content), if an address is that of one of a soft-cap's numbers."""
    for values, begin in device.of(_constants_held).items():
        if begin <= address < begin + 4 * len(values):
            return begin, np.array(values, np.float32).tobytes()
    return None


def _constants(rt: Runtime, wants: GraphSpec) -> tuple[int, ...]:
    """The addresses of the numbers of a soft-cap in device memory."""
    values = wants.constants()
    if not values:
        return ()
    held = rt.device.of(_constants_held)
    address = held.get(values)
    if address is None:
        content = np.array(values, np.float32).tobytes()
        address = held.setdefault(values, rt.executor().driver.constant(rt.device.index, content))
    return tuple(address + 4 * i for i in range(len(values)))


def _added(rt: Runtime, frame: Frame, terms: Terms) -> tuple[Slopes | None, dict[str, Any]]:
    """What is added to the scores: the graph's options, and the kernel that writes a bias of slopes."""
    spec, size = frame.spec, frame.size
    if terms.bias is not None:
        b, h, sq, skv = terms.bias.shape
        return None, {"bias": (terms.bias.dtype.name, (b, h, sq, skv))}
    if spec.bias != "alibi" or terms.slopes is None:
        return None, {}
    shifted = spec.bottom_right and (spec.padded or size.sq != size.skv)
    if spec.default_slopes and spec.causal and spec.left < 0 and not shifted:
        return None, {"alibi": True}
    per_sequence = len(terms.slopes.shape) == 2
    batch = frame.batch if per_sequence or (shifted and spec.padded) else 1
    shape = (batch, size.heads, frame.sq, frame.skv)
    masked = frame.bottom_right
    kernel = loader.get(rt, "attention_bias", args=_BIAS_ARGS, MASKED=masked)
    slopes = Slopes(kernel, shape, per_sequence, (size.batch, size.sq, size.skv, *band_of(spec)))
    options: dict[str, Any] = {"bias": (dtypes.float32.name, shape)}
    if masked:  # the bias carries the band
        options.update(left=-1, right=-1, bottom_right=False)
    return slopes, options


def _drawn(rng: Tensor | None) -> dict[str, Any]:
    """What dropout is drawn by."""
    return {} if rng is None else {"seed": rng, "offset": rng.ptr + 8}


def attention_forward(rt: Runtime, plan: AttentionPlan, operands: ForwardOperands) -> None:
    """Run a plan."""
    q, k, v, terms, out, stats, max_logit, _ = operands
    near, lengths = plan.around, terms.lengths
    if plan.graph is None:
        near.tidy(rt, lengths, out, None, None, stats)
        if max_logit is not None and max_logit.size:
            _largest(rt, plan, terms, None, None, max_logit)
        return
    bias, sink, rng, pages = terms.bias, terms.sink, terms.rng, terms.pages
    if plan.slopes is not None:
        bias = plan.slopes.write(rt, terms)
    statistics, exponentials = stats, None
    if plan.logits is not None:
        exponentials = scratch_tensor(rt, (2, *plan.stats))
        if statistics is None:
            statistics = Tensor(
                exponentials.ptr + exponentials.nbytes // 2, plan.stats, dtypes.float32, rt.device, exponentials
            )
    named: Named = {"q": q, "k": k, "v": v, "out": out, "stats": statistics, "sum_exp": exponentials}
    named |= {"bias": bias, "sink": sink, "k_pages": pages, "v_pages": pages, **_drawn(rng)}
    run_graph(rt, plan.graph, {**named, **near.prepare(rt, lengths), **plan.numbers})
    if plan.logits is not None:
        assert max_logit is not None
        _largest(rt, plan, terms, statistics, exponentials, max_logit)
    near.tidy(rt, lengths, out, None, None, stats)


def _largest(
    rt: Runtime, plan: AttentionPlan, terms: Terms, stats: Tensor | None, sums_of: Tensor | None, max_logit: Tensor
) -> None:
    """Statistics and the largest logits from cuDNN's maxima and sums; minus infinity where no graph ran."""
    assert plan.logits is not None
    spec, size = plan.spec, plan.size
    packed = spec.q_format == "thd"
    rows = 0 if plan.graph is None else plan.stats[0] if packed else size.batch * size.sq
    sizes = (size.batch, size.sq, size.skv, *band_of(spec), packed)
    pointers = (stats, sums_of, max_logit)
    strides = statistics_strides(spec, size)
    plan.logits(rt, size.heads, 1024, *pointers, rows, *strides, *sums(terms.lengths), *sizes)


# ---------------------------------------------------------------------------------------------- backward


def plan_attention_backward(rt: Runtime, asked: Asked) -> AttentionPlan:
    """Find or build the graph."""
    spec, q, k, v, terms, _, grads, bias_grad, *_ = asked
    size = asked.size
    results = grads or dense_like(q, k, v)
    require(rt, "attention_backward", asked, results, training=True)
    _require_alike((q, k, v), results, (spec.q_format, spec.kv_format, spec.kv_format))
    frame = frame_of(asked, backward=True)
    found = layouts(frame, asked, True, results)
    near = around(rt, frame, found, results, spec.softmax == "off-by-one")
    if not q.size or not k.size:
        return AttentionPlan(spec, size, None, near)
    slopes, added = _added(rt, frame, terms)
    wants = graph_spec(
        frame,
        q.dtype,
        found,
        backward=True,
        deterministic=spec.deterministic,
        bias_grad=bias_grad,
        sink_grad=spec.softmax == "learnable",
        tokens=tokens_of(frame, found, q, k),
        **added,
    )
    graph = graph_of(rt, wants)
    return AttentionPlan(spec, size, graph, near, slopes, constants=_constants(rt, wants))


def _require_alike(tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...], forms: tuple[str, ...]) -> None:
    """Packed gradients lie as their tensors do: cuDNN writes wrong ones otherwise."""
    for t, grad, form in zip(tensors, grads, forms, strict=True):
        if form == "thd" and t.shape[0] > 1 and t.row_major_strides()[0] != grad.row_major_strides()[0]:
            raise UnsupportedError(
                "attention_backward",
                f"a packed tensor {t!r} and its gradient {grad!r}",
                "as many elements from a token to the next in both",
                "make the tensor dense, or give `grads` of its strides",
            )


def tokens_of(frame: Frame, found: dict[str, Layout], q: Tensor, k: Tensor) -> tuple[int, int] | None:
    """Bounds of the packed tokens, which bound the workspace (cuDNN has a fault with other widths than 16s)."""
    size = frame.size
    if size.d_qk % 16 or size.d_v % 16 or not (found["q"].packed and found["k"].packed):
        return None
    bounds = frame.batch * frame.sq, frame.batch * frame.skv
    return min(bucket(q.shape[0], _LEAST_TOKENS), bounds[0]), min(bucket(k.shape[0], _LEAST_TOKENS), bounds[1])


def attention_backward(rt: Runtime, plan: AttentionPlan, operands: BackwardOperands) -> None:
    """Run a plan."""
    dy, q, k, v, out, stats, terms, dq, dk, dv, dbias, dsink, _ = operands
    near, lengths = plan.around, terms.lengths
    bias, sink, rng = terms.bias, terms.sink, terms.rng
    if dbias is not None:
        rt.backend.zero(rt, dbias)  # cuDNN writes the tiles that it visits
    if plan.graph is None:
        near.tidy(rt, lengths, dq, dk, dv, None)
        if dsink is not None:
            rt.backend.zero(rt, dsink)
        return
    if plan.slopes is not None:
        bias = plan.slopes.write(rt, terms)
    named: Named = {"q": q, "k": k, "v": v, "out": out, "stats": stats, "dy": dy, "dq": dq, "dk": dk, "dv": dv}
    named |= {"bias": bias, "dbias": dbias, "sink": sink, "dsink": dsink, **_drawn(rng)}
    run_graph(rt, plan.graph, {**named, **near.prepare(rt, lengths), **plan.numbers})
    near.tidy(rt, lengths, dq, dk, dv, None)


# ---------------------------------------------------------------------------------------------- a user's functions


def plan_attention_scored(rt: Runtime, asked: ScoredAsked) -> cudnn.Graph:
    """Find or build the graph."""
    plain, mod, given = asked
    spec, q, k, v, *_ = plain
    size, backward, op = plain.size, plain.dy is not None, "attention_scored"
    require(rt, op, plain, training=backward)
    if not (q.size and k.size):
        raise UnsupportedError(op, f"q {q!r} and k {k!r}", "some queries and keys", "leave an empty batch out")
    # No lengths, whatever the sizes are: cuDNN takes none where scores are modified.
    frame = Frame(spec, size, size.batch, size.sq, size.skv, False, False)
    found = layouts(frame, plain, plain.stats, dense_like(q, k, v) if backward else None)
    tensors = tuple(Given(name, t.shape, t.row_major_strides(), t.dtype.name) for name, t in given)
    deterministic = spec.deterministic and backward
    wants = graph_spec(
        frame, q.dtype, found, backward=backward, deterministic=deterministic, score_mod=mod, given=tensors
    )
    return graph_of(rt, wants)


attention_scored = run_graph
