"""MultiheadAttention: every option against float64, layouts against each other, FP8 between its parts, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from te_torch.attention.rope import RotaryPositionEmbedding
from te_torch.transformer.handed import HandOver
from te_torch.transformer.multihead import MultiheadAttention
from tests.attention_steps import padding
from tests.backends import on_devices
from tests.covering import covering
from tests.reference import transformer_layer as reference
from tests.tolerances import DB, snr_db
from tests.world import gradient_for, on, randomise, step, values

WIDTH, HEADS, S, B = 64, 4, 12, 2  # heads of 16


def make(device: str, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> MultiheadAttention:
    """A module whose every parameter is drawn at random; no dropout unless asked for."""
    module = MultiheadAttention(
        WIDTH, HEADS, **{"attention_dropout": 0.0, "params_dtype": dtype, "device": device, **options}
    )
    randomise(module, seed)
    return module


def angles(length: int = S, width: int = 16, device: str = "cpu", seed: int = 3, **options: Any) -> torch.Tensor:
    """The angles of RotaryPositionEmbedding, sped up so that short sequences see large ones."""
    return 3.0 * RotaryPositionEmbedding(width, **options).to(device)(length)


# --------------------------------------------------------------------------------------- against float64

GQA = {"num_gqa_groups": 2}
FUSED = {"fuse_qkv_params": True}
PLAIN_ROWS = {**FUSED, "qkv_weight_interleaved": False}
CROSS = {"attention_type": "cross", "attn_mask_type": "no_mask"}
ROPE: dict[str, Any] = {"rotary_pos_emb": ("full", "full")}
NORM = {"input_layernorm": True}
#: name: (constructor, call). A call's angles are by name; masks that the reference has to know stand in both.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "fused": (FUSED, {}),
    "fused, plain rows": (PLAIN_ROWS, {}),
    "norm": (NORM, {}),
    "norm, fused": ({**NORM, **FUSED}, {}),
    "RMSNorm": ({**NORM, "normalization": "RMSNorm", "layernorm_epsilon": 0.1}, {}),
    "zero-centered": ({**NORM, "zero_centered_gamma": True}, {}),
    "no bias": ({"bias": False}, {}),
    "gqa": (GQA, {}),
    "gqa, fused": ({**GQA, **FUSED}, {}),
    "gqa, plain rows": ({**GQA, **PLAIN_ROWS}, {}),
    "mqa, fused": ({"num_gqa_groups": 1, **FUSED}, {}),
    "kv_channels": ({"kv_channels": 8}, {}),
    "off-by-one": ({"softmax_type": "off-by-one"}, {}),
    "learnable": ({"softmax_type": "learnable"}, {}),
    "rope": ({}, ROPE),
    "rope, fused": (FUSED, ROPE),
    "rope, gqa, fused": ({**GQA, **FUSED}, ROPE),
    "rope, gqa, plain rows": ({**GQA, **PLAIN_ROWS}, ROPE),
    "rope, interleaved": ({"rotary_pos_interleaved": True}, {"rotary_pos_emb": ("pairs", "pairs")}),
    "rope, a part": ({}, {"rotary_pos_emb": ("part", "part")}),
    "rope, two": ({}, {"rotary_pos_emb": ("full", "part")}),
    "qk L2": ({"qk_norm_type": "L2Normalization"}, {}),
    "qk RMSNorm": ({"qk_norm_type": "RMSNorm", "qk_norm_eps": 0.05}, {}),
    "qk LayerNorm": ({"qk_norm_type": "LayerNorm"}, {}),
    "qk RMSNorm, rope": ({"qk_norm_type": "RMSNorm"}, ROPE),
    "qk RMSNorm before rope": ({"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True, **GQA}, ROPE),
    "qk L2 before rope, fused": ({"qk_norm_type": "L2Normalization", "qk_norm_before_rope": True, **FUSED}, ROPE),
    "no_mask": ({"attn_mask_type": "no_mask"}, {}),
    "no_mask at the call": ({}, {"attn_mask_type": "no_mask"}),
    "window": ({"window_size": (3, 0)}, {}),
    "window at the call": ({}, {"window_size": (2, 0)}),
    "arbitrary": ({"attn_mask_type": "arbitrary"}, {"attention_mask": "random"}),
    "padding": ({"attn_mask_type": "padding"}, {"attention_mask": "padding"}),
    "padding_causal at the call": (GQA, {"attn_mask_type": "padding_causal", "attention_mask": "padding"}),
    "bias": ({}, {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": "random"}),
    "alibi": ({}, {"core_attention_bias_type": "alibi"}),
    "cross": (CROSS, {}),
    "cross, fused": ({**CROSS, **FUSED}, {}),
    "cross, gqa, fused": ({**CROSS, **FUSED, **GQA}, {}),
    "cross, plain rows": ({**CROSS, **PLAIN_ROWS}, {}),
    "cross, norm": ({**CROSS, **NORM}, {}),
    "cross, norm, fused": ({**CROSS, **NORM, **FUSED}, {}),
    "cross, rope": (CROSS, ROPE),
    "cross, rope, fused": ({**CROSS, **FUSED, **GQA}, {"rotary_pos_emb": ("full", "part")}),
    "cross, qk RMSNorm, rope": ({**CROSS, "qk_norm_type": "RMSNorm"}, ROPE),
    "cross, qk LayerNorm before rope": ({**CROSS, "qk_norm_type": "LayerNorm", "qk_norm_before_rope": True}, ROPE),
    "cross, causal_bottom_right": ({**CROSS, "attn_mask_type": "causal_bottom_right"}, {}),
}
LENGTHS = [(7, 7), (S, S)]
ENCODED = 9  # tokens of what cross attention looks at


def arguments(
    options: dict[str, Any], call: dict[str, Any], device: str, form: str = "sbhd"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the call's arguments for the module, for the reference)."""
    cross = options.get("attention_type") == "cross"
    mask, skv = call.get("attn_mask_type", options.get("attn_mask_type", "causal")), ENCODED if cross else S
    window = call.get("window_size", options.get("window_size", (-1, -1)))
    ours, theirs = dict(call), dict[str, Any]()
    lengths = given = None
    if call.get("attention_mask") == "padding":
        lengths = LENGTHS
        ours["attention_mask"] = padding([n for n, _ in LENGTHS], S, device)
    elif call.get("attention_mask") == "random":
        given = (values(B, 1, S, S, seed=5) > 0.5) & ~torch.eye(S, dtype=torch.bool)
        ours["attention_mask"] = given.to(device)
    theirs["hidden"] = reference.hidden_pairs(mask, S, skv, lengths, window, None, given)
    if "rotary_pos_emb" in call:
        tables = {
            "full": angles(ENCODED + S),
            "part": 0.7 * angles(ENCODED + S, 8),
            "pairs": angles(ENCODED + S, interleaved=True),
        }
        theirs["angles"] = tuple(tables[name] for name in call["rotary_pos_emb"])
        q, k = (t.to(device) for t in theirs["angles"])
        ours["rotary_pos_emb"] = q if call["rotary_pos_emb"][0] == call["rotary_pos_emb"][1] else (q, k)
    if "core_attention_bias" in call:
        theirs["bias"] = values(1, HEADS, S, S, seed=6)
        ours["core_attention_bias"] = theirs["bias"].to(device)
    elif "core_attention_bias_type" in call:
        distance = (torch.arange(S).view(-1, 1) - torch.arange(S)).abs()
        theirs["bias"] = -torch.tensor([2.0 ** (-2 * (k + 1)) for k in range(HEADS)]).view(1, -1, 1, 1) * distance
    if cross:
        theirs["encoded"] = values(ENCODED, B, WIDTH, seed=4).double()
        laid = theirs["encoded"] if form == "sbhd" else theirs["encoded"].transpose(0, 1)
        ours["encoder_output"] = laid.float().contiguous().to(device)
    return ours, theirs


@on_devices
@covering(case=CASES, form=["sbhd", "bshd"])
def test_against_float64(case: str, form: str, device: str) -> None:
    options, call = CASES[case]
    module = make(device, qkv_format=form, **options)
    ours, theirs = arguments(options, call, device, form)
    x = values(S, B, WIDTH, device=device, seed=1)
    dy = gradient_for(x)
    if "padding" in str(call.get("attn_mask_type", options.get("attn_mask_type"))):
        for b, (length, _) in enumerate(LENGTHS):
            dy[length:, b] = 0  # what stands behind a sequence is nobody's

    def laid(t: torch.Tensor) -> torch.Tensor:
        return t if form == "sbhd" else t.transpose(0, 1)

    got = step(lambda t: module(t, **ours), laid(x), None, dy=laid(dy), owner=module)
    on(device, *got.values())
    wanted = reference.results(
        lambda p, t: reference.multihead(p, t, {"num_attention_heads": HEADS, **options}, **theirs)[0], module, x, dy
    )
    got |= {"y": laid(got["y"]), "dx": laid(got["dx"])}
    inside = dy.abs().sum(-1, keepdim=True) > 0
    got["y"], wanted["y"] = got["y"] * inside, wanted["y"] * inside.cpu()
    check(got, wanted, DB["fp32"])


def check(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], floor: float) -> None:
    """All of a step by the dB table.

    A bias of all keys adds the same to all scores of a query, which the softmax takes off again: its gradient is
    nothing but rounding, and is held against that of the queries' bias.
    """
    assert set(got) == set(wanted)
    for name, value in got.items():
        if wanted[name].abs().max() < 1e-12:
            assert name.endswith(("key_bias", "k_norm.bias")), f"{name}: no gradient"
            of_queries = next(t for n, t in wanted.items() if n.endswith(("query_bias", "q_norm.bias")))
            assert value.abs().max() <= 10 ** (-floor / 20) * of_queries.norm(), name
            continue
        found = snr_db(value, wanted[name])
        assert found >= floor, f"{name}: {found:.1f} dB"


# ---------------------------------------------------------------------------------- outputs and layouts


@on_devices
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_what_is_returned(kind: str, device: str) -> None:
    """(out[, bias][, norm output]); a bias that is returned is not added."""
    cross = {"attention_type": kind, "attn_mask_type": "no_mask"}
    x = values(S, B, WIDTH, device=device, seed=1)
    call = {"encoder_output": values(ENCODED, B, WIDTH, device=device)} if kind == "cross" else {}
    whole = make(device, **NORM, **cross)(x, **call)
    both = make(device, **NORM, **cross, return_bias=True, return_layernorm_output=True)
    out, bias, normed = both(x, **call)
    torch.testing.assert_close(out + bias, whole, rtol=0, atol=1e-5)
    assert bias is both.proj.bias and not torch.equal(out, whole)
    first = getattr(both, "layernorm_qkv" if kind == "self" else "layernorm_query")
    p = dict(first.named_parameters())
    wanted = torch.nn.functional.layer_norm(x, (WIDTH,), p["layer_norm_weight"], p["layer_norm_bias"])
    torch.testing.assert_close(normed, wanted, rtol=0, atol=1e-5)
    out, normed = make(device, **NORM, **cross, return_layernorm_output=True)(x, **call)
    assert torch.equal(out, whole) and torch.equal(normed, both(x, **call)[2])
    out, bias = make(device, **cross, return_bias=True, bias=False)(x, **call)
    assert bias.numel() == 0


@pytest.mark.parametrize("of", ["object", "class"])
def test_an_own_forward_of_the_attention_runs(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, shapes, plain = make("cpu"), values(S, B, WIDTH), [], te.DotProductAttention.forward
    wanted = module(x)

    def forward(self: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
        shapes.append((q.shape, k.shape, v.shape))
        return plain(self, q, k, v, **options) * 2

    core = module.core_attention
    if of == "class":
        monkeypatch.setattr(te.DotProductAttention, "forward", forward)
    else:
        core.forward = partial(forward, core)
    assert not torch.equal(module(x), wanted) and shapes == [((S, B, HEADS, 16),) * 3]


def test_a_pair_of_angles_may_be_a_list() -> None:
    x, pair = torch.randn(6, 2, 32), [torch.randn(6, 1, 1, 8), torch.randn(6, 1, 1, 4)]
    module = te.MultiheadAttention(32, 4, attention_dropout=0.0, device="cpu")
    assert torch.equal(module(x, rotary_pos_emb=pair), module(x, rotary_pos_emb=tuple(pair)))


@on_devices
@pytest.mark.parametrize("case", ["fused", "gqa, fused", "cross"])
def test_hooks_on_the_attention_see_queries_keys_and_values(case: str, device: str) -> None:
    """So does a module in its place; what comes out does not change."""
    options = {"cross": CROSS, "fused": FUSED, "gqa, fused": {**GQA, **FUSED}}[case]
    x, encoded = values(S, B, WIDTH, device=device, seed=5), values(S, B, WIDTH, device=device, seed=6)
    call = {"encoder_output": encoded} if case == "cross" else {}
    plain, hooked, replaced = (make(device, **options) for _ in range(3))
    shapes: list[Any] = []
    hooked.core_attention.register_forward_hook(lambda module, inputs, out: shapes.append([t.shape for t in inputs]))

    class Other(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            shapes.append([t.shape for t in (q, k, v)])
            return self.inner(q, k, v, **kwargs)

    other = Other()
    other.inner = replaced.core_attention
    replaced.core_attention = other
    groups = 2 if "gqa" in case else HEADS
    wanted, *found = (step(lambda t, m=m: m(t, **call), x, None, owner=m) for m in (plain, hooked, replaced))
    for got in found:
        assert set(got) == set(wanted)
        for name, value in got.items():
            if not name.endswith("key_bias"):
                assert snr_db(value, wanted[name]) >= DB["fp32"], name
    assert shapes == [[(S, B, HEADS, 16), (S, B, groups, 16), (S, B, groups, 16)]] * 2


# ------------------------------------------------------------------------------------------- inference


@on_devices
@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("case", ["default", "rope", "rope, gqa, fused", "qk RMSNorm, rope"])
def test_a_cache_gives_what_the_whole_sequence_gives(case: str, form: str, device: str) -> None:
    """Contexts of different length, then token by token, each like the last token of an uncached causal forward."""
    from collections import OrderedDict

    from te_torch.attention.inference import InferenceParams

    options, call = CASES[case]
    turn = {"rotary_pos_emb": angles(device=device)} if call else {}
    module = make(device, qkv_format=form, layer_number=1, **options).eval()
    whole = make(device, qkv_format="bshd", **options).eval()
    x = values(B, S, WIDTH, device=device, seed=1)
    lengths = [3, 5]
    params = InferenceParams(
        B, S, options.get("num_gqa_groups", HEADS), 16, torch.float32, qkv_format=form, max_ctx_len=S, device=device
    )
    with torch.no_grad():
        wanted = whole(x, **turn)
        for _ in range(4):
            first = [0, 0] if not params.sequences else list(params.sequences.values())
            new = lengths if first == [0, 0] else [1, 1]
            params.pre_step(OrderedDict(enumerate(new)))
            pieces = [x[b, at : at + n] for b, (at, n) in enumerate(zip(first, new, strict=True))]
            if form == "thd":
                hidden = torch.cat(pieces)
            else:
                hidden = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=form == "bshd")
            out = module(hidden, attn_mask_type="padding_causal", inference_params=params, **turn)
            for b, (at, n) in enumerate(zip(first, new, strict=True)):
                if form == "thd":
                    got = out[sum(new[:b]) : sum(new[: b + 1])]
                else:
                    got = (out if form == "bshd" else out.transpose(0, 1))[b, :n]
                assert snr_db(got, wanted[b, at : at + n]) >= DB["fp32"], (b, at)


# ------------------------------------------------------------------------------------------------- FP8


HANDED = {
    ("none", False): HandOver(),
    ("delayed", False): HandOver(),
    ("delayed dpa", False): HandOver(False, True, True),
    ("delayed mha", False): HandOver(True, True, True),
    ("delayed mha", True): HandOver(False, True, True),
    ("current mha", False): HandOver(False, True, False),
    ("mxfp8 dpa", False): HandOver(),
}


@pytest.mark.parametrize(("kind", "turned"), HANDED)
def test_what_is_handed_over_in_fp8(kind: str, turned: bool) -> None:
    """By the recipe's flags; only while a region is active; in a recomputation as in the forward before."""
    flags = {"fp8_dpa": True, "fp8_mha": kind.endswith("mha")} if " " in kind else {}
    recipes = {"delayed": DelayedScaling, "current": Float8CurrentScaling, "mxfp8": MXFP8BlockScaling}
    recipe = None if kind == "none" else recipes[kind.split()[0]](**flags)
    module = make("cpu")
    with te.autocast(enabled=recipe is not None, recipe=recipe, emulate=True):
        assert module._hand_over(turned, False) == HANDED[kind, turned]
        with te.autocast(enabled=False):
            assert module._hand_over(turned, False) == HandOver()
    seen = []

    def part(x: torch.Tensor) -> torch.Tensor:
        seen.append(module._hand_over(turned, False))
        return module.proj(x)

    x = torch.ones(16, module.proj.in_features, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe, emulate=True):
        y = checkpoint(part, x, use_reentrant=True)
    y = y[0] if isinstance(y, tuple) else y
    y.sum().backward()
    assert seen == [HANDED[kind, turned]] * 2
    assert module._hand_over(turned, False) == HandOver()
    normed = make("cpu", qk_norm_type="RMSNorm")
    with te.autocast(enabled=recipe is not None, recipe=recipe, emulate=True):
        assert not normed._hand_over(False, False).qkv, "norms do not read FP8"
    with te.autocast(enabled=False, calibrating=True, recipe=recipe):
        assert module._hand_over(turned, False) == HandOver()


@on_devices
@pytest.mark.parametrize("kind", ["delayed dpa", "delayed mha", "current dpa", "current mha"])
@pytest.mark.parametrize("case", ["norm", "rope, gqa, fused", "cross, gqa, fused"])
def test_fp8_attention(case: str, kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention itself in FP8 too (emulated where the device has none): what it reads and gives is handed over."""
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    scaling, flag = kind.split()
    recipe = {"delayed": DelayedScaling, "current": Float8CurrentScaling}[scaling](fp8_dpa=True, fp8_mha=flag == "mha")
    options, call = CASES[case]
    module = make(device, torch.bfloat16, **options)
    with torch.no_grad():
        [p.mul_(0.5) for p in module.parameters() if p.ndim == 2]
    ours, theirs = arguments(options, call, device)
    if "encoded" in theirs:
        ours["encoder_output"] = ours["encoder_output"].bfloat16()
        theirs["encoded"] = theirs["encoded"].bfloat16().double()
    read: list[torch.Tensor] = []
    first = next(m for n, m in module.named_modules() if n in ("layernorm_qkv", "qkv", "key_value"))
    first.register_forward_hook(lambda m, args, out: read.append(out))
    x = values(S, B, WIDTH, device=device, dtype=torch.bfloat16, seed=1)
    dy = gradient_for(x)
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        module.zero_grad(set_to_none=True)
        with te.autocast(recipe=recipe):
            y = module(leaf, **ours)
        y.backward(dy)
    handed = kind == "delayed mha" and "rotary_pos_emb" not in call
    assert isinstance(read[-1], te.QuantizedTensor) == handed
    o = {"num_attention_heads": HEADS, **options}
    wanted = reference.results(lambda p, t: reference.multihead(p, t, o, **theirs)[0], module, x, dy)
    got = {"y": y, "dx": leaf.grad, **{n: p.grad for n, p in module.named_parameters()}}
    for name, value in got.items():
        if not name.endswith("key_bias"):  # nothing but rounding
            found = snr_db(value, wanted[name])
            assert found >= DB["fp8 mlp"], f"{name}: {found:.1f} dB"
    assert any("core_attention.fp8_state" in name for name in module.state_dict())


def test_nothing_is_copied_where_strides_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without angles, norms and a cache attention reads the projection itself, in every packing."""

    def refuse(*args: Any, **kw: Any) -> None:
        raise AssertionError("split")

    monkeypatch.setattr("te_torch.transformer.multihead.split_heads", refuse)
    for case, (options, call) in CASES.items():
        ours, _ = arguments(options, call, "cpu")
        module, x = make("cpu", **options), values(S, B, WIDTH, seed=1)
        if "rope" in case or "qk" in case:
            with pytest.raises(AssertionError, match="split"):
                module(x, **ours)
        else:
            module(x, **ours)
