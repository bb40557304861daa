"""TransformerLayer: every option against float64, the peer's results and checkpoints, dropout, FP8, layouts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from te_core.recipe import DelayedScaling
from te_torch.transformer.layer import TransformerLayer
from te_torch.transformer.multihead import MultiheadAttention
from tests.attention_steps import padding, sums
from tests.backends import on_devices
from tests.covering import covering
from tests.golden import load, tree
from tests.recipes import KINDS, region
from tests.reference import transformer_layer as reference
from tests.tolerances import DB, snr_db
from tests.torch.test_golden import LAYERS, make_layer
from tests.torch.test_multihead import angles, check
from tests.world import differences, gradient_for, on, randomise, step, values

WIDTH, FFN, HEADS, S, B = 64, 96, 4, 12, 2
ENCODED = 9


def make(device: str, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> TransformerLayer:
    """A layer whose every parameter is drawn at random; no dropout unless asked for."""
    none = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": dtype, "device": device}
    layer = TransformerLayer(WIDTH, FFN, HEADS, **{**none, **options})
    randomise(layer, seed)
    return layer


def calm(layer: TransformerLayer, factor: float) -> None:
    """Smaller matrices, as those that training begins with, for dtypes whose rounding large ones would amplify."""
    with torch.no_grad():
        [p.mul_(factor) for p in layer.parameters() if p.ndim == 2]


def inputs(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return values(S, B, WIDTH, device=device, dtype=dtype, seed=1)


# --------------------------------------------------------------------------------------- against float64

LLAMA = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "bias": False,
    "fuse_qkv_params": True,
    "num_gqa_groups": 2,
}
DECODER = {"layer_type": "decoder"}
LATE = {"apply_residual_connection_post_layernorm": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "fused": ({"fuse_qkv_params": True}, {}),
    "llama": (LLAMA, {"rotary_pos_emb": True}),
    "eps, zero-centered": ({"layernorm_epsilon": 0.1, "zero_centered_gamma": True}, {}),
    "kv_channels": ({"kv_channels": 8}, {}),
    "late residual": (LATE, {}),
    "output norm": ({"output_layernorm": True}, {}),
    "output RMSNorm, zero-centered": (
        {"output_layernorm": True, "normalization": "RMSNorm", "zero_centered_gamma": True},
        {},
    ),
    "output norm, late residual": ({"output_layernorm": True, **LATE}, {}),
    "parallel": ({"parallel_attention_mlp": True}, {}),
    "parallel, no bias": ({"parallel_attention_mlp": True, "bias": False}, {}),
    "decoder": (DECODER, {}),
    "decoder, llama": ({**DECODER, **LLAMA}, {"rotary_pos_emb": True}),
    "decoder, late residual": ({**DECODER, **LATE}, {}),
    "decoder, output norm": ({**DECODER, "output_layernorm": True}, {}),
    "decoder, masks": (
        {**DECODER, "self_attn_mask_type": "no_mask", "enc_dec_attn_mask_type": "causal_bottom_right"},
        {},
    ),
    "decoder, masks at the call": (
        DECODER,
        {"self_attn_mask_type": "no_mask", "enc_dec_attn_mask_type": "causal_bottom_right"},
    ),
    "decoder, windows": (
        {**DECODER, "window_size": (2, 0), "enc_dec_window_size": (3, 1), "enc_dec_bottom_right_diagonal": False},
        {},
    ),
    "decoder, windows at the call": (
        DECODER,
        {"window_size": (2, 0), "enc_dec_window_size": (3, 1), "enc_dec_bottom_right_diagonal": False},
    ),
    "qk norm": ({"qk_norm_type": "RMSNorm", "qk_norm_eps": 0.1}, {"rotary_pos_emb": True}),
    "qk norm before rope": ({"qk_norm_type": "L2Normalization", "qk_norm_before_rope": True}, {"rotary_pos_emb": True}),
    "interleaved rope": ({"rotary_pos_interleaved": True}, {"rotary_pos_emb": True}),
    "learnable": ({"softmax_type": "learnable"}, {}),
    "score bias": ({}, {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": True}),
    "plain rows": ({"fuse_qkv_params": True, "qkv_weight_interleaved": False, "num_gqa_groups": 2}, {}),
}


def arguments(
    options: dict[str, Any], call: dict[str, Any], device: str, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the call's arguments for the layer in sbhd, for the reference)."""

    def hidden(prefix: str, mask: str, default: str, skv: int) -> torch.Tensor:
        def said(name: str, otherwise: Any) -> Any:
            return call.get(name, options.get(name, otherwise))

        window = said(f"{prefix}window_size", (-1, -1))
        corner = said(f"{prefix}bottom_right_diagonal", None)
        return reference.hidden_pairs(said(mask, default), S, skv, None, window, corner)

    ours, theirs = dict(call), {"hidden": hidden("", "self_attn_mask_type", "causal", S)}
    if options.get("layer_type") == "decoder":
        encoded = values(ENCODED, B, WIDTH, dtype=dtype, seed=4)
        ours["encoder_output"] = encoded.to(device)
        theirs["encoded"] = encoded.double()
        theirs["cross_hidden"] = hidden("enc_dec_", "enc_dec_attn_mask_type", "no_mask", ENCODED)
    if "rotary_pos_emb" in call:
        table = angles(S, interleaved=options.get("rotary_pos_interleaved", False))
        ours["rotary_pos_emb"], theirs["angles"] = table.to(device), (table, table)
    if "core_attention_bias" in call:
        theirs["bias"] = values(1, HEADS, S, S, seed=6)
        ours["core_attention_bias"] = theirs["bias"].to(device)
    return ours, theirs


def wanted_step(
    layer: TransformerLayer, x: torch.Tensor, options: dict[str, Any], theirs: dict[str, Any], **more: Any
) -> dict[str, torch.Tensor]:
    o = {"num_attention_heads": HEADS, **options}
    return reference.results(lambda p, t: reference.layer(p, t, o, **theirs, **more), layer, x, gradient_for(x))


@on_devices
@covering(case=CASES, form=["sbhd", "bshd"])
def test_against_float64(case: str, form: str, device: str) -> None:
    options, call = CASES[case]
    layer, x = make(device, attn_input_format=form, **options), inputs(device)
    ours, theirs = arguments(options, call, device)

    def laid(t: torch.Tensor) -> torch.Tensor:
        return t if form == "sbhd" else t.transpose(0, 1)

    if "encoder_output" in ours:
        ours["encoder_output"] = laid(ours["encoder_output"]).contiguous()
    got = step(lambda t: layer(t, **ours), laid(x), None, dy=laid(gradient_for(x)), owner=layer)
    on(device, *got.values())
    got |= {"y": laid(got["y"]), "dx": laid(got["dx"])}
    check(got, wanted_step(layer, x, options, theirs), DB["fp32"])


# ------------------------------------------------------------------------------------ dropout, drop path


@on_devices
@covering(bias=[True, False], part=["self_attention", "inter_attention", "layernorm_mlp"])
def test_hidden_dropout(part: str, bias: bool, device: str) -> None:
    """With one part alone giving anything: each element of output + bias is dropped or scaled, the residual kept."""
    p = 0.25
    options = {"layer_type": "decoder", "bias": bias}
    layer, x = make(device, hidden_dropout=p, **options), values(64, 8, WIDTH, device=device, seed=1)
    lasts = {
        "self_attention": layer.self_attention.proj,
        "inter_attention": layer.inter_attention.proj,
        "layernorm_mlp": layer.layernorm_mlp,
    }
    silent = [dict(last.named_parameters()) for name, last in lasts.items() if name != part]
    with torch.no_grad():
        [p.zero_() for last in silent for n, p in last.items() if n in ("weight", "bias", "fc2_weight", "fc2_bias")]
    encoded = values(8, 8, WIDTH, device=device, seed=4)
    layer.eval()
    branch = layer(x, encoder_output=encoded) - x
    layer.train()
    leaf = x.clone().requires_grad_()
    y = layer(leaf, encoder_output=encoded)
    kept = (y - x - branch / (1 - p)).abs() < (y - x).abs()
    torch.testing.assert_close(y, torch.where(kept, x + branch / (1 - p), x), rtol=0, atol=2e-5)
    n = y.numel()
    assert abs(float(kept.double().mean()) - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5 + 1e-3
    # The same elements lose their gradients.
    dy = gradient_for(y)
    y.backward(dy)
    if bias:
        last = "fc2_bias" if part == "layernorm_mlp" else "bias"
        grad = getattr(lasts[part], last).grad
        assert snr_db(grad, (dy * kept / (1 - p)).double().sum((0, 1))) >= DB["fp32"]
    assert not torch.equal(layer(x, encoder_output=encoded), y), "drawn anew"


@on_devices
@pytest.mark.parametrize("kind", ["encoder", "parallel", "decoder"])
def test_drop_path(kind: str, device: str) -> None:
    """Whole samples of the first dimension lose a branch, others have it scaled; cross attention keeps its own."""
    p, batch = 0.5, 64
    options: dict[str, Any] = {"parallel_attention_mlp": True} if kind == "parallel" else {}
    if kind == "decoder":
        options["layer_type"] = "decoder"
    layer = make(device, drop_path_rate=p, attn_input_format="bshd", **options)
    x = values(batch, 3, WIDTH, device=device, seed=1)
    call = {"encoder_output": values(batch, 4, WIDTH, device=device, seed=4)} if kind == "decoder" else {}
    counts = torch.zeros(2, 2)
    for _ in range(2):
        y = layer(x, **call)
        found = torch.zeros(2, 2)
        for first in (0, 1):
            for second in (0, 1):
                one = _with_branches(layer, x, kind, first / (1 - p), second / (1 - p), call)
                same = ((y - one).abs().amax((1, 2)) < 1e-4).float()
                found[first, second] = same.sum()
        counts += found if kind != "parallel" else torch.stack([found[:, 0], torch.zeros(2)], 1)
    total = counts.sum()
    assert total == 2 * batch, "each sample has each branch whole or not at all"
    share = counts / total
    if kind == "parallel":
        assert 0.3 < share[0, 0] < 0.7
    else:
        assert ((share > 0.1) & (share < 0.4)).all(), "both branches are dropped, independently"
    layer.eval()
    torch.testing.assert_close(layer(x, **call), _with_branches(layer, x, kind, 1.0, 1.0, call), rtol=0, atol=1e-5)


@on_devices
@covering(option=["drop_path_rate", "hidden_dropout"], kind=["encoder", "parallel", "late"])
def test_everything_dropped(option: str, kind: str, device: str) -> None:
    """Both may be one: what is left of a layer is its stream."""
    options = {"parallel": {"parallel_attention_mlp": True}, "late": LATE}.get(kind, {})
    layer, x = make(device, **{option: 1.0}, **options), inputs(device).requires_grad_()
    y = layer(x)
    if kind != "late":
        assert torch.equal(y, x)
    y.backward(gradient_for(y))
    if kind != "late":
        assert torch.equal(x.grad, gradient_for(y))
    for name, p in layer.named_parameters():
        assert p.grad.isfinite().all() and ("norm" in name or not p.grad.any()), name
    assert torch.equal(layer.eval()(x), make(device, **options).eval()(x))


@torch.no_grad()
def _with_branches(
    layer: TransformerLayer, x: torch.Tensor, kind: str, first: float, second: float, call: dict[str, Any]
) -> torch.Tensor:
    """The layer with its attention (or, if parallel, both branches) and its MLP taken so many times."""

    def branch(part: Any, t: torch.Tensor, **more: Any) -> torch.Tensor:
        out = part(t, **more)
        if kind == "parallel":
            return out
        return out[0] + out[1]

    attended = branch(layer.self_attention, x)
    if kind == "parallel":
        return x + first * (attended + branch(layer.layernorm_mlp, x))
    x = x + first * attended
    if kind == "decoder":
        x = x + branch(layer.inter_attention, x, **call)
    return x + second * branch(layer.layernorm_mlp, x)


# -------------------------------------------------------------------------------- layouts, recomputation


@on_devices
@pytest.mark.parametrize("case", ["default", "llama", "decoder", "decoder, llama"])
def test_packed_sequences_equal_padded_ones(case: str, device: str) -> None:
    """thd against bshd; self attention takes cu_seqlens_q for its keys whatever cu_seqlens_kv says. Tokens between
    sequences count for nobody."""
    options, call = CASES[case]
    lengths, sources = [5, S, 1], [3, 7, ENCODED]

    def packed(t: torch.Tensor, sizes: list[int], gap: int = 0) -> torch.Tensor:
        return torch.cat([torch.nn.functional.pad(t[b, :n], (0, 0, 0, gap)) for b, n in enumerate(sizes)])

    x, encoded = values(3, S, WIDTH, device=device, seed=1), values(3, ENCODED, WIDTH, device=device, seed=4)
    inside = ~padding(lengths, S, device).view(3, S, 1)
    dy = gradient_for(x) * inside
    shared: dict[str, Any] = {"self_attn_mask_type": "padding_causal"}
    if "rotary_pos_emb" in call:
        shared["rotary_pos_emb"] = angles(S + 2, device=device)
    wide_call: dict[str, Any] = {"attention_mask": padding(lengths, S, device)}
    decoder = "decoder" in case
    if decoder:
        shared["enc_dec_attn_mask_type"] = "padding"
        wide_call |= {
            "encoder_output": encoded,
            "enc_dec_attn_mask": (padding(lengths, S, device), padding(sources, ENCODED, device)),
        }
    wide = make(device, attn_input_format="bshd", **options)
    wanted = step(lambda t: wide(t, **wide_call, **shared), x, None, dy=dy, owner=wide)
    thd = make(device, attn_input_format="thd", **options)
    for gap in (0, 2):
        named = shared | {
            "cu_seqlens_q": sums(lengths, device),
            "max_seqlen_q": S,
            "cu_seqlens_kv": sums([1, 1, 1], device),
        }
        if gap:
            places = {"q": lengths, "kv": sources if decoder else lengths}
            named |= {f"cu_seqlens_{n}_padded": sums([m + gap for m in of], device) for n, of in places.items()}
        if decoder:
            named |= {"encoder_output": packed(encoded, sources, gap), "max_seqlen_kv": ENCODED}
            named |= {"cu_seqlens_kv": sums(sources, device)}
        given = packed(x, lengths, gap)
        got = step(lambda t, named=named: thd(t, **named), given, None, dy=packed(dy, lengths, gap), owner=thd)
        tokens = packed(inside.float(), lengths, gap).bool()
        for name, value in got.items():
            other = packed(wanted[name], lengths, gap) * tokens if name in ("y", "dx") else wanted[name]
            if not name.endswith("key_bias"):
                ours = value * tokens if name in ("y", "dx") else value
                assert snr_db(ours, other) >= DB["fp32"], (name, gap)


@on_devices
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_recomputed_attention_is_equal(recipe: str | None, device: str) -> None:
    """checkpoint_core_attention, with all kinds of dropout: the same bits."""
    layer = make(device, torch.bfloat16, hidden_dropout=0.2, attention_dropout=0.2, drop_path_rate=0.3)
    found = []
    for again in (False, True):
        torch.manual_seed(5)
        layer.reset_fp8_meta_tensors()
        leaf = inputs(device, torch.bfloat16).requires_grad_()
        with region(recipe):
            y = layer(leaf, checkpoint_core_attention=again)
        y.backward(gradient_for(y))
        found.append({"y": y.detach(), "dx": leaf.grad} | {n: p.grad for n, p in layer.named_parameters()})
        layer.zero_grad(set_to_none=True)
    assert not differences(*found)


@on_devices
def test_torch_autocast(device: str) -> None:
    """Under torch.autocast hidden states are cast first; the stream is in its dtype."""
    layer, x = make(device), inputs(device)
    with torch.autocast(device, torch.bfloat16):
        y, again = layer(x), layer(x.bfloat16())
    assert y.dtype == torch.bfloat16 and torch.equal(y, again)
    _, theirs = arguments({}, {}, device)
    assert snr_db(y, wanted_step(layer, x, {}, theirs)["y"]) >= DB["bf16"]
    with pytest.raises(TypeError, match="match"):
        layer(x.bfloat16())


def test_shapes_under_torch_autocast() -> None:
    """A meta device knows no autocast; shapes are worked out there all the same."""
    layer, x = TransformerLayer(64, 128, 4, device="meta"), torch.empty(8, 2, 64, device="meta")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).shape == x.shape
        with pytest.raises(TypeError, match="must match"):
            layer(x.bfloat16())


def test_residuals_are_added_by_the_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass of its own is left, at the end; the norm of each part that follows forms its sum on the way."""
    passes = []
    from te_torch.base import residual

    def counted(*args: Any, **kw: Any) -> torch.Tensor:
        passes.append(args)
        return plain(*args, **kw)

    plain = residual.bias_dropout_add
    monkeypatch.setattr(residual, "bias_dropout_add", counted)
    monkeypatch.setattr("te_torch.transformer.layer.bias_dropout_add", counted)
    for options in ({}, {"layer_type": "decoder", "hidden_dropout": 0.1}, LATE, {"parallel_attention_mlp": True}):
        passes.clear()
        call = {"encoder_output": inputs("cpu")} if "layer_type" in options else {}
        make("cpu", **options)(inputs("cpu"), **call)
        assert len(passes) == 1 + ("parallel_attention_mlp" in options)  # which first adds two branches


# ------------------------------------------------------------------------------------------------- FP8


@on_devices
@covering(case=["default", "llama", "decoder", "parallel"], recipe=[None, *KINDS])
def test_bfloat16_and_lower(case: str, recipe: str | None, device: str) -> None:
    options, call = CASES[case]
    torch.manual_seed(0)  # of stochastic rounding
    layer, x = make(device, torch.bfloat16, **options), inputs(device, torch.bfloat16)
    calm(layer, 0.25)
    ours, theirs = arguments(options, call, device, torch.bfloat16)
    dy = gradient_for(x)
    for _ in range(3):  # delayed scaling learns its scales
        leaf = x.clone().requires_grad_()
        layer.zero_grad(set_to_none=True)
        with region(recipe):
            y = layer(leaf, **ours)
        y.backward(dy)
    wanted = wanted_step(layer, x, options, theirs)
    floor = DB["bf16" if recipe is None else "nvfp4 attention" if recipe == "nvfp4" else "fp8 mlp"]
    got = {"y": y, "dx": leaf.grad, **{n: p.grad for n, p in layer.named_parameters()}}
    for name, value in got.items():
        if not name.endswith("key_bias"):
            found = snr_db(value, wanted[name])
            assert found >= floor, f"{name}: {found:.1f} dB"
    one = "layernorm_mlp.fc1_weight"
    assert recipe is None or snr_db(got[one], wanted[one]) < DB["bf16"], "it did run in FP8"
    stateful = {n for n, _ in layer.named_buffers() if "fp8_state" in n}
    assert bool(stateful) == (recipe == "delayed")


@on_devices
def test_microbatches(device: str) -> None:
    """is_first_microbatch reaches all parts: with fused accumulation `main_grad` is overwritten, then added to."""
    layer = make(device, torch.bfloat16, fuse_qkv_params=True, fuse_wgrad_accumulation=True, layer_type="decoder")
    plain = make(device, torch.bfloat16, fuse_qkv_params=True, layer_type="decoder")
    x, encoded = inputs(device, torch.bfloat16), values(ENCODED, B, WIDTH, device=device, dtype=torch.bfloat16, seed=4)
    matrices = [p for p in layer.parameters() if p.ndim == 2]
    for p in matrices:
        p.main_grad = torch.full(p.shape, 7.0, device=device)
    for first in (True, False):
        layer(x, encoder_output=encoded, is_first_microbatch=first).backward(gradient_for(x))
        plain(x, encoder_output=encoded).backward(gradient_for(x))
    assert len(matrices) == 7
    for p, other in zip(matrices, [p for p in plain.parameters() if p.ndim == 2], strict=True):
        assert p.grad is None and snr_db(p.main_grad, other.grad) >= DB["bf16"]


# --------------------------------------------------- the peer's checkpoints (results: test_golden.py)


def params_of(case: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix("param/"): v for k, v in tree("layers", f"{case}/high/").items() if k.startswith("param/")}


def entries(case: str, recipe: str) -> dict[str, torch.Tensor]:
    """The peer's checkpoint of a golden case: its parameters, and its `_extra_state` of every part."""
    found = tree("extra_state", f"{case}/{recipe}/extra_state/") or tree("layers", f"{case}/{recipe}/extra_state/")
    assert found
    return params_of(case) | found


@covering(turns=2, case=LAYERS, recipe=["delayed", "high", "current"])
def test_the_peers_checkpoint(case: str, recipe: str) -> None:
    """Strict loading takes all of it, and our own next checkpoint has its scales."""
    module = make_layer(case, "cpu")
    result = module.load_state_dict(entries(case, recipe), strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    for name, value in params_of(case).items():
        assert torch.equal(module.state_dict()[name], value)
    states = {n for n in module.state_dict() if n.endswith("fp8_state.scale_fwd")}
    prefix = "" if case == "MultiheadAttention" else "self_attention."
    if recipe != "delayed":
        assert not states
        return
    assert {f"{prefix}layernorm_qkv.fp8_state.scale_fwd", f"{prefix}proj.fp8_state.scale_fwd"} <= states
    assert (module.state_dict()[f"{prefix}proj.fp8_state.scale_fwd"][:2] != 1).all()
    fresh = make_layer(case, "cpu")
    fresh.load_state_dict(module.state_dict(), strict=True)
    x = load("layers")[f"{case}/high/x"]
    assert not differences(*(step(m, x, DelayedScaling(amax_history_len=4)) for m in (module, fresh)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["layer", "attention"])
def test_encoder_output_is_ignored_with_one_warning(kind: str, compiled: bool) -> None:
    """Of a model, in which several layers are given it; the result is that without it."""
    if kind == "layer":
        parts = [TransformerLayer(WIDTH, 64, 4, hidden_dropout=0.0, device="cpu").eval() for _ in range(2)]
    else:
        parts = [MultiheadAttention(WIDTH, 4, device="cpu").eval() for _ in range(2)]
    model, x = Stack(parts), inputs("cpu")
    plain = model(x)
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = torch.compile(model, backend="eager") if compiled else model
        for _ in range(2):
            assert torch.equal(run(x, inputs("cpu")), plain)
    said = [w for w in said if "encoder_output is ignored" in str(w.message)]
    assert len(said) == 1 or compiled and said
    assert all("To do: leave it out" in str(w.message) for w in said)


class Stack(torch.nn.Module):
    def __init__(self, parts: list[Any]) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)

    def forward(self, x: torch.Tensor, encoder_output: torch.Tensor | None = None) -> torch.Tensor:
        for part in self.parts:
            x = part(x, encoder_output=encoder_output)
        return x
