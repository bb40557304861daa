"""`CudaRNGStatesTracker`: its streams against generators of the same seeds; and what modules draw from it.

Two ranks are simulated by two trackers with different seeds in one process, torch's own generator set to one seed.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from te_core.recipe import NVFP4BlockScaling
from te_torch import CudaRNGStatesTracker
from te_torch.forks import drawn_in
from te_torch.training.collectives import get_distributed_rank, get_distributed_world_size, initialize_affine_weight_gpu
from te_torch.training.rng import (
    get_all_rng_states,
    graph_safe_rng_available,
    is_graph_safe_rng_state,
    set_all_rng_states,
)
from tests.backends import on_devices, requires_cuda

NAME = "model-parallel-rng"


def tracker_of(device: str, seed: int = 7, **more: int) -> CudaRNGStatesTracker:
    made = CudaRNGStatesTracker(device=device)
    for name, value in {NAME: seed, **more}.items():
        made.add(name, value)
    return made


def stream(device: str, seed: int) -> Callable[[int], torch.Tensor]:
    """What a generator of that seed draws, call by call."""
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    return lambda n: torch.rand(n, generator=generator, device=device)


def own_state(device: str) -> torch.Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()


# ------------------------------------------------------------------------------------------------ streams


@on_devices
def test_a_fork_draws_from_its_stream(device: str) -> None:
    """Streams go on from fork to fork, whatever is drawn in between, and torch's own generator notices nothing."""
    torch.manual_seed(1)
    tracker, first, second = tracker_of(device, other=8), stream(device, 7), stream(device, 8)
    own = stream(device, 1)
    for name, expected in ((NAME, first), ("other", second), (NAME, first), ("other", second)):
        with tracker.fork(name):
            assert torch.equal(torch.rand(5, device=device), expected(5))
        assert torch.equal(torch.rand(3, device=device), own(3))
    with tracker.fork():
        assert torch.equal(torch.rand(5, device=device), first(5)), "the default name"


@on_devices
def test_forks_nest(device: str) -> None:
    """Inside a fork, another one of the same name goes on where the stream is; none draws a number twice."""
    torch.manual_seed(1)
    tracker, first, second, own = tracker_of(device, other=8), stream(device, 7), stream(device, 8), stream(device, 1)

    def check(expected: Callable[[int], torch.Tensor]) -> None:
        assert torch.equal(torch.rand(4, device=device), expected(4))

    with tracker.fork():
        check(first)
        with tracker.fork():
            check(first)
        check(first)
        with tracker.fork("other"):
            check(second)
            with tracker.fork():
                check(first)
            check(second)
        check(first)
    check(own)
    with tracker.fork():
        check(first)
    with tracker.fork("other"):
        check(second)


@on_devices
def test_an_error_in_a_fork(device: str) -> None:
    tracker, expected = tracker_of(device), stream(device, 7)
    before = own_state(device)
    with pytest.raises(KeyError, match="mine"), tracker.fork():
        torch.rand(4, device=device)
        raise KeyError("mine")
    assert torch.equal(before, own_state(device))
    expected(4)
    with tracker.fork():
        assert torch.equal(torch.rand(4, device=device), expected(4))


@on_devices
def test_adding_leaves_the_current_numbers_alone(device: str) -> None:
    before = own_state(device)
    tracker = tracker_of(device, a=1, b=2)
    assert torch.equal(before, own_state(device))
    assert tracker.seeds_ == {7, 1, 2} and list(tracker.states_) == [NAME, "a", "b"]
    tracker.reset()
    assert not tracker.states_ and not tracker.seeds_ and not tracker.get_states()
    tracker.add(NAME, 7)


@on_devices
def test_the_form_of_a_stream(device: str) -> None:
    state = tracker_of(device).get_states()[NAME]
    assert is_graph_safe_rng_state(state) == (device == "cuda")
    assert isinstance(state, torch.Generator if device == "cuda" else torch.Tensor)
    assert graph_safe_rng_available() == (torch.version.cuda is not None)
    place = CudaRNGStatesTracker()._place()
    assert place.type == ("cuda" if torch.cuda.is_available() else "cpu"), "where there is a GPU it is meant"


@on_devices
def test_states_are_set(device: str) -> None:
    """What is returned is a dictionary of one's own; what is set is where streams go on, in either form."""
    tracker = tracker_of(device)
    states = tracker.get_states()
    states["more"] = states[NAME]
    assert list(tracker.states_) == [NAME]
    saved = {n: s.get_state() if isinstance(s, torch.Generator) else s for n, s in tracker.get_states().items()}
    with tracker.fork():
        first = torch.rand(4, device=device)
    other = CudaRNGStatesTracker(device=device)
    other.set_states(saved)
    assert list(get_all_rng_states()) == [NAME] and get_all_rng_states()[NAME] is other.states_[NAME]
    with other.fork():
        assert torch.equal(torch.rand(4, device=device), first)
    generator = torch.Generator(device)
    generator.manual_seed(7)
    tracker.set_states({"new": generator})
    with tracker.fork("new"):
        assert torch.equal(torch.rand(4, device=device), first)


@on_devices
def test_all_states(device: str) -> None:
    """Those of all trackers by their names; set, they are where the trackers go on."""
    tracker, other = tracker_of(device, one=1), CudaRNGStatesTracker(device=device)
    other.add("two", 2)
    found = get_all_rng_states()
    assert {NAME, "one", "two"} <= set(found) and found["two"] is other.states_["two"]
    generator = torch.Generator(device)
    generator.manual_seed(5)
    set_all_rng_states({"two": generator if device == "cuda" else generator.get_state()})
    with other.fork("two"):
        assert torch.equal(torch.rand(4, device=device), stream(device, 5)(4))
    with tracker.fork("one"):
        assert torch.equal(torch.rand(4, device=device), stream(device, 1)(4))
    with pytest.raises(KeyError, match=r"set_all_rng_states: got the name 'three'.*Allowed: names of streams"):
        set_all_rng_states({"three": generator})
    del tracker, other
    assert not {"one", "two"} & set(get_all_rng_states()), "a tracker that is gone has no streams"


def test_a_class_of_the_users_own() -> None:
    """As trainers derive theirs: the methods call those of this class."""

    class Derived(CudaRNGStatesTracker):
        def __init__(self) -> None:
            super().__init__()
            self.reset()

        def reset(self) -> None:
            super().reset()
            self.ready = False

        def set_states(self, states: Any) -> None:
            super().set_states(states)
            self.ready = True

        def add(self, name: str, seed: int) -> None:
            super().add(name, seed)
            self.ready = True

    tracker = Derived()
    assert not tracker.ready
    tracker.add(NAME, 3)
    assert tracker.ready
    with tracker.fork():
        torch.rand(2)


def test_what_is_refused_changes_nothing() -> None:
    """(What is said: tests/messages/torch_training.py.)"""
    tracker = tracker_of("cpu", other=8)
    for name, seed in (("other", 9), ("third", 7), ("third", "7")):
        with pytest.raises((RuntimeError, ArgumentError)):
            tracker.add(name, seed)  # type: ignore[arg-type]
    assert tracker.seeds_ == {7, 8} and "third" not in tracker.states_
    kept = tracker.get_states()
    for state in (5, "a", None, torch.zeros(3, dtype=torch.uint8), torch.zeros(5056)):
        for set_states in (tracker.set_states, set_all_rng_states):
            with pytest.raises(ArgumentError, match=f"{set_states.__name__}: got the stream 'other' as .*get_states"):
                set_states({"other": state})  # type: ignore[dict-item]
    assert tracker.get_states() == kept
    before = torch.get_rng_state()
    with pytest.raises(KeyError) as caught, tracker.fork("expert"):
        pass
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(KeyError, match="expert"):
        te.Linear(8, 8, get_rng_state_tracker=lambda: tracker, rng_tracker_name="expert", device="cpu")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value) and str(again) == str(caught.value)


def test_small_functions() -> None:
    assert (get_distributed_world_size(), get_distributed_rank()) == (1, 0)
    tracker, weight = tracker_of("cpu"), torch.nn.Parameter(torch.zeros(4, 6))
    initialize_affine_weight_gpu(weight, torch.nn.init.uniform_, lambda: tracker, partition_dim=1)
    assert torch.equal(weight.detach().flatten(), stream("cpu", 7)(24))
    assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (True, 1, 1)
    bare = torch.zeros(2, 2)
    initialize_affine_weight_gpu(bare, torch.nn.init.ones_, None, set_tp_attributes=False)
    assert bare.all() and not hasattr(bare, "partition_dim")


# --------------------------------------------------------------------------------------- what modules draw

HIDDEN, HEADS, TOKENS, BATCH = 64, 4, 16, 8


def layer(tracker: Any, device: str, **options: Any) -> te.TransformerLayer:
    quiet: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "get_rng_state_tracker": lambda: tracker}
    return te.TransformerLayer(HIDDEN, 2 * HIDDEN, HEADS, device=device, **quiet | options)


def batch(device: str) -> torch.Tensor:
    return torch.randn(TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(3)).to(device)


def outputs(device: str, seeds: tuple[int, ...], torch_seeds: tuple[int, ...], **options: Any) -> list[torch.Tensor]:
    """The output of a layer of the same weights on each rank; seeds of its tracker and of torch's own generator."""
    found, weights = [], None
    for seed, own in zip(seeds, torch_seeds, strict=True):
        tracker = tracker_of(device, seed)
        model = layer(tracker, device, **options)
        weights = weights or model.state_dict()
        model.load_state_dict(weights)
        torch.manual_seed(own)
        found.append(model(batch(device)))
    return found


@on_devices
def test_ranks_begin_with_weights_of_their_own(device: str) -> None:
    """All matrices come from the tracker: ranks differ in each; of one seed they agree, whatever torch's own is."""
    made = []
    for seed, own in ((7, 1), (8, 1), (7, 2)):
        torch.manual_seed(own)
        before = own_state(device)
        made.append(dict(layer(tracker_of(device, seed), device).named_parameters()))
        assert torch.equal(before, own_state(device)), "nothing from torch's own"
    matrices = [name for name, p in made[0].items() if p.ndim == 2]
    assert len(matrices) == 6
    for name in matrices:
        assert not torch.equal(made[0][name], made[1][name]) and torch.equal(made[0][name], made[2][name])


@on_devices
@pytest.mark.parametrize(
    ("options", "sequence_parallel", "differ"),
    [
        ({"attention_dropout": 0.3}, False, True),  # heads of their own
        ({"attention_dropout": 0.3}, True, True),
        ({"hidden_dropout": 0.3}, False, False),  # the same stream on each rank
        ({"hidden_dropout": 0.3}, True, True),  # tokens of their own
        ({"drop_path_rate": 0.5}, False, False),
        ({"drop_path_rate": 0.5}, True, True),
    ],
)
def test_ranks_differ_where_they_must(
    options: dict[str, Any], sequence_parallel: bool, differ: bool, device: str
) -> None:
    """First two ranks: trackers differ, torch's own generator is the same. Then what the draws really depend on."""
    a, b = outputs(device, (7, 8), (1, 1), sequence_parallel=sequence_parallel, **options)
    assert torch.equal(a, b) != differ
    a, b = outputs(device, (7, 7), (1, 2), sequence_parallel=sequence_parallel, **options)
    assert torch.equal(a, b) == differ, "what is a rank's own comes from its tracker alone, the rest from torch"


@on_devices
def test_stochastic_rounding_draws_from_the_tracker(device: str) -> None:
    """Sums over ranks of gradients that are rounded by one pattern would not average its errors out."""
    found = []
    for seed, own in ((7, 1), (8, 1), (7, 2)):
        tracker = tracker_of(device, seed)
        module = te.Linear(HIDDEN, HIDDEN, bias=False, device=device, get_rng_state_tracker=lambda t=tracker: t)
        with torch.no_grad():
            module.weight.copy_(batch(device)[0, :1].mT @ batch(device)[1, :1] / 8)
        x = batch(device).requires_grad_()
        torch.manual_seed(own)
        with te.autocast(recipe=NVFP4BlockScaling(), emulate=True):
            y = module(x)
        y.backward(batch(device).roll(1, 0))
        found.append(x.grad)
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


@on_devices
def test_copies_draw_from_the_same_tracker(device: str) -> None:
    tracker = tracker_of(device)
    module = te.DotProductAttention(
        HEADS, 16, attention_dropout=0.5, attn_mask_type="no_mask", get_rng_state_tracker=lambda: tracker
    )
    again = copy.deepcopy(module)
    qkv = [batch(device).view(TOKENS, BATCH, HEADS, 16) for _ in range(3)]
    start = tracker._mark()
    first, second = module(*qkv), again(*qkv)
    assert not torch.equal(first, second), "one stream"
    start()
    assert torch.equal(again(*qkv), first) and torch.equal(module(*qkv), second)


def test_a_tracker_of_the_users_own() -> None:
    """Anything with `fork` serves modules; an error in what it draws is the user's to see."""

    class Own:
        @contextmanager
        def fork(self, name: str = NAME) -> Iterator[None]:
            with torch.random.fork_rng():
                torch.manual_seed(77)
                yield

    module = te.Linear(8, 8, get_rng_state_tracker=Own, device="cpu")
    torch.manual_seed(77)
    expected = torch.empty(8, 8)
    torch.nn.init.normal_(expected, std=0.023)
    assert torch.equal(module.weight, expected)

    def fails(subject: Any) -> torch.Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        drawn_in(Own().fork, fails, None)


# ------------------------------------------------------------------------------------------------ in a capture


@requires_cuda
def test_a_fork_in_a_graph() -> None:
    """Two ranks' trackers in one graph: each replay draws what eager forks of the same seeds would draw next."""
    trackers = [tracker_of("cuda", seed) for seed in (7, 8)]
    graph, found = torch.cuda.CUDAGraph(), []
    for tracker in trackers:
        for state in tracker.get_states().values():
            graph.register_generator_state(state)
    with torch.cuda.graph(graph):
        for tracker in trackers:
            with tracker.fork():
                found.append(torch.rand(64, device="cuda"))
                with tracker.fork():
                    found.append(torch.rand(64, device="cuda"))
        found.append(torch.rand(64, device="cuda"))
    first, second = stream("cuda", 7), stream("cuda", 8)
    expected = (first, first, second, second)
    seen = []
    for _ in range(3):
        graph.replay()
        for got, draw in zip(found, expected, strict=False):
            assert torch.equal(got, draw(64))
        seen += [t.clone() for t in found]
    assert len({tuple(t.tolist()) for t in seen}) == len(seen), "no numbers twice"
    with trackers[0].fork():  # eager code goes on where the replays are
        assert torch.equal(torch.rand(64, device="cuda"), first(64))


@requires_cuda
def test_a_graph_that_does_not_know_the_stream() -> None:
    tracker, x = tracker_of("cuda"), torch.ones(4, device="cuda")
    with pytest.raises(UnsupportedError, match="register_generator_state"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x += 1
        with tracker.fork():
            torch.rand(4, device="cuda")
    with tracker.fork():  # and eager code goes on
        drawn = drawn_in(tracker.fork, lambda n: torch.rand(n, device="cuda"), 4)
    assert drawn.isfinite().all()
