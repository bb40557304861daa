"""Compiled modules at sizes that change: a compiler makes symbols of them, and what runs at trace time gets numbers.

(torch before 2.13 hands a function of constants no symbols; the suite on a GPU runs on such a one.)
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import te_torch as te
from tests import recipes

MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(32, 48, device="cpu"),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 48, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64, device="cpu"),
    "RMSNorm": lambda: te.RMSNorm(32, device="cpu"),
    "MultiheadAttention": lambda: te.MultiheadAttention(32, 2, attention_dropout=0.0, device="cpu"),
    "TransformerLayer": lambda: te.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"),
}
SIZES = (8, 16, 24)
dynamically = pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.full)])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def step(call: Any, tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    for t in tensors:
        t.grad = None
    y = call(*tensors, **options)
    y = y[0] if isinstance(y, tuple) else y
    y.sum().backward()
    return [y.detach(), *[t.grad for t in tensors]]


OFTEN = [("LayerNormLinear", "current", None), ("MultiheadAttention", None, True)]


@pytest.mark.parametrize(
    ("kind", "recipe", "dynamic"),
    [
        pytest.param(*case, marks=[] if case in OFTEN else [pytest.mark.full])
        for case in itertools.product(MODULES, ("current", "delayed", None), (None, True))
    ],
)
def test_modules(kind: str, recipe: str | None, dynamic: bool | None) -> None:
    torch.manual_seed(0)
    module = MODULES[kind]()
    compiled = torch.compile(copy.deepcopy(module), backend="aot_eager", dynamic=dynamic)
    for size in SIZES:
        x = torch.randn(size, 2, 32, requires_grad=True)
        found = []
        for call in (module, compiled):
            with recipes.region(recipe):
                found.append(step(call, [x]))
        assert all(map(torch.equal, *found)), size
    assert not torch._dynamo.utils.counters["graph_break"]


@dynamically
def test_attention(dynamic: bool | None) -> None:
    module = te.DotProductAttention(2, 16, attn_mask_type="causal", softmax_scale=0.2)
    compiled = torch.compile(module, backend="aot_eager", dynamic=dynamic)
    for size in SIZES:
        tensors = [torch.randn(size, 2, 2, 16, requires_grad=True) for _ in range(3)]
        assert all(map(torch.equal, step(compiled, tensors), step(module, tensors)))
    assert not torch._dynamo.utils.counters["graph_break"]


@dynamically
def test_packed_sequences(dynamic: bool | None) -> None:
    """Whose longest lengths are numbers of the call."""
    module = te.DotProductAttention(2, 16, attn_mask_type="padding_causal", qkv_format="thd")
    compiled = torch.compile(module, backend="aot_eager", dynamic=dynamic)
    for size in (6, 7, 9):
        tensors = [torch.randn(2 * size, 2, 16, requires_grad=True) for _ in range(3)]
        cu = torch.tensor([0, size, 2 * size], dtype=torch.int32)
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": size, "max_seqlen_kv": size}
        assert all(map(torch.equal, step(compiled, tensors, **lengths), step(module, tensors, **lengths)))
    assert not torch._dynamo.utils.counters["graph_break"]
