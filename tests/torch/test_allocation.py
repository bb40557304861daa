"""Outputs are torch's own tensors, whatever they are allocated with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from te_core import dtypes
from te_core.attention import AttentionSpec
from te_core.ops import attention_backward, attention_forward
from te_core.tensor import Tensor, cuda_device
from te_torch import runtime
from te_torch.runtime import TO_TORCH, TorchAllocator, runtime_for, to_core, to_torch
from tests.backends import devices, requires_gpus

SHAPES = [(), (0,), (5,), (3, 4), (0, 4), (4, 0), (2, 3, 4), (2, 0, 4), (2, 3, 4, 5), torch.Size((2, 3))]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("quick", [True, False])
def test_outputs_are_as_torch_empty_makes_them(device: str, quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    place = runtime_for(torch.empty(0, device=device)).allocator
    assert isinstance(place, TorchAllocator)
    if not quick:
        monkeypatch.setattr(runtime, "_quick_empty", lambda kind: None)
        place = TorchAllocator(place.torch_device, place.device)
    for shape in SHAPES:
        for dtype in (dtypes.float32, dtypes.bfloat16, dtypes.float8_e4m3, dtypes.uint8):
            made = place.empty(shape, dtype, 0)
            wanted = torch.empty(shape, dtype=TO_TORCH[dtype], device=device)
            got = made.owner
            assert (got.shape, got.stride(), got.dtype, got.device) == (
                wanted.shape,
                wanted.stride(),
                wanted.dtype,
                wanted.device,
            )
            assert made.ptr == got.data_ptr() and not got.requires_grad and got.is_contiguous()
            assert got.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()


@pytest.mark.parametrize("device", devices())
def test_inference_mode_is_kept(device: str) -> None:
    place = runtime_for(torch.empty(0, device=device)).allocator
    with torch.inference_mode():
        assert place.empty((2, 3), dtypes.float32, 0).owner.is_inference()
    assert not place.empty((2, 3), dtypes.float32, 0).owner.is_inference()


@pytest.mark.parametrize("device", devices())
def test_a_piece_of_a_block_is_a_tensor_of_its_own(device: str) -> None:
    """Small gradients of attention share a block; each comes as a torch tensor over its part of it."""
    q, k, v, dy = (to_core(torch.randn(2, 16, 4, 32, device=device).bfloat16()) for _ in range(4))
    rt, spec = runtime_for(to_torch(q)), AttentionSpec(0.2, "bshd", "bshd")
    y = attention_forward(rt, q, k, v, spec=spec)
    grads = attention_backward(rt, dy, q, k, v, y.out, y.stats, spec=spec)
    assert len({id(t.owner) for t in grads[:3]}) == 1 and isinstance(grads.q.owner, Tensor)
    for t in grads[:3]:
        got = to_torch(t)
        assert got.shape == t.shape and got.data_ptr() == t.ptr and got.dtype == torch.bfloat16
        assert np.array_equal(got.float().cpu().numpy(), rt.numpy(t).astype(np.float32))


@requires_gpus(2)
def test_memory_lies_on_the_device_of_the_allocator() -> None:
    for index in range(2):
        place = TorchAllocator(torch.device("cuda", index), cuda_device(index))
        for current in range(2):
            with torch.cuda.device(current):
                assert place.empty((2, 3), dtypes.float32, 0).owner.device.index == index
