"""`python -m te_core.doctor`: says what is here, and fails only where a GPU is present and cannot be used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from te_core import env, libraries
from te_core.device import RECIPES
from te_core.errors import LibraryError
from te_core.tools import attention_table, doctor
from tests.backends import cuda_devices
from tests.core.test_libraries import A100, H200

ROOT = Path(__file__).resolve().parents[2]


def test_the_door():
    ran = subprocess.run(
        [sys.executable, "-m", "te_core.doctor"], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"({len(env.VARIABLES)} can be: python -m te_core.doctor --variables)" in ran.stdout
    assert all(f"  {name} " in ran.stdout for name in libraries.KNOWN)
    if cuda_devices():
        assert all(recipe in ran.stdout for recipe in RECIPES)
        assert "cuda:0" in ran.stdout
    else:
        assert "Runtime.cpu" in ran.stdout


HERE = (9, 19, 0)  # cuDNN


def rows(info):
    return {line.split("  ")[1]: line for line in doctor.table(info)}


def test_the_table_is_the_predicates():
    assert rows(H200)["DelayedScaling"].split()[1] == "yes"
    assert rows(A100)["DelayedScaling"].split()[1] == "-"
    assert "needs compute capability 8.9, this is 8.0" in rows(A100)["DelayedScaling"]
    assert rows(A100)["bfloat16 / float16"].split()[3] == "yes"


def test_the_table_of_attention_is_the_rules():
    """One line for each row; what dispatch refuses is refused with its reason, forward and backward apart."""
    lines = list(attention_table.table(H200, HERE))
    assert "attention by cuDNN 9.19.0" in lines[0] and len(lines) == len(attention_table.ROWS) + 1
    found = {line[2:].split("  ")[0]: line for line in lines}

    def marks(name, device=H200, version=HERE):
        line = next(x for x in attention_table.table(device, version) if x.startswith(f"  {name}  "))
        return line[len(name) + 2 :].split()[:2]

    assert marks("causal") == marks("packed (thd)") == marks("FP8") == ["yes", "yes"]
    assert marks("heads of 512") == marks("FP8 + heads of 64") == ["yes", "-"]
    assert marks("arbitrary mask") == marks("FP8 + packed (thd)") == ["-", "-"]
    assert "paged cache has no backward" in found["paged cache"] and found["causal"].rstrip().endswith("yes")
    assert marks("packed (thd)", A100) == ["-", "-"] and marks("causal", A100) == ["yes", "yes"]
    assert marks("softmax learnable", version=(9, 12, 0)) == ["-", "-"]


# What the rules say that can refuse on an H200 with cuDNN 9.19; the others are of other devices, versions, types.
SAID = (
    "arbitrary mask", "16 bytes", "excludes dropout", "excludes a bias", "more than one query", "packed queries",
    "no backward", "multiples of 8", "Its widest head", "one bound", "excludes lengths", "a key for each",
    "max_logit excludes", "delayed scaling", "up to 256", "takes no bias", "FP8 attention has no bottom-right",
    "no packed", "FP8 attention has no softmax", "no dropout", "heads of 128", "9.26", "query dimension",
    "query and key", "not deterministic", "gradient of the bias",
)  # fmt: skip


def test_the_list_of_refusals_is_whole_and_no_longer_than_that():
    found = attention_table.refusals(H200, HERE)
    said = " ".join(reason for reason, _ in found)
    assert all(words in said for words in SAID), [words for words in SAID if words not in said]
    for (reason, in_training), several in found.items():
        for features in several:
            asked = attention_table.answers(H200, HERE, features)
            assert asked[in_training] == (False, reason) and asked[0][0] == in_training
            for left_out in range(len(features) if len(features) > 1 else 0):
                fewer = features[:left_out] + features[left_out + 1 :]
                assert attention_table.answers(H200, HERE, fewer)[in_training][0], "the smallest that is refused"


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


def test_the_section_of_attention(monkeypatch):
    """For each kind of GPU, from the cuDNN of this process; without one it says so."""

    class OneDevice:
        device_count = 1

    versions = {"cudnn": HERE, "cublasLt": (13, 1, 0)}
    monkeypatch.setattr(libraries, "driver", OneDevice)
    monkeypatch.setattr(doctor.device, "info", lambda index: H200)
    monkeypatch.setattr(libraries, "version", versions.__getitem__)
    faults: list[str] = []
    assert set(attention_table.table(H200, HERE)) < set(doctor._devices(faults)) and not faults

    def missing(name):
        raise LibraryError("load cudnn", "nothing", "a library", "install cudnn")

    monkeypatch.setattr(libraries, "version", missing)
    assert list(doctor._attention(H200)) == ["  attention by cuDNN: none, cuDNN is missing (install cudnn)"]
