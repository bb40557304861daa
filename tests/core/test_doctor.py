"""`python -m te_core.doctor`: says what is here, and fails only where a GPU is present and cannot be used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from te_core import env, libraries
from te_core.device import RECIPES
from te_core.errors import LibraryError
from te_core.tools import doctor
from tests.backends import cuda_devices
from tests.core.test_libraries import A100, H200

ROOT = Path(__file__).resolve().parents[2]


def test_the_door():
    ran = subprocess.run(
        [sys.executable, "-m", "te_core.doctor"], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert all(name in ran.stdout for name in env.VARIABLES)
    assert all(f"  {name} " in ran.stdout for name in libraries.KNOWN)
    if cuda_devices():
        assert all(recipe in ran.stdout for recipe in RECIPES)
        assert "cuda:0" in ran.stdout
    else:
        assert "Runtime.cpu" in ran.stdout


def rows(info):
    return {line.split("  ")[1]: line for line in doctor.table(info)}


def test_the_table_is_the_predicates():
    assert rows(H200)["DelayedScaling"].split()[1] == "yes"
    assert rows(A100)["DelayedScaling"].split()[1] == "-"
    assert "needs compute capability 8.9, this is 8.0" in rows(A100)["DelayedScaling"]
    assert rows(A100)["bfloat16 / float16"].split()[3] == "yes"


def test_a_gpu_without_its_libraries_is_a_fault(monkeypatch):
    class NoDevices:
        device_count = 0

    def missing(name):
        raise LibraryError(f"load {name}", "nothing", "a library", f"install {name}")

    monkeypatch.setattr(libraries, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(libraries, "driver", NoDevices)
    monkeypatch.setattr(libraries, "version", missing)
    faults: list[str] = []
    text = "\n".join(doctor.report(faults))
    assert "install cublasLt" in text
    assert any("load cublasLt" in fault for fault in faults)
    assert any("load nvrtc" in fault for fault in faults)


def test_two_copies_are_a_fault(monkeypatch):
    monkeypatch.setattr(libraries, "mapped", lambda: {"cudnn": ["/a/libcudnn.so.9", "/b/libcudnn.so.9"]})
    monkeypatch.setattr(libraries, "KNOWN", {})
    monkeypatch.setattr(doctor, "_bindings", lambda faults: ())
    faults: list[str] = []
    list(doctor._libraries(faults))
    assert any("cudnn is mapped 2 times: /a/libcudnn.so.9, /b/libcudnn.so.9" in fault for fault in faults)
