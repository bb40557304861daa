"""A layer of the core as tracing compilers see it: two opaque operators, `te_runtime::forward` and
`te_runtime::backward`.

Their shapes are found by running the very same functions on the meta backend. They are functional: maxima for delayed
scaling come back as an output and are merged into the history by traced code, so that a compiler knows every mutation.
What they run is named by its spec, and a state is known by its tensors: modules that are alike share a program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from te_core import dtypes
from te_core.errors import UnsupportedError
from te_core.quantize.state import Scales
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_torch import handovers, updates
from te_torch import state as scaling
from te_torch.calls import call_of, complete
from te_torch.carried import (
    Carried,
    apart,
    closed,
    column_of_gradient,
    inputs_carried,
    opened,
    plain_or_closed,
    saved_carried,
)
from te_torch.carried import parsed as parsed_carried
from te_torch.compiled_runs import Traced, note_run, scale_to_read
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import constant_at_trace, runtime_for, shape_runtime, to_core, to_core_shape, to_torch
from te_torch.tensors.dispatch import keeps
from te_torch.tensors.tracing import core_from_inner
from te_torch.weight_copies import Copies, for_backward, held_in, made_of, own_and_given, parsed, ready_for

_library = torch.library.Library("te_runtime", "FRAGMENT")
_library.define(
    'forward(Tensor?[] inputs, Tensor? scale, Tensor? scale_bwd, str key, str rule, str held="", str copies="", '
    'str carried="") -> Tensor[]'
)
_library.define(
    'backward(Tensor?[] grads, Tensor?[] saved, Tensor? scale, str key, str held="", str copies="", str carried="", '
    'str kept="") -> Tensor[]'
)


def _forward_op(
    inputs: list[torch.Tensor | None],
    scale: torch.Tensor | None,
    scale_bwd: torch.Tensor | None,
    key: str,
    rule: str,
    held: str = "",
    copies: str = "",
    carried: str = "",
    fake: bool = False,
) -> list[torch.Tensor]:
    """Outputs, then what is saved and is no input, copies of weights that are kept, and the maxima.

    `scale_bwd` tells whose state it is, `copies` what comes behind the layer's inputs (te_torch.weight_copies), and
    `carried` which inputs are quantized tensors (te_torch.carried).
    """
    name, form, _ = apart(key)
    call = call_of(name)
    first = inputs[0]
    assert first is not None
    rt, convert = world(first, fake)
    views = core_views(inputs, held, convert, carried)
    if not fake:
        note_run(call, views, scale_bwd, rule)
    maxima = new_maxima(rt, scale)
    scales = None
    if scale is not None and maxima is not None:
        scales = Scales(convert(scale), maxima, maxima, None)
    own, options = views, call.options
    kept: list[torch.Tensor] = []
    if copies:
        own, ready, kept = ready_for(rt, call, copies, views, scales, check=not fake)
        options = {**options, "ready": ready}
    outputs, saved = call.forward.taped(rt, *own, scales=scales, **options)
    if type(outputs[0]) is QuantizedTensor:
        given = _closed_output(outputs[0], first, form, fake), *map(to_torch, outputs[1:])
    else:
        given = tuple(map(to_torch, outputs))
        if carried and 0 in parsed_carried(carried):
            given = tuple([_in_rows_of(first, t) for t in given])
    origins = None if fake else call.origins.get((key, copies, carried))
    if origins is None:
        known = {id(t.owner): i for i, t in enumerate(views) if t is not None}
        known |= {id(t): -2 - i for i, t in enumerate((*[y.owner for y in outputs], *kept))}
        origins = call.origins[key, copies, carried] = tuple(
            [None if t is None else known.get(id(t.owner), -1) for t in saved]
        )
    made = [to_torch(t) for t, origin in zip(saved, origins, strict=True) if origin == -1]
    if carried and not fake:  # what an operator returns is in none of its inputs, where a carried one lies
        taken = {t.untyped_storage()._cdata for t in inputs if t is not None}
        made = [t.clone() if t.untyped_storage()._cdata in taken else t for t in made]
    results = [*given, *made, *kept]
    return results if maxima is None else [*results, to_torch(maxima)]


def _closed_output(out: QuantizedTensor, first: torch.Tensor, form: str, fake: bool) -> torch.Tensor:
    """A quantized output as it goes to the next operator."""
    if not form:
        raise UnsupportedError(
            "torch.compile",
            "fp8_output=True in a module that is compiled by itself",
            "fp8_output inside a compiled MultiheadAttention or TransformerLayer",
            "leave fp8_output out, or do not compile this module",
        )
    return closed(out, (*first.shape[:-1], out.shape[1]), first.dtype, form, fake)


def _in_rows_of(first: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """What a layer made of a quantized tensor, which to the core is a matrix, with the leading dimensions of that."""
    return t.view(*first.shape[:-1], t.shape[1]) if t.ndim == 2 else t


def _backward_op(
    grads: list[torch.Tensor | None],
    saved: list[torch.Tensor | None],
    scale: torch.Tensor | None,
    key: str,
    held: str = "",
    copies: str = "",
    carried: str = "",
    saved_ones: str = "",
    fake: bool = False,
) -> list[torch.Tensor]:
    """The input gradients that are given, then the maxima. `scale` is the state's own tensor.

    `carried` says which inputs were quantized tensors, and what their gradients have to be; `saved_ones` which of the
    saved.
    """
    name, _, grad_form = apart(key)
    call = call_of(name)
    blocks: list[Any] = []
    if copies:
        count = len(saved) - parsed(copies).tensors
        saved, blocks = saved[:count], saved[count:]
    # Only the shape of a weight is asked for, which may be held quantized.
    given = complete(call.layer, grads, saved if grads[0] is not None else core_views(saved, held, to_core_shape))
    rt, convert = world(next(g for g in given if g is not None), fake)
    maxima = new_maxima(rt, scale)
    scales = None
    if scale is not None and maxima is not None:
        scales = Scales(maxima, None, convert(scale), maxima)
    views: list[Any] = [None if g is None else convert(g.contiguous()) for g in given]
    if grad_form:
        views[0] = opened(given[0], grad_form, convert is to_core_shape)
    kept = call.layer.saved(*core_views(saved, held, convert, saved_ones))
    options = call.options
    if copies:
        options = {**options, "ready": held_in(call, parsed(copies), [convert(t) for t in blocks], (kept.w1, kept.w2))}
    results = call.backward.taped(rt, *views, kept, scales=scales, **options)
    call.gives = tuple(t is not None for t in results)
    if scale is not None and not fake and (state := scaling.of_tensor(scale)) is not None:
        updates.ran_backward(state)
    taken = {id(v.owner) for v in views if v is not None}
    if carried or any(type(t) is QuantizedTensor for t in results):
        results = _gradients_to_carry(rt, results, given[0], carried, fake)
    made = []
    for t in results:  # none may be an argument of the operator, or another result
        if t is not None:
            made.append(to_torch(t).clone() if id(t.owner) in taken else to_torch(t))
            taken.add(id(t.owner))
    if grad_form and results[0] is not None:
        made[0] = _in_rows_of(given[0], made[0])
    return made if maxima is None else [*made, to_torch(maxima)]


def _gradients_to_carry(
    rt: Runtime, results: Sequence[Any], dy: torch.Tensor, carried: str, fake: bool
) -> list[Tensor | None]:
    """The gradients, those of carried inputs as was agreed on, and all others plain."""
    forms, found = parsed_carried(carried), []
    for i, t in enumerate(results):
        if t is not None and (type(t) is QuantizedTensor or i in forms):
            shape = (*dy.shape[:-1], t.shape[-1])
            made = plain_or_closed(rt, t, forms.get(i, ("", ""))[1], shape, dy.dtype, fake)
            t = to_core_shape(made) if fake or made.is_meta else to_core(made)
        found.append(t)
    return found


def world(t: torch.Tensor, fake: bool) -> tuple[Runtime, Callable[[torch.Tensor], Tensor]]:
    """The runtime of an operator, and what makes core views for it."""
    if fake or t.is_meta:
        return shape_runtime(t.device), to_core_shape
    rt = runtime_for(t)
    # On a stream of its own a compiler runs once, eagerly, what it captures next: memory that stays is a leak to it.
    return (rt.fresh() if rt.stream else rt).apart(), to_core


def new_maxima(rt: Runtime, scale: torch.Tensor | None) -> Tensor | None:
    """Memory for the maxima of a run."""
    return None if scale is None else rt.zeros((scale.shape[0],), dtypes.float32)


_library.impl("forward", _forward_op, "CompositeExplicitAutograd")
_library.impl("backward", _backward_op, "CompositeExplicitAutograd")
torch.library.register_fake("te_runtime::forward", partial(_forward_op, fake=True), lib=_library)
torch.library.register_fake("te_runtime::backward", partial(_backward_op, fake=True), lib=_library)


# --------------------------------------------------------------------------------- weights that are held quantized


def core_views(
    tensors: Sequence[torch.Tensor | None], held: str, convert: Callable[..., Tensor], carried: str = ""
) -> list[Any]:
    """Core views of an operator's tensors.

    `held` says which are the buffers of quantized ones, `carried` in which of them quantized ones lie.
    """
    forms, fake = parsed_carried(carried) if carried else {}, convert is to_core_shape

    def view(i: int, t: torch.Tensor | None) -> Any:
        if t is None:
            return None
        return opened(t, forms[i][0], fake) if i in forms else convert(t.contiguous())

    if not held:
        return [view(i, t) for i, t in enumerate(tensors)]
    given, views = iter(tensors), []
    for i, meta in enumerate(_parsed(held)):
        if meta is None:
            views.append(view(i, next(given)))
        else:
            inner: Any = [next(given) for _ in range(sum(meta[2]))]
            q = core_from_inner(meta, inner, shapes_only=fake)
            q.owner = _Held()
            views.append(q)
    return views


class _Held:
    """In the place of the tensor that a quantized one is to the core."""


@lru_cache(maxsize=1024)
def _parsed(held: str) -> list[Any]:
    return [None if m is None else (tuple(m[0]), tuple(m[1]), tuple(m[2])) for m in json.loads(held)]


def flattened(tensors: Sequence[Any], allowed: Sequence[int] | None) -> tuple[list[torch.Tensor | None], str]:
    """(the tensors with the buffers of quantized ones in their places, where these are)."""
    flat: list[torch.Tensor | None] = []
    metas: list[Any] = []
    for i, t in enumerate(tensors):
        meta: Any = t.inner_meta() if isinstance(t, QuantizedTorch) else None  # type: ignore[attr-defined]
        if meta is not None and (meta[0] in ("hybrid", "identity") or (allowed is not None and i not in allowed)):
            t, meta = t._dense_values(t.dtype), None
        metas.append(meta)
        flat += [t] if meta is None else t.flatten_inner()
    return flat, json.dumps(metas) if any(metas) else ""


@keeps(torch.ops.te_runtime.forward.default)
def _forward_of_held(func: Any, inputs: Sequence[Any], scale: Any, scale_bwd: Any, key: str, *others: Any) -> Any:
    flat, held = flattened(inputs, call_of(apart(key)[0]).layer.weights)
    return func(flat, scale, scale_bwd, key, others[0], held, *others[2:])


@keeps(torch.ops.te_runtime.backward.default)
def _backward_of_held(func: Any, grads: Any, saved: Sequence[Any], scale: Any, key: str, *others: Any) -> Any:
    flat, held = flattened(saved, None)
    dense = [g._dense_values(g.dtype) if isinstance(g, QuantizedTorch) else g for g in grads]
    return func(dense, flat, scale, key, held, *others[1:])


@constant_at_trace
def _of_forward(key: str, copies: str, carried: str) -> tuple[tuple[int | None, ...], bool, int | None]:
    """Where each saved tensor comes from, whether backward reads quantized weights besides what is saved, and how many
    outputs are differentiable (None: all)."""
    call = call_of(apart(key)[0])
    reads = call.layer.recomputes and call.spec.checkpoint
    return call.origins[key, copies, carried], reads, call.layer.differentiable


@constant_at_trace
def _gives(key: str) -> tuple[bool, ...]:
    return call_of(apart(key)[0]).gives


def each_once(tensors: Sequence[Any]) -> list[Any]:
    """The tensors, with a view for one that comes again: a compiler takes no function of autograd with one twice."""
    found: list[Any] = []
    for t in tensors:
        again = isinstance(t, torch.Tensor) and any([t is other for other in found])
        found.append(t.view_as(t) if again else t)
    return found


def apply_traced(
    key: str, given: Traced | None, recompute: bool, inputs: Sequence[Any], copies: Copies | None = None
) -> tuple[torch.Tensor, ...]:
    """The layer's outputs, as traced code computes them. An input may be `Carried`."""
    text, more = ("", []) if copies is None else (copies.text, copies.tensors)
    carried, givers = "", [t for t in inputs if isinstance(t, Carried)]
    if givers:
        carried = inputs_carried(tuple([t.text() if isinstance(t, Carried) else "" for t in inputs]))
        inputs = [t.t if isinstance(t, Carried) else t for t in inputs]
    inputs = each_once(inputs)
    if given is None:
        outputs = list(_Traced.apply(key, "", text, carried, None, None, None, *inputs, *more, None))
    else:
        state, (scale, rule) = given.state, scale_to_read(given, recompute)
        # The history that sees the maximum, too, of the one gradient that goes back quantized.
        told = [t.giver[0].amax_history_bwd for t in givers if t.grad and t.giver[0] is not None] or [None]
        *outputs, maxima = _Traced.apply(
            key, rule, text, carried, scale, state.scale_bwd, state.amax_history_bwd, *inputs, *more, told[0]
        )
        if not recompute:
            merge(state.amax_history_fwd, maxima)
            for giver, column, _ in [t.giver for t in givers if t.giver[0] is not None]:
                handovers.merge(state.amax_history_fwd, _received(key)[0], giver.amax_history_fwd[0], column)
    made = made_of(text)
    if copies is None or not made:
        return tuple(outputs)
    copies.keep(outputs[len(outputs) - made :])
    return tuple(outputs[: len(outputs) - made])


@constant_at_trace
def _received(key: str) -> tuple[int, int]:
    """Where the scale of a quantized input is in the state of a call's layer, and that of its gradient."""
    slots = call_of(apart(key)[0]).layer.slots
    assert slots is not None
    return slots.input, slots.grad_input


def merge(history: torch.Tensor, maxima: torch.Tensor) -> None:
    """Raise a history's first row to the maxima of a run, where compilers see it."""
    history[0].copy_(torch.maximum(history[0], maxima))


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        key: str,
        rule: str,
        copies: str,
        carried: str,
        scale_fwd: Any,
        scale_bwd: Any,
        history_bwd: Any,
        *inputs: torch.Tensor | None,
    ) -> Any:
        *inputs, told = inputs  # type: ignore[assignment]
        dense = [t if t is None or isinstance(t, QuantizedTorch) else t.contiguous() for t in inputs]
        results = torch.ops.te_runtime.forward(
            dense, scale_fwd, scale_bwd if rule else None, key, rule, "", copies, carried
        )
        origins, reads_copies, differentiable = _of_forward(key, copies, carried)
        made = [o for o in origins if o == -1]
        end = len(results) - (0 if scale_fwd is None else 1)
        last = end - made_of(copies)  # where copies that are kept begin
        outputs, kept = results[: last - len(made)], results[last:end]
        fresh, own = iter(results[last - len(made) : last]), [*outputs, *kept]
        saved = [
            None if o is None else (next(fresh) if o == -1 else inputs[o] if o >= 0 else own[-2 - o]) for o in origins
        ]
        ctx.key, ctx.inputs, ctx.copies = key, len(inputs), ""
        ctx.outputs = len(outputs)
        ctx.carried, ctx.kept = carried, saved_carried(carried, origins) if carried else ""
        if copies and reads_copies:
            ctx.copies = for_backward(copies)
            saved += kept or own_and_given(copies, inputs)[1]
        ctx.save_for_backward(*saved, scale_bwd, history_bwd, told)
        others = [] if differentiable is None else outputs[differentiable:]
        if scale_fwd is None:
            ctx.mark_non_differentiable(*others, *kept)
            return tuple(own)
        ctx.mark_non_differentiable(*others, *kept, results[end])
        return (*own, results[end])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        *saved, scale_bwd, history_bwd, told = ctx.saved_tensors
        grads = grads[: ctx.outputs]  # copies of weights and maxima have none
        results = torch.ops.te_runtime.backward(
            list(grads), saved, scale_bwd, ctx.key, "", ctx.copies, ctx.carried, ctx.kept
        )
        if scale_bwd is not None:
            merge(history_bwd, results[-1])
            if told is not None:
                handovers.merge(told, column_of_gradient(ctx.carried), results[-1], _received(ctx.key)[1])
        fresh = iter(results)
        found = [next(fresh) if g else None for g in _gives(ctx.key)]
        return (*[None] * 7, *found, *[None] * (ctx.inputs + 1 - len(found)))
