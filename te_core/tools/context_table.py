"""What attention takes where sequences lie cut over ranks, as the table of docs/parallel.md.

    python -m te_core.tools.context_table

Nothing is stated here: each cell asks the rules that a call asks (te_core/layers/context/rules.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from te_core.attention import AttentionSpec
from te_core.layers.context.rules import Cut, Refusal, refusal
from te_core.layers.context.schedule import MODES, Context

_PADDED = {"padded": True}
_PACKED = {"q_format": "thd", "kv_format": "thd", **_PADDED}

#: Fields of the spec, or of `Cut`, by what a user calls them.
FEATURES: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"right": 0},
    "padding, dense": _PADDED,
    "padding, causal, dense": {**_PADDED, "right": 0},
    "packed (thd)": _PACKED,
    "packed (thd), causal": {**_PACKED, "right": 0},
    "window, causal": {"left": 4, "right": 0},
    "window, causal, packed": {**_PACKED, "left": 4, "right": 0},
    "window, both sides": {"left": 4, "right": 4},
    "window, both sides, packed": {**_PACKED, "left": 4, "right": 4},
    "window, causal, dropout": {"left": 4, "right": 0, "dropout": 0.1},
    "diagonal bottom-right": {"right": 0, "bottom_right": True},
    "attention_mask": {"masked": True},
    "cross attention": {"tokens": (8, 4)},
    "cross attention, causal": {"tokens": (8, 4), "right": 0},
    "bias": {"bias": "post_scale_bias"},
    "ALiBi": {"right": 0, "bias": "alibi"},
    "softmax off-by-one": {"right": 0, "softmax": "off-by-one"},
    "softmax learnable": {"right": 0, "softmax": "learnable"},
    "dropout": {"right": 0, "dropout": 0.1},
    "return_max_logit": {"right": 0, "max_logit": True},
    "soft-cap": {"right": 0, "softcap": 20.0},
    "GQA, more ranks than groups": {"right": 0, "groups": 1},
}


def asked(mode: str, feature: str) -> Refusal | None:
    """What the rules say of a feature over two ranks (a2a+p2p: two times two); None: it is taken."""
    cut = Cut(AttentionSpec(0.1), Context(mode, 4, 2) if mode == "a2a+p2p" else Context(mode, 2), 8, 4, (8, 8))
    changes = FEATURES[feature]
    cut = cut._replace(**{name: value for name, value in changes.items() if name in Cut._fields})
    core = {name: value for name, value in changes.items() if name not in Cut._fields}
    return refusal(cut._replace(core=replace(cut.core, **core)))


def table() -> str:
    """Rows of Markdown."""
    lines = ["| | " + " | ".join(MODES) + " |", "|---" * (len(MODES) + 1) + "|"]
    for feature in FEATURES:
        cells = [asked(mode, feature) for mode in MODES]
        lines.append(f"| {feature} | " + " | ".join("yes" if c is None else f"no: {c.do}" for c in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
