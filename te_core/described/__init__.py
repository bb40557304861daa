"""Docstrings made complete: what each argument is stands once, in a text, and every signature that has it says so.

A text has a line for each argument, `name: what it is`, and indented lines that go on. `Owner.name` (a class, a
function, `Class.method` or a method of any class) is an argument of that one, which goes before the plain name. Several
names before the colon are arguments of which the same is said. `describe` puts the arguments of a function, of a
class's constructor and of its methods into their docstrings, in the order of the signature and with its defaults, as a
section `Args:` of Google's style, which Sphinx (napoleon) and, where it imports the package, mkdocstrings read.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

_SECTION, _AFTER = "Args:", ("Returns", "Yields", "Raises", "Example")
_WIDTH = 108  # of a line of a text, where more follows it
REQUIRED: Any = object()  # in the place of a default
_BOUND = ("self", "cls", "_cls")
_ARGS, _KEYWORDS = 0x04, 0x08  # flags of code: `*args` and `**keywords`
_done: set[Any] = set()  # an import describes its classes and functions once, and those that they share


def read(text: str) -> dict[str, str]:
    """{argument: what it is} of a text; what goes on in further lines keeps them."""
    lines = text.strip("\n").replace("\n    ", "\0").split("\n")
    return {name: about.replace("\0", "\n") for name, _, about in [line.partition(": ") for line in lines]}


def parameters(function: FunctionType) -> list[tuple[str, str, Any]]:
    """(name, stars before it, default) of each argument but the bound one. `inspect.signature` is 5 times as slow."""
    if hasattr(function, "__signature__"):  # of a function that another one has made
        told = [*function.__signature__.parameters.values()]
        return [(p.name, "", REQUIRED if p.default is p.empty else p.default) for p in told if p.name not in _BOUND]
    code, values, keywords = function.__code__, function.__defaults__ or (), function.__kwdefaults__ or {}
    names, count = code.co_varnames, code.co_argcount
    required, end = count - len(values), count + code.co_kwonlyargcount
    found = [(name, "", REQUIRED) for name in names[:required]]
    found += [(name, "", value) for name, value in zip(names[required:count], values, strict=True)]
    if code.co_flags & _ARGS:
        found.append((names[end], "*", REQUIRED))
    found += [(name, "", keywords.get(name, REQUIRED)) for name in names[count:end]]
    if code.co_flags & _KEYWORDS:
        found.append((names[end + bool(code.co_flags & _ARGS)], "**", REQUIRED))
    return found[1:] if count and names[0] in _BOUND else found


def shown(default: Any) -> str:
    """A default in words of Python."""
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    if isinstance(default, FunctionType):  # one that another makes is named by it
        return default.__qualname__.partition(".<locals>")[0]
    said = default.__name__ if isinstance(default, type) else repr(default)
    return "..." if " object at 0x" in said else said  # a mark, whose address says nothing


class Describer:
    """Completes docstrings from texts, or {name: text}; `allowed(owner, name)` adds which values are allowed, or ""."""

    def __init__(self, *texts: str | Mapping[str, str], allowed: Callable[[str, str], str] | None = None) -> None:
        self.common: dict[str, str] = {}
        self.of: dict[str, dict[str, str]] = {}  # what is said of one owner's arguments
        self.allowed = allowed
        found = [i for text in texts for i in (read(text) if isinstance(text, str) else text).items()]
        for owner, _, name, about in [(*one.rpartition("."), about) for key, about in found for one in key.split(", ")]:
            (self.of.setdefault(owner, {}) if owner else self.common)[name] = about

    def describe(self, things: Iterable[Any]) -> None:
        """Complete the docstrings of these functions, and of these classes with their constructors and methods."""
        for thing in things:
            if isinstance(thing, type):
                self._class(thing)
            elif isinstance(thing, FunctionType):
                self._function(thing, thing.__name__)

    def _class(self, cls: type) -> None:
        ours = [base for base in cls.__mro__ if base.__module__.startswith("te_")]
        if cls in ours and (cls, "constructor") not in _done and not issubclass(cls, enum.Enum):
            _done.add((cls, "constructor"))
            self._constructor(cls, ours)
        for base in ours:
            if base not in _done:
                _done.add(base)
                for name, value in vars(base).items():
                    made = value.__func__ if type(value) in (classmethod, staticmethod) else value
                    method = type(made) is FunctionType and made.__module__.startswith("te_")  # no default of a field
                    if method and (name[0] != "_" or name == "__call__"):
                        self._function(made, f"{base.__name__}.{name}", name)

    def _constructor(self, cls: type, ours: Sequence[type]) -> None:
        """In the docstring of the class, which tools read, and in the constructor's own."""
        found = ((base, vars(base).get(name)) for base in ours for name in ("__init__", "__new__"))
        base, made = next(((base, f) for base, f in found if f is not None), (cls, None))
        made = made.__func__ if isinstance(made, staticmethod) else made
        if isinstance(made, FunctionType):
            names = [one.__name__ for one in ours]
            cls.__doc__ = said = self.document(cls.__doc__ or "", _parameters_of(made), *names)
            at = said.find(_SECTION)
            if made not in _done and at >= 0:
                _done.add(made)
                margin = said[said.rfind("\n", 0, at) + 1 : at]
                doc = made.__doc__ or f"A {base.__name__.lstrip('_')} of these arguments."
                made.__doc__ = f"{doc.rstrip()}\n\n{margin}{said[at:]}"

    def _function(self, function: FunctionType, *owners: str) -> None:
        if function not in _done:
            _done.add(function)
            function.__doc__ = self.document(function.__doc__ or "", _parameters_of(function), *owners)

    def document(self, doc: str, given: Iterable[tuple[str, str, Any]], *owners: str) -> str:
        """A docstring with these parameters, of the first of the owners that has something to say of one."""
        special = [self.of[owner] for owner in owners if owner in self.of]
        common, allowed_of, lines = self.common, self.allowed, []
        for name, stars, default in given:
            about = common.get(name)
            for table in special:
                if name in table:
                    about = table[name]
                    break
            if about is None:
                continue
            allowed = allowed_of(owners[0], name) if allowed_of is not None else ""
            more = f" Allowed: {allowed}." if allowed else ""
            if default is not REQUIRED:
                more += " Default: None." if default is None else f" Default: {shown(default)}."
            if len(about) - about.rfind("\n") + len(more) > _WIDTH:
                more = "\n" + more[1:]
            lines.append(f"{stars}{name}: {about}{more}")
        return _with(doc, lines) if lines else doc


def _parameters_of(function: Any) -> list[tuple[str, str, Any]]:
    return parameters(getattr(function, "__wrapped__", function))


def _with(doc: str, lines: list[str]) -> str:
    """The docstring with these arguments, before what it says of results and errors."""
    indent, rest = "\n", ""
    if "\n" in doc:
        last = doc[doc.rfind("\n") + 1 :]
        indent += last[: len(last) - len(last.lstrip())]
        at = min((i for name in _AFTER if (i := doc.find(f"{indent}{name}:\n")) >= 0), default=len(doc))
        doc, rest = doc[:at].rstrip(), doc[at:]
    section = "\0".join(lines).replace("\n", f"{indent}        ").replace("\0", f"{indent}    ")
    return f"{doc}\n{indent}{_SECTION}{indent}    {section}\n{rest or indent[1:]}"
