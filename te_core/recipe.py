"""Recipes: how low precision is asked for. Public, mutable, as documented.

A recipe (`DelayedScaling`, …) is what a user builds. `resolve()` turns it, by value, into a frozen
`te_core.precision.Precision`; only that goes below the adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from te_core import dtypes, env
from te_core.described import Describer
from te_core.described.recipes import TEXT
from te_core.dtypes import DType
from te_core.precision import AttentionPrecision, Gemm, History, Operand, Precision, the_one
from te_core.recipe_fields import (
    check_attribute,
    check_common,
    check_parameters,
    is_whole,
    named_by_its_fields,
    require,
    require_choice,
    require_delayed,
    require_flags,
    require_parameters,
)
from te_core.spelling import getter as _getter
from te_core.tokens import enrolled, of_token


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
_BACKWARD = _FORWARD | {Format.HYBRID: dtypes.float8_e5m2}


@dataclass(frozen=True)
class MMParams:
    """Parameters of one GEMM."""

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        check_parameters(self)


@dataclass(frozen=True)
class QParams:
    """Parameters of one quantizer."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __post_init__(self) -> None:
        check_parameters(self)


# Read once at import, as documented: a later change of the environment changes no recipe.
_CURRENT_POW2 = env.switch("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
_BLOCK_F32 = env.switch("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
_BACKWARD_OVERRIDE = env.word("NVTE_BACKWARD_OVERRIDE") or None

#: What `backward_override` may be: backward's GEMMs quantized as usual, from the original operands, or from the
#: dequantized row-wise ones.
_OVERRIDES = (None, "high_precision", "dequantized")
#: What `fp8_format` may be where every product of the recipe would else be one of E5M2 by E5M2, which no GPU has.
_TRAINED = (Format.E4M3, Format.HYBRID)
_SCOPES = ("none", "weights", "activations", "all")
_GEMM_FIELDS = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
_QUANTIZERS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")


class Recipe:
    """Base of all recipes; the questions below work on classes and instances alike.

    `token` is a number under which a living recipe is found: a compiler can hold it as a constant.
    """

    token: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A recipe with a token of its own (copies and unpickled recipes included)."""
        recipe = super().__new__(cls)
        recipe.__dict__.update(token=enrolled(recipe), _precision=[])
        return recipe

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(type(self), name) and "__dataclass_fields__" in vars(type(self)):
            check_attribute(self, name)
        super().__setattr__(name, value)
        # What `resolve` finds goes into the list that it began with: never what another thread found of older fields.
        vars(self)["_precision"] = []

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).copy().items() if k not in ("token", "_precision")}

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is the NVFP4 recipe."""
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is the MXFP8 recipe."""
        return issubclass(cls, MXFP8BlockScaling)

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
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        """Whether quantizers are supplied by the user."""
        return issubclass(cls, CustomRecipe)

    def resolve(self) -> Precision:
        """The frozen description of this recipe as it stands now."""
        raise NotImplementedError


def resolve(recipe: Recipe) -> Precision:
    """The one `Precision` object of all recipes that say the same (so that `is` compares precisions)."""
    found: list[Precision] = vars(recipe)["_precision"]  # until a field is assigned
    if not found:
        found.append(the_one(recipe.resolve()))
    return found[0]


def by_token(token: int) -> Recipe:
    """The living recipe of this token."""
    found: Recipe = of_token(token)
    return found


def _gemms(recipe: Any) -> tuple[Gemm, Gemm, Gemm]:
    fprop, dgrad, wgrad = (Gemm(getattr(recipe, name).use_split_accumulator) for name in _GEMM_FIELDS)
    return fprop, dgrad, wgrad


_SPLIT = Gemm(True), Gemm(True), Gemm(True)
#: Where attention's own casts have no history: that of P and dS.
_SCORES = History(1, 0, "most_recent", None, True)


def _common(recipe: Any, forward: Operand, backward: Operand, history: History | None = None) -> dict[str, Any]:
    """What fields that all recipes have come to, by name. Attention runs each way by the one rule of that way."""
    attention = None
    if recipe.fp8_dpa or recipe.fp8_mha:
        attention = AttentionPrecision(forward, forward, backward, backward, history, recipe.fp8_mha)
    return {"backward": recipe.backward_override, "attention": attention}


@named_by_its_fields
@dataclass
class DelayedScaling(Recipe):
    """One scale per tensor, from the maxima of earlier steps.

    Raises:
        AssertionError: A field has a value that is not allowed.

    Example:
        from te_core.recipe import DelayedScaling, Format

        recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    """

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
        check_common(self, _TRAINED, (None,))
        require_delayed(self)

    def resolve(self) -> Precision:
        """The frozen description of this recipe as it stands now."""
        self.__post_init__()  # fields may have been assigned since
        fwd, bwd = _FORWARD[self.fp8_format], _BACKWARD[self.fp8_format]
        algorithms = self.amax_compute_algo, self.scaling_factor_compute_algo
        history = History(self.amax_history_len, self.margin, *algorithms, self.reduce_amax)
        forward, backward = Operand(fwd, "delayed"), Operand(bwd, "delayed")
        gemms, more = (Gemm(False), Gemm(True), Gemm(True)), _common(self, forward, backward, history)
        return Precision(forward, forward, backward, *gemms, history, output=forward, grad_input=backward, **more)


@named_by_its_fields
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
        check_common(self, _TRAINED, _OVERRIDES)
        require_flags(self, "use_power_2_scales")
        require_parameters(self, QParams, *_QUANTIZERS)
        for gemm in _GEMM_FIELDS:
            value = getattr(self, gemm)
            require(name, gemm, value, isinstance(value, MMParams), "MMParams(use_split_accumulator=True or False)")

    def _operand(self, dtype: DType, params: QParams | None) -> Operand:
        if params is None:
            return Operand(dtype, "current", self.use_power_2_scales)
        return Operand(dtype, "current", params.power_2_scale, params.amax_epsilon)

    def resolve(self) -> Precision:
        """The frozen description of this recipe as it stands now."""
        self.__post_init__()
        fwd, bwd = _FORWARD[self.fp8_format], _BACKWARD[self.fp8_format]
        output, grad_input = self._operand(fwd, None), self._operand(bwd, None)
        return Precision(
            self._operand(fwd, self.fp8_quant_fwd_inp),
            self._operand(fwd, self.fp8_quant_fwd_weight),
            self._operand(bwd, self.fp8_quant_bwd_grad),
            *_gemms(self),
            output=output,
            grad_input=grad_input,
            **_common(self, output, grad_input, _SCORES),
        )


@named_by_its_fields
@dataclass
class Float8BlockScaling(Recipe):
    """FP8 with a scale for each 1x128 piece (activations, gradients) or 128x128 tile (weights)."""

    use_f32_scales: bool = _BLOCK_F32
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default=_BACKWARD_OVERRIDE)

    # Assignable on the instance; None means "as use_f32_scales says".
    fp8_quant_fwd_inp: ClassVar[QParams | None] = None
    fp8_quant_fwd_weight: ClassVar[QParams | None] = None
    fp8_quant_bwd_grad: ClassVar[QParams | None] = None

    def __post_init__(self) -> None:
        name = "Float8BlockScaling"
        check_common(self, _TRAINED, _OVERRIDES)
        for flag in ("fp8_dpa", "fp8_mha"):
            require(name, flag, getattr(self, flag), not getattr(self, flag), "False: attention has no block scaling")
        require_flags(self, "use_f32_scales")
        require_parameters(self, QParams, *_QUANTIZERS)
        dims = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        for dim in dims:
            require(name, dim, getattr(self, dim), getattr(self, dim) in (1, 2), "1 (1x128) or 2 (128x128)")
        tiled = [dim for dim in dims if getattr(self, dim) == 2]
        allowed = "128x128 tiles for at most one of input, weight and gradient: no GEMM reads two tiled operands"
        require(name, " and ".join(tiled), 2, len(tiled) <= 1, allowed)
        allowed = "MMParams(use_split_accumulator=True): block products are always promoted"
        for gemm in _GEMM_FIELDS:
            value = getattr(self, gemm)
            require(name, gemm, value, isinstance(value, MMParams) and value.use_split_accumulator, allowed)

    def _operand(self, dtype: DType, dim: int, params: QParams | None) -> Operand:
        if params is None:
            params = QParams(power_2_scale=not self.use_f32_scales)
        return Operand(dtype, "block", params.power_2_scale, params.amax_epsilon, tiled=dim == 2)

    def resolve(self) -> Precision:
        """The frozen description of this recipe as it stands now."""
        self.__post_init__()
        fwd, bwd = _FORWARD[self.fp8_format], _BACKWARD[self.fp8_format]
        output, grad_input = self._operand(fwd, 1, None), self._operand(bwd, 1, None)
        return Precision(
            self._operand(fwd, self.x_block_scaling_dim, self.fp8_quant_fwd_inp),
            self._operand(fwd, self.w_block_scaling_dim, self.fp8_quant_fwd_weight),
            self._operand(bwd, self.grad_block_scaling_dim, self.fp8_quant_bwd_grad),
            *_gemms(self),
            output=output,
            grad_input=grad_input,
            **_common(self, output, grad_input),
        )


@named_by_its_fields
@dataclass
class MXFP8BlockScaling(Recipe):
    """FP8 with a power-of-two scale for each 32 elements."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default=_BACKWARD_OVERRIDE)
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        check_common(self, _TRAINED, _OVERRIDES)
        require("MXFP8BlockScaling", "margin", self.margin, is_whole(self.margin), "an integer (it has no effect)")
        require_flags(self, "enable_2d_quantization")

    def resolve(self) -> Precision:
        """The frozen description of this recipe as it stands now."""
        self.__post_init__()
        fwd, bwd = (Operand(kinds[self.fp8_format], "mxfp8") for kinds in (_FORWARD, _BACKWARD))
        weight = replace(fwd, tiled=self.enable_2d_quantization)
        return Precision(fwd, weight, bwd, *_SPLIT, output=fwd, grad_input=bwd, **_common(self, fwd, bwd))


@named_by_its_fields
@dataclass
class NVFP4BlockScaling(Recipe):
    """FP4 with an E4M3 scale for each 16 elements below one float32 scale a tensor."""

    disable_rht: bool = env.switch("NVTE_NVFP4_DISABLE_RHT")
    disable_stochastic_rounding: bool = env.switch("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")
    disable_2d_quantization: bool = env.switch("NVTE_NVFP4_DISABLE_2D_QUANTIZATION")
    row_scaled_activation: bool = env.switch("NVTE_NVFP4_ROW_SCALED_ACTIVATION")
    nvfp4_4over6: str = env.word("NVTE_NVFP4_4OVER6")
    nvfp4_4over6_e4m3_use_256: str = env.word("NVTE_NVFP4_4OVER6_E4M3_USE_256")
    nvfp4_4over6_err_mode: str = env.word("NVTE_NVFP4_4OVER6_ERR_MODE")
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default=_BACKWARD_OVERRIDE)

    # Assignable on the instance, made anew from the flags.
    fp4_quant_fwd_inp = fp4_quant_fwd_weight = fp4_quant_bwd_grad = QParams()

    def __post_init__(self) -> None:
        self._check()
        transform, stochastic = not self.disable_rht, not self.disable_stochastic_rounding
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=transform)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(random_hadamard_transform=transform, stochastic_rounding=stochastic)

    def _check(self) -> None:
        name = "NVFP4BlockScaling"
        check_common(self, (Format.E4M3,), _OVERRIDES)
        require_flags(
            self, "disable_rht", "disable_stochastic_rounding", "disable_2d_quantization", "row_scaled_activation"
        )
        require_parameters(self, QParams, "fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad")
        for scope in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            require_choice(self, scope, _SCOPES)
        require_choice(self, "nvfp4_4over6_err_mode", ("MAE", "MSE"))
        require(name, "fp4_format", self.fp4_format, self.fp4_format is Format.E2M1, "Format.E2M1")
        four, plain = self.nvfp4_4over6, self.disable_rht
        why = "the transform and the double quantization exclude each other"
        allowed = f"'none' or 'weights' unless disable_rht=True: {why}"
        require(name, "nvfp4_4over6", four, four in ("none", "weights") or plain, allowed)
        rows = self.row_scaled_activation
        require(name, "row_scaled_activation", True, not rows or plain, "False unless disable_rht=True")

    def _operand(self, scope: str, params: QParams) -> Operand:
        four = scope != "gradients" and self.nvfp4_4over6 in (scope, "all")
        wide = four and self.nvfp4_4over6_e4m3_use_256 in (scope, "all")
        return Operand(
            dtypes.float4_e2m1,
            "nvfp4",
            params.power_2_scale,
            params.amax_epsilon,
            tiled=params.fp4_2d_quantization,
            transform=params.random_hadamard_transform,
            stochastic=params.stochastic_rounding,
            row_scaled=self.row_scaled_activation and scope == "activations",
            four_over_six=self.nvfp4_4over6_err_mode if four else None,
            bound=256 if wide else 448,
        )

    def resolve(self) -> Precision:
        """The frozen description of this recipe as it stands now."""
        self._check()
        given = self.fp4_quant_fwd_inp, self.fp4_quant_fwd_weight, self.fp4_quant_bwd_grad  # a user may assign them
        x, w, dy = (self._operand(*pair) for pair in zip(("activations", "weights", "gradients"), given, strict=True))
        output, grad_input = replace(x, transform=False), replace(dy, transform=False, stochastic=False)
        return Precision(x, w, dy, *_SPLIT, output=output, grad_input=grad_input, **_common(self, x, dy))


@named_by_its_fields
@dataclass
class CustomRecipe(Recipe):
    """`qfactory(role)` returns a quantizer, or a request for one, for each operand role of each module."""

    qfactory: Callable[..., Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default=_BACKWARD_OVERRIDE)
    quantization_alignment: int = 128

    def __post_init__(self) -> None:
        name = "CustomRecipe"
        check_common(self, (*_TRAINED, Format.E5M2), _OVERRIDES)
        require(name, "qfactory", self.qfactory, callable(self.qfactory), "a callable(role) -> quantizer or request")
        alignment = self.quantization_alignment
        require(name, "quantization_alignment", alignment, is_whole(alignment) and alignment > 0, "an integer > 0")

    def resolve(self) -> Precision:
        """Only that a factory decides; a module asks it for its own roles."""
        self.__post_init__()
        rule = Operand(_FORWARD[self.fp8_format], "custom")
        return Precision(None, None, None, *_SPLIT, factory=self.qfactory, **_common(self, rule, rule))


_ALL = CustomRecipe, DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
Describer(TEXT).describe((MMParams, QParams, Recipe, *_ALL, resolve, by_token))

if not TYPE_CHECKING:  # a checker would take every name for one of this module's
    __getattr__ = _getter(__name__)
