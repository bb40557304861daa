"""What the programs' arguments may be. A mistake of the user ends a program in a line that says what to do."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Any


class UserError(ValueError):
    """A mistake of the user: what is wrong, and what to do."""

    code = 2  # the program's exit code


class WriteError(UserError):
    """A file that cannot be written, though the command is right."""

    code = 1


@contextmanager
def mistakes_end(program: str) -> Iterator[None]:
    """End the program at a mistake, as argparse ends it at a wrong argument; other errors are shown whole."""
    try:
        yield
    except UserError as mistake:
        sys.stderr.write(f"{program}: error: {mistake}\n")
        raise SystemExit(mistake.code) from None


def positive(text: str) -> int:
    """An integer of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


def rate(text: str) -> float:
    """A learning rate."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def seed(text: str) -> int:
    """What torch's generators take."""
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text} is not an integer from 0 to {(1 << 63) - 1}")
    return int(text)


def device(text: str) -> str:
    """The CPU, or a GPU that is here."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text} is none of cpu, cuda, cuda:1 ...")
    if text != "cpu" and int(text.partition(":")[2] or 0) >= gpus():
        built = f"torch {_torch()} is built for the CPU" if "+cpu" in _torch() else f"this machine has {gpus()} GPUs"
        raise argparse.ArgumentTypeError(f"{text} is not here: {built}")
    return text


def add_device(parser: argparse._ActionsContainer) -> None:
    """The option --device."""
    about = "cpu, cuda, cuda:1 ... (CUDA where there is one)"
    parser.add_argument("--device", type=device, default=usual_device(), metavar="DEVICE", help=about)


def usual_device() -> str:
    """CUDA where there is a GPU."""
    return "cuda" if gpus() else "cpu"


def gpus() -> int:
    """How many GPUs torch can use. To import it, and ask, would take seconds."""
    from te_core import libraries
    from te_core.errors import LibraryError

    try:
        return 0 if "+cpu" in _torch() else libraries.driver().device_count
    except LibraryError:  # no driver
        return 0


def _torch() -> str:
    """Its version, which says so where it is built for the CPU alone; empty without torch."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def writable(folder: Path, files: Iterable[str] = (), option: str = "--out") -> None:
    """Make the folder, if need be, and see that files of these names can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{option} {folder}: {error.strerror}. Choose a folder that can be written") from error
    for name in files:
        path = folder / name
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise UserError(f"{option} {folder}: {name} there cannot be overwritten. Choose another folder")


@contextmanager
def replacing(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """A file that becomes `path` once it is whole. If it cannot be written (a full disk), `path` stays as it was."""
    draft = path.with_suffix(".tmp")
    try:
        with draft.open(mode, newline=None if "b" in mode else "") as file:
            yield file
        os.replace(draft, path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        cause: BaseException | None = error  # torch reports that a file cannot be written as an error of its own
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        kept = "; the one from before is as it was" if path.exists() else ""
        raise WriteError(
            f"{path} cannot be written ({cause.strerror}){kept}. Make room, or choose another folder (--out)"
        ) from error
