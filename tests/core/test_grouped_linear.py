"""The grouped layer where its groups differ: precisions of a custom recipe, gradients that some want and others not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from te_core import dtypes
from te_core.layers import grouped_linear, linear
from te_core.layers.grouped_linear import GroupedSpec
from te_core.layers.linear import LinearSpec, Needs, Sink
from te_core.precision import Gemm
from te_core.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    resolve,
    the_one,
)
from tests.core.inputs import placed, values
from tests.covering import covering

gemm_grouped = import_module("te_core.ops.gemm_grouped")  # the package's own name is the function
K, N = 128, 256
SPLITS = [48, 0, 17, 33]
CURRENT, BLOCK = Float8CurrentScaling(), Float8BlockScaling()
PRECISIONS = {
    "mixed": (CURRENT, None, BLOCK, CURRENT),
    "overrides": (
        Float8CurrentScaling(backward_override="high_precision"),
        BLOCK,
        None,
        Float8BlockScaling(backward_override="dequantized"),
    ),
    "one": (BLOCK,) * 4,
    "mxfp8": (MXFP8BlockScaling(),) * 4,
}


def precision_of(recipe):
    """Emulated where the device cannot multiply the format."""
    return the_one(replace(resolve(recipe), emulate=True))


def spec_of(recipe, needs) -> LinearSpec:
    precision = None if recipe is None else precision_of(recipe)
    return LinearSpec(dtypes.bfloat16, precision, Needs(*needs))


def operands(rt, seed=0):
    """(x, dy, weights, biases) of all groups."""
    draw = itertools.count(seed)

    def make(*shape):
        return placed(rt, (np.clip(values(shape, "float32", next(draw)), -9, 9)).astype(dtypes.bfloat16.numpy))

    x, dy = make(sum(SPLITS), K), make(sum(SPLITS), N)
    return x, dy, [make(N, K) for _ in SPLITS], [make(N) for _ in SPLITS]


def equal(rt, ours, theirs, what):
    assert (ours is None) == (theirs is None), what
    if ours is not None:
        np.testing.assert_array_equal(rt.numpy(ours).view(np.uint16), rt.numpy(theirs).view(np.uint16), err_msg=what)


@covering(name=PRECISIONS, needs=[(True, True, True), (True, False, False), (False, True, False), (False, False, True)])
def test_equals_linears(rt, name, needs):
    x, dy, weights, biases = operands(rt)
    specs = [spec_of(recipe, needs) for recipe in PRECISIONS[name]]
    check(rt, specs, x, dy, weights, biases)


@pytest.mark.parametrize("split", [False, True])
def test_the_products_are_told_what_the_recipe_says(rt, monkeypatch, split):
    """(A CPU accumulates one way only: what it is told does not show in its results.)"""
    told = []
    real = gemm_grouped.gemm_quantized
    monkeypatch.setattr(gemm_grouped, "gemm_quantized", lambda *a, **k: (told.append(k), real(*a, **k)))
    precision = the_one(replace(resolve(CURRENT), fprop=Gemm(split), emulate=not split, strict=True))
    x, _, weights, biases = operands(rt)
    spec = GroupedSpec(tuple(LinearSpec(dtypes.bfloat16, precision, Needs(True, True, True)) for _ in SPLITS))
    grouped_linear.forward(rt, x, *weights, *biases, None, spec=spec, splits=grouped_linear.Groups(SPLITS))
    names = ("split_accumulator", "emulate", "strict")
    assert [tuple(k[n] for n in names) for k in told] == [(split, not split, True)] * 3  # one group has no rows


@pytest.mark.parametrize("name", ["one", "mixed"])
def test_some_want_gradients(rt, name):
    x, dy, weights, biases = operands(rt)
    needs = [(True, True, False), (True, True, True), (True, False, True), (True, False, False)]
    check(rt, [spec_of(recipe, n) for recipe, n in zip(PRECISIONS[name], needs, strict=True)], x, dy, weights, biases)


def check(rt, specs, x, dy, weights, biases):
    """Each group against a Linear of its own."""
    spec, splits = grouped_linear.GroupedSpec(tuple(specs)), grouped_linear.Groups(SPLITS)
    (y,), saved = grouped_linear.forward(rt, x, *weights, *biases, None, spec=spec, splits=splits)
    flat = grouped_linear.GroupedSaved(*saved)  # as an adapter hands it back
    dx, *gradients = grouped_linear.backward(rt, dy, flat, spec=spec, splits=splits)
    for i, (start, stop) in enumerate(splits.bounds):
        rows = x.rows(start, stop)
        dw, db = gradients[i], gradients[len(SPLITS) + i]
        if start == stop:
            for gradient, wanted in ((dw, specs[i].needs.weight), (db, specs[i].needs.bias)):
                assert (gradient is not None) == wanted and (gradient is None or not rt.numpy(gradient).any())
            continue
        (alone,), kept = linear.forward(rt, rows, weights[i], biases[i], spec=specs[i])
        equal(rt, y.rows(start, stop), alone, f"y {i}")
        expected = linear.backward(rt, dy.rows(start, stop), kept, spec=specs[i])
        equal(rt, None if dx is None else dx.rows(start, stop), expected[0], f"dx {i}")
        equal(rt, dw, expected[1], f"dw {i}")
        equal(rt, db, expected[2], f"db {i}")


def test_stochastic_rounding_draws_for_each_group(rt):
    """Groups of equal rows are not rounded alike."""
    precision = precision_of(NVFP4BlockScaling(disable_rht=True))
    spec = grouped_linear.GroupedSpec((LinearSpec(dtypes.bfloat16, precision, Needs(True, False, False)),) * 2)
    part = values((64, N), "bfloat16", 1)
    x, dy = placed(rt, np.ones((128, K), part.dtype)), placed(rt, np.concatenate([part, part]))
    weights = [placed(rt, np.eye(N, K).astype(part.dtype))] * 2
    rng = rt.tensor(np.array([1, 2], np.int64))
    splits = grouped_linear.Groups([64, 64])
    _, saved = grouped_linear.forward(rt, x, *weights, None, None, rng, spec=spec, splits=splits)
    dx = rt.numpy(grouped_linear.backward(rt, dy, saved, spec=spec, splits=splits)[0]).astype(np.float32)
    assert (dx[:64] != dx[64:]).any() and np.corrcoef(dx[:64].ravel(), dx[64:].ravel())[0, 1] > 0.9


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("queued", [False, True])
def test_empty_groups_in_their_sinks(rt, accumulate, queued):
    """An empty group's gradient adds nothing, or overwrites with zeros; queued, it waits its turn like the others."""
    x, dy, weights, biases = operands(rt)
    spec = grouped_linear.GroupedSpec((spec_of(CURRENT, (True, True, False)),) * len(SPLITS))
    splits = grouped_linear.Groups(SPLITS)
    _, saved = grouped_linear.forward(rt, x, *weights, *biases, None, spec=spec, splits=splits)
    mains = [rt.tensor(np.full((N, K), 3, np.float32)) for _ in SPLITS]
    queues = [[] if queued else None for _ in SPLITS]
    sinks = [Sink(main, accumulate, queue) for main, queue in zip(mains, queues, strict=True)]
    results = grouped_linear.backward(rt, dy, saved, spec=spec, splits=splits, sinks=sinks)
    assert all(g is None for g in results[1 : 1 + len(SPLITS)])
    if queued:
        assert all((rt.numpy(main) == 3).all() for main in mains) and [len(q) for q in queues] == [1] * len(SPLITS)
        assert [q[0](rt) for q in queues] == [None] * len(SPLITS)
    assert (rt.numpy(mains[1]) == (3 if accumulate else 0)).all()
    assert all((rt.numpy(main) != 3).any() for i, main in enumerate(mains) if SPLITS[i])
