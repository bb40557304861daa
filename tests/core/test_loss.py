"""Cross entropy on every backend: rows, ranks' parts of the classes, chunks of a product's rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.layers import cross_entropy
from te_core.layers.communicator import InProcessCommunicator, InProcessRanks
from te_core.layers.cross_entropy import HeadOperands, HeadSpec, chunk_rows
from te_core.layers.linear import LinearSpec, Needs
from te_core.ops.loss import LossTerms
from te_core.recipe import Float8BlockScaling, Float8CurrentScaling, Recipe, resolve
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.core.inputs import numpy_dtype, placed, poisoned
from tests.core.operation_rows import FACTORS, logits, loss_gradient
from tests.core.operations import judge
from tests.covering import covering
from tests.reference import loss as reference
from tests.tolerances import DB, snr_db


@pytest.mark.parametrize("total", ["sum", "mean", "mean of some"])
def test_totals(rt: Runtime, total: str) -> None:
    """The mean over the rows that count, and over none of them as torch has it, or as documented."""
    x, target, _ = logits((1500, 7), "float32")
    for ignored, empty in ((target, False), (np.full_like(target, -100), True)):
        terms, goal = LossTerms(7), rt.tensor(ignored)
        facts = ops.loss_facts(rt, rt.tensor(x), goal, terms=terms)
        losses, both = ops.loss_values(rt, facts.reshape(1, -1, 3), goal, terms=terms, total=total)
        summed, count = rt.numpy(losses).astype(np.float64).sum(), 0 if empty else 1499
        value = summed if total == "sum" else summed / count if count else np.nan if total == "mean" else 0
        np.testing.assert_allclose(rt.numpy(both), [value, 1 if total == "sum" else 1 / max(count, 1)], rtol=1e-6)


def test_a_gradient_of_the_total(rt: Runtime) -> None:
    x, target, _ = logits((9, 40), "float32")
    goal, terms = rt.tensor(target), LossTerms(40)
    grad = rt.tensor(np.array([0.375], np.float32))
    made, _ = ops.loss_gradient(rt, rt.tensor(x), goal, terms=terms, grad=grad)
    given = x, target, np.full(9, 0.375)
    near = loss_gradient(reference.loss(*given)[1], reference.sizes(*given), "float32")
    judge("dx", rt.numpy(made), near.value, near.off)


def test_a_wrong_target_is_nan(rt: Runtime) -> None:
    """In its own row, loss and gradient; on all ranks, whichever has the classes."""
    x, target, _ = logits((6, 40), "float32")
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
    x, target, _ = logits((5, 40), "float32")
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
    x, target, grad = logits((11, 60), "float32")
    expected, dx = reference.loss(x, target, grad, -100, 0.2, 1e-2)
    each = 60 // size

    def run(comm: InProcessCommunicator) -> Any:
        rt, mine = Runtime.cpu(), slice(comm.rank * each, (comm.rank + 1) * each)
        part, goal = rt.tensor(np.ascontiguousarray(x[:, mine])), rt.tensor(target)
        terms = LossTerms(60, comm.rank * each, -100, 0.2, 1e-2)
        found = cross_entropy.logits_forward(rt, part, goal, terms=terms, comm=comm)
        made = cross_entropy.logits_backward(rt, part, goal, found.facts, terms=terms, grad=rt.tensor(grad), comm=comm)
        return rt.numpy(found.losses), rt.numpy(made)

    results = InProcessRanks(size).run(run)
    for losses, _ in results:
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    near = loss_gradient(dx, reference.sizes(x, target, grad, -100, 0.2, 1e-2), "float32")
    judge("dx", np.concatenate([made for _, made in results], axis=1), near.value, near.off)


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


@covering(recipe=RECIPES, dtype=["float32", "bfloat16"], rows=[0, 1, 50], chunk=[None, 16, 48], factors=FACTORS[:4])
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
