"""A tape that is replayed on the fake CUDA, and played from its program by the player in C.

Both have to ask their driver and cuBLASLt for the same. Memory has the same addresses on both sides, so each line of
both logs is equal.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from te_core.backends.cuda import cublaslt as lt_
from te_core.backends.cuda.attention import constants_at
from te_core.backends.cuda.attention_graph import UIDS
from te_core.kernels.loader import TableLaunch
from te_core.runtime import ByteAllocator, Runtime
from te_core.tape import program_file as file
from te_core.tape import taped
from te_core.tape.bound import Bound, Group
from te_core.tape.program import add_entry
from te_core.tape.program_file import Entry, pack
from te_core.tape.tape import Tape
from tests.core import fake_cudnn
from tests.core.c_library import CProgram, CRuntime, stub, tensor
from tests.core.fake_cuda import Machine
from tests.core.tape_proof import Tapes, run


def _hex(number: int) -> str:
    return hex(number) if number else "0"


def _pointer(number: int) -> str:
    return hex(number) if number else "(nil)"


MASK = (1 << 64) - 1


def program_of(tape: Tape) -> file.Program:
    """A program with this one entry."""
    program = file.Program()
    add_entry(program, "call", tape)
    return program


def digest_of(image: bytes) -> int:
    digest = 14695981039346656037
    for byte in image:
        digest = (digest ^ byte) * 1099511628211 & (1 << 64) - 1
    return digest


class Doors:
    """The lines that the stub in C would write, of what the fake CUDA is asked."""

    def __init__(self, machine: Machine, patch: pytest.MonkeyPatch) -> None:
        self.machine, self.lines = machine, []  # type: ignore[var-annotated]
        self.numbers: list[int] = []  # where the player has those of a soft-cap
        self.tables: dict[str, int] = {}  # bytes of what kernels take by value
        patch.setattr(machine.binding, "launchKernel", self._launch)
        patch.setattr(machine.lt, "matmul", self._multiply)
        for name, form in (
            ("_cuMemsetD8Async", lambda at, value, n, stream: f"fill {_hex(at)} {value} {n} stream {_pointer(stream)}"),
            ("_cuEventRecord", lambda event, stream: f"record stream {_pointer(stream)}"),
            ("_cuStreamWaitEvent", lambda stream, event, flags: f"wait stream {_pointer(stream)}"),
        ):
            patch.setattr(machine.lib, name, partial(self._noted, getattr(machine.lib, name), form))
        ran = machine.graphs.ran
        patch.setattr(machine.graphs, "ran", lambda run: (self._attend(run), ran(run)))

    def _noted(self, function: Callable[..., int], form: Callable[..., str], *arguments: Any) -> int:
        self.lines.append(form(*arguments))
        return function(*arguments)

    def letters(self, function: int) -> str:
        """Of a kernel's arguments, as the stub is told them."""
        (letters,) = {k.letters for k in self.machine.kernels() if k._function == function}
        entry = self.machine.binding.functions[function][1]
        return f"b{self.tables.get(entry, 0)}" if letters == "b" else letters  # 0: nobody compares this launch

    def _launch(self, function: int, *rest: int) -> None:
        *sizes, stream, pointers, _ = rest
        letters = self.letters(function)
        text, entry = self.machine.binding.functions[function]
        line = f"launch {entry} {digest_of(text.encode()):016x} {' '.join(map(str, sizes))} stream {_pointer(stream)}:"
        at = ctypes.c_uint64.from_address(pointers).value if letters else 0
        if letters[:1] == "b":
            line += ctypes.string_at(at, int(letters[1:])).hex()
        else:
            for i, letter in enumerate(letters):
                at = ctypes.c_uint64.from_address(pointers + 8 * i).value
                value = ctypes.c_uint64.from_address(at).value
                line += " " + _hex(value & 0xFFFFFFFF if letter in "if" else value)
        self.lines.append(line)

    def _multiply(self, handle: int, desc: int, alpha: int, a: int, a_layout: int, *rest: int) -> None:
        b, b_layout, beta, c, c_layout, d, d_layout, algorithm, workspace, nbytes, stream = rest
        made = self.machine.lt.made
        known = {k: v for k, v in made[desc].items() if isinstance(k, int)}
        line = f"gemm {made[desc]['compute']} {made[desc]['scale']}"
        line += "".join(f" {k}={_hex(known[k])}" for k in sorted(known))
        line += "".join(" ({} {} {} {})".format(*made[n]) for n in (a_layout, b_layout, c_layout, d_layout))
        if known.get(lt_.POINTER_MODE) == lt_.POINTERS_ON_DEVICE:
            line += f" alpha {_hex(alpha)} {_hex(beta)}"
        else:
            line += " alpha {:g} {:g}".format(*(ctypes.c_float.from_address(at).value for at in (alpha, beta)))
        line += f" algorithm {ctypes.string_at(algorithm, lt_.ALGO_BYTES).hex()}: {' '.join(map(_hex, (a, b, c, d)))}"
        self.lines.append(f"{line} workspace {_hex(workspace)} {nbytes} stream {_pointer(stream)}")

    def _attend(self, run: fake_cudnn.Run) -> None:
        """What a real frontend does of a run: it prepares the workspace, and adds to the tensors that it is given."""
        graph, at, stream = run.graph, run.workspace, f"stream {_pointer(run.stream)}"
        addresses = dict(run.at)
        for begin in self.numbers:
            held = next(a for a in addresses.values() if constants_at(self.machine.devices[0], a))
            start, content = constants_at(self.machine.devices[0], held)  # type: ignore[misc]
            self.lines.append(f"copy {_hex(begin)} {len(content)} {content.hex()} {stream}")
            moved = {start + i: begin + i for i in range(len(content))}
            addresses = {name: moved.get(address, address) for name, address in addresses.items()}
        if graph.slopes:
            content = b"".join(int(one, 16).to_bytes(4, "little") for one in fake_cudnn.SLOPES)
            self.lines.append(f"copy {_hex(at + 96)} {len(content)} {content.hex()} {stream}")
        if graph.zeroed:
            self.lines.append(f"fill {_hex(at + 64)} 0 32 {stream}")
        known = {UIDS[name]: pointer for name, pointer in addresses.items()} | {
            9000: 0x3E000000,
            9001: -(1 << 40) & MASK,
        }
        if graph.needs:
            known |= {9100: at} | ({9101: at + 64} if graph.zeroed else {}) | ({9102: at + 96} if graph.slopes else {})
            at += fake_cudnn.IN_FRONT
        tensors = "".join(f" {uid}={_hex(known[uid])}" for uid in sorted(known))
        self.lines.append(f"attend {digest_of(graph.plan.encode()):016x}{tensors} workspace {_pointer(at)} {stream}")


class Memory:
    """What both sides take their memory from: the second gets the addresses that the first one got."""

    def __init__(self, doors: Doors) -> None:
        self.doors, self.given = doors, []  # type: ignore[var-annotated]
        self.planned: list[int] | None = None  # addresses to give next, if it is known which

    def fresh(self, nbytes: int) -> int:
        """An address that nobody had."""
        return self.doors.machine.arena.take(max(1, nbytes), 5)

    def take(self, nbytes: int, stream: int) -> int:
        """For the replay in Python."""
        address = self.planned.pop(0) if self.planned else self.fresh(nbytes)
        self.doors.lines.append(f"take {nbytes} stream {_pointer(stream)}")
        self.given.append(address)
        return address

    def drop(self, address: int, stream: int) -> None:
        """Of the replay in Python."""
        self.doors.lines.append(f"drop {_hex(address)} stream {_pointer(stream)}")

    def take_in_c(self, nbytes: int, alignment: int, stream: int) -> int:
        """For the player."""
        stub().stub_note(f"take {nbytes} stream {_pointer(stream)}".encode())
        address: int = self.given.pop(0)
        assert address % alignment == 0
        return address

    def drop_in_c(self, address: int, stream: int) -> None:
        """Of the player."""
        stub().stub_note(f"drop {_hex(address)} stream {_pointer(stream)}".encode())


class Allocator(ByteAllocator):
    """Of the replay's. In a block nothing is given back, and so nothing waits for it."""

    in_block = False

    def _give_back(self, ptr: int, stream: int, others: tuple[int, ...]) -> None:
        super()._give_back(ptr, stream, () if self.in_block else others)


class Proof:
    """Two players, and what they are compared by."""

    def __init__(self, machine: Machine, patch: pytest.MonkeyPatch) -> None:
        self.machine, self.patch = machine, patch
        self.doors = Doors(machine, patch)
        self.memory = Memory(self.doors)
        self.allocator = Allocator(machine.devices[0], self.memory.take, self.memory.drop)
        self.rt = Runtime.cuda(0, 5, self.allocator)
        stub().stub_device(1, *machine.info.capability)
        self.c = CRuntime(self.memory.take_in_c, self.memory.drop_in_c)
        self.steps = self.tapes = 0
        patch.setattr(Bound, "_group", in_order)

    def tape(self, tape: Tape) -> None:
        """The program of a tape does what the tape does, from two sets of addresses, and in a block."""
        for step in tape.steps:
            step = getattr(step, "step", step)
            if isinstance(step, TableLaunch):
                self.doors.tables[step.kernel.name] = len(step.table)
        program = program_of(tape)
        self.doors.numbers.clear()
        for step in program.entries[0].steps:
            if step.kind in (file.LAUNCH, file.TABLE):
                f = program.functions[step.target]
                letters = f.letters.replace("r", "p") if step.kind == file.LAUNCH else f"b{step.other}"
                stub().stub_arguments(f.name.encode(), digest_of(program.modules[f.module]), letters.encode())
        player = self.c.load(pack(program))
        entry = program.entries[0]
        try:
            said = [one.name.decode() for part in player.slots() for one in part]
            kept = [s for s in entry.slots if s.role <= file.SAVED]
            assert said == [s.name for s in kept] and player.block_bytes() == entry.block
            for _ in range(2):
                self._by_callbacks(tape, entry, player)
                self._in_a_block(tape, entry, player)
        finally:
            player.free()
        self.steps += len(entry.steps)
        self.tapes += 1

    def _inputs(self, entry: Entry) -> list[int]:
        """New addresses, aligned as they have to be and no better."""
        self.machine.elsewhere()
        return [self.memory.fresh(s.nbytes + 4096) + s.alignment % 256 for s in entry.slots[: entry.inputs]]

    def _by_callbacks(self, tape: Tape, entry: Entry, player: CProgram) -> None:
        inputs = self._inputs(entry)
        self.memory.planned, self.memory.given = None, []
        self.doors.lines.clear()
        numbers = entry.slots[len(tape.slots) :]
        for s in entry.slots if numbers else ():  # the player has taken all of it by the first step
            address = self.rt.workspace(s.name, s.nbytes) if s.role == file.SCRATCH else 0
            self.doors.numbers = [address] if s in numbers else []
        begin = list(self.doors.lines)
        at, lines = self._replayed(tape, inputs)
        lines = begin + lines
        outputs = [s for s in entry.slots if s.role in (file.OUTPUT, file.SAVED)]
        made = [tensor(s, 0) for s in outputs]
        played = self._played(player, entry, inputs, made, 0)
        compare(lines, played)
        numbers = [i for i, s in enumerate(entry.slots) if s.role in (file.OUTPUT, file.SAVED)]
        assert [t.data for t in made] == [at[i] for i in numbers], "results lie elsewhere"
        assert not self.memory.given, "less memory was taken"

    def _in_a_block(self, tape: Tape, entry: Entry, player: CProgram) -> None:
        inputs = self._inputs(entry)
        block = self.memory.fresh(entry.block + 256) & -256
        where = [block + s.place if s.place != file.NOWHERE else self.memory.fresh(s.nbytes) for s in entry.slots]
        takes = [step.target for step in entry.steps if step.kind == file.TAKE]
        self.memory.planned = [where[i] for i in takes if entry.slots[i].role != file.SCRATCH]
        self.memory.given = []
        scratch = {i: s for i, s in enumerate(entry.slots) if s.role == file.SCRATCH}
        known = {(s.name, tape.slots[i].way): where[i] for i, s in scratch.items() if i < len(tape.slots)}
        self.doors.numbers = [where[i] for i in scratch if i >= len(tape.slots)]
        with self._scratch_at(tape, known):
            at, lines = self._replayed(tape, inputs)
        zeroed = [(at[i], s.nbytes) for i, s in enumerate(entry.slots) if s.zeroed and s.place != file.NOWHERE]
        filled = [f"fill {_hex(address)} 0 {nbytes} stream 0x5" for address, nbytes in zeroed]
        numbers = [i for i, s in enumerate(entry.slots) if s.role in (file.OUTPUT, file.SAVED)]
        outputs = [tensor(entry.slots[i], where[i]) for i in numbers]
        played = self._played(player, entry, inputs, outputs, block)
        compare(filled + [line for line in lines if not line.startswith(("take", "drop"))], played)

    @contextmanager
    def _scratch_at(self, tape: Tape, known: dict[Any, int]) -> Iterator[None]:
        """Scratch memory is where a block has it."""
        streams = {way: self.rt for way in [()]}
        for _, way in known:
            rt = self.rt
            for name in way:
                rt = rt.side(name)
            streams[way] = rt
        at = {(streams[way].stream, name): address for (name, way), address in known.items()}
        with self.patch.context() as patch:
            patch.setattr(self.allocator, "in_block", True)
            patch.setattr(Runtime, "workspace", lambda rt, name, nbytes, zeroed=False: at[rt.stream, name])
            yield

    def _replayed(self, tape: Tape, inputs: list[int]) -> tuple[list[int], list[str]]:
        at: list[Any] = list(inputs)
        held: list[Any] = [None] * len(inputs)
        self.doors.lines.clear()
        tape.replay(self.rt, at, held, ())
        return at, list(self.doors.lines)

    def _played(self, player: CProgram, entry: Entry, inputs: list[int], outputs: list[Any], block: int) -> list[str]:
        stub().stub_clear()
        given = [tensor(s, address) for s, address in zip(entry.slots, inputs, strict=False)]
        player.run(given, outputs, block=block)
        log: str = stub().stub_log().decode()
        return log.splitlines()


def in_order(bound: Bound, rank: int) -> Group:
    """A replay that does everything in the order of its tape, as a program does."""
    bound._groups.append(Group())
    return bound._groups[-1]


_STREAM = re.compile(r"(?<=stream )[^:\s]+")


def numbered(lines: list[str]) -> list[str]:
    """Streams by the order in which they come: those beside the call's have other handles in each process."""
    known: dict[str, str] = {}
    return [_STREAM.sub(lambda m: known.setdefault(m.group(), f"s{len(known)}"), line) for line in lines]


def compare(replayed: list[str], played: list[str]) -> None:
    """Equal, line by line; behind them the player may make its stream wait for others."""
    behind = played[len(replayed) :]
    assert all(line.startswith(("record", "wait")) for line in behind), behind[:3]
    for i, (one, other) in enumerate(zip(numbered(replayed), numbered(played), strict=False)):
        assert one == other, (i, one, other)
    assert len(played) >= len(replayed), replayed[len(played) :][:3]


def proved(proof: Proof, build: Any) -> None:
    """All tapes of a case."""
    taped.forget()
    taped.set_when("first")
    run(proof.machine, proof.machine.runtime(), Tapes(), build, "first")
    for tape in taped.tapes():
        proof.tape(tape)
