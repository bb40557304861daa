import ctypes, json, os, sys, time, tempfile
import numpy as np
import torch, torch.distributed as dist, torch.multiprocessing as mp
from multiprocessing import shared_memory, resource_tracker
from te_core import libraries
from te_core.driver import flag_operations, Driver
_flags = Driver.flags
Driver.flags = lambda self, st, ops: _flags(self, st, flag_operations(*ops))
def say(rank, *a):
    if rank == 0: print(*a, flush=True)
def main(rank, folder, share, conns, out):
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = conns
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"; os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if share: os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0 if share else rank)
    dist.init_process_group("gloo" if share else "cpu:gloo,cuda:nccl", store=dist.FileStore(folder + "/s", 2), rank=rank, world_size=2)
    import torch.distributed._symmetric_memory as symm
    dev = torch.device("cuda", torch.cuda.current_device()); torch.zeros(1, device=dev); torch.cuda.synchronize()
    driver = libraries.driver(); driver.attach(dev.index); lib = driver._lib
    free0 = torch.cuda.mem_get_info()[0]
    t0 = time.time(); N = 64 << 20
    buf = symm.empty(4 * N, dtype=torch.uint8, device=dev)
    h = symm.rendezvous(buf, group=dist.group.WORLD); ptrs = list(h.buffer_ptrs)
    say(rank, "rendezvous s", round(time.time() - t0, 2), "used MiB", (free0 - torch.cuda.mem_get_info()[0]) / 2**20, "signal", h.signal_pad_size)
    path = folder + "/flags" if not os.path.isdir("/dev/shm") else "/dev/shm/probe-" + os.path.basename(folder)
    if rank == 0:
        with open(path, "wb") as f: f.write(bytes(8192))
    dist.barrier()
    import mmap
    fd = os.open(path, os.O_RDWR); m = mmap.mmap(fd, 8192); os.close(fd); dist.barrier()
    if rank == 0: os.unlink(path)
    host = ctypes.addressof(ctypes.c_char.from_buffer(m)); words = np.frombuffer(m, np.uint32)
    addr = driver.register(dev.index, host, 8192); say(rank, "host=dev pointer", addr == host)
    peer = 1 - rank
    s1, s2 = torch.cuda.Stream(), torch.cuda.Stream(); S1, S2 = s1.cuda_stream, s2.cuda_stream
    F = lambda base, r, k: base[r] + 64 * (k)          # flags of rank r
    hostbase = [addr, addr + 4096]; devbase = [p + 4 * N - 65536 for p in ptrs]
    buf.zero_(); torch.cuda.synchronize(); dist.barrier()
    # at receiver r: full = F(r,0); at sender r: busy = F(r,1)
    def announce(base, st): driver.flags(st, [("wait", F(base, rank, 1), 0), ("write", F(base, rank, 1), 1), ("write", F(base, peer, 0), 1)])
    def await_(base, st): driver.flags(st, [("wait", F(base, rank, 0), 1), ("write", F(base, rank, 0), 0), ("write", F(base, peer, 1), 0)])
    def pingpong(base, st, n):
        for _ in range(n): announce(base, st); await_(base, st)
    for name, base in (("host", hostbase), ("device", devbase)):
        try:
            for _ in range(2):
                torch.cuda.synchronize(); dist.barrier(); t = time.time()
                pingpong(base, S1, 300); e = time.time(); s1.synchronize()
            say(rank, name, "flags: us a round", round((time.time() - t) / 300 * 1e6, 2), "host us a round", round((e - t) / 300 * 1e6, 2))
            # latency beside a long kernel chain on gpu: rank 0 announces after a sleep
        except Exception as error: say(rank, name, "flags failed", repr(error)[:300])
    # bandwidths
    room = ptrs[peer]; mine = torch.empty(N, dtype=torch.uint8, device=dev)
    def timed(f, st, n=10):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        f(); st.synchronize(); dist.barrier()
        with torch.cuda.stream(st):
            a.record()
            for _ in range(n): f()
            b.record()
        st.synchronize(); return a.elapsed_time(b) / n
    for name, f in (("pull", lambda: driver.copy(mine.data_ptr(), room, N, S2)), ("push", lambda: driver.copy(room + N, mine.data_ptr(), N, S2))):
        say(rank, name, "GB/s both ways at once", round(N / timed(f, s2) / 1e6, 1))
    def kernel_names(f):
        from torch.profiler import profile, ProfilerActivity
        with profile(activities=[ProfilerActivity.CUDA]) as p: f(); torch.cuda.synchronize()
        p.export_chrome_trace(folder + f"/t{rank}")
        ev = json.load(open(folder + f"/t{rank}"))["traceEvents"]
        return sorted({(e.get("cat"), e["name"][:60]) for e in ev if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")})
    say(rank, "profiler:", kernel_names(lambda: (driver.copy(mine.data_ptr(), room, N, S2), pingpong(hostbase, S1, 1))))
    dist.barrier()
    # correctness of data behind flags + capture
    a = torch.zeros(1 << 20, device=dev); view = buf[: 4 << 20].view(torch.float32); got = torch.empty_like(a)
    def exchange(base, main, side):   # write room on main, announce on main, peer pulls on side
        view.copy_(a)
        announce(base, main.cuda_stream)
        await_(base, side.cuda_stream)
        side.wait_stream(main) if False else None
        driver.copy(got.data_ptr(), room, 4 << 20, side.cuda_stream)
        main.wait_stream(side)
        # tell the peer that the room is free: channel 2
        driver.flags(main.cuda_stream, [("wait", F(base, rank, 3), 0), ("write", F(base, rank, 3), 1), ("write", F(base, peer, 2), 1)])
        driver.flags(main.cuda_stream, [("wait", F(base, rank, 2), 1), ("write", F(base, rank, 2), 0), ("write", F(base, peer, 3), 0)])
    for name, base in (("host", hostbase), ("device", devbase)):
        try:
            bad = 0
            for i in range(200):
                with torch.cuda.stream(s1):
                    if i % 17 == rank: torch.cuda._sleep(3000000)
                    a.fill_(1000 * rank + i); s2.wait_stream(s1)
                    exchange(base, s1, s2); bad += (got != 1000 * peer + i).any().to(torch.int32)
            torch.cuda.synchronize(); say(rank, name, "eager wrong", int(bad))
            g = torch.cuda.CUDAGraph(); cnt = torch.zeros(1, device=dev)
            torch.cuda.synchronize(); dist.barrier()
            with torch.cuda.stream(s1):
                cnt.zero_(); torch.cuda.synchronize()
                with torch.cuda.graph(g, stream=s1):
                    cnt.add_(1); a.copy_(cnt.expand_as(a) + 1000 * rank); s2.wait_stream(s1)
                    exchange(base, s1, s2)
                bad = 0
                for i in range(50):
                    if i % 7 == rank: torch.cuda._sleep(3000000)
                    g.replay(); bad += (got != 1000 * peer + i + 1).any().to(torch.int32)
            torch.cuda.synchronize(); say(rank, name, "graph wrong", int(bad))
        except Exception as error: say(rank, name, "exchange failed", repr(error)[:400])
        dist.barrier()
    # release by the host
    driver.flags(S1, [("wait", F(hostbase, rank, 9), 1)])
    x = torch.ones(4096, 4096, device=dev); x @ x   # default stream still moves?
    t = time.time(); torch.cuda.default_stream().synchronize() if conns != "1" else None; alone = time.time() - t
    time.sleep(0.2); before = s1.query(); words[(4096 * rank + 64 * 9) // 4] = 1; t = time.time(); s1.synchronize()
    say(rank, "release by host: was done before", before, "s after", round(time.time() - t, 5), "other stream s", round(alone, 4))
    torch.cuda.synchronize(); dist.barrier()
    if not share and conns == "8":
        for (M, K, Nn) in ((4096, 8192, 14336), (4096, 4096, 8192), (4096, 14336, 8192)):
            A = torch.randn(M, K, device=dev, dtype=torch.bfloat16); B = torch.randn(K, Nn, device=dev, dtype=torch.bfloat16); A2 = torch.randn(2 * M, K, device=dev, dtype=torch.bfloat16)
            C = torch.empty(M, Nn, device=dev, dtype=torch.bfloat16); C2 = torch.empty(2 * M, Nn, device=dev, dtype=torch.bfloat16)
            cs = torch.cuda.current_stream()
            whole = timed(lambda: torch.mm(A2, B, out=C2), s1); half = timed(lambda: torch.mm(A, B, out=C), s1)
            def both():
                s2.wait_stream(s1); driver.copy(mine.data_ptr(), room, N, S2); torch.mm(A, B, out=C); s1.wait_stream(s2); torch.mm(A, B, out=C)
            say(rank, (M, K, Nn), "whole", round(whole, 3), "half", round(half, 3), "two halves with copy", round(timed(both, s1), 3))
            def alternating():
                s2.wait_stream(s1); torch.mm(A, B, out=C)
                with torch.cuda.stream(s2): torch.mm(A, B, out=C2[:M])
                s1.wait_stream(s2)
            say(rank, "   two halves on two streams", round(timed(alternating, s1), 3))
    del h, buf, view; import gc; gc.collect(); torch.cuda.empty_cache(); torch.cuda.synchronize(); dist.barrier(); time.sleep(0.3)
    say(rank, "free again, lacks MiB", (free0 - torch.cuda.mem_get_info()[0]) / 2**20, torch.cuda.memory_reserved() / 2**20)
    dist.barrier(); os._exit(0)
if __name__ == "__main__":
    share, conns = sys.argv[1] == "share", sys.argv[2]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = conns
        mp.spawn(main, (folder, share, conns, None), nprocs=2)
