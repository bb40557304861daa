"""Precision debugging of weights that are spread over ranks: what is seen, counted, changed, and left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from tests.covering import covering
from tests.parallel.debug_sessions import Session
from tests.parallel.ranks import Rank, Ranks
from tests.parallel.steps import alike, by_ranks, counted, error_of, on_cpu, replicated, same, says, sent_to
from tests.parallel.tensor_steps import H, cut_ends, cut_of, inputs, joined, make, piece, shapes, spread
from tests.recipes import region
from tests.tolerances import snr_db

pytest.importorskip("nvdlfw_inspect", reason="the extra `debug` brings nvdlfw_inspect")

ROWS, ODD = 128, 20  # of a sequence
OPERANDS = ["activation", "weight", "gradient"]
TENSORS = [*OPERANDS, "output", "dgrad", "wgrad"]
VALUES = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"]
BLOCKWISE = {"max_blockwise_dynamic_range": {"block_size": 32, "dims": 1}}
CASTS = ["underflows%", "mse", "scale_inv_min", "scale_inv_max", "saturations%", "snr_db"]


def both(kind: str, rank: Rank, sequence: bool = True, group: Any = None) -> tuple[Any, Any]:
    """A layer, and this rank's part of it."""
    whole, module = make(kind, rank.device), spread(kind, rank, sequence, group)
    whole.name = module.name = "layer"
    return whole, module


def step(
    module: Any, kind: str, recipe: str | None, place: Any = (0, 1, 0), sequence: bool = True, rows: int = ROWS
) -> Any:
    """Output and gradients; `place`: this rank, of how many, and which data."""
    number, size, data = place
    ends = cut_ends(kind, sequence) if size > 1 else (None, None)
    device = next(module.parameters()).device
    # Parts have means, maxima and spreads of their own.
    offset = torch.arange(rows)[:, None, None] / rows
    x, dy = ((inputs(rows, width, data, seed) + offset).bfloat16() for seed, width in enumerate(shapes(kind)))
    x = piece(x, ends[0], number, size).to(device).requires_grad_()
    with region(recipe):
        y = module(x)
    y.backward(piece(dy, ends[1], number, size).to(device))
    found = on_cpu({"y": y, "x": x.grad} | {n: p.grad for n, p in module.named_parameters()})
    module.zero_grad()
    return found


# ------------------------------------------------------------------------------------------------- what is counted


def logged(
    rank: Rank, kind: str, recipe: str | None, sequence: bool = True, groups: str = "all", reduce_weights: bool = True
) -> Any:
    """The statistics of a step of a part, and of the whole in one process."""
    from nvdlfw_inspect import api

    found = []
    pairs = [dist.new_group([i, i + 1]) for i in range(0, rank.world, 2)]
    single = [dist.new_group([i]) for i in range(rank.world)][rank.number]
    group = pairs[rank.number // 2]
    te.debug.set_weight_tensor_tp_group_reduce(reduce_weights)
    whole, module = both(kind, rank, sequence, group)
    chosen: dict[str, Any] = {"LogTensorStats": {"stats": [*VALUES, BLOCKWISE], "tensors": TENSORS}}
    if recipe is not None:
        stats = [*CASTS, *(["overflows%"] if recipe == "delayed" else [])]
        chosen["LogFp8TensorStats"] = {"stats": stats, "tensors": OPERANDS}
    try:
        for cut in (True, False):
            with Session(chosen) as session:
                reduced = {"all": None, "own": single, "team": group}[groups] if cut else single
                if reduced is not None:
                    api.set_tensor_reduction_group(reduced)
                for number in range(2):
                    place = (rank.number % 2, 2, rank.number // 2 + number) if cut else (0, 1, number)
                    step(module if cut else whole, kind, recipe, place, sequence)
                    session.step()
            found.append(session.seen)
    finally:
        te.debug.set_weight_tensor_tp_group_reduce(True)
    return found


def exact(kind: str, recipe: str | None, name: str) -> bool:
    """Whether a rank's part is quantized as it is in the whole: with the scale of the whole."""
    tensor = name.split("_")[1]
    if tensor in ("output", "dgrad", "wgrad"):
        return False
    values = "blockwise" in name or any(name == f"layer_{tensor}_{stat}" for stat in VALUES)
    gathered = "activation" if kind == "column" else "gradient"
    return values or tensor == gathered or recipe == "delayed"


@covering(kind=["column", "row"], recipe=[None, "delayed", "current", "block", "mxfp8"])
@by_ranks("two")
def test_statistics_are_those_of_the_whole(rank: Rank, kind: str, recipe: str | None) -> None:
    """Of every tensor, by every rank: sums, means, extremes, shares and deviations."""
    seen, one = logged(rank, kind, recipe)
    assert seen.keys() == one.keys() and len(seen) >= 2 * len(TENSORS) * len(VALUES)
    for (name, iteration), value in seen.items():
        wanted = one[name, iteration]
        if exact(kind, recipe, name):
            assert value == pytest.approx(wanted, rel=1e-6, abs=1e-12), name
        elif name.rpartition("_")[2] in ("norm", "std", "amax"):  # products, and columns scaled by the rank
            assert value == pytest.approx(wanted, rel=0.1), name


@pytest.mark.parametrize("groups", ["own", "team"])
def test_a_group_given_by_hand(two: Ranks, groups: str) -> None:
    """Weights are reduced over the ranks that have parts of them, whatever the group is."""
    (first, one), (second, _) = two.run(logged, "column", "current", True, groups)
    name = "layer_activation_l1_norm", 0
    total = first[name] if groups == "team" else first[name] + second[name]
    assert total == pytest.approx(one[name], rel=1e-6) and first[name] > 0
    assert (first[name] == second[name]) == (groups == "team")
    for name in (("layer_weight_l1_norm", 1), ("layer_weight_std", 1), ("layer_weight_max", 0)):
        assert first[name] == second[name] == pytest.approx(one[name], rel=1e-6)


def test_weights_of_the_rank_alone(two: Ranks) -> None:
    (first, one), (second, _) = two.run(logged, "row", None, True, "all", False)
    name = "layer_weight_l1_norm", 0
    assert first[name] + second[name] == pytest.approx(one[name], rel=1e-6) and first[name] != second[name]


@pytest.mark.parametrize("kind", ["column", "row"])
@by_ranks("two")
def test_without_sequence_parallelism(rank: Rank, kind: str) -> None:
    """What all ranks have is counted by each: sums double, shares and deviations do not."""
    double = {"activation", "dgrad"} if kind == "column" else {"output", "gradient"}
    seen, one = logged(rank, kind, None, False)
    for tensor in OPERANDS:
        times = 2 if tensor in double else 1
        for stat, factor in (("l1_norm", times), ("l2_norm", times**0.5), ("mean", 1), ("std", 1), ("max", 1)):
            name = f"layer_{tensor}_{stat}", 0
            assert seen[name] == pytest.approx(factor * one[name], rel=1e-5), name


@pytest.mark.more
def test_teams_beside_each_other(ranks_of: Any) -> None:
    """Two data-parallel pairs: activations of both, the weight of one."""
    found = ranks_of(4, "cpu").run(logged, "column", None)
    one = found[0][1]
    seen = found[0][0]
    assert all(f[0] == seen for f in found)
    assert seen["layer_weight_l1_norm", 0] == pytest.approx(one["layer_weight_l1_norm", 0], rel=1e-6)
    both = one["layer_activation_l1_norm", 0] + one["layer_activation_l1_norm", 1]  # the data of the other pair
    assert seen["layer_activation_l1_norm", 0] == pytest.approx(both, rel=1e-6)
    assert seen["layer_activation_cur_amax", 0] == max(one["layer_activation_cur_amax", i] for i in range(2))


def figures(seen: Any) -> dict[str, tuple[Any, ...]]:
    return {
        s.name: (s.kind and s.kind.words, *map(float, (*s.count, *s.amax, *s.underflow, *s.snr, *s.scale)))
        for s in seen.report().series
    }


def reported(rank: Rank, kind: str, recipe: str, rows: int) -> Any:
    whole, module = both(kind, rank)
    with te.debug.inspect(module, group=dist.group.WORLD) as seen:
        step(module, kind, recipe, (rank.number, rank.world, 0), rows=rows)
    with te.debug.inspect(whole) as alone:
        step(whole, kind, recipe, rows=rows)
    return figures(seen), figures(alone), str(seen), str(te.precision_report(module))


@covering(
    kind=["column", "row"],  # of which the first gathers x, the second a gradient
    recipe=["delayed", "current", "block tiled x", "block tiled grad", "block", "mxfp8"],
)
@by_ranks("two")
def test_the_report_is_that_of_the_whole(rank: Rank, kind: str, recipe: str) -> None:
    gathered = "activation" if kind == "column" else "gradient"
    seen, one, _, _ = reported(rank, kind, recipe, ROWS)
    names = [name for name in one if f" {gathered} " in name]
    assert names and seen.keys() == one.keys()
    for name in names:
        assert seen[name][0] == one[name][0] and seen[name][1:] == pytest.approx(one[name][1:], rel=1e-6)


@pytest.mark.parametrize("kind", ["column", "row"])
@by_ranks("two")
def test_what_is_quantized_once_it_is_whole(rank: Rank, kind: str) -> None:
    """It is seen in high precision; reports say so."""
    name = "activation (wgrad)" if kind == "column" else "gradient (dgrad, wgrad)"
    seen, _, text, facts = reported(rank, kind, "mxfp8", ODD)
    found = next(values for key, values in seen.items() if key.endswith(name))
    assert found[0] == "float8_e4m3 1x32 once gathered" and found[2] > 0 and all(v != v for v in found[3:])
    says(text, "a rank's rows are no whole blocks")
    says(facts, "in bfloat16, and quantized whole")


# ------------------------------------------------------------------------------------------------- what is changed

CHANGES: dict[str, Any] = {
    "per tensor": {"PerTensorScaling": {"gemms": ["fprop", "dgrad", "wgrad"], "tensors": ["activation", "gradient"]}},
    "one direction": {"PerTensorScaling": {"gemms": ["fprop", "dgrad"], "tensors": ["activation", "gradient"]}},
    "fake": {"FakeQuant": {"gemms": ["fprop", "wgrad"], "tensors": OPERANDS[:2], "quant_format": "MXFP8E4M3"}},
    "off": {"DisableQuantizationLayer": {}},
    "fprop off": {"DisableQuantizationGEMM": {"gemms": ["fprop"]}},
    "wgrad off": {"DisableQuantizationGEMM": {"gemms": ["wgrad"]}},
    "backward off": {"DisableQuantizationGEMM": {"gemms": ["dgrad", "wgrad"]}},
}


def changed(rank: Rank, kind: str, recipe: str, change: str, rows: int = ROWS) -> Any:
    """A step with features of this rank's part, of the whole, and what the first sends."""
    whole, module = both(kind, rank)
    with Session(CHANGES[change]):
        one = step(whole, kind, recipe, rows=rows)
        with counted() as calls:
            found = step(module, kind, recipe, (rank.number, rank.world, 0), rows=rows)
    return found, one, calls


@covering(change=CHANGES, kind=["column", "row"], rows=[ROWS, ODD])
def test_changes_of_the_whole(two: Ranks, kind: str, change: str, rows: int) -> None:
    """What features put in the place of parts makes the results that it makes of the whole."""
    per_tensor = "PerTensorScaling" in CHANGES[change]
    alike = "y" if kind == "column" else "x"  # the result of what is gathered alone
    for recipe in ("delayed",) if per_tensor else ("delayed", "current", "mxfp8"):
        found = two.run(changed, kind, recipe, change, rows)
        one = found[0][1]
        made = {n: torch.cat([f[0][n] for f in found], d) for n, d in zip("xy", cut_ends(kind, True), strict=True)}
        made["weight"] = joined([f[0]["weight"] for f in found], cut_of(kind, "weight"))
        # Other tensors than what is gathered have the rank's own scale, unless it is delayed: two roundings differ,
        # of which the coarser, of gradients to 2 bits of mantissa, leaves 25 dB each and 22 between both. A GPU adds
        # FP8 products to 52 dB only where it adds fast, twice here (the whole's and a part's), before bf16 rounds both.
        close = 45 if two.device == "cpu" else 40
        for name in made:
            own = recipe != "delayed" or (per_tensor and name != alike)
            assert snr_db(made[name], one[name]) > (22 if own else close), (recipe, name)


@pytest.mark.parametrize("kind", ["column", "row"])
@by_ranks("two")
def test_bytes_of_what_is_changed(rank: Rank, kind: str) -> None:
    """FP8 parts travel as a byte an element, what a feature left in high precision as two."""
    elements = ROWS * shapes(kind)[kind == "row"]
    expected = {"per tensor": [1, 1], "off": [2, 2], "fprop off": [2, 1], "wgrad off": [1, 2], "backward off": [1, 2]}
    if kind == "row":  # what dgrad had in bf16, or in FP8, serves wgrad
        expected = {"per tensor": [1, 1], "off": [2], "fprop off": [1], "wgrad off": [1, 2], "backward off": [2]}
    for change, sizes in expected.items():
        _, _, calls = changed(rank, kind, "delayed", change)
        sent = [size / elements for size in sent_to("all_gather", calls) if size >= elements]
        assert sent == sizes, change


def the_same(rank: Rank, kind: str, recipe: str) -> Any:
    """A feature that quantizes parts as the layer would have: (the plain step, this one, what it was shown)."""
    place, twice = (rank.number, rank.world, 0), [both(kind, rank)[1] for _ in range(2)]
    plain = step(twice[0], kind, recipe, place)
    with Session({"Same": {"gemms": ["fprop", "dgrad", "wgrad"], "tensors": ["activation", "gradient"]}}):
        from nvdlfw_inspect.registry import Registry

        found = step(twice[1], kind, recipe, place)
        feature = Registry.data["transformer_engine"].features["Same"]
        told = feature.inspect_tensor.__globals__["seen"]
    assert all(group is dist.group.WORLD and size == rank.world for _, group, size, _ in told)
    return plain, found, {(name, shape) for name, _, _, shape in told}


@covering(kind=["column", "row"], recipe=["current", "delayed", "mxfp8", "block"])
@by_ranks("two")
def test_the_default_quantizer_of_a_part(rank: Rank, kind: str, recipe: str) -> None:
    """It agrees with the other ranks on a scale, as the layer does."""
    plain, found, told = the_same(rank, kind, recipe)
    assert same(found, plain) and len(told) == 2


@pytest.mark.parametrize("kind", ["column", "row"])
@by_ranks("two")
def test_parts_of_nvfp4(rank: Rank, kind: str) -> None:
    """Quantized by the part's own maximum they go on as values; a transformed gradient beside them is refused."""
    plain, found, _ = the_same(rank, kind, "nvfp4 no rht")
    assert all(snr_db(found[n], plain[n]) > (15 if n in "xy" else 8) for n in plain)
    if kind == "column":
        says(error_of(lambda: the_same(rank, kind, "nvfp4")), "inspect wgrad", "NVFP4 turns both")


@by_ranks("two")
def test_ranks_with_other_features(rank: Rank) -> None:
    _, module = both("column", rank)
    with Session({"DisableQuantizationGEMM": {"gemms": ["fprop"] if rank.number else ["wgrad"]}}):
        said = error_of(lambda: step(module, "column", "current", (rank.number, rank.world, 0)))
    says(said, "activation of fprop left plain", "gradient of wgrad left plain")
    assert alike(said)


# ------------------------------------------------------------------------------------------- batches of one's own


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randn(16, H, generator=generator) * (rank + 1)).bfloat16()


def of_batches(rank: Rank, alone: bool) -> Any:
    """What each rank writes; the last rank does not run the second layer."""
    from nvdlfw_inspect import api

    groups = [dist.new_group([i]) for i in range(rank.world)]
    with Session({"LogTensorStats": {"stats": ["l1_norm", "max"], "tensors": ["activation", "weight"]}}) as session:
        if alone:
            api.set_tensor_reduction_group(groups[rank.number])
        layers = [te.Linear(H, H, device=rank.device, name=f"layer_{i}") for i in range(2)]
        for layer in layers if rank.number < rank.world - 1 else layers[:1]:
            layer(batch(rank.number, 0).float().to(rank.device))
        session.step()
    return session.seen


@pytest.mark.four_ranks(alone=False)
@pytest.mark.parametrize("alone", [False, True])
@by_ranks()
def test_batches_of_all_ranks(rank: Rank, alone: bool) -> None:
    """Together, as each rank writes, also where some do not run a layer; or of a group given by hand."""
    seen = of_batches(rank, alone)
    batches = [batch(i, 0).float() for i in ([rank.number] if alone else range(rank.world))]
    norms = [b.abs().sum().item() for b in batches]
    assert seen["layer_0_activation_l1_norm", 0] == pytest.approx(sum(norms), rel=1e-5)
    assert seen["layer_0_activation_max", 0] == max(b.max().item() for b in batches)
    if rank.number == rank.world - 1:
        assert ("layer_1_activation_l1_norm", 0) not in seen
    elif not alone:
        assert seen["layer_1_activation_l1_norm", 0] == pytest.approx(sum(norms[:-1]), rel=1e-5)


@by_ranks("pair")
def test_schedules_over_ranks(rank: Rank) -> None:
    """Each feature logs in its own iterations, and what is logged is that of all ranks."""
    features = {
        "LogTensorStats": {"stats": ["max"], "tensors": ["activation"], "freq": 3},
        "LogFp8TensorStats": {"stats": ["scale_inv_max"], "tensors": ["activation"], "freq": 4, "start_step": 1},
    }
    layer = te.Linear(H, H, params_dtype=torch.bfloat16, device=rank.device, name="layer")
    with Session(features) as session:
        for number in range(9):
            with region("current"), torch.no_grad():
                layer(batch(rank.number, number).to(rank.device))
            session.step()
    top = {number: max(batch(i, number).float().max().item() for i in range(2)) for number in range(9)}
    found = {key: value for key, value in session.seen.items() if key[0] == "layer_activation_max"}
    assert found == {("layer_activation_max", number): top[number] for number in (0, 3, 6)} and alike(session.seen)
    assert [number for name, number in session.seen if name == "layer_activation_scale_inv_max"] == [4, 8]


@by_ranks("two")
def test_statistics_in_ddp(rank: Rank) -> None:
    """Those of all ranks' batches (training goes on as without them: test_ways.py)."""
    features: dict[str, Any] = {"LogTensorStats": {"stats": ["l1_norm", "max"], "tensors": OPERANDS}}
    features["LogFp8TensorStats"] = {"stats": ["scale_inv_max"], "tensors": OPERANDS}
    layer = te.Linear(H, H, params_dtype=torch.bfloat16, device=rank.device, name="layer")
    with Session(features) as session:
        model = replicated(layer, rank)
        for number in range(2):
            with region("current"):
                out = model(batch(rank.number, number).to(rank.device))
            out.float().square().mean().backward()
            session.step()
    seen = session.seen
    assert len(seen) == 2 * len(OPERANDS) * 3 and alike(seen)
    for number in range(2):
        batches = [batch(i, number).float() for i in range(rank.world)]
        total, top = sum(b.abs().sum().item() for b in batches), max(b.abs().max().item() for b in batches)
        assert seen["layer_activation_l1_norm", number] == pytest.approx(total, rel=1e-5)
        assert seen["layer_activation_max", number] == max(b.max().item() for b in batches)
        assert seen["layer_activation_scale_inv_max", number] == pytest.approx(top / 448, rel=0.01)
