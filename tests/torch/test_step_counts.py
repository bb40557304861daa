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
    ("Linear", None): (Counts(55, 31, 1, 1), Counts(100, 82, 4, 3)),
    ("Linear", "delayed"): (Counts(85, 53, 3, 4), Counts(156, 121, 7, 9)),
    ("Linear", "current"): (Counts(71, 52, 3, 5), Counts(123, 111, 7, 10)),
    ("Linear", "block"): (Counts(68, 48, 3, 3), Counts(118, 104, 7, 7)),
    ("LayerNormLinear", None): (Counts(62, 40, 4, 2), Counts(111, 104, 10, 6)),
    ("LayerNormLinear", "delayed"): (Counts(91, 60, 5, 4), Counts(166, 142, 12, 11)),
    ("LayerNormLinear", "current"): (Counts(80, 62, 6, 5), Counts(136, 135, 13, 12)),
    ("LayerNormLinear", "block"): (Counts(76, 57, 6, 4), Counts(130, 126, 13, 10)),
    ("LayerNormMLP", None): (Counts(71, 49, 6, 4), Counts(135, 129, 16, 12)),
    ("LayerNormMLP", "delayed"): (Counts(101, 70, 9, 7), Counts(193, 165, 19, 18)),
    ("LayerNormMLP", "current"): (Counts(93, 74, 10, 10), Counts(165, 162, 21, 22)),
    ("LayerNormMLP", "block"): (Counts(92, 71, 13, 8), Counts(164, 157, 25, 19)),
    ("DotProductAttention", None): (Counts(76, 41, 2, 1), Counts(115, 93, 5, 2)),
    ("TransformerLayer", None): (Counts(278, 192, 15, 9), Counts(434, 365, 35, 28)),
    ("TransformerLayer", "delayed"): (Counts(340, 224, 22, 15), Counts(545, 429, 45, 39)),
    ("TransformerLayer", "current"): (Counts(329, 237, 23, 22), Counts(510, 432, 47, 49)),
    ("TransformerLayer", "block"): (Counts(322, 226, 26, 17), Counts(499, 414, 51, 41)),
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
