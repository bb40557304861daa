"""Rows of messages of inspect, bisect and of schedules; tests/messages/test_messages.py says how to add one."""

from __future__ import annotations

from typing import Any

import torch

from te_torch.debug import bisect, inspect
from te_torch.debug.schedule import asked
from tests.messages.rows import Rows
from tests.torch import planted

ROWS = Rows()
NET = planted.model()
NAN = float("nan")


def look(**options: Any) -> None:
    """An inspection with these options."""
    inspect(NET, **options)


ROWS.each(look, layers=("nowhere", 5), gemms=(["forward"], 5), tensors=("input",), freq=(0,), start_step=("a",))
ROWS.each(look, end_step=(1.5,), group=(object(),))
ROWS.add(look, gemms="fprop", tensors="wgrad")
ROWS["inspect of a model without our layers"] = lambda: inspect(torch.nn.Linear(3, 3))
ROWS["inspect of a compiled model"] = lambda: inspect(torch.compile(NET, backend="eager"))


def search(step: Any = None, net: Any = NET, **options: Any) -> None:
    """A bisection with these options."""
    bisect(step or planted.step_of("current"), net, progress=False, **options)


ROWS.each(search, level=("tensor",), compare=("norm",), tolerance=(NAN, "a"), restore=([3], 3))
ROWS.each(search, layers=("nowhere", 5, "(", [5]))
ROWS.add(search, 5)
ROWS["bisect of a step that returns nothing"] = lambda: search(lambda m: None)
ROWS["bisect of a step without gradients"] = lambda: search(lambda m: 1.0, compare="gradients")
ROWS["bisect of a step that is no number"] = lambda: search(lambda m: NAN)
ROWS["bisect of a compiled model"] = lambda: search(planted.step_of(None), torch.compile(NET, backend="eager"))

for config in (
    {"freq": 0},
    {"freq": True},
    {"start_step": "a"},
    {"end_step": 2.5},
    {"start_end_list": [[0, 3], [5]]},
    {"start_end_list": [0, 3]},
    {"start_end_list": "0-3"},
):
    ROWS.add(asked, config, 1)
