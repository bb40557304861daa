"""Tables and pictures of docs/guides: `pictures.py formats`, `pictures.py outlier` print tables.

python docs/guides/pictures.py draw     draw the pictures anew (matplotlib)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

import te_torch as te
from te_core.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

HERE = Path(__file__).resolve().parent
SMALL = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2, "E2M1 (FP4)": ml_dtypes.float4_e2m1fn}
ALL = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, **SMALL}


def formats() -> None:
    """What each format can say."""
    print("| Format | Bits | of exponent, mantissa | Largest | Smallest above 0 | Largest relative error |")
    print("|---|---|---|---|---|---|")
    for name, kind in ALL.items():
        facts = ml_dtypes.finfo(kind)
        largest, least = float(facts.max), float(facts.smallest_subnormal)
        error = 2.0 ** -(facts.nmant + 1)
        print(f"| {name} | {facts.bits} | {facts.nexp}, {facts.nmant} | {largest:.4g} | {least:.2g} | {error:.2g} |")


def outlier() -> None:
    """The error of all other values, beside one that is so many times larger."""
    torch.manual_seed(0)
    x = torch.randn(128, 256)
    print("| Recipe | no outlier | 10,000 times | 1,000,000 times |", "|---|---|---|---|", sep="\n")
    for recipe in (Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()):
        cells = []
        for times in (1, 10**4, 10**6):
            spoilt = x.clone()
            spoilt[5, 7] = times
            with torch.no_grad(), te.quantized_model_init(recipe=recipe):
                held = te.Linear(256, 128, bias=False, device="cpu")
                held.weight.copy_(spoilt)
                error = held.weight.dequantize() - spoilt
            error[5, 7] = 0
            cells.append(f"{(error.norm() / x.norm()).item():.1%}")
        print(f"| `{type(recipe).__name__}` | {' | '.join(cells)} |")


def axes_of(*, width: int, of: int = 1) -> tuple[Any, Any]:
    """A figure, and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt.subplots(1, of, figsize=(width, 3), layout="constrained")


def draw_formats() -> None:
    """Every value from 0 to 8 as a mark."""
    figure, axes = axes_of(width=8)
    for row, (_, kind) in enumerate(reversed(SMALL.items())):
        bits = np.arange(128 if ml_dtypes.finfo(kind).bits == 8 else 8, dtype=np.uint8)
        values = bits.view(kind).astype(np.float32)
        axes.plot(values[values <= 8], np.full((values <= 8).sum(), row), "|", markersize=18)
    axes.set(yticks=range(len(SMALL)), yticklabels=[*reversed(SMALL)], ylim=(-0.6, len(SMALL) - 0.4), xlabel="value")
    save(figure, "formats.png")


def draw_cast() -> None:
    """A tensor cast without a scale, and with one."""
    torch.manual_seed(0)
    x = torch.randn(200, 100) * 2**-20
    scaled = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")(x).dequantize()
    plain = x.to(torch.float8_e4m3fn).float()
    figure, pair = axes_of(width=8, of=2)
    bins = np.linspace(-4, 4, 161) * 2.0**-20
    for axes, cast, title in zip(pair, (plain, scaled), ("without a scale", "with a scale"), strict=True):
        axes.hist(x.flatten().numpy(), bins, alpha=0.5, label="before")
        axes.hist(cast.flatten().numpy(), bins, histtype="step", label="after the cast to E4M3")
        axes.set(title=title, yscale="log", xlabel="value")
        axes.legend(loc="upper right", fontsize=8)
    save(figure, "cast.png")


def draw_loss() -> None:
    """The losses of the script in 02-ten-minutes.md."""
    page = (HERE / "02-ten-minutes.md").read_text()
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0], names)
    figure, axes = axes_of(width=7)
    axes.plot(names["fp8"], "-", label="FP8 (DelayedScaling)")
    axes.plot(names["bf16"], "--", label="bf16")
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
    axes.legend()
    save(figure, "loss.png")


def save(figure: Any, name: str) -> None:
    """Write a picture beside the pages."""
    figure.savefig(HERE / name, dpi=110)


def draw() -> None:
    """All pictures."""
    draw_formats()
    draw_cast()
    draw_loss()


if __name__ == "__main__":
    {"formats": formats, "outlier": outlier, "draw": draw}[sys.argv[1]]()
