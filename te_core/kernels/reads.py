"""Which arguments a kernel only reads: what its signature calls `const`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from te_core.kernels.compiler import source_path

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def only_read(name: str, entry: str, constants: Mapping[str, object], letters: str) -> tuple[bool, ...]:
    """Of each of the arguments, whose kinds `letters` are (`te_core.kernels.loader.get`).

    None of them, where the signature cannot be made out: to say that memory is written is the careful answer.
    """
    found = _parameters(name, entry, constants)
    if [letter == "p" for letter in letters] != ["*" in one for one in found]:
        return (False,) * len(letters)
    return tuple("const " in one for one in found)


def _parameters(name: str, entry: str, constants: Mapping[str, object]) -> list[str]:
    text = _COMMENT.sub("", source_path(name).read_text())
    begin = re.search(rf"__global__[^;{{]*?\b{re.escape(entry)}\(", text)
    if begin is None:
        return []
    end, depth = begin.end(), 1
    while depth and end < len(text):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    lines, kept = [], [True]
    for line in text[begin.end() : end - 1].split("\n"):
        word = line.strip()
        if word.startswith("#if"):
            kept.append(str(constants.get(word[3:].strip(), 0)) not in ("0", "False"))
        elif word.startswith("#else"):
            kept[-1] = not kept[-1]
        elif word.startswith("#endif"):
            kept.pop()
        elif all(kept):
            lines.append(line)
    return [one.strip() for one in " ".join(lines).split(",")]
