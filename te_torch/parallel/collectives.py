"""The documented collectives of tensor and sequence parallelism, on torch's tensors.

They are not differentiable, as documented. Each returns (tensor, handle): with `async_op` the handle's `wait()` is to
be called before the tensor is read, else the handle is None.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from te_core.errors import ArgumentError
from te_core.layers.communicator import Handle
from te_core.layers.gathered import can_travel, gather, turned, turns
from te_core.precision import Operand
from te_core.quantized import Copy, QuantizedTensor
from te_torch.parallel.communicator import GroupCommunicator
from te_torch.parallel.symmetric import MULTICAST, WAYS, check_way, symmetric_buffer, symmetric_sum
from te_torch.quantized import QuantizedTorch, core_of
from te_torch.runtime import runtime_for, to_core, to_torch
from te_torch.tensors.wrap import from_core, quantizer_of

Result = tuple[Any, Handle | None]


def _communicator(group: Any) -> GroupCommunicator | None:
    """This process's rank of the group (None: all processes); None where it is alone."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return None
    return GroupCommunicator(dist.group.WORLD if group is None else group)


def _ended(tensor: torch.Tensor, handle: Handle, async_op: bool) -> Result:
    if async_op:
        return tensor, handle
    handle.wait()
    return tensor, None


def allreduce(inp: torch.Tensor, tp_group: Any = None, async_op: bool = False) -> Result:
    """The sum over a group, in place."""
    comm = _communicator(tp_group)
    if comm is None:
        return inp, None
    with torch.no_grad():
        dense = inp if inp.is_contiguous() else inp.contiguous()
        return _ended(dense, comm.all_reduce(runtime_for(dense), to_core(dense)), async_op)


def symmetric_all_reduce(
    inp: torch.Tensor, tp_group: Any = None, async_op: bool = False, all_reduce_type: str = MULTICAST
) -> Result:
    """The sum over a group through symmetric memory: "one_shot", "two_shot", or "nccl" without it."""
    if all_reduce_type == "nccl":
        return allreduce(inp, tp_group, async_op)
    if all_reduce_type not in (*WAYS, MULTICAST):
        raise TypeError(
            f"symmetric_all_reduce: got all_reduce_type={all_reduce_type!r}. "
            f"Allowed: 'nccl', {', '.join(map(repr, WAYS))}. To do: choose one of these."
        )
    if async_op:
        raise RuntimeError("symmetric_all_reduce: got async_op=True. Allowed: False. To do: leave it out.")
    check_way("symmetric_all_reduce", all_reduce_type)
    comm = _communicator(tp_group)
    if comm is not None:
        with torch.no_grad():
            inp = inp.contiguous()
            symmetric_sum(inp, comm.group, all_reduce_type)
    return inp, None


def get_symmetric_memory_tensor(
    tensor_numel: int, tensor_dtype: torch.dtype, tensor_device: torch.device, tp_group: Any, tag: Any = None
) -> torch.Tensor:
    """A buffer that all ranks of the group have mapped: the same one for the same arguments."""
    return symmetric_buffer(tensor_numel, tensor_dtype, torch.device(tensor_device), tp_group, tag)


def reduce_scatter_along_first_dim(
    inp: torch.Tensor, tp_group: Any, async_op: bool = False, output: torch.Tensor | None = None
) -> Result:
    """This rank's rows of the sum over a group."""
    comm = _communicator(tp_group)
    if comm is None:
        return inp, None
    if inp.ndim < 1 or inp.shape[0] % comm.size:
        raise ArgumentError(
            "reduce_scatter_along_first_dim",
            f"a tensor of shape {tuple(inp.shape)} over {comm.size} ranks",
            "a first dimension that the ranks divide",
            "pad it",
        )
    with torch.no_grad():
        dense = inp.contiguous()
        if output is None:
            output = dense.new_empty(dense.shape[0] // comm.size, *dense.shape[1:])
        handle = comm.reduce_scatter(runtime_for(dense), to_core(dense), to_core(output))
        return _ended(output, handle, async_op)


def gather_along_first_dim(
    inp: Any,
    process_group: Any,
    async_op: bool = False,
    quantizer: Any = None,
    output_tensor: torch.Tensor | None = None,
    external_coalescing: bool = False,
) -> Result:
    """The rows of all ranks, by rank; with a quantizer (or of a quantized tensor) quantized.

    Bytes and scales travel where the format and the rows allow; else the values do, and are quantized whole, with a
    warning. A quantized result has come when this returns; its handle has nothing to wait for.
    `external_coalescing` changes nothing.
    """
    comm = _communicator(process_group)
    if comm is None:
        made = inp if quantizer is None or isinstance(inp, QuantizedTorch) else quantizer(inp)
        return made, None
    with torch.no_grad():
        if quantizer is None and not isinstance(inp, QuantizedTorch):
            dense = inp.contiguous()
            if output_tensor is None:
                output_tensor = dense.new_empty(dense.shape[0] * comm.size, *dense.shape[1:])
            handle = comm.all_gather(runtime_for(dense), to_core(dense), to_core(output_tensor))
            return _ended(output_tensor, handle, async_op)
        made = _gather_quantized(inp, comm, quantizer)
    return made, _Come() if async_op else None


def _gather_quantized(inp: Any, comm: GroupCommunicator, quantizer: Any) -> Any:
    quantizer = _quantizer_of(inp) if quantizer is None else quantizer
    shape = (inp.shape[0] * comm.size, *inp.shape[1:])
    rows, columns = quantizer.rowwise_usage, quantizer.columnwise_usage
    if not _travels(quantizer, inp.numel() // max(1, inp.shape[-1]), rows, columns):
        warnings.warn(
            "gather_along_first_dim: these rows travel in high precision, and are quantized whole", stacklevel=4
        )
        dense = (inp.dequantize() if isinstance(inp, QuantizedTorch) else inp).contiguous()
        rt = runtime_for(dense)
        whole = to_torch(gather(rt, comm, to_core(dense)).wait())  # type: ignore[arg-type]
        return quantizer(whole.view(shape))
    part = inp if isinstance(inp, QuantizedTorch) else quantizer(inp.contiguous())
    core = core_of(part)
    memory: Any = core.rowwise if core.rowwise is not None else core.columnwise
    rt = runtime_for(memory.memory)
    row: Any = None
    column: Any = None
    if rows or turns(core.format):
        row = gather(rt, comm, core).wait()
    if columns:
        column = turned(rt, row) if turns(core.format) else gather(rt, comm, core, columns=True).wait()
    made = QuantizedTensor(
        core.format,
        (core.shape[0] * comm.size, core.shape[1]),
        Copy(row.rowwise, row.rowwise_scale, row.rowwise_amax) if rows else None,
        Copy(column.columnwise, column.columnwise_scale, column.columnwise_amax) if columns else None,
    )
    return from_core(made, shape, inp.dtype, quantizer, internal=quantizer.internal)


def _quantizer_of(t: Any) -> Any:
    found = t._quantizer
    return quantizer_of(None) if found is None else found


def _travels(quantizer: Any, rows: int, rowwise: bool, columnwise: bool) -> bool:
    """Whether parts of so many rows can be put together as bytes: they have to have one scale where they need one."""
    rule: Operand | None = quantizer.operand
    if rule is None or rule.columnwise is not None:
        return False
    agreed = rule.scaling not in ("current", "nvfp4") or rule.row_scaled
    if not agreed and not getattr(quantizer, "with_amax_reduction", False):
        return False
    return can_travel(rule, rows, False) and (not columnwise or can_travel(rule, rows, True))


class _Come:
    """The handle of what has come."""

    def wait(self) -> None:
        """Nothing."""
