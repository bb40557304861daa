"""The driver's thin wrapper against a libcuda made of Python functions: contexts, stream order, errors."""

from __future__ import annotations

import pytest

from te_core.driver import Driver
from te_core.errors import LibraryError
from tests.core.fake_cuda import FakeCuda
from tests.threads import ends


def calls(lib, name):
    return lib.log.count(name)


def test_one_device_becomes_the_threads_own():
    lib = FakeCuda(1)
    driver = Driver(lib)
    assert driver.attach(0) == 0
    assert lib.stack == [1000]
    assert ends(lambda: (driver.attach(0), list(lib.stack))) == (0, [1000])
    with driver.on(0):
        assert lib.stack == [1000]
    assert calls(lib, "cuCtxPushCurrent_v2") == 0


def test_a_context_that_is_there_stays():
    """A framework has made a context current: it is not replaced."""
    lib = FakeCuda(1)
    lib.stack[-1] = 4242
    Driver(lib).attach(0)
    assert lib.stack == [4242]


def test_several_devices_are_bracketed():
    """Work for a device leaves the thread's own choice as it was, and asks for no change where none is needed."""
    lib = FakeCuda(2)
    driver = Driver(lib)
    lib.stack[-1] = 1000
    with driver.on(1):
        assert lib.stack[-1] == 1001
        with driver.on(0):
            assert lib.stack[-1] == 1000
        assert lib.stack[-1] == 1001
    assert lib.stack == [1000]
    pushes = calls(lib, "cuCtxPushCurrent_v2")
    with driver.on(0):
        pass
    assert calls(lib, "cuCtxPushCurrent_v2") == pushes
    with pytest.raises(ValueError, match="inside"), driver.on(1):
        raise ValueError("inside")
    assert lib.stack == [1000]


def test_a_device_that_is_not_there():
    with pytest.raises(LibraryError, match=r"device 3.*0 to 1"):
        Driver(FakeCuda(2)).attach(3)


def test_order_streams():
    lib = FakeCuda(1)
    driver = Driver(lib)
    for producer, consumer in ((5, 5), (0, 1), (1, 0), (5, -1)):  # the same stream, or no order wanted
        driver.order_streams(0, producer, consumer)
    assert calls(lib, "cuEventRecord") == 0
    driver.order_streams(0, 5, 6)
    driver.order_streams(0, 0, 6)
    assert [name for name in lib.log if "Event" in name] == [
        "cuEventCreate",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuEventRecord",
        "cuStreamWaitEvent",
    ]
    # The producer's work is marked, and the consumer waits for the mark (stream 1: the legacy default).
    marks = [(what, getattr(event, "value", event), stream) for what, event, stream in lib.order]
    assert marks == [("record", 77, 5), ("wait", 77, 6), ("record", 77, 1), ("wait", 77, 6)]


def test_a_first_use_is_allowed_in_a_capture():
    """The thread's capture mode is relaxed inside, and afterwards what it was, whatever happens."""
    lib = FakeCuda(1)
    driver = Driver(lib)
    assert lib.mode == 0
    with driver.at_first_use(0):
        assert lib.mode == 2 and lib.stack == [1000]
        with driver.at_first_use(0):
            assert lib.mode == 2
        assert lib.mode == 2
    assert lib.mode == 0
    with pytest.raises(ValueError, match="inside"), driver.at_first_use(0):
        raise ValueError("inside")
    assert lib.mode == 0


def test_constants_are_there_at_once_and_on_no_callers_stream():
    lib = FakeCuda(1)
    assert Driver(lib).constant(0, b"12345678") == 4096
    assert lib.copied == [(b"12345678", 555, 2)]  # the stream made for it, in relaxed mode
    used = [name for name in lib.log if "Stream" in name or "Memcpy" in name]
    exchange = "cuThreadExchangeStreamCaptureMode"
    assert [name for name in used if name != exchange] == [
        "cuStreamCreate",
        "cuMemcpyHtoDAsync_v2",
        "cuStreamSynchronize",
        "cuStreamDestroy_v2",
    ]
    assert used[0] == used[-1] == exchange and lib.mode == 0


def test_memory_goes_to_and_fro_beside_a_capture():
    """Relaxed, whichever stream is captured; what a capture refuses is given back by the next allocation after it."""
    lib = FakeCuda(1)
    driver = Driver(lib)
    address = driver.allocate(0, 100, 5)
    driver.free(0, address, 5)
    assert lib.freed == [(4096, 5, 2)] and lib.allocated == [(5, 2)] and lib.mode == 0
    lib.fails["free"], lib.captured = 1, {6}
    driver.free(0, 8192, 6)
    driver.allocate(0, 100, 5)  # still in the capture
    lib.captured = set()
    del lib.fails["free"]
    assert lib.freed == [(4096, 5, 2)]
    driver.allocate(0, 100, 5)
    driver.allocate(0, 100, 5)
    assert lib.freed == [(4096, 5, 2), (8192, 6, 2)] and lib.mode == 0


def test_what_is_refused_without_a_capture_is_not_tried_again():
    """Memory of a graph that is gone: its address may be another's by the time of the next allocation."""
    lib = FakeCuda(1)
    driver = Driver(lib)
    driver.allocate(0, 100, 5)
    lib.fails["free"] = 1
    driver.free(0, 8192, 6)
    del lib.fails["free"]
    driver.allocate(0, 100, 5)
    assert not lib.freed


def test_memory_of_two_streams_goes_when_neither_is_alone_in_a_capture():
    lib = FakeCuda(1)
    driver = Driver(lib)
    driver.free(0, driver.allocate(0, 100, 5), 5, (7,))
    assert lib.freed == [(4096, 5, 2)]
    assert [(what, stream) for what, _, stream in lib.order] == [("record", 7), ("wait", 5)]
    for captured in ({5}, {7}):
        lib.captured = captured
        driver.free(0, 8192, 5, (7,))
        driver.allocate(0, 100, 6)
        assert len(lib.freed) == len(lib.order) / 2, "neither freed nor drawn into the graph"
        lib.captured = set()
        driver.allocate(0, 100, 6)
        assert lib.freed[-1] == (8192, 5, 2) and len(lib.freed) == len(lib.order) / 2
    lib.captured = {5, 7}
    driver.free(0, 12288, 5, (7,))
    assert lib.freed[-1] == (12288, 5, 2), "both are in the graph, where events order them, too"


def test_failures_name_the_call():
    lib = FakeCuda(1)
    driver = Driver(lib)
    assert driver.allocate(0, 100, 0) == 4096
    lib.fails["alloc"] = 2
    with pytest.raises(LibraryError, match="allocate 12345 bytes on cuda:0"):
        driver.allocate(0, 12345, 0)
    assert lib.stack == [1000]
