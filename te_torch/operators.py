"""A layer of the core as tracing compilers see it: two opaque operators, `te_runtime::forward` and
`te_runtime::backward`.

Their shapes are found by running the very same functions on the meta backend. They are functional: maxima for delayed
scaling come back as an output and are merged into the history by traced code, so that a compiler knows every mutation.
What they run is named by its spec, and a state is known by its tensors: modules that are alike share a program.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from te_core import dtypes
from te_core.errors import UnsupportedError
from te_core.precision import Precision
from te_core.quantize.state import Scales
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_torch import state as scaling
from te_torch import updates
from te_torch.autocast import active, forward_ad, in_backward
from te_torch.calls import Call, call_of, complete
from te_torch.precisions import precision_of, recipe_of
from te_torch.program_names import name_of_program
from te_torch.program_specs import read, written
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import constant_at_trace, runtime_for, shape_runtime, to_core, to_core_shape, to_torch
from te_torch.tensors.dispatch import keeps
from te_torch.tensors.tracing import core_from_inner
from te_torch.weight_copies import Copies, for_backward, given_of, held_in, made_of, parsed, ready_for

# Per call and plan of copies, where each saved tensor comes from: input i is i, output i is -2 - i (kept copies of
# weights come behind the outputs), neither is -1; None if absent.
_saved_from: dict[tuple[str, str], tuple[int | None, ...]] = {}
_grads_given: dict[str, tuple[bool, ...]] = {}  # per call: which input gradients backward returns

_library = torch.library.Library("te_runtime", "FRAGMENT")
_library.define(
    'forward(Tensor?[] inputs, Tensor? scale, Tensor? scale_bwd, str key, str rule, str held="", str copies="") '
    "-> Tensor[]"
)
_library.define(
    'backward(Tensor?[] grads, Tensor?[] saved, Tensor? scale, str key, str held="", str copies="") -> Tensor[]'
)


class Traced(NamedTuple):
    """A module's state as traced code has it."""

    state: scaling.ScalingState
    rule: str  # its update's, by name


_rules: dict[str, tuple[Precision, Any]] = {}  # of programs, with the recipes that user-supplied ones are shown


def rule_key(number: int) -> str:
    """The name by which a compiled program tells the state which precision it ran in."""
    rule, recipe = precision_of(number), recipe_of(number)
    assert rule is not None
    if torch.compiler.is_exporting():
        key = written(rule)
        _rules[key] = rule, recipe
        return key
    name = name_of_program("rule", rule)
    key, others = name, itertools.count(1)
    while _rules.setdefault(key, (rule, recipe))[0] is not rule:
        key = f"{name}-{next(others)}"
    return key


def _forward_op(
    inputs: list[torch.Tensor | None],
    scale: torch.Tensor | None,
    scale_bwd: torch.Tensor | None,
    key: str,
    rule: str,
    held: str = "",
    copies: str = "",
    fake: bool = False,
) -> list[torch.Tensor]:
    """Outputs, then what is saved and is no input, copies of weights that are kept, and the maxima.

    `scale_bwd` tells whose state it is, `copies` what comes behind the layer's inputs (te_torch.weight_copies).
    """
    call = call_of(key)
    first = inputs[0]
    assert first is not None
    rt, convert = world(first, fake)
    views = core_views(inputs, held, convert)
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
    outputs, saved = call.layer.forward(rt, *own, spec=call.spec, scales=scales, **options)
    origins = None if fake else _saved_from.get((key, copies))
    if origins is None:
        origins = _saved_from[key, copies] = _origins_of(views, (*[y.owner for y in outputs], *kept), saved)
    made = [t for t, origin in zip(saved, origins, strict=True) if origin == -1]
    results = [*map(to_torch, outputs), *map(to_torch, made), *kept]
    return results if maxima is None else [*results, to_torch(maxima)]


def _origins_of(views: Sequence[Any], results: Sequence[torch.Tensor], saved: Sequence[Any]) -> tuple[int | None, ...]:
    """Where each saved tensor comes from: an input, a result, or neither."""
    given = {id(t.owner): i for i, t in enumerate(views) if t is not None}
    given |= {id(t): -2 - i for i, t in enumerate(results)}
    return tuple([None if t is None else given.get(id(t.owner), -1) for t in saved])


def _backward_op(
    grads: list[torch.Tensor | None],
    saved: list[torch.Tensor | None],
    scale: torch.Tensor | None,
    key: str,
    held: str = "",
    copies: str = "",
    fake: bool = False,
) -> list[torch.Tensor]:
    """The input gradients that are given, then the maxima. `scale` is the state's own tensor."""
    call = call_of(key)
    blocks: list[Any] = []
    if copies:
        count = len(saved) - parsed(copies).tensors
        saved, blocks = saved[:count], saved[count:]
    given = complete(call.layer, grads, saved) if grads[0] is not None else _completed(call, grads, saved, held)
    rt, convert = world(next(g for g in given if g is not None), fake)
    maxima = new_maxima(rt, scale)
    scales = None
    if scale is not None and maxima is not None:
        scales = Scales(maxima, None, convert(scale), maxima)
    views = [None if g is None else convert(g.contiguous()) for g in given]
    kept = call.layer.saved(*core_views(saved, held, convert))
    options = call.options
    if copies:
        options = {**options, "ready": held_in(call, parsed(copies), [convert(t) for t in blocks], (kept.w1, kept.w2))}
    results = call.layer.backward(rt, *views, kept, spec=call.spec, scales=scales, **options)
    _grads_given[key] = tuple(t is not None for t in results)
    if scale is not None and not fake and (state := scaling.of_tensor(scale)) is not None:
        updates.ran_backward(state)
    made = _distinct([t for t in results if t is not None], {id(v.owner) for v in views if v is not None})
    return made if maxima is None else [*made, to_torch(maxima)]


def _distinct(results: Sequence[Tensor], taken: set[int]) -> list[torch.Tensor]:
    """Results as an operator may return them: none is an argument (whose id is in `taken`) or another result."""
    made = []
    for t in results:
        made.append(to_torch(t).clone() if id(t.owner) in taken else to_torch(t))
        taken.add(id(t.owner))
    return made


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


def core_views(tensors: Sequence[torch.Tensor | None], held: str, convert: Callable[..., Tensor]) -> list[Any]:
    """Core views of an operator's tensors; `held` says which are the buffers of quantized ones."""
    if not held:
        return [None if t is None else convert(t.contiguous()) for t in tensors]
    given, views = iter(tensors), []
    for meta in _parsed(held):
        if meta is None:
            t = next(given)
            views.append(None if t is None else convert(t.contiguous()))
        else:
            inner: Any = [next(given) for _ in range(sum(meta[2]))]
            q = core_from_inner(meta, inner, shapes_only=convert is to_core_shape)
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
def _forward_of_held(
    func: Any, inputs: Sequence[Any], scale: Any, scale_bwd: Any, key: str, rule: str, held: str = "", copies: str = ""
) -> Any:
    flat, held = flattened(inputs, call_of(key).layer.weights)
    return func(flat, scale, scale_bwd, key, rule, held, copies)


@keeps(torch.ops.te_runtime.backward.default)
def _backward_of_held(
    func: Any, grads: Any, saved: Sequence[Any], scale: Any, key: str, held: str = "", copies: str = ""
) -> Any:
    flat, held = flattened(saved, None)
    dense = [g._dense_values(g.dtype) if isinstance(g, QuantizedTorch) else g for g in grads]
    return func(dense, flat, scale, key, held, copies)


def _completed(call: Call, grads: Sequence[Any], saved: Sequence[Any], held: str) -> list[Any]:
    """`complete`, of a layer whose weight may be held quantized."""
    return complete(call.layer, grads, core_views(saved, held, to_core_shape))


# ------------------------------------------------------------------------------------------- what runs, for eager code


def note_run(call: Call, views: Sequence[Any], scale_bwd: torch.Tensor | None, rule: str) -> None:
    """Called by compiled code as it runs a call: tell the state, reports and checkpoints."""
    told = scale_bwd is not None and not in_backward()  # what a checkpoint in the graph runs again has been told
    if told and (state := scaling.of_tensor(scale_bwd)) is not None:  # type: ignore[arg-type]
        precision, recipe = _rules.get(rule) or (read(rule), None)
        state.ran_compiled(precision, recipe, active.region)
    if call.layer.weights:
        weight = views[call.layer.weights[0]]
        if isinstance(weight, Tensor):
            _note(call, weight.owner)
            _check_recomputation(call, weight.owner)


class _Last(NamedTuple):
    call: Call
    weight: StorageWeakRef  # tells whether the address is still the same tensor's


_last_compiled: dict[int, _Last] = {}
#: By a weight's address: its precision in the last compiled forward that torch's reentrant checkpoint may run again.
_checkpointed: dict[int, Any] = {}


_MOST_WEIGHTS = 4096


def _note(call: Call, weight: torch.Tensor) -> None:
    address, storage = weight.data_ptr(), weight.untyped_storage()
    found = _last_compiled.get(address)
    if found is None or found.call is not call or found.weight.cdata != storage._cdata:
        if len(_last_compiled) >= _MOST_WEIGHTS:
            _last_compiled.clear()
        _last_compiled[address] = _Last(call, StorageWeakRef(storage))


def last_compiled(weight: torch.Tensor) -> Call | None:
    """What compiled code last ran with this weight: it does not know its module, reports do."""
    found = _last_compiled.get(weight.data_ptr())
    return None if found is None or found.weight.cdata != weight.untyped_storage()._cdata else found.call


def _check_recomputation(call: Call, weight: torch.Tensor) -> None:
    """A compiled module in torch's reentrant checkpoint is run again outside of the region that it ran in, and the
    compiler then takes its program without one: an error, not another precision.

    (Inside an autograd function's forward gradients are off both ways. What a compiler's own backward runs again is in
    none.)
    """
    if forward_ad() or torch.is_inference_mode_enabled():
        return
    precision = call.layer.linears(call.spec)[0].precision
    if not in_backward():
        if not call.needs_grad:
            if len(_checkpointed) >= _MOST_WEIGHTS:
                _checkpointed.clear()
            _checkpointed[weight.data_ptr()] = precision
    elif (active.region is None or not active.region.recompute) and weight.data_ptr() in _checkpointed:
        if _checkpointed[weight.data_ptr()] is not precision:
            raise UnsupportedError(
                "torch.compile",
                "a compiled module that torch.utils.checkpoint runs again outside of its region",
                "te_torch.checkpoint, which carries the region along, or a region inside the checkpointed function",
                "use te_torch.checkpoint",
            )


def _scale_op(scale: torch.Tensor, used: torch.Tensor, scale_bwd: torch.Tensor) -> torch.Tensor:
    state = scaling.of_tensor(scale_bwd)
    reads = not in_backward() or (state is not None and state.is_due())
    return (scale if reads else used).clone()


_library.define("scale_of_first_run(Tensor scale, Tensor used, Tensor scale_bwd) -> Tensor")
_library.impl("scale_of_first_run", _scale_op, "CompositeExplicitAutograd")
torch.library.register_fake(
    "te_runtime::scale_of_first_run", lambda scale, used, scale_bwd: torch.empty_like(scale), lib=_library
)


@constant_at_trace
def _origins(key: str, copies: str) -> tuple[int | None, ...]:
    """Where each saved tensor comes from; known since the operator's shapes were worked out."""
    return _saved_from[key, copies]


@constant_at_trace
def _reads_copies(key: str) -> bool:
    """Whether backward reads quantized weights besides what is saved."""
    call = call_of(key)
    return call.layer.recomputes and call.spec.checkpoint


@constant_at_trace
def _differentiable(key: str) -> int | None:
    return call_of(key).layer.differentiable


@constant_at_trace
def _gives(key: str) -> tuple[bool, ...]:
    return _grads_given[key]


@constant_at_trace
def in_checkpoint() -> bool:
    """Whether what is traced now is in a checkpoint, of whatever kind, that is part of the graph."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    except AttributeError:  # torch.export without a compiler's frame: it runs nothing again
        return False
    while tracer is not None and "checkpoint" not in str(tracer.source_target):
        tracer = tracer.parent
    return tracer is not None


def scale_to_read(given: Traced, recompute: bool) -> tuple[torch.Tensor, str]:
    """(the scales a traced forward quantizes with, the rule it tells its state; "" where it has run before).

    What runs again quantizes as its first run did, and records nothing. A checkpoint in the graph is one program for
    both runs, with an update of the scales between them.
    """
    state, rule = given
    if not recompute and not in_checkpoint():
        return state.scale_fwd, rule
    scale = torch.ops.te_runtime.scale_of_first_run(state.scale_fwd, state.used_fwd, state.scale_bwd)
    return scale, "" if recompute else rule


def apply_traced(
    key: str, given: Traced | None, recompute: bool, inputs: Sequence[torch.Tensor | None], copies: Copies | None = None
) -> tuple[torch.Tensor, ...]:
    """The layer's outputs, as traced code computes them."""
    text, more = ("", []) if copies is None else (copies.text, copies.tensors)
    if given is None:
        outputs = list(_Traced.apply(key, "", text, None, None, None, *inputs, *more))
    else:
        state, (scale, rule) = given.state, scale_to_read(given, recompute)
        *outputs, maxima = _Traced.apply(
            key, rule, text, scale, state.scale_bwd, state.amax_history_bwd, *inputs, *more
        )
        if not recompute:
            merge(state.amax_history_fwd, maxima)
    made = made_of(text)
    if copies is None or not made:
        return tuple(outputs)
    copies.keep(outputs[len(outputs) - made :])
    return tuple(outputs[: len(outputs) - made])


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
        scale_fwd: Any,
        scale_bwd: Any,
        history_bwd: Any,
        *inputs: torch.Tensor | None,
    ) -> Any:
        dense = [t if t is None or isinstance(t, QuantizedTorch) else t.contiguous() for t in inputs]
        results = torch.ops.te_runtime.forward(dense, scale_fwd, scale_bwd if rule else None, key, rule, "", copies)
        origins = _origins(key, copies)
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
        if copies and _reads_copies(key):
            ctx.copies = for_backward(copies)
            saved += kept or given_of(copies, inputs)
        ctx.save_for_backward(*saved, scale_bwd, history_bwd)
        end_of_differentiable = _differentiable(key)
        others = [] if end_of_differentiable is None else outputs[end_of_differentiable:]
        if scale_fwd is None:
            ctx.mark_non_differentiable(*others, *kept)
            return tuple(own)
        ctx.mark_non_differentiable(*others, *kept, results[end])
        return (*own, results[end])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        *saved, scale_bwd, history_bwd = ctx.saved_tensors
        grads = grads[: ctx.outputs]  # copies of weights and maxima have none
        results = torch.ops.te_runtime.backward(list(grads), saved, scale_bwd, ctx.key, "", ctx.copies)
        if scale_bwd is not None:
            merge(history_bwd, results[-1])
        fresh = iter(results)
        found = [next(fresh) if g else None for g in _gives(ctx.key)]
        return (None, None, None, None, None, None, *found, *[None] * (ctx.inputs - len(found)))
