"""`te_core.functional` gives, bit for bit, what the layers give whose specs are written by hand, in any recipe."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from te_core import dtypes, from_numpy
from te_core import functional as te
from te_core.attention import AttentionSpec
from te_core.errors import ArgumentError
from te_core.layers import (
    activation,
    attention,
    grouped_linear,
    l2_norm,
    linear,
    mlp,
    norm,
    norm_linear,
    permute,
    residual,
    rope,
    router,
    softmax,
)
from te_core.layers.linear import LinearSpec, Needs
from te_core.ops.activation import Clamp
from te_core.ops.router import RouterTerms
from te_core.ops.softmax import Band
from te_core.quantize.state import Scales
from te_core.recipe import DelayedScaling, Float8CurrentScaling, resolve
from te_core.runtime import Runtime
from te_core.tensor import CPU, Tensor
from tests.functional_cases import FUNCTIONS, OF_RECIPES, RECIPES, WHOLE, Right, right
from tests.functional_draws import run

CASES = [
    *[(name, recipe, seed) for name in OF_RECIPES if name not in WHOLE for recipe in RECIPES for seed in range(2)],
    *[(name, "plain", seed) for name in FUNCTIONS if name not in OF_RECIPES for seed in range(8)],
]


def bits(array: Any) -> Any:
    """An array's bytes, so that NaNs compare, too."""
    array = np.asarray(array)
    return array.dtype, array.shape, array.tobytes()


class ByHand:
    """A case in the core's own words."""

    def __init__(self, case: Right, scales: Scales | None) -> None:
        self.case, self.scales = case, scales
        self.dtype = dtypes.dtype(case.dtype)
        self.precision = None if case.recipe is None else resolve(case.recipe)
        self.rng = self.branch_rng = None
        if "seed" in case.options:
            seed, offset = case.options["seed"]
            self.rng, self.branch_rng = (
                from_numpy(np.array(pair, np.int64)) for pair in ((seed, offset), (seed ^ 1 << 62, offset))
            )

    def tensor(self, array: Any) -> Any:
        return None if array is None else from_numpy(array)

    def of(self, *names: str) -> list[Any]:
        return [self.tensor(self.case.arrays.get(name)) for name in names]

    def linear(self, bias: bool) -> LinearSpec:
        return LinearSpec(self.dtype, self.precision, Needs(True, True, bias))

    def norm(self) -> norm.NormSpec:
        o = self.case.options
        kind = o.get("normalization") or {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[self.case.function.__name__]
        return norm.NormSpec(self.dtype, kind, o.get("eps", 1e-5), o.get("zero_centered_gamma", False))

    def stream(self) -> residual.Stream | None:
        arrays = self.case.arrays
        if "residual" not in arrays:
            return None
        needs = residual.BranchNeeds(True, "residual_bias" in arrays, True)
        return residual.Stream(residual.AddSpec(self.case.options.get("hidden_dropout", 0.0), needs))

    def run(self, names: tuple[str, ...], layer: Any, spec: Any, inputs: list[Any], backs: int = 1, **more: Any) -> Any:
        """(outputs, gradients by name) of a layer; `names` are those of what its backward returns."""
        rt = Runtime.cpu()
        outputs, saved = layer.forward(rt, *inputs, spec=spec, scales=self.scales, **more)
        ones = [from_numpy(np.ones_like(t.numpy())) for t in outputs]
        ones += [None] * (backs - len(ones))
        grads = layer.backward(rt, *ones, saved, spec=spec, scales=self.scales, **more)
        return outputs, dict(zip(names, grads, strict=False))

    def layer(self) -> Any:
        """By the name of the function."""
        return getattr(self, f"of_{self.case.function.__name__}")(self.case.arrays, self.case.options)

    def of_linear(self, a: Any, o: Any) -> Any:
        names = "x", "weight", "bias"
        return self.run(names, linear, self.linear("bias" in a), [*self.of(*names), self.rng])

    def of_layernorm(self, a: Any, o: Any) -> Any:
        names = "x", "weight", "bias"
        return self.run(names, norm, self.norm(), self.of(*names))

    of_rmsnorm = of_layernorm

    def of_layernorm_linear(self, a: Any, o: Any) -> Any:
        names = "x", "layer_norm_weight", "layer_norm_bias", "weight", "bias"
        spec = norm_linear.NormLinearSpec(
            self.norm(), self.linear("bias" in a), o["return_layernorm_output"], self.stream()
        )
        inputs = [*self.of(*names), self.rng, *self.of("residual", "residual_bias"), self.branch_rng]
        return self.run((*names, "", "residual", "residual_bias"), norm_linear, spec, inputs, 3)

    def of_layernorm_mlp(self, a: Any, o: Any) -> Any:
        names = "x", "layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"
        spec = mlp.MLPSpec(
            self.linear("fc1_bias" in a),
            self.linear("fc2_bias" in a),
            self.norm(),
            o["activation"],
            o["return_layernorm_output"],
            stream=self.stream(),
            checkpoint=o["checkpoint"],
        )
        inputs = [*self.of(*names), self.rng, *self.of("residual", "residual_bias"), self.branch_rng]
        return self.run((*names, "", "residual", "residual_bias"), mlp, spec, inputs, 3)

    def of_grouped_linear(self, a: Any, o: Any) -> Any:
        n, x = len(a["weight"]), from_numpy(a["x"])
        weights, biases = ([*map(self.tensor, a.get(name, [None] * n))] for name in ("weight", "bias"))
        spec = grouped_linear.GroupedSpec((self.linear("bias" in a),) * n)
        names = ("x", *[f"weight{i}" for i in range(n)], *[f"bias{i}" for i in range(n)])
        splits = grouped_linear.Groups(o["m_splits"])
        return self.run(names, grouped_linear, spec, [x, *weights, *biases, self.rng], splits=splits)

    def of_attention(self, a: Any, o: Any) -> Any:
        mask, form, window = o["attn_mask_type"], o["qkv_format"], o.get("window_size", (-1, -1))
        core = AttentionSpec(
            o["softmax_scale"] or 1 / math.sqrt(8),
            form,
            form,
            window[0],
            0 if "causal" in mask else window[1],
            bottom_right=mask not in ("causal", "padding_causal"),
            padded="padding" in mask,
            masked=mask == "arbitrary",
            bias=o.get("core_attention_bias_type", "no_bias"),
            softmax=o["softmax_type"],
            dropout=o.get("attention_dropout", 0.0),
            max_q=o.get("max_seqlen_q", 0),
            max_kv=o.get("max_seqlen_kv", 0),
        )
        needs = attention.AttentionNeeds(True, True, True, "core_attention_bias" in a, "softmax_offset" in a)
        heads, groups = a["q"].shape[-2], a["k"].shape[-2]
        spec = attention.AttentionLayerSpec(core, heads, groups, 8, 8, needs)
        names = "q", "k", "v", "core_attention_bias", "", "softmax_offset"
        given = self.of(
            "q", "k", "v", "core_attention_bias", "alibi", "softmax_offset", "cu_seqlens_q", "cu_seqlens_kv"
        )
        hidden = self.of("attention_mask")
        return self.run(names, attention, spec, [*given, None, None, *hidden, None, self.rng], 2)

    def of_rope(self, a: Any, o: Any) -> Any:
        spec = rope.RopeSpec(o["tensor_format"], o["interleaved"])
        return self.run(("t",), rope, spec, self.of("t", "freqs", "cu_seqlens", "start_positions"))

    def of_softmax(self, a: Any, o: Any) -> Any:
        right = -1 if o["causal"] is None else 0
        band = Band(-1, right, o["causal"] != "top_left")
        spec = softmax.SoftmaxSpec(o["scale"], band, "softmax_offset" in a)
        given = self.of("x", "mask", "cu_seqlens_q", "cu_seqlens_kv", "softmax_offset")
        return self.run(("x", "", "", "", "softmax_offset"), softmax, spec, given)

    def of_activation(self, a: Any, o: Any) -> Any:
        clamp = Clamp(o["limit"]) if "limit" in o else None
        return self.run(("x",), activation, activation.ActivationLayerSpec(o["activation"], clamp), self.of("x"))

    def of_l2_norm(self, a: Any, o: Any) -> Any:
        return self.run(("x",), l2_norm, l2_norm.L2NormSpec(o["eps"]), self.of("x"))

    def of_bias_dropout_add(self, a: Any, o: Any) -> Any:
        needs = residual.BranchNeeds(True, "bias" in a, "residual" in a)
        names = "x", "bias", "residual"
        return self.run(names, residual, residual.AddSpec(o["hidden_dropout"], needs), [*self.of(*names), self.rng])

    def of_moe_permute(self, a: Any, o: Any) -> Any:
        rows = 12 if o["num_out_tokens"] == -1 else o["num_out_tokens"]
        spec = permute.PermuteSpec(6, rows, o["map_type"] == "mask")
        return self.run(("x", "", "probs"), permute, spec, self.of("x", "routing_map", "probs"), 3)

    def of_moe_unpermute(self, a: Any, o: Any) -> Any:
        functions = SimpleNamespace(forward=permute.unpermute_forward, backward=permute.unpermute_backward)
        given = self.of("x", "row_id_map", "merging_probs")
        return self.run(("x", "", "merging_probs"), functions, permute.PermuteSpec(6, 12), given)

    def of_router_topk(self, a: Any, o: Any) -> Any:
        groups = o.get("num_groups", 0), o.get("group_topk", 0)
        terms = RouterTerms(o["topk"], o["score_function"], o["use_pre_softmax"], *groups, o["scaling_factor"])
        spec = router.RouterSpec(terms, o["routing_map_format"], o["return_tokens_per_expert"], o.get("qb_bins", 0))
        return self.run(("logits",), router, spec, self.of("logits", "expert_bias", "qb_bin_bounds"), 4)

    def of_router_scores(self, a: Any, o: Any) -> Any:
        functions = SimpleNamespace(forward=router.scores_forward, backward=router.scores_backward)
        spec = router.RouterSpec(RouterTerms(o["topk"], o["score_function"]), o["routing_map_format"])
        return self.run(("logits",), functions, spec, self.of("logits"))

    def of_router_aux_loss(self, a: Any, o: Any) -> Any:
        functions = SimpleNamespace(forward=router.aux_loss_forward, backward=router.aux_loss_backward)
        spec = router.AuxLossSpec(o["num_experts"], o["topk"], o["coeff"])
        return self.run(("probs",), functions, spec, self.of("probs", "tokens_per_expert", "total_num_tokens"))


def state_of(case: Right, r: np.random.Generator) -> tuple[Any, Scales | None]:
    """A state with scales unlike one another, and a copy of it as the core takes it."""
    scaling = case.scaling()
    if scaling is None or not scaling.arrays():
        return scaling, None
    for name in ("scale_fwd", "scale_bwd"):
        getattr(scaling, name)[:] = 2.0 ** r.integers(-2, 5, getattr(scaling, name).shape)
    copies = {name: array.copy() for name, array in scaling.arrays().items()}
    rows = [copies[n] if "scale" in n else copies[n][0] for n in copies]
    return scaling, Scales(*map(from_numpy, rows))


def shared(scaling: Any) -> dict[str, Any]:
    """What a call is told of its recipe and state."""
    return {} if scaling is None else {"recipe": RECIPES_OF[scaling.precision], "scaling": scaling}


RECIPES_OF = {resolve(recipe): recipe for recipe in RECIPES.values() if recipe is not None}


@pytest.mark.parametrize(("name", "recipe", "seed"), CASES, ids=lambda value: str(value))
def test_equals_the_layer(name: str, recipe: str, seed: int) -> None:
    case = right(seed, name, recipe)
    scaling, scales = state_of(case, np.random.default_rng(seed))
    y, back = case.function(**case.arrays, **case.options, **shared(scaling))
    outputs = y if isinstance(y, tuple) else (y,)
    found = back(tuple(map(np.ones_like, outputs)) if isinstance(y, tuple) else np.ones_like(y))
    for group in ("weight", "bias"):
        if isinstance(found.get(group), list):
            found |= {f"{group}{i}": part for i, part in enumerate(found.pop(group))}
    wanted_outputs, wanted = ByHand(case, scales).layer()
    assert [*map(bits, outputs)] == [*map(bits, wanted_outputs[: len(outputs)])]
    assert all(type(array) is np.ndarray for array in (*outputs, *found.values()))
    present = {key for key, t in wanted.items() if t is not None and key} & set(found)
    assert present == set(found) and len(found) >= len([a for a in case.arrays if "weight" in a or a in "xqkvt"])
    for key, array in found.items():
        assert bits(array) == bits(wanted[key]), key
    if scales is not None:
        assert scaling.amax_history_fwd[0].any() and scaling.amax_history_bwd[0].any()
        for array, row in zip((scaling.amax_history_fwd, scaling.amax_history_bwd), (1, 3), strict=True):
            names = "forward_scale", "forward_amax", "backward_scale", "backward_amax"
            assert bits(array[0]) == bits(getattr(scales, names[row]))


# ------------------------------------------------------------------------------------- backward, and its options


def mlp_case(**options: Any) -> tuple[dict[str, Any], Any, Any]:
    """(parameters and x, y, back) of an MLP in current scaling."""
    case = right(3, "layernorm_mlp", "current")
    arrays = {n: a for n, a in case.arrays.items() if "residual" not in n}
    given = {n: o for n, o in case.options.items() if n in ("normalization", "activation")}
    y, back = te.layernorm_mlp(**arrays, **given, recipe=case.recipe, **options)
    return arrays, y, back


def test_needs_names_what_comes() -> None:
    _, y, back = mlp_case(needs=("x", "fc1_weight"))
    grads = back(np.ones_like(y))
    assert set(grads) == {"x", "fc1_weight"}
    _, _, whole = mlp_case()
    wanted = whole(np.ones_like(y))
    assert all(bits(grads[name]) == bits(wanted[name]) for name in grads)


def test_nothing_is_kept_without_needs() -> None:
    x, weight = np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)
    before = sys.getrefcount(x), sys.getrefcount(weight)
    y, back = te.linear(x, weight, needs=())
    assert (sys.getrefcount(x), sys.getrefcount(weight)) == before
    with pytest.raises(ArgumentError, match="needs=.*To do"):
        back(y)


def test_backward_works_once_unless_it_keeps() -> None:
    _, y, back = mlp_case()
    dy = np.ones_like(y)
    first, second = back(dy, keep=True), back(dy)
    assert {n: bits(a) for n, a in first.items()} == {n: bits(a) for n, a in second.items()}
    with pytest.raises(ArgumentError, match="had its backward.*keep=True"):
        back(dy)


def test_backward_lets_go_of_what_it_read() -> None:
    x, weight = np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)
    before = sys.getrefcount(x), sys.getrefcount(weight)
    y, back = te.linear(x, weight)
    assert sys.getrefcount(x) > before[0]
    back(y)
    assert (sys.getrefcount(x), sys.getrefcount(weight)) == before


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_weight_gradient_goes_where_it_is_sent(accumulate: bool) -> None:
    arrays, y, back = mlp_case()
    _, _, other = mlp_case()
    dy, shape = np.ones_like(y), arrays["fc1_weight"].shape
    main = np.full(shape, 2.0, np.float32)
    found = other(dy, into={"fc1_weight": main}, accumulate=accumulate)
    wanted = back(dy)["fc1_weight"].astype(np.float32)
    assert found["fc1_weight"] is main
    np.testing.assert_allclose(main, wanted + 2 * accumulate, rtol=0.02, atol=0.05)
    assert found["fc2_weight"] is not main


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_a_weight_quantized_before_gives_the_same(recipe: str) -> None:
    case = right(5, "linear", recipe)
    scaling, _ = state_of(case, np.random.default_rng(0))
    q = te.quantize(case.arrays["weight"], case.recipe, scaling=scaling)
    options = {**case.options, **shared(scaling)}
    y, back = te.linear(**case.arrays, **options)
    dy = np.ones_like(y)
    wanted = {name: bits(array) for name, array in back(dy).items()}
    beside, back = te.linear(**case.arrays, **options, quantized={"weight": q})
    assert bits(beside) == bits(y) and {n: bits(a) for n, a in back(dy).items()} == wanted
    inside, back = te.linear(**{**case.arrays, "weight": q}, **options)
    assert bits(inside) == bits(y) and bits(back(dy)["x"]) == wanted["x"]


def test_dequantize_gives_an_array_of_the_library_asked_for() -> None:
    w = np.random.default_rng(0).standard_normal((20, 24)).astype(np.float32)
    q = te.quantize(w, RECIPES["current"])
    assert type(te.dequantize(q)) is Tensor
    found = te.dequantize(q, like=w)
    assert type(found) is np.ndarray and found.shape == w.shape
    np.testing.assert_allclose(found, w, rtol=0.07, atol=0.01)


def test_dropout_and_rounding_draw_apart() -> None:
    x, res = (np.random.default_rng(i).standard_normal((16, 32)).astype(np.float32) for i in range(2))
    given = {"layer_norm_weight": x[0], "weight": x, "residual": res, "normalization": "RMSNorm"}
    (_, stream), _ = te.layernorm_linear(x, **given, hidden_dropout=0.5, seed=7)
    dropped = [te.bias_dropout_add(x, residual=res, hidden_dropout=0.5, seed=s)[0] for s in (7, 7 ^ 1 << 62)]
    assert bits(stream) == bits(dropped[1]) != bits(dropped[0])


def test_a_clamp_is_that_of_the_options() -> None:
    """Both functions of the layer clamp, where the default of 7 would not."""
    x = np.array([[3.0, 2.0]], np.float32)
    y, back = te.activation(x, activation="clamped_swiglu", limit=1.0, alpha=1.0, glu_linear_offset=0.0)
    np.testing.assert_allclose(y, [[1 / (1 + np.exp(-1.0))]], rtol=1e-6)
    assert not back(np.ones_like(y))["x"].any()


def test_experts_get_their_tokens_back() -> None:
    """By values: expert by expert, then added up with their weights; gradients by differences."""
    x, mask = np.arange(12.0, dtype=np.float32).reshape(3, 4), np.array([[1, 1], [0, 1], [1, 0]], bool)
    probs = np.array([[0.5, 0.25], [0, 1], [2, 0]], np.float32)
    (y, row_map, gates), back = te.moe_permute(x, mask, probs)
    assert np.array_equal(y, x[[0, 2, 0, 1]]) and gates.tolist() == [0.5, 2, 0.25, 1]
    grads = back((y, None, np.arange(4, dtype=np.float32)))
    assert np.array_equal(grads["x"], x * [[2], [1], [1]])
    assert grads["probs"].tolist() == [[0, 2], [0, 3], [1, 0]]
    z, back = te.moe_unpermute(y, row_map, probs)
    assert np.array_equal(z, x * [[0.75], [1], [2]])
    grads = back(np.ones_like(z))
    assert np.array_equal(grads["x"], np.outer([0.5, 2, 0.25, 1], np.ones(4)))
    assert np.array_equal(grads["merging_probs"][mask], y.sum(1)[[0, 2, 3, 1]])


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["none", "current"])
def test_sizes_of_groups_come_in_any_array(recipe: Any) -> None:
    x, weights = np.ones((6, 16), "f"), [np.full((8, 16), i + 1.0, "f") for i in range(3)]
    sizes = [2, 0, 4]
    wanted, _ = te.grouped_linear(x, weights, m_splits=sizes, recipe=recipe)
    for given in (np.array(sizes), np.array(sizes, np.int32), from_numpy(np.array(sizes))):
        assert np.array_equal(te.grouped_linear(x, weights, m_splits=given, recipe=recipe)[0], wanted)
    for wrong in (np.array([2, 0, 5]), np.array([2.0, 0, 4]), np.array([6]), np.array([[2, 0, 4]])):
        with pytest.raises(ArgumentError, match="m_splits"):
            te.grouped_linear(x, weights, m_splits=wrong, recipe=recipe)


# -------------------------------------------------------------------------------------------------------- training


# ---------------------------------------------------------------------------------------------------------- states


def test_update_makes_scales_of_maxima() -> None:
    x, w = np.full((16, 16), 3.0, np.float32), np.full((16, 16), 0.5, np.float32)
    recipe = DelayedScaling(amax_history_len=2, margin=1)
    states = [te.Scaling(recipe, te.linear, like=x) for _ in range(2)]
    for scaling in states:
        _, back = te.linear(x, w, recipe=recipe, scaling=scaling)
        back(np.full((16, 16), 7.0, np.float32))
    te.update(*states)
    for scaling in states:
        assert scaling.scale_fwd.tolist() == [np.float32(224 / 3), 448, 1] and scaling.scale_bwd[0] == 28672 / 7
        assert not scaling.amax_history_fwd[0].any()


def test_a_state_is_loaded_as_it_was_kept() -> None:
    x = np.ones((16, 16), np.float32)
    recipe = DelayedScaling(amax_history_len=2)
    a, b = (te.Scaling(recipe, te.linear, like=x) for _ in range(2))
    te.linear(x, x, recipe=recipe, scaling=a)
    te.update(a)
    b.load(a.arrays())
    assert all(bits(a.arrays()[name]) == bits(b.arrays()[name]) for name in a.arrays())
    assert a.scale_fwd is not b.scale_fwd


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale_fwd": np.zeros(3, np.float32)}, "0.0 in scale_fwd"),
        ({"scale_bwd": np.array([1, np.inf], np.float32)}, "inf in scale_bwd"),
        ({"amax_history_fwd": np.full((2, 3), np.nan, np.float32)}, "nan in amax_history_fwd"),
        ({"amax_history_fwd": np.zeros((3, 3), np.float32)}, r"float32 \(2, 3\)"),
        ({"scale_fwd": np.ones(3)}, "float32"),
        ({"more": np.ones(3)}, "exactly"),
    ],
)
def test_a_wrong_state_is_not_loaded(change: Any, said: str) -> None:
    scaling = te.Scaling(DelayedScaling(amax_history_len=2), te.linear, like=np.ones(1, np.float32))
    before = {name: bits(array) for name, array in scaling.arrays().items()}
    values = {"scale_bwd": np.full(2, 3.0, np.float32)}
    with pytest.raises(ArgumentError, match=f"{said}.*To do"):
        scaling.load({**{n: a.copy() for n, a in scaling.arrays().items()}, **values, **change})
    assert {name: bits(array) for name, array in scaling.arrays().items()} == before


# --------------------------------------------------------------------------------------------------------- mistakes

X, W = np.ones((4, 16), np.float32), np.ones((8, 16), np.float32)


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_no_draw_is_a_fault(first: int) -> None:
    for seed in range(first, first + 100):
        run(seed)


def test_a_signature_is_that_of_the_table() -> None:
    text = str(te.layernorm_mlp.__signature__)
    assert text.startswith("(x, layer_norm_weight, layer_norm_bias=None, *, ")
    assert "fc1_weight, " in text and "activation='gelu'" in text and "stream" not in text


@pytest.mark.parametrize("reader", ["read", "_read_numpy"])
def test_an_array_is_read_in_few_calls(reader: str) -> None:
    """Two microseconds: so a reader makes few calls, of Python and of C together."""
    from te_core.functional import arrays

    x, calls = np.ones((4, 4), ml_dtypes.bfloat16), []
    sys.setprofile(lambda frame, event, arg: calls.append(event) if event in ("call", "c_call") else None)
    try:
        t = arrays.read("test", "x", x) if reader == "read" else arrays._read_numpy(x)
    finally:
        sys.setprofile(None)
    assert (t.ptr, t.shape, t.dtype, t.device) == (x.ctypes.data, (4, 4), dtypes.bfloat16, CPU)
    # Tensor's constructor, two dictionaries' and ctypes' functions, and the end of the count.
    assert len(calls) <= (6 if reader == "read" else 5), calls


def test_addresses_are_those_of_arrays() -> None:
    """Of views, of memory that is read-only, of nothing, and of types that NumPy does not know."""
    from te_core.functional import arrays

    whole = np.arange(64, dtype=np.float32).reshape(8, 8)
    frozen = whole[2:]
    frozen.flags.writeable = False
    for x in (whole, whole[3:], frozen, whole.astype(ml_dtypes.float8_e5m2), np.array(3, np.int8), whole > 3):
        t = arrays.read("test", "x", x)
        assert (t.ptr, t.shape, t.strides) == (x.ctypes.data, x.shape, None)
        assert t.owner is x and t.writable == x.flags.writeable
    assert arrays.read("test", "x", whole[:0]).shape == (0, 8)
    mapped = np.memmap(__file__, np.uint8, "r", shape=(4,))
    assert bytes(arrays.read("test", "x", mapped).numpy()) == b'"""`'


def test_types_of_programs_are_not_kept() -> None:
    from te_core.functional import arrays

    kind = type("Mine", (np.ndarray,), {"__module__": "mine"})
    te.l2_norm(np.ones((2, 8), np.float32).view(kind), needs=())
    assert kind not in arrays._BY_TYPE and np.ndarray in arrays._BY_TYPE
