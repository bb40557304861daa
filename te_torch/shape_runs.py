"""What torch runs for its shapes alone: a stage of a pipeline, on memory that nobody has filled. It leaves no trace.

Before its first step a schedule of torch.distributed.pipelining runs each stage to learn what it returns, inside the
region that the user has put around the step: torch 2.13 forward and backward, on whatever lies in the memory, older
ones forward on zeros. The maxima of such a run would enter the histories of delayed scaling, and its weight gradients a
`main_grad`, which backward writes whether torch asks for them or not. So it runs in high precision and without these.

Torch has no hook for it. The stage's methods that do it are wrapped, once, by the first region that begins in a program
which has imported the pipelines; other programs pay a look into a dict for each region.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from te_torch.runtime import warn

STAGES = "torch.distributed.pipelining.stage"  # the module with the class of stages
#: Its methods that run the stage for its shapes: of torch 2.13, and of older ones.
_METHODS = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")

watching = False  # whether they are wrapped

#: Where nothing runs in low precision, whatever regions are entered there.
Suspended = Callable[[], AbstractContextManager[None]]


def watch(suspended: Suspended) -> None:
    """From now on stages that run for their shapes leave no trace."""
    global watching
    stage = getattr(sys.modules[STAGES], "PipelineStage", None)
    if stage is None:  # another thread is importing it
        return
    watching = True
    found = [name for name in _METHODS if name in vars(stage)]
    for name in found:
        setattr(stage, name, _without_trace(vars(stage)[name], suspended))
    if not found:
        warn(
            "te_torch does not know how this torch learns the shapes of a pipeline's stages: give each PipelineStage "
            "input_args and output_args, or scales of delayed scaling may begin with what such a run has seen"
        )


def _without_trace(method: Callable[..., Any], suspended: Suspended) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(stage: Any, *args: Any, **options: Any) -> Any:
        with suspended(), _plain_gradients(stage.submod), _quietly():
            return method(stage, *args, **options)

    return run


@contextmanager
def _plain_gradients(stage: Any) -> Iterator[None]:
    """Weight gradients are returned, for torch to drop: none is added to a `main_grad` or put off."""
    # Past __setattr__, which lets go of all calls that were made before.
    changed = [vars(module) for module in stage.modules() if getattr(module, "_special", False)]
    before = [(own["fuse_wgrad_accumulation"], own["delay_wgrad_compute"], own["_special"]) for own in changed]
    for own in changed:
        own.update(fuse_wgrad_accumulation=False, delay_wgrad_compute=False, _special=False)
    try:
        yield
    finally:
        for own, (fuse, delay, special) in zip(changed, before, strict=True):
            own.update(fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay, _special=special)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without a word on quantized weights outside of a region: the user has entered one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is held quantized and used outside autocast")
        yield
