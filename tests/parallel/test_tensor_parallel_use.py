"""Spread layers as they are used: quantized parameters, copies, compilers, reports, and mistakes. (Ways of running them
that change nothing: test_ways.py.)"""

from __future__ import annotations

import copy
import os
import pickle
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from te_core.recipe import DelayedScaling
from te_torch.parallel import communicator
from tests.backends import requires_gpus
from tests.covering import covering
from tests.parallel.ranks import Rank, Ranks, wait_no_longer_than
from tests.parallel.steps import alike, by_ranks, counted, error_of, everyones, same, says
from tests.parallel.tensor_steps import (
    BATCH,
    WIDE,
    F,
    H,
    inputs,
    make,
    options,
    piece,
    shapes,
    spread,
    tensors,
)  # fmt: skip
from tests.recipes import KINDS, region, rule
from tests.tolerances import snr_db

ROWS = 64


def step(rank: Rank, module: Any, recipe: str | None, number: int = 0) -> list[torch.Tensor]:
    """Output and gradient of the input of a forward and backward of a part of the sequence."""
    x = piece(inputs(ROWS, H, number), 0, rank.number, rank.world).to(rank.device).requires_grad_()
    with region(recipe):
        y = module(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "recipe", [r if r in ("delayed", "mxfp8") else pytest.param(r, marks=pytest.mark.full) for r in KINDS]
)
@by_ranks("two")
def test_weights_held_quantized(rank: Rank, recipe: str) -> None:
    """As a weight that is quantized in forward; with delayed scaling, whose first step has the scale 1 and not that of
    the weight, as near to high precision."""
    plain = spread("gated", rank)
    wanted = step(rank, plain, None if recipe == "delayed" else recipe)
    with te.quantized_model_init(recipe=rule(recipe)):
        module = spread("gated", rank)
    found = step(rank, module, recipe)
    assert module.fc1_weight.shape == (2 * F // rank.world, H)
    least = {"nvfp4": 5, "delayed": 17}.get(recipe, 18)
    for a, b in zip((*found, module.fc1_weight.grad), (*wanted, plain.fc1_weight.grad), strict=True):
        assert snr_db(a, b) > least


def norm_output(rank: Rank, kind: str, gathered: bool) -> list[Any]:
    more = {"return_layernorm_output_gathered": True} if gathered else {"return_layernorm_output": True}
    torch.manual_seed(0)
    if kind == "norm column":
        module = te.LayerNormLinear(H, F, parallel_mode="column", device=rank.device, **options(rank), **more)
    else:
        module = te.LayerNormMLP(H, F, set_parallel_mode=True, device=rank.device, **options(rank), **more)
    x = piece(inputs(ROWS, H, 0).float(), 0, rank.number, rank.world).to(rank.device).requires_grad_()
    y, norm = module(x)
    weights = inputs(ROWS, H, 5).float().to(rank.device)  # each rank uses its columns of what is gathered
    mask = torch.zeros_like(weights)
    mask.chunk(rank.world, 2)[rank.number].fill_(1)
    used = (norm * weights * mask).sum() if gathered else (norm * piece(weights, 0, rank.number, rank.world)).sum()
    used.backward()
    return [norm, x.grad, module.layer_norm_weight.grad]


@pytest.mark.parametrize("kind", ["norm column", "gated"])
@by_ranks("two")
def test_gathered_norm_output(rank: Rank, kind: str) -> None:
    """It is that of all rows on every rank, and its gradient comes back as the sum over the ranks."""
    (norm, dx, dgamma), (own, dx_one, dgamma_one) = (norm_output(rank, kind, gathered) for gathered in (True, False))
    assert torch.equal(norm.cpu(), torch.cat(everyones(own))) and norm.shape == (ROWS, BATCH, H)
    assert snr_db(dx, dx_one) > 60 and snr_db(dgamma, dgamma_one) > 60


@by_ranks("two")
def test_copies(rank: Rank) -> None:
    module = make("column", rank.device, **options(rank))
    x = inputs(ROWS // rank.world, H, 0).to(rank.device)
    with torch.no_grad():
        wanted = module(x)
        twin = copy.deepcopy(module)
        assert torch.equal(twin(x), wanted) and twin.tp_group is module.tp_group
        assert wanted.shape == (ROWS, BATCH, F // rank.world)
        loaded = pickle.loads(pickle.dumps(module))
        assert loaded.tp_group is None
        says(error_of(lambda: loaded(x)), "tp_size=2 without a group", "set_tensor_parallel_group")
        loaded.set_tensor_parallel_group(dist.group.WORLD)
        assert torch.equal(loaded(x), wanted)


@by_ranks("two")
def test_a_group_that_comes_later(rank: Rank) -> None:
    module = te.TransformerLayer(
        H, F, 4, set_parallel_mode=True, tp_size=rank.world, sequence_parallel=True, device=rank.device,
        hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True,
    )  # fmt: skip
    module.set_tensor_parallel_group(dist.group.WORLD)
    y = module(inputs(ROWS // rank.world, H, 0).float().to(rank.device))
    assert y.shape == (ROWS // rank.world, BATCH, H) and module.self_attention.proj.in_features == H // 2
    assert module.self_attention.core_attention._static.heads == 2
    named = dict(module.named_parameters())
    qkv, fc1_bias = named["self_attention.layernorm_qkv.weight"], named["layernorm_mlp.fc1_bias"]
    assert qkv.partition_dim == 0 and named["self_attention.proj.weight"].partition_dim == 1
    assert fc1_bias.partition_dim == 0 and not hasattr(fc1_bias, "sequence_parallel")
    for name in ("layernorm_qkv.layer_norm_weight", "proj.bias"):
        assert named[f"self_attention.{name}"].sequence_parallel is True
    assert named["layernorm_mlp.fc2_bias"].sequence_parallel is True


@by_ranks("two")
def test_scales_are_those_of_all_ranks(rank: Rank) -> None:
    module = spread("gated", rank)
    for number in range(3):
        step(rank, module, "delayed", number)
    state = module.fp8_state
    assert alike((state.scale_fwd, state.scale_bwd)) and (state.scale_fwd != 1).any()


@by_ranks("two")
def test_compiled(rank: Rank) -> None:
    """It runs eagerly, behind a graph break. A region in compiled code would not reach it: an error, and not another
    precision."""
    module = spread("gated", rank)
    plain, _ = step(rank, module, "current")
    torch._dynamo.reset()
    function = torch.compile(lambda x: module(x) * 2, backend="eager")
    assert torch.equal(step(rank, function, "current")[0], plain * 2)
    torch._dynamo.reset()
    whole = torch.compile(lambda x: module(x) * 2, backend="eager", fullgraph=True)
    says(error_of(lambda: step(rank, whole, "current")), "weights are spread over ranks runs eagerly")

    @torch.compile(backend="eager")
    def with_its_region(x: torch.Tensor) -> Any:
        with region("current"):
            return module(x)

    x = torch.randn(8, H, device=rank.device, dtype=torch.bfloat16)
    says(error_of(lambda: with_its_region(x)), "move the region out of the compiled function")


@pytest.mark.parametrize("kind", ["Linear", "DotProductAttention"])
@by_ranks("two")
def test_a_spread_module_is_like_no_other(rank: Rank, kind: str) -> None:
    """What is compiled for one module serves those that are alike. Here the first has a group that is gone."""
    group = dist.new_group()
    if kind == "Linear":
        first, module = [
            te.Linear(H, F, device=rank.device, **of)
            for of in ({"parallel_mode": "row", "tp_group": group}, {"parallel_mode": "row"})
        ]
        given = [torch.randn(8, H, device=rank.device)]
    else:
        first, module = [te.DotProductAttention(2, 16, attn_mask_type="causal") for _ in range(2)]
        for part, over in ((first, group), (module, dist.group.WORLD)):
            part.set_context_parallel_group(over, list(range(rank.world)), None)
        given = [torch.randn(8, 1, 2, 16, device=rank.device, requires_grad=True) for _ in range(3)]
    dist.destroy_process_group(group)
    torch._dynamo.reset()
    found = torch.compile(module, backend="eager")(*given)
    assert torch.equal(found, module(*given)), first


@by_ranks("two")
def test_the_report_says_what_travelled(rank: Rank) -> None:
    """Also where what travelled is multiplied after dequantizing, which is why a product is not as asked."""
    for rows in (64, 20):
        module = make("column", rank.device, **options(rank))
        with region("mxfp8"):
            y = module(inputs(rows, H, 0).to(rank.device).requires_grad_())
        y.sum().backward()
        fprop, dgrad, wgrad = [row.facts.reason for row in te.precision_report(module).rows]
        says(fprop, "gathered over 2 ranks as float8_e4m3 1x32")
        assert "gathered" not in dgrad and (fprop == wgrad) == (rows == 64)
    says(wgrad, "in bfloat16, and quantized whole")


@pytest.mark.parametrize(
    ("mode", "weight", "out", "dim"), [("row", (F, H // 2), F, 1), ("column", (F // 2, H), F // 2, 0)]
)
@by_ranks("pair")
def test_grouped_linear_has_shapes_only(rank: Rank, mode: str, weight: tuple[int, int], out: int, dim: int) -> None:
    group: dict[str, Any] = {"tp_group": dist.group.WORLD, "tp_size": rank.world, "device": rank.device}
    module = te.GroupedLinear(2, H, F, bias=False, parallel_mode=mode, **group)
    with counted() as calls:
        y = module(torch.randn(16, weight[1], device=rank.device), [8, 8])
        y.sum().backward()
    assert y.shape == (16, out) and not calls
    assert all((w.shape, w.partition_dim) == (weight, dim) for w in (module.weight0, module.weight1))


# ------------------------------------------------------------------------------------------------ what is exchanged


@pytest.mark.parametrize("recipe", [None, "delayed", "current", "mxfp8"])
@by_ranks("two")
def test_collectives_of_a_layer(rank: Rank, recipe: str | None) -> None:
    """As docs/parallel.md has them: two column-parallel and two row-parallel products."""
    tokens, part = ROWS * BATCH, ROWS * BATCH // 2
    sums = (4, 4 * 2 * tokens * H)
    for sequence in (False, True):
        module = make("layer", rank.device, **options(rank, sequence))
        for _ in range(2):  # in the first the ranks meet
            with counted() as calls:
                x = inputs(ROWS // (rank.world if sequence else 1), H, 0).to(rank.device).requires_grad_()
                with region(recipe):
                    y = module(x)
                y.float().square().sum().backward()
        names = {name for name, _ in calls}
        found = {n: (sum(name == n for name, _ in calls), sum(b for name, b in calls if name == n)) for n in names}
        maxima = found.pop("all_reduce", (0, 0))
        if not sequence:  # delayed scaling reduces its maxima, once forward and once backward
            assert maxima[0] - sums[0] == (2 if recipe == "delayed" else 0) and not found
            assert recipe == "delayed" or maxima == sums
            continue
        assert found["reduce_scatter"] == sums
        if recipe is None:
            assert found["all_gather"] == (6, 6 * 2 * part * H)  # x twice in two layers, dy once in two
        elif recipe == "mxfp8":  # data and scales, for fprop and wgrad or dgrad and wgrad; scales are padded
            rowwise, columnwise = part * 4, part // 32 * 128
            assert found["all_gather"] == (16, 8 * part * H + 4 * (rowwise + columnwise))
        else:
            assert found["all_gather"] == (6, 6 * part * H)
        assert maxima == {"current": (4, 16), "delayed": (2, maxima[1])}.get(str(recipe), (0, 0))


# ------------------------------------------------------------------------------------- how a sum is asked for


def summed(rank: Rank, kind: str, how: str | None, sequence: bool) -> tuple[list[str], list[torch.Tensor]]:
    """The ways that a layer's sums are asked for in three steps, of which the last are replayed, and its outputs.

    (Gloo's sum stands in for that in symmetric memory.)
    """
    asked: list[str] = []

    def sum_(t: torch.Tensor, group: Any, way: str) -> None:
        asked.append(way)
        dist.all_reduce(t, group=group)

    module = make(kind, rank.device, symmetric_ar_type=how, **options(rank, sequence))
    width = H // rank.world if kind == "row" else shapes(kind)[0]
    outputs = []
    with mock.patch.object(communicator, "symmetric_sum", sum_):
        for number in range(3):
            x = inputs(ROWS, width, number).to(rank.device).requires_grad_()
            outputs.append(module(x))
            outputs[-1].float().sum().backward()
    return asked, outputs


@covering(
    case=["column", "row", "norm column", "mlp", "mlp again", "row sequence", "mlp sequence"],
    how=["one_shot", "two_shot"],
)
@by_ranks("pair")
def test_the_way_of_a_sum(rank: Rank, case: str, how: str) -> None:
    """It is asked for once a step, for a row-parallel output that is summed whole, and for nothing else."""
    kind, sequence = case.removesuffix(" sequence"), case.endswith(" sequence")
    (asked, made), (unasked, one) = (summed(rank, kind, way, sequence) for way in (how, None))
    assert asked == [how] * 3 * (not sequence and kind in ("row", "mlp", "mlp again")) and unasked == []
    assert same(made, one)


@requires_gpus(2)
@pytest.mark.parametrize("how", ["one_shot", "two_shot"])
@by_ranks("gpus")
def test_symmetric_memory(rank: Rank, how: str) -> None:
    """The same sums, another way."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    found: list[list[torch.Tensor]] = [[], []]
    for results, way in zip(found, (how, None), strict=True):
        torch.manual_seed(rank.number)
        given: dict[str, Any] = {"device": rank.device, "params_dtype": torch.bfloat16, **options(rank, False)}
        module = te.Linear(256, 512, parallel_mode="row", symmetric_ar_type=way, **given)
        for rows in (1, 7, 64, 64):
            x = torch.randn(rows, 256 // rank.world, device=rank.device, dtype=torch.bfloat16).requires_grad_()
            y = module(x)
            y.sum().backward()
            results += [y.detach(), x.grad]  # type: ignore[list-item]
    assert all(snr_db(a, b) > 40 for a, b in zip(*found, strict=True))


# -------------------------------------------------------------------------------------------------- mistakes

#: What is said of each mistake.
MISTAKES = {
    "size": "a group of 2 ranks with tp_size=4",
    "late size": "a group of 1 ranks with tp_size=2",
    "foreign": "not in",
    "part": "^ArgumentError.*out_features=65 over 2 ranks",
    "named part": "^RowsError.*a_weight of 15 rows",
    "heads": "1 over 2 ranks",
    "width": rf"\[\*, {H // 2}\]",
    "sequence": "a first dimension that the ranks divide",
    "quantized sequence": r"24 rows of a quantized tensor of shape \(3, 16, .*a first dimension that the ranks divide",
    "whole sequence": r"at most this rank's 4 rows of the sequence \(seq_length\)",
    "grouped bias": "^ArgumentError.*bias=True with tp_size=2",
    "unreduced": "reduce_amax=False",
    "smaller group": "without ranks",
    "multicast": "multicast",
    "symmetric": "leave symmetric_ar_type out",  # on the CPU, where no symmetric memory is
}


@by_ranks("two", group_timeout=60)
def test_mistakes(rank: Rank) -> None:
    world = dist.group.WORLD
    alone = [dist.new_group([i]) for i in range(rank.world)]
    column, row = (make(kind, rank.device, **options(rank)) for kind in ("column", "row"))
    x = torch.randn(16, H, device=rank.device, dtype=torch.bfloat16)
    two: dict[str, Any] = {"tp_group": world, "tp_size": 2}
    parts: dict[str, Any] = {"tp_size": 2, "parameters_split": {"a": 15, "b": 15}}

    def unreduced() -> None:
        with te.autocast(recipe=DelayedScaling(reduce_amax=False)):
            column(x)

    def smaller_group() -> None:
        with te.autocast(recipe=DelayedScaling(), amax_reduction_group=alone[rank.number]):
            column(x)

    def odd_sequence() -> None:
        """To the core a quantized input is a matrix, whose rows may be even."""
        first = te.Linear(H, H // 2, device=rank.device, params_dtype=torch.bfloat16)
        with torch.no_grad(), region("current"):
            row(first(torch.randn(3, 16, H, device=rank.device, dtype=torch.bfloat16), fp8_output=True))

    def whole_sequence() -> None:
        layer = te.TransformerLayer(
            H, H, 4, hidden_dropout=0.0, attention_dropout=0.0, set_parallel_mode=True, seq_length=8,
            device=rank.device, **options(rank),
        )  # fmt: skip
        layer(torch.randn(2, 2, H, device=rank.device))  # seq_length is that of the longest
        layer(torch.randn(8, 2, H, device=rank.device))

    def on_the_cpu() -> None:
        of_one: dict[str, Any] = {"parallel_mode": "row", "symmetric_ar_type": "one_shot", "tp_group": world}
        te.Linear(H, F, device="cpu", **of_one)(torch.randn(4, H // 2))

    calls = {
        "size": lambda: te.Linear(H, F, parallel_mode="row", tp_group=world, tp_size=4),
        "late size": lambda: column.set_tensor_parallel_group(alone[rank.number]),
        "foreign": lambda: te.Linear(H, F, parallel_mode="row", tp_group=alone[1 - rank.number], tp_size=2),
        "part": lambda: te.Linear(H, 65, parallel_mode="column", **two),
        "named part": lambda: te.Linear(H, 30, parallel_mode="column", **parts),
        "heads": lambda: te.MultiheadAttention(H, 4, num_gqa_groups=1, set_parallel_mode=True, tp_size=2),
        "width": lambda: row(x),
        "sequence": lambda: row(x[:3, : H // 2].contiguous()),
        "quantized sequence": odd_sequence,
        "whole sequence": whole_sequence,
        "grouped bias": lambda: te.GroupedLinear(2, H, H, parallel_mode="row", tp_group=world, device="cpu"),
        "unreduced": unreduced,
        "smaller group": smaller_group,
        "multicast": lambda: te.Linear(H, F, symmetric_ar_type="multimem_all_reduce"),
        "symmetric": on_the_cpu,
    }
    assert calls.keys() == MISTAKES.keys()
    said = {name: error_of(call) for name, call in calls.items() if name != "symmetric" or rank.device == "cpu"}
    wrong = {name: text for name, text in said.items() if not re.search(MISTAKES[name], text, re.DOTALL)}
    assert not wrong, wrong
    lone = te.DotProductAttention(4, 8, tp_group=world, softmax_type="learnable")
    assert lone.softmax_offset.shape == (2,)


@pytest.mark.four_ranks(what="rows")
@pytest.mark.parametrize("what", ["rows", "width", "mode", "recipe"])
@by_ranks()
def test_ranks_that_differ(rank: Rank, what: str) -> None:
    """All of them say the same, and none hangs."""
    mode = "row" if what == "mode" and rank.number else "column"
    torch.manual_seed(0)
    width = F + 32 * rank.number if what == "width" else F
    module = te.Linear(H, width, parallel_mode=mode, device=rank.device, **options(rank))
    x = torch.randn(8 if what == "rows" and rank.number else 4, module.in_features, device=rank.device)
    with region("current" if what == "recipe" and rank.number else None):
        said = error_of(lambda: module(x))
    assert said.startswith("ArgumentError") and re.search("on ranks? 1", said) and alike(said), said


@pytest.mark.parametrize("sequence", [False, True])
@by_ranks("two")
def test_a_call_made_anew_on_one_rank(rank: Rank, sequence: bool) -> None:
    """What the ranks have agreed on, the first one alone does once more, as with an inspector of its own. It compares
    nothing: the others would not come."""
    module, (x, _) = spread("gated", rank, sequence), tensors("gated", rank, sequence, 0, ROWS)
    wanted = module(x)
    if rank.number == 0:
        module._calls.clear()
    assert torch.equal(module(x), wanted)
    if rank.number == 0 and not sequence:

        class Looks:
            request = frozenset({("fprop", "activation")})

            def inspect(self, *_: Any) -> None:
                pass

        module.inspector = Looks()
    assert torch.equal(module(x), wanted)


def dies(rank: Rank) -> str:
    module = make("column", rank.device, **options(rank))
    x = inputs(ROWS // rank.world, H, 0).to(rank.device)
    float(module(x).float().sum())  # all are there
    if rank.number == 1:
        os._exit(3)
    module(x)
    return "went on"


def test_a_rank_that_dies(two: Ranks) -> None:
    """With NCCL torch's watchdog ends the other one, within the group's timeout."""
    first, second = two.outcomes(dies) if two.device == "cpu" else two.outcomes(dies, group_timeout=15)
    assert (second.how, second.text) == ("died", "exit code 3")
    if two.device == "cuda":
        assert first.waited_in_vain() and two.seconds < 60, str(first)
        return
    assert (first.how, first.error) == ("raised", "LibraryError") and "ranks that are all alive" in first.text


def alone_in_another(rank: Rank, kind: str, sequence: bool) -> None:
    module, (x, _) = spread(kind, rank, sequence), tensors(kind, rank, sequence, 0, ROWS)
    module(x)
    wait_no_longer_than(0.5)
    with region("current" if rank.number else None):
        module(x)
        raise AssertionError("went on")


@pytest.mark.parametrize(
    ("kind", "sequence"), [("column", True), pytest.param("gated", True, marks=pytest.mark.full), ("row", False)]
)
def test_a_rank_alone_in_another_mode(pair: Ranks, kind: str, sequence: bool) -> None:
    """It waits for partners that do not come, and they for it: no message of one is taken for the other's."""
    for outcome in pair.outcomes(alone_in_another, kind, sequence):
        assert (outcome.how, outcome.error) == ("raised", "LibraryError"), str(outcome)
    assert pair.seconds < 30


# ------------------------------------------------------------------------------------------- FP8 from module to module


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"fp8_dpa": True}, id="dpa", marks=pytest.mark.full),
        pytest.param({"fp8_dpa": True, "fp8_mha": True}, id="mha"),
    ],
)
@by_ranks("two")
def test_attention_in_fp8(rank: Rank, more: dict[str, Any]) -> None:
    """Heads of a rank are attended to in FP8; what goes from module to module stays quantized."""
    found: list[list[torch.Tensor]] = [[], []]
    for one, module in zip(found, (spread("wide heads", rank), make("wide heads", rank.device)), strict=True):
        for number in range(2):
            x = inputs(ROWS, WIDE, number).to(rank.device)
            x = piece(x, 0 if one is found[0] else None, rank.number, rank.world).requires_grad_()
            with te.autocast(recipe=DelayedScaling(amax_history_len=2, **more)):
                y = module(x)
            y.float().square().sum().backward()
            one += [y, x.grad]  # type: ignore[list-item]
    parts, whole = found
    for made, wanted in zip(zip(*everyones(parts), strict=True), whole, strict=True):
        assert snr_db(torch.cat(made), wanted.detach().cpu()) > 25
