"""FP8 block scaling, 1x128 pieces and 128x128 tiles, and back. Bytes are compared, not values."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.quantized import Cast, Format
from te_core.runtime import Runtime
from tests.backends import cuda_runtime, requires_cuda
from tests.core.covering_lists import covering_lists
from tests.core.inputs import DTYPES, FP8, SHAPES, codes, numpy_dtype, placed, poisoned, values
from tests.reference import quantize_block as ref
from tests.reference.quantize import FP8 as ORACLE
from tests.reference.quantize import store

ORIENTATIONS = [(True, False), (False, True), (True, True)]
GRAINS = [pytest.param(False, id="1x128"), pytest.param(True, id="128x128")]
#: One row, one column, both sides of a block's edge, whole tiles, many tiles.
BLOCKS = [*SHAPES, (1, 300), (300, 1), (127, 128), (128, 129), (129, 257), (256, 640), (385, 512)]
DATA = Path(__file__).parent.parent / "data"


def make_cast(fp8, tiled, orientation=(True, True), *, epsilon=0.0, power_of_two=True):
    form = Format(dtypes.dtype(fp8), "block", tiled=tiled)
    return Cast(form, rowwise=orientation[0], columnwise=orientation[1], epsilon=epsilon, power_of_two=power_of_two)


def bits(rt, t):
    """The bits of a float32 tensor."""
    return rt.numpy(t).view(np.uint32)


def check(rt, q, x, cast):
    """Data, scales and the padding of both, bit for bit, of the copies asked for and no other."""
    assert (q.rowwise is not None, q.columnwise is not None) == (cast.rowwise, cast.columnwise)
    rule = {"tiled": cast.format.tiled, "epsilon": cast.epsilon, "power_of_two": cast.power_of_two}
    zero = ref.scale_of(np.zeros(1, x.dtype), cast.dtype.name, cast.epsilon, cast.power_of_two)
    copies = ((x, q.rowwise, q.rowwise_scale), (x.T, q.columnwise, q.columnwise_scale))
    for source, data, scale in copies:
        if data is not None:
            expected, scales = ref.quantize(source, cast.dtype.name, **rule)
            np.testing.assert_array_equal(codes(rt, data), store(expected))
            if expected.size:
                stored = ref.inverses(scales, cast.format.tiled, zero)
                np.testing.assert_array_equal(bits(rt, scale), stored.view(np.uint32))


@covering_lists(
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("fp8", FP8),
    pytest.mark.parametrize("tiled", GRAINS),
    turns=2,
)
def test_quantize(rt, dtype, fp8, tiled):
    rt = poisoned(rt)
    for i, shape in enumerate(BLOCKS):
        x = values(shape, dtype, i, special=i % 4 == 3)
        cast = make_cast(fp8, tiled, ORIENTATIONS[(i + 2) % 3], epsilon=(0.0, 0.0, 0.5)[i % 3], power_of_two=i % 2 == 0)
        check(rt, ops.quantize(rt, placed(rt, x), cast), x, cast)


@covering_lists(pytest.mark.parametrize("dtype", DTYPES), pytest.mark.parametrize("tiled", GRAINS))
def test_odd_blocks(rt, dtype, tiled):
    """Blocks of zeros, of subnormals, of NaN, with an infinity, and such that the quotient overflows."""
    rt = poisoned(rt)
    info = ml_dtypes.finfo(numpy_dtype(dtype))
    tiny = float(info.smallest_subnormal)
    x = np.full((520, 300), 1.5, np.float32)
    x[:128] = 0
    x[0, 7], x[100, 200] = -tiny, 3 * tiny
    x[128:256, :128] = np.nan
    x[130, 3] = -2
    x[140, 200] = np.inf
    x[200, 290] = -np.inf
    x[300:384] = -float(info.max)
    x[384:512] = float(info.tiny) / 4
    x = x.astype(numpy_dtype(dtype))
    rules = [
        (FP8[0], 0.0, False),
        (FP8[1], 0.0, True),
        (FP8[0], 1e-42, True),
        (FP8[1], 1e-3, False),
        (FP8[0], 1e30, True),
    ]
    for fp8, epsilon, power_of_two in rules:
        cast = make_cast(fp8, tiled, epsilon=epsilon, power_of_two=power_of_two)
        check(rt, ops.quantize(rt, placed(rt, x), cast), x, cast)


def test_scales_by_hand(rt):
    """Which elements share a scale: one large element shows in its own block and nowhere else."""
    x = np.ones((256, 384), np.float32)
    x[130, 260] = 448 * 8
    for tiled in (False, True):
        q = ops.quantize(rt, placed(rt, x), make_cast("float8_e4m3", tiled))
        row, column = rt.numpy(q.rowwise_scale), rt.numpy(q.columnwise_scale)
        usual = np.float32(1 / 256)  # 448 / 1, down to a power of two
        if tiled:
            assert row.shape == (2, 4) and column.shape == (3, 4)
            assert row[1, 2] == 8 and column[2, 1] == 8
            assert (np.delete(row[:, :3].ravel(), 5) == usual).all()
            assert (row[:, 3] == 1).all() and (column[:, 2:] == 1).all()
        else:
            assert row.shape == (3, 256) and column.shape == (2, 384)
            assert row[2, 130] == 8 and column[1, 260] == 8
            assert (row == usual).sum() == row.size - 1 and (column == usual).sum() == column.size - 1


def test_golden(rt):
    """The bytes and scales that the established implementation writes (tests/data/README.md)."""
    with np.load(DATA / "quantizers.npz") as inputs, np.load(DATA / "quantizers_block.npz") as stored:
        sources = {n: inputs[n] for n in inputs.files if n.endswith("/input")}
        arrays = {n: stored[n] for n in stored.files}
    names = sorted({n.rpartition("/")[0] for n in arrays})
    assert len(names) == 48
    for name in names:
        kind, dtype, grain, form, option = name.split("/")
        x = sources[f"{kind}/{dtype}/input"]
        x = x.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else x
        m, k = x.shape
        tiled = grain == "block2d"
        q = ops.quantize(rt, placed(rt, x), make_cast(f"float8_{form}", tiled, power_of_two=option == "pow2_True"))
        golden = {n: arrays.get(f"{name}/{n}") for n in (f"{c}_data" for c in ("rowwise", "columnwise"))}
        columnwise = golden["rowwise_data"].T if tiled else golden["columnwise_data"]
        np.testing.assert_array_equal(codes(rt, q.rowwise)[:m, :k], golden["rowwise_data"], err_msg=name)
        np.testing.assert_array_equal(codes(rt, q.columnwise)[:k, :m], columnwise, err_msg=name)
        for scale, copy, (rows, along) in (
            (q.rowwise_scale, "rowwise", (m, k)),
            (q.columnwise_scale, "columnwise", (k, m)),
        ):
            blocks = -(-along // 128)
            held = np.s_[:, :blocks] if tiled else np.s_[:, :rows]
            np.testing.assert_array_equal(
                rt.numpy(scale)[held], arrays[f"{name}/{copy}_scale_inv"][held], err_msg=f"{name} {copy}"
            )


@covering_lists(
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("fp8", FP8),
    pytest.mark.parametrize("tiled", GRAINS),
    turns=2,
)
def test_dequantize(rt, dtype, fp8, tiled):
    rt = poisoned(rt)
    for i, shape in enumerate([(1, 1), (17, 33), (0, 32), (48, 0), (130, 264), (129, 257), (300, 1), (127, 640)]):
        x = values(shape, "float32", i, special=i % 2 == 1)
        cast = make_cast(fp8, tiled, power_of_two=i % 3 == 0)
        q = ops.quantize(rt, placed(rt, x), cast)
        for columnwise in (False, True):
            source = x.T if columnwise else x
            got_codes, scales = ref.quantize(source, fp8, tiled=tiled, epsilon=0.0, power_of_two=cast.power_of_two)
            inverse = np.float32(1) / scales
            inverse = np.repeat(inverse, 128, axis=1)[:, : source.shape[1]]
            if tiled:
                inverse = np.repeat(inverse, 128, axis=0)[: source.shape[0]]
            with np.errstate(over="ignore", invalid="ignore"):
                expected = (got_codes.view(ORACLE[fp8]).astype(np.float32) * inverse).astype(numpy_dtype(dtype))
            expected = expected.T if columnwise else expected
            got = rt.numpy(ops.dequantize(rt, q, dtypes.dtype(dtype), columnwise=columnwise))
            np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


# ---------------------------------------------------------------------------------------------- CUDA alone


@requires_cuda
@covering_lists(pytest.mark.parametrize("dtype", DTYPES), pytest.mark.parametrize("tiled", GRAINS))
def test_cuda_equals_cpu_on_large(dtype, tiled):
    """Many tiles in each direction, each copy alone and both: the bytes of both backends."""
    x = values((1100, 2056), dtype, 5, special=True)
    for i, orientation in enumerate(ORIENTATIONS):
        cast = make_cast(FP8[i % 2], tiled, orientation, power_of_two=i == 2)
        cpu, cuda = (
            [
                None if t is None else rt.numpy(t).view(np.uint8)
                for q in [ops.quantize(rt, placed(rt, x), cast)]
                for t in (q.rowwise, q.rowwise_scale, q.columnwise, q.columnwise_scale)
            ]
            for rt in (Runtime.cpu(), poisoned(cuda_runtime()))
        )
        for a, b in zip(cpu, cuda, strict=True):
            np.testing.assert_array_equal(a, b)


@requires_cuda
def test_cuda_any_bits():
    """All bit patterns of the 16-bit types and a million of float32, on CUDA."""
    rng = np.random.default_rng(0)
    rt = cuda_runtime()
    sources = [rng.permutation(65536).astype(np.uint16).view(numpy_dtype(d)).reshape(256, 256) for d in DTYPES[1:]]
    sources.append(rng.integers(0, 1 << 32, (1024, 1024), np.uint32).view(np.float32))
    for x in sources:
        for i, fp8 in enumerate(FP8):
            for tiled in (False, True):
                cast = make_cast(fp8, tiled, power_of_two=i == 0)
                check(rt, ops.quantize(rt, placed(rt, x), cast), x, cast)
