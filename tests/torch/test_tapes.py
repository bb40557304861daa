"""What a layer's replayed calls give whatever happens between two of them, on several threads, and what is not recorded
and why. (Ways of running: test_ways.py. Memory and tapes themselves: test_tapes_memory.py.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import CustomRecipe, DelayedScaling
from te_core.tape import taped
from tests.backends import on_devices
from tests.covering import covering
from tests.recipes import KINDS, RECIPES, region
from tests.recordings import tapes
from tests.threads import together
from tests.world import HIDDEN, ROWS, TAPED, TAPED_GEMMS, bits, drawn, made, passed, same, training

# ----------------------------------------------------------------------------------- between two calls


def test_only_the_second_result_is_used() -> None:
    def program() -> Any:
        module = made("LayerNormLinear", return_layernorm_output=True)
        x = drawn(ROWS, HIDDEN).requires_grad_()
        found = []
        for which in (0, 1, 0, 1):
            module(x)[which].square().sum().backward()
            found.append([p.grad if p.grad is None else p.grad.clone() for p in (x, *module.parameters())])
        return found

    same(program)


@pytest.mark.parametrize("recipe", KINDS)
def test_a_quantized_weight_gains_and_loses_a_copy(recipe: str) -> None:
    def program() -> Any:
        with te.quantized_model_init(recipe=RECIPES[recipe]):
            module = te.Linear(HIDDEN, 48, device="cpu")
        found = [passed(module, drawn(ROWS, HIDDEN), recipe)]
        for has in (False,) if recipe == "mxfp8" else (False, True, False, True):  # mxfp8 cannot make one of the other
            module.weight.update_usage(rowwise_usage=True, columnwise_usage=has)
            found.append(passed(module, drawn(ROWS, HIDDEN), recipe))
        return found

    same(program)


@covering(name=TAPED_GEMMS, recipe=[None, "delayed", "block"])
def test_weights_in_other_places(name: str, recipe: str | None) -> None:
    """Parameters and state that are exchanged, converted and loaded between steps."""

    def program() -> Any:
        module, other, found = made(name), made(name), []
        training(other, recipe, 1)
        found.append(training(module, recipe, 2))
        module.load_state_dict(other.state_dict(), assign=True)
        found.append(training(module, recipe, 2))
        module.to(torch.bfloat16)
        found += [passed(module, drawn(ROWS, HIDDEN, dtype=torch.bfloat16), recipe) for _ in range(2)]
        module.to(torch.float32)
        found.append(training(module, recipe, 2))
        with torch.no_grad():
            for p in module.parameters():
                p.data = p.data.clone()  # other memory
        found.append(training(module, recipe, 2))
        return found

    same(program)


def test_another_history() -> None:
    def program() -> Any:
        module = made("LayerNormMLP")
        rules = [
            DelayedScaling(amax_history_len=n, amax_compute_algo=a) for n in (4, 2, 7) for a in ("max", "most_recent")
        ]
        return [training_in(module, rule) for rule in (*rules, rules[0])]

    def training_in(module: Any, rule: Any) -> Any:
        found = []
        for _ in range(2):
            x = drawn(ROWS, HIDDEN).requires_grad_()
            with te.autocast(recipe=rule):
                y = module(x)
            y.square().sum().backward()
            found.append([y, x.grad, [t.clone() for t in module.buffers()]])
        return found

    same(program)


FORMATS = ("bshd", "sbhd", "thd")
MASKS = {
    "causal": {"attn_mask_type": "causal"},
    "no_mask": {"attn_mask_type": "no_mask"},
    "window": {"attn_mask_type": "causal", "window_size": (3, 0)},
    "padding": {"attn_mask_type": "padding_causal"},
}


@on_devices
@covering(turns=2, mask=MASKS, form=FORMATS, dropout=[0.0, 0.2])
def test_attention(mask: str, form: str, dropout: float, device: str) -> None:
    """Apart and packed; lengths of packed sequences are values."""

    def program() -> Any:
        options = dict(MASKS[mask], attention_dropout=dropout, qkv_format=form)
        if form == "thd":
            options["attn_mask_type"] = {"causal": "padding_causal", "no_mask": "padding"}.get(mask, "padding_causal")
        module = te.DotProductAttention(2, 16, num_gqa_groups=1, **options)
        module.train()
        found = []
        for lengths in ([8, 8], [5, 11], [8, 8], [16, 0]):
            shape = {"bshd": (2, 16), "sbhd": (16, 2), "thd": (16,)}[form]
            q, k, v = (drawn(*shape, n, 16, device=device, dtype=torch.bfloat16).requires_grad_() for n in (2, 1, 1))
            call: dict[str, Any] = {}
            if form == "thd" or mask == "padding":
                cu = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device)
                call = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 16, "max_seqlen_kv": 16}
            y = module(q, k, v, **call)
            y.backward(drawn(*y.shape, device=device, dtype=torch.bfloat16))
            found.append([y, q.grad, k.grad, v.grad])
        return found

    same(program)


# ----------------------------------------------------------------------------------- threads


@covering(name=TAPED, recipe=[None, "delayed", "mxfp8"])
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
        wanted = [program(m, xs) for m, xs in zip(modules[:2], inputs, strict=True)]
    with tapes("first") as ran:
        got = together(*(partial(program, m, xs) for m, xs in zip(modules[2:], inputs, strict=True)))
    assert bits(got) == bits(wanted) and ran.replayed and not ran.interpreted


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
        wanted = [program(xs) for xs in inputs]
    with tapes("first") as ran:
        assert bits(together(*(partial(program, xs) for xs in inputs))) == bits(wanted)
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
            found.append(passed(module, drawn(ROWS, 2, HIDDEN), "current"))
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


@pytest.mark.parametrize("name", [None, "current", "mxfp8"])
def test_groups(name: str | None) -> None:
    def program() -> Any:
        module = te.GroupedLinear(2, HIDDEN, 48, device="cpu")
        x = drawn(ROWS, HIDDEN).requires_grad_()
        with region(name):
            y = module(x, [10, 6])
        y.sum().backward()
        return y, x.grad

    on_host = name == "mxfp8"
    same(program, *["sizes of groups that the host knows"] * on_host, replays=not on_host)


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
