"""How errors, warnings and reports name a module: by its path in the model.

A module does not know what holds it, so its path is looked for when a message is made, and only then: the modules whose
functions are running stand on the call stack, and the outermost of them that contains the module is the root. That
holds under wrappers, compilers, checkpoints and trainers, costs a running model nothing, and keeps nothing that could
become untrue. In a backward pass no forward is running, and messages have no path.
"""

from __future__ import annotations

import itertools
import re
import sys
import warnings
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from te_core import errors
from te_torch.doors import door
from te_torch.runtime import constant_at_trace, untraced, warn

_numbers = itertools.count(1)
_AUTOMATIC = re.compile(r"^Layer_\d+\.?")
#: Containers that torch puts between a module and what holds it: nobody has written these names.
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def next_name() -> str:
    """The documented name of a layer that was given none."""
    return f"Layer_{next(_numbers)}"


def known_as(module: torch.nn.Module) -> str:
    """What a module is called without a model around it: the name it was given, else its class."""
    given = getattr(module, "name", None)
    return _AUTOMATIC.sub("", given if isinstance(given, str) else "") or type(module).__name__


def place_of(module: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """(the outermost running module that contains this one, its path in it: "" where it is the module itself)."""
    for root in reversed(dict.fromkeys(found for _, found in _running())):  # from outside to inside, each once
        for name, part in torch.nn.Module.named_modules(root):
            if part is module:
                return root, _WRAPPERS.sub("", name)
    return module, ""


def path_of(module: torch.nn.Module) -> str:
    """The module's path in the model that is running."""
    return place_of(module)[1]


def name_of(module: torch.nn.Module) -> str:
    """The module in a message: its path, else what it is known as."""
    return path_of(module) or known_as(module)


def within(module: torch.nn.Module) -> str:
    """` in blocks.3.proj`, to stand behind the name of an operation; nothing for a module that is called by itself."""
    path = path_of(module)
    return path and f" in {path}"


_warned: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()


def warn_once(module: torch.nn.Module, message: str) -> None:
    """Warn of a module, at the line of the user's code that is running; of one message once for a model."""
    root, path = place_of(module)
    said = _warned.setdefault(root, set())
    if message in said:
        return
    said.add(message)
    warn_outside(f"{path or known_as(module)}: {message}")


def warn_outside(text: str) -> None:
    """Warn at the line of the user's code that is running."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("te_torch", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


#: `warn_once` of an argument that changes nothing; of traced code as it is traced.
warn_ignored = door(warn_once, lambda module, message: warn(message))


def shown(**options: Any) -> str:
    """`name=value, ...` for a printed module, as torch's print theirs; None and False are left out, but for `bias`."""
    return ", ".join(f"{k}={v!r}" for k, v in options.items() if k == "bias" or (v is not None and v is not False))


def _running() -> Iterator[tuple[FrameType, torch.nn.Module]]:
    """The modules that are the first argument of a running function, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        first = _first_argument(frame)
        # One whose constructor has not got as far as torch's has no parts yet.
        if isinstance(first, torch.nn.Module) and "_modules" in vars(first):
            yield frame, first
        frame = frame.f_back


def _first_argument(frame: FrameType) -> Any:
    code = frame.f_code
    if not code.co_argcount:
        return None
    scope = frame.f_locals
    first = scope.get(code.co_varnames[0])
    # Before Python 3.13 this is a copy, which the frame keeps: what it holds would live until the function returns.
    if sys.version_info < (3, 13) and sys.getrefcount(scope) <= 3:  # else the function has asked for locals() itself
        scope.clear()
    return first


def _path_of_running() -> str:
    """Where an error that is being made comes from: the path of the innermost module whose function of ours runs."""
    for frame, module in _running():
        if frame.f_globals.get("__name__", "").startswith("te_torch."):
            return path_of(module)
    return ""


@constant_at_trace
def _untraced_from_now_on() -> str:
    """At trace time: a compiler gives up at an error, and has eager code make it again, which it goes on watching."""
    if "torch._dynamo" in sys.modules:
        errors.tell_where(untraced(_path_of_running, "an error is raised here: it is shown without fullgraph=True"))
    return _path_of_running()


errors.tell_where(_untraced_from_now_on)
