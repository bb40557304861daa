"""Weights that lie [in, out]: bit for bit what the transposed weight gives, and its gradients transposed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from te_core import Cast, Runtime, calls, dtypes, ops
from te_core import functional as te
from te_core.layers import linear
from te_core.layers.linear import LinearSpec, Needs, Sink
from te_core.quantize.operands import transpose_of
from te_core.quantized import Format
from te_core.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe, resolve
from tests.recordings import tapes

RECIPES: dict[str, Recipe | None] = {
    "plain": None,
    "delayed": DelayedScaling(amax_history_len=3),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "plain backward": Float8CurrentScaling(backward_override="high_precision"),
    "dequantized backward": Float8BlockScaling(backward_override="dequantized"),
}
DTYPES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16}
#: Rows, in, out. Widths that are no multiples of 16 are stored with padding; a square hides what a shape would show.
SIZES = ((33, 48, 80), (1, 20, 7), (32, 64, 64), (300, 144, 160))
Arrays = dict[str, Any]


def _linear(rows: int, k: int, n: int, draw: Callable[..., Any]) -> Arrays:
    return {"x": draw(rows, k), "weight": draw(n, k), "bias": draw(n)}


def _behind_norm(rows: int, k: int, n: int, draw: Callable[..., Any]) -> Arrays:
    norm = {"layer_norm_weight": draw(k), "layer_norm_bias": draw(k)}
    return {**_linear(rows, k, n, draw), **norm}


def _mlp(rows: int, k: int, n: int, draw: Callable[..., Any], wide: int = 1) -> Arrays:
    norm = {"layer_norm_weight": draw(k), "layer_norm_bias": draw(k)}
    fc1 = {"fc1_weight": draw(n * wide, k), "fc1_bias": draw(n * wide)}
    return {"x": draw(rows, k), **norm, **fc1, "fc2_weight": draw(k, n), "fc2_bias": draw(k)}


def _gated(rows: int, k: int, n: int, draw: Callable[..., Any]) -> Arrays:
    return _mlp(rows, k, n, draw, 2)


CASES: dict[str, tuple[te.Function, Callable[..., Arrays], Arrays]] = {
    "linear": (te.linear, _linear, {}),
    "norm and linear": (te.layernorm_linear, _behind_norm, {"return_layernorm_output": True}),
    "mlp": (te.layernorm_mlp, _mlp, {}),
    "gated mlp": (te.layernorm_mlp, _gated, {"activation": "swiglu"}),
    "mlp again": (te.layernorm_mlp, _mlp, {"activation": "srelu", "checkpoint": True}),
}


def arrays_of(case: str, sizes: tuple[int, int, int], dtype: Any = np.float32) -> Arrays:
    """A layer's arguments, weights as [out, in]."""
    random = np.random.default_rng(1)
    return CASES[case][1](*sizes, lambda *shape: (random.standard_normal(shape) / 2).astype(dtype))


def flipped(case: str, found: Arrays) -> Arrays:
    """Arrays by name, those of weights transposed."""
    products = CASES[case][0].layer.products
    return {n: np.ascontiguousarray(a.T) if n in products else a for n, a in found.items()}


def steps(case: str, arrays: Arrays, turned: bool, recipe: Recipe | None, count: int, **more: Any) -> list[Arrays]:
    """What steps of a layer give, by name: outputs and gradients, weights' as [out, in]."""
    function, _, options = CASES[case]
    given = flipped(case, arrays) if turned else arrays
    state: Arrays = {}
    if recipe is not None and resolve(recipe).history is not None:
        state["scaling"] = te.Scaling(recipe, function, like=given["x"])
    into = {n: np.full(given[n].shape, 3.0, np.float32) for n in more.pop("into", ())}
    found = []
    for step in range(count):
        y, back = function(**given, **options, turned=turned, recipe=recipe, **state, **more)
        outputs = y if isinstance(y, tuple) else (y,)
        gradients: Arrays = {}
        if more.get("needs") != ():
            dy = tuple(np.roll(a, step + 1) for a in outputs)
            keywords = {"into": into, "accumulate": True} if into else {}
            gradients = back(dy if len(dy) > 1 else dy[0], **keywords)
        if state:
            te.update(state["scaling"])
        gradients = {n: a.copy() for n, a in gradients.items()}
        found.append({**(flipped(case, gradients) if turned else gradients), **dict(enumerate(outputs))})
    return found


def assert_same(found: list[Arrays], wanted: list[Arrays]) -> None:
    """Bit for bit."""
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype and one[name].shape == other[name].shape, name
            assert one[name].tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_transposed_weight(case: str, recipe: str) -> None:
    """In each size and dtype, recorded, replayed and interpreted."""
    for sizes in SIZES:
        for dtype in DTYPES.values():
            arrays = arrays_of(case, sizes, dtype)
            wanted = steps(case, arrays, False, RECIPES[recipe], 3)
            for setting in ("first", "never"):
                with tapes(setting):
                    assert_same(steps(case, arrays, True, RECIPES[recipe], 3), wanted)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES)
def test_what_is_wanted_of_it(case: str, recipe: str) -> None:
    """Gradients one at a time and none, no biases, and weight gradients added to what is there."""
    products, arrays = CASES[case][0].layer.products, arrays_of(case, SIZES[0])
    without = {n: a for n, a in arrays.items() if not n.endswith("bias") or n.startswith("layer_norm")}
    asked: list[tuple[Arrays, Arrays]] = [(arrays, {"needs": (name,)}) for name in arrays]
    asked += [(arrays, {"needs": ()}), (without, {}), (arrays, {"into": products})]
    for given, more in asked:
        found = [steps(case, given, turned, RECIPES[recipe], 2, **more) for turned in (True, False)]
        assert_same(*found)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "dequantized backward"])
@pytest.mark.parametrize("case", ["linear", "mlp", "mlp again"])
def test_a_weight_quantized_before(case: str, recipe: str) -> None:
    """In the weight's place or beside it; of a square weight one copy would fit in the other's place."""
    (function, _, options), kind = CASES[case], RECIPES[recipe]
    assert kind is not None
    given = flipped(case, arrays_of(case, SIZES[2]))
    scaling = te.Scaling(kind, function, like=given["x"]) if recipe == "delayed" else None
    products = function.layer.products
    ready = {n: te.quantize(given[n], kind, scaling=scaling, name=n) for n in products}
    found = []
    for arrays, quantized in ((given, None), (given, ready), ({**given, **ready}, None)):
        y, back = function(**arrays, **options, turned=True, recipe=kind, scaling=scaling, quantized=quantized)
        found.append({"y": y, **back(y)})
    assert_same(found[1:], found[:1] * 2)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_asked_of_blas_alike(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """The order in which it adds depends on how operands lie, on some processors only."""
    multiply, asked = np.matmul, []

    def watched(a: Any, b: Any, out: Any = None) -> Any:
        asked.append([(t.shape, t.strides, t.tobytes()) for t in (a, b)])
        return multiply(a, b, out=out)

    monkeypatch.setattr(np, "matmul", watched)
    arrays, found = arrays_of("gated mlp", SIZES[0]), []
    for turned in (True, False):
        steps("gated mlp", arrays, turned, RECIPES[recipe], 1)
        found.append(asked.copy())
        asked.clear()
    assert found[0] == found[1] and len(found[0]) == 6


def test_calls_by_name_and_specs_differ_by_it() -> None:
    one, other = (calls.call("linear", {"turned": t}, dtypes.float32, frozenset({"x"})) for t in (False, True))
    assert one is not other and one.spec != other.spec and other.spec.turned
    assert other is calls.call("linear", {"turned": True}, dtypes.float32, frozenset({"x"}))


def test_gradients_that_wait() -> None:
    """A queue has the product of a weight gradient as a function."""
    rt, random = Runtime.cpu(), np.random.default_rng(0)
    x, dy, w = (random.standard_normal(shape).astype(np.float32) for shape in ((32, 48), (32, 64), (64, 48)))
    found = []
    for turned in (True, False):
        spec = LinearSpec(dtypes.float32, None, Needs(True, True, True), turned=turned)
        bias = rt.tensor(np.ones(64, np.float32))
        _, saved = linear.forward(rt, rt.tensor(x), rt.tensor(w.T if turned else w), bias, spec=spec)
        sink = Sink(queue=[])
        _, dw, db = linear.backward(rt, rt.tensor(dy), saved, spec=spec, sinks=(sink,))
        assert dw is None and sink.queue is not None and len(sink.queue) == 1
        gradient = rt.numpy(sink.queue[0](rt))
        found.append({"dw": np.ascontiguousarray(gradient.T if turned else gradient), "db": rt.numpy(db)})
    assert_same(found[:1], found[1:])


@pytest.mark.parametrize("recipe", ["plain", "current", "block", "dequantized backward"])
def test_each_device(rt: Runtime, recipe: str) -> None:
    """A GPU chooses its kernels by the layouts, so the last bits may differ there."""
    random, kind, found = np.random.default_rng(0), RECIPES[recipe], []
    precision = None if kind is None else replace(resolve(kind), emulate=True)
    x, w, b, dy = (random.standard_normal(s).astype(DTYPES["bf16"]) for s in ((96, 128), (256, 128), 256, (96, 256)))
    for turned in (True, False):
        spec = LinearSpec(dtypes.bfloat16, precision, Needs(True, True, True), turned=turned)
        lying = rt.tensor(np.ascontiguousarray(w.T) if turned else w)
        main = rt.tensor(np.zeros(lying.shape, np.float32))
        (y,), saved = linear.forward(rt, rt.tensor(x), lying, rt.tensor(b), spec=spec)
        _, dw, _ = linear.backward(rt, rt.tensor(dy), saved, spec=spec)
        dx, _, db = linear.backward(rt, rt.tensor(dy), saved, spec=spec, sinks=(Sink(main, True),))
        made = [rt.numpy(t).astype(np.float32) for t in (y, dx, db, dw, main)]  # type: ignore[arg-type]
        found.append(made[:3] + [t.T if turned else t for t in made[3:]])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.02, atol=0.05)


def test_sums_of_many_rows() -> None:
    """The bias's gradient is summed by a pass of its own, in blocks of rows."""
    found = []
    arrays = {"x": np.ones((20000, 16), np.float32), "weight": np.ones((16, 16), np.float32), "bias": np.ones(16, "f")}
    dy = np.random.default_rng(0).standard_normal((20000, 16)).astype(np.float32)
    for turned in (True, False):
        _, back = te.linear(**arrays, turned=turned, needs=("weight", "bias"))
        found.append({"bias": back(dy)["bias"]})
    assert_same(found[:1], found[1:])


@pytest.mark.parametrize("tiled", [False, True])
def test_the_transpose_of_a_quantized_matrix(tiled: bool) -> None:
    rt, values = Runtime.cpu(), np.random.default_rng(0).standard_normal((150, 40)).astype(np.float32)
    cast = Cast(Format(dtypes.float8_e4m3, "block", tiled), rowwise=True, columnwise=True)
    q = ops.quantize(rt, rt.tensor(values), cast)
    for columnwise in (False, True):
        there = rt.numpy(ops.dequantize(rt, q, dtypes.float32, columnwise=columnwise))
        back = rt.numpy(ops.dequantize(rt, transpose_of(q), dtypes.float32, columnwise=not columnwise))
        np.testing.assert_array_equal(there, back.T)
