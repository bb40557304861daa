"""Replayed calls in what surrounds a layer: autograd, checkpoints, hooks of saved tensors, modes, compilers, threads;
and calls that are not recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import CustomRecipe
from te_core.tape import taped
from tests.backends import devices
from tests.covering import covering
from tests.recipes import region
from tests.recordings import tapes
from tests.tape_steps import HIDDEN, MODULES, ROWS, bits, drawn, made, same, step, training

on_devices = pytest.mark.parametrize("device", devices())
each_module = pytest.mark.parametrize("name", MODULES)
SOME = (None, "delayed", "block")


# ------------------------------------------------------------------------------------------------------- autograd


@on_devices
@covering(name=MODULES, recipe=SOME)
def test_a_graph_that_is_kept(name: str, recipe: str | None, device: str) -> None:
    """Backward twice over one forward, then a step that gives its memory up."""

    def program() -> Any:
        module, found = made(name, device), []
        for _ in range(2):
            x = drawn(ROWS, 2, HIDDEN, device=device).requires_grad_()
            with region(recipe):
                y = module(x)
            dy = drawn(*y.shape, device=device)
            for keep in (True, True, False):
                y.backward(dy, retain_graph=keep)
                found.append([x.grad.clone(), *[p.grad.clone() for p in module.parameters()]])
        return found

    same(program)


@covering(name=MODULES, recipe=SOME)
def test_backward_in_a_thread_of_its_own(name: str, recipe: str | None) -> None:
    def elsewhere(outputs: Any, grads: Any) -> None:
        thread = threading.Thread(target=torch.autograd.backward, args=(outputs, grads))
        thread.start()
        thread.join()

    same(lambda: training(made(name), recipe, steps=2, backward=elsewhere))


def _elsewhere(t: torch.Tensor) -> torch.Tensor:
    return t.clone()


def _crooked(t: torch.Tensor) -> torch.Tensor:
    """Beginning one element behind a boundary."""
    return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)


def _turned(t: torch.Tensor) -> torch.Tensor:
    """Its last two dimensions lie the other way round."""
    return t.mT.contiguous().mT if t.ndim > 1 else _spread(t)


def _spread(t: torch.Tensor) -> torch.Tensor:
    """With gaps between its elements."""
    step = 2
    strides = [step]
    for n in reversed(t.shape[1:]):
        strides.append(strides[-1] * n)
    room = torch.empty(step * t.numel() + 1, dtype=t.dtype, device=t.device)
    return room.as_strided(t.shape, strides[::-1][: t.ndim] if t.ndim else ()).copy_(t)


HOOKS = {"elsewhere": _elsewhere, "crooked": _crooked, "turned": _turned, "spread": _spread}


@on_devices
@covering(name=MODULES, recipe=SOME, how=HOOKS)
def test_saved_tensors_that_come_back_otherwise(name: str, recipe: str | None, how: str, device: str) -> None:
    """Backward reads what a hook returns: other memory, crooked, strided; not the same in every step."""
    # What cuDNN's attention takes on a GPU. In float32 torch's own operators would compute it, which are none of ours.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def program() -> Any:
        module, found = made(name, device, params_dtype=dtype), []
        for back in (None, HOOKS[how], None, HOOKS[how]):
            if back is None:
                found.append(step(module, drawn(ROWS, 2, HIDDEN, device=device, dtype=dtype), recipe))
            else:
                with torch.autograd.graph.saved_tensors_hooks(partial(_plain, back), lambda t: t):
                    found.append(step(module, drawn(ROWS, 2, HIDDEN, device=device, dtype=dtype), recipe))
        return found

    same(program)


def _plain(change: Callable[[torch.Tensor], torch.Tensor], t: torch.Tensor) -> torch.Tensor:
    return change(t.detach())


@on_devices
@pytest.mark.parametrize("name", ["LayerNormMLP gated", "TransformerLayer"])
def test_saved_tensors_that_wait_on_the_host(name: str, device: str) -> None:
    def program() -> Any:
        module = made(name, device)
        with torch.autograd.graph.save_on_cpu():
            return training(module, "delayed")

    same(program)


# ---------------------------------------------------------------------------------------------------------- modes


@covering(name=MODULES, recipe=SOME)
def test_without_gradients(name: str, recipe: str | None) -> None:
    """In and out of `no_grad` and `inference_mode`, training between."""

    def program() -> Any:
        module, found = made(name), []
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad, torch.enable_grad):
            with mode(), region(recipe):
                found.append(module(drawn(ROWS, 2, HIDDEN)))
            found.append(found[-1].is_inference())
        found += training(module, recipe, 2)
        module.eval()
        with torch.inference_mode(), region(recipe):
            found += [module(drawn(ROWS, 2, HIDDEN)) for _ in range(2)]
        return found

    same(program)


@each_module
def test_torch_autocast(name: str) -> None:
    def program() -> Any:
        module, found = made(name), []
        for on in (True, False, True):
            x = drawn(ROWS, 2, HIDDEN).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=on), region("current"):
                y = module(x)
            y.backward(drawn(*y.shape, dtype=y.dtype))
            found.append([y, x.grad, *[p.grad.clone() for p in module.parameters()]])
        return found

    same(program)


# -------------------------------------------------------------------------------------------------------- threads


def _at_once(*programs: Callable[[], Any]) -> list[Any]:
    """What the programs give that run in threads at once."""
    found: dict[int, Any] = {}

    def run(i: int, program: Callable[[], Any]) -> None:
        found[i] = bits(program())

    threads = [threading.Thread(target=run, args=(i, p)) for i, p in enumerate(programs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found.get(i) for i in range(len(programs))]


@covering(name=MODULES, recipe=[None, "delayed", "mxfp8"])
def test_two_threads_with_a_module_each(name: str, recipe: str | None) -> None:
    """They make and run the same tapes."""
    recipe_steps = 6
    inputs = [[drawn(ROWS, 2, HIDDEN) for _ in range(recipe_steps)] for _ in range(2)]
    modules = [made(name) if name != "TransformerLayer" else _without_dropout() for _ in range(4)]

    def program(module: Any, xs: list[torch.Tensor]) -> Any:
        found = []
        for x in xs:
            x = x.clone().requires_grad_()
            with region(recipe):
                y = module(x)
            y.backward(torch.ones_like(y))
            found.append([y, x.grad, [t.clone() for t in module.buffers()]])
        return found

    with tapes("never"):
        wanted = [bits(program(m, xs)) for m, xs in zip(modules[:2], inputs, strict=True)]
    with tapes("first") as ran:
        got = _at_once(*(partial(program, m, xs) for m, xs in zip(modules[2:], inputs, strict=True)))
    assert got == wanted and ran.replayed and not ran.interpreted


def _without_dropout() -> Any:
    module = made("TransformerLayer")
    for part in module.modules():
        for name in ("hidden_dropout", "attention_dropout"):
            if hasattr(part, name):
                setattr(part, name, 0.0)
    return module.eval()


@covering(name=["Linear", "LayerNormMLP", "TransformerLayer"], recipe=[None, "current", "block"])
def test_two_threads_with_one_module(name: str, recipe: str | None) -> None:
    module = made(name).eval()
    inputs = [[drawn(n, 2, HIDDEN) for n in (16, 32, 16, 32)] for _ in range(2)]

    def program(xs: list[torch.Tensor]) -> Any:
        with torch.no_grad():
            found = []
            for x in xs * 3:
                with region(recipe):
                    found.append(module(x))
            return found

    with tapes("never"):
        wanted = [bits(program(xs)) for xs in inputs]
    with tapes("first") as ran:
        assert _at_once(*(partial(program, xs) for xs in inputs)) == wanted
    assert ran.replayed and not ran.interpreted


# --------------------------------------------------------------------------------------- what is not recorded


class Looks:
    """An inspector that sees one GEMM's input."""

    request = frozenset({("fprop", "activation")})

    def __init__(self) -> None:
        self.seen = 0

    def inspect(self, *arguments: Any) -> Any:
        self.seen += 1
        return None


def test_an_inspector_sees_every_call() -> None:
    with tapes("first") as ran:
        module, looks = made("Linear"), Looks()
        training(module, "current", 2)
        module.inspector = looks
        training(module, "current", 3)
        assert looks.seen == 3
        module.inspector = None
        training(module, "current", 2)
    assert ran.replayed == 8 and set(ran.interpreted) == {"an inspector looks on"}


class Halves(te.Quantizer):
    """A user's own format: multiples of 1/2."""

    def __init__(self) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.calls = 0

    def quantize(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        self.calls += 1
        return (tensor * 2).round() / 2


def test_a_users_quantizer_is_called_each_time() -> None:
    mine, plain, calls = Halves(), te.IdentityQuantizer(), []
    recipe = CustomRecipe(qfactory=lambda role: mine if role is not None and role.tensor_type == "weight" else plain)
    with tapes("first") as ran:
        module = made("LayerNormLinear")
        for _ in range(3):
            with te.autocast(recipe=recipe):
                module(drawn(ROWS, HIDDEN)).sum().backward()
            calls.append(mine.calls)
    assert calls[0] and calls == [calls[0] * n for n in (1, 2, 3)]
    assert ran.replayed == 0 and dict(ran.interpreted) == {"a user's quantizer": 6}


def test_weight_gradients_that_are_computed_later() -> None:
    def program() -> Any:
        module, found = made("LayerNormMLP", delay_wgrad_compute=True), []
        for _ in range(2):
            found.append(step(module, drawn(ROWS, 2, HIDDEN), "current"))
            module.backward_dw()
            found.append([p.grad.clone() for p in module.parameters()])
        return found

    ran = same(program, "weight gradients that are computed later")
    assert ran.interpreted.total() == 2


def test_shapes_alone() -> None:
    with tapes("first") as ran:
        module = te.Linear(HIDDEN, 48, device="meta")
        module(torch.empty(ROWS, HIDDEN, device="meta")).sum().backward()
    assert not ran.replayed and set(ran.interpreted) == {taped.SHAPES} and not taped.tapes()


def test_groups() -> None:
    def program() -> Any:
        module = te.GroupedLinear(2, HIDDEN, 48, device="cpu")
        x = drawn(ROWS, HIDDEN).requires_grad_()
        y = module(x, [10, 6])
        y.sum().backward()
        return y, x.grad

    same(program, "sizes of groups that the host knows", replays=False)


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> Any:
        return training(made("LayerNormMLP"), "delayed")

    with tapes("never") as ran:
        program()
    assert (ran.replayed, ran.recorded, dict(ran.interpreted)) == (0, 0, {})
    with tapes("second") as ran:
        program()
    at_the_second = 4, 2, {"met for the first time": 2}
    assert (ran.replayed, ran.recorded, dict(ran.interpreted)) == at_the_second
    monkeypatch.delenv("TE_CORE_TAPES", raising=False)  # the suite sets it
    with tapes("never") as ran:
        taped.set_when(None)
        program()
    assert (ran.replayed, ran.recorded, dict(ran.interpreted)) == at_the_second
    with tapes("first") as ran:
        program()
    assert (ran.replayed, ran.recorded, dict(ran.interpreted)) == (6, 2, {})
