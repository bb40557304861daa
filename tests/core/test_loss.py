"""Cross entropy on every backend: rows, ranks' parts of the classes, chunks of a product's rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError
from te_core.layers import cross_entropy
from te_core.layers.communicator import InProcessCommunicator, InProcessRanks
from te_core.layers.cross_entropy import HeadOperands, HeadSpec, chunk_rows
from te_core.layers.linear import LinearSpec, Needs
from te_core.ops.loss import LossTerms
from te_core.recipe import Float8BlockScaling, Float8CurrentScaling, Recipe, resolve
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.backends import cuda_runtime, requires_cuda
from tests.core.covering_lists import covering_lists
from tests.core.inputs import DTYPES, numpy_dtype, placed, poisoned
from tests.reference import loss as reference
from tests.tolerances import DB, snr_db

#: Half a unit in the last place, and what float32 adds to it.
ROUNDING = {"float32": 1e-6, "bfloat16": 2.0**-8 * 1.01, "float16": 2.0**-11 * 1.01}
TINY = {"float32": 1e-9, "bfloat16": 1e-9, "float16": 2.0**-24}
#: Blocks of 128 to 1024 threads; all of a row held, and a part of it; no whole vectors; one class.
SHAPES = [(1, 1), (5, 3), (7, 33), (40, 64), (9, 1000), (3, 8192), (2, 50257), (2, 131072), (1, 262144), (0, 8)]
TERMS = [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.3, 1e-3), (1.0, 0.0)]


def inputs(shape: tuple[int, int], dtype: str, spread: float = 4.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(logits, targets of which one is ignored, gradients of the losses)."""
    rng = np.random.default_rng([3, *shape])
    target = rng.integers(0, shape[1], shape[0])
    target[1:2] = -100
    x = (rng.standard_normal(shape) * spread + rng.normal(0, 20, (shape[0], 1))).astype(numpy_dtype(dtype))
    return x, target, rng.standard_normal(shape[0]).astype(np.float32)


def check_gradient(dx: np.ndarray, expected: np.ndarray, size: np.ndarray, dtype: str) -> None:
    """The float32 error of a term is that of an exponent around 50."""
    error = np.abs(dx.astype(np.float64) - expected)
    assert (error <= ROUNDING[dtype] * np.abs(expected) + 2e-5 * size + TINY[dtype]).all()


@covering_lists(
    pytest.mark.parametrize("shape", SHAPES, ids=str),
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("factors", TERMS, ids=str),
    pytest.mark.parametrize("integer", ["int64", "int32"]),
)
def test_values_and_gradients(
    rt: Runtime, shape: tuple[int, int], dtype: str, factors: tuple[float, float], integer: str
) -> None:
    rt = poisoned(rt)
    x, target, grad = inputs(shape, dtype)
    expected, dx = reference.loss(x, target, grad, -100, *factors)
    terms, size = LossTerms(shape[1], 0, -100, *factors), reference.sizes(x, target, grad, -100, *factors)
    for offset in (0, 1):
        logits, goal = placed(rt, x, offset), rt.tensor(target.astype(integer))
        facts = ops.loss_facts(rt, logits, goal, terms=terms)
        known = facts.reshape(1, *facts.shape)
        losses, both = ops.loss_values(rt, known, goal, terms=terms)
        np.testing.assert_allclose(rt.numpy(losses), expected, rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(rt.numpy(both), [expected.sum(), 1], rtol=1e-5, atol=1e-4)
        by_facts, none = ops.loss_gradient(rt, logits, goal, terms=terms, known=known, grad=rt.tensor(grad))
        assert none is None
        check_gradient(rt.numpy(by_facts), dx, size, dtype)
        made, found = ops.loss_gradient(rt, logits, goal, terms=terms, grad=rt.tensor(grad), out=logits)
        assert made is logits and found is not None
        np.testing.assert_array_equal(rt.numpy(made), rt.numpy(by_facts))
        np.testing.assert_array_equal(rt.numpy(found), rt.numpy(facts))


@pytest.mark.parametrize("total", ["sum", "mean", "mean of some"])
def test_totals(rt: Runtime, total: str) -> None:
    """The mean over the rows that count, and over none of them as torch has it, or as documented."""
    x, target, _ = inputs((1500, 7), "float32")
    for ignored, empty in ((target, False), (np.full_like(target, -100), True)):
        terms, goal = LossTerms(7), rt.tensor(ignored)
        facts = ops.loss_facts(rt, rt.tensor(x), goal, terms=terms)
        losses, both = ops.loss_values(rt, facts.reshape(1, -1, 3), goal, terms=terms, total=total)
        summed, count = rt.numpy(losses).astype(np.float64).sum(), 0 if empty else 1499
        value = summed if total == "sum" else summed / count if count else np.nan if total == "mean" else 0
        np.testing.assert_allclose(rt.numpy(both), [value, 1 if total == "sum" else 1 / max(count, 1)], rtol=1e-6)


def test_a_gradient_of_the_total(rt: Runtime) -> None:
    x, target, _ = inputs((9, 40), "float32")
    goal, terms = rt.tensor(target), LossTerms(40)
    grad = rt.tensor(np.array([0.375], np.float32))
    made, _ = ops.loss_gradient(rt, rt.tensor(x), goal, terms=terms, grad=grad)
    given = x, target, np.full(9, 0.375)
    check_gradient(rt.numpy(made), reference.loss(*given)[1], reference.sizes(*given), "float32")


def test_a_wrong_target_is_nan(rt: Runtime) -> None:
    """In its own row, loss and gradient; on all ranks, whichever has the classes."""
    x, target, _ = inputs((6, 40), "float32")
    target[2], target[4] = 80, -1
    goal = rt.tensor(target)
    for first in (0, 40):
        terms = LossTerms(80, first)
        facts = ops.loss_facts(rt, rt.tensor(x), goal, terms=terms).reshape(1, 6, 3)
        losses, both = ops.loss_values(rt, facts, goal, terms=terms)
        dx, _ = ops.loss_gradient(rt, rt.tensor(x), goal, terms=terms, known=facts)
        wrong = np.isin(np.arange(6), (2, 4))
        np.testing.assert_array_equal(np.isnan(rt.numpy(losses)), wrong)
        np.testing.assert_array_equal(np.isnan(rt.numpy(dx)), wrong[:, None] & np.ones(40, bool))
        assert np.isnan(rt.numpy(both)[0])


def test_masked_classes(rt: Runtime) -> None:
    """Minus infinity hides a class, also all of a rank's; a NaN shows, and an ignored row is not read."""
    x, target, _ = inputs((5, 40), "float32")
    x[:, 20:] = -np.inf
    target[:] = [3, -100, 7, 19, 0]
    x[1], x[3, 5] = np.nan, np.nan
    goal, whole = rt.tensor(target), LossTerms(40)
    seen = x[:, :20]
    expected, dx = reference.loss(np.where(np.isnan(seen), 0, seen), target, np.ones(5))
    parts = [np.ascontiguousarray(x[:, i : i + 20]) for i in (0, 20)]
    facts = [
        rt.numpy(ops.loss_facts(rt, rt.tensor(p), goal, terms=replace(whole, first=20 * i)))
        for i, p in enumerate(parts)
    ]
    for known, given, terms in (
        (rt.tensor(np.stack(facts)), parts[0], whole),
        (ops.loss_facts(rt, rt.tensor(x), goal, terms=whole).reshape(1, 5, 3), x, whole),
    ):
        losses, _ = ops.loss_values(rt, known, goal, terms=terms)
        made, _ = ops.loss_gradient(rt, rt.tensor(given), goal, terms=terms, known=known)
        found, gradient = rt.numpy(losses), rt.numpy(made)
        assert np.isnan(found[3]) and np.isnan(gradient[3, 0])
        rows = [0, 1, 2, 4]
        np.testing.assert_allclose(found[rows], expected[rows], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gradient[rows, :20], dx[rows], rtol=1e-4, atol=1e-6)
        assert not gradient[rows, 20:].any()


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_of_classes(size: int) -> None:
    """Parts of the classes give the loss, and each its part of the gradient, of the whole."""
    x, target, grad = inputs((11, 60), "float32")
    expected, dx = reference.loss(x, target, grad, -100, 0.2, 1e-2)
    each = 60 // size

    def run(comm: InProcessCommunicator) -> Any:
        rt, mine = Runtime.cpu(), slice(comm.rank * each, (comm.rank + 1) * each)
        logits, goal = rt.tensor(np.ascontiguousarray(x[:, mine])), rt.tensor(target)
        terms = LossTerms(60, comm.rank * each, -100, 0.2, 1e-2)
        found = cross_entropy.logits_forward(rt, logits, goal, terms=terms, comm=comm)
        made = cross_entropy.logits_backward(
            rt, logits, goal, found.facts, terms=terms, grad=rt.tensor(grad), comm=comm
        )
        return rt.numpy(found.losses), rt.numpy(made)

    results = InProcessRanks(size).run(run)
    for losses, _ in results:
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    size = reference.sizes(x, target, grad, -100, 0.2, 1e-2)
    check_gradient(np.concatenate([made for _, made in results], axis=1), dx, size, "float32")


# --------------------------------------------------------------------------------------------- chunks of a product


def head(recipe: Recipe | None, dtype: str, terms: LossTerms, chunk: int | None, needs: bool = True) -> HeadSpec:
    precision = None if recipe is None else resolve(recipe)
    linear = LinearSpec(dtypes.dtype(dtype), precision, Needs(needs, needs, False), weight_dtype=dtypes.float32)
    return HeadSpec(linear, terms, "sum", chunk, needs)


def product(rows: int, width: int, classes: int, dtype: str) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng([8, rows, classes])
    shapes = (rows, width), (classes, width), (classes,)
    hidden, weight, bias = (rng.standard_normal(s).astype(numpy_dtype(dtype)) for s in shapes)
    target = rng.integers(0, classes, rows)
    target[1:2] = -100
    return hidden, weight, bias, target


def gradients_of(operands: tuple[np.ndarray, ...], grad: np.ndarray, factors: tuple[float, float]) -> list[np.ndarray]:
    """(the losses, the gradients of hidden, weight, bias), in float64."""
    hidden, weight, bias = (t.astype(np.float64) for t in operands[:3])
    losses, dx = reference.loss(hidden @ weight.T + bias, operands[3], grad, -100, *factors)
    return [losses, dx @ weight, dx.T @ hidden, dx.sum(axis=0)]


RECIPES = [None, Float8CurrentScaling(), Float8BlockScaling()]


@covering_lists(
    pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__),
    pytest.mark.parametrize("dtype", ["float32", "bfloat16"]),
    pytest.mark.parametrize("rows", [0, 1, 50]),
    pytest.mark.parametrize("chunk", [None, 16, 48]),
    pytest.mark.parametrize("factors", TERMS[:4], ids=str),
)
def test_a_product_in_chunks(
    rt: Runtime, recipe: Recipe | None, dtype: str, rows: int, chunk: int | None, factors: tuple[float, float]
) -> None:
    """Gradients on the way, and those of losses with gradients of their own, which compute the logits again."""
    rt = poisoned(rt, 0xFF)
    operands = product(rows, 32, 72, dtype)
    given = HeadOperands(*[placed(rt, t) for t in operands])
    spec = head(recipe, dtype, LossTerms(72, 0, -100, *factors), chunk)
    found, gradients = cross_entropy.head_forward(rt, given, spec=spec, gradients=True)
    grad = np.random.default_rng(1).standard_normal(rows).astype(np.float32)
    again = cross_entropy.head_backward(rt, given, found.facts, rt.tensor(grad), spec=spec)
    plain, none = cross_entropy.head_forward(rt, given, spec=spec)
    assert none is None and gradients is not None
    np.testing.assert_array_equal(rt.numpy(plain.losses), rt.numpy(found.losses))
    limit = DB["fp8 linear"] if recipe is not None else DB["bf16"] if dtype == "bfloat16" else DB["fp32"]
    for made, of in ((gradients, np.ones(rows)), (again, grad)):
        losses, *expected = gradients_of(operands, of, factors)
        assert snr_db(rt.numpy(found.losses), losses) >= limit
        for name, wanted in zip(gradients._fields, expected, strict=True):
            tensor = getattr(made, name)
            assert tensor.dtype.name == (dtype if name == "hidden" else "float32")
            assert snr_db(rt.numpy(tensor).astype(np.float64), wanted) >= limit, name


def test_no_more_logits_than_a_chunk(rt: Runtime) -> None:
    """And nothing of the gradients where none are asked for."""
    taken: list[tuple[int, ...]] = []

    class Counting:
        alignment = rt.allocator.alignment

        def empty(self, shape: tuple[int, ...], dtype: dtypes.DType, stream: int) -> Tensor:
            taken.append(tuple(shape))
            return rt.allocator.empty(shape, dtype, stream)

    counting = Runtime(rt.device, rt.stream, Counting(), rt.backend)  # type: ignore[arg-type]
    given = HeadOperands(*[placed(rt, t) for t in product(50, 32, 72, "bfloat16")])
    for gradients in (False, True):
        taken.clear()
        spec = head(None, "bfloat16", LossTerms(72), 16, gradients)
        cross_entropy.head_forward(counting, given, spec=spec, gradients=gradients)
        logits = [shape for shape in taken if shape[1:] == (72,)]
        assert logits.count((16, 72)) == 3 and logits.count((2, 72)) == 1
        assert ((72, 32) in taken) is gradients and ((50, 32) in taken) is gradients


def test_ranks_of_a_product() -> None:
    """Each has the whole gradient of hidden, and that of its own rows of the weight."""
    operands, factors = product(20, 16, 60, "float32"), (0.2, 1e-2)
    losses, dh, dw, db = gradients_of(operands, np.ones(20), factors)
    hidden, weight, bias, target = operands

    def run(comm: InProcessCommunicator) -> Any:
        rt, mine = Runtime.cpu(), slice(comm.rank * 30, (comm.rank + 1) * 30)
        given = HeadOperands(*[rt.tensor(t) for t in (hidden, weight[mine], bias[mine], target)])
        spec = head(None, "float32", LossTerms(60, comm.rank * 30, -100, *factors), 8)
        found, made = cross_entropy.head_forward(rt, given, spec=spec, comm=comm, gradients=True)
        again = cross_entropy.head_backward(
            rt, given, found.facts, rt.tensor(np.ones(20, np.float32)), spec=spec, comm=comm
        )
        for a, b in zip(made, again, strict=True):
            np.testing.assert_allclose(rt.numpy(a), rt.numpy(b), rtol=1e-5, atol=1e-5)
        return [rt.numpy(t) for t in (found.losses, *made)]

    first, second = InProcessRanks(2).run(run)
    for found in (first, second):
        assert snr_db(found[0], losses) >= DB["fp32"] and snr_db(found[1], dh) >= DB["fp32"]
    for i, wanted in ((2, dw), (3, db)):
        assert snr_db(np.concatenate([first[i], second[i]]), wanted) >= DB["fp32"]


def test_rows_of_a_chunk() -> None:
    """As few chunks as memory allows, about equal, whole 128s."""
    assert chunk_rows(16384, 32000, 2) == 8192
    assert chunk_rows(16384, 128256, 2) == 4096
    assert chunk_rows(9000, 32000, 2) == 4608
    assert chunk_rows(100, 32000, 2) == 128 == chunk_rows(0, 32000, 2)
    assert chunk_rows(9000, 1 << 30, 4) == 3072


# --------------------------------------------------------------------------------------------------------- errors


def test_arguments(rt: Runtime) -> None:
    x, goal, terms = rt.tensor(np.ones((2, 4), np.float32)), rt.tensor(np.zeros(2, np.int64)), LossTerms(4)
    facts = rt.tensor(np.zeros((1, 2, 3), np.float32))
    wrong: list[tuple[str, Any]] = [
        ("logits = .*dtype", lambda: ops.loss_facts(rt, rt.tensor(np.ones((2, 4), np.int32)), goal, terms=terms)),
        ("int64 or int32", lambda: ops.loss_facts(rt, x, rt.tensor(np.zeros(2, np.float32)), terms=terms)),
        (r"target = .*\[M\] = \[2\]", lambda: ops.loss_facts(rt, x, rt.tensor(np.zeros(3, np.int64)), terms=terms)),
        ("all among", lambda: ops.loss_facts(rt, x, goal, terms=LossTerms(3))),
        ("all among", lambda: ops.loss_facts(rt, x, goal, terms=LossTerms(8, 5))),
        ("pass known", lambda: ops.loss_gradient(rt, x, goal, terms=LossTerms(8))),
        ("grad", lambda: ops.loss_gradient(rt, x, goal, terms=terms, grad=rt.tensor(np.ones(3, np.float32)))),
        ("out", lambda: ops.loss_gradient(rt, x, goal, terms=terms, out=rt.empty((2, 5), dtypes.float32))),
        ("facts", lambda: ops.loss_values(rt, facts.reshape(2, 3), goal, terms=terms)),
        ("total", lambda: ops.loss_values(rt, facts, goal, terms=terms, total="median")),
        ("label_smoothing=1.5", lambda: LossTerms(4, label_smoothing=1.5)),
        ("z_loss=-1", lambda: LossTerms(4, z_loss=-1)),
        ("chunk=0", lambda: head(None, "float32", terms, 0)),
    ]
    for said, call in wrong:
        with pytest.raises(ArgumentError, match=said):
            call()


@requires_cuda
@pytest.mark.parametrize("classes", [32000, 128256, 50257])
def test_cuda_equals_cpu(classes: int) -> None:
    x, target, grad = inputs((67, classes), "bfloat16")
    found = []
    for rt in (cuda_runtime(), Runtime.cpu()):
        made = ops.loss_gradient(rt, placed(rt, x), rt.tensor(target), terms=LossTerms(classes, 0, -100, 0.1, 1e-4))
        found.append([rt.numpy(t).astype(np.float64) for t in made if t is not None])
    for ours, theirs in zip(*found, strict=True):
        assert (
            np.abs(ours - theirs)
            <= 2 * ROUNDING["bfloat16"] * np.abs(theirs) + 1e-4 * np.abs(theirs).max(axis=1, keepdims=True)
        ).all()
