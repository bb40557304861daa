"""Views of quantized tensors: documented buffers by identity, parts and other shapes in the same class and memory."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_torch as te
import te_torch.tensors as T
from te_core.errors import ArgumentError, UnsupportedError
from te_core.recipe import Float8CurrentScaling
from te_torch.tensors import utils
from te_torch.utils import torch_version
from tests.covering import covering
from tests.torch.test_tensors import both, on_devices, values
from tests.torch.test_tensors_dispatch import ALL, all_makers, pointers

PER_TENSOR = ("delayed", "current", "current_pow2")
per_tensor = pytest.mark.parametrize("name", PER_TENSOR)
#: The documented attributes of each class's buffers.
_BLOCKS = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")
SHOWN = {
    "Float8Tensor": ("_data", "_transpose", "_scale_inv"),
    "Float8BlockwiseQTensor": _BLOCKS,
    "MXFP8Tensor": _BLOCKS,
    "NVFP4Tensor": (*_BLOCKS, "_amax_rowwise", "_amax_columnwise"),
    "IdentityTensor": ("_hp_data",),
}


def shown(t: Any) -> list[torch.Tensor]:
    """The documented buffers of a tensor or storage, of both copies of a hybrid one."""
    if isinstance(t, T.HybridQuantizedTensorStorage):
        return shown(t._rowwise_storage) + shown(t._columnwise_storage)
    names = SHOWN[type(t).__name__.removesuffix("Storage")]
    return [b for n in names if (b := getattr(t, n)) is not None]


def same_objects(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------------- documented buffers


@on_devices
@covering(name=ALL, shape=[(32, 64), (24, 40), (2, 3, 48)])
def test_buffers_are_the_same_objects_each_time_and_for_all_who_share_them(
    device: str, name: str, shape: tuple[int, ...]
) -> None:
    t = ALL[name](device)(values(shape, device))
    for other in (t, t.detach(), t.data, torch.nn.Parameter(t), type(t).make_like(t), copy.copy(t), t.view(shape)):
        assert same_objects(shown(other), shown(t))
        if name != "hybrid":
            assert same_objects(list(other.get_data_tensors()), list(t.get_data_tensors()))
    first = t.detach()  # made before anybody looked
    u = ALL[name](device)(values(shape, device))
    alias = u.detach()
    assert same_objects(shown(alias), shown(u)) and same_objects(shown(first), shown(t))
    copied = t.clone()
    assert not set(map(id, shown(copied))) & set(map(id, shown(t)))


@all_makers
def test_buffers_looked_at_in_inference_mode_can_be_written_later(name: str) -> None:
    t = ALL[name]("cpu")(values((32, 64)))
    with torch.inference_mode():
        held = shown(t)
    for b in held:
        b.copy_(b.clone())
    assert same_objects(held, shown(t)) and not any(b.is_inference() for b in held)


@all_makers
def test_given_buffers_are_shown_as_given(name: str) -> None:
    if name == "hybrid":
        pytest.skip("made of storages")
    t = ALL[name]("cpu")(values((32, 64)))
    metadata = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in t.get_metadata().items()}
    made = type(t)(t.shape, t.dtype, **metadata)
    given = [v for v in metadata.values() if isinstance(v, torch.Tensor)]
    assert {id(b) for b in shown(made)} == {id(b) for b in given}
    assert torch.equal(made.dequantize(), t.dequantize())
    data = SHOWN[type(t).__name__][0]
    if name == "identity":
        return
    new = torch.zeros_like(getattr(t, data))
    setattr(made, data, new)
    assert getattr(made, data) is new and made.detach().get_data_tensors()[0] is new


@per_tensor
def test_a_replaced_buffer_is_let_go_of_and_not_shown(name: str) -> None:
    t = ALL[name]("cpu")(values((32, 64)))
    alias, data = t.detach(), t._data
    t._data = torch.zeros(32, 64, dtype=torch.uint8)
    assert t._data is not data and alias._data is data and not t.dequantize().any() and alias.dequantize().any()
    gone = weakref.ref(t._transpose)
    t.update_usage(columnwise_usage=False)
    del alias
    gc.collect()
    assert gone() is None and t._transpose is None


@on_devices
@per_tensor
def test_a_tensor_without_dimensions_has_a_transpose_without(device: str, name: str) -> None:
    t = ALL[name](device)(torch.tensor(1.5, device=device))
    assert t._data.shape == t._transpose.shape == t.shape == torch.Size([]) and t._data == t._transpose
    t.update_usage(columnwise_usage=False)
    t.update_usage(columnwise_usage=True)
    assert t._transpose.shape == torch.Size([]) and t._data == t._transpose


# ---------------------------------------------------------------------------------------------------------- parts

CUTS: dict[str, Callable[[Any], Any]] = {
    "chunk columns": lambda t: torch.chunk(t, 2, dim=1)[1],
    "chunk rows": lambda t: torch.chunk(t, 3)[1],
    "chunk last": lambda t: torch.chunk(t, 2, dim=-1)[0],
    "split": lambda t: torch.split(t, 3, dim=1)[-1],
    "split sizes": lambda t: torch.split(t, [1, t.shape[0] - 3, 2])[1],
    "narrow": lambda t: t.narrow(1, 1, 2),
    "slice": lambda t: t[1:3, 1:3],
    "step": lambda t: t[::2, 1::3],
    "select": lambda t: t[1],
    "select columns": lambda t: t.select(1, 2),
    "select last": lambda t: t[..., -1],
    "one row": lambda t: t[2:3],
    "nothing": lambda t: t[1:1],
    "all": lambda t: t[:],
    "twice": lambda t: t[1:][:, 1:][..., 1],
}


def matrix(t: torch.Tensor) -> tuple[int, int]:
    return (t.numel() // max(t.shape[-1], 1), t.shape[-1]) if t.ndim else (1, 1)


#: Quantizer, shape, and whether there is a columnwise copy.
FORMS: dict[str, tuple[str, tuple[int, ...], bool]] = {
    "current": ("current", (32, 64), True),
    "delayed, odd": ("delayed", (13, 17), True),
    "rows alone": ("current_pow2", (4, 6, 16), False),
    "delayed, 4 dimensions": ("delayed", (5, 4, 3, 7), True),
}


@on_devices
@covering(form=FORMS, cut=CUTS)
def test_any_part_of_per_tensor_fp8_is_a_view(device: str, cut: str, form: str) -> None:
    name, shape, columnwise = FORMS[form]
    t = ALL[name](device)(values(shape, device))
    t.update_usage(columnwise_usage=columnwise)
    plain = t.dequantize()
    part, wanted = CUTS[cut](t), CUTS[cut](plain)
    assert type(part) is type(t) and torch.equal(part.dequantize(), wanted)
    assert (part.shape, part.stride(), part.storage_offset()) == (
        wanted.shape,
        wanted.stride(),
        wanted.storage_offset(),
    )
    assert part.get_usages() == {"rowwise": True, "columnwise": columnwise} and part._data.shape == part.shape
    if columnwise and part.ndim:
        assert torch.equal(part._transpose, part._data.movedim(-1, 0))
    if part.numel():
        assert part.to_core().shape == matrix(part)
        m, k = matrix(part)
        codes = part.cpu().to_core().rowwise.numpy().view("u1")[:m, :k]
        assert (codes.reshape(part.shape) == part._data.cpu().numpy()).all()
    again = pickle.loads(pickle.dumps(part))
    assert torch.equal(again.dequantize(), wanted) and torch.equal(part.clone().dequantize(), wanted)
    with torch.no_grad():
        part.mul_(-1)
    wanted.mul_(-1)
    assert torch.equal(t.dequantize(), plain)  # of which `wanted` is a view
    if columnwise:
        assert torch.equal(t._transpose, t._data.movedim(-1, 0))


@on_devices
@per_tensor
def test_a_change_of_a_part_leaves_the_rest_alone(device: str, name: str) -> None:
    """All values share a scale: a part is quantized with that, and saturates rather than change the others."""
    t = ALL[name](device)(values((64, 64), device))
    if name == "delayed":
        t._quantizer.scale.fill_(0.5)  # an update since: the tensor still holds 3
    rest, top = t.dequantize()[32:], 57344 / 3 if name == "current" else 448
    with torch.no_grad():
        for part in (t[:32], t.detach()[:32], t.view(2, 32, 64)[0], t[0:16, 8:24]):
            part.copy_(values(part.shape, device, seed=3) * 100)
            part.detach().mul_(2)
            part.view(part.shape).quantize_(values(part.shape, device, seed=4) * 100)
            assert torch.equal(t.dequantize()[32:], rest) and part.dequantize().abs().max() > rest.abs().max() * 0.9
            assert torch.equal(t._transpose, t._data.t())
        t[:32].copy_(ALL[name](device)(values((32, 64), device, seed=5) * 1000))
    assert torch.equal(t.dequantize()[32:], rest) and top > 0
    flag = torch.ones(1, device=device)
    before = t.dequantize()
    t[:32].quantize_(values((32, 64), device), noop_flag=flag)
    assert torch.equal(t.dequantize(), before)
    whole = ALL[name](device)(values((64, 64), device, seed=6))
    t.view(-1).copy_(whole.view(-1))  # the whole, in another shape
    assert torch.equal(t.dequantize(), whole.dequantize())


@on_devices
@pytest.mark.parametrize("name", ["current", "delayed", "nvfp4_tile"])
def test_a_part_of_zeros_takes_any_scale(device: str, name: str) -> None:
    """What FSDP2 makes of a shard: zeros of the padded size, and the shard copied into their rows."""
    shard = ALL[name](device)(values((48, 64), device) * 0.01)
    padded = shard.new_zeros((64, 64))
    with torch.no_grad():
        padded.narrow(0, 0, 48).copy_(shard)
    assert torch.equal(padded.dequantize()[:48], shard.dequantize()) and not padded.dequantize()[48:].any()


def test_a_part_below_one_amax_is_not_changed_by_itself() -> None:
    t = ALL["nvfp4_tile"]("cpu")(values((64, 64)))
    before = t.dequantize()
    with pytest.raises(UnsupportedError, match="change of a part"):
        t[:32].mul_(2)
    assert torch.equal(t.dequantize(), before)
    with torch.no_grad():
        t[:32].copy_(t[32:])  # bytes below the same amax
    assert torch.equal(t.dequantize()[:32], before[32:])
    rows = ALL["nvfp4_rows"]("cpu")(values((64, 64)))
    before = rows.dequantize()
    with torch.no_grad():
        rows[:32].mul_(2)
    assert torch.equal(rows.dequantize()[32:], before[32:]) and torch.equal(rows.dequantize()[:32], before[:32] * 2)


@covering(name=[*PER_TENSOR, "identity", "hybrid of both"], cut=CUTS)
def test_parts_of_a_columnwise_copy_alone_and_of_what_is_made_of_such(name: str, cut: str) -> None:
    quantizer = both(ALL["current"]("cpu"), T.IdentityQuantizer()) if name not in ALL else ALL[name]("cpu")
    t = quantizer(values((4, 6, 16)))
    if name in PER_TENSOR:
        t.update_usage(rowwise_usage=False)
    plain = t.dequantize()
    part, wanted = CUTS[cut](t), CUTS[cut](plain)
    assert type(part) is type(t) and torch.equal(part.dequantize(), wanted)
    assert (part.stride(), part.storage_offset()) == (wanted.stride(), wanted.storage_offset())
    assert name not in PER_TENSOR or part.get_usages() == {"rowwise": False, "columnwise": True}


@on_devices
@pytest.mark.parametrize("name", ["block", "tile", "mxfp8", "nvfp4_tile", "nvfp4_rows", "hybrid"])
def test_blocks_of_rows_are_views_and_other_parts_are_plain_with_a_warning(device: str, name: str) -> None:
    t = ALL[name](device)(values((512, 64), device))
    plain = t.dequantize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = [*torch.chunk(t, 2), *torch.split(t, [128, 384]), t[128:256], t.narrow(0, 384, 128), t[:]]
        wanted = [*torch.chunk(plain, 2), *torch.split(plain, [128, 384]), plain[128:256], plain.narrow(0, 384, 128)]
        wanted.append(plain)
        stacked = t.view(4, 128, 64)
        parts += [stacked[1], stacked[1:3], t.as_strided((128, 64), (64, 1), 128 * 64)]
        wanted += [plain.view(4, 128, 64)[1], plain.view(4, 128, 64)[1:3], plain[128:256]]
    for part, values_ in zip(parts, wanted, strict=True):
        assert type(part) is type(t) and torch.equal(part.dequantize(), values_)
        assert (part.stride(), part.storage_offset()) == (values_.stride(), values_.storage_offset())
    cuts_: list[Callable[[Any], Any]] = [
        lambda a: torch.chunk(a, 2, dim=1)[1],
        lambda a: a[:, 3:7],
        lambda a: a[1:3],
        lambda a: a[5],
        lambda a: a.as_strided((4, 4), (1, 2)),
    ]
    for cut in cuts_:
        with pytest.warns(UserWarning, match=f"{type(t).__name__} of shape .* plain tensor"):
            part = cut(t)
        assert type(part) is torch.Tensor and torch.equal(part, cut(plain))
    if name not in ("nvfp4_rows", "hybrid"):
        with torch.no_grad():
            t[256:384].copy_(t[0:128])
        assert torch.equal(t.dequantize()[256:384], plain[:128]) and torch.equal(t.dequantize()[384:], plain[384:])


@pytest.fixture
def compiled() -> Any:
    torch._dynamo.reset()
    yield lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


def test_parts_and_shapes_are_compiled(compiled: Any) -> None:
    t = ALL["current"]("cpu")(values((24, 40)))
    plain = t.dequantize()
    part = t[8:24, 16:40]
    assert torch.equal(compiled(lambda a: a.dequantize() * 2)(part), plain[8:24, 16:40] * 2)
    assert torch.equal(compiled(lambda a: a.view(40, 24).dequantize() * 2)(t), plain.view(40, 24) * 2)
    made = compiled(lambda a: torch.chunk(a, 2, dim=1)[1])(t)
    assert type(made) is type(t) and torch.equal(made.dequantize(), plain[:, 20:]) and made.stride() == (40, 1)
    t.update_usage(columnwise_usage=False)
    with torch.no_grad():
        compiled(lambda a: a.mul_(-0.5))(t[:8])
    assert torch.equal(t.dequantize()[8:], plain[8:]) and torch.equal(t[:8].dequantize(), plain[:8] * -0.5)


@pytest.mark.skipif(torch_version() < (2, 13), reason="torch before 2.13 hashes sizes where it makes fake tensors")
def test_tensors_are_made_of_buffers_of_any_size_in_compiled_code(compiled: Any) -> None:
    def values_of(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return T.Float8Tensor(
            shape=data.shape, dtype=torch.float32, data=data, fp8_scale_inv=scale, fp8_dtype=T.DType.kFloat8E4M3
        ).dequantize()

    program = compiled(values_of)
    for rows in (16, 32, 48):
        t = ALL["current"]("cpu")(values((rows, 64)))
        assert torch.equal(program(t._data, t._scale_inv), values_of(t._data, t._scale_inv))


def test_gradients_flow_through_parts() -> None:
    t = torch.nn.Parameter(ALL["current"]("cpu")(values((32, 64))))
    (t[8:24].dequantize() * 3).sum().backward()
    wanted = torch.zeros(32, 64, dtype=torch.bfloat16)
    wanted[8:24] = 3
    assert torch.equal(t.grad, wanted)


# --------------------------------------------------------------------------------------------------- other shapes


@on_devices
@per_tensor
@pytest.mark.parametrize(
    ("shape", "other"),
    [
        ((24, 40), (40, 24)),
        ((13, 17), (17, 13)),
        ((24, 48), (2, 12, 48)),
        ((32, 64), (8, 256)),
        ((4, 3, 5, 7), (7, 5, 3, 4)),
        ((17,), (17, 1)),
        ((6, 10), (60,)),
        ((1,), ()),
    ],
    ids=str,
)
def test_per_tensor_fp8_is_seen_in_any_shape(
    device: str, name: str, shape: tuple[int, ...], other: tuple[int, ...]
) -> None:
    t = ALL[name](device)(values(shape, device))
    plain = t.dequantize()
    seen = t.view(other)
    assert type(seen) is type(t) and torch.equal(seen.dequantize(), plain.view(other))
    assert torch.equal(seen.reshape(shape).dequantize(), plain)
    core = seen.to_core()
    m, k = core.shape
    assert (m, k) == matrix(seen)
    if device == "cpu":
        assert (core.rowwise.numpy().view("u1")[:m, :k].reshape(shape) == t._data.numpy()).all()
    for same in (pickle.loads(pickle.dumps(seen)), seen.clone(), copy.deepcopy(seen), seen.detach()):
        assert same.shape == seen.shape and torch.equal(same.dequantize(), plain.view(other))
    copied = seen.clone()
    copied.update_usage(columnwise_usage=True)
    assert torch.equal(copied._transpose, copied._data.movedim(-1, 0) if other else copied._data)
    with torch.no_grad():  # one memory
        seen.copy_(values(shape, device, seed=4).view(other))
    assert torch.equal(t.dequantize(), ALL[name](device)(values(shape, device, seed=4)).dequantize())
    assert torch.equal(t._transpose, t._data.movedim(-1, 0))
    with pytest.raises((NotImplementedError, RuntimeError)):
        t.view(3, t.numel())


@per_tensor
def test_the_transpose_follows_what_is_written_through_views_without_one(name: str) -> None:
    """dgrad reads the transpose: a stale one would be a wrong gradient without a word."""
    t = ALL[name]("cpu")(values((32, 64)))
    alias, copied = t.detach(), t.clone()
    with torch.no_grad():
        t.view(-1).copy_(values((2048,), seed=5))
    for u in (t, alias):
        assert torch.equal(u._transpose, u._data.t()) and torch.equal(u.clone()._transpose, u._data.t())
        core = u.to_core()
        assert (core.columnwise.numpy().view("u1") == core.rowwise.numpy().view("u1").T).all()
    assert torch.equal(copied._transpose, copied._data.t()) and not torch.equal(copied._data, t._data)
    t._data = torch.full((32, 64), 56, dtype=torch.uint8)
    assert torch.equal(t._transpose, t._data.t())
    t.quantize_(values((32, 64), seed=6))
    assert torch.equal(alias.detach()._transpose, alias._data.t())


def test_make_like_takes_shapes_in_which_the_buffers_can_be_seen() -> None:
    t = ALL["mxfp8"]("cpu")(values((32, 64)))
    like = T.MXFP8Tensor.make_like(t, shape=(2, 16, 64), dtype=torch.float16, requires_grad=True)
    assert like.shape == (2, 16, 64) and like.dtype is torch.float16 and like.requires_grad
    assert pointers(like) == pointers(t)
    with pytest.raises(ArgumentError, match="MXFP8Tensor.make_like"):
        T.MXFP8Tensor.make_like(t, shape=(64, 32))
    quantizer = ALL["mxfp8"]("cpu")
    quantizer.internal = True
    storage = quantizer(values((32, 64)))
    assert type(T.MXFP8Tensor.make_like(storage)) is T.MXFP8Tensor


@all_makers
def test_strides_and_offset_are_kept(name: str) -> None:
    t = ALL[name]("cpu")(values((32, 64)))
    if name == "hybrid":
        rest = {"rowwise_storage": t._rowwise_storage, "columnwise_storage": t._columnwise_storage}
    else:
        rest = {k: v for k, v in t.get_metadata().items() if k not in ("quantizer", "fake_dtype")}
    made = type(t)(t.shape, t.dtype, stride=(128, 2), storage_offset=3, quantizer=t._quantizer, **rest)
    for same in (made, made.detach(), made.data, type(t).make_like(made), made.to_dtype(torch.float16), made[:]):
        assert same.stride() == (128, 2) and same.storage_offset() == 3 and not same.is_contiguous()
    for dense in (made.clone(), made.contiguous()):
        assert dense.is_contiguous() and torch.equal(dense.dequantize(), t.dequantize())


def test_an_identity_tensor_lies_as_its_values_do() -> None:
    x = values((32, 64)).t()
    t = T.IdentityQuantizer()(x)
    assert t.stride() == x.stride() == (1, 64) and not t.is_contiguous() and torch.equal(t.dequantize(), x)
    assert t.contiguous().is_contiguous() and t.contiguous()._hp_data.is_contiguous()
    assert torch.equal(t.reshape(-1).dequantize(), x.reshape(-1))


# --------------------------------------------------------------------------------------------- memory of trainers


@on_devices
@all_makers
@pytest.mark.parametrize("shape", [(256, 512), (24, 40)], ids=str)
def test_raw_data_is_what_was_given_and_the_old_memory_is_free(device: str, name: str, shape: tuple[int, int]) -> None:
    t = torch.nn.Parameter(ALL[name](device)(values(shape, device)))
    part = t._rowwise_storage if name == "hybrid" else t
    before, data = t.dequantize(), part.get_data_tensors()[0]
    flat = torch.zeros(data.numel() + 7, dtype=data.dtype, device=device)
    new = flat[7:].view(data.shape)
    old = weakref.ref(part.flatten_inner()[0])
    memory = part.flatten_inner()[0].untyped_storage().data_ptr()
    joint = any(b.untyped_storage().data_ptr() == memory for b in part.flatten_inner()[2:])  # with the other copy
    column = None if name in ("identity", "hybrid") else t.get_data_tensors()[1].clone()
    del data
    utils.replace_raw_data(t, new)
    assert part.get_data_tensors()[0] is new and torch.equal(t.dequantize(), before) and old() is None
    assert joint or all(b.untyped_storage().data_ptr() != memory for b in part.flatten_inner())
    assert t.detach().dequantize().equal(before)
    if column is not None:
        assert torch.equal(t.get_data_tensors()[1], column)
        t.update_usage(columnwise_usage=False)
    assert part.get_data_tensors()[0] is new  # an all-gather writes there
    t.detach().copy_(ALL[name](device)(values(shape, device, seed=2)))
    if name != "delayed":
        assert torch.equal(t.dequantize(), ALL[name](device)(values(shape, device, seed=2)).dequantize())
    with pytest.raises(ArgumentError):
        utils.replace_raw_data(t, flat)
    with pytest.raises(ArgumentError):
        utils.replace_raw_data(torch.ones(3), flat)


@on_devices
@covering(name=[n for n in ALL if n not in ("hybrid", "identity")], how=["data", "set_"])
def test_a_buffer_that_is_exchanged_is_read(device: str, name: str, how: str) -> None:
    """By `.data = ...` or `.set_(...)`, which leave the buffer the object that it was: scales and maxima, too."""
    t, other = (ALL[name](device)(values((128, 256), device, seed) * size) for seed, size in ((1, 1.0), (2, 50.0)))
    t.to_core()  # as a GEMM reads it
    t.mul_(1.0) if name == "current" else None  # and as a change does
    for mine, new in zip(shown(t), shown(other), strict=True):
        if how == "data":
            mine.data = new.clone()
        else:
            with torch.no_grad():
                mine.set_(new.clone())
        core = t.to_core()
        for copy_ in (
            (core.rowwise, core.rowwise_scale, core.rowwise_amax),
            (core.columnwise, core.columnwise_scale, core.columnwise_amax),
        ):
            for piece, held in zip(copy_, t._buffers.of(copy_[0] is core.columnwise), strict=True):
                assert piece is None or piece.ptr == held.data_ptr()
    assert torch.equal(t.dequantize(), other.dequantize())


@on_devices
@pytest.mark.parametrize("offset", [0, 16, 7])
def test_a_layer_reads_weights_wherever_their_data_lies(device: str, offset: int) -> None:
    recipe = Float8CurrentScaling()
    with te.quantized_model_init(recipe=recipe):
        module, other = (te.Linear(64, 48, device=device, params_dtype=torch.bfloat16) for _ in range(2))
    other.load_state_dict(module.state_dict())
    flat = torch.zeros(64 * 48 + 16, dtype=torch.uint8, device=device)
    utils.replace_raw_data(other.weight, flat[offset : offset + 64 * 48])
    outputs = []
    for m in (module, other):
        x = values((32, 64), device, seed=8).requires_grad_()
        with te.autocast(recipe=recipe):
            y = m(x)
        y.sum().backward()
        outputs.append((y.detach(), x.grad, m.weight.grad))
    for a, b in zip(*outputs, strict=True):
        assert torch.equal(a, b)
    core = other.weight.to_core()
    assert (core.rowwise.ptr == other.weight._data.data_ptr()) is (offset % 16 == 0)  # read in place where a GEMM can


def test_pieces_apart_become_one_block_when_it_is_asked_for() -> None:
    rows = ALL["mxfp8"]("cpu")(values((256, 64)))[128:]
    assert (rows.to_core().block.numpy() == rows.clone().to_core().block.numpy()).all()
    t = ALL["mxfp8"]("cpu")(values((32, 64)))
    wanted = t.to_core().block.numpy().copy()
    for n in T.QuantizedTensorStorage._INNER_TENSORS:
        if getattr(t, n) is not None:
            setattr(t, n, getattr(t, n).clone())
    q = t.to_core()
    assert q.columnwise.ptr == t._col_data.data_ptr() and q.columnwise_scale.ptr == t._col_scale.data_ptr()
    block = q.block
    assert (block.numpy() == wanted[: block.nbytes]).all() and q.block is block
    assert t.to_core().columnwise.ptr == q.columnwise.ptr
