"""Documented names that are not built: a call says what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from te_core.errors import UnsupportedError


def refusing(name: str, instead: str) -> Any:
    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise UnsupportedError(f"te_jax.{name}", "a call", "functions that are built", f"use {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Not built. Use {instead}."
    return refuse


grouped_dense = refusing(
    "grouped_dense", "a te_jax.dense for each group, or te_core.functional.grouped_linear outside of jax.jit"
)
