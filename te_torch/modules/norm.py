"""`LayerNorm` and `RMSNorm`; `L2Normalization`: heads divided by their length, one choice of QK normalization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from te_core import env
from te_core.errors import ArgumentError
from te_core.layers import l2_norm
from te_core.layers import norm as core
from te_core.layers.entries import Asked
from te_core.layers.table import LAYERS
from te_torch.autocast import Now
from te_torch.base.module import CallingModule, materialised
from te_torch.base.options import check_values
from te_torch.base.plans import UNKNOWN, Prepared
from te_torch.export import layers
from te_torch.function import Call, of_table, register
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import TO_CORE, amp_dtype, check_dtype, default_device, deprecated, nested

L2_NORM = of_table("l2_norm", l2_norm.L2NormSaved, plain=layers.l2_norm)
NORM = of_table("layernorm", core.NormSaved, name="norm", weight="gamma", plain=layers.norm)
_PHASES = ("forward", "backward", "inference")


def sm_margins(given: int | Mapping[str, int]) -> dict[str, int]:
    """Multiprocessors left free by phase; the documented environment variables go before an integer."""
    if isinstance(given, Mapping):
        return {phase: int(given.get(phase, 0)) for phase in _PHASES}
    return dict.fromkeys(_PHASES, given) | env.norm_sm_margins()


def margin_of(phase: str) -> Any:
    """An attribute that is the margin of a phase."""

    def change(self: Any, margin: int) -> None:
        self._margins = {**self._margins, phase: int(margin)}
        self._calls.clear()

    return property(lambda self: self._margins[phase], change)


def init_norm_weight(zero_centered: bool) -> Any:
    """Ones, or zeros where the stored weight is the distance from one."""
    return torch.nn.init.zeros_ if zero_centered else torch.nn.init.ones_


class _Norm(CallingModule):
    kind = ""

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int | Mapping[str, int] = 0,
    ) -> None:
        operation = type(self).__name__
        unused = "params_dtype" if params_dtype is None else "dtype"
        check_values(self.kind, {k: v for k, v in locals().items() if k != unused})
        super().__init__()
        normalized_shape = _one_of_two(operation, "normalized_shape", normalized_shape, "hidden_size", hidden_size)
        if normalized_shape is None:
            raise RuntimeError(f"{operation}: normalized_shape is missing")
        dtype = _one_of_two(operation, "dtype", dtype, "params_dtype", params_dtype)
        shape = tuple(normalized_shape) if isinstance(normalized_shape, Sequence) else (int(normalized_shape),)
        self.normalized_shape = torch.Size(shape)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self._margins = sm_margins(sm_margin)
        place: dict[str, Any] = {"dtype": dtype or torch.get_default_dtype(), "device": device or default_device()}
        self.weight = torch.nn.Parameter(torch.empty(shape, **place))
        if self.kind == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.empty(shape, **place))
        if sequence_parallel is not None:
            for name in list(self._parameters):
                self._mark(name, sequence_parallel=sequence_parallel)
        if self.weight.device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """Weight one (zero if zero-centered), bias zero; meta parameters get memory on the default device."""
        for name, parameter in list(self._parameters.items()):
            if parameter is None:
                continue
            if parameter.device.type == "meta":
                self._parameters[name] = parameter = materialised(parameter)
            init = init_norm_weight(self.zero_centered_gamma) if name == "weight" else torch.nn.init.zeros_
            init(parameter)

    def _reset_by_older_name(self, name: str) -> None:
        deprecated(f"{type(self).__name__}.{name}", "reset_parameters", 2)
        self.reset_parameters()

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """The normalized input, in the dtype of the weight (or of torch.autocast)."""
        return self._call((inp,))

    def _prepare(self, inputs: tuple[Any, ...], options: tuple[Any, ...], now: Now) -> Prepared:
        inp, weight = inputs[0], self._tensor("weight")
        bias = self._tensor("bias") if self.kind == "LayerNorm" else None
        check_normalized(type(self).__name__, inp, self.normalized_shape)
        if isinstance(inp, QuantizedTorch):
            inp = inp.dequantize()
        grad = torch.is_grad_enabled()
        needs = grad and (inp.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
        dtype = amp_dtype(inp.device.type) if torch._C._is_any_autocast_enabled() else None
        call = self._find_call((weight.dtype if dtype is None else dtype, needs, self.training))
        sources: tuple[Any, ...] = 0, "weight", None if bias is None else "bias"
        if len(self.normalized_shape) > 1:
            width, sources = self.normalized_shape.numel(), (UNKNOWN,)
            inp, weight = inp.reshape(*inp.shape[: -len(self.normalized_shape)], width), weight.reshape(width)
            bias = None if bias is None else bias.reshape(width)
        return Prepared(call, None, False, (inp, weight, bias), sources)

    def _returned(self, outputs: tuple[Any, ...], inputs: tuple[Any, ...]) -> Any:
        (out,), (inp,) = outputs, inputs
        return out if out.shape == inp.shape else out.reshape(inp.shape)

    def _facts(self) -> tuple[Any, ...]:
        return self.eps, self.zero_centered_gamma, *self._margins.values()

    def _new_call(self, dtype: torch.dtype, needs: bool, training: bool) -> Call:
        margins = self._margins["forward" if training else "inference"], self._margins["backward"]
        options = {"eps": self.eps, "zero_centered_gamma": self.zero_centered_gamma, "sm_margins": margins}
        spec = LAYERS[self.kind.lower()].spec(Asked(options, TO_CORE[dtype]))
        return register(NORM, spec, needs)

    def extra_repr(self) -> str:
        """What a printed module shows."""
        return f"{tuple(self.normalized_shape)}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


def _one_of_two(operation: str, name: str, value: Any, old_name: str, old: Any) -> Any:
    if old is None:
        return value
    if value is not None:
        raise RuntimeError(f"{operation}: give {name} or its older name {old_name}, not both")
    deprecated(f"{operation}: {old_name}", name, 2)
    return old


def check_normalized(operation: str, inp: torch.Tensor, normalized_shape: torch.Size) -> None:
    """The input is a float tensor that ends in these dimensions."""
    check_dtype(operation, inp)
    n = len(normalized_shape)
    try:
        fits = inp.ndim >= n and inp.shape[-n:] == normalized_shape
    except RuntimeError as error:
        raise nested(operation) from error
    if not fits:
        raise ArgumentError(
            operation,
            f"an input of shape {tuple(inp.shape)}",
            f"trailing dimensions {tuple(normalized_shape)}",
            f"check normalized_shape ({prod(normalized_shape)} elements a row)",
        )


class LayerNorm(_Norm):
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the trailing dimensions.

    Example:
        y = te.LayerNorm(256, device="cpu")(torch.randn(32, 256))
    """

    kind = "LayerNorm"
    fwd_ln_sm_margin, bwd_ln_sm_margin, inf_ln_sm_margin = map(margin_of, _PHASES)

    def reset_layer_norm_parameters(self) -> None:
        """The older name of reset_parameters."""
        self._reset_by_older_name("reset_layer_norm_parameters")


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the trailing dimensions.

    Example:
        y = te.RMSNorm(256, eps=1e-6, device="cpu")(torch.randn(32, 256))
    """

    kind = "RMSNorm"
    fwd_rmsnorm_sm_margin, bwd_rmsnorm_sm_margin, inf_rmsnorm_sm_margin = map(margin_of, _PHASES)

    def reset_rms_norm_parameters(self) -> None:
        """The older name of reset_parameters."""
        self._reset_by_older_name("reset_rms_norm_parameters")


class L2Normalization(CallingModule):
    """y = x / sqrt(sum(x^2) + eps) over the last dimension; no parameters."""

    def __init__(self, eps: float = 1e-6) -> None:
        check_values("L2Normalization", {"eps": eps})
        super().__init__()
        self.eps = eps

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """The rows of the input, each of length one (but for eps), in its dtype."""
        out: torch.Tensor = self._call((inp,))
        return out

    def _prepare(self, inputs: tuple[Any, ...], options: tuple[Any, ...], now: Now) -> Prepared:
        check_dtype("L2Normalization", inputs[0])
        call = self._find_call((torch.is_grad_enabled() and inputs[0].requires_grad,))
        return Prepared(call, None, False, inputs, (0,))

    def _facts(self) -> tuple[float]:
        return (self.eps,)

    def _new_call(self, needs: bool) -> Call:
        return register(L2_NORM, l2_norm.L2NormSpec(self.eps), needs)

    def extra_repr(self) -> str:
        """What a printed module shows."""
        return f"eps={self.eps}"
