"""The errors users meet: what was asked, what came in, what is allowed, what to do."""

from __future__ import annotations

from collections.abc import Callable

_locate: Callable[[], str] = str


def tell_where(locate: Callable[[], str]) -> None:
    """Have an adapter say which part of a user's model an error comes from: asked when one is made, "" for none."""
    global _locate
    _locate = locate


class _FourPartError(Exception):
    """An error whose message always has the same four parts; the first one with the part of the model, if known.

    It is also made from one text, that of the whole message: programs add to what an error says by
    `type(e)(str(e) + ...)`, and so do pickle and whoever carries errors between processes. pickle then gives it the
    parts back, which are attributes.
    """

    def __init__(
        self,
        operation: str,
        got: str | None = None,
        allowed: str | None = None,
        do: str | None = None,
        where: str | None = None,
    ) -> None:
        self.operation, self.got, self.allowed, self.do = operation, got or "", allowed or "", do or ""
        if got is None and allowed is None and do is None:
            self.where = ""
            super().__init__(operation)
            return
        if got is None or allowed is None or do is None:
            raise TypeError(f"{type(self).__name__} takes four parts, or one text")
        self.where = _locate() if where is None else where
        place = self.where and f" in {self.where}"
        super().__init__(f"{operation}{place}: got {got}. Allowed: {allowed}. To do: {do}.")


class ArgumentError(_FourPartError, ValueError):
    """An argument has a value, shape, dtype or device that the operation does not take."""


class UnsupportedError(_FourPartError, RuntimeError):
    """A valid request which this device, library version or build cannot carry out."""


class LibraryError(_FourPartError, RuntimeError):
    """A library is missing, mismatched, or reported a failure."""


class MissingPackageError(LibraryError, ImportError):
    """A Python package that is needed here is not installed."""
