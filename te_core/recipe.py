"""Recipes: how low precision is asked for (public, mutable, as documented) and what it comes down to.

A public recipe (`DelayedScaling`, …) is what a user builds. `resolve()` turns it, by value, into a frozen
`Precision`: per operand role and per GEMM the format and scaling rule. Only a `Precision` goes below the
adapters, and no code there asks which recipe it came from.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple

from te_core import dtypes
from te_core.dtypes import DType
from te_core.errors import ArgumentError, UnsupportedError

# ------------------------------------------------------------------------------------ the frozen side


@dataclass(frozen=True, slots=True)
class Operand:
    """How one operand role is quantized."""

    dtype: DType
    scaling: str  # "delayed" or "current"
    power_of_two: bool = False
    epsilon: float = 0.0


@dataclass(frozen=True, slots=True)
class Gemm:
    """How one GEMM accumulates: split means FP8 partial sums are promoted to fp32 on the way."""

    split_accumulator: bool


@dataclass(frozen=True, slots=True)
class History:
    """The delayed-scaling rule: what the scale of the next step is computed from."""

    length: int
    margin: int
    amax_algo: str | Callable[..., Any]
    scale_algo: Callable[..., Any] | None
    reduce_amax: bool


@dataclass(frozen=True, slots=True)
class Precision:
    """What a recipe comes down to: a format and rule per operand, an accumulation rule per GEMM."""

    input: Operand
    weight: Operand
    grad: Operand
    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm
    history: History | None = None  # only delayed scaling keeps one


# ------------------------------------------------------------------------------------ the public side


class _FormatMax(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """FP8 number formats of forward and backward tensors."""

    E2M1 = _FormatMax(6.0, 6.0)
    E4M3 = _FormatMax(448.0, 448.0)
    E5M2 = _FormatMax(57344.0, 57344.0)
    HYBRID = _FormatMax(448.0, 57344.0)


_FORWARD = {Format.E4M3: dtypes.float8_e4m3, Format.HYBRID: dtypes.float8_e4m3, Format.E5M2: dtypes.float8_e5m2}
_BACKWARD = {Format.E4M3: dtypes.float8_e4m3, Format.HYBRID: dtypes.float8_e5m2, Format.E5M2: dtypes.float8_e5m2}


@dataclass(frozen=True)
class MMParams:
    """Parameters of one GEMM."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Parameters of one quantizer."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


def _require(recipe: str, name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ArgumentError(recipe, f"{name}={value!r}", allowed, f"correct {name}")


def _env_flag(name: str) -> bool:
    return os.environ.get(name, "0") == "1"


# Read once at import, as documented: a later change of the environment changes no recipe.
_CURRENT_POW2 = _env_flag("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
_BACKWARD_OVERRIDE = os.environ.get("NVTE_BACKWARD_OVERRIDE") or None


_by_token: weakref.WeakValueDictionary[int, Recipe] = weakref.WeakValueDictionary()
_tokens = itertools.count(1)


class Recipe:
    """Base of all recipes; the questions below work on classes and instances alike.

    `token` is a number under which a living recipe is found: a compiler can hold it as a constant.
    """

    token: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A recipe with a token of its own (copies and unpickled recipes included)."""
        recipe = super().__new__(cls)
        recipe.__dict__["token"] = next(_tokens)
        _by_token[recipe.token] = recipe
        return recipe

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        vars(self).pop("_precision", None)  # what `resolve` found before

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("token", "_precision")}

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is the NVFP4 recipe."""
        return False

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is the MXFP8 recipe."""
        return False

    @classmethod
    def delayed(cls) -> bool:
        """Whether scales come from a history of maxima."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether scales come from the tensor itself."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether there is one scale per tensor."""
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether this is the FP8 block-scaling recipe."""
        return False

    @classmethod
    def custom(cls) -> bool:
        """Whether quantizers are supplied by the user."""
        return False

    def resolve(self) -> Precision:
        """The frozen description of this recipe as it stands now."""
        raise NotImplementedError


_resolved: list[Precision] = []


def resolve(recipe: Recipe) -> Precision:
    """The one `Precision` object of all recipes that say the same (so that `is` compares precisions)."""
    found: Precision | None = vars(recipe).get("_precision")
    if found is None:
        precision = recipe.resolve()
        found = next((p for p in _resolved if p == precision), None)
        if found is None:
            found = precision
            _resolved.append(found)
        vars(recipe)["_precision"] = found  # until a field is assigned
    return found


def by_token(token: int) -> Recipe:
    """The living recipe of this token."""
    return _by_token[token]


def _check_common(recipe: Any, overrides: tuple[str | None, ...]) -> None:
    name = type(recipe).__name__
    _require(
        name, "fp8_format", recipe.fp8_format, isinstance(recipe.fp8_format, Format), "Format.E4M3 or Format.HYBRID"
    )
    _require(name, "fp8_format", recipe.fp8_format, recipe.fp8_format is not Format.E2M1, "an FP8 format")
    for flag in ("fp8_dpa", "fp8_mha"):
        _require(name, flag, getattr(recipe, flag), isinstance(getattr(recipe, flag), bool), "True or False")
    _require(
        name, "backward_override", recipe.backward_override, recipe.backward_override in overrides,
        " or ".join(map(repr, overrides)),
    )  # fmt: skip


@dataclass
class DelayedScaling(Recipe):
    """One scale per tensor, from the maxima of earlier steps."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = field(default="max", repr=False)
    scaling_factor_compute_algo: Callable[..., Any] | None = field(default=None, repr=False)
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default=_BACKWARD_OVERRIDE)

    def __post_init__(self) -> None:
        name = "DelayedScaling"
        _check_common(self, (None,))
        _require(name, "margin", self.margin, isinstance(self.margin, int), "an integer")
        _require(
            name, "amax_history_len", self.amax_history_len,
            isinstance(self.amax_history_len, int) and self.amax_history_len >= 1, "an integer >= 1",
        )  # fmt: skip
        algo = self.amax_compute_algo
        _require(
            name, "amax_compute_algo", algo, algo in ("max", "most_recent") or callable(algo),
            "'max', 'most_recent' or a callable(history) -> amax",
        )  # fmt: skip
        scale = self.scaling_factor_compute_algo
        _require(
            name, "scaling_factor_compute_algo", scale, scale is None or callable(scale),
            "None or a callable(amax, old_scale, fp8_max, recipe) -> new scale",
        )  # fmt: skip

    def resolve(self) -> Precision:
        """The frozen description of this recipe as it stands now."""
        self.__post_init__()  # fields may have been assigned since
        fwd, bwd = _FORWARD[self.fp8_format], _BACKWARD[self.fp8_format]
        history = History(
            self.amax_history_len, self.margin, self.amax_compute_algo, self.scaling_factor_compute_algo,
            self.reduce_amax,
        )  # fmt: skip
        return Precision(
            Operand(fwd, "delayed"), Operand(fwd, "delayed"), Operand(bwd, "delayed"),
            Gemm(False), Gemm(True), Gemm(True), history,
        )  # fmt: skip


@dataclass
class Float8CurrentScaling(Recipe):
    """One scale per tensor, from the tensor's own maximum."""

    use_power_2_scales: bool = _CURRENT_POW2
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default=_BACKWARD_OVERRIDE)

    # Assignable on the instance; None means "as use_power_2_scales says".
    fp8_quant_fwd_inp: ClassVar[QParams | None] = None
    fp8_quant_fwd_weight: ClassVar[QParams | None] = None
    fp8_quant_bwd_grad: ClassVar[QParams | None] = None

    def __post_init__(self) -> None:
        name = "Float8CurrentScaling"
        _check_common(self, (None, "high_precision", "dequantized"))
        _require(
            name, "use_power_2_scales", self.use_power_2_scales, isinstance(self.use_power_2_scales, bool),
            "True or False",
        )  # fmt: skip
        for gemm in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            value = getattr(self, gemm)
            _require(name, gemm, value, isinstance(value, MMParams), "MMParams(use_split_accumulator=True or False)")

    def _operand(self, dtype: DType, params: QParams | None) -> Operand:
        if params is None:
            return Operand(dtype, "current", self.use_power_2_scales)
        return Operand(dtype, "current", params.power_2_scale, params.amax_epsilon)

    def resolve(self) -> Precision:
        """The frozen description of this recipe as it stands now."""
        self.__post_init__()
        if self.backward_override is not None:
            raise UnsupportedError(
                "Float8CurrentScaling", f"backward_override={self.backward_override!r}", "None in this release",
                "leave it out: backward then runs in FP8",
            )  # fmt: skip
        fwd, bwd = _FORWARD[self.fp8_format], _BACKWARD[self.fp8_format]
        return Precision(
            self._operand(fwd, self.fp8_quant_fwd_inp),
            self._operand(fwd, self.fp8_quant_fwd_weight),
            self._operand(bwd, self.fp8_quant_bwd_grad),
            Gemm(self.fp8_gemm_fprop.use_split_accumulator),
            Gemm(self.fp8_gemm_dgrad.use_split_accumulator),
            Gemm(self.fp8_gemm_wgrad.use_split_accumulator),
        )
