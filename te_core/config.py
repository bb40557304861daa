"""`python -m te_core.config --cflags --libs`: how a C compiler finds te_core's header and library.

Those of a wheel that has them lie in the package; those of a checkout in bindings/c, once `make -C bindings/c` has
built the library there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from te_core import c_library


def main(arguments: Sequence[str] | None = None) -> int:
    """Print flags for a compiler."""
    parser = argparse.ArgumentParser(prog="python -m te_core.config", description=__doc__.splitlines()[0])
    parser.add_argument("--cflags", action="store_true", help="where the header is")
    parser.add_argument("--libs", action="store_true", help="the library, and where a program finds it when it starts")
    asked = parser.parse_args(arguments)
    library = c_library.found()
    if library is None:
        print("no libte_core.so: install the wheel of this platform, or run make -C bindings/c", file=sys.stderr)
        return 1
    folder = library.parent
    words = [f"-I{folder.parent / 'include'}"] if asked.cflags or not asked.libs else []
    words += [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lte_core"] if asked.libs or not asked.cflags else []
    print(*words)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
