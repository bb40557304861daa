"""Small functions that scripts import beside the modules: initialisers, a mask for scores, whole divisions, the order
of gated weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from te_core.errors import ArgumentError
from te_torch import not_built
from te_torch.values import is_size

__all__ = [
    "attention_mask_func",
    "deinterleave_glu_tensor",
    "divide",
    "ensure_divisibility",
    "get_default_init_method",
    "init_method_constant",
    "init_method_normal",
    "interleave_glu_tensor",
    "round_up_to_nearest_multiple",
    "scaled_init_method_normal",
]

Init = Callable[[torch.Tensor], torch.Tensor]

# Partial functions, not closures: a module that keeps its initialiser can be copied and pickled.


def init_method_normal(sigma: float) -> Init:
    """An initialiser: normal(0, sigma)."""
    return partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Init:
    """normal(0, sigma / sqrt(2 num_layers)): for the projections that write to a residual stream of so many layers."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def init_method_constant(val: float) -> Init:
    """An initialiser: this value everywhere."""
    return partial(torch.nn.init.constant_, val=val)


def get_default_init_method() -> Init:
    """What modules begin with where they are given no `init_method`: normal(0, 0.023)."""
    return init_method_normal(0.023)


def attention_mask_func(attention_scores: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The scores, -10000 where the mask is True: a `mask_func` of FusedScaleMaskSoftmax."""
    return attention_scores.masked_fill(attention_mask, -10000.0)


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """An error unless the division leaves nothing."""
    if denominator == 0 or numerator % denominator:
        raise ArgumentError(
            "ensure_divisibility", f"{numerator} / {denominator}", f"a multiple of {denominator}", "change one of them"
        )


def divide(numerator: int, denominator: int) -> int:
    """The quotient of a division that leaves nothing."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """The smallest multiple that is not below the value."""
    if multiple <= 0:
        raise ArgumentError("round_up_to_nearest_multiple", f"multiple={multiple}", "a number > 0", "correct it")
    return -(-value // multiple) * multiple


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """[gate; linear] along the first dimension as blocks of so many rows in turn: gate, linear, gate, linear, ..."""
    return _turned("interleave_glu_tensor", tensor, interleave_size, True)


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """The inverse: all rows of the gate, then all of the linear part."""
    return _turned("deinterleave_glu_tensor", tensor, interleave_size, False)


def _turned(operation: str, tensor: torch.Tensor, size: int, gate_first: bool) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(operation, f"a {type(tensor).__name__}", "a tensor", "pass the weight")
    if not is_size(size) or not tensor.ndim or tensor.shape[0] % (2 * size):
        raise ArgumentError(
            operation,
            f"interleave_size={size!r} for a tensor of shape {tuple(tensor.shape)}",
            "a size above 0, twice of which divides the first dimension",
            "choose such a size, or pad the tensor",
        )
    each = tensor.shape[0] // (2 * size)
    blocks = (2, each) if gate_first else (each, 2)
    return tensor.reshape(*blocks, size, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


__getattr__ = not_built.getter(__name__, "pytorch.utils")
