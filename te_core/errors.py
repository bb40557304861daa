"""The errors users meet: what was asked, what came in, what is allowed, what to do."""

from __future__ import annotations


class _FourPartError(Exception):
    """An error whose message always has the same four parts."""

    def __init__(self, operation: str, got: str, allowed: str, do: str) -> None:
        self.operation, self.got, self.allowed, self.do = operation, got, allowed, do
        super().__init__(f"{operation}: got {got}. Allowed: {allowed}. To do: {do}.")

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        # Exceptions rebuild from .args, which holds the one joined message: give the parts instead.
        return type(self), (self.operation, self.got, self.allowed, self.do)


class ArgumentError(_FourPartError, ValueError):
    """An argument has a value, shape, dtype or device that the operation does not take."""


class UnsupportedError(_FourPartError, RuntimeError):
    """A valid request which this device, library version or build cannot carry out."""


class LibraryError(_FourPartError, RuntimeError):
    """A library is missing, mismatched, or reported a failure."""


class MissingPackageError(LibraryError, ImportError):
    """A Python package that is needed here is not installed."""
