"""Tables of docs/guides/16-errors.md, read from the code that raises: every class of error, and the causes of each.

python tools/error_table.py classes
python tools/error_table.py causes
"""

from __future__ import annotations

import ast
import builtins
import inspect
import keyword
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from te_core.described import read

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT / "te_core", ROOT / "te_torch", ROOT / "te_cli", ROOT / "bindings" / "jax" / "te_jax")
BASE = "_FourPartError"  # of te_core.errors: every error that a user meets derives from it
_ALSO = re.compile(r" Also |; an? \w+, as documented|: programs guard")  # said in the last column
_NAME = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*")
PARTS = ("operation", "got", "allowed", "do")
Named = Sequence[tuple[str, ast.expr]]


@cache
def trees() -> dict[str, ast.Module]:
    """Module -> its syntax, of all that is shipped."""
    files = [(file, folder.parent) for folder in FOLDERS for file in sorted(folder.rglob("*.py"))]
    names = [".".join(file.relative_to(top).with_suffix("").parts).removesuffix(".__init__") for file, top in files]
    return {name: ast.parse(file.read_text()) for name, (file, _) in zip(names, files, strict=True)}


def classes() -> dict[str, tuple[str, list[str], str]]:
    """Class -> (its module, its bases, its docstring): general ones before those that derive from them."""
    found = {
        node.name: (module, [ast.unparse(base) for base in node.bases], ast.get_docstring(node) or "")
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    ours = [BASE]
    for name in ours:  # which grows
        ours += [other for other, (_, bases, _) in found.items() if name in bases and other not in ours]
    return {name: found[name] for name in ours if name != BASE}


def said(node: ast.expr | None, named: Named = ()) -> str:
    """What a part of a message says, "..." for what only the call knows. `named`: texts that have names by then."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(said(part, named) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return said(node.value if isinstance(node.value, ast.Name) else None, named)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return said(node.left, named) + said(node.right, named)
    places = [i for i, (name, _) in enumerate(named) if isinstance(node, ast.Name) and name == node.id]
    return said(named[places[-1]][1], named[: places[-1]]) if places else "..."


def named_before(function: ast.FunctionDef, line: int) -> Named:
    """What names have been given in a function before this line, in order."""
    found: list[tuple[int, str, ast.expr]] = []
    for node in ast.walk(function):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            sum_ = ast.BinOp(ast.Name(node.target.id), node.op, node.value)
            found.append((node.lineno, node.target.id, sum_))
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=False) if several else [(target, value)]  # type: ignore[attr-defined]
            found += [(node.lineno, one.id, part) for one, part in pairs if isinstance(one, ast.Name)]
    return [(name, value) for at, name, value in sorted(found, key=lambda one: one[0]) if at < line]


def declared(call: ast.Call) -> Iterator[tuple[str, str]]:
    """(what is allowed, what to do) of the conditions in an `operation` or `rules` of te_core.ops.declare."""
    for text in [one.value for one in call.args if isinstance(one, ast.Constant)]:
        for head, about in read(inspect.cleandoc(str(text)).replace(":\n    ", ": ")).items():
            allowed, _, do = re.sub("{.*?}", "...", about).partition("; ")
            named = [name for name in _NAME.findall(head) if name not in dir(builtins) and not keyword.iskeyword(name)]
            if named[0] == "must":
                yield allowed, do or f"correct {re.sub('^_[^.]*[.]', '', named[1])}"


@cache
def shortened() -> dict[tuple[str, str], list[ast.expr]]:
    """(module, name) -> a class and the first parts of its message, of `name = partial(Class, operation)`."""
    found: dict[tuple[str, str], list[ast.expr]] = {}
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                if ast.unparse(node.value.func) == "partial":
                    found[module, ast.unparse(node.targets[0])] = node.value.args
    for module, tree in trees().items():
        for node in [one for one in tree.body if isinstance(one, ast.ImportFrom) and one.module]:
            for alias in node.names:
                if (node.module, alias.name) in found:
                    found[module, alias.asname or alias.name] = found[node.module, alias.name]
    return found


def causes() -> dict[str, dict[tuple[str, str], str]]:
    """Class -> (what is allowed, what to do) -> the operation, or the part that raises where only the call knows it."""
    found: dict[str, dict[tuple[str, str], str]] = {name: {} for name in classes()}
    for module, tree in trees().items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = {id(node): function for function in functions for node in ast.walk(function)}  # the innermost one
        for node in ast.walk(tree):
            for call in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                by = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
                if isinstance(call, ast.Call) and by in ("operation", "rules"):
                    place = node.name if by == "operation" else f"in `{module}`"
                    found["ArgumentError"] |= dict.fromkeys(declared(call), place)
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            kind, *first = shortened().get((module, name), [ast.Name(name)])
            if isinstance(node, ast.Call) and (name := getattr(kind, "id", "")) in found:
                parts = [*first, *node.args]
                given = dict(zip(PARTS, parts, strict=False)) | {k.arg: k.value for k in node.keywords if k.arg}
                named = named_before(inside[id(node)], node.lineno) if id(node) in inside else ()
                operation, allowed, do = (said(given.get(part), named) for part in ("operation", "allowed", "do"))
                if "..." not in (allowed, do):  # else the call that raises is handed the text
                    place = f"in `{'.'.join(module.split('.')[:3])}`"
                    found[name].setdefault((allowed, do), place if operation.startswith("...") else operation)
    return found


def row(*cells: str) -> str:
    """A line of a table."""
    plain = [" ".join(cell.split()).replace("|", "\\|").replace("<", "\\<").replace("*", "\\*") for cell in cells]
    return f"| {' | '.join(plain)} |"


def class_table() -> Iterator[str]:
    """A row for each class: what it means, and what catches it."""
    yield from ("| Class | Means | `except` also catches it as |", "|---|---|---|")
    for name, (module, bases, doc) in classes().items():
        caught = ", ".join(f"`{base}`" for base in bases if base != BASE)
        yield row(f"`{module}.{name}`", _ALSO.split(doc.splitlines()[0])[0], caught)


def cause_tables() -> Iterator[str]:
    """A table for each class that says its causes where it is raised."""
    for name, found in causes().items():
        if found:
            yield from (f"### {name}", "", "| While | Allowed | To do |", "|---|---|---|")
            yield from sorted(row(operation, allowed, do) for (allowed, do), operation in found.items())
            yield ""


if __name__ == "__main__":
    print(*{"classes": class_table, "causes": cause_tables}[sys.argv[1]](), sep="\n")
