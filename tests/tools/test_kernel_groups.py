"""Which group of a step's table a kernel belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

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
