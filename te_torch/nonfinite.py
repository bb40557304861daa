"""What was no number: in a region with `check_finite=True` every cast counts the NaNs and infinities that it meets, on
the device and without waiting for it; `nonfinite_report` reads the counts, and begins with where the first ones were.

    with te_torch.autocast(recipe=recipe, check_finite=True):
        loss = model(x).sum()
    loss.backward()
    print(te_torch.nonfinite_report(model))

A narrow format may have no code for either: docs/precision.md says what becomes of them in each recipe.

What came first follows from the round of a count (a forward behind a backward begins one), then from its kind: what a
parameter holds, what a forward met, what a backward met; then from the order of the calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from threading import RLock
from typing import Any, NamedTuple

import torch

from te_core.layers import attention_fp8
from te_core.quantize.state import BACKWARD_SLOTS, FORWARD_SLOTS, Scales
from te_torch.listing import table
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import to_core
from te_torch.state import ScalingState
from te_torch.surroundings import check_surroundings
from te_torch.values import check_flags, check_model

_FORWARD, _BACKWARD = ("activation", "weight", "output"), ("gradient", "dgrad")
#: The slots of an attention that have names of their own: (backward, gemm, slot).
_ATTENTION = {
    (False, *attention_fp8.QKV): ("qkv", "activation"),
    (False, *attention_fp8.P): ("probabilities", "activation"),
    (False, *attention_fp8.OUT): ("attention", "output"),
    (True, *attention_fp8.DOUT): ("attention", "gradient"),
    (True, *attention_fp8.DP): ("probabilities", "gradient"),
    (True, *attention_fp8.DQKV): ("qkv", "dgrad"),
}


class _Calls:
    """Where the process is: the forwards of all counted modules so far, and the round."""

    number, round, backward = 0, 1, False

    def forward(self) -> None:
        """One begins."""
        self.number += 1
        self.round += self.backward
        self.backward = False


_calls = _Calls()


class Counted:
    """What a module hands to its layer in the place of its scaling state: that, if it has one, with counters."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.parameters = [name for name, p in module._parameters.items() if p is not None and p.is_floating_point()]
        sizes = module.gemms * FORWARD_SLOTS, module.gemms * BACKWARD_SLOTS, len(self.parameters)
        with torch.inference_mode(False):
            self.counts = torch.zeros(sum(sizes), 2, dtype=torch.int64, device=device)
            self.rounds = torch.zeros(sum(sizes), dtype=torch.int64, device=device)  # of a count's first; 0: not yet
        self.forward, self.backward, self.held = self.counts.split(sizes)
        self.state: ScalingState | None = None
        self.round = self.number = 0  # of the last forward

    def begin(self, module: Any) -> None:
        """Before a forward: note the round of what came since the last one, and count what no cast reads."""
        self.settle()
        _calls.forward()
        self.round, self.number = _calls.round, _calls.number
        for count, name in zip(self.held, self.parameters, strict=True):
            p: Any = module._parameters.get(name)
            if p is None or (name in module._weight_names() and not isinstance(p, QuantizedTorch)):
                continue
            values = (p.to_local() if hasattr(p, "to_local") else p).detach()
            values = values.dequantize() if isinstance(values, QuantizedTorch) else values
            count += torch.stack((values.isnan().sum(), values.isinf().sum()))

    def settle(self) -> None:
        """What was counted and has no round yet is of the last forward's."""
        self.rounds.masked_fill_((self.rounds == 0) & self.counts.any(1), self.round)

    @property
    def token(self) -> int:
        """The state's; 0 without one, which no state has."""
        return 0 if self.state is None else self.state.token

    def scales(self, recompute: bool) -> Scales:
        """The core's view for one forward. What is run again was counted before."""
        return self._with(
            None if self.state is None else self.state.scales(recompute), None if recompute else to_core(self.forward)
        )

    def backward_scales(self) -> Scales:
        """The core's view for one backward."""
        _calls.backward = True
        return self._with(None if self.state is None else self.state.backward_scales(), None)

    def _with(self, own: Scales | None, forward: Any) -> Scales:
        back = to_core(self.backward)
        if own is None:
            return Scales(None, None, None, None, forward, back)
        return Scales(own.forward_scale, own.forward_amax, own.backward_scale, own.backward_amax, forward, back)


_beginning = RLock()


def counted(module: Any, state: ScalingState | None, device: torch.device, recompute: bool) -> Counted:
    """The module's counters around its state, before a forward; made at the first look."""
    found: Counted | None = module.__dict__.get("_nonfinite")
    if found is None or found.forward.device != device:
        check_surroundings()  # else their memory would be a mode's
        made = Counted(module, device)
        with _beginning:  # another thread may have counted in others of them already
            found = module.__dict__.get("_nonfinite")
            if found is None or found.forward.device != device:
                found = module.__dict__["_nonfinite"] = made
    found.state = state
    if not recompute:
        found.begin(module)
    return found


class Row(NamedTuple):
    """What the casts of one tensor of a layer met."""

    layer: str
    gemm: str
    tensor: str
    nans: int
    infinities: int


class NonfiniteReport:
    """A row for each tensor among whose values were NaNs or infinities, the origin first. Printable; `as_dict()` for
    programs.
    """

    def __init__(self, rows: list[Row], counted: list[str], others: list[str]) -> None:
        self.rows = rows
        self.counted = counted  # layers whose casts were counted
        self.others = others  # layers that ran in no region with check_finite=True

    @property
    def total(self) -> int:
        """All that was no number."""
        return sum(row.nans + row.infinities for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """{"rows": [{"layer": ..., "nans": ...}], "counted": [layer, ...], "others": [layer, ...]}."""
        return {"rows": [row._asdict() for row in self.rows], "counted": self.counted, "others": self.others}

    def __str__(self) -> str:
        if not self.counted:
            return "nothing was counted: run the model inside te_torch.autocast(..., check_finite=True)"
        if not self.rows:
            text = f"no NaN and no infinity in the casts of {len(self.counted)} layers"
        else:
            cells = [(r.layer, r.gemm, r.tensor, f"{r.nans:,}", f"{r.infinities:,}") for r in self.rows]
            text = table(("layer", "gemm", "tensor", "NaN", "infinite"), cells)
        return f"{text}\nnot counted: {', '.join(self.others)}" if self.others else text


def nonfinite_report(model: torch.nn.Module, reset: bool = False) -> NonfiniteReport:
    """What the casts of every layer met since the counts began. Waits for the device; `reset` begins anew.

    The first row is the origin: in the earliest step that has any, parameters that are not finite come first, then the
    casts of the forward in the order of the calls, then those of the backward.

    Returns:
        A printable report.

    Example:
        from te_torch.recipe import Float8CurrentScaling

        layer = te.Linear(64, 64, device="cpu")
        with te.autocast(recipe=Float8CurrentScaling(), emulate=True, check_finite=True):
            layer(torch.randn(32, 64))
        print(te.nonfinite_report(layer))
    """
    check_model("nonfinite_report", model)
    check_flags("nonfinite_report", reset=reset)
    found: list[tuple[tuple[int, ...], Row]] = []
    seen: list[str] = []
    others: list[str] = []
    for name, module in model.named_modules():
        if "fp8_state" not in module._modules:
            continue
        layer = name or str(getattr(module, "name", ""))
        counts: Counted | None = module.__dict__.get("_nonfinite")
        if counts is None:
            others.append(layer)
            continue
        seen.append(layer)
        counts.settle()
        read = zip(counts.rounds.tolist(), _tensors(module, counts), counts.counts.tolist(), strict=True)
        found += [((number, *place), Row(layer, *where, *met)) for number, (place, where), met in read if any(met)]
        if reset:
            counts.counts.zero_(), counts.rounds.zero_()
    return NonfiniteReport([row for _, row in sorted(found, key=itemgetter(0))], seen, others)


def _tensors(module: Any, counts: Counted) -> Iterator[tuple[tuple[int, ...], tuple[str, str]]]:
    """(Place within a round, (gemm, tensor)) of each counter."""
    names = [name.removesuffix("_weight") for name in module._gemm_names()]
    for backward, slots in ((False, _FORWARD), (True, _BACKWARD)):
        for i in range(module.gemms * len(slots)):
            gemm, slot = divmod(i, len(slots))
            where = (names[gemm], slots[slot]) if names else _ATTENTION.get((backward, gemm, slot), ("", slots[slot]))
            kind = 2 if backward else slots[slot] != "weight"
            yield (kind, -counts.number, -gemm) if backward else (kind, counts.number, gemm), where
    yield from (((0, counts.number, 0), (name, "parameter")) for name in counts.parameters)
