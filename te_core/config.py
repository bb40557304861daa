"""`python -m te_core.config --cflags --libs`: how a C compiler finds te_core's header and library.

Those of a wheel that has them lie in the package; those of a checkout in bindings/c, once `make -C bindings/c` has
built the library there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from te_core.errors import LibraryError

_PACKAGE = Path(__file__).resolve().parent
_NAME = "libte_core.so"


class Found(NamedTuple):
    """Where header and library lie."""

    include: Path
    library: Path


def found() -> Found:
    """Those of the package, else those of the checkout that it is of."""
    c = _PACKAGE.parent / "bindings" / "c"
    places = Found(_PACKAGE / "include", _PACKAGE / "lib"), Found(c / "include", c / "build")
    for place in places:
        if (place.include / "te_core.h").exists() and (place.library / _NAME).exists():
            return place
    got = f"no {' and no '.join(str(place.library / _NAME) for place in places)}"
    do = "install the wheel of this platform, or run make -C bindings/c in a checkout"
    raise LibraryError("te_core.config", got, "an installed or built library", do)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print flags for a compiler."""
    parser = argparse.ArgumentParser(prog="python -m te_core.config", description=__doc__.splitlines()[0])
    parser.add_argument("--cflags", action="store_true", help="where the header is")
    parser.add_argument("--libs", action="store_true", help="the library, and where a program finds it when it starts")
    asked = parser.parse_args(arguments)
    try:
        include, library = found()
    except LibraryError as error:
        print(error, file=sys.stderr)
        return 1
    words = [f"-I{include}"] if asked.cflags or not asked.libs else []
    words += [f"-L{library}", f"-Wl,-rpath,{library}", "-lte_core"] if asked.libs or not asked.cflags else []
    print(*words)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
