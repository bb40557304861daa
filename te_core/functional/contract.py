"""What a layer's arguments have to be, checked against the table before an address is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from te_core import dtypes
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.errors import ArgumentError
from te_core.layers.entries import Argument
from te_core.ops.activation import is_gated
from te_core.quantized import QuantizedTensor
from te_core.tensor import CPU, Device, Tensor

Given = Tensor | QuantizedTensor

_LEADS = ("...", "LEAD", "LEAD'", "*")


class Contract:
    """Checks arguments of one call against one another."""

    def __init__(self, operation: str, device: Device, options: Mapping[str, Any], recipe: bool) -> None:
        self.operation, self.device, self.options, self.recipe = operation, device, options, recipe
        self.sizes: dict[str, Any] = {}  # what each letter stands for so far
        self.first: DType | None = None  # the first argument's

    def check(self, argument: Argument, name: str, t: Given) -> None:
        """One argument fits the table and those before it."""
        if t.dtype not in self._dtypes(argument) and not isinstance(t, QuantizedTensor):
            allowed = " or ".join(d.name for d in self._dtypes(argument))
            self._refuse(name, t, allowed, f"convert {name} to {'one of these types' if 'or' in allowed else allowed}")
        if self.first is None:
            self.first = t.dtype
        self._check_shape(argument, name, t)
        if isinstance(t, QuantizedTensor):
            return
        if t.device is not self.device:
            self._refuse(name, t, f"arrays on {self.device}, where this call runs", "move it there, or pass rt=")
        if t.strides is None or t.is_contiguous:
            return
        strides = t.strides
        if not argument.strided or (t.shape[-1] > 1 and strides[-1] != 1) or any(step < 0 for step in strides):
            allowed = "strides from 0 on whose last one is 1" if argument.strided else "dense arrays, row by row"
            self._refuse(name, t, allowed, f"copy {name} to dense memory (ascontiguousarray)")

    def finish(self) -> None:
        """Sizes that follow from one another agree."""
        inner, outer = self.sizes.get("F"), self.sizes.get("F'")
        if inner is None or outer is None:
            return
        kind = self.options["activation"]
        wanted = 2 * inner if is_gated(kind) else inner
        if outer != wanted:
            rows, columns = ("columns", "rows") if self.options.get("turned") else ("rows", "columns")
            got = f"fc1_weight of {outer} {rows} and fc2_weight of {inner} {columns} with activation={kind!r}"
            allowed = f"{wanted} {rows} of fc1_weight" + f", twice fc2_weight's {columns}" * is_gated(kind)
            raise ArgumentError(self.operation, got, allowed, "correct the weights, or the activation")

    def _dtypes(self, argument: Argument) -> tuple[DType, ...]:
        kind = argument.dtypes
        if kind == "any" or (kind == "weight" and self.recipe) or self.first is None:
            return ACTIVATION_DTYPES
        if kind in ("x", "weight"):
            return (self.first,)
        return tuple(map(dtypes.dtype, kind.split("|")))

    def _check_shape(self, argument: Argument, name: str, t: Given) -> None:
        letters, shape = argument.letters(self.options), tuple(t.shape)
        lead = letters[0] if letters[0] in _LEADS else ""
        tail = letters[1:] if lead else letters
        count = len(shape) - len(tail)
        right = count >= 0 if lead else count == 0
        if right and lead and lead != "*":
            right = self.sizes.setdefault(lead, shape[:count]) == shape[:count]
        for letter, size in zip(tail, shape[max(count, 0) :], strict=False) if right else ():
            if letter.startswith("1|"):
                letter = letter[2:]
                if size == 1:
                    continue
            right = right and self.sizes.setdefault(letter, size) == size
        if not right:
            named = dict.fromkeys(s[s.find("|") + 1 :] for s in letters)
            known = ", ".join(f"{k} = {self.sizes[k]}" for k in named if k in self.sizes)
            allowed = f"[{', '.join(letters)}]" + f" with {known}" * bool(known)
            self._refuse(name, t, allowed, f"correct the shape of {name}, or of what came before it")

    def _refuse(self, name: str, t: Given, allowed: str, do: str) -> None:
        raise ArgumentError(self.operation, f"{name} = {t!r}", allowed, do)


def check_offsets(operation: str, name: str, t: Tensor, most: int) -> None:
    """Running sums that the host can read begin with 0, fall nowhere, and end before the tokens do.

    What lies on a device is not read: that would be a wait.
    """
    if t.device is not CPU:
        return
    values = np.asarray(t.numpy())
    if not values.size or values[0] != 0 or (np.diff(values.astype(np.int64)) < 0).any() or values[-1] > most:
        allowed = f"running sums of lengths: 0 first, none less than the one before, none above {most}"
        raise ArgumentError(operation, f"{name} = {values[:8].tolist()}", allowed, f"correct {name}")


def check_row_map(operation: str, name: str, t: Tensor) -> None:
    """A map of rows that the host can read leads to rows from 0 on, and to experts that there are (-1: nowhere)."""
    if t.device is not CPU or not t.size:
        return
    values = np.asarray(t.numpy()).astype(np.int64)
    right = t.ndim == 1 and values.min() >= -1
    if t.ndim == 2 and t.shape[1] % 2:
        experts, count = t.shape[1] // 2, values[:, -1:]
        used = np.arange(experts) < count
        rows, to = values[:, :experts][used], values[:, experts:-1][used]
        right = bool((count >= 0).all() and (count <= experts).all() and (rows >= 0).all())
        right = right and bool(((to >= 0) & (to < experts)).all())
    if not right:
        do = "pass the map that moe_permute gave for these tokens"
        raise ArgumentError(operation, f"{name} = {t!r} with rows or experts that there are not", "a map of rows", do)
