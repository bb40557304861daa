"""`InferenceParams` and its managers: what a layer's attention finds in the cache is what was put there, in order."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections import OrderedDict
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.nn.functional as F

from examples.generate import generate, generate_uncached, parse
from te_cli.gpt import GPT
from te_cli.settings import GPTConfig
from te_core.errors import ArgumentError, UnsupportedError
from te_torch.attention.dot_product import DotProductAttention
from te_torch.attention.inference import InferenceParams
from te_torch.attention.kv_cache import KVCacheManager, PagedKVCacheManager, _moves
from te_torch.attention.rope import RotaryPositionEmbedding
from te_torch.transformer.layer import TransformerLayer
from tests.backends import devices, requires_cuda
from tests.covering import covering

FORMS = ("sbhd", "bshd", "thd")
HEADS, D_K, D_V = 2, 8, 16
LAYERS = (1, 7)
ROWS, CAPACITY, PAGE = 4, 24, 4


def params(device, *, paged=False, form="bshd", dtype=torch.bfloat16, d_v=D_V, **more):
    pages = {"is_paged": True, "page_size": PAGE, "total_num_pages": ROWS * CAPACITY // PAGE} if paged else {}
    if form == "thd":
        more.setdefault("max_ctx_len", CAPACITY)
    return InferenceParams(
        ROWS, CAPACITY, HEADS, D_K, dtype, head_dim_v=d_v, qkv_format=form, device=device, **pages, **more
    )


def schedule(seed, steps=40):
    """Steps as a server makes them: sequences finish, others join, rows change places; {id: new tokens} each."""
    draw = random.Random(seed)
    live, fresh = {}, 0
    for _ in range(steps):
        for name in [n for n in live if draw.random() < 0.15 or live[n] == CAPACITY]:
            del live[name]
        names = list(live)
        if draw.random() < 0.3:
            draw.shuffle(names)
        step = OrderedDict((n, 1) for n in names)
        while len(step) < ROWS and (draw.random() < 0.4 or not step):
            step[100 + fresh] = draw.choice((1, 2, 5, 9, CAPACITY))
            fresh += 1
        live = {n: live.get(n, 0) + new for n, new in step.items()}
        yield step


def batch_of(step, form, new, rows, nothing=torch.nan):
    """The new tokens {id: [tokens, ...]} as a batch of `rows` rows in its format; `nothing` where there are none."""
    if form == "thd":
        return torch.cat([new[n] for n in step])
    some = next(iter(new.values()))
    out = some.new_full((rows, max(step.values()), *some.shape[1:]), nothing)
    for row, n in enumerate(step):
        out[row, : step[n]] = new[n]
    return out if form == "bshd" else out.transpose(0, 1)


def held(cache, table, row, length):
    """The first tokens of a row's sequence."""
    if table is None:
        return cache[row, :length]
    return torch.stack([cache[table[row, t // PAGE], t % PAGE] for t in range(length)])


@pytest.mark.parametrize("device", devices())
@covering(paged=[False, True], form=FORMS)
def test_sequences_come_and_go(device, paged, form):
    p = params(device, paged=paged, form=form)
    addresses = None
    expected: dict[tuple[int, int], list[torch.Tensor]] = {}  # (layer, id): all k so far, all v
    for number, step in enumerate(schedule(number_of(form, paged))):
        before = {n: p.sequences.get(n, 0) for n in step}
        p.pre_step(step)
        assert list(p.sequences) == list(step) and p.batch_size == len(step)
        assert p.sequences == {n: before[n] + new for n, new in step.items()}
        # More rows than sequences are allowed: a captured graph has always as many.
        rows = ROWS if form == "thd" or number % 3 == 0 else len(step)
        for layer in LAYERS:
            new = [
                {n: torch.randn(count, HEADS, d, device=device).bfloat16() for n, count in step.items()}
                for d in (D_K, D_V)
            ]
            k, v, cu_q, cu_kv, capacity, kind = p.step(layer, *(batch_of(step, form, t, rows) for t in new), form)
            assert capacity == CAPACITY and kind == f"{form}_2bshd"
            check_lengths(p, step, before, cu_q, cu_kv, rows)
            table = p.cache_manager.page_table.cpu() if paged else None
            if not paged:
                assert k.shape == (rows, CAPACITY, HEADS, D_K) and v.shape == (rows, CAPACITY, HEADS, D_V)
            for row, n in enumerate(step):
                old = expected.get((layer, n), [torch.empty(0), torch.empty(0)])
                both = [torch.cat([o.to(t[n]), t[n]]) for o, t in zip(old, new, strict=True)]
                expected[layer, n] = both
                for cache, want in zip((k, v), both, strict=True):
                    torch.testing.assert_close(held(cache, table, row, len(want)), want, rtol=0, atol=0)
            if paged:
                check_contiguous(p, layer, step, expected)
        expected = {key: had for key, had in expected.items() if key[1] in step}
        places = [p.cu_seqlens_q.data_ptr(), p.get_seqlens_pre_step().data_ptr()] + [
            t.data_ptr() for pair in p.cache_manager.cache.values() for t in pair
        ]
        addresses = addresses or places
        assert places == addresses  # what a captured graph reads stays where it is


def number_of(form, paged):
    return 10 * FORMS.index(form) + paged


def check_lengths(p, step, before, cu_q, cu_kv, rows):
    """Running sums of new and held tokens, the last one repeated; the lengths before the step."""
    new = list(step.values()) + [0] * (ROWS - len(step))
    had = list(before.values()) + [0] * (ROWS - len(step))
    for cu, all_rows, counts in (
        (cu_q, p.cu_seqlens_q, new),
        (cu_kv, p.cu_seqlens_kv, [a + b for a, b in zip(new, had, strict=True)]),
    ):
        sums = [sum(counts[:i]) for i in range(ROWS + 1)]
        assert all_rows.dtype == torch.int32 and all_rows.tolist() == sums and cu.tolist() == sums[: rows + 1]
    assert p.get_seqlens_pre_step().dtype == torch.int32 and p.get_seqlens_pre_step().tolist() == had


def check_contiguous(p, layer, step, expected):
    """Pages in rows, zeros behind; no page is two sequences'."""
    manager = p.cache_manager
    for got, which in zip(p.convert_paged_to_nonpaged(layer), (0, 1), strict=True):
        assert got.shape[:2] == (len(step), CAPACITY)
        for row, n in enumerate(step):
            want = expected[layer, n][which]
            torch.testing.assert_close(got[row, : len(want)], want, rtol=0, atol=0)
            assert not got[row, len(want) :].any()
    used = [page for pages in manager.allocated_pages.values() for page in pages]
    assert sorted(used + manager.free_pages) == list(range(manager.total_num_pages))
    assert [len(pages) for pages in manager.allocated_pages.values()] == [-(-n // PAGE) for n in p.sequences.values()]


def test_moves_lose_nothing():
    """Every permutation and part of one, carried out move by move."""
    draw = random.Random(0)
    for _ in range(300):
        size = draw.randint(1, 9)
        order = draw.sample(range(size), size)
        sources = {to: order[to] for to in range(draw.randint(0, size))}
        tokens = [draw.randint(0, 9) for _ in range(size)]
        rows = {row: row for row in range(size)}
        moves = _moves(sources, tokens)
        for to, source, count in moves:
            rows[to] = rows[source]
            assert count == tokens[rows[to]]
        assert all(rows[to] == source for to, source in sources.items())
        assert len(moves) <= 1.5 * size


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_full(paged):
    """The documented error, after which nothing has changed."""
    p = params("cpu", paged=paged)
    p.pre_step(OrderedDict({1: CAPACITY, 2: 3}))
    for step in (
        {1: 1, 2: 1},  # one token too many
        {2: 1, 3: CAPACITY + 1},  # a context too long
        {2: 1, 3: 1, 4: 1, 5: 1, 6: 1},  # a sequence too many
    ):
        with pytest.raises(RuntimeError, match="KV cache is full!"):
            p.pre_step(OrderedDict(step))
        assert p.sequences == {1: CAPACITY, 2: 3} and p.cu_seqlens_kv.tolist() == [0, 24, 27, 27, 27]
        assert not paged or len(p.cache_manager.free_pages) == ROWS * CAPACITY // PAGE - 7
    p.pre_step(OrderedDict({2: 1, 3: CAPACITY}))
    p.reset()
    assert not p.sequences and p.batch_size == 0 and not p.cu_seqlens_kv.any()
    p.pre_step(OrderedDict({n: CAPACITY for n in range(ROWS)}))


def test_fewer_pages_than_sequences_could_need():
    """A manager of one's own with little memory: pages run out, and are there again when a sequence has left."""
    manager = PagedKVCacheManager(
        ROWS, CAPACITY, HEADS, D_K, torch.float32, D_V, "cpu", total_num_pages=5, page_size=PAGE
    )
    p = InferenceParams(
        ROWS, CAPACITY, HEADS, D_K, torch.float32, head_dim_v=D_V, custom_cache_manager=manager, device="cpu"
    )
    assert p.is_paged and p.page_size == PAGE
    p.pre_step(OrderedDict({1: 9, 2: 7}))
    with pytest.raises(RuntimeError, match="KV cache is full! .* 1 more pages"):
        p.pre_step(OrderedDict({1: 1, 2: 1, 3: 1}))
    p.pre_step(OrderedDict({2: 1, 3: 9}))
    assert p.cache_manager.page_table[:2].tolist() == [[3, 4, 0, 0, 0, 0], [0, 1, 2, 0, 0, 0]]


def test_a_paged_cache_can_be_printed(capsys):
    p = params("cpu", paged=True)
    manager = p.cache_manager
    manager.print_cache()
    assert capsys.readouterr().out == "PagedKVCacheManager: 0 of 24 pages of 4 tokens in use\n"
    p.pre_step(OrderedDict({7: 9, 3: 2}))
    p.pre_step(OrderedDict({3: 1, 7: 1}))
    manager.print_cache()
    assert capsys.readouterr().out.splitlines() == [
        "PagedKVCacheManager: 4 of 24 pages of 4 tokens in use",
        "  row 0: sequence 3, 3 tokens in pages 3",
        "  row 1: sequence 7, 10 tokens in pages 0, 1, 2",
    ]
    p.reset()
    manager.print_cache()
    assert "0 of 24" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["bshd", "thd"])
@torch.no_grad()
def test_two_layers_of_one_number_are_refused(form):
    """Each would overwrite what the other has cached; the steps of one layer may be repeated."""
    model, p = Tiny(form, "cpu").eval(), params("cpu", form=form, dtype=torch.float32, d_v=D_K)
    token = torch.tensor([1]) if form == "thd" else torch.tensor([[1]])
    p.pre_step(OrderedDict([(0, 1)]))
    first = model(token, inference_params=p)
    assert torch.equal(model(token, inference_params=p), first)
    attention = model.layers[1].self_attention
    attention.layer_number = attention.core_attention.layer_number = 1
    for other in (model, Tiny(form, "cpu").eval()):  # of another model, too
        with pytest.raises(
            ArgumentError, match="layer_number=1 from .*core_attention, after .*core_attention has used"
        ):
            other(token, inference_params=p)
    p.reset()
    p.pre_step(OrderedDict([(0, 1)]))
    other(token, inference_params=p)


def test_the_longest_of_a_step():
    """As it was, where a step is refused."""
    packed = params("cpu", form="thd", max_ctx_len=4)
    with pytest.raises(ValueError, match="max_ctx_len=4"):
        packed.pre_step(OrderedDict({1: 5}))
    for tokens in (4, 1):
        packed.pre_step(OrderedDict({1: tokens}))
        assert packed.max_seqlen_q == tokens
    with pytest.raises(RuntimeError, match="full"):
        packed.pre_step(OrderedDict((9 + n, 2) for n in range(ROWS + 1)))
    assert packed.max_seqlen_q == 1


def test_custom_manager():
    """A manager of one's own is asked for everything."""

    class Notes(KVCacheManager):
        def step(self, layer_number, new_k, new_v, cu_new_seqlens, cu_cached_seqlens, qkv_format):
            self.cache[layer_number] = (new_k, new_v)
            return self.cache[layer_number]

    p = params("cpu", custom_cache_manager=Notes())
    p.pre_step(OrderedDict({5: 2}))
    p.pre_step(OrderedDict({5: 1, 6: 1}))
    k, v = torch.zeros(2, 1, HEADS, D_K), torch.zeros(2, 1, HEADS, D_V)
    got = p.step(3, k, v, "bshd")
    assert got[0] is k and got[1] is v and got[3].tolist() == [0, 3, 4] and p.sequences == {5: 3, 6: 1}


# ------------------------------------------------------------------------------------------ a model that generates


class Tiny(torch.nn.Module):
    """Two Transformer layers with rotary embedding and grouped heads between an embedding and a head."""

    def __init__(self, form, device):
        super().__init__()
        torch.manual_seed(3)
        self.form = form
        self.embedding = torch.nn.Embedding(64, 32)
        self.layers = torch.nn.ModuleList(
            TransformerLayer(
                32,
                64,
                4,
                num_gqa_groups=HEADS,
                layer_number=n + 1,
                self_attn_mask_type="padding_causal",
                hidden_dropout=0.0,
                attention_dropout=0.0,
                normalization="RMSNorm",
                attn_input_format=form,
                device="cpu",  # so that both devices get one model
            )
            for n in range(2)
        )
        self.angles = RotaryPositionEmbedding(D_K).to(device)(CAPACITY)
        for weight in self.parameters():  # large, so that attention counts beside the residual
            torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.3)
        torch.nn.init.normal_(self.embedding.weight)
        self.head = F.normalize(torch.randn(64, 32)).to(device)  # no token is likelier than others at once
        self.to(device)

    def forward(self, tokens, mask_type=None, **options):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self_attn_mask_type=mask_type, rotary_pos_emb=self.angles, **options)
        return x @ self.head.T

    def uncached(self, text):
        """The logits of the next token, by a forward over the whole text alone."""
        tokens = torch.tensor([text], device=self.embedding.weight.device)
        if self.form == "thd":
            cu = torch.tensor([0, len(text)], dtype=torch.int32, device=tokens.device)
            return self(tokens[0], cu_seqlens_q=cu, max_seqlen_q=len(text))[-1]
        logits = self(tokens if self.form == "bshd" else tokens.T, "causal")
        return logits[(0, -1) if self.form == "bshd" else (-1, 0)]


@pytest.mark.parametrize("device", devices())
@covering(paged=[False, True], form=FORMS)
@torch.no_grad()
def test_greedy_equals_uncached(device, paged, form):
    """Token by token, while texts come and go."""
    model = Tiny(form, device).eval()
    p = params(device, paged=paged, form=form, dtype=torch.float32, d_v=D_K)
    texts: dict[int, list[int]] = {}
    draw, checked, different = random.Random(2), 0, set()
    for step in schedule(55 + number_of(form, paged), steps=20):
        for n, count in step.items():
            if n not in texts:
                texts[n] = [draw.randrange(64) for _ in range(count)]
        p.pre_step(step)
        new = {n: torch.tensor(texts[n][-count:], device=device) for n, count in step.items()}
        logits = model(batch_of(step, form, new, len(step), 0), inference_params=p)
        begin = 0
        for row, (n, count) in enumerate(step.items()):
            at = count - 1
            place = (begin + at,) if form == "thd" else (row, at) if form == "bshd" else (at, row)
            begin += count
            want = model.uncached(texts[n])
            torch.testing.assert_close(logits[place], want, rtol=1e-4, atol=1e-4)
            assert logits[place].argmax() == want.argmax()
            texts[n].append(int(want.argmax()))
            checked += 1
            different.add(texts[n][-1])
    assert checked > 30 and len(different) > 5


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@torch.no_grad()
def test_greedy_in_the_older_form(device, form):
    model = Tiny(form, device).eval()
    p = InferenceParams(3, CAPACITY, device=device)
    texts = torch.randint(64, (3, 5), device=device)
    new = texts
    for _ in range(12):
        logits = model(new if form == "bshd" else new.T, "causal", inference_params=p)
        p.sequence_len_offset += new.shape[1]
        new = (logits[:, -1:] if form == "bshd" else logits[-1:].transpose(0, 1)).argmax(-1)
        assert new.flatten().tolist() == [int(model.uncached(text).argmax()) for text in texts.tolist()]
        texts = torch.cat([texts, new], 1)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_example(device, paged):
    """examples/generate.py: prompts of different lengths, more than the batch has rows, one that ends early."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(layers=2, hidden=32, heads=2), torch.device(device)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.3)
    prompts = [list(text) for text in (b"a", b"some words", b"and", b"many more words", b"x")]
    plain = [generate_uncached(model, prompt, 7) for prompt in prompts]
    p = InferenceParams(2, 24, 2, 16, torch.float32, is_paged=paged, page_size=8, total_num_pages=6, device=device)
    assert generate(model, prompts, 7, p) == plain
    line_end = plain[1][len(prompts[1]) + 2]  # now this byte ends a text
    with torch.no_grad():
        model.embedding.weight[[line_end, 10]] = model.embedding.weight[[10, line_end]]
    prompts = [[{line_end: 10, 10: line_end}.get(byte, byte) for byte in prompt] for prompt in prompts]
    plain = [generate_uncached(model, prompt, 7) for prompt in prompts]
    assert len(plain[1]) <= len(prompts[1]) + 3 and plain[1][-1] == 10
    p.reset()
    assert generate(model, prompts, 7, p) == plain


# ------------------------------------------------------------------------------------- the two-argument form


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_older_form(device, form):
    """Sizes of the first k and v; the caller advances the offsets."""
    p = InferenceParams(ROWS, CAPACITY, device=device)
    assert p.sequence_len_offset == 0 and p.batch_size_offset == 0 and p.cache_manager is None
    seen: dict[int, list[torch.Tensor]] = {}
    for first in (0, 2):  # a batch in two halves, as pipelines send it
        p.batch_size_offset, p.sequence_len_offset, seen = first, 0, {}
        for tokens in (5, 1, 1, 3):
            assert p.get_seqlens_pre_step().tolist() == [p.sequence_len_offset] * ROWS
            for layer in LAYERS:
                new = [torch.randn(2, tokens, HEADS, d, device=device) for d in (D_K, D_V)]
                given = new if form == "bshd" else [t.transpose(0, 1) for t in new]
                k, v, cu_q, cu_kv, capacity, kind = p.step(layer, *given, form)
                end = p.sequence_len_offset + tokens
                assert cu_q.tolist() == [0, tokens, 2 * tokens] and cu_kv.tolist() == [0, end, 2 * end]
                assert (capacity, kind) == (CAPACITY, f"{form}_2bshd") and cu_q.dtype == torch.int32
                seen[layer] = (
                    [torch.cat(both, 1) for both in zip(seen[layer], new, strict=True)] if layer in seen else new
                )
                for cache, want in zip((k, v), seen[layer], strict=True):
                    torch.testing.assert_close(cache[:, :end], want, rtol=0, atol=0)
            p.sequence_len_offset += tokens
    whole = p.cache_manager.cache[LAYERS[0]][0]
    assert whole.shape == (ROWS, CAPACITY, HEADS, D_K) and whole[:2, :10].all() and not whole[:, 10:].any()
    p.reset()
    assert p.sequence_len_offset == 0 and p.batch_size_offset == 0


@torch.enable_grad()
def test_older_form_with_gradients_after_inference_mode():
    """What was kept of a call in inference mode can be saved for a backward."""
    model, p, tokens = Tiny("bshd", "cpu"), InferenceParams(2, CAPACITY, device="cpu"), torch.zeros(2, 3).long()
    with torch.inference_mode():
        want = model(tokens, "causal", inference_params=p)
    got = model(tokens, "causal", inference_params=p)
    assert got.requires_grad
    torch.testing.assert_close(got, want, rtol=0, atol=0, check_layout=False)


# ---------------------------------------------------------------------------------------------------- CUDA


@requires_cuda
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_capture(paged):
    """A decoding step captured once serves all later ones; neither it nor pre_step waits for the device."""
    p = params("cuda", paged=paged)
    new = [torch.randn(ROWS, 1, HEADS, d, device="cuda").bfloat16() for d in (D_K, D_V)]
    p.pre_step(OrderedDict({1: 1, 2: 1}))
    p.step(1, *new, "bshd")
    graph = torch.cuda.CUDAGraph()
    p.pre_step(OrderedDict({1: 1, 2: 1}))
    with torch.cuda.graph(graph):
        p.step(1, *new, "bshd")
    graph.replay()
    expected = {n: [new[0][row].clone()] * 2 for row, n in enumerate((1, 2))}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in ({1: 1, 2: 1}, {2: 1, 3: 1}, {3: 1, 2: 1, 4: 1}):
            p.pre_step(OrderedDict(step))
            new[0].normal_()
            graph.replay()
            for row, n in enumerate(step):
                expected.setdefault(n, []).append(new[0][row].clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cache = p.cache_manager.cache[1][0]
    table = p.cache_manager.page_table.cpu() if paged else None
    for row, n in enumerate(p.sequences):
        want = torch.cat(expected[n])
        torch.testing.assert_close(held(cache, table, row, len(want)), want, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------------- under layers


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
