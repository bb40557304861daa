"""FP8 attention: the operations against their formulas, and the layer: what is quantized where, recorded and kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.attention import AttentionSpec, Lengths
from te_core.errors import UnsupportedError
from te_core.layers import attention_fp8 as layer
from te_core.layers.attention import AttentionLayerSpec, AttentionNeeds
from te_core.layers.attention_fp8 import AttentionFp8Spec
from te_core.ops.attention_fp8 import BackwardScales, ForwardScales, Scaled
from te_core.ops.attention_terms import Terms
from te_core.ops.quantize import ScalingState
from te_core.precision import AttentionPrecision
from te_core.quantize.state import Scales, element
from te_core.quantized import Cast, QuantizedTensor
from te_core.recipe import DelayedScaling, Float8CurrentScaling, Format
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.core.covering_lists import covering_lists
from tests.reference import attention as exact
from tests.reference import attention_fp8 as reference
from tests.reference import quantize
from tests.reference.attention import Problem
from tests.reference.elementwise import keep
from tests.tolerances import DB, snr_db

Array = np.ndarray[Any, Any]
E4M3, E5M2 = "float8_e4m3", "float8_e5m2"
B, H, D, DV = 2, 4, 32, 48
SCALE = 0.1
HEAD = 128  # of the layer's tests: the width that FP8 training takes on Hopper


# ---------------------------------------------------------------------------------------- the operations


def test_pairs_of_scales(rt: Runtime) -> None:
    values = np.array([3.0, 0.1, 448.0, 1e38], np.float32)
    vector, places = rt.tensor(values), rt.zeros((4,), dtypes.float32)
    pairs = ops.scale_pairs(
        rt, [element(vector, i) for i in range(4)], [None, element(places, 1), None, element(places, 3)]
    )
    inverse = np.float32(1) / values
    np.testing.assert_array_equal(rt.numpy(pairs), np.stack([values, inverse], 1))
    np.testing.assert_array_equal(rt.numpy(places), [0, inverse[1], 0, inverse[3]])


CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    "plain": ({}, 4, "bshd"),
    "causal": ({"right": 0}, 2, "sbhd"),
    "window": ({"left": 5, "right": 1, "bottom_right": True}, 1, "bshd"),
    "padded": ({"padded": True, "right": 0, "bottom_right": True}, 2, "bshd"),
    "off-by-one": ({"softmax": "off-by-one"}, 4, "sbhd"),
    "softcap": ({"softcap": 1.5}, 4, "bshd"),
    "dropout": ({"dropout": 0.25}, 2, "bshd"),
}


@covering_lists(
    pytest.mark.parametrize("case", CASES),
    pytest.mark.parametrize("types", [(E4M3, E5M2), (E4M3, E4M3)], ids=["hybrid", "e4m3"]),
)
def test_the_cpu_does_what_is_stated(case: str, types: tuple[str, str]) -> None:
    """Casts of P and dS in their places and types, each scale applied and taken off again, maxima raised before."""
    fields, groups, form = CASES[case]
    rt, random, (sq, skv) = Runtime.cpu(), np.random.default_rng(3), (23, 37)
    spec = AttentionSpec(SCALE, form, form, **fields)
    lengths = (np.array([17, 23]), np.array([37, 20]))
    terms, problem = _terms(rt, spec, lengths, sq, skv)
    used = {n: 2.0 ** random.normal(2, 2) for n in ("q", "k", "v", "s", "o", "dy", "dp", "dq", "dk", "dv")}
    used["s"] = 100.0  # P <= 1: nothing saturates
    shapes = {"q": (H, sq, D), "k": (groups, skv, D), "v": (groups, skv, DV), "dy": (H, sq, DV)}
    codes = {
        n: quantize.cast(random.standard_normal((B, *s)) * 3, np.float32(used[n]), types[n == "dy"])
        for n, s in shapes.items()
    }
    values = {n: c.view(quantize.FP8[types[n == "dy"]]).astype(np.float64) / used[n] for n, c in codes.items()}
    if spec.padded:  # what is behind a sequence takes no part
        values["dy"] = np.where(np.arange(sq)[None, None, :, None] < lengths[0][:, None, None, None], values["dy"], 0)
    q, k, v, dy = (_laid(rt, codes[n], form, types[n == "dy"]) for n in ("q", "k", "v", "dy"))
    raised = {n: rt.tensor(np.array([1e-3], np.float32)) for n in ("s", "o", "dp", "dq", "dk", "dv")}
    one = {n: rt.tensor(np.array([1 / np.float32(s)], np.float32)) for n, s in used.items()}

    def scaled(n: str) -> Scaled:
        return Scaled(rt.tensor(np.array([used[n]], np.float32)), one[n], raised[n])

    done = ops.attention_fp8_forward(
        rt,
        q,
        k,
        v,
        spec=spec,
        terms=terms,
        scales=ForwardScales(one["q"], one["k"], one["v"], scaled("s"), scaled("o")),
    )
    expected, p = reference.forward(values["q"], values["k"], values["v"], problem, used["s"], types[0])
    assert done.out.dtype.name == types[0]
    out = _unlaid(rt, done.out, form) / used["o"]
    assert snr_db(out, reference.held(expected, used["o"], types[0])) > DB["fp8 attention exact"]
    grads = ops.attention_fp8_backward(
        rt,
        dy,
        q,
        k,
        v,
        done.out,
        done.stats,
        spec=spec,
        terms=terms,
        grad_dtype=dtypes.dtype(types[1]),
        scales=BackwardScales(
            one["q"],
            one["k"],
            one["v"],
            one["o"],
            one["dy"],
            replace_amax(scaled("s")),
            scaled("dp"),
            scaled("dq"),
            scaled("dk"),
            scaled("dv"),
        ),
    )
    *wanted, ds = reference.backward(
        values["dy"], values["q"], values["k"], values["v"], out, problem, (used["s"], used["dp"]), types
    )
    for name, got, want in zip(("dq", "dk", "dv"), grads, wanted, strict=True):
        assert got.dtype.name == types[1]
        found = _unlaid(rt, got, form) / used[name]
        assert snr_db(found, reference.held(want, used[name], types[1])) > DB["fp8 attention exact"], name
    for name, of in zip(("s", "o", "dp", "dq", "dk", "dv"), (p, expected, ds, *wanted), strict=True):
        np.testing.assert_allclose(rt.numpy(raised[name])[0], np.abs(of).max(), rtol=2e-2 if name[0] == "d" else 1e-5)


def replace_amax(scaled: Scaled) -> Scaled:
    """The same, recording nothing."""
    return scaled._replace(amax=None)


def test_a_maximum_is_raised_and_never_lowered(rt: Runtime) -> None:
    q, k, v = (_quantized(rt, np.ones((1, 16, 1, 64))) for _ in range(3))
    for before, after in ((0.0, 1.0), (7.0, 7.0)):
        held = rt.tensor(np.array([before], np.float32))
        unit = rt.tensor(np.ones(1, np.float32))
        ops.attention_fp8_forward(
            rt,
            q,
            k,
            v,
            spec=AttentionSpec(1.0, "bshd", "bshd"),
            scales=ForwardScales(unit, unit, unit, Scaled(unit, unit, None), Scaled(unit, unit, held)),
        )
        assert rt.numpy(held)[0] == after


# ---------------------------------------------------------------------------------------------- the layer


class Module:
    """The scaling state that a module with attention has."""

    def __init__(self, rt: Runtime, rows: int = 4) -> None:
        self.rt = rt
        self.scale = [rt.tensor(np.ones(n, np.float32)) for n in (9, 6)]
        self.history = [rt.tensor(np.zeros((rows, n), np.float32)) for n in (9, 6)]
        self.used = [rt.tensor(np.ones(n, np.float32)) for n in (9, 6)]

    @property
    def scales(self) -> Scales:
        f, b = (Tensor(h.ptr, (h.shape[1],), h.dtype, h.device, h) for h in self.history)
        return Scales(self.scale[0], f, self.scale[1], b)

    def update(self) -> None:
        for scale, history, used, limit in zip(self.scale, self.history, self.used, (448.0, 57344.0), strict=True):
            ops.update_scales(self.rt, [ScalingState(scale, history, used, limit)], "max")

    def recorded(self) -> tuple[Array, Array]:
        """Row 0 of the histories."""
        forward, backward = (self.rt.numpy(h)[0] for h in self.history)
        return forward, backward


def _rule(recipe: Any = None, **changes: Any) -> AttentionPrecision:
    rule = (recipe or DelayedScaling(fp8_dpa=True)).resolve().attention
    return replace(rule, **changes)


def _spec(rule: AttentionPrecision, form: str = "sbhd", **changes: Any) -> AttentionFp8Spec:
    core = AttentionSpec(SCALE, form, form, right=0)
    options = {"packing": "separate", "interleaved": False, "recompute": False, "groups": 2} | changes
    attention = AttentionLayerSpec(
        core,
        H,
        options["groups"],
        HEAD,
        HEAD,
        AttentionNeeds(True, True, True),
        options["packing"],
        options["interleaved"],
        options["recompute"],
    )
    return AttentionFp8Spec(attention, rule, dtypes.bfloat16)


def _parts(lead: tuple[int, ...] = (64, 2), groups: int = 2, seed: int = 0) -> list[Array]:
    """q, k, v, dy as bf16 holds them, [.., heads, d]."""
    random = np.random.default_rng(seed)
    bf16 = dtypes.bfloat16.numpy
    return [random.standard_normal((*lead, n, HEAD)).astype(bf16) for n in (H, groups, groups, H)]


def _flat(rt: Runtime, parts: list[Array]) -> list[Tensor]:
    return [rt.tensor(np.ascontiguousarray(t).reshape(*t.shape[:-2], -1)) for t in parts]


def _step(rt: Runtime, module: Module, spec: AttentionFp8Spec, inputs: list[Any], dy: Any) -> list[Any]:
    (y,), saved = layer.forward(rt, *(*inputs, None, None)[:3], spec=spec, scales=module.scales)  # type: ignore[arg-type]
    return [y, *layer.backward(rt, dy, saved, spec=spec, scales=module.scales)]


def _arrays(rt: Runtime, tensors: list[Any]) -> list[Array]:
    return [rt.numpy(t) for t in tensors if t is not None]


def _alike(rt: Runtime, a: Array, b: Array) -> None:
    """Equal values; on a GPU, whose backward adds in any order, all but a few roundings."""
    a, b = (t.astype(np.float32).ravel() for t in (a, b))
    if rt.device.kind == "cuda":
        assert snr_db(a, b) > DB["fp8 attention exact"]
    else:
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("form", "right"), [("sbhd", 0), ("bshd", 0), ("sbhd", -1)])
def test_accuracy_with_scales_of_the_step_before(rt: Runtime, form: str, right: int) -> None:
    """Without a mask no probability is near 1, and yet none may be cut off."""
    parts = _parts((128, 2) if form == "sbhd" else (2, 128))
    module, spec = Module(rt), _spec(_rule(), form)
    spec = replace(spec, attention=replace(spec.attention, core=replace(spec.attention.core, right=right)))
    *inputs, dy = _flat(rt, parts)
    for _ in range(2):
        results = _step(rt, module, spec, inputs, dy)
        module.update()
    order = (1, 2, 0, 3) if form == "sbhd" else (0, 2, 1, 3)
    q, k, v, g = (t.astype(np.float64).transpose(order) for t in parts)
    problem = Problem(SCALE, right=right)
    f, b = exact.forward(q, k, v, problem), exact.backward(g, q, k, v, problem)
    back = np.argsort(order)
    wanted = [t.transpose(back) for t in (f.out, b.dq, b.dk, b.dv)]
    needed = ("fp8 attention", "fp8 attention dq", "fp8 attention dq", "fp8 attention dv")
    for name, got, want in zip(needed, results, wanted, strict=True):
        assert snr_db(rt.numpy(got).astype(np.float64).reshape(want.shape), want) > DB[name]


def test_each_quantity_has_its_slot(rt: Runtime) -> None:
    """Maxima in the slots of checkpoints, exact ones of what is quantized from outside, and scales from those."""
    parts = _parts()
    module, spec = Module(rt), _spec(_rule())
    *inputs, dy = _flat(rt, parts)
    _step(rt, module, spec, inputs, dy)
    forward, backward = module.recorded()
    assert set(np.flatnonzero(forward)) == {2, 3, 8} and set(np.flatnonzero(backward)) == {0, 3, 5}
    assert forward[2] == max(quantize.amax(t) for t in parts[:3])
    assert backward[3] == quantize.amax(parts[3])
    q, k, v, g = (t.astype(np.float64).transpose(1, 2, 0, 3) for t in parts)
    f = exact.forward(q, k, v, Problem(SCALE, right=0))
    b = exact.backward(g, q, k, v, Problem(SCALE, right=0))
    np.testing.assert_allclose(forward[3], np.abs(f.out).max(), rtol=0.1)
    np.testing.assert_allclose(forward[8], 1.0, rtol=1e-3)  # the first query sees one key
    np.testing.assert_allclose(backward[0], max(np.abs(t).max() for t in b[:3]), rtol=0.2)
    module.update()
    scale, scale_back = (rt.numpy(s) for s in module.scale)
    for slot in (2, 3, 8):
        assert scale[slot] == np.float32(448) / forward[slot]
    for slot in (0, 3, 5):
        assert scale_back[slot] == np.float32(57344) / backward[slot]
    assert all(scale[i] == 1 for i in (0, 1, 4, 5, 6, 7)) and all(scale_back[i] == 1 for i in (1, 2, 4))


@covering_lists(
    pytest.mark.parametrize(("packing", "interleaved"), [("qkv", False), ("qkv", True), ("kv", False), ("kv", True)]),
    pytest.mark.parametrize("lead", [(64, 2), (9, 3)], ids=["even", "odd"]),
)
def test_packed_is_as_separate(rt: Runtime, packing: str, interleaved: bool, lead: tuple[int, int]) -> None:
    q, k, v, g = _parts((16, 3) if rt.device.kind == "cuda" and lead[0] % 16 else lead)  # what cuDNN's backward takes
    *inputs, dy = _flat(rt, [q, k, v, g])
    one = _step(rt, Module(rt), _spec(_rule()), inputs, dy)
    packed = _packed([q, k, v], packing, interleaved)
    other = _step(
        rt, Module(rt), _spec(_rule(), packing=packing, interleaved=interleaved), [rt.tensor(t) for t in packed], dy
    )
    wanted = [rt.numpy(t).reshape(part.shape) for t, part in zip(one, (g, q, k, v), strict=True)]
    grads = _packed(wanted[1:], packing, interleaved)
    for got, want in zip(_arrays(rt, other), [rt.numpy(one[0]), *grads], strict=True):
        _alike(rt, got, want)


def test_what_comes_quantized_is_read_as_it_is(rt: Runtime) -> None:
    """And leaves so: same bits as from the values, in the caller's own scales, padding zeros."""
    tokens = 16 if rt.device.kind == "cuda" else 9  # what cuDNN's backward takes; on the CPU rows are padded
    q, k, v, g = _parts((tokens, 3))
    packed, dy = rt.tensor(_packed([q, k, v], "qkv", False)[0]), _flat(rt, [g])[0]
    spec = replace(_spec(_rule(), packing="qkv"), quantize_output=True, quantize_grad=True)
    module = Module(rt)
    plain = _step(rt, Module(rt), replace(spec, quantize_output=False, quantize_grad=False), [packed], dy)
    unit = rt.tensor(np.ones(1, np.float32))
    x = ops.quantize(rt, packed.matrix(), Cast(dtypes.float8_e4m3, rowwise=True, columnwise=False, scale=unit))
    frame = rt.empty((tokens, 3, 0), dtypes.uint8)
    (y,), saved = layer.forward(rt, x, None, None, frame_q=frame, spec=spec, scales=module.scales)
    da, _, _ = layer.backward(rt, dy, saved, spec=spec, scales=module.scales)
    assert saved.a is x and module.recorded()[0][2] == 0  # nothing was quantized, and so nothing recorded
    for low, high in ((y, plain[0]), (da, plain[1])):
        assert isinstance(low, QuantizedTensor) and low.shape[0] == 3 * tokens
        _alike(rt, rt.numpy(ops.dequantize(rt, low, dtypes.bfloat16)), rt.numpy(high))
        assert not rt.numpy(low.rowwise).view(np.uint8)[3 * tokens :].any()


def test_backward_in_high_precision(rt: Runtime) -> None:
    """FP8 forward, then attention's plain backward on the values that it used; the gradients' slots stay empty."""
    parts = _parts()
    module, spec = Module(rt), _spec(_rule(backward=False))
    *inputs, dy = _flat(rt, parts)
    (y,), saved = layer.forward(rt, *inputs, spec=spec, scales=module.scales)
    grads = layer.backward(rt, dy, saved, spec=spec, scales=module.scales)
    assert not module.recorded()[1].any()
    unit = rt.tensor(np.ones(1, np.float32))
    cast = Cast(dtypes.float8_e4m3, rowwise=True, columnwise=False, scale=unit)
    low = [ops.dequantize(rt, ops.quantize(rt, t.matrix(), cast), dtypes.bfloat16) for t in inputs]
    shaped = [t.reshape(*p.shape) for t, p in zip(low, parts, strict=False)]
    wanted = ops.attention_backward(
        rt, dy.reshape(*parts[3].shape), *shaped, y.reshape(*parts[3].shape), saved.stats, spec=spec.attention.core
    )
    for got, want in zip(grads, wanted[:3], strict=True):
        np.testing.assert_array_equal(
            rt.numpy(got).astype(np.float32).ravel(), rt.numpy(want).astype(np.float32).ravel()
        )


def test_recomputation_gives_what_was_kept(rt: Runtime) -> None:
    _recomputation(rt, _rule())


def test_recomputation_with_current_scaling() -> None:
    _recomputation(Runtime.cpu(), _rule(Float8CurrentScaling(fp8_dpa=True)))


def _recomputation(rt: Runtime, rule: AttentionPrecision) -> None:
    *inputs, dy = _flat(rt, _parts())
    results = []
    for again in (False, True):
        module = Module(rt)
        spec = _spec(rule, recompute=again)
        _step(rt, module, spec, inputs, dy)
        module.update()
        (y,), saved = layer.forward(rt, *inputs, spec=spec, scales=module.scales)
        before = module.recorded()[0].copy()
        module.update()  # scales of the next step are not those that forward used
        forward = module.recorded()[0].copy()
        grads = layer.backward(rt, dy, saved, spec=spec, scales=module.scales)
        assert (saved.out is None) == again and before[8] > 0
        np.testing.assert_array_equal(module.recorded()[0], forward)  # nothing is recorded again
        results.append([y, *grads])
    for kept, made in zip(*(_arrays(rt, r) for r in results), strict=True):
        _alike(rt, kept, made)


@pytest.mark.parametrize("high_output", [True, False])
def test_current_scaling(high_output: bool) -> None:
    """Scales of their own maxima but for P and dS; the output is kept as it was computed, or quantized."""
    rt, parts = Runtime.cpu(), _parts()
    module, spec = Module(rt), _spec(_rule(Float8CurrentScaling(fp8_dpa=True), high_output=high_output))
    *inputs, dy = _flat(rt, parts)
    (y,), saved = layer.forward(rt, *inputs, spec=spec, scales=module.scales)
    layer.backward(rt, dy, saved, spec=spec, scales=module.scales)
    assert (saved.out.dtype is dtypes.bfloat16) == high_output
    forward, backward = module.recorded()
    assert set(np.flatnonzero(forward)) == {8} and set(np.flatnonzero(backward)) == {5}
    q, k, v, _ = (t.astype(np.float64).transpose(1, 2, 0, 3) for t in parts)
    out = exact.forward(q, k, v, Problem(SCALE, right=0)).out.transpose(2, 0, 1, 3)
    assert snr_db(rt.numpy(y).astype(np.float64).reshape(out.shape), out) > DB["fp8 attention"]


def test_a_cuda_device_refuses_results_without_scales() -> None:
    """Current scaling's results follow from no scale; nothing may take their place."""

    class Pretended:
        device = type("Device", (), {"kind": "cuda"})()

    with pytest.raises(UnsupportedError, match="current scaling"):
        from te_core.ops import attention_fp8

        attention_fp8._check_results("op", Pretended(), (), (), dtypes.float8_e4m3, True)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [Format.E4M3, Format.HYBRID])
def test_the_recipe_says_which_types(form: Format) -> None:
    rule = DelayedScaling(fp8_format=form, fp8_mha=True).resolve().attention
    assert rule is not None and rule.handed
    wanted = {Format.E4M3: (E4M3, E4M3), Format.HYBRID: (E4M3, E5M2)}[form]
    assert (rule.qkv.dtype.name, rule.grad.dtype.name) == wanted
    assert DelayedScaling(fp8_format=form).resolve().attention is None


# ------------------------------------------------------------------------------------------------- helpers


def _laid(rt: Runtime, codes: Array, form: str, fp8: str) -> Tensor:
    """Codes [b, h, s, d] as an FP8 tensor in a format."""
    order = (0, 2, 1, 3) if form == "bshd" else (2, 0, 1, 3)
    return rt.tensor(np.ascontiguousarray(codes.transpose(order)).view(quantize.FP8[fp8]))


def _unlaid(rt: Runtime, t: Tensor, form: str) -> Array:
    order = (0, 2, 1, 3) if form == "bshd" else (1, 2, 0, 3)
    return rt.numpy(t).astype(np.float64).transpose(order)


def _quantized(rt: Runtime, values: Array) -> Tensor:
    return rt.tensor(values.astype(quantize.FP8[E4M3]))


def _terms(rt: Runtime, spec: AttentionSpec, lengths: tuple[Array, Array], sq: int, skv: int) -> tuple[Terms, Problem]:
    given: dict[str, Any] = {}
    problem = Problem(
        SCALE, spec.left, spec.right, spec.bottom_right, softmax=spec.softmax, softcap=spec.softcap, p=spec.dropout
    )
    if spec.padded:
        cu = (rt.tensor(np.cumsum([0, *n]).astype(np.int32)) for n in lengths)
        given["lengths"] = Lengths(*cu)
        problem = replace(problem, len_q=lengths[0], len_kv=lengths[1])
    if spec.dropout:
        given["rng"] = rt.tensor(np.array([5, 9], np.int64))
        kept = keep(B * H * sq * skv, spec.dropout, 5, 9, 0).reshape(B, H, sq, skv)
        problem = replace(problem, keep=kept.astype(bool))
    return Terms(**given), problem


def _packed(parts: list[Array], packing: str, interleaved: bool) -> list[Array]:
    """q, k and v as a projection with this packing leaves them."""
    q, k, v = parts
    lead, groups = q.shape[:-2], k.shape[-2]
    flat = [t.reshape(*lead, groups, -1) if interleaved else t.reshape(*lead, -1) for t in parts]
    if packing == "kv":
        return [q.reshape(*lead, -1), np.concatenate(flat[1:], -1).reshape(*lead, -1)]
    return [np.concatenate(flat, -1).reshape(*lead, -1)]
