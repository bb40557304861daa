"""Draw the losses of a program in C: it reads lines `step 3 loss 0.25`, shows them and draws them.

TE_CORE_PYTHON=.venv bindings/c/build/train cpu 50 | python examples/curve.py build/examples/c.png
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too

from te_cli.curve import write_curve

_LINE = re.compile(r"step (\d+) loss (\S+)")


def main(arguments: list[str] | None = None) -> int:
    """Draw what the standard input says."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 1:
        sys.stderr.write(f"{__doc__}")
        return 2
    losses = []
    for line in sys.stdin:
        sys.stdout.write(line)
        sys.stdout.flush()
        losses += [float(match[2]) for match in _LINE.finditer(line)]
    if not losses:
        sys.stderr.write("curve.py: error: no line says `step 0 loss 1.5`: nothing is drawn\n")
        return 1
    written = write_curve(Path(given[0]), {Path(given[0]).stem: losses})
    print(f"{len(losses)} losses, {losses[0]:.4f} to {losses[-1]:.4f}" + (f", drawn in {written}" if written else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
