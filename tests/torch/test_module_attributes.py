"""The documented attributes of modules (te_torch/base/documented.py, and what constructors set)."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import te_torch as te
import te_torch.tensors as T
from te_core.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, Format, MXFP8BlockScaling
from te_torch.attention.dot_product import DotProductAttention
from te_torch.custom_recipes.quantizer_factory_zoo import mxfp8_fwd_high_precision_bwd_factory
from tests.backends import devices
from tests.module_steps import region, values

MAKERS: dict[str, Any] = {
    "Linear": lambda **kw: te.Linear(64, 48, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(64, 48, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(64, 96, **kw),
    "GroupedLinear": lambda **kw: te.GroupedLinear(2, 64, 48, **kw),
}
makers = pytest.mark.parametrize("kind", MAKERS)
GEMMS = {"Linear": 1, "LayerNormLinear": 1, "LayerNormMLP": 2, "GroupedLinear": 2}
DELAYED = DelayedScaling(amax_history_len=4)


def run(module: Any, recipe: Any = None, backward: bool = True, **options: Any) -> torch.Tensor:
    x = values(32, 64, device=str(next(module.parameters()).device)).requires_grad_(backward)
    splits = ([16, 16],) if isinstance(module, te.GroupedLinear) else ()
    with region(recipe) if not options else te.autocast(recipe=recipe, **options):
        y = module(x, *splits)
    if backward:
        y.sum().backward()
    return y


@makers
def test_plain_attributes(kind: str) -> None:
    module = MAKERS[kind](device="cpu", sequence_parallel=True)
    assert (module.tp_group, module.tp_size, module.sequence_parallel) == (None, 1, False)  # effective with more ranks
    assert (module.fsdp_wrapped, module.fsdp_group, module.is_fsdp2) == (False, None, False)
    assert (module.fp8, module.fp8_calibration, module.fp8_initialized) == (False, False, False)
    assert module.activation_dtype is None and module._fp8_workspaces == {} and module.wgrad_store is not None
    assert module.primary_weights_in_fp8 is False
    assert module.fp8_meta["num_gemms"] == GEMMS[kind] and "recipe" not in module.fp8_meta
    assert module.quantizers == {"scaling_fwd": [], "scaling_bwd": []}
    module.fast_setattr("anything", 3)
    assert module.anything == 3
    if kind != "LayerNormMLP":
        assert module.parallel_mode is None
        assert MAKERS[kind](device="cpu", parallel_mode="COLUMN").parallel_mode == "column"


def test_names_of_weights_and_biases() -> None:
    for kind in (te.Linear, te.LayerNormLinear):
        module = kind(64, 48, device="cpu")
        assert module.weight_names == ["weight"] and module.bias_names == ["bias"]
        split = kind(64, 48, parameters_split=("query_", "key", "value"), device="cpu", bias=False)
        assert split.weight_names == ["query_weight", "key_weight", "value_weight"]
        assert split.bias_names == ["query_bias", "key_bias", "value_bias"]
        assert all(getattr(split, n).shape == (16, 64) for n in split.weight_names)


@pytest.mark.parametrize("device", devices())
@makers
@pytest.mark.parametrize(
    "recipe", [DELAYED, Float8CurrentScaling(), MXFP8BlockScaling()], ids=["delayed", "current", "mxfp8"]
)
def test_what_the_last_forward_ran_in(device: str, kind: str, recipe: Any) -> None:
    module = MAKERS[kind](device=device, params_dtype=torch.float32)
    run(module, recipe)
    n = GEMMS[kind]
    assert module.fp8 and not module.fp8_calibration and module.fp8_initialized
    assert module.activation_dtype is torch.float32
    meta, quantizers = module.fp8_meta, module.quantizers
    assert type(meta["recipe"]) is type(recipe) and meta["fp8_max_fwd"] == 448
    assert len(quantizers["scaling_fwd"]) == 3 * n and len(quantizers["scaling_bwd"]) == 2 * n
    made = {
        DelayedScaling: T.Float8Quantizer,
        Float8CurrentScaling: T.Float8CurrentScalingQuantizer,
        MXFP8BlockScaling: T.MXFP8Quantizer,
    }[type(recipe)]
    for i in range(n):
        x, w, _ = quantizers["scaling_fwd"][3 * i : 3 * i + 3]
        assert type(x) is type(w) is type(quantizers["scaling_bwd"][2 * i]) is made
    if recipe is DELAYED:
        state = module.fp8_state
        assert meta["fp8_checkpoint"] and meta["fp8_max_bwd"] == 57344
        assert meta["scaling_fwd"].scale is state.scale_fwd
        assert meta["scaling_bwd"].amax_history is state.amax_history_bwd
        assert torch.equal(meta["scaling_fwd"].scale_inv, 1 / state.scale_fwd)
        for i, q in enumerate(quantizers["scaling_fwd"]):
            if q is not None:
                assert torch.equal(q.scale, state.scale_fwd[i : i + 1])
                q(torch.full((16, 16), 1e4, device=device))  # notes its maximum where the next update reads it
                assert state.amax_history_fwd[0, i].item() == 1e4
        assert quantizers["scaling_bwd"][0].dtype is T.DType.kFloat8E5M2
    else:
        assert not meta["fp8_checkpoint"] and "scaling_fwd" not in meta
    run(module)
    assert not module.fp8 and module.fp8_initialized is (recipe is DELAYED)


def test_calibration_and_custom_recipes() -> None:
    module = MAKERS["Linear"](device="cpu", params_dtype=torch.float32)
    run(module, DELAYED, backward=False, enabled=False, calibrating=True)
    assert module.fp8_calibration and not module.fp8 and module.fp8_initialized
    assert module.quantizers["scaling_fwd"][0] is None

    class Mine(T.Quantizer):
        def quantize(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:  # type: ignore[override]
            return tensor.round()

    mine = Mine(rowwise=True, columnwise=True)
    run(module, CustomRecipe(qfactory=lambda role: mine))
    assert module.quantizers["scaling_fwd"][0] is mine and module.fp8
    run(module, CustomRecipe(qfactory=mxfp8_fwd_high_precision_bwd_factory))
    assert isinstance(module.quantizers["scaling_fwd"][0], T.HybridQuantizer)


def test_attention_says_what_it_ran_in() -> None:
    module = DotProductAttention(2, 32, attention_dropout=0.0)
    assert not module.fp8 and module.activation_dtype is None and module.tp_size == 1
    q = values(16, 2, 2, 32, dtype=torch.bfloat16)
    module(q, q, q)
    assert not module.fp8 and module.activation_dtype is torch.bfloat16
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True, fp8_format=Format.HYBRID), emulate=True):
        module(q, q, q)
    assert module.fp8 and module.fp8_meta["num_gemms"] == 3 and len(module.fp8_meta["scaling_fwd"].scale) == 9


@makers
def test_the_cache_of_quantized_weights(kind: str) -> None:
    module = MAKERS[kind](device="cpu", params_dtype=torch.float32)
    x = values(32, 64)
    splits = ([16, 16],) if kind == "GroupedLinear" else ()
    with te.autocast(recipe=Float8CurrentScaling()):
        module(x, *splits, is_first_microbatch=True)
    assert set(module._fp8_workspaces) == set(module._weight_names())


@makers
def test_state_is_made_on_request(kind: str) -> None:
    module = MAKERS[kind](device="cpu")
    module.init_fp8_metadata()  # outside of a region there is nothing to make
    assert module.fp8_state is None
    with te.autocast(recipe=Float8CurrentScaling()):
        module.init_fp8_metadata(num_gemms=GEMMS[kind])
        assert module.fp8_state is None
    with te.autocast(recipe=DELAYED):
        module.init_fp8_metadata(num_gemms=GEMMS[kind])
    assert module.fp8_state.amax_history_fwd.shape == (4, 3 * GEMMS[kind]) and module.fp8_meta["recipe"] == DELAYED


@makers
def test_marks_of_parameters(kind: str) -> None:
    """What trainers with tensor parallelism ask of a parameter; on the meta device, quantized and moved, too."""

    def marks(p: Any) -> tuple[Any, ...]:
        return tuple(getattr(p, n, None) for n in ("tensor_model_parallel", "partition_dim", "partition_stride"))

    parallel = "set_parallel_mode" if kind == "LayerNormMLP" else "parallel_mode"
    for mode in (None, "column", "row"):
        if mode == "row" and kind == "LayerNormLinear":
            continue
        option = {parallel: mode is not None} if kind == "LayerNormMLP" else {parallel: mode}
        for device in ("cpu", "meta"):
            module = MAKERS[kind](device=device, **option)
            if device == "meta":
                module.reset_parameters()
                module.cpu()
            module = module.to(torch.bfloat16)
            for name, p in module.named_parameters():
                # An MLP is column-parallel first, row-parallel last.
                which = mode if kind != "LayerNormMLP" else mode and ("column" if name.startswith("fc1") else "row")
                by_rows = name.startswith("fc2") if kind == "LayerNormMLP" else mode == "row"
                if "layer_norm" in name:
                    assert p.sequence_parallel is False
                elif "weight" in name:
                    assert marks(p) == (True, int(by_rows), 1), name
                elif which == "column":
                    assert marks(p) == (True, 0, 1), name
                else:
                    assert marks(p)[0] is None and hasattr(p, "sequence_parallel") is (which == "row"), name
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        module = MAKERS[kind](device="cpu")
    for name in module._weight_names():
        assert isinstance(getattr(module, name), T.Float8Tensor) and marks(getattr(module, name))[0] is True


def test_hooks_of_delayed_gradients() -> None:
    module = MAKERS["Linear"](device="cpu", delay_wgrad_compute=True, params_dtype=torch.float32)
    seen: list[Any] = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(module.weight.grad is not None))
    run(module)
    assert module.weight.grad is None and seen == []
    module.backward_dw()
    assert seen == [True]
    assert copy.deepcopy(module)._wgrad_hooks


@pytest.mark.parametrize("fwd", [None, True, False])
def test_a_history_of_another_length_is_a_warning(fwd: bool | None) -> None:
    module = MAKERS["Linear"](device="cpu", params_dtype=torch.float32)
    run(module, DELAYED)
    with pytest.warns(UserWarning, match="amax_history_.* from 4.* to 2 rows") as seen:
        module.adjust_amax_history_length(2, fwd)
    assert len(seen) == 1 and seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.adjust_amax_history_length(2, fwd)
        module.load_state_dict(module.state_dict())
    with pytest.warns(UserWarning, match="to 16 rows"):
        run(module, DelayedScaling(amax_history_len=16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(module, DelayedScaling(amax_history_len=16))
        saved = {k: v[:4] if "history" in k else v for k, v in module.state_dict().items()}
        module.load_state_dict(saved)  # a checkpoint's length is taken over


@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP", "LayerNorm", "RMSNorm"])
def test_margins_and_older_names_of_norms(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FWD_LAYERNORM_SM_MARGIN", "3")
    make = MAKERS.get(kind) or (lambda **kw: getattr(te, kind)(64, **kw))
    module = make(device="cpu")
    between, older = ("rmsnorm", "rms_norm") if kind == "RMSNorm" else ("ln", "layer_norm")
    names = [f"{way}_{between}_sm_margin" for way in ("fwd", "bwd", "inf")]
    assert [getattr(module, n) for n in names] == [3, 0, 0]
    run(module) if kind in MAKERS else module(values(4, 64))
    setattr(module, names[1], 5)
    assert module._margins == {"forward": 3, "backward": 5, "inference": 0} and not module._calls
    norm = "layer_norm_weight" if kind in MAKERS else "weight"
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(7)
    with pytest.warns(DeprecationWarning) as seen:
        getattr(module, f"reset_{older}_parameters")()
    assert seen[0].filename == __file__ and (getattr(module, norm) == 1).all()
    assert kind not in MAKERS or any((p == 7).all() for p in module.parameters())  # the norm's alone
