"""The block-scaled product of our own: against float64 on a GPU, and without one what is launched, and when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from te_core import device
from te_core import dtypes as D
from te_core.backends.cuda import gemm as cuda_gemm
from te_core.backends.cuda import gemm_block, gemm_tune
from te_core.backends.cuda.gemm_block import BlockPlan
from te_core.backends.cuda.gemm_run import LtPlan
from te_core.ops.gemm import GemmSpec, gemm
from te_core.runtime import Runtime
from tests.backends import cuda_runtime
from tests.core.fake_cuda import B200, Make, tensor
from tests.core.tape_cases import Linear
from tests.core.tape_proof import Tapes, run
from tests.core.test_gemm import BOUND, family, fresh, values
from tests.core.test_gemm_scaled import PAIRS, PIECES, TILES, block_product, close, requires_blocks, stored
from tests.core.test_tape_recording import alike
from tests.covering import covering
from tests.tolerances import DB

#: Whole tiles of a cluster and less, one row of eight, and lengths that are no whole blocks.
SIZES = [(256, 256, 128), (8, 16, 16), (136, 272, 400), (1000, 528, 656), (384, 128, 1040), (2056, 4112, 1040)]
#: Scales of a lie in pieces in all of them.
TAKEN = {name: pair for name, pair in PAIRS.items() if not pair[0].tiled} | {"by e5m2": (PIECES, PAIRS["e5m2"][0])}
SPEC = GemmSpec(
    *(8192, 28672, 4096),
    *(False, True),
    *(D.float8_e4m3, D.float8_e4m3, D.bfloat16),
    *[None] * 5,
    *(False, True, False),
    256,
    *(PIECES, TILES),
)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It runs whatever the size."""
    monkeypatch.setattr(gemm_tune, "faster", lambda rt, plan: gemm_block.plan(rt, plan.spec, "a test"))
    yield
    if device_is_here():
        fresh(cuda_runtime())  # of these plans


def device_is_here() -> bool:
    return bool(requires_blocks.args[0])


# ---------------------------------------------------------------------------------------------- on a GPU


@requires_blocks
@covering(size=SIZES, pair=TAKEN, out=[D.bfloat16, D.float32])
def test_product(chosen: None, size: tuple[int, int, int], pair: str, out: Any) -> None:
    rt = cuda_runtime()
    fresh(rt)
    y, want = block_product(rt, TAKEN[pair], size, out_dtype=out)
    assert family(rt) == "block_gemm.cu"
    close(rt, y, want, min(BOUND[out], DB["fp8 split"]))


@requires_blocks
@pytest.mark.parametrize("pair", TAKEN)
def test_it_adds_to_what_float32_held(chosen: None, pair: str) -> None:
    rt = cuda_runtime()
    fresh(rt)
    target, old = values(rt, (144, 528), D.float32, 5, 30.0)
    y, want = block_product(rt, TAKEN[pair], (144, 528, 640), out=target, accumulate=True)
    assert y is target and family(rt) == "block_gemm.cu"
    close(rt, y, want + old, DB["fp8 split"])


@requires_blocks
def test_it_leaves_all_else_alone(chosen: None) -> None:
    """Rows and columns of a tile beyond the matrix are not written: here lies another matrix."""
    rt = cuda_runtime()
    whole, old = values(rt, (288, 528), D.bfloat16, 5, 30.0)
    y, want = block_product(rt, PAIRS["1Dx2D"], (144, 528, 400), out=whole.rows(0, 144))
    close(rt, y, want, DB["bf16"])
    assert (rt.numpy(whole.rows(144, 288)).astype(float) == old[144:]).all()


@requires_blocks
@pytest.mark.parametrize("pair", ["1Dx2D", "1Dx1D"])
def test_it_is_captured_and_reads_where_its_operands_are_now(chosen: None, pair: str) -> None:
    torch = pytest.importorskip("torch")
    from te_torch.runtime import runtime_for, to_core

    m, n, k = 272, 528, 656
    forms = TAKEN[pair]

    def operands(seed: int) -> tuple[list[Any], Any]:
        (a, av), (b, bv) = stored(forms[0], m, k, seed), stored(forms[1], n, k, seed + 1)
        types = (D.float8_e4m3.numpy, torch.float8_e4m3fn)
        made = [torch.from_numpy(x.view("u1") if x.dtype == types[0] else x).cuda() for x in (a[0], b[0], a[1], b[1])]
        return [x.view(types[1]) if x.dtype is torch.uint8 else x for x in made], av @ bv.T

    stream = torch.cuda.Stream()
    held, _ = operands(1)
    out = torch.zeros(m, n, dtype=torch.bfloat16, device="cuda")

    def product(given: list[Any], out: Any) -> Runtime:
        rt = runtime_for(out)
        a, b, a_scale, b_scale = map(to_core, given)
        scales = {"a_scale": a_scale, "b_scale": b_scale, "a_format": forms[0], "b_format": forms[1]}
        gemm(rt, a, b, trans_b=True, out=to_core(out), **scales)
        return rt

    with torch.cuda.stream(stream):
        fresh(product(held, out))
        rt = product(held, out)
        assert family(rt) == "block_gemm.cu"
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        product(held, out)
    for seed in (3, 5):
        moved, want = operands(seed)
        elsewhere = torch.zeros_like(out)
        for to, x in zip(held, moved, strict=True):
            to.copy_(x)
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(stream):
            product(moved, elsewhere)
        torch.cuda.synchronize()
        assert torch.equal(out, elsewhere)
        close(rt, to_core(out), want, DB["bf16"])


@requires_blocks
def test_a_timing_decides(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_CORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gemm_tune, "_store", None)
    rt = cuda_runtime()
    cuda_gemm.tune(rt, replace(SPEC, m=2048, n=2048))
    (entry,) = gemm_tune._stored().values()
    assert entry["own_ms"] > 0 and entry["ms"] > 0


# ---------------------------------------------------------------------------------------------- without one


def launched(done: list[Any]) -> list[str]:
    return [event.what[0] for one in done for event in one.events if event.kind == "launch"]


def test_a_replay_puts_the_addresses_of_its_call_into_the_maps(make: Make, chosen: None) -> None:
    machine, build = make(), Linear("block", sink="fp32+")
    rt = machine.runtime(6)
    one = run(machine, rt, Tapes(), build, "never")
    tapes = Tapes()
    for _ in range(3):
        machine.elsewhere()
        done = run(machine, rt, tapes, build, "first")
        alike(one, done)
    assert launched(done).count("block_gemm") == 2 and not machine.faults  # the forward product has a bias
    assert {k.made_of[2] for k in machine.kernels() if k.name == "block_gemm"} == {"sm_90a"}


def test_it_is_given_its_operands(make: Make, chosen: None) -> None:
    """Addresses where the kernel's struct has them, sizes behind, and a block for each tile or multiprocessor."""
    machine = make()
    rt = machine.runtime()
    for (m, n, k), blocks in (((264, 272, 400), 8), ((8192, 28672, 128), 132)):
        a, b = tensor(rt, (m, k), D.float8_e4m3), tensor(rt, (n, k), D.float8_e4m3)
        tiles = -(-n // 128), -(-k // 512) * 4
        a_scale, b_scale = tensor(rt, (-(-k // 128), m), D.float32), tensor(rt, tiles, D.float32)
        scales: Any = {"a_scale": a_scale, "b_scale": b_scale, "a_format": PIECES, "b_format": TILES}
        with machine.noting() as events:
            y = gemm(rt, a, b, trans_b=True, **scales)
        (event,) = (event for event in events if event.kind == "launch")
        wanted = [machine.place(t.ptr) for t in (a, b, a_scale, b_scale, y)]
        assert [place for _, place in event.places] == wanted
        assert event.what[2:4] == ((blocks, 1, 1, 384, 1, 1), 200704) and event.what[-3:] == (m, n, k)
    assert not machine.faults


def test_products_that_it_takes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = make().runtime()
    assert gemm_block.able(rt, SPEC) and gemm_block.able(rt, replace(SPEC, out=D.float32, accumulate=True))
    for other in (
        {"a_format": TILES, "b_format": PIECES},
        {"a_format": None, "b_format": None},
        {"out": D.float16},
        {"accumulate": True},
        {"bias": D.bfloat16},
        {"epilogue": "gelu"},
        {"m": 0},
        {"k": 0},
    ):
        assert not gemm_block.able(rt, replace(SPEC, **other)), other
    monkeypatch.setattr(device, "info", lambda index=0: B200)
    assert not gemm_block.able(rt, SPEC)


def test_cublaslt_runs_where_nothing_was_timed(make: Make) -> None:
    rt = make().runtime()
    for spec in (SPEC, replace(SPEC, b_format=PIECES)):
        assert isinstance(cuda_gemm.plan_gemm(rt, spec), LtPlan)


def test_a_map_that_is_not_as_known(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a driver that keeps addresses elsewhere: cuBLASLt multiplies."""
    machine = make()
    assert machine.driver.tensor_map((8, 16), (8, 16)) == bytes(128)
    monkeypatch.setattr(machine.lib, "_cuTensorMapEncodeTiled", lambda *given: 0, raising=False)
    assert machine.driver.tensor_map((8, 16), (8, 16)) is None
    assert gemm_block.plan(machine.runtime(), SPEC, "a test") is None


@pytest.mark.parametrize(("ms", "wins"), [(1.04, True), (1.02, False)])
def test_timings_are_kept(make: Make, monkeypatch: pytest.MonkeyPatch, ms: float, wins: bool) -> None:
    """By 3 % or more it is faster. Later processes do not time: what was timed is kept."""
    timed: list[int] = []
    monkeypatch.setattr(gemm_tune, "_time_all", lambda *given: [2.0] * len(given[4]))
    monkeypatch.setattr(gemm_tune, "_time", lambda rt, runs: timed.append(len(runs)) or [ms, 1.0])
    monkeypatch.setattr(gemm_tune, "_operands", lambda *given: [None] * 5)
    rt = make().runtime()
    small = replace(SPEC, n=4096)
    for spec in (SPEC, small):
        plan = cuda_gemm.tune(rt, spec)
        assert isinstance(plan, BlockPlan) is wins and plan.source.startswith("timing")
    monkeypatch.setattr(gemm_tune, "_store", None)
    monkeypatch.setenv("TE_CORE_AUTOTUNE", "1")
    for spec in (SPEC, small):
        plan = cuda_gemm.plan_gemm(rt, spec)
        assert isinstance(plan, BlockPlan) is wins and plan.source == "an earlier timing"
    assert timed == [2, 2]
