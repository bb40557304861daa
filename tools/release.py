"""Check what tools/wheels.py has built, as those who install it meet it.

    python tools/release.py dist
    python tools/release.py dist --pythons python3.10 python3.11 python3.12 python3.13
    python tools/release.py dist --borrow         # torch and NumPy from the Python at hand, not from an index

* twine and check-wheel-contents read every file.
* In a fresh environment of each Python, outside of the checkout, the wheel is installed with torch. Then the quick
  start runs: README.md's examples, `te doctor --test`, `te bench`, `te train`. The seconds of each step are shown.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

#: Before the examples: what is imported is what was installed.
INSTALLED = """\
import sys
import te_cli, te_core, te_torch
assert all(m.__file__.startswith(sys.prefix) for m in (te_cli, te_core, te_torch)), te_core.__file__
"""


def looked_at(files: Sequence[Path]) -> None:
    """The files, by tools for it: an index would take them and show the README; each wheel holds what it shall."""
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    run(sys.executable, "-m", "check_wheel_contents", *(file for file in files if file.suffix == ".whl"), folder=ROOT)


def quick_start(readme: str, training: Sequence[str]) -> dict[str, list[str]]:
    """What is run in a fresh environment, by name: arguments of its Python."""
    examples = INSTALLED + "\n".join(_EXAMPLE.findall(readme))
    return {
        "examples": ["-c", examples],
        "doctor": ["-m", "te_cli", "doctor", "--test"],
        "bench": ["-m", "te_cli", "bench", "--no-compile", "--seconds", "0.2"],
        "train": ["-m", "te_cli", "train", *training],
    }


def tried(python: str, wheel: Path, training: Sequence[str], borrow: bool) -> dict[str, float]:
    """Install the wheel in a fresh environment of this Python and run the quick start there; seconds of each step."""
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "venv" / "bin" / "python"

        def step(name: str, *command: object) -> None:
            started = time.perf_counter()
            run(*command, folder=Path(folder))
            seconds[name] = time.perf_counter() - started

        step("environment", python, "-m", "venv", own.parent.parent)
        if borrow:
            theirs, mine = (
                said(each, "import sysconfig; print(sysconfig.get_path('purelib'))") for each in (python, own)
            )
            (Path(mine) / "borrowed.pth").write_text(f"import site; site.addsitedir({theirs!r})\n")
        options = ["--no-deps"] if borrow else []
        step("install", own, "-m", "pip", "install", "-q", *options, f"{wheel.resolve()}[torch]")
        for name, arguments in quick_start((ROOT / "README.md").read_text(), training).items():
            step(name, own, *arguments)
    return seconds


def run(*command: object, folder: Path | None = None) -> None:
    """Run a program; an end with all it said where it fails."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or folder in (None, ROOT)}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"release: {' '.join(words)[:200]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def said(python: object, code: str) -> str:
    """What a line of Python prints."""
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Look at all files, try the plain wheel in every Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the files")
    parser.add_argument("--pythons", nargs="*", default=[sys.executable], help="interpreters to try (this one)")
    parser.add_argument("--train", default="--steps 20", metavar="OPTIONS", help="of te train (--steps 20)")
    parser.add_argument("--borrow", action="store_true", help="take what te-runtime needs from the interpreters")
    given = parser.parse_args(arguments)
    files = sorted([*given.folder.glob("*.whl"), *given.folder.glob("*.tar.gz")])
    wheels = [file for file in files if file.name.endswith("-none-any.whl")]
    if len(wheels) != 1:
        parser.error(f"{given.folder} holds {len(wheels)} wheels that run anywhere: build into an empty folder")
    looked_at(files)
    print(*(f"in order: {file.name}" for file in files), sep="\n", flush=True)
    for python in given.pythons:
        seconds = tried(python, wheels[0], given.train.split(), given.borrow)
        steps = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
        print(
            f"{said(python, 'import sys; print(sys.version.split()[0])')}: {steps}; {sum(seconds.values()):.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
