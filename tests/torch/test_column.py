"""One column, `Linear`, through every floor: what later modules take for granted, seen on the plainest of them."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import te_torch as te
from te_core import Runtime, dtypes
from te_core.layers import linear
from te_core.recipe import DelayedScaling, Float8CurrentScaling, resolve
from tests.backends import devices, requires_cuda
from tests.tolerances import DB, snr_db

RECIPES = {"bf16": None, "delayed": DelayedScaling(amax_history_len=4), "current": Float8CurrentScaling()}
recipes = pytest.mark.parametrize("recipe", RECIPES)
on_devices = pytest.mark.parametrize("device", devices())


def make(device: str, seed: int = 0, shape: tuple[int, int] = (64, 48)) -> te.Linear:
    torch.manual_seed(seed)
    return te.Linear(*shape, params_dtype=torch.bfloat16, device=device)


def batch(device: str, rows: int = 40, width: int = 64, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(device, torch.bfloat16)


def region(recipe: str) -> te.autocast:
    return te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe])


def step(module: Any, x: torch.Tensor, recipe: str | None, parameters: Any = None) -> list[torch.Tensor]:
    """[y, dx, dw, db] of one forward and backward with a fixed gradient; recipe None: in no region."""
    x = x.detach().clone().requires_grad_()
    with nullcontext() if recipe is None else region(recipe):
        y = module(x)
    dy = batch(str(x.device), y.shape[0], y.shape[1], seed=7)
    y.backward(dy)
    grads = [x.grad, *[p.grad for p in (parameters or module).parameters()]]
    for p in (parameters or module).parameters():
        p.grad = None
    return [y.detach(), *grads]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def reference(module: te.Linear, x: torch.Tensor) -> list[torch.Tensor]:
    w, b, x64 = (t.detach().double().cpu() for t in (module.weight, module.bias, x))
    dy = batch("cpu", x.shape[0], w.shape[0], seed=7).double()
    return [x64 @ w.T + b, dy @ w, dy.T @ x64, dy.sum(0)]


@on_devices
@recipes
def test_eager(recipe: str, device: str) -> None:
    module, x = make(device), batch(device)
    for _ in range(3):  # delayed scaling finds its scales
        results = step(module, x, recipe)
    floor = DB["bf16"] if recipe == "bf16" else DB["fp8 linear"]
    for name, got, wanted in zip(("y", "dx", "dw", "db"), results, reference(module, x), strict=True):
        limit = DB["bf16"] if name == "db" else floor  # the bias gradient is never quantized
        assert snr_db(got, wanted) >= limit, f"{name}: {snr_db(got, wanted):.1f} dB"
    if recipe != "bf16":  # and it is FP8, not something better: the cast's own error is there
        assert snr_db(results[0], reference(module, x)[0]) < 45


@pytest.mark.timeout(900)  # a C++ compiler among many processes
@on_devices
@pytest.mark.parametrize(
    ("backend", "recipe"),
    [
        ("aot_eager", "delayed"),
        pytest.param("inductor", "delayed", marks=pytest.mark.more),
        *(pytest.param(b, r, marks=pytest.mark.full) for b in ("aot_eager", "inductor") for r in ("bf16", "current")),
    ],
)
def test_compiled_forward_and_backward(recipe: str, device: str, backend: str) -> None:
    torch._dynamo.reset()
    eager, x = make(device), batch(device)
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, fullgraph=True, backend=backend)
    for i in range(3):
        a, b = step(eager, x * (i + 1), recipe), step(compiled, x * (i + 1), recipe, other)
        assert same(a, b)
    if recipe == "delayed":
        for name, state in eager.fp8_state.named_buffers():
            assert torch.equal(state, dict(other.fp8_state.named_buffers())[name]), name


@on_devices
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("current", marks=pytest.mark.full)])
def test_region_inside_the_compiled_function(recipe: str, device: str) -> None:
    torch._dynamo.reset()
    eager, x = make(device), batch(device)
    other = copy.deepcopy(eager)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(t: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=RECIPES[recipe]):
            return other(t)

    for i in range(3):
        with region(recipe):
            expected = eager(x * (i + 1))
        assert torch.equal(run(x * (i + 1)), expected)


@on_devices
def test_many_calls_in_a_region_compile_once(device: str) -> None:
    """A compiled module leaves its trace in the region without guarding on what ran there before."""
    torch._dynamo.reset()
    eager, x = make(device), batch(device)
    other = copy.deepcopy(eager)
    compiles = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiles.append(graph)
        return graph.forward

    compiled = torch.compile(other, fullgraph=True, backend=backend)
    for step_ in range(3):
        for module in (eager, compiled):
            with region("delayed"), torch.no_grad() if step_ == 1 else torch.enable_grad():
                outputs = [module(x * (i + 1 + step_)) for i in range(4)]
        with region("delayed"):
            assert torch.equal(eager(x), compiled(x))
        assert outputs[0].shape == (40, 48)
    assert len(compiles) <= 2  # with and without gradients
    for name, state in eager.fp8_state.named_buffers():
        assert torch.equal(state, dict(other.fp8_state.named_buffers())[name]), name


@requires_cuda
@recipes
def test_cuda_graph(recipe: str) -> None:
    eager, x = make("cuda"), batch("cuda")
    graphed = copy.deepcopy(eager)
    static = x.clone().requires_grad_()
    dy = batch("cuda", 40, 48, seed=7)

    def forward_backward() -> torch.Tensor:
        with region(recipe):
            y = graphed(static)
        y.backward(dy)
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            forward_backward()
            step(eager, x, recipe)
    torch.cuda.current_stream().wait_stream(side)
    static.grad = graphed.weight.grad = graphed.bias.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = forward_backward()
    for i in range(1, 4):
        static.data.copy_(x * i)
        static.grad.zero_(), graphed.weight.grad.zero_(), graphed.bias.grad.zero_()
        graph.replay()
        expected = step(eager, x * i, recipe)
        assert same([y, static.grad, graphed.weight.grad, graphed.bias.grad], expected)


@on_devices
@recipes
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["region outside", "region inside"])
def test_checkpoint(recipe: str, device: str, reentrant: bool, inside: bool) -> None:
    """The recomputed forward quantizes as the first did and records nothing: gradients and state are the same."""
    plain, x = make(device), batch(device)
    other = copy.deepcopy(plain)

    def segment(t: torch.Tensor) -> torch.Tensor:
        if not inside:
            return other(t)
        with region(recipe):
            return other(t)

    def checkpointed(t: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(segment, t, use_reentrant=reentrant)

    for i in range(3):
        expected = step(plain, x * (i + 1), recipe)
        got = step(checkpointed, x * (i + 1), None if inside else recipe, other)
        assert same(got, expected), i
    if recipe == "delayed":
        for name, state in plain.fp8_state.named_buffers():
            assert torch.equal(state, dict(other.fp8_state.named_buffers())[name]), name


@on_devices
@recipes
def test_saved_tensors_through_hooks(recipe: str, device: str) -> None:
    """Every tensor kept for backward passes through the hooks: moved to the CPU and back, nothing changes."""
    module, x = make(device), batch(device)
    other = copy.deepcopy(module)
    packed: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(t)
        return t.cpu().clone()

    for _ in range(2):
        expected = step(module, x, recipe)
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(device)):
            got = step(other, x, recipe)
        assert same(got, expected)
    kinds = {t.dtype for t in packed}
    assert (torch.uint8 in kinds) == (recipe != "bf16"), "FP8 operands are kept as blocks of bytes"
    full = [t for t in packed if t.shape == x.shape and t.dtype == torch.bfloat16]
    assert bool(full) == (recipe == "bf16"), "an FP8 linear keeps no bf16 copy of its input"


@on_devices
@recipes
def test_in_place_weight_change_is_noticed(recipe: str, device: str) -> None:
    module, x = make(device), batch(device).requires_grad_()
    with region(recipe):
        y = module(x)
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@on_devices
@pytest.mark.parametrize("pair", [("delayed", "current"), ("delayed", "delayed"), ("bf16", "current")])
def test_two_threads_two_streams(pair: tuple[str, str], device: str) -> None:
    """Threads in different regions do not see each other; each result is the one it has alone."""
    models = [make(device, seed) for seed in (0, 1)]
    alone = [copy.deepcopy(m) for m in models]
    x = batch(device, 256)
    expected = [[step(m, x * (i + 1), r) for i in range(20)] for m, r in zip(alone, pair, strict=True)]
    results: list[Any] = [None, None]
    start = threading.Barrier(2)

    def work(which: int) -> None:
        start.wait()
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            if stream is not None:
                stream.wait_stream(torch.cuda.default_stream())
            results[which] = [step(models[which], x * (i + 1), pair[which]) for i in range(20)]
            if stream is not None:
                stream.synchronize()

    torch.cuda.synchronize() if device == "cuda" else None
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for which in (0, 1):
        assert results[which] is not None, "the thread failed"
        assert all(same(a, b) for a, b in zip(results[which], expected[which], strict=True))


def _numpy_linear(rt: Runtime, recipe: str, x: Any, w: Any, b: Any, dy: Any) -> list[np.ndarray]:
    precision = None if RECIPES[recipe] is None else resolve(RECIPES[recipe])
    scales = None
    if precision is not None and precision.history is not None:
        from te_core.quantize import Scales

        ones, zeros = rt.tensor(np.ones(3, np.float32)), rt.tensor(np.zeros(3, np.float32))
        back = rt.tensor(np.ones(2, np.float32)), rt.tensor(np.zeros(2, np.float32))
        scales = Scales(ones, zeros, *back)
    spec = linear.LinearSpec(dtypes.bfloat16, precision, linear.Needs(True, True, True))
    (y,), saved = linear.forward(rt, x, w, b, spec=spec, scales=scales)
    return [rt.numpy(t) for t in (y, *linear.backward(rt, dy, saved, spec=spec, scales=scales))]


@on_devices
@recipes
def test_the_core_without_torch_gives_the_same(recipe: str, device: str) -> None:
    """The layer called on NumPy's (or our own device's) memory equals the module on torch's, bit for bit."""
    module, x = make(device), batch(device)
    expected = step(module, x, recipe)
    rt = Runtime.cpu() if device == "cpu" else Runtime.cuda(0)

    def core(t: torch.Tensor) -> Any:
        return rt.tensor(t.detach().cpu().view(torch.uint16).numpy().view(dtypes.bfloat16.numpy))

    results = _numpy_linear(rt, recipe, core(x), core(module.weight), core(module.bias), core(batch(device, 40, 48, 7)))
    for got, wanted in zip(results, expected, strict=True):
        assert np.array_equal(got.view(np.uint16), wanted.cpu().view(torch.uint16).numpy())


CORE_ALONE = """
import sys
sys.modules["torch"] = None  # any import of it fails
import numpy as np
from te_core import Runtime, dtypes, from_dlpack
from te_core.layers import linear
from te_core.recipe import Float8CurrentScaling, resolve
cuda = {cuda}
if cuda:
    import cupy as xp
    rt = Runtime.cuda(0, xp.cuda.get_current_stream().ptr)
else:
    xp, rt = np, Runtime.cpu()
x, w = (xp.asarray(np.random.default_rng(i).standard_normal(s, np.float32)) for i, s in enumerate([(40, 64), (48, 64)]))
spec = linear.LinearSpec(dtypes.float32, resolve(Float8CurrentScaling()), linear.Needs(True, True, False))
(y,), saved = linear.forward(rt, from_dlpack(x), from_dlpack(w), None, spec=spec)
dx, dw, _ = linear.backward(rt, y, saved, spec=spec)
out = xp.from_dlpack(y)
error = float(xp.linalg.norm(out - x @ w.T) / xp.linalg.norm(x @ w.T))
assert 0.005 < error < 0.08, error
assert "torch" not in [m for m, v in sys.modules.items() if v is not None]
print("ok", dx.shape, dw.shape)
"""


@on_devices
def test_numpy_and_cupy_programs_without_torch(device: str) -> None:
    code = CORE_ALONE.format(cuda=device == "cuda")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "ok (40, 64) (48, 64)" in done.stdout, done.stderr[-2000:]
