"""A layer's function that is recorded for each key of its arguments, and replayed.

The key has all that a recording depends on: shapes, dtypes, strides, which arguments are there, what quantized ones
hold, the device, how addresses are aligned, and whether products are autotuned. What cannot be recorded runs as it
always has, and `COUNTS` says why.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

from te_core import env
from te_core.env import autotuning
from te_core.plan_cache import PlanCache
from te_core.precision import Operand
from te_core.runtime import Runtime
from te_core.spelling import choice_error
from te_core.tape.recorder import record
from te_core.tape.tape import Tape
from te_core.tape.walk import INSPECTED, NotRecordedError, facts
from te_core.tensor import META, Tensor

#: When a call is recorded: when its key is met first, when it is met again, never.
WHEN = ("first", "second", "never")
_MOST_TAPES = 2048
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
_met = PlanCache(_MOST_TAPES)  # why calls of a key have no tape; and (caller, key) of those that were met once
_numbers = itertools.count()
_when: str | None = None
#: Another object after each change of the setting, and after `forget`: what an adapter bound before counts no more.
era = object()


def when() -> str:
    """The setting: what `set_when` said last, else what the environment says."""
    global _when
    if _when is None:
        _when = env.chosen("TE_CORE_TAPES")
    return _when


def set_when(chosen: str | None) -> None:
    """Set it for the process; None asks the environment again."""
    global _when, era
    if chosen is not None and chosen not in WHEN:
        raise choice_error("tapes", "chosen", chosen, WHEN)
    _when, era = chosen, object()


def tapes() -> list[Tape]:
    """Those that are kept, the youngest last."""
    return list(_tapes.values())


def forget() -> None:
    """Let go of all tapes."""
    global _tapes, _met, era
    _tapes, _met, era = PlanCache(_MOST_TAPES), PlanCache(_MOST_TAPES), object()


class Taped:
    """A function of a layer (its forward, or its backward) with its spec."""

    __slots__ = ("function", "name", "number", "reason", "spec")

    def __init__(self, name: str, function: Callable[..., Any], spec: Any) -> None:
        self.name, self.function, self.spec = name, function, spec
        self.number = next(_numbers)
        self.reason = never_recorded(spec)  # why no call of it is recorded, if none is

    def __call__(self, rt: Runtime, *arguments: Any, **options: Any) -> Any:
        """function(rt, *arguments, spec=spec, **options)."""
        return self.ran(rt, arguments, options)[0]

    def ran(
        self, rt: Runtime, arguments: tuple[Any, ...], options: dict[str, Any], caller: int = 0
    ) -> tuple[Any, Tape | None]:
        """The same, and the tape that was replayed for it.

        A call is met again where the same `caller` makes it again: of layers that are alike, each meets it once.
        """
        if (_when or when()) == "never":
            return self.function(rt, *arguments, spec=self.spec, **options), None
        if rt.device is META:
            result = self.function(rt, *arguments, spec=self.spec, **options)
            COUNTS.interpreted[SHAPES] += 1
            return result, None
        reason, tape = self.reason, None
        key: tuple[Any, ...] = ()
        tensors: list[Tensor] = []
        wholes: list[Any] = []
        if reason is None:
            try:
                known = facts((*arguments, *options.values()), tensors, wholes, rt.device)
                alignment: Any = ALIGNED
                if rt.device.kind == "cuda" and any([t.ptr & (ALIGNED - 1) for t in tensors]):
                    # What does not read the crooked ones is planned as if they were not there.
                    alignment = tuple([(t.ptr | ALIGNED) & -(t.ptr | ALIGNED) for t in tensors])
                key = self.number, rt.device, rt.joins, rt.alignment, alignment, autotuning(), tuple(options), known
                tape = _tapes.get(key)
                if tape is None:
                    tape, reason = self._first(rt, key, (arguments, options), caller)
            except NotRecordedError as error:
                reason = str(error)
        if tape is not None:
            del arguments, options  # a replay frees what its caller has given up
            at: list[int] = [t.ptr for t in tensors]
            held: list[Any] = [*tensors]
            del tensors
            tape.replay(rt, at, held, wholes)
            COUNTS.replayed += 1
            return tape.result(at, held), tape
        result = self.function(rt, *arguments, spec=self.spec, **options)
        COUNTS.interpreted[reason] += 1  # type: ignore[index]  # not of a call that is refused
        if reason.startswith(FAILED):  # type: ignore[union-attr]
            _met.put(key, reason)  # it is not the call that is wrong: not tried again
        return result, None

    def _first(
        self, rt: Runtime, key: tuple[Any, ...], call: tuple[Any, dict[str, Any]], caller: int
    ) -> tuple[Tape | None, str]:
        """(a tape made now, or why there is none)."""
        reason = _met.get(key)
        if reason is not None:
            return None, reason
        if when() == "second" and _met.get((caller, key)) is None:
            _met.put((caller, key), True)
            return None, "met for the first time"
        try:
            tape = record(rt, self.name, partial(self.function, spec=self.spec), call, key[4])
        except NotRecordedError as error:
            _met.put(key, str(error))
            return None, str(error)
        except Exception as error:  # if it is the call that is wrong, the function itself will say so
            return None, f"{FAILED}: {error!r}"
        COUNTS.recorded += 1
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
