"""A built wheel holds all of the project, and runs where its sources are not."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import setuptools

from tools import wheels

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(int(setuptools.__version__.split(".")[0]) < 77, reason="building a wheel needs setuptools 77"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.plain(tmp_path_factory.mktemp("wheel"), "--no-index", "--no-build-isolation")


def test_it_holds_every_file_of_the_packages(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    places = {"te_core": ROOT, "te_torch": ROOT, "te_jax": ROOT / "bindings" / "jax"}
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
    assert about["License-Expression"] == "Apache-2.0" and about["Summary"]
    assert about.get_payload().startswith("# te-runtime") and about["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in about.get_all("Classifier")
    assert {"torch", "cu12", "cu13", "jax", "flax", "clients", "onnx"} <= set(about.get_all("Provides-Extra"))


RUNS = """
import sys
import te_core, te_torch, te_jax
assert all(m.__file__.startswith(sys.prefix) for m in (te_core, te_torch, te_jax)), te_core.__file__
import torch
from te_core import hints
from te_core.recipe import DelayedScaling
model = torch.nn.Sequential(te_torch.LayerNormLinear(64, 64), te_torch.TransformerLayer(64, 128, 4)).to("cpu")
for _ in range(2):
    with te_torch.autocast(recipe=DelayedScaling()):
        model(torch.randn(16, 2, 64)).sum().backward()
assert not te_torch.precision_report(model).fallbacks
import te_torch.compat
import transformer_engine.pytorch as te
from importlib import metadata
assert te.Linear is te_torch.Linear and te_torch.__version__ == metadata.version("te-runtime")
line = hints.install("torch")
assert line.startswith("pip install") and ("te-runtime[torch] @ file:" in line or "torch>=" in line), line
print("ok")
"""


STEP = """
import te_torch, torch
def step():
    model = te_torch.Linear(32, 32, device="cpu")
    model(torch.randn(16, 32))
    return model
"""


def test_it_runs_without_the_sources(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    # What it depends on is borrowed; the sources' own installation beside it is not (its .pth is not read there).
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    ).stdout.strip()
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(python), "-c", RUNS], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stdout.strip() == "ok", done.stderr[-3000:]
    (tmp_path / "steps.py").write_text(STEP)
    te = [str(python.parent / "te"), "report", "steps.py:step"]
    done = subprocess.run(te, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0 and "all in high precision" in done.stdout, done.stderr[-3000:]


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
