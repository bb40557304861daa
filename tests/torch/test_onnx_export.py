"""`onnx_export` without an exporter: what a module is in it equals what it is outside, and what has no form says so."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._decomp import decomposition_table

import te_torch as te
from te_torch.export.mode import exporting as mode
from te_torch.export.operators import fp8_quantize, held_values, mxfp8_dequantize, mxfp8_quantize, power_of_two
from te_torch.training.export import assert_warmed_up, is_in_onnx_export_mode, te_translation_table
from tests.backends import requires_cuda
from tests.covering import covering
from tests.export_cases import KINDS, OTHERS, PRODUCTS, RECIPES, eager, exporting, listed, made, region
from tests.tolerances import DB, snr_db

ROOT = Path(__file__).resolve().parents[2]


def close(value: torch.Tensor, reference: torch.Tensor, within: float) -> None:
    """Against the largest value; NaN nowhere."""
    assert value.shape == reference.shape and value.dtype == reference.dtype
    if not reference.numel():
        return
    error = (value.double() - reference.double()).abs().max() / max(1e-30, reference.double().abs().max())
    assert error <= within, f"{error:.2e}"


# ------------------------------------------------------------------------------------------------- the same values


def traced(name: str, recipe: Any) -> tuple[Any, Any, Any, list[torch.Tensor]]:
    """(the program of torch.export, its inputs, its named ones, what the module gives outside of the mode)."""
    module, args, named = made({**PRODUCTS, **OTHERS}[name], recipe)
    wanted = eager(module, recipe, args, named)
    with exporting(recipe):
        inside = listed(module(*args, **named))
        program = torch.export.export(module, args, named)
    for value, reference in zip(inside, wanted, strict=True):
        close(value.detach(), reference, 2e-6)
    return program, args, named, wanted


#: Groups in high precision and both modules with several scales in delayed scaling are among those that run by default.
ORDER = (
    "Linear",
    "Linear in parts",
    "Linear of odd sizes",
    "LayerNormLinear",
    "LayerNormMLP",
    "TransformerLayer with GQA",
)


@covering(
    name=[*ORDER, *(name for name in PRODUCTS if name not in ORDER)],
    kind=("delayed", "high", "current", "mxfp8", "delayed e4m3", "current pow2", "mxfp8 tiled"),
)
def test_a_module_is_exported_as_it_computes(name: str, kind: str) -> None:
    program, args, named, wanted = traced(name, RECIPES[kind])
    # float32 in another order; an FP8 value that this moves over a tie is one cast apart, in one of thousands.
    for value, reference in zip(listed(program.module()(*args, **named)), wanted, strict=True):
        close(value.detach(), reference, 2e-6)
    used = {str(node.target).split(".")[0] for node in program.graph.nodes if node.op == "call_function"}
    assert used <= {"aten", "tex", "<built-in function getitem>"}
    assert ("tex" in used) == (kind != "high")
    texts = [a for node in program.graph.nodes for a in node.args if isinstance(a, str)]
    assert set(texts) <= {"none"}, "of this process"


@pytest.mark.parametrize("name", OTHERS)
def test_attention_and_the_rest(name: str) -> None:
    """As it computes in the mode: tests/onnx exports them."""
    module, args, named = made(OTHERS[name], None)
    wanted = eager(module, None, args, named)
    with exporting(None):
        for value, reference in zip(listed(module(*args, **named)), wanted, strict=True):
            close(value.detach(), reference, 2e-6)


@covering(kind=KINDS, dtype=[torch.float16, torch.bfloat16])
def test_halves(dtype: torch.dtype, kind: str) -> None:
    """FP8 products are rounded once, from float32."""
    recipe = RECIPES[kind]
    for name, within in (("Linear", 1.0), ("LayerNormMLP", 8.0)):
        module, args, named = made(PRODUCTS[name], recipe, dtype)
        wanted = eager(module, recipe, args, named)
        with exporting(recipe):
            close(module(*args).detach(), wanted[0], within * torch.finfo(dtype).eps)


def test_a_program_runs_in_another_process(tmp_path: Path) -> None:
    """Which knows the operators, and nothing of the model."""
    recipe = RECIPES["delayed"]
    program, args, _, wanted = traced("LayerNormMLP", recipe)
    torch.export.save(program, tmp_path / "layer.pt2")
    torch.save((args, wanted), tmp_path / "values.pt")
    script = (
        "import sys, torch, te_torch.export.operators; from pathlib import Path; here = Path(sys.argv[1])\n"
        "args, wanted = torch.load(here / 'values.pt')\n"
        "torch.testing.assert_close(torch.export.load(here / 'layer.pt2').module()(*args), wanted[0])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("name", "wider"),
    [
        ("TransformerLayer with GQA", ()),
        pytest.param("padding before", (torch.zeros(3, 1, 1, 9).bool(),), marks=pytest.mark.full),
    ],
    ids=["angles and groups", "padding"],
)
def test_sizes_stay_symbols(name: str, wider: Any) -> None:
    """A program for any batch and any length, also with angles, groups and padding."""
    module, args, _ = made({**PRODUCTS, **OTHERS}[name], None)
    s, b = torch.export.Dim("s", max=32), torch.export.Dim("b")
    shapes = ({0: s, 1: b}, {0: b, 3: s})[: len(args)]
    with exporting(None):
        program = torch.export.export(module, args, dynamic_shapes=shapes)
    inputs = (torch.randn(9, 3, 64), *wider)
    close(program.module()(*inputs).detach(), eager(module, None, inputs, {})[0], 2e-6)


# ------------------------------------------------------------------------------------------------- the operators


def test_fp8_is_the_cast_of_the_library() -> None:
    x = torch.randn(64, 48) * torch.logspace(-4, 4, 48)
    scale = torch.tensor(3.7)
    kinds = te.constants.DType
    for dtype, kind in ((torch.float8_e4m3fn, kinds.kFloat8E4M3), (torch.float8_e5m2, kinds.kFloat8E5M2)):
        quantizer = te.Float8Quantizer(scale.view(1), torch.zeros(1), kind)
        ours = fp8_quantize(x, scale, dtype)
        held = quantizer(x)
        assert torch.equal(ours.view(torch.uint8), held._data)
        assert torch.equal(held_values(held._data, held._scale_inv, (64, 48), dtype), held.dequantize())


def test_powers_of_two_are_exact() -> None:
    """At each power of two, and next to it on both sides."""
    exponents = torch.arange(-125, 127).float()
    powers = torch.exp2(exponents)
    above, below = torch.nextafter(powers, torch.tensor(torch.inf)), torch.nextafter(powers, torch.tensor(0.0))
    for v, up, down in ((powers, 0, 0), (above, 1, 0), (below, 0, -1)):
        assert torch.equal(power_of_two(v, True), exponents + up)
        assert torch.equal(power_of_two(v, False), exponents + down)


@pytest.mark.parametrize("tiled", [False, True])
def test_mxfp8_is_the_cast_of_the_library(tiled: bool) -> None:
    """Blocks from the smallest numbers to the largest, with zeros, and a width that is not whole blocks."""
    torch.manual_seed(1)
    x = torch.randn(70, 75) * torch.exp2(torch.linspace(-140, 126, 70))[:, None]
    x[3] = 0
    quantizer = te.MXFP8Quantizer(te.constants.DType.kFloat8E4M3)
    if not tiled:
        padded = torch.nn.functional.pad(x, (0, 21, 0, 26))
        held = quantizer(padded).dequantize()[:70, :75]
        assert torch.equal(mxfp8_dequantize(*mxfp8_quantize(x, torch.float8_e4m3fn)), held)
        return
    q, e = mxfp8_quantize(x, torch.float8_e4m3fn, True)
    for tile in range(3):
        assert len(set(e[32 * tile : 32 * tile + 32, 0].tolist())) == 1
    largest = x[:32, :32].abs().max().double() / 448
    assert 2.0 ** (int(e[0, 0]) - 128) < largest <= 2.0 ** (int(e[0, 0]) - 127)


# ------------------------------------------------------------------------------------------------------ the mode


def test_the_mode_nests_ends_and_belongs_to_its_thread() -> None:
    compiling = torch.compiler.is_compiling
    assert not is_in_onnx_export_mode() and te_translation_table == {}
    with te.onnx_export():
        assert not is_in_onnx_export_mode() and not compiling()
    with te.onnx_export(True):
        assert is_in_onnx_export_mode() and compiling()
        with te.onnx_export(enabled=False):
            assert not is_in_onnx_export_mode() and not compiling()
        assert is_in_onnx_export_mode() and compiling()
        seen = []
        other = threading.Thread(target=lambda: seen.append(mode.on))
        other.start(), other.join()
        assert seen == [False]
    with pytest.raises(KeyError), te.onnx_export(True):
        raise KeyError
    assert not is_in_onnx_export_mode() and not compiling()


def test_an_export_leaves_a_module_as_it_was() -> None:
    """Scales, histories, what is due: nothing moves, whether the region is around the mode or in it, with gradients."""
    recipe = RECIPES["delayed"]
    module, args, _ = made(PRODUCTS["LayerNormMLP"], recipe)
    before = copy.deepcopy(module.fp8_state.state_dict())
    with te.onnx_export(True), region(recipe):
        torch.export.export(module, args)
        module(*args)
    with region(recipe), te.onnx_export(True):
        module(*args)
    after = module.fp8_state.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    plain = te.Linear(64, 32, device="cpu")
    with pytest.raises(AssertionError), exporting(recipe):
        plain(*args)
    assert plain.fp8_state is None


def test_weights_held_quantized() -> None:
    for kind in ("delayed", "current", "mxfp8"):
        recipe = RECIPES[kind]
        with te.quantized_model_init(recipe=recipe):
            module = te.Linear(64, 96, device="cpu").eval()
        x = torch.randn(8, 64)
        with pytest.raises(NotImplementedError, match=r"model.requires_grad_\(False\)"), region(recipe):
            with torch.no_grad():
                module(x)
            with te.onnx_export(True):
                module(x)
        module.requires_grad_(False)
        wanted = eager(module, recipe, (x,), {})[0]
        with exporting(recipe):
            close(torch.export.export(module, (x,)).module()(x), wanted, 2e-6)


# -------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.more
def test_packages_that_are_missing_are_named() -> None:
    """By torch's exporter, whose packages they are; the context itself needs none."""
    script = (
        "import sys, torch, te_torch as te\n"
        "module = te.Linear(8, 8, device='cpu').eval()\n"
        "for missing in ('onnx', 'onnxscript'):\n"
        "    sys.modules[missing] = None\n"
        "    try:\n"
        "        with te.onnx_export(enabled=True):\n"
        "            torch.onnx.export(module, (torch.randn(2, 8),), 'm.onnx', dynamo=True)\n"
        "    except ImportError as error: print(error)\n"
        "    del sys.modules[missing]"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    named = done.stdout.splitlines()
    assert len(named) == 2 and all("onnx" in error for error in named), (done.stdout, done.stderr[-500:])


def test_an_opset_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decomposition finds what torch.onnx.export was given, however far down it is called."""
    decomposed = decomposition_table[mxfp8_quantize.default]

    def export(opset_version: int | None = None) -> None:
        (lambda: decomposed(torch.ones(2, 32), torch.float8_e4m3fn))()

    monkeypatch.setattr(torch.onnx, "export", export)
    for opset in (None, 19, 24):
        export(opset)
    decomposed(torch.ones(2, 32), torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="opset_version=18. Allowed: 19 or newer.*pass opset_version=20"):
        export(18)


def test_warmed_up() -> None:
    module = te.Linear(8, 8, device="cpu")
    module(torch.randn(2, 8))
    assert_warmed_up(torch.nn.Sequential(module, torch.nn.ReLU()))


# --------------------------------------------------------------------------------------------------------- on a GPU


@requires_cuda
@pytest.mark.parametrize("kind", ["high", "delayed", "current"])
def test_on_a_gpu(kind: str) -> None:
    """The program of a model on a GPU, beside the FP8 products of its tensor cores, whose sums keep fewer digits."""
    recipe = RECIPES[kind]
    for name, least in (("Linear", DB["fp8 fast"] - 4), ("TransformerLayer", DB["fp8 gemm"])):
        module, args, _ = made(PRODUCTS[name], None)
        module, args = module.cuda(), tuple(t.cuda() for t in args)
        for _ in range(2):
            with region(recipe):
                module(*args)
        wanted = eager(module, recipe, args, {})[0]
        with exporting(recipe):
            program = torch.export.export(module, args)
        value = program.module()(*args).detach()
        assert value.is_cuda and snr_db(value.cpu(), wanted.cpu()) > least
