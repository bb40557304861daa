"""The amax reduction of ranks that run the same: gloo on the CPU, NCCL on two GPUs.

What several ranks reduce equals the state of one process that sees the batches of all of them in one region: casts
keep the largest value there.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import ModuleList, Sequential

import te_torch as te
from te_core.errors import UnsupportedError
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from te_torch import state as scaling
from te_torch import updates
from te_torch.state import ScalingState
from te_torch.training.graphs import device as seam
from tests.backends import requires_gpus
from tests.fake_graphs import FakeDevice
from tests.parallel.amax_steps import (
    RULE,
    RULES,
    STEPS,
    backward,
    batch,
    counted,
    forward,
    gradient,
    half,
    halves,
    make,
    region,
    together,
    train,
)  # fmt: skip
from tests.parallel.ranks import Rank
from tests.parallel.steps import alike, by_ranks, error_of, graphed, on_cpu, same, says
from tests.world import fp8_state, values

#: How a module runs whose maxima are reduced.
HOW = ("eager", "compiled", "graphed")


def made(rank: Rank, how: str, group: Any = None, **rule: Any) -> Any:
    module = make(rank)
    if how == "compiled":
        return torch.compile(module, backend="aot_eager")
    if how == "eager":
        return module
    with counted() as calls:
        sample = (batch(rank.number, 0, rank.device),)
        call = graphed(module, rank, sample, DelayedScaling(**{**RULE, **rule}), amax_reduction_group=group)
    assert calls == []  # a capture reduces nothing
    return call


def agree(found: list[dict[str, Any]], wanted: list[dict[str, torch.Tensor]], reductions: int) -> None:
    for got, state in zip(found, wanted, strict=True):
        assert same({name.replace("_orig_mod.", ""): t.cpu() for name, t in got["state"].items()}, state)
        assert got["reductions"] == reductions


def everyone(rank: Rank) -> tuple[int, ...]:
    return tuple(range(rank.world))


def many(rank: Rank, count: int = 400) -> ModuleList:
    """More states than a group's first buffer has room for."""
    return ModuleList(te.Linear(16, 16, bias=False, device=rank.device) for _ in range(count))


@pytest.mark.four_ranks(rule="max", how="eager")
@pytest.mark.parametrize(
    ("rule", "how"),
    [*((rule, "eager") for rule in RULES), *((r, "graphed") for r in ("max", "most_recent", "own rank"))],
)
@by_ranks()
def test_all_ranks(rank: Rank, rule: str, how: str) -> None:
    """Without a group: over all, once forward and once backward; with reduce_amax=False each keeps its own. Replays are
    reduced, in the region of the call, as eager steps are."""
    own = rule == "own rank"
    found = train(made(rank, how, **RULES[rule]), rank, **RULES[rule])
    agree(found, together((rank.number,) if own else everyone(rank), rule), 0 if own else 2)
    assert alike([step["state"]["fp8_state.scale_fwd"] for step in found]) == (not own)


@pytest.mark.four_ranks(how="eager")
@pytest.mark.four_ranks(how="graphed")
@pytest.mark.parametrize(
    ("how", "inside"),
    [*((how, False) for how in (*HOW, "graphed for another")), pytest.param("compiled", True, marks=pytest.mark.full)],
)
@by_ranks()
def test_subgroups(rank: Rank, how: str, inside: bool) -> None:
    """Compiled code in an eager region is reduced as eager code is, from its first step on; a graph's group is that of
    the region of the call, whatever the capture was given."""
    group = halves(rank)
    call = made(rank, how.partition(" ")[0], group if how == "graphed" else None)
    agree(train(call, rank, group=group, inside=inside), together(half(rank)), 0 if rank.world == 2 else 2)


@by_ranks()
def test_backward_inside_the_region(rank: Rank) -> None:
    """The group is known before the region ends. (Gradient scales are updated first: it makes no difference here.)"""
    agree(train(make(rank), rank, inside=True), together(everyone(rank)), 2)


@by_ranks()
def test_one_reduction_for_all_modules(rank: Rank) -> None:
    """And every rank has the same scales after it, also where the others replay graphs."""
    between = torch.nn.Linear(64, 48, device=rank.device)
    model = Sequential(make(rank, "LayerNormLinear"), between, make(rank, "LayerNormMLP", seed=1))
    torch.nn.init.eye_(between.weight)
    mlp: Any = make(rank, "LayerNormMLP")
    if rank.number == 0:
        mlp = graphed(mlp, rank, (batch(0, 0, rank.device),), DelayedScaling(**RULE))
    elif rank.device == "cpu":
        seam.device = FakeDevice(mlp)  # lets go of another test's, as on rank 0: modules that live give others names
    for module, states in ((model, 2), (mlp, 1)):
        found = train(module, rank)
        assert {step["reductions"] for step in found} == {2} and alike(found)
        assert sum("scale_fwd" in name for name in found[-1]["state"]) == states


@pytest.mark.four_ranks()
@by_ranks()
def test_states_of_different_groups(rank: Rank) -> None:
    """Two regions with different groups before one backward pass: each state is reduced over its own."""
    first, second, part = make(rank), make(rank, seed=1), halves(rank)
    wanted = zip(together(half(rank)), together(everyone(rank), seed=1), strict=True)
    for number, states in zip(range(STEPS), wanted, strict=True):
        with counted() as calls:
            x = batch(rank.number, number, rank.device)
            ys = [forward(module, x, group) for module, group in ((first, part), (second, None))]
            torch.autograd.backward(ys, [gradient(y, rank.number, number) for y in ys])
        assert same(on_cpu([fp8_state(first), fp8_state(second)]), list(states))
        assert len(calls) == (2 if rank.world == 2 else 4)


@by_ranks()
def test_groups_have_one_order(rank: Rank) -> None:
    """One update of states of two groups, to which odd ranks come in another order: else each would wait in the group
    of the other."""
    modules = ModuleList(make(rank, seed=seed) for seed in range(2))
    both = list(zip(modules, (None, dist.new_group(list(range(rank.world)))), strict=True))
    for number in range(2):
        x, ys = batch(rank.number, number, rank.device), []
        with te.autocast(recipe=DelayedScaling(**RULE)):
            for module, group in both[:: -1 if rank.number % 2 else 1]:
                ys.append(forward(module, x, group))
        backward(ys)
    assert alike(fp8_state(modules))


@by_ranks()
def test_no_communication(rank: Rank) -> None:
    """With a group of one rank, without gradients, and without a history."""
    alone = [dist.new_group([r]) for r in range(rank.world)][rank.number]
    module, x = make(rank), batch(rank.number, 0, rank.device)
    assert {step["reductions"] for step in train(module, rank, group=alone)} == {0}
    with counted() as calls:
        with torch.no_grad():
            forward(module, x)
        with te.autocast(recipe=Float8CurrentScaling()):
            module(x).sum().backward()
    assert not calls


@by_ranks("pair")
def test_compiled_modules_are_reduced_in_one_order(rank: Rank) -> None:
    """States have numbers, which differ: a set of those that rank 1 has is not in the order of their making."""
    while ScalingState(1, 1, torch.device("cpu")).token % 32 != (30 if rank.number else 2):
        pass
    kinds = ("Linear", "LayerNormLinear", "LayerNormMLP")
    model = ModuleList(make(rank, kind, seed) for seed, kind in enumerate(kinds))
    te.prepare_state(model, DelayedScaling(**RULE))
    traced, x = [torch.compile(m, backend="aot_eager") for m in model], batch(rank.number, 0, rank.device)
    for _ in range(2):
        backward(region(traced, x))
    assert alike([fp8_state(m)["fp8_state.scale_fwd"] for m in model])


@by_ranks()
def test_a_region_inside_compiled_code_is_refused(rank: Rank) -> None:
    module, x = make(rank), batch(rank.number, 0, rank.device)

    def compiled(rule: DelayedScaling) -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            with te.autocast(recipe=rule):
                return module(x)  # type: ignore[no-any-return]

        return torch.compile(function, backend="aot_eager", fullgraph=True)(x)

    says(error_of(lambda: compiled(DelayedScaling(**RULE))), "reduce_amax")
    torch._dynamo.reset()
    compiled(DelayedScaling(**RULE, reduce_amax=False))


# ------------------------------------------------------------------- what one rank does alone and may


def moved(module: Any, rank: Rank) -> None:
    module.double().float()


def assigned(module: Any, rank: Rank) -> None:
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)


def history(module: Any, rank: Rank) -> None:
    module.adjust_amax_history_length(9)
    module.adjust_amax_history_length(4)


def plans(module: Any, rank: Rank) -> None:
    module.fp8_state.update_plans.clear()


def evaluation(module: Any, rank: Rank) -> None:
    with torch.no_grad():
        forward(module, 1e6 * batch(0, 0, rank.device))
    module.fp8_state.amax_history_fwd[0].zero_()  # what inference saw counts: not the subject here


def saved(module: Any, rank: Rank) -> None:
    torch.save(module, io.BytesIO())
    copy.deepcopy(module)


@by_ranks()
def test_what_one_rank_does_alone(rank: Rank) -> None:
    """Rank 0 does something that gives its state new buffers, or forgets its plans. It needs no other exchange: later
    steps are those of ranks that did nothing of the kind, and as many."""
    wanted: Any = None
    for how in (None, moved, assigned, history, plans, evaluation, saved):
        module = make(rank)
        train(module, rank, steps=2)
        if rank.number == 0 and how is not None:
            how(module, rank)
        found = on_cpu(train(module, rank))
        wanted = found if how is None else wanted
        assert same(found, wanted) and {step["reductions"] for step in found} == {2}, how


@by_ranks()
def test_a_checkpoint_on_some_ranks(rank: Rank) -> None:
    """Rank 0 loads a checkpoint into a module that has not run; the others start anew. Histories that differ are no
    error: scales are equal again when they have passed."""
    saved, module = make(rank), make(rank)
    for _ in range(2):
        backward([forward(saved, 100 * batch(0, 0, rank.device), reduce_amax=False)])
    if rank.number == 0:
        module.load_state_dict(saved.state_dict())
    train(module, rank, steps=1)
    assert not alike(fp8_state(module)["fp8_state.scale_fwd"])
    train(module, rank)
    assert alike(fp8_state(module))


@by_ranks()
def test_many_sets_of_modules(rank: Rank) -> None:
    """More sets of modules than plans are kept, in turn, and one that runs nowhere: one all-reduce of one size each,
    also for what was run, forgotten and run again."""
    modules = ModuleList(make(rank, seed=seed) for seed in range(6))
    x = batch(rank.number, 0, rank.device)
    sets = [[i, j] for i in range(5) for j in range(5) if i != j]
    with counted() as calls:
        for chosen in sets * 2:
            backward(region([modules[i] for i in chosen], x))
    assert len(calls) == 4 * len(sets) and len(set(calls)) == 1 and modules[5].fp8_state is None
    assert max(len(m.fp8_state.update_plans) for m in modules[:5]) <= 18
    assert alike([fp8_state(m) for m in modules[:5]])


@by_ranks()
def test_more_states_than_fit(rank: Rank) -> None:
    """Large models lengthen the group's buffers; small ones then use the long ones."""
    small, large = make(rank), many(rank)
    x = values(16, 16, device=rank.device, seed=rank.number) * (1 + rank.number)
    with counted() as calls:
        backward([forward(small, batch(rank.number, 0, rank.device))])
        for _ in range(2):
            backward(region(large, x))
        backward([forward(small, batch(rank.number, 1, rank.device))])
    assert calls == [1024] * 3 + [2048] * 6  # only the first region needed a second exchange
    scales = torch.stack([m.fp8_state.scale_fwd for m in large])
    assert alike(scales) and scales.max() > 1


@by_ranks()
def test_groups_made_again(rank: Rank) -> None:
    """At times at the address of an old one, whose agreements end with it."""
    module, large, x = make(rank), many(rank), values(16, 16, device=rank.device)
    for turn in range(4):
        group = dist.new_group(list(range(rank.world)))
        with counted() as calls, te.autocast(recipe=DelayedScaling(**RULE), amax_reduction_group=group):
            module(batch(rank.number, turn, rank.device))
            if turn % 2 == 0:
                ys = [m(x) for m in large]
                del ys
        assert calls == ([1024] if turn % 2 else [1024, 2048])
        for m in (module, *large):
            if m.fp8_state is not None:
                m.fp8_state.group = None
        if rank.number == 0:
            module.fp8_state.update_plans.clear()
        dist.destroy_process_group(group)


@by_ranks("pair")
def test_plans_of_old_groups_are_forgotten(rank: Rank) -> None:
    module = make(rank)
    for turn in range(20):
        group = dist.new_group(list(range(rank.world)))
        forward(module, batch(rank.number, turn, rank.device), group)
        dist.destroy_process_group(group)
    assert len(module.fp8_state.update_plans) <= 18


@by_ranks()
def test_the_default_group_made_again(rank: Rank, tmp_path: Path) -> None:
    module = make(rank)
    train(module, rank, steps=1)
    dist.barrier()
    dist.destroy_process_group()
    found = train(module, rank, steps=1)
    backend = "nccl" if rank.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=rank.number, world_size=rank.world)
    assert [step["reductions"] for step in (*found, *train(module, rank, steps=2))] == [0, 2, 2]


@by_ranks()
def test_calibration_in_inference_mode(rank: Rank) -> None:
    """Its reduction leaves no buffer behind that could not be used outside of it."""
    module, x = make(rank), batch(rank.number, 0, rank.device)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode(), te.autocast(enabled=False, calibrating=True, recipe=DelayedScaling(**RULE)):
            module(x)
    assert alike(train(module, rank)[-1]["state"])


@requires_gpus(2, ranks=True)
@by_ranks("gpus")
def test_an_update_in_a_graph(rank: Rank) -> None:
    """An update inside a CUDA graph, of a module that has run before; one of a module that has not."""
    fresh, module = make(rank, seed=1), make(rank)
    te.prepare_state(fresh, DelayedScaling(**RULE))
    train(module, rank, steps=2)

    def capture(state: ScalingState) -> Any:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            updates.update([state.token], scaling.FORWARD)
        return graph

    refused = error_of(lambda: capture(fresh.fp8_state), UnsupportedError)
    says(refused, "whose first reduction is inside a CUDA graph's capture")
    state = module.fp8_state
    graph = capture(state)
    state.update_plans.clear()  # the graph goes on with the buffers that it was captured with
    torch.cuda.empty_cache()
    state.amax_history_fwd[0].fill_(1.0 + rank.number)
    graph.replay()
    torch.cuda.synchronize()
    history = state.amax_history_fwd
    assert (history == 2).any() and not (history == 1).any() and alike(fp8_state(module))
