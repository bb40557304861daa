"""The scores of an attention, sequence by sequence, group by group, in tiles of queries: what both directions share.

A `Part` is what the query heads of one group do in one sequence: all of them read the same keys and values, so their
queries are rows of one product. A tile is some of those queries (of each head) beside the keys that any of them can
see, about TILE scores: they stay in the core's own cache for the passes over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from te_core.attention import AttentionSpec, Sizes
from te_core.backends.cpu import codec
from te_core.backends.cpu.elementwise import philox_words
from te_core.backends.cpu.executor import F32, Executor
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.attention import Terms

Array = np.ndarray[Any, Any]

#: Scores of a tile: 1 MiB of float32.
TILE = 1 << 18
_NEVER = np.float32(-np.inf)


class Part(NamedTuple):
    """The queries of one sequence and group: where its tokens lie and which heads they are."""

    sequence: int
    group: int
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

    def __init__(self, planned: tuple[AttentionSpec, Sizes], terms: Terms) -> None:
        self.spec, self.size = spec, size = planned
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
        self.spans = self._spans(terms)

    def _spans(self, terms: Terms) -> tuple[list[slice], list[slice]]:
        """Where the queries, and where the keys, of each sequence lie."""
        n, lengths = self.size.batch, terms.lengths
        if lengths is None:
            return [slice(0, self.size.sq)] * n, [slice(0, self.size.skv)] * n
        found = []
        kv_packed = self.spec.kv_format == "thd" and self.pages is None
        for packed, cu, padded in (
            (self.spec.q_format == "thd", lengths.cu_q, lengths.cu_q_padded),
            (kv_packed, lengths.cu_kv, lengths.cu_kv_padded),
        ):
            sums = cu.numpy().tolist()
            begins = (sums if padded is None else padded.numpy().tolist()) if packed else [0] * n
            found.append([slice(begins[i], begins[i] + sums[i + 1] - sums[i]) for i in range(n)])
        return found[0], found[1]

    def parts(self) -> Iterator[Part]:
        """All groups of all sequences."""
        repeat = self.size.heads // self.size.groups
        for i, (q, kv) in enumerate(zip(*self.spans, strict=True)):
            queries, keys = q.stop - q.start, kv.stop - kv.start
            shift = keys - queries if self.spec.bottom_right else 0
            for group in range(self.size.groups):
                yield Part(i, group, slice(group * repeat, (group + 1) * repeat), q, kv, shift)

    def tiles(self, part: Part) -> Iterator[Tile]:
        """The part's queries with the keys that each tile's band leaves."""
        queries, keys = part.q.stop - part.q.start, part.kv.stop - part.kv.start
        step = max(1, TILE // max(1, keys * (part.heads.stop - part.heads.start)))
        left, right = self.spec.left, self.spec.right
        for start in range(0, queries, step):
            stop = min(start + step, queries)
            first = max(0, start + part.shift - left) if left >= 0 else 0
            last = min(keys, stop + part.shift + right) if right >= 0 else keys
            yield Tile(slice(start, stop), slice(first, max(first, last)))

    # ------------------------------------------------------------------------------------ where values lie

    def queries(self, t: Tensor, part: Part) -> Array:
        """The part's rows [heads, tokens, d] of q, or of what lies as it does, as a view."""
        return _row(t, self.spec.q_format, part.sequence)[part.q, part.heads].transpose(1, 0, 2)

    def keys(self, t: Tensor, part: Part) -> Array:
        """The part's rows [tokens, d] of k or v: a view, of a paged cache a copy."""
        if self.pages is None:
            return _row(t, self.spec.kv_format, part.sequence)[part.kv, part.group]
        block = t.shape[1]
        pages = self.pages[part.sequence, : -(-part.kv.stop // block)]
        found: Array = t.numpy()[pages, :, part.group].reshape(-1, t.shape[3])[part.kv]
        return found

    def statistics(self, t: Tensor, part: Part) -> F32:
        """The part's statistics [heads, tokens], as a view."""
        if self.spec.q_format == "thd":
            return t.numpy()[part.q, part.heads].T
        return t.numpy()[part.sequence, part.heads, part.q]

    def of_tile(self, a: Array, part: Part, tile: Tile) -> Array:
        """A tile's piece of what broadcasts to [batch, heads, queries, keys], as a view that broadcasts to the tile."""
        a = a[part.sequence if a.shape[0] > 1 else 0]
        a = a[part.heads] if a.shape[0] > 1 else a
        return (a[:, tile.rows] if a.shape[1] > 1 else a)[:, :, tile.keys]

    # ----------------------------------------------------------------------------------------- the numbers

    def scores(self, part: Part, tile: Tile, q: F32, k: F32) -> tuple[F32, F32 | None]:
        """(scores [heads, rows, keys], -inf where a key is not seen; the slope of the softcap).

        q [heads, rows, d] and k [keys, d] are those of the tile.
        """
        spec = self.spec
        s = product(q, k.T)
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
            s -= self.slopes[part.sequence, part.heads, None, None] * np.abs(behind).astype(np.float32)
        if spec.left >= 0:
            np.copyto(s, _NEVER, where=behind < -spec.left)
        if spec.right >= 0:
            np.copyto(s, _NEVER, where=behind > spec.right)
        if self.mask is not None:
            np.copyto(s, _NEVER, where=self.of_tile(self.mask, part, tile))
        return s, slope

    def softmax(self, part: Part, s: F32) -> tuple[F32, F32]:
        """(weights, log of the sum [heads, rows]) of scores, which are overwritten."""
        top = s.max(axis=2, initial=_NEVER)
        sink = None if self.sink is None else self.sink[part.heads, None]
        if sink is not None:
            top = np.maximum(top, sink)
        top = np.where(np.isneginf(top), np.float32(0), top)
        p = np.exp(np.subtract(s, top[..., None], out=s), out=s)
        total = p.sum(axis=2)
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
        factors = np.empty((part.heads.stop - part.heads.start, rows, tile.keys.stop - tile.keys.start), np.float32)
        for i, head in enumerate(range(part.heads.start, part.heads.stop)):
            first = ((part.sequence * self.size.heads + head) * sq + tile.rows.start) * skv
            words = philox_words(self.rng, 0, first, rows * skv).reshape(rows, skv)[:, tile.keys]
            factors[i] = words >= np.uint32(int(p * 2.0**32))
        return np.multiply(factors, np.float32(1.0 / (1.0 - p)), out=factors)


def product(a: F32, b: F32) -> F32:
    """a [heads, rows, m] times b [m, n], as one product of matrices."""
    heads, rows, m = a.shape
    return (a.reshape(heads * rows, m) @ b).reshape(heads, rows, b.shape[1])


def folded(a: F32, b: F32) -> F32:
    """The sum over heads and rows of a [heads, rows, m] times b [heads, rows, n]: [m, n]."""
    rows = a.shape[0] * a.shape[1]
    result: F32 = a.reshape(rows, a.shape[2]).T @ b.reshape(rows, b.shape[2])
    return result


def _row(t: Tensor, form: str, sequence: int) -> Array:
    """The tokens [tokens, heads, d] among which a sequence lies."""
    values = t.numpy()
    return values[sequence] if form == "bshd" else values[:, sequence] if form == "sbhd" else values


def load(ex: Executor, view: Array, factor: npt.NDArray[np.float32] | None = None) -> F32:
    """The values of a view, times a factor [1], as dense float32."""
    values = codec.decode(ex, np.ascontiguousarray(view), np.empty(view.shape, np.float32))
    return values if factor is None else np.multiply(values, factor, out=values)


def store(ex: Executor, values: F32, view: Array, scale: np.float32 | None = None) -> None:
    """Write values, times a scale, rounded to the view's type."""
    codes = np.empty(values.shape, view.dtype)
    codec.encode(ex, np.ascontiguousarray(values), codes, scale)
    view[...] = codes


def clear(*tensors: Tensor) -> None:
    """Fill tensors, of any strides, with zeros: tokens that belong to no sequence stay so."""
    for t in tensors:
        t.numpy().view(f"u{t.dtype.itemsize}")[...] = 0
