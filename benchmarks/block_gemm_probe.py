"""Variants of block_gemm.cu: errors against float64, times beside cuBLASLt."""
import ctypes
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from te_core import dtypes, ops
from te_core.kernels import compiler
from te_core.quantized import Format
from te_torch.runtime import runtime_for, to_core

CU = ctypes.CDLL("libcuda.so.1")
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
DEFAULTS = {"A_TYPE": "e4m3", "B_TYPE": "e4m3", "OUT": "bf16", "TILED": 1, "ACCUMULATE": 0}
SMS = torch.cuda.get_device_properties(0).multi_processor_count


def encode(address, rows, k, box_rows, kind=0, size=1, box=128):
    """A map of bytes [rows, k], boxes of [box_rows, 128]."""
    raw = ctypes.create_string_buffer(128 + 64)
    at = (ctypes.addressof(raw) + 63) // 64 * 64
    status = CU.cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), kind, 2, ctypes.c_void_p(address), (ctypes.c_uint64 * 2)(k, rows), (ctypes.c_uint64 * 1)(k * size),
        (ctypes.c_uint32 * 2)(box, box_rows), (ctypes.c_uint32 * 2)(1, 1), 0, 3, 2, 0)
    assert status == 0, status
    return ctypes.string_at(at, 128)


class Kernel:
    def __init__(self, **constants):
        self.c = {**DEFAULTS, **constants}
        source = compiler.source_path("block_gemm").read_text()
        self.image = compiler.compile_text(source, "block_gemm.cu", compiler.options_for(source, self.c, "sm_90a"))

    def load(self):
        from cupy_backends.cuda.api import driver
        self.driver = driver
        self.f = driver.moduleGetFunction(driver.moduleLoadData(self.image), "block_gemm")
        tiled, staged = int(self.c["TILED"]), int(self.c.get("STAGED", 0))
        size = 4 * (49152 + 512 + 16) + (16384 if staged else 128) + (1024 if tiled else 4096)
        self.shared = -(-size // 1024) * 1024
        driver.funcSetAttribute(self.f, 8, self.shared)
        return self

    def bind(self, a, b, sa, sb, out):
        (m, k), n = a.shape, b.shape[0]
        table = encode(a.data_ptr(), m, k, 128)
        table += encode(b.data_ptr(), n, k, 128)
        table += encode(out.data_ptr(), m, n, 16, 1, 2, 64)
        table += struct.pack("=QQQiii", sa.data_ptr(), sb.data_ptr(), out.data_ptr(), m, n, k)
        table = ctypes.create_string_buffer(table.ljust(448, b"\0"), 448)
        pointer = ctypes.c_uint64(ctypes.addressof(table))
        grid = min(SMS // 2, -(-m // 256) * -(-n // 256)) * 2
        stream = torch.cuda.current_stream().cuda_stream
        keep = (table, pointer, a, b, sa, sb, out)

        def run(keep=keep):
            self.driver.launchKernel(self.f, grid, 1, 1, 384, 1, 1, self.shared, stream, ctypes.addressof(pointer), 0)
        return run


def operand(rows, k, dtype, tiled, seed):
    g = torch.Generator("cuda").manual_seed(seed)
    limit = 100.0 if dtype is E4 else 1000.0
    data = (torch.randn(rows, k, device="cuda", generator=g) * limit).clamp(-448, 448).to(dtype)
    blocks = -(-k // 128)
    shape = (-(-rows // 128), -(-blocks // 4) * 4) if tiled else (blocks, rows)
    scale = torch.exp2(torch.rand(shape, device="cuda", generator=g) * 4 - 9)
    return data, scale


def values(data, scale, tiled):
    rows, k = data.shape
    if tiled:
        s = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :k]
    else:
        s = scale.t().repeat_interleave(128, 1)[:, :k]
    return data.double() * s.double()


def error(out, want):
    d = (out.double() - want)
    return f"{float(d.norm() / want.norm()):.1e}/{float(d.abs().max() / want.abs().max()):.0e}"


def lt(a, b, sa, sb, out, tiled, accumulate=False):
    rt = runtime_for(a)
    form = lambda t, tl: Format(dtypes.float8_e4m3 if t.dtype is E4 else dtypes.float8_e5m2, "block", tl)
    ca, cb, csa, csb, co = map(to_core, (a, b, sa, sb, out))
    return lambda: ops.gemm(rt, ca, cb, trans_b=True, a_scale=csa, b_scale=csb, out=co, accumulate=accumulate,
                            a_format=form(a, False), b_format=form(b, tiled))


def lt_tensor(a, b, out):
    rt = runtime_for(a)
    one = torch.full((1,), 1e-3, device="cuda")
    ca, cb, cs, co = map(to_core, (a, b, one, out))
    return lambda: ops.gemm(rt, ca, cb, trans_b=True, a_scale=cs, b_scale=cs, out=co, split_accumulator=True)


def time_all(calls, rounds=5, count=20):
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in calls]
    best = [[] for _ in calls]
    for r in range(rounds):
        for i, call in enumerate(calls):
            call()
            events[i][0].record()
            for _ in range(count):
                call()
            events[i][1].record()
        torch.cuda.synchronize()
        for i in range(len(calls)):
            if r:
                best[i].append(events[i][0].elapsed_time(events[i][1]) / count)
    return [sorted(b)[len(b) // 2] for b in best]


SMALL = [(8, 16, 16), (136, 272, 400), (1000, 528, 656), (2056, 4112, 1040)]
LARGE = [(8192, 4096, 4096), (8192, 28672, 4096), (16384, 8192, 2048), (8192, 4096, 14336), (28672, 4096, 8192), (4096, 14336, 4096), (8192, 6144, 4096), (2048, 8192, 8192)]


def check(kernel, name):
    c = kernel.c
    tiled, acc = int(c["TILED"]), int(c["ACCUMULATE"])
    ta, tb = (E5 if c["A_TYPE"] == "e5m2" else E4), (E5 if c["B_TYPE"] == "e5m2" else E4)
    kind = torch.float32 if c["OUT"] == "float" else torch.bfloat16
    line = []
    for m, n, k in SMALL:
        a, sa = operand(m, k, ta, False, 1)
        b, sb = operand(n, k, tb, tiled, 2)
        want = values(a, sa, False) @ values(b, sb, tiled).t()
        out = torch.full((m, n), 3.0, device="cuda", dtype=kind)
        if acc:
            want = want + 3.0
        kernel.bind(a, b, sa, sb, out)()
        torch.cuda.synchronize()
        ref = torch.full((m, n), 3.0, device="cuda", dtype=kind)
        try:
            lt(a, b, sa, sb, ref, tiled, bool(acc))()
            other = error(ref, want)
        except Exception as e:
            other = type(e).__name__
        line.append(f"{error(out, want)} ({other})")
    print(f"  check {name}: " + " ".join(line), flush=True)


def main(names):
    jobs = [(name, dict(p.split("=") for p in name.split(","))) for name in names]
    torch.zeros(1, device="cuda")  # makes the context
    start = time.time()
    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(lambda job: Kernel(**job[1]), jobs))
    print(f"{len(jobs)} compiled in {time.time() - start:.1f} s", flush=True)
    for (name, _), kernel in zip(jobs, kernels):
        check(kernel.load(), name)
    for m, n, k in LARGE:
        for tiled in (1, 0):
            a, sa = operand(m, k, E4, False, 1)
            b, sb = operand(n, k, E4, tiled, 2)
            out = torch.zeros(m, n, device="cuda", dtype=torch.bfloat16)
            calls = {"tensor": lt_tensor(a, b, out), "block": lt(a, b, sa, sb, out, tiled)}
            if not tiled:
                wide = torch.zeros(m, n, device="cuda")
                calls["block f32+"] = lt(a, b, sa, sb, wide, tiled, True)
            for (name, _), kern in zip(jobs, kernels):
                if int(kern.c["TILED"]) == tiled:
                    calls[name[8:]] = kern.bind(a, b, sa, sb, wide if kern.c["OUT"] == "float" else out)
            flops = 2e-9 * m * n * k
            times = time_all(list(calls.values()), count=max(3, int(27500 / flops)))
            print(f"{m}x{n}x{k} T{tiled}: " + " ".join(f"[{c}] {flops / t:.0f}" for c, t in zip(calls, times)), flush=True)


main(sys.argv[1:])
