"""Imports go downward only: the floors of docs/architecture.md, as tools/house.py reads them from the sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.house import CIRCLES, FLOORS, ORDER, ROOT, UPWARD, circles, floor, imports, sources, within

# Rooms of one floor, or of one house, that do not know each other.
SIDE_BY_SIDE = (
    ("te_core.backends.cpu", "te_core.backends.cuda", "te_core.backends.meta"),
    ("te_torch.modules", "te_torch.attention"),
    ("te_torch", "te_jax"),
)

# What te_core may import from outside the standard library: at any time, and only where CUDA code runs.
ALWAYS = {"numpy", "ml_dtypes"}
CUDA_LIBRARIES = {"cupy", "cupy_backends", "cuda", "cudnn", "nvmath"}
CUDA_ROOMS = tuple(f"te_core.{room}" for room in ("backends.cuda", "kernels", "libraries", "driver", "device", "tools"))


def edges() -> list[tuple[str, str, str, str]]:
    """(importer, imported, place in the source, when) over the packages."""
    return [
        (module, name, f"{path.relative_to(ROOT)}:{line}", when)
        for module, path in sources().items()
        for name, line, when in imports(module)
    ]


def ours(name: str) -> bool:
    return name.split(".")[0] in ("te_core", "te_torch", "te_cli", "te_jax")


def test_no_circle_but_these() -> None:
    assert circles() == CIRCLES


def test_every_module_stands_on_a_floor() -> None:
    homeless = [module for module in sources() if floor(module) is None]
    assert not homeless, f"put these on a floor in FLOORS: {homeless}"
    empty = [room for rooms in FLOORS.values() for room in rooms if not any(within(m, room) for m in sources())]
    assert not empty, f"nothing is in these rooms of FLOORS: {empty}"


def test_imports_go_downward() -> None:
    """For annotations only, a backend may name the types in which the ops floor states its contract."""
    wrong = []
    for importer, imported, place, when in edges():
        if not ours(imported) or (importer, imported) in UPWARD:
            continue
        if when == "typing" and (floor(importer), floor(imported)) == ("backends", "ops"):
            continue
        own, other = floor(importer), floor(imported)
        if own is None or other is None or ORDER.index(other) > ORDER.index(own):
            wrong.append(f"{place}: {importer} ({own}) imports {imported} ({other})")
    assert not wrong, "\n".join(wrong)


def test_the_upward_import_is_the_listed_one() -> None:
    """An entry that nothing uses any more goes; the one that stays is lazy."""
    for (importer, imported), allowed in UPWARD.items():
        uses = [when for a, b, _, when in edges() if (a, b) == (importer, imported)]
        assert uses == [allowed], f"{importer} -> {imported}: {uses}"


def test_neighbours_do_not_know_each_other() -> None:
    def room(module: str, rooms: tuple[str, ...]) -> str | None:
        return next((room for room in rooms if within(module, room)), None)

    wrong = []
    for importer, imported, place, _ in edges():
        for rooms in SIDE_BY_SIDE:
            own, other = room(importer, rooms), room(imported, rooms)
            if own and other and own != other:
                wrong.append(f"{place}: {importer} imports {imported}")
    assert not wrong, "\n".join(wrong)


def adapter(module: str) -> bool:
    return any(within(module, package) for package in ("te_torch", "te_cli", "te_jax"))


def test_adapters_keep_away_from_backends() -> None:
    wrong = [
        f"{place}: {importer} imports {imported}"
        for importer, imported, place, _ in edges()
        if adapter(importer) and floor(imported) == "backends"
    ]
    assert not wrong, "\n".join(wrong)


def test_te_core_imports_no_framework() -> None:
    """numpy and ml_dtypes anywhere; CUDA libraries in the CUDA rooms, and outside the backend only lazily."""
    wrong = []
    for importer, imported, place, when in edges():
        top = imported.split(".")[0]
        if adapter(importer) or ours(imported) or top in ALWAYS or top in sys.stdlib_module_names:
            continue
        room = next((r for r in CUDA_ROOMS if within(importer, r)), None)
        too_early = when == "loading" and room != "te_core.backends.cuda"
        if top not in CUDA_LIBRARIES or room is None or too_early:
            wrong.append(f"{place}: {importer} imports {imported} while {when}")
    assert not wrong, "\n".join(wrong)


_IMPORTED = """
import sys
import numpy
known, calls = set(sys.modules), [0]
sys.setprofile(lambda *_: calls.__setitem__(0, calls[0] + 1))
import te_core
sys.setprofile(None)
print(calls[0], *sorted(set(sys.modules) - known))
"""


def test_te_core_is_imported_in_a_moment() -> None:
    """By calls and returns beyond NumPy's: 26,000 take 0.03 s. Operations and backends come later."""
    done = subprocess.run([sys.executable, "-c", _IMPORTED], capture_output=True, text=True, cwd=ROOT, check=True)
    calls, *modules = done.stdout.split()
    later = [m for m in modules for room in ("ops", "layers", "backends", "tape") if within(m, f"te_core.{room}")]
    assert int(calls) <= 100_000 and later == [] and len(modules) <= 45, (calls, modules)


# Runs in a process of its own, where no framework or CUDA package can be imported and no CUDA library opened.
_BLOCKED = """
import importlib, re, sys

BLOCKED = {blocked!r}
CUDA = re.compile(r"lib(cuda|cudart|cublas|cudnn|nvrtc|nvJitLink|nvidia)")

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError("blocked: " + name)

def audit(event, args):
    if event == "ctypes.dlopen" and args[0] and CUDA.search(str(args[0])):
        raise RuntimeError("opened " + str(args[0]))

sys.meta_path.insert(0, Block())
sys.addaudithook(audit)
for name in {modules!r}:
    importlib.import_module(name)
from te_core.runtime import Runtime
if {run}:
    rt = Runtime.cpu()
    assert rt.numpy(rt.tensor([1.0, 2.0], "float32")).tolist() == [1.0, 2.0]
loaded = sorted({{name.split(".")[0] for name in sys.modules}} & BLOCKED)
assert not loaded, loaded
mapped = {{line.split()[-1] for line in open("/proc/self/maps") if CUDA.search(line.rsplit("/", 1)[-1])}}
assert not mapped, mapped
"""
_FRAMEWORKS = {"torch", "jax", "jaxlib", "tensorflow", "triton", "transformer_engine", "te_torch", "te_jax"}


def _run_blocked(modules: list[str], run: bool) -> None:
    code = _BLOCKED.format(blocked=_FRAMEWORKS | CUDA_LIBRARIES | {"nvidia"}, modules=modules, run=run)
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr


def test_import_te_core_touches_no_framework_and_no_cuda() -> None:
    _run_blocked(["te_core"], run=False)


def test_te_core_works_on_the_cpu_without_frameworks_or_driver() -> None:
    """Every module but the CUDA backend's can be imported, and the CPU runtime runs."""
    modules = [m for m in sources() if not adapter(m) and not within(m, "te_core.backends.cuda")]
    _run_blocked(modules, run=True)
