"""What an entry of the table of layers says: the layer's functions, its arguments, its options, and its spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from te_core.dtypes import DType
from te_core.errors import ArgumentError
from te_core.layers.linear import LinearSpec, Needs
from te_core.precision import Precision
from te_core.spelling import choice_error


class Argument(NamedTuple):
    """A tensor that a layer takes, in the place where the core's function takes it.

    `shape`: sizes by letters, which mean the same in all arguments of a layer; "..." and "LEAD" stand for any sizes in
    front, the same ones each time, "*" for any others, "1|B" for 1 or B, "F'" for F or, of a gated activation, 2 F.
    Those of a weight stand as it lies by default, [out, in]; with the option `turned` the other way round.
    `dtypes`: "x" that of the first argument, "any" one of `ACTIVATION_DTYPES`, "weight" any of these with a recipe and
    else x's, or names of types with bars between.
    """

    name: str  # "": not offered, and never there
    core: str  # its name in the core
    shape: str = ""
    dtypes: str = "x"
    optional: bool = False
    gradient: bool = True  # backward gives one
    strided: bool = False  # taken with any strides whose last one is 1
    several: bool = False  # a sequence of tensors, one for each product

    def letters(self, options: Mapping[str, Any]) -> list[str]:
        """The sizes in their order under these options."""
        found = self.shape.split()
        return found[::-1] if self.dtypes == "weight" and options.get("turned") else found


class Option(NamedTuple):
    """A value that a layer's call depends on. `implied` ones follow from the shapes of the arguments."""

    default: Any
    kind: type
    choices: tuple[Any, ...] = ()
    least: float | None = None
    most: float | None = None
    none: bool = False  # None is allowed
    implied: bool = False
    about: str = ""  # what it is, in the documentation of all that have such an option

    def said(self) -> str:
        """What is allowed, in words."""
        if self.choices:
            words = ", ".join(map(repr, self.choices))
        elif self.kind is tuple:
            words = "a pair of integers from -1 on"
        elif self.kind is bool:
            words = "True or False"
        elif (self.kind, self.least, self.most) == (float, 0.0, 1.0):
            words = "a probability"
        else:
            words = {int: "an integer", float: "a finite number"}[self.kind]
            words += "" if self.least is None else f" from {self.least:g}"
            words += "" if self.most is None else f" to {self.most:g}"
        return words + " or None" * self.none

    def allows(self, value: Any) -> bool:
        """Whether a value is one of the allowed ones."""
        if value is None:
            return self.none
        if self.choices:
            return isinstance(value, str) and value in self.choices
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind is tuple:
            whole = isinstance(value, tuple) and len(value) == 2
            return whole and all(type(n) is int and n >= -1 for n in value)
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else (int, float)):
            return False
        least, most = -1e300 if self.least is None else self.least, 1e300 if self.most is None else self.most
        return least <= value <= most  # which no NaN is


class Asked(NamedTuple):
    """What a layer's spec is made of."""

    options: Mapping[str, Any]
    dtype: DType
    needs: frozenset[str] = frozenset()
    precision: Precision | None = None
    products: Sequence[dict[str, Any]] = ()  # of each product: fields of its `LinearSpec`, in the place of these

    def any(self, *names: str) -> bool:
        """Whether a gradient of one of these is wanted."""
        return not self.needs.isdisjoint(names)

    def linear(self, weight: str, bias: str, *before: str, product: int = 0) -> LinearSpec:
        """The spec of a linear behind what these arguments enter; `product` is its place among the layer's."""
        needs = Needs(self.any(*before), weight in self.needs, bias in self.needs)
        given: dict[str, Any] = {"precision": self.precision, "needs": needs}
        given["turned"] = self.options.get("turned", False)
        return LinearSpec(self.dtype, **given | (self.products[product] if self.products else {}))


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of the core: its two functions, and all that its callers have to know."""

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    arguments: tuple[Argument, ...]
    options: dict[str, Option]
    spec: Callable[[Asked], Any]
    outputs: tuple[str, ...] = ("y",)  # those that are always there, then those that options ask for
    products: tuple[str, ...] = ()  # the weights of its GEMMs, in the order of the slots of its scaling state
    draws: Callable[[Asked], bool] = lambda asked: False  # whether a call reads random numbers
    releases: bool = False  # its backward takes `release`
    #: What it writes besides its results: the maxima of a recipe with a history, a weight gradient's buffer.
    writes: tuple[str, ...] = ()
    about: str = ""
    calls: dict[Any, Any] = field(default_factory=dict, repr=False)  # which `te_core.calls.call` has made

    def offered(self) -> tuple[Argument, ...]:
        """The arguments that a caller may give."""
        return tuple(a for a in self.arguments if a.name and a.dtypes != "draws")

    def settled(self, operation: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options by name, in the table's order, each an allowed value."""
        for name in given:
            if name not in self.options:
                names = ", ".join(name for name, o in self.options.items() if not o.implied) or "none"
                raise ArgumentError(operation, f"an option {name!r}", names, "correct the name")
        found = {name: given.get(name, option.default) for name, option in self.options.items()}
        for name, value in found.items():
            option = self.options[name]
            if not option.allows(value):
                if option.choices:
                    raise choice_error(operation, name, value, option.choices + (None,) * option.none)
                raise ArgumentError(operation, f"{name}={value!r}", option.said(), f"correct {name}")
        return found
