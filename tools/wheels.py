"""What is released: the sources as an archive, the wheel that runs anywhere, and one for each architecture that has the
C library and its headers in it.

    python tools/wheels.py --out dist                      all four
    python tools/wheels.py --out dist --archs x86_64
    python tools/wheels.py --repository https://...        of a repository that others can read: links lead there

The library is compiled by Zig's C compiler (`pip install ziglang`), which brings the headers of an old C library along.
The library runs with glibc 2.17 and newer, on an architecture that need not be this machine's. Nothing in te_core needs
the library.

A package index shows README.md, where links to files of the repository lead nowhere. They lead to the repository if
--repository names one; else their words stay, without the links.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
C = ROOT / "bindings" / "c"
ARCHS = ("x86_64", "aarch64")
GLIBC = (2, 17)
WARNINGS = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?!\w+:|#)(?P<file>[^)\s]+)\)")
LIBRARY, HEADERS = "te_core/lib/libte_core.so", "te_core/include"


def compiled(arch: str, folder: Path) -> Path:
    """The library for an architecture."""
    made = folder / f"libte_core-{arch}.so"
    target = f"{arch}-linux-gnu.{'.'.join(map(str, GLIBC))}"
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, *WARNINGS, "-O2", "-s", "-DNDEBUG"]
    command += ["-I", str(C / "include"), "-fPIC", "-fvisibility=hidden", "-shared", "-Wl,-soname,libte_core.so"]
    command += [f"-Wl,--version-script={C / 'te_core.map'}", "-Wl,-z,defs", "-o", str(made)]
    subprocess.run([*command, *map(str, sorted((C / "src").glob("*.c"))), "-ldl", "-lpthread"], check=True)
    return made


@contextmanager
def sources(repository: str = "") -> Iterator[Path]:
    """A copy of what is built from (a build leaves folders behind), with a README that an index can show."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "te-runtime"
        for package in ("te_core", "te_torch", "te_cli", "bindings"):
            ignored = shutil.ignore_patterns("__pycache__", "build")
            shutil.copytree(ROOT / package, copy / package, ignore=ignored)
        for file in ("pyproject.toml", "MANIFEST.in", "CHANGELOG.md", "LICENSE"):
            shutil.copy(ROOT / file, copy)
        (copy / "README.md").write_text(linked((ROOT / "README.md").read_text(), repository))
        if repository:
            with (copy / "pyproject.toml").open("a") as project:
                project.write(f'\n[project.urls]\nRepository = "{repository}"\n')
                project.write(f'Changelog = "{address(repository, "CHANGELOG.md")}"\n')
        yield copy


def linked(text: str, repository: str) -> str:
    """A page whose links to files lead to the repository, or are none."""
    return _LINK.sub(lambda m: f"[{m['text']}]({address(repository, m['file'])})" if repository else m["text"], text)


def address(repository: str, file: str) -> str:
    """Where a file of this version can be read, as GitHub, GitLab and Gitea spell it."""
    return f"{repository.rstrip('/')}/blob/v{version()}/{file}"


def version() -> str:
    """The project's, which stands in te_core/__init__.py alone."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "te_core" / "__init__.py").read_text(), re.MULTILINE)
    assert found
    return found[1]


def plain(tree: Path, out: Path, *options: str) -> Path:
    """The wheel that runs anywhere. `options`: pip's."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", "-w", folder]
        subprocess.run([*pip, *options, str(tree)], check=True)
        (made,) = Path(folder).glob("*.whl")
        return Path(shutil.copy(made, out / made.name))


def archive(tree: Path, out: Path) -> Path:
    """The sources, from which pip can build the wheel."""
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(out.resolve())], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    return out / f"te_runtime-{version()}.tar.gz"


def with_library(wheel: Path, library: Path, platform: str) -> Path:
    """The wheel for a platform: the same, with the library and its headers."""
    made = wheel.with_name(wheel.name.replace("-any.whl", f"-{platform}.whl"))
    record: list[tuple[str, str, int]] = []
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:

        def put(name: str, content: bytes) -> None:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append((name, f"sha256={digest}", len(content)))
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            new.writestr(info, content)

        for name in old.namelist():
            content = old.read(name)
            if name.endswith(".dist-info/WHEEL"):
                text = content.decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
                content = text.replace("Tag: py3-none-any", f"Tag: py3-none-{platform}").encode()
            if name.endswith(".dist-info/RECORD"):
                kept = name
            else:
                put(name, content)
        put(LIBRARY, library.read_bytes())
        for header in sorted((C / "include").iterdir()):
            put(f"{HEADERS}/{header.name}", header.read_bytes())
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*record, (kept, "", "")])
        new.writestr(kept, text.getvalue())
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Build them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files (dist)")
    parser.add_argument("--archs", nargs="*", default=ARCHS, choices=ARCHS, help="architectures with the C library")
    parser.add_argument("--repository", default="", metavar="URL", help="where people can read the sources")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    with sources(given.repository) as tree:
        print(archive(tree, given.out))
        wheel = plain(tree, given.out)
    print(wheel)
    with tempfile.TemporaryDirectory() as folder:
        for arch in given.archs:
            platform = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{arch}"
            print(with_library(wheel, compiled(arch, Path(folder)), platform))


if __name__ == "__main__":
    main()
