"""Every argument of a public name is described in a docstring, in the order and with the defaults of its signature.

`te_core/described` fills docstrings from texts; nothing here asks it how.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import pydoc
import re
from collections.abc import Iterator
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import pytest
import torch

from te_core.described import Describer, core, layers, read, recipes
from te_core.functional import Function
from te_core.ops.declare import COMMON
from te_torch import described
from tools.website import header

#: Whose public arguments are all described.
PACKAGES = (
    "te_core",
    "te_core.functional",
    "te_core.ops",
    "te_core.recipe",
    *(["te_jax"] if find_spec("jax") else []),
    *(["te_jax.flax"] if find_spec("flax") else []),
    "te_torch",
    "te_torch.attention",
    "te_torch.debug",
    "te_torch.ops",
    "te_torch.optimizers",
    "te_torch.recipe",
    "te_torch.router",
    "te_torch.tensors",
    "te_torch.utils",
)
_ARGUMENT = re.compile(r"\*{0,2}(\w+): (.*)")


def arguments(doc: str) -> dict[str, str]:
    """{argument: what its section says} of a docstring."""
    found: dict[str, str] = {}
    _, _, section = inspect.cleandoc(doc).partition("\nArgs:\n")
    for line in section.splitlines():
        new = _ARGUMENT.fullmatch(line.strip())
        if not line.startswith("    "):
            break
        if new and not line.startswith("     "):
            name = new[1]
            found[name] = new[2]
        else:
            found[name] += f" {line.strip()}"
    return found


def public(package: str) -> Iterator[tuple[str, Any, str]]:
    """(name, function with the signature, docstring) of functions, constructors and methods."""
    module = importlib.import_module(package)
    listed = getattr(module, "__all__", None)
    if listed is None:
        listed = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    for name in listed:
        value = getattr(module, name)
        if isinstance(value, Function):
            yield name, value, value.__doc__ or ""
        if name[0] == "_" or not getattr(value, "__module__", "").startswith(("te_", "transformer_engine")):
            continue
        if isinstance(value, FunctionType):
            yield name, value, value.__doc__ or ""
        elif isinstance(value, type) and not issubclass(value, enum.Enum):
            made = value.__init__
            yield name, made if getattr(made, "__module__", "").startswith("te_") else value, value.__doc__ or ""
            for base in value.__mro__:
                if base.__module__.startswith(("te_", "transformer_engine")):
                    yield from methods(base)


def methods(cls: type) -> Iterator[tuple[str, Any, str]]:
    """The same of a class's own methods."""
    for name, value in vars(cls).items():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        ours = isinstance(function, FunctionType) and function.__module__.startswith("te_")
        if (name[0] != "_" or name == "__call__") and ours:
            yield f"{cls.__name__}.{name}", function, function.__doc__ or ""


def shown(default: Any) -> str:
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    if isinstance(default, FunctionType):
        return default.__qualname__.split(".")[0]
    if " object at 0x" in repr(default):
        return "..."
    return default.__name__ if isinstance(default, type) else repr(default)


@pytest.mark.parametrize("package", PACKAGES)
def test_arguments_are_described(package: str) -> None:
    wrong = []
    for name, function, doc in public(package):
        given = {n: p for n, p in inspect.signature(function).parameters.items() if n not in ("self", "cls")}
        if name == "Recipe":  # a base, whose fields are those of the recipes
            continue
        said = arguments(doc)
        if list(said) != list(given):
            wrong.append(f"{name}: without description {given.keys() - said.keys()}, none {said.keys() - given.keys()}")
        for argument in given.keys() & said.keys():
            default = given[argument].default
            wanted = [] if default is inspect.Parameter.empty else [shown(default)]
            if re.findall(r"Default: (.*)\.$", said[argument]) != wanted:
                wrong.append(f"{name}: {argument} is said to be {said[argument]!r}, its default is {wanted}")
        if not doc.strip():
            wrong.append(f"{name}: no docstring")
    assert not wrong, "\n".join(wrong)


def test_the_header_of_c_is_described() -> None:
    wrong = []
    functions = 0
    for one in header.declarations((header.INCLUDE / "te_core.h").read_text()):
        about, said = one.said
        functions += bool(one.function)
        wanted = list(one.arguments)
        if one.function and not one.code.startswith("TE_API void "):
            wanted.append("Fails" if one.code.startswith("TE_API te_status ") else "Gives")
        if not about or list(said) != wanted or not all(said.values()):
            wrong.append(f"{one.function or one.code.splitlines()[0]}: {about!r} describes {list(said)}, not {wanted}")
    assert not wrong, "\n".join(wrong)
    assert functions == (header.INCLUDE / "te_core.h").read_text().count("\nTE_API ")


def test_nothing_is_described_twice_or_in_vain() -> None:
    docs = "\n".join(inspect.cleandoc(doc) for package in PACKAGES for _, _, doc in public(package))
    texts = [getattr(described, name).TEXT for name in ("attention", "functions", "modules", "tensors", "optimizers")]
    texts += [described.debug.TEXT, recipes.TEXT, layers.TEXT, core.TEXT]
    texts.append("\n".join(map(": ".join, COMMON.items())))
    for name in ("te_jax", "te_jax.flax"):
        texts += [importlib.import_module(f"{name}.described").TEXT] if name in PACKAGES else []
    vain = [name for text in texts for name, about in read(text).items() if about.partition("\n")[0] not in docs]
    assert not vain, f"no signature has these arguments: {vain}"
    together = [line.partition(": ")[0] for text in texts[:3] for line in text.splitlines() if line[:1].strip()]
    together = [name for names in together for name in names.split(", ")]
    twice = {name for name in together if together.count(name) > 1}
    assert not twice, f"described twice: {twice}"


def test_help_shows_the_arguments_of_a_constructor() -> None:
    import te_torch as te

    for made in (te.Linear, te.Linear.__init__, te.RMSNorm, te.TransformerLayer.__init__):
        text = pydoc.render_doc(made, renderer=pydoc.plaintext)
        assert "Args:" in text and "params_dtype: " in text and "internal Module state" not in text


def test_a_section_stands_before_results() -> None:
    def area(width: int, height: int = 2, *, unit: str = "m") -> int:
        """The area.

        Returns:
            A number.
        """
        return width * height

    Describer(
        "width: How wide it is,\n    from the left.\nheight: How high it is.\nunit: Of both.", allowed=lambda *_: "one"
    ).describe([area])
    assert inspect.getdoc(area) == (
        "The area.\n\nArgs:\n    width: How wide it is,\n        from the left. Allowed: one.\n"
        "    height: How high it is. Allowed: one. Default: 2.\n    unit: Of both. Allowed: one. Default: 'm'.\n\n"
        "Returns:\n    A number."
    )


def test_examples_run() -> None:
    import te_torch as te

    docs = {name: inspect.cleandoc(doc) for package in PACKAGES for name, _, doc in public(package)}
    examples = {name: doc.partition("\nExample:\n")[2] for name, doc in docs.items() if "\nExample:\n" in doc}
    assert len(examples) > 20
    for name, text in examples.items():
        code = compile(inspect.cleandoc(f"\n{text}"), f"the example of {name}", "exec")
        exec(code, {"te": te, "torch": torch})
