"""Records of the suite on a GPU, and how many calls of layers a run replayed, over all its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness
from tests import tally
from tests.backends import more_without_gpu
from tools import suite_record

ROOT = Path(__file__).resolve().parents[2]

SUITE = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_fine(n): pass

def test_wrong(): assert 1 == 2

@pytest.fixture
def broken(): raise OSError("no such thing")

def test_never_begins(broken): pass

@pytest.mark.parametrize("n", range(2))
def test_other_chip(n): pytest.skip("needs sm_100")

@pytest.mark.skip(reason="needs 2 GPUs")
def test_two(): pass

@pytest.mark.xfail(reason="a known one")
def test_known(): assert False
"""


@pytest.fixture(scope="module")
def xml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pytest itself writes."""
    folder = tmp_path_factory.mktemp("ran")
    (folder / "test_small.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=tests.xml", "."]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # it needs none of the installed ones
    subprocess.run(command, cwd=folder, env=env, capture_output=True, timeout=120)
    return folder / "tests.xml"


def record(folder: Path, name: str, **changes: object) -> None:
    base = {
        "time": "2026-01-02T00:00:00Z",
        "about": {"device": "NVIDIA H200", "torch": "2.11", "commit": "abc"},
        "shard": "1/1",
        "sources": suite_record.sources(),
        "passed": 1200,
        "failed": 0,
        "failed tests": [],
        "skipped": 3,
        "skipped by reason": {"needs sm_100": 3},
    }
    (folder / name).write_text(json.dumps({**base, **changes}))


def test_what_a_record_says(xml: Path, tmp_path: Path) -> None:
    path = suite_record.write(xml, "2/3", tmp_path, "0123456789ab", "--require-cuda")
    found = json.loads(path.read_text())
    assert path.name.endswith("-suite.json") and found["shard"] == "2/3"
    assert (found["passed"], found["failed"], found["skipped"]) == (3, 2, 4)
    assert sorted(name.partition("::")[2] for name in found["failed tests"]) == ["test_never_begins", "test_wrong"]
    assert found["skipped by reason"] == {"needs sm_100": 2, "needs 2 GPUs": 1, "expected to fail: a known one": 1}
    assert found["about"]["commit"] == "0123456789ab" and found["about"]["device"] == harness.device_name()
    again = suite_record.write(xml, "3/3", tmp_path, "")
    assert again.name.endswith("-suite-2.json") and path.is_file()


def test_the_newest(tmp_path: Path) -> None:
    """The shards of one tree, of each its last run; results of a CPU and of other trees are none."""
    assert suite_record.newest(tmp_path) == [] and "not run" in suite_record.markdown([])
    record(tmp_path, "2026-01-01-h200-suite.json", time="2026-01-01T00:00:00Z", sources="other")
    record(tmp_path, "2026-01-02-h200-suite.json", shard="1/2", failed=1, **{"failed tests": ["a::b"]})
    record(tmp_path, "2026-01-02-h200-suite-2.json", shard="1/2", time="2026-01-02T01:00:00Z")
    record(tmp_path, "2026-01-03-cpu-suite.json", time="2026-01-03T00:00:00Z")
    found = suite_record.newest(tmp_path)
    assert [path.name for path, _ in found] == ["2026-01-02-h200-suite-2.json"]
    assert "no record of shard 2/2" in suite_record.check(found)
    record(tmp_path, "2026-01-02-h200-suite-3.json", shard="2/2", failed=1, **{"failed tests": ["a::c"]})
    assert "1 tests failed: a::c" in suite_record.check(suite_record.newest(tmp_path))
    record(tmp_path, "2026-01-02-h200-suite-3.json", shard="2/2")
    assert not suite_record.check(suite_record.newest(tmp_path))
    record(tmp_path, "2026-01-04-h200-suite.json", time="2026-01-04T00:00:00Z", sources="other")
    assert "other" in suite_record.check(suite_record.newest(tmp_path))


def test_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_record, "ROOT", tmp_path)
    monkeypatch.setattr(suite_record, "sources", lambda: "this")
    record(tmp_path, "2026-01-02-h200-suite.json")
    text = suite_record.markdown(suite_record.newest(tmp_path))
    assert "| 1/1 | 1,200 | 0 | 3 | [2026-01-02-h200-suite.json](../../2026-01-02-h200-suite.json) |" in text
    assert "`abc`" in text and "needs sm_100 (3)" in text


def test_what_replays_nothing_has_records_of_its_own(
    xml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They never stand for the suite, and are shown beside the suite's where both are of the same sources."""
    monkeypatch.setattr(suite_record, "ROOT", tmp_path)
    monkeypatch.setenv("TE_CORE_TAPES", "never")
    assert suite_record.write(xml, "1/1", tmp_path / "written", "abc").name.endswith("-interpreted.json")
    record(tmp_path, "2026-01-02-h200-suite.json", sources="this")
    record(tmp_path, "2026-01-03-h200-interpreted.json", sources="that", passed=1, time="2026-01-03T00:00:00Z")
    suite = suite_record.newest(tmp_path)
    assert [path.name for path, _ in suite] == ["2026-01-02-h200-suite.json"]
    assert "make gpu-interpreted" not in shown_of(suite, tmp_path)
    record(tmp_path, "2026-01-04-h200-interpreted.json", sources="this", passed=900, time="2026-01-04T00:00:00Z")
    shown = shown_of(suite, tmp_path)
    assert "(`make gpu-interpreted`): 900 passed, 0 failed, 3 skipped; [2026-01-04-h200-interpreted.json]" in shown


def shown_of(suite: list[suite_record.Record], folder: Path) -> str:
    return suite_record.markdown(suite, {name: suite_record.newest(folder, name) for name in suite_record.BESIDE})


def test_ranks_that_share_a_gpu_have_records_of_their_own(
    xml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite_record, "ROOT", tmp_path)
    monkeypatch.setenv("TE_TESTS_RANKS_SHARE", "1")
    assert suite_record.write(xml, "1/1", tmp_path / "written", "abc").name.endswith("-ranks.json")
    record(tmp_path, "2026-01-02-h200-suite.json", sources="this")
    record(tmp_path, "2026-01-03-h200-ranks.json", sources="this", passed=225)
    suite = suite_record.newest(tmp_path)
    assert [path.name for path, _ in suite] == ["2026-01-02-h200-suite.json"]
    assert "`make gpu-ranks`): 225 passed, 0 failed" in shown_of(suite, tmp_path)


def test_sources(tmp_path: Path) -> None:
    """Names and contents count, also of files that move."""
    (tmp_path / "te_core").mkdir()
    (tmp_path / "te_core" / "a.py").write_text("1")
    seen = {suite_record.sources(tmp_path)}
    (tmp_path / "te_core" / "a.py").write_text("2")
    seen.add(suite_record.sources(tmp_path))
    (tmp_path / "te_core" / "a.py").rename(tmp_path / "te_core" / "b.py")
    seen.add(suite_record.sources(tmp_path))
    (tmp_path / "te_core" / "b.pyc").write_text("no source")
    seen.add(suite_record.sources(tmp_path))
    assert len(seen) == 3


@pytest.mark.more  # imports torch anew
def test_make_gpu_writes_one(tmp_path: Path) -> None:
    """The whole way, with a suite of one file and no GPU."""
    command = [sys.executable, "tools/gpu_run.py", "--out", str(tmp_path), "--jobs", "1", "--commit", "feedbeef"]
    command += ["--wheels", str(tmp_path), "--", "tests/tools/test_tail_guards.py"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (path,) = tmp_path.glob("*-suite.json")
    found = json.loads(path.read_text())
    assert found["about"]["commit"] == "feedbeef" and found["passed"] > 0 and not found["failed"]
    assert found["sources"] == suite_record.sources()


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
