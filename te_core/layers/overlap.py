"""Products over ranks that overlap with their own communication: a part is multiplied while others travel.

Without this a product waits for its whole operand, and then for the sum of all ranks' results (`parallel`). Here one of
three methods puts the two beside each other; p ranks, M rows of the whole, m = M / p of a rank's part, r this rank.

ring_exchange, of an operand that lies cut over the ranks: the own m rows are multiplied at once. Meanwhile the parts of
ranks r + 1, r + 2, ... come, each with its own scales, and are multiplied in this order, each when it is there.

ring_exchange, of a result that is summed: the rows of rank r + p - 1 are multiplied first and travel while those of
rank r + p - 2 are, the own rows come last. The p summands are added in float32, by rank, and rounded once.

pipeline, of a result that is summed: columns of the result in `splits` pieces; the sum of one over the ranks is on its
way while the next is multiplied.

Values are those of the plain product, bit for bit where a product of m rows (or of some columns) gives the bits that
one of M rows has in these places. Whether a call overlaps depends on what all ranks have alike: its spec and shapes.
How parts and summands travel is a `Carrier`'s business (te_core/layers/carriers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from te_core import dtypes
from te_core.errors import UnsupportedError
from te_core.layers import overlap_choice
from te_core.layers.carriers import Calls, Carrier, Summands, carrier_of, join, lanes, order
from te_core.layers.communicator import Communicator, Handle
from te_core.layers.gathered import turns
from te_core.ops import raw as ops
from te_core.quantized import PAD, Copy, QuantizedTensor, pieces_of
from te_core.runtime import Runtime
from te_core.tensor import Tensor

Value = Tensor | QuantizedTensor
#: (rt, a, b, out): one product of rows of a and rows (or columns) of b.
Multiply = Callable[[Runtime, Value, Value, Tensor], None]

RING, PIPELINE, BULK, EXTERNAL = METHODS = ("ring_exchange", "pipeline", "bulk", "external")


@dataclass(frozen=True, slots=True)
class Way:
    """How one GEMM overlaps."""

    method: str  # one of METHODS
    splits: int = 0  # pieces of a pipeline
    chosen: bool = True  # somebody has said so; else the fastest that was measured is taken, for which this stands


@dataclass(frozen=True, slots=True)
class Overlap:
    """How the GEMMs of a weight overlap with what travels for them; None: as without overlap."""

    name: str = ""  # of the weight: its GEMMs are called qkv_fprop, qkv_dgrad, ...
    fprop: Way | None = None
    dgrad: Way | None = None
    wgrad: Way | None = None
    capacity: int = 0  # the most elements of a whole tensor that overlaps
    idle: str = ""  # why no call overlaps, although it was asked for


class Overlapping:
    """One call's overlap: which of its products do, and what is on its way."""

    __slots__ = ("_carrier", "comm", "ran", "ring", "spec", "ways")

    def __init__(self, spec: Any, ways: Overlap, ran: dict[str, str], comm: Communicator) -> None:
        self.spec, self.ways, self.ran, self.comm = spec, ways, ran, comm
        self.ring: Ring | None = None  # parts of an operand on their way
        self._carrier: Carrier | None = None

    def carrier(self, rt: Runtime) -> Carrier:
        """How what overlaps travels."""
        found = self._carrier
        if found is None:
            found = self._carrier = carrier_of(rt, self.comm, self.ways.capacity, self.spec.dtype)
        return found

    def begin(self, rt: Runtime, gemm: str, part: Value, plain: bool) -> bool:
        """Have the other ranks' parts of a gathered operand come, if this GEMM multiplies part by part.

        `plain`: the operand is quantized once it is whole.
        """
        if self._asked(gemm) != RING:
            return False
        _, reason = self._method(rt, gemm, "gather", (self.comm.size * part.shape[0], part.shape[1]))
        reason = reason or (
            "the operand travels in high precision, and is quantized whole" if plain else _no_rows(part, part.shape[0])
        )
        if reason:
            self._plain(rt, gemm, reason)
            return False
        self.ring = Ring(rt, self.comm, self.carrier(rt), part)
        self._ran(rt, gemm, f"overlapped by {RING}, in {self.comm.size} parts")
        return True

    def multiply_parts(self, rt: Runtime, b: Value, out: Tensor, run: Multiply, keep: bool) -> Value | None:
        """The product of an operand that has begun to come. (Its whole, if that is to be kept and can be read.)"""
        ring, self.ring = self.ring, None
        assert ring is not None
        c = out.matrix()
        for lane, rank, part in ring.parts():
            m = part.shape[0]
            run(lane, part, b, c.rows(rank * m, (rank + 1) * m))
        ring.end()
        return ring.kept(rt) if keep else None

    def multiply_summands(
        self, rt: Runtime, gemm: str, a: Value, b: Value, out: Tensor, run: Multiply
    ) -> tuple[Tensor, Handle] | None:
        """(this rank's part of the sum, its handle) of a product of which each rank has a summand; None: it does not
        overlap."""
        size = self.comm.size
        if (
            self._asked(gemm) not in (RING, PIPELINE) or out.shape[0] % size
        ):  # ranks that do not divide it: see elsewhere
            return None
        way, c = getattr(self.ways, gemm), out.matrix()
        m = c.shape[0] // size
        method, reason = self._method(rt, gemm, "sum" if gemm == "fprop" else "dgrad", c.shape)
        splits = size if method == RING else way.splits
        if not reason:
            reason = _no_rows(a, m) if method == RING else _no_columns(b, gemm, c.shape[1], splits)
        if reason:
            self._plain(rt, gemm, reason)
            return None
        made = rt.empty((out.shape[0] // size, *out.shape[1:]), out.dtype)
        self._ran(rt, gemm, f"overlapped by {method}, in {splits} parts")
        carrier = self.carrier(rt)
        if method == RING:
            return made, pushed(rt, (carrier, self.comm), (a, b, c), made.matrix(), run)
        return made, pipelined(rt, carrier, (a, b, c), made.matrix(), gemm, splits, run)

    def bulk(self, rt: Runtime, gemm: str, shape: tuple[int, ...]) -> Carrier:
        """How travels what this GEMM has beside it, or what it needs: a whole tensor of this shape."""
        if self._asked(gemm) not in (BULK, EXTERNAL) or self._method(rt, gemm, "dgrad", shape)[1]:
            return Calls(self.comm)
        return self.carrier(rt)

    def beside(self, rt: Runtime, gemm: str, shape: tuple[int, ...]) -> None:
        """Note of a GEMM whose overlap is that of another one, how it is asked for, and why it is not so."""
        asked = self._asked(gemm)
        if asked in (BULK, EXTERNAL):
            _, reason = self._method(rt, gemm, "dgrad", shape)
            if reason:
                self._plain(rt, gemm, reason)
            else:
                self._ran(rt, gemm, _BESIDE[asked])

    def _asked(self, gemm: str) -> str:
        way = None if self.ways.idle else getattr(self.ways, gemm)
        return "" if way is None else way.method

    def _method(self, rt: Runtime, gemm: str, collective: str, shape: tuple[int, ...]) -> tuple[str, str]:
        """(how a GEMM that was asked to overlap does, why not), by the whole tensor that travels."""
        way: Way = getattr(self.ways, gemm)
        reason = self._against(gemm, shape[0] * shape[1])
        if reason or way.chosen or way.method == EXTERNAL or rt.device.kind != overlap_choice.MEASURED:
            return way.method, reason
        recipe = overlap_choice.recipe_of(self.spec.precision)
        call = overlap_choice.Call(self.carrier(rt).name, self.comm.size, recipe, *shape)
        return overlap_choice.fastest(collective, (way.method, RING) if collective == "sum" else (way.method,), call)

    def _against(self, gemm: str, size: int) -> str:
        """Why no call of this spec and size overlaps; "" where it does."""
        if self.spec.inspect is not None:
            return "somebody looks at this step"
        if size == 0:
            return "there are no rows"
        if size <= self.ways.capacity:
            return ""
        got = f"a tensor of {size} elements, and initialize_ub made room for {self.ways.capacity}"
        precision = self.spec.precision
        if precision is not None and precision.strict:
            raise UnsupportedError(
                f"overlap of {self.ways.name}_{gemm}",
                got,
                "calls that fit the shape of initialize_ub, where a region is strict",
                "call destroy_ub, then initialize_ub with a larger shape",
            )
        return got

    def _plain(self, rt: Runtime, gemm: str, reason: str) -> None:
        self._ran(rt, gemm, f"not overlapped by {self._asked(gemm)}: {reason}")

    def _ran(self, rt: Runtime, gemm: str, how: str) -> None:
        """Note for reports how a GEMM ran; a recorded layer notes it again."""
        if how.startswith("overlapped"):
            how += self.carrier(rt).through
        self.ran[gemm] = how
        if rt.recorder is not None:
            rt.recorder.add_note("overlap", partial(self.ran.__setitem__, gemm, how))


_BESIDE = {
    BULK: f"overlapped by {BULK}: what travels has a product beside it that does not need it",
    EXTERNAL: f"overlapped by {EXTERNAL}: what dgrad gathered serves wgrad, where its bytes do",
}


# ------------------------------------------------------------------------------------------ rows of operands


def _no_rows(x: Value, m: int) -> str:
    """Why an operand is not multiplied m rows at a time; "" where it is."""
    if isinstance(x, Tensor):
        return ""
    form = x.format
    if form.row_scaled:
        return f"products of {form} are not split"
    plain = form.scaling == "tensor" or (form.scaling == "block" and not form.tiled)
    step = PAD if plain else _TILE
    return f"parts of {m} rows, no multiple of {step}" if m % step else ""


#: Rows that scales of other formats are padded to, or that share them.
_TILE = 128


def _rows(x: QuantizedTensor, start: int, stop: int, scale: Tensor) -> QuantizedTensor:
    """Rows of a rowwise copy, with their scales."""
    assert x.rowwise is not None
    copy = Copy(x.rowwise.rows(start, stop), scale, x.rowwise_amax)
    return QuantizedTensor(x.format, (stop - start, x.shape[1]), copy, None)


def _scale_step(x: QuantizedTensor) -> int | None:
    """How many rows have a line of the scales; None where a row has a column of them (1x128 blocks)."""
    if x.format.scaling != "block":
        return 1
    return _TILE if x.format.tiled else None


def row_parts(rt: Runtime, x: Value, size: int) -> list[Value]:
    """The rows of each of `size` ranks, each with its scales."""
    m = x.shape[0] // size
    ends = [(i * m, (i + 1) * m) for i in range(size)]
    if isinstance(x, Tensor):
        return [x.rows(*end) for end in ends]
    scale = x.rowwise_scale
    assert scale is not None
    if x.format.scaling == "tensor":
        return [_rows(x, *end, scale) for end in ends]
    if (step := _scale_step(x)) is not None:
        return [_rows(x, a, b, scale.rows(a // step, b // step)) for a, b in ends]
    by_row = ops.transpose(rt, scale)  # [blocks, rows]: those of some rows are no piece of memory
    return [_rows(x, a, b, ops.transpose(rt, by_row.rows(a, b))) for a, b in ends]


# ------------------------------------------------------------------------------- an operand that comes by parts


class Ring:
    """The other ranks' parts of a matrix on their way, those of rank r + 1 first."""

    def __init__(self, rt: Runtime, comm: Communicator, carrier: Carrier, part: Value) -> None:
        self.rt, self.comm, self.carrier, self.own = rt, comm, carrier, part
        self._whole = _room(rt, part, comm.size)
        m = part.shape[0]
        self._parts = {source: self._place(rt, source * m, (source + 1) * m) for source in order(comm)}
        self._coming = carrier.parts(rt, _pieces(part), {i: _pieces(coming) for i, coming in self._parts.items()})

    def _place(self, rt: Runtime, start: int, stop: int) -> Value:
        """Where these rows come: in the whole, but for scales that are no piece of memory there."""
        whole, part = self._whole, self.own
        if isinstance(whole, Tensor):
            return whole.rows(start, stop)
        assert isinstance(part, QuantizedTensor) and part.rowwise_scale is not None
        form, scale = part.format, part.rowwise_scale
        if form.scaling == "tensor":
            return _rows(whole, start, stop, scale)  # the ranks have agreed on it
        step, of_whole = _scale_step(part), whole.rowwise_scale
        assert of_whole is not None
        rows = rt.empty(scale.shape, scale.dtype) if step is None else of_whole.rows(start // step, stop // step)
        return _rows(whole, start, stop, rows)

    def parts(self) -> Iterator[tuple[Runtime, int, Value]]:
        """(stream, rank, its part) in the order in which they are multiplied, each when it is there."""
        streams = lanes(self.carrier, self.rt)
        yield self.rt, self.comm.rank, self.own
        for number, source in enumerate(self._parts, 1):
            self._coming.wait(source)
            yield streams[number % 2], source, self._parts[source]

    def end(self) -> None:
        """All parts are multiplied."""
        join(self.carrier, self.rt)
        self._coming.end(self.rt)

    def kept(self, rt: Runtime) -> Value | None:
        """The whole, the own rows with it; None where its scales are those of parts."""
        own, first = self.own, self.comm.rank * self.own.shape[0]
        if isinstance(own, QuantizedTensor) and not turns(own.format):
            return None
        target = self._place(rt, first, first + own.shape[0])
        for source, place in zip(_pieces(own), _pieces(target), strict=True):
            ops.resize(rt, source, *source.shape, out=place)
        return self._whole


def _pieces(part: Value) -> list[Tensor]:
    """What of a part travels."""
    if isinstance(part, Tensor):
        return [part]
    data, scale = part.rowwise, part.rowwise_scale
    assert data is not None and scale is not None
    return [data] if part.format.scaling == "tensor" else [data, scale]


def _room(rt: Runtime, part: Value, size: int) -> Value:
    """Memory for the whole of which this is a part."""
    if isinstance(part, Tensor):
        return rt.empty((size * part.shape[0], part.shape[1]), part.dtype)
    form, shape = part.format, (size * part.shape[0], part.shape[1])
    block = rt.empty((pieces_of(rt.device, form, shape, False).nbytes,), dtypes.uint8)
    whole = QuantizedTensor.rowwise_in(block, shape, form)
    if form.scaling == "tensor":
        whole.rowwise_scale = part.rowwise_scale
    if part.rowwise_amax is not None:
        whole.rowwise_amax = part.rowwise_amax  # the ranks have agreed on it
    return whole


# ------------------------------------------------------------------------------------ a result that is summed


def pushed(
    rt: Runtime, how: tuple[Carrier, Communicator], operands: tuple[Value, Value, Tensor], out: Tensor, run: Multiply
) -> Summands:
    """out [m, N] = this rank's rows of the sum of all ranks' c [M, N] = a b, each rank's rows on their way to it as
    soon as they are there."""
    (a, b, c), (carrier, comm), m = operands, how, out.shape[0]
    parts, summands = row_parts(rt, a, comm.size), carrier.summands(rt, out)
    streams = lanes(carrier, rt)
    for number, to in enumerate(reversed(order(comm))):
        made = c.rows(to * m, (to + 1) * m)
        run(streams[number % 2], parts[to], b, made)
        summands.send(streams[number % 2], to, made)
    run(streams[(comm.size - 1) % 2], parts[comm.rank], b, summands.own)
    join(carrier, rt)
    summands.arrive(rt)
    return summands


# --------------------------------------------------------------------------------------- a pipeline of columns


def _no_columns(b: Value, gemm: str, n: int, splits: int) -> str:
    """Why a result [M, n] is not made in so many pieces; "" where it is."""
    if isinstance(b, Tensor):
        step = 1
    elif (b.columnwise if gemm == "dgrad" else b.rowwise) is None:
        return "the weight has no copy to be split"
    elif b.format.scaling == "tensor":
        step = PAD
    elif b.format.scaling == "block" and b.format.tiled:
        step = _TILE
    else:
        return f"products of {b.format} are not split"
    if gemm == "dgrad" and isinstance(b, Tensor):
        return "a plain weight is not split by its columns"
    return f"{n} columns in {splits} pieces, of no multiple of {step}" if n % (splits * step) else ""


def _lines(b: Value, gemm: str, start: int, stop: int) -> Value:
    """What of a weight makes these columns of a result: rows of it, or (dgrad) columns, which lie turned."""
    if isinstance(b, Tensor):
        return b.rows(start, stop)
    columns = gemm == "dgrad"
    data, scale = (b.columnwise, b.columnwise_scale) if columns else (b.rowwise, b.rowwise_scale)
    assert data is not None and scale is not None
    if b.format.scaling == "block":
        scale = scale.rows(start // _TILE, stop // _TILE)
    copy = Copy(data.rows(start, stop), scale, None)
    if columns:
        return QuantizedTensor(b.format, (b.shape[0], stop - start), None, copy)
    return QuantizedTensor(b.format, (stop - start, b.shape[1]), copy, None)


def pipelined(
    rt: Runtime,
    carrier: Carrier,
    operands: tuple[Value, Value, Tensor],
    out: Tensor,
    gemm: str,
    splits: int,
    run: Multiply,
) -> Summands:
    """out [m, N] = this rank's rows of the sum of all ranks' a b [M, N], of N in pieces, one after another."""
    (a, b, c), summands = operands, carrier.summands(rt, out, splits)
    (rows, n) = c.shape
    width = n // splits
    block = Tensor(c.ptr, (splits, rows, width), c.dtype, c.device, c)  # c is not read: its memory has the pieces
    for i in range(splits):
        piece = block.rows(i, i + 1).reshape(rows, width)
        run(rt, a, _lines(b, gemm, i * width, (i + 1) * width), piece)
        summands.piece(rt, i, piece)
    summands.arrive(rt)
    return summands
