"""The set-up says what it does, does it once for each set of extras, and shows all of a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup_env

PIP = """#!/bin/sh
echo "Collecting numpy"
echo "  Downloading numpy-2.whl (16 MB)"
echo "WARNING: a note of pip's own" >&2
echo "Installing collected packages: numpy, torch"
while [ $# -gt 1 ]; do
  [ "$1" = --target ] && mkdir -p "$2" && echo "$*" > "$2/asked"
  shift
done
exit $(cat {code})
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A project whose pip is a script."""
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("one")
    (tmp_path / "code").write_text("0")
    python = venv / "bin" / "python"
    python.write_text(PIP.format(code=tmp_path / "code"))
    python.chmod(0o755)
    for name, value in {"ROOT": tmp_path, "VENV": venv, "PYTHON": python, "make_venv": lambda: None}.items():
        monkeypatch.setattr(setup_env, name, value)
    monkeypatch.setattr(setup_env, "cuda_extra", lambda: None)
    return tmp_path


def said(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *extras: str) -> str:
    monkeypatch.setattr(sys, "argv", ["setup_env.py", *extras])
    setup_env.main()
    return capfd.readouterr().out


def test_it_says_what_it_fetches_and_does_it_once(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = said(capfd, monkeypatch)
    assert "installing te-runtime[torch,dev,nvrtc]" in first and "downloading numpy-2.whl (16 MB)" in first
    assert "unpacking 2 packages" in first and "done in" in first and "a note" not in first
    assert said(capfd, monkeypatch) == ""
    assert "te-runtime[torch,dev,nvrtc,clients]" in said(capfd, monkeypatch, "clients")
    assert said(capfd, monkeypatch) == said(capfd, monkeypatch, "clients") == "", "neither makes the other look again"
    (place / "pyproject.toml").write_text("two")
    assert said(capfd, monkeypatch) and said(capfd, monkeypatch, "clients")


def test_releases_of_one_package_stand_apart(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "APART", {"megatron-core": ("1.0", "2.0")})
    said(capfd, monkeypatch)
    assert not (place / "build").exists(), "for the extra `clients` alone"
    (place / "code").write_text("1")
    with pytest.raises(subprocess.CalledProcessError):
        said(capfd, monkeypatch, "clients")
    capfd.readouterr()
    assert not setup_env.folder_of("megatron-core", "1.0").exists(), "half of it is none"
    (place / "code").write_text("0")
    assert said(capfd, monkeypatch, "clients").count("setup: installing megatron-core") == 2
    for release in ("1.0", "2.0"):
        asked = (setup_env.folder_of("megatron-core", release) / "asked").read_text()
        assert asked.endswith(f"megatron-core=={release}\n"), asked
    (setup_env.folder_of("megatron-core", "2.0") / "asked").unlink()
    setup_env.folder_of("megatron-core", "2.0").rmdir()
    assert said(capfd, monkeypatch, "clients").count("setup: installing") == 1


def test_a_failure_is_shown_whole(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "code").write_text("3")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        said(capfd, monkeypatch)
    shown = capfd.readouterr().err
    assert failed.value.returncode == 3 and "Collecting numpy" in shown and "a note of pip's own" in shown
    (place / "code").write_text("0")
    assert said(capfd, monkeypatch), "no stamp was left"
