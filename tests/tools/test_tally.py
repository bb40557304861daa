"""Whether a run of the suite says how many calls of layers it replayed, over all its processes, and in its record."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tally
from tests.backends import more_without_gpu
from tools import suite_record

ROOT = Path(__file__).resolve().parent.parent.parent


#: Tests that replay calls, of which one imports no torch.
ALONE = ["tests/core/test_tape_keys.py", "-k", "takes_no_tapes_place", "-n", "0"]
OF_TWO = ["tests/torch/test_replays.py", "-k", "is_no_view or every_layer", "-n", "2"]


@pytest.mark.parametrize(
    ("tests", "replayed"),
    [pytest.param(ALONE, 2, id="alone"), pytest.param(OF_TWO, 11, marks=more_without_gpu, id="of two")],
)
def test_calls_of_all_processes_count(tests: list[str], replayed: int, tmp_path: Path) -> None:
    xml = tmp_path / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={xml}", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = suite_record.outcome(xml)["calls of layers"]
    assert found[""] >= replayed and tally.told(tally.Counter(found)) in done.stdout


def test_what_is_said() -> None:
    found = tally.Counter({"": 1990, "an inspector looks on": 8, "sizes on the host": 2})
    said = "1,990 of 2,000 calls of layers replayed (99.5%); not: an inspector looks on (8); sizes on the host (2)"
    assert tally.told(found) == said and tally.told(tally.Counter()) == ""


def test_a_record_shows_it(tmp_path: Path) -> None:
    calls = {"": 90, "why": 10}
    shared = {"time": "2026-01-02T00:00:00Z", "about": {"device": "NVIDIA H200", "torch": "2", "commit": "abc"}}
    shared |= {"sources": "x", "passed": 1, "failed": 0, "failed tests": [], "skipped": 0, "skipped by reason": {}}
    for shard in ("1/2", "2/2"):
        content = json.dumps({**shared, "shard": shard, "calls of layers": calls})
        (tmp_path / f"2026-01-02-h200-suite-{shard[0]}.json").write_text(content)
    found = [(suite_record.ROOT / path.name, record) for path, record in suite_record.newest(tmp_path)]
    assert "180 of 200 calls of layers replayed (90.0%); not: why (20)." in suite_record.markdown(found)
