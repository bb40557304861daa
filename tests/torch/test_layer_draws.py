"""Random layers in random recipes, called in random ways: a result, its gradients, or a clear refusal.

`python -m tests.layer_draws 5000 [--device cuda]` draws more of them by hand and prints what came of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_torch.modules.layernorm_mlp import LayerNormMLP
from te_torch.modules.linear import Linear
from tests import layer_draws
from tests.backends import on_devices
from tests.layer_draws import Tally, is_clear, judge
from tests.layer_options import RECIPES, Draw, draw

BLOCK, BLOCKS, MORE, FULL = 25, 4, 8, 40


@on_devices
@pytest.mark.parametrize(
    "block",
    [
        *range(BLOCKS),
        *[pytest.param(n, marks=pytest.mark.more) for n in range(BLOCKS, BLOCKS + MORE)],
        *[pytest.param(n, marks=pytest.mark.full) for n in range(BLOCKS + MORE, BLOCKS + MORE + FULL)],
    ],
)
def test_draws(block: int, device: str) -> None:
    """100 of them here, 200 more in `make test-more`, 1,000 more in `make test-full`."""
    tally = Tally()
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        tally.run(draw(seed, device))
    assert not tally.faults, "\n".join(tally.faults)
    least = 0.6 if device == "cpu" else 0.4  # a GPU's FP8 attention takes less
    assert tally.counts["computed"] >= least * BLOCK, str(tally)


def test_what_is_drawn() -> None:
    """Everything that may be drawn is, among those that CI runs."""
    draws = [draw(seed) for seed in range(BLOCK * (BLOCKS + MORE))]
    assert {d.recipe for d in draws} == {"", *RECIPES}
    assert {d.kind for d in draws} == {"TransformerLayer", "MultiheadAttention", "Linears"}
    ways = {name for d in draws for name in d.way}
    assert ways >= {
        "amp",
        "cache",
        "calibrating",
        "checkpoint",
        "eval",
        "frozen",
        "grad",
        "inner",
        "main_grad",
        "microbatches",
        "quantized",
        "unfused",
    }
    lengths = {(d.form, d.call["lengths"]) for d in draws}
    assert {how for _, how in lengths} == {"mask", "left mask", "mask of holes", "cu_seqlens", "gaps"}
    assert sum(any(d.low) for d in draws) > 50 and sum(d.low[1] for d in draws) > 20


# -------------------------------------------------------------------------------------- what would be a fault

LAYER = {
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 2,
    "kv_channels": 16,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "attn_input_format": "bshd",
    "params_dtype": "bf16",
    "self_attn_mask_type": "causal",
}
PLAIN = Draw(0, "cpu", "TransformerLayer", LAYER, "current", {}, (8, 2, 1), {"lengths": "mask"}, {})


def turned(t: torch.Tensor) -> torch.Tensor:
    """The same numbers with another gradient."""
    other = 3 * t.flip(-1)
    return t + (other - other.detach())


#: What becomes of the MLP's output, and what is said of it.
FAULTS: dict[str, tuple[Any, str]] = {
    "a value that is none": (lambda t: t * float("nan"), "y is not finite"),
    "other numbers": (lambda t: t.flip(-1), "result"),
    "another dtype": (lambda t: t.float(), "y of torch.float32"),
    "a gradient that is lost": (torch.Tensor.detach, "gradients"),
    "a gradient of other numbers": (turned, "gradients"),
    "an error of torch's": (lambda t: t @ t.new_zeros(3, 3), "RuntimeError"),
    "an error of Python's": (lambda t: [] + len(t), "TypeError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, said = FAULTS[fault]
    plain = LayerNormMLP.forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        result = plain(self, *args, **options)
        if self.fc1_weight.dtype == torch.float32:  # what it is compared with
            return result
        return change(result[0]), *result[1:]

    assert judge(PLAIN).what == "computed"
    monkeypatch.setattr(LayerNormMLP, "forward", forward)
    outcome = judge(PLAIN)
    assert outcome.what == "fault" and said in outcome.why, outcome


def test_results_are_looked_at_by_themselves() -> None:
    layer, given = layer_draws.build(PLAIN, None), layer_draws.inputs(PLAIN)
    y = torch.zeros_like(given.x, dtype=torch.bfloat16)
    for got, said in (
        ({"y": y, "dx": None}, "dx is missing"),
        ({"y": y[1:]}, "y of shape"),
        ({"y": y, "dx": y[0]}, "dx of shape"),
        ({"y": y / 0}, "y is not finite"),
        ({"y": y.float()}, "y of torch.float32"),
    ):
        assert said in layer_draws.complaint(PLAIN, layer, given, got)


def test_what_was_not_quantized_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_draws, "region", lambda d, recipe: layer_draws.contextlib.nullcontext())
    outcome = judge(PLAIN)
    assert outcome.what == "fault" and "fprop in" in outcome.why


def test_which_refusals_are_clear() -> None:
    """Those that a `raise` of ours made, with words; not what came up from below."""

    def error_of(call: Any) -> BaseException:
        with pytest.raises(Exception) as caught:
            call()
        return caught.value

    layer = Linear(4, 4, device="cpu")
    assert is_clear(error_of(lambda: layer(torch.zeros(2, 3)))) and is_clear(error_of(lambda: layer(None)))
    assert is_clear(error_of(lambda: Linear(4, 4, parameters_split=5)))
    for call in (lambda: layer(torch.zeros(2, 4), bias=1), lambda: torch.zeros(2) @ torch.zeros(3)):
        assert not is_clear(error_of(call))


def test_what_is_printed_of_a_draw_finds_it_again() -> None:
    assert str(draw(7)).startswith("seed 7: ") and draw(7) == draw(7) != draw(8)
