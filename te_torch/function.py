"""A layer of the core as an autograd function, for eager mode and for tracing compilers, from the same two functions.

Eager calls the layer's forward and backward directly. A compiler sees two opaque operators instead,
`te_runtime::forward` and `te_runtime::backward`, whose shapes are found by running the very same functions on
the meta backend. The operators are functional: maxima for delayed scaling come back as an output and are merged
into the history by traced code, so that a compiler knows every mutation.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch

from te_core import dtypes
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.linear import LinearSpec, Sink
from te_core.quantize.state import Scales
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import META, Device, Tensor
from te_torch import offloading
from te_torch import state as scaling
from te_torch.autocast import active, forward_ad, in_backward
from te_torch.export.mode import exporting, expressed
from te_torch.program_names import name_of_program
from te_torch.quantized import QuantizedTorch, core_of
from te_torch.runtime import TO_CORE, constant_at_trace, runtime_for, shape_runtime, to_core, to_core_shape, to_torch
from te_torch.tensors.wrap import from_core


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of the core: its two functions, the tuple it saves, and what its outputs are."""

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    saved: Callable[..., Any]
    outputs: int = 1  # at most; backward takes as many gradients
    weight: str = "weight"  # the saved tensor whose rows are the width of the first output
    weights: tuple[int, ...] = ()  # which inputs are the weights of its GEMMs
    releases: bool = False  # its backward takes `release`
    recomputes: bool = False  # its backward takes `ready`
    twins: tuple[int, int] | None = None  # two inputs that may have one gradient
    strided: bool = False  # takes inputs of any strides whose last one is 1; otherwise they are made contiguous
    partial: bool = False  # its backward takes None for the gradient of an output that nobody used
    differentiable: int | None = None  # so many of its outputs have gradients, the first ones; None: all
    copies: Callable[[Any], Sequence[Any]] = lambda saved: ()  # what of the saved was made of weights
    linears: Callable[[Any], tuple[LinearSpec, ...]] = lambda spec: ()  # the specs of its linears, one a weight
    plain: Callable[..., Any] | None = None  # its forward in torch's operators, for exporters (te_torch/export)

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):  # modules have checked what they pass: it need not be explained
            object.__setattr__(self, name, unwrap(getattr(self, name)))


@dataclass(frozen=True, eq=False)
class Call:
    """A layer with its spec: what one module does in one precision. Made once, then shared by all its calls."""

    layer: Layer
    spec: Any
    needs_grad: bool
    options: dict[str, Any]  # further keyword arguments of the layer's functions


class Extra:
    """What a call depends on besides its tensors: weights quantized before, where weight gradients go, group sizes."""

    __slots__ = ("first_microbatch", "fused", "parameters", "queue", "ready", "splits")

    def __init__(
        self,
        ready: Sequence[QuantizedTensor | None] | None,
        fused: bool,
        first_microbatch: bool | None,
        queue: list[list[Any]] | None,
        splits: Any = None,
        parameters: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.ready = ready  # one for each weight
        self.fused = fused  # weight gradients go into `main_grad` of their parameters
        self.first_microbatch = first_microbatch  # then `main_grad` is overwritten, not added to
        self.queue = queue  # one for each weight: its gradient is computed later, by backward_dw()
        # Whose gradients these are: the weights, or, under torch.autocast, what they were converted from. One each.
        self.parameters = parameters
        self.splits = splits  # of a grouped layer: te_core.layers.grouped_linear.Groups

    def options(self) -> dict[str, Any]:
        """Further keyword arguments of the layer's forward and backward."""
        return {} if self.splits is None else {"splits": self.splits}


# Calls live as long as a module has them, those of compiled programs for good.
_by_spec: weakref.WeakValueDictionary[Any, Call] = weakref.WeakValueDictionary()
_of_programs: dict[str, Call] = {}
# Per call, where each saved tensor comes from: input i is i, output i is -2 - i, neither is -1; None if absent.
_saved_from: dict[str, tuple[int | None, ...]] = {}
_grads_given: dict[str, tuple[bool, ...]] = {}  # per call: which input gradients backward returns


def register(layer: Layer, spec: Any, needs_grad: bool, inspectors: Sequence[Any] | None = None) -> Call:
    """The call of this spec; modules that do the same share one, unless inspectors tell them apart."""
    identity = (layer.name, spec, needs_grad)
    found = _by_spec.get(identity) if inspectors is None else None
    if found is None:
        found = Call(layer, spec, needs_grad, {} if inspectors is None else {"inspectors": inspectors})
        if inspectors is None:
            _by_spec[identity] = found
    return found


def key_of(call: Call) -> str:
    """The name by which a compiled program calls it, which it may do for good."""
    name = name_of_program(call.layer.name, (call.spec, call.needs_grad), shared=not call.options)
    key, others = name, itertools.count(1)
    while _of_programs.setdefault(key, call) is not call:  # another one that reads the same, such as one inspected
        key = f"{name}-{next(others)}"
    return key


def apply(
    call: Call | str,
    state: scaling.ScalingState | None,
    recompute: bool,
    *inputs: torch.Tensor | None,
    extra: Extra | None = None,
) -> tuple[torch.Tensor, ...]:
    """The layer's outputs, differentiable where the call needs gradients. Under tracing a call comes as its key."""
    if isinstance(call, str):
        if exporting.on:
            return expressed(_of_programs[call], state, extra, inputs)
        return _apply_traced(call, state, recompute, inputs)
    if call.needs_grad and torch.is_grad_enabled():
        if _functorch_active():
            return _Eager.apply(call, state, recompute, extra, *inputs)
        # Function.apply looks for functorch wrappers in every argument: 3 us of the 9 that a call costs.
        return _eager_apply(call, state, recompute, extra, *inputs)
    outputs, _ = _run(call, state, recompute, extra, inputs)
    return _own(outputs, inputs)


def _own(outputs: Sequence[Any], inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Fresh outputs as tensors of their shape, not as views, which a caller could not change in place."""
    made = []
    first = inputs[0]
    quantized = isinstance(first, QuantizedTorch)
    for t in outputs:
        shape = t.shape
        if quantized and len(shape) == 2:  # to the core it is a matrix
            shape = (*first.shape[:-1], shape[1])
        if type(t) is QuantizedTensor:
            made.append(from_core(t, (*first.shape[:-1], t.shape[1]), first.dtype))
            continue
        if t.owner.shape != shape:
            t.owner.resize_(shape)
        made.append(t.owner)
    return tuple(made)


def _run(
    call: Call,
    state: scaling.ScalingState | None,
    recompute: bool,
    extra: Extra | None,
    inputs: Sequence[torch.Tensor | None],
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    rt = runtime_for(inputs[0])  # type: ignore[arg-type]  # every layer's first input is there
    _check_devices(rt.device, inputs)
    views = _to_core_all(rt, inputs, call.layer.strided)
    scales = None if state is None else state.scales(recompute)
    if extra is not None:
        options = {**call.options, **extra.options()}
        if extra.ready is not None:
            options["ready"] = extra.ready
        return call.layer.forward(rt, *views, spec=call.spec, scales=scales, **options)
    return call.layer.forward(rt, *views, spec=call.spec, scales=scales, **call.options)


def _to_core_all(rt: Runtime, tensors: Sequence[torch.Tensor | None], strided: bool = False) -> list[Any]:
    """Core views of tensors on the runtime's device; made contiguous where they are not, unless `strided` may stay."""
    device = rt.device
    if device is META:
        return [None if t is None else to_core_shape(t) for t in tensors]
    return [
        None
        if t is None
        else Tensor(t.data_ptr(), t.shape, TO_CORE[t.dtype], device, t)
        if type(t) in _PLAIN and t.is_contiguous()
        else _to_core_other(t, device, strided)
        for t in tensors
    ]


def _check_devices(device: Device, tensors: Sequence[torch.Tensor | None]) -> None:
    """A core view of a tensor is stamped with the runtime's device, so no later check would notice another one."""
    kind, index = device.kind, device.index
    for t in tensors:
        if t is not None and (t.get_device() != index if kind == "cuda" else t.device.type != kind):
            raise ArgumentError(
                "te_torch",
                f"a tensor on {t.device} beside one on {device}",
                "all tensors on one device",
                "move the module and its inputs there" + (" (or give it memory: to_empty)" if t.is_meta else ""),
            )


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def _to_core_other(t: torch.Tensor, device: Device, strided: bool) -> Any:
    """The core's view of a subclass, or of a tensor that is not dense."""
    if isinstance(t, QuantizedTorch):
        return core_of(t)
    strides = None
    if not t.is_contiguous():
        if strided and t.stride(-1) == 1:
            strides = t.stride()
        else:
            t = t.contiguous()
    return Tensor(t.data_ptr(), t.shape, TO_CORE[t.dtype], device, t, strides)


# -------------------------------------------------------------------------------------------------- eager


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, state: Any, recompute: bool, extra: Extra | None, *inputs: torch.Tensor | None
    ) -> Any:
        outputs, saved = _run(call, state, recompute, extra, inputs)
        ctx.set_materialize_grads(False)
        if offloading.active.context is not None:
            offloading.note_copies_of_weights([inputs[i] for i in call.layer.weights])
            offloading.note_copies_of_weights([t.owner for t in call.layer.copies(saved) if t is not None])
        # An owner is the caller's own tensor where an input was saved, so its version is checked by autograd.
        ctx.save_for_backward(*[None if t is None else t.owner for t in saved])
        ctx.call, ctx.state, ctx.inputs, ctx.extra = call, state, len(inputs), extra
        if extra is not None:
            ctx.weights = extra.parameters or [inputs[i] for i in call.layer.weights]
        ctx.within = scaling.this_pass() if recompute and state is not None else -1
        made = _own(outputs, inputs)
        if call.layer.differentiable is not None:
            ctx.mark_non_differentiable(*made[call.layer.differentiable :])
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():  # only create_graph=True runs a backward in grad mode
            _refuse_double_backward()
        call, state = ctx.call, ctx.state
        if grads[0] is None and not any(g is not None for g in grads):
            return (None,) * (4 + ctx.inputs)
        kept = ctx.saved_tensors  # read once: a checkpoint computes them again at each read
        given = _complete(call.layer, grads, kept)
        rt = runtime_for(given[0] if given[0] is not None else next(g for g in given if g is not None))
        saved = call.layer.saved(*_to_core_all(rt, kept, call.layer.strided))
        views = _to_core_all(rt, given)
        scales = None
        if state is not None:
            scales = state.backward_scales()
            scaling.ran_backward(state, ctx.within)
        options = call.options
        if call.layer.releases and _frees_saved and not _keep_graph():
            ctx.maybe_clear_saved_tensors()
            options = {**options, "release": True}
            del kept
        if ctx.extra is not None:
            return _backward_with(ctx, rt, views, saved, scales, options)
        results = call.layer.backward(rt, *views, saved, spec=call.spec, scales=scales, **options)
        found = _gradients(call.layer, results, given)
        missing = ctx.inputs - len(found)  # less than none where inputs at the end were left out
        return (None, None, None, None, *found[: ctx.inputs], *[None] * missing)


def _gradients(layer: Layer, results: Sequence[Any], given: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients as torch's. One for two inputs is one tensor twice: autograd then changes it for neither in place."""
    found: list[torch.Tensor | None] = []
    for t in results:
        if type(t) is Tensor:
            found.append(to_torch(t))
        else:
            found.append(None if t is None else from_core(t, (*given[0].shape[:-1], t.shape[1]), given[0].dtype))
    if layer.twins is not None:
        a, b = layer.twins
        if results[a] is results[b]:
            found[b] = found[a]
    dx = found[0]
    if dx is not None and isinstance(given[0], QuantizedTorch) and dx.ndim == 2:  # a matrix to the core, as dy was
        found[0] = dx.view(*given[0].shape[:-1], dx.shape[1])
    return found


def _backward_with(
    ctx: Any, rt: Runtime, views: list[Any], saved: Any, scales: Scales | None, options: dict[str, Any]
) -> Any:
    """A backward whose weight gradients go elsewhere: into `main_grad`, or into a queue."""
    call, extra, weights = ctx.call, ctx.extra, ctx.weights
    sinks = [_sink(w, extra, i) if w is not None and w.requires_grad else None for i, w in enumerate(weights)]
    options = {**options, **extra.options(), "sinks": sinks}
    if call.layer.recomputes and extra.ready is not None:
        options["ready"] = extra.ready
    results = list(call.layer.backward(rt, *views, saved, spec=call.spec, scales=scales, **options))
    grads = _gradients(call.layer, results, [v.owner for v in views if v is not None])
    for position, weight, sink in zip(call.layer.weights, weights, sinks, strict=True):
        if sink is not None and sink.main is not None:
            grads[position] = _stand_in_gradient(weight)
    return (None, None, None, None, *grads, *[None] * (ctx.inputs - len(grads)))


def _sink(weight: torch.Tensor, extra: Extra, index: int) -> Sink | None:
    main = accumulate = None
    if extra.fused:
        main = weight.get_main_grad() if hasattr(weight, "get_main_grad") else getattr(weight, "main_grad", None)
        if main is None:
            raise ArgumentError(
                "fuse_wgrad_accumulation",
                "a weight without main_grad",
                "weight.main_grad, a tensor of its shape",
                "allocate it before backward: weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)",
            )
        accumulate = extra.first_microbatch is not True and not getattr(weight, "overwrite_main_grad", False)
    if main is None and extra.queue is None:
        return None
    queue = None if extra.queue is None else extra.queue[index]
    return Sink(None if main is None else to_core(main), bool(accumulate), queue)


def _stand_in_gradient(weight: torch.Tensor) -> torch.Tensor | None:
    """What autograd gets when the gradient went into `main_grad`: nothing, or, for hooks that wait for one, a dummy."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    fill = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return fill(weight.shape, dtype=weight.dtype, device=weight.device)


_eager_apply: Any = super(torch.autograd.Function, _Eager).apply
_functorch_active = torch._C._are_functorch_transforms_active
#: Whether torch lets a backward free what was saved before it has ended (2.11).
_frees_saved = hasattr(_Eager, "maybe_clear_saved_tensors")
_keep_graph = torch._C._autograd._get_current_graph_task_keep_graph


def _complete(layer: Layer, grads: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor | None]) -> list[Any]:
    """A gradient for each output the layer can have; the first as zeros if only another output was used."""
    first, rest = grads[0], grads[1:]
    if first is not None and layer.outputs == 1:
        return [first]
    if layer.partial:
        return [*grads, *[None] * (layer.outputs - len(grads))]
    if first is None:
        weight = getattr(layer.saved(*saved), layer.weight)
        other = next(g for g in rest if g is not None)
        first = other.new_zeros(*other.shape[:-1], weight.shape[0])
    return [first, *rest, *[None] * (layer.outputs - 1 - len(rest))]


def _refuse_double_backward() -> None:
    raise UnsupportedError(
        "backward", "create_graph=True", "first derivatives", "use torch.nn layers where second ones are needed"
    )


# ------------------------------------------------------------------------------------------------- traced

_library = torch.library.Library("te_runtime", "FRAGMENT")
_library.define("forward(Tensor?[] inputs, Tensor? scale, str key) -> Tensor[]")
_library.define("backward(Tensor?[] grads, Tensor?[] saved, Tensor? scale, str key, int token) -> Tensor[]")


def _forward_op(
    inputs: list[torch.Tensor | None], scale: torch.Tensor | None, key: str, fake: bool = False
) -> list[torch.Tensor]:
    """Outputs, then what is saved and is no input, then the maxima."""
    call = _of_programs[key]
    first = inputs[0]
    assert first is not None
    if not fake and call.layer.weights:
        _check_recomputation(call, inputs)
    rt, convert = _world(first, fake)
    inputs = [None if t is None else t.contiguous() for t in inputs]
    views = [None if t is None else convert(t) for t in inputs]
    maxima = _new_maxima(rt, scale)
    scales = None
    if scale is not None and maxima is not None:
        scales = Scales(convert(scale), maxima, maxima, None)
    outputs, saved = call.layer.forward(rt, *views, spec=call.spec, scales=scales, **call.options)
    given = {id(t): i for i, t in enumerate(inputs)} | {id(t.owner): -2 - i for i, t in enumerate(outputs)}
    origins = [None if t is None else given.get(id(t.owner), -1) for t in saved]
    _saved_from[key] = tuple(origins)
    made = [t for t, origin in zip(saved, origins, strict=True) if origin == -1]
    return [to_torch(t) for t in (*outputs, *made, *([] if maxima is None else [maxima]))]


def _backward_op(
    grads: list[torch.Tensor | None],
    saved: list[torch.Tensor | None],
    scale: torch.Tensor | None,
    key: str,
    token: int,
    fake: bool = False,
) -> list[torch.Tensor]:
    """The input gradients that are given, then the maxima."""
    call = _of_programs[key]
    given = _complete(call.layer, grads, saved)
    rt, convert = _world(next(g for g in given if g is not None), fake)
    maxima = _new_maxima(rt, scale)
    scales = None
    if scale is not None and maxima is not None:
        scales = Scales(maxima, None, convert(scale), maxima)
    views = [None if g is None else convert(g.contiguous()) for g in given]
    kept = call.layer.saved(*[None if t is None else convert(t.contiguous()) for t in saved])
    results = call.layer.backward(rt, *views, kept, spec=call.spec, scales=scales, **call.options)
    _grads_given[key] = tuple(t is not None for t in results)
    state = scaling.by_token(token) if token and not fake else None
    if state is not None:
        scaling.ran_backward(state)
    made = _distinct([t for t in results if t is not None], {id(v.owner) for v in views if v is not None})
    return made if maxima is None else [*made, to_torch(maxima)]


def _distinct(results: Sequence[Tensor], taken: set[int]) -> list[torch.Tensor]:
    """Results as an operator may return them: none is an argument (whose id is in `taken`) or another result."""
    made = []
    for t in results:
        made.append(to_torch(t).clone() if id(t.owner) in taken else to_torch(t))
        taken.add(id(t.owner))
    return made


def _world(t: torch.Tensor, fake: bool) -> tuple[Runtime, Callable[[torch.Tensor], Tensor]]:
    if fake or t.is_meta:
        return shape_runtime(t.device), to_core_shape
    return runtime_for(t).apart(), to_core


def _new_maxima(rt: Runtime, scale: torch.Tensor | None) -> Tensor | None:
    return None if scale is None else rt.zeros((scale.shape[0],), dtypes.float32)


_library.impl("forward", _forward_op, "CompositeExplicitAutograd")
_library.impl("backward", _backward_op, "CompositeExplicitAutograd")
torch.library.register_fake(
    "te_runtime::forward", lambda inputs, scale, key: _forward_op(inputs, scale, key, True), lib=_library
)
torch.library.register_fake(
    "te_runtime::backward",
    lambda grads, saved, scale, key, token: _backward_op(grads, saved, scale, key, token, True),
    lib=_library,
)


#: By a weight's address: its precision in the last compiled forward that torch's reentrant checkpoint may run again.
_checkpointed: dict[int, Any] = {}


def _check_recomputation(call: Call, inputs: Sequence[torch.Tensor | None]) -> None:
    """A compiled module in torch's reentrant checkpoint is run again outside of the region that it ran in, and the
    compiler then takes its program without one: an error, not another precision.

    (Inside an autograd function's forward gradients are off both ways. What a compiler's own backward runs again is in
    none.)
    """
    if forward_ad() or torch.is_inference_mode_enabled():
        return
    weight = inputs[call.layer.weights[0]]
    assert weight is not None
    precision = call.layer.linears(call.spec)[0].precision
    if not in_backward():
        if not call.needs_grad:
            if len(_checkpointed) >= 4096:
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


def _scale_op(scale: torch.Tensor, used: torch.Tensor, token: int) -> torch.Tensor:
    state = scaling.by_token(token)
    reads = not in_backward() or (state is not None and state.is_due())
    return (scale if reads else used).clone()


_library.define("scale_of_first_run(Tensor scale, Tensor used, int token) -> Tensor")
_library.impl("scale_of_first_run", _scale_op, "CompositeExplicitAutograd")
torch.library.register_fake(
    "te_runtime::scale_of_first_run", lambda scale, used, token: torch.empty_like(scale), lib=_library
)


@constant_at_trace
def _origins(key: str) -> tuple[int | None, ...]:
    """Where each saved tensor comes from; known since the operator's shapes were worked out."""
    return _saved_from[key]


@constant_at_trace
def _differentiable(key: str) -> int | None:
    return _of_programs[key].layer.differentiable


@constant_at_trace
def _gives(key: str) -> tuple[bool, ...]:
    return _grads_given[key]


@constant_at_trace
def _in_checkpoint() -> bool:
    """Whether what is traced now is in a checkpoint, of whatever kind, that is part of the graph."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    except AttributeError:  # torch.export without a compiler's frame: it runs nothing again
        return False
    while tracer is not None and "checkpoint" not in str(tracer.source_target):
        tracer = tracer.parent
    return tracer is not None


def _apply_traced(
    key: str, state: scaling.ScalingState | None, recompute: bool, inputs: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    if state is None:
        return _Traced.apply(key, 0, None, None, None, *inputs)
    scale = state.scale_fwd
    # What runs again quantizes as its first run did, and records nothing. A checkpoint in the graph is one program for
    # both runs, with an update of the scales between them.
    if recompute or _in_checkpoint():
        scale = torch.ops.te_runtime.scale_of_first_run(scale, state.used_fwd, state.token)
    *outputs, maxima = _Traced.apply(key, state.token, scale, state.scale_bwd, state.amax_history_bwd, *inputs)
    if not recompute:
        _raise(state.amax_history_fwd, maxima)
    return tuple(outputs)


def _raise(history: torch.Tensor, maxima: torch.Tensor) -> None:
    history[0].copy_(torch.maximum(history[0], maxima))


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key: str, token: int, scale_fwd: Any, scale_bwd: Any, history_bwd: Any, *inputs: torch.Tensor | None
    ) -> Any:
        results = torch.ops.te_runtime.forward([None if t is None else t.contiguous() for t in inputs], scale_fwd, key)
        origins = _origins(key)
        made = [o for o in origins if o == -1]
        end = len(results) - (0 if scale_fwd is None else 1)
        outputs = results[: end - len(made)]
        fresh = iter(results[end - len(made) : end])
        saved = [
            None if o is None else (next(fresh) if o == -1 else inputs[o] if o >= 0 else outputs[-2 - o])
            for o in origins
        ]
        ctx.save_for_backward(*saved, scale_bwd, history_bwd)
        ctx.key, ctx.token, ctx.inputs = key, token, len(inputs)
        end_of_differentiable = _differentiable(key)
        others = [] if end_of_differentiable is None else outputs[end_of_differentiable:]
        if scale_fwd is None:
            ctx.mark_non_differentiable(*others)
            return tuple(outputs)
        ctx.mark_non_differentiable(*others, results[end])
        return (*outputs, results[end])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        *saved, scale_bwd, history_bwd = ctx.saved_tensors
        if scale_bwd is not None:
            grads = grads[:-1]  # the maxima have none
        results = torch.ops.te_runtime.backward(list(grads), saved, scale_bwd, ctx.key, ctx.token)
        if scale_bwd is not None:
            _raise(history_bwd, results[-1])
        fresh = iter(results)
        found = [next(fresh) if g else None for g in _gives(ctx.key)]
        return (None, None, None, None, None, *found, *[None] * (ctx.inputs - len(found)))
