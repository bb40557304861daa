"""CUDA C++ to machine code with NVRTC, called directly: needs no device, and adds no option of its own.

(CuPy's compile step appends -ftz=true, which flushes float32 subnormals and breaks bit-exact quantization.)
Results are cached on disk under a key of everything that can change them: the source, every header it
includes (the CUDA ones too), the options, the compiler's version and the architecture.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import RLock
from typing import Any

from te_core import cache, env, libraries
from te_core.errors import LibraryError

FOLDER = Path(__file__).parent
Constant = str | int | bool

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)
_OPTIONS = re.compile(r"^//\s*options:\s*(.+)$", re.MULTILINE)
_ARCHITECTURE = re.compile(r"^//\s*architecture:\s*(\S+)$", re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_CHECKS = re.compile(r"^//\s*compile-check:[ \t]*(.*)$", re.MULTILINE)

_lock = RLock()  # one compilation at a time: threads that want the same kernel shall not build it twice
_headers: dict[Path, tuple[bytes, tuple[str, ...]]] = {}  # header -> (digest, what it includes)


def source_path(name: str) -> Path:
    """The file of a kernel by its name, which is the file's stem."""
    path = FOLDER / f"{name}.cu"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.cu")))
        raise LibraryError("load a kernel", repr(name), known or "no kernels installed", "name one of these files")
    return path


def compile_checks(name: str) -> list[dict[str, Constant]]:
    """The sets of constants that the file's `// compile-check:` lines name, for building it ahead of time."""
    lines = _CHECKS.findall(source_path(name).read_text())
    return [dict(pair.split("=", 1) for pair in line.split()) for line in lines] or [{}]


def only_architecture(name: str) -> str | None:
    """What the file's `// architecture:` line names: the one that it is compiled for, and runs on; None: any."""
    found = _ARCHITECTURE.search(source_path(name).read_text())
    return found and found.group(1)


def only_read(name: str, entry: str, constants: Mapping[str, object], letters: str) -> tuple[bool, ...]:
    """Which arguments a kernel only reads, by the `const` of its signature; `letters`: `te_core.kernels.loader.get`.

    None of them, where the signature cannot be made out: to say that memory is written is the careful answer.
    """
    found = _parameters(name, entry, constants)
    if [letter == "p" for letter in letters] != ["*" in one for one in found]:
        return (False,) * len(letters)
    return tuple("const " in one for one in found)


def _parameters(name: str, entry: str, constants: Mapping[str, object]) -> list[str]:
    text = _COMMENT.sub("", source_path(name).read_text())
    begin = re.search(rf"__global__[^;{{]*?\b{re.escape(entry)}\(", text)
    if begin is None:
        return []
    end, depth = begin.end(), 1
    while depth and end < len(text):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    lines, kept = [], [True]
    for line in text[begin.end() : end - 1].split("\n"):
        word = line.strip()
        if word.startswith("#if"):
            kept.append(str(constants.get(word[3:].strip(), 0)) not in ("0", "False"))
        elif word.startswith("#else"):
            kept[-1] = not kept[-1]
        elif word.startswith("#endif"):
            kept.pop()
        elif all(kept):
            lines.append(line)
    return [one.strip() for one in " ".join(lines).split(",")]


def architecture(capability: tuple[int, int]) -> str:
    """What to compile for on a device: its own architecture, or the nearest that runs there.

    Machine code runs on later devices of the same major; on a major newer than the compiler only PTX does.
    """
    known = supported_architectures()
    wanted = capability[0] * 10 + capability[1]
    same_major = [a for a in known if a // 10 == capability[0] and a <= wanted]
    if same_major:
        return f"sm_{max(same_major)}"
    older = [a for a in known if a <= wanted]
    if not older:
        got = f"a device of compute capability {capability[0]}.{capability[1]}"
        allowed = f"what NVRTC {_version()} compiles for: {', '.join(f'{a / 10}' for a in known)}"
        raise LibraryError("compile a kernel", got, allowed, "install an NVRTC that knows the device")
    return f"compute_{max(older)}"


def options_for(source: str, constants: Mapping[str, Constant], arch: str) -> list[str]:
    """The whole command line but the include folders."""
    fixed = ["--std=c++17", f"--gpu-architecture={arch}"]
    extra = [option for line in _OPTIONS.findall(source) for option in line.split()]
    given = ((name, int(value) if isinstance(value, bool) else value) for name, value in sorted(constants.items()))
    return fixed + extra + [f"-D{name}={value}" for name, value in given]


def compile_source(name: str, constants: Mapping[str, Constant], arch: str) -> bytes:
    """The cubin (PTX for a `compute_` architecture) of te_core/kernels/<name>.cu with these constants."""
    path = source_path(name)
    source = path.read_text()
    return compile_text(source, path.name, options_for(source, constants, arch))


def cached(name: str, constants: Mapping[str, Constant], arch: str) -> bytes:
    """`compile_source`, kept on disk between processes."""
    path = source_path(name)
    source = path.read_text()
    options = options_for(source, constants, arch)
    with _lock:
        place = cache.place("kernels", f"{name}-{arch}-{cache_key(source, options)}.bin")
        image = read_cache(place)
        if image is None:
            image = compile_text(source, path.name, options)
            write_cache(place, image)
    return image


# ---------------------------------------------------------------------------------------------- the cache


def cache_key(source: str, options: list[str]) -> str:
    """A digest of all that decides the compiler's output."""
    digest = hashlib.sha256()
    for part in (_version(), *options, source):
        digest.update(part.encode())
        digest.update(b"\0")
    seen: dict[str, bytes] = {}
    _digest_includes(_INCLUDE.findall(source), FOLDER, include_folders(), seen)
    for header, content in sorted(seen.items()):
        digest.update(header.encode() + b"\0" + content)
    return digest.hexdigest()[:32]


def _digest_includes(names: Sequence[str], beside: Path, folders: list[Path], seen: dict[str, bytes]) -> None:
    """Add every header reached from these includes, by the name it is included under."""
    for name in names:
        if name in seen:
            continue
        path = next((p for p in (folder / name for folder in (beside, *folders)) if p.is_file()), None)
        if path is None:  # a header of an untaken #if may well be missing
            continue
        if path not in _headers or path.is_relative_to(FOLDER):
            content = path.read_bytes()
            found = tuple(_INCLUDE.findall(content.decode(errors="replace")))
            _headers[path] = (hashlib.sha256(content).digest(), found)
        seen[name], further = _headers[path]
        _digest_includes(further, path.parent, folders, seen)


def read_cache(place: Path) -> bytes | None:
    """A cached image, or None if it is missing, damaged, or not ours alone."""
    content = cache.read(place)
    if content is None:
        return None
    digest, image = content[:32], content[32:]
    return image if hashlib.sha256(image).digest() == digest else None


def write_cache(place: Path, image: bytes) -> None:
    """Keep an image; where that cannot be, it is compiled again next time (doctor reports the folder)."""
    cache.write(place, hashlib.sha256(image).digest() + image)


# ---------------------------------------------------------------------------------------------- NVRTC


def include_folders() -> list[Path]:
    """Where `#include` looks: our headers, then the CUDA headers."""
    return [FOLDER, FOLDER / "common", *cuda_headers()]


def cuda_headers() -> list[Path]:
    """The folder of cuda_fp8.h and its like: the user's, the wheel's, or a toolkit's of the compiler's major."""
    given = env.cuda_include()
    if given is not None:
        return [given]
    major = libraries.version("nvrtc")[0]
    wheels = [f"cu{major}/include", "cuda_runtime/include"]
    places = [folder / "nvidia" / wheel for folder in libraries.package_folders() for wheel in wheels]
    places += [Path(f"/usr/local/cuda-{major}/include"), Path("/usr/local/cuda/include")]
    for place in places:
        if (place / "cuda_fp8.h").is_file():
            # A toolkit keeps <nv/target> apart, in the CCCL folder.
            return [place, place / "cccl"] if (place / "cccl").is_dir() else [place]
    allowed = "the headers of the nvidia-cuda-runtime wheel or of a CUDA toolkit"
    do = f"{libraries.pip_install('CUDA headers')}, or set TE_CORE_CUDA_INCLUDE to the folder that holds cuda_fp8.h"
    raise LibraryError("find the CUDA headers", "cuda_fp8.h in none of " + ", ".join(map(str, places)), allowed, do)


def _version() -> str:
    return ".".join(map(str, libraries.version("nvrtc")))


def supported_architectures() -> list[int]:
    """What NVRTC compiles for, as 80, 90, …"""
    lib = libraries.load("nvrtc")
    count = ctypes.c_int(0)
    _check(lib, lib.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
    found = (ctypes.c_int * count.value)()
    _check(lib, lib.nvrtcGetSupportedArchs(found), "nvrtcGetSupportedArchs")
    return list(found)


def compile_text(source: str, title: str, options: list[str]) -> bytes:
    """Compile a source text; the error of a failed one shows the lines at fault and the options."""
    lib = libraries.load("nvrtc")
    command = [*options, *(f"-I{folder}" for folder in include_folders())]
    program = ctypes.c_void_p()
    status = lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), title.encode(), 0, None, None)
    _check(lib, status, "nvrtcCreateProgram")
    try:
        argv = (ctypes.c_char_p * len(command))(*(option.encode() for option in command))
        if lib.nvrtcCompileProgram(program, len(command), argv):
            log = _fetch(lib, program, "ProgramLog").decode(errors="replace").strip("\0\n")
            got = f"the errors below, with options {' '.join(options)}\n{log}\n"  # the log shows the lines at fault
            do = "check the constants; if the kernel is unchanged, the CUDA headers may not match NVRTC "
            do += f"{_version()} ({', '.join(map(str, cuda_headers()))})"
            raise LibraryError(f"compile {title}", got, "a source that compiles", do)
        binary = any("gpu-architecture=sm_" in option for option in options)
        return _fetch(lib, program, "CUBIN" if binary else "PTX")
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t(0)
    _check(lib, lib[f"nvrtcGet{what}Size"](program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    buffer = ctypes.create_string_buffer(size.value)
    _check(lib, lib[f"nvrtcGet{what}"](program, buffer), f"nvrtcGet{what}")
    return buffer.raw


def _check(lib: Any, status: int, call: str) -> None:
    if status:
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        text = (lib.nvrtcGetErrorString(status) or b"").decode()
        raise LibraryError(call, f"{text} ({status})", "success", "check the NVRTC installation with te_core.doctor")
