"""A chain of operations as one function of autograd: which are fused, where extra tensors go, what is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch.autograd.function import once_differentiable

from te_core.errors import ArgumentError
from te_core.recipe import Recipe
from te_torch import updates
from te_torch.doors import never_traced
from te_torch.ops.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from te_torch.precisions import precision_of, recipe_of
from te_torch.tensors.base import prepare_for_saving, restore_from_saved

#: What fuses: the operations of a chain, with some of them replaced by fused ones.
Fusion = Callable[..., list[FusibleOperation]]
#: A basic or fused operation, and the numbers of the basic ones that it stands for.
Placed = tuple[Any, list[int]]


class OperationFuser:
    """A chain of operations. What it fuses is decided in its first call, and again where the recipe's class, or what
    requires gradients, is another one."""

    forward_backward_fusion_functions: ClassVar[list[Fusion]] = []
    forward_fusion_functions: ClassVar[list[Fusion]] = []
    backward_fusion_functions: ClassVar[list[Fusion]] = []

    _forward_ops: list[Placed]
    _backward_ops: list[Placed]

    def __init__(self, ops: Iterable[FusibleOperation]) -> None:
        basic: list[BasicOperation] = []
        for op in ops:
            basic += op.basic_ops if isinstance(op, FusedOperation) else [op]  # type: ignore[list-item]
        self._basic_ops, self._num_basic_ops = basic, len(basic)
        self._key: Any = None
        self._route()

    def _route(self) -> None:
        """Where each extra input comes from: the caller (None), or an extra output of an operation before."""
        producers: dict[str, tuple[int, int]] = {}
        for i, op in enumerate(self._basic_ops):
            for slot, (channel, _) in op._output_channels.items():
                if channel in producers:
                    raise _channel_error(channel, "has multiple producers", "give each producer a channel of its own")
                producers[channel] = i, slot
        self._basic_op_extra_input_sources: list[list[tuple[int, int] | None]] = []
        for i, op in enumerate(self._basic_ops):
            sources: list[tuple[int, int] | None] = [None] * op.num_extra_inputs
            for slot, channel in op._input_channels.items():
                if channel not in producers:
                    raise _channel_error(channel, "has no producer", "set it as an extra output's, in the same chain")
                if producers[channel][0] >= i:
                    raise _channel_error(channel, "has no earlier producer", "put what produces it first")
                sources[slot] = producers[channel]
            self._basic_op_extra_input_sources.append(sources)
        self.num_extra_inputs = sum(sources.count(None) for sources in self._basic_op_extra_input_sources)
        self._public = [
            [op._output_channels.get(slot, ("", True))[1] for slot in range(op.num_extra_outputs)]
            for op in self._basic_ops
        ]
        for op in self._basic_ops:
            op.__dict__["_extra_tensor_channels_locked"] = True

    # ------------------------------------------------------------------------------------------------ fusing

    def maybe_fuse_ops(self, first: int, recipe: Recipe | None) -> None:
        """Decide what is fused, if that depends on something that has changed. `first`: see `_first_with_backward`."""
        length = recipe.amax_history_len if recipe is not None and recipe.delayed() else None  # type: ignore[attr-defined]
        key = type(recipe), first, getattr(recipe, "backward_override", None), length
        if key == self._key:
            return
        for op in self._basic_ops:
            op.reset_recipe_state(recipe=recipe)
        if self._key is None:
            for op in self._basic_ops:
                op.pre_first_fuser_forward()
        joint = _fused(list(self._basic_ops), self.forward_backward_fusion_functions, recipe)
        self._forward_ops = self._placed(_fused(joint, self.forward_fusion_functions, recipe))
        self._backward_ops = self._placed(_fused(joint, self.backward_fusion_functions, recipe))
        self._key = key

    def _placed(self, ops: list[FusibleOperation]) -> list[Placed]:
        placed: list[Placed] = []
        expanded: list[Any] = []
        for op in ops:
            covered = list(op.basic_ops) if isinstance(op, FusedOperation) else [op]
            placed.append((op, list(range(len(expanded), len(expanded) + len(covered)))))
            expanded += covered
        if len(expanded) != self._num_basic_ops or any(
            a is not b for a, b in zip(expanded, self._basic_ops, strict=True)
        ):
            raise RuntimeError(
                f"a fusion made {_names(expanded)} of {_names(self._basic_ops)}. Allowed: fused operations that stand "
                "for all of them, in their order. To do: correct the function that was registered"
            )
        return placed

    def _first_with_backward(self, x: torch.Tensor, given: list[tuple[Any, ...]]) -> int:
        """The number of the first operation that backward comes to; as many as there are if it comes to none."""
        if not torch.is_grad_enabled():
            return self._num_basic_ops
        if x.requires_grad:
            return 0
        for i, op in enumerate(self._basic_ops):
            tensors = [*op.parameters(), *[t for t in given[i] if t is not None]]
            if any(t.requires_grad for t in tensors):
                return i
        return self._num_basic_ops

    # ----------------------------------------------------------------------------------------------- running

    @never_traced("a chain of te.ops decides in each call what it fuses")
    def __call__(
        self,
        input: torch.Tensor,  # noqa: A002
        *extra_inputs: torch.Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """The output, or a tuple of it and the extra outputs that are returned to the caller."""
        if len(extra_inputs) != self.num_extra_inputs:
            raise ArgumentError(
                f"a chain of {_names(self._basic_ops)}",
                f"{len(extra_inputs)} extra inputs",
                f"{self.num_extra_inputs} extra inputs",
                "pass one for each that no channel provides, in the order of the operations",
            )
        left = iter(extra_inputs)
        given = [
            tuple([next(left) if source is None else None for source in sources])
            for sources in self._basic_op_extra_input_sources
        ]
        entered = [op._enter_chain(input.device) for op in self._basic_ops]
        number = next((n for n, _, _ in entered if n), 0)
        recipe = recipe_of(number)
        first = self._first_with_backward(input, given)
        self.maybe_fuse_ops(first, recipe)
        for i, op in enumerate(self._basic_ops):
            op.pre_fuser_forward(requires_grad=i >= first)
        run = _Run(self, entered, given, basic_op_kwargs)
        run.contexts = [OperationContext() for _ in self._basic_ops]
        for i, context in enumerate(run.contexts):
            context.requires_grad = i >= first
            context.input_requires_grad = i > first or (i == first and input.requires_grad)
            context.precision = precision_of(number)
        input._do_not_clear = True  # type: ignore[attr-defined]  # as documented: operations free what they made alone
        if first < self._num_basic_ops:
            parameters = [p for op in self._basic_ops for p in op.parameters()]
            found = _Chain.apply(run, input, *parameters, *extra_inputs)  # type: ignore[no-untyped-call]
        else:
            found = run.forward(input)
        return found if len(found) > 1 else found[0]


def _fused(ops: list[FusibleOperation], functions: Sequence[Fusion], recipe: Recipe | None) -> list[FusibleOperation]:
    for function in functions:
        ops = function(ops, recipe=recipe)
    return ops


def _names(ops: Iterable[Any]) -> str:
    return ", ".join(type(op).__name__ for op in ops)


def _channel_error(channel: str, what: str, do: str) -> ArgumentError:
    return ArgumentError("a chain of operations", f"channel {channel!r}, which {what}", "one producer before", do)


class _Run:
    """One forward of a chain, and its backward."""

    def __init__(self, fuser: OperationFuser, entered: list[Any], given: list[Any], kwargs: Any) -> None:
        self.ops, self.forward_ops, self.backward_ops = fuser._basic_ops, fuser._forward_ops, fuser._backward_ops
        self.sources, self.public = fuser._basic_op_extra_input_sources, fuser._public
        self.entered, self.given = entered, given
        self.kwargs: list[dict[str, Any]] = kwargs or [{} for _ in self.ops]
        self.contexts: list[OperationContext] = []
        self.consumed = {
            (source, i) for i, sources in enumerate(self.sources) for source in sources if source is not None
        }

    def forward(self, x: Any) -> tuple[torch.Tensor, ...]:
        """The output and the extra outputs that are returned."""
        made: list[tuple[Any, ...]] = [()] * len(self.ops)
        for op, places in self.forward_ops:
            for i in places:
                self._fill(i, places, made)
            before, behind = places[0] - 1, places[-1] + 1
            x, extra = op.fuser_forward(
                [self.contexts[i] for i in places],
                x,
                basic_op_extra_inputs=[self.given[i] for i in places],
                prev_op_grad_output_quantizer=self.ops[before].get_grad_output_quantizer() if before >= 0 else None,
                next_op_input_quantizer=self.ops[behind].get_input_quantizer() if behind < len(self.ops) else None,
                basic_op_kwargs=[self.kwargs[i] for i in places],
            )
            extra = [tuple(outputs) for outputs in extra]
            self._check_extra(op, places, extra)
            for i, outputs in zip(places, extra, strict=True):
                made[i] = outputs
                for t in outputs if self.contexts[i].requires_grad else ():
                    if t is not None and t.is_floating_point() and not t.requires_grad:
                        t.requires_grad_()
        self.given = []
        return x, *[t for i, outputs in enumerate(made) for t, shown in zip(outputs, self.public[i], strict=True) if shown]

    def _fill(self, i: int, places: list[int], made: list[tuple[Any, ...]]) -> None:
        """The extra inputs that come from operations before, but for those of the same fused one, which knows them."""
        if any(source is not None for source in self.sources[i]):
            self.given[i] = tuple(
                given if source is None or source[0] in places else made[source[0]][source[1]]
                for given, source in zip(self.given[i], self.sources[i], strict=True)
            )

    def _check_extra(self, op: Any, places: list[int], extra: list[tuple[Any, ...]]) -> None:
        name, counts = type(op).__name__, [self.ops[i].num_extra_outputs for i in places]
        if [len(outputs) for outputs in extra] != counts:
            raise RuntimeError(
                f"{name}.fuser_forward returned {[len(o) for o in extra]} extra outputs of its basic operations. "
                f"Allowed: {counts}. To do: return a tuple for each operation, with None for what nobody reads"
            )
        for i, outputs in zip(places, extra, strict=True):
            for slot, t in enumerate(outputs):
                outside = any(producer == (i, slot) and by not in places for producer, by in self.consumed)
                if t is None and (self.public[i][slot] or outside):
                    why = "is public" if self.public[i][slot] else "is read outside its forward fusion"
                    raise RuntimeError(f"{name}.fuser_forward returned None for extra output {slot}, which {why}")

    def backward(self, grad: Any, of_caller: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
        """(the input's gradient, those of all parameters, those of the caller's extra inputs)."""
        left = iter(of_caller)
        extra = [[next(left) if shown else None for shown in public] for public in self.public]
        of_parameters: list[Any] = [None] * len(self.ops)
        of_inputs: list[Any] = [None] * len(self.ops)
        for op, places in reversed(self.backward_ops):
            contexts = [self.contexts[i] for i in places]
            if not any(context.requires_grad for context in contexts):
                grad = None
                break
            grad, parameters, inputs = op.fuser_backward(
                contexts, grad, basic_op_grad_extra_outputs=[tuple(extra[i]) for i in places]
            )
            for i, context, some, others in zip(places, contexts, parameters, inputs, strict=True):
                context.saved_tensors = ()
                of_parameters[i] = self._checked(op, "parameters", some, len([*self.ops[i].parameters()]))
                of_inputs[i] = self._checked(op, "extra inputs", others, self.ops[i].num_extra_inputs)
                for source, t in zip(self.sources[i], of_inputs[i], strict=True):
                    if source is not None and source[0] not in places and t is not None:
                        before = extra[source[0]][source[1]]
                        extra[source[0]][source[1]] = t if before is None else before + t
        else:
            if not self.contexts[0].input_requires_grad:
                grad = None
        flat = []
        for i, op in enumerate(self.ops):
            found = of_parameters[i]
            flat += [None] * len([*op.parameters()]) if found is None else found
        inputs = [
            None if of_inputs[i] is None else of_inputs[i][slot]
            for i, sources in enumerate(self.sources)
            for slot, source in enumerate(sources)
            if source is None
        ]
        return grad, flat, inputs

    def _checked(self, op: Any, what: str, gradients: Any, count: int) -> list[Any]:
        found = [None] * count if gradients is None else [*gradients]
        if len(found) != count:
            raise RuntimeError(
                f"{type(op).__name__}: backward returned {len(found)} gradients for {count} {what}. To do: return one, "
                "or None, for each"
            )
        return found


class _Chain(torch.autograd.Function):
    """A chain as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, run: _Run, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        outputs = [*run.forward(x)]
        known = {id(t) for t in (x, *rest)}
        for i, t in enumerate(outputs):
            if id(t) in known:  # to autograd an output is a tensor of its own
                outputs[i] = t.detach()
            known.add(id(outputs[i]))
        saved = [t for context in run.contexts for t in context.to_save]
        flat, ctx.objects = prepare_for_saving(*saved)
        ctx.save_for_backward(*flat)
        ctx.counts = [len(context.to_save) for context in run.contexts]
        for context in run.contexts:
            context.to_save = ()
        ctx.run, ctx.like = run, (outputs[0].shape, outputs[0].dtype, outputs[0].device)
        ctx.set_materialize_grads(False)
        again = any(again for _, state, again in run.entered if state is not None)
        ctx.within = updates.this_pass() if again else -1
        for t in outputs:
            t._do_not_clear = True
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        run: _Run = ctx.run
        left = iter(restore_from_saved(ctx.objects, ctx.saved_tensors))
        for context, count in zip(run.contexts, ctx.counts, strict=True):
            context.saved_tensors = tuple([next(left) for _ in range(count)])
        for (_, state, _), context in zip(run.entered, run.contexts, strict=True):
            if state is not None and context.requires_grad:
                updates.ran_backward(state, ctx.within)
        grad, *extra = grads
        if grad is None:
            shape, dtype, device = ctx.like
            grad = torch.zeros(shape, dtype=dtype, device=device)
        dx, parameters, inputs = run.backward(grad, extra)
        return None, dx, *parameters, *inputs


def _register(functions: list[Fusion], function: Fusion, prepend: bool) -> None:
    functions.insert(0, function) if prepend else functions.append(function)


def register_forward_fusion(func: Fusion, prepend: bool = False) -> None:
    """Have `func(ops, recipe=recipe)` fuse operations in the forward of chains.

    Args:
        func: Returns the list of operations with some of them replaced by a `FusedOperation` of them.
        prepend: Whether it is asked before those that were registered before.
    """
    _register(OperationFuser.forward_fusion_functions, func, prepend)


def register_backward_fusion(func: Fusion, prepend: bool = False) -> None:
    """Have `func(ops, recipe=recipe)` fuse operations in the backward of chains.

    Args:
        func: Returns the list of operations with some of them replaced by a `FusedOperation` of them.
        prepend: Whether it is asked before those that were registered before.
    """
    _register(OperationFuser.backward_fusion_functions, func, prepend)


def register_forward_backward_fusion(func: Fusion, prepend: bool = False) -> None:
    """Have `func(ops, recipe=recipe)` fuse operations in both directions, before all others.

    Args:
        func: Returns the list of operations with some of them replaced by a `FusedOperation` of them.
        prepend: Whether it is asked before those that were registered before.
    """
    _register(OperationFuser.forward_backward_fusion_functions, func, prepend)
