"""DotProductAttention in FP8: the precision that attention itself has in a region, and the call of the core's layer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from te_core import env as variables
from te_core.attention import Sizes
from te_core.dtypes import DType
from te_core.layers import attention_fp8 as core
from te_core.layers.attention import AttentionInputs, AttentionSaved
from te_core.layers.inspector import PLAIN_ATTENTION, offer
from te_core.ops import raw as ops
from te_core.precision import AttentionPrecision, History, Operand, Precision, the_one
from te_core.quantize.operands import dense
from te_core.quantize.state import BACKWARD_SLOTS, FORWARD_SLOTS, Scales, backward_cast, forward_cast
from te_core.quantized import Cast, QuantizedTensor
from te_core.recipe import DelayedScaling, Float8CurrentScaling, Format, MXFP8BlockScaling, Recipe, resolve
from te_core.runtime import Runtime
from te_core.tensor import META, Tensor
from te_torch.attention import choose, env, unfused
from te_torch.attention.plan import Plan
from te_torch.autocast import Now
from te_torch.base.watching import Choice
from te_torch.calls import Slots
from te_torch.carried import Carried, apart
from te_torch.function import Call, Layer, apply, key_of, register
from te_torch.precisions import number_of_precision, precision_of, recipe_of
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import TO_CORE, constant_at_trace, to_core, to_core_shape, to_torch

SLOTS = Slots(
    3,
    *(FORWARD_SLOTS * core.QKV[0] + core.QKV[1], BACKWARD_SLOTS * core.DQKV[0] + core.DQKV[1]),
    *(FORWARD_SLOTS * core.OUT[0] + core.OUT[1], BACKWARD_SLOTS * core.DOUT[0] + core.DOUT[1]),
)
ATTENTION = Layer("attention_fp8", core.forward, core.backward, AttentionSaved, slots=SLOTS)

_RECIPES = {kind.__name__: kind for kind in (DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling)}
_CALLS = 2048  # of a module, as its plans

# ----------------------------------------------------------------------------------------- the precision


def attention_number(number: int) -> int:
    """The number of attention's own precision in a region of this one; 0: high precision."""
    return _number_of(number, env.fp8_now())


@lru_cache(maxsize=256)
def _number_of(number: int, switches: env.Fp8Switches) -> int:
    base, recipe = precision_of(number), recipe_of(number)
    own = None if base is None else attention_precision(base, recipe, switches)
    return 0 if own is None else number_of_precision(the_one(own), recipe)


def scaling_of(number: int) -> str:
    """What attention scales q, k and v by in a region of this precision: "delayed", "current", ...; "": no FP8."""
    precision = precision_of(attention_number(number))
    return "" if precision is None or precision.attention is None else precision.attention.qkv.scaling


attention_number_at_trace, scaling_at_trace = constant_at_trace(attention_number), constant_at_trace(scaling_of)


def attention_precision(base: Precision, recipe: Recipe | None, switches: env.Fp8Switches) -> Precision | None:
    """The precision of a module that is attention, in a region of `base`; None where it runs in high precision.

    Its operands of GEMMs only say which formats the module's scales are for.
    """
    if base.input is not None and base.input.scaling == "calibrate":
        return None
    rule = base.attention
    if switches.recipe:
        rule = _from_environment(base, recipe, switches)
    elif rule is not None and rule.handed and recipe is not None and not getattr(recipe, "fp8_dpa", True):
        warnings.warn("fp8_mha=True implies fp8_dpa=True", stacklevel=2)
    if rule is None:
        return None
    if rule.qkv.scaling == "current":
        algo = variables.chosen("NVTE_DPA_FP8DS_AMAX_ALGO", switches.algo)
        history = History(switches.length, 0, algo, None, switches.reduce)
        rule = replace(rule, history=history, high_output=switches.high_output)
    if not switches.backward or base.backward is not None:
        rule = replace(rule, backward=False)
    return replace(
        base,
        input=Operand(rule.qkv.dtype, "delayed"),
        weight=None,
        grad=Operand(rule.grad.dtype, "delayed"),
        output=None,
        grad_input=None,
        history=rule.history,
        backward=None,
        factory=None,
        attention=rule,
    )


def _from_environment(base: Precision, recipe: Recipe | None, switches: env.Fp8Switches) -> AttentionPrecision | None:
    """What NVTE_DPA_FP8_RECIPE asks for. What the variables leave open is as the region's recipe has it."""
    if switches.recipe == "F16":
        return None
    kind = _RECIPES[variables.chosen("NVTE_DPA_FP8_RECIPE", switches.recipe)]
    given = base.attention
    dpa = given is not None if switches.dpa is None else switches.dpa
    mha = given is not None and given.handed if switches.mha is None else switches.mha
    own = getattr(recipe, "fp8_format", Format.HYBRID)
    per_tensor = recipe is not None and recipe.float8_per_tensor_scaling()
    form = own if per_tensor else Format.HYBRID
    if switches.format:
        form = Format[variables.chosen("NVTE_DPA_FP8_FORMAT", switches.format)]
    options: dict[str, Any] = {"fp8_format": form, "fp8_dpa": dpa, "fp8_mha": mha}
    if kind is DelayedScaling:
        options.update(
            amax_history_len=switches.length,
            reduce_amax=switches.reduce,
            amax_compute_algo=variables.chosen("NVTE_DPA_FP8DS_AMAX_ALGO", switches.algo),
        )
    elif kind is MXFP8BlockScaling:
        options["fp8_format"] = Format.E4M3
    rule = resolve(kind(**options)).attention
    if rule is not None and rule.qkv.scaling == "delayed" and base.history is not None:
        rule = replace(rule, history=base.history)
    return rule


def kept_high(module: Any, number: int) -> tuple[bool, bool]:
    """Whether features keep this module's forward in high precision, and its backward, in this region's precision."""
    choice = module.inspector
    if not isinstance(choice, Choice):
        return False, False
    choice.choose(module, attention_number(number))
    return choice.high


# ---------------------------------------------------------------------------------------------- the call


def run(module: Any, plan: Plan, inputs: AttentionInputs, asked: tuple[bool, bool], now: Now | None) -> torch.Tensor:
    """out [.., heads * d_v]. `asked`: whether it is quantized, and whether backward is in the activation dtype."""
    a = inputs.a
    fp8_output, high_backward = asked
    _, number, state, recompute = module._enter(a, now)
    watched = None if module.inspector is None else module._watched(number)
    emulated = plan.backend == choose.UNFUSED
    key = (plan, number, a.dtype, isinstance(a, QuantizedTorch), fp8_output, high_backward, watched)
    call = module._calls.get(key)
    if call is None:
        if len(module._calls) >= _CALLS:
            module._calls.clear()
        if emulated:
            seen = None if watched is None else module._inspectors()
            call = _roundings(number, a.dtype, high_backward, core.names_of(plan.layer.packing), seen)
        else:
            lookers = None if watched is None else module._inspectors()
            for _, tensor in sorted(getattr(lookers[0], "changes", ())) if lookers else ():
                raise core.unchangeable(tensor)  # an inspector that will exchange a tensor
            call = _call(*key[:-1], inspectors=lookers, comm=module._communicators(number))
        module._calls[key] = call
    if emulated:
        module.__dict__["_last_rule"] = call.rule  # Module.__setattr__ would cost a microsecond
        return emulate(plan, call, inputs, (state, recompute))
    module.__dict__["_last_rule"] = call.spec.precision
    dims = len(plan.spec.q_format) - 2, len(plan.spec.kv_format) - 2
    return run_call(call, state, recompute, inputs, dims)


def run_call(call: Any, state: Any, recompute: bool, inputs: AttentionInputs, dims: tuple[int, int]) -> torch.Tensor:
    """The same for a call, or under tracing for its key. `dims`: of q, and of k and v, before the heads."""
    # Packed queries may go with a cache in rows.
    of_q, of_kv = dims
    a, b, c = _in_rows(inputs.a, of_q), _in_rows(inputs.b, of_kv), _in_rows(inputs.c, of_kv)
    frames = _frame(a, of_q), _frame(b, of_kv)
    (out,) = apply(call, state, recompute, *inputs._replace(a=a, b=b, c=c), *frames)
    return out


def _in_rows(t: torch.Tensor | None, n: int) -> Any:
    return None if t is None else t.reshape(*t.shape[:n], prod(t.shape[n:])) if t.ndim > n + 1 else t


def _frame(t: torch.Tensor | None, n: int) -> torch.Tensor | None:
    return None if t is None else torch.empty((*t.shape[:n], 0), dtype=torch.uint8, device=t.device)


def traced_call(module: Any, plan: Plan, number: int, asked: tuple[bool, bool, bool]) -> Call:
    """The call of a plan in a region of this precision, for traced code.

    `asked`: whether q came quantized, the output is quantized, and backward is in the activation dtype.
    """
    own, inspectors = attention_number(number), module._inspectors()
    if inspectors is not None:
        module._requests()  # an inspector that looks at no traces says so here
    call = _call(plan, own, plan.key.a.dtype, *asked, inspectors)
    module.__dict__["_last_rule"] = call.spec.precision
    return call


def _call(
    plan: Plan,
    number: int,
    dtype: torch.dtype,
    handed: bool,
    fp8_output: bool,
    high_backward: bool,
    inspectors: tuple[Any, ...] | None = None,
    comm: Any = None,
) -> Call:
    precision = precision_of(number)
    assert precision is not None and precision.attention is not None
    rule = replace(precision.attention, backward=False) if high_backward else precision.attention
    spec = core.AttentionFp8Spec(plan.layer, rule, TO_CORE[dtype], fp8_output, quantize_grad=handed)
    return register(ATTENTION, spec, any(plan.layer.needs), inspectors, comm)


# ------------------------------------------------------------------------------------------- the emulation
# UnfusedDotProductAttention on values as FP8 holds them, in the slots of FP8 attention; the result is plain. Each
# tensor goes through a layer of its own that rounds it and its gradient, in eager code and in traced code.


@dataclass(frozen=True)
class RoundingSpec:
    """What a rounding to FP8 depends on: rule and place in the state of each direction; None: nothing is rounded."""

    dtype: DType
    rule: Operand | None
    slot: tuple[int, int]
    grad_rule: Operand | None
    grad_slot: tuple[int, int]
    name: str = ""  # of the tensor, for an inspector


def _round(
    rt: Runtime, t: Tensor, *, spec: RoundingSpec, scales: Scales | None = None, inspectors: Any = (None,)
) -> Any:
    if spec.rule is None:
        return (_copied(rt, t),), ()
    cast = forward_cast(spec.rule, scales, *spec.slot, rowwise=True, columnwise=False)
    return (_through(rt, t, spec, cast, ("fprop", spec.name), inspectors[0]),), ()


def _round_gradient(
    rt: Runtime, dy: Any, saved: Any, *, spec: RoundingSpec, scales: Scales | None = None, inspectors: Any = (None,)
) -> Any:
    if isinstance(dy, QuantizedTensor):
        return (ops.dequantize(rt, dy, spec.dtype),)
    if spec.grad_rule is None:
        return (dy,)
    gemm, slot = spec.grad_slot
    cast = backward_cast(spec.grad_rule, scales, gemm, rowwise=True, columnwise=False, slot=slot)
    return (_through(rt, dy, spec, cast, ("dgrad", _GRADIENTS[spec.grad_slot]), inspectors[0]),)


def _through(rt: Runtime, t: Tensor, spec: RoundingSpec, cast: Cast, point: tuple[str, str], seen: Any) -> Tensor:
    """What a cast leaves of a tensor, which is shown to an inspector that wants to see it."""
    x = t.matrix()
    plain = seen is not None and PLAIN_ATTENTION[point[0]] in seen.request
    left = offer(rt, seen, point, x, cast, None if plain else ops.quantize(rt, x, cast))
    return _copied(rt, t) if left is x else dense(rt, left, spec.dtype).reshape(*t.shape)


def _copied(rt: Runtime, t: Tensor) -> Tensor:
    """What an operator returns is no argument of it."""
    made = to_torch(t).clone()
    return to_core_shape(made) if rt.device is META else to_core(made)


ROUNDING = Layer("fp8_rounding", _round, _round_gradient, lambda: ())
_NOWHERE = (0, 0)
_GRADIENTS = {core.DQKV: "dqkv", core.DOUT: "do", core.DP: "dp"}


class Roundings(NamedTuple):
    """The calls that round q, k and v, as they are packed, the scores' gradient, P, and the output; or their keys."""

    operands: Sequence[Any]
    scores: Any
    weights: Any  # P
    out: Any
    rule: AttentionPrecision | None = None  # that of the calls


def _roundings(
    number: int,
    dtype: torch.dtype,
    high_backward: bool,
    names: Sequence[str],
    inspectors: tuple[Any, ...] | None = None,
    came: bool = False,
) -> Roundings:
    """Those in this precision. `names`: of q, k and v; `came`: the output's gradient was quantized."""
    precision = precision_of(number)
    assert precision is not None and precision.attention is not None
    rule = replace(precision.attention, backward=precision.attention.backward and not high_backward)
    back, core_type = rule.backward, TO_CORE[dtype]
    of_q = (core_type, rule.qkv, core.QKV, rule.grad_input if back else None, core.DQKV)
    calls = [
        register(ROUNDING, RoundingSpec(*spec), True, inspectors)
        for spec in (
            *[(*of_q, name) for name in names],
            (core_type, None, _NOWHERE, precision.grad if back else None, core.DP, "s"),
            (core_type, precision.input, core.P, None, _NOWHERE, "s"),
            (core_type, rule.output, core.OUT, rule.grad if back and not came else None, core.DOUT, "o"),
        )
    ]
    *operands, scores, weights, out = calls
    return Roundings(operands, scores, weights, out, rule)


@constant_at_trace
def emulation(
    number: int, packing: str, output: Any, high_backward: bool, dtype: torch.dtype
) -> tuple[tuple[str, ...], str, str, str]:
    """The keys of those in this region, for traced code."""
    came = isinstance(output, str) and apart(output)[2] != ""
    made = _roundings(attention_number(number), dtype, high_backward, core.names_of(packing), came=came)
    return tuple([key_of(call) for call in made.operands]), key_of(made.scores), key_of(made.weights), key_of(made.out)


def emulate(
    plan: Plan, roundings: Roundings, inputs: AttentionInputs, run: tuple[Any, bool], sizes: Sizes | None = None
) -> torch.Tensor:
    """The output. `run`: the state, and whether this is a recomputation; `sizes`: the inputs' in traced code."""

    def low(which: str, t: torch.Tensor) -> torch.Tensor:
        return apply(getattr(roundings, which), *run, t)[0]

    of_tensors = zip(roundings.operands, inputs[:3], strict=False)
    given: list[Any] = [apply(rounding, *run, _plain(t))[0] for rounding, t in of_tensors]
    a, b, c = given + [None] * (3 - len(given))
    out, _ = unfused.run(plan, inputs._replace(a=a, b=b, c=c), low, sizes=sizes)
    return low("out", out)


def _plain(t: Any) -> torch.Tensor:
    return t.values() if isinstance(t, Carried) else t.dequantize() if isinstance(t, QuantizedTorch) else t
