"""Composed layers whose attention lies cut over ranks: what one rank computes of the whole sequences, and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from te_core import dtypes
from te_core.layers import graph, mlp, norm, residual
from te_core.layers.blocks import AttentionBlock, TransformerBlock
from te_core.layers.communicator import Groups, InProcessRanks
from te_core.layers.context.schedule import Context
from te_core.layers.graph import Graph
from te_core.layers.linear import LinearSpec, Needs
from te_core.layers.norm_linear import NormLinearSpec
from te_core.layers.parallel import Split
from te_core.tape.taped import Taped
from tests.core.context_cases import RT, Case, Ranks, Side, Tokens
from tests.core.test_context_parallel import MODES
from tests.recordings import tapes
from tests.tolerances import DB, snr_db

Array = np.ndarray[Any, Any]
FP32, ALL = dtypes.float32, Needs(True, True, True)
HIDDEN, CHUNK, BATCH = 24, 3, 2


def spec_of(case: Case, context: Context | None, tensor: int = 1) -> AttentionBlock:
    """Norm, projection, attention over ranks, projection."""
    split = [None if tensor == 1 else Split(mode, tensor) for mode in ("column", "row")]
    qkv, proj = (LinearSpec(FP32, None, ALL, parallel=one) for one in split)
    layer = case.spec(context)
    layer = replace(layer, heads=layer.heads // tensor, groups=layer.groups // tensor)
    return AttentionBlock(NormLinearSpec(norm.NormSpec(FP32, "RMSNorm", 1e-5), qkv), layer, proj)


class Whole:
    """The parameters, and the sequences."""

    def __init__(self, case: Case) -> None:
        random = np.random.default_rng(3)
        width, qkv = case.heads * case.width, (case.heads + 2 * case.groups) * case.width
        self.case = case
        total = 2 * case.size * CHUNK
        self.side = Side("sbhd", case.size, [Tokens(CHUNK, total, total)] * BATCH)
        self.x, self.dy = (random.standard_normal((total, BATCH, HIDDEN)).astype(np.float32) for _ in range(2))
        self.gamma, self.proj_bias = (random.standard_normal(HIDDEN).astype(np.float32) for _ in range(2))
        self.qkv = random.standard_normal((qkv, HIDDEN)).astype(np.float32) / 5
        self.proj = random.standard_normal((HIDDEN, width)).astype(np.float32) / 5

    def cut(self, t: Array, rank: int | None) -> Any:
        parts = [t[:, i, None] for i in range(BATCH)]
        return RT.tensor(t if rank is None else self.side.on_rank(parts, rank)[:, :, 0])

    def weights(self, at: int = 0, of: int = 1) -> dict[str, Any]:
        """A tensor-parallel rank's; heads in groups with their keys and values, so that rows are a range."""
        qkv, proj = np.split(self.qkv, of)[at], np.split(self.proj, of, 1)[at]
        named = {"layernorm_qkv_weight": qkv, "proj_weight": proj, "proj_bias": self.proj_bias}
        named["layernorm_qkv_layer_norm_weight"] = self.gamma
        return {name: RT.tensor(np.ascontiguousarray(t)) for name, t in named.items()}

    def step(self, spec: Graph, comm: Any, rank: int | None, functions: Any = None, **more: Any) -> Any:
        """Output, and the gradients of x and of the parameters."""
        forward, backward = functions or (
            lambda *a, **o: graph.forward(*a, spec=spec, **o),
            lambda *a, **o: graph.backward(*a, spec=spec, **o),
        )
        given = {"x": self.cut(self.x, rank), **self.weights(*more.pop("at", ())), **more}
        (y,), saved = forward(RT, *map(given.get, spec.inputs), comm=comm)
        found = backward(RT, self.cut(self.dy, rank), saved, comm=comm)
        return [RT.numpy(t) for t in (y, *[t for name, t in zip(spec.inputs, found, strict=True) if name in given])]


def check(whole: Whole, results: list[list[Array]], wanted: list[Array]) -> None:
    """Tokens put together, and the gradients of parameters added up."""
    for i, right in enumerate(wanted):
        parts = [r[i] for r in results]
        if i < 2:
            made = np.stack(whole.side.together([t[:, :, None] for t in parts]), 1)[:, :, 0]
        else:
            made = np.sum(parts, axis=0)
        assert snr_db(made, right) > DB["fp32"], i


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    with tapes("first"):
        yield


@pytest.mark.parametrize("choice", MODES)
def test_an_attention_block_over_ranks(choice: Any) -> None:
    mode, size, inner = choice
    whole = Whole(Case(mode=mode, size=size, inner=inner, packing="qkv"))
    wanted = whole.step(spec_of(whole.case, None).graph(), None, None)
    spec = spec_of(whole.case, whole.case.context).graph()
    functions = [(Taped("forward", graph.forward, spec), Taped("backward", graph.backward, spec)) for _ in range(size)]
    ranks = Ranks(whole.case)
    for _ in range(2):
        check(whole, ranks.run(lambda r, comm: whole.step(spec, Groups(None, comm), r, functions[r])), wanted)


def test_ranks_that_share_weights_beside_ranks_that_share_sequences() -> None:
    """Tensor 2 x context 2: a rank has half of the heads of half of the tokens."""
    case = Case(mode="p2p", size=2, packing="qkv")
    whole = Whole(case)
    wanted = whole.step(spec_of(case, None).graph(), None, None)
    spec = spec_of(case, case.context, tensor=2).graph()
    tensor, context = [InProcessRanks(2) for _ in range(2)], [InProcessRanks(2) for _ in range(2)]
    comms = [Groups(tensor[r // 2].of(r % 2), context[r % 2].of(r // 2)) for r in range(4)]
    results = InProcessRanks(4).run(
        lambda comm: whole.step(spec, comms[comm.rank], comm.rank // 2, at=(comm.rank % 2, 2))
    )
    rows = [[None] * 6, [None] * 6]  # type: ignore[var-annotated]
    for part in range(2):
        one, other = results[2 * part : 2 * part + 2]
        assert all(np.array_equal(one[i], other[i]) for i in (0, 1))
        qkv, proj = np.concatenate([one[3], other[3]]), np.concatenate([one[4], other[4]], 1)
        rows[part] = [*one[:3], qkv, proj, one[5]]  # y, and the gradients of x, gamma, qkv, proj, proj's bias
    check(whole, rows, wanted)


def test_a_transformer_layer_over_ranks() -> None:
    case = Case(mode="p2p", size=2, packing="qkv")
    whole = Whole(case)
    random = np.random.default_rng(5)
    w1, w2 = (random.standard_normal(s).astype(np.float32) / 5 for s in ((48, HIDDEN), (HIDDEN, 48)))

    def spec_of_layer(context: Context | None) -> TransformerBlock:
        linear = LinearSpec(FP32, None, ALL)
        add = residual.AddSpec(0.0, residual.BranchNeeds(True, True, True))
        rule = norm.NormSpec(FP32, "RMSNorm", 1e-5)
        attends = spec_of(case, context)
        assert isinstance(attends.qkv, NormLinearSpec)
        attends = replace(attends, qkv=replace(attends.qkv, stream=residual.Stream()))
        inside = mlp.MLPSpec(linear, linear, rule, "relu", stream=residual.Stream(add))
        return TransformerBlock(attends, inside, add)

    more = {
        "layernorm_mlp_layer_norm_weight": whole.gamma,
        "layernorm_mlp_fc1_weight": w1,
        "layernorm_mlp_fc2_weight": w2,
    }
    given = {name: RT.tensor(t) for name, t in more.items()}
    wanted = whole.step(spec_of_layer(None).graph(), None, None, **given)
    spec = spec_of_layer(case.context).graph()
    check(whole, Ranks(case).run(lambda r, comm: whole.step(spec, Groups(None, comm), r, **given)), wanted)
