"""Attention of bfloat16 tensors in float64, and how far from it a backend may be that rounds where all of them do.

A fused attention rounds to bfloat16: P before its product with v and with dy, the output (from which the backward takes
the row sums of P dP), dS before its products with k and q, and each result; operations of torch round dP, too. So the
error of a result has a size that is known for each element, from the terms it is a sum of. A bound for all elements
alike cannot be right: where a function of the scores lets all queries look at a few keys, gradients of those keys are
sums of hundreds of terms, and an element of them that happens to be near zero is as wrong as the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.world import values

UNIT = 2.0**-8  # the largest relative error of a rounding to bfloat16
VARIANCE = UNIT * UNIT / 3  # of a relative error that is spread evenly up to it
#: What a tanh of the GPU adds to a soft-cap's gradient, relative to dP: 2 * 2**-11.
TANH = 2.0**-20
SIGMAS = 6.0  # one of 500 million normal numbers is larger

Exact = list[tuple[torch.Tensor, torch.Tensor]]  # (value, variance of its error before it is rounded)


def exact(tensors: Any, change: Callable[..., torch.Tensor], form: str, *, fused: bool) -> Exact:
    """Of the output and the gradients of q, k and v, for the gradient that steps of test_score_mod.py take."""
    q, k, v = (t.detach().double() for t in tensors)
    if form == "sbhd":
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    (batch, rows, heads, width), (columns, groups) = q.shape, k.shape[1:3]
    lead = (batch, rows) if form == "bshd" else (rows, batch)
    dy = values(*lead, heads * v.shape[3], device=str(q.device), dtype=tensors[0].dtype, seed=7).double()
    dy = (dy if form == "bshd" else dy.transpose(0, 1)).unflatten(2, (heads, -1))
    q, k, v, dy = (t.transpose(1, 2) for t in (q, k, v, dy))  # [b, h, s, d]
    k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
    scale = width**-0.5
    scores = (q @ k.mT * scale).requires_grad_()
    b, h, i, j = (torch.arange(n, device=q.device) for n in (batch, heads, rows, columns))
    changed = change(scores, b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i.view(-1, 1), j)
    (slope,) = torch.autograd.grad(changed.sum(), scores)
    p, slope = torch.softmax(changed.detach(), -1), slope.nan_to_num()
    out = p @ v
    v_out = VARIANCE * (p**2 @ v**2)
    dp = dy @ v.mT
    d_s = p * (dp - (dy * out).sum(-1, keepdim=True))
    # Of the row sums, and with them of whole rows of dS; the rest is of each element for itself.
    v_row = (dy**2 * (v_out + VARIANCE * out**2)).sum(-1, keepdim=True)
    each = VARIANCE * (d_s * slope) ** 2 + TANH * d_s**2
    if not fused:
        each = each + VARIANCE * (p * dp * slope) ** 2
        v_row = v_row + VARIANCE * ((p * dp) ** 2).sum(-1, keepdim=True)
    weight = p * slope
    dq, v_dq = (d_s * slope) @ k * scale, (each @ k**2 + v_row * (weight @ k) ** 2) * scale**2
    dk, v_dk = (d_s * slope).mT @ q * scale, ((each + v_row * weight**2).mT @ q**2) * scale**2
    dv, v_dv = p.mT @ dy, VARIANCE * (p**2).mT @ dy**2
    found = [(out, v_out), (dq, v_dq)]
    for part, variance in ((dk, v_dk), (dv, v_dv)):  # a head's part may be rounded before heads are added up
        parts = part.unflatten(1, (groups, -1))
        found.append((parts.sum(2), variance.unflatten(1, (groups, -1)).sum(2) + VARIANCE * (parts**2).sum(2)))
    made = [(a.transpose(1, 2), b.transpose(1, 2)) for a, b in found]
    if form == "sbhd":
        made = [(a.transpose(0, 1), b.transpose(0, 1)) for a, b in made]
    return [(a.flatten(2), b.flatten(2)) if n == 0 else (a, b) for n, (a, b) in enumerate(made)]


def assert_rounded_only(got: list[torch.Tensor], expected: Exact) -> None:
    """No element is further away than roundings explain, and all together are not twice as far as they make them."""
    for name, found, (want, variance) in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        error = found.double() - want
        bound = SIGMAS * variance.sqrt() + UNIT * want.abs() + 1e-6
        worst = (error.abs() / bound).max().item()
        assert worst <= 1, f"{name}: an error of {worst:.2f} times the bound"
        whole = (error.square().sum() / (variance + VARIANCE * want**2).sum()).sqrt().item()
        assert whole <= 2, f"{name}: errors of {whole:.2f} times what roundings make"
