"""Precision debugging of weights that are spread over ranks: what is seen, counted, changed, and left alone."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from tests.covering import covering
from tests.parallel.ranks import Rank, Ranks
from tests.parallel.tensor_steps import (
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
    shapes,
)
from tests.recipes import KINDS, region
from tests.tolerances import snr_db
from tests.torch import planted

pytest.importorskip("nvdlfw_inspect", reason="the extra `debug` brings nvdlfw_inspect")

ROWS, ODD = 128, 20  # of a sequence
OPERANDS = ["activation", "weight", "gradient"]
TENSORS = [*OPERANDS, "output", "dgrad", "wgrad"]
VALUES = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"]
BLOCKWISE = {"max_blockwise_dynamic_range": {"block_size": 32, "dims": 1}}
CASTS = ["underflows%", "mse", "scale_inv_min", "scale_inv_max", "saturations%", "snr_db"]
FEATURE = '''
from nvdlfw_inspect.registry import Registry, api_method
from te_torch.debug.features.api import TEConfigAPIMapper


@Registry.register_feature(namespace="transformer_engine")
class Same(TEConfigAPIMapper):
    """Quantizes as the layer would have."""

    @api_method
    def modify_tensor_enabled(self, config, layer_name, gemm, tensor_name, iteration):
        return True, iteration + 1

    @api_method
    def modify_tensor(self, config, layer_name, gemm, tensor_name, tensor, default_quantizer, iteration, **others):
        return tensor if default_quantizer is None else default_quantizer(tensor)

    @api_method
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        return True, iteration + 1

    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, iteration, tp_group, tensor, tp_size=1):
        seen.append((tensor_name, tp_group, tp_size, tuple(tensor.shape)))


seen = []
'''


class Session:
    """nvdlfw_inspect with a configuration, on a rank."""

    def __init__(self, chosen: dict[str, Any]) -> None:
        self.chosen, self.seen = chosen, {}

    def __enter__(self) -> Session:
        from nvdlfw_inspect import api

        from tests.debug.conftest import FEATURES, config

        folder = tempfile.mkdtemp()
        Path(folder, "same.py").write_text(FEATURE)

        if self.chosen:
            api.initialize(config(**self.chosen), [str(FEATURES), folder], log_dir=folder, tb_writer=self)
        return self

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.seen[name, iteration] = value

    def __exit__(self, *error: object) -> None:
        from nvdlfw_inspect import api

        api.end_debug()


def whole_and_part(kind: str, rank: Rank, sequence: bool, group: Any = None) -> tuple[Any, Any]:
    """A layer, and this rank's part of it."""
    group = group or dist.group.WORLD
    size, number = dist.get_world_size(group), dist.get_rank(group)
    whole = make(kind, rank.device)
    module = make(kind, rank.device, tp_group=group, tp_size=size, sequence_parallel=sequence)
    whole.name = module.name = "layer"
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for parameter, p in module.named_parameters():
            p.copy_(part(values[parameter], cut_of(kind, parameter), number, size))
    return whole, module


def step(
    module: Any, kind: str, recipe: str | None, ends: tuple[Any, Any], rows: int = ROWS, place: Any = (0, 1, 0)
) -> Any:
    """Output and gradients; `place`: this rank, of how many, and which data."""
    wide, out = shapes(kind)
    device = next(module.parameters()).device
    number, size, data = place
    # Parts have means, maxima and spreads of their own.
    offset = torch.arange(rows)[:, None, None] / rows
    x, dy = ((inputs(rows, width, data, seed) + offset).bfloat16() for seed, width in ((0, wide), (1, out)))
    x = piece(x, ends[0], number, size).to(device).requires_grad_()
    with region(recipe):
        y = module(x)
    y.backward(piece(dy, ends[1], number, size).to(device))
    found = {"y": y.detach().cpu(), "x": x.grad.cpu()}
    found |= {n: p.grad.cpu() for n, p in module.named_parameters()}
    module.zero_grad()
    return found


# ------------------------------------------------------------------------------------------- what is left alone

LOOKS: dict[str, Any] = {
    "statistics": {
        "LogTensorStats": {"stats": VALUES, "tensors": TENSORS},
        "LogFp8TensorStats": {"stats": ["underflows%"], "tensors": OPERANDS},
    },
    "files": {"DumpTensors": {"high_precision_tensor": True, "quantized_tensor": True, "tensors": TENSORS}},
}


def unchanged(rank: Rank, kind: str, recipe: str | None, sequence: bool, look: str, rows: int) -> Any:
    """Two steps, plain and looked at: the second of each, and the collectives in it."""
    from nvdlfw_inspect import api

    found: list[Any] = []
    features = {name: keys for name, keys in LOOKS.get(look, {}).items() if recipe != "nvfp4" or "Fp8" not in name}
    for chosen in ({}, features):
        _, module = whole_and_part(kind, rank, sequence)
        with Session(chosen):
            looks = te.debug.inspect(module) if look == "inspect" and found else None
            for number in range(2):
                torch.manual_seed(number)
                if looks is not None and not number:
                    looks.__enter__()
                with counted() as calls:
                    result = step(module, kind, recipe, cut_ends(kind, sequence), rows, (rank.number, rank.world, 0))
                if chosen:
                    api.step()
            if looks is not None:
                looks.__exit__(None, None, None)
        found.append((result, sorted(calls)))
    return found


@covering(
    recipe=[None, *KINDS],
    case=["inspect", "inspect odd", "statistics", "statistics odd", "files"],
    kind=["column", "row", "norm column", "gated", "layer"],
)
def test_a_step_that_is_looked_at(two: Ranks, recipe: str | None, case: str, kind: str) -> None:
    """Bit for bit the plain one, and as many bytes travel."""
    look, _, odd = case.partition(" ")
    for (plain, bytes_of_plain), (found, sent) in two.run(unchanged, kind, recipe, True, look, ODD if odd else ROWS):
        assert [n for n in plain if not torch.equal(plain[n], found[n])] == []
        assert sent == bytes_of_plain and any(name == "all_gather" for name, _ in sent)


# ------------------------------------------------------------------------------------------------- what is counted


def logged(rank: Rank, kind: str, recipe: str | None, sequence: bool, groups: str, reduce_weights: bool) -> Any:
    """The statistics of a step of a part, and of the whole in one process."""
    from nvdlfw_inspect import api

    found = []
    pairs = [dist.new_group([i, i + 1]) for i in range(0, rank.world, 2)]
    single = [dist.new_group([i]) for i in range(rank.world)][rank.number]
    group = pairs[rank.number // 2]
    te.debug.set_weight_tensor_tp_group_reduce(reduce_weights)
    whole, module = whole_and_part(kind, rank, sequence, group)
    chosen: dict[str, Any] = {"LogTensorStats": {"stats": [*VALUES, BLOCKWISE], "tensors": TENSORS}}
    if recipe is not None:
        stats = [*CASTS, *(["overflows%"] if recipe == "delayed" else [])]
        chosen["LogFp8TensorStats"] = {"stats": stats, "tensors": OPERANDS}
    try:
        for spread in (True, False):
            with Session(chosen) as session:
                reduced = {"all": None, "own": single, "team": group}[groups] if spread else single
                if reduced is not None:
                    api.set_tensor_reduction_group(reduced)
                for number in range(2):
                    place = (rank.number % 2, 2, rank.number // 2 + number) if spread else (0, 1, number)
                    ends = cut_ends(kind, sequence) if spread else (None, None)
                    step(module if spread else whole, kind, recipe, ends, place=place)
                    api.step()
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
def test_statistics_are_those_of_the_whole(two: Ranks, kind: str, recipe: str | None) -> None:
    """Of every tensor, by every rank: sums, means, extremes, shares and deviations."""
    for seen, one in two.run(logged, kind, recipe, True, "all", True):
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
    (first, one), (second, _) = two.run(logged, "column", "current", True, groups, True)
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
def test_without_sequence_parallelism(two: Ranks, kind: str) -> None:
    """What all ranks have is counted by each: sums double, shares and deviations do not."""
    double = {"activation", "dgrad"} if kind == "column" else {"output", "gradient"}
    for seen, one in two.run(logged, kind, None, False, "all", True):
        for tensor in OPERANDS:
            times = 2 if tensor in double else 1
            for stat, factor in (("l1_norm", times), ("l2_norm", times**0.5), ("mean", 1), ("std", 1), ("max", 1)):
                name = f"layer_{tensor}_{stat}", 0
                assert seen[name] == pytest.approx(factor * one[name], rel=1e-5), name


@pytest.mark.more
def test_teams_beside_each_other(ranks_of: Any) -> None:
    """Two data-parallel pairs: activations of both, the weight of one."""
    found = ranks_of(4, "cpu").run(logged, "column", None, True, "all", True)
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
    whole, module = whole_and_part(kind, rank, True)
    with te.debug.inspect(module, group=dist.group.WORLD) as seen:
        step(module, kind, recipe, cut_ends(kind, True), rows, (rank.number, rank.world, 0))
    with te.debug.inspect(whole) as alone:
        step(whole, kind, recipe, (None, None), rows)
    return figures(seen), figures(alone), str(seen), str(te.precision_report(module))


@covering(
    kind=["column", "row"],  # of which the first gathers x, the second a gradient
    recipe=["delayed", "current", "block tiled x", "block tiled grad", "block", "mxfp8"],
)
def test_the_report_is_that_of_the_whole(two: Ranks, kind: str, recipe: str) -> None:
    gathered = "activation" if kind == "column" else "gradient"
    for seen, one, _, _ in two.run(reported, kind, recipe, ROWS):
        names = [name for name in one if f" {gathered} " in name]
        assert names and seen.keys() == one.keys()
        for name in names:
            assert seen[name][0] == one[name][0] and seen[name][1:] == pytest.approx(one[name][1:], rel=1e-6)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_what_is_quantized_once_it_is_whole(two: Ranks, kind: str) -> None:
    """It is seen in high precision; reports say so."""
    name = "activation (wgrad)" if kind == "column" else "gradient (dgrad, wgrad)"
    for seen, _, text, facts in two.run(reported, kind, "mxfp8", ODD):
        found = next(values for key, values in seen.items() if key.endswith(name))
        assert found[0] == "float8_e4m3 1x32 once gathered" and found[2] > 0 and all(v != v for v in found[3:])
        assert "a rank's rows are no whole blocks" in text
        assert "in bfloat16, and quantized whole" in facts


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


def changed(rank: Rank, kind: str, recipe: str, change: str, rows: int) -> Any:
    """A step with features of the whole, of this rank's part, and what that sends besides."""
    whole, module = whole_and_part(kind, rank, True)
    with Session(CHANGES[change]):
        one = step(whole, kind, recipe, (None, None), rows)
        with counted() as calls:
            found = step(module, kind, recipe, cut_ends(kind, True), rows, (rank.number, rank.world, 0))
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
def test_bytes_of_what_is_changed(two: Ranks, kind: str) -> None:
    """FP8 parts travel as a byte an element, what a feature left in high precision as two."""
    wide, out = shapes(kind)
    elements = ROWS // 2 * 2 * (wide if kind == "column" else out)
    expected = {"per tensor": [1, 1], "off": [2, 2], "fprop off": [2, 1], "wgrad off": [1, 2], "backward off": [1, 2]}
    if kind == "row":  # what dgrad had in bf16, or in FP8, serves wgrad
        expected = {"per tensor": [1, 1], "off": [2], "fprop off": [1], "wgrad off": [1, 2], "backward off": [2]}
    for change, sizes in expected.items():
        for _, _, calls in two.run(changed, kind, "delayed", change, ROWS):
            sent = [size / elements for name, size in calls if name == "all_gather" and size >= elements]
            assert sent == sizes, change


def the_same(rank: Rank, kind: str, recipe: str) -> Any:
    """A feature of a user's that quantizes parts as the layer would have; the plain step; what the feature was told."""
    _, module = whole_and_part(kind, rank, True)
    ends, place = cut_ends(kind, True), (rank.number, rank.world, 0)
    plain = step(module, kind, recipe, ends, ROWS, place)
    _, module = whole_and_part(kind, rank, True)
    both = {"gemms": ["fprop", "dgrad", "wgrad"], "tensors": ["activation", "gradient"]}
    with Session({"Same": both}):
        from nvdlfw_inspect.registry import Registry

        found = step(module, kind, recipe, ends, ROWS, place)
        feature = Registry.data["transformer_engine"].features["Same"]
        told = feature.inspect_tensor.__globals__["seen"]
    assert all(group is dist.group.WORLD and size == rank.world for _, group, size, _ in told)
    return plain, found, {(name, shape) for name, _, _, shape in told}


@covering(kind=["column", "row"], recipe=["current", "delayed", "mxfp8", "block"])
def test_the_default_quantizer_of_a_part(two: Ranks, kind: str, recipe: str) -> None:
    """It agrees with the other ranks on a scale, as the layer does."""
    for plain, found, told in two.run(the_same, kind, recipe):
        assert [n for n in plain if not torch.equal(plain[n], found[n])] == []
        assert len(told) == 2


def refused(rank: Rank) -> str:
    return error_of(lambda: the_same(rank, "column", "nvfp4"))


@pytest.mark.parametrize("kind", ["column", "row"])
def test_parts_of_nvfp4(two: Ranks, kind: str) -> None:
    """Quantized by the part's own maximum they go on as values; a transformed gradient beside them is refused."""
    for plain, found, _ in two.run(the_same, kind, "nvfp4 no rht"):
        assert all(snr_db(found[n], plain[n]) > (15 if n in "xy" else 8) for n in plain)
    for said in two.run(refused) if kind == "column" else ():
        assert "inspect wgrad" in said and "NVFP4 turns both" in said


def on_one_rank(rank: Rank) -> str:
    _, module = whole_and_part("column", rank, True)
    chosen = {"DisableQuantizationGEMM": {"gemms": ["fprop"] if rank.number else ["wgrad"]}}
    with Session(chosen):
        with pytest.raises(Exception) as caught:
            step(module, "column", "current", cut_ends("column", True), ROWS, (rank.number, rank.world, 0))
    return str(caught.value)


def test_ranks_with_other_features(two: Ranks) -> None:
    first, second = two.run(on_one_rank)
    assert first == second and "activation of fprop left plain" in first and "gradient of wgrad left plain" in first


# --------------------------------------------------------------------------------------------------------- bisect


class Pair(torch.nn.Module):
    """A block whose ranks have parts of the sequence."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        given = {"params_dtype": torch.bfloat16, "device": rank.device, **options(rank)}
        torch.manual_seed(rank.number)
        self.up = te.LayerNormLinear(H, 2 * H, parallel_mode="column", **given)
        self.down = te.Linear(2 * H, H, parallel_mode="row", **given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return made


def bisected(rank: Rank, recipe: str, rows: int) -> Any:
    """A fault planted in one layer: the parts of its input saturate."""
    model = torch.nn.Sequential(*[Pair(rank) for _ in range(3)])
    model[1].up.inspector = planted.overflowing()
    x = piece(inputs(rows, H, 0), 0, rank.number, rank.world).to(rank.device)

    def run(net: torch.nn.Module) -> torch.Tensor:
        with region(recipe):
            loss = net(x).float().square().mean() * (1 + rank.number)  # each rank is off by something else
        loss.backward()
        return loss

    found = te.debug.bisect(run, model, progress=False)
    return found.layers, [culprit.gemms for culprit in found.culprits], found.runs


@pytest.mark.parametrize("recipe", ["current", pytest.param("block", marks=pytest.mark.full)])
def test_bisect(two: Ranks, recipe: str) -> None:
    """All ranks run the same, and name the same."""
    first, second = two.run(bisected, recipe, ROWS)
    assert first == second and first[0] == ["1.up"]


def seen_by_one(rank: Rank) -> Any:
    """The same, where only the last rank's result tells of it."""
    model = torch.nn.Sequential(*[Pair(rank) for _ in range(3)])
    model[1].up.inspector = planted.overflowing()
    x = piece(inputs(ROWS, H, 0), 0, rank.number, rank.world).to(rank.device)

    def run(net: torch.nn.Module) -> torch.Tensor:
        with region("current"):
            loss = net(x).float().square().mean()
        loss.backward()
        for p in net.parameters() if rank.number == 0 else ():
            p.grad = torch.ones_like(p)  # whatever the precision
        return loss

    found = te.debug.bisect(run, model, progress=False)
    return found.layers, found.verdict, found.runs


def test_the_worst_rank_decides(two: Ranks) -> None:
    """A rank that finds nothing wrong with its own result searches on with the others."""
    first, second = two.run(seen_by_one)
    assert first == second and first[:2] == (["1.up"], "found")
