"""GEMMs that features switch or change: what is quantized for them, what is recorded, in which order they are shown."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import UnsupportedError
from tests import recipes
from tests.backends import on_devices
from tests.core.covering_lists import covering_lists
from tests.debug import conftest
from tests.debug.conftest import MODULES, ROWS, WIDTH, config, differ, made, values

GEMMS = ("fprop", "dgrad", "wgrad")
SETS = [chosen for n in range(4) for chosen in combinations(GEMMS, n)]


def step(module: Any, device: str, recipe: str | None = "delayed", **options: Any) -> dict[str, torch.Tensor]:
    """Output and gradients."""
    return conftest.step(module, values(device, 2), recipe, **options)


@on_devices
@covering_lists(pytest.mark.parametrize("kind", MODULES), pytest.mark.parametrize("off", SETS, ids="-".join))
def test_what_only_a_disabled_gemm_reads_is_not_recorded(
    debugging: Any, kind: str, off: tuple[str, ...], device: str
) -> None:
    debugging(config(DisableQuantizationGEMM={"gemms": list(off)}))
    module = made(kind, device)
    for _ in range(2):  # the second one begins with what the first one recorded
        step(module, device)
    with recipes.region("delayed"):
        module(torch.zeros(ROWS, WIDTH, device=device).bfloat16(), *([[16, 16]] if kind == "GroupedLinear" else []))
    found = module.get_fp8_meta_tensors()
    on = set(GEMMS) - set(off)
    forward, backward = ([s != 1 for s in found[key][0].tolist()] for key in ("scaling_fwd", "scaling_bwd"))
    for gemm in range(module.gemms):
        assert forward[3 * gemm] == bool(on & {"fprop", "wgrad"}), "activation"
        assert forward[3 * gemm + 1] == bool(on & {"fprop", "dgrad"}), "weight"
        assert backward[2 * gemm] == bool(on & {"dgrad", "wgrad"}), "gradient"


@on_devices
@covering_lists(pytest.mark.parametrize("kind", MODULES), pytest.mark.parametrize("recipe", recipes.KINDS))
def test_every_gemm_disabled_is_the_layer_in_bf16(debugging: Any, kind: str, recipe: str, device: str) -> None:
    """Its biases, too."""
    module = made(kind, device)
    want = step(module, device, None)
    debugging(config(DisableQuantizationGEMM={"gemms": list(GEMMS)}))
    found = step(module, device, recipe)
    assert differ(found, want) == []


@on_devices
@covering_lists(
    pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"]), pytest.mark.parametrize("off", GEMMS)
)
def test_the_others_stay_as_they_are(debugging: Any, recipe: str, off: str, device: str) -> None:
    """Bit for bit: a GEMM that was not named reads what it reads without features."""
    module = made("Linear", device)
    plain, low = step(module, device, None), step(module, device, recipe)
    debugging(config(DisableQuantizationGEMM={"gemms": [off]}))
    found = step(made("Linear", device), device, recipe)
    for gemm, name in {"fprop": "y", "dgrad": "x", "wgrad": "weight"}.items():
        assert torch.equal(found[name], (plain if gemm == off else low)[name]), name
        assert not torch.equal(plain[name], low[name])


@pytest.mark.parametrize(("off", "casts"), [((), 3), (("fprop",), 3), (("fprop", "wgrad"), 2), (GEMMS, 0)])
def test_the_casts_that_run(debugging: Any, monkeypatch: pytest.MonkeyPatch, off: tuple[str, ...], casts: int) -> None:
    from te_core.ops import raw

    copies, quantize = [], raw.quantize
    monkeypatch.setattr(raw, "quantize", lambda rt, x, cast, **kw: copies.append(cast) or quantize(rt, x, cast, **kw))
    debugging(config(DisableQuantizationGEMM={"gemms": list(off)}))
    step(made("Linear", "cpu"), "cpu", "block")
    assert len(copies) == casts
    assert sum(cast.rowwise + cast.columnwise for cast in copies) == 2 * (3 - len(off))


@covering_lists(
    pytest.mark.parametrize("off", SETS, ids="-".join),
    pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"]),
    pytest.mark.parametrize("held", [False, True]),
    turns=2,
)
def test_statistics_beside_disabled_gemms(debugging: Any, off: tuple[str, ...], recipe: str, held: bool) -> None:
    """Whatever copy there is: the values have theirs in any case, casts those of what a GEMM reads quantized."""
    if held and recipe == "nvfp4":
        pytest.skip("no weights are held so")
    tensors = ["activation", "gradient", *([] if held else ["weight"])]
    session = debugging(
        config(
            DisableQuantizationGEMM={"gemms": list(off)},
            LogTensorStats={"stats": ["max"], "tensors": ["activation", "gradient", "weight"]},
            LogFp8TensorStats={"stats": ["underflows%"], "tensors": tensors},
        )
    )
    with te.quantized_model_init(enabled=held, recipe=recipes.RECIPES[recipe]):
        module = made("Linear", "cpu")
    step(module, "cpu", recipe)
    session.step()
    found = {name for name, _ in session.statistics()}
    on, rows = set(GEMMS) - set(off), {"activation": "fprop", "weight": "fprop", "gradient": "dgrad"}
    columns = {"activation": "wgrad", "weight": "dgrad", "gradient": "wgrad"}
    want = {t for t in tensors if rows[t] in on or columns[t] in on and recipe != "nvfp4"}
    assert found == {f"layer_{t}_max" for t in rows} | {f"layer_{t}_underflows%" for t in want}
    lines = [line for line in session.lines() if "WARNING" in line and "nothing to log" in line]
    assert len(lines) == len(tensors) - len(want)


def test_a_cached_weight(debugging: Any) -> None:
    """A weight that no GEMM reads quantized is not kept quantized between microbatches either."""
    session = debugging(config(DisableQuantizationLayer={}))
    module = made("Linear", "cpu")
    want = step(module, "cpu", None)
    for first in (True, False):
        found = step(module, "cpu", is_first_microbatch=first)
        assert differ(found, want) == []
    assert module._weight_cache == {}
    session.api.end_debug()
    step(module, "cpu", is_first_microbatch=True)
    assert module._weight_cache


# ----------------------------------------------------------------------------------- the order of the calls

USERS = """
from nvdlfw_inspect.registry import Registry, api_method
from te_torch.debug.features.api import TEConfigAPIMapper
import te_torch.debug

SEEN = te_torch.debug.SEEN = []

@Registry.register_feature(namespace="transformer_engine")
class Writes(TEConfigAPIMapper):
    def parse_config_and_api(self, config, **kwargs):
        return True, dict(config)

    @api_method
    def modify_tensor_enabled(self, config, layer_name, gemm, tensor_name, iteration):
        return f"{gemm} {tensor_name}" in config["changed"], iteration + 1

    @api_method
    def modify_tensor(self, config, layer_name, gemm, tensor_name, tensor, default_quantizer, iteration, **others):
        SEEN.append(("modify", gemm, tensor_name, layer_name))
        factor = 2.0 if gemm == "fprop" or (gemm, tensor_name) == ("dgrad", "gradient") else 3.0
        made = tensor * factor
        quantized = config.get("quantized") and default_quantizer is not None
        return default_quantizer(made) if quantized else made

    @api_method
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        return True, iteration + 1

    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, iteration, tp_group, tensor, rowwise_quantized_tensor,
                       columnwise_quantized_tensor, quantizer, tp_size):
        def first(t):
            if t is None or type(t).__name__ == "NVFP4Tensor":
                return None
            return (t if type(t).__name__ == "Tensor" else t.dequantize()).flatten()[0].item()
        SEEN.append(("inspect", tensor_name, first(tensor), first(rowwise_quantized_tensor),
                     first(columnwise_quantized_tensor), layer_name))
"""


def written(debugging: Any, folder: Path, *changed: str, **options: Any) -> tuple[Any, list[Any]]:
    import te_torch.debug

    folder.mkdir()
    (folder / "mine.py").write_text(USERS)
    session = debugging(config(Writes={"changed": list(changed), **options}), folder)
    return session, te_torch.debug.SEEN  # type: ignore[attr-defined]


@on_devices
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_a_tensor_is_shown_after_both_gemms_have_it(
    debugging: Any, tmp_path: Path, kind: str, quantized: bool, device: str
) -> None:
    operands = {"activation": ("wgrad", "fprop"), "weight": ("dgrad", "fprop"), "gradient": ("wgrad", "dgrad")}
    changed = [f"{gemm} {tensor}" for tensor, gemms in operands.items() for gemm in gemms]
    _, seen = written(debugging, tmp_path / "features", *changed, quantized=quantized)
    module = made(kind, device)
    step(module, device, "current")
    layers = {call[-1] for call in seen}
    assert len(layers) == module.gemms
    for layer, (tensor, (columns, rows)) in product(layers, operands.items()):
        *changes, shown = [call[:-1] for call in seen if call[-1] == layer and tensor in call]
        assert changes == [("modify", columns, tensor), ("modify", rows, tensor)]
        value, by_rows, by_columns = shown[2:]
        close = {"rel": 0.13, "abs": 1e-5} if quantized else {"rel": 0.01}  # a step of E5M2
        assert by_rows == pytest.approx(2 * value, **close)
        assert by_columns == pytest.approx(3 * value, **close)


def test_a_gradient_that_one_gemm_reads(debugging: Any, tmp_path: Path) -> None:
    """It is shown once, with what that GEMM reads."""
    _, seen = written(debugging, tmp_path / "features", "dgrad gradient", "wgrad gradient")
    module = made("Linear", "cpu")
    with recipes.region("delayed"):
        y = module(torch.randn(ROWS, WIDTH).bfloat16())
    y.backward(torch.ones_like(y))
    calls = [call[:-1] for call in seen if "gradient" in call]
    assert calls == [("modify", "wgrad", "gradient"), ("inspect", "gradient", 1.0, None, 3.0)]
    del seen[:]
    module.weight.requires_grad_(False)
    with recipes.region("delayed"):
        y = module(torch.randn(ROWS, WIDTH).bfloat16().requires_grad_())
    y.backward(torch.ones_like(y))
    calls = [call[:-1] for call in seen if "gradient" in call]
    assert calls == [("modify", "dgrad", "gradient"), ("inspect", "gradient", 1.0, 2.0, None)]


CHANGED = {
    "y": ("fprop activation", "fprop weight"),
    "x": ("dgrad gradient", "dgrad weight"),
    "weight": ("wgrad activation", "wgrad gradient"),
}


@on_devices
@covering_lists(
    pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4 no rht"]),
    pytest.mark.parametrize("place", [0, 1]),
    pytest.mark.parametrize("quantized", [False, True]),
    turns=2,
)
def test_a_change_acts_in_its_gemm(
    debugging: Any, tmp_path: Path, recipe: str, place: int, quantized: bool, device: str
) -> None:
    """Whatever a feature gives back: twice or three times the operand makes so much of the result."""
    want = step(made("Linear", device), device, recipe)
    if recipe == "delayed":  # scales of 1: the change has to fit, too
        quantized = False
    points = [points[place] for points in CHANGED.values()]
    written(debugging, tmp_path / "features", *points, quantized=quantized)
    found = step(made("Linear", device), device, recipe)
    for (name, of), point in zip(CHANGED.items(), points, strict=True):
        factor = 2 if of[0].startswith("fprop") or point == "dgrad gradient" else 3
        off = (found[name].float() / factor - want[name].float()).norm() / want[name].float().norm()
        assert off < (0.25 if recipe.startswith("nvfp4") else 0.08), name


def test_a_change_beside_an_operand_that_is_turned(debugging: Any, tmp_path: Path) -> None:
    """NVFP4's wgrad multiplies Hadamard transforms: no value can be put in the place of one of them."""
    session, _ = written(debugging, tmp_path / "features", "wgrad gradient")
    with pytest.raises(UnsupportedError, match="one operand.*Allowed: both operands.*disable_rht"):
        step(made("Linear", "cpu"), "cpu", "nvfp4")
    session.api.end_debug()


@on_devices
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_a_changed_weight_that_is_kept_for_microbatches(
    debugging: Any, tmp_path: Path, recipe: str, device: str
) -> None:
    """The change acts in each of them."""
    want = step(made("Linear", device), device, recipe)
    _, seen = written(debugging, tmp_path / "features", "fprop weight", "dgrad weight", quantized=True)
    module = made("Linear", device)
    for first in (True, False, False):
        found = step(module, device, recipe, is_first_microbatch=first)
        for name, factor in (("y", 2), ("x", 3)):
            off = (found[name].float() / factor - want[name].float()).norm() / want[name].float().norm()
            assert off < 0.08, name
    assert [call[:3] for call in seen if call[0] == "modify"] == 3 * [
        ("modify", "dgrad", "weight"),
        ("modify", "fprop", "weight"),
    ]


# ------------------------------------------------------------------------------------------- main_grad


def fused(device: str, dtype: torch.dtype, kind: str = "Linear") -> Any:
    module = made(kind, device, bias=False, fuse_wgrad_accumulation=True)
    for name in module._weight_names():
        weight = getattr(module, name)
        weight.main_grad = torch.ones(weight.shape, dtype=dtype, device=device)
    return module


@on_devices
@covering_lists(
    pytest.mark.parametrize("kind", MODULES),
    pytest.mark.parametrize("first", [None, True]),
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16]),
)
def test_a_gradient_that_goes_into_main_grad_is_shown(
    debugging: Any, kind: str, first: bool | None, dtype: torch.dtype, device: str
) -> None:
    options = {} if first is None or kind == "GroupedLinear" else {"is_first_microbatch": first}
    want = fused(device, dtype, kind)
    for _ in range(2):
        step(want, device, **options)
    stats = {"stats": ["max", "l1_norm"], "tensors": ["wgrad"]}
    session = debugging(config(LogTensorStats=stats))
    module = fused(device, dtype, kind)
    apart = made(kind, device, bias=False)
    apart.name = "apart"
    for _ in range(2):
        step(module, device, **options)
    session.step()
    names = module._weight_names()
    for name in names:
        main, wanted = getattr(module, name).main_grad, getattr(want, name).main_grad
        if (
            kind == "GroupedLinear" and device == "cuda"
        ):  # what is looked at is a product of its own, rounded then added
            torch.testing.assert_close(main, wanted, rtol=2.0**-7, atol=2.0**-5)
        else:
            assert torch.equal(main, wanted), "shown, and not changed"
    found, grads = session.statistics(), [step(apart, device), step(apart, device)]
    layers = {name.rsplit("_wgrad_", 1)[0] for name, _ in found}
    assert len(layers) == len(names)
    for layer, name in zip(sorted(layers), names, strict=True):
        tops = [g[name].max().item() for g in grads]
        sums = [g[name].float().abs().sum().item() for g in grads]
        assert found[f"{layer}_wgrad_max", 0] == pytest.approx(max(tops), rel=0.01)
        assert found[f"{layer}_wgrad_l1_norm", 0] == pytest.approx(sum(sums), rel=0.01)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_changed_gradient_goes_into_main_grad(
    debugging: Any, tmp_path: Path, overwrite: bool, dtype: torch.dtype, device: str
) -> None:
    grad = step(made("Linear", device, bias=False), device)["weight"].float()
    written(debugging, tmp_path / "features", "wgrad wgrad")
    module = fused(device, dtype)
    module.weight.overwrite_main_grad = overwrite
    step(module, device)
    want = 3 * grad + (0 if overwrite else 1)
    assert torch.allclose(module.weight.main_grad.float(), want, rtol=0.02, atol=0.02)
