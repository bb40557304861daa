"""`general_gemm` against torch: layouts, sums, GELU, quantized operands and results, mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from te_torch.cpp_extensions import general_gemm
from tests.backends import devices

SHAPES = {"TN": ((6, 16), (2, 4, 16)), "NN": ((16, 6), (2, 4, 16)), "NT": ((2, 4, 6), (2, 4, 16))}


def operands(layout: str, device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(device, dtype) for shape in SHAPES[layout]]


def plain(a: torch.Tensor, b: torch.Tensor, layout: str) -> torch.Tensor:
    a, b = a.double(), b.double()
    if layout == "NT":
        return b.flatten(0, 1).t() @ a.flatten(0, 1)
    return b @ (a.t() if layout == "TN" else a)


def close(found: Any, wanted: torch.Tensor, like: torch.dtype = torch.float32) -> None:
    assert found.shape == wanted.shape and found.dtype == like
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("layout", SHAPES)
def test_products(device: str, layout: str) -> None:
    a, b = operands(layout, device)
    wanted = plain(a, b, layout)
    close(general_gemm(a, b, layout=layout)[0], wanted)
    low = [t.bfloat16() for t in (a, b)]
    close(general_gemm(*low, torch.float32, layout=layout)[0], plain(*low, layout))
    for scales in ({}, {"alpha": 2.0, "beta": 0.5}):
        out = torch.ones_like(wanted, dtype=torch.float32)
        found = general_gemm(a, b, layout=layout, out=out, accumulate=True, **scales)[0]
        assert found is out
        close(out, wanted * scales.get("alpha", 1) + scales.get("beta", 1))
    out = torch.ones_like(wanted, dtype=torch.float32)
    assert general_gemm(a, b, layout=layout, out=out)[0] is out
    close(out, wanted)


@pytest.mark.parametrize("device", devices())
def test_bias_and_gelu(device: str) -> None:
    a, b = operands("TN", device)
    bias = torch.arange(6.0, device=device)
    before = plain(a, b, "TN") + bias.double()
    out, dbias, pre, extra = general_gemm(a, b, bias=bias, gelu=True)
    close(out, torch.nn.functional.gelu(before, approximate="tanh"))
    close(pre, before)
    assert dbias is None and extra is None
    close(general_gemm(a, b, bias=bias, alpha=2.0)[0], 2 * plain(a, b, "TN") + bias.double())
    total = torch.ones_like(out)
    assert general_gemm(a, b, bias=bias, gelu=True, out=total, accumulate=True)[0] is total
    close(total, torch.nn.functional.gelu(before + 1, approximate="tanh"))
    a, b = operands("NT", device)
    close(general_gemm(a, b, layout="NT", grad=True, bias=bias.new_empty(16))[1], b.double().sum((0, 1)))
    a, b = operands("NN", device)
    x = before.detach().requires_grad_()
    (wanted,) = torch.autograd.grad(torch.nn.functional.gelu(x, approximate="tanh"), x, plain(a, b, "NN"))
    out, dbias, _, _ = general_gemm(a, b, layout="NN", grad=True, gelu=True, gelu_in=pre, bias=bias)
    close(out, wanted)
    close(dbias, wanted.sum((0, 1)))


@pytest.mark.parametrize("device", devices())
def test_quantized(device: str) -> None:
    a, b = (t.bfloat16() for t in operands("TN", device))
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=device)
    low = [quantizer(t) for t in (a, b)]
    found = general_gemm(*low, torch.float32)[0]
    close(found, plain(*[t.dequantize() for t in low], "TN"))
    assert torch.equal(
        general_gemm(a, b, quantization_params=quantizer)[0].dequantize(), quantizer(general_gemm(a, b)[0]).dequantize()
    )


def test_wrong_calls() -> None:
    a, b = operands("TN", "cpu")
    for error, options in (
        (ArgumentError, {"accumulate": True}),
        (ArgumentError, {"beta": 1.0}),
        (ArgumentError, {"gelu": True, "grad": True}),
        (ValueError, {"layout": "TT"}),
        (ArgumentError, {"layout": "NN"}),
        (UnsupportedError, {"bulk_overlap": True}),
    ):
        with pytest.raises(error, match="gemm"):
            general_gemm(a, b, **options)
