"""The small functions beside the modules."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

import te_torch as te
from te_torch import utils
from tests.backends import devices


@pytest.mark.parametrize("device", devices())
def test_weak_references_to_memory(device: str) -> None:
    """On a GPU the memory is shared and not kept; structures and other values stay what they are."""
    x = torch.arange(12, device=device).view(3, 4)[1:, ::2]
    found = utils.make_weak_ref({"a": (x, [x, 3]), "b": None})
    (first, (second, number)), nothing = found.values()
    assert nothing is None and number == 3 and isinstance(found["a"], tuple) and isinstance(found["a"][1], list)
    x.add_(1)
    for t in (first, second):
        assert torch.equal(t, x) and t.stride() == x.stride() and t.data_ptr() == x.data_ptr()
        assert (t is x) == (device == "cpu")
    if device != "cpu":
        before = torch.cuda.memory_allocated()
        del x
        assert torch.cuda.memory_allocated() < before


@pytest.mark.parametrize(
    ("init", "sigma"),
    [
        (utils.init_method_normal(0.5), 0.5),
        (utils.scaled_init_method_normal(0.5, 8), 0.125),
        (utils.get_default_init_method(), 0.023),
        (utils.init_method_constant(2.0), 0.0),
    ],
)
def test_initialisers(init: utils.Init, sigma: float) -> None:
    """In place, of the width asked for; they can be pickled, and given to a layer."""
    weight = torch.empty(200, 300)
    assert pickle.loads(pickle.dumps(init))(weight) is weight
    assert abs(weight.std().item() - sigma) <= 0.02 * sigma
    assert abs(weight.mean().item() - (2.0 if sigma == 0.0 else 0.0)) <= 0.02 * sigma
    layer = te.TransformerLayer(64, 256, 4, init_method=init, output_layer_init_method=init, device="cpu")
    drawn = torch.cat([p.flatten() for p in layer.parameters() if p.ndim == 2])
    assert abs(drawn.std().item() - sigma) <= 0.05 * sigma


def test_modules_begin_with_the_default() -> None:
    torch.manual_seed(0)
    weight = te.Linear(300, 200, device="cpu").weight
    torch.manual_seed(0)
    assert torch.equal(weight, utils.get_default_init_method()(torch.empty_like(weight)))


def test_mask_func() -> None:
    """As `FusedScaleMaskSoftmax` uses it: what is masked gets no weight."""
    scores, mask = torch.randn(2, 4, 6, 6), torch.rand(2, 1, 6, 6) < 0.3
    masked = utils.attention_mask_func(scores, mask)
    assert torch.equal(masked, torch.where(mask, torch.tensor(-10000.0), scores)) and not (scores == -10000).any()
    assert te.attention.softmax.FusedScaleMaskSoftmax(utils.attention_mask_func)(scores, mask, "padding").shape == (
        2,
        4,
        6,
        6,
    )


def test_whole_numbers() -> None:
    assert utils.divide(12, 4) == 3 and math.prod((utils.round_up_to_nearest_multiple(n, 16) for n in (1, 16, 17))) == (
        16 * 16 * 32
    )


def test_torchs_own_by_documented_names() -> None:
    x = torch.arange(24.0).view(2, 12)
    parts = utils.SplitAlongDim.apply(x, 1, [2, 4, 6])
    assert all(torch.equal(a, b) for a, b in zip(parts, x.split([2, 4, 6], 1), strict=True))
    outputs = [torch.empty(2), torch.empty(4)]
    utils.split_and_copy(x[0, :6], outputs, [2, 4])
    assert torch.equal(torch.cat(outputs), x[0, :6])
    assert utils.cast_if_needed(x, torch.float32) is x and utils.cast_if_needed(None, torch.float32) is None
    assert utils.cast_if_needed(x, torch.bfloat16).dtype is torch.bfloat16  # type: ignore[union-attr]
    assert utils.canonicalize_dtype(None) is torch.get_default_dtype()
    assert utils.canonicalize_dtype(torch.half) is torch.half
    assert utils.canonicalize_device(None) == te.Linear(8, 8).weight.device
    assert utils.canonicalize_device("meta") == torch.device("meta")
    assert utils.canonicalize_process_group(None) is torch.distributed.group.WORLD
    assert utils.canonicalize_process_group(x) is x
    assert utils.torch_get_autocast_gpu_dtype() is torch.get_autocast_dtype("cuda")
    assert utils.gpu_autocast_ctx(enabled=False).device == "cuda"
    assert utils.is_bf16_compatible() is bool(te.is_bf16_available())
    utils.nvtx_range_push("step"), utils.nvtx_range_pop("step"), utils.nvtx_range_pop
    version = te.torch_version()
    assert torch.__version__.startswith(".".join(map(str, version))) and version >= (2, 8)


def test_sizes_that_the_documented_package_multiplies() -> None:
    for shape, fits in (((8, 16), True), ((2, 4, 32), True), ((4, 16), False), ((8, 24), False), ((3, 8, 16), True)):
        assert utils.check_dim_for_fp8_exec(torch.empty(shape)) is fits, shape
        if not fits:
            with pytest.raises(ValueError, match="assert_dim_for_fp8_exec.*last dimension that 16 divides"):
                utils.assert_dim_for_fp8_exec(torch.empty(8, 16), torch.empty(shape))
    utils.assert_dim_for_fp8_exec(torch.empty(8, 16))


def test_memory_that_is_given_back() -> None:
    kept, gone = torch.ones(4, 4), torch.ones(4, 4)
    kept._do_not_clear = True  # type: ignore[attr-defined]
    held = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")(torch.ones(16, 16))
    utils.clear_tensor_data(kept, None, gone, held)
    assert kept.shape == (4, 4) and gone.numel() == 0
    assert all(t is None or not t.numel() for t in held.get_data_tensors())


def test_a_gradient_that_is_elsewhere() -> None:
    first, second = (utils.get_dummy_wgrad([4, 8], torch.bfloat16) for _ in range(2))
    assert first is not second and first.data_ptr() == second.data_ptr() and first.shape == (4, 8)
    assert not utils.get_dummy_wgrad((4, 8), torch.bfloat16, zero=True).any()
    assert utils.get_dummy_wgrad([4, 8], torch.float32).dtype is torch.float32
