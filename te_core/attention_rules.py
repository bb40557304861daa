"""What cuDNN can do of an attention on a device: a table of small rules, each with its reason.

    able, reason = cudnn_attention(device, version, spec, sizes, dtype, training=True)

Dispatch, the choice of a backend and explanations ask the same table. The rules state the frontend's own checks and
what the library was found to build plans for on sm_90 with cuDNN 9.19; on other devices they follow the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from te_core import dtypes
from te_core.attention import AttentionSpec, Sizes
from te_core.device import Answer, DeviceInfo
from te_core.dtypes import DType
from te_core.quantized import PAD

Version = tuple[int, ...]
FP8 = (dtypes.float8_e4m3, dtypes.float8_e5m2)
F16 = (dtypes.bfloat16, dtypes.float16)

#: Versions with faults of their own, which the frontend refuses too.
BROKEN = ((9, 10, 0), (9, 10, 1))
OLDEST = (9, 11)


@dataclass(frozen=True, slots=True)
class Ask:
    """One attention, as far as the rules look at it."""

    device: DeviceInfo
    version: Version
    spec: AttentionSpec
    size: Sizes
    dtype: DType
    training: bool  # its backward will be asked for, too
    fp8: bool | str
    paged: bool
    bias_grad: bool
    aligned: bool
    bias_rows: int

    @property
    def packed(self) -> bool:
        """Whether a tensor is packed (thd)."""
        return "thd" in (self.spec.q_format, self.spec.kv_format)

    @property
    def banded_bottom_right(self) -> bool:
        """Whether cuDNN has to end its diagonal bottom-right: not where both ends are in corners."""
        spec = self.spec
        return spec.bottom_right and spec.banded and (spec.padded or self.size.sq != self.size.skv)

    @property
    def widths(self) -> str:
        """The head widths, in words."""
        return f"{self.size.d_qk}" if self.size.d_qk == self.size.d_v else f"{self.size.d_qk}/{self.size.d_v}"


Rule = Callable[[Ask], "str | None"]


def cudnn_attention(
    device: DeviceInfo,
    cudnn_version: Version,
    spec: AttentionSpec,
    sizes: Sizes,
    dtype: DType,
    training: bool,
    fp8: bool | str = False,
    *,
    paged: bool = False,
    bias_grad: bool = False,
    aligned: bool = True,
    bias_rows: int = 0,
) -> Answer:
    """Whether cuDNN of this version carries out an attention on this device, and why not.

    `training`: the backward, too. `fp8` (true, or the name of a scaling): on FP8 operands, whatever `dtype` is.
    `aligned`: q, k and v start at 16 bytes, and their strides are whole multiples of that. `bias_rows`: the bias's
    extent along the queries.
    """
    ask = Ask(device, tuple(cudnn_version), spec, sizes, dtype, training, fp8, paged, bias_grad, aligned, bias_rows)
    for rule in (*RULES, *(FP8_RULES if ask.fp8 else F16_RULES), *(TRAINING_RULES if training else ())):
        reason = rule(ask)
        if reason is not None:
            return False, reason
    number = ".".join(map(str, cudnn_version))
    return True, f"cuDNN {number} on compute capability {device.capability[0]}.{device.capability[1]}"


# ---------------------------------------------------------------------------------------------- every attention


def _version(a: Ask) -> str | None:
    if a.version < OLDEST:
        return f"It needs cuDNN {'.'.join(map(str, OLDEST))}, this is {'.'.join(map(str, a.version))}."
    if a.version[:3] in BROKEN:
        return f"cuDNN {'.'.join(map(str, a.version))} computes attention wrongly."
    return None


def _capability(a: Ask) -> str | None:
    if a.device.capability < (8, 0):
        return f"It needs compute capability 8.0, this is {a.device.capability[0]}.{a.device.capability[1]}."
    return None


def _mask_tensor(a: Ask) -> str | None:
    return "It takes no arbitrary mask." if a.spec.masked else None


def _alignment(a: Ask) -> str | None:
    if a.aligned:
        return None
    return "q, k and v have to start at multiples of 16 bytes and to have strides of such multiples."


def _bottom_right_extras(a: Ask) -> str | None:
    if not a.banded_bottom_right:
        return None
    if a.spec.dropout:
        return "A bottom-right diagonal excludes dropout."
    return "A bottom-right diagonal excludes a bias." if a.spec.bias == "post_scale_bias" else None


def _sink_of_one_query(a: Ask) -> str | None:
    if a.spec.softmax != "vanilla" and a.size.sq == 1:
        return "A softmax with a sink takes more than one query."
    return None


def _sink_version(a: Ask) -> str | None:
    if a.spec.softmax != "vanilla" and a.version < (9, 13, 1):
        return "A softmax with a sink needs cuDNN 9.13.1."
    return None


def _packed_device(a: Ask) -> str | None:
    if a.packed and a.device.capability < (9, 0):
        return "Packed sequences (thd) need compute capability 9.0."
    return None


def _packed_keys(a: Ask) -> str | None:
    if a.spec.kv_format == "thd" and a.spec.q_format != "thd":
        return "Packed keys and values (thd) go with packed queries."
    return None


def _packed_bias(a: Ask) -> str | None:
    if a.packed and a.spec.bias == "post_scale_bias" and a.device.capability[0] >= 10:
        return "Packed sequences (thd) exclude a bias there."
    return None


def _dropout_of_all(a: Ask) -> str | None:
    return None if a.spec.dropout < 1.0 else "Its dropout keeps something: probabilities below one."


def _paged(a: Ask) -> str | None:
    if not a.paged:
        return None
    if not a.spec.padded:
        return "A paged cache needs lengths."
    if a.training:
        return "A paged cache has no backward."
    return "A paged cache excludes a bias and dropout." if a.spec.bias != "no_bias" or a.spec.dropout else None


# ---------------------------------------------------------------------------------------------- 16 bits


def _f16(a: Ask) -> str | None:
    return None if a.dtype in F16 else f"It takes bfloat16 and float16, not {a.dtype}."


def _width_step(a: Ask) -> str | None:
    if a.size.d_qk % 8 or a.size.d_v % 8:
        return f"Its head widths are multiples of 8, not {a.widths}."
    return None


def _widest_forward(a: Ask) -> str | None:
    most = 512 if a.device.capability[0] == 9 else 256 if a.device.capability[0] in (8, 12) else 128
    if max(a.size.d_qk, a.size.d_v) <= most or (a.size.d_qk, a.size.d_v) == (192, 128):
        return None
    return f"Its widest head is {most}, this is {a.widths}."


def _window_and_dropout(a: Ask) -> str | None:
    if a.spec.windowed and a.spec.dropout and a.device.capability[0] != 9:
        return "A window excludes dropout there."
    return None


def _softcap(a: Ask) -> str | None:
    spec = a.spec
    if not spec.softcap:
        return None
    if spec.padded or a.packed or a.paged:
        return "A soft-cap of the scores excludes lengths."
    if spec.left >= 0 and spec.right >= 0:
        return "A soft-cap of the scores goes with one bound of the diagonal band, not with both."
    if a.size.sq > a.size.skv and (spec.left >= 0 or a.banded_bottom_right):
        return "A soft-cap of the scores needs a key for each query."
    if spec.max_logit or spec.bias == "alibi":
        return "A soft-cap of the scores excludes max_logit and ALiBi."
    return None


def _max_logit(a: Ask) -> str | None:
    if not a.spec.max_logit:
        return None
    if a.version < (9, 13):
        return "max_logit needs cuDNN 9.13."
    if a.spec.softmax != "vanilla":
        return "max_logit excludes a softmax with a sink."
    return "max_logit excludes a paged cache." if a.paged else None


# ---------------------------------------------------------------------------------------------- FP8


def _fp8_device(a: Ask) -> str | None:
    if a.device.capability < (9, 0) or a.device.capability >= (12, 0):
        here = f"{a.device.capability[0]}.{a.device.capability[1]}"
        return f"FP8 attention needs compute capability 9.0 or 10.x, this is {here}."
    return None


def _fp8_scaling(a: Ask) -> str | None:
    if isinstance(a.fp8, str) and a.fp8 != "delayed":
        return f"FP8 attention on GPUs takes delayed scaling in this release, not {a.fp8}."
    return None


def _fp8_dtype(a: Ask) -> str | None:
    if a.dtype in FP8 or a.dtype in F16 or a.dtype is dtypes.float32:
        return None
    return f"FP8 attention does not take {a.dtype}."


def _fp8_width(a: Ask) -> str | None:
    if a.size.d_qk % 16 or a.size.d_v % 16 or max(a.size.d_qk, a.size.d_v) > 256:
        return f"Its FP8 head widths are multiples of 16 up to 256, not {a.widths}."
    return None


def _fp8_bias(a: Ask) -> str | None:
    return None if a.spec.bias == "no_bias" else "FP8 attention takes no bias and no ALiBi."


def _fp8_bottom_right(a: Ask) -> str | None:
    if a.banded_bottom_right and a.device.capability[0] < 10:
        return "FP8 attention has no bottom-right diagonal on Hopper."
    return None


def _fp8_packed(a: Ask) -> str | None:
    if a.packed and a.device.capability[0] == 9:  # a plan is built, and its kernel dies of an illegal instruction
        return "FP8 attention has no packed sequences (thd) on Hopper."
    return None


def _fp8_softmax(a: Ask) -> str | None:
    if a.spec.softmax != "vanilla" and a.device.capability[0] < 10:
        return "FP8 attention has no softmax with a sink on Hopper."
    return None


def _fp8_extras(a: Ask) -> str | None:
    for asked, what in (
        (a.spec.softcap, "soft-cap"),
        (a.spec.max_logit, "max_logit"),
        (a.paged, "paged cache"),
        (a.spec.dropout, "dropout"),
    ):
        if asked:
            return f"FP8 attention has no {what}."
    return None


#: What `fp8_refusal` leaves, in words.
FP8_TAKES = (
    f"delayed or current scaling, rows in multiples of {PAD}, and no paged cache, max_logit, learnable softmax, or "
    "gradient of a bias"
)


def fp8_refusal(
    spec: AttentionSpec,
    scaling: str,
    rows: Sequence[int] = (),
    *,
    paged: bool = False,
    bias_grad: bool = False,
    emulated: bool = False,
) -> str | None:
    """Why an attention has no FP8 on any device, whatever could multiply it; None where nothing is against it.

    `rows`: the widths of the rows that are quantized. `emulated`: on values as FP8 holds them, whose scores may have a
    bias.
    """
    if scaling not in ("delayed", "current"):
        return f"FP8 attention takes delayed or current scaling, not {scaling}."
    if spec.bias == "post_scale_bias" and not emulated:
        return "FP8 attention takes no bias."
    for asked, what in (
        (paged, "paged cache"),
        (bias_grad, "gradient of a bias"),
        (spec.max_logit, "max_logit"),
        (spec.softmax == "learnable", "softmax_type='learnable'"),
    ):
        if asked:
            return f"FP8 attention has no {what}."
    if any(n % PAD for n in rows):
        return f"FP8 attention takes rows that are multiples of {PAD} wide, not {', '.join(map(str, rows))}."
    return None


# ---------------------------------------------------------------------------------------------- backward


def _train_width(a: Ask) -> str | None:
    d_qk, d_v = a.size.d_qk, a.size.d_v
    if a.fp8:
        return None if d_qk == d_v == 128 else f"FP8 training takes heads of 128, not {a.widths}."
    hopper = a.device.capability[0] == 9
    most = 256 if hopper else 128
    if max(d_qk, d_v) > most and (d_qk, d_v) != (192, 128):
        return f"Its widest head in training is {most}, this is {a.widths}."
    if hopper and a.version < (9, 13) and d_qk != d_v and d_qk > 128:
        return f"Training with heads of {a.widths} needs cuDNN 9.13."
    return None


def _train_fp8_queries(a: Ask) -> str | None:
    # Measured: cuDNN 9.19 on an H100 and an H200. A batch without sequences needs no cuDNN.
    if a.fp8 and a.size.batch and a.size.sq % 16 and a.device.capability[0] == 9:
        return f"Its FP8 backward is wrong for queries behind the last multiple of 16, here {a.size.sq}."
    return None


def _train_one_pair(a: Ask) -> str | None:
    return "Its backward takes more than one query and key." if a.size.sq == a.size.skv == 1 else None


def _train_packed_sink(a: Ask) -> str | None:
    if a.packed and a.spec.softmax != "vanilla" and a.version < (9, 26):
        return "Training packed sequences (thd) with a softmax with a sink needs cuDNN 9.26."
    return None


def _train_bias_of_keys(a: Ask) -> str | None:
    if a.bias_rows == 1 and (a.size.sq > 1 or a.spec.q_format == "thd"):  # packed: its graph has more rows
        return "Its backward is wrong for a bias without a query dimension."  # measured: cuDNN 9.19 on an H200
    return None


def _train_deterministic(a: Ask) -> str | None:
    spec, major = a.spec, a.device.capability[0]
    if not spec.deterministic:
        return None
    if spec.softmax == "learnable":
        return "The gradient of a learnable sink is not deterministic."
    if major == 9:
        return None
    if a.version < (9, 18) or (a.fp8 and a.version < (9, 19)):
        return f"A deterministic backward needs cuDNN {'9.19' if a.fp8 else '9.18'} there."
    if major >= 10 and (spec.dropout or spec.bias != "no_bias"):
        return "A deterministic backward excludes dropout, ALiBi and a bias there."
    return "A deterministic backward excludes packed sequences there." if a.packed and major in (8, 12) else None


def _train_softcap_dbias(a: Ask) -> str | None:
    if a.spec.softcap and a.bias_grad:
        return "A soft-cap of the scores excludes a gradient of the bias."
    return None


def _train_softcap_ragged(a: Ask) -> str | None:
    """With lengths the last tile's missing keys would be left out, but a soft-cap excludes them (attention_plan.py)."""
    low = a.spec.softcap > 80 or a.spec.bias == "post_scale_bias"
    if a.spec.softcap and low and (a.size.sq % 128 or a.size.skv % 128):
        return "Its backward with a soft-cap above 80 or a bias takes lengths that are multiples of 128."
    return None


RULES: tuple[Rule, ...] = (
    _version,
    _capability,
    _mask_tensor,
    _alignment,
    _bottom_right_extras,
    _sink_version,
    _sink_of_one_query,
    _packed_device,
    _packed_keys,
    _packed_bias,
    _paged,
    _dropout_of_all,
)
F16_RULES: tuple[Rule, ...] = (_f16, _width_step, _widest_forward, _window_and_dropout, _softcap, _max_logit)
FP8_RULES: tuple[Rule, ...] = (
    _fp8_device,
    _fp8_scaling,
    _fp8_dtype,
    _fp8_width,
    _fp8_bias,
    _fp8_bottom_right,
    _fp8_packed,
    _fp8_softmax,
    _fp8_extras,
)
TRAINING_RULES: tuple[Rule, ...] = (
    _train_width,
    _train_fp8_queries,
    _train_one_pair,
    _train_packed_sink,
    _train_bias_of_keys,
    _train_deterministic,
    _train_softcap_dbias,
    _train_softcap_ragged,
)
