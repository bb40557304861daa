"""Replays on torch's tensors as they are (te_torch/replays.py): by what they are known, what goes the long way."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_torch as te
from te_core.backends.cuda.gemm_run import LtPlan
from te_core.errors import ArgumentError
from te_core.tape import taped
from te_core.tape.tape import Drop
from te_core.tools.explain import explain_tapes
from te_torch import replays
from te_torch.replays import Replay
from tests.backends import devices
from tests.covering import covering
from tests.null_device import null_device
from tests.recipes import region, rule
from tests.world import HIDDEN, ROWS, TAPED, bits, drawn, made, passed, same, training


class Used:
    """How often a replay was found."""

    forward = backward = 0
    frees = False  # whether the last one let go of what its caller had given up


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[Used]:
    found = Used()

    def noting(name: str) -> Any:
        real = getattr(Replay, name)

        def noted(*arguments: Any) -> Any:
            setattr(found, name, getattr(found, name) + 1)
            found.frees = any(isinstance(step, Drop) and step.given for step in arguments[0].tape.steps)
            return real(*arguments)

        return noted

    for name in ("forward", "backward"):
        monkeypatch.setattr(Replay, name, noting(name))
    before = taped.when()
    taped.forget()
    taped.set_when("first")
    yield found
    taped.set_when(before)
    taped.forget()


def steps(module: Any, count: int = 3, recipe: Any = "delayed", **options: Any) -> list[dict[str, Any]]:
    return [passed(module, drawn(ROWS, 2, HIDDEN), recipe, **options) for _ in range(count)]


@covering(name=TAPED, recipe=[None, "delayed", "current", "block"])
def test_every_layer_takes_it(used: Used, name: str, recipe: str | None) -> None:
    """From the second call on."""
    module = made(name)
    steps(module, 1, recipe)
    first = used.forward, used.backward
    steps(module, 3, recipe)
    calls = 2 if name == "TransformerLayer" else 3  # the first runs its parts, and the second is recorded as one
    assert used.forward - first[0] == used.backward - first[1] == calls


def test_an_output_is_no_view(used: Used) -> None:
    """It has the shape of its input, and may be changed in place."""
    module = made("Linear")
    for _ in range(3):
        y = module(drawn(ROWS, 2, HIDDEN).requires_grad_())
        assert y.shape == (ROWS, 2, 48) and not y._is_view()
        y.mul_(2).sum().backward()
    assert used.forward == 2


def test_a_saved_weight_that_is_changed_is_noticed(used: Used) -> None:
    module = made("Linear")
    steps(module, 3, None)
    y = module(drawn(ROWS, 2, HIDDEN).requires_grad_())
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_graph_that_is_kept(used: Used) -> None:
    """What is saved is freed on the way only where autograd frees it: a kept graph runs again, to the same bits."""
    module = made("LayerNormMLP")
    for _ in range(2):
        x = drawn(ROWS, 2, HIDDEN).requires_grad_()
        with region("current"):
            y = module(x)
        dy, found = drawn(*y.shape), []
        for keep in (True, True, False):
            found.append(bits(torch.autograd.grad(y, x, dy, retain_graph=keep)[0]))
            assert not (keep and used.frees)
        assert found[0] == found[1] == found[2]
    assert used.frees


def test_which_arguments_are_there(used: Used) -> None:
    """Two layers of one spec may be given the same shapes in other places."""

    def program() -> Any:
        found = []
        for bias in (True, False, True):
            module = te.Linear(HIDDEN, HIDDEN, bias=bias, device="cpu")
            with torch.no_grad():
                for p in module.parameters():
                    p.copy_(drawn(*p.shape))
            for grads in (True, False, True):
                x = drawn(ROWS, HIDDEN).requires_grad_(grads)
                module.weight.requires_grad_(not grads)
                y = module(x)
                if y.requires_grad:
                    y.sum().backward()
                found.append((y, x.grad, [p.grad for p in module.parameters()]))
        return found

    same(program)
    assert used.forward


@pytest.mark.parametrize(
    "change",
    [lambda x: x.mT.contiguous().mT, lambda x: torch.empty(2 * x.numel())[::2].view(x.shape).copy_(x), lambda x: x[:0]],
    ids=["turned", "spread", "empty"],
)
def test_what_is_not_plain_goes_the_long_way(used: Used, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module = made("LayerNormLinear")
    steps(module)
    before = used.forward
    x = drawn(ROWS, 2, HIDDEN)
    for _ in range(3):
        other = change(x).detach().requires_grad_()
        with region("delayed"):
            module(other).sum().backward()
        assert used.forward == before and other.grad is not None and other.grad.shape == other.shape


PARAMETERS = ["delayed", "current", "block", "mxfp8"]


def held(recipe: str, kind: Any = te.Linear, **options: Any) -> Any:
    """A module whose weights are quantized."""
    torch.manual_seed(1)
    with te.quantized_model_init(recipe=rule(recipe)):
        return kind(HIDDEN, 64, device="cpu", **options)


@covering(kind=[te.Linear, te.LayerNormMLP], recipe=PARAMETERS)
def test_quantized_weights(used: Used, kind: Any, recipe: str) -> None:
    """They change in place, gain a copy, and lie elsewhere after a load."""

    def program() -> Any:
        module = held(recipe, kind)
        found = training(module, recipe)
        for weight in module.parameters():
            if isinstance(weight, te.QuantizedTensor):
                weight.update_usage(columnwise_usage=True)
        found += training(module, recipe)
        module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
        return found + training(module, recipe)

    same(program)
    assert used.forward >= 5 and used.backward >= 5


def test_a_quantized_weight_whose_transpose_fell_behind(used: Used) -> None:
    """What is written through a view of another shape reaches the rowwise data alone."""

    def program() -> Any:
        module = held("delayed")
        module.weight.update_usage(columnwise_usage=True)
        found = steps(module)
        with torch.no_grad():
            module.weight.view(-1).copy_(torch.linspace(-1, 1, module.weight.numel()))
        return found + steps(module)

    same(program)
    assert used.forward and used.backward


def test_a_quantized_weight_that_lies_elsewhere(used: Used) -> None:
    """FSDP2 frees the memory of a gathered weight between two calls, and takes it anew for the next."""
    module = held("current", bias=False)
    shard = module.weight.detach()
    sent, metadata = shard.fsdp_pre_all_gather(None, None, None, None, None)
    came = tuple(t.clone() for t in sent)
    whole, _ = shard.fsdp_post_all_gather(came, metadata, torch.float32)
    module.weight = torch.nn.Parameter(whole)
    x, found, taken = drawn(ROWS, HIDDEN), [], []
    for _ in range(4):
        found.append(bits(step_on(module, x)))
        memory = came[0].untyped_storage()
        size = memory.nbytes()
        memory.resize_(0)
        taken.append(torch.full((size,), 0x55, dtype=torch.uint8))  # where it was, perhaps
        memory.resize_(size)
        for to, t in zip(came, sent, strict=True):
            to.copy_(t)
        whole.fsdp_post_all_gather(came, metadata, torch.float32, out=whole)
        module.weight.fsdp_post_all_gather(came, metadata, torch.float32, out=module.weight)
    assert found[1:] == found[:1] * 3 and used.forward >= 2 and used.backward >= 2


def test_a_quantized_weight_whose_buffer_was_given_other_memory(used: Used) -> None:
    """Without a word to the weight."""
    module = held("current", bias=False)
    x, found, kept = drawn(ROWS, HIDDEN), [], []
    for _ in range(4):
        found.append(bits(step_on(module, x)))
        row = module.weight._row_data
        kept.append(row.view_as(row))
        row.set_(row.clone())
        kept[-1].fill_(0x55)
    assert found[1:] == found[:1] * 3 and used.forward >= 2 and used.backward >= 2


def step_on(module: Any, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    with region("current"):
        y = module(x)
    y.backward(torch.ones_like(y))
    return y, x.grad


def test_a_quantized_activation_goes_the_long_way(used: Used) -> None:
    module = made("Linear")
    quantize = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    for _ in range(3):
        with region("current"):
            module(quantize(drawn(ROWS, HIDDEN)))
    assert not used.forward


def accumulating(name: str, device: str = "cpu", offset: int = 0) -> Any:
    """A module whose weight gradients are added to float32 ones, which lie so many elements behind a boundary."""
    module = made(name, device, fuse_wgrad_accumulation=True)
    for weight in module.parameters():
        if weight.ndim == 2:
            buffer = torch.zeros(weight.numel() + offset, device=device)
            weight.main_grad = buffer[offset:].view(weight.shape)
    return module


def sums(module: Any) -> list[Any]:
    return [getattr(weight, "main_grad", None) for weight in module.parameters()]


@covering(name=["Linear", "LayerNormMLP", "LayerNormMLP again"], recipe=[None, "delayed", "block"])
def test_gradients_that_go_elsewhere(used: Used, name: str, recipe: str | None) -> None:
    """Into `main_grad`, which is overwritten or added to, moves, and is of another type; weights are quantized once."""

    def program() -> Any:
        module, found = accumulating(name), []
        for turn in range(3):
            for micro in range(4):
                found.append(passed(module, drawn(ROWS, 2, HIDDEN), recipe, is_first_microbatch=micro == 0))
            found.append([None if t is None else t.clone() for t in sums(module)])
            for weight in module.parameters():
                if hasattr(weight, "main_grad"):
                    weight.main_grad = weight.main_grad.clone() if turn else weight.main_grad.to(torch.bfloat16)
        return found

    same(program)
    assert used.forward >= 6 and used.backward >= 6


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("recipe", "offsets"), [(None, (0, 1, 2, 64)), ("current", (0, 4, 12, 64))])
def test_gradients_that_lie_crooked(used: Used, recipe: str | None, offsets: tuple[int, ...], device: str) -> None:
    """One is added to memory on a boundary, the next to memory off it; by 16 bytes at least in FP8."""
    torch.manual_seed(0)
    x, dy = drawn(ROWS, 2, HIDDEN, device=device), drawn(ROWS, 2, 48, device=device)
    found = []
    for offset in offsets:
        torch.manual_seed(0)
        module = accumulating("Linear", device, offset)
        for _ in range(4):
            with region(recipe):
                module(x.detach().requires_grad_()).backward(dy)
        found.append(sums(module)[0])
    for other in found[1:]:  # another algorithm may add in another order
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-4)
    assert used.backward >= 8


def test_options_of_a_call(used: Used) -> None:
    """A call with another option is not the one before it, though all its tensors are alike."""
    module, q = te.DotProductAttention(2, 16, attn_mask_type="causal"), drawn(ROWS, 2, 2, 16)

    def program() -> Any:
        kinds = (None, "no_mask", "causal", "causal_bottom_right", "no_mask", None)
        return [module(q, q, q, attn_mask_type=kind) for _ in range(3) for kind in kinds]

    same(program)
    assert used.forward > 10


@pytest.mark.parametrize("kind", ["DotProductAttention", "MultiheadAttention", "TransformerLayer"])
def test_a_window_that_changes_in_place(used: Used, kind: str) -> None:
    options: dict[str, Any] = {"attention_dropout": 0.0, "device": "cpu"}
    if kind == "DotProductAttention":
        module, given = te.DotProductAttention(2, 16), [drawn(ROWS, 2, 2, 16) for _ in range(3)]
    else:
        more = (64, 2) if kind == "TransformerLayer" else (2,)
        options |= {"hidden_dropout": 0.0} if kind == "TransformerLayer" else {}
        module, given = getattr(te, kind)(HIDDEN, *more, **options), [drawn(ROWS, 2, HIDDEN)]
    window = [3, 0]
    wide = [module(*given, window_size=window) for _ in range(3)][0]
    window[0] = 1
    for _ in range(3):
        narrow = module(*given, window_size=window)
        assert torch.equal(narrow, module(*given, window_size=(1, 0))) and not torch.equal(narrow, wide)
    assert used.forward


def test_a_quantized_weight_of_another_dtype(used: Used) -> None:
    """What it stands for is part of a recording, though its bytes are not."""
    with te.quantized_model_init(recipe=rule("delayed")):
        module = te.Linear(HIDDEN, 48, params_dtype=torch.float16, device="cpu")
    x = drawn(ROWS, HIDDEN, dtype=torch.float16)
    for _ in range(3):
        with region("delayed"):
            module(x)
    assert used.forward
    module.weight.data = module.weight.data.to(torch.bfloat16)
    with region("delayed"), pytest.raises(TypeError, match="weight is torch.bfloat16"):
        module(x)


def test_parts_of_a_bias_in_two_dtypes(used: Used) -> None:
    """They are converted as in an interpreted call, each by itself: not-a-number keeps its bits, which a conversion to
    float32 and back would change."""
    module = te.Linear(HIDDEN, 32, parameters_split=("a", "b"), params_dtype=torch.bfloat16, device="cpu")
    module.b_bias.data = module.b_bias.data.to(torch.float16)

    def program() -> Any:
        found = []
        for _ in range(3):
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                y = module(drawn(ROWS, HIDDEN, dtype=torch.bfloat16))
            y.backward(torch.full_like(y, float("nan")))
            found.append([y, module.a_bias.grad, module.b_bias.grad])
        return found

    same(program)
    assert used.forward


@pytest.mark.parametrize("wrong", [drawn(ROWS, HIDDEN, dtype=torch.bfloat16), drawn(ROWS, 2 * HIDDEN)])
def test_a_wrong_input_quantizes_no_weight(wrong: torch.Tensor) -> None:
    def program() -> Any:
        module, x = te.Linear(HIDDEN, 48, device="cpu"), drawn(ROWS, HIDDEN)
        for _ in range(3):
            with region("delayed"):
                module(x, is_first_microbatch=True)
        with torch.no_grad():
            module.weight.mul_(2)
        with region("delayed"), contextlib.suppress(TypeError, ArgumentError):
            module(wrong, is_first_microbatch=True)
        return dict(module.named_buffers())

    same(program)


def test_a_parameter_that_is_gone() -> None:
    """The region knows as interpreted which state ran before the error."""

    def program() -> Any:
        module, x = te.Linear(HIDDEN, 48, device="cpu"), drawn(ROWS, HIDDEN)
        for _ in range(3):
            with region("delayed"):
                module(x)
        del module.weight
        with region("delayed"), contextlib.suppress(AttributeError):
            module(x)
        return dict(module.named_buffers())

    same(program)


def test_a_tensor_without_memory_is_refused_as_ever(used: Used) -> None:
    module = made("Linear")
    steps(module, 3, None)
    module.weight = torch.nn.Parameter(torch.empty(48, HIDDEN, device="meta"))
    with pytest.raises(ArgumentError, match="meta"):
        module(drawn(ROWS, 2, HIDDEN).requires_grad_())


def test_what_is_run_again(used: Used) -> None:
    """A checkpoint's second forward notes no maxima: they were taken before."""

    def program() -> Any:
        module = made("LayerNormMLP")
        found = []
        for _ in range(4):
            x = drawn(ROWS, 2, HIDDEN).requires_grad_()
            with region("delayed"):
                y = checkpoint(module, x, use_reentrant=False)
            y.sum().backward()
            found.append((y, x.grad, [b.clone() for b in module.buffers()]))
        return found

    same(program)
    assert used.forward >= 5


def test_more_calls_than_are_remembered(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call as many shapes are known as come again soon; tapes are made once all the same."""
    monkeypatch.setattr(replays, "_MOST", 2)
    module = te.Linear(HIDDEN, 48, device="cpu")

    def turn(*rows: int) -> int:
        before = used.forward
        for count in rows:
            passed(module, drawn(count, 2, HIDDEN), None)
        return used.forward - before

    assert (turn(3, 4, 5), turn(3, 4, 5), turn(5, 4, 5, 4), turn(3)) == (0, 0, 4, 0)
    assert taped.COUNTS.recorded and len(module._calls) == 1
    assert all(
        len(direction.known) == 2 for call in module._calls.values() for direction in (call.forward, call.backward)
    )


@pytest.mark.parametrize("name", ["LayerNormLinear", "TransformerLayer"])
def test_all_calls_are_counted(used: Used, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what the doctor and `explain_tapes` show."""
    monkeypatch.setattr(taped, "COUNTS", taped.Counts())
    steps(made(name), 4)
    calls = 2 * (5 + 3 if name == "TransformerLayer" else 4)  # the parts in the first step
    assert explain_tapes().startswith(f"{calls} of {calls} calls of layers replayed (100%)\n")


def test_the_setting_turns_it_off(used: Used) -> None:
    module = made("Linear")
    steps(module)
    before = used.forward, used.backward
    taped.set_when("never")
    steps(module)
    assert (used.forward, used.backward) == before


def test_a_state_that_is_renewed(used: Used) -> None:
    """Scales lie elsewhere after a change of the history's length, a load, a move."""

    def program() -> Any:
        module = made("Linear")
        found = [steps(module)]
        module.adjust_amax_history_length(3)
        found.append(steps(module))
        module.load_state_dict({k: v.clone() if torch.is_tensor(v) else v for k, v in module.state_dict().items()})
        found.append(steps(module))
        module.to(torch.float32)
        found.append(steps(module))
        return found

    same(program)
    assert used.forward and used.backward


def test_autotuning_is_in_the_key(used: Used, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay follows it as any call does: from the next one on, and back."""
    with null_device(tmp_path):
        module, x = te.Linear(HIDDEN, HIDDEN, device="cpu"), drawn(ROWS, 2, HIDDEN)

        def recorded() -> tuple[int, list[bool]]:
            """How many recordings there are more, and whether the products of the youngest were timed."""
            before = taped.COUNTS.recorded
            y = module(x)
            y.backward(torch.ones_like(y))
            plans = [plan for tape in taped.tapes()[-2:] for plan in tape.keeps if isinstance(plan, LtPlan)]
            return taped.COUNTS.recorded - before, ["timing" in plan.source for plan in plans]

        assert [recorded()[0] for _ in range(2)] == [2, 0]
        monkeypatch.setenv("TE_CORE_AUTOTUNE", "1")
        assert [recorded() for _ in range(2)] == [(2, [True] * 2), (0, [True] * 2)]
        monkeypatch.delenv("TE_CORE_AUTOTUNE")
        assert recorded()[0] == 0 and used.forward == used.backward == 3


def test_aliases_are_known_as_such() -> None:
    """One tensor that is given twice makes no replay of two tensors, nor the reverse."""
    a, b, longer = (torch.randn(rows, 4) for rows in (2, 2, 3))
    twice, apart = replays.alike([a, b, a]), replays.alike([a, b])
    assert twice(b, a, b) and not twice(a, b, b) and not twice(a, b, longer)
    assert apart(b, a) and not apart(a, a) and not apart(a, longer)
