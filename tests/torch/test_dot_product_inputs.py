"""`DotProductAttention`: packed projections, empty tensors, and what is said to arguments that do not fit."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from te_torch.attention import DotProductAttention
from te_torch.attention.inference import InferenceParams
from tests.attention_steps import (
    BATCH,
    GROUPS,
    HEADS,
    SEQ,
    WIDTH,
    inputs,
    make,
    near,
    on_backends,
    on_devices,
    only,
    padding,
    step,
    sums,
)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets one backend through."""
    return partial(only, monkeypatch)


# -------------------------------------------------------------------------------------------------- packed inputs


@on_devices
@on_backends
@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("dim", [-3, -2])
def test_packed_projections(form: str, dim: int, device: str, backend: str, use: Any) -> None:
    use(backend)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    lead = {"sbhd": (SEQ, BATCH), "bshd": (BATCH, SEQ), "thd": (SEQ,)}[form]
    options: dict[str, Any] = {"qkv_interleave_dim": dim}
    if form == "thd":
        options.update(cu_seqlens_q=sums([4, 2], device), cu_seqlens_kv=sums([4, 2], device))
    module = make(num_gqa_groups=HEADS, qkv_format=form, attn_mask_type="padding_causal" if form == "thd" else "causal")
    for count in (3, 2):
        torch.manual_seed(2)
        shape = (*lead, count, HEADS, WIDTH) if dim == -3 else (*lead, HEADS, count, WIDTH)
        packed = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        q = torch.randn(*lead, HEADS, WIDTH, device=device, dtype=dtype)
        given = {"qkv_layer": packed} if count == 3 else {"query_layer": q, "kv_layer": packed}
        out = module(**given, **options)
        apart = packed.unbind(dim) if count == 3 else (q, *packed.unbind(dim))
        wanted = module(*apart, **options)
        dy = torch.randn_like(out)
        grads = [torch.autograd.grad(y, packed, dy)[0] for y in (out, wanted)]
        assert near([out, grads[0]], [wanted, grads[1]]) and grads[0].shape == packed.shape


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"qkv_layer": (2, 6, 3, 4, 16), "kv_layer": (2, 6, 2, 4, 16)}, "beside"),
        ({"qkv_layer": (2, 6, 3, 4, 16), "query_layer": (2, 6, 4, 16)}, "beside"),
        ({"kv_layer": (2, 6, 2, 4, 16), "query_layer": (2, 6, 4, 16), "key_layer": (2, 6, 4, 16)}, "beside"),
        ({"kv_layer": (2, 6, 2, 4, 16)}, "without query_layer"),
        ({"qkv_layer": (2, 6, 4, 16)}, "shape"),
        ({"qkv_layer": (2, 6, 2, 4, 16)}, "shape"),
        ({"qkv_layer": (2, 6, 3, 4, 16), "qkv_interleave_dim": -2}, "shape"),
        ({"qkv_layer": (2, 6, 3, 4, 16), "qkv_interleave_dim": 0}, "qkv_interleave_dim"),
        ({"qkv_layer": (2, 6, 3, 5, 16)}, "a token"),
    ],
)
def test_packed_errors(given: dict[str, Any], part: str) -> None:
    tensors = {name: torch.randn(x) if isinstance(x, tuple) else x for name, x in given.items()}
    with pytest.raises(ValueError, match=part):
        make(num_gqa_groups=HEADS)(**tensors)


@pytest.mark.parametrize(
    ("given", "module"),
    [
        ({"qkv_layer": (2, 6, 3, 16, 4)}, {"num_gqa_groups": HEADS}),  # heads and width changed over
        ({"qkv_layer": (2, 6, 3, 2, 16)}, {"num_gqa_groups": 1}),
        ({"kv_layer": (2, 6, 2, 2, 12), "query_layer": (2, 6, 4, 16)}, {"kv_channels": (16, 8)}),
    ],
)
def test_packed_heads_of_another_shape_but_size(given: dict[str, Any], module: dict[str, Any]) -> None:
    attention = DotProductAttention(**{"num_attention_heads": 4, "kv_channels": 16, "num_gqa_groups": 2, **module})
    tensors = {name: torch.randn(x).transpose(0, 1) for name, x in given.items()}
    with pytest.raises(ValueError, match="pass q, k and v apart"):
        attention(**tensors)


def test_packed_inputs_with_a_cache_or_another_stride() -> None:
    qkv = torch.randn(BATCH, SEQ, 3, HEADS, WIDTH)
    with pytest.raises(ValueError, match="inference_params"):
        make(num_gqa_groups=HEADS)(qkv_layer=qkv, inference_params=object())
    with pytest.raises(ValueError, match="last stride"):
        make(num_gqa_groups=HEADS)(qkv_layer=qkv.transpose(-1, -2).contiguous().transpose(-1, -2))


@on_backends
@pytest.mark.parametrize("interleaved", [False, True])
def test_projections_as_they_are(backend: str, interleaved: bool, use: Any) -> None:
    """What MultiheadAttention hands over: rows of all heads, queries grouped with their keys or not."""
    use(backend)
    times = HEADS // GROUPS
    q, k, v = inputs()
    groups = q.unflatten(2, (GROUPS, times))
    if interleaved:
        row = torch.cat([groups, k[:, :, :, None], v[:, :, :, None]], 3).flatten(2)
        kv = torch.stack([k, v], 3).flatten(2)
    else:
        row, kv = torch.cat([q, k, v], 2).flatten(2), torch.cat([k, v], 2).flatten(2)
    wanted = step(make(), [q, k, v])
    weights = torch.linspace(-1, 1, wanted[0].numel()).view_as(wanted[0])
    for a, b in ((row, None), (q, kv)):
        out = make()._attend_packed(a, b, interleaved)
        got = torch.autograd.grad((out * weights).sum(), (q, k, v), retain_graph=True)
        assert near([out, *got], wanted)
    with pytest.raises(ValueError, match="a token"):
        make()._attend_packed(row[..., :-1], None, interleaved)


@on_devices
@on_backends
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 2, 2), (2, 0, 3), (2, 3, 0)])
def test_no_pair_of_a_query_and_a_key(batch: int, queries: int, keys: int, backend: str, device: str, use: Any) -> None:
    """Zeros as outputs and gradients, with dropout too, and no logit."""
    use(backend)
    counts = [(queries, HEADS), (keys, GROUPS), (keys, GROUPS)]
    place: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    tensors = [torch.zeros(batch, n, heads, WIDTH, **place, requires_grad=True) for n, heads in counts]
    options: dict[str, Any] = {"attn_mask_type": "no_mask", "attention_dropout": 0.5}
    out, *grads = step(make(**options), tensors)
    assert out.shape == (batch, queries, HEADS * WIDTH) and not out.any()
    assert [g.shape for g in grads] == [t.shape for t in tensors] and not any(g.any() for g in grads)
    _, largest = make(return_max_logit=True, **options).eval()(*tensors)
    assert torch.equal(largest, torch.full((HEADS,), -torch.inf, device=device))


# ------------------------------------------------------------------------------------------------------- errors


def bad(**changes: Any) -> Any:
    def call() -> Any:
        q, k, v = inputs()
        given = {"query_layer": q, "key_layer": k, "value_layer": v, **changes}
        return make(**given.pop("module", {}))(**given)

    return call


def shaped(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: nothing has been said yet."""
    monkeypatch.setattr("te_torch.attention.inputs._said", set())


def said_of_masks(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call gives, and what it warns of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = call()
    assert all("/tests/" in w.filename for w in said), "a warning names a line of ours"
    return found, [str(w.message) for w in said]


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "causal_bottom_right"])
def test_a_mask_that_the_mask_type_does_not_read_changes_nothing(mask_type: str) -> None:
    """The peer's own scripts pass their mask always. The mask type may come with the call, too."""
    tensors, mask = inputs(), padding([1, 2, 3])
    wanted = step(make(attn_mask_type=mask_type), tensors)
    masks = (mask, (mask, mask), ~mask.expand(-1, 1, SEQ, -1), torch.randn(5))

    def run() -> list[list[torch.Tensor]]:
        own = [step(make(attn_mask_type=mask_type), tensors, attention_mask=m) for m in masks]
        return [*own, step(make(attn_mask_type="padding"), tensors, attention_mask=mask, attn_mask_type=mask_type)]

    found, said = said_of_masks(run)
    assert all(torch.equal(a, b) for got in found for a, b in zip(got, wanted, strict=True))
    assert len(said) == 1 and f"attention_mask is not read with attn_mask_type='{mask_type}'" in said[0]
    for reads in ("padding", "arbitrary"):
        assert not torch.equal(make(attn_mask_type=reads)(*tensors, mask), make(attn_mask_type="no_mask")(*tensors))


@pytest.mark.usefixtures("unsaid")
def test_a_packed_projection_stays_whole_beside_masks_that_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_torch.attention.dot_product.heads_of", None)  # takes a projection apart for two masks
    qkv, mask = torch.randn(BATCH, SEQ, 3, HEADS, WIDTH), padding([1, 2, 3])
    module = make(num_gqa_groups=HEADS)
    found, _ = said_of_masks(lambda: module(qkv_layer=qkv, attention_mask=(mask, mask)))
    assert torch.equal(found, module(qkv_layer=qkv))


@pytest.mark.usefixtures("unsaid")
def test_a_layer_says_once_that_it_does_not_read_a_mask() -> None:
    layer = te.TransformerLayer(16, 32, 2, layer_type="decoder", device="cpu").eval()
    x, mask = torch.randn(SEQ, BATCH, 16), padding([1, 2, 3])
    wanted = layer(x, encoder_output=x)

    def run() -> list[torch.Tensor]:
        return [layer(x, attention_mask=mask, enc_dec_attn_mask=(mask, mask), encoder_output=x) for _ in range(2)]

    found, said = said_of_masks(run)
    assert all(torch.equal(y, wanted) for y in found)
    assert [re.findall("'[a-z_]*'", text)[0] for text in said] == ["'causal'", "'no_mask'"]
    read = layer(x, attention_mask=mask, self_attn_mask_type="padding_causal", encoder_output=x)
    assert not torch.equal(read, wanted)


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize("older", [False, True])
def test_a_cache_names_a_mask_that_it_does_not_read(older: bool) -> None:
    module, (q, k, v) = make(attn_mask_type="padding_causal", layer_number=1).eval(), inputs()
    with torch.no_grad(), pytest.warns(UserWarning, match="not read with inference_params") as said:
        for _ in range(2):
            cache = InferenceParams(BATCH, 16, *(() if older else (GROUPS, WIDTH, q.dtype)), device="cpu")
            if not older:
                cache.pre_step(OrderedDict.fromkeys(range(BATCH), SEQ))
            module(q, k, v, padding([1, 2, 3]), inference_params=cache)
    assert len(said) == 1


def packed_bad(cu: list[int], **changes: Any) -> Any:
    """Of six packed tokens with these sums."""
    given = torch.tensor(cu, dtype=torch.int32)
    shapes = (("query_layer", HEADS), ("key_layer", GROUPS), ("value_layer", GROUPS))
    tensors = {name: shaped(SEQ, heads, WIDTH) for name, heads in shapes}
    cu_seqlens = {"cu_seqlens_q": given, "cu_seqlens_kv": given}
    return bad(qkv_format="thd", attn_mask_type="padding", **tensors, **cu_seqlens, **changes)


META: dict[str, Any] = {"device": "meta"}  # stands for another device
ERRORS: dict[str, tuple[Any, str]] = {
    "dtypes": (bad(key_layer=shaped(BATCH, SEQ, GROUPS, WIDTH, dtype=torch.bfloat16)), "one dtype"),
    "integers": (bad(query_layer=shaped(BATCH, SEQ, HEADS, WIDTH, dtype=torch.int32)), "int32"),
    "heads": (bad(query_layer=shaped(BATCH, SEQ, 5, WIDTH)), "num_attention_heads"),
    "groups": (bad(key_layer=shaped(BATCH, SEQ, 4, WIDTH)), "num_gqa_groups"),
    "width": (bad(query_layer=shaped(BATCH, SEQ, HEADS, 8)), "kv_channels"),
    "width of v": (bad(value_layer=shaped(BATCH, SEQ, GROUPS, 8)), "kv_channels"),
    "rank": (bad(query_layer=shaped(SEQ, HEADS, WIDTH)), "4 dimensions"),
    "values": (bad(value_layer=shaped(BATCH, SEQ + 1, GROUPS, WIDTH)), "as many values as keys"),
    "no keys": (bad(key_layer=None), "key_layer"),
    "no queries": (bad(query_layer=None), "no queries"),
    "format": (bad(qkv_format="hbsd"), "qkv_format='hbsd'"),
    "no padding mask": (bad(attn_mask_type="padding"), "without a mask"),
    "padding shape": (bad(attn_mask_type="padding", attention_mask=padding([1, 2, 3], SEQ + 1)), "a padding mask of"),
    "padding of one of two": (
        bad(attn_mask_type="padding", attention_mask=padding([1, 2, 3]), key_layer=shaped(BATCH, 9, GROUPS, WIDTH),
            value_layer=shaped(BATCH, 9, GROUPS, WIDTH)), "a padding mask of",
    ),
    "padding of pairs": (
        bad(attn_mask_type="padding", attention_mask=torch.zeros(BATCH, 1, SEQ, SEQ, dtype=torch.bool)),
        "a padding mask of",
    ),
    "no arbitrary mask": (bad(attn_mask_type="arbitrary"), "without attention_mask"),
    "arbitrary shape": (bad(attn_mask_type="arbitrary", attention_mask=shaped(SEQ, 5, dtype=torch.bool)), "broadcasts"),
    "arbitrary dtype": (bad(attn_mask_type="arbitrary", attention_mask=shaped(SEQ, SEQ)), "torch.bool"),
    "cu dtype": (bad(attn_mask_type="padding", cu_seqlens_q=sums([1, 2, 3]).long(), cu_seqlens_kv=sums([1, 2, 3])),
                 "int32"),
    "cu of others": (bad(qkv_format="thd", attn_mask_type="padding", cu_seqlens_q=sums([4, 2]), cu_seqlens_kv=sums([6]),
                        **{n: shaped(SEQ, h, WIDTH) for n, h in (
                            ("query_layer", HEADS), ("key_layer", GROUPS), ("value_layer", GROUPS))}),
                    "different numbers of sequences"),
    "cu entries": (bad(attn_mask_type="padding", cu_seqlens_q=sums([1, 2]), cu_seqlens_kv=sums([1, 2])),
                   "one more than"),
    "mask of a word": (bad(attn_mask_type="padding", attention_mask="yes"), "attention_mask of type str"),
    "no mask of a pair": (bad(attn_mask_type="padding", attention_mask=()), "a padding mask of shape"),
    "half a pair": (bad(attn_mask_type="padding", attention_mask=(padding([1, 2, 3]), None)),
                    r"attention_mask of 2 parts \(Tensor, NoneType\)"),
    "cu in lists": (bad(attn_mask_type="padding", cu_seqlens_q=[0, 6], cu_seqlens_kv=[0, 6]),
                    "cu_seqlens_q of type list"),
    "packed cu in lists": (bad(qkv_format="thd", attn_mask_type="padding", cu_seqlens_q=[0, 6], cu_seqlens_kv=[0, 6]),
                           "cu_seqlens_q of type list"),
    "slopes in a list": (bad(core_attention_bias_type="alibi", alibi_slopes=[1.0]), "alibi_slopes of type list"),
    "max_seqlen in a word": (packed_bad([0, 5, 6], max_seqlen_q=6, max_seqlen_kv="6"), "max_seqlen_kv='6'"),
    "window in a word": (bad(window_size="ab"), "window_size="),
    "window of one number": (bad(window_size=3), "window_size=3"),
    "diagonal in a word": (bad(bottom_right_diagonal="x"), "bottom_right_diagonal='x'"),
    "checkpoint in a word": (bad(checkpoint_core_attention="x"), "checkpoint_core_attention='x'"),
    "cu of two dimensions": (bad(attn_mask_type="padding", cu_seqlens_q=sums([1, 2, 3])[:, None],
                                 cu_seqlens_kv=sums([1, 2, 3])[:, None]), "other types or shapes"),
    "cu of nothing": (packed_bad([]), r"cu_seqlens_q=\[\]"),
    "cu from 3 on": (packed_bad([3, 5, 6]), r"cu_seqlens_q=\[3, 5, 6\]. Allowed: running sums.*0 first"),
    "cu from 3 on, longest told": (packed_bad([3, 5, 6], max_seqlen_q=6, max_seqlen_kv=6), r"=\[3, 5, 6\]"),
    "cu that fall": (packed_bad([0, 5, 4]), r"cu_seqlens_q=\[0, 5, 4\]"),
    "cu of more tokens": (packed_bad([0, 5, 10]), "cu_seqlens_q with a sequence up to token 10 of 6"),
    "cu of longer rows": (bad(attn_mask_type="padding", cu_seqlens_q=sums([1, 2, SEQ + 1]),
                              cu_seqlens_kv=sums([1, 2, 3])), "cu_seqlens_q with a sequence up to token 7 of 6"),
    "keys of longer rows": (bad(attn_mask_type="padding", cu_seqlens_q=sums([1, 2, 3]),
                                cu_seqlens_kv=sums([1, 9, 3])), "cu_seqlens_kv with a sequence up to token 9 of 6"),
    "max_seqlen": (packed_bad([0, 5, 6], max_seqlen_q=4, max_seqlen_kv=5), "max_seqlen_q=4 with a sequence of 5"),
    "begins": (packed_bad([0, 2, 4], cu_seqlens_q_padded=sums([4, 2])[:2]), "other types or shapes"),
    "begins beyond": (packed_bad([0, 2, 4], cu_seqlens_q_padded=sums([5, 1])), "up to token 7 of 6"),
    "bias type": (bad(core_attention_bias_type="lopsided"), "core_attention_bias_type"),
    "no bias": (bad(core_attention_bias_type="post_scale_bias"), "core_attention_bias not given"),
    "bias unasked": (bad(core_attention_bias=shaped(1, HEADS, SEQ, SEQ)), "core_attention_bias given"),
    "bias shape": (bad(core_attention_bias_type="post_scale_bias", core_attention_bias=shaped(1, HEADS, SEQ, 5)),
                   "core_attention_bias of shape"),
    "slopes unasked": (bad(alibi_slopes=shaped(HEADS)), "alibi"),
    "slopes shape": (bad(core_attention_bias_type="alibi", alibi_slopes=shaped(GROUPS)), "alibi_slopes of shape"),
    "window": (bad(window_size=(-1, 2)), "window_size"),
    "thd mask": (bad(qkv_format="thd"), "in thd"),
    "thd cu": (bad(qkv_format="thd", attn_mask_type="padding", **{
        n: shaped(SEQ, h, WIDTH) for n, h in (("query_layer", HEADS), ("key_layer", GROUPS), ("value_layer", GROUPS))
    }), "without cu_seqlens"),
    "cache mask": (bad(inference_params=object()), "with inference_params"),
    "thd bias": (bad(qkv_format="thd", attn_mask_type="padding", core_attention_bias_type="post_scale_bias",
                     core_attention_bias=shaped(1, 1, SEQ, SEQ), cu_seqlens_q=sums([4, 2]), cu_seqlens_kv=sums([4, 2]),
                     **{n: shaped(SEQ, h, WIDTH) for n, h in (
                         ("query_layer", HEADS), ("key_layer", GROUPS), ("value_layer", GROUPS))}),
                 "max_seqlen_q and max_seqlen_kv"),
    "device of a mask": (bad(attn_mask_type="arbitrary", attention_mask=shaped(SEQ, SEQ, dtype=torch.bool, **META)),
                         "mask on meta beside cpu"),
    "device of lengths": (bad(attn_mask_type="padding", cu_seqlens_q=shaped(4, dtype=torch.int32, **META),
                              cu_seqlens_kv=shaped(4, dtype=torch.int32)), "cu_q on meta beside cpu"),
    "device of a bias": (bad(core_attention_bias_type="post_scale_bias",
                             core_attention_bias=shaped(1, 1, SEQ, SEQ, **META)), "bias on meta beside cpu"),
    "device of slopes": (bad(core_attention_bias_type="alibi", alibi_slopes=shaped(HEADS, **META)),
                         "slopes on meta beside cpu"),
    "score_mod": (bad(score_mod=max), "score_mod"),
    "num_splits": (bad(num_splits=2), "num_splits=2"),
}  # fmt: skip


def test_errors_say_what_to_do() -> None:
    wrong = {}
    for name, (call, part) in ERRORS.items():
        kind: Any = ValueError if name in ("score_mod", "num_splits") else AssertionError
        try:
            call()
        except kind as e:
            ours = isinstance(e, (ArgumentError, UnsupportedError))
            if not ours or not re.search(part, str(e)) or "Allowed: " not in str(e) or "To do: " not in str(e):
                wrong[name] = repr(e)
        except Exception as e:  # an error of another kind belongs to its row, too
            wrong[name] = repr(e)
        else:
            wrong[name] = "is taken"
    assert not wrong
