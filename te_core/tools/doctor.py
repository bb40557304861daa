"""The report of `python -m te_core.doctor`: libraries and their files, devices, what runs there, settings."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module, metadata

import te_core
from te_core import cache, device, env, libraries
from te_core.errors import LibraryError
from te_core.tools import attention_table

#: Distributions worth naming, by what they are for.
_PACKAGES = ("numpy", "ml-dtypes", "torch", "jax", "cupy-cuda13x", "cupy-cuda12x", "nvmath-python",
             "nvidia-cudnn-frontend")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 1 if the machine has a GPU that te_core cannot use, else 0."""
    parser = argparse.ArgumentParser(prog="python -m te_core.doctor", description=__doc__)
    parser.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE",
        help="import this first (torch, jax): te_core then uses the libraries that it brings",
    )  # fmt: skip
    parser.add_argument("--variables", action="store_true", help="list the environment variables that are read")
    options = parser.parse_args(arguments)
    if options.variables:
        print("\n".join(variables()))
        return 0
    for module in options.modules:
        import_module(module)
    faults: list[str] = []
    print("\n".join(report(faults)))
    return 1 if faults else 0


def report(faults: list[str]) -> Iterator[str]:
    """The report's lines; what keeps a present GPU from being used is added to `faults`."""
    yield f"te_core {te_core.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield "packages: " + ", ".join(_packages())
    yield ""
    driver = libraries.driver_version()
    if driver == (0, 0):
        yield "driver: none. The reference backend (Runtime.cpu) is what runs here; kernels can still be compiled."
        yield "attention: te_core's own on the CPU; cuDNN is for GPUs."
    else:
        yield f"driver: supports CUDA {driver[0]}.{driver[1]}"
        yield from _devices(faults)
    yield ""
    yield from _libraries(faults if driver != (0, 0) else [])
    yield ""
    yield from _settings()
    if faults:
        yield ""
        yield "to mend:"
        yield from (f"  {fault}" for fault in faults)


def _packages() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue


def _devices(faults: list[str]) -> Iterator[str]:
    try:
        count = libraries.driver().device_count
    except LibraryError as error:
        faults.append(str(error))
        yield f"  {error}"
        return
    for index in range(count):
        info = device.info(index)
        yield (
            f"  cuda:{index} {info.name}, compute capability {info.capability[0]}.{info.capability[1]} "
            f"({info.architecture}), {info.multiprocessors} multiprocessors, {info.memory_bytes >> 30} GiB, "
            f"L2 {info.l2_bytes >> 20} MiB"
        )
        able, reason = device.supported(info)
        if not able:
            faults.append(f"cuda:{index} {reason}")
    for info in dict.fromkeys(device.info(index) for index in range(count)):
        yield ""
        yield from table(_with_library(info))
        yield ""
        yield from _attention(info)


def _attention(info: device.DeviceInfo) -> Iterator[str]:
    try:
        yield from attention_table.table(info, libraries.version("cudnn"))
    except LibraryError as error:
        yield f"  attention by cuDNN: none, cuDNN is missing ({error.do})"


def _with_library(info: device.DeviceInfo) -> device.DeviceInfo:
    try:
        return replace(info, cublaslt=libraries.version("cublasLt"))
    except LibraryError:  # reported below
        return info


def table(info: device.DeviceInfo) -> Iterator[str]:
    """Recipe x operation for a device, with the reason of each recipe that does not run."""
    width = max(len(name) for name in device.RECIPES)
    yield f"  {info.name}".ljust(width + 4) + "  ".join(device.OPERATIONS)
    for recipe, row in device.table(info).items():
        marks = ("yes" if able else "-" for able, _ in row.values())
        cells = "  ".join(mark.ljust(len(op)) for mark, op in zip(marks, row, strict=True))
        reasons = {reason for able, reason in row.values() if not able and "part of" not in reason}
        yield f"  {recipe.ljust(width)}  {cells}  {'; '.join(sorted(reasons))}".rstrip()


def _libraries(faults: list[str]) -> Iterator[str]:
    yield "libraries (the process's own first, then TE_CORE_LIBRARY_PATH, pip wheels, the system):"
    for name in libraries.KNOWN:
        try:
            number = ".".join(map(str, libraries.version(name)))
            yield f"  {name:9} {number:9} {libraries.file(name)}"
        except LibraryError as error:
            yield f"  {name:9} missing   {error.do}"
            if name in ("cublasLt", "nvrtc"):
                faults.append(str(error))
    for name, files in libraries.mapped().items():
        if len(files) > 1:
            faults.append(f"{name} is mapped {len(files)} times: {', '.join(files)}; remove all but one")
    yield from _bindings(faults)


def _bindings(faults: list[str]) -> Iterator[str]:
    """What calls the libraries."""
    from te_core.backends.cuda import cudnn
    from te_core.kernels import compiler, loader

    try:
        loader._cupy_driver()
        yield "  kernels are launched through CuPy's driver binding"
    except LibraryError as error:
        yield f"  CuPy      missing   {error.do}"
        faults.append(str(error))
    try:
        yield f"  cuBLASLt is called through nvmath {metadata.version('nvmath-python')}"
    except metadata.PackageNotFoundError:
        yield "  cuBLASLt is called through ctypes (slower calls; pip install nvmath-python)"
    try:
        made = cudnn.frontend()
        yield f"  cuDNN is called through its frontend {made.frontend}, {made.native.__file__}"
    except LibraryError as error:
        yield f"  cuDNN's frontend: none, so no FusedAttention on a GPU ({error.do})"
    try:
        yield f"  CUDA headers: {compiler.cuda_headers()[0]}"
    except LibraryError as error:
        yield f"  CUDA headers: missing. {error.do}"
        faults.append(str(error))


def _settings() -> Iterator[str]:
    folder = env.cache_dir()
    place = folder
    while not place.exists():
        place = place.parent
    state = "writable" if os.access(place, os.W_OK) else "NOT writable: kernels are compiled in every process"
    fault = cache.fault(folder)
    yield f"cache: {env.shown(str(folder))} ({f'IGNORED: {fault}' if fault else state})"
    found = list(env.set_now())
    yield f"environment{':' if found else ': no variable of ours is set'}"
    yield from _columns([f"{name}={value}" for name, value, _ in found], [said for *_, said in found])
    yield f"  ({len(env.VARIABLES)} can be: python -m te_core.doctor --variables)"


def variables() -> Iterator[str]:
    """Every variable, what it may be, and what it means."""
    known = env.VARIABLES
    yield from _columns(list(known), [f"{v.meaning}; {v.allowed}" for v in known.values()])


def _columns(left: list[str], right: list[str]) -> Iterator[str]:
    width = min(48, max(map(len, left), default=0))
    yield from (f"  {a.ljust(width)}  {b}" for a, b in zip(left, right, strict=True))


if __name__ == "__main__":
    sys.exit(main())
