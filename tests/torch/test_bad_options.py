"""What a constructor cannot do something right with is refused where it enters, by an error that names the argument."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import numpy as np
import pytest
import torch

import te_torch as te
from te_core import functional
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.table import OPTIONS
from te_core.ops.norm import MAX_ROW
from te_core.recipe import Float8CurrentScaling, Format
from tests.backends import cuda_devices, requires_cuda
from tests.refusals import not_refused

NAN, INF = float("nan"), float("inf")
GOOD: dict[str, dict[str, Any]] = {
    "Linear": {"in_features": 32, "out_features": 48},
    "LayerNormLinear": {"in_features": 32, "out_features": 48},
    "LayerNormMLP": {"hidden_size": 32, "ffn_hidden_size": 64},
    "GroupedLinear": {"num_gemms": 2, "in_features": 32, "out_features": 48},
    "MoELayer": {"hidden_size": 32, "ffn_hidden_size": 48, "num_experts": 8, "topk": 2},
    "LayerNorm": {"normalized_shape": 32},
    "RMSNorm": {"normalized_shape": 32},
    "MultiheadAttention": {"hidden_size": 32, "num_attention_heads": 2},
    "TransformerLayer": {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2},
    "DotProductAttention": {"num_attention_heads": 2, "kv_channels": 16},
    "RotaryPositionEmbedding": {"dim": 16},
    "Fp8Padding": {"num_gemms": 2},
    "Fp8Unpadding": {"num_gemms": 2},
    "InferenceParams": {"max_batch_size": 2, "max_sequence_length": 16, "num_heads_kv": 2, "head_dim_k": 16,
                        "dtype": torch.float32},
}  # fmt: skip

SIZE = (0, -16, 32.0, "32", True)
FLAG = ("no", None, 2, [], 1.0)
#: Values that each argument must not have, in whatever module it is an argument of.
BAD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("in_features", "out_features", "ffn_hidden_size", "num_attention_heads", "num_gemms", "num_gqa_groups",
         "kv_channels", "layer_number", "align_size", "hidden_size", "normalized_shape", "dim",
         "pretrained_max_position_embeddings", "max_batch_size", "max_sequence_length", "num_heads_kv", "head_dim_k",
         "head_dim_v", "page_size", "total_num_pages", "max_ctx_len", "num_experts", "topk",
         "shared_ffn_hidden_size"), SIZE,
    ),
    **dict.fromkeys(("num_groups", "group_topk"), (-1, 1.5, "2")),
    "scaling_factor": (NAN, INF, "1"),
    **dict.fromkeys(("expert_bias_rate", "aux_loss_coeff"), (-1.0, NAN, INF, "1", None)),
    "score_function": ("xyz", None),
    "rotary_percent": (0.0, -0.5, 1.5, NAN, None),
    "rotary_base": (0, -1.0, INF, "10000", None),
    "seq_len_interpolation_factor": (0, -2, NAN, "2"),
    "tp_size": (0, -1, 1.5),
    **dict.fromkeys(("eps", "layernorm_epsilon", "qk_norm_eps"), (-1.0, NAN, INF, "1e-5", None)),
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "drop_path_rate"), (-0.1, 1.5, NAN, "0.1", None)),
    **dict.fromkeys(
        ("params_dtype", "dtype"), (torch.float64, torch.int32, torch.float8_e4m3fn, torch.complex64, "float32", [])
    ),
    **dict.fromkeys(
        ("bias", "return_bias", "zero_centered_gamma", "fuse_wgrad_accumulation", "delay_wgrad_compute", "checkpoint",
         "return_layernorm_output", "return_layernorm_output_gathered", "input_layernorm", "output_layernorm",
         "parallel_attention_mlp", "apply_residual_connection_post_layernorm", "fuse_qkv_params",
         "qkv_weight_interleaved", "rotary_pos_interleaved", "qk_norm_before_rope", "return_max_logit",
         "save_original_input", "single_grouped_weight", "single_grouped_bias", "interleaved", "ub_overlap_ag",
         "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad", "ub_tp_comm_overlap",
         "use_pre_softmax", "expert_bias", "return_aux_loss", "shared_gate"), FLAG,
    ),
    **dict.fromkeys(
        ("sequence_parallel", "set_parallel_mode", "bottom_right_diagonal", "enc_dec_bottom_right_diagonal",
         "is_paged"), ("no", 2, []),
    ),
    **dict.fromkeys(("window_size", "enc_dec_window_size"), (5, (1,), "ab", (1.5, 0))),
    "normalization": ("layernorm", None, 5),
    **dict.fromkeys(("init_method", "output_layer_init_method", "get_rng_state_tracker"), ("normal", 5)),
    "device": ("gpu", "mps", "cuda:99", 1.5),
    **dict.fromkeys(("name", "rng_tracker_name"), (5, b"x")),
    **dict.fromkeys(("qkv_format", "attn_input_format"), ("xyz", None)),
    **dict.fromkeys(("softmax_type", "attention_type", "layer_type"), ("xyz", None)),
    **dict.fromkeys(("attn_mask_type", "self_attn_mask_type", "enc_dec_attn_mask_type"), ("xyz",)),
    "qk_norm_type": ("xyz", 5),
    "softmax_scale": (NAN, INF, "1"),
    "logit_softcap": (-1.0, NAN, "1"),
    "sm_margin": (-1, 1.5, "1", {"fwd": 1}, {"forward": -1}),
    "activation": ("GELU", None, 5),
    "activation_params": (5, {"limit": "x"}, {"bounds": 1.0}),
    "parallel_mode": ("xyz",),
    "ub_name": (5,),
}  # fmt: skip
#: Arguments that are judged elsewhere, or change nothing whatever they are.
ELSEWHERE = {
    "tp_group",
    "cp_group",
    "cp_global_ranks",
    "cp_stream",
    "cp_comm_type",  # groups: refused unless of one rank
    "symmetric_ar_type",
    "seq_length",
    "micro_batch_size",  # without effect, as documented
    "parameters_split",
    "custom_cache_manager",
    "use_grouped_tensor",  # tests of their own, with the documented TypeError
}

CASES = [
    (kind, name, value)
    for kind in GOOD
    for name in inspect.signature(getattr(te, kind).__init__).parameters
    for value in BAD.get(name, ())
    # None is what some modules call "as usual" or "the older name is meant".
    if (kind, name, value) != ("MultiheadAttention", "qk_norm_type", None)
]


def make(kind: str, **options: Any) -> torch.nn.Module:
    here = {"device": "cpu"} if "device" in inspect.signature(getattr(te, kind).__init__).parameters else {}
    return getattr(te, kind)(**{**here, **GOOD[kind], **options})


def test_every_argument_is_judged_somewhere() -> None:
    """A new argument of a constructor joins the table above, or the list of those that are judged elsewhere."""
    known = BAD.keys() | ELSEWHERE | {"self"}
    assert {name for kind in GOOD for name in inspect.signature(getattr(te, kind).__init__).parameters} <= known


def complaint(kind: str, name: str, value: Any) -> str:
    """What is wrong with how one value is refused; nothing where all is right."""
    options = {name: value}
    if (kind, name) == ("LayerNorm", "hidden_size") or (kind, name) == ("RMSNorm", "hidden_size"):
        options["normalized_shape"] = None
    try:
        make(kind, **options)
    except (ArgumentError, UnsupportedError) as e:
        if name.removeprefix("self_").removeprefix("enc_dec_") not in e.got or repr(value) not in e.got:
            return f"does not say what it got: {e}"
        if not e.allowed or not e.do or e.where:
            return f"lacks a part: {e}"
        # Some options have their own judge in the part that they are handed to.
        judged = ("activation", "activation_params", "qk_norm_type", "softmax_type", "attention_dropout", "window_size")
        return "" if e.operation == kind or name in judged or "mask_type" in name else f"names another class: {e}"
    except BaseException as e:  # an error of another kind belongs to its row, too
        return f"raises {e!r}"
    return "is taken"


@pytest.mark.parametrize("kind", GOOD)
def test_refused_where_it_enters(kind: str) -> None:
    """By an error in four parts that names the class which the user wrote, and the argument with its value."""
    found = {(name, repr(value)): complaint(of, name, value) for of, name, value in CASES if of == kind}
    assert not {case: said for case, said in found.items() if said}


#: Parts that come later.
NOT_BUILT: dict[str, Any] = {
    "symmetric_ar_type": "multimem_all_reduce",
    "activation_params": {"limit": 7.0},
    "activation": "tanh",
}
LATER = [
    (kind, option)
    for kind in ("Linear", "LayerNormLinear", "LayerNormMLP")
    for option in NOT_BUILT
    if option in inspect.signature(getattr(te, kind).__init__).parameters
]


#: Of the layers' table: a wrong value of each of some options.
OF_TABLE = {"eps": -1.0, "zero_centered_gamma": "no", "return_layernorm_output": 2}


@pytest.mark.parametrize("name", OF_TABLE)
def test_an_option_of_a_layer_has_the_rule_and_the_text_of_the_table(name: str) -> None:
    option, arrays = OPTIONS[name], [np.ones(shape, "f") for shape in ((4, 32), 32, (8, 32))]
    for call in (lambda **wrong: te.LayerNormLinear(32, 48, **wrong), lambda **wrong: rms(*arrays, **wrong)):
        with pytest.raises(ArgumentError) as error:
            call(**{name: OF_TABLE[name]})
        assert error.value.allowed == option.said()
    for where in (te.LayerNormLinear, functional.layernorm_linear):
        assert f"{name}: {option.about}" in (where.__doc__ or "")


def rms(x: Any, gamma: Any, weight: Any, **options: Any) -> Any:
    """Of te_core.functional, with a norm that has no bias."""
    return functional.layernorm_linear(x, gamma, weight=weight, normalization="RMSNorm", **options)


def test_refused_options() -> None:
    """Parts that come later are refused in four parts, never ignored."""
    wrong = {}
    for kind, option in LATER:
        try:
            make(kind, **{option: NOT_BUILT[option]})
        except UnsupportedError as e:
            whole = kind in e.operation and option in e.got and e.allowed and e.do
            if not whole or str(e) != f"{e.operation}: got {e.got}. Allowed: {e.allowed}. To do: {e.do}.":
                wrong[kind, option] = str(e)
        else:
            wrong[kind, option] = "is taken"
    assert not wrong


@pytest.mark.parametrize("kind", [k for k in GOOD if "params_dtype" in str(inspect.signature(getattr(te, k)))])
def test_a_default_dtype_that_modules_do_not_take(kind: str) -> None:
    """It would make parameters that no input fits; a dtype that is given goes before it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ArgumentError, match=r"get_default_dtype\(\)=torch\.float64"):
            make(kind)
        made = make(kind, **{"dtype" if kind in ("LayerNorm", "RMSNorm") else "params_dtype": torch.bfloat16})
        assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
    finally:
        torch.set_default_dtype(before)


def test_numbers_and_flags_of_other_libraries() -> None:
    """What counts as an integer or a bool in Python stands for one here."""
    layer = te.LayerNormLinear(
        np.int64(32), np.int32(48), eps=np.float32(1e-3), bias=np.bool_(False), return_bias=0, device="cpu"
    )
    assert layer(torch.randn(2, 32)).shape == (2, 48) and layer.use_bias == False  # noqa: E712  NumPy's
    assert te.LayerNorm(torch.Size([4, 8]), device="cpu").weight.shape == (4, 8)
    assert te.DotProductAttention(2, (16, 8))._static[2:4] == (16, 8)
    whole = te.TransformerLayer(
        np.int64(32), np.int64(64), np.int64(2), num_gqa_groups=np.int64(1), window_size=(np.int64(3), 0), device="cpu"
    )
    assert whole(torch.randn(5, 3, 32)).shape == (5, 3, 32)
    logits, target = torch.randn(1, 2, 8), torch.tensor([[1, 3]])
    assert not te.parallel_cross_entropy(logits, target, ignore_idx=np.int64(3))[0, 1]


def test_the_widest_norm() -> None:
    widths = {"LayerNorm": "normalized_shape", "LayerNormLinear": "in_features", "LayerNormMLP": "hidden_size"}
    for kind, name in widths.items():
        make(kind, **{name: MAX_ROW, "device": "meta"})


def test_a_device_that_is_only_imagined() -> None:
    """Under fake tensors a GPU need not be there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not cuda_devices():
        with pytest.raises(ArgumentError, match="device='cuda'.*'cuda' where there is a GPU"):
            te.Linear(8, 8, device="cuda")
    if not torch.version.cuda:
        with pytest.raises(ArgumentError, match="is built for the CPU") as error:
            te.Linear(8, 8, device="cuda")
        assert f"torch {torch.__version__}" in error.value.allowed
    with FakeTensorMode():
        assert te.Linear(8, 8, device="cuda").weight.device.type == "cuda"


@requires_cuda
def test_devices_by_number() -> None:
    for device in (0, "cuda", "cuda:0", torch.device("cuda", 0)):
        assert te.Linear(8, 8, device=device).weight.is_cuda


def test_classes_of_users_have_what_arguments_they_like() -> None:
    class Named:
        def __new__(cls, *args: Any, **given: Any) -> Any:
            made = super().__new__(cls)
            made.__dict__["given"] = args, given
            return made

    class Mine(te.Linear, Named):
        def __init__(self, width: int, **rest: Any) -> None:
            super().__init__(width, width, device="cpu")
            self.rest = rest

    made = Mine(8, biass=3)
    assert made.rest == {"biass": 3} and made.given == ((8,), {"biass": 3}) and made.weight.shape == (8, 8)
    assert copy.deepcopy(made).rest == made.rest


def test_a_norm_may_be_made_in_compiled_code() -> None:
    """A compiler follows how the object is made, too."""

    def program(t: torch.Tensor) -> torch.Tensor:
        return make("LayerNorm")(t)

    t = x()
    assert torch.equal(torch.compile(program, backend="eager")(t), program(t))


# ---------------------------------------------------------------------------------- what functions are given


def linear() -> te.Linear:
    return te.Linear(32, 32, device="cpu")


def x(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 32)


YES = ("yes", 2, [], 0.5)
E4M3 = te.DType.kFloat8E4M3
#: (what is called, by which name its errors call it, the arguments that it refuses).
FUNCTIONS: list[tuple[Any, str, dict[str, tuple[Any, ...]]]] = [
    (te.autocast, "autocast", dict.fromkeys(("calibrating", "strict", "emulate", "check_finite"), YES)),
    (lambda **g: te.checkpoint(linear(), x(), **g), "checkpoint", {"use_reentrant": ("maybe", *YES, None)}),
    (lambda **g: linear()(x(), **g), "Linear.forward",
     dict.fromkeys(("is_first_microbatch", "fp8_output", "fp8_grad"), ("yes", 2))),
    (lambda **g: make("LayerNormLinear")(x(), **g), "LayerNormLinear.forward", {"is_first_microbatch": YES}),
    (lambda **g: make("LayerNormMLP")(x(), **g), "LayerNormMLP.forward", {"is_first_microbatch": YES}),
    (lambda **g: make("GroupedLinear")(x(), [2, 2], **g), "GroupedLinear.forward", {"is_first_microbatch": YES}),
    (lambda **g: make("DotProductAttention")(*[torch.randn(4, 1, 2, 16) for _ in range(3)], **g),
     "DotProductAttention", dict.fromkeys(("checkpoint_core_attention", "bottom_right_diagonal"), YES)),
    (te.get_cpu_offload_context, "get_cpu_offload_context",
     dict.fromkeys(("enabled", "offload_weights", "double_buffering", "manual_synchronization"), YES)),
    (lambda **g: te.convert(torch.nn.Sequential(), **g), "convert", {"dry_run": YES, "filter": ("x", 5)}),
    (lambda **g: te.nonfinite_report(linear(), **g), "nonfinite_report", {"reset": YES}),
    *((f, f.__name__, {"model": ("x", None)}) for f in (
        te.nonfinite_report, te.precision_report, te.memory_report, te.measure_saved, te.plain_state_dict)),
    (lambda **g: te.prepare_state(recipe=Float8CurrentScaling(), **g), "prepare_state", {"model": ("x", None)}),
    (lambda **g: te.memory_report(linear(), **g), "memory_report", {"saved": ("x",)}),
    (lambda **g: te.interleave_glu_tensor(**{"tensor": x(), "interleave_size": 2, **g}), "interleave_glu_tensor",
     {"tensor": ("x", None), "interleave_size": ("2", 1.5, None, 0)}),
    (lambda **g: linear().adjust_amax_history_length(**g), "adjust_amax_history_length",
     {"length": ("2", 1.5, None, 0)}),
    (lambda **g: te.Float8CurrentScalingQuantizer(E4M3, **g), "Float8CurrentScalingQuantizer",
     {"rowwise": YES, "force_pow_2_scales": YES, "amax_epsilon": ("1", -1.0, NAN)}),
    (lambda **g: te.Float8BlockQuantizer(E4M3, **{"rowwise": True, "columnwise": True, **g}), "Float8BlockQuantizer",
     {"columnwise": YES, "force_pow_2_scales": YES, "amax_epsilon": ("1", -1.0, NAN)}),
    (lambda **g: te.MXFP8Quantizer(E4M3, **g), "MXFP8Quantizer", {"with_2d_quantization": YES}),
    (te.NVFP4Quantizer, "NVFP4Quantizer", {"with_rht": YES, "stochastic_rounding": YES, "nvfp4_use_4over6": YES}),
    (te.IdentityQuantizer, "IdentityQuantizer", {"dtype": ("float32", torch.int32)}),
    (te.DelayedScalingRequest, "DelayedScalingRequest",
     {"fp8_format": ("x", Format.E2M1), "margin": ("x", 1000), "amax_history_len": (0, "2", 1.5), "reduce_amax": YES,
      "amax_compute_algo": ("mean", 5), "scaling_factor_compute_algo": ("x",)}),
]  # fmt: skip


def test_functions_refuse_values_of_wrong_kinds() -> None:
    """Where they enter, by name: nothing is taken for yes because it is not empty."""
    wrong = {}
    for call, operation, refused in FUNCTIONS:
        for name, values in refused.items():
            for value in values:
                said = f"^{operation}( in .*)?: got .*{'model' if name == 'model' else name}"
                wrong[operation, name, repr(value)] = not_refused(ArgumentError, said, call, **{name: value})
    wrong = {case: said for case, said in wrong.items() if said and "unhashable" not in said}
    assert not wrong


def test_functions_take_what_stands_for_yes_and_no() -> None:
    for value in (True, 1, np.bool_(True), None):
        te.autocast(calibrating=value, emulate=value, check_finite=value)  # type: ignore[arg-type]
        linear()(x(), is_first_microbatch=value)
    assert te.autocast(emulate=np.bool_(True))._mode == te.autocast(emulate=True)._mode  # type: ignore[arg-type]
