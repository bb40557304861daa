"""`python -m te_core.doctor`: says what is here, and fails only where a GPU is present and cannot be used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from te_core import env, libraries
from te_core.backends.cuda import cudnn
from te_core.device import RECIPES
from te_core.errors import LibraryError
from te_core.kernels import loader
from te_core.recipe import Float8CurrentScaling, Format, resolve
from te_core.runtime import Runtime
from te_core.tools import attention_table, doctor, selftest
from tests.backends import cuda_devices, requires_cuda
from tests.core.test_libraries import A100, H200

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def test_the_door():
    ran = subprocess.run(
        [sys.executable, "-m", "te_core.doctor"], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"({len(env.VARIABLES)} can be: python -m te_core.doctor --variables)" in ran.stdout
    assert all(f"  {name} " in ran.stdout for name in libraries.KNOWN)
    assert "  library in C: " in ran.stdout
    assert all(recipe in ran.stdout for recipe in RECIPES)
    assert ("cuda:0" if cuda_devices() else "Runtime.cpu") in ran.stdout


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


def nothing_here(monkeypatch, driver, *there):
    """A machine with none of the libraries, and none of what calls them, but for those that are `there`."""

    class NoDevices:
        device_count = 0

    def missing(name):
        raise LibraryError(f"load {name}", "no such library anywhere", "a library", f"install {name}")

    def no_cupy():
        raise LibraryError("load a kernel", "No module named 'cupy_backends'", "CuPy", "install CuPy")

    monkeypatch.setattr(libraries, "driver_version", lambda: driver)
    monkeypatch.setattr(libraries, "driver", NoDevices)
    monkeypatch.setattr(libraries, "version", missing)
    monkeypatch.setattr(libraries, "mapped", lambda: {name: [] for name in libraries.KNOWN})
    monkeypatch.setattr(libraries, "package_folders", list)
    monkeypatch.setattr(libraries, "found", lambda name: name in there)
    monkeypatch.setattr(loader, "_cupy_driver", no_cupy)
    monkeypatch.setattr(cudnn, "frontend", lambda: missing("cudnn"))
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor.metadata, "version", lambda name: no_package(name))


def no_package(name):
    raise doctor.metadata.PackageNotFoundError(name)


def hints(faults):
    """The report's lines by what they are about."""
    lines = [line.strip() for line in doctor.report(faults)]
    begins = {"cudart", "nvrtc", "cublasLt", "cudnn", "CuPy", "cuBLASLt", "cuDNN's"}
    return {line.split()[0]: line for line in lines if line and line.split()[0] in begins}


def test_each_hint_names_the_package_that_is_missing(monkeypatch):
    nothing_here(monkeypatch, (13, 0))
    faults: list[str] = []
    found = hints(faults)
    for name, package in {
        "cudart": "nvidia-cuda-runtime<14",
        "nvrtc": "nvidia-cuda-nvrtc<14",
        "cublasLt": "nvidia-cublas<14",
        "CuPy": "cupy-cuda13x<15",
    }.items():
        assert found[name].endswith(f'missing   pip install "{package}"'), found[name]
    assert '"nvidia-cudnn-cu13<10" "nvidia-cublas<14" "nvidia-cuda-nvrtc<14"' in found["cudnn"]
    assert found["cuDNN's"].endswith('"nvidia-cudnn-frontend<2")') and "nvidia-cudnn-cu13<10" in found["cuDNN's"]
    assert found["cuBLASLt"].endswith('(slower calls; pip install "nvmath-python<2")')
    (fault,) = faults
    assert fault.startswith("missing: nvrtc, cublasLt, CuPy. pip install ")
    assert all(fault.count(f'"{p[0]}"') == 1 for name, p in libraries.PACKAGES.items() if name != "nvmath")


def test_hints_fit_the_driver(monkeypatch):
    """CUDA 12 has packages of its own; without a driver both are named."""
    nothing_here(monkeypatch, (12, 8))
    found = hints([])
    assert '"nvidia-cublas-cu12"' in found["cublasLt"] and '"cupy-cuda12x<15"' in found["CuPy"]
    assert '"nvidia-cudnn-frontend==1.28.0"' in found["cuDNN's"]
    nothing_here(monkeypatch, (0, 0))
    faults: list[str] = []
    found = hints(faults)
    assert found["cublasLt"].endswith('pip install "nvidia-cublas<14" (CUDA 12: "nvidia-cublas-cu12")')
    assert not faults, "nothing is missing where no GPU is"


def test_a_library_that_lacks_another_one(monkeypatch):
    """cuDNN is there, cuBLASLt is not: cuDNN is not what has to be installed."""
    nothing_here(monkeypatch, (13, 0), "cudnn", "nvrtc", "cudart")
    found = hints([])
    assert found["cudnn"].split()[1] == "unusable" and found["cudnn"].endswith('pip install "nvidia-cublas<14"')
    nothing_here(monkeypatch, (13, 0), *libraries.KNOWN)
    faults: list[str] = []
    assert "unusable" in hints(faults)["cudnn"] and any("load cublasLt" in fault for fault in faults)


def test_hints_are_the_projects_own_requirements():
    """Every package that a hint names is one of the extra of that CUDA version, within its bounds."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for i, extra in enumerate(("cu13", "cu12")):
        wanted = {re.match(r"[\w-]+", text)[0]: text.replace(" ", "") for text in extras[extra]}
        for packages in libraries.PACKAGES.values():
            name, bound = re.match(r"([\w-]+)(.*)", packages[i]).groups()
            assert bound in wanted[name], (packages[i], wanted[name])


def test_the_table_of_the_cpu(monkeypatch):
    """Without a GPU it says that every recipe runs, and how."""
    nothing_here(monkeypatch, (0, 0))
    lines = {line[2:].split("  ")[0]: line for line in doctor.report([])}
    assert all("yes" in lines[recipe] for recipe in RECIPES)
    assert "exact emulation" in lines["NVFP4BlockScaling"] and "exact" not in lines["float32 / tf32"]
    assert {"yes"} == {mark for recipe in RECIPES for mark in lines[recipe][24:].split()[:3]}


def test_two_copies_are_a_fault(monkeypatch):
    monkeypatch.setattr(libraries, "mapped", lambda: {"cudnn": ["/a/libcudnn.so.9", "/b/libcudnn.so.9"]})
    monkeypatch.setattr(libraries, "KNOWN", {})
    monkeypatch.setattr(doctor, "_bindings", lambda wanted: ())
    faults: list[str] = []
    list(doctor._libraries(faults, True))
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
    monkeypatch.setattr(libraries, "found", lambda name: name != "cudnn")
    monkeypatch.setattr(libraries, "cuda_major", lambda: 13)
    assert list(doctor._attention(H200)) == ['  attention by cuDNN: none (pip install "nvidia-cudnn-cu13<10")']


# ---------------------------------------------------------------------------------------------- as data


def test_the_report_as_json(monkeypatch, capsys):
    """One object, with what the report says."""
    monkeypatch.setenv("NVTE_FLASH_ATTN", "yes")
    rc = doctor.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert (rc != 0) == bool(found["to mend"]) and "test" not in found
    assert set(found["libraries"]) == set(libraries.KNOWN)
    assert all(entry["version"] or entry["do"] for entry in found["libraries"].values())
    assert set(found["recipes"]["cpu"]) == set(RECIPES)
    assert found["recipes"]["cpu"]["NVFP4BlockScaling"]["gemm"] == {
        "able": True,
        "reason": "exact emulation, bit for bit",
    }
    assert "NOT understood" in found["environment"]["NVTE_FLASH_ATTN"]["said"]
    assert found["packages"]["numpy"] and len(found["devices"]) == cuda_devices()


def one_gpu(monkeypatch, runtime):
    """A machine with an H200, on which this makes a runtime."""

    class OneDevice:
        device_count = 1

    monkeypatch.setattr(libraries, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(libraries, "driver", OneDevice)
    monkeypatch.setattr(doctor.device, "info", lambda index: H200)
    monkeypatch.setattr(selftest.Runtime, "cuda", runtime)


def test_a_gpu_as_json(monkeypatch, capsys):
    one_gpu(monkeypatch, lambda index: Runtime.cpu())
    doctor.main(["--json", "--test"])
    found = json.loads(capsys.readouterr().out)
    assert found["driver"] == [13, 0] and found["devices"]["cuda:0"]["capability"] == [9, 0]
    assert found["recipes"]["cuda:0"]["MXFP8BlockScaling"]["gemm"]["able"] is False
    assert [row["recipe"] for row in found["test"]] == ["Float8CurrentScaling", *list(selftest.RECIPES)[:3]]


# ---------------------------------------------------------------------------------------------- the test


def test_the_test_on_the_cpu(monkeypatch, capsys):
    """NumPy gives what the backend gives, and a wrong format or scale of one operand is noticed."""
    monkeypatch.setattr(libraries, "driver_version", lambda: (0, 0))
    assert doctor.main(["--test"]) == 0
    said = capsys.readouterr().out
    assert "CPU backend, against NumPy: Float8CurrentScaling ok (largest difference 0." in said
    (row,) = selftest.run()
    assert 0 < row.difference < selftest.WITHIN, "bfloat16 rounds the one, not the other"
    monkeypatch.setattr(selftest, "resolve", lambda recipe: resolve(Float8CurrentScaling(fp8_format=Format.E4M3)))
    (row,) = selftest.run()
    assert not row.ok and row.said in ("dx", "dw") and row.difference > 0.01
    assert doctor.main(["--test"]) == 1 and "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["y", "dx", "dw", "db"])
@pytest.mark.parametrize("how", [lambda t: t * 1.01, lambda t: t + float("nan"), lambda t: t * (t != t.max())])
def test_any_result_that_differs_is_noticed(name, how, monkeypatch):
    def other(rt, recipe, own=selftest.step):
        found = own(rt, recipe)
        return {**found, name: how(found[name])}

    monkeypatch.setattr(selftest, "step", other)
    row = next(iter(selftest.run()))
    assert not row.ok and row.said == name


def test_the_test_on_a_gpu_that_is_not_there(monkeypatch, capsys):
    """Each recipe that the GPU multiplies, against the CPU backend; an error is a row of its own."""
    one_gpu(monkeypatch, lambda index: Runtime.cpu())
    rows = list(selftest.run())
    assert [row.recipe for row in rows[1:]] == ["bfloat16 / float16", "Float8CurrentScaling", "Float8BlockScaling"]
    assert all(row.ok and row.difference == 0 and row.device.startswith("cuda:0 ") for row in rows[1:])

    def broken(index):
        raise LibraryError("load cublasLt", "nothing", "a library", "install it")

    monkeypatch.setattr(selftest.Runtime, "cuda", broken)
    assert doctor.main(["--test"]) == 1
    said = capsys.readouterr().out
    assert said.count("FAILED (LibraryError: load cublasLt: got nothing") == 3 and "NumPy: Float8Current" in said


@requires_cuda
def test_the_test_on_this_gpu():
    rows = list(selftest.run())
    assert len(rows) > 2 and all(row.ok for row in rows), "\n".join(selftest.lines(rows))
