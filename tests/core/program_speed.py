"""`python -m tests.core.program_speed`: the loops of `Tape.replay` and of the player in C, on doors that do nothing.

Of a real step this is the part that the player can save. Each figure is the least of several rounds, in turns.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from te_core.runtime import Runtime
from te_core.tape import program_file as file
from te_core.tape import taped
from te_core.tape.program_file import pack
from te_core.tape.tape import Tape
from te_core.tensor import Tensor
from tests.core.c_library import _ALLOC, _FREE, CRuntime, stub, tensor, time_call
from tests.core.fake_cuda import Machine
from tests.core.program_proof import program_of
from tests.core.tape_cases import MLP, Linear
from tests.core.tape_proof import Tapes, run
from tests.core.test_tape_cuda import GROUPS

ADDRESS = 0x7F0000000000
ROUNDS, CALLS = 5, 200


class Nothing:
    """Memory that costs nothing, as torch's allocator is asked for it: a function for each take, once."""

    alignment = 256

    def __init__(self, device: Any) -> None:
        self._device = device

    def empty(self, shape: tuple[int, ...], dtype: Any, stream: int) -> Tensor:
        """Always the same."""
        return Tensor(ADDRESS, shape, dtype, self._device, self)

    def makers(self, given: Any, takes: Any) -> dict[int, Any]:
        """For `Tape.replay`."""
        made = given.get(self)
        if made is None:
            made = given[self] = {take.slot: object for take in takes}
        return made  # type: ignore[no-any-return]

    @staticmethod
    def address_of(held: Any) -> int:
        """Of what was made."""
        return ADDRESS


def python_ns(rt: Runtime, tape: Tape) -> float:
    """A replay."""
    inputs = [ADDRESS] * tape.inputs
    begin = time.perf_counter_ns()
    for _ in range(CALLS):
        tape.replay(rt, inputs.copy(), [None] * len(inputs), ())
    return (time.perf_counter_ns() - begin) / CALLS


def measured(machine: Machine, runtime: CRuntime, timer: Any, build: Any) -> list[tuple[str, int, float, float]]:
    """(what, steps, nanoseconds of Python, of C) of each tape of a case."""
    taped.forget()
    run(machine, machine.runtime(), Tapes(), build, "first")
    rt = Runtime.cuda(0, 5, Nothing(machine.devices[0]))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.binding, "launchKernel", lambda *given: None)
        for tape in taped.tapes():
            _of_nothing(machine, tape)
            program = program_of(tape)
            entry = program.entries[0]
            player = runtime.load(pack(program))
            given = [tensor(s, ADDRESS) for s in entry.slots[: entry.inputs]]
            outputs = [tensor(s, ADDRESS) for s in entry.slots if s.role in (file.OUTPUT, file.SAVED)]
            asked = player.asked(given, outputs)
            both = [(python_ns(rt, tape), timer(player.handle, ctypes.byref(asked), 10 * CALLS)) for _ in range(ROUNDS)]
            player.free()
            steps = sum(step.kind <= file.COPY for step in entry.steps)
            found.append((tape.what, steps, min(p for p, _ in both), min(c for _, c in both)))
    return found


def _of_nothing(machine: Machine, tape: Tape) -> None:
    """The tape's launches, products and fills do nothing. (They were bound before, for the machine.)"""
    tape._bound.clear()
    for kernel in machine.kernels():
        kernel._launch = machine.binding.launchKernel


def main() -> None:
    """Print medians."""
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch, Path(mkdtemp()))
        patch.setattr(machine.lt, "matmul", lambda *given: None)
        patch.setattr(machine.lib, "_cuMemsetD8Async", lambda *given: 0)
        taped.set_when("first")
        lib = stub()
        lib.stub_mute(1)
        take, drop = (ctypes.cast(f, kind) for f, kind in ((lib.stub_take, _ALLOC), (lib.stub_drop, _FREE)))
        runtime, timer = CRuntime(take, drop), time_call()
        found = []
        for recipe in (None, "delayed", "current", "block"):
            for build in (Linear(recipe), MLP(recipe), *list(GROUPS["norm and linear"](recipe))[:2]):
                found += measured(machine, runtime, timer, build)
        for what, steps, python, c in found:
            times = f"Python {python / 1e3:7.2f} us  C {c / 1e3:6.3f} us  {python / c:6.1f} times"
            print(f"{what:24} {steps:3} steps  {times}")
        print(f"median: C {statistics.median(c / max(1, n) for _, n, _, c in found):.0f} ns a step, ", end="")
        print(f"{statistics.median(p / c for _, _, p, c in found):.1f} times faster, least ", end="")
        print(f"{min(p / c for _, _, p, c in found):.1f}, of {len(found)} tapes")


if __name__ == "__main__":
    main()
