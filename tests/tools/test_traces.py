"""What benchmarks read from a trace: groups of kernels, copies and communication beside them; and that they run without
a GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import offload, overlap, overlap_defaults, parallel
from benchmarks.kernel_groups import GROUPS, by_group, group_of
from benchmarks.pictures import draw_record

#: The kernels of a step in their order, the milliseconds of each, and its group.
STEP = [
    ("rope", 1, "rope, residual"),
    ("norm_forward", 2, "norms"),
    ("nvjet_qqtst_128x256_128x4_1x2_h_bz_coopA_TNT", 3, "products"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", 4, "attention"),
    ("add", 5, "rope, residual"),
    ("activation", 6, "activation"),
    ("quantize_block", 7, "casts"),
    ("norm_forward", 8, "norms"),
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", 9, "head"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16tofloat32_copy_kernel_cuda>", 10, "loss"),
    ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>", 11, "loss"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_nt_n_tilesize128x128x64", 12, "head"),
    ("norm_backward", 13, "norms"),
    ("norm_backward_sum", 14, "norms"),
    ("void cudnn::fusion::compute_dot_do_o_specialized<true>", 15, "attention"),
    ("scale_update", 16, "casts"),
    ("void at::native::elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>", 17, "rope, residual"),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", 18, "optimizer"),
    ("adam_quantized", 19, "optimizer"),
    ("norm_of_all", 20, "optimizer"),
    ("embedding_backward_feature_kernel", 21, "other"),
    ("Memset (Device)", 22, "other"),
]  # fmt: skip


def events() -> list[dict[str, object]]:
    """The same as a trace has them, not in order, with what is no work of the device."""
    found: list[dict[str, object]] = [
        {"cat": "gpu_memset" if "Mem" in name else "kernel", "name": name, "ts": at * 100, "dur": ms * 1e3}
        for at, (name, ms, _) in enumerate(STEP)
    ]
    return [*found[::-1], {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 1e6}, {"ph": "M"}]


def test_a_step_by_groups() -> None:
    spent = by_group(events())
    assert tuple(spent) == GROUPS
    for group in GROUPS:
        assert spent[group] == pytest.approx(sum(ms for *_, ms, of in STEP if of == group)), group
    assert by_group([]) == {}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("gemm_alpha", "products"),
        ("amax_finish", "casts"),
        ("l2_norm_backward", "norms"),
        ("adam_maxima", "optimizer"),
        ("attention_rows", "attention"),
        ("loss_values", "loss"),
        ("bias_dropout_add", "rope, residual"),
        ("add_partials", "norms"),
    ],
)
def test_kernels_of_this_package(name: str, group: str) -> None:
    assert group_of(name) == group


def test_it_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"case": "Llama", "recipe": "block", "parts": "loss", "ms": 1.0, **by_group(events())}
    record = {"name": "end_to_end", "about": {"device": "a GPU"}, "time": "2026-11-27", "rows": [row]}
    assert draw_record(record, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert all(f">{group}<" in text for group in GROUPS) and ">block: loss<" in text


# ---------------------------------------------------------------------------------------- copies


def event(cat: str, start: float, dur: float, name: str = "k", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "ts": start, "dur": dur, "name": name, "args": args}


def copy(start: float, dur: float, way: str = "DtoH", nbytes: int = 64 << 20) -> dict[str, Any]:
    return event("gpu_memcpy", start, dur, f"Memcpy {way} (Device -> Pinned)", bytes=nbytes)


KERNELS = [event("kernel", 10, 10), event("kernel", 15, 10), event("kernel", 40, 10)]  # 10 to 25, 40 to 50


@pytest.mark.parametrize(
    ("copies", "share"),
    [
        ([], math.nan),
        ([copy(12, 10)], 1.0),
        ([copy(0, 10)], 0.0),
        ([copy(20, 10)], 0.5),
        ([copy(20, 40, "HtoD")], (5 + 10) / 40),
        ([copy(0, 20), copy(0, 20)], 0.5),  # two at once count once
        ([copy(12, 10), copy(60, 30)], 0.25),
        ([copy(12, 10), copy(60, 30, nbytes=4096), copy(60, 30, "DtoD")], 1.0),  # these are not ours
    ],
)
def test_overlap(copies: list[dict[str, Any]], share: float) -> None:
    others = [event("cpu_op", 0, 100), {"ph": "M", "name": "process_name"}]
    for events in (KERNELS + copies + others, others + copies[::-1] + KERNELS[::-1]):
        assert offload.overlap(events) == pytest.approx(share, nan_ok=True)


def test_benchmark_runs_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are right; on a CPU nothing is offloaded."""
    monkeypatch.setattr(offload.harness, "gpu", lambda: False)
    row = offload.measure_case(offload.Case("1 of 8 layers", 1, again="mlp"))
    assert row["MiB away"] == 0


# ---------------------------------------------------------------------------------------- communication


def kernel(start: float, dur: float, name: str = "nvjet_sm90") -> dict[str, Any]:
    return event("kernel", start, dur, name)


def test_communication_that_is_hidden() -> None:
    sends = [kernel(0, 2000, "ncclDevKernel_AllGather_RING_LL(x)"), kernel(5000, 1000, "ncclDevKernel_ReduceScatter")]
    works = [kernel(1000, 3000), kernel(5500, 2000)]
    spent, hidden = parallel.communication([*sends, *works, {"cat": "cpu_op", "ts": 0, "dur": 9, "name": "nccl"}])
    assert spent == 3.0 and hidden == pytest.approx((1000 + 500) / 3000)
    assert math.isnan(parallel.communication(works)[1])


def test_communication_that_shows() -> None:
    """Copies between GPUs travel, too; those of a GPU or to the host do not, and two transfers at a time count once."""
    copies = [
        {**kernel(0, 4000, name), "cat": "gpu_memcpy"}
        for name in (
            "Memcpy PtoP (Device -> Device)",
            "Memcpy DtoD (Device -> Device)",
            "Memcpy HtoD (Pinned -> Device)",
        )
    ]
    sends = [kernel(1000, 2000, "ncclDevKernel_SendRecv(x)"), kernel(6000, 1000, "ncclDevKernel_ReduceScatter")]
    works = [kernel(500, 1000), kernel(3500, 3000)]
    assert parallel.shown([*copies, *sends, *works]) == pytest.approx((4000 - 1000 - 500 + 500) / 1e3)
    assert parallel.shown(works) == 0.0 and parallel.shown(sends) == 3.0
    assert parallel.idle([*copies, *sends, *works]) == 2.0 and parallel.idle(sends) == 0.0


@pytest.mark.more
def test_overlap_is_measured_without_a_gpu() -> None:
    rows = [*parallel.spawned("cpu", overlap.cases), *parallel.spawned("cpu", overlap_defaults.cases)]
    assert {(row["recipe"], row["method"]) for row in rows} == {
        (r, m)
        for m in (*overlap.METHODS, "default")
        for r in (parallel.RECIPES if m in (overlap.ALL, "default") else overlap.RECIPES_ALONE)
    }
    assert all(row["ms"] > 0 and row["plain ms"] > 0 for row in rows)


@pytest.mark.more
def test_the_benchmark_runs_without_a_gpu() -> None:
    """Two processes over gloo; FP8 hands over less than bf16."""
    rows = {row["recipe"]: row for row in parallel.spawned("cpu")}
    assert set(rows) == set(parallel.RECIPES) and all(row["ms"] > 0 and row["one ms"] > 0 for row in rows.values())
    assert rows["delayed"]["MiB a step"] < 0.8 * rows["bf16"]["MiB a step"]
