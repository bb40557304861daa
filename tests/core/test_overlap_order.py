"""What travels beside which part of a product that overlaps, part by part."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from te_core.layers.communicator import InProcessCommunicator, InProcessRanks
from te_core.ops import raw as ops
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.core.test_overlap import WAYS, case_of

noted = threading.local()  # of each rank: `events`, its number, and that of the ranks


class Handle:
    """A transfer's, which notes that it is waited for."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name, self.handle = name, handle
        noted.events.append(f"+{name}")

    def wait(self) -> None:
        noted.events.append(f"-{self.name}")
        self.handle.wait()


class Noting(InProcessCommunicator):
    """Notes transfers: from how many ranks further on something comes; sums by number."""

    sums = 0

    def send_recv(self, rt: Runtime, t: Tensor, to: int, out: Tensor, source: int) -> Any:
        return Handle(f"from{(source - self.rank) % self.size}", super().send_recv(rt, t, to, out, source))

    def all_gather(self, rt: Runtime, part: Tensor, out: Tensor) -> Any:
        return Handle("gather", super().all_gather(rt, part, out))

    def reduce_scatter(self, rt: Runtime, whole: Tensor, out: Tensor) -> Any:
        self.sums += 1
        return Handle(f"scatter{self.sums}", super().reduce_scatter(rt, whole, out))


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are noted with the rank whose rows they make, counted from this one; sums are noted, too."""

    def watch(name: str, first: str, second: str) -> None:
        function = getattr(ops, name)

        def noting(rt: Runtime, a: Any, b: Any, *rest: Any, **options: Any) -> Any:
            columns = options[first], options[second] if second == "b_columnwise" else not options[second]
            kind = {(False, False): "fprop", (False, True): "dgrad", (True, True): "wgrad"}[columns]
            out = rest[0] if rest else options["out"]
            part = ""
            if kind != "wgrad" and out.shape[0] == noted.rows and out.owner is not None:
                place = (out.ptr - out.owner.ctypes.data) // out.nbytes
                part = str((place - noted.rank) % noted.size)
            noted.events.append(f"{kind}{part}")
            return function(rt, a, b, *rest, **options)

        monkeypatch.setattr(ops, name, noting)

    watch("gemm", "trans_a", "trans_b")
    watch("gemm_quantized", "a_columnwise", "b_columnwise")
    added = ops.context_sum

    def adding(rt: Runtime, a: Tensor, b: Tensor | None, *, out: Tensor) -> None:
        noted.events.append("add" if b is not None else "place")
        added(rt, a, b, out=out)

    monkeypatch.setattr(ops, "context_sum", adding)


def events(mode: str, how: str, recipe: str | None, size: int, rows: int = 128) -> str:
    """What a rank does; every rank does the same."""
    ranks, case = InProcessRanks(size), case_of(mode, recipe, size, WAYS[mode][how], rows)
    n, k = (128 * size, 256) if mode == "column" else (256, 128 * size)

    def run(comm: InProcessCommunicator) -> str:
        noted.events, noted.rank, noted.size, noted.rows = [], comm.rank, size, rows
        case.step(Noting(ranks, comm.rank), n, k)
        return " ".join(noted.events)

    first, *others = ranks.run(run)
    assert all(other == first for other in others)
    return first  # type: ignore[no-any-return]


#: fprop, then dgrad and wgrad; three ranks.
GATHER = "+from1 +from2 {0}0 -from1 {0}1 -from2 {0}2"
PUSH = "{0}2 +from1 {0}1 +from2 {0}0"  # (what comes while rows go two ranks further is from one rank further)
SUM = "-from1 -from2 add add"
ORDERS = {
    ("column", "ring"): f"{GATHER.format('fprop')} +gather {PUSH.format('dgrad')} -gather wgrad {SUM}",
    ("column", "bulk"): f"{GATHER.format('fprop')} +gather dgrad +scatter1 -gather wgrad -scatter1",
    ("row", "ring"): f"{PUSH.format('fprop')} {SUM} {GATHER.format('dgrad')} wgrad",
    ("row", "pipeline"): "fprop +scatter1 fprop +scatter2 -scatter1 place -scatter2 place "
    f"{GATHER.format('dgrad')} wgrad",
}


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize(("mode", "how"), ORDERS)
def test_what_travels_beside_a_part(mode: str, how: str, recipe: str | None, interpreted: None) -> None:
    assert events(mode, how, recipe, 3) == ORDERS[mode, how]


def test_the_columns_of_a_gradient_travel_behind_its_rows(interpreted: None) -> None:
    """1x128 blocks have two copies: dgrad's rows come first, wgrad's columns beside dgrad."""
    backward = "+from1 +from1 +gather +gather dgrad0 -from1 -from1 dgrad1 -gather -gather wgrad"
    assert events("row", "ring", "block", 2) == f"fprop1 +from1 fprop0 -from1 add {backward}"
