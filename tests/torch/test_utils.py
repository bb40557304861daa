"""The small functions beside the modules."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError
from te_torch import utils


@pytest.mark.parametrize(
    ("init", "sigma"),
    [
        (utils.init_method_normal(0.5), 0.5),
        (utils.scaled_init_method_normal(0.5, 8), 0.125),
        (utils.get_default_init_method(), 0.023),
        (utils.init_method_constant(2.0), 0.0),
    ],
)
def test_initialisers(init: utils.Init, sigma: float) -> None:
    """In place, of the width asked for; they can be pickled, and given to a layer."""
    weight = torch.empty(200, 300)
    assert pickle.loads(pickle.dumps(init))(weight) is weight
    assert abs(weight.std().item() - sigma) <= 0.02 * sigma
    assert abs(weight.mean().item() - (2.0 if sigma == 0.0 else 0.0)) <= 0.02 * sigma
    layer = te.TransformerLayer(64, 256, 4, init_method=init, output_layer_init_method=init, device="cpu")
    drawn = torch.cat([p.flatten() for p in layer.parameters() if p.ndim == 2])
    assert abs(drawn.std().item() - sigma) <= 0.05 * sigma


def test_modules_begin_with_the_default() -> None:
    torch.manual_seed(0)
    weight = te.Linear(300, 200, device="cpu").weight
    torch.manual_seed(0)
    assert torch.equal(weight, utils.get_default_init_method()(torch.empty_like(weight)))


def test_mask_func() -> None:
    """As `FusedScaleMaskSoftmax` uses it: what is masked gets no weight."""
    scores, mask = torch.randn(2, 4, 6, 6), torch.rand(2, 1, 6, 6) < 0.3
    masked = utils.attention_mask_func(scores, mask)
    assert torch.equal(masked, torch.where(mask, torch.tensor(-10000.0), scores)) and not (scores == -10000).any()
    assert te.attention.softmax.FusedScaleMaskSoftmax(utils.attention_mask_func)(scores, mask, "padding").shape == (
        2,
        4,
        6,
        6,
    )


def test_whole_numbers() -> None:
    assert utils.divide(12, 4) == 3 and math.prod((utils.round_up_to_nearest_multiple(n, 16) for n in (1, 16, 17))) == (
        16 * 16 * 32
    )
    for call in (
        lambda: utils.divide(12, 5),
        lambda: utils.ensure_divisibility(1, 0),
        lambda: utils.round_up_to_nearest_multiple(3, 0),
    ):
        with pytest.raises(ArgumentError):
            call()
