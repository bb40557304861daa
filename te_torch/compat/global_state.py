"""`FP8GlobalStateManager`: what programs of the peer ask about the regions that they are in.

It keeps nothing: each answer is read from the region of the calling thread (te_torch/autocast.py).
"""

from __future__ import annotations

from typing import Any

from te_core.errors import ArgumentError, UnsupportedError
from te_core.recipe import Recipe
from te_torch import not_built
from te_torch.autocast import Region, active, prepare_default
from te_torch.availability import (
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
)
from te_torch.base import quantized_init
from te_torch.precisions import precision_of
from te_torch.training.graphs.make import is_graph_capturing

_PLACE = "pytorch.quantization"
_no_field, _no_method = (
    not_built.getter(name, f"{_PLACE}.{name}") for name in ("FP8GlobalState", "FP8GlobalStateManager")
)


class FP8GlobalState:
    """The documented fields, read-only: the calling thread's region, and what modules made now would be."""

    @property
    def fp8_enabled(self) -> bool:
        """Whether a module that ran now would multiply in low precision."""
        region = active.region
        if region is None or not region.precision:
            return False
        rule = precision_of(region.precision) if region.calibrating else None
        return rule is None or rule.input is None or rule.input.scaling != "calibrate"

    @property
    def fp8_calibration(self) -> bool:
        """Whether the region collects maxima."""
        return active.region is not None and active.region.calibrating

    @property
    def fp8_recipe(self) -> Recipe:
        """The region's recipe; outside of one, that of a region that names none."""
        return prepare_default() if active.region is None else active.region.recipe

    @property
    def fp8_distributed_group(self) -> Any:
        """Over which processes the region reduces maxima."""
        return None if active.region is None else active.region.group

    @property
    def fp8_parameters(self) -> bool:
        """Whether a module made now would hold its weights quantized."""
        return quantized_init.initialising()

    @property
    def high_precision_init_val(self) -> bool:
        """Whether such a module would keep the initial values."""
        return quantized_init.initialising() and quantized_init.initialisation()[1]

    @property
    def is_first_fp8_module(self) -> bool:
        """Whether no module has run with delayed scaling in the outermost region. To ask changes nothing."""
        ran = None if active.region is None else active.region.ran
        return ran is not None and not ran.states and not ran.traced

    @property
    def fp8_graph_capturing(self) -> bool:
        """Whether make_graphed_callables captures now."""
        return is_graph_capturing()

    @property
    def autocast_depth(self) -> int:
        """How many regions the thread is in."""
        depth, region = 0, active.region
        while region is not None:
            depth, region = depth + 1, region.outer
        return depth

    def __setattr__(self, name: str, value: Any) -> None:
        raise UnsupportedError(
            "FP8GlobalStateManager.quantization_state",
            f"{name} = {value!r}",
            "reading it: it shows the region that the thread is in",
            "enter te.autocast, or te.quantized_model_init, with what you want to be in force",
        )

    def __getattr__(self, name: str) -> Any:
        return _no_field(name)


class _Documented(type):
    """Says of documented methods that are not built what to use in their place."""

    def __getattr__(cls, name: str) -> Any:
        return _no_method(name)


_state = FP8GlobalState()


class FP8GlobalStateManager(metaclass=_Documented):
    """Answers about the region that the calling thread is in: the fields of `FP8GlobalState` under other names."""

    quantization_state = _state

    is_fp8_enabled = staticmethod(lambda: _state.fp8_enabled)
    is_fp8_calibration = staticmethod(lambda: _state.fp8_calibration)
    get_fp8_recipe = staticmethod(lambda: _state.fp8_recipe)
    get_fp8_group = staticmethod(lambda: _state.fp8_distributed_group)
    with_fp8_parameters = staticmethod(lambda: _state.fp8_parameters)
    with_high_precision_init_val = staticmethod(lambda: _state.high_precision_init_val)
    is_first_fp8_module = staticmethod(lambda: _state.is_first_fp8_module)
    fp8_graph_capturing = staticmethod(lambda: _state.fp8_graph_capturing)

    # Whether the GPU multiplies so, and why not.
    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = staticmethod(check_mxfp8_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_block_scaling_support)
    is_nvfp4_available = staticmethod(check_nvfp4_support)

    @staticmethod
    def reset() -> None:
        """Take the thread out of every region that it is in, those of `quantized_model_init` too."""
        active.region = None
        quantized_init.leave_all()

    @staticmethod
    def get_autocast_state() -> Region | None:
        """The region that the thread is in, for `set_autocast_state`."""
        return active.region

    @staticmethod
    def set_autocast_state(fp8_state: Region | None) -> None:
        """Put the thread back into a region that `get_autocast_state` gave."""
        if not isinstance(fp8_state, (Region, type(None))):
            raise ArgumentError(
                "FP8GlobalStateManager.set_autocast_state",
                f"{type(fp8_state).__name__!r}",
                "what get_autocast_state() has returned",
                "pass that",
            )
        active.region = fp8_state
