"""Norms and activations that deliver a cast in their own pass: the bytes of a cast that comes after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.layers import mlp
from te_core.layers.product import LinearSpec, Needs
from te_core.ops.activation import GATED, KINDS, Clamp
from te_core.ops.norm import Branch
from te_core.quantized import Cast, Format
from te_core.recipe import Float8BlockScaling, Float8CurrentScaling, Recipe
from te_core.runtime import Runtime
from tests.core.face import Right, layer_specs, tensor
from tests.core.fake_cuda import Machine
from tests.core.inputs import DTYPES, FP8, poisoned, values
from tests.core.operation_rows import rng_of
from tests.core.operations import Put, judge, sums, type_of
from tests.core.test_cuda_launches import launched
from tests.core.test_quantize_grouped import same
from tests.covering import covering
from tests.reference.quantize import amax

ORIENTATIONS = ((True, True), (True, False), (False, True))
#: Rows and columns of a result: whole tiles and both sides of their edges, whole packs of 16 bytes and none, nothing.
SHAPES = [(1, 1), (0, 128), (16, 0), (17, 33), (128, 128), (129, 256), (130, 264), (127, 384), (300, 130), (257, 72)]
SHAPES += [(5, 24), (64, 128), (385, 640)]
#: Also rows that a team holds, and that none does; more tiles of rows than blocks: scratch is a block's own.
NORMED = [(1, 1), (0, 128), (17, 33), (129, 256), (130, 264), (70, 1024), (33, 4096), (50, 260), (16, 100), (129, 40)]
NORMED += [(31, 77), (5, 1), (1, 8200), (35, 20000), (5000, 16), (9000, 264), (257, 72), (385, 640)]


def cast_of(rt: Runtime, form: str, i: int) -> Cast:
    """Each rule, type and orientation in turn."""
    rowwise, columnwise = ORIENTATIONS[i % 3]
    scaled, block = form == "delayed", form in ("block", "tiles")
    scale = rt.tensor(np.array([(3.0, 37.5, 0.1)[i // 2 % 3]], np.float32)) if scaled else None
    return Cast(
        Format(dtypes.dtype(FP8[i % 2]), "block" if block else "tensor", tiled=form == "tiles"),
        rowwise=rowwise,
        columnwise=columnwise,
        scale=scale,
        amax=None if block or i % 4 == 3 else rt.tensor(np.zeros(1, np.float32)),
        epsilon=0.0 if scaled else (0.0, 0.5)[i // 2 % 2],
        power_of_two=i // 3 % 2 == 0 and not scaled,
    )


#: (the values, what is delivered of them, what comes besides) of a call with this cast, or without.
Run = Callable[..., tuple[Any, Any, list[Any]]]


def activation_forward(put: Put, kind: str, shape: tuple[int, int], dtype: str, i: int) -> Run:
    clamp = Clamp(1.5, 1.2, -0.25) if kind == "clamped_swiglu" and i % 2 else None
    x = put(values((shape[0], shape[1] * (2 if kind in GATED else 1)), dtype, i, special=i % 3 == 0))

    def run(**options: Any) -> Any:
        return *ops.activation_forward(put.rt, x, kind, clamp=clamp, **options), []

    return run


def activation_backward(put: Put, kind: str, shape: tuple[int, int], dtype: str, i: int) -> Run:
    clamp = Clamp(1.5, 1.2, -0.25) if kind == "clamped_swiglu" and i % 2 else None
    x = put(values((shape[0], shape[1] * (2 if kind in GATED else 1)), dtype, i))
    dy = put(values(shape, dtype, i + 100))

    def run(**options: Any) -> Any:
        return *ops.activation_backward(put.rt, dy, x, kind, clamp=clamp, **options), []

    return run


def norm(put: Put, kind: str, shape: tuple[int, int], dtype: str, i: int, branched: bool = False) -> Run:
    """In a residual stream the sum is written on the way."""
    gain, out = (dtype, "float32", "bfloat16", "float16")[i % 4], (dtype, dtype, "float32")[i % 3]
    x, residual = (put(values(shape, dtype, i + n, special=i % 5 == 4 and n == 0)) for n in (0, 3))
    gamma, beta, bias = (put(values(shape[1:], t, i + n)) for t, n in ((gain, 1), (gain, 2), (dtype, 5)))
    rule: dict[str, Any] = {"kind": kind, "eps": 1e-5, "zero_centered": i % 2 == 1, "out_dtype": type_of(out)}

    def run(**options: Any) -> Any:
        branch = None
        if branched:
            total = put.rt.empty(shape, type_of(dtype))
            branch = Branch(residual, total, bias if i % 2 else None, (0.0, 0.3)[i % 4 // 2], rng_of(put.rt, 5, 7), -7)
        given = (x, gamma, beta if kind == "LayerNorm" else None)
        y, q, *moments = ops.norm_forward(put.rt, *given, branch=branch, **rule, **options)
        return y, q, [*moments, branch and branch.sum]

    return run


PRODUCERS: dict[str, tuple[Any, list[tuple[int, int]]]] = {
    **{f"{kind} forward": (partial(activation_forward, kind=kind), SHAPES) for kind in KINDS},
    **{f"{kind} backward": (partial(activation_backward, kind=kind), SHAPES) for kind in KINDS},
    **{kind: (partial(norm, kind=kind), NORMED) for kind in ("LayerNorm", "RMSNorm")},
    **{f"{kind} of a sum": (partial(norm, kind=kind, branched=True), NORMED) for kind in ("LayerNorm", "RMSNorm")},
}


@covering(producer=PRODUCERS, dtype=DTYPES, form=["delayed", "current", "block", "tiles"], turns=2)
def test_a_cast_in_the_same_pass(rt: Runtime, producer: str, dtype: str, form: str) -> None:
    """It starts from the rounded values: bytes, scales and maxima that quantize gives on them, and nothing else of the
    call changes; values that are kept besides are the same.
    """
    rt, (make, shapes) = poisoned(rt), PRODUCERS[producer]
    for i in range(form in ("current", "tiles"), len(shapes), 2):  # half of the shapes a scale, and a grain
        shape = shapes[i]
        run = make(Put(rt, i % 4 // 3), shape=shape, dtype=dtype, i=i)
        alone, none, besides = run()
        assert none is None
        cast, plain = (cast_of(rt, form, i) for _ in range(2))
        wanted = ops.quantize(rt, alone, plain)
        column_sum = {}
        if "backward" in producer and i % 2:
            column_sum = {"column_sum": rt.empty((alone.shape[1],), dtypes.float32)}
        for keep in (False, True) if i % 3 == 0 or alone.dtype.name != dtype else (False,):
            kept, fused, others = run(cast=cast, keep=keep, **column_sum)
            assert (kept is not None) == keep
            same(rt, fused, wanted)
            pairs = [*zip(others, besides, strict=True), (kept if keep else alone, alone), (cast.amax, plain.amax)]
            for got, want in pairs:
                assert (got is None) == (want is None)
                assert got is None or rt.numpy(got).tobytes() == rt.numpy(want).tobytes(), (shape, keep)
        if cast.amax is not None:
            assert rt.numpy(cast.amax)[0] == amax(rt.numpy(alone))
        for total in column_sum.values():
            near = sums(rt.numpy(alone), "float32")
            judge("sums", rt.numpy(total), near.value, near.off)


def test_a_maximum_is_raised_and_never_lowered(rt: Runtime) -> None:
    for name in ("gelu forward", "RMSNorm"):
        high = rt.tensor(np.array([1e6], np.float32))
        cast = Cast(dtypes.float8_e4m3, rowwise=True, columnwise=True, scale=None, amax=high)
        PRODUCERS[name][0](Put(rt, 0), shape=(64, 48), dtype="float32", i=1)(cast=cast)
        assert rt.numpy(high)[0] == 1e6


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
