"""What JAX knows of arrays inside of jax.shard_map: along which mesh axes they differ from device to device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def axes_of(arrays: Any) -> frozenset[str]:
    """The mesh axes along which one of these arrays differs."""
    return frozenset().union(*map(_axes_of, jax.tree_util.tree_leaves(arrays)))


def _axes_of(array: Any) -> frozenset[str]:
    aval = jax.typeof(array)
    kind = getattr(aval, "manual_axis_type", None)  # since jax 0.10
    found: frozenset[str] = getattr(aval, "vma", frozenset()) if kind is None else kind.varying
    return found


def bound() -> tuple[str, ...]:
    """The axes of the jax.shard_map that is traced."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def tracked() -> bool:
    """Whether JAX knows along which of them an array differs: not with check_vma=False."""
    return bool(_axes_of(jax.lax.axis_index(bound())))


def varying(array: Any, axes: Sequence[str]) -> Any:
    """The same array as one that differs along these axes, too. The gradient of such a one is summed over them."""
    missing = tuple(sorted(set(axes) - axes_of(array)))
    if not missing:
        return array
    return jax.lax.pcast(array, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(array, missing)


def alike(arrays: Any) -> Any:
    """A pytree whose arrays all differ along the axes along which one of them does."""
    axes = axes_of(arrays)
    return jax.tree_util.tree_map(lambda a: varying(a, sorted(axes)), arrays) if axes else arrays
