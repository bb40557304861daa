"""Weights that travel: the parameter stays, its memory leaves and returns, and whoever calls for it finds it there."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_torch as te
from tests import recipes
from tests.offload_side import RecordedSide, side
from tests.torch.test_offload import HIDDEN, LAYERS, NONE, TOKENS, assert_equal, small, stack, steps, threshold
from tests.world import values as normal

__all__ = ["side", "small", "threshold"]


def away(model: torch.nn.Module) -> list[str]:
    with torch._C.DisableTorchFunctionSubclass():
        return [name for name, p in model.named_parameters() if not p.untyped_storage().nbytes()]


@pytest.fixture(autouse=True, scope="module")
def _no_hooks_of_modules_stay() -> Iterator[None]:
    """For the whole file: garbage is collected before it is known, 0.1 s each time."""
    yield
    gc.collect()
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.fixture
def linears(small: RecordedSide) -> tuple[torch.nn.ModuleList, Any, list[torch.Tensor]]:
    """Four linears, a context that moves the weights of two, and the weights' values."""
    model = stack(lambda: torch.nn.Linear(HIDDEN, HIDDEN, bias=False))
    made = te.get_cpu_offload_context(True, 2, LAYERS, offload_weights=True)
    return model, made, [p.detach().clone() for p in model.parameters()]


def forward(model: Any, made: Any) -> torch.Tensor:
    y = normal(TOKENS, HIDDEN).to(next(model.parameters()).dtype).requires_grad_()
    for layer in model:
        with made[0]:
            y = layer(y)
        y = made[1](y)
    return y


def test_weights_leave_and_return(linears: Any) -> None:
    model, made, before = linears
    identities = [id(p) for p in model.parameters()]
    views = [p.data for p in model.parameters()]
    y = forward(model, made)
    assert away(model) == ["0.weight", "1.weight"]
    y.sum().backward()
    assert not away(model)
    assert [id(p) for p in model.parameters()] == identities
    for p, view, old in zip(model.parameters(), views, before, strict=True):
        assert torch.equal(p, old)
        assert torch.equal(view, old)
        assert view.data_ptr() == p.data_ptr()
        assert p._version == 1  # as it was made


def test_all_weights_are_back_after_part_of_a_backward(linears: Any) -> None:
    model, made, before = linears
    y = forward(model, made)
    last = [*model.parameters()][-1]
    torch.autograd.grad(y.sum(), last)
    assert not away(model)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_weights_are_back_before_an_optimizer_steps(linears: Any) -> None:
    model, made, before = linears
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    y = forward(model, made)
    assert away(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(torch.equal(p, old - 1) for p, old in zip(model.parameters(), before, strict=True))
    del y


def test_modules_called_while_their_weights_are_away(linears: Any) -> None:
    model, made, _ = linears
    x = normal(4, HIDDEN)
    expected = model[1](x)
    y = forward(model, made)
    assert away(model) == ["0.weight", "1.weight"]
    with torch.no_grad():
        assert torch.equal(model[1](x), expected)
    assert away(model) == ["0.weight"]
    y.sum().backward()
    assert not away(model)


def test_two_passes_with_weights(linears: Any) -> None:
    model, made, before = linears
    y, z = forward(model, made), forward(model, made)
    (y + z).sum().backward()
    again = copy.deepcopy(model)
    again.zero_grad()
    a, b = forward(again, NONE), forward(again, NONE)
    (a + b).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_error_in_forward_brings_weights_back(linears: Any) -> None:
    model, made, before = linears
    y = normal(TOKENS, HIDDEN)
    for i, layer in enumerate(model):
        with contextlib.suppress(ZeroDivisionError), made[0]:
            y = layer(y)
            if i == 3:
                assert away(model)
                raise ZeroDivisionError
        if i < 3:
            y = made[1](y)
    assert not away(model)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_one_weight_in_two_layers(small: RecordedSide) -> None:
    model = stack(lambda: torch.nn.Linear(HIDDEN, HIDDEN, bias=False), 5)
    model[1].weight = model[4].weight = model[0].weight
    expected = steps(copy.deepcopy(model), NONE)
    assert_equal(steps(model, te.get_cpu_offload_context(True, 3, 5, offload_weights=True)), expected)


def microbatch(model: Any, made: Any, kind: str, first: bool) -> list[torch.Tensor]:
    """Output and gradient; what layers leave free meanwhile is taken, so that nothing comes back to its place."""
    taken = []
    y = x = normal(TOKENS, HIDDEN).to(torch.bfloat16).requires_grad_()
    with recipes.region(kind):
        for layer in model:
            with made[0]:
                y = layer(y, is_first_microbatch=first)
            y = made[1](y)
            taken.append(torch.empty(HIDDEN * HIDDEN * 2, dtype=torch.uint8))
    y.sum().backward()
    return [y.detach(), x.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_a_copy_for_several_microbatches_is_of_the_weight_that_returns(small: RecordedSide, kind: str) -> None:
    """In other memory than before, with the same values: the copy of the first microbatch, by the scale of then."""
    model = stack(lambda: te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cpu"))
    made = te.get_cpu_offload_context(True, 2, LAYERS, offload_weights=True)
    plain = copy.deepcopy(model)
    for first in (True, False, False):
        for a, b in zip(microbatch(plain, NONE, kind, first), microbatch(model, made, kind, first), strict=True):
            assert torch.equal(a, b)
    assert small.moved("back")


def test_weights_that_are_pieces_stay(small: RecordedSide) -> None:
    """And those beside them travel. One warning says so."""
    model = stack(lambda: torch.nn.Linear(HIDDEN, HIDDEN, bias=False))
    for layer, piece in zip((model[0], model[3]), normal(2, HIDDEN, HIDDEN), strict=True):
        layer.weight = torch.nn.Parameter(piece)
    expected = forward(copy.deepcopy(model), NONE).detach()
    with pytest.warns(UserWarning, match="stay on the device: weights that are pieces of one buffer") as said:
        y = forward(model, te.get_cpu_offload_context(True, 2, LAYERS, offload_weights=True))
    assert len(said) == 1 and said[0].filename == __file__
    assert away(model) == ["1.weight"] and torch.equal(y, expected)
    y.sum().backward()
    assert not away(model) and all(p.grad is not None for p in model.parameters())


def test_weights_in_a_capture_stay(linears: Any, small: RecordedSide) -> None:
    model, made, _ = linears
    small.in_capture = True
    with pytest.warns(UserWarning, match="stay on the device: weights in a capture of a CUDA graph"):
        forward(model, made)
    assert not away(model)


def test_weights_of_a_dropped_pass(linears: Any) -> None:
    """Nobody ran the backward: the next pass finds its weights."""
    model, made, before = linears
    y = forward(model, made)
    del y
    y = forward(model, made)
    y.sum().backward()
    assert not away(model)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


# ------------------------------------------------------------------------- read while they are away, by anybody

READS: dict[str, Any] = {
    "state_dict": lambda model: model.state_dict()["1.weight"],
    "saved": lambda model: through_a_file(model.state_dict())["1.weight"],
    "saved as a module": lambda model: through_a_file(model)[1].weight,
    "deepcopy": lambda model: copy.deepcopy(model)[1].weight,
    "printed": lambda model: parsed(repr(model[1].weight)),
    "product": lambda model: torch.eye(HIDDEN) @ model[1].weight,
    "view": lambda model: model[1].weight.t().t(),
    "data": lambda model: model[1].weight.data,
    "slice": lambda model: model[1].weight[:],
    "numpy": lambda model: torch.from_numpy(model[1].weight.detach().numpy()),
    "in a list": lambda model: torch.stack([model[1].weight])[0],
    "foreach": lambda model: torch._foreach_mul([model[1].weight], 1.0)[0],
    "functional": lambda model: torch.nn.functional.linear(torch.eye(HIDDEN), model[1].weight).t(),
    "storage": lambda model: torch.empty(0).set_(model[1].weight.untyped_storage()).view(HIDDEN, HIDDEN),
    "address": lambda model: (model[1].weight.data_ptr(), model[1].weight.data)[1],
    "functional_call": lambda model: torch.func.functional_call(
        model[1], dict(model[1].named_parameters()), torch.eye(HIDDEN)
    ).t(),
}


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def parsed(text: str) -> torch.Tensor:
    assert text.startswith("Parameter containing:"), text
    return eval(text.removeprefix("Parameter containing:"), {"tensor": torch.tensor})  # type: ignore[no-any-return]


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_a_weight_has_it_back(linears: Any, read: str) -> None:
    """Right values, nothing else comes back that was not read, and the gradients are those of a plain step."""
    model, made, before = linears
    torch.set_printoptions(threshold=10**6, precision=9)
    try:
        y = forward(model, made)
        assert away(model) == ["0.weight", "1.weight"]
        found = READS[read](model)
    finally:
        torch.set_printoptions(profile="default")
    assert torch.equal(found.detach(), before[1])
    whole = read in ("state_dict", "saved", "saved as a module", "deepcopy")
    assert away(model) == ([] if whole else ["0.weight"])
    assert type(model[1].weight) is torch.nn.Parameter and set(vars(model[1].weight)) == set()
    if isinstance(found, torch.nn.Parameter):
        assert type(found) is torch.nn.Parameter
    y.sum().backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    forward(twin, NONE).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_looks_leave_a_weight_away(linears: Any) -> None:
    """Sizes, gradients and hooks are no reads."""
    model, made, _ = linears
    y = forward(model, made)
    p = model[0].weight
    assert isinstance(p, torch.nn.Parameter) and p.shape == (HIDDEN, HIDDEN) and p.numel() == p.nbytes // 4
    assert p.dtype == torch.float32 and p.device.type == "cpu" and p.is_leaf and p.requires_grad and p.grad is None
    assert p.dim() == 2 and p.stride() == (HIDDEN, 1) and p._version == 1 and len(p) == HIDDEN and p in {p}
    seen: list[torch.Tensor] = []
    p.register_post_accumulate_grad_hook(lambda p: seen.append(p.detach().clone()))
    model.zero_grad()
    torch.optim.SGD(model.parameters(), lr=1.0)
    sum(q.numel() for q in model.parameters() if q.requires_grad)
    assert away(model) == ["0.weight", "1.weight"]
    y.sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], p.detach())


def test_a_weight_that_is_written_while_it_is_away(linears: Any) -> None:
    """It is back before; backward then says, as ever, that what it needs has changed."""
    model, made, before = linears
    y = forward(model, made)
    model.load_state_dict({name: p + 1 for name, p in zip(model.state_dict(), before, strict=True)})
    assert all(torch.equal(p, old + 1) for p, old in zip(model.parameters(), before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_conversion_while_weights_are_away(linears: Any) -> None:
    model, made, before = linears
    forward(model, made)
    model.double()
    assert not away(model)
    assert all(torch.equal(p, old.double()) for p, old in zip(model.parameters(), before, strict=True))
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compiled_functions_have_weights_back(linears: Any) -> None:
    model, made, before = linears
    x = normal(4, HIDDEN)
    scaled = torch.compile(lambda p: 2 * p, backend="aot_eager")
    applied = torch.compile(lambda x: model[0](x), backend="aot_eager")
    for _ in range(2):
        y = forward(model, made)
        assert away(model) == ["0.weight", "1.weight"]
        assert torch.equal(scaled(model[1].weight), 2 * before[1])
        assert torch.equal(applied(x), x @ before[0].t())
        y.sum().backward()
        assert torch.equal(scaled(model[0].weight), 2 * before[0]) and torch.equal(applied(x), x @ before[0].t())
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["delayed", "mxfp8"])
def test_quantized_weights_are_read_while_they_are_away(small: RecordedSide, kind: str) -> None:
    with te.quantized_model_init(enabled=True, recipe=recipes.rule(kind)):
        model = stack(lambda: te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cpu"))
    made = te.get_cpu_offload_context(True, 2, LAYERS, offload_weights=True)
    before = [layer.weight.dequantize() for layer in model]
    twin = copy.deepcopy(model)

    def run(model: Any, made: Any) -> torch.Tensor:
        with recipes.region(kind):
            return forward(model, made)

    run(model, made)
    small.copied.clear()
    for layer, old in zip(model, before, strict=True):
        assert torch.equal(layer.weight.dequantize(), old)
    assert small.moved("back") >= 2 * HIDDEN * HIDDEN, "two of them were away"
    y = run(model, made)
    state = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in model.state_dict().items()}
    for i, old in enumerate(before):
        assert torch.equal(state[f"{i}.weight"].dequantize(), old)
    assert torch.equal(copy.deepcopy(model)[0].weight.dequantize(), before[0])
    y.sum().backward()
    run(twin, NONE)
    run(twin, NONE).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_reads_in_a_capture_are_refused(linears: Any, small: RecordedSide) -> None:
    model, made, _ = linears
    y = forward(model, made)
    small.in_capture = True
    with pytest.raises(RuntimeError, match="a read of a weight that is away in a capture.*when all weights are here"):
        model[0].weight + 1
    small.in_capture = False
    y.sum().backward()
    assert not away(model)
