"""MultiheadAttention and TransformerLayer: signatures, names of parameters and parts, checkpoints, refused options."""

from __future__ import annotations

import contextlib
import inspect
import pickle
from typing import Any

import pytest
import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_torch.transformer.layer import TransformerLayer
from te_torch.transformer.multihead import MultiheadAttention
from tests.module_steps import step, values
from tests.torch.test_multihead import CROSS, ENCODED, FUSED, GQA, NORM, WIDTH, B, S
from tests.torch.test_multihead import make as attention
from tests.torch.test_transformer_layer import DECODER, LATE, inputs, make

# ------------------------------------------------------------------------------------ MultiheadAttention

ATTENTION = """hidden_size num_attention_heads kv_channels=None attention_dropout=0.1 layernorm_epsilon=1e-05
    init_method=None output_layer_init_method=None layer_number=None attn_mask_type='causal' window_size=None
    bottom_right_diagonal=None tp_group=None tp_size=1 num_gqa_groups=None fuse_wgrad_accumulation=False
    get_rng_state_tracker=None sequence_parallel=False params_dtype=None return_bias=False
    return_layernorm_output=False input_layernorm=False attention_type='self' set_parallel_mode=False
    fuse_qkv_params=False zero_centered_gamma=False qkv_weight_interleaved=True rotary_pos_interleaved=False
    ub_overlap_ag=False ub_overlap_rs=False ub_overlap_rs_dgrad=False ub_bulk_dgrad=False ub_bulk_wgrad=False bias=True
    normalization='LayerNorm' device=None qkv_format='sbhd' name=None qk_norm_type=None qk_norm_eps=1e-06
    qk_norm_before_rope=False seq_length=None micro_batch_size=None softmax_type='vanilla'"""
ATTEND = """hidden_states attention_mask=None encoder_output=None attn_mask_type=None window_size=None
    bottom_right_diagonal=None is_first_microbatch=None checkpoint_core_attention=False inference_params=None
    rotary_pos_emb=None core_attention_bias_type='no_bias' core_attention_bias=None alibi_slopes=None cu_seqlens_q=None
    cu_seqlens_kv=None cu_seqlens_q_padded=None cu_seqlens_kv_padded=None max_seqlen_q=None max_seqlen_kv=None
    fast_zero_fill=True pad_between_seqs=None"""


def signature(function: Any) -> str:
    found = list(inspect.signature(function).parameters.values())[1:]
    return " ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in found)


def test_attention_signatures() -> None:
    assert signature(MultiheadAttention.__init__) == " ".join(ATTENTION.split())
    assert signature(MultiheadAttention.forward) == " ".join(ATTEND.split())


def test_attention_parameters() -> None:
    """Names and shapes as documented; heads and groups of 16, 2 groups."""
    rows = {"query": 64, "key": 32, "value": 32}

    def named(**options: Any) -> dict[str, tuple[int, ...]]:
        module = attention("cpu", **GQA, **options)
        found = {name: tuple(p.shape) for name, p in module.named_parameters()}
        assert set(found) == set(module.state_dict()), "before FP8 there is nothing else"
        assert found.pop("proj.weight") == (64, 64) and found.pop("proj.bias", (64,)) == (64,)
        return found

    def both(prefix: str, n: int) -> dict[str, tuple[int, ...]]:
        return {f"{prefix}weight": (n, 64), f"{prefix}bias": (n,)}

    def split(*parts: str) -> dict[str, tuple[int, ...]]:
        return {k: v for part in parts for k, v in both(f"{part}_", rows[part.rpartition(".")[2]]).items()}

    norm = {"layer_norm_weight": (64,), "layer_norm_bias": (64,)}
    assert named() == split("qkv.query", "qkv.key", "qkv.value")
    assert named(**FUSED) == both("qkv.", 128)
    assert named(bias=False, **FUSED) == {"qkv.weight": (128, 64)}
    assert named(**NORM, **FUSED) == both("layernorm_qkv.", 128) | {f"layernorm_qkv.{n}": s for n, s in norm.items()}
    assert named(**NORM, **FUSED, normalization="RMSNorm").keys() == {
        "layernorm_qkv.layer_norm_weight",
        "layernorm_qkv.weight",
        "layernorm_qkv.bias",
    }
    assert named(**CROSS) == split("query_layer.query", "key_value.key", "key_value.value")
    assert named(**CROSS, **FUSED) == both("query_layer.", 64) | both("key_value.", 64)
    assert named(**CROSS, **NORM) == split("layernorm_query.query", "key_value.key", "key_value.value") | {
        f"layernorm_query.{n}": s for n, s in norm.items()
    }
    normed = {"q_norm.weight": (16,), "k_norm.weight": (16,)}
    assert named(qk_norm_type="RMSNorm", **FUSED) == both("qkv.", 128) | normed
    assert named(qk_norm_type="LayerNorm", **FUSED) == both("qkv.", 128) | normed | {
        "q_norm.bias": (16,),
        "k_norm.bias": (16,),
    }
    assert named(qk_norm_type="L2Normalization", **FUSED) == both("qkv.", 128)
    assert named(softmax_type="learnable", **FUSED) == both("qkv.", 128) | {"core_attention.softmax_offset": (4,)}


def test_attention_initialisation_and_names() -> None:
    def fill(value: float) -> Any:
        return lambda w: w.fill_(value)

    module = MultiheadAttention(
        64, 4, init_method=fill(3), output_layer_init_method=fill(5), name="N.self_attention", **NORM, device="cpu"
    )
    assert (module.layernorm_qkv.key_weight == 3).all() and (module.proj.weight == 5).all()
    assert not module.proj.bias.any() and (module.layernorm_qkv.layer_norm_weight == 1).all()
    names = {n: m.name for n, m in module.named_modules() if n and hasattr(m, "name")}
    assert names == {
        "layernorm_qkv": "N.self_attention.layernorm_linear_qkv",
        "core_attention": "N.self_attention.core_attention",
        "proj": "N.self_attention.proj",
    }
    assert attention("cpu", name="a").qkv.name == "a.linear_qkv"
    cross = attention("cpu", name="a", **CROSS)
    assert cross.key_value.name == "a.linear_kv" and cross.query_layer.name.startswith("Layer_")
    assert attention("cpu", name="a", **CROSS, **NORM).layernorm_query.name == "a.layernorm_linear_q"
    plain = attention("cpu", normalization="LayerNorm")
    assert plain.name.startswith("Layer_") and plain.proj.name == f"{plain.name}.proj"
    assert attention("cpu", qkv_weight_interleaved=True).qkv_weight_interleaved is False, "only of one parameter"
    later = attention("cpu", **FUSED, params_dtype=torch.bfloat16)
    assert {p.dtype for p in later.parameters()} == {torch.bfloat16}


def test_a_module_on_the_meta_device_is_filled_later() -> None:
    module = MultiheadAttention(64, 4, device="meta", qk_norm_type="RMSNorm", softmax_type="learnable", **NORM)
    assert all(p.is_meta for p in module.parameters())
    for part in module.modules():
        if part is not module and hasattr(part, "reset_parameters"):
            part.reset_parameters()
    x = values(S, B, WIDTH, device=str(next(module.parameters()).device))
    assert torch.isfinite(module(x)).all()


def test_groups_reach_all_parts_of_an_attention() -> None:
    module = attention("cpu")
    module.set_tensor_parallel_group(None)
    module.set_context_parallel_group(None, [0], "stream", "a2a")
    core = module.core_attention
    assert (core.cp_global_ranks, core.cp_stream, core.cp_comm_type) == ([0], "stream", "a2a")


def test_refused_by_attention() -> None:
    for options, kind, said in (
        ({"num_gqa_groups": 3}, AssertionError, "num_gqa_groups=3"),
        ({"layer_number": 0}, AssertionError, "layer_number=0"),
        ({"attention_type": "both"}, AssertionError, "'self' or 'cross'"),
        ({"qkv_format": "bhsd"}, ArgumentError, "bhsd"),
        ({"qk_norm_type": "BatchNorm"}, ValueError, "L2Normalization"),
        ({"tp_size": 2}, UnsupportedError, "tp_size"),
        ({"ub_overlap_ag": True}, UnsupportedError, "ub_overlap_ag"),
        ({"fuse_wgrad_accumulation": True}, ValueError, "fuse_qkv_params=True"),
        ({"normalization": "BatchNorm", **NORM}, AssertionError, "RMSNorm"),
    ):
        with pytest.raises(kind, match=said):
            attention("cpu", **options)
    x = values(S, B, WIDTH)
    module = attention("cpu")
    with pytest.raises(ValueError, match="no_mask"):
        module(x, attn_mask_type="diagonal")
    with pytest.raises(ArgumentError, match="3 dimensions in sbhd"):
        module(x[0])
    with pytest.raises(ArgumentError, match="encoder_output"):
        attention("cpu", **CROSS)(x)
    with pytest.raises(ArgumentError, match="layer_number"):
        module(x, inference_params=object())
    unpadded = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    assert torch.equal(module(x, attn_mask_type="causal,padding", attention_mask=unpadded), module(x)), "an alias"


# -------------------------------------------------------------------------------------- TransformerLayer

CONSTRUCTOR = """hidden_size ffn_hidden_size num_attention_heads num_gqa_groups=None layernorm_epsilon=1e-05
    hidden_dropout=0.1 attention_dropout=0.1 init_method=None output_layer_init_method=None layer_number=None
    kv_channels=None self_attn_mask_type='causal' window_size=None bottom_right_diagonal=None
    enc_dec_attn_mask_type='no_mask' enc_dec_bottom_right_diagonal=None enc_dec_window_size=None tp_group=None tp_size=1
    params_dtype=None get_rng_state_tracker=None fuse_wgrad_accumulation=False seq_length=None micro_batch_size=None
    sequence_parallel=False apply_residual_connection_post_layernorm=False output_layernorm=False
    parallel_attention_mlp=False layer_type='encoder' drop_path_rate=0.0 set_parallel_mode=False fuse_qkv_params=False
    rotary_pos_interleaved=False zero_centered_gamma=False qkv_weight_interleaved=True ub_tp_comm_overlap=False
    ub_overlap_ag=True ub_overlap_rs=True ub_overlap_rs_dgrad=False ub_bulk_dgrad=True ub_bulk_wgrad=True bias=True
    activation='gelu' activation_params=None normalization='LayerNorm' device=None attn_input_format='sbhd' name=None
    qk_norm_type=None qk_norm_eps=1e-06 qk_norm_before_rope=False softmax_type='vanilla'"""
FORWARD = """hidden_states attention_mask=None self_attn_mask_type=None window_size=None bottom_right_diagonal=None
    encoder_output=None enc_dec_attn_mask=None enc_dec_attn_mask_type=None enc_dec_window_size=None
    enc_dec_bottom_right_diagonal=None is_first_microbatch=None checkpoint_core_attention=False inference_params=None
    rotary_pos_emb=None core_attention_bias_type='no_bias' core_attention_bias=None alibi_slopes=None cu_seqlens_q=None
    cu_seqlens_kv=None cu_seqlens_q_padded=None cu_seqlens_kv_padded=None max_seqlen_q=None max_seqlen_kv=None
    fast_zero_fill=True pad_between_seqs=None"""


def test_signatures() -> None:
    assert signature(TransformerLayer.__init__) == " ".join(CONSTRUCTOR.split())
    assert signature(TransformerLayer.forward) == " ".join(FORWARD.split())


QKV = ("query_weight", "key_weight", "value_weight", "query_bias", "key_bias", "value_bias")
LAYER_NORM = ("layer_norm_weight", "layer_norm_bias")
KEYS = {
    "self_attention.layernorm_qkv": (*LAYER_NORM, *QKV),
    "self_attention.proj": ("weight", "bias"),
    "layernorm_mlp": (*LAYER_NORM, "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"),
}
#: What options change: entries of a part, None where the part is gone.
CHANGED: dict[str, tuple[dict[str, Any], dict[str, tuple[str, ...] | None]]] = {
    "default": ({}, {}),
    "fused": ({"fuse_qkv_params": True}, {"self_attention.layernorm_qkv": (*LAYER_NORM, "weight", "bias")}),
    "RMSNorm": (
        {"normalization": "RMSNorm"},
        {
            "self_attention.layernorm_qkv": (LAYER_NORM[0], *QKV),
            "layernorm_mlp": (LAYER_NORM[0], "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"),
        },
    ),
    "no bias": (
        {"bias": False},
        {
            "self_attention.layernorm_qkv": (*LAYER_NORM, *QKV[:3]),
            "self_attention.proj": ("weight",),
            "layernorm_mlp": (*LAYER_NORM, "fc1_weight", "fc2_weight"),
        },
    ),
    "output norm": (
        {"output_layernorm": True},
        {"self_attention.layernorm_qkv": None, "self_attention.qkv": QKV, "layernorm": ("weight", "bias")},
    ),
    "decoder": (
        DECODER,
        {
            "inter_attention.layernorm_query": (*LAYER_NORM, "query_weight", "query_bias"),
            "inter_attention.key_value": ("key_weight", "value_weight", "key_bias", "value_bias"),
            "inter_attention.proj": ("weight", "bias"),
        },
    ),
    "learnable": ({"softmax_type": "learnable"}, {"self_attention.core_attention": ("softmax_offset",)}),
    "qk norm": (
        {"qk_norm_type": "LayerNorm"},
        {"self_attention.q_norm": ("weight", "bias"), "self_attention.k_norm": ("weight", "bias")},
    ),
    "qk L2": ({"qk_norm_type": "L2Normalization"}, {}),
}


@pytest.mark.parametrize("case", CHANGED)
def test_state_dict(case: str) -> None:
    """Keys as documented, without `_extra_state`; the peer's checkpoint of the same layer, with it, loads strictly."""
    options, changed = CHANGED[case]
    layer = make("cpu", **options)
    parts = {part: names for part, names in (KEYS | changed).items() if names is not None}
    wanted = {f"{part}.{name}" for part, names in parts.items() for name in names}
    assert set(layer.state_dict()) == wanted
    peers = dict(layer.state_dict())
    cores = {part.rpartition(".")[0] + ".core_attention" for part in parts if "attention" in part}
    for part in set(parts) | cores:
        peers[f"{part}._extra_state"] = torch.empty(0, dtype=torch.uint8)
    layer.load_state_dict(peers, strict=True)
    if case == "decoder":
        x, encoded = inputs("cpu"), values(ENCODED, B, WIDTH)
        step(lambda t: layer(t, encoder_output=encoded), x, "delayed", owner=layer)
        stateful = {n.rpartition(".fp8_state")[0] for n in layer.state_dict() if "fp8_state" in n}
        assert stateful == {part for part in parts if not part.endswith("core_attention")}


def test_names_of_parts() -> None:
    layer = make("cpu", name="N", layer_type="decoder")
    named = {n: m.name for n, m in layer.named_modules() if n and hasattr(m, "name")}
    assert named == {
        "self_attention": "N.self_attention",
        "self_attention.layernorm_qkv": "N.self_attention.layernorm_linear_qkv",
        "self_attention.core_attention": "N.self_attention.core_attention",
        "self_attention.proj": "N.self_attention.proj",
        "inter_attention": "N.inter_attention",
        "inter_attention.layernorm_query": "N.inter_attention.layernorm_linear_q",
        "inter_attention.key_value": "N.inter_attention.linear_kv",
        "inter_attention.core_attention": "N.inter_attention.core_attention",
        "inter_attention.proj": "N.inter_attention.proj",
        "layernorm_mlp": "N.layernorm_mlp",
    }
    roles = [layer.layernorm_mlp.quantizer_roles(gemm)[0].name for gemm in range(2)]
    assert roles == ["N.layernorm_mlp.fc1", "N.layernorm_mlp.fc2"]
    assert make("cpu", output_layernorm=True, name="N").self_attention.qkv.name == "N.self_attention.linear_qkv"
    first, second = (int(make("cpu").name.removeprefix("Layer_")) for _ in range(2))
    assert second == first + 1, "parts have names of their own and take no numbers"


def test_initialisation() -> None:
    layer = TransformerLayer(
        64,
        96,
        4,
        init_method=lambda w: w.fill_(3),
        output_layer_init_method=lambda w: w.fill_(5),
        device="cpu",
        layer_type="decoder",
        seq_length=12,
        micro_batch_size=2,
        set_parallel_mode=True,
    )
    cross = layer.inter_attention
    first = (
        layer.self_attention.layernorm_qkv.query_weight,
        layer.layernorm_mlp.fc1_weight,
        cross.key_value.key_weight,
        cross.layernorm_query.query_weight,
    )
    last = (layer.self_attention.proj.weight, layer.layernorm_mlp.fc2_weight, cross.proj.weight)
    assert all((w == 3).all() for w in first) and all((w == 5).all() for w in last)
    drops = (layer.hidden_dropout, layer.self_attention.core_attention.attention_dropout)
    assert drops == (0.1, 0.1)


def test_an_rng_tracker_is_used_for_weights_and_attention_dropout() -> None:
    entered = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Any:
            entered.append(name)
            yield

        def get_states(self) -> dict[str, Any]:
            return {}

        def set_states(self, states: dict[str, Any]) -> None: ...

    layer = TransformerLayer(64, 96, 4, get_rng_state_tracker=Tracker, device="cpu")
    made = len(entered)
    assert made == 6, "three projections, proj, fc1, fc2"
    layer(inputs("cpu"))
    assert len(entered) == made + 1


def test_fp8_state_is_started_anew() -> None:
    layer = make("cpu")
    step(layer, inputs("cpu"), "delayed")
    scales = [t for n, t in layer.named_buffers() if n.endswith("fp8_state.scale_fwd")]
    assert len(scales) >= 3 and any((t != 1).any() for t in scales)
    layer.reset_fp8_meta_tensors()
    assert all((t == 1).all() for t in scales)


def test_groups_reach_every_attention() -> None:
    layer = make("cpu", layer_type="decoder")
    layer.set_tensor_parallel_group(None)
    layer.set_context_parallel_group(None, [0], "stream", "all_gather")
    for part in (layer.self_attention, layer.inter_attention):
        assert (part.core_attention.cp_stream, part.core_attention.cp_comm_type) == ("stream", "all_gather")


def test_a_layer_can_be_pickled() -> None:
    layer, x = make("cpu"), inputs("cpu")
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


def test_refused() -> None:
    for options, said in (
        ({"layer_type": "both"}, "'encoder' or 'decoder'"),
        ({"hidden_dropout": 1.5}, "hidden_dropout=1.5. Allowed: a probability"),
        ({"drop_path_rate": 1.25}, "drop_path_rate=1.25"),
        ({"drop_path_rate": -0.5}, "drop_path_rate=-0.5"),
        ({"parallel_attention_mlp": True, "layer_type": "decoder"}, "decoder"),
        ({"parallel_attention_mlp": True, **LATE}, "post_layernorm"),
        ({"parallel_attention_mlp": True, "output_layernorm": True}, "output_layernorm"),
        ({"fuse_wgrad_accumulation": True}, "fuse_qkv_params"),
        ({"self_attn_mask_type": "diagonal"}, "no_mask"),
        ({"enc_dec_attn_mask_type": "diagonal"}, "no_mask"),
        ({"attn_input_format": "bhsd"}, "bshd"),
        ({"qk_norm_type": "BatchNorm"}, "L2Normalization"),
    ):
        with pytest.raises(ValueError, match=said):
            make("cpu", **options)
    with pytest.raises(AssertionError, match="RMSNorm"):
        make("cpu", normalization="BatchNorm")
    for sizes, more, said in (
        ((100, 200, 7), {}, r"hidden_size=100 in num_attention_heads=7\. Allowed: .*kv_channels"),
        ((64, 96, 0), {}, "num_attention_heads=0"),
        ((64, 96, -4), {}, "num_attention_heads=-4"),
        ((64, 96, 4), {"num_gqa_groups": 0}, "num_gqa_groups=0"),
        ((64, 96, 4), {"num_gqa_groups": 3}, "groups=3"),
        ((64, 96, 4), {"kv_channels": -8}, "kv_channels=-8"),
        ((0, 96, 4), {}, "hidden_size=0"),
    ):
        with pytest.raises(AssertionError, match=f"TransformerLayer: got .*{said}"):
            TransformerLayer(*sizes, device="cpu", **more)
        with pytest.raises(AssertionError, match=f"MultiheadAttention: got .*{said}"):
            MultiheadAttention(sizes[0], sizes[2], device="cpu", **more)
    assert TransformerLayer(100, 200, 7, kv_channels=14, device="cpu").self_attention.proj.weight.shape == (100, 98)
    for option in ({"tp_size": 2}, {"ub_tp_comm_overlap": True}, {"tp_size": 2, "sequence_parallel": True}):
        with pytest.raises(UnsupportedError):
            make("cpu", **option)
    layer, x = make("cpu"), inputs("cpu")
    with pytest.raises(ValueError, match="no_mask"):
        layer(x, self_attn_mask_type="diagonal")
    with pytest.raises(ValueError, match="no_mask"):
        layer(x, enc_dec_attn_mask_type="diagonal")
    for call in ({"attention_mask": torch.zeros(B, 1, 1, S)}, {"enc_dec_attn_mask": (torch.zeros(B, 1, 1, S),)}):
        with pytest.raises(TypeError, match="boolean"):
            layer(x, **call)
    with pytest.raises(ArgumentError, match="encoder_output"):
        make("cpu", layer_type="decoder")(x)
    with pytest.raises(ArgumentError, match="3 dimensions"):
        layer(x[0])
