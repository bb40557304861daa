"""Rows of messages of experts, padding, losses, data of context parallelism, overlap, and options of modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import te_torch as te
from te_core.recipe import DelayedScaling, NVFP4BlockScaling
from te_torch import router, utils
from te_torch.modules.padding import Fp8Padding, Fp8Unpadding
from tests.messages.rows import Rows
from tests.moe_cases import H, K, T, normal, probabilities, routing
from tests.torch.test_bad_options import make as module
from tests.torch.test_unusual_tensors import MODULES, WIDTH, shape

ROWS = Rows()

# ------------------------------------------------------------------------------------------------- experts

X, MASK = normal(T, H), routing("cpu")
PROBS, COUNTS = probabilities(MASK), MASK.sum(0)
OUT, MAP = te.moe_permute(X, MASK)
SIZES, ORDER = torch.tensor([3, 4]), torch.tensor([1, 0])
INDEX = {"map_type": "index"}
for given, options in (
    ((X, MASK), {"map_type": "both"}),
    ((X[1:], MASK), {}),
    ((X[None], MASK), {}),
    ((X.double(), MASK), {}),
    ((X, MASK.float()), {}),
    ((X, MASK.float()), INDEX),
    ((X, [[0]]), {}),
    *(((X, MASK, rows), {}) for rows in (0, -2, 20.0, True, torch.tensor(20.0), torch.tensor([1, 2]))),
    ((X, MASK[:, :K].contiguous(), -2), INDEX),
):
    ROWS.add(te.moe_permute, *given, **options)
ROWS.add(te.moe_permute_with_probs, X, PROBS[1:], MASK)
ROWS.add(te.moe_permute_with_probs, X, PROBS[:, 1:], MASK)
ROWS.add(te.moe_permute_with_probs, X, None, MASK)
padded = partial(te.moe_permute_and_pad_with_probs, X, PROBS, MASK)
ROWS["moe_permute_and_pad_with_probs without counts"] = lambda: padded(None, 16)
ROWS["moe_permute_and_pad_with_probs(align_size=0)"] = lambda: padded(COUNTS, 0)
ROWS["moe_permute_and_pad_with_probs with too few counts"] = lambda: padded(COUNTS[1:], 16)
ROWS["moe_permute_and_pad_with_probs with smaller counts"] = lambda: padded(COUNTS - 1, 16)
ROWS["moe_permute_and_pad_with_probs with larger counts"] = lambda: padded(COUNTS + 1, 16)
ROWS.add(te.moe_unpermute, OUT, MAP, PROBS, probs=PROBS)
ROWS.add(te.moe_unpermute, OUT, MAP, PROBS[1:])
ROWS.add(te.moe_unpermute, OUT, MAP[:, 1:])
ROWS.add(te.moe_unpermute, OUT, None)
ROWS.add(te.moe_unpermute, OUT, MAP.reshape(-1), PROBS, map_type="index")
ROWS.add(te.moe_unpermute, OUT, ORDER.int(), map_type="index", pad_offsets=COUNTS)
ROWS.each(te.moe_unpermute, OUT, MAP, map_type=("both",), restore_shape=((T + 1, H),), pad_offsets=(COUNTS[1:],))
ROWS.add(te.moe_unpermute, OUT, MAP, probs=PROBS)  # an older name, of which it warns
ROWS["a map of int64"] = lambda: te.moe_permute(X, MASK[:, :K].contiguous().long(), map_type="index")
ROWS.add(te.moe_sort_chunks_by_index, X, SIZES, ORDER[1:])
ROWS.add(te.moe_sort_chunks_by_index, X, SIZES.float(), ORDER)
ROWS.add(te.moe_sort_chunks_by_index, X, [3, 4], ORDER)
ROWS.add(te.moe_sort_chunks_by_index_with_probs, X, PROBS[:, 0][1:], SIZES, ORDER)
ROWS.add(te.moe_sort_chunks_by_index_with_probs, X, PROBS[:, 0], SIZES, [1, 0])
LOGITS, BIAS = normal(T, 8), torch.zeros(8)
choose = partial(router.fused_topk_with_score_function, LOGITS, use_pre_softmax=False, scaling_factor=None)
COUNTED = {"qb_histogram": torch.zeros(8, 4, dtype=torch.int32), "qb_bin_bounds": torch.tensor([-1.0, 1.0])}
for row, given in {
    "topk above the experts": (9, None, None, "softmax", None),
    "groups that do not divide": (2, 3, 1, "softmax", None),
    "a bias with softmax": (2, None, None, "softmax", BIAS),
    "a bias of another dtype": (2, None, None, "sigmoid", BIAS.half()),
    "a score function that is none": (2, None, None, "softplus", None),
    "a format that is none": (2, None, None, "softmax", None, "bitmap"),
    "a format of another type": (2, None, None, "softmax", None, None),
    "a bitmap and numbers": (2, None, None, "softmax", None, 1, {"topk_indices": torch.zeros(T, 2, dtype=torch.int32)}),
    "numbers of another shape": (2, None, None, "softmax", None, 0, {"topk_indices": torch.zeros(T, 3).int()}),
    "a histogram without bounds": (2, None, None, "sigmoid", BIAS, 0, {"qb_histogram": COUNTED["qb_histogram"]}),
    "a histogram in another mode": (2, None, None, "sigmoid", BIAS, 0, {**COUNTED, "qb_histogram_mode": "three"}),
    "a histogram of groups": (2, 4, 2, "sigmoid", BIAS, 0, {**COUNTED, "qb_histogram_mode": "two_kernel"}),
    "bounds that are equal": (
        2, None, None, "sigmoid", BIAS, 0,
        {**COUNTED, "qb_bin_bounds": torch.ones(2), "qb_histogram_mode": "two_kernel"},
    ),
}.items():  # fmt: skip
    names = ("topk", "num_groups", "group_topk", "score_function", "expert_bias", "routing_map_format")
    options = {**dict(zip(names, given, strict=False)), **(given[6] if len(given) > 6 else {})}
    ROWS[f"router with {row}"] = lambda options=options: choose(**options)
ROWS.add(router.fused_compute_score_for_moe_aux_loss, LOGITS.double(), 2, "softmax")
ROWS.add(router.fused_compute_score_for_moe_aux_loss, LOGITS, 9, "softmax")
ROWS.add(router.fused_moe_aux_loss, LOGITS, BIAS, T, 3, 2, 0.1)
ROWS.add(router.fused_moe_aux_loss, LOGITS, BIAS[1:], T, 8, 2, 0.1)
ROWS.add(router.fused_moe_aux_loss, LOGITS, BIAS, torch.ones(2), 8, 2, 0.1)
MOE = te.MoELayer(16, 8, 4, 2, device="cpu", name="experts")
ROWS["MoELayer of other columns"] = lambda: MOE(torch.ones(3, 8))
ROWS["MoELayer.update_expert_bias without a bias"] = MOE.update_expert_bias
SPLITS = (None, 5, "44", [[4, 4]], [4.0, 4.0], ["4", "4"], torch.tensor([[4, 4]]), torch.tensor([4.0, 4.0]))


def grouped(splits: Any = (4, 4), inp: Any = None, made: dict[str, Any] | None = None, **options: Any) -> None:
    """A forward of two groups, and its backward."""
    layer = te.GroupedLinear(2, 8, 8, device="cpu", **(made or {}))
    x = torch.randn(8, 8, requires_grad=True) if inp is None else inp
    options = {name: x if value == "inp" else value for name, value in options.items()}
    layer(x, list(splits) if isinstance(splits, tuple) else splits, **options).sum().backward()


for splits in (*SPLITS, [8], [4, 5], [9, -1]):
    ROWS.add(grouped, splits)
ROWS["compiled groups of other rows"] = lambda: torch.compile(
    te.GroupedLinear(2, 16, 32, device="cpu"), fullgraph=True, backend="aot_eager"
)(torch.zeros(6, 16), torch.tensor([2, 3]))


def moved(quantizer: Any) -> None:
    """Tokens of a format that cannot be permuted."""
    te.moe_permute(quantizer(torch.ones(128, 256, dtype=torch.bfloat16)), routing("cpu", 128), 500)


E4M3 = te.DType.kFloat8E4M3
ROWS["moe_permute of tiles"] = lambda: moved(te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False))
ROWS["moe_permute of NVFP4"] = lambda: moved(te.NVFP4Quantizer())
ROWS["moe_permute of columns"] = lambda: moved(te.MXFP8Quantizer(E4M3, rowwise=False, columnwise=True))
ROWS["moe_unpermute of FP8"] = lambda: te.moe_unpermute(
    te.MXFP8Quantizer(E4M3, rowwise=True, columnwise=False)(OUT.bfloat16()), MAP
)
ROWS.add(grouped, inp=torch.randn(8, 4))
ROWS.add(grouped, made={"fuse_wgrad_accumulation": True})
ROWS.each(grouped, out=(torch.empty(7, 8), torch.empty(8, 8).half(), torch.empty(8, 4), [], "inp"), dgrad_out=("inp",))
ROWS["out that wants a gradient"] = lambda: grouped(out=torch.empty(8, 8, requires_grad=True))
ROWS["out that lies the other way"] = lambda: grouped(out=torch.empty(8, 8).T)
ROWS["out and dgrad_out in one memory"] = lambda: grouped(**dict.fromkeys(("out", "dgrad_out"), torch.empty(8, 8)))

# ------------------------------------------------------------------------------------------------- padding

for kind in (Fp8Padding, Fp8Unpadding):

    def fill(x: Any, splits: Any, kind: Any = kind) -> None:
        kind(2, 4)(x, splits)

    for splits in (*SPLITS, [4, 2, 2], [4, 5], [-3, 11]):
        ROWS[f"{kind.__name__} of m_splits={splits!r}"] = partial(fill, torch.zeros(8, 4), splits)
    for wrong in ("x", None):
        ROWS[f"{kind.__name__} of {wrong!r}"] = partial(fill, wrong, [4, 4])
ROWS["Fp8Padding of three dimensions"] = lambda: Fp8Padding(1, 16)(torch.zeros(2, 10, 4), [20])
ROWS["Fp8Padding of a nested tensor"] = lambda: Fp8Padding(2, 16)(
    torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(5, 4)]), [3, 5]
)

# ------------------------------------------------------------------------------------------------- losses

HIDDEN, WEIGHT, BIAS = torch.randn(2, 25, 32), torch.randn(67, 32), torch.randn(67)
TARGET, LOGITS = torch.zeros(2, 25, dtype=torch.int64), torch.randn(2, 3, 4)
product = partial(te.linear_cross_entropy, HIDDEN, WEIGHT, TARGET)
product.__name__ = "linear_cross_entropy"  # type: ignore[attr-defined]
ROWS.each(
    product,
    reduction=("max",),
    chunk=(0,),
    z_loss=(-1,),
    label_smoothing=(2,),
    ignore_index=(None,),
    recipe=("fp8", DelayedScaling(), NVFP4BlockScaling()),
    bias=(BIAS.double(), BIAS[:3]),
)
for given in (
    (HIDDEN.bfloat16(), WEIGHT, TARGET),
    (HIDDEN.double(), WEIGHT, TARGET),
    (HIDDEN, WEIGHT[:, :8], TARGET),
    (HIDDEN, WEIGHT, TARGET[:1]),
    (HIDDEN, WEIGHT, TARGET.float()),
    (HIDDEN[:, :3], WEIGHT, TARGET[:, :3].T),
):
    ROWS.add(te.linear_cross_entropy, *given)
ROWS.add(te.parallel_cross_entropy, LOGITS.double(), TARGET)
ROWS.add(te.parallel_cross_entropy, LOGITS)
ROWS.add(te.parallel_cross_entropy, LOGITS, TARGET)
ROWS.add(te.parallel_cross_entropy, LOGITS, TARGET[:, :3], reduce_loss="mean")
ROWS.add(te.parallel_cross_entropy, LOGITS, TARGET[:, :3].T)
ROWS["a target that is no class"] = lambda: te.parallel_cross_entropy(LOGITS, TARGET[:, :3] - 1)
ROWS["linear_cross_entropy of a target that is no class"] = lambda: te.linear_cross_entropy(HIDDEN, WEIGHT, TARGET + 67)
QUANTIZED = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")(torch.zeros(64, 32))
ROWS["linear_cross_entropy with a quantized weight"] = lambda: te.linear_cross_entropy(HIDDEN, QUANTIZED, TARGET)
ROWS["parallel_cross_entropy of quantized logits"] = lambda: te.parallel_cross_entropy(QUANTIZED, TARGET)
ROWS["linear_cross_entropy of a sparse input"] = lambda: te.linear_cross_entropy(HIDDEN.to_sparse(), WEIGHT, TARGET)
ROWS["linear_cross_entropy under vmap"] = lambda: torch.vmap(lambda h: te.linear_cross_entropy(h, WEIGHT, TARGET))(
    HIDDEN[None]
)


def freed() -> None:
    """Of memory that is not there."""
    gone = HIDDEN.clone()
    gone.untyped_storage().resize_(0)
    te.linear_cross_entropy(gone, WEIGHT, TARGET)


def twice(function: Any) -> None:
    """A second derivative."""
    x = HIDDEN.clone().requires_grad_()
    torch.autograd.grad(function(x).square().sum(), x, create_graph=True)


ROWS.add(freed)
ROWS["linear_cross_entropy differentiated twice"] = lambda: twice(lambda x: te.linear_cross_entropy(x, WEIGHT, TARGET))
ROWS["moe_permute differentiated twice"] = lambda: twice(
    lambda x: te.moe_permute(x[0], torch.zeros(25, 1, dtype=torch.int32), **INDEX)[0]
)

# ------------------------------------------------------------------------------------------------- unusual tensors


def nested(kind: str, layout: torch.layout) -> None:
    """A list of parts, which has no shape that a layer could go by."""
    parts = [torch.randn(2 + i, *shape(kind)[-2 if kind == "DotProductAttention" else -1 :]) for i in range(2)]
    x = torch.nested.nested_tensor(parts, layout=layout)
    layer = te.GroupedLinear(2, WIDTH, WIDTH, device="cpu") if kind == "GroupedLinear" else MODULES[kind]("cpu")
    layer(x, *([2, 3],) * (kind == "GroupedLinear"))


def of(kind: str, change: Any) -> None:
    """A layer of this kind on its input, changed."""
    MODULES[kind]("cpu")(change(torch.randn(shape(kind))))


for kind in MODULES:
    ROWS[f"{kind} of a list"] = partial(of, kind, lambda x: [1.0, 2.0])
    ROWS[f"{kind} of an array"] = partial(of, kind, lambda x: x.numpy())
    ROWS[f"{kind} of a sparse tensor"] = partial(of, kind, torch.Tensor.to_sparse)
    ROWS[f"{kind} of oneDNN's tensor"] = partial(of, kind, torch.Tensor.to_mkldnn)
    ROWS[f"{kind} of a nested tensor"] = partial(nested, kind, torch.strided)
    ROWS[f"{kind} of a jagged tensor"] = partial(nested, kind, torch.jagged)
    ROWS[f"{kind} of complex numbers"] = partial(of, kind, torch.Tensor.cfloat)
    ROWS[f"{kind} of a conjugate"] = partial(of, kind, lambda x: x.cfloat().conj())

# ------------------------------------------------------------------------------------------------- data of ranks

IDS, CU = torch.arange(6), torch.tensor([0, 2, 6])
for given in ((IDS, IDS[1:], CU, 4), (IDS[None, None], IDS, CU, 4), (IDS, IDS, CU[None], 4), (IDS, IDS, CU, 0)):
    ROWS.add(te.pad_thd_sequences_for_cp, *given)
ROWS["sums that begin with 1"] = lambda: te.pad_thd_sequences_for_cp(IDS, IDS, torch.tensor([1, 6]), 4)
ROWS["sums that fall"] = lambda: te.pad_thd_sequences_for_cp(IDS, IDS, torch.tensor([0, 8, 6]), 4)
ROWS.add(te.thd_get_partitioned_indices, CU, 6, 2, 2)
ROWS.add(te.thd_get_partitioned_indices, CU, 6, 2, 1)
ROWS["a sequence of more tokens than there are"] = lambda: te.thd_get_partitioned_indices(torch.tensor([0, 8]), 4, 2, 1)
ROWS["five tokens over two ranks"] = lambda: te.thd_sequence_order_to_cp_rank_order(
    torch.zeros(5), torch.tensor([0, 4]), 2
)
ROWS.add(te.get_batch_on_this_cp_rank, CU, IDS, IDS, IDS, qvk_format="bshd")
ROWS.add(te.get_batch_on_this_cp_rank, CU, IDS, IDS, IDS)
for group in ("group", [None, None], ["group"]):
    ROWS.add(te.context_part, IDS, group, 0)

# ------------------------------------------------------------------------------------------------- overlap

NONE, FP8 = te.UserBufferQuantizationMode.NONE, te.UserBufferQuantizationMode.FP8


def initialize_ub(**given: Any) -> None:
    """Of two ranks in one mode, without a process group."""
    te.initialize_ub(**{"shape": [1024, 512], "tp_size": 2, "quantization_modes": [NONE], **given})


ROWS.add(initialize_ub)
ROWS.each(
    initialize_ub,
    shape=([1024], [0, 4]),
    tp_size=(0, True),
    dtype=("bf16",),
    quantization_modes=(NONE, ["fp8"]),
    bootstrap_backend=("ucx",),
    ub_cfgs=(
        [{}, {}],
        {"qkv": {}},
        {"qkv_fprop": {"sm": 1}},
        {"qkv_fprop": 1},
        {"qkv_fprop": {"method": "rings"}},
        {"qkv_fprop": {"method": "pipeline"}},
        {"qkv_fprop": {"method": "bulk"}},
        {"qkv_fprop": {"is_reduce_scatter": True}},
        {"proj_fprop": {"method": "external"}},
        {"proj_fprop": {"atomic_gemm": True}},
        {"qkv_dgrad": {"method": "ring_exchange"}, "qkv_wgrad": {}},
        {"qkv_dgrad": {"method": "ring_exchange", "is_reduce_scatter": False}},
        {"fc1_wgrad": {"method": "ring_exchange"}},
        {"fc2_fprop": {"num_splits": 0}},
        {"fc2_fprop": {"use_ce": "yes"}},
    ),
)
ROWS.add(
    initialize_ub,
    quantization_modes=[FP8],
    ub_cfgs={"proj_fprop": {"method": "ring_exchange"}, "qkv_fprop": {"atomic_gemm": True}},
)
ROWS.add(initialize_ub, with_cublasmp=True, ub_cfgs={"qkv_dgrad": {"method": "bulk"}})

# ------------------------------------------------------------------------------------------------- modules

for kind in ("Linear", "LayerNormLinear"):
    for split in (
        *((), {}, ("a", "b", "c", "d", "e"), (1, 2), ("q", "q_"), ("q", "q")),
        *("ab", 5, {1: 48}, {"a": 32, "b": 15}, {"a": 64, "b": -16}, {"a": 48, "b": 0}, {"a": 24.5, "b": 23.5}),
    ):
        ROWS.add(module, kind, parameters_split=split)
for norm in ("LayerNorm", "RMSNorm"):
    ROWS.add(module, norm, hidden_size=32)
    ROWS.add(module, norm, normalized_shape=None)
    ROWS.add(module, norm, params_dtype=torch.float16, dtype=torch.float16)
ROWS.add(module, "LayerNormMLP", activation="clamped_swiglu", activation_params={"limits": 7.0})
ROWS.add(module, "LayerNormMLP", activation="swiglu", activation_params={"limit": 7.0})


def into(main_grad: Any) -> None:
    """A weight's gradient, which would be written beyond its end, or into other rows."""
    layer = te.Linear(16, 16, bias=False, fuse_wgrad_accumulation=True, device="cpu")
    layer.weight.main_grad = main_grad
    layer(torch.randn(4, 16)).sum().backward()


for main_grad in (None, [1.0], torch.zeros(8), torch.zeros(16, 16, dtype=torch.float64)):
    ROWS.add(into, main_grad)
ROWS["a main_grad of columns"] = lambda: into(torch.zeros(16, 32)[:, ::2])
ROWS["a main_grad on another device"] = lambda: into(torch.zeros(16, 16, device="meta"))
ROWS["a sparse main_grad"] = lambda: into(torch.zeros(16, 16).to_sparse())
ROWS["a main_grad with a negative bit"] = lambda: into(torch._neg_view(torch.zeros(16, 16)))
ROWS.add(utils.divide, 12, 5)
ROWS.add(utils.ensure_divisibility, 1, 0)
ROWS.add(utils.round_up_to_nearest_multiple, 3, 0)
