"""What the parts of a `MultiheadAttention` give one another in FP8: by precision, and for whom scales are kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_core.quantize.state import GRAD_INPUT, GRAD_OUTPUT, INPUT, OUTPUT
from te_torch.attention import env
from te_torch.attention.fp8 import SLOTS, attention_number
from te_torch.carried import form_name, handing
from te_torch.export.mode import exporting
from te_torch.handovers import begin_as
from te_torch.modules.layernorm_linear import LayerNormLinear
from te_torch.modules.linear import Linear
from te_torch.precisions import is_custom, precision_of
from te_torch.runtime import constant_at_trace
from te_torch.state import BACKWARD, FORWARD

PROJECTIONS = ("proj", "qkv", "layernorm_qkv", "key_value", "query_layer", "layernorm_query")


class HandOver(NamedTuple):
    """What goes between the parts of the module in FP8."""

    qkv: Any = False  # the projection, to the attention; in traced code what its call is told (te_torch.carried)
    out: Any = False  # the attention's output, to the last projection; likewise
    grad: bool = False  # and its gradient back


def handed_in(number: int, between: bool) -> tuple[bool, bool, bool]:
    """`HandOver` in the precision of this number; `between`: something is done to queries or keys in between."""
    precision = precision_of(attention_number(number))
    rule = None if precision is None else precision.attention
    if rule is None or rule.qkv.scaling not in ("delayed", "current", "custom"):
        return False, False, False
    kind, own = rule.qkv.scaling, getattr(precision_of(number), "input", None)  # that of the projections
    delayed = own is not None and own.scaling == "delayed"
    if kind != "custom" and delayed is not (kind == "delayed"):
        # The environment gives attention a recipe of its own. A module with a history needs the maxima of what it
        # takes, and only delayed scaling notes them.
        return False, not delayed, False
    out = rule.handed or kind != "custom"
    return rule.handed and not between and kind != "current", out, out and kind != "current"


@constant_at_trace
def handed_at_trace(number: int, between: bool, of_self: bool) -> tuple[Any, Any, bool]:
    """The same for traced code: in place of True, what a call is told. `of_self`: q, k and v are one tensor."""
    base, own = precision_of(number), precision_of(attention_number(number))
    qkv, out, grad = handed_in(number, between)
    if base is None or own is None or own.attention is None or is_custom(number):
        return False, False, False
    rule, given, of_q = own.attention, "", ""
    if grad and base.grad_input is not None:
        given = form_name(base.grad_input.format)
    # The emulation gives plain gradients, and whether it runs is known too late.
    if of_self and rule.backward and not env.now().emulate_fp8 and rule.grad_input.scaling == "delayed":
        of_q = form_name(rule.grad_input.format)
    told = handing(form_name(base.output.format), of_q) if qkv and base.output is not None else False
    return told, handing(form_name(rule.output.format), given) if out else False, grad


def begin_alike(block: torch.nn.Module, _keys: Any) -> None:
    """After a load: scales of what an older checkpoint saw in the part alone that handed it over, in both parts."""
    states = {name: getattr(block._modules.get(name), "fp8_state", None) for name in ("core_attention", *PROJECTIONS)}
    core, proj = states.pop("core_attention"), states.pop("proj")
    if core is not None and proj is not None:
        begin_as(core, SLOTS.output, proj, INPUT, FORWARD)
        begin_as(proj, GRAD_INPUT, core, SLOTS.grad_output, BACKWARD)
    for state in states.values():
        if core is not None and state is not None:
            begin_as(state, OUTPUT, core, SLOTS.input, FORWARD)
            begin_as(core, SLOTS.grad_input, state, GRAD_OUTPUT, BACKWARD)


def is_plainly_called(module: torch.nn.Module | None) -> bool:
    """Whether a projection is one of ours, and nobody else sees what goes in or comes out."""
    if module is None:
        return True
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return (is_a(module, Linear) or is_a(module, LayerNormLinear)) and not hooks


def is_a(module: torch.nn.Module, kind: type[torch.nn.Module]) -> bool:
    """Whether it is one of ours. An exporter's stand-in for a module that stands in two places is, too."""
    return type(module) is kind or (exporting.on and type(module).forward is kind.forward)
