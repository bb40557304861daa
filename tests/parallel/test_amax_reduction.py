"""The amax reduction of ranks that run the same: gloo on the CPU, NCCL on two GPUs.

What several ranks reduce equals the state of one process that sees the batches of all of them in one region: casts
keep the largest value there.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import ModuleList

import te_torch as te
from te_core.errors import UnsupportedError
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from te_torch import exchange, updates
from te_torch import state as scaling
from te_torch.state import ScalingState
from tests.backends import requires_gpus
from tests.module_steps import differences, values
from tests.parallel.amax_steps import (
    RULE,
    RULES,
    STEPS,
    batch,
    counted,
    error_of,
    forward,
    fp8_state,
    gradient,
    half,
    halves,
    make,
    step,
    together,
    train,
)
from tests.parallel.ranks import Rank, Ranks


def agree(found: list[dict[str, Any]], wanted: list[dict[str, torch.Tensor]], reductions: int) -> None:
    for got, state in zip(found, wanted, strict=True):
        named = {name.replace("_orig_mod.", ""): t for name, t in got["state"].items()}
        assert not differences(named, state)
        assert got["reductions"] == reductions


def everyone(ranks: Ranks) -> tuple[int, ...]:
    return tuple(range(ranks.world))


def default_group(rank: Rank, rule: str) -> Any:
    return train(make(rank, "Linear"), rank, **RULES[rule])


@pytest.mark.four_ranks(rule="max")
@pytest.mark.parametrize("rule", RULES)
def test_all_ranks(rule: str, ranks: Ranks) -> None:
    """Without a group: over all, once forward and once backward; with reduce_amax=False each keeps its own."""
    own, found = rule == "own rank", ranks.run(default_group, rule)
    for number, of_rank in enumerate(found):
        agree(of_rank, together((number,) if own else everyone(ranks), rule), 0 if own else 2)
    scales = {r[-1]["state"]["fp8_state.scale_fwd"][0].item() for r in found}
    assert (len(scales) == 1) == (not own)


def subgroups(rank: Rank) -> Any:
    return train(make(rank, "Linear"), rank, group=halves(rank))


@pytest.mark.four_ranks()
def test_subgroups(ranks: Ranks) -> None:
    for number, found in enumerate(ranks.run(subgroups)):
        agree(found, together(half(number, ranks.world)), 0 if ranks.world == 2 else 2)


def backward_inside(rank: Rank) -> Any:
    return train(make(rank, "Linear"), rank, inside=True)


def test_backward_inside_the_region(ranks: Ranks) -> None:
    """The group is known before the region ends. (Gradient scales are updated first: it makes no difference here.)"""
    for found in ranks.run(backward_inside):
        agree(found, together(everyone(ranks)), 2)


def many_modules(rank: Rank) -> Any:
    between = torch.nn.Linear(64, 48, device=rank.device)
    model = torch.nn.Sequential(make(rank, "LayerNormLinear"), between, make(rank, "LayerNormMLP", seed=1))
    torch.nn.init.eye_(model[1].weight)
    return train(model, rank)


def test_one_reduction_for_all_modules(ranks: Ranks) -> None:
    """And every rank has the same scales after it."""
    steps = ranks.run(many_modules)
    assert {step["reductions"] for found in steps for step in found} == {2}
    for found in steps[1:]:
        for mine, first in zip(found, steps[0], strict=True):
            assert not differences(mine["state"], first["state"])
    assert sum("scale_fwd" in name for name in steps[0][-1]["state"]) == 2


def groups_of_two_modules(rank: Rank) -> Any:
    """Two regions with different groups before one backward pass: each state is reduced over its own."""
    first, second, recipe = make(rank, "Linear"), make(rank, "Linear", seed=1), DelayedScaling(**RULE)
    part, found = halves(rank), []
    for number in range(STEPS):
        with counted() as calls:
            ys = []
            for module, group in ((first, part), (second, None)):
                with te.autocast(recipe=recipe, amax_reduction_group=group):
                    ys.append(module(batch(rank.number, number, rank.device)))
            torch.autograd.backward(ys, [gradient(y, rank.number, number) for y in ys])
        found.append({"first": fp8_state(first), "second": fp8_state(second), "reductions": len(calls)})
    return found


@pytest.mark.four_ranks()
def test_states_of_different_groups(ranks: Ranks) -> None:
    world = ranks.world
    for number, found in enumerate(ranks.run(groups_of_two_modules)):
        wanted = zip(found, together(half(number, world)), together(everyone(ranks), seed=1), strict=True)
        for got, first, second in wanted:
            assert not differences(got["first"], first) and not differences(got["second"], second)
            assert got["reductions"] == (2 if world == 2 else 4)


def two_groups_at_once(rank: Rank) -> Any:
    """One update of states of two groups, to which odd ranks come in another order."""
    modules = ModuleList(make(rank, "Linear", seed) for seed in range(2))
    both = list(zip(modules, (None, dist.new_group(list(range(rank.world)))), strict=True))
    for number in range(2):
        x, ys = batch(rank.number, number, rank.device), []
        with te.autocast(recipe=DelayedScaling(**RULE)):
            for module, group in both[:: -1 if rank.number % 2 else 1]:
                with te.autocast(recipe=DelayedScaling(**RULE), amax_reduction_group=group):
                    ys.append(module(x).sum())
        torch.autograd.backward(ys)
    return fp8_state(modules)


def test_groups_have_one_order(ranks: Ranks) -> None:
    """Whichever a rank came to first: else each rank would wait in the group of the other."""
    found = ranks.run(two_groups_at_once)
    assert all(not differences(state, found[0]) for state in found)


def no_communication(rank: Rank) -> Any:
    """A group of this rank alone; inference; a recipe without a history."""
    alone = [dist.new_group([r]) for r in range(rank.world)][rank.number]
    module, x = make(rank, "Linear"), batch(rank.number, 0, rank.device)
    counts = [r["reductions"] for r in train(module, rank, group=alone)]
    with counted() as calls:
        with torch.no_grad():
            forward(module, x)
        with te.autocast(recipe=Float8CurrentScaling()):
            module(x).sum().backward()
    return [*counts, len(calls)]


def test_no_communication(ranks: Ranks) -> None:
    """With a group of one rank, without gradients, and without a history."""
    assert all(set(found) == {0} for found in ranks.run(no_communication))


def compiled(rank: Rank, inside: bool) -> Any:
    return train(torch.compile(make(rank, "Linear"), backend="aot_eager"), rank, group=halves(rank), inside=inside)


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.full)])
def test_compiled_modules(inside: bool, ranks: Ranks) -> None:
    """Compiled code in an eager region is reduced as eager code is, from its first step on."""
    for number, found in enumerate(ranks.run(compiled, inside)):
        agree(found, together(half(number, ranks.world)), 0 if ranks.world == 2 else 2)


def compiled_in_unequal_processes(rank: Rank) -> Any:
    """States have numbers, which differ: a set of those that rank 1 has is not in the order of their making."""
    while ScalingState(1, 1, torch.device("cpu")).token % 32 != (30 if rank.number else 2):
        pass
    kinds = ("Linear", "LayerNormLinear", "LayerNormMLP")
    model = ModuleList(make(rank, kind, seed) for seed, kind in enumerate(kinds))
    te.prepare_state(model, DelayedScaling(**RULE))
    traced, x = [torch.compile(m, backend="aot_eager") for m in model], batch(rank.number, 0, rank.device)
    for _ in range(2):
        with te.autocast(recipe=DelayedScaling(**RULE)):
            ys = [m(x) for m in traced]
        torch.autograd.backward([y.sum() for y in ys])
    return [fp8_state(m)["fp8_state.scale_fwd"] for m in model]


def test_compiled_modules_are_reduced_in_one_order(pair: Ranks) -> None:
    first, second = pair.run(compiled_in_unequal_processes)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def region_in_compiled_code(rank: Rank) -> Any:
    module, recipe = make(rank, "Linear"), DelayedScaling(**RULE)
    own, x = DelayedScaling(**RULE, reduce_amax=False), batch(rank.number, 0, rank.device)

    def forward(x: torch.Tensor, rule: DelayedScaling) -> torch.Tensor:
        with te.autocast(recipe=rule):
            return module(x)

    refused = error_of(lambda: torch.compile(lambda x: forward(x, recipe), backend="aot_eager", fullgraph=True)(x))
    torch._dynamo.reset()
    torch.compile(lambda x: forward(x, own), backend="aot_eager", fullgraph=True)(x)
    return UnsupportedError.__name__ in refused or "reduce_amax" in refused


def test_a_region_inside_compiled_code_is_refused(ranks: Ranks) -> None:
    assert all(ranks.run(region_in_compiled_code))


# ------------------------------------------------------------------- what one rank does alone and may

MOVES = ("moved", "assigned", "history", "plans", "evaluation", "saved")


def one_rank_moves(rank: Rank) -> dict[str, Any]:
    """By what rank 0 does alone: the steps after it."""
    return {how: after_a_move(rank, how) for how in ("nothing", *MOVES)}


def after_a_move(rank: Rank, how: str) -> Any:
    """Rank 0 does something that gives its state new buffers, or forgets its plans; the other one does not."""
    module = make(rank, "Linear")
    train(module, rank, steps=2)
    if rank.number == 0:
        if how == "moved":
            module.double().float()
        elif how == "assigned":
            module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
        elif how == "history":
            module.adjust_amax_history_length(9)
            module.adjust_amax_history_length(4)
        elif how == "plans":
            module.fp8_state.update_plans.clear()
        elif how == "evaluation":
            with torch.no_grad():
                forward(module, 1e6 * batch(0, 0, rank.device))
            module.fp8_state.amax_history_fwd[0].zero_()  # what inference saw counts: not the subject here
        elif how == "saved":
            torch.save(module, io.BytesIO())
            copy.deepcopy(module)
    return train(module, rank)


def test_what_one_rank_does_alone(ranks: Ranks) -> None:
    """Needs no other exchange: later steps are those of ranks that did nothing of the kind, and as many."""
    for number, steps in enumerate(ranks.run(one_rank_moves)):
        wanted = [step["state"] for step in steps["nothing"]]
        assert [step["reductions"] for step in steps["nothing"]] == [2] * len(wanted)
        others = {
            (how, number): [step["reductions"] for step in steps[how]]
            for how in MOVES
            if any(s["reductions"] != 2 or differences(s["state"], w) for s, w in zip(steps[how], wanted, strict=True))
        }
        assert not others


def resumed(rank: Rank) -> Any:
    """Rank 0 loads a checkpoint into a module that has not run; the others start anew."""
    saved, module = make(rank, "Linear"), make(rank, "Linear")
    for _ in range(2):
        step(saved, 100 * batch(0, 0, rank.device), reduce_amax=False)
    if rank.number == 0:
        module.load_state_dict(saved.state_dict())
    train(module, rank, steps=1)
    early = fp8_state(module)["fp8_state.scale_fwd"]
    train(module, rank)
    return early, fp8_state(module)


def test_a_checkpoint_on_some_ranks(ranks: Ranks) -> None:
    """Histories that differ are no error: scales are equal again when they have passed."""
    found = ranks.run(resumed)
    assert not torch.equal(found[0][0], found[1][0])
    assert all(not differences(state, found[0][1]) for _, state in found)


def some_of_many(rank: Rank) -> Any:
    """More sets of modules than plans are kept, in turn, and one that runs nowhere."""
    modules = ModuleList(make(rank, "Linear", seed) for seed in range(6))
    x = batch(rank.number, 0, rank.device)
    sets = [[i, j] for i in range(5) for j in range(5) if i != j]
    with counted() as calls:
        for chosen in sets * 2:
            with te.autocast(recipe=DelayedScaling(**RULE)):
                ys = [modules[i](x) for i in chosen]
            torch.autograd.backward([y.sum() for y in ys])
    kept = max(len(m.fp8_state.update_plans) for m in modules[:5])
    return len(calls) - 4 * len(sets), set(calls), kept, [fp8_state(m) for m in modules[:5]], modules[5].fp8_state


def test_many_sets_of_modules(ranks: Ranks) -> None:
    """One all-reduce of one size each, also for what was run, forgotten and run again."""
    found = ranks.run(some_of_many)
    for more, sizes, kept, states, never in found:
        assert (more, len(sizes), never) == (0, 1, None) and kept <= 18
        assert all(not differences(a, b) for a, b in zip(states, found[0][3], strict=True))


def more_than_fit(rank: Rank) -> Any:
    """Large models lengthen the group's buffers; small ones then use the long ones."""
    small = make(rank, "Linear")
    large = ModuleList(te.Linear(16, 16, bias=False, device=rank.device) for _ in range(400))
    x = values(16, 16, device=rank.device, seed=rank.number) * (1 + rank.number)
    with counted() as calls:
        step(small, batch(rank.number, 0, rank.device))
        for _ in range(2):
            with te.autocast(recipe=DelayedScaling(**RULE)):
                ys = [m(x) for m in large]
            torch.autograd.backward([y.sum() for y in ys])
        step(small, batch(rank.number, 1, rank.device))
    return calls, torch.stack([m.fp8_state.scale_fwd.cpu() for m in large])


def test_more_states_than_fit(ranks: Ranks) -> None:
    found = ranks.run(more_than_fit)
    for calls, scales in found:
        assert calls == [1024] * 3 + [2048] * 6  # only the first region needed a second exchange
        assert torch.equal(scales, found[0][1]) and scales.max() > 1


def new_groups(rank: Rank) -> Any:
    """Groups destroyed and made again, at times at the address of an old one."""
    sizes, module = [], make(rank, "Linear")
    large = ModuleList(te.Linear(16, 16, bias=False, device=rank.device) for _ in range(400))
    x = values(16, 16, device=rank.device)
    for turn in range(4):
        group = dist.new_group(list(range(rank.world)))
        with counted() as calls, te.autocast(recipe=DelayedScaling(**RULE), amax_reduction_group=group):
            module(batch(rank.number, turn, rank.device))
            if turn % 2 == 0:
                ys = [m(x) for m in large]
                del ys
        sizes.append(calls)
        module.fp8_state.group = None
        for m in large:
            if m.fp8_state is not None:
                m.fp8_state.group = None
        if rank.number == 0:
            module.fp8_state.update_plans.clear()
        dist.destroy_process_group(group)
    return sizes, len(exchange._of_groups)


def test_groups_made_again(ranks: Ranks) -> None:
    """What was agreed on in a group ends with it."""
    for sizes, _ in ranks.run(new_groups):
        assert sizes == [[1024, 2048], [1024]] * 2


def one_group_after_another(rank: Rank) -> int:
    module = make(rank, "Linear")
    for turn in range(20):
        group = dist.new_group(list(range(rank.world)))
        forward(module, batch(rank.number, turn, rank.device), group=group)
        dist.destroy_process_group(group)
    return len(module.fp8_state.update_plans)


def test_plans_of_old_groups_are_forgotten(pair: Ranks) -> None:
    assert all(kept <= 18 for kept in pair.run(one_group_after_another))


def default_group_again(rank: Rank, store: str) -> Any:
    module = make(rank, "Linear")
    train(module, rank, steps=1)
    dist.barrier()
    dist.destroy_process_group()
    found = train(module, rank, steps=1)
    backend = "nccl" if rank.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank.number, world_size=rank.world)
    return [r["reductions"] for r in (*found, *train(module, rank, steps=2))], fp8_state(module)


def test_the_default_group_made_again(ranks: Ranks, tmp_path: Any) -> None:
    found = ranks.run(default_group_again, str(tmp_path / "store"))
    assert [counts for counts, _ in found] == [[0, 2, 2]] * ranks.world


def calibrated_in_inference(rank: Rank) -> Any:
    module, x = make(rank, "Linear"), batch(rank.number, 0, rank.device)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode(), te.autocast(enabled=False, calibrating=True, recipe=DelayedScaling(**RULE)):
            module(x)
    return train(module, rank)


def test_calibration_in_inference_mode(ranks: Ranks) -> None:
    """Its reduction leaves no buffer behind that could not be used outside of it."""
    found = ranks.run(calibrated_in_inference)
    assert all(not differences(r[-1]["state"], found[0][-1]["state"]) for r in found)


def captured(rank: Rank) -> Any:
    """An update inside a CUDA graph, of a module that has run before; one of a module that has not."""
    fresh, module = make(rank, "Linear", seed=1), make(rank, "Linear")
    te.prepare_state(fresh, DelayedScaling(**RULE))
    train(module, rank, steps=2)

    def capture(state: ScalingState) -> Any:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            updates.update([state.token], scaling.FORWARD)
        return graph

    refused = error_of(lambda: capture(fresh.fp8_state), UnsupportedError)
    state = module.fp8_state
    graph = capture(state)
    state.update_plans.clear()  # the graph goes on with the buffers that it was captured with
    torch.cuda.empty_cache()
    state.amax_history_fwd[0].fill_(1.0 + rank.number)
    graph.replay()
    torch.cuda.synchronize()
    return refused, state.amax_history_fwd.cpu(), fp8_state(module)


@requires_gpus(2, ranks=True)
def test_an_update_in_a_graph(ranks_of: Callable[[int, str], Ranks]) -> None:
    found = ranks_of(2, "cuda").run(captured)
    for refused, history, state in found:
        assert "whose first reduction is inside a CUDA graph's capture" in refused
        assert (history == 2).any() and not (history == 1).any() and not differences(state, found[0][2])
