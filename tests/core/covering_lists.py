"""`covering` for lists that name several parameters at once, or have ids of their own."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import pytest

from tests.covering import covering


class _Row(NamedTuple):
    """One entry of a list: a value for each parameter that the list names."""

    values: tuple[Any, ...]
    id: str


def covering_lists(*lists: pytest.MarkDecorator, turns: int = 1) -> pytest.MarkDecorator:
    """In the place of several `pytest.mark.parametrize`, given in the order of the ids: see `covering`."""
    names = [_names(given) for given in lists]
    cases = covering(turns=turns, **{"-".join(own): _rows(given) for own, given in zip(names, lists, strict=True)})
    return pytest.mark.parametrize(
        tuple(chain(*names)),
        [
            pytest.param(
                *chain(*(row.values for row in case.values)),
                id="-".join(row.id for row in case.values),
                marks=case.marks,
            )
            for case in cases.args[1]
        ],
    )


def _names(given: pytest.MarkDecorator) -> tuple[str, ...]:
    names = given.args[0]
    return (names,) if isinstance(names, str) else tuple(names)


def _rows(given: pytest.MarkDecorator) -> list[_Row]:
    single, ids = isinstance(given.args[0], str), given.kwargs.get("ids") or _spelled
    listed = list(given.args[1])
    named = [None] * len(listed) if callable(ids) else list(ids)
    rows = []
    for value, name in zip(listed, named, strict=True):
        if isinstance(value, type(pytest.param())):
            assert not value.marks, "which of the cases that it is in are to have them?"
            values, name = tuple(value.values), value.id or name
        else:
            values = (value,) if single else tuple(value)
        rows.append(_Row(values, name or "-".join(map(ids if callable(ids) else _spelled, values))))
    return rows


def _spelled(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)
