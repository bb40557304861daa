"""The report of `python -m te_core.doctor`: libraries and their files, devices, what runs there, settings."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import te_core
from te_core import c_library, cache, device, env, libraries
from te_core.errors import LibraryError
from te_core.tape import taped
from te_core.tools import attention_table, selftest

#: What nothing runs on a GPU without.
NEEDED = ("nvrtc", "cublasLt", "CuPy", "CUDA headers")
_TAPES = {
    "first": "calls of layers are recorded at once",
    "second": "calls of layers are recorded when their shapes are met again",
    "never": "no call of a layer is recorded",
}
#: Distributions worth naming, by what they are for.
_PACKAGES = (
    "numpy",
    "ml-dtypes",
    "torch",
    "jax",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "nvmath-python",
    "nvidia-cudnn-frontend",
)


def main(arguments: Sequence[str] | None = None, prog: str = "python -m te_core.doctor") -> int:
    """Print the report; 1 if the machine has a GPU that te_core cannot use, or the test finds a difference, else 0."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this first (torch, jax): te_core then uses the libraries that it brings",
    )
    parser.add_argument("--variables", action="store_true", help="list the environment variables that are read")
    parser.add_argument("--json", action="store_true", help="the same, for programs: one object of JSON")
    parser.add_argument(
        "--test",
        action="store_true",
        help="one small FP8 step on each device, compared with the CPU backend, and that with NumPy; 1 if they differ",
    )
    options = parser.parse_args(arguments)
    if options.variables:
        print("\n".join(variables()))
        return 0
    for module in options.modules:
        import_module(module)
    rows = list(selftest.run()) if options.test else []
    faults: list[str] = []
    if options.json:
        text = json.dumps({**facts(faults), **({"test": [row._asdict() for row in rows]} if rows else {})}, indent=2)
    else:
        text = "\n".join(selftest.lines(rows) if options.test else report(faults))
    print(text)
    return 1 if faults or not all(row.ok for row in rows) else 0


def facts(faults: list[str]) -> dict[str, Any]:
    """What the report says, as plain data; what keeps a present GPU from being used is added to `faults`."""
    list(report(faults))
    driver = libraries.driver_version()
    try:
        devices = range(libraries.driver().device_count) if driver != (0, 0) else range(0)
    except LibraryError:  # among the faults
        devices = range(0)
    tables = {"cpu": device.cpu_table()} | {f"cuda:{i}": device.table(_with_library(device.info(i))) for i in devices}
    folder = env.cache_dir()
    return {
        "te_core": te_core.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": dict(package.rsplit(" ", 1) for package in _packages()),
        "tapes": taped.when(),
        "driver": list(driver) if driver != (0, 0) else None,
        "devices": {f"cuda:{i}": asdict(device.info(i)) for i in devices},
        "recipes": {
            name: {
                recipe: {op: {"able": able, "reason": reason} for op, (able, reason) in row.items()}
                for recipe, row in rows.items()
            }
            for name, rows in tables.items()
        },
        "libraries": {name: _library(name) for name in libraries.KNOWN},
        "cache": {"folder": env.shown(str(folder)), "fault": cache.fault(folder) or None},
        "environment": {name: {"value": value, "said": said} for name, value, said in env.set_now()},
        "to mend": faults,
    }


def _library(name: str) -> dict[str, Any]:
    """A library's version and file, or what is wrong with it."""
    try:
        return {"version": ".".join(map(str, libraries.version(name))), "file": str(libraries.file(name))}
    except LibraryError as error:
        return {"version": None, "file": None, "do": _mend(_absent(name), error)}


def report(faults: list[str]) -> Iterator[str]:
    """The report's lines; what keeps a present GPU from being used is added to `faults`."""
    yield f"te_core {te_core.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield "packages: " + ", ".join(_packages())
    yield f"replays: {_TAPES[taped.when()]}; in this process {taped.COUNTS}"
    yield ""
    driver = libraries.driver_version()
    gpu = driver != (0, 0)
    if gpu:
        yield f"driver: supports CUDA {driver[0]}.{driver[1]}"
        yield from _devices(faults)
    else:
        yield "driver: none. The reference backend (Runtime.cpu) is what runs here."
        yield ""
        yield from _rows("the CPU (NumPy)", device.cpu_table(), explained=True)
        yield "  attention: te_core's own, in FP8 under delayed and current scaling; cuDNN is for GPUs"
    yield ""
    yield from _libraries(faults, gpu)
    yield f"  library in C: {c_library.found() or 'none, which nothing needs'}"
    yield from (f"    {name}: {said()}" for name, said in c_library.USERS.items())
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
            f"  cuda:{index} {info.name}, compute capability {info.compute} "
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
        yield f"  attention by cuDNN: none ({_mend(_absent('cudnn'), error)})"


def _with_library(info: device.DeviceInfo) -> device.DeviceInfo:
    try:
        return replace(info, cublaslt=libraries.version("cublasLt"))
    except LibraryError:  # reported below
        return info


def table(info: device.DeviceInfo) -> Iterator[str]:
    """Recipe x operation for a device, with the reason of each recipe that does not run."""
    yield from _rows(info.name, device.table(info))


def _rows(name: str, rows: dict[str, dict[str, device.Answer]], explained: bool = False) -> Iterator[str]:
    """A table's lines; `explained`: with the reason of what runs, too."""
    width = max(len(recipe) for recipe in rows)
    yield f"  {name}".ljust(width + 4) + "  ".join(device.OPERATIONS)
    for recipe, row in rows.items():
        marks = ("yes" if able else "-" for able, _ in row.values())
        cells = "  ".join(mark.ljust(len(op)) for mark, op in zip(marks, row, strict=True))
        reasons = {reason for able, reason in row.values() if able <= explained and "part of" not in reason}
        yield f"  {recipe.ljust(width)}  {cells}  {'; '.join(sorted(reasons))}".rstrip()


def _libraries(faults: list[str], gpu: bool) -> Iterator[str]:
    """The libraries and what calls them; without a GPU nothing is missing that is not there."""
    yield "libraries (the process's own first, then TE_CORE_LIBRARY_PATH, pip wheels, the system):"
    if not gpu:
        yield "  for GPUs only: nothing here needs them"
    wanted: list[str] = []  # what a GPU needs and is not there
    for name in libraries.KNOWN:
        try:
            number = ".".join(map(str, libraries.version(name)))
            yield f"  {name:9} {number:9} {libraries.file(name)}"
        except LibraryError as error:
            absent = _absent(name)
            state = "missing" if name in absent else "unusable"
            yield f"  {name:9} {state:9} {_mend(absent, error)}"
            wanted += absent
            if gpu and not absent and name in NEEDED:
                faults.append(str(error))
    for name, files in libraries.mapped().items():
        if len(files) > 1:
            faults.append(f"{name} is mapped {len(files)} times: {', '.join(files)}; remove all but one")
    yield from _bindings(wanted)
    needed = [name for name in dict.fromkeys(wanted) if name in NEEDED]
    if gpu and needed:
        faults.append(f"missing: {', '.join(needed)}. {libraries.pip_install(*dict.fromkeys(wanted))}")


def _absent(name: str) -> list[str]:
    """Which of a library and those that it needs are not there."""
    return [each for each in (name, *libraries.KNOWN[name].needs) if not libraries.found(each)]


def _mend(absent: list[str], error: LibraryError) -> str:
    """What to do about one line of the report: to install what is not there, else what the error says."""
    return libraries.pip_install(*absent) if absent else f"{error.got}. {error.do}"


def _bindings(wanted: list[str]) -> Iterator[str]:
    """What calls the libraries."""
    from te_core.backends.cuda import cudnn
    from te_core.kernels import compiler, loader

    try:
        loader._cupy_driver()
        yield "  kernels are launched through CuPy's driver binding"
    except LibraryError as error:
        if find_spec("cupy_backends") is None:
            yield f"  CuPy      missing   {libraries.pip_install('CuPy')}"
            wanted.append("CuPy")
        else:
            yield f"  CuPy      unusable  {error.got}"  # without a driver it is
    try:
        yield f"  cuBLASLt is called through nvmath {metadata.version('nvmath-python')}"
    except metadata.PackageNotFoundError:
        yield f"  cuBLASLt is called through ctypes (slower calls; {libraries.pip_install('nvmath')})"
    try:
        made = cudnn.frontend()
        yield f"  cuDNN is called through its frontend {made.frontend}, {made.native.__file__}"
    except LibraryError as error:
        absent = [*_absent("cudnn"), *(["cuDNN's frontend"] if find_spec("cudnn") is None else [])]
        yield f"  cuDNN's frontend: none, so no FusedAttention on a GPU ({_mend(absent, error)})"
        wanted += absent
    try:
        yield f"  CUDA headers: {compiler.cuda_headers()[0]}"
    except LibraryError as error:
        absent = _absent("nvrtc")  # which says of what version they have to be
        yield f"  CUDA headers: {'to be looked for when nvrtc is there' if absent else f'missing. {error.do}'}"
        wanted += [] if absent else ["CUDA headers"]


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
