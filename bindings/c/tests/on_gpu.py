"""On a GPU: programs that the player in C plays leave the bits that te_core's replay leaves, and how long a call takes.

    make -C bindings/c all build/libtimer.so build/libstub.so         # on a machine that has a C compiler
    python3 bindings/c/tests/on_gpu.py --build bindings/c/build --out on_gpu.json

A linear, an MLP, attention and a Transformer's layer shaped as Llama's, forward and backward, in bf16 and in FP8
(delayed and current scaling), and the update of scales are recorded into one file (`--only`: those entries alone whose
names an expression finds). Each entry is played in this process (memory from the driver's pool, and in one block; once
more inside of a CUDA graph), and by `play` in a process without Python.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402  the paths come first

import te_core  # noqa: E402
from te_core import calls, device, dtypes, libraries  # noqa: E402
from te_core.attention import AttentionSpec, alibi_slopes  # noqa: E402
from te_core.backends.cuda import cublaslt  # noqa: E402
from te_core.layers import attention  # noqa: E402
from te_core.layers.attention import AttentionInputs, AttentionLayerSpec, AttentionNeeds  # noqa: E402
from te_core.ops import raw  # noqa: E402
from te_core.ops.quantize import ScalingState  # noqa: E402
from te_core.program import Example, read, tape_of  # noqa: E402
from te_core.quantize.state import Scales  # noqa: E402
from te_core.recipe import DelayedScaling, Float8CurrentScaling  # noqa: E402
from te_core.runtime import ByteAllocator, Runtime  # noqa: E402
from te_core.tape import program_file as file  # noqa: E402
from te_core.tape.walk import tensors_of  # noqa: E402
from te_core.tensor import Tensor  # noqa: E402

RECIPES = {"bf16": None, "delayed": DelayedScaling(amax_history_len=16), "current": Float8CurrentScaling()}
BATCHES, CALLS = 20, 40
#: Of a sequence in the layer: cuDNN adds up the gradient of queries in one piece, and so in one order.
SEQUENCE, WIDTH = 128, 64
DRAW = np.random.default_rng(7)


class Gpu:
    """A runtime on a stream of its own, and bytes to and from the device."""

    def __init__(self) -> None:
        self.driver = libraries.driver()
        with self.driver.on(0):
            self.stream = self.driver.create_stream()
        self.rt = Runtime.cuda(0, self.stream)
        allocator = ByteAllocator(self.rt.device, self._zeros, partial(self.driver.free, 0))
        self.zeroed = Runtime.cuda(0, self.stream, allocator)

    def _zeros(self, nbytes: int, stream: int) -> int:
        address = self.driver.allocate(0, nbytes, stream)
        with self.driver.on(0):
            self.driver.fill(address, 0, nbytes, stream)
        return address

    def take(self, nbytes: int) -> int:
        """Memory of zeros, for good."""
        return self._zeros(max(1, nbytes), self.stream)

    def zero(self, address: int, nbytes: int) -> None:
        """Zeros once more."""
        with self.driver.on(0):
            self.driver.fill(address, 0, max(1, nbytes), self.stream)

    def bytes(self, address: int, nbytes: int) -> bytes:
        """What lies there."""
        host = np.zeros(max(1, nbytes), np.uint8)
        with self.driver.on(0):
            if nbytes:
                self.driver.copy_to_host(host.ctypes.data, address, nbytes, self.stream)
            self.driver.synchronize(self.stream)
        return host[:nbytes].tobytes()

    def put(self, address: int, content: bytes) -> None:
        """Bytes to the device."""
        host = np.frombuffer(content, np.uint8).copy()
        with self.driver.on(0):
            if content:
                self.driver.copy_to_device(address, host.ctypes.data, len(content), self.stream)
            self.driver.synchronize(self.stream)

    def tensor(self, *shape: int, dtype: Any = dtypes.bfloat16, factor: float = 1.0) -> Tensor:
        """Random numbers."""
        return self.rt.tensor(DRAW.standard_normal(shape, np.float32) * factor, dtype)

    def synchronize(self) -> None:
        """Wait."""
        with self.driver.on(0):
            self.driver.synchronize(self.stream)


def scales_of(gpu: Gpu, gemms: int) -> tuple[Scales, list[ScalingState]]:
    """Delayed scaling's state: scales, and row 0 of the histories as maxima."""
    made, states = [], []
    for n, limit in ((3, 448.0), (2, 57344.0)):
        scale = gpu.rt.tensor(np.full(n * gemms, 16.0, np.float32))
        history = gpu.rt.tensor(np.ones((16, n * gemms), np.float32))
        made += [scale, history.rows(0, 1).reshape(n * gemms)]
        states.append(ScalingState(scale, history, gpu.rt.tensor(np.ones(n * gemms, np.float32)), limit))
    return Scales(*made), states


def attentions(gpu: Gpu, tokens: int, hidden: int) -> dict[str, Example]:
    """Attention by itself, such as leaves equal bits."""
    found: dict[str, Example] = {}
    heads, long = hidden // WIDTH, min(512, tokens)
    batch = tokens // long
    cases: dict[str, tuple[int, dict[str, Any]]] = {
        "causal": (heads, {"right": 0}),
        "of groups": (max(1, heads // 4), {"right": 0}),
        "padded": (heads, {"padded": True}),
        "with dropout": (heads, {"right": 0, "dropout": 0.1}),
        "with slopes": (heads, {"right": 0, "bias": "alibi", "default_slopes": True}),
        "with a soft-cap": (heads, {"right": 0, "softcap": 20.0}),
    }
    for name, (groups, options) in cases.items():
        core = AttentionSpec(WIDTH**-0.5, "bshd", "bshd", deterministic=True, **options)
        wanted = AttentionNeeds(True, True, True, False, False)
        spec = AttentionLayerSpec(core, heads, groups, WIDTH, WIDTH, wanted, "separate", False, False)
        terms: dict[str, Any] = {}
        if core.padded:
            ends = [0] + [n * long + long - 7 * n for n in range(batch)]
            terms = {name: gpu.rt.tensor(np.array(ends, np.int32)) for name in ("cu_q", "cu_kv")}
        if core.dropout:
            terms = {"rng": gpu.rt.tensor(np.array([1234, 0], np.int64))}
        if core.bias == "alibi":
            terms = {"slopes": gpu.rt.tensor(np.array(alibi_slopes(heads), np.float32))}
        parts = [gpu.tensor(batch, long, n, WIDTH) for n in (heads, groups, groups)]
        given = AttentionInputs(*parts, **terms)
        _, saved = unwrap(attention.forward)(gpu.rt, *given, spec=spec)
        back = gpu.tensor(batch, long, hidden), None, saved
        found[f"attention {name} forward"] = Example(gpu.rt, partial(unwrap(attention.forward), spec=spec), given)
        found[f"attention {name} backward"] = Example(gpu.rt, partial(unwrap(attention.backward), spec=spec), back)
    return found


def layers(gpu: Gpu, tokens: int, hidden: int, inner: int) -> dict[str, Example]:
    """A Transformer's layer shaped as Llama's."""
    found: dict[str, Example] = {}
    heads, long = hidden // WIDTH, min(SEQUENCE, tokens)
    groups = max(1, heads // 4)
    options = {"normalization": "RMSNorm", "activation": "swiglu", "attn_mask_type": "causal", "qkv_format": "bshd"}
    options |= {"num_attention_heads": heads, "num_gqa_groups": groups, "kv_channels": WIDTH}
    qkv = (heads + 2 * groups) * WIDTH
    for label, recipe in RECIPES.items():
        names = ("layernorm_qkv_weight", "proj_weight", "layernorm_mlp_fc1_weight", "layernorm_mlp_fc2_weight")
        shapes = ((qkv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
        known = {n: gpu.tensor(*shape, factor=0.03) for n, shape in zip(names, shapes, strict=True)}
        known |= {f"{part}_layer_norm_weight": gpu.tensor(hidden) for part in ("layernorm_qkv", "layernorm_mlp")}
        known["x"] = gpu.tensor(tokens // long, long, hidden)
        call = calls.call("transformer_layer", options, dtypes.bfloat16, frozenset(known), recipe)
        given = tuple(known.get(a.name) for a in call.layer.arguments)
        more: dict[str, Any] = {}
        if label == "delayed":
            more["scales"], states = scales_of(gpu, 4)
            found[f"transformer_layer {label} update"] = Example(gpu.rt, raw.update_scales, (states, "max"))
        (y,), saved = call.forward(gpu.rt, *given, **more)
        back = gpu.tensor(*y.shape), saved
        found[f"transformer_layer {label} forward"] = Example(gpu.rt, call, given, more)
        found[f"transformer_layer {label} backward"] = Example(gpu.rt, call, back, more, backward=True)
    return found


def examples(gpu: Gpu, tokens: int, hidden: int, inner: int) -> dict[str, Example]:
    """What is recorded."""
    found = attentions(gpu, tokens, hidden) | layers(gpu, tokens, hidden, inner)
    for label, recipe in RECIPES.items():
        for name, sizes in (("linear", (inner, hidden)), ("layernorm_mlp", (inner, hidden))):
            options: dict[str, Any] = {"activation": "gelu"} if name == "layernorm_mlp" else {}
            needs = frozenset(a.name for a in calls.LAYERS[name].offered() if a.gradient and "residual" not in a.name)
            call = calls.call(name, options, dtypes.bfloat16, needs, recipe)
            known = {
                "x": gpu.tensor(tokens, hidden),
                "weight": gpu.tensor(*sizes, factor=0.03),
                "bias": gpu.tensor(inner),
                "layer_norm_weight": gpu.tensor(hidden),
                "layer_norm_bias": gpu.tensor(hidden),
                "fc1_weight": gpu.tensor(inner, hidden, factor=0.03),
                "fc1_bias": gpu.tensor(inner),
                "fc2_weight": gpu.tensor(hidden, inner, factor=0.03),
                "fc2_bias": gpu.tensor(hidden),
            }
            given = tuple(known.get(a.name) for a in call.layer.arguments)
            more: dict[str, Any] = {}
            if label == "delayed":
                more["scales"], states = scales_of(gpu, len(call.layer.products))
                found[f"{name} {label} update"] = Example(gpu.rt, raw.update_scales, (states, "max"))
            outputs, saved = call.forward(gpu.rt, *given, **more)
            grads = [gpu.tensor(*t.shape) for t in outputs] + [None] * (2 if name == "layernorm_mlp" else 0)
            found[f"{name} {label} forward"] = Example(gpu.rt, call, given, more)
            found[f"{name} {label} backward"] = Example(gpu.rt, call, (*grads, saved), more, backward=True)
    return found


class Case:
    """An entry: its tape, its program, and the memory that both are given."""

    def __init__(self, gpu: Gpu, name: str, example: Example, entry: file.Entry, program: Any) -> None:
        self.gpu, self.name, self.entry, self.program = gpu, name, entry, program
        self.number = program.find(name)
        self.tape = tape_of(name, example)
        self.given = tensors_of([*example.arguments, *example.options.values()])
        assert len(self.given) == entry.inputs, (name, len(self.given), entry.inputs)
        self.before = [gpu.bytes(t.ptr, t.nbytes) for t in self.given]
        self.kept = [i for i, s in enumerate(entry.slots) if s.role in (file.OUTPUT, file.SAVED)]
        self.outputs = [gpu.take(entry.slots[i].nbytes) for i in self.kept]
        self.block = gpu.take(entry.block + 256) + 255 & -256

    def restored(self) -> None:
        """Inputs as they were, and outputs of zeros: gaps in what is saved are never written."""
        for t, content in zip(self.given, self.before, strict=True):
            self.gpu.put(t.ptr, content)
        for address, i in zip(self.outputs, self.kept, strict=True):
            self.gpu.zero(address, self.entry.slots[i].nbytes)

    def left(self, addresses: list[int]) -> dict[str, bytes]:
        """What a call has left: results, and inputs that it may write."""
        found = {
            self.entry.slots[i].name: self.gpu.bytes(address, self.entry.slots[i].nbytes)
            for i, address in zip(self.kept, addresses, strict=True)
        }
        written = [s for s in self.entry.slots[: self.entry.inputs] if s.written]
        inputs = dict(zip([s.name for s in self.entry.slots], self.given, strict=False))
        return found | {s.name: self.gpu.bytes(inputs[s.name].ptr, s.nbytes) for s in written}

    def replay(self, rt: Runtime) -> tuple[list[Any], list[Any]]:
        """By te_core: (addresses, what holds them)."""
        at: list[Any] = [t.ptr for t in self.given]
        held: list[Any] = [None] * len(at)
        self.tape.replay(rt, at, held, ())
        return at, held

    def replayed(self) -> dict[str, bytes]:
        """What te_core's replay leaves."""
        self.restored()
        at, held = self.replay(self.gpu.zeroed)
        found = self.left([at[i] for i in self.kept])
        del held
        return found

    def asked(self, block: bool, allocated: bool = False) -> Any:
        """The run in C."""
        from tests.core.c_library import tensor

        slots = self.entry.slots
        given = [tensor(s, t.ptr) for s, t in zip(slots, self.given, strict=False)]
        outputs = [tensor(slots[i], 0 if allocated else at) for i, at in zip(self.kept, self.outputs, strict=True)]
        more = {"stream": self.gpu.stream, "block": self.block if block else 0, "entry": self.number}
        return self.program.asked(given, outputs, **more)

    def play(self, run: Any) -> None:
        """By the player."""
        from tests.core.c_library import check, library

        check(library().te_program_run(self.program.handle, ctypes.byref(run)))

    def played(self, block: bool) -> dict[str, bytes]:
        """What the player leaves."""
        self.restored()
        self.play(self.asked(block))
        return self.left(self.outputs)

    def captured(self) -> dict[str, bytes]:
        """What the player leaves by a CUDA graph, in which it put its work."""
        from tests.core.c_library import check, library

        cuda = ctypes.CDLL(libcuda())
        stream, graph, ready = ctypes.c_void_p(self.gpu.stream), ctypes.c_void_p(), ctypes.c_void_p()
        check(library().te_program_prepare(self.program.handle, self.number, self.gpu.stream))
        with self.gpu.driver.on(0):
            self.restored()
            must(cuda.cuStreamBeginCapture_v2(stream, 0))
            try:
                self.play(self.asked(block=True))
            finally:
                ended = cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
            must(ended)
            must(cuda.cuGraphInstantiateWithFlags(ctypes.byref(ready), graph, ctypes.c_ulonglong(0)))
            sizes = [self.entry.slots[i].nbytes for i in self.kept]
            ran = any(any(self.gpu.bytes(at, n)) for at, n in zip(self.outputs, sizes, strict=True))
            assert not ran, "a capture runs nothing"
            must(cuda.cuGraphLaunch(ready, stream))
        return self.left(self.outputs)

    def in_a_process_without_python(self, play: Path, path: Path, env: dict[str, str]) -> dict[str, bytes]:
        """What examples/play.c leaves."""
        with tempfile.TemporaryDirectory() as given, tempfile.TemporaryDirectory() as taken:
            for s, content in zip(self.entry.slots, self.before, strict=False):
                Path(given, s.name).write_bytes(content)
            command = [str(play), str(path), self.name, given, taken]
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
            assert done.returncode == 0, done.stderr
            self.said = done.stdout.splitlines()[-1]
            return {p.name: p.read_bytes() for p in Path(taken).iterdir()}


def libcuda() -> str:
    """The driver that the player is to open."""
    return os.environ.get("TE_LIBCUDA", "libcuda.so.1")


def must(status: int) -> None:
    """The driver's calls go well."""
    assert status == 0, f"the driver said {status}"


def median_us(once: Callable[[], float], wait: Callable[[], None]) -> float:
    """Of batches of calls, the microseconds of the host's time that one takes."""
    found = []
    for _ in range(BATCHES):
        wait()
        found.append(once())
    wait()
    return round(statistics.median(found), 2)


def times(case: Case) -> dict[str, float]:
    """Host time of a call: te_core's replay (results and addresses in lists), and the player's."""
    from tests.core.c_library import time_call

    timer, gpu = time_call(), case.gpu

    def python() -> float:
        begin = time.perf_counter()
        for _ in range(CALLS):
            case.replay(gpu.rt)
        return (time.perf_counter() - begin) / CALLS * 1e6

    def player(run: Any) -> float:
        took: float = timer(case.program.handle, ctypes.byref(run), CALLS)
        assert took >= 0, "a call failed"
        return took / 1e3

    case.restored()
    return {
        "steps": len([s for s in case.entry.steps if s.kind <= file.COPY]),
        "python_us": median_us(python, gpu.synchronize),
        "c_pool_us": median_us(partial(player, case.asked(block=False)), gpu.synchronize),
        "c_block_us": median_us(partial(player, case.asked(block=True)), gpu.synchronize),
    }


def compared(wanted: dict[str, bytes], found: dict[str, bytes]) -> str:
    """ "" where the bits are equal."""
    if wanted.keys() != found.keys():
        return f"other results: {sorted(wanted.keys() ^ found.keys())}"
    return ", ".join(name for name in wanted if wanted[name] != found[name])


def judged(case: Case, play: Path, path: Path, env: dict[str, str]) -> dict[str, Any]:
    """All ways to play an entry, each "equal" or what is not; and times."""
    wanted = case.replayed()
    ways: dict[str, Callable[[], dict[str, bytes]]] = {
        "te_core again": case.replayed,
        "c, the driver's pool": lambda: case.played(block=False),
        "c, a block": lambda: case.played(block=True),
        "c, in a graph": case.captured,
        "play, without Python": lambda: case.in_a_process_without_python(play, path, env),
    }
    found: dict[str, Any] = {"bytes": sum(map(len, wanted.values()))}
    assert any(any(content) for content in wanted.values()), "nothing but zeros"
    for label, way in ways.items():
        try:
            differs = compared(wanted, way())
            found[label] = f"not equal: {differs}" if differs else "equal"
        except Exception as error:  # the others are told, too
            found[label] = f"{type(error).__name__}: {error}"[:400]
    found["play says"] = getattr(case, "said", "")
    return found | times(case)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where everything is equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--build", default=str(ROOT / "bindings" / "c" / "build"), help="where make has put the library"
    )
    parser.add_argument("--out", default="on_gpu.json")
    parser.add_argument("--sizes", type=int, nargs=3, default=(2048, 1024, 4096), help="tokens, hidden, inner")
    parser.add_argument("--only", default="", help="an expression for names of entries")
    asked = parser.parse_args(arguments)
    os.environ["TE_C_BUILD"] = asked.build
    from tests.core.c_library import CRuntime

    gpu = Gpu()
    lt = cublaslt.bindings()
    paths = {"libcuda": libcuda(), "libcublaslt": libraries.file("cublasLt"), "libcudnn": libraries.file("cudnn")}
    known = {name: example for name, example in examples(gpu, *asked.sizes).items() if re.search(asked.only, name)}
    report: dict[str, Any] = {
        "device": device.info(0).name,
        "driver": ".".join(map(str, libraries.driver_version())),
        "cublasLt": lt.get_version(),
        "cudnn": ".".join(map(str, libraries.version("cudnn"))),
        "sizes": list(asked.sizes),
        "entries": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "layers.te")
        te_core.record(known, path)
        program = read(path)
        report["file_bytes"] = path.stat().st_size
        runtime = CRuntime(stream=gpu.stream, **paths)
        begin = time.perf_counter()
        player = runtime.open(path)
        report["load_ms_first"] = round((time.perf_counter() - begin) * 1e3, 2)
        begin = time.perf_counter()
        runtime.open(path).free()
        report["load_ms_again"] = round((time.perf_counter() - begin) * 1e3, 2)
        env = {**os.environ, "TE_LIBCUBLASLT": paths["libcublaslt"], "TE_LIBCUDNN": paths["libcudnn"]}
        folders = [str(Path(libraries.file(name)).parent) for name in ("cudnn", "cublasLt", "nvrtc")]
        env["LD_LIBRARY_PATH"] = ":".join([*folders, os.environ.get("LD_LIBRARY_PATH", "")])
        for entry in program.entries:
            case = Case(gpu, entry.name, known[entry.name], entry, player)
            report["entries"][entry.name] = judged(case, Path(asked.build, "play"), path, env)
            print(entry.name, json.dumps(report["entries"][entry.name]), flush=True)
        player.free()
        runtime.destroy()
    report["equal"] = not re.search(r"not equal|Error|other results", json.dumps(report["entries"]))
    Path(asked.out).write_text(json.dumps(report, indent=1) + "\n")
    print({key: value for key, value in report.items() if key != "entries"})
    return 0 if report["equal"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
