"""Broken and hostile `_extra_state` entries by the thousand: tensors or a ValueError, in little time and memory."""

from __future__ import annotations

import io
import pickle
import resource
import struct
import time
import tracemalloc
import zipfile
import zlib
from typing import Any

import pytest
import torch

from te_core.errors import ArgumentError
from te_torch.base.extra_state import KEYS, read_extra_state
from tests import broken_entries
from tests.torch.test_extra_state import OLD, Call, saved, storage_bytes, tensors
from tests.world import make

MIB = 1 << 20


def grown(before: int) -> int:
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.parametrize("count", [500, pytest.param(25_000, marks=pytest.mark.full)])
def test_mutations_of_honest_entries(count: int) -> None:
    """Of all forms. `python -m tests.broken_entries N SEED` tries others."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes, slowest = broken_entries.run(count)
    assert set(outcomes) <= set(broken_entries.EXPECTED), outcomes.most_common()
    # Otherwise hardly anything behind the first check was met.
    assert outcomes["read"] > count / 20 and outcomes["refused"] > count / 4, outcomes
    assert slowest < 2 and grown(before) < 128 * MIB


@pytest.mark.parametrize("count", [400, pytest.param(1500, marks=pytest.mark.full)])
def test_what_is_read_of_a_mutation_loads_or_is_refused(count: int) -> None:
    """Above the reader: shapes of another module, or values that are no scales."""
    module = make("Linear")
    plain = module.state_dict()
    met = dict.fromkeys(("loaded", "size mismatch", "refused"), 0)
    for _, data in broken_entries.broken(count, seed=1):
        try:
            module.load_state_dict({**plain, "_extra_state": data})
            met["loaded"] += 1
        except ArgumentError:
            met["refused"] += 1
        except RuntimeError as error:
            assert "size mismatch" in str(error)
            met["size mismatch"] += 1
        state = module.fp8_state
        for scale in () if state is None else (state.scale_fwd, state.scale_bwd):
            assert torch.isfinite(scale).all() and (scale > 0).all()
    assert met["loaded"] > count / 15 and met["refused"] > count / 15, met


# ----------------------------------------------------------------------------------------------------- attacks


def members(**options: Any) -> list[tuple[str, bytes]]:
    source = zipfile.ZipFile(saved({**tensors(), **options}))
    return [(info.filename, source.read(info)) for info in source.infolist()]


def inside_each_other(names: list[str], others: list[tuple[str, bytes]], size: int) -> bytes:
    """A zip file whose files of these names each hold all the headers behind their own, and `size` bytes."""
    tail = bytes(size)
    found = []
    for name in reversed(names):
        crc, length = zlib.crc32(tail), len(tail)
        header = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 33, crc, length, length, len(name), 0)
        tail = header + name.encode() + tail
        found.append((name, crc, length, len(tail)))
    front = io.BytesIO(broken_entries.zipped(others))
    with zipfile.ZipFile(front) as archive:
        start = archive.start_dir
        before = front.getvalue()[:start]
        records = [(i.filename, i.CRC, i.file_size, i.header_offset) for i in archive.infolist()]
    records += [(name, crc, length, start + len(tail) - back) for name, crc, length, back in found]
    directory = b"".join(
        struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 33, crc, size, size, len(name), 0, 0, 0, 0, 0, at)
        + name.encode()
        for name, crc, size, at in records
    )
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, len(records), len(records), len(directory), start + len(tail), 0)
    return before + tail + directory + end


def overlapping(used: bool) -> bytes:
    """Storages in each other: those of the four tensors, or many of tensors that nothing asks for."""
    count = 4 if used else 400
    names = [f"archive/data/{i}" for i in range(count)]
    probe = inside_each_other(names, [], MIB)  # sizes as they will be
    sizes = {i.filename: i.file_size for i in zipfile.ZipFile(io.BytesIO(probe)).infolist()}
    keys = KEYS if used else [f"other {i}" for i in range(count)]
    file = io.BytesIO()
    Pickler(file, 2).dump({key: Announced(str(i), sizes[names[i]], key) for i, key in enumerate(keys)})
    return inside_each_other(names, [("archive/data.pkl", file.getvalue())], MIB)


class Announced:
    """A float16 tensor over a storage of so many bytes."""

    def __init__(self, key: str, nbytes: int, name: str) -> None:
        self.key, self.numel, self.name = key, nbytes // 2, name

    def __reduce__(self) -> Any:
        size = (3,) if self.name == "scale_fwd" else (2,)
        if "history" in self.name:
            size = (1, 3) if "fwd" in self.name else (1, 2)
        return torch._utils._rebuild_tensor_v2, (Place(self), 0, size, (1,) * len(size), False, {})


class Place:
    """Pickles as a storage of the file."""

    def __init__(self, of: Announced) -> None:
        self.of = of


class Pickler(pickle.Pickler):
    def persistent_id(self, what: Any) -> Any:
        if isinstance(what, Place):
            return ("storage", torch.HalfStorage, what.of.key, "cpu", what.of.numel)
        return None


def again_and_again() -> bytes:
    """The bytes of a file, of many instructions, that as many others read from the memo."""
    start, _, rest = saved(torch.ones(3), **OLD).getvalue().partition(b"uu.")
    data = start + b"uu." + rest[:2] + b"]" * 8192 + rest[2:]
    inner = b"ctorch.storage\n_load_from_bytes\n\x94B" + struct.pack("<I", len(data)) + data + b"\x94\x85R"
    return b"\x80\x04](" + inner + b"h\x00h\x01\x85R" * 1000 + b"e."


def announced_and_unused() -> bytes:
    """A file that says it holds a storage of a million million elements, and ends there."""
    data = storage_bytes()
    at = data.index(b"K\x03Nt")
    huge = data[:at] + b"\x8a\x08" + (1 << 40).to_bytes(8, "little") + data[at + 2 :]
    return pickle.dumps({**tensors(), "other": Call(torch.storage._load_from_bytes, huge)})


ATTACKS = {
    "overlapping": lambda: overlapping(used=True),
    "overlapping and unused": lambda: overlapping(used=False),
    "again and again": again_and_again,
    "announced and unused": announced_and_unused,
    "a great many lists": lambda: b"\x80\x04" + b"]" * (MIB // 16) + b".",
    "a great many names": lambda: b"\x80\x04" + b"(" + b"ctorch\nFloatStorage\n" * (MIB // 80) + b"t.",
    "a great many tuples": lambda: b"\x80\x04)" + b"\x85" * (MIB // 16) + b".",
    "a long number": lambda: b"\x80\x04\x8b" + struct.pack("<i", MIB) + b"\x7f" * MIB + b".",
    "a number of many digits": lambda: b"\x80\x04I" + b"7" * MIB + b"\n.",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_on_time_and_memory(name: str) -> None:
    """Both stay in proportion to the entry, and what is refused is refused with our error."""
    data = ATTACKS[name]()
    tracemalloc.start()
    try:
        begin = time.process_time()
        result = broken_entries.outcome(data)
        seconds = time.process_time() - begin
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result in broken_entries.EXPECTED
    assert result == ("none" if name == "overlapping and unused" else "refused")
    assert peak < 4 * MIB + 160 * len(data) if "a great many" in name else peak < 4 * len(data) + MIB, (
        f"{peak / MIB} MiB"
    )
    assert seconds < 2 + 40 * len(data) / MIB


def test_only_the_memory_of_the_four_tensors_is_read() -> None:
    """What else an entry holds may be damaged or missing."""
    whole = members(scale_inv_fwd=torch.full((300,), 7.0))
    other = max(whole, key=lambda m: len(m[1]) * m[0].startswith("archive/data/"))
    for content in (None, b"", b"short"):
        kept = [m for m in whole if m is not other] + ([] if content is None else [(other[0], content)])
        read = read_extra_state(broken_entries.zipped(kept))
        assert read is not None and all(torch.equal(read[name], t) for name, t in tensors().items())


def test_tensors_may_lie_in_one_storage() -> None:
    """Views of one buffer, as a flattened checkpoint has them: its bytes count once."""
    flat = torch.arange(1.0, 21.0)
    state = {
        "scale_fwd": flat[:3],
        "amax_history_fwd": flat[3:12].view(3, 3),
        "scale_bwd": flat[12:14],
        "amax_history_bwd": flat[14:20].view(3, 2),
    }
    for written in (saved(state), saved(state, **OLD), pickle.dumps(state)):
        read = read_extra_state(written)
        assert read is not None and all(torch.equal(read[name], t) for name, t in state.items())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_scales_are_floating_point(dtype: torch.dtype) -> None:
    with pytest.raises(ArgumentError, match=f"scale_bwd of {dtype}"):
        read_extra_state(pickle.dumps({**tensors(), "scale_bwd": torch.ones(2, dtype=dtype)}))
