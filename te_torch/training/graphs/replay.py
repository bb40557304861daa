"""What the caller gets: a callable that copies its arguments into the static ones, replays, and hands out what the
graphs have written, as one autograd function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from te_torch.base.replicated import check_reduced
from te_torch.base.weights import add_gradient
from te_torch.training.graphs import device as seam
from te_torch.training.graphs.record import OPERATION, unsupported, wrong
from te_torch.training.graphs.unit import Unit


class _Call(NamedTuple):
    """How one call is replayed."""

    first: bool  # the first microbatch
    stream: Any  # on which; None: the caller's
    event: Any
    grad: bool  # whether the caller is in grad mode


class Graphed:
    """A captured callable, and the one that runs where it does not fit."""

    def __init__(self, unit: Unit, eager: Callable[..., Any]) -> None:
        self.unit, self.eager = unit, eager
        self.runs = 0  # replays of the forward
        self.waits = False  # for the backward of the last one
        self.put_off = 0  # weight gradients whose backward was replayed
        options = unit.options
        self.takes_microbatch = options.cached and "is_first_microbatch" in inspect.signature(eager).parameters
        self._needs = [t.requires_grad for t in unit.inputs]
        self._frozen = [(name, p) for name, p in unit.module.named_parameters() if not p.requires_grad]
        self._seen = [(t.shape, t.dtype, t.device) for t in unit.inputs]
        #: Parameters whose gradient is handed out as it is.
        self._bare = [getattr(p, "skip_backward_post_hook", False) or not options.clone for p in unit.parameters]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay, or run eagerly in the other mode than at the capture, and after reset()."""
        unit = self.unit
        if not unit.graphs or unit.module.training != unit.options.training:
            own = {"cuda_graph_stream", "cuda_graph_event"}
            if unit.options.cached and not self.takes_microbatch:
                own.add("is_first_microbatch")
            return self.eager(*args, **{name: value for name, value in kwargs.items() if name not in own})
        first = unit.options.cached and kwargs.pop("is_first_microbatch", None)
        if not isinstance(first, bool):
            raise wrong(
                f"is_first_microbatch={first!r}" if first is not None else "no is_first_microbatch",
                "True or False in every call: it was captured with cache_quantized_params=True",
                "pass is_first_microbatch=True in the first microbatch of a step, else False",
            )
        grad = torch.is_grad_enabled()  # here: it is off inside of an autograd function
        call = _Call(first, kwargs.pop("cuda_graph_stream", None), kwargs.pop("cuda_graph_event", None), grad)
        leaves = self._leaves(args, kwargs)
        unit.record.check()
        if grad and "backward" in unit.graphs:
            made = _Replay.apply(self, call, *leaves, *unit.parameters)
        else:
            made = self.replay_forward(call, leaves)
        return tree_unflatten(list(made), unit.output_spec)

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The tensors of a call, which are as those of the capture were."""
        unit = self.unit
        if set(kwargs) != set(unit.names):
            lacks, more = sorted(set(unit.names) - set(kwargs)), sorted(set(kwargs) - set(unit.names))
            raise TypeError(
                f"{OPERATION}: got keyword arguments without {lacks} and with {more}. Allowed: those of sample_kwargs, "
                f"{list(unit.names)}. To do: pass every one of them by name, and no other."
            )
        leaves, spec = tree_flatten((args, {name: kwargs[name] for name in unit.names}))
        if spec != unit.spec:
            raise TypeError(
                f"{OPERATION}: got arguments of another structure than sample_args: {spec}. Allowed: {unit.spec}. "
                "To do: pass as many arguments, in the same containers."
            )
        grad = torch.is_grad_enabled() and unit.options.training
        for i, (t, seen, needs) in enumerate(zip(leaves, self._seen, self._needs, strict=True)):
            if not isinstance(t, torch.Tensor):
                raise TypeError(
                    f"{OPERATION}: got {type(t).__name__} as argument {i}. Allowed: a tensor. To do: pass one."
                )
            if (t.shape, t.dtype, t.device) != seen:
                raise wrong(
                    f"argument {i} {list(t.shape)} of {t.dtype} on {t.device}",
                    f"what was captured: {list(seen[0])} of {seen[1]} on {seen[2]}",
                    "capture another callable for these sizes, or pad the argument",
                )
            if grad and t.requires_grad and not needs:
                raise wrong(
                    f"argument {i}, which requires grad",
                    "an argument that does not: its sample did not, and its gradient was not captured",
                    "capture with a sample that requires grad, or detach the argument",
                )
        for name, p in self._frozen if grad else ():
            if p.requires_grad:
                raise wrong(
                    f"parameter {name}, which requires grad",
                    "a parameter that does not: it did not at the capture, and its gradient was not captured",
                    "call reset() and make_graphed_callables again, or clear its requires_grad",
                )
        return leaves

    # ------------------------------------------------------------------------------------------- replays

    def replay_forward(self, call: _Call, leaves: Sequence[Any]) -> list[Any]:
        """The outputs, over the static ones' memory."""
        unit = self.unit
        with torch.no_grad():
            for static, t in zip(unit.inputs, leaves, strict=False):
                if static.data_ptr() != t.data_ptr() or static.stride() != t.stride():
                    static.copy_(t)
        update = unit.record.mark_forward()
        graphs = [graph for weights in unit.weights for graph in weights.due(call.first)]
        seam.device.replay((*graphs, unit.graphs["forward"]), call.stream, call.event)
        if update and call.grad:
            unit.record.update()
        self.runs += 1
        self.waits = True
        return [t.detach() if isinstance(t, torch.Tensor) else t for t in unit.outputs]

    def replay_backward(self, run: int, call: _Call, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of the static inputs, over their memory, and of the parameters."""
        unit = self.unit
        if run != self.runs or not self.waits or not self.unit.graphs:
            gone = "whose graphs were let go of by reset()" if not self.unit.graphs else "of an earlier call"
            raise unsupported(
                f"a backward {gone if run != self.runs or not self.unit.graphs else 'that has run already'}",
                "one backward, of the last call: what it reads lies in memory that the next call overwrites",
                "run each backward before the next call, or capture a callable for each microbatch (_order); "
                "retain_graph_in_backward=True allows to repeat one",
            )
        unit.record.check_memory()
        given = [g for g, t in zip(grads, unit.outputs, strict=True) if isinstance(t, torch.Tensor) and t.requires_grad]
        with torch.no_grad():
            for static, grad in zip(unit.grad_outputs, given, strict=True):
                if grad is None:
                    static.zero_()
                elif static.data_ptr() != grad.data_ptr() or static.stride() != grad.stride():
                    static.copy_(grad)
            if call.first:  # the graph adds to them
                for main in unit.mains:
                    main.zero_()
        unit.record.mark_backward()
        seam.device.replay((unit.graphs["backward"],), call.stream, call.event)
        self.waits = unit.options.retain
        self.put_off += "weight gradients" in unit.graphs
        for p in unit.told:
            p.grad_added_to_main_grad = True
        return self._handed_out()

    def _handed_out(self) -> list[torch.Tensor | None]:
        unit = self.unit
        made = iter(unit.grads)
        found: list[torch.Tensor | None] = [next(made) if needs else None for needs in self._needs]
        found = [g if g is None else g.detach() for g in found]
        grads = list(zip(made, self._bare, strict=True))
        copied = [grad for grad, bare in grads if grad is not None and not bare]
        fresh = [torch.empty_like(grad) for grad in copied]
        if copied:
            torch._foreach_copy_(fresh, copied)  # in a launch or two
        copies = iter(fresh)
        return [*found, *[g if g is None else g.detach() if bare else next(copies) for g, bare in grads]]

    def backward_dw(self) -> None:
        """The weight gradients that the last backward put off."""
        unit = self.unit
        if not self.put_off or "weight gradients" not in unit.graphs:
            for module in unit.delayed:  # what an eager backward may have put off
                module.backward_dw()
            return
        self.put_off = 0
        unit.record.check_memory()
        unit.graphs["weight gradients"].replay()
        with torch.no_grad():
            for weight, dw in unit.later:
                add_gradient(weight, dw if dw is None or not unit.options.clone else dw.clone())
        for module in unit.delayed:
            check_reduced(module)
            for hook in module._wgrad_hooks:
                hook()

    def reset(self) -> None:
        """Let go of the graphs and their memory; from now on the callable runs eagerly."""
        weights = self.unit.weights
        self.unit.reset()
        for one in weights:
            one.users -= 1
            if not one.users:
                one.reset()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphed: Graphed, call: _Call, *inputs: Any) -> Any:
        made = graphed.replay_forward(call, inputs)
        ctx.graphed, ctx.call, ctx.run = graphed, call, graphed.runs
        ctx.set_materialize_grads(False)
        plain = [
            t
            for t, static in zip(made, graphed.unit.outputs, strict=True)
            if isinstance(t, torch.Tensor) and not static.requires_grad
        ]
        ctx.mark_non_differentiable(*plain)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return (None, None, *ctx.graphed.replay_backward(ctx.run, ctx.call, grads))


# ---------------------------------------------------------------------------------------- a module's methods


class Replaced:
    """What stands in the place of a module's method. A copy of the module, or one that is loaded, has its own again."""

    def __init__(self, module: torch.nn.Module, name: str, does: Callable[..., Any]) -> None:
        self.module, self.name, self.does = module, name, does
        self.graphed = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What it does in the method's place."""
        return self.does(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _of_class, (self.module, self.name)


def _of_class(module: torch.nn.Module, name: str) -> Callable[..., Any]:
    """The module's own method of this name; one that does nothing where it has none."""
    method = getattr(type(module), name, None)
    return _nothing if method is None else MethodType(method, module)


def _nothing() -> None:
    """What `reset` and `backward_dw` do on a copy of a graphed module, which is none."""


def put_into(module: torch.nn.Module, graphed: Graphed) -> torch.nn.Module:
    """Have the module replay."""

    def reset() -> None:
        graphed.reset()
        for name in ("forward", "backward_dw", "reset"):
            if isinstance(module.__dict__.get(name), Replaced):
                delattr(module, name)

    for name, does in (("forward", graphed), ("backward_dw", graphed.backward_dw), ("reset", reset)):
        module.__dict__[name] = Replaced(module, name, does)
    return module


def as_function(graphed: Graphed) -> Callable[..., Any]:
    """The same as a plain function."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return graphed(*args, **kwargs)

    function.backward_dw, function.reset = graphed.backward_dw, graphed.reset  # type: ignore[attr-defined]
    return function
