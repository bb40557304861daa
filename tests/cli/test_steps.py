"""`te report` and `te warmup`: reports of a step, and errors in it without a traceback of ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Te

places = pytest.mark.parametrize("place", ["mine.py", "mine"])


@places
def test_a_report_says_what_ran(place: str, program: Path, te: Te) -> None:
    code, said, _ = te("report", f"{place}:step")
    assert code == 0 and "saved for backward" in said
    assert "float8_e4m3 per tensor x float8_e4m3 per tensor" in said
    found = json.loads(te("report", f"{place}:step", "--json").out)
    assert found.keys() == {"precision", "memory", "attention"} and found["precision"] and found["memory"]


def test_a_warmup_runs_the_step_twice(program: Path, te: Te) -> None:
    found = json.loads(te("warmup", "mine:step", "--json").out)
    seconds = found["seconds"]
    assert not found["on disk"]  # of a model on the CPU
    assert len(seconds) == len(sys.modules["mine"].calls) == 2 and min(seconds) > 0


@pytest.mark.parametrize("step, said", [("wrong", "To do:"), ("nothing", "a step that returns NoneType")])
def test_an_error_of_ours_is_shown_without_its_way(step: str, said: str, program: Path, te: Te) -> None:
    code, _, err = te("report", f"mine:{step}")
    assert code == 1 and said in err and "Traceback" not in err


@places
@pytest.mark.parametrize("text", ["def step():\n    return missing_name\n", "import missing_name\n"])
def test_an_error_of_the_user_is_shown_from_their_lines_on(text: str, place: str, program: Path, te: Te) -> None:
    program.write_text(text)
    code, _, err = te("report", f"{place}:step")
    assert code == 1 and "missing_name" in err and err.count("  File ") == 1 and "mine.py" in err


def test_a_report_says_why_attention_runs_as_it_does(program: Path, te: Te) -> None:
    """Layers that choose alike stand together."""
    said = te("report", "mine:attention").out
    assert "attention of 0.self_attention.core_attention, 1.self_attention.core_attention\n" in said
    assert "chosen: FusedAttention" in said and "FlashAttention" in said
    (attention,) = json.loads(te("report", "mine:attention", "--json").out)["attention"]
    assert len(attention["layers"]) == 2 and attention["backend"] == "FusedAttention" and attention["reasons"]
