"""DistributedDataParallel and the state of delayed scaling: buffers, which rank 0's must not overwrite each forward."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests.parallel.ranks import Rank
from tests.parallel.steps import alike, by_ranks, everyones, place_of, replicated
from tests.tolerances import snr_db
from tests.world import values

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


def linear(rank: Rank, seed: int | None = 0, **options: Any) -> Any:
    if seed is not None:
        torch.manual_seed(seed)
    return te.Linear(WIDTH, WIDTH, device=rank.device, params_dtype=torch.bfloat16, **options)


def batch(rank: Rank, step: int, factor: float = 100.0) -> torch.Tensor:
    """Those of later ranks are larger: scales that are not theirs clip them."""
    x = values(ROWS, WIDTH, dtype=torch.bfloat16, seed=10 * step + rank.number, device=rank.device)
    return x * factor**rank.number


def quality(y: torch.Tensor, x: torch.Tensor, layer: Any) -> float:
    return snr_db(y, torch.nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float()))


PREPARED = ("before", "after", "by the first forward")


@pytest.mark.four_ranks(how="eager", prepared="before")
@pytest.mark.parametrize(
    ("how", "prepared"),
    [
        *(("eager", prepared) for prepared in PREPARED),
        *(pytest.param("compiled", prepared, marks=pytest.mark.full) for prepared in PREPARED[:2]),
        pytest.param("compiled", PREPARED[2], marks=pytest.mark.more),
    ],
)
@by_ranks()
def test_scales_are_each_ranks_own_where_nothing_is_reduced(rank: Rank, how: str, prepared: str) -> None:
    layer, recipe = linear(rank), DelayedScaling(amax_history_len=4, reduce_amax=False)
    if prepared == "before":
        te.prepare_state(layer, recipe)
    model: Any = replicated(layer, rank)
    if prepared == "after":
        te.prepare_state(layer, recipe)
    if how == "compiled":
        model = torch.compile(model, backend="aot_eager")
    for i in range(4):
        x = batch(rank, i)
        with te.autocast(recipe=recipe):
            y = model(x)
            used = float(layer.fp8_state.used_fwd[0])  # what a recomputation would read
        y.float().square().mean().backward()
    scale = float(layer.fp8_state.scale_fwd[0])
    assert 0.5 < used / scale < 2 and quality(y, x, layer) > 24
    scales, maxima = zip(*everyones((scale, float(layer.fp8_state.amax_history_fwd[:, 0].max()))), strict=True)
    for i in range(1, rank.world):
        assert 0.5 < scales[0] / scales[i] / 100**i < 2 and maxima[i] > 50 * maxima[0]  # its own largest values


@by_ranks()
def test_maxima_of_microbatches_before_count(rank: Rank) -> None:
    """One region holds two forwards, the first of greater values, of which the last rank has the largest."""
    layer, found = linear(rank), []
    te.prepare_state(layer, ROW)
    model = replicated(layer, rank)
    greater = 100 ** (1 / (rank.world - 1))  # those of the last rank by so much as one scale has room for
    for i in range(3):
        with te.autocast(recipe=ROW):
            for k in range(2):
                x = batch(rank, 2 * i + k, 1.0 if k else greater)
                y = model(x)
                y.float().square().mean().backward()
                if k == 0:
                    found.append(float(x.abs().max()))
                    assert i == 0 or quality(y, x, layer) > 24
    assert sorted(everyones(found)[-1]) == sorted(layer.fp8_state.amax_history_fwd[1:, 0].tolist())
    assert alike(layer.fp8_state.amax_history_fwd[1:, 0])


def sharded(rank: Rank, zero: bool, maxima: str = "reduced") -> list[torch.Tensor]:
    """Weights held quantized, grown to several times their size, by an optimizer whose ranks own some each."""
    recipe, group = ROW, None
    if maxima == "each rank's own":
        recipe = DelayedScaling(amax_history_len=4, reduce_amax=False)
    elif maxima == "of a smaller group":
        group = [dist.new_group([i]) for i in range(rank.world)][rank.number]
    with te.quantized_model_init(recipe=ROW):
        layers = [linear(rank), linear(rank, None)]
    model = replicated(torch.nn.Sequential(*layers), rank)
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.0}
    optimizer: Any = torch.optim.AdamW(model.parameters(), **options)
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    for i in range(8):
        x = batch(rank, i, 1.0)
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            y = model(x)
        (y.float() - 3 * x.float().roll(1, 1)).square().mean().backward()
        if maxima != "reduced":  # a rank's own scale, whatever has led to it
            for layer in layers:
                layer.fp8_state.scale_fwd[1] *= 1.3**rank.number
        optimizer.step()
        optimizer.zero_grad()
    histories = [layer.fp8_state.amax_history_fwd[:, 1] for layer in layers]
    return [*[layer.weight.detach().dequantize() for layer in layers], *histories]


@by_ranks()
def test_a_shard_of_the_optimizer_lets_scales_grow(rank: Rank) -> None:
    for a, b in zip(sharded(rank, False)[:2], sharded(rank, True)[:2], strict=True):
        assert a.abs().max() > 0.25  # from an eighth on
        assert snr_db(b, a) > 24


@pytest.mark.parametrize("maxima", ["each rank's own", "of a smaller group"])
@by_ranks()
def test_a_shard_of_the_optimizer_and_maxima_that_are_not_reduced(rank: Rank, maxima: str) -> None:
    """A weight's owner alone sees what has outgrown the scale: the others take its scale with its values."""
    found = sharded(rank, True, maxima)
    assert alike(found) and found[0].abs().max() > 0.25  # the first rank's; what others scale up they clip


@pytest.mark.four_ranks()
@by_ranks()
def test_what_ddp_still_sends(rank: Rank) -> None:
    """The first values of all, then buffers of others; ranks run different layers first."""
    torch.manual_seed(rank.number)
    model = Mixed(rank.device)
    te.prepare_state(model.first, ROW)
    state: Any = model.first.fp8_state
    state.scale_fwd.fill_(1 + rank.number)
    ddp = replicated(model, rank, find_unused_parameters=True)
    assert float(state.scale_fwd[0]) == 1.0
    for i, recipe in enumerate((None, Float8CurrentScaling(), *[DelayedScaling(reduce_amax=False)] * 2)):
        if i < 2:  # with delayed scaling there is state that some ranks alone have
            model.offset.fill_(i + 1 + rank.number)
        with warnings.catch_warnings(), te.autocast(enabled=recipe is not None, recipe=recipe):
            warnings.simplefilter("ignore")
            ddp(batch(rank, i), second=rank.number > 0).sum().backward()
    assert float(model.offset) == 2.0 and (model.second.fp8_state is None) == (rank.number == 0)


@by_ranks()
def test_a_rank_without_a_batch(rank: Rank) -> None:
    """The last one, of a model that has state already, of which no recipe makes use."""
    layer = linear(rank)
    te.prepare_state(layer, ROW)
    model = replicated(layer, rank)
    with model.join():
        for i in range(2 if rank.number < rank.world - 1 else 0):
            model(batch(rank, i)).float().mean().backward()
    assert alike(list(layer.parameters()))


@by_ranks()
def test_a_wrapper_goes_with_its_last_reference(rank: Rank) -> None:
    """It holds the model, and buckets as large as its gradients."""
    model = replicated(linear(rank), rank)
    gone, _ = weakref.ref(model), gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["wrapped inside", "some told", "copied", "loaded"])
@by_ranks()
def test_states_under_other_names(rank: Rank, how: str) -> None:
    """Histories are the rank's own once DDP knows other names, or the user has told it some."""
    layers = [linear(rank), linear(rank, None)]
    model, recipe = torch.nn.Sequential(*layers), DelayedScaling(amax_history_len=4, reduce_amax=False)
    model.register_buffer("offset", torch.zeros(1, device=rank.device))  # which DDP does send
    te.prepare_state(model, recipe)
    if how == "some told":
        names = [f"{i}.fp8_state.scale_fwd" for i in range(2)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = replicated(model, rank)
    if how == "wrapped inside":
        apply_activation_checkpointing(ddp.module, check_fn=lambda m: isinstance(m, te.Linear))
    elif how == "copied":
        ddp = copy.deepcopy(ddp)
    elif how == "loaded":
        ddp = pickle.loads(pickle.dumps(ddp))
    first = next(m for m in ddp.modules() if isinstance(m, te.Linear))
    for i in range(3):
        with te.autocast(recipe=recipe):
            y = ddp(batch(rank, i))
        y.float().square().mean().backward()
    ddp.module = None  # a program lets go of its model
    assert first.fp8_state is not None
    maxima = [float(batch(rank, i).abs().max()) for i in range(3)]
    assert first.fp8_state.amax_history_fwd[1:, 0].tolist() == maxima


@contextmanager
def warned() -> Iterator[list[str]]:
    """What is warned of inside, when it is over."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(w.message) for w in caught]


@pytest.mark.parametrize("hooked", [False, True])
@by_ranks()
def test_gradients_that_come_after_the_reduction(rank: Rank, hooked: bool) -> None:
    layer = linear(rank, delay_wgrad_compute=True)
    model = replicated(layer, rank)
    if hooked:
        layer.register_wgrad_accumulation_and_reduce_hooks(lambda: None)
    with warned() as said:
        for i in range(2):
            model(batch(rank, i)).sum().backward()
            layer.backward_dw()
    late = [text for text in said if "delay_wgrad_compute" in text]
    assert len(late) == (not hooked) and all("register_wgrad_accumulation_and_reduce_hooks" in text for text in late)


@pytest.mark.parametrize("ignored", [False, True])
@by_ranks()
def test_gradients_that_are_not_reduced(rank: Rank, ignored: bool) -> None:
    """Those that go where DDP does not look are told of as it takes the model; then a step."""
    layers = [linear(rank, fuse_wgrad_accumulation=True) for _ in range(2)]
    model = torch.nn.Sequential(*layers, linear(rank))
    for layer in layers:
        layer.weight.main_grad = torch.zeros(WIDTH, WIDTH, device=rank.device)
    if ignored:
        names = ["0.weight", "1.weight"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    with warned() as said:
        whole = DistributedDataParallel(model, device_ids=[place_of(rank)] if rank.device == "cuda" else None)
        for i in range(2 if ignored else 0):
            whole(batch(rank, i)).sum().backward()
    if ignored:
        assert alike(layers[0].bias.grad) and layers[0].weight.main_grad.any()
    lost = [text for text in said if "main_grad" in text]
    assert len(lost) == (not ignored)
    assert all("_set_params_and_buffers_to_ignore_for_model" in text for text in lost)
