"""Tensors as views of other libraries' memory: round trips, strides, lifetimes, streams."""

from __future__ import annotations

import ctypes
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_core import ArgumentError, Tensor, dlpack, dtypes, from_dlpack, from_numpy, libraries
from te_core.dtypes import DType
from te_core.runtime import ByteAllocator, Runtime
from te_core.tensor import CPU, META, Device, cuda_device
from tests.backends import cuda_devices, jax_on_gpu

BYTE_SIZED = [d for d in dtypes.ALL if d is not dtypes.float4_e2m1]
NUMPY_OWN = [d for d in BYTE_SIZED if d.numpy.kind in "fiub" and d.numpy.type.__module__ == "numpy"]
ML_DTYPES = [d for d in BYTE_SIZED if d not in NUMPY_OWN]


@dataclass(frozen=True)
class Library:
    """How to make, read and locate an array of one library on one device."""

    types: list[DType]
    make: Callable[[np.ndarray], Any]  # from a NumPy array of the real dtype
    back: Callable[[Tensor], Any]
    address: Callable[[Any], int]
    numpy: Callable[[Any], np.ndarray]  # as unsigned integers of the same width
    strided: bool = True
    stream: Callable[[], int | None] = lambda: None


def raw(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


def numpy_library() -> Library:
    return Library(NUMPY_OWN, lambda a: a, np.from_dlpack, lambda a: a.__array_interface__["data"][0], lambda a: raw(a))


def torch_library(device: str) -> Library:
    import torch

    def make(array: np.ndarray) -> Any:
        whole = torch.from_numpy(raw(array)).to(device)
        return whole.view(getattr(torch, dtypes.dtype(array.dtype).torch_name))

    def back(t: Any) -> np.ndarray:
        return t.view(getattr(torch, f"uint{8 * t.element_size()}")).cpu().numpy()

    stream = (lambda: torch.cuda.current_stream().cuda_stream) if device == "cuda" else lambda: None
    return Library(BYTE_SIZED, make, torch.from_dlpack, lambda t: t.data_ptr(), back, stream=stream)


def jax_library(device: Any) -> Library:
    import jax

    narrow = [d for d in BYTE_SIZED if d.bits < 64]  # JAX has no 64-bit types unless it is told to
    return Library(
        narrow,
        lambda a: jax.device_put(a, device),
        jax.dlpack.from_dlpack,
        lambda a: a.unsafe_buffer_pointer(),
        lambda a: raw(np.asarray(a)),
        strided=False,
    )


def cupy_library() -> Library:
    import cupy

    def stream() -> int:
        return int(cupy.cuda.get_current_stream().ptr)

    return Library(
        NUMPY_OWN, cupy.asarray, cupy.from_dlpack, lambda a: a.data.ptr, lambda a: raw(a.get()), stream=stream
    )


@cache
def library(name: str) -> Library:
    """The library of this name, or a skip with the reason."""
    package, _, place = name.partition("-")
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package == "torch":
        return torch_library(place or "cpu")
    if package == "jax":
        import jax

        return jax_library(jax.devices(place or "cpu")[0])
    return cupy_library() if package == "cupy" else numpy_library()


LIBRARIES = ("numpy", "torch", "jax", *(("torch-cuda", "cupy-cuda") if cuda_devices() else ()))
LIBRARIES += ("jax-cuda",) * jax_on_gpu()
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def arrays(draw: st.DrawFn, types: list[DType]) -> np.ndarray:
    """A dense array of random bytes, of one of these types."""
    dt, shape = draw(st.sampled_from(types)), draw(shapes)
    values = np.random.default_rng(draw(st.integers(0, 999))).integers(0, 256, (*shape, dt.itemsize), np.uint8)
    if dt is dtypes.bool_:
        values &= 1
    return values.view(dt.numpy).reshape(shape)


@st.composite
def views(draw: st.DrawFn, array: Any, backwards: bool) -> tuple[Any, ...]:
    """Slices that make a strided view of an array, and an order of its dimensions."""
    steps = [-2, -1, 1, 2, 3] if backwards else [1, 2, 3]
    cuts = tuple(slice(draw(st.integers(0, 1)), None, draw(st.sampled_from(steps))) for _ in array.shape)
    return (*cuts, ...), draw(st.permutations(range(array.ndim)))


# --- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIBRARIES)
@given(data=st.data())
def test_round_trip_is_zero_copy(name, data):
    lib = library(name)
    array = data.draw(arrays(lib.types))
    theirs = lib.make(array)
    ours = from_dlpack(theirs, stream=lib.stream())
    assert ours.dtype is dtypes.dtype(array.dtype) and ours.shape == array.shape and ours.strides is None
    assert ours.device.kind == ("cuda" if "-" in name else "cpu")
    again = lib.back(ours)
    if array.size:
        assert ours.ptr == lib.address(theirs) == lib.address(again)
    assert str(again.dtype) == str(theirs.dtype)
    np.testing.assert_array_equal(lib.numpy(again), raw(array))
    if ours.device is CPU:
        assert ours.numpy().dtype == array.dtype
        np.testing.assert_array_equal(raw(ours.numpy()), raw(array))


@pytest.mark.parametrize("name", [n for n in LIBRARIES if not n.startswith("jax")])
@given(data=st.data())
def test_strided_views_keep_their_strides(name, data):
    lib = library(name)
    array = data.draw(arrays(lib.types))
    cuts, order = data.draw(views(array, backwards=name == "numpy"))
    theirs, expected = lib.make(array)[cuts], array[cuts].transpose(order)
    theirs = theirs.permute(tuple(order)) if name.startswith("torch") else theirs.transpose(order)
    ours = from_dlpack(theirs, stream=lib.stream())
    again = lib.back(ours)
    np.testing.assert_array_equal(lib.numpy(again), raw(expected))
    if expected.size:
        assert ours.is_contiguous == expected.flags.c_contiguous
        assert lib.address(again) == lib.address(theirs)
    if ours.device is CPU:
        np.testing.assert_array_equal(raw(ours.numpy()), raw(expected))


@given(data=st.data())
def test_numpy_arrays_of_every_type(data):
    array = data.draw(arrays(BYTE_SIZED))
    cuts, order = data.draw(views(array, backwards=True))
    array = array[cuts].transpose(order)
    ours = from_numpy(array)
    view = ours.numpy()
    assert view.dtype == array.dtype and view.shape == array.shape
    np.testing.assert_array_equal(raw(view), raw(array))
    if array.size:
        assert view.strides == array.strides or ours.is_contiguous
        raw(view)[...] = 1
        assert (raw(array) == 1).all()  # the same memory


@pytest.mark.parametrize("dtype", ML_DTYPES, ids=str)
def test_types_numpy_cannot_export_come_as_themselves_or_integers(dtype):
    array = np.arange(24, dtype=f"u{dtype.itemsize}").reshape(4, 6)
    with pytest.raises(BufferError):
        array.view(dtype.numpy).__dlpack__()
    assert from_dlpack(array.view(dtype.numpy)).dtype is dtype
    ours = from_dlpack(array, dtype=dtype.name)
    assert ours.dtype is dtype and ours.ptr == array.__array_interface__["data"][0]
    assert ours.numpy().dtype == dtype.numpy
    with pytest.raises(ArgumentError, match="equal width"):
        from_dlpack(array, dtype="float64")


def test_a_write_through_one_library_is_seen_by_all():
    torch = pytest.importorskip("torch")
    theirs = torch.zeros(3, 4, dtype=torch.bfloat16)
    ours = from_dlpack(theirs)
    ours.numpy()[1, 2] = 1.5
    torch.from_dlpack(ours)[2, 3] = 2.5
    assert theirs[1, 2] == 1.5 and theirs[2, 3] == 2.5 and ours.numpy()[2, 3] == 2.5


def test_from_numpy_refuses_what_it_cannot_view():
    with pytest.raises(ArgumentError, match="whole elements"):
        records = np.zeros(4, dtype=[("pad", "u1"), ("x", "<f4")])
        from_numpy(records["x"])
    with pytest.raises(ArgumentError, match="byte order"):
        from_numpy(np.zeros(3, ">f4"))
    with pytest.raises(ArgumentError, match="ndarray"):
        from_numpy(np.float32(3))
    with pytest.raises(ArgumentError, match="uint8"):
        from_numpy(np.zeros(4, dtypes.float4_e2m1.numpy))


# --- lifetimes ------------------------------------------------------------------------------------


class Counted:
    """A byte-level allocator over ctypes memory that counts what is out."""

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.freed: list[int] = []

    def runtime(self) -> Runtime:
        return Runtime.cpu(ByteAllocator(CPU, self.alloc, self.free))

    def alloc(self, nbytes: int, stream: int) -> int:
        block = (ctypes.c_char * nbytes)()
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int, stream: int) -> None:
        del self.blocks[address]
        self.freed.append(address)


def test_numpy_view_keeps_the_memory():
    memory = Counted()
    view = memory.runtime().empty((4, 4), dtypes.bfloat16).numpy()[1:, ::2]
    gc.collect()
    assert len(memory.blocks) == 1
    del view
    assert not memory.blocks and len(memory.freed) == 1


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_an_export_keeps_the_memory_until_the_consumer_lets_go(name):
    lib, memory = library(name), Counted()
    theirs = lib.back(memory.runtime().zeros((64, 64), dtypes.float32))
    gc.collect()
    if name != "jax":  # JAX may copy what is not aligned as it likes
        assert len(memory.blocks) == 1
    assert not lib.numpy(theirs).any()
    del theirs
    gc.collect()
    assert not memory.blocks and len(memory.freed) == 1


def test_an_array_lives_as_long_as_any_view_of_it():
    class Array(np.ndarray):
        pass

    array = np.arange(12, dtype=np.float32).reshape(3, 4).view(Array)
    alive = weakref.ref(array)
    ours = from_numpy(array).rows(1, 3).reshape(8)
    view = from_dlpack(ours).view_as(dtypes.int32).numpy()
    del array, ours
    gc.collect()
    assert alive() is not None and view.view(np.float32).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    del view
    gc.collect()
    assert alive() is None


def test_a_capsule_nobody_takes_frees_its_memory():
    memory = Counted()
    for versioned in (None, (1, 0)):
        capsule = memory.runtime().empty((8,), dtypes.float8_e4m3).__dlpack__(max_version=versioned)
        assert len(memory.blocks) == 1
        del capsule
        assert not memory.blocks


def test_a_refused_capsule_frees_its_memory_and_tells_why():
    # The capsule dies while the consumer's error is on its way: the error must arrive and nothing may leak.
    memory = Counted()
    with pytest.raises((RuntimeError, BufferError), match="dtype|type"):
        np.from_dlpack(memory.runtime().empty((8,), dtypes.float8_e4m3))
    gc.collect()
    assert not memory.blocks and len(memory.freed) == 1


class Producer:
    """A hand-made DLPack producer: counts the calls of its deleter and notes the streams it is asked for."""

    alive: list[Producer] = []  # for good: what it lends must outlive it, also where a test fails

    def __init__(
        self, device: tuple[int, int] = (1, 0), versioned: bool = False, kind: int = 2, bits: int = 32
    ) -> None:
        self.memory = (ctypes.c_float * 6)(*range(6))
        self.released, self.streams, self.device = 0, [], device
        name = b"dltensor_versioned" if versioned else b"dltensor"
        self.name, self.managed = name, dlpack._LAYOUTS[name]()
        if versioned:
            self.managed.major = 1
        self.shape = (ctypes.c_int64 * 2)(2, 3)
        self.managed.dl = dlpack._DLTensor(
            ctypes.addressof(self.memory) - 8, *device, 2, kind, bits, 1, self.shape, None, 8
        )
        self.deleter = dlpack._Deleter(self.release)
        self.managed.deleter = self.deleter
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.capsule = new(ctypes.addressof(self.managed), name, None)
        self.alive.append(self)

    def release(self, address: int) -> None:
        assert address == ctypes.addressof(self.managed)
        self.released += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **asked: Any) -> Any:
        if self.name == b"dltensor" and "max_version" in asked:
            raise TypeError("this producer is from before DLPack 1.0")
        self.streams.append(asked.get("stream"))
        return self.capsule


@pytest.mark.parametrize("versioned", [False, True])
def test_an_imported_capsule_is_released_exactly_once(versioned):
    producer = Producer(versioned=versioned)
    ours = from_dlpack(producer)
    part = ours.rows(1, 2)
    assert ours.shape == (2, 3) and ours.strides is None and part.numpy().tolist() == [[3, 4, 5]]
    with pytest.raises(ArgumentError, match="only once"):
        from_dlpack(producer)
    del ours
    gc.collect()
    assert producer.released == 0
    del part
    gc.collect()
    assert producer.released == 1


def test_a_capsule_that_cannot_be_used_stays_the_producers():
    for producer, reason in ((Producer(device=(10, 0)), "DLPack device 10"), (Producer(kind=5, bits=64), "code 5")):
        with pytest.raises(ArgumentError, match=reason):
            from_dlpack(producer)
        gc.collect()
        assert producer.released == 0
    producer = Producer()
    with pytest.raises(ArgumentError, match="equal width"):
        from_dlpack(producer, dtype="float16")  # taken, then found unfit: released
    gc.collect()
    assert producer.released == 1


def test_a_bare_capsule_and_a_plain_object():
    producer = Producer()
    ours = from_dlpack(producer.capsule)
    assert ours.numpy()[1, 2] == 5
    del ours
    assert producer.released == 1
    with pytest.raises(ArgumentError, match="__dlpack__"):
        from_dlpack([1.0, 2.0])


# --- streams --------------------------------------------------------------------------------------


class Driver:
    """Notes which stream is made to wait for which."""

    device_count = 8

    def __init__(self) -> None:
        self.orders: list[tuple[int, int, int]] = []

    def order_streams(self, index: int, producer: int, consumer: int) -> None:
        self.orders.append((index, producer, consumer))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(libraries, "driver", lambda: found)
    return found


def test_an_importer_names_its_stream(driver):
    for given_stream, asked in ((None, 1), (0, 1), (7, 7)):
        producer = Producer(device=(2, 1), versioned=True)
        ours = from_dlpack(producer, stream=given_stream)
        assert producer.streams == [asked] and ours.device is cuda_device(1)
    producer = Producer()
    from_dlpack(producer, stream=7)  # host memory: its producers take no stream
    assert producer.streams == [None]


def test_memory_of_a_device_that_this_process_sees(driver):
    for index in (-1, driver.device_count):
        producer = Producer(device=(2, index), versioned=True)
        with pytest.raises(ArgumentError, match=f"memory of cuda:{index}.*the 8 CUDA devices"):
            from_dlpack(producer)
        assert producer.released == 0
    assert from_dlpack(Producer(device=(2, 7))).device is cuda_device(7)


class Block:
    """An owner that was written on a stream."""

    def __init__(self, stream: int) -> None:
        self.stream = stream


def test_an_export_orders_the_writers_stream_before_the_consumers(driver):
    ours = Tensor(256, (4,), dtypes.float32, cuda_device(3), Block(5))
    for consumer in (9, 2, None, 5, -1):
        ours.__dlpack__(stream=consumer)
    assert driver.orders == [(3, 5, 9), (3, 5, 2), (3, 5, 0)]  # neither for its own stream nor for -1
    driver.orders.clear()
    Tensor(256, (4,), dtypes.float32, cuda_device(3), Block(0)).__dlpack__(stream=1)  # two names of one stream
    assert driver.orders == []
    Tensor(256, (4,), dtypes.float32, CPU, Block(5)).__dlpack__(stream=None)
    assert driver.orders == []


def test_an_imported_tensor_is_exported_after_the_stream_it_was_used_on(driver):
    ours = from_dlpack(Producer(device=(2, 0), versioned=True), stream=5)
    ours.rows(0, 1).__dlpack__(stream=9)
    assert driver.orders == [(0, 5, 9)]


def test_a_framework_orders_its_own_tensor(driver):
    theirs = Producer(device=(2, 0), versioned=True)
    ours = Tensor(256, (4,), dtypes.float32, cuda_device(0), theirs)
    ours.__dlpack__(stream=9)
    ours.__dlpack__()
    assert theirs.streams == [9, 1] and driver.orders == []


def test_an_export_describes_the_device_and_type():
    ours = Tensor(4096, (4, 2), dtypes.float8_e5m2, cuda_device(3), None, (1, 4))
    for versioned in (None, (1, 0)):
        capsule = ours.__dlpack__(max_version=versioned)
        _, managed = dlpack._open(capsule)
        dl = managed.dl
        assert (dl.device_type, dl.device_id, dl.data, dl.byte_offset) == (2, 3, 4096, 0)
        assert (dl.code, dl.bits, dl.lanes, dl.ndim) == (12, 8, 1, 2)
        assert dl.shape[:2] == [4, 2] and dl.strides[:2] == [1, 4]


def test_what_cannot_be_exported():
    ours = from_numpy(np.zeros(4, np.float32))
    for wrong in ({"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError, match="without a copy"):
            ours.__dlpack__(**wrong)
    assert from_dlpack(ours.__dlpack__(dl_device=(1, 0), copy=False)).ptr == ours.ptr
    meta = Tensor(0, (4,), dtypes.float32, META, None)
    for ask in (meta.__dlpack__, meta.__dlpack_device__):
        with pytest.raises(BufferError, match="meta"):
            ask()
    packed = Tensor(ours.ptr, (8,), dtypes.float4_e2m1, CPU, ours)
    with pytest.raises(ArgumentError, match="uint8"):
        packed.__dlpack__()


# --- the Tensor itself ----------------------------------------------------------------------------


@given(data=st.data())
def test_shape_strides_and_views_agree_with_numpy(data):
    array = data.draw(arrays(BYTE_SIZED))
    ours = from_numpy(array)
    assert (ours.ndim, ours.size, ours.nbytes) == (array.ndim, array.size, array.nbytes)
    assert ours.is_contiguous and (
        not array.size or ours.row_major_strides() == tuple(s // array.itemsize for s in array.strides)
    )
    flat = ours.reshape(-1) if array.size else ours.reshape(0)
    assert flat.shape == (array.size,)
    np.testing.assert_array_equal(raw(flat.numpy()), raw(array).reshape(-1))
    if array.ndim:
        start = data.draw(st.integers(0, array.shape[0]))
        stop = data.draw(st.integers(start, array.shape[0]))
        np.testing.assert_array_equal(raw(ours.rows(start, stop).numpy()), raw(array)[start:stop])


def test_rows_of_a_strided_tensor():
    array = np.arange(40, dtype=np.int16).reshape(5, 8)[::-1, 1::3]
    np.testing.assert_array_equal(from_numpy(array).rows(1, 4).numpy(), array[1:4])


def test_an_empty_tensor_is_dense_whatever_its_strides():
    assert from_numpy(np.zeros((5, 8))[0:0, ::2]).is_contiguous
    assert from_numpy(np.zeros((5, 8))[::2, 3:3]).is_contiguous


def test_misused_tensors_say_how_to_mend_it():
    ours = from_numpy(np.zeros((4, 6), np.float32))
    for wrong in (
        lambda: ours.reshape(5, 5),
        lambda: ours.reshape(-2, -12),
        lambda: from_numpy(np.zeros((4, 6)).T).reshape(24),
        lambda: ours.rows(1, 5),
        lambda: ours.rows(3, 2),
        lambda: Tensor(0, (1,), dtypes.float32, cuda_device(0), None).numpy(),
        lambda: ours.view_as(dtypes.float16),
        lambda: Device("tpu"),
    ):
        with pytest.raises(ArgumentError, match="To do"):
            wrong()


def test_devices_are_singletons_also_after_pickling():
    assert Device("cuda", 1) is cuda_device(1) is not cuda_device(0)
    assert pickle.loads(pickle.dumps([CPU, cuda_device(1)])) == [CPU, cuda_device(1)]
    assert pickle.loads(pickle.dumps(META)) is META
    assert [repr(d) for d in (CPU, META, cuda_device(2))] == ["cpu", "meta", "cuda:2"]
