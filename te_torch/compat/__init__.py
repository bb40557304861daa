"""Lets a script, or a program, that was written for the documented package run on this one, unchanged.

    import te_torch.compat                      # before the script's own imports
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

What this package has built exists under the documented names (contents.py); any other documented name raises an error
that says what to use in its place (te_torch/not_built.py). Programs look further than names: they ask for specs, paths,
a version, a distribution's metadata, and the module that a class says it is of (finder.py).

Where the real package can be imported the alias refuses: two of them in one process would be mixed.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec

from te_core import naming
from te_core.errors import UnsupportedError
from te_torch.compat.contents import CONTENTS, ROOT
from te_torch.compat.finder import Finder, classes

#: Programs that look for the package when they are imported, and remember the answer.
_EAGER = ("peft",)

_finder = Finder()


def install() -> None:
    """Register the documented names; `import te_torch.compat` does it. Twice is once."""
    if _finder in sys.meta_path:
        return
    if ROOT in sys.modules or find_spec(ROOT) is not None:
        raise UnsupportedError(
            "te_torch.compat",
            f"an environment in which {ROOT} itself can be imported",
            "one package of that name in a process",
            f"uninstall {ROOT}, or import te_torch under its own name",
        )
    sys.meta_path.insert(0, _finder)
    modules = {place: import_module(f"{ROOT}.{place}".rstrip(".")) for place in CONTENTS}
    for place, names in CONTENTS.items():
        for name in names:
            if f"{place}.{name}" in CONTENTS:  # a function hides the module of its name: torch_version
                setattr(modules[place], name, names[name])
    for cls, module in classes():
        naming.rename(cls, module)
    if late := [name for name in _EAGER if name in sys.modules]:
        warnings.warn(
            f"te_torch.compat: {', '.join(late)} was imported first and found no {ROOT}: import te_torch.compat before",
            stacklevel=3,
        )


def uninstall() -> None:
    """Take the names back: classes say again where they are defined, and imports find nothing."""
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    naming.restore()
    for name in [n for n, module in [*sys.modules.items()] if getattr(module, "__loader__", None) is _finder]:
        del sys.modules[name]


install()
