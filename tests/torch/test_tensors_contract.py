"""What is documented of quantizers and quantized tensors beyond their bytes (te_torch/tensors)."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

import te_torch as te
import te_torch.tensors as T
from te_core.errors import UnsupportedError
from te_core.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.covering import covering
from tests.torch.test_tensors import E4M3, delayed, on_devices, values
from tests.torch.test_tensors_dispatch import ALL, all_makers, parameter, pointers
from tests.torch.test_tensors_serialization import through_file


def hybrid(row: Any, column: Any, **options: Any) -> T.HybridQuantizer:
    return T.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column, **options)


# ------------------------------------------------------------------------------------- tensors without quantizer


@on_devices
@all_makers
def test_a_tensor_without_quantizer_is_changed_by_the_rule_of_its_format(device: str, name: str) -> None:
    t, wanted = (ALL[name](device)(values((32, 64), device)).clone() for _ in range(2))
    assert t._get_quantizer() is t._quantizer
    t._quantizer = None
    rule = t._get_quantizer()
    assert type(rule).__name__.replace("CurrentScaling", "") == type(wanted._quantizer).__name__.replace(
        "CurrentScaling", ""
    )
    assert rule.get_usages() == t.get_usages() and t._quantizer is None
    if name not in ("identity", "hybrid"):
        assert rule.format is wanted._format
    if name in ("delayed", "current", "current_pow2"):
        assert torch.equal(rule.scale, wanted._scale_inv.reciprocal())
    x = values((32, 64), device, seed=1)
    with torch.no_grad():
        t.mul_(0.5)
        t.quantize_(x)
        if name.startswith("current"):
            wanted._quantizer = rule
        wanted.quantize_(x)
    if name not in ("nvfp4", "nvfp4_four", "hybrid"):  # the format does not tell a transform, or how a block was chosen
        assert torch.equal(t.dequantize(), wanted.dequantize())
    assert not t.new_zeros((32, 64)).dequantize().any() and type(t.new_zeros((32, 64))) is type(t)
    for make in (lambda: torch.empty_like(t), lambda: t.new_empty((32, 64))):
        with pytest.raises(UnsupportedError, match="without quantizer.*To do: give it one"):
            make()
    assert issubclass(UnsupportedError, RuntimeError)


def test_a_quantized_output_can_be_changed_in_place() -> None:
    module = te.Linear(64, 64, device="cpu", bias=False, params_dtype=torch.bfloat16)
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        y = module(values((32, 64)), fp8_output=True)
        before = y.dequantize()
        y.mul_(-1)
    assert torch.equal(y.dequantize(), -before)


# ------------------------------------------------------------------------------------------------------- updates


@on_devices
@pytest.mark.parametrize("kind", ["delayed", "hybrid", "storage"])
def test_a_skipped_update_leaves_the_quantizers_amax_alone(device: str, kind: str) -> None:
    """Else an optimizer that skips a step on overflow would leave the overflow's maximum behind."""
    quantizer = child = delayed(device)
    if kind == "hybrid":
        quantizer = hybrid(child, T.MXFP8Quantizer(E4M3))
    if kind == "storage":
        quantizer.internal = True
    t = quantizer(values((32, 64), device))
    held = child.amax.clone()
    t.quantize_(torch.full((32, 64), 1e30, device=device), noop_flag=torch.ones(1, device=device))
    assert torch.equal(child.amax, held)
    t.quantize_(torch.full((32, 64), 1e3, device=device), noop_flag=torch.zeros(1, device=device))
    assert child.amax.item() == 1e3
    quantizer.update_quantized(torch.full((32, 64), 1e4, device=device), t, noop_flag=torch.ones((), device=device))
    assert child.amax.item() == 1e3
    quantizer.update_quantized(torch.full((32, 64), 1e4, device=device), t)
    assert child.amax.item() == 1e4


@all_makers
def test_assigned_data_is_the_very_same(name: str) -> None:
    p, other = parameter(name), ALL[name]("cpu")(values((32, 64), seed=3))
    node, same = get_gradient_edge(p).node, id(p)
    p.data = other
    assert id(p) == same and node.variable is p and p.requires_grad and p.is_leaf
    mine, theirs = (t.get_data_tensors() if name != "hybrid" else t._parts[0].get_data_tensors() for t in (p, other))
    assert all(a is b for a, b in zip(mine, theirs, strict=True)) and p._quantizer is other._quantizer
    if name != "hybrid":
        assert pointers(p) == pointers(other)
    with torch.no_grad():
        other.mul_(0.5)
    assert torch.equal(p.dequantize(), other.dequantize())
    p.data = p.data
    assert torch.equal(p.dequantize(), other.dequantize())


@on_devices
@all_makers
def test_assigned_data_may_be_of_another_shape_type_and_place(device: str, name: str) -> None:
    for new in (
        values((64, 32), device),
        values((32, 64), device, dtype=torch.float16),
        values((64, 64), device, seed=2).t(),
    ):
        for given in (new, ALL[name](device)(new)):
            p = parameter(name, device)
            p.data = given
            wanted = ALL[name](device)(new).dequantize() if name != "identity" else new
            assert p.shape == new.shape and p.dtype is new.dtype and type(p) is type(parameter(name))
            assert torch.equal(p.dequantize(), wanted) and isinstance(p, torch.nn.Parameter) and p.requires_grad


# ----------------------------------------------------------------------------------------------------- quantizers


@on_devices
def test_identity_in_a_type_of_its_own(device: str) -> None:
    x = values((32, 64), device, dtype=torch.float32).requires_grad_()
    quantizer = T.IdentityQuantizer(dtype=torch.bfloat16)
    t = quantizer(x)
    assert t.dtype is t._hp_data.dtype is t.dequantize().dtype is torch.bfloat16 and not t._hp_data.requires_grad
    assert torch.equal(t.detach().dequantize(), x.detach().bfloat16())
    (t.dequantize() * 2).sum().backward()
    assert x.grad.dtype is torch.float32 and (x.grad == 2).all()
    assert quantizer.make_empty((4, 4), device=device).dtype is torch.bfloat16
    assert T.IdentityQuantizer().make_empty((4, 4), dtype=torch.float16, device=device).dtype is torch.float16
    assert T.IdentityQuantizer()(x.detach()).dtype is torch.float32
    assert quantizer.quantize(x.detach(), dtype=torch.float32).dtype is torch.float32
    quantizer.internal = True
    assert quantizer(x.detach()).dtype is torch.bfloat16
    held = quantizer(x.detach())
    held.quantize_(x.detach() * 3, noop_flag=torch.ones(1, device=device))
    assert torch.equal(held.dequantize(), x.detach().bfloat16())
    held.update_usage(rowwise_usage=False, columnwise_usage=False)
    assert held.get_usages() == {"rowwise": True, "columnwise": True}


@on_devices
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_tensors_over_given_data(device: str, name: str) -> None:
    quantizer = ALL[name](device)
    kind = torch.float8_e4m3fn if quantizer.dtype is E4M3 else torch.float8_e5m2
    codes = torch.full((32, 64), 56, dtype=torch.uint8, device=device)
    for data in (codes, codes.view(kind)):
        t = quantizer.create_tensor_from_data(data, fake_dtype=torch.bfloat16, requires_grad=True)
        assert type(t) is T.Float8Tensor and t.requires_grad and t.dtype is torch.bfloat16
        assert t._data.data_ptr() == data.data_ptr() and (t._data is data) is (data.dtype is torch.uint8)
        assert t._scale_inv.item() == pytest.approx(1 / 3 if name == "delayed" else 1)
        storage = quantizer.create_tensor_from_data(data, internal=True)
        assert type(storage) is T.Float8TensorStorage and storage.dtype is torch.float32
    scales = torch.full((128, 4), 127, dtype=torch.uint8, device=device)
    t = T.MXFP8Quantizer(E4M3).create_tensor_from_data(data.view(torch.uint8), scales, torch.float16)
    assert t._rowwise_scale_inv is scales and t.get_usages() == {"rowwise": True, "columnwise": False}


def test_which_quantizers_give_the_same_again() -> None:
    safe = {name: make("cpu").is_requantization_safe() for name, make in ALL.items()}
    assert safe == {name: name != "delayed" for name in ALL}
    assert not T.NVFP4Quantizer(stochastic_rounding=True).is_requantization_safe()
    assert not T.Quantizer(rowwise=True, columnwise=True).is_requantization_safe()
    for name, make in ALL.items():
        if safe[name]:
            quantizer = make("cpu")
            for a, b in zip(*[quantizer(values((32, 64))).flatten_inner() for _ in range(2)], strict=True):
                assert torch.equal(a, b)
    mixed = hybrid(delayed("cpu"), T.MXFP8Quantizer(E4M3))
    assert not mixed.is_requantization_safe()
    mixed.set_usage(rowwise=False)
    assert mixed.is_requantization_safe()  # the copy that delayed scaling makes is not made
    mixed.columnwise_source = "rowwise_dequantized"
    assert not mixed.is_requantization_safe()


def test_recipes_of_quantizers() -> None:
    recipes = {
        "delayed": DelayedScaling,
        "current": Float8CurrentScaling,
        "block": Float8BlockScaling,
        "mxfp8": MXFP8BlockScaling,
        "nvfp4": NVFP4BlockScaling,
        "hybrid": CustomRecipe,
        "identity": CustomRecipe,
    }
    for name, recipe in recipes.items():
        assert ALL[name]("cpu")._get_compatible_recipe() is recipe


def test_equality_by_value_ends_with_the_documented_classes() -> None:
    class Mine(T.MXFP8Quantizer):
        pass

    assert Mine(E4M3) != Mine(E4M3) and Mine(E4M3) != T.MXFP8Quantizer(E4M3)
    one = Mine(E4M3)
    assert one == one and hash(one) == hash(one)
    for name in ("delayed", "identity", "hybrid"):
        assert ALL[name]("cpu") != ALL[name]("cpu")
        quantizer = ALL[name]("cpu")
        assert quantizer == quantizer and quantizer != quantizer.copy()
        t = quantizer(values((32, 64)))  # to a compiler they are the same all the same
        (_, first), (_, second) = t.__tensor_flatten__(), t.detach().__tensor_flatten__()
        assert first == second and hash(first[-1]) == hash(second[-1])


def test_the_children_of_a_hybrid_quantizer_are_its_own() -> None:
    row, column = delayed("cpu"), T.MXFP8Quantizer(E4M3)
    both = hybrid(row, column)
    assert both.rowwise_quantizer is row and both.columnwise_quantizer is column
    assert row.get_usages() == {"rowwise": True, "columnwise": False}
    assert column.get_usages() == {"rowwise": False, "columnwise": True}
    row.scale = torch.tensor(7.0)
    assert both(values((32, 64)))._rowwise_storage._scale_inv.item() == pytest.approx(1 / 7)
    assert both.copy().rowwise_quantizer is not row
    both.set_usage(rowwise=False)
    t = both(values((32, 64)))
    assert t._rowwise_storage is None and t.columnwise_sub_storage is t._columnwise_storage
    both.set_usage(columnwise=False)
    nothing = both(values((32, 64)))
    assert nothing.get_usages() == {"rowwise": False, "columnwise": False} and nothing.shape == (32, 64)
    assert nothing.device.type == "cpu" and "RuntimeError" in repr(nothing)
    with pytest.raises(RuntimeError):
        nothing.dequantize()


def test_hybrid_storages_need_their_quantizer_and_can_be_replaced() -> None:
    quantizer = ALL["hybrid"]("cpu")
    t, other = quantizer(values((32, 64))), quantizer(values((32, 64), seed=2))
    parts = {"rowwise_storage": t._rowwise_storage, "columnwise_storage": t._columnwise_storage}
    for wrong in (None, T.MXFP8Quantizer(E4M3)):
        with pytest.raises(TypeError, match="HybridQuantizer"):
            T.HybridQuantizedTensorStorage(quantizer=wrong, **parts)
        with pytest.raises(TypeError, match="HybridQuantizer"):
            T.HybridQuantizedTensor(t.shape, t.dtype, quantizer=wrong, **parts)
    made = T.HybridQuantizedTensorStorage(quantizer=quantizer, **parts)
    assert made._quantizer is not quantizer and made.shape == t.shape and torch.equal(made.dequantize(), t.dequantize())
    assert made._rowwise_storage is t._rowwise_storage is made.rowwise_sub_storage
    made._rowwise_storage, made._columnwise_storage = other._rowwise_storage, None
    assert torch.equal(made.dequantize(), other.dequantize()) and made.get_usages()["columnwise"] is False
    with pytest.raises(RuntimeError):
        made.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert made.get_usages()["rowwise"]  # a refused request drops nothing
    saved = t.detach()
    saved.prepare_for_saving()
    assert t.dequantize().any()  # what was saved through an alias is still here


# -------------------------------------------------------------------------------------------------- without data


@covering(turns=2, name=ALL, usages=["both", "rows", "columns"], internal=[False, True])
def test_a_tensor_is_described_without_data(name: str, usages: str, internal: bool) -> None:
    """Names, shapes, types and the constant part, together with buffers, are a tensor as `make_empty` makes it."""
    quantizer = ALL[name]("cpu")
    quantizer.set_usage(rowwise=usages != "columns", columnwise=usages != "rows")
    quantizer.internal = internal
    dtype = torch.float32 if name == "identity" else torch.bfloat16  # its buffer is of that type
    wanted = quantizer.make_empty((32, 64), dtype=dtype, device="cpu")
    names, context = wanted.__tensor_flatten__()
    specs = quantizer.inner_tensor_specs((32, 64))
    assert specs == {n: (tuple(getattr(wanted, n).shape), getattr(wanted, n).dtype) for n in names}
    inner = quantizer.alloc_tensors((32, 64), device="cpu")
    assert list(inner) == list(specs) == list(names)
    metadata = quantizer.create_metadata((32, 64), dtype=dtype)
    assert metadata == context
    made = type(wanted).__tensor_unflatten__(inner, metadata, (32, 64), (64, 1))
    assert type(made) is type(wanted) and made.shape == wanted.shape and made.dtype is wanted.dtype
    assert made.get_usages() == wanted.get_usages() and made.__tensor_flatten__()[1] == context
    x = values((32, 64), dtype=dtype)
    made.quantize_(x)
    for mine, theirs in zip(made.flatten_inner(), quantizer(x).flatten_inner(), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    storage = quantizer.storage_metadata(torch.bfloat16)
    assert not any(isinstance(v, torch.Tensor) for v in storage.values()) and storage["fake_dtype"] is torch.bfloat16


@all_makers
def test_saving_for_backward_strips_the_object(name: str) -> None:
    t = ALL[name]("cpu")(values((32, 64)))
    wanted = t.dequantize()
    (flat,), objects = T.prepare_for_saving(t)
    assert flat is t and objects == [None]  # autograd saves a tensor as it is
    inner, stripped = t.prepare_for_saving()
    assert stripped is t and inner and not any(isinstance(b, T.QuantizedTensor) for b in inner)
    assert not any(t.get_usages().values()) or name == "hybrid"
    assert t.restore_from_saved([*inner, "rest"]) == ["rest"]
    assert torch.equal(t.dequantize(), wanted)


# ---------------------------------------------------------------------------------------------- copies and files


class Mine(T.Float8Tensor):
    """A user's own class."""


class MineToo(T.HybridQuantizedTensor):
    """Another."""


@pytest.mark.parametrize(("kind", "name"), [(Mine, "current"), (MineToo, "hybrid")])
def test_a_subclass_stays_one(kind: Any, name: str) -> None:
    t = kind.make_like(ALL[name]("cpu")(values((32, 64))))
    assert type(t) is kind
    same = [t.detach(), t.clone(), t.view(32, 64), t[:], t.to_dtype(torch.float16), copy.copy(t), copy.deepcopy(t)]
    same += [pickle.loads(pickle.dumps(t)), torch.nn.Parameter(t), pickle.loads(pickle.dumps(torch.nn.Parameter(t)))]
    for s in same:
        assert type(s) is kind and torch.equal(s.dequantize(dtype=torch.float32), t.dequantize(dtype=torch.float32))
    assert isinstance(same[-1], torch.nn.Parameter) and same[-1].requires_grad
    with torch.serialization.safe_globals([kind]):
        assert type(through_file(t)) is kind
    with pytest.raises(pickle.UnpicklingError):
        file = io.BytesIO()
        torch.save(t, file)
        file.seek(0)
        torch.load(file, weights_only=True)


@on_devices
@all_makers
def test_storages_are_copied_and_saved(device: str, name: str) -> None:
    quantizer = ALL[name](device)
    quantizer.internal = True
    s = quantizer(values((32, 64), device))
    wanted = s.dequantize()
    if name != "hybrid":
        s.to_core()  # what is made of the buffers is no part of the object
    for made in (copy.deepcopy(s), pickle.loads(pickle.dumps(s)), through_file(s), copy.deepcopy([s, s])[1]):
        assert type(made) is type(s) and torch.equal(made.dequantize(), wanted) and made.get_usages() == s.get_usages()
        made.quantize_(values((32, 64), device, seed=2))
    assert torch.equal(s.dequantize(), wanted)
    shallow = copy.copy(s)
    assert [b.data_ptr() for b in shallow.flatten_inner()] == [b.data_ptr() for b in s.flatten_inner()]


@all_makers
def test_usages_can_all_be_dropped(name: str) -> None:
    t = ALL[name]("cpu")(values((32, 64)))
    t.update_usage(rowwise_usage=False, columnwise_usage=False)
    assert name == "identity" or not any(t.get_usages().values())
    if name != "identity":
        with pytest.raises(RuntimeError):
            t.dequantize()
        with pytest.raises(RuntimeError):
            t.update_usage(rowwise_usage=True)
