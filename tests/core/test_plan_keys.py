"""A plan made for right tensors lets no wrong ones of the same shapes pass: kernels are given bare addresses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError
from te_core.ops.norm import Branch
from te_core.quantized import Cast
from te_core.runtime import Runtime
from te_core.tensor import Device, Tensor

ROWS, WIDTH = 8, 32


def spaced(t: Tensor) -> Tensor:
    """Of the tensor's shape and dtype, with every second element."""
    return Tensor(t.ptr, t.shape, t.dtype, t.device, t.owner, tuple(2 * n for n in t.row_major_strides()))


def elsewhere(t: Tensor) -> Tensor:
    """Of the tensor's shape and dtype, on a device that the runtime does not run on."""
    return Tensor(t.ptr, t.shape, t.dtype, Device("cuda", 9), t.owner)


def norm_forward(rt: Runtime, t: dict[str, Tensor]) -> None:
    branch = Branch(t["residual"], t["sum"], t["bias"])
    ops.norm_forward(rt, t["x"], t["gamma"], t["beta"], kind="LayerNorm", eps=0.0, branch=branch)


def norm_backward(rt: Runtime, t: dict[str, Tensor]) -> None:
    vectors = t["gamma"], t["mean"], t["rstd"]
    ops.norm_backward(rt, t["dy"], t["x"], *vectors, kind="LayerNorm", add=t["residual"], out=t["sum"])


def activation_forward(rt: Runtime, t: dict[str, Tensor]) -> None:
    ops.activation_forward(rt, t["x"], "gelu")


def activation_backward(rt: Runtime, t: dict[str, Tensor]) -> None:
    ops.activation_backward(rt, t["dy"], t["x"], "gelu", column_sum=t["bias"])


def quantize(rt: Runtime, t: dict[str, Tensor]) -> None:
    ops.quantize(rt, t["x"], Cast(dtypes.float8_e4m3, rowwise=True, columnwise=True), column_sum=t["bias"])


def gemm(rt: Runtime, t: dict[str, Tensor]) -> None:
    ops.gemm(rt, t["x"], t["weight"], trans_b=True, bias=t["bias"], epilogue="gelu", aux=t["sum"])


CALLS: dict[Callable[..., None], tuple[str, ...]] = {
    norm_forward: ("x", "gamma", "beta", "residual", "sum", "bias"),
    norm_backward: ("dy", "x", "gamma", "mean", "rstd", "residual", "sum"),
    activation_forward: ("x",),
    activation_backward: ("dy", "x", "bias"),
    quantize: ("x", "bias"),
    gemm: ("x", "weight", "bias", "sum"),
}


def tensors(rt: Runtime) -> dict[str, Tensor]:
    """All operands, with room behind each for a spaced one."""

    def make(*shape: int, dtype: dtypes.DType = dtypes.bfloat16) -> Tensor:
        whole = rt.tensor(np.ones((2, *shape), dtype.numpy))
        return Tensor(whole.ptr, shape, dtype, whole.device, whole)

    matrices = {name: make(ROWS, WIDTH) for name in ("x", "dy", "residual", "sum")}
    vectors = {name: make(WIDTH) for name in ("gamma", "beta", "bias")}
    statistics = {name: make(ROWS, dtype=dtypes.float32) for name in ("mean", "rstd")}
    return {**matrices, **vectors, **statistics, "weight": make(WIDTH, WIDTH)}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_plan_hides_no_wrong_tensor(rt: Runtime, call: Callable[..., None]) -> None:
    given, passed = tensors(rt), []
    for name in CALLS[call]:
        for wrong in (spaced, elsewhere):
            call(rt, given)
            try:
                call(rt, {**given, name: wrong(given[name])})
            except ArgumentError:
                continue
            passed.append(f"{wrong.__name__} {name}")
    assert passed == []
