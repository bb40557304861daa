"""`DotProductAttention` as a module: lengths, gaps, dropout, modes, masks that are not read, nothing to attend to.

The numbers of every combination are in the table of test_attention_matrix.py, wrong calls in tests/messages.
"""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo

import te_torch as te
from te_torch.attention import choose
from te_torch.attention import inputs as call_inputs
from te_torch.attention.choose import UNFUSED
from te_torch.attention.inference import InferenceParams
from tests.attention_steps import (
    BATCH,
    GROUPS,
    HEADS,
    SEQ,
    WIDTH,
    equal,
    inputs,
    make,
    near,
    only,
    padding,
    same,
    step,
    sums,
)
from tests.backends import on_devices

# ----------------------------------------------------------------------------------------- parameters and names


def test_the_learnable_softmax_has_a_parameter() -> None:
    module = make(softmax_type="learnable")
    assert list(module.state_dict()) == ["softmax_offset"] and "heads=4, groups=2" in repr(module)
    offset = module.softmax_offset
    assert isinstance(offset, torch.nn.Parameter) and offset.dtype == torch.float32
    assert offset.shape == (HEADS,) and not offset.any()
    assert make(softmax_type="learnable", tp_size=2).softmax_offset.shape == (HEADS // 2,)
    zeros = make(softmax_type="off-by-one")
    assert not zeros.state_dict() and torch.equal(zeros.softmax_offset.cpu(), torch.zeros(HEADS))
    other = make(softmax_type="learnable")
    with torch.no_grad():
        offset.copy_(torch.arange(4.0))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.softmax_offset, offset)


@pytest.mark.parametrize("alias", ["padding,causal", "causal,padding"])
def test_aliases_of_masks(alias: str) -> None:
    mask = padding([6, 2, 4])
    wanted = step(make(attn_mask_type="padding_causal"), inputs(), mask)
    assert make(attn_mask_type=alias).attn_mask_type == "padding_causal"
    assert same(step(make(attn_mask_type=alias), inputs(), mask), wanted)
    assert same(step(make(), inputs(), mask, attn_mask_type=alias), wanted)


# ----------------------------------------------------------------------------------------------------- formats


@on_devices
def test_tokens_between_packed_sequences(device: str, backend: str) -> None:
    lengths, gaps = [4, 1, 6], [0, 2, 3]
    cu, places = sums(lengths, device), sums(lengths, device)
    places += torch.tensor([*gaps, 3], dtype=torch.int32, device=device)
    torch.manual_seed(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    loose = [torch.randn(14, h, WIDTH, device=device, dtype=dtype) for h in (HEADS, GROUPS, GROUPS)]
    where = torch.cat([torch.arange(n) + int(places[i]) for i, n in enumerate(lengths)])
    dense = [t[where.to(device)] for t in loose]
    module = make(qkv_format="thd", attn_mask_type="padding_causal")
    wanted = module(*dense, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "cu_seqlens_q_padded": places, "cu_seqlens_kv_padded": places}
    assert near([module(*loose, **options)[where.to(device)]], [wanted])
    assert near([module(*loose, **options, pad_between_seqs=True)[where.to(device)]], [wanted])
    # Without tokens between them, or where these are denied, sequences begin at cu_seqlens.
    same_objects = {**options, "cu_seqlens_q_padded": cu, "cu_seqlens_kv_padded": cu}
    assert near([module(*dense, **same_objects)], [wanted])
    assert near([module(*dense, **options, pad_between_seqs=False)], [wanted])
    # Where nothing says that they begin elsewhere they begin there, too; what is not given equals the others.
    plain = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "pad_between_seqs": True}
    assert near([module(*dense, **plain)], [wanted])
    assert near([module(*dense, **same_objects, pad_between_seqs=True)], [wanted])
    q_only, kv_only = [loose[0], *dense[1:]], [dense[0], *loose[1:]]
    for between in (None, True):
        plain["pad_between_seqs"] = between
        assert near([module(*q_only, **plain, cu_seqlens_q_padded=places)[where.to(device)]], [wanted])
        assert near([module(*kv_only, **plain, cu_seqlens_kv_padded=places)], [wanted])


def test_max_seqlen_of_packed_sequences() -> None:
    cu = sums([4, 1, 6])
    tensors = [torch.randn(11, h, WIDTH) for h in (HEADS, GROUPS, GROUPS)]
    module = make(qkv_format="thd", attn_mask_type="padding")
    module(*tensors, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    module(*tensors, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=6, max_seqlen_kv=7)
    for _ in range(2):  # programs give the largest of a tensor as it is
        module(*tensors, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=cu.diff().max(), max_seqlen_kv=7)
    found = [(plan.spec.max_q, plan.spec.max_kv) for plan in module._choices.values()]
    assert found == [(64, 64), (6, 7)]


@on_devices
@pytest.mark.parametrize("tokens", [0, 3])
def test_packed_sequences_without_a_token(tokens: int, backend: str, device: str) -> None:
    """All of them empty, as the last batch of a rank may be."""
    tensors = [t.detach().flatten(0, 1)[:tokens].requires_grad_() for t in inputs(device)]
    for cu in (sums([0, 0], device), sums([], device)):
        out, *grads = step(make(qkv_format="thd", attn_mask_type="padding"), tensors, cu_seqlens_q=cu, cu_seqlens_kv=cu)
        assert out.shape == (tokens, HEADS * WIDTH) and not out.any() and not any(g.any() for g in grads)


# ------------------------------------------------------------------------------------------------------- masks


def test_overridden_windows_are_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"\(4, 2\) becomes \(4, 0\)"):
        module = make(window_size=(4, 2))
    assert module.window_size == (4, 0)
    with pytest.warns(UserWarning, match="becomes"):
        make()(*inputs(), window_size=(4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make()(*inputs(), attn_mask_type="no_mask")  # the module's default window is none of the user's


# --------------------------------------------------------------------------------- dropout and recomputation


class Tracker:
    """An RNG tracker with a generator of its own on the CPU."""

    def __init__(self) -> None:
        self.state = torch.Generator().manual_seed(99).get_state()
        self.forks = 0

    def fork(self, name: str = "model-parallel-rng") -> Any:
        return self

    def __enter__(self) -> None:
        self.forks += 1
        self.outside = torch.get_rng_state()
        torch.set_rng_state(self.state)

    def __exit__(self, *exc: object) -> None:
        self.state = torch.get_rng_state()
        torch.set_rng_state(self.outside)


@on_devices
def test_dropout_while_training_only(device: str, backend: str) -> None:
    module, plain, tensors = make(attention_dropout=0.5), make(), inputs(device)
    torch.manual_seed(0)
    first = step(module, tensors)
    assert not same(step(module, tensors), first)
    torch.manual_seed(0)
    assert equal(step(module, tensors), first)
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert equal(step(module.eval(), tensors), step(plain, tensors))
    now = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(state, now), "inference draws nothing"


@on_devices
@pytest.mark.parametrize("checkpoint", [False, True])
def test_everything_dropped(checkpoint: bool, device: str) -> None:
    """A probability of one is legal: zeros, and gradients of zero; on a GPU one backend can do it."""
    module, tensors = make(attention_dropout=1.0), inputs(device)
    found = step(module, tensors, checkpoint_core_attention=checkpoint)
    assert module.explain(*tensors).backend == (UNFUSED if device == "cuda" else choose.FUSED)
    assert all(not t.any() and t.isfinite().all() for t in found)
    assert same(step(module.eval(), tensors)[:1], step(make(), tensors)[:1])


def test_dropout_draws_from_the_tracker(backend: str) -> None:
    outputs, tensors = [], inputs()
    for seed in (1, 2):
        tracker = Tracker()
        module = make(attention_dropout=0.5, get_rng_state_tracker=lambda t=tracker: t)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        outputs.append(module(*tensors))
        assert tracker.forks == 1 and torch.equal(before, torch.get_rng_state())
    assert torch.equal(*outputs), "the tracker's stream, not the global one, says what is dropped"
    tracker = Tracker()
    make(attention_dropout=0.5, get_rng_state_tracker=lambda: tracker, sequence_parallel=True)(*tensors)
    make(get_rng_state_tracker=lambda: tracker)(*tensors)
    assert tracker.forks == 0


def test_checkpointed_attention_keeps_its_inputs_only(backend: str) -> None:
    kept: dict[bool, set[int]] = {}
    for checkpoint in (False, True):
        tensors, sizes = inputs(), set()

        def pack(t: torch.Tensor, sizes: set[int] = sizes) -> torch.Tensor:
            sizes.add(t.untyped_storage().data_ptr())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            make()(*tensors, checkpoint_core_attention=checkpoint)
        kept[checkpoint] = sizes - {t.untyped_storage().data_ptr() for t in tensors} - {0}
    assert kept[False] and not kept[True]


# ----------------------------------------------------------------------------------------------------- the rest


def test_layer_scaling_of_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that overflow float16 do not when they are held divided by the layer's number."""
    only(monkeypatch, UNFUSED)
    q, k, v = inputs(dtype=torch.float16)
    q = (q * 0 + 100).detach()
    k = (k * 0 + 100).detach()
    module = make(attn_mask_type="no_mask", softmax_scale=1.0, layer_number=16)
    assert module(q, k, v).isnan().any()
    monkeypatch.setenv("NVTE_APPLY_QK_LAYER_SCALING", "1")
    out = module(q, k, v)
    mean = v.float().mean(1, keepdim=True).repeat_interleave(HEADS // GROUPS, 2).expand(-1, SEQ, -1, -1).flatten(2)
    assert torch.allclose(out.float(), mean, atol=2e-3)
    tensors = [t.detach() for t in inputs(dtype=torch.float16)]
    bias = torch.randn(1, HEADS, SEQ, SEQ, dtype=torch.float16)
    options = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    scaled = module(*tensors, **options)
    monkeypatch.delenv("NVTE_APPLY_QK_LAYER_SCALING")
    assert torch.allclose(scaled, module(*tensors, **options), atol=2e-2), "the scores themselves stay what they are"


def test_under_torchs_autocast(backend: str) -> None:
    tensors = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = make()(*tensors)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, make()(*(t.bfloat16() for t in tensors)))
    out.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in tensors)


@on_devices
@pytest.mark.parametrize("kind", ["mask", "alibi", "thd"])
def test_inference_mode_and_then_training(kind: str, device: str, backend: str) -> None:
    """What is kept of a mask, of slopes or of lengths since an evaluation serves a training step, too."""
    module, tensors = make(attn_mask_type="padding" if kind != "alibi" else "causal").to(device), inputs(device)
    call_inputs._slopes.clear()
    options: dict[str, Any] = {
        "mask": {"attention_mask": padding([1, 6, 4], device=device)},
        "alibi": {"core_attention_bias_type": "alibi"},
        "thd": {"qkv_format": "thd", "cu_seqlens_q": sums([4, 2], device), "cu_seqlens_kv": sums([4, 2], device)},
    }[kind]
    if kind == "thd":
        tensors = [t.detach()[0].requires_grad_() for t in tensors]
    with torch.inference_mode():
        evaluated = module(*tensors, **options)
        # Tensors that were made there cannot tell whether they change.
        made = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in options.items()}
        assert near([module(*tensors, **made)], [evaluated])
    assert near(step(module, tensors, **options)[:1], [evaluated])


@on_devices
def test_a_bias_may_begin_anywhere(device: str, backend: str) -> None:
    """That of one head of several, say, which need not lie on 16 bytes; its gradient comes back all the same."""
    module, tensors = make(attn_mask_type="no_mask").to(device), inputs(device, dtype=torch.bfloat16)
    whole = torch.randn(1 + HEADS * SEQ * SEQ, device=device).bfloat16()
    bias = whole[1:].view(1, HEADS, SEQ, SEQ).requires_grad_()
    copied = bias.detach().clone().requires_grad_()
    assert bias.data_ptr() % 16
    found = []
    for b in (bias, copied):
        out = module(*tensors, core_attention_bias_type="post_scale_bias", core_attention_bias=b)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), (*tensors, b))])
    assert equal(*found)


@on_devices
def test_a_converted_module_has_a_converted_sink(device: str, backend: str) -> None:
    wanted, module = (make(softmax_type="learnable").to(device) for _ in range(2))
    with torch.no_grad():
        for m in (wanted, module):
            m.softmax_offset.copy_(torch.arange(4.0))  # which bfloat16 holds
    module, tensors = module.to(torch.bfloat16), inputs(device, dtype=torch.bfloat16)
    assert equal(step(module, tensors), step(wanted, tensors))
    for m in (wanted, module):
        m(*tensors).float().square().sum().backward()
    assert module.softmax_offset.grad.dtype == torch.bfloat16
    assert torch.equal(module.softmax_offset.grad, wanted.softmax_offset.grad.bfloat16()) or device == "cuda"


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_torch.attention.dot_product._PLANS", 3)
    module = make()
    for skv in range(1, 8):
        module(*inputs(skv=skv))
    assert len(module._choices) <= 3


def test_backends_are_those_of_the_table() -> None:
    from te_torch.attention.dot_product import RUN

    assert set(RUN) == set(choose.BACKENDS)


@on_devices
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 2, 2), (2, 0, 3), (2, 3, 0), (2, 0, 0)])
def test_no_pair_of_a_query_and_a_key(batch: int, queries: int, keys: int, backend: str, device: str) -> None:
    """Zeros as outputs and gradients, with dropout too, and no logit."""
    counts = [(queries, HEADS), (keys, GROUPS), (keys, GROUPS)]
    place: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    tensors = [torch.zeros(batch, n, heads, WIDTH, **place, requires_grad=True) for n, heads in counts]
    options: dict[str, Any] = {"attn_mask_type": "no_mask", "attention_dropout": 0.5}
    out, *grads = step(make(**options), tensors)
    assert out.shape == (batch, queries, HEADS * WIDTH) and not out.any()
    assert [g.shape for g in grads] == [t.shape for t in tensors] and not any(g.any() for g in grads)
    _, largest = make(return_max_logit=True, **options).eval()(*tensors)
    assert torch.equal(largest, torch.full((HEADS,), -torch.inf, device=device))
    hidden = [torch.zeros(batch, 1, 1, n, dtype=torch.bool, device=device) for n in (queries, keys)]
    padded = step(make(attn_mask_type="padding"), tensors, tuple(hidden))
    assert [t.shape for t in padded] == [out.shape, *(t.shape for t in tensors)] and not any(t.any() for t in padded)


# ------------------------------------------------------------------------- no pairs, and masks that are not read


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
