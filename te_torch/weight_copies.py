"""Quantized weights that compiled code keeps from a step's first microbatch to the others (`is_first_microbatch`).

They are ordinary tensors of lasting memory, made as a program is traced: what a program returns lies in memory that the
next step of `mode="reduce-overhead"` takes again. The first microbatch's program returns what it quantized, traced code
writes that into the module's tensors, and the program of the others is given these. A compiler guards on what they are,
which is the same in every step.
Whether they still are copies of what the weights now hold only shows as a program runs; where they are not, as after a
step of the optimizer without a first microbatch, they are made anew in their places, as eager code makes them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from te_core.layers.product import LinearSpec, Needs, Product, weight_operand
from te_core.plan_cache import drop_oldest
from te_core.precision import Precision
from te_core.quantize.operands import is_plain_rule
from te_core.quantize.state import Scales
from te_core.quantized import Copy, QuantizedTensor, pieces_of
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_torch.calls import Call
from te_torch.likeness import alike
from te_torch.precisions import part_of, precision_of
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import constant_at_trace, shape_runtime, to_core_shape, to_torch
from te_torch.values import check_flags

_MOST_KINDS = 4  # of copies at a time: recipes and modes that a step changes between


class Held:
    """The copies of one module; a copy of the module begins without.

    Those of each kind are an attribute, by what they are in words: a compiler guards on one without the others.
    """

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All memory of copies."""
        return [t for of_kind in self.__dict__.values() for t in of_kind]

    def take(self, what: str, tensors: tuple[torch.Tensor, ...]) -> None:
        """Keep memory for this kind; the oldest gives way."""
        while len(self.__dict__) >= _MOST_KINDS:
            drop_oldest(self.__dict__)
        self.__dict__[what] = tensors

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, ()


class Plan(NamedTuple):
    """What an operator is told of the copies that it makes or is given."""

    first: bool
    columnwise: tuple[bool | None, ...]  # by weight; None: this one is quantized in every microbatch
    parts: tuple[int, ...]  # by weight: of how many parameters it was made, which come last; 0: it is one itself

    def __str__(self) -> str:
        return f"{'first' if self.first else 'later'} {_letters(self.columnwise)} {' '.join(map(str, self.parts))}"

    @property
    def tensors(self) -> int:
        """How many tensors the copies are: one for each orientation."""
        return sum(0 if c is None else 1 + c for c in self.columnwise)


def _letters(columnwise: Sequence[bool | None]) -> str:
    return "".join("-" if c is None else "2" if c else "1" for c in columnwise)


@lru_cache(maxsize=1024)
def parsed(text: str) -> Plan:
    """The plan of this text."""
    mode, kinds, *parts = text.split(" ")
    columnwise = tuple(None if kind == "-" else kind == "2" for kind in kinds)
    return Plan(mode == "first", columnwise, tuple(map(int, parts)))


class Copies:
    """The copies of one traced call: `text` is the operator's plan, `tensors` what comes behind the layer's inputs."""

    def __init__(self, text: str, kept: tuple[torch.Tensor, ...], parts: list[torch.Tensor]) -> None:
        self.text, self.kept, self.tensors = text, kept, [*kept, *parts]

    def keep(self, made: list[torch.Tensor]) -> None:
        """Keep what a first microbatch has made."""
        for old, new in zip(self.kept, made, strict=True):
            old.copy_(new)


def copies_at_trace(
    module: Any,
    number: int,
    weights: Sequence[torch.Tensor],
    parts: Sequence[Sequence[torch.Tensor]],
    first: bool,
    lasting: bool,
) -> Copies | None:
    """The copies of a traced call in the precision of this number, whose weights are made of these parts.

    `lasting`: whether what this call makes can be kept; inside a checkpoint it cannot.
    """
    if first is not True and first is not False:
        check_flags(f"{type(module).__name__}.forward", is_first_microbatch=first)
    plain = tuple([not isinstance(w, QuantizedTorch) for w in weights])
    counts = tuple(
        [0 if len(p) == 1 and p[0].dtype == w.dtype else len(p) for w, p in zip(weights, parts, strict=True)]
    )
    sizes = tuple([(w.shape[0], w.shape[1], w.dtype) for w in weights])
    shapes = tuple([tuple(p.shape) for of_one in parts for p in of_one])
    learns = any([p.requires_grad for of_one in parts for p in of_one])
    owner = module._kind, module._facts(), weights[0].device, learns, shapes
    what = room_at_trace(owner, number, plain, sizes, torch.is_grad_enabled(), lasting)
    kept = getattr(module._copies, what, None) if what else None
    if kept is None or (first and not lasting):
        return None
    text = plan_at_trace(what, counts, first)
    return Copies(text, kept, [p.detach() for own, n in zip(parts, counts, strict=True) if n for p in own])


@constant_at_trace
def room_at_trace(
    owner: tuple[int, tuple[Any, ...], torch.device, bool, tuple[Any, ...]],
    number: int,
    plain: tuple[bool, ...],
    sizes: tuple[tuple[int, int, torch.dtype], ...],
    grad: bool,
    lasting: bool,
) -> str:
    """What the copies are, in words, for which all modules that run this program now have memory; "": there are none.

    `owner`: what the modules are like, down to where the weights are, whether they want gradients (a copy of the model
    that is never trained needs no memory) and their shapes; `plain`: which weights came plain; `grad`: whether a
    backward may follow; `lasting`: whether there may be more than there is.
    """
    rules = [precision_of(part_of(number, i)) for i in range(len(plain))]
    modules = _owners(*owner)
    for with_columns in dict.fromkeys((True, grad)):  # what a backward reads is enough where none follows
        what, columnwise = _kind(rules, plain, with_columns)
        if not columnwise:
            return ""
        if with_columns is grad or any(what in module._copies.__dict__ for module in modules):
            break
    without = [module._copies for module in modules if what not in module._copies.__dict__]
    if lasting and without:
        shapes = _shapes(number, columnwise, sizes, owner[2])
        for held in without:
            held.take(what, tuple([_lasting(shape, owner[2]) for shape in shapes]))
    return what


def _owners(
    kind: int, facts: tuple[Any, ...], device: torch.device, learns: bool, shapes: tuple[tuple[int, ...], ...]
) -> list[Any]:
    """The modules that run a program, whose weights are as those of the one that is traced."""
    found = []
    for module in alike(kind, facts):
        weights = [module._parameters[name] for name in module._weight_names()]
        if any(w.requires_grad for w in weights) == learns and tuple([tuple(w.shape) for w in weights]) == shapes:
            found += [module] * all(w.device == device for w in weights)
    return found


def _kind(rules: Sequence[Precision | None], plain: Sequence[bool], grad: bool) -> tuple[str, tuple[bool | None, ...]]:
    """(copies by these rules in words; by weight, whether its copy is also one along columns, None: it is not kept)."""
    columnwise = tuple(
        [
            grad and rule.backward is None
            if given and rule is not None and rule.weight is not None and is_plain_rule(rule.weight)
            else None  # a weight by this rule is not one quantized tensor
            for rule, given in zip(rules, plain, strict=True)
        ]
    )
    if all(c is None for c in columnwise):
        return "", ()
    words = ",".join("" if rule is None else str(rule.serial) for rule in rules)
    return f"{words} of {_letters(columnwise)}", columnwise


def _lasting(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    made = torch.empty(shape, dtype=torch.uint8, device=device)
    torch._dynamo.mark_static_address(made, guard=False)  # else a captured program copies it in, and is not given it
    return made


def _shapes(
    number: int, columnwise: Sequence[bool | None], sizes: Sequence[tuple[int, int, torch.dtype]], device: torch.device
) -> list[tuple[int, ...]]:
    """Of the bytes of each copy: what quantizing weights of these sizes makes."""
    rt, found = shape_runtime(device), []
    one = to_core_shape(torch.empty(3 * len(sizes), device="meta"))
    for i, (c, (rows, cols, dtype)) in enumerate(zip(columnwise, sizes, strict=True)):
        if c is not None:
            weight = to_core_shape(torch.empty(rows, cols, dtype=dtype, device="meta"))
            product = _product(precision_of(part_of(number, i)), weight, c, Scales(one, one, one, None), i)
            found += [tuple(t.shape) for t in _memory(quantized(rt, weight, product))]
    return found


@constant_at_trace
def plan_at_trace(what: str, parts: tuple[int, ...], first: bool) -> str:
    """The operator's plan with copies that are this."""
    return f"{'first' if first else 'later'} {what.partition(' of ')[2]} {' '.join(map(str, parts))}"


@constant_at_trace
def made_of(text: str) -> int:
    """How many tensors a forward of this plan makes of copies."""
    return parsed(text).tensors if text and parsed(text).first else 0


@constant_at_trace
def _behind(text: str) -> tuple[int, int]:
    """How many tensors of copies, and then of parts, come behind the layer's inputs."""
    plan = parsed(text)
    return plan.tensors, sum(plan.parts)


def own_and_given(text: str, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The layer's own inputs, and the copies among the others."""
    count, parts = _behind(text)
    end = len(inputs) - parts
    return list(inputs[: end - count]), list(inputs[end - count : end])


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
    count = len(views) - sum(plan.parts) - plan.tensors
    own, rest = list(views[:count]), iter(views[count:])
    given = [next(rest) for _ in range(plan.tensors)]
    weights = [own[i] for i in call.layer.weights]
    products = [
        None if c is None else _product(spec.precision, weight, c, scales, i)
        for i, (spec, weight, c) in enumerate(zip(call.layer.linears(call.spec), weights, plan.columnwise, strict=True))
    ]
    identity = _identity(weights, plan, rest, products) if check else None
    if plan.first:
        ready = [None if p is None else quantized(rt, w, p) for w, p in zip(weights, products, strict=True)]
        made = [t for q in ready if q is not None for t in _memory(q)]
        if identity is not None:  # traced code writes them into what is given, or hands them on in their place
            _note(made, identity)
            _note([t.owner for t in given], identity)
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
        found += [(t.untyped_storage()._cdata, t.storage_offset(), t._version, t.shape) for t in of_it]
    return tuple(found)
