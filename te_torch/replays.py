"""Replays of a layer on torch's tensors as they are: what a recorded call looked like, and its tape.

The core's way makes a view of each tensor, asks each view what a recording depends on, and makes views of the results.
A `Replay` compares the tensors themselves with those of the call that was recorded; only addresses go in. A quantized
weight knows what recordings depend on of it, for as long as it stays where it is. What is not plain (a quantized
activation, a tensor that is not dense, or aligned to less than plans look at) goes the core's way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from operator import itemgetter, or_
from typing import Any

import torch

from te_core.env import autotuning
from te_core.runtime import Runtime
from te_core.tape import taped
from te_core.tape.tape import Tape
from te_core.tape.taped import Taped
from te_core.tape.walk import NotRecordedError, facts, facts_of_scales
from te_core.tensor import Tensor
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import LOW, was_freed

#: Of one direction of a call; the one that was used least recently goes first.
_MOST = 16
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_address_of = torch.Tensor.data_ptr

#: The addresses of a call's tensors, what holds these, and the call's other objects (`Tape.replay`).
Found = tuple[list[Any], list[Any], list[Any]]


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function of tensors that says whether they are like these: class, dtype, device, shape, strides, whether
    gradients are wanted, which of them are one object; under the same modes of torch.

    It is one call in C, by which compiled code guards its inputs. That takes each object once.
    """
    first = {id(t): i for i, t in reversed([*enumerate(tensors)])}
    each = sorted(first.values())
    of = [*map(tensors.__getitem__, each)]
    sizes, strides = [[*t.shape] for t in of], [*map(list, map(torch.Tensor.stride, of))]
    guards: Any = torch._C._dynamo.guards  # it is declared to take one list, and takes one for each tensor
    check: Callable[..., bool] = guards.TensorGuards(*of, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if len(each) == len(tensors):
        return check
    choose, twice = chosen(each), [(i, first[id(t)]) for i, t in enumerate(tensors) if first[id(t)] != i]

    def check_each(*others: torch.Tensor) -> bool:
        return all([others[i] is others[j] for i, j in twice]) and check(*choose(others))

    return check_each


class Replay:
    """A recorded call: what the tensors of another one have to be like, and the tape."""

    __slots__ = (
        "_alike", "_choose", "_era", "_kinds", "_made", "_of", "_quantized", "_release", "_seen", "size", "tape",
    )  # fmt: skip

    tape: Tape

    def __init__(self, rt: Runtime, tensors: Sequence[Any], release: bool) -> None:
        self._era, self._of = taped.era, (rt.device, rt.joins, rt.alignment)
        self._kinds, self._release = [*map(type, tensors)], release
        self.size = tensors[0].numel()
        plain = [i for i, kind in enumerate(self._kinds) if kind in _PLAIN]
        self._choose = chosen(plain)
        self._alike = alike(self._choose(tensors))
        #: Of each quantized tensor, the last first: which argument it is, and how many plain ones come before it.
        self._quantized = tuple(
            (i, sum(other < i for other in plain))
            for i in reversed(range(len(tensors)))
            if issubclass(self._kinds[i], QuantizedTorch)
        )
        self._seen: list[Any] | None = None  # of the first call that `fits` looks at: this one
        self._made: Any = None  # how its results are made, from the first replay on

    def fits(
        self, rt: Runtime, tensors: Sequence[Any], scales: Any, options: Mapping[str, Any], release: bool
    ) -> Found | None:
        """What a replay takes of this call, if it is like the recorded one.

        `options`: what the layer takes besides the scales; `release`: it frees what it was given to keep.
        """
        if [*map(type, tensors)] != self._kinds or release is not self._release or taped.era is not self._era:
            return None
        held = [*self._choose(tensors)]
        if not self._alike(*held) or (rt.device, rt.joins, rt.alignment) != self._of:
            return None
        wholes: list[Any] = []
        try:
            at = list(map(_address_of, held))
            seen: list[Any] = [autotuning()]
            bits = reduce(or_, at, 0)
            for i, place in self._quantized:
                t = tensors[i]
                known = t._core_facts(rt.device)
                if known is None:  # it has to be looked at anew
                    return None
                at[place:place], held[place:place] = known.at, [t] * len(known.at)
                seen += (known.number, t.dtype)
                wholes.insert(0, t)
            for one in scales if scales.__class__ is tuple else (scales,):  # those of several parts
                if one is not None:
                    known = facts_of_scales(one, rt.device)
                    at += known.at
                    held += known.tensors
                    bits |= known.bits
                    seen.append(known.number)
            if options:
                seen += _of_options(options, at, held, wholes, rt.device)
        except (RuntimeError, NotRecordedError):  # one has no memory, or lies elsewhere: the core's way says what it is
            return None
        if 0 in at or (min(at) < LOW and any([was_freed(t) for t in held if t.__class__ in _PLAIN])):
            return None  # nothing is in it, or it is a tensor without memory
        if rt.device.kind == "cuda":
            if bits & (taped.ALIGNED - 1):
                return None
            if (wholes or options) and reduce(or_, at) & (taped.ALIGNED - 1):  # pieces, and gradients in a buffer
                seen.append(tuple([(address | taped.ALIGNED) & -(address | taped.ALIGNED) for address in at]))
        if seen != self._seen:
            if self._seen is not None:
                return None
            self._seen = seen
        return at, held, wholes

    def forward(
        self, rt: Runtime, at: list[Any], held: list[Any], wholes: list[Any]
    ) -> tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor | None]]:
        """(outputs, what is saved). Outputs are no views, which nobody could change in place."""
        self.tape.replay(rt, at, held, wholes)
        taped.COUNTS.replayed += 1
        made = self._made
        if made is None:
            outputs, saved = self.tape.result.plain
            known = {*range(self.tape.inputs), *[leaf[0] for leaf in outputs if leaf]}
            made = self._made = _Made(outputs, self.tape), _Made(saved, self.tape, known)
        outputs, saved = made
        for _, slot, shape in outputs.others:
            held[slot].resize_(shape)
        held.append(None)
        return tuple(outputs.choose(held)), saved.shaped(held) if saved.others else saved.choose(held)

    def backward(self, rt: Runtime, at: list[Any], held: list[Any], wholes: list[Any]) -> Sequence[torch.Tensor | None]:
        """The gradients. One for two inputs is one tensor twice."""
        self.tape.replay(rt, at, held, wholes)
        taped.COUNTS.replayed += 1
        made = self._made
        if made is None:
            made = self._made = _Made(self.tape.result.plain, self.tape)
        held.append(None)
        return made.shaped(held) if made.others else made.choose(held)


class Replayed:
    """One direction of a call: the layer's function as the core runs it, and the replays that are known of it."""

    __slots__ = ("known", "taped")

    def __init__(self, function: Taped) -> None:
        self.taped = function
        self.known: tuple[Replay, ...] = ()  # the one that was used last comes first

    def find(
        self, rt: Runtime, tensors: Sequence[Any], scales: Any, options: Mapping[str, Any], release: bool = False
    ) -> tuple[Replay, Found] | None:
        """The replay that fits this call, with what it takes."""
        size = None if tensors[0] is None else tensors[0].numel()
        for replay in self.known:
            if replay.size != size:  # of another shape: `fits` would say so too, and takes longer
                continue
            found = replay.fits(rt, tensors, scales, options, release)
            if found is not None:
                if replay is not self.known[0]:
                    self.first(replay)
                return replay, found
        return None

    def first(self, replay: Replay) -> None:
        """Look at this one first from now on."""
        self.known = (replay, *[other for other in self.known if other is not replay])[:_MOST]

    def unknown(
        self, rt: Runtime, tensors: Sequence[Any], scales: Any, options: Mapping[str, Any], release: bool
    ) -> Replay | None:
        """What a call that none fits looks like, for `note` once the core has run it; None: it is not plain."""
        if taped.when() == "never" or self.taped.reason is not None or tensors[0].__class__ not in _PLAIN:
            return None
        plain = [t for t in tensors if t is not None and not isinstance(t, QuantizedTorch)]
        if not all([t.__class__ in _PLAIN and t.is_contiguous() and not t.is_neg() for t in plain]):
            return None
        replay = Replay(rt, tensors, release)
        return None if replay.fits(rt, tensors, scales, options, release) is None else replay

    def note(self, replay: Replay | None, tape: Tape | None) -> None:
        """Know the calls that are like the one for which the core replayed this tape."""
        if replay is not None and tape is not None and tape.result.plain is not None:
            replay.tape = tape
            self.first(replay)


def chosen(where: list[int]) -> Any:
    """Chooses these of a sequence, in one call in C."""
    if len(where) > 1:
        return itemgetter(*where)
    return itemgetter(slice(where[0], where[0] + 1 or None) if where else slice(0))


def _of_options(
    options: Mapping[str, Any], at: list[Any], held: list[Any], wholes: list[Any], device: Any
) -> list[Any]:
    """What recordings depend on of options, whose tensors join the others."""
    tensors: list[Tensor] = []
    said: list[Any] = []
    for name, value in options.items():
        said += (name, facts(value, tensors, wholes, device))
    at += [t.ptr for t in tensors]
    held += [t.owner if isinstance(t.owner, torch.Tensor) else t for t in tensors]
    return said


class _Made:
    """What a replay's memory is to be returned as: what chooses it, and of what the shape is another one."""

    __slots__ = ("choose", "others")

    def __init__(self, leaves: Sequence[Any], tape: Tape, known: Collection[int] = ()) -> None:
        """`known`: slots that stay as they are, being inputs or outputs."""
        self.choose = chosen([leaf[0] if leaf else -1 for leaf in leaves])  # the last one held is None
        self.others = [
            (i, *leaf)
            for i, leaf in enumerate(leaves)
            if leaf and leaf[0] not in known and tuple(leaf[1]) != tuple(tape.slots[leaf[0]].shape)
        ]

    def shaped(self, held: list[Any]) -> Sequence[torch.Tensor | None]:
        """The memory in its shapes."""
        found: list[torch.Tensor | None] = [*self.choose(held)]
        for i, slot, shape in self.others:
            found[i] = held[slot].view(shape)
        return found
