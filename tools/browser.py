"""A browser without a window, for the tests of pages: `make test-more` has Debian's `chromium` installed where none is.

python tools/browser.py      find one, or install it
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT = 120  # seconds for a page


class Shown(NamedTuple):
    """What became of a page."""

    dom: str  # as its program left it
    console: list[str]  # what it wrote there, errors of scripts among it


def find() -> str | None:
    """The browser's path."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def show(page: Path, picture: Path | None = None, size: tuple[int, int] = (1300, 1500)) -> Shown:
    """Open a file, let its program run, and draw it into `picture`."""
    program = find()
    if program is None:
        raise FileNotFoundError(f"none of {', '.join(NAMES)}: python tools/browser.py installs one")
    with tempfile.TemporaryDirectory() as profile:
        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            # Nothing may come from a network.
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", "--virtual-time-budget=20000",
            f"--window-size={size[0]},{size[1]}", "--enable-logging=stderr", "--v=0",
        ]  # fmt: skip
        if picture is not None:
            picture.parent.mkdir(parents=True, exist_ok=True)
            _run([*command, f"--screenshot={picture}", page.as_uri()])
        ended = _run([*command, "--dump-dom", page.as_uri()])
    return Shown(ended.stdout, [line for line in ended.stderr.splitlines() if ":CONSOLE" in line])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)


def main() -> int:
    """Find a browser, or have Debian's package manager install one; what it takes where that cannot be."""
    if find() is not None:
        return 0
    by = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if shutil.which("apt-get") is None or (by and shutil.which("sudo") is None):
        print(f"browser: none of {', '.join(NAMES)} is here: install one (its tests are skipped)")
        return 0
    print("browser: installing Debian's chromium", flush=True)
    for step in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        ended = subprocess.run([*by, "apt-get", "-q", *step], capture_output=True, text=True)
        if ended.returncode:
            print(f"browser: apt-get {step[0]} failed (the tests of pages are skipped):\n{ended.stderr[-2000:]}")
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
