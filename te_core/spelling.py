"""Names that somebody wrote and nobody knows: which known one was meant. Every "did you mean" comes from here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from opcode import opmap
from typing import Any

from te_core.errors import ArgumentError


class ArgumentNameError(ArgumentError, TypeError):
    """A keyword that a function or class does not have. Also the usual TypeError."""


class FieldNameError(ArgumentError, AttributeError):
    """An assignment to an attribute that is not there, and looks like one that is. Also an AttributeError."""


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """The known name that is most like this one, "" if none is so much `alike` (1.0: equal but for capitals)."""
    from difflib import get_close_matches  # a mistake pays for the import

    plain = {one.lower(): one for one in known}
    return next((plain[found] for found in get_close_matches(name.lower(), plain, 1, alike)), "")


def meant(names: Iterable[str], known: Iterable[str], alike: float = 0.6) -> str:
    """ " (did you mean ...?)", with the nearest known name of each; "" if there is none."""
    known = list(known)
    found = dict.fromkeys(near for name in names if (near := nearest(name, known, alike)))
    return f" (did you mean {', '.join(found)}?)" if found else ""


#: What choices are called elsewhere.
_ELSEWHERE = {
    "swish": "silu",
    "quick_gelu": "qgelu",
    "gelu_new": "gelu",
    "gelu_tanh": "gelu",
    "relu2": "srelu",
    "none": "no_mask",
}


def choice_error(
    operation: str,
    name: str,
    value: Any,
    allowed: Iterable[Any],
    error: Callable[..., Any] = ArgumentError,
    *,
    also: str = "",
) -> Any:
    """The error for a choice that is none of those allowed; `name` is the argument as the caller wrote it.

    `error` makes it, of an error's four parts. `also`: what is allowed beside the choices, in words.
    """
    allowed = list(allowed)
    words = [one for one in allowed if isinstance(one, str)]
    near = meant([_ELSEWHERE.get(value, value)], words) if isinstance(value, str) else ""
    *listed, last = [*map(repr, allowed), *([also] if also else [])]
    return error(operation, f"{name}={value!r}{near}", f"{', '.join(listed)} or {last}", "choose one of these")


def name_error(operation: str, given: Mapping[str, Any], known: Iterable[str]) -> ArgumentNameError:
    """The error for keywords that `operation` does not have."""
    known = list(known)
    listed = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return ArgumentNameError(
        operation, f"{listed}{meant(given, known)}", ", ".join(known), "correct the name, or leave it out"
    )


# ---------------------------------------------------------------------------------------------- names of a module


def importing(frame: Any) -> bool:
    """Whether the frame is in `from ... import`, which forgets what an AttributeError says."""
    while frame.f_code.co_name == "__getattribute__":  # a module that says it is an older name
        frame = frame.f_back
    return bool(frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"])


def unknown_name(module: str, name: str, frame: Any) -> AttributeError | ImportError:
    """The error for a name that a module does not have, asked for in this frame."""
    text, space = f"module {module!r} has no attribute {name!r}", vars(sys.modules.get(module, object))
    # `from package import room` asks first, and then imports the room.
    if name.startswith("_") or frame.f_globals.get("__name__") == "importlib._bootstrap":
        return AttributeError(text)
    near = meant([name], space.get("__all__") or (one for one in space if not one.startswith("_")), 0.7)
    if near and f"{module}.{name}" not in sys.modules and importing(frame):
        return ImportError(f"cannot import name {name!r} from {module!r}{near}", name=module)
    # Under no object: else Python looks for a near name in its turn, where an error ends the program.
    return AttributeError(f"{text}{near}", name=name, obj=None) if near else AttributeError(text)


def getter(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module, for names that it does not have."""

    def __getattr__(name: str) -> Any:  # noqa: N807
        raise unknown_name(module, name, sys._getframe(1))

    return __getattr__
