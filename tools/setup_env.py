"""Create or reuse `.venv` and install this project there, editable, with the extras this machine needs.

python tools/setup_env.py            what `make test` and the others need
python tools/setup_env.py clients    that, and these extras of pyproject.toml as well

Runs with any Python >= 3.10 and nothing installed; returns at once where nothing changed since the last time.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"

# PyTorch by CUDA version of the driver: a wheel built for it is what its CUDA extra can share libraries with.
TORCH = {"cu13": "torch>=2.11", "cu12": "torch>=2.8,<2.11", None: "torch==2.13.0"}

#: Programs for the tests of the extra `clients` of which several releases are tested: each has a folder of its own, as
#: one environment holds one of them. Without what they depend on, and for whatever Python they ask.
APART = {"megatron-core": ("0.16.1", "0.19.2")}


def cuda_extra() -> str | None:
    """The extra for this machine's NVIDIA driver, None where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    shown = subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
    found = re.search(r"CUDA(?: UMD)? Version:\s*(\d+)\.", shown)
    if found is None:  # the tool is there, a working driver is not
        return None
    major = int(found[1])
    if major < 12:
        sys.exit(f"setup: the NVIDIA driver offers CUDA {major}, 12 or newer is needed: update the driver")
    return "cu13" if major >= 13 else "cu12"


def make_venv() -> None:
    """A virtual environment with pip; an existing one is kept if its interpreter runs."""
    if PYTHON.exists() and subprocess.run([PYTHON, "-c", "import pip"], capture_output=True).returncode == 0:
        return
    print(f"setup: creating {VENV.relative_to(ROOT)}", flush=True)
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], capture_output=True, text=True)
    if made.returncode == 0:
        return
    # Debian's bare python3 has no ensurepip: let a pip from outside furnish the environment.
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", VENV], check=True)
    if subprocess.run([sys.executable, "-m", "pip", "--python", PYTHON, "install", "-q", "pip"]).returncode:
        shutil.rmtree(VENV)
        sys.exit(f"setup: no pip for {VENV} (install python3-venv):\n{made.stdout}{made.stderr}")


def fingerprint(requirements: list[str]) -> str:
    """Changes when the environment has to be looked at again."""
    parts = [*requirements, (ROOT / "pyproject.toml").read_text(), sys.version, str(ROOT)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def install(requirements: list[str]) -> None:
    """pip, with a line for each package that it fetches and one where it unpacks them; all of it where it fails."""
    command = [PYTHON, "-m", "pip", "install", "--progress-bar=off", "--disable-pip-version-check", *requirements]
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            said.append(line)
            step = line.strip()
            if step.startswith("Downloading "):
                print(f"setup:   downloading {step.removeprefix('Downloading ')}", flush=True)
            elif step.startswith("Installing collected packages: "):
                print(f"setup:   unpacking {step.count(',') + 1} packages (the longest step)", flush=True)
    if pip.returncode:
        print("".join(said), file=sys.stderr)
        raise subprocess.CalledProcessError(pip.returncode, command)


def folder_of(package: str, release: str) -> Path:
    """Where a release is installed apart."""
    return ROOT / "build" / "clients" / f"{package}-{release}"


def install_apart() -> None:
    """Install what of `APART` is not there yet."""
    for package, release in ((package, release) for package, releases in APART.items() for release in releases):
        folder = folder_of(package, release)
        if folder.exists():
            continue
        print(f"setup: installing {package} {release} into {folder.relative_to(ROOT)}", flush=True)
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        install(["--no-deps", "--ignore-requires-python", "--target", str(unfinished), f"{package}=={release}"])
        unfinished.rename(folder)


def main() -> None:
    """Bring `.venv` up to date."""
    if sys.version_info < (3, 10):
        sys.exit(f"setup: this is Python {sys.version.split()[0]}, 3.10 or newer is needed: make PYTHON=... ")
    cuda = cuda_extra()
    extras = ["torch", "dev", cuda or "nvrtc", *sys.argv[1:]]
    requirements = [TORCH[cuda], "-e", f"{ROOT}[{','.join(extras)}]"]
    want = fingerprint(requirements)
    # One stamp for each set of extras: what `make test-more` adds is no reason for `make test` to look again.
    stamp = VENV / f"{'-'.join(['te-runtime', *sys.argv[1:]])}.stamp"
    with (ROOT / "pyproject.toml").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once: the second waits, then finds all done
        make_venv()
        if "clients" in sys.argv[1:]:
            install_apart()
        if stamp.exists() and stamp.read_text() == want:
            return
        print(f"setup: installing te-runtime[{','.join(extras)}] and {TORCH[cuda]} into {VENV.name}", flush=True)
        start = time.perf_counter()
        install(requirements)
        stamp.write_text(want)
        print(f"setup: done in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as failed:
        sys.exit(f"setup: this failed with status {failed.returncode}: {' '.join(map(str, failed.cmd))}")
