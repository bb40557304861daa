"""Which slot of the scaling state each operand uses, and which margin each phase of a norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import te_torch as te
from te_core.layers import linear
from te_core.ops import raw as ops
from te_core.recipe import DelayedScaling
from te_torch.attention.fused import ATTENTION
from te_torch.modules.layernorm_linear import NORM_LINEAR
from te_torch.modules.layernorm_mlp import MLP
from te_torch.modules.linear import LINEAR
from te_torch.modules.norm import NORM
from tests.backends import on_devices
from tests.world import GEMM_MODULES, MODULES, WIDTH, gradient_for, make, step, values

SEVERAL = ["LayerNormLinear", "LayerNormMLP", "LayerNorm"]


def operands(kind: str, module: Any, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """By torch in full precision: what each GEMM reads in fprop (input, weight), and its output gradient."""
    p = dict(module.named_parameters())
    n = x if kind == "Linear" else F.layer_norm(x, x.shape[-1:], p["layer_norm_weight"], p["layer_norm_bias"])
    if kind != "LayerNormMLP":
        y = F.linear(n, p["weight"], p["bias"])
        return [n, p["weight"]], [gradient_for(y)]
    h = F.linear(n, p["fc1_weight"], p["fc1_bias"])
    a = F.gelu(h, approximate="tanh")
    y = F.linear(a, p["fc2_weight"], p["fc2_bias"])
    (dh,) = torch.autograd.grad(y, h, gradient_for(y))
    return [n, p["fc1_weight"], a, p["fc2_weight"]], [dh, gradient_for(y)]


@on_devices
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_every_operand_has_a_slot_of_its_own(kind: str, device: str) -> None:
    """The maxima of a step stand where the documented layout has them; the slots of outputs stay empty."""
    module = make(kind, device)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.mul_(3 if "fc1" in name else 50 if "fc2" in name else 1)  # maxima far apart
    x = values(32, WIDTH, device=device, seed=1)
    step(module, x, DelayedScaling(amax_history_len=3))
    read, gradients = operands(kind, module, x)
    wanted = {"fwd": [], "bwd": []}
    for i, gradient in enumerate(gradients):
        wanted["fwd"] += [t.detach().abs().max().item() for t in read[2 * i : 2 * i + 2]] + [0.0]
        wanted["bwd"] += [gradient.abs().max().item(), 0.0]
    for direction, expected in wanted.items():
        found = getattr(module.fp8_state, f"amax_history_{direction}")[-1].tolist()
        # What comes out of an FP8 GEMM is off by some percent; any two operands differ by much more.
        assert found == pytest.approx(expected, rel=0.15), direction
        nonzero = sorted(e for e in expected if e)
        assert all(b > 1.5 * a for a, b in zip(nonzero, nonzero[1:], strict=False)), "a mix-up would not show"


@pytest.mark.parametrize("kind", SEVERAL)
def test_margins_by_phase(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented variables reach the norm kernels: forward, backward, and forward in eval mode."""
    seen: list[tuple[str, int]] = []

    def spy(name: str) -> Any:
        real = getattr(ops, name)

        def called(*args: Any, sm_margin: int = 0, **kw: Any) -> Any:
            seen.append((name, sm_margin))
            return real(*args, sm_margin=sm_margin, **kw)

        return called

    for name in ("norm_forward", "norm_backward"):
        monkeypatch.setattr(ops, name, spy(name))
    for phase, margin in (("FWD", 3), ("BWD", 5), ("INF", 7)):
        monkeypatch.setenv(f"NVTE_{phase}_LAYERNORM_SM_MARGIN", str(margin))
    module = MODULES[kind](device="cpu")
    x = values(4, WIDTH, seed=1)
    step(module, x, "plain")
    module.eval()
    with torch.no_grad():
        module(x)
    assert seen == [("norm_forward", 3), ("norm_backward", 5), ("norm_forward", 7)]


@on_devices
def test_a_custom_rule_runs_once_for_a_module_that_ran_twice(device: str) -> None:
    calls: list[int] = []

    def amax_of(history: torch.Tensor) -> torch.Tensor:
        calls.append(history.shape[1])
        return history.amax(dim=0)

    module, x = make("Linear", device), values(16, WIDTH, device=device, seed=1)
    with te.autocast(recipe=DelayedScaling(amax_history_len=2, amax_compute_algo=amax_of)):
        y = module(x) + module(2 * x)
    assert calls == [3]
    y.backward(gradient_for(y))
    assert calls == [3, 2]
    assert module.fp8_state.amax_history_fwd[-1, 0] == (2 * x).abs().max()


def test_modules_call_layers_without_the_look_at_what_fails() -> None:
    """It costs 0.2 us a call, and a module has checked what it passes."""
    for layer in (LINEAR, NORM_LINEAR, MLP, NORM, ATTENTION):
        assert not hasattr(layer.forward, "__wrapped__") and not hasattr(layer.backward, "__wrapped__")
    assert hasattr(linear.forward, "__wrapped__")
