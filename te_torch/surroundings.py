"""What may lie around an eager call that only torch's own operators pass through: layers read and write memory."""

from __future__ import annotations

from typing import Any

import torch

from te_core.errors import UnsupportedError

#: How many modes of torch's dispatcher are on: asked in every call.
dispatch_modes = torch._C._len_torch_dispatch_stack
functorch_active = torch._C._are_functorch_transforms_active
_KEYS: Any = torch._C._TorchDispatchModeKey
_MODES = {
    _KEYS.FAKE: ("a FakeTensorMode", "tensors with memory, or modules and inputs on the meta device for shapes alone"),
    _KEYS.PROXY: ("make_fx", "torch.compile or torch.export"),
}


def check_surroundings() -> None:
    """Refuse a transform or a mode in which a layer would compute something else than its caller asked for."""
    if functorch_active():
        raise UnsupportedError(
            "te_torch",
            "a layer inside a transform of torch.func (grad, jvp, vmap, functionalize)",
            "torch.autograd, and torch.func.functional_call without a transform",
            "use torch.autograd.grad, or torch.nn layers there",
        )
    for key, (mode, instead) in _MODES.items():
        if torch._C._get_dispatch_mode(key) is not None:
            raise UnsupportedError("te_torch", f"a layer under {mode}", instead, f"call the layer outside of {mode}")
