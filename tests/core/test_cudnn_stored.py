"""What cuDNN's frontend stores of a graph, read as plain data."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from te_core.backends.cuda import cudnn, cudnn_stored
from te_core.backends.cuda.cudnn_stored import WORKSPACE, Operand, stored
from te_core.errors import UnsupportedError
from tests.core import fake_cudnn
from tests.core.fake_cudnn import ubjson

KNOWN: dict[str, Any] = {
    "json_version": "2.0",
    "cudnn_backend_data": "{}",
    "variant_pack_uids": [9, 1, 7, 300, 40],
    "pass_by_values": {},
    "workspace_modifications": {},
    "variant_pack_replacements": [],
    "fe_workspace_size": 0,
}


@pytest.fixture(autouse=True)
def _frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_frontend", fake_cudnn.frontend(fake_cudnn.Calls()))


def graph(content: Any, uids: tuple[int, ...] = (1, 7, 9, 40, 300), workspace: int = 0, backward: bool = False) -> Any:
    """A finished graph whose frontend stores this, or fails so."""

    def serialize(as_bytes: bool) -> bytes:
        if isinstance(content, Exception):
            raise content
        return content if isinstance(content, bytes) else ubjson(content)

    operands = tuple("dq" if backward else f"t{uid}" for uid in uids)
    return SimpleNamespace(
        built=SimpleNamespace(serialize=serialize), uids=uids, operands=operands, workspace=workspace, count=len(uids)
    )


def test_tensors_come_by_number() -> None:
    found = stored(graph(KNOWN))
    assert found.operands == tuple(Operand(uid, i) for i, uid in enumerate((1, 7, 9, 40, 300)))
    assert (found.plan, found.copied, found.zeroed, found.behind, found.workspace) == (b"{}", (), (), 0, 0)


@pytest.mark.parametrize(
    ("kind", "value", "form", "number"),
    [
        (0, -3, "<q", -3),
        (1, -3, "<i", -3),
        (2, "3F000000", "<e", 0.5),  # of a narrow float, too, the bits of an f32
        (3, "FF800000", "<f", -float("inf")),
        (4, 0.1, "<d", 0.1),
    ],
)
def test_scalars_are_bits(kind: int, value: Any, form: str, number: float) -> None:
    known = {
        **KNOWN,
        "pass_by_values": {"40": {"index": kind, "value": value}, "41": {"index": 5, "value": "BFC00000"}},
    }
    *_, last, least, _ = stored(graph(known, (1, 7, 9, 300))).operands
    assert last == Operand(40, value=int.from_bytes(struct.pack(form, number), "little"))
    assert least == Operand(41, value=0xBFC0)


def test_what_the_frontend_does_in_the_workspace() -> None:
    """It copies numbers there, zeroes a part, leaves room; cuDNN's own part lies behind."""
    changes = {"40": [0, 256, ["3F800000", "00000005"]], "50": [1, 64, ["42000000"]], "51": [2, 0, []]}
    found = stored(graph({**KNOWN, "workspace_modifications": changes, "fe_workspace_size": 512}, (1, 7, 9, 300), 600))
    assert found.copied == ((256, struct.pack("<2I", 0x3F800000, 5)),) and found.zeroed == ((64, 32),)
    assert (found.behind, found.workspace) == (512, 88)
    assert [o for o in found.operands if o.source == WORKSPACE] == [
        Operand(40, WORKSPACE, 256),
        Operand(50, WORKSPACE, 64),
        Operand(51, WORKSPACE, 0),
    ]


def test_an_address_that_follows_from_another() -> None:
    found = stored(graph({**KNOWN, "variant_pack_replacements": [[7, [300, 1 << 33]]]}, (1, 7, 9, 40)))
    assert found.operands[-1] == Operand(300, 1, 1 << 33)


def test_ubjson_of_other_writers() -> None:
    """Typed and counted lists and maps, which another version of the library may write."""
    assert cudnn_stored._Reader(b"{$S#i\x01i\x01ai\x02xy").value() == {"a": "xy"}
    assert cudnn_stored._Reader(b"[$i#i\x03\x01\xff\x02").value() == [1, -1, 2]
    assert cudnn_stored._Reader(b"[#i\x02ZNT").value() == [None, True]
    assert cudnn_stored._Reader(b"[HU\x03123d\x3f\x00\x00\x00D\x3f\xe0\x00\x00\x00\x00\x00\x00Cx]").value() == [
        123,
        0.5,
        0.5,
        "x",
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        ubjson(KNOWN)[:-9],
        b"?",
        {**KNOWN, "json_version": "3.0"},
        {k: v for k, v in KNOWN.items() if k != "cudnn_backend_data"},
        {**KNOWN, "variant_pack_uids": [1, 7, 9, 40, 300, 301]},  # a tensor that nobody names
        {**KNOWN, "workspace_modifications": {"1": [3, 0, []]}},
        {**KNOWN, "fe_workspace_size": 8},  # more than all of it
        {**KNOWN, "pass_by_values": {"1": {"index": 6, "value": 1}}},
    ],
)
def test_another_format_is_refused_in_words(content: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"frontend 1\.32\.0, which stores plans in another way"):
        stored(graph(content))


@pytest.mark.parametrize("backward", [False, True])
def test_a_plan_that_is_not_stored_is_refused_by_its_pass(backward: bool) -> None:
    error = RuntimeError("OSS engine graphs are not serializable")
    which = "backward" if backward else "forward"
    with pytest.raises(UnsupportedError, match=rf"attention of a {which}: .*not serializable.*plans of both passes"):
        stored(graph(error, backward=backward))


def test_a_frontend_that_gives_and_takes_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.28, which CUDA 12 has, as its extension describes itself."""
    taken: list[Any] = []

    def serialize() -> list[int]:
        "serialize(self: cudnn._compiled_module.backend_graph) -> list[int]"
        return list(b"{}")

    made = SimpleNamespace(serialize=serialize, deserialize=lambda *given: taken.extend(given) or 1 / 0)
    monkeypatch.setattr(cudnn.frontend().native, "backend_graph", lambda **options: made)
    assert cudnn.serialized(made) == b"{}"
    with pytest.raises(ZeroDivisionError):
        cudnn._deserialized(cudnn.Target("H100", 132, 5), (), b"{}")
    assert taken == [5, [123, 125]]
