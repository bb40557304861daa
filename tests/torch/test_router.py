"""The router: the golden file, plain torch in float64 with its gradients, formats, quantile balancing, compiled."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from te_torch.router import (
    RouterError,
    RoutingMapFormat,
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)
from tests.backends import devices
from tests.covering import covering
from tests.golden import tree

DEVICES = devices()
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


def plain_scores(x: torch.Tensor, score: str) -> torch.Tensor:
    """Each expert's own; of softmax the logit."""
    if score == "sigmoid":
        return torch.sigmoid(x)
    return x if score == "softmax" else torch.nn.functional.softplus(x).sqrt()


def plain(
    logits: torch.Tensor, topk: int, pre: bool, groups: Any, best: Any, scale: Any, score: str, bias: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the router gives, in float64."""
    x = logits.double()
    values = x.softmax(-1) if pre and score == "softmax" else plain_scores(x, score)
    wanted = values.detach() if bias is None else values.detach() + bias
    if best:
        parts = wanted.unflatten(-1, (groups, -1))
        kept = parts.topk(topk // best).values.sum(-1).topk(best).indices
        left_out = torch.ones(parts.shape[:-1], dtype=torch.bool, device=x.device).scatter(-1, kept, False)
        wanted = parts.masked_fill(left_out[..., None], -torch.inf).flatten(-2)
    chosen = wanted.topk(topk).indices
    gates = values.gather(-1, chosen)
    if score == "softmax" and not pre:
        gates = gates.softmax(-1)
    elif score != "softmax" and topk > 1:
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
    zeros = torch.zeros_like(x)
    probs = zeros.scatter(-1, chosen, gates * (1.0 if scale is None else scale))
    return probs, zeros.scatter(-1, chosen, 1).bool()


def logits_of(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """No two alike in a row, nor their sums, so that no tie is broken in one way or the other."""
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    rows = torch.stack([torch.randperm(shape[-1], generator=generator) for _ in range(prod(shape[:-1]))])
    return (4 * (rows.view(shape) / shape[-1]) ** 1.5 - 2).to(device, dtype).requires_grad_()


def close(found: torch.Tensor, wanted: torch.Tensor, experts: int = 1) -> None:
    """Within the documented tolerance in float32; of 16 bits within a rounding."""
    wide = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[found.dtype]
    within = {"atol": max(1e-5, 4e-7 * experts) + wide / 8, "rtol": max(1.3e-6, 4e-7 * experts) + wide}
    torch.testing.assert_close(found.double(), wanted, **within)


def bits_of(routing: torch.Tensor, experts: int) -> torch.Tensor:
    """A bitmap as a map of bytes."""
    shifts = torch.arange(8, device=routing.device)
    return (routing[..., None] >> shifts & 1).flatten(-2)[..., :experts].bool()


@pytest.mark.parametrize("device", DEVICES)
def test_golden(device: str) -> None:
    """What the documented package gave: the same maps, probabilities to a rounding."""
    golden = {k: v.to(device) for k, v in tree("functions", "router/").items()}
    names = [name.rpartition("/")[0] for name in golden if name.endswith("/map")]
    assert len(names) == 8
    for name in names:
        score, pre, groups = name.split("/")
        best = (None, None) if groups == "groups_None" else (4, 2)
        probs, routing = fused_topk_with_score_function(golden["logits"], 4, pre == "pre_True", *best, 1.5, score, None)
        assert torch.equal(routing, golden[f"{name}/map"])
        torch.testing.assert_close(probs, golden[f"{name}/probs"])


@covering(
    turns=2,
    device=DEVICES,
    given=[((6, 32), torch.bfloat16), ((3, 2, 128), torch.float32), ((4, 130), torch.float32)]
    + [((7, 12), torch.float16), ((2, 1024), torch.float32)],
    choice=[(4, None, None), (4, 4, 1.2), (1, None, 1.2), (4, 2, 0)],
    kind=["softmax", "softmax before", "sigmoid", "sigmoid biased", "sqrtsoftplus", "sqrtsoftplus biased"],
    form=("bytemap", "bitmap_u8", torch.int16, torch.int32, torch.int64),
)
def test_topk(device: str, given: Any, choice: Any, kind: str, form: Any) -> None:
    """Probabilities, map or numbers, and gradients, of leading dimensions, too."""
    (shape, dtype), (topk, best, scale), (score, _, how) = given, choice, kind.partition(" ")
    experts, pre = shape[-1], how == "before"
    groups = best and {12: 4, 130: 10}.get(experts, 8)
    x = logits_of(*shape, device=device, dtype=dtype)
    bias = torch.linspace(-0.5, 0.5, experts, device=device).requires_grad_() if how == "biased" else None
    indices = None if isinstance(form, str) else torch.full((*shape[:-1], topk), -1, dtype=form, device=device)
    more = {"routing_map_format": form} if indices is None else {"topk_indices": indices}
    probs, told = fused_topk_with_score_function(x, topk, pre, groups, best, scale, score, bias, **more)
    routing = told.clone()
    assert probs.dtype == dtype and probs.shape == x.shape and not told.requires_grad
    same = x.detach().double().requires_grad_()
    wanted, chosen = plain(same, topk, pre, groups, best, scale, score, None if bias is None else bias.detach())
    close(probs, wanted, experts)
    if indices is not None:
        assert told is indices
        routing = torch.zeros_like(chosen).scatter(-1, indices.long(), True)
    elif form == "bitmap_u8":
        assert routing.dtype == torch.uint8 and routing.shape == (*shape[:-1], -(-experts // 8))
        routing = bits_of(routing, experts)
    assert torch.equal(routing, chosen)
    dy = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    told.fill_(1)  # as Megatron-core pads its map
    probs.backward(dy)
    wanted.backward(dy.double())
    assert x.grad.dtype == dtype and (bias is None or bias.grad is None)
    close(x.grad, same.grad, experts)


@covering(
    device=DEVICES,
    experts=(8, 130, 256),
    topk=(1, 4),
    score=SCORES,
    form=(RoutingMapFormat.BYTEMAP, "bitmap_u8", 1),
    dtype=(torch.float32, torch.bfloat16),
)
def test_scores(device: str, experts: int, topk: int, score: str, form: Any, dtype: torch.dtype) -> None:
    """Scores of all experts, which add up to 1; the map comes first."""
    x = logits_of(5, 3, experts, device=device, dtype=dtype)
    routing, scores = fused_compute_score_for_moe_aux_loss(x, topk, score, form)
    same = x.detach().double().requires_grad_()
    wanted = same.softmax(-1) if score == "softmax" else plain_scores(same, score)
    wanted = wanted if score == "softmax" else wanted / wanted.sum(-1, keepdim=True)
    assert scores.dtype == torch.float32
    close(scores, wanted, experts)
    routing = routing if form == 0 else bits_of(routing, experts)
    assert torch.equal(routing, torch.zeros_like(routing).scatter(-1, x.topk(topk).indices, True))
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(device)
    scores.backward(dy)
    wanted.backward(dy.double())
    close(x.grad, same.grad, experts)


@covering(
    device=DEVICES,
    times=(1, 2),
    counts=(torch.int32, torch.int64, torch.float32, torch.bfloat16),
    total=("number", "tensor"),
    dtype=(torch.float32, torch.bfloat16, torch.float16),
)
def test_aux_loss(device: str, times: int, counts: torch.dtype, total: str, dtype: torch.dtype) -> None:
    """The loss is a number in the dtype of probs; of a tensor's number the gradient is of its value then."""
    probs = torch.rand(300, 12 * times, generator=torch.Generator().manual_seed(0)).to(device, dtype).requires_grad_()
    tokens = torch.arange(12 * times, device=device).to(counts)
    n: Any = 70 if total == "number" else torch.tensor(70, device=device)
    loss = fused_moe_aux_loss(probs, tokens, n, 12, 3, 0.05)
    assert loss.shape == () and loss.dtype == dtype
    same = probs.detach().double().requires_grad_()
    wanted = (same.sum(0) * tokens.double()).sum() * (0.05 * 12 / 3 / 70**2)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=0)
    (2 * loss).backward()
    (2 * wanted).backward()
    close(probs.grad, same.grad)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_by_differences(device: str) -> None:
    """Of all three, one after the other, as a training step has them: no rule is asked twice about itself."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        probs, routing = fused_topk_with_score_function(x, 3, False, 4, 3, 1.5, "sigmoid", None)
        _, scores = fused_compute_score_for_moe_aux_loss(x, 3, "sqrtsoftplus")
        balance = fused_moe_aux_loss(scores, routing.sum(0), 6, 16, 3, 2.0)
        return (probs * weights).sum() + balance

    x = logits_of(6, 16, device=device)
    weights = torch.linspace(-1, 1, 96, device=device).view(6, 16)
    loss(x).backward()
    for seed in range(3):
        way = torch.randn(6, 16, generator=torch.Generator().manual_seed(seed)).to(device)
        with torch.no_grad():
            slope = (loss(x + 2e-3 * way) - loss(x - 2e-3 * way)) / 4e-3
        torch.testing.assert_close(slope, (x.grad * way).sum(), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_quantile_balancing(device: str) -> None:
    """Two micro-batches add up, in either mode, beside a map. Bounds are looked at when they change."""
    x, bias = logits_of(40, 24, device=device).detach(), torch.linspace(-0.2, 0.2, 24, device=device)
    bounds, found = torch.tensor([-0.5, 0.75], device=device), []
    s = torch.sigmoid(x)
    cutoff = (s + bias).sort(-1, descending=True).values[:, 4:5]
    place = ((cutoff - s + 0.5) * (10 / torch.tensor(1.25, device=device))).floor().clamp(0, 9).long()
    wanted = torch.zeros(24, 10, dtype=torch.int32, device=device)
    wanted.index_put_((torch.arange(24, device=device).expand(40, 24), place), wanted.new_ones(()), accumulate=True)
    for mode in ("two_kernel", "fused_atomic"):
        histogram = torch.zeros(24, 10, dtype=torch.int32, device=device)
        version = histogram._version
        for _ in range(2):
            args = (x, 4, False, None, None, None, "sigmoid", bias, "bitmap_u8", None, histogram, bounds, mode)
            _, routing = fused_topk_with_score_function(*args)
        assert histogram._version > version and routing.dtype == torch.uint8
        found.append(histogram)
    assert torch.equal(*found) and int((found[0] - 2 * wanted).abs().sum()) <= 4  # at the edge of a bin by a rounding
    bounds.neg_()
    with pytest.raises(ValueError, match="finite with lower < upper"):
        fused_topk_with_score_function(*args)


@pytest.mark.parametrize("device", DEVICES)
def test_wrong_calls(device: str) -> None:
    """The documented classes of errors; what they say is in tests/messages."""
    x, bias = logits_of(4, 16, device=device), torch.zeros(16, device=device)
    call = fused_topk_with_score_function
    for wrong in (
        (17, False, None, None),
        (4, False, 3, 2),
        (4, False, 8, 3),
        (8, False, 8, 2),
        (0, False, None, None),
    ):
        with pytest.raises(RuntimeError, match="topk"):
            call(x, *wrong, None, "softmax", None)
    for score, given in (("softmax", bias), ("sigmoid", bias.half()), ("sigmoid", bias[1:]), ("softplus", None)):
        with pytest.raises(RuntimeError):
            call(x, 4, False, None, None, None, score, given)
    with pytest.raises(RuntimeError, match="topk_indices"):
        call(x, 4, False, None, None, None, "softmax", None, 1, torch.zeros(4, 4, dtype=torch.int32, device=device))
    with pytest.raises(TypeError):
        call(x, 4, False, None, None, None, "softmax", None, None)
    for given in ("bitmap", 2):
        with pytest.raises(ValueError):
            call(x, 4, False, None, None, None, "softmax", None, given)
    with pytest.raises(ValueError):
        call(x.double(), 4, False, None, None, None, "softmax", None)
    with pytest.raises(RouterError):
        fused_moe_aux_loss(x, bias, 4, 5, 2, 0.1)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device: str) -> None:
    """No break, one program for each set of shapes, and what eager code gives."""
    bias, bounds = torch.linspace(-0.1, 0.1, 16, device=device), torch.tensor([-1.0, 1.0], device=device)

    def step(x: torch.Tensor, indices: torch.Tensor, histogram: torch.Tensor) -> Any:
        probs, chosen = fused_topk_with_score_function(
            x, 4, False, None, None, 2.0, "sigmoid", bias, "bytemap", indices, histogram, bounds, "two_kernel"
        )
        routing, scores = fused_compute_score_for_moe_aux_loss(x, 4, "softmax")
        return probs, fused_moe_aux_loss(scores, routing.sum(0), x.shape[0], 16, 4, 0.1), chosen

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for tokens in (8, 8):
        found = []
        for function in (step, compiled):
            x, histogram = logits_of(tokens, 16, device=device), torch.ones(16, 5, dtype=torch.int32, device=device)
            indices = torch.zeros(tokens, 4, dtype=torch.int16, device=device)
            probs, loss, chosen = function(x, indices, histogram)
            (probs.square().sum() + loss).backward()
            found.append((probs, loss, indices, chosen, histogram, x.grad))
        assert all(map(torch.equal, *found))
    assert counter.frame_count == 1
