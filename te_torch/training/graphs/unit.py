"""One callable on its way to graphs: a module with static inputs, run for warm-up, then captured.

Three works: forward, backward, and the weight gradients that modules with `delay_wgrad_compute` put off. Each leaves
what the next one needs in the unit (`live`), and each can be run at any time after the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from te_torch import state as scaling
from te_torch.base.module import BaseModule
from te_torch.training.graphs import device as seam
from te_torch.training.graphs.arguments import How, Options
from te_torch.training.graphs.device import unsupported
from te_torch.training.graphs.record import Record, captured_in, ran_since, versions
from te_torch.training.graphs.traces import main_grads, told
from te_torch.training.graphs.weights import Weights

Hooks = dict[str, list[Callable[[Any], Any]]]


class Unit:
    """A module with static inputs, its graphs, and the static tensors that these write."""

    def __init__(
        self,
        module: torch.nn.Module,
        sample: tuple[tuple[Any, ...], dict[str, Any]],
        how: How,
        options: Options,
        hooks: Hooks,
    ) -> None:
        self.module, self.how, self.options, self.hooks = module, how, options, hooks
        args, kwargs = sample
        self.run = module.forward  # as it is now: a graphed module has another one
        self.names = tuple(sorted(kwargs))  # of the keyword arguments
        self.inputs, self.spec = tree_flatten((args, {name: kwargs[name] for name in self.names}))
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.record = Record(how, module)
        self.tokens: list[int] = []  # of the states that the last forward ran
        self.ran: dict[int, None] = {}  # of those whose backward ran
        self.delayed = [m for m in module.modules() if isinstance(m, BaseModule) and m.need_backward_dw()]
        self.weights: Sequence[Weights] = ()
        # What a work leaves to the next one.
        self.live: list[Any] = []
        self.warmed = 0
        self.accumulates = False  # gradients come by way of .grad: a reentrant checkpoint inside wants it so
        # What graphs write.
        self.graphs: dict[str, Any] = {}
        self.outputs: list[Any] = []
        self.output_spec: Any = None
        self.grad_outputs: list[torch.Tensor] = []  # one for each output that requires grad
        self.grads: list[torch.Tensor | None] = []  # of inputs that require grad, then of `parameters`
        self.later: list[tuple[Any, torch.Tensor | None]] = []  # weights and their delayed gradients
        self.told: list[Any] = []  # parameters whose trainer is told that the gradient is in main_grad
        self.mains: list[torch.Tensor] = []  # buffers of gradients that a first microbatch overwrites

    # ------------------------------------------------------------------------------------------ the works

    def forward(self) -> list[Any]:
        """Run the module on the static inputs."""
        args, kwargs = tree_unflatten(self.inputs, self.spec)
        before = versions()
        with captured_in(self.how) as ran, torch.set_grad_enabled(self.options.training):
            found = self.run(*args, **kwargs)
            self.tokens = ran_since(before, ran)
        self.live, self.output_spec = tree_flatten(found)
        return self.live

    def differentiable(self) -> list[torch.Tensor]:
        """The outputs of the last forward that have gradients."""
        return [t for t in self.live if isinstance(t, torch.Tensor) and t.requires_grad]

    def backward(self) -> list[torch.Tensor | None]:
        """The gradients of the static inputs that require one, then of the parameters."""
        outputs = self.differentiable()
        wanted = [t for t in self.inputs if t.requires_grad]
        with scaling.noting(self.tokens, self.ran), torch.enable_grad():
            return self._gradients(outputs, [*wanted, *self.parameters])

    def _gradients(self, outputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[torch.Tensor | None]:
        if not self.accumulates:
            options = {"allow_unused": True, "retain_graph": self.options.retain}
            try:
                return list(torch.autograd.grad(outputs, wanted, self.grad_outputs, **options))
            except RuntimeError as error:
                if "use_reentrant" not in str(error) or self.graphs:
                    raise
                self.accumulates = True
                self.forward()  # what it had computed may be gone
                outputs = self.differentiable()
        kept = [t.grad for t in wanted]
        try:
            for t in wanted:
                t.grad = None
            torch.autograd.backward(outputs, self.grad_outputs, retain_graph=self.options.retain)
            return [t.grad for t in wanted]
        finally:
            for t, grad in zip(wanted, kept, strict=True):
                t.grad = grad

    def weight_gradients(self) -> list[tuple[Any, torch.Tensor | None]]:
        """The oldest gradients that were put off, beside their weights; None for what went into `main_grad`."""
        found: list[tuple[Any, torch.Tensor | None]] = []
        with torch.no_grad():
            for module in self.delayed:
                weights = [getattr(module, name) for name in module._weight_names()]
                found += zip(weights, module.wgrad_store.pop(weights), strict=True)
        return found

    # ------------------------------------------------------------------------------------------- warm-up

    def warm_forward(self) -> None:
        """A forward that counts for nothing."""
        self.call_hooks("forward_pre_hooks")
        self.forward()
        self.call_hooks("forward_hooks")
        if not self.grad_outputs:
            self.grad_outputs = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in self.differentiable()]

    def warm_backward(self) -> None:
        """Its backward, by which the parameters that have no gradient are found."""
        if self.grad_outputs:
            self.call_hooks("backward_pre_hooks")
            grads = self.backward()
            self._check_inputs(grads)
            # In the first run those without a gradient are forgotten.
            of_parameters = zip(self.parameters, grads[self._inputs_with_grad() :], strict=True)
            used = [p for p, grad in of_parameters if grad is not None]
            if self.warmed and len(used) != len(self.parameters):
                raise unsupported(
                    f"parameters of {type(self.module).__name__} that got a gradient at first and then none",
                    "the same parameters in every step",
                    "capture what always runs, and call the rest outside",
                )
            self.parameters = used
            self.call_hooks("backward_hooks")
        self.live = []
        self.warmed += 1

    def _check_inputs(self, grads: list[torch.Tensor | None]) -> None:
        if any(g is None for g in grads[: self._inputs_with_grad()]) and not self.options.allow_unused:
            raise unsupported(
                f"sample_args of {type(self.module).__name__} that require grad and get none",
                "inputs that the outputs depend on",
                "clear requires_grad of the others, or pass allow_unused_input=True",
            )

    def call_hooks(self, kind: str) -> None:
        """The caller's hooks of this kind."""
        for hook in self.hooks.get(kind, ()):
            if hook(self.module) is not None:
                raise unsupported(f"a result of one of the {kind}", "hooks that return None", "change tensors in place")

    # ------------------------------------------------------------------------------------------- capture

    def capture(self, what: str, work: Callable[[], Any], generators: Iterable[torch.Generator], pool: Any) -> Any:
        """A graph of the work, under this name."""
        graph = seam.device.graph(generators)
        made = graph.capture(work, pool)
        self.graphs[what] = graph
        return made

    def capture_forward(self, generators: Iterable[torch.Generator], pool: Any) -> None:
        """The forward's graph."""
        self.call_hooks("forward_pre_hooks")
        made = self.capture("forward", self.forward, generators, pool)
        self.call_hooks("forward_hooks")
        self.outputs = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in made]
        found = self.differentiable()
        if [t.shape for t in found] != [t.shape for t in self.grad_outputs]:  # there was no warm-up
            self.grad_outputs = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in found]

    def capture_backward(self, generators: Iterable[torch.Generator], pool: Any) -> None:
        """The backward's graph."""
        if not self.grad_outputs:
            self._captured()
            return
        flags = told([*self.module.modules()])
        for p in flags:
            p.grad_added_to_main_grad = False
        self.call_hooks("backward_pre_hooks")
        self.grads = self.capture("backward", self.backward, generators, pool)
        self.call_hooks("backward_hooks")
        self._check_inputs(self.grads)
        self.told = [p for p in flags if p.grad_added_to_main_grad]
        self._captured()

    def _inputs_with_grad(self) -> int:
        return sum(t.requires_grad for t in self.inputs)

    def _captured(self) -> None:
        """Forward and backward are done: keep what replays mark, drop what autograd held."""
        self.live = []
        self.record.take(self.tokens, self.ran)
        for weight, main in main_grads(self.module.modules()):
            if weight.requires_grad and not getattr(weight, "overwrite_main_grad", False):
                self.mains.append(main)

    def capture_weight_gradients(self, generators: Iterable[torch.Generator], pool: Any) -> None:
        """The graph of what was put off, if anything was."""
        if self.delayed and "backward" in self.graphs:
            self.later = self.capture("weight gradients", self.weight_gradients, generators, pool)

    def lend(self) -> None:
        """Let later captures use the memory of what has been read by the time that they are replayed."""
        lent = seam.device.borrowed
        self.outputs = [
            lent(t.detach()).requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in self.outputs
        ]
        if self.options.clone:
            count = self._inputs_with_grad()
            self.grads[count:] = [g if g is None else lent(g) for g in self.grads[count:]]

    def reset(self) -> None:
        """Let go of the graphs and of all static tensors."""
        for graph in self.graphs.values():
            graph.reset()
        self.graphs = {}
        self.outputs, self.grads, self.grad_outputs, self.inputs = [], [], [], []
        self.later, self.mains, self.ran = [], [], {}
        self.weights = ()
