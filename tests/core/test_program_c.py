"""Programs that the player in C plays: it asks stubs of CUDA's libraries for what a replay asks for."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from te_core import dlpack, libraries
from te_core.ops import raw
from te_core.ops.quantize import ScalingState
from te_core.program import Example, tape_of
from te_core.runtime import ByteAllocator, Runtime
from te_core.tape import program_file as file
from te_core.tape import taped
from te_core.tape.program_file import Program, Step, pack, unpack
from te_core.tensor import Tensor
from tests.backends import HARDWARE, requires_cuda
from tests.core import fake_cudnn
from tests.core.c_library import FOLDER, CRuntime, PlayerError, stub
from tests.core.composed_cases import Layer
from tests.core.fake_cuda import B200, Make
from tests.core.program_proof import Proof, proved
from tests.core.tape_cases import FP32, MLP, RECIPES, Linear, Maker
from tests.core.tape_more_cases import Attention
from tests.core.test_tape_beside import LAYERS, build, into_memory_of_the_call
from tests.core.test_tape_cuda import ATTENTION, GROUPS, KINDS, SHOWN, SMALL

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason=f"{HARDWARE}no C compiler")


@pytest.fixture
def proof(make: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proof]:
    made = Proof(make(), monkeypatch)
    yield made
    made.c.destroy()
    assert not made.machine.faults, made.machine.faults[:3]


@pytest.mark.parametrize(
    ("group", "recipe"),
    [pytest.param(*pair, marks=[] if pair in SHOWN else pytest.mark.more) for pair in product(GROUPS, KINDS)],
)
def test_layers_with_products(proof: Proof, group: str, recipe: str | None) -> None:
    for case in GROUPS[group](recipe):
        proved(proof, case)
    assert proof.tapes > 20 and proof.steps > proof.tapes


@pytest.mark.parametrize(
    "recipe", [None, "delayed", pytest.param("current dequantized backward", marks=pytest.mark.more)]
)
def test_turned_weights(proof: Proof, recipe: str | None) -> None:
    linear, mlp = Linear(recipe, turned=True), MLP(recipe, turned=True)
    proved(proof, replace(linear, k=80, n=48, sink="fp32+"))
    proved(proof, replace(linear, normed="RMSNorm", again=True))
    proved(proof, replace(mlp, checkpoint=True))


@pytest.mark.more
@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - set(KINDS)))
def test_other_recipes(proof: Proof, recipe: str) -> None:
    for case in (Linear(recipe), Linear(recipe, bias=False, sink="fp32+"), MLP(recipe), MLP(recipe, checkpoint=True)):
        proved(proof, case)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", pytest.param("nvfp4 4over6", marks=pytest.mark.more)])
def test_products_that_other_gpus_have(make: Make, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """Alpha lies on the device; scales come in the order of products."""
    proof = Proof(make(B200), monkeypatch)
    base, mlp = Linear(recipe, rows=64), MLP(recipe, rows=64, hidden=128)
    for changes in ({}, {"sink": "fp32+"}, {"weight": "rows"}, {"ready": "both"}, {"x": "both"}, {"dy": "rows"}):
        proved(proof, replace(base, **changes))
    for changes in ({}, {"weight": "rows", "checkpoint": True}, {"ready": "both", "checkpoint": True}):
        proved(proof, replace(mlp, **changes))
    proof.c.destroy()


@pytest.mark.parametrize("name", [*LAYERS, "into_memory_of_the_call"])
def test_on_other_streams(proof: Proof, name: str) -> None:
    """The same launches on streams beside, the same waits; memory is given back once they are done with it."""
    proved(proof, partial(build, {**LAYERS, "into_memory_of_the_call": into_memory_of_the_call}[name]))
    assert proof.tapes == 1


def marks(rt: Runtime, x: Tensor, y: Tensor, *, spec: Any) -> Tensor:
    """A layer whose scratch memory begins as zeros, on both streams."""
    side = rt.side()
    side.wait(rt)
    for each in (rt, side):
        at = each.workspace("marks", x.nbytes, zeroed=True)
        raw.add(each, x, y, out=Tensor(at, x.shape, x.dtype, x.device, None))
    rt.wait(side)
    return raw.add(rt, x, y)  # type: ignore[no-any-return]


def test_scratch_memory_that_begins_as_zeros(proof: Proof) -> None:
    """Once where it is the runtime's; in a block with every call."""
    proved(proof, partial(build, marks))
    assert proof.tapes == 1


def test_memory_of_any_allocator(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded for an allocator that gives multiples of 16."""
    machine = make()
    driver = machine.driver
    machine.allocator = lambda device: ByteAllocator(device, partial(driver.allocate, 0), partial(driver.free, 0))
    proof = Proof(machine, monkeypatch)
    for case in (Linear("delayed"), MLP("current", shift=4, only=2)):
        proved(proof, case)
    proof.c.destroy()


def test_a_kernel_that_takes_a_table(proof: Proof) -> None:
    rt = proof.machine.runtime()
    given = Maker(rt)
    states = [ScalingState(given(3, dtype=FP32), given(16, 3, dtype=FP32), given(3, dtype=FP32), 448.0) for _ in "ab"]
    proof.tape(tape_of("update", Example(rt, raw.update_scales, (states, "max"))))
    assert proof.steps == 1


@pytest.mark.parametrize("layer", SMALL)
def test_other_layers(proof: Proof, layer: str) -> None:
    for case in SMALL[layer]:
        proved(proof, case)


@pytest.mark.parametrize("scratch", [0, 256, pytest.param(9 << 20, marks=pytest.mark.more)])
@pytest.mark.parametrize("group", ATTENTION)
def test_attention(proof: Proof, monkeypatch: pytest.MonkeyPatch, group: str, scratch: int) -> None:
    """cuDNN's own functions are asked for what its frontend would ask them for."""
    monkeypatch.setattr(fake_cudnn.Built, "needs", scratch)
    fp8 = {"fp8": True, "heads": 4, "groups": 4, "d": 128} if group == "fp8" else {}
    for options in ATTENTION[group]:
        proved(proof, Attention(**{**fp8, **options}))


@pytest.mark.parametrize(
    "case",
    [
        Layer("delayed", kind="RMSNorm", activation="swiglu", turned=True, bias=False),
        pytest.param(Layer(None, core=(("right", 0), ("padded", True))), marks=pytest.mark.more),
        pytest.param(Layer("current", cross=True, form="bshd"), marks=pytest.mark.more),
        pytest.param(Layer("delayed", fp8="mha", d=128, heads=2), marks=pytest.mark.more),
    ],
    ids=["as Llama's", "padded", "cross", "fp8 attention"],
)
def test_layers_of_a_transformer(proof: Proof, case: Layer) -> None:
    """Whole layers: products, kernels and attention in one entry."""
    proved(proof, case)
    assert proof.tapes == 2


def altered(content: bytes, change: Callable[[Program, list[Step]], None]) -> bytes:
    """A program whose attention is another one, digest and all."""
    program = unpack(content)
    change(program, next(e for e in program.entries if e.name == "attention").steps)
    return pack(program)


def _place(steps: list[Step], kind: int, **changes: Any) -> None:
    at = next(i for i, step in enumerate(steps) if step.kind == kind)
    steps[at] = steps[at]._replace(**{name: change(getattr(steps[at], name)) for name, change in changes.items()})


BROKEN: dict[str, Callable[[Program, list[Step]], None]] = {
    "attention of no plan": lambda p, s: _place(s, file.ATTEND, target=lambda n: len(p.plans)),
    "attention without its workspace": lambda p, s: _place(s, file.ATTEND, patches=lambda found: found[1:]),
    "attention without a tensor": lambda p, s: _place(s, file.ATTEND, patches=lambda found: (found[0], *found[2:])),
    "attention's arguments": lambda p, s: _place(s, file.ATTEND, words=lambda found: found[:-1]),
    "an address in a file": lambda p, s: _place(s, file.ATTEND, words=lambda found: (found[0], 4096, *found[2:])),
    "an address for a number": lambda p, s: _place(
        s, file.ATTEND, patches=lambda found: (*found, found[1]._replace(number=1 + _scalar(p)))
    ),
    "a step with memory outside of a slot": lambda p, s: _place(
        s, file.ATTEND, patches=lambda found: (found[0]._replace(offset=found[0].offset + 1), *found[1:])
    ),
    "a copy of nothing": lambda p, s: _place(s, file.COPY, target=lambda n: len(p.contents)),
    "a copy's address": lambda p, s: _place(s, file.COPY, patches=lambda found: ()),
    "a plan without content": lambda p, s: p.plans.__setitem__(0, p.plans[0]._replace(content=9)),
    "a plan's tensors": lambda p, s: p.plans.__setitem__(0, p.plans[0]._replace(tensors=((1, 0),) * 65)),
    "a plan's tensor of no kind": lambda p, s: p.plans.__setitem__(0, p.plans[0]._replace(tensors=((1, 3),) * 9)),
}


def _scalar(program: Program) -> int:
    return [kind for _, kind in program.plans[0].tensors].index(file.VALUE)


@pytest.mark.parametrize("what", BROKEN)
def test_broken_attention_is_refused(what: str) -> None:
    content = (FOLDER / "tests" / "linear.te").read_bytes()
    runtime = CRuntime()
    stub().stub_device(1, 9, 0)
    runtime.load(content).free()
    with pytest.raises(PlayerError, match=f"got {what} ") as found:
        runtime.load(altered(content, BROKEN[what]))
    assert found.value.status == 4
    runtime.destroy()


# ------------------------------------------------------------------------------------------------- the library itself


def made(folder: Path, *targets: str, **variables: str) -> str:
    """What make says of targets of bindings/c."""
    named = [f"{name}={value}" for name, value in variables.items()]
    command = ["make", "-s", "-C", str(FOLDER), f"BUILD={folder}", *named, *targets]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_the_c_api(tmp_path: Path) -> None:
    """bindings/c/tests/tests.c: errors, memory, threads, files, versions."""
    assert "15 tests passed" in made(tmp_path, "test", CFLAGS="-O1")


def test_the_abi_is_as_recorded(tmp_path: Path) -> None:
    found = made(tmp_path, "abi", CFLAGS="-O1")
    assert found == (FOLDER / "abi.txt").read_text(), (
        "callers were built against it: add at ends, then make -s abi > abi.txt"
    )
    assert f"sizeof DLTensor = {ctypes.sizeof(dlpack._DLTensor)}" in found
    for name, _ in dlpack._DLTensor._fields_[:1] + dlpack._DLTensor._fields_[-3:]:
        assert f"DLTensor.{name} at {getattr(dlpack._DLTensor, name).offset}\n" in found


def test_tensors_are_those_of_dlpack(tmp_path: Path) -> None:
    """The header leaves DLPack's structures to dlpack.h where that was included before; its own are laid out alike."""
    torch = find_spec("torch")
    assert torch is not None and torch.submodule_search_locations
    header = Path(torch.submodule_search_locations[0]) / "include" / "ATen" / "dlpack.h"
    source, program = str(FOLDER / "tests" / "abi.c"), str(tmp_path / "abi")
    subprocess.run(["cc", "-I", str(FOLDER / "include"), "-include", str(header), source, "-o", program], check=True)
    found = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == (FOLDER / "abi.txt").read_text().splitlines()[: len(found.splitlines())]


@pytest.mark.more
@pytest.mark.long
def test_under_sanitizers(tmp_path: Path) -> None:
    assert "15 tests passed" in made(tmp_path, "sanitized")


@pytest.mark.more
@pytest.mark.long
def test_wrong_calls_and_broken_files_under_sanitizers(tmp_path: Path) -> None:
    """make -C bindings/c fuzz COUNT=1000000 tries more."""
    said = made(tmp_path, "fuzz", COUNT="10000", SEED="2")
    assert "10000 sequences of calls" in said and "10000 broken files" in said


def test_the_file_of_the_tests_in_c_is_of_this_format() -> None:
    """Else: python -m tests.core.stub_program bindings/c/tests/linear.te."""
    content = (FOLDER / "tests" / "linear.te").read_bytes()
    assert pack(unpack(content)) == content


@requires_cuda
@pytest.mark.long
def test_on_a_gpu(tmp_path: Path) -> None:
    """bindings/c/tests/on_gpu.py in small; by itself it needs no compiler, and has larger sizes."""
    built = tmp_path / "build"
    made(built, "all", *(str(built / f"lib{name}.so") for name in ("timer", "stub")), CFLAGS="-O2")
    command = [sys.executable, str(FOLDER / "tests" / "on_gpu.py"), "--build", str(built)]
    sizes = ["--sizes", "128", "256", "512"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "o.json"), *sizes], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_check_for_gpus_runs(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On fakes, which compute nothing: every copy to the host is the same. So it is ready where a GPU is."""
    machine, folder = make(), tmp_path / "build"
    made(folder, "all", *(str(folder / f"lib{name}.so") for name in ("timer", "stub")), CFLAGS="-O1")
    library = str(folder / "libstub.so")
    monkeypatch.setenv("TE_LIBCUDA", library)
    monkeypatch.setenv("TE_C_BUILD", str(folder))
    monkeypatch.setattr(libraries, "file", lambda name: library)
    monkeypatch.setattr(
        machine.lib, "_cuMemcpyDtoHAsync_v2", lambda host, at, n, stream: ctypes.memset(host, 0x5A, n) * 0
    )
    spec = importlib.util.spec_from_file_location("on_gpu", FOLDER / "tests" / "on_gpu.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "BATCHES", 1)
    monkeypatch.setattr(script.Case, "captured", lambda case: case.played(block=True))
    taped.set_when("first")
    sizes = ["--sizes", "64", "128", "256"]
    assert script.main(["--build", str(folder), "--out", str(tmp_path / "o.json"), *sizes]) == 0
    found = json.loads((tmp_path / "o.json").read_text())
    assert len(found["entries"]) == 33 and found["equal"]
    for entry in found["entries"].values():
        assert entry["play, without Python"] == entry["c, a block"] == "equal" and entry["c_pool_us"] > 0


def test_a_program_is_built_against_what_is_installed(tmp_path: Path) -> None:
    made(tmp_path / "build", "install", PREFIX=str(tmp_path / "usr"), CFLAGS="-O1")
    found = {path.relative_to(tmp_path / "usr").as_posix() for path in (tmp_path / "usr").rglob("*.*")}
    assert found == {
        "include/te_core.h",
        "include/te_core.hpp",
        "lib/cmake/te_core/te_core-config.cmake",
        "lib/libte_core.a",
        "lib/libte_core.so",
        "lib/libte_core.so.1",
        "lib/pkgconfig/te_core.pc",
    }
    flags = (tmp_path / "usr" / "lib" / "pkgconfig" / "te_core.pc").read_text()
    words = [word for line in flags.splitlines() if line.startswith(("Cflags", "Libs")) for word in line.split()[1:]]
    source, program = str(FOLDER / "examples" / "play.c"), str(tmp_path / "play")
    subprocess.run(["cc", source, "-o", program, *words, "-ldl"], check=True)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path / "usr" / "lib")}
    done = subprocess.run([program], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (1, "play: play FILE [ENTRY [INPUTS [OUTPUTS]]]\n")


def test_an_example_plays_a_file(tmp_path: Path) -> None:
    made(tmp_path, str(tmp_path / "play"), str(tmp_path / "libstub.so"), CFLAGS="-O1")
    program = tmp_path / "linear.te"
    program.write_bytes((FOLDER / "tests" / "linear.te").read_bytes())
    program.chmod(0o600)
    stubs = {name: str(tmp_path / "libstub.so") for name in ("TE_LIBCUDA", "TE_LIBCUBLASLT", "TE_LIBCUDNN")}
    (tmp_path / "out").mkdir()
    command = [str(tmp_path / "play"), str(program), "backward", str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **stubs})
    assert done.returncode == 0, done.stderr
    assert "grad.x: 6144 bytes" in done.stdout and "backward: " in done.stdout
    assert (tmp_path / "out" / "grad.weight").stat().st_size == 96 * 64 * 2
    done = subprocess.run([*command[:2], "sideward"], capture_output=True, text=True, env={**os.environ, **stubs})
    assert done.returncode == 1 and "sideward" in done.stderr and "To do" in done.stderr
