"""When a feature looks."""

from __future__ import annotations

from typing import Any

import pytest

from te_core.errors import ArgumentError
from te_torch.debug.schedule import asked


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, lambda i: True),
        ({"freq": 3}, lambda i: i % 3 == 0),
        ({"start_step": 2, "end_step": 5}, lambda i: 2 <= i <= 5),
        ({"freq": 2, "start_step": 3, "end_step": 9}, lambda i: 3 <= i <= 9 and i % 2 == 0),
        ({"freq": 4, "start_step": 5}, lambda i: i >= 5 and i % 4 == 0),
        ({"start_end_list": [[1, 2], [6, 7]]}, lambda i: i in (1, 2, 6, 7)),
        ({"freq": 5, "start_end_list": [[1, 4], [6, 9]]}, lambda i: False),
        ({"end_step": -1}, lambda i: True),
    ],
)
def test_schedules(config: dict[str, Any], wanted: Any) -> None:
    for i in range(12):
        now, after = asked(config, i)
        assert now == wanted(i)
        assert after == next((j for j in range(i + 1, 60) if wanted(j)), None)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"freq": 0}, "freq: 0"),
        ({"freq": True}, "freq: True"),
        ({"start_step": "a"}, r"start_step, end_step: \('a', None\)"),
        ({"end_step": 2.5}, r"start_step, end_step: \(None, 2.5\)"),
        ({"start_end_list": [[0, 3], [5]]}, r"start_end_list: \[5\]"),
        ({"start_end_list": [0, 3]}, "start_end_list: 0"),
        ({"start_end_list": "0-3"}, "start_end_list: '0-3'"),
    ],
)
def test_wrong_schedules(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        asked(config, 1)
