"""Spread layers as they are used: microbatches, quantized parameters, checkpoints, copies, compilers, and mistakes."""

from __future__ import annotations

import copy
import os
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from te_core.recipe import DelayedScaling
from tests.covering import covering
from tests.parallel.ranks import Rank, Ranks, wait_no_longer_than
from tests.parallel.tensor_steps import (
    BATCH,
    WIDE,
    F,
    H,
    counted,
    cut_ends,
    cut_of,
    error_of,
    inputs,
    joined,
    make,
    options,
    part,
    piece,
)
from tests.recipes import KINDS, region
from tests.tolerances import snr_db

ROWS = 64


def filled(kind: str, rank: Rank, module: Any) -> Any:
    """With this rank's parts of the whole layer's parameters."""
    values = dict(make(kind, rank.device).named_parameters())
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(part(values[name], cut_of(kind, name), rank.number, rank.world))
    return module


def step(
    rank: Rank, module: Any, recipe: str | None, number: int = 0, width: int = H, **forward: Any
) -> dict[str, Any]:
    """One forward and backward of a part of the sequence."""
    x = piece(inputs(ROWS, width, number), 0, rank.number, rank.world).to(rank.device).requires_grad_()
    with region(recipe):
        y = module(x, **forward)
    first = y[0] if isinstance(y, tuple) else y
    first.float().square().sum().backward()
    return {"y": first.detach().cpu(), "dx": x.grad.cpu()}  # type: ignore[union-attr]


def gradients(module: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.cpu().clone() for n, p in module.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------------------------------- ways to use a layer


def microbatches(rank: Rank, recipe: str, cached: bool) -> Any:
    module = filled("gated", rank, make("gated", rank.device, **options(rank)))
    found = []
    for number in range(3):
        found.append(step(rank, module, recipe, number, is_first_microbatch=(number == 0) if cached else None))
    return found, gradients(module)


@pytest.mark.parametrize("recipe", ["current", *(pytest.param(r, marks=pytest.mark.full) for r in ("block", "mxfp8"))])
def test_microbatches(two: Ranks, recipe: str) -> None:
    """A weight that is quantized once is the weight that is quantized each time."""
    for one, other in zip(two.run(microbatches, recipe, True), two.run(microbatches, recipe, False), strict=True):
        for a, b in zip(one[0], other[0], strict=True):
            assert torch.equal(a["y"], b["y"]) and torch.equal(a["dx"], b["dx"])
        assert all(torch.equal(one[1][n], other[1][n]) for n in one[1])


def with_options(rank: Rank, kind: str, recipe: str | None, way: str) -> Any:
    more: dict[str, Any] = {}
    if way == "later":
        more["delay_wgrad_compute"] = True
    if way == "main_grad":
        more["fuse_wgrad_accumulation"] = True
    if way == "original":
        more["save_original_input"] = True
    module = filled(kind, rank, make(kind, rank.device, **options(rank), **more))
    if way == "main_grad":
        for name in module._weight_names():
            weight = getattr(module, name)
            weight.main_grad = torch.zeros(weight.shape, device=rank.device)
    if way == "norm again":
        module.recompute_norm_output = True
    call = module
    if way == "checkpoint":

        def call(x: Any) -> Any:
            return te.checkpoint(module, x)

    found = step(rank, call, recipe, width=H // (rank.world if kind == "row" else 1))
    if way == "later":
        module.backward_dw()
    grads = gradients(module)
    if way == "main_grad":
        grads |= {n: getattr(module, n).main_grad.to(torch.bfloat16).cpu() for n in module._weight_names()}
    return found, grads


WAYS = [
    *[f"later: {kind}" for kind in ("column", "row", "gated")],
    *[f"main_grad: {kind}" for kind in ("column", "row", "gated")],
    *[f"checkpoint: {kind}" for kind in ("column", "row", "gated")],
    *[f"original: {kind}" for kind in ("column", "row")],
    *[f"norm again: {kind}" for kind in ("norm column", "gated")],
]


@covering(case=WAYS, recipe=[None, "current", "mxfp8"])
def test_ways_change_nothing(two: Ranks, case: str, recipe: str | None) -> None:
    way, kind = case.split(": ")
    for (a, grads), (b, plain) in zip(
        two.run(with_options, kind, recipe, way), two.run(with_options, kind, recipe, "plain"), strict=True
    ):
        assert torch.equal(a["y"], b["y"]) and torch.equal(a["dx"], b["dx"])
        assert grads.keys() == plain.keys()
        assert all(snr_db(grads[n], plain[n]) > 45 for n in plain)


def held_quantized(rank: Rank, recipe: str) -> Any:
    from tests.recipes import rule

    with te.quantized_model_init(recipe=rule(recipe)):
        module = make("gated", rank.device, **options(rank))
    values = dict(make("gated", rank.device).named_parameters())
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(part(values[name], cut_of("gated", name), rank.number, rank.world))
    found = step(rank, module, recipe)
    return found, gradients(module), module.fc1_weight.shape


@pytest.mark.parametrize(
    "recipe", [r if r in ("delayed", "mxfp8") else pytest.param(r, marks=pytest.mark.full) for r in KINDS]
)
def test_weights_held_quantized(two: Ranks, recipe: str) -> None:
    """As a weight that is quantized in forward; with delayed scaling, whose first step has the scale 1 and not that of
    the weight, as near to high precision."""
    delayed, least = recipe == "delayed", 5 if recipe == "nvfp4" else 17 if recipe == "delayed" else 18
    plain = two.run(with_options, "gated", None if delayed else recipe, "plain")
    for (a, grads, shape), (b, other) in zip(two.run(held_quantized, recipe), plain, strict=True):
        assert shape == (2 * F // two.world, H)
        assert snr_db(a["y"], b["y"]) > least and snr_db(a["dx"], b["dx"]) > least
        assert snr_db(grads["fc1_weight"], other["fc1_weight"]) > least


def norm_output(rank: Rank, kind: str, gathered: bool) -> Any:
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
    return norm.detach().cpu(), x.grad.cpu(), module.layer_norm_weight.grad.cpu()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["norm column", "gated"])
def test_gathered_norm_output(two: Ranks, kind: str) -> None:
    """It is that of all rows on every rank, and its gradient comes back as the sum over the ranks."""
    whole, parts = two.run(norm_output, kind, True), two.run(norm_output, kind, False)
    joined_rows = torch.cat([norm for norm, _, _ in parts])
    for (norm, dx, dgamma), (_, dx_one, dgamma_one) in zip(whole, parts, strict=True):
        assert torch.equal(norm, joined_rows) and norm.shape == (ROWS, BATCH, H)
        assert snr_db(dx, dx_one) > 60 and snr_db(dgamma, dgamma_one) > 60


def looked_at(rank: Rank, kind: str, recipe: str | None) -> Any:
    """An inspector sees this rank's parts, and changes nothing, nor what travels."""

    class Looks:
        request = frozenset(
            {("fprop", "activation"), ("wgrad", "gradient"), ("wgrad", "activation"), ("dgrad", "dgrad")}
        )
        seen: dict[Any, Any] = {}

        def inspect(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any, out: Any) -> None:
            self.seen.setdefault((gemm, tensor), []).append(value.shape[0])

    found = []
    for inspector in (None, Looks()):
        module = filled(kind, rank, make(kind, rank.device, **options(rank)))
        module.inspector = inspector
        for number in range(2):
            torch.manual_seed(number)
            Looks.seen.clear()
            with counted() as calls:
                result = step(rank, module, recipe, width=H // (rank.world if kind == "row" else 1))
        found.append((result, gradients(module), sorted(calls)))
    return *found, Looks.seen


@covering(recipe=[None, *KINDS], kind=["column", "row", "norm column", "gated"])
def test_inspectors(two: Ranks, kind: str, recipe: str | None) -> None:
    for (one, grads, sent), (seen, others, others_sent), shapes in two.run(looked_at, kind, recipe):
        assert torch.equal(seen["y"], one["y"]) and sent == others_sent
        assert torch.equal(seen["dx"], one["dx"]) and all(torch.equal(others[n], grads[n]) for n in grads)
        whole, part = ROWS * BATCH, ROWS * BATCH // 2
        gated = kind == "gated"  # its fc1 and fc2; this test gives a row-parallel layer a part, which it takes for all
        activation = [part, whole] if gated else [part]
        assert shapes["fprop", "activation"] == shapes["wgrad", "activation"] == activation
        assert shapes["wgrad", "gradient"] == ([part, whole] if gated else [part // 2 if kind == "row" else whole])


def copies(rank: Rank) -> Any:
    module = make("column", rank.device, **options(rank))
    x = inputs(ROWS // rank.world, H, 0).to(rank.device)
    with torch.no_grad():
        wanted = module(x)
        twin = copy.deepcopy(module)
        same = torch.equal(twin(x), wanted) and twin.tp_group is module.tp_group
        loaded = pickle.loads(pickle.dumps(module))
        none = loaded.tp_group is None
        try:
            loaded(x)
            said = ""
        except RuntimeError as error:
            said = str(error)
        loaded.set_tensor_parallel_group(dist.group.WORLD)
        return same, none, said, torch.equal(loaded(x), wanted), wanted.shape


def test_copies(two: Ranks) -> None:
    for same, none, said, equal, shape in two.run(copies):
        assert same and none and equal and shape == (ROWS, BATCH, F // two.world)
        assert "tp_size=2 without a group" in said and "set_tensor_parallel_group" in said


def group_later(rank: Rank) -> Any:
    torch.manual_seed(0)
    module = te.TransformerLayer(
        H, F, 4, set_parallel_mode=True, tp_size=rank.world, sequence_parallel=True, device=rank.device,
        hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True,
    )  # fmt: skip
    module.set_tensor_parallel_group(dist.group.WORLD)
    x = inputs(ROWS // rank.world, H, 0).float().to(rank.device)
    y = module(x)
    heads = module.self_attention.core_attention._static.heads
    marks = {
        n: (getattr(p, "partition_dim", None), getattr(p, "sequence_parallel", None))
        for n, p in module.named_parameters()
    }
    return y.shape, heads, marks, module.self_attention.proj.in_features


def test_a_group_that_comes_later(two: Ranks) -> None:
    for shape, heads, marks, width in two.run(group_later):
        assert shape == (ROWS // two.world, BATCH, H) and heads == 2 and width == H // 2
        assert marks["self_attention.layernorm_qkv.weight"][0] == 0 and marks["self_attention.proj.weight"][0] == 1
        for name in (
            "self_attention.layernorm_qkv.layer_norm_weight",
            "self_attention.proj.bias",
            "layernorm_mlp.fc2_bias",
        ):
            assert marks[name][1] is True
        assert marks["layernorm_mlp.fc1_bias"] == (0, None)


def states(rank: Rank) -> Any:
    module = filled("gated", rank, make("gated", rank.device, **options(rank)))
    for number in range(3):
        step(rank, module, "delayed", number)
    return module.fp8_state.scale_fwd.cpu(), module.fp8_state.scale_bwd.cpu()


def test_scales_are_those_of_all_ranks(two: Ranks) -> None:
    first, second = two.run(states)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1]) and (first[0] != 1).any()


def compiled(rank: Rank, fullgraph: bool) -> Any:
    module = filled("gated", rank, make("gated", rank.device, **options(rank)))
    plain = step(rank, module, "current")
    torch._dynamo.reset()
    function = torch.compile(lambda x: module(x) * 2, backend="eager", fullgraph=fullgraph)
    try:
        found = step(rank, function, "current")
    except Exception as error:
        return str(error)
    return torch.equal(found["y"], plain["y"] * 2)


def compiled_with_its_region(rank: Rank) -> str:
    module = make("column", rank.device, **options(rank))

    @torch.compile(backend="eager")
    def function(x: torch.Tensor) -> Any:
        with region("current"):
            return module(x)

    return error_of(lambda: function(torch.randn(8, H, device=rank.device, dtype=torch.bfloat16)))


def test_a_region_inside_a_compiled_function(two: Ranks) -> None:
    """It would not reach the module, which runs behind a graph break: an error, and not another precision."""
    assert all("move the region out of the compiled function" in said for said in two.run(compiled_with_its_region))


def test_compiled(two: Ranks) -> None:
    assert two.run(compiled, False) == [True, True]
    assert all("weights are spread over ranks runs eagerly" in said for said in two.run(compiled, True))


def reported(rank: Rank, recipe: str, rows: int) -> list[str]:
    module = make("column", rank.device, **options(rank))
    with region(recipe):
        y = module(inputs(rows, H, 0).to(rank.device).requires_grad_())
    y.sum().backward()
    return [row.facts.reason for row in te.precision_report(module).rows]


def test_the_report_says_what_travelled(two: Ranks) -> None:
    """Also where what travelled is multiplied after dequantizing, which is why a product is not as asked."""
    fprop, dgrad, wgrad = two.run(reported, "mxfp8", 64)[0]
    assert "gathered over 2 ranks as float8_e4m3 1x32" in fprop and fprop == wgrad and "gathered" not in dgrad
    fprop, _, wgrad = two.run(reported, "mxfp8", 20)[0]
    assert "as float8_e4m3 1x32" in fprop and "in bfloat16, and quantized whole" in wgrad


def grouped(rank: Rank, mode: str) -> Any:
    module = te.GroupedLinear(
        2, H, F, bias=False, parallel_mode=mode, tp_group=dist.group.WORLD, tp_size=rank.world, device=rank.device
    )
    x = torch.randn(16, H // rank.world if mode == "row" else H, device=rank.device)
    with counted() as calls:
        y = module(x, [8, 8])
        y.sum().backward()
    weights = (module.weight0, module.weight1)
    return {tuple(w.shape) for w in weights}, tuple(y.shape), len(calls), {w.partition_dim for w in weights}


@pytest.mark.parametrize(
    ("mode", "weight", "out", "dim"), [("row", (F, H // 2), F, 1), ("column", (F // 2, H), F // 2, 0)]
)
def test_grouped_linear_has_shapes_only(pair: Ranks, mode: str, weight: tuple[int, int], out: int, dim: int) -> None:
    assert pair.run(grouped, mode) == [({weight}, (16, out), 0, {dim})] * 2


# -------------------------------------------------------------------------------------------------- mistakes


def mistakes(rank: Rank) -> dict[str, str]:
    world = dist.group.WORLD
    alone = [dist.new_group([i]) for i in range(rank.world)]
    column = make("column", rank.device, **options(rank))
    row = make("row", rank.device, **options(rank))
    x = torch.randn(16, H, device=rank.device, dtype=torch.bfloat16)

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
        """Where no symmetric memory is."""
        options_of_one: dict[str, Any] = {"parallel_mode": "row", "symmetric_ar_type": "one_shot", "tp_group": world}
        te.Linear(H, F, device="cpu", **options_of_one)(torch.randn(4, H // 2))

    return {
        "size": error_of(lambda: te.Linear(H, F, parallel_mode="row", tp_group=world, tp_size=4)),
        "late size": error_of(lambda: column.set_tensor_parallel_group(alone[rank.number])),
        "foreign": error_of(lambda: te.Linear(H, F, parallel_mode="row", tp_group=alone[1 - rank.number], tp_size=2)),
        "part": error_of(lambda: te.Linear(H, 65, parallel_mode="column", tp_group=world, tp_size=2)),
        "named part": error_of(
            lambda: te.Linear(H, 30, parallel_mode="column", tp_size=2, parameters_split={"a": 15, "b": 15})
        ),
        "heads": error_of(lambda: te.MultiheadAttention(H, 4, num_gqa_groups=1, set_parallel_mode=True, tp_size=2)),
        "width": error_of(lambda: row(x)),
        "sequence": error_of(lambda: row(x[:3, : H // 2].contiguous())),
        "quantized sequence": error_of(odd_sequence),
        "whole sequence": error_of(whole_sequence),
        "grouped bias": error_of(lambda: te.GroupedLinear(2, H, H, parallel_mode="row", tp_group=world, device="cpu")),
        "heads alone": str(te.DotProductAttention(4, 8, tp_group=world, softmax_type="learnable").softmax_offset.shape),
        "unreduced": error_of(unreduced),
        "smaller group": error_of(smaller_group),
        "multicast": error_of(lambda: te.Linear(H, F, symmetric_ar_type="multimem_all_reduce")),
        "symmetric": error_of(on_the_cpu) if rank.device == "cpu" else "",
    }


def test_mistakes(two: Ranks) -> None:
    for said in two.run(mistakes, group_timeout=60):
        assert "a group of 2 ranks with tp_size=4" in said["size"]
        assert "a group of 1 ranks with tp_size=2" in said["late size"]
        assert "not in" in said["foreign"]
        assert said["part"].startswith("ArgumentError") and "out_features=65 over 2 ranks" in said["part"]
        assert said["named part"].startswith("RowsError") and "a_weight of 15 rows" in said["named part"]
        assert "1 over 2 ranks" in said["heads"]
        assert f"[*, {H // 2}]" in said["width"]
        assert "a first dimension that the ranks divide" in said["sequence"]
        assert "at most this rank's 4 rows of the sequence (seq_length)" in said["whole sequence"]
        assert said["grouped bias"].startswith("ArgumentError") and "bias=True with tp_size=2" in said["grouped bias"]
        assert "2" in said["heads alone"] and "4" not in said["heads alone"]
        assert "24 rows of a quantized tensor of shape (3, 16, " in said["quantized sequence"]
        assert "a first dimension that the ranks divide" in said["quantized sequence"]
        assert "reduce_amax=False" in said["unreduced"] and "without ranks" in said["smaller group"]
        assert "multicast" in said["multicast"]
        assert two.device != "cpu" or "leave symmetric_ar_type out" in said["symmetric"]


def different(rank: Rank, what: str) -> str:
    sizes = {"rows": (H, F), "width": (H, F + 32 * rank.number), "mode": (H, F), "recipe": (H, F)}[what]
    mode = "row" if what == "mode" and rank.number else "column"
    torch.manual_seed(0)
    module = te.Linear(*sizes, parallel_mode=mode, device=rank.device, **options(rank))
    rows = 8 if what == "rows" and rank.number else 4
    x = torch.randn(rows, module.in_features, device=rank.device)
    with region("current" if what == "recipe" and rank.number else None):
        return error_of(lambda: module(x))


@pytest.mark.four_ranks(what="rows")
@pytest.mark.parametrize("what", ["rows", "width", "mode", "recipe"])
def test_ranks_that_differ(ranks: Ranks, what: str) -> None:
    """All of them say the same, and none hangs."""
    found = ranks.run(different, what)
    assert len(set(found)) == 1 and found[0].startswith("ArgumentError") and re.search("on ranks? 1", found[0])


def anew_on_one(rank: Rank, sequence: bool) -> list[bool]:
    """What the ranks have agreed on, the first one alone does once more, as with an inspector of its own."""
    module = filled("gated", rank, make("gated", rank.device, **options(rank, sequence)))
    ends = cut_ends("gated", sequence)
    x = piece(inputs(ROWS, H, 0), ends[0], rank.number, rank.world).to(rank.device)
    wanted = module(x)
    if rank.number == 0:
        module._calls.clear()
    same = [torch.equal(module(x), wanted)]
    if rank.number == 0 and not sequence:

        class Looks:
            request = frozenset({("fprop", "activation")})

            def inspect(self, *_: Any) -> None:
                pass

        module.inspector = Looks()
    return [*same, torch.equal(module(x), wanted)]


@pytest.mark.parametrize("sequence", [False, True])
def test_a_call_made_anew_on_one_rank(two: Ranks, sequence: bool) -> None:
    """It compares nothing: the others would not come."""
    assert two.run(anew_on_one, sequence) == [[True, True]] * 2


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


def test_joined_parts() -> None:
    """The helper of these tests puts together what it cuts."""
    t = torch.arange(24.0).view(8, 3)
    for cut in ((0, 1), (0, 2), None):
        assert torch.equal(joined([part(t, cut, rank, 2) for rank in range(2)], cut), t)


# ------------------------------------------------------------------------------------------- FP8 from module to module


def attention_in_fp8(rank: Rank, options_of_recipe: dict[str, Any], spread: bool) -> Any:
    recipe = DelayedScaling(amax_history_len=2, **options_of_recipe)
    module = make("wide heads", rank.device, **options(rank) if spread else {})
    if spread:
        filled("wide heads", rank, module)
    ys = []
    for number in range(2):
        x = inputs(ROWS, WIDE, number).to(rank.device)
        x = piece(x, 0 if spread else None, rank.number, rank.world).requires_grad_()
        with te.autocast(recipe=recipe):
            y = module(x)
        y.float().square().sum().backward()
        ys += [y.detach().cpu(), x.grad.cpu()]  # type: ignore[union-attr]
    return ys


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"fp8_dpa": True}, id="dpa", marks=pytest.mark.full),
        pytest.param({"fp8_dpa": True, "fp8_mha": True}, id="mha"),
    ],
)
def test_attention_in_fp8(two: Ranks, more: dict[str, Any]) -> None:
    """Heads of a rank are attended to in FP8; what goes from module to module stays quantized."""
    parts, (whole, _) = two.run(attention_in_fp8, more, True), two.run(attention_in_fp8, more, False)
    for made, one in zip(zip(*parts, strict=True), whole, strict=True):
        assert snr_db(torch.cat(made), one) > 25


def alone_in_another(rank: Rank, kind: str, sequence: bool) -> None:
    module = filled(kind, rank, make(kind, rank.device, **options(rank, sequence)))
    x = piece(inputs(ROWS, H, 0), cut_ends(kind, sequence)[0], rank.number, rank.world).to(rank.device)
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
    first, second = pair.outcomes(alone_in_another, kind, sequence)
    assert (second.how, second.error) == ("raised", "LibraryError") and pair.seconds < 30
    assert (first.how, first.error) == ("raised", "LibraryError"), str(first)
