"""Quantized weights that compiled code keeps from a step's first microbatch to the others (`is_first_microbatch`).

They are ordinary tensors: the first microbatch's program returns them, traced code keeps them with the module, and the
program of the others is given them. A compiler guards on what they are, which is the same in every step.
Whether they still are copies of what the weights now hold only shows as a program runs; where they are not, as after a
step of the optimizer without a first microbatch, they are made anew in their places, as eager code makes them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from te_core.layers.linear import LinearSpec, Needs, Product, weight_operand
from te_core.precision import Precision
from te_core.quantize.operands import is_plain_rule
from te_core.quantize.state import Scales
from te_core.quantized import Copy, QuantizedTensor, pieces_of
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_torch.calls import Call
from te_torch.precisions import part_of, precision_of
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import constant_at_trace, to_torch


class Held:
    """The copies of one module, and what they are in words; a copy of the module begins without."""

    def __init__(self) -> None:
        self.what = ""
        self.tensors: tuple[torch.Tensor, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, ()


class Plan(NamedTuple):
    """What an operator is told of the copies that it makes or is given."""

    first: bool
    columnwise: tuple[bool | None, ...]  # by weight; None: this one is quantized in every microbatch
    parts: tuple[int, ...]  # by weight: of how many parameters it was made, which come last; 0: it is one itself

    def __str__(self) -> str:
        kinds = "".join("-" if c is None else "2" if c else "1" for c in self.columnwise)
        return f"{'first' if self.first else 'later'} {kinds} {' '.join(map(str, self.parts))}"

    @property
    def tensors(self) -> int:
        """How many tensors the copies are: one for each orientation."""
        return sum(0 if c is None else 1 + c for c in self.columnwise)


@lru_cache(maxsize=1024)
def parsed(text: str) -> Plan:
    """The plan of this text."""
    mode, kinds, *parts = text.split(" ")
    columnwise = tuple(None if kind == "-" else kind == "2" for kind in kinds)
    return Plan(mode == "first", columnwise, tuple(map(int, parts)))


class Copies:
    """The copies of one traced call: `text` is the operator's plan, `tensors` what comes behind the layer's inputs."""

    def __init__(self, held: Held, text: str, what: str, tensors: list[torch.Tensor]) -> None:
        self.held, self.text, self.what, self.tensors = held, text, what, tensors

    def keep(self, made: list[torch.Tensor]) -> None:
        """Keep what a first microbatch has made."""
        self.held.tensors, self.held.what = tuple(made), self.what


def copies_at_trace(
    held: Held,
    number: int,
    weights: Sequence[torch.Tensor],
    parts: Sequence[Sequence[torch.Tensor]],
    first: bool,
    lasting: bool,
) -> Copies | None:
    """The copies of a traced call in the precision of this number, whose weights are made of these parts.

    `lasting`: whether what this call makes can be kept; inside a checkpoint it cannot.
    """
    plain = tuple([not isinstance(w, QuantizedTorch) for w in weights])
    counts = tuple(
        [0 if len(p) == 1 and p[0].dtype == w.dtype else len(p) for w, p in zip(weights, parts, strict=True)]
    )
    there = "" if first else held.what
    text, what = plan_at_trace(number, plain, counts, torch.is_grad_enabled(), there)
    if not text or (not lasting and made_of(text)):
        return None
    tensors = [] if made_of(text) else list(held.tensors)
    for own, count in zip(parts, counts, strict=True):
        if count:
            tensors += [t.detach() for t in own]
    return Copies(held, text, what, tensors)


@constant_at_trace
def plan_at_trace(
    number: int, plain: tuple[bool, ...], parts: tuple[int, ...], grad: bool, there: str
) -> tuple[str, str]:
    """(the operator's plan, or "" where nothing is kept; in words what the copies are).

    `plain`: which weights came plain; `grad`: whether a backward may follow; `there`: the words of copies to be read.
    """
    rules = [precision_of(part_of(number, i)) for i in range(len(plain))]
    columnwise = [
        grad and rule.backward is None if given and rule is not None and _is_kept(rule) else None
        for rule, given in zip(rules, plain, strict=True)
    ]
    if all(c is None for c in columnwise):
        return "", ""
    if there:
        words, _, kinds = there.partition(" of ")
        before = parsed(f"later {kinds} {' '.join('0' for _ in plain)}").columnwise
        enough = all((a is None) == (b is None) and (not b or a) for a, b in zip(before, columnwise, strict=True))
        if enough and words == _words(rules):
            return str(Plan(False, before, parts)), there
    found = Plan(True, tuple(columnwise), parts)
    return str(found), f"{_words(rules)} of {str(found).split(' ')[1]}"


def _is_kept(rule: Precision) -> bool:
    """Whether a weight by this rule is one quantized tensor."""
    return rule.weight is not None and is_plain_rule(rule.weight)


def _words(rules: Sequence[Precision | None]) -> str:
    return ",".join("" if rule is None else str(rule.serial) for rule in rules)


@constant_at_trace
def made_of(text: str) -> int:
    """How many tensors a forward of this plan makes of copies."""
    return parsed(text).tensors if text and parsed(text).first else 0


@constant_at_trace
def _behind(text: str) -> tuple[int, int]:
    """How many tensors of copies, and then of parts, come behind the layer's inputs."""
    plan = parsed(text)
    return (0 if plan.first else plan.tensors), sum(plan.parts)


def own_inputs(text: str, inputs: Sequence[Any]) -> list[Any]:
    """The layer's own inputs."""
    count, parts = _behind(text)
    return list(inputs[: len(inputs) - count - parts])


def given_of(text: str, inputs: Sequence[Any]) -> list[Any]:
    """The copies among the inputs."""
    count, parts = _behind(text)
    end = len(inputs) - parts
    return list(inputs[end - count : end])


@constant_at_trace
def for_backward(text: str) -> str:
    """The plan of a backward that is given what its forward read."""
    plan = parsed(text)
    return str(Plan(False, plan.columnwise, (0,) * len(plan.parts)))


# ------------------------------------------------------------------------------------------- inside of an operator


def ready_for(
    rt: Runtime, call: Call, text: str, views: Sequence[Any], scales: Scales | None, *, check: bool
) -> tuple[list[Any], list[QuantizedTensor | None], list[torch.Tensor]]:
    """(the layer's own inputs, the quantized weights, those tensors of theirs that were made).

    `check`: whether there are values, of which the copies may not be any more.
    """
    plan = parsed(text)
    count = len(views) - sum(plan.parts) - (0 if plan.first else plan.tensors)
    own, rest = list(views[:count]), iter(views[count:])
    given = [] if plan.first else [next(rest) for _ in range(plan.tensors)]
    weights = [own[i] for i in call.layer.weights]
    products = [
        None if c is None else _product(spec.precision, weight, c, scales, i)
        for i, (spec, weight, c) in enumerate(zip(call.layer.linears(call.spec), weights, plan.columnwise, strict=True))
    ]
    identity = _identity(weights, plan, rest, products) if check else None
    if plan.first:
        ready = [None if p is None else quantized(rt, w, p) for w, p in zip(weights, products, strict=True)]
        made = [t for q in ready if q is not None for t in _memory(q)]
        if identity is not None:
            _note(made, identity)
        return own, ready, made
    if check and (identity is None or _of_what.get(given[0].ptr) != identity):
        fresh = [_memory(quantized(rt, w, p)) for w, p in zip(weights, products, strict=True) if p is not None]
        for old, new in zip(given, [t for pair in fresh for t in pair], strict=True):
            old.owner.copy_(new)
        if identity is not None:
            _note([t.owner for t in given], identity)
    return own, held_in(call, plan, given, weights), []


def held_in(call: Call, plan: Plan, given: Sequence[Any], weights: Sequence[Any]) -> list[QuantizedTensor | None]:
    """The quantized weights in this memory."""
    blocks = iter(given)
    return [
        None if c is None else _at(spec.precision, weight.shape, c, blocks)
        for spec, weight, c in zip(call.layer.linears(call.spec), weights, plan.columnwise, strict=True)
    ]


def quantized(rt: Runtime, weight: Tensor, product: Product) -> QuantizedTensor:
    """A weight as every microbatch can read it."""
    uses = weight_operand(rt, weight, product, None)
    assert isinstance(uses.rows, QuantizedTensor) and uses.columns is uses.rows
    return uses.rows


def _product(
    precision: Precision | None, weight: Tensor, columnwise: bool, scales: Scales | None, gemm: int
) -> Product:
    needs = Needs(input=columnwise, weight=False, bias=False)
    return Product(LinearSpec(weight.dtype, precision, needs), scales, gemm)


def _memory(q: QuantizedTensor) -> list[torch.Tensor]:
    """The memory of a quantized tensor whose copies lie apart: that with the columnwise copy first."""
    assert q.block is not None
    made = [to_torch(q.block)]
    if q.columnwise is not None and q.rowwise is not None:
        made.append(q.rowwise.memory.view(torch.uint8))
    return made


def _at(precision: Precision | None, shape: tuple[int, int], columnwise: bool, blocks: Any) -> QuantizedTensor:
    """The quantized tensor in this memory."""
    assert precision is not None and precision.weight is not None
    form, block = precision.weight.format, next(blocks)
    if not columnwise:
        return QuantizedTensor.rowwise_in(block, shape, form)
    column = Copy.at(block, 0, pieces_of(block.device, form, shape, True))
    memory, parts = next(blocks), pieces_of(block.device, form, shape, False)
    if form.scaling == "tensor":  # one scale for both, beside the columnwise copy
        data = Tensor(memory.ptr, parts.data, parts.data_type, memory.device, memory)
        return QuantizedTensor(form, shape, Copy(data, column.scale, None), column, block)
    return QuantizedTensor(form, shape, Copy.at(memory, 0, parts), column, block)


#: By the address of copies: of which contents of which memory they are.
_of_what: dict[int, tuple[Any, ...]] = {}
_MOST = 4096


def _note(made: Sequence[torch.Tensor], identity: tuple[Any, ...]) -> None:
    if len(_of_what) >= _MOST:
        _of_what.clear()
    _of_what[made[0].data_ptr()] = identity


def _identity(
    weights: Sequence[Tensor], plan: Plan, parts: Any, products: Sequence[Product | None]
) -> tuple[Any, ...] | None:
    """Which contents of which memory; None where that is not counted."""
    found: list[Any] = []
    for weight, count, product in zip(weights, plan.parts, products, strict=True):
        of_it = [next(parts).owner for _ in range(count)] if count else [weight.owner]
        if product is None:
            continue
        if any(t.is_inference() for t in of_it):
            return None
        found.append(product.spec.precision.serial)  # type: ignore[union-attr]
        found += [(t.data_ptr(), t._version, t.shape) for t in of_it]
    return tuple(found)
