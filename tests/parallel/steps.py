"""What all tests over ranks share: a test that ranks run, what is said and sent, equal values, wrappers, graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature, signature
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import te_torch as te
from te_torch.exchange import ALL_GATHER, REDUCE_SCATTER
from te_torch.training.graphs import device as seam
from tests.fake_graphs import FakeDevice
from tests.parallel.ranks import Rank
from tests.recipes import rule


def by_ranks(fixture: str = "ranks", **options: Any) -> Callable[[Callable[..., None]], Any]:
    """Makes of what one rank does, and asserts, a test: the ranks of this fixture do it, with the test's parameters."""

    def of(body: Callable[..., None]) -> Any:
        names = list(signature(body).parameters)[1:]

        def test(**given: Any) -> None:
            given[fixture].run(body, *(given[name] for name in names), **options)

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        taken = [Parameter(name, Parameter.KEYWORD_ONLY) for name in (fixture, *names)]
        test.__signature__ = Signature(taken)  # type: ignore[attr-defined]
        test.__wrapped__ = test.body = body  # type: ignore[attr-defined]
        body.__qualname__ = f"{body.__name__}.body"  # where ranks find it
        return test

    return of


def error_of(action: Callable[[], Any], kind: type[BaseException] | tuple[type[BaseException], ...] = Exception) -> str:
    """The message that this ends with; empty if it does not."""
    try:
        action()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return ""


def says(text: str, *parts: str) -> None:
    """A message has these parts."""
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} not in {text!r}"


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """The collectives inside, and the bytes that this rank gives to each."""
    calls: list[tuple[str, int]] = []

    def noting(name: str, send: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[name != "all_reduce"] if args else kwargs.get("input_tensor", kwargs.get("input"))
            calls.append((name, given.numel() * given.element_size()))
            return send(*args, **kwargs)

        return call

    sending = {ALL_GATHER: "all_gather", REDUCE_SCATTER: "reduce_scatter", "all_reduce": "all_reduce"}
    with patch.multiple(dist, **{name: noting(said, getattr(dist, name)) for name, said in sending.items()}):
        yield calls


def sent_to(name: str, calls: list[tuple[str, int]]) -> list[int]:
    """The bytes that `counted` noted of one collective."""
    return [size for called, size in calls if called == name]


def same(found: Any, wanted: Any) -> bool:
    """Whether two values have the same tensors, bit for bit."""
    if isinstance(found, torch.Tensor):
        return torch.equal(found, wanted)
    if isinstance(found, dict):
        return found.keys() == wanted.keys() and all(same(value, wanted[key]) for key, value in found.items())
    if isinstance(found, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted)


def on_cpu(value: Any) -> Any:
    """A copy with all tensors on the CPU."""
    copied = lambda t: t.detach().to("cpu", copy=True) if isinstance(t, torch.Tensor) else t  # noqa: E731
    return torch.utils._pytree.tree_map(copied, value)


def everyones(value: Any) -> list[Any]:
    """This value of every rank, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, on_cpu(value))
    return found


def alike(value: Any) -> bool:
    """Whether it is the same on every rank."""
    first, *others = everyones(value)
    return all(same(other, first) for other in others)


def place_of(rank: Rank) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if rank.device == "cuda" else torch.device("cpu")


def replicated(model: Any, rank: Rank, **options: Any) -> Any:
    """In DistributedDataParallel, which warns of nothing that concerns us."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        devices = [torch.cuda.current_device()] if rank.device == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, **options)


def graphed(modules: Any, rank: Rank, sample: Any, recipe: Any, **more: Any) -> Any:
    """The modules with graphs; on the CPU with such that run their Python again."""
    before = seam.device
    if rank.device == "cpu":
        seam.device = FakeDevice(*modules) if isinstance(modules, tuple) else FakeDevice(modules)
    asked = rule(recipe) if isinstance(recipe, str) else recipe
    try:
        return te.make_graphed_callables(modules, sample, enabled=asked is not None, recipe=asked, **more)
    finally:
        if rank.device != "cpu":
            seam.device = before
