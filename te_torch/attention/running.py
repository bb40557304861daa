"""What computes a plan: its backend, and what is put around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from te_core.layers.attention import AttentionInputs
from te_torch.attention import choose, flash, fused, unfused
from te_torch.attention.plan import Plan
from te_torch.attention.score_mod import run_graph
from te_torch.draws import Repeated
from te_torch.forks import Fork
from te_torch.function import register

Run = Callable[..., fused.Results]
RUN: dict[str, Run] = {choose.FUSED: fused.run, choose.UNFUSED: unfused.run, **dict.fromkeys(choose.FLASH, flash.run)}


def ready(plan: Plan, fork: Fork | None, comm: Any = None) -> Plan:
    """The plan with what runs it; `fork`: of the tracker that its module draws from, `comm`: over which ranks."""
    plan.call = register(fused.ATTENTION, plan.layer, any(plan.layer.needs), comm=comm)
    run: Run = RUN[plan.backend]
    if plan.key.score_mod == "graph":
        plan.run = run_graph
        return plan
    if plan.backend == choose.FUSED:  # its own layer computes again if asked for
        plan.run = flash.run_backward_only if comm is None and flash.takes_backward(plan) else run
        return plan
    if plan.key.checkpoint:
        run = partial(_checkpointed, run)
    plan.run = partial(_forked, fork, run) if plan.draws and fork is not None else run
    return plan


def _checkpointed(run: Run, plan: Plan, inputs: AttentionInputs, **options: Any) -> fused.Results:
    """Run a backend so that backward computes it again: nothing but its inputs is kept."""
    from torch.utils.checkpoint import checkpoint

    again = Repeated(run) if plan.draws or options else run  # a user's function may draw
    found: fused.Results = checkpoint(again, plan, inputs, use_reentrant=False, preserve_rng_state=False, **options)
    return found


def _forked(fork: Fork, run: Run, plan: Plan, inputs: AttentionInputs) -> fused.Results:
    """Run a backend that draws from torch's generator, with the tracker's state in it."""
    with fork():
        return run(plan, inputs)
