"""Ranks that do not run the same: an error that says what differs, and never a hang, an abort or another's scale.

On the CPU every rank says so in that reduction, before a history changes. On a GPU so does a rank that runs the modules
for the first time; the others in their next reductions. `late` has the CPU look as a GPU does.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Module, ModuleList, Sequential

import te_torch as te
from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling, Format
from te_torch import amax_reduction, updates
from te_torch import state as scaling
from tests.module_steps import differences, values
from tests.parallel.amax_steps import RULE, batch, counted, error_of, forward, fp8_state, make, step, train
from tests.parallel.ranks import Rank, Ranks, meet


def region(modules: Any, x: torch.Tensor, **rule: Any) -> list[torch.Tensor]:
    """One region in which each of these runs once."""
    with te.autocast(recipe=DelayedScaling(**{**RULE, **rule})):
        return [module(x) for module in modules]


def backward(ys: list[torch.Tensor]) -> None:
    torch.autograd.backward([y.sum() for y in ys])


def row(module: Any) -> list[float]:
    return module.fp8_state.amax_history_fwd[0].tolist()


# ------------------------------------------------------------------------------------- which modules ran


class Net(Module):
    """Two layers of one size, of which a rank runs one."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.first, self.second = make(rank, "Linear"), make(rank, "Linear", seed=1)


kept: list[Any] = []


def two(rank: Rank, how: str) -> Any:
    """Two modules of one size, and what the ranks call them."""
    if how == "in a model":
        kept.append(Net(rank))
        return [kept[-1].first, kept[-1].second], ["Net.first", "Net.second"]
    if how == "in two models":  # of which the first has been built later on rank 1
        kept.extend(Net(rank) for _ in range(2 + rank.number))
        nets = kept[-2:]
        step(nets[0].first, batch(rank.number, 0, rank.device))
        step(nets[1].first, batch(rank.number, 0, rank.device))
        return [nets[0].first, nets[1].first], ["Net.first", "Net.first (2)"]
    kept.extend(te.Linear(64, 48, device=rank.device) for _ in range(rank.number))  # of no account
    named = {"name": "mine"} if how == "named" else {}
    modules = [te.Linear(48, 64, device=rank.device, **named), te.Linear(48, 64, device=rank.device)]
    return modules, ["Linear mine", "Linear"] if named else ["Linear", "Linear #2"]


def one_of_two(rank: Rank, how: str) -> Any:
    """Rank 0 runs the first, the others the second; forward, then both and one backward; twice."""
    kept.clear()
    modules, names = two(rank, how)
    mine, x, found = modules[min(rank.number, 1)], batch(rank.number, 0, rank.device), []
    for _ in range(2):
        found.append(error_of(lambda: region([mine], x), ArgumentError))
        found.append(row(mine)[0] == x.abs().max().item() and mine.fp8_state.due)  # no update has read it
    region(modules, x)
    train(modules[0], rank, steps=1)
    ys = region(modules, x)
    found.append(error_of(lambda: backward([ys[min(rank.number, 1)]]), ArgumentError))
    return found, names


@pytest.mark.four_ranks(how="in a model")
@pytest.mark.parametrize("how", ["in a model", "in two models", "alone", "named"])
def test_different_modules_of_one_size(how: str, ranks: Ranks) -> None:
    """Each time, forward and backward, with their names in the model, and no history has changed."""
    gpu = ranks.device == "cuda"
    if gpu and how == "in two models":
        pytest.skip("both have run on all ranks: see test_a_disagreement_is_seen_in_the_next_reduction")
    for number, (found, names) in enumerate(ranks.run(one_of_two, how)):
        mine, other = (names[min(number, 1)], names[0 if number else 1])
        first, untouched, again, still_untouched, back = found
        assert untouched and still_untouched
        if gpu:  # rank 0 has run that backward before: it would say so in its next reduction
            assert bool(back) == (number > 0)
        for message in (first, again) if gpu else (first, again, back):
            assert message.startswith("ArgumentError: amax reduction: got ranks of a group that ran different modules")
            assert f"rank {number} alone ran {mine}" in message and f"alone ran {other}" in message
            assert "amax_reduction_group" in message and "reduce_amax=False" in message


def same_modules_built_otherwise(rank: Rank) -> Any:
    """In another order, after other models, in wrappers: the same names."""
    if rank.number == 0:
        net = Net(rank)
        run = net
    else:
        kept = [Net(rank) for _ in range(3)]
        net = kept[0]
        net.first, net.second = make(rank, "Linear"), None
        net.second = make(rank, "Linear", seed=1)
        net._modules = {name: net._modules[name] for name in ("second", "first")}
        run = Sequential(Sequential(net))[0][0]
    x = batch(rank.number, 0, rank.device)
    for _ in range(2):
        backward(region([run.first, run.second], x))
    return [fp8_state(run.first), fp8_state(run.second)]


def test_names_are_those_of_the_model(ranks: Ranks) -> None:
    found = ranks.run(same_modules_built_otherwise)
    assert all(not differences(a, b) for states in found for a, b in zip(states, found[0], strict=True))


MORE_NUMBERS = ((1, 2), (330, 340), (345, 340), (400, 500))


def another_number(rank: Rank, of_rank_0: int, of_others: int) -> Any:
    count = of_rank_0 if rank.number == 0 else of_others
    x = values(16, 16, device=rank.device)
    model = ModuleList(te.Linear(16, 16, bias=False, device=rank.device) for _ in range(max(of_rank_0, of_others)))
    found = [error_of(lambda: region(model[:count], x))]
    with counted() as calls:
        found.append(error_of(lambda: region(model, x)))  # together they go on
    return found, calls


@pytest.mark.parametrize(
    "numbers", [(3, 2), (340, 345), *(pytest.param(n, marks=pytest.mark.full) for n in MORE_NUMBERS)]
)
def test_another_number_of_modules(numbers: tuple[int, int], ranks: Ranks) -> None:
    """Also across the length of a buffer."""
    for number, ((error, after), calls) in enumerate(ranks.run(another_number, *numbers)):
        assert "different modules" in error and after == ""
        (least, most), own = sorted(numbers), numbers[min(number, 1)]
        if own == most:
            assert f"rank {number} alone ran ModuleList.{least}" in error
            assert (f"and {most - least - 3} more" in error) == (most - least > 3)
        assert set(calls) <= {1024, 2048}


def another_order(rank: Rank) -> Any:
    net, x = Net(rank), batch(rank.number, 0, rank.device)
    order = [net.first, net.second][:: 1 if rank.number == 0 else -1]
    return error_of(lambda: region(order, x), ArgumentError), row(net.first)[0] == x.abs().max().item()


def test_another_order(ranks: Ranks) -> None:
    for number, (error, untouched) in enumerate(ranks.run(another_order)):
        assert untouched and "different orders" in error and "call the modules in the same order" in error
        assert f"as number 1 Net.{'second' if number else 'first'} on rank {number}" in error


def another_rule(rank: Rank, rule: dict[str, Any]) -> Any:
    module, x = make(rank, "Linear"), batch(rank.number, 0, rank.device)
    return error_of(lambda: backward([forward(module, x, **(rule if rank.number == 0 else {}))]), ArgumentError)


@pytest.mark.parametrize(
    "rule, shown",
    [
        ({"margin": 1}, "margin 1"),
        ({"amax_history_len": 8}, "history of 8"),
        ({"amax_compute_algo": "most_recent"}, "most_recent"),
        ({"fp8_format": Format.E4M3}, "scales of float8_e4m3"),
    ],
)
def test_another_rule(rule: dict[str, Any], shown: str, ranks: Ranks) -> None:
    """Scales would differ although the maxima are the same."""
    for number, error in enumerate(ranks.run(another_rule, rule)):
        assert "under different rules" in error and shown in error and "on rank 0" in error
        assert f"on rank {number}" in error


# --------------------------------------------------------------------------------- ranks out of step


def a_rank_of_its_own_mind(rank: Rank, what: str) -> Any:
    """In step 2 of 4 rank 1 leaves out its backward, or ends one region more."""
    net, x, done = Net(rank), batch(rank.number, 0, rank.device), []

    def all_steps() -> None:
        for number in range(4):
            odd = rank.number == 1 and number == 2
            if odd and what == "one more region":
                forward(net.first, x)
            finish(rank)
            ys = region([net.first, net.second], x)
            finish(rank)
            if not (odd and what == "no backward"):
                backward(ys)
            done.append(number)

    error = error_of(all_steps)
    return error, len(done), [net.first.fp8_state.scale_fwd.cpu(), net.first.fp8_state.scale_bwd.cpu()]


@pytest.mark.parametrize("what, steps", [("no backward", (2, 3)), ("one more region", (2, 2))])
def test_a_rank_out_of_step(what: str, steps: tuple[int, int], pair: Ranks) -> None:
    """It is seen in the first reduction that does not belong together, before a scale has changed."""
    found = pair.run(a_rank_of_its_own_mind, what)
    for number, (error, done, scales) in enumerate(found):
        assert "ArgumentError" in error and done == steps[number]
        assert all(torch.equal(a, b) for a, b in zip(scales, found[0][2], strict=True))
    kind = "out of step" if what == "no backward" else "different modules"
    assert kind in found[0][0] and kind in found[1][0]
    if what == "no backward":
        assert "rank 0 is at the end of a backward pass" in found[0][0]
        assert "rank 1 is at the end of a region" in found[1][0] and "leaves out one" in found[1][0]


def seen_out_of_step(rank: Rank) -> Any:
    with late(rank):
        return a_rank_of_its_own_mind(rank, "no backward")


def test_a_rank_out_of_step_is_seen_later(two: Ranks) -> None:
    """Where heads are looked at later: both say so in the reduction after that one, and none waits for the other."""
    for number, (error, done, _) in enumerate(two.run(seen_out_of_step)):
        assert error.startswith("ArgumentError") and "out of step, 1 reduction ago" in error and done == 3
        assert f"rank {number} is at the end of a {'region' if number else 'backward pass'}" in error


def leaves_out_a_whole_step(rank: Rank) -> Any:
    module, found = make(rank, "Linear"), []
    for number in range(4):
        if rank.number == 0 and number == 3:  # which waits in vain
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
        if rank.number == 0 or number != 2:
            error = error_of(lambda number=number: step(module, batch(rank.number, number, rank.device)))
            found.append((error, fp8_state(module)))
    meet(rank, "waited")  # until then the group is there
    dist.destroy_process_group()
    return found


def test_a_whole_step_left_out(pair: Ranks) -> None:
    """Such a rank is not to be told from a slower one: updates go by their number, until one finds no partner.

    With gloo alone: with NCCL torch's watchdog ends the rank that waits, as in `test_a_rank_that_dies`.
    """
    first, second = pair.run(leaves_out_a_whole_step)
    for (error, state), (other, states) in zip(first, second, strict=False):
        assert error == other == "" and not differences(state, states)
    assert len(first) == 4 and len(second) == 3
    assert "LibraryError: forward amax reduction: got a failure over ranks [0, 1]" in first[3][0]
    assert "left out a step" in first[3][0]


def dies(rank: Rank) -> None:
    net, x = Net(rank), batch(rank.number, 0, rank.device)
    backward(region([net.first, net.second], x))
    if rank.number == 1:
        os._exit(7)
    forward(net.first, x)


def test_a_rank_that_dies(two: Ranks) -> None:
    """With NCCL torch's watchdog ends the other one."""
    first, second = two.outcomes(dies) if two.device == "cpu" else two.outcomes(dies, group_timeout=15)
    assert two.seconds < (30 if two.device == "cpu" else 60)
    if two.device == "cuda":
        assert second.how == "died" and first.waited_in_vain(), str(first)
        return
    assert (first.how, first.error, second.how) == ("raised", "LibraryError", "died")
    assert "over ranks [0, 1]" in first.text and "first error among the other ranks" in first.text


def ended_by_an_exception(module: Any, x: torch.Tensor, **rule: Any) -> None:
    with pytest.raises(ZeroDivisionError), te.autocast(recipe=DelayedScaling(**{**RULE, **rule})):
        module(x)
        raise ZeroDivisionError


def goes_on_after_an_exception(rank: Rank, of_all: bool) -> Any:
    """An exception ends a region (of rank 1 alone), and the program goes on."""
    module, x, found = make(rank, "Linear"), batch(rank.number, 0, rank.device), []
    step(module, x)
    if of_all or rank.number == 1:
        with counted() as calls:
            ended_by_an_exception(module, x)
            ended_by_an_exception(module, x, reduce_amax=False)  # not reduced, so nobody waits for it
            with torch.no_grad():
                ended_by_an_exception(module, x)  # nor is this one
        assert not calls

    def one_more() -> None:
        finish(rank)
        y = forward(module, x)
        finish(rank)
        backward([y])

    for _ in range(2):
        found.append(error_of(one_more, ArgumentError))
    return found


@pytest.mark.four_ranks()
def test_a_region_that_an_exception_ended(ranks: Ranks) -> None:
    """Each later reduction is of another step than the others', and says so (with NCCL the one after it does); where
    all ranks did that, none is."""
    for number, found in enumerate(ranks.run(goes_on_after_an_exception, False)):
        for error in found:
            assert "out of step" in error and "goes on after an exception" in error
            regions = f"exceptions have ended {int(number == 1)} regions on rank {number}"
            assert regions in error
    assert ranks.run(goes_on_after_an_exception, True) == [["", ""]] * ranks.world


def checkpoints(rank: Rank) -> Any:
    """Rank 1 recomputes a region, which torch stops by an exception as soon as it has what it wants."""
    module, x, found = make(rank, "Linear"), batch(rank.number, 0, rank.device), []
    for _ in range(3):
        if rank.number == 1:
            y = torch.utils.checkpoint.checkpoint(forward, module, x, use_reentrant=False)
        else:
            y = forward(module, x)
        y.backward(torch.ones_like(y))
        found.append(fp8_state(module))
    return found


def test_a_checkpoint_is_no_exception(pair: Ranks) -> None:
    mine, other = pair.run(checkpoints)
    assert not any(differences(a, b) for a, b in zip(mine, other, strict=True))


# ------------------------------------------------------------------------------- looked at later, on a GPU


@contextmanager
def late(rank: Rank, after: int = 1) -> Iterator[list[Any]]:
    """Heads are looked at as on a GPU: each arrives when so many later ones were sent. What was waited for."""
    waited: list[Any] = []
    if rank.device == "cuda":
        yield waited
        return
    sent = itertools.count(1)

    class Mark:
        def __init__(self, device: torch.device) -> None:
            self.host, self.number, self.device = torch.empty(amax_reduction._HEAD), 0, device

        def take(self, head: torch.Tensor) -> None:
            self.host.copy_(head)
            self.number = Mark.last = next(sent)

        def arrived(self) -> bool:
            return self.number + after <= Mark.last

        def wait(self) -> None:
            waited.append(self)

    at_once, mark = amax_reduction._looks_at_once, amax_reduction._Mark
    amax_reduction._looks_at_once, amax_reduction._Mark = (lambda device: False), Mark
    try:
        yield waited
    finally:
        amax_reduction._looks_at_once, amax_reduction._Mark = at_once, mark


def finish(rank: Rank) -> None:
    """What a GPU has been given is done: the next reduction finds all heads on the host."""
    if rank.device == "cuda":
        torch.cuda.synchronize()


def seen_later(rank: Rank) -> Any:
    """Both modules have run on all ranks; then, twice, rank 0 runs the first and the others the second."""
    net, x, found = Net(rank), batch(rank.number, 0, rank.device), []
    with late(rank) as waited:
        for _ in range(2):
            for module in (net.first, net.second):
                forward(module, x)
        for _ in range(2):
            for chosen in ([net.first, net.second][min(rank.number, 1)], net.first, net.first):
                finish(rank)
                found.append(error_of(lambda m=chosen: forward(m, x), ArgumentError))
    return found, len(waited)


def test_a_disagreement_is_seen_in_the_next_reduction(ranks: Ranks) -> None:
    """Where heads are looked at later: each time, and nothing is waited for."""
    for number, (found, waited) in enumerate(ranks.run(seen_later)):
        assert waited == 0 and [bool(error) for error in found] == [False, True, False] * 2
        for error in found[1::3]:
            assert f"rank {number} ran Net.{'second' if number else 'first'}" in error and "1 reduction ago" in error
            assert "reset_fp8_meta_tensors" in error


def seen_much_later(rank: Rank, after: int) -> Any:
    """The host is far ahead of the device."""
    net, x, found = Net(rank), batch(rank.number, 0, rank.device), []
    with late(rank, after) as waited:
        for module in (net.first, net.second, [net.first, net.second][rank.number], *[net.first] * 40):
            found.append(error_of(lambda m=module: forward(m, x), ArgumentError))
    (team,) = {p.team for m in (net.first, net.second) for key, ps in plans(m) for p in ps}
    return [i for i, error in enumerate(found) if error], len(waited), len(team.waiting)


def plans(module: Any) -> list[Any]:
    return [(key, plan) for key, plan in module.fp8_state.update_plans.items() if key[0] == "reduce"]


def test_a_head_that_takes_long(pair: Ranks) -> None:
    """It is seen when it has arrived; what is on its way is bounded, and the oldest waited for then."""
    assert pair.run(seen_much_later, 5) == [([2 + 5], 0, 5)] * 2
    ((errors, waited, waiting),) = {(*map(tuple, r[:1]), *r[1:]) for r in pair.run(seen_much_later, 10**6)}
    assert waiting == amax_reduction._WAITING - 1 and waited == 41 - waiting
    assert errors == (2 + waiting,)


def new_to_one(rank: Rank, count: int) -> Any:
    """Rank 1 runs what never ran; for the others nothing is new."""
    model = ModuleList(te.Linear(16, 16, bias=False, device=rank.device) for _ in range(400))
    x, found = values(16, 16, device=rank.device), []
    with late(rank), counted() as calls:
        for _ in range(2):
            region(model[:2], x)
        for _ in range(2):
            finish(rank)
            chosen = model[:2] if rank.number == 0 else model[:count]
            found.append(error_of(lambda c=chosen: region(c, x), ArgumentError))
        finish(rank)
        found.append(error_of(lambda: region(model[:2], x), ArgumentError))
        found.append(error_of(lambda: region(model[:2], x), ArgumentError))
    return found, calls


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.full), 400])
def test_new_on_one_rank_only(count: int, two: Ranks) -> None:
    """That rank says so at once, also where its states do not fit yet; the other one in the next reduction."""
    (first, calls), (second, _) = two.run(new_to_one, count)
    assert [bool(error) for error in first] == [False, True, True, False]  # of the region before
    assert [bool(error) for error in second] == [True, True, False, False]
    sizes = "the ranks ran " + " to ".join(str(n) for n in sorted((2, count)))
    assert sizes in first[1] and sizes in second[0] and set(calls) == {1024}


def settled_elsewhere(rank: Rank) -> Any:
    """A plan that one rank has forgotten is nothing new; and what a GPU settles once is not looked at again."""
    net, x, looks = Net(rank), batch(rank.number, 0, rank.device), []
    plain = amax_reduction._ReductionPlan._settle
    amax_reduction._ReductionPlan._settle = lambda plan: (looks.append(plan.entries), plain(plan))[1]
    try:
        with late(rank):
            for number in range(6):
                backward(region([net.first, net.second], x))
                if rank.number == 0 and number % 2:
                    net.float() if number == 1 else net.first.fp8_state.update_plans.clear()
    finally:
        amax_reduction._ReductionPlan._settle = plain
    return len(looks), fp8_state(net)


def test_what_is_settled_is_not_waited_for(ranks: Ranks) -> None:
    found = ranks.run(settled_elsewhere)
    assert [looks for looks, _ in found] == [2] * ranks.world
    assert all(not differences(state, found[0][1]) for _, state in found)


def without_host_waits(rank: Rank) -> Any:
    net, x = Net(rank), batch(rank.number, 0, rank.device)
    for _ in range(2):
        backward(region([net.first, net.second], x))
    if rank.device != "cuda":
        return True
    tokens = [m.fp8_state.token for m in (net.first, net.second)]
    for direction in (scaling.FORWARD, scaling.BACKWARD):  # settled in this order (backward ran in the other)
        updates.update(tokens, direction)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            for direction in (scaling.FORWARD, scaling.BACKWARD):
                updates.update(tokens, direction)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def test_no_host_waits_for_a_gpu(ranks: Ranks) -> None:
    """In a steady state (torch finds what synchronizes; on the CPU nothing does)."""
    assert all(ranks.run(without_host_waits))
