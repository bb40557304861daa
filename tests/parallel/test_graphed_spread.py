"""make_graphed_callables over modules whose weights are spread over ranks: chunks of a pipeline, and what a capture
needs and refuses. (A replay is an eager step of the same ranks: test_ways.py.)"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from te_torch.parallel import communicator
from te_torch.parallel import symmetric as symmetric_memory
from te_torch.parallel.communicator import GroupCommunicator
from te_torch.parallel.symmetric import symmetric_buffer
from tests.backends import requires_gpus
from tests.covering import covering
from tests.graph_steps import PIPELINES, Pipeline
from tests.parallel.ranks import Rank
from tests.parallel.steps import by_ranks, error_of, graphed, same, says
from tests.parallel.tensor_steps import options, spread, tensors
from tests.recipes import region, rule

ROWS = 256  # of which two ranks have whole blocks


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("interleaved", "delayed"),
        *(
            pytest.param(*c, marks=pytest.mark.full)
            for c in (("1F1B", "delayed"), ("1F1B", "current"), ("interleaved", "current"))
        ),
    ],
)
@by_ranks("two")
def test_chunks_of_a_pipeline(rank: Rank, name: str, recipe: str) -> None:
    """Chunks over the same ranks, in a schedule (stages on ranks of their own: test_pipelining.py)."""
    chunks, layers, order = PIPELINES[name]
    modules = [spread("gated", rank) for _ in range(sum(chunks))]
    with torch.no_grad():
        for i, module in enumerate(modules):
            module.fc2_weight.mul_(1 + i)
    twins = copy.deepcopy(modules)
    number: Callable[[int], torch.Tensor] = lambda i: tensors("gated", rank, True, i % 7, ROWS)[0]  # noqa: E731
    sample = tuple((number(0).requires_grad_(),) for _ in range(sum(chunks) * order.count(1)))
    functions = graphed(tuple(modules), rank, sample, recipe, _order=order, _num_layers_per_chunk=layers)
    replayed, eager = (Pipeline(m, chunks, order, rule(recipe), number) for m in (modules, twins))
    for _ in range(2):
        assert same(replayed.run(functions), eager.run(None))
    for function in functions:
        function.reset()


# ------------------------------------------------------------------------------- what a capture needs, and refuses


class Open(communicator.Work):
    """A collective that is counted until it is waited for."""

    count = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        Open.count += 1

    def wait(self) -> None:
        Open.count -= 1
        super().wait()


@covering(kind=["column", "row", "norm column", "gated", "mlp again", "layer"], recipe=["current", None, "mxfp8"])
@by_ranks("pair")
def test_what_a_pass_begins_it_waits_for(rank: Rank, kind: str, recipe: str | None) -> None:
    """A capture cannot end with work on another stream that nothing has joined; nor may a rank of an eager program: not
    at the end of a forward, of a backward, of weight gradients that were put off."""
    with patch.object(communicator, "Work", Open):
        for frozen, put_off in product(("nothing", "input", "weights"), (False, True)):
            if put_off and kind not in ("column", "row", "gated"):
                continue
            module = spread(kind, rank, **({"delay_wgrad_compute": True} if put_off else {}))
            module.requires_grad_(frozen != "weights")
            x, dy = tensors(kind, rank, True, 0, ROWS)
            with region(recipe):
                y = module(x.requires_grad_(frozen != "input"))
            assert Open.count == 0
            y.backward(dy)
            assert Open.count == 0
            if put_off:
                module.backward_dw()
                assert Open.count == 0


@requires_gpus(2, ranks=True)
@by_ranks("gpus")
def test_a_first_forward_in_a_capture(rank: Rank) -> None:
    """The ranks compare what they run, which reads from the device: outside of a capture only."""
    module, (x, _) = spread("gated", rank), tensors("gated", rank, True, 0, ROWS)
    said = error_of(lambda: graphed(module, rank, (x.requires_grad_(),), "current", num_warmup_iters=0))
    assert said.startswith("UnsupportedError") and "run a step before the capture" in said
    with region("current"):
        assert module(x).isfinite().all()


@by_ranks("pair")
def test_what_all_ranks_do_together_is_refused_in_a_capture(rank: Rank) -> None:
    """What a capture on a GPU is told, without one."""
    comm: Any = GroupCommunicator(dist.group.WORLD, set())
    runtime: Any = SimpleNamespace(device=SimpleNamespace(kind="cuda"))
    place = torch.device("cuda", 0)
    with patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        for call in (
            lambda: comm.agree(runtime, "tensor parallelism", {}),
            lambda: symmetric_buffer(8, torch.float32, place, dist.group.WORLD),
        ):
            says(error_of(call), "UnsupportedError", "inside a CUDA graph's capture", "run a step before the capture")


@requires_gpus(2)
@by_ranks("gpus")
def test_symmetric_memory(rank: Rank) -> None:
    """A graph goes on with the memory that it was captured with, when other sizes have taken its place."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    module = te.Linear(
        256, 512, parallel_mode="row", symmetric_ar_type="one_shot", device="cuda", params_dtype=torch.bfloat16,
        **options(rank, False),
    )  # fmt: skip
    x = torch.randn(64, 256 // rank.world, device="cuda", dtype=torch.bfloat16)
    call = graphed(copy.deepcopy(module), rank, (x.requires_grad_(),), None)
    wanted = module(x)
    with patch.object(symmetric_memory, "_MOST_BUFFERS", 2):
        for rows in (1, 2, 4, 8, 64):
            module(x[:1].expand(rows, -1).contiguous())
    torch.cuda.empty_cache()
    assert torch.equal(call(x), wanted)
    call.reset()
