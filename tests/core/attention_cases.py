"""The combinations that the attention tests go through, and what one of them is in memory.

A `Case` names a value of each factor. `make` turns it into tensors in its layout, the spec and terms of te_core.ops,
and the same problem for tests/reference/attention.py, from the values as the dtype holds them.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from te_core import device, dtypes, libraries
from te_core.attention import AttentionSpec, Lengths, Sizes, alibi_slopes
from te_core.attention_rules import cudnn_attention
from te_core.device import DeviceInfo
from te_core.ops.attention_terms import Terms
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.reference import attention as reference

Array = np.ndarray[Any, Any]

HEADS = 4
NUMPY = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}


class Sequences(NamedTuple):
    """The sizes of rows, and the actual lengths where they are given."""

    sq: int
    skv: int
    len_q: tuple[int, ...]
    len_kv: tuple[int, ...]

    @property
    def square(self) -> bool:
        return self.sq == self.skv and self.len_q == self.len_kv


SEQUENCES = {
    "odd": Sequences(33, 33, (33, 7, 20), (33, 7, 20)),
    "cross": Sequences(21, 37, (21, 9, 13), (37, 9, 30)),
    "tall": Sequences(37, 21, (37, 5, 21), (21, 5, 11)),
    "one": Sequences(1, 19, (1, 1, 1), (19, 1, 6)),
    "tiles": Sequences(130, 130, (130, 64, 129), (130, 64, 129)),
    "empty": Sequences(17, 17, (17, 0, 5), (17, 0, 5)),
    "no keys": Sequences(12, 16, (12, 3, 12), (9, 0, 16)),
}

#: left, right, bottom_right, whether lengths are given.
MASKS = {
    "none": (-1, -1, True, False),
    "padding": (-1, -1, True, True),
    "causal": (-1, 0, False, False),
    "padding_causal": (-1, 0, False, True),
    "causal_bottom_right": (-1, 0, True, False),
    "padding_causal_bottom_right": (-1, 0, True, True),
    "window_left": (6, 0, False, False),
    "window_left_bottom_right": (6, 0, True, False),
    "window_both": (5, 3, True, False),
    "window_both_top_left": (5, 3, False, False),
    "diagonal": (0, 0, True, False),
    "arbitrary": (-1, -1, True, False),
}

FACTORS: dict[str, Sequence[Any]] = {
    "dtype": ("fp32", "bf16", "fp16"),
    "layout": ("sbhd", "bshd", "thd", "thd_gaps", "thd_bshd", "sbhd_bshd"),
    "packing": ("separate", "kv2hd", "kvh2d", "qkv3hd", "qkvh3d"),
    "mask": tuple(MASKS),
    "shared": (1, 2, HEADS),  # query heads to a key head
    "bias": ("none", "11ss", "1hss", "b1ss", "bhss", "111s", "alibi", "alibi_h", "alibi_bh"),
    "softmax": ("vanilla", "off-by-one", "learnable"),
    "softcap": (0.0, 2.0),
    "dims": ((32, 32), (40, 40), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (64, 32), (40, 72)),
    "lengths": tuple(SEQUENCES),
    "max_logit": (False, True),
    "deterministic": (False, True),
}


@dataclass(frozen=True)
class Case:
    """One value of each factor."""

    dtype: str = "bf16"
    layout: str = "bshd"
    packing: str = "separate"
    mask: str = "none"
    shared: int = 1
    bias: str = "none"
    softmax: str = "vanilla"
    softcap: float = 0.0
    dims: tuple[int, int] = (32, 32)
    lengths: str = "odd"
    max_logit: bool = False
    deterministic: bool = False

    @property
    def padded(self) -> bool:
        return MASKS[self.mask][3] or "thd" in self.layout

    @property
    def formats(self) -> tuple[str, str]:
        """Of q, and of k and v."""
        return {"thd_gaps": ("thd", "thd"), "thd_bshd": ("thd", "bshd"), "sbhd_bshd": ("sbhd", "bshd")}.get(
            self.layout, (self.layout, self.layout)
        )

    def __str__(self) -> str:
        """What differs from the defaults: a test's id."""
        named = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(named).replace(" ", "") or "defaults"


def possible(c: Case) -> bool:
    """Whether tensors can lie like this at all; what a backend can do with them is another question."""
    together = c.packing.startswith("qkv")
    return (
        (c.packing == "separate" or c.dims[0] == c.dims[1])
        and not (together and (c.shared > 1 or c.formats[0] != c.formats[1] or not SEQUENCES[c.lengths].square))
        and (c.padded or c.lengths not in ("empty", "no keys"))
    )


def covering(
    factors: dict[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool], seed: int = 0, tries: int = 400
) -> list[dict[str, Any]]:
    """Rows such that each pair of values of two factors that some allowed row has stands in one of them.

    Greedy: each row begins with a pair that is still missing, and is the best of a few dozen drawn around it. A pair
    counts as impossible after so many tries: 400 find all pairs where one row in twenty is allowed.
    """
    draw = random.Random(seed)
    names = list(factors)
    missing = {
        ((a, x), (b, y)): None for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]
    }
    rows = []
    while missing:
        pair = next(iter(missing))
        best: tuple[int, dict[str, Any]] | None = None
        found = 0
        for _ in range(tries):
            row = {n: draw.choice(factors[n]) for n in names} | dict(pair)
            if not allowed(row):
                continue
            gain = sum(p in missing for p in itertools.combinations(row.items(), 2))
            if best is None or gain > best[0]:
                best = gain, row
            found += 1
            if found == 40:
                break
        if best is None:  # no row has this pair
            del missing[pair]
            continue
        rows.append(best[1])
        for p in itertools.combinations(best[1].items(), 2):
            missing.pop(p, None)
    return rows


def pairs(allowed: Callable[[Case], bool] | None = None) -> list[Case]:
    """Every pair of values of any two factors that some allowed case has."""
    tries = 400 if allowed is None else 3000  # what a backend takes may be one case in hundreds

    def able(row: dict[str, Any]) -> bool:
        case = Case(**row)
        return possible(case) and (allowed is None or allowed(case))

    return [Case(**row) for row in covering(FACTORS, able, tries=tries)]


PRODUCT = ("shared", "bias", "softmax", "softcap")


def product(layout: str, mask: str) -> list[Case]:
    """All combinations of what the formula depends on; how the tensors lie is drawn anew for each."""
    draw = random.Random(zlib.crc32(f"{layout} {mask}".encode()))
    drawn = [n for n in FACTORS if n not in (*PRODUCT, "layout", "mask")]
    cases = []
    for values in itertools.product(*(FACTORS[n] for n in PRODUCT)):
        fixed = dict(zip(PRODUCT, values, strict=True))
        while True:
            case = Case(layout=layout, mask=mask, **fixed, **{n: draw.choice(FACTORS[n]) for n in drawn})
            if possible(case):
                break
        cases.append(case)
    return cases


class Place(NamedTuple):
    """Where the tokens of one operand lie: its format and, in thd, where each sequence begins."""

    form: str
    longest: int
    lengths: Array
    starts: Array
    total: int

    def shape(self, heads: int, d: int) -> tuple[int, ...]:
        b = len(self.lengths)
        return {
            "sbhd": (self.longest, b, heads, d),
            "bshd": (b, self.longest, heads, d),
            "thd": (self.total, heads, d),
        }[self.form]

    def canonical(self, t: Array) -> Array:
        """[b, h, s, d] of a tensor in this format."""
        if self.form == "thd":
            return reference.unpack(t, self.starts, self.lengths, self.longest)
        return t.transpose((1, 2, 0, 3) if self.form == "sbhd" else (0, 2, 1, 3))

    def native(self, t: Array) -> Array:
        """The inverse of `canonical`; zeros between sequences."""
        if self.form == "thd":
            return reference.pack(t, self.starts, self.lengths, self.total)
        return t.transpose((2, 0, 1, 3) if self.form == "sbhd" else (0, 2, 1, 3))


class Made(NamedTuple):
    """A case in memory. q, k, v and dy are host arrays as the dtype holds them; `tensors` are q, k, v on the device."""

    spec: AttentionSpec
    terms: Terms
    problem: reference.Problem
    q_place: Place
    kv_place: Place
    q: Array
    k: Array
    v: Array
    dy: Array
    tensors: tuple[Tensor, Tensor, Tensor]

    def canonical(self) -> tuple[Array, Array, Array]:
        """q, k and v as the reference takes them."""
        return self.q_place.canonical(self.q), self.kv_place.canonical(self.k), self.kv_place.canonical(self.v)


def spec_of(c: Case, p: float = 0.0, sequences: Sequences | None = None) -> AttentionSpec:
    """The spec of a case."""
    s = sequences or SEQUENCES[c.lengths]
    left, right, bottom_right, _ = MASKS[c.mask]
    return AttentionSpec(
        scale=1.3 * c.dims[0] ** -0.5,
        q_format=c.formats[0],
        kv_format=c.formats[1],
        left=left,
        right=right,
        bottom_right=bottom_right,
        padded=c.padded,
        masked=c.mask == "arbitrary",
        bias="no_bias" if c.bias == "none" else "alibi" if c.bias.startswith("alibi") else "post_scale_bias",
        default_slopes=c.bias == "alibi",
        softmax=c.softmax,
        softcap=c.softcap,
        dropout=p,
        max_logit=c.max_logit,
        deterministic=c.deterministic,
        max_q=s.sq if c.formats[0] == "thd" else 0,
        max_kv=s.skv if c.formats[1] == "thd" else 0,
    )


def sizes_of(c: Case, sequences: Sequences | None = None) -> Sizes:
    """The sizes of a case."""
    s = sequences or SEQUENCES[c.lengths]
    return Sizes(len(s.len_q), s.sq, s.skv, HEADS, HEADS // c.shared, *c.dims)


def make(
    rt: Runtime, c: Case, *, p: float = 0.0, rng: tuple[int, int] = (11, 5), sequences: Sequences | None = None
) -> Made:
    """The case's tensors, from a seed that its name gives."""
    random_ = np.random.default_rng(zlib.crc32(str(c).encode()))
    s = sequences or SEQUENCES[c.lengths]
    batch, (d_qk, d_v), groups = len(s.len_q), c.dims, HEADS // c.shared
    len_q, len_kv = (s.len_q, s.len_kv) if c.padded else ((s.sq,) * batch, (s.skv,) * batch)
    gap = c.layout == "thd_gaps"
    q_place, kv_place = (
        place(form, n, ls, gap) for form, n, ls in zip(c.formats, (s.sq, s.skv), (len_q, len_kv), strict=True)
    )
    q, dy = (_values(random_, q_place, HEADS, d, c.dtype) for d in (d_qk, d_v))
    k, v = (_values(random_, kv_place, groups, d, c.dtype) for d in (d_qk, d_v))
    mask = None
    if c.mask == "arbitrary":
        mask = random_.random(((1, batch)[c.shared % 2], 1, s.sq, s.skv)) < 0.4
    bias, slopes = _bias(random_, c, batch, s)
    sink = random_.standard_normal(HEADS).astype(np.float32) if c.softmax == "learnable" else None
    spec = spec_of(c, p, s)
    problem = reference.Problem(
        scale=spec.scale,
        left=spec.left,
        right=spec.right,
        bottom_right=spec.bottom_right,
        len_q=np.array(len_q) if c.padded else None,
        len_kv=np.array(len_kv) if c.padded else None,
        mask=mask,
        bias=bias,
        slopes=slopes,
        softmax=c.softmax,
        sink=sink,
        softcap=c.softcap,
        p=p,
    )
    given = (mask.astype(np.uint8) if mask is not None else None, bias, slopes, sink)
    terms = Terms(
        _lengths(rt, c, q_place, kv_place),
        *(None if a is None else rt.tensor(a) for a in given),
        rng=rt.tensor(np.array(rng, np.int64)) if p else None,
    )
    return Made(spec, terms, problem, q_place, kv_place, q, k, v, dy, lay(rt, c, q, k, v))


def place(form: str, longest: int, lengths: tuple[int, ...], gaps: bool) -> Place:
    """Where tokens lie in a format; with `gaps`, some tokens lie between the sequences."""
    steps = [n + (3 + i if gaps else 0) for i, n in enumerate(lengths)]
    starts = np.cumsum([0, *steps[:-1]])
    return Place(form, longest, np.array(lengths), starts, sum(steps))


def _values(random_: np.random.Generator, place: Place, heads: int, d: int, dtype: str) -> Array:
    """Normal values; ten times as large where no sequence is, so that a token too many shows."""
    b = len(place.lengths)
    inside = np.arange(place.longest) < place.lengths[:, None]
    mark = place.native(np.broadcast_to(inside[:, None, :, None], (b, heads, place.longest, d)))
    values = random_.standard_normal(place.shape(heads, d))
    return np.where(mark, values, 10 * values).astype(NUMPY[dtype])


def _bias(random_: np.random.Generator, c: Case, batch: int, s: Sequences) -> tuple[Array | None, Array | None]:
    """The bias or the slopes."""
    if c.bias == "none":
        return None, None
    if c.bias == "alibi":
        return None, np.array(alibi_slopes(HEADS), np.float32)
    if c.bias.startswith("alibi"):
        shape: tuple[int, ...] = (HEADS,) if c.bias == "alibi_h" else (batch, HEADS)
        return None, random_.uniform(0.02, 0.4, shape).astype(np.float32)
    sizes = {"1": 1, "b": batch, "h": HEADS}
    shape = (sizes[c.bias[0]], sizes[c.bias[1]], 1 if c.bias[2] == "1" else s.sq, s.skv)
    return random_.standard_normal(shape).astype(NUMPY[c.dtype]), None


def _lengths(rt: Runtime, c: Case, q_place: Place, kv_place: Place) -> Lengths | None:
    if not c.padded:
        return None
    running = [rt.tensor(np.concatenate([[0], np.cumsum(p.lengths)]).astype(np.int32)) for p in (q_place, kv_place)]
    if c.layout != "thd_gaps":
        return Lengths(*running)
    begins = [rt.tensor(np.append(p.starts, p.total).astype(np.int32)) for p in (q_place, kv_place)]
    return Lengths(*running, *begins)


def lay(rt: Runtime, c: Case, q: Array, k: Array, v: Array) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v on the device: tensors of their own, or parts of a packed one."""
    if c.packing == "separate":
        return rt.tensor(q), rt.tensor(k), rt.tensor(v)
    axis = -3 if c.packing.endswith("3hd") or c.packing.endswith("2hd") else -2
    parts = (q, k, v) if c.packing.startswith("qkv") else (k, v)
    whole = rt.tensor(np.stack(parts, axis=axis))
    views = [part(whole, axis, i) for i in range(len(parts))]
    return (views[0], views[1], views[2]) if len(views) == 3 else (rt.tensor(q), views[0], views[1])


def part(whole: Tensor, axis: int, index: int) -> Tensor:
    """Part `index` along `axis` of a packed tensor, as a view."""
    strides = list(whole.row_major_strides())
    shape = list(whole.shape)
    step = strides.pop(axis)
    shape.pop(axis)
    return Tensor(
        whole.ptr + whole.dtype.nbytes(index * step), tuple(shape), whole.dtype, whole.device, whole, tuple(strides)
    )


def host(rt: Runtime, t: Tensor | None) -> Array | None:
    """The values, of a part of a packed tensor too, in float64."""
    if t is None:
        return None
    if t.is_contiguous:
        return rt.numpy(t).astype(np.float64)
    base = rt.numpy(t.owner)
    offset = (t.ptr - t.owner.ptr) // t.dtype.itemsize
    view = np.lib.stride_tricks.as_strided(
        base.reshape(-1)[offset:], t.shape, [n * t.dtype.itemsize for n in t.row_major_strides()]
    )
    return view.astype(np.float64)


def gradients_like(rt: Runtime, c: Case, made: Made) -> tuple[Tensor, Tensor, Tensor] | None:
    """For packed inputs, parts of a packed gradient to write into."""
    if c.packing == "separate":
        return None
    return lay(rt, c, *(np.full_like(t, np.nan) for t in (made.q, made.k, made.v)))


def bits(rt: Runtime, t: Tensor) -> Array:
    """The bytes of a dense tensor."""
    return rt.numpy(t).view(np.uint8)


def refusal(rt: Runtime, c: Case, sequences: Sequences | None = None) -> str | None:
    """Why the rules say that this backend cannot do it, forward or backward."""
    return (
        None
        if rt.backend.name == "cpu"
        else ruled(device.info(rt.device.index), libraries.version("cudnn"), c, sequences)
    )


def ruled(where: DeviceInfo, version: tuple[int, ...], c: Case, sequences: Sequences | None = None) -> str | None:
    """The rules' reason against training this case on a device with this cuDNN."""
    able, reason = cudnn_attention(
        where,
        version,
        spec_of(c, sequences=sequences),
        sizes_of(c, sequences),
        DTYPES[c.dtype],
        True,
        bias_grad=c.bias not in ("none", "alibi", "alibi_h", "alibi_bh"),
        bias_rows=_bias_rows(c, sequences),
    )
    assert reason
    return None if able else reason


def _bias_rows(c: Case, sequences: Sequences | None) -> int:
    """The extent of its bias along the queries; 0 without one."""
    if c.bias == "none" or c.bias.startswith("alibi"):
        return 0
    return 1 if c.bias[2] == "1" else sizes_of(c, sequences).sq


DTYPES = {"fp32": dtypes.float32, "bf16": dtypes.bfloat16, "fp16": dtypes.float16}


#: "plain torch" is the unfused backend without the fused softmax kernel.
FAMILIES = {
    "flash": "NVTE_FLASH_ATTN",
    "fused": "NVTE_FUSED_ATTN",
    "unfused": "NVTE_UNFUSED_ATTN",
    "plain torch": "NVTE_UNFUSED_ATTN",
}


def only(monkeypatch: Any, family: str) -> None:
    """Allow te_torch one family of attention backends."""
    for variable in FAMILIES.values():
        monkeypatch.setenv(variable, str(int(variable == FAMILIES[family])))
    monkeypatch.setenv("NVTE_MASKED_SOFTMAX_FUSION", str(int(family != "plain torch")))
