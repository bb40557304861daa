"""Which CUDA libraries are used: the order of the search, the errors, and one copy of each in the process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from te_core import dtypes, libraries
from te_core.device import (
    RECIPES,
    DeviceInfo,
    can,
    fp8_block_supported,
    fp8_supported,
    gemm_supported,
    gemm_table,
    mxfp8_supported,
    table,
)
from te_core.errors import LibraryError
from te_core.quantized import Format
from tests.backends import requires_cuda

H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, 60 << 20, 141 << 30, (13, 0), (13, 1, 0))
A100 = DeviceInfo("NVIDIA A100", (8, 0), 108, 40 << 20, 80 << 30, (12, 8), (12, 8, 4))
B200 = DeviceInfo("NVIDIA B200", (10, 0), 148, 126 << 20, 180 << 30, (13, 0), (13, 1, 0))


def test_mapped_reads_the_process_map(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 11 /site/nvidia/cu13/lib/libcublasLt.so.13\n"
        "7f01-7f02 r--p 00000000 08:01 11 /site/nvidia/cu13/lib/libcublasLt.so.13\n"
        "7f02-7f03 r-xp 00000000 08:01 12 /usr/lib/libcudnn.so.9.1.0\n"
        "7f03-7f04 r-xp 00000000 08:01 13 /site/nvidia/cudnn/lib/libcudnn.so.9\n"
        "7f04-7f05 r-xp 00000000 08:01 14 /site/nvidia/cudnn/lib/libcudnn_graph.so.9\n"
        "7f05-7f06 rw-p 00000000 00:00 0 [heap]\n"
    )
    found = libraries.mapped(str(maps))
    assert found["cublasLt"] == ["/site/nvidia/cu13/lib/libcublasLt.so.13"]
    assert found["cudnn"] == ["/usr/lib/libcudnn.so.9.1.0", "/site/nvidia/cudnn/lib/libcudnn.so.9"]
    assert found["nvrtc"] == []


def nothing_mapped(monkeypatch, site: Path):
    monkeypatch.setattr(libraries, "mapped", lambda: {name: [] for name in libraries.KNOWN})
    monkeypatch.setattr(libraries, "package_folders", lambda: [site])
    monkeypatch.setattr(libraries, "driver_version", lambda: (13, 0))


def test_search_order(tmp_path, monkeypatch):
    nothing_mapped(monkeypatch, tmp_path)
    monkeypatch.setenv("TE_CORE_LIBRARY_PATH", "/mine:/yours")
    order = libraries.candidates("cublasLt")
    assert order[0] == "/mine/libcublasLt.so.13"
    assert order.index("/yours/libcublasLt.so.13") < order.index(f"{tmp_path}/nvidia/cu13/lib/libcublasLt.so.13")
    assert f"{tmp_path}/nvidia/cublas/lib/libcublasLt.so.12" in order
    assert order[-2:] == ["libcublasLt.so.13", "libcublasLt.so.12"]


def test_what_the_process_maps_is_the_only_candidate(tmp_path, monkeypatch):
    nothing_mapped(monkeypatch, tmp_path)
    torch_has = {name: [] for name in libraries.KNOWN} | {"cublasLt": ["/torch/libcublasLt.so.12"]}
    monkeypatch.setattr(libraries, "mapped", lambda: torch_has)
    assert libraries.candidates("cublasLt") == ["/torch/libcublasLt.so.12"]
    # and its CUDA major decides for the others
    assert all(".so.12" in c for c in libraries.candidates("nvrtc"))


def test_an_old_driver_gets_cuda_12(tmp_path, monkeypatch):
    nothing_mapped(monkeypatch, tmp_path)
    monkeypatch.setattr(libraries, "driver_version", lambda: (12, 4))
    assert all(".so.12" in c for c in libraries.candidates("nvrtc"))


def test_missing_library_says_what_to_install(tmp_path, monkeypatch):
    nothing_mapped(monkeypatch, tmp_path)
    monkeypatch.setattr(libraries, "candidates", lambda name: [str(tmp_path / "libcudnn.so.9"), "libno-such-cudnn.so"])
    monkeypatch.setattr(libraries, "_handles", dict.fromkeys(("cublasLt", "nvrtc", "cudnn"), (None, "")))
    libraries._handles.pop("cudnn")
    monkeypatch.setattr(libraries, "KNOWN", libraries.KNOWN | {"cudnn": libraries._Known("libcudnn", (9,), ("x",))})
    with pytest.raises(LibraryError, match=r'load cudnn: got libno-such-cudnn.so.*To do: pip install "nvidia-cudnn-'):
        libraries.load("cudnn")


def test_the_cuda_version_that_packages_have_to_fit(tmp_path, monkeypatch):
    """What the process uses goes before the wheels that are installed, and these before the driver."""
    nothing_mapped(monkeypatch, tmp_path)
    assert libraries.cuda_major() == 13
    monkeypatch.setattr(libraries, "driver_version", lambda: (12, 4))
    assert libraries.cuda_major() == 12
    monkeypatch.setattr(libraries, "driver_version", lambda: (0, 0))
    assert libraries.cuda_major() is None
    (tmp_path / "nvidia" / "cuda_nvrtc" / "lib").mkdir(parents=True)
    monkeypatch.setattr(libraries, "driver_version", lambda: (13, 0))
    assert libraries.cuda_major() == 12
    torch_has = {name: [] for name in libraries.KNOWN} | {"cublasLt": ["/torch/libcublasLt.so.13"]}
    monkeypatch.setattr(libraries, "mapped", lambda: torch_has)
    assert libraries.cuda_major() == 13


def test_found_though_it_cannot_be_loaded(tmp_path, monkeypatch):
    """A library that is there is not called missing because another one is."""
    nothing_mapped(monkeypatch, tmp_path)
    searched = libraries.candidates

    def in_folders(name):  # none by its bare name
        return [c for c in searched(name) if c.startswith("/")]

    monkeypatch.setattr(libraries, "candidates", lambda name: [*in_folders(name), f"libno-such-{name}.so"])
    assert not libraries.found("cudnn")
    folder = tmp_path / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudnn.so.9").write_bytes(b"no library")
    assert libraries.found("cudnn") and not libraries.found("cublasLt")


def test_nothing_is_loaded_by_an_import():
    """`import te_core` brings neither CuPy nor nvmath nor a CUDA library."""
    code = (
        "import sys, te_core, te_core.ops.gemm, te_core.device, te_core.libraries as L\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('cupy', 'cupy_backends', 'nvmath', 'torch')]\n"
        "assert not any(L.mapped().values()), L.mapped()\n"
        "assert 'libcuda.so' not in open('/proc/self/maps').read()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_predicates_by_device():
    assert fp8_supported(H200)[0]
    assert not fp8_supported(A100)[0]
    assert "8.9" in fp8_supported(A100)[1]
    assert fp8_block_supported(H200)[0]
    assert not fp8_block_supported(B200)[0]
    assert mxfp8_supported(B200)[0]
    assert not mxfp8_supported(H200)[0]


def test_the_table_covers_every_recipe_and_gives_reasons():
    for device in (H200, A100, B200):
        rows = table(device)
        assert set(rows) == set(RECIPES)
        assert all(reason for row in rows.values() for _, reason in row.values())
    assert can(H200, "DelayedScaling", "gemm")[0]
    assert not can(A100, "DelayedScaling", "gemm")[0]
    assert can(A100, "bfloat16 / float16", "norm")[0]


def test_products_of_two_formats():
    def able(device, *pair):
        return gemm_supported(device, *pair)[0]

    e4m3, e5m2 = Format(dtypes.float8_e4m3), Format(dtypes.float8_e5m2)
    pieces, tiles = Format(dtypes.float8_e4m3, "block"), Format(dtypes.float8_e4m3, "block", True)
    mxfp8, nvfp4 = Format(dtypes.float8_e4m3, "mxfp8"), Format(dtypes.float4_e2m1, "nvfp4")
    assert able(H200, e4m3, e5m2) and not able(A100, e4m3, e5m2) and not able(H200, e5m2, e5m2)
    assert able(H200, pieces, tiles) and able(H200, tiles, pieces) and able(H200, pieces, pieces)
    assert not able(H200, tiles, tiles) and not able(B200, pieces, tiles)
    assert not able(H200, pieces, e4m3)
    for form in (mxfp8, nvfp4):
        assert able(B200, form, form) and not able(H200, form, form)
        assert "not run on hardware" in gemm_supported(B200, form, form)[1]
        assert "needs compute capability 10.0" in gemm_supported(H200, form, form)[1]
    assert not able(B200, Format(dtypes.float4_e2m1, "nvfp4", row_scaled=True), nvfp4)
    assert not able(B200, Format(dtypes.float8_e5m2, "mxfp8"), Format(dtypes.float8_e5m2, "mxfp8"))
    assert not able(replace(H200, cublaslt=(12, 8, 0)), pieces, tiles)


def test_what_is_emulated_is_quantized_everywhere():
    for recipe in ("MXFP8BlockScaling", "NVFP4BlockScaling"):
        assert can(A100, recipe, "quantize")[0] and not can(A100, recipe, "gemm")[0]
        assert not can(replace(A100, capability=(7, 5)), recipe, "quantize")[0]
        assert gemm_table(B200)[recipe][0] and not gemm_table(H200)[recipe][0]
    assert can(H200, "Float8BlockScaling", "quantize")[0] and not can(B200, "Float8BlockScaling", "quantize")[0]


@requires_cuda
def test_one_copy_of_each_library():
    """After torch, a GEMM and a kernel: the process maps one file of each CUDA library, the one torch brought."""
    code = (
        "try:\n    import torch; torch.zeros(1, device='cuda') @ torch.zeros(1, device='cuda')\n"
        "except ImportError: pass\n"
        "import numpy as np\n"
        "from te_core import libraries, Runtime\n"
        "before = {n: f for n, f in libraries.mapped().items() if f}\n"
        "from te_core.ops.gemm import gemm\n"
        "rt = Runtime.cuda()\n"
        "a = rt.tensor(np.ones((8, 8), np.float32))\n"
        "aux = rt.empty((8, 9), a.dtype)\n"
        "b = rt.tensor(np.ones((8, 9), np.float32))\n"
        "gemm(rt, a, a); gemm(rt, a, b, epilogue='gelu', aux=aux)\n"
        "after = libraries.mapped()\n"
        "assert after['cublasLt'] and after['nvrtc'], after\n"
        "assert all(len(f) <= 1 for f in after.values()), after\n"
        "assert all(after[n] == f for n, f in before.items()), (before, after)\n"
        "print({n: (f, libraries.version(n)) for n, f in after.items() if f})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@requires_cuda
def test_a_runtime_works_without_torch():
    """Memory, copies and a product with no framework in the process; and the thread gets its context."""
    code = (
        "import sys, threading, numpy as np\n"
        "from te_core import Runtime\n"
        "from te_core.ops.gemm import gemm\n"
        "rt = Runtime.cuda()\n"
        "def work():\n"
        "    x = np.arange(12, dtype=np.float32).reshape(3, 4)\n"
        "    assert (rt.numpy(gemm(rt, rt.tensor(x), rt.tensor(x), trans_b=True)) == x @ x.T).all()\n"
        "    assert not rt.numpy(rt.zeros((7,), rt.tensor(x).dtype)).any()\n"
        "    done.append(1)\n"
        "done = []\n"
        "work()\n"
        "for _ in range(3):\n"
        "    t = threading.Thread(target=work); t.start(); t.join()\n"
        "assert len(done) == 4\n"
        "foreign = {'torch', 'jax'} & set(sys.modules)\n"
        "assert not foreign, foreign\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
