"""Broken and hostile copies of `_extra_state` entries, drawn from a seed: bytes, pickle instructions, zip records.

    python -m tests.broken_entries 300000 [seed]     # what the reader makes of so many, by hand; a thousand a second

A mutation below a container is wrapped up again with right lengths and checksums, or nothing behind those would be met.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import resource
import struct
import sys
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.golden import load

_NUMBERS = (
    0,
    1,
    2,
    127,
    128,
    255,
    256,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 40,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
_LONGEST = 1 << 18  # of what is copied many times: more is a test of this machine
_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_SNIPPETS = (
    b"(", b")", b"]", b"}", b"0", b"1", b"2", b".", b"N", b"\x88", b"\x89", b"a", b"e", b"s", b"u", b"t", b"l", b"d",
    b"\x85", b"\x86", b"\x87", b"\x94", b"b", b"R", b"Q", b"\x81", b"\x92", b"\x93", b"o", b"\x8f", b"\x90", b"\x91",
    b"h\x00", b"h\x05", b"j\xff\xff\xff\xff", b"q\x01", b"r\xff\xff\xff\x7f", b"K\x00", b"K\xff", b"J\xff\xff\xff\xff",
    b"M\xff\xff", b"\x8a\x00", b"\x8a\x01\x80", b"\x8a\x09" + b"\xff" * 8 + b"\x7f", b"\x8a\xff" + b"\x7f" * 255,
    b"\x8b\xff\xff\xff\x7f", b"G" + b"\x7f" * 8, b"X\xff\xff\xff\xff", b"C\x04abcd", b"B\xff\xff\xff\xff",
    b"\x8e" + b"\xff" * 8, b"\x8d" + b"\xff" * 8, b"\x96" + b"\xff" * 8, b"\x8c\x01a", b"I01\n", b"I9\n", b"L9L\n",
    b"S'a'\n", b"Vab\n", b"Px\n", b"F1\n", b"g9\n", b"p9\n", b"ios\nsystem\n", b"cos\nsystem\n", b"c\n\n",
    b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch.storage\n_load_from_bytes\n",
    b"ccollections\nOrderedDict\n", b"ctransformer_engine.common.recipe\nDelayedScaling\n", b"\x80\x02", b"\x80\xff",
    b"\x95\x00\x00\x00\x00\x00\x00\x00\x00", b"\x95" + b"\xff" * 8, b"\x97", b"\x98", b"\x82\x01", b"\xff",
)  # fmt: skip


def seeds() -> dict[str, bytes]:
    """Honest entries of every form; the first ones were written by the peer."""
    golden = {key: t.numpy().tobytes() for key, t in load("extra_state").items() if t.numel()}
    state: dict[str, Any] = {
        "scale_fwd": torch.ones(3),
        "amax_history_fwd": torch.ones(2, 3),
        "scale_bwd": torch.ones(2),
        "amax_history_bwd": torch.ones(2, 2).t().contiguous().t(),
        "scale_inv_fwd": torch.ones(3),
        "extra_fp8_variables": {"num_gemms": 1, "fp8_max_fwd": 448.0, "update_amax": (1, [2, "x"], None), "b": 1 << 40},
    }
    found = dict(list(golden.items())[:: max(1, len(golden) // 4)])
    for protocol in (3, 4, 5):
        file = io.BytesIO()
        _Pickler(file, protocol).dump(state)
        found[f"pickle {protocol}"] = file.getvalue()
    file = io.BytesIO()
    torch.save(state, file)
    return {**found, "zip": file.getvalue(), "legacy": _legacy_file(state)}


class _Pickler(pickle.Pickler):
    """Names storages by numbers; torch.save names them by addresses in its older form, which every tensor contains."""

    kept: list[Any] | None = None  # where storages are kept apart

    def persistent_id(self, what: Any) -> Any:
        if self.kept is None or not isinstance(what, torch.storage.TypedStorage):
            return None
        self.kept.append(what)
        return "storage", getattr(torch, what.pickle_storage_type()), str(len(self.kept) - 1), "cpu", what._size(), None

    def reducer_override(self, what: Any) -> Any:
        if isinstance(what, torch.storage.TypedStorage):
            return torch.storage._load_from_bytes, (_legacy_file(what),)
        return NotImplemented


def _legacy_file(what: Any) -> bytes:
    file = io.BytesIO()
    for part in (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}):
        pickle.dump(part, file, 2)
    pickler = _Pickler(file, 2)
    pickler.kept = []
    pickler.dump(what)
    pickle.dump([str(i) for i in range(len(pickler.kept))], file, 2)
    for storage in pickler.kept:
        file.write(struct.pack("<q", storage._size()) + bytes(storage._untyped_storage.tolist()))
    return file.getvalue()


# ------------------------------------------------------------------------------------------------------ bytes


def _bytes(r: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    at = r.randrange(len(out) + 1)
    match r.randrange(8):
        case 0 if out:
            out[at % len(out)] ^= 1 << r.randrange(8)
        case 1 if out:
            out[at % len(out)] = r.randrange(256)
        case 2:
            del out[at : at + r.choice((1, 2, 4, 8, 64))]
        case 3:
            out[at:at] = r.randbytes(r.choice((1, 2, 4, 8)))
        case 4:
            out = out[:at]
        case 5:
            size = r.choice((1, 2, 4, 8))
            number = r.choice((*_NUMBERS, len(out), len(out) + 1, r.getrandbits(64))) % (1 << 8 * size)
            out[at : at + size] = number.to_bytes(size, r.choice(("little", "little", "big")))
        case 6:
            begin, size = r.randrange(len(out) + 1), r.randrange(1, 200)
            out[at:at] = out[begin : begin + size] * r.choice((1, 1, 2, 50))
        case _:
            begin, size = r.randrange(len(out) + 1), r.randrange(1, 64)
            out[at : at + size] = out[begin : begin + size]
    return bytes(out)


# ----------------------------------------------------------------------------------------------------- pickles


def _instructions(data: bytes) -> list[bytes]:
    """The instructions of the pickle at the start of `data`, and what is behind it as a last piece."""
    starts = []
    try:
        for _, _, at in pickletools.genops(data):
            starts.append(at)
    except Exception:  # what came before the fault is enough
        pass
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)] or [data]


def _pickle(r: random.Random, data: bytes) -> bytes:
    parts = _instructions(data)
    at = r.randrange(len(parts))
    match r.randrange(9):
        case 0:
            del parts[at]
        case 1:
            parts.insert(at, parts[r.randrange(len(parts))])
        case 2:
            other = r.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        case 3:
            parts[at] = r.choice(_SNIPPETS)
        case 4:
            parts.insert(at, r.choice(_SNIPPETS))
        case 5:
            copied = parts[max(0, at - r.randrange(1, 12)) : at]
            parts[at:at] = copied * min(r.choice((1, 2, 100, 2000)), _LONGEST // max(1, sum(map(len, copied))))
        case 6:  # a number becomes another one
            found = [i for i, p in enumerate(parts) if p[:1] in b"KMJ"] or [at]
            number = r.choice(_NUMBERS) * r.choice((1, 1, -1))
            parts[r.choice(found)] = b"\x8a" + bytes([10]) + number.to_bytes(10, "little", signed=True)
        case 7:  # a text becomes another one of the entry
            found = [i for i, p in enumerate(parts) if p[:1] in b"X\x8cc"] or [at]
            parts[r.choice(found)] = parts[r.choice(found)]
        case _:  # what is held as bytes is a file of its own
            found = [i for i, p in enumerate(parts) if p[:1] in b"BC" and _MAGIC in p] or None
            if found is None:
                return _bytes(r, data)
            i = r.choice(found)
            inner = _legacy(r, parts[i][parts[i].index(_MAGIC) :])
            parts[i] = b"B" + struct.pack("<I", len(inner)) + inner
    return b"".join(parts)


def _legacy(r: random.Random, data: bytes) -> bytes:
    """One of the pickles in the file, or the storages at its end."""
    pieces, rest = [], data
    for _ in range(5):
        size = sum(map(len, _instructions(rest)[:-1])) + 1
        pieces.append(rest[:size])
        rest = rest[size:]
    pieces.append(rest)
    at = r.randrange(len(pieces))
    pieces[at] = (_pickle if at < 5 and r.random() < 0.8 else _bytes)(r, pieces[at])
    return b"".join(pieces)


# -------------------------------------------------------------------------------------------------------- zips


def _zip(r: random.Random, data: bytes) -> bytes:
    source = zipfile.ZipFile(io.BytesIO(data))
    members = [(info.filename, source.read(info)) for info in source.infolist()]
    at = r.randrange(len(members))
    match r.randrange(5):
        case 0 | 1:
            at = next(i for i, (name, _) in enumerate(members) if name.endswith("data.pkl"))
            members[at] = members[at][0], _pickle(r, members[at][1])
        case 2:
            members[at] = members[at][0], _bytes(r, members[at][1])
        case 3:
            members[at] = members[r.randrange(len(members))][0], members[at][1]
        case _:
            return _directory(r, data)
    return zipped(members, r.choice((0, 0, 0, zipfile.ZIP_DEFLATED)))


def zipped(members: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip file of these, names twice included."""
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", compression) as archive:
        warnings.simplefilter("ignore")
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return out.getvalue()


def _directory(r: random.Random, data: bytes) -> bytes:
    """A field of a record: of the directory, of its end, or in front of a file."""
    out = bytearray(data)
    mark, fields = r.choice(
        (
            (
                b"PK\x01\x02",
                ((4, 2), (6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (42, 4)),
            ),
            (b"PK\x03\x04", ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2))),
            (b"PK\x05\x06", ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2))),
            (b"PK\x06\x06", ((4, 8), (12, 2), (16, 4), (24, 8), (32, 8), (40, 8), (48, 8))),
            (b"PK\x06\x07", ((4, 4), (8, 8), (16, 4))),
        )
    )
    starts = [i for i in range(len(out)) if out.startswith(mark, i)]
    if not starts:
        return _bytes(r, data)
    for _ in range(r.randrange(1, 4)):
        offset, size = r.choice(fields)
        start = r.choice(starts) + offset
        other = int.from_bytes(out[r.choice(starts) + offset :][:size], "little")
        number = r.choice((other, other, *_NUMBERS, len(out), r.getrandbits(8 * size))) % (1 << 8 * size)
        out[start : start + size] = number.to_bytes(size, "little")
    return bytes(out)


# ----------------------------------------------------------------------------------------------------- running


def broken(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """(form, broken copy) of so many; the i-th of a seed is always the same."""
    forms = seeds()
    names = list(forms)
    for i in range(count):
        r = random.Random(f"{seed}:{i}")
        name = names[i % len(names)]
        data = forms[name]
        for _ in range(r.choice((1, 1, 1, 2, 4))):
            by_form: Callable[[random.Random, bytes], bytes] = {"zip": _zip, "legacy": _legacy}.get(name, _pickle)
            try:
                data = (by_form if r.random() < 0.75 else _bytes)(r, data) or b"\0"
            except Exception:  # the last mutation left no zip or pickle to take apart
                data = _bytes(r, data) or b"\0"
        yield name, data


#: What the parts that the reader is made of say of malformed input. Another cause is a fault of the reader's own.
CAUSES = (
    "ValueError",
    "IndexError",
    "KeyError",
    "EOFError",
    "OverflowError",
    "BadZipFile",
    "NotImplementedError",
    "RuntimeError",
    "UnicodeDecodeError",
    "error",
)


def outcome(data: bytes) -> str:
    """What the reader did: "read", "none", "refused", or what it must not come to."""
    from te_torch.base.extra_state import KEYS, read_extra_state

    try:
        found = read_extra_state(data)
    except ValueError as error:
        cause = type(error.__cause__).__name__
        return "refused" if error.__cause__ is None or cause in CAUSES else f"refused for a {cause}: {error.__cause__}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if found is None:
        return "none"
    assert tuple(found) == KEYS and all(type(t) is torch.Tensor and t.dtype == torch.float32 for t in found.values())
    return "read"


def run(count: int, seed: int = 0, say: Callable[[str], None] = lambda line: None) -> tuple[Counter[str], float]:
    """Outcomes, and the seconds that the slowest took. An outcome of its own says which mutation was the first."""
    found: Counter[str] = Counter()
    slowest, began = 0.0, time.perf_counter()
    for i, (name, data) in enumerate(broken(count, seed)):
        begin = time.process_time()
        result = outcome(data)
        slowest = max(slowest, time.process_time() - begin)
        found[result if result in EXPECTED else f"{seed}:{i} ({name}): {result}"[:200]] += 1
        if i % 10000 == 0:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            say(f"{i} in {time.perf_counter() - began:.0f} s, at most {memory} MiB, slowest {slowest:.3f} s")
    return found, slowest


EXPECTED = ("read", "none", "refused")

if __name__ == "__main__":
    outcomes, _ = run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, print)
    print(*outcomes.most_common(), sep="\n")
