"""Attention in FP8 inside `onnx_export`, without an exporter: it rounds where eager code does, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from te_torch.attention import choose
from te_torch.export.handed import Handed
from tests.backends import requires_cuda
from tests.covering import covering
from tests.export_cases import (
    ATTENTION,
    FP8_ATTENTION,
    HEADS,
    OTHERS,
    PRODUCTS,
    RECIPES,
    Case,
    H,
    alike_in_fp8,
    eager,
    exporting,
    listed,
    made,
    region,
    rows,
)
from tests.tolerances import DB, snr_db

QKV, OUT, P = 2, 3, 8  # the places of attention's scales


def in_the_mode(case: Case, recipe: Any, dtype: torch.dtype = torch.float32) -> Any:
    """(module, arguments, what it gives in the mode, what it gives outside)."""
    module, args, named = made(case, recipe, dtype)
    wanted = eager(module, recipe, args, named)
    with exporting(recipe):
        return module, (args, named), [t.detach() for t in listed(module(*args, **named))], wanted


@covering(name=ATTENTION, kind=FP8_ATTENTION)
def test_as_eager_code(name: str, kind: str) -> None:
    _, _, values, wanted = in_the_mode(ATTENTION[name], FP8_ATTENTION[kind])
    for value, reference in zip(values, wanted, strict=True):
        assert value.dtype == reference.dtype
        alike_in_fp8(value, reference)


@covering(name=ATTENTION, kind=FP8_ATTENTION)
def test_as_the_emulation(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rounds the output in current scaling, too, and what was handed over a second time."""
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    _, _, values, wanted = in_the_mode(ATTENTION[name], FP8_ATTENTION[kind])
    for value, reference in zip(values, wanted, strict=True):
        alike_in_fp8(value, reference)


def test_a_bias_that_only_the_emulation_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    _, _, values, wanted = in_the_mode(OTHERS["bias"], FP8_ATTENTION["delayed"])
    alike_in_fp8(values[0], wanted[0])


@covering(kind=FP8_ATTENTION, dtype=[torch.float16, torch.bfloat16])
def test_halves(kind: str, dtype: torch.dtype) -> None:
    """Attention is float32 between its roundings: what comes out is equal to the last bit, but for a tie."""
    for name in ("DotProductAttention", "left padding", "packed"):
        _, _, values, wanted = in_the_mode(ATTENTION[name], FP8_ATTENTION[kind], dtype)
        assert values[0].dtype == dtype
        alike_in_fp8(values[0], wanted[0])


def rounded(t: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (t * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_by_its_formula(kind: str) -> None:
    """Causal, two heads of queries to one of keys."""
    module, (args, _), (value,), _ = in_the_mode(ATTENTION["DotProductAttention"], FP8_ATTENTION[kind])
    scales = module.fp8_state.scale_fwd
    q, k, v = (rounded(t, scales[QKV] if kind == "delayed" else 448 / t.abs().max()) for t in args)
    k, v = (t.repeat_interleave(2, dim=2) for t in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) / 4
    hidden = torch.ones(6, 6).triu(1).bool()
    p = rounded(scores.masked_fill(hidden, -torch.inf).softmax(-1), scales[P])
    out = torch.einsum("bhqk,kbhd->qbhd", p, v).flatten(2)
    alike_in_fp8(value, rounded(out, scales[OUT]) if kind == "delayed" else out)


@covering(name=["MultiheadAttention", "TransformerLayer with GQA"], kind=FP8_ATTENTION)
def test_each_operand_is_rounded_once(name: str, kind: str) -> None:
    """Two products with two operands each, P, the output, q k v: in one piece, or, turned, in three."""
    recipe = FP8_ATTENTION[kind]
    module, args, _ = made(PRODUCTS[name], recipe)
    wanted = eager(module, recipe, args, {})
    with exporting(recipe):
        program = torch.export.export(module, args)
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    # The projection's input comes handed over. With fp8_mha its output is q, k and v as they are read.
    products = {"MultiheadAttention": 2, "TransformerLayer with GQA": 4}[name]
    pieces = 1 if name == "MultiheadAttention" else 3
    assert calls.count("tex.fp8_quantize.default") == 2 * products - 1 + 2 + pieces
    assert calls.count("tex.fp8_dequantize.default") == 2 * products - 1 + 2 + pieces
    assert {c.split(".")[0] for c in calls} <= {"aten", "tex", "<built-in function getitem>"}
    for value, reference in zip(listed(program.module()(*args)), wanted, strict=True):
        alike_in_fp8(value.detach(), reference)


def test_scales_are_those_of_the_state() -> None:
    """A file has the scales there are: other ones of the projection's output are read with fp8_mha only."""
    for kind, moves in (("delayed", False), ("delayed mha", True)):
        recipe = FP8_ATTENTION[kind]
        module, args, _ = made(PRODUCTS["MultiheadAttention"], recipe)
        with exporting(recipe), torch.no_grad():
            before = module(*args)[0]
            module.layernorm_qkv.fp8_state.scale_fwd[2] *= 0.7
            assert torch.equal(before, module(*args)[0]) is not moves
            module.core_attention.fp8_state.scale_fwd[QKV] *= 0.7
            module.proj.fp8_state.scale_fwd[0] *= 0.7  # never read: what comes is in FP8 already
            after = module(*args)[0]
            for place in (OUT, P):
                module.core_attention.fp8_state.scale_fwd[place] *= 0.7
                assert not torch.equal(after, module(*args)[0])
                after = module(*args)[0]


WIDER: dict[str, Any] = {"TransformerLayer with GQA": (), "padding": (torch.zeros(3, 1, 1, 9).bool(),)}


@pytest.mark.more
@covering(name=WIDER, kind=["delayed mha", "current", "delayed"])
def test_sizes_stay_symbols(name: str, kind: str) -> None:
    s, b = torch.export.Dim("s", max=32), torch.export.Dim("b")
    recipe = FP8_ATTENTION[kind]
    module, args, _ = made(ATTENTION[name], recipe)
    with exporting(recipe):
        program = torch.export.export(module, args, dynamic_shapes=({0: s, 1: b}, {0: b, 3: s})[: len(args)])
    inputs = (torch.randn(9, 3, H), *WIDER[name])
    alike_in_fp8(program.module()(*inputs).detach(), eager(module, recipe, inputs, {})[0])


class Twice(torch.nn.Module):
    """One layer in two places: a tracer makes stand-ins of its parts."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = self.second = te.MultiheadAttention(H, HEADS, device="cpu", attention_dropout=0.0, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


def test_one_layer_in_two_places() -> None:
    recipe = FP8_ATTENTION["delayed mha"]
    module, args, _ = made(Case(Twice, rows), recipe)
    with exporting(recipe):
        program = torch.export.export(module, args)
    alike_in_fp8(program.module()(*args).detach(), eager(module, recipe, args, {})[0])
    casts = [node for node in program.graph.nodes if node.target is torch.ops.tex.fp8_quantize.default]
    assert len(casts) == 2 * 6


class Adapter(torch.nn.Module):
    """Around a projection, as fine-tuning libraries put one."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        out: torch.Tensor = self.base(x, *args)
        return out


@pytest.mark.parametrize("what", ["adapter", "projection's hook", "attention's hook"])
def test_modules_of_others_in_between_are_refused(what: str) -> None:
    """They might calculate with what is handed over; in a recipe that hands nothing over they are welcome."""
    recipe = FP8_ATTENTION["delayed"]
    module, args, _ = made(PRODUCTS["MultiheadAttention"], recipe)
    if what == "adapter":
        module.proj = Adapter(module.proj)
    else:
        part = module.proj if what.startswith("projection") else module.core_attention
        part.register_forward_pre_hook(lambda _, inputs: None)
    with exporting(recipe), pytest.raises(NotImplementedError, match="remove the hooks, merge an adapter"):
        module(*args)
    with exporting(RECIPES["delayed"]):
        module(*args)


def test_what_is_handed_over_is_a_tensor_to_modules() -> None:
    t = Handed(torch.ones(2, 3, 16), torch.bfloat16, None)
    assert (t.shape, t.ndim, t.dtype, t.device.type) == ((2, 3, 16), 3, torch.bfloat16, "cpu")
    assert t.is_floating_point() and not t.is_cuda and not t.requires_grad and t.to(torch.float16) is t
    assert t.view(6, 16).shape == (6, 16) and t.dequantize().dtype == torch.bfloat16


# --------------------------------------------------------------------------------------------------------- on a GPU


@requires_cuda
@pytest.mark.parametrize("kind", FP8_ATTENTION)
def test_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program beside cuDNN, whose exponentials and sums keep fewer digits; current scaling is emulated there."""
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    recipe = FP8_ATTENTION[kind]
    torch.manual_seed(0)
    options: dict[str, Any] = {"attention_dropout": 0.0, "params_dtype": torch.bfloat16, "device": "cuda"}
    module = te.MultiheadAttention(256, 2, **options).eval()
    args = (torch.randn(64, 2, 256, dtype=torch.bfloat16, device="cuda"),)
    for _ in range(2):
        with region(recipe):
            module(*args)
    wanted = eager(module, recipe, args, {})[0]
    plan = module.core_attention._last_plan
    assert plan is not None and (plan.backend == choose.UNFUSED) == (kind == "current")
    with exporting(recipe):
        program = torch.export.export(module, args)
    value = program.module()(*args).detach()
    assert value.is_cuda and snr_db(value.cpu(), wanted.cpu()) > DB["fp8 gemm"]
