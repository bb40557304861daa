"""The documented attributes of modules, worked out from what ours keeps: what the last forward ran in, and with what.

They are for reading. What they hold of scaling state is the state itself, so a change of its tensors in place counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_core.layers.linear import LinearSpec
from te_core.precision import Operand, Precision
from te_core.quantize.state import BACKWARD_SLOTS, FORWARD_SLOTS
from te_core.recipe import DelayedScaling, Recipe
from te_core.recipe_fields import documented
from te_torch.autocast import active
from te_torch.base.checkpoint_state import device_of
from te_torch.base.quantized_init import point
from te_torch.compiled_runs import last_compiled
from te_torch.precisions import number_of_precision, precision_of, recipe_of
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import TO_TORCH
from te_torch.state import make_state
from te_torch.tensors.wrap import quantizer_of


class ScalingMeta(NamedTuple):
    """Scales and history of one direction, as documented."""

    scale: torch.Tensor
    scale_inv: torch.Tensor
    amax_history: torch.Tensor


class _Meta(dict[str, Any]):
    """`fp8_meta`, made for each reader. What a program sets stays as long as the module knows nothing of that name.

    Megatron-core sets the recipe of an entry that it has read (`write_extra_state`), asks for its class and pickles it.
    """

    module: Any = None  # once it is made

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "recipe" and isinstance(value, dict):
            value = DelayedScaling(**value)
        elif isinstance(value, Recipe):
            value = documented(value)
        super().__setitem__(name, value)
        if self.module is not None:
            self.module.__dict__.setdefault("_given_meta", {})[name] = value


class Documented(torch.nn.Module):
    """What every module that runs GEMMs or attention in low precision says of itself."""

    tp_group: Any = None
    tp_size: int = 1
    sequence_parallel: bool = False  # effective with several ranks only
    fsdp_wrapped: bool = False
    fsdp_group: Any = None
    # What the modules themselves keep.
    gemms: int
    fp8_state: Any
    _last: Any
    _weight_cache: dict[str, Any]
    _weight_names: Any

    def _scaling(self) -> Any:
        """The scaling state, if it is in use."""
        return None if self.fp8_state is None or not self.fp8_state.in_use else self.fp8_state

    def _ran(self) -> list[LinearSpec]:
        """What the GEMMs of the last forward were asked for."""
        last = self._last_call()
        return [] if last is None else list(last.layer.linears(last.spec))

    def _last_call(self) -> Any:
        """Of the last forward, eager or compiled."""
        names = self._weight_names()
        first = self._parameters.get(names[0]) if names else None
        known = first is not None and not first.is_meta and not isinstance(first, QuantizedTorch)
        return (last_compiled(first) if known else None) or self._last  # type: ignore[arg-type]

    def _ran_in(self) -> list[Precision]:
        return [spec.precision for spec in self._ran() if spec.precision is not None]

    @property
    def fp8(self) -> bool:
        """Whether the last forward quantized."""
        attended = getattr(self, "_last_plan", None)
        if attended is not None:
            return bool(attended.key.fp8)
        return any(_quantizes(p.input) or _quantizes(p.weight) or _quantizes(p.grad) for p in self._ran_in())

    @property
    def fp8_calibration(self) -> bool:
        """Whether the last forward only noted maxima."""
        return any(p.input is not None and p.input.scaling == "calibrate" for p in self._ran_in())

    @property
    def fp8_initialized(self) -> bool:
        """Whether a forward ran in low precision, or scaling state was loaded."""
        return self._scaling() is not None or bool(self._ran_in())

    @property
    def activation_dtype(self) -> torch.dtype | None:
        """What the last forward computed in; None before the first."""
        attended = getattr(self, "_last_plan", None)
        dtypes = (spec.dtype for spec in self._ran()) if attended is None else iter((attended.request.dtype,))
        return next((TO_TORCH[dtype] for dtype in dtypes), None)

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded."""
        return any(hasattr(p, "device_mesh") for p in self._parameters.values())

    @property
    def _fp8_workspaces(self) -> dict[str, Any]:
        return self._weight_cache

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """The recipe of the last forward and the scaling state, under the documented keys that ours has."""
        state, ran = self._scaling(), self._ran_in()
        meta = _Meta(self.__dict__.get("_given_meta", {}))
        meta |= {"fp8_checkpoint": state is not None, "fp8_group": None, "num_gemms": self.gemms}
        if ran:
            meta["recipe"] = recipe_of(number_of_precision(ran[0], None))
            for key, rule in (("fp8_max_fwd", ran[0].input), ("fp8_max_bwd", ran[0].grad)):
                if _quantizes(rule):
                    meta[key] = rule.dtype.max  # type: ignore[union-attr]
        if state is not None:
            meta["fp8_group"] = state.group
            if not ran and state.recipe is not None:
                meta["recipe"] = state.recipe
            for way in ("fwd", "bwd"):
                scale = getattr(state, f"scale_{way}")
                meta[f"scaling_{way}"] = ScalingMeta(scale, 1 / scale, getattr(state, f"amax_history_{way}"))
        meta.module = self
        return meta

    @property
    def quantizers(self) -> dict[str, list[Any]]:
        """A quantizer for each slot that the last forward had a rule for, else None: three a GEMM forward, two back."""
        state = self._scaling()
        found: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        for gemm, spec in enumerate(self._ran()):
            p = spec.precision
            forward = (None,) * FORWARD_SLOTS if p is None else (p.input, p.weight, p.output)
            backward = (None,) * BACKWARD_SLOTS if p is None else (p.grad, p.grad_input)
            for key, way, rules in (("scaling_fwd", "fwd", forward), ("scaling_bwd", "bwd", backward)):
                for slot, rule in enumerate(rules):
                    found[key].append(self._quantizer(rule, state, way, gemm * len(rules) + slot))
        return found

    def _quantizer(self, rule: Operand | None, state: Any, way: str, index: int) -> Any:
        if rule is None or rule.scaling == "calibrate":
            return None
        if rule.custom is not None:
            return rule.custom.quantizer
        quantizer = quantizer_of(rule, device_of(self))
        if rule.scaling == "delayed" and state is not None:
            point(quantizer, state, way, index)
        return quantizer

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Make the state that the active region's recipe keeps in this module; its next forward would."""
        region = active.region
        number = 0 if region is None else region.precision
        rule = precision_of(number)
        if rule is not None and rule.history is not None:
            make_state(self, device_of(self), rule, recipe_of(number))

    def fast_setattr(self, name: str, value: Any) -> None:
        """Set an attribute that is no parameter, buffer or module, past torch's look at what it is."""
        self.__dict__[name] = value


def _quantizes(rule: Operand | None) -> bool:
    return rule is not None and rule.scaling not in ("calibrate", "none")
