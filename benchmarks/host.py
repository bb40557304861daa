"""Host times alone, of all tiny cases: what a step costs before the GPU has anything to do. Short, so that two trees
can take many turns (benchmarks/beside.py): one process differs from the next by more than a change costs.
"""

from __future__ import annotations

import sys

from benchmarks import attention, harness, modules

CALLS = 300  # of each work of a module or layer; attention's few rows take harness.HOST_CALLS


def measure() -> list[harness.Row]:
    """The modules, the layer, attention, and the core's two operations of attention."""
    tiny = modules.measure_all((), (*modules.TINY, *attention.TINY), CALLS)
    return [*tiny, attention.host_row(), *attention.core_rows()]


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["host", *sys.argv[1:]]))
