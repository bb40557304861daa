"""On a GPU: layers from C leave the bits that te_core's own calls leave; a loss curve; the host's time of a step.

    make -C bindings/c all build/libtrain.so build/libtimer.so build/libstub.so    # on a machine that has a C compiler
    python3 bindings/c/tests/embedded_on_gpu.py --build bindings/c/build --out embedded.json

The layers are called in this process: a host that runs Python already. `train` (examples/train.c) runs in a process of
its own where a libpython lies beside this Python, else in a new Python that loads it as a library.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from on_gpu import Gpu, libcuda  # noqa: E402  the paths come first

from te_core import calls, device, dtypes, libraries  # noqa: E402
from te_core.errors import ArgumentError, UnsupportedError  # noqa: E402
from te_core.functional.scaling import new_states, views_of  # noqa: E402
from te_core.ops import raw  # noqa: E402
from te_core.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling  # noqa: E402
from te_core.tape import taped  # noqa: E402

RECIPES = {"none": None, "delayed": DelayedScaling(), "current": Float8CurrentScaling(), "block": Float8BlockScaling()}
ROWS, WIDTH, INNER, HEADS = 128, 256, 512, 4
LAYERS: dict[str, dict[str, Any]] = {
    "linear": {},
    "layernorm_linear": {},
    "layernorm_mlp": {"activation": "swiglu"},
    "transformer_layer": {"num_attention_heads": HEADS},
}
STEPS = 3


def sizes_of(name: str) -> dict[str, int]:
    """Of the letters in the slots' shapes."""
    wide = INNER * (2 if name == "layernorm_mlp" else 1)
    here = {"K": WIDTH, "N": INNER, "F": INNER, "F'": wide, "...": ROWS, "S": ROWS // 2, "B": 2}
    return here | {"H": WIDTH, "R": 3 * WIDTH, "P": WIDTH}


def case(gpu: Gpu, runtime: Any, name: str, label: str) -> str:
    """ "equal", or what differs: outputs and gradients of some steps, in which scales change."""
    from tests.core.c_library import CLayer, host_tensor

    recipe = RECIPES[label]
    said = LAYERS[name] | ({} if recipe is None else {"recipe": type(recipe).__name__})
    layer = CLayer(runtime.handle, name, json.dumps(said), scaled=True)
    sizes, rt = sizes_of(name), gpu.rt
    slots = [s for s in layer.slots()[0] if s.gradient and b"residual" not in s.name]
    given = [gpu.tensor(*[sizes[letter] for letter in s.shape.decode().split()], factor=0.2) for s in slots]
    needs = frozenset(s.name.decode() for s in slots)
    named = dict(zip([s.name.decode() for s in slots], given, strict=True))
    from te_core.functional.named import Named

    whole = Named(calls.LAYERS[name])
    tensors = dict.fromkeys(whole.arguments) | named
    call = calls.call(name, LAYERS[name] | whole.implied(tensors, LAYERS[name], rt), dtypes.bfloat16, needs, recipe)
    arguments = whole.placed(tensors, call, None, rt)
    history = call.asked.precision is not None and call.asked.precision.history is not None
    states = new_states(rt, call.asked.precision, len(call.layer.products)) if history else ()
    more = {"scales": views_of(states)} if history else {}
    rest = [None] * (len(call.layer.outputs) - 1)
    for step in range(STEPS):
        (y, *_), saved = call.forward(rt, *arguments, **more)
        dy = gpu.tensor(*y.shape)
        found = dict(zip(whole.gradients, call.backward(rt, dy, *rest, saved, **more), strict=False))
        wanted = [y, *[found[name] for name in named]]
        into = [gpu.rt.zeros(t.shape, t.dtype) for t in wanted]
        kept = layer.forward([host_tensor(t) for t in given], [host_tensor(into[0])])
        layer.backward(kept, [host_tensor(dy)], [host_tensor(t) for t in into[1:]])
        for label, one, other in zip(["y", *named], wanted, into, strict=True):
            if gpu.bytes(one.ptr, one.nbytes) != gpu.bytes(other.ptr, other.nbytes):
                return f"not equal: {label} of step {step}"
        if history:
            raw.update_scales(rt, states, "max")
            layer.update()
    layer.free()
    return "equal"


def trained(build: Path, env: dict[str, str], where: str, steps: int, path: str = "") -> dict[str, Any]:
    """What examples/train.c prints, and how it ran."""
    name = sysconfig.get_config_var("INSTSONAME") or ""
    shared = Path(sysconfig.get_config_var("LIBDIR") or "", name)
    words = [where, str(steps), *[path] * bool(path)]
    if name.startswith("libpython") and ".so" in name and shared.exists():
        command, how = [str(build / "train"), *words], f"a process that starts {shared.name}"
        env = {**env, "TE_CORE_PYTHON": sys.prefix}
    else:
        how = f"a host that runs Python, for there is no {shared}"
        call = f"import ctypes; lib = ctypes.CDLL({str(build / 'libtrain.so')!r}); words = {['train', *words]!r}\n"
        call += "lib.train(len(words), (ctypes.c_char_p * len(words))(*map(str.encode, words)))\n"
        command = [sys.executable, "-c", call + "ctypes.CDLL(None).fflush(None)"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    return {
        "ran as": how,
        "losses": done.stdout.splitlines(),
        "said": done.stderr.strip()[-400:],
        "rc": done.returncode,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where everything is equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default=str(ROOT / "bindings" / "c" / "build"))
    parser.add_argument("--out", default="embedded.json")
    parser.add_argument("--steps", type=int, default=50)
    asked = parser.parse_args(arguments)
    os.environ["TE_C_BUILD"] = asked.build
    from tests.core.c_library import CRuntime, PlayerError

    taped.set_when("first")
    gpu = Gpu()
    paths = {"libcuda": libcuda(), "libcublaslt": libraries.file("cublasLt"), "libcudnn": libraries.file("cudnn")}
    report: dict[str, Any] = {"device": device.info(0).name, "layers": {}}
    runtime = CRuntime(stream=gpu.stream, **paths)
    for name in LAYERS:
        for label in RECIPES:
            try:
                found = case(gpu, runtime, name, label)
            except (PlayerError, ArgumentError, UnsupportedError) as error:
                found = f"{'refused' if 'attention' in str(error) else 'failed'}: {error}"[:300]
            report["layers"][f"{name} {label}"] = found
            print(f"{name} {label}: {found}", flush=True)
    runtime.destroy()
    env = {**os.environ, "TE_LIBCUBLASLT": paths["libcublaslt"], "PYTHONPATH": str(ROOT)}  # (it attends to nothing)
    mine = report["train"] = trained(Path(asked.build), env, "cuda", asked.steps)
    command = [sys.executable, str(Path(__file__).parent / "losses.py"), "cuda", str(asked.steps)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    report["te_torch"] = {"losses": done.stdout.splitlines(), "said": done.stderr.strip()[-400:]}
    differ = [pair for pair in zip(mine["losses"], report["te_torch"]["losses"], strict=False) if pair[0] != pair[1]]
    report["curve"] = "equal" if not differ and len(mine["losses"]) == asked.steps else f"differs: {differ[:2]}"
    Path(asked.out).write_text(json.dumps(report, indent=1) + "\n")
    print({key: report[key] for key in ("device", "curve")}, mine["ran as"], mine["said"], report["te_torch"]["said"])
    bad = [found for found in report["layers"].values() if found.startswith(("not", "failed"))]
    return 1 if bad or report["curve"] != "equal" else 0


if __name__ == "__main__":
    raise SystemExit(main())
