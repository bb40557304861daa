"""Rows of a table of refusals in one test: what each row raises, beside what it should raise."""

from __future__ import annotations

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
