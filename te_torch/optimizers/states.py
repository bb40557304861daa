"""The state of FusedAdam: moments and masters in the formats that it was made with, and their scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops.optimizer import LIMITS
from te_torch.optimizers.parts import like, local
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import TO_CORE, is_dtensor

MOMENTS, MASTER = ("exp_avg", "exp_avg_sq"), "master_param"
NAMES = (*MOMENTS, MASTER)  # in the order of a parameter's scales
FP8 = torch.float8_e4m3fn


def seen_as(dtype: torch.dtype, other: torch.dtype, state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state, with what lies in one type seen as another type of its size."""
    return {n: like(t, local(t).view(other)) if local(t).dtype is dtype else t for n, t in state.items()}


@dataclass(frozen=True)
class Formats:
    """What states are held in."""

    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    master: torch.dtype
    remainders: bool

    def __post_init__(self) -> None:
        for name, dtype in (("exp_avg_dtype", self.exp_avg), ("exp_avg_sq_dtype", self.exp_avg_sq)):
            if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.uint8):
                allowed = "float32, bfloat16, float16 or uint8 (FP8 E4M3)"
                raise UnsupportedError("FusedAdam", f"{name}={dtype}", allowed, "choose one of these")
        if self.master not in (torch.float32, torch.float16):
            got = f"master_weight_dtype={self.master}"
            raise UnsupportedError("FusedAdam", got, "float32 or float16", "choose one of these")
        if self.remainders and self.master is not torch.float32:
            got = f"store_param_remainders with masters in {self.master}"
            raise UnsupportedError("FusedAdam", got, "float32 masters, of which they are a half", "leave it out")

    def of(self, name: str, p: torch.Tensor, remainders: bool) -> torch.dtype:
        """The type in which a state of this local parameter is stored."""
        if name == MASTER:
            halves = remainders and p.dtype is torch.bfloat16 and not isinstance(p, QuantizedTorch)
            return torch.int16 if halves else self.master
        dtype = self.exp_avg if name == MOMENTS[0] else self.exp_avg_sq
        return FP8 if dtype is torch.uint8 else dtype


class States:
    """The states of an optimizer's parameters: `of` (the optimizer's `state`) has what is stored, `scales` what it is
    multiplied by."""

    def __init__(self, of: Any, formats: Formats, masters: bool) -> None:
        self.of, self._formats, self._masters = of, formats, masters
        #: float32 [3] of a parameter of which anything is stored divided by a scale: in the order of NAMES.
        self.scales: dict[torch.Tensor, torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the optimizer's `state`, which it has itself."""
        return {**self.__dict__, "of": None}

    def made(self, p: Any) -> dict[str, Any]:
        """A parameter's, made where there is none."""
        state: dict[str, Any] = self.of[p]
        if not state:
            self.initialize(p)
        return state

    def initialize(self, p: Any, remainders: bool | None = None) -> None:
        """Moments of zeros, and the master that the parameter is the rounding of."""
        formats, state, mine = self._formats, self.of[p], local(p).detach()
        remainders = formats.remainders if remainders is None else remainders
        plain_float32 = mine.dtype is torch.float32 and not isinstance(mine, QuantizedTorch)
        for name in NAMES if self._masters and not plain_float32 else MOMENTS:
            dtype = formats.of(name, mine, remainders)
            state[name] = like(p, torch.zeros(mine.shape, dtype=dtype, device=mine.device))
            if TO_CORE[dtype] in LIMITS and p not in self.scales:
                self.scales[p] = torch.ones(3, dtype=torch.float32, device=mine.device)
            if name == MASTER and dtype is not torch.int16:
                self.write(p, name, like(p, mine.float()))

    def read(self, p: Any, name: str, stored: bool = False) -> Any:
        """The values of a state, in float32; remainders, and what shall be seen as it is stored, are the state."""
        state = self.of[p][name]
        part = local(state)
        if stored or part.dtype in (torch.int16, torch.float32):
            return state
        values = part.float()
        if TO_CORE[part.dtype] in LIMITS:
            values *= self.scales[p][NAMES.index(name)]
        return like(p, values)

    @torch.no_grad()
    def write(self, p: Any, name: str, values: Any) -> None:
        """Store the values of a state."""
        part, given = local(self.of[p][name]), local(values)
        if part.dtype is torch.int16 and given.dtype is not torch.int16:
            got, do = f"{name} in {given.dtype}", "store the parameter and the int16 remainder of one state"
            raise ArgumentError("FusedAdam", got, "the int16 remainders of this format", do)
        limit = LIMITS.get(TO_CORE[part.dtype])
        given = given.to(part.device)
        if limit is not None:
            top = given.float().abs().nan_to_num(0.0, torch.inf).amax() if given.numel() else given.new_zeros(())
            usable = (top > 0) & top.isfinite()
            bits = torch.where(usable, top / limit, torch.ones_like(top)).view(torch.int32)
            given = given.float()
            # Values that were read of a state come back exactly: their scale is a rounding or two from this one.
            for off in (0, 1, -1, 2, -2, 0):
                scale = (bits + off).view(torch.float32)
                part.copy_((given / scale).clamp(-limit, limit))
                if (part.float() * scale).equal(given):
                    break
            self.scales[p][NAMES.index(name)] = scale
            return
        part.copy_(given)

    # ------------------------------------------------------------------------------------------- state dicts

    def check(self, operation: str, number: Any, p: Any, given: dict[str, Any]) -> None:
        """What was saved for a parameter fits it."""
        mine = local(p)
        for name, values in given.items():
            if values is None:
                continue
            if name not in NAMES:
                got = f"a state {name!r} of parameter {number}"
                do = "load a state of FusedAdam; from_torch_adamw makes one of a state of torch.optim.AdamW"
                raise ArgumentError(operation, got, " and ".join(NAMES), do)
            if local(values).shape != mine.shape or is_dtensor(values) != is_dtensor(p):
                got = f"{name} of parameter {number}, {type(values).__name__} of shape {tuple(local(values).shape)}"
                allowed = f"{type(p).__name__} of shape {tuple(mine.shape)}"
                raise ArgumentError(operation, got, allowed, "load a state of the same model, sharded as it is")
            halves = self._formats.remainders and name == MASTER
            if local(values).dtype is torch.int16 and not halves:
                got, allowed = f"int16 {name} of parameter {number}", "values in float32"
                raise ArgumentError(operation, got, allowed, "make the optimizer with store_param_remainders=True")

    def load(self, p: Any, given: dict[str, Any]) -> None:
        """Store what was saved; a master that was not saved is that of the parameter."""
        self.of[p].clear()
        self.initialize(p)
        state = self.of[p]
        for name, values in given.items():
            if values is None or name not in state:
                continue
            if local(state[name]).dtype is torch.int16 and local(values).dtype is not torch.int16:
                # A float32 master as the parameter and the remainder.
                bits = local(values).to(local(p).device, torch.float32).view(torch.int32)
                low = (bits & 0xFFFF).to(torch.int16)
                high = (bits >> 16) + (low < 0)
                local(state[name]).copy_(low)
                with torch.no_grad():
                    local(p).copy_(high.to(torch.int16).view(torch.bfloat16))
            else:
                self.write(p, name, values)
