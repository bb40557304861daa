"""`LayerNormMLP`: y = act(norm(x) w1^T + b1) w2^T + b2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_core.errors import UnsupportedError
from te_core.layers import mlp as core
from te_core.layers.linear import LinearSpec, Needs
from te_core.ops.activation import GATED, KINDS, Clamp
from te_core.spelling import choice_error
from te_torch.autocast import Now
from te_torch.base.module import normal_init, wants_grad
from te_torch.base.options import check_options
from te_torch.base.plans import Prepared
from te_torch.base.quantized_init import check_recipe_fits
from te_torch.base.residual import Branch, enter_stream, given_of, stream_of
from te_torch.draws import random_pair
from te_torch.export import layers
from te_torch.forks import fork_of
from te_torch.function import Call, of_table, register
from te_torch.modules.layernorm_linear import NormParameters
from te_torch.modules.linear import empty_bias, returned_bias
from te_torch.noting import Drawn
from te_torch.parallel.overlap import flags_of
from te_torch.precisions import draws
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import TO_CORE, check_input, default_device

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


class LayerNormMLP(NormParameters):
    """norm, linear, activation, linear, in the precision of the active `autocast` region.

    Raises:
        ArgumentError: An argument has a value that is not allowed, or sizes do not divide by the ranks.
        UnsupportedError: The activation is not one of those there are.

    Example:
        mlp = te.LayerNormMLP(256, 1024, activation="swiglu", normalization="RMSNorm", device="cpu")
        y = mlp(torch.randn(32, 256))  # [32, 256]
    """

    gemms = 2

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
        place: dict[str, Any] = {
            "dtype": params_dtype or torch.get_default_dtype(),
            "device": device or default_device(),
        }
        self._add_norm(hidden_size, normalization, eps, zero_centered_gamma, **place)
        wide = self.ffn_hidden_size * (2 if self.activation in GATED else 1)
        for which, shape, init in (
            ("fc1", (wide, hidden_size), init_method),
            ("fc2", (hidden_size, self.ffn_hidden_size), output_layer_init_method),
        ):
            self._add_parameter(f"{which}_weight", shape, init or normal_init, **place)
            if bias:
                self._add_parameter(f"{which}_bias", shape[:1], torch.nn.init.zeros_, **place)
            else:
                setattr(self, f"{which}_bias", torch.empty(0, **place))
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
        return {
            "hidden_size": self.hidden_size,
            "ffn_hidden_size": self.ffn_hidden_size,
            "bias": self.use_bias,
            "return_bias": self.return_bias,
            "activation": self.activation,
            "checkpoint": self.checkpoint,
            **super()._options(),
        }

    def forward(self, inp: torch.Tensor | Branch, is_first_microbatch: bool | None = None) -> Any:
        """out, (out, fc2 bias), (out, norm output) or (out, bias, norm output), as the constructor asked.

        `inp` may be a `Branch`: an input that is yet to be added to the residual. The sum then comes last.
        """
        inputs, stream = given_of(inp)
        return self._call(inputs, (is_first_microbatch, stream))

    def _prepare(self, inputs: tuple[Any, ...], options: tuple[Any, ...], now: Now) -> Prepared:
        is_first_microbatch, stream = options
        check_input("LayerNormMLP.forward", inputs[0], self.hidden_size)
        x = inputs[0].dequantize() if isinstance(inputs[0], QuantizedTorch) else inputs[0]
        grad = torch.is_grad_enabled()
        inp, precision, state, recompute = self._enter(x, now)
        dtype = inp.dtype
        gamma, beta = self._norm_parameters(dtype)
        w1, w2 = self._weight("fc1_weight", dtype, precision), self._weight("fc2_weight", dtype, precision, 1)
        b1, b2 = self._bias("fc1_bias", dtype), None if self.return_bias else self._bias("fc2_bias", dtype)
        entry = enter_stream(inputs, stream, inp, grad)
        key = (
            self.recompute_norm_output,
            entry.key,
            precision,
            dtype,
            grad and wants_grad(inp, gamma, beta, *entry.tensors),
            grad and wants_grad(w1),
            grad and wants_grad(b1),
            grad and wants_grad(w2),
            grad and wants_grad(b2),
            self.training,
            None if self.inspector is None else self._watched(precision),
            w1.dtype if self._primary else None,
        )
        rng = random_pair(inp, self._fork) if precision and draws(precision) else None
        weights = self._with_extra(self._weight_names(), is_first_microbatch)
        extra = self._extra(weights, (w1, w2), precision, state, recompute, is_first_microbatch) if weights else None
        named = {"layer_norm_weight": gamma, "layer_norm_bias": beta, "fc1_weight": w1, "fc1_bias": b1}
        named |= {"fc2_weight": w2, "fc2_bias": b2}
        of_named = [None if t is None else name for name, t in named.items()]
        sources = [0, *of_named, None if rng is None else Drawn(self._fork), *entry.sources]
        tensors = inp, *named.values(), rng, *entry.tensors
        return Prepared(self._find_call(key), state, recompute, tensors, sources, extra, weights)

    def _returned(self, outputs: tuple[Any, ...], inputs: tuple[Any, ...]) -> Any:
        if self.return_bias:
            out, *rest = outputs
            bias = self._bias("fc2_bias", out.dtype)
            return out, empty_bias(out) if bias is None else returned_bias(self, bias, ("fc2_bias",)), *rest
        return outputs if len(outputs) > 1 else outputs[0]

    def _bias(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        if not self.use_bias:
            return None
        bias = self._tensor(name)
        return bias if bias.dtype == dtype else bias.to(dtype)

    def _facts(self) -> tuple[Any, ...]:
        clamp = None if self._clamp is None else (self._clamp.limit, self._clamp.alpha, self._clamp.offset)
        return *super()._facts(), self.activation, clamp, self.checkpoint

    def _new_call(self, again: bool, stream: Any, precision: int, dtype: torch.dtype, *key: Any) -> Call:
        before, w1, b1, w2, b2, *_, weight_dtype = key
        fc1 = Needs(before, w1, b1)
        fc2 = Needs(any(fc1), w2, b2)
        kind = None if weight_dtype is None else TO_CORE[weight_dtype]
        rules = [self._precision(precision, gemm) for gemm in range(2)]
        check_recipe_fits(self, rules[0])
        first, second = (
            LinearSpec(TO_CORE[dtype], rule, needs, request, kind, parallel=self._split(mode, rule, name, dtype))
            for rule, needs, request, mode, name in zip(
                rules, (fc1, fc2), self._requests(), self._modes(), ("fc1", "fc2"), strict=True
            )
        )
        spec = core.MLPSpec(
            first,
            second,
            self._norm_spec(dtype),
            self.activation,
            self.return_layernorm_output,
            self._clamp,
            stream_of(stream),
            self.checkpoint and self._inspectors() is None,  # who looks on sees everything once
            bool(again),
            self.return_layernorm_output_gathered and first.parallel is not None,
        )
        return register(MLP, spec, any(fc2), self._inspectors(), self._communicator(first.parallel))

    def _modes(self) -> tuple[str | None, str | None]:
        return ("column", "row") if self.set_parallel_mode else (None, None)


def clamp_of(activation: str, given: dict[str, float] | None) -> Clamp | None:
    """`activation_params` as the activation takes them."""
    takes = CLAMP_NAMES if activation == "clamped_swiglu" else ()
    if set(given or ()) - set(takes):
        raise UnsupportedError(
            "LayerNormMLP",
            f"activation_params={given!r} of {activation}",
            ", ".join(takes) or "none",
            f"leave them out; {', '.join(CLAMP_NAMES)} belong to clamped_swiglu",
        )
    if not takes:
        return None
    return Clamp(*((given or {}).get(name, default) for name, default in zip(CLAMP_NAMES, Clamp(), strict=True)))
