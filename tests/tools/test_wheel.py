"""A built wheel holds all of the project, and runs where its sources are not."""

from __future__ import annotations

import importlib.util
import platform
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import setuptools

from tools import release, wheels

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(int(setuptools.__version__.split(".")[0]) < 77, reason="building a wheel needs setuptools 77"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with wheels.sources() as tree:
        return wheels.plain(tree, tmp_path_factory.mktemp("wheel"), "--no-index", "--no-build-isolation")


def test_it_holds_every_file_of_the_packages(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    places = {"te_core": ROOT, "te_torch": ROOT, "te_cli": ROOT, "te_jax": ROOT / "bindings" / "jax"}
    wanted = {
        path.relative_to(base).as_posix()
        for package, base in places.items()
        for path in (base / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted <= inside, sorted(wanted - inside)
    assert {"te_core/py.typed", "te_torch/py.typed", "te_torch/compat/transformer_engine/__init__.py"} <= inside
    extra = {name for name in inside - wanted if ".dist-info/" not in name}
    assert not extra, extra


def test_its_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    about = Parser().parsestr(archive.read(name).decode())
    assert about["Name"] == "te-runtime" and about["Requires-Python"] == ">=3.10"
    assert about["Author"] == "te-runtime contributors"
    assert about["License-Expression"] == "Apache-2.0" and about["Summary"] and about["Version"] == wheels.version()
    assert about.get_all("License-File") == ["LICENSE", "te_cli/text/NOTICE"]
    assert not re.search(r"\]\((?!\w+:|#)", about.get_payload())  # of an index, links to files lead nowhere
    assert about.get_payload().startswith("# te-runtime") and about["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in about.get_all("Classifier")
    assert {"torch", "cu12", "cu13", "jax", "flax", "clients", "onnx"} <= set(about.get_all("Provides-Extra"))


def test_the_sources_build_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with wheels.sources() as tree:
        made = wheels.archive(tree, tmp_path)
    with tarfile.open(made) as archive:
        assert {f"{made.name[:-7]}/{name}" for name in ("CHANGELOG.md", "bindings/c/src/step.c")} <= set(
            archive.getnames()
        )
    again = wheels.plain(made, tmp_path, "--no-index", "--no-build-isolation")
    one, other = ({i.filename: i.CRC for i in zipfile.ZipFile(file).infolist()} for file in (wheel, again))
    assert {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)} <= {
        f"te_runtime-{wheels.version()}.dist-info/RECORD"
    }


@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("twine", "check_wheel_contents"))), reason="no twine")
def test_an_index_would_take_it(wheel: Path) -> None:
    release.looked_at([wheel])


RUNS = """
import te_jax, te_torch.compat
import transformer_engine.pytorch as te
from importlib import metadata
from te_core import hints
assert te_jax.__file__.startswith(sys.prefix) and te.Linear is te_torch.Linear
assert te_torch.__version__ == metadata.version("te-runtime")
line = hints.install("torch")
assert line.startswith("pip install") and ("te-runtime[torch] @ file:" in line or "torch>=" in line), line
"""


def test_it_runs_without_the_sources(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the packages that are here; more is imported than tools/release.py asks of a release."""
    monkeypatch.setattr(release, "INSTALLED", release.INSTALLED + RUNS)
    training = "--device cpu --steps 2 --layers 1 --hidden 32 --heads 2 --batch 2 --seq 16 --no-compare".split()
    seconds = release.tried(sys.executable, wheel, training, borrow=True)
    assert list(seconds) == ["environment", "install", "examples", "doctor", "bench", "train"]


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="no package: ziglang")
@pytest.mark.parametrize("arch", wheels.ARCHS)
def test_the_one_with_the_library(wheel: Path, tmp_path: Path, arch: str) -> None:
    """A C program is built against what it installs, and plays a file; the library asks for no newer glibc."""
    made = wheels.with_library(wheel, wheels.compiled(arch, tmp_path), f"manylinux_2_17_{arch}")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--no-index"]
    host = platform.machine() == arch
    into = ["--target", str(tmp_path / "site"), *(() if host else ("--platform", f"manylinux_2_17_{arch}"))]
    subprocess.run([*pip, *into, "--only-binary", ":all:", str(made)], check=True)
    library = tmp_path / "site" / wheels.LIBRARY
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
    assert versions and all((int(a), int(b)) <= wheels.GLIBC for a, b in versions)
    if not host:
        return
    compiler = [sys.executable, "-m", "ziglang", "cc", "-O1", "-I", str(tmp_path / "site" / wheels.HEADERS)]
    play, stub = tmp_path / "play", tmp_path / "libstub.so"
    example = [str(wheels.C / "examples" / "play.c"), str(library), "-ldl", "-lpthread"]
    subprocess.run([*compiler, *example, "-o", str(play)], check=True)
    subprocess.run([*compiler, "-fPIC", "-shared", str(wheels.C / "tests" / "stub.c"), "-o", str(stub)], check=True)
    env = {
        "LD_LIBRARY_PATH": str(library.parent),
        "TE_LIBCUDA": str(stub),
        "TE_LIBCUBLASLT": str(stub),
        "TE_LIBCUDNN": str(stub),
    }
    done = subprocess.run(
        [str(play), str(wheels.C / "tests" / "linear.te")], env=env, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and "output.0" in done.stdout, done.stderr
