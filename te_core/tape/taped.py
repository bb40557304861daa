"""A layer's function that is recorded for each key of its arguments, and replayed.

The key has all that a recording depends on: shapes, dtypes, strides, which arguments are there, what quantized ones
hold, the device, how addresses are aligned, and whether products are autotuned. What cannot be recorded runs as it
always has, and `COUNTS` says why.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from threading import RLock
from typing import Any

from te_core import env
from te_core.env import autotuning
from te_core.errors import ArgumentError
from te_core.plan_cache import PlanCache
from te_core.precision import Operand
from te_core.runtime import Runtime
from te_core.tape.recorder import record
from te_core.tape.tape import Tape
from te_core.tape.walk import INSPECTED, NotRecordedError, facts
from te_core.tensor import META, Tensor

#: When a call is recorded: when its key is met first, when it is met again, never.
WHEN = ("first", "second", "never")
_MOST_TAPES = 2048
#: A recording costs about four calls, a replay saves half of one. A recording takes so many replays from a function's
#: credit, which begins with one recording, and which replays fill up to two: so sizes that come again by chance cost
#: little, after hours of one size too.
_PAYS, _MOST_CREDIT = 3, 6
#: As far as plans look at the alignment of an address.
ALIGNED = 256


@dataclass
class Counts:
    """How many calls were replayed and recorded, and how many ran as they always have, by reason."""

    replayed: int = 0
    recorded: int = 0
    interpreted: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """Of all calls those that were replayed."""
        total = self.replayed + self.interpreted.total()
        return self.replayed / total if total else 0.0

    def __str__(self) -> str:
        total = self.replayed + self.interpreted.total()
        if not total:
            return "no call was counted yet"
        reasons = [f"{count} not ({reason})" for reason, count in self.interpreted.copy().most_common(8)]
        return ", ".join([f"{self.replayed} of {total} calls of layers replayed ({self.share:.0%})", *reasons])


#: A reason that begins so, of a call that went well, is a fault of ours: tests look for it.
FAILED = "the recording failed"
SHAPES = "shapes alone"  # of a call without memory
COUNTS = Counts()
_tapes = PlanCache(_MOST_TAPES)
_met = PlanCache(_MOST_TAPES)  # keys of calls that have none: they take no tape's place
_trials: weakref.WeakSet[Trial] = weakref.WeakSet()
_enrolling = RLock()
_numbers = itertools.count()
_when: str | None = None


def when() -> str:
    """The setting: what `set_when` said last, else what the environment says."""
    global _when
    if _when is None:
        _when = env.tapes()
    return _when


def set_when(chosen: str | None) -> None:
    """Set it for the process; None asks the environment again."""
    global _when
    if chosen is not None and chosen not in WHEN:
        raise ArgumentError("tapes", repr(chosen), " or ".join(WHEN), "choose one of these")
    _when = chosen


def tapes() -> list[Tape]:
    """Those that are kept, the youngest last."""
    return [found for found in _tapes.values() if found.__class__ is Tape]


def forget() -> None:
    """Let go of all tapes, and of what was learnt about their use."""
    global _tapes, _met
    _tapes, _met = PlanCache(_MOST_TAPES), PlanCache(_MOST_TAPES)
    with _enrolling:
        for trial in list(_trials):
            trial.credit = _PAYS


class _Seen:
    """In the place of a tape: the key was met once, or cannot be recorded, for a reason."""

    __slots__ = ("reason",)

    def __init__(self, reason: str = "") -> None:
        self.reason = reason


_ONCE = _Seen()


class Shortcut:
    """How a call is replayed by an adapter who makes the addresses himself and reads the results where `plain` says."""

    __slots__ = ("made", "plain", "tape", "trial")

    def __init__(self, tape: Tape | None, plain: Any, trial: Trial) -> None:
        self.tape, self.plain, self.trial = tape, plain, trial  # without a tape: such a call has none
        self.made: Any = None  # what the adapter makes of `plain` at first use

    def replay(self, rt: Runtime, at: list[Any], held: list[Any], wholes: Sequence[Any] = ()) -> None:
        """`Tape.replay`, counted."""
        self.tape.replay(rt, at, held, wholes)  # type: ignore[union-attr]
        COUNTS.replayed += 1
        self.trial.credit += 1


class Trial:
    """Whether it pays to record a function, or several whose specs differ in sizes alone."""

    __slots__ = ("__weakref__", "credit")

    def __init__(self) -> None:
        self.credit = _PAYS  # replays that recordings may cost from now on
        with _enrolling:
            _trials.add(self)

    @property
    def failed(self) -> bool:
        """Whether no further tape is to be made for now."""
        return self.credit < _PAYS

    def pay(self) -> None:
        """For a recording. What many replays of the past have left counts only as far as the credit goes."""
        self.credit = max(0, min(self.credit, _MOST_CREDIT) - _PAYS)


class Taped:
    """A function of a layer (its forward, or its backward) with its spec."""

    __slots__ = ("function", "name", "number", "reason", "spec", "trial")

    def __init__(self, name: str, function: Callable[..., Any], spec: Any, trial: Trial | None = None) -> None:
        self.name, self.function, self.spec = name, function, spec
        self.number = next(_numbers)
        self.trial = Trial() if trial is None else trial
        self.reason = never_recorded(spec)  # why no call of it is recorded, if none is

    def __call__(self, rt: Runtime, *arguments: Any, **options: Any) -> Any:
        """function(rt, *arguments, spec=spec, **options)."""
        return self.known_as(None, rt, *arguments, **options)

    def known_as(self, short: tuple[Any, ...] | None, rt: Runtime, *arguments: Any, **options: Any) -> Any:
        """The same of a call that an adapter will know by this key, made of its own tensors.

        It is noted how such a call is replayed without views of them, or that it is not.
        """
        if (_when or when()) == "never":
            return self.function(rt, *arguments, spec=self.spec, **options)
        if rt.device is META:
            result = self.function(rt, *arguments, spec=self.spec, **options)
            COUNTS.interpreted[SHAPES] += 1
            return result
        reason, tape, key = self.reason, None, ()
        tensors: list[Tensor] = []
        wholes: list[Any] = []
        if reason is None:
            try:
                key = self._key(rt, arguments, options, tensors, wholes)
                tape = _tapes.get(key)
                if tape is None:
                    tape, reason = self._first(rt, key, arguments, options)
            except NotRecordedError as error:
                reason = str(error)
        if tape is not None:
            del arguments, options  # a replay frees what its caller has given up
            if short is not None:
                plain = tape.result.plain
                _tapes.put(short, Shortcut(None if plain is None else tape, plain, self.trial))
            return self._replayed(rt, tape, tensors, wholes)
        result = self.function(rt, *arguments, spec=self.spec, **options)
        COUNTS.interpreted[reason] += 1  # type: ignore[index]  # not of a call that is refused
        if reason.startswith(FAILED):  # type: ignore[union-attr]
            _met.put(key, _Seen(reason))  # type: ignore[arg-type]  # it is not the call that is wrong: not tried again
        return result

    def _replayed(self, rt: Runtime, tape: Tape, tensors: list[Tensor], wholes: list[Any]) -> Any:
        at: list[int] = [t.ptr for t in tensors]
        held: list[Any] = [*tensors]
        tape.replay(rt, at, held, wholes)
        COUNTS.replayed += 1
        self.trial.credit += 1
        return tape.result(at, held)

    def _key(
        self, rt: Runtime, arguments: Any, options: dict[str, Any], tensors: list[Tensor], wholes: list[Any]
    ) -> tuple[Any, ...]:
        device = rt.device
        parts: list[Any] = [self.number, device, rt.joins, rt.alignment, 0, autotuning()]
        for value in arguments:
            if value.__class__ is Tensor and value.device is device:
                tensors.append(value)
                parts += (value.shape, value.dtype, value.strides)
            else:
                parts.append(None if value is None else facts(value, tensors, wholes, device))
        for name, value in options.items():
            parts += (name, None if value is None else facts(value, tensors, wholes, device))
        bits = parts[4] = ALIGNED
        if device.kind == "cuda":
            for t in tensors:
                bits |= t.ptr
        if bits & (ALIGNED - 1):  # what does not read the crooked ones is planned as if they were not there
            parts[4] = tuple([(t.ptr | ALIGNED) & -(t.ptr | ALIGNED) for t in tensors])
        return tuple(parts)

    def _first(
        self, rt: Runtime, key: tuple[Any, ...], arguments: Any, options: dict[str, Any]
    ) -> tuple[Tape | None, str]:
        """(a tape made now, or why there is none)."""
        found: _Seen | None = _met.get(key)
        if found is not None and found.reason:
            return None, found.reason
        if when() == "second":
            if found is None:
                _met.put(key, _ONCE)
                return None, "met for the first time"
            if self.trial.failed:
                return None, "shapes of which few come again"
        try:
            tape = record(rt, self.name, partial(self.function, spec=self.spec), (arguments, options), key[4])
        except NotRecordedError as error:
            _met.put(key, _Seen(str(error)))
            return None, str(error)
        except Exception as error:  # if it is the call that is wrong, the function itself will say so
            return None, f"{FAILED}: {error!r}"
        COUNTS.recorded += 1
        self.trial.pay()
        return _tapes.put(key, tape), ""


def never_recorded(spec: Any) -> str | None:
    """Why calls of this spec are not recorded, whatever they are given."""
    if isinstance(spec, Operand) and spec.custom is not None:
        return "a user's quantizer"
    if not is_dataclass(spec):
        if isinstance(spec, tuple):
            return next(filter(None, map(never_recorded, spec)), None)
        return None
    for part in fields(spec):
        value = getattr(spec, part.name)
        if part.name == "inspect" and value is not None:
            return INSPECTED
        found = never_recorded(value)
        if found is not None:
            return found
    return None
