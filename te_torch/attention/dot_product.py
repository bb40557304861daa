"""`DotProductAttention`: one module over all backends. A call's key finds its plan, the plan's backend computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch

from te_core.attention import canonical_mask
from te_core.errors import ArgumentError
from te_core.layers.attention import AttentionInputs
from te_core.precision import AttentionPrecision
from te_torch.attention import choose, env, flash, fused, traced, unfused
from te_torch.attention import fp8 as fp8_attention
from te_torch.attention.compact import fronts, in_front, returned, sums_of
from te_torch.attention.inference import cut_off
from te_torch.attention.inputs import (
    Given,
    autocast,
    check_sums,
    check_types,
    from_cache,
    layer_inputs,
    packed_sequences,
    step,
    with_equal_lengths,
    without_unread_mask,
)
from te_torch.attention.kv_cache import CACHE_FORMAT
from te_torch.attention.layouts import check_packed, heads_of, packed_inputs
from te_torch.attention.masks import check_set_window_size
from te_torch.attention.plan import (
    OPERATION,
    Key,
    Plan,
    Static,
    SumsFact,
    checked_widths,
    fact_of,
    facts_of_plan,
    make_plan,
    request_of,
    schedule_in_words,
    wrong,
)
from te_torch.attention.score_mod import functions, run_graph
from te_torch.autocast import Now, active, precision_now
from te_torch.base.module import BaseModule
from te_torch.base.options import check_values, window_of
from te_torch.base.parallel import check_group, size_of
from te_torch.base.plans import Prepared
from te_torch.doors import either
from te_torch.draws import Repeated
from te_torch.export.handed import Handed
from te_torch.forks import Fork, fork_of
from te_torch.function import register
from te_torch.noting import noting
from te_torch.parallel.context.groups import context_groups
from te_torch.parallel.groups import check_reduction
from te_torch.precisions import precision_of
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import default_device

#: `_attention_backends["backend_selection_requires_update"] = True` makes every module choose anew.
_attention_backends: dict[str, Any] = {"backend_selection_requires_update": False}

_PLANS = 2048  # of a module: packed batches differ in their longest sequence from step to step


class _Asked(threading.local):
    """Whether this thread's forward is to answer with the choice instead of computing."""

    choice = False


_asked = _Asked()


class DotProductAttention(BaseModule):
    """softmax(q k^T scale + bias, over what the mask lets be seen) v, with dropout of the weights while training.

    Raises:
        ArgumentError: An argument has a value that is not allowed.
        NoBackendError: In forward: no backend computes this combination; the error says why each does not.

    Example:
        attention = te.DotProductAttention(num_attention_heads=8, kv_channels=64, qkv_format="bshd")
        q, k, v = (torch.randn(2, 16, 8, 64) for _ in range(3))
        y = attention(q, k, v)  # [2, 16, 512]
    """

    gemms = 3  # two products, and their input from a projection: what FP8 attention has scales for
    module_type = "attention"
    own_precision = _reads_settings = True

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
        *,
        logit_softcap: float = 0.0,
    ) -> None:
        check_values(OPERATION, {k: v for k, v in locals().items() if k not in ("self", "__class__")})
        super().__init__(name)
        self.qkv_format = qkv_format
        self.attn_mask_type = canonical_mask(OPERATION, attn_mask_type)
        self.window_size = check_set_window_size(self.attn_mask_type, window_size)
        self._window = None if window_size is None else self.window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.attention_type = attention_type
        self.attention_dropout = attention_dropout
        self.softmax_type = softmax_type
        self.return_max_logit = return_max_logit
        self.layer_number = 1 if layer_number is None else layer_number
        self.logit_softcap = float(logit_softcap)
        self.tp_size = tp_size = size_of(OPERATION, tp_size, tp_group)
        self.tp_group, self.sequence_parallel = tp_group, sequence_parallel
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        shapes = num_attention_heads, groups, kv_channels, tp_size
        d_qk, d_v = checked_widths(*shapes, attention_type, softmax_type, attention_dropout)
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = d_qk, d_v
        self.softmax_scale = d_qk**-0.5 if softmax_scale is None else float(softmax_scale)
        sizes = int(num_attention_heads) // tp_size, int(groups) // tp_size, int(d_qk), int(d_v)  # of NumPy, maybe
        weights = self.softmax_scale, softmax_type, float(attention_dropout)
        self._static = Static(*sizes, *weights, return_max_logit, self.layer_number, num_attention_heads)
        self._find_place()
        # With sequence parallelism every rank has all heads of its tokens, and dropout of its own anyway.
        self._fork = None if sequence_parallel else fork_of(get_rng_state_tracker, None)
        place: dict[str, Any] = {"dtype": torch.float32, "device": default_device()}
        self.softmax_offset: Any
        if softmax_type == "learnable":
            self._add_parameter("softmax_offset", (self._static.heads,), torch.nn.init.zeros_, **place)
            if tp_size > 1:
                self._mark_parallel(0, "softmax_offset")
        else:
            ones = softmax_type == "off-by-one"
            self.softmax_offset = torch.zeros(self._static.heads, **place) if ones else None
        self._choices: dict[Any, Plan] = {}
        #: Of the last forward, for precision_report(): its plan, and what was quantized how if it was in FP8.
        self._last_plan: Plan | None = None
        self._last_rule: AttentionPrecision | None = None
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def _weight_names(self) -> tuple[str, ...]:
        return ()

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the group over which sequences are spread; None: they are whole on every rank.

        Each sequence is cut into 2 * ranks chunks, of which rank r has chunk r and chunk 2 * ranks - 1 - r. `cp_group`
        is a process group, a mesh of one dimension, or for "a2a+p2p" a list of two: [a2a group, p2p group].
        `cp_global_ranks`, where given, are the global ranks of the groups. `cp_stream` is the second
        stream of a ring's steps, where two streams win time (None: te_core makes its own).
        """
        operation = f"{OPERATION}.set_context_parallel_group"
        self._context = found = context_groups(operation, cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self.cp_comm_type = cp_comm_type
        self._static = self._static._replace(context=found.context, context_rank=found.rank)
        self._choices.clear()

    cp_group = property(
        lambda self: self._context.given[0], doc="The group over which sequences are spread, or the list of two."
    )
    cp_global_ranks = property(lambda self: self._context.given[1], doc="Its global ranks, as they were given.")
    cp_stream = property(lambda self: self._context.given[2], doc="The stream that was given.")

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Remember the group; heads are spread over it by `tp_size`. Its ranks compare what they are called with."""
        self.tp_group = tp_group
        self._find_place()

    def _find_place(self) -> None:
        """Which of all heads this rank has, where a group says so."""
        first, group = 0, self.tp_group
        if self.tp_size > 1 and group is not None:
            check_group(OPERATION, group, self.tp_size)
            first = self._static.heads * torch.distributed.get_rank(group)
        elif self.tp_size > 1:
            first = -1
        self._static = self._static._replace(first_head=first)

    # --------------------------------------------------------------------------------------------- forward

    def forward(
        self,
        query_layer: torch.Tensor | None = None,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool = False,
        num_splits: int = 1,
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: torch.Tensor | None = None,
        kv_layer: torch.Tensor | None = None,
        qkv_interleave_dim: int = -3,
        *,
        torch_score_mod: Any = None,
    ) -> Any:
        """[.., heads * d_v] in the format of q [.., heads, d]; or (that, largest logits [heads]) if asked for.

        Masks are True where something is hidden. `fast_zero_fill` and, without FP8, `bf16_backward` change nothing.
        Functions of the scores: te_torch.attention.score_mod.
        """
        form = self.qkv_format if qkv_format is None else qkv_format
        a, b, c, packing, interleaved = query_layer, key_layer, value_layer, "separate", False
        if qkv_layer is not None or kv_layer is not None:
            layers = qkv_layer, kv_layer, qkv_interleave_dim
            a, b, packing, interleaved = packed_inputs(a, (b, c), *layers, form, inference_params is not None)
        if a is None:
            raise wrong("no queries", "query_layer or qkv_layer", "pass one of them")
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        stepped = None if inference_params is None else step(inference_params, mask_type, self, b, c, form)
        tensors = a, b, c, packing, interleaved, form, attention_mask
        lengths = cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv
        window = None if window_size is None else window_of(f"{OPERATION}.forward", window_size)
        masking = mask_type, window, bottom_right_diagonal, checkpoint_core_attention
        bias = core_attention_bias_type, core_attention_bias, alibi_slopes, pad_between_seqs
        mods = functions(score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors, torch_score_mod)
        output = fp8_output, bf16_backward, num_splits, mods
        given = Given(*tensors, *lengths, *masking, *bias, *output, inference_params is not None)
        if stepped is None:
            return self._attend(given)
        cached = from_cache(given, inference_params, stepped)
        with torch.no_grad():
            found = self._attend(cached)  # attention over a cache keeps nothing for backward, which it has not
        if not torch.is_grad_enabled():
            return found
        return cut_off(found, given.a, given.b, given.c, self.softmax_offset)

    def _attend_packed(
        self,
        a: torch.Tensor,
        b: torch.Tensor | None,
        interleaved: bool,
        qkv_format: str | None = None,
        inference_params: None = None,
        fast_zero_fill: bool = True,
        **options: Any,
    ) -> Any:
        """`forward` of a projection as it is: (qkv [.., row], None) or (q [.., heads, d], kv [.., row]).

        `te_core.layers.attention` says how a row is laid out. The options are forward's keyword arguments.
        """
        form = self.qkv_format if qkv_format is None else qkv_format
        return self._attend(Given(a, b, None, "qkv" if b is None else "kv", interleaved, form, **options))

    def _attend(self, given: Given) -> Any:
        if given.attention_mask is not None:
            given = without_unread_mask(given, self.attn_mask_type)
        if given.packing != "separate":
            packed = given.a if given.b is None else given.b
            check_packed(self._static[:4], packed, given.packing, given.qkv_format)
        if torch._C._is_any_autocast_enabled():
            given = autocast(given)
        if given.qkv_format == "thd":
            given = packed_sequences(given)
        if given.packing == "qkv" and isinstance(given.attention_mask, (tuple, list)):
            # Queries and keys of other lengths, or in other places, are not rows of one tensor any more.
            whole = given.a.dequantize() if isinstance(given.a, (QuantizedTorch, Handed)) else given.a
            q, k, v = heads_of(whole, len(given.qkv_format) - 2, self._static[:4], given.interleaved)
            given = given.but(a=q, b=k, c=v, packing="separate", interleaved=False)
        if self._static.context is not None:
            self._context.check(OPERATION)
        if either(False, True):
            return traced.attention(self, given)
        if not _asked.choice and _is_plain(given):
            if _attention_backends["backend_selection_requires_update"]:
                choose.forget()
                _attention_backends["backend_selection_requires_update"] = False
            return self._call((given.a, given.b, given.c), given[3:])
        return self._decide(given, precision_now(self))

    def _settings(self) -> Any:
        return env.settings(), choose.generation[0]

    def _unplanned(self, inputs: tuple[Any, ...], options: tuple[Any, ...], now: Now) -> Any:
        return self._decide(Given(*inputs, *options[0]), now, (inputs, options))

    def _decide(self, given: Given, now: Now, plain: Any = None) -> Any:
        """What is computed, by whom, and its result. `plain`: what `_call` was given, for whom a plan is kept."""
        scaling = "" if now[2] is None and not now[0] else fp8_attention.scaling_of(now[0])
        if self.inspector is not None:  # in high precision, too: only an answer ends the question
            forward, backward = fp8_attention.kept_high(self, now[0])
            scaling, given = "" if forward else scaling, given.but(bf16_backward=True) if backward else given
        try:
            key = self._key(given, scaling)
        except AttributeError:
            check_types(given)
            raise
        found = self._run(key, given, now)
        if plain is not None and (plan := self._last_plan) and plan.run is fused.run and plan.bare and not key.fp8:
            tensors, (inputs, options) = given[:3], plain
            sources = tuple(None if t is None else i for i, t in enumerate(tensors))
            made = Prepared(plan.call, None, now[1], tensors, sources, shaped=True, last=(("_last_plan", plan),))
            noting.by(self, sources)
            self._plan(made, inputs, options, now)
        return found

    def _run(self, key: Key, given: Given, now: Now | None = None) -> Any:
        if key.form == "thd" and key.cu is not None and not key.cu.shared:
            key = with_equal_lengths(key, given)
        if _asked.choice:
            return self.explain_key(key)
        plan = self._choice(key)
        if plan.prepare.lengths == "given" and not key.cached:
            check_sums(given, self._static.context)
        key, given, orders = in_front(key, given, plan.prepare.lengths)
        modifier = given.functions
        if orders is not None:
            plan = self._choice(key)
            if modifier is not None:  # it is told where tokens stood
                q_idx, kv_idx = fronts(orders)
                modifier = modifier._replace(q_idx=q_idx, kv_idx=kv_idx)
        if plan.bare:
            inputs = AttentionInputs(given.a, given.b, given.c)
        else:
            inputs = layer_inputs(self, given, plan.prepare, sums_of(orders))
        if key.fp8:
            out, largest = fp8_attention.run(self, plan, inputs, (given.fp8_output, given.bf16_backward), now), None
        elif modifier is not None:
            out, largest = plan.run(plan, inputs, functions=modifier)
        else:
            out, largest = plan.run(plan, inputs)
        return returned(out, largest, orders)

    def _key(self, given: Given, fp8: str) -> Key:
        grad = torch.is_grad_enabled()
        a, b, c, form, mask = given.a, given.b, given.c, given.qkv_format, given.attention_mask
        cu_q, cu_kv, bias = given.cu_seqlens_q, given.cu_seqlens_kv, given.core_attention_bias
        cu = shape = None
        if cu_q is not None and cu_kv is not None:
            alike = cu_q.dtype == cu_kv.dtype == torch.int32 and cu_q.shape == cu_kv.shape and cu_q.ndim == 1
            gaps = given.cu_seqlens_q_padded is not None
            for begin in (given.cu_seqlens_q_padded, given.cu_seqlens_kv_padded) if gaps else ():
                alike = alike and begin is not None and begin.dtype == torch.int32 and begin.shape == cu_q.shape
            cu = SumsFact(cu_q.numel(), cu_q is cu_kv, gaps, alike)
        if mask is not None:
            shape = tuple(m.shape for m in mask) if isinstance(mask, (tuple, list)) else mask.shape
        return Key(
            fact_of(a, grad),
            None if b is None else fact_of(b, grad),
            None if c is None else fact_of(c, grad),
            given.packing,
            given.interleaved,
            None if bias is None else fact_of(bias, grad),
            bias is not None and bias.requires_grad,
            None if given.alibi_slopes is None else given.alibi_slopes.shape,
            grad and self.softmax_type == "learnable" and self.softmax_offset.requires_grad,
            shape,
            cu,
            form,
            CACHE_FORMAT if given.cached else form,
            self.attn_mask_type if given.attn_mask_type is None else given.attn_mask_type,
            self._window if given.window_size is None else given.window_size,
            self.bottom_right_diagonal if given.bottom_right_diagonal is None else given.bottom_right_diagonal,
            given.core_attention_bias_type,
            given.max_seqlen_q or 0,
            given.max_seqlen_kv or 0,
            given.checkpoint_core_attention,
            self.training,
            self.logit_softcap,
            given.num_splits,
            "" if given.functions is None else "torch" if given.functions.graph is None else "graph",
            given.functions is not None and given.fp8_output,
            given.cached,
            None if given.pages is None else given.pages.shape,
            fp8,
        )

    def _choice(self, key: Key) -> Plan:
        if _attention_backends["backend_selection_requires_update"]:
            choose.forget()
            _attention_backends["backend_selection_requires_update"] = False
        world = (key, env.snapshot(), torch.are_deterministic_algorithms_enabled(), choose.generation[0])
        plan = self._choices.get(world)
        if plan is None:
            plan = ready(make_plan(self._static, key, env.now()), self._fork, self._communicators())
            self._meet(facts_of_plan(plan), key.a.device)
            if len(self._choices) >= _PLANS:
                self._choices.clear()
            self._choices[world] = plan
        self.__dict__["_last_plan"] = plan  # Module.__setattr__ would cost a microsecond
        return plan

    def _communicators(self, number: int = 0) -> Any:
        """What connects the ranks that share sequences, for calls in the precision of this number."""
        if self._context.context is None:
            return None
        precision = precision_of(number)
        if precision is not None and precision.history is not None:
            over, groups = None if active.region is None else active.region.group, self._context.groups
            check_reduction(OPERATION, precision.history, over, groups, "context", "FP8 attention over ranks")
        return self._context.communicators(OPERATION)

    def _of_custom(self, number: int) -> int:
        """Attention's own precision in a region of the one of this number."""
        return fp8_attention.attention_number_at_trace(number)

    def _facts(self) -> tuple[Any, ...]:
        """Attention over ranks is like no other: it has groups of its own."""
        *static, context, _ = self._static
        return *super()._facts(), *static, None if context is None else self._token, self._fork is None

    # --------------------------------------------------------------------------------------------- reports

    def explain(self, *args: Any, **options: Any) -> choose.Choice:
        """Print what would compute `forward` with these arguments: each backend with its reason, and the choice."""
        if options.get("inference_params") is not None:
            got, allowed = "inference_params, to which forward would append", "the other arguments"
            do = "pass keys and values of the cache's length, with cu_seqlens_q and cu_seqlens_kv"
            raise ArgumentError(f"{OPERATION}.explain", got, allowed, do)
        _asked.choice = True
        try:
            found: choose.Choice = self.forward(*args, **options)
        finally:
            _asked.choice = False
        print(found)
        return found

    def explain_key(self, key: Key) -> choose.Choice:
        """The choice for a call's key."""
        request = request_of(self._static, key, env.now())[1]
        found = choose.decide(request)
        return found if request.context is None else found._replace(schedule=schedule_in_words(request, key.a.shape))

    def extra_repr(self) -> str:
        """What a printed module shows."""
        s = self._static
        return f"heads={s.heads}, groups={s.groups}, kv_channels={(s.d_qk, s.d_v)}, mask={self.attn_mask_type}"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_choices": {}, "_last_plan": None, "_last_rule": None}


def explain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> choose.Choice:
    """Print what would compute the attention of these tensors; `options` are those of DotProductAttention.

    Arguments of its constructor and of its forward, by name: softmax_type=..., cu_seqlens_q=..., attn_mask_type=...
    """
    sizes = {
        "num_attention_heads": q.shape[-2],
        "kv_channels": (q.shape[-1], v.shape[-1]),
        "num_gqa_groups": k.shape[-2],
    }
    of_forward = signature(DotProductAttention.forward).parameters
    constructor = {name: options.pop(name) for name in tuple(options) if name not in of_forward}
    return DotProductAttention(**{"name": "explain", **sizes, **constructor}).explain(q, k, v, **options)


# ------------------------------------------------------------------------- what computes a plan

Run = Callable[..., fused.Results]
RUN: dict[str, Run] = {choose.FUSED: fused.run, choose.UNFUSED: unfused.run, **dict.fromkeys(choose.FLASH, flash.run)}


def ready(plan: Plan, fork: Fork | None, comm: Any = None) -> Plan:
    """The plan with what runs it; `fork`: of the tracker that its module draws from, `comm`: over which ranks."""
    plan.call = register(fused.ATTENTION, plan.layer, any(plan.layer.needs), comm=comm)
    run: Run = RUN[plan.backend]
    if plan.key.score_mod == "graph":
        plan.run = run_graph
        return plan
    if plan.backend == choose.FUSED:  # its own layer computes again if asked for
        plan.run = flash.run_backward_only if comm is None and flash.takes_backward(plan) else run
        return plan
    if plan.key.checkpoint:
        run = partial(_checkpointed, run)
    plan.run = partial(_forked, fork, run) if plan.draws and fork is not None else run
    return plan


def _checkpointed(run: Run, plan: Plan, inputs: AttentionInputs, **options: Any) -> fused.Results:
    """Run a backend so that backward computes it again: nothing but its inputs is kept."""
    from torch.utils.checkpoint import checkpoint

    again = Repeated(run) if plan.draws or options else run  # a user's function may draw
    found: fused.Results = checkpoint(again, plan, inputs, use_reentrant=False, preserve_rng_state=False, **options)
    return found


def _forked(fork: Fork, run: Run, plan: Plan, inputs: AttentionInputs) -> fused.Results:
    """Run a backend that draws from torch's generator, with the tracker's state in it."""
    with fork():
        return run(plan, inputs)


def _is_plain(given: Given) -> bool:
    """Whether a call brings no tensors but queries, keys and values."""
    return (
        given.attention_mask is None
        and given.cu_seqlens_q is None
        and given.cu_seqlens_kv is None
        and given.core_attention_bias is None
        and given.alibi_slopes is None
        and given.functions is None
        and not given.cached
    )
