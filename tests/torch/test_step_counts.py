"""What a step that repeats costs the host: calls of Python functions, of C functions by Python, allocations, launches.

Counts are the same on every machine, which times are not. They are upper bounds: who makes a step cheaper lowers them,
and who makes it dearer finds out here (`python -m tests.torch.test_step_counts` prints what is there now).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.tape import taped
from tests import recipes
from tests.host_steps import opcodes_by_file
from tests.null_device import Counts, Null, null_device

TOKENS, HIDDEN, HEADS = 128, 256, 4
REPLAYING = ("te_core/tape/tape", "te_core/kernels/loader", "te_core/backends/cuda/")
OPTIONS: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}
MODULES: dict[str, Any] = {
    "Linear": lambda: te.Linear(HIDDEN, HIDDEN, **OPTIONS),
    "LayerNormLinear": lambda: te.LayerNormLinear(HIDDEN, HIDDEN, **OPTIONS),
    "LayerNormMLP": lambda: te.LayerNormMLP(HIDDEN, 4 * HIDDEN, **OPTIONS),
    "DotProductAttention": lambda: te.DotProductAttention(HEADS, HIDDEN // HEADS, attn_mask_type="causal"),
    "TransformerLayer": lambda: te.TransformerLayer(
        HIDDEN,
        4 * HIDDEN,
        HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        self_attn_mask_type="causal",
        **OPTIONS,
    ),
}
#: (forward, forward + backward), as Python 3.11 counts, and some calls more: an address that moved costs a pointer of a
#: product's. Later versions of Python count no comprehensions, so that they count less.
BOUNDS: dict[tuple[str, str | None], tuple[Counts, Counts]] = {
    ("Linear", None): (Counts(47, 30, 1, 1), Counts(82, 76, 4, 3)),
    ("Linear", "delayed"): (Counts(75, 52, 3, 4), Counts(134, 115, 7, 9)),
    ("Linear", "current"): (Counts(59, 51, 3, 5), Counts(97, 105, 7, 10)),
    ("Linear", "block"): (Counts(58, 47, 3, 3), Counts(95, 98, 7, 7)),
    ("LayerNormLinear", None): (Counts(53, 39, 4, 2), Counts(89, 93, 10, 6)),
    ("LayerNormLinear", "delayed"): (Counts(81, 59, 5, 4), Counts(141, 130, 12, 11)),
    ("LayerNormLinear", "current"): (Counts(66, 61, 6, 5), Counts(105, 123, 13, 12)),
    ("LayerNormLinear", "block"): (Counts(64, 56, 6, 4), Counts(102, 115, 13, 10)),
    ("LayerNormMLP", None): (Counts(63, 46, 6, 4), Counts(100, 110, 16, 12)),
    ("LayerNormMLP", "delayed"): (Counts(90, 67, 9, 7), Counts(152, 145, 19, 18)),
    ("LayerNormMLP", "current"): (Counts(75, 71, 10, 10), Counts(116, 142, 21, 22)),
    ("LayerNormMLP", "block"): (Counts(73, 68, 13, 8), Counts(113, 137, 25, 19)),
    ("DotProductAttention", None): (Counts(73, 42, 2, 1), Counts(108, 90, 5, 2)),
    ("TransformerLayer", None): (Counts(248, 188, 15, 9), Counts(348, 327, 35, 28)),
    ("TransformerLayer", "delayed"): (Counts(303, 220, 22, 15), Counts(448, 390, 45, 39)),
    ("TransformerLayer", "current"): (Counts(281, 232, 23, 22), Counts(393, 393, 47, 49)),
    ("TransformerLayer", "block"): (Counts(277, 222, 26, 17), Counts(386, 375, 51, 41)),
}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16).requires_grad_()


@contextmanager
def repeated(
    name: str, recipe: str | None, folder: Path
) -> Iterator[tuple[Null, Callable[[], Any], Callable[[], None]]]:
    """A module's forward, and its forward + backward, over a GPU that is not there, made some times before."""
    before = taped.when()
    taped.set_when("first")
    try:
        with null_device(folder) as null:
            module = MODULES[name]()
            heads = [drawn(TOKENS, 2, HEADS, HIDDEN // HEADS) for _ in range(3)]
            given = heads if name == "DotProductAttention" else [drawn(TOKENS, 2, HIDDEN)]
            dy = drawn(TOKENS, 2, HIDDEN).detach()

            def forward() -> Any:
                with recipes.region(recipe):
                    return module(*given)

            def both() -> None:
                forward().backward(dy)

            for _ in range(4):
                both()
            yield null, forward, both
    finally:
        taped.set_when(before)


def measured(name: str, recipe: str | None, folder: Path) -> tuple[Counts, Counts]:
    """What they take."""
    with repeated(name, recipe, folder) as (null, forward, both):
        return null.counted(forward), null.counted(both)


def share_of_replays(folder: Path) -> float:
    """Of the instructions of a TransformerLayer's step, without those of what stands for libraries: replays'."""
    with repeated("TransformerLayer", "delayed", folder) as (_, _, both):
        found = opcodes_by_file(both)
    ours = {file: count for file, count in found.items() if "/tests/" not in file}
    return sum(count for file, count in ours.items() if any(room in file for room in REPLAYING)) / sum(ours.values())


@pytest.mark.parametrize(("name", "recipe"), BOUNDS, ids=str)
def test_a_step_costs_no_more(name: str, recipe: str | None, tmp_path: Path) -> None:
    found = measured(name, recipe, tmp_path)
    for what, now, bound in zip(("forward", "forward + backward"), found, BOUNDS[name, recipe], strict=True):
        assert all(count <= most for count, most in zip(now, bound, strict=True)), f"{what}: {now}; bound: {bound}"


if __name__ == "__main__":
    import tempfile

    for key in [(name, recipe) for name in MODULES for recipe in (None, "delayed", "current", "block")]:
        if key[0] != "DotProductAttention" or key[1] is None:
            found = measured(*key, Path(tempfile.mkdtemp()))
            print(f"    {key!r}: ({', '.join(f'Counts{tuple(counts)}' for counts in found)}),".replace("'", '"'))
    print(f"of a TransformerLayer's instructions replays': {share_of_replays(Path(tempfile.mkdtemp())):.0%}")
