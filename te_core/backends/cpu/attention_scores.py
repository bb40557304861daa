"""The scores of an attention, part by part, in tiles of queries: what both directions share.

A `Part` is what some groups of heads do in some sequences whose tokens lie alike: as many of both as TILE holds, since
for short sequences NumPy's calls cost more than what they compute. The heads of a group read the same keys and values,
so their queries are rows of one product. A tile is some of the part's queries (of each head) beside the keys that any
of them can see, about TILE scores: they stay in the core's own cache for the passes over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from te_core.attention import AttentionSpec, Sizes
from te_core.backends.cpu import codec
from te_core.backends.cpu.elementwise import philox_words
from te_core.backends.cpu.executor import F32, Executor
from te_core.errors import ArgumentError
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.attention import Asked
    from te_core.ops.attention_terms import Terms

Array = np.ndarray[Any, Any]

#: Scores of a tile: 512 KiB of float32. A quarter of it costs up to half as much again; with twice as many, backward of
#: many short sequences outgrows the cache.
TILE = 1 << 17
#: Multiplications of the largest product that OpenBLAS leaves to one thread. Where that takes no more than four tiles,
#: products stay within it: those of 32 heads of 128 tokens, shared by two threads of busy cores, wait for one another
#: each time (measured, forward and backward: 750 ms against 20 ms).
ALONE = 1 << 18
_NEVER = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class Planned:
    """What an attention depends on besides its tensors: there is nothing to choose on a CPU."""

    spec: AttentionSpec
    size: Sizes


def planned(rt: Runtime, asked: Asked) -> Planned:
    """The plan of an attention, forward or backward, FP8 or not."""
    return Planned(asked.spec, asked.size)


class Part(NamedTuple):
    """The queries of some sequences and groups: where their tokens lie and which heads they are."""

    sequences: slice  # more than one only in batched formats
    groups: slice
    heads: slice
    q: slice  # tokens, within the row of a batched format
    kv: slice
    shift: int  # of the diagonal


class Tile(NamedTuple):
    """Some queries of a part and the keys that they may see, counted from the part's first."""

    rows: slice
    keys: slice


class Problem:
    """An attention's spec, sizes and terms, as arrays."""

    __slots__ = ("bias", "mask", "pages", "rng", "sink", "size", "slopes", "spans", "spec")

    spec: AttentionSpec
    size: Sizes

    def __init__(self, plan: Planned, terms: Terms, q: Tensor, k: Tensor) -> None:
        self.spec, self.size = spec, size = plan.spec, plan.size
        self.mask = None if terms.mask is None else terms.mask.numpy() != 0
        self.bias = None if terms.bias is None else terms.bias.numpy().astype(np.float32)
        self.rng = None if terms.rng is None else terms.rng.numpy()
        self.pages = None if terms.pages is None else terms.pages.numpy()
        self.slopes = None
        if terms.slopes is not None:
            self.slopes = np.broadcast_to(terms.slopes.numpy(), (size.batch, size.heads))
        self.sink: F32 | None = None
        if spec.softmax != "vanilla":
            self.sink = np.zeros(size.heads, np.float32) if terms.sink is None else terms.sink.numpy()
        self.spans = self._spans(terms, q.shape[0], k.shape[0])

    def _spans(self, terms: Terms, q_tokens: int, kv_tokens: int) -> tuple[list[slice], list[slice]]:
        """Where the queries, and where the keys, of each sequence lie; packed ones among so many tokens."""
        n, lengths = self.size.batch, terms.lengths
        if lengths is None:
            return [slice(0, self.size.sq)] * n, [slice(0, self.size.skv)] * n
        found = []
        kv_packed = self.spec.kv_format == "thd" and self.pages is None
        for packed, cu, padded, most, tokens in (
            (self.spec.q_format == "thd", lengths.cu_q, lengths.cu_q_padded, self.size.sq, q_tokens),
            (kv_packed, lengths.cu_kv, lengths.cu_kv_padded, self.size.skv, kv_tokens),
        ):
            sums = cu.numpy().tolist()
            if any(not 0 <= b - a <= most for a, b in pairwise(sums)):
                raise ArgumentError(
                    "attention", f"running sums {sums}", f"lengths from 0 to {most}", "correct cu_seqlens or max_seqlen"
                )
            begins = (sums if padded is None else padded.numpy().tolist()) if packed else [0] * n
            spans = [slice(begins[i], begins[i] + sums[i + 1] - sums[i]) for i in range(n)]
            if packed and any(s.start < 0 or s.stop > tokens for s in spans if s.start < s.stop):
                raise ArgumentError(
                    "attention",
                    f"sequences from {begins[:n]} on, up to {max(s.stop for s in spans)}",
                    f"sequences among the {tokens} tokens given",
                    "correct cu_seqlens, or cu_seqlens_*_padded",
                )
            found.append(spans)
        return found[0], found[1]

    def parts(self) -> Iterator[Part]:
        """All groups of all sequences: those that lie alike together, as far as TILE holds their scores."""
        groups, repeat = self.size.groups, self.size.heads // self.size.groups
        spans = list(zip(*self.spans, strict=True))
        batched = self.pages is None and "thd" not in (self.spec.q_format, self.spec.kv_format)
        for _, run in groupby(range(len(spans)), lambda i: spans[i] if batched else i):
            alike = list(run)
            q, kv = spans[alike[0]]
            queries, keys = q.stop - q.start, kv.stop - kv.start
            shift = keys - queries if self.spec.bottom_right else 0
            count = max(1, TILE // max(1, repeat * queries * keys))
            for i in alike[:: max(1, count // groups)]:
                sequences = slice(i, min(i + max(1, count // groups), alike[-1] + 1))
                for first in range(0, groups, min(count, groups)):
                    last = min(first + count, groups)
                    yield Part(sequences, slice(first, last), slice(first * repeat, last * repeat), q, kv, shift)

    def tiles(self, part: Part) -> Iterator[Tile]:
        """The part's queries with the keys that each tile's band leaves."""
        queries, keys = part.q.stop - part.q.start, part.kv.stop - part.kv.start
        heads = (part.heads.stop - part.heads.start) * (part.sequences.stop - part.sequences.start)
        step = max(1, TILE // max(1, keys * heads))
        alone = ALONE // max(1, self.size.heads // self.size.groups * keys * max(self.size.d_qk, self.size.d_v))
        if queries <= 4 * alone:
            step = min(step, max(1, alone))
        left, right = self.spec.left, self.spec.right
        for start in range(0, queries, step):
            stop = min(start + step, queries)
            first = max(0, start + part.shift - left) if left >= 0 else 0
            last = min(keys, stop + part.shift + right) if right >= 0 else keys
            yield Tile(slice(start, stop), slice(first, max(first, last)))

    # ------------------------------------------------------------------------------------ where values lie

    def queries(self, t: Tensor, part: Part) -> Array:
        """The part's rows [sequences, heads, tokens, d] of q, or of what lies as it does, as a view."""
        return _rows(t, self.spec.q_format, part.sequences, part.q, part.heads)

    def keys(self, t: Tensor, part: Part) -> Array:
        """The part's rows [sequences, groups, tokens, d] of k or v: a view, of a paged cache a copy."""
        if self.pages is None:
            return _rows(t, self.spec.kv_format, part.sequences, part.kv, part.groups)
        block = t.shape[1]
        pages = self.pages[part.sequences.start, : -(-part.kv.stop // block)]
        found: Array = t.numpy()[pages, :, part.groups]
        return found.reshape(-1, *found.shape[2:])[part.kv].transpose(1, 0, 2)[None]

    def statistics(self, t: Tensor, part: Part) -> F32:
        """The part's statistics [sequences, heads, tokens], as a view."""
        if self.spec.q_format == "thd":
            return t.numpy()[part.q, part.heads].T[None]
        return t.numpy()[part.sequences, part.heads, part.q]

    def of_tile(self, a: Array, part: Part, tile: Tile) -> Array:
        """A tile's piece of what broadcasts to [batch, heads, queries, keys], as a view that broadcasts to the tile."""
        a = a[part.sequences] if a.shape[0] > 1 else a
        a = a[:, part.heads] if a.shape[1] > 1 else a
        return (a[:, :, tile.rows] if a.shape[2] > 1 else a)[..., tile.keys]

    # ----------------------------------------------------------------------------------------- the numbers

    def scores(self, part: Part, tile: Tile, q: F32, k: F32) -> tuple[F32, F32 | None]:
        """(scores [sequences, heads, rows, keys], -inf where a key is not seen; the slope of the softcap).

        q [sequences, heads, rows, d] and k [sequences, groups, keys, d] are those of the tile.
        """
        spec = self.spec
        s = product(q, k.swapaxes(2, 3))
        np.multiply(s, np.float32(spec.scale), out=s)
        slope = None
        if spec.softcap:
            cap = np.float32(spec.softcap)
            bent = np.tanh(s / cap)
            np.multiply(bent, cap, out=s)
            slope = np.square(bent, out=bent)
            np.subtract(np.float32(1), slope, out=slope)
        if self.bias is not None:
            s += self.of_tile(self.bias, part, tile)
        if self.slopes is None and not spec.banded and self.mask is None:
            return s, slope
        diagonal = np.arange(tile.rows.start, tile.rows.stop)[:, None] + part.shift
        behind = np.arange(tile.keys.start, tile.keys.stop) - diagonal  # how far a key lies behind the diagonal
        if self.slopes is not None:
            s -= self.slopes[part.sequences, part.heads, None, None] * np.abs(behind).astype(np.float32)
        if spec.left >= 0:
            np.copyto(s, _NEVER, where=behind < -spec.left)
        if spec.right >= 0:
            np.copyto(s, _NEVER, where=behind > spec.right)
        if self.mask is not None:
            np.copyto(s, _NEVER, where=self.of_tile(self.mask, part, tile))
        return s, slope

    def softmax(self, part: Part, s: F32) -> tuple[F32, F32]:
        """(weights, log of the sum [sequences, heads, rows]) of scores, which are overwritten."""
        top = s.max(axis=3, initial=_NEVER)
        sink = None if self.sink is None else self.sink[part.heads, None]
        if sink is not None:
            top = np.maximum(top, sink)
        top = np.where(np.isneginf(top), np.float32(0), top)
        p = np.exp(np.subtract(s, top[..., None], out=s), out=s)
        total = p.sum(axis=3)
        if sink is not None:
            total += np.exp(sink - top)
        np.divide(p, np.where(total == 0, np.float32(1), total)[..., None], out=p)
        return p, top + np.log(total)

    def weights(self, s: F32, logs: F32) -> F32:
        """The weights again, of scores (overwritten) and the logs of their sums."""
        seen_any = np.where(np.isneginf(logs), np.float32(0), logs)
        return np.exp(np.subtract(s, seen_any[..., None], out=s), out=s)

    def drop(self, part: Part, tile: Tile) -> F32 | None:
        """What dropout multiplies the tile's weights by: 0 or 1 / (1 - p); None without dropout."""
        p = self.spec.dropout
        if self.rng is None or p == 0.0:
            return None
        rows, (sq, skv) = tile.rows.stop - tile.rows.start, self.size[1:3]
        sequences, heads = (range(s.start, s.stop) for s in (part.sequences, part.heads))
        factors = np.empty((len(sequences), len(heads), rows, tile.keys.stop - tile.keys.start), np.float32)
        if p == 1.0:
            factors.fill(0.0)
            return factors
        for i, sequence in enumerate(sequences):
            for j, head in enumerate(heads):
                first = ((sequence * self.size.heads + head) * sq + tile.rows.start) * skv
                words = philox_words(self.rng, 0, first, rows * skv).reshape(rows, skv)[:, tile.keys]
                factors[i, j] = words >= np.uint32(int(p * 2.0**32))
        return np.multiply(factors, np.float32(1.0 / (1.0 - p)), out=factors)


def product(a: F32, b: F32) -> F32:
    """a [sequences, heads, rows, m] times b [sequences, groups, m, n], one product of matrices for each group."""
    result: F32 = _by_group(a, b.shape[1]) @ b
    return result.reshape(*a.shape[:3], b.shape[3])


def folded(a: F32, b: F32, groups: int) -> F32:
    """The sums over the heads and rows of each group of a [.., rows, m] times b [.., rows, n]: [.., groups, m, n]."""
    result: F32 = _by_group(a, groups).swapaxes(2, 3) @ _by_group(b, groups)
    return result


def _by_group(a: F32, groups: int) -> F32:
    """Dense [sequences, heads, rows, m] as [sequences, groups, rows of all its heads, m]."""
    sequences, heads, rows, m = a.shape
    return a.reshape(sequences, groups, heads // groups * rows, m)


def _rows(t: Tensor, form: str, sequences: slice, tokens: slice, heads: slice) -> Array:
    """A view [sequences, heads, tokens, d]; of thd, whose tokens are of one sequence."""
    values = t.numpy()
    if form == "bshd":
        return values[sequences, tokens, heads].transpose(0, 2, 1, 3)
    if form == "sbhd":
        return values[tokens, sequences, heads].transpose(1, 2, 0, 3)
    return values[tokens, heads].transpose(1, 0, 2)[None]


def load(ex: Executor, view: Array, factor: Tensor | None = None) -> F32:
    """The values of a view, times a factor [1], as dense float32."""
    values = codec.decode(ex, np.ascontiguousarray(view), np.empty(view.shape, np.float32))
    return values if factor is None else np.multiply(values, factor.numpy(), out=values)


def store(ex: Executor, values: F32, view: Array, scale: np.float32 | None = None) -> None:
    """Write values, times a scale, rounded to the view's type."""
    codes = np.empty(values.shape, view.dtype)
    codec.encode(ex, np.ascontiguousarray(values), codes, scale)
    view[...] = codes


def clear(*tensors: Tensor) -> None:
    """Fill tensors, of any strides, with zeros: tokens that belong to no sequence stay so."""
    for t in tensors:
        t.numpy().view(f"u{t.dtype.itemsize}")[...] = 0
