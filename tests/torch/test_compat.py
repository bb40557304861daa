"""Scripts written for the documented package run on this one, unchanged; and its module `jit`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from te_core.errors import ArgumentError
from tests.backends import devices
from tests.programs import python

START = """
import runpy
import te_torch.compat
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# As such scripts are found in the wild; not one line of it knows this project.
TRANSFORMER = """
import sys
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.attention import RotaryPositionEmbedding

class Net(torch.nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.rope = RotaryPositionEmbedding(hidden // heads)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                hidden, 4 * hidden, heads, num_gqa_groups=heads // 2, layer_number=i + 1, hidden_dropout=0.0,
                attention_dropout=0.0, self_attn_mask_type="causal", normalization="RMSNorm", activation="swiglu",
                bias=False, fuse_qkv_params=True, params_dtype=torch.bfloat16,
            )
            for i in range(2)
        )

    def forward(self, x):
        angles = self.rope(x.shape[0])
        for layer in self.layers:
            x = layer(x, attention_mask=None, rotary_pos_emb=angles)
        return x

torch.manual_seed(1234)
device = sys.argv[1]
model = Net(64, 4).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
fp8_recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
x = torch.randn(16, 2, 64, dtype=torch.bfloat16, device=device)
target = torch.randn(16, 2, 64, dtype=torch.bfloat16, device=device)
losses = []
for step in range(8):
    optimizer.zero_grad()
    with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
        y = model(x)
    loss = torch.nn.functional.mse_loss(y.float(), target.float())
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] - 0.01, losses
torch.save(model.state_dict(), sys.argv[2])
again = Net(64, 4).to(device)
again.load_state_dict(torch.load(sys.argv[2], weights_only=True))
with torch.no_grad(), te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
    seen = model(x)
    assert torch.equal(again(x), seen)
    later = x.clone()
    later[9:] = 0
    assert torch.equal(model(later)[:9], seen[:9]), "causal"
print("trained", type(model.layers[0]).__module__)
"""


@pytest.mark.parametrize("device", devices())
def test_a_training_script(device: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRANSFORMER)
    done = python(START, str(tmp_path / "train.py"), device, str(tmp_path / "model.pt"))
    assert done.returncode == 0 and "trained transformer_engine.pytorch." in done.stdout, done.stderr[-2000:]


NAMES = """
import te_torch.compat, te_torch, te_torch.recipe, te_core, te_core.recipe
import transformer_engine
from te_torch.compat.contents import OURS
import transformer_engine.pytorch as te
from transformer_engine.pytorch import Linear
from transformer_engine.pytorch.module import LayerNormMLP
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import autocast
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format, MMParams, QParams, Recipe
assert te.Linear is Linear is te_torch.Linear and issubclass(LayerNormMLP, TransformerEngineBaseModule)
assert autocast is te.autocast and transformer_engine.__version__ == "2.20.0"
assert transformer_engine.__te_runtime__ == te_core.__version__ == te_torch.__version__
assert transformer_engine.common.recipe.Format is Format is te_core.recipe.Format is te_torch.recipe.Format
assert set(te_torch.__all__) - set(OURS) <= set(dir(te))
te_torch.compat.install()
assert sys.modules["transformer_engine.pytorch"] is te, "twice is once"
from transformer_engine.pytorch.torch_version import torch_version
assert te.torch_version is torch_version and torch_version() >= (2, 8), "the function hides its module"
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from transformer_engine.pytorch.fp8 import fp8_autocast
    assert te.fp8.check_fp8_support is te.quantization.check_fp8_support
assert fp8_autocast is te_torch.fp8_autocast and [w.category for w in seen] == [DeprecationWarning] * 2
for missing in ("transformer_engine.pytorch.nothing", "transformer_engine.jax"):
    try:
        __import__(missing)
    except ModuleNotFoundError as error:
        assert missing in str(error)
    else:
        raise AssertionError(missing)
try:
    from transformer_engine.pytorch import NoSuchLayer
except ImportError as error:
    assert "NoSuchLayer" in str(error)
print("ok")
"""


ATTENTION = """
import te_torch.compat
import transformer_engine.pytorch as te
assert te.attention.dot_product_attention.DotProductAttention is te.DotProductAttention
assert te.attention.DotProductAttention is te.DotProductAttention
assert te.attention.inference.InferenceParams is te.attention.InferenceParams is te.InferenceParams
assert te.transformer.TransformerLayer is te.TransformerLayer is te_torch.TransformerLayer
import transformer_engine_torch as tex
import te_torch
from transformer_engine.pytorch.graph import restore_fp8_tensors, save_fp8_tensors
from transformer_engine.pytorch.optimizers.fused_adam import FusedAdam
from transformer_engine.pytorch.utils import make_weak_ref
assert tex.thd_get_partitioned_indices is te_torch.thd_get_partitioned_indices and FusedAdam is te.optimizers.FusedAdam
assert len(te.constants.QKVLayouts) == 25 and te.constants.AttnTypes == ("self", "cross")
assert te.constants.AttnMaskTypes == (
    "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right", "arbitrary"
)

import os, torch
from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends
attention, q = te.DotProductAttention(2, 16), torch.ones(3, 1, 2, 16)
assert attention.explain(q, q, q).backend == "FusedAttention"
attention(q, q, q)
os.environ["NVTE_FUSED_ATTN"] = "0"
_attention_backends["backend_selection_requires_update"] = True
attention(q, q, q)
assert _attention_backends["backend_selection_requires_update"] is False, "the module reads this very dictionary"
assert attention.explain(q, q, q).backend == "UnfusedDotProductAttention"
print("ok")
"""


@pytest.mark.parametrize("program", [NAMES, ATTENTION], ids=["modules", "attention"])
def test_documented_names(program: str) -> None:
    done = python(program)
    assert done.returncode == 0 and "ok" in done.stdout.splitlines(), done.stderr[-2000:]


REFUSES = """
try:
    import te_torch.compat
except RuntimeError as error:
    assert "transformer_engine" in error.got and error.allowed and error.do
    assert "transformer_engine.pytorch" not in sys.modules
    import transformer_engine
    print(transformer_engine.real)
"""


def test_the_real_package_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("real = 'the real one'")
    for first in ("", "import transformer_engine\n"):
        done = python(first + REFUSES, path=str(tmp_path))
        assert "the real one" in done.stdout, done.stderr[-2000:]


def test_importing_te_torch_claims_no_name() -> None:
    done = python("import te_torch\nassert 'transformer_engine' not in sys.modules\nprint('ok')")
    assert "ok" in done.stdout, done.stderr[-2000:]


@pytest.fixture
def jit() -> Iterator[Any]:
    """Without the alias: classes say where they are of."""
    import te_torch.compat

    te_torch.compat.uninstall()
    from te_torch.compat import jit

    yield jit


def graphs(call: Callable[..., Any], *args: Any) -> tuple[int, list[str]]:
    """In how many programs a function compiles, and what was warned of."""
    count = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal count
        count += 1
        return graph.forward

    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.compile(call, backend=backend)(*args)
    return count, [str(w.message) for w in seen if "Falling back" in str(w.message)]


def test_functions_that_compilers_leave_out(jit: Any) -> None:
    traced = []

    def twice(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return x * by

    x = torch.randn(4)
    plain, out = (lambda x: twice(x + 1) - 1), jit.no_torch_dynamo()(twice)
    assert out.__name__ == "twice" and torch.equal(out(x), 2 * x)
    assert graphs(plain, x) == (1, [])
    traced.clear()
    assert graphs(lambda x: out(x + 1) - 1, x) == (2, []), "before it and behind it"
    assert traced == [False]


def test_calls_that_compilers_leave_out(jit: Any) -> None:
    asked = lambda call: "by 3 it is not traced" if call.get("by") == 3.0 else None  # noqa: E731

    @jit.no_torch_dynamo(when=asked)
    def times(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        return x * by

    x = torch.randn(4)
    assert torch.equal(times(x, 3.0), 3 * x)
    assert graphs(lambda x: times(x + 1) - 1, x) == (1, [])
    count, said = graphs(lambda x: times(x + 1, by=3.0) - 1, x)
    assert count == 2 and {text.partition(": ")[2] for text in said} == {"by 3 it is not traced"}
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(lambda x: times(x, 3.0), backend="eager", fullgraph=True)(x)
    with pytest.raises(ArgumentError, match="named arguments"):
        jit.no_torch_dynamo(when=asked)(lambda *args: args)


def test_functions_of_layers(jit: Any) -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    norm = x.float() / (x.float().square().sum(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(jit.l2normalization_fused(x, 0.1), norm.bfloat16())
    assert jit.set_jit_fusion_options() is None
    assert jit.warmup_jit_bias_gelu_all_dtypes(64, 32, 2) is None
