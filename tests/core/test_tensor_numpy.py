"""NumPy's functions take a tensor of the CPU for its values, and say in words what they do not take."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from te_core import dtypes, from_dlpack, from_numpy, ops
from te_core.errors import ArgumentError
from te_core.quantized import Cast
from te_core.runtime import Runtime
from te_core.tensor import META, Device, Tensor

RT = Runtime.cpu()
VALUES = np.array([[1.5, -2.0, 3.0], [0.0, 4.0, -0.5]], np.float32)
#: All types that ml_dtypes brings and we have.
NARROW = {"bfloat16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
TYPES = [np.float32, np.float16, np.float64, np.int32, *NARROW.values()]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_an_array_of_a_tensor_is_its_memory(kind: Any) -> None:
    values = VALUES.astype(kind)
    t = RT.tensor(values)
    found = np.asarray(t)
    assert found.dtype == np.dtype(kind) and found.shape == (2, 3) and np.array_equal(found, values)
    found[0, 0] = 2
    assert np.asarray(t)[0, 0] == 2 and np.array(t, copy=True) is not found
    copy = np.array(t)
    copy[0, 0] = 3
    assert np.asarray(t)[0, 0] == 2


def test_a_function_of_numpy_computes() -> None:
    t = from_numpy(VALUES)
    assert np.sum(t) == VALUES.sum() and np.array_equal(np.sum(t, axis=0), VALUES.sum(0))
    assert np.array_equal(np.maximum(t, 0), np.maximum(VALUES, 0)) and np.array_equal(VALUES + t, VALUES + VALUES)
    assert np.allclose(t, VALUES) and np.array_equal(np.stack([t, t]), np.stack([VALUES, VALUES]))
    assert np.sum(RT.tensor(VALUES, "bf16")) == VALUES.sum() and np.mean(t) == VALUES.mean()


def test_strided_and_empty_tensors() -> None:
    assert np.array_equal(np.asarray(from_numpy(VALUES.T)), VALUES.T)
    assert np.asarray(from_numpy(VALUES[:, ::2])).tolist() == VALUES[:, ::2].tolist()
    assert np.asarray(RT.empty((0, 3), dtypes.bfloat16)).shape == (0, 3)


def test_another_dtype_is_a_conversion() -> None:
    t = RT.tensor(VALUES, "e4m3")
    assert t.__array__(np.float32).dtype == np.float32  # NumPy would convert what is not
    found = np.asarray(t, dtype=np.float32)
    assert found.dtype == np.float32 and np.array_equal(found, VALUES)
    with pytest.raises(ArgumentError, match="float8_e4m3.*as float32"):
        t.__array__(np.float32, copy=False)


@pytest.mark.parametrize(("device", "do"), [(Device("cuda", 0), "Runtime.numpy"), (META, "run the layer")], ids=str)
def test_other_devices_are_refused(device: Device, do: str) -> None:
    t = Tensor(256, (2, 3), dtypes.float32, device, None)
    for function in (np.asarray, np.sum, np.array, lambda t: VALUES + t):
        with pytest.raises(ArgumentError, match=rf"on {device}.*{do}"):
            function(t)


def test_a_quantized_tensor_is_refused() -> None:
    q = ops.quantize(RT, RT.tensor(VALUES), Cast(dtypes.float8_e4m3, rowwise=True, columnwise=False))
    for function in (np.asarray, np.sum):
        with pytest.raises(ArgumentError, match="ops.dequantize"):
            function(q)
    assert np.asarray(ops.dequantize(RT, q, dtypes.float32)).shape == (2, 3)
    assert q.rowwise is not None and np.asarray(q.rowwise).dtype == ml_dtypes.float8_e4m3fn


OTHERS = [
    ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz, ml_dtypes.int4, np.complex64, np.str_,
]  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("enter", [from_numpy, from_dlpack, RT.tensor], ids=["from_numpy", "from_dlpack", "tensor"])
def test_other_types_of_numpy_are_refused_in_words(enter: Any, kind: Any) -> None:
    with pytest.raises(ArgumentError, match="Allowed: .*float8_e4m3"):
        enter(np.zeros((2, 3), kind))
