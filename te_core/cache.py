"""The cache folder: compiled kernels, cuDNN plans, timings. Another process runs what is in it, so it is ours alone.

Folders are made for their owner only (0700). One that somebody else owns or may write to is ignored, with one warning;
so is a file like that, and what is no file at all. Nothing here raises: without a cache things are made anew.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from te_core import env

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_BYTES = 1 << 30  # of a file that is read


def place(*parts: str) -> Path:
    """The path of a file in the cache folder."""
    return env.cache_dir().joinpath(*parts)


def read(path: Path) -> bytes | None:
    """The content of a file; None where there is none that can be trusted."""
    with _folder(path.parent) as folder:
        if folder is None:
            return None
        try:
            # NONBLOCK: to open a FIFO would wait for a writer.
            handle = os.open(path.name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError:  # not there, most likely
            return None
        try:
            found = os.fstat(handle)
            reason = "it is no file" if not stat.S_ISREG(found.st_mode) else _distrusted(found)
            if reason or found.st_size > _MOST_BYTES:
                _ignore(path, reason or f"it has {found.st_size} bytes", f"remove {path}")
                return None
            with os.fdopen(handle, "rb", closefd=False) as file:
                return file.read()
        except OSError:
            return None
        finally:
            os.close(handle)


def write(path: Path, content: bytes) -> bool:
    """Put a file in place in one step: readers see all of it or nothing, whoever else writes. False if it cannot be."""
    try:
        for each in _chain(path.parent):  # the folders that are missing are made; only their owner may enter ours
            if not each.is_dir():
                each.parent.mkdir(parents=True, exist_ok=True)
                each.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return False
    with _folder(path.parent) as folder:
        if folder is None:
            return False
        temporary = f"{path.name}.{secrets.token_hex(8)}"
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        except OSError:  # a read-only home: what is cached is made again next time (doctor reports the folder)
            return False
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            return True
        except OSError:  # the disk is full, or a folder stands there
            return False
        finally:
            with suppress(OSError):  # gone, where all went well
                os.unlink(temporary, dir_fd=folder)


def read_json(path: Path, check: Any) -> Any:
    """What a JSON file says if `check` of it is true; None, with one warning, where it is damaged."""
    content = read(path)
    if content is None:
        return None
    try:
        found = json.loads(content)
        if check(found):
            return found
        reason = "it says something else than we write"
    except (ValueError, RecursionError) as error:  # nested deeper than we write it
        reason = f"it is damaged: {type(error).__name__}: {error}"[:200]
    _ignore(path, reason, f"remove {path}")
    return None


def fault(folder: Path) -> str:
    """Why a folder is not read from; nothing where it is, or is not there yet."""
    for each in _chain(folder):
        try:
            reason = _distrusted(os.stat(each))
        except FileNotFoundError:
            return ""
        except OSError as error:
            return str(error)
        if reason:
            return f"{each}: {reason}"
    return ""


def _chain(folder: Path) -> list[Path]:
    """The folders from the cache folder down to this one; outside of it, this one alone."""
    root = env.cache_dir()
    if folder != root and not folder.is_relative_to(root):
        return [folder]
    between = folder.relative_to(root).parts
    return [root.joinpath(*between[:n]) for n in range(len(between) + 1)]


@contextmanager
def _folder(path: Path) -> Iterator[int | None]:
    """A descriptor of a folder, so that what is looked at is what is used; None if it is not there or not ours."""
    for above in _chain(path)[:-1]:
        with suppress(OSError):
            if reason := _distrusted(os.stat(above)):
                _ignore(above, reason, _remedy(above))
                yield None
                return
    try:
        found = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        reason = _distrusted(os.fstat(found))
        if reason:
            _ignore(path, reason, _remedy(path))
        yield None if reason else found
    finally:
        os.close(found)


def _distrusted(found: os.stat_result) -> str:
    """Who else could have put something there."""
    if found.st_uid not in (os.geteuid(), 0):
        return f"the user {found.st_uid} owns it"
    if found.st_mode & _OTHERS_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _remedy(folder: Path) -> str:
    return f"remove {folder}, or chmod -R go-w it if you trust what is in it, or set TE_CORE_CACHE_DIR"


def _ignore(path: Path, reason: str, do: str) -> None:
    if not env.told(path):
        warnings.warn(f"the cache {env.shown(str(path))} is ignored: {reason}. To do: {env.shown(do)}", stacklevel=5)
