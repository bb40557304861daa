"""What te_core and te_torch remember between calls, beside objects that callers hold, from the sources' syntax trees.

python tools/remembered.py                   every place, by kind, and how many there are
python tools/remembered.py --at 5669511      beside those of that revision
python tools/remembered.py --check           whether no kind has more than MOST (part of `make check`)

A container counts where a function changes it that runs after the import: constant tables and what decorators fill
while modules are imported do not.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("te_core", "te_torch")

#: How many places of a kind there may be. Who removes some lowers it.
MOST = {
    "cached function": 21,
    "container": 43,
    "rebound name": 19,
    "PlanCache": 6,
    "plans.get": 3,
    "asks is_compiling": 4,
}
#: These two are what "remembers something between calls" counts.
REMEMBERING = ("cached function", "container")

_CACHES = ("lru_cache", "cache")
_CONTAINERS = (
    "dict list set deque defaultdict OrderedDict Counter ChainMap bytearray WeakValueDictionary WeakKeyDictionary "
    "WeakSet PlanCache"
).split()
_LITERALS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
_CHANGES = (
    "setdefault update add append appendleft extend insert put pop popitem popleft clear remove discard move_to_end"
).split()
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Place(NamedTuple):
    """One thing that is counted: its kind, where it is, what it is called."""

    kind: str
    file: str
    line: int
    name: str


class _Module:
    """One file: what its names stand for, and what its functions do to names of modules and classes."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.tree = file, ast.parse(text)
        parts = file.removesuffix(".py").split("/")
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.imported: dict[str, str] = {}  # what a name stands for, by its full name
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                self.imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        self.owned: dict[str, tuple[int, bool]] = {}  # a full name, its line, whether it is a container
        self.changed: dict[str, set[str]] = {}  # a full name, functions that change what is in it
        self.rebound: dict[str, set[str]] = {}  # a full name, functions that give it another value
        self.mentioned: set[str] = set()  # full names that are spoken of
        self.loading: set[str] = set()  # and of functions that the module calls itself, or decorates with
        self._calls: set[int] = set()
        self._own(self.tree.body, self.name)
        for node in self.tree.body:
            self._look(node)

    def full(self, dotted: str) -> str:
        """A name of this file as all files say it."""
        first, dot, rest = dotted.partition(".")
        return self.imported.get(first, f"{self.name}.{first}") + dot + rest

    def _own(self, body: list[ast.stmt], prefix: str) -> None:
        for node in _statements(body):
            if isinstance(node, ast.ClassDef):
                self._own(node.body, f"{prefix}.{node.name}")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name, value in (pair for target in targets for pair in _paired(target, node.value)):
                    if isinstance(name, ast.Name):
                        self.owned[f"{prefix}.{name.id}"] = (node.lineno, _holds(value))

    def _look(self, node: ast.AST, owner: str = "") -> None:
        """Go into what a module says outside of functions."""
        for decorator in getattr(node, "decorator_list", ()):
            self._load(decorator)
        if isinstance(node, _FUNCTIONS):
            self._look_inside(node, f"{owner}{node.name}", owner[:-1])
            for decorator in node.decorator_list:
                self._look(decorator)
        elif isinstance(node, ast.Lambda):
            self._look_inside(node, "lambda", owner[:-1])
        else:
            self._mention(node)
            for child in ast.iter_child_nodes(node):
                self._look(child, f"{owner}{node.name}." if isinstance(node, ast.ClassDef) else owner)

    def _mention(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self._load(node.func)
        elif isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in self._calls:
            self.mentioned.add(self.full(_dotted(node) or ""))

    def _load(self, function: ast.expr) -> None:
        self.loading.add(self.full(_dotted(function) or ""))
        self._calls.update(map(id, ast.walk(function)))

    def _look_inside(self, function: ast.AST, name: str, owner: str) -> None:
        spoken_global = {n for node in ast.walk(function) if isinstance(node, ast.Global) for n in node.names}
        local = _local(function) - spoken_global
        decorators = {id(part) for d in getattr(function, "decorator_list", ()) for part in ast.walk(d)}

        def full(node: ast.AST) -> str | None:
            dotted = _dotted(node)
            if dotted is None or dotted.partition(".")[0] in local - {"cls"}:
                return None
            if owner and dotted.startswith(("cls.", "self.__class__.")):
                return f"{self.name}.{owner}.{dotted.rpartition('.')[2]}"
            return self.full(dotted)

        def note(found: dict[str, set[str]], node: ast.AST) -> None:
            if known := full(node):
                found.setdefault(known, set()).add(f"{self.name}.{name}")

        for node in ast.walk(function):
            if id(node) in decorators:
                continue
            if isinstance(node, (ast.Name, ast.Attribute)):
                self.mentioned.add(full(node) or "")
                if isinstance(node.ctx, ast.Store) and (isinstance(node, ast.Attribute) or node.id in spoken_global):
                    note(self.rebound, node)
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                note(self.changed, node.value)
            elif isinstance(node, ast.AugAssign):
                note(self.changed, node.target)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
                note(self.changed, node.func.value)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a body, and of what is inside of an `if`, a `try` or a `with` of it."""
    for node in body:
        yield node
        for field in ("body", "orelse", "handlers", "finalbody"):
            if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                yield from _statements(getattr(node, field, []))


def _paired(target: ast.expr, value: ast.expr | None) -> list[tuple[ast.expr, ast.expr | None]]:
    """What gets which value where one statement gives several."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def _holds(value: ast.AST | None) -> bool:
    """Whether this makes a container."""
    if isinstance(value, ast.Call):
        return (_dotted(value.func) or "").rpartition(".")[2] in _CONTAINERS
    return isinstance(value, _LITERALS)


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return None


def _local(function: ast.AST) -> set[str]:
    """Names that a function, or one inside of it, gives values of its own."""
    nodes = list(ast.walk(function))
    return {node.arg for node in nodes if isinstance(node, ast.arg)} | {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def places(root: Path) -> list[Place]:
    """All that counts below a folder that has the packages."""
    modules = [
        _Module(str(path.relative_to(root)), path.read_text())
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    ]
    found = [place for module in modules for place in _spoken(module)]
    owned = {name: (module, *facts) for module in modules for name, facts in module.owned.items()}
    aliases = {f"{m.name}.{name}": full for m in modules for name, full in m.imported.items()}
    loading = {name for m in modules for name in m.loading} - {name for m in modules for name in m.mentioned}
    changed, rebound = (
        _writers((getattr(m, kind) for m in modules), aliases, loading) for kind in ("changed", "rebound")
    )
    for name, (module, line, holds) in owned.items():
        short = name.removeprefix(module.name + ".")
        if holds and name in changed | rebound:
            found.append(Place("container", module.file, line, short))
        elif name in rebound:
            found.append(Place("rebound name", module.file, line, short))
    return sorted(found)


def _writers(of_modules: Iterator[dict[str, set[str]]], aliases: dict[str, str], loading: set[str]) -> set[str]:
    """Names that a function writes to which does not only run while modules are imported, as those of `loading` do."""
    return {
        aliases.get(name, name)
        for written in of_modules
        for name, functions in written.items()
        if any(function not in loading and not function.endswith(".__init_subclass__") for function in functions)
    }


def _spoken(module: _Module) -> Iterator[Place]:
    """What shows in a file by itself."""
    asked = False
    for node in ast.walk(module.tree):
        if isinstance(node, _FUNCTIONS):
            if any(_is_cache(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list):
                yield Place("cached function", module.file, node.lineno, node.name)
        elif isinstance(node, ast.Call):
            yield from _called(module, node)
        if not asked and isinstance(node, (ast.Name, ast.Attribute)):
            asked = (_dotted(node) or "").rpartition(".")[2] == "is_compiling"
            if asked:
                yield Place("asks is_compiling", module.file, node.lineno, "")


def _called(module: _Module, node: ast.Call) -> Iterator[Place]:
    name = _dotted(node.func) or ""
    if name.rpartition(".")[2] == "PlanCache":
        yield Place("PlanCache", module.file, node.lineno, "")
    elif name.endswith("plans.get"):
        yield Place("plans.get", module.file, node.lineno, name)
    elif isinstance(node.func, ast.Call) and _is_cache(node.func.func):  # lru_cache(256)(function)
        yield Place("cached function", module.file, node.lineno, ast.unparse(node.args[0]))
    elif _is_cache(node.func) and node.args and isinstance(node.args[0], (ast.Name, ast.Attribute, ast.Lambda)):
        yield Place("cached function", module.file, node.lineno, ast.unparse(node.args[0]))


def _is_cache(node: ast.AST) -> bool:
    return (_dotted(node) or "").rpartition(".")[2] in _CACHES


def places_at(revision: str) -> list[Place]:
    """Those of a revision."""
    packed = subprocess.run(["git", "archive", revision, *PACKAGES], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder)
        return places(Path(folder))


def counted(found: list[Place]) -> dict[str, int]:
    """How many there are of each kind."""
    return {kind: sum(place.kind == kind for place in found) for kind in MOST}


def too_many(found: list[Place]) -> list[str]:
    """What is wrong with them."""
    return [
        f"remembered: {count} of the kind {kind!r}, at most {MOST[kind]} are allowed: remove one (tools/remembered.py)"
        for kind, count in counted(found).items()
        if count > MOST[kind]
    ]


def table(now: list[Place], before: list[Place] | None) -> list[str]:
    """Every place, and how many there are."""
    rows = [f"{p.kind:<18}{f'{p.file}:{p.line}':<52}{p.name}" for p in now]
    then = counted(before) if before is not None else {}
    here = counted(now)
    rows.append(f"{'':<26}now{'then' * bool(then):>8}")
    rows += [f"{kind:<22}{here[kind]:>7}{then.get(kind, ''):>8}" for kind in MOST]
    both = [str(sum(count[kind] for kind in REMEMBERING)) for count in (here, then) if count]
    return [*rows, f"{'remembers':<22}{both[0]:>7}{both[-1] if then else '':>8}"]


def main() -> int:
    """Show or check them; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", metavar="REVISION", help="compare with a revision")
    parser.add_argument("--check", action="store_true", help="only say which kinds have too many")
    options = parser.parse_args()
    now = places(ROOT)
    wrong = too_many(now)
    if not options.check:
        print(*table(now, places_at(options.at) if options.at else None), sep="\n")
    if wrong:
        print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
