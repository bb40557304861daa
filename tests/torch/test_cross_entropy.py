"""parallel_cross_entropy and linear_cross_entropy, beside torch's cross_entropy in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import te_torch as te
from te_core.errors import ArgumentError
from te_core.recipe import Float8BlockScaling, Float8CurrentScaling, Recipe
from tests.backends import devices, requires_cuda
from tests.covering import covering
from tests.tolerances import DB, snr_db

DEVICES = devices()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Of values that are rounded where torch's stay in float64.
LIMIT = {torch.float32: DB["fp32"], torch.bfloat16: DB["bf16"], torch.float16: DB["fp16"]}
IGNORED = -100


def logits_of(
    device: str, dtype: torch.dtype, shape: tuple[int, ...] = (3, 5, 41)
) -> tuple[torch.Tensor, torch.Tensor]:
    """(leaf, targets of which two are ignored)."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator) * 3
    target = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    target.view(-1)[1:3] = IGNORED
    return x.to(device, dtype).requires_grad_(), target.to(device)


def reference(
    logits: torch.Tensor, target: torch.Tensor, smoothing: float = 0.0, z: float = 0.0, reduction: str = "none"
) -> torch.Tensor:
    """torch's, and the z-loss."""
    flat, goal = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    losses = F.cross_entropy(flat, goal, label_smoothing=smoothing, reduction="none", ignore_index=IGNORED)
    losses = losses + torch.where(goal == IGNORED, 0, z * flat.logsumexp(-1) ** 2)
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (goal != IGNORED).sum()


# -------------------------------------------------------------------------------------------------- of logits


@covering(
    device=DEVICES,
    dtype=DTYPES,
    smoothing=[0.0, 0.2],
    reduce_loss=[False, True],
    in_place=[False, True],
    strided=[False, True],
)
def test_logits(
    device: str, dtype: torch.dtype, smoothing: float, reduce_loss: bool, in_place: bool, strided: bool
) -> None:
    leaf, target = logits_of(device, dtype)
    wide = leaf.detach().double().requires_grad_()
    expected = reference(wide, target, smoothing, 0.0, "mean" if reduce_loss else "none")
    inp = leaf.transpose(0, 1).contiguous().transpose(0, 1) if strided else leaf * 1
    loss = te.parallel_cross_entropy(inp, target, smoothing, reduce_loss, in_place=in_place)
    assert loss.dtype is torch.float32 and loss.shape == ((1,) if reduce_loss else target.shape)
    assert snr_db(loss.view(expected.shape), expected) >= DB["fp32"]
    grad = torch.rand_like(expected)
    expected.backward(grad)
    loss.backward(grad.view(loss.shape).float())
    assert leaf.grad is not None and wide.grad is not None and leaf.grad.dtype is dtype
    assert snr_db(leaf.grad, wide.grad) >= LIMIT[dtype]
    assert not leaf.grad.view(-1, 41)[1:3].any()


@pytest.mark.parametrize("device", DEVICES)
def test_memory_of_the_gradient(device: str) -> None:
    """Its own, and that of the logits where asked: who then reads them is told."""
    leaf, target = logits_of(device, torch.bfloat16)
    for in_place in (False, True):
        logits, seen = leaf * 1, []
        logits.register_hook(lambda g, seen=seen: seen.append(g.data_ptr()))
        before, loss = logits.detach().clone(), te.parallel_cross_entropy(logits, target, in_place=in_place)
        again = logits * logits
        loss.sum().backward()
        assert (seen == [logits.data_ptr()]) is in_place
        assert torch.equal(logits, before) is not in_place
        if in_place:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                again.sum().backward()


@pytest.mark.parametrize("reduce_loss", [False, True])
def test_what_hooks_see_kept_for_backward(reduce_loss: bool) -> None:
    """What the caller has, and one tensor of three numbers for each row."""
    leaf, target = logits_of("cpu", torch.bfloat16)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        te.parallel_cross_entropy(leaf, target, reduce_loss=reduce_loss)
    theirs = {leaf.data_ptr(), target.data_ptr()}
    own = [t for t in kept if t.data_ptr() not in theirs]
    assert len(kept) == 3 and [t.dtype for t in own] == [torch.float32] and own[0].numel() == 3 * (15 + 1)


@pytest.mark.parametrize("device", DEVICES)
def test_documented_ways(device: str) -> None:
    leaf, target = logits_of(device, torch.float32)
    loss = te.parallel_cross_entropy(leaf, target, ignore_idx=IGNORED, is_cg_capturable=True)
    with pytest.warns(FutureWarning, match="_input"):
        assert torch.equal(te.parallel_cross_entropy(_input=leaf, target=target.int()), loss)
    nothing = te.parallel_cross_entropy(leaf, torch.full_like(target, IGNORED), reduce_loss=True)
    nothing.backward()
    assert nothing.item() == 0 and leaf.grad is not None and not leaf.grad.any()
    empty = te.parallel_cross_entropy(leaf[:0], target[:0])
    assert empty.shape == (0, 5)
    empty.sum().backward()


# ------------------------------------------------------------------------------------------------- of a product


def operands(device: str, dtype: torch.dtype, rows: int = 50, classes: int = 67) -> list[torch.Tensor]:
    """hidden [2, rows / 2, 32], weight, bias, target."""
    generator = torch.Generator().manual_seed(5)
    shapes = (2, rows // 2, 32), (classes, 32), (classes,)
    made = [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]
    target = torch.randint(0, classes, (2, rows // 2), generator=generator)
    target.view(-1)[1:3] = IGNORED
    return [*made, target.to(device)]


def compare(
    found: torch.Tensor, expected: torch.Tensor, given: list[torch.Tensor], wide: list[torch.Tensor], limit: float
) -> None:
    """The losses and all gradients."""
    assert snr_db(found, expected) >= limit
    grad = torch.rand_like(expected)
    expected.backward(grad)
    found.backward(grad.float())
    for t, w in zip(given, wide, strict=True):
        assert t.grad is not None and w.grad is not None and t.grad.dtype is t.dtype
        assert snr_db(t.grad, w.grad) >= limit


@covering(
    device=DEVICES,
    dtype=DTYPES,
    reduction=["mean", "sum", "none"],
    chunk=[None, 16, 7],
    factors=[(0.0, 0.0), (0.1, 1e-3)],
    biased=[False, True],
)
def test_product(
    device: str, dtype: torch.dtype, reduction: str, chunk: int | None, factors: tuple[float, float], biased: bool
) -> None:
    *given, target = operands(device, dtype)
    given = given[: 2 + biased]
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = reference(F.linear(*wide), target, *factors, reduction)
    smoothing, z = factors
    options = {"label_smoothing": smoothing, "z_loss": z, "reduction": reduction, "chunk": chunk}
    found = te.linear_cross_entropy(*given[:2], target, *given[2:], **options)
    assert found.dtype is torch.float32 and found.shape == expected.shape
    with torch.no_grad():
        assert torch.equal(te.linear_cross_entropy(*given[:2], target, *given[2:], **options), found)
    compare(found, expected, given, wide, LIMIT[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling()], ids=lambda r: type(r).__name__)
def test_product_in_fp8(device: str, recipe: Recipe) -> None:
    *given, target = operands(device, torch.bfloat16)
    given = given[:2]
    wide = [t.detach().double().requires_grad_() for t in given]
    found = te.linear_cross_entropy(*given, target, recipe=recipe, chunk=16)
    plain = te.linear_cross_entropy(*given, target, chunk=16)
    assert found.item() != plain.item()  # it did run in FP8
    compare(found, reference(F.linear(*wide), target, reduction="mean"), given, wide, DB["fp8 linear"])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_do_not_count(device: str) -> None:
    """As torch: NaN for the mean of nothing, whose gradients are zeros; no rows at all."""
    hidden, weight, _, target = operands(device, torch.float32)
    for goal, rows in ((torch.full_like(target, IGNORED), hidden), (target[:, :0], hidden[:, :0])):
        for reduction in ("mean", "sum", "none"):
            loss = te.linear_cross_entropy(rows, weight, goal, reduction=reduction, chunk=16)
            assert loss.isnan().all() if reduction == "mean" else not loss.any()
            grads = torch.autograd.grad(loss.sum(), (rows, weight))
            assert [g.shape for g in grads] == [rows.shape, weight.shape] and not any(g.any() for g in grads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_main_grad(device: str, reduction: str) -> None:
    """The gradient is added there in float32, and `.grad` stays empty; with overwrite_main_grad it replaces."""
    hidden, weight, _, target = operands(device, torch.bfloat16)
    loss = te.linear_cross_entropy(hidden, weight, target, reduction=reduction, chunk=16)
    loss.sum().backward()
    expected, weight.grad = weight.grad, None
    weight.main_grad = torch.ones(weight.shape, device=device)  # type: ignore[attr-defined]
    for overwrite in (False, True):
        weight.overwrite_main_grad = overwrite  # type: ignore[attr-defined]
        te.linear_cross_entropy(hidden, weight, target, reduction=reduction, chunk=16).sum().backward()
        found = weight.main_grad - (0 if overwrite else 1)  # type: ignore[attr-defined]
        assert snr_db(found, expected) >= DB["bf16"] and weight.grad is None
    weight.main_grad = torch.zeros(3, device=device)  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match="main_grad"):
        te.linear_cross_entropy(hidden, weight, target).backward()


@pytest.mark.parametrize("device", DEVICES)
def test_under_torch_autocast(device: str) -> None:
    """The product runs in its dtype; the weight's gradient stays in float32."""
    hidden, weight, _, target = operands(device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = te.linear_cross_entropy(hidden.bfloat16(), weight, target)
    rounded = te.linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), target)
    assert torch.equal(loss, rounded)
    loss.backward()
    assert weight.grad is not None and weight.grad.dtype is torch.float32
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_backward_twice(device: str, reduction: str) -> None:
    hidden, weight, bias, target = operands(device, torch.float32)
    loss = te.linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, chunk=16).sum()
    first = torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(2 * loss, (hidden, weight, bias)), strict=True):
        assert torch.equal(2 * a, b)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_operands_cost_nothing(frozen: int) -> None:
    *given, target = operands("cpu", torch.float32)
    given[frozen].requires_grad_(False)
    te.linear_cross_entropy(*given[:2], target, given[2], chunk=16).backward()
    assert [t.grad is None for t in given] == [i == frozen for i in range(3)]


# ------------------------------------------------------------------------------------------------------- errors


@requires_cuda
def test_a_target_out_of_range_on_a_gpu() -> None:
    """NaN, without a wait."""
    hidden, weight, _, target = operands("cuda", torch.float32)
    target[1, 3] = 67
    assert te.linear_cross_entropy(hidden, weight, target).isnan()
    losses = te.linear_cross_entropy(hidden, weight, target, reduction="none")
    assert losses.isnan().sum() == 1 and losses[1, 3].isnan()


def test_targets_of_other_shapes() -> None:
    """With as many entries in the same order."""
    target = torch.zeros(3, 2, dtype=torch.int64)
    flat, same = (te.parallel_cross_entropy(torch.ones(2, 3, 4), t) for t in (target.flatten(), target.view(2, 3, 1)))
    assert torch.equal(flat, same)
