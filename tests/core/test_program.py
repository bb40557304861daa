"""Tapes as programs in files: what is written is read again, what no program can hold is refused."""

from __future__ import annotations

import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import te_core
from te_core import calls
from te_core.backends.cuda.cudnn import Attended, Graph
from te_core.backends.cuda.gemm_run import Multiplied
from te_core.errors import ArgumentError, UnsupportedError
from te_core.kernels.compiler import only_read
from te_core.ops import raw
from te_core.ops.quantize import ScalingState
from te_core.program import Example, main, read, recorded
from te_core.recipe import DelayedScaling
from te_core.runtime import Runtime
from te_core.tape import program_file as file
from te_core.tape import taped
from te_core.tape.program_file import lines_of, pack, sealed, unpack
from te_core.tape.recorder import record
from te_core.tape.tape import Tape
from tests.core.fake_cuda import Machine, Make
from tests.core.program_proof import program_of
from tests.core.tape_cases import BF16, FP32, MLP, STREAMS, Linear, Maker
from tests.core.tape_more_cases import Attention
from tests.core.tape_proof import Tapes, run
from tests.core.test_tape_beside import build, products, there_and_back


def tapes_of(machine: Machine, build: Any) -> list[Tape]:
    taped.forget()
    run(machine, machine.runtime(), Tapes(), build, "first")
    return taped.tapes()


def examples(machine: Machine, rows: int = 48) -> dict[str, Example]:
    """A linear with delayed scaling, forward and backward."""
    rt = machine.runtime()
    make = Maker(rt)
    call = calls.call("linear", {}, BF16, frozenset(("x", "weight", "bias")), DelayedScaling())
    scales = make.scales(1)
    given = make(rows, 64), make(96, 64), make(96), None
    options = {"scales": scales, "ready": (None,)}
    _, saved = call.forward(rt, *given, **options)
    dy = make(rows, 96)
    back = Example(rt, call, (dy, saved), {"scales": scales, "sinks": (None,)}, backward=True)
    return {"forward": Example(rt, call, given, options), "backward": back}


@pytest.mark.parametrize("recipe", [None, "delayed", "nvfp4"])
def test_what_is_written_is_read(make: Make, recipe: str | None) -> None:
    machine = make()
    for case in (Linear(recipe), MLP(recipe, checkpoint=True), MLP(recipe, activation="swiglu", rows=0)):
        for tape in tapes_of(machine, case):
            program = program_of(tape)
            assert unpack(pack(program)) == program
            (entry,) = program.entries
            kinds = [step.kind for step in entry.steps]
            assert kinds.count(file.PRODUCT) == sum(isinstance(step, Multiplied) for step in tape.steps)
            assert len(entry.slots) == len(tape.slots) and entry.inputs == tape.inputs
            kept = {i for i, s in enumerate(entry.slots) if s.role in (file.OUTPUT, file.SAVED)}
            assert kept == {i for i in tape.kept if i >= tape.inputs}
            assert all(s.place == file.NOWHERE or s.place + s.nbytes <= entry.block for s in entry.slots)


def test_a_file_has_named_entries_and_their_calls(make: Make, tmp_path: Path) -> None:
    machine = make()
    before = len(machine.log)
    known = examples(machine)
    ran = len(machine.log)
    te_core.record(known, tmp_path / "linear.te")
    assert ran > before and len(machine.log) == ran, "a recording launches nothing"
    program = read(tmp_path / "linear.te")
    forward, backward = program.entries
    assert (forward.name, backward.name) == ("forward", "backward")
    assert json.loads(forward.call)["layer"] == "linear" and json.loads(backward.call)["pass"] == "backward"
    assert program.facts["cublasLt"] == "130100" and program.facts["architecture"] == "9.0"
    names = {s.name: s for s in forward.slots}
    assert [s.name for s in forward.slots[:3]] == ["x", "weight", "bias"] and not names["x"].written
    assert names["scales.forward_amax"].role == file.STATE and names["scales.forward_amax"].written
    assert not names["scales.forward_scale"].written
    assert "output.0" in {p.name for p in forward.pieces} and any(p.name.startswith("saved.") for p in forward.pieces)
    assert [p.name for p in backward.pieces] == ["grad.x", "grad.weight", "grad.bias"]
    modules = [step.target for entry in program.entries for step in entry.steps if step.kind == file.LAUNCH]
    assert len(set(program.modules)) == len(program.modules) < len(modules), "a module stands in a file once"
    # What backward is given of forward has the names that forward says.
    saved = {s.name for s in backward.slots if s.name.startswith("saved.")}
    assert saved <= {p.name for p in forward.pieces}


def test_an_operation_is_an_entry(make: Make) -> None:
    """Such as the update of scales: which of a table's addresses are written no signature says, so all are."""
    machine = make()
    rt = machine.runtime()
    given = Maker(rt)
    states = [ScalingState(given(3, dtype=FP32), given(16, 3, dtype=FP32), given(3, dtype=FP32), 448.0) for _ in "ab"]
    program = recorded({"update": Example(rt, raw.update_scales, (states, "max"))})
    (entry,) = program.entries
    (step,) = entry.steps
    assert step.kind == file.TABLE and len(step.patches) == 6 == len(entry.slots) == entry.inputs
    assert all(slot.written for slot in entry.slots) and json.loads(entry.call) == {"function": "update_scales"}
    assert unpack(pack(program)) == program and "scale_update" in "\n".join(lines_of(program))


def test_a_host_of_less_alignment(make: Make) -> None:
    """Kernels are then those for such addresses."""
    known = examples(make())["forward"]
    (entry,) = recorded({"forward": known._replace(alignment=16)}).entries
    assert {s.alignment for s in entry.slots[: entry.inputs]} == {16} and entry.slots[-1].alignment == 256
    (entry,) = recorded({"forward": known}).entries
    assert {s.alignment for s in entry.slots[: entry.inputs]} == {256}
    with pytest.raises(ArgumentError, match="alignment=24"):
        recorded({"forward": known._replace(alignment=24)})


def test_files_are_printed_and_compared(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = make()
    te_core.record(examples(machine), tmp_path / "one.te")
    te_core.record(examples(machine), tmp_path / "same.te")
    te_core.record(examples(machine, rows=64), tmp_path / "other.te")
    one, same, other = (str(tmp_path / name) for name in ("one.te", "same.te", "other.te"))
    assert main([one]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == "\n".join(lines_of(read(one))) and "gemm 48 x 96 x 64" in printed
    assert main([one, same]) == 0 and "alike" in capsys.readouterr().out
    assert main([one, other]) == 1
    said = capsys.readouterr().out
    assert "-gemm 48 x 96 x 64" in said and "+gemm 64 x 96 x 64" in said
    assert main([str(tmp_path / "none.te")]) == 2 and "To do" in capsys.readouterr().err


def test_attention_says_what_it_writes(make: Make) -> None:
    """Its results and its workspace, and nothing that comes in."""
    machine = make()
    for tape in tapes_of(machine, Attention({"bias": "alibi", "default_slopes": True, "right": 0})):
        program = program_of(tape)
        assert unpack(pack(program)) == program and program.facts["cudnn"] == "91900"
        (entry,), (plan,) = program.entries, program.plans
        assert [s.written for s in entry.slots] == [i >= entry.inputs for i in range(len(entry.slots))]
        said = "\n".join(lines_of(program))
        assert f"cuDNN graph of {tape_graph(tape).count} tensors, plan" in said and "copy 12 bytes" in said
        assert len(plan.tensors) > tape_graph(tape).count, "scalars and the workspace's"


def tape_graph(tape: Tape) -> Graph:
    """That of the attention in it."""
    return next(step.graph for step in tape.steps if isinstance(step, Attended))


def test_broken_files_are_refused(make: Make, tmp_path: Path) -> None:
    whole = pack(recorded(examples(make())))
    damaged = whole[:900] + bytes((whole[900] ^ 1,)) + whole[901:]
    for content in (b"", whole[:40], whole[:-1], whole + b"\0", damaged, b"x" + whole[1:]):
        with pytest.raises(ArgumentError, match="program"):
            unpack(content)
    later = whole[:8] + struct.pack("<I", 3) + whole[12:]
    with pytest.raises(ArgumentError, match="version 3"):
        unpack(later)
    assert sealed(damaged) != damaged and sealed(whole) == whole


def test_a_file_that_others_may_write_is_refused(make: Make, tmp_path: Path) -> None:
    te_core.record(examples(make()), tmp_path / "one.te")
    (tmp_path / "one.te").chmod(0o666)
    with pytest.warns(UserWarning, match="others may write"), pytest.raises(ArgumentError, match="a program is code"):
        read(tmp_path / "one.te")
    with pytest.raises(ArgumentError, match="cannot be written"):
        te_core.record(examples(make()), tmp_path / "one.te" / "below")


def test_what_no_program_holds_is_refused(make: Make) -> None:
    machine = make()
    known = examples(machine)["forward"]
    cpu = Runtime.cpu()
    with pytest.raises(UnsupportedError, match="calls on cpu"):
        recorded({"forward": known._replace(rt=cpu)})
    x = cpu.zeros((8, 8), FP32)
    tape = record(cpu, "add", partial(there_and_back, spec=None), ((x, x), {}), 64)
    with pytest.raises(UnsupportedError, match="a call of the CPU backend"):
        program_of(tape)
    with pytest.raises(UnsupportedError, match="no calls"):
        recorded({})
    aside = known._replace(arguments=(*known.arguments[:3], object()))
    with pytest.raises(UnsupportedError, match="te_core.record forward"):
        recorded({"forward": aside})


def test_an_address_of_nobodys_is_refused(make: Make) -> None:
    """Memory that no call brings would be an address of this process in a file."""
    (tape, *_) = tapes_of(make(), Linear("delayed"))
    step = next(step for step in tape.steps if hasattr(step, "kernel"))
    step.args = [
        0x7F1000000000 if letter == "p" else a for a, letter in zip(step.args, step.kernel.letters, strict=True)
    ]
    with pytest.raises(UnsupportedError, match="which no call brings"):
        program_of(tape)


def test_memory_of_several_streams_shares_nothing(make: Make) -> None:
    """No step of a block's says when another stream is done."""
    machine = make()
    call = build(products, machine.runtime()).forward
    tape = record(machine.runtime(), call.name, partial(products, spec=None), (call.args, {}), 256)
    program = program_of(tape)
    (entry,) = program.entries
    used = {p.slot for step in entry.steps if step.way or step.kind == file.NOTICE for p in step.patches}
    used |= {i for i, s in enumerate(entry.slots) if s.way}
    placed = [(i, s.place, s.place + s.nbytes) for i, s in enumerate(entry.slots) if s.place != file.NOWHERE]
    assert len(program.ways) == 2 and any(i in used for i, *_ in placed)
    for i, begin, end in placed:
        for k, first, last in placed:
            assert i == k or i not in used or end <= first or last <= begin, (i, k)


def test_strides_stand_in_a_program(make: Make) -> None:
    machine = make()
    base = Linear(None, bias=False)
    program = program_of(tapes_of(machine, base)[0])
    slots = [replace_strides(s) for s in program.entries[0].slots]
    program.entries[0].slots = slots
    assert unpack(pack(program)).entries[0].slots == slots


def replace_strides(slot: file.Slot) -> file.Slot:
    return slot._replace(strides=tuple(range(len(slot.shape), 0, -1))) if slot.shape else slot


def test_signatures_say_what_is_read() -> None:
    assert only_read("gemm_alpha", "gemm_alpha", {}, "pppff")[:3] == (True, True, False)
    without = only_read("norm_forward", "norm_forward", {"RESIDUAL": 0}, "p" * 11 + "qiff")
    assert without[:4] == (True, True, True, False) and not any(without[4:8])
    with_residual = only_read("norm_forward", "norm_forward", {"RESIDUAL": 1}, "p" * 11 + "qiff" + "ppppiif")
    assert len(with_residual) == 22 and with_residual[15:19] == (True, True, False, True)
    for letters in ("ppff", "ppfpf"):
        assert not any(only_read("gemm_alpha", "gemm_alpha", {}, letters)), "one that is not understood may write all"


def test_all_signatures_are_understood(make: Make) -> None:
    machine = make()
    for recipe in (None, "delayed", "current", "block", "mxfp8", "nvfp4"):
        for case in (Linear(recipe), MLP(recipe), Linear(recipe, normed="RMSNorm", stream=STREAMS["dropped branch"])):
            run(machine, machine.runtime(), Tapes(), case, "never")
    kernels = {(k.name, str(k.made_of[1])): k for k in machine.kernels() if k.letters != "b"}
    assert len(kernels) > 20
    for kernel in kernels.values():
        name, constants, _ = kernel.made_of
        assert any(only_read(name, kernel.name, constants, kernel.letters)), (name, constants)
