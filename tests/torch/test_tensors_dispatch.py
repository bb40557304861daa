"""What torch does with quantized tensors: operators that keep the class, others on values, optimizers, compilers."""

from __future__ import annotations

import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import te_torch.tensors as T
from te_torch.tensors import dispatch
from tests.backends import devices
from tests.covering import covering
from tests.torch.test_tensors import E4M3, E5M2, MAKERS, both, on_devices, values

ALL: dict[str, Any] = {
    **MAKERS,
    "identity": lambda d: T.IdentityQuantizer(),
    "hybrid": lambda d: both(T.MXFP8Quantizer(E4M3), T.NVFP4Quantizer()),
}
all_makers = pytest.mark.parametrize("name", ALL)


def parameter(name: str, device: str = "cpu", shape: tuple[int, ...] = (32, 64)) -> torch.nn.Parameter:
    return torch.nn.Parameter(ALL[name](device)(values(shape, device)).clone())


def pointers(t: Any) -> list[int]:
    return [b.data_ptr() for b in t.flatten_inner()]


@on_devices
@all_makers
def test_detach_clone_and_friends_keep_the_class(device: str, name: str) -> None:
    t = ALL[name](device)(values((32, 64), device))
    for same in (t.detach(), t.contiguous(), t.view(32, 64), t.data, t.view(2, 16, 64), t.reshape(4, 8, 64), t[:]):
        assert type(same) is type(t) and pointers(same) == pointers(t)
        assert torch.equal(same.dequantize().view(32, 64), t.dequantize())
    for copied in (t.clone(), t.cpu() if device == "cuda" else t.to(device, copy=True)):
        assert type(copied) is type(t) and torch.equal(copied.dequantize().cpu(), t.dequantize().cpu())
        assert not set(pointers(copied)) & set(pointers(t))
    assert t.to(device) is t and t.to("meta").shape == t.shape and type(t.to("meta")) is type(t)
    for plain, dtype in ((t.float(), torch.float32), (t.half(), torch.float16), (t.bfloat16(), torch.bfloat16)):
        assert type(plain) is torch.Tensor and plain.dtype is dtype
    assert type(t.to(torch.float32)) is torch.Tensor and torch.equal(t.to(torch.float32), t.float())
    named = t.to_dtype(torch.float16)
    assert named.dtype is torch.float16 and pointers(named) == pointers(t)
    assert type(t.untyped_storage()) is torch.UntypedStorage and t.untyped_storage().nbytes() == 0


@all_makers
def test_streams_and_pinned_memory_reach_every_buffer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: by what stands in the place of torch's."""
    t, told = ALL[name]("cpu")(values((32, 64))), []
    dispatch._KEEPING[torch.ops.aten.record_stream.default](lambda *given: told.append(given), t, "side")
    assert [b.data_ptr() for b, _ in told] == pointers(t)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda b: b.clone())
    pinned = dispatch._KEEPING[torch.ops.aten._to_copy.default](None, t, pin_memory=True)
    assert type(pinned) is type(t) and torch.equal(pinned.dequantize(), t.dequantize())
    assert not set(pointers(pinned)) & set(pointers(t))


@covering(shape=[(32, 64), (24, 40)], name=ALL)
def test_flat_views_and_back(name: str, shape: tuple[int, int]) -> None:
    t = ALL[name]("cpu")(values(shape))
    if name.startswith(("block", "tile", "mxfp8", "nvfp4")):
        with pytest.raises(NotImplementedError):
            t.view(shape[::-1])
    flat = t.view(-1)
    assert type(flat) is type(t) and flat.shape == (t.numel(),)
    assert torch.equal(flat.dequantize(), t.dequantize().view(-1))
    back = flat.detach().view(shape)
    assert torch.equal(back.dequantize(), t.dequantize())
    with torch.no_grad():
        flat.copy_(values(shape, seed=3).view(-1))
    assert torch.equal(t.dequantize(), ALL[name]("cpu")(values(shape, seed=3)).dequantize())
    same = pickle.loads(pickle.dumps(flat))
    assert torch.equal(same.dequantize(), flat.dequantize()) and same.shape == flat.shape


@all_makers
def test_odd_rows_fall_back_to_values(name: str) -> None:
    t = ALL[name]("cpu")(values((48, 64)))
    assert torch.equal(
        torch.as_tensor(t[3:5] if type(t[3:5]) is torch.Tensor else t[3:5].dequantize()), t.dequantize()[3:5]
    )
    assert torch.equal(t[:, 3:7], t.dequantize()[:, 3:7]) and torch.equal(t.t(), t.dequantize().t())
    assert torch.equal(t.sum(0), t.dequantize().sum(0)) and type(t + 1) is torch.Tensor


@on_devices
@all_makers
def test_new_tensors(device: str, name: str) -> None:
    t = ALL[name](device)(values((32, 64), device))
    for made, shape in ((torch.empty_like(t), (32, 64)), (t.new_empty((64, 64)), (64, 64))):
        assert type(made) is type(t) and made.shape == shape and made.device == t.device and made.dtype == t.dtype
        assert made.get_usages() == t.get_usages()
    zeros = torch.zeros_like(t)
    assert type(zeros) is torch.Tensor and zeros.shape == t.shape and not zeros.any()
    assert type(torch.ones_like(t)) is torch.Tensor and torch.ones_like(t).all()
    assert t.new_zeros((32, 64)).shape == (32, 64) and not torch.as_tensor(t.new_zeros((32, 64)).dequantize()).any()
    assert ALL[name](device).make_empty((32, 64), device="meta").device.type == "meta"


@on_devices
@all_makers
def test_copies_into_and_out_of(device: str, name: str) -> None:
    a, b = (ALL[name](device)(values((32, 64), device, seed=s)).clone() for s in (0, 1))
    version, held = a._version, pointers(a)
    a.copy_(b)
    assert torch.equal(a.dequantize(), b.dequantize()) and a._version > version and pointers(a) == held
    for mine, theirs in zip(a.flatten_inner(), b.flatten_inner(), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    c = values((32, 64), device, seed=2)
    a.copy_(c)
    assert torch.equal(a.dequantize(), ALL[name](device)(c).dequantize()) and pointers(a) == held
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        plain = torch.zeros(32, 64, dtype=dtype, device=device)
        assert torch.equal(plain.copy_(a), a.float().to(dtype))
    other = T.Float8CurrentScalingQuantizer(E5M2, device, columnwise=False, force_pow_2_scales=True)(c)
    a.copy_(other)
    if name == "current":  # of the same kind: the bytes, and the transpose of them
        assert torch.equal(a._data, other._data) and torch.equal(a._scale_inv, other._scale_inv)
        assert torch.equal(a._transpose, other._data.t())
    else:
        assert torch.equal(a.dequantize(), ALL[name](device)(other.dequantize()).dequantize())


@on_devices
@covering(kind=["SGD", "Adam", "AdamW"], foreach=[False, True], name=ALL)
def test_optimizers_requantize_into_the_same_buffers(device: str, name: str, foreach: bool, kind: str) -> None:
    p = parameter(name, device)
    plain = torch.nn.Parameter(p.dequantize().detach())
    held = pointers(p)
    for t in (p, plain):
        t.grad = values((32, 64), device, seed=4)
    options = {"momentum": 0.9} if kind == "SGD" else {}
    for t in (p, plain):
        optimizer = getattr(torch.optim, kind)([t], lr=0.25, foreach=foreach, **options)
        version = t._version
        optimizer.step()
        assert t._version > version
        for state in optimizer.state.values():
            assert all(type(s) is torch.Tensor for s in state.values() if isinstance(s, torch.Tensor))
    quantizer = ALL[name](device)
    if name == "delayed":
        assert p._quantizer.amax.item() >= plain.abs().max().item()
    if kind == "SGD":  # one addition, then one rounding
        assert torch.equal(p.dequantize(), quantizer(plain.detach()).dequantize())
    assert pointers(p) == held and isinstance(p, torch.nn.Parameter) and type(p).__name__.endswith("Tensor")


@on_devices
@all_makers
def test_gradients_flow_as_through_the_values(device: str, name: str) -> None:
    p = parameter(name, device)
    plain = torch.nn.Parameter(p.dequantize().detach())
    x = values((8, 64), device, seed=9)
    for w in (p, plain):
        (F.linear(x, w) ** 2).sum().backward()
    assert torch.equal(p.grad, plain.grad) and type(p.grad) is torch.Tensor
    p.grad = None
    (p.dequantize(dtype=torch.float32) * 3).sum().backward()
    assert p.grad.dtype is p.dtype and torch.equal(p.grad, torch.full_like(p.grad, 3))
    y = values((32, 64), device, dtype=torch.float32).requires_grad_()
    quantized = ALL[name](device)(y)
    assert quantized.requires_grad
    (quantized * 2).sum().backward()
    assert torch.equal(y.grad, torch.full_like(y, 2))
    with torch.no_grad():
        assert not ALL[name](device)(y).requires_grad


def test_expand_as_itself_reaches_the_accumulator() -> None:
    p = parameter("mxfp8")
    view = p.expand_as(p)  # held: the graph lives as long as its result
    node = view.grad_fn.next_functions[0][0]
    assert node.variable is p


@all_makers
def test_modules_move_and_convert_quantized_parameters(name: str) -> None:
    module = torch.nn.Linear(64, 32, bias=False)
    module.weight = parameter(name)
    module.to("meta")
    assert module.weight.device.type == "meta" and type(module.weight) is type(parameter(name))
    module.weight = parameter(name)
    before = module.weight.dequantize()
    module.to("cpu")
    assert torch.equal(module.weight.dequantize(), before)
    assert type(module.half().weight) is type(module.weight) and module.weight.dtype is torch.float16
    module.weight = parameter(name)
    state = module.state_dict()
    assert type(state["weight"]) is type(module.weight)
    fresh = torch.nn.Linear(64, 32, bias=False)
    fresh.weight = parameter(name)
    with torch.no_grad():
        fresh.weight.zero_()
    assert not fresh.weight.dequantize().any()
    fresh.load_state_dict(state)
    assert torch.equal(fresh.weight.dequantize(), before)
    fresh.load_state_dict({"weight": values((32, 64), seed=8)})
    assert torch.equal(fresh.weight.dequantize(), ALL[name]("cpu")(values((32, 64), seed=8)).dequantize())
    plain = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    plain.load_state_dict(state)
    assert torch.equal(plain.weight, before)


@all_makers
def test_inference_mode(name: str) -> None:
    p = parameter(name)
    x = values((8, 64), seed=2)
    with torch.inference_mode():
        assert torch.equal(F.linear(x, p), x @ p.dequantize().t()) and type(p.detach()) is type(p)
        t = ALL[name]("cpu")(x.repeat(4, 1))
        t.add_(1)
        assert t.clone().dequantize().shape == (32, 64)


def test_a_change_in_place_is_noticed_by_backward() -> None:
    p = parameter("mxfp8")
    x = values((8, 64)).requires_grad_()
    y = F.linear(x, p)
    p.detach().quantize_(values((32, 64), seed=5))
    with torch.no_grad():
        p.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@all_makers
def test_memory_goes_with_the_tensor(name: str) -> None:
    t = ALL[name]("cpu")(values((32, 64)))
    view = t.to_core_pair() if name == "hybrid" else t.to_core()
    if name != "hybrid":
        view.owner = t
    gone = weakref.ref(t)
    del view, t
    assert gone() is None


@all_makers
def test_repr_never_raises(name: str) -> None:
    t = ALL[name]("cpu")(values((4, 16) if name != "nvfp4" else (16, 16)))
    assert type(t).__name__ in repr(t) and "data=" in repr(t) and repr(parameter(name))
    t.clear()
    assert "RuntimeError" in repr(t)
    assert type(t).__name__ in repr(ALL[name]("cpu").make_empty((32, 32), device="meta"))


def fsdp_hybrid(device: str) -> Any:
    return both(MAKERS["tile"](device), T.MXFP8Quantizer(E4M3))


def gathered(shards: Any, shape: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], Any]:
    """What shards send, as two processes would hold them: concatenated, and what the first says of it."""
    sent = [s.fsdp_pre_all_gather(None, shape, (64, 1), None, None) for s in shards]
    return tuple(torch.cat(pair) for pair in zip(*[tensors for tensors, _ in sent], strict=True)), sent[0][1]


@on_devices
@pytest.mark.parametrize("name", [*ALL, "mixed"])
def test_fsdp_hooks_gather_shards_into_the_whole(device: str, name: str) -> None:
    x = values((512, 64), device)
    whole = (fsdp_hybrid if name == "mixed" else ALL[name])(device)(x)
    if name in ("block", "nvfp4", "nvfp4_rows", "nvfp4_four", "hybrid"):
        with pytest.raises(NotImplementedError):
            whole.fsdp_pre_all_gather(None, x.shape, (64, 1), None, None)
        return
    tensors, said = gathered(torch.split(whole, 256), x.shape)
    made, inner = whole.fsdp_post_all_gather(tensors, said, torch.bfloat16)
    assert type(made) is type(whole) and torch.equal(made.dequantize(), whole.dequantize())
    assert inner == ()  # FSDP2 frees what was gathered by itself, and would do it twice
    again = torch.empty_like(made)
    assert whole.fsdp_post_all_gather(tensors, said, torch.bfloat16, out=again) is None
    assert torch.equal(again.dequantize(), whole.dequantize())
    if name == "mixed":
        made, whole = made.columnwise_sub_storage, whole.columnwise_sub_storage
        assert torch.equal(made.dequantize(), whole.dequantize())
    elif made.get_usages()["columnwise"] and name != "identity":
        assert torch.equal(made._col_data, whole._col_data)


@on_devices
@pytest.mark.parametrize(("name", "rows"), [("mxfp8", 96), ("mxfp8_tile", 32), ("nvfp4_tile", 48), ("tile", 128)])
def test_no_padding_comes_to_lie_between_shards(device: str, name: str, rows: int) -> None:
    x = values((2 * rows, 64), device)
    x[0, 0] = x[rows, 0] = 20.0  # one amax
    whole, shards = ALL[name](device)(x), [ALL[name](device)(h) for h in torch.split(x, rows)]
    made, _ = whole.fsdp_post_all_gather(*gathered(shards, x.shape), torch.bfloat16)
    assert torch.equal(made.dequantize(), whole.dequantize()) and made.to_core().rowwise_scale.nbytes
    assert made._rowwise_scale_inv.shape == whole._rowwise_scale_inv.shape
    if made.get_usages()["columnwise"]:
        for n in ("_columnwise_data", "_columnwise_scale_inv"):
            assert torch.equal(getattr(made, n), getattr(whole, n))


def test_fsdp_shards_of_nvfp4_with_maxima_of_their_own() -> None:
    """After an update each shard has its own amax; the whole is close to what the shards say."""
    x = values((512, 64), dtype=torch.float32)
    x[256:] *= 40
    shards = [MAKERS["nvfp4_tile"]("cpu")(h) for h in torch.split(x, 256)]
    made, _ = shards[0].fsdp_post_all_gather(*gathered(shards, x.shape), torch.float32)
    said = torch.cat([s.dequantize() for s in shards])
    assert torch.equal(made.dequantize(), MAKERS["nvfp4_tile"]("cpu")(said).dequantize())
    assert made._amax_rowwise.item() == said.abs().max().item()


_ROWS, _COLUMNS = (tuple(f"_{side}wise_{part}" for part in ("data", "scale_inv")) for side in ("row", "column"))
GATHERED = {
    **dict.fromkeys(("delayed", "current", "current_pow2"), ("_data",)),
    "identity": ("_hp_data",),
    "tile": _ROWS,
    **dict.fromkeys(("mxfp8", "mxfp8_tile"), _ROWS + _COLUMNS),
    "nvfp4_tile": (*_ROWS, "_amax_rowwise"),
    "mixed": (*(f"_rowwise_storage.{n}" for n in _ROWS), *(f"_columnwise_storage.{n}" for n in _COLUMNS)),
}


@on_devices
@covering(internal=[False, True], name=GATHERED)
def test_buffer_protocol_gathers_shards(device: str, name: str, internal: bool) -> None:
    """By hand what the hooks do: fields of two shards, concatenated, are the whole, for storages too."""
    x = values((512, 64), device)
    x[0, 0] = x[256, 0] = 20.0  # shards of one amax, as those of one parameter have
    quantizer = (fsdp_hybrid if name == "mixed" else ALL[name])(device)
    quantizer.internal = internal
    whole, shards = quantizer(x), [quantizer(h) for h in torch.split(x, 256)]
    assert whole.fsdp_buffer_fields() == GATHERED[name]
    found = [s.fsdp_extract_buffers() for s in shards]
    for buffers, meta in found:
        assert meta["field_names"] == GATHERED[name] and len(buffers) == len(GATHERED[name])
        assert all(b.is_contiguous() for b in buffers) and meta["fake_dtype"] is x.dtype
        assert type(meta["quantizer"]) is type(quantizer)
    tensors = [torch.cat(pair) for pair in zip(*[buffers for buffers, _ in found], strict=True)]
    made = quantizer.make_empty((512, 64), dtype=x.dtype, device=device)
    made.fsdp_assign_gathered(tensors, found[0][1])
    assert torch.equal(made.dequantize(), whole.dequantize())
    if name == "mixed":
        assert torch.equal(made._columnwise_storage.dequantize(), whole._columnwise_storage.dequantize())


# ------------------------------------------------------------------------------------------------ compilers


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


#: Of each storage one, for compilers.
STORAGES = ("delayed", "tile", "mxfp8", "nvfp4", "identity", "hybrid")


def of_storages(*often: str) -> pytest.MarkDecorator:
    """These makers by default, all others in full."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[] if name in often else [pytest.mark.full]) for name in ALL]
    )


@pytest.mark.parametrize("device", devices())
@of_storages("nvfp4", "hybrid")
def test_compiled_dequantize(device: str, name: str) -> None:
    t = ALL[name](device)(values((32, 64), device))
    compiled = torch.compile(lambda a: a.dequantize() + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(t), t.dequantize() + 1)


@pytest.mark.parametrize("device", devices())
@of_storages(*STORAGES)
def test_compiled_linear_with_a_quantized_parameter(device: str, name: str) -> None:
    p = parameter(name, device)
    x = values((8, 64), device, seed=2)
    compiled = torch.compile(F.linear, fullgraph=True, backend="aot_eager")
    y = compiled(x, p)
    assert torch.equal(y, F.linear(x, p))
    y.sum().backward()
    grad, p.grad = p.grad, None
    F.linear(x, p).sum().backward()
    assert torch.equal(grad, p.grad)
    passed = torch.compile(lambda a: a.view(2, 16, 64), fullgraph=True, backend="aot_eager")(p)
    assert type(passed) is type(p) and passed.shape == (2, 16, 64)
    assert torch.equal(passed.dequantize().view(32, 64), p.dequantize())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("current", "mxfp8") else [pytest.mark.full]) for name in MAKERS]
)
def test_compiled_change_in_place(name: str) -> None:
    t = ALL[name]("cpu")(values((32, 64)))
    wanted = t.clone()
    wanted.mul_(2)
    torch.compile(lambda a: a.mul_(2), fullgraph=True, backend="aot_eager")(t)
    assert torch.equal(t.dequantize(), wanted.dequantize())


@on_devices
def test_a_change_follows_another_quantizer(device: str) -> None:
    """What a change leaves for the next one is of no use once the quantizer, or what it reads, is another."""
    t = T.Float8CurrentScalingQuantizer(E4M3, device, columnwise=False)(values((32, 64), device))
    t.mul_(2)
    t.mul_(0.75)
    assert t._kept is not None
    assert torch.frexp(t._scale_inv)[0].item() != 0.5
    t._quantizer.force_pow_2_scales = True
    t.mul_(1)
    assert torch.frexp(t._scale_inv)[0].item() == 0.5, "a power of two"
    scale, amax = torch.full((1,), 8.0, device=device), torch.zeros(1, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t.update_quantizer(T.Float8Quantizer(scale, amax, E4M3))
    for factor in (1.0, 2.0):
        expected = t.dequantize() * factor
        t.mul_(factor)
        assert t._scale_inv.item() == 1 / 8 and amax.item() == expected.abs().max().item()
        assert torch.equal(t.dequantize(), T.Float8Quantizer(scale, amax.clone(), E4M3)(expected).dequantize())
    t._quantizer.scale = torch.full((1,), 4.0, device=device)
    t.mul_(1)
    assert t._scale_inv.item() == 1 / 4
