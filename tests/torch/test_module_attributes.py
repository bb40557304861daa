"""The documented attributes of modules (te_torch/base/documented.py, and what constructors set)."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_torch as te
import te_torch.tensors as T
from te_core.errors import ArgumentError
from te_core.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, Format, MXFP8BlockScaling
from te_torch.attention.dot_product import DotProductAttention
from te_torch.base.module import CallingModule
from te_torch.custom_recipes.quantizer_factory_zoo import mxfp8_fwd_high_precision_bwd_factory
from te_torch.modules.norm import L2Normalization
from tests.backends import devices
from tests.covering import covering
from tests.world import region, values

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


# ------------------------------------------------------------------------- set after the first forward

LAYER = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
#: A module, the attribute, its new value; and the module that has it from the beginning.
SET_LATER: dict[str, tuple[Callable[..., Any], str, Any]] = {
    "LayerNorm eps": (lambda params_dtype, **kw: te.LayerNorm(64, **kw), "eps", 0.5),
    "LayerNorm gamma": (lambda params_dtype, **kw: te.LayerNorm(64, **kw), "zero_centered_gamma", True),
    "RMSNorm eps": (lambda params_dtype, **kw: te.RMSNorm(64, **kw), "eps", 0.5),
    "RMSNorm gamma": (lambda params_dtype, **kw: te.RMSNorm(64, **kw), "zero_centered_gamma", True),
    "L2Normalization eps": (lambda device, params_dtype, **kw: L2Normalization(**kw), "eps", 0.5),
    "LayerNormLinear eps": (MAKERS["LayerNormLinear"], "eps", 0.5),
    "LayerNormLinear gamma": (MAKERS["LayerNormLinear"], "zero_centered_gamma", True),
    "LayerNormLinear norm": (MAKERS["LayerNormLinear"], "return_layernorm_output", True),
    "LayerNormMLP eps": (MAKERS["LayerNormMLP"], "eps", 0.5),
    "LayerNormMLP activation": (MAKERS["LayerNormMLP"], "activation", "relu"),
    "LayerNormMLP norm": (MAKERS["LayerNormMLP"], "return_layernorm_output", True),
    "LayerNormMLP checkpoint": (MAKERS["LayerNormMLP"], "checkpoint", True),
    "Linear input": (MAKERS["Linear"], "save_original_input", True),
    "GroupedLinear input": (MAKERS["GroupedLinear"], "save_original_input", True),
    "MultiheadAttention eps": (
        lambda eps=1e-5, **kw: te.MultiheadAttention(
            64, 2, input_layernorm=True, layernorm_epsilon=eps, attention_dropout=0.0, **kw
        ),
        "layernorm_qkv.eps",
        0.5,
    ),
    "TransformerLayer activation": (
        lambda activation="gelu", **kw: te.TransformerLayer(64, 96, 2, activation=activation, **LAYER, **kw),
        "layernorm_mlp.activation",
        "relu",
    ),
    "DotProductAttention mask": (lambda device, params_dtype, **kw: Attention(**kw), "inner.attn_mask_type", "no_mask"),
}


class Attention(torch.nn.Module):
    """Of an input with itself."""

    def __init__(self, attn_mask_type: str = "causal") -> None:
        super().__init__()
        self.inner = te.DotProductAttention(2, 32, attention_dropout=0.0, attn_mask_type=attn_mask_type)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(*x.shape[:2], 2, 32)
        return self.inner(heads, heads, heads)


def set_later(module: Any, path: str, value: Any) -> None:
    *owner, name = path.split(".")
    setattr(module.get_submodule(".".join(owner)), name, value)


def results(module: Any, recipe: Any, grad: bool, device: str) -> list[torch.Tensor]:
    """Of a forward and, where there are gradients, of the backward."""
    x = values(32, 1, 64, device=device).requires_grad_()
    x = x.view(32, 64) if isinstance(module, te.GroupedLinear) else x
    with region(recipe), torch.set_grad_enabled(grad):
        y = module(x, *([16, 16],) * isinstance(module, te.GroupedLinear))
    outputs = list(y) if isinstance(y, tuple) else [y]
    if not grad:
        return outputs
    total = sum((y * (i + 1)).sum() for i, y in enumerate(outputs))
    return [*outputs, *torch.autograd.grad(total, [x, *module.parameters()], allow_unused=True)]


def set_later_is_as_set_at_first(what: str, recipe: Any, device: str) -> None:
    make, path, value = SET_LATER[what]
    if recipe is DELAYED and path == "save_original_input":
        recipe = Float8CurrentScaling()  # delayed scaling refuses it
    module = make(device=device, params_dtype=torch.float32)
    other = make(device=device, params_dtype=torch.float32, **{path.rpartition(".")[2]: value})
    other.load_state_dict(module.state_dict())
    for training in (True, False):
        for grad in (True, True, False):
            results(module.train(training), recipe, grad, device)
    # The same history of maxima for both.
    other.load_state_dict(module.state_dict())
    set_later(module, path, value)
    for training in (True, False):
        for grad in (True, True, False):
            found, wanted = (results(m.train(training), recipe, grad, device) for m in (module, other))
            assert len(found) == len(wanted)
            assert all(a is b or torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), (training, grad)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("recipe", [None, DELAYED], ids=["plain", "delayed"])
@pytest.mark.parametrize("what", SET_LATER)
def test_what_is_set_later_counts_from_the_next_forward_on(what: str, recipe: Any, device: str) -> None:
    set_later_is_as_set_at_first(what, recipe, device)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "what", [what if i % 4 == 0 else pytest.param(what, marks=pytest.mark.full) for i, what in enumerate(SET_LATER)]
)
def test_the_same_interpreted(what: str) -> None:
    set_later_is_as_set_at_first(what, DELAYED, "cpu")


def test_what_is_deleted_counts_from_the_next_forward_on() -> None:
    module, x = te.LayerNorm(16, device="cpu"), torch.randn(4, 16)
    for _ in range(3):
        module(x)
    del module.eps
    with pytest.raises(AttributeError, match="eps"):
        module(x)


@pytest.mark.parametrize("recipe", [None, DELAYED, Float8CurrentScaling()], ids=["plain", "delayed", "current"])
@pytest.mark.parametrize("what", [what for what in SET_LATER if what.endswith((" eps", "activation", "input", "mask"))])
def test_nothing_else_lets_go_of_calls(what: str, recipe: Any) -> None:
    """Neither a forward, nor a mode, nor a value that was there, nor a tensor, as FSDP sets it."""
    module = SET_LATER[what][0](device="cpu", params_dtype=torch.float32)

    def steps() -> None:
        for training in (True, False):
            for grad in (True, False):
                results(module.train(training), recipe, grad, "cpu")

    steps()
    kept = [m for m in module.modules() if isinstance(m, CallingModule)]
    for part in kept:
        part._calls["mark"] = None  # type: ignore[assignment]
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, torch.nn.Parameter(parameter.detach().clone()))
        for name, value in list(vars(part).items()):
            if name[0] != "_":
                setattr(part, name, value)
        part.inspector = None
    steps()
    assert kept and all("mark" in part._calls for part in kept)


@covering(copied=["deepcopy", "pickle"], what=SET_LATER)
def test_copies_have_what_was_set(what: str, copied: str) -> None:
    duplicate: Callable[[Any], Any] = copy.deepcopy if copied == "deepcopy" else lambda m: pickle.loads(pickle.dumps(m))
    make, *later = SET_LATER[what]
    module = make(device="cpu", params_dtype=torch.float32)
    results(module, None, True, "cpu")
    before = duplicate(module)
    set_later(module, *later)
    set_later(before, *later)
    for other in (duplicate(module), before):
        found, wanted = results(other, None, True, "cpu"), results(module, None, True, "cpu")
        assert all(a is b or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", [*MAKERS, "LayerNorm", "RMSNorm"])
def test_parameters_are_not_taken_away(kind: str) -> None:
    """What a layer computes goes by its constructor: one that loses a parameter says so, and keeps it."""
    module = MAKERS[kind](device="cpu") if kind in MAKERS else getattr(te, kind)(64, device="cpu")
    for name, parameter in list(module.named_parameters()):
        for take in (lambda n: setattr(module, n, None), lambda n: module.register_parameter(n, None)):
            with pytest.raises(ArgumentError, match=rf"{kind}: got {name} = None .* Allowed: another Parameter"):
                take(name)
        assert getattr(module, name) is parameter
    run(module)
    if kind == "Linear":
        without = te.Linear(64, 48, bias=False, device="cpu")
        without.register_parameter("more", None)
        without.more = None  # a name without a parameter may say so again
        run(without)
