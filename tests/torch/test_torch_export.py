"""`torch.export` of modules as they are: its programs run in other processes, and say there what they compute."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.layers.inspector import Inspector
from te_core.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling
from te_torch.calls import call_of
from te_torch.program_names import read, written
from tests.backends import requires_cuda
from tests.export_cases import OTHERS, PRODUCTS, RECIPES, eager, made, region

ROOT = Path(__file__).resolve().parents[2]
#: Loads each program, runs it, and compares all bits; what is exported is not imported.
ELSEWHERE = """
import sys, torch, te_torch
from pathlib import Path
torch.set_num_threads(1)
for path in sorted(Path(sys.argv[1]).glob("*.pt2")):
    args, named, wanted = torch.load(path.with_suffix(".pt"), weights_only=False)
    made = torch.export.load(path).module()(*args, **named)
    for value, reference in zip(made if isinstance(made, (tuple, list)) else [made], wanted, strict=True):
        assert torch.equal(value, reference), path.name
"""
BRIEF = [
    ("Linear", "delayed"),
    ("GroupedLinear", "current"),
    ("TransformerLayer with GQA", "mxfp8"),
    ("packed", "high"),
    ("MultiheadAttention", "attention in FP8"),
]
LONGER = [
    ("LayerNormMLP", "current"),
    ("TransformerLayer with GQA", "delayed"),
    ("padding_causal", "high"),
    ("learnable", "high"),
    ("interleaved", "high"),
]
ALL = [(name, kind) for name in {**PRODUCTS, **OTHERS} for kind in (RECIPES if name in PRODUCTS else ("high",))]


def program_of(module: Any, recipe: Any, args: Any, named: Any = None) -> Any:
    with torch.no_grad(), region(recipe):
        return torch.export.export(module, args, named)


@pytest.mark.parametrize(
    "cases",
    [BRIEF, pytest.param(LONGER, marks=pytest.mark.more), pytest.param(ALL, marks=pytest.mark.full)],
    ids=["some", "more", "all"],
)
def test_programs_run_in_another_process(cases: list[tuple[str, str]], tmp_path: Path) -> None:
    for i, (name, kind) in enumerate(cases):
        recipe = DelayedScaling(fp8_dpa=True, fp8_mha=True) if kind == "attention in FP8" else RECIPES[kind]
        module, args, named = made({**PRODUCTS, **OTHERS}[name], recipe)
        wanted = eager(module, recipe, args, named)
        program = program_of(module, recipe, args, named)
        torch.export.save(program, tmp_path / f"{i} {name} {kind}.pt2")
        torch.save((args, named, wanted), tmp_path / f"{i} {name} {kind}.pt")
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_program_says_what_it_computes() -> None:
    """In place of a name: the layer and its spec, of which another process makes the same."""
    recipe = RECIPES["delayed"]
    module, args, _ = made(PRODUCTS["Linear"], recipe)
    program = program_of(module, recipe, args)
    (node,) = (n for n in program.graph.nodes if "te_runtime" in str(n.target))
    key, rule = (a for a in node.args if isinstance(a, str))
    name, _, text = key.partition(" ")
    spec, needs_grad = read(text)
    assert name == "linear" and spec == call_of(key).spec and needs_grad is False
    assert read(rule) == spec.precision and read(rule).history.length == 2


def test_an_export_makes_no_states() -> None:
    """Neither for the module, nor for others like it: in a trace they would be made of nothing."""
    recipe = RECIPES["delayed"]
    other = te.Linear(64, 96, device="cpu").eval()
    with pytest.raises(AssertionError, match="which has not run yet.*call the model once"):
        program_of(te.Linear(64, 96, device="cpu").eval(), recipe, (torch.randn(8, 64),))
    module, args, _ = made(PRODUCTS["Linear"], recipe)
    program_of(module, recipe, args)
    assert other.fp8_state is None
    with region(recipe):
        other(*args)


class Looking(Inspector):
    request = frozenset({("fprop", "activation")})


@dataclass(frozen=True)
class Foreign:
    number: int


class Doubled(te.Quantizer):  # type: ignore[misc]
    """A quantizer of a user's own."""

    def __init__(self) -> None:
        super().__init__(rowwise=True, columnwise=True)

    def quantize_impl(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _largest(history: torch.Tensor) -> torch.Tensor:
    return history.amax(0)


def test_what_no_other_process_has_is_refused() -> None:
    x = torch.randn(32, 64)
    module = te.Linear(64, 64, device="cpu").eval()
    module.inspector = Looking()
    with pytest.raises(RuntimeError, match=r"a module with an inspector.*module.inspector = None"):
        program_of(module, None, (x,))
    says = "which no other process has.*a recipe of te_core.recipe without functions"
    for recipe in (CustomRecipe(qfactory=lambda role: Doubled()), DelayedScaling(amax_compute_algo=_largest)):
        module = te.Linear(64, 64, device="cpu").eval()
        with region(recipe):
            module(x)
        with pytest.raises(RuntimeError, match=says):
            program_of(module, recipe, (x,))


def test_slopes_of_a_trace_stay_in_it() -> None:
    """Eager code keeps the slopes of ALiBi; those of a trace are no tensors that it could use."""
    module = te.DotProductAttention(6, 16, attn_mask_type="causal")
    qkv = tuple(torch.randn(8, 2, 6, 16) for _ in range(3))
    program = program_of(module, None, qkv, {"core_attention_bias_type": "alibi"})
    wanted = module(*qkv, core_attention_bias_type="alibi")
    assert torch.equal(program.module()(*qkv, core_attention_bias_type="alibi"), wanted)


def test_attention_that_runs_eagerly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    recipe = DelayedScaling(fp8_dpa=True)
    module, args, _ = made(PRODUCTS["TransformerLayer"], recipe)
    with pytest.raises(RuntimeError, match="outside of compiled graphs.*without score_mod, checkpoint_core"):
        program_of(module.train(), recipe, args, {"checkpoint_core_attention": True})


HANDED = [(Float8CurrentScaling, False, False), (DelayedScaling, True, True)]
HANDED_IN_FULL = list(itertools.product((Float8CurrentScaling, DelayedScaling), (False, True), (False, True)))


@pytest.mark.more
@pytest.mark.parametrize("cases", [HANDED, pytest.param(HANDED_IN_FULL, marks=pytest.mark.full)], ids=["some", "all"])
def test_attention_in_fp8(cases: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between projections that hand FP8 on, too; where scores are tensors, their rounding is in the program."""
    for i, (recipe, emulated, handed) in enumerate(cases):
        monkeypatch.setenv("NVTE_FUSED_ATTN", "0" if emulated else "1")
        monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1" if emulated else "0")
        rule = recipe(fp8_dpa=True, fp8_mha=handed)
        module, args, named = made(PRODUCTS["MultiheadAttention"], rule)
        wanted = eager(module, rule, args, named)
        torch.export.save(program_of(module, rule, args, named), tmp_path / f"{i}.pt2")
        torch.save((args, named, wanted), tmp_path / f"{i}.pt")
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_texts_are_read_as_data_of_this_library_alone() -> None:
    spec = call_of_linear().spec
    assert read(written((spec, 1.5, None, True, float("inf")))) == (spec, 1.5, None, True, float("inf"))
    assert read(written(spec)).precision is read(written(spec)).precision
    with pytest.raises(RuntimeError, match="'Foreign'"):
        written(Foreign(1))
    for text in ('["os:system","true"]', '["te_core.env:chosen",{}]', '["te_torch.nothing:Spec",{}]'):
        with pytest.raises((ValueError, ImportError)):
            read(text)
    with pytest.raises(ValueError, match="export the model again with this version"):
        call_of("linear/0123456789abcdef")


def call_of_linear() -> Any:
    module, _, _ = made(PRODUCTS["Linear"], RECIPES["delayed"])
    return module._last


def test_a_module_that_stands_in_two_places() -> None:
    """torch's tracer gives such modules stand-ins, of classes of its own."""
    layer = te.LayerNormLinear(64, 64, device="cpu").eval()
    model, x = torch.nn.Sequential(layer, torch.nn.Tanh(), layer), torch.randn(4, 64)
    with torch.no_grad():
        torch.testing.assert_close(program_of(model, None, (x,)).module()(x), model(x), rtol=0, atol=0)
        with te.onnx_export(enabled=True):
            program = torch.export.export(model, (x,))
        torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=2e-6)


OF_LENGTHS: dict[str, tuple[Any, Any]] = {
    "LayerNorm": (lambda: te.LayerNorm(64, device="cpu"), lambda s, b: (torch.randn(s, b, 64),)),
    "LayerNormMLP": (lambda: te.LayerNormMLP(64, 96, device="cpu"), lambda s, b: (torch.randn(s, b, 64),)),
    "GroupedLinear": (
        lambda: te.GroupedLinear(2, 64, 96, device="cpu"),
        lambda s, b: (torch.randn(s * b, 64), torch.tensor([s, s * (b - 1)])),
    ),
    "cross attention": (
        lambda: te.DotProductAttention(6, 16, attn_mask_type="no_mask"),
        lambda s, b: (torch.randn(s, b, 6, 16), *torch.randn(2, s + 3, b, 6, 16)),
    ),
    "TransformerLayer": (
        lambda: te.TransformerLayer(64, 96, 2, self_attn_mask_type="padding_causal", device="cpu"),
        lambda s, b: (torch.randn(s, b, 64), (torch.arange(s) >= s - torch.arange(b)[:, None] % s)[:, None, None, :]),
    ),
}
OFTEN = [("LayerNorm", "high"), ("cross attention", "high"), ("TransformerLayer", "delayed")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*case, marks=[] if case in OFTEN else [pytest.mark.more])
        for case in itertools.product(OF_LENGTHS, RECIPES)
        if case[1] == "high" or case[0] not in ("LayerNorm", "cross attention")
    ],
)
def test_lengths_and_batches_that_vary(name: str, kind: str) -> None:
    """The program of one size, saved and loaded, computes for others what the module does."""
    torch.manual_seed(0)
    make, given = OF_LENGTHS[name]
    module, recipe, auto = make().eval(), RECIPES[kind], torch.export.Dim.AUTO
    with torch.no_grad(), region(recipe):
        for _ in range(2):
            module(*given(96, 3))
        args = given(96, 3)
        sizes = [{i: auto for i, n in enumerate(t.shape) if n in (96, 3, 99, 288)} or None for t in args]
        sizes = [None if t.dtype == torch.int64 else own for t, own in zip(args, sizes, strict=True)]
        file = io.BytesIO()
        torch.export.save(torch.export.export(module, args, dynamic_shapes=tuple(sizes)), file)
    file.seek(0)
    program = torch.export.load(file).module()
    for tokens, batch in ((96, 3), (32, 5), (128, 2), (64, 40)):
        args = given(tokens, batch)
        wanted = eager(module, recipe, args, {})
        with torch.no_grad():
            found = program(*args)
        assert torch.equal(found[0] if isinstance(found, tuple) else found, wanted[0]), (tokens, batch)


@requires_cuda
@pytest.mark.parametrize("kind", ["high", "delayed", "current"])
def test_on_a_gpu(kind: str, tmp_path: Path) -> None:
    """The program of a model on a GPU, here and in another process: the same kernels."""
    recipe = RECIPES[kind]
    module, args, _ = made(PRODUCTS["TransformerLayer with GQA"], None, torch.bfloat16)
    module, args = module.cuda(), tuple(t.cuda() for t in args)
    for _ in range(2):
        with region(recipe), torch.no_grad():
            module(*args)
    wanted = eager(module, recipe, args, {})
    program = program_of(module, recipe, args)
    torch.testing.assert_close(program.module()(*args), wanted[0])
    torch.export.save(program, tmp_path / "layer.pt2")
    torch.save((args, {}, wanted), tmp_path / "layer.pt")
    exact = "assert torch.equal(value, reference), path.name"
    assert exact in ELSEWHERE
    script = ELSEWHERE.replace(exact, "torch.testing.assert_close(value, reference)")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
