"""Context parallelism by the modules: every rank has a part of each sequence, and gets what one process computes."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

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
from tests.parallel.test_graphed_spread import graphed
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
    module = te.DotProductAttention(HEADS, WIDTH, GROUPS, **options)
    if module.softmax_type == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(torch.linspace(-2, 4, HEADS))
    return module


def dense(rank: Rank, mode: str, form: str, times: int, options: dict[str, Any], stream: Any = None) -> float:
    """How far a rank's output and gradients are from those of whole sequences; `times` are calls of one module."""
    torch.manual_seed(0)
    tokens, dim = 2 * CHUNK * rank.world, form.index("s")
    lead = (BATCH, tokens) if form == "bshd" else (tokens, BATCH)
    whole = [drawn(rank, *lead, n, WIDTH).requires_grad_() for n in (HEADS, GROUPS, GROUPS)]
    dy = drawn(rank, *lead, HEADS * WIDTH)
    one, spread = (attention(qkv_format=form, **options) for _ in range(2))
    spread.set_context_parallel_group(groups_of(rank, mode), range(rank.world), stream, mode)
    one(*whole).backward(dy)
    wanted = [part(t.grad, rank, dim) for t in whole]
    expected = part(one(*whole).detach(), rank, dim)
    far = 0.0
    for _ in range(times):
        own = [part(t.detach(), rank, dim).requires_grad_() for t in whole]
        spread.zero_grad()
        out = spread(*own)
        out.backward(part(dy, rank, dim))
        far = max(far, apart((out, *[t.grad for t in own]), (expected, *wanted)))
        if spread.softmax_type == "learnable":
            summed = spread.softmax_offset.grad.clone()
            dist.all_reduce(summed)
            far = max(far, apart([summed], [one.softmax_offset.grad]))
    return far


#: What each mode takes besides: masks, windows, sinks.
KINDS: dict[str, dict[str, Any]] = {
    "causal": {"attn_mask_type": "causal"},
    "full": {"attn_mask_type": "no_mask"},
    "window": {"attn_mask_type": "causal", "window_size": (11, 0)},
    "sink": {"attn_mask_type": "causal", "softmax_type": "learnable"},
    "off by one": {"attn_mask_type": "no_mask", "softmax_type": "off-by-one"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.four_ranks(mode="p2p")
@pytest.mark.four_ranks(mode="a2a+p2p")
def test_dense_sequences(ranks: Ranks, mode: str, kind: str) -> None:
    if mode == "a2a+p2p" and ranks.world < 4:
        pytest.skip("a2a+p2p takes two groups of two ranks")
    if kind == "window" and mode in ("p2p", "a2a+p2p"):
        pytest.skip("a window goes with all_gather and a2a")
    for form in ("sbhd", "bshd"):
        assert max(ranks.run(dense, mode, form, 2, KINDS[kind])) < NEAR[ranks.device]


def by_turns(rank: Rank) -> float:
    """The same where neighbouring steps of a ring have two streams, of which the caller's is one."""
    chosen, ring.two_streams = ring.two_streams, lambda *_: True
    try:
        own = SimpleNamespace(cuda_stream=rank.number + 1)  # on a CPU nobody looks there
        stream = torch.cuda.Stream() if rank.device == "cuda" else own
        return max(dense(rank, "p2p", form, 4, KINDS["causal"], stream) for form in ("sbhd", "bshd"))
    finally:
        ring.two_streams = chosen


def test_steps_on_two_streams(ranks: Ranks) -> None:
    assert max(ranks.run(by_turns)) < NEAR[ranks.device]


def packed(rank: Rank, mode: str, mask: str) -> float:
    """The same of packed sequences, some of whose slots are not full; NaN stands in padding on the CPU."""
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
    one, spread = (attention(qkv_format="thd", attn_mask_type=mask) for _ in range(2))
    spread.set_context_parallel_group(groups_of(rank, mode), None, None, mode)
    expected = one(*whole, **where)
    expected.backward(dy)
    found: list[float] = []
    for _ in range(2):
        own = [packed_part(t.detach(), rank, padded).requires_grad_() for t in whole]
        out = spread(*own, **where)
        out.backward(packed_part(dy, rank, padded))
        wanted = [packed_part(t, rank, padded) for t in (expected.detach(), *[t.grad for t in whole])]
        found.append(apart((out, *[t.grad for t in own]), wanted))
    return max(found)


@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.four_ranks(mode="p2p")
@pytest.mark.four_ranks(mode="a2a+p2p")
def test_packed_sequences(ranks: Ranks, mode: str, mask: str) -> None:
    if mode == "a2a+p2p" and ranks.world < 4:
        pytest.skip("a2a+p2p takes two groups of two ranks")
    assert max(ranks.run(packed, mode, mask)) < NEAR[ranks.device]


# ------------------------------------------------------------------------------------------------ a whole layer


def layer(rank: Rank, mode: str, recipe: str | None) -> tuple[float, list[Any]]:
    """A TransformerLayer with rotary embeddings: how far it is from the whole one; whether its calls are replayed."""
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
        with region(recipe):
            y, found = one(x, rotary_pos_emb=angles), spread(own, rotary_pos_emb=angles)
        y.backward(dy)
        found.backward(part(dy, rank, 0))
    grads = [p.grad.float() for p in spread.parameters()]
    for g in grads:
        dist.all_reduce(g)
    wanted = [part(y, rank, 0), part(x.grad, rank, 0), *[p.grad for p in one.parameters()]]
    far = apart((found, own.grad, *grads), wanted)
    before = taped.COUNTS.interpreted.total()
    with region(recipe):
        spread(own, rotary_pos_emb=angles).backward(part(dy, rank, 0))
    return far, [taped.COUNTS.interpreted.total() - before]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.four_ranks(mode="a2a+p2p")
def test_a_layer(ranks: Ranks, mode: str) -> None:
    """Positions, heads and gradients of weights; from the third call on nothing is interpreted."""
    if mode == "a2a+p2p" and ranks.world < 4:
        pytest.skip("a2a+p2p takes two groups of two ranks")
    for far, interpreted in ranks.run(layer, mode, None):
        assert far < 20 * NEAR[ranks.device]
        assert interpreted == [0]


def captured(rank: Rank, mode: str, recipe: str | None) -> list[str]:
    """What differs between steps of a layer's graph and eager ones."""
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
    found = []
    for x in inputs:
        results = []
        for module, run in ((eager, eager), (layer, call)):
            own = x.clone().requires_grad_()
            module.zero_grad()
            with region(recipe):
                y = run(own)
            y.backward(torch.ones_like(y))
            results.append((y.detach(), own.grad, *[p.grad for p in module.parameters()]))
        found += [f"result {i}" for i, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)]
    call.reset()  # NCCL would wait for the graph as the group ends
    return found


@pytest.mark.parametrize(("mode", "recipe"), [("p2p", None), ("p2p", "delayed"), ("all_gather", None), ("a2a", None)])
def test_a_captured_layer(two: Ranks, mode: str, recipe: str | None) -> None:
    """Transfers are part of the graph, and its steps have the bits of eager ones."""
    assert two.run(captured, mode, recipe) == [[], []]


def low(rank: Rank, mode: str, name: str) -> list[float]:
    """Attention in FP8 beside that of whole sequences: differences as shares of root mean squares; equal scales."""
    torch.manual_seed(0)
    tokens, width = 4 * CHUNK * rank.world, 128 if rank.device == "cuda" else WIDTH
    make = {"delayed": DelayedScaling, "current": Float8CurrentScaling}[name]
    recipe = make(fp8_dpa=True)
    whole = [drawn(rank, tokens, BATCH, n, width).requires_grad_() for n in (HEADS, GROUPS, GROUPS)]
    dy = drawn(rank, tokens, BATCH, HEADS * width)
    one, spread = (te.DotProductAttention(HEADS, width, GROUPS, attn_mask_type="causal") for _ in range(2))
    spread.set_context_parallel_group(dist.group.WORLD, cp_comm_type=mode)
    own = [part(t.detach(), rank, 0).requires_grad_() for t in whole]
    for _ in range(4):
        for t in (*whole, *own):
            t.grad = None
        with te.autocast(recipe=recipe):
            expected = one(*whole)
        expected.backward(dy)
        with te.autocast(recipe=recipe):
            found = spread(*own)
        found.backward(part(dy, rank, 0))
    pairs = zip((found, *[t.grad for t in own]), (expected, *[t.grad for t in whole]), strict=True)
    far = [((a.float() - part(b, rank, 0).float()).norm() / part(b, rank, 0).float().norm()).item() for a, b in pairs]
    state = torch.cat([t.flatten() for t in (spread.fp8_state.scale_fwd, spread.fp8_state.scale_bwd)])
    least, most = state.clone(), state.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN), dist.all_reduce(most, dist.ReduceOp.MAX)
    assert torch.equal(least, most), "ranks have other scales"
    return far


@pytest.mark.parametrize("mode", ["p2p", "all_gather", "a2a"])
def test_low_precision(two: Ranks, mode: str) -> None:
    """Within what FP8 itself rounds, and under the same scales on all ranks."""
    for far in two.run(low, mode, "delayed"):
        assert max(far) < 0.12, far


@pytest.mark.parametrize("mode", ["p2p", "all_gather", "a2a"])
def test_current_scaling(pair: Ranks, mode: str) -> None:
    """The same of a recipe that cuDNN has on Blackwell alone."""
    for far in pair.run(low, mode, "current"):
        assert max(far) < 0.12, far


def without_reduction(rank: Rank) -> str:
    q, k = drawn(rank, 4, BATCH, HEADS, WIDTH), drawn(rank, 4, BATCH, GROUPS, WIDTH)
    module = attention(cp_group=dist.group.WORLD)
    try:
        with te.autocast(recipe=DelayedScaling(fp8_dpa=True, reduce_amax=False)):
            module(q, k, k)
    except ArgumentError as error:
        return str(error)
    return ""


def test_scales_of_one_rank_are_refused(pair: Ranks) -> None:
    for said in pair.run(without_reduction):
        assert "reduce_amax=True" in said and "leave reduce_amax out" in said


# ------------------------------------------------------------------------------------------------ other options


def other_options(rank: Rank) -> dict[str, float]:
    """The largest logits; the attention computed again in backward, by us and by a checkpoint; grouped by compilers."""
    torch.manual_seed(0)
    tokens = 2 * CHUNK * rank.world
    whole = [drawn(rank, tokens, BATCH, n, WIDTH).requires_grad_() for n in (HEADS, GROUPS, GROUPS)]
    dy = drawn(rank, tokens, BATCH, HEADS * WIDTH)
    one, spread = (attention(attn_mask_type="causal", return_max_logit=True) for _ in range(2))
    spread.set_context_parallel_group(dist.group.WORLD)
    plain = attention(attn_mask_type="causal", cp_group=dist.group.WORLD)
    expected, logits = one(*whole)
    expected.backward(dy)
    wanted = [part(t, rank, 0) for t in (expected.detach(), *[t.grad for t in whole])]

    def stepped(call: Any) -> float:
        own = [part(t.detach(), rank, 0).requires_grad_() for t in whole]
        out = call(*own)
        out.backward(part(dy, rank, 0))
        return apart((out, *[t.grad for t in own]), wanted)

    found = {"logits": apart([spread(*[part(t.detach(), rank, 0) for t in whole])[1]], [logits])}
    found["again"] = stepped(lambda *qkv: plain(*qkv, checkpoint_core_attention=True))
    found["checkpoint"] = stepped(lambda *qkv: te.checkpoint(plain, *qkv, use_reentrant=False))
    found["compiled"] = stepped(torch.compile(plain, backend="eager"))
    return found


def test_other_options(two: Ranks) -> None:
    for found in two.run(other_options):
        assert max(found.values()) < NEAR[two.device], found


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


def explained(rank: Rank) -> str:
    tensors = [drawn(rank, 8, BATCH, n, WIDTH) for n in (HEADS, GROUPS, GROUPS)]
    return str(attention(cp_group=dist.group.WORLD).explain(*tensors))


def test_explain_says_the_schedule(pair: Ranks) -> None:
    for text in pair.run(explained):
        assert "chosen: FusedAttention" in text and "context parallelism needs statistics" in text
        assert re.search(
            r"p2p over 2 ranks, rank \d.*step 1: keys of rank \d.*send_recv of k and v: 16384 bytes", text, re.S
        )


def both_ways(rank: Rank) -> float:
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
    return apart((found, own.grad), (part(y, where, 0), part(x.grad, where, 0)))


@pytest.mark.four_ranks
def test_with_tensor_parallelism(ranks: Ranks) -> None:
    if ranks.world < 4:
        pytest.skip("two times two ranks")
    assert max(ranks.run(both_ways)) < 10 * NEAR[ranks.device]


# ------------------------------------------------------------------------------------------------ what is refused


def said(rank: Rank, number: int) -> str:
    """The error of one of these calls."""
    torch.manual_seed(0)
    q, k = drawn(rank, 4, BATCH, HEADS, WIDTH), drawn(rank, 4, BATCH, GROUPS, WIDTH)
    world = dist.group.WORLD
    cu = torch.tensor([0, 6, 12], dtype=torch.int32, device=rank.device)
    mask = torch.zeros(BATCH, 1, 1, 4, dtype=torch.bool, device=rank.device)
    packed_options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 8, "max_seqlen_kv": 8}

    def spread(mode: str = "p2p", group: Any = world, **options: Any) -> Any:
        return attention(cp_group=group, cp_comm_type=mode, **options)

    calls: list[Any] = [
        lambda: spread("ring"),
        lambda: spread("p2p", [world, world]),
        lambda: spread().set_context_parallel_group(world, [5, 6]),
        lambda: spread("a2a+p2p", None)(q, k, k),
        lambda: spread("a2a+p2p", world)(q, k, k),
        lambda: spread("a2a+p2p", [world, None])(q, k, k),
        lambda: spread()(q[:3], k[:3], k[:3]),
        lambda: spread("a2a")(q[:, :, :3], k[:, :, :3], k[:, :, :3]),
        lambda: spread(window_size=(2, 0))(q, k, k),
        lambda: spread(attn_mask_type="causal_bottom_right")(q, k, k),
        lambda: spread(attn_mask_type="padding")(q, k, k, mask),
        lambda: spread()(q, k[:2], k[:2]),
        lambda: spread(qkv_format="thd", attn_mask_type="padding_causal")(
            *(t.flatten(0, 1)[:6] for t in (q, k, k)), **packed_options
        ),
        lambda: pickle.loads(pickle.dumps(spread()))(q, k, k),
        lambda: spread()(q, k, k, core_attention_bias_type="alibi"),
    ]
    try:
        calls[number]()
    except (ArgumentError, UnsupportedError, ValueError) as error:
        return str(error)
    return "nothing was refused"


REFUSED = (
    "cp_comm_type='ring'.*'p2p', 'all_gather', 'a2a' or 'a2a.p2p'",
    "a list of 2 groups with cp_comm_type='p2p'",
    r"cp_global_ranks=\[5, 6\]",
    "a list of two groups.*own tokens only",
    "a list of two groups.*own tokens only",
    "a list of two groups.*own tokens only",
    "3 tokens on this rank.*an even number",
    "heads",
    "window_size=.*windows with all_gather or a2a",
    "bottom-right.*use causal or padding_causal",
    "attention_mask.*cu_seqlens of the whole sequences",
    "4 queries and 2 keys",
    "multiples of 4",
    "pickled with context groups of 2 ranks",
    "ALiBi",
)


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_refused(pair: Ranks, number: int) -> None:
    for text in pair.run(said, number):
        assert re.search(REFUSED[number], text), text


def differing(rank: Rank, name: str, *values: Any) -> str:
    """The error of ranks whose attention has other values of an option."""
    mode = values[rank.number] if name == "cp_comm_type" else "p2p"
    options = {"attn_mask_type": "causal"} if name == "cp_comm_type" else {name: values[rank.number]}
    module = attention(cp_group=dist.group.WORLD, cp_comm_type=mode, **options)
    tensors = [drawn(rank, 8, BATCH, n, WIDTH) for n in (HEADS, GROUPS, GROUPS)]
    try:
        module(*tensors)
    except ArgumentError as error:
        return str(error)
    return "nobody noticed"


@pytest.mark.parametrize(
    ("name", "values"),
    [("cp_comm_type", ("p2p", "all_gather")), ("attn_mask_type", ("causal", "no_mask")), ("softmax_scale", (0.1, 0.2))],
)
def test_ranks_that_run_something_else_are_told(pair: Ranks, name: str, values: tuple[Any, Any]) -> None:
    """Before they exchange anything, on every rank, with what each has."""
    for said in pair.run(differing, name, *values):
        assert said.startswith("context parallelism") and "ranks" in said, said


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


def cells(rank: Rank, mode: str) -> dict[str, tuple[str, float]]:
    group = groups_of(rank, mode)
    return {feature: cell(rank, mode, group, feature) for feature in FEATURES}


def cell(rank: Rank, mode: str, group: Any, feature: str) -> tuple[str, float]:
    """(the refusal, or how far the output and dV are from those of whole sequences)."""
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
    one, spread = (te.DotProductAttention(HEADS, WIDTH, **static) for _ in range(2))
    try:
        spread.set_context_parallel_group(group, cp_comm_type=mode)
        own = [cut(t.detach()).requires_grad_() for t in whole]
        found = spread(*own, **options, **own_more)
    except (ArgumentError, UnsupportedError) as error:
        return str(error), 0.0
    wanted = one(*whole, **options, **more)
    outs = [t[0] if isinstance(t, tuple) else t for t in (found, wanted)]
    (outs[0].square().sum() / 8).backward(), (outs[1].square().sum() / 8).backward()
    return "", apart((outs[0], own[2].grad), (cut(outs[1]), cut(whole[2].grad)))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.four_ranks(mode="a2a+p2p")
def test_the_table_of_the_docs(ranks: Ranks, mode: str) -> None:
    """What it says yes to computes what whole sequences do, and what it says no to is refused with these words."""
    if mode == "a2a+p2p" and ranks.world < 4:
        pytest.skip("a2a+p2p takes two groups of two ranks")
    assert OPTIONS.keys() == FEATURES.keys()
    for found in ranks.run(cells, mode):
        for feature, (error, far) in found.items():
            said = asked(mode, feature)
            if ranks.device == "cuda" and said is None and "No dot product attention backend" in error:
                continue  # the rules of sequences take it, but not cuDNN on this device
            assert ("" if said is None else said.do) in error and bool(error) is (said is not None), (feature, error)
            assert "dropout" in feature or far < NEAR[ranks.device], (feature, far)
