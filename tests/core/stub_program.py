"""`python -m tests.core.stub_program PATH`: a linear with delayed scaling as a program for bindings/c/tests/stub.c.

Its modules are texts. It is kept there, so that the tests in C need no Python.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import mkdtemp

import pytest

from te_core.program import recorded
from te_core.tape import taped
from te_core.tape.program_file import pack
from tests.core.fake_cuda import Machine
from tests.core.test_program import examples


def main() -> None:
    with pytest.MonkeyPatch.context() as patch:
        taped.set_when("first")
        Path(sys.argv[1]).write_bytes(pack(recorded(examples(Machine(patch, Path(mkdtemp()))))))


if __name__ == "__main__":
    main()
