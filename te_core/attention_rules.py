"""What cuDNN can do of an attention on a device: a table of small rules, each with its reason.

    able, reason = cudnn_attention(device, version, spec, sizes, dtype, training=True)

Dispatch, the choice of a backend and explanations ask the same table. The rules state the frontend's own checks and
what the library was found to build plans for on sm_90 with cuDNN 9.19; on other devices they follow the documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from te_core import dtypes
from te_core.attention import AttentionSpec, Sizes
from te_core.device import Answer, DeviceInfo
from te_core.dtypes import DType
from te_core.quantized import PAD

Version = tuple[int, ...]
FP8 = (dtypes.float8_e4m3, dtypes.float8_e5m2)
F16 = (dtypes.bfloat16, dtypes.float16)

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
    reason = _of_all(ask) or (_of_fp8 if ask.fp8 else _of_16_bits)(ask) or (_of_training(ask) if training else None)
    if reason is not None:
        return False, reason
    return True, f"cuDNN {'.'.join(map(str, cudnn_version))} on compute capability {device.compute}"


# Each condition with its reason: the first that holds is why not.


def _of_all(a: Ask) -> str | None:
    """What excludes any attention."""
    spec, sink = a.spec, a.spec.softmax != "vanilla"
    if a.version < OLDEST:
        return f"It needs cuDNN {'.'.join(map(str, OLDEST))}, this is {'.'.join(map(str, a.version))}."
    if a.device.capability < (8, 0):
        return f"It needs compute capability 8.0, this is {a.device.compute}."
    if spec.masked:
        return "It takes no arbitrary mask."
    if not a.aligned:
        return "q, k and v have to start at multiples of 16 bytes and to have strides of such multiples."
    if a.banded_bottom_right and spec.dropout:
        return "A bottom-right diagonal excludes dropout."
    if a.banded_bottom_right and spec.bias == "post_scale_bias":
        return "A bottom-right diagonal excludes a bias."
    if sink and a.version < (9, 13, 1):
        return "A softmax with a sink needs cuDNN 9.13.1."
    if sink and a.size.sq == 1:
        return "A softmax with a sink takes more than one query."
    if a.packed and a.device.capability < (9, 0):
        return "Packed sequences (thd) need compute capability 9.0."
    if spec.kv_format == "thd" and spec.q_format != "thd":
        return "Packed keys and values (thd) go with packed queries."
    if a.packed and spec.bias == "post_scale_bias" and a.device.capability[0] >= 10:
        return "Packed sequences (thd) exclude a bias there."
    if a.paged and not spec.padded:
        return "A paged cache needs lengths."
    if a.paged and a.training:
        return "A paged cache has no backward."
    if a.paged and (spec.bias != "no_bias" or spec.dropout):
        return "A paged cache excludes a bias and dropout."
    return None if spec.dropout < 1.0 else "Its dropout keeps something: probabilities below one."


def _of_16_bits(a: Ask) -> str | None:
    """What excludes one in 16 bits."""
    spec, size, major = a.spec, a.size, a.device.capability[0]
    if a.dtype not in F16:
        return f"It takes bfloat16 and float16, not {a.dtype}."
    if size.d_qk % 8 or size.d_v % 8:
        return f"Its head widths are multiples of 8, not {a.widths}."
    most = 512 if major == 9 else 256 if major in (8, 12) else 128
    if max(size.d_qk, size.d_v) > most and (size.d_qk, size.d_v) != (192, 128):
        return f"Its widest head is {most}, this is {a.widths}."
    if spec.windowed and spec.dropout and major != 9:
        return "A window excludes dropout there."
    if spec.softcap and (spec.padded or a.packed or a.paged):
        return "A soft-cap of the scores excludes lengths."
    if spec.softcap and spec.left >= 0 and spec.right >= 0:
        return "A soft-cap of the scores goes with one bound of the diagonal band, not with both."
    if spec.softcap and size.sq > size.skv and (spec.left >= 0 or a.banded_bottom_right):
        return "A soft-cap of the scores needs a key for each query."
    if spec.softcap and (spec.max_logit or spec.bias == "alibi"):
        return "A soft-cap of the scores excludes max_logit and ALiBi."
    if spec.max_logit and a.version < (9, 13):
        return "max_logit needs cuDNN 9.13."
    if spec.max_logit and spec.softmax != "vanilla":
        return "max_logit excludes a softmax with a sink."
    return "max_logit excludes a paged cache." if spec.max_logit and a.paged else None


def _of_fp8(a: Ask) -> str | None:
    """What excludes one in FP8."""
    spec, size, capability = a.spec, a.size, a.device.capability
    if capability < (9, 0) or capability >= (12, 0):
        return f"FP8 attention needs compute capability 9.0 or 10.x, this is {a.device.compute}."
    if isinstance(a.fp8, str) and a.fp8 != "delayed":
        return f"FP8 attention on GPUs takes delayed scaling in this release, not {a.fp8}."
    if a.dtype not in FP8 and a.dtype not in F16 and a.dtype is not dtypes.float32:
        return f"FP8 attention does not take {a.dtype}."
    if size.d_qk % 16 or size.d_v % 16 or max(size.d_qk, size.d_v) > 256:
        return f"Its FP8 head widths are multiples of 16 up to 256, not {a.widths}."
    if spec.bias != "no_bias":
        return "FP8 attention takes no bias and no ALiBi."
    if a.banded_bottom_right and capability[0] < 10:
        return "FP8 attention has no bottom-right diagonal on Hopper."
    if a.packed and capability[0] == 9:  # a plan is built, and its kernel dies of an illegal instruction
        return "FP8 attention has no packed sequences (thd) on Hopper."
    if spec.softmax != "vanilla" and capability[0] < 10:
        return "FP8 attention has no softmax with a sink on Hopper."
    return _without({
        "soft-cap": spec.softcap, "max_logit": spec.max_logit, "paged cache": a.paged, "dropout": spec.dropout
    })  # fmt: skip


def _without(asked: dict[str, object]) -> str | None:
    return next((f"FP8 attention has no {what}." for what, wanted in asked.items() if wanted), None)


def _of_training(a: Ask) -> str | None:
    """What excludes the backward."""
    spec, size, major = a.spec, a.size, a.device.capability[0]
    widths = size.d_qk, size.d_v
    most = 256 if major == 9 else 128
    if a.fp8 and widths != (128, 128):
        return f"FP8 training takes heads of 128, not {a.widths}."
    if max(widths) > most and widths != (192, 128):
        return f"Its widest head in training is {most}, this is {a.widths}."
    if major == 9 and a.version < (9, 13) and size.d_qk != size.d_v and size.d_qk > 128:
        return f"Training with heads of {a.widths} needs cuDNN 9.13."
    # Measured: cuDNN 9.19 on an H100 and an H200. A batch without sequences needs no cuDNN.
    if a.fp8 and size.batch and size.sq % 16 and major == 9:
        return f"Its FP8 backward is wrong for queries behind the last multiple of 16, here {size.sq}."
    if size.sq == size.skv == 1:
        return "Its backward takes more than one query and key."
    if a.packed and spec.softmax != "vanilla" and a.version < (9, 26):
        return "Training packed sequences (thd) with a softmax with a sink needs cuDNN 9.26."
    if a.bias_rows == 1 and (size.sq > 1 or spec.q_format == "thd"):  # packed: its graph has more rows
        return "Its backward is wrong for a bias without a query dimension."  # measured: cuDNN 9.19 on an H200
    if spec.deterministic and spec.softmax == "learnable":
        return "The gradient of a learnable sink is not deterministic."
    if spec.deterministic and major != 9:
        if a.version < (9, 18) or (a.fp8 and a.version < (9, 19)):
            return f"A deterministic backward needs cuDNN {'9.19' if a.fp8 else '9.18'} there."
        if major >= 10 and (spec.dropout or spec.bias != "no_bias"):
            return "A deterministic backward excludes dropout, ALiBi and a bias there."
        if a.packed and major in (8, 12):
            return "A deterministic backward excludes packed sequences there."
    if spec.softcap and a.bias_grad:
        return "A soft-cap of the scores excludes a gradient of the bias."
    # With lengths the last tile's missing keys would be left out, but a soft-cap excludes them (attention_plan.py).
    steep = spec.softcap > 80 or (spec.softcap and spec.bias == "post_scale_bias")
    if steep and (size.sq % 128 or size.skv % 128):
        return "Its backward with a soft-cap above 80 or a bias takes lengths that are multiples of 128."
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
    asked = {"paged cache": paged, "gradient of a bias": bias_grad, "max_logit": spec.max_logit}
    without = _without({**asked, "softmax_type='learnable'": spec.softmax == "learnable"})
    if without is None and any(n % PAD for n in rows):
        return f"FP8 attention takes rows that are multiples of {PAD} wide, not {', '.join(map(str, rows))}."
    return without
