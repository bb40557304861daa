"""The install lines that errors name work: no index has the project, so they name where it came from."""

from __future__ import annotations

import json
import re
import shlex
from importlib import metadata
from pathlib import Path

import pytest

from te_core import hints

ROOT = Path(__file__).resolve().parents[2]


class Installed(metadata.Distribution):
    """A distribution with these files."""

    def __init__(self, origin: dict | None, requires: str = "") -> None:
        self._files = {"METADATA": f"Metadata-Version: 2.1\nName: te-runtime\nVersion: 1\n{requires}"}
        if origin is not None:
            self._files["direct_url.json"] = json.dumps(origin)

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path):
        return Path(path)


REQUIRES = (
    'Requires-Dist: numpy>=1.26\nRequires-Dist: torch>=2.8; extra == "torch"\n'
    'Requires-Dist: cupy-cuda13x<15,>=14.2; extra == "cu13"\nRequires-Dist: nvmath-python<2; extra == "cu13"\n'
)


def line(monkeypatch: pytest.MonkeyPatch, *found: Installed, extra: str = "cu13") -> list[str]:
    monkeypatch.setattr(metadata, "distributions", lambda name: iter(found))
    return shlex.split(hints.install(extra))


def test_the_line_fits_the_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clone, wheel = tmp_path / "a clone", tmp_path / "te_runtime-1-py3-none-any.whl"
    clone.mkdir()
    wheel.touch()
    editable = Installed({"url": clone.as_uri(), "dir_info": {"editable": True}}, REQUIRES)
    assert line(monkeypatch, editable) == ["pip", "install", "-e", f"{clone}[cu13]"]
    assert line(monkeypatch, Installed(None), editable) == ["pip", "install", "-e", f"{clone}[cu13]"]
    built = Installed({"url": wheel.as_uri(), "archive_info": {}}, REQUIRES)
    assert line(monkeypatch, built) == ["pip", "install", f"te-runtime[cu13] @ {wheel.as_uri()}"]
    wheel.unlink()
    packages = ["pip", "install", "cupy-cuda13x<15,>=14.2", "nvmath-python<2"]
    assert line(monkeypatch, built) == line(monkeypatch, Installed(None, REQUIRES)) == packages
    assert line(monkeypatch, Installed(None, REQUIRES), extra="torch") == ["pip", "install", "torch>=2.8"]
    assert line(monkeypatch) == ["pip", "install", "-e", f"{ROOT}[cu13]"]


def test_the_line_of_this_installation_names_it() -> None:
    assert str(ROOT) in hints.install("torch") or "torch" in hints.install("torch")


def test_nothing_names_a_package_that_no_index_has() -> None:
    places = [*ROOT.glob("te_*/**/*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    wrong = [place.name for place in places if re.search(r"install [\"']?te-runtime\[", place.read_text())]
    assert not wrong, wrong
