"""What cuDNN does of an attention, and why not: every rule refuses something, for the reason that it names. And masks
and slopes by their names.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import numpy as np

from te_core import attention_rules, dtypes
from te_core.attention import AttentionSpec, Sizes, alibi_slopes, canonical_mask, diagonal_is_bottom_right, with_mask
from te_core.attention_rules import cudnn_attention
from te_core.device import DeviceInfo

HOPPER = DeviceInfo("NVIDIA H200", (9, 0), 132, 50 << 20, 141 << 30, (13, 0))
BLACKWELL = replace(HOPPER, name="NVIDIA B200", capability=(10, 0))
AMPERE = replace(HOPPER, name="NVIDIA A100", capability=(8, 0))
VOLTA = replace(HOPPER, name="NVIDIA V100", capability=(7, 0))
HERE = (9, 19, 0)
SPEC = AttentionSpec(0.1, "bshd", "bshd")
SIZE = Sizes(2, 256, 256, 8, 8, 128, 128)
THD = {"q_format": "thd", "kv_format": "thd", "padded": True, "max_q": 256, "max_kv": 256}


def asked(size=None, device=HOPPER, version=HERE, dtype=dtypes.bfloat16, training=True, fp8=False, keys=None, **spec):
    """The rules' answer for the common case, changed so."""
    return cudnn_attention(
        device, version, replace(SPEC, **spec), SIZE._replace(**(size or {})), dtype, training, fp8, **(keys or {})
    )


# fmt: off
ACCEPTED = {
    "plain": {},
    "float16": {"dtype": dtypes.float16},
    "causal, grouped": {"size": {"groups": 2}, "right": 0},
    "a band": {"left": 3, "right": 5},
    "a left bound": {"left": 3},
    "bottom-right, any lengths": {"size": {"sq": 333, "skv": 777}, "right": 0, "bottom_right": True},
    "bottom-right, more queries than keys": {"size": {"skv": 100}, "right": 0, "bottom_right": True},
    "a window, more queries than keys": {"size": {"skv": 100}, "left": 7, "right": 0},
    "one diagonal in both corners, with dropout": {"right": 0, "bottom_right": True, "dropout": 0.1},
    "lengths": {"padded": True, "right": 0, "bottom_right": True},
    "thd": {**THD, "right": 0},
    "thd q, bshd k and v": {**THD, "kv_format": "bshd"},
    "a bias and its gradient": {"bias": "post_scale_bias", "keys": {"bias_grad": True}},
    "a bias in thd": {**THD, "bias": "post_scale_bias"},
    "alibi": {"bias": "alibi", "right": 0},
    "alibi bottom-right": {"size": {"sq": 128}, "bias": "alibi", "right": 0, "bottom_right": True},
    "dropout with a window": {"dropout": 0.1, "left": 7, "right": 0},
    "a learnable sink": {"softmax": "learnable"},
    "a sink in thd, forward": {**THD, "softmax": "learnable", "training": False},
    "a sink in thd, cuDNN 9.26": {**THD, "softmax": "learnable", "version": (9, 26, 0)},
    "a soft-cap, causal": {"softcap": 30.0, "right": 0},
    "max_logit": {"max_logit": True, "right": 0},
    "deterministic": {"deterministic": True, "dropout": 0.1},
    "192 and 128 wide": {"size": {"d_qk": 192}},
    "256 wide": {"size": {"d_qk": 256, "d_v": 256}},
    "512 wide, forward": {"size": {"d_qk": 512, "d_v": 512}, "training": False},
    "40 wide": {"size": {"d_qk": 40, "d_v": 40}},
    "paged": {"padded": True, "training": False, "keys": {"paged": True}},
    "one query": {"size": {"sq": 1}},
    "FP8": {"fp8": "delayed", "right": 0},
    "FP8 operands": {"fp8": True, "dtype": dtypes.float8_e4m3, "padded": True},
    "FP8 64 wide, forward": {"fp8": True, "size": {"d_qk": 64, "d_v": 64}, "training": False},
}
REFUSED = {
    "_version": ({"version": (9, 10, 2)}, "needs cuDNN 9.11"),
    "_capability": ({"device": VOLTA}, "compute capability 8.0"),
    "_mask_tensor": ({"masked": True}, "arbitrary mask"),
    "_alignment": ({"keys": {"aligned": False}}, "16 bytes"),
    "_bottom_right_extras": ({"size": {"sq": 128}, "right": 0, "bottom_right": True, "dropout": 0.1}, "dropout"),
    "_sink_version": ({"softmax": "off-by-one", "version": (9, 12, 0)}, "9.13.1"),
    "_sink_of_one_query": ({"softmax": "learnable", "size": {"sq": 1}}, "more than one query"),
    "_packed_device": ({"device": AMPERE, **THD}, "compute capability 9.0"),
    "_packed_keys": ({**THD, "q_format": "bshd"}, "packed queries"),
    "_packed_bias": ({"device": BLACKWELL, **THD, "bias": "post_scale_bias"}, "bias"),
    "_paged": ({"padded": True, "keys": {"paged": True}}, "no backward"),
    "_f16": ({"dtype": dtypes.float32}, "not float32"),
    "_width_step": ({"size": {"d_qk": 36}}, "multiples of 8, not 36/128"),
    "_widest_forward": ({"size": {"d_qk": 520, "d_v": 520}, "training": False}, "512, this is 520"),
    "_dropout_of_all": ({"dropout": 1.0}, "below one"),
    "_window_and_dropout": ({"device": BLACKWELL, "left": 7, "right": 0, "dropout": 0.1}, "dropout"),
    "_softcap": ({"softcap": 30.0, "padded": True}, "lengths"),
    "_max_logit": ({"max_logit": True, "softmax": "learnable"}, "sink"),
    "_fp8_device": ({"fp8": True, "device": AMPERE}, "9.0"),
    "_fp8_scaling": ({"fp8": "current"}, "not current"),
    "_fp8_dtype": ({"fp8": True, "dtype": dtypes.int8}, "int8"),
    "_fp8_width": ({"fp8": True, "size": {"d_qk": 72, "d_v": 72}, "training": False}, "multiples of 16"),
    "_fp8_bias": ({"fp8": True, "bias": "alibi"}, "no bias"),
    "_fp8_bottom_right": ({"fp8": True, "right": 0, "bottom_right": True, "padded": True}, "bottom-right"),
    "_fp8_packed": ({"fp8": True, **THD, "training": False}, "packed"),
    "_fp8_softmax": ({"fp8": True, "softmax": "off-by-one"}, "sink"),
    "_fp8_extras": ({"fp8": True, "dropout": 0.1}, "dropout"),
    "_train_width": ({"size": {"d_qk": 512, "d_v": 512}}, "256, this is 512"),
    "_train_fp8_queries": ({"fp8": True, "size": {"sq": 24}}, "last multiple of 16, here 24"),
    "_train_one_pair": ({"size": {"sq": 1, "skv": 1}}, "more than one query and key"),
    "_train_packed_sink": ({**THD, "softmax": "learnable"}, "9.26"),
    "_train_bias_of_keys": ({"bias": "post_scale_bias", "keys": {"bias_rows": 1}}, "without a query dimension"),
    "_train_deterministic": ({"device": BLACKWELL, "deterministic": True, "dropout": 0.1}, "dropout"),
    "_train_softcap_dbias": ({"softcap": 30.0, "bias": "post_scale_bias", "keys": {"bias_grad": True}}, "gradient"),
    "_train_softcap_ragged": ({"softcap": 90.0, "size": {"sq": 100}}, "multiples of 128"),
}
MORE = {
    "bias bottom-right": ({"size": {"sq": 128}, "right": 0, "bottom_right": True, "bias": "post_scale_bias"}, "bias"),
    "lengths make corners uncertain": ({"padded": True, "right": 0, "bottom_right": True, "dropout": 0.1}, "dropout"),
    "paged without lengths": ({"training": False, "keys": {"paged": True}}, "lengths"),
    "paged with dropout": ({"padded": True, "training": False, "dropout": 0.1, "keys": {"paged": True}}, "dropout"),
    "soft-cap with two bounds": ({"softcap": 30.0, "left": 3, "right": 0}, "both"),
    "soft-cap, queries without keys": ({"softcap": 30.0, "left": 3, "size": {"skv": 64}}, "key for each"),
    "soft-cap and a bias, ragged": ({"softcap": 30.0, "bias": "post_scale_bias", "size": {"skv": 130}}, "multiples of"),
    "soft-cap and ALiBi": ({"softcap": 30.0, "bias": "alibi"}, "ALiBi"),
    "FP8 training 64 wide": ({"fp8": True, "size": {"d_qk": 64, "d_v": 64}}, "heads of 128"),
    "128 is Blackwell's widest": ({"device": BLACKWELL, "size": {"d_qk": 160, "d_v": 160}}, "128"),
    "FP8 deterministic, Blackwell": ({"fp8": True, "device": BLACKWELL, "version": (9, 18, 0),
                                      "deterministic": True}, "9.19"),
    "max_logit, older": ({"max_logit": True, "version": (9, 12, 0)}, "needs cuDNN 9.13"),
    "max_logit, paged": ({"max_logit": True, "padded": True, "training": False, "keys": {"paged": True}}, "paged"),
    "192 and 128 wide, older": ({"size": {"d_qk": 192}, "version": (9, 12, 0)}, "192/128 needs"),
    "a learnable sink, deterministic": ({"softmax": "learnable", "deterministic": True}, "not deterministic"),
    "deterministic, packed, consumer Blackwell": ({"device": replace(BLACKWELL, capability=(12, 0)), **THD,
                                                   "deterministic": True}, "packed"),
    "FP8 soft-cap": ({"fp8": True, "softcap": 30.0}, "soft-cap"),
    "FP8 max_logit": ({"fp8": True, "max_logit": True}, "max_logit"),
    "FP8 paged": ({"fp8": True, "padded": True, "training": False, "keys": {"paged": True}}, "paged cache"),
}
# fmt: on


def test_accepts():
    answers = {name: asked(**changes) for name, changes in ACCEPTED.items()}
    assert {name: reason for name, (able, reason) in answers.items() if not able or "cuDNN 9." not in reason} == {}


def test_refuses_with_the_reason():
    for name, (changes, words) in {**REFUSED, **MORE}.items():
        able, reason = asked(**changes)
        assert not able, name
        assert words in reason, (name, reason)
        named = reason.startswith(("cuDNN", "q, k", "max_logit"))
        assert reason.endswith(".") and reason[0].upper() == reason[0] or named, (name, reason)


def test_every_rule_is_tried():
    """Each reason that the rules have is that of a case."""
    text = inspect.getsource(attention_rules)
    text = text[text.index("def _of_all") : text.index("#: What `fp8_refusal`")]
    told = len(re.findall(r'(return|else) f?"', text)) + 4  # those of what FP8 has none of
    found = {re.sub(r"[\d.]+", "#", asked(**changes)[1]) for changes, _ in (REFUSED | MORE).values()}
    assert len(found) == told, sorted(found)


def test_forward_asks_less_than_training():
    """What is trained can be run forward: the rules of training only add."""
    for changes, _ in REFUSED.values():
        if asked(**{**changes, "training": True})[0]:
            assert asked(**{**changes, "training": False})[0]
    for changes in ACCEPTED.values():
        assert asked(**{**changes, "training": False})[0]


def test_equal_corners_have_one_diagonal():
    """Without lengths and with as many queries as keys, top-left and bottom-right are the same."""
    for extra in ({"dropout": 0.1}, {"bias": "post_scale_bias"}, {"fp8": True}):
        assert asked(right=0, bottom_right=True, **extra)[0] == asked(right=0, **extra)[0]


def test_a_window_of_nothing_is_no_band():
    """bottom_right without bounds changes nothing that cuDNN sees."""
    assert asked(size={"sq": 128}, bottom_right=True, dropout=0.1)[0]


def test_masks_by_their_names() -> None:
    """Aliases, the diagonal's corner, and what a type and a window let a query see."""
    assert canonical_mask("t", "padding,causal") == canonical_mask("t", "causal,padding") == "padding_causal"
    corners = {
        "causal": (False,) * 3,
        "padding_causal": (False,) * 3,
        "causal_bottom_right": (True,) * 3,
        "padding_causal_bottom_right": (True,) * 3,
        "no_mask": (True, False, True),
        "padding": (True, False, True),
        "arbitrary": (True, False, True),
    }
    for mask, wanted in corners.items():
        assert tuple(diagonal_is_bottom_right(mask, given) for given in (None, False, True)) == wanted, mask
    spec = with_mask(AttentionSpec(1.0), "padding_causal", (7, 0), None)
    assert (spec.left, spec.right, spec.bottom_right, spec.padded, spec.masked) == (7, 0, False, True, False)
    spec = with_mask(AttentionSpec(1.0), "arbitrary", (7, 3), False)
    assert (spec.left, spec.right, spec.bottom_right, spec.padded, spec.masked) == (7, 3, False, False, True)


def test_default_slopes() -> None:
    """Powers of two by exponent."""
    wanted = {1: [8], 2: [4, 8], 4: [2, 4, 6, 8], 3: [4, 8, 2], 6: [2, 4, 6, 8, 1, 3]}
    for heads, powers in wanted.items():
        np.testing.assert_allclose(alibi_slopes(heads), [2.0**-n for n in powers], rtol=1e-12)
