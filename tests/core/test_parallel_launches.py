"""What a rank of a spread linear launches on a GPU, counted without one: what one GPU does, and what its ranks cost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from te_core.layers import linear
from te_core.layers.linear import LinearSpec
from te_core.layers.overlap import Overlap, Way
from te_core.layers.parallel import Split
from tests.core.fake_cuda import Machine, Make
from tests.core.tape_cases import ALL, BF16, Maker, precision_of

M, N, K, SIZE = 512, 512, 1024, 2


class Done:
    """A collective's handle."""

    def wait(self) -> None:
        """Nothing: nobody computes."""


class Silent:
    """One rank of a group, whose collectives are events of the machine."""

    met, rank, size = True, 0, SIZE

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def all_gather(self, *_: Any) -> Done:
        return self._noted("all_gather")

    def reduce_scatter(self, *_: Any) -> Done:
        return self._noted("reduce_scatter")

    def all_reduce(self, *_: Any, how: str | None = None) -> Done:
        return self._noted("all_reduce")

    def peers(self, rt: Any) -> None:
        return None

    def send_recv(self, *_: Any) -> Done:
        return self._noted("send_recv")

    def _noted(self, name: str) -> Done:
        self.machine.note(name, None, {}, 0)
        return Done()


def launched(machine: Machine, mode: str, split: Split | None, recipe: str | None) -> Counter[str]:
    """The kernels, products and collectives of a forward and a backward."""
    rt, part = machine.runtime(), M // SIZE if split is not None and split.sequence else M
    n, k = (N // SIZE, K) if mode == "column" else (N, K // SIZE)
    x, dy = (part, M) if mode == "column" else (M, part)
    tensor = Maker(rt)
    given, dy = [tensor(*shape) for shape in ((x, k), (n, k), (n,))], tensor(dy, n)
    spec = LinearSpec(BF16, precision_of(recipe), ALL, parallel=split)
    options: Any = {"spec": spec, "scales": tensor.scales(1), "comm": None if split is None else Silent(machine)}
    with machine.noting() as events:
        _, saved = linear.forward(rt, *given, tensor.rng(), **options)
        linear.backward(rt, dy, saved, **options)
    assert not machine.faults
    return Counter(e.what[0] if e.kind == "launch" else e.kind for e in events)


#: What ranks cost, by how x and w are cut: collectives; the bias of a sum is added to it, and not by the product.
COLUMN, ROW = ["all_reduce"], ["all_reduce", "bias_dropout_add"]
COLUMN_CUT = ["all_gather", "all_gather", "reduce_scatter"]
ROW_CUT = ["all_gather", "reduce_scatter", "bias_dropout_add"]
#: Besides, where the ranks agree on a maximum, which is one number before the cast.
AGREED = ["amax_finish", "all_reduce"]
COSTS = {
    **{("column", False, recipe): COLUMN for recipe in (None, "delayed", "current")},
    **{("row", False, recipe): ROW for recipe in (None, "delayed", "current")},
    ("column", True, None): COLUMN_CUT,
    ("column", True, "delayed"): [*COLUMN_CUT, "transpose"],
    ("column", True, "current"): [*COLUMN_CUT, "transpose", *AGREED],
    ("row", True, None): [*ROW_CUT, "column_parts", "column_sum"],  # of a part of dy: no product has it
    ("row", True, "delayed"): [*ROW_CUT, "transpose"],
    # Its column sums come of the pass that finds the maximum, as one GPU's do.
    ("row", True, "current"): [*ROW_CUT, "transpose", *AGREED],
}


@pytest.mark.parametrize(("mode", "sequence", "recipe"), COSTS)
def test_what_ranks_launch(make: Make, mode: str, sequence: bool, recipe: str | None) -> None:
    """Nothing of one GPU's step goes, and nothing comes but what the table has."""
    machine = make()
    alone = launched(machine, mode, None, recipe)
    assert alone["gemm"] == 3
    wanted = alone + Counter(COSTS[mode, sequence, recipe])
    assert launched(machine, mode, Split(mode, SIZE, sequence), recipe) == wanted


RING = Overlap("fc", Way("ring_exchange"), Way("ring_exchange"), None, 1 << 30)
#: The same with fprop and dgrad in two parts. A sum is added by a kernel of ours; of a gradient that wgrad reads, too,
#: the own rows are put among the others'.
ROW_IN_PARTS = ["send_recv", "send_recv", "rank_sum", "bias_dropout_add", "resize"]
IN_PARTS = {
    ("column", None): ["all_gather", "send_recv", "send_recv", "rank_sum"],
    ("column", "delayed"): ["all_gather", "send_recv", "send_recv", "rank_sum", "transpose"],
    ("column", "current"): ["all_gather", "send_recv", "send_recv", "rank_sum", "transpose", *AGREED],
    ("row", None): [*ROW_IN_PARTS, "column_parts", "column_sum"],
    ("row", "delayed"): [*ROW_IN_PARTS, "transpose"],
    ("row", "current"): [*ROW_IN_PARTS, "transpose", *AGREED],
}


@pytest.mark.parametrize(("mode", "recipe"), IN_PARTS)
def test_what_overlapping_ranks_launch(make: Make, mode: str, recipe: str | None) -> None:
    """Two products more, and nothing else but what the table has."""
    machine = make()
    wanted = launched(machine, mode, None, recipe) + Counter([*IN_PARTS[mode, recipe], "gemm", "gemm"])
    assert launched(machine, mode, Split(mode, SIZE, True, overlap=RING), recipe) == wanted
