"""Layers with their options as rounds of a forward and a backward, in memory of any runtime, for proofs about tapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from inspect import unwrap
from types import ModuleType
from typing import Any

from te_core import dtypes, ops
from te_core.dtypes import DType
from te_core.layers import linear, mlp, norm_linear
from te_core.layers.linear import LinearSpec, Needs, Sink
from te_core.layers.norm import NormSpec
from te_core.layers.residual import AddSpec, BranchNeeds, Stream
from te_core.precision import Operand, Precision
from te_core.quantize.state import Scales
from te_core.quantized import Cast, QuantizedTensor
from te_core.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    resolve,
    the_one,
)
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.core.fake_cuda import tensor
from tests.core.tape_proof import Call, Round

BF16, FP32, I32, I64 = dtypes.bfloat16, dtypes.float32, dtypes.int32, dtypes.int64
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "current e4m3": Float8CurrentScaling(fp8_format=Format.E4M3),
    "current plain backward": Float8CurrentScaling(backward_override="high_precision"),
    "current dequantized backward": Float8CurrentScaling(backward_override="dequantized"),
    "block": Float8BlockScaling(),
    "block hybrid": Float8BlockScaling(fp8_format=Format.HYBRID),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 tiled": MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": NVFP4BlockScaling(),
    "nvfp4 rows": NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True),
    "nvfp4 4over6": NVFP4BlockScaling(nvfp4_4over6="all", disable_rht=True),
}
ALL = Needs(True, True, True)
#: Whether what comes quantized has its scales in the order of products, too.
SWIZZLED = True


def precision_of(name: str | None) -> Precision | None:
    """A recipe's, emulated where the device does not multiply its formats."""
    return None if name is None else the_one(replace(resolve(RECIPES[name]), emulate=True))


@dataclass
class Maker:
    """Makes tensors of a runtime. All of them, or that of a number `only`, begin `shift` bytes behind what allocations
    are aligned to."""

    rt: Runtime
    shift: int = 0
    only: int = -1
    count: int = 0

    def __call__(self, *shape: int, dtype: DType = BF16) -> Tensor:
        """A tensor."""
        self.count += 1
        return tensor(self.rt, shape, dtype, shift=self.shift if self.only in (-1, self.count) else 0)

    def scales(self, gemms: int, history: bool = True, recorded: bool = True, nonfinite: bool = False) -> Scales:
        """The state of so many products: scales and maxima (none in a recomputation), counters of what is no number."""
        made: list[Any] = [self(n * gemms, dtype=FP32) if history else None for n in (3, 3, 2, 2)]
        counters = [self(n * gemms, 2, dtype=I64) if nonfinite else None for n in (3, 2)]
        return Scales(made[0], made[1] if recorded else None, made[2], made[3], *counters)

    def quantized(self, shape: tuple[int, int], rule: Operand | None, copies: str) -> Any:
        """A matrix by a rule, in these copies ("rows", "columns", "both"); plain without a rule."""
        if rule is None:
            return self(*shape)
        scale = self(1, dtype=FP32) if rule.scaling == "delayed" else None
        cast = Cast(rule.format, rowwise=copies != "columns", columnwise=copies != "rows", scale=scale)
        q = ops.quantize(self.rt, self(*shape), cast)
        if SWIZZLED and rule.scaling in ("mxfp8", "nvfp4"):
            turned = not q.format.transposed
            if q.rowwise_scale is not None:
                q.rowwise_swizzled = ops.swizzle_scales(self.rt, q.rowwise_scale)
            if q.columnwise_scale is not None:
                q.columnwise_swizzled = ops.swizzle_scales(self.rt, q.columnwise_scale, transposed=turned)
        return q

    def weight(self, shape: tuple[int, int], precision: Precision | None, kind: str, dtype: DType = BF16) -> Any:
        """A parameter: "plain", or quantized itself with these copies, which a framework's tensor owns."""
        if kind == "plain" or precision is None:
            return self(*shape, dtype=dtype)
        q: QuantizedTensor = self.quantized(shape, precision.weight, kind)
        q.owner = object()
        return q

    def rng(self) -> Tensor:
        """A pair of numbers for draws."""
        return self(2, dtype=I64)


def call(module: ModuleType, name: str, spec: Any, *args: Any, **options: Any) -> Call:
    """A call of a layer's function as adapters make it."""
    return Call(f"{module.__name__.rpartition('.')[2]}.{name}", unwrap(getattr(module, name)), spec, args, options)


def state(make: Maker, recipe: str | None, gemms: int, recorded: bool, nonfinite: bool = False) -> dict[str, Any]:
    """The scaling state that a recipe wants."""
    history = recipe == "delayed"
    return {"scales": make.scales(gemms, history, recorded, nonfinite) if history or nonfinite else None}


def sink(make: Maker, kind: str, shape: tuple[int, int]) -> Sink | None:
    """Where a weight gradient goes: "", or a dtype's name, with "+" added to what is there."""
    if not kind:
        return None
    return Sink(make(*shape, dtype=FP32 if kind.startswith("fp32") else BF16), kind.endswith("+"))


@dataclass(frozen=True)
class Linear:
    """A linear, or one behind a norm (`normed`)."""

    recipe: str | None = None
    rows: int = 48
    k: int = 64
    n: int = 96
    bias: bool = True
    needs: Needs = ALL
    weight: str = "plain"
    ready: str = ""
    sink: str = ""
    normed: str = ""  # the norm's kind
    x: str = "plain"  # or quantized, with these copies
    x_rule: str = "input"  # of the precision
    dy: str = "plain"
    out: bool = False  # the output is delivered quantized
    grad: bool = False  # and the input's gradient
    original: bool = False
    return_norm: bool = False
    stream: Stream | None = None
    again: bool = False
    dtype: DType = BF16
    weight_dtype: DType = BF16
    recorded: bool = True
    nonfinite: bool = False
    shift: int = 0
    only: int = -1
    turned: bool = False

    def spec(self) -> Any:
        """The layer's."""
        precision = precision_of(self.recipe)
        one = LinearSpec(self.dtype, precision, self.needs, None, self.weight_dtype, self.out, self.grad, self.original)
        one = replace(one, turned=self.turned)
        if not self.normed:
            return one
        normed = NormSpec(self.dtype, self.normed, 1e-5)
        return norm_linear.NormLinearSpec(normed, one, self.return_norm, self.stream, self.again)

    def __call__(self, rt: Runtime) -> Round:
        """One round."""
        make = Maker(rt, self.shift, self.only)
        spec = self.spec()
        p = (spec.linear if self.normed else spec).precision
        x: Any = make(2, self.rows // 2, self.k, dtype=self.dtype) if self.rows % 2 == 0 else None
        if x is None:
            x = make(self.rows, self.k, dtype=self.dtype)
        lead = x.shape[:-1]
        if self.x != "plain" and p is not None:
            x = make.quantized((self.rows, self.k), getattr(p, self.x_rule), self.x)
        shape = (self.k, self.n) if self.turned else (self.n, self.k)
        w = make.weight(shape, p, self.weight, self.weight_dtype)
        b = make(self.n, dtype=self.dtype) if self.bias else None
        given = [*self._before(make, x), w, b, make.rng(), *self._behind(make, lead)]
        options = state(make, self.recipe, 1, self.recorded, self.nonfinite)
        ready = make.quantized(shape, p.weight, self.ready) if self.ready and p is not None else None
        module: Any = norm_linear if self.normed else linear

        def backward(outputs: Any, saved: Any) -> Call:
            dy: Any = make(*lead, self.n, dtype=self.dtype)
            if self.dy != "plain" and p is not None:
                dy = make.quantized((self.rows, self.n), p.grad, self.dy)
            more = [make(*t.shape, dtype=t.dtype) for t in outputs[1:]]
            grads = [dy, *more, *[None] * (2 - len(more))] if self.normed else [dy]
            sinks = (sink(make, self.sink, shape),)
            return call(module, "backward", spec, *grads, saved, sinks=sinks, **options)

        begins = call(module, "forward", spec, *given, ready=(ready,), **options)
        return Round(begins, backward if any(self.needs) else None)

    def _before(self, make: Maker, x: Any) -> list[Any]:
        if not self.normed:
            return [x]
        return [x, make(self.k, dtype=self.dtype), make(self.k, dtype=self.dtype) if "Layer" in self.normed else None]

    def _behind(self, make: Maker, lead: tuple[int, ...]) -> list[Any]:
        if not self.normed or self.stream is None or self.stream.add is None:
            return []
        return [make(*lead, self.k), make(self.k), make.rng()]


@dataclass(frozen=True)
class MLP:
    """A norm and an MLP."""

    recipe: str | None = None
    rows: int = 48
    hidden: int = 64
    inner: int = 96
    activation: str = "gelu"
    bias: bool = True
    needs: Needs = ALL
    weight: str = "plain"
    ready: str = ""
    sink: str = ""
    kind: str = "LayerNorm"
    return_norm: bool = False
    stream: Stream | None = None
    checkpoint: bool = False
    again: bool = False
    release: bool = True
    recorded: bool = True
    shift: int = 0
    only: int = -1
    turned: bool = False

    def __call__(self, rt: Runtime) -> Round:
        """One round."""
        make = Maker(rt, self.shift, self.only)
        p, needs = precision_of(self.recipe), self.needs
        fc1 = LinearSpec(BF16, p, needs, weight_dtype=BF16, turned=self.turned)
        fc2 = replace(fc1, needs=needs._replace(input=any(needs)))
        normed = NormSpec(BF16, self.kind, 1e-5)
        spec = mlp.MLPSpec(
            fc1,
            fc2,
            normed,
            self.activation,
            self.return_norm,
            stream=self.stream,
            checkpoint=self.checkpoint,
            again=self.again,
        )
        wide = self.inner * (2 if ops.is_gated(self.activation) else 1)
        sizes = wide, self.hidden
        shapes = (wide, self.hidden), (self.hidden, self.inner)
        if self.turned:
            shapes = (self.hidden, wide), (self.inner, self.hidden)
        x = make(2, self.rows // 2, self.hidden)
        beta = make(self.hidden) if "Layer" in self.kind else None
        w1, w2 = (make.weight(shape, p, self.weight) for shape in shapes)
        b1, b2 = (make(size) if self.bias else None for size in sizes)
        branch = []
        if self.stream is not None and self.stream.add is not None:
            branch = [make(*x.shape), make(self.hidden), make.rng()]
        options = state(make, self.recipe, 2, self.recorded)
        ready: Any = (None, None)
        if self.ready and p is not None:
            ready = tuple(make.quantized(shape, p.weight, self.ready) for shape in shapes)

        def backward(outputs: Any, saved: Any) -> Call:
            more = [make(*t.shape, dtype=t.dtype) for t in outputs[1:]]
            grads = [make(*x.shape), *more, *[None] * (2 - len(more))]
            sinks = tuple(sink(make, self.sink, shape) for shape in shapes)
            release = {"release": True} if self.release else {}
            again = {"ready": ready} if self.checkpoint else {}
            return call(mlp, "backward", spec, *grads, saved, sinks=sinks, **release, **again, **options)

        begins = call(
            mlp,
            "forward",
            spec,
            x,
            make(self.hidden),
            beta,
            w1,
            b1,
            w2,
            b2,
            make.rng(),
            *branch,
            ready=ready,
            **options,
        )
        return Round(begins, backward if any(needs) else None)


STREAMS = {
    "": None,
    "stream": Stream(),
    "branch": Stream(AddSpec(0.0, BranchNeeds(True, True, True))),
    "dropped branch": Stream(AddSpec(0.1, BranchNeeds(True, True, True))),
}


def needed() -> Iterator[Needs]:
    """Each subset of gradients."""
    for number in range(8):
        yield Needs(*(bool(number & bit) for bit in (1, 2, 4)))


Build = Callable[[Runtime], Round]
