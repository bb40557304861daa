"""Pages of the reference: public names, whose docstrings Sphinx reads, and what commands say of themselves.

A name is described on the first page that has it; further pages link to it.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import os
import re
from collections.abc import Container, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tools.docs import output_of

ROOT = Path(__file__).resolve().parents[2]
PATH = (str(ROOT), str(ROOT / "bindings" / "jax"))


class Page(NamedTuple):
    """What a page holds: the public names of a module, or those that some modules below it define."""

    title: str
    about: str
    module: str
    below: tuple[str, ...] = ()


#: In the order of the navigation.
PAGES = {
    "layers": Page("te_torch: layers", "Layers for PyTorch.", "te_torch", ("modules", "transformer", "attention")),
    "precision": Page(
        "te_torch: precision",
        "Which parts of a model run in low precision, what they really ran in, and what this machine can.",
        "te_torch",
        ("autocast", "availability", "base", "nonfinite", "tools"),
    ),
    "training": Page(
        "te_torch: training", "Checkpointing, CUDA graphs, offloading, losses, experts.", "te_torch", ("training",)
    ),
    "parallel": Page(
        "te_torch: parallel", "A rank's part of a batch, and overlapped communication.", "te_torch", ("parallel",)
    ),
    "te_torch.recipe": Page("te_torch.recipe", "Recipes: how low precision is asked for.", "te_torch.recipe"),
    "te_torch.tensors": Page("te_torch.tensors", "Quantized tensors, and what makes them.", "te_torch.tensors"),
    "te_torch.attention": Page("te_torch.attention", "Which attention runs, and why.", "te_torch.attention"),
    "te_torch.ops": Page("te_torch.ops", "Operations of chains that users compose.", "te_torch.ops"),
    "te_torch.router": Page("te_torch.router", "Which experts each token goes to.", "te_torch.router"),
    "te_torch.optimizers": Page("te_torch.optimizers", "Optimizers, and functions below them.", "te_torch.optimizers"),
    "te_torch.debug": Page("te_torch.debug", "Which layer and which product lose precision.", "te_torch.debug"),
    "te_torch.utils": Page("te_torch.utils", "Small functions that scripts import.", "te_torch.utils"),
    "te_torch.constants": Page("te_torch.constants", "Masks, layouts and types by name.", "te_torch.constants"),
    "te_torch": Page("te_torch: all names", "Every public name of te_torch.", "te_torch"),
    "te_core": Page("te_core", "The runtime below te_torch, which knows no framework.", "te_core"),
    "te_core.functional": Page("te_core.functional", "Layers as functions of any arrays.", "te_core.functional"),
    "te_core.recipe": Page("te_core.recipe", "Where the recipes are defined.", "te_core.recipe"),
    "te_core.ops": Page("te_core.ops", "Single operations on tensors of te_core.", "te_core.ops"),
    "te_jax": Page("te_jax", "Layers as functions of JAX arrays.", "te_jax"),
    "te_jax.flax": Page("te_jax.flax", "Layers as modules of flax Linen.", "te_jax.flax"),
}

#: What the pages of a module need, beside torch.
NEEDED = {"te_jax": "jax", "te_jax.flax": "flax"}

#: Commands beside `te`, as they are typed.
COMMANDS = ("python -m te_core.doctor", "python -m te_core.program")

Values = dict[str, Any]  # by name


def public(module: ModuleType) -> Values:
    """The public names of a module, what it lists or else what it defines: classes first."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    found = {name: getattr(module, name) for name in sorted(names, key=str.lower) if not name.startswith("_")}
    shown = {name: value for name, value in found.items() if not isinstance(value, ModuleType)}
    return dict(sorted(shown.items(), key=lambda item: not inspect.isclass(item[1])))


def values() -> dict[str, Values]:
    """Page -> its names, of the packages that are installed."""
    found = {}
    for name, page in PAGES.items():
        if not find_spec(NEEDED.get(page.module, "torch")):
            continue
        below = tuple(f"{page.module}.{part}." for part in page.below) or ("",)
        of_module = public(importlib.import_module(page.module))
        found[name] = {n: v for n, v in of_module.items() if f"{getattr(v, '__module__', '')}.".startswith(below)}
    return found


def places(found: dict[str, Values]) -> dict[Any, str]:
    """An object -> the name under which it is described."""
    names: dict[Any, str] = {}
    for page, of_page in found.items():
        for name, value in of_page.items():
            if callable(value):
                names.setdefault(value, f"{PAGES[page].module}.{name}")
    return names


def pages() -> dict[str, str]:
    """Page -> its text."""
    found = values()
    known = places(found)
    shared = {base: f"{base.__module__}.{base.__qualname__}" for value in known for base in _bases(value, ())}
    shared = {base: name for base, name in shared.items() if base not in known}
    known |= shared
    told: set[str] = set()
    made = {page: _page(PAGES[page], names, known, told) for page, names in found.items()}
    head = _head("Methods that classes share", "Base classes, whose methods several public classes have.")
    made["bases"] = "\n".join([*head, *_directives({name: base for base, name in shared.items()}, known)])
    made["commands"] = "\n".join(_commands())
    return made


def _head(title: str, about: str) -> list[str]:
    return [f"# {title}", "", about, ""]


def _page(page: Page, names: Values, known: dict[Any, str], told: set[str]) -> str:
    """All names in a table, then those that were not told on a page before."""
    lines = _head(page.title, page.about) + ["{.names}", "| Name | |", "|---|---|"]
    own: Values = {}
    for name, value in names.items():
        full = f"{page.module}.{name}"
        place = known[value] if callable(value) else full
        if place == full and place not in told:
            own[full] = value
            told.add(place)
        lines.append(f"| {{py:obj}}`{name} <{place}>` | {_summary(value)} |")
    return "\n".join([*lines, "", *_directives(own, known)])


def _summary(value: Any) -> str:
    """The first sentence of a docstring, or a short value."""
    if not callable(value):
        return f"`{value!r}`" if len(repr(value)) < 100 and "|" not in repr(value) else ""
    if not value.__module__.startswith("te_"):
        return ""
    text = inspect.getdoc(value) or ""
    first = re.split(r"(?<=\.)\s+(?=[A-Z`\n])|\n\n", text, maxsplit=1)[0]
    return re.sub(r"(?<!`)([*_\[\]|<])(?![^`]*`)", r"\\\1", " ".join(first.split()))


def _directives(own: Values, known: dict[Any, str]) -> Iterator[str]:
    """What Sphinx makes the descriptions of."""
    yield "```{eval-rst}"
    for full, value in own.items():
        if inspect.isclass(value):
            undocumented = ["   :undoc-members:"] * issubclass(value, enum.Enum)
            yield from (f".. autoclass:: {full}", "   :members:", *undocumented, "")
            above = [f":py:class:`~{known[base]}`" for base in _bases(value, known)]
            if above:
                yield from (f"   Has the methods of {', '.join(above)}, too.", "")
        elif callable(value) and getattr(value, "__module__", "").startswith("te_"):
            yield from (f".. autofunction:: {full}", "")
        else:
            yield from (f".. autodata:: {full}", "")
    yield "```"


def _bases(value: Any, known: Container[Any]) -> list[type]:
    """Classes of ours above one, which have public methods of their own."""
    if not inspect.isclass(value):
        return []
    ours = [base for base in value.__mro__[1:] if base.__module__.startswith("te_")]
    return [base for base in ours if base in known or any(_told(n, v) for n, v in vars(base).items())]


def _told(name: str, value: Any) -> bool:
    return name[0] != "_" and callable(getattr(value, "__func__", value)) and bool(value.__doc__)


def said(command: str) -> str:
    """What a command prints about itself."""
    entry = re.search(r'^te = "([\w.]+):', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert entry is not None
    first, *rest = [*command.removeprefix("python -m ").split(), "--help"]
    os.environ["COLUMNS"] = "88"  # what argparse breaks its lines at
    if first == "te":
        return output_of(["-c", f"import sys; from {entry[1]} import main; sys.argv[0] = 'te'; main({rest})"])
    return output_of(["-m", first, *rest])


def _commands() -> Iterator[str]:
    yield from _head("Commands", "What each command says with `--help`.")
    listed = re.search(r"^  COMMAND\n((?:    .*\n)+)", said("te"), re.MULTILINE)
    if listed is None:
        raise ValueError("`te --help` lists no commands below COMMAND")
    below = re.findall(r"^    (\w+)", listed[1], re.MULTILINE)
    for command in ("te", *(f"te {name}" for name in below), *COMMANDS):
        yield from (f"## `{command}`", "", "```text", said(command).rstrip(), "```", "")
