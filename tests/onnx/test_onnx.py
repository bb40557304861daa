"""Exported files, run by onnxruntime on the CPU: equal to what the modules give, however the exporter is called.

Nothing here skips where a package is missing: `make test-more` installs the extra `onnx`.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import te_torch as te
from te_core.layers.inspector import Inspector
from te_core.recipe import CustomRecipe
from te_torch.training.export import te_translation_table
from tests.covering import covering
from tests.export_cases import ACTIVATIONS, GATED, KINDS, OTHERS, PRODUCTS, RECIPES, Case, eager, exporting, made


class Looking(Inspector):
    request = frozenset({("fprop", "activation")})


ROOT = Path(__file__).resolve().parents[2]
#: Of the largest value. In float32 only the order of sums differs: an FP8 value next to a tie may fall on its other
#: side, which moves its products by a step of FP8, in one of thousands. In float16 the engine rounds in other places
#: (attention in between: more than once), and each of these moves FP8 values over ties.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
FP8_AFTER_HALF = 3e-2

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]


def export(module: Any, args: Any, named: Any, recipe: Any, path: Path, **options: Any) -> None:
    with exporting(recipe), redirect_stdout(io.StringIO()):
        torch.onnx.export(module, args, path, kwargs=named, **options)


def run(path: Path, args: Any, named: Any) -> list[np.ndarray[Any, Any]]:
    """The file's outputs, with the optimizations of a session that is asked for nothing else."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given: list[Any] = []
    for value in (*args, *named.values()):
        given += value if isinstance(value, tuple) else [value]
    tensors = [t.numpy() for t in given if isinstance(t, torch.Tensor)]
    names = [i.name for i in session.get_inputs()]
    return session.run(None, dict(zip(names, tensors, strict=True)))


def compare(values: Any, wanted: list[torch.Tensor], within: float) -> None:
    wanted = [t for t in wanted if t.numel()]  # an empty bias is no output of a file
    values = [v for v in values if v.size]
    for value, reference in zip(values, wanted, strict=True):
        exact = reference.double().numpy()
        assert value.shape == exact.shape
        error = np.abs(value.astype(np.float64) - exact).max() / np.abs(exact).max()
        assert error <= within, f"{error:.2e}"


def check(case: Case, kind: str, path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    recipe = RECIPES[kind]
    module, args, named = made(case, recipe, dtype)
    export(module, args, named, recipe, path, **options)
    within = TOLERANCE[dtype] if kind == "high" or dtype == torch.float32 else FP8_AFTER_HALF
    compare(run(path, args, named), eager(module, recipe, args, named), within)
    return module


@covering(name=PRODUCTS, kind=["delayed", "high", "current", "mxfp8"])
def test_modules(name: str, kind: str, tmp_path: Path) -> None:
    check(PRODUCTS[name], kind, tmp_path / "m.onnx")


#: Whose nodes are those of others in the list.
OF_THE_SAME_NODES = {
    *(f"LayerNormMLP {kind}" for kind in (*ACTIVATIONS, *GATED) if kind not in ("qgelu", "swiglu")),
    *(
        "LayerNorm",
        "RMSNorm centred",
        "output norm",
        "no_mask",
        "window",
        "padding_causal",
        "off-by-one",
        "alibi",
        "cross",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in OF_THE_SAME_NODES else []) for name in OTHERS]
)
def test_attention_norms_and_activations(name: str, tmp_path: Path) -> None:
    check(OTHERS[name], "delayed" if name.startswith("LayerNormMLP") else "high", tmp_path / "m.onnx")


@pytest.mark.parametrize("kind", sorted(RECIPES.keys() - set(KINDS)))
def test_options_of_recipes(kind: str, tmp_path: Path) -> None:
    check(PRODUCTS["Linear of odd sizes"], kind, tmp_path / "m.onnx")


@covering(name=["TransformerLayer", "Linear"], kind=KINDS)
def test_float16(name: str, kind: str, tmp_path: Path) -> None:
    check(PRODUCTS[name], kind, tmp_path / "m.onnx", torch.float16)


@pytest.mark.parametrize("kind", ["high", "delayed"])
def test_bfloat16(kind: str, tmp_path: Path) -> None:
    """onnxruntime has no bf16 products on the CPU: ONNX's own evaluator runs them."""
    import ml_dtypes
    import onnx
    from onnx.reference import ReferenceEvaluator

    recipe, path = RECIPES[kind], tmp_path / "m.onnx"
    module, args, named = made(PRODUCTS["LayerNormMLP"], recipe, torch.bfloat16)
    export(module, args, named, recipe, path)
    session = ReferenceEvaluator(onnx.load(path))
    x = args[0].float().numpy().astype(ml_dtypes.bfloat16)
    values = session.run(None, {session.input_names[0]: x})
    compare(values, eager(module, recipe, args, named), TOLERANCE[torch.bfloat16])


CALLS: dict[str, dict[str, Any]] = {
    "with the table": {"dynamo": True, "custom_translation_table": te_translation_table},
    "opset 19": {"opset_version": 19},
    "opset 23": {"opset_version": 23},
    "unoptimized": {"optimize": False},
    "TorchScript": {"dynamo": False},
}


@covering(call=CALLS, kind=["delayed", "high", "current"])
def test_however_the_exporter_is_called(call: str, kind: str, tmp_path: Path) -> None:
    check(PRODUCTS["TransformerLayer"], kind, tmp_path / "m.onnx", **CALLS[call])


@pytest.mark.parametrize("kind", ["delayed", *(pytest.param(k, marks=pytest.mark.full) for k in ("high", "current"))])
def test_batch_and_length_stay_open(kind: str, tmp_path: Path) -> None:
    recipe = RECIPES[kind]
    for name, wider in (("TransformerLayer with GQA", ()), ("padding before", (torch.rand(3, 1, 1, 9) > 0.7,))):
        module, args, _ = made({**PRODUCTS, **OTHERS}[name], recipe)
        shapes = ({0: "s", 1: "b"}, {0: "b", 3: "s"})[: len(args)]
        path = tmp_path / f"{len(args)}.onnx"
        export(module, args, {}, recipe, path, dynamic_shapes=shapes)
        inputs = (torch.randn(9, 3, 64), *wider)
        compare(run(path, inputs, {}), eager(module, recipe, inputs, {}), TOLERANCE[torch.float32])


def test_what_stands_in_a_file(tmp_path: Path) -> None:
    """Standard operators, FP8 in pairs with the module's scales as constants, and no name of this process."""
    import onnx
    from onnx import numpy_helper

    module = check(PRODUCTS["LayerNormMLP"], "delayed", tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [(o.domain, o.version >= 19) for o in model.opset_import] == [("", True)]
    graph, kept = model.graph, {t.name: t for t in model.graph.initializer}
    pairs = [n for n in graph.node if n.op_type == "QuantizeLinear"]
    assert len(pairs) == 4 and sum(n.op_type == "DequantizeLinear" for n in graph.node) == 4
    found = sorted(float(numpy_helper.to_array(kept[n.input[1]])) for n in pairs)
    scales = module.fp8_state.scale_fwd[[0, 1, 3, 4]]
    np.testing.assert_allclose(found, sorted((1 / scales).tolist()), rtol=1e-7)
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert kept[node.input[2]].data_type == onnx.TensorProto.FLOAT8E4M3FN
    text = str(model.graph.node)
    assert not re.search(r"te_runtime|linear/|mlp/|token", text)


@pytest.mark.parametrize("kind", ["delayed", "current", "mxfp8"])
def test_weights_held_quantized(kind: str, tmp_path: Path) -> None:
    """A file keeps their bytes where they are more than a few."""
    recipe = RECIPES[kind]
    with te.quantized_model_init(recipe=recipe):
        module = te.Linear(256, 512, device="cpu", bias=False).eval().requires_grad_(False)
    args = (torch.randn(8, 256),)
    wanted = eager(module, recipe, args, {})
    export(module, args, {}, recipe, tmp_path / "m.onnx", external_data=False)
    compare(run(tmp_path / "m.onnx", args, {}), wanted, TOLERANCE[torch.float32])
    assert (tmp_path / "m.onnx").stat().st_size < 256 * 512 * 2


def test_the_file_needs_nothing_of_ours(tmp_path: Path) -> None:
    recipe = RECIPES["delayed"]
    module, args, named = made(PRODUCTS["TransformerLayer"], recipe)
    export(module, args, named, recipe, tmp_path / "m.onnx")
    np.savez(tmp_path / "v.npz", x=args[0].numpy(), y=eager(module, recipe, args, named)[0].numpy())
    script = (
        "import sys, numpy as np, onnxruntime as ort; v = np.load('v.npz'); s = ort.InferenceSession('m.onnx')\n"
        "y, = s.run(None, {s.get_inputs()[0].name: v['x']})\n"
        "assert np.abs(y - v['y']).max() < 3e-6 * np.abs(v['y']).max() and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_module_that_never_ran_is_named(tmp_path: Path) -> None:
    model = torch.nn.Sequential(te.Linear(64, 64, device="cpu"))
    with exporting(RECIPES["delayed"]), redirect_stdout(io.StringIO()):
        with pytest.raises(Exception, match="Linear.*which has not run yet.*call the model once"):
            torch.onnx.export(model, (torch.randn(8, 64),), tmp_path / "m.onnx")


@covering(kind=["delayed", "mxfp8", "current"], dynamo=[True, False])
def test_an_opset_without_fp8_is_refused(kind: str, dynamo: bool, tmp_path: Path) -> None:
    module, args, _ = made(PRODUCTS["Linear"], RECIPES[kind])
    says = "opset_version=18. Allowed: 19 or newer.*pass opset_version=20"
    if kind == "mxfp8" and not dynamo:
        says = "MXFP8 by torch's older exporter.*pass dynamo=True"
    with pytest.raises(Exception, match=says):
        export(module, args, {}, RECIPES[kind], tmp_path / "m.onnx", opset_version=18, dynamo=dynamo)
    assert not (tmp_path / "m.onnx").exists()
    check(PRODUCTS["Linear"], "high", tmp_path / "m.onnx", opset_version=18, dynamo=dynamo)


def test_a_program_of_torch_export_is_refused_such_an_opset_too(tmp_path: Path) -> None:
    """Also outside of the context: it was traced in it."""
    recipe = RECIPES["delayed"]
    module, args, named = made(PRODUCTS["Linear"], recipe)
    with exporting(recipe):
        program = torch.export.export(module, args)
    with pytest.raises(Exception, match="opset_version=18. Allowed: 19 or newer"), redirect_stdout(io.StringIO()):
        torch.onnx.export(program, (), tmp_path / "m.onnx", opset_version=18)
    with redirect_stdout(io.StringIO()):
        torch.onnx.export(program, (), tmp_path / "m.onnx", opset_version=20)
    compare(run(tmp_path / "m.onnx", args, {}), eager(module, recipe, args, named), TOLERANCE[torch.float32])


class Twice(torch.nn.Module):
    """One layer in two places."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = self.second = te.LayerNormLinear(64, 64, device="cpu", **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Padded(torch.nn.Module):
    """Groups whose rows are filled up, as grouped products in FP8 want them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.pad, self.unpad = te.Fp8Padding(3), te.Fp8Unpadding(3)
        self.layer = te.GroupedLinear(3, 64, 32, device="cpu", **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded, sizes = self.pad(x, [7, 0, 5])
        return self.unpad(self.layer(padded, sizes), [7, 0, 5])


@covering(model=[Twice, Padded], kind=KINDS)
def test_modules_in_a_model(model: Any, kind: str, tmp_path: Path) -> None:
    check(Case(model, lambda: (torch.randn(12, 64),)), kind, tmp_path / "m.onnx")


def test_a_users_mistakes_are_named(tmp_path: Path) -> None:
    """In torch's error, whatever it wraps around: an inspector, a custom recipe, dropout in training."""
    inspected, custom, training = (made(PRODUCTS["TransformerLayer"], None)[0] for _ in range(3))
    inspected.self_attention.proj.inspector = Looking()
    args, recipe = (torch.randn(6, 2, 64),), CustomRecipe(qfactory=lambda role: None)
    for module, given, says in (
        (inspected, None, "module.inspector = None"),
        (custom, recipe, "CustomRecipe, whose factory"),
        (training.train(), None, r"call model.eval\(\) before the export"),
    ):
        with pytest.raises(Exception, match=says):
            export(module, args, {}, given, tmp_path / "m.onnx")


def test_the_document_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of docs/onnx.md, which need these packages."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "onnx.md").read_text(), re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), "docs/onnx.md", "exec"), {"__name__": "__main__"})
