"""Steps of Adam and SGD on lists of tensors, in NumPy: float32, rounded after each operation as the kernels do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from te_core import dtypes
from te_core.backends.cpu import codec
from te_core.backends.cpu.executor import CHUNK, F32, Executor, scratch
from te_core.backends.cpu.quantize import current_scale, quantize
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.optimizer import AdamQuantized, AdamRule, AdamSpec, AdamTensors, SgdRule, SgdTensors

_f32 = np.float32


class _State:
    """A flat tensor that is read and written in parts. One that has a scale is written at the end, by a new one."""

    def __init__(self, ex: Executor, t: Tensor, scales: Tensor | None, place: int, limit: float) -> None:
        self.ex, self.array, self.limit, self.place = ex, t.numpy().reshape(-1), limit, place
        self.scales = scales.numpy() if scales is not None and limit else None
        self.wide: F32 | None = None if self.scales is None else np.empty(t.size, np.float32)

    def read(self, part: slice) -> F32:
        x = codec.decode(self.ex, self.array[part], np.empty(self.array[part].size, np.float32))
        return x if self.scales is None else x * self.scales[self.place]

    def write(self, part: slice, x: Any) -> None:
        if self.wide is None:
            codec.encode(self.ex, x, self.array[part])
        else:
            self.wide[part] = x

    def close(self) -> None:
        if self.scales is not None and self.wide is not None:
            scale = current_scale(codec.amax(self.wide), self.limit, 0.0, False)
            codec.encode(self.ex, self.wide, self.array, scale)
            self.scales[self.place] = _f32(1) / scale


class _Halves:
    """A float32 in two halves: bfloat16, rounded by the sign of the other, and int16."""

    def __init__(self, high: Tensor, low: Tensor) -> None:
        self.high, self.low = high.numpy().reshape(-1).view(np.uint16), low.numpy().reshape(-1)

    def read(self, part: slice) -> F32:
        low = self.low[part]
        high = self.high[part] - (low < 0).astype(np.uint16)
        return (high.astype(np.uint32) << 16 | low.view(np.uint16)).view(np.float32)

    def write(self, part: slice, x: Any) -> None:
        bits = np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))
        low = bits.astype(np.uint16).view(np.int16)
        self.low[part] = low
        self.high[part] = (bits >> 16).astype(np.uint16) + (low < 0)

    def close(self) -> None:
        """Both are written."""


def _value(t: float | Tensor) -> Any:
    return t.numpy()[0] if isinstance(t, Tensor) else t


@np.errstate(all="ignore")
def adam(rt: Runtime, spec: AdamSpec, tensors: Sequence[AdamTensors], rule: AdamRule) -> None:
    """m, v, and the master or the parameter; the parameter is the master's rounding."""
    for t in tensors:
        _adam(rt, spec, rule, *t)


def adam_quantized(rt: Runtime, spec: AdamSpec, tensors: Sequence[AdamQuantized], rule: AdamRule) -> None:
    """A step of the masters, which are then quantized."""
    if _skips(rule):
        return
    for t in tensors:
        with np.errstate(all="ignore"):
            _adam(rt, spec, rule, t.grad, None, t.m, t.v, t.master)
        quantize(rt, t.master, t.cast, t.out, None)


def _skips(rule: AdamRule) -> bool:
    return rule.skip is not None and bool(rule.skip.numpy().view(np.uint32)[0])


def _adam(
    rt: Runtime, spec: AdamSpec, rule: AdamRule, grad: Tensor, param: Tensor | None, *rest: Tensor | None
) -> None:
    """One parameter's step; `rest` is m, v, master, scales and amax, of which the last ones may be missing."""
    if _skips(rule):
        return
    m_, v_, master, scales, amax = (*rest, None, None)[:5]
    assert m_ is not None and v_ is not None
    ex, limits = scratch(rt), spec.scaled
    one, two = map(_f32, rule.corrections(int(_value(rule.step))))
    lr, eps, decay = _f32(_value(rule.lr)), _f32(rule.eps), _f32(rule.weight_decay)
    scale = _f32(1) if rule.grad_scale is None else rule.grad_scale.numpy()[0]
    b1, c1, b2, c2 = map(_f32, (rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2))
    gradient, moment = _State(ex, grad, None, 0, 0.0), _State(ex, m_, scales, 0, limits[0])
    square, halves = _State(ex, v_, scales, 1, limits[1]), spec.master is dtypes.int16
    rounding = None if param is None or halves else _State(ex, param, None, 0, 0.0)
    value: Any = rounding
    if halves and param is not None and master is not None:
        value = _Halves(param, master)
    elif master is not None:
        value = _State(ex, master, scales, 2, limits[2])
    for start in range(0, grad.size, CHUNK):
        part = slice(start, start + CHUNK)
        g, p = gradient.read(part) * scale, value.read(part)
        if not rule.decoupled:
            g = g + decay * p
        m = b1 * moment.read(part) + c1 * g
        v = b2 * square.read(part) + c2 * (g * g)
        u = (m * one) / (np.sqrt(v * two) + eps)
        if rule.decoupled:
            u = u + decay * p
        p = p - lr * u
        if amax is not None:
            np.maximum(amax.numpy(), codec.amax(p), out=amax.numpy())
        moment.write(part, m)
        square.write(part, v)
        value.write(part, p)
        if rounding is not None and rounding is not value:
            rounding.write(part, p)
    for state in (moment, square, value):
        state.close()


@np.errstate(all="ignore")
def sgd(rt: Runtime, tensors: Sequence[SgdTensors], rule: SgdRule) -> None:
    """The momentum buffer, the parameter and its copy."""
    ex = scratch(rt)
    lr, decay, momentum, rest = map(_f32, (rule.lr, rule.weight_decay, rule.momentum, 1 - rule.dampening))
    for t in tensors:
        grad, param, buffer, copy = [None if x is None else _State(ex, x, None, 0, 0.0) for x in t]
        assert grad is not None and param is not None
        for start in range(0, t.grad.size, CHUNK):
            part = slice(start, start + CHUNK)
            g, p = grad.read(part) * _f32(rule.grad_scale), param.read(part)
            if not rule.decay_last:
                g = g + decay * p
            if buffer is not None:
                b = g if rule.first_run else momentum * buffer.read(part) + rest * g
                buffer.write(part, b)
                g = g + momentum * b if rule.nesterov else b
            if rule.decay_last:
                g = g + decay * p
            p = p - lr * g
            param.write(part, p)
            if copy is not None:
                copy.write(part, p)


@np.errstate(all="ignore")
def scale_many(rt: Runtime, pairs: Sequence[tuple[Tensor, Tensor]], scale: float | Tensor, flag: Tensor | None) -> None:
    """out = source * scale."""
    ex, factor = scratch(rt), _f32(_value(scale))
    for source, out in pairs:
        x = _State(ex, source, None, 0, 0.0).read(slice(None))
        if flag is not None and not np.isfinite(x).all():
            flag.numpy()[0] = 1
        _State(ex, out, None, 0, 0.0).write(slice(None), x * factor)


@np.errstate(all="ignore")
def norm_many(rt: Runtime, lists: Sequence[Sequence[Tensor]], scale: Tensor | None, out: Tensor, parts: Tensor) -> None:
    """Roots of sums of squares."""
    ex, factor = scratch(rt), _f32(1) if scale is None else scale.numpy()[0]
    squares = [
        np.square(_State(ex, t, None, 0, 0.0).read(slice(None)) * factor, dtype=np.float64).sum()
        for tensors in lists
        for t in tensors
    ]
    out.numpy()[0] = np.sqrt(np.sum(squares))
    if parts.size:
        parts.numpy()[:] = np.sqrt(squares)
