"""Our docstrings as the markup that Sphinx reads.

A docstring of this project is plain text with `code` between single backticks. Sections `Args:`, `Returns:`, `Raises:`
and `Example:` close it; a paragraph that is indented is a table or a formula, and keeps its lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_SECTIONS = ("Args:", "Returns:", "Yields:", "Raises:", "Example:")
_ENTRY = re.compile(r"(\*{0,2}\w+): (.*)")
_CODE = re.compile(r"`([^`]+)`")
_MARKUP = re.compile(r"([\\*|_])")


def inline(text: str) -> str:
    """A text in which nothing but `code` is markup."""
    parts = _CODE.split(text)
    found = [_MARKUP.sub(r"\\\1", part) if i % 2 == 0 else f"\\ ``{part}``\\ " for i, part in enumerate(parts)]
    return "".join(found)


def restructured(lines: Sequence[str]) -> list[str]:
    """The lines of a docstring as reStructuredText."""
    found: list[str] = []
    section, body = "", list[str]()
    for line in [*lines, _SECTIONS[0]]:
        if line in _SECTIONS:
            found += _section(section, body)
            section, body = line, []
        else:
            body.append(line)
    return found


def _section(name: str, lines: list[str]) -> Iterator[str]:
    """One section, the text in front of all sections as well."""
    if not name:
        yield from _text(lines)
    elif name == "Example:":
        yield from ("**Example**", "", ".. code-block:: python", "", *lines, "")
    elif name in ("Returns:", "Yields:"):
        yield from (f":{name[:-1].lower()}: {inline(' '.join(line.strip() for line in lines))}", "")
    else:
        kind = "param" if name == "Args:" else "raises"
        for entry, about in _entries(lines):
            yield f":{kind} {entry.replace('*', chr(92) + '*')}: {inline(about)}"
        yield ""


def _text(lines: list[str]) -> Iterator[str]:
    """Paragraphs and lists; a paragraph with lines that are indented keeps its lines."""
    for part in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        items = re.split(r"^- ", part, flags=re.MULTILINE)
        if len(items) > 1 and not items[0]:
            yield from (f"- {inline(' '.join(item.split()))}" for item in items[1:])
        elif re.search(r"^  ", part, re.MULTILINE):
            yield from ("::", "", *(f"   {line}" for line in part.splitlines()))
        else:
            yield inline(" ".join(part.split()))
        yield ""


def _entries(lines: list[str]) -> Iterator[tuple[str, str]]:
    """(name, what is said of it) of a section."""
    entry, about = "", ""
    for line in filter(str.strip, lines):
        new = _ENTRY.fullmatch(line.strip()) if len(line) - len(line.lstrip()) == 4 else None
        if new is None:
            about += f" {line.strip()}"
            continue
        if entry:
            yield entry, about
        entry, about = new[1], new[2]
    if entry:
        yield entry, about
