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


def fused() -> Any:
    """Whose weight gradients are added to float32 ones, in the second of several microbatches."""
    module = te.LayerNormMLP(HIDDEN, 4 * HIDDEN, fuse_wgrad_accumulation=True, **OPTIONS)
    for weight in (module.fc1_weight, module.fc2_weight):
        weight.main_grad = torch.zeros(weight.shape)
    return module


def chain() -> Any:
    """LayerNormMLP of operations."""
    place: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"}
    norm, fc1 = te.ops.LayerNorm(HIDDEN, **place), te.ops.Linear(HIDDEN, 4 * HIDDEN, **place)
    return te.ops.Sequential(norm, fc1, te.ops.GELU(), te.ops.Linear(4 * HIDDEN, HIDDEN, **place))


def held(recipe: str) -> Any:
    """Whose weights are quantized."""
    with te.quantized_model_init(recipe=recipes.rule(recipe)):
        return te.LayerNormMLP(HIDDEN, 4 * HIDDEN, **OPTIONS)


MODULES: dict[str, Any] = {
    "Linear": lambda: te.Linear(HIDDEN, HIDDEN, **OPTIONS),
    "LayerNormLinear": lambda: te.LayerNormLinear(HIDDEN, HIDDEN, **OPTIONS),
    "LayerNormMLP": lambda: te.LayerNormMLP(HIDDEN, 4 * HIDDEN, **OPTIONS),
    "LayerNormMLP, delayed weights": lambda: held("delayed"),
    "LayerNormMLP, current weights": lambda: held("current"),
    "LayerNormMLP, block weights": lambda: held("block"),
    "LayerNormMLP, main_grad": fused,
    "LayerNormMLP, microbatches": fused,
    "LayerNormMLP as a chain": lambda: chain(),
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
#: (forward, forward + backward): what Python 3.11 and 3.12 count at most, and some calls more: an address that moved
#: costs a pointer of a product's. 3.12 counts no comprehensions, and calls of C from C.
BOUNDS: dict[tuple[str, str | None], tuple[Counts, Counts]] = {
    ("Linear", None): (Counts(35, 37, 1, 1), Counts(74, 100, 4, 3)),
    ("Linear", "delayed"): (Counts(61, 57, 3, 4), Counts(121, 137, 7, 9)),
    ("Linear", "current"): (Counts(45, 56, 3, 5), Counts(86, 125, 7, 10)),
    ("Linear", "block"): (Counts(44, 52, 3, 3), Counts(84, 118, 7, 7)),
    ("LayerNormLinear", None): (Counts(38, 54, 4, 2), Counts(82, 144, 10, 6)),
    ("LayerNormLinear", "delayed"): (Counts(64, 72, 5, 4), Counts(129, 180, 12, 11)),
    ("LayerNormLinear", "current"): (Counts(49, 74, 6, 5), Counts(95, 171, 13, 12)),
    ("LayerNormLinear", "block"): (Counts(47, 69, 6, 4), Counts(92, 163, 13, 10)),
    ("LayerNormMLP", None): (Counts(42, 68, 6, 4), Counts(91, 188, 16, 12)),
    ("LayerNormMLP", "delayed"): (Counts(67, 87, 9, 7), Counts(138, 222, 19, 18)),
    ("LayerNormMLP", "current"): (Counts(52, 91, 10, 10), Counts(104, 217, 21, 22)),
    ("LayerNormMLP", "block"): (Counts(50, 88, 13, 8), Counts(101, 212, 25, 19)),
    ("LayerNormMLP, delayed weights", "delayed"): (Counts(77, 82, 7, 5), Counts(156, 212, 21, 18)),
    ("LayerNormMLP, current weights", "current"): (Counts(62, 84, 8, 6), Counts(122, 201, 19, 20)),
    ("LayerNormMLP, block weights", "block"): (Counts(58, 81, 9, 6), Counts(115, 207, 28, 23)),
    ("LayerNormMLP, main_grad", "delayed"): (Counts(87, 97, 9, 7), Counts(182, 274, 17, 18)),
    ("LayerNormMLP, microbatches", "delayed"): (Counts(127, 174, 7, 5), Counts(250, 415, 15, 16)),
    ("LayerNormMLP as a chain", None): (Counts(47, 82, 6, 4), Counts(97, 204, 16, 12)),
    ("LayerNormMLP as a chain", "delayed"): (Counts(80, 105, 9, 7), Counts(161, 251, 19, 18)),
    ("LayerNormMLP as a chain", "current"): (Counts(57, 105, 10, 10), Counts(110, 233, 21, 22)),
    ("LayerNormMLP as a chain", "block"): (Counts(55, 102, 11, 7), Counts(107, 228, 22, 17)),
    ("DotProductAttention", None): (Counts(50, 49, 2, 1), Counts(90, 122, 5, 2)),
    ("TransformerLayer", None): (Counts(57, 125, 14, 9), Counts(121, 325, 31, 28)),
    ("TransformerLayer", "delayed"): (Counts(98, 158, 19, 15), Counts(204, 393, 36, 39)),
    ("TransformerLayer", "current"): (Counts(69, 157, 20, 22), Counts(140, 367, 38, 49)),
    ("TransformerLayer", "block"): (Counts(67, 151, 23, 17), Counts(137, 364, 49, 41)),
}


#: One of each kind of call; every bound is checked in full.
OFTEN = (
    ("Linear", None),
    ("LayerNormLinear", "current"),
    ("LayerNormMLP", "block"),
    ("LayerNormMLP, delayed weights", "delayed"),
    ("LayerNormMLP, main_grad", "delayed"),
    ("LayerNormMLP, microbatches", "delayed"),
    ("LayerNormMLP as a chain", "delayed"),
    ("TransformerLayer", "delayed"),
)


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

            again: dict[str, Any] = {"is_first_microbatch": False} if "microbatches" in name else {}

            def forward() -> Any:
                with recipes.region(recipe):
                    return module(*given, **again)

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


@pytest.mark.parametrize(
    ("name", "recipe"),
    [pytest.param(*key, marks=[] if key in OFTEN else [pytest.mark.full]) for key in BOUNDS],
    ids=str,
)
def test_a_step_costs_no_more(name: str, recipe: str | None, tmp_path: Path) -> None:
    found = measured(name, recipe, tmp_path)
    for what, now, bound in zip(("forward", "forward + backward"), found, BOUNDS[name, recipe], strict=True):
        assert all(count <= most for count, most in zip(now, bound, strict=True)), f"{what}: {now}; bound: {bound}"


if __name__ == "__main__":
    import tempfile

    for key in BOUNDS:
        found = measured(*key, Path(tempfile.mkdtemp()))
        print(f"    {key!r}: ({', '.join(f'Counts{tuple(counts)}' for counts in found)}),".replace("'", '"'))
    print(f"of a TransformerLayer's instructions replays': {share_of_replays(Path(tempfile.mkdtemp())):.0%}")
