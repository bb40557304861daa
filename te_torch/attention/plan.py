"""What a call of `DotProductAttention` comes to: checks, the core's spec, and the backend. Made once for each `Key`.

A key holds constants only, no tensors, so that a tracing compiler can hand it to a function that runs at trace time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from te_core import device as devices
from te_core.attention import BIASES, DIMENSIONS, FORMATS, SOFTMAX, AttentionSpec, Sizes, canonical_mask, with_mask
from te_core.device import DeviceInfo
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.attention import AttentionLayerSpec, AttentionNeeds
from te_core.layers.attention_fp8 import row_widths
from te_core.layers.context.rules import Cut, check
from te_core.layers.context.schedule import Context, Load, schedule
from te_core.layers.meeting import facts_of, words
from te_core.spelling import choice_error
from te_torch.attention import choose, env
from te_torch.attention.masks import AttentionArgumentError, check_set_window_size
from te_torch.runtime import FLOATS, TO_CORE, nested
from te_torch.values import is_flag, is_size

OPERATION = "DotProductAttention"
wrong = partial(AttentionArgumentError, OPERATION)


class Fact(NamedTuple):
    """What a plan depends on of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool


def fact_of(t: torch.Tensor, grad: bool) -> Fact:
    """The fact of a tensor; `grad`: whether gradients are wanted of those that require them."""
    try:
        return Fact(t.shape, t.dtype, t.device, grad and t.requires_grad)
    except AttributeError:
        raise wrong(f"an input of type {type(t).__name__}", "tensors", "pass tensors") from None
    except RuntimeError as error:
        raise nested(OPERATION) from error


class SumsFact(NamedTuple):
    """What a plan depends on of cu_seqlens."""

    entries: int
    shared: bool  # those of q are those of k and v, one tensor or known to be equal
    gaps: bool  # there are others that say where sequences begin in memory
    alike: bool  # all are int32 and of as many sequences


class Static(NamedTuple):
    """What a module says once and for all."""

    heads: int
    groups: int
    d_qk: int
    d_v: int
    scale: float
    softmax: str
    dropout: float
    max_logit: bool
    layer_number: int
    all_heads: int = 0  # `heads` of all tensor-parallel ranks; 0: there is one
    first_head: int = 0  # this rank's first one; -1: no group says which that is
    context: Context | None = None  # how sequences lie cut over ranks; None: they are whole
    context_rank: int = 0


class Key(NamedTuple):
    """One call, as far as its plan depends on it."""

    a: Fact  # q, or the packed tensor that holds it
    b: Fact | None
    c: Fact | None
    packing: str = "separate"  # as te_core.layers.attention.AttentionLayerSpec has it
    interleaved: bool = False
    bias: Fact | None = None
    bias_grad: bool = False  # it has a gradient where grad mode is on: a checkpoint's first forward is without it
    slopes: tuple[int, ...] | None = None  # their shape
    sink_grad: bool = False
    mask: tuple[Any, ...] | None = None  # the shape of attention_mask, or of both of a tuple
    cu: SumsFact | None = None
    form: str = "sbhd"
    kv_form: str = "sbhd"
    mask_type: str = "causal"
    window: tuple[int, int] | None = None
    bottom_right: bool | None = None
    bias_type: str = "no_bias"
    max_q: int = 0  # of packed sequences
    max_kv: int = 0
    checkpoint: bool = False
    training: bool = True
    softcap: float = 0.0
    num_splits: int = 1
    score_mod: str = ""  # "graph" or "torch": what the functions of the scores are of
    fp8_output: bool = False  # with a score_mod
    cached: bool = False
    pages: tuple[int, ...] | None = None  # the shape of a paged cache's table
    fp8: str = ""

    @classmethod
    def of(cls, fields: tuple[Any, ...]) -> Key:
        """The key whose fields these are, in tuples without names."""
        key = cls(*fields)
        a, b, c, bias = (None if t is None else Fact(*t) for t in (key.a, key.b, key.c, key.bias))
        assert a is not None
        return key._replace(a=a, b=b, c=c, bias=bias, cu=None if key.cu is None else SumsFact(*key.cu))


class Preparation(NamedTuple):
    """What is done to the tensors of a call before they are computed on (`inputs.layer_inputs`), in constants."""

    lengths: str = ""  # where they come from: "given", "mask", "masks" (one for q, one for k), or ""
    keys: int = 0  # that a mask has to be spread over, 0: it is not read
    rows: int = 0  # queries that a bias without any has to be spread over: cuDNN's backward needs it
    bias: str = "no_bias"  # its type
    draws: bool = False  # the numbers of dropout; torch's own kernels draw themselves


@dataclass(eq=False, slots=True)
class Plan:
    """All that follows from a call's key: how its tensors are prepared, what is computed, and by whom."""

    key: Key
    static: Static
    request: choose.Request
    backend: str
    layer: AttentionLayerSpec
    prepare: Preparation
    bare: bool  # nothing is computed on but q, k and v
    call: Any = None  # the core layer's (te_torch.function)
    run: Any = None  # computes it: (plan, AttentionInputs) -> (out, largest logits or None)
    program: str = ""  # the name by which traced code knows it

    @property
    def spec(self) -> AttentionSpec:
        """What is computed."""
        return self.layer.core

    @property
    def draws(self) -> bool:
        """Whether the backend draws from torch's generator itself."""
        return self.backend in choose.FLASH and self.spec.dropout > 0


def facts_of_plan(plan: Plan) -> dict[str, str]:
    """What tensor-parallel ranks compare of a call: all that its result depends on but the place and the lengths."""
    key, static = plan.key, plan.static
    said: dict[str, Any] = {"attn_mask_type": key.mask_type, "bias_type": key.bias_type, "cached": key.cached}
    said |= {"dtype": TO_CORE[key.a.dtype], "score_mod": bool(key.score_mod)}
    said |= {name: getattr(static, name) for name in ("heads", "groups", "d_qk", "d_v", "layer_number")}
    return {"layer": OPERATION, **{name: words(value) for name, value in said.items()}, **dict(facts_of(plan.spec))}


def make_plan(static: Static, key: Key, switches: env.Switches, backend: str | None = None) -> Plan:
    """The plan of a call, or of one by this backend; every complaint about its arguments is made here."""
    key, request, layer, lengths = request_of(static, key, switches)
    backend = backend or choose.choose(request)
    spec, rows = request.spec, 0
    if backend == choose.FUSED and request.device is not None and key.bias is not None and key.bias.shape[2] == 1:
        rows = request.sizes.sq if any(layer.needs) else 0
    keys = request.sizes.skv if spec.masked else 0
    draws = spec.dropout > 0 and backend not in choose.FLASH
    prepare = Preparation(lengths, keys, rows, key.bias_type, draws)
    bare = not (key.pages or spec.dropout or spec.softmax != "vanilla") and prepare == Preparation()
    return Plan(key, static, request, backend, layer, prepare, bare)


_OF_REQUEST = ("fp8", "cached", "num_splits", "score_mod", "fp8_output", "checkpoint")


def request_of(static: Static, key: Key, switches: env.Switches) -> tuple[Key, choose.Request, AttentionLayerSpec, str]:
    """(the key with canonical names, what the choice depends on, what is computed, where lengths come from)."""
    key = key._replace(mask_type=canonical_mask(OPERATION, key.mask_type))
    _check_names(key)
    _check_tensors(static, key)
    lengths = _lengths_source(key)
    sizes = sizes_of(static, key)
    ranks = 1
    if static.context is not None:
        _refuse_over_ranks(key)
        ranks = static.context.size  # a bias has this rank's queries and all keys
    _check_bias(key, sizes._replace(skv=ranks * sizes.skv))
    _check_padding(key, lengths, sizes)
    spec = spec_of(static, key, sizes, switches.deterministic)
    q, k, v, bias = (fact is not None and fact.grad for fact in (key.a, key.b, key.c, key.bias))
    needs = AttentionNeeds(q, k, v, bias, key.sink_grad)
    layer = AttentionLayerSpec(
        spec, *static[:4], needs, key.packing, key.interleaved, key.checkpoint, context=static.context
    )
    if static.context is not None:  # what the core's rules refuse
        tokens = (key.a.shape[0],) * 2 if key.form == "thd" else (sizes.sq, sizes.skv)
        check(Cut(spec, static.context, static.heads, static.groups, tokens))
    training = key.training or any(needs)
    request = choose.Request(
        device_info(key.a.device),
        TO_CORE[key.a.dtype],
        spec,
        sizes,
        key.mask_type,
        training=training,
        bias_grad=training and key.bias_grad,
        bias_rows=0 if key.bias is None else sizes.sq,
        fp8_rows=row_widths(layer) if key.fp8 else (),
        paged=key.pages is not None,
        gaps=key.form == "thd" and key.cu is not None and key.cu.gaps,
        same_lengths=lengths == "mask" or (key.cu is not None and key.cu.shared),
        context=static.context,
        context_rank=static.context_rank,
        switches=switches,
        installed=choose.installed(),
        **{name: getattr(key, name) for name in _OF_REQUEST},
    )
    return key, request, layer, lengths


def spec_of(static: Static, key: Key, sizes: Sizes, deterministic: bool) -> AttentionSpec:
    """What a call with this key computes."""
    bias = "post_scale_bias" if key.bias_type == "pre_scale_bias" else key.bias_type
    usual = bias == "alibi" and key.slopes is None
    if usual and static.first_head < 0:
        got = f"ALiBi's usual slopes with tp_size={static.all_heads // static.heads} and no tp_group"
        do = "pass tp_group to the constructor, call set_tensor_parallel_group, or pass this rank's alibi_slopes"
        raise wrong(got, "the group of the ranks that heads are spread over: slopes go by a head's place in all", do)
    spec = AttentionSpec(
        static.scale,
        key.form,
        key.kv_form,
        bias=bias,
        default_slopes=usual and static.all_heads <= static.heads,
        softmax=static.softmax,
        softcap=key.softcap,
        dropout=static.dropout if key.training else 0.0,
        max_logit=static.max_logit,
        deterministic=deterministic,
        max_q=sizes.sq if key.form == "thd" else 0,
        max_kv=sizes.skv if key.kv_form == "thd" else 0,
    )
    window = check_set_window_size(key.mask_type, key.window)
    return with_mask(spec, key.mask_type, window, key.bottom_right)


def _refuse_over_ranks(key: Key) -> None:
    """Refuse what needs whole rows of scores, or keys that no rank has."""
    for given, what, allowed, do in (
        (
            key.mask is not None,
            "attention_mask",
            "lengths of sequences (cu_seqlens_q and cu_seqlens_kv)",
            "pass cu_seqlens of the whole sequences, with a mask type of padding",
        ),
        (key.cached or key.pages is not None, "inference_params", "forwards without a cache", "generate on one rank"),
        (
            bool(key.score_mod),
            "score_mod or torch_score_mod",
            "scores changed by a bias or by slopes",
            "leave the functions of the scores out",
        ),
    ):
        if given:
            raise UnsupportedError(OPERATION, f"{what} under context parallelism", allowed, do)


def schedule_in_words(request: choose.Request, shape: tuple[int, ...]) -> str:
    """The steps of a call under context parallelism, and the bytes that this rank hands over. `shape`: of its q."""
    sizes, context = request.sizes, request.context
    assert context is not None
    q, kv = (shape[0],) * 2 if request.packed else (sizes.batch * sizes.sq, sizes.batch * sizes.skv)
    load = Load(q, kv, sizes.heads, sizes.groups, sizes.d_qk, sizes.d_v, request.dtype.itemsize)
    return schedule(context, request.context_rank, request.spec).explain(load)


def sizes_of(static: Static, key: Key) -> Sizes:
    """The sizes that a call's tensors say."""

    def extent(fact: Fact, form: str, longest: int) -> tuple[int, int]:
        b, s, _ = DIMENSIONS[form]
        if b is None:
            assert key.cu is not None
            return key.cu.entries - 1, longest
        return fact.shape[b], fact.shape[s]

    batch, sq = extent(key.a, key.form, key.max_q)
    if key.pages is not None:
        assert key.b is not None
        skv = key.pages[1] * key.b.shape[1]
    else:
        skv = extent(key.a if key.b is None else key.b, key.kv_form, key.max_kv)[1]
    return Sizes(batch, sq, skv, static.heads, static.groups, static.d_qk, static.d_v)


def device_info(device: torch.device) -> DeviceInfo | None:
    """The device as the rules know it; None for the CPU (and for tensors without memory)."""
    return devices.info(device.index or 0) if device.type == "cuda" else None


# -------------------------------------------------------------------------------------------------- checks


def checked_widths(
    heads: int, groups: int, channels: Any, tp_size: int, attention_type: str, softmax_type: str, dropout: float
) -> tuple[int, int]:
    """(d_qk, d_v) of what the constructor of DotProductAttention was given, if all of it is right."""
    widths = (channels, channels) if is_size(channels) else tuple(channels)
    given = f"num_attention_heads={heads}, num_gqa_groups={groups}"
    split = f"{heads} heads and {groups} groups over tp_size={tp_size}"
    for right, got, allowed in (
        (heads % groups == 0, given, f"groups that divide the heads: {divisors(heads, groups)}"),
        (len(widths) == 2 and min(widths) > 0, f"kv_channels={channels}", "one width, or two: of q and k, of v"),
        (heads % tp_size == 0 and groups % tp_size == 0, split, "multiples of tp_size"),
        (0 <= dropout <= 1, f"attention_dropout={dropout}", "0 <= p <= 1"),
    ):
        if not right:
            raise wrong(got, allowed, "correct the constructor's arguments")
    for name, choice, choices in (
        ("attention_type", attention_type, ("self", "cross")),
        ("softmax_type", softmax_type, SOFTMAX),
    ):
        if choice not in choices:
            raise choice_error(OPERATION, name, choice, choices, lambda _, *parts: wrong(*parts))
    d_qk, d_v = widths
    return d_qk, d_v


def divisors(n: int, wanted: int) -> str:
    """The numbers next to the wanted one, below and above, that divide n."""
    below = next((d for d in range(min(wanted, n), 0, -1) if n % d == 0), None)
    above = next((d for d in range(wanted + 1, n + 1) if n % d == 0), None)
    return " or ".join(str(d) for d in (below, above) if d is not None)


def _check_names(key: Key) -> None:
    for name, value, allowed in (
        ("qkv_format", key.form, FORMATS),
        ("core_attention_bias_type", key.bias_type, BIASES),
    ):
        if value not in allowed:
            raise choice_error(OPERATION, name, value, allowed, lambda _, *parts: wrong(*parts))
    for name, flag in (("bottom_right_diagonal", key.bottom_right), ("checkpoint_core_attention", key.checkpoint)):
        if flag is not None and not is_flag(flag):
            raise wrong(f"{name}={flag!r}", "True or False", f"correct {name}")
    for name, longest in (("max_seqlen_q", key.max_q), ("max_seqlen_kv", key.max_kv)):
        if isinstance(longest, (str, float)):
            raise wrong(f"{name}={longest!r}", "a whole number of tokens", f"correct {name}")
    if "padding" not in key.mask_type:
        got, padding = f"attn_mask_type={key.mask_type!r}", "padding, padding_causal, padding_causal_bottom_right"
        if key.form == "thd":
            do = "choose a mask type with padding: packed sequences differ in length"
            raise wrong(f"{got} in thd", padding, do)
        if key.cached:
            raise wrong(f"{got} with a KV cache", "a mask type with padding", "choose padding_causal, say")
    if not (math.isfinite(key.softcap) and key.softcap >= 0):
        raise ArgumentError(OPERATION, f"logit_softcap={key.softcap}", "a number >= 0; 0 is none", "correct it")


def _check_tensors(static: Static, key: Key) -> None:
    a, b, c = key.a, key.b, key.c
    for name, fact in (("q", a), ("k", b), ("v", c)):
        if fact is None:
            continue
        if fact.dtype not in FLOATS and not key.fp8:
            raise wrong(f"{name} of {fact.dtype}", "float32, bfloat16 or float16", "convert the inputs")
        if fact.dtype != a.dtype or fact.device != a.device:
            got = f"{name} of {fact.dtype} on {fact.device} beside {a.dtype} on {a.device}"
            raise wrong(got, "queries, keys and values of one dtype on one device", "convert them to one")
    if key.packing == "qkv":
        return
    wanted = [("q", a, key.form, (static.heads, static.d_qk))]
    if key.packing == "separate":
        if b is None or c is None:
            raise wrong("no keys or values", "key_layer and value_layer", "pass them")
        wanted += [("k", b, key.kv_form, (static.groups, static.d_qk))]
        wanted += [("v", c, key.kv_form, (static.groups, static.d_v))]
    for name, fact, form, tail in wanted:
        dims = 4 if key.pages is not None and name != "q" else len(form)
        if len(fact.shape) != dims or tuple(fact.shape[-2:]) != tail:
            allowed = f"{dims} dimensions ({form}) that end in {tail} (heads, width)"
            do = "check num_attention_heads, num_gqa_groups, kv_channels and qkv_format"
            raise wrong(f"{name} of shape {tuple(fact.shape)}", allowed, do)
    if b is not None and c is not None and b.shape[:-1] != c.shape[:-1]:
        got = f"k of shape {tuple(b.shape)}, v of {tuple(c.shape)}"
        raise wrong(got, "as many values as keys", "correct the shapes")


def _lengths_source(key: Key) -> str:
    got = f"attn_mask_type={key.mask_type!r}"
    if "padding" not in key.mask_type:
        if key.mask is None and key.mask_type == "arbitrary":
            allowed = "a boolean mask that broadcasts to [b, h, sq, skv]"
            raise wrong(f"{got} without attention_mask", allowed, "pass attention_mask")
        return ""
    if key.cu is not None:
        if not key.cu.alike or key.cu.entries < 1:
            got = "cu_seqlens_q and cu_seqlens_kv of other types or shapes, or of different numbers of sequences"
            raise wrong(got, "int32 [b + 1], as are those that say where sequences begin", "convert or correct them")
        batch = DIMENSIONS[key.form][0]
        if batch is not None and key.cu.entries != key.a.shape[batch] + 1:
            got, do = f"cu_seqlens of {key.cu.entries} entries", "correct cu_seqlens_q and cu_seqlens_kv"
            raise wrong(got, "one more than sequences in the batch", do)
        return "given"
    if key.form == "thd":
        allowed = "cu_seqlens_q and cu_seqlens_kv, int32 [b + 1]"
        raise wrong("packed sequences (thd) without cu_seqlens", allowed, "pass both")
    if key.mask is None:
        allowed = "attention_mask [b, 1, 1, s] (a tuple of two for different q and k)"
        allowed = f"{allowed}, or cu_seqlens_q and cu_seqlens_kv"
        raise wrong(f"{got} without a mask", allowed, "pass one of these")
    return "masks" if key.mask and isinstance(key.mask[0], tuple) else "mask"


def _check_padding(key: Key, lengths: str, sizes: Sizes) -> None:
    if lengths not in ("mask", "masks"):
        return
    assert key.mask is not None
    shapes = key.mask if lengths == "masks" else (key.mask, key.mask)
    wanted = tuple((sizes.batch, 1, 1, tokens) for tokens in (sizes.sq, sizes.skv))
    if len(shapes) != 2 or any(
        not shape or shape[0] != whole[0] or shape[-1] != whole[-1] or any(n != 1 for n in shape[1:-1])
        for shape, whole in zip(shapes, wanted, strict=True)
    ):
        allowed = f"{wanted[0]} for q and {wanted[1]} for k"
        do = "pass a mask of the sequences' own, or attn_mask_type='arbitrary'"
        raise wrong(f"a padding mask of shape {key.mask}", allowed, do)


def _check_bias(key: Key, sizes: Sizes) -> None:
    kind, full = f"core_attention_bias_type={key.bias_type!r}", (sizes.batch, sizes.heads, sizes.sq, sizes.skv)
    if (key.bias_type in ("pre_scale_bias", "post_scale_bias")) != (key.bias is not None):
        got = f"core_attention_bias {'not given' if key.bias is None else 'given'} with {kind}"
        raise wrong(got, "a bias with pre_scale_bias and post_scale_bias only", "pass the bias, or correct its type")
    if key.slopes is not None:
        if key.bias_type != "alibi":
            allowed = "core_attention_bias_type='alibi'"
            raise wrong(f"alibi_slopes with {kind}", allowed, "correct the type, or leave the slopes out")
        slopes = ((sizes.heads,), (sizes.batch, sizes.heads))
        if tuple(key.slopes) not in slopes:
            raise wrong(f"alibi_slopes of shape {key.slopes}", f"{slopes[0]} or {slopes[1]}", "one slope a head")
    if key.bias is not None:
        shape = tuple(key.bias.shape)
        if len(shape) != 4 or not broadcasts(shape, full) or shape[3] != sizes.skv:
            do = "correct the bias" + (", or max_seqlen_q and max_seqlen_kv" if key.form == "thd" else "")
            raise wrong(f"core_attention_bias of shape {shape}", f"{full}; all but the last may be 1", do)
    if key.mask_type == "arbitrary" and not broadcasts(key.mask, full):
        raise wrong(f"an attention_mask of shape {key.mask}", f"one that broadcasts to {full}", "correct the mask")


def broadcasts(shape: tuple[Any, ...] | None, full: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape spreads over the full one; none, and the shapes of a pair, do not."""
    if shape is None or len(shape) > len(full) or any([isinstance(n, tuple) for n in shape]):
        return False
    return all([n == 1 or n == whole for n, whole in zip(shape, full[len(full) - len(shape) :], strict=True)])
