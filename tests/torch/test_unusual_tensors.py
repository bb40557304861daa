"""Tensors that are no plain dense memory, and what is no tensor: a right result, or an error that says what came."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from te_torch.attention.rope import apply_rotary_pos_emb
from te_torch.modules.norm import L2Normalization
from tests import recipes
from tests.backends import on_devices
from tests.covering import covering

ROWS, WIDTH, HEADS = 4, 16, 2
MODULES: dict[str, Callable[[str], Any]] = {
    "Linear": lambda device: te.Linear(WIDTH, WIDTH, device=device),
    "LayerNorm": lambda device: te.LayerNorm(WIDTH, device=device),
    "RMSNorm": lambda device: te.RMSNorm(WIDTH, device=device),
    "L2Normalization": lambda device: L2Normalization(),
    "LayerNormLinear": lambda device: te.LayerNormLinear(WIDTH, WIDTH, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(WIDTH, 2 * WIDTH, device=device),
    "GroupedLinear": lambda device: Grouped(device),
    "MultiheadAttention": lambda device: te.MultiheadAttention(WIDTH, HEADS, attention_dropout=0.0, device=device),
    "TransformerLayer": lambda device: te.TransformerLayer(
        WIDTH, 2 * WIDTH, HEADS, hidden_dropout=0.0, attention_dropout=0.0, device=device
    ),
    "DotProductAttention": lambda device: Attention(),
}
LAYERS = pytest.mark.parametrize("kind", MODULES)


class Grouped(torch.nn.Module):
    """Two groups, told so."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner = te.GroupedLinear(2, WIDTH, WIDTH, device=device)

    def forward(self, x: Any) -> torch.Tensor:
        rows = x.shape[0] // 2 if isinstance(x, torch.Tensor) else 2
        return self.inner(x, [rows, rows])


class Attention(torch.nn.Module):
    """Of an input with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = te.DotProductAttention(HEADS, WIDTH // HEADS, attention_dropout=0.0)

    def forward(self, x: Any) -> torch.Tensor:
        return self.inner(x, x, x)


def shape(kind: str) -> tuple[int, ...]:
    """Of an input."""
    if kind == "DotProductAttention":
        return ROWS, 1, HEADS, WIDTH // HEADS
    return (ROWS, 1, WIDTH) if kind in ("MultiheadAttention", "TransformerLayer") else (ROWS, WIDTH)


@on_devices
@LAYERS
def test_memory_that_is_not_there_is_zeros(kind: str, device: str) -> None:
    module, x = MODULES[kind](device), torch.randn(shape(kind), device=device)
    zeros: Any = torch._efficientzerotensor
    with torch.no_grad():
        expected = module(torch.zeros_like(x))
        assert torch.equal(module(zeros(x.shape, device=device)), expected)
    x.requires_grad_()
    y = module(x)
    y.backward(zeros(y.shape, device=device))
    assert x.grad is not None and not x.grad.any()
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())


@on_devices
@LAYERS
def test_a_part_of_a_conjugate(kind: str, device: str) -> None:
    """Its sign waits, and its memory has the other one."""
    module, x = MODULES[kind](device), torch.randn(shape(kind), dtype=torch.complex64, device=device)
    turned = x.conj().imag
    assert turned.is_neg()
    with torch.no_grad():
        assert torch.equal(module(turned), module(-x.imag))


def negated(t: torch.Tensor) -> torch.Tensor:
    """The same values with torch's negative bit, in dense memory: there lie the values with the other sign."""
    made = torch._neg_view(-t)
    assert made.is_neg() and made.is_contiguous()
    return made


@on_devices
@LAYERS
@pytest.mark.parametrize("recipe", [None, "current"])
def test_a_sign_that_waits(kind: str, recipe: str | None, device: str) -> None:
    """Of an input and of a gradient, in calls that are recorded, interpreted and replayed."""
    module, x = MODULES[kind](device), torch.randn(shape(kind), device=device)
    for _ in range(3):
        found = []
        for given in (x, negated(x)):
            leaf = given.detach().requires_grad_()
            with recipes.region(recipe):
                y = module(leaf)
            dy = torch.ones_like(y) * 0.5
            y.backward(dy if given is x else negated(dy))
            found.append([y.detach(), leaf.grad, *[p.grad for p in module.parameters() if p.grad is not None]])
            module.zero_grad()
        assert len(found[0]) == len(found[1])
        for plain, turned in zip(*found, strict=True):
            assert torch.equal(plain, turned)


def test_a_sign_that_waits_elsewhere() -> None:
    """In quantizers, functions, and a compiled layer."""
    x = torch.randn(32, 64)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")
    assert torch.equal(quantizer(negated(x)).dequantize(), quantizer(x).dequantize())
    t = quantizer(x)
    t.copy_(negated(2 * x))
    assert torch.equal(t.dequantize(), quantizer(2 * x).dequantize())
    rows, scales = te.moe_permute(negated(x), torch.arange(32, dtype=torch.int32).view(32, 1) % 4, map_type="index")
    wanted, _ = te.moe_permute(x, torch.arange(32, dtype=torch.int32).view(32, 1) % 4, map_type="index")
    assert torch.equal(rows, wanted) and scales is not None
    module = te.Linear(64, 16, device="cpu")
    compiled = torch.compile(module, backend="aot_eager")
    assert torch.equal(compiled(negated(x)), module(x))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "call",
    [
        lambda z: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")(z),
        lambda z: te.Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=True)(z),
        lambda z: te.moe_permute(z, torch.zeros(32, 1, dtype=torch.int32), map_type="index"),
        lambda z: apply_rotary_pos_emb(z.view(32, 1, 4, 16), torch.zeros(32, 1, 1, 16), fused=True),
        lambda z: te.Linear(64, 64, device="cpu")(torch.randn(2, 64)).backward(z[:2]),
    ],
    ids=["quantizer", "block quantizer", "permute", "rope", "gradient"],
)
def test_complex_numbers_in_functions(call: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises((ArgumentError, UnsupportedError, RuntimeError), match="complex|Complex|ComplexFloat"):
        call(torch.randn(32, 64, dtype=torch.complex64))


@on_devices
@LAYERS
def test_batched_gradients(kind: str, device: str) -> None:
    module, x = MODULES[kind](device), torch.randn(shape(kind), device=device)
    with pytest.raises(UnsupportedError, match="vmap; is_grads_batched"):
        torch.autograd.functional.jacobian(module, x, vectorize=True)
    rows = torch.autograd.functional.jacobian(module, x)  # one gradient after another
    assert rows.isfinite().all() and rows.any()


@on_devices
@LAYERS
def test_tangents(kind: str, device: str) -> None:
    """A layer has no forward derivative, and does not drop one without a word."""
    module, x = MODULES[kind](device), torch.randn(shape(kind), device=device)
    with forward_ad.dual_level(), pytest.raises((UnsupportedError, NotImplementedError)):
        module(forward_ad.make_dual(x, x))
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(UnsupportedError, match="with a tangent"):
        module(forward_ad.make_dual(x, x))
    with forward_ad.dual_level(), torch.no_grad():
        assert module(x).isfinite().all()


# ------------------------------------------------------------- what only torch's own operators pass through


def _fake(call: Callable[[Any], Any], x: torch.Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return call(torch.empty_like(x))


def _first_microbatch(call: Callable[[Any], Any], x: torch.Tensor) -> Any:
    return _fake(lambda x: call(x, is_first_microbatch=True), x)


#: What calls a layer so that its memory would be another's, or its result a constant; and what the error says.
SURROUNDINGS: dict[str, tuple[Callable[..., Any], str]] = {
    "FakeTensorMode": (_fake, "under a FakeTensorMode"),
    "make_fx": (lambda call, x: make_fx(call)(x), "under make_fx"),
    "grad": (lambda call, x: torch.func.grad(lambda x: call(x).sum())(x), "transform of torch.func"),
    "jvp": (lambda call, x: torch.func.jvp(call, (x,), (x,)), "transform of torch.func|with a tangent"),
    "vmap": (
        lambda call, x: torch.func.vmap(call)(torch.stack([x, x])),
        "transform of torch.func|torch.func has wrapped",
    ),
    "functionalize": (lambda call, x: torch.func.functionalize(call)(x), "transform of torch.func"),
    "jit.trace": (lambda call, x: torch.jit.trace(call, (x,)), r"torch.jit.trace.*: got a .*torch.export"),
}
QUANTIZING = [kind for kind in MODULES if kind not in ("LayerNorm", "RMSNorm", "L2Normalization")]


def _in_region(module: Any, recipe: str | None, **options: Any) -> Callable[..., Any]:
    def call(x: Any, **more: Any) -> Any:
        with recipes.region(recipe) if not options else te.autocast(recipe=recipes.rule(recipe), **options):
            return module(x, **more)

    return call


def _refused_without_a_trace(kind: str, way: str, device: str, recipe: str | None, before: int, **more: Any) -> None:
    """Refused, whether calls went before or not; and then the layer does what one does that was never called so."""
    within, said = SURROUNDINGS[way] if way in SURROUNDINGS else (_first_microbatch, "under a FakeTensorMode")
    module, x = MODULES[kind](device), torch.randn(shape(kind), device=device)
    other = copy.deepcopy(module)
    call, expected = _in_region(module, recipe, **more), _in_region(other, recipe, **more)
    for _ in range(before):
        assert torch.equal(call(x), expected(x))
    with warnings.catch_warnings(), pytest.raises(UnsupportedError, match=said):
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit's own
        within(call, x)
    x.requires_grad_()
    for _ in range(2):
        y, like = call(x), expected(x)
        assert type(y) is torch.Tensor and torch.equal(y, like)
        y.sum().backward()
        like.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    buffers = dict(module.named_buffers())
    assert all(torch.equal(buffers[name], b) for name, b in other.named_buffers())


@on_devices
@covering(turns=2, kind=MODULES, way=SURROUNDINGS, before=[0, 2], recipe=["delayed", None, "current"])
def test_what_only_torchs_operators_pass_through(
    kind: str, way: str, before: int, recipe: str | None, device: str
) -> None:
    _refused_without_a_trace(kind, way, device, recipe if kind in QUANTIZING else None, before)


@pytest.mark.usefixtures("interpreted")
@on_devices
@pytest.mark.parametrize("way", SURROUNDINGS)
def test_the_same_interpreted(way: str, device: str) -> None:
    _refused_without_a_trace("LayerNormMLP", way, device, "delayed", 1)


@on_devices
@covering(
    kind=["Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"],
    before=[0, 2],
    recipe=["current", "delayed"],
)
def test_no_quantized_weight_of_a_mode_is_kept(kind: str, before: int, recipe: str, device: str) -> None:
    _refused_without_a_trace(kind, "first microbatch", device, recipe, before)


@on_devices
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_no_counters_of_a_mode_are_kept(recipe: str, device: str) -> None:
    _refused_without_a_trace("Linear", "FakeTensorMode", device, recipe, 0, check_finite=True)


class Logger(TorchDispatchMode):
    """A mode of a user's, which changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "logger": Logger,
    "flops": lambda: FlopCounterMode(display=False),
    "device": lambda: torch.device("cpu"),
}


@on_devices
@covering(kind=MODULES, mode=MODES)
def test_modes_that_look_on(kind: str, mode: str, device: str) -> None:
    module, x = MODULES[kind](device), torch.randn(shape(kind), device=device, requires_grad=True)
    other, recipe = copy.deepcopy(module), "delayed" if kind in QUANTIZING else None
    for _ in range(2):
        expected = _in_region(other, recipe)(x)
        expected.sum().backward()
        with MODES[mode]():
            y = _in_region(module, recipe)(x)
            y.sum().backward()
        assert torch.equal(y, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), other.parameters(), strict=True))


@on_devices
@covering(kind=[kind for kind in MODULES if kind != "DotProductAttention"], grad=[True, False])
def test_freed_memory_is_no_zeros(kind: str, grad: bool, device: str) -> None:
    """As FSDP frees it; a fake tensor has none either."""
    module, x = MODULES[kind](device), torch.randn(shape(kind), device=device)
    with FakeTensorMode():
        fake = torch.empty(x.shape, device=device)
    gone = x.clone()
    gone.untyped_storage().resize_(0)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            before = module(x)
        for t in (gone, fake):
            with pytest.raises(UnsupportedError, match=r"without memory|tensors with values in memory"):
                module(t)
        assert torch.equal(module(x), before)


@on_devices
@pytest.mark.parametrize("kind", ["Linear", "LayerNorm", "RMSNorm", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
def test_a_freed_parameter_is_no_zeros(kind: str, device: str) -> None:
    module, x = MODULES[kind](device), torch.randn(shape(kind), device=device)
    with torch.no_grad():
        before = module(x)
        for parameter in module.parameters():
            storage, kept = parameter.untyped_storage(), parameter.clone()
            storage.resize_(0)
            with pytest.raises(UnsupportedError, match=r"a Parameter of shape .* without memory"):
                module(x)
            storage.resize_(kept.nbytes)
            parameter.copy_(kept)
        assert torch.equal(module(x), before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
def test_other_kinds_of_tensors_are_named() -> None:
    """A class that keeps its values elsewhere has no memory either, which is nothing that FSDP did."""
    module = te.Linear(WIDTH, WIDTH, device="cpu")
    rows = [torch.randn(n, WIDTH) for n in (3, 2)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    masked = torch.masked.masked_tensor(rows[0], rows[0] > 0)
    for t in (nested, masked):
        with pytest.raises(
            UnsupportedError, match=rf"got a {type(t).__name__}\. Allowed: tensors with values in memory"
        ):
            module(t)


@on_devices
def test_what_backward_reads_was_freed(device: str) -> None:
    module, x = te.Linear(WIDTH, WIDTH, device=device), torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    y, storage, kept = module(x), module.weight.untyped_storage(), module.weight.detach().clone()
    storage.resize_(0)
    with pytest.raises(UnsupportedError, match="a Parameter .* without memory"):
        y.sum().backward()
    storage.resize_(kept.nbytes)
    module.weight.data.copy_(kept)
    y.backward(torch.ones_like(y))  # what was saved is still there
    assert torch.equal(x.grad, expected)


# ------------------------------------------------------------------------------------------------ main_grad


@on_devices
def test_main_grad_of_rows_of_a_buffer(device: str) -> None:
    module = te.Linear(WIDTH, WIDTH, bias=False, fuse_wgrad_accumulation=True, device=device)
    buffer = torch.zeros(4 * WIDTH * WIDTH, device=device)
    module.weight.main_grad = buffer[WIDTH * WIDTH : 2 * WIDTH * WIDTH].view(WIDTH, WIDTH)
    x = torch.randn(ROWS, WIDTH, device=device)
    module(x).sum().backward()
    torch.testing.assert_close(module.weight.main_grad, x.sum(0).expand(WIDTH, WIDTH))
    assert not buffer[: WIDTH * WIDTH].any() and not buffer[2 * WIDTH * WIDTH :].any()


WITH_BIAS: dict[str, Callable[[str], Any]] = {
    "Linear": lambda device: te.Linear(WIDTH, WIDTH, return_bias=True, device=device),
    "LayerNormLinear": lambda device: te.LayerNormLinear(WIDTH, WIDTH, return_bias=True, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(WIDTH, 2 * WIDTH, return_bias=True, device=device),
    "MultiheadAttention": lambda device: te.MultiheadAttention(
        WIDTH, HEADS, return_bias=True, attention_dropout=0.0, device=device
    ),
}


@pytest.mark.timeout(60, method="thread")  # where it becomes one, torch's engine goes round in a circle, in C++
@on_devices
@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.parametrize("kind", WITH_BIAS)
def test_a_returned_bias_in_a_reentrant_checkpoint(kind: str, recipe: str | None, device: str) -> None:
    """Such a checkpoint makes what is returned its own results, which a parameter must not become."""
    module, x = WITH_BIAS[kind](device), torch.randn(ROWS, 1, WIDTH, device=device, requires_grad=True)

    def gradients(call: Callable[..., Any]) -> list[torch.Tensor]:
        module.zero_grad()
        x.grad = None
        with recipes.region(recipe):
            y, bias = call(x)
        (y * 2 + bias).sum().backward()
        return [p.grad for p in (x, *module.parameters())]

    expected = gradients(module)
    again = gradients(lambda x: checkpoint(module, x, use_reentrant=True))
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    assert module(x)[1].requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_returned_biases_of_groups(reentrant: bool) -> None:
    module = te.GroupedLinear(2, WIDTH, WIDTH, return_bias=True, device="cpu")
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    y, biases = checkpoint(lambda x: module(x, [2, 2]), x, use_reentrant=reentrant)
    (y.sum() + biases[0].sum() + 2 * biases[1].sum()).backward()
    # A tensor in a list is none of a reentrant checkpoint's results: its gradient is lost there, as torch documents.
    if not reentrant:
        assert module.bias0.grad is not None and (module.bias1.grad == 2 * module.bias0.grad).all()
