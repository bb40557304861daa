"""Which backend computes an attention: a table of rules, each with its reason, and an order of measured speeds.

    request = Request(...)            # all that the choice may depend on, as plain data; none of it is a tensor
    eligible(request)                 # {backend: None, or why not}
    choose(request)                   # the eligible one that was measured fastest

Nothing is timed here, and no rule looks at grad mode alone, so the same inputs choose the same backend on every rank,
in recomputation and in a capture. Requests can be made by hand to ask about a device that is not here.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

import te_core
from te_core import cache, dtypes, libraries
from te_core.attention import AttentionSpec, Sizes
from te_core.attention_rules import cudnn_attention, fp8_refusal
from te_core.device import DeviceInfo
from te_core.dtypes import DType
from te_core.errors import LibraryError, UnsupportedError
from te_core.layers.context.schedule import Context
from te_core.layers.context.sides import attentions
from te_torch.attention.env import Switches

FLASH2, FLASH3, FLASH4 = "FlashAttention 2", "FlashAttention 3", "FlashAttention 4"
FLASH_TORCH = "FlashAttention (torch)"
FUSED, UNFUSED = "FusedAttention", "UnfusedDotProductAttention"
BACKENDS = (FLASH2, FLASH3, FLASH4, FLASH_TORCH, FUSED, UNFUSED)
FLASH = (FLASH2, FLASH3, FLASH4, FLASH_TORCH)

Version = tuple[int, ...]
logger = logging.getLogger("DotProductAttention")


class Installed(NamedTuple):
    """Versions of what backends are made of; None where it is not there."""

    flash2: Version | None = None
    flash3: Version | None = None
    flash4: Version | None = None
    torch: Version = (2, 8)
    cudnn: Version | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One attention, as far as the choice of its backend depends on it."""

    device: DeviceInfo | None  # None: the CPU
    dtype: DType
    spec: AttentionSpec
    sizes: Sizes
    mask: str = "no_mask"  # canonical name
    training: bool = True  # gradients may be wanted
    bias_grad: bool = False
    bias_rows: int = 0  # the bias's extent along the queries, spread over them where it has none
    fp8: str = ""  # "delayed", "current", "mxfp8" or "custom" where attention itself is to run in FP8
    fp8_rows: tuple[int, ...] = ()  # the widths of the rows that are then quantized
    cached: bool = False  # k and v come out of a KV cache
    paged: bool = False  # in pages
    gaps: bool = False  # thd: tokens between sequences that belong to none
    same_lengths: bool = True  # q and k, v have the same lengths, sequence by sequence
    num_splits: int = 1
    score_mod: str = ""  # what functions of the scores are of: "graph" (cuDNN's) or "torch"
    fp8_output: bool = False  # with a score_mod
    checkpoint: bool = False  # backward is to compute the attention again
    context: Context | None = None  # how sequences lie cut over ranks; sizes are this rank's
    context_rank: int = 0
    switches: Switches = Switches()
    installed: Installed = Installed()

    @property
    def packed(self) -> bool:
        """Whether sequences lie one behind another."""
        return self.spec.q_format == "thd"

    @property
    def widest(self) -> int:
        """The width of the widest head."""
        return max(self.sizes.d_qk, self.sizes.d_v)

    @property
    def aligned(self) -> bool:
        """Whether both ends of the diagonal are in corners, so that top-left and bottom-right are one."""
        return self.same_lengths if self.spec.padded else self.sizes.sq == self.sizes.skv


Rule = Callable[[Request], "str | None"]


# ------------------------------------------------------------------------------------------------ the rules


def _refuses(when: Callable[[Request], Any], reason: str) -> Rule:
    """A rule for requests of this kind; the reason may quote fields of the request, `r`."""
    return lambda r: reason.format(r=r) if when(r) else None


_flash_allowed = _refuses(lambda r: not r.switches.flash, "NVTE_FLASH_ATTN=0")
_on_gpu = _refuses(lambda r: r.device is None, "it runs on GPUs only")
_f16 = _refuses(
    lambda r: r.dtype not in (dtypes.float16, dtypes.bfloat16), "it takes float16 and bfloat16, not {r.dtype}"
)
_no_fp8 = _refuses(lambda r: r.fp8, "it has no FP8 attention")
_no_splits = _refuses(lambda r: r.num_splits != 1, "num_splits={r.num_splits} is FlashAttention 3's and 4's")
_no_max_logit = _refuses(lambda r: r.spec.max_logit, "it does not return max_logit")
_whole = _refuses(lambda r: r.context, "it takes whole sequences: context parallelism needs statistics of parts")
_no_score_mod = _refuses(lambda r: r.score_mod, "it takes no score_mod and no torch_score_mod")
_plain_softmax = _refuses(lambda r: r.spec.softmax != "vanilla", "it has no softmax_type={r.spec.softmax!r}")
_no_mask_tensor = _refuses(lambda r: r.spec.masked, "it takes no arbitrary mask")
_no_bias = _refuses(lambda r: r.spec.bias == "post_scale_bias", "it takes no bias")
_no_alibi = _refuses(lambda r: r.spec.bias == "alibi", "it has no ALiBi with gradients")
_no_dropout = _refuses(lambda r: r.spec.dropout, "it has no dropout")
_keeps_any = _refuses(lambda r: r.spec.dropout >= 1.0, "it takes no dropout of everything (p = 1)")
_no_softcap = _refuses(lambda r: r.spec.softcap, "it has no logit soft-cap")
_no_gaps = _refuses(lambda r: r.gaps, "it takes no tokens between sequences (pad_between_seqs)")
_no_rows_with_padding = _refuses(
    lambda r: r.spec.padded and not r.packed, "its sequences with padding have to be packed (thd)"
)
_diagonal_bottom_right = _refuses(
    lambda r: r.spec.banded and not r.spec.bottom_right and not r.aligned,
    "its diagonal ends bottom-right, and q and k differ in length",
)
_one_head_width = _refuses(
    lambda r: r.sizes.d_qk != r.sizes.d_v,
    "it takes one head width, not {r.sizes.d_qk} for q, k and {r.sizes.d_v} for v",
)
_no_cache = _refuses(lambda r: r.cached, "it does not read a KV cache")
_deterministic_backward = _refuses(lambda r: r.spec.deterministic and r.training, "its backward is not deterministic")
_WIDE_BACKWARD = ((8, 0), (9, 0), (10, 0), (12, 0))
_flash2_wide_heads = _refuses(
    lambda r: r.widest > 192 and r.training and r.device and r.device.capability not in _WIDE_BACKWARD,
    "its backward for head widths above 192 needs compute capability 8.0, 9.0, 10.0 or 12.0",
)
_flash3_deterministic = _refuses(
    lambda r: r.spec.deterministic and r.training and r.widest >= 256,
    "its backward for head widths of 256 and more is not deterministic",
)
_fused_allowed = _refuses(lambda r: not r.switches.fused, "NVTE_FUSED_ATTN=0")
_fused_is_f16 = _refuses(lambda r: r.switches.fused_backend == 1 and r.fp8, "NVTE_FUSED_ATTN_BACKEND=1 is for F16 only")
_fused_is_fp8 = _refuses(
    lambda r: r.switches.fused_backend == 2 and not r.fp8, "NVTE_FUSED_ATTN_BACKEND=2 is for FP8 only"
)
_no_torch_score_mod = _refuses(lambda r: r.score_mod == "torch", "it takes no torch_score_mod")
_no_graph_score_mod = _refuses(
    lambda r: r.score_mod == "graph", "it takes no score_mod of a cuDNN graph (torch_score_mod is its form on torch)"
)
_no_score_mod_in_fp8 = _refuses(lambda r: r.fp8 and r.score_mod, "a torch_score_mod excludes FP8 attention")
_no_score_mod_of_cache = _refuses(
    lambda r: r.cached and r.score_mod,
    "a torch_score_mod excludes a KV cache, whose queries have no places of their own",
)


def _fused_score_mod(r: Request) -> str | None:
    """A score_mod's graph has nothing in it but the product, the scale and its functions."""
    if r.score_mod != "graph":
        return None
    spec = r.spec
    for against, what in (
        (r.device is None, "needs a GPU (torch_score_mod is its form on torch, for any device)"),
        (r.packed or spec.kv_format == "thd", "takes dense formats, sbhd and bshd"),
        (r.dtype not in (dtypes.float16, dtypes.bfloat16), f"takes float16 and bfloat16, not {r.dtype}"),
        (r.fp8 or r.fp8_output, "excludes FP8"),
        (r.cached or r.paged, "excludes a KV cache"),
        (r.mask != "no_mask", f"goes with attn_mask_type='no_mask', not {r.mask!r}"),
        (spec.left >= 0 or spec.right >= 0, "excludes a window"),
        (spec.bias != "no_bias", "excludes a bias and ALiBi"),
        (spec.softmax != "vanilla", f"excludes softmax_type={spec.softmax!r}"),
        (spec.softcap, "excludes logit_softcap"),
        (spec.dropout, "excludes dropout"),
        (spec.max_logit, "excludes return_max_logit"),
        (r.checkpoint, "excludes checkpoint_core_attention"),
        (r.gaps, "excludes pad_between_seqs"),
    ):
        if against:
            return f"a score_mod {what}"
    return None


_unfused_allowed = _refuses(lambda r: not r.switches.unfused, "NVTE_UNFUSED_ATTN=0")
_unfused_emulates = _refuses(
    lambda r: r.fp8 and not r.switches.emulate_fp8,
    "it has no FP8 attention (NVTE_UnfusedDPA_Emulate_FP8=1 emulates it)",
)


def _widths_up_to(most: int, multiple: int = 8) -> Rule:
    return _refuses(
        lambda r: r.widest > most or r.sizes.d_qk % multiple or r.sizes.d_v % multiple,
        f"its head widths are multiples of {multiple} up to {most}, not {{r.sizes.d_qk}}/{{r.sizes.d_v}}",
    )


def _capability(least: tuple[int, int], only: bool = False) -> Rule:
    def rule(r: Request) -> str | None:
        here = r.device.capability if r.device is not None else (0, 0)
        if here == least or (here > least and not only):
            return None
        wanted = f"{least[0]}.{least[1]}" + (" only" if only else "")
        return f"it needs compute capability {wanted}, this is {here[0]}.{here[1]}"

    return rule


def _package(field: str, name: str, switch: str) -> Rule:
    def rule(r: Request) -> str | None:
        if not getattr(r.switches, field):
            return f"{switch}=0"
        return None if getattr(r.installed, field) else f"{name} is not installed"

    return rule


#: Since which version flash-attn 2 has an argument.
FLASH2_SINCE: dict[str, Version] = {
    "window_size": (2, 3),
    "alibi_slopes": (2, 4),
    "deterministic": (2, 4, 1),
    "softcap": (2, 6),
}


def _flash2_version(r: Request) -> str | None:
    spec, version = r.spec, r.installed.flash2 or (0,)
    wants = (
        ("window_size", spec.windowed, "a window"),
        ("alibi_slopes", spec.bias == "alibi", "ALiBi"),
        ("deterministic", spec.deterministic and r.training, "a deterministic backward"),
        ("softcap", spec.softcap, "a soft-cap"),
    )
    for argument, asked, what in wants:
        if asked and version < FLASH2_SINCE[argument]:
            return f"{what} needs flash-attn {'.'.join(map(str, FLASH2_SINCE[argument]))}"
    return None


def _cudnn(r: Request) -> str | None:
    if r.device is None:
        return None  # te_core's own CPU backend, which takes everything but some FP8 (`_takes_fp8`)
    if r.installed.cudnn is None:
        return "cuDNN or nvidia-cudnn-frontend is not installed"
    asked = [(r.spec, r.sizes)] if r.context is None else attentions(r.spec, r.context, r.sizes)
    for spec, sizes in asked:
        able, reason = cudnn_attention(
            r.device,
            r.installed.cudnn,
            spec,
            sizes,
            r.dtype,
            r.training,
            r.fp8,
            paged=r.paged,
            bias_grad=r.bias_grad,
            bias_rows=r.bias_rows,
        )
        if not able:
            return reason
    return None


def _takes_fp8(r: Request, emulated: bool = False) -> str | None:
    if not r.fp8:
        return None
    return fp8_refusal(r.spec, r.fp8, r.fp8_rows, paged=r.paged, bias_grad=r.bias_grad, emulated=emulated)


_FLASH_COMMON: tuple[Rule, ...] = (
    _on_gpu,
    _flash_allowed,
    _whole,
    _no_max_logit,
    _no_score_mod,
    _plain_softmax,
    _no_mask_tensor,
    _no_bias,
    _diagonal_bottom_right,
)

RULES: dict[str, tuple[Rule, ...]] = {
    FLASH2: (
        _package("flash2", "flash-attn 2", "NVTE_FLASH_ATTN_V2"), *_FLASH_COMMON, _capability((8, 0)), _f16, _no_fp8,
        _no_splits, _one_head_width, _widths_up_to(256), _flash2_wide_heads, _no_gaps, _no_rows_with_padding,
        _flash2_version, _no_cache, _keeps_any,
    ),
    FLASH3: (
        _package("flash3", "flash-attn 3 (flash_attn_interface)", "NVTE_FLASH_ATTN_V3"), *_FLASH_COMMON,
        _capability((9, 0), only=True), _f16, _no_fp8, _one_head_width, _widths_up_to(256), _no_alibi, _no_dropout,
        _no_rows_with_padding, _flash3_deterministic, _no_cache,
    ),
    FLASH4: (
        _package("flash4", "flash-attn 4 (flash_attn.cute)", "NVTE_FLASH_ATTN_V4"), *_FLASH_COMMON,
        _capability((9, 0)), _f16, _no_fp8, _widths_up_to(128), _one_head_width, _no_alibi, _no_dropout, _no_gaps,
        _no_rows_with_padding, _no_cache, _deterministic_backward,
    ),
    FLASH_TORCH: (
        *_FLASH_COMMON, _capability((8, 0)), _f16, _no_fp8, _no_splits, _one_head_width, _widths_up_to(256),
        _flash2_wide_heads, _no_alibi, _no_softcap, _no_gaps, _no_rows_with_padding,
        _deterministic_backward, _no_cache, _keeps_any,
    ),
    FUSED: (
        _fused_allowed, _fused_is_f16, _fused_is_fp8, _no_torch_score_mod, _fused_score_mod, _no_splits,
        _cudnn, _takes_fp8,
    ),
    UNFUSED: (
        _unfused_allowed, _whole, _no_graph_score_mod, _no_score_mod_in_fp8, _no_score_mod_of_cache, _no_splits,
        _unfused_emulates, functools.partial(_takes_fp8, emulated=True),
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ the choice


class Choice(NamedTuple):
    """What was chosen for a request, each backend's reason against it, and why this one of the eligible."""

    backend: str | None
    reasons: dict[str, str | None]
    why: str
    schedule: str = ""  # of context parallelism: its steps

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        lines = [f"{name:{width}}  {reason or 'eligible'}" for name, reason in self.reasons.items()]
        lines.append(f"chosen: {self.backend or 'none'} ({self.why})")
        return "\n".join([*lines, self.schedule] if self.schedule else lines)


def eligible(request: Request) -> dict[str, str | None]:
    """For each backend None, or the first reason against it."""
    return {
        name: next((reason for rule in rules if (reason := rule(request)) is not None), None)
        for name, rules in RULES.items()
    }


@functools.lru_cache(maxsize=1024)
def decide(request: Request) -> Choice:
    """The choice for a request, remembered."""
    reasons = eligible(request)
    able = [name for name, reason in reasons.items() if reason is None]
    if not able:
        return Choice(None, reasons, "every backend is excluded")
    order, why = ranking(request)
    found = Choice(min(able, key=order.index), reasons, why if len(able) > 1 else "the only one eligible")
    _log(request, found)
    return found


class NoBackendError(UnsupportedError, ValueError):
    """No backend can compute this attention. Also the documented ValueError."""


def choose(request: Request) -> str:
    """The backend for a request; an error with the whole table where there is none."""
    found = decide(request)
    if found.backend is None:
        table = "; ".join(f"{name}: {reason}" for name, reason in found.reasons.items())
        raise NoBackendError(
            "DotProductAttention",
            f"No dot product attention backend is available for the provided inputs and run configuration ({table})",
            "what at least one backend can do",
            "change what excludes the backend you want",
        )
    return found.backend


def _log(request: Request, choice: Choice) -> None:
    level = request.switches.debug
    if level >= 1:
        # The variable alone asks for it: it is to be seen in a program that has set up no logging.
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.DEBUG if level >= 2 else logging.INFO)
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())
        logger.info("%s for %s", choice.backend, request)
    if level >= 2:
        for name, reason in choice.reasons.items():
            logger.debug("%s: %s", name, reason or "eligible")


# ------------------------------------------------------------------------------------------------- the order


def shape_class(request: Request) -> str:
    """Which row of the speed table a request is looked up in."""
    sizes = request.sizes
    length = max(sizes.sq, sizes.skv)
    lengths = "decode" if sizes.sq <= 16 else "short" if length <= 512 else "medium" if length <= 2048 else "long"
    width = next((w for w in (64, 128, 192) if request.widest <= w), 256)
    use, form = "train" if request.training else "infer", "packed" if request.packed else "dense"
    return f"{use}/{form}/d{width}/{lengths}/{'banded' if request.spec.banded else 'full'}"


def ranking(request: Request) -> tuple[list[str], str]:
    """(all backends, fastest first; where that order comes from)."""
    if request.device is None:
        return [FUSED, UNFUSED, *FLASH], "te_core's CPU backend is the reference on the CPU"
    major, minor = request.device.capability
    name = shape_class(request)
    for table, source in ((_local_table(), "this machine's table"), (_shipped_table(), "the shipped table")):
        times = table.get("measured", {}).get(f"{major}.{minor}", {}).get("microseconds", {}).get(name)
        if times:
            # Probabilities in memory cost the square of the length, which a time does not show: they come last.
            fast = sorted((b for b in times if b != UNFUSED), key=times.__getitem__)
            order = [*fast, *(b for b in _default_order(major) if b not in fast)]
            return order, f"measured fastest for {name} on {major}.{minor}, {source}"
    return _default_order(major), f"nothing was measured for {name} on {major}.{minor}; the order of its generation"


def _default_order(major: int) -> list[str]:
    orders: Mapping[str, list[str]] = _shipped_table()["order"]
    return orders["9"] if major >= 9 else orders["8"]


def local_table_path() -> Path:
    """Where `python -m te_core.tools.tune` puts what it measured on this machine."""
    return cache.place("attention_speed.json")


@functools.cache
def _shipped_table() -> dict[str, Any]:
    return json.loads((Path(te_core.__file__).parent / "attention_speed.json").read_text())


@functools.cache
def _local_table() -> dict[str, Any]:
    return cache.read_json(local_table_path(), is_table) or {}


def is_table(content: Any) -> bool:
    """Whether this is what the tuner writes: microseconds by capability, class and backend."""
    measured = content.get("measured", {}) if isinstance(content, dict) else None
    if not isinstance(measured, dict) or not all(isinstance(entry, dict) for entry in measured.values()):
        return False
    parts = [entry.get("microseconds", {}) for entry in measured.values()]
    return all(isinstance(part, dict) for part in parts) and all(
        isinstance(row, dict)
        and set(row) <= set(BACKENDS)
        and all(type(t) in (int, float) and 0 < t < float("inf") for t in row.values())
        for part in parts
        for row in part.values()
    )


generation = [0]  # of choices: plans of earlier ones are not used any more


def forget() -> None:
    """Decide anew from now on: the tables or the installed packages have changed."""
    generation[0] += 1
    for cached in (decide, _local_table, installed):
        cached.cache_clear()


# -------------------------------------------------------------------------------------------- what is installed


@functools.cache
def installed() -> Installed:
    """What this process can use."""
    import torch

    return Installed(
        _installed("flash-attn", "flash_attn", (2,), (3,)),
        _installed("flash-attn-3", "flash_attn_interface"),
        _installed("flash-attn-4", "flash_attn.cute"),
        _version(torch.__version__),
        _cudnn_version(),
    )


def _installed(package: str, module: str, least: Version = (0,), below: Version | None = None) -> Version | None:
    try:
        import_module(module)
    except Exception:  # a package built for another torch fails in ways of its own
        return None
    try:
        found = _version(metadata.version(package))
    except metadata.PackageNotFoundError:
        found = least
    return found if found >= least and (below is None or found < below) else None


def _cudnn_version() -> Version | None:
    try:
        metadata.version("nvidia-cudnn-frontend")
        return libraries.version("cudnn")
    except (metadata.PackageNotFoundError, LibraryError):
        return None


def _version(text: str) -> Version:
    """The numbers that a version begins with."""
    return tuple(map(int, itertools.takewhile(str.isdecimal, text.split("+")[0].split("."))))
