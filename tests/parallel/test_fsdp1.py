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
from tests.covering import covering
from tests.module_steps import values
from tests.parallel.fsdp_steps import sent_in_gathers
from tests.parallel.ranks import Rank, Ranks
from tests.recipes import region, rule

WIDTH = 256


class Block(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.first = te.LayerNormLinear(WIDTH, WIDTH, device=device, params_dtype=torch.bfloat16)
        self.second = te.LayerNormMLP(WIDTH, WIDTH, device=device, params_dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def place_of(rank: Rank) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if rank.device == "cuda" else torch.device("cpu")


def steps(rank: Rank, name: str | None, prepared: bool, checkpointed: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    block, place = Block(rank.device), place_of(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrap = fsdp.FullyShardedDataParallel if prepared else TorchFSDP
        model = wrap(block, use_orig_params=True, device_id=place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for i in range(3):
        x = values(64, WIDTH, dtype=torch.bfloat16, seed=10 * i + rank.number, device=rank.device)
        with region(name):
            y = te.checkpoint(model, x.requires_grad_()) if checkpointed else model(x)
        with sent_in_gathers() as gathers:
            y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(y.detach().cpu())
    modules = [m for m in model.modules() if isinstance(m, te.LayerNormLinear | te.LayerNormMLP)]
    return {"y": outputs, "sent": gathers, "wrapped": [(m.fsdp_wrapped, m.fsdp_group is not None) for m in modules]}


@pytest.mark.four_ranks(checkpointed=False, name="current")
@covering(checkpointed=[False, True], name=[None, "delayed", "current", "block"])
def test_steps_are_the_same(ranks: Ranks, name: str | None, checkpointed: bool) -> None:
    spread, whole = (ranks.run(steps, name, prepared, checkpointed) for prepared in (True, False))
    for a, b in zip(spread, whole, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a["y"], b["y"], strict=True))
        assert a["wrapped"] == [(True, True)] * 2 and b["wrapped"] == [(False, False)] * 2
        more = len(a["sent"]) - len(b["sent"])
        # Three weights, of which a copy was spread; what a checkpoint runs again is not.
        assert more == (0 if name is None or checkpointed else 3), (a["sent"], b["sent"])
        if more:  # a byte an element and copy (a small one has both in a block), its scales, in equal parts
            n = WIDTH * WIDTH // ranks.world
            assert all(n <= size < 2.2 * n for size in sorted(a["sent"])[:3]), a["sent"]


def in_another_type(rank: Rank, dtype: torch.dtype | None) -> tuple[list[torch.Tensor], set[torch.dtype]]:
    """Steps of a model that had its state when FSDP1 took it, and what types its buffers are in afterwards."""
    torch.manual_seed(0)
    block = Block(rank.device)
    te.prepare_state(block, rule("delayed"))
    place = place_of(rank)
    mixed = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = TorchFSDP(block, use_orig_params=True, device_id=place, mixed_precision=mixed)
    outputs = []
    for i in range(3):
        with region("delayed"):
            y = model(values(64, WIDTH, dtype=torch.bfloat16, seed=10 * i + rank.number, device=rank.device))
        y.float().square().mean().backward()
        outputs.append(y.detach().cpu())
    return outputs, {buffer.dtype for buffer in block.buffers()}


def test_scales_keep_their_type(ranks: Ranks) -> None:
    """FSDP1 would hold all buffers in the type that a policy names."""
    for (a, kept), (b, _) in zip(
        ranks.run(in_another_type, torch.bfloat16), ranks.run(in_another_type, None), strict=True
    ):
        assert kept == {torch.float32}
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def as_a_class(rank: Rank) -> dict[str, bool]:
    """What programs do with the class, and with the wrapper that a program derives from it."""
    place = place_of(rank)
    later: Any = fsdp.FullyShardedDataParallel

    class Own(later):  # type: ignore[misc]
        pass

    models = [wrap(Block(rank.device), use_orig_params=True, device_id=place) for wrap in (later, Own)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with later.state_dict_type(models[0], StateDictType.FULL_STATE_DICT):
            whole = models[0].state_dict()["first.weight"].shape == (WIDTH, WIDTH)
        with later.summon_full_params(models[1]):
            summoned = models[1].first.weight.shape == (WIDTH, WIDTH)
    return {
        "instance": all(isinstance(m, later) and isinstance(m, TorchFSDP) and m.first.fsdp_wrapped for m in models),
        "not of it": not isinstance(Block(rank.device), later) and not issubclass(TorchFSDP, later),
        "derived": issubclass(Own, later) and issubclass(Own, TorchFSDP) and issubclass(later, TorchFSDP),
        "named": type(models[0]).__name__ == TorchFSDP.__name__ and f"{later.__name__}(" in repr(models[0]),
        "pickled": pickle.loads(pickle.dumps(later)) is later,
        "whole": whole,
        "summoned": summoned,
    }


def test_the_wrapper_is_a_class(ranks: Ranks) -> None:
    for found in ranks.run(as_a_class):
        assert all(found.values()), found


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


def compiled(rank: Rank) -> list[torch.Tensor]:
    """Outputs of an eager model, then of a compiled one, which a compiler traces with the wrapper around it."""
    found = []
    for traced in (False, True):
        torch.manual_seed(0)
        model = TorchFSDP(Block(rank.device), use_orig_params=True, device_id=place_of(rank))
        run = torch.compile(model, backend="aot_eager") if traced else model
        for i in range(2):
            y = run(values(64, WIDTH, dtype=torch.bfloat16, seed=i + rank.number, device=rank.device))
            y.float().square().mean().backward()
        found.append(y.detach().float().cpu())
    return found


@pytest.mark.more
def test_compiled(ranks: Ranks) -> None:
    for eager, traced in ranks.run(compiled):
        assert torch.equal(eager, traced)


def refused(rank: Rank) -> list[str]:
    said = []
    layer = te.Linear(WIDTH, WIDTH, device=rank.device)
    with pytest.raises(TypeError, match="FSDP1") as plain:
        fsdp.prepare_te_modules_for_fsdp(layer)
    said.append(str(plain.value))
    with te.quantized_model_init(recipe=rule("current")):
        held = te.Linear(WIDTH, WIDTH, device=rank.device)
    wrapped = object.__new__(TorchFSDP)
    torch.nn.Module.__init__(wrapped)
    wrapped._fsdp_wrapped_module = held
    wrapped.process_group = None
    with pytest.raises(UnsupportedError, match="held quantized") as quantized:
        fsdp.prepare_te_modules_for_fsdp(wrapped)
    said.append(str(quantized.value))
    assert not held.fsdp_wrapped
    return said


def test_what_is_refused(pair: Ranks) -> None:
    first, second = pair.run(refused)
    assert first == second and "fully_shard" in first[0] and "fully_shard" in first[1]
