"""XLA's calls in C (bindings/c/src/xla.c), on frames made here and stubs of CUDA's libraries: they launch what Python's
handler launches."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from ctypes import c_int64, c_void_p, pointer, sizeof
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import te_jax as te  # noqa: E402
from te_jax import c_handler, handler, record, rules  # noqa: E402

from te_core import c_library, dtypes, libraries  # noqa: E402
from te_core.errors import ArgumentError, LibraryError, UnsupportedError  # noqa: E402
from te_core.kernels.loader import TableLaunch  # noqa: E402
from te_core.ops import raw  # noqa: E402
from te_core.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe  # noqa: E402
from te_core.runtime import Runtime  # noqa: E402
from te_core.tape import program_file as file  # noqa: E402
from te_core.tape.program import add_entry  # noqa: E402
from te_core.tape.program_file import Program  # noqa: E402
from te_core.tensor import Tensor, cuda_device  # noqa: E402
from tests.backends import HARDWARE  # noqa: E402
from tests.core.c_library import FOLDER, built, stub  # noqa: E402
from tests.core.fake_cuda import Make  # noqa: E402
from tests.core.program_proof import Doors, compare, digest_of  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason=f"{HARDWARE}no C compiler")

DELAYED = DelayedScaling(amax_history_len=3)
GPU, STREAM, INITIALIZE = cuda_device(0), 5, 2


@pytest.fixture
def doors(make: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doors]:
    """Both handlers on what is not there. Work of other tests is not known."""
    machine = make()
    monkeypatch.setenv("TE_CORE_LIBRARY", str(built() / "libte_core.so"))
    monkeypatch.setenv("TE_LIBCUDA", str(built() / "libstub.so"))
    monkeypatch.setattr(libraries, "file", lambda name: str(built() / "libstub.so"))
    for place, name, value in ((record, "_runtimes", {}), (record, "_works", {}), (record, "_notes", {}),
                               (c_handler, "_registered", [])):  # fmt: skip
        monkeypatch.setattr(place, name, value)
    jax.clear_caches()
    stub().stub_device(1, *machine.info.capability)
    yield Doors(machine, monkeypatch)
    assert not machine.faults, machine.faults[:3]


class Call:
    """A call of work as XLA makes it: buffers, and functions that say device and stream."""

    def __init__(self, work: record.Work, buffers: int = -1, version: tuple[int, int] = (0, 3)) -> None:
        self.said, self.fails, self.device = "", False, 0
        count = len(work.used) + len(work.written) + len(work.results) + 1
        self.places = [(1 << 32) + (i << 24) for i in range(count)]
        for i, operand in enumerate(work.written, len(work.used)):
            self.places[i] = self.places[work.used.index(operand)]
        given = self.places if buffers < 0 else self.places[:buffers]
        items = [handler._Buffer(sizeof(handler._Buffer), None, 0, at) for at in given]
        parts = items[: len(work.used)], items[len(work.used) :]
        pointers = [(c_void_p * (1 + len(part)))(*map(ctypes.addressof, part)) for part in parts]
        sides = [
            handler._Buffers(sizeof(handler._Buffers), None, len(part), None, ctypes.addressof(at))
            for part, at in zip(parts, pointers, strict=True)
        ]
        self.digest, self.kind = c_int64(work.digest), ctypes.c_int(3)
        scalar = pointer(handler._Scalar(5, pointer(self.digest)))
        attrs = handler._Attrs(sizeof(handler._Attrs), None, 1, ctypes.addressof(self.kind), None, pointer(scalar))
        known = handler._Version(sizeof(handler._Version), None, *version)
        self.api = handler._Api(sizeof(handler._Api), None, known)
        places = handler._CREATE_ERROR, 2, handler._GET_STREAM, handler._GET_DEVICE
        functions = [handler._Function(f) for f in (self._error, self._destroyed, self._stream, self._device)]
        for place, function in zip(places, functions, strict=True):
            self.api.functions[place] = ctypes.cast(function, c_void_p).value
        self.frame = handler._Frame(
            sizeof(handler._Frame), None, ctypes.addressof(self.api), 77, handler._EXECUTE, *sides, attrs
        )
        self.kept = items, pointers, scalar, functions

    def _error(self, address: int) -> int:
        wrong = handler._Wrong.from_address(address)
        assert wrong.code == handler._INTERNAL
        self.said = wrong.message.decode()
        return 9

    def _destroyed(self, address: int) -> None:
        assert handler._Stream.from_address(address).ctx == 8

    def _stream(self, address: int) -> int | None:
        asked = handler._Stream.from_address(address)
        assert asked.ctx == 77
        asked.value = STREAM
        return 8 if self.fails else None

    def _device(self, address: int) -> None:
        handler._Device.from_address(address).value = self.device

    def run(self, stage: int = handler._EXECUTE) -> list[str]:
        """What it asked the stub for."""
        stub().stub_clear()
        self.said, self.frame.stage = "", stage
        tape = c_library.library("te_xla_tape").te_xla_tape
        tape.restype, tape.argtypes = c_void_p, [c_void_p]
        assert (tape(ctypes.addressof(self.frame)) == 9) == bool(self.said)
        return list(stub().stub_log().decode().splitlines())


def mlp(recipe: Recipe | None) -> list[record.Work]:
    """The work of an MLP: both ways, and the updates of its states."""
    arrays = {"x": (24, 64), "layer_norm_weight": (64,), "fc1_weight": (256, 64), "fc2_weight": (64, 128)}
    given: dict[str, Any] = {name: jax.ShapeDtypeStruct(shape, np.dtype("bfloat16")) for name, shape in arrays.items()}
    options = {"normalization": "RMSNorm", "activation": "swiglu"}
    whole = rules.Layered("layernorm_mlp", options, recipe, False, given)
    whole.settle()
    sides = whole.wanting(frozenset(arrays), True)
    updates = te.scaling(recipe, te.layernorm_mlp).rule.updates() if whole.history else []
    return [sides.forward, sides.backward, *updates]


def halves(rt: Runtime, tensors: list[Tensor]) -> Any:
    """Both halves of an operand, as arguments."""
    (x,) = tensors
    rows = x.shape[0] // 2
    return tuple(Tensor(x.ptr + i * x.nbytes // 2, (rows, x.shape[1]), x.dtype, x.device, x) for i in range(2)), {}


def of_parts() -> list[record.Work]:
    """Work on parts of an operand."""
    return [record.Work("sum", raw.add, [record.Array((32, 64), dtypes.float32)], halves, "of halves")]


def told(doors: Doors, work: record.Work) -> None:
    """The stub knows what arguments the kernels have."""
    program = Program()
    tape = work.on(GPU).made.tape
    for step in tape.steps:
        if isinstance(step, TableLaunch):
            doors.tables[step.kernel.name] = len(step.table)
    for step in add_entry(program, "call", tape).steps:
        if step.kind in (file.LAUNCH, file.TABLE):
            f = program.functions[step.target]
            letters = f.letters.replace("r", "p") if step.kind == file.LAUNCH else f"b{step.other}"
            stub().stub_arguments(f.name.encode(), digest_of(program.modules[f.module]), letters.encode())


@pytest.mark.parametrize(
    "works", [of_parts, *(partial(mlp, r) for r in (None, DELAYED, Float8CurrentScaling(), Float8BlockScaling()))]
)
def test_a_call_in_c_launches_what_one_in_python_does(doors: Doors, works: Callable[[], list[record.Work]]) -> None:
    for work in works():
        told(doors, work)
        assert c_handler.takes(work, [cuda_device(0)]) and work.calls is not None, record.explain()
        call, before = Call(work), work.calls()
        doors.lines.clear()
        work.run(GPU, STREAM, call.places)
        assert len(doors.lines) > (work.name not in ("update", "sum"))
        assert not any(line.startswith(("launch", "gemm", "fill")) for line in call.run(INITIALIZE)), "not yet"
        for _ in range(2):
            compare(doors.lines, call.run())
            assert not call.said
        assert work.calls() == before + 2
        assert record.known(work) and f"in C ({before + 2} calls)" in record.explain()


def test_wrong_calls_are_errors_of_xlas(doors: Doors) -> None:
    work = mlp(None)[0]
    told(doors, work)
    call = Call(work)
    call.digest.value += 1
    assert call.run() == [] and "does not know" in call.said and "trace the function again" in call.said
    assert c_handler.takes(work, [cuda_device(0)])
    few = Call(work, buffers=3)
    few.run()
    assert "got 3 for" in few.said
    for change, said in (
        (lambda c: setattr(c.frame.attrs, "count", 0), "0 attributes"),
        (lambda c: setattr(c.kind, "value", 4), "its digest"),
        (lambda c: setattr(c, "fails", True), "does not tell its stream"),
        (lambda c: setattr(c, "device", 64), "device 64"),
        (lambda c: setattr(c, "device", 1), "device 1 of 1"),
        (lambda c: setattr(c.kept[0][0], "data", c.places[0] + 2), "alignment"),
        (lambda c: setattr(c.kept[0][0], "data", None), "no data"),
    ):
        call = Call(work)
        change(call)
        assert not any(line.startswith(("launch", "gemm")) for line in call.run()), said
        assert said in call.said and call.said.startswith("te_jax: "), call.said
    good = Call(work)
    assert good.run() and not good.said
    for stage in (0, 1, 4):
        assert good.run(stage) == [] and not good.said


def test_wrong_work_is_refused(doors: Doors) -> None:
    """What a library would not load is Python's; numbers that lead nowhere are errors."""
    work = mlp(Float8CurrentScaling())[0]
    told(doors, work)
    assert not c_handler.takes(work, [cuda_device(0), cuda_device(1)]) and work.calls is None
    assert "XLA calls it in Python: device 1 of 1" in record.explain()
    found = c_handler.library()
    assert found is not None
    number, offset = ctypes.c_int32(2), ctypes.c_uint64()
    at = ctypes.byref(number), ctypes.byref(offset)
    for content, buffers, slots, said in ((None, 3, 1, "NULL"), (b"x", 2, 1, "buffer 2 of 2"), (b"x", 3, 513, "513")):
        with pytest.raises(LibraryError, match=f"te_xla_add: got .*{said}"):
            c_library.check(found, found.te_xla_add(7, content, 1, buffers, slots, *at, None, None))
    assert found.te_xla_calls(7) == -1
    c_library.check(found, found.te_xla_add(7, b"no program", 10, 3, 1, *at, None, None))
    with pytest.raises(LibraryError, match="te_program_load"):
        c_library.check(found, found.te_xla_load(7, 0))
    assert found.te_xla_calls(7) == 0


@pytest.mark.parametrize("version, answer", [((0, 3), 3), ((0, 4), 4), ((0, 9), 4), ((0, 2), 3), ((1, 0), 4)])
def test_versions(doors: Doors, version: tuple[int, int], answer: int) -> None:
    """Of an XLA that is older or later the handler says what it speaks, and leaves it to XLA to refuse."""
    call = Call(mlp(None)[0], version=version)
    told = handler._Metadata(sizeof(handler._Metadata))
    question = handler._Extension(sizeof(handler._Extension), handler._METADATA, None, pointer(told))
    call.frame.extension = ctypes.addressof(question)
    assert call.run() == [] and not call.said
    assert (told.version.major, told.version.minor, told.traits) == (0, answer, 1)


def test_what_xla_declares_is_declared_here() -> None:
    command = ["cc", "-std=c11", "-Wall", "-Werror", "-fsyntax-only", "-I", str(FOLDER / "include")]
    command += ["-I", jax.ffi.include_dir(), str(FOLDER / "tests" / "xla_layout.c")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def lowered(monkeypatch: pytest.MonkeyPatch, asked: str, **changes: Any) -> str:
    """A program for a GPU that is not there."""
    monkeypatch.setenv("TE_JAX_HANDLER", asked)
    x = np.ones((16, 64), np.float32)
    options = {"recipe": Float8CurrentScaling(), **changes}
    traced = jax.jit(lambda x: te.dense(x, np.ones((64, 32), np.float32), **options)).trace(x)
    return str(traced.lower(lowering_platforms=("cuda",)).as_text())


def test_which_handler_a_program_names(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, target in (("python", "@te_tape("), ("auto", "@te_tape_c("), ("c", "@te_tape_c(")):
        assert lowered(monkeypatch, asked).count(target) == 1
    assert isinstance(c_handler.library(), ctypes.CDLL), "this XLA takes the library"
    with pytest.raises(ArgumentError, match="TE_JAX_HANDLER"):
        lowered(monkeypatch, "rust")
    jax.clear_caches()

    def refuses(*given: Any, **options: Any) -> Any:
        raise UnsupportedError("program", "a step that no program holds", "others", "nothing")

    monkeypatch.setattr(c_handler, "add_entry", refuses)
    assert lowered(monkeypatch, "auto", recipe=Float8BlockScaling()).count("@te_tape(") == 1
    assert "XLA calls it in Python: a step that no program holds" in te.explain()


def test_without_the_library(doors: Doors, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TE_CORE_LIBRARY", str(tmp_path / "none.so"))
    assert lowered(monkeypatch, "auto").count("@te_tape(") == 1
    assert "XLA calls te_core in Python (" in te.explain()
    assert "none.so" in c_handler.said()
    with pytest.raises(LibraryError, match=r"none\.so"):
        lowered(monkeypatch, "c")


def test_an_xla_that_refuses_it(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*given: Any, **options: Any) -> None:
        raise RuntimeError("API version 0.4 is no longer supported")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuses)
    assert lowered(monkeypatch, "auto").count("@te_tape(") == 1
    assert "API version 0.4 is no longer supported" in te.explain()
