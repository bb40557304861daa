"""The program file: what stands in it, how it is written, read back and printed (docs/program_file.md).

All of it is tables of records of fixed size, little-endian, that name one another by numbers. A reader in C uses the
tables where they lie, once it has checked each number against what it counts (bindings/c/src/check.c).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from te_core import dtypes
from te_core.errors import ArgumentError
from te_core.symbols import Patch

MAGIC, VERSION = b"TEPROGRM", 2
LAUNCH, TABLE, PRODUCT, FILL, ATTEND, COPY, TAKE, DROP, WAIT, NOTICE = range(10)
KINDS = ("launch", "table", "product", "fill", "attend", "copy", "take", "drop", "wait", "notice")
ROLES = ("input", "state", "output", "saved", "scratch", "temporary")
INPUT, STATE, OUTPUT, SAVED, SCRATCH, TEMPORARY = range(6)
#: The words in front of a launch's arguments: grid and block, three each, and dynamic bytes.
SIZES = 7
NOWHERE = (1 << 64) - 1
_WRITTEN, _ZEROED, _STRIDED = 1, 2, 4
_DEVICE_ALPHA, _ADDS = 1, 2
#: What a tensor of a plan is: an address that it reads, a number in the step's word, an address that it writes.
READ, VALUE, WRITTEN = range(3)
_DIGESTED = 56  # what stands in front of here is no part of the digest
_HEAD = struct.Struct("<8sIIQ32s")

#: The tables in their order, with what a record is made of.
TABLES = {
    "text": "B",
    "data": "B",
    "facts": "4I",  # key, value
    "modules": "2Q",  # offset and bytes in data
    "functions": "6I",  # name, letters, module, 0
    "products": "8I2Q" + "IIQQq" * 3 + "2I",
    "attributes": "IIQ",
    "contents": "2Q",  # offset and bytes in data
    "plans": "4IQ2I",
    "ways": "4I",  # name, parent, 0
    "entries": "14I2Q",
    "slots": "10I2Q",
    "numbers": "q",
    "steps": "8I",
    "words": "Q",
    "patches": "IIQ",
    "pieces": "8IQ",
}
_RECORDS = {name: struct.Struct("<" + form) for name, form in TABLES.items()}
_HEADER = -(-(_DIGESTED + 16 * len(TABLES)) // 16) * 16


class Slot(NamedTuple):
    """Memory of an entry."""

    name: str
    role: int
    code: int  # of its dtype, as in DLPack
    bits: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    nbytes: int
    alignment: int
    written: bool
    zeroed: bool = False
    way: int = 0
    place: int = NOWHERE  # in the block


class Piece(NamedTuple):
    """A tensor of the result: where it lies."""

    name: str
    slot: int
    offset: int
    code: int
    bits: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None


class Step(NamedTuple):
    """What is done; `target` is a function, product, plan, content, slot, or the way that waits or notices."""

    kind: int
    target: int
    way: int = 0
    other: int = 0  # bytes of a table; the way that is waited for
    words: tuple[int, ...] = ()
    patches: tuple[Patch, ...] = ()


class Layout(NamedTuple):
    """A matrix of a product's, column by column."""

    dtype: int
    rows: int
    columns: int
    ld: int


class Product(NamedTuple):
    """A call of cuBLASLt: what its descriptors are made of."""

    text: str
    compute: int
    scale: int
    layouts: tuple[Layout, Layout, Layout]  # of the library's first and second operand, and of the result
    attributes: tuple[tuple[int, int, int], ...]  # (attribute, value, bytes)
    pointers: tuple[tuple[int, int], ...]  # (attribute that each run sets, an address aligned as it will be)
    algorithm: bytes
    workspace: int
    device_alpha: bool
    adds: bool  # to what the result holds


class Plan(NamedTuple):
    """A graph of cuDNN's."""

    text: str
    content: int  # number of cuDNN's own form of it
    tensors: tuple[tuple[int, int], ...]  # (its number, READ, VALUE or WRITTEN)
    workspace: int


class Function(NamedTuple):
    """A kernel: its name in a module, and a letter for each argument (`te_core.kernels.loader.get`)."""

    name: str
    letters: str
    module: int


@dataclass
class Entry:
    """What one call does."""

    name: str
    what: str
    call: str  # the call itself, as JSON
    slots: list[Slot]
    steps: list[Step]
    pieces: list[Piece]
    inputs: int
    block: int
    peak: int


@dataclass
class Program:
    """The content of a file."""

    facts: dict[str, str] = field(default_factory=dict)
    modules: list[bytes] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)  # that steps copy to the device, or plans are
    plans: list[Plan] = field(default_factory=list)
    ways: list[tuple[str, int]] = field(default_factory=lambda: [("", 0)])  # (name, the way beside which it is)
    entries: list[Entry] = field(default_factory=list)

    def number(self, table: str, record: Any) -> int:
        """That of a record, which is added if it is not there."""
        known: list[Any] = getattr(self, table)
        if record not in known:
            known.append(record)
        return known.index(record)


# ------------------------------------------------------------------------------------------------------- writing


class _Writer:
    """The tables as they grow."""

    def __init__(self) -> None:
        self.text, self.data = bytearray(), bytearray()
        self.rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
        self._texts: dict[bytes, int] = {}

    def of(self, text: str) -> tuple[int, int]:
        """Where a text stands."""
        content = text.encode()
        if content not in self._texts:
            self._texts[content] = len(self.text)
            self.text += content
        return self._texts[content], len(content)

    def bytes_of(self, content: bytes) -> int:
        """Where bytes stand, at a multiple of 16. A zero follows: a module may be text."""
        start = len(self.data)
        self.data += content + bytes(16 - len(content) % 16)
        return start

    def add(self, table: str, *records: tuple[Any, ...]) -> tuple[int, int]:
        """(number of the first, how many)."""
        rows = self.rows[table]
        rows += records
        return len(rows) - len(records), len(records)

    def dims(self, shape: Sequence[int], strides: Sequence[int] | None) -> tuple[int, int]:
        """Where sizes, and strides behind them, stand; and how many dimensions there are."""
        return self.add("numbers", *[(n,) for n in (*shape, *(strides or ()))])[0], len(shape)

    def packed(self) -> bytes:
        """The file."""
        parts, directory, at = [], b"", _HEADER
        for name, record in _RECORDS.items():
            own: dict[str, bytes | bytearray] = {"text": self.text, "data": self.data}
            content = bytes(own[name]) if name in own else b"".join(record.pack(*row) for row in self.rows[name])
            directory += struct.pack("<2Q", at, len(content) // record.size)
            content += bytes(-len(content) % 16)
            parts.append(content)
            at += len(content)
        head = _HEAD.pack(MAGIC, VERSION, _HEADER, at, bytes(32)) + directory
        return sealed(head.ljust(_HEADER, b"\0") + b"".join(parts))


def sealed(content: bytes) -> bytes:
    """A file with its digest."""
    return content[:24] + hashlib.sha256(content[_DIGESTED:]).digest() + content[_DIGESTED:]


def pack(program: Program) -> bytes:
    """The file of a program."""
    w = _Writer()
    w.add("facts", *[(*w.of(key), *w.of(value)) for key, value in sorted(program.facts.items())])
    w.add("modules", *[(w.bytes_of(image), len(image)) for image in program.modules])
    w.add("functions", *[(*w.of(f.name), *w.of(f.letters), f.module, 0) for f in program.functions])
    for p in program.products:
        attributes = w.add("attributes", *[(number, nbytes, value) for number, value, nbytes in p.attributes])
        pointers = w.add("attributes", *[(number, 8, value) for number, value in p.pointers])
        flags = _DEVICE_ALPHA * p.device_alpha | _ADDS * p.adds
        layouts = [part for one in p.layouts for part in (one.dtype, 0, *one[1:])]
        numbers = (p.compute, p.scale, *attributes, *pointers, flags, 0, w.bytes_of(p.algorithm), p.workspace)
        w.add("products", (*numbers, *layouts, *w.of(p.text)))
    w.add("contents", *[(w.bytes_of(content), len(content)) for content in program.contents])
    for plan in program.plans:
        tensors = w.add("numbers", *[(n,) for part in zip(*plan.tensors, strict=True) for n in part])[0]
        w.add("plans", (plan.content, tensors, len(plan.tensors), 0, plan.workspace, *w.of(plan.text)))
    w.add("ways", *[(*w.of(name), parent, 0) for name, parent in program.ways])
    for e in program.entries:
        _add_entry(w, e)
    return w.packed()


def _add_entry(w: _Writer, e: Entry) -> None:
    slots = []
    for s in e.slots:
        flags = _WRITTEN * s.written | _ZEROED * s.zeroed | _STRIDED * (s.strides is not None)
        dims = w.dims(s.shape, s.strides)
        slots.append((*w.of(s.name), s.role, flags, s.code, s.bits, *dims, s.way, s.alignment, s.nbytes, s.place))
    steps = []
    for one in e.steps:
        words = w.add("words", *[(word,) for word in one.words])
        found = w.add("patches", *one.patches)
        steps.append((one.kind, one.target, one.way, one.other, *words, *found))
    pieces = []
    for p in e.pieces:
        strided = _STRIDED * (p.strides is not None)
        pieces.append((*w.of(p.name), p.slot, strided, p.code, p.bits, *w.dims(p.shape, p.strides), p.offset))
    texts = (*w.of(e.name), *w.of(e.what), *w.of(e.call))
    tables = (*w.add("slots", *slots), *w.add("steps", *steps), *w.add("pieces", *pieces))
    w.add("entries", (*texts, *tables, e.inputs, 0, e.block, e.peak))


# ------------------------------------------------------------------------------------------------------- reading


def _broken(got: str) -> ArgumentError:
    return ArgumentError(
        "read a program", got, f"a program file of version {VERSION}, whole", "record the program again"
    )


def unpack(content: bytes) -> Program:
    """The program in a file. One that is broken is refused; only the loader in C looks at every number."""
    try:
        magic, version, header, nbytes, digest = _HEAD.unpack_from(content)
    except struct.error as error:
        raise _broken(f"{len(content)} bytes") from error
    if magic != MAGIC or version != VERSION:
        raise _broken(f"a file that begins with {magic!r}, version {version}")
    if nbytes != len(content) or header != _HEADER or digest != hashlib.sha256(content[_DIGESTED:]).digest():
        raise _broken(f"{len(content)} bytes, damaged")
    try:
        return _Reader(content).program()
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise _broken(f"a number that leads nowhere ({error})") from error


class _Reader:
    """The tables of a file."""

    def __init__(self, content: bytes) -> None:
        self.content, self.rows, self.starts = content, {}, {}
        for i, (name, record) in enumerate(_RECORDS.items()):
            start, count = struct.unpack_from("<2Q", content, _DIGESTED + 16 * i)
            self.starts[name] = start
            if record.size > 1:
                part = content[start : start + count * record.size]
                self.rows[name] = list(record.iter_unpack(part))

    def text(self, start: int, length: int) -> str:
        """A text."""
        start += self.starts["text"]
        return self.content[start : start + length].decode()

    def data(self, start: int, length: int) -> bytes:
        """Bytes."""
        start += self.starts["data"]
        return self.content[start : start + length]

    def some(self, table: str, first: int, count: int) -> list[Any]:
        """Records that follow one another."""
        return self.rows[table][first : first + count]

    def dims(self, first: int, ndim: int, strided: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Shape and strides."""
        found = [n for (n,) in self.some("numbers", first, ndim * (2 if strided else 1))]
        return tuple(found[:ndim]), tuple(found[ndim:]) if strided else None

    def program(self) -> Program:
        """All of it."""
        rows = self.rows
        made = Program(
            {self.text(*row[:2]): self.text(*row[2:]) for row in rows["facts"]},
            [self.data(*row) for row in rows["modules"]],
            [Function(self.text(*row[:2]), self.text(*row[2:4]), row[4]) for row in rows["functions"]],
            [self._product(row) for row in rows["products"]],
            [self.data(*row) for row in rows["contents"]],
            [self._plan(*row) for row in rows["plans"]],
            [(self.text(*row[:2]), row[2]) for row in rows["ways"]],
        )
        made.entries = [self._entry(row) for row in rows["entries"]]
        return made

    def _product(self, row: tuple[Any, ...]) -> Product:
        compute, scale, first, count, points, pointed, flags, _, algorithm, workspace, *layouts = row[:-2]
        parts = [Layout(layouts[i], *layouts[i + 2 : i + 5]) for i in (0, 5, 10)]
        return Product(
            self.text(*row[-2:]),
            compute,
            scale,
            (parts[0], parts[1], parts[2]),
            tuple((number, value, nbytes) for number, nbytes, value in self.some("attributes", first, count)),
            tuple((number, value) for number, _, value in self.some("attributes", points, pointed)),
            self.data(algorithm, 64),
            workspace,
            bool(flags & _DEVICE_ALPHA),
            bool(flags & _ADDS),
        )

    def _plan(self, content: int, first: int, count: int, _: int, workspace: int, *text: int) -> Plan:
        numbers = [n for (n,) in self.some("numbers", first, 2 * count)]
        return Plan(self.text(*text), content, tuple(zip(numbers[:count], numbers[count:], strict=True)), workspace)

    def _entry(self, row: tuple[Any, ...]) -> Entry:
        name, what, call = (self.text(*row[at : at + 2]) for at in (0, 2, 4))
        slots = [self._slot(*one) for one in self.some("slots", *row[6:8])]
        steps = [self._step(*one) for one in self.some("steps", *row[8:10])]
        pieces = [self._piece(*one) for one in self.some("pieces", *row[10:12])]
        return Entry(name, what, call, slots, steps, pieces, row[12], *row[14:])

    def _slot(self, *row: int) -> Slot:
        flags, way, alignment, nbytes, place = row[3], *row[8:]
        shape, strides = self.dims(row[6], row[7], flags & _STRIDED)
        written, zeroed = bool(flags & _WRITTEN), bool(flags & _ZEROED)
        name, role, code, bits = self.text(*row[:2]), row[2], *row[4:6]
        return Slot(name, role, code, bits, shape, strides, nbytes, alignment, written, zeroed, way, place)

    def _step(self, kind: int, target: int, way: int, other: int, *ranges: int) -> Step:
        words = tuple(word for (word,) in self.some("words", *ranges[:2]))
        return Step(kind, target, way, other, words, tuple(Patch(*p) for p in self.some("patches", *ranges[2:])))

    def _piece(self, *row: int) -> Piece:
        shape, strides = self.dims(row[6], row[7], row[3] & _STRIDED)
        return Piece(self.text(*row[:2]), row[2], row[8], row[4], row[5], shape, strides)


# ------------------------------------------------------------------------------------------------------ printing


def dtype_name(code: int, bits: int) -> str:
    """Of a dtype as DLPack numbers it."""
    known = (dtype.name for dtype in dtypes.ALL if (dtype.dlpack_code, dtype.bits) == (code, bits))
    return next(known, f"{'uint' if code == 1 else 'int'}{bits}")


def lines_of(program: Program) -> Iterator[str]:
    """The program in words, a line at a time."""
    yield from (f"{key}: {value}" for key, value in program.facts.items())
    for i, image in enumerate(program.modules):
        yield f"module {i}: {len(image)} bytes, {hashlib.sha256(image).hexdigest()[:16]}"
    for product in program.products:
        algorithm = hashlib.sha256(product.algorithm).hexdigest()[:16]
        yield f"{product.text}, algorithm {algorithm}, workspace {product.workspace}"
    for plan in program.plans:
        content = hashlib.sha256(program.contents[plan.content]).hexdigest()[:16]
        yield f"{plan.text}, plan {content}, workspace {plan.workspace}"
    for entry in program.entries:
        yield f"{entry.name}: {entry.what}, {len(entry.steps)} steps, {entry.peak} bytes at the peak"
        yield f"  block {entry.block} bytes, call {entry.call}"
        for i, s in enumerate(entry.slots):
            marks = " written" * s.written + " zeroed" * s.zeroed
            sizes = f"{dtype_name(s.code, s.bits)}{list(s.shape)}"
            yield f"  t{i} {ROLES[s.role]} {s.name}: {sizes}, {s.nbytes} bytes, aligned to {s.alignment}{marks}"
        for p in entry.pieces:
            yield f"  {p.name} = t{p.slot}+{p.offset} {dtype_name(p.code, p.bits)}{list(p.shape)}"
        yield from (f"  {_step_in_words(program, one)}" for one in entry.steps)


def _step_in_words(program: Program, step: Step) -> str:
    places = ", ".join(f"t{p.slot}" + (f"+{p.offset}" if p.offset else "") for p in step.patches)
    beside = f"on {program.ways[step.way][0]}: " if step.way else ""
    kind, words = step.kind, step.words
    if kind in (LAUNCH, TABLE):
        said = f"{program.functions[step.target].name} {words[:3]} x {words[3:6]}"
        said += "" if kind == TABLE else f" {[*map(hex, words[SIZES:])]}"
    elif kind == PRODUCT:
        said = program.products[step.target].text
    elif kind == FILL:
        said = f"fill {words[1]} bytes"
    elif kind == ATTEND:
        said = program.plans[step.target].text
    elif kind == COPY:
        said = f"copy {len(program.contents[step.target])} bytes"
    elif kind in (TAKE, DROP):
        said = f"{KINDS[kind]} t{step.target}"
    else:
        said = f"{KINDS[kind]} {program.ways[step.target][0]!r} {program.ways[step.other][0]!r}"
    return beside + said + (f" ({places})" if places else "")
