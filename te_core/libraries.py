"""Which CUDA libraries this process uses, and the driver through ctypes.

A library that the process already maps (torch or JAX brought it) is the one to use; otherwise the folders of
TE_CORE_LIBRARY_PATH are searched, then the pip wheels (`nvidia/...` in site-packages), then the system. A second
copy is never mapped: two copies of one CUDA library in a process fail in ways that name neither.
Nothing is loaded at import.
"""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

from te_core import env
from te_core.errors import LibraryError

if TYPE_CHECKING:
    from te_core.driver import Driver


@dataclass(frozen=True, slots=True)
class _Known:
    """How a library is called and where the pip wheels put it."""

    stem: str
    majors: tuple[int, ...]  # of the soname, newest first
    wheels: tuple[str, ...]  # folders below nvidia/, one for each major (the last serves the rest)
    needs: tuple[str, ...] = ()  # opened by this library by name: ours first, or it takes any copy
    beside: str = ""  # files of its own folder that it opens by bare name, which only the system's path would find

    def soname(self, major: int) -> str:
        return f"{self.stem}.so.{major}"

    def folder(self, major: int) -> str:
        return self.wheels[min(self.majors.index(major), len(self.wheels) - 1)]


# fmt: off
KNOWN: dict[str, _Known] = {
    "cudart": _Known("libcudart", (13, 12), ("cu13/lib", "cuda_runtime/lib")),
    "nvrtc": _Known("libnvrtc", (13, 12), ("cu13/lib", "cuda_nvrtc/lib"), beside="libnvrtc-builtins.so.*"),
    "cublasLt": _Known("libcublasLt", (13, 12), ("cu13/lib", "cublas/lib")),
    "cudnn": _Known("libcudnn", (9,), ("cudnn/lib",), ("cublasLt", "nvrtc")),
}
#: What pip installs each of the libraries with, and what calls them: for CUDA 13 and for CUDA 12, as in pyproject.toml.
PACKAGES: dict[str, tuple[str, str]] = {
    "cudart": ("nvidia-cuda-runtime<14", "nvidia-cuda-runtime-cu12"),
    "nvrtc": ("nvidia-cuda-nvrtc<14", "nvidia-cuda-nvrtc-cu12"),
    "cublasLt": ("nvidia-cublas<14", "nvidia-cublas-cu12"),
    "cudnn": ("nvidia-cudnn-cu13<10", "nvidia-cudnn-cu12<10"),
    "CUDA headers": ("nvidia-cuda-runtime<14", "nvidia-cuda-runtime-cu12"),
    "CuPy": ("cupy-cuda13x<15", "cupy-cuda12x<15"),
    "nvmath": ("nvmath-python<2", "nvmath-python<2"),
    "cuDNN's frontend": ("nvidia-cudnn-frontend<2", "nvidia-cudnn-frontend==1.28.0"),
}
# fmt: on


_handles: dict[str, tuple[ctypes.CDLL, str]] = {}  # and the file that it is of
_lock = RLock()


def mapped(maps: str = "/proc/self/maps") -> dict[str, list[str]]:
    """The files of the known libraries that this process maps: one each, unless something went wrong."""
    found: dict[str, list[str]] = {name: [] for name in KNOWN}
    pattern = {name: re.compile(re.escape(k.stem) + r"\.so(\.\d+)*$") for name, k in KNOWN.items()}
    try:
        lines = Path(maps).read_text().splitlines()
    except OSError:  # no /proc: the loader's own search is all there is
        return found
    for path in dict.fromkeys(line.split(None, 5)[5] for line in lines if "/" in line and ".so" in line):
        for name, match in pattern.items():
            if match.match(path.rsplit("/", 1)[1]):
                found[name].append(path)
    return found


def load(name: str) -> ctypes.CDLL:
    """The library of this name (a key of `KNOWN`), loaded once for the process."""
    return _loaded(name)[0]


def file(name: str) -> str:
    """The file that `load` took the library from."""
    return _loaded(name)[1]


def _loaded(name: str) -> tuple[ctypes.CDLL, str]:
    found = _handles.get(name)
    if found is not None:
        return found
    with _lock:
        if name not in _handles:
            for needed in KNOWN[name].needs:
                load(needed)
            handle, path = _open(name)
            for companion in sorted(Path(path).parent.glob(KNOWN[name].beside)) if KNOWN[name].beside else ():
                ctypes.CDLL(str(companion))
            _handles[name] = handle, path  # not before all of it is there: other threads take it without the lock
        return _handles[name]


def _open(name: str) -> tuple[ctypes.CDLL, str]:
    known = KNOWN[name]
    tried = []
    for candidate in candidates(name):
        if candidate.startswith("/") and not Path(candidate).exists():
            continue
        try:
            handle = ctypes.CDLL(candidate)
        except OSError as error:
            tried.append(f"{candidate} ({error})")
            continue
        if candidate.startswith("/"):
            return handle, candidate
        return handle, next(iter(mapped()[name]), candidate)
    allowed = (
        f"{' or '.join(known.soname(m) for m in known.majors)} mapped by the process, in TE_CORE_LIBRARY_PATH, in a "
    )
    allowed += "pip wheel or on the system's search path"
    raise LibraryError(f"load {name}", "; ".join(tried) or "no such library anywhere", allowed, pip_install(name))


def pip_install(*names: str) -> str:
    """The command that installs these (keys of `PACKAGES`) for this machine's CUDA; for both where nothing tells."""
    major = cuda_major()
    lines = [" ".join(dict.fromkeys(f'"{PACKAGES[name][m == 12]}"' for name in names)) for m in (13, 12)]
    if major is None and lines[0] != lines[1]:
        return f"pip install {lines[0]} (CUDA 12: {lines[1]})"
    return f"pip install {lines[major == 12]}"


def found(name: str) -> bool:
    """Whether there is such a library, be it that it cannot be loaded because another one is missing."""
    for candidate in candidates(name):
        if Path(candidate).is_file():
            return True
        if not candidate.startswith("/"):
            try:
                ctypes.CDLL(candidate)
            except OSError as error:  # says which file was not there: the library, or one that it needs
                if str(error).startswith(candidate):
                    continue
            return True
    return False


def candidates(name: str) -> list[str]:
    """Where to look for a library, in order; a bare soname at the end leaves the search to the system."""
    known = KNOWN[name]
    here = mapped()
    if here[name]:
        return here[name][:1]
    majors = known.majors if len(known.majors) == 1 else _majors(known.majors, here)
    result = []
    for folder in env.library_path():
        result += [str(folder / known.soname(m)) for m in majors]
    for m in majors:
        result += [str(folder / "nvidia" / known.folder(m) / known.soname(m)) for folder in package_folders()]
    return result + [known.soname(m) for m in majors]


def package_folders() -> list[Path]:
    """The import path's folders that carry NVIDIA wheels."""
    folders = (Path(p) for p in dict.fromkeys(sys.path) if p)
    return [p for p in folders if (p / "nvidia").is_dir()]


def cuda_major() -> int | None:
    """The CUDA major of this machine: what the process uses, else of the wheels that are there, else of the driver."""
    versioned = [known for known in KNOWN.values() if len(known.majors) > 1]
    majors = versioned[0].majors
    used = _used(majors, mapped())
    if used:
        return used
    for major in majors:
        folders = [folder / "nvidia" / known.folder(major) for folder in package_folders() for known in versioned]
        if any(folder.is_dir() for folder in folders):
            return major
    return next((major for major in majors if major <= driver_version()[0]), None)


def _used(majors: tuple[int, ...], here: dict[str, list[str]]) -> int | None:
    """The CUDA major of what the process maps."""
    for name, known in KNOWN.items():
        if known.majors == majors and here[name]:
            used = re.search(r"\.so\.(\d+)", here[name][0])
            if used and int(used[1]) in majors:
                return int(used[1])
    return None


def _majors(majors: tuple[int, ...], here: dict[str, list[str]]) -> tuple[int, ...]:
    """The CUDA majors to try: what the process already uses, else what the driver can run, newest first."""
    used = _used(majors, here)
    if used:
        return (used,)
    highest = driver_version()[0]
    return tuple(m for m in majors if m <= highest) or majors  # no driver: compile with what there is


_driver: Driver | None = None


def driver() -> Driver:
    """The CUDA driver, initialised; `LibraryError` on a machine without one."""
    global _driver
    if _driver is None:
        from te_core.driver import Driver

        with _lock:
            if _driver is None:
                _driver = Driver()
    return _driver


def driver_version() -> tuple[int, int]:
    """The CUDA version that the installed driver supports; (0, 0) without a driver. Makes no context."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (0, 0)
    value = ctypes.c_int(0)
    libcuda.cuDriverGetVersion(ctypes.byref(value))
    return value.value // 1000, value.value % 1000 // 10


def version(name: str) -> tuple[int, ...]:
    """The version that the library itself reports."""
    lib = load(name)
    if name == "nvrtc":
        major, minor = ctypes.c_int(0), ctypes.c_int(0)
        lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value
    if name == "cudart":
        value = ctypes.c_int(0)
        lib.cudaRuntimeGetVersion(ctypes.byref(value))
        return value.value // 1000, value.value % 1000 // 10
    query = {"cublasLt": "cublasLtGetVersion", "cudnn": "cudnnGetVersion"}[name]
    function = lib[query]
    function.restype = ctypes.c_size_t
    number = int(function())  # 130100 is 13.1.0 of cuBLASLt, 91900 is 9.19.0 of cuDNN
    return number // 10000, number // 100 % 100, number % 100


def large_parameters() -> bool:
    """Whether a launch's parameters may take 32,764 bytes, and not 4,096: since CUDA 12.1."""
    return driver_version() >= (12, 1) and version("nvrtc") >= (12, 1)
