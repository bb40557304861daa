"""Faults by operators over the syntax tree: each change that could be made to a Python source, and its name.

A condition holds always or never, an operand of `and` is left out, a comparison has its edge elsewhere, a sum misses a
term, two arguments change places, an argument is left out or is None, a result or a gradient is None, a slice keeps its
tail, a statement is gone ... `tools/mutants.py --sample` takes some of them by chance.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

#: How a comparison is written, and what it becomes.
_COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.BitAnd: "|",
    ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip


class Change(NamedTuple):
    """A part of a source that becomes another text."""

    operator: str
    line: int
    begin: int  # of the part, in characters
    end: int
    text: str

    def applied(self, source: str) -> str:
        """The source with the fault."""
        return source[: self.begin] + self.text + source[self.end :]


class _Source:
    """A text, and where the nodes of its tree stand in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = text.split("\n")
        self._begins = [0]
        for line in self._lines:
            self._begins.append(self._begins[-1] + len(line) + 1)

    def place(self, line: int, column: int) -> int:
        """Columns of a tree count bytes."""
        return self._begins[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: Any) -> tuple[int, int]:
        return self.place(node.lineno, node.col_offset), self.place(node.end_lineno, node.end_col_offset)

    def of(self, node: Any) -> str:
        """The node as it stands there, safe within any expression."""
        begin, end = self.span(node)
        text = self.text[begin:end]
        return (
            text if isinstance(node, (ast.Name, ast.Constant, ast.Attribute, ast.Call, ast.Subscript)) else f"({text})"
        )


def changes(text: str, lines: Container[int] | None = None) -> list[Change]:
    """Every change of a source, in the order of its lines; or those that begin in some of its lines."""
    source, found, tree = _Source(text), {}, ast.parse(text)
    types = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
    said = {id(part) for node in types if node is not None for part in ast.walk(node)}  # what computes nothing
    for node in ast.walk(tree):
        line = getattr(node.iter if isinstance(node, ast.comprehension) else node, "lineno", 0)
        if line and id(node) not in said and (lines is None or line in lines):
            for operator, place, new in _of(node, source):
                begin, end = source.span(place)
                if new != text[begin:end]:
                    found[begin, end, new] = Change(operator, place.lineno, begin, end, new)
    return sorted(found.values(), key=lambda c: (c.line, c.begin, c.operator, c.text))


Found = tuple[str, Any, str]  # the operator, the part that changes, its new text


def _of(node: Any, s: _Source) -> Iterator[Found]:
    for kind, operators in _OPERATORS.items():
        if isinstance(node, kind):
            for operator in operators:
                yield from operator(node, s)


def _tested(node: Any, s: _Source) -> Iterator[Found]:
    yield "always", node.test, "True"
    yield "never", node.test, "False"


def _filtered(node: Any, s: _Source) -> Iterator[Found]:
    for condition in node.ifs:
        yield "every", condition, "True"
    if not node.ifs:
        yield "first alone", node.iter, f"list({s.of(node.iter)})[:1]"


def _chosen(node: Any, s: _Source) -> Iterator[Found]:
    yield "one choice", node, s.of(node.body)
    yield "other choice", node, s.of(node.orelse)


def _operands(node: Any, s: _Source) -> Iterator[Found]:
    word = " and " if isinstance(node.op, ast.And) else " or "
    for i in range(len(node.values)):
        rest = [s.of(value) for j, value in enumerate(node.values) if j != i]
        yield "operand left out", node, f"({word.join(rest)})" if len(rest) > 1 else rest[0]
    yield "and for or", node, f"({(' or ' if word == ' and ' else ' and ').join(map(s.of, node.values))})"


def _negated(node: Any, s: _Source) -> Iterator[Found]:
    yield "sign", node, s.of(node.operand)


def _compared(node: Any, s: _Source) -> Iterator[Found]:
    for i in range(len(node.ops)):
        parts = [s.of(node.left)]
        for j, (op, side) in enumerate(zip(node.ops, node.comparators, strict=True)):
            parts += [_COMPARED[type(op)][i == j], s.of(side)]
        yield "comparison", node, " ".join(parts)


def _computed(node: Any, s: _Source) -> Iterator[Found]:
    left, right = s.of(node.left), s.of(node.right)
    if type(node.op) in _COMPUTED:
        yield "sum or product", node, f"({left} {_COMPUTED[type(node.op)]} {right})"
    yield "term left out", node, left
    yield "term left out", node, right


def _constant(node: Any, s: _Source) -> Iterator[Found]:
    value = node.value
    if value is True or value is False:
        yield "flag", node, str(not value)
    elif isinstance(value, (int, float)):
        for other in (value + 1, value - 1, 0, 2 * value):
            yield "number", node, repr(other)


def _called(node: Any, s: _Source) -> Iterator[Found]:
    plain = [a for a in node.args if not isinstance(a, ast.Starred)]
    yield from _exchanged(plain, s)
    if plain:
        yield "call left out", node, s.of(plain[0])
    if isinstance(node.func, ast.Attribute):
        yield "method left out", node, s.of(node.func.value)
    for argument in [*plain, *[k.value for k in node.keywords]]:
        yield "argument None", argument, "None"
        yield "argument 0", argument, "0"
    yield from _left_out("argument left out", [*node.args, *node.keywords], s)
    for keyword in node.keywords:
        if isinstance(keyword.value, (ast.Name, ast.Attribute, ast.Compare, ast.BoolOp, ast.UnaryOp)):
            yield "keyword True", keyword.value, "True"
            yield "keyword False", keyword.value, "False"


def _sliced(node: Any, s: _Source) -> Iterator[Found]:
    if isinstance(node.slice, ast.Slice):
        yield "slice left out", node, s.of(node.value)
    elif isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
        yield "element left out", node, s.of(node.value)


def _several(node: Any, s: _Source) -> Iterator[Found]:
    yield from _exchanged(node.elts, s)
    if len(node.elts) > 1:
        yield from _left_out("element left out", node.elts, s)
    if isinstance(getattr(node, "ctx", None), ast.Load):
        for part in node.elts:
            yield "element None", part, "None"


def _left_out(operator: str, parts: list[Any], s: _Source) -> Iterator[Found]:
    """Each part is gone, with the comma behind it."""
    for part, after in zip(parts, [*parts[1:], None], strict=False):
        if after is None:
            yield operator, part, ""
        else:
            begin, end = s.span(after)
            yield operator, _both(part, after), s.text[begin:end]


def _exchanged(parts: list[Any], s: _Source) -> Iterator[Found]:
    for a, b in zip(parts, parts[1:], strict=False):
        (begin, middle), (behind, end) = s.span(a), s.span(b)
        yield "other order", _both(a, b), s.text[behind:end] + s.text[middle:behind] + s.text[begin:middle]


def _both(a: Any, b: Any) -> Any:
    """The place of two neighbours."""
    whole = ast.copy_location(ast.Pass(), a)
    whole.end_lineno, whole.end_col_offset = b.end_lineno, b.end_col_offset
    return whole


def _gone(node: Any, s: _Source) -> Iterator[Found]:
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        yield "statement left out", node, "pass"


def _returned(node: Any, s: _Source) -> Iterator[Found]:
    if node.value is not None:
        yield "result None", node.value, "None"
        yield "result always", node.value, "True"
        yield "result never", node.value, "False"
    yield "statement left out", node, "pass"


def _within(node: Any, s: _Source) -> Iterator[Found]:
    for item in node.items:
        yield "context left out", item.context_expr, "__import__('contextlib').nullcontext()"


def _looped(node: Any, s: _Source) -> Iterator[Found]:
    yield "no iteration", node.iter, "()"
    yield "first alone", node.iter, f"list({s.of(node.iter)})[:1]"
    yield "last missing", node.iter, f"list({s.of(node.iter)})[:-1]"


_Operator = Callable[[Any, _Source], Iterator[Found]]
_OPERATORS: dict[Any, tuple[_Operator, ...]] = {
    (ast.If, ast.While, ast.Assert): (_tested,),
    ast.IfExp: (_tested, _chosen),
    ast.comprehension: (_filtered,),
    ast.BoolOp: (_operands,),
    ast.UnaryOp: (_negated,),
    ast.Compare: (_compared,),
    ast.BinOp: (_computed,),
    ast.Constant: (_constant,),
    ast.Call: (_called,),
    ast.Subscript: (_sliced,),
    (ast.Tuple, ast.List, ast.Set): (_several,),
    ast.With: (_within,),
    (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Raise, ast.Delete): (_gone,),
    ast.Return: (_returned,),
    ast.For: (_looped,),
}
