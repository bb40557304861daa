"""Cross entropy: of logits (`parallel_cross_entropy`), and of the product that makes them (`linear_cross_entropy`).

Both work on ranks that share the classes. The forward of the first reads the logits, its backward reads them again and
writes their gradient. The second computes gradients on the way where the loss is a number: a backward then multiplies
them with that of the loss. Nothing waits for the device: a target out of range is an error on the CPU, NaN elsewhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers import cross_entropy as core
from te_core.layers.communicator import Communicator
from te_core.layers.product import LinearSpec, Needs
from te_core.ops.loss import LossTerms
from te_core.precision import Precision
from te_core.recipe import Recipe, resolve
from te_core.spelling import choice_error
from te_core.tensor import Tensor
from te_torch.doors import never_traced
from te_torch.function import refuse_double_backward, stand_in_gradient
from te_torch.parallel.communicator import GroupCommunicator
from te_torch.parallel.groups import group_of
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import (
    TO_CORE,
    amp_dtype,
    check_dtype,
    freed,
    nested,
    no_memory,
    refuse_dtensor,
    runtime_for,
    to_core,
    to_torch,
    warn,
    was_freed,
)
from te_torch.surroundings import check_surroundings, dispatch_modes, functorch_active
from te_torch.values import OptionError, check_flags, check_numbers, integer, is_size

_TOTALS = {"none": "sum", "sum": "sum", "mean": "mean"}
_TARGETS = (torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16)
_eager_only = never_traced("te_torch's losses run eagerly")


@_eager_only
def parallel_cross_entropy(
    inp: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    _input: torch.Tensor | None = None,
    in_place: bool = False,
) -> torch.Tensor:
    """The loss of each token, float32, for logits [B, S, V] or [S, B, V] and targets [B, S] or [S, B].

    With `dist_process_group` each rank has its V of the classes, in the order of ranks; targets are those of all. Where
    the target is `ignore_idx`, loss and gradient are 0. reduce_loss=True: the mean over the others, shape [1], 0 over
    none. The gradient has the logits' dtype and memory of its own; with in_place=True it takes that of the logits,
    which nobody else may need then. It is capturable in any case.

    Returns:
        Loss of each token, float32, of the targets' shape; with `reduce_loss` its mean, [1].

    Example:
        logits = torch.randn(2, 16, 1000, requires_grad=True)
        te.parallel_cross_entropy(logits, torch.randint(1000, (2, 16)), reduce_loss=True).backward()
    """
    op = "parallel_cross_entropy"
    if _input is not None:
        warn(f"{op}: _input is the older name of inp", FutureWarning, 2)
        inp = _input if inp is None else inp
    if inp is None or target is None:
        raise ArgumentError(op, "no logits" if inp is None else "no target", "both", f"call {op}(logits, target)")
    check_flags(op, reduce_loss=reduce_loss, is_cg_capturable=is_cg_capturable, in_place=in_place)
    check_numbers(op, label_smoothing=label_smoothing)
    _check_operand(op, "inp", inp)
    if inp.ndim < 2 or inp.shape[-1] < 1:
        raise OptionError(op, f"logits of shape {tuple(inp.shape)}", "[.., V]", "keep the classes last")
    comm = _communicator(op, dist_process_group, "dist_process_group")
    terms = _terms(op, inp.shape[-1], comm, ignore_idx, label_smoothing, 0.0)
    goal = _target(op, target, inp, terms)
    loss = _Logits.apply(inp, goal, terms, "mean of some" if reduce_loss else None, comm, in_place)
    return loss if reduce_loss else loss.view(inp.shape[:-1])


@_eager_only
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    group: Any = None,
    chunk: int | None = None,
    recipe: Recipe | None = None,
) -> torch.Tensor:
    """The loss of logits = hidden [.., K] weight [V, K]^T + bias, which are there for `chunk` rows at a time.

    In float32. As torch.nn.functional.cross_entropy, and z_loss * logsumexp(logits)^2 for each token. For "mean"
    and "sum" the forward computes gradients, too; for "none" the backward computes the logits again. The weight's adds
    up in float32, and goes into `weight.main_grad` if there is one. With `group` each rank has its V of the classes,
    and all have the same hidden. `recipe`, one without history, has the products run in FP8, by maxima or blocks of
    each chunk.

    Returns:
        The loss: one number, or with "none" one for each token, float32.

    Raises:
        ArgumentError: An argument has a value that is not allowed, or shapes do not fit.

    Example:
        hidden, head = torch.randn(32, 64, requires_grad=True), torch.randn(1000, 64, requires_grad=True)
        te.linear_cross_entropy(hidden, head, torch.randint(1000, (32,))).backward()
    """
    op = "linear_cross_entropy"
    if reduction not in _TOTALS:
        raise choice_error(op, "reduction", reduction, _TOTALS)
    if chunk is not None and not is_size(chunk):
        raise ArgumentError(op, f"chunk={chunk!r}", "a number of rows, or None", "leave it out")
    check_numbers(op, label_smoothing=label_smoothing, z_loss=z_loss)
    dtype = _check_product(op, hidden, weight, bias)
    comm = _communicator(op, group, "group")
    terms = _terms(op, weight.shape[0], comm, ignore_index, label_smoothing, z_loss)
    goal = _target(op, target, hidden, terms)
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    linear = LinearSpec(TO_CORE[dtype], _precision(op, recipe), Needs(needs[0], needs[1], False), weight_dtype=_FLOAT)
    spec = core.HeadSpec(linear, terms, _TOTALS[reduction], chunk, needs[2])
    loss = _Head.apply(hidden, weight, bias, goal, _OfHead(spec, reduction, comm, dtype, any(needs)))
    return loss.view(target.shape) if reduction == "none" else loss


_FLOAT = TO_CORE[torch.float32]


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        target: torch.Tensor,
        terms: LossTerms,
        total: str | None,  # None: the loss of each row
        comm: Communicator | None,
        in_place: bool,
    ) -> torch.Tensor:
        logits = inp.contiguous()
        matrix, goal = to_core(logits).matrix(), to_core(target)
        found = core.logits_forward(runtime_for(inp), matrix, goal, terms=terms, total=total or "sum", comm=comm)
        kept = to_torch(found.facts)
        ctx.save_for_backward(logits, target, kept)
        ctx.terms, ctx.total, ctx.comm, ctx.in_place = terms, total, comm, in_place
        return to_torch(found.losses) if total is None else kept[-1, :1].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # only create_graph=True runs a backward in grad mode
            refuse_double_backward()
        logits, target, kept = ctx.saved_tensors
        matrix = to_core(logits).matrix()
        made = core.logits_backward(
            runtime_for(logits),
            matrix,
            to_core(target),
            to_core(kept),
            terms=ctx.terms,
            grad=_dense(grad if ctx.total is None else grad * kept[-1, 1:2]),
            out=matrix if ctx.in_place else None,
            comm=ctx.comm,
        )
        if ctx.in_place:
            torch.autograd.graph.increment_version(logits)
        return to_torch(made).view(logits.shape), None, None, None, None, None


class _OfHead(NamedTuple):
    """What a call depends on besides its tensors."""

    spec: core.HeadSpec
    reduction: str
    comm: Communicator | None
    dtype: torch.dtype
    differentiable: bool


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        call: _OfHead,
    ) -> torch.Tensor:
        ctx.call, ctx.like = call, (hidden.shape, hidden.dtype, bias.dtype if bias is not None else None)
        ctx.weight = weight  # itself: it may have a `main_grad`
        ctx.now = call.differentiable and call.reduction != "none"
        operands = _operands(call.dtype, hidden, weight, bias, target)
        found, gradients = core.head_forward(
            runtime_for(hidden), operands, spec=call.spec, comm=call.comm, gradients=ctx.now
        )
        losses, total, facts = map(to_torch, found)
        if gradients is not None:
            ctx.save_for_backward(total[1:], *[t if t is None else to_torch(t) for t in gradients])
        elif call.differentiable:
            ctx.save_for_backward(hidden, weight, bias, target, facts)
        return losses if call.reduction == "none" else total[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # only create_graph=True runs a backward in grad mode
            refuse_double_backward()
        call, (shape, dtype, bias_dtype), factor = ctx.call, ctx.like, None
        if ctx.now:
            scale, *found = ctx.saved_tensors
            factor = grad.reshape(1) * scale
        else:
            hidden, weight, bias, target, facts = ctx.saved_tensors
            operands = _operands(call.dtype, hidden, weight, bias, target)
            made = core.head_backward(
                runtime_for(hidden), operands, to_core(facts), _dense(grad), spec=call.spec, comm=call.comm
            )
            found = [t if t is None else to_torch(t) for t in made]
        d_hidden, d_weight, d_bias = found
        return (
            None if d_hidden is None else _times(d_hidden, factor, dtype).view(shape),
            None if d_weight is None else _weight_gradient(ctx.weight, d_weight, factor),
            None if d_bias is None else _times(d_bias, factor, bias_dtype),
            None,
            None,
        )


def _operands(
    dtype: torch.dtype, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor
) -> core.HeadOperands:
    """What the product reads, in the dtype that it is computed in."""
    h, w, b = (None if t is None else to_core(t.detach().to(dtype).contiguous()) for t in (hidden, weight, bias))
    assert h is not None and w is not None
    return core.HeadOperands(h.matrix(), w, b, to_core(target))


def _dense(grad: torch.Tensor) -> Tensor:
    return to_core(grad.float().reshape(-1).contiguous())


def _times(gradient: torch.Tensor, factor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """gradient * factor, formed in float32 and rounded once."""
    if factor is None:
        return gradient.to(dtype)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def _weight_gradient(weight: torch.Tensor, gradient: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of the weight, or what stands for it where it went into `main_grad`."""
    main = weight.get_main_grad() if hasattr(weight, "get_main_grad") else getattr(weight, "main_grad", None)
    if main is None:
        return _times(gradient, factor, weight.dtype)
    if main.shape != weight.shape or not main.is_floating_point() or main.device != weight.device:
        raise ArgumentError(
            "linear_cross_entropy",
            f"main_grad of shape {tuple(main.shape)} in {main.dtype} on {main.device}",
            f"a tensor of the weight's shape {tuple(weight.shape)} on {weight.device}, in float32 as a rule",
            "set weight.main_grad before backward, or delete it",
        )
    if getattr(weight, "overwrite_main_grad", False):
        main.zero_()
    main.add_(gradient) if factor is None else main.addcmul_(gradient, factor.expand_as(gradient))
    return stand_in_gradient(weight)


def _check_product(op: str, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype:
    """The dtype that the product is computed in; hidden, weight and bias fit together."""
    for name, t in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if t is not None or name != "bias":
            _check_operand(op, name, t)
            assert t is not None
            if t.device != hidden.device:
                raise ArgumentError(op, f"{name} on {t.device}, hidden on {hidden.device}", "one device", "move it")
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1] or not weight.numel():
        raise ArgumentError(op, shapes, "hidden [.., K], weight [V, K]", "correct the shapes")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(op, f"{shapes}, bias {tuple(bias.shape)}", "bias [V]", "correct the bias")
    dtype = amp_dtype(hidden.device.type)
    if dtype is not None:
        return dtype
    if {t.dtype for t in (hidden, weight, bias) if t is not None} != {hidden.dtype}:
        found = f"hidden in {hidden.dtype}, weight in {weight.dtype}, bias in {getattr(bias, 'dtype', None)}"
        raise ArgumentError(op, found, "one dtype", "convert them, or call it inside torch.autocast")
    return hidden.dtype


def _check_operand(op: str, name: str, t: Any) -> None:
    """It is a plain tensor whose values lie in memory, outside of what only torch's own operators pass through."""
    if isinstance(t, QuantizedTorch):
        do = f"pass {name}.dequantize(), and recipe= for FP8"
        raise UnsupportedError(op, f"{name}, a {type(t).__name__}", "plain tensors", do)
    check_dtype(op, t)
    if functorch_active() or dispatch_modes():
        check_surroundings()
    if t.is_nested:
        raise nested(op)
    if t.layout is not torch.strided:
        raise no_memory(op, f"{name}, a tensor of layout {t.layout}")
    refuse_dtensor(t)
    if was_freed(t):
        raise freed(t)


def _precision(op: str, recipe: Recipe | None) -> Precision | None:
    """What a recipe says of the product; only one that keeps nothing between calls."""
    if recipe is None:
        return None
    if not isinstance(recipe, Recipe):
        raise ArgumentError(op, f"recipe={recipe!r}", "a recipe", "pass Float8CurrentScaling(), say")
    precision = resolve(recipe)
    rules = (precision.input, precision.weight, precision.grad)
    if precision.history is not None or any(r is None or r.custom is not None or r.stochastic for r in rules):
        raise UnsupportedError(
            op,
            f"recipe={type(recipe).__name__}, which keeps a state between calls",
            "recipes without history: Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling",
            "choose one of these, or leave recipe out",
        )
    return precision


def _communicator(op: str, given: Any, name: str) -> Communicator | None:
    group = group_of(op, given, name)
    if group is None:
        return None
    comm = GroupCommunicator(group, set())
    return comm if comm.size > 1 else None


def _terms(
    op: str, width: int, comm: Communicator | None, ignore_index: int, smoothing: float, z_loss: float
) -> LossTerms:
    ignore_index = integer(op, "ignore_index", ignore_index)
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    return LossTerms(width * size, width * rank, ignore_index, float(smoothing), float(z_loss))


def _target(op: str, target: torch.Tensor, like: torch.Tensor, terms: LossTerms) -> torch.Tensor:
    """The targets as a vector that kernels read."""
    if not isinstance(target, torch.Tensor) or target.dtype not in _TARGETS:
        came = f"target in {target.dtype}" if isinstance(target, torch.Tensor) else f"a {type(target).__name__}"
        raise ArgumentError(op, came, "class numbers, int64 or int32", "convert the target (target.long())")
    shape = like.shape[:-1]
    rows, goals = ([n for n in sizes if n != 1] for sizes in (shape, target.shape))
    if target.numel() != shape.numel() or (rows != goals and len(rows) > 1 and len(goals) > 1):
        got = f"target {tuple(target.shape)} for {shape.numel()} rows {tuple(shape)}"
        raise OptionError(op, got, "one for each row, in their order", "correct or transpose the target")
    if target.device != like.device:
        raise ArgumentError(op, f"target on {target.device}, logits on {like.device}", "one device", "move the target")
    goal = target.detach().reshape(-1).contiguous()
    goal = goal if goal.dtype in _TARGETS[:2] else goal.long()
    if goal.device.type == "cpu":  # elsewhere nothing waits, and what is wrong shows as NaN
        wrong = ((goal < 0) | (goal >= terms.classes)) & (goal != terms.ignore_index)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ArgumentError(
                op,
                f"target {int(goal[row])} in row {row}",
                f"0 to {terms.classes - 1}, or {terms.ignore_index} for a row that does not count",
                "correct the target, or ignore_index",
            )
    return goal
