"""What a call of `DotProductAttention` comes to: checks, the core's spec, and the backend. Made once for each `Key`.

A key holds constants only, no tensors, so that a tracing compiler can hand it to a function that runs at trace time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_core import device as devices
from te_core.attention import BIASES, DIMENSIONS, FORMATS, SOFTMAX, AttentionSpec, Sizes, canonical_mask, with_mask
from te_core.device import DeviceInfo
from te_core.errors import ArgumentError
from te_core.layers.attention import AttentionLayerSpec, AttentionNeeds
from te_core.layers.attention_fp8 import row_widths
from te_torch.attention import choose, env
from te_torch.attention.masks import AttentionArgumentError, check_set_window_size
from te_torch.runtime import FLOATS, TO_CORE

OPERATION = "DotProductAttention"


class Fact(NamedTuple):
    """What a plan depends on of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool


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
    #: Entries of cu_seqlens; whether q's and kv's are one; whether there are others for memory; whether both are
    #: int32 and of as many sequences.
    cu: tuple[int, bool, bool, bool] | None = None
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
    score_mod: bool = False
    cached: bool = False
    pages: tuple[int, ...] | None = None  # the shape of a paged cache's table
    fp8: str = ""


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

    @property
    def spec(self) -> AttentionSpec:
        """What is computed."""
        return self.layer.core

    @property
    def draws(self) -> bool:
        """Whether the backend draws from torch's generator itself."""
        return self.backend in choose.FLASH and self.spec.dropout > 0


def make_plan(static: Static, key: Key, switches: env.Switches, backend: str | None = None) -> Plan:
    """The plan of a call, or of one by this backend; every complaint about its arguments is made here."""
    key = key._replace(mask_type=canonical_mask(OPERATION, key.mask_type))
    request, lengths = _request(static, key, switches)
    backend = backend or choose.choose(request)
    spec, layer, rows = request.spec, _layer(static, key, request.spec), 0
    if backend == choose.FUSED and request.device is not None and key.bias is not None and key.bias.shape[2] == 1:
        rows = request.sizes.sq if any(layer.needs) else 0
    keys = request.sizes.skv if spec.masked else 0
    draws = spec.dropout > 0 and backend not in choose.FLASH
    prepare = Preparation(lengths, keys, rows, key.bias_type, draws)
    bare = not (key.pages or spec.dropout or spec.softmax != "vanilla") and prepare == Preparation()
    return Plan(key, static, request, backend, layer, prepare, bare)


def _request(static: Static, key: Key, switches: env.Switches) -> tuple[choose.Request, str]:
    _check_names(key)
    _check_tensors(static, key)
    lengths = _lengths_source(key)
    sizes = _sizes(static, key)
    _check_bias(key, sizes)
    _check_padding(key, lengths, sizes)
    spec = _spec(static, key, switches, sizes)
    needs = any(fact is not None and fact.grad for fact in (key.a, key.b, key.c, key.bias)) or key.sink_grad
    training = key.training or needs
    request = choose.Request(
        device_info(key.a.device),
        TO_CORE[key.a.dtype],
        spec,
        sizes,
        key.mask_type,
        training=training,
        bias_grad=training and key.bias_grad,
        bias_rows=0 if key.bias is None else sizes.sq,
        fp8=key.fp8,
        fp8_rows=row_widths(_layer(static, key, spec)) if key.fp8 else (),
        cached=key.cached,
        paged=key.pages is not None,
        gaps=key.form == "thd" and key.cu is not None and key.cu[2],
        same_lengths=lengths == "mask" or (key.cu is not None and key.cu[1]),
        num_splits=key.num_splits,
        score_mod=key.score_mod,
        switches=switches,
        installed=choose.installed(),
    )
    return request, lengths


def explain_plan(static: Static, key: Key, switches: env.Switches) -> choose.Choice:
    """What would be chosen for a call, and why."""
    return choose.decide(
        _request(static, key._replace(mask_type=canonical_mask(OPERATION, key.mask_type)), switches)[0]
    )


def _layer(static: Static, key: Key, spec: AttentionSpec) -> AttentionLayerSpec:
    q, k, v, bias = (fact is not None and fact.grad for fact in (key.a, key.b, key.c, key.bias))
    needs = AttentionNeeds(q, k, v, bias, key.sink_grad)
    return AttentionLayerSpec(
        spec, static.heads, static.groups, static.d_qk, static.d_v, needs, key.packing, key.interleaved, key.checkpoint
    )


def _spec(static: Static, key: Key, switches: env.Switches, sizes: Sizes) -> AttentionSpec:
    bias = "post_scale_bias" if key.bias_type == "pre_scale_bias" else key.bias_type
    spec = AttentionSpec(
        static.scale,
        key.form,
        key.kv_form,
        bias=bias,
        default_slopes=key.bias_type == "alibi" and key.slopes is None,
        softmax=static.softmax,
        softcap=key.softcap,
        dropout=static.dropout if key.training else 0.0,
        max_logit=static.max_logit,
        deterministic=switches.deterministic,
        max_q=sizes.sq if key.form == "thd" else 0,
        max_kv=sizes.skv if key.kv_form == "thd" else 0,
    )
    window = check_set_window_size(key.mask_type, key.window)
    return with_mask(spec, key.mask_type, window, key.bottom_right)


def _sizes(static: Static, key: Key) -> Sizes:
    def extent(fact: Fact, form: str, longest: int) -> tuple[int, int]:
        b, s, _ = DIMENSIONS[form]
        if b is None:
            assert key.cu is not None
            return key.cu[0] - 1, longest
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
    widths = (channels, channels) if isinstance(channels, int) else tuple(channels)
    for got, condition, allowed in (
        (
            f"num_attention_heads={heads}, num_gqa_groups={groups}",
            min(heads, groups) > 0 and heads % groups == 0,
            "heads that are a multiple of the groups",
        ),
        (f"kv_channels={channels}", len(widths) == 2 and min(widths) > 0, "one width, or two: of q and k, of v"),
        (
            f"{heads} heads and {groups} groups over tp_size={tp_size}",
            heads % tp_size == 0 and groups % tp_size == 0,
            "multiples of tp_size",
        ),
        (f"attention_type={attention_type!r}", attention_type in ("self", "cross"), "'self' or 'cross'"),
        (f"softmax_type={softmax_type!r}", softmax_type in SOFTMAX, ", ".join(SOFTMAX)),
        (f"attention_dropout={dropout}", 0 <= dropout <= 1, "0 <= p <= 1"),
    ):
        if not condition:
            raise AttentionArgumentError(OPERATION, got, allowed, "correct the constructor's arguments")
    d_qk, d_v = widths
    return d_qk, d_v


def _require(condition: bool, got: str, allowed: str, do: str) -> None:
    if not condition:
        raise AttentionArgumentError(OPERATION, got, allowed, do)


def _check_names(key: Key) -> None:
    for name, value, allowed in (
        ("qkv_format", key.form, FORMATS),
        ("core_attention_bias_type", key.bias_type, BIASES),
    ):
        if value not in allowed:
            raise AttentionArgumentError(OPERATION, f"{name}={value!r}", ", ".join(allowed), "choose one of these")
    _require(
        key.form != "thd" or "padding" in key.mask_type,
        f"attn_mask_type={key.mask_type!r} in thd",
        "padding, padding_causal, padding_causal_bottom_right",
        "choose a mask type with padding: packed sequences differ in length",
    )
    _require(
        not key.cached or "padding" in key.mask_type,
        f"attn_mask_type={key.mask_type!r} with a KV cache",
        "a mask type with padding",
        "choose padding_causal, say",
    )
    if not (math.isfinite(key.softcap) and key.softcap >= 0):
        raise ArgumentError(OPERATION, f"logit_softcap={key.softcap}", "a number >= 0; 0 is none", "correct it")


def _check_tensors(static: Static, key: Key) -> None:
    facts = [("q", key.a), ("k", key.b), ("v", key.c)]
    for name, fact in facts:
        if fact is not None:
            _require(
                fact.dtype in FLOATS or bool(key.fp8),
                f"{name} of {fact.dtype}",
                "float32, bfloat16 or float16",
                "convert the inputs",
            )
            _require(
                fact.dtype == key.a.dtype and fact.device == key.a.device,
                f"{name} of {fact.dtype} on {fact.device} beside {key.a.dtype} on {key.a.device}",
                "queries, keys and values of one dtype on one device",
                "convert them to one",
            )
    if key.packing == "qkv":
        return
    h, g, dk, dv = static.heads, static.groups, static.d_qk, static.d_v
    wanted = [("q", key.a, key.form, (h, dk))]
    if key.packing == "separate":
        _require(key.b is not None and key.c is not None, "no keys or values", "key_layer and value_layer", "pass them")
        wanted += [("k", key.b, key.kv_form, (g, dk)), ("v", key.c, key.kv_form, (g, dv))]  # type: ignore[list-item]
    for name, fact, form, tail in wanted:
        dims = 4 if key.pages is not None and name != "q" else len(form)
        _require(
            len(fact.shape) == dims and tuple(fact.shape[-2:]) == tail,
            f"{name} of shape {tuple(fact.shape)}",
            f"{dims} dimensions ({form}) that end in {tail} (heads, width)",
            "check num_attention_heads, num_gqa_groups, kv_channels and qkv_format",
        )
    if key.packing == "separate" and key.b is not None and key.c is not None:
        _require(
            key.b.shape[:-1] == key.c.shape[:-1],
            f"k of shape {tuple(key.b.shape)}, v of {tuple(key.c.shape)}",
            "as many values as keys",
            "correct the shapes",
        )


def _lengths_source(key: Key) -> str:
    if "padding" not in key.mask_type:
        _require(
            key.mask_type != "arbitrary" or key.mask is not None,
            "attn_mask_type='arbitrary' without attention_mask",
            "a boolean mask that broadcasts to [b, h, sq, skv]",
            "pass attention_mask",
        )
        _require(
            key.mask is None or key.mask_type == "arbitrary",
            f"an attention_mask with attn_mask_type={key.mask_type!r}, which reads none",
            "a padding mask with 'padding' or 'padding_causal', any other with 'arbitrary'",
            "leave the mask out, or choose the attn_mask_type that reads it",
        )
        return ""
    if key.cu is not None:
        _require(
            key.cu[3],
            "cu_seqlens_q and cu_seqlens_kv of other types, or of different numbers of sequences",
            "int32 [b + 1] both",
            "convert or correct them",
        )
        batch = DIMENSIONS[key.form][0]
        _require(
            batch is None or key.cu[0] == key.a.shape[batch] + 1,
            f"cu_seqlens of {key.cu[0]} entries",
            "one more than sequences in the batch",
            "correct cu_seqlens_q and cu_seqlens_kv",
        )
        return "given"
    _require(
        key.form != "thd",
        "packed sequences (thd) without cu_seqlens",
        "cu_seqlens_q and cu_seqlens_kv, int32 [b + 1]",
        "pass both",
    )
    _require(
        key.mask is not None,
        f"attn_mask_type={key.mask_type!r} without a mask",
        "attention_mask [b, 1, 1, s] (a tuple of two for different q and k), or cu_seqlens_q and cu_seqlens_kv",
        "pass one of these",
    )
    assert key.mask is not None
    return "masks" if key.mask and isinstance(key.mask[0], tuple) else "mask"


def _check_padding(key: Key, lengths: str, sizes: Sizes) -> None:
    if lengths not in ("mask", "masks"):
        return
    shapes = key.mask if lengths == "masks" else (key.mask, key.mask)
    assert shapes is not None
    wanted = tuple((sizes.batch, 1, 1, tokens) for tokens in (sizes.sq, sizes.skv))
    _require(
        len(shapes) == 2
        and all(
            shape[0] == whole[0] and shape[-1] == whole[-1] and all(n == 1 for n in shape[1:-1])
            for shape, whole in zip(shapes, wanted, strict=True)
        ),
        f"a padding mask of shape {key.mask}",
        f"{wanted[0]} for q and {wanted[1]} for k",
        "pass a mask of the sequences' own, or attn_mask_type='arbitrary'",
    )


def _check_bias(key: Key, sizes: Sizes) -> None:
    has_tensor = key.bias_type in ("pre_scale_bias", "post_scale_bias")
    _require(
        has_tensor == (key.bias is not None),
        f"core_attention_bias {'given' if key.bias is not None else 'not given'} with "
        f"core_attention_bias_type={key.bias_type!r}",
        "a bias with pre_scale_bias and post_scale_bias only",
        "pass the bias, or correct its type",
    )
    _require(
        key.slopes is None or key.bias_type == "alibi",
        f"alibi_slopes with core_attention_bias_type={key.bias_type!r}",
        "core_attention_bias_type='alibi'",
        "correct the type, or leave the slopes out",
    )
    slopes = ((sizes.heads,), (sizes.batch, sizes.heads))
    _require(
        key.slopes is None or tuple(key.slopes) in slopes,
        f"alibi_slopes of shape {key.slopes}",
        f"{slopes[0]} or {slopes[1]}",
        "one slope a head",
    )
    if key.bias is not None:
        shape, full = tuple(key.bias.shape), (sizes.batch, sizes.heads, sizes.sq, sizes.skv)
        _require(
            len(shape) == 4
            and all(n in (1, whole) for n, whole in zip(shape, full, strict=True))
            and shape[3] == sizes.skv,
            f"core_attention_bias of shape {shape}",
            f"{full}; all but the last may be 1",
            "correct the bias" + (", or max_seqlen_q and max_seqlen_kv" if key.form == "thd" else ""),
        )
    _require(
        key.mask_type != "arbitrary" or _broadcasts(key.mask, sizes),
        f"an attention_mask of shape {key.mask}",
        f"one that broadcasts to {(sizes.batch, sizes.heads, sizes.sq, sizes.skv)}",
        "correct the mask",
    )


def _broadcasts(shape: tuple[Any, ...] | None, sizes: Sizes) -> bool:
    full = (sizes.batch, sizes.heads, sizes.sq, sizes.skv)
    if shape is None or len(shape) > 4 or any(isinstance(n, tuple) for n in shape):
        return False
    return all(n in (1, whole) for n, whole in zip(reversed(shape), reversed(full), strict=False))
