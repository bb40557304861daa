"""Optimizers on lists of tensors: a step of Adam or of SGD, on a GPU one launch for hundreds of tensors.

All is computed in float32, each product and each sum rounded by itself, in the order that stands here. Adam, with
t = `step`, g = grad * grad_scale:

    g += weight_decay * p                    (not decoupled: L2)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)      (by reciprocals of both corrections)
    p -= lr * (u + weight_decay * p)         (decoupled: AdamW)

p is the master weight where there is one, and the parameter its rounding. A float16 master may have `scales`, too.
A bfloat16 parameter may have an int16 master: the low half of the float32 whose high half the parameter is, raised by
one where the low half is negative.

m, v and a float16 master are stored divided by a scale where they are float16 or float8_e4m3: max |x| / (65504 / 2), or
max |x| / 448, found anew in each step (a pass of its own before the update); `scales` has those of m, v and the master.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from numbers import Integral, Real  # noqa: F401
from typing import NamedTuple

from te_core import dtypes
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.errors import ArgumentError
from te_core.ops import _check
from te_core.ops.declare import operation, rules
from te_core.ops.quantize import check_cast, check_out
from te_core.quantized import Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

#: What a moment may be held in.
MOMENTS = (*ACTIVATION_DTYPES, dtypes.float8_e4m3)
_MASTERS = (None, dtypes.float32, dtypes.float16, dtypes.int16)
#: What is stored divided by a scale: the largest stored value.
LIMITS = {dtypes.float16: 65504 / 2, dtypes.float8_e4m3: 448.0}
_SIGNED = ("dampening", "grad_scale")  # numbers of a step that may lie below 0


def check_numbers(operation: str, **given: object) -> None:
    """Refuse what a step cannot compute with: numbers by their names."""
    for name, value in given.items():
        low, bound = 0 if name not in _SIGNED else -inf, 1 if name.startswith("beta") else inf
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not -inf < value < bound or value < low:  # type: ignore[operator]
            allowed = "a finite number" + " >= 0" * (low == 0) + " and < 1" * (bound == 1)
            raise ArgumentError(operation, f"{name}={value!r}", allowed, f"correct {name.partition('[')[0]}")


class AdamTensors(NamedTuple):
    """One parameter's. All have as many elements; without `param` the master alone is updated."""

    grad: Tensor
    param: Tensor | None
    m: Tensor
    v: Tensor
    master: Tensor | None = None
    scales: Tensor | None = None  # float32 [3], where anything is stored divided by one
    amax: Tensor | None = None  # float32 [1], raised to max |p|, a NaN ignored


@dataclass(frozen=True, slots=True)
class AdamRule:
    """The numbers of a step. A tensor is read on the device: lr and grad_scale float32 [1], step int32 [1]."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int | Tensor
    decoupled: bool = True
    bias_correction: bool = True
    grad_scale: Tensor | None = None
    skip: Tensor | None = None  # four bytes [1]: nothing is changed where they are not zero

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("beta1", "beta2", "eps", "weight_decay")}
        check_numbers("adam", **given, **({} if isinstance(self.lr, Tensor) else {"lr": self.lr}))

    def corrections(self, step: int) -> tuple[float, float]:
        """1 / (1 - beta^t) of both betas."""
        if not self.bias_correction:
            return 1.0, 1.0
        one, two = 1 - self.beta1**step, 1 - self.beta2**step
        return (1 / one if one else float("inf")), (1 / two if two else float("inf"))


@dataclass(frozen=True, slots=True)
class AdamSpec:
    """What the kernels are chosen by: the types of all tensors of a list."""

    grad: DType
    param: DType | None
    m: DType
    v: DType
    master: DType | None
    amax: bool = False

    @property
    def scaled(self) -> tuple[float, float, float]:
        """The largest stored value of m, v and the master; 0: stored as it is."""
        return LIMITS.get(self.m, 0.0), LIMITS.get(self.v, 0.0), LIMITS.get(self.master, 0.0)  # type: ignore[arg-type]


@operation("""
    tensors: The tensors of each parameter.
    rule: Numbers of the step.
""")
def adam(rt: Runtime, tensors: Sequence[AdamTensors], rule: AdamRule) -> None:
    """One step of Adam or AdamW on tensors of one sort each: gradients, parameters, moments and masters in place."""
    op = "adam"
    if not tensors:
        return
    first = tensors[0]
    kinds = AdamSpec(*[_check.dtype(t) for t in first[:5]])  # type: ignore[arg-type]
    spec = replace(kinds, amax=first.amax is not None)
    _check_adam(op, spec)
    for t in tensors:
        _check_list(op, rt, AdamTensors._fields[:5], t[:5], first[:5])
        if any(spec.scaled):
            _check.result(op, rt.device, "scales", t.scales, (3,), (dtypes.float32,))
            _check.require(t.scales is not None, op, f"no scales for {spec}", "scales, float32 [3]", "pass scales")
        _check.result(op, rt.device, "amax", t.amax, (1,), (dtypes.float32,))
        if (t.amax is None) != (spec.amax is False):
            raise ArgumentError(op, "amax of some tensors", "amax of all or of none", "call it for each sort")
    _check_rule(op, rt, rule)
    rt.backend.adam(rt, spec, [t for t in tensors if t.grad.size], rule)


@rules("""
    must isinstance(rule.step, Tensor) or (isinstance(rule.step, Integral) and rule.step >= 1): steps from 1 on; count
        the step before it
    rule.grad_scale? [1] f32
    rule.skip? [1] f32|i32
""")
def _check_rule(op: str, rt: Runtime, rule: AdamRule) -> None:
    """Numbers that are tensors are read on the device."""
    for name, given, kind in (("lr", rule.lr, "float32"), ("step", rule.step, "int32")):
        if isinstance(given, Tensor):
            _check.vector(op, rt.device, name, given, 1, (dtypes.dtype(kind),))


@rules("""
    must spec.grad in ACTIVATION_DTYPES: gradients of dtype {ACTIVATION_DTYPES}
    must spec.param in (*ACTIVATION_DTYPES, None): parameters of dtype {ACTIVATION_DTYPES}
    must spec.m in MOMENTS and spec.v in MOMENTS: moments of dtype {MOMENTS}; choose an allowed dtype of m and v
    must spec.master in _MASTERS: masters of dtype {_MASTERS}
    must spec.master is not dtypes.int16 or spec.param is dtypes.bfloat16: a bfloat16 parameter, the high half, with an
        int16 master; pass float32 masters
    must spec.param is not None or spec.master is not None: at least one of param and master; pass what shall be updated
""")
def _check_adam(op: str, spec: AdamSpec) -> None:
    """The types go together."""


class AdamQuantized(NamedTuple):
    """One quantized matrix, updated by its master (float32)."""

    grad: Tensor
    m: Tensor
    v: Tensor
    master: Tensor
    out: QuantizedTensor
    cast: Cast  # with a given scale, or in tiles of 128 x 128


def fuses(cast: Cast, m: DType, v: DType, master: Tensor | None) -> bool:
    """Whether `adam_quantized` takes a weight by this cast with such moments and this master."""
    form = cast.format
    given = (form.scaling == "tensor" and cast.scale is not None) or (form.scaling == "block" and form.tiled)
    return given and m not in LIMITS and v not in LIMITS and master is not None and master.dtype is dtypes.float32


@operation()
def adam_quantized(rt: Runtime, tensors: Sequence[AdamQuantized], rule: AdamRule) -> None:
    """A step of Adam on masters, and the bytes of their quantized matrices, in one launch for matrices of any sizes.

    Bit for bit what `adam` makes of the masters and `quantize` of those then. The casts differ in their tensors only;
    what `fuses` refuses is to be cast by itself.
    """
    op = "adam_quantized"
    if not tensors:
        return
    first = tensors[0]
    states = [(t.grad, None, t.m, t.v, t.master) for t in tensors]
    spec = AdamSpec(*[_check.dtype(t) for t in states[0]])  # type: ignore[arg-type]
    _check_adam(op, spec)
    if not fuses(first.cast, spec.m, spec.v, first.master):
        got = f"{spec} by {first.cast.key}"
        allowed = "float32 masters, moments in float32 or bfloat16, a given scale or tiles of 128 x 128"
        raise ArgumentError(op, got, allowed, "call adam, and quantize the masters")
    rules = (first.cast.key, first.cast.epsilon, first.cast.power_of_two)
    for t, some in zip(tensors, states, strict=True):
        _check_list(op, rt, AdamTensors._fields[:5], some, states[0])
        check_cast(op, rt.device, t.cast)
        if (t.cast.key, t.cast.epsilon, t.cast.power_of_two) != rules:
            raise ArgumentError(op, "casts of different rules", "casts that differ in tensors", "call it for each sort")
        _check.matrix(op, "master", t.master)
        check_out(op, rt.device, t.out, t.master, t.cast)
        t.out.rowwise_swizzled = t.out.columnwise_swizzled = None
    _check_rule(op, rt, rule)
    rt.backend.adam_quantized(rt, spec, [t for t in tensors if t.grad.size], rule)


class SgdTensors(NamedTuple):
    """One parameter's."""

    grad: Tensor
    param: Tensor
    momentum: Tensor | None = None
    copy: Tensor | None = None  # receives the new values in its own type


@dataclass(frozen=True, slots=True)
class SgdRule:
    """The numbers of a step of SGD, with g = grad * grad_scale:

    g += weight_decay * p (unless `decay_last`)
    buffer = momentum * buffer + (1 - dampening) * g, or g in the first run
    g = buffer, or g + momentum * buffer with nesterov
    g += weight_decay * p (`decay_last`)
    p -= lr * g
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    first_run: bool = False
    decay_last: bool = False
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        names = ("lr", "momentum", "dampening", "weight_decay", "grad_scale")
        check_numbers("sgd", **{name: getattr(self, name) for name in names})


@operation()
def sgd(rt: Runtime, tensors: Sequence[SgdTensors], rule: SgdRule) -> None:
    """One step of SGD on tensors of one sort each, in place."""
    if not tensors:
        return
    for t, name in zip(tensors[0], SgdTensors._fields, strict=True):
        _check.one_of("sgd", f"dtype of {name}", _check.dtype(t), (*ACTIVATION_DTYPES, None))
    for one in tensors:
        _check_list("sgd", rt, SgdTensors._fields, one, tensors[0])
    rt.backend.sgd(rt, [t for t in tensors if t.grad.size], rule)


@operation("""
    sources: Tensors to be multiplied.
    outs: Where the results are written.
    must len(sources) == len(outs): an out for each source; correct the lists
    scale: Factor, a number or float32 [1] on the device.
    flag? [1] i32 written: Becomes 1 where a source is not finite. None looks for nothing.
""")
def scale_many(
    rt: Runtime, sources: Sequence[Tensor], outs: Sequence[Tensor], scale: float | Tensor, *, flag: Tensor | None = None
) -> None:
    """outs[i] = sources[i] * scale, of one type each; flag (int32 [1]) becomes 1 where a source is not finite."""
    op = "scale_many"
    for pair in zip(sources, outs, strict=True):
        _check_list(op, rt, ("source", "out"), pair, (sources[0], outs[0]))
    for name, of in (("source", sources), ("out", outs)):
        for t in of[:1]:
            _check.one_of(op, f"dtype of {name}", t.dtype, ACTIVATION_DTYPES)
    if isinstance(scale, Tensor):
        _check.vector(op, rt.device, "scale", scale, 1, (dtypes.float32,))
    elif not isinstance(scale, (int, float)):
        raise ArgumentError(op, f"scale of type {type(scale).__name__}", "a number or a tensor", "correct scale")
    pairs = [pair for pair in zip(sources, outs, strict=True) if pair[0].size]
    if pairs:
        rt.backend.scale_many(rt, pairs, scale, flag)


@operation("""
    lists: Lists of tensors, each of one type.
    scale? [1] f32: Factor of the tensors. None is 1.
    each: Whether the norm of each tensor is given, too.
""")
def norm_many(
    rt: Runtime, lists: Sequence[Sequence[Tensor]], *, scale: Tensor | None = None, each: bool = False
) -> tuple[Tensor, Tensor]:
    """sqrt(sum((x * scale)^2)) over all tensors, float32 [1]; and of each tensor, float32 [n] ([0] unless `each`).

    Each list has tensors of one type. Sums are added in float32 in an order that sizes alone decide.
    """
    op = "norm_many"
    for tensors in lists:
        for t in tensors:
            _check_list(op, rt, ("a tensor",), (t,), tensors[:1])
            _check.one_of(op, "dtype of the tensors", t.dtype, ACTIVATION_DTYPES)
    out = rt.empty((1,), dtypes.float32)
    parts = rt.empty((sum(map(len, lists)) if each else 0,), dtypes.float32)
    rt.backend.norm_many(rt, [tensors for tensors in lists if tensors], scale, out, parts)
    return out, parts


def _check_list(
    op: str, rt: Runtime, names: Sequence[str], tensors: Sequence[Tensor | None], like: Sequence[Tensor | None]
) -> None:
    """The tensors of one parameter: dense, of one size and of the types of the first parameter, on the device.

    The first of several, the gradient or source, is only read.
    """
    first = tensors[0]
    assert first is not None
    size, device, reads = first.size, rt.device, len(tensors) > 1
    for name, t, other in zip(names, tensors, like, strict=True):
        if t is None and other is None:
            continue
        if t is None or other is None or t.dtype is not other.dtype:
            allowed = f"tensors of one sort: {name} as {other!r}"
            raise ArgumentError(op, f"{name} = {t!r} beside that", allowed, "call it for each sort")
        if t.device is not device or t.size != size or not t.is_contiguous:
            allowed = f"a dense tensor of {size} elements on {device}"
            raise ArgumentError(op, f"{name} = {t!r}", allowed, f"correct {name}")
        if t is not first and reads:
            _check.written(op, name, t)
