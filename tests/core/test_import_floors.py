"""Imports go downward only: the floors of docs/architecture.md, read from the sources' syntax trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# From low to high. A floor lists its rooms; `te_core.ops` stands for everything below that package.
GROUND = (
    "dtypes tensor dlpack quantized attention attention_rules precision runtime plan_cache libraries driver device "
    "recipe errors env cache arguments naming hints"
)
TORCH_GROUND = "runtime quantized precisions program_names module_names module_paths listing recipe utils not_built"
TORCH_STATE = "amax_disagreement amax_reduction availability state autocast function custom nonfinite"
FLOORS: dict[str, list[str]] = {
    "ground": [f"te_core.{room}" for room in GROUND.split()],
    "kernels": ["te_core.kernels"],
    "backends": ["te_core.backends", "te_core.backend"],
    "ops": ["te_core.ops"],
    "quantize": ["te_core.quantize"],
    "layers": ["te_core.layers"],
    "face": ["te_core.tools", "te_core.doctor", "te_core"],
    "torch ground": [f"te_torch.{room}" for room in TORCH_GROUND.split()],
    "torch tensors": ["te_torch.tensors"],
    "torch state": [f"te_torch.{room}" for room in TORCH_STATE.split()],
    "torch base": ["te_torch.base"],
    "torch modules": ["te_torch.modules", "te_torch.attention"],
    "torch transformer": ["te_torch.transformer"],
    "torch face": [f"te_torch.{room}" for room in ("tools", "training", "custom_recipes", "constants", "compat")]
    + ["te_torch"],
    "jax": ["te_jax"],
}
ORDER = list(FLOORS)

# Packages whose own `__init__` stands higher than what is in them: these names stand for nothing but themselves.
FACES = ("te_core", "te_torch")

# Rooms of one floor, or of one house, that do not know each other.
SIDE_BY_SIDE = (
    ("te_core.backends.cpu", "te_core.backends.cuda", "te_core.backends.meta"),
    ("te_torch.modules", "te_torch.attention"),
    ("te_torch", "te_jax"),
)

# The one upward reference: Runtime finds its backend by name, at first use; its type is a protocol.
UPWARD = {("te_core.runtime", "te_core.backends"): "running", ("te_core.runtime", "te_core.backend"): "typing"}

# What te_core may import from outside the standard library: at any time, and only where CUDA code runs.
ALWAYS = {"numpy", "ml_dtypes"}
CUDA_LIBRARIES = {"cupy", "cupy_backends", "cuda", "cudnn", "nvmath"}
CUDA_ROOMS = tuple(f"te_core.{room}" for room in ("backends.cuda", "kernels", "libraries", "driver", "device", "tools"))


@cache
def sources() -> dict[str, Path]:
    """Every module of the packages by its dotted name."""
    return _modules("te_core", "te_torch", "bindings/jax/te_jax")


@cache
def programs() -> dict[str, Path]:
    """Those that nothing of the packages imports."""
    return _modules("benchmarks", "examples", "tools", "tests")


def _modules(*folders: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for top in (ROOT / folder for folder in folders):
        for path in sorted(top.rglob("*.py")):
            parts = path.relative_to(top.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def floor(module: str) -> str | None:
    """The floor a module stands on."""
    for name, rooms in FLOORS.items():
        if any(module == room or (room not in FACES and within(module, room)) for room in rooms):
            return name
    return None


def imports(module: str) -> list[tuple[str, int, str]]:
    """What a module imports: (dotted name, line, when: "loading", "running" or "typing")."""
    known = sources() | programs()
    path = known[module]
    tree = ast.parse(path.read_text())
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: list[tuple[str, int, str]] = []

    def visit(node: ast.AST, when: str) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")
                base = ".".join([*above[: len(above) - node.level + 1], *filter(None, [base])])
            for alias in node.names:  # `from te_core import dtypes` names a module, `... import Runtime` does not
                full = f"{base}.{alias.name}"
                found.append((full if full in known else base, node.lineno, when))
        elif isinstance(node, ast.Call):
            found.extend((name, node.lineno, when) for name in _imported_by_call(node))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            when = "typing"
        elif when == "loading" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            when = "running"
        for child in ast.iter_child_nodes(node):
            visit(child, when)

    visit(tree, "loading")
    return found


def _imported_by_call(call: ast.Call) -> list[str]:
    """The module that `import_module("a.b")` or `import_module(f"a.{x}")` names."""
    if ast.unparse(call.func).rpartition(".")[2] not in ("import_module", "__import__") or not call.args:
        return []
    arg = call.args[0]
    if isinstance(arg, ast.JoinedStr) and arg.values:
        arg = arg.values[0]
    return [arg.value.rstrip(".")] if isinstance(arg, ast.Constant) and isinstance(arg.value, str) else []


def edges() -> list[tuple[str, str, str, str]]:
    """(importer, imported, place in the source, when) over the packages."""
    return [
        (module, name, f"{path.relative_to(ROOT)}:{line}", when)
        for module, path in sources().items()
        for name, line, when in imports(module)
    ]


def ours(name: str) -> bool:
    return name.split(".")[0] in ("te_core", "te_torch", "te_jax")


#: Modules that import one another, at whatever time. A tensor's doors are DLPack's, and DLPack's are tensors.
CIRCLES = {("te_core.dlpack", "te_core.tensor")}


def circles() -> set[tuple[str, ...]]:
    """Modules that reach one another by imports, those of programs among them."""
    known = sources() | programs()
    graph = {
        module: {name for name, _, _ in imports(module) if name in known and (module, name) not in UPWARD}
        for module in known
    }
    reached = {module: _reached(graph, module) for module in graph}
    return {
        tuple(sorted(m for m in reached[start] if start in reached[m])) for start in graph if start in reached[start]
    }


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for module in graph[waiting.pop()] - seen:
            seen.add(module)
            waiting.append(module)
    return seen


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
    return within(module, "te_torch") or within(module, "te_jax")


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
