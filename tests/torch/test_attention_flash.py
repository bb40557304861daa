"""FlashAttention's adapters: the packages by stand-ins that compute from the formula, torch's own kernels on a GPU."""

from __future__ import annotations

import inspect
import math
import sys
import types
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from te_core.device import DeviceInfo
from te_core.layers.attention import AttentionInputs
from te_torch.attention import DotProductAttention, choose, env, flash
from te_torch.attention.choose import FLASH2, FLASH3, FLASH4, FLASH_TORCH, Installed
from te_torch.attention.plan import Fact, Key, Plan, SumsFact, make_plan
from tests.backends import requires_cuda
from tests.tolerances import DB, snr_db

H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, 50 << 20, 141 << 30, (13, 0))
HEADS, GROUPS, WIDTH = 4, 2, 16


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    left: int = -1,
    right: int = -1,
    cap: float = 0.0,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one sequence [s, h, d] in float64, its diagonal ending bottom-right."""
    sq, skv, times = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(times, 1).double() for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(skv)[None] - torch.arange(sq)[:, None] - (skv - sq)
    distance = distance.to(q.device)
    if slopes is not None:
        scores = scores - slopes.double().view(-1, 1, 1) * distance.abs()
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(hidden, -math.inf), -1), v)


def outside(begin: torch.Tensor, used: torch.Tensor, tokens: int) -> torch.Tensor:
    """Tokens that belong to no sequence."""
    inside = {int(a) + i for a, n in zip(begin, used, strict=False) for i in range(int(n))}
    return torch.tensor(sorted(set(range(tokens)) - inside), dtype=torch.int64)


def poisoned(g: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """A gradient whose memory was not written there."""
    return g.index_fill(0, at, math.nan)


class Package:
    """A stand-in for one generation of flash-attn. It takes exactly the documented arguments and computes from them."""

    def __init__(self, names: str, packed_names: str, pair: bool = False) -> None:
        self.seen: list[dict[str, Any]] = []
        self.pair = pair
        self.names, self.packed_names = names.split(), packed_names.split()

    def _bind(self, names: list[str], args: Any, options: dict[str, Any]) -> dict[str, Any]:
        parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for n in names]
        bound = inspect.Signature(parameters).bind(*args, **options)
        self.seen.append(dict(bound.arguments))
        return dict(bound.arguments)

    def _one(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: dict[str, Any]) -> torch.Tensor:
        left, right = (-1 if n is None else n for n in o.get("window_size") or (-1, -1))
        right = 0 if o["causal"] else right
        return reference(q, k, v, o["softmax_scale"], left, right, o.get("softcap") or 0.0, o.get("alibi_slopes")).to(q)

    def flash_attn_func(self, *args: Any, **options: Any) -> Any:
        o = self._bind(self.names, args, options)
        out = torch.stack([self._one(q, k, v, o) for q, k, v in zip(o["q"], o["k"], o["v"], strict=True)])
        return (out, None) if self.pair else out

    def flash_attn_varlen_func(self, *args: Any, **options: Any) -> Any:
        o = self._bind(self.packed_names, args, options)
        q, k, v, cu_q, cu_k = (o[n] for n in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
        out = torch.full((q.shape[0], q.shape[1], v.shape[2]), math.nan, dtype=q.dtype)  # what nobody writes
        used_q, used_k = (
            o.get(n) if o.get(n) is not None else cu[1:] - cu[:-1]
            for n, cu in (("seqused_q", cu_q), ("seqused_k", cu_k))
        )
        for t, cu, used in ((q, cu_q, used_q), (k, cu_k, used_k), (v, cu_k, used_k)):
            if t.requires_grad:
                t.register_hook(partial(poisoned, at=outside(cu, used, len(t))))
        for i in range(len(cu_q) - 1):
            a, b = int(cu_q[i]), int(cu_k[i])
            m, n = int(used_q[i]), int(used_k[i])
            out[a : a + m] = self._one(q[a : a + m], k[b : b + n], v[b : b + n], o) if n else 0.0
        return (out, None) if self.pair else out


COMMON = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
V3 = "softmax_scale causal qv window_size softcap num_splits deterministic"
V4 = "softmax_scale causal window_size softcap num_splits"
PACKAGES = {
    FLASH2: ("flash_attn", lambda: Package(f"q k v {COMMON}", f"q k v {LENGTHS} {COMMON}")),
    FLASH3: (
        "flash_attn_interface",
        lambda: Package(f"q k v {V3}", f"q k v {LENGTHS} seqused_q seqused_k {V3}", pair=True),
    ),
    FLASH4: ("flash_attn.cute", lambda: Package(f"q k v {V4}", f"q k v cu_seqlens_q cu_seqlens_k {V4}", pair=True)),
}


def install(monkeypatch: pytest.MonkeyPatch, backend: str) -> Package:
    name, make = PACKAGES[backend]
    package = make()
    module = types.ModuleType(name)
    module.flash_attn_func = package.flash_attn_func  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = package.flash_attn_varlen_func  # type: ignore[attr-defined]
    if "." in name:
        monkeypatch.setitem(sys.modules, name.split(".")[0], types.ModuleType(name.split(".")[0]))
    monkeypatch.setitem(sys.modules, name, module)
    return package


def plan_for(backend: str, q: torch.Tensor, k: torch.Tensor, **changes: Any) -> Plan:
    """A plan of CPU tensors whose backend is this one, whatever the rules say."""
    module = DotProductAttention(HEADS, WIDTH, GROUPS, logit_softcap=changes.pop("softcap", 0.0))
    facts = [Fact(t.shape, torch.float32, torch.device("cpu"), False) for t in (q, k, k)]
    installed = changes.pop("installed", Installed(flash2=(2, 8), flash3=(3, 0), flash4=(4, 0)))
    plan = make_plan(module._static, Key(*facts, softcap=module.logit_softcap, **changes), env.Switches())
    plan.backend, plan.request = backend, replace(plan.request, installed=installed)
    return plan


def tensors(*lead: int, skv: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    kv = list(lead)
    if skv:
        kv[1] = skv
    return torch.randn(*lead, HEADS, WIDTH), torch.randn(*kv, GROUPS, WIDTH), torch.randn(*kv, GROUPS, WIDTH)


SCALE = WIDTH**-0.5
DENSE: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ({"mask_type": "no_mask"}, {}, tuple(PACKAGES)),
    ({"mask_type": "causal_bottom_right"}, {"right": 0}, tuple(PACKAGES)),
    ({"mask_type": "causal_bottom_right", "window": (2, 0)}, {"left": 2, "right": 0}, tuple(PACKAGES)),
    ({"mask_type": "no_mask", "window": (1, 2)}, {"left": 1, "right": 2}, tuple(PACKAGES)),
    ({"mask_type": "no_mask", "window": (1, 0)}, {"left": 1, "right": 0}, tuple(PACKAGES)),
    ({"mask_type": "no_mask", "softcap": 0.5}, {"cap": 0.5}, tuple(PACKAGES)),
    ({"mask_type": "causal_bottom_right", "bias_type": "alibi"}, {"right": 0, "slopes": True}, (FLASH2,)),
]


@pytest.mark.parametrize("form", ["bshd", "sbhd"])
@pytest.mark.parametrize(
    ("changes", "means", "backend"),
    [(c, m, b) for c, m, backends in DENSE for b in backends],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values())),
)
def test_dense(
    monkeypatch: pytest.MonkeyPatch, backend: str, changes: dict[str, Any], means: dict[str, Any], form: str
) -> None:
    package = install(monkeypatch, backend)
    q, k, v = tensors(2, 5, skv=7)
    slopes = torch.rand(HEADS) if means.get("slopes") else None
    wanted = torch.stack([reference(*one, SCALE, **{**means, "slopes": slopes}) for one in zip(q, k, v, strict=True)])
    if form == "sbhd":
        q, k, v, wanted = (t.transpose(0, 1) for t in (q, k, v, wanted))
    plan = plan_for(backend, q, k, form=form, kv_form=form, **changes)
    out, largest = flash.run(plan, AttentionInputs(q, k, v, slopes=slopes))
    assert largest is None and out.shape == (*q.shape[:2], HEADS * WIDTH)
    assert snr_db(out, wanted.flatten(-2)) > 100
    assert package.seen[0]["softmax_scale"] == SCALE


def test_packed_keys_with_lengths_in_another_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing but FlashAttention is left, which is causal from the bottom right alone, equal lengths are seen."""
    package = install(monkeypatch, FLASH2)
    monkeypatch.setattr(choose, "installed", lambda: Installed(flash2=(2, 8)))
    monkeypatch.setattr("te_torch.attention.plan.device_info", lambda device: H200)
    options: dict[str, Any] = {"num_gqa_groups": GROUPS, "qkv_format": "thd", "attn_mask_type": "padding_causal"}
    module, (q, k, v) = DotProductAttention(HEADS, WIDTH, **options), (t.bfloat16() for t in tensors(12))
    kv = torch.stack((k, v), 1)  # thd_t2hd
    sums = [torch.tensor(n, dtype=torch.int32) for n in ([0, 5, 12], [0, 5, 12], [0, 6, 12])]
    longest = {"max_seqlen_q": 7, "max_seqlen_kv": 7}
    for name in ("NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "0")
    out = module(q, *kv.unbind(1), cu_seqlens_q=sums[0], cu_seqlens_kv=sums[1], **longest)
    parts = [reference(*(t[a:b] for t in (q, k, v)), SCALE, right=0) for a, b in ((0, 5), (5, 12))]
    assert len(package.seen) == 1 and snr_db(out, torch.cat(parts).flatten(-2)) > DB["bf16"]
    with pytest.raises(choose.NoBackendError, match="q and k differ in length"):
        module(q, *kv.unbind(1), cu_seqlens_q=sums[0], cu_seqlens_kv=sums[2], **longest)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "1")
    module(q, k, v, cu_seqlens_q=sums[0], cu_seqlens_kv=sums[1], **longest)
    assert len(package.seen) == 1, "elsewhere nobody waits for lengths"


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("mask", ["padding", "padding_causal_bottom_right"])
@pytest.mark.parametrize("backend", PACKAGES)
def test_packed(monkeypatch: pytest.MonkeyPatch, backend: str, mask: str, gaps: bool) -> None:
    if gaps and backend != FLASH3:
        return
    package = install(monkeypatch, backend)
    q, k, v = (t.requires_grad_() for t in tensors(12))
    cu_q, cu_kv = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 8], [0, 4, 5, 10]))
    places = [cu + torch.tensor([0, 1, 1, 2], dtype=torch.int32) if gaps else cu for cu in (cu_q, cu_kv)]
    plan = plan_for(
        backend, q, k, form="thd", kv_form="thd", mask_type=mask, cu=SumsFact(4, False, gaps, True), max_q=5, max_kv=5
    )
    padded = {"cu_q_padded": places[0], "cu_kv_padded": places[1]} if gaps else {}
    out, _ = flash.run(plan, AttentionInputs(q, k, v, cu_q=cu_q, cu_kv=cu_kv, **padded))
    for i in range(3):
        (a, m), (b, n) = ((int(at[i]), int(cu[i + 1] - cu[i])) for at, cu in zip(places, (cu_q, cu_kv), strict=True))
        if m:
            right = 0 if "causal" in mask else -1
            wanted = reference(q[a : a + m], k[b : b + n], v[b : b + n], SCALE, right=right)
            assert snr_db(out[a : a + m], wanted.flatten(-2)) > 100
    out.sum().backward()
    for t, at, cu in ((out, 0, cu_q), (q.grad, 0, cu_q), (k.grad, 1, cu_kv), (v.grad, 1, cu_kv)):
        loose = outside(places[at], cu[1:] - cu[:-1], 12)
        assert t is not None and len(loose) and not t[loose].any() and t.isfinite().all()
    if backend != FLASH4:
        assert (package.seen[0]["max_seqlen_q"], package.seen[0]["max_seqlen_k"]) == (5, 5)


def test_flash2_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that a version does not have yet is not passed."""
    package = install(monkeypatch, FLASH2)
    q, k, v = tensors(2, 5)
    for version, has in (
        ((2, 2), set()),
        ((2, 3), {"window_size"}),
        ((2, 4), {"window_size", "alibi_slopes"}),
        ((2, 5), {"window_size", "alibi_slopes", "deterministic"}),
        ((2, 6), {"window_size", "alibi_slopes", "deterministic", "softcap"}),
    ):
        plan = plan_for(
            FLASH2, q, k, form="bshd", kv_form="bshd", mask_type="no_mask", installed=Installed(flash2=version)
        )
        flash.run(plan, AttentionInputs(q, k, v))
        assert set(package.seen[-1]) - {"q", "k", "v", "dropout_p", "softmax_scale", "causal"} == has


# ---------------------------------------------------------------------- NVTE_FUSED_ATTN_USE_FAv2_BWD


def fake_backward(seen: list[Any]) -> Any:
    """flash-attn 2's backward from the formula: P comes from the statistics of the other forward."""

    def backward(*tensors: Any, **options: Any) -> None:
        dout, q, k, v, out, lse, dq, dk, dv = tensors
        names = (
            "dropout_p",
            "softmax_scale",
            "causal",
            "window_size_left",
            "window_size_right",
            "softcap",
            "alibi_slopes",
            "deterministic",
        )
        assert set(options) == set(names) and options["dropout_p"] == 0
        causal, softmax_scale = options["causal"], options["softmax_scale"]
        seen.append((causal, options["window_size_left"], options["window_size_right"]))
        times = q.shape[2] // k.shape[2]
        keys, values = (t.repeat_interleave(times, 2).double() for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), keys) * softmax_scale
        p = torch.exp(scores - lse.double()[..., None])
        if causal:
            p = p.tril(k.shape[1] - q.shape[1])
        grad, result = dout.double(), out.double()
        dp = torch.einsum("bqhd,bkhd->bhqk", grad, values)
        ds = p * (dp - (grad * result).sum(-1).transpose(1, 2)[..., None]) * softmax_scale
        dq.copy_(torch.einsum("bhqk,bkhd->bqhd", ds, keys))
        for target, found in (
            (dk, torch.einsum("bhqk,bqhd->bkhd", ds, q.double())),
            (dv, torch.einsum("bhqk,bqhd->bkhd", p, grad)),
        ):
            target.copy_(found.unflatten(2, (-1, times)).sum(3))

    return backward


@pytest.mark.parametrize("form", ["bshd", "sbhd"])
def test_backward_of_flash2_after_a_fused_forward(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    seen: list[Any] = []
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_backward = fake_backward(seen)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    monkeypatch.setattr(flash, "takes_backward", lambda plan: True)
    module = DotProductAttention(HEADS, WIDTH, GROUPS, qkv_format=form, attn_mask_type="causal_bottom_right")
    values = tensors(2, 5, skv=7)
    if form == "sbhd":
        values = tuple(t.transpose(0, 1) for t in values)
    leaves = [t.clone().requires_grad_() for t in values]
    out = module(*leaves)
    dy = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, dy)
    assert seen == [(True, -1, 0)]
    monkeypatch.setattr(flash, "takes_backward", lambda plan: False)
    leaves = [t.clone().requires_grad_() for t in values]
    plain = DotProductAttention(HEADS, WIDTH, GROUPS, qkv_format=form, attn_mask_type="causal_bottom_right")
    for a, b in zip(got, torch.autograd.grad(plain(*leaves), leaves, dy), strict=True):
        assert snr_db(a, b) > 100


def test_where_the_backward_of_flash2_applies() -> None:
    q, k, _ = tensors(2, 5)
    plan = plan_for(FLASH2, q, k, form="bshd", kv_form="bshd", mask_type="no_mask")
    wanted = replace(
        plan.request, device=H200, dtype=choose.dtypes.bfloat16, switches=env.Switches(flash2_backward=True)
    )
    needs = replace(plan.layer, needs=plan.layer.needs._replace(q=True))
    plan.request, plan.layer = wanted, needs
    assert flash.takes_backward(plan)
    for change in (
        {"switches": env.Switches()},
        {"installed": Installed(flash2=(2, 6))},
        {"installed": Installed()},
        {"dtype": choose.dtypes.float32},
        {"spec": replace(plan.spec, softmax="off-by-one")},
    ):
        plan.request = replace(wanted, **change)
        assert not flash.takes_backward(plan), change
    plan.request, plan.layer = wanted, replace(needs, needs=needs.needs._replace(q=False))
    assert not flash.takes_backward(plan)


# ------------------------------------------------------------------------------------------- torch's own kernels


@requires_cuda
@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("mask", ["no_mask", "causal_bottom_right", "causal_bottom_right window", "no_mask window"])
def test_torchs_flash_kernel(monkeypatch: pytest.MonkeyPatch, form: str, mask: str) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    name, _, windowed = mask.partition(" ")
    window = None if not windowed else (16, 0) if "causal" in name else (16, 8)
    left, right = window or (-1, 0 if "causal" in name else -1)
    name = f"padding_{name}".replace("padding_no_mask", "padding") if form == "thd" else name
    options: dict[str, Any] = {}
    if form == "thd":
        cu = torch.tensor([0, 60, 60, 160], dtype=torch.int32, device="cuda")
        options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 128, "max_seqlen_kv": 128}
        lead: tuple[int, ...] = (160,)
    else:
        lead = (2, 80) if form == "bshd" else (80, 2)
    torch.manual_seed(0)
    leaves = [torch.randn(*lead, h, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (4, 2, 2)]
    module = DotProductAttention(4, 64, 2, qkv_format=form, attn_mask_type=name, window_size=window)
    assert module.explain(*leaves, **options).backend == FLASH_TORCH
    out = module(*leaves, **options)
    dy = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dy)

    exact = [t.detach().double().requires_grad_() for t in leaves]
    ones = [t.split([60, 100]) if form == "thd" else t.unbind(1 if form == "sbhd" else 0) for t in exact]
    parts = [reference(*one, 64**-0.5, left, right) for one in zip(*ones, strict=True)]
    wanted = torch.cat(parts) if form == "thd" else torch.stack(parts, 1 if form == "sbhd" else 0)
    wanted = wanted.flatten(-2)
    assert snr_db(out, wanted) > DB["bf16"]
    for a, b in zip(grads, torch.autograd.grad(wanted, exact, dy.double()), strict=True):
        assert snr_db(a, b) > DB["bf16"]


@requires_cuda
def test_tokens_of_no_sequence_are_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernels leave them as memory was: here it was NaN, which a cast's maximum would spread over all rows."""
    for name in ("NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "0")
    cu = torch.tensor([0, 60, 60, 90], dtype=torch.int32, device="cuda")
    torch.manual_seed(0)
    leaves = [torch.randn(160, h, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (4, 2, 2)]
    module = DotProductAttention(4, 64, 2, qkv_format="thd", attn_mask_type="padding_causal")
    options: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 64, "max_seqlen_kv": 64}
    assert module.explain(*leaves, **options).backend == FLASH_TORCH
    dy = torch.randn(160, 256, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        waste = [torch.full((160, h * 64), math.nan, device="cuda", dtype=torch.bfloat16) for h in (4, 4, 4, 2, 2, 2)]
        del waste
        out = module(*leaves, **options)
        waste = [torch.full((160, h * 64), math.nan, device="cuda", dtype=torch.bfloat16) for h in (4, 4, 4, 2, 2, 2)]
        del waste
        for t in (out, *torch.autograd.grad(out, leaves, dy)):
            assert t[:90].isfinite().all() and t[:90].any() and not t[90:].any()
