"""Products that overlap with their communication: the values of plain ones, bit for bit, and why some run plain."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from te_core import dtypes
from te_core.dtypes import DType
from te_core.errors import UnsupportedError
from te_core.layers import mlp, norm_linear
from te_core.layers.communicator import InProcessCommunicator, InProcessRanks
from te_core.layers.linear import LinearSpec, Needs
from te_core.layers.norm import NormSpec
from te_core.layers.overlap import Overlap, Way
from te_core.layers.parallel import Split
from te_core.ops import raw as ops
from te_core.precision import Precision
from te_core.runtime import HostAllocator, Runtime
from te_core.tape.taped import COUNTS
from te_core.tensor import Tensor
from te_core.tools.explain import explain_linear
from tests.core.peer_ranks import PeerRanks
from tests.core.test_parallel import Case, precision_of
from tests.core.test_tape_ranks import Layer
from tests.covering import covering
from tests.recordings import tapes
from tests.tiled_products import tiled_products

RT = Runtime.cpu()
FP32 = dtypes.float32
ROOM = 1 << 18
RING, BULK, EXTERNAL = Way("ring_exchange"), Way("bulk"), Way("external")
RECIPES = (None, "delayed", "current", "block", "block tiled x", "mxfp8", "nvfp4")
#: How GEMMs overlap, by the mode of the weight.
WAYS: dict[str, dict[str, Overlap]] = {
    "column": {
        "ring": Overlap("fc1", RING, RING, None, ROOM),
        "pipeline": Overlap("fc1", RING, Way("pipeline", 2), None, ROOM),
        "bulk": Overlap("fc1", RING, BULK, BULK, ROOM),
    },
    "row": {
        "ring": Overlap("fc2", RING, RING, EXTERNAL, ROOM),
        "pipeline": Overlap("fc2", Way("pipeline", 2), RING, EXTERNAL, ROOM),
        "bulk": Overlap("fc2", RING, None, None, ROOM),
    },
}


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class _Arrives:
    """A transfer that nobody sees before somebody waited for it."""

    def __init__(self, out: Tensor, values: Any) -> None:
        self.out, self.values = out, values

    def wait(self) -> None:
        self.out.numpy().view(np.uint8).reshape(-1)[:] = self.values


class Late(InProcessCommunicator):
    """What comes is there when somebody has waited for it, and not before."""

    def _late(self, out: Tensor, begin: Any) -> _Arrives:
        before = out.numpy().copy()
        begin()
        values = out.numpy().copy().view(np.uint8).reshape(-1)
        out.numpy()[...] = before
        return _Arrives(out, values)

    def send_recv(self, rt: Runtime, t: Tensor, to: int, out: Tensor, source: int) -> Any:
        return self._late(out, lambda: super(Late, self).send_recv(rt, t, to, out, source).wait())

    def reduce_scatter(self, rt: Runtime, whole: Tensor, out: Tensor) -> Any:
        return self._late(out, lambda: super(Late, self).reduce_scatter(rt, whole, out).wait())


@pytest.fixture(autouse=True)
def in_tiles() -> Iterator[None]:
    with tiled_products():
        yield


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is taken holds NaNs."""
    plain = HostAllocator.empty

    def empty(self: HostAllocator, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        made = plain(self, shape, dtype, stream)
        made.numpy().reshape(-1).view(np.uint8)[:] = 0xFF
        return made

    monkeypatch.setattr(HostAllocator, "empty", empty)


def with_ways(spec: LinearSpec, ways: Overlap | None) -> LinearSpec:
    assert spec.parallel is not None
    return replace(spec, parallel=replace(spec.parallel, overlap=ways))


def case_of(mode: str, recipe: str | None, size: int, ways: Overlap | None, rows: int = 128) -> Case:
    case = Case(mode, True, size, recipe, rows * size, normal)
    case.spec = with_ways(case.spec, ways)
    return case


def stepped(
    case: Case, ranks: InProcessRanks | None = None, steps: int = 1, **options: Any
) -> tuple[list[Any], list[list[tuple[str, int]]]]:
    """Each rank's results of the last step, and what each gave to the others in all of them."""
    ranks = InProcessRanks(case.size) if ranks is None else ranks
    n, k = (128 * case.size, 256) if case.mode == "column" else (256, 128 * case.size)
    for _ in range(steps):
        found = ranks.run(lambda comm: case.step(Late(ranks, comm.rank), n, k, **options))
    return found, ranks.log


def flat(turns: list[Any]) -> list[Any]:
    """All arrays of all ranks in all turns."""
    return [array for ranks in turns for results in ranks for array in results]


def same(found: list[Any], wanted: list[Any]) -> bool:
    return all(
        np.array_equal(a, b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True)
    )


MODES, HOW = ["column", "row"], ["ring", "pipeline", "bulk"]
#: How parts travel: by calls, or through memory that peers read.
CARRIERS: dict[str, Any] = {"calls": InProcessRanks, "peer memory": PeerRanks}
each_carrier = pytest.mark.parametrize("carrier", CARRIERS)


@each_carrier
@covering(turns=2, mode=MODES, how=HOW, recipe=RECIPES, size=[2, 3, 4])
def test_values_are_those_of_plain_products(mode: str, how: str, recipe: str | None, size: int, carrier: str) -> None:
    """Of peer memory in three steps, so that rooms are used again."""
    ways = WAYS[mode][how]
    case, there = case_of(mode, recipe, size, ways), carrier == "peer memory"
    found, _ = stepped(case, CARRIERS[carrier](size), 3 if there else 1)
    wanted, _ = stepped(case_of(mode, recipe, size, None))
    assert all(np.isfinite(t).all() for results in wanted for t in results)
    assert same(found, wanted)
    ran = case.spec.parallel.ran  # type: ignore[union-attr]
    plain = set()
    if how == "pipeline" and (recipe in ("block tiled x", "mxfp8", "nvfp4") or (mode, recipe) == ("column", None)):
        plain = {"dgrad" if mode == "column" else "fprop"}  # by the weight's format: see `_no_columns`
    for gemm in ("fprop", "dgrad", "wgrad"):
        way = getattr(ways, gemm)
        assert (gemm in ran) == (way is not None)
        if way is not None:
            assert ran[gemm].startswith(f"{'not ' * (gemm in plain)}overlapped by {way.method}"), ran
            assert ran[gemm].endswith(", through peer memory") == (there and gemm not in plain)


@covering(turns=1, mode=MODES, how=HOW, recipe=[None, "block"], size=[2, 3])
def test_ranks_that_are_late(mode: str, how: str, recipe: str | None, size: int) -> None:
    """One rank's transfers through peer memory sleep at random places; results stay."""
    draws = random.Random(f"{mode} {how} {recipe} {size}")
    late = draws.randrange(size)

    def before(rank: int, name: str) -> None:
        if rank == late and draws.random() < 0.3:
            time.sleep(0.01)

    found, _ = stepped(case_of(mode, recipe, size, WAYS[mode][how]), PeerRanks(size, before=before), 8)
    assert same(found, stepped(case_of(mode, recipe, size, None))[0])


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, True), (False, False, True)])
@pytest.mark.parametrize("mode", ["column", "row"])
@covering(recipe=[None, "delayed", "block"])
def test_what_nobody_needs(mode: str, recipe: str | None, needs: tuple[bool, bool, bool]) -> None:
    """Frozen weights and inputs: nothing travels but for plain products' sake."""
    results = []
    for ways in (WAYS[mode]["ring"], None):
        case = case_of(mode, recipe, 2, ways)
        case.spec = replace(case.spec, needs=Needs(*needs))
        results.append(stepped(case)[0])
    for found, wanted in zip(*results, strict=True):
        for a, b in zip(found, wanted, strict=True):
            assert (a is None) == (b is None) and (a is None or np.array_equal(a, b))


def test_a_sum_is_rounded_once() -> None:
    """In bf16 1 + 2^-8 is 1, so the sum by twos would be 1, and that of all is 1 + 2^-7."""
    tensors = RT.tensor(np.array([1, 2**-8, 2**-8], np.float32).repeat(8).reshape(3, 2, 4), dtypes.bfloat16)
    out = RT.empty((2, 4), dtypes.bfloat16)
    ops.rank_sum(RT, tensors, out=out)
    assert (RT.numpy(out).astype(np.float32) == 1 + 2**-7).all()


# ------------------------------------------------------------------------------------------- layers around


def mlp_spec(precision: Precision | None, size: int, how: str | None) -> Any:
    specs = [
        LinearSpec(
            FP32, precision, Needs(True, True, True), parallel=Split(mode, size, True, None, WAYS[mode].get(how))
        )  # type: ignore[arg-type]
        for mode in ("column", "row")
    ]
    return mlp.MLPSpec(specs[0], specs[1], NormSpec(FP32, "LayerNorm", 1e-5), "gelu")


def layer_inputs(kind: str, rank: int, size: int, turn: int, rows: int) -> tuple[list[Any], list[Any]]:
    """Of a rank: what forward takes, and the gradients of its outputs."""
    width, wide = 256, 128 * size
    x, dy = normal(turn * 10 + rank, rows, width), normal(turn * 10 + 5 + rank, rows, width)
    vectors = [normal(20 + i, width) for i in range(3)]
    w1, b1, w2 = normal(30 + rank, 128, width), normal(40 + rank, 128), normal(50 + rank, width, 128)
    given: list[Any] = [x, *vectors[:2], w1, b1]
    if kind == "mlp":
        given += [w2, vectors[2]]
    else:
        dy = normal(turn * 10 + 5 + rank, rows * size, wide // size)
    return [*(RT.tensor(t) for t in given), RT.tensor([1, 2], dtypes.int64)], [RT.tensor(dy), None, None]


def layer_run(
    ranks: Any, kind: str, how: str | None, recipe: str | None, recorded: bool
) -> tuple[list[Any], list[LinearSpec]]:
    """The results of five steps on all ranks, and the specs of the layer's products."""
    size = ranks.size
    spec = mlp_spec(precision_of(recipe), size, how)
    module: Any = mlp
    if kind != "mlp":
        spec, module = norm_linear.NormLinearSpec(spec.norm, spec.fc1), norm_linear
    comms, layers = [Late(ranks, rank) for rank in range(size)], [Layer(module, spec, recorded) for _ in range(size)]
    found = []
    for turn, rows in enumerate((128, 256, 128, 256, 128)):  # token counts change from step to step

        def step(comm: InProcessCommunicator, turn: int = turn, rows: int = rows) -> list[Any]:
            given, grads = layer_inputs(kind, comm.rank, size, turn, rows)
            return layers[comm.rank].step(comms[comm.rank], given, grads)

        found += [ranks.run(step)]
    return found, [spec.fc1, spec.fc2] if kind == "mlp" else [spec.linear]


@each_carrier
@covering(turns=2, kind=["mlp", "norm and linear"], how=HOW, recipe=[None, "delayed", "block"], size=[2, 3])
def test_layers_interpreted_and_replayed(kind: str, how: str, recipe: str | None, size: int, carrier: str) -> None:
    """Results of plain layers, whether a call is interpreted or replayed, and the same transfers either way."""
    replays, calls = CARRIERS[carrier](size), CARRIERS[carrier](size)
    with tapes("first"):
        wanted, _ = layer_run(InProcessRanks(size), kind, None, recipe, False)
        interpreted, _ = layer_run(calls, kind, how, recipe, False)
        before = COUNTS.replayed
        replayed, linears = layer_run(replays, kind, how, recipe, True)
        assert COUNTS.replayed - before >= 8 * size  # all but the first step, in which ranks have not met
    assert calls.log == replays.log
    assert any(name == "pull" for name, _ in calls.log[0]) == (carrier == "peer memory")
    for found in (interpreted, replayed):
        for a, b in zip(flat(found), flat(wanted), strict=True):
            assert (a is None) == (b is None) and (a is None or np.array_equal(a, b))
    for linear in linears:  # as the last replays noted it
        assert linear.parallel is not None and linear.parallel.ran
        for said in linear.parallel.ran.values():
            assert said.startswith(("overlapped", "not overlapped by pipeline: a plain"))


# ------------------------------------------------------------------------------------------- what travels


def transfers(mode: str, how: str, recipe: str | None, size: int, m: int, peers: bool) -> list[tuple[str, int]]:
    """The issue's table: of one rank, for an operand or a result of m rows a part and 256 columns of float32."""
    width = 256
    plain, one = 4 * m * width, m * width
    bytes_of = {None: [plain], "delayed": [one], "current": [one], "block": [one, 4 * m * (width // 128)]}[recipe]
    pulls = [("pull" if peers else "send_recv", n) for n in bytes_of] * (size - 1)
    pushes = [("push" if peers else "send_recv", plain)] * (size - 1)
    whole = [("reduce_scatter", size * plain)]
    if how == "pipeline":
        pushes = [("push", plain // 2)] * (2 * (size - 1)) if peers else [("reduce_scatter", size * plain // 2)] * 2
    again = [("all_gather", n) for n in bytes_of]  # what wgrad reads of x, or of the gradient's columns
    if mode == "column":
        if peers and how == "bulk":
            again = pulls
        if (how == "bulk" and not peers) or (how == "pipeline" and recipe is None):
            pushes = whole
    else:
        again = [] if recipe != "block" else pulls if peers else again  # by `external`
    return [*pulls, *[("all_reduce", 4)] * (recipe == "current"), *again, *pushes]


@each_carrier
@covering(mode=MODES, how=HOW, recipe=[None, "delayed", "current", "block"], size=[2, 3, 4])
def test_bytes_on_the_wire(mode: str, how: str, recipe: str | None, size: int, carrier: str) -> None:
    if (mode, how) == ("row", "bulk"):
        return  # its sums are not asked to overlap
    _, logs = stepped(case_of(mode, recipe, size, WAYS[mode][how]), CARRIERS[carrier](size))
    wanted = transfers(mode, how, recipe, size, 128, carrier == "peer memory")
    for log in logs:
        assert sorted(log) == sorted(wanted)


# ------------------------------------------------------------------------------------------- why plain


class Looking:
    """An inspector that changes nothing."""

    request = frozenset({("fprop", "activation")})

    def inspect(self, *arguments: Any, **options: Any) -> Any:
        return None


REASONS: list[tuple[str, dict[str, Any], str]] = [
    (
        "nvfp4 rows",
        {"ways": Overlap("fc1", RING, None, None, ROOM)},
        "products of float4_e2m1.* an amax a row are not split",
    ),
    ("mxfp8", {"rows": 64}, "parts of 64 rows, no multiple of 128"),
    ("delayed", {"rows": 40}, "parts of 40 rows, no multiple of 16"),
    ("block tiled x", {"rows": 40}, "the operand travels in high precision"),
    ("delayed", {"ways": replace(WAYS["column"]["ring"], capacity=1000)}, r"65536 elements.*made room for 1000"),
]


@pytest.mark.parametrize(("recipe", "given", "says"), REASONS)
def test_what_runs_plain_says_why(recipe: str, given: dict[str, Any], says: str) -> None:
    ways = given.get("ways", WAYS["column"]["ring"])
    case = case_of("column", recipe, 2, ways, given.get("rows", 128))
    found, log = stepped(case)
    wanted, plain_log = stepped(case_of("column", recipe, 2, None, given.get("rows", 128)))
    assert same(found, wanted) and [sorted(of) for of in log] == [sorted(of) for of in plain_log]
    fprop, _, wgrad = explain_linear(case.spec, RT.device)
    with pytest.raises(AssertionError, match=f"not overlapped by ring_exchange: .*{says}"):
        raise AssertionError(fprop.reason)
    assert "overlapped" not in wgrad.reason


def test_reports_name_the_gemm_and_the_method() -> None:
    case = case_of("row", None, 2, WAYS["row"]["pipeline"])
    stepped(case)
    reasons = [facts.reason for facts in explain_linear(case.spec, RT.device)]
    said = "pipeline, in 2", "ring_exchange, in 2", "external"
    for reason, gemm, how in zip(reasons, ("fprop", "dgrad", "wgrad"), said, strict=True):
        assert f"fc2_{gemm} overlapped by {how}" in reason
    idle = with_ways(case.spec, Overlap("fc2", idle="sequence_parallel is off"))
    assert all(
        f"fc2_{f.gemm} not overlapped: sequence_parallel is off" in f.reason for f in explain_linear(idle, RT.device)
    )


def test_a_strict_call_that_is_too_large() -> None:
    case = case_of("column", "delayed", 2, replace(WAYS["column"]["ring"], capacity=1000))
    assert case.spec.precision is not None
    case.spec = replace(case.spec, precision=replace(case.spec.precision, strict=True))
    with pytest.raises(
        UnsupportedError, match=r"overlap of fc1_fprop: got .*65536.*where a region is strict.*larger shape"
    ):
        stepped(case)


def test_looked_at_steps_run_plain() -> None:
    case = case_of("column", None, 2, WAYS["column"]["ring"])
    case.spec = replace(case.spec, inspect=Looking.request)
    assert case.spec.parallel is not None
    found, _ = stepped(case, inspector=None)
    assert same(found, stepped(case_of("column", None, 2, None))[0])
    assert "somebody looks" in case.spec.parallel.ran["fprop"]
