"""Compiled and captured steps: as without debugging where nobody looks, refused where somebody does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import UnsupportedError
from tests import recipes
from tests.backends import requires_cuda
from tests.debug.conftest import config

Debugging = Callable[..., Any]
LOOKS = {"stats": ["max"], "tensors": ["activation"]}


def test_a_compiled_step(debugging: Debugging) -> None:
    session = debugging(config({"layer_types": ["watched"]}, LogTensorStats={**LOOKS, "start_step": 1}))
    torch.compiler.reset()
    other, watched = (te.Linear(32, 32, device="cpu", name=name) for name in ("other", "watched"))
    step = torch.compile(lambda layer, x: layer(x).sum(), backend="aot_eager")
    x = torch.randn(16, 32)
    with recipes.region("current"):
        want = other(x).sum()

    def compiled(layer: torch.nn.Module) -> torch.Tensor:
        with recipes.region("current"):
            return step(layer, x)

    assert torch.equal(compiled(other), want) and compiled(watched).isfinite()
    session.step()
    assert torch.equal(compiled(other), want)
    with pytest.raises(Exception, match=r"torch.compile compiles.*features in eager steps"):
        compiled(watched)


@requires_cuda
def test_a_captured_step(debugging: Debugging) -> None:
    debugging(config({"layer_types": ["watched"]}, LogTensorStats=LOOKS))
    other, watched = (te.Linear(32, 32, device="cuda", name=name) for name in ("other", "watched"))
    x = torch.randn(16, 32, device="cuda")
    for layer in (other, watched):
        layer(x)
    torch.cuda.synchronize()
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = other(x)
        graph.replay()
        assert torch.equal(y, other(x))
        with pytest.raises(UnsupportedError, match="a CUDA graph captures"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            watched(x)
