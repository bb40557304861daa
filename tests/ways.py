"""Ways of running a module, and modules: tests/torch/test_ways.py asks each way for the bits of the eager run.

A way is one function (module, script, recipe) -> what was computed; a module is one row with its inputs. A new way or a
new module is one entry, and is tested with all of the others.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

import te_torch as te
from te_torch.quantized import QuantizedTorch
from tests import recipes
from tests.world import bits, randomise, values

HIDDEN, FFN, HEADS, TOKENS, BATCH = 32, 48, 2, 16, 2


# ------------------------------------------------------------------------------------------------------ modules


class Row(NamedTuple):
    """A module: how it is made, and the shapes of its inputs."""

    make: Callable[..., torch.nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((TOKENS, BATCH, HIDDEN),)
    arguments: dict[str, Any] = {}  # of every call
    microbatches: bool = True  # its forward takes is_first_microbatch
    held: bool = False  # it holds its weights quantized, where there is a recipe
    fused: bool = False  # it adds gradients of weights to their main_grad
    recipes: Iterable[str] = ()  # that it is run in besides


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


class Decoder(torch.nn.Module):
    """A layer with two inputs."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = te.TransformerLayer(
            HIDDEN, FFN, HEADS, layer_type="decoder", hidden_dropout=0.0, attention_dropout=0.0, **options
        )

    def forward(self, x: torch.Tensor, encoded: torch.Tensor, **named: Any) -> torch.Tensor:
        return self.layer(x, encoder_output=encoded, **named)


_HEADS_OF = (TOKENS, BATCH, HEADS, HIDDEN // HEADS)
_X = (TOKENS, BATCH, HIDDEN)
MODULES: dict[str, Row] = {
    "Linear": Row(partial(te.Linear, HIDDEN, FFN)),
    "Linear in parts": Row(partial(te.Linear, HIDDEN, FFN, bias=False, parameters_split=("a", "b"))),
    "LayerNormLinear": Row(partial(te.LayerNormLinear, HIDDEN, FFN, return_layernorm_output=True)),
    "LayerNormMLP": Row(partial(te.LayerNormMLP, HIDDEN, FFN, return_bias=True)),
    "LayerNormMLP gated": Row(partial(te.LayerNormMLP, HIDDEN, FFN, activation="swiglu", normalization="RMSNorm")),
    "LayerNormMLP again": Row(
        partial(te.LayerNormMLP, HIDDEN, FFN, activation="swiglu", checkpoint=True, return_layernorm_output=True)
    ),
    "LayerNormMLP fused": Row(partial(te.LayerNormMLP, HIDDEN, FFN, fuse_wgrad_accumulation=True), fused=True),
    "GroupedLinear": Row(partial(te.GroupedLinear, 3, HIDDEN, FFN), ((TOKENS, HIDDEN),), {"m_splits": [8, 0, 8]}),
    "MoELayer": Row(
        partial(
            te.MoELayer,
            HIDDEN,
            FFN,
            4,
            2,
            score_function="sigmoid",
            expert_bias=True,
            aux_loss_coeff=0.1,
            shared_ffn_hidden_size=FFN,
        )
    ),
    "LayerNorm": Row(partial(te.LayerNorm, HIDDEN), microbatches=False),
    "RMSNorm": Row(partial(te.RMSNorm, HIDDEN), microbatches=False),
    "DotProductAttention": Row(
        lambda device: te.DotProductAttention(HEADS, HIDDEN // HEADS, attention_dropout=0.0).to(device),
        (_HEADS_OF,) * 3,
        microbatches=False,
        recipes=recipes.ATTENTION,
    ),
    "MultiheadAttention": Row(
        partial(
            te.MultiheadAttention,
            HIDDEN,
            HEADS,
            attention_dropout=0.0,
            input_layernorm=True,
            qk_norm_type="RMSNorm",
            num_gqa_groups=1,
            fuse_qkv_params=True,
        )
    ),
    "TransformerLayer with dropout": Row(
        partial(te.TransformerLayer, HIDDEN, FFN, HEADS, hidden_dropout=0.1, attention_dropout=0.1)
    ),
    "TransformerLayer": Row(
        partial(te.TransformerLayer, HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0),
        recipes=recipes.ATTENTION,
    ),
    "Decoder": Row(Decoder, (_X, _X), recipes=recipes.ATTENTION),
    "Chain": Row(Chain, microbatches=False),
    "chain of te.ops": Row(
        lambda device: te.ops.Sequential(
            te.ops.RMSNorm(HIDDEN, device=device),
            te.ops.Linear(HIDDEN, 2 * FFN, device=device),
            te.ops.SwiGLU(),
            te.ops.Linear(FFN, HIDDEN, bias=False, device=device),
        ),
        microbatches=False,
    ),
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
    looks: bool = False  # before a step it evaluates frozen, without gradients, and in other modes
    sizes: bool = False  # the second step has more tokens
    lies: bool = False  # inputs and gradients lie otherwise in memory from call to call
    amp: bool = False  # torch.autocast is around forwards
    whole: bool = False  # one region is around a step, and not one around each forward
    flight: bool = False  # both forwards run before their backwards, of which the last one's is the first
    frozen: bool = False  # every third parameter is, another third in each step, and an input in the second one
    kept: bool = False  # graphs are kept, and backward runs twice
    steps: int = 3


def made(script: Script, recipe: str | None) -> torch.nn.Module:
    """Its module; all parameters differ from zero and one."""
    with te.quantized_model_init(enabled=script.row.held and recipe is not None, recipe=recipes.rule(recipe)):
        module = script.row.make(device=script.device).to(script.dtype)
    randomise(module)
    for p in module.parameters() if script.row.fused else ():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    return module


def lying(t: torch.Tensor, number: int) -> torch.Tensor:
    """The same values in other memory."""
    if t.ndim < 2:
        return t
    ways = (
        lambda: t,
        lambda: t.mT.contiguous().mT,
        lambda: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),  # one element behind a boundary
        lambda: torch.stack([t, t], -1)[..., 0],  # with gaps
        lambda: t.transpose(0, 1).contiguous().transpose(0, 1),
    )
    return ways[number % 5]()


def inputs(script: Script, number: int) -> list[torch.Tensor]:
    """Those of a microbatch; they grow, so that scales and histories have something to say."""
    more = 8 if script.sizes and number // 2 == 1 and "m_splits" not in script.row.arguments else 0
    shapes = [(tokens + more, *rest) for tokens, *rest in script.row.shapes]
    place: dict[str, Any] = {"device": script.device, "dtype": script.dtype}
    drawn = [values(*shape, seed=10 * number + i, **place) * (1 + number) for i, shape in enumerate(shapes)]
    wanted = [not (script.frozen and number // 2 == 1 and i == 0) for i in range(len(drawn))]
    return [(lying(t, number + i) if script.lies else t).requires_grad_(wanted[i]) for i, t in enumerate(drawn)]


def outputs(y: Any) -> list[torch.Tensor]:
    """All tensors of a call's result."""
    return [t for t in (y if isinstance(y, tuple) else (y,)) if t is not None]


def run(
    module: Any,
    script: Script,
    recipe: str | None,
    *,
    call: Callable[..., Any] | None = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    after: Callable[[list[torch.Tensor]], Any] = lambda given: None,
    backward: Callable[..., Any] = torch.autograd.backward,
    between: Callable[[Any], Any] = lambda module: module,
    flags: bool = False,
) -> dict[str, Any]:
    """Outputs, gradients, scaling state and weights of each step, as bytes by name.

    `call` is called in the module's place, in the context `around`, and `after` behind it. `backward` is torch's.
    After each step `between` gives the module that goes on. With `flags` calls say which microbatch is the first.
    """
    found: dict[str, Any] = {}
    for step in range(script.steps):
        called = module if call is None else call
        if script.looks:
            _look(module, called, script, recipe, step)
        for i, (_, p) in enumerate(named_parameters(module)):
            p.requires_grad_(not script.frozen or (i + step) % 3 > 0)
        torch.manual_seed(step)
        with recipes.region(recipe) if script.whole else contextlib.nullcontext():
            waiting = []
            for part in (0, 1):
                given = inputs(script, 2 * step + part)
                named = script.row.arguments | ({"is_first_microbatch": part == 0} if flags else {})
                with _forward_in(script, recipe), around():
                    y = called(*given, **named)
                after(given)
                waiting.append((f"{step}.{part}", given, y))
                if not script.flight:
                    found |= _back(*waiting.pop(), script, step, backward)
            while waiting:
                found |= _back(*waiting.pop(), script, step, backward)
        found |= bits({f"{step} gradient of {n}": local(gradient(p)) for n, p in named_parameters(module)})
        found |= bits({f"{step} {n}": t for n, t in named_buffers(module)})
        with torch.no_grad():
            for _, p in named_parameters(module):
                if gradient(p) is not None:
                    local(p).sub_(local(gradient(p)).to(p.dtype), alpha=0.01)
                p.grad = None
                if script.row.fused:
                    p.main_grad.zero_()
        module = between(module)
        # Copies: torch lets nobody resize memory that NumPy has seen, and offloading does.
        found |= bits({f"{step} weight {n}": local(p).detach().clone() for n, p in named_parameters(module)})
    return found | bits({"next random number": torch.rand(1, device=script.device)})


@contextlib.contextmanager
def _forward_in(script: Script, recipe: str | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if not script.whole:
            stack.enter_context(recipes.region(recipe))
        if script.amp:
            stack.enter_context(torch.autocast(script.device, torch.bfloat16))
        yield


def _back(
    name: str, given: list[torch.Tensor], y: Any, script: Script, step: int, backward: Callable[..., Any]
) -> dict[str, Any]:
    """What a backward adds to what a forward gave."""
    ys = [t for t in outputs(y) if t.requires_grad]
    grads = [values(*t.shape, seed=100 + step + i, device=script.device, dtype=t.dtype) for i, t in enumerate(ys)]
    if script.lies:
        grads = [lying(t, step + i) for i, t in enumerate(grads)]
    for keep in (True, False) if script.kept else (False,):
        backward(ys, grads, **({"retain_graph": True} if keep else {}))
    return bits({f"{name} y": outputs(y), f"{name} dx": [t.grad for t in given]})


def _look(module: Any, call: Any, script: Script, recipe: str | None, step: int) -> None:
    """Calls of the same sizes that want no gradients: of a frozen module, without grad mode, in evaluation mode."""
    torch.manual_seed(100 + step)
    given = [t.detach() for t in inputs(script, step)]
    for change in (lambda: module.requires_grad_(False), module.eval):
        change()
        with recipes.region(recipe), torch.no_grad():
            for _ in range(2):
                call(*given, **script.row.arguments)
        module.train().requires_grad_(True)
    with recipes.region(recipe), torch.inference_mode():
        assert all(t.is_inference() or t.is_leaf for t in outputs(call(*given, **script.row.arguments)))
    module.requires_grad_(False)
    with recipes.region(recipe):
        assert not any(t.requires_grad for t in outputs(call(*given, **script.row.arguments)))
    module.requires_grad_(True)


def gradient(p: Any) -> Any:
    """Where it went."""
    return getattr(p, "main_grad", p.grad)


def local(t: Any) -> Any:
    """This rank's part of a sharded tensor."""
    return t.to_local() if hasattr(t, "to_local") else t


def named_parameters(module: Any) -> list[tuple[str, Any]]:
    """By the names that they have without a wrapper."""
    return [(name.replace("module.", ""), p) for name, p in module.named_parameters()]


def named_buffers(module: Any) -> list[tuple[str, Any]]:
    """By the names that they have without a wrapper."""
    return [(name.replace("module.", ""), t) for name, t in module.named_buffers()]


# ------------------------------------------------------------------------------------------------------ ways


class Way(NamedTuple):
    """A way of running: `run` as the eager one. `but` has what does not give the same bits, with the reason: a module,
    a recipe, (module, recipe) or (module, dtype)."""

    run: Callable[[Any, Script, str | None], dict[str, Any]] = run
    tapes: str = "never"  # when a call of a layer is recorded
    script: dict[str, bool] = {}  # what its script has besides steps
    but: dict[Any, str] = {}
    gives: str = ""  # a prefix of the names that it gives
    often: Iterable[str] = ()  # the modules that it runs without --full; all, if none is named
    recipes: Iterable[str | None] = (None, *recipes.KINDS)  # in which it runs these

    def takes(self, name: str, recipe: str | None, dtype: str) -> bool:
        """Whether it gives the same bits of this module in this recipe and dtype."""
        return not {name, recipe, (name, recipe), (name, dtype)} & {*self.but}


def _compiled(module: Any, script: Script, recipe: str | None, programs: int = 1, **options: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    found = run(module, script, recipe, call=torch.compile(module, backend=counter, fullgraph=True), **options)
    assert counter.frame_count <= programs
    return found


class Checkpointed(torch.nn.Module):
    """A module that te.checkpoint runs."""

    def __init__(self, module: torch.nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, *given: Any, **named: Any) -> Any:
        return te.checkpoint(self.module, *given, use_reentrant=self.reentrant, **named)


def _checkpointed(
    module: Any,
    script: Script,
    recipe: str | None,
    *,
    reentrant: bool = False,
    within: Callable[..., Any] = run,
    **options: Any,
) -> dict[str, Any]:
    return within(Checkpointed(module, reentrant), script, recipe, **options)


def _others_between(module: Any, script: Script, recipe: str | None) -> dict[str, Any]:
    """Other forwards come between a checkpointed one and its backward, none of which is to be learned from."""

    def others(given: list[torch.Tensor]) -> None:
        numbers = torch.get_rng_state(), torch.cuda.get_rng_state() if script.device == "cuda" else None
        plain = [t.detach() for t in given]
        for mode, other in ((torch.no_grad, "block"), (torch.inference_mode, None)):
            module.train(mode is torch.no_grad)
            with mode(), recipes.region(other):
                module(*plain, **script.row.arguments)
        module.train()
        with recipes.region("current"):
            module(*plain, **script.row.arguments)  # whose graph is dropped
        torch.set_rng_state(numbers[0])
        if numbers[1] is not None:
            torch.cuda.set_rng_state(numbers[1])

    return _checkpointed(module, script, recipe, reentrant=True, after=others)


def _torch_checkpoint(module: Any, script: Script, recipe: str | None) -> dict[str, Any]:
    def inside(*given: Any, **named: Any) -> Any:
        with recipes.region(recipe):
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
                y, *others = outputs(module(*given, **named))
            y = sync(y)
            with context:  # a second layer, which stays
                y = y * 1
            return sync(y), *others

        found = run(module, script, recipe, call=call)
    assert side is None or side.moved("out") >= side.moved("back") > 0
    return found


def _graphed(module: Any, script: Script, recipe: str | None, flags: bool = False) -> dict[str, Any]:
    from te_torch.training.graphs import device
    from tests.fake_graphs import FakeDevice

    fake = FakeDevice(module) if script.device == "cpu" else None
    with patch.object(device, "device", fake or device.device):
        with recipes.region(recipe):  # whose `emulate` counts
            sample = tuple(t.detach().requires_grad_() for t in inputs(script, 0))
            call = te.make_graphed_callables(
                module,
                sample,
                enabled=recipe is not None,
                recipe=recipes.rule(recipe),
                sample_kwargs=dict(script.row.arguments),
                cache_quantized_params=flags,
            )
        found = run(module, script, recipe, call=call, flags=flags)
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
    with recipes.region(recipe):
        with torch.no_grad():
            module(*given, **script.row.arguments)  # an export wants scales
        call = torch.export.export(module, tuple(given), dict(script.row.arguments)).module()
    torch.manual_seed(0)
    return bits({"0.0 y": outputs(call(*given, **script.row.arguments))})


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


def _copied(module: Any, script: Script, recipe: str | None) -> dict[str, Any]:
    """After each step a copy of a copy goes on."""
    return run(module, script, recipe, between=lambda m: pickle.loads(pickle.dumps(copy.deepcopy(m))))


def _functional(module: Any, script: Script, recipe: str | None) -> dict[str, Any]:
    def call(*given: Any, **named: Any) -> Any:
        return torch.func.functional_call(module, dict(module.named_parameters()), given, named)

    return run(module, script, recipe, call=call)


def _computed_again(module: Any, script: Script, recipe: str | None) -> dict[str, Any]:
    """Backward computes anew what else is kept: a norm's output, and all that is inside of an MLP."""
    for each in module.modules():
        for name in ("checkpoint", "recompute_norm_output"):
            if hasattr(each, name):
                setattr(each, name, True)
    return run(module, script, recipe)


def _inputs_kept(module: Any, script: Script, recipe: str | None) -> dict[str, Any]:
    """Backward quantizes the caller's input anew."""
    for each in module.modules():
        if hasattr(each, "save_original_input"):
            each.save_original_input = True
    return run(module, script, recipe)


def _in_a_thread(ys: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    thread = threading.Thread(target=torch.autograd.backward, args=(ys, grads))
    thread.start()
    thread.join()


def _saved_otherwise() -> contextlib.AbstractContextManager[Any]:
    """What is saved comes back in other memory, which lies otherwise from tensor to tensor."""
    turn = itertools.count()

    def pack(t: torch.Tensor) -> torch.Tensor:
        return t if isinstance(t, QuantizedTorch) else lying(t.detach().clone(), next(turn) % 4)

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)


_ATTENTION = {"DotProductAttention": "it has no parameters"}
_FUSED = {"LayerNormMLP fused": "a parameter's gradient is waited for, or its main_grad does not come along"}
_GRAPHS: dict[Any, str] = {**_ATTENTION, "GroupedLinear": "a graph takes tensors, and m_splits are numbers"}
_GRAPHS |= {("MoELayer", kind): "its products read sizes on the host" for kind in ("f32", "mxfp8", "nvfp4")}
_RESIDUAL = dict.fromkeys(
    ("TransformerLayer", "TransformerLayer with dropout", "Decoder"),
    "a compiler sees the residual's addition by itself, which rounds once more",
)
_COMPILED: dict[Any, str] = {
    "LayerNormMLP fused": "a compiled graph refuses it",
    ("TransformerLayer with dropout", "nvfp4"): "gradients are rounded by draws, which come in the program's order",
    **{(name, dtype): why for name, why in _RESIDUAL.items() for dtype in ("bf16", "f16")},
}
_DDP = {name: "DDP writes the weights that it broadcasts, which quantizes them again" for name in HELD}
_FSDP = {(name, kind): "a shard would end within a block" for name in HELD for kind in ("block", "mxfp8")}
_FLAGS = {name: "its forward takes no is_first_microbatch" for name, row in MODULES.items() if not row.microbatches}
_DELAYED = ("delayed", *recipes.ATTENTION)
_AGAIN = {name: "it computes nothing again" for name in MODULES if "Norm" not in name and "Layer" not in name}
_KEPT = {name: "it has no such option" for name in MODULES if "Linear" not in name and name != "Chain"}
_EXPORTED = {
    **dict.fromkeys(_DELAYED, "an export wants a step before, which moves the scales"),
    "LayerNormMLP fused": "a traced module refuses it",
}
_FOUR = ("Linear in parts", "LayerNormMLP gated", "GroupedLinear", "Linear held quantized")
_SOME = ("LayerNormLinear", "LayerNormMLP again", "GroupedLinear", "DotProductAttention", "TransformerLayer", "Decoder")
_STATES = ("delayed", "nvfp4", "mxfp8")
WAYS: dict[str, Way] = {
    "replayed at once": Way(tapes="first", script={"sizes": True}),
    "replayed": Way(tapes="second", script={"lies": True}),
    "no grad and back": Way(tapes="second", script={"looks": True}),
    "replayed under autocast": Way(tapes="first", script={"amp": True}, often=_SOME),
    "replayed, kept graphs": Way(tapes="first", script={"kept": True}, often=_SOME, recipes=_STATES),
    "replayed, frozen parts": Way(tapes="first", script={"frozen": True}, often=_SOME, recipes=_STATES),
    "replayed in flight": Way(tapes="first", script={"flight": True, "whole": True}, often=_SOME, recipes=_STATES),
    "compiled": Way(_compiled, tapes="first", but=_COMPILED),
    "compiled, no grad and back": Way(
        partial(_compiled, programs=5), tapes="first", script={"looks": True}, but=_COMPILED, often=_FOUR
    ),
    "compiled under autocast": Way(
        _compiled, tapes="first", script={"amp": True}, but=_COMPILED | _RESIDUAL, often=_FOUR
    ),
    "compiled microbatches": Way(
        partial(_compiled, programs=2, flags=True),
        tapes="first",
        script={"whole": True},
        but=_COMPILED | _FLAGS,
        often=_FOUR,
        recipes=_STATES,
    ),
    "checkpointed": Way(_checkpointed, tapes="first"),
    "checkpointed, reentrant": Way(partial(_checkpointed, reentrant=True), tapes="first", script={"flight": True}),
    "checkpointed twice": Way(
        partial(_checkpointed, within=partial(_checkpointed, reentrant=True)),
        tapes="first",
        script={"flight": True},
        often=_SOME,
        recipes=("delayed",),
    ),
    "checkpointed, others between": Way(
        _others_between, tapes="first", but=dict.fromkeys(HELD, "it runs in its own recipe alone")
    ),
    "checkpointed and compiled": Way(partial(_checkpointed, within=_compiled), tapes="first", but=_COMPILED),
    "checkpointed and graphed": Way(partial(_checkpointed, within=_graphed), tapes="first", but=_GRAPHS),
    "torch's checkpoint": Way(
        _torch_checkpoint,
        tapes="first",
        but=dict.fromkeys(_DELAYED, "its region runs again in backward; te.checkpoint is for that"),
    ),
    "computed again": Way(_computed_again, tapes="second", but=_AGAIN),
    "computed again, frozen parts": Way(
        _computed_again,
        tapes="first",
        script={"frozen": True},
        but=_AGAIN,
        often=("LayerNormLinear", "LayerNormMLP", "LayerNormMLP gated", "TransformerLayer"),
        recipes=("delayed",),
    ),
    "inputs kept": Way(
        _inputs_kept,
        tapes="second",
        script={"frozen": True},
        but=_KEPT | dict.fromkeys(_DELAYED, "its scale may have moved before backward, so it is refused"),
    ),
    "offloaded": Way(_offloaded, tapes="first"),
    "graphed": Way(_graphed, tapes="first", but=_GRAPHS),
    "graphed microbatches": Way(
        partial(_graphed, flags=True),
        tapes="first",
        script={"whole": True},
        but=_GRAPHS | _FLAGS,
        often=(*_SOME, "LayerNormMLP fused"),
        recipes=_STATES,
    ),
    "DDP": Way(_ddp, tapes="first", but=_ATTENTION | _DDP | _FUSED),
    "FSDP": Way(_fsdp, tapes="first", but=_ATTENTION | _FSDP | _FUSED),
    "exported": Way(_exported, gives="0.0 y", but=_EXPORTED),
    "microbatches": Way(partial(run, flags=True), tapes="second", script={"whole": True}, but=_FLAGS),
    "backward in a thread": Way(partial(run, backward=_in_a_thread), tapes="first", often=_SOME),
    "saved on the CPU": Way(partial(run, around=torch.autograd.graph.save_on_cpu), tapes="second"),
    "saved otherwise": Way(partial(run, around=_saved_otherwise), tapes="first"),
    "resumed": Way(_resumed, tapes="second", but=_FUSED),
    "copied": Way(_copied, tapes="second", but=_FUSED),
    "functional_call": Way(_functional, tapes="second"),
}
