"""The documented layout and mask helpers: what they answer, and that masks mean what their formulas say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_core.attention import AttentionSpec
from te_core.layers.attention import AttentionInputs, AttentionLayerSpec, AttentionNeeds
from te_torch.attention import masks, utils
from te_torch.attention.layouts import QKV_LAYOUTS, apart
from tests.attention_steps import padding
from tests.backends import on_devices

LEADS = {"sbhd": (6, 2), "bshd": (2, 6), "thd": (12,)}
NAMES = {"sbhd": "sb", "bshd": "bs", "thd": "t"}


@pytest.mark.parametrize("form", LEADS)
def test_packed_tensors_are_told_by_their_memory(form: str) -> None:
    lead, short = LEADS[form], NAMES[form]
    for dim, name in ((-3, f"{short}3hd"), (-2, f"{short}h3d")):
        shape = (*lead, 3, 4, 8) if dim == -3 else (*lead, 4, 3, 8)
        q, k, v = torch.randn(shape).unbind(dim)
        layout, *same, q_format, kv_format = utils.get_qkv_layout(q, k, v, form)
        assert layout == name and (q_format, kv_format) == (form, form)
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(same, (q, k, v), strict=True))
        # Parts in another order are not this layout.
        assert utils.get_qkv_layout(k, q, v, form)[0] == "_".join([form] * 3)
    for dim, name in ((-3, f"{form}_{short}2hd"), (-2, f"{form}_{short}h2d")):
        shape = (*lead, 2, 4, 8) if dim == -3 else (*lead, 4, 2, 8)
        k, v = torch.randn(shape).unbind(dim)
        assert utils.get_qkv_layout(torch.randn(*lead, 4, 8), k, v, form)[0] == name


@pytest.mark.parametrize("form", LEADS)
def test_separate_tensors(form: str) -> None:
    q, k, v = (torch.randn(*LEADS[form], 4, 8) for _ in range(3))
    assert utils.get_qkv_layout(q, k, v, form)[0] == "_".join([form] * 3)
    # Neighbours in one storage, but not packed: k before q's end.
    flat = torch.randn(3 * q.numel())
    q, k, v = (part.view(q.shape) for part in flat.chunk(3))
    assert utils.get_qkv_layout(q, k, v, form)[0] == "_".join([form] * 3)


def test_a_last_stride_other_than_one_is_copied() -> None:
    q = torch.randn(6, 2, 8, 4).transpose(2, 3)
    layout, copied, *_ = utils.get_qkv_layout(q, q, q, "sbhd")
    assert copied.stride(-1) == 1 and torch.equal(copied, q) and layout == "sbhd_sbhd_sbhd"


class Cache:
    is_paged = False


class Pages:
    is_paged = True


def test_layouts_with_a_cache() -> None:
    q = torch.randn(12, 4, 8)
    assert utils.get_qkv_layout(q, q, q, "thd", Cache())[0] == "thd_bshd_bshd"
    layout, _, _, _, q_format, kv_format = utils.get_qkv_layout(q, q, q, "thd", Pages())
    assert (layout, q_format, kv_format) == ("paged_kv_thd_bshd_bshd", "thd", "bshd")


def test_formats_of_layouts() -> None:
    for layout in QKV_LAYOUTS:
        both, q_format, kv_format = utils.get_qkv_format(layout)
        assert q_format in LEADS and kv_format in LEADS
        assert both == (q_format if q_format == kv_format else f"{q_format}_2{kv_format}")
    assert utils.get_qkv_format("sbh3d") == ("sbhd", "sbhd", "sbhd")
    assert utils.get_qkv_format("thd_t2hd") == ("thd", "thd", "thd")
    assert utils.get_qkv_format("thd_bshd_bshd") == ("thd_2bshd", "thd", "bshd")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("packing", ["qkv", "kv"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_a_packed_row_comes_apart(heads: int, groups: int, packing: str, interleaved: bool) -> None:
    """Rows made of named pieces: the pieces come back, in the order of the heads."""
    d_qk, d_v, times = 3, 5, heads // groups
    q, k, v = torch.randn(2, 6, heads, d_qk), torch.randn(2, 6, groups, d_qk), torch.randn(2, 6, groups, d_v)
    if interleaved:
        pieces = []
        for g in range(groups):
            mine = [q[..., g * times + i, :] for i in range(times)] if packing == "qkv" else []
            pieces += [*mine, k[..., g, :], v[..., g, :]]
    else:
        tensors = (q, k, v) if packing == "qkv" else (k, v)
        pieces = [t[..., i, :] for t in tensors for i in range(t.shape[-2])]
    row = torch.cat(pieces, -1)
    layer = AttentionLayerSpec(
        AttentionSpec(1.0, "bshd", "bshd"),
        heads,
        groups,
        d_qk,
        d_v,
        AttentionNeeds(True, True, True),
        packing,
        interleaved,
    )
    a, b = (row, None) if packing == "qkv" else (q, row)
    for got, wanted in zip(apart(layer, AttentionInputs(a, b)), (q, k, v), strict=True):
        assert torch.equal(got, wanted)


# ------------------------------------------------------------------------------------------------------- lengths


@on_devices
def test_lengths_of_a_padding_mask(device: str) -> None:
    mask = padding([3, 0, 5], 5, device)
    cu = utils.get_cu_seqlens(mask)
    assert cu.dtype == torch.int32 and cu.tolist() == [0, 3, 3, 8]
    cu, indices = utils.get_cu_seqlens_and_indices(mask)
    assert cu.tolist() == [0, 3, 3, 8] and indices.shape == (15, 1, 1)
    assert indices.flatten().tolist() == [0, 1, 2, 10, 11, 12, 13, 14, *[15] * 7]
    assert torch.equal(utils.get_padding_mask(3, cu, cu, 5, 5), mask)
    both = utils.get_padding_mask(3, cu, cu, 5, 7, "cross")
    assert torch.equal(both[0], mask) and both[1].shape == (3, 1, 1, 7)


@on_devices
def test_full_lengths(device: str) -> None:
    """Of the caller's own: what becomes of one changes no other."""
    cu = utils.get_full_cu_seqlens(3, 4, device)
    assert cu.tolist() == [0, 4, 8, 12] and cu.dtype == torch.int32
    cu.zero_()
    assert utils.get_full_cu_seqlens(3, 4, device).tolist() == [0, 4, 8, 12]
    assert utils.get_full_cu_seqlens(3, 0, device).tolist() == [0, 0, 0, 0]


def test_longest_length() -> None:
    cu = torch.tensor([0, 3, 70, 70], dtype=torch.int32)
    assert masks.longest("cu_seqlens_q", cu) == 128
    assert masks.longest("cu_seqlens_q", torch.tensor([0, 64], dtype=torch.int32)) == 64


# --------------------------------------------------------------------------------------------------------- masks


WINDOWS: list[tuple[str, Any, tuple[int, int], bool]] = [
    ("causal", None, (-1, 0), False),
    ("causal", (-1, 0), (-1, 0), False),
    ("causal", (-1, -1), (-1, 0), True),
    ("padding_causal", (4, 0), (4, 0), False),
    ("causal_bottom_right", (4, 2), (4, 0), True),
    ("causal", (4, -1), (4, 0), True),
    ("no_mask", None, (-1, -1), False),
    ("no_mask", (-1, -1), (-1, -1), False),
    ("padding", (-1, 0), (-1, -1), True),
    ("arbitrary", (4, 2), (4, 2), False),
    ("no_mask", (4, 0), (4, 0), False),
    ("no_mask", (0, 0), (0, 0), False),
]


@pytest.mark.parametrize(("mask", "window", "wanted", "warned"), WINDOWS)
def test_canonical_windows(mask: str, window: Any, wanted: Any, warned: bool, recwarn: pytest.WarningsRecorder) -> None:
    assert utils.check_set_window_size(mask, window) == wanted
    assert bool(recwarn.list) == warned


@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("window", [None, (2, 0)])
def test_full_mask_of_padded_sequences(mask: str, window: tuple[int, int] | None) -> None:
    lq, lk, sq, skv = [3, 5], [4, 2], 5, 6
    given = (padding(lq, sq), padding(lk, skv))
    name, hidden, got_q, got_kv = utils.get_full_mask(sq, skv, mask, given, window, "cross")
    assert name == ("arbitrary" if window else mask)
    assert got_q.tolist() == lq and got_kv.tolist() == lk
    for b in range(2):
        for i in range(sq):
            for j in range(skv):
                shift = 0 if mask == "padding_causal" else lk[b] - lq[b]
                seen = i < lq[b] and j < lk[b]
                if "causal" in mask or window:
                    seen = seen and j <= i + shift
                if window:
                    seen = seen and j >= i + shift - 2
                assert bool(hidden[b, 0, i, j]) is not seen, (b, i, j)


def test_full_mask_of_others() -> None:
    assert utils.get_full_mask(3, 3)[:2] == ("no_mask", None)
    name, hidden, *lengths = utils.get_full_mask(3, 5, "causal_bottom_right")
    assert name == "causal_bottom_right" and lengths == [None, None]
    assert torch.equal(hidden[0, 0], ~torch.ones(3, 5, dtype=torch.bool).tril(2))
    mask = torch.rand(2, 1, 3, 5) < 0.5
    assert torch.equal(utils.get_full_mask(3, 5, "arbitrary", mask)[1], mask)


@pytest.mark.parametrize("bottom_right", [True, False])
def test_alibi(bottom_right: bool) -> None:
    slopes, bias = utils.get_alibi(None, 6, 3, 5, bottom_right_alignment=bottom_right)
    # n = 4: powers of 2^(-8/4); the other two: 2^(-4/4)^1 and ^3
    assert torch.allclose(slopes, torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]))
    assert bias.shape == (1, 6, 3, 5)
    for h in range(6):
        for i in range(3):
            for j in range(5):
                wanted = -slopes[h] * abs(i + (2 if bottom_right else 0) - j)
                assert bias[0, h, i, j] == pytest.approx(float(wanted))
    lengths = torch.tensor([2, 3]), torch.tensor([5, 1])
    _, bias = utils.get_alibi({}, 6, 3, 5, None, *lengths, bias_dtype=torch.bfloat16)
    assert bias.shape == (2, 6, 3, 5) and bias.dtype == torch.bfloat16
    assert bias[0, 0, 1, 4] == 0 and bias[1, 0, 2, 0] == 0, "the diagonal ends with the sequence"
