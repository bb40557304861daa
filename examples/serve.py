"""The loop of a generation server: requests come at any time, and their texts are written together.

A request waits until the KV cache has room. Its prompt is then read in the same step in which other texts go on, and
its client gets each byte as it is written. Here clients ask the small GPT of `te train` at random times: 10 seconds on
a CPU core, with more of them on a GPU, where the first run plans attention for each size that it meets.

    python examples/serve.py --clients 20
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # for the CPU backend: its threads poll otherwise
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too

import torch

from examples.generate import PROMPTS, Batch, cache, load
from examples.loop import OUT
from te_cli.arguments import UserError, device, mistakes_end, positive, usual_device, writable
from te_cli.curve import write_curve
from te_cli.gpt import GPT
from te_cli.progress import Progress

SIZES = {"cpu": (12, 4, 40), "cuda": (100, 16, 200)}  # clients, texts at a time, bytes for each


class Request:
    """A prompt, how many bytes are still wanted, and those that are written; None ends them."""

    def __init__(self, prompt: bytes, left: int) -> None:
        self.prompt, self.left, self.answer = list(prompt), left, asyncio.Queue[int | None]()


class Server:
    """Writes texts for any number of coroutines, while `run` runs beside them."""

    def __init__(self, model: GPT, texts: int, longest: int) -> None:
        self.longest, self.batch = longest, Batch(model, cache(model, texts, longest, paged=True))
        self.waiting: deque[Request] = deque()
        self.live: dict[int, Request] = {}
        self.come, self.rows = asyncio.Event(), list[int]()  # a request has come; texts in each step

    async def ask(self, prompt: bytes, count: int) -> AsyncIterator[int]:
        """The bytes that follow the prompt, as they are written."""
        if not prompt or len(prompt) + count > self.longest:
            raise UserError(f"{len(prompt)} bytes and {count} more: a prompt of 1 to {self.longest - count} bytes fits")
        request = Request(prompt, count)
        self.waiting.append(request)
        self.come.set()
        try:
            while (byte := await request.answer.get()) is not None:
                yield byte
        finally:
            request.left = 0  # a client that has gone away gives its place back

    async def run(self) -> None:
        """The loop. The model runs in a thread: meanwhile requests come and answers go."""
        count, thread = 0, ThreadPoolExecutor(1)
        while True:
            while self.waiting and self.batch.room():
                self.live[count] = self.waiting.popleft()
                self.batch.add(count, self.live[count].prompt)
                count += 1
            if not self.live:
                self.come.clear()
                await self.come.wait()
                continue
            self.rows.append(len(self.live))
            written = await asyncio.get_running_loop().run_in_executor(thread, self.batch.step)
            for name, byte in written.items():
                request = self.live[name]
                request.answer.put_nowait(byte)
                request.left -= 1
                if byte == ord("\n") or request.left <= 0:
                    request.answer.put_nowait(None)
                    self.batch.remove(name)
                    del self.live[name]


async def demonstrate(server: Server, clients: int, count: int) -> None:
    """Clients that ask at random times; how long they waited."""
    bar, draw, begin = Progress("serve", clients * count, stream=sys.stderr), random.Random(0), time.perf_counter()
    first, written = [], 0

    async def client(asked: float) -> None:
        nonlocal written
        await asyncio.sleep(asked)
        async for _ in server.ask(draw.choice(PROMPTS).encode(), count):
            if asked:
                first.append(time.perf_counter() - begin - asked)
                asked = 0.0
            written += 1
            bar.show(written, f"{len(server.live)} texts at a time, {len(server.waiting)} wait")

    loop = asyncio.create_task(server.run())
    answered = asyncio.gather(*(client(draw.random() * clients * count / 300) for _ in range(clients)))
    await asyncio.wait((loop, answered), return_when=asyncio.FIRST_COMPLETED)
    bar.stop()
    if not loop.cancel():  # it has ended, by an error
        loop.result()
    speed = written / (time.perf_counter() - begin)
    print(f"{speed:,.0f} bytes a second; the first byte after {statistics.median(first):.2f} s (median)")


def main(arguments: list[str] | None = None) -> list[int]:
    """Serve; then draw how full the batch was."""
    parser = argparse.ArgumentParser(prog="serve.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=positive, metavar="N", help="that ask")
    parser.add_argument("--device", type=device, default=usual_device(), help="cpu, cuda ... (CUDA if there is one)")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the picture ({OUT})")
    given = parser.parse_args(arguments)
    clients, texts, count = SIZES[given.device.partition(":")[0]]
    with mistakes_end("serve.py"):
        writable(given.out, ["serve.png"])
        server = Server(load(None, torch.device(given.device)), texts, count + 64)
    asyncio.run(demonstrate(server, given.clients or clients, count))
    write_curve(given.out / "serve.png", {"serve": server.rows}, "texts at a time", ("room", texts))
    return server.rows


if __name__ == "__main__":
    main()
