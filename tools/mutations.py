"""Faults by operators over the syntax tree: each change that could be made to a Python source, and its name.

A condition holds always or never, an operand of `and` is left out, a comparison has its edge elsewhere, a sum misses a
term, two arguments change places, an argument is left out, is None or what its neighbour is, a result or a gradient is
None, a slice keeps its tail or begins at zero, a name becomes another one of its kind (a scale that of the other
operand), two statements change places, one is gone ... `tools/mutants.py --sample` takes some of them by chance, and
those of tools/mutations_c.py in kernels.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

#: How a comparison is written, and what it becomes.
_COMPARED: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<", "<=", ">"), ast.LtE: ("<=", "<", ">="), ast.Gt: (">", ">=", "<"), ast.GtE: (">=", ">", "<="),
    ast.Eq: ("==", "!=", "<=", ">="), ast.NotEq: ("!=", "==", "<", ">"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
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

    def look_at(self, tree: Any) -> None:
        """Find what names, attributes and texts the functions have."""
        self.attributes: dict[str, list[str]] = defaultdict(list)
        self.names: dict[int, list[str]] = {}  # of the function in which a node stands
        self.texts: dict[int, list[str]] = {}
        capitals = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id.isupper()]
        self.called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):  # from the outside in
            if isinstance(node, ast.Attribute):
                self.attributes[ast.unparse(node.value)].append(node.attr)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
                inside = list(ast.walk(node))
                names = [part.id for part in inside if isinstance(part, ast.Name) and id(part) not in self.called]
                names += [part.arg for part in inside if isinstance(part, ast.arg) and part.arg not in ("self", "cls")]
                texts = [repr(part.value) for part in inside if isinstance(part, ast.Constant) and _is_word(part.value)]
                for part in inside:
                    capital = isinstance(part, ast.Name) and part.id.isupper()
                    self.names[id(part)], self.texts[id(part)] = capitals if capital else names, texts

    def place(self, line: int, column: int) -> int:
        """Columns of a tree count bytes."""
        return self._begins[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: Any) -> tuple[int, int]:
        return self.place(node.lineno, node.col_offset), self.place(node.end_lineno, node.end_col_offset)

    def exchanged(self, a: Any, b: Any) -> str:
        """The second of two neighbours before the first."""
        (begin, middle), (behind, end) = self.span(a), self.span(b)
        return self.text[behind:end] + self.text[middle:behind] + self.text[begin:middle]

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
    source.look_at(tree)
    for node in ast.walk(tree):
        line = getattr(node.iter if isinstance(node, ast.comprehension) else node, "lineno", 0)
        if line and id(node) not in said and (lines is None or line in lines):
            for operator, place, new in _of(node, source):
                begin, end = source.span(place)
                if new != text[begin:end] and "(*" not in new:  # several values are none
                    found.setdefault((begin, end, new), Change(operator, place.lineno, begin, end, new))
    return sorted(found.values(), key=lambda c: (c.line, c.begin, c.operator, c.text))


def _is_word(value: Any) -> bool:
    """Whether a constant is a name of something, and no text for a reader."""
    return isinstance(value, str) and bool(re.fullmatch(r"[\w.-]{1,40}", value))


#: Words of names that stand for two of one kind, and functions that somebody may take for one another.
_PAIRS = (
    "forward backward, row column, rows columns, rowwise columnwise, left right, first last, q k, k v, q kv, input "
    "output, inputs outputs, a b, x y, x dy, before after, begin end, start stop, lower upper, min max, minimum "
    "maximum, any all, fwd bwd, fprop dgrad, dgrad wgrad, input weight, weight grad, data scale, heads groups, "
    "all_gather reduce_scatter, mean sum, rank size, rank world, float32 bfloat16, float16 bfloat16, int32 int64, "
    "e4m3 e5m2, empty zeros, zeros ones, add sub, floor ceil, m n, n k, i j, key value, keys queries, source "
    "target, here there, send receive, dp cp, tp cp"
)
_OTHER: dict[str, list[str]] = {}
for _one, _two in (pair.split() for pair in _PAIRS.split(", ")):
    _OTHER.setdefault(_one, []).append(_two)
    _OTHER.setdefault(_two, []).append(_one)
NEAREST = 6  # names that one is taken for


def swaps(name: str) -> list[str]:
    """A name with a word of it exchanged for its other one."""
    words = name.split("_")
    return [
        "_".join([*words[:i], new, *words[i + 1 :]]) for i, word in enumerate(words) for new in _OTHER.get(word, ())
    ]


def neighbours(name: str, others: list[str]) -> list[str]:
    """Those of the names beside it that somebody may take for it, the likeliest first: they have words in common."""
    words, swapped = name.strip("_").split("_"), swaps(name.strip("_"))
    known = {other.strip("_"): other for other in others if other != name}

    def far(other: str) -> tuple[bool, int, bool]:
        parts = other.strip("_").split("_")
        return other.strip("_") not in swapped, -len({*parts} & {*words}), len(parts[0]) != len(words[0])

    return sorted(known.values(), key=far)[:NEAREST]


Found = tuple[str, Any, str]  # the operator, the part that changes, its new text


def _of(node: Any, s: _Source) -> Iterator[Found]:
    for kind, operators in _OPERATORS.items():
        if isinstance(node, kind):
            for operator in operators:
                yield from operator(node, s)


def _constants(place: Any, operator: str, *values: str) -> Iterator[Found]:
    for value in values or ("None", "0", "1", "False", "True", '""'):
        yield f"{operator} {value}", place, value


def _tested(node: Any, s: _Source) -> Iterator[Found]:
    yield "always", node.test, "True"
    yield "never", node.test, "False"
    if not isinstance(node.test, ast.Compare):
        yield "condition turned", node.test, f"not {s.of(node.test)}"


def _filtered(node: Any, s: _Source) -> Iterator[Found]:
    for condition in node.ifs:
        yield "every", condition, "True"
        yield "condition turned", condition, f"not {s.of(condition)}"
    yield from _ranged(node.iter, s)


def _chosen(node: Any, s: _Source) -> Iterator[Found]:
    yield "one choice", node, s.of(node.body)
    yield "other choice", node, s.of(node.orelse)
    yield "choices exchanged", node, f"({s.of(node.orelse)} if {s.of(node.test)} else {s.of(node.body)})"


def _operands(node: Any, s: _Source) -> Iterator[Found]:
    word = " and " if isinstance(node.op, ast.And) else " or "
    for i, one in enumerate(node.values):
        rest = [s.of(value) for j, value in enumerate(node.values) if j != i]
        yield "operand left out", node, f"({word.join(rest)})" if len(rest) > 1 else rest[0]
        yield "condition turned", one, f"not {s.of(one)}"
    yield "and for or", node, f"({(' or ' if word == ' and ' else ' and ').join(map(s.of, node.values))})"
    yield from _constants(node, "decided", "True", "False", "None")


def _negated(node: Any, s: _Source) -> Iterator[Found]:
    yield "sign", node, s.of(node.operand)
    if isinstance(node.op, ast.Not):
        yield from _constants(node, "decided", "True", "False")


def _compared(node: Any, s: _Source) -> Iterator[Found]:
    for i in range(len(node.ops)):
        for other in _COMPARED[type(node.ops[i])][1:]:
            parts = [s.of(node.left)]
            for j, (op, side) in enumerate(zip(node.ops, node.comparators, strict=True)):
                parts += [other if i == j else _COMPARED[type(op)][0], s.of(side)]
            yield "comparison", node, " ".join(parts)
    if len(node.ops) > 1:
        sides, (first, second) = (
            [s.of(side) for side in node.comparators],
            [_COMPARED[type(op)][0] for op in node.ops[:2]],
        )
        yield "bound left out", node, f"({s.of(node.left)} {first} {sides[0]})"
        yield "bound left out", node, f"({sides[0]} {second} {sides[1]})"
    yield from _constants(node, "decided", "True", "False")


def _computed(node: Any, s: _Source) -> Iterator[Found]:
    left, right = s.of(node.left), s.of(node.right)
    if type(node.op) in _COMPUTED:
        yield "sum or product", node, f"({left} {_COMPUTED[type(node.op)]} {right})"
    yield "term left out", node, left
    yield "term left out", node, right
    yield from _constants(node, "value", "0", "1")


def _constant(node: Any, s: _Source) -> Iterator[Found]:
    value = node.value
    if value is True or value is False:
        yield "flag", node, str(not value)
    elif isinstance(value, (int, float)):
        for other in (value + 1, value - 1, 0, 2 * value, 1, type(value)(value / 2)):
            yield "number", node, repr(other)
    elif _is_word(value):
        for other in neighbours(repr(value), s.texts.get(id(node), [])):
            yield "other text", node, other
        for other in _OTHER.get(value, ()):
            yield "other text", node, repr(other)
        yield "other text", node, '""'


def _named(node: Any, s: _Source) -> Iterator[Found]:
    if isinstance(node.ctx, ast.Load):
        for other in [] if id(node) in s.called else neighbours(node.id, s.names.get(id(node), [])):
            yield "other name", node, other
        for other in _OTHER.get(node.id, ()):
            yield "other name", node, other


def _reached(node: Any, s: _Source) -> Iterator[Found]:
    if isinstance(node.ctx, ast.Load):
        value, others = s.of(node.value), s.attributes[ast.unparse(node.value)]
        for other in dict.fromkeys([*swaps(node.attr), *neighbours(node.attr, others)]):
            yield "other attribute", node, f"{value}.{other}"
        if id(node) not in s.called:
            yield "attribute left out", node, value


def _called(node: Any, s: _Source) -> Iterator[Found]:
    plain = [a for a in node.args if not isinstance(a, ast.Starred)]
    keywords = [k.value for k in node.keywords]
    yield from _exchanged(plain, s)
    yield from _begun(plain, s)
    for argument in plain[:3]:
        yield "call left out", node, s.of(argument)
    if isinstance(node.func, ast.Attribute):
        yield "method left out", node, s.of(node.func.value)
    elif isinstance(node.func, ast.Name) and node.func.id in ("any", "all", "isinstance", "bool", "len"):
        yield from _constants(node, "decided", "True", "False")
    for i, argument in enumerate([*plain, *keywords]):
        yield from _constants(argument, "argument")
        for other in [*plain, *keywords][max(0, i - 2) : i + 3]:
            yield "argument twice", argument, s.of(other)
        if isinstance(argument, (ast.Name, ast.Attribute)):
            yield "tail left out", argument, f"{s.of(argument)}[:-1]"
            yield "turned", argument, f"{s.of(argument)}[::-1]"
    yield from _left_out("argument left out", [*node.args, *node.keywords], s)


def _begun(parts: list[Any], s: _Source) -> Iterator[Found]:
    """A span begins at zero, as long as before or up to the same end."""
    for a, b in zip(parts, parts[1:], strict=False):
        yield "from zero", _both(a, b), f"0, {s.of(b)} - {s.of(a)}"


def _sliced(node: Any, s: _Source) -> Iterator[Found]:
    part = node.slice
    if isinstance(part, ast.Slice):
        value, lower, upper = s.of(node.value), part.lower and s.of(part.lower), part.upper and s.of(part.upper)
        step = f":{s.of(part.step)}" if part.step else ""
        yield "slice left out", node, value
        if lower and upper:
            yield "slice's begin left out", node, f"{value}[:{upper}{step}]"
            yield "slice's end left out", node, f"{value}[{lower}:{step}]"
            yield "from zero", node, f"{value}[: {upper} - {lower}{step}]"
        for bound in filter(None, (part.lower, part.upper)):
            yield from _constants(bound, "bound", "0", "1")
            yield "bound shifted", bound, f"{s.of(bound)} + 1"
            yield "bound shifted", bound, f"{s.of(bound)} - 1"
    elif isinstance(node.ctx, ast.Load):
        if isinstance(part, ast.Constant) and isinstance(part.value, int):
            yield "element left out", node, s.of(node.value)
        yield from _constants(part, "index", "0", "1", "-1")
        yield "index shifted", part, f"{s.of(part)} + 1"
        yield "index shifted", part, f"{s.of(part)} - 1"


def _several(node: Any, s: _Source) -> Iterator[Found]:
    yield from _exchanged(node.elts, s)
    if len(node.elts) > 1:
        yield from _left_out("element left out", node.elts, s)
    if isinstance(getattr(node, "ctx", None), ast.Load):
        yield from _begun(node.elts, s)
        for i, part in enumerate(node.elts):
            yield from _constants(part, "element")
            for other in node.elts[max(0, i - 1) : i + 2]:
                yield "element twice", part, s.of(other)
        yield "first alone", node, f"{s.of(node)}[:1]"


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
        yield "other order", _both(a, b), s.exchanged(a, b)


def _both(a: Any, b: Any) -> Any:
    """The place of two neighbours."""
    whole = ast.copy_location(ast.Pass(), a)
    whole.end_lineno, whole.end_col_offset = b.end_lineno, b.end_col_offset
    return whole


def _gone(node: Any, s: _Source) -> Iterator[Found]:
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        yield "statement left out", node, "pass"


def _assigned(node: Any, s: _Source) -> Iterator[Found]:
    if isinstance(node, ast.AugAssign):
        yield "not added", node, f"{s.of(node.target).strip('()')} = {s.of(node.value)}"
        if type(node.op) in _COMPUTED:
            yield "sum or product", node, f"{s.of(node.target)} {_COMPUTED[type(node.op)]}= {s.of(node.value)}"
    elif node.value is not None:
        yield from _constants(node.value, "value")
        yield from _cut(node.value, s)


def _returned(node: Any, s: _Source) -> Iterator[Found]:
    if node.value is not None:
        yield from _constants(node.value, "result")
        yield from _cut(node.value, s)
        for name in dict.fromkeys(s.names.get(id(node), [])):
            yield "result of before", node.value, name
    yield "statement left out", node, "pass"


def _cut(value: Any, s: _Source) -> Iterator[Found]:
    if isinstance(value, (ast.List, ast.ListComp, ast.Call, ast.Name, ast.Attribute, ast.Subscript)):
        yield "first alone", value, f"{s.of(value)}[:1]"
        yield "tail left out", value, f"{s.of(value)}[:-1]"


def _within(node: Any, s: _Source) -> Iterator[Found]:
    for item in node.items:
        yield "context left out", item.context_expr, "__import__('contextlib').nullcontext()"


def _looped(node: Any, s: _Source) -> Iterator[Found]:
    yield "no iteration", node.iter, "()"
    yield from _ranged(node.iter, s)


def _ranged(values: Any, s: _Source) -> Iterator[Found]:
    yield "first alone", values, f"list({s.of(values)})[:1]"
    yield "last missing", values, f"list({s.of(values)})[:-1]"
    yield "first missing", values, f"list({s.of(values)})[1:]"
    yield "turned", values, f"list({s.of(values)})[::-1]"


def _tried(node: Any, s: _Source) -> Iterator[Found]:
    """What is caught is another error, or what is done at the end is not done."""
    for handler in node.handlers:
        if handler.type is not None:
            yield "not caught", handler.type, "()"
            for kind in handler.type.elts if isinstance(handler.type, ast.Tuple) else ():
                yield "caught alone", handler.type, s.of(kind)
    if node.finalbody:
        yield "not at the end", _both(node.finalbody[0], node.finalbody[-1]), "pass"


_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)


def _in_a_row(node: Any, s: _Source) -> Iterator[Found]:
    """Statements of a block change places, two are left out, or one with a block is."""
    for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
        for a, b in zip(block, block[1:], strict=False) if isinstance(block, list) else ():
            if isinstance(b, _SIMPLE) and (isinstance(a, (*_SIMPLE, ast.If, ast.For)) and not _is_text(a)):
                yield "statements exchanged", _both(a, b), s.exchanged(a, b)
                yield "two statements left out", _both(a, b), "pass"
        for one in block if isinstance(block, list) else ():
            if isinstance(one, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
                yield "statement left out", one, "pass"
            if isinstance(one, (ast.With, ast.Try)) and len({part.lineno for part in one.body}) == len(one.body):
                lines = s.text[s.span(one.body[0])[0] : s.span(one.body[-1])[1]].split("\n")
                yield "block alone", one, "\n".join([lines[0], *(line.removeprefix("    ") for line in lines[1:])])


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _short(node: Any, s: _Source) -> Iterator[Found]:
    """A function in one expression."""
    yield from _constants(node.body, "result")


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
    ast.Name: (_named,),
    ast.Attribute: (_reached,),
    ast.Call: (_called,),
    ast.Subscript: (_sliced,),
    (ast.Tuple, ast.List, ast.Set): (_several,),
    ast.With: (_within,),
    (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Raise, ast.Delete): (_gone,),
    (ast.Assign, ast.AugAssign, ast.AnnAssign): (_assigned,),
    ast.Return: (_returned,),
    ast.Lambda: (_short,),
    ast.For: (_looped,),
    ast.Try: (_tried,),
    (ast.FunctionDef, ast.If, ast.For, ast.While, ast.With, ast.Try): (_in_a_row,),
}
