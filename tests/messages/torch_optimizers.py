"""Rows of messages of optimizers; tests/messages/test_messages.py says how to add one."""

from __future__ import annotations

import torch

from te_torch import optimizers as opt
from tests.messages.rows import Rows

ROWS = Rows()
F16, BF16 = torch.float16, torch.bfloat16


def parameter(like: torch.Tensor, gradient: bool = True) -> torch.nn.Parameter:
    """A parameter that has its gradient."""
    made = torch.nn.Parameter(like)
    made.grad = torch.ones_like(like) if gradient else None
    return made


P = parameter(torch.ones(4, 4))
for options in (
    {"amsgrad": True},
    {"exp_avg_dtype": torch.float64},
    {"master_weight_dtype": BF16},
    {"master_weight_dtype": F16, "store_param_remainders": True},
    {"betas": (1.0, 0.9)},
    {"betas": 0.9},
    {"lr": torch.tensor(0.1)},
    {"lr": torch.ones(2), "capturable": True},
    {"set_grad_none": True},
):
    ROWS.add(opt.FusedAdam, [P], **options)
ROWS.add(opt.FusedAdam, [torch.nn.Parameter(torch.ones(2, dtype=torch.float64))])
ROWS.each(opt.FusedSGD, [P], 0.1, nesterov=(True, 2), momentum=(-0.1,))
for name in ("adam_fp8", "adam_fp9"):
    ROWS[f"multi_tensor_{name}"] = lambda name=name: getattr(opt, f"multi_tensor_{name}")
ROWS["zero_grad(False) with set_grad_none"] = lambda: opt.FusedAdam([P], set_grad_none=True).zero_grad(False)

SPARSE = torch.nn.Parameter(torch.ones(4, 4))
SPARSE.grad = torch.ones(4, 4).to_sparse()
ROWS["FusedAdam.step of a sparse gradient"] = lambda: opt.FusedAdam([SPARSE]).step()
ROWS["clip_by_norm without gradients"] = lambda: opt.clip_by_norm([parameter(torch.ones(2), False)], 1.0)
for name, given in {"max_norm": ("1", 0.0), "group": (3,)}.items():
    for value in given:
        ROWS.add(opt.clip_by_norm, [P], **{"max_norm": 1.0, name: value})
ROWS.add(opt.clip_by_norm, 3, 1.0)

ADAM, DECOUPLED = opt.FusedAdam([P]), opt.FusedAdam([P], use_decoupled_grad=True)
P.decoupled_grad = [1.0]  # type: ignore[attr-defined]
ROWS["step(grad_scale=0.5)"] = lambda: ADAM.step(grad_scale=0.5)  # type: ignore[arg-type]
ROWS["step(grad_scale=torch.ones(2))"] = lambda: ADAM.step(grad_scale=torch.ones(2))
ROWS["step(grad_scaler=8.0)"] = lambda: ADAM.step(grad_scaler=8.0)
ROWS["step(grad_scaler=GradScaler that has scaled nothing)"] = lambda: ADAM.step(
    grad_scaler=torch.amp.GradScaler("cpu")
)
ROWS["step with a decoupled_grad that is a list"] = lambda: DECOUPLED.step()


def decoupled_and_scaled() -> None:
    """Of gradients that stand elsewhere."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    DECOUPLED.step(grad_scaler=scaler)


ROWS["step(grad_scaler=...) with use_decoupled_grad"] = decoupled_and_scaled
LISTS = [[P.detach()]] * 4
ROWS["multi_tensor_adam of a NaN"] = lambda: opt.multi_tensor_adam(
    0, torch.zeros(1), LISTS, torch.nan, 0.9, 0.99, 1e-8, 1, 1, 1, 0.1
)
ROWS["multi_tensor_adam of a step that is a text"] = lambda: opt.multi_tensor_adam(
    0, torch.zeros(1), LISTS, 0.1, 0.9, 0.99, 1e-8, "1", 1, 1, 0.1
)
