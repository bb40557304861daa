"""`python -m te_core.tools.tune`: measure which attention backend is fastest on this machine.

The backends belong to the adapter for PyTorch, so its measuring module is what runs; te_core itself does not know it.
"""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    """Run the adapter's tuner with this process's arguments."""
    try:
        runpy.run_module("te_torch.attention.tune", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        sys.exit(f"te_core.tools.tune measures through te_torch, which cannot be imported here: {error}")


if __name__ == "__main__":
    main()
