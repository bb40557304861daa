"""Tokens to their experts and back against the speed of a device-to-device copy.

The method is that of benchmarks/norms.py. `bytes` is what an operation has to move, each operand once: permuting reads
a token once and writes it for each of its experts. A case is the documented function as it is called, its map
included where it makes one; the maps alone stand beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import te_torch as te
from benchmarks import harness
from benchmarks.norms import Clock, copy_rate
from te_torch import router
from te_torch.training import moe_operators as operators

TOKENS, HIDDEN, EXPERTS, TOP = 16384, 4096, 64, 8
#: What `moe_permute` may take (us), and the share of a copy's speed that each of the others is to reach.
PERMUTE_US, OF_COPY = 334.0, 0.85

Case = tuple[str, int, Callable[[], Any]]


def routed(tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mask int32 [tokens, experts], expert ids int32 [tokens, top], probabilities of the mask)."""
    scores = torch.rand(tokens, EXPERTS, device="cuda")
    ids = scores.topk(TOP, dim=-1).indices
    mask = torch.zeros(tokens, EXPERTS, dtype=torch.int32, device="cuda").scatter_(1, ids, 1)
    return mask, ids.int(), scores * mask


def normal(rows: int, columns: int = HIDDEN) -> torch.Tensor:
    """bf16 on the GPU, leaves that want gradients."""
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).requires_grad_()


def forwards() -> Iterator[Case]:
    """What a step calls on its way to the experts and back."""
    mask, ids, probs = routed()
    x, out = normal(TOKENS).detach(), TOKENS * TOP
    rows, weights = normal(out).detach(), torch.rand(TOKENS, TOP, device="cuda")
    once, many = x.nbytes, rows.nbytes
    row_map, index = operators.mask_map(mask)[0], operators.index_map(ids, out)
    yield "moe_permute, mask", once + many, lambda: te.moe_permute(x, mask, out)
    yield "moe_permute_with_probs", once + many, lambda: te.moe_permute_with_probs(x, probs, mask, out)
    yield "moe_permute, index", once + many, lambda: te.moe_permute(x, ids, out, map_type="index")
    yield "moe_unpermute, mask", once + many, lambda: te.moe_unpermute(rows, row_map)
    yield "moe_unpermute, mask, merging_probs", once + many, lambda: te.moe_unpermute(rows, row_map, probs)
    yield (
        "moe_unpermute, index, merging_probs",
        once + many,
        lambda: te.moe_unpermute(rows, index, weights, map_type="index"),
    )
    sizes = mask.sum(0).int()
    order = torch.randperm(EXPERTS, device="cuda").int()
    yield "moe_sort_chunks_by_index", 2 * many, lambda: te.moe_sort_chunks_by_index(rows, sizes, order)


def backwards() -> Iterator[Case]:
    """Their gradients alone, of graphs that are kept."""
    mask, _, probs = routed()
    x, rows, out = normal(TOKENS), normal(TOKENS * TOP), TOKENS * TOP
    probs.requires_grad_()
    once, many = x.nbytes, rows.nbytes
    row_map, _ = operators.mask_map(mask)

    def gradients(result: torch.Tensor, inputs: tuple[torch.Tensor, ...], dy: torch.Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(result, inputs, dy, retain_graph=True)

    permuted = te.moe_permute(x, mask, out)[0]
    yield "moe_permute backward", once + many, gradients(permuted, (x,), rows.detach())
    permuted, row_probs, _ = te.moe_permute_with_probs(x, probs, mask, out)
    yield (
        "moe_permute_with_probs backward",
        once + many,
        lambda: torch.autograd.grad(
            (permuted, row_probs), (x, probs), (rows.detach(), row_probs.detach()), retain_graph=True
        ),
    )
    merged = te.moe_unpermute(rows, row_map)
    yield "moe_unpermute backward", once + many, gradients(merged, (rows,), x.detach())
    merged = te.moe_unpermute(rows, row_map, probs)
    yield "moe_unpermute backward, merging_probs", once + 2 * many, gradients(merged, (rows, probs), x.detach())
    order = torch.randperm(EXPERTS, device="cuda").int()
    ordered = te.moe_sort_chunks_by_index(rows, mask.sum(0).int(), order)
    yield "moe_sort_chunks_by_index backward", 2 * many, gradients(ordered, (rows,), rows.detach())


def maps(clock: Clock) -> Iterator[dict[str, Any]]:
    """The maps alone, which move next to nothing."""
    mask, ids, _ = routed()
    sizes, order = mask.sum(0).int(), torch.randperm(EXPERTS, device="cuda").int()
    for name, work in (
        ("map of a mask", lambda: operators.mask_map(mask)),
        ("map of expert ids", lambda: operators.index_map(ids, TOKENS * TOP)),
        ("map of chunks", lambda: operators.chunk_map(sizes, order, TOKENS * TOP)),
    ):
        yield {"case": name, "shape": (TOKENS, EXPERTS), "us": clock(work)}


def routers(clock: Clock, rate: float) -> Iterator[dict[str, Any]]:
    """The choice of experts and the scores of all, each way: bytes of logits, probabilities and maps of bytes."""
    for experts, topk in ((EXPERTS, TOP), (256, 8), (1024, 32)):
        logits = torch.randn(TOKENS, experts, device="cuda", dtype=torch.bfloat16).requires_grad_()
        bias, size = torch.zeros(experts, device="cuda"), TOKENS * experts
        more = (False, None, None, 2.5, "sigmoid", bias)

        def choose(given: Any = (logits, topk, *more)) -> Any:
            return router.fused_topk_with_score_function(*given)

        def score(given: Any = (logits, topk, "softmax")) -> Any:
            return router.fused_compute_score_for_moe_aux_loss(*given)[1]

        probs, scores = choose()[0], score()
        for name, moved, work in (
            ("router", 5 * size, choose),
            (
                "router backward",
                7 * size,
                partial(torch.autograd.grad, probs, logits, probs.detach(), retain_graph=True),
            ),
            ("router scores", 7 * size, score),
            (
                "router scores backward",
                8 * size,
                partial(torch.autograd.grad, scores, logits, scores.detach(), retain_graph=True),
            ),
        ):
            us = clock(work)
            found = {"case": name, "shape": (TOKENS, experts, topk), "us": us, "bytes": moved}
            yield found | {"of_copy": moved / us / rate}


def host_rows() -> list[dict[str, Any]]:
    """Enqueue times of a few tokens."""
    mask, _, probs = routed(128)
    x = normal(128, 256)
    rows, row_map = te.moe_permute(x, mask, 128 * TOP)
    rows = rows.detach().requires_grad_()
    works = {
        "host: moe_permute": lambda: te.moe_permute(x, mask, 128 * TOP),
        "host: moe_permute_with_probs": lambda: te.moe_permute_with_probs(x, probs, mask, 128 * TOP),
        "host: moe_unpermute, merging_probs": lambda: te.moe_unpermute(rows, row_map, probs),
    }
    times = harness.host_us(*works.values())
    return [{"case": name, "us": us} for name, us in zip(works, times, strict=True)]


def measure() -> list[dict[str, Any]]:
    """One row for each operation."""
    clock = Clock()
    rate = copy_rate(clock)
    rows: list[dict[str, Any]] = [{"case": "copy 256 MiB", "TB/s": rate / 1e6}]
    for group in (forwards, backwards):
        for name, moved, work in group():
            us = clock(work)
            found = {"case": name, "shape": (TOKENS, HIDDEN, EXPERTS, TOP), "us": us, "bytes": moved}
            found["of_copy"] = moved / us / rate
            if name == "moe_permute, mask":
                found |= {"target": f"{PERMUTE_US:.0f} us", "ok": us <= PERMUTE_US}
            else:
                found |= {"target": f"{OF_COPY} of a copy", "ok": found["of_copy"] >= OF_COPY}
            rows.append(found)
        harness.free()
    return [*rows, *maps(clock), *routers(clock, rate), *host_rows()]


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["moe", *sys.argv[1:]]))
