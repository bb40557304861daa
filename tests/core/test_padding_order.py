"""The order of tokens in rows with padding, against one place at a time."""

from __future__ import annotations

import numpy as np
import pytest

from te_core import ops
from te_core.errors import ArgumentError
from tests.core.inputs import placed, poisoned
from tests.reference.padding_order import padding_order

FORMS = ("sbhd", "bshd")
#: (rows, length): around the 32, 512 and 4096 places and the 1024 rows that the kernel counts in, and nothing at all.
SIZES = [
    *[(1, 1), (5, 1), (3, 31), (2, 33), (4, 256), (3, 300), (1, 511), (2, 513), (3, 4096), (2, 4097), (1, 9001)],
    *[(1023, 3), (1024, 2), (1500, 7), (2049, 2), (0, 0), (0, 16), (3, 0), (1100, 0)],
]


def masks(rows, length):
    """No padding, nothing else, padding behind the tokens, before them, and anywhere."""
    random, places = np.random.default_rng(rows + length), np.arange(length)
    lengths = random.integers(0, length + 1, rows)[:, None]
    none = np.zeros((rows, length), bool)
    mixed = random.random((rows, length)) < random.random((rows, 1))
    mixed[1::3], mixed[2::3] = False, True  # whole rows of tokens, and of padding
    return none, ~none, places >= lengths, places < length - lengths, random.random((rows, length)) < 0.4, mixed


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_order(rt, size, form):
    for mask in masks(*size)[2 if size[0] * size[1] > 4000 else 0 :]:
        found = ops.padding_order(poisoned(rt), rt.tensor(mask), form=form)
        for got, want in zip(found, padding_order(mask, form), strict=True):
            assert got.dtype.numpy == want.dtype
            np.testing.assert_array_equal(rt.numpy(got), want)


def test_any_byte_but_0_is_padding(rt):
    """At any address; the dimensions behind the first are a row's."""
    mask = np.random.default_rng(0).integers(0, 256, (3, 1, 5, 130)).astype(np.uint8)
    mask[mask < 100] = 0
    want = padding_order(mask.reshape(3, -1), "bshd")
    for shift in (0, 1, 3):
        for got, expected in zip(ops.padding_order(rt, placed(rt, mask, shift), form="bshd"), want, strict=True):
            np.testing.assert_array_equal(rt.numpy(got), expected)


def test_refusals(rt):
    mask = rt.tensor(np.zeros((2, 4), bool))
    for given, form, part in (
        (mask, "thd", "form"),
        (rt.tensor(np.zeros((2, 4), np.int32)), "bshd", "mask = .*dtype"),
        (rt.tensor(np.zeros((), bool)), "bshd", r"\[b, s\]"),
    ):
        with pytest.raises(ArgumentError, match=part):
            ops.padding_order(rt, given, form=form)
