"""CustomRecipe: what a user's factory says for each operand role of a module, as precisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from te_core import dtypes
from te_core.errors import ArgumentError
from te_core.precision import Gemm, History, Operand, Precision, the_one
from te_core.recipe import Format
from te_core.runtime import Runtime
from te_core.tensor import META, Tensor
from te_torch.module_names import name_of
from te_torch.precisions import number_of_precision, precision_of, recipe_of
from te_torch.runtime import piece_to_torch, to_core
from te_torch.tensors import DelayedScalingRequest, Quantizer


class UserQuantizer:
    """A user's quantizer class as the core calls it: the values as it rounds them, to be multiplied as they are."""

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer

    def __call__(self, rt: Runtime, x: Tensor, rowwise: bool, columnwise: bool) -> Tensor:
        """x rounded by the user's quantize()."""
        if x.device is META:
            return x
        plain = piece_to_torch(x)  # a group of rows is a piece of its tensor
        with torch.no_grad():
            made = self.quantizer.quantize(plain)
            values = made.dequantize() if hasattr(made, "dequantize") else made
        return to_core(values.to(plain.dtype).contiguous())


def custom_precisions(module: Any, number: int) -> tuple[int, ...]:
    """The numbers of the precisions of a module's GEMMs under the custom recipe of this number."""
    base, recipe = precision_of(number), recipe_of(number)
    assert base is not None
    rules = [_rules(module, base, gemm) for gemm in range(module.gemms)]
    histories = [h for _, asked in rules for h in asked]
    history = histories[0] if histories else None
    if any(h != history for h in histories):
        raise ValueError(f"{name_of(module)}: all DelayedScalingRequests of one module must have equal fields")
    made = []
    for operands, _ in rules:
        x = operands["input"]
        fprop = Gemm(x is not None and x.scaling not in ("delayed", "current"))
        precision = replace(base, **operands, history=history, factory=None, fprop=fprop)
        made.append(number_of_precision(the_one(precision), recipe))
    return tuple(made)


def _rules(module: Any, base: Precision, gemm: int) -> tuple[dict[str, Any], list[History]]:
    """The operands of one GEMM as fields of a precision, and the histories that requests ask for."""
    found: dict[str, Operand | None] = dict.fromkeys(("input", "weight", "grad", "output", "grad_input"))
    histories: list[History] = []
    for name, role in zip(found, module.quantizer_roles(gemm), strict=True):
        if role is not None:  # else a boundary without a role: quantized outputs were not asked for
            found[name], asked = _rule(base.factory(role), role, name.startswith("grad"))
            histories += [] if asked is None else [asked]
    return found, histories


def _rule(given: Any, role: Any, backward: bool) -> tuple[Operand | None, History | None]:
    if isinstance(given, DelayedScalingRequest):
        wide = given.fp8_format is Format.E5M2 or (backward and given.fp8_format is Format.HYBRID)
        history = History(
            given.amax_history_len,
            given.margin,
            given.amax_compute_algo,
            given.scaling_factor_compute_algo,
            given.reduce_amax,
        )
        return Operand(dtypes.float8_e5m2 if wide else dtypes.float8_e4m3, "delayed"), history
    if not isinstance(given, Quantizer):
        raise ArgumentError(
            "CustomRecipe",
            f"qfactory({role}) -> {given!r}",
            "a Quantizer or a DelayedScalingRequest",
            "return IdentityQuantizer() for high precision",
        )
    try:
        rule = given.operand
    except NotImplementedError:  # a user's own class
        return Operand(dtypes.bfloat16, "custom", custom=UserQuantizer(given)), None
    if rule is not None and rule.scaling == "delayed":
        raise ArgumentError(
            "CustomRecipe",
            f"qfactory({role}) -> a Float8Quantizer",
            "a DelayedScalingRequest for delayed scaling",
            "return the request: the module then keeps scale and history, and saves them",
        )
    return rule, None
