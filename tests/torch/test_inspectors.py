"""Inspectors: who looks on at a module's products sees every point once, changes nothing, and may put in an operand."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import te_torch as te
from te_core import dtypes, ops
from te_core.errors import ArgumentError
from te_core.layers.inspector import POINTS
from te_core.ops.quantize import dense_columns
from te_core.quantized import Cast, Format, QuantizedTensor
from te_core.recipe import CustomRecipe
from te_core.runtime import Runtime
from te_torch.custom_recipes import quantizer_factories as factories
from te_torch.tensors import HybridQuantizer, IdentityQuantizer
from tests import recipes
from tests.backends import on_devices
from tests.covering import covering
from tests.world import differences, step, values

WIDTH, WIDE, ROWS = 48, 80, 40
BF16: dict[str, Any] = {"params_dtype": torch.bfloat16}
SPLITS = [16, 0, 24]


MODULES: dict[str, Any] = {
    "Linear": lambda **kw: te.Linear(WIDTH, WIDE, **BF16, **kw),
    "Linear, no bias": lambda **kw: te.Linear(WIDTH, WIDE, bias=False, **BF16, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(WIDTH, WIDE, return_layernorm_output=True, **BF16, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(WIDTH, WIDE, activation="swiglu", **BF16, **kw),
    "LayerNormMLP, recomputed": lambda **kw: te.LayerNormMLP(WIDTH, WIDE, checkpoint=True, **BF16, **kw),
    "GroupedLinear": lambda **kw: te.GroupedLinear(len(SPLITS), WIDTH, WIDE, **BF16, **kw),
}
RESULTS = {("fprop", "output"), ("dgrad", "dgrad"), ("wgrad", "wgrad")}
#: Which role of a recipe an operand has, and whether its GEMM reads it along its rows.
OPERANDS = {
    ("fprop", "activation"): ("input", True),
    ("fprop", "weight"): ("weight", True),
    ("dgrad", "gradient"): ("grad_output", True),
    ("dgrad", "weight"): ("weight", False),
    ("wgrad", "activation"): ("input", False),
    ("wgrad", "gradient"): ("grad_output", False),
}


class Recorder:
    """Writes down every point."""

    def __init__(self) -> None:
        self.request = POINTS
        self.seen: Counter[tuple[str, str]] = Counter()
        self.quantized: set[tuple[str, str]] = set()

    def inspect(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any, out: Any) -> None:
        assert value.dtype is dtypes.bfloat16
        self.seen[gemm, tensor] += 1
        if isinstance(out, QuantizedTensor):
            self.quantized.add((gemm, tensor))


class Unquantize:
    """Gives operands back in bf16."""

    def __init__(self, *points: tuple[str, str]) -> None:
        self.request = frozenset(points)

    def inspect(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any, out: Any) -> Any:
        return value


class Doubles:
    """Puts twice the result in the place of a result."""

    def __init__(self, *points: tuple[str, str]) -> None:
        self.request = frozenset(points)

    def inspect(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any, out: Any) -> Any:
        return ops.add(rt, value, value)


def make(kind: str, device: str) -> torch.nn.Module:
    torch.manual_seed(3)
    return MODULES[kind](device=device)


def stepped(module: Any, region: Any, device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Outputs and gradients."""
    x = values(ROWS, WIDTH, device=device, dtype=torch.bfloat16, seed=seed)
    return step(module, x, region, *([SPLITS] if isinstance(module, te.GroupedLinear) else []))


def products(module: Any) -> list[int]:
    """The numbers of a module's products that run."""
    return [i for i, n in enumerate(SPLITS) if n] if isinstance(module, te.GroupedLinear) else list(range(module.gemms))


@on_devices
@covering(kind=MODULES, recipe=[None, *recipes.KINDS, *recipes.OVERRIDES])
def test_all_points_are_seen_once_and_nothing_changes(kind: str, recipe: str | None, device: str) -> None:
    plain = make(kind, device)
    watched = copy.deepcopy(plain)
    watched.inspector = recorders = [Recorder() for _ in range(watched.gemms)]
    for i in range(2):
        torch.manual_seed(i)
        want = stepped(plain, recipes.region(recipe), device, i)
        torch.manual_seed(i)
        assert not differences(stepped(watched, recipes.region(recipe), device, i), want)
    for number in products(watched):
        assert recorders[number].seen == dict.fromkeys(POINTS, 2)
        quantized = {p for p in recorders[number].quantized if p[1] == "gradient" or p[0] == "fprop"}
        low = {p for p in OPERANDS if p[1] == "gradient" or p[0] == "fprop"} if recipe else set()
        assert quantized == {p for p in low if p[0] == "fprop" or recipe in recipes.KINDS}


FACTORIES = {
    "current": factories.current_scaling_factory,
    "block": factories.float8_block_scaling_factory,
    "mxfp8": factories.mxfp8_factory,
}


def high_at(base: Any, name: str, point: tuple[str, str]) -> Any:
    """The factory `base`, but for one operand of one GEMM of the product of this name, which stays in bf16."""
    tensor, rows = OPERANDS[point]

    def factory(role: Any) -> Any:
        found = base(role)
        if role.name != name or role.tensor_type != tensor:
            return found
        high = IdentityQuantizer()
        row, column = (high, found) if rows else (found, high)
        return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)

    return factory


# In this order LayerNormMLP's gradient of wgrad meets current scaling, which casts it by a rule for both products.
POINTS_BY_NAME = {
    "-".join(point): point
    for point in [
        ("fprop", "activation"),
        ("fprop", "weight"),
        ("dgrad", "gradient"),
        ("wgrad", "gradient"),
        ("wgrad", "activation"),
        ("dgrad", "weight"),
    ]
}


@on_devices
@covering(turns=2, kind=[k for k in MODULES if "recomputed" not in k], named=POINTS_BY_NAME, recipe=FACTORIES)
def test_one_operand_in_high_precision(kind: str, named: str, recipe: str, device: str) -> None:
    """Put in by an inspector it is what it is under a recipe that leaves it so, in each product by itself."""
    base, point = FACTORIES[recipe], POINTS_BY_NAME[named]
    for number in products(make(kind, device)):
        watched, asked = make(kind, device), make(kind, device)
        inspectors: list[Any] = [None] * watched.gemms
        inspectors[number] = Unquantize(point)
        watched.inspector = inspectors
        name = asked.quantizer_roles(number)[0].name
        own, all_low = (
            functools.partial(te.autocast, recipe=CustomRecipe(qfactory=factory), emulate=True)
            for factory in (high_at(base, name, point), base)
        )
        found = stepped(watched, all_low(), device)
        assert not differences(found, stepped(asked, own(), device))
        assert differences(found, stepped(make(kind, device), all_low(), device)), "the operand counts"


@on_devices
@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.parametrize("point", sorted(RESULTS), ids="-".join)
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_a_result_in_anothers_place(kind: str, point: tuple[str, str], recipe: str | None, device: str) -> None:
    watched = make(kind, device)
    want = stepped(watched, recipes.region(recipe), device)
    watched.inspector = Doubles(point)
    found = stepped(watched, recipes.region(recipe), device)
    changed = {"fprop": {"y"}, "dgrad": {"dx"}, "wgrad": {n for n, p in watched.named_parameters() if p.ndim == 2}}
    names = {n for n in changed[point[0]] if want[n].any()}
    assert set(differences(found, want)) == names
    assert all(torch.equal(found[n], 2 * want[n]) for n in names)


def test_the_copy_that_its_gemm_reads(rt: Runtime) -> None:
    """Of an operand that meets one put in by an inspector."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((32, 64)) * 10 ** rng.uniform(-3, 3, (32, 64))).astype(np.float32)
    q = ops.quantize(rt, rt.tensor(values), Cast(Format(dtypes.float8_e4m3, "mxfp8"), rowwise=True, columnwise=True))
    rows, columns = (rt.numpy(dense_columns(rt, q, dtypes.float32, side)) for side in (False, True))
    assert np.array_equal(rows, rt.numpy(ops.dequantize(rt, q, dtypes.float32, columnwise=False)))
    assert np.array_equal(columns, rt.numpy(ops.dequantize(rt, q, dtypes.float32, columnwise=True)))
    assert not np.array_equal(rows, columns)


def test_one_for_all_products_or_one_for_each() -> None:
    module = make("LayerNormMLP", "cpu")
    module.inspector = recorder = Recorder()
    stepped(module, recipes.region("current"), "cpu")
    assert recorder.seen == dict.fromkeys(POINTS, 2)  # of two products
    module.inspector = (None, recorder)
    stepped(module, recipes.region("current"), "cpu")
    assert recorder.seen == dict.fromkeys(POINTS, 3)
    module.inspector = [recorder]
    with pytest.raises(ArgumentError, match=r"1 inspectors.*one inspector for all products, or 2"):
        module(torch.zeros(2, WIDTH, dtype=torch.bfloat16))


def test_a_quantized_result_is_refused() -> None:
    class Quantizes(Unquantize):
        def inspect(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any, out: Any) -> Any:
            return ops.quantize(
                rt, value.matrix(), Cast(Format(dtypes.float8_e4m3, "tensor"), rowwise=True, columnwise=False)
            )

    module = make("Linear", "cpu")
    module.inspector = Quantizes(("fprop", "output"))
    with pytest.raises(ArgumentError, match="a plain tensor in place of a result"):
        module(torch.zeros(2, WIDTH, dtype=torch.bfloat16))
