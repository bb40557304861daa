"""What is said of tapes: how many calls were replayed, why others were not, what a tape does, why a replay failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from te_core.backends.cuda.cublaslt import CublasLtError
from te_core.errors import LibraryError
from te_core.runtime import Runtime
from te_core.tape import taped
from te_core.tools import doctor
from te_core.tools.explain import explain_tapes
from tests.core import fake_cudnn
from tests.core.fake_cuda import Machine, Make
from tests.core.tape_cases import Linear
from tests.core.tape_more_cases import Attention
from tests.core.tape_proof import Call, Round, Tapes, made

NONE = "no call was counted yet"
FIRST = "1 not (met for the first time)"
Build = Callable[[Runtime], Round]


def called(rt: Runtime, tapes: Tapes, call: Call, setting: str) -> None:
    """Make a call, counted with those before."""
    taped.set_when(setting)
    tapes.of(call)(rt, *call.args, **call.options)


def counted() -> str:
    """What the doctor and the report of tapes say of this process's calls: the same."""
    (line,) = [line for line, _ in zip(doctor.report([]), range(3), strict=False) if line.startswith("replays: ")]
    said = explain_tapes().split("\n")[0]
    assert line.endswith(f"; in this process {said}") and explain_tapes(whole=True).split("\n")[0] == said
    return said


def test_how_many_calls_were_replayed(make: Make) -> None:
    """Those that are interpreted by the setting are none of them."""
    rt, tapes = make().runtime(), Tapes()
    call = Linear()(rt).forward
    said = [counted()]
    for setting in ("never", "second", "second", "second", "never"):
        called(rt, tapes, call, setting)
        said.append(counted())
    two, three = (
        f"{n - 1} of {n} calls of layers replayed ({share}), {FIRST}" for n, share in ((2, "50%"), (3, "67%"))
    )
    assert said == [NONE, NONE, f"0 of 1 calls of layers replayed (0%), {FIRST}", two, three, three]


def test_why_calls_were_not_replayed(make: Make) -> None:
    """The commonest reason comes first."""
    rt, tapes = make().runtime(), Tapes()
    for rows in (16, 32):
        called(rt, tapes, Linear(rows=rows)(rt).forward, "second")
    foreign = Linear()(rt).forward
    foreign.options["stranger"] = object()
    with pytest.raises(TypeError, match="stranger"):  # a call that is refused is not counted
        called(rt, tapes, foreign, "second")
    again = "2 not (met for the first time)"
    assert counted() == f"0 of 2 calls of layers replayed (0%), {again}"
    taped.COUNTS.interpreted.update({f"reason {n}": 1 for n in range(9)})
    assert counted().startswith(f"0 of 11 calls of layers replayed (0%), {again}, 1 not (reason ")
    assert counted().count(" not (") == 8


def test_which_tapes_there_are(make: Make) -> None:
    """A line for each, the youngest last; as a whole, all that each of them does."""
    machine, tapes = make(), Tapes()
    rt = machine.runtime()
    assert explain_tapes().split("\n") == [NONE, "0 tapes"]
    events = []
    for build in (Linear("current"), Attention(packing="qkv")):
        call = build(rt).forward
        made(machine, rt, tapes.of(call), call, "first")  # sets scratch memory up
        events.append(made(machine, rt, tapes.of(call), call, "first").events)
    brief, whole = explain_tapes().split("\n")[1:], explain_tapes(whole=True)
    assert brief[0] == "2 tapes" and whole.split("\n")[1] == "2 tapes"
    for line, name, tape in zip(brief[1:], ("linear.forward", "attention.forward"), taped.tapes(), strict=True):
        assert line == f"Tape({name}: {tape.inputs} inputs, {len(tape.steps)} steps, {tape.peak} bytes)"
    linear, attention = (text.split("\n") for text in whole.split("\n", 2)[2].split("\nattention.forward\n"))
    assert "  t0 input x: bfloat16[2, 24, 64]" in linear and any(" scratch amax: " in line for line in linear)
    (product,) = [line for line in linear if line.startswith("  gemm ")]
    assert product.startswith("  gemm 48 x 96 x 64 float8_e4m3 x float8_e4m3 -> bfloat16 (t")
    assert sum(line.startswith("  cuDNN graph of ") for line in attention) == 1
    for lines, ran, tape in zip((linear, attention), events, taped.tapes(), strict=True):
        slots = sum(slot.kind in ("input", "scratch") for slot in tape.slots)
        held = sum(line.startswith(("  take t", "  drop t")) for line in lines)
        begins = int(lines[0] == "linear.forward")
        assert len(lines) == begins + slots + held + len(ran)


# -------------------------------------------------------------------------------------------------- errors


FP8 = Attention(packing="qkv", fp8=True, heads=4, groups=4, d=128)
#: What runs, and the event that fails; the last one by a frontend that takes no list of addresses.
FAILING: dict[str, tuple[Build, str]] = {
    "fp8 product": (Linear("current"), "gemm"),
    "product": (Linear(), "gemm"),
    "fp8 graph": (FP8, "cudnn"),
    "graph": (Attention(packing="qkv"), "cudnn"),
    "graph by name": (Attention(packing="qkv"), "cudnn"),
}
WORDS = {
    "gemm": "cuBLASLt status 15 (cublasLtMatmul returned status 15) from gemm 48 x 96 x 64",
    "cudnn": "cuDNN: EXECUTION_FAILED",
}


@contextmanager
def failing(machine: Machine, kind: str, error: Exception) -> Iterator[None]:
    """Events of this kind fail."""
    noted = machine.note

    def note(event: str, *rest: Any) -> None:
        if event == kind:
            raise error
        noted(event, *rest)

    machine.note = note  # type: ignore[method-assign]
    try:
        yield
    finally:
        machine.note = noted  # type: ignore[method-assign]


@pytest.mark.parametrize("name", FAILING)
def test_the_error_of_a_replayed_step(make: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In the words in which the interpreted call says it; and the next replay goes well."""
    if name == "graph by name":
        monkeypatch.delattr(fake_cudnn.Built, "_execute_with_raw_ptrs")
    build, kind = FAILING[name]
    error = CublasLtError("cublasLtMatmul", 15) if kind == "gemm" else RuntimeError("EXECUTION_FAILED")
    machine, tapes, said = make(), Tapes(), []
    rt = machine.runtime()
    call = build(rt).forward
    for setting in ("never", "first"):
        made(machine, rt, tapes.of(call), call, setting)
        with failing(machine, kind, error), pytest.raises(LibraryError) as raised:
            called(rt, tapes, call, setting)
        assert raised.value.__cause__ is error
        said.append(str(raised.value))
    assert said[0] == said[1] and WORDS[kind] in said[0]
    assert made(machine, rt, tapes.of(call), call, "first").count == taped.Counts(1) and not machine.faults


@pytest.mark.parametrize(
    ("build", "kind"), [(Linear("current"), "gemm"), (FP8, "cudnn"), (Linear("current"), "launch")]
)
def test_an_error_that_is_no_librarys(make: Make, build: Build, kind: str) -> None:
    """It stays as it is."""
    machine, tapes, error = make(), Tapes(), KeyError("anything")
    rt = machine.runtime()
    call = build(rt).forward
    made(machine, rt, tapes.of(call), call, "first")
    with failing(machine, kind, error), pytest.raises(KeyError) as raised:
        called(rt, tapes, call, "first")
    assert raised.value is error
