"""`MultiheadAttention`: projections to queries, keys and values, attention over them, a projection of what it gives.

Where nothing has to be done to queries and keys in between, attention reads the projection where it lies, and writes
its gradient there; otherwise one launch splits and turns it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch

from te_core.attention import DIMENSIONS, canonical_mask
from te_core.errors import ArgumentError, UnsupportedError
from te_core.quantize.state import GRAD_OUTPUT, OUTPUT
from te_core.spelling import choice_error
from te_torch.attention.dot_product import DotProductAttention
from te_torch.attention.fp8 import kept_high
from te_torch.attention.inference import InferenceParams
from te_torch.attention.masks import AttentionArgumentError
from te_torch.attention.plan import divisors
from te_torch.attention.rope import apply_rotary_pos_emb, split_heads
from te_torch.autocast import precision_now
from te_torch.base.options import check_options, window_of
from te_torch.base.parallel import check_group, compare_options, size_of
from te_torch.base.quantized_init import initialising
from te_torch.base.residual import Branch
from te_torch.base.unit import Unit
from te_torch.carried import carry
from te_torch.export.mode import exporting, not_exported
from te_torch.module_names import next_name, shown, warn_ignored
from te_torch.modules.layernorm_linear import LayerNormLinear
from te_torch.modules.linear import Linear
from te_torch.modules.norm import L2Normalization, LayerNorm, RMSNorm
from te_torch.parallel.overlap import flags_of, projections_of
from te_torch.runtime import default_device, nested
from te_torch.transformer.handed import (
    PROJECTIONS,
    HandOver,
    begin_alike,
    handed_at_trace,
    handed_in,
    is_a,
    is_plainly_called,
)

ATTENTION_TYPES = ("self", "cross")
_QK_NORMS = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
QK_NORMS = ("L2Normalization", *_QK_NORMS)


_NOTHING = HandOver()
_attention = DotProductAttention.forward
_IGNORED = (
    "encoder_output is ignored: self attention looks at hidden_states alone. To do: leave it out, or pass "
    "attention_type='cross' to the constructor"
)
_wrong = partial(ArgumentError, "MultiheadAttention.forward")


def head_sizes(operation: str, hidden: int, heads: int, groups: int | None, channels: int | None) -> tuple[int, int]:
    """(groups, width of a head), once it is clear that these sizes make whole heads."""
    groups = heads if groups is None else groups
    if heads % groups:
        got, do = f"{heads} heads in num_gqa_groups={groups}", "correct it"
        allowed = f"a number of groups that divides them: {divisors(heads, groups)}"
    elif not channels and hidden % heads:
        got = f"hidden_size={hidden} in num_attention_heads={heads}"
        allowed = f"a number of heads that divides it ({divisors(hidden, heads)}), or kv_channels"
        do = "correct the heads, or say how wide one is: kv_channels"
    else:
        return groups, channels or hidden // heads
    raise AttentionArgumentError(operation, got, allowed, do)


def tell_parts(module: torch.nn.Module, method: str, *arguments: Any) -> None:
    """Call a method of all modules below that have it."""
    for child in list(module.modules())[1:]:
        if hasattr(child, method):
            getattr(child, method)(*arguments)


def for_part(part: type, given: dict[str, Any], own: set[str]) -> dict[str, Any]:
    """Of the options that a module was given those that a part of it has too, without its `own`."""
    names = signature(part.__init__).parameters.keys() - own  # type: ignore[misc]
    return {name: value for name, value in given.items() if name in names}


def check_qkv_whole(operation: str, fused: bool, accumulates: bool) -> None:
    """Fused weight gradients and quantized weights need the weights of queries, keys and values in one piece."""
    if accumulates and not fused:
        raise ArgumentError(
            operation,
            "fuse_wgrad_accumulation with fuse_qkv_params=False",
            "fuse_qkv_params=True: a fused gradient needs query, key and value weights in one piece",
            "pass fuse_qkv_params=True",
        )
    if initialising() and not fused:
        raise UnsupportedError(
            operation,
            "fuse_qkv_params=False inside quantized_model_init",
            "fuse_qkv_params=True: query, key and value weights are held as one quantized tensor",
            "pass fuse_qkv_params=True, or construct the layer outside",
        )


class MultiheadAttention(Unit):
    """Attention of `num_attention_heads` heads between projections, in the precision of the active `autocast`
    region.

    Raises:
        ArgumentError: An argument has a value that is not allowed, or the heads do not fit.

    Example:
        attention = te.MultiheadAttention(256, 4, fuse_qkv_params=True, qkv_format="bshd", device="cpu")
        y = attention(torch.randn(2, 16, 256))  # [2, 16, 256]
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        check_options("MultiheadAttention", given)
        column, row = projections_of(flags_of("MultiheadAttention", given))
        super().__init__()
        self.hidden_size, self.num_attention_heads = sizes = hidden_size, num_attention_heads
        self.num_gqa_groups, self.kv_channels = head_sizes("MultiheadAttention", *sizes, num_gqa_groups, kv_channels)
        self._spread_over(tp_size, tp_group, sequence_parallel, set_parallel_mode)
        self.attention_type, self.qkv_format, self.layer_number = attention_type, qkv_format, layer_number
        self.input_layernorm, self.return_bias = input_layernorm, return_bias
        self.return_layernorm_output = return_layernorm_output
        # Rows of separate parameters lie one parameter behind the other.
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.rotary_pos_interleaved, self.qk_norm_before_rope = rotary_pos_interleaved, qk_norm_before_rope
        self.name = next_name() if name is None else name
        self._add_qk_norms(qk_norm_type, qk_norm_eps, params_dtype, device)
        team: dict[str, Any] = {"tp_group": tp_group if set_parallel_mode else None, "tp_size": self.tp_size}
        alike = ("bias", "fuse_wgrad_accumulation", "params_dtype", "get_rng_state_tracker", "device")
        linear = {name: given[name] for name in alike} | team | {"sequence_parallel": self.sequence_parallel}
        norm = {"eps": layernorm_epsilon, "normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
        self._add_projections(fuse_qkv_params, norm, {**linear, **column, "init_method": init_method})
        core = for_part(DotProductAttention, given, {"self", "sequence_parallel", "tp_group", "tp_size"})
        core |= {"kv_channels": self.kv_channels, "num_gqa_groups": self.num_gqa_groups}
        core |= {"name": f"{self.name}.core_attention", **team}
        # A learnable softmax has a parameter.
        self.core_attention = DotProductAttention(**core).to(device or default_device())
        self.proj = Linear(
            num_attention_heads * self.kv_channels,
            hidden_size,
            init_method=output_layer_init_method,
            return_bias=return_bias,
            name=f"{self.name}.proj",
            parallel_mode="row" if set_parallel_mode else None,
            **linear | row,
        )
        compare_options(self, given)

    def _add_qk_norms(self, kind: str | None, eps: float, params_dtype: Any, device: Any) -> None:
        if kind is not None and kind not in QK_NORMS:
            raise choice_error("MultiheadAttention", "qk_norm_type", kind, (None, *QK_NORMS))
        self.q_norm: Any = None
        self.k_norm: Any = None
        if kind == "L2Normalization":  # no parameters, so one serves both
            self.q_norm = self.k_norm = L2Normalization(eps=eps)
        elif kind is not None:
            # They see the heads of one rank only: as with parts of a sequence, gradients are to be summed.
            marked = True if self.tp_size > 1 else None
            self.q_norm, self.k_norm = (
                _QK_NORMS[kind](self.kv_channels, eps=eps, dtype=params_dtype, device=device, sequence_parallel=marked)
                for _ in range(2)
            )

    def _add_projections(self, fused: bool, norm: dict[str, Any], linear: dict[str, Any]) -> None:
        """The modules that make queries, keys and values, under their documented names."""
        if self.attention_type not in ATTENTION_TYPES:
            asked = self.attention_type
            raise choice_error("MultiheadAttention", "attention_type", asked, ATTENTION_TYPES, AttentionArgumentError)
        check_qkv_whole("MultiheadAttention", fused, linear["fuse_wgrad_accumulation"])
        q, kv = self.num_attention_heads * self.kv_channels, self.num_gqa_groups * self.kv_channels
        width, name = self.hidden_size, self.name
        rows: dict[str, int] = {"query_": q, "key_": kv, "value_": kv}
        if self.attention_type == "cross":
            rows = {"query_": q}
        total = sum(rows.values())
        linear = {**linear, "parallel_mode": "column" if self.set_parallel_mode else None}
        named = {"parameters_split": None if fused else rows, **linear}
        if self.input_layernorm:
            options = {**named, **norm, "return_layernorm_output": self.return_layernorm_output}
            if self.attention_type == "self":
                self.layernorm_qkv = LayerNormLinear(width, total, name=f"{name}.layernorm_linear_qkv", **options)
            else:
                self.layernorm_query = LayerNormLinear(width, total, name=f"{name}.layernorm_linear_q", **options)
        elif self.attention_type == "self":
            self.qkv = Linear(width, total, name=f"{name}.linear_qkv", **named)
        else:
            self.query_layer = Linear(width, total, **named)
        if self.attention_type == "cross":  # behind the queries, as documented: optimizers number parameters
            split = None if fused else {"key_": kv, "value_": kv}
            self.key_value = Linear(width, 2 * kv, parameters_split=split, name=f"{name}.linear_kv", **linear)
        for part in self.children():
            part.hands_over = True  # type: ignore[assignment]
        self.register_load_state_dict_post_hook(begin_alike)

    # --------------------------------------------------------------------------------------- groups

    def _spread_over(self, tp_size: int | None, tp_group: Any, sequence: bool | None, parallel: bool) -> None:
        """Take over how many ranks the heads are spread over, and how many of them this one has."""
        operation = "MultiheadAttention"
        self.set_parallel_mode = bool(parallel)
        self.tp_size = size_of(operation, tp_size, tp_group) if parallel else 1
        self.sequence_parallel = bool(sequence) and self.tp_size > 1
        counts = self.num_attention_heads, self.num_gqa_groups
        if any(n % self.tp_size for n in counts):
            raise AttentionArgumentError(
                operation,
                f"{counts[0]} heads in num_gqa_groups={counts[1]} over {self.tp_size} ranks",
                "heads and groups that tp_size divides",
                "correct it",
            )
        self.num_attention_heads_per_partition, self.num_gqa_groups_per_partition = (n // self.tp_size for n in counts)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the tensor-parallel group of every part, before the first forward."""
        if not self.set_parallel_mode:
            return
        if tp_group is not None:
            check_group("MultiheadAttention.set_tensor_parallel_group", tp_group, self.tp_size)
        tell_parts(self, "set_tensor_parallel_group", tp_group)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the group over which sequences are spread: see DotProductAttention."""
        self.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    # -------------------------------------------------------------------------------------- forward

    def forward(
        self,
        hidden_states: torch.Tensor | Branch,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
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
    ) -> Any:
        """out [*, hidden_size], (out, bias), (out, norm output) or (out, bias, norm output), as the constructor asked.

        hidden_states is [s, b, H], [b, s, H] or [t, H] by `qkv_format`; `encoder_output`, which keys and values of
        cross attention are made of, likewise. The other arguments are those of DotProductAttention. hidden_states may
        be a `Branch`: an input that is yet to be added to the residual. The sum then comes last.
        """
        if attn_mask_type is not None:
            attn_mask_type = canonical_mask("MultiheadAttention.forward", attn_mask_type)
        inputs = self._inputs(hidden_states, encoder_output, inference_params)
        angles = _pair(rotary_pos_emb)
        watched = self._watched()
        between = rotary_pos_emb is not None or inference_params is not None or watched
        handed = self._hand_over(between, attention_mask is not None or watched)
        options: dict[str, Any] = {
            "attention_mask": attention_mask,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_kv": max_seqlen_kv,
            "attn_mask_type": attn_mask_type,
            "window_size": None if window_size is None else window_of("MultiheadAttention.forward", window_size),
            "bottom_right_diagonal": bottom_right_diagonal,
            "checkpoint_core_attention": checkpoint_core_attention,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "fast_zero_fill": fast_zero_fill,
            "inference_params": inference_params,
            "pad_between_seqs": pad_between_seqs,
            "fp8_output": handed.out,
        }
        context, *returned = self._attend(inputs, is_first_microbatch, handed, angles, options, watched)
        if isinstance(hidden_states, Branch) and not self.input_layernorm:
            returned = [inputs[0]]
        out = self._part("proj")(context, is_first_microbatch, False, handed.grad)
        if self._frees_parameters and self.return_bias:
            out = out[0], out[1].clone()  # the projection's parameter is gone as this forward ends
        outputs = (*(out if self.return_bias else (out,)), *returned)
        return outputs if len(outputs) > 1 else outputs[0]

    def _inputs(
        self,
        hidden_states: torch.Tensor | Branch,
        encoder_output: torch.Tensor | None,
        inference: InferenceParams | None,
    ) -> tuple[Any, ...]:
        """What queries are projected from, and in cross attention what keys and values are."""
        x = hidden_states.x if isinstance(hidden_states, Branch) else hidden_states
        if not isinstance(x, torch.Tensor):
            raise _wrong(f"hidden_states of type {type(x).__name__}", "a tensor", "pass a tensor")
        if encoder_output is not None and not isinstance(encoder_output, torch.Tensor):
            raise _wrong(f"encoder_output of type {type(encoder_output).__name__}", "a tensor", "pass a tensor")
        if x.ndim != len(self.qkv_format) - 1:
            if x.is_nested:
                raise nested("MultiheadAttention.forward")
            allowed = f"{len(self.qkv_format) - 1} dimensions in {self.qkv_format}"
            raise _wrong(f"hidden_states of shape {tuple(x.shape)}", allowed, "correct the shape, or qkv_format")
        if self.attention_type == "cross" and encoder_output is None:
            allowed = "encoder_output, which keys and values are made of"
            raise _wrong("attention_type='cross' without encoder_output", allowed, "pass encoder_output")
        if inference is not None and self.layer_number is None:
            got, do = "inference_params for a layer without layer_number", "pass layer_number to the constructor"
            raise _wrong(got, "a layer_number of its own for each layer that shares a cache", do)
        if isinstance(hidden_states, Branch) and not self.input_layernorm:
            hidden_states = hidden_states.added()  # there is no norm that would
        if self.attention_type == "cross":
            return hidden_states, encoder_output
        if encoder_output is not None:
            warn_ignored(self, _IGNORED)
        return (hidden_states,)

    def _hand_over(self, between: bool, moved: bool) -> HandOver:
        """What this call leaves in FP8, by the precision of the region.

        `between`: keys are turned, or cached; `moved`: tokens of what comes out may have to be moved, or it is watched.
        """
        number, _, _, tracing, _ = precision_now(self._modules["proj"], peek=True)
        if not number:
            return _NOTHING
        between = between or self.q_norm is not None
        if tracing:
            known = all([is_plainly_called(self._modules.get(name)) for name in PROJECTIONS])
            if exporting.on:  # padding is read where it lies
                handed = HandOver(*handed_at_trace(number, between, False))
                if (known and not self._watched()) or not (handed.qkv or handed.out):
                    return handed
                got = "FP8 between the parts of a MultiheadAttention, of which one has hooks or is a module of yours"
                do = "export with fp8_dpa=False and fp8_mha=False"
                do = f"remove the hooks, merge an adapter into its weight, or {do}"
                raise not_exported(got, "its own parts without hooks", do)
            known = known and not moved
            # Queries that are interleaved with several groups are copied apart, and their gradients are plain.
            heads, groups = self.num_attention_heads_per_partition, self.num_gqa_groups_per_partition
            straight = not self.qkv_weight_interleaved or groups in (1, heads)
            of_self = self.attention_type == "self" and straight
            found = handed_at_trace(number, between, of_self) if known else _NOTHING
            return HandOver(*found)
        qkv, out, grad = handed_in(number, between)
        core = self._part("core_attention")
        if out and isinstance(core, DotProductAttention) and core.inspector is not None:
            forward, backward = kept_high(core, number)
            qkv, out, grad = qkv and not forward, out and not forward, grad and not backward
        return HandOver(qkv, out, grad)

    def extra_repr(self) -> str:
        """What a printed module shows; its parts show the rest."""
        return shown(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_gqa_groups=self.num_gqa_groups,
            kv_channels=self.kv_channels,
            attention_type=self.attention_type,
            layer_number=self.layer_number,
        )

    def _part(self, name: str) -> Any:
        """A module of this one. Module.__getattr__ would cost a microsecond."""
        return self._modules[name]

    # ------------------------------------------------------------------- queries, keys and values

    def _attend(
        self,
        inputs: tuple[Any, ...],
        first_microbatch: bool | None,
        handed: HandOver,
        angles: tuple[torch.Tensor | None, torch.Tensor | None],
        options: dict[str, Any],
        watched: bool,
    ) -> tuple[torch.Tensor, ...]:
        """The attention's output, and what the projection returns beside its own: norm output, stream."""
        q: Any
        packed: Any
        hidden, *encoded = inputs
        places, interleaved = options, self.qkv_weight_interleaved
        if encoded:
            packed = self.key_value(*encoded, first_microbatch, fp8_output=handed.qkv)
            project = self.layernorm_query if self.input_layernorm else self.query_layer
            q, *returned = _listed(project(hidden, first_microbatch, fp8_output=handed.qkv))
            if isinstance(handed.qkv, str):
                q = carry(q, handed.qkv, (project.fp8_state, OUTPUT, GRAD_OUTPUT))
                packed = carry(packed, handed.qkv, (self.key_value.fp8_state, OUTPUT, GRAD_OUTPUT))
            q = q.view(*q.shape[:-1], self.num_attention_heads_per_partition, self.kv_channels)
            # A cache says where queries stand; it keeps nothing of encoder_output.
            options = {**options, "inference_params": None}
        else:
            project = self._part("layernorm_qkv" if self.input_layernorm else "qkv")
            packed, *returned = _listed(project(hidden, first_microbatch, handed.qkv))
            if isinstance(handed.qkv, str):
                packed = carry(packed, handed.qkv, (project.fp8_state, OUTPUT, GRAD_OUTPUT))
        touched = watched or self.q_norm is not None or angles[0] is not None or angles[1] is not None
        if not touched and options["inference_params"] is None:  # attention reads the projections as they are
            operands = (q, packed) if encoded else (packed, None)
            return self._part("core_attention")._attend_packed(*operands, interleaved, **options), *returned
        early = self.q_norm is not None and self.qk_norm_before_rope
        turns = (None, None) if early else angles
        if encoded:
            where = self._places(places, "q", q), self._places(options, "kv", packed)
            q = self._turn(q, turns[0], where[0])
            k, v = self._split(packed, 0, (None, turns[1]), where[1])
        else:
            where = (self._places(options, "q", packed),) * 2
            q, k, v = self._split(packed, self.num_attention_heads_per_partition, turns, where[0])
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if early:
            q, k = (self._turn(t, freqs, place) for t, freqs, place in zip((q, k), angles, where, strict=True))
        return self.core_attention(q, k, v, **options), *returned

    def _watched(self) -> bool:
        """Whether the attention has hooks or a forward of the user's, or is another module: these get q, k and v."""
        core = self._modules["core_attention"]
        assert core is not None
        hooks = core._forward_hooks or core._forward_pre_hooks or core._backward_hooks or core._backward_pre_hooks
        if hooks or "forward" in core.__dict__ or type(core).forward is not _attention:
            return True
        return type(core) is not DotProductAttention and not is_a(core, DotProductAttention)

    def _split(
        self,
        packed: torch.Tensor,
        heads: int,
        angles: tuple[torch.Tensor | None, torch.Tensor | None],
        where: dict[str, Any],
    ) -> tuple[torch.Tensor, ...]:
        return split_heads(
            packed,
            *angles,
            heads=heads,
            groups=self.num_gqa_groups_per_partition,
            head_dims=(self.kv_channels,) * 3,
            interleaved_groups=self.qkv_weight_interleaved,
            fmt=self.qkv_format,
            **where,
        )

    def _turn(self, t: torch.Tensor, freqs: torch.Tensor | None, where: dict[str, Any]) -> torch.Tensor:
        if freqs is None:
            return t
        return apply_rotary_pos_emb(t, freqs, tensor_format=self.qkv_format, fused=True, **where)

    def _places(self, options: dict[str, Any], which: str, t: torch.Tensor) -> dict[str, Any]:
        """Where in their sequences the tokens t of queries ("q") or of keys and values ("kv") stand."""
        cu, padded = options[f"cu_seqlens_{which}"], options[f"cu_seqlens_{which}_padded"]
        between = options["pad_between_seqs"]
        if padded is not None and (between is None or between):
            cu = padded
        starts, inference = None, options["inference_params"]
        if inference is not None:
            cu = inference.cu_seqlens_q if cu is None else cu
            batch = DIMENSIONS[self.qkv_format][0]
            rows = cu.shape[0] - 1 if batch is None else t.shape[batch]
            starts = inference.get_seqlens_pre_step()[:rows]
            if starts.shape[0] < rows:
                got, allowed = f"{rows} sequences with inference_params", f"at most max_batch_size={starts.shape[0]}"
                raise _wrong(got, allowed, "make room for more in InferenceParams")
        # Over how many ranks sequences lie cut, and which of these this is.
        static: Any = getattr(self._modules["core_attention"], "_static", None)
        context = None if static is None else static.context
        spread = {} if context is None else {"cp_size": context.size, "cp_rank": static.context_rank}
        return {
            "interleaved": self.rotary_pos_interleaved,
            "cu_seqlens": cu if self.qkv_format == "thd" else None,
            "start_positions": starts,
            **spread,
        }


def _pair(angles: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The angles of queries and of keys."""
    if angles is None or isinstance(angles, torch.Tensor):
        return angles, angles
    if not isinstance(angles, (tuple, list)):
        got = f"a rotary_pos_emb of type {type(angles).__name__}"
    elif len(angles) != 2:
        got = f"a rotary_pos_emb of {len(angles)} tensors"
    elif all(t is None or isinstance(t, torch.Tensor) for t in angles):
        return angles[0], angles[1]
    else:
        got = f"a rotary_pos_emb of {' and '.join(type(t).__name__ for t in angles)}"
    allowed = "angles [positions, 1, 1, channels]: a tensor for both, or one for queries and one for keys"
    raise _wrong(got, allowed, "pass what RotaryPositionEmbedding gives")


def _listed(result: Any) -> tuple[torch.Tensor, ...]:
    """The results of a module that returns one or several."""
    return result if isinstance(result, tuple) else (result,)
