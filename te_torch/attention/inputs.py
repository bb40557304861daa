"""What a call of `DotProductAttention` was given, made ready for its plan, and then for what computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_core.attention import DIMENSIONS, alibi_slopes, canonical_mask
from te_core.layers.attention import AttentionInputs
from te_core.layers.context.schedule import Context
from te_torch.attention import env
from te_torch.attention.masks import Sums, check_beside, check_running_sums, get_cu_seqlens, longest
from te_torch.attention.plan import OPERATION, Key, Preparation, Static, wrong
from te_torch.draws import random_pair
from te_torch.export.mode import exporting, not_exported
from te_torch.module_names import warn_outside
from te_torch.runtime import amp_cast, constant_at_trace


class Given(NamedTuple):
    """What one call of DotProductAttention was given: forward's arguments by their names. None: the module's own holds.

    Torch 2.11 cannot carry over a graph break what `_replace` makes, hence `but`.
    """

    a: torch.Tensor  # the queries, or the packed tensor that holds them
    b: torch.Tensor | None = None
    c: torch.Tensor | None = None
    packing: str = "separate"  # as te_core.layers.attention.AttentionLayerSpec has it
    interleaved: bool = False
    qkv_format: str = "sbhd"
    attention_mask: Any = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    attn_mask_type: str | None = None
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    checkpoint_core_attention: bool = False
    core_attention_bias_type: str = "no_bias"
    core_attention_bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    pad_between_seqs: bool | None = None
    fp8_output: bool = False
    bf16_backward: bool = False
    num_splits: int = 1
    functions: Any = None  # te_torch.attention.score_mod.Functions
    cached: bool = False  # k and v come out of a cache
    pages: torch.Tensor | None = None  # the table of a paged one

    def but(self, **changes: Any) -> Given:
        """With other values in some places."""
        return Given(*[changes.get(name, value) for name, value in zip(Given._fields, self, strict=True)])


def autocast(given: Given) -> Given:
    """Queries, keys and values in the dtype of torch.autocast."""
    a, b, c = (t if t is None or not t.is_floating_point() else amp_cast(t) for t in (given.a, given.b, given.c))
    return given.but(a=a, b=b, c=c)


def packed_sequences(given: Given) -> Given:
    """What packed sequences need besides: their longest lengths, and where they begin if tokens lie between them."""
    cu_q, cu_kv = given.cu_seqlens_q, given.cu_seqlens_kv
    q_padded, kv_padded = given.cu_seqlens_q_padded, given.cu_seqlens_kv_padded
    if cu_q is None or cu_kv is None:
        return given  # the plan complains
    if not (isinstance(cu_q, torch.Tensor) and isinstance(cu_kv, torch.Tensor)):
        check_types(given)
    max_q, max_kv = given.max_seqlen_q, given.max_seqlen_kv
    if isinstance(max_q, torch.Tensor) or isinstance(max_kv, torch.Tensor):  # programs take them from a tensor's max()
        max_q, max_kv = (int(n) if isinstance(n, torch.Tensor) else n for n in (max_q, max_kv))
        given = given.but(max_seqlen_q=max_q, max_seqlen_kv=max_kv)
    if q_padded is None and kv_padded is None and max_q is not None and max_kv is not None:
        return given  # nothing is missing
    if (q_padded is None) != (kv_padded is None):
        q_padded, kv_padded = (cu_q if q_padded is None else q_padded), (cu_kv if kv_padded is None else kv_padded)
    # With pad_between_seqs=True as without: sequences begin in memory where their sums say if nothing else does.
    if given.pad_between_seqs is False or (q_padded is cu_q and kv_padded is cu_kv):
        q_padded = kv_padded = None
    # Where sequences begin may leave room before the first.
    of_q = ("cu_seqlens_q", cu_q) if q_padded is None else ("cu_seqlens_q_padded", q_padded, None)
    of_kv = ("cu_seqlens_kv", cu_kv) if kv_padded is None else ("cu_seqlens_kv_padded", kv_padded, None)
    alike = of_q[1] is of_kv[1] and max_q is None  # waits for the device once
    if max_q is None:
        max_q = longest(*of_q)
    if max_kv is None:
        max_kv = max_q if alike else longest(*of_kv)
    places = {"cu_seqlens_q_padded": q_padded, "cu_seqlens_kv_padded": kv_padded}
    return given.but(max_seqlen_q=max_q, max_seqlen_kv=max_kv, **places)


def without_unread_mask(given: Given, own_type: str) -> Given:
    """The call without its attention_mask, where a mask type reads none; that is said once. `own_type`: the module's.

    Programs pass their mask to every layer, whatever its mask type.
    """
    mask_type = canonical_mask(OPERATION, own_type if given.attn_mask_type is None else given.attn_mask_type)
    if "padding" in mask_type or mask_type == "arbitrary":
        return given
    _say_unread(
        f"with attn_mask_type={mask_type!r}: 'padding' and 'padding_causal' read a padding mask, 'arbitrary' any other"
    )
    return given.but(attention_mask=None)


def check_types(given: Given) -> None:
    """What has to be a tensor is one."""
    for name, value in given._asdict().items():
        if name == "attention_mask" and isinstance(value, (tuple, list)):
            pair = len(value) == 2 and all([isinstance(m, torch.Tensor) for m in value])
            got = f"attention_mask of {len(value)} parts ({', '.join([type(m).__name__ for m in value])})"
        elif name == "attention_mask" or name in _TENSORS:
            pair, got = value is None or isinstance(value, torch.Tensor), f"{name} of type {type(value).__name__}"
        else:
            continue
        if not pair:
            raise wrong(
                got, "a tensor" + (", or a pair for q and for k" if name == "attention_mask" else ""), "pass one"
            )


_TENSORS = (
    *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("core_attention_bias", "alibi_slopes"),
)


def with_equal_lengths(key: Key, given: Given) -> Key:
    """The key of packed queries and keys whose lengths lie in two tensors, told whether these are equal.

    This waits for the device, and so is done only where the environment leaves FlashAttention alone: its diagonals end
    bottom-right, which is top-left where lengths are equal.
    """
    switches, cu = env.now(), given.cu_seqlens_q
    if switches.fused or switches.unfused or cu is None or given.cu_seqlens_kv is None or key.cu is None:
        return key
    if not key.cu.alike or (cu.is_cuda and torch.cuda.is_current_stream_capturing()):
        return key
    return key._replace(cu=key.cu._replace(shared=torch.equal(cu, given.cu_seqlens_kv)))


def check_sums(given: Given, context: Context | None = None) -> None:
    """Sequences are where there are tokens. This looks at the CPU's sums only: a look at a GPU's would wait.

    Under context parallelism the sums are those of whole sequences, of which every rank has as many tokens.
    """
    ranks = 1 if context is None else context.size
    packed, tokens = given.qkv_format == "thd", DIMENSIONS[given.qkv_format][1]
    for which, t in (("q", given.a), ("kv", given.a if given.b is None else given.b)):
        cu: torch.Tensor = getattr(given, f"cu_seqlens_{which}")
        begin: torch.Tensor | None = getattr(given, f"cu_seqlens_{which}_padded")
        if type(cu) is not torch.Tensor or not cu.is_cpu or (begin is not None and not begin.is_cpu):
            continue
        name, sums, room = f"cu_seqlens_{which}", cu.tolist(), ranks * t.shape[tokens]
        check_running_sums(name, sums)
        lengths = [b - a for a, b in zip(sums, sums[1:], strict=False)]
        starts = [0] * len(lengths) if not packed else sums if begin is None else begin.tolist()
        last = max([start + n for start, n in zip(starts, lengths, strict=False)], default=0)
        if last > room or min(starts, default=0) < 0:
            got = f"{name} with a sequence up to token {last} of {room}"
            raise wrong(got, "sequences of the tokens that there are", f"correct {name}")
        if ranks > 1 and packed and any(n % (2 * ranks) for n in starts):
            got = f"{name if begin is None else name + '_padded'} = {starts} over {ranks} ranks"
            allowed = f"lengths that are multiples of {2 * ranks}: each sequence is cut into so many chunks"
            raise wrong(got, allowed, "pad the sequences: pad_thd_sequences_for_cp")
        longest_length, most = max(lengths, default=0), getattr(given, f"max_seqlen_{which}")
        if packed and most is not None and longest_length > most:
            got = f"max_seqlen_{which}={most} with a sequence of {longest_length} tokens"
            raise wrong(got, "the longest length, or more", "correct it, or leave it out")


def step(inference: Any, mask: str, module: Any, k: Any, v: Any, form: str) -> tuple[Any, ...]:
    """What a cache holds after this attention's k and v.

    A KV cache goes with mask types that have padding; its older form takes all, and means these.
    """
    if exporting.on:
        raise not_exported("inference_params: a cache that a call changes", "a call without a cache", "pass all keys")
    if "padding" not in canonical_mask(OPERATION, mask) and not getattr(inference, "is_older_form", False):
        got = f"attn_mask_type={mask!r} with inference_params"
        raise wrong(got, "a mask type with padding", "choose padding_causal, say")
    if hasattr(inference, "step_of"):
        stepped: tuple[Any, ...] = inference.step_of(module, k, v, form)
    else:  # a class of the user's own
        stepped = inference.step(module.layer_number, k, v, form)
    return stepped


def from_cache(given: Given, inference: Any, stepped: tuple[Any, ...]) -> Given:
    """The call with the keys and values that a cache holds: `stepped` is what its step gave for the new ones.

    (The step is taken before `given` is made: it breaks a tracing compiler's graph, and torch 2.11 shows a frame whose
    named tuples are not filled yet to code that reads them.)
    """
    assert given.attn_mask_type is not None
    mask = canonical_mask(OPERATION, given.attn_mask_type)
    if "padding" not in mask:
        mask = {"no_mask": "padding"}.get(mask, f"padding_{mask}")
    if given.attention_mask is not None:
        _say_unread("with inference_params: lengths take its place")
    k, v, cu_q, cu_kv, capacity, _ = stepped
    return given.but(
        b=k,
        c=v,
        attention_mask=None,
        cu_seqlens_q=cu_q,
        cu_seqlens_kv=cu_kv,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=given.max_seqlen_q or getattr(inference, "max_seqlen_q", 0) or None,
        max_seqlen_kv=capacity,
        attn_mask_type="padding_causal_bottom_right" if mask == "padding_causal" else mask,
        pages=inference.cache_manager.page_table[: cu_q.shape[0] - 1] if inference.is_paged else None,
    )


_said: set[str] = set()


@constant_at_trace
def _say_unread(why: str) -> None:
    """Once: programs give a mask at each step, and it changes nothing."""
    if why not in _said:
        _said.add(why)
        warn_outside(f"{OPERATION}: attention_mask is not read {why}")


_slopes: dict[tuple[Any, ...], torch.Tensor] = {}


def new_slopes(static: Static, device: torch.device) -> torch.Tensor:
    """The usual slopes of this rank's heads, as traced code makes them."""
    first, slopes = static.first_head, alibi_slopes(static.all_heads or static.heads)
    return torch.tensor(slopes[first : first + static.heads], dtype=torch.float32, device=device)


def kept_slopes(static: Static, device: torch.device) -> torch.Tensor:
    """The same of eager code: one tensor for each device."""
    key = static.all_heads or static.heads, static.first_head, static.heads, device
    found = _slopes.get(key)
    if found is None:
        with torch.inference_mode(False):  # autograd may save them in later calls
            found = new_slopes(static, device)
        # A tensor of a capture's memory may not outlive it.
        if not (found.is_cuda and torch.cuda.is_current_stream_capturing()):
            _slopes[key] = found
    return found


def layer_inputs(
    module: Any,
    given: Given,
    how: Preparation,
    known: Sums = (None, None),
    slopes_of: Callable[[Static, torch.device], torch.Tensor] = kept_slopes,
) -> AttentionInputs:
    """The tensors of a call as the core's layer, and every other backend, takes them; `known`: lengths of its masks."""
    a, bias, slopes, mask, rng = given.a, given.core_attention_bias, given.alibi_slopes, None, None
    cu_q = cu_kv = q_padded = kv_padded = None
    if how.lengths == "given":
        cu_q, cu_kv = given.cu_seqlens_q, given.cu_seqlens_kv
        q_padded, kv_padded = given.cu_seqlens_q_padded, given.cu_seqlens_kv_padded
    elif how.lengths == "mask":
        cu_q = cu_kv = get_cu_seqlens(given.attention_mask) if known[0] is None else known[0]
    elif how.lengths == "masks":
        cu_q, cu_kv = (
            get_cu_seqlens(m) if cu is None else cu for m, cu in zip(given.attention_mask, known, strict=True)
        )
    if bias is not None:
        if how.bias == "pre_scale_bias":
            bias = bias * module.softmax_scale
        if how.rows:
            bias = bias.expand(-1, -1, how.rows, -1)
        bias = bias.to(a.dtype).contiguous()
    if how.bias == "alibi":
        slopes = slopes_of(module._static, a.device) if slopes is None else slopes.float().contiguous()
    # A converted module's offset is not in float32.
    sink = module.softmax_offset.float() if module.softmax_type == "learnable" else None
    if how.keys:
        mask = given.attention_mask
        if mask.dtype != torch.bool:
            do = "convert it, or pass a mask of numbers as core_attention_bias"
            raise wrong(f"an attention_mask of {mask.dtype}", "torch.bool, True where a key is hidden", do)
        mask = mask[(None,) * (4 - mask.ndim)]  # all four dimensions and all keys, dense
        mask = mask.expand(*mask.shape[:-1], how.keys).contiguous()
    if how.draws:
        rng = random_pair(a, module._fork)
    parts = (bias, slopes, sink, cu_q, cu_kv, q_padded, kv_padded, mask, given.pages, rng)
    inputs, device = AttentionInputs(a, given.b, given.c, *parts), a.device
    for t in parts:
        if t is not None and t.device != device:
            check_beside(OPERATION, a, **inputs._asdict())
    return inputs
