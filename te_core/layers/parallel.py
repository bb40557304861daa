"""A weight that is spread over ranks: what its product gathers before its GEMMs and scatters after them.

mode "column": every rank has some rows of w [N, K], so some columns of y. mode "row": some columns of w, and of x.
With `sequence`, activations between the two lie cut by their first dimension, a part on each rank.

                    gathered before               summed after
    column          nothing                       dx        all-reduce
    column, seq.    x (fprop; again for wgrad)    dx        reduce-scatter
    row             nothing                       y         all-reduce
    row, seq.       dy (dgrad and wgrad)          y         reduce-scatter

A part is quantized before it travels, where its format allows (`gathered.can_travel`), and what forward saves is the
part. Ranks first agree on the maximum where a scale follows from it, so their bytes have one scale. In backward what
wgrad reads travels while dgrad is computed, and dgrad's sum while wgrad is. With `overlap`, fprop and dgrad are made
in parts, while others travel (te_core/layers/overlap.py).

An inspector sees parts, before they travel, and what it puts in their place travels instead: bytes that all ranks have
one scale for, else in high precision, and so it is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from te_core import dtypes
from te_core.dtypes import DType
from te_core.errors import ArgumentError
from te_core.layers.communicator import Communicator, Handle
from te_core.layers.gathered import Gathering, can_travel, gather, of_one_scale, turned, turns
from te_core.layers.inspector import Inspector, quantized_whole
from te_core.layers.overlap import Multiply, Overlap, Overlapping
from te_core.ops import raw as ops
from te_core.ops.quantize import dense_columns
from te_core.precision import Operand, Precision
from te_core.quantize.operands import Uses, Value, Where, is_plain_rule, one_copy, quantize_forward, restored
from te_core.quantize.state import INPUT, backward_cast, forward_cast
from te_core.quantized import Cast, Format, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

#: (rule, rowwise, columnwise) -> how an operand of this product is quantized.
CastOf = Callable[[Operand, bool, bool], Cast]


@dataclass(frozen=True, slots=True)
class Split:
    """How a weight is spread over ranks."""

    mode: str  # "column" or "row"
    size: int
    sequence: bool = False
    symmetric: str | None = None  # how the sum of a row-parallel output is computed; None: as the library likes
    overlap: Overlap | None = None  # how GEMMs overlap with what travels for them; None: it was not asked for
    #: By GEMM, how its gathered operand came last: what reports show.
    came: dict[str, Format | DType | str] = field(init=False, repr=False, compare=False, default_factory=dict)
    #: The same of whether it overlapped, and why not.
    ran: dict[str, str] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def gathered(self) -> str | None:
        """Which operand lies cut over the ranks: "input", "grad" or None."""
        return None if not self.sequence else "input" if self.mode == "column" else "grad"

    @property
    def summed(self) -> str:
        """The GEMM of whose result each rank has a summand."""
        return "dgrad" if self.mode == "column" else "fprop"


_NONE: frozenset[str] = frozenset()


class Spread:
    """One call's product over ranks: its `LinearSpec`, a communicator, and what is on its way."""

    __slots__ = (
        "_coming", "_kept", "_own", "_read", "_sum", "_x", "comm", "gathered", "overlap", "precision", "rng", "spec",
        "split", "where",
    )  # fmt: skip

    def __init__(self, spec: Any, comm: Communicator, where: Where) -> None:
        split: Split | None = spec.parallel
        assert split is not None
        self.spec, self.split, self.comm, self.where = spec, split, comm, where
        self.precision: Precision | None = spec.precision
        self.gathered = split.gathered
        ways = split.overlap
        self.overlap = None if ways is None or ways.idle else Overlapping(spec, ways, split.ran, comm)
        self.rng: Tensor | None = None  # the draws of stochastic rounding, in backward
        self._own = _NONE  # the GEMMs whose gathered operand is an inspector's, in high precision
        self._coming: Gathering | None = None  # what wgrad reads
        self._kept: Value | None = None  # the gradient that dgrad has read, whole, and of which part it was made
        self._read: Value | None = None
        self._sum: Handle | None = None
        self._x: Value | None = None

    # ------------------------------------------------------------------------------------------- shapes

    def leading(self, gemm: str, leading: tuple[int, ...]) -> tuple[int, ...]:
        """The leading dimensions of a GEMM's result, given those of this rank's operand."""
        role = {"fprop": "input", "dgrad": "grad"}[gemm]
        if self.split.gathered != role:
            return leading
        if not leading:
            raise ArgumentError(
                "sequence parallelism", "an operand of one dimension", "a sequence of rows", "add a dimension"
            )
        return (leading[0] * self.split.size, *leading[1:])

    # ----------------------------------------------------------------------------------------- operands

    def agreed(self, rt: Runtime, x: Tensor, rule: Operand, cast: Cast, column_sum: Tensor | None = None) -> Cast:
        """The cast of a part whose bytes travel: where the scale follows from a maximum, from that of all ranks.

        Where it does in current scaling, `column_sum` receives the column sums on the way.
        """
        form = rule.format
        if rule.scaling == "current":
            maxima = ops.amax(rt, x, column_sum=column_sum)
        elif form.scaling == "nvfp4" and not form.row_scaled and not cast.transform:
            maxima = ops.amax(rt, x)
        elif form.scaling == "nvfp4" and cast.transform:  # of the turned copy, too, which only a cast can tell
            q = ops.quantize(rt, x, cast)
            maxima = rt.empty((2,), dtypes.float32)
            pair = maxima.reshape(2, 1)
            for i, amax in enumerate((q.rowwise_amax, q.columnwise_amax)):
                if amax is None:  # nobody reads that copy
                    rt.backend.zero(rt, pair.rows(i, i + 1))
                else:
                    ops.resize(rt, amax.reshape(1, 1), 1, 1, out=pair.rows(i, i + 1))
        else:
            return cast
        self.comm.all_reduce(rt, maxima, "max").wait()
        return cast.scaled_by(maxima)

    def quantized(
        self,
        rt: Runtime,
        x: Tensor,
        rule: Operand,
        cast_of: CastOf,
        wanted: tuple[bool, bool],
        column_sum: Tensor | None = None,
    ) -> Uses:
        """A part as it travels for the GEMMs that are `wanted` (along its rows, along its columns)."""
        if not is_plain_rule(rule):
            if column_sum is not None:
                ops.column_sum(rt, x, column_sum)
            row, column = rule, rule.columnwise or rule
            return Uses(
                self._one(rt, x, row, cast_of, False) if wanted[0] else x,
                self._one(rt, x, column, cast_of, True) if wanted[1] else x,
                None,
            )
        rows = wanted[0] and can_travel(rule, x.shape[0], False)
        columns = wanted[1] and can_travel(rule, x.shape[0], True)
        if self.gathered == "grad" and wanted[1] and not columns:
            rows = False  # the gradient travels in high precision for wgrad, and dgrad has it then
        turning = turns(rule.format)
        if not rows and not columns:
            if column_sum is not None:
                ops.column_sum(rt, x, column_sum)
            # An inspector may quantize it.
            return Uses(x, x, None if self.spec.inspect is None else cast_of(rule, True, True))
        cast = self.agreed(rt, x, rule, cast_of(rule, rows or turning, columns and not turning), column_sum)
        q = ops.quantize(rt, x, cast, column_sum=None if rule.scaling == "current" else column_sum)
        return Uses(q if rows else x, q if columns else x, cast)

    def _one(self, rt: Runtime, x: Tensor, rule: Operand, cast_of: CastOf, columns: bool) -> Value:
        """One use of a part."""
        if rule.custom is not None:
            made: Tensor = rule.custom(rt, x, not columns, columns)
            return made
        if not can_travel(rule, x.shape[0], columns):
            return x
        by_columns = columns and not turns(rule.format)
        cast = cast_of(rule, not by_columns, by_columns)
        return ops.quantize(rt, x, self.agreed(rt, x, rule, cast))

    def input_cast(self, rule: Operand, cast_of: CastOf, rows: int, wgrad: bool) -> tuple[Cast | None, bool]:
        """(how a producer quantizes a part of so many rows on its way, whether the part is read plain, too).

        No cast where the ranks first have to agree, or where the part travels in high precision.
        """
        form = rule.format
        columns = wgrad and can_travel(rule, rows, True)
        agrees = rule.scaling == "current" or (form.scaling == "nvfp4" and not form.row_scaled)
        if agrees or not can_travel(rule, rows, False):
            return None, True
        return cast_of(rule, True, columns and not turns(form)), wgrad and not columns

    def uses(self, x: Value, q: QuantizedTensor, cast: Cast | None) -> Uses:
        """The uses of a part that came quantized by `input_cast`."""
        both = q.columnwise is not None or turns(q.format) or not isinstance(x, Tensor)
        return Uses(q, q if both else x, cast)

    # --------------------------------------------------------------------------------- what inspectors put in

    def put(self, rt: Runtime, gemm: str, made: Value) -> Value:
        """What an inspector has put in the place of a part, as it travels for this GEMM."""
        columns = gemm == "wgrad"
        if isinstance(made, QuantizedTensor):
            if of_one_scale(rt, self.comm, made, columns):
                return made
            # (The columns of NVFP4 may be transformed.)
            made = dense_columns(rt, made, self.spec.dtype, columns and made.format.scaling != "nvfp4")
        self._own |= {gemm}
        return made

    def kept(self, rt: Runtime, made: Value) -> Value:
        """The same of x for wgrad, as `saved` keeps it: its block begins with the copy that travels.

        In high precision it is kept as bytes where a part that nobody has changed would be in high precision, too: so
        `restored` can tell them apart.
        """
        made, rule = self.put(rt, "wgrad", made), self._rule("input", True)
        if isinstance(made, QuantizedTensor):
            if rule is not None and made.format is rule.format and made.format.scaling != "nvfp4":
                return one_copy(rt, made, not turns(made.format))
            made = dense_columns(rt, made, self.spec.dtype, made.format.scaling != "nvfp4")
        if rule is None or can_travel(rule, made.shape[0], True):
            return made
        block = rt.empty((made.nbytes,), dtypes.uint8)
        ops.resize(rt, made, *made.shape, out=_plain_in(block, made.shape, made.dtype))
        return block

    # -------------------------------------------------------------------------------------- around GEMMs

    def restored(self, rt: Runtime, kept_x: Tensor | None, rows: int, width: int, cast_of: CastOf) -> Value:
        """This rank's part of x, of `width` columns, as it travels for wgrad; `rows`: those of the output gradient."""
        found, self._x = self._x, None
        if found is not None:
            return found
        assert kept_x is not None
        spec, precision, size = self.spec, self.precision, self.split.size
        shape = rows * size if self.gathered == "grad" else rows // size if self.gathered == "input" else rows, width
        if self.gathered == "input" and (rule := self._rule("input", True)) is not None:
            travels = can_travel(rule, shape[0], True)
            if kept_x.dtype is not dtypes.uint8:
                self._own |= {"wgrad"} if travels and not spec.again else _NONE
            elif not travels:
                self._own |= {"wgrad"}
                return _plain_in(kept_x, shape, spec.dtype)
            elif turns(rule.format):
                return QuantizedTensor.rowwise_in(kept_x, shape, rule.format)
        x = restored(rt, kept_x, shape, precision, "input", spec.dtype)
        if not spec.again or isinstance(x, QuantizedTensor):
            return x
        assert precision is not None and precision.input is not None
        if self.gathered == "input":
            made = self.quantized(rt, x, precision.input, cast_of, (False, True))
            return made.columns
        uses = quantize_forward(rt, x, precision.input, (None, 0), INPUT, rowwise=False, columnwise=True)
        return uses.columns

    def gather(
        self, rt: Runtime, gemm: str, a: Value, b: Value, inspector: Inspector | None = None
    ) -> tuple[Value, Value]:
        """The operands of a GEMM, whole where this rank has a part."""
        if self.gathered == "input":
            if gemm == "fprop":
                coming, self._coming = self._coming, None
                whole = (gather(rt, self.comm, a) if coming is None else coming).wait()
                return self._as_read(rt, ("fprop", "activation"), whole, inspector), b
            if gemm == "wgrad":
                return a, self._as_read(rt, ("wgrad", "activation"), self._columns(rt, b), inspector)
        elif self.gathered == "grad":
            if gemm == "dgrad":
                whole = gather(rt, self.comm, a).wait()
                self._kept, self._read = whole, a
                return self._as_read(rt, ("dgrad", "gradient"), whole, inspector), b
            if gemm == "wgrad":
                return self._as_read(rt, ("wgrad", "gradient"), self._columns(rt, a), inspector), b
        return a, b

    def _columns(self, rt: Runtime, part: Value) -> Value:
        """An operand of wgrad: on its way already, had by dgrad, or gathered now."""
        coming, whole, read = self._coming, self._kept, self._read
        self._coming = self._kept = self._read = None
        if coming is not None:
            whole = coming.wait()
        elif whole is None or part is not read or not (isinstance(part, Tensor) or turns(part.format)):
            whole = gather(rt, self.comm, part, columns=True).wait()
        return whole

    def _as_read(self, rt: Runtime, point: tuple[str, str], whole: Value, inspector: Inspector | None) -> Value:
        """What arrived as the GEMM reads it: turned, or quantized where it came in high precision. Reports show how it
        came."""
        gemm = point[0]
        columns = gemm == "wgrad"
        if isinstance(whole, QuantizedTensor):
            self._came(rt, gemm, whole.format)
            return turned(rt, whole) if columns and whole.columnwise is None else whole
        if gemm in self._own:
            self._came(rt, gemm, f"{whole.dtype}, as an inspector has put it there")
            return whole
        self._came(rt, gemm, whole.dtype)
        role: str = self.gathered  # type: ignore[assignment]
        rule = self._rule(role, columns)
        if rule is None:
            return whole
        scales, number = self.where
        if role == "input":
            cast = forward_cast(rule, scales, number, INPUT, rowwise=not columns, columnwise=columns)
        else:
            cast = backward_cast(rule, scales, number, rowwise=not columns, columnwise=columns, rng=self.rng)
        quantized_whole(rt, inspector, point, rule.format)
        return ops.quantize(rt, whole, cast)

    def _came(self, rt: Runtime, gemm: str, how: Format | DType | str) -> None:
        """Note for reports how an operand came; a recorded layer notes it again."""
        self.split.came[gemm] = how
        if rt.recorder is not None:
            rt.recorder.add_note("operand came", partial(self.split.came.__setitem__, gemm, how))

    def _rule(self, role: str, columns: bool) -> Operand | None:
        """By what an operand is quantized that came in high precision; None where it stays so."""
        precision = self.precision
        if precision is None or (precision.backward is not None and (columns or role == "grad")):
            return None
        rule: Operand | None = getattr(precision, role)
        if rule is not None and columns and rule.columnwise is not None:
            rule = rule.columnwise
        return None if rule is None or rule.scaling in ("calibrate", "none", "custom") else rule

    # ------------------------------------------------------------------------------------------ overlap

    def begin(self, rt: Runtime, dy: Uses, x: Value | None) -> None:
        """Have what wgrad alone reads travel, before dgrad is computed."""
        self._x = x
        if self.overlap is not None and self.gathered == "grad" and self.spec.needs.input:
            self._begin_parts(rt, "dgrad", dy.rows)  # before what wgrad alone reads
        if self.gathered == "input" and x is not None:
            self._coming = self._gather_beside(rt, "dgrad", x)
        elif self.gathered == "grad":
            part = dy.columns
            if isinstance(part, QuantizedTensor) and not turns(part.format):
                self._coming = self._gather_beside(rt, "wgrad", part)

    def _gather_beside(self, rt: Runtime, gemm: str, part: Value) -> Gathering:
        """Have what wgrad reads come beside dgrad, as the options of this GEMM say."""
        shape, overlap = (self.split.size * part.shape[0], part.shape[1]), self.overlap
        return gather(rt, self.comm, part, True, None if overlap is None else overlap.bulk(rt, gemm, shape))

    def send(self, rt: Runtime, x: Uses) -> None:
        """Have what fprop reads travel, while the weight is quantized. (An inspector has yet to see it.)"""
        if self.gathered == "input" and self.spec.inspect is None:
            if self.overlap is None or not self._begin_parts(rt, "fprop", x.rows):
                self._coming = gather(rt, self.comm, x.rows)

    def _begin_parts(self, rt: Runtime, gemm: str, part: Value) -> bool:
        """Have the other ranks' parts of a gathered operand come one by one, where its GEMM overlaps so."""
        assert self.overlap is not None and self.gathered is not None
        plain = isinstance(part, Tensor)
        begun = self.overlap.begin(rt, gemm, part, plain and self._rule(self.gathered, False) is not None)
        if begun:
            self._came(rt, gemm, part.dtype if isinstance(part, Tensor) else part.format)
        return begun

    def overlapped(self, rt: Runtime, gemm: str, a: Value, b: Value, out: Tensor, run: Multiply) -> Tensor | None:
        """The result of a GEMM in parts, beside what travels for it; None: it is to be computed whole."""
        overlap = self.overlap
        assert overlap is not None
        if gemm != "wgrad" and self.gathered == {"fprop": "input", "dgrad": "grad"}[gemm]:
            if overlap.ring is None and not self._begin_parts(rt, gemm, a):
                return None
            whole = overlap.multiply_parts(rt, b, out, run, gemm == "dgrad" and self.spec.needs.weight)
            self._kept, self._read = (None, None) if whole is None else (whole, a)
            return out
        if gemm == self.split.summed and (found := overlap.multiply_summands(rt, gemm, a, b, out, run)) is not None:
            made, summing = found
            if gemm != "dgrad":
                summing.wait()
            else:  # beside wgrad
                self._sum = summing
            return made
        if gemm != "wgrad":
            shape = out.matrix().shape
        elif self.gathered == "grad":  # the whole gradient
            shape = self.split.size * a.shape[0], a.shape[1]
        else:  # that of x
            shape = a.shape[0], b.shape[1]
        overlap.beside(rt, gemm, shape)
        return None

    def scatter(self, rt: Runtime, gemm: str, out: Tensor) -> Tensor:
        """The sum of all ranks' results, or this rank's part of it. That of dgrad is there after `settle`."""
        split = self.split
        if gemm != split.summed:
            return out
        if not split.sequence:
            handle = self.comm.all_reduce(rt, out, how=split.symmetric if gemm == "fprop" else None)
            made = out
        else:
            if len(out.shape) < 2 or out.shape[0] % split.size:
                raise ArgumentError(
                    "sequence parallelism",
                    f"a result of shape {tuple(out.shape)} over {split.size} ranks",
                    "a first dimension that the ranks divide",
                    "pad the sequence",
                )
            made = rt.empty((out.shape[0] // split.size, *out.shape[1:]), out.dtype)
            if self.overlap is None or gemm != "dgrad":
                handle = self.comm.reduce_scatter(rt, out, made)
            else:  # it comes beside wgrad, as the options of that say
                summands = self.overlap.bulk(rt, "wgrad", out.matrix().shape).summands(rt, made.matrix())
                summands.piece(rt, 0, out.matrix())
                summands.arrive(rt)
                handle = summands
        if gemm == "dgrad":
            self._sum = handle
        else:
            handle.wait()
        return made

    def settle(self) -> None:
        """Wait for dgrad's sum."""
        handle, self._sum = self._sum, None
        if handle is not None:
            handle.wait()


def _plain_in(block: Tensor, shape: Sequence[int], dtype: DType) -> Tensor:
    """The values that lie in a block of bytes."""
    return Tensor(block.ptr, tuple(shape), dtype, block.device, block)


def scattered(rt: Runtime, comm: Communicator, whole: Tensor) -> Tensor:
    """This rank's part of the sum of all ranks' tensors."""
    out = rt.empty((whole.shape[0] // comm.size, *whole.shape[1:]), whole.dtype)
    comm.reduce_scatter(rt, whole, out).wait()
    return out
