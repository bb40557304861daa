"""DistributedDataParallel and the state of delayed scaling: buffers, which rank 0's must not overwrite each forward."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import te_torch as te
from te_core.recipe import DelayedScaling
from tests.module_steps import values
from tests.parallel.ranks import Rank, Ranks
from tests.recipes import region
from tests.tolerances import snr_db

WIDTH, ROWS = 64, 32
ROW = DelayedScaling(amax_history_len=4)


class Mixed(torch.nn.Module):
    """A layer beside a buffer that DDP does keep alike; of two layers some ranks may leave one out."""

    def __init__(self, device: str) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "params_dtype": torch.bfloat16}
        self.first, self.second = (te.Linear(WIDTH, WIDTH, **options) for _ in range(2))
        self.register_buffer("offset", torch.zeros(1, device=device))

    def forward(self, x: torch.Tensor, second: bool = True) -> torch.Tensor:
        y = self.first(x + self.offset.to(x.dtype))
        return self.second(y) if second else y


def wrapped(rank: Rank, model: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, device_ids=[rank.number] if rank.device == "cuda" else None, **options)


def batch(rank: Rank, step: int) -> torch.Tensor:
    """Those of later ranks are larger: scales that are not theirs clip them."""
    x = values(ROWS, WIDTH, dtype=torch.bfloat16, seed=10 * step + rank.number, device=rank.device)
    return x * 100**rank.number


PREPARED = ("before", "after", "by the first forward")


def own_scales(rank: Rank, how: str, prepared: str) -> tuple[float, float, list[float]]:
    """(how well the last output is computed, the input's scale, its history) under maxima that are this rank's own."""
    torch.manual_seed(0)
    layer = te.Linear(WIDTH, WIDTH, device=rank.device, params_dtype=torch.bfloat16)
    recipe = DelayedScaling(amax_history_len=4, reduce_amax=False)
    if prepared == "before":
        te.prepare_state(layer, recipe)
    model: Any = wrapped(rank, layer)
    if prepared == "after":
        te.prepare_state(layer, recipe)
    if how == "compiled":
        model = torch.compile(model, backend="aot_eager")
    for i in range(4):
        x = batch(rank, i)
        with te.autocast(recipe=recipe):
            y = model(x)
            state: Any = layer.fp8_state
            used = float(state.used_fwd[0])  # what a recomputation would read
        y.float().square().mean().backward()
    exact = torch.nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float())
    assert 0.5 < used / float(state.scale_fwd[0]) < 2
    return snr_db(y, exact), float(state.scale_fwd[0]), state.amax_history_fwd[:, 0].tolist()


@pytest.mark.four_ranks(how="eager", prepared="before")
@pytest.mark.parametrize(
    ("how", "prepared"),
    [
        *(("eager", prepared) for prepared in PREPARED),
        *(pytest.param("compiled", prepared, marks=pytest.mark.full) for prepared in PREPARED[:2]),
        pytest.param("compiled", PREPARED[2], marks=pytest.mark.more),
    ],
)
def test_scales_are_each_ranks_own_where_nothing_is_reduced(ranks: Ranks, how: str, prepared: str) -> None:
    first, *others = ranks.run(own_scales, how, prepared)
    for i, (quality, scale, history) in enumerate(others, 1):
        assert quality > 24 and first[0] > 24
        assert 0.5 < first[1] / scale / 100**i < 2  # its own largest values
        assert max(history) > 50 * max(first[2])


def microbatches(rank: Rank) -> tuple[list[float], list[float]]:
    """The input's history and the last large microbatch's quality, where one region holds two forwards."""
    torch.manual_seed(0)
    layer = te.Linear(WIDTH, WIDTH, device=rank.device, params_dtype=torch.bfloat16)
    te.prepare_state(layer, ROW)
    model = wrapped(rank, layer)
    found, largest = [], []
    greater = 100 ** (rank.number / (rank.world - 1))  # those of the last rank by so much as one scale has room for
    for i in range(3):
        with te.autocast(recipe=ROW):
            for k in range(2):
                seed = 10 * (2 * i + k) + rank.number
                x = values(ROWS, WIDTH, dtype=torch.bfloat16, seed=seed, device=rank.device)
                x = x * greater if k == 0 else x
                y = model(x)
                y.float().square().mean().backward()
                if k == 0:
                    largest.append(float(x.abs().max()))
                    exact = torch.nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float())
                    found.append(snr_db(y, exact))
    assert layer.fp8_state is not None
    return found, [*layer.fp8_state.amax_history_fwd[1:, 0].tolist(), *largest]


def test_maxima_of_microbatches_before_count(ranks: Ranks) -> None:
    found = ranks.run(microbatches)
    assert all(quality > 24 for qualities, _ in found for quality in qualities[1:])
    last = found[-1][1]
    assert sorted(last[:3]) == sorted(last[3:])  # the last rank's, which are the largest, on all
    assert all(history[:3] == last[:3] for _, history in found)


def sharded(rank: Rank, zero: bool, maxima: str = "reduced") -> list[torch.Tensor]:
    """Weights held quantized, grown to several times their size, by an optimizer whose ranks own some each."""
    recipe, group = ROW, None
    if maxima == "each rank's own":
        recipe = DelayedScaling(amax_history_len=4, reduce_amax=False)
    elif maxima == "of a smaller group":
        group = [dist.new_group([i]) for i in range(rank.world)][rank.number]
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=ROW):
        layers = [te.Linear(WIDTH, WIDTH, device=rank.device, params_dtype=torch.bfloat16) for _ in range(2)]
    model = wrapped(rank, torch.nn.Sequential(*layers))
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.0}
    optimizer: Any = torch.optim.AdamW(model.parameters(), **options)
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    for i in range(8):
        x = values(ROWS, WIDTH, dtype=torch.bfloat16, seed=10 * i + rank.number, device=rank.device)
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            y = model(x)
        (y.float() - 3 * x.float().roll(1, 1)).square().mean().backward()
        if maxima != "reduced":  # a rank's own scale, whatever has led to it
            for layer in layers:
                layer.fp8_state.scale_fwd[1] *= 1.3**rank.number  # type: ignore[index, operator]
        optimizer.step()
        optimizer.zero_grad()
    histories = [layer.fp8_state.amax_history_fwd[:, 1].cpu() for layer in layers]  # type: ignore[index, union-attr]
    return [*[layer.weight.detach().dequantize().cpu() for layer in layers], *histories]


def test_a_shard_of_the_optimizer_lets_scales_grow(ranks: Ranks) -> None:
    plain, zero = ranks.run(sharded, False)[0], ranks.run(sharded, True)[0]
    for a, b in zip(plain[:2], zero[:2], strict=True):
        assert a.abs().max() > 0.25  # from an eighth on
        assert snr_db(b, a) > 24


@pytest.mark.parametrize("maxima", ["each rank's own", "of a smaller group"])
def test_a_shard_of_the_optimizer_and_maxima_that_are_not_reduced(ranks: Ranks, maxima: str) -> None:
    """A weight's owner alone sees what has outgrown the scale: the others take its scale with its values."""
    first, *others = ranks.run(sharded, True, maxima)
    assert first[0].abs().max() > 0.25  # the first rank's; what others scale up they clip
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def others(rank: Rank) -> tuple[float, dict[str, Any]]:
    """What DDP still sends: the first values of all, then buffers of others; ranks run different layers first."""
    torch.manual_seed(rank.number)
    model = Mixed(rank.device)
    te.prepare_state(model.first, ROW)
    state = model.first.fp8_state
    assert state is not None
    state.scale_fwd.fill_(1 + rank.number)
    ddp = wrapped(rank, model, find_unused_parameters=True)
    begun = float(state.scale_fwd[0])
    for i in range(2):
        model.offset.fill_(i + 1 + rank.number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with region("current" if i else None):
                ddp(batch(rank, i), second=rank.number > 0).sum().backward()
    with te.autocast(recipe=DelayedScaling(reduce_amax=False)):  # state that some ranks alone have
        ddp(batch(rank, 2), second=rank.number > 0).sum().backward()
        ddp(batch(rank, 3), second=rank.number > 0).sum().backward()
    return begun, {"offset": float(model.offset), "second": model.second.fp8_state is None}


@pytest.mark.four_ranks()
def test_what_ddp_still_sends(ranks: Ranks) -> None:
    found = ranks.run(others)
    assert [begun for begun, _ in found] == [1.0] * len(found)
    assert [said["offset"] for _, said in found] == [2.0] * len(found)
    assert [said["second"] for _, said in found] == [True] + [False] * (len(found) - 1)


def in_a_join(rank: Rank) -> list[float]:
    """The last rank has no batch at all; a model that has state already, of which no recipe makes use."""
    torch.manual_seed(0)
    layer = te.Linear(WIDTH, WIDTH, device=rank.device, params_dtype=torch.bfloat16)
    te.prepare_state(layer, ROW)
    model = wrapped(rank, layer)
    with model.join():
        for i in range(2 if rank.number < rank.world - 1 else 0):
            model(batch(rank, i)).float().mean().backward()
    return [float(p.detach().float().sum()) for p in layer.parameters()]


def test_a_rank_without_a_batch(ranks: Ranks) -> None:
    found = ranks.run(in_a_join)
    assert all(mine == found[0] for mine in found)


def let_go(rank: Rank) -> bool:
    """Whether a wrapper goes with its last reference: it holds the model, and buckets as large as its gradients."""
    layer = te.Linear(WIDTH, WIDTH, device=rank.device, params_dtype=torch.bfloat16)
    model = wrapped(rank, layer)
    gone, _ = weakref.ref(model), gc.disable()
    try:
        del model
        return gone() is None
    finally:
        gc.enable()


def test_a_wrapper_goes_with_its_last_reference(ranks: Ranks) -> None:
    assert all(ranks.run(let_go))


def elsewhere(rank: Rank, how: str) -> list[float]:
    """The first layer's history once DDP knows other names, or the user has told it some."""
    torch.manual_seed(0)
    layers = [te.Linear(WIDTH, WIDTH, device=rank.device, params_dtype=torch.bfloat16) for _ in range(2)]
    model, recipe = torch.nn.Sequential(*layers), DelayedScaling(amax_history_len=4, reduce_amax=False)
    model.register_buffer("offset", torch.zeros(1, device=rank.device))  # which DDP does send
    te.prepare_state(model, recipe)
    if how == "some told":
        names = [f"{i}.fp8_state.scale_fwd" for i in range(2)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = wrapped(rank, model)
    if how == "wrapped inside":
        apply_activation_checkpointing(ddp.module, check_fn=lambda m: isinstance(m, te.Linear))
    elif how == "copied":
        ddp = copy.deepcopy(ddp)
    elif how == "loaded":
        ddp = pickle.loads(pickle.dumps(ddp))
    layers = [m for m in ddp.modules() if isinstance(m, te.Linear)]
    for i in range(3):
        with te.autocast(recipe=recipe):
            y = ddp(batch(rank, i))
        y.float().square().mean().backward()
    ddp.module = None  # a program lets go of its model
    state: Any = layers[0].fp8_state
    return [*state.amax_history_fwd[1:, 0].tolist(), *[float(batch(rank, i).abs().max()) for i in range(3)]]


@pytest.mark.parametrize("how", ["wrapped inside", "some told", "copied", "loaded"])
def test_states_under_other_names(ranks: Ranks, how: str) -> None:
    for found in ranks.run(elsewhere, how):
        assert found[:3] == found[3:]


def late(rank: Rank, hooked: bool) -> list[str]:
    """What is said of weight gradients that come after DDP has reduced."""
    layer = te.Linear(WIDTH, WIDTH, device=rank.device, params_dtype=torch.bfloat16, delay_wgrad_compute=True)
    model = wrapped(rank, layer)
    if hooked:
        layer.register_wgrad_accumulation_and_reduce_hooks(lambda: None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(2):
            model(batch(rank, i)).sum().backward()
            layer.backward_dw()
    return [str(w.message) for w in said if "delay_wgrad_compute" in str(w.message)]


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_that_come_after_the_reduction(ranks: Ranks, hooked: bool) -> None:
    for said in ranks.run(late, hooked):
        assert len(said) == (not hooked)
        assert hooked or "register_wgrad_accumulation_and_reduce_hooks" in said[0]


def fused(rank: Rank, ignored: bool) -> list[str]:
    """What is said of weight gradients that go where DDP does not look, as it takes the model; then a step."""
    options: dict[str, Any] = {"device": rank.device, "params_dtype": torch.bfloat16}
    layers = [te.Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True, **options) for _ in range(2)]
    model = torch.nn.Sequential(*layers, te.Linear(WIDTH, WIDTH, **options))
    for layer in layers:
        layer.weight.main_grad = torch.zeros(WIDTH, WIDTH, device=rank.device)
    if ignored:
        names = ["0.weight", "1.weight"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        whole = wrapped(rank, model)
        if ignored:
            for i in range(2):
                whole(batch(rank, i)).sum().backward()
            alike = [torch.zeros_like(layers[0].bias.grad) for _ in range(rank.world)]
            dist.all_gather(alike, layers[0].bias.grad)
            assert all(torch.equal(t, alike[0]) for t in alike)
            assert layers[0].weight.main_grad.any()
    return [str(w.message) for w in said if "main_grad" in str(w.message)]


@pytest.mark.parametrize("ignored", [False, True])
def test_gradients_that_are_not_reduced(ranks: Ranks, ignored: bool) -> None:
    for said in ranks.run(fused, ignored):
        assert len(said) == (not ignored)
        assert ignored or "_set_params_and_buffers_to_ignore_for_model" in said[0]
