"""How reports list things: columns of text, and one label for names that differ in numbers only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], right: bool = False) -> str:
    """Columns of text with headings; numbers (all columns but the first) to the right if asked."""
    lines = [tuple(headings), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    rest = str.rjust if right else str.ljust
    cells = [(line[0].ljust(widths[0]), *map(rest, line[1:], widths[1:])) for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in cells)


#: In layers.3.proj, and in the weights of a GroupedLinear.
_NUMBER = re.compile(r"(?:(?<=\.)|(?<=\bweight)|^)(?:0|[1-9]\d*)(?=\.|$)")


def together(items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Pairs of a name and what there is to say of it, with one label for names that differ in nothing but numbers.

    `layers.{0..6,8..31}.proj x31` stands for exactly these 31, at the place of the first of them.
    """
    alike: dict[tuple[str, Any], set[tuple[int, ...]]] = {}
    for name, what in items:
        alike.setdefault((_NUMBER.sub("\0", name), what), set()).add(tuple(map(int, _NUMBER.findall(name))))
    labels = []
    for (pattern, what), numbers in alike.items():
        for box in _boxes(numbers):
            count, label = prod(map(len, box)), pattern
            for numbers_here in box:
                label = label.replace("\0", _ranges(numbers_here), 1)
            labels.append((f"{label} x{count}" if count > 1 else label, what))
    return labels


def _boxes(numbers: set[tuple[int, ...]]) -> Iterator[list[list[int]]]:
    """The numbers at each place, in as many pieces as it takes for a piece to hold every combination of its numbers."""
    if numbers == {()}:
        yield []
        return
    behind: dict[int, set[tuple[int, ...]]] = {}
    for first, *rest in numbers:
        behind.setdefault(first, set()).add(tuple(rest))
    alike: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first, rests in sorted(behind.items()):
        alike.setdefault(frozenset(rests), []).append(first)
    for same, firsts in alike.items():
        yield from ([firsts, *box] for box in _boxes(set(same)))


def _ranges(numbers: list[int]) -> str:
    """`{0..3,7}`; one number as it is."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return "{" + ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs) + "}"
