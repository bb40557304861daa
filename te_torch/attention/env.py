"""Every environment variable that attention reads, in one place, and what they say now.

They are honoured at each call, so looking has to be cheap: `snapshot()` takes their raw values, and `switches()` makes
sense of them once for each combination.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, NamedTuple

import torch

VARIABLES: dict[str, str] = {
    "NVTE_FLASH_ATTN": "0: no FlashAttention backend (default 1)",
    "NVTE_FLASH_ATTN_V2": "0: not the flash-attn 2 package (default 1; likewise V3 and V4)",
    "NVTE_FUSED_ATTN": "0: no FusedAttention backend, that is cuDNN on a GPU (default 1)",
    "NVTE_UNFUSED_ATTN": "0: no UnfusedDotProductAttention backend (default 1)",
    "NVTE_FUSED_ATTN_BACKEND": "1: FusedAttention for F16 only; 2: for FP8 only (default: both)",
    "NVTE_FUSED_ATTN_USE_FAv2_BWD": "1: FusedAttention forward, flash-attn 2 backward where that is installed and can",
    "NVTE_FUSED_ATTN_FORCE_WORKSPACE_OPT": "accepted without effect",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0: deterministic kernels only, as under torch.use_deterministic_algorithms",
    "NVTE_APPLY_QK_LAYER_SCALING": "1: UnfusedDotProductAttention in float16 holds scores divided by layer_number",
    "NVTE_MASKED_SOFTMAX_FUSION": "0: UnfusedDotProductAttention without the fused softmax kernel (default 1)",
    "NVTE_BATCH_MHA_P2P_COMM": "batched exchange of context parallelism (accepted without effect)",
    "NVTE_FP8_DPA_BWD": "0: backward of FP8 attention in the activation dtype (default 1)",
    "NVTE_DPA_FP8CS_O_in_F16": "0: FP8 attention with current scaling keeps its output in FP8 for backward (default 1)",
    "NVTE_DPA_FP8_RECIPE": "attention's own recipe: F16, DelayedScaling, Float8CurrentScaling or MXFP8BlockScaling",
    "NVTE_DPA_FP8_RECIPE_DPA": "fp8_dpa of that recipe (likewise MHA: fp8_mha; default: as the region's)",
    "NVTE_DPA_FP8_FORMAT": "format of that recipe (default: the region's, HYBRID under block scaling)",
    "NVTE_DPA_FP8DS_AMAX_ALGO": "amax_compute_algo of the delayed scaling derived for S and dP (default most_recent)",
    "NVTE_DPA_FP8DS_AMAX_HISTLEN": "its amax_history_len (default 1)",
    "NVTE_DPA_FP8DS_REDUCE_AMAX": "its reduce_amax (default 1)",
    "NVTE_UnfusedDPA_Emulate_FP8": "1: UnfusedDotProductAttention emulates FP8 attention",
    "NVTE_DEBUG": "1: log the choice of an attention backend, as much as NVTE_DEBUG_LEVEL says",
    "NVTE_DEBUG_LEVEL": "1: which backend was chosen; 2: also why the others were not (default 0: nothing)",
}

_READ = (
    "NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V2", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4", "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN", "NVTE_FUSED_ATTN_BACKEND", "NVTE_FUSED_ATTN_USE_FAv2_BWD", "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_APPLY_QK_LAYER_SCALING", "NVTE_MASKED_SOFTMAX_FUSION", "NVTE_UnfusedDPA_Emulate_FP8", "NVTE_DEBUG",
    "NVTE_DEBUG_LEVEL",
)  # fmt: skip


class Switches(NamedTuple):
    """What the variables say, as far as the choice and the run of a backend depend on them."""

    flash: bool = True
    flash2: bool = True
    flash3: bool = True
    flash4: bool = True
    fused: bool = True
    unfused: bool = True
    fused_backend: int | None = None  # 1: F16 only, 2: FP8 only
    flash2_backward: bool = False
    deterministic: bool = False
    layer_scaling: bool = False
    fused_softmax: bool = True
    emulate_fp8: bool = False
    debug: int = -1  # -1: silent; else NVTE_DEBUG_LEVEL


_Raw = tuple[Any, ...]
# `os.environ.get` encodes its key at each look-up, half a microsecond each; the dictionary behind it holds bytes.
_data: Any = getattr(os.environ, "_data", None)
_encode: Any = getattr(os.environ, "encodekey", None)
_KEYS = tuple(_encode(name) for name in _READ) if isinstance(_data, dict) and _encode is not None else _READ
_get: Any = _data.get if _KEYS is not _READ else os.environ.get


def snapshot() -> _Raw:
    """The variables' raw values; equal as long as none of them changes."""
    return tuple(map(_get, _KEYS))


@lru_cache(maxsize=64)
def switches(raw: _Raw) -> Switches:
    """What a snapshot says."""
    text = [value.decode() if isinstance(value, bytes) else value for value in raw]
    found = {name: value for name, value in zip(_READ, text, strict=True) if value}

    def on(name: str, default: str = "1") -> bool:
        return found.get(name, default) != "0"

    backend = found.get("NVTE_FUSED_ATTN_BACKEND")
    return Switches(
        flash=on("NVTE_FLASH_ATTN"), flash2=on("NVTE_FLASH_ATTN_V2"), flash3=on("NVTE_FLASH_ATTN_V3"),
        flash4=on("NVTE_FLASH_ATTN_V4"), fused=on("NVTE_FUSED_ATTN"), unfused=on("NVTE_UNFUSED_ATTN"),
        fused_backend=int(backend) if backend in ("1", "2") else None,
        flash2_backward=on("NVTE_FUSED_ATTN_USE_FAv2_BWD", "0"),
        deterministic=not on("NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
        layer_scaling=on("NVTE_APPLY_QK_LAYER_SCALING", "0"), fused_softmax=on("NVTE_MASKED_SOFTMAX_FUSION"),
        emulate_fp8=on("NVTE_UnfusedDPA_Emulate_FP8", "0"),
        debug=int(found.get("NVTE_DEBUG_LEVEL", "0")) if on("NVTE_DEBUG", "0") else -1,
    )  # fmt: skip


def now() -> Switches:
    """What the environment says now; torch's own deterministic mode counts too."""
    found = switches(snapshot())
    if not found.deterministic and torch.are_deterministic_algorithms_enabled():
        return found._replace(deterministic=True)
    return found


# ----------------------------------------------------------------------------------------------------- FP8


class Fp8Switches(NamedTuple):
    """What the variables say of attention's own recipe; None where they leave it to the region's."""

    recipe: str = ""
    dpa: bool | None = None
    mha: bool | None = None
    format: str = ""
    algo: str = "most_recent"
    length: int = 1
    reduce: bool = True
    backward: bool = True
    high_output: bool = True


_FP8 = (
    "NVTE_DPA_FP8_RECIPE", "NVTE_DPA_FP8_RECIPE_DPA", "NVTE_DPA_FP8_RECIPE_MHA", "NVTE_DPA_FP8_FORMAT",
    "NVTE_DPA_FP8DS_AMAX_ALGO", "NVTE_DPA_FP8DS_AMAX_HISTLEN", "NVTE_DPA_FP8DS_REDUCE_AMAX", "NVTE_FP8_DPA_BWD",
    "NVTE_DPA_FP8CS_O_in_F16",
)  # fmt: skip
_FP8_KEYS = tuple(_encode(name) for name in _FP8) if _KEYS is not _READ else _FP8


def fp8_now() -> Fp8Switches:
    """What the environment says now."""
    return _fp8_switches(tuple(map(_get, _FP8_KEYS)))


@lru_cache(maxsize=64)
def _fp8_switches(raw: _Raw) -> Fp8Switches:
    text = [value.decode() if isinstance(value, bytes) else value for value in raw]
    recipe, dpa, mha, form, algo, length, reduce, backward, high_output = text
    default = Fp8Switches()
    return Fp8Switches(
        recipe or "", None if not dpa else dpa != "0", None if not mha else mha != "0", form or "",
        algo or default.algo, int(length or default.length), reduce != "0", backward != "0", high_output != "0",
    )  # fmt: skip
