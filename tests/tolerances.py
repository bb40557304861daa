"""Every tolerance of the suite, by number format and stage. Raising one needs a written reason here."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Signal-to-noise in dB against a reference of higher precision.
DB = {
    "fp8 gemm": 25.0,  # one FP8 cast or GEMM
    "fp8 fast": 52.0,  # a product against float64 of the same FP8 values: the accumulation alone
    "fp8 split": 65.0,
    "fp8 linear": 17.0,  # a whole FP8 linear, forward or backward
    # Two FP8 linears one after the other; where h is near 0, its rounding also flips whole terms through relu's step.
    "fp8 mlp": 14.0,
    # One E2M1 cast to nearest of normal values leaves 20 dB, so a product of two 17; rounding one of them
    # stochastically doubles its error: 15. An MLP's gradients go through two such products and the slope between: 10.5.
    # Less what the figures of 100 values (a norm's gradients) scatter by.
    "nvfp4 linear": 13.0,
    "nvfp4 mlp": 8.5,
    "bf16": 40.0,
    "fp16": 55.0,
    "fp32": 110.0,
    "tf32": 60.0,  # 10 mantissa bits in the products
}


def snr_db(value: Any, reference: Any) -> float:
    """Signal-to-noise ratio of `value` against `reference`, in dB; NaN anywhere gives -inf."""
    v, r = (np.asarray(_numpy(t), np.float64) for t in (value, reference))
    assert v.shape == r.shape, f"{v.shape} against {r.shape}"
    if np.isnan(v).any() or np.isnan(r).any():
        return -np.inf
    noise = np.square(v - r).sum()
    signal = np.square(r).sum()
    if noise == 0:
        return np.inf
    return float(10 * np.log10(signal / noise)) if signal > 0 else -np.inf


def _numpy(t: Any) -> Any:
    return t.detach().float().cpu().numpy() if hasattr(t, "detach") else t
