"""Rows of messages of te_core's layers and functions; tests/messages/test_messages.py says how to add one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from te_core import dtypes, ops
from te_core import functional as te
from te_core.attention import AttentionSpec
from te_core.layers import attention, attention_fp8, grouped_linear, linear
from te_core.layers.communicator import InProcessRanks
from te_core.layers.context.schedule import Context
from te_core.layers.cross_entropy import HeadSpec
from te_core.layers.graph import Graph
from te_core.layers.grouped_linear import GroupedSpec, Groups
from te_core.layers.linear import LinearSpec, Needs, Sink
from te_core.layers.parallel import Split
from te_core.layers.residual import Stream
from te_core.ops.loss import LossTerms
from te_core.ops.quantize import ScalingState
from te_core.quantize.state import Scales
from te_core.quantized import Cast, Copy, Format, QuantizedTensor
from te_core.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    resolve,
)
from te_core.runtime import Runtime
from te_core.tensor import CPU as HOST
from te_core.tensor import Device, Tensor, from_numpy
from tests.core import composed_cases, context_cases, face
from tests.core.context_cases import Batch, Ranks
from tests.core.face import tensor
from tests.functional_cases import RECIPES, WHOLE, right
from tests.messages.rows import Rows

ROWS = Rows()
CPU = Runtime.cpu()
F32, F16, E4M3 = dtypes.float32, dtypes.float16, dtypes.float8_e4m3


def lent(*shape: int) -> Tensor:
    """Memory that NumPy calls read-only."""
    array = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return from_numpy(array)


def elsewhere(t: Tensor) -> Tensor:
    """The tensor, on a device that is not the runtime's."""
    return Tensor(t.ptr, t.shape, t.dtype, Device("cuda", 9), t.owner)


def add(rows: dict[str, Callable[[], Any]]) -> None:
    """These."""
    for name, call in rows.items():
        ROWS[name] = call


# ------------------------------------------------------------------------------------------ outputs and casts

x, one, state = tensor(CPU, 10, 24), tensor(CPU, 1), (tensor(CPU, 3), tensor(CPU, 4, 3), tensor(CPU, 3))


def cast(**tensors: Any) -> Cast:
    """Of one scale."""
    return Cast(E4M3, rowwise=True, columnwise=True, **tensors)


def cut() -> QuantizedTensor:
    """Whose data lacks the padding."""
    q = ops.quantize(CPU, x, cast())
    assert q.rowwise is not None and q.rowwise_scale is not None
    short = Tensor(q.rowwise.ptr, (10, 24), q.rowwise.dtype, HOST, q.rowwise)
    return QuantizedTensor(q.format, q.shape, Copy(short, q.rowwise_scale, None), None)


for name, call in {
    "transpose": lambda out: ops.transpose(CPU, x, out=out),
    "amax": lambda out: ops.amax(CPU, x, out=out),
    "resize": lambda out: ops.resize(CPU, x, 6, 8, out=out),
    "add": lambda out: ops.add(CPU, x, x, out=out),
    "column_sum": lambda out: ops.column_sum(CPU, x, out),
}.items():
    size = {"transpose": (24, 10), "amax": (1,), "resize": (6, 8), "add": (10, 24), "column_sum": (24,)}[name]
    add(
        {
            f"{name} into an element less": lambda call=call, s=size: call(tensor(CPU, *s[:-1], s[-1] - 1)),
            f"{name} into float16": lambda call=call, s=size: call(tensor(CPU, *s, dtype=F16)),
            f"{name} into memory that is lent": lambda call=call, s=size: call(lent(*s)),
            f"{name} into another device": lambda call=call, s=size: call(elsewhere(tensor(CPU, *s))),
        }
    )
del ROWS["column_sum into float16"], name  # which is a type for sums of float16 alone
add(
    {
        "add of tensors elsewhere": lambda: ops.add(CPU, elsewhere(x), elsewhere(x)),
        "bias_dropout_add elsewhere": lambda: ops.bias_dropout_add(CPU, x, None, elsewhere(x), p=0.0),
        "quantize into another shape": lambda: ops.quantize(
            CPU, x, cast(), out=ops.quantize(CPU, tensor(CPU, 10, 40), cast())
        ),
        "quantize into data without padding": lambda: ops.quantize(CPU, x, cast(), out=cut()),
        "dequantize data without padding": lambda: ops.dequantize(CPU, cut(), F32),
        "Cast without room for a maximum": lambda: cast(scale=one, amax=tensor(CPU, 0)),
        "Cast with a scale in bfloat16": lambda: cast(scale=tensor(CPU, 1, dtype=dtypes.bfloat16)),
        "Cast with an array as scale": lambda: cast(scale=np.ones(1, np.float32)),
        "Cast with tensors of two devices": lambda: cast(scale=one, amax=elsewhere(one)),
        "Cast with a lent maximum": lambda: cast(scale=one, amax=lent(1)),
        "Cast with maxima in float16": lambda: cast(maxima=tensor(CPU, 1, dtype=F16)),
        "Scales in float16": lambda: Scales(one, tensor(CPU, 1, dtype=F16), None, None),
        "Scales with lent maxima": lambda: Scales(one, lent(1), None, None),
        "Scales with a short counter": lambda: Scales(*(None,) * 4, forward_nonfinite=tensor(CPU, 2)),
        "Sink of lent memory": lambda: Sink(lent(4, 4)),
        "ScalingState with a flat history": lambda: ScalingState(state[0], tensor(CPU, 12), state[2], 448.0),
        "ScalingState with lent memory": lambda: ScalingState(state[0], state[1], lent(3), 448.0),
        "ScalingState on two devices": lambda: ScalingState(state[0], elsewhere(state[1]), state[2], 448.0),
        "scale_pairs elsewhere": lambda: ops.scale_pairs(CPU, [elsewhere(one)], [None]),
    }
)

# ------------------------------------------------------------------------------- sizes, as they are given


def made(form: Format, *shape: int) -> QuantizedTensor:
    """A quantized matrix."""
    return ops.quantize(CPU, tensor(CPU, *shape), Cast(form, rowwise=True, columnwise=True))


def multiply(form: Format, a: int, b: tuple[int, int], *out: int) -> None:
    """Of 24 columns; where storage rounds sizes up, messages quote the user's."""
    ops.gemm_quantized(CPU, made(form, a, 24), made(form, *b), tensor(CPU, *out))


for form in (*(Format(E4M3, scaling) for scaling in ("tensor", "block", "mxfp8")), Format(dtypes.float4_e2m1, "nvfp4")):
    for given in ((10, (20, 23), 10, 20), (10, (20, 24), 10, 19), (10, (20, 24), 9, 20), (11, (20, 24), 10, 20)):
        ROWS.add(multiply, form, *given)
    ROWS[f"gemm_grouped of other rows in {form}"] = lambda form=form: ops.gemm_grouped(
        CPU,
        [made(form, 5, 24), made(form, 6, 24)],
        [made(form, 20, 24)] * 2,
        tensor(CPU, 10, 20),
        sizes=[4, 6],
        trans_b=True,
    )


def without_a_copy(columnwise: bool, first: bool) -> None:
    """As of a weight whose user has dropped it."""
    whole, lost = (made(Format(E4M3), 32, 32) for _ in range(2))
    setattr(lost, "columnwise" if columnwise else "rowwise", None)
    pair, copies = (lost, whole) if first else (whole, lost), {"a_columnwise": columnwise, "b_columnwise": columnwise}
    ops.gemm_quantized(CPU, *pair, tensor(CPU, 32, 32), **copies, emulate=True)


ROWS.each(without_a_copy, True, first=(True, False))
ROWS.each(without_a_copy, False, first=(True, False))
ROWS["gemm_quantized under strict"] = lambda: ops.gemm_quantized(
    CPU, *[made(Format(dtypes.float8_e5m2), 16, 32)] * 2, tensor(CPU, 16, 16), strict=True
)

for recipe in (
    None,
    DelayedScaling(),
    Float8CurrentScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
):
    spec = LinearSpec(F32, None if recipe is None else resolve(recipe), Needs(True, True, True))
    more: dict[str, Any] = {"spec": spec}
    if recipe is not None and recipe.delayed():
        more["scales"] = face.scales(CPU, 2)
    draws = (CPU.tensor(np.array([1, 2], np.int64)) if recipe is not None and recipe.nvfp4() else None,)
    y, w, narrow = tensor(CPU, 4, 8), tensor(CPU, 6, 8), tensor(CPU, 6, 7)
    several = {**more, "spec": GroupedSpec((spec, spec)), "splits": Groups([1, 3])}
    _, saved = linear.forward(CPU, y, w, None, *draws, **more)
    _, kept = grouped_linear.forward(CPU, y, w, w, None, None, *draws, **several)
    for layer, args, options in (
        (linear.forward, (y, narrow, None, *draws), more),
        (grouped_linear.forward, (y, narrow, narrow, None, None, *draws), several),
        (linear.backward, (tensor(CPU, 4, 5), saved), more),
        (linear.backward, (tensor(CPU, 400, 6), saved), more),  # reads behind what was saved of x
        (grouped_linear.backward, (tensor(CPU, 4, 5), kept), several),
        (grouped_linear.forward, (y, w, w, None, None, *draws), {**several, "splits": Groups([1, 2])}),
    ):
        shapes = [a.shape for a in args if isinstance(a, Tensor)][:2]
        what = f"{layer.__module__.rpartition('.')[2]} {layer.__name__} of {shapes} in {type(recipe).__name__}"
        ROWS[what] = lambda layer=layer, args=args, options=options: layer(CPU, *args, **options)

q, k, v = face.layers(CPU)["attention forward"].args[1:]
plain = face.layers(CPU)["attention forward"].options["spec"]
flat = face.layers(CPU)["attention_fp8 forward"]
for name, args in {
    "more heads": (tensor(CPU, 8, 2, 2 * face.HEADS, face.D), k, v),
    "narrow keys": (q, tensor(CPU, 8, 2, face.HEADS, face.D - 1), v),
    "no values": (q, k, None),
}.items():
    ROWS[f"attention of {name}"] = lambda args=args: attention.forward(CPU, *args, spec=plain)
ROWS["attention of a short packed row"] = lambda: attention.forward(
    CPU, tensor(CPU, 8, 2, 90), None, None, spec=replace(plain, packing="qkv")
)
for shapes in (((8, 2, 32), (8, 2, 24)), ((7, 2, 16), (8, 2, 32))):
    ROWS[f"attention_fp8 of {shapes}"] = lambda shapes=shapes: attention_fp8.forward(
        CPU, tensor(CPU, *shapes[0]), tensor(CPU, *shapes[1]), flat.args[1], **flat.options
    )
ROWS["HeadSpec(chunk=0)"] = lambda: HeadSpec(
    LinearSpec(F32, None, Needs(True, True, False)), LossTerms(4), "sum", 0, True
)

# ------------------------------------------------------------------------------------ parts that do not fit

whole, crossed = composed_cases.Layer().spec(), composed_cases.Layer(cross=True).spec()
block = whole.attention
core = block.attention.core
add(
    {
        "AttentionBlock of another packing": lambda: replace(block, attention=replace(block.attention, packing="kv")),
        "AttentionBlock with the largest logits": lambda: replace(
            block, attention=replace(block.attention, core=replace(core, max_logit=True))
        ),
        "graph with an inspector": lambda: replace(block, proj=replace(block.proj, inspect=frozenset())).graph(),
        "TransformerBlock without the sum": lambda: replace(whole, mlp=replace(whole.mlp, stream=Stream())),
        "TransformerBlock beside a sum": lambda: replace(whole, beside=True),
        "TransformerBlock whose first norm forms a sum": lambda: replace(crossed, attention=crossed.cross),
        "Graph without its first node": lambda: Graph(block.nodes()[1:], ("x",), ("out",)),
    }
)
SPEC = LinearSpec(F32, None, Needs(True, True, False))
for recipe in (MXFP8BlockScaling(), NVFP4BlockScaling()):
    ROWS[f"LinearSpec(turned=True) in {type(recipe).__name__}"] = lambda r=recipe: replace(
        SPEC, precision=resolve(r), turned=True
    )
add(
    {
        "LinearSpec(turned=True) over ranks": lambda: replace(SPEC, parallel=Split("column", 2), turned=True),
        "LinearSpec(turned=True) inspected": lambda: replace(SPEC, inspect=frozenset(), turned=True),
        "GroupedSpec of turned weights": lambda: GroupedSpec((replace(SPEC, turned=True),)),
    }
)


# -------------------------------------------------------------------------------------- sequences over ranks


def over_ranks(**changes: Any) -> None:
    """An attention over ranks."""
    context_cases.run(context_cases.Case(**changes))


for changes in (
    {"mode": "ring"},
    {"mode": "all_gather", "form": "thd", "window": (3, 2), "mask": "padding"},
    {"window": (3, 0)},
    {"mode": "a2a+p2p", "size": 4, "inner": 2, "window": (3, 0)},
    {"mode": "all_gather", "window": (3, 0), "dropout": 0.1},
    {"cross": True},
    {"bias": "alibi"},
):
    ROWS.add(over_ranks, **changes)


def on_a_rank(shape: tuple[int, ...], size: int = 2, spec: Any = None, **terms: Any) -> None:
    """What the first of so many ranks says; 0: there is none."""
    rank = InProcessRanks(size).of(0) if size else None
    t, half = CPU.zeros(shape, F32), CPU.zeros((*shape[:2], shape[2] // 2, shape[3]), F32)
    spec = spec or context_cases.Case().spec(Context("p2p", 2))
    attention.forward(CPU, t, half, half, **terms, spec=spec, comm=rank)


ring = context_cases.Case().spec(Context("p2p", 2))
thirds = replace(context_cases.Case(mode="a2a", size=4).spec(Context("a2a", 3)), heads=8, groups=4)
biased = replace(ring, core=AttentionSpec(1.0, bias="post_scale_bias"))
bias = CPU.zeros((1, 1, 8, 8), F32)
add(
    {
        "ranks with an odd number of tokens": lambda: on_a_rank((7, 1, 4, 8)),
        "ranks that are not there": lambda: on_a_rank((8, 1, 4, 8), 0),
        "heads for three ranks": lambda: on_a_rank((6, 1, 8, 8), 3, thirds),
        "ranks with a mask": lambda: on_a_rank(
            (8, 1, 4, 8),
            spec=replace(ring, core=replace(ring.core, masked=True, right=-1)),
            mask=CPU.zeros((1, 1, 8, 8), dtypes.uint8),
        ),
        "ranks with a bias of their keys alone": lambda: on_a_rank((8, 1, 4, 8), spec=biased, bias=bias),
        "heads on ranks with a bias": lambda: on_a_rank(
            (8, 1, 4, 8), spec=replace(biased, context=Context("a2a", 2)), bias=bias
        ),
    }
)


def one_of_two_groups() -> None:
    """In one of which every rank would attend to its own."""
    case = context_cases.Case(mode="a2a+p2p", size=4, inner=2)
    batch, ranks = Batch(case), Ranks(case)
    ranks.run(lambda rank, comm: context_cases.step(case, batch, rank, comm[0]))


def padded_otherwise(mode: str) -> None:
    """To lengths that are no multiples of the chunks."""
    case = context_cases.Case(mode=mode, form="thd", mask="padding", lengths="odd")
    batch = Batch(case)
    for side in (batch.q_side, batch.kv_side):
        side.cu_padded[1] += 1
    context_cases.run(case, batch)


ROWS.add(one_of_two_groups)
ROWS.each(padded_otherwise, mode=("p2p", "all_gather", "a2a"))

# --------------------------------------------------------------------------------------------------- functions

X, W, DY = (np.ones(shape, np.float32) for shape in ((4, 16), (8, 16), (4, 8)))
T = W.T.copy()
RECIPE = DelayedScaling(amax_history_len=2)
read_only = W.copy()
read_only.flags.writeable = False


def back(dy: Any = DY, into: Any = None, **options: Any) -> None:
    """Of a linear."""
    te.linear(X, W, **options)[1](dy, **({} if into is None else {"into": into}))


for args, options in (
    ((X.astype(np.int32), W), {}),
    ((X, W.astype(np.float16)), {}),
    ((X, W[:, :8]), {}),
    ((X, W[0]), {}),
    ((X, T), {}),
    ((X, W), {"turned": True}),
    ((X, T), {"turned": 1}),
    ((X, T), {"turned": True, "recipe": MXFP8BlockScaling()}),
    ((X,), {}),
    ((X, "weight"), {}),
    ((X, W), {"bais": W[0]}),
    ((X, W), {"x": X}),
    ((X, W), {"needs": ("bias",)}),
    ((X, W), {"rt": 3}),
    ((X, W), {"recipe": "fp8"}),
    ((X, W), {"recipe": RECIPE}),
):
    ROWS.add(te.linear, *args, **options)
states = te.Scaling(RECIPE, te.layernorm_mlp, like=X), te.Scaling(DelayedScaling(), te.linear, like=X)
wrong_maps = np.full(8, -2, np.int32)
long, short = np.array([0, 9], np.int32), np.array([0, 4], np.int32)
packed = {"qkv_format": "thd", "attn_mask_type": "padding", "cu_seqlens_q": long, "cu_seqlens_kv": short}
elsewhere_w = Tensor(W.ctypes.data, W.shape, F32, Device("cuda", 3), W)
norm = {"layer_norm_weight": X[0], "layer_norm_bias": X[0], "fc2_weight": W, "activation": "swiglu"}
add(
    {
        "linear with a transposed weight": lambda: te.linear(X, W.T),
        "linear in another byte order": lambda: te.linear(X.astype(">f4"), W),
        "linear of a masked array": lambda: te.linear(np.ma.masked_array(X), W),
        "linear with a weight elsewhere": lambda: te.linear(X, elsewhere_w),
        "linear with another layer's state": lambda: te.linear(X, W, recipe=RECIPE, scaling=states[0]),
        "linear with another recipe's state": lambda: te.linear(X, W, recipe=RECIPE, scaling=states[1]),
        "linear quantized by another recipe": lambda: te.linear(
            X, te.quantize(W, RECIPES["block"]), recipe=RECIPES["current"]
        ),
        "linear quantized without a recipe": lambda: te.linear(X, te.quantize(W, RECIPES["current"])),
        "back into what is read-only": lambda: back(into={"weight": read_only}),
        "attention with long lengths": lambda: te.attention(*[X.reshape(4, 2, 8)] * 3, **packed),
    }
)
ROWS.add(te.activation, X, activation="gleu")
ROWS.add(te.rmsnorm, X, X[0], recipe=RECIPE)
ROWS.add(te.bias_dropout_add, X, hidden_dropout=0.5)
ROWS.add(te.moe_unpermute, X, wrong_maps, map_type="index", num_tokens=4)
ROWS.add(te.grouped_linear, X, [W, W], m_splits=[3, 2])
ROWS.add(te.layernorm_mlp, X, fc1_weight=W, **norm)
ROWS.add(te.layernorm_mlp, X, fc1_weight=T, turned=True, **norm)
ROWS.add(te.layernorm_linear, X, X[0], weight=W)
ROWS.add(back, np.ones((4, 8)))
ROWS.add(back, DY[:3])
ROWS.add(back, into={"weight": W[:4].copy()})
ROWS.add(back, into={"x": X.copy()})
ROWS.add(back, needs=())


def call(name: str, recipe: Any = None, **wrong: Any) -> None:
    """A whole layer with arguments replaced."""
    case = right(3, name, "plain")
    options = {n: o for n, o in case.options.items() if "dropout" not in n and n != "seed"}
    arrays = dict(case.arrays)
    if wrong.pop("short", False):
        arrays["layernorm_mlp_fc1_weight"] = arrays["layernorm_mlp_fc1_weight"][:24].copy()
        arrays.pop("layernorm_mlp_fc1_bias", None)
    getattr(te, name)(**{**arrays, **options, **wrong}, recipe=recipe)


for name in WHOLE:
    ROWS.each(
        call,
        name,
        num_attention_heads=(None, 3),
        num_gqa_groups=(3,),
        attn_mask_type=("arbitrary",),
        qkv_format=("thd",),
        layer_number=(1,),
        recipe=(Float8CurrentScaling(fp8_dpa=True),),
    )
    ROWS.add(call, name, attn_mask_type="padding", cu_seqlens_q=None)
    ROWS.add(call, name, attn_mask_type="causal", cu_seqlens_q=np.array([0, 3, 8], np.int32))
ROWS.add(call, "transformer_layer", short=True)
ROWS.add(call, "transformer_layer", hidden_dropout=0.5, seed=np.array([7, 1], np.int64))
