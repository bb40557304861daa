"""Quantized tensors in files and copies: pickle, torch.save with weights_only, deepcopy, plain buffers."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import te_torch.tensors as T
from tests.torch.test_tensors import on_devices, values
from tests.torch.test_tensors_dispatch import ALL, all_makers, parameter, pointers


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.get_usages() == b.get_usages()
    assert a.requires_grad == b.requires_grad
    assert isinstance(a, torch.nn.Parameter) == isinstance(b, torch.nn.Parameter)
    for mine, theirs in zip(a.flatten_inner(), b.flatten_inner(), strict=True):
        assert torch.equal(mine.cpu().view(torch.uint8), theirs.cpu().view(torch.uint8))
    assert torch.equal(a.dequantize().cpu(), b.dequantize().cpu())


def through_file(obj: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


@on_devices
@all_makers
@pytest.mark.parametrize("shape", [(32, 64), (24, 40)], ids=str)
def test_torch_save_and_load_weights_only(device: str, name: str, shape: tuple[int, int]) -> None:
    t = ALL[name](device)(values(shape, device))
    loaded = through_file({"weight": t, "bias": torch.ones(3)})["weight"]
    same(loaded, t)
    assert type(loaded._quantizer) is type(t._quantizer)
    loaded.quantize_(values(shape, device, seed=2))
    wanted = t.clone()
    wanted.quantize_(values(shape, device, seed=2))
    assert torch.equal(loaded.dequantize(), wanted.dequantize())
    same(through_file(t, map_location="cpu"), t.cpu())


@all_makers
@pytest.mark.parametrize("protocol", [2, 5])
def test_pickle(name: str, protocol: int) -> None:
    p = parameter(name)
    same(pickle.loads(pickle.dumps(p, protocol)), p)
    t = p.detach()
    same(pickle.loads(pickle.dumps(t, protocol)), t)
    names = {
        "Float8Tensor": "float8",
        "Float8BlockwiseQTensor": "float8_blockwise",
        "MXFP8Tensor": "mxfp8",
        "NVFP4Tensor": "nvfp4",
        "HybridQuantizedTensor": "hybrid_quantized",
        "IdentityTensor": "identity",
    }
    assert f"_make_{names[type(t).__name__]}_tensor_in_reduce_ex".encode() in pickle.dumps(t, 0)


@on_devices
@all_makers
def test_deepcopy(device: str, name: str) -> None:
    p = parameter(name, device)
    p.note = ["kept"]
    made = copy.deepcopy(p)
    same(made, p)
    assert not set(pointers(made)) & set(pointers(p)) and made.note == ["kept"] and made.note is not p.note
    with torch.no_grad():
        made.zero_()
    assert p.dequantize().any() and not made.dequantize().any()
    shared = copy.deepcopy([p, p])
    assert shared[0] is shared[1]
    shallow = copy.copy(p)
    assert pointers(shallow) == pointers(p)
    module = torch.nn.Linear(64, 32, bias=False)
    module.weight = p
    same(copy.deepcopy(module).weight, p)


@all_makers
def test_one_copy_is_saved_as_one_copy(name: str) -> None:
    if name == "identity":
        pytest.skip("one copy serves both usages")
    t = ALL[name]("cpu")(values((32, 64)))
    t.update_usage(columnwise_usage=False)
    loaded = through_file(t)
    assert loaded.get_usages() == {"rowwise": True, "columnwise": False}
    same(loaded, t)


def test_plain_buffers_rebuild_a_tensor() -> None:
    """For formats that know plain tensors only."""
    t = T.MXFP8Quantizer(T.DType.kFloat8E4M3)(values((32, 64)))
    metadata = t.get_metadata()
    tensors = {k: v.contiguous() for k, v in metadata.items() if isinstance(v, torch.Tensor)}
    rest = {k: v for k, v in metadata.items() if not isinstance(v, torch.Tensor)}
    same(T.MXFP8Tensor(t.shape, t.dtype, **{k: through_file(v) for k, v in tensors.items()}, **rest), t)


def test_a_process_group_is_not_saved() -> None:
    quantizer = T.Float8CurrentScalingQuantizer(
        T.DType.kFloat8E4M3, "cpu", with_amax_reduction=True, amax_reduction_group=lambda: None
    )
    assert pickle.loads(pickle.dumps(quantizer)).amax_reduction_group is None
