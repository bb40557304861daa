"""Outputs are torch's own tensors, whatever they are allocated with."""

from __future__ import annotations

import pytest
import torch

from te_core import dtypes
from te_core.tensor import cuda_device
from te_torch import runtime
from te_torch.runtime import TO_TORCH, TorchAllocator, runtime_for
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
                wanted.shape, wanted.stride(), wanted.dtype, wanted.device
            )  # fmt: skip
            assert made.ptr == got.data_ptr() and not got.requires_grad and got.is_contiguous()
            assert got.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()


@pytest.mark.parametrize("device", devices())
def test_inference_mode_is_kept(device: str) -> None:
    place = runtime_for(torch.empty(0, device=device)).allocator
    with torch.inference_mode():
        assert place.empty((2, 3), dtypes.float32, 0).owner.is_inference()
    assert not place.empty((2, 3), dtypes.float32, 0).owner.is_inference()


@requires_gpus(2)
def test_memory_lies_on_the_device_of_the_allocator() -> None:
    for index in range(2):
        place = TorchAllocator(torch.device("cuda", index), cuda_device(index))
        for current in range(2):
            with torch.cuda.device(current):
                assert place.empty((2, 3), dtypes.float32, 0).owner.device.index == index
