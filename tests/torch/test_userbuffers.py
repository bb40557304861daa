"""The names of overlap: arguments are judged, options that change nothing are told, and settings come and go."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from te_torch.parallel import overlap

NONE, FP8 = te.UserBufferQuantizationMode.NONE, te.UserBufferQuantizationMode.FP8
SHAPE = [1024, 512]


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    te.destroy_ub()
    torch.distributed.destroy_process_group()


def test_a_script_that_never_overlaps() -> None:
    assert [(m.name, m.value) for m in te.UserBufferQuantizationMode] == [("NONE", "none"), ("FP8", "fp8")]
    te.destroy_ub()
    te.destroy_ub()
    assert not overlap.is_ub_initialized() and not overlap.using_cublasmp_backend()
    for ask in (lambda: overlap.get_ub("qkv_fprop", False), lambda: overlap.get_ub_is_fp8("qkv_fprop")):
        with pytest.raises(RuntimeError, match="not initialised"):
            ask()


def test_without_a_process_group() -> None:
    with pytest.warns(DeprecationWarning, match="use_fp8"), pytest.raises(UnsupportedError):
        te.initialize_ub(SHAPE, 2, True)
    assert not overlap.is_ub_initialized()


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tp_size": 2}, ArgumentError, r"tp_size=2 with 1 processes.*the size of the modules' tensor-parallel group"),
    ({"with_cublasmp": True}, UnsupportedError, r"with_cublasmp=True.*is not called.*leave it out"),
    ({"bootstrap_backend": "mpi"}, UnsupportedError, r"bootstrap_backend='mpi', which this torch is built without"),
]


@pytest.mark.parametrize(("given", "kind", "says"), REFUSED)
def test_what_a_process_cannot_have(group: None, given: dict[str, Any], kind: type[Exception], says: str) -> None:
    if given.get("bootstrap_backend") == "mpi" and torch.distributed.is_mpi_available():
        pytest.skip("this torch has MPI")
    with pytest.raises(kind, match=says):
        te.initialize_ub(**{"shape": SHAPE, "tp_size": 1, "quantization_modes": [NONE], **given})
    assert not overlap.is_ub_initialized()


def test_once_until_destroyed(group: None) -> None:
    te.initialize_ub(SHAPE, 1, quantization_modes=[NONE])
    assert overlap.is_ub_initialized()
    with pytest.raises(UnsupportedError, match=r"a second call.*destroy_ub\(\) in between"):
        te.initialize_ub(SHAPE, 1, quantization_modes=[NONE])
    te.destroy_ub()
    assert not overlap.is_ub_initialized()
    te.initialize_ub(SHAPE, 1, quantization_modes=[FP8])


def test_what_was_registered(group: None) -> None:
    cfgs = [None, {"proj_fprop": {"num_splits": 2, "fp8_buf": True}, "fc1_dgrad": {"method": "ring_exchange"}}]
    with pytest.warns(UserWarning, match="fp8_buf of proj_fprop .sums are not rounded to FP8"):
        te.initialize_ub(SHAPE, 1, quantization_modes=[NONE, FP8], ub_cfgs=cfgs, dtype=torch.float16)
    found = {fp8: overlap.get_ub("proj_fprop", fp8) for fp8 in (False, True)}
    assert [(g.method, g.num_splits) for g in found.values()] == [("pipeline", 4), ("pipeline", 2)]
    assert overlap.get_ub("fc1_dgrad", True).method == "ring_exchange"
    assert overlap.get_ub("fc1_dgrad", False).method == "bulk"
    in_fp8 = [overlap.get_ub_is_fp8(name) for name in ("qkv_fprop", "fc2_dgrad", "proj_wgrad", "proj_fprop")]
    assert in_fp8 == [True] * 4
    assert not any(overlap.get_ub_is_fp8(name) for name in ("fc2_fprop", "qkv_wgrad"))
    assert not overlap.get_ub("qkv_fprop", False).is_fp8_ubuf()
    with pytest.raises(KeyError, match=r"get_ub: got name='kv_fprop'.*qkv_fprop NONE"):
        overlap.get_ub("kv_fprop", False)


def test_options_without_effect_are_told_once(group: None) -> None:
    options = {
        "aggregate": True,
        "use_ce": False,
        "set_sm_margin": True,
        "comm_priority": 0,
        "num_sm": 2,
        "cga_size": 1,
    }
    atomic = {"proj_fprop": {"atomic_gemm": True}, "qkv_fprop": {"atomic_gemm": True, **options}}
    with pytest.warns(UserWarning) as told:
        te.initialize_ub(SHAPE, 1, quantization_modes=[FP8], ub_cfgs=atomic)
    assert len(told) == 1
    for said in ("aggregate", "use_ce", "set_sm_margin", "comm_priority", r"atomic_gemm of qkv_fprop (it runs as ring"):
        assert said in str(told[0].message)
    assert "num_sm of" not in str(told[0].message)
    assert overlap.get_ub("proj_fprop", True).method == "ring_exchange"
    te.destroy_ub()
    plain = {"qkv_fprop": {"use_ce": True, "aggregate": False, "num_splits": 2, "is_reduce_scatter": 0}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te.initialize_ub(SHAPE, 1, quantization_modes=[NONE], ub_cfgs=plain)


def test_flags_on_one_rank_do_nothing_and_say_so() -> None:
    """They need no initialize_ub there."""
    flags = {"ub_overlap_ag": True, "ub_bulk_dgrad": True, "ub_name": "qkv"}
    modules = {
        on: te.LayerNormLinear(32, 32, device="cpu", parallel_mode="column", **(flags if on else {})) for on in (0, 1)
    }
    modules[1].load_state_dict(modules[0].state_dict())
    x = torch.randn(4, 32)
    assert torch.equal(modules[0](x), modules[1](x))
    reasons = [row.facts.reason for row in te.precision_report(modules[1]).rows]
    assert all("ub_overlap_ag=True, ub_bulk_dgrad=True without effect on one rank" in reason for reason in reasons)
    assert "ub_" not in str(te.precision_report(modules[0]))


GOOD: list[dict[str, Any]] = [
    {"qkv_fprop": {"method": "ring_exchange", "num_sm": 1, "use_ce": True}},
    {"proj_fprop": {"method": "pipeline", "num_splits": 4}, "fc2_fprop": {"fp8_buf": True}},
    {"qkv_dgrad": {"method": "ring_exchange"}},
    {"qkv_dgrad": {"method": "ring_exchange", "is_reduce_scatter": True}},
    {"qkv_dgrad": {"method": "pipeline"}},
    {"qkv_wgrad": {"method": "bulk"}, "proj_wgrad": {"method": "external"}},
    # As YAML files of trainers have it.
    {
        "fc1_fprop": {"method": "ring_exchange", "aggregate": 0, "set_sm_margin": 0, "num_sm": 1, "cga_size": 1},
        "fc2_fprop": {"method": "pipeline", "num_splits": 2, "set_sm_margin": 1, "atomic_gemm": 0},
        "qkv_wgrad": {"method": "bulk", "num_sm": 4, "cga_size": 2, "set_sm_margin": 0},
    },
    {"qkv_fprop": {"atomic_gemm": True}, "proj_fprop": {"atomic_gemm": True, "method": "ring_exchange"}},
]


@pytest.mark.filterwarnings("ignore:initialize_ub. without effect")
def test_documented_configurations_pass(group: None) -> None:
    for cfg in GOOD:
        te.initialize_ub(SHAPE, 1, quantization_modes=[FP8], ub_cfgs=cfg)
        for name, options in cfg.items():
            if "method" in options:
                assert overlap.get_ub(name, True).method == options["method"]
        te.destroy_ub()
