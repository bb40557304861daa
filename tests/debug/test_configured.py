"""Features by a configuration: what they do to a layer, what they say of it, and layers that none touches."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import te_torch as te
from te_core import dtypes
from te_core.backends.cpu import codec
from te_torch.debug.watched import products_of
from tests import recipes
from tests.backends import on_devices
from tests.core.covering_lists import covering_lists
from tests.debug import conftest
from tests.debug.conftest import FEATURES, MODULES, ROWS, WIDE, WIDTH, config, differ, step, values

made = partial(conftest.made, bias=False)
Debugging = Callable[..., Any]


def logging(stats: list[Any], *tensors: str, feature: str = "LogTensorStats", **keys: Any) -> dict[str, Any]:
    return config(**{feature: {"stats": stats, "tensors": list(tensors), **keys}})


# ------------------------------------------------------------------------------------ what is not looked at


def test_iterations_that_nobody_looks_at(debugging: Debugging) -> None:
    session = debugging(logging(["max"], "activation", freq=3, start_step=2, end_step=7))
    module, looked = made("Linear"), []
    for _ in range(12):
        step(module, values(), "current")
        looked.append(module.inspector is not None)
        session.step()
    assert [i for i, yes in enumerate(looked) if yes] == [3, 6]
    assert len(module._calls) == 2, "with an inspector and without one"
    assert {i for _, i in session.statistics()} == {3, 6}


def test_each_feature_keeps_its_schedule(debugging: Debugging) -> None:
    """Two that look at one tensor: neither looks when the other one does."""
    values_of = {"stats": ["max"], "tensors": ["activation", "gradient"], "freq": 3}
    casts = {"stats": ["scale_inv_max"], "tensors": ["activation", "gradient", "weight"], "freq": 4, "start_step": 1}
    session = debugging(config(LogTensorStats=values_of, LogFp8TensorStats=casts))
    module = made("Linear")
    for _ in range(10):
        step(module, values(), "current")
        session.step()
    seen: dict[str, list[int]] = {}
    for name, iteration in session.statistics():
        seen.setdefault(name.removeprefix("layer_"), []).append(iteration)
    for tensor in ("activation", "gradient"):
        assert seen.pop(f"{tensor}_max") == [0, 3, 6, 9]
    assert set(seen) == {f"{tensor}_scale_inv_max" for tensor in casts["tensors"]}
    assert all(iterations == [4, 8] for iterations in seen.values())


def test_copies_and_modules_of_before(debugging: Debugging) -> None:
    before = made("Linear")
    session = debugging(logging(["cur_amax"], "activation"))
    twin = copy.deepcopy(before)
    twin.name = "twin"
    for module in (before, twin):
        step(module, values(), "current")
    session.step()
    assert {name for name, _ in session.statistics()} == {"layer_activation_cur_amax", "twin_activation_cur_amax"}
    assert pickle.loads(pickle.dumps(before)).name == "layer"
    gc.collect()


# ---------------------------------------------------------------------------------------- high precision


@on_devices
@covering_lists(pytest.mark.parametrize("kind", MODULES), pytest.mark.parametrize("recipe", recipes.KINDS))
def test_a_layer_in_high_precision(debugging: Debugging, kind: str, recipe: str, device: str) -> None:
    x, module = values(device), made(kind, device)
    plain = step(module, x)
    debugging(config(DisableQuantizationLayer={}))
    found = step(module, x, recipe)
    assert differ(found, plain) == []


@pytest.mark.parametrize(("name", "keys"), [("Layer", {}), ("GEMM", {"gemms": ["fprop", "dgrad", "wgrad"]})])
def test_older_names_warn(debugging: Debugging, name: str, keys: dict[str, Any]) -> None:
    module = made("Linear")
    plain = step(module, values())
    debugging(config(**{f"DisableFP8{name}": keys}))
    with pytest.warns(DeprecationWarning, match=f"DisableQuantization{name}"):
        assert differ(step(module, values(), "current"), plain) == []


# -------------------------------------------------------------------------------------------- statistics


def looked(session: Any, x: torch.Tensor | None = None, recipe: str | None = "current") -> dict[tuple[str, int], float]:
    """The statistics of a step of a Linear."""
    step(made("Linear"), values() if x is None else x, recipe)
    session.step()
    return session.statistics()  # type: ignore[no-any-return]


@on_devices
def test_statistics_of_every_tensor(debugging: Debugging, device: str) -> None:
    stats = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"]
    tensors = ["activation", "weight", "gradient", "output", "dgrad", "wgrad"]
    session = debugging(logging(stats, *tensors))
    module, x = made("Linear", device), values(device)
    of_step = step(module, x)
    session.step()
    found = session.statistics()
    dy = torch.linspace(-1, 1, of_step["y"].numel(), device=device).view_as(of_step["y"]).to(torch.bfloat16)
    of = {"activation": x, "weight": module.weight, "gradient": dy, "output": of_step["y"], "dgrad": of_step["x"]}
    of["wgrad"] = of_step["weight"]
    for tensor, t in of.items():
        v = t.detach().double()
        magnitude = v.abs()
        want = {
            "min": v.min(),
            "max": v.max(),
            "mean": v.mean(),
            "std": v.std(),
            "l1_norm": magnitude.sum(),
            "l2_norm": v.norm(),
            "cur_amax": magnitude.max(),
            "dynamic_range": magnitude.max().log2() - magnitude[magnitude > 0].min().log2(),
        }
        for stat, value in want.items():
            assert found[f"layer_{tensor}_{stat}", 0] == pytest.approx(value.item(), rel=1e-5, abs=1e-4), (tensor, stat)
    assert len(found) == len(stats) * len(tensors)


def quantized_by_formula(v: torch.Tensor, scale: float) -> torch.Tensor:
    """What E4M3 makes of it, by integer arithmetic on the bits."""
    bits = (v.float() * scale).cpu().numpy().view("uint32")
    codes = codec.fp8_codes(bits, dtypes.float8_e4m3).view(dtypes.float8_e4m3.numpy)
    return torch.from_numpy(codes.astype("float64")) / scale


@on_devices
def test_statistics_of_what_a_cast_makes(debugging: Debugging, device: str) -> None:
    stats = ["underflows%", "scale_inv_min", "scale_inv_max", "mse"]
    session = debugging(logging(stats, "activation", feature="LogFp8TensorStats"))
    module, x = made("Linear", device), values(device)
    with torch.no_grad():
        x *= torch.logspace(-6, 3, WIDTH, device=device)
    step(module, x, "current")
    session.step()
    found = session.statistics()
    v = x.detach().cpu().double()
    scale = float(torch.tensor(448.0) / v.abs().max().float())
    q = quantized_by_formula(v, scale)
    lost = 100 * (v.count_nonzero() - q.count_nonzero()).item() / v.numel()
    assert lost > 5
    assert found["layer_activation_underflows%", 0] == pytest.approx(lost, abs=1e-4)
    assert found["layer_activation_mse", 0] == pytest.approx(((v - q) ** 2).mean().item(), rel=1e-3)
    assert found["layer_activation_scale_inv_max", 0] == pytest.approx(1 / scale, abs=1e-4)


@pytest.mark.parametrize("recipe", recipes.KINDS[:4])
def test_statistics_of_other_recipes(debugging: Debugging, recipe: str) -> None:
    names = {"current": "fp8_current_scaling", "block": "fp8_block_scaling", "mxfp8": "mxfp8"}
    stats = [f"{name}_{stat}" for name in names.values() for stat in ("mse", "underflows%")]
    stats += ["mse", "mxfp8_mse_columnwise", "fp8_block_scaling_scale_inv_max_columnwise"]
    session = debugging(logging(stats, "activation", "weight", "gradient", feature="LogFp8TensorStats"))
    found = looked(session, recipe=recipe)
    assert len(found) == 3 * len(stats)
    for tensor in ("activation", "weight", "gradient"):
        own = names.get(recipe)
        if own:
            assert found[f"layer_{tensor}_{own}_mse", 0] == found[f"layer_{tensor}_mse", 0]


def test_overflows_of_a_frozen_scale(debugging: Debugging) -> None:
    session = debugging(logging(["overflows%", "saturations%"], "activation", feature="LogFp8Stats"))
    x = (400 * values()).detach().requires_grad_()  # a state begins with a scale of 1
    found, want = looked(session, x, "delayed"), 100 * (x.abs() > 448).double().mean().item()
    assert 1 < want == pytest.approx(found["layer_activation_overflows%", 0], abs=1e-4)
    assert found["layer_activation_saturations%", 0] >= want - 1e-3


def test_statistics_of_nvfp4(debugging: Debugging) -> None:
    session = debugging(logging(["underflows%", "mse"], "activation", "weight", feature="LogNvfp4TensorStats"))
    found = looked(session, recipe="nvfp4")
    assert {name for name, _ in found} == {
        f"layer_{t}_nvfp4_{s}" for t in ("activation", "weight") for s in ("underflows%", "mse")
    }
    assert 0 < found["layer_activation_nvfp4_mse", 0] < 0.05


def test_high_precision_has_no_fp8_statistics(debugging: Debugging) -> None:
    session = debugging(logging(["mse"], "activation", feature="LogFp8TensorStats"))
    assert not looked(session, recipe=None)
    assert any("WARNING" in line and "high precision" in line for line in session.lines())


def test_blockwise_dynamic_range(debugging: Debugging) -> None:
    stat = {"max_blockwise_dynamic_range": {"block_size": 16, "dims": 2}}
    session = debugging(logging([stat, {"max_blockwise_dynamic_range": {}}], "activation", "gradient"))
    x = values()
    found, v = looked(session, x, None), x.detach().double().abs()

    def widest(blocks: torch.Tensor) -> float:
        low = torch.where(blocks > 0, blocks, torch.inf).amin(1)
        return (blocks.amax(1).log2() - low.log2()).max().item()

    tiles = v.view(ROWS // 16, 16, WIDTH // 16, 16).transpose(1, 2).reshape(-1, 256)
    either = max(widest(v.reshape(-1, 32)), widest(v.t().reshape(-1, 32)))
    name = "max_blockwise_dynamic_range_block_size"
    assert found[f"layer_activation_{name}_16_dims_2_max_over_orientations", 0] == pytest.approx(
        widest(tiles), abs=1e-4
    )
    assert found[f"layer_activation_{name}_32_dims_1_max_over_orientations", 0] == pytest.approx(either, abs=1e-4)
    assert (f"layer_gradient_{name}_32_dims_1", 0) in found


def test_microbatches_add_up(debugging: Debugging) -> None:
    session = debugging(logging(["l1_norm", "max", "mean"], "activation", "weight", "gradient"))
    module, parts = made("Linear"), [values(seed=i) for i in range(3)]
    for i, x in enumerate(parts):
        step(module, x, "current", is_first_microbatch=i == 0)
    session.step()
    found, v = session.statistics(), torch.cat(parts).detach().double()
    assert found["layer_activation_l1_norm", 0] == pytest.approx(v.abs().sum().item(), rel=1e-5)
    assert found["layer_activation_mean", 0] == pytest.approx(v.mean().item(), abs=1e-4)
    assert found["layer_weight_l1_norm", 0] == pytest.approx(module.weight.double().abs().sum().item(), rel=1e-5)
    once = torch.linspace(-1, 1, ROWS * WIDE).bfloat16().double().abs().sum().item()
    assert found["layer_gradient_l1_norm", 0] == pytest.approx(3 * once, rel=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("function", ["te", "torch"])
def test_a_checkpoint_is_seen_once(debugging: Debugging, function: str, reentrant: bool) -> None:
    session = debugging(logging(["l1_norm"], "activation", "output", "gradient"))
    module, x = made("Linear"), values()
    check = te.checkpoint if function == "te" else torch.utils.checkpoint.checkpoint
    with recipes.region("current"):
        y = check(module, x, use_reentrant=reentrant)
    y.backward(torch.ones_like(y))
    session.step()
    found = session.statistics()
    assert found["layer_activation_l1_norm", 0] == pytest.approx(x.detach().double().abs().sum().item(), rel=1e-5)
    assert found["layer_output_l1_norm", 0] == pytest.approx(y.detach().double().abs().sum().item(), rel=1e-5)
    assert found["layer_gradient_l1_norm", 0] == ROWS * WIDE


def test_names_of_products(debugging: Debugging) -> None:
    session = debugging(logging(["max"], "activation"))
    grouped = te.GroupedLinear(3, WIDTH, WIDE, name="layer", params_dtype=torch.bfloat16, device="cpu")
    for module in (made("LayerNormMLP"), grouped):  # one of three groups is empty
        step(module, values(), "current")
    layer = te.TransformerLayer(WIDTH, WIDE, 4, name="t", hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
    layer(torch.randn(4, 2, WIDTH)).sum().backward()
    session.step()
    names = {name.removesuffix("_activation_max") for name, _ in session.statistics()}
    own = {
        "t.self_attention.layernorm_linear_qkv",
        "t.self_attention.proj",
        "t.layernorm_mlp.fc1",
        "t.layernorm_mlp.fc2",
    }
    assert names == own | {"layer.fc1", "layer.fc2", "layer.gemm_0", "layer.gemm_2"}


@pytest.mark.parametrize("kind", ["LayerNormMLP", "GroupedLinear"])
def test_products_of_a_class_made_of_ours(kind: str) -> None:
    """A user's subclass, and the class that `fully_shard` makes for what it wraps, have the products of ours."""
    module = made(kind)
    own = products_of("a test", module)
    module.__class__ = type(f"FSDP{kind}", (type(module),), {})
    assert products_of("a test", module) == own and len(own) > 1


def test_the_older_name_of_the_qkv_projection(debugging: Debugging) -> None:
    found = config({"layer_types": ["layernorm_qkv"]}, LogTensorStats={"stats": ["max"], "tensors": ["activation"]})
    session = debugging(found)
    layer = te.TransformerLayer(WIDTH, WIDE, 4, name="t", hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
    layer(torch.randn(4, 2, WIDTH))
    session.step()
    assert [name for name, _ in session.statistics()] == ["t.self_attention.layernorm_linear_qkv_activation_max"]


def test_a_tensorboard_writer(debugging: Debugging) -> None:
    class Writer:
        seen: list[Any] = []

        def add_scalar(self, name: str, value: float, iteration: int) -> None:
            self.seen.append((name, value, iteration))

    session = debugging(logging(["max"], "activation"), tb_writer=Writer(), default_logging_enabled=False)
    x = values()
    step(made("Linear"), x)
    session.step()
    assert Writer.seen == [("layer_activation_max", x.max().item(), 0)]


# ------------------------------------------------------------------------------- what changes tensors


@pytest.mark.parametrize("quant_format", ["FP8E4M3", "MXFP8E4M3"])
def test_fake_quantization(debugging: Debugging, quant_format: str) -> None:
    keys = {"gemms": ["fprop"], "tensors": ["activation"], "quant_format": quant_format}
    module, x = made("Linear"), values()
    plain = step(module, x)
    session = debugging(config(FakeQuant=keys))
    found = step(module, x, "current")
    v = x.detach()
    if quant_format == "FP8E4M3":
        rounded = quantized_by_formula(v, float(torch.tensor(448.0) / v.abs().max().float())).bfloat16()
    else:
        blocks = v.double().reshape(-1, 32)
        exponent = torch.ceil(torch.log2(blocks.abs().amax(1, keepdim=True) / 448))
        scaled = (blocks * 2.0**-exponent).float()
        rounded = (quantized_by_formula(scaled, 1.0) * 2.0**exponent).bfloat16().view_as(v)
    want = rounded.float() @ module.weight.detach().float().t()
    assert torch.allclose(found["y"].float(), want, rtol=1e-2, atol=1e-3)
    assert not torch.equal(found["y"], plain["y"])
    assert any("Feature=FakeQuant, API=process_tensor: fprop, activation" in line for line in session.lines())
    assert any("Tensor: activation, gemm fprop - modify_tensor()" in line for line in session.lines())
    assert any("Tensor: weight, gemm fprop - High precision" in line for line in session.lines())


def test_current_scaling_of_one_tensor_under_delayed(debugging: Debugging) -> None:
    """A state begins with a scale of 1, at which small values are lost."""
    module, x = made("Linear"), values()
    with torch.no_grad():
        x *= 1e-3
    plain, low = step(module, x), step(made("Linear"), x, "delayed")
    debugging(config(PerTensorScaling={"gemms": ["fprop"], "tensors": ["activation"]}))
    found = step(made("Linear"), x, "delayed")
    errors = [(r["y"] - plain["y"]).float().norm() / plain["y"].float().norm() for r in (found, low)]
    assert errors[0] < 0.2 * errors[1]
    assert torch.equal(found["weight"], low["weight"])


def test_parameters_of_single_gemms_and_tensors(debugging: Debugging) -> None:
    struct = [
        {"gemm": "fprop", "tensors": ["activation"], "quant_format": "FP8E5M2"},
        {"gemm": "wgrad", "tensors_struct": [{"tensor": "gradient", "quant_format": "FP8E4M3"}]},
    ]
    session = debugging(config(FakeQuant={"gemms_struct": struct}))
    step(made("Linear"), values(), "current")
    lines = [line.rpartition(": ")[2] for line in session.lines() if "Tensor: " in line]
    assert {line.partition(", gemm ")[2] for line in lines if "modify" in line} == {
        "fprop - modify_tensor()",
        "wgrad - modify_tensor()",
    }
    done = {line.rpartition("process_tensor: ")[2] for line in session.lines() if "process_tensor" in line}
    assert done == {"fprop, activation", "wgrad, gradient"}


# ------------------------------------------------------------------------------------ features of a user's own

USERS = """
from nvdlfw_inspect.registry import Registry, api_method
from transformer_engine.debug.features.api import TEConfigAPIMapper

SEEN = []

@Registry.register_feature(namespace="transformer_engine")
class Doubles(TEConfigAPIMapper):
    @api_method
    def modify_tensor_enabled(self, config, layer_name, gemm, tensor_name, iteration):
        return True

    @api_method
    def fp8_gemm_enabled(self, config, layer_name, gemm, iteration):
        return False

    @api_method
    def modify_tensor(self, config, layer_name, gemm, tensor_name, tensor, default_quantizer, iteration, out=None,
                      dtype=None):
        SEEN.append(("modify_tensor", gemm, tensor_name, type(default_quantizer).__name__))
        return tensor * config["factor"]

@Registry.register_feature(namespace="transformer_engine")
class Looks(TEConfigAPIMapper):
    @api_method
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        return True

    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, tensor, iteration, tp_group):
        SEEN.append(("inspect_tensor", layer_name, tensor_name, tuple(tensor.shape)))

    @api_method
    def inspect_tensor_postquantize_enabled(self, config, layer_name, gemm, tensor_name, iteration):
        return True

    @api_method
    def inspect_tensor_postquantize(self, config, layer_name, tensor_name, gemm, tensor, iteration, tp_group):
        SEEN.append(("postquantize", gemm, tensor_name, type(tensor).__name__))

import te_torch.debug
te_torch.debug.SEEN = SEEN
"""


@pytest.mark.filterwarnings("ignore:inspect_tensor_postquantize")
def test_features_of_a_users_own(debugging: Debugging, tmp_path: Path) -> None:
    """Written as for the peer, under the names of its packages and with the older calls."""
    import te_torch.compat
    import te_torch.debug

    te_torch.compat.install()
    folder = tmp_path / "features"
    folder.mkdir()
    (folder / "mine.py").write_text(textwrap.dedent(USERS))
    tensors = ["activation", "gradient", "output"]
    debugging(
        config(Doubles={"gemms": ["fprop"], "tensors": ["activation"], "factor": 2.0}, Looks={"tensors": tensors}),
        folder,
    )
    try:
        module, x = made("Linear"), values()
        found = step(module, x, "current")
        seen = te_torch.debug.SEEN  # type: ignore[attr-defined]
    finally:
        te_torch.compat.uninstall()
    want = (2 * x.detach()).float() @ module.weight.detach().float().t()
    assert torch.allclose(found["y"].float(), want, rtol=1e-2, atol=1e-3)
    assert seen == [
        ("modify_tensor", "fprop", "activation", "Float8CurrentScalingQuantizer"),
        ("inspect_tensor", "layer", "activation", (ROWS, WIDTH)),
        ("postquantize", "wgrad", "activation", "Float8Tensor"),
        ("postquantize", "fprop", "activation", "Tensor"),
        ("inspect_tensor", "layer", "output", (ROWS, WIDE)),
        ("inspect_tensor", "layer", "gradient", (ROWS, WIDE)),
        ("postquantize", "wgrad", "gradient", "Float8Tensor"),
        ("postquantize", "dgrad", "gradient", "Float8Tensor"),
    ]


def test_the_folder_of_the_alias() -> None:
    import te_torch.compat
    from te_torch.compat.finder import FOLDER

    own = {p.stem for p in FEATURES.glob("*.py")} - {"test_dummy_feature"}
    assert own == {p.stem for p in (FOLDER / "debug" / "features").glob("*.py")}
    te_torch.compat.install()
    try:
        import transformer_engine
        from transformer_engine.debug.features.api import TEDefaultFeatures
        from transformer_engine.debug.features.log_tensor_stats import LogTensorStats

        assert Path(transformer_engine.__file__).parent == FOLDER
        assert TEDefaultFeatures and LogTensorStats
    finally:
        te_torch.compat.uninstall()


def test_dumped_tensors(debugging: Debugging, tmp_path: Path) -> None:
    keys = {"high_precision_tensor": True, "quantized_tensor": True, "tensors": ["activation"], "freq": 2}
    session = debugging(config(DumpTensors=keys))
    module, x = made("Linear"), values()
    for _ in range(3):
        step(module, x, "current")
        session.step()
    files = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*.pt"))
    assert files == [Path(f"tensor_dumps/rank_0/iter_{i:06d}/layer_activation.pt") for i in (0, 2)]
    found = torch.load(tmp_path / files[0], weights_only=True)
    assert torch.equal(found["high_precision"], x.detach())
    assert math.isclose(found["quantized"].dequantize().float().max().item(), x.max().item(), rel_tol=0.07)
