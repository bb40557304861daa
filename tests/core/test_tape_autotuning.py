"""Autotuning that is turned on, and off again, as a program runs: interpreted calls and replays follow it alike."""

from __future__ import annotations

from typing import Any

import pytest

from te_core.backends.cuda import gemm_run, gemm_tune
from te_core.tape import taped
from tests.core.fake_cuda import Make
from tests.core.tape_cases import MLP, Linear
from tests.core.tape_proof import Tapes, run
from tests.covering import covering

BUILDS: dict[str, Any] = {
    "linear": Linear("current", sink="fp32+"),
    "mlp": MLP("delayed", activation="swiglu"),
    "checkpointed mlp": MLP("block", checkpoint=True),
    "nvfp4": Linear("nvfp4", normed="RMSNorm"),
}


def last_is_fastest(rt: Any, spec: Any, route: Any, prepared: Any, found: list[Any]) -> list[float]:
    """As if algorithms had been timed: another one wins than the heuristic's first."""
    return [-float(i) for i in range(len(found))]


@covering(name=BUILDS, setting=taped.WHEN)
def test_autotuning_counts_from_the_next_call_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str, setting: str
) -> None:
    """Of products that were planned without it, and calls that were recorded. Without it they are what they were."""
    monkeypatch.setattr(gemm_tune, "_time_all", last_is_fastest)
    monkeypatch.setattr(gemm_tune, "_time", lambda rt, runs: [0.0] * len(runs))
    machine, tapes = make(), Tapes()
    rt = machine.runtime(6)

    def multiplied() -> list[bytes]:
        """The algorithms of a round's products."""
        done = run(machine, rt, tapes, BUILDS[name], setting)
        return [event.what[2] for d in done for event in d.events if event.kind == "gemm"]

    plain = [multiplied() for _ in range(3)][0]
    monkeypatch.setenv("TE_CORE_AUTOTUNE", "1")
    tuned = [multiplied() for _ in range(3)]
    assert tuned[0] == tuned[1] == tuned[2] and len(tuned[0]) == len(plain) > 0
    assert not set(plain) & set(tuned[0])
    monkeypatch.delenv("TE_CORE_AUTOTUNE")
    assert multiplied() == plain and not machine.faults
    kept = [p.source for tape in taped.tapes() for p in tape.keeps if isinstance(p, gemm_run.LtPlan)]
    assert setting != "first" or sum("timing" in source for source in kept) * 2 == len(kept) > 0
