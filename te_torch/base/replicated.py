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
    keeping = [m for m in module.modules() if "fp8_state" in m._modules]
    for m in keeping:
        m.__dict__["_replicated"] = True
    if keeping:
        wrapper.register_forward_pre_hook(_leave)
        wrapper.__dict__["join_hook"] = Joining(wrapper)


register_module_module_registration_hook(_taken)


class Ignored(set[str]):
    """Names that DDP ignores, and those of all scales and maxima, wherever their modules come to stand."""

    def __contains__(self, name: object) -> bool:
        parts = str(name).split(".")[-2:]
        return super().__contains__(name) or (parts[0] == "fp8_state" and parts[-1] in BUFFERS)


def _leave(wrapper: Any, args: Any) -> None:
    """Before DDP's first forward: from now on it knows nothing of these buffers."""
    if type(wrapper.parameters_to_ignore) is not Ignored:
        ignored = Ignored()  # of what it had: by `update`, which a compiler follows (2.11)
        ignored.update(wrapper.parameters_to_ignore)
        wrapper.parameters_to_ignore = ignored
        wrapper.modules_buffers = [t for name, t in wrapper.module.named_buffers() if name not in ignored]


class Joining:
    """DDP's `join_hook`: a rank without a single batch takes part in what the others' forwards send."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)  # which goes with its last user

    def __call__(self, **options: Any) -> Any:
        """What torch asks a model for as it joins."""
        wrapper: Any = self._wrapper()
        _leave(wrapper, ())
        return type(wrapper).join_hook(wrapper, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return Joining, (self._wrapper(),)


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
