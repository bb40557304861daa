"""The public surface: every public name of te_core's face and of te_torch, with its arguments and their defaults.

    python tools/surface.py          what it is
    python tools/surface.py write    keep it in tests/surface.txt, with which a test compares

A name that goes, or an argument that moves, breaks somebody's program: it shows in the diff of that file.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "tests" / "surface.txt"
FACES = (
    "te_core",
    "te_core.ops",
    "te_core.recipe",
    "te_torch",
    "te_torch.attention",
    "te_torch.constants",
    "te_torch.debug",
    "te_torch.ops",
    "te_torch.optimizers",
    "te_torch.recipe",
    "te_torch.router",
    "te_torch.tensors",
    "te_torch.utils",
)


def text() -> str:
    """All faces, a line for each name."""
    lines: list[str] = []
    classes: set[type] = set()
    for face in FACES:
        module = importlib.import_module(face)
        lines.append(f"# {face}")
        for name in _names(module):
            value = getattr(module, name)
            told = inspect.isclass(value) and value in classes
            lines += [name] if told else _lines(name, value)
            classes |= {value} if inspect.isclass(value) else set()
        lines.append("")
    bases = {base for cls in classes for base in _ours(cls)} - classes
    lines.append("# what classes have from these")
    for base in sorted(bases, key=lambda cls: cls.__name__):
        lines += _lines(base.__name__, base)
    return "\n".join([*lines, ""])


def _names(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is None:  # what it defines
        listed = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(name for name in listed if not name.startswith("_"))


def _lines(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value) and value not in _ours(value):
        yield f"{name} is {value.__module__}.{value.__qualname__}"
    elif inspect.isclass(value):
        above = ", ".join(base.__name__ for base in value.__bases__ if base in _ours(value))
        members = issubclass(value, enum.Enum)  # its arguments are Python's own, and differ from version to version
        yield f"{name}{'' if members else _arguments(value)}{' of ' * bool(above)}{above}"
        if members:
            yield f"  {' '.join(value.__members__)}"
            return
        for member in sorted(m for m in vars(value) if not m.startswith("_")):
            found = inspect.getattr_static(value, member)
            found = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
            yield f"  .{member}{_arguments(found)}" if callable(found) else f"  .{member}"
    elif callable(value):
        yield f"{name}{_arguments(value)}"
    else:
        yield name


def _ours(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.partition(".")[0] in ("te_core", "te_torch")]


def _arguments(value: Any) -> str:
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    bare = [p.replace(annotation=p.empty, default=_shown(p.default)) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


class _Shown(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shown(default: Any) -> Any:
    """A default that reads the same in every process and version of Python."""
    if default is inspect.Parameter.empty:
        return default
    if isinstance(default, enum.Enum):
        return _Shown(f"{type(default).__name__}.{default.name}")
    return _Shown(re.sub(r" at 0x[0-9a-f]+", "", repr(default)))


def main() -> int:
    """Print the surface, or keep it."""
    if sys.argv[1:] not in ([], ["write"]):
        sys.exit(f"surface: got {' '.join(sys.argv[1:])}. Allowed: write, or nothing")
    if sys.argv[1:]:
        KEPT.write_text(text())
    else:
        print(text(), end="")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
