"""Documented names that are not built: a call says what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from te_core.errors import UnsupportedError

#: By name: what to use instead.
_INSTEAD = {
    "grouped_dense": "a te_jax.dense for each group, or te_core.functional.grouped_linear outside of jax.jit",
    "softmax": "jax.nn.softmax, or te_jax.fused_attn for attention",
}


def refusing(name: str, instead: str) -> Any:
    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise UnsupportedError(f"te_jax.{name}", "a call", "functions that are built", f"use {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Not built. Use {instead}."
    return refuse


grouped_dense, softmax = (refusing(name, instead) for name, instead in _INSTEAD.items())
