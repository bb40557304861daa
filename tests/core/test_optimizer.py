"""Steps of Adam and SGD, scaling and norms of lists of tensors, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError
from te_core.ops.optimizer import LIMITS, AdamQuantized, AdamRule, AdamTensors, SgdRule, SgdTensors
from te_core.ops.quantize import allocate
from te_core.quantized import Cast, Format
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.backends import cuda_runtime, requires_cuda
from tests.core.inputs import DTYPES, numpy_dtype, placed, poisoned
from tests.covering import covering

#: Nothing, one, tails of 8 and of a block's 16384 elements, several blocks.
SIZES = (0, 1, 7, 8, 1000, 16384, 16391, 40000)
#: Types of param, m, v, master.
SORTS = [
    ("float32", "float32", "float32", None),
    ("bfloat16", "bfloat16", "bfloat16", None),
    ("float16", "float32", "float32", None),
    ("bfloat16", "float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "float32", "float32"),
    ("float16", "float16", "float16", "float16"),
    ("bfloat16", "float8_e4m3", "float16", "float32"),
    ("bfloat16", "float8_e4m3", "float8_e4m3", "int16"),
    ("float32", "float16", "float8_e4m3", None),
    (None, "float32", "bfloat16", "float32"),
]


def store(x: np.ndarray, dtype: str) -> tuple[np.ndarray, float]:
    """(what is stored of it, the scale that it is multiplied by to get it back)."""
    limit = LIMITS.get(dtypes.dtype(dtype), 0.0)
    top = float(np.abs(x).max(initial=0))
    scale = top / limit if limit and top else 1.0
    return (x / scale).astype(np.float32).astype(numpy_dtype(dtype)), scale


class World:
    """One parameter of a sort, as arrays, and what an exact step makes of it."""

    def __init__(self, sort: tuple[Any, ...], size: int, grad: str, seed: int = 0) -> None:
        rng = np.random.default_rng([seed, size])
        self.sort = sort
        self.grad = (rng.standard_normal(size) * 10.0 ** rng.uniform(-3, 1, size)).astype(numpy_dtype(grad))
        param, m, v, master = sort
        full = rng.standard_normal(size).astype(np.float32)
        self.m, scale_m = store(0.1 * rng.standard_normal(size), m)
        self.v, scale_v = store(0.01 * rng.random(size) + 1e-4, v)
        self.param = None if param is None else full.astype(numpy_dtype(param))
        scale_w, self.master = 1.0, None
        if master == "int16":
            bits = full.view(np.uint32)
            low = bits.astype(np.uint16).view(np.int16)
            self.master, high = low, (bits >> 16).astype(np.uint16) + (low < 0)
            self.param = high.astype(np.uint16).view(numpy_dtype("bfloat16"))
            self.value = full.astype(np.float64)
        elif master is not None:
            self.master, scale_w = store(full, master)
            self.value = self.master.astype(np.float64) * scale_w
        else:
            self.value = self.param.astype(np.float64)
        self.scales = np.array([scale_m, scale_v, scale_w], np.float32)

    def tensors(self, rt: Runtime, offset: int = 0) -> AdamTensors:
        arrays = (self.grad, self.param, self.m, self.v, self.master)
        made = [None if a is None else placed(rt, a, offset) for a in arrays]
        return AdamTensors(*made, rt.tensor(self.scales))

    def expected(self, rule: dict[str, Any]) -> tuple[np.ndarray, ...]:
        """m, v and the value after the step, in float64."""
        g, p = self.grad.astype(np.float64) * rule.get("scale", 1.0), self.value
        b1, b2, t = rule["beta1"], rule["beta2"], rule["step"]
        if not rule.get("decoupled", True):
            g = g + rule["weight_decay"] * p
        m = b1 * self.m.astype(np.float64) * self.scales[0] + (1 - b1) * g
        v = b2 * self.v.astype(np.float64) * self.scales[1] + (1 - b2) * g * g
        one, two = (1 - b1**t, 1 - b2**t) if rule.get("bias_correction", True) else (1, 1)
        u = (m / one) / (np.sqrt(v / two) + rule["eps"])
        if rule.get("decoupled", True):
            u = u + rule["weight_decay"] * p
        return m, v, p - rule["lr"] * u


RULE: dict[str, Any] = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
#: Half a unit in the last place, of the value or of what is stored of the largest.
UNITS = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3": 2.0**-4, "int16": 2e-6}


def close(found: np.ndarray, expected: np.ndarray, dtype: str) -> bool:
    """Within a rounding: of a scaled format also that of its smallest values."""
    least = np.abs(expected).max(initial=0) * {"float8_e4m3": 2.0**-10 / 448, "float16": 2.0**-39}.get(dtype, 0.0)
    return bool((np.abs(found - expected) <= 1.05 * UNITS[dtype] * np.abs(expected) + least + 3e-7).all())


def check(rt: Runtime, world: World, t: AdamTensors, rule: dict[str, Any]) -> None:
    m, v, value = world.expected(rule)
    scales = rt.numpy(t.scales) if t.scales is not None else np.ones(3)
    param, kind_m, kind_v, master = world.sort
    for name, kind, expected, scale in (("m", kind_m, m, scales[0]), ("v", kind_v, v, scales[1])):
        found = rt.numpy(getattr(t, name)).astype(np.float64) * (scale if dtypes.dtype(kind) in LIMITS else 1)
        assert close(found, expected, kind), (name, world.sort, found.shape)
    if master == "int16":
        low, high = rt.numpy(t.master), rt.numpy(t.param).view(np.uint16)
        bits = (high.astype(np.uint32) - (low < 0)) << 16 | low.view(np.uint16)
        assert close(bits.view(np.float32).astype(np.float64), value, "float32")
    elif master is not None:
        found = rt.numpy(t.master).astype(np.float64) * (scales[2] if master == "float16" else 1)
        assert close(found, value, master)
    if param is not None:
        assert close(rt.numpy(t.param).astype(np.float64), value, param)


@covering(sort=SORTS, grad=DTYPES, decoupled=[True, False], offset=[0, 1])
def test_adam(rt: Runtime, sort: Any, grad: str, decoupled: bool, offset: int) -> None:
    """Every element of tensors of all sizes, aligned or not, against float64; the last one is as the first."""
    worlds = [World(sort, size, grad) for size in (*SIZES, 8)]
    tensors = [world.tensors(rt, offset) for world in worlds]
    rule = {**RULE, "decoupled": decoupled, "bias_correction": grad != "float16"}
    ops.adam(rt, tensors, AdamRule(**rule))
    for world, t in zip(worlds, tensors, strict=True):
        check(rt, world, t, rule)
        np.testing.assert_array_equal(rt.numpy(t.grad), world.grad)


def test_maxima_of_what_was_updated(rt: Runtime) -> None:
    """Raised, never lowered, whatever the master is held in."""
    for sort in (SORTS[0], SORTS[3], SORTS[5], SORTS[7]):
        worlds = [World(sort, size, "bfloat16") for size in (7, 40000)]
        amaxes = [on_device(rt, value, np.float32) for value in (100.0, 0.0)]
        tensors = [w.tensors(rt)._replace(amax=amax) for w, amax in zip(worlds, amaxes, strict=True)]
        ops.adam(rt, tensors, AdamRule(**RULE))
        assert rt.numpy(amaxes[0])[0] == 100
        np.testing.assert_allclose(rt.numpy(amaxes[1])[0], np.abs(worlds[1].expected(RULE)[2]).max(), rtol=1e-5)
        check(rt, worlds[1], tensors[1], RULE)
    with pytest.raises(ArgumentError, match="all or of none"):
        ops.adam(rt, [tensors[0], tensors[1]._replace(amax=None)], AdamRule(**RULE))


def test_more_tensors_than_a_table_holds(rt: Runtime) -> None:
    """Small, with a part of a block each: 130 in three small tables, or one large."""
    worlds = [World(("bfloat16", "float8_e4m3", "float16", "float32"), 3 + i, "bfloat16", seed=i) for i in range(130)]
    tensors = [world.tensors(rt) for world in worlds]
    ops.adam(rt, tensors, AdamRule(**RULE))
    for world, t in zip(worlds, tensors, strict=True):
        check(rt, world, t, RULE)


def on_device(rt: Runtime, value: Any, dtype: Any) -> Tensor:
    return rt.tensor(np.array([value], dtype))


def test_numbers_on_the_device(rt: Runtime) -> None:
    """lr, the step and the gradients' factor are read where they lie, and give what the host's give."""
    for sort in (SORTS[1], SORTS[7]):
        world = World(sort, 5000, "bfloat16")
        mine, theirs = world.tensors(rt), world.tensors(rt)
        rule = {**RULE, "scale": 0.25}
        numbers = {"lr": on_device(rt, 0.01, np.float32), "step": on_device(rt, 3, np.int32)}
        scale = on_device(rt, 0.25, np.float32)
        ops.adam(rt, [mine], AdamRule(**{**RULE, **numbers}, grad_scale=scale))
        ops.adam(rt, [theirs], AdamRule(**RULE, grad_scale=scale))
        check(rt, world, mine, rule)
        for a, b in zip(mine, theirs, strict=True):
            assert a is b is None or rt.numpy(a).tobytes() == rt.numpy(b).tobytes()


@pytest.mark.parametrize("flag", [np.float32(1), np.int32(1)], ids=["float32", "int32"])
def test_a_step_is_skipped(rt: Runtime, flag: Any) -> None:
    for sort in (SORTS[1], SORTS[7]):
        world = World(sort, 100, "bfloat16")
        world.grad[3] = np.inf
        t = world.tensors(rt)
        before = [None if a is None else rt.numpy(a).tobytes() for a in t]
        ops.adam(rt, [t], AdamRule(**RULE, skip=on_device(rt, flag, flag.dtype)))
        assert [None if a is None else rt.numpy(a).tobytes() for a in t] == before
        ops.adam(rt, [t], AdamRule(**RULE, skip=on_device(rt, 0, flag.dtype)))
        value = rt.numpy(t.param).astype(np.float32)
        assert not np.isfinite(value[3]) and np.isfinite(np.delete(value, 3)).all()


def test_a_state_of_zeros_has_a_scale(rt: Runtime) -> None:
    """A gradient of zeros leaves moments of zeros: nothing is divided by zero, and the next step reads them."""
    world = World(SORTS[7], 64, "bfloat16")
    world.grad[:], world.m[:], world.v[:] = 0, 0, 0
    t = world.tensors(rt)
    ops.adam(rt, [t], AdamRule(**{**RULE, "weight_decay": 0.0}))
    assert np.isfinite(rt.numpy(t.scales)).all()
    assert not rt.numpy(t.m).view(np.uint8).any() and not rt.numpy(t.v).view(np.uint8).any()
    np.testing.assert_array_equal(rt.numpy(t.param), world.param)


@requires_cuda
@pytest.mark.parametrize("sort", SORTS, ids=str)
def test_cuda_equals_cpu(sort: Any) -> None:
    """Bit for bit, over three steps, whatever the state is held in."""
    found = []
    for rt in (Runtime.cpu(), cuda_runtime()):
        t = World(sort, 40000, "bfloat16").tensors(rt)
        for step in (1, 2, 3):
            ops.adam(rt, [t], AdamRule(**{**RULE, "step": step}))
        found.append([None if a is None else rt.numpy(a).tobytes() for a in t])
    assert found[0] == found[1]


@covering(
    form=["tensor", "block"],
    fp8=["float8_e4m3", "float8_e5m2"],
    copies=[(True, False), (True, True), (False, True)],
    kinds=[("bfloat16", "float32", "float32"), ("float32", "bfloat16", "bfloat16")],
    offset=[0, 1],
)
def test_quantized_in_the_same_pass(rt: Runtime, form: str, fp8: str, copies: Any, kinds: Any, offset: int) -> None:
    """Bit for bit a step, then a cast: tiles with tails, of matrices of several widths."""
    rt = poisoned(rt)
    grad, m, v = kinds
    made: list[list[Any]] = [[], []]
    for shape in ((128, 256), (130, 264), (1, 1), (16, 20), (300, 129), (257, 32)):
        world = World((None, m, v, "float32"), shape[0] * shape[1], grad, seed=shape[1])
        for some in made:
            t = world.tensors(rt, offset)
            parts = [x.reshape(*shape) for x in (t.grad, t.m, t.v, t.master)]
            given = form == "tensor"
            cast = Cast(
                Format(dtypes.dtype(fp8), form, tiled=not given),
                rowwise=copies[0],
                columnwise=copies[1],
                scale=on_device(rt, 0.75, np.float32) if given else None,
                amax=on_device(rt, 0.5, np.float32) if given else None,
                power_of_two=not given,
            )
            some.append((parts, cast))
    rule = AdamRule(**RULE)
    outs: list[list[Any]] = [[allocate(rt, parts[3].shape, cast) for parts, cast in some] for some in made]
    ours = [AdamQuantized(*parts, out, cast) for (parts, cast), out in zip(made[0], outs[0], strict=True)]
    ops.adam_quantized(rt, ours, rule)
    ops.adam(rt, [AdamTensors(parts[0], None, *parts[1:]) for parts, _ in made[1]], rule)
    for (parts, cast), out in zip(made[1], outs[1], strict=True):
        ops.quantize(rt, parts[3], cast, out=out)
    for (mine, cast), (theirs, other), q, r in zip(*made, *outs, strict=True):
        pairs = [*zip(mine, theirs, strict=True), (cast.amax, other.amax)]
        pairs += [
            (getattr(q, n), getattr(r, n)) for n in ("rowwise", "rowwise_scale", "columnwise", "columnwise_scale")
        ]
        for a, b in pairs:
            assert a is b is None or rt.numpy(a).tobytes() == rt.numpy(b).tobytes(), q
    before = [rt.numpy(x).tobytes() for x in (ours[0].master, outs[0][0].rowwise or outs[0][0].columnwise)]
    ops.adam_quantized(rt, ours, AdamRule(**RULE, skip=on_device(rt, 1, np.int32)))
    assert [rt.numpy(x).tobytes() for x in (ours[0].master, outs[0][0].rowwise or outs[0][0].columnwise)] == before


# ------------------------------------------------------------------------------------------------------- SGD


@covering(
    grad=DTYPES,
    param=DTYPES,
    buffer=[None, "float32", "bfloat16"],
    copy=[None, "float16"],
    nesterov=[True, False],
    decay_last=[True, False],
    first_run=[True, False],
)
def test_sgd(
    rt: Runtime, grad: str, param: str, buffer: Any, copy: Any, nesterov: bool, decay_last: bool, first_run: bool
) -> None:
    rng = np.random.default_rng(3)
    lists, kinds = [], (grad, param, buffer, copy)
    for size in SIZES:
        arrays = [None if kind is None else rng.standard_normal(size).astype(numpy_dtype(kind)) for kind in kinds]
        lists.append((arrays, SgdTensors(*[None if a is None else placed(rt, a, size % 2) for a in arrays])))
    rule = SgdRule(0.1, 0.9, 0.25, 0.01, nesterov, first_run, decay_last, 0.5)
    ops.sgd(rt, [t for _, t in lists], rule)
    for arrays, t in lists:
        g, p, b, _ = [None if a is None else a.astype(np.float64) for a in arrays]
        g = 0.5 * g + (0 if decay_last else 0.01 * p)
        if b is not None:
            b = g if first_run else 0.9 * b + 0.75 * g
            assert close(rt.numpy(t.momentum).astype(np.float64), b, buffer)
            g = g + 0.9 * b if nesterov else b
        p = p - 0.1 * (g + (0.01 * p if decay_last else 0))
        assert close(rt.numpy(t.param).astype(np.float64), p, param)
        if copy:
            assert close(rt.numpy(t.copy).astype(np.float64), p, copy)


# --------------------------------------------------------------------------------------------- scaling and norms


@covering(source=DTYPES, out=DTYPES)
def test_scale_many(rt: Runtime, source: str, out: str) -> None:
    rng = np.random.default_rng(4)
    arrays = [rng.standard_normal(size).astype(numpy_dtype(source)) for size in SIZES]
    sources = [placed(rt, a, a.size % 2) for a in arrays]
    outs = [placed(rt, np.zeros(a.size, numpy_dtype(out))) for a in arrays]
    flag = rt.tensor(np.zeros(1, np.int32))
    for scale in (0.5, on_device(rt, 0.5, np.float32)):
        ops.scale_many(rt, sources, outs, scale, flag=flag)
        for a, t in zip(arrays, outs, strict=True):
            expected = (a.astype(np.float32) * np.float32(0.5)).astype(numpy_dtype(out))
            np.testing.assert_array_equal(rt.numpy(t).astype(np.float32), expected.astype(np.float32))
    assert not rt.numpy(flag)[0]
    for size, value in ((16391, np.inf), (7, np.nan), (1000, -np.inf)):
        bad = next(a for a in arrays if a.size == size).copy()
        bad[-1] = value
        flag = rt.tensor(np.zeros(1, np.int32))
        ops.scale_many(rt, [placed(rt, bad)], [rt.empty((size,), dtypes.float32)], 1.0, flag=flag)
        assert rt.numpy(flag)[0] == 1


def test_norm_many(rt: Runtime) -> None:
    """Of lists of two types, as one and each."""
    rng = np.random.default_rng(5)
    arrays = [[rng.standard_normal(size).astype(numpy_dtype(kind)) for size in SIZES] for kind in DTYPES[:2]]
    lists = [[placed(rt, a, a.size % 2) for a in some] for some in arrays]
    each = [np.sqrt((a.astype(np.float64) ** 2).sum()) for some in arrays for a in some]
    for scale in (None, on_device(rt, 0.25, np.float32)):
        factor = 1.0 if scale is None else 0.25
        norm, none = ops.norm_many(rt, lists, scale=scale)
        assert none.shape == (0,)
        again, parts = ops.norm_many(rt, [*lists, []], scale=scale, each=True)
        np.testing.assert_allclose(rt.numpy(norm), factor * np.sqrt(np.sum(np.square(each))), rtol=1e-5)
        np.testing.assert_array_equal(rt.numpy(norm), rt.numpy(again))
        np.testing.assert_allclose(rt.numpy(parts), factor * np.array(each), rtol=1e-5)
    norm, _ = ops.norm_many(rt, [])
    assert rt.numpy(norm)[0] == 0


# ------------------------------------------------------------------------------------------------------ mistakes
