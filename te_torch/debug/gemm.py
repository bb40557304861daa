"""What happens to the tensors of one product that features look at: their calls, in the documented order.

Of an operand: it was quantized already, if a GEMM reads what the recipe makes of it; `modify_tensor` for the GEMM that
reads its columns, then for the one that reads its rows; `inspect_tensor`; `inspect_tensor_postquantize`. Of a result:
`modify_tensor`, `inspect_tensor`.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

import torch

from te_core.errors import UnsupportedError
from te_core.layers.inspector import ATTENTION_POINTS, Request
from te_core.precision import rule_of
from te_core.quantized import Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_torch.debug.layers import ALONE, Team
from te_torch.debug.state import TEDebugState
from te_torch.debug.stats import STATS_BUFFERS
from te_torch.quantized import QuantizedTorch, core_of
from te_torch.runtime import TO_TORCH, piece_to_torch, to_core
from te_torch.tensors import Float8CurrentScalingQuantizer, Float8Quantizer, quantizer_of
from te_torch.tensors.dtype import of_core
from te_torch.tensors.wrap import from_core

Value = Tensor | QuantizedTensor
_ROWS = {"activation": "fprop", "weight": "fprop", "gradient": "dgrad"}
_COLUMNS = {"activation": "wgrad", "weight": "dgrad", "gradient": "wgrad"}
_graph_task = torch._C._current_graph_task_id


class _Tensor:
    """An operand or result as a feature gets it: torch's views of what the core has, made when they are asked for."""

    def __init__(
        self, value: Tensor, cast: Cast | None, out: QuantizedTensor | None, weight: bool = False, group: Any = None
    ) -> None:
        self.dtype = TO_TORCH[value.dtype]
        self.value, self.out, self._cast, self._group = value, out, cast, group
        self.held = weight and out is not None and out.owner is not None  # a parameter that is quantized itself

    @cached_property
    def plain(self) -> torch.Tensor:
        """In high precision."""
        return piece_to_torch(self.value)

    @cached_property
    def quantized(self) -> Any:
        """As the recipe quantized it; None if it did not."""
        if self.out is None:
            return None
        owner = self.out.owner  # of a held weight, and of what came quantized
        return from_core(self.out, self.out.shape, self.dtype) if owner is None else owner

    @cached_property
    def quantizer(self) -> Any:
        """What the recipe quantizes it by."""
        if self._cast is None and self.out is None:
            return None
        return quantizer_for(self._cast, self.out, self.plain.device, self._group)


def quantizer_for(cast: Cast | None, q: QuantizedTensor | None, device: torch.device, group: Any = None) -> Any:
    """The quantizer that a recipe's cast stands for; where a weight was quantized before, its format.

    group: of the ranks that have other parts of the tensor, which need one scale. (That of a recipe with a history is
    equal on all of them. Who scales otherwise finds the group in `amax_reduction_group`.)
    """
    form = cast.format if cast is not None else None if q is None else q.format
    if form is None:
        return None
    if group is not None and form.scaling == "tensor":
        made = quantizer_for(cast, q, device).copy()
        made.amax_reduction_group = group
        if isinstance(made, Float8CurrentScalingQuantizer):
            made.with_amax_reduction = True
        return made
    if form.scaling == "tensor" and cast is not None and cast.scale is not None:
        scale = piece_to_torch(cast.scale)
        amax = torch.zeros_like(scale) if cast.amax is None else piece_to_torch(cast.amax)
        return Float8Quantizer(scale, amax, of_core(form.dtype))
    options: dict[str, Any] = {"tiled": form.tiled, "row_scaled": form.row_scaled, "bound": form.bound}
    if cast is not None:
        options |= {name: getattr(cast, name) for name in ("epsilon", "power_of_two", "transform")}
    return quantizer_of(rule_of(form.dtype, "current" if form.scaling == "tensor" else form.scaling, **options), device)


class GemmInspector:
    """The inspector of one product for one plan."""

    def __init__(self, layer: str, request: Request, plan: Any, team: Team = ALONE) -> None:
        self.layer, self.request, self.plan, self.team = layer, request, plan, team
        self.changes = plan.modified & ATTENTION_POINTS  # of attention, which takes them in its emulation only
        self._looked = plan.inspected | {tensor for _, tensor in plan.older}
        self._local = threading.local()  # what was made for the other GEMM of an operand

    def inspect(
        self, rt: Runtime, gemm: str, tensor: str, value: Tensor, cast: Cast | None, out: QuantizedTensor | None
    ) -> Value | None:
        """At a point: what the GEMM reads, or its result, in the place of what there was."""
        with torch.no_grad():
            if tensor in _ROWS:
                return self._operand(gemm, tensor, value, cast, out)
            if (gemm, tensor) in ATTENTION_POINTS:
                return self._other(gemm, tensor, _Tensor(value, cast, out), True)
            return self._other(gemm, tensor, _Tensor(value, None, None), False)

    def _other(self, gemm: str, tensor: str, seen: _Tensor, attended: bool) -> Value | None:
        """A result, or a tensor of attention (`attended`): seen in the first run, if a checkpoint runs it again."""
        made = self._modified(gemm, tensor, seen) if (gemm, tensor) in self.plan.modified else None
        if isinstance(made, QuantizedTorch) and not attended:
            made = made.dequantize().to(seen.dtype)
        if tensor in self.plan.inspected and (gemm != "fprop" or _graph_task() == -1):
            plain = seen.plain if made is None or attended else made
            read = seen.quantized if made is None else made if attended else None
            self._inspected(tensor, plain, read, None, seen.quantizer)
        return None if made is None else _as_core(made, seen)

    def _operand(
        self, gemm: str, tensor: str, value: Tensor, cast: Cast | None, out: QuantizedTensor | None
    ) -> Value | None:
        seen, plan = self._seen(tensor, value, cast, out), self.plan
        point = gemm, tensor
        high = point in plan.high
        made = self._modified(gemm, tensor, seen) if point in plan.modified else None
        read = made if made is not None else None if high else seen.quantized
        if tensor not in self._looked:
            pass
        elif gemm == _COLUMNS[tensor]:  # comes first: what backward will read, of forward's operands
            self._kept()[tensor] = seen, read
        elif tensor == "gradient":
            self._kept()["rows"] = seen, read
        elif _graph_task() == -1:  # else a checkpoint runs it again: its tensors were seen in the first run
            before, beside = self._kept().pop(tensor, (None, None))
            there = before is not None and before.value.ptr == value.ptr
            self._shown(tensor, seen, (read, beside if there else None), (True, there))
        else:
            self._kept().pop(tensor, None)
        if made is not None:
            return _as_core(made, seen)
        return value if high else None

    def finished(self, rt: Runtime, tensor: str) -> None:
        """Show a gradient as both GEMMs read it; one of them may not be wanted."""
        columns, rows = (self._kept().pop(name, None) for name in (tensor, "rows"))
        seen, _ = rows or columns or (None, None)
        if seen is not None:
            with torch.no_grad():
                reads = rows and rows[1], columns and columns[1]
                self._shown(tensor, seen, reads, (rows is not None, columns is not None))

    def _shown(self, tensor: str, seen: _Tensor, reads: tuple[Any, Any], there: tuple[bool, bool]) -> None:
        """What the GEMM along the rows and the one along the columns read; `there`: whether they run."""
        if tensor in self.plan.inspected:
            only_quantized = seen.held and any(read is not None for read in reads)
            self._inspected(tensor, None if only_quantized else seen.plain, *reads, seen.quantizer)
        for gemms, read, runs in zip((_COLUMNS, _ROWS), reversed(reads), reversed(there), strict=True):
            if runs:
                self._postquantized(gemms[tensor], tensor, seen, read)

    def _seen(self, tensor: str, value: Tensor, cast: Cast | None, out: QuantizedTensor | None) -> _Tensor:
        """The same object where both GEMMs read the same quantized tensor."""
        before = self._kept().get(tensor, (None, None))[0]
        if before is not None and before.out is out and before.value.ptr == value.ptr:
            return before
        return _Tensor(value, cast, out, tensor == "weight", self.team.group if tensor == self.team.gathered else None)

    def _kept(self) -> dict[str, Any]:
        found: dict[str, Any] | None = getattr(self._local, "kept", None)
        if found is None:
            found = self._local.kept = {}
        return found

    # ------------------------------------------------------------------------------------ the calls

    def _modified(self, gemm: str, tensor: str, seen: _Tensor) -> Any:
        if seen.held:
            raise AssertionError(
                f"{self.layer}: modify_tensor of {tensor} in {gemm}: the weight is held quantized. "
                "Allowed: weights in high precision. To do: leave out quantized_model_init, or the feature."
            )
        api = _api()
        return api.modify_tensor(
            layer_name=self.layer,
            gemm=gemm,
            tensor_name=tensor,
            tensor=seen.plain,
            default_quantizer=seen.quantizer,
            iteration=TEDebugState.get_iteration(),
            dtype=seen.dtype,
        )

    def _inspected(self, tensor: str, plain: Any, rowwise: Any, columnwise: Any, quantizer: Any) -> None:
        STATS_BUFFERS.begin(self.team if tensor in self.team.split else ALONE)
        _api().inspect_tensor(
            layer_name=self.layer,
            tensor_name=tensor,
            tensor=plain,
            iteration=TEDebugState.get_iteration(),
            tp_group=self.team.group,
            tp_size=self.team.size,
            rowwise_quantized_tensor=rowwise,
            columnwise_quantized_tensor=columnwise,
            quantizer=quantizer,
        )
        STATS_BUFFERS.flush()

    def _postquantized(self, gemm: str, tensor: str, seen: _Tensor, read: Any) -> None:
        if (gemm, tensor) in self.plan.older:
            _api().inspect_tensor_postquantize(
                layer_name=self.layer,
                gemm=gemm,
                tensor_name=tensor,
                tensor=seen.plain if read is None else read,
                iteration=TEDebugState.get_iteration(),
                tp_group=self.team.group,
                tp_size=self.team.size,
                rowwise=gemm == _ROWS[tensor],
            )


def _api() -> Any:
    from nvdlfw_inspect import api

    if api.DEBUG_MANAGER is None:
        raise UnsupportedError(
            "precision debugging",
            "a backward after end_debug() of a forward before it",
            "a step that begins and ends before end_debug()",
            "call nvdlfw_inspect.api.end_debug() after the backward",
        )
    return api.transformer_engine


def _as_core(made: Any, seen: _Tensor) -> Value:
    """What a feature gave back, as the GEMM reads it."""
    if isinstance(made, QuantizedTorch):
        return core_of(made)
    if not isinstance(made, torch.Tensor):  # a storage without a tensor around it
        return core_of(made)
    shape = seen.plain.shape
    return to_core(made.to(seen.dtype).reshape(shape).contiguous())
