"""A tape as a program: what `Tape.replay` does, in words of eight bytes that a player without Python reads.

A launch, a product and a fill take what the tape's step takes, with zeros in the places of addresses; attention takes
what cuDNN's frontend makes of that. What a program cannot hold is refused: collectives, functions of a user's, and the
CPU backend's calls.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from te_core import device, libraries
from te_core.backends.cuda import cublaslt as lt_
from te_core.backends.cuda import cudnn_stored, gemm_run
from te_core.backends.cuda.attention import constants_at
from te_core.backends.cuda.attention_graph import written_by
from te_core.backends.cuda.cudnn import Attended, frontend
from te_core.backends.cuda.cudnn_stored import WORKSPACE
from te_core.backends.cuda.gemm_run import LtPlan, Multiplied
from te_core.errors import UnsupportedError
from te_core.kernels.compiler import only_read
from te_core.kernels.loader import Kernel
from te_core.symbols import Patch, Way, is_symbol, slot_of
from te_core.tape import program_file as file
from te_core.tape.beside import Beside, Noticed, Waited
from te_core.tape.layout import Lives, lives_of, side_by_side
from te_core.tape.program_file import Entry, Piece, Program
from te_core.tape.tape import Drop, Slot, Take, Tape
from te_core.tape.walk import names_of, tensors_of
from te_core.tape.words import Packed, packed
from te_core.tensor import CPU, Tensor, cuda_device

#: Attributes of a product's descriptor whose memory it writes, by the epilogue that does.
_WRITES = {lt_.GELU_AUX: lt_.AUX_POINTER, lt_.GELU_AUX_BIAS: lt_.AUX_POINTER, lt_.BGRADB: lt_.BIAS_POINTER}
_REFUSED = {"Called": "a call of the CPU backend", "Collective": "a collective"}


def refused(what: str, came: str) -> NoReturn:
    """Say that a program cannot hold something."""
    allowed = "launches, matrix products, attention by cuDNN, fills, and waits of streams, on a GPU"
    raise UnsupportedError(
        f"program of {what}", came, allowed, "play this call by te_core, and the others by a program"
    )


def add_entry(
    program: Program, name: str, tape: Tape, call: str = "{}", index: int = 0, results: Sequence[str] | None = None
) -> Entry:
    """The tape of a device as a named entry of a program. `results`: what the parts of its result are called."""
    made = _Steps(program, tape, index)
    steps = [step for one in tape.steps for step in made.of(one, 0)]  # first: they may be refused
    for key, value in _facts(tape, index).items():
        program.facts.setdefault(key, value)
    written = set().union(*[_written(program, one) for one in steps]) if steps else set()
    pieces = list(_pieces(tape, results))
    places, block = _places(tape)
    alignment = {one.slot: one.mask + 1 for one in tape.steps if isinstance(one, Take)}
    slots = []
    for i, s in enumerate(tape.slots):
        role = _role(i, s, tape, pieces)
        promised = alignment.get(i) or (s.base & ((1 << 12) - 1)) or 256
        way = _way(program, s.way)
        more = i in written, s.zeroed, way, places.get(i, file.NOWHERE)
        strides = s.strides and tuple(s.strides)
        called = s.name or next((p.name for p in pieces if p.slot == i), "")
        slots.append(
            file.Slot(called, role, s.dtype.dlpack_code, s.dtype.bits, s.shape, strides, s.nbytes, promised, *more)
        )
    for content in made.numbers:  # is copied into scratch memory by each call
        block += -block % 256
        more = True, False, 0, block
        slots.append(file.Slot("soft-cap", file.SCRATCH, 1, 8, (len(content),), None, len(content), 256, *more))
        block += len(content)
    entry = Entry(name, tape.what, call, slots, steps, pieces, tape.inputs, block, tape.peak)
    program.entries.append(entry)
    return entry


def _facts(tape: Tape, index: int) -> dict[str, str]:
    """Versions of what the steps were decided for."""
    info = device.info(index)
    found = {
        "te_core": sys.modules["te_core"].__version__,
        "device": info.name,
        "architecture": info.compute,
        "driver": "{}.{}".format(*libraries.driver_version()),
    }
    kinds = {type(getattr(step, "step", step)) for step in tape.steps}
    if Multiplied in kinds:
        found["cublasLt"] = str(lt_.bindings().get_version())
    if Attended in kinds:
        major, minor, patch = frontend().version
        found["cudnn"] = str(10000 * major + 100 * minor + patch)
    return found


def _way(program: Program, way: Way) -> int:
    """The number of a stream."""
    number = 0
    for name in way:
        number = program.number("ways", (name, number))
    return number


# --------------------------------------------------------------------------------------------------------- slots


def _role(number: int, slot: Slot, tape: Tape, pieces: Sequence[Piece]) -> int:
    if slot.kind == "input":
        return file.STATE if slot.name.startswith("scales.") else file.INPUT
    if slot.kind == "scratch":
        return file.SCRATCH
    if slot.kind != "memory":
        refused(tape.what, f"a {slot.kind} of a collective")
    if number not in tape.kept:
        return file.TEMPORARY
    saved = all(p.name.startswith("saved") for p in pieces if p.slot == number)
    return file.SAVED if saved else file.OUTPUT


def _pieces(tape: Tape, results: Sequence[str] | None) -> Iterator[Piece]:
    """The tensors of the result, by name, where they lie: the result is made over symbolic memory."""
    at = [slot.base for slot in tape.slots]
    held: list[Any] = [Tensor(s.base, s.shape, s.dtype, CPU, None, s.strides) for s in tape.slots[: tape.inputs]]
    held += [None] * (len(at) - len(held))
    # What stands for quantized tensors of the caller's, in which a layer may leave scales in the order of products.
    wholes: dict[int, Any] = defaultdict(SimpleNamespace)
    made = tape.result(at, [*held, wholes])
    forward = tape.what.endswith("forward") and made.__class__ is tuple and len(made) == 2
    named = {"output": made[0], "saved": made[1]} if forward else {"output": made}
    if results is not None and made.__class__ is tuple:
        named = {results[i] if i < len(results) else f"output.{i}": part for i, part in enumerate(made)}
    named |= {f"added {number}": vars(whole) for number, whole in wholes.items()}
    parts = [[*part.values()] if isinstance(part, dict) else part for part in named.values()]
    for name, t in zip(names_of(named), tensors_of(parts), strict=True):
        slot = slot_of(t.ptr) if is_symbol(t.ptr) else next(i for i, base in enumerate(at) if base == t.ptr)
        strides = None if t.strides is None else tuple(t.strides)
        yield Piece(name, slot, t.ptr - at[slot], t.dtype.dlpack_code, t.dtype.bits, tuple(t.shape), strides)


def _places(tape: Tape) -> tuple[dict[int, int], int]:
    """(where memory that is no result's lies in one block, the block's bytes).

    What begins as zeros is filled first, and what several streams use shares nothing: no step says when they are done.
    """
    steps = [step for step in tape.steps if not isinstance(step, (Take, Drop))]
    beside = {p.slot for step in steps if isinstance(step, (Beside, Noticed)) for p in step.patches}
    _, uses = lives_of(tape.slots, steps, ())
    lives: Lives = {}
    for i, (first, last) in uses.items():
        slot = tape.slots[i]
        if slot.kind in ("memory", "scratch") and i not in tape.kept:
            apart = i in beside or bool(slot.way)
            lives[i] = (0 if slot.zeroed or apart else first), (len(steps) if apart else last)
    return side_by_side(lives, {i: tape.slots[i].nbytes for i in lives})


def _written(program: Program, step: file.Step) -> set[int]:
    """The slots that a step writes, as far as signatures say."""
    if step.kind in (file.FILL, file.COPY, file.TABLE):
        return {p.slot for p in step.patches}  # which of a table's addresses are read, no signature says
    if step.kind == file.ATTEND:
        tensors = program.plans[step.target].tensors
        return {p.slot for p in step.patches if p.number == 0 or tensors[p.number - 1][1] == file.WRITTEN}
    if step.kind == file.LAUNCH:
        letters = program.functions[step.target].letters  # "p" of memory that is written, "r" of such as is read
        return {p.slot for p in step.patches if letters[p.number - file.SIZES] == "p"}
    if step.kind == file.PRODUCT:
        product = program.products[step.target]
        epilogue = dict((number, value) for number, value, _ in product.attributes)[lt_.EPILOGUE]
        numbers = {0, 3} | {5 + i for i, (n, _) in enumerate(product.pointers) if n == _WRITES.get(epilogue)}
        return {p.slot for p in step.patches if p.number in numbers}
    return set()


# --------------------------------------------------------------------------------------------------------- steps


class _Steps:
    """Steps of a tape as those of a program."""

    def __init__(self, program: Program, tape: Tape, index: int) -> None:
        self.program, self.tape, self.device = program, tape, cuda_device(index)
        self.numbers: dict[bytes, int] = {}  # of soft-caps: their slots, behind the tape's
        self._functions: dict[int, int] = {}  # by the kernel's handle
        self._stored: dict[int, cudnn_stored.Stored] = {}  # by the graph's id

    def of(self, step: Any, way: int) -> list[file.Step]:
        """What it becomes: nothing, of what only reports read."""
        words = packed(step)
        if words is not None:
            return [self._running(step, words, way)]
        if isinstance(step, Attended):
            return list(self._attention(step, way))
        if isinstance(step, Beside):
            return self.of(step.step, _way(self.program, step.way))
        if isinstance(step, Take):
            return [file.Step(file.TAKE, step.slot, _way(self.program, step.way))]
        if isinstance(step, Drop):
            return [] if step.given else [file.Step(file.DROP, step.slot)]
        if isinstance(step, Waited):
            ways = _way(self.program, step.way), _way(self.program, step.other)
            return [file.Step(file.WAIT, ways[0], 0, ways[1])]
        if isinstance(step, Noticed):
            return [file.Step(file.NOTICE, _way(self.program, step.way), patches=step.patches)]
        if step.__class__.__name__ == "Noted":
            return []
        refused(self.tape.what, _REFUSED.get(step.__class__.__name__, f"{step!r}"))

    def _running(self, step: Any, words: Packed, way: int) -> file.Step:
        """A launch, a product, a fill."""
        self._only_brought(step, words.constants)
        target = 0
        if words.kind == file.PRODUCT:
            target = self.program.number("products", _product_of(step.plan, repr(step)))
        elif words.kind != file.FILL:
            target = self._function(step.kernel)
        return file.Step(words.kind, target, way, words.nbytes, words.words, words.patches)

    def _only_brought(self, step: Any, constants: Iterable[int]) -> None:
        """Refuse addresses that are none of a slot's."""
        for address in constants:
            refused(self.tape.what, f"memory at {address:#x}, which no call brings, in {step!r}")

    def _function(self, kernel: Kernel) -> int:
        found = self._functions.get(kernel._function)
        if found is None:
            name, constants, _ = kernel.made_of
            letters = kernel.letters
            reads = only_read(name, kernel.name, constants, letters)
            spelled = ["r" if one == "p" and read else one for one, read in zip(letters, reads, strict=True)]
            module = self.program.number("modules", kernel.image())
            found = self.program.number("functions", file.Function(kernel.name, "".join(spelled), module))
            self._functions[kernel._function] = found
        return found

    def _attention(self, step: Attended, way: int) -> Iterator[file.Step]:
        """What the frontend does before a run, and the run."""
        graph = step.graph
        kept = self._stored.get(id(graph)) or self._stored.setdefault(id(graph), cudnn_stored.stored(graph))
        known = {p.number if p.number < graph.count else WORKSPACE: p for p in step.patches}
        copied: dict[Patch, bytes] = {}
        for number, address in enumerate(step.addresses):
            found = None if is_symbol(address) or way else constants_at(self.device, address)
            if found is None:
                self._only_brought(step, [] if is_symbol(address) else filter(None, [address]))
                continue
            begin, content = found
            slot = self.numbers.setdefault(content, len(self.tape.slots) + len(self.numbers))
            known[number] = Patch(number, slot, address - begin)
            copied[Patch(0, slot, 0)] = content

        def at(number: int, source: int, offset: int) -> Patch:
            if source not in known:
                refused(self.tape.what, f"no memory for {graph.operands[source]!r} in {step!r}")
            return Patch(number, known[source].slot, known[source].offset + offset)

        copied |= {at(0, WORKSPACE, offset): content for offset, content in kept.copied}
        for place, content in copied.items():
            yield file.Step(file.COPY, self.program.number("contents", content), way, 0, (0,), (place,))
        for offset, nbytes in kept.zeroed:
            yield file.Step(file.FILL, 0, way, 0, (0, nbytes, 0), (at(2, WORKSPACE, offset),))
        results = {i for i, name in enumerate(graph.operands) if name in written_by(graph.operands)}
        places = [at(0, WORKSPACE, kept.behind)] if graph.workspace else []
        words, tensors = [0], []
        for one in kept.operands:
            kind = file.VALUE if one.value is not None else file.READ
            if one.value is None:
                places.append(at(len(words), one.source, one.offset))
                kind = file.WRITTEN if one.source in results or one.source == WORKSPACE else file.READ
            tensors.append((one.uid, kind))
            words.append(one.value or 0)
        image = self.program.number("contents", kept.plan)
        plan = file.Plan(repr(step), image, tuple(tensors), kept.workspace)
        yield file.Step(file.ATTEND, self.program.number("plans", plan), way, 0, tuple(words), tuple(places))


def _product_of(plan: LtPlan, text: str) -> file.Product:
    assert plan.route is not None
    what = gemm_run.described(plan.spec, plan.route)
    layouts = tuple(file.Layout(*one) for one in what.layouts)
    return file.Product(
        text,
        what.compute,
        what.scale,
        (layouts[0], layouts[1], layouts[2]),
        what.attributes,
        tuple((attribute, (1 << 20) + plan.spec.alignment) for attribute in what.pointers),
        bytes(plan.algorithm),
        plan.workspace,
        gemm_run.alpha_on_device(plan.spec),
        plan.route.accumulate,
    )
