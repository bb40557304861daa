"""`python -m tests.core.stub_program PATH`: a program for bindings/c/tests/stub.c.

It has all kinds of steps: a linear with delayed scaling, the update of its scales, attention, work on another stream,
and scratch memory that begins as zeros. Its modules are texts. It is kept there, so that the tests in C need no Python.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import pytest

from te_core.ops import raw
from te_core.ops.quantize import ScalingState
from te_core.program import Example, recorded
from te_core.runtime import Runtime
from te_core.tape import taped
from te_core.tape.program_file import pack
from tests.core.fake_cuda import Machine
from tests.core.tape_cases import FP32, Maker
from tests.core.tape_more_cases import Attention
from tests.core.test_program import examples
from tests.core.test_program_c import marks
from tests.core.test_tape_beside import there_and_back


def attention(rt: Runtime) -> dict[str, Example]:
    """With slopes, which cuDNN's frontend copies to the device before each run."""
    begins, back = Attention({"bias": "alibi", "default_slopes": True, "right": 0}, tokens=32, heads=4, groups=4)(rt)
    assert back is not None
    outputs, saved = begins.function(rt, *begins.args, spec=begins.spec, **begins.options)
    calls = {"attention": begins, "attention backward": back(outputs, saved)}
    return {n: Example(rt, partial(c.function, spec=c.spec), c.args, c.options) for n, c in calls.items()}


def main() -> None:
    with pytest.MonkeyPatch.context() as patch:
        taped.set_when("first")
        machine = Machine(patch, Path(mkdtemp()))
        known = examples(machine)
        rt = machine.runtime()
        make = Maker(rt)
        states = [ScalingState(make(3, dtype=FP32), make(16, 3, dtype=FP32), make(3, dtype=FP32), 448.0)]
        known["update"] = Example(rt, raw.update_scales, (states, "max"))
        known |= attention(rt)
        for function in (there_and_back, marks):
            known[function.__name__] = Example(rt, partial(function, spec=None), (make(64, 64), make(64, 64)))
        Path(sys.argv[1]).write_bytes(pack(recorded(known)))


if __name__ == "__main__":
    main()
