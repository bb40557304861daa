"""Arrays as a recipe quantizes them, and their values."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from te_core import dtypes
from te_core.calls import precision_of
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import raw as ops
from te_core.precision import Operand
from te_core.quantize.operands import is_plain_rule
from te_core.quantize.state import INPUT, Scales, forward_cast
from te_core.quantized import QuantizedTensor
from te_core.recipe import Recipe
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_jax.context import chosen
from te_jax.mesh import alike
from te_jax.record import Array, Part, Work, the_one
from te_jax.rules import bind, shown


@jax.tree_util.register_pytree_with_keys_class
class Quantized:
    """A quantized array: `data`, and the factors by which it is multiplied, `scale_inv`. Both lie in one block."""

    def __init__(self, block: Any, kind: Kind) -> None:
        self.block, self.kind = block, kind

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's, as rows."""
        return self.kind.array.shape

    @property
    def data(self) -> Any:
        """[rows, columns] of an FP8 type."""
        return shown(self.kind.data, (), (self.block,))

    @property
    def scale_inv(self) -> Any:
        """One factor, or one for each block, as te_core lays them out."""
        return shown(self.kind.scale, (), (self.block,))

    def tree_flatten_with_keys(self) -> Any:
        """See jax.tree_util."""
        return [(jax.tree_util.GetAttrKey("block"), self.block)], self.kind

    @classmethod
    def tree_unflatten(cls, kind: Kind, parts: Any) -> Quantized:
        """See jax.tree_util."""
        (block,) = parts
        return cls(block, kind)

    def __repr__(self) -> str:
        return f"Quantized({self.kind.rule.format}, {self.shape})"


class Kind:
    """How arrays of a shape are quantized."""

    def __init__(self, rule: Operand, array: Array) -> None:
        self.rule, self.array = rule, array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and (other.rule, other.array) == (self.rule, self.array)

    def __hash__(self) -> int:
        return hash((self.rule, self.array))

    def __reduce__(self) -> Any:
        return _kind, (self.rule, self.array)

    def settle(self) -> None:
        """Make what quantizes."""
        rule, array = self.rule, self.array
        operands = [array] + [Array((1,), dtypes.float32)] * (rule.scaling == "delayed")
        self.quantize = Work("quantize", partial(_quantized, rule), operands, self._given, str(rule.format))
        q: Any = self.quantize.standing()
        self.data, self.scale = (self._part(t) for t in (q.rowwise, q.rowwise_scale))
        self._values: dict[DType, Work] = {}

    def _part(self, t: Tensor) -> Part:
        part = self.quantize.where(t)
        assert part is not None
        return part._replace(number=0)

    @staticmethod
    def _given(rt: Runtime, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(tensors), {}

    def dequantize(self, dtype: DType) -> Work:
        """The work that gives values of this type."""
        before = [0] * len(self.quantize.operands)

        def build(rt: Runtime, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return (self.quantize.on(rt.device).structure([*before, tensors[0].ptr]), dtype), {}

        found = self._values.get(dtype)
        if found is None:
            content = f"{self.rule.format} {dtype} {self.array}"
            work = Work("dequantize", ops.dequantize, self.quantize.results, build, content)
            found = self._values.setdefault(dtype, work)
        return found


def _quantized(rule: Operand, rt: Runtime, x: Tensor, scale: Tensor | None = None) -> QuantizedTensor:
    scales = None if scale is None else Scales(scale, None, None, None)
    return ops.quantize(rt, x, forward_cast(rule, scales, 0, INPUT, rowwise=True, columnwise=False))


def _kind(rule: Operand, array: Array) -> Kind:
    found: Kind = the_one(Kind(rule, array))
    return found


def _rule(recipe: Recipe) -> Operand:
    precision = precision_of("quantize", recipe)
    rule = None if precision is None else precision.input
    if precision is None or rule is None or not is_plain_rule(rule):
        do = "choose Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling or DelayedScaling"
        raise UnsupportedError("quantize", f"{type(recipe).__name__}", "recipes with one rule for activations", do)
    return rule


def quantize(x: Any, recipe: Recipe | None = None, *, scale: Any = None) -> Quantized:
    """x as activations are quantized. `scale`: float32 [1], of a recipe with a history."""
    x, recipe = jnp.asarray(x), chosen(recipe)
    dtype = dtypes.dtype(np.dtype(x.dtype))
    if recipe is None or x.ndim < 1 or dtype not in ACTIVATION_DTYPES:
        got, allowed = f"x = {x.dtype}{list(x.shape)}, recipe={recipe!r}", "float32, bfloat16 or float16 and a recipe"
        raise ArgumentError("quantize", got, allowed, "correct x, or pass recipe=")
    kind = _kind(_rule(recipe), Array((int(np.prod(x.shape[:-1])), x.shape[-1]), dtype))
    if (scale is None) == (kind.rule.scaling == "delayed"):
        do = "pass scale= of a recipe with a history, and of no other"
        raise ArgumentError("quantize", f"scale={scale!r} for {type(recipe).__name__}", "the scale that it keeps", do)
    operands = [x.reshape(kind.array.shape)]
    operands += [] if scale is None else [jnp.asarray(scale, jnp.float32).reshape(1)]
    _, (block,) = bind(kind.quantize, alike(operands))
    return Quantized(block, kind)


def dequantize(q: Quantized, dtype: Any = jnp.float32) -> Any:
    """The values of a quantized array, as a matrix of rows."""
    if not isinstance(q, Quantized):
        do = "pass what te_jax.quantize gave"
        raise ArgumentError("dequantize", f"q of type {type(q).__name__}", "a te_jax.Quantized", do)
    work = q.kind.dequantize(dtypes.dtype(np.dtype(dtype)))
    _, (found,) = bind(work, [q.block])
    return found
