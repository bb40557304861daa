"""`InferenceParams` under layers: copies of a cache, decoders, compiled models, and what the example refuses."""

from __future__ import annotations

import copy
import pickle
import sys
from collections import OrderedDict
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from examples.generate import parse
from te_core.errors import UnsupportedError
from te_torch.attention.dot_product import DotProductAttention
from te_torch.attention.inference import InferenceParams
from te_torch.attention.rope import RotaryPositionEmbedding
from te_torch.transformer.layer import TransformerLayer
from tests.backends import devices
from tests.torch.test_inference import CAPACITY, D_K, HEADS, ROWS, Tiny, params


def continued(model, p, token):
    p.pre_step(OrderedDict({1: 1, 2: 1}))
    return model(torch.tensor([[token], [token + 1]], device=p.device), inference_params=p)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["copy", "pickle"])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@torch.no_grad()
def test_a_copy_has_memory_of_its_own(device, paged, copied):
    """A search that goes on from one cache in two ways: neither sees the other's tokens."""
    model = Tiny("bshd", device).eval()
    p, alone, elsewhere = (params(device, paged=paged, dtype=torch.float32, d_v=D_K) for _ in range(3))
    for each in (p, alone, elsewhere):
        each.pre_step(OrderedDict({1: 3, 2: 3}))
        model(torch.arange(6, device=device).view(2, 3), inference_params=each)
    other = copied(p)
    steps = ((p, alone, 30), (other, elsewhere, 20), (p, alone, 40), (other, elsewhere, 50))
    for each, want, token in steps:
        torch.testing.assert_close(continued(model, each, token), continued(model, want, token), rtol=0, atol=0)
    assert p.get_seqlens_pre_step().tolist()[:2] == [4, 4] and other.cu_seqlens_kv.tolist()[:3] == [0, 5, 10]


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@torch.no_grad()
def test_a_cache_goes_on_after_it_was_sent_to_another_process(paged):
    """torch moves its memory into shared memory then."""
    model = Tiny("bshd", "cpu").eval()
    p, alone = (params("cpu", paged=paged, dtype=torch.float32, d_v=D_K) for _ in range(2))
    for token in (3, 30, 7, 20):
        torch.testing.assert_close(continued(model, p, token), continued(model, alone, token), rtol=0, atol=0)
        sent = ForkingPickler.dumps(p)
        held = [t for pair in alone.cache_manager.cache.values() for t in pair]
        waste = [torch.full_like(t, 7.0) for t in 4 * held]  # where it was
        assert len(sent) and len(waste) and p.cache_manager.cache[1][0].is_shared()


def test_the_older_form_copied():
    p = InferenceParams(2, 8, device="cpu")
    tokens = torch.randn(2, 3, HEADS, D_K)
    p.step(1, tokens, tokens, "bshd")
    p.sequence_len_offset = 3
    other = copy.deepcopy(p)
    *_, cu_q, cu_kv, _, _ = other.step(1, tokens, tokens, "bshd")
    assert cu_q.tolist() == [0, 3, 6] and cu_kv.tolist() == [0, 6, 12]
    assert other.cache_manager.cache[1][0][:, 3:6].all() and not p.cache_manager.cache[1][0][:, 3:].any()


@pytest.mark.parametrize("older", [False, True])
def test_more_sequences_than_the_cache_has_room_for(older):
    model, tokens = Tiny("bshd", "cpu"), torch.zeros(ROWS + 1, 3, dtype=torch.long)
    p = InferenceParams(ROWS, CAPACITY, device="cpu") if older else params("cpu", dtype=torch.float32, d_v=D_K)
    with pytest.raises(ValueError, match=f"{ROWS + 1} sequences.*max_batch_size={ROWS}"):
        model(tokens, inference_params=p)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@torch.no_grad()
def test_a_decoder(device, paged):
    """Queries of cross attention stand where the cache ends, too; what they look at is not kept."""
    torch.manual_seed(3)
    layer = TransformerLayer(
        32,
        64,
        4,
        num_gqa_groups=HEADS,
        layer_number=1,
        layer_type="decoder",
        self_attn_mask_type="padding_causal",
        attn_input_format="bshd",
        device=device,
    ).eval()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.3)
    x, encoded = torch.randn(2, 7, 32, device=device), torch.randn(2, 9, 32, device=device)
    options = {"encoder_output": encoded, "rotary_pos_emb": RotaryPositionEmbedding(D_K).to(device)(CAPACITY)}
    want = layer(x, self_attn_mask_type="causal", **options)
    p, got, begin = params(device, paged=paged, dtype=torch.float32, d_v=D_K), [], 0
    for tokens in (4, 1, 1, 1):
        p.pre_step(OrderedDict({1: tokens, 2: tokens}))
        got.append(layer(x[:, begin : begin + tokens], inference_params=p, **options))
        begin += tokens
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("fused", "paged"),
    [("1", False), ("0", True), *(pytest.param(*case, marks=pytest.mark.full) for case in (("1", True), ("0", False)))],
    ids=[
        "any backend-rows",
        "unfused, which breaks the graph-pages",
        "any backend-pages",
        "unfused, which breaks the graph-rows",
    ],
)
@torch.no_grad()
def test_compiled(device, paged, fused, monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", fused)
    model = Tiny("bshd", device).eval()
    model.layers = model.layers[:1]
    compiled = torch.compile(model, backend="eager", dynamic=False)
    p, want = (params(device, paged=paged, dtype=torch.float32, d_v=D_K) for _ in range(2))
    for step in (3, 1, 1):
        tokens = torch.randint(64, (2, step), device=device)
        for each in (p, want):
            each.pre_step(OrderedDict({1: step, 2: step}))
        got = compiled(tokens, inference_params=p)
        torch.testing.assert_close(got, model(tokens, inference_params=want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("--prompt", "", "no next byte"), ("--count", "0", "0 is not"), ("--batch", "-1", "-1")],
)
def test_refusals_of_the_example(option, value, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", option, value])
    with pytest.raises(SystemExit):
        parse()
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", ["rows", "pages", "older"])
@pytest.mark.parametrize("frozen", ["", "query", "keys"])
@torch.enable_grad()
def test_no_gradient_through_a_cache(device, kind, frozen):
    """Forward in grad mode is what it is without; a backward says in one sentence that there is none."""
    model = Tiny("bshd", device).eval()
    for name, parameter in model.named_parameters():
        if frozen and ("query" in name) == (frozen == "query"):
            parameter.requires_grad_(False)
    tokens = torch.arange(6, device=device).view(2, 3)

    def cache():
        if kind == "older":
            return InferenceParams(2, CAPACITY, device=device)
        p = params(device, paged=kind == "pages", dtype=torch.float32, d_v=D_K)
        p.pre_step(OrderedDict({1: 3, 2: 3}))
        return p

    got = model(tokens, inference_params=cache())
    with torch.no_grad():
        want = model(tokens, inference_params=cache())
    assert got.requires_grad and torch.equal(got, want)
    with pytest.raises(
        UnsupportedError, match=r"DotProductAttention: got a backward through inference_params.*no_grad"
    ):
        got.sum().backward()


@pytest.mark.parametrize("device", devices())
@torch.enable_grad()
def test_grad_mode_costs_a_cache_no_memory(device):
    """Who forgets torch.no_grad() keeps nothing of the attention for a backward that cannot be."""
    attention = DotProductAttention(HEADS, D_K, qkv_format="bshd", attn_mask_type="padding_causal", layer_number=1)
    q, k, v = (torch.randn(2, 3, HEADS, D_K, device=device, requires_grad=True) for _ in range(3))
    p, kept = InferenceParams(2, CAPACITY, device=device), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = attention(q, k, v, inference_params=p)
    assert not kept and out.requires_grad and not p.cache_manager.cache[1][0].requires_grad
    assert not attention(q.detach(), k.detach(), v.detach(), inference_params=p).requires_grad
