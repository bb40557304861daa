"""Random sequences of calls of a module and of changes between them: the same bits interpreted and as users run them.

`python -m tests.torch.sequences 5000` draws more of them by hand. What makes a result depend on an earlier call is
planted by the mutants named "sequences-..." (tests/mutants.toml).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.tape import taped
from tests.layer_options import RECIPES, Draw
from tests.torch import sequence_wants, sequences
from tests.torch.sequence_changes import CHANGES
from tests.torch.sequence_options import KINDS, OFTEN, RARE, SELDOM, Sequence
from tests.torch.sequences import Tally, difference, draw, shortened

BLOCK, BLOCKS, MORE, FULL = 25, 8, 16, 80
OF_WANTS = 3  # blocks in `make test`


def blocks(here: int) -> Any:
    """Numbers of blocks: so many here, the next ones in `make test-more`, and those behind in `make test-full`."""
    more, end = here + MORE, here + MORE + FULL
    marks = ((range(here), ()), (range(here, more), pytest.mark.more), (range(more, end), pytest.mark.full))
    return pytest.mark.parametrize("block", [pytest.param(n, marks=mark) for ns, mark in marks for n in ns])


@blocks(BLOCKS)
def test_sequences(block: int) -> None:
    """200 of them here, 400 more in `make test-more`, 2,000 more in `make test-full`."""
    same(Tally(limit=20.0), block)


@blocks(OF_WANTS)
def test_what_autograd_wants(block: int) -> None:
    """Orders of freezing, evaluating, training and unfreezing; 75 of them here."""
    same(Tally(limit=20.0, of=sequence_wants.draw), block)


def same(tally: Tally, block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        tally.run(seed)
        assert not tally.faults, tally.faults[0]
    counts = tally.counts
    assert counts["sequences"] >= 0.9 * BLOCK and counts["sequences that replay"] >= 0.6 * BLOCK, str(tally)
    assert counts["errors in both runs"] <= counts["steps"] / 2, str(tally)


def test_what_is_drawn() -> None:
    """Everything that may be drawn is, among those of `make test`."""
    drawn = [draw(seed) for seed in range(BLOCK * BLOCKS)]
    assert {s.module.kind for s in drawn} == set(KINDS) and {s.when for s in drawn} == {"first", "second"}
    assert {name for s in drawn for name, _ in s.recipes} == {"", *RECIPES}
    assert {name for s in drawn for name in s.module.way} >= {"quantized", "main_grad", "frozen", "eval", "unfused"}
    steps = Counter(name for s in drawn for name, _ in s.steps)
    assert set(steps) == {"call", *[name for name, c in CHANGES.items() if c.often]}
    assert all(4 <= len(s.steps) <= 13 for s in drawn)
    found = {(n, v) for s in drawn for name, o in s.steps if name == "call" for n, v in o.items() if n != "sizes"}
    table = OFTEN | SELDOM | RARE
    assert found >= {(name, v) for name, values in table.items() for v in values}
    assert sum("sizes" in options for s in drawn for _, options in s.steps) > BLOCKS


def test_what_is_drawn_of_wants() -> None:
    drawn = [sequence_wants.draw(seed) for seed in range(BLOCK * OF_WANTS)]
    assert {s.module.kind for s in drawn} == set(sequence_wants.KINDS)
    assert {s.when for s in drawn} == {"first", "second"}
    assert {s.recipes[0][0] for s in drawn if "quantized" in s.module.way} == set(RECIPES)
    calls = [options for s in drawn for name, options in s.steps if name == "call"]
    assert {"through", "grad", "frozen", *sequence_wants.MORE} <= {name for options in calls for name in options}
    assert {name for s in drawn for name, _ in s.steps} == {
        *("call", "needs", "train", "optimize", "twin", "adapt", "copied")
    }


# ------------------------------------------------------------------------------------------- what would be a fault

LAYER = {
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 2,
    "kv_channels": 16,
    "params_dtype": "fp32",
    "attn_input_format": "sbhd",
    "self_attn_mask_type": "causal",
}
MODULE = Draw(1, "cpu", "Linear", LAYER, "current", {}, (4, 2, 1), {"lengths": "mask"}, {})
CALL: dict[str, Any] = {"recipe": 0}
CALLS = (("call", {**CALL, "times": 2}), ("train", {"on": True}), ("call", CALL), ("hook", {}), ("call", CALL))
PLAIN = Sequence(1, MODULE, (("current", {}), ("", {})), "first", CALLS)


class Turned(torch.autograd.Function):
    """The same numbers with another gradient."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        return t.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy * 1.000001


def refused(module: Any, y: torch.Tensor) -> torch.Tensor:
    raise ValueError("a reason")


def with_state(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.register_buffer("counted", torch.ones(1))
    return y


#: What becomes of a Linear's result where it is not interpreted, and what is said of it.
FAULTS: dict[str, tuple[Any, str]] = {
    "a bit": (lambda module, y: y * (1 + 2**-23), "y0"),
    "a gradient's bit": (lambda module, y: Turned.apply(y), "gradient weight"),
    "no gradient": (lambda module, y: y.detach(), "y0"),
    "an error": (refused, "ValueError: a reason"),
    "another buffer": (with_state, "buffer counted"),
    "a number that was drawn": (lambda module, y: y + 0 * torch.rand(1), "random"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed_and_shortened(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, said = FAULTS[fault]
    plain = te.Linear.forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        y = plain(self, *args, **options)
        return y if taped.when() == "never" else change(self, y)

    assert difference(PLAIN)[0] is None
    monkeypatch.setattr(te.Linear, "forward", forward)
    found = difference(PLAIN)[0]
    assert found is not None and found.step == 0 and said in found.said, found
    less = shortened(PLAIN, found.kind)
    assert [name for name, _ in less.steps] == ["call"] and "1" not in less.module.way, less


def test_what_a_hook_saw_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hook that the second run does not call."""
    monkeypatch.setattr(te.Linear, "_call_impl", te.Linear.forward, raising=False)
    monkeypatch.setattr(te.Linear, "__call__", _without_hooks)
    found = difference(PLAIN)[0]
    assert found is not None and found.step == 4 and found.names == ("0 seen by hooks",), found


def _without_hooks(self: Any, *args: Any, **options: Any) -> Any:
    if taped.when() == "never":
        return torch.nn.Module._call_impl(self, *args, **options)
    return self.forward(*args, **options)


def test_a_difference_is_shortened_and_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    other = sequences.Difference(0, ("0 y0",), "differs")
    monkeypatch.setattr(sequences, "difference", lambda sequence: (other, 1, 0))
    monkeypatch.setattr(sequences, "shortened", lambda sequence, kind, limit: sequence)
    tally = Tally()
    tally.run(3)
    assert len(tally.faults) == 1 and "seed 3: " in tally.faults[0]


def test_what_is_printed_of_a_sequence_finds_it_again() -> None:
    assert str(draw(7)).startswith("seed 7: ") and draw(7) == draw(7) != draw(8)
