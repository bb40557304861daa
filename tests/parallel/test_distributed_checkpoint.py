"""torch.distributed.checkpoint: saved on some ranks and loaded on others, values and FP8 state are equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import te_torch as te
from te_core.recipe import DelayedScaling
from tests.parallel.conftest import NCCL
from tests.parallel.fsdp_steps import KINDS, STEPS, batch, build, mesh_of, optimizer_of, plain, shard, step
from tests.parallel.ranks import Rank, Ranks
from tests.parallel.steps import by_ranks
from tests.recipes import region, rule
from tests.tolerances import DB, snr_db

CASES = [(None, False)] + [(name, quantized) for name in KINDS for quantized in (False, True)]
TO_FEWER = [case for case in CASES if case != ("nvfp4 nearest", True)]


def some(cases: list[tuple[str | None, bool]], *chosen: tuple[str | None, bool]) -> pytest.MarkDecorator:
    """The chosen ones by default, the others by `--full`."""
    marked = [pytest.param(*case, marks=[] if case in chosen else pytest.mark.full) for case in cases]
    return pytest.mark.parametrize(("name", "quantized"), marked)


on_both = pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=NCCL)])


def model_of(rank: Rank, name: str | None, quantized: bool, seed: int) -> Any:
    return shard(build(name, quantized, rank.device, seed=seed), mesh_of(rank.device, rank.world))


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    """This rank's parameters, FP8 state and optimizer's state."""
    found = {n: plain(p) for n, p in model.named_parameters()}
    kept = model.state_dict()
    found |= {n: b.clone().cpu() for n, b in model.named_buffers() if n in kept}
    for i, p in enumerate(model.parameters()):
        found |= {f"state {i} {k}": plain(v) for k, v in optimizer.state[p].items()}
    return found


def forward(model: Any, name: str | None, device: str) -> torch.Tensor:
    with region(name), torch.no_grad():
        return model(batch(7, 0, device)).cpu()  # type: ignore[no-any-return]


def saved(rank: Rank, name: str | None, quantized: bool, folder: str) -> Any:
    model = model_of(rank, name, quantized, 0)
    optimizer = optimizer_of(model, "AdamW")
    for i in range(STEPS):
        step(model, optimizer, name, batch(rank.number, i, rank.device))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    return everything(model, optimizer), forward(model, name, rank.device)


def loaded(rank: Rank, name: str | None, quantized: bool, folder: str) -> Any:
    """Into a model of other weights."""
    model = model_of(rank, name, quantized, 1)
    if name is not None:
        te.prepare_state(model, rule(name))  # type: ignore[arg-type]
    optimizer = optimizer_of(model, "AdamW")
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return everything(model, optimizer), forward(model, name, rank.device)


def check(first: Ranks, second: Ranks, name: str | None, quantized: bool, folder: str) -> None:
    before, after = first.run(saved, name, quantized, folder), second.run(loaded, name, quantized, folder)
    for key, value in before[0][0].items():
        was, now = [b[key] for b, _ in before], [a[key] for a, _ in after]
        history = key.endswith("amax_history_fwd")
        if value.ndim and not history and sum(len(t) for t in was) == sum(len(t) for t in now):  # shards
            was, now = [torch.cat(was)], [torch.cat(now)]
        for a, b in zip(was, now, strict=False):
            if quantized and history:
                # Since the last reduction each rank knows of its own shards, and one rank's row is kept.
                rows = torch.stack([w[0] for w in was])
                assert (rows.amin(0) <= b[0]).all() and (b[0] <= rows.amax(0)).all()
                a, b = a[1:], b[1:]
            assert torch.equal(a, b), (key, (a - b).abs().max())
    assert set(before[0][0]) == set(after[0][0])
    for _, y in after:
        if first.device == second.device:
            assert torch.equal(before[0][1], y)
        else:  # sums in another order put some values of the first layer on the other side of a tie of the next cast
            assert snr_db(y, before[0][1]) > DB["fp8 gemm"]


@on_both
@some(TO_FEWER, ("delayed", True), ("current", True), ("mxfp8", True))
def test_of_two_ranks_on_one(
    ranks_of: Callable[..., Ranks], name: Any, quantized: bool, device: str, tmp_path: Any
) -> None:
    check(ranks_of(2, device), ranks_of(1, device), name, quantized, str(tmp_path))


@NCCL
@pytest.mark.parametrize(("name", "quantized"), [("delayed", True), ("block", True)])
@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_on_another_device(
    ranks_of: Callable[..., Ranks], first: str, second: str, name: Any, quantized: bool, tmp_path: Any
) -> None:
    """What two GPUs have saved two processes on the CPU read, and the other way round."""
    check(ranks_of(2, first), ranks_of(2, second), name, quantized, str(tmp_path))


@pytest.mark.four_ranks
@some(TO_FEWER, ("current", True))
def test_of_four_ranks_on_two(
    four: Ranks, ranks_of: Callable[..., Ranks], name: Any, quantized: bool, tmp_path: Any
) -> None:
    check(four, ranks_of(2, four.device), name, quantized, str(tmp_path))


@on_both
@some(CASES, ("delayed", False), ("block", True), ("nvfp4 nearest", True))
def test_of_one_rank_on_two(
    ranks_of: Callable[..., Ranks], name: Any, quantized: bool, device: str, tmp_path: Any
) -> None:
    check(ranks_of(1, device), ranks_of(2, device), name, quantized, str(tmp_path))


def loses(rank: Rank, folder: str) -> str:
    with pytest.raises(BaseException, match="one amax") as error:  # torch's CheckpointException shows ours
        loaded(rank, "nvfp4 nearest", True, folder)
    return str(error.value)


@on_both
def test_amaxes_that_cannot_be_one(ranks_of: Callable[..., Ranks], device: str, tmp_path: Any) -> None:
    """NVFP4 shards have an amax each: on fewer ranks their bytes are no one tensor, and it is said."""
    ranks_of(2, device).run(saved, "nvfp4 nearest", True, str(tmp_path))
    (said,) = ranks_of(1, device).run(loses, str(tmp_path))
    assert "change the whole" in said


@pytest.mark.more
def test_amaxes_that_cannot_be_one_on_any_rank(ranks_of: Callable[..., Ranks], tmp_path: Any) -> None:
    """Every rank says so; none waits for another."""
    ranks_of(4, "cpu").run(saved, "nvfp4 nearest", True, str(tmp_path))
    assert all("change the whole" in said for said in ranks_of(2, "cpu").run(loses, str(tmp_path)))


@pytest.mark.parametrize("large", [0, 1])
@by_ranks("two")
def test_the_maxima_of_shards_that_were_loaded(rank: Rank, tmp_path: Path, large: int) -> None:
    """A checkpoint keeps one rank's of those that no reduction has seen: the others count what they have loaded, and a
    step later the weight's scale is that of the training that goes on."""
    folder = str(tmp_path / "saved")
    recipe = DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")

    def layer() -> Any:
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=recipe):
            made = te.Linear(256, 256, bias=False, device=rank.device, params_dtype=torch.bfloat16)
        return fully_shard(made, mesh=mesh_of(rank.device, rank.world))  # type: ignore[call-overload]

    def step_of(module: Any, factor: float) -> None:
        with te.autocast(recipe=recipe):
            y = module(torch.ones(32, 256, dtype=torch.bfloat16, device=rank.device))
        y.float().square().mean().backward()
        with torch.no_grad():
            module.weight.to_local().mul_(factor)

    module = layer()
    step_of(module, 0.95 if rank.number == large else 0.25)  # as an optimizer may do: shards' maxima go apart
    dcp.save(module.state_dict(), checkpoint_id=folder)
    other = layer()
    te.prepare_state(other, recipe)
    found = other.state_dict()
    dcp.load(found, checkpoint_id=folder)
    other.load_state_dict(found)
    scales = []
    for each in (module, other):
        step_of(each, 0.99)
        scales.append(float(each.weight.to_local()._scale_inv))
    going_on, again = scales
    assert again == pytest.approx(going_on, rel=0.125)  # as near as FP8 keeps the largest value
