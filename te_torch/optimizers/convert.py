"""State dicts of FusedAdam as those of torch.optim.AdamW, and back. Nothing is copied that need not be."""

from __future__ import annotations

from typing import Any

import torch

from te_core.errors import ArgumentError
from te_torch.optimizers.parts import local
from te_torch.optimizers.states import MASTER, MOMENTS

_TORCH = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


def to_torch_adamw(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict of FusedAdam as torch.optim.AdamW loads it: each parameter has its group's step.

    Masters stay in the state, where AdamW does not look at them. int16 remainders are left out: they are halves of
    floats, and torch would convert them.
    """
    groups, state = [], {}
    for group in state_dict["param_groups"]:
        step = float(group.get("step", 0))
        kept = {name: value for name, value in group.items() if name not in ("step", "bias_correction")}
        kept["lr"] = float(kept["lr"])
        groups.append({**_TORCH, **kept})
        for number in group["params"]:
            given = state_dict["state"].get(number)
            if given is None:
                continue
            whole = {n: t for n, t in given.items() if t is not None and local(t).dtype is not torch.int16}
            state[number] = {"step": torch.tensor(step), **whole}
    return {"state": state, "param_groups": groups}


def from_torch_adamw(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict of torch.optim.AdamW (or Adam) as FusedAdam loads it: a group has the step of its parameters."""
    groups, state = [], {}
    for number, group in enumerate(state_dict["param_groups"]):
        if group.get("amsgrad") or group.get("maximize"):
            got = f"group {number} with amsgrad={group.get('amsgrad')}, maximize={group.get('maximize')}"
            raise ArgumentError("from_torch_adamw", got, "neither of them", "go on with torch's optimizer")
        steps = set()
        for key in group["params"]:
            given = state_dict["state"].get(key)
            if given is None:
                continue
            steps.add(int(given["step"]))
            state[key] = {name: given[name] for name in (*MOMENTS, MASTER) if name in given}
        if len(steps) > 1:
            got = f"steps {sorted(steps)} in group {number}"
            raise ArgumentError(
                "from_torch_adamw", got, "one step in a group", "put these parameters into groups apart"
            )
        kept = {name: value for name, value in group.items() if name not in _TORCH}
        groups.append({**kept, "bias_correction": True, "step": steps.pop() if steps else 0})
    return {"state": state, "param_groups": groups}
