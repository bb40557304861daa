"""Running a planned product: what cuBLASLt is called with, and the kernels of our own before and behind it.

A plan is immutable and shared by threads. The descriptors that a run writes addresses into are made from it for
each executor, and kept in a bounded cache there.
"""

from __future__ import annotations

import ctypes
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from te_core import device, dtypes
from te_core.backends.cuda import cublaslt as lt_
from te_core.backends.cuda.sums import column_sum, row_sum
from te_core.dtypes import DType
from te_core.errors import LibraryError
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.symbols import STREAM, Patch, patches
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.gemm import GemmOperands, GemmSpec

_PREPARED = 1024  # descriptors an executor keeps; each is about 1 KB

_alpha_beta = (ctypes.c_float * 2)(1.0, 0.0)
_ONE = ctypes.addressof(_alpha_beta)
_ZERO = _ONE + 4

#: The pointers that a run sets, by the descriptor's attribute: which of gemm()'s operands each is.
B_SCALE, A_SCALE, BIAS, AUX, A_SUM = range(5)


@dataclass(frozen=True, slots=True)
class LtRoute:
    """One way to carry out a spec: what the cuBLASLt call does, and what is left to kernels."""

    epilogue: int  # cuBLASLt's
    out: DType  # what it writes
    accumulate: bool
    bias: DType | None = None  # of the vector that its bias pointer reads or writes
    attributes: tuple[tuple[int, int], ...] = ()  # (descriptor attribute, operand) of each pointer a run sets
    unfused: bool = False  # epilogue.cu finishes
    a_sum: bool = False  # sums.cu adds op(a)
    out_sum: bool = False  # sums.cu adds out


@dataclass(frozen=True, eq=False, slots=True)
class LtPlan:
    """All that was decided about one GEMM."""

    spec: GemmSpec
    route: LtRoute | None  # None: no product to form (an empty operand)
    algorithm: Any = None  # ALGO_BYTES of cuBLASLt's
    workspace: int = 0
    source: str = ""  # who chose the algorithm: the heuristic, or the autotuner
    refused: tuple[str, ...] = ()  # shorter routes, and what cuBLASLt said to them
    finish: Kernel | None = None
    sum_a: bool = False  # sums.cu adds op(a),
    sum_out: bool = False  # and out
    make_alpha: Kernel | None = None  # of nvfp4
    algo: int = field(default=0)  # the address of `algorithm`

    @property
    def family(self) -> str:
        """The kernels of this plan: "cublasLt", and those of our own that finish what it does not fuse."""
        parts = ["gemm_alpha.cu"] if self.make_alpha is not None else []
        parts += [] if self.route is None else [f"cublasLt({lt_.EPILOGUE_NAMES[self.route.epilogue]})"]
        parts += ["epilogue.cu"] if self.finish is not None else []
        parts += ["sums.cu"] if self.sum_a or self.sum_out else []
        return " + ".join(parts) or "nothing to do"

    def explain(self) -> str:
        """What runs, chosen by whom, and why not something shorter."""
        s = self.spec
        ops = f"{'a^T' if s.trans_a else 'a'} {s.a} x {'b^T' if s.trans_b else 'b'} {s.b} -> {s.out}"
        lines = [f"gemm {s.m} x {s.n} x {s.k}: {ops}", f"  runs {self.family}"]
        if s.a_format is not None:
            lines.insert(1, f"  scales of {s.a_format} x {s.b_format}")
        if self.algorithm is not None:
            lines.append(f"  algorithm {lt_.describe(self.algo)}, workspace {self.workspace}, by {self.source}")
        return "\n".join(lines + [f"  not {reason}" for reason in self.refused])

    @property
    def swizzled(self) -> bool:
        """cuBLASLt has an order of its own for scales of one byte."""
        return self.spec.a_format is not None and self.spec.a_format.scaling != "block"

    def run(self, rt: Runtime, operands: GemmOperands) -> None:
        """Launch on the runtime's stream."""
        a, b, out, a_scale, b_scale, bias, aux, a_sum, out_sum, a_amax, b_amax, _ = operands
        executor = rt.executor()
        entered = executor.driver.enter(executor.context) if executor.context else False
        pointed = (b_scale, a_scale, bias, aux, a_sum)
        try:
            route, alpha = self.route, 0
            if self.make_alpha is not None:
                alpha = _make_alpha(rt, self, a_amax, b_amax)
            if route is not None and not route.unfused:
                pointers = tuple([pointed[i].ptr for _, i in route.attributes])  # type: ignore[union-attr]
                multiply(rt, executor, self, (a.ptr, b.ptr, out.ptr, alpha), pointers)
            elif self.finish is not None:
                _run_unfused(rt, self, a, b, out, pointed)
            if self.sum_a and a_sum is not None and self.spec.trans_a:  # a is stored [K, M]
                column_sum(rt, a.ptr, a.shape, a.dtype, a_sum)
            elif self.sum_a and a_sum is not None:
                row_sum(rt, a, a_scale, a_sum)
            if self.sum_out and out_sum is not None:
                column_sum(rt, out.ptr, out.shape, out.dtype, out_sum)
        finally:
            if entered:
                executor.driver.leave()


def multiply(
    rt: Runtime, executor: Any, plan: LtPlan, operands: tuple[int, int, int, int], pointers: tuple[int, ...]
) -> None:
    """One call of cuBLASLt, with the thread's descriptors; or its record.

    Operands: the addresses of a, b, out and alpha (0: it is known); pointers: those that a run sets.
    """
    scratch = rt.workspace("cublasLt", (executor.gemms or cache_of(rt)).limit) if plan.workspace else 0
    if rt.recorder is not None:
        rt.recorder.add(Multiplied(plan, (scratch, *operands, *pointers), rt.recorder.bases))
        return
    try:
        (executor.gemms or cache_of(rt)).get(plan).run(rt, *operands, pointers, scratch)
    except Exception as error:
        refused = _refused(plan, error)
        if refused is None:
            raise
        raise refused from error


def _refused(plan: LtPlan, error: Exception) -> LibraryError | None:
    """An error of cuBLASLt's in words."""
    status = getattr(error, "status", None)
    if status is None:
        return None
    return LibraryError(
        "gemm",
        f"cuBLASLt status {status} ({error}) from {plan.explain()}",
        "success",
        "check that every tensor is alive and on the runtime's device; report it with this message",
    )


#: Where the addresses that a product is recorded with (scratch, a, b, out, alpha) stand in `Prepared.arguments`.
_WHERE = (13,), (5,), (3,), (8, 10), (2, 7)


class Multiplied:
    """A recorded call of cuBLASLt, with the addresses of scratch, a, b, out, alpha and of what a run sets."""

    __slots__ = ("addresses", "patches", "plan")

    def __init__(self, plan: LtPlan, addresses: Sequence[int], bases: Sequence[int]) -> None:
        self.plan, self.addresses, self.patches = plan, addresses, patches(addresses, bases)

    def bind(self, bound: Any, rt: Runtime) -> None:
        """With the descriptors and the handle of the thread that replays."""
        prepared = cache_of(rt).get(self.plan)
        bound.keep(prepared)
        (scratch, a, b, out, alpha), pointers = self.addresses[:5], self.addresses[5:]
        if pointers:
            behind = [p._replace(number=p.number - 4) for p in self.patches if p.number >= 5]
            bound.call(self, Prepared.point, (prepared, *pointers), behind)
        arguments = prepared.arguments(a, b, out, alpha, scratch, STREAM)
        found = [
            Patch(number, p.slot, p.offset + (4 if number == 7 else 0))  # beta is behind alpha
            for p in self.patches
            if p.number < 5
            for number in _WHERE[p.number]
        ]
        bound.call(self, prepared.matmul, arguments, found)

    def explain(self, error: Exception) -> Exception | None:
        """An error of its calls in words."""
        return _refused(self.plan, error)

    def __repr__(self) -> str:
        spec = self.plan.spec
        return f"gemm {spec.m} x {spec.n} x {spec.k} {spec.a} x {spec.b} -> {spec.out}"


def narrow(spec: GemmSpec) -> bool:
    """Whether the operands are FP8 or FP4."""
    return spec.a.bits <= 8


def alpha_on_device(spec: GemmSpec) -> bool:
    """Whether the factor of the product is known on the device only."""
    return spec.a_format is not None and spec.a_format.scaling == "nvfp4"


class Description(NamedTuple):
    """What the descriptors of a plan are made of."""

    compute: int
    scale: int
    layouts: tuple[tuple[int, int, int, int], ...]  # dtype, rows, columns, ld; of b, a and out of the spec
    attributes: tuple[tuple[int, int, int], ...]  # attribute, value, bytes
    pointers: tuple[int, ...]  # the attributes that a run sets


def described(spec: GemmSpec, route: LtRoute) -> Description:
    """For the library, which is column-major: the other operand comes first."""
    types = lt_.DATA_TYPES
    compute = lt_.COMPUTE_32F_FAST_TF32 if spec.tf32 and spec.a is dtypes.float32 else lt_.COMPUTE_32F
    m, n, k = spec.n, spec.m, spec.k  # cuBLASLt's
    first = (k, m) if spec.trans_b else (m, k)
    second = (n, k) if spec.trans_a else (k, n)
    layouts = (types[spec.b], *first, first[0]), (types[spec.a], *second, second[0]), (types[route.out], m, n, m)
    found = [(lt_.TRANSA, int(spec.trans_b), 4), (lt_.TRANSB, int(spec.trans_a), 4), (lt_.EPILOGUE, route.epilogue, 4)]
    if spec.a_format is not None and spec.b_format is not None:
        for attribute, form in ((lt_.A_SCALE_MODE, spec.b_format), (lt_.B_SCALE_MODE, spec.a_format)):
            found.append((attribute, lt_.SCALE_MODES[form.scaling, form.tiled], 4))
    elif spec.a.is_fp8:
        found.append((lt_.FAST_ACCUM, int(not spec.split_accumulator), 1))
    if alpha_on_device(spec):
        found.append((lt_.POINTER_MODE, lt_.POINTERS_ON_DEVICE, 4))
    if route.bias is not None:
        found.append((lt_.BIAS_DATA_TYPE, types[route.bias], 4))
    pointers = tuple(attribute for attribute, _ in route.attributes)
    if lt_.AUX_POINTER in pointers:
        found.append((lt_.AUX_LD, m, 8))
    return Description(compute, lt_.R_32F, layouts, tuple(found), pointers)


class Prepared:
    """A plan's descriptors in one executor: the addresses a run sets are written into them."""

    __slots__ = (
        "_last",
        "_set",
        "a_layout",
        "algo",
        "alpha",
        "attributes",
        "b_layout",
        "beta",
        "cache",
        "desc",
        "matmul",
        "needs",
        "out_layout",
        "values",
        "values_at",
    )

    def __init__(self, cache: GemmCache, spec: GemmSpec, route: LtRoute) -> None:
        lt = cache.lt
        self.cache, self.matmul, self._set = cache, lt.matmul, lt.matmul_desc_set_attribute
        self.desc = self.a_layout = self.b_layout = self.out_layout = 0
        what = described(spec, route)
        self.desc = lt.matmul_desc_create(what.compute, what.scale)
        for name, layout in zip(("a_layout", "b_layout", "out_layout"), what.layouts, strict=True):
            setattr(self, name, lt.matrix_layout_create(*layout))
        for attribute, value, nbytes in what.attributes:
            lt_.set_value(lt, self.desc, attribute, value, nbytes)
        self.attributes = what.pointers
        self.alpha = _ONE
        self.beta = _ONE if route.accumulate else _ZERO
        self.values = (ctypes.c_uint64 * max(1, len(self.attributes)))()
        self.values_at = ctypes.addressof(self.values)
        self._last: Sequence[int] | None = None
        # The heuristic looks at whether a pointer is set and how it is aligned, not at where it points.
        self.point(*[(1 << 20) + spec.alignment] * len(self.attributes))
        self.algo = self.needs = 0

    @property
    def problem(self) -> tuple[int, ...]:
        """What the library is asked about an algorithm with."""
        c = self.out_layout  # in and out
        return self.cache.handle, self.desc, self.a_layout, self.b_layout, c, c

    def finished(self, plan: LtPlan) -> Prepared:
        """Take the algorithm that the plan settled on."""
        self.algo, self.needs = plan.algo, plan.workspace
        return self

    def point(self, *pointers: int) -> None:
        """Later runs read these: scales, a bias."""
        if pointers == self._last:
            return
        values, at, last = self.values, self.values_at, self._last
        self._last = None  # until all are set
        for i, attribute in enumerate(self.attributes):
            if last is None or pointers[i] != last[i]:  # a bias stays where it is while scales move
                values[i] = pointers[i]
                self._set(self.desc, attribute, at + 8 * i, 8)
        self._last = pointers

    def run(self, rt: Runtime, a: int, b: int, out: int, alpha: int, pointers: tuple[int, ...], scratch: int) -> None:
        """Launch on the runtime's stream."""
        self.point(*pointers)
        self.matmul(*self.arguments(a, b, out, alpha, scratch, rt.stream))

    def arguments(self, a: int, b: int, out: int, alpha: int, scratch: int, stream: Any) -> tuple[Any, ...]:
        """Of the library, which is column-major: the other operand comes first. alpha, if not 0: where on the device it
        and, behind it, beta are.
        """
        first, beta = (alpha, alpha + 4) if alpha else (self.alpha, self.beta)
        operands = (b, self.a_layout, a, self.b_layout)
        results = (out, self.out_layout, out, self.out_layout)
        return self.cache.handle, self.desc, first, *operands, beta, *results, self.algo, scratch, self.needs, stream

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():  # the interpreter has taken the bindings apart; what is left goes with the process
            return
        lt = self.cache.lt
        for layout in (self.a_layout, self.b_layout, self.out_layout):
            if layout:
                lt.matrix_layout_destroy(layout)
        if self.desc:
            lt.matmul_desc_destroy(self.desc)


class GemmCache:
    """What an executor keeps for GEMMs: a cuBLASLt handle, and the descriptors of the plans it ran last."""

    __slots__ = ("_prepared", "handle", "limit", "lt")

    def __init__(self, rt: Runtime) -> None:
        self.lt = lt_.bindings()
        # Of a workspace, by generation: what cuBLAS's documentation asks for. Always whole, so that it never moves.
        self.limit = (32 << 20) if device.info(rt.device.index).capability >= (9, 0) else (4 << 20)
        self._prepared: OrderedDict[LtPlan, Prepared] = OrderedDict()
        self.handle = self.lt.create()

    def get(self, plan: LtPlan) -> Prepared:
        """The descriptors of a plan."""
        found = self._prepared.get(plan)
        if found is None:
            assert plan.route is not None
            found = self.put(plan, Prepared(self, plan.spec, plan.route).finished(plan))
        else:
            self._prepared.move_to_end(plan)
        return found

    def put(self, plan: LtPlan, prepared: Prepared) -> Prepared:
        """Keep new descriptors; the oldest make room, and their destructor frees them."""
        self._prepared[plan] = prepared
        if len(self._prepared) > _PREPARED:
            self._prepared.popitem(last=False)
        return prepared


def cache_of(rt: Runtime) -> GemmCache:
    """The executor's."""
    executor = rt.executor()
    if executor.gemms is None:
        with executor.driver.at_first_use(rt.device.index):
            executor.gemms = GemmCache(rt)
    found: GemmCache = executor.gemms
    return found


def _make_alpha(rt: Runtime, plan: LtPlan, a_amax: Tensor | None, b_amax: Tensor | None) -> int:
    """Leave alpha and beta where the product's call will read them: in scratch memory, whose address this gives."""
    spec, route = plan.spec, plan.route
    assert plan.make_alpha is not None and route is not None and spec.a_format is not None
    assert spec.b_format is not None
    alpha = rt.workspace("gemm alpha", 8)
    factor = 1 / (36 * spec.a_format.bound * spec.b_format.bound)
    plan.make_alpha(rt, 1, 1, a_amax, b_amax, alpha, factor, float(route.accumulate))
    return alpha


def _run_unfused(
    rt: Runtime, plan: LtPlan, a: Tensor, b: Tensor, out: Tensor, operands: tuple[Tensor | None, ...]
) -> None:
    """The product in float32, then epilogue.cu."""
    spec, route = plan.spec, plan.route
    if spec.m == 0 or spec.n == 0:
        return
    in_place = spec.out is dtypes.float32 and not spec.accumulate
    acc = out if in_place else rt.empty((spec.m, spec.n), dtypes.float32)
    if route is None:  # K is 0
        rt.backend.zero(rt, acc)
    else:
        pointers = tuple([operands[i].ptr for _, i in route.attributes])  # type: ignore[union-attr]
        multiply(rt, rt.executor(), plan, (a.ptr, b.ptr, acc.ptr, 0), pointers)
    assert plan.finish is not None
    grid = (-(-spec.n // 128), min(-(-spec.m // 8), 4096))
    plan.finish(rt, grid, (128, 1), acc, operands[BIAS], operands[AUX], out, spec.m, spec.n)
