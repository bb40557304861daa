"""The table of attention: DotProductAttention's public options pairwise, on each family of backends, against float64.

A backend that cannot compute a combination has to name its reason; the combinations that it must be able to compute
are listed. Behind the table: what the peer's two backends gave (tests/data/README.md), and when bits have to be equal.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_torch as te
from te_core.attention import alibi_slopes
from tests.backends import devices
from tests.core import attention_cases as cases
from tests.core.attention_cases import FAMILIES, HEADS, SEQUENCES, Place, only, place
from tests.golden import load
from tests.reference import attention as reference
from tests.tolerances import DB, snr_db
from tests.world import on, values

DEVICES = devices()
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {
    "flash": "FlashAttention",
    "fused": "FusedAttention",
    "unfused": "UnfusedDotProductAttention",
    "plain torch": "UnfusedDotProductAttention",
}

OPTIONS: dict[str, tuple[Any, ...]] = {
    "dtype": ("fp32", "bf16", "fp16"),
    "format": ("sbhd", "bshd", "thd", "thd_gaps"),
    "packing": ("separate", "qkv-3", "qkv-2", "kv-3", "kv-2"),
    "mask": (
        "no_mask",
        "padding",
        "causal",
        "padding_causal",
        "padding,causal",
        "causal_bottom_right",
        "padding_causal_bottom_right",
        "arbitrary",
    ),
    "lengths_as": ("mask", "cu_seqlens"),
    "window": (None, (6, 0), (5, 3)),
    "corner": (None, True, False),
    "shared": (1, 2, HEADS),
    "bias": (
        "no_bias",
        "pre_scale_bias 1hss",
        "post_scale_bias 11ss",
        "post_scale_bias 1hss",
        "post_scale_bias b1ss",
        "post_scale_bias bhss",
        "post_scale_bias 111s",
        "alibi",
        "alibi h",
        "alibi bh",
    ),
    "softmax": ("vanilla", "off-by-one", "learnable"),
    "dims": ((32, 32), (64, 64), (40, 72), (128, 128), (192, 128)),
    "lengths": ("odd", "cross", "tall", "one", "tiles", "empty"),
    "scale": (None, 0.3),
    "softcap": (0.0, 2.0),
    "max_logit": (False, True),
    "checkpoint": (False, True),
    "told": ("constructor", "forward"),
}


@dataclass(frozen=True)
class Use:
    """One value of each option."""

    dtype: str = "bf16"
    format: str = "bshd"
    packing: str = "separate"
    mask: str = "no_mask"
    lengths_as: str = "cu_seqlens"
    window: tuple[int, int] | None = None
    corner: bool | None = None
    shared: int = 1
    bias: str = "no_bias"
    softmax: str = "vanilla"
    dims: tuple[int, int] = (64, 64)
    lengths: str = "odd"
    scale: float | None = None
    softcap: float = 0.0
    max_logit: bool = False
    checkpoint: bool = False
    told: str = "constructor"

    def __str__(self) -> str:
        named = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(named).replace(" ", "") or "defaults"

    @property
    def form(self) -> str:
        return self.format.removesuffix("_gaps")

    @property
    def causal(self) -> bool:
        return "causal" in self.mask

    @property
    def padded(self) -> bool:
        return "padding" in self.mask


def possible(u: Use) -> bool:
    """Whether the options go together at all, by the documentation."""
    return (
        (u.form != "thd" or (u.padded and u.lengths_as == "cu_seqlens"))
        and (u.padded or u.lengths != "empty")
        and (u.packing == "separate" or u.dims[0] == u.dims[1])
        and not (u.packing.startswith("qkv") and (u.shared > 1 or not SEQUENCES[u.lengths].square))
        and not (u.mask.endswith("bottom_right") and u.corner is False)
        and not (u.mask in ("causal", "padding_causal", "padding,causal") and u.corner is True)
    )


PAIRS = [Use(**row) for row in cases.covering(OPTIONS, lambda row: possible(Use(**row)))]
#: Each with one of the families, and with all of them by `--full`.
TRIED = [
    pytest.param(use, family, id=f"{use}-{family}", marks=[] if (i - j) % len(FAMILIES) == 0 else [pytest.mark.full])
    for i, use in enumerate(PAIRS)
    for j, family in enumerate(FAMILIES)
]


class Prepared:
    """The module, its arguments and leaves, and the same problem for the reference."""

    def __init__(self, u: Use, device: str) -> None:
        self.u, self.device = u, device
        self.random = np.random.default_rng(zlib.crc32(str(u).encode()))
        s = SEQUENCES[u.lengths]
        self.s, self.batch = s, len(s.len_q)
        len_q, len_kv = (s.len_q, s.len_kv) if u.padded else ((s.sq,) * self.batch, (s.skv,) * self.batch)
        gaps = u.format == "thd_gaps"
        self.q_place, self.kv_place = place(u.form, s.sq, len_q, gaps), place(u.form, s.skv, len_kv, gaps)
        d_qk, d_v = u.dims
        self.q = self._leaf(self.q_place, HEADS, d_qk)
        self.k, self.v = (self._leaf(self.kv_place, HEADS // u.shared, d) for d in (d_qk, d_v))
        self.bias: torch.Tensor | None = None
        self.problem: dict[str, Any] = {}
        self.told: dict[str, Any] = {"attn_mask_type": u.mask, "qkv_format": u.form}
        self.told |= {"window_size": u.window, "bottom_right_diagonal": u.corner}
        self.options: dict[str, Any] = {"checkpoint_core_attention": u.checkpoint}
        self._seen()
        self._bias()
        self.module = te.DotProductAttention(
            HEADS,
            d_qk if d_qk == d_v else u.dims,
            num_gqa_groups=HEADS // u.shared,
            softmax_scale=u.scale,
            softmax_type=u.softmax,
            logit_softcap=u.softcap,
            return_max_logit=u.max_logit,
            **(self.told if u.told == "constructor" else {"attn_mask_type": "no_mask"}),
        ).to(device)
        if u.told == "forward":
            self.options |= self.told
        if u.softmax == "learnable":
            with torch.no_grad():
                self.module.softmax_offset.copy_(torch.from_numpy(self.random.standard_normal(HEADS)))
            self.problem["sink"] = self.module.softmax_offset.detach().cpu().numpy()

    def _leaf(self, at: Place, heads: int, d: int) -> torch.Tensor:
        values = torch.from_numpy(self.random.standard_normal(at.shape(heads, d)))
        return values.to(self.device, TORCH[self.u.dtype]).requires_grad_()

    def _seen(self) -> None:
        """What a query sees, as the documentation has it."""
        u, s = self.u, self.s
        left, right = u.window or (-1, -1)
        self.problem |= {"left": left, "right": 0 if u.causal else right}
        corner = True if u.corner is None else u.corner
        if u.causal:
            corner = u.mask.endswith("bottom_right")
        self.problem["bottom_right"] = corner
        if u.mask == "arbitrary":
            shape = ((1, 1), (self.batch, 1), (self.batch, HEADS))[s.sq % 3]
            mask = self.random.random((*shape, s.sq, s.skv)) < 0.4
            self.options["attention_mask"] = torch.from_numpy(mask).to(self.device)
            self.problem["mask"] = mask
        if not u.padded:
            return
        self.problem |= {"len_q": self.q_place.lengths, "len_kv": self.kv_place.lengths}
        if u.lengths_as == "mask":
            masks = [
                torch.arange(at.longest) >= torch.from_numpy(at.lengths)[:, None, None, None]
                for at in (self.q_place, self.kv_place)
            ]
            masks = [m.to(self.device) for m in masks]
            self.options["attention_mask"] = masks[0] if s.square else tuple(masks)
            return
        for which, at in (("q", self.q_place), ("kv", self.kv_place)):
            running = torch.tensor([0, *np.cumsum(at.lengths)], dtype=torch.int32, device=self.device)
            self.options[f"cu_seqlens_{which}"] = running
            self.options[f"max_seqlen_{which}"] = at.longest
            if u.format == "thd_gaps":
                begins = torch.tensor([*at.starts, at.total], dtype=torch.int32, device=self.device)
                self.options[f"cu_seqlens_{which}_padded"] = begins

    def _bias(self) -> None:
        u, s = self.u, self.s
        kind, _, shape = u.bias.partition(" ")
        if kind == "no_bias":
            return
        self.options["core_attention_bias_type"] = kind
        if kind == "alibi":
            slopes = np.array(alibi_slopes(HEADS), np.float32)
            if shape:
                sizes = (HEADS,) if shape == "h" else (self.batch, HEADS)
                slopes = self.random.uniform(0.02, 0.4, sizes).astype(np.float32)
                self.options["alibi_slopes"] = torch.from_numpy(slopes).to(self.device)
            self.problem["slopes"] = slopes
            return
        named = {"1": 1, "b": self.batch, "h": HEADS}
        sizes = (named[shape[0]], named[shape[1]], 1 if shape[2] == "1" else s.sq, s.skv)
        values = torch.from_numpy(self.random.standard_normal(sizes)).to(self.device, TORCH[u.dtype])
        self.bias = self.options["core_attention_bias"] = values.requires_grad_()

    def run(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Forward and backward of a random gradient."""
        u = self.u
        if u.packing == "separate":
            inputs: dict[str, Any] = {"query_layer": self.q, "key_layer": self.k, "value_layer": self.v}
        else:
            dim = int(u.packing[-2:])
            inputs = {"qkv_interleave_dim": dim}
            if u.packing.startswith("qkv"):
                inputs["qkv_layer"] = torch.stack((self.q, self.k, self.v), dim)
            else:
                inputs |= {"query_layer": self.q, "kv_layer": torch.stack((self.k, self.v), dim)}
        result = self.module(**inputs, **self.options)
        y, largest = result if u.max_logit else (result, None)
        dy = self.random.standard_normal(self.q_place.shape(HEADS, u.dims[1]))
        self.dy = torch.from_numpy(dy).to(self.device, TORCH[u.dtype])
        assert y.shape == self.dy.flatten(-2).shape and y.dtype == self.dy.dtype
        y.backward(self.dy.flatten(-2))
        return y, largest

    def judge(self, y: torch.Tensor, largest: torch.Tensor | None) -> None:
        """Everything against float64."""
        u = self.u
        scale = u.dims[0] ** -0.5 if u.scale is None else u.scale
        times = scale if u.bias.startswith("pre") else 1.0
        bias = None if self.bias is None else _numpy(self.bias) * times
        p = reference.Problem(scale, softmax=u.softmax, softcap=u.softcap, bias=bias, **self.problem)
        operands = [
            at.canonical(_numpy(t))
            for at, t in zip((self.q_place, self.kv_place, self.kv_place), (self.q, self.k, self.v), strict=True)
        ]
        dy = self.q_place.canonical(_numpy(self.dy))
        want = reference.forward(*operands, p)
        full, plain = (reference.backward(dy, *operands, p, centred=centred) for centred in (True, False))
        floor = DB[u.dtype]
        if u.softcap and u.dtype == "fp16" and self.device == "cuda":
            floor = DB["bf16"]  # cuDNN's is the hardware's tanh, of 11 bits
        close("y", _numpy(y), self.q_place.native(want.out).reshape(y.shape), 0.0, floor)
        for name, at in (("q", self.q_place), ("k", self.kv_place), ("v", self.kv_place)):
            grad, size = getattr(full, f"d{name}"), np.square(getattr(plain, f"d{name}")).sum()
            close(f"d{name}", _numpy(getattr(self, name).grad), at.native(grad), size, floor)
        if self.bias is not None:
            close("dbias", _numpy(self.bias.grad), full.dbias * times, np.square(plain.dbias * times).sum(), floor)
        if u.softmax == "learnable":
            close("dsink", _numpy(self.module.softmax_offset.grad), full.dsink, full.sink_terms, floor)
        if u.max_logit:
            assert largest is not None
            close("max_logit", _numpy(largest), want.max_logit, 0.0, floor)


def _numpy(t: torch.Tensor) -> Any:
    return t.detach().double().cpu().numpy()


def close(name: str, got: Any, want: Any, size: float, floor: float) -> None:
    """The error is `floor` dB below `want`, or below `size` where want is what is left of larger terms."""
    assert got.shape == want.shape and np.isfinite(got).all(), name
    noise, signal = np.square(got - want).sum(), max(np.square(want).sum(), size)
    assert noise <= signal * 10 ** (-floor / 10), f"{name}: {10 * np.log10(signal / noise):.1f} dB of {floor}"


def run_or_reason(prepared: Prepared, family: str) -> str | None:
    """None after a judged run, else why the family cannot."""
    try:
        results = prepared.run()
    except ValueError as e:
        text = str(e)
        assert "No dot product attention backend is available" in text, text
        found = re.findall(rf"(?<!\w){NAMES[family]}[^:;]*: ([^;]*)", text)
        assert found and all(reason and "NVTE_" not in reason for reason in found), text
        return "; ".join(found)
    prepared.judge(*results)
    return None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("use", "family"), TRIED)
def test_pairs(monkeypatch, use, family, device):
    """Right on every family, or refused with its reason; what runs on the CPU takes everything there."""
    only(monkeypatch, family)
    reason = run_or_reason(Prepared(use, device), family)
    if family in ("unfused", "plain torch") or (family == "fused" and device == "cpu"):
        assert reason is None
    elif family == "flash" and device == "cpu":
        assert reason and "GPU" in reason
    elif reason is not None:
        print(f"{family} refuses {use}: {reason}")
        assert documented(use, family), f"{use}: {reason}"


def documented(u: Use, family: str) -> bool:
    """Whether anything in this use is beyond what the family is documented to do."""
    s = SEQUENCES[u.lengths]
    common = u.dtype == "fp32" or u.mask == "arbitrary" or u.bias.startswith("pre") or u.softcap > 0
    if family == "fused":
        return common or (
            u.dims[0] != u.dims[1]
            or u.softmax != "vanilla"
            or u.max_logit
            or u.bias != "no_bias"
            or (u.window is not None and s.sq > s.skv)
            or (u.corner is True and not s.square)
            or (u.window is not None and not s.square)
            or (u.mask.endswith("bottom_right") and s.sq > s.skv)
            or (u.window is not None and not u.causal)
        )
    corner = not s.square and (u.causal or u.window is not None)
    return common or (
        u.bias != "no_bias"
        or u.softmax != "vanilla"
        or u.max_logit
        or u.dims[0] != u.dims[1]
        or corner
        or u.format == "thd_gaps"
        or (u.padded and u.form != "thd")
        or u.window is not None
    )


#: The corner of the diagonal shows whose mask the keys' lengths are of.
OF_TWO_MASKS = Use(mask="padding_causal_bottom_right", lengths_as="mask", lengths="cross")


#: What training code is made of: never refused by cuDNN on a GPU that it supports.
ESSENTIAL = [
    *(
        Use(format=f, mask=m, lengths=n)
        for f in ("sbhd", "bshd")
        for m in ("no_mask", "causal", "padding_causal")
        for n in ("odd", "tiles")
    ),
    *(Use(format="thd", mask=m, lengths="tiles") for m in ("padding", "padding_causal")),
    *(Use(mask="causal", packing=p) for p in OPTIONS["packing"]),
    *(Use(mask="causal", shared=n) for n in (2, 4)),
    *(Use(mask="causal", dims=(n, n)) for n in (32, 128)),
    Use(mask="causal", dtype="fp16"),
    Use(mask="causal", window=(6, 0)),
    Use(mask="causal_bottom_right", lengths="cross"),
    Use(bias="post_scale_bias 1hss"),
    Use(mask="causal", bias="alibi"),
    Use(mask="causal", dims=(192, 128)),
    Use(mask="causal", softmax="learnable"),
    Use(mask="causal", softmax="off-by-one"),
    OF_TWO_MASKS,
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use", ESSENTIAL, ids=str)
def test_essential(monkeypatch, use, device):
    """Fused attention does it."""
    only(monkeypatch, "fused")
    assert run_or_reason(Prepared(use, device), "fused") is None


PLAIN = [
    Use(mask=m, dims=d, dtype=t)
    for m in ("no_mask", "causal")
    for d in ((64, 64), (128, 128))
    for t in ("bf16", "fp16")
]


@pytest.mark.parametrize("use", [*PLAIN, Use(format="sbhd", mask="causal", shared=2)], ids=str)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_flash_does_the_plain_ones(monkeypatch, use, device):
    """On a GPU the kernel that comes with torch does, where no flash-attn is installed."""
    only(monkeypatch, "flash")
    assert run_or_reason(Prepared(use, device), "flash") is None


# ------------------------------------------------------------------------------------------------ the peer

GOLDEN = sorted(tuple(k.split("/")[:2]) for k in load("attention") if k.endswith("/y"))
GRADIENTS = ("dq", "dk", "dv")

#: What the peer's module was told in each case.
PEERS: dict[str, dict[str, Any]] = {
    "no_mask": {"attn_mask_type": "no_mask"},
    "causal": {},
    "causal_bottom_right": {"attn_mask_type": "causal_bottom_right"},
    "causal_window": {"window_size": (5, 0)},
    "padding": {"attn_mask_type": "padding"},
    "padding_causal": {"attn_mask_type": "padding_causal"},
    "arbitrary": {"attn_mask_type": "arbitrary"},
    "off_by_one": {"softmax_type": "off-by-one"},
    "learnable": {"softmax_type": "learnable"},
    "alibi": {},
    "post_scale_bias": {"attn_mask_type": "no_mask"},
    "pre_scale_bias": {"attn_mask_type": "no_mask"},
}


def operands(case: str, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    golden = load("attention")
    q, k, v = (golden[n].to(device) for n in "qkv")
    return (q[:, -7:] if case == "causal_bottom_right" else q), k, v


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["fused", "unfused", "plain torch"])
@pytest.mark.parametrize(("theirs", "case"), GOLDEN)
def test_the_peers_results(monkeypatch, theirs, case, family, device):
    """Output and gradients, each of our backends against each of the peer's."""
    only(monkeypatch, family)
    golden = load("attention")
    module = te.DotProductAttention(4, 32, num_gqa_groups=2, qkv_format="bshd", **PEERS[case]).to(device)
    if case == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(golden["learnable/offset"])
    options: dict[str, Any] = {}
    if case.startswith("padding"):
        options["attention_mask"] = golden["padding_mask"].to(device)
    elif case == "arbitrary":
        options["attention_mask"] = golden["arbitrary_mask"].to(device)
    elif case.endswith("bias"):
        options |= {"core_attention_bias_type": case, "core_attention_bias": golden["bias"].to(device)}
    elif case == "alibi":
        options["core_attention_bias_type"] = "alibi"
    leaves = [t.clone().requires_grad_() for t in operands(case, device)]
    if device == "cuda" and family == "fused" and case == "arbitrary":
        with pytest.raises(ValueError, match="FusedAttention: .*arbitrary mask"):
            module(*leaves, **options)
        return
    y = module(*leaves, **options)
    y.backward(torch.ones_like(y))
    for key, value in zip(("y", *GRADIENTS), (y, *(t.grad for t in leaves)), strict=True):
        got = snr_db(value, golden[f"{theirs}/{case}/{key}"])
        assert got >= DB["bf16"], f"{key}: {got:.1f} dB"


# ------------------------------------------------------------------------------------------------ equal bits

B, S, H, G, D = 3, 40, 4, 2, 64
LENGTHS = (40, 17, 29)
families = pytest.mark.parametrize("family", ["fused", "unfused", "plain torch"])


def attention(monkeypatch: Any, family: str, device: str, **options: Any) -> te.DotProductAttention:
    """Of one family, and deterministic, so that bits can be compared."""
    only(monkeypatch, family)
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    options = {"num_gqa_groups": G, "attn_mask_type": "causal", **options}
    return te.DotProductAttention(H, D, qkv_format="bshd", **options).to(device)


def rows(device: str, *lead: int) -> list[torch.Tensor]:
    lead = lead or (B, S)
    return [values(*lead, h, D, device=device, dtype=torch.bfloat16, seed=i) for i, h in enumerate((H, G, G))]


def run(module: Any, tensors: list[torch.Tensor], dy: torch.Tensor | None = None, **options: Any) -> list[torch.Tensor]:
    """y, dq, dk and dv; torch's generators begin alike."""
    torch.manual_seed(1234)
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = module(*leaves, **options)
    y.backward(values(*y.shape, device=str(y.device), dtype=y.dtype, seed=9) if dy is None else dy)
    found = [y.detach(), *(t.grad for t in leaves)]
    on(str(tensors[0].device.type), *found)
    return found


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@families
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, (7, 0)])
def test_the_past_does_not_know_the_future(monkeypatch, device, window, family):
    """Keys and values behind a query, or before its window, change no bit of it, nor does its gradient reach them."""
    module, cut = attention(monkeypatch, family, device, window_size=window), 23
    q, k, v = rows(device)
    k2, v2 = (torch.cat((t[:, :cut], 3 * t[:, cut:].flip(1) + 1), 1) for t in (k, v))
    dy = values(B, S, H * D, device=device, dtype=q.dtype, seed=9)
    dy[:, cut:] = 0
    first, second = run(module, [q, k, v], dy), run(module, [q, k2, v2], dy)
    assert equal([t[:, :cut] for t in first], [t[:, :cut] for t in second])
    assert not torch.equal(first[0][:, cut:], second[0][:, cut:])
    assert not any(t[:, cut:].any() for grads in (first, second) for t in grads[1:])
    if window:
        old = run(module, [q, *(torch.cat((t[:, :10] + 1, t[:, 10:]), 1) for t in (k, v))])
        assert torch.equal(old[0][:, 17:], run(module, [q, k, v])[0][:, 17:])


@families
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_padding_takes_no_part(monkeypatch, device, mask, family):
    """Whatever stands in the padding, also of dy: the same bits elsewhere, zeros there."""
    module = attention(monkeypatch, family, device, attn_mask_type=mask)
    inside = torch.arange(S, device=device) < torch.tensor(LENGTHS, device=device)[:, None]
    cu = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32, device=device)
    padded = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    dy = values(B, S, H * D, device=device, dtype=torch.bfloat16, seed=9)
    plain = rows(device)
    other = [torch.where(inside[:, :, None, None], t, 5 * t + 2) for t in plain]
    first = run(module, plain, dy, **padded)
    assert equal(first, run(module, other, torch.where(inside[:, :, None], dy, -3 * dy + 1), **padded))
    assert all((t[~inside] == 0).all() for t in first)


@families
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["checkpoint_core_attention", "torch", "torch reentrant"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_recomputation(monkeypatch, device, how, p, family):
    """A recomputed attention drops the same weights: equal bits."""
    module, tensors = attention(monkeypatch, family, device, attention_dropout=p), rows(device)
    first = run(module, tensors)
    if how == "checkpoint_core_attention":
        second = run(module, tensors, checkpoint_core_attention=True)
    else:
        second = run(lambda *leaves: checkpoint(module, *leaves, use_reentrant="reentrant" in how), tensors)
    assert equal(first, second) and equal(first, run(module, tensors))


@families
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_dropout_by_its_own_mask(monkeypatch, device, mask, family):
    """Identities as values show which weights are dropped; forward and backward are right for these."""
    p = 0.3
    module = attention(monkeypatch, family, device, attn_mask_type=mask, attention_dropout=p, num_gqa_groups=H)
    tensors = [values(B, D, H, D, device=device, dtype=torch.bfloat16, seed=i) for i in range(3)]
    eye = torch.eye(D, dtype=torch.bfloat16, device=device)[None, :, None].expand(B, D, H, D).contiguous()
    shown = run(module, [*tensors[:2], eye])[0].unflatten(-1, (H, D))
    dy = values(B, D, H * D, device=device, dtype=torch.bfloat16, seed=9)
    found = run(module, tensors, dy)
    q, k, v, dy = (_numpy(t).transpose(0, 2, 1, 3) for t in (*tensors, dy.unflatten(-1, (H, D))))
    keep = (shown != 0).permute(0, 2, 1, 3).cpu().numpy()
    problem = reference.Problem(D**-0.5, right=0 if mask == "causal" else -1, keep=keep, p=p)
    wanted = (reference.forward(q, k, v, problem).out, *reference.backward(dy, q, k, v, problem)[:3])
    for name, a, b in zip(("y", "dq", "dk", "dv"), found, wanted, strict=True):
        got = snr_db(a, b.transpose(0, 2, 1, 3).reshape(a.shape))
        assert got >= DB["bf16"], f"{name}: {got:.1f} dB"


@families
@pytest.mark.parametrize("device", DEVICES)
def test_repeated(monkeypatch, device, family):
    """Equal inputs give equal bits, time and again, over several tiles; also where the largest logits come along."""
    module, tensors = attention(monkeypatch, family, device), rows(device, 2, 515)
    first = run(module, tensors)
    assert all(equal(first, run(module, tensors)) for _ in range(4))
    assert torch.equal(attention(monkeypatch, family, device, return_max_logit=True)(*tensors)[0], first[0])
