"""More right calls of te_core's operations and layers than `tests/core/face.py` has: with their other options, at odd
sizes, and with what they write to handed in. What `tests/core_draws.py` makes wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from te_core import dtypes, ops
from te_core.attention import AttentionSpec, Lengths
from te_core.dtypes import DType
from te_core.layers import attention, attention_fp8, grouped_linear, linear, mlp, norm_linear, residual, softmax
from te_core.layers.linear import Sink
from te_core.ops.activation import Clamp
from te_core.ops.attention_terms import Terms
from te_core.ops.context import Span
from te_core.ops.kv_cache import KVCache
from te_core.ops.loss import LossTerms
from te_core.ops.norm import Branch
from te_core.ops.quantize import ScalingState
from te_core.ops.softmax import Band
from te_core.quantize.state import Scales
from te_core.quantized import Cast, Format
from te_core.recipe import Recipe
from te_core.runtime import Runtime
from te_core.statistics import empty
from te_core.tensor import Tensor
from tests.core.face import Right, layer_specs, scales, tensor

BF16, E4M3, E5M2, F32 = dtypes.bfloat16, dtypes.float8_e4m3, dtypes.float8_e5m2, dtypes.float32
#: Odd sizes, which storage rounds up.
M, K, N = 10, 24, 20
FORMATS = {
    "tensor": Format(E4M3),
    "block": Format(E4M3, "block"),
    "tiles": Format(E4M3, "block", tiled=True),
    "mxfp8": Format(E4M3, "mxfp8"),
    "nvfp4": Format(dtypes.float4_e2m1, "nvfp4"),
}


def ints(rt: Runtime, *values: Any, dtype: Any = np.int32) -> Tensor:
    """A tensor of these integers."""
    return rt.tensor(np.array(values, dtype))


def more_operations(rt: Runtime) -> dict[str, Right]:
    """Calls of operations, by name."""
    calls = {**_matrices(rt), **_quantization(rt), **_products(rt), **_attention(rt), **_tokens(rt)}
    return {
        name: Right(getattr(ops, name.partition(" ")[0]), (rt, *args), options)
        for name, (args, options) in calls.items()
    }


Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]


def _matrices(rt: Runtime) -> Calls:
    x, vector, one = tensor(rt, M, K, dtype=BF16), tensor(rt, K, dtype=BF16), tensor(rt, 1, value=0.0)
    gamma, rows = tensor(rt, K), tensor(rt, M, value=1.0)
    rng, scores = ints(rt, 1, 2, dtype=np.int64), tensor(rt, 2, 2, 6, 10, dtype=BF16)
    other, cu = tensor(rt, M, K, dtype=BF16), (ints(rt, 0, 4, 10), ints(rt, 0, 6, 16))
    state = ScalingState(tensor(rt, 3), tensor(rt, 1, 3), tensor(rt, 3), 448.0)
    return {
        "activation_forward gated": ((x, "clamped_swiglu"), {"clamp": Clamp()}),
        "activation_backward gated": ((tensor(rt, M, K // 2, dtype=BF16), x, "swiglu"), {"column_sum": gamma}),
        "amax column_sum": ((x,), {"out": one, "column_sum": vector}),
        "amax_many out": (([x, x],), {"out": tensor(rt, 2)}),
        "bias_dropout_add out": ((x, None, x), {"p": 0.0, "out": other}),
        "l2_norm_forward odd": ((x,), {"eps": 1e-6}),
        "loss_gradient with facts": (
            (x, ints(rt, *range(M))),
            {"terms": LossTerms(K, 0, -100, 0.1, 1e-3), "out": other, "facts": tensor(rt, M, 3)},
        ),
        "norm_forward RMSNorm": ((x, gamma, None), {"kind": "RMSNorm", "eps": 1e-5}),
        "norm_forward dropout": (
            (x, gamma, gamma),
            {"kind": "LayerNorm", "eps": 1e-5, "branch": Branch(x, other, vector, 0.5, rng)},
        ),
        "norm_backward out": ((x, x, gamma, None, rows), {"kind": "RMSNorm", "out": other, "add": x}),
        "resize out": ((x, 6, 32), {"out": tensor(rt, 6, 32, dtype=BF16)}),
        "softmax_forward lengths": (
            (scores,),
            {"band": Band(2, 0, True), "cu_seqlens_q": cu[0], "cu_seqlens_kv": cu[1], "out": scores},
        ),
        "softmax_backward lengths": ((scores, scores), {"cu_seqlens_q": cu[0], "cu_seqlens_kv": cu[1]}),
        "transpose out": ((x,), {"out": tensor(rt, K, M, dtype=BF16)}),
        "update_scales one row": (([state], "most_recent"), {}),
    }


def _cast(rt: Runtime, form: Format, **options: Any) -> Cast:
    return Cast(form, **{"rowwise": True, "columnwise": True, **options})


def _quantization(rt: Runtime) -> Calls:
    x, sums, counter = tensor(rt, M, K), tensor(rt, K), ints(rt, 0, 0, dtype=np.int64)
    rng, record = ints(rt, 1, 2, dtype=np.int64), rt.tensor(empty())
    found: Calls = {}
    for name, form in FORMATS.items():
        cast = _cast(rt, form)
        q = ops.quantize(rt, x, cast)
        counted = _cast(rt, form, nonfinite=counter)
        found |= {
            f"quantize {name}": ((x, counted), {"column_sum": sums, "out": q}),
            f"quantize_many {name}": (([x, x], [cast, cast]), {"outs": [q, ops.quantize(rt, x, cast)]}),
            f"quantize_grouped {name}": ((x, [4, 0, 6], [cast] * 3, [sums] * 3), {}),
            f"dequantize {name}": ((q, F32), {}),
            f"dequantize columns {name}": ((q, F32), {"columnwise": True}),
            f"statistics {name}": ((x, record, q), {}),
        }
    given = _cast(rt, FORMATS["tensor"], scale=tensor(rt, 1), amax=tensor(rt, 1), nonfinite=counter)
    found |= {
        "quantize nvfp4 draws": ((x, _cast(rt, FORMATS["nvfp4"], rng=rng, stochastic=True, transform=True)), {}),
        "quantize maxima": ((x, _cast(rt, FORMATS["tensor"], maxima=tensor(rt, 1, value=3.0))), {}),
        "quantize nvfp4 maxima": (
            (x, _cast(rt, FORMATS["nvfp4"], transform=True, maxima=tensor(rt, 2, value=3.0))),
            {},
        ),
        "quantize_grouped given": ((x, [4, 6], [given] * 2), {}),
        "activation_forward given": ((x, "gelu"), {"cast": given, "keep": True}),
        "activation_backward given": ((x, x, "gelu"), {"cast": given, "column_sum": sums}),
        "norm_forward given": ((x, sums, sums), {"kind": "LayerNorm", "eps": 1e-5, "cast": given}),
        "statistics columns": ((x, record, ops.quantize(rt, x, _cast(rt, FORMATS["block"]))), {"columnwise": True}),
    }
    return found


def _products(rt: Runtime) -> Calls:
    x, w, dy = (tensor(rt, *shape, dtype=BF16) for shape in ((M, K), (N, K), (M, N)))
    out, total, bias = tensor(rt, M, N, dtype=BF16), tensor(rt, N, K), tensor(rt, N, dtype=BF16)
    one, a8, b8 = tensor(rt, 1), tensor(rt, 16, 32, dtype=E4M3), tensor(rt, 32, 32, dtype=E4M3)
    found: Calls = {
        "gemm a_sum": (
            (dy, x),
            {"trans_a": True, "a_sum": tensor(rt, N, dtype=BF16), "out": total, "accumulate": True},
        ),
        "gemm dgelu": (
            (dy, w),
            {"epilogue": "dgelu", "aux": x, "out_sum": tensor(rt, K, dtype=BF16), "out": tensor(rt, M, K, dtype=BF16)},
        ),
        "gemm fp8": ((a8, b8), {"trans_b": True, "a_scale": one, "b_scale": one, "bias": tensor(rt, 32, dtype=BF16)}),
        "gemm_grouped wgrad": (
            (dy, x, [total, tensor(rt, N, K), tensor(rt, N, K)], ints(rt, 0, 4, 4, 10)),
            {"trans_a": True, "accumulate": False},
        ),
        "gemm_grouped fprop": ((x, [w, w], out, ints(rt, 0, 4, 10)), {"trans_b": True, "bias": [bias, None]}),
    }
    for name, form in FORMATS.items():
        cast = _cast(rt, form)
        qs = xq, wq, dyq = [ops.quantize(rt, t, cast) for t in (x, w, dy)]
        rows = ops.quantize_grouped(rt, x, [4, 6], [cast] * 2)
        grads = ops.quantize_grouped(rt, dy, [4, 6], [cast] * 2)
        assert len(qs) == 3
        found |= {
            f"gemm_quantized fprop {name}": ((xq, wq, out), {"bias": bias, "emulate": True}),
            f"gemm_quantized dgrad {name}": (
                (dyq, wq, tensor(rt, M, K, dtype=BF16)),
                {"b_columnwise": True, "emulate": True},
            ),
            f"gemm_quantized wgrad {name}": (
                (dyq, xq, total),
                {"a_columnwise": True, "b_columnwise": True, "accumulate": True, "emulate": True},
            ),
            f"gemm_grouped fprop {name}": (
                (rows, [wq, wq], out),
                {"sizes": [4, 6], "trans_b": True, "bias": [bias, None], "emulate": True},
            ),
            f"gemm_grouped wgrad {name}": (
                (grads, rows, [total, tensor(rt, N, K)]),
                {"sizes": [4, 6], "trans_a": True, "emulate": True},
            ),
        }
    return found


def _terms(rt: Runtime, dtype: DType) -> dict[str, tuple[AttentionSpec, Terms]]:
    """Specs of attention over q [5, 2, 4, 8] and k, v [7, 2, 2, 8], and what they ask for besides."""
    lengths = Lengths(ints(rt, 0, 3, 8), ints(rt, 0, 6, 13))
    hidden = rt.tensor(np.zeros((2, 1, 5, 7), np.uint8))
    return {
        "mask": (AttentionSpec(0.25, masked=True), Terms(mask=hidden)),
        "bias": (AttentionSpec(0.25, bias="post_scale_bias"), Terms(bias=tensor(rt, 1, 4, 5, 7, dtype=dtype))),
        "slopes": (AttentionSpec(0.25, right=0, bias="alibi"), Terms(slopes=tensor(rt, 2, 4))),
        "sink": (AttentionSpec(0.25, softmax="learnable"), Terms(sink=tensor(rt, 4))),
        "rng": (AttentionSpec(0.25, dropout=0.5), Terms(rng=ints(rt, 1, 2, dtype=np.int64))),
        "lengths": (AttentionSpec(0.25, padded=True, right=0, bottom_right=True), Terms(lengths)),
    }


def _attention(rt: Runtime) -> Calls:
    q, kv = tensor(rt, 5, 2, 4, 8, dtype=BF16), tensor(rt, 7, 2, 2, 8, dtype=BF16)
    found: Calls = {}

    def both(name: str, spec: AttentionSpec, terms: Terms, q: Tensor, k: Tensor, v: Tensor) -> None:
        found[f"attention_forward {name}"] = (q, k, v), {"spec": spec, "terms": terms, "out": tensor_like(rt, q)}
        out, stats, _ = ops.attention_forward(rt, q, k, v, spec=spec, terms=terms)
        grads = tensor_like(rt, q), tensor_like(rt, k), tensor_like(rt, v)
        more = {"spec": spec, "terms": terms, "grads": grads, "bias_grad": terms.bias is not None}
        found[f"attention_backward {name}"] = (out, q, k, v, out, stats), more

    for name, (spec, terms) in _terms(rt, BF16).items():
        both(name, spec, terms, q, kv, kv)
    thd = AttentionSpec(0.25, "thd", "thd", padded=True, max_q=5, max_kv=7)
    packed = Lengths(ints(rt, 0, 3, 8), ints(rt, 0, 6, 13), ints(rt, 0, 4, 10), ints(rt, 0, 7, 14))
    both("thd", thd, Terms(packed), *(tensor(rt, *s, dtype=BF16) for s in ((10, 4, 8), (14, 2, 8), (14, 2, 8))))
    spec = AttentionSpec(0.25, "bshd", "bshd", padded=True, max_logit=False)
    pages, lengths = ints(rt, [0, 1], [2, 3]), Lengths(ints(rt, 0, 1, 2), ints(rt, 0, 6, 13))
    blocks = tensor(rt, 4, 8, 2, 8, dtype=BF16)
    found["attention_forward pages"] = (
        (tensor(rt, 2, 1, 4, 8, dtype=BF16), blocks, blocks),
        {"spec": spec, "terms": Terms(lengths, pages=pages), "stats": False},
    )
    return found


def tensor_like(rt: Runtime, t: Tensor) -> Tensor:
    """Another tensor of the shape and dtype."""
    return tensor(rt, *t.shape, dtype=t.dtype)


def _tokens(rt: Runtime) -> Calls:
    heads, freqs = tensor(rt, 6, 2, 3, 8, dtype=BF16), tensor(rt, 8, 1, 1, 4)
    packed, cu = tensor(rt, 10, 3, 8, dtype=BF16), ints(rt, 0, 4, 9)
    cache = KVCache(*(tensor(rt, 3, 8, 3, 8, dtype=BF16) for _ in range(2)))
    pages = ints(rt, [0, 1], [2, 3])
    paged = KVCache(tensor(rt, 4, 4, 3, 8, dtype=BF16), tensor(rt, 4, 4, 3, 8, dtype=BF16), pages)
    routing, experts = rt.tensor(np.eye(10, 3, dtype=bool)), ints(rt, *[[i % 3, (i + 1) % 3] for i in range(10)])
    x, starts, pads = tensor(rt, 10, K, dtype=BF16), ints(rt, 0, 0, 0, 0), ints(rt, 0, 2, 2, dtype=np.int64)
    row_map = ops.mask_row_map(rt, routing, starts=starts)
    slots = ops.index_row_map(rt, experts, rows=20)
    permuted, weights = tensor(rt, 20, K, dtype=BF16), tensor(rt, 10, 2)
    return {
        "rope out": ((heads, freqs), {"out": tensor_like(rt, heads)}),
        "rope thd": ((packed, freqs), {"fmt": "thd", "cu_seqlens": cu, "start_positions": ints(rt, 0, 1)}),
        "rope_qkv groups": (
            (tensor(rt, 10, 56, dtype=BF16), freqs, None),
            {"heads": 3, "groups": 1, "head_dims": (8, 16, 16), "interleaved_groups": True, "fmt": "thd"}
            | {"cu_seqlens": cu},
        ),
        **_context(rt),
        "kv_append thd": ((packed, packed, cache, cu, ints(rt, 0, 6, 12)), {"form": "thd"}),
        "kv_append pages": ((heads, heads, paged, ints(rt, 0, 2, 6), ints(rt, 0, 4, 12)), {"form": "sbhd"}),
        "kv_gather odd": ((paged, ints(rt, 0, 3)), {}),
        "kv_move more": ((cache, ints(rt, [0, 2, 3], [1, 0, 8], [-1, 1, 2])), {"longest": 8}),
        "mask_row_map starts": ((routing,), {"starts": starts}),
        "padding_order rows": ((rt.tensor(np.eye(3, 70, dtype=np.uint8)),), {"form": "bshd"}),
        "permute starts": ((x, row_map), {"rows": 8, "starts": starts, "pad_offsets": pads}),
        "permute index": ((x, slots), {"rows": 20}),
        "unpermute index": ((permuted, slots), {"tokens": 10, "weights": weights}),
        "unpermute_backward index": ((x, permuted, slots, weights), {}),
    }


def _context(rt: Runtime) -> Calls:
    out, rows = tensor(rt, 8, 2, 3, 16, dtype=BF16), tensor(rt, 2, 3, 8)
    ranks, cu = tensor(rt, 2, 6, 3, 8, dtype=BF16), ints(rt, 0, 4, 12)
    heads, pair = tensor(rt, 5, 2, 4, 8, dtype=BF16), {"how": "heads_to_ranks", "form": "bshd", "size": 4}
    return {
        "attention_merge bshd": (
            (tensor(rt, 2, 8, 3, 16), rows, tensor(rt, 2, 8, 3, 16, dtype=BF16), rows),
            {"out": tensor(rt, 2, 8, 3, 16), "stats": rows, "form": "bshd"},
        ),
        "attention_merge alone": (
            (out, rows, None, None),
            {"out": tensor_like(rt, out), "stats": None, "form": "sbhd", "softmax": "off-by-one"},
        ),
        "attention_merge thd": (
            (tensor(rt, 5, 3, 7), tensor(rt, 5, 3), tensor(rt, 5, 3, 7), tensor(rt, 5, 3)),
            {"out": tensor(rt, 5, 3, 7, dtype=BF16), "stats": tensor(rt, 5, 3), "form": "thd"},
        ),
        "attention_sink_grad thd": (
            (tensor(rt, 5, 3, 7), tensor(rt, 5, 3, 7), tensor(rt, 5, 3), tensor(rt, 3)),
            {"form": "thd"},
        ),
        "context_lengths rows": ((cu,), {"size": 2, "spans": (Span(((1, 2),), 1, 1, 3),), "chunk": 2}),
        "context_mark bf16": ((tensor(rt, 6, 3, 5, dtype=BF16), cu), {"size": 2}),
        "context_max alone": ((tensor(rt, 3, 5),), {}),
        "context_rows back": (
            (ranks,),
            {"how": "ranks_to_sequence", "form": "thd", "size": 2, "cu_seqlens_padded": cu},
        ),
        "context_rows dense": ((out,), {"how": "sequence_to_ranks", "form": "sbhd", "size": 2}),
        "context_rows heads": ((heads,), {**pair, "out": tensor(rt, 4, 5, 2, 1, 8, dtype=BF16)}),
        "context_rows to heads": ((tensor(rt, 4, 5, 2, 1, 8),), {**pair, "how": "ranks_to_heads"}),
        "context_sum cast": ((out, None), {"out": tensor(rt, 8, 2, 3, 16)}),
        "context_sum mixed": ((tensor(rt, 7, 5), tensor(rt, 7, 5, dtype=BF16)), {"out": tensor(rt, 7, 5)}),
    }


# ------------------------------------------------------------------------------------------------------ layers


def more_layers(rt: Runtime, recipe: Recipe | None) -> dict[str, Right]:
    """Forward and backward of layers in this recipe; of attention and the like in plain ones alone."""
    specs = layer_specs(recipe)
    counters = [ints(rt, *[[0, 0]] * n, dtype=np.int64) for n in (6, 4)]
    state: dict[str, Any] = {}
    if recipe is not None:
        state["scales"] = Scales(*(tensor(rt, 2 * n, value=v) for n in (3, 2) for v in (1.0, 0.0)), *counters)
    found: dict[str, Right] = {}

    def both(
        name: str, module: Any, spec: Any, args: tuple[Any, ...], grads: tuple[Any, ...], more: dict[str, Any] | None
    ) -> None:
        options = {"spec": spec, **(more or {})}
        forward = found[f"{name} forward"] = Right(module.forward, (rt, *args), options)
        _, saved = forward.run()
        options = {name: value for name, value in options.items() if name != "ready"}
        found[f"{name} backward"] = Right(module.backward, (rt, *grads, saved), options)

    draws = (ints(rt, 1, 2, dtype=np.int64),) if recipe is not None and recipe.nvfp4() else (None,)
    x, w, bias, dy = (tensor(rt, *shape) for shape in ((M, K), (N, K), (N,), (M, N)))
    one: linear.LinearSpec = specs["linear"]
    both("odd linear", linear, one, (x, w, bias, *draws), (dy,), state)
    sunk = found["odd linear backward"]
    sinks: dict[str, Any] = {"sinks": (Sink(tensor(rt, N, K), True),)}
    found["sunk linear backward"] = Right(sunk.function, sunk.args, {**sunk.options, **sinks})
    if recipe is None or not (recipe.mxfp8() or recipe.nvfp4()):
        both("turned linear", linear, replace(one, turned=True), (x, tensor(rt, K, N), bias, *draws), (dy,), state)
    if recipe is None or not recipe.delayed():
        both("again linear", linear, replace(one, original_input=True), (x, w, bias, *draws), (dy,), state)
    groups = grouped_linear.Groups([4, 0, 6], tensor(rt, M, N), tensor(rt, M, K))
    grouped = grouped_linear.GroupedSpec((one,) * 3)
    several = {**state, "splits": groups}
    if recipe is not None and recipe.delayed():
        several["scales"] = scales(rt, 3)
    elif recipe is not None:
        several.pop("scales")
    both("odd grouped", grouped_linear, grouped, (x, w, w, w, None, bias, bias, *draws), (dy,), several)
    sunk = found["odd grouped backward"]
    sinks = {"sinks": tuple(Sink(tensor(rt, N, K)) for _ in range(3))}
    found["sunk grouped backward"] = Right(sunk.function, sunk.args, {**sunk.options, **sinks})
    gamma = tensor(rt, K)
    stream = residual.Stream(residual.AddSpec(0.5, residual.BranchNeeds(True, True, True)))
    normed: norm_linear.NormLinearSpec = replace(specs["norm_linear"], return_norm=True, stream=stream)
    rng = ints(rt, 1, 2, dtype=np.int64)
    branch = (*draws, x, gamma, rng)
    both("odd norm_linear", norm_linear, normed, (x, gamma, gamma, w, bias, *branch), (dy, x, x), state)
    both("odd norm_linear again", norm_linear, replace(specs["norm_linear"], again=True),
         (x, gamma, gamma, w, bias, *draws), (dy, None, None), state)  # fmt: skip
    gated: mlp.MLPSpec = replace(specs["mlp"], activation="swiglu")
    for name, spec in (("gated", gated), ("checkpointed", replace(gated, checkpoint=True))):
        inner = tensor(rt, 2 * N, K), None, tensor(rt, K, N), gamma
        both(f"{name} mlp", mlp, spec, (x, gamma, gamma, *inner, *draws), (x, None, None), state)
    if recipe is None:
        _plain_layers(rt, both)
    return found


def _plain_layers(rt: Runtime, both: Any) -> None:
    needs = attention.AttentionNeeds(True, True, True)
    for name, (core, terms) in _terms(rt, F32).items():
        spec = attention.AttentionLayerSpec(core, 4, 2, 8, 8, needs)
        lengths: tuple[Tensor | None, ...] = terms.lengths or (None,) * 4
        more = (terms.bias, terms.slopes, terms.sink, *lengths, terms.mask, None, terms.rng)
        q, kv = tensor(rt, 5, 2, 4, 8), tensor(rt, 7, 2, 2, 8)
        both(f"attention {name}", attention, spec, (q, kv, kv, *more), (tensor(rt, 5, 2, 32), None), None)
    core = AttentionSpec(0.25)
    for name, packing, interleaved in (("qkv", "qkv", False), ("groups", "qkv", True), ("kv", "kv", False)):
        spec = attention.AttentionLayerSpec(core, 4, 2, 8, 8, needs, packing, interleaved)
        width = 32 if packing == "kv" else 64
        args = (tensor(rt, 5, 2, width),) if packing == "qkv" else (tensor(rt, 5, 2, 4, 8), tensor(rt, 5, 2, width))
        both(f"attention {name}", attention, spec, (*args, None, None)[:3], (tensor(rt, 5, 2, 32), None), None)
    fp8: attention_fp8.AttentionFp8Spec = layer_specs(None)["attention_fp8"]
    spec = attention.AttentionLayerSpec(core, 2, 2, 16, 16, needs, "qkv")
    delayed = {"scales": scales(rt, 3)}
    both("attention_fp8 qkv", attention_fp8, replace(fp8, attention=spec), (tensor(rt, 5, 2, 96), None, None),
         (tensor(rt, 5, 2, 32),), delayed)  # fmt: skip
    cu = ints(rt, 0, 4, 10), ints(rt, 0, 6, 16)
    both("softmax sink", softmax, softmax.SoftmaxSpec(sink_gradient=True),
         (tensor(rt, 2, 2, 6, 10), None, *cu, tensor(rt, 2)), (tensor(rt, 2, 2, 6, 10),), None)  # fmt: skip


__all__ = ["more_layers", "more_operations"]
