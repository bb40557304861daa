"""What takes part in attention besides q, k and v; and that sizes, types, lengths and pages fit one another and the
spec."""

from __future__ import annotations

from typing import NamedTuple

from te_core import dtypes
from te_core.attention import BIASES, DIMENSIONS, FORMATS, SOFTMAX, AttentionSpec, Lengths, Sizes  # noqa: F401
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import _check
from te_core.ops.declare import rules
from te_core.runtime import Runtime
from te_core.tensor import Tensor, dense_strides


class Terms(NamedTuple):
    """What takes part besides q, k and v, each None where the spec does not ask for it."""

    lengths: Lengths | None = None
    mask: Tensor | None = None  # bool as uint8, [b|1, h|1, sq|1, skv]
    bias: Tensor | None = None  # [b|1, h|1, sq|1, skv], in q's dtype
    slopes: Tensor | None = None  # float32 [h] or [b, h]
    sink: Tensor | None = None  # float32 [h]; also for "off-by-one", where it is not given and counts as zeros
    rng: Tensor | None = None  # int64 (seed, offset)
    pages: Tensor | None = None


NOTHING = Terms()


def sizes_of(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, terms: Terms) -> Sizes:
    """The sizes that these tensors have in their formats."""
    batch, sq, heads, d_qk = _extent(q, spec.q_format, spec.max_q, terms.lengths and terms.lengths.cu_q)
    if terms.pages is not None:
        blocks = terms.pages.shape
        return Sizes(batch, sq, blocks[1] * k.shape[1], heads, k.shape[2], d_qk, v.shape[3])
    _, skv, groups, _ = _extent(k, spec.kv_format, spec.max_kv, terms.lengths and terms.lengths.cu_kv)
    return Sizes(batch, sq, skv, heads, groups, d_qk, v.shape[-1])


def _extent(t: Tensor, form: str, longest: int, cu: Tensor | None) -> tuple[int, int, int, int]:
    b, s, h = DIMENSIONS[form]
    if b is None:
        return (0 if cu is None else cu.shape[0] - 1), longest, t.shape[h], t.shape[-1]
    return t.shape[b], t.shape[s], t.shape[h], t.shape[-1]


def stats_shape(q: Tensor, form: str) -> tuple[int, ...]:
    """The shape of the statistics of a forward, whose q or output this is."""
    b, s, h = DIMENSIONS[form]
    return (q.shape[0], q.shape[1]) if b is None else (q.shape[b], q.shape[h], q.shape[s])


def check_results(op: str, q: Tensor, v: Tensor, *, typed: bool = True, apart: bool = False, **results: Tensor) -> None:
    """Results, or what is read as one, lie as backends take them: dense, or, where rows may lie `apart`, all alike with
    the heads of a token side by side (packed tokens: one behind the other). Of q's dtype, if `typed`.
    """
    shape = (*q.shape[:-1], v.shape[-1])
    dense = all(t.is_contiguous for t in results.values())
    strides = next(iter(results.values())).row_major_strides()
    apart = apart and len(shape) > 3 and strides[-2:] == dense_strides(shape)[-2:]
    for name, t in results.items():
        lies = dense or (apart and t.row_major_strides() == strides)
        aligned = not (t.ptr & 15 and q.device.kind == "cuda")
        right = t.shape == shape and (not typed or t.dtype is q.dtype) and t.device is q.device
        if not (right and lies and aligned):
            got = ", ".join(f"{n} = {other!r} at {other.ptr:#x}" for n, other in results.items())
            rows = ", or with rows apart, the heads of a token side by side, all of the same strides" * apart
            allowed = f"{shape}{f' of {q.dtype}' * typed} beside q, dense{rows}, on CUDA at a multiple of 16 bytes"
            raise ArgumentError(op, got, allowed, f"correct {name}")


def check_stats(op: str, stats: Tensor, q: Tensor, spec: AttentionSpec) -> None:
    """The statistics are those of a forward."""
    _check.sized(op, "stats", stats, stats_shape(q, spec.q_format), (dtypes.float32,), "pass forward's stats")
    _check.on_device(op, q.device, stats)


def stats_memory(op: str, rt: Runtime, q: Tensor, spec: AttentionSpec, stats: bool | Tensor) -> Tensor | None:
    """Where a forward's statistics go, if they are wanted: fresh memory, or what was given."""
    if stats is True:
        return rt.empty(stats_shape(q, spec.q_format), dtypes.float32)
    if stats is False:
        return None
    check_stats(op, stats, q, spec)
    _check.written(op, "stats", stats)
    return stats


@rules("""
    must spec.q_format in FORMATS and spec.kv_format in FORMATS: formats among {FORMATS}; correct the spec
    must spec.softmax in SOFTMAX: one of {SOFTMAX}; correct the spec
    must spec.bias in BIASES and spec.bias != "pre_scale_bias": one of {BIASES} without pre_scale_bias; correct the spec
    must 0.0 <= spec.dropout <= 1.0 and spec.softcap >= 0.0 and spec.left >= -1 and spec.right >= -1: 0 <= dropout <= 1,
        softcap >= 0, window bounds >= -1; correct the spec
    must q.ndim == len(spec.q_format) and q.row_major_strides()[-1] == 1: {len(spec.q_format)} dimensions
        ({spec.q_format}), the last stride 1; correct q or its format
    must k.ndim == v.ndim == (4 if terms.pages is not None else len(spec.kv_format)): {len(spec.kv_format)} dimensions
        ({spec.kv_format}), in a paged cache 4; correct k and v or their format
    must k.row_major_strides()[-1] == v.row_major_strides()[-1] == 1: last strides of 1; make k and v contiguous
    must q.dtype in types: q of a dtype among {types}; convert q, k and v
    must k.dtype is q.dtype and v.dtype is q.dtype: one dtype; convert them to one
    must (terms.lengths is not None) == spec.padded: lengths with padded=True; pass lengths, or correct the spec
    must spec.padded or "thd" not in (spec.q_format, spec.kv_format): padded=True in thd; pass lengths, and say so
    terms.pages? [sequences, blocks] i32: Page table.
""")
def check(
    op: str,
    rt: Runtime,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    terms: Terms,
    types: tuple[DType, ...] = ACTIVATION_DTYPES,
) -> None:
    """The arguments fit one another and the spec."""
    _check.on_device(op, rt.device, q, k, v, *terms[1:])
    if terms.lengths is not None:
        _check_lengths(op, rt, q, spec, terms.lengths)
    _check_terms(op, rt, q, k, v, sizes_of(q, k, v, spec, terms), spec, terms)


@rules("""
    lengths.cu_q [offsets] i32: Running sums that begin with 0.
    must offsets >= 1: running sums that begin with 0; correct cu_seqlens
    must lengths.cu_kv is not None: lengths of q and of k; pass both
    lengths.cu_kv? [offsets] i32: Running sums that begin with 0.
    lengths.cu_q_padded? [offsets] i32: Running sums that begin with 0.
    lengths.cu_kv_padded? [offsets] i32: Running sums that begin with 0.
    must spec.q_format == "thd" or q.shape[DIMENSIONS[spec.q_format][0]] == offsets - 1: one length for each row;
        correct cu_seqlens
    must spec.q_format != "thd" or spec.max_q > 0: the longest sequence's length; give max_q
    must spec.kv_format != "thd" or spec.max_kv > 0: the longest sequence's length; give max_kv
""")
def _check_lengths(op: str, rt: Runtime, q: Tensor, spec: AttentionSpec, lengths: Lengths) -> None:
    """Lengths are running sums, one for each sequence."""


@rules("""
    must terms.pages is None or terms.pages.shape[0] == size.batch: a row for each sequence; correct the page table
    must k.shape[-1] == q.shape[-1] and k.shape[:-1] == v.shape[:-1]: k of q's head width, and v of k's shape but for
        its head width; correct the shapes
    must size.groups > 0 and size.heads % size.groups == 0: heads a multiple of groups; choose num_gqa_groups that
        divides the heads
    must min(size.d_qk, size.d_v) > 0: widths from 1 on; correct the shapes
    must terms.pages is not None or spec.kv_format == "thd" or k.shape[DIMENSIONS[spec.kv_format][0]] == size.batch: one
        batch size; correct q or k
    must (terms.mask is not None) == spec.masked: a mask exactly where the spec asks for it; give it or correct the spec
    must (terms.bias is not None) == (spec.bias == "post_scale_bias"): a bias exactly where the spec asks for it; give
        it or correct the spec
    must (terms.slopes is not None) == (spec.bias == "alibi"): slopes exactly where the spec asks for them; give them or
        correct the spec
    must (terms.rng is not None) == (spec.dropout > 0): rng exactly where the spec asks for it; give it or correct the
        spec
    must (terms.sink is not None) == (spec.softmax == "learnable"): a sink with 'learnable', none otherwise; correct
        sink or the spec
    terms.sink? [size.heads] f32
    terms.rng? [2] i64
    terms.slopes? [...] f32
    must terms.slopes is None or terms.slopes.shape in ((size.heads,), (size.batch, size.heads)): one for each head, or
        for each sequence and head; correct slopes
    must terms.bias is None or not (terms.bias.ptr & 15 and terms.bias.device.kind == "cuda"): a bias that begins at a
        multiple of 16 bytes; copy the bias
""")
def _check_terms(
    op: str, rt: Runtime, q: Tensor, k: Tensor, v: Tensor, size: Sizes, spec: AttentionSpec, terms: Terms
) -> None:
    """Tensors are of one size, and what else takes part is what the spec asks for."""
    full = (size.batch, size.heads, size.sq, size.skv)
    for name, t, allowed in (("mask", terms.mask, (dtypes.uint8, dtypes.bool_)), ("bias", terms.bias, (q.dtype,))):
        if t is not None:
            _check.broadcast(op, name, t, full, allowed)
    if spec.max_logit and terms.pages is not None:
        raise UnsupportedError(op, "max_logit with a paged cache", "one of the two", "leave max_logit out")
