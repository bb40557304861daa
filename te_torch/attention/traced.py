"""Attention under a tracing compiler: one program for all lengths and batches that the compiler lets vary.

A plan is made at trace time, of constants. What it asks of sizes is which of them are equal, and which backends take
them. So traced code compares the sizes that have to be equal, on which the compiler guards, and gives the plan numbers
in the place of the sizes that vary (`standing_in`).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from te_core.attention import DIMENSIONS, Sizes
from te_core.errors import UnsupportedError
from te_torch.attention import choose, exported, fused, unfused
from te_torch.attention import fp8 as fp8_attention
from te_torch.attention.compact import in_front, returned, sums_of
from te_torch.attention.inputs import Given, check_types, layer_inputs, new_slopes
from te_torch.attention.plan import Fact, Key, Preparation, broadcasts, sizes_of
from te_torch.autocast import active
from te_torch.carried import Carried, carry
from te_torch.doors import never_traced
from te_torch.export.mode import exporting
from te_torch.function import key_of
from te_torch.likeness import alike
from te_torch.precisions import precision_of
from te_torch.runtime import constant_at_trace

#: The region's precision; whether q is quantized; how the output is to be (te_torch.carried; True: by the user);
#: whether backward is in the activation dtype.
Asked = tuple[int, bool, Any, bool]


def attention(module: Any, given: Given) -> Any:
    """What DotProductAttention gives: its backend as an operator, or in torch's operators. Some run eagerly."""
    region = active.region
    number = 0 if region is None else region.precision
    scaling = "" if region is None else fp8_attention.scaling_at_trace(number)
    try:
        key = module._key(given, scaling)
    except AttributeError:
        check_types(given)
        raise
    if exporting.on:
        return exported.attention(module, key, given)
    if scaling and module.inspector is not None:
        module._watched(number)
    asked: Asked = number, isinstance(given.a, Carried), given.fp8_output or "", given.bf16_backward
    facts = module._kind, module._facts()
    if not _is_formed(key):
        _trace_plan(*facts, tuple(key), asked)  # it complains
    sizes = sizes_of(module._static, key)
    backend, name, *how = _trace_plan(*facts, tuple(standing_in(key, sizes)), asked)
    if not backend:
        if isinstance(given.a, Carried):
            a, b = given.a.values(), given.b.values() if isinstance(given.b, Carried) else given.b
            given = given.but(a=a, b=b)
        return _eager_run(module, key, given)
    key, given, orders = in_front(key, given, how[0], traced=True)
    if orders is not None:
        backend, name, *how = _trace_plan(*facts, tuple(standing_in(key, sizes)), asked)
    inputs = layer_inputs(module, given, _of_sizes(how, sizes), sums_of(orders), new_slopes)
    if key.fp8:
        _, _, state, recompute = module._enter(inputs.a)
        if backend == choose.UNFUSED:
            keys = fp8_attention.emulation(number, key.packing, *asked[2:], key.a.dtype)
            plan, roundings = getattr(_programs, name), fp8_attention.Roundings(*keys)
            out = fp8_attention.emulate(plan, roundings, inputs, (state, recompute), sizes)
            return returned(out, None, orders)
        forms = len(key.form) - 2, len(key.kv_form) - 2
        out = fp8_attention.run_call(name, state, recompute, inputs, forms)
        if isinstance(asked[2], str) and asked[2]:
            assert state is not None  # FP8 attention keeps one, whatever its recipe
            return carry(out, asked[2], (state.state, fp8_attention.SLOTS.output, fp8_attention.SLOTS.grad_output))
        return returned(out, None, orders)
    if backend == choose.UNFUSED:
        return returned(*unfused.run(getattr(_programs, name), inputs, sizes=sizes), orders)
    return returned(*fused.run_call(name, key.packing, inputs), orders)


def _of_sizes(how: Any, sizes: Sizes) -> Preparation:
    """A plan's preparation, for these sizes."""
    lengths, keys, rows, bias, draws = how
    return Preparation(lengths, sizes.skv if keys else 0, sizes.sq if rows else 0, bias, draws)


# --------------------------------------------------------------------------------------------- sizes that vary

#: In the place of sizes that vary. A backend that takes these takes all: some ask for lengths that are multiples of
#: 128, or for a key to each query. Speeds are looked up as for a middle length.
_BATCH, _QUERIES, _KEYS = 3, 1000, 500


def standing_in(key: Key, sizes: Sizes) -> Key:
    """The key with numbers in the place of sizes that vary; as it is where sizes that have to agree do not.

    To be traced: what it compares are guards of the program.
    """
    if key.cached or not _agree(key, sizes):
        return key
    batch = _number(sizes.batch, _BATCH)
    if key.form == "thd":
        if key.bias is not None:
            return key
        q, kv = _power_above(key.max_q), _power_above(key.max_kv)
    else:
        q, kv = _number(sizes.sq, _QUERIES), _number(sizes.skv, _KEYS)
        if "causal" in key.mask_type or key.window is not None or _mask_is_read(key):
            kv = q if sizes.sq == sizes.skv else kv if q != kv else kv + 1
    whole = (batch, sizes.heads, q, kv)
    mask, bias, cu, slopes = key.mask, key.bias, key.cu, key.slopes
    if mask is not None:
        if _is_pair(mask):
            mask = tuple([_spread(m, (batch, 1, 1, n)) for m, n in zip(mask, (q, kv), strict=True)])
        else:
            mask = _spread(mask, whole)
    return key._replace(
        a=_standing(key.a, key.form, batch, q),
        b=None if key.b is None else _standing(key.b, key.kv_form, batch, kv),
        c=None if key.c is None else _standing(key.c, key.kv_form, batch, kv),
        bias=None if bias is None else bias._replace(shape=_spread(bias.shape, whole)),
        slopes=slopes if slopes is None or len(slopes) != 2 else (batch, slopes[1]),
        mask=mask,
        cu=None if cu is None else cu._replace(entries=batch + 1),
        max_q=q,
        max_kv=kv,
    )


def _number(n: int, instead: int) -> int:
    """The size, or what stands in its place if it varies."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return n if has_static_value(n) else instead


def _power_above(n: int) -> int:
    """The longest of packed sequences, as the plan has it: one program serves all up to a power of two."""
    if _number(n, -1) >= 0:
        return n
    most = 64
    while most < n:
        most *= 2
    return most


def _standing(fact: Fact, form: str, batch: int, tokens: int) -> Fact:
    lead = {"thd": (_number(fact.shape[0], _QUERIES),), "sbhd": (tokens, batch), "bshd": (batch, tokens)}[form]
    return fact._replace(shape=(*lead, *fact.shape[len(lead) :]))


def _spread(shape: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what broadcasts to the whole."""
    return tuple([_number(n, full) for n, full in zip(shape, whole[len(whole) - len(shape) :], strict=True)])


def _mask_is_read(key: Key) -> bool:
    if key.mask is None or _is_pair(key.mask):
        return False
    return key.mask_type == "arbitrary" or ("padding" in key.mask_type and key.cu is None)


def _is_formed(key: Key) -> bool:
    """Whether it says sizes at all."""
    if key.form not in DIMENSIONS or (key.form == "thd" and key.cu is None):
        return False
    fewest = len(key.form) - 1  # of dimensions: packed heads may be a row
    return len(key.a.shape) >= fewest and (key.b is None or len(key.b.shape) >= len(key.kv_form) - 1)


def _agree(key: Key, sizes: Sizes) -> bool:
    """Whether all tensors are of these sizes."""
    whole = (sizes.batch, sizes.heads, sizes.sq, sizes.skv)
    place = DIMENSIONS[key.kv_form][0]
    if key.b is not None and key.c is not None and not _are_equal(key.b.shape[:-1], key.c.shape[:-1]):
        return False
    if key.b is not None and place is not None and key.b.shape[place] != sizes.batch:
        return False
    if key.cu is not None and key.cu.entries != sizes.batch + 1:
        return False
    if key.slopes is not None and len(key.slopes) == 2 and key.slopes[0] != sizes.batch:
        return False
    if key.bias is not None and not broadcasts(key.bias.shape, whole):
        return False
    if key.mask is None:
        return True
    if _is_pair(key.mask):
        q, kv = key.mask
        return broadcasts(q, (sizes.batch, 1, 1, sizes.sq)) and broadcasts(kv, (sizes.batch, 1, 1, sizes.skv))
    if "padding" in key.mask_type and key.cu is None and sizes.sq != sizes.skv:
        return False
    return broadcasts(key.mask, whole)


def _is_pair(mask: tuple[Any, ...]) -> bool:
    """Whether it is the shapes of two masks, of queries and of keys."""
    return len(mask) == 2 and isinstance(mask[0], tuple)


def _are_equal(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return len(a) == len(b) and all([m == n for m, n in zip(a, b, strict=True)])


# ------------------------------------------------------------------------------------------------- at trace time


@never_traced("this backend runs eagerly")
def _eager_run(module: Any, key: Key, given: Given) -> Any:
    return module._run(key, given)


class _Programs:
    """The plans of traced code, each an attribute: a compiler guards on one without looking at the others."""


_programs = _Programs()
_names = itertools.count(1)


@constant_at_trace
def _trace_plan(kind: int, facts: tuple[Any, ...], key: tuple[Any, ...], asked: Asked) -> tuple[Any, ...]:
    """(the backend, "" where it runs eagerly; the call's or plan's name; the fields of its Preparation)."""
    modules = alike(kind, facts)
    plan = modules[0]._choice(Key.of(key))
    for module in modules[1:]:
        module._last_plan = module._last_plan or plan
    eager = (plan.key.checkpoint and plan.backend != choose.FUSED) or plan.key.score_mod or plan.layer.context
    if plan.key.fp8 and plan.backend == choose.UNFUSED and modules[0]._inspectors() is not None:
        eager = True  # a traced rounding shows nothing to an inspector
    if plan.backend == choose.UNFUSED and not eager:
        if plan.key.fp8:
            own = precision_of(fp8_attention.attention_number(asked[0]))
            modules[0].__dict__["_last_rule"] = own and own.attention
        if not plan.program:  # one name for good: to a compiler that traces a call again another would be another plan
            plan.program = f"plan_{next(_names)}"
            setattr(_programs, plan.program, plan)
        return (plan.backend, plan.program, *plan.prepare)
    number, handed, output, high_backward = asked
    if plan.backend != choose.FUSED or eager:
        if torch.compiler.is_exporting() and (plan.key.fp8 or plan.backend == choose.FUSED):
            raise UnsupportedError(
                "torch.export",
                f"attention that {plan.backend} computes outside of compiled graphs",
                "attention without score_mod, checkpoint_core_attention and an inspector",
                "export without them",
            )
        return ("", "")
    if not plan.key.fp8:
        return (plan.backend, key_of(plan.call), *plan.prepare)
    call = fp8_attention.traced_call(modules[0], plan, number, (handed, bool(output), high_backward))
    return (plan.backend, key_of(call) + (output if isinstance(output, str) else ""), *plan.prepare)
