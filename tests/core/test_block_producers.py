"""Norms and activations that deliver block scaling in their own pass: the bytes of a cast that comes after them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.layers import mlp
from te_core.layers.product import LinearSpec, Needs
from te_core.ops.activation import GATED, KINDS, Clamp
from te_core.ops.norm import Branch
from te_core.quantized import Cast, Format, QuantizedTensor
from te_core.recipe import Float8BlockScaling, Float8CurrentScaling, Recipe
from te_core.runtime import Runtime
from tests.core.covering_lists import covering_lists
from tests.core.face import Right, layer_specs, tensor
from tests.core.fake_cuda import Machine
from tests.core.inputs import DTYPES, FP8, placed, poisoned, values
from tests.core.test_cuda_launches import launched

BOTH, ROWS, COLUMNS = (True, True), (True, False), (False, True)
ORIENTATIONS = (BOTH, ROWS, COLUMNS)
#: Rows and columns of a result: whole tiles and both sides of their edges, whole packs of 16 bytes and none, nothing.
SHAPES = [(1, 1), (0, 128), (17, 33), (128, 128), (129, 256), (130, 264), (127, 384), (300, 130), (257, 72), (385, 640)]


def cast_of(i: int, tiled: bool = False) -> Cast:
    """Each rule, format and orientation in turn."""
    rowwise, columnwise = ORIENTATIONS[i % 3]
    form = Format(dtypes.dtype(FP8[i % 2]), "block", tiled=tiled)
    return Cast(
        form, rowwise=rowwise, columnwise=columnwise, epsilon=(0.0, 0.5)[i // 2 % 2], power_of_two=i // 3 % 2 == 0
    )


def same(rt: Runtime, fused: QuantizedTensor | None, plain: QuantizedTensor) -> None:
    """All that was asked for, padding and its scales included, byte for byte."""
    assert fused is not None
    for name in ("rowwise", "rowwise_scale", "columnwise", "columnwise_scale"):
        got, wanted = getattr(fused, name), getattr(plain, name)
        assert (got is None) == (wanted is None), name
        if wanted is not None:
            np.testing.assert_array_equal(rt.numpy(got).view(np.uint8), rt.numpy(wanted).view(np.uint8), name)


@covering_lists(
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("tiled", [False, True]),
)
def test_activations(rt: Runtime, kind: str, dtype: str, tiled: bool) -> None:
    rt = poisoned(rt)
    clamp = Clamp(1.5, 1.2, -0.25) if kind == "clamped_swiglu" else None
    for i, (rows, cols) in enumerate(SHAPES):
        width = cols * (2 if kind in GATED else 1)
        x = placed(rt, values((rows, width), dtype, i, special=i % 3 == 0), i % 4 // 3)
        dy = placed(rt, values((rows, cols), dtype, i + 100), i % 5 // 4)
        y, _ = ops.activation_forward(rt, x, kind, clamp=clamp)
        kept, fused = ops.activation_forward(rt, x, kind, clamp=clamp, cast=cast_of(i, tiled))
        assert kept is None and y is not None
        same(rt, fused, ops.quantize(rt, y, cast_of(i, tiled)))
        dx, _ = ops.activation_backward(rt, dy, x, kind, clamp=clamp)
        assert dx is not None
        sums = [rt.empty((width,), dtypes.float32) for _ in range(2)] if i % 2 else [None, None]
        cast = cast_of(i + 1, tiled)
        _, fused = ops.activation_backward(rt, dy, x, kind, clamp=clamp, cast=cast, column_sum=sums[0])
        same(rt, fused, ops.quantize(rt, dx, cast, column_sum=sums[1]))
        if sums[0] is not None and sums[1] is not None:
            np.testing.assert_array_equal(rt.numpy(sums[0]), rt.numpy(sums[1]))


@covering_lists(
    pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"]),
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("gamma", ["float32", "bfloat16"]),
    pytest.mark.parametrize("tiled", [False, True]),
)
def test_norms(rt: Runtime, kind: str, dtype: str, gamma: str, tiled: bool) -> None:
    """Also of the sum of a residual stream, which is written on the way."""
    rt = poisoned(rt)
    for i, (rows, cols) in enumerate(SHAPES):
        x = placed(rt, values((rows, cols), dtype, i, special=i % 5 == 4), i % 4 // 3)
        gain = placed(rt, values((cols,), gamma, i + 1))
        beta = placed(rt, values((cols,), gamma, i + 2)) if kind == "LayerNorm" else None
        options: dict[str, Any] = {"kind": kind, "eps": 1e-5, "zero_centered": i % 2 == 1}
        cast, branches = cast_of(i, tiled), [None, None]
        if i % 3 == 1:
            residual = placed(rt, values((rows, cols), dtype, i + 3))
            branches = [Branch(residual, rt.empty((rows, cols), dtypes.dtype(dtype))) for _ in range(2)]
        y, _, mean, rstd = ops.norm_forward(rt, x, gain, beta, branch=branches[0], **options)
        kept, fused, *moments = ops.norm_forward(rt, x, gain, beta, branch=branches[1], cast=cast, **options)
        assert kept is None and y is not None
        same(rt, fused, ops.quantize(rt, y, cast))
        pairs = [(moments[0], mean), (moments[1], rstd), tuple(branch and branch.sum for branch in branches)]
        for got, wanted in pairs:
            assert (got is None) == (wanted is None)
            if wanted is not None:
                np.testing.assert_array_equal(rt.numpy(got).view(np.uint8), rt.numpy(wanted).view(np.uint8))


def test_values_that_are_wanted_besides(rt: Runtime) -> None:
    """Kept values, another dtype and counters come as before, with the same copies."""
    x, gain = rt.tensor(values((130, 256), "bfloat16")), rt.tensor(values((256,), "float32"))
    cast = cast_of(0)
    y, q = ops.activation_forward(rt, x, "swiglu", cast=cast, keep=True)
    alone, _ = ops.activation_forward(rt, x, "swiglu")
    assert y is not None and alone is not None
    np.testing.assert_array_equal(rt.numpy(y).view(np.uint16), rt.numpy(alone).view(np.uint16))
    same(rt, q, ops.quantize(rt, alone, cast))
    wide: dict[str, Any] = {"kind": "RMSNorm", "eps": 1e-5, "out_dtype": dtypes.float32}
    y, _, _, _ = ops.norm_forward(rt, x, gain, None, **wide)
    _, q, _, _ = ops.norm_forward(rt, x, gain, None, cast=cast, **wide)
    assert y is not None
    same(rt, q, ops.quantize(rt, y, cast))
    counters = rt.tensor(np.zeros(2, np.int64))
    counting = Cast(cast.format, rowwise=True, columnwise=True, nonfinite=counters)
    odd = values((130, 256), "float32")
    odd[3, 5], odd[4, 6] = np.nan, np.inf
    ops.activation_forward(rt, rt.tensor(odd), "relu", cast=counting)
    assert rt.numpy(counters).tolist() == [1, 1]


# ------------------------------------------------------------------------------------------------- launches


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_no_launch_of_their_own(machine: Machine) -> None:
    """One launch of an activation, two of a norm; another for what cannot lie in the same tiles."""
    rt = machine.runtime()
    cast = Cast(Format(dtypes.float8_e4m3, "block"), rowwise=True, columnwise=True)

    def kernels(operation: Any, *operands: Any, **options: Any) -> list[str]:
        return launched(machine, Right(operation, (rt, *operands), {"cast": cast, **options}))

    x, wide, gain = tensor(rt, 256, 256), tensor(rt, 256, 512), tensor(rt, 256)
    norm: dict[str, Any] = {"kind": "RMSNorm", "eps": 1e-5}
    two = tensor(rt, 256, 256, dtype=dtypes.bfloat16), tensor(rt, 256, 512, dtype=dtypes.bfloat16)
    assert kernels(ops.activation_forward, wide, "swiglu") == ["activation_block"]
    assert kernels(ops.activation_forward, wide, "swiglu", keep=True) == ["activation", "quantize_block"]
    assert kernels(ops.activation_backward, *two, "swiglu") == ["activation_block"]
    assert kernels(ops.activation_backward, x, wide, "swiglu") == ["activation", "quantize_block"]
    assert kernels(ops.activation_backward, x, x, "gelu", column_sum=gain) == ["activation_block", "column_sum"]
    half = tensor(rt, 256, 192, dtype=dtypes.bfloat16), tensor(rt, 256, 384, dtype=dtypes.bfloat16)
    assert kernels(ops.activation_backward, *half, "swiglu") == ["activation", "quantize_block"]
    assert kernels(ops.activation_forward, half[1], "swiglu") == ["activation_block"]
    assert kernels(ops.norm_forward, x, gain, None, **norm) == ["norm_forward", "norm_block"]
    branch = Branch(x, rt.empty((256, 256), x.dtype))
    assert kernels(ops.norm_forward, x, gain, None, branch=branch, **norm) == ["norm_forward", "norm_block"]
    other = dtypes.float32 if x.dtype is not dtypes.float32 else dtypes.bfloat16
    separate = ["norm_forward", "quantize_block"]
    assert kernels(ops.norm_forward, x, gain, None, out_dtype=other, **norm) == separate


#: The kernels of an MLP's forward and backward, weights first: gemms, sums and norm_backward left out.
OF_AN_MLP = [
    (
        Float8BlockScaling(),
        ["norm_forward", "norm_block", "quantize_block", "quantize_block", "activation_block"],
        ["quantize_block", "activation_block"],
    ),
    (
        Float8CurrentScaling(),
        ["norm_forward", "quantize", "amax", "quantize", "amax", "quantize", "activation", "quantize"],
        ["amax", "quantize", "activation", "quantize"],
    ),
]


@pytest.mark.parametrize(("recipe", "forward", "backward"), OF_AN_MLP)
def test_casts_of_an_mlp(machine: Machine, recipe: Recipe, forward: list[str], backward: list[str]) -> None:
    """What the MLP computes itself is cast on its way, or in current scaling its maximum found; dy is cast once."""
    rt = machine.runtime()
    spec = layer_specs(recipe)["mlp"]
    without_bias = LinearSpec(spec.fc1.dtype, spec.fc1.precision, Needs(True, True, False))
    options = {"spec": replace(spec, fc1=without_bias, fc2=without_bias)}
    x, vector, w1, w2 = tensor(rt, 32, 32), tensor(rt, 32), tensor(rt, 48, 32), tensor(rt, 32, 48)
    call = Right(mlp.forward, (rt, x, vector, vector, w1, None, w2, None), options)

    def casts(call: Right) -> list[str]:
        return [name for name in launched(machine, call) if not name.startswith(("gemm", "norm_backward"))]

    assert casts(call) == forward
    _, saved = call.run()
    assert casts(Right(mlp.backward, (rt, x, None, None, saved), options)) == backward


def test_the_sum_is_what_tiles_are_made_of(machine: Machine) -> None:
    """The second launch of a norm in a residual stream reads the sum, which the first has written."""
    rt = machine.runtime()
    x, gain = tensor(rt, 256, 256), tensor(rt, 256)
    branch = Branch(x, rt.empty((256, 256), x.dtype))
    cast = Cast(Format(dtypes.float8_e4m3, "block"), rowwise=True, columnwise=True)
    with machine.noting() as events:
        ops.norm_forward(rt, x, gain, None, kind="RMSNorm", eps=1e-5, branch=branch, cast=cast)
    first, second = (dict(event.places) for event in events if event.kind == "launch")
    assert second["0"] == first["17"] != first["0"]
