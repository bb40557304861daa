"""`make check`: the shape of the house, drawn from the sources' syntax trees. Here stand the floors of
docs/architecture.md, who imports whom, how many lines each package has, and which modules import one another.

    python tools/house.py                          all of it
    python tools/house.py spread                   in how many files each operation and each option of layers is named
    python tools/house.py renew                    write the lines of packages into tools/budget.toml
    python tools/house.py renew --because REASON   the same where a package has grown: the reason stands on its line

Fails on a circle that CIRCLES does not list, and on a package with more lines than tools/budget.toml allows.
tests/core/test_import_floors.py checks that imports go downward.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# From low to high. A floor lists its rooms; `te_core.ops` stands for everything below that package.
GROUND = (
    "dtypes tensor dlpack quantized attention attention_rules precision runtime plan_cache libraries c_library driver "
    "described device recipe recipe_fields errors env cache arguments naming spelling hints statistics symbols tokens"
)
TORCH_GROUND = (
    "doors draws exchange export forks runtime quantized precisions program_names "
    "module_names likeness module_paths listing noting offloading recipe utils not_built shape_runs surroundings values"
)
TORCH_STATE = (
    "calls replays carried handovers weight_copies operators compiled_runs reruns amax_disagreement amax_reduction "
    "availability state updates autocast function custom nonfinite parallel"
)
FLOORS: dict[str, list[str]] = {
    "ground": [f"te_core.{room}" for room in GROUND.split()],
    "kernels": ["te_core.kernels"],
    "backends": ["te_core.backends", "te_core.backend"],
    "ops": ["te_core.ops"],
    "quantize": ["te_core.quantize"],
    "layers": ["te_core.layers"],
    "tape": ["te_core.tape"],
    "calls": ["te_core.calls"],
    "functional": ["te_core.functional"],
    "face": ["te_core.tools", "te_core.doctor", "te_core.program", "te_core.embed", "te_core.config", "te_core"],
    "torch ground": [f"te_torch.{room}" for room in TORCH_GROUND.split()],
    "torch tensors": ["te_torch.tensors"],
    "torch state": [f"te_torch.{room}" for room in TORCH_STATE.split()],
    "torch base": ["te_torch.base", "te_torch.described"],
    "torch modules": ["te_torch.modules", "te_torch.attention"],
    "torch transformer": ["te_torch.transformer"],
    "torch face": [
        f"te_torch.{room}"
        for room in (
            "tools",
            "training",
            "optimizers",
            "ops",
            "router",
            "cpp_extensions",
            "custom_recipes",
            "constants",
            "debug",
            "compat",
        )
    ]
    + ["te_torch"],
    "jax": ["te_jax"],
    "command": ["te_cli"],
}
ORDER = list(FLOORS)

# Packages whose own `__init__` stands higher than what is in them: these names stand for nothing but themselves.
FACES = ("te_core", "te_torch")

# The one upward reference: Runtime finds its backend by name, at first use; its type is a protocol.
UPWARD = {("te_core.runtime", "te_core.backends"): "running", ("te_core.runtime", "te_core.backend"): "typing"}

#: Modules that import one another, at whatever time. A tensor's doors are DLPack's, and DLPack's are tensors.
CIRCLES = {("te_core.dlpack", "te_core.tensor")}


@cache
def sources() -> dict[str, Path]:
    """Every module of the packages by its dotted name."""
    return _modules("te_core", "te_torch", "te_cli", "bindings/jax/te_jax")


@cache
def programs() -> dict[str, Path]:
    """Those that nothing of the packages imports."""
    return _modules("benchmarks", "examples", "tools", "tests")


@cache
def known_modules() -> dict[str, Path]:
    """Those of packages and of programs."""
    return sources() | programs()


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


@cache
def imports(module: str) -> list[tuple[str, int, str]]:
    """What a module imports: (dotted name, line, when: "loading", "running" or "typing")."""
    known = known_modules()
    path = known[module]
    text = path.read_text()
    # Expressions are most of a tree, and import only by a call that is named so.
    parts = ast.iter_child_nodes if "import_module(" in text or "__import__(" in text else _blocks
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
        for child in parts(node):
            visit(child, when)

    visit(ast.parse(text), "loading")
    return found


def _blocks(node: ast.AST) -> Iterator[ast.AST]:
    """The statements inside of a statement."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        yield from getattr(node, field, ())


def _imported_by_call(call: ast.Call) -> list[str]:
    """The module that `import_module("a.b")` or `import_module(f"a.{x}")` names."""
    if ast.unparse(call.func).rpartition(".")[2] not in ("import_module", "__import__") or not call.args:
        return []
    arg = call.args[0]
    if isinstance(arg, ast.JoinedStr) and arg.values:
        arg = arg.values[0]
    return [arg.value.rstrip(".")] if isinstance(arg, ast.Constant) and isinstance(arg.value, str) else []


def circles() -> set[tuple[str, ...]]:
    """Modules that reach one another by imports, those of programs among them."""
    known = known_modules()
    return circles_of(
        {
            module: {name for name, _, _ in imports(module) if name in known and (module, name) not in UPWARD}
            for module in known
        }
    )


def circles_of(graph: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Those that reach one another where each leads to what it is given with."""
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


#: Parts across packages whose size is watched on its own.
PARTS = {"all of attention": ("te_torch.attention", "te_torch.transformer.multihead")}
LONGEST = 8  # files that are shown


def lines(*paths: Path) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def package(module: str) -> str:
    """Of te_core, te_torch, te_cli and te_jax, or the one below them that a module is in."""
    parts = module.split(".")
    deep = len(parts) > 2 or sources()[module].name == "__init__.py"
    return ".".join(parts[: 2 if deep else 1])


def rows() -> list[tuple[str, str, int, int]]:
    """(floor, package, files, lines) from the highest floor to the lowest, what has none of them first."""
    found: dict[tuple[str, str], list[int]] = {}
    for module in sources():
        found.setdefault((floor(module) or "none", package(module)), []).append(lines(sources()[module]))
    order = {name: i for i, name in enumerate(ORDER)}
    places = sorted(found, key=lambda place: (-order.get(place[0], len(order)), place[1]))
    return [(*place, len(found[place]), sum(found[place])) for place in places]


def table() -> list[str]:
    """Files and lines of each floor's packages, of parts, and the longest files."""
    text = [f"{'floor':<18}{'package':<25}{'files':>5}{'lines':>8}"]
    above = None
    for name, room, files, count in rows():
        text.append(f"{'' if name == above else name:<18}{room:<25}{files:>5}{count:>8}")
        above = name
    kernels = [p for p in sorted((ROOT / "te_core" / "kernels").rglob("*")) if p.suffix in (".cu", ".cuh")]
    text.append(f"{'besides':<18}{'CUDA of the kernels':<25}{len(kernels):>5}{lines(*kernels):>8}")
    for name, rooms in PARTS.items():
        inside = [path for m, path in sources().items() if any(within(m, room) for room in rooms)]
        text.append(f"{'':<18}{name:<25}{len(inside):>5}{lines(*inside):>8}")
    longest = sorted(sources().values(), key=lines, reverse=True)[:LONGEST]
    text += [
        f"{'longest' * (path == longest[0]):<18}{path.relative_to(ROOT)!s:<30}{lines(path):>8}" for path in longest
    ]
    return text


def judged(found: set[tuple[str, ...]], listed: set[tuple[str, ...]]) -> tuple[list[str], bool]:
    """The circles there are, and whether these are the listed ones."""
    text = [f"circle: {' - '.join(c)}{'' if c in listed else ', which is not listed'}" for c in sorted(found)]
    text += [f"circle: {' - '.join(c)} is listed and not there any more" for c in sorted(listed - found)]
    return text or ["no circles"], found == listed


BUDGET = ROOT / "tools" / "budget.toml"
SLACK = 200  # lines that a package may have fewer than its budget, before that has to be renewed
_HEAD = """# The lines that a package may have. `python tools/house.py renew` lowers them; see there how one is raised.
"""


def budget() -> dict[str, tuple[int, str]]:
    """{package: (lines that it may have, why it grew)}."""
    found = re.findall(r"^(\w+) = (\d+)(?:  # (.*))?$", BUDGET.read_text(), re.M) if BUDGET.is_file() else []
    return {name: (int(count), reason) for name, count, reason in found}


def counted() -> dict[str, int]:
    """{package: its lines}."""
    found: dict[str, int] = {}
    for module, path in sources().items():
        top = module.partition(".")[0]
        found[top] = found.get(top, 0) + lines(path)
    return found


def spent(counts: dict[str, int], allowed: dict[str, tuple[int, str]]) -> tuple[list[str], bool]:
    """What each package has and may have, and whether all keep to it."""
    text, good = [], True
    for name, count in counts.items():
        most = allowed.get(name, (0, ""))[0]
        text.append(f"{name}: {count} lines of {most}")
        if not most - SLACK <= count <= most:
            good = False
            do = "--because REASON" if count > most else "to keep what was won"
            text[-1] += f". To do: {'make it smaller, or ' * (count > most)}python tools/house.py renew {do}"
    return text, good


def renewed(counts: dict[str, int], allowed: dict[str, tuple[int, str]], because: str) -> str:
    """The text of the budget that is as large as the packages are."""
    rows = []
    for name, count in counts.items():
        most, reason = allowed.get(name, (count, ""))
        if count > most and not because:
            raise SystemExit(f"{name} has {count - most} lines more than its budget: say why by --because REASON")
        reason = because if count > most else reason
        rows.append(f"{name} = {count}{f'  # {reason}' * bool(reason)}\n")
    return _HEAD + "".join(rows)


def operations() -> list[str]:
    """The functions that `operation` of te_core/ops/declare.py declares."""
    trees = [ast.parse(path.read_text()) for module, path in sources().items() if within(module, "te_core.ops")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if any(ast.unparse(d).startswith("operation(") for d in f.decorator_list)]


def options() -> list[str]:
    """The keys of dictionaries under te_core/layers whose values are an `Option`, or another one with changes."""
    trees = [ast.parse(path.read_text()) for module, path in sources().items() if within(module, "te_core.layers")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    made = {"Option"}
    for node in nodes:
        if isinstance(node, ast.Assign) and _root(node.value) in made:
            made |= {name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)}
    pairs = [pair for node in nodes if isinstance(node, ast.Dict) for pair in zip(node.keys, node.values, strict=True)]
    named = [(key.value, _root(value)) for key, value in pairs if isinstance(key, ast.Constant)]
    return sorted({str(name) for name, value in named if value in made})


def _root(value: ast.expr) -> str:
    """The name with which an expression, or the first one of a tuple, begins."""
    return re.split(r"[(.,]", ast.unparse(value).lstrip("("))[0]


def spread() -> list[str]:
    """In how many files an operation is named beside its callers, and an option at all, the most first."""
    kernels = {path.stem: path.read_text() for path in (ROOT / "te_core" / "kernels").glob("*.cu")}
    texts = {module: path.read_text() for module, path in (sources() | programs()).items()}
    product = {module: text for module, text in texts.items() if module.startswith(("te_core", "te_torch"))}
    words = {name: set(re.findall(r"\w+", text)) for name, text in (product | kernels).items()}
    rooms = ("te_core.ops", "te_core.backends", "te_core.backend", "te_core.described")
    floors = {name for name in words if name in kernels or any(within(name, room) for room in rooms)}
    tests = {name for name in texts if within(name, "tests.core")}
    text = ["operation: files of te_core without callers, files of tests/core"]
    counts = [(sum(n in words[m] for m in floors), sum(f".{n}(" in texts[m] for m in tests), n) for n in operations()]
    text += [f"{name:<30}{files:>4}{more:>4}" for files, more, name in sorted(counts, reverse=True)]
    text.append("option of layers: files of te_core and te_torch")
    found = [(sum(name in words[module] for module in product), name) for name in options()]
    return text + [f"{name:<30}{files:>4}" for files, name in sorted(found, reverse=True)]


def main(*arguments: str) -> int:
    """Show the house; 0 if its circles are the listed ones and no package is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("all", "spread", "renew"), default="all")
    parser.add_argument("--because", default="", help="why a package has grown")
    given = parser.parse_args(arguments)
    if given.what == "spread":
        print(*spread(), sep="\n")
        return 0
    if given.what == "renew":
        BUDGET.write_text(renewed(counted(), budget(), given.because))
        return 0
    text, good = judged(circles(), CIRCLES)
    more, kept = spent(counted(), budget())
    print(*table(), *text, *more, sep="\n")
    return not (good and kept)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
