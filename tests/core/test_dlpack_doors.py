"""Broken DLPack capsules: an error that says what is wrong, and a capsule that is the producer's as before."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from te_core import ArgumentError, from_dlpack
from te_core.tensor import cuda_device
from tests.backends import cuda_devices, requires_cuda
from tests.core.test_tensor_dlpack import Producer
from tests.threads import switching, together

MOST = (1 << 63) - 1


def sizes(*numbers: int) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


class Broken(Producer):
    """Two by three floats whose description is changed."""

    def __init__(self, versioned: bool = True, major: int = 1, minor: int = 0, flags: int = 0, **fields: Any) -> None:
        super().__init__(versioned=versioned)
        self.kept = fields  # the structure holds addresses alone
        if versioned:
            self.managed.major, self.managed.minor, self.managed.flags = major, minor, flags
        for name, value in fields.items():
            setattr(self.managed.dl, name, value)
        self.device = (self.managed.dl.device_type, self.managed.dl.device_id)


BROKEN: dict[str, tuple[Callable[[], Broken], str]] = {
    "another major": (lambda: Broken(major=99), "version 99"),
    "major 0": (lambda: Broken(major=0), "version 0"),
    "an unknown flag": (lambda: Broken(flags=1 << 20), "flags 0x100000"),
    "no shape": (lambda: Broken(shape=None), "shape"),
    "no shape, unversioned": (lambda: Broken(versioned=False, shape=None), "shape"),
    "ndim -1": (lambda: Broken(ndim=-1), "-1 dimensions"),
    "ndim -2**31": (lambda: Broken(ndim=-(1 << 31)), "dimensions"),
    "ndim 2**20": (lambda: Broken(ndim=1 << 20), "1048576 dimensions"),
    "ndim 33": (lambda: Broken(ndim=33), "33 dimensions"),
    "a negative size": (lambda: Broken(shape=sizes(-2, 3)), r"\(-2, 3\)"),
    "two negative sizes": (lambda: Broken(shape=sizes(-2, -3)), r"\(-2, -3\)"),
    "sizes beyond 64 bits": (lambda: Broken(shape=sizes(1 << 62, 1 << 62)), "bytes"),
    "as many bytes as numbers": (lambda: Broken(shape=sizes(MOST, 1)), "bytes"),
    "beyond its memory": (lambda: Broken(shape=sizes(1 << 40, 3)), "memory"),
    "no data": (lambda: Broken(data=None, byte_offset=0), "no data"),
    "no data but an offset": (lambda: Broken(data=None), "no data"),
    "an offset of 2**64 - 8": (lambda: Broken(byte_offset=(1 << 64) - 8), "byte_offset"),
    "an offset of 2**40": (lambda: Broken(byte_offset=1 << 40), "memory"),
    "an address that is not there": (lambda: Broken(data=4096, byte_offset=0), "memory"),
    "between two elements": (lambda: Broken(byte_offset=9), "byte_offset 9"),
    "strides before the memory": (lambda: Broken(strides=sizes(-(1 << 46), 1)), "memory"),
    "strides beyond the memory": (lambda: Broken(strides=sizes(1 << 40, 1)), "memory"),
    "strides beyond 64 bits": (lambda: Broken(strides=sizes(MOST, MOST)), "bytes"),
    "strides below -2**63": (lambda: Broken(strides=sizes(-MOST, -MOST)), "bytes"),
    "two lanes": (lambda: Broken(lanes=2), "2 lanes"),
    "no lanes": (lambda: Broken(lanes=0), "0 lanes"),
    "no bits": (lambda: Broken(bits=0), "0 bits"),
    "an unknown type": (lambda: Broken(code=200), "code 200"),
    "no device": (lambda: Broken(device_type=0), "DLPack device 0"),
    "CUDA -1": (lambda: Broken(device_type=2, device_id=-1), "cuda:-1"),
    "CUDA managed -1": (lambda: Broken(device_type=13, device_id=-1), "cuda:-1"),
    "CUDA 1000": (lambda: Broken(device_type=2, device_id=1000), "cuda:1000"),
}


def test_a_broken_capsule_is_refused_and_stays_the_producers() -> None:
    """Its destructor frees it: neither taken, nor released, nor lost. An honest one is read after it."""
    producers = [(make(), reason) for make, reason in BROKEN.values()]
    for _ in range(2):  # a refusal has changed nothing
        for producer, reason in producers:
            with pytest.raises(ArgumentError, match=f"from_dlpack: got .*{reason}.*Allowed: .*To do: "):
                from_dlpack(producer)
            assert from_dlpack(Broken()).numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
        gc.collect()
        assert {producer.released for producer, _ in producers} == {0}


FINE: dict[str, tuple[Callable[[], Broken], Any]] = {
    "read-only, a copy, padded": (lambda: Broken(flags=7), [[0, 1, 2], [3, 4, 5]]),
    "a later minor": (lambda: Broken(minor=9), [[0, 1, 2], [3, 4, 5]]),
    "nothing in it": (lambda: Broken(data=None, shape=sizes(0, 3)), []),
    "nothing in it, whatever it says": (lambda: Broken(data=None, byte_offset=7, shape=sizes(0, MOST)), None),
    "one number": (lambda: Broken(ndim=0, shape=None), 0),
    "transposed": (lambda: Broken(shape=sizes(3, 2), strides=sizes(1, 3)), [[0, 3], [1, 4], [2, 5]]),
    "spread": (lambda: Broken(strides=sizes(0, 1)), [[0, 1, 2]] * 2),
}


@pytest.mark.parametrize("name", FINE)
def test_what_is_unusual_and_right(name: str) -> None:
    make, expected = FINE[name]
    producer = make()
    ours = from_dlpack(producer)
    if expected is not None:
        assert ours.numpy().tolist() == expected
    assert ours.size or ours.ptr == 0
    del ours
    gc.collect()
    assert producer.released == 1


class Liar:
    """Has part of the protocol."""

    def __init__(self, **methods: Any) -> None:
        for name, value in methods.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    "producer",
    [
        Liar(__dlpack__=lambda **kw: None),
        Liar(__dlpack__=lambda **kw: None, __dlpack_device__=lambda: None),
        Liar(__dlpack__=lambda **kw: None, __dlpack_device__=lambda: ()),
        Liar(__dlpack__=lambda **kw: 3, __dlpack_device__=lambda: (1, 0)),
    ],
    ids=["no device", "None as device", "an empty device", "a number as capsule"],
)
def test_half_a_protocol(producer: Any) -> None:
    with pytest.raises(ArgumentError, match="from_dlpack: got"):
        from_dlpack(producer)


def test_one_capsule_in_many_threads() -> None:
    """One of them gets it, and it is released once."""
    with switching():  # so that they do meet
        for _ in range(50):
            _shown_to_four_threads()


def _shown_to_four_threads() -> None:
    producer = Broken()

    def take() -> Any:
        try:
            return from_dlpack(producer.capsule)
        except ArgumentError:
            return None

    found = together(*[take] * 4)
    assert len(found) == 4 and sum(t is not None for t in found) == 1
    found.clear()
    gc.collect()
    assert producer.released == 1


def test_a_capsule_of_numpy_is_freed_by_whoever_has_it() -> None:
    """A real destructor: refused, the capsule frees the array when it dies; taken, our tensor does."""
    array = np.arange(6, dtype=np.complex64)
    count = sys.getrefcount(array)
    capsule = array.__dlpack__()
    assert sys.getrefcount(array) == count + 1
    with pytest.raises(ArgumentError, match="code 5"):
        from_dlpack(capsule)
    assert sys.getrefcount(array) == count + 1
    del capsule
    assert sys.getrefcount(array) == count
    array = np.arange(6, dtype=np.float32)
    count = sys.getrefcount(array)
    with pytest.raises(ArgumentError, match="equal width"):
        from_dlpack(array, dtype="float16")
    gc.collect()
    assert sys.getrefcount(array) == count


@requires_cuda
def test_a_device_that_this_machine_does_not_have() -> None:
    beyond = cuda_devices()
    with pytest.raises(ArgumentError, match=f"cuda:{beyond}"):
        from_dlpack(Broken(device_type=2, device_id=beyond))
    assert from_dlpack(Broken(device_type=2, device_id=beyond - 1)).device is cuda_device(beyond - 1)


def test_memory_of_a_gpu_without_a_driver() -> None:
    """In a process whose driver cannot be found."""
    code = """if True:
        import ctypes
        real, ctypes.CDLL = ctypes.CDLL, None
        def cdll(name, *args, **kwargs):
            if "libcuda.so" in str(name):
                raise OSError(f"{name}: no such file")
            return real(name, *args, **kwargs)
        ctypes.CDLL = cdll
        from tests.core.test_dlpack_doors import Broken
        from te_core import ArgumentError, from_dlpack
        producer = Broken(device_type=2, device_id=0)
        try:
            from_dlpack(producer)
        except ArgumentError as error:
            assert "cuda:0" in str(error) and "driver" in str(error), error
        else:
            raise AssertionError("taken")
        assert producer.released == 0
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
