"""The command `te`: what the machine has, what a step of yours really computes in, and its kernels compiled ahead.

    te doctor                      libraries, the GPU, which recipes run here (te doctor --help: more)
    te report train.py:step        run a step, then print the precision and the memory of its model
    te warmup train.py:step        run a step twice, so that later processes find its kernels and plans on disk

`train.py:step` names a function of a file, or of a module (`package.module:step`). The function takes no arguments,
runs a forward (and a backward, if that shall be seen) and returns the model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch

from te_core.errors import ArgumentError, LibraryError, UnsupportedError
from te_core.spelling import meant
from te_core.tools import doctor
from te_torch.tools.memory_report import memory_report
from te_torch.tools.precision_report import precision_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command: 0 if all went well, 1 if doctor or the step finds a fault, 2 for a mistake in the command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["doctor"]:
        return doctor.main(given[1:], "te doctor")
    parser = argparse.ArgumentParser(
        prog="te", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="what te-runtime finds on this machine")
    for name, what in {
        "report": "the precision and the memory of a model after a step",
        "warmup": "compile what a step needs, and keep it on disk",
    }.items():
        command = commands.add_parser(name, help=what, epilog=f"example: te {name} train.py:step")
        command.add_argument(
            "step", metavar="MODULE:FUNCTION", help="a function that runs a step and returns the model"
        )
        command.add_argument("--json", action="store_true", help="the same, for programs: one object of JSON")
    options = parser.parse_args(given)
    step = function_of(options.step, parser.error)
    try:
        found = _report(step) if options.command == "report" else _warmup(step)
    except (ArgumentError, LibraryError, UnsupportedError) as error:
        print(f"te {options.command}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found[0], indent=2) if options.json else found[1])
    return 0


def function_of(name: str, mistake: Callable[[str], NoReturn]) -> Callable[[], Any]:
    """The function that MODULE:FUNCTION names; `mistake` ends the program with what is wrong."""
    place, _, wanted = name.rpartition(":")
    if not place or not wanted:
        mistake(f"{name}: write FILE.py:FUNCTION or MODULE:FUNCTION")
    sys.path.insert(0, "")  # as `python -m` has it
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            mistake(f"{place}: there is no such file")
        sys.path.insert(0, str(path.resolve().parent))  # as `python FILE.py` has it
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None  # of every path that ends so
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        try:
            module = import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # the module is there, and imports one that is not
            mistake(f"{place}: no module {error.name} here: run te in the folder that has it, or name a file")
    function = getattr(module, wanted, None)
    if not callable(function):
        mistake(f"{place} has no function {wanted}{meant([wanted], vars(module))}")
    return function


def _model(step: Callable[[], Any]) -> torch.nn.Module:
    """What a step returns."""
    model = step()
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            "te", f"a step that returns {type(model).__name__}", "one that returns the model", "return it"
        )
    return model


def _report(step: Callable[[], Any]) -> tuple[dict[str, Any], str]:
    """A step's precision and memory, for programs and in words."""
    model = _model(step)
    precision, memory = precision_report(model), memory_report(model)
    return {"precision": precision.as_dict(), "memory": memory.as_dict()}, f"{precision}\n\n{memory}"


def _warmup(step: Callable[[], Any]) -> tuple[dict[str, Any], str]:
    """The seconds of a first step, which compiles, and of a second one."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        _model(step)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    first, second = seconds
    return {"seconds": seconds}, f"first step {first:.2f} s, second step {second:.2f} s; kernels and plans are on disk"


if __name__ == "__main__":
    sys.exit(main())
