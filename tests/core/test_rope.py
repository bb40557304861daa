"""Rotary position embedding, and the split of packed projections, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from te_core import ops
from te_core.errors import ArgumentError
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.backends import cuda_runtime, requires_cuda
from tests.core.covering_lists import covering_lists
from tests.core.inputs import DTYPES, numpy_dtype, placed, poisoned
from tests.reference import rope as reference

#: Of the length of a channel pair: cosine, sine and three roundings of float32; half a unit of 8 and 11 bits.
ERROR = {"float32": 4e-7, "bfloat16": 2.0**-8, "float16": 2.0**-11}

# fmt, shape, d2, dtype, interleaved, cp
CASES = [
    ("sbhd", (5, 2, 3, 8), 8, "float32", False, (1, 0)),
    ("sbhd", (7, 3, 2, 128), 128, "bfloat16", False, (1, 0)),
    ("bshd", (2, 9, 4, 64), 32, "float16", True, (1, 0)),
    ("bshd", (3, 4, 1, 72), 72, "bfloat16", True, (3, 1)),
    ("sbhd", (6, 1, 5, 6), 2, "bfloat16", False, (2, 1)),
    ("bshd", (1, 8, 40, 80), 48, "float32", False, (2, 0)),
    ("thd", (23, 3, 16), 16, "float32", True, (1, 0)),
    ("thd", (30, 2, 64), 40, "bfloat16", False, (2, 1)),
    ("thd", (12, 1, 10), 6, "float16", True, (2, 0)),
    ("sbhd", (3, 2, 2, 5), 4, "float16", True, (1, 0)),
    ("bshd", (0, 4, 2, 8), 8, "float32", False, (1, 0)),
    ("sbhd", (4, 2, 2, 8), 0, "float32", False, (1, 0)),
]


def angles(rng: np.random.Generator, rows: int, d2: int, *, four: bool = False) -> np.ndarray:
    """Any angles, not only those of two equal halves."""
    table = (rng.standard_normal((rows, d2)) * 10 ** rng.uniform(-2, 2.5, (rows, d2))).astype(np.float32)
    return table.reshape(rows, 1, 1, d2) if four else table


def lengths_of(tokens: int, cp_size: int) -> np.ndarray:
    """Whole sequences whose local parts fill all but the last tokens; two of them are empty."""
    local = [0, 4, 0, tokens - 4 - 4 - 2, 4] if tokens > 12 else [4, 0, 2]
    return np.cumsum([0, *[n * cp_size for n in local]]).astype(np.int32)


def close(y: Any, expected: np.ndarray, x: np.ndarray, dtype: str) -> None:
    """Within the error of a rotation: relative to the largest channel of the head."""
    y = np.asarray(y).astype(np.float64)
    assert y.shape == expected.shape
    scale = np.abs(x.astype(np.float64)).max(axis=-1, keepdims=True, initial=0) * 2 + 1e-30
    assert (np.abs(y - expected) <= ERROR[dtype] * scale).all()


@covering_lists(pytest.mark.parametrize("case", CASES, ids=str), pytest.mark.parametrize("starts", [False, True]))
def test_rope(rt: Runtime, case: Any, starts: bool) -> None:
    fmt, shape, d2, dtype, interleaved, cp = case
    rt, rng = poisoned(rt), np.random.default_rng([1, *shape])
    x = rng.standard_normal(shape).astype(numpy_dtype(dtype))
    freqs = angles(rng, 40 * cp[0], d2, four=starts)
    cu = lengths_of(shape[0], cp[0]) if fmt == "thd" else None
    sequences = len(cu) - 1 if cu is not None else shape[fmt.index("b")]
    first = rng.integers(0, 5, sequences).astype(np.int32) if starts else None
    options = {"fmt": fmt, "interleaved": interleaved, "cp_size": cp[0], "cp_rank": cp[1]}
    table = placed(rt, freqs)
    cu_t, first_t = None if cu is None else placed(rt, cu), None if first is None else placed(rt, first)
    for backward in (False, True):
        expected = reference.turn(
            x, freqs, fmt, interleaved=interleaved, cu_seqlens=cu, starts=first, cp=cp, backward=backward
        )
        for offset in (0, 1):
            y = ops.rope(
                rt, placed(rt, x, offset), table, cu_seqlens=cu_t, start_positions=first_t, backward=backward, **options
            )
            close(rt.numpy(y), expected, x, dtype)


def test_backward_is_the_transpose(rt: Runtime) -> None:
    """<g, turn(x)> = <turn_back(g), x> with angles of two different halves."""
    rng = np.random.default_rng(3)
    x, g = rng.standard_normal((2, 6, 2, 3, 16)).astype(np.float32)
    for interleaved in (False, True):
        table = rt.tensor(angles(rng, 6, 12))
        y = rt.numpy(ops.rope(rt, rt.tensor(x), table, interleaved=interleaved)).astype(np.float64)
        back = rt.numpy(ops.rope(rt, rt.tensor(g), table, interleaved=interleaved, backward=True)).astype(np.float64)
        np.testing.assert_allclose((g * y).sum(), (back * x).sum(), rtol=1e-5)


@pytest.mark.parametrize("fmt", ["sbhd", "bshd", "thd"])
def test_strided_and_in_place(rt: Runtime, fmt: str) -> None:
    """q inside a packed projection, other dimensions swapped; and an output that is the input."""
    rng = np.random.default_rng(4)
    lead = (6,) if fmt == "thd" else (4, 6)
    whole = rng.standard_normal((*lead, 3, 2, 32)).astype(numpy_dtype("bfloat16"))
    packed = placed(rt, whole)
    strides = packed.row_major_strides()
    cu = np.array([0, 2, 6], np.int32)
    options = {"fmt": fmt, "cu_seqlens": placed(rt, cu) if fmt == "thd" else None}
    freqs = angles(rng, 8, 24)
    table = placed(rt, freqs)
    inside = Tensor(
        packed.ptr + 2 * 64, (*lead, 2, 32), packed.dtype, packed.device, packed, (*strides[: len(lead)], 32, 1)
    )
    part = whole[..., 1, :, :]
    expected = reference.turn(part, freqs, fmt, cu_seqlens=cu)
    close(rt.numpy(ops.rope(rt, inside, table, **options)), expected, part, "bfloat16")
    if fmt != "thd":
        swapped = Tensor(
            packed.ptr, (6, 4, 2, 32), packed.dtype, packed.device, packed, (strides[1], strides[0], 32, 1)
        )
        part = whole[:, :, 0].swapaxes(0, 1)
        close(rt.numpy(ops.rope(rt, swapped, table, **options)), reference.turn(part, freqs, fmt), part, "bfloat16")
    t = placed(rt, np.ascontiguousarray(part))
    expected = rt.numpy(ops.rope(rt, placed(rt, np.ascontiguousarray(part)), table, **options))
    assert ops.rope(rt, t, table, out=t, **options) is t
    np.testing.assert_array_equal(rt.numpy(t).view(np.uint16), expected.view(np.uint16))


def test_a_position_outside_the_table_is_nan(rt: Runtime) -> None:
    t = rt.tensor(np.ones((3, 2, 1, 4), np.float32))
    table = rt.tensor(np.ones((4, 2), np.float32))
    starts = rt.tensor(np.array([1, 3], np.int32))
    y = rt.numpy(ops.rope(rt, t, table, start_positions=starts))
    assert np.isfinite(y[:, 0]).all()
    assert np.isfinite(y[0, 1]).all()
    assert np.isnan(y[1:, 1, :, :2]).all()
    np.testing.assert_array_equal(y[..., 2:], 1)


# heads, groups, dims, packing, fmt, rotated, dtype
SPLITS = [
    (4, 4, (8, 8, 8), True, "sbhd", "both", "float32"),
    (6, 2, (64, 64, 64), True, "bshd", "both", "bfloat16"),
    (6, 2, (16, 16, 12), False, "sbhd", "q", "float16"),
    (4, 1, (80, 80, 40), False, "bshd", "k", "bfloat16"),
    (4, 2, (16, 16, 16), True, "thd", "both", "float32"),
    (4, 2, (6, 6, 3), False, "thd", "none", "bfloat16"),
    (8, 2, (128, 128, 128), True, "sbhd", "none", "bfloat16"),
    (0, 3, (16, 16, 16), True, "sbhd", "k", "float32"),
    (0, 3, (8, 8, 5), False, "bshd", "none", "float16"),
    (3, 3, (12, 8, 4), True, "sbhd", "two tables", "float32"),
]


@covering_lists(pytest.mark.parametrize("case", SPLITS, ids=str), pytest.mark.parametrize("interleaved", [False, True]))
def test_split(rt: Runtime, case: Any, interleaved: bool) -> None:
    """Every head comes from its place in the row, turned as `rope` turns it; backward writes the row again."""
    heads, groups, dims, packing, fmt, rotated, dtype = case
    rt, rng = poisoned(rt), np.random.default_rng([5, heads, groups])
    lead, cp = {"thd": ((11,), (1, 0)), "sbhd": ((4, 3), (2, 1)), "bshd": ((3, 4), (2, 0))}[fmt]
    width = ops.packed_width(heads, groups, dims)
    row = rng.standard_normal((*lead, width)).astype(numpy_dtype(dtype))
    cu = np.array([0, 3, 3, 10], np.int32)
    freqs = angles(rng, 16, 4 if rotated == "two tables" else dims[1] // 2 * 2)
    other = angles(rng, 12, dims[0]) if rotated == "two tables" else freqs
    tables = [
        other if rotated in ("both", "q", "two tables") else None,
        freqs if rotated not in ("q", "none") else None,
    ]
    placed_table = placed(rt, freqs)
    q_table, k_table = (None if t is None else placed_table if t is freqs else placed(rt, t) for t in tables)
    starts = np.array([1, 0, 2], np.int32)
    options = {
        "heads": heads,
        "groups": groups,
        "head_dims": dims,
        "interleaved_groups": packing,
        "fmt": fmt,
        "interleaved": interleaved,
        "cp_size": cp[0],
        "cp_rank": cp[1],
        "cu_seqlens": placed(rt, cu) if fmt == "thd" and rotated != "none" else None,
        "start_positions": placed(rt, starts) if rotated != "none" else None,
    }
    parts = reference.split(row.reshape(-1, width), heads, groups, dims, packing)
    for offset in (0, 1):
        given = ops.rope_qkv(rt, placed(rt, row, offset), q_table, k_table, **options)
        grads = [None if part is None else rng.standard_normal(part.shape).astype(row.dtype) for part in given]
        back = ops.rope_qkv_backward(
            rt, *[None if g is None else placed(rt, g, offset) for g in grads], q_table, k_table, **options
        )
        packed_grads = reference.split(rt.numpy(back).reshape(-1, width), heads, groups, dims, packing)
        assert (given[0] is None) == (heads == 0)
        for part, got, grad, packed, table in zip(parts, given, grads, packed_grads, (*tables, None), strict=True):
            if got is None:
                continue
            x = part.reshape(*lead, *part.shape[1:])
            turned, turned_back = x, grad
            if table is not None:
                rotation = {"interleaved": interleaved, "cu_seqlens": cu, "starts": starts, "cp": cp}
                turned = reference.turn(x, table, fmt, **rotation)
                turned_back = reference.turn(grad, table, fmt, backward=True, **rotation)
                close(rt.numpy(got), turned, x, dtype)
                close(packed.reshape(grad.shape), turned_back, grad, dtype)
            else:
                np.testing.assert_array_equal(rt.numpy(got).astype(np.float64), turned.astype(np.float64))
                np.testing.assert_array_equal(packed.reshape(grad.shape).astype(float), turned_back.astype(float))


@requires_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_equals_cpu(dtype: str) -> None:
    """Within one unit in the last place of the larger channel of a pair."""
    rng, cuda, cpu = np.random.default_rng(6), cuda_runtime(), Runtime.cpu()
    x = rng.standard_normal((33, 2, 5, 96)).astype(numpy_dtype(dtype))
    freqs = np.outer(np.arange(33), 10000.0 ** -np.linspace(0, 1, 64)).astype(np.float32)
    for interleaved in (False, True):
        a, b = (rt.numpy(ops.rope(rt, placed(rt, x), placed(rt, freqs), interleaved=interleaved)) for rt in (cuda, cpu))
        close(a, b.astype(np.float64), x, dtype)


def test_arguments(rt: Runtime) -> None:
    t, table = rt.tensor(np.ones((4, 2, 2, 8), np.float32)), rt.tensor(np.ones((4, 8), np.float32))
    starts = rt.tensor(np.zeros(1, np.int32))
    wide = rt.tensor(np.ones((4, 10), np.float32))
    for message, wrong in [
        ("fmt", {"fmt": "bhsd"}),
        ("cu_seqlens", {"fmt": "thd", "t": rt.tensor(np.ones((4, 2, 8), np.float32))}),
        ("thd only", {"cu_seqlens": rt.tensor(np.zeros(3, np.int32))}),
        ("cp_rank", {"cp_size": 2, "cp_rank": 2}),
        ("positions", {"cp_size": 2}),
        ("start_positions", {"start_positions": starts}),
        ("angles", {"freqs": wide}),
        ("freqs = .*dense tensor of dtype float32", {"freqs": rt.tensor(np.ones((4, 8), np.float16))}),
        ("t = .*dtype", {"t": rt.tensor(np.ones((4, 2, 2, 8), np.int32))}),
    ]:
        options = {"t": t, "freqs": table, **wrong}
        with pytest.raises(ArgumentError, match=message):
            ops.rope(rt, options.pop("t"), options.pop("freqs"), **options)
    split = {"heads": 2, "groups": 2, "head_dims": (8, 8, 8), "interleaved_groups": True}
    for wrong in ({"heads": 3}, {"groups": 0}, {"head_dims": (8, 8, 9)}, {"fmt": "x"}):
        with pytest.raises(ArgumentError):
            ops.rope_qkv(rt, rt.tensor(np.ones((4, 2, 48), np.float32)), None, None, **{**split, **wrong})


def test_a_plan_hides_no_wrong_argument(rt: Runtime) -> None:
    """Refused as well where the right call has made a plan of the same shapes before."""
    t, table = rt.tensor(np.ones((4, 2, 2, 8), np.float32)), rt.tensor(np.ones((4, 8), np.float32))
    starts = rt.tensor(np.zeros(2, np.int32))
    ops.rope(rt, t, table, start_positions=starts, out=rt.tensor(np.ones((4, 2, 2, 8), np.float32)))
    for message, wrong in [
        ("freqs", {"freqs": rt.tensor(np.ones((4, 8), np.float16))}),
        ("start_positions", {"start_positions": rt.tensor(np.zeros(1, np.int32))}),
        ("start_positions", {"start_positions": rt.tensor(np.zeros(2, np.int64))}),
        ("out", {"out": rt.tensor(np.ones((4, 2, 1, 8), np.float32))}),
    ]:
        options = {"freqs": table, "start_positions": starts, "out": t, **wrong}
        with pytest.raises(ArgumentError, match=message):
            ops.rope(rt, t, options.pop("freqs"), **options)
    split = {"heads": 2, "groups": 2, "head_dims": (8, 8, 8), "interleaved_groups": True}
    packed = rt.tensor(np.ones((4, 2, 48), np.float32))
    parts = ops.rope_qkv(rt, packed, table, table, start_positions=starts, **split)
    ops.rope_qkv_backward(rt, *parts, table, table, **split)
    with pytest.raises(ArgumentError, match="start_positions"):
        ops.rope_qkv(rt, packed, table, table, start_positions=rt.tensor(np.zeros(1, np.int32)), **split)
    with pytest.raises(ArgumentError, match="dv"):
        ops.rope_qkv_backward(rt, *parts[:2], rt.tensor(np.ones((4, 2, 2, 8), np.float16)), table, table, **split)
