"""What FusedAdam, FusedSGD and the functions beside them refuse: before anything is changed, and with what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_torch import optimizers as opt
from tests.torch.test_optimizers import BF16, F16, F32, give, parameters


def test_mistakes() -> None:
    params = parameters(F32, "cpu")
    for options, kind, match in (
        ({"amsgrad": True}, RuntimeError, "amsgrad"),
        ({"exp_avg_dtype": torch.float64}, RuntimeError, "exp_avg_dtype"),
        ({"master_weight_dtype": BF16}, RuntimeError, "master_weight_dtype"),
        ({"master_weight_dtype": F16, "store_param_remainders": True}, RuntimeError, "a half"),
        ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\]=1.0"),
        ({"betas": 0.9}, ValueError, "betas"),
        ({"lr": torch.tensor(0.1)}, ValueError, "capturable"),
        ({"lr": torch.ones(2), "capturable": True}, ValueError, "one element"),
    ):
        with pytest.raises(kind, match=match):
            opt.FusedAdam(params, **options)
    for options in ({"lr": 0.1, "nesterov": True}, {"lr": 0.1, "momentum": -0.1}, {"lr": 0.1, "nesterov": 2}):
        with pytest.raises(ValueError, match=r"FusedSGD: got"):
            opt.FusedSGD(params, **options)
    with pytest.raises(UnsupportedError, match="float64"):
        opt.FusedAdam([torch.nn.Parameter(torch.ones(2, dtype=torch.float64))])
    with pytest.warns(DeprecationWarning, match="set_grad_none"):
        mine = opt.FusedAdam(params, set_grad_none=True)
    with pytest.raises(ValueError, match="set_to_none=False"):
        mine.zero_grad(False)
    p = torch.nn.Parameter(torch.ones(4, 4))
    p.grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        opt.FusedAdam([p]).step()
    with pytest.raises(ArgumentError, match="without gradients"):
        opt.clip_by_norm(parameters(F32, "cpu"), 1.0)
    for options, match in (
        ({"max_norm": "1"}, "max_norm='1'"),
        ({"max_norm": 0.0}, "max_norm"),
        ({"group": 3}, "group"),
    ):
        with pytest.raises(ArgumentError, match=match):
            opt.clip_by_norm(params, **{"max_norm": 1.0, **options})
    with pytest.raises(ArgumentError, match="of type int"):
        opt.clip_by_norm(3, 1.0)
    with pytest.raises(AttributeError, match="FusedAdam"):
        opt.multi_tensor_adam_fp8  # noqa: B018


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps", "momentum"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "1e-3", None, True])
def test_numbers(name: str, value: Any) -> None:
    """Refused where they come in: by the optimizer, in a group, in a state dict, and by the step if changed later."""
    (p, *_) = parameters(F32, "cpu")
    make: Any = opt.FusedSGD if name == "momentum" else opt.FusedAdam
    with pytest.raises(ArgumentError, match=name):
        make([p], **{"lr": 0.1, name: value})
    mine = make([p], lr=0.1)
    with pytest.raises(ArgumentError, match=name):
        mine.add_param_group({"params": parameters(F32, "cpu"), name: value})
    assert len(mine.param_groups) == 1
    saved = mine.state_dict()
    saved["param_groups"][0][name] = value
    with pytest.raises(ArgumentError, match=name):
        mine.load_state_dict(saved)
    mine.param_groups[0][name] = value
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    with pytest.raises(ArgumentError, match=name):
        mine.step()
    assert torch.equal(p, before)


def test_mistakes_in_a_step() -> None:
    params = parameters(F32, "cpu")
    give(params, 0)
    mine, decoupled = opt.FusedAdam(params), opt.FusedAdam(params, use_decoupled_grad=True)
    scaler = torch.amp.GradScaler("cpu")
    params[0].decoupled_grad = [1.0]  # type: ignore[attr-defined]
    wrong: list[tuple[str, Any]] = [
        ("grad_scale=0.5", lambda: mine.step(grad_scale=0.5)),
        ("one element", lambda: mine.step(grad_scale=torch.ones(2))),
        ("grad_scaler=8.0", lambda: mine.step(grad_scaler=8.0)),
        (r"scaler.scale\(loss\)", lambda: mine.step(grad_scaler=scaler)),
        ("decoupled_grad", lambda: decoupled.step()),
    ]
    for said, function in wrong:
        with pytest.raises(ArgumentError, match=said):
            function()
    scaler.scale(torch.ones(()))
    with pytest.raises(UnsupportedError, match="use_decoupled_grad"):
        decoupled.step(grad_scaler=scaler)
    off = torch.amp.GradScaler("cpu", enabled=False)
    mine.step(grad_scaler=off)
    assert mine.param_groups[0]["step"] == 1
    with pytest.raises(ArgumentError, match="lr=nan"):
        opt.multi_tensor_adam(0, torch.zeros(1), [params] * 4, torch.nan, 0.9, 0.99, 1e-8, 1, 1, 1, 0.1)
    with pytest.raises(ArgumentError, match="step='1'"):
        opt.multi_tensor_adam(0, torch.zeros(1), [params] * 4, 0.1, 0.9, 0.99, 1e-8, "1", 1, 1, 0.1)


def test_a_state_of_another_model() -> None:
    """Refused with what differs, before anything is changed."""
    params = parameters(F32, "cpu")
    mine = opt.FusedAdam(params)
    give(params, 0)
    mine.step()
    saved = mine.state_dict()
    before = copy.deepcopy(saved)
    torch_state = torch.optim.AdamW(parameters(F32, "cpu")).state_dict()
    short = {**saved, "param_groups": [{**saved["param_groups"][0], "params": [0, 1]}]}
    turned = {**saved, "state": {**saved["state"], 0: {**saved["state"][0], "exp_avg": torch.zeros(24, 16)}}}
    foreign = {**saved, "state": {0: {"step": torch.tensor(1.0)}}}
    halves = {**saved, "state": {0: {"master_param": torch.zeros(16, 24, dtype=torch.int16)}}}
    for state, match in (
        (short, r"groups of \[2\]"),
        (turned, r"exp_avg of parameter 0.*\(24, 16\)"),
        (foreign, "from_torch_adamw"),
        (halves, "store_param_remainders"),
        ({}, "'param_groups'"),
        ([], "a list"),
    ):
        with pytest.raises(ArgumentError, match=match):
            mine.load_state_dict(state)
    after = mine.state_dict()
    assert after["param_groups"] == before["param_groups"] and torch_state["state"] == {}
    assert all(torch.equal(after["state"][i][n], t) for i, s in before["state"].items() for n, t in s.items())
