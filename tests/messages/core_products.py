"""Rows of messages of products and attention; tests/messages/test_messages.py says how to add one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from te_core import dtypes, ops
from te_core.attention import AttentionSpec, Lengths, canonical_mask
from te_core.layers import attention_fp8
from te_core.layers.attention import AttentionLayerSpec, AttentionNeeds
from te_core.layers.attention_fp8 import AttentionFp8Spec
from te_core.ops.attention_terms import Terms
from te_core.ops.gemm import gemm
from te_core.quantized import Cast, Format
from te_core.recipe import DelayedScaling
from te_core.runtime import Runtime
from te_core.tensor import Device, Tensor
from tests.core import attention_cases as cases
from tests.core.attention_cases import HEADS, Case
from tests.messages.core_operations import BF16, E4M3, I32, I64, U8, t
from tests.messages.rows import Rows, shown

ROWS = Rows()
CPU = Runtime.cpu()
F16, E5M2 = dtypes.float16, dtypes.float8_e5m2

# ---------------------------------------------------------------------------------------------------- products


def product(a: tuple[int, ...] = (4, 8), b: tuple[int, ...] = (8, 4), **options: Any) -> None:
    """One of bfloat16."""
    types = options.pop("types", (BF16, BF16))
    gemm(CPU, t(*a, dtype=types[0]), t(*b, dtype=types[1]), **options)


for wrong in (
    {"b": (9, 4)},
    {"types": (BF16, dtypes.float32)},
    {"out_dtype": F16},
    {"a": (8,)},
    {"bias": t(5, dtype=BF16)},
    {"epilogue": "relu"},
    {"epilogue": "dgelu"},
    {"aux": t(4, 4, dtype=BF16)},
    {"out_sum": t(4, dtype=BF16)},
    {"accumulate": True},
    {"out": t(4, 5, dtype=BF16)},
    {"turned": "a"},
    {"epilogue": "gelu", "aux": t(4, 4, dtype=I64)},
    {"types": (E5M2, E5M2), "a": (16, 16), "b": (16, 16), "trans_b": True},
    {"types": (E4M3, E4M3), "a": (16, 16), "b": (16, 16)},
    {"types": (E4M3, E4M3), "a": (16, 20), "b": (16, 20), "trans_b": True},
    {"types": (E4M3, E4M3), "a": (16, 16), "b": (16, 16), "trans_b": True},
):
    ROWS.add(product, **wrong)


def up(n: int, step: int) -> int:
    """The next multiple."""
    return -(-n // step) * step


#: M, N and K that differ, so that swapped sizes show.
M, N, K = 96, 160, 320
PIECES, TILES, WIDE = Format(E4M3, "block"), Format(E4M3, "block", True), Format(E5M2, "block")
FP4 = dtypes.float4_e2m1


def scaled(scaling: str, **changed: Any) -> None:
    """A product of a scaling with a scale for each block; `changed` replaces arguments."""
    scale = lambda rows, step: t(up(rows, 128), up(K // step, 4), dtype=U8)  # noqa: E731
    form = Format(E4M3, scaling) if scaling != "nvfp4" else Format(FP4, "nvfp4")
    made: dict[str, Any] = {"trans_b": True, "a_format": form, "b_format": form}
    made |= {"a": t(M, K, dtype=E4M3), "b": t(N, K, dtype=E4M3)}
    if scaling == "block":
        made |= {"b_format": TILES, "a_scale": t(3, M), "b_scale": t(2, 4)}
    elif scaling == "mxfp8":
        made |= {"a_scale": scale(M, 32), "b_scale": scale(N, 32)}
    else:
        made |= {"a": t(M, K // 2, dtype=U8), "b": t(N, K // 2, dtype=U8), "a_amax": t(1), "b_amax": t(1)}
        made |= {"b_format": Format(FP4, "nvfp4", True, bound=256), "a_scale": scale(M, 16), "b_scale": scale(N, 16)}
    made |= changed
    gemm(CPU, made.pop("a"), made.pop("b"), **made)


off_grid = Tensor(t(4, M).ptr + 4, (3, M), dtypes.float32, CPU.device, None)
for scaling, changes in {
    "block": (
        {},  # which the CPU would get wrong
        {"b_format": Format(E4M3, "mxfp8")},
        {"b_format": None},
        {"a_format": Format(E4M3), "b_format": Format(E4M3)},
        {"a_format": TILES, "a_scale": t(1, 4)},
        {"a_format": WIDE},
        {"a_scale": None},
        {"a": t(M - 8, K, dtype=E4M3)},
        {"a": t(M - 4, K, dtype=E4M3), "a_scale": t(3, M - 4)},
        {"b": t(N - 8, K, dtype=E4M3)},
        {"a_scale": t(M, 3)},
        {"b_scale": t(2, 3)},
        {"b": t(K, N, dtype=E4M3), "trans_b": False},
        {"a_sum": t(M)},
    ),
    "mxfp8": (
        {"a_format": Format(E5M2, "mxfp8"), "b_format": Format(E5M2, "mxfp8")},
        {"b_scale": t(128, 12, dtype=U8)},
        {"a": t(M - 16, K, dtype=E4M3)},
    ),
    "nvfp4": (
        {"a_format": None, "b_format": None},
        {"a": t(M, K // 2, dtype=E4M3)},
        {"b_amax": None},
        {"a_format": Format(FP4, "nvfp4", row_scaled=True)},
    ),
}.items():
    for change in changes:
        ROWS.add(scaled, scaling, **change)
ROWS["scaled('block', a_scale off the 16-byte grid)"] = lambda: scaled("block", a_scale=off_grid)


def grouped(**change: Any) -> None:
    """Rows in groups."""
    given: dict[str, Any] = {"sizes": (32, 0, 5, 75), "out": t(112, 48, dtype=BF16), "trans_b": True, **change}
    x, w = t(112, 64, dtype=BF16), [t(48, 64, dtype=BF16) for _ in range(4)]
    ops.gemm_grouped(CPU, x, w, given.pop("out"), **given)


for change in (
    {"sizes": None},
    {"sizes": (32, 0, 5)},
    {"sizes": (32, -1, 6, 75)},
    {"sizes": (32, 0, 5, 70)},
    {"bias": [None]},
    {"out": [t(n, 48, dtype=BF16) for n in (32, 0, 5, 75)]},
    {"trans_a": True},
    {"sizes": None, "offsets": t(2, dtype=I32)},
):
    ROWS.add(grouped, **change)


def rows_by_offsets(**change: Any) -> None:
    """FP8 rows in groups whose sizes are on the device."""
    offsets, form = t(of=[0, 32, 112], dtype=I32), Format(E4M3)
    both = Cast(form, rowwise=True, columnwise=True)
    x, w = ops.quantize_rows(CPU, t(112, 64, dtype=BF16), offsets, [both] * 2), ops.quantize(CPU, t(48, 64), both)
    given: dict[str, Any] = {"b": [w, w], "out": t(112, 48, dtype=BF16), "offsets": offsets, "trans_b": True, **change}
    ops.gemm_grouped(CPU, x, given.pop("b"), given.pop("out"), **given)


for change in (
    {"offsets": None, "sizes": (32, 80)},
    {"b": [t(48, 64, dtype=BF16)] * 2},
    {"out": t(112, 32, dtype=BF16)},
    {"bias": [None, t(48, dtype=F16)]},
):
    ROWS.add(rows_by_offsets, **change)
ROWS["grouped(offsets from 1 on)"] = lambda: grouped(sizes=None, offsets=t(of=[1, 32, 32, 37, 112], dtype=I32))

# --------------------------------------------------------------------------------------------------- attention

PADDED, MASKED = Case(mask="padding", lengths="cross"), Case(mask="arbitrary", lengths="cross")
BIASED, SLOPED, SINK, PACKED = (
    Case(bias="1hss", lengths="cross"),
    Case(bias="alibi_h"),
    Case(softmax="learnable"),
    Case(layout="thd"),
)


def turned(q: Tensor) -> Tensor:
    """With its two last dimensions exchanged."""
    b, s, h, d = q.shape
    return Tensor(q.ptr, (b, s, d, h), q.dtype, q.device, q, (s * h * d, h * d, 1, d))


def attend(case: Case, **changes: Any) -> None:
    """A forward of a case with some arguments replaced."""
    made = cases.make(CPU, case)
    q, k, v = (changes.pop(name, given) for name, given in zip("qkv", made.tensors, strict=True))
    q = turned(made.tensors[0]) if q is turned else q
    of_terms = [n for n in changes if n in Terms._fields and not isinstance(changes[n], str)]  # spec.bias is a word
    terms = made.terms._replace(**{n: changes.pop(n) for n in of_terms})
    ops.attention_forward(CPU, q, k, v, spec=replace(made.spec, **changes), terms=terms)


def lengths(count: int = 4, of_kv: int = 0, dtype: Any = I32) -> Lengths:
    """Sums of lengths 1."""
    return Lengths(t(of=np.arange(count), dtype=dtype), t(of=np.arange(of_kv or count), dtype=dtype))


def rest(case: Case, *changes: dict[str, Any]) -> None:
    """A row for each change."""
    for change in changes:
        given = ", ".join(f"{name}={shown(value)}" for name, value in change.items())
        ROWS[f"attention of {case} with {given}"] = lambda change=change: attend(case, **change)


def kv(*shape: int, v: tuple[int, ...] = ()) -> dict[str, Any]:
    """Both."""
    return {"k": t(*shape, dtype=BF16), "v": t(*(v or shape), dtype=BF16)}


rest(
    Case(),
    *({"q_format": "hdbs"}, {"kv_format": "paged"}, {"softmax": "base2"}, {"bias": "pre_scale_bias"}),
    *({"dropout": 1.5, "rng": t(2, dtype=I64)}, {"dropout": -0.1}, {"softcap": -1.0}, {"left": -2}, {"right": -2}),
    *({"q": t(3, 33, 4, dtype=BF16)}, {"q": turned}, {"k": t(3, 33, 4, 32, dtype=F16)}, {"v": t(3, 33, 4, 32)}),
    {name: t(3, 33, 4, 32, dtype=np.float64) for name in "qkv"},
    *({"padded": True}, {"k": t(3, 33, 4, 40, dtype=BF16)}, {"v": t(3, 34, 4, 32, dtype=BF16)}),
    *(kv(3, 33, 3, 32), kv(3, 33, 0, 32), kv(2, 33, 4, 32), {"v": t(3, 33, 4, 0, dtype=BF16)}),
    *({"masked": True}, {"bias": "post_scale_bias"}, {"bias": "alibi"}, {"softmax": "learnable"}, {"dropout": 0.5}),
    *({"rng": t(2, dtype=I64)}, {"dropout": 0.5, "rng": t(2, dtype=I32)}, {"dropout": 0.5, "rng": t(3, dtype=I64)}),
)
rest(PACKED, {"k": t(3, 33, 4, 32, dtype=BF16)}, {"lengths": None, "padded": False}, {"max_q": 0}, {"max_kv": 0})
rest(Case(layout="thd_bshd"), kv(2, 33, 4, 32))
rest(
    PADDED,
    *({"padded": False}, {"lengths": lengths(dtype=I64)}, {"lengths": lengths(3)}, {"lengths": lengths(4, 6)}),
    *({"lengths": lengths(0)}, {"pages": t(2, 1, dtype=I32)}, {"pages": t(3, 1, dtype=I64)}),
)
rest(MASKED, {"masked": False}, {"mask": t(3, 2, 21, 37, dtype=U8)}, {"mask": t(3, 1, 21, 37)})
rest(
    BIASED,
    *({"bias": "no_bias"}, {"bias": t(1, 4, 21, 1, dtype=BF16)}, {"bias": t(21, 37, dtype=BF16)}),
    {"bias": t(1, 4, 21, 37)},
)
rest(SLOPED, {"slopes": t(3)}, {"slopes": t(4, dtype=BF16)})
rest(SINK, {"softmax": "off-by-one"}, {"sink": t(2)}, {"sink": t(4, dtype=BF16)})
for layout, case, sums in (
    ("bshd", Case(mask="padding"), (0, 34, 34, 34)),
    ("thd", PACKED, (0, 34, 34, 34)),
    ("bshd", PADDED, (0, 9, 5, 9)),
):
    ROWS[f"attention of {case} in {layout} with lengths {sums}"] = lambda case=case, sums=sums: attend(
        case, lengths=Lengths(t(of=sums, dtype=I32), t(of=sums, dtype=I32))
    )


def packed(sums: tuple[int, ...], begins: tuple[int, ...] | None) -> None:
    """Sequences that lie outside of the tokens: the CPU can look at them."""
    q, (cu, padded) = t(5, 4, 32, dtype=BF16), (None if x is None else t(of=x, dtype=I32) for x in (sums, begins))
    spec = AttentionSpec(1.0, "thd", "thd", padded=True, max_q=8, max_kv=8)
    ops.attention_forward(CPU, q, q, q, spec=spec, terms=Terms(Lengths(cu, cu, padded, padded)))


for sums, begins in (((0, 3, 9), None), ((0, 3, 5), (0, 4, 8)), ((0, 3, 5), (-1, 3, 5))):
    ROWS.add(packed, sums, begins)
elsewhere = Tensor(64, (2, 8, 4, 16), BF16, Device("cuda", 5), None)
ROWS["attention of tensors elsewhere"] = lambda: ops.attention_forward(
    CPU, elsewhere, elsewhere, elsewhere, spec=AttentionSpec(1.0, "bshd", "bshd")
)


def back(**changes: Any) -> None:
    """A backward with some arguments replaced."""
    made = cases.make(CPU, Case())
    y = ops.attention_forward(CPU, *made.tensors, spec=made.spec)
    given = {"dy": CPU.tensor(made.dy), "out": y.out, "stats": y.stats} | changes
    given["dy"] = turned(CPU.tensor(made.dy)) if changes.get("dy") is turned else given["dy"]
    dy, out, stats = given.pop("dy"), given.pop("out"), given.pop("stats")
    ops.attention_backward(CPU, dy, *made.tensors, out, stats, spec=made.spec, **given)


for change in (
    {"dy": t(3, 33, 4, 40, dtype=BF16)},
    {"dy": t(3, 33, 4, 32)},
    {"dy": turned},
    {"out": t(3, 4, 33, 32, dtype=BF16)},
    {"out": t(3, 33, 4, 32, dtype=F16)},
    {"grads": [t(2, 33, HEADS, 32, dtype=BF16)] * 3},
    {"grads": [t(3, 33, HEADS, 32)] * 3},
):
    ROWS.add(back, **change)


def paged(backward: bool) -> None:
    """A paged cache is for inference: no backward through it, and no largest logits of it."""
    made = cases.make(CPU, PADDED)
    q, blocks = made.tensors[0], t(9, 16, HEADS, 32, dtype=BF16)
    terms = made.terms._replace(pages=t(of=np.arange(9).reshape(3, 3), dtype=I32))
    if backward:
        ops.attention_backward(CPU, q, q, blocks, blocks, q, t(3, HEADS, 21), spec=made.spec, terms=terms)
    ops.attention_forward(CPU, q, blocks, blocks, spec=replace(made.spec, max_logit=True), terms=terms)


ROWS.each(paged, backward=(False, True))
ROWS.add(canonical_mask, "t", "causal,arbitrary")


def fp8(d_qk: int = 128, scaling: str = "tensor", **core: Any) -> None:
    """The check of an FP8 attention."""
    rule = DelayedScaling(fp8_dpa=True).resolve().attention
    assert rule is not None
    rule = replace(rule, qkv=replace(rule.qkv, scaling=scaling))
    needs = AttentionNeeds(True, True, True, bias=True)
    layer = AttentionLayerSpec(AttentionSpec(0.1, "sbhd", "sbhd", right=0, **core), 4, 1, d_qk, 128, needs)
    attention_fp8.check(AttentionFp8Spec(layer, rule, BF16))


ROWS.each(fp8, softmax=("learnable",), max_logit=(True,), bias=("post_scale_bias",), d_qk=(20,), scaling=("mxfp8",))
