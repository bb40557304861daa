"""Where attention in FP8 rounds in an exported program: q, k and v, the weights P, the output.

What is rounded is what eager code rounds: FusedAttention's layer (te_core.layers.attention_fp8), whose values are
float32 and whose output may go to a projection as it is, or, where that would compute an eager call, the emulation
(te_torch.attention.fp8) in the activation dtype.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_core.attention import Sizes
from te_core.attention_rules import FP8_TAKES, fp8_refusal
from te_core.layers.attention import AttentionInputs, AttentionLayerSpec
from te_core.layers.attention_fp8 import OUT, QKV, P
from te_core.precision import AttentionPrecision, Operand
from te_core.quantize.state import FORWARD_SLOTS
from te_torch.attention import choose
from te_torch.attention.layouts import apart
from te_torch.attention.plan import Plan
from te_torch.export.handed import Handed, as_handed, plain
from te_torch.export.layers import quantized
from te_torch.export.mode import custom_recipe, inspected, module_to_module, not_exported
from te_torch.precisions import precision_of


@dataclass(frozen=True, slots=True)
class Rounding:
    """How one call rounds."""

    rule: AttentionPrecision
    weights: Operand  # P
    scales: torch.Tensor  # of the module's state
    emulated: bool
    dtype: torch.dtype  # of the activations

    def operands(self, layer: AttentionLayerSpec, inputs: AttentionInputs) -> tuple[torch.Tensor, ...]:
        """q, k and v [.., heads, d]: of each tensor that came the values that FP8 has of it."""
        if layer.copies and not self.emulated:  # no strides lead to them: they are rounded apart
            whole = inputs._replace(a=plain(inputs.a))
            return tuple([self._operand(t) for t in apart(layer, whole)])
        a, b, c = (None if t is None else self._operand(t) for t in inputs[:3])
        return apart(layer, inputs._replace(a=a, b=b, c=c))

    def probabilities(self, p: torch.Tensor) -> torch.Tensor:
        """P as FP8 holds it."""
        return self._rounded(p, self.weights, P).to(p.dtype)

    def output(self, out: torch.Tensor, asked: Any) -> Any:
        """The output as it was asked for: handed over in FP8, or plain."""
        rule = self.rule.output
        if self.emulated:
            return self._rounded(out, rule, OUT).to(self.dtype)
        if rule.scaling != "delayed":  # its scale follows from what it is in the activation dtype
            out = out.to(self.dtype)
            if not asked:
                return out
        values = self._rounded(out, rule, OUT)
        if asked is True:
            raise module_to_module()
        return Handed(values, self.dtype, rule.format) if asked else values.to(self.dtype)

    def _operand(self, t: torch.Tensor | Handed) -> torch.Tensor:
        rule = self.rule.qkv
        if self.emulated:
            return self._rounded(plain(t), rule, QKV).to(self.dtype)
        held = as_handed(t, rule.format)
        return self._rounded(plain(t), rule, QKV) if held is None else held

    def _rounded(self, t: torch.Tensor, rule: Operand, slot: tuple[int, int]) -> torch.Tensor:
        gemm, place = slot
        return quantized(t, rule, self.scales[FORWARD_SLOTS * gemm + place])


def rounding(module: Any, plan: Plan, like: torch.Tensor) -> Rounding:
    """How a call of a module rounds, by the precision of the region; `like` is what came first."""
    request = plan.request
    if request.fp8 == "custom":
        raise custom_recipe()
    options: dict[str, Any] = {"paged": request.paged, "bias_grad": request.bias_grad, "emulated": True}
    reason = fp8_refusal(request.spec, request.fp8, request.fp8_rows, **options)
    if reason is not None:
        do = "export with fp8_dpa=False and fp8_mha=False, or leave that out"
        raise not_exported(f"a call that runs nowhere ({reason[:-1]})", FP8_TAKES, do)
    if module._inspectors() is not None:
        raise inspected()
    _, number, state, _ = module._enter(like)
    precision = precision_of(number)
    assert precision is not None and precision.attention is not None and precision.input is not None
    # What computes an eager call on the example's sizes; an error with the reasons where nothing does.
    sizes = Sizes(*map(_of_example, request.sizes))
    eager = choose.choose(replace(request, sizes=sizes, bias_rows=_of_example(request.bias_rows)))
    emulated = eager == choose.UNFUSED
    return Rounding(precision.attention, precision.input, state.scale_fwd, emulated, plan.key.a.dtype)


def _of_example(n: Any) -> int:
    """A size, where an exporter keeps it open."""
    if isinstance(n, torch.SymInt):
        return n.node.hint or 1
    if isinstance(n, torch.Tensor):  # torch's older exporter warns: nothing in the file comes of it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return int(n)
    return n
