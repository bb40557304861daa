"""The classes of each format: its own file enters them here, so that what all formats share finds them.

The functions that unpickle them are registered as safe on the way, and so are the classes: by the name that files have,
which is not what a class says while te_torch.compat is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_core import naming
from te_core.quantized import Format


class Kind(NamedTuple):
    """A storage class, the tensor class over it, and the function by which files make tensors of it."""

    storage: Any
    tensor: Any
    maker: Callable[..., Any]


KINDS: list[Kind] = []
_BY_SCALING: dict[str, Kind] = {}


def made_by(storage: Any, tensor: Any, *quantizers: type, scaling: str | None = None) -> Callable[[Any], Any]:
    """A decorator of the function by which files make a kind of tensors: makes the kind known, with what quantizes
    them; `scaling` is that of the core's formats they hold.
    """

    def enter(maker: Callable[..., Any]) -> Callable[..., Any]:
        KINDS.append(Kind(storage, tensor, maker))
        if scaling is not None:
            _BY_SCALING[scaling] = KINDS[-1]
        classes = [(cls, f"{naming.home_of(cls)}.{cls.__qualname__}") for cls in (tensor, storage, *quantizers)]
        torch.serialization.add_safe_globals([maker, *classes])
        return maker

    return enter


def of_format(form: Format) -> Kind:
    """The kind that holds a format of the core."""
    return _BY_SCALING[form.scaling]


def of_class(cls: type) -> Kind:
    """The kind that a class is of, or is derived from."""
    return next(kind for base in cls.__mro__ for kind in KINDS if base in (kind.tensor, kind.storage))
