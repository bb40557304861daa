"""The HTML page of a report: one file with its style, its program and its figures, which no network is needed for.

A browser draws it (page.js, page.css). Many steps are drawn as at most BINS columns, each with the worst of its steps,
in 16 bits a figure and compressed: 200 layers over 1000 steps are some MiB.
"""

from __future__ import annotations

import base64
import html
import json
import math
import zlib
from importlib.resources import files
from typing import Any

import numpy as np

BINS = 240  # columns of a heat map, points of a curve
#: The figures of a page, and which of several steps stands for them all.
SHOWN = {
    **dict.fromkeys(("lost", "amax", "underflow", "overflow"), "max"), "snr": "min", "scale": "min", "nonfinite": "max",
}  # fmt: skip


def page(report: Any, title: str) -> str:
    """The whole page as text."""
    edges = np.linspace(0, len(report.steps), min(len(report.steps), BINS) + 1).astype(int)
    figures = np.stack([_figures(s, edges) for s in report.series]) if report.series else np.zeros((0, 0, 0))
    facts = {
        "figures": [*SHOWN],
        "steps": [report.steps[i] for i in edges[:-1]],
        "ends": [report.steps[i - 1] for i in edges[1:]],
        "verdict": report.verdict(),
        "unseen": report.unseen,
        "series": [_facts(s) for s in report.series],
    }
    part = files(__package__)
    return _PAGE.format(
        title=html.escape(title),
        style=part.joinpath("page.css").read_text(encoding="utf-8"),
        # No tag can end the script that these stand in.
        facts=json.dumps(facts).replace("<", "\\u003c"),
        figures=_packed(figures),
        program=part.joinpath("page.js").read_text(encoding="utf-8"),
        text=html.escape(str(report)),
    )


def _facts(s: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"layer": s.layer, "gemm": s.gemm, "tensor": s.tensor, "why": s.why()}
    found |= {"format": None if s.kind is None else s.kind.words, "order": s.order}
    for name, worst in (("snr", "mean"), ("underflow", "mean"), ("overflow", "mean"), ("amax", "max")):
        values = getattr(s, name)
        values = values[np.isfinite(values)]
        found[name] = _number(float(getattr(values, worst)())) if len(values) else None
    return {**found, "trouble": _number(s.trouble())}


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _figures(s: Any, edges: Any) -> Any:
    """[figure, bin]."""
    rows = []
    for name, worst in SHOWN.items():
        values = s.lost() if name == "lost" else getattr(s, name)
        pick = np.fmax if worst == "max" else np.fmin
        rows.append([pick.reduce(values[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True)])
    return np.array(rows, dtype=np.float32)


def _packed(values: Any) -> str:
    """The upper 16 bits of each float32 (rounded), the high bytes before the low ones, compressed, as text."""
    bits = np.ascontiguousarray(values, dtype=np.float32).reshape(-1).view(np.uint32).astype(np.uint64)
    nan = np.isnan(values).reshape(-1)
    short = np.where(nan, 0x7FC0, np.minimum((bits + 0x8000) >> 16, 0xFFFF)).astype(np.uint16)
    planes = np.concatenate([(short >> 8).astype(np.uint8), (short & 0xFF).astype(np.uint8)])
    return base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode()


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1><p id="verdict"></p></header>
<main>
<section id="overview"></section>
<section id="detail"></section>
<section id="tensors"></section>
</main>
<noscript><pre>{text}</pre></noscript>
<script type="application/json" id="facts">{facts}</script>
<script type="text/plain" id="figures">{figures}</script>
<script>
{program}</script>
</body>
</html>
"""
