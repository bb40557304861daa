"""Weights that are spread over ranks, in one process and without a socket: threads are the ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from te_core import dtypes
from te_core.errors import ArgumentError, LibraryError
from te_core.layers import linear, mlp, norm_linear
from te_core.layers.communicator import InProcessCommunicator, InProcessRanks
from te_core.layers.gathered import can_travel, gather, turned
from te_core.layers.linear import LinearSpec, Needs, Sink
from te_core.layers.norm import NormSpec
from te_core.layers.parallel import Split
from te_core.ops import raw as ops
from te_core.precision import Operand, Precision
from te_core.quantized import BLOCK, Cast, QuantizedTensor
from te_core.recipe import resolve, the_one
from te_core.runtime import Runtime
from tests.backends import runtimes
from tests.core.face import scales
from tests.covering import covering
from tests.recipes import RECIPES
from tests.recipes import rule as recipe_of

RT = Runtime.cpu()
#: Formats that hold small integers exactly, so that a sum over parts is bit for bit the sum over all.
EXACT = (
    "delayed",
    "current e4m3 pow2",
    "block",
    "block no tiles",
    "block tiled x",
    "mxfp8",
    "mxfp8 tiled",
    "nvfp4 no rht",
)
FP32 = dtypes.float32
NORM = NormSpec(FP32, "LayerNorm", 1e-5)


def precision_of(name: str | None) -> Precision | None:
    return None if name is None else the_one(replace(resolve(recipe_of(name)), emulate=True))


def integers(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


def part(t: Any, dim: int | None, rank: int, size: int) -> Any:
    return t if dim is None else np.split(t, size, dim)[rank]


class Case:
    """A linear cut over ranks: which operands and results a rank has parts of, by dimension."""

    def __init__(
        self, mode: str, sequence: bool, size: int, recipe: str | None, rows: int = 256, values: Any = integers
    ) -> None:
        self.mode, self.sequence, self.size, self.rows, self.values = mode, sequence, size, rows, values
        column = mode == "column"
        self.w, self.b = (0, 0) if column else (1, None)
        self.x = (0 if sequence else None) if column else 1
        self.y = 1 if column else (0 if sequence else None)
        split = Split(mode, size, sequence) if size > 1 else None
        self.spec = LinearSpec(FP32, precision_of(recipe), Needs(True, True, True), parallel=split)

    def step(
        self,
        comm: InProcessCommunicator | None,
        n: int = 128,
        k: int = 256,
        sink: Sink | None = None,
        inspector: Any = None,
    ) -> Any:
        """y, dx, dw, db of this rank."""
        rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
        x, dy = self.values(1, self.rows, k), self.values(3, self.rows, n)
        for t in (x, dy):  # the first ranks' maximum is half of the others'
            t[: self.rows // 2] = np.sign(t[: self.rows // 2])
        w, b = self.values(2, n, k), self.values(4, n)
        cut = (lambda t, dim: part(t, dim, rank, size)) if comm is not None else (lambda t, dim: t)
        spec = self.spec if inspector is None else replace(self.spec, inspect=inspector.request)
        options: dict[str, Any] = {"spec": spec, "scales": scales(RT, 1), "comm": comm, "inspectors": (inspector,)}
        tensors = [RT.tensor(cut(t, dim)) for t, dim in ((x, self.x), (w, self.w), (b, self.b))]
        rng = RT.tensor([1, 2], dtypes.int64)
        (y,), saved = linear.forward(RT, *tensors, rng, **options)
        dx, dw, db = linear.backward(RT, RT.tensor(cut(dy, self.y)), saved, sinks=(sink,), **options)
        return [None if t is None else RT.numpy(t) for t in (y, dx, dw, db)]


def compared(case: Case, recipe: str | None, ranks: InProcessRanks, **options: Any) -> list[Any]:
    """The ranks' results put together, and those of one process."""
    found = ranks.run(lambda comm: case.step(comm, **options))
    one = Case(case.mode, False, 1, recipe, case.rows).step(None, **options)

    def whole(i: int, dim: int | None) -> Any:
        return found[0][i] if dim is None else np.concatenate([f[i] for f in found], dim)

    bias = sum(f[3] for f in found) if case.mode == "row" and case.sequence else whole(3, case.b)
    return [(whole(0, case.y), one[0]), (whole(1, case.x), one[1]), (whole(2, case.w), one[2]), (bias, one[3])]


@covering(turns=2, size=[2, 4], case=["column", "column sequence", "row", "row sequence"], recipe=[None, *EXACT])
def test_a_linear(case: str, recipe: str | None, size: int) -> None:
    mode, _, sequence = case.partition(" ")
    if size == 4 and recipe in ("block", "block no tiles", "block tiled x"):
        pytest.skip("parts of 64 columns have other blocks than the whole")
    for made, one in compared(Case(mode, bool(sequence), size, recipe, 512), recipe, InProcessRanks(size)):
        assert np.array_equal(made, one)


@covering(turns=2, mode=["column", "row"], recipe=[None, *EXACT], rows=[6, 40, 72])
def test_parts_of_no_whole_blocks(mode: str, recipe: str | None, rows: int) -> None:
    for made, one in compared(Case(mode, True, 2, recipe, rows), recipe, InProcessRanks(2)):
        assert np.array_equal(made, one)


@covering(
    mode=["column", "row"],
    recipe=["current", "nvfp4", "nvfp4 rows", "nvfp4 4over6 all MAE", "block hybrid", "mxfp8 hybrid"],
)
def test_formats_that_round(mode: str, recipe: str) -> None:
    """What is not exact runs, and is about right."""
    for made, one in compared(Case(mode, True, 2, recipe), recipe, InProcessRanks(2)):
        assert np.abs(made - one).mean() < 0.35 * np.abs(one).mean()


# ------------------------------------------------------------------------------------ what arrives is the whole


def bytes_of(q: QuantizedTensor, columns: bool) -> list[Any]:
    names = ("columnwise", "columnwise_scale") if columns else ("rowwise", "rowwise_scale")
    return [RT.numpy(t.view_as(dtypes.uint8) if t.dtype.bits == 8 else t) for t in (getattr(q, n) for n in names)]


@covering(turns=2, recipe=RECIPES, rows=[20, 128, 256], columns=[False, True])
def test_gathered_bytes_are_those_of_the_whole(recipe: str, rows: int, columns: bool) -> None:
    """Data, scales and padding, of every format that can travel."""
    rule: Operand = precision_of(recipe).input  # type: ignore[union-attr,assignment]
    column = columns and rule.scaling not in ("delayed", "current") and not rule.tiled
    if not can_travel(rule, rows, columns):
        assert rule.tiled or columns
        assert rule.row_scaled or rows % BLOCK[rule.scaling]
        return
    size, k = 2, 80
    x = np.random.default_rng(0).standard_normal((size * rows, k)).astype(np.float32)
    x *= 1 + np.arange(size * rows)[:, None] // rows  # the second rank's maximum is twice the first one's
    maxima = None
    if rule.scaling in ("delayed", "current", "nvfp4") and not rule.row_scaled:
        maxima = RT.tensor([np.abs(x).max()] * 2, FP32)
    options: dict[str, Any] = {"maxima": maxima, "power_of_two": rule.power_of_two, "four_over_six": rule.four_over_six}

    def run(comm: InProcessCommunicator) -> Any:
        mine = RT.tensor(np.split(x, size)[comm.rank])
        q = ops.quantize(RT, mine, Cast(rule.format, rowwise=not column, columnwise=column, **options))
        made = gather(RT, comm, q, columns).wait()
        if columns and made.columnwise is None:  # type: ignore[union-attr]
            made = turned(RT, made)
        return bytes_of(made, columns)  # type: ignore[arg-type]

    wanted = ops.quantize(RT, RT.tensor(x), Cast(rule.format, rowwise=not columns, columnwise=columns, **options))
    for found in InProcessRanks(size).run(run):
        for made, one in zip(found, bytes_of(wanted, columns), strict=True):
            if one.dtype == np.float32:  # the padding's data are zeros, whatever their scale
                made = np.where(made == 0, np.float32(1), made)
            assert np.array_equal(made, one)


# ----------------------------------------------------------------------------------------------- bytes on the wire


@pytest.mark.parametrize("recipe", [None, "current", "delayed", "block", "mxfp8", "nvfp4", "nvfp4 no rht"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_bytes_on_the_wire(mode: str, sequence: bool, recipe: str | None) -> None:
    """As docs/parallel.md has them: what a rank gives to each collective of a step."""
    m, n, k, size = 256, 128, 256, 2
    ranks = InProcessRanks(size)
    case = Case(mode, sequence, size, recipe, m)
    ranks.run(lambda comm: case.step(comm, n, k))
    width = k if mode == "column" else n  # of what travels: x and dx, or y and dy
    part_of = m // size * width
    total = ("reduce_scatter" if sequence else "all_reduce", 4 * m * width)
    wanted = [total]
    if sequence:
        wanted += gathers(recipe, m // size, width, mode)
    for log in ranks.log:
        assert sorted(log) == sorted(wanted), f"{part_of} elements a part"


def gathers(recipe: str | None, m: int, width: int, mode: str) -> list[tuple[str, int]]:
    """What is gathered of a part [m, width] of float32 values."""
    if recipe is None:
        return [("all_gather", 4 * m * width)] * (2 if mode == "column" else 1)
    if recipe in ("current", "delayed"):
        times = 2 if mode == "column" else 1
        return [("all_gather", m * width)] * times + [("all_reduce", 4)] * (recipe == "current")
    rows, agreed = rowwise(recipe, m, width)
    if recipe == "block":
        return rows * 2
    if recipe == "mxfp8":  # scales along the columns are padded to 128 columns
        return [*rows, ("all_gather", m * width), ("all_gather", m // 32 * width)]
    if recipe == "nvfp4":  # the columns are turned by the Hadamard transform, and have a maximum of their own
        agreed = [("all_reduce", 8)]
    return [*rows, ("all_gather", m * width // 2), ("all_gather", m // 16 * width), *agreed]


def rowwise(recipe: str, m: int, width: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """What is gathered of the rowwise copy of such a part, and on what the ranks agree before."""
    if recipe == "block":  # a float32 scale for each 1x128
        return [("all_gather", m * width), ("all_gather", 4 * m * width // 128)], []
    if recipe == "mxfp8":  # scales along the rows are padded to four a row
        return [("all_gather", m * width), ("all_gather", m * max(4, width // 32))], []
    return [("all_gather", m * width // 2), ("all_gather", m * max(4, width // 16))], [("all_reduce", 4)]


@pytest.mark.parametrize("recipe", ["block", "mxfp8", "nvfp4", "nvfp4 no rht"])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_bytes_of_parts_of_no_whole_blocks(mode: str, recipe: str) -> None:
    """What wgrad reads travels in high precision, and a gradient that does is there for dgrad, too."""
    m, n, k, size = 40, 128, 256, 2
    ranks = InProcessRanks(size)
    case = Case(mode, True, size, recipe, m * size)
    ranks.run(lambda comm: case.step(comm, n, k))
    width = k if mode == "column" else n
    wanted = [("all_gather", 4 * m * width), ("reduce_scatter", 4 * m * size * width)]
    if mode == "column":
        wanted += sum(rowwise(recipe, m, width), [])
    for log in ranks.log:
        assert sorted(log) == sorted(wanted)


def norm_step(kind: str, gathered: bool, comm: InProcessCommunicator, m: int, width: int) -> None:
    """A forward and backward of a layer behind a norm, whose output comes out, too: of this rank's rows, or of all."""
    first, second = (
        LinearSpec(FP32, None, Needs(True, True, True), parallel=Split(mode, comm.size, True))
        for mode in ("column", "row")
    )
    spec: Any = norm_linear.NormLinearSpec(NORM, first, return_norm=True, gather_norm=gathered)
    module: Any = norm_linear
    vectors, w = [RT.tensor(integers(i, width)) for i in range(3)], RT.tensor(integers(3, width, width))
    given, rows = [w, vectors[2]], m * comm.size
    if kind == "mlp":
        spec, module = mlp.MLPSpec(first, second, NORM, "relu", return_norm=True, gather_norm=gathered), mlp
        given, rows = [*given, w, vectors[2]], m
    x, dy = RT.tensor(integers(4 + comm.rank, m, width)), RT.tensor(integers(6, rows, width))
    outputs, saved = module.forward(RT, x, *vectors[:2], *given, spec=spec, comm=comm)
    module.backward(RT, dy, outputs[1], None, saved, spec=spec, comm=comm)


@pytest.mark.parametrize("kind", ["norm and linear", "mlp"])
def test_bytes_of_a_gathered_norm(kind: str) -> None:
    """Its part is gathered once more, and of its gradient each rank gets a part of the sum."""
    m, width, size = 32, 64, 2
    logs = []
    for gathered in (False, True):
        ranks = InProcessRanks(size)
        ranks.run(lambda comm: norm_step(kind, gathered, comm, m, width))  # noqa: B023
        logs.append(ranks.log)
    more = [("all_gather", 4 * m * width), ("reduce_scatter", 4 * m * size * width)]
    for without, log in zip(*logs, strict=True):
        assert sorted(log) == sorted([*without, *more])


# ----------------------------------------------------------------------------------------------------- and faults


def test_ranks_that_run_different_layers() -> None:
    def run(comm: InProcessCommunicator) -> str:
        with pytest.raises(ArgumentError) as caught:
            Case("column", True, 2, None, 64 if comm.rank else 32).step(comm)
        return str(caught.value)

    first, second = InProcessRanks(2).run(run)
    assert first == second and "rank 0" in first and "rank 1" in first


def test_a_rank_that_fails() -> None:
    seen: list[BaseException] = []

    def run(comm: InProcessCommunicator) -> None:
        if comm.rank == 1:
            raise KeyError("of rank 1")
        try:
            Case("column", True, 2, None).step(comm)
        except LibraryError as error:
            seen.append(error)
            raise

    with pytest.raises((KeyError, LibraryError)):
        InProcessRanks(2).run(run)
    assert len(seen) == 1 and "did not come" in str(seen[0])


def test_moves_between_ranks() -> None:
    def run(comm: InProcessCommunicator) -> tuple[list[float], list[float]]:
        given, taken = RT.tensor(np.arange(4.0) + 10 * comm.rank, FP32), RT.empty((4,), FP32)
        comm.all_to_all(RT, given, taken).wait()
        other = RT.empty((4,), FP32)
        comm.send_recv(RT, given, 1 - comm.rank, other, 1 - comm.rank).wait()
        return RT.numpy(taken).tolist(), RT.numpy(other).tolist()

    first, second = InProcessRanks(2).run(run)
    assert first == ([0, 1, 10, 11], [10, 11, 12, 13]) and second == ([2, 3, 12, 13], [0, 1, 2, 3])


@covering(mode=["column", "row"], recipe=[None, *EXACT, "nvfp4"])
def test_the_host_moves_no_numbers(mode: str, recipe: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the ranks have met: inside a CUDA graph's capture nothing may be read from the device."""
    case, ranks = Case(mode, True, 2, recipe), InProcessRanks(2)
    comms = [ranks.of(rank) for rank in range(2)]
    shapes = ((128, 256), (64, 256), (256, 64)) if mode == "column" else ((256, 128), (128, 128), (128, 128))
    tensors = [[RT.tensor(integers(i + rank, *shape)) for i, shape in enumerate(shapes)] for rank in range(2)]
    rng, options = RT.tensor([1, 2], dtypes.int64), {"spec": case.spec, "scales": scales(RT, 1)}

    def step(comm: InProcessCommunicator) -> int:
        (x, w, dy), own = tensors[comm.rank], comms[comm.rank]
        (y,), saved = linear.forward(RT, x, w, RT.zeros((w.shape[0],), FP32), rng, comm=own, **options)
        linear.backward(RT, dy, saved, comm=own, **options)
        return y.size

    ranks.run(step)
    for moved in ("copy_to_host", "copy_from_host"):
        monkeypatch.setattr(RT.backend, moved, lambda *_: pytest.fail("numbers came to the host, or from there"))
    assert ranks.run(step) == [256 * 64 if mode == "column" else 128 * 128] * 2


@pytest.mark.parametrize("mode", ["column", "row"])
def test_weight_gradients_that_wait(mode: str) -> None:
    """Into memory of the caller's, or computed later."""
    for delayed in (False, True):
        sinks: list[Any] = [None, None]

        def run(comm: InProcessCommunicator, delayed: bool = delayed, sinks: list[Any] = sinks) -> Any:
            shape = (64, 256) if mode == "column" else (128, 128)
            sink = sinks[comm.rank] = Sink(RT.tensor(np.ones(shape, np.float32)), True, [] if delayed else None)
            Case(mode, True, 2, "current").step(comm, sink=sink)
            for waiting in sink.queue or ():
                waiting(RT)
            return RT.numpy(sink.main) - 1  # type: ignore[arg-type]

        made = np.concatenate(InProcessRanks(2).run(run), 0 if mode == "column" else 1)
        one = Case(mode, False, 1, "current").step(None)[2]
        assert np.abs(made - one).mean() < 0.1 * np.abs(one).mean()


class Late(InProcessCommunicator):
    """Whose collectives happen when they are waited for, and not before."""

    def reduce_scatter(self, rt: Runtime, whole: Any, out: Any) -> Any:
        return _Later(lambda: InProcessCommunicator.reduce_scatter(self, rt, whole, out))

    def all_gather(self, rt: Runtime, part: Any, out: Any) -> Any:
        return _Later(lambda: InProcessCommunicator.all_gather(self, rt, part, out))


class _Later:
    def __init__(self, run: Any) -> None:
        self.run = run

    def wait(self) -> None:
        self.run().wait()


@pytest.mark.parametrize("recipe", [None, "current e4m3 pow2", "mxfp8"])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_late_collectives(mode: str, recipe: str | None) -> None:
    """Nothing is read before it has been waited for."""
    case, ranks = Case(mode, True, 2, recipe), InProcessRanks(2)
    found = ranks.run(lambda comm: case.step(Late(ranks, comm.rank)))
    one = Case(mode, False, 1, recipe).step(None)
    for i, dim in enumerate((case.y, case.x, case.w)):
        assert np.array_equal(np.concatenate([f[i] for f in found], dim), one[i])  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------- given maxima


@pytest.mark.parametrize("rt", runtimes())
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("recipe", ["current", "current e4m3 pow2", "nvfp4", "nvfp4 no rht", "nvfp4 4over6 all MAE"])
def test_a_part_by_the_maximum_of_the_whole(rt: Runtime, recipe: str, sums: bool) -> None:
    """On every device: the bytes of the part are those that the whole has there."""
    rule: Operand = precision_of(recipe).input  # type: ignore[union-attr,assignment]
    x = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float32)
    x[64:] *= 3
    options: dict[str, Any] = {
        "power_of_two": rule.power_of_two,
        "transform": rule.transform,
        "four_over_six": rule.four_over_six,
    }
    both = Cast(rule.format, rowwise=True, columnwise=True, **options)
    whole = ops.quantize(rt, rt.tensor(x), both)
    maxima = rt.tensor([np.abs(x).max(), np.abs(x).max()], FP32)
    if rule.scaling == "nvfp4":
        pair = [float(rt.numpy(amax)[0]) for amax in (whole.rowwise_amax, whole.columnwise_amax)]  # type: ignore[arg-type]
        maxima = rt.tensor(pair, FP32)
    total = rt.empty((64,), FP32) if sums else None
    part = ops.quantize(rt, rt.tensor(x[:64]), both.scaled_by(maxima), column_sum=total)
    as_bytes = [rt.numpy(q.rowwise.view_as(dtypes.uint8)) for q in (part, whole)]  # type: ignore[union-attr]
    assert np.array_equal(as_bytes[0][:64], as_bytes[1][:64])
    if rule.scaling != "nvfp4":
        assert np.array_equal(rt.numpy(part.scale_inv), rt.numpy(whole.scale_inv))
    if total is not None:
        assert np.allclose(rt.numpy(total), x[:64].sum(0), atol=1e-4)
