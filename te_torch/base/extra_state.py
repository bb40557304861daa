"""The peer's `_extra_state` entries, read without unpickling them; and one of ours, for programs that ask for it.

Such an entry is a pickle, which is a program. This reads the few instructions that an honest one consists of: they
make dictionaries, numbers and strings, and tensors out of bytes that the entry itself holds. A global is looked up in
the tables below and nowhere else; a recipe or an enum becomes an inert mark, and so does a recipe of a class that the
program has imported. Nothing is imported, called, set or unpickled. All else is refused.

Time and memory grow with the entry's size and nothing that it says: only the memory of the four tensors is read, sizes
are compared with what is there before, and no byte counts twice.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from te_core.errors import ArgumentError
from te_core.quantize.state import BACKWARD_SLOTS, FORWARD_SLOTS
from te_core.recipe import Recipe
from te_torch.state import NAMES as KEYS

_RECIPES = "transformer_engine.common.recipe"
_RECIPE_CLASSES = frozenset(
    ("CustomRecipe", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "MXFP8BlockScaling",
     "NVFP4BlockScaling")
)  # fmt: skip
_MARKS = {
    (module, name)
    for module in (_RECIPES, "te_core.recipe")
    for name in (*_RECIPE_CLASSES, "Format", "MMParams", "QParams", "Recipe", "_FormatHelper", "_FormatMax")
}
#: What stands in our own pickles for a class, while it says that it is of the peer's module.
_NAMED = ("te_core.naming", "named")
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
#: torch's, and what Megatron-core puts in its place.
_LOADS = {("torch.storage", "_load_from_bytes"), ("megatron.core.safe_globals", "safe_load_from_bytes")}
_ORDERED_DICT = ("collections", "OrderedDict")
_STORAGES = {
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "LongStorage"): torch.int64,
    ("torch", "IntStorage"): torch.int32,
    ("torch", "ByteStorage"): torch.uint8,
}
_GLOBALS = {*_MARKS, *_STORAGES, *_LOADS, _NAMED, _REBUILD, _ORDERED_DICT}

# torch.save before it wrote zip files: a number, a version, facts about the machine, the object, the storages.
_LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the number, as a pickle of its own
_LEGACY_VERSION = 1001


class _RefusedError(Exception):
    """What is wrong with an entry."""


class _Name(NamedTuple):
    """A global of the tables, as it is referred to."""

    module: str
    name: str


class _Mark:
    """Where an object of a class of the peer stood."""


class _Storage:
    """Memory of a tensor: what is announced of it, and where the file has it."""

    def __init__(self, dtype: torch.dtype, numel: int) -> None:
        self.dtype = dtype
        self.numel = numel
        self.nbytes = numel * dtype.itemsize
        self.content: Callable[[], bytes | memoryview] = bytes  # set when the file says where it lies
        self._read: bytes | memoryview | None = None

    def read(self) -> bytes | memoryview:
        """The bytes; once, as several tensors may lie in them."""
        if self._read is None:
            self._read = self.content()
        return self._read


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def read_extra_state(entry: Any, key: str = "_extra_state") -> dict[str, torch.Tensor] | None:
    """The four float32 tensors of delayed scaling (KEYS, on the CPU) that an entry holds; None if it holds none."""
    cause: Exception | None = None
    try:
        data = _bytes_of(entry)
        if not data:
            return None
        if data.startswith(b"PK\x03\x04"):
            return _tensors(_read_zip(data))
        if data.startswith(_LEGACY_START):
            return _tensors(_read_legacy(data))
        return _tensors({} if _without_state(data) else _Reader(io.BytesIO(data), inside=len(data)).read())
    except _RefusedError as error:
        reason = str(error)
    except Exception as error:  # whatever malformed input comes to inside pickletools and zipfile
        reason, cause = f"malformed: {error}"[:200], error
    raise ArgumentError(
        "load_state_dict",
        f"{key} that cannot be read safely ({reason})",
        "an _extra_state that is absent, None, empty, or holds delayed-scaling tensors, numbers, recipes of classes "
        "that are documented or imported",
        f"delete {key!r} from the checkpoint to start its scales anew, put the four tensors under fp8_state, or import "
        "what defines a recipe of yours",
    ) from cause


def _bytes_of(entry: Any) -> bytes:
    if entry is None:
        return b""
    if isinstance(entry, io.BytesIO):
        return entry.getvalue()
    if isinstance(entry, (bytes, bytearray)):
        return bytes(entry)
    if isinstance(entry, torch.Tensor):
        if entry.numel() == 0:
            return b""
        if entry.dtype == torch.uint8 and entry.ndim == 1 and not entry.is_meta:
            return entry.detach().cpu().contiguous().numpy().tobytes()
        raise _RefusedError(f"a tensor of {entry.dtype} and shape {tuple(entry.shape)}")
    raise _RefusedError(f"an object of type {type(entry).__name__}")


def _without_state(data: bytes) -> bool:
    """Whether a pickle is that of a recipe without a history, whose own classes need not be read then."""
    strings = {arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str)}
    names = {s.rpartition(" ")[2] for s in strings} & _RECIPE_CLASSES
    return "recipe" in strings and bool(names - {"DelayedScaling"}) and not strings & {"DelayedScaling", *KEYS}


def _read_zip(data: bytes) -> Any:
    """What torch.save has written since 1.6: data.pkl, and each storage as a file of its own."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    members = {info.filename: info for info in archive.infolist()}
    left = len(data)

    def content(name: str) -> bytes:
        nonlocal left
        info = members[name]
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise _RefusedError("a compressed file")
        left -= info.file_size
        if left < 0:
            raise _RefusedError("files that overlap")
        return archive.read(info)

    root = next((name for name in members if name.endswith("/data.pkl")), None)
    if root is None:
        raise _RefusedError("a zip file without data.pkl")
    root = root.removesuffix("data.pkl")
    if f"{root}byteorder" in members and content(f"{root}byteorder") != b"little":
        raise _RefusedError("a file of a big-endian machine")
    storages: dict[str, _Storage] = {}
    read = _Reader(io.BytesIO(content(f"{root}data.pkl")), storages).read()
    for key, storage in storages.items():
        storage.content = partial(content, f"{root}data/{key}")
    return read


def _read_legacy(data: bytes) -> Any:
    file, storages = io.BytesIO(data), dict[str, _Storage]()
    magic = file.read(len(_LEGACY_START))
    version, machine = _Reader(file).read(), _Reader(file).read()
    if magic != _LEGACY_START or version != _LEGACY_VERSION:
        raise _RefusedError("bytes that torch.save did not write")
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise _RefusedError("a file of a big-endian machine")
    read = _Reader(file, storages).read()
    keys = _Reader(file).read()
    if not isinstance(keys, list) or any(type(key) is not str or key not in storages for key in keys):
        raise _RefusedError("storages that no tensor names")
    for key in keys:
        storage = storages[key]
        (numel,) = struct.unpack("<q", file.read(8))
        if numel != storage.numel:
            raise _RefusedError(f"a storage of {numel} elements where {storage.numel} were announced")
        start, stop = file.tell(), file.tell() + storage.nbytes
        if stop > len(data):
            raise _RefusedError("a file that ends inside a storage")
        storage._read = memoryview(data)[start:stop]
        file.seek(stop)
    return read


def _tensors(state: Any) -> dict[str, torch.Tensor] | None:
    if not isinstance(state, dict):
        raise _RefusedError("no dictionary")
    halves = [half for half in (state.get("forward"), state.get("backward")) if isinstance(half, dict)]
    if halves:  # of an operation of te.ops
        state = {key: value for half in halves for key, value in half.items()}
    found = {key: _tensor(state[key], key) for key in KEYS if key in state}
    if not found:
        return None
    if len(found) < len(KEYS):
        raise _RefusedError(f"no {', '.join(key for key in KEYS if key not in found)}")
    for suffix in ("fwd", "bwd"):
        scale, history = found[f"scale_{suffix}"], found[f"amax_history_{suffix}"]
        if scale.ndim != 1 or history.ndim != 2 or history.shape[0] < 1 or history.shape[1] != scale.shape[0]:
            raise _RefusedError(
                f"scale_{suffix} {tuple(scale.shape)} beside amax_history_{suffix} {tuple(history.shape)}"
            )
    if halves:
        return {name: _in_slots(t, 2 if name.endswith("fwd") else 1) for name, t in found.items()}
    variables = state.get("extra_fp8_variables")
    return by_gemm(found, slots_first=False) if isinstance(variables, dict) and SLOTS_FIRST in variables else found


#: Says of an entry that its columns go through the GEMMs of each slot, as Megatron-core cuts those of grouped experts.
SLOTS_FIRST = "te_runtime_slots_first"


def by_gemm(tensors: dict[str, torch.Tensor], slots_first: bool) -> dict[str, torch.Tensor]:
    """Columns that go through the GEMMs of each slot, from those that go through the slots of each GEMM; or back."""
    turned = {}
    for name, t in tensors.items():
        slots = FORWARD_SLOTS if name.endswith("fwd") else BACKWARD_SLOTS
        if t.shape[-1] % slots:
            raise _RefusedError(f"{name} of {t.shape[-1]} columns")
        groups = (-1, slots) if slots_first else (slots, -1)
        turned[name] = t.unflatten(-1, groups).transpose(-1, -2).flatten(-2)
    return turned


def _in_slots(t: torch.Tensor, used: int) -> torch.Tensor:
    """The columns of an operation, which has no slots of a quantized output and input gradient, with those slots."""
    if t.shape[-1] % used:
        raise _RefusedError(f"{t.shape[-1]} columns of an operation")
    groups = t.unflatten(-1, (-1, used))
    slots = (FORWARD_SLOTS if used == 2 else BACKWARD_SLOTS) - used
    new = torch.ones if t.ndim == 1 else torch.zeros
    return torch.cat([groups, new(*groups.shape[:-1], slots)], -1).flatten(-2)


def write_extra_state(tensors: dict[str, torch.Tensor], variables: dict[str, Any]) -> torch.Tensor:
    """An entry with the four tensors of delayed scaling (or none), in Python's and torch's own types alone.

    Programs unpickle it, some with a list of the classes that they allow.
    """
    recipe = {"amax_history_len": len(tensors["amax_history_fwd"])} if tensors else None
    entry: dict[str, Any] = {"recipe": recipe, "extra_fp8_variables": {**variables, SLOTS_FIRST: True}}
    entry |= by_gemm({name: t.detach().cpu() for name, t in tensors.items()}, slots_first=True)
    return torch.frombuffer(bytearray(pickle.dumps(entry)), dtype=torch.uint8)


def _tensor(spec: Any, key: str) -> torch.Tensor:
    if not isinstance(spec, _Tensor):
        raise _RefusedError(f"{key} is no tensor")
    storage = spec.storage
    if not storage.dtype.is_floating_point or 0 in spec.size:
        raise _RefusedError(f"{key} of {storage.dtype} and shape {spec.size}")
    data = storage.read()
    if len(data) != storage.nbytes:
        raise _RefusedError(f"{key}: {len(data)} bytes for {storage.numel} elements")
    flat = torch.frombuffer(bytearray(data), dtype=storage.dtype)
    return flat.as_strided(spec.size, spec.stride, spec.offset).to(torch.float32, copy=True).contiguous()


def _rebuilt(arguments: tuple[Any, ...]) -> _Tensor:
    """A tensor's layout, checked to lie in its storage and to be no larger than that."""
    if len(arguments) < 4:
        raise _RefusedError("a tensor without a layout")
    storage, offset, size, stride = arguments[:4]
    if not isinstance(storage, _Storage) or not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise _RefusedError("a tensor without a storage")
    if len(size) != len(stride) or len(size) > 2 or any(type(n) is not int or n < 0 for n in (offset, *size, *stride)):
        raise _RefusedError("a tensor of an unknown layout")
    if any(step > storage.numel for step in stride):
        raise _RefusedError("a tensor of strides beyond its storage")
    numel, last = 1, offset
    for n, step in zip(size, stride, strict=True):
        numel *= n
        last += (n - 1) * step
    if numel and (last >= storage.numel or numel > storage.numel):
        raise _RefusedError("a tensor larger than its storage")
    return _Tensor(storage, offset, size, stride)


def _imported_recipe(module: str, name: str) -> bool:
    """Whether a class of recipes goes by this name in a module that the program has imported."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, type | ModuleType) else None
    return isinstance(found, type) and issubclass(found, Recipe)


class _Reader:
    """Reads one pickle from a file. `storages`: where persistent ids may name memory, and what they named."""

    def __init__(self, file: io.BytesIO, storages: dict[str, _Storage] | None = None, inside: int = 0) -> None:
        self.file = file
        self.storages = storages
        self.inside = inside  # how many of its bytes may still be read as files of their own: honest ones are once
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def read(self) -> Any:
        """What the pickle describes."""
        for opcode, argument, _ in pickletools.genops(self.file):
            if opcode.name == "STOP":
                return self._pop()
            if opcode.name in _LITERALS:
                self.stack.append(argument)
            elif opcode.name in _CONSTANTS:
                self.stack.append(_CONSTANTS[opcode.name])
            elif opcode.name not in ("PROTO", "FRAME"):
                run = _INSTRUCTIONS.get(opcode.name)
                if run is None:
                    raise _RefusedError(f"the pickle instruction {opcode.name}")
                run(self, argument)
        raise _RefusedError("a pickle without an end")

    def _pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise _RefusedError("a pickle that takes what it did not make")
        return self.stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        if not self.marks:
            raise _RefusedError("a pickle that takes what it did not make")
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def _memoize(self, index: int | None) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def _tuple(self, count: int | None) -> None:
        items = self._pop_to_mark() if count is None else [self._pop() for _ in range(count)][::-1]
        self.stack.append(tuple(items))

    def _append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise _RefusedError("items for what is no list")
        target.extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise _RefusedError("entries for what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int):  # a tuple of tuples may take for ever to hash
                raise _RefusedError("a key that is no string")
            target[key] = value

    def _global(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise _RefusedError("the global without a name")
        if (module, name) not in _GLOBALS:
            if not _imported_recipe(module, name):
                raise _RefusedError(f"the global {f'{module}.{name}'[:100]}")
            module, name = _RECIPES, "Recipe"
        self.stack.append(_Name(module, name))

    def _call(self, _: None) -> None:
        """REDUCE and NEWOBJ."""
        arguments, function = self._pop(), self._pop()
        if type(arguments) is not tuple or type(function) is not _Name:
            raise _RefusedError("a call of what is no global")
        if function in _MARKS or (function == _NAMED and arguments[:2] in _MARKS):
            made: Any = _Mark()
        elif function == _REBUILD:
            made = _rebuilt(arguments)
        elif function == _ORDERED_DICT and not arguments:
            made = {}
        elif function in _LOADS and len(arguments) == 1 and type(arguments[0]) is bytes:
            self.inside -= len(arguments[0])
            if self.inside < 0:
                raise _RefusedError("a file inside that is read again and again")
            made = _read_legacy(arguments[0])
        else:
            raise _RefusedError(f"a call of {function.module}.{function.name}")
        self.stack.append(made)

    def _build(self, _: None) -> None:
        self._pop()
        if type(self.stack[-1]) is not _Mark:
            raise _RefusedError("a state for what has none")

    def _persistent(self, _: None) -> None:
        found = self._pop()
        if self.storages is None or type(found) is not tuple or len(found) not in (5, 6):
            raise _RefusedError("a persistent id")
        kind, storage, key, _place, numel = found[:5]
        if kind != "storage" or type(storage) is not _Name or storage not in _STORAGES:
            raise _RefusedError("a persistent id of no storage")
        if found[5:] not in ((), (None,)):
            raise _RefusedError("a view of a storage")
        if type(key) is not str or type(numel) is not int or numel < 0:
            raise _RefusedError("a storage without a key")
        self.stack.append(self.storages.setdefault(key, _Storage(_STORAGES[storage], numel)))


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
     "SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
)  # fmt: skip
_INSTRUCTIONS: dict[str, Callable[[_Reader, Any], None]] = {
    "MARK": lambda reader, _: reader.marks.append(len(reader.stack)),
    "MEMOIZE": _Reader._memoize,
    "BINPUT": _Reader._memoize,
    "LONG_BINPUT": _Reader._memoize,
    "BINGET": lambda reader, index: reader.stack.append(reader.memo[index]),
    "LONG_BINGET": lambda reader, index: reader.stack.append(reader.memo[index]),
    "EMPTY_TUPLE": lambda reader, _: reader.stack.append(()),
    "EMPTY_LIST": lambda reader, _: reader.stack.append([]),
    "EMPTY_DICT": lambda reader, _: reader.stack.append({}),
    "TUPLE": lambda reader, _: reader._tuple(None),
    "TUPLE1": lambda reader, _: reader._tuple(1),
    "TUPLE2": lambda reader, _: reader._tuple(2),
    "TUPLE3": lambda reader, _: reader._tuple(3),
    "APPEND": lambda reader, _: reader._append([reader._pop()]),
    "APPENDS": lambda reader, _: reader._append(reader._pop_to_mark()),
    "SETITEM": lambda reader, _: reader._set([reader._pop(), reader._pop()][::-1]),
    "SETITEMS": lambda reader, _: reader._set(reader._pop_to_mark()),
    "GLOBAL": lambda reader, names: reader._global(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda reader, _: reader._global(*[reader._pop(), reader._pop()][::-1]),
    "REDUCE": _Reader._call,
    "NEWOBJ": _Reader._call,
    "BUILD": _Reader._build,
    "BINPERSID": _Reader._persistent,
}
