"""Nothing is written outside of what a caller hands in, whatever that is: draws of `tests/core_draws.py`.

`python -m tests.core_draws 100000 SEED` (`--device cuda`) draws others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError
from te_core.layers import attention_fp8, grouped_linear, linear
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
from te_core.tape.taped import Taped, set_when
from te_core.tensor import CPU, Device, Tensor, from_numpy
from tests import core_draws
from tests.core import face
from tests.core.face import tensor
from tests.core_draws import Bench, Call, Draw, FaultError, Tally, draw
from tests.refusals import not_refused

RT = Runtime.cpu()
F32, I64 = dtypes.float32, dtypes.int64


@pytest.fixture(scope="module")
def bench() -> Any:
    made = Bench()
    set_when(None)
    return made


@pytest.mark.parametrize("count", [400, pytest.param(25_000, marks=pytest.mark.full)])
def test_draws_stay_inside_of_what_they_are_given(bench: Bench, count: int) -> None:
    tally = Tally()
    for seed in range(count):
        tally.run(bench, seed)
    assert tally.faults == {}
    # Otherwise hardly anything behind the first check was met.
    assert tally.counts["result"] > count / 4 and tally.counts["refused"] > count / 4, tally.counts


def test_draws_are_those_of_their_seed(bench: Bench) -> None:
    first = [draw(seed, bench.calls) for seed in range(400)]
    assert first == [draw(seed, bench.calls) for seed in range(400)]
    assert {d.kind for d in first} == set(core_draws.KINDS) and any(d.taped for d in first)


def beyond(rt: Runtime, out: Tensor) -> None:
    ctypes.memset(out.ptr + out.nbytes, 0, 1)


def before(rt: Runtime, out: Tensor) -> None:
    ctypes.memset(out.ptr - 1, 0, 1)


def outside_of_its_memory(rt: Runtime, out: Tensor) -> None:
    made = rt.empty((3,), F32)
    ctypes.memset(made.ptr, 0, 16)


def reads(rt: Runtime, out: Tensor) -> Tensor:
    return Tensor(out.ptr, (out.shape[0] + 1,), out.dtype, out.device, out.owner)


def fails(rt: Runtime, out: Tensor) -> None:
    raise IndexError("of our own")


@pytest.mark.parametrize("wrong", [beyond, before, outside_of_its_memory, reads, fails])
def test_what_a_draw_must_not_come_to_is_noticed(bench: Bench, wrong: Callable[..., Any]) -> None:
    leaf = core_draws.Leaf(np.zeros(20, np.uint8), (5,), F32)
    calls = {
        "wrong": Call("wrong", wrong, (leaf,), {}, ("out",)),
        "right": Call("right", ops.amax, (leaf,), {}, ("x",)),
    }
    kept, bench.calls = bench.calls, calls
    try:
        assert isinstance(bench._once(Draw(0, "right", "right", 0, False, 0), 0x5A), list)
        with pytest.raises(FaultError):
            first = bench._once(Draw(0, "wrong", "right", 0, False, 0), 0x5A)
            if first != bench._once(Draw(0, "wrong", "right", 0, False, 0), 0x3B):
                raise FaultError("read")
    finally:
        bench.calls = kept


def test_a_write_to_read_only_memory_is_noticed(bench: Bench) -> None:
    leaf = core_draws.Leaf(np.ones(20, np.uint8), (5,), F32)

    def write(rt: Runtime, out: Tensor) -> None:
        ctypes.memset(out.ptr, 0, 4)

    kept, bench.calls = bench.calls, {"write": Call("write", write, (leaf,), {}, ("out",))}
    try:
        assert bench._once(Draw(0, "write", "right", 0, False, 0), 0x5A) == []
        with pytest.raises(FaultError, match="wrote outside"):
            bench._once(Draw(0, "write", "read-only", 0, False, 0), 0x5A)
    finally:
        bench.calls = kept


# ------------------------------------------------------------------------------------- what was found so, by name


def read_only(*shape: int) -> Tensor:
    """Memory that NumPy calls read-only."""
    array = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return from_numpy(array)


def elsewhere(t: Tensor) -> Tensor:
    """The tensor, on a device that is not the runtime's."""
    return Tensor(t.ptr, t.shape, t.dtype, Device("cuda", 9), t.owner)


def cast(**tensors: Any) -> Cast:
    return Cast(dtypes.float8_e4m3, rowwise=True, columnwise=True, **tensors)


def test_outputs_and_casts_are_checked() -> None:
    x, one = tensor(RT, 10, 24), tensor(RT, 1)
    state = tensor(RT, 3), tensor(RT, 4, 3), tensor(RT, 3)
    other = ops.quantize(RT, tensor(RT, 10, 40), cast())
    cut = ops.quantize(RT, x, cast())
    assert cut.rowwise is not None and cut.rowwise_scale is not None
    short = Tensor(cut.rowwise.ptr, (10, 24), cut.rowwise.dtype, CPU, cut.rowwise)
    cut = QuantizedTensor(cut.format, cut.shape, Copy(short, cut.rowwise_scale, None), None)
    rows: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        ("transpose: .*out", ops.transpose, (RT, x), {"out": tensor(RT, 24, 9)}),
        ("transpose: .*out", ops.transpose, (RT, x), {"out": tensor(RT, 24, 10, dtype=dtypes.bfloat16)}),
        ("transpose: .*read-only", ops.transpose, (RT, x), {"out": read_only(24, 10)}),
        ("transpose: .*one device", ops.transpose, (RT, x), {"out": elsewhere(tensor(RT, 24, 10))}),
        ("amax: .*out", ops.amax, (RT, x), {"out": tensor(RT, 1, dtype=dtypes.float16)}),
        ("amax: .*out", ops.amax, (RT, x), {"out": tensor(RT, 0)}),
        ("amax: .*read-only", ops.amax, (RT, x), {"out": read_only(1)}),
        ("resize: .*out", ops.resize, (RT, x, 6, 8), {"out": tensor(RT, 6, 7)}),
        ("resize: .*read-only", ops.resize, (RT, x, 6, 8), {"out": read_only(6, 8)}),
        ("add: .*read-only", ops.add, (RT, x, x), {"out": read_only(10, 24)}),
        ("add: .*one device", ops.add, (RT, elsewhere(x), elsewhere(x)), {}),
        ("bias_dropout_add: .*one device", ops.bias_dropout_add, (RT, x, None, elsewhere(x)), {"p": 0.0}),
        ("gemm: .*aux", ops.gemm, (RT, x, x), {"trans_b": True, "epilogue": "gelu", "aux": RT.zeros((10, 10), I64)}),
        ("column_sum: .*one device", ops.column_sum, (RT, x, elsewhere(tensor(RT, 24))), {}),
        ("column_sum: .*read-only", ops.column_sum, (RT, x, read_only(24)), {}),
        ("quantize: .*out", ops.quantize, (RT, x, cast()), {"out": other}),
        ("quantize: .*out.rowwise =|cast's copies", ops.quantize, (RT, x, cast()), {"out": cut}),
        ("dequantize: .*q.rowwise = .*10, 24", ops.dequantize, (RT, cut, F32), {}),
        ("Cast: .*amax", cast, (), {"scale": one, "amax": tensor(RT, 0)}),
        ("Cast: .*scale", cast, (), {"scale": tensor(RT, 1, dtype=dtypes.bfloat16)}),
        ("Cast: .*scale = array", cast, (), {"scale": np.ones(1, np.float32)}),
        ("Cast: .*beside tensors on cpu", cast, (), {"scale": one, "amax": elsewhere(one)}),
        ("Cast: .*read-only", cast, (), {"scale": one, "amax": read_only(1)}),
        ("Cast: .*maxima", cast, (), {"maxima": tensor(RT, 1, dtype=dtypes.float16)}),
        ("Scales: .*forward_amax", Scales, (one, tensor(RT, 1, dtype=dtypes.float16), None, None), {}),
        ("Scales: .*read-only", Scales, (one, read_only(1), None, None), {}),
        ("Scales: .*slots, 2", Scales, (None,) * 4, {"forward_nonfinite": tensor(RT, 2)}),
        ("Sink: .*read-only", linear.Sink, (read_only(4, 4),), {}),
        ("ScalingState: .*history", ScalingState, (state[0], tensor(RT, 12), state[2], 448.0), {}),
        ("ScalingState: .*read-only", ScalingState, (state[0], state[1], read_only(3), 448.0), {}),
        ("ScalingState: .*one device", ScalingState, (state[0], elsewhere(state[1]), state[2], 448.0), {}),
        ("scale_pairs: .*one device", ops.scale_pairs, (RT, [elsewhere(one)], [None]), {}),
    ]
    wrong = [(row[0], not_refused(ArgumentError, row[0], row[1], *row[2], **row[3])) for row in rows]
    assert [found for found in wrong if found[1]] == []


def delayed_linear(amax: int) -> tuple[linear.LinearSpec, tuple[Tensor, ...], Scales]:
    spec = linear.LinearSpec(F32, resolve(DelayedScaling()), linear.Needs(True, True, True))
    scales = Scales(tensor(RT, 3, value=1.0), tensor(RT, amax), tensor(RT, 2, value=1.0), tensor(RT, 2))
    return spec, (tensor(RT, 4, 8), tensor(RT, 6, 8), tensor(RT, 6)), scales


@pytest.mark.parametrize("when", ["never", "first"])
def test_maxima_of_one_element_are_refused_also_where_the_layer_is_recorded(when: str) -> None:
    """The cast of the weight would raise the second element."""
    spec, given, scales = delayed_linear(3)
    recorded = Taped("linear forward", linear.forward, spec)
    set_when(when)
    try:
        for _ in range(3):
            recorded(RT, *given, scales=scales)
        memory = np.zeros(3, np.float32)
        short = Scales(scales.forward_scale, from_numpy(memory[:1]), scales.backward_scale, scales.backward_amax)
        with pytest.raises(ArgumentError, match="slot 1"):
            recorded(RT, *given, scales=short)
        assert not memory[1:].any()
    finally:
        set_when(None)


def test_a_plan_hides_no_wrong_scale() -> None:
    """Neither that of a cast nor that of an FP8 product, which their plans' keys once left out."""
    x, scale = tensor(RT, 16, 32), tensor(RT, 1)
    ops.quantize(RT, x, cast(scale=scale))
    with pytest.raises(ArgumentError, match="quantize: .*cuda:9"):
        ops.quantize(RT, x, cast(scale=elsewhere(scale)))
    a, b = (tensor(RT, *s, dtype=dtypes.float8_e4m3) for s in ((16, 32), (32, 32)))
    ops.gemm(RT, a, b, trans_b=True, a_scale=scale, b_scale=scale)
    for wrong in (tensor(RT, 2), tensor(RT, 1, dtype=dtypes.float16), elsewhere(scale), None):
        with pytest.raises(ArgumentError):
            ops.gemm(RT, a, b, trans_b=True, a_scale=scale, b_scale=wrong)
    right = face.operations(RT)["attention_fp8_forward"]
    right.run()
    scales = right.options["scales"]
    for changed in (
        {"k": tensor(RT, 2)},
        {"s": scales.s._replace(amax=read_only(1))},
        {"s": scales.s._replace(scale=None)},
    ):
        with pytest.raises(ArgumentError, match="scales"):
            right.function(*right.args, **{**right.options, "scales": scales._replace(**changed)})


RECIPES = [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()]


@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=lambda recipe: type(recipe).__name__)
def test_sizes_are_compared_as_they_are_given(recipe: Any) -> None:
    """Not as storage rounds them up, and messages quote the user's."""
    precision = None if recipe is None else resolve(recipe)
    spec = linear.LinearSpec(F32, precision, linear.Needs(True, True, True))
    more: dict[str, Any] = {"spec": spec}
    if recipe is not None and recipe.delayed():
        more["scales"] = face.scales(RT, 2)
    rng = (RT.tensor(np.array([1, 2], np.int64)),) if recipe is not None and recipe.nvfp4() else (None,)
    x, w = tensor(RT, 4, 8), tensor(RT, 6, 7)
    groups = {"splits": grouped_linear.Groups([1, 3])}
    several = {**more, "spec": grouped_linear.GroupedSpec((spec, spec)), **groups}
    right = tensor(RT, 6, 8)
    _, saved = linear.forward(RT, x, right, None, *rng, **more)
    _, kept = grouped_linear.forward(RT, x, right, right, None, None, *rng, **several)
    dy = tensor(RT, 4, 5)
    rows: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (r"\(4, 8\).*\(6, 7\)", linear.forward, (x, w, None, *rng), more),
        (r"\(1, 8\).*\(6, 7\)", grouped_linear.forward, (x, w, w, None, None, *rng), several),
        (r"5", linear.backward, (dy, saved), more),
        (r"400", linear.backward, (tensor(RT, 400, 6), saved), more),  # reads behind what was saved of x
        (r"5", grouped_linear.backward, (dy, kept), several),
        (
            "groups of",
            grouped_linear.forward,
            (x, right, right, None, None, *rng),
            {**several, "splits": grouped_linear.Groups([1, 2])},
        ),
    ]
    wrong = [(row[0], not_refused(ArgumentError, row[0], row[1], RT, *row[2], **row[3])) for row in rows]
    assert [found for found in wrong if found[1]] == []


FORMATS = [Format(dtypes.float8_e4m3, scaling) for scaling in ("tensor", "block", "mxfp8")]
FORMATS.append(Format(dtypes.float4_e2m1, "nvfp4"))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.scaling)
def test_products_of_quantized_matrices_compare_their_own_sizes(form: Format) -> None:
    def made(*shape: int) -> QuantizedTensor:
        return ops.quantize(RT, tensor(RT, *shape), Cast(form, rowwise=True, columnwise=True))

    a, b, out = made(10, 24), made(20, 24), tensor(RT, 10, 20)
    ops.gemm_quantized(RT, a, b, out)
    for wrong in (
        (a, made(20, 23), out),
        (a, b, tensor(RT, 10, 19)),
        (a, b, tensor(RT, 9, 20)),
        (made(11, 24), b, out),
    ):
        with pytest.raises(ArgumentError, match=rf"{wrong[0].shape[0]}, 24\).*\(20, 2[34]\)"):
            ops.gemm_quantized(RT, *wrong)
    with pytest.raises(ArgumentError, match=r"which has 4 rows"):
        ops.gemm_grouped(RT, [made(5, 24), made(6, 24)], [b, b], out, sizes=[4, 6], trans_b=True)


def test_attention_compares_heads_with_its_spec() -> None:
    """A packed row that is too short would be read behind its end; more heads would be written behind the result's."""
    right = face.layers(RT)["attention forward"]
    q, k, v = right.args[1:]
    wrong_heads = tensor(RT, 8, 2, 2 * face.HEADS, face.D)
    narrow = tensor(RT, 8, 2, face.HEADS, face.D - 1)
    for given in ((wrong_heads, k, v), (q, narrow, v), (q, k, None)):
        with pytest.raises(ArgumentError, match="heads=2"):
            right.function(RT, *given, **right.options)
    spec = replace(right.options["spec"], packing="qkv")
    with pytest.raises(ArgumentError, match="packing='qkv', heads=2"):
        right.function(RT, tensor(RT, 8, 2, 90), None, None, spec=spec)
    fp8 = face.layers(RT)["attention_fp8 forward"]
    flat = fp8.args[1]
    for given in ((flat, tensor(RT, 8, 2, 24), flat), (tensor(RT, 7, 2, 16), flat, flat)):
        with pytest.raises(ArgumentError):
            attention_fp8.forward(RT, *given, **fp8.options)


def test_lent_memory_is_not_written_to() -> None:
    """A read-only array's tensor is read; what NumPy makes of it is read-only, too."""
    t = read_only(2, 3)
    assert not t.writable and not t.reshape(3, 2).rows(0, 1).writable and tensor(RT, 2).writable
    assert not t.numpy().flags.writeable and ops.transpose(RT, t).writable
