"""Attention of sequences that lie cut over ranks, in one process, against float64 of the whole sequences."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.core.context_cases import Batch, Case, Made, run
from tests.covering import covering
from tests.tolerances import DB, snr_db

SIZES = {
    "p2p": [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1)],
    "all_gather": [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1)],
    "a2a": [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1)],
    "a2a+p2p": [(4, 2), (2, 1), (2, 2), (8, 2), (8, 4), (6, 3)],
}


def check(case: Case, made: Made, wanted: Made, batch: Batch) -> None:
    """All results, and zeros where there is no token."""
    for name, side in (("out", batch.q_side), ("dq", batch.q_side), ("dk", batch.kv_side), ("dv", batch.kv_side)):
        found, right = getattr(made, name), getattr(wanted, name)
        for t, s in zip(found, side.sequences, strict=True):
            assert not t[s.length :].any(), f"{name} of padding"
        a, b = (np.concatenate([t.reshape(-1).astype(np.float64) for t in ts]) for ts in (found, right))
        assert snr_db(a, b) > DB[case.dtype], name
    for name in ("dsink", "max_logit"):
        found, right = getattr(made, name), getattr(wanted, name)
        if found is not None:
            assert snr_db(found, right) > DB[case.dtype], name


def judged(**options: Any) -> None:
    case = Case(**options)
    batch = Batch(case)
    made, _ = run(case, batch)
    check(case, made, batch.reference(), batch)


CHOICES = [(mode, *sizes) for mode, listed in SIZES.items() for sizes in listed]


@covering(
    turns=2,
    choice=CHOICES,
    layout=[
        (form, mask)
        for form in ("sbhd", "bshd", "thd")
        for mask in ("no_mask", "causal", "padding", "padding_causal")
        if form != "thd" or "padding" in mask
    ],
    shared=[1, 2, 4],
    lengths=["odd", "few", "one", "full"],
)
def test_ranks_give_what_one_gives(choice: Any, layout: Any, shared: int, lengths: str) -> None:
    mode, size, inner = choice
    form, mask = layout
    judged(mode=mode, size=size, inner=inner, form=form, mask=mask, shared=shared, lengths=lengths)
