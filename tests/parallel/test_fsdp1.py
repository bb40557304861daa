"""FSDP1: the quantized copies of weights that backward reads are spread over the ranks; nothing else changes."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision, StateDictType

import te_torch as te
from te_core.errors import UnsupportedError
from te_torch.training import fsdp
from tests.parallel.ranks import Rank
from tests.parallel.steps import by_ranks, counted, error_of, place_of, same, says, sent_to
from tests.recipes import region, rule
from tests.world import values

WIDTH = 256


class Block(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.first = te.LayerNormLinear(WIDTH, WIDTH, device=device, params_dtype=torch.bfloat16)
        self.second = te.LayerNormMLP(WIDTH, WIDTH, device=device, params_dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.four_ranks(name="current")
@pytest.mark.parametrize("name", [None, "delayed", "current", "block"])
@by_ranks()
def test_what_is_sent(rank: Rank, name: str | None) -> None:
    """Copies of three weights more, in equal parts: a byte an element and copy (a small one has both in a block), and
    its scales. (Results are those of torch's wrapper: test_ways.py.)"""
    sent = []
    for wrap in (fsdp.FullyShardedDataParallel, TorchFSDP):
        torch.manual_seed(0)
        model = wrap(Block(rank.device), use_orig_params=True, device_id=place_of(rank))
        with region(name):
            y = model(values(64, WIDTH, dtype=torch.bfloat16, seed=rank.number, device=rank.device))
        with counted() as calls:
            y.float().square().mean().backward()
        sent.append(sent_to("all_gather", calls))
        modules = [m for m in model.modules() if isinstance(m, te.LayerNormLinear | te.LayerNormMLP)]
        prepared = wrap is not TorchFSDP
        assert [(m.fsdp_wrapped, m.fsdp_group is not None) for m in modules] == [(prepared, prepared)] * 2
    n = WIDTH * WIDTH // rank.world
    assert len(sent[0]) - len(sent[1]) == (0 if name is None else 3), sent
    assert name is None or all(n <= size < 2.2 * n for size in sorted(sent[0])[:3]), sent


@by_ranks()
def test_scales_keep_their_type(rank: Rank) -> None:
    """FSDP1 would hold all buffers in the type that a policy names. (The model had its state when FSDP1 took it.)"""
    outputs: list[list[torch.Tensor]] = [[], []]
    for found, dtype in zip(outputs, (torch.bfloat16, None), strict=True):
        torch.manual_seed(0)
        block = Block(rank.device)
        te.prepare_state(block, rule("delayed"))  # type: ignore[arg-type]
        mixed = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=dtype)
        model = TorchFSDP(block, use_orig_params=True, device_id=place_of(rank), mixed_precision=mixed)
        for i in range(3):
            with region("delayed"):
                y = model(values(64, WIDTH, dtype=torch.bfloat16, seed=10 * i + rank.number, device=rank.device))
            y.float().square().mean().backward()
            found.append(y)
        assert {buffer.dtype for buffer in block.buffers()} == {torch.float32}
    assert same(*outputs)


@by_ranks()
def test_the_wrapper_is_a_class(rank: Rank) -> None:
    """What programs do with it, and with the wrapper that a program derives from it."""
    place = place_of(rank)
    later: Any = fsdp.FullyShardedDataParallel

    class Own(later):  # type: ignore[misc]
        pass

    models = [wrap(Block(rank.device), use_orig_params=True, device_id=place) for wrap in (later, Own)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with later.state_dict_type(models[0], StateDictType.FULL_STATE_DICT):
            assert models[0].state_dict()["first.weight"].shape == (WIDTH, WIDTH)
        with later.summon_full_params(models[1]):
            assert models[1].first.weight.shape == (WIDTH, WIDTH)
    assert all(isinstance(m, later) and isinstance(m, TorchFSDP) and m.first.fsdp_wrapped for m in models)
    assert not isinstance(Block(rank.device), later) and not issubclass(TorchFSDP, later)
    assert issubclass(Own, later) and issubclass(Own, TorchFSDP) and issubclass(later, TorchFSDP)
    assert type(models[0]).__name__ == TorchFSDP.__name__ and f"{later.__name__}(" in repr(models[0])
    assert pickle.loads(pickle.dumps(later)) is later


@pytest.mark.more
def test_torchs_wrapper_is_not_imported_before() -> None:
    """It takes a second."""
    program = (
        "import sys, te_torch.compat, transformer_engine.pytorch as te\n"
        "from transformer_engine.pytorch.distributed import FullyShardedDataParallel as F\n"
        "assert F.__name__ == 'FullyShardedDataParallel'\n"
        "assert 'torch.distributed.fsdp' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@by_ranks("pair")
def test_what_is_refused(rank: Rank) -> None:
    layer = te.Linear(WIDTH, WIDTH, device=rank.device)
    says(error_of(lambda: fsdp.prepare_te_modules_for_fsdp(layer), TypeError), "FSDP1", "fully_shard")
    with te.quantized_model_init(recipe=rule("current")):
        held = te.Linear(WIDTH, WIDTH, device=rank.device)
    wrapped = object.__new__(TorchFSDP)
    torch.nn.Module.__init__(wrapped)
    wrapped._fsdp_wrapped_module = held
    wrapped.process_group = None
    said = error_of(lambda: fsdp.prepare_te_modules_for_fsdp(wrapped), UnsupportedError)
    says(said, "held quantized", "fully_shard")
    assert not held.fsdp_wrapped
