"""A layer of the core as an autograd function, for eager mode and for tracing compilers, from the same two functions.

Eager calls the layer's forward and backward directly. A compiler sees two opaque operators instead (`operators.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.linear import Sink
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import META, Device, Tensor
from te_torch import handovers, offloading, updates
from te_torch import state as scaling
from te_torch.calls import Call as Call
from te_torch.calls import Layer as Layer
from te_torch.calls import call_of, complete
from te_torch.calls import key_of as key_of
from te_torch.calls import of_table as of_table
from te_torch.calls import register as register
from te_torch.carried import apart
from te_torch.compiled_runs import Traced as Traced
from te_torch.export.mode import exporting, expressed
from te_torch.noting import Noted, noting
from te_torch.operators import apply_traced
from te_torch.quantized import QuantizedTorch, core_of
from te_torch.runtime import (
    FLOATS,
    LOW,
    TO_CORE,
    freed,
    in_place,
    nested,
    no_memory,
    refuse_dtensor,
    runtime_for,
    to_core_shape,
    to_torch,
    was_freed,
)
from te_torch.surroundings import check_surroundings, dispatch_modes, functorch_active
from te_torch.tensors.wrap import from_core
from te_torch.weight_copies import Copies


@dataclass(eq=False, repr=False, slots=True)
class Extra:
    """What a call depends on besides its tensors: weights quantized before, where weight gradients go, group sizes."""

    ready: Sequence[QuantizedTensor | None] | None  # one for each weight
    fused: bool  # weight gradients go into `main_grad` of their parameters
    first_microbatch: bool | None  # then `main_grad` is overwritten, not added to
    queue: list[list[Any]] | None  # one for each weight: its gradient is computed later, by backward_dw()
    splits: Any = None  # of a grouped layer: te_core.layers.grouped_linear.Groups
    # Whose gradients these are: the weights, or, under torch.autocast, what they were converted from. One each.
    parameters: Sequence[torch.Tensor] | None = None

    def options(self) -> dict[str, Any]:
        """Further keyword arguments of the layer's forward and backward."""
        return {} if self.splits is None else {"splits": self.splits}

    def with_options(self, given: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of the layer's forward."""
        found = {**given, **self.options()}
        return found if self.ready is None else {**found, "ready": self.ready}


def apply(
    call: Call | str,
    state: scaling.ScalingState | Traced | None,
    recompute: bool,
    *inputs: torch.Tensor | None,
    extra: Extra | Copies | None = None,
    caller: int = 0,
) -> tuple[torch.Tensor, ...]:
    """The layer's outputs, differentiable where the call needs gradients.

    Under tracing a call comes as its key, and what it depends on besides its tensors as `Copies`. `caller`: a module's
    number; a call that it makes again is recorded.
    """
    if isinstance(call, str):
        if exporting.on:
            name, handing, _ = apart(call)
            return expressed(call_of(name), state, extra, inputs, handing)
        return apply_traced(call, state, recompute, inputs, extra)  # type: ignore[arg-type]
    assert not isinstance(state, Traced)
    if dispatch_modes():
        check_surroundings()
    run = Run(call, state, recompute, extra, caller)  # type: ignore[arg-type]  # `Copies` are traced code's
    if call.needs_grad and torch.is_grad_enabled():
        if functorch_active():
            check_surroundings()
        outputs = run_node(run, *inputs)
    else:
        if forward_ad._current_level >= 0:
            # Without gradients to come a layer is no function of autograd's, which would refuse.
            if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in inputs):
                raise UnsupportedError(
                    "forward-mode differentiation",
                    "an input or a parameter with a tangent",
                    "backward",
                    "use torch.nn layers there",
                )
        outputs = ran(run, inputs)[0]
    if noting.notes is not None:
        noting.notes.calls.append(Noted(call, inputs, outputs, state=state, extra=extra, again=recompute))
    return outputs


@dataclass(eq=False, repr=False, slots=True)
class Run:
    """One forward of a call, and its backward: what it depends on besides tensors."""

    call: Call
    state: Any
    recompute: bool
    extra: Extra | None
    caller: int
    found: Any = None  # the runtime, the replay and what the replay takes, if they are known already


def _own(outputs: Sequence[Any], inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Fresh outputs as tensors of their shape, not as views, which a caller could not change in place."""
    made = []
    first = inputs[0]
    quantized = isinstance(first, QuantizedTorch)
    for t in outputs:
        shape = t.shape
        if quantized and len(shape) == 2:  # to the core it is a matrix
            shape = (*_leading(first, shape[0]), shape[1])
        if type(t) is QuantizedTensor:
            made.append(from_core(t, (*_leading(first, t.shape[0]), t.shape[1]), first.dtype))
            continue
        if t.owner.shape != shape:
            t.owner.resize_(shape)
        made.append(t.owner)
    return tuple(made)


def _leading(like: torch.Tensor, rows: int) -> tuple[int, ...]:
    """The leading dimensions of a matrix that was made of this tensor; over ranks it may have more rows, or less."""
    leading = like.shape[:-1]
    count = leading.numel()
    if count == rows:
        return leading
    first, rest = divmod(leading[0] * rows, count)
    if rest:
        raise ArgumentError(
            "sequence parallelism",
            f"a result of {rows} rows of a quantized tensor of shape {tuple(like.shape)}",
            "a first dimension that the ranks divide",
            "pad the sequence",
        )
    return first, *leading[1:]


def ran(
    run: Run, inputs: Sequence[torch.Tensor | None]
) -> tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor | None]]:
    """(outputs, what is saved). What is saved of the caller's is his own tensor: so autograd checks its version."""
    call, state = run.call, run.state
    rt = runtime_for(inputs[0])  # type: ignore[arg-type]  # every layer's first input is there
    scales = None if state is None else state.scales(run.recompute)
    options = call.options if run.extra is None else run.extra.with_options(call.options)
    found = call.forward.find(rt, inputs, scales, options)
    if found is not None:
        replay, given = found
        return replay.forward(rt, *given)
    _check_devices(rt.device, inputs)
    views = _to_core_all(rt, inputs, call.layer.strided)
    unknown = call.forward.unknown(rt, inputs, scales, options, False)
    (outputs, saved), tape = call.forward.taped.ran(rt, (*views,), {"scales": scales, **options}, run.caller)
    call.forward.note(unknown, tape)
    made = _own(outputs, inputs)
    slots = call.layer.slots
    if state is not None and slots is not None:
        handovers.note(scaling.FORWARD, state, inputs[: slots.inputs], slots.input, made[0], slots.output)
    known = [*made, *[v.owner for v in views if v is not None]]
    return made, [None if t is None else _in_shape(t, known) for t in saved]


def _in_shape(t: Any, known: Sequence[Any]) -> torch.Tensor:
    """What is saved, as a tensor. What the layer made has the shape that the layer gave it, but for what is `known`
    besides: inputs and outputs."""
    owner: torch.Tensor = t.owner
    own = type(t) is Tensor and owner.shape != t.shape and not any(owner is other for other in known)
    return owner.view(t.shape) if own else owner


def _to_core_all(rt: Runtime, tensors: Sequence[torch.Tensor | None], strided: bool = False) -> list[Any]:
    """Core views of tensors on the runtime's device; made contiguous where they are not, unless `strided` may stay."""
    device = rt.device
    if device is META:
        return [None if t is None else to_core_shape(t) for t in tensors]
    try:
        views = [
            None
            if t is None
            else Tensor(t.data_ptr(), t.shape, TO_CORE[t.dtype], device, t)
            if type(t) in _PLAIN and t.is_contiguous() and not t.is_neg()
            else _to_core_other(t, device, strided)
            for t in tensors
        ]
    except RuntimeError as error:
        for t in tensors:
            _check_memory(t, error)
        raise
    for i, v in enumerate(views):
        if type(v) is Tensor and v.ptr < LOW and v.size and (not v.ptr or was_freed(tensors[i])):  # type: ignore[arg-type]
            views[i] = _of_zeros(tensors[i], device)  # type: ignore[arg-type]
    return views


def _check_memory(t: torch.Tensor | None, error: Exception) -> None:
    """Refuse a tensor that has no values in memory for a layer to read."""
    if t is None or isinstance(t, QuantizedTorch):
        return
    if t.is_nested:
        raise nested("te_torch") from error
    try:
        t.data_ptr()
        return
    except RuntimeError:
        kind = f"a tensor of layout {t.layout}"
        if t.layout is torch.strided:
            kind = "a tensor that torch.func has wrapped (vmap; is_grads_batched and vectorize=True do so, too)"
    raise no_memory("te_torch", kind) from error


def _of_zeros(t: torch.Tensor, device: Device) -> Tensor:
    """The core's view of a tensor that says zeros, with nothing behind it."""
    _check_devices(device, [t])
    if not t._is_zerotensor():
        check_surroundings()  # functionalize wraps tensors in such ones
        raise freed(t) if type(t) in _PLAIN else no_memory("te_torch", f"a {type(t).__name__}")
    zeros = torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    return Tensor(zeros.data_ptr(), zeros.shape, TO_CORE[zeros.dtype], device, zeros)


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
    refuse_dtensor(t)
    if t.is_neg():  # its memory has the other sign
        t = t.resolve_neg()
    strides = None
    if not t.is_contiguous():
        if strided and t.stride(-1) == 1:
            strides = t.stride()
        elif was_freed(t):
            raise freed(t)
        else:
            t = t.contiguous()
    return Tensor(t.data_ptr(), t.shape, TO_CORE[t.dtype], device, t, strides)


# -------------------------------------------------------------------------------------------------- eager


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, *inputs: torch.Tensor | None) -> Any:
        if run.found is None:
            made, saved = ran(run, inputs)
        else:
            rt, replay, given = run.found
            run.found = None  # which would hold what a replay lets go of
            made, saved = replay.forward(rt, *given)
        layer = run.call.layer
        ctx.materialize_grads = False  # as `set_materialize_grads`, a call less
        if offloading.active.noting:
            offloading.note_copies_of_weights([inputs[i] for i in run.call.weights])
            copies = layer.copies(layer.saved(*saved))
            offloading.note_copies_of_weights([t for t in copies if t is not None])
        ctx.to_save = (*saved,)  # as `save_for_backward`, a call less
        ctx.run, ctx.inputs = run, len(inputs)
        if run.extra is not None:
            ctx.weights = run.extra.parameters or [inputs[i] for i in run.call.weights]
        ctx.within = updates.this_pass() if run.recompute and run.state is not None else -1
        if layer.differentiable is not None:
            ctx.mark_non_differentiable(*made[layer.differentiable :])
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():  # only create_graph=True runs a backward in grad mode
            refuse_double_backward()
        call, state, extra = ctx.run.call, ctx.run.state, ctx.run.extra
        if grads[0] is None and not any(g is not None for g in grads):
            return (None,) * (1 + ctx.inputs)
        kept = ctx.saved_tensors  # read once: a checkpoint computes them again at each read
        alone = grads[0] is not None and call.layer.outputs == 1
        given: list[Any] = [grads[0]] if alone else complete(call.layer, grads, kept, call)
        rt = runtime_for(given[0] if given[0] is not None else next(g for g in given if g is not None))
        scales, options, running = None, call.options, state
        if call.layer.reach is not None:
            all_nodes, of_inputs = call.layer.reach(call.spec)
            nodes = _reached(ctx, all_nodes, of_inputs) if len(all_nodes) > 1 else None
            if nodes is not None:
                options = {**options, "nodes": nodes}
            if state is not None and (nodes is not None or len(all_nodes) < len(call.spec.nodes)):
                these = all_nodes if nodes is None else nodes
                of_states = zip(state.each, call.spec.of_states, strict=True)
                running = scaling.States([each for each, node in of_states if node in these])
        if state is not None:
            scales = state.backward_scales()
            updates.ran_backward(running, ctx.within)
        release = call.layer.releases and _frees_saved and not _keep_graph()
        if extra is not None:
            options = {**options, **_options_with(extra, call, ctx.weights)}
        found = call.backward.find(rt, (*given, *kept), scales, options, release)
        if found is not None:
            if release:
                ctx.maybe_clear_saved_tensors()
            replay, (at, held, wholes) = found
            del kept, found  # memory is held by `held` alone, which lets go of it on the way
            return _as_returned(ctx, replay.backward(rt, at, held, wholes), options)
        if call.layer.reach is not None and not call.spec.nodes[-1].products:  # products alone read it as it is
            given = [g.dequantize() if isinstance(g, QuantizedTorch) else g for g in given]
        unknown = call.backward.unknown(rt, (*given, *kept), scales, options, release)
        if rt.device.kind == "cuda":
            kept = [_on_boundary(t, call.layer.strided) for t in kept]
        saved = call.layer.saved(*_to_core_all(rt, kept, call.layer.strided))
        views = _to_core_all(rt, given)
        del kept
        if release:  # not before all of this is known to be right: who was told what is wrong may run it again
            ctx.maybe_clear_saved_tensors()
            options = {**options, "release": True}
        results, tape = call.backward.taped.ran(rt, (*views, saved), {"scales": scales, **options}, ctx.run.caller)
        call.backward.note(unknown, tape)
        gradients, slots = _gradients(call.layer, results, given), call.layer.slots
        if state is not None and slots is not None:
            handovers.note(scaling.BACKWARD, state, given, slots.grad_output, gradients[0], slots.grad_input)
        return _as_returned(ctx, gradients, options)


def _reached(ctx: Any, all_nodes: frozenset[int], of_inputs: Sequence[frozenset[int]]) -> tuple[int, ...] | None:
    """Which nodes of a graph this backward is asked for: autograd.grad and backward(inputs=...) name tensors. None is
    all."""
    functions = ctx.next_functions  # torch makes them at each read
    if not functions:  # it is no node of autograd's: what is around it asks for all
        return None
    needed = ctx.needs_input_grad[1:]
    if needed[0] and len(of_inputs[0]) == len(all_nodes) and _runs(functions[0][0]):  # so ends nearly every call
        return None
    found: frozenset[int] = frozenset()
    asked = iter([node for node, _ in functions if node is not None])
    for nodes, needs in zip(of_inputs, needed, strict=True):
        if needs and _runs(next(asked)):
            found |= nodes
            if found == all_nodes:
                return None
    return tuple(sorted(found))


def _runs(node: Any) -> bool:
    """Whether the backward that runs comes to this node of autograd's."""
    try:
        return _will_run(node)
    except RuntimeError:  # so torch answers of a leaf that autograd.grad is asked for, and outside of its engine
        return True


def _on_boundary(t: Any, whole: bool) -> Any:
    """What is read by 16 bytes, though a hook may bring it back anywhere: quantized values by products, all that
    attention kept (`whole`) by its kernels.
    """
    crooked = t.__class__ is torch.Tensor and t.data_ptr() & 15 and (whole or t.dtype is torch.uint8)
    return t.clone() if crooked else t


def _as_returned(ctx: Any, found: Sequence[torch.Tensor | None], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Gradients as backward returns them: for forward's own arguments first; those at the end were left out perhaps."""
    if ctx.run.extra is not None:
        found = [*found]
        for position, weight, sink in zip(ctx.run.call.weights, ctx.weights, options["sinks"], strict=True):
            if sink is not None and sink.main is not None:
                found[position] = stand_in_gradient(weight)
    missing = ctx.inputs - len(found)
    return (None, *found[: ctx.inputs], *[None] * missing)


def _gradients(layer: Layer, results: Sequence[Any], given: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients as torch's. One for two inputs is one tensor twice: autograd then changes it for neither in place."""
    found: list[torch.Tensor | None] = []
    for t in results:
        if type(t) is Tensor:
            found.append(to_torch(t))
        elif t is None:
            found.append(None)
        else:
            found.append(from_core(t, (*_leading(given[0], t.shape[0]), t.shape[1]), given[0].dtype))
    if layer.twins is not None:
        a, b = layer.twins
        if results[a] is results[b]:
            found[b] = found[a]
    dx = found[0]
    if dx is not None and isinstance(given[0], QuantizedTorch) and dx.ndim == 2:  # a matrix to the core, as dy was
        found[0] = dx.view(*_leading(given[0], dx.shape[0]), dx.shape[1])
    return found


def _options_with(extra: Extra, call: Call, weights: Sequence[torch.Tensor | None]) -> dict[str, Any]:
    """The options of a backward whose weight gradients go elsewhere: into `main_grad`, or into a queue."""
    sinks = [_sink(w, extra, i) if w is not None and w.requires_grad else None for i, w in enumerate(weights)]
    options = {**call.options, **extra.options(), "sinks": sinks}
    if call.layer.recomputes and extra.ready is not None:
        options["ready"] = extra.ready
    return options


def _sink(weight: torch.Tensor, extra: Extra, index: int) -> Sink | None:
    main: Any = None
    accumulate = False
    if extra.fused:
        main, accumulate = main_gradient("fuse_wgrad_accumulation", weight)
        accumulate = accumulate and extra.first_microbatch is not True
    if main is None and extra.queue is None:
        return None
    queue = None if extra.queue is None else extra.queue[index]
    return Sink(None if main is None else in_place(main), accumulate, queue)


def main_gradient(option: str, weight: Any) -> tuple[Any, bool]:
    """(where a weight's gradient goes, whether it is added to what is there), for who has set this option."""
    main = weight.get_main_grad() if hasattr(weight, "get_main_grad") else getattr(weight, "main_grad", None)
    if not _takes(main, weight):
        raise _no_main_grad(option, main, weight)
    return main, not getattr(weight, "overwrite_main_grad", False)


def _takes(main: Any, weight: torch.Tensor) -> bool:
    """Whether a weight's gradient can be written there: it is, as the memory lies."""
    return (
        isinstance(main, torch.Tensor)
        and main.shape == weight.shape
        and main.dtype in FLOATS
        and main.device == weight.device
        and main.is_contiguous()
        and not main.is_neg()
    )


def _no_main_grad(option: str, main: Any, weight: torch.Tensor) -> ArgumentError:
    if main is None:
        came = "a weight without main_grad"
    elif isinstance(main, torch.Tensor):
        lies = f"strides {main.stride()}" if main.layout is torch.strided else f"layout {main.layout}"
        sign = " and torch's negative bit" if main.is_neg() else ""
        came = f"main_grad of shape {tuple(main.shape)} with {lies}{sign} in {main.dtype} on {main.device}"
    else:
        came = f"main_grad, a {type(main).__name__}"
    shape, device = tuple(weight.shape), weight.device
    return ArgumentError(
        option,
        came,
        f"a contiguous tensor of the weight's shape {shape} on {device}, in float32, bfloat16 or float16",
        "set it before backward: weight.main_grad = torch.zeros(weight.shape, device=weight.device), or a part of a "
        "buffer: buffer[begin : begin + weight.numel()].view(weight.shape); with fully_shard, whose gathered weights "
        f"are new ones in each step, leave {option} out",
    )


def stand_in_gradient(weight: torch.Tensor) -> torch.Tensor | None:
    """What autograd gets when the gradient went into `main_grad`: nothing, or, for hooks that wait for one, a dummy."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    fill = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return fill(weight.shape, dtype=weight.dtype, device=weight.device)


#: (run, *inputs) -> outputs. `Function.apply` looks for functorch wrappers in every argument: 3 us of 9.
run_node: Any = super(torch.autograd.Function, _Eager).apply
#: The same backward for who is himself a node of autograd's: its `ctx` stands for a node.
backward_of: Any = _Eager.backward
#: Whether torch lets a backward free what was saved before it has ended (2.11).
_frees_saved = hasattr(_Eager, "maybe_clear_saved_tensors")
_keep_graph = torch._C._autograd._get_current_graph_task_keep_graph
_will_run = torch._C._will_engine_execute_node


def refuse_double_backward() -> None:
    """What a backward does that runs in grad mode."""
    raise UnsupportedError(
        "backward", "create_graph=True", "first derivatives", "use torch.nn layers where second ones are needed"
    )
