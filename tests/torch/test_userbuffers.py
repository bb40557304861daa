"""The names of overlap: what scripts import and never use runs; arguments are judged, and overlap is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from te_torch.training import userbuffers

NONE, FP8 = te.UserBufferQuantizationMode.NONE, te.UserBufferQuantizationMode.FP8


def test_a_script_that_never_overlaps() -> None:
    assert [(m.name, m.value) for m in te.UserBufferQuantizationMode] == [("NONE", "none"), ("FP8", "fp8")]
    te.destroy_ub()
    te.destroy_ub()
    assert not userbuffers.is_ub_initialized() and not userbuffers.using_cublasmp_backend()
    for ask in (lambda: userbuffers.get_ub("qkv_fprop", False), lambda: userbuffers.get_ub_is_fp8("qkv_fprop")):
        with pytest.raises(RuntimeError, match="not initialised"):
            ask()


def test_a_call_is_refused_with_what_to_do(tmp_path: Any) -> None:
    with pytest.raises(UnsupportedError, match="no process group"):
        te.initialize_ub([1024, 512], 2, quantization_modes=[NONE])
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        with pytest.raises(UnsupportedError, match=r"overlap of products.*leave the call out.*ub_tp_comm_overlap"):
            te.initialize_ub([1024, 512], 2, quantization_modes=[NONE, FP8], ub_cfgs=[{}, None], dtype=torch.float16)
    finally:
        torch.distributed.destroy_process_group()
    with pytest.warns(DeprecationWarning, match="use_fp8"), pytest.raises(UnsupportedError):
        te.initialize_ub([1024, 512], 2, True)


GOOD: list[dict[str, Any]] = [
    {"qkv_fprop": {"method": "ring_exchange", "num_sm": 1, "use_ce": True}},
    {"proj_fprop": {"method": "pipeline", "num_splits": 4}, "fc2_fprop": {"fp8_buf": True}},
    {"qkv_dgrad": {"method": "ring_exchange"}},
    {"qkv_dgrad": {"method": "pipeline"}},
    {"qkv_wgrad": {"method": "bulk"}, "proj_wgrad": {"method": "external"}},
    {"qkv_fprop": {"atomic_gemm": True}, "proj_fprop": {"atomic_gemm": True, "method": "ring_exchange"}},
]


@pytest.mark.parametrize("cfg", GOOD)
def test_documented_configurations_pass(cfg: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        te.initialize_ub([1024, 512], 2, quantization_modes=[FP8], ub_cfgs=cfg)


WRONG: list[tuple[dict[str, Any], str, type[Exception]]] = [
    ({"shape": [1024]}, "two integers", ArgumentError),
    ({"shape": [0, 4]}, "two integers", ArgumentError),
    ({"tp_size": 0}, "tp_size=0", ArgumentError),
    ({"tp_size": True}, "tp_size=True", ArgumentError),
    ({"dtype": "bf16"}, "dtype", ArgumentError),
    ({"quantization_modes": NONE}, "list of UserBufferQuantizationMode", TypeError),
    ({"quantization_modes": ["fp8"]}, "list of UserBufferQuantizationMode", TypeError),
    ({"bootstrap_backend": "ucx"}, "'gloo', 'mpi', 'nccl'", ArgumentError),
    ({"ub_cfgs": [{}, {}]}, "for 1 modes", ArgumentError),
    ({"ub_cfgs": {"qkv": {}}}, "configuration of 'qkv'", ArgumentError),
    ({"ub_cfgs": {"qkv_fprop": {"sm": 1}}}, "qkv_fprop: sm", ArgumentError),
    ({"ub_cfgs": {"qkv_fprop": 1}}, "a dict of method", ArgumentError),
    ({"ub_cfgs": {"qkv_fprop": {"method": "rings"}}}, "method='rings'", ArgumentError),
    ({"ub_cfgs": {"qkv_fprop": {"method": "pipeline"}}}, "for an all-gather", ArgumentError),
    ({"ub_cfgs": {"proj_fprop": {"method": "external"}}}, "it for proj_wgrad", ArgumentError),
    ({"ub_cfgs": {"proj_fprop": {"atomic_gemm": True}}}, "without FP8", ArgumentError),
    (
        {
            "quantization_modes": [FP8],
            "ub_cfgs": {"proj_fprop": {"method": "ring_exchange"}, "qkv_fprop": {"atomic_gemm": True}},
        },
        "for both or none",
        ArgumentError,
    ),
    (
        {"ub_cfgs": {"qkv_dgrad": {"method": "ring_exchange"}, "qkv_wgrad": {}}},
        "then qkv_wgrad has none",
        ArgumentError,
    ),
    ({"with_cublasmp": True, "ub_cfgs": {"qkv_dgrad": {"method": "bulk"}}}, "with_cublasmp", ArgumentError),
]


@pytest.mark.parametrize(("given", "says", "kind"), WRONG)
def test_arguments_are_judged(given: dict[str, Any], says: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=says):
        te.initialize_ub(**{"shape": [1024, 512], "tp_size": 2, "quantization_modes": [NONE], **given})
