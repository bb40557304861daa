"""The losses of ranks that share the classes, beside torch's of all of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import te_torch as te
from tests.parallel.ranks import Rank
from tests.parallel.steps import by_ranks, error_of, says
from tests.tolerances import DB, snr_db

CLASSES, ROWS, WIDTH = 64, 24, 32


@by_ranks()
def test_ranks_that_share_the_classes(rank: Rank) -> None:
    generator = torch.Generator().manual_seed(7)
    hidden, weight = (torch.randn(s, generator=generator) for s in ((2, ROWS // 2, WIDTH), (CLASSES, WIDTH)))
    target = torch.randint(0, CLASSES, (2, ROWS // 2), generator=generator).to(rank.device)
    target[0, 1] = -100
    group, each = torch.distributed.group.WORLD, CLASSES // rank.world
    mine = slice(rank.number * each, (rank.number + 1) * each)
    wide = [t.double().to(rank.device).requires_grad_() for t in (hidden, weight)]
    logits = F.linear(*wide)
    logits.retain_grad()
    expected = F.cross_entropy(logits.view(-1, CLASSES), target.view(-1), label_smoothing=0.1, reduction="none")
    expected.sum().backward()
    part = logits.detach()[..., mine].float().requires_grad_()
    loss = te.parallel_cross_entropy(part, target, 0.1, dist_process_group=group)
    loss.sum().backward()
    found = {"loss": snr_db(loss.view(-1), expected), "logits": snr_db(part.grad, logits.grad[..., mine])}
    for reduction in ("sum", "none"):
        h, w = (t.clone().to(rank.device).requires_grad_() for t in (hidden, weight[mine]))
        options = {"label_smoothing": 0.1, "reduction": reduction, "chunk": 10, "group": group}
        loss = te.linear_cross_entropy(h, w, target, **options)
        loss.sum().backward()
        found |= {
            f"{reduction}": snr_db(loss.sum(), expected.sum()),
            f"{reduction} hidden": snr_db(h.grad, wide[0].grad),
            f"{reduction} weight": snr_db(w.grad, wide[1].grad[mine]),
        }
    assert not {name: value for name, value in found.items() if value < DB["fp32"]}


@by_ranks("gloo_ranks")
def test_a_target_that_no_rank_has(rank: Rank) -> None:
    """On every rank, whichever has the class: nobody waits for the others."""
    target, part = torch.full((2, 2), CLASSES), torch.zeros(2, 2, CLASSES // rank.world)
    call = lambda: te.parallel_cross_entropy(part, target, 0.0, False, torch.distributed.group.WORLD)  # noqa: E731
    says(error_of(call, ValueError), f"target {CLASSES}", f"0 to {CLASSES - 1}")
