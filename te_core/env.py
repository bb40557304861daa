"""Every environment variable te_core reads, in one place. `python -m te_core.doctor` lists them."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLES: dict[str, str] = {
    "TE_CORE_CACHE_DIR": "folder of compiled kernels and autotuned GEMM choices (default ~/.cache/te-runtime)",
    "TE_CORE_CUDA_INCLUDE": "folder of the CUDA headers for NVRTC (default: the wheel's, then the toolkit's)",
    "TE_CORE_LIBRARY_PATH": "folders searched for CUDA libraries before the pip wheels, separated by ':'",
    "NVTE_FWD_LAYERNORM_SM_MARGIN": "multiprocessors that forward norm kernels leave free (likewise BWD and INF)",
    "TE_CORE_AUTOTUNE": "1: time the candidate algorithms of each new GEMM once and remember the fastest",
}


def cache_dir() -> Path:
    """Where compiled kernels and tuned choices are kept between processes."""
    given = os.environ.get("TE_CORE_CACHE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "te-runtime"


def cuda_include() -> Path | None:
    """The CUDA header folder the user named, if any."""
    given = os.environ.get("TE_CORE_CUDA_INCLUDE")
    return Path(given) if given else None


def library_path() -> list[Path]:
    """Folders to look for CUDA libraries in before all others."""
    return [Path(p) for p in os.environ.get("TE_CORE_LIBRARY_PATH", "").split(":") if p]


def norm_sm_margins() -> dict[str, int]:
    """Multiprocessors that norm kernels leave to others: what the documented variables say, by phase."""
    names = {"forward": "FWD", "backward": "BWD", "inference": "INF"}
    given = {phase: os.environ.get(f"NVTE_{short}_LAYERNORM_SM_MARGIN") for phase, short in names.items()}
    return {phase: int(value) for phase, value in given.items() if value}


def autotune() -> bool:
    """Whether every new GEMM is autotuned."""
    return os.environ.get("TE_CORE_AUTOTUNE", "0") == "1"
