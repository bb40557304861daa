"""Products of groups of rows, each with a matrix of its own (experts).

The rows of all groups lie in one tensor, one group after the other; `offsets` says where each begins: running sums,
int32 [groups + 1], in device memory, where a kernel reads what the host never knew. On Hopper bfloat16 and float16
take one launch for all groups, and so does FP8, with rows of `quantize_rows` and matrices of `quantize_many`.
Everything else is a loop of `gemm` or `gemm_quantized`, which needs the numbers on the host: `sizes`, where the caller
has them; else it waits for the device. On a CPU a recorded loop reads the offsets in each replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from te_core import dtypes
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import _check
from te_core.ops.declare import operation
from te_core.ops.gemm import gemm
from te_core.ops.gemm_quantized import gemm_quantized
from te_core.ops.quantize import dense_columns
from te_core.ops.quantize_grouped import bounds_of
from te_core.quantized import Copy, Format, QuantizedRows, QuantizedTensor, pieces_of
from te_core.runtime import Runtime
from te_core.tensor import CPU, META, Tensor

#: Of all groups, or of each; `quantize_grouped` gives the latter, `quantize_rows` the last.
Rows = Tensor | Sequence[Tensor | QuantizedTensor] | QuantizedRows


@dataclass(frozen=True, slots=True)
class GroupedGemmSpec:
    """All that the plan of one launch for all groups depends on."""

    groups: int
    rows: int  # of all groups
    m: int  # with trans_a the columns of a; else 0
    n: int
    k: int  # without trans_a the columns of a; else 0
    trans_a: bool
    trans_b: bool
    dtype: DType  # of a, b, bias; of FP8 operands the bias's
    out: DType
    accumulate: bool
    alignment: int = 16  # the largest power of two up to 16 that divides every address
    formats: tuple[Format, Format] | None = None  # of a and b, where both are quantized
    split: bool = False  # FP8 sums are promoted on the way
    emulate: bool = False
    strict: bool = False


@operation("""
    sizes [E] i32|i64: Rows of each group.
    rows: Rows of all groups.
    out [E + 1] i32 written: Where the running sums are written.
    faults? [1] i32 written: Counter that grows by one where sizes do not add up to `rows`. None counts nothing.
""")
def group_offsets(rt: Runtime, sizes: Tensor, rows: int, out: Tensor, faults: Tensor | None = None) -> Tensor:
    """Where each group begins, and where the last one ends, in `out`.

    Whatever the sizes are, the sums ascend and do not exceed `rows`: a negative size counts as 0.
    """
    rt.backend.group_offsets(rt, sizes, rows, out, faults)
    return out


@operation("""
    x [T, N] act: Rows of all groups.
    offsets [G] i32: Running sums of the rows of the groups.
    outs: Vectors [N] of one type, each set to the sums of a group. None where a group's are not wanted.
""")
def group_sums(rt: Runtime, x: Tensor, offsets: Tensor, outs: Sequence[Tensor | None]) -> None:
    """The column sums of each group's rows, added in float32."""
    wanted = [out for out in outs if out is not None]
    for out in wanted:
        kinds = ACTIVATION_DTYPES if out is wanted[0] else (wanted[0].dtype,)
        _check.vector("group_sums", rt.device, "an out", out, x.shape[1], kinds)
        _check.written("group_sums", "an out", out)
    if len(outs) + 1 != offsets.shape[0]:
        got = f"{len(outs)} outs and offsets {offsets.shape}"
        raise ArgumentError("group_sums", got, "an out, or None, for each group", "correct the counts")
    if wanted:
        rt.backend.group_sums(rt, x, offsets, outs)


@operation(
    """
    out: Where the result is written.
    offsets: Running sums of the rows of the groups, int32 on the device. None where `sizes` says it.
    sizes: Rows of each group, numbers of the host. None where `offsets` says it.
    bias: Vectors [N], one for each group. None adds none.
""",
    runs="plan_gemm_grouped",
)
def gemm_grouped(
    rt: Runtime,
    a: Rows,
    b: Rows,
    out: Tensor | Sequence[Tensor | None],
    offsets: Tensor | None = None,
    *,
    sizes: Sequence[int] | None = None,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: Sequence[Tensor | None] | None = None,
    accumulate: bool = False,
    split_accumulator: bool = True,
    emulate: bool = False,
    strict: bool = False,
) -> None:
    """out_i = op(a_i) @ op(b_i) + bias_i for each group i.

    A loop gives the bits of `gemm` or `gemm_quantized`. One launch for all groups (dense 16-bit tensors with `offsets`,
    on Hopper) adds in float32, too, in an order of its own.

    Without `trans_a` the rows of a [T, K] are the groups', b is a matrix for each group, and out is [T, N]. With it a
    [T, M] and b [T, N] both hold rows of the groups, which the product contracts, and out is a matrix [M, N] for each
    group; that of an empty group is zero. Quantized operands are read by the copy along the contraction; one that meets
    a plain one is dequantized. Rows of `quantize_rows` meet quantized matrices or, with trans_a, one another; then
    `offsets` has to be given, and a bias has the dtype of out. The last four are as `gemm_quantized` and `gemm` have
    them. One of `offsets` and `sizes` has to be given.
    """
    op = "gemm_grouped"
    matrices = out if trans_a else b
    if isinstance(out, Tensor) is trans_a or isinstance(matrices, Tensor) or (trans_a and bias is not None):
        raise ArgumentError(
            op,
            f"trans_a={trans_a} with {'one tensor' if isinstance(out, Tensor) else 'several tensors'} as out",
            "without trans_a one out and several b, with trans_a several outs and no bias",
            "correct the operands",
        )
    groups = len(matrices)
    for name, t in (("a", a), ("b", b), ("out", out)):
        if isinstance(t, Tensor):
            _check.matrix(op, name, t)
    if offsets is not None:
        _check.vector(op, rt.device, "offsets", offsets, groups + 1, (dtypes.int32,))
    if isinstance(a, QuantizedRows):
        rules = {"accumulate": accumulate, "split": split_accumulator, "emulate": emulate, "strict": strict}
        _quantized(rt, a, (b, out, bias), offsets, trans_a, trans_b, rules)
        return
    if offsets is not None:
        plan, each = _plan_of(rt, (a, b, out, bias), offsets, trans_a, trans_b, accumulate)
        if plan is not None:
            plan.run(rt, a, *each)
            return
    options = {"accumulate": accumulate, "split_accumulator": split_accumulator, "emulate": emulate, "strict": strict}
    _loop(rt, (a, b, out, bias), _sizes(op, rt, groups, offsets, sizes), trans_a, trans_b, options)


def _quantized(
    rt: Runtime,
    a: QuantizedRows,
    others: tuple[Any, ...],
    offsets: Tensor | None,
    trans_a: bool,
    trans_b: bool,
    rules: dict[str, bool],
) -> None:
    """The product of rows whose sizes the device knows."""
    op, (b, out, bias), (rows, width) = "gemm_grouped", others, a.shape
    matrices = out if trans_a else b
    groups, given = len(matrices), [t for t in matrices if t is not None]
    kind = QuantizedRows if trans_a else QuantizedTensor
    if offsets is None or not given or not all(isinstance(t, kind) for t in ([b] if trans_a else given)):
        got = f"rows of quantize_rows beside {type(b).__name__}, offsets {offsets!r}"
        allowed = "offsets, and quantized matrices (with trans_a: rows of quantize_rows as b)"
        raise ArgumentError(op, got, allowed, "quantize both operands")
    written = [t for t in (out if trans_a else [out]) if t is not None]
    first = b if trans_a else given[0]
    if trans_a:
        sizes, wanted, (m, n, k) = written[0].shape, (width, b.shape[1]), (width, b.shape[1], 0)
        alike = b.shape[0] == rows and a.columnwise is not None and b.columnwise is not None
    else:
        n, k = given[0].shape if trans_b else given[0].shape[::-1]
        sizes, wanted, m = out.shape, (rows, n), 0
        copies = [t.rowwise if trans_b else t.columnwise for t in given]
        alike = k == width and len(given) == groups and a.rowwise is not None and None not in copies
        alike = alike and all(t.shape == given[0].shape and t.format is first.format for t in given)
    vectors = [] if bias is None else [t for t in bias if t is not None]
    alike = alike and tuple(sizes) == wanted and all(t.shape == tuple(sizes) for t in written)
    alike = alike and all(t.shape == (n,) and t.dtype is out.dtype for t in vectors)
    if not alike or len({t.dtype for t in written}) > 1 or not all(t.is_contiguous for t in (*written, *vectors)):
        got = f"rows {a.shape}, {first.shape} and out {tuple(sizes)}, trans_a={trans_a}, trans_b={trans_b}"
        allowed = "shapes that fit, with the copies along the contraction, of one dtype and dense"
        raise ArgumentError(op, got, allowed, "correct the operands")
    for t in written:
        _check.on_device(op, rt.device, t)
        _check.written(op, "out", t)
    if not rows:
        for t in written if not rules["accumulate"] else ():
            rt.backend.zero(rt, t)
        return
    if trans_a:
        left, right, left_scale, right_scale = a.columnwise, [b.columnwise], a.columnwise_scale, [b.columnwise_scale]
    else:
        left, left_scale = a.rowwise, a.rowwise_scale
        right = [t.rowwise if trans_b else t.columnwise for t in given]
        right_scale = [t.rowwise_scale if trans_b else t.columnwise_scale for t in given]
    bits = reduce(or_, [t.ptr for t in (left, *right, *written, *vectors)], 16)
    dtype = written[0].dtype if written[0].dtype is not dtypes.float32 else dtypes.bfloat16
    spec = GroupedGemmSpec(
        groups, rows, m, n, k, trans_a, trans_b, dtype, written[0].dtype, rules["accumulate"], bits & -bits,
        (a.format, first.format), rules["split"], rules["emulate"], rules["strict"],
    )  # fmt: skip
    plan = rt.plans.find(rt, _plan, spec)
    if plan is None:
        allowed = "what takes_offsets allows: Hopper, 16-bit results, sides that are multiples of 16"
        do = "quantize with quantize_grouped, and say sizes"
        raise UnsupportedError(op, f"rows of quantize_rows with {spec}", allowed, do)
    outs, biases = out if trans_a else [out], [None] * groups if bias is None else bias
    plan.run(rt, left, right, outs, offsets, biases, (left_scale, right_scale))


def _loop(
    rt: Runtime, operands: tuple[Any, ...], sizes: Sequence[int], trans_a: bool, trans_b: bool, options: dict[str, Any]
) -> None:
    """A product for each group."""
    op, (a, b, out, bias) = "gemm_grouped", operands
    matrices = out if trans_a else b
    groups, rows = len(matrices), sum(sizes)
    for t in (a, b, out, matrices if bias is None else bias):
        if t.shape[0] != rows if isinstance(t, Tensor) else len(t) != groups:
            has = f"{t.shape[0]} rows" if isinstance(t, Tensor) else f"{len(t)} parts"
            raise ArgumentError(
                op,
                f"an operand of {has} for {groups} groups of {list(sizes)} rows",
                "tensors with the rows of all groups, and a part of everything else for each group",
                "correct the sizes or the operands",
            )
    bounds = bounds_of(sizes)
    for i, (start, stop) in enumerate(bounds):
        result = out.rows(start, stop) if isinstance(out, Tensor) else out[i]
        if result is None:
            continue
        left = a.rows(start, stop) if isinstance(a, Tensor) else a[i]
        right = b.rows(start, stop) if isinstance(b, Tensor) else b[i]
        for x in (left, right) if trans_a else (left,):  # of quantized ones storage has more rows
            if x.shape[0] != stop - start:
                raise ArgumentError(
                    op,
                    f"{x!r} of group {i}, which has {stop - start} rows",
                    "operands with as many rows as the sizes say",
                    "correct the sizes or the operands",
                )
        if start == stop:
            if trans_a:
                _check.result(op, rt.device, "out", result, (left.shape[1], right.shape[1]), ACTIVATION_DTYPES)
            if trans_a and not options["accumulate"]:
                rt.backend.zero(rt, result)
            continue
        added = None if bias is None else bias[i]
        if isinstance(left, QuantizedTensor) and isinstance(right, QuantizedTensor):
            gemm_quantized(
                rt, left, right, result, a_columnwise=trans_a, b_columnwise=not trans_b, bias=added, **options
            )
        else:
            x, y = left, right
            if isinstance(x, QuantizedTensor):
                x = dense_columns(rt, x, y.dtype, trans_a)
            if isinstance(y, QuantizedTensor):
                y = dense_columns(rt, y, x.dtype, not trans_b)
            adds = options["accumulate"]
            gemm(rt, x, y, trans_a=trans_a, trans_b=trans_b, bias=added, out=result, accumulate=adds)


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """The loop of a CPU, which reads the offsets when it runs."""

    spec: GroupedGemmSpec

    def run(
        self,
        rt: Runtime,
        a: Tensor,
        b: Sequence[Tensor],
        out: Sequence[Tensor | None],
        offsets: Tensor,
        bias: Sequence[Tensor | None],
        scales: tuple[Tensor, Sequence[Tensor]] | None = None,
    ) -> None:
        """As a launch has it: of several matrices (b; with trans_a out) and biases there is one a group."""
        spec = self.spec
        if rt.recorder is not None:
            what = f"gemm_grouped {spec.groups} x {spec.m or spec.rows} x {spec.n} x {spec.k or spec.rows} {spec.dtype}"
            rt.recorder.add_call(self.run, (a, tuple(b), tuple(out), offsets, tuple(bias), scales), what)
            return
        sizes = _sizes("gemm_grouped", rt, spec.groups, offsets, None)
        last = sum(sizes)  # rows behind it are nobody's
        got, allowed = f"groups of {sizes}, {last} rows, of {spec.rows}", "rows that there are"
        _check.require(last <= spec.rows, "gemm_grouped", got, allowed, "correct the offsets")
        if scales is not None:
            self._run_quantized(rt, (a, b, out, bias), scales, sizes)
            return
        whole = [t.rows(0, last) for t in (a, b[0] if spec.trans_a else out[0]) if t is not None]
        operands = (*whole, out, None) if spec.trans_a else (whole[0], b, whole[1], bias)
        _loop(rt, operands, sizes, spec.trans_a, spec.trans_b, {"accumulate": spec.accumulate})

    def _run_quantized(
        self, rt: Runtime, operands: tuple[Any, ...], scales: tuple[Any, Any], sizes: Sequence[int]
    ) -> None:
        """The loop over groups as `quantize_grouped` has them, made of what `quantize_rows` left."""
        spec, (a, b, out, bias) = self.spec, operands
        assert spec.formats is not None

        def groups_of(data: Tensor, scale: Tensor, width: int, form: Format) -> list[QuantizedTensor]:
            found, column = [], 0
            for e, (start, stop) in enumerate(bounds_of(sizes)):
                m = stop - start
                parts = pieces_of(rt.device, form, (m, width), spec.trans_a)
                copy = Copy.at(rt.zeros((parts.nbytes,), dtypes.uint8), 0, parts)
                values, at = (data.numpy()[:, column : column + m] if spec.trans_a else data.numpy()[start:stop]), scale
                copy.data.numpy()[: values.shape[0], : values.shape[1]] = values
                if form.scaling == "tensor":
                    copy.scale.numpy()[0] = at.numpy()[e]
                elif spec.trans_a:
                    copy.scale.numpy()[...] = at.numpy()[column // 128 :][: copy.scale.shape[0]]
                else:
                    copy.scale.numpy()[:, :m] = at.numpy()[:, start:stop]
                found.append(QuantizedTensor(form, (m, width), *(None, copy) if spec.trans_a else (copy, None)))
                column += (m + 127) // 128 * 128
            return found

        left = groups_of(a, scales[0], spec.m if spec.trans_a else spec.k, spec.formats[0])
        if spec.trans_a:
            right, results = groups_of(b[0], scales[1][0], spec.n, spec.formats[1]), out
        else:
            shape, results = (spec.n, spec.k) if spec.trans_b else (spec.k, spec.n), out[0].rows(0, sum(sizes))
            copies = [Copy(data, scale, None) for data, scale in zip(b, scales[1], strict=True)]
            pairs = [(c, None) if spec.trans_b else (None, c) for c in copies]
            right = [QuantizedTensor(spec.formats[1], shape, *pair) for pair in pairs]
        options = {"split_accumulator": spec.split, "emulate": spec.emulate, "strict": spec.strict}
        biases = None if spec.trans_a else bias
        options["accumulate"] = spec.accumulate
        _loop(rt, (left, right, results, biases), sizes, spec.trans_a, spec.trans_b, options)


def takes_offsets(
    rt: Runtime, dtype: DType, n: int, k: int, groups: int, formats: tuple[tuple[Format, Format], ...] | None = None
) -> bool:
    """Whether the products of linears [n, k] of so many groups, forward and backward, take the sizes as a tensor.

    `formats`: of the operands of fprop, dgrad and wgrad, where they are quantized.
    """
    able: bool = rt.plans.find(rt, _all_three, (dtype, n, k, groups, formats))
    return able


def _all_three(rt: Runtime, asked: tuple[DType, int, int, int, Any]) -> bool:
    dtype, n, k, groups, formats = asked
    if formats is not None and (n % 16 or k % 16):
        return False
    kinds = ((0, n, k, False, True), (0, k, n, False, False), (n, k, 0, True, False))
    specs = [
        GroupedGemmSpec(groups, 1, *kind, dtype, dtype, accumulate=False, formats=pair, split=pair is not None)
        for kind, pair in zip(kinds, formats or (None,) * 3, strict=True)
    ]
    return all(_plan(rt, spec) is not None for spec in specs)


def _plan_of(
    rt: Runtime, operands: tuple[Any, ...], offsets: Tensor, trans_a: bool, trans_b: bool, accumulate: bool
) -> tuple[Any, tuple[Any, ...]]:
    """(the plan for all groups if there is one, what it runs with after a)."""
    a, b, out, bias = operands
    given = [t for t in operands if isinstance(t, Tensor)]
    several = [t for ts in operands if ts is not None and not isinstance(ts, Tensor) for t in ts if t is not None]
    groups = offsets.shape[0] - 1
    one = len(given) == 2 and isinstance(a, Tensor) and all(type(t) is Tensor for t in several)
    matrices = [t for t in several if t.ndim == 2]
    lengths = [len(ts) == groups for ts in operands if ts is not None and not isinstance(ts, Tensor)]
    if not (one and matrices and groups and all(lengths)):
        return None, ()
    shape, kind = matrices[0].shape, matrices[0].dtype
    beside, result = given[1], kind if trans_a else given[1].dtype  # b, or out
    rows = a.shape[0]
    if trans_a:
        m, n, k = shape[0], shape[1], 0
        alike = shape == (a.shape[1], beside.shape[1]) and beside.dtype is a.dtype
    else:
        (n, k) = shape if trans_b else shape[::-1]
        m, alike = 0, a.shape[1] == k and beside.shape == (rows, n) and kind is a.dtype
    alike = alike and beside.shape[0] == rows and all(t.shape == shape and t.dtype is kind for t in matrices)
    vectors = [t for t in several if t.ndim != 2]
    alike = alike and all(t.shape == (n,) and t.dtype is a.dtype for t in vectors)
    dense = all(t.is_contiguous and t.device is rt.device for t in (*given, *several, offsets))
    if not (alike and dense):
        return None, ()
    bits = reduce(or_, [t.ptr for t in (*given, *several)], 16)
    spec = GroupedGemmSpec(groups, rows, m, n, k, trans_a, trans_b, a.dtype, result, accumulate, alignment=bits & -bits)
    plan = rt.plans.find(rt, _plan, spec)
    biases = [None] * groups if bias is None else bias
    for t in matrices if trans_a else (out,):  # which a launch writes
        _check.written("gemm_grouped", "out", t)
    return plan, ([beside] if trans_a else b, out if trans_a else [out], offsets, biases)


def _plan(rt: Runtime, spec: GroupedGemmSpec) -> Any:
    plan = rt.backend.plan_gemm_grouped(rt, spec)
    return LoopPlan(spec) if plan is None and rt.device is CPU else plan


def _sizes(op: str, rt: Runtime, groups: int, offsets: Tensor | None, sizes: Sequence[int] | None) -> Sequence[int]:
    """The rows of each group, on the host."""
    if sizes is None:
        _check.require(
            offsets is not None and offsets.device is not META,
            op,
            "neither sizes nor offsets with values",
            "one of them",
            "say where the groups begin",
        )
        ends = rt.numpy(offsets).tolist()  # type: ignore[arg-type]
        sizes = [stop - start for start, stop in zip(ends, ends[1:], strict=False)]
        _check.require(ends[0] == 0, op, f"offsets {ends}", "running sums that begin with 0", "correct the offsets")
    if len(sizes) != groups or min(sizes, default=0) < 0:
        got, allowed = f"sizes {list(sizes)} of {groups} groups", "a count of rows, 0 or more, for each"
        raise ArgumentError(op, got, allowed, "correct the sizes or the offsets")
    return sizes
