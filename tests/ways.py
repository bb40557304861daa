"""Ways of running a module, and modules: tests/torch/test_ways.py asks each way for the bits of the eager run.

A way is one function (module, script, recipe) -> what was computed; a module is one row with its inputs. A new way or a
new module is one entry, and is tested with all of the others.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

import te_torch as te
from tests.module_steps import randomise, values
from tests.recipes import region, rule
from tests.tape_steps import bits

HIDDEN, FFN, HEADS, TOKENS, BATCH = 32, 48, 2, 16, 2


# ------------------------------------------------------------------------------------------------------ modules


class Row(NamedTuple):
    """A module: how it is made, and the shapes of its inputs."""

    make: Callable[..., torch.nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((TOKENS, BATCH, HIDDEN),)
    arguments: dict[str, Any] = {}  # of every call
    microbatches: bool = True  # its forward takes is_first_microbatch
    held: bool = False  # it holds its weights quantized, where there is a recipe


class Chain(torch.nn.Module):
    """A user's block: modules of torch between ours, and a residual."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = te.RMSNorm(HIDDEN, **options)
        self.qkv = te.Linear(HIDDEN, 2 * HIDDEN, bias=False, **options)
        self.proj = te.Linear(HIDDEN, HIDDEN, **options)
        self.mlp = te.LayerNormMLP(HIDDEN, FFN, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.qkv(self.norm(x)).chunk(2, -1)
        y = x + self.proj(torch.nn.functional.silu(a) * b)
        return y + self.mlp(y)


_HEADS_OF = (TOKENS, BATCH, HEADS, HIDDEN // HEADS)
MODULES: dict[str, Row] = {
    "Linear": Row(partial(te.Linear, HIDDEN, FFN)),
    "Linear without bias": Row(partial(te.Linear, HIDDEN, FFN, bias=False)),
    "LayerNormLinear": Row(partial(te.LayerNormLinear, HIDDEN, FFN)),
    "LayerNormMLP": Row(partial(te.LayerNormMLP, HIDDEN, FFN)),
    "LayerNormMLP gated": Row(partial(te.LayerNormMLP, HIDDEN, FFN, activation="swiglu", normalization="RMSNorm")),
    "LayerNormMLP again": Row(partial(te.LayerNormMLP, HIDDEN, FFN, activation="swiglu", checkpoint=True)),
    "GroupedLinear": Row(partial(te.GroupedLinear, 3, HIDDEN, FFN), ((TOKENS, HIDDEN),), {"m_splits": [8, 0, 8]}),
    "LayerNorm": Row(partial(te.LayerNorm, HIDDEN), microbatches=False),
    "RMSNorm": Row(partial(te.RMSNorm, HIDDEN), microbatches=False),
    "DotProductAttention": Row(
        lambda device: te.DotProductAttention(HEADS, HIDDEN // HEADS).to(device), (_HEADS_OF,) * 3, microbatches=False
    ),
    "MultiheadAttention": Row(partial(te.MultiheadAttention, HIDDEN, HEADS, attention_dropout=0.0)),
    "TransformerLayer with dropout": Row(
        partial(te.TransformerLayer, HIDDEN, FFN, HEADS, hidden_dropout=0.1, attention_dropout=0.1)
    ),
    "TransformerLayer": Row(
        partial(te.TransformerLayer, HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0)
    ),
    "Chain": Row(Chain, microbatches=False),
    "Linear held quantized": Row(partial(te.Linear, HIDDEN, FFN), held=True),
    "LayerNormMLP held quantized": Row(partial(te.LayerNormMLP, HIDDEN, FFN), held=True),
}


HELD = [name for name, row in MODULES.items() if row.held]


# ------------------------------------------------------------------------------------------------------ the eager run


class Script(NamedTuple):
    """What a run does: steps of two microbatches each, whose gradients are added up."""

    row: Row
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    looks: bool = False  # before a step it evaluates frozen, without gradients, and in another mode
    sizes: bool = False  # the second step has more tokens
    steps: int = 3


def made(script: Script, recipe: str | None) -> torch.nn.Module:
    """Its module; all parameters differ from zero and one."""
    with te.quantized_model_init(enabled=script.row.held and recipe is not None, recipe=rule(recipe)):
        module = script.row.make(device=script.device).to(script.dtype)
    randomise(module)
    return module


def inputs(script: Script, number: int) -> list[torch.Tensor]:
    """Those of a microbatch; they grow, so that scales and histories have something to say."""
    more = 8 if script.sizes and number // 2 == 1 and "m_splits" not in script.row.arguments else 0
    shapes = [(tokens + more, *rest) for tokens, *rest in script.row.shapes]
    place: dict[str, Any] = {"device": script.device, "dtype": script.dtype}
    drawn = [values(*shape, seed=10 * number + i, **place) for i, shape in enumerate(shapes)]
    return [(t * (1 + number)).requires_grad_() for t in drawn]


def run(
    module: Any,
    script: Script,
    recipe: str | None,
    *,
    call: Callable[..., Any] | None = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    between: Callable[[Any], Any] = lambda module: module,
    flags: bool = False,
) -> dict[str, Any]:
    """Outputs, gradients, scaling state and weights of each step, as bytes by name.

    `call` is called in the module's place, in the context `around`. After each step `between` gives the module that
    goes on. With `flags` calls say which microbatch is the first.
    """
    found: dict[str, Any] = {}
    for step in range(script.steps):
        called = module if call is None else call
        if script.looks:
            _look(module, called, script, recipe, step)
        torch.manual_seed(step)
        for part in (0, 1):
            given = inputs(script, 2 * step + part)
            named = script.row.arguments | ({"is_first_microbatch": part == 0} if flags else {})
            with region(recipe), around():
                y = called(*given, **named)
            y.backward(values(*y.shape, seed=100 + step, device=script.device, dtype=y.dtype))
            found |= bits({f"{step}.{part} y": y, f"{step}.{part} dx": [t.grad for t in given]})
        found |= bits({f"{step} gradient of {n}": local(p.grad) for n, p in named_parameters(module)})
        found |= bits({f"{step} {n}": t for n, t in named_buffers(module)})
        with torch.no_grad():
            for _, p in named_parameters(module):
                if p.grad is not None:
                    local(p).sub_(local(p.grad), alpha=0.01)
                p.grad = None
        module = between(module)
        # Copies: torch lets nobody resize memory that NumPy has seen, and offloading does.
        found |= bits({f"{step} weight {n}": local(p).detach().clone() for n, p in named_parameters(module)})
    return found | bits({"next random number": torch.rand(1, device=script.device)})


def _look(module: Any, call: Any, script: Script, recipe: str | None, step: int) -> None:
    """Calls of the same sizes that want no gradients: of a frozen module, without grad mode, in evaluation mode."""
    torch.manual_seed(100 + step)
    given = [t.detach() for t in inputs(script, step)]
    for change in (lambda: module.requires_grad_(False), module.eval):
        change()
        with region(recipe), torch.no_grad():
            for _ in range(2):
                call(*given, **script.row.arguments)
        module.train().requires_grad_(True)
    module.requires_grad_(False)
    with region(recipe):
        assert not call(*given, **script.row.arguments).requires_grad
    module.requires_grad_(True)


def local(t: Any) -> Any:
    """This rank's part of a sharded tensor."""
    return t.to_local() if hasattr(t, "to_local") else t


def named_parameters(module: Any) -> list[tuple[str, Any]]:
    """By the names that they have without a wrapper."""
    return [(name.removeprefix("module."), p) for name, p in module.named_parameters()]


def named_buffers(module: Any) -> list[tuple[str, Any]]:
    """By the names that they have without a wrapper."""
    return [(name.removeprefix("module."), t) for name, t in module.named_buffers()]


# ------------------------------------------------------------------------------------------------------ ways


class Way(NamedTuple):
    """A way of running: `run` as the eager one. `but` has what does not give the same bits, with the reason: a module,
    a recipe, (module, recipe) or (module, dtype)."""

    run: Callable[[Any, Script, str | None], dict[str, Any]] = run
    tapes: str = "never"  # when a call of a layer is recorded
    looks: bool = False  # what its script has beside steps
    sizes: bool = False
    but: dict[Any, str] = {}
    gives: str = ""  # a prefix of the names that it gives

    def takes(self, name: str, recipe: str | None, dtype: str) -> bool:
        """Whether it gives the same bits of this module in this recipe and dtype."""
        return not {name, recipe, (name, recipe), (name, dtype)} & {*self.but}


def _compiled(module: Any, script: Script, recipe: str | None) -> dict[str, Any]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    found = run(module, script, recipe, call=torch.compile(module, backend=counter, fullgraph=True))
    assert counter.frame_count == 1
    return found


class Checkpointed(torch.nn.Module):
    """A module that te.checkpoint runs."""

    def __init__(self, module: torch.nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, *given: Any, **named: Any) -> Any:
        return te.checkpoint(self.module, *given, use_reentrant=self.reentrant, **named)


def _checkpointed(
    module: Any, script: Script, recipe: str | None, *, reentrant: bool = False, within: Callable[..., Any] = run
) -> dict[str, Any]:
    return within(Checkpointed(module, reentrant), script, recipe)


def _torch_checkpoint(module: Any, script: Script, recipe: str | None) -> dict[str, Any]:
    def inside(*given: Any, **named: Any) -> Any:
        with region(recipe):
            return module(*given, **named)

    call = partial(torch.utils.checkpoint.checkpoint, inside, use_reentrant=False)
    return run(module, script, None, call=call)


def _offloaded(module: Any, script: Script, recipe: str | None) -> dict[str, Any]:
    from te_torch.training.offload import blocks, device, layers, weights
    from tests.offload_side import RecordedSide

    side = RecordedSide() if script.device == "cpu" else None
    with contextlib.ExitStack() as stack:
        if side:
            stack.enter_context(patch.object(device, "side_of", lambda where, stream=None: side))
        for each in (blocks, layers, weights):  # small tensors travel, too
            stack.enter_context(patch.object(each, "THRESHOLD", 64))
        context, sync = te.get_cpu_offload_context(True, 1, model_layers=2, offload_weights=True)

        def call(*given: Any, **named: Any) -> Any:
            with context:
                y = module(*given, **named)
            y = sync(y)
            with context:  # a second layer, which stays
                y = y * 1
            return sync(y)

        found = run(module, script, recipe, call=call)
    assert side is None or side.moved("out") >= side.moved("back") > 0
    return found


def _graphed(module: Any, script: Script, recipe: str | None) -> dict[str, Any]:
    from te_torch.training.graphs import device
    from tests.fake_graphs import FakeDevice

    fake = FakeDevice(module) if script.device == "cpu" else None
    with patch.object(device, "device", fake or device.device):
        with region(recipe):  # whose `emulate` counts
            sample = tuple(t.detach().requires_grad_() for t in inputs(script, 0))
            call = te.make_graphed_callables(
                module,
                sample,
                enabled=recipe is not None,
                recipe=rule(recipe),
                sample_kwargs=dict(script.row.arguments),
            )
        found = run(module, script, recipe, call=call)
    assert fake is None or fake.graphs and all(graph.replays for graph in fake.graphs)
    return found


@contextlib.contextmanager
def _one_rank(device: str) -> Iterator[None]:
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _ddp(module: Any, script: Script, recipe: str | None) -> dict[str, Any]:
    with _one_rank(script.device):
        return run(module, script, recipe, call=DistributedDataParallel(module))


def _fsdp(module: Any, script: Script, recipe: str | None) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    with _one_rank(script.device):
        return run(fully_shard(module), script, recipe)


def _exported(module: Any, script: Script, recipe: str | None) -> dict[str, Any]:
    given = [t.detach() for t in inputs(script, 0)]
    with region(recipe):
        with torch.no_grad():
            module(*given, **script.row.arguments)  # an export wants scales
        call = torch.export.export(module, tuple(given), dict(script.row.arguments)).module()
    torch.manual_seed(0)
    return bits({"0.0 y": call(*given, **script.row.arguments)})


def _resumed(module: Any, script: Script, recipe: str | None) -> dict[str, Any]:
    """After each step the state goes through a file into a module that has never run, which goes on."""
    never_run = copy.deepcopy(module)

    def between(trained: Any) -> Any:
        file = io.BytesIO()
        torch.save(trained.state_dict(), file)
        file.seek(0)
        new = copy.deepcopy(never_run)
        new.load_state_dict(torch.load(file, weights_only=False))
        return new

    return run(module, script, recipe, between=between)


def _functional(module: Any, script: Script, recipe: str | None) -> dict[str, Any]:
    def call(*given: Any, **named: Any) -> Any:
        return torch.func.functional_call(module, dict(module.named_parameters()), given, named)

    return run(module, script, recipe, call=call)


_ATTENTION = {"DotProductAttention": "it has no parameters"}
_GRAPHS = _ATTENTION | {"GroupedLinear": "a graph takes tensors, and m_splits are numbers"}
_COMPILED = {
    ("TransformerLayer with dropout", "nvfp4"): "gradients are rounded by draws, which come in the program's order"
} | {
    (name, dtype): "a compiler sees the residual's addition by itself, which rounds once more"
    for name in ("TransformerLayer", "TransformerLayer with dropout")
    for dtype in ("bf16", "f16")
}
_DDP = {name: "DDP writes the weights that it broadcasts, which quantizes them again" for name in HELD}
_FSDP = {(name, "block"): "a shard would end within a tile" for name in HELD}
WAYS: dict[str, Way] = {
    "replayed at once": Way(tapes="first", sizes=True),
    "replayed": Way(tapes="second"),
    "no grad and back": Way(tapes="second", looks=True),
    "compiled": Way(_compiled, tapes="first", but=_COMPILED),
    "checkpointed": Way(_checkpointed, tapes="first"),
    "checkpointed, reentrant": Way(partial(_checkpointed, reentrant=True), tapes="first"),
    "checkpointed and compiled": Way(partial(_checkpointed, within=_compiled), tapes="first", but=_COMPILED),
    "checkpointed and graphed": Way(partial(_checkpointed, within=_graphed), tapes="first", but=_GRAPHS),
    "torch's checkpoint": Way(
        _torch_checkpoint,
        tapes="first",
        but={"delayed": "its region runs again in backward; te.checkpoint is for that"},
    ),
    "offloaded": Way(_offloaded, tapes="first"),
    "graphed": Way(_graphed, tapes="first", but=_GRAPHS),
    "DDP": Way(_ddp, tapes="first", but=_ATTENTION | _DDP),
    "FSDP": Way(_fsdp, tapes="first", but=_ATTENTION | _FSDP),
    "exported": Way(_exported, gives="0.0 y", but={"delayed": "an export wants a step before, which moves the scales"}),
    "microbatches": Way(
        partial(run, flags=True),
        tapes="second",
        but={"delayed": "a weight's copy keeps the scale of the first microbatch"}
        | {name: "its forward takes no is_first_microbatch" for name, row in MODULES.items() if not row.microbatches},
    ),
    "saved on the CPU": Way(partial(run, around=torch.autograd.graph.save_on_cpu), tapes="second"),
    "resumed": Way(_resumed, tapes="second"),
    "functional_call": Way(_functional, tapes="second"),
}
