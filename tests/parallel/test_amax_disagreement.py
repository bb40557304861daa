"""Ranks that do not run the same: an error that says what differs, and never a hang, an abort or another's scale.

On the CPU every rank says so in that reduction, before a history changes. On a GPU so does a rank that runs the modules
for the first time; the others in their next reductions. `late` has the CPU look as a GPU does.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn import Module, ModuleList, Sequential

import te_torch as te
from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling, Format
from te_torch import amax_reduction, updates
from te_torch import state as scaling
from tests.parallel.amax_steps import RULE, backward, batch, counted, forward, make, region, train
from tests.parallel.ranks import Rank, Ranks, meet
from tests.parallel.steps import alike, by_ranks, error_of, everyones, says
from tests.world import fp8_state, values


def mine(rank: Rank) -> torch.Tensor:
    return batch(rank.number, 0, rank.device)


def refused(action: Callable[[], Any]) -> str:
    return error_of(action, ArgumentError)


def many(rank: Rank, count: int) -> ModuleList:
    return ModuleList(te.Linear(16, 16, bias=False, device=rank.device) for _ in range(count))


class Net(Module):
    """Two layers of one size, of which a rank runs one."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.first, self.second = make(rank), make(rank, seed=1)

    def both(self, x: torch.Tensor) -> list[torch.Tensor]:
        return region([self.first, self.second], x)

    def own(self, rank: Rank) -> Any:
        """Of rank 0 the first, of the others the second."""
        return self.second if rank.number else self.first


# ------------------------------------------------------------------------------------- which modules ran


def two_of_one_size(rank: Rank, how: str, kept: list[Any]) -> Any:
    """Two modules of one size, and what the ranks call them."""
    if how == "in a model":
        kept.append(Net(rank))
        return [kept[-1].first, kept[-1].second], ["Net.first", "Net.second"]
    if how == "in two models":  # of which the first has been built later on rank 1
        kept.extend(Net(rank) for _ in range(2 + rank.number))
        modules = [net.first for net in kept[-2:]]
        for module in modules:
            backward([forward(module, mine(rank))])
        return modules, ["Net.first", "Net.first (2)"]
    kept.extend(te.Linear(64, 48, device=rank.device) for _ in range(rank.number))  # of no account
    named = {"name": "mine"} if how == "named" else {}
    modules = [te.Linear(48, 64, device=rank.device, **named), te.Linear(48, 64, device=rank.device)]
    return modules, ["Linear mine", "Linear"] if named else ["Linear", "Linear #2"]


@pytest.mark.four_ranks(how="in a model")
@pytest.mark.parametrize("how", ["in a model", "in two models", "alone", "named"])
@by_ranks()
def test_different_modules_of_one_size(rank: Rank, how: str) -> None:
    """Each time, forward and backward, with their names in the model, and no history has changed."""
    gpu = rank.device == "cuda"
    if gpu and how == "in two models":
        return  # both have run on all ranks: see test_a_disagreement_is_seen_in_the_next_reduction
    kept: list[Any] = []
    modules, names = two_of_one_size(rank, how, kept)
    own, other = names[:: -1 if rank.number else 1]
    module, x, said = modules[min(rank.number, 1)], mine(rank), []
    for _ in range(2):
        said.append(refused(lambda: region([module], x)))
        assert (
            module.fp8_state.amax_history_fwd[0, 0] == x.abs().max() and module.fp8_state.due
        )  # no update has read it
    region(modules, x)
    train(modules[0], rank, steps=1)
    ys = region(modules, x)
    back = refused(lambda: backward([ys[min(rank.number, 1)]]))
    if gpu:  # rank 0 has run that backward before: it would say so in its next reduction
        assert bool(back) == (rank.number > 0)
    for message in said if gpu else [*said, back]:
        assert message.startswith("ArgumentError: amax reduction: got ranks of a group that ran different modules")
        says(
            message,
            f"rank {rank.number} alone ran {own}",
            f"alone ran {other}",
            "amax_reduction_group",
            "reduce_amax=False",
        )


@by_ranks()
def test_names_are_those_of_the_model(rank: Rank) -> None:
    """In another order, after other models, in wrappers: the same names."""
    nets = [Net(rank) for _ in range(3 if rank.number else 1)]
    net = run = nets[0]
    if rank.number:
        net.first, net.second = make(rank), None
        net.second = make(rank, seed=1)
        net._modules = {name: net._modules[name] for name in ("second", "first")}
        run = Sequential(Sequential(net))[0][0]  # type: ignore[index]
    for _ in range(2):
        backward(run.both(mine(rank)))
    assert alike([fp8_state(run.first), fp8_state(run.second)])


MORE_NUMBERS = ((1, 2), (330, 340), (345, 340), (400, 500))


@pytest.mark.parametrize(
    "numbers", [(3, 2), (340, 345), *(pytest.param(n, marks=pytest.mark.full) for n in MORE_NUMBERS)]
)
@by_ranks()
def test_another_number_of_modules(rank: Rank, numbers: tuple[int, int]) -> None:
    """Also across the length of a buffer."""
    (least, most), own, x = sorted(numbers), numbers[min(rank.number, 1)], values(16, 16, device=rank.device)
    model = many(rank, most)
    error = error_of(lambda: region(model[:own], x))
    with counted() as calls:
        region(model, x)  # together they go on
    says(error, "different modules")
    if own == most:
        says(error, f"rank {rank.number} alone ran ModuleList.{least}")
        assert (f"and {most - least - 3} more" in error) == (most - least > 3)
    assert set(calls) <= {1024, 2048}


@by_ranks()
def test_another_order(rank: Rank) -> None:
    net, x = Net(rank), mine(rank)
    order = [net.first, net.second][:: 1 if rank.number == 0 else -1]
    error = refused(lambda: region(order, x))
    assert net.first.fp8_state.amax_history_fwd[0, 0] == x.abs().max()
    says(error, "different orders", "call the modules in the same order")
    says(error, f"as number 1 Net.{'second' if rank.number else 'first'} on rank {rank.number}")


@pytest.mark.parametrize(
    "rule, shown",
    [
        ({"margin": 1}, "margin 1"),
        ({"amax_history_len": 8}, "history of 8"),
        ({"amax_compute_algo": "most_recent"}, "most_recent"),
        ({"fp8_format": Format.E4M3}, "scales of float8_e4m3"),
    ],
)
@by_ranks()
def test_another_rule(rank: Rank, rule: dict[str, Any], shown: str) -> None:
    """Scales would differ although the maxima are the same."""
    module = make(rank)
    error = refused(lambda: backward([forward(module, mine(rank), **(rule if rank.number == 0 else {}))]))
    says(error, "under different rules", shown, "on rank 0", f"on rank {rank.number}")


# --------------------------------------------------------------------------------- ranks out of step


def finish(rank: Rank) -> None:
    """What a GPU has been given is done: the next reduction finds all heads on the host."""
    if rank.device == "cuda":
        torch.cuda.synchronize()


def of_its_own_mind(rank: Rank, what: str) -> tuple[str, int, Any]:
    """In step 2 of 4 rank 1 leaves out its backward, or ends one region more: (the error, steps done, scales)."""
    net, x, done = Net(rank), mine(rank), []

    def all_steps() -> None:
        for number in range(4):
            odd = rank.number == 1 and number == 2
            if odd and what == "one more region":
                forward(net.first, x)
            finish(rank)
            ys = net.both(x)
            finish(rank)
            if not (odd and what == "no backward"):
                backward(ys)
            done.append(number)

    error = error_of(all_steps)
    return error, len(done), [net.first.fp8_state.scale_fwd, net.first.fp8_state.scale_bwd]


@pytest.mark.parametrize("what, steps", [("no backward", (2, 3)), ("one more region", (2, 2))])
@by_ranks("pair")
def test_a_rank_out_of_step(rank: Rank, what: str, steps: tuple[int, int]) -> None:
    """It is seen in the first reduction that does not belong together, before a scale has changed."""
    error, done, scales = of_its_own_mind(rank, what)
    assert done == steps[rank.number] and alike(scales)
    says(error, "ArgumentError", "out of step" if what == "no backward" else "different modules")
    if what == "no backward":
        says(
            error,
            *[("rank 0 is at the end of a backward pass",), ("rank 1 is at the end of a region", "leaves out one")][
                rank.number
            ],
        )


@by_ranks("two")
def test_a_rank_out_of_step_is_seen_later(rank: Rank) -> None:
    """Where heads are looked at later: both say so in the reduction after that one, and none waits for the other."""
    with late(rank):
        error, done, _ = of_its_own_mind(rank, "no backward")
    assert error.startswith("ArgumentError") and done == 3
    says(
        error,
        "out of step, 1 reduction ago",
        f"rank {rank.number} is at the end of a {('backward pass', 'region')[rank.number]}",
    )


def leaves_out_a_whole_step(rank: Rank) -> Any:
    module, found = make(rank), []
    for number in range(4):
        if rank.number == 0 and number == 3:  # which waits in vain
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
        if rank.number == 0 or number != 2:
            x = batch(rank.number, number, rank.device)
            error = error_of(lambda x=x: backward([forward(module, x)]))
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
        assert error == other == "" and all(torch.equal(t, states[name]) for name, t in state.items())
    assert len(first) == 4 and len(second) == 3
    says(first[3][0], "LibraryError: forward amax reduction: got a failure over ranks [0, 1]", "left out a step")


def dies(rank: Rank) -> None:
    net, x = Net(rank), mine(rank)
    backward(net.both(x))
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
    says(first.text, "over ranks [0, 1]", "first error among the other ranks")


def ended_by_an_exception(module: Any, x: torch.Tensor, **rule: Any) -> None:
    with pytest.raises(ZeroDivisionError), te.autocast(recipe=DelayedScaling(**{**RULE, **rule})):
        module(x)
        raise ZeroDivisionError


@pytest.mark.four_ranks()
@pytest.mark.parametrize("of_all", [False, True])
@by_ranks()
def test_a_region_that_an_exception_ended(rank: Rank, of_all: bool) -> None:
    """Each later reduction is of another step than the others', and says so (with NCCL the one after it does); where
    all ranks did that, none is."""
    module, x = make(rank), mine(rank)
    backward([forward(module, x)])
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

    regions = f"exceptions have ended {int(rank.number == 1)} regions on rank {rank.number}"
    for _ in range(2):
        error = refused(one_more)
        assert bool(error) is not of_all
        says(error, *[] if of_all else ["out of step", "goes on after an exception", regions])


@by_ranks("pair")
def test_a_checkpoint_is_no_exception(rank: Rank) -> None:
    """Rank 1 recomputes a region, which torch stops by an exception as soon as it has what it wants."""
    module, x = make(rank), mine(rank)
    for _ in range(3):
        if rank.number == 1:
            y = torch.utils.checkpoint.checkpoint(forward, module, x, use_reentrant=False)
        else:
            y = forward(module, x)
        backward([y])
        assert alike(fp8_state(module))


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

    with patch.multiple(amax_reduction, _looks_at_once=lambda device: False, _Mark=Mark):
        yield waited


@by_ranks()
def test_a_disagreement_is_seen_in_the_next_reduction(rank: Rank) -> None:
    """Where heads are looked at later, and both modules have run on all ranks: each time, and nothing is waited for."""
    net, x = Net(rank), mine(rank)
    with late(rank) as waited:
        for _ in range(2):
            for module in (net.first, net.second):
                forward(module, x)
        for _ in range(2):
            said = []
            for chosen in (net.own(rank), net.first, net.first):
                finish(rank)
                said.append(refused(lambda m=chosen: forward(m, x)))
            assert [bool(error) for error in said] == [False, True, False]
            name = "second" if rank.number else "first"
            says(said[1], f"rank {rank.number} ran Net.{name}", "1 reduction ago", "reset_fp8_meta_tensors")
    assert not waited


@pytest.mark.parametrize("after", [5, 10**6])
@by_ranks("pair")
def test_a_head_that_takes_long(rank: Rank, after: int) -> None:
    """The host is far ahead of the device. A head is seen when it has arrived; what is on its way is bounded, and the
    oldest waited for then."""
    net, x = Net(rank), mine(rank)
    with late(rank, after) as waited:
        modules = (net.first, net.second, net.own(rank), *[net.first] * 40)
        said = [refused(lambda m=module: forward(m, x)) for module in modules]
    plans = [
        plan for m in (net.first, net.second) for key, plan in m.fp8_state.update_plans.items() if key[0] == "reduce"
    ]
    (team,) = {p.team for ps in plans for p in ps}
    waiting = min(after, amax_reduction._WAITING - 1)
    assert len(team.waiting) == waiting and [i for i, error in enumerate(said) if error] == [2 + waiting]
    assert len(waited) == (0 if after == 5 else 41 - waiting)


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.full), 400])
@by_ranks("two")
def test_new_on_one_rank_only(rank: Rank, count: int) -> None:
    """Rank 1 runs what never ran, and says so at once, also where its states do not fit yet; the other one, for which
    nothing is new, in the next reduction."""
    model, x, said = many(rank, 400), values(16, 16, device=rank.device), []
    with late(rank), counted() as calls:
        for _ in range(2):
            region(model[:2], x)
        for chosen in [model[: count if rank.number else 2]] * 2 + [model[:2]]:
            finish(rank)
            said.append(refused(lambda c=chosen: region(c, x)))
        said.append(refused(lambda: region(model[:2], x)))
    assert [bool(error) for error in said] == [[False, True, True, False], [True, True, False, False]][rank.number]
    sizes = " to ".join(str(n) for n in sorted((2, count)))
    says(said[0 if rank.number else 1], f"the ranks ran {sizes}")
    assert rank.number or set(calls) == {1024}


@by_ranks()
def test_what_is_settled_is_not_waited_for(rank: Rank) -> None:
    """A plan that one rank has forgotten is nothing new; and what a GPU settles once is not looked at again."""
    net, looks = Net(rank), []
    plain = amax_reduction._ReductionPlan._settle
    settle = lambda plan: (looks.append(plan.entries), plain(plan))[1]  # noqa: E731
    with patch.object(amax_reduction._ReductionPlan, "_settle", settle), late(rank):
        for number in range(6):
            backward(net.both(mine(rank)))
            if rank.number == 0 and number % 2:
                net.float() if number == 1 else net.first.fp8_state.update_plans.clear()
    assert everyones(len(looks)) == [2] * rank.world and alike(fp8_state(net))


@by_ranks()
def test_no_host_waits_for_a_gpu(rank: Rank) -> None:
    """In a steady state (torch finds what synchronizes; on the CPU nothing does)."""
    net = Net(rank)
    for _ in range(2):
        backward(net.both(mine(rank)))
    if rank.device != "cuda":
        return
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
