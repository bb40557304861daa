"""Inspectors around those that modules have of their own, put there for a while: what `inspect` and `bisect` share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.inspector import finished
from te_torch.base.module import BaseModule
from te_torch.base.watching import Choice
from te_torch.debug.layers import product_names
from te_torch.module_names import known_as

Layers = str | re.Pattern[str] | Iterable[str] | Callable[[str], bool] | None


def products_of(operation: str, model: torch.nn.Module, attention: bool = False) -> list[tuple[str, BaseModule, int]]:
    """(name of the layer, its module, number of the product) of all that multiplies weights in a model.

    attention: that too, as one product.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(operation, repr(model)[:100], "a torch.nn.Module", "pass the model")
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules()):
        raise not_compiled(operation)
    found = [
        (name, module, number)
        for path, module in model.named_modules()
        if isinstance(module, BaseModule) and (module._weight_names() or attention and module.gemms > 1)
        for number, name in enumerate(product_names(module, path or known_as(module)))
    ]
    if not found:
        got = f"a {type(model).__name__} without a layer of te_torch that multiplies by weights"
        do = "put them in the place of torch's with te_torch.convert(model)"
        raise ArgumentError(operation, got, "a model with te_torch layers", do)
    return found


def chosen(operation: str, names: list[str], layers: Layers) -> set[str]:
    """The names that a regular expression, or one of several, is found in, or a function says yes to; None: all."""
    if layers is None:
        return set(names)
    if callable(layers):
        found = {name for name in names if layers(name)}
    else:
        one: Any = [layers] if isinstance(layers, (str, re.Pattern)) else layers
        patterns = layers = listed(operation, "layers", one)
        try:
            found = {name for name in names if any(re.search(pattern, name) for pattern in patterns)}
        except (re.error, TypeError) as error:
            allowed = "a regular expression, several, or a function of the name"
            raise ArgumentError(operation, f"layers={layers!r} ({error})", allowed, "correct it") from error
    if not found:
        raise ArgumentError(
            operation, f"layers={layers!r}", f"what is in a layer's name: {', '.join(names)}", "correct it"
        )
    return found


def listed(operation: str, name: str, given: Any) -> list[Any]:
    """The elements of an argument that takes several."""
    try:
        return list(given)
    except TypeError:
        raise ArgumentError(operation, f"{name}={given!r}", "a list", "pass one in a list, too") from None


def not_compiled(operation: str) -> UnsupportedError:
    """The error for a compiled model."""
    return UnsupportedError(
        operation, "a compiled model", "layers that run eagerly", f"{operation} the model before torch.compile"
    )


def refuse_traces(operation: str) -> None:
    """Called when a call is made: a compiled program would keep looking, or never look."""
    if torch._guards.TracingContext.try_get() is not None:
        raise not_compiled(operation)


class Around:
    """The inspector of one product around the one that its module has of its own, which goes on acting."""

    operation: ClassVar[str]

    def __init__(self, points: frozenset[tuple[str, str]], own: Any) -> None:
        self.points, self.own = points, own

    @property
    def request(self) -> frozenset[tuple[str, str]]:
        """What it looks at, and what the module's own does."""
        refuse_traces(self.operation)
        return self.points if self.own is None else self.points.union(self.own.request)

    def inspect(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any, out: Any) -> Any:
        """What the module's own puts in the place of a tensor."""
        if self.own is None or (gemm, tensor) not in self.own.request:
            return None
        return self.own.inspect(rt, gemm, tensor, value, cast, out)

    def finished(self, rt: Any, tensor: str) -> None:
        """For the module's own."""
        finished(rt, self.own, tensor)


class Inspectors(tuple):
    """A module's inspectors, around those that it had before. A copy of the module has these alone."""

    guest: Any
    before: Any

    def __reduce__(self) -> Any:
        return _same, (self.before,)


def _same(value: Any) -> Any:
    return value


class Guest:
    """What puts inspectors into modules, around the modules' own, and takes them away again."""

    def __init__(self) -> None:
        self.closed = True
        self._put: dict[BaseModule, Inspectors] = {}

    def put(self, module: BaseModule, made: Callable[[int, Any], Any]) -> None:
        """Put made(number of the product, its own inspector) there, for each product, unless that was done before."""
        found = module.inspector
        while isinstance(found, Inspectors) and found.guest is not self:
            found = found.before
        if isinstance(found, Inspectors):  # below those of another guest
            return
        choice = module.__dict__.get("_door")  # in iterations that nobody looks at the inspector is None
        if isinstance(choice, Choice) and choice.touches(module):
            self.leave()
            raise UnsupportedError(
                "te_torch.debug",
                f"a layer that a feature of nvdlfw_inspect's configuration touches ({known_as(module)})",
                "inspect or bisect of layers that no feature touches",
                "leave the layer out of the configuration, or call nvdlfw_inspect.api.end_debug() before",
            )
        inspectors = self._put.get(module)
        if inspectors is None or inspectors.before is not module.inspector:
            own: Sequence[Any] = module._inspectors() or (None,) * module.gemms
            inspectors = Inspectors(made(number, inspector) for number, inspector in enumerate(own))
            inspectors.guest, inspectors.before = self, module.inspector
            self._put[module] = inspectors
        module.inspector = inspectors

    def take(self, module: BaseModule) -> None:
        """Give the module back what it had, unless somebody has put something else there since."""
        if isinstance(module.inspector, Inspectors) and module.inspector.guest is self:
            before = module.inspector.before
            while isinstance(before, Inspectors) and before.guest.closed:
                before = before.before
            module.inspector = before

    def leave(self) -> None:
        """Take everything away, and the calls that were made with it."""
        self.closed = True
        for module, inspectors in self._put.items():
            self.take(module)
            ours = {id(inspector) for inspector in inspectors} - {id(None)}
            for key in [k for k in module._calls if any(isinstance(p, tuple) and ours & set(p) for p in k)]:
                del module._calls[key]
        self._put.clear()
