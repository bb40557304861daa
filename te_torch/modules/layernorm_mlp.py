"""`LayerNormMLP`: y = act(norm(x) w1^T + b1) w2^T + b2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_core.errors import UnsupportedError
from te_core.layers import mlp as core
from te_core.ops.activation import GATED, KINDS, Clamp
from te_core.spelling import choice_error
from te_torch.base.module import normal_init
from te_torch.base.options import check_options
from te_torch.base.residual import Branch, given_of
from te_torch.export import layers
from te_torch.forks import fork_of
from te_torch.function import of_table
from te_torch.modules.layernorm_linear import NormParameters
from te_torch.parallel.overlap import flags_of
from te_torch.runtime import default_device

MLP = of_table(
    "layernorm_mlp",
    core.MLPSaved,
    name="mlp",
    weight="w2",
    recomputes=True,
    twins=(0, 8),
    linears=lambda s: (s.fc1, s.fc2),
    copies=lambda saved: (saved.w1q, saved.w2q),
    plain=layers.mlp,
)
ALIASES = {"squared_relu": "srelu"}  # an older documentation's spelling
#: The documented names of clamped_swiglu's parameters, in the order of `Clamp`.
CLAMP_NAMES = ("limit", "alpha", "glu_linear_offset")


class LayerNormMLP(NormParameters, layer=MLP):
    """norm, linear, activation, linear, in the precision of the active `autocast` region.

    Raises:
        ArgumentError: An argument has a value that is not allowed, or sizes do not divide by the ranks.
        UnsupportedError: The activation is not one of those there are.

    Example:
        mlp = te.LayerNormMLP(256, 1024, activation="swiglu", normalization="RMSNorm", device="cpu")
        y = mlp(torch.randn(32, 256))  # [32, 256]
    """

    gemms = 2
    _features, _last_bias = "hidden_size", "fc2_bias"

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        check_options("LayerNormMLP", options)
        super().__init__(name)
        self.overlap_flags = flags_of("LayerNormMLP", options)
        self.activation = ALIASES.get(activation, activation)
        if self.activation not in KINDS:
            raise choice_error("LayerNormMLP", "activation", activation, (*KINDS, *ALIASES), UnsupportedError)
        self.activation_params = None if activation_params is None else dict(activation_params)
        self._clamp = clamp_of(self.activation, activation_params)
        self.checkpoint = checkpoint
        self._spread_over(tp_size, tp_group, sequence_parallel)
        self.set_parallel_mode, self.symmetric_ar_type = set_parallel_mode, symmetric_ar_type
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        if set_parallel_mode:
            self.ffn_hidden_size = self._local("ffn_hidden_size", ffn_hidden_size)
        self.return_bias, self.use_bias = return_bias, bias
        self._return_norm(return_layernorm_output, return_layernorm_output_gathered)
        self._fork = fork_of(get_rng_state_tracker, None)
        place = {"dtype": params_dtype or torch.get_default_dtype(), "device": device or default_device()}
        self._add_norm(hidden_size, normalization, eps, zero_centered_gamma, **place)
        wide = self.ffn_hidden_size * (2 if self.activation in GATED else 1)
        for which, shape, init in (
            ("fc1", (wide, hidden_size), init_method),
            ("fc2", (hidden_size, self.ffn_hidden_size), output_layer_init_method),
        ):
            self._add_parameter(f"{which}_weight", shape, init or normal_init, **place)
            self._add_bias(f"{which}_bias", shape[0], bias, **place)
            self._mark_parallel(0 if which == "fc1" else 1, f"{which}_weight")
        if bias and set_parallel_mode:
            self._mark_parallel(0, "fc1_bias")
        if set_parallel_mode:
            self._mark_sequence("fc2_bias")
        self._quantize_parameters()
        self._accumulate(fuse_wgrad_accumulation, delay_wgrad_compute)

    def _weight_names(self) -> tuple[str, ...]:
        return "fc1_weight", "fc2_weight"

    def _options(self) -> dict[str, Any]:
        sizes = {"hidden_size": self.hidden_size, "ffn_hidden_size": self.ffn_hidden_size, "bias": self.use_bias}
        own = {name: getattr(self, name) for name in ("return_bias", "activation", "checkpoint")}
        return {**sizes, **own, **super()._options()}

    def forward(self, inp: torch.Tensor | Branch, is_first_microbatch: bool | None = None) -> Any:
        """out, (out, fc2 bias), (out, norm output) or (out, bias, norm output), as the constructor asked.

        `inp` may be a `Branch`: an input that is yet to be added to the residual. The sum then comes last.
        """
        inputs, stream = given_of(inp)
        return self._call(inputs, (is_first_microbatch, stream))

    def _arguments(self, dtype: torch.dtype, precision: int) -> dict[str, torch.Tensor | None]:
        norm = super()._arguments(dtype, precision)
        w1, w2 = self._weight("fc1_weight", dtype, precision), self._weight("fc2_weight", dtype, precision, 1)
        b1, b2 = self._bias("fc1_bias", dtype), None if self.return_bias else self._bias("fc2_bias", dtype)
        return {**norm, "fc1_weight": w1, "fc1_bias": b1, "fc2_weight": w2, "fc2_bias": b2}

    def _bias(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        if not self.use_bias:
            return None
        bias = self._tensor(name)
        return bias if bias.dtype == dtype else bias.to(dtype)

    def _spread(self) -> tuple[tuple[str | None, str | None], ...]:
        return (("column", "fc1"), ("row", "fc2")) if self.set_parallel_mode else ((None, None),) * 2

    def _facts(self) -> tuple[Any, ...]:
        return *super()._facts(), *self._clamp.values()

    def _spec_options(self, stream: Any) -> dict[str, Any]:
        return {
            **super()._spec_options(stream),
            **self._clamp,
            "checkpoint": self.checkpoint and self._inspectors() is None,  # who looks on sees everything once
        }


def clamp_of(activation: str, given: dict[str, float] | None) -> dict[str, float]:
    """`activation_params` as the layer has them, all by name; none where the activation takes none."""
    takes = CLAMP_NAMES if activation == "clamped_swiglu" else ()
    if set(given or ()) - set(takes):
        raise UnsupportedError(
            "LayerNormMLP",
            f"activation_params={given!r} of {activation}",
            ", ".join(takes) or "none",
            f"leave them out; {', '.join(CLAMP_NAMES)} belong to clamped_swiglu",
        )
    return {name: (given or {}).get(name, default) for name, default in zip(takes, Clamp(), strict=False)}
