"""Products that overlap through memory that peers read: the values of plain ones, what travels, and in which order."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

from te_core.layers.communicator import InProcessRanks
from te_core.tape.taped import COUNTS
from tests.core.peer_ranks import PeerRanks
from tests.core.test_overlap import RECIPES, WAYS, Late, case_of, flat, in_tiles, layer_run, poisoned, same
from tests.covering import covering
from tests.recordings import tapes

__all__ = ["in_tiles", "poisoned"]


def stepped(ranks: InProcessRanks, case: Any, steps: int = 1) -> tuple[list[Any], list[list[tuple[str, int]]]]:
    """Each rank's results of the last step, and what each gave to the others in all of them."""
    n, k = (128 * case.size, 256) if case.mode == "column" else (256, 128 * case.size)
    for _ in range(steps):
        found = ranks.run(lambda comm: case.step(Late(ranks, comm.rank), n, k))
    return found, ranks.log


@covering(turns=2, mode=["column", "row"], how=["ring", "pipeline", "bulk"], recipe=RECIPES, size=[2, 3, 4])
def test_values_are_those_of_plain_products(mode: str, how: str, recipe: str | None, size: int) -> None:
    """In three steps, so that rooms are used again."""
    case = case_of(mode, recipe, size, WAYS[mode][how])
    found, _ = stepped(PeerRanks(size), case, 3)
    wanted, _ = stepped(InProcessRanks(size), case_of(mode, recipe, size, None))
    assert same(found, wanted)
    for gemm, ran in case.spec.parallel.ran.items():  # type: ignore[union-attr]
        way = getattr(WAYS[mode][how], gemm)
        assert ran.startswith(f"not overlapped by {way.method}") or ran.endswith(", through peer memory")


@covering(
    turns=2,
    kind=["mlp", "norm and linear"],
    how=["ring", "pipeline", "bulk"],
    recipe=[None, "delayed", "block"],
    size=[2, 3],
)
def test_layers_interpreted_and_replayed(kind: str, how: str, recipe: str | None, size: int) -> None:
    """Results of plain layers, whether a call is interpreted or replayed, and the same transfers either way."""
    replays, calls = PeerRanks(size), PeerRanks(size)
    with tapes("first"):
        wanted, _ = layer_run(InProcessRanks(size), kind, None, recipe, False)
        interpreted, _ = layer_run(calls, kind, how, recipe, False)
        before = COUNTS.replayed
        replayed, _ = layer_run(replays, kind, how, recipe, True)
        assert COUNTS.replayed - before >= 8 * size  # all but the first step, in which ranks have not met
    assert calls.log == replays.log and any(name == "pull" for name, _ in calls.log[0])
    for found in (interpreted, replayed):
        for a, b in zip(flat(found), flat(wanted), strict=True):
            assert (a is None) == (b is None) and (a is None or np.array_equal(a, b))


# ------------------------------------------------------------------------------------------- what travels


def transfers(mode: str, how: str, recipe: str | None, size: int, m: int) -> list[tuple[str, int]]:
    """What one rank hands over, for an operand or a result of m rows a part and 256 columns of float32."""
    width = 256
    plain, one = 4 * m * width, m * width
    bytes_of = {None: [plain], "delayed": [one], "current": [one], "block": [one, 4 * m * (width // 128)]}[recipe]
    pulls = [("pull", n) for n in bytes_of] * (size - 1)
    pushes = [("push", plain)] * (size - 1)
    if how == "pipeline":
        pushes = [("push", plain // 2)] * (2 * (size - 1))
    again: list[tuple[str, int]] = [("all_gather", n) for n in bytes_of]  # what wgrad reads of x, or of columns of dy
    if mode == "column":
        if how == "bulk":
            again = pulls
        if how == "pipeline" and recipe is None:
            pushes = [("reduce_scatter", size * plain)]
    else:
        again = pulls if recipe == "block" else []  # of the gradient's columns, by `external`
    return [*pulls, *[("all_reduce", 4)] * (recipe == "current"), *again, *pushes]


@covering(
    mode=["column", "row"], how=["ring", "pipeline", "bulk"], recipe=[None, "delayed", "current", "block"], size=[2, 3]
)
def test_bytes_on_the_wire(mode: str, how: str, recipe: str | None, size: int) -> None:
    if (mode, how) == ("row", "bulk"):
        return  # its sums are not asked to overlap
    _, logs = stepped(PeerRanks(size), case_of(mode, recipe, size, WAYS[mode][how]))
    wanted = transfers(mode, how, recipe, size, 128)
    for log in logs:
        assert sorted(log) == sorted(wanted)


# ------------------------------------------------------------------------------------------- late ranks


@covering(turns=1, mode=["column", "row"], how=["ring", "pipeline", "bulk"], recipe=[None, "block"], size=[2, 3])
def test_ranks_that_are_late(mode: str, how: str, recipe: str | None, size: int) -> None:
    """One rank's transfers, or its products, sleep at random places; results stay."""
    draws = random.Random(f"{mode} {how} {recipe} {size}")
    late = draws.randrange(size)

    def before(rank: int, name: str) -> None:
        if rank == late and draws.random() < 0.3:
            time.sleep(0.01)

    found, _ = stepped(PeerRanks(size, before=before), case_of(mode, recipe, size, WAYS[mode][how]), 8)
    wanted, _ = stepped(InProcessRanks(size), case_of(mode, recipe, size, None))
    assert same(found, wanted)
