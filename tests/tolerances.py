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
    # Attention on normal values. One E4M3 cast leaves 32.2 dB, one E5M2 cast 26.2 (mean square of an error that is
    # uniform within half a step, over that of a significand). Output: P, v and its own cast, and scores of q and k
    # that shift P by as much as two casts: 25.2. dv: P and its shift, dO and its cast in E5M2: 21.8. dq and dk: dO, dS,
    # their own cast in E5M2, k or q, v, the shift of P: 20.2, and what is left of dP after its mean is taken off, in
    # the causal triangle three quarters: 18.9. Less what scatters with few rows.
    "fp8 attention": 23.5,
    "fp8 attention dv": 20.0,
    "fp8 attention dq": 17.0,
    # A whole attention block in FP8: two linears around that.
    "fp8 attention block": 16.0,
    # The CPU against float64 of the same casts: values that float32 puts on the other side of a tie, one cast apart.
    "fp8 attention exact": 45.0,
    "nvfp4 linear": 13.0,
    "nvfp4 mlp": 8.5,
    # Gradients of queries and keys go through two such products (10.5) and meet keys, queries and weights of attention
    # that come from another one (14): 9. Less what the figures of 64 values scatter by (7.4 seen in six seeds).
    "nvfp4 attention": 6.5,
    "bf16": 40.0,
    "fp16": 55.0,
    # A gradient through four products with rounded operands (projection, attention's two, projection): 6 dB below one
    # product's 46, less what sums of 32 terms of both signs scatter by (a GPU, which rounds P and dS, too: a weight's
    # 39.1, a bias's 37.6).
    "bf16 attention block": 36.0,
    "fp16 attention block": 52.0,
    "fp32": 110.0,
    "tf32": 60.0,  # 10 mantissa bits in the products
    # float32 sums of exact products; cuDNN's softcap is the hardware's tanh, of 11 bits.
    "attention scores": 60.0,
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
