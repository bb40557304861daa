"""What context parallelism over two GPUs can reach: the calls of its ring and its transfers, each timed alone.

    torchrun --nproc-per-node 2 -m benchmarks.context_calls

Causal attention, 32 query heads on 8 groups of 128 channels, bfloat16, one sequence. Rank 1 of the ring computes its
own tokens under the causal mask, then all of its queries on the first half of rank 0's keys. Rank 0 computes its own
tokens, then the second half of its queries on all of rank 1's keys. The bound leaves out merging, sums and the host.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from te_core.attention import AttentionSpec
from te_core.ops import attention as ops
from te_torch.runtime import runtime_for, to_core

HEADS, GROUPS, WIDTH = 32, 8, 128
LENGTHS = (8192, 32768, 131072)
ROUNDS = 7


def milliseconds(function: Callable[[], Any]) -> float:
    """Device time of a call."""
    for _ in range(2):
        function()
    found = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def attention(queries: int, keys: int, causal: bool) -> tuple[float, float]:
    """Forward and backward of this many queries and keys."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    tensors = [torch.randn(queries, 1, HEADS, WIDTH, **options) for _ in range(2)]
    tensors += [torch.randn(keys, 1, GROUPS, WIDTH, **options) for _ in range(2)]
    q, dy, k, v = map(to_core, tensors)
    rt = runtime_for(tensors[0])
    spec = AttentionSpec(WIDTH**-0.5, right=0 if causal else -1)
    done = ops.attention_forward(rt, q, k, v, spec=spec)
    assert done.stats is not None
    stats = done.stats
    forward = milliseconds(lambda: ops.attention_forward(rt, q, k, v, spec=spec))
    return forward, milliseconds(lambda: ops.attention_backward(rt, dy, q, k, v, done.out, stats, spec=spec))


def transfer(tokens: int) -> float:
    """Of one rank's keys and values to the other, while the other's come."""
    sent = torch.zeros(2 * tokens * GROUPS * WIDTH, device="cuda", dtype=torch.bfloat16)
    got, other = torch.empty_like(sent), 1 - dist.get_rank()

    def exchange() -> None:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)])
        for work in works:
            work.wait()

    return milliseconds(exchange)


def measured(length: int) -> dict[str, Any]:
    """All of it for a sequence of this many tokens."""
    local = length // 2
    own, half = attention(local, local, causal=True), attention(local // 2, local, causal=False)
    first, whole = attention(local, local // 2, causal=False), attention(length, length, causal=True)
    moved = transfer(local)
    slower = max(sum(half), sum(first))
    return {
        "tokens": length,
        "one GPU": whole,
        "own tokens": own,
        "second half of the queries": half,
        "first half of the keys": first,
        "transfer": moved,
        "bound": sum(whole) / (sum(own) + slower + moved),
    }


def main() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    rows = [measured(length) for length in LENGTHS]
    if dist.get_rank() == 0:
        for row in rows:
            print(row)
        if "OUT" in os.environ:
            found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
            with open(f"{os.environ['OUT']}/context_calls.json", "w") as file:
                json.dump(found, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
