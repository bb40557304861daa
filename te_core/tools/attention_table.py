"""What cuDNN does of an attention on a device, as tables: the doctor's, and the list of docs/attention.md.

    python -m te_core.tools.attention_table        # everything that cuDNN 9.19 refuses on an H200, and why

Nothing is stated here. An attention is the plain one with features; for each the rules that dispatch asks are asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from te_core import dtypes
from te_core.attention import AttentionSpec, Sizes
from te_core.attention_rules import Version, cudnn_attention
from te_core.device import Answer, DeviceInfo

H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, 60 << 20, 141 << 30, (13, 0))
CUDNN = (9, 19, 0)

_SPEC = AttentionSpec(0.1, "bshd", "bshd")
_SIZES = Sizes(2, 1024, 1024, 16, 16, 128, 128)

#: What may be asked of an attention: fields of its spec and sizes, or arguments of the rules.
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"right": 0},
    "window to the left": {"left": 128},
    "window, causal": {"left": 128, "right": 0},
    "window, both sides": {"left": 128, "right": 128},
    "bottom-right diagonal": {"sq": 512, "right": 0, "bottom_right": True},
    "more queries than keys": {"skv": 512},
    "lengths of 1000": {"sq": 1000, "skv": 1000},
    "one query": {"sq": 1},
    "one query, one key": {"sq": 1, "skv": 1},
    "padding": {"padded": True},
    "packed (thd)": {"q_format": "thd", "kv_format": "thd", "padded": True, "max_q": 1024, "max_kv": 1024},
    "packed k and v only": {"q_format": "bshd", "kv_format": "thd", "padded": True, "max_kv": 1024},
    "arbitrary mask": {"masked": True},
    "grouped heads (GQA)": {"groups": 4},
    "bias": {"bias": "post_scale_bias"},
    "bias with gradient": {"bias": "post_scale_bias", "bias_grad": True},
    "bias [.., 1, skv]": {"bias": "post_scale_bias", "bias_rows": 1},
    "ALiBi": {"bias": "alibi"},
    "softmax off-by-one": {"softmax": "off-by-one"},
    "softmax learnable": {"softmax": "learnable"},
    "dropout": {"dropout": 0.1},
    "soft-cap": {"softcap": 30.0},
    "max_logit": {"max_logit": True},
    "deterministic": {"deterministic": True},
    "paged cache": {"paged": True, "padded": True},
    "heads of 64": {"d_qk": 64, "d_v": 64},
    "heads of 192/128": {"d_qk": 192},
    "heads of 256": {"d_qk": 256, "d_v": 256},
    "heads of 512": {"d_qk": 512, "d_v": 512},
    "heads of 100": {"d_qk": 100, "d_v": 100},
    "float32": {"dtype": dtypes.float32},
    "memory not on 16 bytes": {"aligned": False},
    "FP8": {"fp8": "delayed"},
    "FP8, current scaling": {"fp8": "current"},
    "FP8, MXFP8": {"fp8": "mxfp8"},
}

_SHOWN = (
    "causal", "window, causal", "bottom-right diagonal", "padding", "packed (thd)", "arbitrary mask",
    "grouped heads (GQA)", "bias with gradient", "ALiBi", "softmax off-by-one", "softmax learnable", "dropout",
    "soft-cap", "max_logit", "deterministic", "paged cache", "heads of 64", "heads of 192/128", "heads of 256",
    "heads of 512",
)  # fmt: skip
_SHOWN_FP8 = (
    "causal", "bottom-right diagonal", "padding", "packed (thd)", "grouped heads (GQA)", "bias", "dropout",
    "softmax off-by-one", "heads of 64",
)  # fmt: skip
#: The doctor's rows.
ROWS: tuple[tuple[str, ...], ...] = (
    *((name,) for name in _SHOWN),
    ("FP8",),
    *(("FP8", name) for name in _SHOWN_FP8),
    ("FP8, current scaling",),
)


def answers(device: DeviceInfo, version: Version, features: Sequence[str]) -> tuple[Answer, Answer] | None:
    """What the rules say of the forward alone, and with its backward; None where two features contradict."""
    changes = _together(features)
    if changes is None:
        return None
    spec = replace(_SPEC, **{f: changes.pop(f) for f in AttentionSpec.__dataclass_fields__ if f in changes})
    sizes = _SIZES._replace(**{f: changes.pop(f) for f in Sizes._fields if f in changes})
    options = {"dtype": dtypes.bfloat16, "fp8": False, **changes}
    asked = device, version, spec, sizes
    forward, both = (cudnn_attention(*asked, training=training, **options) for training in (False, True))
    return forward, both


def _together(features: Sequence[str]) -> dict[str, Any] | None:
    changes: dict[str, Any] = {}
    for name in features:
        if any(changes.get(field, value) != value for field, value in FEATURES[name].items()):
            return None
        changes.update(FEATURES[name])
    return changes


def table(device: DeviceInfo, version: Version) -> Iterator[str]:
    """Feature x direction for a device, with the reason of each that is refused."""
    number = ".".join(map(str, version))
    heading = f"attention by cuDNN {number}"
    names = [" + ".join(row) for row in ROWS]
    width = max(map(len, (*names, heading)))
    yield f"  {heading:{width}}  forward  backward"
    for name, row in zip(names, ROWS, strict=True):
        found = answers(device, version, row)
        assert found is not None
        marks = ["yes" if able else "-" for able, _ in found]
        reason = next((why for able, why in found if not able), "")
        yield f"  {name:{width}}  {marks[0]:7}  {marks[1]:8}  {reason}".rstrip()


def refusals(device: DeviceInfo, version: Version) -> dict[tuple[str, bool], list[tuple[str, ...]]]:
    """By reason, and whether in training only: what is refused, up to three features together.

    What contains another refusal is left out.
    """
    found: dict[tuple[str, bool], list[tuple[str, ...]]] = {}
    blamed: tuple[list[frozenset[Any]], list[frozenset[Any]]] = ([], [])
    for count in (1, 2, 3):
        for features in combinations(FEATURES, count):
            asked = answers(device, version, features)
            if asked is None:
                continue
            changes = frozenset((_together(features) or {}).items())
            for in_training, (able, reason) in enumerate(asked):
                if able or any(smaller <= changes for smaller in blamed[in_training]):
                    continue
                blamed[in_training].append(changes)
                if not in_training or asked[0][0]:
                    found.setdefault((reason, bool(in_training)), []).append(features)
    return found


def main() -> None:
    """Print the list as a table in Markdown."""
    print("| Refused | | Why |", "|---|---|---|", sep="\n")
    for (reason, in_training), several in refusals(H200, CUDNN).items():
        what = "; ".join(" + ".join(features) for features in several)
        print(f"| {what} | {'in training' if in_training else 'always'} | {reason} |")


if __name__ == "__main__":
    main()
