"""Which folders are loaded, which layers are selected, where nvdlfw_inspect itself would end in an error, and when."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import te_torch as te
from te_torch.debug.schedule import asked
from tests.debug.conftest import FEATURES, config

STATS: dict[str, Any] = {"stats": ["max"], "tensors": ["activation"]}
NAMES = ("net.1.fc1", "net.1.fc2", "net.2.fc1")


def logged(session: Any) -> set[str]:
    """The layers of which statistics are written."""
    x = torch.randn(16, 32)
    for name in NAMES:
        te.Linear(32, 32, name=name, device="cpu")(x)
    session.step()
    return {name.removesuffix("_activation_max") for name, _ in session.statistics()}


@pytest.mark.parametrize(
    ("layers", "selected"),
    [
        ({"layer_numbers": 1}, NAMES[:2]),
        ({"layer_numbers": [2]}, NAMES[2:]),
        ({"layer_numbers": ["0-1"], "layer_types": ["fc2"]}, NAMES[1:2]),
        ({"exact_layer_names": [NAMES[1]]}, NAMES[1:2]),
        ({"exact_layer_names": ["nobody"]}, ()),
    ],
)
def test_selected(debugging: Any, layers: dict[str, Any], selected: tuple[str, ...]) -> None:
    assert logged(debugging(config(layers, LogTensorStats=STATS))) == set(selected)


def test_a_section_that_selects_no_layer(debugging: Any) -> None:
    """One warning, after the first iteration, which says what there would be."""
    sections = {
        name: config({"layer_types": [name]}, LogTensorStats=STATS)["one"] for name in (NAMES[0], "attention", "fc9")
    }
    session = debugging(sections)
    with pytest.warns(UserWarning) as warned:
        assert logged(session) == {NAMES[0]}
        assert logged(session) == {NAMES[0]}
    said = [str(w.message) for w in warned if "acts on nothing" in str(w.message)]
    assert len(said) == 2 and "{'layer_types': ['attention']}" in said[0] and "{'layer_types': ['fc9']}" in said[1]
    assert all(", ".join(NAMES) in text for text in said)


def test_a_key_that_selects_nothing(debugging: Any) -> None:
    with pytest.warns(UserWarning, match="layers: 'layer_number' selects nothing. Allowed: .*layer_numbers"):
        session = debugging(config({"layer_types": ["fc1"], "layer_number": 2}, LogTensorStats=STATS))
    assert logged(session) == {NAMES[0], NAMES[2]}


def test_two_sections_by_name(debugging: Any) -> None:
    """Each selects its own: neither knows the other's layers."""
    sections = {
        name: config({"exact_layer_names": [name]}, LogTensorStats=STATS)["one"] for name in (NAMES[0], NAMES[2])
    }
    assert logged(debugging(sections)) == {NAMES[0], NAMES[2]}


def test_a_folder_that_is_not_there(debugging: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="nowhere does not exist"):
        session = debugging(config(LogTensorStats=STATS), tmp_path / "nowhere")
    assert [line for line in session.lines() if line.startswith("WARNING") and "nowhere" in line]
    assert logged(session) == set(NAMES)


@pytest.mark.more  # imports torch anew
def test_a_package_imported_before(tmp_path: Path) -> None:
    given = [str(tmp_path / "a"), str(FEATURES)]
    script = f"""
import nvdlfw_inspect.debug_manager, te_torch, nvdlfw_inspect.api as api
api.initialize({config(LogTensorStats=STATS)!r}, {given!r}, log_dir={str(tmp_path)!r})
api.end_debug()
api.initialize("", {str(tmp_path / "b")!r}, log_dir={str(tmp_path)!r})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in "ab":
        assert f"WARNING - feature_dirs: {tmp_path / name} does not exist" in done.stderr


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
