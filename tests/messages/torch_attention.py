"""Rows of messages of attention, its caches, rotary embeddings, and layers around it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

import te_torch as te
from te_torch.attention import utils
from te_torch.attention.inference import InferenceParams
from te_torch.attention.rope import RotaryPositionEmbedding, apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb
from tests.attention_steps import BATCH, GROUPS, HEADS, SEQ, WIDTH, inputs, make, padding, sums
from tests.messages.rows import Rows
from tests.torch.test_bad_options import make as module

ROWS = Rows()
BOOL, INT32, META = {"dtype": torch.bool}, {"dtype": torch.int32}, {"device": "meta"}


def shaped(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


# ------------------------------------------------------------------------------------------------- one call


def attention(**changes: Any) -> None:
    """A call with some arguments changed; without q, k and v where it has a packed projection."""
    named = dict(zip(("query_layer", "key_layer", "value_layer"), inputs(), strict=True))
    given = {**({} if {"qkv_layer", "kv_layer"} & {*changes} else named), **changes}
    make(num_gqa_groups=given.pop("groups", GROUPS))(**given)


def thd(cu: Any = None, cu_kv: Any = None, **changes: Any) -> None:
    """The same of six packed tokens, with these running sums."""
    shapes = (("query_layer", HEADS), ("key_layer", GROUPS), ("value_layer", GROUPS))
    tensors = {name: shaped(SEQ, heads, WIDTH) for name, heads in shapes}
    if cu is not None:
        both = (cu, cu if cu_kv is None else cu_kv)
        tensors |= {
            f"cu_seqlens_{n}": torch.tensor(c, **INT32) if isinstance(c, list) else c
            for n, c in zip(("q", "kv"), both, strict=True)
        }
    attention(**{"qkv_format": "thd", "attn_mask_type": "padding", **tensors, **changes})


ROWS.add(attention, key_layer=shaped(BATCH, SEQ, GROUPS, WIDTH, dtype=torch.bfloat16))
ROWS.add(attention, query_layer=shaped(BATCH, SEQ, HEADS, WIDTH, **INT32))
for wrong in (shaped(BATCH, SEQ, 5, WIDTH), shaped(BATCH, SEQ, HEADS, 8), shaped(SEQ, HEADS, WIDTH), None):
    ROWS.add(attention, query_layer=wrong)
ROWS.each(attention, key_layer=(shaped(BATCH, SEQ, 4, WIDTH), None))
ROWS.each(attention, value_layer=(shaped(BATCH, SEQ, GROUPS, 8), shaped(BATCH, SEQ + 1, GROUPS, WIDTH)))
ROWS.each(
    attention,
    qkv_format=("hbsd", "thd"),
    attn_mask_type=("triangle", "padding", "arbitrary"),
    alibi_slopes=(shaped(HEADS),),
    core_attention_bias=(shaped(1, HEADS, SEQ, SEQ),),
    core_attention_bias_type=("lopsided", "post_scale_bias"),
    window_size=("ab", 3, (-1, 2)),
    bottom_right_diagonal=("x",),
    checkpoint_core_attention=("x",),
    inference_params=("a cache",),
    score_mod=(3,),
    score_mod_bprop=(max,),
    score_mod_tensors=({},),
    score_mod_bprop_tensors=({},),
    torch_score_mod=("causal",),
)
MASK = padding([1, 2, 3])
for wrong in (padding([1, 2, 3], SEQ + 1), shaped(BATCH, 1, SEQ, SEQ, **BOOL), MASK.float(), "yes", (), (MASK, None)):
    ROWS.add(attention, attn_mask_type="padding", attention_mask=wrong)
ROWS["a padding mask on another device"] = lambda: attention(attn_mask_type="padding", attention_mask=MASK.to("meta"))
ROWS["one padding mask for queries and longer keys"] = lambda: attention(
    attn_mask_type="padding",
    attention_mask=MASK,
    key_layer=shaped(BATCH, 9, GROUPS, WIDTH),
    value_layer=shaped(BATCH, 9, GROUPS, WIDTH),
)
for wrong in (shaped(SEQ, 5, **BOOL), shaped(SEQ, SEQ)):
    ROWS.add(attention, attn_mask_type="arbitrary", attention_mask=wrong)
ROWS["an arbitrary mask on another device"] = lambda: attention(
    attn_mask_type="arbitrary", attention_mask=shaped(SEQ, SEQ, **BOOL, **META)
)
for name, both in {
    "int64 and int32": (sums([1, 2, 3]).long(), sums([1, 2, 3])),
    "two sequences": (sums([1, 2]),) * 2,
    "lists": ([0, 6],) * 2,
    "two dimensions": (sums([1, 2, 3])[:, None],) * 2,
    "longer rows": (sums([1, 2, SEQ + 1]), sums([1, 2, 3])),
    "longer keys": (sums([1, 2, 3]), sums([1, 9, 3])),
    "another device": (shaped(4, **INT32, **META), shaped(4, **INT32)),
}.items():
    ROWS[f"attention in rows with cu_seqlens of {name}"] = lambda both=both: attention(
        attn_mask_type="padding", cu_seqlens_q=both[0], cu_seqlens_kv=both[1]
    )
ROWS.add(attention, core_attention_bias_type="alibi", alibi_slopes=[1.0])
ROWS.add(attention, core_attention_bias_type="alibi", alibi_slopes=shaped(GROUPS))
ROWS["slopes on another device"] = lambda: attention(
    core_attention_bias_type="alibi", alibi_slopes=shaped(HEADS, **META)
)
ROWS.add(attention, core_attention_bias_type="post_scale_bias", core_attention_bias=shaped(1, HEADS, SEQ, 5))
ROWS["a bias on another device"] = lambda: attention(
    core_attention_bias_type="post_scale_bias", core_attention_bias=shaped(1, 1, SEQ, SEQ, **META)
)
ROWS.add(thd)
ROWS.add(thd, [0, 4, 6], [0, 6])
ROWS["thd with cu_seqlens in tuples"] = lambda: thd((0, 6))
for wrong in ([], [3, 5, 6], [0, 5, 4], [0, 5, 10]):
    ROWS.add(thd, wrong)
ROWS.add(thd, [3, 5, 6], max_seqlen_q=6, max_seqlen_kv=6)
ROWS.add(thd, [0, 5, 6], max_seqlen_q=6, max_seqlen_kv="6")
ROWS.add(thd, [0, 5, 6], max_seqlen_q=4, max_seqlen_kv=5)
ROWS["begins of one sequence"] = lambda: thd([0, 2, 4], cu_seqlens_q_padded=sums([4, 2])[:2])
ROWS["begins beyond the tokens"] = lambda: thd([0, 2, 4], cu_seqlens_q_padded=sums([5, 1]))
ROWS["a bias of packed sequences"] = lambda: thd(
    [0, 4, 6], core_attention_bias_type="post_scale_bias", core_attention_bias=shaped(1, 1, SEQ, SEQ)
)
for shapes in (
    {"qkv_layer": (2, 6, 3, 4, 16), "kv_layer": (2, 6, 2, 4, 16)},
    {"qkv_layer": (2, 6, 3, 4, 16), "query_layer": (2, 6, 4, 16)},
    {"kv_layer": (2, 6, 2, 4, 16), "query_layer": (2, 6, 4, 16), "key_layer": (2, 6, 4, 16)},
    {"kv_layer": (2, 6, 2, 4, 16)},
    {"qkv_layer": (2, 6, 4, 16)},
    {"qkv_layer": (2, 6, 2, 4, 16)},
    {"qkv_layer": (2, 6, 3, 5, 16)},
    {"qkv_layer": (6, 2, 3, 16, 4)},
):
    ROWS.add(attention, groups=HEADS, **{name: shaped(*shape) for name, shape in shapes.items()})
QKV = shaped(2, 6, 3, 4, 16)
ROWS.add(attention, groups=HEADS, qkv_layer=QKV, qkv_interleave_dim=-2)
ROWS.add(attention, groups=HEADS, qkv_layer=QKV, qkv_interleave_dim=0)
ROWS.add(attention, groups=HEADS, qkv_layer=QKV, inference_params="a cache")
ROWS.add(attention, groups=1, qkv_layer=shaped(6, 2, 3, 2, 16))
ROWS["a packed projection whose last stride is not one"] = lambda: attention(
    groups=HEADS, qkv_layer=shaped(2, 6, 3, 16, 4).transpose(-1, -2)
)
ROWS["packed keys and values as wide as they should be, of other heads"] = lambda: te.DotProductAttention(
    4, (16, 8), 2
)(torch.randn(6, 2, 4, 16), kv_layer=torch.randn(6, 2, 2, 2, 12))


def same(graph: Any, score: Any, tensors: Any) -> Any:
    return score


for options in (
    {"score_mod_bprop_tensors": {}},
    {"score_mod_bprop": 3},
    {"score_mod_tensors": [1]},
    {"score_mod_tensors": {1: torch.ones(1)}},
    {"score_mod_tensors": {"a": 1.0}},
    {"torch_score_mod": same},
):
    ROWS.add(attention, score_mod=same, **options)
ROWS["a score_mod with a tensor that wants a gradient"] = lambda: attention(
    score_mod=same, score_mod_tensors={"a": torch.ones(1, requires_grad=True)}
)
ROWS["a torch_score_mod that gives a sum"] = lambda: attention(torch_score_mod=lambda s, *_: s.sum())
ROWS["a torch_score_mod that gives None"] = lambda: attention(torch_score_mod=lambda s, *_: None)
ROWS["a torch_score_mod that gives flags"] = lambda: attention(torch_score_mod=lambda s, *_: s > 0)
ROWS.each(module, "DotProductAttention", kv_channels=((16,), (16, 0), [16, 16, 16]))

# ------------------------------------------------------------------------------------------------- layers around it

X, FLOAT_MASK = shaped(12, 2, 32), shaped(2, 1, 1, 12)


def layer(kind: str, made: dict[str, Any] | None = None, **options: Any) -> None:
    """A forward."""
    module(kind, **(made or {}))(**{"hidden_states": X, **options})


ROWS.each(
    layer,
    "MultiheadAttention",
    attn_mask_type=("diagonal",),
    hidden_states=(X[0],),
    inference_params=("a cache",),
    rotary_pos_emb=("yes", (X, 3), (), (X,), (X, X, X)),
)
ROWS.add(layer, "MultiheadAttention", {"attention_type": "cross"})
ROWS.add(layer, "MultiheadAttention", {"attention_type": "cross"}, encoder_output=[1.0])
ROWS.each(
    layer,
    "TransformerLayer",
    self_attn_mask_type=("diagonal",),
    enc_dec_attn_mask_type=("diagonal",),
    attention_mask=(FLOAT_MASK,),
    enc_dec_attn_mask=((FLOAT_MASK,),),
    hidden_states=(X[0],),
)
ROWS.add(layer, "TransformerLayer", {"layer_type": "decoder"})

# ------------------------------------------------------------------------------------------------- masks and layouts

for window in ((-1, 3), (-2, 0)):
    ROWS.add(utils.check_set_window_size, "causal", window)
ROWS.add(utils.check_set_window_size, "no_mask", (-1, 3))
ROWS.add(utils.check_set_window_size, "padding", (3, -1))
ROWS.add(utils.check_set_window_size, "casual", None)
ROWS.add(utils.get_full_mask, 3, 5, "padding")
ROWS.add(utils.get_qkv_layout, *inputs(), "hsbd")

# ------------------------------------------------------------------------------------------------- caches


def cache(**options: Any) -> InferenceParams:
    usual = {"num_heads_kv": 2, "head_dim_k": 8, "dtype": torch.float32, "head_dim_v": 16, "device": "cpu"}
    return InferenceParams(**{"max_batch_size": 4, "max_sequence_length": 24, **usual, **options})


for wrong in (
    {"num_heads_kv": None},
    {"head_dim_k": None},
    {"dtype": None},
    {"qkv_format": "bhsd"},
    {"qkv_format": "thd"},
    {"is_paged": True},
    {"is_paged": True, "page_size": 5, "total_num_pages": 19},
    {"is_paged": True, "page_size": 4, "total_num_pages": 23},
    {"is_paged": True, "page_size": -4, "total_num_pages": -24},
    {"max_batch_size": 0},
    {"max_sequence_length": -1},
    {"num_heads_kv": None, "head_dim_k": None, "dtype": None, "is_paged": True},
    {"num_heads_kv": None, "head_dim_k": None, "dtype": None, "qkv_format": "thd", "max_ctx_len": 8},
):
    ROWS.add(cache, **wrong)


def cached(*shape: int, form: str = "bshd", begun: bool = True, **made: Any) -> None:
    """A step of two sequences of four tokens and one, with keys of this shape."""
    p = cache(**{n: v for n, v in made.items() if n != "to"})
    if begun:
        p.pre_step(OrderedDict({1: 4, 2: 1}))
    k, v = (shaped(*shape, 2, d, **made.get("to", {})) for d in (8, 16))
    p.step(1, k, v, form)


ROWS.add(cached, 1, 1, begun=False)
for shape in ((2, 3), (1, 4), (5, 4)):
    ROWS.add(cached, *shape)
ROWS.add(cached, 2, 4, form="sbhd")
ROWS.add(cached, 5, form="thd")
ROWS.add(cached, 2, 4, to={"dtype": torch.bfloat16})
ROWS.add(cached, 2, 4, to=META)
ROWS["pages of a cache in rows"] = lambda: cache().convert_paged_to_nonpaged(1)


def continued() -> None:
    """A sequence of the cache goes on by three tokens."""
    p = cache()
    p.pre_step(OrderedDict({1: 4}))
    p.pre_step(OrderedDict({1: 3}))


ROWS.add(continued)


def five_rows(p: Any) -> None:
    """Of a cache for four."""
    made = {"layer_number": 1, "qkv_format": "bshd", "attn_mask_type": "padding_causal"}
    angles = shaped(24, 1, 1, WIDTH)
    layer("MultiheadAttention", made, hidden_states=shaped(5, 3, 32), inference_params=p, rotary_pos_emb=angles)


ROWS["a fifth sequence"] = lambda: five_rows(cache(head_dim_k=WIDTH, head_dim_v=WIDTH))
ROWS["a fifth sequence in the older form"] = lambda: five_rows(InferenceParams(4, 24, device="cpu"))
PAGED = {"is_paged": True, "page_size": 4, "total_num_pages": 24}
ROWS["pages of a layer that has none"] = lambda: cache(**PAGED).convert_paged_to_nonpaged(1)
ROWS["pre_step of the older form"] = lambda: InferenceParams(2, 8, device="cpu").pre_step(OrderedDict({1: 1}))
ROWS["allocate_memory of the older form"] = lambda: InferenceParams(2, 8, device="cpu").allocate_memory(1)


def older(**offsets: int) -> None:
    """A step of the older form that begins there."""
    p = InferenceParams(2, 8, device="cpu")
    vars(p).update(offsets)
    p.step(1, shaped(2, 4, 2, 8), shaped(2, 4, 2, 8), "bshd")


ROWS.each(older, sequence_len_offset=(5,), batch_size_offset=(1,))

# ------------------------------------------------------------------------------------------------- angles

T, FREQS, STARTS = shaped(4, 2, 2, 8), shaped(4, 1, 1, 8), torch.zeros(2, **INT32)
THD: dict[str, Any] = {"tensor_format": "thd", "cu_seqlens": torch.tensor([0, 1, 4], **INT32)}


def turn(t: torch.Tensor = T, freqs: torch.Tensor = FREQS, **options: Any) -> None:
    apply_rotary_pos_emb(t, freqs, **options)


def turn_all(q: torch.Tensor = FREQS, k: torch.Tensor = FREQS, split: Any = (8, 8, 8), **options: Any) -> None:
    apply_fused_qkv_rotary_pos_emb(shaped(4, 2, 1, 24), q, k, list(split), **options)


for fused in (False, True):
    ROWS.add(turn, fused=fused, tensor_format="bhsd")
    ROWS.add(turn, T[0], fused=fused, tensor_format="thd")
    for options in (
        {"freqs": FREQS[..., :7]},
        {"freqs": FREQS[..., :1]},
        {"freqs": FREQS.repeat(1, 1, 1, 2)},
        {"t": T[0]},
        {"t": T, **THD},
        {"t": T[:, 0], "freqs": FREQS[..., :7], **THD},
    ):
        ROWS.add(turn, fused=fused, **options)
# All of these would spread one row, or one start, to several positions, or take a wrong row.
ROWS.each(turn, freqs=(FREQS[:1], FREQS[:3], FREQS[:, 0, 0]), cp_size=(2,), cp_rank=(1,), start_positions=(STARTS[:1],))
ROWS.add(turn, T[:, 0], **{**THD, "cu_seqlens": torch.tensor([0, 2, 4])}, start_positions=torch.tensor([0, 3]))
ROWS.add(turn, shaped(5, 2, 8), **THD)
ROWS["starts beyond the angles"] = lambda: turn(start_positions=torch.tensor([0, 1], **INT32))
ROWS["angles on another device"] = lambda: turn(freqs=FREQS.to("meta"), fused=True)
ROWS["angles of keys on another device"] = lambda: turn_all(k=FREQS.to("meta"))
ROWS.add(turn_all, tensor_format="thd")
for layout in (torch.strided, torch.jagged):
    for fused in (False, True):
        ROWS[f"rotary embedding of a nested tensor, {layout}, fused={fused}"] = lambda layout=layout, fused=fused: turn(
            torch.nested.nested_tensor([shaped(2, 2, 8), shaped(3, 2, 8)], layout=layout), fused=fused
        )
ROWS.add(turn_all, start_positions=STARTS, cp_size=2)
ROWS.add(turn_all, split=(10, 8, 6))
ROWS["a projection that does not lie in one piece"] = lambda: apply_fused_qkv_rotary_pos_emb(
    shaped(2, 4, 1, 24).transpose(0, 1), FREQS, FREQS, [8, 8, 8]
)
for dim, percent in ((15, 1.0), (1, 1.0), (0, 1.0), (-4, 1.0), (10, 0.5), (10, 0.05)):
    ROWS.add(RotaryPositionEmbedding, dim, percent)
