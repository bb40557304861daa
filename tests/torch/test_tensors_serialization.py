"""Quantized tensors in files and copies: pickle, torch.save with weights_only, deepcopy, plain buffers."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import te_torch.tensors as T
from te_core.errors import ArgumentError, UnsupportedError
from tests.refusals import not_refused
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


def test_a_process_group_is_not_saved() -> None:
    quantizer = T.Float8CurrentScalingQuantizer(
        T.DType.kFloat8E4M3, "cpu", with_amax_reduction=True, amax_reduction_group=lambda: None
    )
    assert pickle.loads(pickle.dumps(quantizer)).amax_reduction_group is None


# ------------------------------------------------------------------------------------------------ malformed ones

#: What a damaged file, or a mistaken program, may have in the place of a buffer.
DAMAGE: dict[str, Any] = {
    "half of the rows": lambda b: b[: b.shape[0] // 2] if b.ndim else b.new_zeros(0),
    "half of the columns": lambda b: b[..., : b.shape[-1] // 2].contiguous() if b.numel() > 1 else b.new_zeros(0),
    "twice as many": lambda b: torch.cat([b, b, b]),
    "another type": lambda b: b.to(torch.int32),
    "flat and short": lambda b: b.reshape(-1)[:-1],
}
FORMS = [n for n in ALL if n not in ("hybrid", "identity")]


def buffers_of(t: Any) -> dict[str, Any]:
    """The buffers among the keyword arguments that make a tensor."""
    return {n: b for n, b in t.get_metadata().items() if isinstance(b, torch.Tensor)}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", FORMS)
def test_buffers_that_do_not_fit_are_refused(name: str, how: str) -> None:
    """By the constructors of tensors, and by those of storages, whose shape their data tells."""
    t = ALL[name]("cpu")(values((512, 512)))
    metadata, wrong = t.get_metadata(), []
    for field, buffer in buffers_of(t).items():
        if (how == "twice as many" and "data" not in field) or (how == "another type" and "data" in field):
            continue  # scales may be padded; data may come as a float8 type
        damaged = {**metadata, field: DAMAGE[how](buffer)}
        if damaged[field].shape != buffer.shape or damaged[field].dtype != buffer.dtype:
            wrong.append(not_refused(ArgumentError, "", type(t), shape=t.shape, dtype=t.dtype, **damaged))
    assert wrong and not any(wrong), wrong


@pytest.mark.parametrize("name", FORMS)
def test_a_shape_larger_than_its_bytes_is_refused(name: str) -> None:
    t = ALL[name]("cpu")(values((128, 256)))
    for shape in ((256, 256), (128, 512), (2, 128, 256)):
        with pytest.raises(ArgumentError, match=f"^{type(t).__name__}: .*To do: "):
            type(t)(shape=shape, dtype=t.dtype, **t.get_metadata())


@pytest.mark.parametrize("name", FORMS)
def test_half_a_buffer_that_is_set_is_refused_when_it_is_read(name: str) -> None:
    """As the attribute of a tensor that was whole."""
    for field, buffer in buffers_of(ALL[name]("cpu")(values((512, 512)))).items():
        t = ALL[name]("cpu")(values((512, 512)))
        if buffer.numel() == 1 or not hasattr(t, f"_{field}") or "amax" in field:
            continue
        setattr(t, f"_{field}", buffer[: buffer.shape[0] // 2].contiguous())
        torchs = name in ("delayed", "current", "current_pow2")  # a transpose is made anew first, by torch
        with pytest.raises(
            (ArgumentError, RuntimeError), match="is invalid for" if torchs else "^a quantized tensor: got a buffer of"
        ):
            t.to_core()


def leaves(tree: Any, path: tuple[int, ...] = ()) -> Any:
    """Where in nested tuples something is, and what."""
    yield path, tree
    if type(tree) is tuple:
        for i, part in enumerate(tree):
            yield from leaves(part, (*path, i))


def exchanged(tree: Any, path: tuple[int, ...], new: Any) -> Any:
    if not path:
        return new
    return (*tree[: path[0]], exchanged(tree[path[0]], path[1:], new), *tree[path[0] + 1 :])


@all_makers
@pytest.mark.parametrize("storage", [False, True])
def test_damaged_files_end_in_errors_of_ours(name: str, storage: bool) -> None:
    """Each part of what is pickled, exchanged for something else: an error of ours, or a tensor that can be read."""
    quantizer = ALL[name]("cpu")
    quantizer.internal = storage
    maker, arguments = quantizer(values((32, 64))).__reduce_ex__(4)
    refused = 0
    for path, part in list(leaves(arguments))[1:]:
        others = [None, -1, 7, "x", (), (3, 5), 1e30, True, b"z", torch.ones(2), torch.float16]
        if isinstance(part, torch.Tensor) and type(part) is torch.Tensor:
            others += [damage(part) for damage in DAMAGE.values()]
        for other in others:
            damaged = exchanged(arguments, path, other)
            try:
                made = maker(*damaged)
                made.dequantize()
            except (ArgumentError, UnsupportedError):
                refused += 1
            except NotImplementedError as error:  # of one that has no rowwise copy left
                assert "only the rowwise copy" in str(error)
    assert refused > 20
