"""What has to hold of every attention whatever its numbers: who depends on whom, and when bits are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_torch as te
from tests.backends import devices
from tests.core.attention_cases import only
from tests.module_steps import on, values
from tests.reference import attention as reference
from tests.tolerances import DB, snr_db

DEVICES = devices()
FAMILIES = ("fused", "unfused", "plain torch")
B, S, H, G, D = 3, 40, 4, 2, 64
LENGTHS = (40, 17, 29)


@pytest.fixture(params=FAMILIES, autouse=True)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test on the fused and the unfused backend; deterministic, so that bits can be compared."""
    only(monkeypatch, request.param)
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    return request.param


def attention(device: str, **options: Any) -> te.DotProductAttention:
    return te.DotProductAttention(H, D, num_gqa_groups=G, qkv_format="bshd", **options).to(device)


def operands(device: str, seed: int = 0, rows: tuple[int, ...] = (B, S)) -> list[torch.Tensor]:
    dtype = torch.bfloat16
    return [values(*rows, h, D, device=device, dtype=dtype, seed=seed + i) for i, h in enumerate((H, G, G))]


def run(module: Any, tensors: list[torch.Tensor], dy: torch.Tensor | None = None, **options: Any) -> list[torch.Tensor]:
    """y, dq, dk and dv."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = module(*leaves, **options)
    y.backward(values(*y.shape, device=str(y.device), dtype=y.dtype, seed=9) if dy is None else dy)
    grads = [t.grad for t in leaves]
    on(str(tensors[0].device.type), y, *grads)
    return [y.detach(), *grads]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> list[str]:
    """The names of what is not equal bit for bit."""
    return [n for n, a, b in zip(("y", "dq", "dk", "dv"), first, second, strict=True) if not torch.equal(a, b)]


def padded(device: str) -> dict[str, Any]:
    running = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=device)
    return {"cu_seqlens_q": running, "cu_seqlens_kv": running}


def tokens(device: str) -> torch.Tensor:
    """Which rows of [b, s] are tokens."""
    return torch.arange(S, device=device) < torch.tensor(LENGTHS, device=device)[:, None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, (7, 0)])
def test_the_past_does_not_know_the_future(device, window):
    """Keys and values behind a query change no bit of it, and its gradient does not reach them."""
    module = attention(device, attn_mask_type="causal", window_size=window)
    q, k, v = operands(device)
    cut = 23
    k2, v2 = (t.clone() for t in (k, v))
    for t in (k2, v2):
        t[:, cut:] = 3 * t[:, cut:].flip(1) + 1
    dy = values(B, S, H * D, device=device, dtype=q.dtype, seed=9)
    dy[:, cut:] = 0
    first, second = run(module, [q, k, v], dy), run(module, [q, k2, v2], dy)
    assert torch.equal(first[0][:, :cut], second[0][:, :cut])
    assert not torch.equal(first[0][:, cut:], second[0][:, cut:])
    for grads in (first, second):
        assert all((t[:, cut:] == 0).all() for t in grads[1:])
    assert all(torch.equal(a[:, :cut], b[:, :cut]) for a, b in zip(first[1:], second[1:], strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_window_forgets(device):
    """Keys before the window change no bit."""
    module = attention(device, attn_mask_type="causal", window_size=(7, 0))
    q, k, v = operands(device)
    k2, v2 = (torch.cat((t[:, :10] + 1, t[:, 10:]), 1) for t in (k, v))
    first, second = module(q, k, v), module(q, k2, v2)
    assert torch.equal(first[:, 17:], second[:, 17:])
    assert all(not torch.equal(first[:, i], second[:, i]) for i in range(17))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_padding_takes_no_part(device, mask):
    """Whatever stands in the padding, also of dy: the same bits elsewhere, zeros there."""
    module = attention(device, attn_mask_type=mask)
    inside = tokens(device)
    dy = values(B, S, H * D, device=device, dtype=torch.bfloat16, seed=9)
    plain = operands(device)
    other = [torch.where(inside[:, :, None, None], t, 5 * t + 2) for t in plain]
    first = run(module, plain, dy, **padded(device))
    second = run(module, other, torch.where(inside[:, :, None], dy, -3 * dy + 1), **padded(device))
    assert not equal(first, second)
    assert all((t[~inside] == 0).all() for t in first)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
def test_packed_sequences_are_sequences(device, mask):
    """thd, rows with padding, and each sequence by itself: one result."""
    inside = tokens(device)
    rows = operands(device)
    dy = values(B, S, H * D, device=device, dtype=torch.bfloat16, seed=9)
    module = attention(device, attn_mask_type=mask)
    dense = run(module, rows, dy, **padded(device))
    packed = run(module, [t[inside] for t in rows], dy[inside], qkv_format="thd", **padded(device))
    alone = attention(device, attn_mask_type="causal" if "causal" in mask else "no_mask")
    parts = [run(alone, [t[i : i + 1, :n] for t in rows], dy[i : i + 1, :n]) for i, n in enumerate(LENGTHS)]
    for name, a, b, *each in zip(("y", "dq", "dk", "dv"), packed, dense, *parts, strict=True):
        for other in (b[inside], torch.cat([t[0] for t in each])):
            assert snr_db(a, other) >= DB["bf16"], f"{name}: {snr_db(a, other):.1f} dB"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["no_mask", "causal", "padding_causal"])
def test_order_of_the_batch(device, mask):
    """Rows of the batch in another order give the same bits in that order."""
    module = attention(device, attn_mask_type=mask)
    order = torch.tensor([2, 0, 1], device=device)
    rows = operands(device)
    dy = values(B, S, H * D, device=device, dtype=torch.bfloat16, seed=9)
    options, moved = ({}, {}) if "padding" not in mask else (padded(device), padded(device))
    if moved:
        lengths = torch.tensor(LENGTHS)[order.cpu()]
        running = torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32, device=device)
        moved = {"cu_seqlens_q": running, "cu_seqlens_kv": running}
    first = run(module, rows, dy, **options)
    second = run(module, [t[order] for t in rows], dy[order], **moved)
    assert not equal([t[order] for t in first], second)


@pytest.mark.parametrize("device", DEVICES)
def test_order_of_keys(device):
    """Without a mask keys have no order: permuted with their values, the same sums in another order."""
    module = attention(device, attn_mask_type="no_mask")
    q, k, v = operands(device)
    order = torch.randperm(S, generator=torch.Generator().manual_seed(1)).to(device)
    first, second = run(module, [q, k, v]), run(module, [q, k[:, order], v[:, order]])
    for a, b in zip((*first[:2], *(t[:, order] for t in first[2:])), second, strict=True):
        assert snr_db(a, b) >= DB["bf16"]


@pytest.mark.parametrize("device", DEVICES)
def test_groups_are_repeated_heads(device):
    """Two heads that share a key are as two with a copy each; its gradient is the sum of theirs."""
    q, k, v = operands(device)
    shared = run(attention(device, attn_mask_type="causal"), [q, k, v])
    whole = te.DotProductAttention(H, D, qkv_format="bshd", attn_mask_type="causal").to(device)
    y, dq, dk, dv = run(whole, [q, *(t.repeat_interleave(H // G, 2) for t in (k, v))])
    dk, dv = (t.float().unflatten(2, (G, -1)).sum(3) for t in (dk, dv))
    for a, b in zip(shared, (y, dq, dk, dv), strict=True):
        assert snr_db(a, b) >= DB["bf16"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["bshd", "thd"])
def test_formats(device, form):
    """sbhd and strided views give the bits of dense bshd; without padding thd gives its values."""
    rows = operands(device)
    dy = values(B, S, H * D, device=device, dtype=torch.bfloat16, seed=9)
    first = run(attention(device, attn_mask_type="causal"), rows, dy)
    if form == "bshd":
        turned = run(
            attention(device, attn_mask_type="causal"),
            [t.transpose(0, 1).contiguous() for t in rows],
            dy.transpose(0, 1).contiguous(),
            qkv_format="sbhd",
        )
        assert not equal(first, [t.transpose(0, 1) for t in turned])
        return
    running = torch.arange(0, B * S + 1, S, dtype=torch.int32, device=device)
    packed = run(
        attention(device, attn_mask_type="padding_causal"),
        [t.flatten(0, 1) for t in rows],
        dy.flatten(0, 1),
        qkv_format="thd",
        cu_seqlens_q=running,
        cu_seqlens_kv=running,
    )
    for a, b in zip(first, packed, strict=True):
        assert snr_db(a.flatten(0, 1), b) >= DB["bf16"]


# ------------------------------------------------------------------------------------------- dropout, recomputation


def seeded(device: str, call: Any) -> Any:
    """The call's result, torch's generators beginning alike."""
    torch.manual_seed(1234)
    return call()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["checkpoint_core_attention", "torch", "torch reentrant"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_recomputation(device, how, p):
    """A recomputed attention drops the same weights: equal bits."""
    module = attention(device, attn_mask_type="causal", attention_dropout=p)
    rows = operands(device)
    first = seeded(device, lambda: run(module, rows))
    if how == "checkpoint_core_attention":
        second = seeded(device, lambda: run(module, rows, checkpoint_core_attention=True))
    else:
        reentrant = how.endswith("reentrant")
        second = seeded(device, lambda: run(lambda *leaves: checkpoint(module, *leaves, use_reentrant=reentrant), rows))
    assert not equal(first, second)
    assert seeded(device, lambda: not equal(first, run(module, rows)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", [1, 3])
def test_two_recomputed_layers(device, steps):
    """Each layer, in each step, has a mask of its own, and gets it again in backward."""
    modules = [attention(device, attn_mask_type="causal", attention_dropout=0.5) for _ in range(2)]
    rows = operands(device)

    def chain(recompute: bool) -> list[torch.Tensor]:
        found = []
        for _ in range(steps):
            leaves = [t.detach().clone().requires_grad_() for t in rows]
            q = leaves[0]
            for module in modules:
                y = checkpoint(module, q, *leaves[1:], use_reentrant=False) if recompute else module(q, *leaves[1:])
                q = y.unflatten(-1, (H, D))
            q.float().square().sum().backward()
            found += [q.detach(), *(t.grad for t in leaves)]
        return found

    first, second = (seeded(device, lambda r=r: chain(r)) for r in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_draws_and_rests(device):
    """A mask of its own for each call in training, none in evaluation; right on average."""
    module = attention(device, attn_mask_type="no_mask", attention_dropout=0.4)
    plain = attention(device, attn_mask_type="no_mask")
    rows = operands(device)
    torch.manual_seed(5)
    first, second = module(*rows), module(*rows)
    assert not torch.equal(first, second)
    module.eval()
    assert torch.equal(module(*rows), plain(*rows))
    module.train()
    mean = torch.stack([module(*rows).float() for _ in range(200)]).mean(0)
    # Each call's noise is of the output's size; 200 of them leave 1 / 200 of its power.
    assert snr_db(mean, plain(*rows)) >= 20.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_dropout_by_its_own_mask(device, mask):
    """Identities as values show which weights are dropped; forward and backward are right for these."""
    p, n = 0.3, D
    module = te.DotProductAttention(H, D, qkv_format="bshd", attn_mask_type=mask, attention_dropout=p).to(device)
    tensors = [values(B, n, H, D, device=device, dtype=torch.bfloat16, seed=i) for i in range(3)]
    eye = torch.eye(n, dtype=torch.bfloat16, device=device)[None, :, None].expand(B, n, H, n).contiguous()
    shown = seeded(device, lambda: module(*tensors[:2], eye)).unflatten(-1, (H, n))
    dy = values(B, n, H * D, device=device, dtype=torch.bfloat16, seed=9)
    found = seeded(device, lambda: run(module, tensors, dy))
    q, k, v, dy = (
        t.detach().double().cpu().numpy().transpose(0, 2, 1, 3) for t in (*tensors, dy.unflatten(-1, (H, D)))
    )
    problem = reference.Problem(
        D**-0.5, right=0 if mask == "causal" else -1, keep=(shown != 0).permute(0, 2, 1, 3).cpu().numpy(), p=p
    )
    y = reference.forward(q, k, v, problem).out
    wanted = (y, *reference.backward(dy, q, k, v, problem)[:3])
    for name, a, b in zip(("y", "dq", "dk", "dv"), found, wanted, strict=True):
        b = b.transpose(0, 2, 1, 3).reshape(a.shape)
        assert snr_db(a, b) >= DB["bf16"], f"{name}: {snr_db(a, b):.1f} dB"


@pytest.mark.parametrize("device", DEVICES)
def test_repeated(device):
    """Equal inputs give equal bits, time and again, over several tiles."""
    module = attention(device, attn_mask_type="causal")
    rows = operands(device, rows=(2, 515))
    first = run(module, rows)
    assert not any(equal(first, run(module, rows)) for _ in range(4))


@pytest.mark.parametrize("device", DEVICES)
def test_max_logit_beside(device):
    """Returning the largest logits changes no bit of the output, and they are the scores' own maxima."""
    rows = operands(device)
    y, largest = attention(device, attn_mask_type="causal", return_max_logit=True)(*rows)
    assert torch.equal(y, attention(device, attn_mask_type="causal")(*rows))
    q, k = (t.double().transpose(1, 2) for t in rows[:2])
    scores = q @ k.repeat_interleave(H // G, 1).transpose(2, 3) * D**-0.5
    hidden = torch.ones(S, S, dtype=torch.bool, device=device).triu(1)
    assert snr_db(largest, scores.masked_fill(hidden, -torch.inf).amax((0, 2, 3))) >= DB["bf16"]
