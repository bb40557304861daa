"""Size limits: medians tell little about how code reads, the tail does. The limits are in LIMITS.

A place that has to be larger is listed by name, with its size and the reason, in tools/exceptions.toml; an
entry that is no longer needed fails the check too, and so does one of another size: the list only shrinks.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
EXCEPTIONS = "tools/exceptions.toml"
FOLDERS = ("te_core", "te_torch", "bindings", "tests", "benchmarks", "examples", "tools")

LIMITS = {
    "python-file": 800,  # lines
    "python-function": 120,  # lines, decorators not counted
    "parameters": 8,  # of a Python function; self, cls, *args and **kwargs not counted
    "nesting": 4,  # control blocks inside one another, Python and CUDA
    "cuda-file": 900,
    "cuda-function": 80,
    "cuda-kernel": 250,
}


class Size(NamedTuple):
    """One measured thing: which limit it falls under, its name, its size, where it starts."""

    rule: str
    name: str
    value: int
    line: int


# --- Python ---------------------------------------------------------------------------------------

_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def python_sizes(path: str, text: str) -> Iterator[Size]:
    """The sizes of a Python file and its functions; functions are named `file::Class.function`."""
    yield Size("python-file", path, text.count("\n"), 1)
    yield from _python_functions(ast.parse(text), f"{path}::")


def _python_functions(node: ast.AST, prefix: str) -> Iterator[Size]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            name = prefix + child.name
            if not isinstance(child, ast.ClassDef):
                line, end = child.lineno, child.end_lineno or child.lineno
                yield Size("python-function", name, end - line + 1, line)
                yield Size("parameters", name, _parameters(child), line)
                yield Size("nesting", name, max(map(_depth, child.body)), line)
            yield from _python_functions(child, name + ".")
        else:
            yield from _python_functions(child, prefix)


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len(given) - bool(given and given[0].arg in ("self", "cls"))


def _depth(node: ast.AST) -> int:
    """How deep control blocks nest from here; an elif is as deep as its if, a nested function starts anew."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return 0
    inside = (_depth(child) - _is_elif(node, child) for child in ast.iter_child_nodes(node))
    return isinstance(node, _BLOCKS) + max(inside, default=0)


def _is_elif(node: ast.AST, child: ast.AST) -> bool:
    """In the tree an elif is an if inside the else; only where it stands on the page tells the two apart."""
    return isinstance(node, ast.If) and isinstance(child, ast.If) and child.col_offset == node.col_offset


# --- CUDA -----------------------------------------------------------------------------------------

_NOISE = re.compile(  # comments, then raw, plain and character literals
    r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL
)
_DECORATION = re.compile(r"__\w+__\s*(\([^()]*\))?|template\s*<[^{]*?>\s*(?=\w)")
_CONTROL = re.compile(r"(?:(?:case\b[^:]*|default|\w+)\s*:\s*)*(?:if|else|for|while|do|switch)\b")
_SCOPE = re.compile(r"\b(?:namespace\b|extern\s*$|(?:struct|class|union|enum)\b(?![^<]*>)[^()]*$)")


def cuda_sizes(path: str, text: str) -> Iterator[Size]:
    """The sizes of a CUDA file and its functions; functions are named `file::function`."""
    yield Size("cuda-file", path, text.count("\n"), 1)
    stack: list[tuple[str, str, int]] = []  # kind, name, line of each open brace
    deepest = 0
    for head, brace, line in _braces(_code(text)):
        if brace == "{":
            in_function = any(kind in ("function", "kernel") for kind, _, _ in stack)
            stack.append((*_kind(head, in_function), line))
            deepest = max(deepest, sum(kind == "control" for kind, _, _ in stack))
        elif stack:
            kind, name, start = stack.pop()
            if kind in ("function", "kernel"):
                yield Size(f"cuda-{kind}", f"{path}::{name}", line - start + 1, start)
                yield Size("nesting", f"{path}::{name}", deepest, start)
                deepest = 0


def _code(text: str) -> str:
    """The text without comments, strings, preprocessor lines and #else branches; line numbers stay."""
    bare = _NOISE.sub(lambda m: "\n" * m[0].count("\n"), text)
    lines, skipping = [], [False]
    continued = False
    for line in bare.split("\n"):
        directive = re.match(r"\s*#\s*(\w+)", line)
        if directive and directive[1] in ("if", "ifdef", "ifndef"):
            skipping.append(skipping[-1])
        elif directive and directive[1] in ("else", "elif"):
            skipping[-1] = True  # one branch is enough to measure, and braces must not be counted twice
        elif directive and directive[1] == "endif" and len(skipping) > 1:
            skipping.pop()
        drop = bool(directive) or continued or skipping[-1]
        continued = (bool(directive) or continued) and line.rstrip().endswith("\\")
        lines.append("" if drop else line)
    return "\n".join(lines)


def _braces(code: str) -> Iterator[tuple[str, str, int]]:
    """Each brace with what stands before it since the last statement's end, and its line."""
    start, parens, line = 0, 0, 1
    for at, char in enumerate(code):
        line += char == "\n"
        parens += (char == "(") - (char == ")")
        if char in "{}":
            yield code[start:at].strip(), char, line
            start = at + 1
        elif char == ";" and parens == 0:
            start = at + 1


def _kind(head: str, in_function: bool) -> tuple[str, str]:
    """What a brace opens, told from the text before it."""
    if in_function:
        return ("control" if _CONTROL.match(head) else "other"), ""
    named = re.search(r"([\w~]+|operator\s*\S+?)\s*\(", _DECORATION.sub(" ", head))
    if _SCOPE.search(head) or named is None or head.endswith(("=", ",", "(")):
        return "other", ""
    return ("kernel" if "__global__" in head else "function"), named[1]


# --- the check ------------------------------------------------------------------------------------


def measure(root: Path = ROOT) -> Iterator[Size]:
    """Every size in the tree."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix == ".py":
                yield from python_sizes(name, path.read_text())
            elif path.suffix in (".cu", ".cuh"):
                yield from cuda_sizes(name, path.read_text())


def violations(sizes: list[Size], exceptions: list[dict[str, str | int]]) -> list[str]:
    """What is too large and not excepted, and which exceptions are stale, too wide or without a reason."""
    listed = {(e["rule"], e["where"]): e for e in exceptions}
    problems = []
    if len(listed) < len(exceptions):
        problems.append(f"{EXCEPTIONS}: a place is listed twice")
    over: dict[tuple[str, str], Size] = {}  # overloads share a name: the largest counts
    for size in sizes:
        key = (size.rule, size.name)
        if size.value > LIMITS[size.rule] and (key not in over or over[key].value < size.value):
            over[key] = size
    for key, (rule, name, value, line) in over.items():
        entry = listed.pop(key, None)
        place = name if "::" in name else f"{name}::"
        shown = f"{place.split('::')[0]}:{line}: {rule} {place.split('::')[1]}".rstrip()
        if entry is None:
            problems.append(f"{shown}: {value}, limit {LIMITS[rule]}")
        elif value > int(entry["size"]):
            problems.append(f"{shown}: {value}, its exception allows {entry['size']}")
        elif value < int(entry["size"]):
            problems.append(f"{EXCEPTIONS}: {rule} {name} is down to {value} from {entry['size']}: lower its size")
        elif not str(entry.get("reason", "")).strip():
            problems.append(f"{EXCEPTIONS}: {rule} {name} has no reason")
    stale = [f"{EXCEPTIONS}: {rule} {where} is within the limit or gone: remove it" for rule, where in listed]
    return problems + stale


def main() -> int:
    """Print what is wrong; 0 if nothing is."""
    sizes = list(measure())
    problems = violations(sizes, tomllib.loads((ROOT / EXCEPTIONS).read_text()).get("exception", []))
    print("\n".join(problems) or f"{len(sizes)} sizes within their limits")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
