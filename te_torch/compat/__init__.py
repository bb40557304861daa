"""Lets a script that was written for the documented package run on this one, unchanged.

    import te_torch.compat                      # before the script's own imports
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

Only what this package has built exists under the documented names; any other name raises the usual ImportError or
AttributeError. Where the real package can be imported the alias refuses: two of them in one process would be mixed.
"""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import te_core
import te_torch
from te_core.errors import UnsupportedError
from te_torch import recipe as _recipe
from te_torch.modules.base import BaseModule

ROOT = "transformer_engine"

_MODULES = ("LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm")
_QUANTIZATION = ("autocast", "get_default_recipe")

# Documented module name -> what it holds. A package is any name that another one continues.
_CONTENTS: dict[str, dict[str, Any]] = {
    "": {"__version__": te_core.__version__},
    "common": {},
    "common.recipe": {name: getattr(_recipe, name) for name in _recipe.__all__},
    "pytorch": {name: getattr(te_torch, name) for name in te_torch.__all__},
    "pytorch.quantization": {name: getattr(te_torch, name) for name in _QUANTIZATION},
    "pytorch.fp8": {  # the older name of quantization
        **{name: getattr(_recipe, name) for name in _recipe.__all__},
        "fp8_autocast": te_torch.fp8_autocast,
        "get_default_fp8_recipe": te_torch.get_default_recipe,
    },
    "pytorch.module": {name: getattr(te_torch, name) for name in _MODULES},
    "pytorch.module.base": {"TransformerEngineBaseModule": BaseModule},
}
_DEPRECATED = {"pytorch.fp8": "pytorch.quantization"}


def install() -> None:
    """Register the documented module names; `import te_torch.compat` does it. Twice is once."""
    present = sys.modules.get(ROOT)
    if present is not None and getattr(present, "__te_runtime__", False):
        return
    if present is not None or find_spec(ROOT) is not None:
        raise UnsupportedError(
            "te_torch.compat", f"an environment in which {ROOT} itself can be imported",
            "one package of that name in a process", f"uninstall {ROOT}, or import te_torch under its own name",
        )  # fmt: skip
    made = {name: _make(name, held) for name, held in _CONTENTS.items()}
    for name, module in made.items():
        sys.modules[module.__name__] = module
        if name and name not in _DEPRECATED:
            parent, _, last = name.rpartition(".")
            setattr(made[parent], last, module)


def _make(name: str, held: dict[str, Any]) -> ModuleType:
    full = f"{ROOT}.{name}".rstrip(".")
    module = _Deprecated(full) if name in _DEPRECATED else ModuleType(full)
    module.__doc__ = f"{full}, as te-runtime {te_core.__version__} provides it."
    module.__dict__.update(held, __te_runtime__=True, __all__=[n for n in held if not n.startswith("_")])
    if any(other != name and other.startswith(f"{name}." if name else "") for other in _CONTENTS):
        module.__path__ = []  # a package, whose other submodules do not exist
    return module


class _Deprecated(ModuleType):
    """A module under an older name: says so at the first use of what it holds."""

    def __getattribute__(self, attribute: str) -> Any:
        if not attribute.startswith("__"):
            name = super().__getattribute__("__name__")
            newer = f"{ROOT}.{_DEPRECATED[name.removeprefix(ROOT + '.')]}"
            warnings.warn(f"{name} is the older name of {newer}", DeprecationWarning, stacklevel=2)
        return super().__getattribute__(attribute)


install()
