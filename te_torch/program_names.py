"""Names in the text of compiled programs.

A compiler keeps its programs on disk and takes one of another process for this one's where text and inputs are equal.
The shapes of what our operators return follow from neither: they follow from a layer's spec, and from this library.
So a name says both, and means the same in every process.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from functools import cache
from pathlib import Path
from typing import Any

import te_core

_PACKAGES = (Path(te_core.__file__).parent, Path(__file__).parent)
_SECRET = secrets.token_hex(8)


def name_of_program(kind: str, described: Any, shared: bool = True) -> str:
    """A short name for what `repr` describes in full. `shared` is False where it does not: another process then takes
    no program of this name, as where an object without a description of its own is part of it."""
    text = repr(described)
    owner = build() if shared and " at 0x" not in text else this_process()
    return f"{kind}/{hashlib.sha256(f'{owner} {text}'.encode()).hexdigest()[:16]}"


def this_process() -> str:
    """A name that no other process has: a forked one shares the secret, and numbers of processes come again."""
    return f"{_SECRET} {os.getpid()}"


def build() -> str:
    """A digest of this library's sources; where it comes without any, a name of this process."""
    return _sources() or this_process()


@cache
def _sources() -> str:
    digest, found = hashlib.sha256(), False
    for package in _PACKAGES:
        for path in sorted(package.rglob("*.py")):
            content, found = path.read_bytes(), True
            digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16] if found else ""
