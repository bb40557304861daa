"""Context parallelism by the modules: every rank has a part of each sequence, and gets what one process computes."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.context import ring
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from te_core.tape import taped
from te_core.tools.context_table import FEATURES, asked
from tests.parallel.ranks import Rank, Ranks
from tests.parallel.steps import alike, by_ranks, error_of, graphed, same, says
from tests.recipes import region

MODES = ("p2p", "all_gather", "a2a", "a2a+p2p")
HEADS, GROUPS, WIDTH, CHUNK, BATCH = 8, 4, 32, 8, 2
#: Of the largest element: float32 on the CPU, bfloat16 on a GPU.
NEAR = {"cpu": 2e-6, "cuda": 2e-2}


def groups_of(rank: Rank, mode: str) -> Any:
    """The group, or the two of a2a+p2p: neighbours exchange heads."""
    if mode != "a2a+p2p":
        return dist.group.WORLD
    inner = [dist.new_group([2 * i, 2 * i + 1]) for i in range(rank.world // 2)]
    outer = [dist.new_group(list(range(i, rank.world, 2))) for i in range(2)]
    return [inner[rank.number // 2], outer[rank.number % 2]]


def part(t: torch.Tensor, rank: Rank, dim: int) -> torch.Tensor:
    """This rank's chunks of dense sequences."""
    chunks = t.chunk(2 * rank.world, dim)
    return torch.cat((chunks[rank.number], chunks[2 * rank.world - 1 - rank.number]), dim)


def packed_part(t: torch.Tensor, rank: Rank, padded: Sequence[int]) -> torch.Tensor:
    """This rank's chunks of packed sequences."""
    return torch.cat([part(t[a:b], rank, 0) for a, b in zip(padded, padded[1:], strict=False)])


def drawn(rank: Rank, *shape: int) -> torch.Tensor:
    dtype = torch.float32 if rank.device == "cpu" else torch.bfloat16
    return torch.randn(shape, dtype=dtype, device=rank.device)


def apart(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """The largest difference, as a share of the largest element."""
    pairs = zip(found, wanted, strict=True)
    return max(((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-9)).item() for a, b in pairs)


def attention(**options: Any) -> Any:
    """An attention with random offsets, if it has any."""
    module = te.DotProductAttention(HEADS, WIDTH, **{"num_gqa_groups": GROUPS, **options})
    if module.softmax_type == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(torch.linspace(-2, 4, HEADS))
    return module


def pair_of(rank: Rank, mode: str, ranks: Any = None, stream: Any = None, **options: Any) -> tuple[Any, Any]:
    """An attention of whole sequences, and one of parts of them."""
    one, spread = (attention(**options) for _ in range(2))
    spread.set_context_parallel_group(groups_of(rank, mode), ranks, stream, mode)
    return one, spread


def dense(rank: Rank, mode: str, form: str, times: int, stream: Any = None) -> None:
    """A rank's output and gradients are those of whole sequences; `times` are calls of one module."""
    torch.manual_seed(0)
    tokens, dim = 2 * CHUNK * rank.world, form.index("s")
    lead = (BATCH, tokens) if form == "bshd" else (tokens, BATCH)
    whole = [drawn(rank, *lead, n, WIDTH).requires_grad_() for n in (HEADS, GROUPS, GROUPS)]
    dy = drawn(rank, *lead, HEADS * WIDTH)
    one, spread = pair_of(rank, mode, range(rank.world), stream, qkv_format=form, attn_mask_type="causal")
    expected = one(*whole)
    expected.backward(dy)
    wanted = [part(t, rank, dim) for t in (expected.detach(), *[t.grad for t in whole])]
    for _ in range(times):
        own = [part(t.detach(), rank, dim).requires_grad_() for t in whole]
        out = spread(*own)
        out.backward(part(dy, rank, dim))
        assert apart((out, *[t.grad for t in own]), wanted) < NEAR[rank.device]


in_each_mode = pytest.mark.parametrize("mode", MODES)


def skip_two_ranks(rank: Rank, mode: str) -> bool:
    """a2a+p2p takes two groups of two ranks."""
    return mode == "a2a+p2p" and rank.world < 4


@in_each_mode
@pytest.mark.four_ranks(mode="p2p")
@pytest.mark.four_ranks(mode="a2a+p2p")
@by_ranks()
def test_dense_sequences(rank: Rank, mode: str) -> None:
    """In both forms, and replayed. (Masks, windows, sinks: test_the_table_of_the_docs.)"""
    for form in ("sbhd", "bshd") if not skip_two_ranks(rank, mode) else ():
        dense(rank, mode, form, 2)


@by_ranks()
def test_steps_on_two_streams(rank: Rank) -> None:
    """The same where neighbouring steps of a ring have two streams, of which the caller's is one."""
    own = SimpleNamespace(cuda_stream=rank.number + 1)  # on a CPU nobody looks there
    stream = torch.cuda.Stream() if rank.device == "cuda" else own
    with patch.object(ring, "two_streams", lambda *_: True):
        for form in ("sbhd", "bshd"):
            dense(rank, "p2p", form, 4, stream)


@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
@in_each_mode
@pytest.mark.four_ranks(mode="p2p")
@pytest.mark.four_ranks(mode="a2a+p2p")
@by_ranks()
def test_packed_sequences(rank: Rank, mode: str, mask: str) -> None:
    """The same of packed sequences, some of whose slots are not full; NaN stands in padding on the CPU."""
    if skip_two_ranks(rank, mode):
        return
    torch.manual_seed(0)
    size = 2 * rank.world
    lengths, slots = [3 * size - 1, 0, 1, 2 * size], [3 * size, size, size, 2 * size]
    sums, padded = ([0, *torch.tensor(n).cumsum(0).tolist()] for n in (lengths, slots))
    real = torch.cat([torch.arange(n) < length for n, length in zip(slots, lengths, strict=True)]).to(rank.device)
    whole = [drawn(rank, padded[-1], n, WIDTH) for n in (HEADS, GROUPS, GROUPS)]
    for t in whole:
        t[~real] = float("nan") if rank.device == "cpu" else 1e4
        t.requires_grad_()
    dy = drawn(rank, padded[-1], HEADS * WIDTH)
    cu, cu_padded = (torch.tensor(n, dtype=torch.int32, device=rank.device) for n in (sums, padded))
    where = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "cu_seqlens_q_padded": cu_padded}
    where |= {"cu_seqlens_kv_padded": cu_padded, "max_seqlen_q": max(slots), "max_seqlen_kv": max(slots)}
    one, spread = pair_of(rank, mode, qkv_format="thd", attn_mask_type=mask)
    expected = one(*whole, **where)
    expected.backward(dy)
    wanted = [packed_part(t, rank, padded) for t in (expected.detach(), *[t.grad for t in whole])]
    for _ in range(2):
        own = [packed_part(t.detach(), rank, padded).requires_grad_() for t in whole]
        out = spread(*own, **where)
        out.backward(packed_part(dy, rank, padded))
        assert apart((out, *[t.grad for t in own]), wanted) < NEAR[rank.device]


# ------------------------------------------------------------------------------------------------ a whole layer


@in_each_mode
@pytest.mark.four_ranks(mode="a2a+p2p")
@by_ranks()
def test_a_layer(rank: Rank, mode: str) -> None:
    """With rotary embeddings: positions, heads and gradients of weights; from the third call on nothing
    is interpreted."""
    if skip_two_ranks(rank, mode):
        return
    torch.manual_seed(0)
    tokens, hidden = 2 * CHUNK * rank.world, HEADS * WIDTH
    dtype = torch.float32 if rank.device == "cpu" else torch.bfloat16
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
    options |= {"num_gqa_groups": GROUPS, "params_dtype": dtype, "device": rank.device}
    one = te.TransformerLayer(hidden, 2 * hidden, HEADS, **options)
    spread = te.TransformerLayer(hidden, 2 * hidden, HEADS, **options)
    spread.load_state_dict(one.state_dict())
    spread.set_context_parallel_group(groups_of(rank, mode), list(range(rank.world)), None, mode)
    angles = te.RotaryPositionEmbedding(WIDTH)(tokens).to(rank.device)
    x, dy = drawn(rank, tokens, BATCH, hidden).requires_grad_(), drawn(rank, tokens, BATCH, hidden)
    own = part(x.detach(), rank, 0).requires_grad_()
    for _ in range(3):
        x.grad = own.grad = None
        one.zero_grad(), spread.zero_grad()
        y, found = one(x, rotary_pos_emb=angles), spread(own, rotary_pos_emb=angles)
        y.backward(dy)
        found.backward(part(dy, rank, 0))
    grads = [p.grad.float() for p in spread.parameters()]
    for g in grads:
        dist.all_reduce(g)
    wanted = [part(y, rank, 0), part(x.grad, rank, 0), *[p.grad for p in one.parameters()]]
    assert apart((found, own.grad, *grads), wanted) < 20 * NEAR[rank.device]
    before = taped.COUNTS.interpreted.total()
    spread(own, rotary_pos_emb=angles).backward(part(dy, rank, 0))
    assert taped.COUNTS.interpreted.total() == before


@pytest.mark.parametrize(("mode", "recipe"), [("p2p", None), ("p2p", "delayed"), ("all_gather", None), ("a2a", None)])
@by_ranks("two")
def test_a_captured_layer(rank: Rank, mode: str, recipe: str | None) -> None:
    """Transfers are part of the graph, and its steps have the bits of eager ones."""
    torch.manual_seed(0)
    tokens, hidden = 2 * CHUNK, HEADS * WIDTH
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
    options |= {"num_gqa_groups": GROUPS, "params_dtype": drawn(rank, 1).dtype, "device": rank.device}
    eager = te.TransformerLayer(hidden, 2 * hidden, HEADS, **options)
    eager.set_context_parallel_group(dist.group.WORLD, cp_comm_type=mode)
    layer = copy.deepcopy(eager)
    inputs = [drawn(rank, tokens, BATCH, hidden) for _ in range(4)]
    sample = drawn(rank, tokens, BATCH, hidden).requires_grad_()
    with region(recipe):  # ranks meet before the capture
        layer(sample), eager(sample)
    layer.load_state_dict(eager.state_dict())
    call = graphed(layer, rank, (sample,), recipe)
    eager.load_state_dict(layer.state_dict())
    for x in inputs:
        results = []
        for module, run in ((eager, eager), (layer, call)):
            own = x.clone().requires_grad_()
            module.zero_grad()
            with region(recipe):
                y = run(own)
            y.backward(torch.ones_like(y))
            results.append((y.detach(), own.grad, *[p.grad for p in module.parameters()]))
        assert same(*results)
    call.reset()  # NCCL would wait for the graph as the group ends


@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling])
@pytest.mark.parametrize("mode", ["p2p", "all_gather", "a2a"])
@by_ranks("two")
def test_low_precision(rank: Rank, mode: str, recipe: type) -> None:
    """Attention in FP8 beside that of whole sequences: within what FP8 itself rounds, and under the same scales."""
    if rank.device == "cuda" and recipe is Float8CurrentScaling:
        return  # cuDNN has it on Blackwell alone
    torch.manual_seed(0)
    tokens, width = 4 * CHUNK * rank.world, 128 if rank.device == "cuda" else WIDTH
    whole = [drawn(rank, tokens, BATCH, n, width).requires_grad_() for n in (HEADS, GROUPS, GROUPS)]
    dy = drawn(rank, tokens, BATCH, HEADS * width)
    one, spread = (te.DotProductAttention(HEADS, width, GROUPS, attn_mask_type="causal") for _ in range(2))
    spread.set_context_parallel_group(dist.group.WORLD, cp_comm_type=mode)
    own = [part(t.detach(), rank, 0).requires_grad_() for t in whole]
    for _ in range(4):
        for t in (*whole, *own):
            t.grad = None
        with te.autocast(recipe=recipe(fp8_dpa=True)):
            expected = one(*whole)
        expected.backward(dy)
        with te.autocast(recipe=recipe(fp8_dpa=True)):
            found = spread(*own)
        found.backward(part(dy, rank, 0))
    pairs = zip((found, *[t.grad for t in own]), (expected, *[t.grad for t in whole]), strict=True)
    far = [((a.float() - part(b, rank, 0).float()).norm() / part(b, rank, 0).float().norm()).item() for a, b in pairs]
    assert alike((spread.fp8_state.scale_fwd, spread.fp8_state.scale_bwd)) and max(far) < 0.12, far


@by_ranks("pair")
def test_scales_of_one_rank_are_refused(rank: Rank) -> None:
    q, k = drawn(rank, 4, BATCH, HEADS, WIDTH), drawn(rank, 4, BATCH, GROUPS, WIDTH)
    module = attention(cp_group=dist.group.WORLD)
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True, reduce_amax=False)):
        said = error_of(lambda: module(q, k, k), ArgumentError)
    says(said, "reduce_amax=True", "leave reduce_amax out")


# ------------------------------------------------------------------------------------------------ other options


@by_ranks("two")
def test_other_options(rank: Rank) -> None:
    """The largest logits; the attention computed again in backward, by us and by a checkpoint; grouped by compilers."""
    torch.manual_seed(0)
    tokens = 2 * CHUNK * rank.world
    whole = [drawn(rank, tokens, BATCH, n, WIDTH).requires_grad_() for n in (HEADS, GROUPS, GROUPS)]
    dy = drawn(rank, tokens, BATCH, HEADS * WIDTH)
    one, spread = pair_of(rank, "p2p", attn_mask_type="causal", return_max_logit=True)
    plain = attention(attn_mask_type="causal", cp_group=dist.group.WORLD)
    expected, logits = one(*whole)
    expected.backward(dy)
    wanted = [part(t, rank, 0) for t in (expected.detach(), *[t.grad for t in whole])]

    assert apart([spread(*[part(t.detach(), rank, 0) for t in whole])[1]], [logits]) < NEAR[rank.device]
    for call in (
        lambda *qkv: plain(*qkv, checkpoint_core_attention=True),
        lambda *qkv: te.checkpoint(plain, *qkv, use_reentrant=False),
        torch.compile(plain, backend="eager"),
    ):
        own = [part(t.detach(), rank, 0).requires_grad_() for t in whole]
        out = call(*own)
        out.backward(part(dy, rank, 0))
        assert apart((out, *[t.grad for t in own]), wanted) < NEAR[rank.device]


def dropped(rank: Rank, mode: str) -> tuple[list[Any], bool]:
    """The masks that dropout drew for this rank's rows, read out with v = identity; whether a second run drew anew."""
    torch.manual_seed(0)
    tokens = 2 * CHUNK * rank.world
    q = torch.zeros(tokens // rank.world, 1, HEADS, tokens, device=rank.device)
    v = torch.eye(tokens, device=rank.device).view(tokens, 1, 1, tokens).expand(-1, -1, HEADS, -1)
    if rank.device == "cuda":
        q, v = q.bfloat16(), v.bfloat16()
    own = part(v, rank, 0).contiguous()
    module = te.DotProductAttention(HEADS, tokens, attention_dropout=0.5, attn_mask_type="no_mask")
    module.set_context_parallel_group(dist.group.WORLD, cp_comm_type=mode)
    q.requires_grad_(), own.requires_grad_()
    out = module(q, torch.zeros_like(q), own)
    out.backward(torch.ones_like(out))
    seen = out.detach().view(-1, HEADS, tokens) > 0  # [query, head, key]
    dv = own.grad.float().sum(-1)[:, 0]  # [key, head]: the rows of all ranks that keep this key, times the weight
    kept = seen.sum(0).T.float()  # [key, head] of this rank's rows
    dist.all_reduce(kept)
    backward = torch.allclose(dv / (2 / tokens) / tokens, part(kept, rank, 0), rtol=1e-2)
    again = module(q, torch.zeros_like(q), own).detach().view(-1, HEADS, tokens) > 0
    return [seen.cpu(), backward], not torch.equal(seen, again)


@pytest.mark.parametrize("mode", ["p2p", "all_gather", "a2a"])
def test_dropout(gloo_ranks: Ranks, mode: str) -> None:
    """Backward drops what forward dropped; no two ranks, heads or calls drop the same; about a half is dropped."""
    found = gloo_ranks.run(dropped, mode)
    masks = [seen[:, head] for (seen, _), _ in found for head in range(HEADS)]
    assert all(backward and anew for (_, backward), anew in found)
    assert abs(torch.stack(masks).float().mean() - 0.5) < 0.02
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    rows = torch.stack(masks).flatten(0, 1)
    assert len(rows.unique(dim=0)) == len(rows)


@by_ranks("pair")
def test_explain_says_the_schedule(rank: Rank) -> None:
    text = str(
        attention(cp_group=dist.group.WORLD).explain(
            *[drawn(rank, 8, BATCH, n, WIDTH) for n in (HEADS, GROUPS, GROUPS)]
        )
    )
    says(text, "chosen: FusedAttention", "context parallelism needs statistics")
    ring = r"p2p over 2 ranks, rank \d.*step 1: keys of rank \d.*send_recv of k and v: 16384 bytes"
    assert re.search(ring, text, re.S)


@pytest.mark.four_ranks
@by_ranks("four")
def test_with_tensor_parallelism(rank: Rank) -> None:
    """Tensor parallelism of neighbours, context parallelism across."""
    torch.manual_seed(0)
    tensor = [dist.new_group([2 * i, 2 * i + 1]) for i in range(2)][rank.number // 2]
    context = [dist.new_group([i, i + 2]) for i in range(2)][rank.number % 2]
    tokens, hidden = 2 * CHUNK * 2, HEADS * WIDTH
    options: dict[str, Any] = {"attention_dropout": 0.0, "attn_mask_type": "causal", "bias": False}
    options |= {"device": rank.device, "params_dtype": drawn(rank, 1).dtype, "fuse_qkv_params": False}
    one = te.MultiheadAttention(hidden, HEADS, **options)
    spread = te.MultiheadAttention(hidden, HEADS, set_parallel_mode=True, tp_group=tensor, **options)
    spread.set_context_parallel_group(context)
    values = dict(one.named_parameters())
    with torch.no_grad():
        for name, p in spread.named_parameters():
            p.copy_(values[name].chunk(2, p.partition_dim)[rank.number % 2])
    x, dy = drawn(rank, tokens, BATCH, hidden).requires_grad_(), drawn(rank, tokens, BATCH, hidden)
    where = Rank(rank.number // 2, 2, rank.device)
    own = part(x.detach(), where, 0).requires_grad_()
    y, found = one(x), spread(own)
    y.backward(dy), found.backward(part(dy, where, 0))
    assert apart((found, own.grad), (part(y, where, 0), part(x.grad, where, 0))) < 10 * NEAR[rank.device]


# ------------------------------------------------------------------------------------------------ what is refused


@by_ranks("pair")
def test_what_is_refused(rank: Rank) -> None:
    torch.manual_seed(0)
    q, k = drawn(rank, 4, BATCH, HEADS, WIDTH), drawn(rank, 4, BATCH, GROUPS, WIDTH)
    world = dist.group.WORLD
    cu = torch.tensor([0, 6, 12], dtype=torch.int32, device=rank.device)
    mask = torch.zeros(BATCH, 1, 1, 4, dtype=torch.bool, device=rank.device)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 8, "max_seqlen_kv": 8}
    flat = [t.flatten(0, 1)[:6] for t in (q, k, k)]

    def spread(mode: str = "p2p", group: Any = world, **options: Any) -> Any:
        return attention(cp_group=group, cp_comm_type=mode, **options)

    own_only = "a list of two groups.*own tokens only"
    calls: list[tuple[Any, str]] = [
        (lambda: spread("ring"), "cp_comm_type='ring'.*'p2p', 'all_gather', 'a2a' or 'a2a.p2p'"),
        (lambda: spread("p2p", [world, world]), "a list of 2 groups with cp_comm_type='p2p'"),
        (lambda: spread().set_context_parallel_group(world, [5, 6]), r"cp_global_ranks=\[5, 6\]"),
        *[(lambda g=g: spread("a2a+p2p", g)(q, k, k), own_only) for g in (None, world, [world, None])],
        (lambda: spread()(q[:3], k[:3], k[:3]), "3 tokens on this rank.*an even number"),
        (lambda: spread("a2a")(q[:, :, :3], k[:, :, :3], k[:, :, :3]), "heads"),
        (lambda: spread(window_size=(2, 0))(q, k, k), "window_size=.*windows with all_gather or a2a"),
        (lambda: spread(attn_mask_type="causal_bottom_right")(q, k, k), "bottom-right.*use causal or padding_causal"),
        (lambda: spread(attn_mask_type="padding")(q, k, k, mask), "attention_mask.*cu_seqlens of the whole sequences"),
        (lambda: spread()(q, k[:2], k[:2]), "4 queries and 2 keys"),
        (lambda: spread(qkv_format="thd", attn_mask_type="padding_causal")(*flat, **lengths), "multiples of 4"),
        (lambda: pickle.loads(pickle.dumps(spread()))(q, k, k), "pickled with context groups of 2 ranks"),
        (lambda: spread()(q, k, k, core_attention_bias_type="alibi"), "ALiBi"),
    ]
    for call, wanted in calls:
        said = error_of(call, (ArgumentError, UnsupportedError, ValueError))  # type: ignore[arg-type]
        assert re.search(wanted, said, re.DOTALL), (wanted, said)


@pytest.mark.parametrize(
    ("name", "values"),
    [("cp_comm_type", ("p2p", "all_gather")), ("attn_mask_type", ("causal", "no_mask")), ("softmax_scale", (0.1, 0.2))],
)
@by_ranks("pair")
def test_ranks_that_run_something_else_are_told(rank: Rank, name: str, values: tuple[Any, Any]) -> None:
    """Before they exchange anything, on every rank, with what each has."""
    module = attention(cp_group=dist.group.WORLD, **{"attn_mask_type": "causal", name: values[rank.number]})
    tensors = [drawn(rank, 8, BATCH, n, WIDTH) for n in (HEADS, GROUPS, GROUPS)]
    says(error_of(lambda: module(*tensors)), "ArgumentError: context parallelism", "ranks")


#: By feature of the table: options of the module, and of its forward besides lengths.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no mask": ({}, {}),
    "causal": ({"attn_mask_type": "causal"}, {}),
    "padding, dense": ({"attn_mask_type": "padding"}, {}),
    "padding, causal, dense": ({"attn_mask_type": "padding_causal"}, {}),
    "packed (thd)": ({"attn_mask_type": "padding", "qkv_format": "thd"}, {}),
    "packed (thd), causal": ({"attn_mask_type": "padding_causal", "qkv_format": "thd"}, {}),
    "window, causal": ({"attn_mask_type": "causal", "window_size": (4, 0)}, {}),
    "window, causal, packed": ({"attn_mask_type": "padding_causal", "qkv_format": "thd", "window_size": (4, 0)}, {}),
    "window, both sides": ({"window_size": (4, 4)}, {}),
    "window, both sides, packed": ({"attn_mask_type": "padding", "qkv_format": "thd", "window_size": (4, 4)}, {}),
    "window, causal, dropout": ({"attn_mask_type": "causal", "window_size": (4, 0), "attention_dropout": 0.1}, {}),
    "diagonal bottom-right": ({"attn_mask_type": "causal_bottom_right"}, {}),
    "attention_mask": ({"attn_mask_type": "arbitrary"}, {"attention_mask": torch.zeros(1, 1, 8, 8, dtype=torch.bool)}),
    "cross attention": ({"attention_type": "cross"}, {}),
    "cross attention, causal": ({"attention_type": "cross", "attn_mask_type": "causal"}, {}),
    "bias": ({}, {"core_attention_bias_type": "post_scale_bias"}),
    "ALiBi": ({"attn_mask_type": "causal"}, {"core_attention_bias_type": "alibi"}),
    "softmax off-by-one": ({"attn_mask_type": "causal", "softmax_type": "off-by-one"}, {}),
    "softmax learnable": ({"attn_mask_type": "causal", "softmax_type": "learnable"}, {}),
    "dropout": ({"attn_mask_type": "causal", "attention_dropout": 0.1}, {}),
    "return_max_logit": ({"attn_mask_type": "causal", "return_max_logit": True}, {}),
    "soft-cap": ({"attn_mask_type": "causal", "logit_softcap": 20.0}, {}),
    "GQA, more ranks than groups": ({"attn_mask_type": "causal", "num_gqa_groups": 1}, {}),
}


def cell(rank: Rank, mode: str, group: Any, feature: str) -> tuple[str, float]:
    """(the refusal, or how far the output and the gradients are from those of whole sequences)."""
    torch.manual_seed(0)
    static, options = OPTIONS[feature]
    static = {"attn_mask_type": "no_mask", "num_gqa_groups": GROUPS, **static}
    options = {k: v.to(rank.device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    tokens, keys = 8 * rank.world, (4 if "cross" in feature else 8) * rank.world
    lead = ((n,) if static.get("qkv_format") == "thd" else (n, BATCH) for n in (tokens, keys, keys))
    shapes = [(*a, n, WIDTH) for a, n in zip(lead, (HEADS, *(static["num_gqa_groups"],) * 2), strict=True)]
    if "padding" in static["attn_mask_type"]:
        packed = static.get("qkv_format") == "thd"
        sums = [0, 3, 5] if not packed else [0, tokens // 2, tokens]
        cu = torch.tensor(sums, dtype=torch.int32, device=rank.device)
        options = {**options, "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        options |= {"max_seqlen_q": tokens, "max_seqlen_kv": tokens} if packed else {}
        cut = (lambda t: packed_part(t, rank, sums)) if packed else (lambda t: part(t, rank, 0))
    else:
        cut = lambda t: part(t, rank, 0)  # noqa: E731  a choice of two
    whole = [drawn(rank, *shape).requires_grad_() for shape in shapes]
    more, own_more = {}, {}
    if feature == "bias":  # of this rank's queries, for all keys
        more = {"core_attention_bias": drawn(rank, 1, HEADS, tokens, tokens)}
        own_more = {"core_attention_bias": part(more["core_attention_bias"], rank, 2)}
    one, spread = (attention(**static) for _ in range(2))
    try:
        spread.set_context_parallel_group(group, cp_comm_type=mode)
        own = [cut(t.detach()).requires_grad_() for t in whole]
        found = spread(*own, **options, **own_more)
    except (ArgumentError, UnsupportedError) as error:
        return str(error), 0.0
    wanted = one(*whole, **options, **more)
    outs = [t[0] if isinstance(t, tuple) else t for t in (found, wanted)]
    (outs[0].square().sum() / 8).backward(), (outs[1].square().sum() / 8).backward()
    results = [(outs[0], *[t.grad for t in own]), (cut(outs[1]), *[cut(t.grad) for t in whole])]  # type: ignore[arg-type]
    if spread.softmax_type == "learnable":
        dist.all_reduce(spread.softmax_offset.grad)
        results = [(*of, module.softmax_offset.grad) for of, module in zip(results, (spread, one), strict=True)]
    return "", apart(*results)


@in_each_mode
@pytest.mark.four_ranks(mode="a2a+p2p")
@by_ranks()
def test_the_table_of_the_docs(rank: Rank, mode: str) -> None:
    """What it says yes to computes what whole sequences do, and what it says no to is refused with these words."""
    if skip_two_ranks(rank, mode):
        return
    assert OPTIONS.keys() == FEATURES.keys()
    group = groups_of(rank, mode)
    for feature in FEATURES:
        error, far = cell(rank, mode, group, feature)
        said = asked(mode, feature)
        if rank.device == "cuda" and said is None and "No dot product attention backend" in error:
            continue  # the rules of sequences take it, but not cuDNN on this device
        assert ("" if said is None else said.do) in error and bool(error) is (said is not None), (feature, error)
        assert "dropout" in feature or far < 4 * NEAR[rank.device], (feature, far)
