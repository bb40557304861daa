"""Offloading: no bit of a result changes, what travels are the bytes that are held, and memory is let go of.

Without a GPU on a device that is not there (tests/offload_side.py), on which copies come late and are counted.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import te_torch as te
from te_torch.tensors import Float8CurrentScalingQuantizer, HybridQuantizer, MXFP8Quantizer
from te_torch.tensors.dtype import DType
from te_torch.training import offload
from te_torch.training.offload import OffloadableLayerState, blocks, layers, weights
from tests import recipes
from tests.backends import requires_cuda
from tests.covering import covering
from tests.offload_side import RecordedSide, side
from tests.world import gradient_for
from tests.world import values as normal

__all__ = ["side"]
LEAST = 512  # elements that are offloaded at least, here
HIDDEN, TOKENS = 64, 32
LAYERS = 4


@pytest.fixture
def threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors travel, too."""
    for module in (blocks, layers, weights):
        monkeypatch.setattr(module, "THRESHOLD", LEAST)


@pytest.fixture
def small(side: RecordedSide, threshold: None) -> RecordedSide:
    """The same without a GPU."""
    return side


def transformer(device: str = "cpu", **options: Any) -> torch.nn.Module:
    return te.TransformerLayer(
        HIDDEN, 2 * HIDDEN, 2, params_dtype=torch.bfloat16, device=device, hidden_dropout=0.0, attention_dropout=0.0,
        normalization="RMSNorm", activation="swiglu", **options,
    )  # fmt: skip


class Attention(torch.nn.Module):
    """A block of torch's own, with views of one projection and strided tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, HIDDEN // 2)).permute(2, 1, 3, 0, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(torch.nn.functional.gelu(y.permute(2, 0, 1, 3).flatten(-2)))


def stack(make: Callable[[], torch.nn.Module], count: int = LAYERS) -> torch.nn.ModuleList:
    torch.manual_seed(3)
    return torch.nn.ModuleList(make() for _ in range(count))


NONE = (contextlib.nullcontext(), lambda y=None: y)


def steps(
    model: Any,
    made: Any,
    recipe: str | None = None,
    *,
    call: Callable[[Any, torch.Tensor], torch.Tensor] = lambda layer, x: layer(x),
    count: int = 2,
    x: torch.Tensor | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Outputs and gradients of some training steps."""
    torch.manual_seed(9)  # of stochastic rounding
    context, sync = made[:2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for i in range(count):
        given = normal(TOKENS, 2, HIDDEN, seed=i).to(next(model.parameters()).dtype) if x is None else x
        y = leaf = given.to(next(model.parameters()).device).detach().clone().requires_grad_()
        with recipes.region(recipe):
            for layer in model:
                with context:
                    y = call(layer, y)
                y = sync(y)
        y.backward(gradient_for(y, seed=i))
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append({"y": y.detach().clone(), "dx": leaf.grad, **grads})
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_equal(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> None:
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        assert one.keys() == other.keys()
        assert not [f"step {i}: {name}" for name in one if not torch.equal(one[name], other[name])]


FORMS = {
    "documented": {"model_layers": LAYERS},
    "weights too": {"model_layers": LAYERS, "offload_weights": True},
    "weights alone": {"model_layers": LAYERS, "offload_activations": False, "offload_weights": True},
    "layers not counted": {},
    "double": {"model_layers": LAYERS, "double_buffering": True},
    "retained": {"model_layers": LAYERS, "retain_pinned_cpu_buffers": True, "offload_weights": True},
}


def linear() -> torch.nn.Module:
    return te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cpu")


def held(recipe: str) -> Callable[[], torch.nn.Module]:
    """A layer whose weights are quantized."""

    def make() -> torch.nn.Module:
        with te.quantized_model_init(recipe=recipes.rule(recipe)):
            return linear()

    return make


def plainly(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


#: Layers, how one is called, and in which recipe.
STACKS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[..., torch.Tensor], str | None]] = {
    "TransformerLayer": (transformer, plainly, "delayed"),
    "torch's attention": (Attention, plainly, None),
    "torch's encoder": (lambda: torch.nn.TransformerEncoderLayer(HIDDEN, 2, 2 * HIDDEN, dropout=0.0), plainly, None),
    "checkpointed, reentrant": (transformer, te.checkpoint, "delayed"),
    "checkpointed": (transformer, partial(te.checkpoint, use_reentrant=False), "mxfp8"),
    "torch's checkpoint": (transformer, partial(torch_checkpoint, use_reentrant=False), None),
    "attention's core again": (transformer, lambda layer, x: layer(x, checkpoint_core_attention=True), "delayed"),
    "groups": (
        lambda: te.GroupedLinear(2, HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cpu"),
        lambda layer, x: layer(x, [TOKENS, TOKENS]),
        "mxfp8",
    ),
    **{f"held in {kind}": (held(kind), plainly, kind) for kind in recipes.KINDS},
}
TRAVELS = [(name, form) for name in STACKS for form in ("documented", "weights too") if "held" not in name]
TRAVELS += [(name, "weights too") for name in STACKS if "held" in name]
TRAVELS += [("TransformerLayer", form) for form in FORMS if form not in ("documented", "weights too")]
TRAVELS += [("checkpointed", "layers not counted")]


@pytest.mark.parametrize(("name", "form"), TRAVELS)
def test_no_bit_changes(small: RecordedSide, name: str, form: str) -> None:
    """(In each recipe: test_ways.py.)"""
    make, call, recipe = STACKS[name]
    model = stack(make)
    expected = steps(copy.deepcopy(model), NONE, recipe, call=call)
    made = te.get_cpu_offload_context(True, 2, **FORMS[form])
    assert_equal(steps(model, made, recipe, call=call), expected)
    assert small.moved("out") >= small.moved("back")
    assert small.moved("out") and (small.moved("back") or "again" in name or "checkpoint" in name)


@pytest.mark.parametrize("recipe", [None, "delayed", "nvfp4"])
def test_dropout_and_microbatches(small: RecordedSide, recipe: str | None) -> None:
    """Draws are the same; a weight quantized in the first microbatch serves the second, and does not travel with it."""
    model = stack(lambda: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, params_dtype=torch.bfloat16, device="cpu"))

    def run(model: Any, made: Any) -> list[torch.Tensor]:
        torch.manual_seed(5)
        context, sync = made[:2]
        for first in (True, False):
            y = normal(TOKENS, HIDDEN, seed=int(first)).bfloat16().requires_grad_()
            with recipes.region(recipe):
                for layer in model:
                    with context:
                        y = torch.nn.functional.dropout(layer(y, is_first_microbatch=first), 0.2)
                    y = sync(y)
            y.sum().backward()
        return [p.grad for p in model.parameters()]

    expected = run(copy.deepcopy(model), NONE)
    found = run(model, te.get_cpu_offload_context(True, 2, LAYERS))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("form", ["documented", "weights too"])
@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # what watches over weights is a hook of all modules
def test_compiled_layers(small: RecordedSide, form: str) -> None:
    model = stack(lambda: te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cpu"), 4)
    expected = steps(copy.deepcopy(model), NONE, "current")
    compiled = [torch.compile(layer, backend="aot_eager") for layer in model]
    calls = iter(compiled * 2)
    made = te.get_cpu_offload_context(True, 2, **FORMS[form])
    assert_equal(steps(model, made, "current", call=lambda layer, x: next(calls)(x)), expected)
    assert small.moved("out")
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------- what travels

#: Bytes of an element of x as backward keeps it, scales included; per-tensor scales are a few bytes more.
BYTES_OF_X = {
    None: 2.0,
    "delayed": 1.0,
    "current": 1.0,
    "block": 1 + 4 / 128,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}


@pytest.mark.parametrize("recipe", BYTES_OF_X)
def test_codes_travel(side: RecordedSide, recipe: str | None) -> None:
    """A linear keeps x as codes and scales, and as such it travels; nothing else of it does."""
    rows, width = 1024, 512
    model = stack(lambda: te.Linear(width, width, bias=False, params_dtype=torch.bfloat16, device="cpu"), 3)
    steps(model, te.get_cpu_offload_context(True, 1, 3), recipe, count=1, x=normal(rows, width).bfloat16())
    assert len(side.copied) == 2
    expected = BYTES_OF_X[recipe] * rows * width
    assert expected <= side.moved("out") <= expected + 64
    assert side.moved("back") == side.moved("out")


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_copies_of_weights_travel_with_weights(side: RecordedSide, recipe: str) -> None:
    """The quantized copy of a weight, and the weight itself, leave with offload_weights alone."""
    rows, width = 1024, 512
    model = stack(lambda: te.Linear(width, width, bias=False, params_dtype=torch.bfloat16, device="cpu"), 3)
    made = te.get_cpu_offload_context(True, 1, 3, offload_activations=False, offload_weights=True)
    steps(model, made, recipe, count=1, x=normal(rows, width).bfloat16())
    expected = (2 + BYTES_OF_X[recipe]) * width * width
    assert expected <= side.moved("out") <= expected + 64


class Saves(torch.autograd.Function):
    """Doubles, and saves what it is given besides."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        ctx.save_for_backward(*others)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        found.append(ctx.saved_tensors)
        return (2 * grad, *[None] * len(ctx.saved_tensors))


found: list[Any] = []


def there_and_back(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors as a backward reads them after they were away."""
    context, sync = te.get_cpu_offload_context(True, 1, 3)
    y = torch.ones(2, requires_grad=True)
    for i in range(3):
        with context:
            y = Saves.apply(y, *tensors) if i == 0 else 2 * y
        y = sync(y)
    found.clear()
    y.sum().backward()
    return found.pop()  # type: ignore[no-any-return]


QUANTIZERS = {
    "float8": lambda: Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cpu")),
    "mxfp8": lambda: MXFP8Quantizer(DType.kFloat8E4M3),
    "hybrid": lambda: HybridQuantizer(
        rowwise_quantizer=MXFP8Quantizer(DType.kFloat8E4M3),
        columnwise_quantizer=Float8CurrentScalingQuantizer(DType.kFloat8E5M2, torch.device("cpu")),
    ),
}


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_quantized_tensors_travel_as_they_are(small: RecordedSide, kind: str) -> None:
    t = QUANTIZERS[kind]()(normal(64, 128).bfloat16())
    names, _ = t.__tensor_flatten__()
    (back,) = there_and_back(t)
    assert type(back) is type(t)
    assert torch.equal(back.dequantize(), t.dequantize())
    for name in names:
        one, other = getattr(back, name), getattr(t, name)
        if isinstance(one, torch.Tensor) and one.numel() >= LEAST:
            assert one.data_ptr() != other.data_ptr()
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert 0 < small.moved("out") < 2.2 * t.numel()  # two copies of a byte an element


def test_views_travel_by_the_memory_they_are_of(small: RecordedSide) -> None:
    """Once, however many views there are; strides, overlaps and what lies between stay as they were."""
    base = normal(64, 96)
    views = [base, base[:, :48], base.t(), base[8:, 1::3], base.view(-1)[7:].as_strided((5, 64), (64, 1)), base[0, 0]]
    back = there_and_back(*views)
    for one, other in zip(back, views, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    assert len({t.untyped_storage().data_ptr() for t in back}) == 1
    assert back[0].data_ptr() != base.data_ptr()
    assert small.copied == [("out", 64 * 96 * 4), ("back", 64 * 96 * 4)]


def test_pieces_of_large_memory(small: RecordedSide) -> None:
    """A piece that is most of its memory travels, with what it spans alone; a small piece would free nothing."""
    base = normal(64, 128)
    (back,) = there_and_back(base[16:])
    assert torch.equal(back, base[16:])
    assert small.copied[0] == ("out", 48 * 128 * 4)
    small.copied.clear()
    (back,) = there_and_back(base[:16])
    assert back.data_ptr() == base.data_ptr()
    assert not small.copied


def test_what_stays(small: RecordedSide) -> None:
    marked, of_marked, view = (normal(32, 32, seed=i) for i in range(3))
    te.mark_not_offload(marked, of_marked, None)
    parameter = torch.nn.Parameter(normal(32, 32))
    tensors = [
        marked, of_marked.view(-1), normal(LEAST - 1), parameter, parameter.t(), torch.zeros(0, 64),
        normal(8, 128).to_sparse(), torch.empty(64, 64, device="meta"), torch.complex(view, view).conj(),
    ]  # fmt: skip
    back = there_and_back(*tensors)
    assert not small.copied
    assert all(one.shape == other.shape for one, other in zip(back, tensors, strict=True))
    assert back[0].data_ptr() == marked.data_ptr()


def test_marking_changes_nothing(small: RecordedSide) -> None:
    t = normal(32, 32)
    offload.mark_activation_offload(t, None)
    offload.start_offload(t, None, offload_base_tensor=True)
    assert torch.equal(there_and_back(t)[0], t)
    assert small.moved("out") == 32 * 32 * 4


def test_threshold(side: RecordedSide) -> None:
    there_and_back(normal(256 * 1024 - 1))
    assert not side.copied
    there_and_back(normal(256 * 1024))
    assert side.moved("out") == 4 * 256 * 1024


def test_shared_by_two_layers(small: RecordedSide) -> None:
    """What two layers save is copied once, and leaves when both have let go of it."""
    context, sync = te.get_cpu_offload_context(True, 2, 5)
    t = normal(32, 32)
    y = torch.ones(2, requires_grad=True)
    for i in range(5):
        with context:
            y = Saves.apply(y, t) if i < 2 else 2 * y
        y = sync(y)
    expected = t.clone()
    del t
    found.clear()
    y.sum().backward()
    assert [torch.equal(saved[0], expected) for saved in found] == [True, True]
    assert small.copied == [("out", 4096), ("back", 4096)]
    found.clear()


def test_shared_with_a_layer_that_stays(small: RecordedSide) -> None:
    """One layer is moved by hand; what another one saved too stays for it."""
    context, sync, controller = te.get_cpu_offload_context(True, model_layers=2, manual_synchronization=True)
    t = normal(32, 32)
    memory = StorageWeakRef(t.untyped_storage())
    y = torch.ones(2, requires_grad=True)
    for _ in range(2):
        with context:
            y = Saves.apply(y, t)
        y = sync(y)
    expected = t.clone()
    del t
    controller.start_offload_layer(0)
    controller.release_activation_forward_gpu_memory(0)
    assert not memory.expired()
    controller.start_reload_layer(0)
    found.clear()
    y.sum().backward()
    assert [torch.equal(saved[0], expected) for saved in found] == [True, True]
    found.clear()


@pytest.mark.parametrize("when", ["at once", "after the copy began", "after it left"])
@pytest.mark.parametrize("which", ["offloaded", "stays", "last layer"])
def test_changes_in_place_are_noticed(small: RecordedSide, when: str, which: str) -> None:
    """As torch notices them; after the memory was let go of nobody can reach what was saved."""
    context, sync = te.get_cpu_offload_context(True, 1, 3)
    t = normal(8 if which == "stays" else 1024)
    y = torch.ones(2, requires_grad=True)
    moments = {"at once": 0, "after the copy began": 1, "after it left": 2}
    expected = t.clone()
    for i in range(3):
        with context:
            saves = i == (2 if which == "last layer" else 0)
            y = Saves.apply(y, t) if saves else 2 * y
        y = sync(y)
        if i == moments[when]:
            t.add_(1)
    found.clear()
    if which == "offloaded" and when == "after it left":
        y.sum().backward()
        assert torch.equal(found.pop()[0], expected)
    elif which == "last layer" and when != "after it left":
        y.sum().backward()  # it was changed before it was saved
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# ------------------------------------------------------------------------------- the documentation's two examples


class Model(torch.nn.Module):
    """Twelve layers, called as one."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(transformer(device) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def around_each_layer(model: Model, x: torch.Tensor) -> torch.Tensor:
    cpu_offload_context, sync = made
    for layer in model.layers:
        with cpu_offload_context:
            x = layer(x)
        sync()
    return x


def around_all(model: Model, x: torch.Tensor) -> torch.Tensor:
    cpu_offload_context, sync = made
    with cpu_offload_context:
        x = model(x)
    sync()
    return x


made: Any = None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=requires_cuda)])
@covering(weights_too=[False, True], example=[around_each_layer, around_all])
def test_examples(
    request: pytest.FixtureRequest,
    threshold: None,
    example: Callable[..., torch.Tensor],
    weights_too: bool,
    device: str,
) -> None:
    """12 layers, model_layers left out, sync() without an argument; entered once a layer or once around all."""
    global made
    counted = None
    if device == "cpu":
        counted = request.getfixturevalue("side")
    model, x = Model(device), normal(TOKENS, 2, HIDDEN).bfloat16().to(device)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    made = te.get_cpu_offload_context(
        enabled=True, num_layers=12, offload_activations=True, offload_weights=weights_too
    )
    for _ in range(3):
        model.zero_grad()
        out = example(model, x)
        out.sum().backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
        if counted is not None:
            assert len({n for n in counted.copied}) > 1
            assert counted.moved("back")
            counted.copied.clear()


def test_names() -> None:
    for name in offload.__all__:
        assert getattr(offload, name).__doc__
    for options in ({}, {"manual_synchronization": True}):  # Megatron-core asks so whether it is inside
        context = te.get_cpu_offload_context(True, 1, 3, **options)[0]
        assert context.inside_context is False
        with contextlib.suppress(ZeroDivisionError), context:
            assert context.inside_context is True
            raise ZeroDivisionError
        assert context.inside_context is False
    assert OffloadableLayerState in vars(offload).values()
