"""What `DistributedDataParallel` must leave alone of the modules that it replicates.

Before each forward it sends rank 0's buffers to all ranks. Scales and maxima are buffers, for they move and are saved
with their module, but they are each rank's own: a rank would lose the maxima that no update has read yet (those of the
microbatches before in a region, of weights that its optimizer's shard has changed), and all that it has where nothing
is reduced. What DDP sends as it is constructed it still sends: so ranks begin alike.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from te_torch.module_names import warn_once
from te_torch.state import BUFFERS


def _taken(wrapper: torch.nn.Module, name: str, module: Any) -> None:
    """Called by torch for each module that another one is given; of interest is a model that DDP takes."""
    if name != "module" or not isinstance(wrapper, DistributedDataParallel):
        return
    keeping = [(path, m) for path, m in module.named_modules() if "fp8_state" in m._modules]
    for _, m in keeping:
        m.__dict__["_replicated"] = True
    # Also of states that are not there yet; a model may be one layer, whose path is empty.
    names = [f"{path}.fp8_state.{buffer}".lstrip(".") for path, _ in keeping for buffer in BUFFERS]
    if names:
        wrapper.register_forward_pre_hook(partial(_leave, names))


register_module_module_registration_hook(_taken)


def _leave(names: list[str], wrapper: Any, args: Any) -> None:
    """Before DDP's forward: from now on it knows nothing of these buffers."""
    ignored = wrapper.parameters_to_ignore
    if names[0] not in ignored:
        ignored.update(names)
        wrapper.modules_buffers = [t for name, t in wrapper.module.named_buffers() if name not in ignored]


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
