"""What cuDNN's frontend stores of a finished graph, as plain data: cuDNN's own plan, and what the frontend adds to it.

The frontend stores a map in UBJSON. Beside the plan it names the tensors of a run by number, scalars that the host
passes by value, tensors that lie in the workspace, which it fills or copies before each run, and addresses that follow
from others. Here all of that becomes a plan, addresses by number, and what is put into the workspace beforehand.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from te_core.backends.cuda.cudnn import Graph, frontend, serialized
from te_core.errors import UnsupportedError

#: The workspace's number among addresses.
WORKSPACE = -1
#: Of the format that is read here.
_FORMAT = "2.0"
_COPIED, _ZEROED, _LIES = range(3)
_BFLOAT16 = 5


class Operand(NamedTuple):
    """A tensor of a run: an address (of which operand, and how far behind it), or a scalar's bits."""

    uid: int
    source: int = WORKSPACE  # a place in `Graph.operands`, or the workspace
    offset: int = 0
    value: int | None = None


class Stored(NamedTuple):
    """A graph that runs without the frontend."""

    plan: bytes  # cuDNN's, in JSON
    operands: tuple[Operand, ...]
    copied: tuple[tuple[int, bytes], ...]  # into the workspace before each run: (offset, content)
    zeroed: tuple[tuple[int, int], ...]  # (offset, bytes)
    behind: int  # where cuDNN's part of the workspace begins
    workspace: int  # its bytes


def stored(graph: Graph) -> Stored:
    """The graph as data; `UnsupportedError` where the frontend stores none, or none of this format."""
    try:
        content = serialized(graph.built)
    except (RuntimeError, frontend().module.cudnnGraphNotSupportedError) as error:
        raise _refused(graph, f"no plan that cuDNN's frontend stores ({str(error).strip()[:200]})") from error
    try:
        return _read(graph, _Reader(content).value())
    except (KeyError, IndexError, TypeError, ValueError, struct.error) as error:
        came = f"frontend {frontend().frontend}, which stores plans in another way ({type(error).__name__}: {error})"
        raise _refused(graph, came) from error


def _refused(graph: Graph, came: str) -> UnsupportedError:
    which = "backward" if "dq" in graph.operands else "forward"
    allowed = "a plan of cuDNN's own engines, as its frontend 1.28 to 1.32 stores it"
    do = "play this call by te_core, or install such a frontend; a program needs the plans of both passes"
    return UnsupportedError(f"store the attention of a {which}", came, allowed, do)


def _read(graph: Graph, known: Mapping[str, Any]) -> Stored:
    if known["json_version"] != _FORMAT or "cudnn_backend_data" not in known:
        raise ValueError(f"json_version {known['json_version']!r}, {sorted(known)}")
    given = {uid: i for i, uid in enumerate(graph.uids)}
    changes = {int(uid): change for uid, change in known["workspace_modifications"].items()}
    scalars = {int(uid): _bits(one["index"], one["value"]) for uid, one in known["pass_by_values"].items()}
    moved = {to: (source, offset) for source, (to, offset) in known["variant_pack_replacements"]}
    uids = {*known["variant_pack_uids"], *scalars, *changes}
    operands = []
    for uid in sorted(uids):
        if uid in scalars:
            operands.append(Operand(uid, value=scalars[uid]))
        elif uid in changes:
            operands.append(Operand(uid, WORKSPACE, changes[uid][1]))
        else:
            source, offset = moved.get(uid, (uid, 0))
            operands.append(Operand(uid, given[source], offset))
    behind = known["fe_workspace_size"]
    copied = [(at, b"".join(map(_float, numbers))) for kind, at, numbers in changes.values() if kind == _COPIED]
    zeroed = [
        (at, int(struct.unpack("<f", _float(*numbers))[0])) for kind, at, numbers in changes.values() if kind == _ZEROED
    ]
    if any(kind not in (_COPIED, _ZEROED, _LIES) for kind, _, _ in changes.values()) or graph.workspace < behind:
        raise ValueError(f"workspace_modifications {changes}, fe_workspace_size {behind}")
    plan = known["cudnn_backend_data"].encode()
    return Stored(plan, tuple(operands), tuple(sorted(copied)), tuple(sorted(zeroed)), behind, graph.workspace - behind)


def _float(text: str) -> bytes:
    """A float's bytes; it is stored as the hexadecimal number of its bits."""
    return int(text, 16).to_bytes(4, "little")


def _bits(kind: int, value: Any) -> int:
    """A scalar as it lies in memory, by the number of its kind: i64, i32, f16, f32, f64, bf16."""
    number = struct.unpack("<f", _float(value))[0] if isinstance(value, str) else value
    if kind == _BFLOAT16:
        return int.from_bytes(struct.pack("<f", number), "little") >> 16
    return int.from_bytes(struct.pack("<" + "qiefd"[kind], number), "little")


_NUMBERS = {b"i": ">b", b"U": ">B", b"I": ">h", b"l": ">i", b"L": ">q", b"d": ">f", b"D": ">d"}
_NAMES = {b"Z": None, b"T": True, b"F": False}


class _Reader:
    """A value in UBJSON."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def _take(self, count: int) -> bytes:
        self.at += count
        if count < 0 or self.at > len(self.content):
            raise ValueError(f"{len(self.content)} bytes, cut short")
        return self.content[self.at - count : self.at]

    def value(self, mark: bytes = b"") -> Any:
        """What stands next; `mark`: its type, where that stood before."""
        mark = mark or self._mark()
        if mark in _NAMES:
            return _NAMES[mark]
        if mark in _NUMBERS:
            form = _NUMBERS[mark]
            return struct.unpack(form, self._take(struct.calcsize(form)))[0]
        if mark in (b"S", b"H"):
            text = self._take(self.value()).decode()
            return text if mark == b"S" else int(text)
        if mark == b"C":
            return self._take(1).decode()
        if mark == b"[":
            return [self.value(kind) for kind in self._parts(b"]")]
        if mark == b"{":
            return {self._take(self.value()).decode(): self.value(kind) for kind in self._parts(b"}")}
        raise ValueError(f"a value of type {mark!r} at byte {self.at}")

    def _mark(self) -> bytes:
        while (mark := self._take(1)) == b"N":  # nothing
            pass
        return mark

    def _parts(self, end: bytes) -> Any:
        """For each part, its type if all have one."""
        kind = b""
        if self.content[self.at : self.at + 1] == b"$":
            kind = self._take(2)[1:]
        if self.content[self.at : self.at + 1] == b"#":
            self._take(1)
            for _ in range(self.value()):
                yield kind
            return
        while self.content[self.at : self.at + 1] != end:
            yield kind
        self._take(1)
