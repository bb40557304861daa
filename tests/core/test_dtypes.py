"""The element types: their names elsewhere, sizes, ranges and DLPack codes."""

from __future__ import annotations

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

from te_core import ArgumentError, dtypes
from te_core.dtypes import ALL, dtype

# DLPack's own table (dlpack.h), not ours.
INT, UINT, FLOAT, BFLOAT, BOOL = 0, 1, 2, 4, 6
E4M3FN, E5M2, E8M0, E2M1 = 10, 12, 14, 17
CODES = {
    "float64": (FLOAT, 64),
    "float32": (FLOAT, 32),
    "float16": (FLOAT, 16),
    "bfloat16": (BFLOAT, 16),
    "float8_e4m3": (E4M3FN, 8),
    "float8_e5m2": (E5M2, 8),
    "float8_e8m0": (E8M0, 8),
    "float4_e2m1": (E2M1, 4),
    "int8": (INT, 8),
    "int16": (INT, 16),
    "int32": (INT, 32),
    "int64": (INT, 64),
    "uint8": (UINT, 8),
    "uint16": (UINT, 16),
    "uint32": (UINT, 32),
    "uint64": (UINT, 64),
    "bool": (BOOL, 8),
}


def test_the_table_is_complete():
    assert {d.name for d in ALL} == set(CODES) and len(ALL) == len(CODES)


def test_every_name_of_a_type_finds_it():
    for d in ALL:
        for spelling in (d, d.name, d.torch_name, "torch." + d.torch_name, *d.aliases, d.numpy, d.numpy.type):
            assert dtype(spelling) is d
        assert repr(d) == str(d) == d.name


def test_dlpack_codes():
    for d in ALL:
        assert (d.dlpack_code, d.bits) == CODES[d.name]
        assert dtypes.from_dlpack(*CODES[d.name]) is d


def test_torch_calls_them_the_same():
    torch = pytest.importorskip("torch")
    for d in ALL:
        theirs = getattr(torch, d.torch_name)
        assert dtype(theirs) is d and theirs.itemsize == d.itemsize
        if d.is_float and d is not dtypes.float4_e2m1:
            assert torch.finfo(theirs).max == d.max


def test_jax_calls_them_the_same():
    jnp = pytest.importorskip("jax.numpy")
    for ours, theirs in ((dtypes.bfloat16, jnp.bfloat16), (dtypes.float8_e4m3, jnp.float8_e4m3fn)):
        assert dtype(theirs) is ours and dtype(jnp.zeros(1, theirs).dtype) is ours


def test_largest_values():
    expected = {"float8_e4m3": 448.0, "float8_e5m2": 57344.0, "float8_e8m0": 2.0**127, "float4_e2m1": 6.0}
    for d in ALL:
        if d.name in expected:
            assert d.max == expected[d.name]
        elif d.kind == "float":
            assert d.max == float(ml_dtypes.finfo(d.numpy).max)
        else:
            assert d.max == (1 if d.kind == "bool" else float(np.iinfo(d.numpy).max))


def test_sizes():
    assert [d.itemsize for d in ALL] == [d.numpy.itemsize for d in ALL]
    assert all(d.nbytes(7) == 7 * d.itemsize for d in ALL if d.bits >= 8)
    assert [dtypes.float4_e2m1.nbytes(n) for n in range(5)] == [0, 1, 1, 2, 2]


def test_kinds():
    assert {d.name for d in ALL if d.is_float} == {n for n in CODES if "float" in n}
    assert {d for d in ALL if d.is_fp8} == {dtypes.float8_e4m3, dtypes.float8_e5m2}
    assert set(dtypes.ACTIVATION_DTYPES) == {dtypes.float32, dtypes.bfloat16, dtypes.float16}


def test_types_stay_singletons():
    for d in ALL:
        assert pickle.loads(pickle.dumps(d)) is d and copy.deepcopy(d) is d
        assert d in {d} and d == d and all(d != other for other in ALL if other is not d)


@pytest.mark.parametrize("unknown", ["float7", "complex64", np.complex64, np.dtype(">f4"), object(), "torch.qint8"])
def test_unknown_types_are_named_with_the_known_ones(unknown):
    with pytest.raises(ArgumentError, match="float8_e4m3.*To do: choose one of these"):
        dtype(unknown)


def test_unknown_dlpack_types():
    for triple in ((5, 64, 1), (2, 32, 4), (10, 8, 2), (2, 8, 1)):
        with pytest.raises(ArgumentError, match=f"type code {triple[0]}, {triple[1]} bits, {triple[2]} lanes"):
            dtypes.from_dlpack(*triple)
    assert dtypes.from_dlpack(E2M1, 4, 2) is dtypes.float4_e2m1  # two to a byte, as torch has it
