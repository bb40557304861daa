"""A right call of each public operation and layer, as data: what tests take apart and make wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from te_core import dtypes, ops
from te_core.attention import AttentionSpec
from te_core.layers import (
    attention,
    attention_fp8,
    grouped_linear,
    l2_norm,
    linear,
    mlp,
    norm,
    norm_linear,
    residual,
    rope,
    softmax,
)
from te_core.ops.attention import Attended
from te_core.ops.attention_fp8 import BackwardScales, ForwardScales, Scaled
from te_core.ops.context import Span
from te_core.ops.kv_cache import KVCache
from te_core.ops.loss import LossTerms
from te_core.ops.norm import Branch
from te_core.ops.optimizer import AdamQuantized, AdamRule, AdamTensors, SgdRule, SgdTensors
from te_core.ops.quantize import ScalingState
from te_core.ops.router import RouterTerms
from te_core.quantize.state import Scales
from te_core.quantized import Cast, Format
from te_core.recipe import DelayedScaling, Recipe, resolve
from te_core.runtime import Runtime
from te_core.statistics import empty
from te_core.tensor import Tensor

E4M3, E5M2 = dtypes.float8_e4m3, dtypes.float8_e5m2
ROWS, WIDTH, OUT = 32, 32, 48
HEADS, D = 2, 16


class Right(NamedTuple):
    """A call that works."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> Any:
        """Its result."""
        return self.function(*self.args, **self.options)


def tensor(rt: Runtime, *shape: int, dtype: dtypes.DType = dtypes.float32, value: float | None = None) -> Tensor:
    """Normal numbers, or all of one value."""
    made = np.random.default_rng(0).standard_normal(shape) if value is None else np.full(shape, value)
    return rt.tensor(made.astype(dtype.numpy))


def cast(rt: Runtime, scaled: bool = True, dtype: dtypes.DType = E4M3) -> Cast:
    """To one scale a tensor, given or of its own maximum."""
    scale, amax = (tensor(rt, 1, value=v) if scaled else None for v in (2.0, 0.0))
    return Cast(dtype, rowwise=True, columnwise=True, scale=scale, amax=amax)


def scales(rt: Runtime, gemms: int) -> Scales:
    """Delayed scaling's state of so many products."""
    return Scales(*(tensor(rt, n * gemms, value=v) for n in (3, 2) for v in (1.0, 0.0)))


def _cu(rt: Runtime, *ends: int) -> Tensor:
    return rt.tensor(np.array(ends, np.int32))


def _context(rt: Runtime, heads: Tensor, done: Attended) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Of the operations between ranks of one sequence."""
    cu, padded, sink = _cu(rt, 0, 3, 5), _cu(rt, 0, 4, 12), tensor(rt, HEADS)
    x, order = tensor(rt, ROWS, WIDTH), {"how": "sequence_to_ranks", "form": "thd", "size": 2}
    merge = {"out": tensor(rt, 8, 2, HEADS, D), "stats": tensor(rt, 2, HEADS, 8), "form": "sbhd"}
    return {
        "attention_merge": ((heads, done.stats, heads, done.stats), {**merge, "softmax": "learnable", "sink": sink}),
        "attention_sink_grad": ((heads, done.out, done.stats, sink), {"form": "sbhd"}),
        "context_draws": ((rt.tensor(np.array([1, 2], np.int64)), (0, 1)), {}),
        "context_lengths": ((cu, padded), {"size": 2, "spans": (Span(((0, 1), (3, 4)), 2),)}),
        "context_mark": ((tensor(rt, 6, HEADS, D), padded), {"size": 2}),
        "context_max": ((tensor(rt, 3, HEADS),), {"heads": 2 * HEADS, "first": 1}),
        "context_rows": ((tensor(rt, 12, HEADS, D),), {**order, "cu_seqlens_padded": padded}),
        "context_sum": ((x, x), {"out": tensor(rt, ROWS, WIDTH)}),
    }


def _losses(rt: Runtime) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    x, goal, terms, facts = (
        tensor(rt, ROWS, WIDTH),
        rt.tensor(np.arange(ROWS)),
        LossTerms(WIDTH),
        tensor(rt, 2, ROWS, 3),
    )
    gradient = {"terms": terms, "known": facts, "grad": tensor(rt, ROWS), "out": tensor(rt, ROWS, WIDTH)}
    return {
        "loss_facts": ((x, goal), {"terms": terms, "out": tensor(rt, ROWS, 3)}),
        "loss_gradient": ((x, goal), gradient),
        "loss_values": ((facts, goal), {"terms": terms}),
    }


def _router(rt: Runtime) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    x, terms, one = tensor(rt, ROWS, WIDTH), RouterTerms(4, "sigmoid"), rt.tensor(np.array([ROWS], np.int64))
    more = {
        "terms": terms,
        "bias": tensor(rt, WIDTH),
        "bounds": tensor(rt, 2),
        "counts": _cu(rt, *[0] * WIDTH),
        "align": 8,
    }
    more |= {"histogram": rt.tensor(np.zeros((WIDTH, 5), np.int32)), "offsets": _cu(rt, *[0] * (WIDTH + 1))}
    loss = {"experts": WIDTH, "topk": 4, "coeff": 0.1}
    return {
        "router_aux_loss_forward": ((x, tensor(rt, WIDTH), one), loss),
        "router_aux_loss_backward": ((tensor(rt, 1), tensor(rt, WIDTH), one), {"rows": ROWS, **loss}),
        "router_scores_forward": ((x,), {"terms": terms}),
        "router_scores_backward": ((x, x), {"terms": terms}),
        "router_topk_forward": ((x,), more),
        "router_topk_backward": ((x, x, rt.tensor(np.eye(ROWS, WIDTH, dtype=bool))), {"terms": terms}),
    }


def _lists(rt: Runtime) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Of the operations on lists of tensors."""
    a, b, half = tensor(rt, ROWS), tensor(rt, ROWS), tensor(rt, ROWS, dtype=dtypes.float16)
    one, none, step = tensor(rt, 1, value=1.0), tensor(rt, 1, value=0.0), rt.tensor(np.array([3], np.int32))
    states = half, tensor(rt, ROWS, dtype=E4M3, value=1.0), None, tensor(rt, 3)
    matrices = [tensor(rt, ROWS, WIDTH, value=1.0) for _ in range(4)]
    weight = AdamQuantized(*matrices, ops.quantize(rt, matrices[3], cast(rt)), cast(rt))
    return {
        "adam_quantized": (([weight], AdamRule(0.1, 0.9, 0.99, 1e-8, 0.1, 1)), {}),
        "adam": (([AdamTensors(a, b, *states)], AdamRule(one, 0.9, 0.99, 1e-8, 0.1, step, True, True, one, none)), {}),
        "norm_many": (([[a, b], [half]],), {"scale": one, "each": True}),
        "scale_many": (([a, b], [b, a], one), {"flag": rt.tensor(np.zeros(1, np.int32))}),
        "sgd": (([SgdTensors(a, b, half)], SgdRule(0.1, 0.9)), {}),
    }


def operations(rt: Runtime) -> dict[str, Right]:
    """Of every operation, with as many of its optional tensors as go together."""
    x, w, vector = tensor(rt, ROWS, WIDTH), tensor(rt, OUT, WIDTH), tensor(rt, WIDTH)
    y, rows = tensor(rt, ROWS, OUT), tensor(rt, ROWS, value=1.0)
    q8, w8 = ops.quantize(rt, x, cast(rt)), ops.quantize(rt, w, cast(rt))
    rng = rt.tensor(np.array([1, 2], np.int64))
    heads, freqs = tensor(rt, 8, 2, HEADS, D), tensor(rt, 8, D)
    packed, scores = tensor(rt, 8, 2, 3 * HEADS * D), tensor(rt, 2, HEADS, 8, 8)
    cache = KVCache(*(tensor(rt, 2, 16, HEADS, D) for _ in range(2)))
    paged = KVCache(*(tensor(rt, 4, 8, HEADS, D) for _ in range(2)), rt.tensor(np.array([[0, 1], [2, 3]], np.int32)))
    state = ScalingState(tensor(rt, 3, value=1.0), tensor(rt, 4, 3, value=1.0), tensor(rt, 3, value=1.0), 448.0)
    spec = AttentionSpec(0.25)
    done = ops.attention_forward(rt, heads, heads, heads, spec=spec)
    one, none = tensor(rt, 1, value=1.0), tensor(rt, 1, value=0.0)
    s, small = Scaled(one, one, none), tensor(rt, 8, 2, HEADS, D, dtype=E4M3, value=1.0)
    forward = ForwardScales(one, one, one, s, s)
    done8 = ops.attention_fp8_forward(rt, small, small, small, spec=spec, scales=forward, out=small)
    backward = BackwardScales(one, one, one, one, one, s, s, s, s, s)
    dy8 = tensor(rt, 8, 2, HEADS, D, dtype=E5M2, value=1.0)
    split = {"heads": HEADS, "groups": HEADS, "head_dims": (D, D, D), "interleaved_groups": False}
    routing, experts = rt.tensor(np.eye(ROWS, 4, dtype=np.int32)), rt.tensor(np.zeros((ROWS, 2), np.int32))
    row_map, pads, probs = ops.mask_row_map(rt, routing), rt.tensor(np.zeros(4, np.int64)), tensor(rt, ROWS, 4)
    chunks = rt.tensor(np.array([3, 5], np.int32)), rt.tensor(np.array([1, 0], np.int32))
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        **(_context(rt, heads, done) | _losses(rt) | _lists(rt) | _router(rt)),
        "activation_forward": ((x, "gelu"), {"cast": cast(rt)}),
        "activation_backward": ((x, x, "gelu"), {"cast": cast(rt), "column_sum": vector}),
        "add": ((x, x), {"out": tensor(rt, ROWS, WIDTH)}),
        "rank_sum": ((tensor(rt, 3, ROWS, WIDTH),), {"out": tensor(rt, ROWS, WIDTH)}),
        "amax": ((x,), {"out": none}),
        "amax_many": (([x, w],), {}),
        "attention_forward": ((heads, heads, heads), {"spec": spec}),
        "attention_backward": ((heads, heads, heads, heads, done.out, done.stats), {"spec": spec}),
        "attention_fp8_forward": ((small, small, small), {"spec": spec, "scales": forward, "out": small}),
        "attention_fp8_backward": ((dy8, small, small, small, small, done8.stats), {"spec": spec, "scales": backward}),
        "bias_dropout_add": ((x, vector, x), {"p": 0.5, "rng": rng}),
        "bias_dropout_add_backward": ((x,), {"p": 0.5, "rng": rng, "column_sum": vector}),
        "chunk_row_map": (chunks, {"rows": ROWS}),
        "column_sum": ((x, vector), {}),
        "count_nonfinite": ((x, rt.tensor(np.zeros(2, np.int64))), {}),
        "dequantize": ((q8, dtypes.float32), {}),
        "gemm": ((x, w), {"trans_b": True, "bias": tensor(rt, OUT), "epilogue": "gelu", "aux": y, "out": y}),
        "gemm_grouped": (
            (x, [w, w], y, _cu(rt, 0, 8, 32)),
            {"sizes": [8, 24], "trans_b": True, "bias": [None, tensor(rt, OUT)]},
        ),
        "gemm_quantized": ((q8, w8, y), {"bias": tensor(rt, OUT)}),
        "group_offsets": ((_cu(rt, 8, 24), 32, _cu(rt, 0, 0, 0), _cu(rt, 0)), {}),
        "group_sums": ((x, _cu(rt, 0, 8, 32), [tensor(rt, WIDTH), tensor(rt, WIDTH)]), {}),
        "index_row_map": ((experts,), {"rows": 2 * ROWS}),
        "kv_append": ((heads, heads, cache, _cu(rt, 0, 3, 5), _cu(rt, 0, 3, 5)), {"form": "sbhd"}),
        "kv_gather": ((paged, _cu(rt, 0, 3, 5)), {}),
        "kv_move": ((cache, rt.tensor(np.array([[0, 1, 3]], np.int32))), {"longest": 8}),
        "l2_norm_forward": ((x,), {"eps": 1e-6}),
        "l2_norm_backward": ((x, x), {"eps": 1e-6}),
        "mask_row_map": ((routing,), {}),
        "norm_forward": (
            (x, vector, vector),
            {"kind": "LayerNorm", "eps": 1e-5, "cast": cast(rt), "branch": Branch(x, tensor(rt, ROWS, WIDTH), vector)},
        ),
        "norm_backward": ((x, x, vector, rows, rows), {"kind": "LayerNorm", "add": x}),
        "padding_order": ((rt.tensor(np.eye(3, 40, dtype=bool)),), {"form": "sbhd"}),
        "permute": ((x, row_map), {"rows": ROWS, "probs": probs, "pad_offsets": pads}),
        "quantize": ((x, cast(rt)), {"column_sum": vector}),
        "quantize_grouped": ((x, [16, 16], [cast(rt, False)] * 2, [tensor(rt, WIDTH) for _ in range(2)]), {}),
        "quantize_rows": ((x, _cu(rt, 0, 8, 32), [cast(rt, False)] * 2), {}),
        "quantize_many": (([x, w], [cast(rt, False)] * 2), {}),
        "resize": ((x, 16, 64), {}),
        "rope": ((heads, freqs), {"start_positions": rt.tensor(np.zeros(2, np.int32))}),
        "rope_qkv": ((packed, freqs, freqs), split),
        "rope_qkv_backward": ((heads, heads, heads, freqs, freqs), split),
        "scale_pairs": (([one], [none]), {}),
        "softmax_forward": ((scores,), {"mask": rt.tensor(np.zeros((1, 1, 8, 8), bool)), "sink": tensor(rt, HEADS)}),
        "softmax_backward": ((scores, scores, tensor(rt, 2, 8, HEADS)), {}),
        "statistics": ((x, rt.tensor(empty()), q8), {}),
        "swizzle_scales": ((rt.tensor(np.ones((128, 4), np.uint8)),), {}),
        "transpose": ((x,), {}),
        "unpermute": ((x, row_map), {"tokens": ROWS, "gates": probs, "row_probs": rows, "pad_offsets": pads}),
        "unpermute_backward": ((x, x, row_map, probs), {"pad_offsets": pads}),
        "update_scales": (([state], "max"), {}),
        "plan_update": (([state], "max"), {}),
    }
    return {name: Right(getattr(ops, name), (rt, *args), options) for name, (args, options) in calls.items()}


#: What is public and takes no tensor of the caller's.
NO_TENSORS = {"KVCache", "gemm_route", "is_gated", "packed_width", "run_update"}


def layer_specs(recipe: Recipe | None) -> dict[str, Any]:
    """A spec of each layer, those with products in this recipe."""
    precision = None if recipe is None else resolve(recipe)
    all_needs = linear.Needs(True, True, True)
    one = linear.LinearSpec(dtypes.float32, precision, all_needs)
    normed = norm.NormSpec(dtypes.float32, "LayerNorm", 1e-5)
    attends = attention.AttentionLayerSpec(
        AttentionSpec(0.25), HEADS, HEADS, D, D, attention.AttentionNeeds(True, True, True)
    )
    fp8 = resolve(DelayedScaling(fp8_dpa=True)).attention
    assert fp8 is not None
    return {
        "attention": attends,
        "attention_fp8": attention_fp8.AttentionFp8Spec(attends, fp8, dtypes.float32),
        "grouped_linear": grouped_linear.GroupedSpec((one, one)),
        "l2_norm": l2_norm.L2NormSpec(1e-6),
        "linear": one,
        "mlp": mlp.MLPSpec(one, one, normed, "gelu"),
        "norm": normed,
        "norm_linear": norm_linear.NormLinearSpec(normed, one),
        "residual": residual.AddSpec(0.5, residual.BranchNeeds(True, True, True)),
        "rope": rope.RopeSpec(),
        "softmax": softmax.SoftmaxSpec(),
        "split": rope.SplitSpec(HEADS, HEADS, (D, D, D), False),
    }


def layers(rt: Runtime, recipe: Recipe | None = None) -> dict[str, Right]:
    """Forward and backward of every layer; `recipe` is that of its products."""
    specs = layer_specs(recipe)
    history = None if recipe is None or not recipe.delayed() else 2
    state = {} if history is None else {"scales": scales(rt, history)}
    x, vector, heads = tensor(rt, 4, 8, WIDTH), tensor(rt, WIDTH), tensor(rt, 8, 2, HEADS, D)
    w, bias, flat = tensor(rt, OUT, WIDTH), tensor(rt, OUT), tensor(rt, 8, 2, HEADS * D)
    rng = rt.tensor(np.array([1, 2], np.int64))
    draws = () if recipe is None or not recipe.nvfp4() else (rng,)
    freqs = tensor(rt, 8, D)
    dy = tensor(rt, 4, 8, OUT)
    groups = {"splits": grouped_linear.Groups([16, 16])}
    both: dict[str, tuple[Any, str, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]] = {
        "attention": (attention, "", (heads, heads, heads), (flat, None), {}),
        "attention_fp8": (attention_fp8, "", (flat, flat, flat), (flat,), {"scales": scales(rt, 3)}),
        "grouped_linear": (grouped_linear, "", (x, w, w, bias, bias, *(draws or (None,))), (dy,), {**groups, **state}),
        "l2_norm": (l2_norm, "", (x,), (x,), {}),
        "linear": (linear, "", (x, w, bias, *draws), (dy,), state),
        "mlp": (mlp, "", (x, vector, vector, w, bias, tensor(rt, WIDTH, OUT), vector, *draws), (x, None, None), state),
        "norm": (norm, "", (x, vector, vector), (x,), {}),
        "norm_linear": (norm_linear, "", (x, vector, vector, w, bias, *draws), (dy, None, None), state),
        "residual": (residual, "", (x, vector, x, rng), (x,), {}),
        "rope": (rope, "", (heads, freqs, None, None), (heads,), {}),
        "softmax": (
            softmax,
            "",
            (tensor(rt, 2, HEADS, 8, 8), None, None, None, None),
            (tensor(rt, 2, HEADS, 8, 8),),
            {},
        ),
        "split": (
            rope,
            "split_",
            (tensor(rt, 8, 2, 3 * HEADS * D), freqs, freqs, None, None),
            (heads, heads, heads),
            {},
        ),
    }
    found = {}
    for name, (module, prefix, args, grads, options) in both.items():
        more = {"spec": specs[name], **options}
        forward = found[f"{name} forward"] = Right(getattr(module, f"{prefix}forward"), (rt, *args), more)
        _, saved = forward.run()
        found[f"{name} backward"] = Right(getattr(module, f"{prefix}backward"), (rt, *grads, saved), more)
    return found


__all__ = ["NO_TENSORS", "Format", "Right", "layer_specs", "layers", "operations", "scales", "tensor"]
