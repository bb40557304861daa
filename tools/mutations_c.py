"""Faults of CUDA C and C by operators, over brackets and tokens: like those of tools/mutations.py over a syntax tree.

A statement is gone, a condition holds always or never, one of two choices is taken, a term, a factor or an operand is
left out, an element is the first one, arguments change places, a name becomes another one of its kind.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

from tools.mutations import Change, neighbours

_TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|^[ \t]*#(?:[^\n\\]|\\.)*|[A-Za-z_]\w*"
    r"|(?:0x[0-9a-fA-F]+|\d[\d.]*(?:e[+-]?\d+)?)[uUlLfF]*|<<=|>>=|->|::|&&|\|\||[-+*/%&|^=!<>]=|<<|>>|\+\+|--|\S",
    re.MULTILINE | re.DOTALL,
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_COMPARED = {
    "<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="), "==": ("!=", "<="), "!=": ("==", "<"),
}  # fmt: skip
_COMPUTED = {"+": "-", "-": "+", "*": "/", "/": "*", "%": "/", "&": "|", "|": "&", "<<": ">>", ">>": "<<", "^": "&"}
#: How far operators reach, the farthest last.
_LEVELS = (
    ("*", "/", "%"), ("+", "-"), ("<<", ">>"), ("<", "<=", ">", ">="), ("==", "!="), ("&",), ("^",), ("|",), ("&&",),
    ("||",),
)  # fmt: skip
_ENDS = {",", ";", "?", ":", "=", "+=", "-=", "*=", "|=", "&=", "return"}  # and a bracket around
#: Words that no name of a value is.
_WORDS = set(
    (
        "if else for while do return break continue switch case default struct typedef static const constexpr inline "
        "void int unsigned char float double bool long short auto template typename using namespace extern sizeof "
        "true false i64 u64 u32 u16 u8 i32 float2 float4 uint2 uint4 __device__ __global__ __shared__ __restrict__ "
        "__forceinline__ __syncthreads uint8_t uint16_t uint32_t uint64_t int32_t int64_t size_t uintptr_t NULL this "
        "class enum operator "
    ).split()
)
Made = tuple[str, int, int, str]  # the operator, the first and the last token that change, their new text


class _Tokens:
    def __init__(self, text: str) -> None:
        self.text = text
        found = [m for m in _TOKEN.finditer(text) if not m[0].lstrip().startswith(("//", "/*", "#"))]
        self.at = [(m.start(), m.end()) for m in found]
        self.words = [m[0] for m in found]
        self.match: dict[int, int] = {}
        open_: list[int] = []
        for i, word in enumerate(self.words):
            if word in _CLOSING:
                open_.append(i)
            elif word in _CLOSING.values() and open_ and _CLOSING[self.words[open_[-1]]] == word:
                self.match[i] = open_.pop()
                self.match[self.match[i]] = i

    def of(self, first: int, last: int) -> str:
        return self.text[self.at[first][0] : self.at[last][1]] if first <= last else ""

    def reach(self, i: int, step: int, stop: set[str]) -> int:
        """The last token from `i` on, over whole brackets, before one that stops."""
        while 0 <= i + step < len(self.words) and self.words[i + step] not in stop:
            i += step
            inner = self.match.get(i)
            if inner is not None:
                if (inner - i) * step < 0:
                    return i - step
                i = inner
        return i

    def parts(self, first: int, last: int) -> list[tuple[int, int]]:
        """What commas part between two brackets."""
        found, begin, i = [], first + 1, first + 1
        while i < last:
            if self.words[i] == ",":
                found.append((begin, i - 1))
                begin = i + 1
            i = self.match[i] if self.words[i] in _CLOSING and i in self.match else i
            i += 1
        return [*found, (begin, last - 1)] if begin < last else found


def c_changes(text: str, lines: Container[int] | None = None) -> list[Change]:
    """Every change of a source in C or CUDA C; or those that begin in some of its lines."""
    tokens, found = _Tokens(text), {}
    for operator, first, last, new in _made(tokens):
        begin, end = tokens.at[first][0], tokens.at[last][1]
        line = text.count("\n", 0, begin) + 1
        if new != text[begin:end] and (lines is None or line in lines):
            found.setdefault((begin, end, new), Change(operator, line, begin, end, new))
    return sorted(found.values(), key=lambda c: (c.line, c.begin, c.operator, c.text))


def _made(t: _Tokens) -> Iterator[Made]:
    names = [word for word in t.words if re.match(r"[A-Za-z_]", word) and word not in _WORDS]
    for i, word in enumerate(t.words):
        if word in ("if", "while") and t.words[i + 1 : i + 2] == ["("] and i + 1 in t.match:
            yield "always", i + 2, t.match[i + 1] - 1, "1"
            yield "never", i + 2, t.match[i + 1] - 1, "0"
        elif word == ";":
            yield from _statement(t, i)
        elif word == "?":
            yield from _choice(t, i)
        elif i and (word in _COMPARED or word in _COMPUTED or word in ("&&", "||")):
            yield from _operated(t, i, word)
        elif word in ("(", "[", "{") and i in t.match:
            yield from _bracketed(t, i, word)
        elif re.match(r"\d", word):
            yield from _number(i, word)
        elif re.match(r"[A-Za-z_]", word) and word not in _WORDS:
            for other in neighbours(word, names[max(0, names.index(word) - 60) : names.index(word) + 60]):
                yield "other name", i, i, other
        elif word == "=":
            last = t.reach(i, 1, {",", ";"})
            for value in ("0", "1") if last > i else ():
                yield "value", i + 1, last, value
        elif word in ("+=", "-=", "*=", "|=", "&="):
            yield "not added", i, i, "="


def _number(i: int, word: str) -> Iterator[Made]:
    whole = re.fullmatch(r"\d+", word)
    for other in (int(word) + 1, int(word) - 1, 0, 1, 2 * int(word), int(word) // 2) if whole else ("0.f", "1.f"):
        yield "number", i, i, str(other)


def _statement(t: _Tokens, i: int) -> Iterator[Made]:
    first = t.reach(i, -1, {";", "{", "}", "else"})
    if first and t.words[first - 1] == "else":
        yield "statement left out", first - 1, i, ""
    if t.words[first : first + 1] in (["if"], ["for"], ["while"]) and first + 1 in t.match:
        yield "statement left out", first, i, ""
        first = t.match[first + 1] + 1
    elif t.words[first : first + 1] == ["return"]:
        for value in ("0", "1", "TE_OK", "nullptr"):
            yield "result", first + 1, i - 1, value
    if first <= i:
        yield "statement left out", first, i, ";"
        yield "statement left out", first, i, ""


def _choice(t: _Tokens, i: int) -> Iterator[Made]:
    first = t.reach(i, -1, _ENDS - {"?", ":"})
    colon = t.reach(i, 1, {":", ";", ","}) + 1
    if colon < len(t.words) and t.words[colon] == ":":
        last = t.reach(colon, 1, _ENDS)
        one, other = t.of(i + 1, colon - 1), t.of(colon + 1, last)
        yield "one choice", first, last, one
        yield "other choice", first, last, other
        yield "choices exchanged", i + 1, last, f"{other} : {one}"


def _operated(t: _Tokens, i: int, word: str) -> Iterator[Made]:
    level = next(n for n, words in enumerate(_LEVELS) if word in words)
    weaker = {one for words in _LEVELS[level:] for one in words} | _ENDS
    if t.words[i - 1] in _ENDS | weaker | {"(", "[", "{", "}"}:
        if word == "-":
            yield "sign", i, i, ""
        return
    first, last = t.reach(i, -1, weaker), t.reach(i, 1, weaker)
    for other in (*_COMPARED.get(word, ()), *filter(None, [_COMPUTED.get(word)])):
        yield "comparison" if word in _COMPARED else "sum or product", i, i, other
    if first < i < last:
        yield "term left out", i, last, ""
        yield "term left out", first, i, ""
        for value in (f"{t.of(i + 1, last)} + 1", f"{t.of(i + 1, last)} - 1") if word in _COMPARED else ():
            yield "bound shifted", i + 1, last, value
        for value in ("0", "1"):
            yield "decided", first, last, value
            yield "term decided", first, i - 1, value
            yield "term decided", i + 1, last, value


def _bracketed(t: _Tokens, i: int, word: str) -> Iterator[Made]:
    last = t.match[i]
    parts = t.parts(i, last)
    called = i > 0 and re.match(r"[A-Za-z_>]", t.words[i - 1]) and t.words[i - 1] not in _WORDS
    if word == "[" and parts:
        for other in ("0", "1", f"({t.of(*parts[0])}) + 1", f"({t.of(*parts[0])}) - 1"):
            yield "index", i + 1, last - 1, other
    for a, b in zip(parts, parts[1:], strict=False):
        yield "other order", a[0], b[1], f"{t.of(*b)}, {t.of(*a)}"
    for n, part in enumerate(parts if word != "[" and len(parts) < 16 else ()):
        for other in ("0", "1", "0.f", "1.f", *(t.of(*one) for one in parts[max(0, n - 1) : n + 2])):
            yield "argument", *part, other
        if called and word == "(" and n < 3:
            begin = t.reach(i, -1, _ENDS | set(_COMPUTED) | set(_COMPARED) | {"&&", "||", "!"})
            yield "call left out", begin, last, t.of(*part)
