"""What takes part in attention besides q, k and v; and that sizes, types, lengths and pages fit one another and the
spec."""

from __future__ import annotations

from typing import NamedTuple

from te_core import dtypes
from te_core.attention import BIASES, DIMENSIONS, FORMATS, SOFTMAX, AttentionSpec, Lengths, Sizes
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import _check
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
    _check_spec(op, spec)
    for name, t, form in (("q", q, spec.q_format), ("k", k, spec.kv_format), ("v", v, spec.kv_format)):
        dims = 3 if form == "thd" and not (terms.pages is not None and name != "q") else 4
        _check.require(
            t.ndim == dims and t.row_major_strides()[-1] == 1,
            op,
            f"{name} = {t!r}",
            f"a tensor of {dims} dimensions ({form}) whose last stride is 1",
            f"correct {name} or its format",
        )
    _check_types(op, q, k, v, types)
    _check.on_device(op, rt.device, q, k, v, *terms[1:], *(terms.lengths or ()))
    _check_lengths(op, q, k, spec, terms)
    _check_pages(op, q, spec, terms)
    size = sizes_of(q, k, v, spec, terms)
    _check.require(
        k.shape[-1] == size.d_qk and k.shape[:-1] == v.shape[:-1],
        op,
        f"q {q!r}, k {k!r}, v {v!r}",
        "k of q's head width, and v of k's shape but for its head width",
        "correct the shapes",
    )
    _check.require(
        size.groups > 0 and size.heads % size.groups == 0,
        op,
        f"{size.heads} heads over {size.groups} groups",
        "a multiple",
        "choose num_gqa_groups that divides the heads",
    )
    _check.require(
        min(size.d_qk, size.d_v) > 0,
        op,
        f"heads of {size.d_qk} and {size.d_v}",
        "widths from 1 on",
        "correct the shapes",
    )
    if spec.kv_format != "thd" and terms.pages is None:
        kv_batch = k.shape[DIMENSIONS[spec.kv_format][0]]  # type: ignore[index]
        _check.require(
            kv_batch == size.batch, op, f"batches of {size.batch} and {kv_batch}", "one batch size", "correct q or k"
        )
    _check_terms(op, size, spec, terms, q.dtype)


def _check_spec(op: str, spec: AttentionSpec) -> None:
    """The spec's names and numbers are allowed ones."""
    for name, value, allowed in (
        ("q_format", spec.q_format, FORMATS),
        ("kv_format", spec.kv_format, FORMATS),
        ("softmax", spec.softmax, SOFTMAX),
        ("bias", spec.bias, tuple(b for b in BIASES if b != "pre_scale_bias")),
    ):
        _check.one_of(op, name, value, allowed)
    _check.require(
        0.0 <= spec.dropout <= 1.0 and spec.softcap >= 0.0 and spec.left >= -1 and spec.right >= -1,
        op,
        f"{spec}",
        "0 <= dropout <= 1, softcap >= 0, window bounds >= -1",
        "correct the spec",
    )


def _check_types(op: str, q: Tensor, k: Tensor, v: Tensor, allowed: tuple[DType, ...]) -> None:
    """q, k and v are of one allowed type."""
    _check.one_of(op, "dtype of q", q.dtype, allowed)
    _check.require(
        k.dtype is q.dtype and v.dtype is q.dtype,
        op,
        f"q {q.dtype}, k {k.dtype}, v {v.dtype}",
        "one dtype",
        "convert them to one",
    )


def _check_lengths(op: str, q: Tensor, k: Tensor, spec: AttentionSpec, terms: Terms) -> None:
    lengths = terms.lengths
    packed = "thd" in (spec.q_format, spec.kv_format)
    _check.require(
        (lengths is not None) == spec.padded and (spec.padded or not packed),
        op,
        f"padded={spec.padded}, formats {spec.q_format} and {spec.kv_format}, lengths {lengths}",
        "lengths with padded=True, always so in thd",
        "pass lengths, or correct the spec",
    )
    if lengths is None:
        return
    batch = len(lengths.cu_q.shape) and lengths.cu_q.shape[0] - 1
    _check.require(batch >= 0, op, f"cu_q = {lengths.cu_q!r}", "running sums that begin with 0", "correct cu_seqlens")
    _check.require(lengths.cu_kv is not None, op, "lengths without cu_kv", "those of q and of k", "pass both")
    for name, cu in lengths._asdict().items():
        _check.vector(op, name, cu, batch + 1, (dtypes.int32,))
    b = DIMENSIONS[spec.q_format][0]
    _check.require(
        b is None or q.shape[b] == batch,
        op,
        f"lengths of {batch} sequences for q {q!r}",
        "one length for each row",
        "correct cu_seqlens",
    )
    for form, longest, name in ((spec.q_format, spec.max_q, "max_q"), (spec.kv_format, spec.max_kv, "max_kv")):
        _check.require(
            form != "thd" or longest > 0,
            op,
            f"{name}={longest} in thd",
            "the longest sequence's length",
            f"give {name}",
        )


def _check_pages(op: str, q: Tensor, spec: AttentionSpec, terms: Terms) -> None:
    """The page table has a row for each sequence."""
    pages = terms.pages
    batch = _extent(q, spec.q_format, spec.max_q, terms.lengths and terms.lengths.cu_q)[0]
    if pages is not None:
        _check.sized(op, "pages", pages, (batch, *pages.shape[1:2]), (dtypes.int32,), "correct the page table")
        _check.require(
            pages.ndim == 2, op, f"pages = {pages!r}", "[sequences, blocks of each]", "correct the page table"
        )


def _check_terms(op: str, size: Sizes, spec: AttentionSpec, terms: Terms, dtype: DType) -> None:
    for name, t, asked in (
        ("mask", terms.mask, spec.masked),
        ("bias", terms.bias, spec.bias == "post_scale_bias"),
        ("slopes", terms.slopes, spec.bias == "alibi"),
        ("rng", terms.rng, spec.dropout > 0),
    ):
        _check.require(
            (t is not None) == asked,
            op,
            f"{name} {'given' if t is not None else 'not given'} for {spec}",
            f"{name} exactly where the spec asks for it",
            f"give {name} or correct the spec",
        )
    _check.require(
        (terms.sink is not None) == (spec.softmax == "learnable"),
        op,
        f"sink for softmax {spec.softmax!r}",
        "a sink with 'learnable', none otherwise",
        "correct sink or the spec",
    )
    _check.vector(op, "sink", terms.sink, size.heads, (dtypes.float32,))
    _check.vector(op, "rng", terms.rng, 2, (dtypes.int64,))
    full = (size.batch, size.heads, size.sq, size.skv)
    for name, t, allowed in (("mask", terms.mask, (dtypes.uint8, dtypes.bool_)), ("bias", terms.bias, (dtype,))):
        if t is not None:
            _check.broadcast(op, name, t, full, allowed)
    bias, slopes = terms.bias, terms.slopes
    _check.require(
        bias is None or not (bias.ptr & 15 and bias.device.kind == "cuda"),
        op,
        f"bias = {bias!r} that begins between multiples of 16 bytes",
        "one that begins at a multiple",
        "copy the bias",
    )
    if slopes is not None:
        wanted = (size.heads,) if slopes.ndim == 1 else (size.batch, size.heads)
        _check.sized(op, "slopes", slopes, wanted, (dtypes.float32,))
    if spec.max_logit and terms.pages is not None:
        raise UnsupportedError(op, "max_logit with a paged cache", "one of the two", "leave max_logit out")
