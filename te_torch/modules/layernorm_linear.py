"""`LayerNormLinear`: y = norm(x) w^T + b, the norm delivering its output already quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_core.errors import UnsupportedError
from te_core.layers import norm_linear as core
from te_torch.autocast import Now
from te_torch.base.options import check_options
from te_torch.base.parallel import eagerly
from te_torch.base.plans import Prepared
from te_torch.base.residual import Branch, given_of
from te_torch.base.unit import Unit
from te_torch.calls import OF_NORM_LINEAR
from te_torch.export import layers
from te_torch.forks import fork_of
from te_torch.function import of_table
from te_torch.modules.layer import LayerModule
from te_torch.modules.linear import SplitParameters
from te_torch.modules.norm import init_norm_weight, margin_of, sm_margins
from te_torch.runtime import default_device, deprecated

NORM_LINEAR = of_table(
    "layernorm_linear",
    core.NormLinearSaved,
    name="norm_linear",
    twins=(0, 6),
    linears=lambda s: (s.linear,),
    copies=lambda saved: (saved.w,),
    plain=layers.norm_linear,
    slots=OF_NORM_LINEAR,
)


class NormParameters(LayerModule):
    """A module that begins with a norm over its input: `layer_norm_weight`, `layer_norm_bias`.

    With `recompute_norm_output = True`, an attribute to be set at any time, backward computes the norm's output again
    instead of keeping it: a byte or two less for each element of the input, and no bit changes.
    """

    recompute_norm_output = False

    def _add_norm(self, width: int, normalization: str, eps: float, zero_centered: bool, **placement: Any) -> None:
        self.normalization, self.eps, self.zero_centered_gamma = normalization, eps, zero_centered
        self._margins = sm_margins(0)
        self._add_parameter("layer_norm_weight", (width,), init_norm_weight(zero_centered), **placement)
        if normalization == "LayerNorm":
            self._add_parameter("layer_norm_bias", (width,), torch.nn.init.zeros_, **placement)
        else:
            self.layer_norm_bias = None
        self._mark_sequence("layer_norm_weight", "layer_norm_bias")

    def _return_norm(self, wanted: bool, gathered: bool) -> None:
        """Whether the norm's output comes out, too, and that of all ranks' rows."""
        self.return_layernorm_output = wanted or gathered
        self.return_layernorm_output_gathered = gathered and self.sequence_parallel

    fwd_ln_sm_margin, bwd_ln_sm_margin, inf_ln_sm_margin = map(margin_of, ("forward", "backward", "inference"))

    def reset_layer_norm_parameters(self) -> None:
        """The older way to initialise the norm's parameters alone."""
        deprecated("reset_layer_norm_parameters", "reset_parameters")
        for name in ("layer_norm_weight", "layer_norm_bias"):
            if self._parameters.get(name) is not None:
                self._initialise(name)

    def _arguments(self, dtype: torch.dtype, precision: int) -> dict[str, torch.Tensor | None]:
        gamma = self._tensor("layer_norm_weight")
        if gamma.dtype != dtype:
            self._require_autocast("layer_norm_weight", gamma, dtype)  # the norm itself takes any dtype
        norm = {"layer_norm_weight": gamma, "layer_norm_bias": self._tensor("layer_norm_bias")}
        return {**norm, **super()._arguments(dtype, precision)}

    def _traced(self, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
        """As any module's; a compiler sees the sum of a branch as an operation of its own, and fuses around it."""
        *given, stream = options
        if stream is None:
            return eagerly(self, *inputs, *given) if self.tp_size > 1 else Unit._traced(self, inputs, options)
        x, residual, bias, rng = inputs
        total = Branch(x, residual, bias, stream[1], rng).added()
        out = self.forward(total, *given)
        return (*out, total) if isinstance(out, tuple) else (out, total)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), **{name: getattr(self, name) for name in self._optional}}

    def _by_mode(self) -> tuple[Any, ...]:
        return self.training, self.recompute_norm_output, *self._margins.values()

    def _spec_options(self, stream: Any) -> dict[str, Any]:
        more = ("recompute_norm_output", "return_layernorm_output_gathered")
        margins = self._margins["forward" if self.training else "inference"], self._margins["backward"]
        own = {name: bool(getattr(self, name)) for name in more}
        return {**super()._spec_options(stream), **own, "sm_margins": margins}

    def _prepare(self, inputs: tuple[Any, ...], options: tuple[Any, ...], now: Now, stream: Any = None) -> Prepared:
        return super()._prepare(inputs, options[:-1], now, options[-1])


class LayerNormLinear(NormParameters, SplitParameters, layer=NORM_LINEAR):
    """y = norm(x) w^T + b, in the precision of the active `autocast` region.

    Raises:
        ArgumentError: An argument has a value that is not allowed, or sizes do not divide by the ranks.

    Example:
        layer = te.LayerNormLinear(256, 768, normalization="RMSNorm", device="cpu")
        y = layer(torch.randn(32, 256))  # [32, 768]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        check_options("LayerNormLinear", options)
        if str(parallel_mode).lower() == "row":
            raise NotImplementedError("LayerNormLinear: parallel_mode='row' would split the norm's rows; use 'column'")
        super().__init__(name)
        self._spread_over(tp_size, tp_group, sequence_parallel)
        self._take_shape(in_features, out_features, parallel_mode)
        self._take_overlap(options)
        self.return_bias = return_bias
        self._return_norm(return_layernorm_output, return_layernorm_output_gathered)
        self._fork = fork_of(get_rng_state_tracker, None)
        place = {"dtype": params_dtype or torch.get_default_dtype(), "device": device or default_device()}
        self._add_norm(in_features, normalization, eps, zero_centered_gamma, **place)
        self._add_linear_parameters((out_features, in_features), bias, parameters_split, init_method, **place)
        self._finish_weights(fuse_wgrad_accumulation, delay_wgrad_compute)

    def forward(
        self,
        inp: torch.Tensor | Branch,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """out, (out, bias), (out, norm output) or (out, bias, norm output), as the constructor asked.

        `inp` may be a `Branch`: an input that is yet to be added to the residual. The sum then comes last.
        """
        if fp8_grad and isinstance(inp, Branch):
            raise UnsupportedError(
                "LayerNormLinear.forward",
                "fp8_grad with a Branch",
                "fp8_grad with a plain input",
                "leave fp8_grad out: a stream's gradient stays in high precision",
            )
        inputs, stream = given_of(inp)
        return self._call(inputs, (is_first_microbatch, fp8_output, fp8_grad, stream))
