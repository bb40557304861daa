"""Products of groups of rows with a matrix each. An array says how many rows each has: one program for all sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from te_core import dtypes
from te_core.calls import precision_of
from te_core.dtypes import ACTIVATION_DTYPES
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.grouped_linear import GroupedSpec
from te_core.layers.product import LinearSpec, Needs
from te_core.ops import raw as ops
from te_core.precision import Operand, Precision
from te_core.quantize.state import INPUT, WEIGHT, forward_cast
from te_core.recipe import Recipe
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_jax.context import chosen
from te_jax.mesh import alike
from te_jax.record import Array, Work, the_one
from te_jax.rules import bind


def grouped_dense(
    x: Any,
    kernel: Any,
    group_sizes: Any,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (1,)),
    bias: Any = None,
    *,
    recipe: Recipe | None = None,
) -> Any:
    """x_i @ kernel[i] + bias[i] for each group i of rows: x [rows, in], kernel [groups, in, out], bias [groups, out].

    The rows are sorted by group, and `group_sizes` may be computed under jax.jit. Rows behind the last group become
    zeros. `recipe`: current or block scaling, with a scale for each group or block. On a GPU: bfloat16 or float16 on
    Hopper, in and out multiples of 8, with a recipe of 16.

    Raises:
        ArgumentError: Shapes or types do not fit.
        UnsupportedError: A recipe of another kind is named, or a GPU does not read sizes.

    Example:
        import jax.numpy as jnp
        import te_jax

        x, kernel = jnp.ones((12, 64)), jnp.ones((3, 64, 32))
        y = te_jax.grouped_dense(x, kernel, jnp.array([4, 0, 8]))  # [12, 32]
    """
    op = "grouped_dense"
    x, kernel, sizes = jnp.asarray(x), jnp.asarray(kernel), jnp.asarray(group_sizes)
    precision = precision_of(op, chosen(recipe))
    spec = GroupedSpec((LinearSpec(dtypes.bfloat16, precision, Needs(True, True, False)),))
    if not spec.by_offsets or (precision is not None and precision.history is not None):
        do = "choose one of these, or call te_core.functional.grouped_linear outside of jax.jit"
        allowed = "None, Float8CurrentScaling or Float8BlockScaling without backward_override and check_finite"
        raise UnsupportedError(op, f"recipe={type(chosen(recipe)).__name__}", allowed, do)
    pairs = zip(contracting_dims, (x, kernel), strict=True)
    if [[d % max(a.ndim, 1) for d in dims] for dims, a in pairs] != [[1], [1]]:
        raise ArgumentError(op, f"contracting_dims={contracting_dims}", "((1,), (1,))", "transpose x or the kernel")
    groups = kernel.shape[0] if kernel.ndim == 3 else -1
    fits = x.ndim == 2 and kernel.ndim == 3 and kernel.shape[1] == x.shape[1] and sizes.shape == (groups,)
    if not fits or dtypes.dtype(np.dtype(x.dtype)) not in ACTIVATION_DTYPES or not groups:
        got = f"x {x.dtype}{list(x.shape)}, kernel {list(kernel.shape)}, group_sizes {list(sizes.shape)}"
        allowed = "x [rows, in] of float32, bfloat16 or float16, kernel [groups, in, out], group_sizes [groups]"
        raise ArgumentError(op, got, allowed, "correct the shapes")
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ArgumentError(op, f"group_sizes of {sizes.dtype}", "integers", "pass the rows of each group")
    if bias is not None and jnp.shape(bias) != (groups, kernel.shape[2]):
        allowed = f"{[groups, kernel.shape[2]]}, as the kernel has"
        raise ArgumentError(op, f"bias {list(jnp.shape(bias))}", allowed, "correct it")
    given = [x, sizes.astype(jnp.int32), kernel.astype(x.dtype)]
    given += [] if bias is None else [jnp.asarray(bias, x.dtype)]
    arrays = tuple(Array(tuple(a.shape), dtypes.dtype(np.dtype(a.dtype))) for a in given)
    if precision is not None and (kernel.shape[1] % 16 or kernel.shape[2] % 16):
        raise ArgumentError(op, f"kernel {list(kernel.shape)}", "in and out that are multiples of 16", "pad the kernel")
    return _product(the_one(_Groups(arrays, precision)), *alike(given))


class _Groups:
    """The work of one call: on x, sizes, kernels, and biases if there are any."""

    def __init__(self, arrays: tuple[Array, ...], precision: Precision | None) -> None:
        self.arrays, self.precision = arrays, precision
        self._key = arrays, None if precision is None else precision.serial

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Groups) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def settle(self) -> None:
        """Make what multiplies."""
        x, sizes, kernel, *_ = self.arrays
        dy = x._replace(shape=(x.shape[0], kernel.shape[2]))
        self.forward = self._work("forward", _forward, self.arrays)
        self.of_x = self._work("gradient of x", _of_x, (dy, sizes, kernel))
        self.of_kernel = self._work("gradient of the kernel", _of_kernel, (dy, sizes, x))
        self.of_bias = self._work("gradient of the bias", _of_bias, (dy, sizes))

    def _work(self, name: str, function: Any, arrays: Sequence[Array]) -> Work:
        def run(rt: Runtime, *tensors: Tensor) -> Tensor:
            made: Tensor = function(rt, self.precision, *tensors)
            return made

        return Work(f"grouped_dense {name}", run, arrays, lambda rt, tensors: (tuple(tensors), {}), str(self.precision))


def _offsets(rt: Runtime, sizes: Tensor, rows: int) -> Tensor:
    return ops.group_offsets(rt, sizes, rows, rt.empty((sizes.shape[0] + 1,), dtypes.int32))


def _each(t: Tensor) -> list[Tensor]:
    """The parts of its first dimension."""
    return [t.rows(i, i + 1).reshape(*t.shape[1:]) for i in range(t.shape[0])]


def _rows(rt: Runtime, t: Tensor, ends: Tensor, rule: Operand | None, columnwise: bool) -> Any:
    """Rows of all groups as a product reads them."""
    if rule is None:
        return t
    cast = forward_cast(rule, None, 0, INPUT, rowwise=not columnwise, columnwise=columnwise)
    return ops.quantize_rows(rt, t, ends, [cast] * (ends.shape[0] - 1))


def _kernels(rt: Runtime, kernel: Tensor, rule: Operand | None, columnwise: bool) -> Sequence[Any]:
    """The groups' matrices as a product reads them."""
    each = _each(kernel)
    if rule is None:
        return each
    cast = forward_cast(rule, None, 0, WEIGHT, rowwise=not columnwise, columnwise=columnwise)
    return ops.quantize_many(rt, each, [cast] * len(each))


def _told(
    precision: Precision | None, gemm: str
) -> tuple[Operand | None, Operand | None, Operand | None, dict[str, Any]]:
    """(the rules of x, of the kernel and of dy, what a product is told)."""
    if precision is None:
        return None, None, None, {}
    return precision.input, precision.weight, precision.grad, precision.of_product(gemm)


def _forward(
    rt: Runtime, precision: Precision | None, x: Tensor, sizes: Tensor, kernel: Tensor, bias: Tensor | None = None
) -> Tensor:
    y = rt.zeros((x.shape[0], kernel.shape[2]), x.dtype)
    (of_x, of_kernel, _, told), ends = _told(precision, "fprop"), _offsets(rt, sizes, x.shape[0])
    biases = None if bias is None else _each(bias)
    rows, kernels = _rows(rt, x, ends, of_x, False), _kernels(rt, kernel, of_kernel, True)
    ops.gemm_grouped(rt, rows, kernels, y, ends, bias=biases, **told)
    return y


def _of_x(rt: Runtime, precision: Precision | None, dy: Tensor, sizes: Tensor, kernel: Tensor) -> Tensor:
    dx = rt.zeros((dy.shape[0], kernel.shape[1]), dy.dtype)
    (_, of_kernel, of_dy, told), ends = _told(precision, "dgrad"), _offsets(rt, sizes, dy.shape[0])
    rows, kernels = _rows(rt, dy, ends, of_dy, False), _kernels(rt, kernel, of_kernel, False)
    ops.gemm_grouped(rt, rows, kernels, dx, ends, trans_b=True, **told)
    return dx


def _of_kernel(rt: Runtime, precision: Precision | None, dy: Tensor, sizes: Tensor, x: Tensor) -> Tensor:
    found = rt.empty((sizes.shape[0], x.shape[1], dy.shape[1]), x.dtype)
    (of_x, _, of_dy, told), ends = _told(precision, "wgrad"), _offsets(rt, sizes, x.shape[0])
    rows, others = _rows(rt, x, ends, of_x, True), _rows(rt, dy, ends, of_dy, True)
    ops.gemm_grouped(rt, rows, others, _each(found), ends, trans_a=True, **told)
    return found


def _of_bias(rt: Runtime, precision: Precision | None, dy: Tensor, sizes: Tensor) -> Tensor:
    found = rt.empty((sizes.shape[0], dy.shape[1]), dy.dtype)
    ops.group_sums(rt, dy, _offsets(rt, sizes, dy.shape[0]), _each(found))
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(groups: _Groups, *given: Any) -> Any:
    return bind(groups.forward, given)[1][0]


def _with_residual(groups: _Groups, *given: Any) -> tuple[Any, Any]:
    values, wanted = [a.value for a in given], tuple(a.perturbed for a in given)
    x = values[0] if wanted[2] else None
    return _product(groups, *values), (_Wanted(wanted), x, values[1], values[2] if wanted[0] else None)


@jax.tree_util.register_static
class _Wanted(tuple[bool, ...]):
    """Of which operands gradients are wanted."""


def _gradients(groups: _Groups, residual: Any, dy: Any) -> tuple[Any, ...]:
    wanted, x, sizes, kernel = residual
    found: list[Any] = [None] * len(wanted)
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        return tuple(found)
    for i, work, more in ((0, groups.of_x, [kernel]), (2, groups.of_kernel, [x]), (3, groups.of_bias, [])):
        if i < len(wanted) and wanted[i]:
            found[i] = bind(work, [dy, sizes, *more])[1][0]
    return tuple(found)


_product.defvjp(_with_residual, _gradients, symbolic_zeros=True)
