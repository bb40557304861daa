"""Layers from C: by te_core in an interpreter that C finds or starts, and on a GPU by what was recorded there."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from te_core import c_library, calls, config, dtypes, embed, functional, libraries, program
from te_core.embed import doors
from te_core.embed.layers import Opened, State
from te_core.functional.named import Named
from te_core.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from te_core.runtime import Runtime
from te_core.tape import taped
from te_core.tensor import from_numpy
from tests.backends import HARDWARE
from tests.core.c_library import FOLDER, CLayer, CRuntime, DLTensor, PlayerError, built, host_tensor, stub
from tests.core.fake_cuda import Machine, Make
from tests.core.program_proof import Proof, compare, digest_of
from tests.core.tape_cases import Maker
from tests.core.test_program_c import made
from tests.functional_cases import FUNCTIONS, OF_RECIPES, Right, right

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason=f"{HARDWARE}no C compiler")

ARGUMENT, UNSUPPORTED, MEMORY = 1, 2, 6
LAYERS = [name for name in FUNCTIONS if name != "grouped_linear"]


@pytest.fixture(scope="module")
def cpu() -> Iterator[CRuntime]:
    made = CRuntime(device_type=1)
    yield made
    made.destroy()


def said(recipe: Recipe | None, options: dict[str, Any]) -> str:
    """The options of a layer as C gives them."""
    found = {name: value for name, value in options.items() if name != "seed"}
    if recipe is not None:
        fields = {"amax_history_len": 3} if type(recipe).__name__ == "DelayedScaling" else {}
        found["recipe"] = {type(recipe).__name__: fields}
    return json.dumps(found)


def like(array: Any) -> np.ndarray[Any, Any]:
    """Memory for a result, with something in it."""
    return np.full(array.shape, 3, array.dtype)


class Called:
    """A layer of a right call, in C."""

    def __init__(self, runtime: CRuntime, case: Right) -> None:
        name, self.case = case.function.layer.name, case
        scaled = case.recipe is not None
        self.layer = CLayer(runtime.handle, name, said(case.recipe, case.options), scaled)
        inputs, self.outputs = self.layer.slots()
        self.names = [slot.name.decode() for slot in inputs]
        arrays = dict(case.arrays)
        if "seed" in self.names:
            shape = [int(n) for n in inputs[self.names.index("seed")].shape.split()]
            arrays["seed"] = case.options["seed"] = np.arange(7, 7 + np.prod(shape), dtype=np.int64).reshape(shape)
        self.arrays = [arrays.get(n) for n in self.names]

    def given(self) -> list[DLTensor | None]:
        """What it takes."""
        return [None if a is None else host_tensor(from_numpy(a)) for a in self.arrays]

    def forward(self, like_these: list[Any], keep: bool = True) -> tuple[list[Any], Any]:
        """(outputs, what was kept)."""
        found = [like(a) for a in like_these]
        saved = self.layer.forward(self.given(), [host_tensor(from_numpy(a)) for a in found], keep)
        return found, saved

    def backward(self, saved: Any, dy: list[Any], wanted: dict[str, Any]) -> dict[str, Any]:
        """Gradients by name."""
        found = {name: like(a) for name, a in wanted.items()}
        into = [host_tensor(from_numpy(found[n])) if n in found else None for n in self.names]
        self.layer.backward(saved, [host_tensor(from_numpy(a)) for a in dy], into)
        return found


def equal(one: Any, other: Any) -> bool:
    """Bit for bit."""
    one, other = np.asarray(one), np.asarray(other)
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_what_te_core_gives(cpu: CRuntime, name: str) -> None:
    """Outputs and gradients bit for bit; fewer gradients are the same ones."""
    kinds = ("plain", "delayed", "current", "block") if name in OF_RECIPES else ("plain",)
    for seed, kind in enumerate(kind for kind in kinds for _ in range(3)):
        case, r = right(seed, name, kind), random.Random(seed)
        scaling = case.scaling()
        state = {} if scaling is None else {"scaling": scaling}
        called = Called(cpu, case)
        for step in range(2):
            y, back = case.function(**case.arrays, **case.options, recipe=case.recipe, **state)
            outputs = list(y) if isinstance(y, tuple) else [y]
            mine, saved = called.forward(outputs)
            assert all(map(equal, mine, outputs))
            dy = [(np.random.default_rng(seed).standard_normal(o.shape) * 0.5).astype(o.dtype) for o in outputs]
            grads = {n: g for n, g in back(tuple(dy) if len(dy) > 1 else dy[0]).items() if g is not None}
            wanted = grads if step == 0 else {n: g for n, g in grads.items() if r.random() < 0.5}
            found = called.backward(saved, dy, wanted)
            assert all(equal(found[n], g) for n, g in wanted.items()), (seed, kind, [*wanted])
            if scaling is not None:
                functional.update(scaling)
                called.layer.update()
        called.layer.free()


# ------------------------------------------------------------------------------------------------ on a GPU that is fake


class OnStub(Proof):
    """A layer of te_core on the fake CUDA, and the same in C on the stub: both ask for the same."""

    def __init__(self, machine: Machine, patch: pytest.MonkeyPatch) -> None:
        super().__init__(machine, patch)
        self.allocator.alignment = 256  # type: ignore[attr-defined]
        self.rt = Runtime.cuda(0, 5, self.allocator)
        self.c.destroy()
        self.c = CRuntime(self._take, self.memory.drop_in_c)
        self.kept: set[int] = set()  # what the last call has taken

    def _take(self, nbytes: int, alignment: int, stream: int) -> int:
        if self.memory.given:
            return self.memory.take_in_c(nbytes, alignment, stream)
        return self.memory.fresh(nbytes)

    def compared(self, python: Any, c: Any) -> tuple[Any, Any]:
        """What both give, the second of which has to ask for what the first one asks for."""
        self.doors.lines.clear()
        self.memory.given = []
        result = python()
        lines, given = [*self.doors.lines], [*self.memory.given]
        stub().stub_clear()
        mine = c()
        played = stub().stub_log().decode().splitlines()
        compare(lines, played[: len(lines)])
        behind = [line.split()[:2] for line in played[len(lines) :]]  # backward gives back what forward has kept
        assert all(what == "drop" and int(at, 16) in self.kept for what, at in behind), behind
        self.kept = set(given)
        assert not self.memory.given
        return result, mine

    def recorded(self, python: Any, c: Any) -> Any:
        """What both give first. C's fails at a kernel that the stub was not told of, and works when called again."""
        self.memory.given = []
        result = python()
        try:
            return result, c()
        except PlayerError as error:
            assert "cuLaunchKernel in step" in str(error)
        self.memory.given = []
        for opened in [one for one in doors._things.values() if isinstance(one, Opened)]:
            for f in opened.program.functions:
                digest = digest_of(opened.program.modules[f.module])
                stub().stub_arguments(f.name.encode(), digest, f.letters.replace("r", "p").encode())
        return result, c()


@pytest.mark.parametrize("recipe", ["plain", "delayed", "current"])
@pytest.mark.parametrize("name", ["linear", "layernorm_linear", "layernorm_mlp", "transformer_layer"])
def test_on_a_gpu_programs_play(make: Make, monkeypatch: pytest.MonkeyPatch, name: str, recipe: str) -> None:
    """A call of known shapes asks the libraries for what te_core's replay asks for, address by address."""
    proof = OnStub(make(), monkeypatch)
    taped.set_when("first")
    rt, kind = proof.rt, {"plain": None, "delayed": DelayedScaling(), "current": Float8CurrentScaling()}[recipe]
    options: dict[str, Any] = {"num_attention_heads": 4} if name == "transformer_layer" else {}
    options |= {"hidden_dropout": 0.1} if options and recipe == "plain" else {}
    layer = CLayer(proof.c.handle, name, said(kind, options), scaled=recipe == "delayed")
    maker, sizes = Maker(rt), {"K": 64, "N": 96, "F": 128, "F'": 128, "...": 32}
    sizes |= {"S": 16, "B": 2, "H": 64, "R": 192, "P": 64}
    slots = [slot for slot in layer.slots()[0] if slot.gradient and not slot.name.startswith(b"residual")]
    given = [maker(*[sizes[letter] for letter in slot.shape.decode().split()]) for slot in slots]
    needs = frozenset(slot.name.decode() for slot in slots)
    whole = Named(calls.LAYERS[name])
    tensors = dict.fromkeys(whole.arguments) | {s.name.decode(): t for s, t in zip(slots, given, strict=True)}
    call = calls.call(name, options | whole.implied(tensors, options, rt), dtypes.bfloat16, needs, kind)
    seed = maker(*whole.pairs, dtype=dtypes.int64) if call.draws else None
    arguments = whole.placed(tensors, call, seed, rt)
    (state,) = [one for one in doors._things.values() if isinstance(one, State)] or [None]
    more = {} if state is None else {"scales": state.scales}
    shape = (16, 2, 64) if options else (32, 96)
    y, dy = maker(*shape), maker(*shape)
    inputs = [*given, *[None] * (len(layer.slots()[0]) - len(given))]
    inputs[-1] = inputs[-1] if seed is None else seed
    fresh = [host_tensor(t) for t in inputs]
    out = host_tensor(y)
    out.data = None

    def forward() -> Any:
        out.data = None
        return layer.forward(fresh, [out])

    def gradients() -> list[Any]:
        found = [host_tensor(t) for t in given]
        for t in found:
            t.data = None
        return found

    rest = [None] * (len(call.layer.outputs) - 1)
    for both in (proof.recorded, proof.compared, proof.compared):
        (outputs, saved), kept = both(lambda: call.forward(rt, *arguments, **more), forward)
        into = gradients()
        python = partial(call.backward, rt, dy, *rest, saved, **more)
        back, _ = both(python, partial(layer.backward, kept, [host_tensor(dy)], into))
        if both == proof.compared:
            assert [t.data for t in (out, *into)] == [t.ptr for t in (outputs[0], *back[: len(given)])]
    proof.c.destroy()


@pytest.fixture
def muted(make: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnStub]:
    """A stub that takes any kernel."""
    proof = OnStub(make(), monkeypatch)
    proof.memory.given = []
    stub().stub_mute(1)
    yield proof
    stub().stub_mute(0)
    proof.c.destroy()


def test_each_gradient_has_memory_of_its_own(muted: OnStub) -> None:
    """Those of a branch and of its residual are dy itself: they are copied, for they become the caller's."""
    layer, maker = CLayer(muted.c.handle, "bias_dropout_add"), Maker(muted.rt)
    x, bias, residual, y, dy = maker(32, 64), maker(64), maker(32, 64), maker(32, 64), maker(32, 64)
    muted.memory.given = []
    kept = layer.forward([host_tensor(t) for t in (x, bias, residual)], [host_tensor(y)])
    grads = [host_tensor(t) for t in (x, bias, residual)]
    for grad in grads:
        grad.data = None
    layer.backward(kept, [host_tensor(dy)], grads)
    assert len({dy.ptr, *[grad.data for grad in grads]}) == 4


def test_another_size_is_another_program(muted: OnStub, tmp_path: Path) -> None:
    """What was recorded is kept by size, dtype, alignment and gradients, and saved in one file."""
    layer, maker = CLayer(muted.c.handle, "linear", said(DelayedScaling(), {}), scaled=True), Maker(muted.rt)
    weight = maker(96, 64)
    with pytest.raises(PlayerError, match="was not called"):
        layer.save(tmp_path / "linear.te")
    for rows, shift in ((32, 0), (48, 0), (32, 0), (32, 16)):
        x, y, *places = maker(rows, 64), maker(rows, 96), maker(rows, 64), maker(96, 64)
        muted.memory.given = []
        x.ptr += shift
        for wanted in ((0, 1), (1,)):
            kept = layer.forward([host_tensor(x), host_tensor(weight)], [host_tensor(y)])
            grads = [host_tensor(t) if i in wanted else None for i, t in enumerate(places)]
            layer.backward(kept, [host_tensor(y)], grads)
        layer.update()
    layer.save(tmp_path / "linear.te")
    found = [(entry.name, entry.slots[0].shape) for entry in program.read(tmp_path / "linear.te").entries]
    names = [name for name, _ in found]
    assert [n for n in names if n.startswith("forward")] == ["forward", "forward.2", "forward.3"]
    assert sum(n.startswith("backward") for n in names) == 6 and names[-1] == "update"
    assert [shape for name, shape in found if name.startswith("forward")] == [(32, 64), (48, 64), (32, 64)]
    y.dtype = dtypes.float32
    with pytest.raises(PlayerError, match="y of 2 dimensions, dtype"):
        layer.forward([host_tensor(x), host_tensor(weight)], [host_tensor(y)])


def test_the_check_for_gpus_runs(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On fakes, which compute nothing: every copy to the host is the same. So it is ready where a GPU is."""
    machine, where = make(), str(built() / "libstub.so")
    copied = lambda host, at, n, stream: ctypes.memset(host, 0x5A, n) * 0  # noqa: E731
    monkeypatch.setattr(machine.lib, "_cuMemcpyDtoHAsync_v2", copied)
    monkeypatch.setenv("TE_LIBCUDA", where)
    monkeypatch.setenv("TE_C_BUILD", str(built()))
    monkeypatch.setattr(libraries, "file", lambda name: where)
    monkeypatch.syspath_prepend(str(FOLDER / "tests"))
    script = importlib.import_module("embedded_on_gpu")
    same = {"losses": ["step 0 loss 1"], "said": "", "ran as": "nothing"}
    monkeypatch.setattr(script, "trained", lambda *asked: same)
    monkeypatch.setattr(
        script.subprocess, "run", lambda *asked, **more: SimpleNamespace(stdout="step 0 loss 1", stderr="")
    )
    stub().stub_mute(1)
    try:
        assert script.main(["--build", str(built()), "--out", str(tmp_path / "o.json"), "--steps", "1"]) == 0
    finally:
        stub().stub_mute(0)
    found = json.loads((tmp_path / "o.json").read_text())["layers"]
    assert len(found) == 16 and list(found.values()).count("equal") >= 12
    assert all(said == "equal" or "attention by cuDNN" in said for said in found.values())


# ---------------------------------------------------------------------------------------- processes of their own


SHARED = Path(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or "")
needs_libpython = pytest.mark.skipif(
    ".so" not in SHARED.name or not SHARED.exists(), reason=f"{HARDWARE}this Python has no shared library"
)
ROOT = FOLDER.parents[1]
ENV = {**os.environ, "TE_CORE_PYTHON": sys.prefix, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def ran(*words: Any, **more: Any) -> str:
    """What a process prints that ends well."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, env={**ENV, **more}, timeout=240)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def embedding() -> Path:
    made(built(), str(built() / "embedding"), CFLAGS="-O1 -g")
    return built() / "embedding"


@needs_libpython
@pytest.mark.parametrize("scenario", ["threads", "wrong", "memory", "forked", "closed"])
def test_a_process_of_c(embedding: Path, scenario: str) -> None:
    """bindings/c/tests/embedding.c, by an interpreter that the library starts."""
    assert ran(embedding, scenario) == "ok\n"


@needs_libpython
@pytest.mark.more
def test_processes_of_c_under_sanitizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_CORE_PYTHON", sys.prefix)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # an environment's links to a checkout are not followed
    assert made(tmp_path, "sanitized-embedded").count("ok\n") == 5


@needs_libpython
def test_the_example_trains_as_te_torch_does(tmp_path: Path) -> None:
    """Each loss is the same float. The library is a shared one, as the flags of te_core.config have it."""
    flags = [f"-I{FOLDER / 'include'}", f"-L{built()}", f"-Wl,-rpath,{built()}", "-lte_core", "-ldl"]
    for compiler, source in (("cc", "train.c"), ("c++", "linear.cpp")):
        if shutil.which(compiler) is not None:
            ran(compiler, FOLDER / "examples" / source, "-o", tmp_path / source, *flags)
    losses = ran(tmp_path / "train.c", "cpu", 50).splitlines()
    assert losses == ran(sys.executable, FOLDER / "tests" / "losses.py", "cpu", 50).splitlines()
    assert len(losses) == 50 and float(losses[-1].split()[-1]) < 0.3 * float(losses[0].split()[-1])
    if (tmp_path / "linear.cpp").exists():
        first, *_, last = [float(line.split()[-1]) for line in ran(tmp_path / "linear.cpp", 20).splitlines()]
        assert last < 0.9 * first


HOST = """
import ctypes, sys
from tests.core.c_library import CLayer, CRuntime, PlayerError, library
runtime = CRuntime(device_type=1)
assert library().te_python_state() == 0
layer = CLayer(runtime.handle, "l2_norm")
assert library().te_python_state() == 1
if sys.argv[1] == "ends":
    sys.exit()  # with a layer and a runtime that live
import _xxsubinterpreters as interpreters
code = f'''
import asyncio
import ctypes
lib = ctypes.PyDLL({str(library()._name)!r})
lib.te_error.restype = ctypes.POINTER(ctypes.c_char_p * 8)
place = ctypes.c_void_p()
status = lib.te_layer_open(ctypes.c_void_p({runtime.handle.value}), b"linear", None, ctypes.byref(place))
said = lib.te_error().contents[6].decode()
assert status == 2 and "a sub-interpreter" in said, (status, said)
'''
interpreters.run_string(interpreters.create(), code)
layer.free()
runtime.destroy()
"""


def test_a_host_that_ends_or_has_sub_interpreters() -> None:
    ran(sys.executable, "-c", HOST, "ends", TE_C_BUILD=str(built()))
    if sys.version_info[:2] <= (3, 11):  # later ones load no ctypes in sub-interpreters, which asks here
        ran(sys.executable, "-c", HOST, "sub", TE_C_BUILD=str(built()))


def test_a_free_threaded_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "_FREE_THREADED", True)
    answer = embed.ask(embed._VERSION, "version")
    assert int.from_bytes(answer[:8], "little") == embed._UNSUPPORTED and b"a free-threaded Python" in answer


def test_flags_for_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(c_library, "found", lambda: None)
    assert config.main(["--libs"]) == 1 and "make -C bindings/c" in capsys.readouterr().err
    monkeypatch.setattr(c_library, "found", lambda: tmp_path / "lib" / "libte_core.so")
    include, libs = f"-I{tmp_path / 'include'}", f"-L{tmp_path / 'lib'} -Wl,-rpath,{tmp_path / 'lib'} -lte_core"
    for words, said in ((["--cflags"], include), (["--libs"], libs), ([], f"{include} {libs}")):
        assert config.main(words) == 0 and capsys.readouterr().out == said + "\n"


# --------------------------------------------------------------------------------------------------- engines in Python


def test_an_engine_on_the_cpu() -> None:
    """te_core allocates in the engine's pool alone, and nobody waits: the example asserts it."""
    assert "12 requests of 12 sizes" in ran(sys.executable, ROOT / "examples" / "engine.py", "cpu", 12)


def test_an_engine_on_a_gpu(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the fake CUDA: whatever is given to the driver lies in the engine's memory."""
    machine = make()
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    engine = importlib.import_module("engine")
    slab = machine.arena.take(engine.SLAB, 5)
    nothing = lambda *given: None  # noqa: E731
    zeros = lambda array, *given: array.fill(0)  # noqa: E731
    there = {"place": machine.devices[0], "streams": (5, 6), "slab": slab, "put": nothing, "get": zeros}
    monkeypatch.setattr(engine, "Cuda", lambda: SimpleNamespace(**there, done=lambda stream: True))
    monkeypatch.setattr(machine.driver, "allocate", None)  # memory of te_core's own
    asyncio.run(engine.main("cuda", 12))
    assert not machine.faults and machine.log
