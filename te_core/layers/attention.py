"""Attention as a layer: q, k and v in, packed or apart, as a projection left them; the heads side by side out.

Shapes: q [.., heads, d_qk], k and v [.., groups, d], out [.., heads * d_v], the leading dimensions those of the format.
Packed: (q, kv) or (qkv,), dense, with all heads of a token in a row. `interleaved`: for each group its query heads,
its k, its v; else all q, all k, all v. q, k and v are views of that row and so are their gradients: nothing is copied,
unless a group's query heads lie where no stride of the format leads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from te_core.arguments import explained
from te_core.attention import AttentionSpec, Lengths
from te_core.errors import ArgumentError
from te_core.layers.context import layer as over_ranks
from te_core.layers.context.layer import Communicators, Place, communicators
from te_core.layers.context.products import Products
from te_core.layers.context.rules import OPERATION, check_context
from te_core.layers.context.schedule import Context
from te_core.layers.meeting import meet
from te_core.ops import raw as ops
from te_core.ops.attention_terms import NOTHING, Terms
from te_core.quantize.state import Scales
from te_core.runtime import Runtime
from te_core.tensor import META, Tensor, dense_strides


class AttentionNeeds(NamedTuple):
    """Which inputs' gradients are wanted."""

    q: bool
    k: bool
    v: bool
    bias: bool = False
    sink: bool = False


@dataclass(frozen=True, slots=True)
class AttentionLayerSpec:
    """All that the layer's plan depends on besides shapes."""

    core: AttentionSpec
    heads: int
    groups: int
    d_qk: int
    d_v: int
    needs: AttentionNeeds  # packed: a gradient of the packed tensor is wanted if its first is
    packing: str = "separate"  # or "kv", "qkv"; interleaved with 1 < groups < heads: [.., width of a token]
    interleaved: bool = False
    recompute: bool = False  # backward computes the output again instead of having it kept
    context: Context | None = None  # how sequences lie cut over ranks; None: they are whole
    #: Whether q, k and v have to be copied apart first.
    copies: bool = field(init=False, repr=False, compare=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "copies", not (self._straight or self.joined))

    @property
    def joined(self) -> bool:
        """Whether groups count as batch: what makes interleaved query heads reachable by strides (sbhd)."""
        core = self.core
        by_head = core.bias != "no_bias" or core.softmax == "learnable" or core.max_logit
        by_row = core.masked or core.padded
        exchanged = self.context is not None and self.context.heads > 1
        return core.q_format == "sbhd" and not (by_head or by_row or exchanged or self._straight)

    @property
    def _straight(self) -> bool:
        return self.packing != "qkv" or not self.interleaved or self.groups in (1, self.heads)


class AttentionInputs(NamedTuple):
    """The layer's tensors, in the order in which it takes them. An adapter fills this with tensors of its own."""

    a: Any
    b: Any = None
    c: Any = None
    bias: Any = None
    slopes: Any = None
    sink: Any = None
    cu_q: Any = None
    cu_kv: Any = None
    cu_q_padded: Any = None
    cu_kv_padded: Any = None
    mask: Any = None
    pages: Any = None
    rng: Any = None


class AttentionSaved(NamedTuple):
    """What backward reads: the inputs (q, k and v where they were copied apart), and what forward made.

    In FP8 q, k and v stand here as themselves if they came quantized, else as blocks of their codes.
    """

    a: Any
    b: Any
    c: Any
    bias: Tensor | None
    slopes: Tensor | None
    sink: Tensor | None
    cu_q: Tensor | None
    cu_kv: Tensor | None
    cu_q_padded: Tensor | None
    cu_kv_padded: Tensor | None
    mask: Tensor | None
    pages: None
    rng: Tensor | None
    out: Tensor | None  # or the block of a quantized one
    stats: Tensor | None
    frame_q: Tensor | None = None  # in FP8, and where heads are exchanged: of no element, says how a and b came
    frame_kv: Tensor | None = None
    pairs: Tensor | None = None  # in FP8: scale and inverse of P, and of a delayed output


@explained
def forward(
    rt: Runtime,
    a: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
    sink: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_kv: Tensor | None = None,
    cu_q_padded: Tensor | None = None,
    cu_kv_padded: Tensor | None = None,
    mask: Tensor | None = None,
    pages: Tensor | None = None,
    rng: Tensor | None = None,
    *,
    spec: AttentionLayerSpec,
    scales: Scales | None = None,
    comm: Communicators | None = None,
) -> tuple[tuple[Tensor, ...], AttentionSaved]:
    """((out,), saved), or ((out, largest logits), saved) with `spec.core.max_logit`. `comm`: the
    ranks that share each sequence."""
    if spec.copies:
        q, b, c = ops.rope_qkv(rt, a, None, None, **split_options(spec))
        assert q is not None
        a = q
    bias = None if bias is None else on_boundary(rt, bias)
    inputs = AttentionInputs(a, b, c, bias, slopes, sink, cu_q, cu_kv, cu_q_padded, cu_kv_padded, mask, pages, rng)
    q, k, v = views(spec, a, b, c)
    out = rt.empty((*_lead(a, spec.core.q_format), spec.heads * spec.d_v), q.dtype)
    rows = Tensor(out.ptr, (*q.shape[:-1], spec.d_v), out.dtype, out.device, out.owner)
    context, terms, kept, stats = spec.context, terms_of(inputs), out, any(spec.needs) and not spec.recompute
    frames: tuple[Tensor | None, Tensor | None] = None, None
    if context is None:
        done: Any = ops.attention_forward(rt, q, k, v, spec=spec.core, terms=terms, stats=stats, out=rows)
    else:  # each rank has a part of every sequence
        check_context(spec.core, context, q, k, v, bias)
        for one in communicators(context, comm):
            meet(rt, one, "DotProductAttention", spec, OPERATION, q=q, k=k, v=v)
        done = over_ranks.forward((q, k, v), rows, Place(rt, context, comm, spec.core, terms))
        if context.heads > 1:
            frames = rt.empty((0, *a.shape), a.dtype), None if b is None else rt.empty((0, *b.shape), b.dtype)
            inputs, kept = inputs._replace(**dict(zip("abc", done.parts, strict=True))), done.out
    outputs = (out,) if done.max_logit is None else (out, done.max_logit)
    kept_out, kept_stats = None if spec.recompute else kept, done.stats if stats else None
    return outputs, AttentionSaved(*inputs, kept_out, kept_stats, *frames)


@explained
def backward(
    rt: Runtime,
    dy: Tensor,
    dmax: None,
    saved: AttentionSaved,
    *,
    spec: AttentionLayerSpec,
    scales: Scales | None = None,
    comm: Communicators | None = None,
) -> tuple[Tensor | None, ...]:
    """(da, db, dc, dbias, None, dsink): gradients of the inputs as they came."""
    if saved.bias is not None:
        saved = saved._replace(bias=on_boundary(rt, saved.bias))  # traced code saves the input, not forward's copy
    (a, b, c), context, terms = saved[:3], spec.context, terms_of(saved)
    core = replace(spec.core, max_logit=False) if spec.core.max_logit else spec.core
    place = None if context is None else Place(rt, context, comm, core, terms)
    if context is not None and context.heads > 1:  # q, k and v stand here as they were attended with
        assert saved.frame_q is not None
        q, k, v = a, b, c
        second = third = None
        if saved.frame_kv is not None:
            second = saved.frame_kv.shape[1:]
            third = (*second[:-1], spec.d_v) if spec.packing == "separate" or spec.copies else None
        shapes: tuple[tuple[int, ...] | None, ...] = saved.frame_q.shape[1:], second, third
    else:
        q, k, v = views(spec, a, b, c)
        shapes = tuple(None if t is None else t.shape for t in (a, b, c))
    out, stats = saved.out, saved.stats
    if spec.recompute and place is not None:
        out, stats = over_ranks.recomputed((q, k, v), place)
    elif spec.recompute:
        out, stats, _ = ops.attention_forward(rt, q, k, v, spec=core, terms=terms)
    assert out is not None and stats is not None
    da, db, dc = (None if shape is None else rt.empty(shape, q.dtype) for shape in shapes)
    parts = views(spec, da, db, dc)  # type: ignore[arg-type]
    rows, out = (*parts[0].shape[:-1], spec.d_v), out.reshape(*q.shape[:-1], spec.d_v)
    dy = on_boundary(rt, dy).reshape(*rows)
    if place is None:
        of: dict[str, Any] = {"spec": core, "terms": terms, "bias_grad": spec.needs.bias}
        found: Any = ops.attention_backward(rt, dy, q, k, v, out, stats, grads=parts, **of)
    else:
        found = over_ranks.backward((q, k, v), (dy, out, stats), parts, place, Products(q.dtype, spec.needs.bias))
    del dy  # it may be a copy
    if spec.copies:
        da, db, dc = ops.rope_qkv_backward(rt, *parts, None, None, **split_options(spec)), None, None
    to_q, to_k, to_v, bias, sink = spec.needs
    wanted = da if to_q else None, db if to_k else None, dc if to_v else None
    return *wanted, found.bias if bias else None, None, found.sink if sink else None


def on_boundary(rt: Runtime, t: Tensor) -> Tensor:
    """A dense tensor, or a copy where cuDNN could not read it: part of another one may begin anywhere."""
    if t.device.kind != "cuda" or not t.ptr & 15:
        return t
    return ops.add(rt, t, rt.zeros(t.shape, t.dtype))


def views(spec: AttentionLayerSpec, a: Tensor, b: Tensor | None, c: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of the inputs, or of a gradient of the inputs' shapes."""
    if a.device is not META:
        _check_heads(spec, a, b, c)
    if spec.packing == "separate" or spec.copies:
        assert b is not None and c is not None
        return a, b, c
    packed, form = (a, spec.core.q_format) if b is None else (b, spec.core.kv_format)
    find = _parts.__wrapped__ if packed.device is META else _parts  # a compiler's symbols make no keys
    t, parts = packed.dtype.itemsize, find(spec, _lead(packed, form))
    pieces = [
        Tensor(packed.ptr + offset * t, shape, packed.dtype, packed.device, packed.owner, strides)
        for offset, shape, strides in parts
    ]
    q, k, v = pieces if b is None else (a, *pieces)
    return q, k, v


def _check_heads(spec: AttentionLayerSpec, a: Tensor, b: Tensor | None, c: Tensor | None) -> None:
    """The tensors are as the spec's packing has them: results, and views of what is packed, are made by it."""
    forms = spec.core.q_format, spec.core.kv_format, spec.core.kv_format
    for name, t, form, tail in zip("abc", (a, b, c), forms, tails_of(spec), strict=False):
        whole = len(tail) == 1  # packed: read by strides of its own
        right = t is not None and (
            t.is_contiguous and t.size == prod(_lead(t, form)) * tail[0] if whole else tuple(t.shape[-2:]) == tail
        )
        if not right:
            raise ArgumentError(
                "attention",
                f"{name} = {t!r} with packing={spec.packing!r}, heads={spec.heads}, groups={spec.groups}, "
                f"d_qk={spec.d_qk}, d_v={spec.d_v}",
                f"{'dense, ' if whole else ''}{form}, each token with {' x '.join(map(str, tail))} channels",
                f"correct {name} or the spec",
            )


def tails_of(spec: AttentionLayerSpec) -> list[tuple[int, ...]]:
    """What a token has of each tensor that is read: packed, or q, k and v."""
    h, g, dk, dv = spec.heads, spec.groups, spec.d_qk, spec.d_v
    if spec.packing == "separate" or spec.copies:
        return [(h, dk), (g, dk), (g, dv)]
    return [(h, dk), (g * (dk + dv),)] if spec.packing == "kv" else [(h * dk + g * (dk + dv),)]


def _lead(t: Tensor, form: str) -> tuple[int, ...]:
    return tuple(t.shape[: 1 if form == "thd" else 2])


@lru_cache(maxsize=1024)  # three times a step, for the same shapes in step after step
def _parts(spec: AttentionLayerSpec, lead: tuple[int, ...]) -> tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]:
    """Offset, shape and strides of (q,) k and v in a packed tensor of these leading dimensions."""
    h, g, dk, dv = 0 if spec.packing == "kv" else spec.heads, spec.groups, spec.d_qk, spec.d_v
    r = h // g
    width, group = h * dk + g * (dk + dv), (r + 1) * dk + dv
    heads: tuple[tuple[int, tuple[int, int], int], ...]
    if spec.joined:
        heads = ((0, (r, dk), dk), (r * dk, (1, dk), dk), ((r + 1) * dk, (1, dv), dv))
    elif spec.interleaved:
        heads = ((0, (h, dk), dk if g == 1 else group), (r * dk, (g, dk), group), ((r + 1) * dk, (g, dv), group))
    else:
        heads = ((0, (h, dk), dk), (h * dk, (g, dk), dk), ((h + g) * dk, (g, dv), dv))
    if spec.packing == "kv":
        heads = heads[1:]
    row = tuple(width * step for step in dense_strides(lead))
    if spec.packing == "qkv" and spec.joined:  # a group is a row of the batch
        lead, row = (lead[0], lead[1] * g), (row[0], width // g)
    return tuple((offset, (*lead, *tail), (*row, step, 1)) for offset, tail, step in heads)


def terms_of(inputs: Any) -> Terms:
    """The terms of an attention among a layer's tensors: its inputs, or what it saved."""
    lengths = None
    if inputs.cu_q is not None:
        lengths = Lengths(inputs.cu_q, inputs.cu_kv, inputs.cu_q_padded, inputs.cu_kv_padded)
    terms = Terms(lengths, inputs.mask, inputs.bias, inputs.slopes, inputs.sink, inputs.rng, inputs.pages)
    return terms if any(terms) else NOTHING


def split_options(spec: AttentionLayerSpec) -> dict[str, Any]:
    """How `ops.rope_qkv` copies q, k and v apart, and its backward their gradients together."""
    return {
        "heads": spec.heads,
        "groups": spec.groups,
        "head_dims": (spec.d_qk, spec.d_qk, spec.d_v),
        "interleaved_groups": spec.interleaved,
        "fmt": spec.core.q_format,
    }
