"""Both players of recorded calls (TE_CORE_PLAYER) give the same bits from the same memory: layers in all recipes,
in CUDA graphs, on several streams, from four threads. What they launch is compared in tests/core/test_native.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import te_torch as te
from te_core import c_library
from te_core.tape import native, taped
from tests.backends import requires_cuda
from tests.core.c_library import built
from tests.covering import covering
from tests.recipes import KINDS, RECIPES, region
from tests.recordings import tapes
from tests.threads import together
from tests.world import HIDDEN, ROWS, TAPED, bits, drawn, made, training

pytestmark = requires_cuda


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library at hand, or one that is built now; and attention that gives the same bits twice."""
    if c_library.found() is None:
        monkeypatch.setenv("TE_CORE_LIBRARY", str(built() / "libte_core.so"))
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def peak(program: Callable[[], Any]) -> int:
    """The most bytes that a run holds, above what is held before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    program()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def alike(monkeypatch: pytest.MonkeyPatch, program: Callable[[], Any]) -> None:
    """The program gives the same bits by both players, all its calls are replayed, and it holds as much memory."""
    found, peaks = [], []
    for player, kind in (("python", "Bound"), ("c", "Played")):
        monkeypatch.setenv("TE_CORE_PLAYER", player)
        with tapes("first") as ran:
            torch.manual_seed(0)
            found.append(bits(program()))
            peaks.append(peak(program))
            bound = {type(each).__name__ for tape in taped.tapes() for each in tape._bound.values()}
        assert ran.replayed and bound == {kind}, (ran, bound)
    assert found[0].keys() == found[1].keys()
    other = [name for name in found[0] if found[0][name] != found[1][name]]
    assert not other, other
    assert peaks[0] == peaks[1], peaks


@covering(turns=2, name=TAPED, recipe=[None, *KINDS])
def test_training(monkeypatch: pytest.MonkeyPatch, name: str, recipe: str | None) -> None:
    alike(monkeypatch, lambda: training(made(name, "cuda"), recipe))


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_in_cuda_graphs(monkeypatch: pytest.MonkeyPatch, recipe: str | None) -> None:
    """What is captured is replayed by the driver: other inputs, the same places."""

    def program() -> list[Any]:
        module = made("LayerNormMLP gated", "cuda", params_dtype=torch.bfloat16)
        sample = drawn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
        graphed: Any = te.make_graphed_callables(
            module, (sample,), enabled=recipe is not None, recipe=RECIPES.get(recipe or "")
        )
        found = []
        for _ in range(3):
            x = drawn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
            with region(recipe):
                y = graphed(x)
            y.backward(torch.ones_like(y))
            found.append([y.detach().clone(), x.grad, *[p.grad.clone() for p in module.parameters()]])
        return found

    alike(monkeypatch, program)


def steps(module: Any, x: torch.Tensor, stream: Any, recipe: str) -> list[torch.Tensor]:
    """Some steps on a stream."""
    found = []
    with torch.cuda.stream(stream):
        for _ in range(5):
            inp = x.detach().requires_grad_()
            with region(recipe):
                y = module(inp)
            y.backward(torch.ones_like(y))
            found += [y.detach(), inp.grad]
    return found


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("at_once", [False, True])
def test_on_several_streams(monkeypatch: pytest.MonkeyPatch, count: int, at_once: bool) -> None:
    """A module on each, by turns or from a thread for each: one tape serves all."""

    def program() -> list[Any]:
        modules = [made("LayerNormMLP", "cuda", params_dtype=torch.bfloat16) for _ in range(count)]
        inputs = [drawn(64, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        streams = [torch.cuda.Stream() for _ in range(count)]
        torch.cuda.synchronize()
        work = [partial(steps, *each, "current") for each in zip(modules, inputs, streams, strict=True)]
        found = together(*work) if at_once else [one() for one in work]
        torch.cuda.synchronize()
        return found

    if not at_once:
        alike(monkeypatch, program)
        return
    found = []
    for player in ("python", "c"):  # what threads hold at once differs from run to run
        monkeypatch.setenv("TE_CORE_PLAYER", player)
        with tapes("first"):
            torch.manual_seed(0)
            found.append(bits(program()))
            executors = {number for tape in taped.tapes() for number in tape._bound}
            assert len(executors) > 1 or count == 1, executors
    assert found[0] == found[1]


def test_an_error_leaves_the_device_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts that do not fit are refused by cuBLASLt, in words; the next call goes well."""
    monkeypatch.setenv("TE_CORE_PLAYER", "c")
    module, x = made("Linear", "cuda", params_dtype=torch.bfloat16), drawn(ROWS, HIDDEN, device="cuda").bfloat16()
    with tapes("first"), torch.no_grad():
        wanted = module(x)
        (tape,) = taped.tapes()
        (bound,) = tape._bound.values()
        stretch = next(each for each in bound._steps.values() if isinstance(each, native.Stretch))
        product: Any = stretch._kept[1]
        first, product.first = product.first, product.out
        with pytest.raises(Exception, match="cuBLASLt status"):
            module(x)
        product.first = first
        assert torch.equal(module(x), wanted)
