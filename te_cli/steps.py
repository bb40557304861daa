"""A function of the user's that a command runs: found by its name, and its errors shown from its own lines on."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from te_cli.arguments import UserError
from te_core.errors import ArgumentError, LibraryError, UnsupportedError
from te_core.spelling import meant

if TYPE_CHECKING:
    import torch

OURS = (UserError, ArgumentError, LibraryError, UnsupportedError, MemoryError)  # shown by the command, in a line


def add_step(parser: argparse.ArgumentParser) -> None:
    """The argument that names a step."""
    parser.add_argument("step", metavar="MODULE:FUNCTION", help="a function that runs a step and returns the model")


def function_of(name: str) -> Callable[[], Any]:
    """The function that FILE.py:FUNCTION or MODULE:FUNCTION names."""
    place, _, wanted = name.rpartition(":")
    if not place or not wanted:
        raise UserError(f"{name}: write FILE.py:FUNCTION or MODULE:FUNCTION")
    sys.path.insert(0, "")  # as `python -m` has it
    module = theirs(lambda: _file(Path(place)) if place.endswith(".py") else _module(place))
    if not hasattr(module, wanted):
        functions = [name for name, value in vars(module).items() if callable(value)]
        raise UserError(f"{place} has no function {wanted}{meant([wanted], functions)}")
    function = getattr(module, wanted)
    if not callable(function):
        raise UserError(f"{wanted} of {place} is no function, but of type {type(function).__name__}")
    return lambda: theirs(function)


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE.py` has it
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # of every path that ends so
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _module(place: str) -> ModuleType:
    try:
        return import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        said = f"{place}: no module {error.name} here: run te in the folder that has it, or name a file"
        raise UserError(said) from None


def theirs(call: Callable[[], Any]) -> Any:
    """What a call of the user's returns. An error in the user's code is shown with its way through that code."""
    from te_cli.main import out_of_memory

    try:
        return call()
    except OURS:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        frame = error.__traceback__
        while frame is not None and _not_theirs(frame.tb_frame.f_code.co_filename):
            frame = frame.tb_next
        traceback.print_exception(type(error), error.with_traceback(frame), frame)
        raise SystemExit(1) from None


def _not_theirs(file: str) -> bool:
    """Whether a line of a traceback is this package's, or the import system's."""
    return Path(file).parent == Path(__file__).parent or "importlib" in file


def model_of(step: Callable[[], Any]) -> torch.nn.Module:
    """What a step returns."""
    import torch

    model = step()
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            "te", f"a step that returns {type(model).__name__}", "one that returns the model", "return it"
        )
    return model
