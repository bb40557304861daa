"""A chain of operations as one function of autograd: which are fused, where extra tensors go, what is saved.

Operations of ours run as one layer of the core (te_torch/ops/recorded.py) where they can; what follows here is of
chains that run them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from te_core.errors import ArgumentError
from te_core.recipe import Recipe
from te_torch import updates
from te_torch.doors import as_traced, never_traced
from te_torch.ops.basic.linear import BasicLinear
from te_torch.ops.basic.small import Bias, Identity, Quantize, Reshape
from te_torch.ops.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from te_torch.ops.recorded import Begun, Recorded, Stretch, is_node
from te_torch.precisions import precision_of, recipe_of
from te_torch.runtime import amp_dtype
from te_torch.tensors.base import prepare_for_saving, restore_from_saved
from te_torch.tensors.nvfp4 import NVFP4Quantizer

#: What fuses: (operations of a chain, recipe=) -> the same, some of them replaced by fused ones.
Fusion = Callable[..., list[FusibleOperation]]
#: A basic or fused operation, and the numbers of the basic ones that it stands for.
Placed = tuple[Any, list[int]]


class Fused(NamedTuple):
    """What is fused, and of what that depends."""

    key: Any
    forward: list[Placed]
    backward: list[Placed]
    #: What runs: the same with stretches of operations of ours as one. All of them may be one graph.
    run_forward: list[Placed]
    run_backward: list[Placed]
    whole: bool


class OperationFuser:
    """A chain of operations. What it fuses is decided in its first call, and again where the recipe's class, or what
    requires gradients, is another one."""

    forward_backward_fusion_functions: ClassVar[list[Fusion]] = []
    forward_fusion_functions: ClassVar[list[Fusion]] = []
    backward_fusion_functions: ClassVar[list[Fusion]] = []

    def __init__(self, ops: Iterable[FusibleOperation]) -> None:
        basic: list[Any] = []
        for op in ops:
            basic += op.basic_ops if isinstance(op, FusedOperation) else [op]
        self._basic_ops: list[BasicOperation] = basic
        self._num_basic_ops = len(basic)
        producers: dict[str, tuple[int, int]] = {}
        for i, op in enumerate(basic):
            for slot, (channel, _) in op._output_channels.items():
                if channel in producers:
                    raise _wrong_channel(channel, "has multiple producers")
                producers[channel] = i, slot
        #: For each extra input: the extra output that it is (operation, slot), or None, where the caller gives it.
        self._basic_op_extra_input_sources = [
            [_source(op._input_channels.get(slot), producers, i) for slot in range(op.num_extra_inputs)]
            for i, op in enumerate(basic)
        ]
        self.num_extra_inputs = sum(sources.count(None) for sources in self._basic_op_extra_input_sources)
        self._public = [
            [op._output_channels.get(slot, ("", True))[1] for slot in range(op.num_extra_outputs)] for op in basic
        ]
        self._recorded = Recorded(basic, self._basic_op_extra_input_sources, self)
        for op in basic:
            op.__dict__["_extra_tensor_channels_locked"] = True

    @property
    def _forward_ops(self) -> list[Placed]:
        """What the last forward ran: operations, fused ones in the place of those that they are."""
        return self._recorded.fused.forward

    @property
    def _backward_ops(self) -> list[Placed]:
        """The same of its backward."""
        return self._recorded.fused.backward

    def maybe_fuse_ops(self, first: int, recipe: Recipe | None) -> None:
        """Decide what is fused, if that depends on something that has changed. `first`: see `_first_with_backward`."""
        length = getattr(recipe, "amax_history_len", None)
        key: Any = type(recipe), first, getattr(recipe, "backward_override", None), length
        before = self._recorded.fused
        if before is not None and key == before.key:
            return
        for op in self._basic_ops:
            op.reset_recipe_state(recipe=recipe)
        for op in self._basic_ops if before is None else ():
            op.pre_first_fuser_forward()
        joint = _fused(list(self._basic_ops), self.forward_backward_fusion_functions, recipe)
        forward = self._placed(_fused(joint, self.forward_fusion_functions, recipe))
        backward = self._placed(_fused(joint, self.backward_fusion_functions, recipe))
        self._recorded.__dict__["fused"] = Fused(key, forward, backward, *self._stretched(forward, backward))

    def _placed(self, ops: list[FusibleOperation]) -> list[Placed]:
        placed: list[Placed] = []
        expanded: list[Any] = []
        for op in ops:
            covered = list(op.basic_ops) if isinstance(op, FusedOperation) else [op]
            placed.append((op, list(range(len(expanded), len(expanded) + len(covered)))))
            expanded += covered
        if [*map(id, expanded)] != [*map(id, self._basic_ops)]:
            raise RuntimeError(
                f"a fusion made {_names(expanded)} of {_names(self._basic_ops)}. Allowed: fused operations that stand "
                "for all of them, in their order. To do: correct the function that was registered"
            )
        return placed

    def _stretched(self, forward: list[Placed], backward: list[Placed]) -> tuple[list[Placed], list[Placed], bool]:
        """(what runs forward, and backward, with stretches of operations as one; whether all are one graph)."""
        ops = self._basic_ops
        fits = [is_node(op, public) for op, public in zip(ops, self._public, strict=True)]
        kept = [placed for placed in (*forward, *backward) if not _may_part(placed[0])]
        if all(fits) and not kept:
            return forward, backward, True
        for i, op in enumerate(ops):
            fits[i] = fits[i] and not op.num_extra_outputs  # which leave a stretch
            if isinstance(op, Quantize) and op.num_quantizers("backward"):
                # A linear by itself reads its gradient as it came; of NVFP4 a graph makes the columns anew.
                for j in range(i - 1, -1, -1):
                    fits[j] = False
                    if not isinstance(ops[j], Bias | Identity | Reshape):
                        break
        for _, places in kept:
            for i in places:
                fits[i] = False
        stretches = [[*some] for fit, some in groupby(range(len(ops)), lambda i: fits[i]) if fit]
        stretches = [some for some in stretches if any(isinstance(ops[i], BasicLinear) for i in some)]
        made = [(Stretch([ops[i] for i in some]), some) for some in stretches]
        within = {i for some in stretches for i in some}
        return *[_with_stretches(ops, placed, made, within) for placed in (forward, backward)], False  # type: ignore[return-value]

    def _first_with_backward(self, x: torch.Tensor, given: list[tuple[Any, ...]]) -> int:
        """The number of the first operation that backward comes to; as many as there are if it comes to none."""
        if torch.is_grad_enabled():
            for i, op in enumerate(self._basic_ops):
                tensors = [*op.parameters(), *given[i], *([x] if i == 0 else [])]
                if any(t is not None and t.requires_grad for t in tensors):
                    return i
        return self._num_basic_ops

    def __call__(
        self, input: torch.Tensor, *extra_inputs: torch.Tensor, basic_op_kwargs: list[dict[str, Any]] | None = None
    ) -> Any:
        """The output, or a tuple of it and the extra outputs that are returned to the caller."""
        if len(extra_inputs) != self.num_extra_inputs:
            operation, got = f"a chain of {_names(self._basic_ops)}", f"{len(extra_inputs)} extra inputs"
            do = "pass one for each that no channel provides, in the order of the operations"
            raise ArgumentError(operation, got, f"{self.num_extra_inputs} extra inputs", do)
        if basic_op_kwargs is None or not any(basic_op_kwargs):
            found = self._recorded._call((input, *extra_inputs), (None,))
            if found is not None:
                return found
        return self.broken(input, *extra_inputs, kwargs=basic_op_kwargs)

    @never_traced("a chain of te.ops that is no graph decides in each call what it fuses")
    def broken(self, *inputs: torch.Tensor, kwargs: Any = None) -> Any:
        """A call that a compiler sees nothing of."""
        with as_traced(False):  # torch.export says that it traces here, too
            return (
                self.one_by_one(inputs, self.begin(inputs), kwargs) if kwargs else self._recorded._call(inputs, (None,))
            )

    def begin(self, inputs: tuple[Any, ...]) -> Begun:
        """Enter the region with each operation, and decide what is fused."""
        left = iter(inputs[1:])
        given = [
            tuple([next(left) if source is None else None for source in sources])
            for sources in self._basic_op_extra_input_sources
        ]
        entered = {id(op): op._enter_chain(inputs[0].device) for op in self._basic_ops}
        number = next((number for number, _, _ in entered.values() if number), 0)
        first = self._first_with_backward(inputs[0], given)
        self.maybe_fuse_ops(first, recipe_of(number))
        return Begun(entered, number, given, first, amp_dtype(inputs[0].device.type))

    def one_by_one(self, inputs: tuple[Any, ...], begun: Begun, kwargs: Any = None) -> Any:
        """The output, or a tuple, of operations that run by themselves."""
        (input, *extra_inputs), first, run = inputs, begun.first, _Run(self, begun, kwargs)
        for i, (op, context) in enumerate(zip(self._basic_ops, run.contexts, strict=True)):
            op.pre_fuser_forward(requires_grad=i >= first)
            context.requires_grad, context.precision = i >= first, precision_of(begun.number)
            context.input_requires_grad = i > first or (i == first and input.requires_grad)
        input._do_not_clear = True  # as documented: operations free what they made alone
        if first < self._num_basic_ops:
            parameters = [p for op in self._basic_ops for p in op.parameters()]
            found = _Chain.apply(run, input, *parameters, *extra_inputs)
        else:
            found = run.forward(input)
        return found if len(found) > 1 else found[0]


FusibleOperation._fuser = OperationFuser


def _may_part(op: Any) -> bool:
    """Whether what is fused may come apart: a fusion of ours that writes into no tensor of the caller's."""
    if not isinstance(op, FusedOperation):
        return True
    in_place = any(getattr(basic, "_in_place", False) for basic in op.basic_ops)
    return type(op).__module__ == "te_torch.ops.fused" and not in_place


def _with_stretches(ops: list[Any], placed: list[Placed], stretches: list[Placed], within: set[int]) -> list[Placed]:
    """Stretches in the place of their operations; what is fused with one of them comes apart."""
    found = list(stretches)
    for op, places in placed:
        if within.isdisjoint(places):
            found.append((op, places))
        else:
            found += [(ops[i], [i]) for i in places if i not in within]
    return sorted(found, key=lambda each: each[1])


def _source(channel: str | None, producers: dict[str, tuple[int, int]], reader: int) -> tuple[int, int] | None:
    if channel is None:
        return None
    if channel not in producers:
        raise _wrong_channel(channel, "has no producer")
    if producers[channel][0] >= reader:
        raise _wrong_channel(channel, "has no earlier producer")
    return producers[channel]


def _wrong_channel(channel: str, what: str) -> ArgumentError:
    allowed = "one operation that writes to it, before those that read it, without a module between"
    return ArgumentError("a chain of operations", f"channel {channel!r}, which {what}", allowed, "correct the channels")


def _fused(ops: list[FusibleOperation], functions: Sequence[Fusion], recipe: Recipe | None) -> list[FusibleOperation]:
    for function in functions:
        ops = function(ops, recipe=recipe)
    return ops


def _names(ops: Iterable[Any]) -> str:
    return ", ".join(type(op).__name__ for op in ops)


class _Run:
    """One forward of a chain, and its backward."""

    def __init__(self, fuser: OperationFuser, begun: Begun, kwargs: Any) -> None:
        fused = fuser._recorded.fused
        self.ops, self.forward_ops, self.backward_ops = fuser._basic_ops, fused.run_forward, fused.run_backward
        self.sources, self.public = fuser._basic_op_extra_input_sources, fuser._public
        self.begun, self.given = begun, begun.given
        self.kwargs = kwargs or [{} for _ in self.ops]
        self.contexts = [OperationContext() for _ in self.ops]

    def forward(self, x: Any) -> tuple[torch.Tensor, ...]:
        """The output and the extra outputs that are returned."""
        made: list[Any] = [()] * len(self.ops)
        for op, places in self.forward_ops:
            for i in places:  # what comes from operations before, but for those fused with it, which know it
                self.given[i] = tuple([
                    t if source is None or source[0] in places else made[source[0]][source[1]]
                    for t, source in zip(self.given[i], self.sources[i], strict=True)
                ])  # fmt: skip
            before, behind = places[0] - 1, places[-1] + 1
            given = {
                "basic_op_extra_inputs": [self.given[i] for i in places],
                "prev_op_grad_output_quantizer": self._of_gradients(before) if places[0] else None,
                "next_op_input_quantizer": self.ops[behind].get_input_quantizer() if behind < len(self.ops) else None,
                "basic_op_kwargs": [self.kwargs[i] for i in places],
            }
            given |= {"begun": self.begun} if isinstance(op, Stretch) else {}
            try:
                x, extra = op.fuser_forward([self.contexts[i] for i in places], x, **given)
            except ArgumentError as error:  # of two that do not fit it says both
                if not places[0]:
                    raise
                operation = f"{error.operation} behind {_names(self.ops[before : before + 1])} in a chain"
                raise ArgumentError(operation, error.got, error.allowed, error.do, error.where) from error
            extra = [tuple(outputs) for outputs in extra]
            self._check_extra(f"{type(op).__name__}.fuser_forward", places, extra)
            for i, outputs in zip(places, extra, strict=True):
                made[i] = outputs
                for t in outputs if self.contexts[i].requires_grad else ():
                    if t is not None and t.is_floating_point() and not t.requires_grad:
                        t.requires_grad_()  # by which operations that read it tell that it is differentiable
        self.given = []
        shown = [zip(outputs, public, strict=True) for outputs, public in zip(made, self.public, strict=True)]
        return x, *[t for outputs in shown for t, public in outputs if public]

    def _of_gradients(self, i: int) -> Any:
        """What the gradient of an operation's output may be quantized with. NVFP4 has one more rounding in the columns
        that a graph makes anew, for nothing tells whether those that came are transformed."""
        quantizer = self.ops[i].get_grad_output_quantizer()
        recorded = any(isinstance(op, Stretch) and i in places for op, places in self.forward_ops)
        return None if recorded and isinstance(quantizer, NVFP4Quantizer) else quantizer

    def _check_extra(self, operation: str, places: list[int], extra: list[tuple[Any, ...]]) -> None:
        counts, found = [self.ops[i].num_extra_outputs for i in places], [len(outputs) for outputs in extra]
        if found != counts:
            raise RuntimeError(
                f"{operation} returned {found} extra outputs of its basic operations. Allowed: {counts}. To do: return "
                "a tuple for each operation, with None for what nobody reads"
            )
        for i, outputs in zip(places, extra, strict=True):
            for slot in [slot for slot, t in enumerate(outputs) if t is None]:
                readers = [reader for reader, sources in enumerate(self.sources) if (i, slot) in sources]
                if self.public[i][slot] or not set(readers) <= set(places):
                    why = "is public" if self.public[i][slot] else "is read outside its forward fusion"
                    raise RuntimeError(f"{operation} returned None for extra output {slot}, which {why}")

    def backward(self, grad: Any, of_caller: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
        """(the input's gradient, those of all parameters, those of the caller's extra inputs)."""
        left = iter(of_caller)
        extra = [[next(left) if shown else None for shown in public] for public in self.public]
        counts = [(len([*op.parameters()]), op.num_extra_inputs) for op in self.ops]
        of_parameters, of_inputs = ([[None] * n for n in some] for some in zip(*counts, strict=True))
        for op, places in reversed(self.backward_ops):
            contexts = [self.contexts[i] for i in places]
            if not any(context.requires_grad for context in contexts):
                grad = None
                break
            grads = [tuple(extra[i]) for i in places]
            grad, parameters, inputs = op.fuser_backward(contexts, grad, basic_op_grad_extra_outputs=grads)
            for i, context, some, others in zip(places, contexts, parameters, inputs, strict=True):
                context.saved_tensors = ()
                of_parameters[i] = _checked(op, "parameters", some, of_parameters[i])
                of_inputs[i] = _checked(op, "extra inputs", others, of_inputs[i])
                for source, t in zip(self.sources[i], of_inputs[i], strict=True):
                    if source is not None and source[0] not in places and t is not None:
                        before = extra[source[0]][source[1]]
                        extra[source[0]][source[1]] = t if before is None else before + t
        pairs = [zip(sources, found, strict=True) for sources, found in zip(self.sources, of_inputs, strict=True)]
        returned = [t for inputs in pairs for source, t in inputs if source is None]
        return grad, [t for found in of_parameters for t in found], returned


def _checked(op: Any, what: str, gradients: Any, none: list[Any]) -> list[Any]:
    found = none if gradients is None else [*gradients]
    if len(found) != len(none):
        raise RuntimeError(
            f"{type(op).__name__}: backward returned {len(found)} gradients for {len(none)} {what}. To do: return one, "
            "or None, for each"
        )
    return found


class _Chain(torch.autograd.Function):
    """A chain as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, run: _Run, x: Any, *rest: Any) -> Any:
        outputs: list[Any] = [*run.forward(x)]
        known = {id(t) for t in (x, *rest)}
        for i, t in enumerate(outputs):  # to autograd each is a tensor of its own
            outputs[i] = t.detach() if id(t) in known else t
            known.add(id(outputs[i]))
            outputs[i]._do_not_clear = True
        flat, ctx.objects = prepare_for_saving(*[t for context in run.contexts for t in context.to_save])
        ctx.save_for_backward(*flat)
        ctx.counts = [len(context.to_save) for context in run.contexts]
        for context in run.contexts:
            context.to_save = ()
        ctx.run, ctx.like = run, (outputs[0].shape, outputs[0].dtype, outputs[0].device)
        ctx.set_materialize_grads(False)
        ctx.within = updates.this_pass() if run.begun.again else -1
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any, *extra: Any) -> Any:
        run: _Run = ctx.run
        left = iter(restore_from_saved(ctx.objects, ctx.saved_tensors))
        for op, context, count in zip(run.ops, run.contexts, ctx.counts, strict=True):
            _, state, _ = run.begun.entered[id(op)]
            context.saved_tensors = tuple([next(left) for _ in range(count)])
            if state is not None and context.requires_grad:
                updates.ran_backward(state, ctx.within)
        if grad is None:
            shape, dtype, device = ctx.like
            grad = torch.zeros(shape, dtype=dtype, device=device)
        dx, parameters, inputs = run.backward(grad, extra)
        return None, dx, *parameters, *inputs


def register_forward_fusion(func: Fusion, prepend: bool = False) -> None:
    """Have `func(ops, recipe=recipe)` fuse operations in the forward of chains."""
    _register(OperationFuser.forward_fusion_functions, func, prepend)


def register_backward_fusion(func: Fusion, prepend: bool = False) -> None:
    """Have `func(ops, recipe=recipe)` fuse operations in the backward of chains."""
    _register(OperationFuser.backward_fusion_functions, func, prepend)


def register_forward_backward_fusion(func: Fusion, prepend: bool = False) -> None:
    """Have `func(ops, recipe=recipe)` fuse operations in both directions, before all others."""
    _register(OperationFuser.forward_backward_fusion_functions, func, prepend)


def _register(functions: list[Fusion], function: Fusion, prepend: bool) -> None:
    functions.insert(0 if prepend else len(functions), function)
