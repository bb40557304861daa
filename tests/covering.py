"""Tests over several lists of options at once: of their product, a part that names each option."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def covering(*, turns: int = 1, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrized by lists by name: every value of each is run with some of the others, the whole product by `--full`.

    One turn is as long as the longest list and goes through all lists side by side; in each further turn they are
    shifted against one another by one more.
    """
    lists = [list(values) for values in axes.values()]
    most = max(map(len, lists))
    chosen = {
        tuple((i + turn * shift) % len(values) for shift, values in enumerate(lists))
        for turn in range(turns)
        for i in range(most)
    }
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(*(values[i] for values, i in zip(lists, where, strict=True)), marks=marks)
            for where in product(*(range(len(values)) for values in lists))
            for marks in [[] if where in chosen else [pytest.mark.full]]
        ],
    )
