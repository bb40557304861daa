"""Rows divided by their length on every backend."""

from __future__ import annotations

import numpy as np
import pytest

from te_core import ops
from te_core.errors import ArgumentError
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.backends import cuda_runtime, requires_cuda
from tests.core.covering_lists import covering_lists
from tests.core.inputs import DTYPES, numpy_dtype, placed, poisoned
from tests.reference.softmax import l2_norm, l2_norm_gradient

#: Half a unit in the last place, and what float32 adds to it.
ROUNDING = {"float32": 1e-6, "bfloat16": 2.0**-8 * 1.01, "float16": 2.0**-11 * 1.01}
TINY = {"float32": 1e-37, "bfloat16": 1e-37, "float16": 2.0**-25}
SHAPES = [(1, 1), (5, 3), (40, 64), (9, 72), (33, 128), (3, 256), (2, 1000), (7, 4096), (2, 65536), (3, 20001), (0, 8)]


def inputs(shape: tuple[int, int], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows of very different lengths, one of them zero."""
    rng = np.random.default_rng([12, *shape])
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-5, 6, (shape[0], 1)))
    x[1:2] = 0
    return x.astype(numpy_dtype(dtype)), rng.standard_normal(shape).astype(numpy_dtype(dtype))


@covering_lists(pytest.mark.parametrize("shape", SHAPES, ids=str), pytest.mark.parametrize("dtype", DTYPES))
def test_values_and_gradients(rt: Runtime, shape: tuple[int, int], dtype: str) -> None:
    rt = poisoned(rt)
    x, dy = inputs(shape, dtype)
    for offset, eps in ((0, 1e-3), (1, 0.5)):
        y = rt.numpy(ops.l2_norm_forward(rt, placed(rt, x, offset), eps=eps)).astype(np.float64)
        expected = l2_norm(x, eps)
        assert (np.abs(y - expected) <= ROUNDING[dtype] * np.abs(expected) + TINY[dtype]).all()
        if shape[1] > 5000:
            continue
        dx = rt.numpy(ops.l2_norm_backward(rt, placed(rt, dy, offset), placed(rt, x, offset), eps=eps))
        expected = l2_norm_gradient(dy, x, eps)
        length = np.sqrt((x.astype(np.float64) ** 2).sum(axis=1, keepdims=True) + eps)
        y64, g = np.abs(x.astype(np.float64)) / length, np.abs(dy.astype(np.float64))
        terms = (g + y64 * (y64 * g).sum(axis=1, keepdims=True)) / length
        error = np.abs(dx.astype(np.float64) - expected)
        assert (error <= ROUNDING[dtype] * np.abs(expected) + 2e-6 * terms + TINY[dtype]).all()


@pytest.mark.parametrize("cols", [20001, 65536])
def test_gradient_of_long_rows(rt: Runtime, cols: int) -> None:
    """Orthogonal to x without epsilon, and (dy, x) when dy is x."""
    x, dy = inputs((3, cols), "float32")
    x[1] = 1
    dx = rt.numpy(ops.l2_norm_backward(rt, rt.tensor(dy), rt.tensor(x), eps=0.0)).astype(np.float64)
    size = np.sqrt((dx**2).sum(axis=1) * (x.astype(np.float64) ** 2).sum(axis=1))
    assert (np.abs((dx * x).sum(axis=1)) <= 1e-5 * size).all()
    expected = dy - l2_norm(x, 0) * (l2_norm(x, 0) * dy).sum(axis=1, keepdims=True)
    length = np.sqrt((x.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(dx * length, expected, rtol=0, atol=1e-5)


def test_epsilon_stands_under_the_root_of_the_sum(rt: Runtime) -> None:
    x = np.full((2, 4), 1.0, np.float32)
    y = rt.numpy(ops.l2_norm_forward(rt, rt.tensor(x), eps=12.0))
    np.testing.assert_allclose(y, 0.25, rtol=1e-6)


@requires_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_equals_cpu(dtype: str) -> None:
    x, _ = inputs((65, 128), dtype)
    ours, theirs = (
        rt.numpy(ops.l2_norm_forward(rt, placed(rt, x), eps=1e-6)).astype(np.float64)
        for rt in (cuda_runtime(), Runtime.cpu())
    )
    assert (np.abs(ours - theirs) <= 2 * ROUNDING[dtype] * np.abs(theirs) + TINY[dtype]).all()


def test_arguments(rt: Runtime) -> None:
    x = rt.tensor(np.ones((2, 4), np.float32))
    with pytest.raises(ArgumentError, match="65536"):
        ops.l2_norm_forward(rt, rt.tensor(np.ones((1, 65537), np.float32)), eps=0.0)
    with pytest.raises(ArgumentError, match="dy"):
        ops.l2_norm_backward(rt, rt.tensor(np.ones((2, 4), np.float16)), x, eps=0.0)
    with pytest.raises(ArgumentError, match="dtype"):
        ops.l2_norm_forward(rt, rt.tensor(np.ones((2, 4), np.int32)), eps=0.0)


def test_a_plan_hides_no_wrong_argument(rt: Runtime) -> None:
    """Refused as well where the right call has made a plan of the same shapes before."""
    x = rt.tensor(np.ones((4, 8), np.float32))
    ops.l2_norm_forward(rt, x, eps=0.0)
    ops.l2_norm_backward(rt, x, x, eps=0.0)
    memory = rt.tensor(np.ones((4, 16), np.float32))
    with pytest.raises(ArgumentError, match="dense"):
        ops.l2_norm_forward(rt, Tensor(memory.ptr, (4, 8), x.dtype, x.device, memory, (16, 2)), eps=0.0)
    for dy in (np.ones((4, 8), np.float16), np.ones((3, 8), np.float32)):
        with pytest.raises(ArgumentError, match="dy"):
            ops.l2_norm_backward(rt, rt.tensor(dy), x, eps=0.0)
