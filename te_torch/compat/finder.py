"""How Python comes to the alias: specs, modules and the metadata of a distribution, as for a package on the path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from email.message import EmailMessage
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import te_core
from te_core import naming
from te_torch import not_built
from te_torch.compat.contents import CONTENTS, DEFINED, DEPRECATED, PACKAGES, ROOT, VERSION
from te_torch.runtime import deprecated

FOLDER = Path(__file__).resolve().parent / ROOT


class Finder(DistributionFinder, Loader):
    """Finds and makes the modules of `CONTENTS`; the first entry of sys.meta_path while the alias is installed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of a module of the table.

        Importing a documented module that is not built ends here, with what to use in its place; who only asks for its
        spec hears that there is none.
        """
        root, _, place = fullname.partition(".")
        if root == ROOT and place in CONTENTS:
            return self._spec(fullname, place)
        error = not_built.module_error(fullname)
        if error is None or PathFinder.find_spec(fullname, path) is not None:
            return None  # whether it exists is for others to say
        if fullname in PACKAGES:
            return _located(ModuleSpec(fullname, self, origin=str(_source(fullname))))
        if _imports(sys._getframe(1)):
            raise error
        return None

    def _spec(self, fullname: str, place: str) -> ModuleSpec:
        below_it = f"{place}." if place else ""
        package = any(other != place and other.startswith(below_it) for other in (*CONTENTS, *not_built.MODULES))
        below = FOLDER.joinpath(*place.split(".")) if place else FOLDER
        file = below / "__init__.py" if package else _source(place)
        spec = _located(ModuleSpec(fullname, self, origin=str(file), is_package=package))
        if package:
            spec.submodule_search_locations = [str(below)]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Python's own kind of module, but for an older name."""
        return _Deprecated(spec.name) if spec.name.partition(".")[2] in DEPRECATED else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        full = module.__spec__.name if module.__spec__ else module.__name__
        place = full.partition(".")[2]
        contents = PACKAGES[full] if full in PACKAGES else CONTENTS[place]
        names = vars(module)
        # What annotations of its classes refer to: whoever evaluates them looks where the class says that it is.
        for home in _homes(place):
            names.update({n: v for n, v in vars(sys.modules[home]).items() if not n.startswith("__")})
        names.update(contents)
        names["__doc__"] = f"{full}, as te-runtime {te_core.__version__} provides it."
        names["__all__"] = [n for n in contents if not n.startswith("_")]
        names["__getattr__"] = not_built.getter(full, place)

    def find_distributions(self, context: Any = DistributionFinder.Context()) -> Iterator[Distribution]:  # noqa: B008
        """The distribution of that name, for who asks importlib.metadata."""
        if context.name is None or _normalized(context.name) == _normalized(Alias.NAME):
            yield Alias()


def _located(spec: ModuleSpec) -> ModuleSpec:
    """A spec whose module has a `__file__`."""
    spec.has_location = True
    return spec


def _classes(place: str) -> list[type]:
    """The classes of ours that this place defines under public names."""
    values = (v for name, v in DEFINED.get(place, {}).items() if isinstance(v, type) and name[0] != "_")
    return [cls for cls in values if naming.home_of(cls).startswith(("te_core.", "te_torch."))]


def _homes(place: str) -> list[str]:
    """The modules that hold their sources."""
    return list(dict.fromkeys(map(naming.home_of, _classes(place))))


def _source(place: str) -> Path:
    """The file in which inspect finds the classes of this place; the table, where there is no single one."""
    homes = _homes(place)
    file = sys.modules[homes[0]].__file__ if len(homes) == 1 else None
    return Path(file) if file else Path(__file__).with_name("contents.py")


def _imports(frame: Any) -> bool:
    """Whether the finder was called by an import, and not by importlib.util.find_spec."""
    while frame is not None and frame.f_code.co_name == "_find_spec":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_find_and_load_unlocked"


class Alias(Distribution):
    """The metadata of a distribution that no folder holds."""

    NAME = "transformer-engine"

    def read_text(self, filename: str) -> str | None:
        """A file of its metadata."""
        if filename == "METADATA":
            about = EmailMessage()
            about["Metadata-Version"] = "2.1"
            about["Name"] = self.NAME
            about["Version"] = VERSION
            about["Summary"] = f"te-runtime {te_core.__version__} under this name (te_torch.compat)"
            return about.as_string()
        return {"top_level.txt": f"{ROOT}\n", "INSTALLER": "te_torch.compat\n"}.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Where a file of it would lie."""
        return FOLDER.parent / path


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


class _Deprecated(ModuleType):
    """A module under an older name: says so at the first use of what it holds."""

    def __getattribute__(self, attribute: str) -> Any:
        if not attribute.startswith("__"):
            name = super().__getattribute__("__name__")
            newer = f"{ROOT}.{DEPRECATED[name.partition('.')[2]]}"
            deprecated(name, newer)
        return super().__getattribute__(attribute)


def classes() -> list[tuple[type, str]]:
    """Every class of ours that the alias defines, and the module that it shall say it is of."""
    return [(cls, f"{ROOT}.{place}") for place in DEFINED for cls in _classes(place)]
