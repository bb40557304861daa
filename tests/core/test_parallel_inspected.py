"""Who looks on at a weight that is spread over ranks: sees parts where they lie, and changes nothing that travels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from te_core import dtypes
from te_core.layers.communicator import InProcessRanks
from te_core.layers.gathered import of_one_scale, turns
from te_core.layers.inspector import PLAIN, POINTS, Request
from te_core.layers.linear import Sink
from te_core.ops import raw as ops
from te_core.quantized import Cast, Format, QuantizedTensor
from tests.core.test_parallel import FP32, RT, Case, Late, integers, part
from tests.covering import covering
from tests.recipes import OVERRIDES, RECIPES

ALIGNED, ODD = 256, 80  # rows: parts of whole blocks, and of none of the large ones
OPERANDS = sorted(PLAIN)
RESULTS = sorted(POINTS - set(PLAIN))
both_modes = pytest.mark.parametrize("mode", ["column", "row"])


def normal(seed: int, *shape: int) -> Any:
    """Values that every format rounds, one part's larger than the other's."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return values * (1 + np.arange(shape[0]) // (shape[0] // 2)).astype(np.float32).reshape(-1, *[1] * (len(shape) - 1))


def rounded(seed: int, *shape: int) -> Any:
    """Values that FP8 rounds, all of them alike, so that sums are exact with and without it."""
    return 17 * integers(seed, *shape)


class Looks:
    """Keeps what it is shown."""

    def __init__(self, request: Request = POINTS) -> None:
        self.request = request
        self.seen: dict[tuple[str, str], Any] = {}
        self.out: dict[tuple[str, str], Any] = {}
        self.told: dict[tuple[str, str], Format] = {}

    def inspect(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any, out: Any) -> Any:
        assert (gemm, tensor) not in self.seen
        self.seen[gemm, tensor] = rt.numpy(value.matrix()).copy()
        self.out[gemm, tensor] = out
        return self.change(rt, gemm, tensor, value, cast)

    def change(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any) -> Any:
        """Nothing."""

    def quantized_whole(self, rt: Any, gemm: str, tensor: str, form: Format) -> None:
        self.told[gemm, tensor] = form


class Unquantizes(Looks):
    """Puts operands themselves in their place, in high precision."""

    def change(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any) -> Any:
        return value


class Halves(Looks):
    """Puts half of an operand in its place."""

    def change(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any) -> Any:
        return rt.tensor(rt.numpy(value) / 2, value.dtype)


class Scales(Looks):
    """Puts an operand that it has quantized itself in its place: by the scale of the part, or by a given one."""

    def __init__(self, request: Request, form: Format, scale: float | None = None) -> None:
        super().__init__(request)
        self.form, self.scale = form, None if scale is None else RT.tensor([scale], FP32)

    def change(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any) -> Any:
        return ops.quantize(rt, value.matrix(), Cast(self.form, rowwise=True, columnwise=True, scale=self.scale))


def run(case: Case, inspector: Callable[[], Any] | None = None, **options: Any) -> tuple[list[Any], list[Any], Any]:
    """What the ranks found, the collectives of the first one, and their inspectors."""
    ranks = InProcessRanks(case.size)
    looks: list[Any] = [None if inspector is None else inspector() for _ in range(case.size)]
    found = ranks.run(lambda comm: case.step(comm, inspector=looks[comm.rank], **options))
    assert all(sorted(log) == sorted(ranks.log[0]) for log in ranks.log)
    return found, ranks.log[0], looks


# ------------------------------------------------------------------------------------------- nothing is changed


@covering(mode=["column", "row"], recipe=[None, *RECIPES, *OVERRIDES], parts=["whole blocks", "odd", "all rows"])
def test_a_step_that_is_looked_at(mode: str, recipe: str | None, parts: str) -> None:
    """Bit for bit the plain step, and no byte more travels."""
    rows = ALIGNED if parts == "whole blocks" else ODD
    case = Case(mode, parts != "all rows", 2, recipe, rows, normal)
    plain, bytes_of_plain, _ = run(case)
    found, sent, looks = run(case, Looks)
    for made, one in zip(found, plain, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(made, one, strict=True))
    assert sorted(sent) == sorted(bytes_of_plain)
    assert all(look.seen.keys() == POINTS for look in looks)


@pytest.mark.parametrize("accumulate", [False, True])
@both_modes
def test_a_gradient_that_is_added(mode: str, accumulate: bool) -> None:
    """It is shown before, and its operands travel once."""

    def step(inspector: Any) -> tuple[list[Any], Any]:
        shape = (64, 256) if mode == "column" else (128, 128)
        sinks = [Sink(RT.tensor(np.ones(shape, np.float32)), accumulate) for _ in range(2)]
        ranks = InProcessRanks(2)
        case = Case(mode, True, 2, "mxfp8", ALIGNED, normal)
        looks = [None if inspector is None else inspector() for _ in sinks]
        ranks.run(lambda comm: case.step(comm, sink=sinks[comm.rank], inspector=looks[comm.rank]))
        return [RT.numpy(sink.main) for sink in sinks], sorted(ranks.log[0])  # type: ignore[arg-type]

    (plain, bytes_of_plain), (found, sent) = step(None), step(Looks)
    assert all(np.array_equal(a, b) for a, b in zip(found, plain, strict=True)) and sent == bytes_of_plain


@both_modes
def test_late_collectives(mode: str) -> None:
    """Nothing is shown before it has come."""
    case, ranks = Case(mode, True, 2, "mxfp8", ALIGNED, normal), InProcessRanks(2)
    looks = [Looks(), Looks()]
    ranks.run(lambda comm: case.step(Late(ranks, comm.rank), inspector=looks[comm.rank]))
    _, _, wanted = run(case, Looks)
    for look, one in zip(looks, wanted, strict=True):
        assert all(np.array_equal(look.seen[point], one.seen[point]) for point in POINTS)


# ------------------------------------------------------------------------------------------------ what is shown


def lies(case: Case, tensor: str) -> int | None:
    """Along which dimension a rank has its part; None: it has all."""
    ends = {"activation": case.x, "weight": case.w, "output": case.y, "gradient": case.y, "dgrad": case.x}
    return case.w if tensor == "wgrad" else ends[tensor]


@pytest.mark.parametrize("rows", [ALIGNED, ODD])
@pytest.mark.parametrize("recipe", [None, "delayed", "current", "block", "mxfp8", "nvfp4 nearest"])
@both_modes
def test_parts_are_shown_where_they_lie(mode: str, recipe: str | None, rows: int) -> None:
    """Put together they are what one process is shown of the whole, and so is what they were quantized to."""
    case, one = Case(mode, True, 2, recipe, rows, normal), Looks()
    Case(mode, False, 1, recipe, rows, normal).step(None, inspector=one)
    _, _, looks = run(case, Looks)
    for point in POINTS:
        dim = lies(case, point[1])
        made = np.concatenate([look.seen[point] for look in looks], dim or 0)
        if point in RESULTS and recipe is not None:  # scales of columns and weights are the rank's own
            assert np.abs(made - one.seen[point]).mean() < 0.3 * np.abs(one.seen[point]).mean()
        else:
            assert np.allclose(made, one.seen[point], rtol=1e-5, atol=1e-4)
    gathered = ("fprop", "activation") if mode == "column" else ("dgrad", "gradient")
    for point in (gathered, ("wgrad", gathered[1])) if recipe is not None else ():
        compare_codes(point, [look.out[point] for look in looks], one.out[point], looks[0].told)


def compare_codes(point: tuple[str, str], parts: list[Any], whole: Any, told: dict[Any, Format]) -> None:
    """The values that the parts were quantized to are rows of those of the whole."""
    columns = point[0] == "wgrad"
    if point in told:  # that of the whole is not there yet
        assert parts == [None, None] and told[point] is whole.format
        return
    assert all(isinstance(q, QuantizedTensor) for q in parts)
    by_columns = columns and not turns(whole.format)
    values = [RT.numpy(ops.dequantize(RT, q, FP32, columnwise=by_columns)) for q in parts]
    assert np.array_equal(np.concatenate(values), RT.numpy(ops.dequantize(RT, whole, FP32, columnwise=columns)))


@both_modes
def test_who_is_told_of_the_whole(mode: str) -> None:
    """Parts of no whole blocks travel in high precision for wgrad; a gradient is gathered once for both."""
    tensor = "activation" if mode == "column" else "gradient"
    told = [("wgrad", tensor)] if mode == "column" else [("dgrad", tensor), ("wgrad", tensor)]
    for recipe, rows, wanted in (("mxfp8", ODD, told), ("mxfp8", ALIGNED, []), ("current", ODD, []), (None, ODD, [])):
        _, _, looks = run(Case(mode, True, 2, recipe, rows), Looks)
        assert sorted(looks[1].told) == wanted


# ------------------------------------------------------------------------------------------ what is put in its place


@cache
def reference(mode: str, recipe: str | None, rows: int, kind: type[Looks], points: Request) -> Any:
    return Case(mode, False, 1, recipe, rows, rounded).step(None, inspector=kind(points))


def joined(case: Case, found: list[Any]) -> list[Any]:
    """y, dx and dw of the ranks."""
    return [f[0] if d is None else np.concatenate(f, d) for f, d in zip(zip(*found), (case.y, case.x, case.w))]  # noqa: B905


PUT_IN: dict[str, tuple[type[Looks], bool]] = {
    "in high precision": (Unquantizes, False),
    "marked as such": (Unquantizes, True),
    "halves": (Halves, False),
}


@covering(
    turns=2,
    mode=["column", "row"],
    rows=[ALIGNED, ODD],
    recipe=[None, "delayed", "current e4m3 pow2", "block", "block tiled x", "mxfp8"],
    what=PUT_IN,
)
def test_operands_put_in(mode: str, recipe: str | None, rows: int, what: str) -> None:
    """Each by itself, and all: what travels is multiplied as one process multiplies the whole of it."""
    kind, marked = PUT_IN[what]
    case = Case(mode, True, 2, recipe, rows, rounded)
    for points in (*([point] for point in OPERANDS), OPERANDS):
        request = frozenset((*points, *(PLAIN[p] for p in points if marked)))
        found, _, _ = run(case, lambda request=request: kind(request))  # type: ignore[misc]
        wanted = reference(mode, recipe, rows, kind, request)
        for made, one in zip(joined(case, found), wanted, strict=False):
            assert np.array_equal(made, one), points


@pytest.mark.parametrize("form", ["tensor", "mxfp8"])
@pytest.mark.parametrize("shared", [False, True], ids=["own scales", "one scale"])
@both_modes
def test_quantized_operands_put_in(mode: str, form: str, shared: bool) -> None:
    """Their bytes travel where they have one scale; else their values do, in high precision."""
    case, made_of = Case(mode, True, 2, "current e4m3 pow2", ALIGNED), Format(dtypes.float8_e4m3, form)
    tensor, gemm = ("activation", "fprop") if mode == "column" else ("gradient", "dgrad")
    points = frozenset(((gemm, tensor), ("wgrad", tensor)))
    found, sent, _ = run(case, lambda: Scales(points, made_of, 64.0 if shared and form == "tensor" else None))
    one = Case(mode, False, 1, "current e4m3 pow2", ALIGNED).step(None)
    for a, b in zip(joined(case, found), one, strict=False):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-3)
    part_of = ALIGNED // 2 * (256 if mode == "column" else 128)
    high = [size for name, size in sent if name == "all_gather" and size == 4 * part_of]
    low = [size for name, size in sent if name == "all_gather" and size == part_of]
    if form == "mxfp8":  # forward keeps what backward reads in the recipe's format, or in high precision
        assert (len(low), len(high)) == ((1, 1) if mode == "column" else (2, 0))
    else:
        assert (len(low), len(high)) == ((2, 0) if shared else (0, 2))


@pytest.mark.parametrize("mode", [None, "column"])
@pytest.mark.parametrize("override", ["dequantized", "high_precision"])
def test_a_quantized_operand_put_in_under_an_override(mode: str | None, override: str) -> None:
    """What backward dequantizes is the rowwise copy of the recipe's: another one is kept as values."""
    look = Scales(frozenset((("wgrad", "activation"),)), Format(dtypes.float8_e4m3, "tensor"))
    case = Case(mode or "row", True, 2 if mode else 1, f"current {override}", ALIGNED)
    found = [case.step(None, inspector=look)] if mode is None else run(case, lambda: Scales(look.request, look.form))[0]
    one = Case("row", False, 1, f"current {override}", ALIGNED).step(None)
    assert np.allclose(joined(case, found)[2], one[2], rtol=1e-3, atol=0.05)


def test_parts_of_one_scale() -> None:
    """Which parts can be put together that somebody else has quantized."""

    def run(comm: Any) -> list[bool]:
        x = RT.tensor(part(normal(0, 2 * 64, 64), 0, comm.rank, 2))
        found = []
        for form in (Format(dtypes.float8_e4m3, "tensor"), Format(dtypes.float8_e4m3, "mxfp8"), NVFP4):
            for rows in (48, 64):
                both = Cast(form, rowwise=True, columnwise=True)
                for cast in (both, both.scaled_by(RT.tensor([3.0, 3.0], FP32))):
                    q = ops.quantize(RT, x.rows(0, rows), cast)
                    found += [of_one_scale(RT, comm, q, columns) for columns in (False, True)]
        return found

    tensor = [False, False, True, True] * 2
    mxfp8 = [True, False] * 2 + [True, True] * 2
    nvfp4 = [False, False, True, True] * 2
    assert InProcessRanks(2).run(run) == [tensor + mxfp8 + nvfp4] * 2


NVFP4 = Format(dtypes.float4_e2m1, "nvfp4")
