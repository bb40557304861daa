"""`DotProductAttention` as a module: arguments, errors, formats, masks, packed inputs, state, recomputation, compile.

The numbers of every combination are judged elsewhere; here each way of saying something is compared with another way of
saying the same.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo

import te_torch as te
from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling
from te_torch.attention import DotProductAttention, choose
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
    on_backends,
    on_devices,
    only,
    padding,
    same,
    step,
    sums,
)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets one backend through."""
    return partial(only, monkeypatch)


# ------------------------------------------------------------------------------------------------- constructor


def test_documented_defaults() -> None:
    module = DotProductAttention(8, 64)
    assert module.num_gqa_groups == 8 and module.softmax_scale == 64**-0.5
    assert (module.qkv_format, module.attn_mask_type, module.window_size) == ("sbhd", "causal", (-1, 0))
    assert module.layer_number == 1 and module.softmax_offset is None
    assert DotProductAttention(8, (64, 32)).softmax_scale == 64**-0.5
    assert DotProductAttention(8, 64, softmax_scale=0.5).softmax_scale == 0.5
    assert not list(module.parameters()) and not module.state_dict()


def test_the_learnable_softmax_has_a_parameter() -> None:
    module = make(softmax_type="learnable")
    assert list(module.state_dict()) == ["softmax_offset"]
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


@pytest.mark.parametrize(
    "options",
    [
        {"num_gqa_groups": 3},
        {"num_gqa_groups": 0},
        {"tp_size": 3},
        {"attention_type": "both"},
        {"softmax_type": "hard"},
        {"attention_dropout": 1.5},
        {"window_size": (-1, 3)},
        {"num_gqa_groups": -4},
        {"num_attention_heads": 0},
        {"num_attention_heads": -4, "num_gqa_groups": -2},
        {"kv_channels": 0},
        {"kv_channels": -16},
        {"kv_channels": (16,)},
        {"kv_channels": (16, 0)},
        {"kv_channels": [16, 16, 16]},
    ],
    ids=str,
)
def test_constructor_errors(options: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="To do:"):
        DotProductAttention(**{"num_attention_heads": HEADS, "kv_channels": WIDTH, **options})


def test_unknown_masks_are_named() -> None:
    with pytest.raises(ArgumentError, match="attn_mask_type='triangle'"):
        make(attn_mask_type="triangle")
    with pytest.raises(ArgumentError, match="attn_mask_type='triangle'"):
        make()(*inputs(), attn_mask_type="triangle")
    with pytest.raises(ArgumentError, match="cp_comm_type"):
        make(cp_comm_type="pigeon")


@pytest.mark.parametrize("alias", ["padding,causal", "causal,padding"])
def test_aliases_of_masks(alias: str) -> None:
    mask = padding([6, 2, 4])
    wanted = step(make(attn_mask_type="padding_causal"), inputs(), mask)
    assert make(attn_mask_type=alias).attn_mask_type == "padding_causal"
    assert same(step(make(attn_mask_type=alias), inputs(), mask), wanted)
    assert same(step(make(), inputs(), mask, attn_mask_type=alias), wanted)


# ----------------------------------------------------------------------------------------------------- formats


@on_devices
@on_backends
def test_the_two_dense_formats_are_one(device: str, backend: str, use: Any) -> None:
    use(backend)
    a = step(make(), inputs(device))
    b = step(make(qkv_format="sbhd"), inputs(device, "sbhd"))
    c = step(make(), inputs(device, "sbhd"), qkv_format="sbhd")
    assert a[0].shape == (BATCH, SEQ, HEADS * WIDTH) and b[0].shape == (SEQ, BATCH, HEADS * WIDTH)
    # Both weigh outputs by position in memory: compare the outputs, and each format's gradients with itself.
    assert near([a[0]], [b[0].transpose(0, 1)])
    assert equal(b, c)


@on_devices
@on_backends
def test_packed_sequences_equal_padded_ones(device: str, backend: str, use: Any) -> None:
    use(backend)
    lengths = [4, 0, 6]
    tensors = inputs(device)
    keep = ~padding(lengths, device=device).view(BATCH, SEQ)
    packed = [t.detach()[keep].requires_grad_() for t in tensors]
    cu = sums(lengths, device)
    out = make(attn_mask_type="padding_causal")(*tensors, padding(lengths, device=device))
    thd = make(qkv_format="thd", attn_mask_type="padding_causal")(*packed, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    assert thd.shape == (10, HEADS * WIDTH)
    assert near([thd], [out[keep]])
    assert not out[~keep].any(), "queries that are padding get zeros"
    dy = torch.randn_like(thd)
    got = torch.autograd.grad(thd, packed, dy)
    wanted = torch.autograd.grad(out[keep], tensors, dy)
    assert near(list(got), [t[keep] for t in wanted])
    assert all(not t[~keep].any() for t in wanted)


@on_devices
@on_backends
def test_tokens_between_packed_sequences(device: str, backend: str, use: Any) -> None:
    use(backend)
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
@on_backends
@pytest.mark.parametrize("tokens", [0, 3])
def test_packed_sequences_without_a_token(tokens: int, backend: str, device: str, use: Any) -> None:
    """All of them empty, as the last batch of a rank may be."""
    use(backend)
    tensors = [t.detach().flatten(0, 1)[:tokens].requires_grad_() for t in inputs(device)]
    for cu in (sums([0, 0], device), sums([], device)):
        out, *grads = step(make(qkv_format="thd", attn_mask_type="padding"), tensors, cu_seqlens_q=cu, cu_seqlens_kv=cu)
        assert out.shape == (tokens, HEADS * WIDTH) and not out.any() and not any(g.any() for g in grads)


# ------------------------------------------------------------------------------------------------------- masks


@on_devices
@on_backends
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_masks_and_cu_seqlens_say_the_same(mask: str, device: str, backend: str, use: Any) -> None:
    use(backend)
    q, kv = [6, 2, 4], [6, 6, 5]
    module = make(attn_mask_type=mask, attention_type="cross")
    masks = (padding(q, device=device), padding(kv, device=device))
    a = step(module, inputs(device), masks)
    b = step(module, inputs(device), cu_seqlens_q=sums(q, device), cu_seqlens_kv=sums(kv, device))
    assert equal(a, b)
    both = step(make(attn_mask_type=mask), inputs(device), padding(q, device=device))
    assert equal(both, step(module, inputs(device), (padding(q, device=device), padding(q, device=device))))
    # From the top left a query sees as many keys as there are queries before it, however many keys follow.
    assert near(a, both) == (mask == "padding_causal")


@on_backends
def test_an_arbitrary_mask_says_all(backend: str, use: Any) -> None:
    """A causal one, in every shape that broadcasts."""
    use(backend)
    hidden = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    wanted = step(make(), inputs())
    for mask in (hidden, hidden[None, None], hidden.expand(BATCH, 1, SEQ, SEQ), hidden.expand(1, HEADS, SEQ, SEQ)):
        assert near(step(make(attn_mask_type="arbitrary"), inputs(), mask), wanted)
    column = torch.arange(SEQ).view(1, 1, 1, SEQ) >= 4
    a = step(make(attn_mask_type="arbitrary"), inputs(), column)
    b = step(make(attn_mask_type="no_mask"), [inputs()[0], *(t.detach()[:, :4].requires_grad_() for t in inputs()[1:])])
    assert near(a[:2], b[:2])


@on_backends
def test_windows_and_diagonals_by_call_or_by_module(backend: str, use: Any) -> None:
    use(backend)
    by_call = step(make(), inputs(skv=9), attn_mask_type="no_mask", window_size=(2, 1), bottom_right_diagonal=False)
    by_module = step(make(attn_mask_type="no_mask", window_size=(2, 1), bottom_right_diagonal=False), inputs(skv=9))
    assert same(by_call, by_module)
    default = step(make(attn_mask_type="no_mask", window_size=(2, 1)), inputs(skv=9))
    assert not same(by_call, default)
    assert same(default, step(make(attn_mask_type="no_mask", window_size=[2, 1]), inputs(skv=9)))
    # causal is top-left whatever is asked for, *_bottom_right is not.
    a = step(make(), inputs(skv=9), bottom_right_diagonal=True)
    assert same(a, step(make(), inputs(skv=9)))
    b = step(make(attn_mask_type="causal_bottom_right"), inputs(skv=9), bottom_right_diagonal=False)
    assert not same(a, b)


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
@on_backends
def test_dropout_while_training_only(device: str, backend: str, use: Any) -> None:
    use(backend)
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


@on_backends
def test_dropout_draws_from_the_tracker(backend: str, use: Any) -> None:
    use(backend)
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


@on_devices
@on_backends
@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
def test_recomputation_has_the_same_bits(device: str, backend: str, softmax: str, use: Any) -> None:
    use(backend)
    module = make(attention_dropout=0.3, softmax_type=softmax).to(device)
    tensors = inputs(device)
    torch.manual_seed(4)
    plain = step(module, tensors)
    torch.manual_seed(4)
    kept = step(module, tensors, checkpoint_core_attention=True)
    assert equal(plain, kept)
    torch.manual_seed(4)
    out = torch.utils.checkpoint.checkpoint(module, *tensors, use_reentrant=False)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    assert equal(plain, [out, *torch.autograd.grad((out.float() * weights).sum(), tensors)])


@on_backends
def test_checkpointed_attention_keeps_its_inputs_only(backend: str, use: Any) -> None:
    use(backend)
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


@on_devices
@on_backends
def test_max_logit(device: str, backend: str, use: Any) -> None:
    use(backend)
    tensors = inputs(device)
    out, largest = make(return_max_logit=True)(*tensors)
    q, k = (t.double() for t in tensors[:2])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(HEADS // GROUPS, 2)) * WIDTH**-0.5
    seen = torch.ones(SEQ, SEQ, dtype=torch.bool, device=device).tril()
    wanted = scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3))
    assert largest.shape == (HEADS,) and largest.dtype == torch.float32 and not largest.requires_grad
    assert torch.allclose(largest.double(), wanted, rtol=1e-2 if device == "cuda" else 1e-5)
    assert near([out], [make()(*tensors)])


@on_backends
def test_a_bias_before_the_scale(backend: str, use: Any) -> None:
    use(backend)
    bias = torch.randn(1, HEADS, SEQ, SEQ)
    a = step(make(), inputs(), core_attention_bias_type="pre_scale_bias", core_attention_bias=bias)
    scaled = bias * WIDTH**-0.5
    b = step(make(), inputs(), core_attention_bias_type="post_scale_bias", core_attention_bias=scaled)
    assert near(a, b) and not near(a, step(make(), inputs()))


@on_backends
def test_usual_slopes_are_the_default(backend: str, use: Any) -> None:
    use(backend)
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8])
    a = step(make(), inputs(), core_attention_bias_type="alibi")
    assert same(a, step(make(), inputs(), core_attention_bias_type="alibi", alibi_slopes=slopes))
    assert not near(a, step(make(), inputs()))


def test_layer_scaling_of_float16(monkeypatch: pytest.MonkeyPatch, use: Any) -> None:
    """Scores that overflow float16 do not when they are held divided by the layer's number."""
    use(UNFUSED)
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


@on_backends
def test_softmax_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, backend: str, use: Any) -> None:
    use(backend)
    module = make(softmax_type="off-by-one", attn_mask_type="padding_causal", window_size=(2, 0))
    mask = padding([6, 2, 4])
    fused = step(module, inputs(), mask)
    monkeypatch.setenv("NVTE_MASKED_SOFTMAX_FUSION", "0")
    assert near(step(module, inputs(), mask), fused)


@on_backends
def test_under_torchs_autocast(backend: str, use: Any) -> None:
    use(backend)
    tensors = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = make()(*tensors)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, make()(*(t.bfloat16() for t in tensors)))
    out.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in tensors)


def test_a_region_without_fp8_attention_changes_nothing() -> None:
    module = make()
    with te.autocast(recipe=DelayedScaling()):
        out = module(*inputs())
    assert torch.equal(out, module(*inputs())) and not module.state_dict()


@on_devices
@on_backends
@pytest.mark.parametrize("kind", ["mask", "alibi", "thd"])
def test_inference_mode_and_then_training(kind: str, device: str, backend: str, use: Any) -> None:
    """What is kept of a mask, of slopes or of lengths since an evaluation serves a training step, too."""
    use(backend)
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
@on_backends
def test_a_bias_may_begin_anywhere(device: str, backend: str, use: Any) -> None:
    """That of one head of several, say, which need not lie on 16 bytes; its gradient comes back all the same."""
    use(backend)
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
@on_backends
def test_a_converted_module_has_a_converted_sink(device: str, backend: str, use: Any) -> None:
    use(backend)
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


@on_backends
@pytest.mark.parametrize("shape", [(0, SEQ), (BATCH, 0)])
def test_nothing_to_attend(shape: tuple[int, int], backend: str, use: Any) -> None:
    use(backend)
    tensors = [torch.randn(*shape, heads, WIDTH, requires_grad=True) for heads in (HEADS, 2, 2)]
    out, *grads = step(make(), tensors)
    assert out.shape == (*shape, HEADS * WIDTH) and [g.shape for g in grads] == [t.shape for t in tensors]


def test_pickled_and_copied() -> None:
    module = make(softmax_type="learnable")
    wanted = module(*inputs())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(*inputs()), wanted) and len(other._choices) == 1
    assert "heads=4, groups=2" in repr(module)


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_torch.attention.dot_product._PLANS", 3)
    module = make()
    for skv in range(1, 8):
        module(*inputs(skv=skv))
    assert len(module._choices) <= 3


@on_backends
def test_a_cache_of_the_older_form(backend: str, use: Any) -> None:
    """InferenceParams(batch, length) with causal masks, as the older documentation has it."""
    use(backend)
    module = make(layer_number=1).eval()
    tensors = [t.detach() for t in inputs()]
    wanted = module(*tensors)
    cache = InferenceParams(BATCH, SEQ)
    first = module(*(t[:, :4] for t in tensors), inference_params=cache)
    cache.sequence_len_offset += 4
    second = module(*(t[:, 4:] for t in tensors), inference_params=cache)
    assert near([torch.cat([first, second], 1)], [wanted])


@pytest.mark.parametrize("backend", [choose.FUSED, pytest.param(choose.UNFUSED, marks=pytest.mark.full)])
def test_compiled(backend: str, use: Any) -> None:
    use(backend)
    torch._dynamo.utils.counters.clear()
    module = make(attention_dropout=0.2, softmax_type="learnable")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for options in ({}, {"attention_mask": padding([6, 2, 4]), "attn_mask_type": "padding_causal"}):
        torch.manual_seed(1)
        tensors = inputs()
        torch.manual_seed(1)
        a = step(module, tensors, **options)
        torch.manual_seed(1)
        assert same(step(compiled, tensors, **options), a)
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


def test_backends_are_those_of_the_table() -> None:
    from te_torch.attention.dot_product import RUN

    assert set(RUN) == set(choose.BACKENDS)
