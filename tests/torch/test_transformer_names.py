"""MultiheadAttention and TransformerLayer: names of parameters and parts, checkpoints, refused calls."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import Float8CurrentScaling
from te_torch.transformer.layer import TransformerLayer
from te_torch.transformer.multihead import MultiheadAttention
from tests.torch.test_multihead import CROSS, ENCODED, FUSED, GQA, NORM, WIDTH, B, S
from tests.torch.test_multihead import make as attention
from tests.torch.test_transformer_layer import DECODER, inputs, make
from tests.world import step, values

# ------------------------------------------------------------------------------------ MultiheadAttention


def both(*parts: str) -> set[str]:
    return {f"{part}{kind}" for part in parts for kind in ("weight", "bias")}


SPLIT = ("query_", "key_", "value_")
INNER = {"layernorm_qkv.layer_norm_weight", "layernorm_qkv.layer_norm_bias"}
#: The parameters of an attention beside its projection's, by its options.
NAMED: list[tuple[dict[str, Any], set[str]]] = [
    ({}, both(*(f"qkv.{part}" for part in SPLIT))),
    (FUSED, both("qkv.")),
    ({**FUSED, "bias": False}, {"qkv.weight"}),
    ({**NORM, **FUSED}, both("layernorm_qkv.") | INNER),
    ({**NORM, **FUSED, "normalization": "RMSNorm"}, both("layernorm_qkv.") | {"layernorm_qkv.layer_norm_weight"}),
    (CROSS, both("query_layer.query_", "key_value.key_", "key_value.value_")),
    ({**CROSS, **FUSED}, both("query_layer.", "key_value.")),
    (
        {**CROSS, **NORM},
        both("layernorm_query.query_", "layernorm_query.layer_norm_", "key_value.key_", "key_value.value_"),
    ),
    ({**FUSED, "qk_norm_type": "RMSNorm"}, both("qkv.") | {"q_norm.weight", "k_norm.weight"}),
    ({**FUSED, "qk_norm_type": "LayerNorm"}, both("qkv.", "q_norm.", "k_norm.")),
    ({**FUSED, "qk_norm_type": "L2Normalization"}, both("qkv.")),
    ({**FUSED, "softmax_type": "learnable"}, both("qkv.") | {"core_attention.softmax_offset"}),
]


def test_attention_parameters() -> None:
    """Names as documented, and before FP8 nothing else in the state; heads and groups of 16, 2 groups."""
    for options, names in NAMED:
        module = attention("cpu", **GQA, **options)
        last = {"proj.weight", "proj.bias"} if options.get("bias", True) else {"proj.weight"}
        assert set(dict(module.named_parameters())) == set(module.state_dict()) == names | last, options
    shapes = {name: tuple(p.shape) for name, p in attention("cpu", **GQA).named_parameters() if "weight" in name}
    rows = {"qkv.query_weight": 64, "qkv.key_weight": 32, "qkv.value_weight": 32, "proj.weight": 64}
    assert shapes == {name: (n, 64) for name, n in rows.items()}


def test_names_of_an_attention() -> None:
    """Of those that a layer's does not show."""
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


# -------------------------------------------------------------------------------------- TransformerLayer

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


def test_weight_gradients_that_parts_put_off() -> None:
    plain, later = make("cpu"), make("cpu")
    later.load_state_dict(plain.state_dict())
    assert not later.need_backward_dw()
    later.backward_dw()  # nothing to do
    put_off = [later.self_attention.proj, later.layernorm_mlp]
    for part in put_off:
        part._accumulate(False, True)  # what delay_wgrad_compute=True makes of a part
    assert later.need_backward_dw()
    for layer in (plain, later):
        with te.autocast(recipe=Float8CurrentScaling()):
            layer(inputs("cpu")).square().sum().backward()
    got = dict(later.named_parameters())
    names = {"self_attention.proj.weight", "layernorm_mlp.fc1_weight", "layernorm_mlp.fc2_weight"}
    assert {name for name, p in got.items() if p.grad is None} == names
    later.backward_dw()
    assert all(torch.equal(got[name].grad, p.grad) for name, p in plain.named_parameters())


def test_fp8_state_is_started_anew() -> None:
    layer = make("cpu")
    step(layer, inputs("cpu"), "delayed")
    scales = [t for n, t in layer.named_buffers() if n.endswith("fp8_state.scale_fwd")]
    assert len(scales) >= 3 and any((t != 1).any() for t in scales)
    layer.reset_fp8_meta_tensors()
    assert all((t == 1).all() for t in scales)


# -------------------------------------------------------------------------------------------------- both

MAKE: dict[str, Any] = {"MultiheadAttention": attention, "TransformerLayer": make}


@pytest.mark.parametrize(
    ("kind", "options", "parts", "how"),
    [
        ("MultiheadAttention", {}, ("",), "a2a"),
        ("TransformerLayer", DECODER, ("self_attention.", "inter_attention."), "all_gather"),
    ],
)
def test_groups_reach_every_attention(kind: str, options: dict[str, Any], parts: tuple[str, ...], how: str) -> None:
    module = MAKE[kind]("cpu", **options)
    module.set_tensor_parallel_group(None)
    module.set_context_parallel_group(None, [0], "stream", how)
    for part in parts:
        core = module.get_submodule(f"{part}core_attention")
        assert (core.cp_global_ranks, core.cp_stream, core.cp_comm_type) == ([0], "stream", how)
