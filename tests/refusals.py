"""Rows of a table of refusals in one test: what each row raises, beside what it should raise; what all errors bear."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

Errors = type[BaseException] | tuple[type[BaseException], ...]


def not_refused(error: Errors, message: str, call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """What is wrong with a call that has to raise this error with this message; nothing where it does."""
    try:
        call(*args, **options)
    except error as raised:
        return "" if re.search(message, str(raised)) else f"says {str(raised)!r}, without {message!r}"
    except BaseException as raised:  # an error of another kind belongs to its row, too
        return f"raises {raised!r}"
    return "raises nothing"


def says_more(kind: type[BaseException]) -> bool:
    """Whether an error can be made anew with a longer message, and sent to another process.

    Programs say `raise type(e)(str(e) + ...)`, and torch's workers send errors to the process that reports them.
    """
    error = kind("gemm: got a (3, 4).")
    error.__dict__["seen"] = "in step 3"  # where Python 3.11 puts notes
    more = type(error)(str(error) + " Rank 3.")
    ways: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
    return (
        type(more) is kind
        and str(more) == "gemm: got a (3, 4). Rank 3."
        and all(type(way(more)) is kind and str(way(more)) == str(more) for way in ways)
        and all(vars(way(error)) == vars(error) for way in ways)
    )
