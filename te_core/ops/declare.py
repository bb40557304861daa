"""`operation`: the one declaration of an operation, at its function. `OPERATIONS` has them all.

    @operation('''
    x [M, N] act: Input.
    gamma [N] act: Weight of the norm.
    kind in KINDS: Which norm it is.
    out? =x written: Where the result is written. None allocates it.
    must 1 <= N <= MAX_ROW: rows of 1 to {MAX_ROW} elements; use a shorter row
    ''')

A line says `ARGUMENT: what it is`, which the reference shows together with what the line declares. COMMON has the texts
of arguments that many operations have. What follows the name is checked in each call, line by line, before the function
runs:

    [M, N]          a dense tensor of two dimensions. A name without a value is set to the dimension that is there;
                    everything else is Python, in which arguments may stand, too: [2 * N + 1]. [...] is any shape
    =x              a dense tensor of x's shape and dtype
    act, f32|i32    behind a shape: allowed dtypes. Another argument's name is that one's dtype, and a constant of the
                    file is a tuple of dtypes
    rows, strided   not dense: elements of the last dimension side by side, or any strides
    written         memory that may be written to
    in KINDS        no tensor, but a value among these
    ?               directly behind the name: the argument may be None, of which nothing is asked

Tensors with a shape have to be on the runtime's device. `must CONDITION: what is allowed; what to do` is a condition on
arguments and dimensions, and the error shows those that it names. What cannot be said so the function checks itself,
by te_core/ops/_check.py.

`rules` declares in the same language what a function asks that several operations call, or the making of a plan. A line
may also be about a field (`terms.bias? [h] f32`); the name of a record that begins with _ is not shown.

From a declaration follow: the function that checks (`te_core.ops.raw`), the one that also explains wrong types
(`te_core.ops`), the arguments in its docstring, and what backends have to have: the functions that `runs` names, as
"function" or "file.function"; without `runs` one of its own name.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import Parameter, cleandoc, signature
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

from te_core import dtypes
from te_core.arguments import wrong_kind
from te_core.backend import FILES
from te_core.described import read
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.errors import ArgumentError
from te_core.ops import _check
from te_core.tensor import META, Tensor

T = TypeVar("T")

_TYPES: dict[str, tuple[DType, ...]] = {
    "act": ACTIVATION_DTYPES,
    "f32": (dtypes.float32,),
    "f64": (dtypes.float64,),
    "i32": (dtypes.int32,),
    "i64": (dtypes.int64,),
    "u8": (dtypes.uint8,),
}
#: What arguments of operations in several files are.
COMMON = read("""
rt: Runtime that it runs on; all tensors are on its device.
out: Where the result is written. None allocates it.
x: Tensor to be read.
dy: Gradient of the output.
a: First operand.
b: Second operand.
form: Format in which heads and tokens lie: "sbhd", "bshd" or "thd".
column_sum: Vector [N], float or of x's type, that is set to column sums. None computes none.
bias: Vector that is added to every row. None adds none.
accumulate: Whether the product is added to what `out` holds.
split_accumulator: Whether partial sums of FP8 products are added up in float32: exact, and slower.
emulate: Whether formats that the device cannot multiply are dequantized and multiplied in float32.
strict: Whether it is an error to compute in another way than the formats ask.
trans_a: Whether a is read transposed.
trans_b: Whether b is read transposed.
out_dtype: Type of the result. None is that of the operands, or of the weight of a norm.
cast: How the result is quantized (`Cast`). None quantizes nothing.
keep: Whether the result in high precision is given beside the quantized one.
eps: Number that is added to the variance, or to the mean square.
""")
_LINE = re.compile(r"([\w.]+)(\??)(?: (\[(?:[^][]|\[[^]]*\])*\]|=\w+))?(?: in (\w+))?((?: [\w|.]+)*)")
_LAYOUTS = {
    "dense": "({0}.strides is not None and not {0}.is_contiguous)",
    "rows": "({0}.strides is not None and {0}.shape[-1] > 1 and {0}.strides[-1] != 1)",
    "strided": "",
}


class Argument(NamedTuple):
    """A line about an argument."""

    name: str
    optional: bool
    size: str  # "[M, N]", "[...]", "=x"; "": not a tensor, or one of which nothing is asked
    types: str
    layout: str
    written: bool
    among: str


class Must(NamedTuple):
    """A line about several arguments."""

    condition: str
    allowed: str
    do: str


class Operation:
    """What is declared of an operation."""

    def __init__(self, body: Any, texts: tuple[str, ...], runs: tuple[str, ...], public: bool) -> None:
        self.name, self.body, self.runs, self.public = body.__name__, body, runs, public
        #: {argument: what it is}. What an earlier operation of the file says of an argument holds on.
        self.texts = dict(COMMON)
        for one in OPERATIONS.values():
            if one.body.__module__ == body.__module__:
                self.texts |= one.texts
        self.rules: list[Argument | Must] = []
        self.set: dict[int, list[str]] = {}  # the dimensions that a rule gives a value to
        for head, about in [pair for text in texts for pair in read(cleandoc(text).replace(":\n    ", ": ")).items()]:
            head = head.replace("\0", " ")  # of a condition that goes on in further lines
            if head.startswith("must "):
                allowed, _, do = about.partition("; ")
                self.rules.append(Must(head[5:], allowed, do))
                continue
            argument = _argument(head)
            if argument.name.partition(".")[0] not in signature(body).parameters:
                raise ValueError(f"{self.name} has no argument {argument.name}")
            if about:
                self.texts[argument.name] = about
            if argument.size or argument.among:
                self.rules.append(argument)

    def checked(self) -> Callable[..., Any]:
        """The function, with a look at the arguments before it runs. A function of its own: a call pays for no loop."""
        body: Any = self.body
        parameters = list(signature(body).parameters.values())
        keywords = [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
        names = [p.name for p in parameters if p.name not in keywords]
        tensors = any(isinstance(rule, Argument) and rule.size for rule in self.rules)
        lines, given = ["device = rt.device"] * tensors, {"_META": META, "_body": body, "_refuse": self._refuse}
        known = {*(p.name for p in parameters), *body.__globals__}
        for number, rule in enumerate(self.rules):
            lines += self._lines(number, rule, known, given)
        passed = [*names, *[f"{name}={name}" for name in keywords]]
        head = ", ".join([*names, *["*"] * bool(keywords), *keywords])
        source = [f"def make({', '.join(given)}):", f" def {self.name}({head}):", *[f"  {line}" for line in lines]]
        source += [f"  return _body({', '.join(passed)})", f" return {self.name}"]
        space: dict[str, Any] = {}
        exec(compile("\n".join(source), f"<declaration of {self.name}>", "exec"), body.__globals__, space)
        made: Any = space["make"](**given)
        for name in ("__module__", "__qualname__", "__doc__", "__annotations__", "__defaults__", "__kwdefaults__"):
            setattr(made, name, getattr(body, name))
        return made  # type: ignore[no-any-return]

    def _lines(self, number: int, rule: Argument | Must, known: set[str], given: dict[str, Any]) -> Iterator[str]:
        """The code that looks whether a rule holds."""
        refuse = f"_refuse({number}, locals())"
        if isinstance(rule, Must):
            yield f"if not ({rule.condition}): {refuse}"
            return
        name, margin = rule.name, ""
        if rule.optional:
            yield f"if {name} is not None:"
            margin = " "
        if rule.among:
            yield f"{margin}if {name} not in {rule.among}: {refuse}"
            return
        wrong, sizes, like = [], _sizes(rule.size), rule.types if self._is_argument(rule.types) else ""
        new = self.set[number] = [size for size in sizes if size.isidentifier() and size not in known]
        known.update(new)
        if rule.size[0] == "=":
            like = rule.size[1:]
            wrong.append(f"{name}.shape != {like}.shape")
        elif new:
            dims = [size if size in new else f"_{i}" for i, size in enumerate(sizes)]
            yield f"{margin}if len({name}.shape) != {len(sizes)}: {refuse}"
            yield f"{margin}{', '.join(dims)}, = {name}.shape"
            wrong += [f"{dim} != {size}" for dim, size in zip(dims, sizes, strict=True) if size not in new]
        elif rule.size != "[...]":
            wrong.append(f"{name}.shape != ({''.join(f'{size}, ' for size in sizes)})")
        if like:
            wrong.append(f"{name}.dtype is not {like}.dtype")
        elif rule.types:
            given[f"_types{number}"] = self._types(rule, cast(Any, self.body).__globals__)
            wrong.append(f"{name}.dtype not in _types{number}")
        wrong.append(_LAYOUTS[rule.layout].format(name))
        wrong.append(f"({name}.device is not device and device is not _META)")
        if rule.written:
            wrong.append(f"not {name}.writable")
        yield f"{margin}if {' or '.join(filter(None, wrong))}: {refuse}"

    def _refuse(self, number: int, values: dict[str, Any]) -> NoReturn:
        """Say of a call's arguments that a rule does not hold."""
        body: Any = self.body
        rule, space, name = self.rules[number], {**body.__globals__, **values}, values.get("op", self.name)
        if isinstance(rule, Must):
            named = dict(_named(ast.parse(rule.condition, mode="eval").body, values))
            parts = [f"{_shown(n)}{' = ' if isinstance(v, Tensor) else '='}{v!r}" for n, v in named.items()]
            got, do = ", ".join(parts), rule.do or f"correct {_shown(next(iter(named)))}"
            parts = [re.sub(r"{(.*?)}", lambda m: str(eval(m[1], space)), part) for part in (rule.allowed, do)]
            raise ArgumentError(name, got, *(part.replace("\n", " ") for part in parts))
        t = eval(rule.name, space)
        if rule.among:
            _check.one_of(name, rule.name, t, tuple(space[rule.among]))
        if not isinstance(t, Tensor):
            raise wrong_kind(name, rule.name, t, Tensor)
        hidden = dict.fromkeys(self.set[number], None)
        sizes: list[Any] = []  # a dimension's own text where it is not known
        for size in _sizes(rule.size):
            found = [None]
            with suppress(NameError):
                found = list(eval(f"({size},)", {**space, **hidden}))
            sizes += [size] if found == [None] else found
        if rule.size[0] == "=":
            sizes = list(space[rule.size[1:]].shape)
        types = self._types(rule, space)
        flat = t.ndim == len(sizes) or rule.size == "[...]"
        lies = {"dense": t.is_contiguous, "rows": t.ndim > 0 and (t.shape[-1] < 2 or t.row_major_strides()[-1] == 1)}
        fits = [isinstance(n, str) or n == m for n, m in zip(sizes, t.shape, strict=False)]
        if not flat or not all(fits) or not lies.get(rule.layout, True) or (types and t.dtype not in types):
            do = f"correct {rule.name}" + ", or leave it out" * (rule.optional and rule.written)
            if not flat and len(sizes) == 2:
                do = f"flatten the leading dimensions of {rule.name} and make it contiguous"
            elif flat and all(fits) and t.dtype in (types or (t.dtype,)):
                do = f"make {rule.name} contiguous"
            shape = "" if rule.size == "[...]" else f"[{', '.join(map(str, sizes))}]"
            if rule.size not in ("[...]", shape) and rule.size[0] != "=":
                shape = f"{rule.size} = {shape}"
            allowed = _tensor(rule.layout, shape, types)
            if rule.name in self.texts:
                about = self.texts[rule.name].replace("\n", " ")
                allowed += f" ({about[0].lower()}{about[1:].rstrip('.')})"
            raise ArgumentError(name, f"{_shown(rule.name)} = {t!r}", allowed, do.replace(rule.name, _shown(rule.name)))
        _check.on_device(name, values["rt"].device, t)
        _check.written(name, rule.name, t)
        raise AssertionError(f"{name}: {rule} holds for {t!r}")

    def _is_argument(self, types: str) -> bool:
        """Whether a dtype is said by a tensor that has it."""
        return types.partition(".")[0] in signature(self.body).parameters

    def _types(self, rule: Argument, space: dict[str, Any]) -> tuple[DType, ...]:
        """The dtypes that a line allows; () for any."""
        found: list[DType] = []
        like = rule.size[1:] if rule.size[0] == "=" else rule.types
        for name in filter(None, like.split("|")):
            types = _TYPES[name] if name in _TYPES else eval(name, space)
            found += (types.dtype,) if isinstance(types, Tensor) else (types,) if isinstance(types, DType) else types
        return tuple(found)

    def described(self) -> dict[str, str]:
        """{argument: what it is, and what is declared of it}."""
        body: Any = self.body
        texts = dict(self.texts)
        for rule in self.rules:
            if isinstance(rule, Must) or rule.name not in texts:
                continue
            if rule.among:
                more = f"One of {', '.join(map(str, body.__globals__[rule.among]))}."
            elif rule.size[0] == "=":
                more = f"As {rule.size[1:]}: {'dense, ' * (rule.layout == 'dense')}of its shape and dtype."
            else:
                named = self._is_argument(rule.types)
                types = () if named else self._types(rule, body.__globals__)
                shape = "" if rule.size == "[...]" else rule.size
                more = _tensor(rule.layout, shape, types, f" of {rule.types}'s dtype" * bool(named)) + "."
            texts[rule.name] = f"{texts[rule.name]} {more[0].upper()}{more[1:]}"
        return texts


def _named(node: ast.AST, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, value) of what a condition reads: arguments and dimensions, fields of arguments, whole tensors."""
    path, *parts = ast.unparse(node).split(".") if isinstance(node, (ast.Name, ast.Attribute)) else [""]
    if path not in values:
        for child in ast.iter_child_nodes(node):
            yield from _named(child, values)
        return
    value = values[path]
    for part in parts:
        inside = getattr(value, part)
        if isinstance(value, Tensor) or callable(inside):
            break
        path, value = f"{path}.{part}", inside
    yield path, value


def _shown(path: str) -> str:
    """A path as errors have it."""
    return path.partition(".")[2] if path[0] == "_" else path


def _argument(head: str) -> Argument:
    found = _LINE.fullmatch(head)
    if found is None:
        raise ValueError(f"a declaration without meaning: {head}")
    name, optional, size, among, rest = found.groups()
    words = rest.split()
    layout = next((word for word in words if word in _LAYOUTS), "dense")
    types = [word for word in words if word not in (*_LAYOUTS, "written")]
    return Argument(name, bool(optional), size or "", "".join(types), layout, "written" in words, among or "")


def _sizes(size: str) -> list[str]:
    """The dimensions of "[M, N]", as Python."""
    if size == "[...]" or size[0] == "=":
        return []
    parsed: Any = ast.parse(size, mode="eval").body
    return [ast.unparse(one) for one in parsed.elts]


def _tensor(layout: str, shape: str, types: tuple[DType, ...], more: str = "") -> str:
    """Such a tensor in words."""
    names = [t.name for t in types]
    kinds = f" of dtype {' or '.join(filter(None, (', '.join(names[:-1]), *names[-1:])))}" if names else ""
    ends = {"rows": ", the elements of its last dimension side by side", "strided": ", of any strides"}.get(layout, "")
    return f"a {'dense ' * (layout == 'dense')}tensor{shape and ' of shape '}{shape}{kinds}{more}{ends}"


OPERATIONS: dict[str, Operation] = {}
#: What is public beside operations: {name: what its arguments are}.
BESIDE: dict[str, dict[str, str]] = {}


def operation(*texts: str, runs: str | None = None, public: bool = True) -> Callable[[T], T]:
    """Declare the operation of a function (see the head of this file)."""

    def declared(body: T) -> T:
        made: Any = body
        file = made.__module__.rpartition(".")[2]
        calls = [name.rpartition(".") for name in (made.__name__ if runs is None else runs).split()]
        FILES.update({name: place or file for place, _, name in calls})
        one = Operation(made, texts, tuple(name for _, _, name in calls), public)
        OPERATIONS[one.name] = one
        _export(made)
        return cast(T, one.checked()) if one.rules else body

    return declared


def rules(text: str) -> Callable[[T], T]:
    """Declare what a function asks that several operations call, or the making of a plan; `op` is whose name it has."""

    def declared(body: T) -> T:
        return cast(T, Operation(body, (text,), (), False).checked())

    return declared


def exported(text: str) -> Callable[[T], T]:
    """Put a class or function that is no operation beside the operations; `text` says what its arguments are."""

    def declared(thing: T) -> T:
        named: Any = thing
        BESIDE[named.__name__] = read(cleandoc(text))
        _export(named)
        return thing

    return declared


def _export(thing: Any) -> None:
    """`from te_core.ops.FILE import *` brings it."""
    vars(sys.modules[thing.__module__]).setdefault("__all__", []).append(thing.__name__)
