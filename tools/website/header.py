"""The pages of the C and the C++ header, from the comments of the C one.

A comment right above a declaration describes it: sentences, then `name: what it is` for each argument, `Gives: ` what
comes back and `Fails: ` which errors there are. A comment with an empty line behind it is a section's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.website.docstrings import inline

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "bindings" / "c" / "include"

_ENTRY = re.compile(r"(\w+): +(.*)")
_RULE = re.compile(r"-{8,} *")  # in front of a section's name


class Declaration(NamedTuple):
    """What the header declares under one comment; `code` is empty for the text of a section."""

    comment: list[str]
    code: str

    @property
    def function(self) -> str:
        """The name of a function, or ""."""
        found = re.match(r"TE_API [\w ]+?[ *]+(?:const \*)?(te_\w+)\(", self.code)
        return found[1] if found else ""

    @property
    def arguments(self) -> list[str]:
        """The names of a function's arguments."""
        inside = self.code[self.code.index("(") + 1 : self.code.rindex(")")] if self.function else ""
        return [] if inside in ("", "void") else [re.findall(r"\w+", one)[-1] for one in inside.split(",")]

    @property
    def said(self) -> tuple[str, dict[str, str]]:
        """(what the comment says of the whole, what it says of each argument, "Gives" and "Fails")."""
        text, entries, last = [], dict[str, str](), ""
        for line in self.comment:
            new = _ENTRY.fullmatch(line)
            if new and (new[1] in (*self.arguments, "Gives", "Fails")):
                last = new[1]
                entries[last] = new[2]
            elif last:
                entries[last] += f" {line.strip()}"
            else:
                text.append(line)
        return " ".join(text).strip(), entries


def declarations(text: str) -> Iterator[Declaration]:
    """What a header declares, in its order."""
    body = text[text.index("#define TE_CORE_H") : text.rindex("#ifdef __cplusplus")]
    for part in re.split(r"\n\s*\n", body):
        for comment, code in re.findall(r"((?:^/\*(?:.|\n)*?\*/\n?)?)((?:(?!^/\*).*\n?)*)", part, re.MULTILINE):
            lines = [re.sub(r"^(/\*| \*/?) ?|\s*\*/$", "", line) for line in comment.strip().splitlines()]
            first, *more = _statements(code) or [""]
            if lines or first:
                yield Declaration(lines, first)
                yield from (Declaration([], one) for one in more)


def _statements(code: str) -> list[str]:
    """Declarations, each to its semicolon; directives of the preprocessor are left out but for our macros."""
    kept = [line for line in code.splitlines() if not re.match(r"#(?!define TE_(?!API|CORE_H))|extern", line)]
    found, depth, now = [], 0, list[str]()
    for line in kept:
        now.append(line)
        depth += line.count("{") - line.count("}")
        if depth == 0 and (line.rstrip().split("/*")[0].rstrip().endswith(";") or line.startswith("#define")):
            found.append("\n".join(now))
            now = []
    return [one for one in found if one.strip()]


def pages() -> dict[str, str]:
    """Page -> its text."""
    found = list(declarations((INCLUDE / "te_core.h").read_text()))
    lines = ["# te_core.h", "", "The C interface: programs without Python, and layers.", ""]
    lines += ["{.names}", "| Function | |", "|---|---|"]
    for one in found:
        if one.function:
            first = one.said[0].partition(". ")[0].rstrip(".")
            lines.append(f"| {{c:func}}`{one.function}` | {first}. |")
    lines += ["", "```{eval-rst}", *[line for one in found for line in _described(one)], "```", ""]
    about = "The same in C++17: objects free what they hold, and errors are exceptions (`te::Error`)."
    cpp = ["# te_core.hpp", "", about, "", "```cpp", (INCLUDE / "te_core.hpp").read_text().rstrip(), "```", ""]
    return {"te_core.h": "\n".join(lines), "te_core.hpp": "\n".join(cpp)}


def _described(one: Declaration) -> Iterator[str]:
    text, entries = one.said
    if not one.code:
        rule, title = _RULE.match(text), ""
        if rule:
            title, _, text = text[rule.end() :].partition("  ")
            yield from (title[0].upper() + title[1:], "-" * len(title), "")
        yield from (inline(text), "")
        return
    if one.function:
        signature = " ".join(one.code.removeprefix("TE_API ").rstrip(";").split())
        yield from (f".. c:function:: {signature}", "", f"   {inline(text)}", "")
        for name, about in entries.items():
            kind = {"Gives": "returns", "Fails": "Fails"}.get(name, f"param {name}")
            yield f"   :{kind}: {inline(about)}"
        yield ""
        return
    kind, name = _kind(one.code)
    yield from (f".. c:{kind}:: {name}", "", f"   {inline(text)}", "", "   .. code-block:: c", "")
    yield from (f"      {line}" for line in one.code.splitlines())
    yield ""


def _kind(code: str) -> tuple[str, str]:
    """How Sphinx calls what a declaration declares, and its name."""
    for kind, pattern in {
        "macro": r"#define (\w+)",
        "enum": r"typedef enum \{[^}]*\} (\w+);",
        "struct": r"typedef struct \{[^}]*\} (\w+);",
        "type": r"typedef [\w ]+?[ *]*(?:\(\*)?(\w+)\)?(?:\(|;)",
    }.items():
        if found := re.match(pattern, code):
            return kind, found[1]
    raise ValueError(f"te_core.h: a declaration of an unknown kind: {code}")
