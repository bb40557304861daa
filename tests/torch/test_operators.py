"""The operators that compilers see: what they return has the shapes that the compiler was told, whatever its size.

The calls are those that compiled modules really make; `torch.library.opcheck` then tries each of them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.tensor import Tensor
from te_torch import operators
from te_torch.runtime import TorchAllocator
from tests import recipes
from tests.backends import devices
from tests.world import differences, fp8_state

#: Both sides of te_core.quantized.ONE_BLOCK, up to which copies share a block: bytes of a copy of the input.
ROWS = {"small": 24, "large": 528}
WIDTH = 160
BF16 = {"params_dtype": torch.bfloat16}

MODULES: dict[str, Any] = {
    "Linear": lambda **kw: te.Linear(WIDTH, 192, **BF16, **kw),
    "Linear, no bias": lambda **kw: te.Linear(WIDTH, 192, bias=False, **BF16, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(WIDTH, 192, return_layernorm_output=True, **BF16, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(WIDTH, 192, activation="swiglu", **BF16, **kw),
    "LayerNormMLP, recomputed": lambda **kw: te.LayerNormMLP(WIDTH, 192, checkpoint=True, **BF16, **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(
        WIDTH, 192, 5, normalization="RMSNorm", hidden_dropout=0.1, attention_dropout=0.0, **BF16, **kw
    ),
}
QUICK = ("Linear", "LayerNormLinear", "LayerNormMLP")
KINDS = (None, *recipes.KINDS)
EVERY = (None, *recipes.RECIPES, *recipes.OVERRIDES)


@contextmanager
def noted(device: str) -> Iterator[dict[tuple[Any, ...], Any]]:
    """The arguments of the operators' calls inside, one of each kind."""
    calls: dict[tuple[Any, ...], Any] = {}

    def note(name: str, implementation: Any) -> Any:
        def run(*args: Any) -> Any:
            shapes = tuple(str([t is not None and tuple(t.shape) for t in a]) for a in args if isinstance(a, list))
            key = next(a for a in args if isinstance(a, str))
            copied = [[t if t is None else t.detach().clone() for t in a] if isinstance(a, list) else a for a in args]
            calls.setdefault((name, key, shapes), copied)
            return implementation(*args)

        return run

    with torch.library._scoped_library("te_runtime", "IMPL") as library:
        for name, implementation in (("forward", operators._forward_op), ("backward", operators._backward_op)):
            library.impl(name, note(name, implementation), device.upper())
        yield calls


def calls_of(kind: str, recipe: str | None, rows: int, device: str) -> dict[tuple[Any, ...], Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = MODULES[kind](device=device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(rows, 1, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    with noted(device) as calls:
        with recipes.region(recipe):
            y = compiled(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
    assert {name for name, *_ in calls} == {"forward", "backward"} and x.grad is not None
    return calls


def check(calls: dict[tuple[Any, ...], Any], tests: tuple[str, ...]) -> None:
    for (name, key, shapes), args in calls.items():
        operator = getattr(torch.ops.te_runtime, name).default
        if any(isinstance(a, torch.Tensor) and a.dtype == torch.float32 for a in args):
            args = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        found = torch.library.opcheck(operator, tuple(args), test_utils=tests, raise_exception=False)
        assert all(result == "SUCCESS" for result in found.values()), (name, key, shapes, found)


def tiers() -> list[Any]:
    """(module, recipe, size): each recipe once, and once more in a module that is slower to compile; all in full."""
    slow = [kind for kind in MODULES if kind not in QUICK]
    often = {(QUICK[i % 3], recipe, ("large", "small")[i % 2]) for i, recipe in enumerate(KINDS)}
    seldom = {(slow[i % 3], recipe, ("small", "large")[i // 2]) for i, recipe in enumerate(KINDS[::2])}
    return [
        pytest.param(*case, marks=[] if case in often else [pytest.mark.more if case in seldom else pytest.mark.full])
        for case in itertools.product(MODULES, KINDS, ROWS)
    ]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("kind", "recipe", "size"), tiers())
def test_operators(kind: str, recipe: str | None, size: str, device: str) -> None:
    check(calls_of(kind, recipe, ROWS[size], device), ("test_schema", "test_faketensor"))


@pytest.mark.full
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("size", ROWS)
@pytest.mark.parametrize("recipe", [r for r in EVERY if r not in KINDS])
def test_operators_of_every_recipe(recipe: str, size: str, device: str) -> None:
    for kind in ("Linear", "LayerNormMLP"):
        check(calls_of(kind, recipe, ROWS[size], device), ("test_schema", "test_faketensor"))


@pytest.mark.more
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    "recipe", [pytest.param(k, marks=[] if k in ("delayed", "nvfp4") else [pytest.mark.full]) for k in KINDS]
)
def test_operators_under_symbolic_sizes(recipe: str | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """(Results are compared whole, also the bytes between a block's parts, which nobody writes.)"""
    empty = TorchAllocator.empty

    def zeros(self: TorchAllocator, shape: Any, dtype: Any, stream: int) -> Tensor:
        made = empty(self, shape, dtype, stream)
        made.owner.view(torch.uint8).zero_()
        return made

    maker = TorchAllocator._maker

    def zeros_of_replays(self: TorchAllocator, take: Any, quick: Any) -> Callable[[], torch.Tensor]:
        make = maker(self, take, quick)

        def made() -> torch.Tensor:
            t = make()
            t.view(torch.uint8).zero_()
            return t

        return made

    monkeypatch.setattr(TorchAllocator, "empty", zeros)
    monkeypatch.setattr(TorchAllocator, "_maker", zeros_of_replays)
    for kind in ("Linear", "LayerNormMLP"):
        for rows in ROWS.values():
            check(calls_of(kind, recipe, rows, device), ("test_aot_dispatch_dynamic",))


# ------------------------------------------------------------------------------------- the default backend, training


@pytest.mark.more
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("kind", "recipe", "size"),
    [
        pytest.param(*case, marks=[pytest.mark.full] * (i % 13 > 0))
        for i, case in enumerate((k, r, s) for k in MODULES for r in KINDS for s in ROWS)
    ],
)
def test_the_default_backend_trains(kind: str, recipe: str | None, size: str, device: str) -> None:
    """Two steps of torch.compile as users write it. It fuses what lies between products, and rounds less often there,
    so a whole layer is only near the eager one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = MODULES[kind](device=device)
    if hasattr(eager, "hidden_dropout"):
        eager.hidden_dropout = 0.0  # a compiler draws other masks
    owner = copy.deepcopy(eager)
    compiled = torch.compile(owner)
    for number in range(2):
        results, states = [], []
        for module, named in ((eager, eager), (compiled, owner)):
            x = torch.randn(ROWS[size], 1, WIDTH, generator=torch.Generator().manual_seed(number))
            x = x.to(device, torch.bfloat16).requires_grad_()
            torch.manual_seed(number)
            with recipes.region(recipe):
                y = module(x)
            y = y[0] if isinstance(y, tuple) else y
            y.backward(torch.ones_like(y))
            results.append({"y": y.detach(), "dx": x.grad} | {n: p.grad for n, p in named.named_parameters()})
            states.append(fp8_state(named))
            for p in named.parameters():
                p.grad = None
        for name, want in results[0].items():
            got = results[1][name]
            if name.endswith("key_bias"):  # zero but for roundings: softmax does not see it
                continue
            if kind == "TransformerLayer" or recipe == "nvfp4":  # which draws
                noise = (got.float() - want.float()).norm() / want.float().norm()
                assert noise < (0.5 if recipe == "nvfp4" else 0.1), (number, name, noise)
            else:
                assert torch.equal(got, want), (number, name)
        assert kind == "TransformerLayer" or not differences(*states), number
