"""An engine of its own serves an MLP by te_core: its memory, its two streams, its event loop; te_core brings nothing.

    python examples/engine.py [cpu|cuda [REQUESTS]]

Requests of ever new sizes are served at once. te_core is given addresses, and takes what it needs from the engine's
pool; at the end counters say that it allocated nothing elsewhere, and that the host never waited for it. A few seconds
on a CPU core or a GPU.
"""

import asyncio
import ctypes
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too
from te_core import calls, dtypes
from te_core.recipe import Float8CurrentScaling
from te_core.runtime import ByteAllocator, Runtime
from te_core.tensor import CPU, Tensor, cuda_device
from te_core.tools.counts import counted

WIDTH, INNER, SLAB, NOT_READY = 64, 128, 256 << 20, 600


class Host:
    """The CPU as a device: one block of memory, no streams."""

    place, streams = CPU, (0, 0)

    def __init__(self):
        self.memory = np.empty(SLAB, np.uint8)
        self.slab = self.memory.ctypes.data
        self.put = lambda address, array, stream: ctypes.memmove(address, array.ctypes.data, array.nbytes)
        self.get = lambda array, address, stream: ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def done(self, stream):
        return True


class Cuda:
    """A GPU by the driver alone: the device's context, one block of memory, two streams."""

    def __init__(self):
        self.lib, self.place, self.streams = ctypes.CDLL("libcuda.so.1"), cuda_device(0), []
        context, slab = ctypes.c_void_p(), ctypes.c_uint64()
        self.must(self.lib.cuInit(0))
        self.must(self.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self.must(self.lib.cuCtxSetCurrent(context))
        self.must(self.lib.cuMemAlloc_v2(ctypes.byref(slab), ctypes.c_size_t(SLAB)))
        for _ in "ab":
            self.streams.append(stream := ctypes.c_void_p())
            self.must(self.lib.cuStreamCreate(ctypes.byref(stream), 1))
        self.slab, self.streams = slab.value, [stream.value for stream in self.streams]

    def must(self, status):
        if status:
            raise RuntimeError(f"the driver says {status}")

    def put(self, address, array, stream):
        given = ctypes.c_uint64(address), ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        self.must(self.lib.cuMemcpyHtoDAsync_v2(*given, ctypes.c_void_p(stream)))

    def get(self, array, address, stream):
        given = ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(address), ctypes.c_size_t(array.nbytes)
        self.must(self.lib.cuMemcpyDtoHAsync_v2(*given, ctypes.c_void_p(stream)))

    def done(self, stream):
        status = self.lib.cuStreamQuery(ctypes.c_void_p(stream))
        self.must(status if status != NOT_READY else 0)
        return status != NOT_READY


class Pool:
    """Blocks of the slab. One that comes back on a stream is given again on the same one, whose order keeps it safe."""

    def __init__(self, slab):
        self.next, self.end, self.free, self.sizes, self.taken = slab + 255 & -256, slab + SLAB, {}, {}, 0

    def take(self, nbytes, stream):
        size = max(256, 1 << (nbytes - 1).bit_length())
        self.taken += 1
        if self.free.get((size, stream)):
            return self.free[size, stream].pop()
        address, self.next = self.next, self.next + size
        if self.next > self.end:
            raise MemoryError("the engine's slab is full")
        self.sizes[address] = size
        return address

    def give(self, address, stream):
        self.free.setdefault((self.sizes[address], stream), []).append(address)


async def main(kind="cpu", requests=40):
    device = Cuda() if kind == "cuda" else Host()
    pool, draw = Pool(device.slab), np.random.default_rng(0)
    memory = ByteAllocator(device.place, pool.take, pool.give)
    lanes = asyncio.Queue()
    for stream in device.streams:
        on_gpu = kind == "cuda"
        lanes.put_nowait((Runtime.cuda(0, stream, memory) if on_gpu else Runtime.cpu(memory), stream))
    shapes = {"layer_norm_weight": (WIDTH,), "fc1_weight": (INNER, WIDTH), "fc2_weight": (WIDTH, INNER // 2)}
    weights = {}
    for name, shape in shapes.items():
        values = np.asarray(draw.standard_normal(shape) * 0.2, dtypes.bfloat16.numpy)
        weights[name] = Tensor(pool.take(values.nbytes, 0), shape, dtypes.bfloat16, device.place, values)
        device.put(weights[name].ptr, values, device.streams[0])
    while not device.done(device.streams[0]):
        await asyncio.sleep(0)
    options = {"activation": "swiglu", "normalization": "RMSNorm"}
    call = calls.call("layernorm_mlp", options, dtypes.bfloat16, frozenset(), Float8CurrentScaling())
    w1, w2 = (weights[name] for name in ("fc1_weight", "fc2_weight"))

    async def serve(rows):
        runtime, stream = await lanes.get()
        host = np.asarray(draw.standard_normal((rows, WIDTH)), dtypes.bfloat16.numpy)
        x = Tensor(pool.take(host.nbytes, stream), host.shape, dtypes.bfloat16, device.place, host)
        device.put(x.ptr, host, stream)
        (y,), _ = call.forward(runtime, x, weights["layer_norm_weight"], None, w1, None, w2, *[None] * 5)
        device.get(answer := np.empty(host.shape, host.dtype), y.ptr, stream)
        while not device.done(stream):  # other requests go on
            await asyncio.sleep(0)
        pool.give(x.ptr, stream)
        lanes.put_nowait((runtime, stream))
        return answer.astype(np.float32)

    taken = pool.taken
    with counted() as counts:
        answers = await asyncio.gather(*[serve(int(rows)) for rows in draw.permutation(requests) + 1])
    own = len(answers)  # an input for each request
    print(
        f"{own} requests of {own} sizes, {sum(map(len, answers))} rows; {pool.taken - taken - own} blocks for te_core"
    )
    print(f"te_core: {counts.allocations} allocations, {counts.waits} waits, {counts.to_host} copies to the host")
    # Scratch memory and results: all of them are blocks of the pool.
    assert (counts.waits, counts.to_host, counts.to_device) == (0, 0, 0) and pool.taken - taken - own > 0
    assert counts.allocations <= pool.taken - taken - own and all(np.isfinite(a).all() for a in answers)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2], *map(int, sys.argv[2:3])))
