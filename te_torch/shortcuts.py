"""A call of a layer that was replayed before, replayed on torch's tensors as they are.

The core's way makes a view of each tensor, asks it what a recording depends on, and makes views of the results. Here
the tensors are asked themselves, and addresses are all that goes in. A quantized weight knows what recordings depend
on of it, for as long as it stays where it is. What is not plain (a quantized activation, a tensor that is not dense,
one that is aligned to less than plans look at) goes the core's way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import attrgetter, itemgetter, or_
from typing import Any

import torch

from te_core.env import autotuning
from te_core.quantize.state import Scales
from te_core.runtime import Runtime
from te_core.tape import taped
from te_core.tape.tape import Tape
from te_core.tape.taped import ALIGNED, Shortcut, Taped
from te_core.tape.walk import NotRecordedError, facts, facts_of_scales
from te_core.tensor import Tensor
from te_torch.quantized import QuantizedTorch

_NOT_THERE = type(None)
_MOST_KINDS = 1024
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, _NOT_THERE))
#: By the types of a call's arguments, met before: what chooses the plain ones that are there, and for each quantized
#: one, the last first, which argument it is and how many plain ones come before it. None where something else is.
_present: dict[tuple[type, ...], tuple[Any, tuple[tuple[int, int], ...]] | None] = {}
# What a call asks of its tensors, each in one call in C for all of them.
_address_of, _is_dense, _is_negated = torch.Tensor.data_ptr, torch.Tensor.is_contiguous, torch.Tensor.is_neg
_facts_of = attrgetter("shape", "dtype", "device")


#: A call's key, how such calls are replayed (None: not known yet), the addresses of its tensors, what holds these, and
#: the call's other objects (`Tape.replay`).
Found = tuple[tuple[Any, ...], "Shortcut | None", list[Any], list[Any], list[Any]]


def find(
    function: Taped,
    rt: Runtime,
    tensors: Sequence[torch.Tensor | None],
    scales: Scales | None,
    options: Mapping[str, Any],
    release: bool = False,
) -> Found | None:
    """What is known of this call; None where it is not to be replayed, or not as it is.

    Tensors as the function takes them, and its options besides the scales; with `release` it frees what it was given to
    keep.
    """
    if (taped._when or taped.when()) == "never" or function.reason is not None:
        return None
    kinds = tuple(map(type, tensors))
    try:
        present = _present[kinds]
    except KeyError:  # or another thread has cleared it
        if len(_present) >= _MOST_KINDS:  # classes that a program makes as it runs
            _present.clear()
        present = _present[kinds] = _looked_at(kinds)
    if present is None:
        return None
    choose, quantized = present
    held = [*choose(tensors)]
    try:
        at = list(map(_address_of, held))
        if not all(map(_is_dense, held)) or True in map(_is_negated, held):
            return None
        said, bits = [*map(_facts_of, held)], reduce(or_, at)
    except RuntimeError:  # one has no memory, or no shape: the core's way says what it is
        return None
    wholes: list[Any] = []
    if quantized and not _with_quantized([(tensors[i], place) for i, place in quantized], at, held, said, wholes, rt):
        return None
    parts: tuple[Any, ...]
    parts = "torch", autotuning(), function.number, rt.device, rt.joins, rt.alignment, release, kinds, *said, None
    try:
        if scales is not None:  # of a state on another device the core says what is wrong
            known = facts_of_scales(scales, rt.device)
            parts = *parts, known.number
            at += known.at
            held += known.tensors
            bits |= known.bits
        if options:
            parts = *parts, *_with_options(options, at, held, wholes, rt.device)
    except NotRecordedError:
        return None
    # An address of 0: nothing is in it, or it is a tensor without memory.
    if 0 in at:
        return None
    if rt.allocator.where >= 0:  # type: ignore[attr-defined]
        if bits & (ALIGNED - 1):
            return None
        if (wholes or options) and reduce(or_, at) & (ALIGNED - 1):  # pieces, and gradients in a buffer, lie anywhere
            parts = *parts, tuple([(address | ALIGNED) & -(address | ALIGNED) for address in at])
    shortcut = taped._tapes.get(parts)  # noted by `Taped.known_as`
    return None if shortcut is not None and shortcut.tape is None else (parts, shortcut, at, held, wholes)


def _looked_at(kinds: tuple[type, ...]) -> Any:
    """What `_present` has for these."""
    where = [i for i, kind in enumerate(kinds) if kind in _PLAIN and kind is not _NOT_THERE]
    others = [i for i, kind in enumerate(kinds) if kind not in _PLAIN]
    if 0 in others or not all(issubclass(kinds[i], QuantizedTorch) for i in others):
        return None
    return _chosen(where), tuple((i, sum(plain < i for plain in where)) for i in reversed(others))


def _chosen(where: list[int]) -> Any:
    return itemgetter(*where) if len(where) > 1 else lambda tensors: [tensors[i] for i in where]


def _with_quantized(
    quantized: Sequence[tuple[Any, int]],
    at: list[Any],
    held: list[Any],
    said: list[Any],
    wholes: list[Any],
    rt: Runtime,
) -> bool:
    """Put quantized tensors between plain ones; False where one has to be looked at anew. The last ones come first."""
    try:
        for t, place in quantized:
            known = t._core_facts(rt.device)
            if known is None:
                return False
            at[place:place] = known.at
            held[place:place] = [t] * len(known.at)
            said.append(known.number)
            wholes.append(t)
    except NotRecordedError:
        return False
    wholes.reverse()
    return True


def _with_options(
    options: Mapping[str, Any], at: list[Any], held: list[Any], wholes: list[Any], device: Any
) -> list[Any]:
    """What recordings depend on of options, whose tensors join the others."""
    tensors: list[Tensor] = []
    said: list[Any] = [None]
    for name, value in options.items():
        said += (name, facts(value, tensors, wholes, device))
    at += [t.ptr for t in tensors]
    held += [t.owner if isinstance(t.owner, torch.Tensor) else t for t in tensors]
    return said


class _Made:
    """What a replay's memory is to be returned as: what chooses it, and of what the shape is another one."""

    __slots__ = ("choose", "others")

    def __init__(self, leaves: Sequence[Any], tape: Tape) -> None:
        self.choose = _chosen([leaf[0] if leaf else -1 for leaf in leaves])  # the last one held is None
        self.others = [
            (i, *leaf) for i, leaf in enumerate(leaves) if leaf and tuple(leaf[1]) != tuple(tape.slots[leaf[0]].shape)
        ]


def forward(
    shortcut: Shortcut, rt: Runtime, at: list[Any], held: list[Any], wholes: list[Any]
) -> tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor | None]]:
    """(outputs, what is saved). Outputs are tensors of their shape, not views, which nobody could change in place."""
    shortcut.replay(rt, at, held, wholes)
    made = shortcut.made
    if made is None:
        made = shortcut.made = [_Made(leaves, shortcut.tape) for leaves in shortcut.plain]  # type: ignore[arg-type]
    outputs, saved = made
    for _, slot, shape in outputs.others:
        held[slot].resize_(shape)
    held.append(None)
    return tuple(outputs.choose(held)), saved.choose(held)


def backward(
    shortcut: Shortcut, rt: Runtime, at: list[Any], held: list[Any], wholes: list[Any]
) -> Sequence[torch.Tensor | None]:
    """The gradients. One for two inputs is one tensor twice."""
    shortcut.replay(rt, at, held, wholes)
    made = shortcut.made
    if made is None:
        made = shortcut.made = _Made(shortcut.plain, shortcut.tape)  # type: ignore[arg-type]
    held.append(None)
    found: Sequence[torch.Tensor | None] = made.choose(held)
    if made.others:
        found = [*found]
        for i, slot, shape in made.others:
            found[i] = held[slot].view(shape)
    return found
