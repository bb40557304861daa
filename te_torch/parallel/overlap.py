"""Overlap of tensor-parallel products with their communication (userbuffers): what is asked for, and of which modules.

`initialize_ub` says once for a process how each GEMM overlaps, by its name; the modules' options say which GEMMs do. A
module's flags and these settings become plain data, `te_core.layers.overlap.Overlap`, in the spec of each of its
products. te_core does the rest.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from te_core import env
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.overlap import BULK, EXTERNAL, METHODS, PIPELINE, RING, Overlap, Way
from te_core.precision import Precision
from te_core.spelling import choice_error
from te_torch.parallel import peers
from te_torch.runtime import deprecated
from te_torch.values import is_flag


class UserBufferQuantizationMode(Enum):
    """In which calls GEMMs overlap: in those of high precision, or in those of a recipe."""

    NONE = "none"
    FP8 = "fp8"


_NONE, _FP8 = UserBufferQuantizationMode
_GATHERS = ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")
_SCATTERS = ("proj_fprop", "fc2_fprop")
_DGRADS = ("qkv_dgrad", "fc1_dgrad")
_WGRADS = ("qkv_wgrad", "fc1_wgrad")
_EXTERNAL = ("proj_wgrad", "fc2_wgrad")
#: Of each GEMM the method that it has if nobody says another one, and those that it may have.
_ALLOWED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_GATHERS, (RING,)),
    **dict.fromkeys(_SCATTERS, (PIPELINE, RING)),
    **dict.fromkeys(_DGRADS, (BULK, RING, PIPELINE)),
    **dict.fromkeys(_WGRADS, (BULK,)),
    **dict.fromkeys(_EXTERNAL, (EXTERNAL,)),
}
_SPLITS = 4  # pieces of a pipeline, if nobody says
_FLAGS = (
    *("is_reduce_scatter", "set_sm_margin", "aggregate", "atomic_gemm", "use_ce", "fp8_buf"),
    "pipeline_rs_overlap_first_gemm",
)
_COUNTS = ("num_sm", "cga_size", "num_splits")
_KEYS = ("method", *_FLAGS, *_COUNTS, "comm_priority", "gemm_priority")
#: Options that change nothing yet, with the values that ask for nothing.
_IDLE: Mapping[str, tuple[Any, ...]] = {
    "aggregate": (False,),
    "use_ce": (True,),
    "set_sm_margin": (False,),
    "comm_priority": (),
    "gemm_priority": (),
}
_RINGS = (("qkv_fprop", "proj_fprop"), ("fc1_fprop", "fc2_fprop"))


class OverlappedGemm(NamedTuple):
    """How a GEMM overlaps in a mode: what `get_ub` returns."""

    name: str
    mode: UserBufferQuantizationMode
    method: str
    num_splits: int
    chosen: bool  # whether ub_cfgs says this method
    fp8_buf: bool

    def is_fp8_ubuf(self) -> bool:
        """Whether the GEMM's communication carries FP8."""
        return self.fp8_buf


class _Settings(NamedTuple):
    """What `initialize_ub` was told."""

    capacity: int  # elements
    tp_size: int
    dtype: torch.dtype
    modes: tuple[UserBufferQuantizationMode, ...]
    gemms: Mapping[tuple[str, UserBufferQuantizationMode], OverlappedGemm]


class _Process:
    """The settings of this process, and the modules that have asked for them."""

    def __init__(self) -> None:
        self.settings: _Settings | None = None
        self.destroyed = False
        self.asked: weakref.WeakSet[Any] = weakref.WeakSet()

    def become(self, settings: _Settings | None) -> None:
        """Take these settings; what modules have decided by others they decide anew."""
        self.settings, self.destroyed = settings, settings is None
        for module in list(self.asked):
            module.decide_anew()


_process = _Process()


# ------------------------------------------------------------------------------------------- the settings


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
    """Say how GEMMs over ranks overlap with their communication: on all ranks, before the first forward.

    `shape` is [tokens, hidden] of the whole input, the most that overlaps. `docs/parallel.md` has all options.

    Raises:
        ArgumentError: A configuration that is not allowed.
        UnsupportedError: There is no process group, or it was called before.
    """
    operation = "initialize_ub"
    if not (isinstance(shape, Sequence) and len(shape) == 2 and all(isinstance(n, int) and n > 0 for n in shape)):
        raise ArgumentError(operation, f"shape={shape!r}", "[tokens, hidden], two integers >= 1", "correct it")
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise ArgumentError(operation, f"tp_size={tp_size!r}", "an integer >= 1", "correct it")
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(operation, f"dtype={dtype!r}", "a torch.dtype", "correct it")
    if not quantization_modes and (quantization_modes is None or isinstance(quantization_modes, list)):
        deprecated(f"{operation}: use_fp8", "quantization_modes=[UserBufferQuantizationMode.FP8] or [NONE]")
        quantization_modes = [_FP8 if use_fp8 else _NONE]
    modes = quantization_modes
    if not isinstance(modes, list) or not all(isinstance(mode, UserBufferQuantizationMode) for mode in modes):
        allowed = "it is a list of UserBufferQuantizationMode, or None"
        raise TypeError(f"{operation}: quantization_modes={modes!r}; {allowed}")
    configurations = list(ub_cfgs) if isinstance(ub_cfgs, list) else [ub_cfgs] * len(modes)
    if len(configurations) != len(modes) or not all(cfg is None or isinstance(cfg, dict) for cfg in configurations):
        raise ArgumentError(
            operation,
            f"ub_cfgs={ub_cfgs!r} for {len(modes)} modes",
            "a dict for all modes, or a list with a dict or None for each",
            "correct it",
        )
    gemms: dict[tuple[str, UserBufferQuantizationMode], OverlappedGemm] = {}
    said: dict[str, None] = {}
    for mode, given in zip(modes, configurations, strict=True):
        _check_configuration(given or {}, mode, with_cublasmp)
        gemms |= {(name, mode): _settled(name, mode, (given or {}).get(name, {}), said) for name in _ALLOWED}
    if bootstrap_backend not in (None, "gloo", "mpi", "nccl"):
        raise choice_error(operation, "bootstrap_backend", bootstrap_backend, ("gloo", "mpi", "nccl", None))
    _check_process(tp_size, bootstrap_backend, with_cublasmp)
    if said:
        warnings.warn(f"{operation}: without effect in this release: {'; '.join(said)}", stacklevel=2)
    _process.become(_Settings(shape[0] * shape[1], tp_size, dtype, tuple(modes), gemms))


def _check_process(tp_size: int, backend: str | None, with_cublasmp: bool) -> None:
    """This process can have overlap, and has none yet."""
    operation = "initialize_ub"
    if not (dist.is_available() and dist.is_initialized()):
        raise UnsupportedError(
            operation,
            "no process group",
            "it where torch.distributed is initialized",
            "call torch.distributed.init_process_group first, or leave the call out in one process",
        )
    if backend is not None and not getattr(dist, f"is_{backend}_available")():
        raise UnsupportedError(
            operation,
            f"bootstrap_backend={backend!r}, which this torch is built without",
            "a backend that torch.distributed has",
            "leave it out: the ranks exchange nothing by it",
        )
    if with_cublasmp:
        raise UnsupportedError(
            operation,
            "with_cublasmp=True",
            "with_cublasmp=False: cuBLASMp's own communication is not called",
            "leave it out: the same GEMMs overlap by ring_exchange and pipeline",
        )
    if tp_size > dist.get_world_size():
        raise ArgumentError(
            operation,
            f"tp_size={tp_size} with {dist.get_world_size()} processes",
            "the size of the modules' tensor-parallel group",
            "correct it",
        )
    if _process.settings is not None:
        raise UnsupportedError(
            operation, "a second call", "one call, and another one after destroy_ub()", "call destroy_ub() in between"
        )


def _check_configuration(cfg: dict[str, Any], mode: UserBufferQuantizationMode, with_cublasmp: bool) -> None:
    """The documented rules of a configuration, by the GEMM's name."""
    for name, options in cfg.items():
        if name not in _ALLOWED:
            raise choice_error("initialize_ub", "a name in ub_cfgs", name, _ALLOWED)
        if not isinstance(options, dict) or (unknown := [k for k in options if k not in _KEYS]):
            got = f"{name}: {options!r}" if not isinstance(options, dict) else f"{name}: {', '.join(unknown)}"
            _wrong(got, f"a dict of {', '.join(_KEYS)}")
        _check_options(name, options, mode)
        if with_cublasmp and options.get("method") in (BULK, EXTERNAL):
            _wrong(f"{name}: method={options['method']!r} with with_cublasmp=True", "'ring_exchange' or 'pipeline'")
    for first, second in _RINGS:
        atomic = [cfg.get(n, {}).get("atomic_gemm", False) for n in (first, second)]
        rings = [cfg.get(n, {}).get("method", _ALLOWED[n][0]) == RING for n in (first, second)]
        if all(rings) and atomic[0] != atomic[1]:
            _wrong(f"atomic_gemm of one of {first} and {second} alone", "it for both or none")
    for dgrad, wgrad in zip(_DGRADS, _WGRADS, strict=True):
        if wgrad in cfg and cfg.get(dgrad, {}).get("method", BULK) != BULK:
            _wrong(
                f"a configuration of {wgrad} beside {dgrad} that is not bulk", f"{dgrad} alone: then {wgrad} has none"
            )


def _check_options(name: str, options: dict[str, Any], mode: UserBufferQuantizationMode) -> None:
    """The options of one GEMM."""
    method = options.get("method", _ALLOWED[name][0])
    if method not in METHODS:
        raise choice_error("initialize_ub", f"{name}: method", method, METHODS)
    for key in _FLAGS:
        if key in options and not is_flag(options[key]):
            _wrong(f"{name}: {key}={options[key]!r}", "True or False")
    for key in _COUNTS:
        if key in options and (isinstance(options[key], bool) or not isinstance(options[key], int) or options[key] < 1):
            _wrong(f"{name}: {key}={options[key]!r}", "an integer >= 1")
    scatters = name in _SCATTERS or name in _WGRADS or (name in _DGRADS and method != BULK)
    if method == PIPELINE and not scatters:
        _wrong(f"{name}: method='pipeline' for an all-gather", "'ring_exchange'")
    if method == EXTERNAL and name not in _EXTERNAL:
        _wrong(f"{name}: method='external'", f"it for {', '.join(_EXTERNAL)}")
    if method not in _ALLOWED[name]:
        _wrong(f"{name}: method={method!r}", " or ".join(map(repr, _ALLOWED[name])))
    if options.get("is_reduce_scatter", scatters) != scatters:
        collective = "a reduce-scatter" if scatters else "an all-gather"
        _wrong(f"{name}: is_reduce_scatter={not scatters} with method={method!r}", f"{scatters}: it is {collective}")
    if options.get("atomic_gemm") and mode is not _FP8:
        _wrong(f"{name}: atomic_gemm without FP8", "it in a mode FP8")


def _wrong(got: str, allowed: str) -> NoReturn:
    raise ArgumentError("initialize_ub", got, allowed, "correct ub_cfgs")


def _settled(
    name: str, mode: UserBufferQuantizationMode, options: dict[str, Any], said: dict[str, None]
) -> OverlappedGemm:
    """How a GEMM overlaps; what of its options changes nothing is noted in `said`."""
    method = options.get("method", _ALLOWED[name][0])
    for key, plain in _IDLE.items():
        if key in options and options[key] not in plain:
            said[f"{key} of {name}"] = None
    if options.get("fp8_buf") and name in _SCATTERS:
        said[f"fp8_buf of {name} (sums are not rounded to FP8)"] = None
    if options.get("atomic_gemm"):
        said[f"atomic_gemm of {name} (it runs as ring_exchange)"] = None
        method = RING if RING in _ALLOWED[name] else method
    in_fp8 = mode is _FP8 and (options.get("fp8_buf", False) if name in _SCATTERS else name not in _WGRADS)
    splits = options.get("num_splits", _SPLITS)
    return OverlappedGemm(name, mode, method, splits, "method" in options, bool(in_fp8))


def destroy_ub() -> None:
    """Let go of overlap, and of memory that ranks read of one another: modules run plain from the next forward on."""
    if _process.settings is not None:
        _process.become(None)
        peers.let_go()


def is_ub_initialized() -> bool:
    """Whether `initialize_ub` was called, and `destroy_ub` not after it."""
    return _process.settings is not None


def using_cublasmp_backend() -> bool:
    """Whether overlap runs in cuBLASMp."""
    return False


class UnknownGemmError(ArgumentError, KeyError):
    """A GEMM that `initialize_ub` registered nothing for; a KeyError, as documented, too."""

    __str__ = Exception.__str__


def get_ub(name: str, use_fp8: bool) -> OverlappedGemm:
    """How a GEMM overlaps in calls of a recipe (`use_fp8`) or of high precision."""
    settings = _process.settings
    if settings is None:
        raise UnsupportedError(
            "get_ub",
            f"name={name!r}, use_fp8={use_fp8} where overlap is not initialised",
            "a name that initialize_ub registered",
            "call initialize_ub first",
        )
    found = settings.gemms.get((name, _FP8 if use_fp8 else _NONE))
    if found is None:
        known = ", ".join(f"{gemm} {mode.name}" for gemm, mode in settings.gemms)
        raise UnknownGemmError("get_ub", f"name={name!r}, use_fp8={use_fp8}", known, "correct it")
    return found


def get_ub_is_fp8(name: str) -> bool:
    """Whether a GEMM's communication carries FP8 in the modes that there are."""
    settings = _process.settings
    modes = (_FP8,) if settings is None else settings.modes
    return any(get_ub(name, mode is _FP8).fp8_buf for mode in modes)


# ------------------------------------------------------------------------------------------- the modules' flags


class Flags(NamedTuple):
    """Which GEMMs of a module overlap."""

    ub_overlap_ag: bool = False
    ub_overlap_rs: bool = False
    ub_overlap_rs_dgrad: bool = False
    ub_bulk_dgrad: bool = False
    ub_bulk_wgrad: bool = False


#: The names of weights, by how they are cut.
_NAMES = {"column": ("qkv", "fc1"), "row": ("proj", "fc2")}
NAMES = (*_NAMES["column"], *_NAMES["row"])


def flags_of(operation: str, options: Mapping[str, Any], on: bool = True) -> Flags | None:
    """A constructor's flags, checked; None where nothing is to overlap."""
    found = Flags(*(on and bool(options.get(name)) for name in Flags._fields))
    if not any(found):
        return None
    bulk = [name for name in ("ub_bulk_dgrad", "ub_bulk_wgrad") if getattr(found, name)]
    if found.ub_overlap_rs_dgrad and bulk:
        raise ArgumentError(
            operation,
            f"ub_overlap_rs_dgrad=True beside {' and '.join(f'{name}=True' for name in bulk)}",
            "either ub_overlap_rs_dgrad, or ub_bulk_dgrad and ub_bulk_wgrad",
            "pass False for the one or the others",
        )
    if found.ub_bulk_wgrad and options.get("delay_wgrad_compute"):
        raise ArgumentError(
            operation,
            "ub_bulk_wgrad=True with delay_wgrad_compute=True",
            "one of the two: a weight gradient that is put off has nothing beside it",
            "pass ub_bulk_wgrad=False",
        )
    return found


def check_name(operation: str, flags: Flags | None, name: Any, mode: str | None) -> None:
    """The name by which a linear's GEMMs are found in ub_cfgs."""
    allowed = NAMES if mode is None else _NAMES[mode]
    if (flags is not None and name is None) or (name is not None and name not in NAMES):
        got = f"ub_name={name!r}" + ("" if flags is None else f" with {_on(flags)}")
        raise ArgumentError(operation, got, " or ".join(map(repr, allowed)), "say which GEMM of a layer it is")
    if flags is not None and name not in allowed:
        raise ArgumentError(
            operation, f"ub_name={name!r} with parallel_mode={mode!r}", " or ".join(map(repr, allowed)), "correct one"
        )


def projections_of(flags: Flags | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the flags of attention mean to its projections of the input, and to that of the output."""
    if flags is None:
        return {}, {}
    column = flags._replace(ub_overlap_rs=False)
    row = Flags(ub_overlap_ag=flags.ub_overlap_ag, ub_overlap_rs=flags.ub_overlap_rs)
    return {**column._asdict(), "ub_name": "qkv"}, {**row._asdict(), "ub_name": "proj"}


def _on(flags: Flags) -> str:
    return ", ".join(f"{name}=True" for name, on in flags._asdict().items() if on)


def idle_flags(flags: Flags | None, tp_size: int, sequence: bool) -> str:
    """Why a module's flags do nothing whatever the settings are; "" where they do, or where there are none."""
    if flags is None:
        return ""
    if tp_size == 1:
        return f"{_on(flags)} without effect on one rank"
    return "" if sequence else f"{_on(flags)} without effect: sequence_parallel is off"


def overlap_of(module: Any, name: str, mode: str, precision: Precision | None, dtype: torch.dtype) -> Overlap | None:
    """How one of a module's weights overlaps in calls of this precision and dtype; None where it has no flags."""
    flags: Flags | None = module.overlap_flags
    if flags is None:
        return None
    if idle := idle_flags(flags, module.tp_size, module.sequence_parallel):
        return Overlap(name, idle=idle)
    operation = f"{type(module).__name__}.forward"
    _process.asked.add(module)
    settings = _process.settings
    if settings is None:
        if _process.destroyed:
            return Overlap(name, idle="destroy_ub was called")
        raise UnsupportedError(
            operation,
            f"{_on(flags)} without initialize_ub",
            "these options once initialize_ub has said how GEMMs overlap",
            "call initialize_ub before the first forward, or leave the options out",
        )
    if settings.tp_size != module.tp_size:
        raise ArgumentError(
            operation,
            f"a group of {module.tp_size} ranks, and initialize_ub(tp_size={settings.tp_size})",
            "modules whose group is of tp_size ranks",
            "correct tp_size of initialize_ub, or leave the ub_* options of this module out",
        )
    local = env.number("LOCAL_WORLD_SIZE")  # as far as the launcher says how many each host has
    if local and module.tp_group is not None:
        hosts = {rank // local for rank in dist.get_process_group_ranks(module.tp_group)}
        if len(hosts) > 1:
            raise UnsupportedError(
                operation,
                f"overlap over a group on {len(hosts)} hosts",
                "groups of one host: overlap stays within NVLink",
                "leave the ub_* options out there",
            )
    quantized = _FP8 if precision is not None else _NONE
    if quantized not in settings.modes:
        return Overlap(name, idle=f"initialize_ub was not told of the mode {quantized.name}, in which this call runs")
    if quantized is _NONE and dtype != settings.dtype:
        return Overlap(name, idle=f"initialize_ub was told of {settings.dtype}, and this call runs in {dtype}")
    ways = _ways(operation, flags, name, mode, {gemm: settings.gemms[f"{name}_{gemm}", quantized] for gemm in _GEMMS})
    return Overlap(name, *ways, settings.capacity)


_GEMMS = ("fprop", "dgrad", "wgrad")


def _ways(
    operation: str, flags: Flags, name: str, mode: str, gemms: Mapping[str, OverlappedGemm]
) -> tuple[Way | None, Way | None, Way | None]:
    """How fprop, dgrad and wgrad of a weight overlap, of those that the flags ask for."""
    each = (gemms[gemm] for gemm in _GEMMS)
    fprop, dgrad, wgrad = (Way(g.method, g.num_splits if g.method == PIPELINE else 0, g.chosen) for g in each)
    if mode == "row":
        gathered = flags.ub_overlap_ag
        return fprop if flags.ub_overlap_rs else None, dgrad if gathered else None, wgrad if gathered else None
    scattered = flags.ub_overlap_rs_dgrad
    if scattered and not gemms["dgrad"].chosen:
        dgrad = Way(RING, chosen=False)
    if (scattered or flags.ub_bulk_dgrad) and scattered is (dgrad.method == BULK):
        raise ArgumentError(
            operation,
            f"{_on(flags)}, and ub_cfgs with {name}_dgrad of method {dgrad.method!r}",
            "'ring_exchange' or 'pipeline' with ub_overlap_rs_dgrad, 'bulk' with ub_bulk_dgrad",
            "correct the flags, or ub_cfgs",
        )
    of_dgrad = dgrad if scattered or flags.ub_bulk_dgrad else None
    return fprop if flags.ub_overlap_ag else None, of_dgrad, wgrad if flags.ub_bulk_wgrad else None
