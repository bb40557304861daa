"""The names of overlap with tensor-parallel communication: what scripts import, with their arguments judged.

Overlap itself is not built. A script that imports these and never overlaps runs; `initialize_ub` checks what it is
given and then says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NoReturn

import torch

from te_core.errors import ArgumentError, UnsupportedError


class UserBufferQuantizationMode(Enum):
    """What a buffer of an overlapped product holds."""

    NONE = "none"
    FP8 = "fp8"


_GATHERS = ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")
_SCATTERS = ("proj_fprop", "fc2_fprop")
_BULK = ("qkv_dgrad", "fc1_dgrad", "qkv_wgrad", "fc1_wgrad")
_EXTERNAL = ("proj_wgrad", "fc2_wgrad")
_DEFAULT: Mapping[str, str] = {
    **dict.fromkeys(_GATHERS, "ring_exchange"),
    **dict.fromkeys(_SCATTERS, "pipeline"),
    **dict.fromkeys(_BULK, "bulk"),
    **dict.fromkeys(_EXTERNAL, "external"),
}
_METHODS = ("ring_exchange", "pipeline", "bulk", "external")
_KEYS = (
    "method",
    "is_reduce_scatter",
    "num_sm",
    "cga_size",
    "set_sm_margin",
    "num_splits",
    "aggregate",
    "atomic_gemm",
    "use_ce",
    "fp8_buf",
    "comm_priority",
    "gemm_priority",
    "pipeline_rs_overlap_first_gemm",
)
_DGRADS = ("qkv_dgrad", "fc1_dgrad")
_RINGS = (("qkv_fprop", "proj_fprop"), ("fc1_fprop", "fc2_fprop"))


def initialize_ub(
    shape: Sequence[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: list[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: dict[str, Any] | list[dict[str, Any] | None] | None = None,
    bootstrap_backend: str | None = None,
    with_cublasmp: bool = False,
) -> None:
    """Check the arguments of overlap, and refuse it: it is not built. Leave the call out, and the `ub_*` options."""
    operation = "initialize_ub"
    if not (isinstance(shape, Sequence) and len(shape) == 2 and all(isinstance(n, int) and n > 0 for n in shape)):
        raise ArgumentError(operation, f"shape={shape!r}", "[tokens, hidden], two integers >= 1", "correct it")
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise ArgumentError(operation, f"tp_size={tp_size!r}", "an integer >= 1", "correct it")
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(operation, f"dtype={dtype!r}", "a torch.dtype", "correct it")
    modes = _modes(quantization_modes, use_fp8)
    for mode, cfg in zip(modes, _configurations(ub_cfgs, len(modes)), strict=True):
        _check_configuration(cfg or {}, mode, with_cublasmp)
    if bootstrap_backend not in (None, "gloo", "mpi", "nccl"):
        raise ArgumentError(
            operation, f"bootstrap_backend={bootstrap_backend!r}", "'gloo', 'mpi', 'nccl' or None", "correct it"
        )
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise UnsupportedError(
            operation,
            "no process group",
            "it where torch.distributed is initialized",
            "leave the call out: overlap with communication is not built",
        )
    raise UnsupportedError(
        operation,
        f"overlap of products with communication over {tp_size} ranks",
        "products and communication one after another in this release",
        "leave the call out, and ub_tp_comm_overlap, ub_overlap_*, ub_bulk_* of the modules",
    )


def _modes(given: Any, use_fp8: bool) -> list[UserBufferQuantizationMode]:
    if not given and (given is None or isinstance(given, list)):
        warnings.warn(
            "initialize_ub: use_fp8 is deprecated; pass quantization_modes=[UserBufferQuantizationMode.FP8] or [NONE]",
            DeprecationWarning,
            stacklevel=3,
        )
        return [UserBufferQuantizationMode.FP8 if use_fp8 else UserBufferQuantizationMode.NONE]
    if not isinstance(given, list) or not all(isinstance(mode, UserBufferQuantizationMode) for mode in given):
        raise TypeError(
            f"initialize_ub: quantization_modes={given!r}; it is a list of UserBufferQuantizationMode, or None"
        )
    return given


def _configurations(given: Any, count: int) -> list[Any]:
    found = list(given) if isinstance(given, list) else [given] * count
    if len(found) != count or not all(cfg is None or isinstance(cfg, dict) for cfg in found):
        raise ArgumentError(
            "initialize_ub",
            f"ub_cfgs={given!r} for {count} modes",
            "a dict for all modes, or a list with a dict or None for each",
            "correct it",
        )
    return found


def _check_configuration(cfg: dict[str, Any], mode: UserBufferQuantizationMode, with_cublasmp: bool) -> None:
    """The documented rules of a configuration, by the GEMM's name."""
    for name, options in cfg.items():
        if name not in _DEFAULT:
            _wrong(f"a configuration of {name!r}", f"one of {', '.join(_DEFAULT)}")
        if not isinstance(options, dict) or (unknown := [k for k in options if k not in _KEYS]):
            got = f"{name}: {options!r}" if not isinstance(options, dict) else f"{name}: {', '.join(unknown)}"
            _wrong(got, f"a dict of {', '.join(_KEYS)}")
        method = options.get("method", _DEFAULT[name])
        if method not in _METHODS:
            _wrong(f"{name}: method={method!r}", f"one of {', '.join(_METHODS)}")
        scatters = options.get("is_reduce_scatter", name in _SCATTERS or name in _DGRADS)
        if method == "pipeline" and not scatters:
            _wrong(f"{name}: method='pipeline' for an all-gather", "'ring_exchange'")
        if options.get("atomic_gemm") and mode is not UserBufferQuantizationMode.FP8:
            _wrong(f"{name}: atomic_gemm without FP8", "it in a mode FP8")
        if method == "external" and name not in _EXTERNAL:
            _wrong(f"{name}: method='external'", f"it for {', '.join(_EXTERNAL)}")
        if with_cublasmp and "method" in options and method in ("bulk", "external"):
            _wrong(f"{name}: method={method!r} with with_cublasmp=True", "'ring_exchange' or 'pipeline'")
    for first, second in _RINGS:
        atomic = [cfg.get(n, {}).get("atomic_gemm", False) for n in (first, second)]
        rings = [cfg.get(n, {}).get("method", _DEFAULT[n]) == "ring_exchange" for n in (first, second)]
        if all(rings) and atomic[0] != atomic[1]:
            _wrong(f"atomic_gemm of one of {first} and {second} alone", "it for both or none")
    for dgrad in _DGRADS:
        wgrad = dgrad.replace("dgrad", "wgrad")
        if wgrad in cfg and cfg.get(dgrad, {}).get("method", "bulk") != "bulk":
            _wrong(
                f"a configuration of {wgrad} beside {dgrad} that is not bulk", f"{dgrad} alone: then {wgrad} has none"
            )


def _wrong(got: str, allowed: str) -> NoReturn:
    raise ArgumentError("initialize_ub", got, allowed, "correct ub_cfgs")


def destroy_ub() -> None:
    """Let go of all communicators of overlap: there are none."""


def is_ub_initialized() -> bool:
    """Whether overlap was initialised: it never is."""
    return False


def using_cublasmp_backend() -> bool:
    """Whether overlap runs in cuBLASMp."""
    return False


def get_ub(name: str, use_fp8: bool) -> NoReturn:
    """The communicator of a GEMM, of which there is none before `initialize_ub`."""
    raise UnsupportedError(
        "get_ub",
        f"name={name!r}, use_fp8={use_fp8} where overlap is not initialised",
        "a name that initialize_ub registered; overlap is not built",
        "leave the ub_* options out",
    )


def get_ub_is_fp8(name: str) -> NoReturn:
    """Whether a GEMM's communicator holds FP8: there is none."""
    get_ub(name, False)
