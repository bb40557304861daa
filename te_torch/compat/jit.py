"""The documented module `jit`, as far as its names mean something: nothing has to be fused or warmed up by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_torch.doors import door
from te_torch.export.mode import exporting
from te_torch.runtime import warn

__all__ = [
    "l2normalization_fused", "no_torch_dynamo", "set_jit_fusion_options", "warmup_jit_bias_dropout_add",
    "warmup_jit_bias_dropout_add_all_dtypes", "warmup_jit_bias_gelu", "warmup_jit_bias_gelu_all_dtypes",
]  # fmt: skip


def no_torch_dynamo(
    recursive: bool = True, when: Callable[[Mapping[str, Any]], str | None] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: torch.compile leaves the function out, and with `recursive` all that it calls.

    `when` is asked with the arguments by name, and says why the call stays eager, or None for a call that is traced.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        eager = torch.compiler.disable(function, recursive=recursive)
        parameters = signature(function).parameters
        if when is not None and any(p.kind is Parameter.VAR_POSITIONAL for p in parameters.values()):
            raise ArgumentError(
                "no_torch_dynamo", "`when` for a function of *args", "named arguments", "name them, or leave `when` out"
            )
        names = tuple(parameters)

        def traced(*args: Any, **options: Any) -> Any:
            if exporting.on:
                return function(*args, **options)
            if when is not None:
                reason = when({**dict(zip(names, args)), **options})  # noqa: B905  the rest has defaults
                if reason is None:
                    return function(*args, **options)
                warn(f"Falling back to eager execution under torch.compile: {reason}", UserWarning, 2)
            return eager(*args, **options)

        return door(function, traced)

    return decorate


def l2normalization_fused(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(sum(x ** 2) + eps) over the last dimension, computed in float32."""
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def set_jit_fusion_options() -> None:
    """Without effect: layers fuse by themselves."""


def _nothing_to_warm_up(*args: Any, **options: Any) -> None:
    """Without effect: nothing is compiled at the first call that this would save."""


warmup_jit_bias_dropout_add = warmup_jit_bias_dropout_add_all_dtypes = _nothing_to_warm_up
warmup_jit_bias_gelu = warmup_jit_bias_gelu_all_dtypes = _nothing_to_warm_up
