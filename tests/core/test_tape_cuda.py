"""What a recorded layer does on a GPU, without one: a replay launches what the layer does, on the memory that it has.

Each case runs interpreted and replayed, from other addresses each time, on a machine that notes all it is asked
(`fake_cuda.py`); `tape_proof.py` says what is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from te_core import dtypes
from te_core.layers.residual import BranchNeeds
from te_core.ops.softmax import Band
from te_core.runtime import ByteAllocator, Runtime
from te_core.tape import taped
from te_core.tape.taped import Taped
from tests.core import fake_cudnn, tape_cases
from tests.core.fake_cuda import B200, Make
from tests.core.tape_cases import ALL, MLP, RECIPES, STREAMS, Linear, needed
from tests.core.tape_more_cases import Attention, L2Norm, Norm, Residual, Rope, Softmax
from tests.core.tape_proof import Round, Tapes, compare, proved, run
from tests.covering import covering

FP32 = dtypes.float32
KINDS = (None, "delayed", "current", "block", "mxfp8", "nvfp4")
Build = Callable[[Runtime], Round]


def linears(recipe: str | None) -> Iterator[Linear]:
    """A linear with all that its products depend on, one at a time."""
    base = Linear(recipe)
    yield from (replace(base, needs=needs) for needs in needed())
    for changes in (
        {"bias": False},
        {"rows": 13},
        {"rows": 1},
        {"rows": 0},
        {"k": 70, "n": 90},
        {"dtype": FP32, "weight_dtype": FP32},
        {"sink": "fp32"},
        {"sink": "fp32+"},
        {"sink": "bf16"},
        {"sink": "bf16+"},
        {"rows": 512, "k": 512, "n": 512},
    ):
        yield replace(base, **changes)
    if recipe is None:
        return
    yield from (replace(base, weight=copies, needs=needs) for copies in ("rows", "both") for needs in (ALL, _FROZEN))
    for changes in (
        {"ready": "both"},
        {"ready": "rows", "needs": _FROZEN},
        {"x": "rows"},
        {"x": "both", "rows": 512, "k": 512, "n": 512},
        {"dy": "rows"},
        {"dy": "both", "rows": 512, "k": 512, "n": 512},
        {"out": True},
        {"grad": True},
        {"original": recipe != "delayed"},
        {"recorded": False},
        {"nonfinite": True},
    ):
        yield replace(base, **changes)


_FROZEN = ALL._replace(input=False)


def behind_norms(recipe: str | None) -> Iterator[Linear]:
    """A linear behind a norm."""
    for kind in ("LayerNorm", "RMSNorm"):
        base = Linear(recipe, normed=kind)
        yield from (replace(base, again=again, return_norm=also) for again in (False, True) for also in (False, True))
    yield from (replace(base, stream=stream) for stream in STREAMS.values())
    yield replace(base, stream=STREAMS["branch"], return_norm=True, rows=14)


def mlps(recipe: str | None) -> Iterator[MLP]:
    """A norm and an MLP."""
    base = MLP(recipe)
    large = replace(base, rows=2048, hidden=256, inner=512)
    yield from (replace(base, needs=needs) for needs in needed())
    yield from (replace(base, stream=stream) for stream in STREAMS.values())
    yield from (replace(large, release=release) for release in (False, True))
    yield from (replace(large, release=release, checkpoint=True) for release in (False, True))
    for changes in (
        {"bias": False, "kind": "RMSNorm"},
        {"rows": 14},
        {"rows": 0},
        {"activation": "swiglu"},
        {"activation": "srelu"},
        {"again": True},
        {"return_norm": True},
        {"sink": "fp32+"},
        {"sink": "bf16"},
    ):
        yield replace(base, **changes)
    yield replace(large, activation="swiglu")
    yield replace(large, again=True, sink="fp32+")
    if recipe is not None:
        yield from (replace(base, weight=copies, checkpoint=again) for copies in ("rows", "both") for again in (0, 1))
        yield from (replace(base, ready="both", checkpoint=again) for again in (False, True))
        yield replace(base, checkpoint=True, recorded=False)


def crooked(recipe: str | None) -> Iterator[Build]:
    """Inputs off the boundaries of vectors, each alone. (Of FP8 a product refuses a crooked bias.)"""
    only = (1, 2, 4, 5, 6) if recipe in (None, "mxfp8", "nvfp4") else (1, 4, 6)
    yield from (Linear(recipe, shift=shift, only=one) for shift in (2, 4, 8, 16) for one in only)
    yield from (MLP(recipe, shift=shift, only=one) for shift, one in ((2, 1), (4, 2), (8, 3), (16, 4)))
    if recipe in (None, "mxfp8", "nvfp4"):
        yield from (Linear(recipe, shift=shift) for shift in (2, 4, 8, 16))
        yield MLP(recipe, shift=2)


GROUPS: dict[str, Callable[[str | None], Iterator[Any]]] = {
    "linear": linears,
    "norm and linear": behind_norms,
    "mlp": mlps,
    "crooked": crooked,
}


#: Each group and each recipe, so paired that faults of one show.
SHOWN = {
    ("linear", "current"),
    ("linear", "delayed"),
    ("norm and linear", "nvfp4"),
    ("mlp", None),
    ("mlp", "mxfp8"),
    ("crooked", "block"),
}
assert {group for group, _ in SHOWN} == set(GROUPS) and {recipe for _, recipe in SHOWN} == set(KINDS)


@pytest.mark.parametrize(
    ("group", "recipe"),
    [pytest.param(*pair, marks=[] if pair in SHOWN else pytest.mark.full) for pair in product(GROUPS, KINDS)],
)
def test_layers_with_products(make: Make, group: str, recipe: str | None) -> None:
    machine = make()
    for case in GROUPS[group](recipe):
        proved(machine, case)


@pytest.mark.parametrize("recipe", [None, "delayed", "current", "block", "current dequantized backward"])
def test_turned_weights(make: Make, recipe: str | None) -> None:
    """Weights that lie [in, out]."""
    machine, linear, mlp = make(), Linear(recipe, turned=True), MLP(recipe, turned=True)
    for changes in ({}, {"rows": 13}, {"k": 80, "n": 48, "sink": "fp32+"}, {"normed": "RMSNorm", "again": True}):
        proved(machine, replace(linear, **changes))
    proved(machine, replace(linear, rows=512, k=512, n=512))
    for changes in ({}, {"activation": "swiglu", "sink": "bf16"}, {"checkpoint": True}):
        proved(machine, replace(mlp, **changes))
    if recipe is not None:
        proved(machine, replace(linear, ready="both"))
        proved(machine, replace(mlp, ready="both", checkpoint=True))


#: Of some that are variants of one recipe, one.
OTHERS = {"current plain backward", "current dequantized backward", "block hybrid", "nvfp4 4over6"}


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=[] if recipe in OTHERS else pytest.mark.full)
        for recipe in sorted(set(RECIPES) - set(KINDS))
    ],
)
def test_other_recipes(make: Make, recipe: str) -> None:
    machine = make()
    others = Linear(recipe), Linear(recipe, bias=False, sink="fp32+"), MLP(recipe), MLP(recipe, checkpoint=True)
    for build in (*others, *behind_norms(recipe)):
        proved(machine, build)


@covering(recipe=["mxfp8", "mxfp8 tiled", "nvfp4", "nvfp4 4over6"], swizzled=[False, True])
def test_products_that_other_gpus_have(
    make: Make, monkeypatch: pytest.MonkeyPatch, recipe: str, swizzled: bool
) -> None:
    """Scales are brought into the order of products, for a tensor of the caller's once; alpha comes of the maxima."""
    machine = make(B200)
    if not swizzled:
        monkeypatch.setattr(tape_cases, "SWIZZLED", False)
    base, mlp = Linear(recipe, rows=64), MLP(recipe, rows=64, hidden=128)
    for changes in ({}, {"bias": False}, {"sink": "fp32+"}, {"sink": "bf16"}, {"weight": "rows"}, {"weight": "both"}):
        proved(machine, replace(base, **changes))
    for changes in ({"ready": "both"}, {"x": "rows"}, {"x": "both"}, {"dy": "rows"}, {"dy": "both"}):
        proved(machine, replace(base, **changes))
    for changes in (
        {},
        {"weight": "both"},
        {"weight": "rows", "checkpoint": True},
        {"ready": "both", "checkpoint": True},
    ):
        proved(machine, replace(mlp, **changes))


_BIAS = {"core": {"bias": "post_scale_bias"}, "bias": (1, 8, 256, 256)}
ATTENTION: dict[str, list[dict[str, Any]]] = {
    "forms": [{}, {"form": "sbhd"}, {"form": "thd"}, {"form": "thd", "gaps": True}, {"tokens": 1024}, {"tokens": 0}],
    "packings": [
        {"packing": "kv", "groups": 2},
        {"packing": "qkv"},
        {"packing": "qkv", "interleaved": True},
        {"packing": "qkv", "interleaved": True, "groups": 2},
        {"packing": "qkv", "interleaved": True, "groups": 2, "form": "sbhd"},
        {"packing": "qkv", "recompute": True},
        {"needs": (True, False, True)},
        {"needs": (False, False, False)},
    ],
    "terms": [
        {"core": {"right": 0}},
        {"core": {"right": 0, "padded": True}},
        _BIAS,
        {"core": {"bias": "alibi", "right": 0}},
        {"core": {"bias": "alibi", "default_slopes": True, "right": 0}},
        {"core": {"bias": "alibi", "right": 0, "bottom_right": True, "padded": True}},
        {"core": {"softmax": "off-by-one", "right": 0}},
        {"core": {"softmax": "learnable", "right": 0}},
        {"core": {"dropout": 0.1}},
        {"core": {"max_logit": True, "right": 0}, "needs": (False, False, False)},
        {"core": {"max_logit": True}},
        {"core": {"softcap": 20.0, "right": 0}},
    ],
    "crooked": [
        {"shift": 4, "only": 4, "form": "thd"},
        {"shift": 8, "only": 4},
        {"shift": 8, "only": 4, "core": {"dropout": 0.1}},
        {"shift": 8, "only": 4, **_BIAS},
        {"shift": 8, "only": 5, **_BIAS},
        {"shift": 16},
    ],
    "fp8": [
        {},
        {"groups": 2, "core": {"right": 0}},
        {"packing": "qkv"},
        {"packing": "kv"},
        {"packing": "qkv", "recompute": True},
        {"packing": "qkv", "plain_backward": True},
        {"packing": "qkv", "out": True},
        {"packing": "qkv", "grad": True},
        {"packing": "qkv", "given": "quantized"},
        {"given": "quantized"},
        {"packing": "qkv", "interleaved": True},
        {"packing": "qkv", "core": {"right": 0}},
        {"packing": "qkv", "tokens": 20, "plain_backward": True},
        {"packing": "qkv", "tokens": 48},
    ],
}


@covering(group=ATTENTION, scratch=[256, 9 << 20])
def test_attention(make: Make, monkeypatch: pytest.MonkeyPatch, group: str, scratch: int) -> None:
    """`scratch`: what cuDNN asks for, of the runtime's or, if it is much, of the call's."""
    monkeypatch.setattr(fake_cudnn.Built, "needs", scratch)
    machine = make()
    fp8 = {"fp8": True, "heads": 4, "groups": 4, "d": 128} if group == "fp8" else {}
    for options in ATTENTION[group]:
        proved(machine, Attention(**{**fp8, **options}))


SMALL: dict[str, list[Build]] = {
    "norm": [
        *(Norm(kind) for kind in ("LayerNorm", "RMSNorm")),
        Norm(dtype=FP32, gamma=FP32),
        Norm(gamma=FP32),
        Norm(rows=0),
        Norm(width=20000, rows=4),
        *(Norm(shift=shift, only=only) for shift in (2, 8) for only in (-1, 2)),
    ],
    "l2 norm": [L2Norm(), L2Norm(rows=0), L2Norm(shift=2)],
    "residual": [
        Residual(bias=False),
        Residual(residual=False),
        Residual(p=0.0, bias=False),
        Residual(shift=2),
        *(
            Residual(p, BranchNeeds(x, bias, residual))
            for p in (0.0, 0.1)
            for x in (False, True)
            for bias in (False, True)
            for residual in (False, True)
        ),
    ],
    "rope": [
        *(Rope(fmt, split=split, starts=split) for fmt in ("sbhd", "bshd", "thd") for split in (False, True)),
        Rope(interleaved=True),
        Rope(strided=True),
        Rope(split=True, one_table=True),
        Rope(split=True, some=True),
        Rope(shift=2),
        Rope(split=True, shift=4),
    ],
    "softmax": [
        Softmax(),
        Softmax(mask=(2, 1, 16, 64)),
        Softmax(sink=True),
        Softmax(padded=True),
        Softmax(band=Band(right=0)),
        Softmax(columns=63),
        Softmax(columns=5000),
        Softmax(shift=2),
        Softmax(mask=(2, 1, 16, 64), shift=1, only=2),
    ],
}


@pytest.mark.parametrize("layer", SMALL)
def test_other_layers(make: Make, layer: str) -> None:
    machine = make()
    for case in SMALL[layer]:
        proved(machine, case)


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_memory_of_any_allocator(make: Make, recipe: str | None) -> None:
    """One that says nothing of its alignment gives multiples of 16."""
    machine = make()
    machine.arena.grain, driver = 16, machine.driver
    machine.allocator = lambda device: ByteAllocator(device, partial(driver.allocate, 0), partial(driver.free, 0))
    apart = Linear(recipe, bias=False, rows=512, k=512, n=512)  # forward's product reads and writes whole allocations
    for case in (apart, Linear(recipe, normed="RMSNorm"), MLP(recipe), MLP(recipe, shift=4, only=2)):
        proved(machine, case)


@pytest.mark.parametrize("build", [MLP("delayed"), Attention(packing="qkv", fp8=True, heads=4, groups=4, d=128)])
def test_a_tape_belongs_to_no_stream(make: Make, build: Build) -> None:
    """Recorded on one stream it is replayed on another, with that one's scratch memory."""
    machine, tapes = make(), Tapes()
    run(machine, machine.runtime(5), tapes, build, "first")
    machine.elsewhere()
    rt = machine.runtime(9)
    for setting in ("first", "never"):
        run(machine, rt, tapes, build, setting)
    replayed = run(machine, rt, tapes, build, "first")
    for one, other in zip(run(machine, rt, tapes, build, "never"), replayed, strict=True):
        assert {event.stream for event in other.events} == {9} and other.count == taped.Counts(1)
        compare(one, other)
    assert not machine.faults


def test_what_swizzles_once_swizzles_once(make: Make) -> None:
    """A weight that is quantized before, for several calls, keeps its scales in the order of products."""
    machine = make(B200)
    rt, case = machine.runtime(), Linear("mxfp8", rows=64, needs=_ONLY_INPUT)
    given = tape_cases.Maker(rt)
    rule = tape_cases.precision_of("mxfp8").weight  # type: ignore[union-attr]
    ready = given.quantized((case.n, case.k), rule, "both")
    ready.rowwise_swizzled = ready.columnwise_swizzled = None
    call = case(rt).forward
    forward = Taped("linear", call.function, call.spec)
    counts = []
    taped.set_when("first")
    for _ in range(3):
        with machine.noting() as events:
            forward(rt, *call.args, **{**call.options, "ready": (ready,)})
        counts.append(sum("swizzle" in str(event.what) for event in events))
    assert counts == [2, 1, 1] and ready.rowwise_swizzled is not None
    assert (taped.COUNTS.replayed, taped.COUNTS.recorded) == (3, 2)


_ONLY_INPUT = ALL._replace(weight=False, bias=False)
