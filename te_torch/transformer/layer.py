"""`TransformerLayer`: self attention, cross attention in a decoder, and an MLP, each added to what it read.

x1 = x  + drop_path(dropout(attention(norm(x)) + bias))
x2 = x1 + dropout(cross(norm(x1)) + bias)                       (decoder)
y  = x2 + drop_path(dropout(mlp(norm(x2)) + bias))
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from te_core.attention import canonical_mask
from te_core.errors import ArgumentError
from te_core.spelling import choice_error
from te_core.tape import taped
from te_torch import offloading
from te_torch.attention import choose, env
from te_torch.attention.inference import InferenceParams
from te_torch.autocast import Now
from te_torch.base.graph import GraphPlan, composed
from te_torch.base.module import BaseModule
from te_torch.base.options import check_options, window_of
from te_torch.base.parallel import compare_options
from te_torch.base.residual import Branch, bias_dropout_add
from te_torch.base.unit import Unit
from te_torch.draws import random_pair
from te_torch.forks import Fork, fork_of, uniform, uniform_in
from te_torch.module_names import next_name, shown, warn_ignored
from te_torch.modules.layernorm_mlp import LayerNormMLP
from te_torch.modules.norm import LayerNorm, RMSNorm
from te_torch.noting import noting
from te_torch.parallel.overlap import Flags, flags_of
from te_torch.runtime import amp_cast
from te_torch.surroundings import dispatch_modes
from te_torch.transformer.multihead import MultiheadAttention, check_qkv_whole, for_part, head_sizes, tell_parts

LAYER_TYPES = ("encoder", "decoder")
_NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
_IGNORED = (
    "encoder_output is ignored: an encoder layer has no cross attention. To do: leave it out, or pass "
    "layer_type='decoder' to the constructor"
)
_LATE = "apply_residual_connection_post_layernorm"
#: Options that a part has too, and does not get as they are.
_OWN = {"self", "name", "window_size", "bottom_right_diagonal", "seq_length", "micro_batch_size", *Flags._fields}

#: Which of forward's arguments behind the first are tensors, or two; and which of them are lengths.
_TENSORS, _LENGTHS = (0, 4, 5, 12, 14, 15, 16, 17, 18, 19), (16, 17, 18, 19)


class DropPath(torch.nn.Module):
    """Zeroes whole samples (of the first dimension) with probability drop_prob in training, and scales up the rest."""

    def __init__(self, drop_prob: float = 0.0, fork: Fork | None = None) -> None:
        super().__init__()
        self.drop_prob = drop_prob
        self._fork = fork  # of an RNG tracker; None: torch's own generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, each sample either 0 or x / (1 - drop_prob)."""
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1.0 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        subject = shape, x.device
        numbers = uniform(subject) if self._fork is None else uniform_in(self._fork, *subject)
        kept = numbers < keep
        scaled = x / keep if keep else x  # a division by zero would leave its NaN in the gradient
        return torch.where(kept, scaled, torch.zeros((), dtype=x.dtype, device=x.device))

    def extra_repr(self) -> str:
        """What a printed module shows."""
        return f"drop_prob={self.drop_prob}"


class TransformerLayer(Unit):
    """One layer of a Transformer, in the precision of the active `autocast` region.

    It runs as one call with one node of autograd where nothing stands between its parts
    (te_torch/base/graph.py). With `one_node = False`, an attribute to be set at any time, the parts always run
    one by one: gradients of a part then arrive before those of the part before it are computed.

    Raises:
        ArgumentError: An argument has a value that is not allowed, or the heads do not fit.

    Example:
        from te_torch.recipe import Float8CurrentScaling

        layer = te.TransformerLayer(256, 1024, 4, attn_input_format="bshd", fuse_qkv_params=True, device="cpu")
        with te.autocast(recipe=Float8CurrentScaling(), emulate=True):
            y = layer(torch.randn(2, 16, 256))  # [2, 16, 256]
    """

    one_node = True
    _in_regions = _has_parts = _reads_settings = True
    _rows: int | None = None  # of the sequence that this rank is to be given

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        check_options("TransformerLayer", given)
        # Single overlaps (ub_overlap_ag ...) mean something only with ub_tp_comm_overlap.
        flags = flags_of("TransformerLayer", given, on=bool(ub_tp_comm_overlap))
        super().__init__()
        self.name = next_name() if name is None else name
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.num_attention_heads, self.layer_type, self.layer_number = num_attention_heads, layer_type, layer_number
        self.self_attn_mask_type = canonical_mask("TransformerLayer", self_attn_mask_type, "self_attn_mask_type")
        self.enc_dec_attn_mask_type = canonical_mask(
            "TransformerLayer", enc_dec_attn_mask_type, "enc_dec_attn_mask_type"
        )
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.parallel_attention_mlp, self.output_layernorm = parallel_attention_mlp, output_layernorm
        self.hidden_dropout, self.use_bias = hidden_dropout, bias
        _check_options(given)
        # What is dropped of the stream is the same on all tensor-parallel ranks, unless each has tokens of its own.
        self._fork = fork_of(get_rng_state_tracker, None) if sequence_parallel else None
        self.drop_path = DropPath(drop_path_rate, self._fork) if drop_path_rate > 0 else None
        self._add_parts(given, {} if flags is None else flags._asdict())
        ranks = self.self_attention.tp_size
        if sequence_parallel and seq_length is not None and ranks > 1 and attn_input_format == "sbhd":
            self._rows = seq_length // ranks
        compare_options(self, {k: v for k, v in given.items() if k not in Flags._fields})

    def _add_parts(self, given: dict[str, Any], flags: dict[str, Any]) -> None:
        """The modules that the layer is made of, by what its constructor was given, and which GEMMs overlap."""
        late = given[_LATE]
        # Parallel branches return no bias: one residual step serves both.
        own = {"return_bias": not self.parallel_attention_mlp, **flags}
        attention = for_part(MultiheadAttention, given, _OWN) | own | {"qkv_format": given["attn_input_format"]}
        self.self_attention = MultiheadAttention(
            attn_mask_type=self.self_attn_mask_type,
            window_size=given["window_size"],
            bottom_right_diagonal=given["bottom_right_diagonal"],
            input_layernorm=not self.output_layernorm,
            return_layernorm_output=late and not self.output_layernorm,
            name=f"{self.name}.self_attention",
            **attention,
        )
        if self.layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                attn_mask_type=self.enc_dec_attn_mask_type,
                window_size=given["enc_dec_window_size"],
                bottom_right_diagonal=given["enc_dec_bottom_right_diagonal"],
                attention_type="cross",
                input_layernorm=True,
                return_layernorm_output=late,
                name=f"{self.name}.inter_attention",
                **attention,
            )
        self.layernorm_mlp = LayerNormMLP(
            eps=given["layernorm_epsilon"],
            return_layernorm_output=late,
            name=f"{self.name}.layernorm_mlp",
            **for_part(LayerNormMLP, given, _OWN) | own,
        )
        if self.output_layernorm:
            self.layernorm = _NORMS[given["normalization"]](
                self.hidden_size,
                eps=given["layernorm_epsilon"],
                zero_centered_gamma=given["zero_centered_gamma"],
                dtype=given["params_dtype"],
                device=given["device"],
                sequence_parallel=given["sequence_parallel"],
            )

    # --------------------------------------------------------------------------- groups and FP8 state

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the tensor-parallel group of every part, before the first forward."""
        for part in self.children():
            if isinstance(part, MultiheadAttention | LayerNormMLP):
                part.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the group over which sequences are spread, in every attention."""
        tell_parts(self, "set_context_parallel_group", cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def reset_fp8_meta_tensors(self) -> None:
        """Start the scales and histories of every part anew."""
        tell_parts(self, "reset_fp8_meta_tensors")

    def need_backward_dw(self) -> bool:
        """Whether `backward_dw()` has to be called after backward: a part puts its weight gradients off."""
        return any(part.need_backward_dw() for part in self._linears())

    def backward_dw(self) -> None:
        """Compute the weight gradients that parts with `delay_wgrad_compute` put off, the last part's first."""
        for part in reversed(self._linears()):
            part.backward_dw()

    def _linears(self) -> list[BaseModule]:
        return [part for part in self.modules() if isinstance(part, BaseModule)]

    # -------------------------------------------------------------------------------------- forward

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> torch.Tensor:
        """The layer's output, of the shape of hidden_states: [s, b, H], [b, s, H] or [t, H] by `attn_input_format`.

        `encoder_output` is what a decoder's cross attention looks at. The other arguments are those of
        MultiheadAttention, `enc_dec_*` for cross attention; self attention takes cu_seqlens_q for its keys too.
        """
        operation = "TransformerLayer.forward"
        if window_size is not None:
            window_size = window_of(operation, window_size)
        if enc_dec_window_size is not None:
            enc_dec_window_size = window_of(operation, enc_dec_window_size, "enc_dec_window_size")
        own = attention_mask, self_attn_mask_type, window_size, bottom_right_diagonal
        cross = encoder_output, enc_dec_attn_mask, enc_dec_attn_mask_type
        band = enc_dec_window_size, enc_dec_bottom_right_diagonal
        how = is_first_microbatch, checkpoint_core_attention, inference_params, rotary_pos_emb
        bias = core_attention_bias_type, core_attention_bias, alibi_slopes
        lengths = cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv
        given: tuple[Any, ...] = (*own, *cross, *band, *how, *bias, *lengths, fast_zero_fill, pad_between_seqs)
        if not self.one_node or offloading.active.context is not None or inference_params is not None:
            return self._run_parts(hidden_states, given)
        inputs, options = (hidden_states,), given
        present = [place for place in _TENSORS if given[place] is not None]
        if present:
            each = [given[p] if isinstance(given[p], (tuple, list)) else (given[p],) for p in present]
            inputs = (hidden_states, *[t for some in each for t in some])
            if not all([isinstance(t, torch.Tensor) for t in inputs]):
                return self._run_parts(hidden_states, given)  # which says what is wrong
            if any([p in _LENGTHS for p in present]) and self._looks_at_lengths(given, max_seqlen_q, max_seqlen_kv):
                return self._run_parts(hidden_states, given)
            # What the parts make of tensors depends on which are there, and on which of them are one.
            shared = tuple([next(i for i, other in enumerate(inputs) if other is t) for t in inputs])
            there = tuple([(place, len(some)) for place, some in zip(present, each, strict=True)])
            options = (*[None if place in present else value for place, value in enumerate(given)], there, shared)
        y: torch.Tensor = self._call(inputs, options)
        return y

    def _looks_at_lengths(self, given: tuple[Any, ...], max_q: int | None, max_kv: int | None) -> bool:
        """Whether attention reads values of lengths: the longest where nobody says it, and all of them on a CPU."""
        unknown = max_q is None or (self.layer_type == "decoder" and max_kv is None)
        packed = self._modules["self_attention"].qkv_format == "thd"  # type: ignore[union-attr]
        return (packed and unknown) or any([given[p] is not None and given[p].is_cpu for p in _LENGTHS])

    def _unplanned(self, inputs: tuple[Any, ...], options: tuple[Any, ...], now: Now) -> Any:
        """Run the parts, and see whether they can run as one from now on."""
        with noting.begun() as notes:
            y = self._traced(inputs, options[0])
        made = composed(self, inputs, y, notes) if taped.when() != "never" and not dispatch_modes() else None
        if made is not None:
            plan = GraphPlan.of(self, made, inputs, options, now)
            if plan is not None:
                self._plan_first(plan)
        return y

    def _settings(self) -> Any:
        return env.settings(), choose.generation[0]

    def _traced(self, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
        x, *tensors = inputs
        given = [*options[: len(_Arguments._fields)]]
        for place, count in options[len(given)] if tensors else ():
            given[place], tensors = tensors[0] if count == 1 else tuple(tensors[:count]), tensors[count:]
        return self._run_parts(x, tuple(given))

    def _run_parts(self, hidden_states: torch.Tensor, given: tuple[Any, ...]) -> torch.Tensor:
        """The layer's output, part by part; `given`: forward's other arguments."""
        g: Any = _Arguments(*given)
        operation = "TransformerLayer.forward"
        mask_type, enc_dec_mask_type = (
            canonical_mask(operation, getattr(g, name) or getattr(self, name), name)
            for name in ("self_attn_mask_type", "enc_dec_attn_mask_type")
        )
        if g.attention_mask is not None or g.enc_dec_attn_mask is not None:
            _check_masks(operation, attention_mask=g.attention_mask, enc_dec_attn_mask=g.enc_dec_attn_mask)
        if self.layer_type == "decoder" and g.encoder_output is None:
            raise ArgumentError(
                operation, "a decoder layer without encoder_output", "encoder_output", "pass encoder_output"
            )
        if self.layer_type != "decoder" and g.encoder_output is not None:
            warn_ignored(self, _IGNORED)
        rows = self._rows if g.inference_params is None else None
        if rows is not None and hidden_states.shape[0] > rows:
            raise ArgumentError(
                "TransformerLayer.forward",
                f"hidden_states of shape {tuple(hidden_states.shape)} with sequence parallelism",
                f"at most this rank's {rows} rows of the sequence (seq_length)",
                "scatter the sequence over the ranks, or correct seq_length",
            )
        if (context := offloading.active.context) is not None:
            context.transformer_layer_begins()
        x = amp_cast(hidden_states) if torch._C._is_any_autocast_enabled() else hidden_states
        # Each part gets what it reads as a `Branch`: its norm forms the sum.
        attended = self._attend("self_attention", Branch(x), g, mask_type)
        mlp: Any = self._modules["layernorm_mlp"]  # Module.__getattr__ would cost a microsecond
        if self.parallel_attention_mlp:
            out, x = attended
            other, x = mlp(Branch(x), g.is_first_microbatch)
            both = bias_dropout_add(other, None, out, 0.0)
            return self._added((both, None, x), self.drop_path).added()
        read = self._added(attended, self.drop_path)
        if self.layer_type == "decoder":
            read = self._added(self._attend("inter_attention", read, g, enc_dec_mask_type), None)
        y = self._added(mlp(read, g.is_first_microbatch), self.drop_path).added()
        return self.layernorm(y) if self.output_layernorm else y

    def _attend(self, name: str, read: Branch, g: Any, mask_type: str) -> Any:
        """What self attention returns, or a decoder's cross attention, which looks at encoder_output."""
        part: Any = self._modules[name]
        own: tuple[Any, ...] = g.attention_mask, None, mask_type, g.window_size, g.bottom_right_diagonal
        keys: tuple[Any, ...] = g.cu_seqlens_q, g.cu_seqlens_q_padded, g.max_seqlen_q
        if name == "inter_attention":
            windows = g.enc_dec_window_size, g.enc_dec_bottom_right_diagonal
            own = g.enc_dec_attn_mask, g.encoder_output, mask_type, *windows
            keys = g.cu_seqlens_kv, g.cu_seqlens_kv_padded, g.max_seqlen_kv
        cu_kv, cu_kv_padded, max_kv = keys
        how = g.is_first_microbatch, g.checkpoint_core_attention, g.inference_params, g.rotary_pos_emb
        bias = g.core_attention_bias_type, g.core_attention_bias, g.alibi_slopes
        lengths = g.cu_seqlens_q, cu_kv, g.cu_seqlens_q_padded, cu_kv_padded, g.max_seqlen_q, max_kv
        # By place: keyword arguments, which a module's call packs anew twice, would cost 5 us.
        return part(read, *own, *how, *bias, *lengths, g.fast_zero_fill, g.pad_between_seqs)

    def _added(self, returned: Any, drop_path: DropPath | None) -> Branch:
        """residual + drop_path(dropout(output + bias)) of what a part returned: output, bias[, norm output], stream.

        The residual is the norm's output where that is returned, else the stream.
        """
        out, bias, residual = returned[:3]
        bias = bias if self.use_bias else None
        p = self.hidden_dropout if self.training else 0.0
        rng = random_pair(out, self._fork) if p > 0.0 and self._fork is not None else None
        if drop_path is None:
            return Branch(out, residual, bias, p, rng)
        return Branch(residual + drop_path(bias_dropout_add(out, bias, None, p, True, rng)))

    def extra_repr(self) -> str:
        """What a printed module shows; its parts show the rest."""
        return shown(
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            layer_type=self.layer_type,
            layer_number=self.layer_number,
        )


#: Forward's arguments behind the first, in their order.
_Arguments = namedtuple("_Arguments", [*signature(TransformerLayer.forward).parameters][2:])  # type: ignore[misc]


def _check_masks(operation: str, **masks: Any) -> None:
    for name, given in masks.items():
        for mask in given if isinstance(given, tuple | list) else (given,):
            if mask is not None and mask.dtype != torch.bool:
                raise TypeError(f"{operation}: {name} must be boolean, True where masked out, not {mask.dtype}")


def _check_options(given: dict[str, Any]) -> None:
    """The options fit one another."""
    if given["layer_type"] not in LAYER_TYPES:
        raise choice_error("TransformerLayer", "layer_type", given["layer_type"], LAYER_TYPES)
    heads = ("hidden_size", "num_attention_heads", "num_gqa_groups", "kv_channels")
    head_sizes("TransformerLayer", *[given[name] for name in heads])
    others = {"layer_type='decoder'": given["layer_type"] == "decoder"}
    others |= {name: given[name] for name in (_LATE, "output_layernorm")}
    for option, on in others.items():
        if on and given["parallel_attention_mlp"]:
            raise ArgumentError(
                "TransformerLayer",
                f"parallel_attention_mlp with {option}",
                "parallel_attention_mlp in a plain encoder layer",
                "leave one of the two out",
            )
    check_qkv_whole("TransformerLayer", given["fuse_qkv_params"], given["fuse_wgrad_accumulation"])
