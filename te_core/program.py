"""Programs: calls of layers in a file that a player without Python runs (docs/program_file.md, docs/c.md).

`record` writes one; `python -m te_core.program FILE` prints it, and with a second file the lines in which they differ.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from te_core import cache
from te_core.calls import Call
from te_core.errors import ArgumentError, UnsupportedError
from te_core.runtime import Runtime
from te_core.tape import recorder
from te_core.tape.program import add_entry
from te_core.tape.program_file import Program, lines_of, pack, unpack
from te_core.tape.tape import Tape
from te_core.tape.taped import ALIGNED
from te_core.tape.walk import NotRecordedError, tensors_of

__all__ = ["Example", "Program", "main", "read", "record", "recorded", "tape_of"]


class Example(NamedTuple):
    """A call to be recorded, with arguments like those that it will have: their shapes, dtypes, strides, alignment.

    `alignment`: addresses will be multiples of this, and of no more, where those of the example are.
    """

    rt: Runtime
    call: Call | Callable[..., Any]  # te_core.calls.call(...), or an operation of te_core.ops.raw
    arguments: tuple[Any, ...]  # as the core's function takes them
    options: Mapping[str, Any] = MappingProxyType({})
    backward: bool = False
    alignment: int = ALIGNED


def record(calls: Mapping[str, Example], path: str | Path) -> None:
    """Write a file in which each of the calls is an entry of this name. Nothing is launched."""
    write("te_core.record", path, pack(recorded(calls)))


def write(operation: str, path: str | Path, content: bytes) -> None:
    """Put a packed program in its place."""
    if not cache.write(Path(path).absolute(), content):
        allowed, do = "a path in a folder that may be written to", "choose another path"
        raise ArgumentError(operation, f"path={str(path)!r}, which cannot be written", allowed, do)


def recorded(calls: Mapping[str, Example]) -> Program:
    """The program that `record` writes."""
    program = Program()
    devices = {example.rt.device for example in calls.values()}
    if len(devices) != 1 or next(iter(devices)).kind != "cuda":
        came = ", ".join(sorted(map(str, devices))) or "no calls"
        do = "record with te_core.Runtime.cuda(); other runtimes play nothing without Python"
        raise UnsupportedError("te_core.record", f"calls on {came}", "calls on one GPU", do)
    for name, example in calls.items():
        call, tape, gradients = example.call, tape_of(name, example), None
        if isinstance(call, Call) and example.backward:
            gradients = [f"grad.{a.name or a.core}" for a in call.layer.arguments]
        add_entry(program, name, tape, said(example), example.rt.device.index, gradients)
    return program


def tape_of(name: str, example: Example) -> Tape:
    """The tape of a call that an entry of this name is to do."""
    rt, call, arguments, options, backward, promised = example
    if promised not in _ALIGNMENTS:
        do = "correct it; 256 is what most allocators give"
        raise ArgumentError(f"te_core.record {name}", f"alignment={promised!r}", "1, 2, 4 ... 256", do)
    alignment = [min(promised, t.ptr & -t.ptr or ALIGNED) for t in tensors_of([*arguments, *options.values()])]
    given = arguments, dict(options)
    try:
        if not isinstance(call, Call):
            return recorder.record(rt, name, call, given, alignment)
        taped = call.backward if backward else call.forward
        if taped.reason:
            raise NotRecordedError(taped.reason)
        return recorder.record(rt, taped.name, partial(taped.function, spec=taped.spec), given, alignment)
    except NotRecordedError as error:
        do = "play this call by te_core"
        raise UnsupportedError(f"te_core.record {name}", str(error), "calls that te_core replays", do) from error


def said(example: Example) -> str:
    """The call, for who records it anew."""
    if not isinstance(example.call, Call):
        function = example.call.func if isinstance(example.call, partial) else example.call
        return json.dumps({"function": getattr(function, "__name__", type(function).__name__)})
    asked = example.call.asked
    said = {
        "layer": example.call.layer.name,
        "pass": "backward" if example.backward else "forward",
        "options": {name: value if isinstance(value, _PLAIN) else repr(value) for name, value in asked.options.items()},
        "dtype": asked.dtype.name,
        "needs": sorted(asked.needs),
        "precision": repr(asked.precision),
    }
    return json.dumps(said, sort_keys=True)


_ALIGNMENTS = frozenset(1 << bit for bit in range(ALIGNED.bit_length()))
_PLAIN = (bool, int, float, str, type(None))


def read(path: str | Path) -> Program:
    """The program in a file of ours, or of the system's."""
    content = cache.read(Path(path).absolute())
    if content is None:
        allowed = "a file that only you and the system may write to, in such a folder: a program is code"
        raise ArgumentError("read a program", f"{str(path)!r}", allowed, "see the warning, or correct the path")
    return unpack(content)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a program, or how two differ (then 1, unless they are alike)."""
    parser = argparse.ArgumentParser(prog="python -m te_core.program", description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("other", nargs="?", help="a second one, to compare")
    asked = parser.parse_args(arguments)
    try:
        one = list(lines_of(read(asked.file)))
        other = list(lines_of(read(asked.other))) if asked.other else None
    except ArgumentError as error:
        print(error, file=sys.stderr)
        return 2
    if other is None:
        print("\n".join(one))
        return 0
    found = list(difflib.unified_diff(one, other, asked.file, asked.other, lineterm="", n=1))
    print("\n".join(found) or "they are alike")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
