"""The CPU backend walks its matrices in blocks of rows: the blocks must not show in any result."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from te_core import Cast, Runtime, Tensor, dtypes, ops
from te_core.backends.cpu.executor import CHUNK, row_blocks
from tests.reference import gemm as reference

M, N = 101, 700  # five blocks, the last one partial
ROWS = 2 * CHUNK + 5


@pytest.fixture
def cpu() -> Runtime:
    return Runtime.cpu()


def drawn(cpu: Runtime, *shape: int, seed: int = 0, dtype: str = "bfloat16") -> Tensor:
    return cpu.tensor(np.random.default_rng(seed).standard_normal(shape), dtype)


def exact(cpu: Runtime, t: Tensor) -> np.ndarray:
    return cpu.numpy(t).astype(np.float64)


def close(cpu: Runtime, sums: Tensor, terms: np.ndarray, axis: int) -> None:
    """The sums of these terms, to float32 accuracy."""
    error = np.abs(exact(cpu, sums) - terms.sum(axis=axis))
    assert (error <= 1e-5 * np.abs(terms).sum(axis=axis) + 1e-30).all()


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (5, 0), (1, 1), (7, CHUNK + 1), (M, N), (ROWS, 1), (ROWS, 3)])
def test_blocks_cover_each_row_once(rows, columns):
    blocks = list(row_blocks(rows, columns))
    assert [i for b in blocks for i in range(b.start, b.stop)] == list(range(rows))
    assert all(b.stop - b.start == 1 or (b.stop - b.start) * columns <= CHUNK for b in blocks)


def test_rows_come_out_as_they_do_alone(cpu):
    x, dy = drawn(cpu, M, N), drawn(cpu, M, N, seed=1)
    g, b = drawn(cpu, N, seed=2), drawn(cpu, N, seed=3)
    cast = Cast(dtypes.float8_e4m3, rowwise=True, columnwise=False, scale=cpu.tensor(np.ones(1, np.float32)))

    def results(x: Tensor, dy: Tensor) -> list[Tensor]:
        y, q, mean, rstd = ops.norm_forward(cpu, x, g, b, kind="LayerNorm", eps=1e-5, cast=cast, keep=True)
        dx, _, _ = ops.norm_backward(cpu, dy, x, g, mean, rstd, kind="LayerNorm")
        fp8 = cpu.tensor(cpu.numpy(q.rowwise)[: x.shape[0]])  # without the padding
        act, dact = ops.activation_forward(cpu, x, "gelu")[0], ops.activation_backward(cpu, dy, x, "gelu")[0]
        return [y, mean, rstd, fp8, dx, act, dact, ops.add(cpu, x, dy), ops.dequantize(cpu, q, dtypes.float32)]

    whole = results(x, dy)
    for i in (0, 22, 23, 24, 91, 92, M - 1):
        for all_rows, one_row in zip(whole, results(x.rows(i, i + 1), dy.rows(i, i + 1)), strict=True):
            np.testing.assert_array_equal(
                cpu.numpy(all_rows)[i : i + 1].view(np.uint8), cpu.numpy(one_row).view(np.uint8)
            )


def test_sums_over_all_blocks(cpu):
    x, dy, g = drawn(cpu, M, N), drawn(cpu, M, N, seed=1), drawn(cpu, N, seed=2, dtype="float32")
    sums = cpu.empty((N,), dtypes.float32)
    both = Cast(dtypes.float8_e5m2, rowwise=True, columnwise=True)
    ops.quantize(cpu, x, both, column_sum=sums)
    close(cpu, sums, exact(cpu, x), 0)
    dx, _ = ops.activation_backward(cpu, dy, x, "silu", column_sum=sums)
    close(cpu, sums, exact(cpu, dx), 0)
    rng = cpu.tensor(np.array([3, 4]))
    dx = ops.bias_dropout_add_backward(cpu, dy, p=0.3, rng=rng, column_sum=sums)
    close(cpu, sums, exact(cpu, dx), 0)
    _, _, mean, rstd = ops.norm_forward(cpu, x, g, g, kind="LayerNorm", eps=1e-5)
    _, dgamma, dbeta = ops.norm_backward(cpu, dy, x, g, mean, rstd, kind="LayerNorm")
    close(cpu, dbeta, exact(cpu, dy), 0)
    xhat = (exact(cpu, x) - exact(cpu, mean)[:, None]) * exact(cpu, rstd)[:, None]
    close(cpu, dgamma, exact(cpu, dy) * xhat, 0)


def test_gemm_sums_over_all_blocks(cpu):
    a, b = drawn(cpu, M, 40), drawn(cpu, 40, N, seed=1)
    aux = drawn(cpu, M, N, seed=2)
    row_sums, column_sums = cpu.empty((M,), dtypes.float32), cpu.empty((N,), dtypes.float32)
    out = ops.gemm(cpu, a, b, epilogue="dgelu", aux=aux, a_sum=row_sums, out_sum=column_sums, out_dtype=dtypes.float32)
    close(cpu, row_sums, exact(cpu, a), 1)
    close(cpu, column_sums, exact(cpu, out), 0)
    wanted = reference.gemm(exact(cpu, a), exact(cpu, b), epilogue="dgelu", aux=exact(cpu, aux)).out
    np.testing.assert_allclose(exact(cpu, out), wanted, rtol=1e-4, atol=1e-4)


def test_masks_do_not_depend_on_blocks(cpu):
    rng, p = cpu.tensor(np.array([5, 6])), 0.4
    wide = cpu.numpy(ops.bias_dropout_add(cpu, cpu.tensor(np.ones((3, ROWS), np.float32)), None, None, p=p, rng=rng))
    tall = cpu.numpy(ops.bias_dropout_add(cpu, cpu.tensor(np.ones((ROWS, 3), np.float32)), None, None, p=p, rng=rng))
    np.testing.assert_array_equal(wide.reshape(-1), tall.reshape(-1))  # element i is element i
    back = cpu.numpy(ops.bias_dropout_add_backward(cpu, cpu.tensor(np.ones((ROWS, 3), np.float32)), p=p, rng=rng))
    np.testing.assert_array_equal(back, tall)


def test_a_far_mean_costs_the_variance_nothing(cpu):
    # The float32 mean is off by up to half its last place, 3e-5 here; the spread is 4e-5.
    rows = 1000.0 + np.random.default_rng(0).integers(-2, 3, (8, 4001)) * 2.0**-14
    x = cpu.tensor(rows.astype(np.float32))
    g = cpu.tensor(np.ones(4001, np.float32))
    _, _, mean, rstd = ops.norm_forward(cpu, x, g, g, kind="LayerNorm", eps=1e-12)
    values = exact(cpu, x)
    np.testing.assert_allclose(exact(cpu, mean), values.mean(axis=1), rtol=6e-8)
    np.testing.assert_allclose(exact(cpu, rstd), 1 / np.sqrt(values.var(axis=1) + 1e-12), rtol=1e-6)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "fp16"])
def test_a_large_matrix_is_quantized_as_its_parts_are(cpu, dtype):
    # From 2^17 elements on 16-bit values go through a table; below they are encoded one by one.
    x = cpu.tensor((np.random.default_rng(1).standard_normal((520, 256)) * 100).astype(dtype))
    for fp8 in (dtypes.float8_e4m3, dtypes.float8_e5m2):
        cast = Cast(fp8, rowwise=True, columnwise=True, scale=cpu.tensor(np.array([3.3], np.float32)))
        whole = ops.quantize(cpu, x, cast)
        rowwise = cpu.numpy(whole.rowwise).view(np.uint8)
        np.testing.assert_array_equal(cpu.numpy(whole.columnwise).view(np.uint8)[:, :520], rowwise[:520].T)
        for i in range(0, 520, 65):
            part = cpu.numpy(ops.quantize(cpu, x.rows(i, i + 65), cast).rowwise).view(np.uint8)
            np.testing.assert_array_equal(part[:65], rowwise[i : i + 65])
