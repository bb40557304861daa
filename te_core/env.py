"""Every environment variable that te_core, te_torch and te_jax read, in one place: what it says, and what it may say.

A number or a switch that cannot be made out costs one warning, and its default counts; so does a text that is not
UTF-8, but for paths. A word that chooses how something is computed is refused by what takes it. Recipes read theirs
once, when te_core.recipe is imported; attention's and TE_CORE_AUTOTUNE are honoured at each call. A name that is nearly
one of these costs a warning at import. `python -m te_core.doctor` shows those that are set, `--variables` all.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from te_core.errors import ArgumentError
from te_core.spelling import nearest


class Variable(NamedTuple):
    """What a variable means, and its values: "path", "switch" (0 or 1), "number" (from `least` on), or words."""

    meaning: str
    values: str | tuple[str, ...] = "switch"
    default: str = "0"
    least: int = 0

    @property
    def allowed(self) -> str:
        """Its values in words."""
        kinds = {"switch": "0 or 1", "number": f"a whole number from {self.least} on", "path": "a path"}
        return kinds[self.values] if isinstance(self.values, str) else " or ".join(self.values)


_WORKS_ON = ("none", "weights", "activations", "all")
_IN_NVFP4 = "of NVFP4BlockScaling by default"

VARIABLES: dict[str, Variable] = {
    # te_core
    "TE_CORE_CACHE_DIR": Variable(
        "folder of compiled kernels, cuDNN plans and timings (default: ~/.cache/te-runtime)", "path", ""
    ),
    "XDG_CACHE_HOME": Variable("folder in which that one is by default", "path", ""),
    "TE_CORE_CUDA_INCLUDE": Variable(
        "folder of the CUDA headers for NVRTC (default: the wheel's, then the toolkit's)", "path", ""
    ),
    "TE_CORE_LIBRARY_PATH": Variable(
        "folders searched for CUDA libraries before the pip wheels, separated by ':'", "path", ""
    ),
    "TE_CORE_LIBRARY": Variable(
        "te_core's library in C, libte_core.so (default: the wheel's, then the one that bindings/c built)", "path", ""
    ),
    "TE_CORE_AUTOTUNE": Variable(
        "1: time the candidate algorithms (and kernels) of each GEMM once and remember the fastest"
    ),
    "TE_CORE_TAPES": Variable(
        "when a layer's call is recorded, to be replayed from then on: the first or the second time that its shapes "
        "are met, or never",
        ("first", "second", "never"),
        "second",
    ),
    "TE_CORE_PLAYER": Variable(
        "what replays a recorded call on a GPU: Python, or te_core's library in C", ("python", "c"), "python"
    ),
    "TE_JAX_HANDLER": Variable(
        "what XLA's calls of te_jax run in on a GPU: the library in C, where it is there and can, Python, or c: to be "
        "without the library is an error",
        ("auto", "c", "python"),
        "auto",
    ),
    "LOCAL_WORLD_SIZE": Variable("processes on each host, as torchrun sets it (0: unknown)", "number"),
    "UB_TIMEOUT": Variable(
        "seconds that a rank waits for another one in a product that overlaps (default 110)", "number", "110", 1
    ),
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": Variable("1: ranks that share a GPU may read each other's memory"),
    # norms
    "NVTE_FWD_LAYERNORM_SM_MARGIN": Variable("multiprocessors that forward norm kernels leave free", "number"),
    "NVTE_BWD_LAYERNORM_SM_MARGIN": Variable("the same of backward ones", "number"),
    "NVTE_INF_LAYERNORM_SM_MARGIN": Variable("the same of forward ones in eval mode", "number"),
    # recipes
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": Variable("use_power_2_scales of Float8CurrentScaling by default"),
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": Variable("use_f32_scales of Float8BlockScaling by default"),
    "NVTE_BACKWARD_OVERRIDE": Variable(
        "backward_override of every recipe by default", ("high_precision", "dequantized"), ""
    ),
    "NVTE_NVFP4_DISABLE_RHT": Variable(f"disable_rht {_IN_NVFP4}"),
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": Variable(f"disable_stochastic_rounding {_IN_NVFP4}"),
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": Variable(f"disable_2d_quantization {_IN_NVFP4}"),
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": Variable(f"row_scaled_activation {_IN_NVFP4}"),
    "NVTE_NVFP4_4OVER6": Variable(f"nvfp4_4over6 {_IN_NVFP4}", _WORKS_ON, "none"),
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": Variable(f"nvfp4_4over6_e4m3_use_256 {_IN_NVFP4}", _WORKS_ON, "all"),
    "NVTE_NVFP4_4OVER6_ERR_MODE": Variable(f"nvfp4_4over6_err_mode {_IN_NVFP4}", ("MAE", "MSE"), "MAE"),
    # modules
    "NVTE_GROUPED_LINEAR_SINGLE_PARAM": Variable("1: single_grouped_weight and single_grouped_bias are asked for"),
    "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM": Variable(
        "use_grouped_tensor of GroupedLinear by default", "switch", ""
    ),
    # attention
    "NVTE_FLASH_ATTN": Variable("0: no FlashAttention backend (default 1)", "switch", "1"),
    "NVTE_FLASH_ATTN_V2": Variable("0: not the flash-attn 2 package (default 1)", "switch", "1"),
    "NVTE_FLASH_ATTN_V3": Variable("0: not the flash-attn 3 package (default 1)", "switch", "1"),
    "NVTE_FLASH_ATTN_V4": Variable("0: not the flash-attn 4 package (default 1)", "switch", "1"),
    "NVTE_FUSED_ATTN": Variable("0: no FusedAttention backend, that is cuDNN on a GPU (default 1)", "switch", "1"),
    "NVTE_UNFUSED_ATTN": Variable("0: no UnfusedDotProductAttention backend (default 1)", "switch", "1"),
    "NVTE_FUSED_ATTN_BACKEND": Variable("1: FusedAttention for F16 only; 2: for FP8 only (default: both)", "number"),
    "NVTE_FUSED_ATTN_USE_FAv2_BWD": Variable(
        "1: FusedAttention forward, flash-attn 2 backward where that is installed and can"
    ),
    "NVTE_FUSED_ATTN_FORCE_WORKSPACE_OPT": Variable("accepted without effect"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": Variable(
        "0: deterministic kernels only, as under torch.use_deterministic_algorithms", "switch", "1"
    ),
    "NVTE_APPLY_QK_LAYER_SCALING": Variable(
        "1: UnfusedDotProductAttention in float16 holds scores divided by layer_number"
    ),
    "NVTE_MASKED_SOFTMAX_FUSION": Variable(
        "0: UnfusedDotProductAttention without the fused softmax kernel (default 1)", "switch", "1"
    ),
    "NVTE_BATCH_MHA_P2P_COMM": Variable("batched exchange of context parallelism (accepted without effect)"),
    "NVTE_FP8_DPA_BWD": Variable("0: backward of FP8 attention in the activation dtype (default 1)", "switch", "1"),
    "NVTE_DPA_FP8CS_O_in_F16": Variable(
        "0: FP8 attention with current scaling keeps its output in FP8 for backward (default 1)", "switch", "1"
    ),
    "NVTE_DPA_FP8_RECIPE": Variable(
        "attention's own recipe: F16, DelayedScaling, Float8CurrentScaling or MXFP8BlockScaling",
        ("F16", "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"),
        "",
    ),
    "NVTE_DPA_FP8_RECIPE_DPA": Variable("fp8_dpa of that recipe (default: as the region's)", "switch", ""),
    "NVTE_DPA_FP8_RECIPE_MHA": Variable("fp8_mha of that recipe (default: as the region's)", "switch", ""),
    "NVTE_DPA_FP8_FORMAT": Variable(
        "format of that recipe (default: the region's, HYBRID under block scaling)", ("E4M3", "HYBRID"), ""
    ),
    "NVTE_DPA_FP8DS_AMAX_ALGO": Variable(
        "amax_compute_algo of the delayed scaling derived for S and dP (default most_recent)",
        ("most_recent", "max"),
        "most_recent",
    ),
    "NVTE_DPA_FP8DS_AMAX_HISTLEN": Variable("its amax_history_len (default 1)", "number", "1", 1),
    "NVTE_DPA_FP8DS_REDUCE_AMAX": Variable("its reduce_amax (default 1)", "switch", "1"),
    "NVTE_UnfusedDPA_Emulate_FP8": Variable("1: UnfusedDotProductAttention emulates FP8 attention"),
    "NVTE_DEBUG": Variable("1: log the choice of an attention backend, as much as NVTE_DEBUG_LEVEL says"),
    "NVTE_DEBUG_LEVEL": Variable(
        "1: which backend was chosen; 2: also why the others were not (default 0: nothing)", "number"
    ),
}

#: Of the documented API, for what is not built here or is built otherwise: they change nothing.
WITHOUT_EFFECT = frozenset({
    "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "NVTE_BIAS_DROPOUT_FUSION", "NVTE_BIAS_GELU_NVFUSION",
    "NVTE_CPU_OFFLOAD_V1", "NVTE_CUDA_INCLUDE_DIR", "NVTE_CUDNN_MXFP8_NORM_OUTPUT_IN_INPUT_DTYPE",
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP", "NVTE_CUTEDSL_FUSED_GROUPED_MLP_FC1_GLU_RHT_AMAX_TMEM",
    "NVTE_CUTLASS_GROUPED_GEMM_WARN_FALLBACK", "NVTE_DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP", "NVTE_DISABLE_NVRTC",
    "NVTE_DISABLE_TRITON_AUTOTUNING", "NVTE_EP_HANDLE_CACHE_SIZE", "NVTE_EXT_MARGIN_SM", "NVTE_FRAMEWORK",
    "NVTE_FUSED_GROUP_REQUANTIZE", "NVTE_FUSED_MLA_Q_UPROJ", "NVTE_GEMM_GELU_FUSION",
    "NVTE_GROUPED_TENSOR_HANDLE_POOL_SIZE_MB", "NVTE_NORM_BWD_USE_CUDNN", "NVTE_NORM_FWD_USE_CUDNN",
    "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "NVTE_NVTX_ENABLED", "NVTE_ONNX_KVCACHE_MAX_SEQ_LEN",
    "NVTE_PRINT_LAYER_NUMBER", "NVTE_PRINT_RANK", "NVTE_RADIX_TOPK_THRESHOLD", "NVTE_TENSOR_HANDLE_POOL_SIZE_MB",
    "NVTE_TORCH_COMPILE", "NVTE_UNFUSED_FP8_UPDATE", "NVTE_USE_CUTLASS_GROUPED_GEMM", "NVTE_USE_FAST_MATH",
    "NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE",
})  # fmt: skip


# ---------------------------------------------------------------------------------------------- reading one


def switch(name: str, given: str | None = None) -> bool:
    """Whether a switch is on; `given` is its text where that was read already."""
    text = _understood(name, given)
    return (text or VARIABLES[name].default) == "1"


def option(name: str, given: str | None = None) -> bool | None:
    """The same where not to be set is an answer, too."""
    text = _understood(name, given)
    return text == "1" if text else None


def number(name: str, given: str | None = None) -> int:
    """A number."""
    return int(_understood(name, given) or VARIABLES[name].default)


def word(name: str, given: str | None = None) -> str:
    """A word as it is set, or the default: who takes it says whether it is one of those allowed."""
    return _understood(name, given) or VARIABLES[name].default


def chosen(name: str, given: str | None = None) -> str:
    """A word that has to be one of those allowed; `given` is it where it was read already."""
    text = word(name) if given is None else given
    if text not in VARIABLES[name].values:
        raise ArgumentError(name, shown(repr(text)), VARIABLES[name].allowed, "set it to one of these, or unset it")
    return text


def is_set(name: str) -> bool:
    """Whether a variable has a value that can be made out."""
    return bool(_understood(name, None))


def _understood(name: str, given: str | None) -> str:
    """The text of a variable; nothing, and a warning the first time, if it cannot be made out."""
    text = os.environ.get(name, "") if given is None else given
    fault = _fault(name, text)
    if not fault:
        return text
    if not told((name, text)):
        default = VARIABLES[name].default
        warnings.warn(
            f"{name}={shown(text)} is not understood ({fault}): "
            f"{f'the default, {default},' if default else 'that it is not set'} counts",
            stacklevel=4,
        )
    return ""


_told: set[Hashable] = set()


def told(what: Hashable) -> bool:
    """Whether there was a warning of this before; from now on there was. (Of a thousand things, it is forgotten.)"""
    if what in _told:
        return True
    if len(_told) >= 1000:
        _told.clear()
    _told.add(what)
    return False


def _fault(name: str, text: str) -> str:
    """What a value would have to be; nothing if it is that, or a word for others to judge."""
    variable = VARIABLES[name]
    if not text or variable.values == "path":
        return ""
    if variable.values == "switch":
        return "" if text in ("0", "1") else variable.allowed
    if variable.values == "number":
        plain = text.isascii() and text.isdecimal() and len(text) < 10
        return "" if plain and int(text) >= variable.least else variable.allowed
    return "" if text.isprintable() else variable.allowed


def shown(text: str) -> str:
    """A value as it can be printed anywhere."""
    return text.encode("unicode_escape").decode()[:200]


def watched(names: Sequence[str]) -> Callable[[], tuple[Any, ...]]:
    """A function that takes the raw values of variables: equal as long as none of them changes.

    For those that are honoured at each call. `os.environ.get` encodes its key at each look-up, half a microsecond
    each; the dictionary behind it holds bytes.
    """
    get, keys = _direct(names)
    return lambda: tuple(map(get, keys))


def _direct(names: Sequence[str]) -> tuple[Callable[[Any], Any], tuple[Any, ...]]:
    """What looks up raw values, and by what it knows these variables."""
    data: Any = getattr(os.environ, "_data", None)
    encode: Any = getattr(os.environ, "encodekey", None)
    if isinstance(data, dict) and encode is not None:
        return data.get, tuple(map(encode, names))
    return os.environ.get, tuple(names)


def texts(names: Sequence[str], raw: tuple[Any, ...]) -> dict[str, str]:
    """What `watched` took as texts by name, unset ones empty."""
    return {name: "" if value is None else os.fsdecode(value) for name, value in zip(names, raw, strict=True)}


def set_now() -> Iterator[tuple[str, str, str]]:
    """(name, value, what there is to say of it) of all that are set and look like ours."""
    for name in sorted(os.environ):
        text = os.environ[name]
        if name in VARIABLES:
            variable = VARIABLES[name]
            known = isinstance(variable.values, str) or text in ("", *variable.values)
            fault = _fault(name, text) or ("" if known else variable.allowed)
            yield name, shown(text), f"NOT understood: {fault}" if fault else variable.meaning
        elif name in WITHOUT_EFFECT:
            yield name, shown(text), "documented, without effect here"
        elif name.upper().startswith(_OURS):
            near = nearest(name, VARIABLES)
            yield shown(name), shown(text), f"NOT known{f': {near} is' if near else ''}"


_OURS = ("NVTE", "TE_CORE", "TE_JAX")


def _warn_of_misspelt() -> None:
    """One warning of names in the environment that are nearly those of variables: they would change nothing."""
    unknown = [n for n in os.environ if n.upper().startswith(_OURS) and n not in VARIABLES and n not in WITHOUT_EFFECT]
    near = {name: found for name in unknown if (found := nearest(name, VARIABLES, 0.85))}
    if near:
        told = ", ".join(f"{shown(name)} (did you mean {found}?)" for name, found in near.items())
        warnings.warn(f"set in the environment, but not read: {told}", stacklevel=2)


_warn_of_misspelt()


# ---------------------------------------------------------------------------------------------- what they say


def cache_dir() -> Path:
    """Where compiled kernels, plans and tuned choices are kept between processes (te_core.cache reads and writes)."""
    given = os.environ.get("TE_CORE_CACHE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "te-runtime"
    except RuntimeError:  # a user without a home, as containers have it
        return Path(tempfile.gettempdir()) / f"te-runtime-{os.getuid()}"


def cuda_include() -> Path | None:
    """The CUDA header folder the user named, if any."""
    given = os.environ.get("TE_CORE_CUDA_INCLUDE")
    return Path(given) if given else None


def library_path() -> list[Path]:
    """Folders to look for CUDA libraries in before all others."""
    return [Path(p) for p in os.environ.get("TE_CORE_LIBRARY_PATH", "").split(":") if p]


def library() -> Path | None:
    """te_core's library in C, where it is named."""
    text = os.environ.get("TE_CORE_LIBRARY", "")
    return Path(text) if text else None


def norm_sm_margins() -> dict[str, int]:
    """Multiprocessors that norm kernels leave to others: what the documented variables say, by phase."""
    names = {"forward": "FWD", "backward": "BWD", "inference": "INF"}
    named = {phase: f"NVTE_{short}_LAYERNORM_SM_MARGIN" for phase, short in names.items()}
    return {phase: number(name) for phase, name in named.items() if is_set(name)}


_get, (_key,) = _direct(["TE_CORE_AUTOTUNE"])
#: What the keys of plans and recordings have of TE_CORE_AUTOTUNE: a change counts from the next call on. Looked up
#: without a function of Python.
autotuning = partial(_get, _key)
