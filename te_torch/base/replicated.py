"""What `DistributedDataParallel` must leave alone of the modules that it replicates.

Before each forward it sends rank 0's buffers to all ranks. Scales and maxima are buffers, for they move and are saved
with their module, but they are each rank's own: a rank would lose the maxima that no update has read yet (those of the
microbatches before in a region, of weights that its optimizer's shard has changed), and all that it has where nothing
is reduced. What DDP sends as it is constructed it still sends: so ranks begin alike.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from te_torch.module_names import warn_once
from te_torch.state import BUFFERS


def _taken(wrapper: torch.nn.Module, name: str, module: Any) -> None:
    """Called by torch for each module that another one is given; of interest is a model that DDP takes."""
    if name != "module" or module is None or not isinstance(wrapper, DistributedDataParallel):
        return
    keeping = {name: m for name, m in module.named_modules() if "fp8_state" in m._modules}
    for m in keeping.values():
        m.__dict__["_replicated"] = True
    if keeping:
        wrapper.__dict__["_assign_modules_buffers"] = Assigning(wrapper)
    # Warn, once: DDP reduces `grad`, and waits for that of every parameter that it was not told to ignore.
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    for prefix, m in keeping.items():
        weights = {f"{prefix}.{name}".lstrip("."): getattr(m, name) for name in m._weight_names()}
        if m.fuse_wgrad_accumulation and any(p.requires_grad and n not in ignored for n, p in weights.items()):
            warn_once(
                m,
                "fuse_wgrad_accumulation writes weight gradients into main_grad, which DistributedDataParallel does "
                "not reduce: each rank keeps its own, and DistributedDataParallel waits in vain for those that it "
                "expects. "
                "To do: leave fuse_wgrad_accumulation out, or reduce main_grad yourself and have these weights ignored "
                "(DistributedDataParallel._set_params_and_buffers_to_ignore_for_model, before it takes the model)",
            )
            return


register_module_module_registration_hook(_taken)


class Assigning:
    """DDP's `_assign_modules_buffers`, by which it looks anew at each sending for what it sends: without our states,
    wherever their modules have come to stand. (A hook of its forward would cut compilers' graphs, and a rank that
    joins without a batch would expect them.)
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)  # which goes with its last user

    def __call__(self) -> None:
        """Make its lists."""
        wrapper: Any = self._wrapper()
        type(wrapper)._assign_modules_buffers(wrapper)
        wrapper.named_module_buffers = {n: t for n, t in wrapper.named_module_buffers.items() if not is_state(n)}
        wrapper.modules_buffers = [*wrapper.named_module_buffers.values()]

    def __reduce__(self) -> tuple[Any, ...]:
        return Assigning, (self._wrapper(),)


def is_state(name: str) -> bool:
    """Whether a buffer of this name is a scale or a maximum of ours."""
    parts = name.split(".")[-2:]
    return parts[0] == "fp8_state" and parts[-1] in BUFFERS


def check_reduced(module: Any) -> None:
    """Warn, once: DDP has reduced gradients by the end of backward, and `backward_dw()` makes its own after that."""
    if not module._replicated or module._wgrad_hooks:
        return
    module.__dict__["_replicated"] = False
    warn_once(
        module,
        "the weight gradients that delay_wgrad_compute puts off are this rank's own, for DistributedDataParallel has "
        "reduced before backward_dw() computes them. To do: reduce them in a hook of "
        "register_wgrad_accumulation_and_reduce_hooks, or leave delay_wgrad_compute out",
    )
