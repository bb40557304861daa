"""What the environment variables of attention say now; te_core.env lists them.

They are honoured at each call: `settings()` is equal as long as none of them changes, which is cheap to see.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from te_core import env

#: The variables that are a field of `Switches` as they stand.
_SWITCHES = {
    "flash": "NVTE_FLASH_ATTN",
    "flash2": "NVTE_FLASH_ATTN_V2",
    "flash3": "NVTE_FLASH_ATTN_V3",
    "flash4": "NVTE_FLASH_ATTN_V4",
    "fused": "NVTE_FUSED_ATTN",
    "unfused": "NVTE_UNFUSED_ATTN",
    "flash2_backward": "NVTE_FUSED_ATTN_USE_FAv2_BWD",
    "layer_scaling": "NVTE_APPLY_QK_LAYER_SCALING",
    "fused_softmax": "NVTE_MASKED_SOFTMAX_FUSION",
    "emulate_fp8": "NVTE_UnfusedDPA_Emulate_FP8",
}
_OTHERS = ("NVTE_FUSED_ATTN_BACKEND", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_DEBUG", "NVTE_DEBUG_LEVEL")
_READ = (*_SWITCHES.values(), *_OTHERS)
#: Those that are the fields of `Fp8Switches`, and what reads them.
_FP8: dict[str, Callable[[str, str], Any]] = {
    "NVTE_DPA_FP8_RECIPE": env.word,
    "NVTE_DPA_FP8_RECIPE_DPA": env.option,
    "NVTE_DPA_FP8_RECIPE_MHA": env.option,
    "NVTE_DPA_FP8_FORMAT": env.word,
    "NVTE_DPA_FP8DS_AMAX_ALGO": env.word,
    "NVTE_DPA_FP8DS_AMAX_HISTLEN": env.number,
    "NVTE_DPA_FP8DS_REDUCE_AMAX": env.switch,
    "NVTE_FP8_DPA_BWD": env.switch,
    "NVTE_DPA_FP8CS_O_in_F16": env.switch,
}
_ACCEPTED = ("NVTE_FUSED_ATTN_FORCE_WORKSPACE_OPT", "NVTE_BATCH_MHA_P2P_COMM")

VARIABLES: dict[str, str] = {name: env.VARIABLES[name].meaning for name in (*_READ, *_FP8, *_ACCEPTED)}


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
#: The variables' raw values; equal as long as none of them changes.
snapshot = env.watched(_READ)


def switches(raw: _Raw) -> Switches:
    """What a snapshot says."""
    text = env.texts(_READ, raw)
    found = {field: env.switch(name, text[name]) for field, name in _SWITCHES.items()}
    backend = env.number("NVTE_FUSED_ATTN_BACKEND", text["NVTE_FUSED_ATTN_BACKEND"])
    level = env.number("NVTE_DEBUG_LEVEL", text["NVTE_DEBUG_LEVEL"])
    return Switches(
        **found,
        fused_backend=backend if backend in (1, 2) else None,
        deterministic=not env.switch("NVTE_ALLOW_NONDETERMINISTIC_ALGO", text["NVTE_ALLOW_NONDETERMINISTIC_ALGO"]),
        debug=level if env.switch("NVTE_DEBUG", text["NVTE_DEBUG"]) else -1,
    )


def now() -> Switches:
    """What the environment says now; torch's own deterministic mode counts too."""
    found = switches(snapshot())
    if not found.deterministic and torch.are_deterministic_algorithms_enabled():
        return found._replace(deterministic=True)
    return found


def settings() -> tuple[Any, ...]:
    """What attention depends on besides its module and its arguments: equal as long as nothing of it changes."""
    return snapshot(), _fp8_snapshot(), torch.are_deterministic_algorithms_enabled()


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


_fp8_snapshot = env.watched(tuple(_FP8))


def fp8_now() -> Fp8Switches:
    """What the environment says now."""
    return _fp8_switches(_fp8_snapshot())


@lru_cache(maxsize=64)
def _fp8_switches(raw: _Raw) -> Fp8Switches:
    text = env.texts(tuple(_FP8), raw)
    return Fp8Switches(*(read(name, text[name]) for name, read in _FP8.items()))
