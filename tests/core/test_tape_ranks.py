"""Recorded layers over ranks: a replay begins and awaits the same collectives, and gives the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from te_core import dtypes
from te_core.errors import LibraryError
from te_core.layers import linear, mlp, norm
from te_core.layers.communicator import InProcessCommunicator, InProcessRanks
from te_core.layers.linear import LinearSpec, Needs
from te_core.layers.parallel import Split
from te_core.runtime import Runtime
from te_core.tape import taped
from te_core.tape.collectives import Awaited, Collective
from te_core.tape.tape import Drop
from te_core.tape.taped import Taped
from tests.core.face import scales
from tests.core.test_parallel import Case, integers, part, precision_of
from tests.covering import covering
from tests.recordings import tapes

RT = Runtime.cpu()
FP32 = dtypes.float32


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    with tapes("first"):
        yield


class Layer:
    """A layer's two functions on one rank, as they are or recorded."""

    def __init__(self, module: Any, spec: Any, recorded: bool) -> None:
        functions = {"forward": module.forward, "backward": module.backward}
        if recorded:
            self.of = {name: Taped(f"{module.__name__} {name}", f, spec) for name, f in functions.items()}
        else:
            self.of = {name: _with(f, spec) for name, f in functions.items()}

    def step(self, comm: InProcessCommunicator, given: list[Any], grads: list[Any]) -> list[Any]:
        """All results of a forward and backward, as arrays."""
        options = {"scales": scales(RT, 2), "comm": comm}
        outputs, saved = self.of["forward"](RT, *given, **options)
        found = self.of["backward"](RT, *grads, saved, **options)
        return [None if t is None else RT.numpy(t) for t in (*outputs, *found)]


def _with(function: Any, spec: Any) -> Any:
    return lambda *arguments, **options: function(*arguments, spec=spec, **options)


def linear_case(mode: str, sequence: bool, recipe: str | None, rows: int) -> Any:
    case = Case(mode, sequence, 2, recipe, rows)
    n, k = 128, 256

    def inputs(rank: int, turn: int) -> tuple[list[Any], list[Any]]:
        w, b = integers(2 + turn, n, k), integers(4 + turn, n)
        x, dy = integers(1 + turn, rows, k), integers(3 + turn, rows, n)
        cut = [part(t, dim, rank, 2) for t, dim in ((x, case.x), (w, case.w), (b, case.b), (dy, case.y))]
        x, w, b, dy = (RT.tensor(t) for t in cut)
        return [x, w, b, RT.tensor([1, 2], dtypes.int64)], [dy]

    return linear, case.spec, inputs


def mlp_case(sequence: bool, recipe: str | None) -> Any:
    precision, needs = precision_of(recipe), Needs(True, True, True)
    specs = [LinearSpec(FP32, precision, needs, parallel=Split(mode, 2, sequence)) for mode in ("column", "row")]
    spec = mlp.MLPSpec(specs[0], specs[1], norm.NormSpec(FP32, "LayerNorm", 1e-5), "relu")

    def inputs(rank: int, turn: int) -> tuple[list[Any], list[Any]]:
        rows = 256 if sequence else 512
        x, dy = (integers(seed + turn + (rank if sequence else 0), rows, 128) for seed in (1, 5))
        w1, b1, w2 = (
            integers(seed + turn + rank, *shape) for seed, shape in ((20, (256, 128)), (30, (256,)), (40, (128, 256)))
        )
        vectors = [integers(seed + turn, 128) for seed in (50, 60, 70)]
        x, g, b, w1, b1, w2, b2 = (RT.tensor(t) for t in (x, *vectors[:2], w1, b1, w2, vectors[2]))
        return [x, g, b, w1, b1, w2, b2, RT.tensor([1, 2], dtypes.int64)], [RT.tensor(dy), None, None]

    return mlp, spec, inputs


CASES = {
    **{
        f"{mode}{' sequence' * sequence} {rows}": (linear_case, mode, sequence, rows)
        for mode in ("column", "row")
        for sequence in (False, True)
        for rows in ((512, 72) if sequence else (512,))
    },
    "mlp": (mlp_case, False),
    "mlp sequence": (mlp_case, True),
}


@covering(name=CASES, recipe=[None, "nvfp4", "delayed", "current e4m3 pow2", "block tiled x", "mxfp8"])
def test_replays_exchange_and_give_the_same(name: str, recipe: str | None) -> None:
    make, *rest = CASES[name]
    module, spec, inputs = make(*rest[:2], recipe, *rest[2:])

    def turns(recorded: bool) -> tuple[list[Any], list[Any]]:
        ranks = InProcessRanks(2)
        layers = [Layer(module, spec, recorded) for _ in range(2)]
        results = []
        comms = [ranks.of(i) for i in range(2)]
        for turn in range(3):  # the ranks meet in the first, which is not recorded
            results.append(ranks.run(lambda comm: layers[comm.rank].step(comms[comm.rank], *inputs(comm.rank, turn))))  # noqa: B023
        return results, ranks.log

    wanted, log = turns(False)
    before = taped.COUNTS.replayed
    found, replayed_log = turns(True)
    assert replayed_log == log
    assert taped.COUNTS.replayed - before == 2 * (3 + 2)  # backwards of the first turn, too: they have met by then
    for a, b in zip(wanted, found, strict=True):
        for of_a, of_b in zip(a, b, strict=True):
            for one, other in zip(of_a, of_b, strict=True):
                assert (one is None) == (other is None)
                assert one is None or np.array_equal(one, other)


@pytest.mark.parametrize(("mode", "gathered"), [("column", {"fprop", "wgrad"}), ("row", {"dgrad", "wgrad"})])
@pytest.mark.parametrize("recipe", ["current e4m3 pow2", "nvfp4"])
def test_a_replay_notes_how_operands_came(mode: str, gathered: set[str], recipe: str) -> None:
    """Reports read it from the spec, where other calls of it may have noted something else since."""
    module, spec, inputs = linear_case(mode, True, recipe, 512)
    ranks, noted = InProcessRanks(2), []
    layers, comms = [Layer(module, spec, True) for _ in range(2)], [ranks.of(i) for i in range(2)]
    for turn in range(3):
        replayed = taped.COUNTS.replayed
        ranks.run(lambda comm: layers[comm.rank].step(comms[comm.rank], *inputs(comm.rank, turn)))  # noqa: B023
        noted.append(dict(spec.parallel.came))
        spec.parallel.came.update(dict.fromkeys(gathered, "something else"))
    assert taped.COUNTS.replayed - replayed == 4
    assert set(noted[0]) == gathered and noted == noted[:1] * 3


def test_memory_of_a_collective_stays_until_it_is_awaited() -> None:
    """Nothing that is on its way is let go of, and no temporary takes its place."""
    module, spec, inputs = linear_case("column", True, "current e4m3 pow2", 512)
    ranks = InProcessRanks(2)
    layers = [Layer(module, spec, True) for _ in range(2)]
    comms = [ranks.of(i) for i in range(2)]
    for turn in range(2):
        ranks.run(lambda comm: layers[comm.rank].step(comms[comm.rank], *inputs(comm.rank, turn)))  # noqa: B023
    exchanging = [tape for tape in taped.tapes() if any(isinstance(step, Collective) for step in tape.steps)]
    assert exchanging
    for tape in exchanging:
        on_the_way: dict[int, set[int]] = {}
        for step in tape.steps:
            if isinstance(step, Collective):
                on_the_way[step.handle] = {patch.slot for patch in step.patches}
            elif isinstance(step, Awaited):
                del on_the_way[step.handle]
            elif isinstance(step, Drop):
                assert not any(step.slot in slots for slots in on_the_way.values())
        assert not on_the_way  # each is awaited


def test_a_rank_that_fails_ends_a_replay_of_the_others() -> None:
    """As it ends the layer itself."""
    module, spec, inputs = linear_case("row", False, None, 512)
    ranks = InProcessRanks(2)
    layers = [Layer(module, spec, True) for _ in range(2)]
    comms = [ranks.of(i) for i in range(2)]
    for turn in range(2):
        ranks.run(lambda comm: layers[comm.rank].step(comms[comm.rank], *inputs(comm.rank, turn)))  # noqa: B023
    seen: list[BaseException] = []

    def step(comm: InProcessCommunicator) -> None:
        if comm.rank == 1:
            raise RuntimeError("rank 1 is gone")
        try:
            layers[0].step(comms[0], *inputs(0, 2))
        except LibraryError as error:
            seen.append(error)
            raise

    with pytest.raises((RuntimeError, LibraryError)):
        ranks.run(step)
    assert len(seen) == 1
