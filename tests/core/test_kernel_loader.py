"""The kernel loader: what decides a cubin is in its key, the cache survives bad files, errors can be read."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest

from te_core import dtypes as D
from te_core import libraries
from te_core.errors import ArgumentError, LibraryError
from te_core.kernels import compiler, loader
from te_core.runtime import Runtime
from te_core.tensor import Device
from tests.backends import requires_cuda, requires_gpus
from tests.threads import together


def nvrtc_is_here() -> bool:
    try:
        libraries.load("nvrtc")
    except LibraryError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not nvrtc_is_here(), reason="needs the nvidia-cuda-nvrtc wheel")

SOURCE = """// A test's kernel: out = x * FACTOR + add, and what the arguments looked like.
#include "helper.cuh"
extern "C" __global__ void probe(const float* x, float* out, long long n, int step, float add) {
    extern __shared__ float room[];
    for (long long i = threadIdx.x; i < n; i += blockDim.x) {
        room[threadIdx.x] = x ? twice(x[i]) : 0.f;
        out[i] = room[threadIdx.x] * FACTOR + add + step;
    }
}
extern "C" __global__ void other(float* out) { out[0] = gridDim.x * 100 + gridDim.y * 10 + blockDim.y; }
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A kernel folder and a cache of the test's own."""
    (tmp_path / "probe.cu").write_text(SOURCE)
    (tmp_path / "helper.cuh").write_text("__device__ float twice(float v) { return 2.f * v; }\n")
    monkeypatch.setattr(compiler, "FOLDER", tmp_path)
    for device in Device._known.values():
        monkeypatch.setitem(device._kept, loader.Loaded, loader.Loaded(device))
    monkeypatch.setenv("TE_CORE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


# ---------------------------------------------------------------------------------------------- compiling


@needs_nvrtc
def test_compiles_for_every_architecture_without_a_device(folder):
    for arch in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"):
        assert compiler.compile_source("probe", {"FACTOR": 3}, arch)[:4] == b"\x7fELF"
    assert b".target" in compiler.compile_source("probe", {"FACTOR": 3}, "compute_90")


@needs_nvrtc
def test_no_option_flushes_subnormals_or_loosens_arithmetic(folder):
    text = compiler.compile_source("probe", {"FACTOR": 3}, "compute_90").decode()
    assert ".ftz" not in text
    (folder / "probe.cu").write_text("// options: --use_fast_math\n" + SOURCE)
    assert ".ftz" in compiler.compile_source("probe", {"FACTOR": 3}, "compute_90").decode()


@needs_nvrtc
def test_a_compile_error_shows_the_line_and_the_options(folder):
    (folder / "probe.cu").write_text(SOURCE.replace("+ step", "+ stepp"))
    with pytest.raises(LibraryError) as caught:
        compiler.compile_source("probe", {"FACTOR": 3}, "sm_90")
    text = str(caught.value)
    assert "probe.cu(7)" in text
    assert '"stepp" is undefined' in text
    assert "out[i] = room[threadIdx.x] * FACTOR + add + stepp;" in text
    assert "-DFACTOR=3" in text
    assert "sm_90" in text


@needs_nvrtc
def test_an_unknown_kernel_lists_the_known_ones(folder):
    with pytest.raises(LibraryError, match="probe"):
        compiler.compile_source("prob", {}, "sm_90")


@needs_nvrtc
def test_the_architecture_is_one_the_device_runs(monkeypatch):
    monkeypatch.setattr(compiler, "supported_architectures", lambda: [75, 80, 86, 89, 90, 100])
    assert compiler.architecture((9, 0)) == "sm_90"
    assert compiler.architecture((8, 7)) == "sm_86"  # machine code runs on later minors
    assert compiler.architecture((12, 0)) == "compute_100"  # a later major takes PTX only
    with pytest.raises(LibraryError):
        compiler.architecture((7, 0))


def test_compile_check_lines(folder):
    lines = "// compile-check: FACTOR=1 MORE=bf16\n// compile-check: FACTOR=2\n"
    (folder / "probe.cu").write_text(lines + SOURCE)
    assert compiler.compile_checks("probe") == [{"FACTOR": "1", "MORE": "bf16"}, {"FACTOR": "2"}]
    (folder / "probe.cu").write_text(SOURCE)
    assert compiler.compile_checks("probe") == [{}]


# ---------------------------------------------------------------------------------------------- the cache


@needs_nvrtc
def test_the_key_holds_everything_that_changes_the_code(folder, monkeypatch):
    def key(constants=None, arch="sm_90"):
        source = (folder / "probe.cu").read_text()
        return compiler.cache_key(source, compiler.options_for(source, constants or {"FACTOR": 3}, arch))

    keys = [key(), key({"FACTOR": 4}), key({"FACTOR": 3, "X": True}), key(arch="sm_80")]
    (folder / "probe.cu").write_text(SOURCE + "\n// changed")
    keys.append(key())
    (folder / "helper.cuh").write_text('#include "deeper.cuh"\n__device__ float twice(float v) { return 2.f * v; }')
    keys.append(key())
    (folder / "deeper.cuh").write_text("// a header that a header includes")
    keys.append(key())
    (folder / "deeper.cuh").write_text("// and changes")
    keys.append(key())
    monkeypatch.setattr(libraries, "version", lambda name: (13, 99))
    keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == keys[-1]


@needs_nvrtc
def test_cuda_headers_are_in_the_key(folder, tmp_path, monkeypatch):
    cuda = tmp_path / "cuda"
    cuda.mkdir()
    (cuda / "cuda_fp8.h").write_text("// one")
    monkeypatch.setenv("TE_CORE_CUDA_INCLUDE", str(cuda))
    source = "#include <cuda_fp8.h>\n"
    first = compiler.cache_key(source, [])
    monkeypatch.setattr(compiler, "_headers", {})
    (cuda / "cuda_fp8.h").write_text("// two")
    assert compiler.cache_key(source, []) != first


@needs_nvrtc
def test_the_second_time_comes_from_disk(folder, monkeypatch):
    image = compiler.cached("probe", {"FACTOR": 3}, "sm_90")

    def fail(*args):
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "compile_text", fail)
    assert compiler.cached("probe", {"FACTOR": 3}, "sm_90") == image


@needs_nvrtc
@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_cache_file_is_replaced(folder, damage):
    image = compiler.cached("probe", {"FACTOR": 3}, "sm_90")
    (place,) = (folder / "cache" / "kernels").iterdir()
    good = place.read_bytes()
    place.write_bytes(good[:-9] if damage is None else damage)
    assert compiler.cached("probe", {"FACTOR": 3}, "sm_90") == image
    assert place.read_bytes() == good


def test_writers_never_show_half_a_file(tmp_path):
    """Readers racing with writers of two contents see one of them whole, or nothing before the first."""
    place = tmp_path / "kernels" / "x.bin"
    contents = [bytes([i]) * 300_000 for i in (1, 2)]
    seen: set[bytes | None] = set()
    left = [None, None]

    def write(content):
        for _ in range(60):
            compiler.write_cache(place, content)
        left.pop()

    def read():
        while left:
            raw = place.read_bytes() if place.exists() else None
            seen.add(compiler.read_cache(place))
            assert raw is None or len(raw) == 300_032

    together(read, *(partial(write, content) for content in contents))
    assert seen <= {None, *contents}
    assert compiler.read_cache(place) in contents
    assert [p.name for p in place.parent.iterdir()] == ["x.bin"]


@needs_nvrtc
@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_an_unwritable_cache_only_costs_time(folder, monkeypatch):
    (folder / "cache").mkdir(mode=0o500)
    assert compiler.cached("probe", {"FACTOR": 3}, "sm_90")


# ---------------------------------------------------------------------------------------------- launching


def probe(rt, **constants):
    return loader.get(rt, "probe", args="ppqif", **({"FACTOR": 3} | constants))


@requires_cuda
def test_arguments_arrive(folder):
    rt = Runtime.cuda()
    kernel = probe(rt)
    x = np.arange(5, dtype=np.float32)
    xt, out = rt.tensor(x), rt.zeros((5,), D.float32)
    kernel(rt, 1, 32, xt.ptr, out.ptr, 5, -7, 0.25, shared=32 * 4)
    np.testing.assert_array_equal(rt.numpy(out), x * 6 - 7 + np.float32(0.25))
    kernel(rt, (1,), (32, 1, 1), None, out.ptr, 5, 2**31 - 1, -0.0, shared=32 * 4)
    np.testing.assert_array_equal(rt.numpy(out), np.full(5, np.float32(2**31 - 1)))
    other = loader.get(rt, "probe", entry="other", args="p", FACTOR=3)
    other(rt, (4, 3), (8, 2), out.ptr)
    assert rt.numpy(out)[0] == 432


@requires_cuda
def test_more_than_48_kb_of_shared_memory(folder):
    rt = Runtime.cuda()
    out = rt.zeros((5,), D.float32)
    probe(rt)(rt, 1, 32, None, out.ptr, 5, 1, 0.0, shared=100 * 1024)
    assert (rt.numpy(out) == 1).all()


@requires_cuda
def test_get_is_cached_by_all_its_arguments(folder):
    rt = Runtime.cuda()
    assert probe(rt) is probe(rt)
    assert probe(rt) is not probe(rt, FACTOR=4)


@requires_cuda
def test_wrong_arguments_name_the_kernel(folder):
    rt = Runtime.cuda()
    with pytest.raises(ArgumentError, match="probe.*ppqif"):
        probe(rt)(rt, 1, 32, 1, 2, 3)
    with pytest.raises(ArgumentError, match="letters"):
        loader.get(rt, "probe", args="px", FACTOR=3)
    with pytest.raises(LibraryError, match="nosuch"):
        loader.get(rt, "probe", entry="nosuch", args="p", FACTOR=3)


@requires_cuda
def test_threads_launch_at_once(folder):
    """Each thread's arguments are its own."""
    rt = Runtime.cuda()
    kernel = probe(rt)

    def work(number):
        out = rt.zeros((64,), D.float32)
        for i in range(1000):
            kernel(rt, 1, 64, None, out.ptr, 64, number * 1000 + i, 0.0, shared=64 * 4)
            assert i % 100 != 99 or (rt.numpy(out) == number * 1000 + i).all()

    together(*(partial(work, number) for number in range(8)))


@requires_gpus(2)
def test_launches_go_to_their_own_device(folder):
    for index in (1, 0, 1):
        rt = Runtime.cuda(index)
        out = rt.zeros((5,), D.float32)
        probe(rt)(rt, 1, 32, None, out.ptr, 5, index, 0.0, shared=32 * 4)
        assert (rt.numpy(out) == index).all()


@requires_cuda
def test_a_captured_launch_replays(folder):
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    rt = Runtime.cuda(0, stream.cuda_stream)
    x, out = rt.tensor(np.ones(4, np.float32)), rt.zeros((4,), D.float32)
    kernel = probe(rt)
    kernel(rt, 1, 32, x.ptr, out.ptr, 4, 0, 0.0, shared=32 * 4)
    rt.numpy(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kernel(rt, 1, 32, x.ptr, out.ptr, 4, 0, 0.0, shared=32 * 4)
    rt.backend.copy_from_host(rt, np.full(4, 5, np.float32), x)
    with torch.cuda.stream(stream):
        graph.replay()
    assert (rt.numpy(out) == 30).all()
