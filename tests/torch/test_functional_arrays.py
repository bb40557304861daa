"""`te_core.functional` on arrays of other libraries: the bits of the core, in their memory, without a copy."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import te_torch
from te_core import ArgumentError, Tensor, dtypes
from te_core import functional as te
from te_core.functional import arrays
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from te_core.runtime import Runtime
from te_core.tensor import CPU, Device
from tests.backends import requires_cuda, requires_jax_cuda

DRAW = np.random.default_rng(0)
X, W, B = (DRAW.standard_normal(shape).astype(np.float32) for shape in ((2, 8, 32), (16, 32), (16,)))


def as_numpy(array: Any, device: str) -> Any:
    return array


def as_torch(array: Any, device: str) -> Any:
    return torch.from_numpy(array).to(device)


def as_jax(array: Any, device: str = "cpu") -> Any:
    jax = pytest.importorskip("jax")
    return jax.device_put(array, jax.devices(device)[0])


def as_cupy(array: Any, device: str) -> Any:
    return pytest.importorskip("cupy").asarray(array)


def as_core(array: Any, device: str) -> Tensor:
    return (Runtime.cpu() if device == "cpu" else Runtime.cuda()).tensor(array)


class Lender:
    """Speaks DLPack, and nothing else."""

    def __init__(self, array: Any, device: str) -> None:
        self.array = as_torch(array, device)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


LIBRARIES: dict[str, tuple[Any, str]] = {
    "torch": (as_torch, "Tensor"),
    "jax": (as_jax, "Tensor"),
    "te_core": (as_core, "Tensor"),
    "dlpack": (Lender, "Tensor"),
    "numpy": (as_numpy, "ndarray"),
    "cupy": (as_cupy, "ndarray"),
}
ON = [("cpu", name) for name in LIBRARIES if name not in ("cupy", "te_core")]
ON += [
    pytest.param("cuda", name, marks=requires_jax_cuda if name == "jax" else requires_cuda)
    for name in LIBRARIES
    if name not in ("numpy", "te_core")
]


def host(array: Any) -> Any:
    """Its values, whatever library it is of."""
    tensor = arrays.read("test", "result", array)
    return (Runtime.cpu() if tensor.device is CPU else Runtime.cuda()).numpy(tensor)


@pytest.mark.parametrize(("device", "library"), ON)
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), DelayedScaling(amax_history_len=2)])
def test_equal_bits(device: str, library: str, recipe: Any) -> None:
    wanted: dict[str, Any] = {}
    for make, kind in (LIBRARIES["te_core"], LIBRARIES[library]):
        x, w, b = (make(array, device) for array in (X, W, B))
        scaling = te.Scaling(recipe, te.linear, like=x) if recipe is not None else None
        y, back = te.linear(x, w, b, recipe=recipe, scaling=scaling)
        found = {"y": y, **back(make(np.ones((2, 8, 16), np.float32), device))}
        if scaling is not None:
            te.update(scaling)
            found |= scaling.arrays()
        assert {type(array).__name__ for array in found.values()} == {kind}
        found = {name: host(array) for name, array in found.items()}
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
        wanted = found


def test_torchs_results_lie_in_torchs_memory() -> None:
    x = torch.randn(4, 2, 32, dtype=torch.bfloat16)
    y, back = te.layernorm(x, torch.ones(32), torch.zeros(32))
    assert y.dtype is torch.bfloat16 and y.shape == x.shape and y.is_contiguous()
    y += 1
    assert back(torch.zeros_like(x))["weight"].dtype is torch.float32
    part, _ = te.rope(torch.randn(4, 2, 3, 8), torch.zeros(4, 8))
    assert part.untyped_storage().nbytes() == part.numel() * 4


def test_a_buffer_of_torchs_is_added_to() -> None:
    x, w = torch.from_numpy(X), torch.from_numpy(W)
    _, back = te.linear(x, w, needs="weight")
    main = torch.ones(16, 32)
    grads = back(torch.ones(2, 8, 16), into={"weight": main}, accumulate=True)
    assert grads["weight"] is main
    torch.testing.assert_close(main, 1 + x.sum((0, 1)).expand(16, 32), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=requires_jax_cuda)])
def test_jax_takes_what_comes_out(device: str) -> None:
    (y, _), (wanted, _) = te.l2_norm(as_jax(X, device)), te.l2_norm(as_core(X, device))
    given = pytest.importorskip("jax").dlpack.from_dlpack(y)
    assert given.platform() == {"cpu": "cpu", "cuda": "gpu"}[device]
    assert np.array_equal(np.asarray(given), host(wanted))


def test_which_calls_end_with_their_work() -> None:
    """On a device those with an array of JAX among their arguments, and no others: lists and None are no arrays."""
    there, cpu = Device("cuda", 0), Runtime.cpu()
    rt = Runtime(there, 0, cpu.allocator, cpu.backend)

    def ends(**given: Any) -> bool:
        return bool(te.linear._where(given, {"x": SimpleNamespace(device=there)}, rt).waits)

    x, w = torch.from_numpy(X), torch.from_numpy(W)
    assert not ends(x=x, weight=w, bias=None) and not ends(x=x, weight=[w, w], bias=[None])
    assert ends(x=as_jax(X), weight=w, bias=None) and ends(x=x, weight=as_jax(W), bias=None)
    assert ends(x=x, weight=[w, as_jax(W)])


@requires_jax_cuda
def test_jax_on_cuda_may_reuse_its_memory_after_a_call() -> None:
    """JAX's stream does not wait for ours: calls end when their work has ended."""
    x, stream = as_jax(X, "cuda"), torch.cuda.default_stream()
    torch.cuda._sleep(200_000_000)
    assert not stream.query()
    _, back = te.l2_norm(x)
    assert stream.query()
    torch.cuda._sleep(200_000_000)
    back(as_jax(X, "cuda"))
    assert stream.query()


def test_jax_arrays_are_not_written_to() -> None:
    x, w = map(as_jax, (X, W))
    _, back = te.linear(x, w)
    with pytest.raises(ArgumentError, match="in read-only memory"):
        back(as_jax(np.ones((2, 8, 16), np.float32)), into={"weight": as_jax(W)})


def test_what_torch_may_not_lend() -> None:
    x, freed = torch.randn(4, 32), torch.randn(4, 32)
    freed.untyped_storage().resize_(0)
    for wrong, said in (
        (torch.randn(4, 32, requires_grad=True), "requires grad"),
        (torch.randn(4, 32, device="meta"), "meta"),
        (torch.randn(32, 4).t(), "dense arrays"),
        (torch.randn(4, 32).to_sparse(), "x"),
        (freed, "storage was freed"),
        (torch.randn(4, 32, dtype=torch.complex64), "complex64"),
    ):
        with pytest.raises(ArgumentError, match=f"(?s){said}.*To do"):
            te.l2_norm(wrong)
    with pytest.raises(ArgumentError, match="weight"):
        te.linear(x, torch.nn.Parameter(torch.randn(8, 32)))


def test_a_tensor_is_read_in_few_calls() -> None:
    """Calls of Python and of C together, of which each costs a twentieth of a microsecond and more."""
    x, calls = torch.randn(4, 32, dtype=torch.bfloat16), []
    arrays.read("test", "x", x)
    sys.setprofile(lambda frame, event, arg: calls.append(event) if event in ("call", "c_call") else None)
    try:
        t = arrays.read("test", "x", x)
    finally:
        sys.setprofile(None)
    assert (t.ptr, t.shape, t.dtype, t.device) == (x.data_ptr(), (4, 32), dtypes.bfloat16, CPU)
    assert len(calls) <= 8, calls


def test_what_jax_may_not_lend() -> None:
    jax = pytest.importorskip("jax")
    gone = jax.numpy.ones((4, 32))
    gone.delete()
    with pytest.raises(ArgumentError, match="(?s)x of type.*deleted.*To do"):
        te.l2_norm(gone)
    with pytest.raises(ArgumentError, match="x of type"):
        jax.jit(lambda x: te.l2_norm(x)[0])(jax.numpy.ones((4, 32)))


def test_a_module_goes_on_by_hand() -> None:
    """With its parameters and the entries of its state by their own names, bit for bit."""
    recipe = DelayedScaling(amax_history_len=2)
    module, x = te_torch.LayerNormMLP(32, 64, device="cpu"), torch.from_numpy(X)
    for _ in range(2):
        with te_torch.autocast(recipe=recipe):
            module(x).sum().backward()
    entries = module.state_dict()
    scaling = te.Scaling(recipe, te.layernorm_mlp, like=x)
    scaling.load({name.partition(".")[2]: entry for name, entry in entries.items() if "fp8_state." in name})
    assert scaling.scale_fwd[0] != 1
    p = {name: value.detach() for name, value in module.named_parameters()}
    y, back = te.layernorm_mlp(x, **p, recipe=recipe, scaling=scaling)
    module.zero_grad()
    with te_torch.autocast(recipe=recipe):
        wanted = module(x)
        wanted.sum().backward()
    grads = back(torch.ones_like(y))
    assert torch.equal(y, wanted)
    for name, value in module.named_parameters():
        assert torch.equal(grads[name], value.grad), name
    te.update(scaling)
    assert torch.equal(scaling.scale_bwd, module.fp8_state.scale_bwd)


class Cupy:
    """Stands in for CuPy: its arrays, on NumPy's memory, and its pool and streams, as far as they are asked for."""

    class Pointer(NamedTuple):
        """An address with what keeps it alive."""

        ptr: int
        owner: Any

        def __add__(self, offset: Any) -> Any:
            return Cupy.Pointer(self.ptr + offset, self.owner)

    class ndarray:  # noqa: N801  # as it is called there
        """An array, of NumPy's one or over an address."""

        def __init__(self, shape: Any, dtype: Any = None, memptr: Any = None) -> None:
            of = shape if memptr is None else np.empty(shape, dtype)
            self.dtype, self.shape, self.strides, self.flags = of.dtype, of.shape, of.strides, of.flags
            self.data = Cupy.Pointer(of.ctypes.data, of) if memptr is None else memptr
            self.device = SimpleNamespace(id=1)

    cuda = SimpleNamespace(
        get_current_stream=lambda device=-1: SimpleNamespace(ptr=7),
        runtime=SimpleNamespace(getDevice=lambda: 0),
        Device=lambda index: nullcontext(),
        ExternalStream=lambda stream: nullcontext(),
    )

    @staticmethod
    def empty(count: int, dtype: Any) -> Any:
        return Cupy.ndarray(np.empty(count, dtype))


def test_how_cupys_arrays_are_read() -> None:
    """On a GPU examples/functional_cupy.py runs; here is no CuPy to ask."""
    there = Device("cuda", 1)
    t = arrays._read_cupy(Cupy.ndarray(W))
    assert (t.ptr, t.shape, t.strides, t.dtype, t.device) == (W.ctypes.data, W.shape, None, dtypes.float32, there)
    assert arrays._read_cupy(Cupy.ndarray(W.T)).strides == (1, 32)
    with pytest.raises(ArgumentError, match="byte strides"):
        arrays._read_cupy(Cupy.ndarray(np.zeros(4, [("a", "i2"), ("b", "f4")])["b"]))


def test_results_lie_in_cupys_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", Cupy)
    block = arrays._CupyMemory(Device("cuda", 1)).empty((4, 6), dtypes.float32, 7)
    whole = arrays._give_cupy(block)
    assert (whole.data.ptr, whole.shape, whole.dtype) == (block.ptr, (4, 6), np.float32)
    part = arrays._give_cupy(block.rows(1, 3).reshape(12))
    assert (part.data.ptr, part.shape, part.data.owner) == (block.ptr + 24, (12,), block.owner.data.owner)
    half = arrays._CupyMemory(Device("cuda", 1)).empty((3,), dtypes.bfloat16, 9)
    assert arrays._give_cupy(half) is half  # CuPy has no such type
