"""Rows of messages of te_core.ops; tests/messages/test_messages.py says how to add one."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from te_core import dtypes, ops
from te_core.ops.activation import Clamp
from te_core.ops.context import Span
from te_core.ops.kv_cache import KVCache
from te_core.ops.loss import LossTerms
from te_core.ops.norm import Branch
from te_core.ops.optimizer import AdamQuantized, AdamRule, AdamTensors, SgdRule, SgdTensors
from te_core.ops.quantize import ScalingState, allocate
from te_core.ops.router import RouterTerms
from te_core.ops.softmax import Band, band_of
from te_core.quantized import Cast, Format
from te_core.runtime import Runtime
from te_core.statistics import SLOTS, empty
from te_core.tensor import Tensor
from tests.messages.rows import Rows, shown

ROWS = Rows()
CPU = Runtime.cpu()
E4M3, BF16, U8, I32, I64 = dtypes.float8_e4m3, dtypes.bfloat16, np.uint8, np.int32, np.int64


def t(*shape: int, dtype: Any = np.float32, of: Any = None) -> Tensor:
    """Zeros, or these numbers."""
    made = CPU.tensor(np.zeros(shape) if of is None else np.asarray(of), dtypes.dtype(dtype))
    return made


def named(text: str) -> str:
    """A name for a row: objects that a call is told apart by may look alike."""
    text = re.sub(r"<te_core[\w.]*\.(\w+) object at 0xADDRESS>", r"\1", text)
    return text if text not in ROWS else named(f"{text}'")


def add(operation: Callable[..., Any], *args: Any, **options: Any) -> None:
    """A row of an operation on the CPU."""
    given = [*map(shown, args), *(f"{name}={shown(value)}" for name, value in options.items())]
    ROWS[named(f"{operation.__name__}({', '.join(given)})")] = lambda: operation(CPU, *args, **options)


def each(operation: Callable[..., Any], right: dict[str, Any], *wrong: dict[str, Any]) -> None:
    """A row for each change of a right call, named by the change."""
    for change in wrong:
        given = ", ".join(f"{name}={shown(value)}" for name, value in change.items())
        ROWS[named(f"{operation.__name__} with {given}")] = lambda change=change: operation(CPU, **{**right, **change})


# ------------------------------------------------------------------------------------- matrices, norms, losses

x = t(2, 4)
add(ops.activation_forward, t(3, 14), "swiglu", clamp=Clamp())
add(ops.activation_forward, t(3, 14), "clamped_swiglu", clamp=Clamp(limit=-1.0))
add(ops.bias_dropout_add, x, None, None, p=1.5, rng=t(2, dtype=I64))
add(ops.column_sum, t(4, 8), t(4))
add(ops.amax, t(4, 8), column_sum=t(9))
add(ops.resize, t(8), 2, 4)
add(ops.count_nonfinite, x, t(2, dtype=I32))
add(ops.count_nonfinite, x, t(3, dtype=I64))
add(ops.padding_order, t(2, 4, dtype=bool), form="thd")
add(ops.padding_order, t(2, 4, dtype=I32), form="bshd")
add(ops.padding_order, t(dtype=bool), form="bshd")
add(ops.rank_sum, t(2, 3, 4), out=t(3, 5))
add(ops.rank_sum, t(3, 4), out=t(3, 4))
add(ops.rank_sum, t(0, 3, 4), out=t(3, 4))
add(ops.l2_norm_forward, t(1, 65537), eps=0.0)
add(ops.l2_norm_forward, t(2, 4, dtype=I32), eps=0.0)
add(ops.l2_norm_backward, t(2, 4, dtype=np.float16), x, eps=0.0)
each(
    ops.norm_forward,
    {"x": t(2, 8), "gamma": t(8), "beta": None, "kind": "RMSNorm", "eps": 1e-5},
    {"beta": t(8)},
    {"kind": "BatchNorm"},
    {"gamma": t(7)},
    {"cast": Cast(E4M3, rowwise=False, columnwise=False)},
    {"cast": Cast(dtypes.float32, rowwise=True, columnwise=False)},
    {"x": t(1, 65537), "gamma": t(65537)},
    {"branch": Branch(t(1, 8), t(2, 8))},
    {"branch": Branch(t(2, 8), t(1, 8))},
    {"branch": Branch(t(2, 8), t(2, 8), t(7))},
    {"branch": Branch(t(2, 8), t(2, 8), None, 0.5)},
    {"branch": Branch(t(2, 8), t(2, 8), None, 1.5, t(2, dtype=I64))},
)
add(ops.norm_backward, x, x, t(4), None, t(2), kind="RMSNorm", add=t(1, 4))
each(
    ops.softmax_forward,
    {"x": t(2, 3, 4, 8)},
    {"mask": t(2, 1, 4, 1, dtype=bool)},
    {"mask": t(2, 1, 4, 8)},
    {"cu_seqlens_q": t(3, dtype=I32)},
    {"cu_seqlens_q": t(3, dtype=I32), "cu_seqlens_kv": t(2, dtype=I32)},
    {"sink": t(2)},
    {"band": Band(-2, 0)},
    {"out": t(2, 3, 4, 8, dtype=np.float16)},
)
ROWS.add(band_of, "upper")
add(ops.softmax_backward, t(2, 3, 4, 7), t(2, 3, 4, 8))
goal, terms = t(2, dtype=I64), LossTerms(4)
add(ops.loss_facts, t(2, 4, dtype=I32), goal, terms=terms)
add(ops.loss_facts, x, t(2), terms=terms)
add(ops.loss_facts, x, t(3, dtype=I64), terms=terms)
add(ops.loss_facts, x, goal, terms=LossTerms(3))
add(ops.loss_facts, x, goal, terms=LossTerms(8, 5))
add(ops.loss_gradient, x, goal, terms=LossTerms(8))
add(ops.loss_gradient, x, goal, terms=terms, grad=t(3))
add(ops.loss_gradient, x, goal, terms=terms, out=t(2, 5))
add(ops.loss_values, t(2, 3), goal, terms=terms)
add(ops.loss_values, t(1, 2, 3), goal, terms=terms, total="median")
ROWS.each(LossTerms, 4, label_smoothing=(1.5,), z_loss=(-1,))

# ------------------------------------------------------------------------------------------------------ tokens

each(
    ops.rope,
    {"t": t(4, 2, 2, 8), "freqs": t(4, 8)},
    {"fmt": "bhsd"},
    {"fmt": "thd", "t": t(4, 2, 8)},
    {"cu_seqlens": t(3, dtype=I32)},
    {"cp_size": 2, "cp_rank": 2},
    {"cp_size": 2},
    {"start_positions": t(1, dtype=I32)},
    {"freqs": t(4, 10)},
    {"freqs": t(4, 8, dtype=np.float16)},
    {"t": t(4, 2, 2, 8, dtype=I32)},
)
split = {"heads": 2, "groups": 2, "head_dims": (8, 8, 8), "interleaved_groups": True}
each(
    ops.rope_qkv,
    {"qkv": t(4, 2, 48), "q_freqs": None, "k_freqs": None, **split},
    {"heads": 3},
    {"groups": 0},
    {"head_dims": (8, 8, 9)},
    {"fmt": "x"},
)
cu, new = t(of=[0, 1, 2], dtype=I32), t(2, 1, 2, 8)
cache = KVCache(t(2, 4, 2, 8), t(2, 4, 2, 8))
paged = KVCache(cache.k, cache.v, t(1, 2, dtype=I32))
add(ops.kv_append, new, new, cache, cu, cu, form="bhsd")
add(ops.kv_append, new, t(2, 1, 2, 8, dtype=np.float16), cache, cu, cu, form="bshd")
add(ops.kv_append, t(2, 1, 3, 8), new, cache, cu, cu, form="bshd")
add(ops.kv_append, new, new, cache, t(2, dtype=I32), t(2, dtype=I32), form="bshd")
add(ops.kv_append, new, new, cache, cu, t(2, dtype=I32), form="bshd")
add(ops.kv_append, new, new, paged, cu, cu, form="bshd")
add(ops.kv_gather, cache, cu)
add(ops.kv_move, paged, t(1, 3, dtype=I32), longest=4)
add(ops.kv_move, cache, t(1, 2, dtype=I32), longest=4)
add(ops.kv_move, cache, t(1, 3, dtype=I32), longest=-1)

tokens, routing, rows, probs = t(4, 8), t(of=np.eye(4, 3), dtype=I32), t(3, 8), t(4, 3)
mask_map = ops.mask_row_map(CPU, routing)
index_map = ops.index_row_map(CPU, t(4, 2, dtype=I32), rows=8)
add(ops.mask_row_map, probs)
add(ops.mask_row_map, t(4, dtype=bool))
add(ops.mask_row_map, routing, starts=t(3, dtype=I32))
add(ops.mask_row_map, t(1, 5000, dtype=bool))
add(ops.index_row_map, t(4, 2, dtype=I64), rows=8)
add(ops.chunk_row_map, routing, routing, rows=4)
add(ops.chunk_row_map, t(2, dtype=I32), t(3, dtype=I32), rows=4)
for sizes, order, count in (([3, 4], [0, 0], 7), ([3, 4], [0, 2], 7), ([3, 4], [1, 0], 6), ([-1, 4], [1, 0], 7)):
    ROWS[f"chunk_row_map of sizes {sizes}, order {order}, rows {count}"] = lambda given=(sizes, order), n=count: (
        ops.chunk_row_map(CPU, *(t(of=v, dtype=I64) for v in given), rows=n)
    )
each(
    ops.permute,
    {"x": tokens, "row_map": mask_map, "rows": 3},
    {"starts": t(3, dtype=I32)},
    {"row_map": index_map, "starts": t(4, dtype=I32)},
    {"x": t(5, 8)},
    {"rows": -1},
    {"probs": t(4, 2)},
    {"row_map": index_map, "probs": probs},
    {"pad_offsets": t(2, dtype=I64)},
)
each(
    ops.unpermute,
    {"x": rows, "row_map": mask_map, "tokens": 4},
    {"tokens": 5},
    {"weights": probs, "gates": probs},
    {"row_probs": t(3)},
    {"x": t(3, 8, dtype=U8)},
)
add(ops.unpermute_backward, rows, rows, mask_map, probs)
add(ops.unpermute_backward, t(4, 9), rows, mask_map, probs)

# -------------------------------------------------------------------------------------------------------- router

logits, chosen, one = t(4, 8), t(4, 8, dtype=bool), t(1, dtype=I64)
routed = {"logits": logits, "terms": RouterTerms(2, "sigmoid")}
counted = {"histogram": t(8, 5, dtype=I32), "bounds": t(2)}
each(
    ops.router_topk_forward,
    routed,
    {"terms": RouterTerms(9)},
    {"terms": RouterTerms(4, groups=3, group_topk=2)},
    {"terms": RouterTerms(2), "bias": t(8)},
    {"bias": t(7)},
    {"form": "bitmap"},
    {"histogram": counted["histogram"]},
    counted,
    {"counts": t(8, dtype=I64)},
)
add(ops.router_topk_backward, logits, logits, t(4, 7, dtype=bool), terms=RouterTerms(2))
add(ops.router_scores_backward, t(4, 8, dtype=np.float16), logits, terms=RouterTerms(2))
each(
    ops.router_aux_loss_forward,
    {"probs": logits, "weights": t(8), "total": one, "experts": 8, "topk": 2, "coeff": 0.1},
    {"experts": 3},
    {"weights": t(7)},
    {"total": t(1)},
)
ROWS["RouterTerms of a score that is none"] = lambda: RouterTerms(2, "softplus")

# ---------------------------------------------------------------------------------------- sequences over ranks

ends = t(of=[0, 4, 8], dtype=I32)
heads, stats, sink = t(4, 2, 3, 8), t(2, 3, 4), t(3)
half = Tensor(heads.ptr, (4, 2, 3, 4), heads.dtype, heads.device, heads, heads.row_major_strides())
one = {"a": heads, "a_stats": stats, "b": None, "b_stats": None, "out": heads, "stats": None, "form": "sbhd"}
bf16 = t(4, 2, 3, 8, dtype=BF16)
each(
    ops.attention_merge,
    one,
    {"b": bf16, "b_stats": stats, "out": t(4, 2, 3, 8, dtype=np.float16)},
    {"b": heads},
    {"a_stats": heads},
    {"form": "bhsd"},
    {"form": "thd"},
    {"sink": sink},
    {"softmax": "learnable"},
    {"softmax": "learnable", "sink": stats},
    {"a": half},
)
add(ops.context_sum, t(1, 1, 4, 2, 3, 8), None, out=heads)
add(ops.context_sum, t(3, dtype=I32), None, out=sink)
add(ops.attention_sink_grad, bf16, heads, stats, sink, form="sbhd")
add(ops.attention_sink_grad, heads, heads, heads, sink, form="sbhd")
span = Span(((0, 1),))
each(
    ops.context_lengths,
    {"cu_seqlens": ends, "size": 2, "spans": (span,)},
    {"cu_seqlens": heads},
    {"cu_seqlens_padded": t(2, dtype=I32)},
    {"cu_seqlens_padded": ends, "chunk": 2},
    {"spans": (Span(((0, 5),)),)},
    {"spans": (Span(((0, 1),), 0),)},
    {"spans": (Span(()),)},
    {"size": 0, "spans": ()},
)
each(
    ops.context_rows,
    {"t": heads, "how": "sequence_to_ranks", "form": "sbhd", "size": 2},
    {"how": "ranks"},
    {"form": "bhsd"},
    {"how": "heads_to_ranks"},
    {"how": "sequence_to_ranks", "size": 4},
    {"how": "ranks_to_sequence"},
    {"cu_seqlens_padded": ends},
    {"form": "thd"},
    {"out": heads},
    {"parts": 2},
    {"t": t(4, 3, 8), "form": "thd", "cu_seqlens_padded": ends},
)
odd = t(of=[0, 8, 14, 22], dtype=I32)
ROWS["context_lengths of padded lengths that do not divide"] = lambda: ops.context_lengths(
    CPU, odd, size=2, spans=(span,)
)
ROWS["context_mark of padded lengths that do not divide"] = lambda: ops.context_mark(CPU, t(11, 2, 3), odd, size=2)
ROWS["context_rows of padded lengths that do not divide"] = lambda: ops.context_rows(
    CPU, t(11, 2, 3), how="sequence_to_ranks", form="thd", size=1, cu_seqlens_padded=t(of=[0, 3], dtype=I32)
)
add(ops.context_draws, t(2, dtype=I64), (-1,))
add(ops.context_max, t(1, 4), heads=6, first=3)
add(ops.context_mark, t(4, 1, 1, dtype=I32), ends, size=1)

# ---------------------------------------------------------------------------------------------- quantization

square, cast = t(8, 16), Cast(E4M3, rowwise=True, columnwise=False)
both, finer = Cast(E4M3, rowwise=True, columnwise=True), Cast(E4M3, rowwise=True, columnwise=False, epsilon=1.0)
for sizes, casts in (
    ([4, 5], [cast, cast]),
    ([9, -1], [cast, cast]),
    ([4, 4], [cast]),
    ([4, 4], [cast, both]),
    ([4, 4], [cast, finer]),
    ([4, 4], [cast, Cast(E4M3, rowwise=True, columnwise=False, maxima=t(1))]),
):
    add(ops.quantize_grouped, square, sizes, casts)
add(ops.quantize_grouped, square, [4, 4], [cast, cast], [t(16), t(8)])
for rows, ends, casts in (
    (square, [0, 4, 8], [cast]),
    (t(8, 24), [0, 4, 8], [cast, cast]),
    (square, [0, 4, 8], [Cast(Format(E4M3, "mxfp8"), rowwise=True, columnwise=False)] * 2),
):
    add(ops.quantize_rows, rows, t(of=ends, dtype=I32), casts)
add(ops.quantize_many, [square, t(8, 32)], [cast, cast])
add(ops.quantize_many, [square, square], [cast, cast], outs=[ops.quantize(CPU, square, cast)])
add(ops.amax_many, [square, t(1, dtype=E4M3)])
for shape, transposed in (((64, 4), False), ((128, 2), False), ((128, 4), True), ((128,), False)):
    add(ops.swizzle_scales, t(*shape, dtype=U8), transposed=transposed)
add(ops.swizzle_scales, t(128, 4))
state = ScalingState(t(3), t(4, 3), t(3), 448.0)
add(ops.update_scales, [state, state], "max")


def nvfp4(tiled: bool, transform: bool, stochastic: bool, row_scaled: bool, mode: str | None, bound: int = 448) -> None:
    """A cast to NVFP4 with options of which some exclude each other."""
    form = Format(dtypes.float4_e2m1, "nvfp4", tiled, row_scaled, bound)
    more = {"transform": transform, "stochastic": stochastic, "rng": t(2, dtype=I64) if stochastic else None}
    ops.quantize(CPU, t(16, 16), Cast(form, rowwise=True, columnwise=True, four_over_six=mode, **more))


for options in product((False, True), (False, True), (False, True), (False, True), (None, "MAE")):
    _, turned, drawn, own, mode = options
    if (mode and (turned or drawn)) or (own and any(options[:3])):
        ROWS.add(nvfp4, *options)
ROWS.add(nvfp4, False, False, False, False, "MAX")
ROWS.add(nvfp4, False, False, False, False, None, 240)
wide, record = t(32, 64), t(of=empty(), dtype=np.float64)
held = ops.quantize(CPU, wide, cast)
add(ops.statistics, wide, t(SLOTS))
add(ops.statistics, t(16, 64), record, held)
add(ops.statistics, wide, record, held, columnwise=True)
whole = ops.quantize(CPU, wide, Cast(Format(dtypes.float4_e2m1, "nvfp4"), rowwise=True, columnwise=True))
ROWS["statistics of the columnwise copy of nvfp4"] = lambda: ops.statistics(CPU, wide, record, whole, columnwise=True)

# ------------------------------------------------------------------------------------------------- optimizers

rule = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
plain = AdamTensors(t(64, dtype=BF16), t(64, dtype=BF16), t(64), t(64), t(64), None)


def adam(*wrong: dict[str, Any], **numbers: Any) -> None:
    """A step of Adam of one parameter, or of as many as there are changes."""
    ops.adam(CPU, [plain._replace(**change) for change in wrong or ({},)], AdamRule(**{**rule, **numbers}))


for changes in (
    [{"m": t(63)}],
    [{"v": t(64, dtype=I32)}],
    [{"master": t(64, dtype=np.int8)}],
    [{"param": None, "master": None}],
    [{"param": t(64), "master": t(64, dtype=np.int16)}],
    [{"m": t(64, dtype=np.float16)}],
    [{}, {"v": t(64, dtype=BF16)}],
    [{"amax": t(1)}, {}],
):
    ROWS.add(adam, *changes)
ROWS.add(adam, step=0)
ROWS.add(adam, lr=t(1, dtype=np.float64))
matrices = [t(8, 8) for _ in range(4)]
current = AdamQuantized(*matrices, allocate(CPU, (8, 8), cast), cast)
ROWS["adam_quantized in current scaling"] = lambda: ops.adam_quantized(CPU, [current], AdamRule(**rule))
add(ops.scale_many, [t(64)], [], 1.0)
ROWS["sgd of integers"] = lambda: ops.sgd(CPU, [SgdTensors(t(4, dtype=I32), t(4, dtype=I32))], SgdRule(0.1))
