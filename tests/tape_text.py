"""Write every recording of the tests of tapes and of random layers as text, to compare two checkouts.

    python -m tests.tape_text before.txt          # in one checkout, --draws COUNT random layers
    python -m tests.tape_text after.txt           # in the other
    diff before.txt after.txt

Two checkouts whose files are equal launch the same steps on the same memory, in the same order.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, TextIO

import pytest

from te_core.tape import taped
from te_core.tape.tape import Tape
from tests import layer_draws
from tests.layer_options import draw
from tests.recordings import tapes

FILES = ("tests/core/test_tape_cuda.py", "tests/core/test_composed_layers.py", "tests/torch/test_one_node.py")


class Writer:
    """Writes each tape behind the test, or the draw, that recorded it."""

    def __init__(self, file: TextIO) -> None:
        self.file, self.record, self.draw = file, taped.record, ""
        taped.record = self  # type: ignore[assignment]

    def __call__(self, *call: Any) -> Tape:
        """Record a call."""
        tape = self.record(*call)
        where = self.draw or os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        self.file.write(f"# {where}\n{tape}\n")
        return tape


def main() -> int:
    """Write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--draws", type=int, default=1000)
    options = parser.parse_args()
    with open(options.out, "w") as file:
        writer = Writer(file)
        failed = pytest.main(["-q", "-p", "no:xdist", "-p", "no:randomly", *FILES])
        for seed in range(options.draws):
            writer.draw = f"draw {seed}"
            with tapes("first"):
                layer_draws.judge(draw(seed, "cpu"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
