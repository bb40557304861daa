"""Names that somebody wrote and nobody knows: which known one was meant. Every "did you mean" comes from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def name_error(operation: str, given: Mapping[str, Any], known: Iterable[str]) -> ArgumentNameError:
    """The error for keywords that `operation` does not have."""
    known = list(known)
    listed = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return ArgumentNameError(
        operation, f"{listed}{meant(given, known)}", ", ".join(known), "correct the name, or leave it out"
    )
