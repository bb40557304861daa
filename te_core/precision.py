"""What a recipe comes down to: a frozen description, per operand role and per GEMM. Plain data.

`te_core.recipe` makes it, by value; only this goes below the adapters, and no code there asks which recipe it came
from: each piece reads its own field.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from threading import RLock
from typing import Any

from te_core.dtypes import DType
from te_core.quantized import Format


@dataclass(frozen=True, slots=True)
class Operand:
    """How one operand role is quantized.

    `scaling` is "delayed", "current", "block", "mxfp8", "nvfp4", "custom", or "calibrate" (plain, its maximum noted).
    """

    dtype: DType
    scaling: str
    power_of_two: bool = False
    epsilon: float = 0.0
    tiled: bool = False  # block formats: one scale for a square tile
    transform: bool = False  # nvfp4: random Hadamard transform of the columnwise copy
    stochastic: bool = False  # nvfp4: stochastic rounding
    row_scaled: bool = False  # nvfp4: an amax for each row
    four_over_six: str | None = None  # nvfp4: "MAE" or "MSE": quantize each block twice, keep the better
    bound: int = 448  # nvfp4: the largest block scale
    columnwise: Operand | None = None  # another rule for the columnwise copy
    custom: Any = None  # scaling "custom": what quantizes (te_core.quantize.operands)
    #: What this rule delivers.
    format: Format = field(init=False, repr=False, compare=False)
    #: The casts that have no tensors of their own, by whether they make rowwise and columnwise copies.
    casts: dict[tuple[bool, bool], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        scaling = "tensor" if self.scaling in ("delayed", "current") else self.scaling
        form = Format(self.dtype, scaling, self.tiled, self.row_scaled, self.bound)
        object.__setattr__(self, "format", form)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), given_to(self)


def given_to(made: Any) -> tuple[Any, ...]:
    """What a dataclass was made of."""
    return tuple(getattr(made, f.name) for f in fields(made) if f.init)


#: A rule that is asked for again and again, the same object each time.
rule_of = lru_cache(1024)(Operand)


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
class AttentionPrecision:
    """How attention runs in FP8: what is quantized how on its way in and out.

    P and dS between the two products are always scaled by `history`, P as q's type, dS as the output gradient's.
    """

    qkv: Operand
    output: Operand
    grad: Operand  # of the output
    grad_input: Operand  # of q, k and v
    history: History | None
    handed: bool  # q, k and v come quantized, and leave so as gradients (fp8_mha)
    backward: bool = True  # False: backward in the activation dtype
    high_output: bool = True  # current scaling: the output is kept for backward as it was computed


class _Weak:
    """Can be referred to weakly (a dataclass with slots adds no place for that before Python 3.11)."""

    __slots__ = ("__weakref__",)


_serials = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Precision(_Weak):
    """What a recipe comes down to: a format and rule per operand, an accumulation rule per GEMM.

    An operand that is None stays in high precision, and so do the GEMMs that read it.
    """

    input: Operand | None
    weight: Operand | None
    grad: Operand | None
    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm
    history: History | None = None  # only delayed scaling keeps one
    backward: str | None = None  # "high_precision" or "dequantized": backward's GEMMs in the activation dtype
    output: Operand | None = None  # of a quantized output, if a module is asked for one
    grad_input: Operand | None = None  # of a quantized input gradient
    emulate: bool = False  # a format that the device cannot multiply is dequantized and multiplied in float32
    strict: bool = False  # anything that is not what the recipe asked for is an error
    factory: Any = None  # CustomRecipe: the operands follow from this, module by module
    attention: AttentionPrecision | None = None  # None: attention stays in high precision
    check_finite: bool = False  # casts count what is no number
    #: Names this object in keys that outlive it: unlike an id, it is never given again.
    serial: int = field(default_factory=_serials.__next__, init=False, repr=False, compare=False)
    #: What an adapter has made of this object, such as its number.
    kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of_product(self, gemm: str) -> dict[str, bool]:
        """What `ops.gemm_quantized` is told for a GEMM ("fprop", "dgrad", "wgrad"), by name."""
        rule: Gemm = getattr(self, gemm)
        return {"split_accumulator": rule.split_accumulator, "emulate": self.emulate, "strict": self.strict}

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is another object, and has a serial of its own.
        return type(self), given_to(self)


#: What recipes have come down to, as long as somebody holds it: a recipe with a function of its own in it, made anew
#: for each step, leaves nothing behind.
_resolved: weakref.WeakKeyDictionary[Precision, weakref.ref[Precision]] = weakref.WeakKeyDictionary()
_resolving = RLock()  # garbage may be collected inside, and what its owner runs then may resolve a recipe


def the_one(precision: Precision) -> Precision:
    """The object that stands for all precisions equal to this one, while there are any."""
    with _resolving:
        try:
            reference = _resolved.get(precision)
        except TypeError:  # a user's function or quantizer that cannot be hashed stands for itself
            return precision
        found = None if reference is None else reference()
        if found is None:
            found = precision
            _resolved[precision] = weakref.ref(precision)
    return found
