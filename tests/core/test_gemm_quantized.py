"""Products of quantized matrices: every pair of formats and copies against float64 of what the copies hold."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from te_core import device
from te_core import dtypes as D
from te_core.device import DeviceInfo
from te_core.errors import UnsupportedError
from te_core.ops.gemm_quantized import gemm_quantized, gemm_route
from te_core.ops.quantize import dequantize, quantize
from te_core.quantized import Cast, Format
from te_core.runtime import Runtime
from te_core.tensor import CPU, META, cuda_device
from tests.core.covering_lists import covering_lists
from tests.core.inputs import poisoned
from tests.tolerances import DB, snr_db

E4M3, E5M2, E2M1 = D.float8_e4m3, D.float8_e5m2, D.float4_e2m1
TENSOR, WIDE = Format(E4M3), Format(E5M2)
PIECES, TILES, WIDE_PIECES = Format(E4M3, "block"), Format(E4M3, "block", True), Format(E5M2, "block")
MX, MX_TILES, MX_WIDE = Format(E4M3, "mxfp8"), Format(E4M3, "mxfp8", True), Format(E5M2, "mxfp8")
NV, NV_TILES, NV_ROWS = Format(E2M1, "nvfp4"), Format(E2M1, "nvfp4", True), Format(E2M1, "nvfp4", False, True)
NV_256 = Format(E2M1, "nvfp4", False, False, 256)
PAIRS = [
    (TENSOR, TENSOR),
    (WIDE, TENSOR),
    (TENSOR, WIDE),
    (WIDE, WIDE),
    (PIECES, TILES),
    (TILES, PIECES),
    (PIECES, PIECES),
    (WIDE_PIECES, TILES),
    (WIDE_PIECES, PIECES),
    (MX, MX),
    (MX, MX_TILES),
    (MX_WIDE, MX),
    (NV, NV),
    (NV, NV_TILES),
    (NV_ROWS, NV_TILES),
    (NV_256, NV),
]
pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]} with {p[1]}")
COPIES = [(False, False), (False, True), (True, True)]
copies = pytest.mark.parametrize("columns", COPIES, ids=["fprop", "dgrad", "wgrad"])
#: (rows of out, columns of out, contraction)
SIZES = [(37, 60, 100), (64, 48, 272), (1, 1, 1), (130, 20, 129)]


def uneven(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Normal numbers, larger by place, so that every scale matters."""
    x = np.random.default_rng(seed).standard_normal(shape)
    return (x * 2.0 ** (np.arange(shape[0])[:, None] // 16 % 5 + np.arange(shape[1]) // 16 % 3)).astype(np.float32)


def operand(rt: Runtime, form: Format, lines: int, length: int, columnwise: bool, seed: int, **options: object):
    """A matrix in both copies, of which one has these lines along the contraction; and the values of that one."""
    shape = (length, lines) if columnwise else (lines, length)
    x = uneven(shape, seed)
    q = quantize(rt, rt.tensor(x), Cast(form, rowwise=True, columnwise=True, **options))
    held = rt.numpy(dequantize(rt, q, D.float32, columnwise=columnwise)).astype(np.float64)
    return q, held.T if columnwise else held


def product(rt: Runtime, pair, columns, size, **options: object):
    """(quantized a, quantized b, A B^T in float64)."""
    m, n, k = size
    a, left = operand(rt, pair[0], m, k, columns[0], 1, **(options if columns[0] else {}))
    b, right = operand(rt, pair[1], n, k, columns[1], 2, **(options if columns[1] else {}))
    length = min(left.shape[1], right.shape[1])  # a columnwise nvfp4 copy comes with its padding
    return a, b, left[:, :length] @ right[:, :length].T


def bound(pair, dtype: D.DType) -> float:
    """Native per-tensor products have their own accumulation; all others are exact but for float32's."""
    if dtype is not D.float32:
        return DB["bf16"]
    if pair == (WIDE, WIDE):
        return DB["tf32"]  # multiplied in the dtype of the result
    return DB["fp8 split"]


@covering_lists(pytest.mark.parametrize("dtype", ["float32", "bfloat16"]), copies, pairs, turns=2)
def test_every_pair_of_copies(rt: Runtime, pair, columns, dtype: str) -> None:
    """No unwritten byte of padding gets in: the memory is poisoned."""
    rt, out_type = poisoned(rt), D.dtype(dtype)
    for size in SIZES:
        a, b, want = product(rt, pair, columns, size)
        out = rt.empty(size[:2], out_type)
        gemm_quantized(rt, a, b, out, a_columnwise=columns[0], b_columnwise=columns[1], emulate=True)
        assert snr_db(rt.numpy(out).astype(np.float64), want) >= bound(pair, out_type), size


@covering_lists(copies, pairs)
def test_bias_and_accumulation(rt: Runtime, pair, columns) -> None:
    """out = out + A B^T, and out = A B^T + bias, also where the stored sides are longer than the real ones."""
    rng = np.random.default_rng(5)
    for size in SIZES[:2]:
        a, b, want = product(rt, pair, columns, size)
        how = {"a_columnwise": columns[0], "b_columnwise": columns[1], "emulate": True}
        before = rng.standard_normal(size[:2]).astype(np.float32) * 100
        out = rt.tensor(before)
        gemm_quantized(rt, a, b, out, accumulate=True, **how)
        assert snr_db(rt.numpy(out), want + before) >= bound(pair, D.float32), size
        bias = (rng.standard_normal(size[1]) * 100).astype(D.bfloat16.numpy)
        out = rt.empty(size[:2], D.bfloat16)
        gemm_quantized(rt, a, b, out, bias=rt.tensor(bias), **how)
        assert snr_db(rt.numpy(out).astype(np.float64), want + bias.astype(np.float64)) >= DB["bf16"], size


def test_transforms_cancel(rt: Runtime) -> None:
    """Two transformed copies multiply to what the untransformed do; rows that only the transform fills take part."""
    size = (24, 40, 37)  # 37 rows end within a block of 16
    a, b, want = product(rt, (NV, NV), (True, True), size, transform=True)
    out = rt.empty(size[:2], D.float32)
    gemm_quantized(rt, a, b, out, a_columnwise=True, b_columnwise=True, emulate=True)
    assert snr_db(rt.numpy(out), want) >= DB["fp8 split"]
    x, y = uneven((37, 24), 1), uneven((37, 40), 2)
    assert snr_db(rt.numpy(out), x.T.astype(np.float64) @ y) >= DB["nvfp4 linear"]


def test_nothing_to_multiply(rt: Runtime) -> None:
    """An empty contraction gives zeros (or leaves what is added to), an empty result nothing."""
    for size in ((5, 7, 0), (0, 7, 32), (5, 0, 32)):
        for pair in ((TENSOR, TENSOR), (PIECES, TILES), (MX, MX), (NV, NV)):
            a, b, _ = product(rt, pair, (True, True), size)
            out = rt.tensor(np.full(size[:2], 3, np.float32))
            gemm_quantized(rt, a, b, out, a_columnwise=True, b_columnwise=True, emulate=True, accumulate=True)
            assert (rt.numpy(out) == 3).all()
            gemm_quantized(rt, a, b, out, a_columnwise=True, b_columnwise=True, emulate=True)
            assert not rt.numpy(out).any()


# ----------------------------------------------------------------------------------------------- the route


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], **options: object) -> DeviceInfo:
    """A device of another kind in the place of the first."""
    info = DeviceInfo(f"Pretended {capability[0]}.{capability[1]}", capability, 100, 1, 1, (13, 0), **options)
    monkeypatch.setattr(device, "info", lambda index=0: info)
    return info


HOPPER, ADA, BLACKWELL, DESKTOP = (9, 0), (8, 9), (10, 0), (12, 0)
NATIVE = {
    HOPPER: {"tensor", "block"},
    ADA: {"tensor"},
    BLACKWELL: {"tensor", "mxfp8", "nvfp4"},
    DESKTOP: {"tensor", "nvfp4"},
}


@pytest.mark.parametrize("capability", NATIVE, ids=str)
def test_routes(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    for pair in PAIRS:
        pretend(monkeypatch, capability)
        how, reason = gemm_route(cuda_device(0), *pair)
        if pair == (WIDE, WIDE):
            assert how == "dequantized" and "E5M2 by E5M2" in reason
        elif pair[0].scaling in NATIVE[capability] and not pair[0].row_scaled:
            assert (how, reason) == ("native", ""), pair
        else:
            assert how == "refused" and reason, pair


def test_routes_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference backend multiplies everything, and asks no driver."""
    monkeypatch.setattr(device, "info", None)
    for pair in PAIRS:
        expected = "dequantized" if pair == (WIDE, WIDE) else "native" if pair[0].scaling == "tensor" else "emulated"
        assert gemm_route(CPU, *pair)[0] == expected, pair


@pytest.mark.parametrize(
    ("capability", "pair", "why"),
    [
        (HOPPER, (MX, MX), "10.0"),
        (HOPPER, (NV, NV_TILES), "10.0"),
        (ADA, (PIECES, TILES), "9.x"),
        (BLACKWELL, (PIECES, TILES), "9.x"),
        (BLACKWELL, (NV_ROWS, NV_TILES), "not one a row"),
        (HOPPER, (TILES, TILES), "one operand only"),
        (HOPPER, (TENSOR, PIECES), "no product mixes"),
        (HOPPER, (WIDE_PIECES, WIDE_PIECES), "E5M2 by E5M2"),
        (DESKTOP, (MX, MX), "nobody has tried"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], pair, why: str) -> None:
    """What the device cannot do is an error that says what it can; nothing is dequantized unasked."""
    info = pretend(monkeypatch, capability)
    rt = SimpleNamespace(device=cuda_device(0))
    tensors = [SimpleNamespace(format=form) for form in pair]
    with pytest.raises(UnsupportedError) as error:
        gemm_quantized(rt, *tensors, None)
    e = error.value
    assert e.operation == "gemm" and str(pair[0]) in e.got and info.name in e.got and why in e.got
    for recipe in ("Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "DelayedScaling"):
        able, reason = device.can(info, recipe, "gemm")
        assert f"{recipe}: {'yes' if able else reason}" in e.allowed
    assert "emulate=True" in e.do


def test_old_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of cuBLASLt counts, not the chip alone."""
    pretend(monkeypatch, HOPPER, cublaslt=(12, 8, 0))
    how, reason = gemm_route(cuda_device(0), PIECES, TILES)
    assert how == "refused" and "12.9" in reason
    assert gemm_route(cuda_device(0), TENSOR, WIDE).how == "native"


def test_strict(rt: Runtime) -> None:
    """Under strict no product is dequantized behind one's back; those that run as they are asked for still do."""
    a, b, _ = product(rt, (WIDE, WIDE), (False, False), (16, 16, 32))
    out = rt.empty((16, 16), D.bfloat16)
    gemm_quantized(rt, a, b, out)
    with pytest.raises(UnsupportedError, match="E5M2 by E5M2"):
        gemm_quantized(rt, a, b, out, strict=True)
    a, b, want = product(rt, (WIDE, TENSOR), (False, False), (16, 16, 32))
    gemm_quantized(rt, a, b, out, strict=True)
    assert snr_db(rt.numpy(out).astype(np.float64), want) >= DB["bf16"]


def test_meta_multiplies_nothing() -> None:
    gemm_quantized(SimpleNamespace(device=META), None, None, None)
