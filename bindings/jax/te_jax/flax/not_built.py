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


make_dot_general_cls = refusing("flax.make_dot_general_cls", "te_jax.flax.DenseGeneral in place of nn.Dense")
