"""What a linear over ranks does, and in which order: what travels beside which product."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from te_core.layers.communicator import InProcessCommunicator, InProcessRanks
from te_core.ops import raw as ops
from te_core.runtime import Runtime
from tests.core.test_parallel import Case, norm_step

M, N, K, SIZE = 256, 64, 256, 2  # no two operands of a rank have one shape
BLOCKED = ("block", "mxfp8", "nvfp4")  # their copies travel one by one, each as data and scales
noted = threading.local()  # of each rank: `events`, and the names of `shapes`
_PRODUCTS = ("fprop", "dgrad", "wgrad")

both_modes = pytest.mark.parametrize("mode", ["column", "row"])
cut_or_whole = pytest.mark.parametrize("sequence", [False, True])


def _note(event: str) -> None:
    noted.events.append(event)


class Handle:
    """A collective's, which notes that it is waited for."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name, self.handle = name, handle
        _note(f"+{name}")

    def wait(self) -> None:
        _note(f"-{self.name}")
        self.handle.wait()


class Noting(InProcessCommunicator):
    """Notes when a collective is begun ("+") and when somebody waits for it ("-")."""

    sent = 0

    def all_gather(self, rt: Runtime, part: Any, out: Any) -> Any:
        self.sent += 1
        return Handle(f"gather{self.sent}", super().all_gather(rt, part, out))

    def reduce_scatter(self, rt: Runtime, whole: Any, out: Any) -> Any:
        return Handle("scatter", super().reduce_scatter(rt, whole, out))

    def all_reduce(self, rt: Runtime, t: Any, operation: str = "sum", how: str | None = None) -> Any:
        return Handle(operation, super().all_reduce(rt, t, operation, how))


def _product(columns: Any, transposed: Any) -> str:
    return "wgrad" if columns else "dgrad" if transposed else "fprop"


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations are noted: products by what they are, the others with what they read."""

    def watch(name: str, told: Any) -> None:
        function = getattr(ops, name)

        def noting(rt: Runtime, *args: Any, **options: Any) -> Any:
            _note(told(*args, **options))
            return function(rt, *args, **options)

        monkeypatch.setattr(ops, name, noting)

    def cast_of(x: Any, cast: Any, **_: Any) -> str:
        return f"cast {noted.shapes[x.shape]}{' by rows' * cast.rowwise}{' by columns' * cast.columnwise}"

    watch("gemm", lambda *_, trans_a, trans_b, **__: _product(trans_a, not trans_b))
    watch("gemm_quantized", lambda *_, a_columnwise, b_columnwise, **__: _product(a_columnwise, b_columnwise))
    watch("quantize", cast_of)


def shapes(mode: str, sequence: bool) -> dict[tuple[int, ...], str]:
    """The names of what one rank has. (A part of y has the shape of that of its gradient.)"""
    n, k = (N // SIZE, K) if mode == "column" else (N, K // SIZE)
    rows = M // SIZE if sequence else M
    x, dy = (rows, M) if mode == "column" else (M, rows)
    return {(M, k): "whole x", (M, n): "whole dy", (x, k): "x", (n, k): "w", (dy, n): "dy"}


def events_of(mode: str, sequence: bool, recipe: str | None) -> list[str]:
    """What a rank does in a forward and a backward; every rank does the same."""
    ranks, case = InProcessRanks(SIZE), Case(mode, sequence, SIZE, recipe, M)

    def run(comm: InProcessCommunicator) -> list[str]:
        noted.events, noted.shapes = [], shapes(mode, sequence)
        case.step(Noting(ranks, comm.rank), N, K)
        events: list[str] = noted.events
        return events

    first, *others = ranks.run(run)
    assert all(other == first for other in others)
    return first


def travelling(events: list[str]) -> str:
    """Products, and what travels around them. (Ranks agree on a maximum before anything else.)"""
    return " ".join(e for e in events if e in _PRODUCTS or (e[0] in "+-" and "max" not in e))


def order(mode: str, sequence: bool, blocked: bool) -> str:
    """Of products and collectives: what wgrad reads travels while dgrad is computed, and dgrad's sum while wgrad is."""
    if not sequence:
        return "fprop dgrad +sum wgrad -sum" if mode == "column" else "fprop +sum -sum dgrad wgrad"
    if mode == "row":  # dgrad waits for the gradient's rows, which wgrad reads too, or its columns are on their way
        own = "+gather1 -gather1 dgrad wgrad"
        if blocked:
            own = "+gather1 +gather2 +gather3 +gather4 -gather3 -gather4 dgrad -gather1 -gather2 wgrad"
        return f"fprop +scatter -scatter {own}"
    if blocked:
        again = "+gather3 +gather4 dgrad +scatter -gather3 -gather4 wgrad -scatter"
        return f"+gather1 +gather2 -gather1 -gather2 fprop {again}"
    return "+gather1 -gather1 fprop +gather2 dgrad +scatter -gather2 wgrad -scatter"


@pytest.mark.parametrize("recipe", [None, "delayed", "current", *BLOCKED])
@cut_or_whole
@both_modes
def test_what_travels_beside_a_product(mode: str, sequence: bool, recipe: str | None) -> None:
    events = events_of(mode, sequence, recipe)
    assert travelling(events) == order(mode, sequence, recipe in BLOCKED)
    if recipe is not None and (mode, sequence) == ("column", True):  # x travels while the weight is quantized
        assert events.index("+gather1") < events.index("cast w by rows by columns") < events.index("-gather1")


BEHIND_A_NORM = {
    "norm and linear": order("column", True, False),
    "mlp": "+gather1 -gather1 fprop fprop +scatter -scatter +gather2 -gather2 dgrad wgrad "
    "+gather3 dgrad +scatter -gather3 wgrad -scatter",
}


@pytest.mark.parametrize("kind", BEHIND_A_NORM)
def test_behind_a_norm(kind: str) -> None:
    """The same of a column-parallel product, and of a row-parallel one behind it."""
    ranks = InProcessRanks(SIZE)

    def run(comm: InProcessCommunicator) -> str:
        noted.events, noted.shapes = [], {}
        norm_step(kind, False, Noting(ranks, comm.rank), M // SIZE, K)
        return travelling(noted.events)

    assert ranks.run(run) == [BEHIND_A_NORM[kind]] * SIZE
