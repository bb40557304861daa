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
wgrad reads travels while dgrad is computed, and dgrad's sum while wgrad is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from te_core import dtypes
from te_core.dtypes import DType
from te_core.errors import ArgumentError
from te_core.layers.communicator import Communicator, Handle
from te_core.layers.gathered import Gathering, can_travel, gather, turned, turns
from te_core.ops import raw as ops
from te_core.precision import Operand, Precision
from te_core.quantize.operands import Uses, Value, Where, dense, is_plain_rule
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
    #: By GEMM, how its gathered operand came last: what reports show.
    came: dict[str, Format | DType] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def gathered(self) -> str | None:
        """Which operand lies cut over the ranks: "input", "grad" or None."""
        return None if not self.sequence else "input" if self.mode == "column" else "grad"

    @property
    def summed(self) -> str:
        """The GEMM of whose result each rank has a summand."""
        return "dgrad" if self.mode == "column" else "fprop"


class Spread:
    """One call's product over ranks: a `Split`, a communicator, and what is on its way."""

    __slots__ = (
        "_coming",
        "_kept",
        "_read",
        "_sum",
        "_x",
        "comm",
        "gathered",
        "inspected",
        "precision",
        "rng",
        "split",
        "where",
    )

    def __init__(
        self, split: Split, comm: Communicator, precision: Precision | None, where: Where, inspected: bool
    ) -> None:
        self.split, self.comm, self.precision, self.where, self.inspected = split, comm, precision, where, inspected
        # Who looks on sees whole tensors: they are put together before anything is done to them.
        self.gathered = None if inspected else split.gathered
        self.rng: Tensor | None = None  # the draws of stochastic rounding, in backward
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

    def input_rows(self, rows: int) -> int:
        """The rows of x on this rank, given those of the output gradient."""
        if self.gathered == "grad":
            return rows * self.split.size
        return rows // self.split.size if self.gathered == "input" else rows

    def whole_at_once(self, rt: Runtime, role: str, value: Value, dtype: DType) -> Value:
        """An operand that an inspector will see."""
        if not self.inspected or self.split.gathered != role:
            return value
        return gather(rt, self.comm, dense(rt, value, dtype)).wait()

    # ----------------------------------------------------------------------------------------- operands

    def agreed(self, rt: Runtime, x: Tensor, rule: Operand, cast: Cast) -> Cast:
        """The cast of a part whose bytes travel: where the scale follows from a maximum, from that of all ranks."""
        form = rule.format
        if rule.scaling == "current" or (form.scaling == "nvfp4" and not form.row_scaled and not cast.transform):
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
            return Uses(x, x, None)
        cast = self.agreed(rt, x, rule, cast_of(rule, rows or turning, columns and not turning))
        q = ops.quantize(rt, x, cast, column_sum=column_sum)
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

    # -------------------------------------------------------------------------------------- around GEMMs

    def gather(self, rt: Runtime, gemm: str, a: Value, b: Value) -> tuple[Value, Value]:
        """The operands of a GEMM, whole where this rank has a part."""
        if self.gathered == "input":
            if gemm == "fprop":
                coming, self._coming = self._coming, None
                whole = (gather(rt, self.comm, a) if coming is None else coming).wait()
                return self._as_read(rt, self._came("fprop", whole), "input", False), b
            if gemm == "wgrad":
                return a, self._columns(rt, b, "input")
        elif self.gathered == "grad":
            if gemm == "dgrad":
                whole = self._came("dgrad", gather(rt, self.comm, a).wait())
                self._kept, self._read = whole, a
                return self._as_read(rt, whole, "grad", False), b
            if gemm == "wgrad":
                return self._columns(rt, a, "grad"), b
        return a, b

    def _columns(self, rt: Runtime, part: Value, role: str) -> Value:
        """An operand of wgrad: on its way already, had by dgrad, or gathered now."""
        coming, whole, read = self._coming, self._kept, self._read
        self._coming = self._kept = self._read = None
        if coming is not None:
            whole = coming.wait()
        elif whole is None or part is not read or not (isinstance(part, Tensor) or turns(part.format)):
            whole = gather(rt, self.comm, part, columns=True).wait()
        return self._as_read(rt, self._came("wgrad", whole), role, True)

    def _came(self, gemm: str, whole: Value) -> Value:
        """Note for reports how an operand came."""
        self.split.came[gemm] = whole.format if isinstance(whole, QuantizedTensor) else whole.dtype
        return whole

    def _as_read(self, rt: Runtime, whole: Value, role: str, columns: bool) -> Value:
        """What arrived as the GEMM reads it: turned, or quantized where it came in high precision."""
        if isinstance(whole, QuantizedTensor):
            return turned(rt, whole) if columns and whole.columnwise is None else whole
        rule = self._rule(role, columns)
        if rule is None:
            return whole
        scales, gemm = self.where
        if role == "input":
            cast = forward_cast(rule, scales, gemm, INPUT, rowwise=not columns, columnwise=columns)
        else:
            cast = backward_cast(rule, scales, gemm, rowwise=not columns, columnwise=columns, rng=self.rng)
        return ops.quantize(rt, whole, cast)

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
        if self.gathered == "input" and x is not None:
            self._coming = gather(rt, self.comm, x, columns=True)
        elif self.gathered == "grad":
            part = dy.columns
            if isinstance(part, QuantizedTensor) and not turns(part.format):
                self._coming = gather(rt, self.comm, part, columns=True)

    def send(self, rt: Runtime, x: Uses) -> None:
        """Have what fprop reads travel, while the weight is quantized."""
        if self.gathered == "input":
            self._coming = gather(rt, self.comm, x.rows)

    def begun(self) -> Value | None:
        """The part of x that `begin` was given."""
        x, self._x = self._x, None
        return x

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
            handle = self.comm.reduce_scatter(rt, out, made)
        if gemm == "dgrad" and not self.inspected:
            self._sum = handle
        else:
            handle.wait()
        return made

    def settle(self) -> None:
        """Wait for dgrad's sum."""
        handle, self._sum = self._sum, None
        if handle is not None:
            handle.wait()


def meet(rt: Runtime, comm: Communicator, what: Sequence[str], specs: Sequence[Any], *shapes: Sequence[int]) -> None:
    """At the first call on this communicator, see that all ranks run the same: a layer (`what` it is, in words), its
    linears, the shapes of its input and weights."""
    if not comm.met:
        sizes = " x ".join(str(tuple(shape)) for shape in shapes)
        comm.agree(rt, "tensor parallelism", f"{''.join(what)} {sizes}, {' and '.join(map(_told, specs))}")
        comm.met = True


def _told(spec: Any) -> str:
    """All that the collectives of a linear depend on, in words."""
    split: Split = spec.parallel
    words = [f"{split.mode}-parallel over {split.size}", "sequence parallel"][: 1 + split.sequence]
    words += [spec.dtype.name, *(f"{name}'s gradient" for name in ("input", "weight") if getattr(spec.needs, name))]
    precision: Precision | None = spec.precision
    if precision is not None:
        words += [f"{role} {_told_rule(getattr(precision, role))}" for role in ("input", "grad")]
        words += [f"backward {precision.backward}"] if precision.backward else []
    words += ["inspected"] if spec.inspect is not None else []
    words += ["original input"] if spec.again else []
    return ", ".join([*words, split.symmetric] if split.symmetric else words)


def _told_rule(rule: Operand | None) -> str:
    if rule is None:
        return "plain"
    column = "" if rule.columnwise is None else f" and {_told_rule(rule.columnwise)}"
    return f"{rule.format} {rule.scaling}{column}"


def gathered_plain(rt: Runtime, comm: Communicator, part: Tensor) -> Tensor:
    """A tensor in high precision, its first dimension put together."""
    whole = gather(rt, comm, part).wait()
    assert isinstance(whole, Tensor)
    return whole


def scattered(rt: Runtime, comm: Communicator, whole: Tensor) -> Tensor:
    """This rank's part of the sum of all ranks' tensors."""
    out = rt.empty((whole.shape[0] // comm.size, *whole.shape[1:]), whole.dtype)
    comm.reduce_scatter(rt, whole, out).wait()
    return out
