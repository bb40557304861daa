"""How many calls of layers a run of the suite replayed, and why the others were not (te_core/tape).

Every test process counts what its tests did; pytest's controller adds the numbers up, says them behind the tests and
writes them into the report that records are made of (tools/suite_record.py).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import pytest

NAME = "calls of layers"
#: "": replayed. Otherwise by the reason.
_ran: Counter[str] = Counter()


def counts() -> Counter[str]:
    """What this process has counted so far."""
    taped = sys.modules.get("te_core.tape.taped")  # not of a test that imports no layers
    return Counter() if taped is None else Counter({"": taped.COUNTS.replayed, **taped.COUNTS.interpreted})


def note(before: Counter[str]) -> None:
    """A test is over that began with these."""
    _ran.update(counts() - before)


def finished(config: pytest.Config) -> None:
    """The process's tests are over: tell the controller, or be it."""
    output = getattr(config, "workeroutput", None)
    if output is not None:
        output[NAME] = json.dumps(_ran)
        return
    from _pytest.junitxml import xml_key

    report: Any = config.stash.get(xml_key, None)
    if report is not None and _ran:
        report.add_global_property(NAME, json.dumps(_ran))


def add(node: Any) -> None:
    """What a test process told as it ended."""
    _ran.update(json.loads(getattr(node, "workeroutput", {}).get(NAME, "{}")))


def told(found: Counter[str] | None = None) -> str:
    """In a sentence."""
    found = _ran if found is None else found
    total = found.total()
    if not total:
        return ""
    reasons = "; ".join(f"{reason} ({count:,})" for reason, count in found.most_common() if reason)
    return f"{found['']:,} of {total:,} calls of layers replayed ({found[''] / total:.1%})" + (
        f"; not: {reasons}" if reasons else ""
    )
