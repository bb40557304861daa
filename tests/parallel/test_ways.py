"""Every way of running a module whose weights or batches are spread over ranks gives the bits of the plain run over the
same ranks: outputs, gradients, scaling state, weights. What a way has of its own is tested in its file; the ways of one
process are in tests/torch/test_ways.py."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import te_torch as te
from te_core.tape import taped
from te_torch.training import fsdp
from tests.backends import cuda_devices
from tests.covering import covering
from tests.parallel.debug_sessions import Session
from tests.parallel.ranks import Rank
from tests.parallel.steps import by_ranks, counted, graphed, on_cpu, place_of, replicated, same
from tests.parallel.tensor_steps import spread, tensors
from tests.recipes import KINDS, region
from tests.tolerances import snr_db
from tests.world import fp8_state, randomise, values

STEPS, WIDTH, LAYERS = 3, 128, 3
OPERANDS = ["activation", "weight", "gradient"]
TENSORS = [*OPERANDS, "output", "dgrad", "wgrad"]
VALUES = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"]


# ---------------------------------------------------------------------------------------- modules, and steps of them


class Spread(NamedTuple):
    """A module over ranks: how it is made, and what its call takes in a step, with an output's gradient."""

    make: Callable[..., Any]
    given: Callable[[Rank, str, int, int], tuple[torch.Tensor, torch.Tensor]]


def in_parts(rank: Rank, kind: str, **more: Any) -> Any:
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    kind, sequence = kind.removesuffix(" whole rows"), not kind.endswith(" whole rows")
    return spread(kind, rank, sequence, **more)


def parts(rank: Rank, kind: str, number: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tensors(kind.removesuffix(" whole rows"), rank, not kind.endswith(" whole rows"), number, rows)


def stack(rank: Rank) -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[te.LayerNormMLP(WIDTH, WIDTH, device=rank.device) for _ in range(LAYERS)])
    randomise(model)
    return model


def in_ddp(rank: Rank, kind: str, change: Callable[[Any], Any] = lambda model: model) -> Any:
    return replicated(change(stack(rank)), rank)


def in_fsdp2(rank: Rank, kind: str, change: Callable[[Any], Any] = lambda model: model, kept: bool = False) -> Any:
    mesh, model = init_device_mesh(rank.device, (rank.world,)), change(stack(rank))
    for part in (*model, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=not kept)
    return model


def in_fsdp1(rank: Rank, kind: str, wrap: Any = FullyShardedDataParallel) -> Any:
    return wrap(stack(rank), use_orig_params=True, device_id=place_of(rank))


def own_rows(rank: Rank, kind: str, number: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, dy = (values(rows, WIDTH, seed=100 * rank.number + 10 * number + i, device=rank.device) for i in range(2))
    return x * (1 + number), dy


SPREADS = {
    "tensor": Spread(in_parts, parts),
    "DDP": Spread(in_ddp, own_rows),
    "FSDP1": Spread(in_fsdp1, own_rows),
    "FSDP2": Spread(in_fsdp2, own_rows),
}


class Case(NamedTuple):
    """What is run, and in how many rows of a sequence."""

    rank: Rank
    spread: Spread
    kind: str
    recipe: str | None
    rows: int


def run(
    case: Case, module: Any = None, call: Any = None, *, first: bool = False, after: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """What steps of two microbatches give, and what they send; `after` each backward something is done."""
    module = case.spread.make(case.rank, case.kind) if module is None else module
    call, found = module if call is None else call, {}
    for number in range(STEPS):
        torch.manual_seed(number)
        with counted() as calls:
            for part in range(2):
                x, dy = case.spread.given(case.rank, case.kind, 2 * number + part, case.rows)
                with region(case.recipe):
                    y = call(x.requires_grad_(), **({"is_first_microbatch": part == 0} if first else {}))
                y.backward(dy)
                after()
                found[f"{number}.{part}"] = on_cpu((y, x.grad))
        found[f"sent {number}"] = sorted(calls)
        grads = [p.main_grad.to(p.dtype) if hasattr(p, "main_grad") else p.grad for p in module.parameters()]
        found[f"gradients {number}"] = on_cpu([local(g) for g in grads])
        with torch.no_grad():
            for p, g in zip(module.parameters(), grads, strict=True):
                if g is not None:
                    local(p).sub_(local(g), alpha=1e-4)
                p.grad = None
                if hasattr(p, "main_grad"):
                    p.main_grad.zero_()
        found[f"state {number}"] = on_cpu(list(fp8_state(module).values()))
        found[f"weights {number}"] = on_cpu([local(p) for p in module.parameters()])
    return found


def local(t: Any) -> Any:
    return t.to_local() if hasattr(t, "to_local") else t


# ------------------------------------------------------------------------------------------------------ ways


def later(case: Case) -> dict[str, Any]:
    module = in_parts(case.rank, case.kind, delay_wgrad_compute=True)
    return run(case, module, after=module.backward_dw)


def into_main_grad(case: Case) -> dict[str, Any]:
    module = in_parts(case.rank, case.kind, fuse_wgrad_accumulation=True)
    for name in module._weight_names():
        weight = getattr(module, name)
        weight.main_grad = torch.zeros(weight.shape, device=case.rank.device, dtype=weight.dtype)
    return run(case, module)


def checkpointed(case: Case) -> dict[str, Any]:
    module = case.spread.make(case.rank, case.kind)
    return run(case, module, lambda x: te.checkpoint(module, x))


def original(case: Case) -> dict[str, Any]:
    return run(case, in_parts(case.rank, case.kind, save_original_input=True))


def norm_again(case: Case) -> dict[str, Any]:
    module = in_parts(case.rank, case.kind)
    module.recompute_norm_output = True
    return run(case, module)


class Looks:
    """Changes nothing."""

    request = frozenset((("fprop", "activation"), ("wgrad", "gradient"), ("wgrad", "activation"), ("dgrad", "dgrad")))

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], set[int]] = {}

    def inspect(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any, out: Any) -> None:
        self.seen.setdefault((gemm, tensor), set()).add(value.shape[0])


def looked_at(case: Case) -> dict[str, Any]:
    module = in_parts(case.rank, case.kind)
    module.inspector = Looks()
    found = run(case, module)
    part, whole, seen = {case.rows}, {2 * case.rows}, module.inspector.seen  # of two tokens each
    x, dy = {"row": (whole, part), "gated": (part | whole, part | whole)}.get(case.kind, (part, whole))
    assert seen["fprop", "activation"] == seen["wgrad", "activation"] == x and seen["wgrad", "gradient"] == dy
    return found


def inspected(case: Case) -> dict[str, Any]:
    module = in_parts(case.rank, case.kind)
    with te.debug.inspect(module):
        return run(case, module)


def debugged(case: Case, **features: Any) -> dict[str, Any]:
    module = case.spread.make(case.rank, case.kind)
    for number, part in enumerate(module.modules()):
        part.name = f"layer_{number}"
    chosen = {name: keys for name, keys in features.items() if case.recipe != "nvfp4" or "Fp8" not in name}
    with Session(chosen) as session:
        found = run(case, module, after=session.step)
    assert bool(session.seen) == ("LogTensorStats" in features)
    return found


def replayed_graphs(case: Case, first: bool = False, **more: Any) -> dict[str, Any]:
    module = case.spread.make(case.rank, case.kind, **more)
    owner = getattr(module, "module", module)
    sample = (case.spread.given(case.rank, case.kind, 0, case.rows)[0].requires_grad_(),)
    call = graphed(owner, case.rank, sample, case.recipe, cache_quantized_params=first)
    found = run(case, module, call, first=first, after=call.backward_dw if more else lambda: None)
    call.reset()
    if (
        case.rank.device == "cuda"
    ):  # the graphs have the collectives, but for what regions and backwards reduce in the end
        assert len(found["sent 0"]) == len(found["sent 1"]) == (4 if case.recipe == "delayed" else 0)
    return found


def graphs_in_ddp(case: Case) -> dict[str, Any]:
    sample = (own_rows(case.rank, case.kind, 0, case.rows)[0].requires_grad_(),)
    return run(case, in_ddp(case.rank, case.kind, lambda model: graphed(model, case.rank, sample, case.recipe)))


def as_nodes(case: Case, one: bool) -> dict[str, Any]:
    """A layer as one node, or as one of each of its parts."""
    module = in_parts(case.rank, case.kind)
    module.one_node = one
    found = run(case, module)
    planned = any(type(plan).__name__ == "GraphPlan" for plan in module._plans)
    assert planned is (one and taped.when() != "never")
    return found


def compiled(case: Case, wrap: Any, one_by_one: bool = False) -> dict[str, Any]:
    """Before it is wrapped: one program, and no graph breaks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counter = CompileCounterWithBackend("aot_eager")

    def change(model: Any) -> Any:
        if not one_by_one:
            return torch.compile(model, fullgraph=True, backend=counter)
        return torch.nn.Sequential(*[torch.compile(m, fullgraph=True, backend=counter) for m in model])

    found = run(case, wrap(case.rank, case.kind, change))
    assert counter.frame_count == 1 and not torch._dynamo.utils.counters["graph_break"]
    return found


def wrapper_compiled(case: Case) -> dict[str, Any]:
    torch._dynamo.reset()
    module = case.spread.make(case.rank, case.kind)
    return run(case, module, torch.compile(module, backend="aot_eager"))


def kept_gathered(case: Case) -> dict[str, Any]:
    return run(case, in_fsdp2(case.rank, case.kind, kept=True))


def prepared(case: Case, again: bool = False) -> dict[str, Any]:
    """The copies that backward reads are spread over the ranks."""
    module = in_fsdp1(case.rank, case.kind, fsdp.FullyShardedDataParallel)
    return run(case, module, partial(te.checkpoint, module) if again else None)


class Way(NamedTuple):
    """A way, of modules that are spread so; `sends` as much as the plain run, and no more."""

    spread: str
    run: Callable[[Case], dict[str, Any]]
    kinds: tuple[str, ...]
    recipes: tuple[str | None, ...]
    sends: bool = True
    near: float = math.inf  # dB, where not all bits are equal
    rows: int = 128
    plain: Callable[[Case], dict[str, Any]] = run
    heavy: bool = False  # without a GPU for `make test-more`
    some: int = 9  # cases without --full, at most


ALL_KINDS = ("column", "row", "norm column", "gated", "layer")
DATA = {"kinds": ("model",), "recipes": ("delayed", "current", None)}
STATISTICS = {
    "LogTensorStats": {"stats": VALUES, "tensors": TENSORS},
    "LogFp8TensorStats": {"stats": ["underflows%"], "tensors": OPERANDS},
}
FILES = {"DumpTensors": {"high_precision_tensor": True, "quantized_tensor": True, "tensors": TENSORS}}
WAYS = {
    "weight gradients later": Way("tensor", later, ("column", "row", "gated"), (None, "current", "mxfp8")),
    "main_grad": Way("tensor", into_main_grad, ("column", "row", "gated"), ("current", "mxfp8", None), near=35.0),
    "checkpoint": Way("tensor", checkpointed, ("column", "row", "gated"), ("mxfp8", None, "current"), sends=False),
    "original input": Way("tensor", original, ("column", "row"), ("current", "mxfp8"), sends=False),
    "norm again": Way("tensor", norm_again, ("norm column", "gated"), (None, "current"), sends=False),
    "microbatches": Way("tensor", partial(run, first=True), ("gated",), ("current", "block", "mxfp8"), some=1),
    "inspector": Way("tensor", looked_at, ALL_KINDS[:4], (None, *KINDS), some=4),
    "inspect": Way("tensor", inspected, ALL_KINDS, (None, *KINDS), some=3),
    "inspect odd rows": Way("tensor", inspected, ALL_KINDS, (*KINDS, None), rows=20, some=2),
    "statistics": Way("tensor", partial(debugged, **STATISTICS), ALL_KINDS, (*KINDS[1:], None, "delayed"), some=2),
    "files": Way("tensor", partial(debugged, **FILES), ALL_KINDS, (*KINDS[2:], None), some=2),
    "graphs": Way(
        "tensor", replayed_graphs, ("column", "row", "gated layer", "gated layer whole rows", "mlp again"),
        ("delayed", "current", "block", None), rows=256,
    ),
    "graphs, weight gradients later": Way(
        "tensor", partial(replayed_graphs, delay_wgrad_compute=True), ("gated", "column", "row"), ("current",), some=1,
    ),
    "graphs, microbatches": Way(
        "tensor", partial(replayed_graphs, first=True), ("gated",), ("delayed", "current"), some=1,
        plain=partial(run, first=True),
    ),
    "part by part": Way(
        "tensor", partial(as_nodes, one=False), ("layer", "layer whole rows"), (None, "delayed", "current"),
        plain=partial(as_nodes, one=True),
    ),
    "compiled, then DDP": Way("DDP", partial(compiled, wrap=in_ddp), **DATA, heavy=True, some=1),
    "compiled one by one, then DDP": Way(
        "DDP", partial(compiled, wrap=in_ddp, one_by_one=True), **DATA, heavy=True, some=1,
    ),
    "graphs in DDP": Way("DDP", graphs_in_ddp, **DATA, some=1),
    "statistics in DDP": Way("DDP", partial(debugged, **STATISTICS), **DATA, sends=False, some=1),
    "compiled, then FSDP2": Way("FSDP2", partial(compiled, wrap=in_fsdp2, one_by_one=True), **DATA, heavy=True, some=1),
    "FSDP2 gathers once": Way("FSDP2", kept_gathered, **DATA, sends=False, some=2),
    "FSDP1 spreads copies": Way("FSDP1", prepared, **DATA, sends=False),
    "FSDP1 spreads copies, checkpoint": Way(
        "FSDP1", partial(prepared, again=True), **DATA, sends=False, plain=checkpointed, some=1
    ),
    "FSDP1, then compiled": Way("FSDP1", wrapper_compiled, ("model",), (None,), heavy=True),
}  # fmt: skip


#: Whose products a GPU's library may compute by another algorithm.
OTHER_PRODUCTS = {"weight gradients later", "checkpoint", "original input", "norm again"}


def cases() -> list[Any]:
    """Each way with its modules and recipes side by side; all of their product by --full."""
    found = []
    for name, way in WAYS.items():
        some = way.some
        for case in covering(kind=way.kinds, recipe=way.recipes).args[1]:
            shown = not case.marks and some > 0
            some -= shown
            marks = [pytest.mark.more] * (way.heavy and not cuda_devices()) if shown else [pytest.mark.full]
            if name.startswith(("statistics", "files")):
                marks.append(pytest.mark.skipif(not find_spec("nvdlfw_inspect"), reason="the extra `debug` brings it"))
            found.append(pytest.param(name, *case.values, marks=marks))
    return found


@pytest.mark.parametrize(("way", "kind", "recipe"), cases())
@by_ranks("two")
def test_bits_of_the_plain_run(rank: Rank, way: str, kind: str, recipe: str | None) -> None:
    chosen = WAYS[way]
    case = Case(rank, SPREADS[chosen.spread], kind, recipe, chosen.rows)
    wanted, found = chosen.plain(case), chosen.run(case)
    wrong = [name for name in wanted if not same(found[name], wanted[name])]
    if not chosen.sends or (rank.device == "cuda" and "graphs" in way):
        wrong = [name for name in wrong if not name.startswith("sent")]
    near = 45.0 if rank.device == "cuda" and way in OTHER_PRODUCTS else chosen.near
    if near < math.inf:
        pairs = [pair for name in wrong for pair in zip(found[name], wanted[name], strict=True)]
        wrong = [f"{snr_db(a, b):.1f} dB" for a, b in pairs if snr_db(a, b) < near]
    assert not wrong, wrong
