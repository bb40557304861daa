"""Quantized tensors: bytes equal to the core's and to the formulas', buffers as documented, usages, updates."""

from __future__ import annotations

import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import te_torch.tensors as T
from te_core import dtypes, ops
from te_core.errors import ArgumentError, UnsupportedError
from te_core.precision import Operand
from te_core.quantized import Cast
from te_core.runtime import Runtime
from te_core.tensor import from_numpy
from te_torch.tensors import utils
from tests.backends import on_devices
from tests.covering import covering

E4M3, E5M2 = T.DType.kFloat8E4M3, T.DType.kFloat8E5M2


def delayed(device: str, scale: float = 3.0, dtype: Any = E4M3) -> T.Float8Quantizer:
    return T.Float8Quantizer(torch.tensor(scale, device=device), torch.zeros(1, device=device), dtype)


MAKERS: dict[str, Any] = {
    "delayed": delayed,
    "current": lambda d: T.Float8CurrentScalingQuantizer(E5M2, d),
    "current_pow2": lambda d: T.Float8CurrentScalingQuantizer(E4M3, d, force_pow_2_scales=True, amax_epsilon=0.5),
    "block": lambda d: T.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    "tile": lambda d: T.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "mxfp8": lambda d: T.MXFP8Quantizer(E4M3),
    "mxfp8_tile": lambda d: T.MXFP8Quantizer(E5M2, with_2d_quantization=True),
    "nvfp4": lambda d: T.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    "nvfp4_tile": lambda d: T.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4_rows": lambda d: T.NVFP4Quantizer(row_scaled_nvfp4=True),
    "nvfp4_four": lambda d: T.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256),
}
makers = pytest.mark.parametrize("name", MAKERS)
SHAPES = [(128, 256), (24, 40), (2, 3, 48)]
in_shapes = covering(name=MAKERS, shape=SHAPES)


def values(shape: tuple[int, ...], device: str = "cpu", seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(device, dtype)


def core_bytes(x: torch.Tensor, rule: Operand, **given: Any) -> dict[str, np.ndarray]:
    """What the core's CPU operation makes of x: every piece as bytes."""
    rt = Runtime.cpu()
    matrix = x.reshape(-1, x.shape[-1]).cpu().float().numpy().astype(ml_dtypes.bfloat16)
    cast = Cast(
        rule.format,
        rowwise=True,
        columnwise=True,
        epsilon=rule.epsilon,
        power_of_two=rule.power_of_two,
        transform=rule.transform,
        four_over_six=rule.four_over_six,
        **given,
    )
    q = ops.quantize(rt, from_numpy(matrix), cast)
    parts = {"data": "", "scale": "_scale", "amax": "_amax"}
    pieces = {
        f"_{side}_{part}": getattr(q, f"{of}wise{suffix}")
        for side, of in (("row", "row"), ("col", "column"))
        for part, suffix in parts.items()
    }
    return {n: p.numpy().view(np.uint8).copy() for n, p in pieces.items() if p is not None}


@on_devices
@in_shapes
def test_bytes_and_values_are_those_of_the_core(device: str, name: str, shape: tuple[int, ...]) -> None:
    x = values(shape, device)
    quantizer = MAKERS[name](device)
    given = {"scale": from_numpy(np.array([3], np.float32))} if name == "delayed" else {}
    t = quantizer(x)
    wanted = core_bytes(x, quantizer.operand, **given)
    for piece, expected in wanted.items():
        got = getattr(t, piece).cpu().numpy().view(np.uint8)
        assert np.array_equal(got.reshape(expected.shape), expected), piece
    assert t.shape == x.shape and t.dtype == x.dtype and t.device == x.device
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        core = ops.dequantize(Runtime.cpu(), t.cpu().to_core(), dtypes.dtype(dtype)).numpy().astype(np.float32)
        assert np.array_equal(t.dequantize(dtype=dtype).float().cpu().numpy(), core.reshape(shape))
    assert t.dequantize(dtype=torch.float64).dtype is torch.float64
    assert type(t.dequantize()) is torch.Tensor and t.dequantize().dtype is torch.bfloat16


@on_devices
def test_per_tensor_follows_the_formula(device: str) -> None:
    x = values((32, 48), device, dtype=torch.float32)
    quantizer = delayed(device)
    t = quantizer(x)
    data = (x.cpu() * 3).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(t._data.cpu().view(torch.float8_e4m3fn).float(), data.float())
    assert torch.equal(t._transpose.cpu(), t._data.cpu().t())
    assert t._scale_inv.item() == np.float32(1) / np.float32(3)
    assert quantizer.amax.item() == x.abs().max().item()
    assert t._fp8_dtype is E4M3 and not t._transpose_invalid
    current = T.Float8CurrentScalingQuantizer(E5M2, device)(x)
    scale = np.float32(57344) / np.float32(x.abs().max().item())
    assert current._scale_inv.item() == np.float32(1) / scale


def test_stochastic_rounding_draws_anew_and_stays_between_neighbours() -> None:
    quantizer = T.NVFP4Quantizer(stochastic_rounding=True)
    x = torch.full((64, 64), 0.7)
    x[:, 0] = 6.0
    torch.manual_seed(0)
    first, second = quantizer(x), quantizer(x)
    assert not torch.equal(first._rowwise_data, second._rowwise_data)
    torch.manual_seed(0)
    assert torch.equal(first._rowwise_data, quantizer(x)._rowwise_data)
    drawn = first.dequantize()[:, 1:16]  # beside 6, on a grid of halves
    assert drawn.unique().tolist() == [0.5, 1.0] and abs(drawn.mean().item() - 0.7) < 0.03


@makers
@pytest.mark.parametrize("shape", [(128, 256), (48, 80), (2, 32, 64)], ids=str)
def test_scale_shapes_are_documented_ones(name: str, shape: tuple[int, ...]) -> None:
    quantizer = MAKERS[name]("cpu")
    if not hasattr(quantizer, "get_scale_shape"):
        pytest.skip("per tensor: one scale")
    t = quantizer(values(shape))
    m, k = int(np.prod(shape[:-1])), shape[-1]

    def up(n: int, step: int) -> int:
        return -(-n // step) * step

    wanted = {
        "block": [(up(k, 128) // 128, up(m, 4)), (up(m, 128) // 128, up(k, 4))],
        "tile": [(up(m, 128) // 128, up(up(k, 128) // 128, 4)), (up(k, 128) // 128, up(up(m, 128) // 128, 4))],
        "mxfp8": [(up(m, 128), up(up(k, 32) // 32, 4)), (up(up(m, 32) // 32, 4), up(k, 128))],
        "nvfp4": [(up(m, 128), up(k // 16, 4)), (up(k, 128), up(m // 16, 4))],
    }[name if name in ("block", "tile") else name.split("_")[0]]
    assert [tuple(t._rowwise_scale_inv.shape), tuple(t._columnwise_scale_inv.shape)] == wanted
    assert [quantizer.get_scale_shape(shape, c) for c in (False, True)] == wanted


@on_devices
@makers
def test_core_view_shares_the_buffers_and_begins_with_the_columnwise_copy(device: str, name: str) -> None:
    t = MAKERS[name](device)(values((32, 64), device))
    q = t.to_core()
    assert q.rowwise.ptr == t._row_data.data_ptr() and q.columnwise.ptr == t._col_data.data_ptr()
    assert q.block.ptr == q.columnwise.ptr and q.block.owner.dtype is torch.uint8
    again = T.core_from_inner(t.inner_meta(), t.flatten_inner())
    assert again.rowwise.ptr == q.rowwise.ptr and again.format is q.format and again.shape == q.shape
    from_outside = T.from_core(q, t.shape, t.dtype, t._quantizer)
    assert torch.equal(from_outside.dequantize(), t.dequantize())
    assert from_outside._row_data.data_ptr() == t._row_data.data_ptr()
    q.owner = t
    assert t.to_core() is not q and t.to_core().owner is None
    t._row_data = t._row_data.clone()
    assert t.to_core().rowwise.ptr == t._row_data.data_ptr() != q.rowwise.ptr


@on_devices
@makers
def test_a_copy_that_stays_stays_where_it_is(device: str, name: str) -> None:
    """Trainers hold views of it; the memory of the other copy goes, and the core reads what is there."""
    shape = (256, 512)  # above what both copies lie in one block for
    t = MAKERS[name](device)(values(shape, device))
    data, alias, before = t._row_data, t.detach(), t.dequantize()
    column = weakref.ref(t._col_data)
    t.update_usage(columnwise_usage=False)
    assert t._row_data is data and torch.equal(t.dequantize(), before) and t.to_core().columnwise is None
    assert t.to_core().rowwise.ptr == data.data_ptr()
    if "nvfp4" not in name:  # half a byte a value: both copies lie in one block
        del alias
        assert column() is None
        assert all(b.untyped_storage().nbytes() < 2 * data.numel() for b in t.flatten_inner())
    if name.startswith("nvfp4"):
        return  # its columnwise copy alone has no values
    t = MAKERS[name](device)(values(shape, device))
    data, before = t._col_data, t.dequantize()
    t.update_usage(rowwise_usage=False)
    assert t._col_data is data and t.to_core().columnwise.ptr == data.data_ptr() == t.to_core().block.ptr
    if name in ("delayed", "current", "current_pow2", "tile", "mxfp8_tile"):
        assert torch.equal(t.dequantize(), before)


@on_devices
@in_shapes
def test_constructor_takes_what_get_metadata_gives(device: str, name: str, shape: tuple[int, ...]) -> None:
    t = MAKERS[name](device)(values(shape, device))
    if name.startswith("nvfp4") and int(np.prod(shape[:-1])) % 16:
        t.update_usage(columnwise_usage=False)  # half bytes of odd rows have no documented shape
    metadata = t.get_metadata()
    made = type(t)(shape, t.dtype, device=device, **metadata)
    assert torch.equal(made.dequantize(), t.dequantize()) and made.get_usages() == t.get_usages()
    storage = [c for c in type(t).__mro__ if c.__name__ == f"{type(t).__name__}Storage"][0]
    held = storage(**metadata)
    assert held.shape == t.shape and torch.equal(held.dequantize(), t.dequantize())
    first = "data" if "data" in metadata else "rowwise_data"
    assert getattr(made, f"_{first}").data_ptr() == metadata[first].data_ptr()


@makers
def test_usages_of_the_others(name: str) -> None:
    quantizer = MAKERS[name]("cpu")
    both = quantizer(values((48, 80)))
    quantizer.set_usage(columnwise=False)
    t = quantizer(values((48, 80)))
    if name in ("delayed", "current", "current_pow2", "tile", "nvfp4_tile"):
        t.update_usage(columnwise_usage=True)
        for piece in ("_col_data", "_col_scale", "_col_amax"):
            mine, wanted = getattr(t, piece), getattr(both, piece)
            assert (mine is None) == (wanted is None)
            assert mine is None or torch.equal(mine.view(torch.uint8), wanted.view(torch.uint8)), piece
    else:
        with pytest.raises(RuntimeError):
            t.update_usage(columnwise_usage=True)
    both.update_usage(columnwise_usage=False)
    assert both.get_usages() == {"rowwise": True, "columnwise": False}
    assert torch.equal(both.dequantize(), t.dequantize())


@on_devices
@in_shapes
def test_quantize_in_place_and_noop(device: str, name: str, shape: tuple[int, ...]) -> None:
    t = MAKERS[name](device)(values(shape, device))
    wanted = MAKERS[name](device)(values(shape, device, seed=1))
    pointers = [b.data_ptr() for b in t.flatten_inner()]
    old, version = t.dequantize(), t._version
    t.quantize_(values(shape, device, seed=1), noop_flag=torch.ones(1, device=device))
    assert torch.equal(t.dequantize(), old)
    t.quantize_(values(shape, device, seed=1), noop_flag=torch.zeros(1, device=device))
    assert torch.equal(t.dequantize(), wanted.dequantize()) and t._version > version
    assert pointers == [b.data_ptr() for b in t.flatten_inner()]
    for mine, theirs in zip(t.flatten_inner(), wanted.flatten_inner(), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    empty = t._quantizer.make_empty(shape, dtype=torch.bfloat16, device=device)
    t._quantizer.update_quantized(values(shape, device, seed=1), empty)
    assert torch.equal(empty.dequantize(), wanted.dequantize())
    with pytest.raises(ValueError):
        t.quantize_(values((3, 5), device))


def test_quantizers_compare_by_value_or_identity() -> None:
    for name, make in MAKERS.items():
        a, b = make("cpu"), make("cpu")
        assert (a == b) is (name != "delayed") and a == a
        if name != "delayed":
            assert hash(a) == hash(b)
            b.set_usage(columnwise=False)
            assert a != b
    assert MAKERS["mxfp8"]("cpu") != MAKERS["mxfp8_tile"]("cpu")
    grouped = T.Float8CurrentScalingQuantizer(E4M3, "cpu", with_amax_reduction=True, amax_reduction_group=object())
    with pytest.raises(TypeError):
        hash(grouped)
    assert grouped(values((16, 16)))._quantizer.amax_reduction_group is None


def test_quantizer_of_gives_back_the_rule() -> None:
    for make in MAKERS.values():
        rule = make("cpu").operand
        assert T.quantizer_of(rule, torch.device("cpu")).operand == rule
        assert make("cpu").operand is rule  # one object for each rule
    assert T.quantizer_of(None).operand is None


def both(row: Any, column: Any, **options: Any) -> T.HybridQuantizer:
    return T.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column, **options)


def test_options_of_nvfp4_are_taken_as_documented() -> None:
    assert T.NVFP4Quantizer(nvfp4_e4m3_max=256).nvfp4_e4m3_max == 448
    assert T.NVFP4Quantizer(nvfp4_4over6_err_mode="mse").nvfp4_4over6_err_mode == "MSE"


def test_dtype_enum() -> None:
    assert [int(d) for d in T.DType] == list(range(11)) and T.DType.kFloat8E4M3 == 7
    assert T.DType.cast(8) is E5M2 and T.DType.cast(torch.bfloat16) is T.DType.kBFloat16
    assert T.TE_DType[torch.float8_e4m3fn] is E4M3 and T.TE_DType_To_Torch[T.DType.kFloat32] is torch.float32
    assert str(T.QuantizerRole()) == "QuantizerRole()"
    assert str(T.QuantizerRole("linear", name="fc1")) == "module_type=linear|name=fc1"


@on_devices
def test_calibrate_and_amax(device: str) -> None:
    quantizer = delayed(device)
    quantizer.calibrate(torch.tensor([1.0, -7.0, 3.0], device=device))
    assert quantizer.amax.item() == 7.0
    quantizer.calibrate(torch.tensor([2.0], device=device))
    assert quantizer.amax.item() == 2.0
    quantizer(torch.full((16, 16), 5.0, device=device))
    quantizer(torch.full((16, 16), 1.0, device=device))
    assert quantizer.amax.item() == 5.0  # casts never lower it


@on_devices
@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_hybrid_holds_what_each_quantizer_makes(device: str, source: str) -> None:
    x = values((64, 96), device)
    row, column = T.MXFP8Quantizer(E4M3), T.NVFP4Quantizer()
    t = both(row, column, columnwise_source=source)(x)
    one = row(x)
    wanted = column(x if source == "original" else one.dequantize())
    assert torch.equal(t.rowwise_sub_storage._rowwise_data, one._rowwise_data)
    assert torch.equal(t.columnwise_sub_storage._columnwise_data, wanted._columnwise_data)
    assert t.rowwise_sub_storage._columnwise_data is None and t.columnwise_sub_storage._rowwise_data is None
    assert torch.equal(t.dequantize(), one.dequantize())
    row_core, column_core = t.to_core_pair()
    assert row_core.format is row.format and column_core.format is column.format
    pair = T.core_from_inner(t.inner_meta(), t.flatten_inner())
    assert pair[0].rowwise.ptr == row_core.rowwise.ptr and pair[1].columnwise.ptr == column_core.columnwise.ptr
    y = values((64, 96), device, seed=3)
    t.quantize_(y)
    again = both(row, column, columnwise_source=source)(y)
    for mine, theirs in zip(t.flatten_inner(), again.flatten_inner(), strict=True):
        assert torch.equal(mine, theirs)
    t.update_usage(columnwise_usage=False)
    with pytest.raises(RuntimeError):
        t.update_usage(columnwise_usage=True)


def test_hybrid_rule_names_both_sides() -> None:
    hybrid = both(T.IdentityQuantizer(), T.MXFP8Quantizer(E4M3))
    assert hybrid.operand.scaling == "none" and hybrid.operand.columnwise == T.MXFP8Quantizer(E4M3).operand
    back = T.quantizer_of(hybrid.operand)
    assert back.operand == hybrid.operand and isinstance(back.rowwise_quantizer, T.IdentityQuantizer)


@on_devices
def test_identity_keeps_the_values(device: str) -> None:
    x = values((4, 8), device)
    t = T.IdentityQuantizer()(x)
    assert torch.equal(t.dequantize(), x) and t._hp_data.data_ptr() == x.data_ptr()
    assert T.IdentityQuantizer(dtype=torch.float32)(x)._hp_data.dtype is torch.float32
    assert t.to_core().ptr == x.data_ptr() and t.get_usages() == {"rowwise": True, "columnwise": True}


@makers
def test_internal_quantizers_make_storages(name: str) -> None:
    quantizer = MAKERS[name]("cpu")
    quantizer.internal = True
    x = values((2, 16, 48))
    storage = quantizer(x)
    assert isinstance(storage, T.QuantizedTensorStorage) and not isinstance(storage, torch.Tensor)
    assert storage.shape == x.shape and storage.size(-1) == 48 and storage.device.type == "cpu"
    values_before = storage.dequantize()
    flat, objects = T.prepare_for_saving(x, storage, None)
    assert not any(storage.get_usages().values()) and all(f is None or type(f) is torch.Tensor for f in flat)
    back, rest = T.restore_from_saved(objects, [*flat, "rest"], return_saved_tensors=True)
    assert back[0] is x and back[1] is storage and back[2] is None and rest == ["rest"]
    assert torch.equal(storage.dequantize(), values_before)
    assert storage.view(32, 48).shape == (32, 48)


def test_restore_from_func_ctx_is_done_once() -> None:
    class Context:
        pass

    quantizer = T.MXFP8Quantizer(E4M3)
    quantizer.internal = True
    ctx: Any = Context()
    ctx.saved_tensors, ctx.tensor_objects = T.prepare_for_saving(quantizer(values((32, 32))))
    (storage,) = T.restore_from_func_ctx(ctx)
    assert storage.dequantize().shape == (32, 32) and ctx.tensor_objects is None
    with pytest.raises(AttributeError):
        T.restore_from_func_ctx(ctx)


def test_quantizers_of_storages() -> None:
    storage = T.MXFP8Quantizer(E4M3)(values((32, 32)))
    with pytest.warns(UserWarning):
        storage.update_quantizer(T.MXFP8Quantizer(E4M3))
    storage._quantizer = None
    with pytest.raises(RuntimeError):
        storage.update_quantizer(T.MXFP8Quantizer(E4M3))
    storage.quantize_(values((32, 32)))  # by the rule of its format
    with pytest.raises(RuntimeError):
        torch.empty_like(storage)


def test_nvfp4_columns_alone_are_not_dequantized() -> None:
    quantizer = T.NVFP4Quantizer(rowwise=False)
    t = quantizer(values((32, 32)))
    with pytest.raises(NotImplementedError):
        t.dequantize()
    assert "NotImplementedError" in repr(t)


# ------------------------------------------------------------------------------------------------- trainers


@on_devices
@pytest.mark.parametrize("name", ["delayed", "current", "current_pow2", "tile", "mxfp8", "nvfp4_tile"])
@pytest.mark.parametrize("shape", [(32, 64), (24, 41)], ids=str)
def test_master_weights_are_quantized_as_by_the_quantizer(device: str, name: str, shape: tuple[int, int]) -> None:
    master = values(shape, device, seed=5, dtype=torch.float32)
    weight = torch.nn.Parameter(MAKERS[name](device)(values(shape, device)))
    wanted = MAKERS[name](device)(master)
    utils.quantize_master_weights([weight], [master.view(-1)], [0], None)
    assert torch.equal(weight.dequantize().float(), wanted.dequantize().to(torch.bfloat16).float())
    for mine, theirs in zip(weight.flatten_inner(), wanted.flatten_inner(), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    with pytest.warns(DeprecationWarning):
        utils.cast_master_weights_to_fp8([weight], [master.view(-1)], [0], None)


def test_a_shard_is_written_where_it_belongs() -> None:
    weight = torch.nn.Parameter(delayed("cpu")(values((32, 64))))
    before = weight._data.clone().view(-1)
    master = values((100,), seed=6, dtype=torch.float32)
    utils.quantize_master_weights([weight], [master], [70], None, manual_post_all_gather_processing=True)
    assert weight._transpose is None
    data = weight._data.reshape(-1)
    wanted = (master * 3).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(data[70:170], wanted)
    assert torch.equal(data[:70], before[:70]) and torch.equal(data[170:], before[170:])
    utils.post_all_gather_processing([weight])
    assert torch.equal(weight._transpose, weight._data.t())
    shard = torch.zeros(100, dtype=torch.uint8)
    utils.quantize_master_weights([weight], [master], [0], None, [shard])
    assert torch.equal(shard, wanted)


def test_master_weights_are_checked_before_anything_is_written() -> None:
    good, empty = (torch.nn.Parameter(delayed("cpu")(values((32, 64)))) for _ in range(2))
    empty.clear()
    other = torch.nn.Parameter(MAKERS["mxfp8"]("cpu")(values((32, 64))))
    before, amax = good.dequantize(), good._quantizer.amax.clone()
    master = values((2048,), seed=6, dtype=torch.float32)
    for weight, start, shard, error in (
        (empty, 0, None, ArgumentError),
        (torch.ones(32, 64), 0, None, ArgumentError),
        (other, 1, None, ArgumentError),
        (other, 0, torch.zeros(2048, dtype=torch.uint8), UnsupportedError),
    ):
        with pytest.raises(error, match="quantize_master_weights"):
            utils.quantize_master_weights([good, weight], [master, master], [0, start], None, [None, shard])
        assert torch.equal(good.dequantize(), before) and torch.equal(good._quantizer.amax, amax)


def test_is_custom() -> None:
    class Mine(T.MXFP8Quantizer):
        custom = True

    assert utils.is_custom(Mine(E4M3)) and not utils.is_custom(T.MXFP8Quantizer(E4M3))
    assert utils.is_custom(Mine(E4M3)(values((32, 32)))) and not utils.is_custom(None)
