"""Helpers of trainers that keep quantized weights: their memory, and their update from sharded master weights."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_torch.exchange import all_reduce
from te_torch.runtime import deprecated
from te_torch.tensors import run
from te_torch.tensors.base import spans
from te_torch.tensors.float8 import Float8Quantizer, Float8TensorStorage
from te_torch.tensors.hybrid import HybridQuantizedTensorStorage
from te_torch.tensors.identity import IdentityTensorStorage
from te_torch.tensors.scales import scale_of
from te_torch.tensors.storage import QuantizedTensorStorage


def replace_raw_data(tensor: Any, new_raw_data: torch.Tensor) -> None:
    """Move the rowwise data of a quantized tensor into a given flat buffer; the values stay."""
    if isinstance(tensor, HybridQuantizedTensorStorage):
        return replace_raw_data(tensor.rowwise_sub_storage, new_raw_data)
    if isinstance(tensor, IdentityTensorStorage):
        old: Any = tensor._hp_data
    elif isinstance(tensor, QuantizedTensorStorage):
        old = tensor.get_data_tensors()[0]
    else:
        raise ArgumentError(
            "replace_raw_data", type(tensor).__name__, "a quantized tensor", "assign .data of plain tensors"
        )
    if old is None or new_raw_data.numel() != old.numel() or new_raw_data.dtype != old.dtype:
        got = f"{new_raw_data.numel()} elements of {new_raw_data.dtype}"
        wanted = "a rowwise copy" if old is None else f"{old.numel()} elements of {old.dtype}"
        raise ArgumentError("replace_raw_data", got, wanted, "allocate a buffer of that size")
    with torch.no_grad():
        new = new_raw_data if new_raw_data.shape == old.shape else new_raw_data.view(old.shape)
        new.copy_(old)
        tensor._move_data(new)


def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Cast float32 master weights into quantized weights of which each process of `group` holds a flat shard.

    A shard begins at its offset in the flattened weight (None: this process holds none). Scales are those of the whole
    weight. Per tensor only maxima are reduced, and the process writes the bytes of its shard: into the weight, or into
    `fsdp_shard_model_weights`; the caller gathers them. With block scales, whose blocks run across shards, the shards
    are summed up to the whole weight, which is then quantized everywhere. Columnwise copies that can be made of the
    gathered rowwise ones are dropped; `post_all_gather_processing` makes them at once.
    """
    shards = fsdp_shard_model_weights or [None] * len(model_weights)
    given = list(zip(model_weights, master_weights, start_offsets, shards, strict=True))
    for weight, master, start, shard in given:  # all of them, before anything is written
        _check(weight, master, start or 0, shard)
    with torch.no_grad():
        for weight, master, start, shard in given:
            _one_weight(weight, master, start or 0, group, shard)
            if not isinstance(weight, Float8TensorStorage) or weight._col_data is None:
                continue
            if manual_post_all_gather_processing or shard is not None or spans(True, group):
                clear_columnwise_cache(weight)  # other processes have the rest of the data
            else:
                weight._make_columnwise()


def _check(weight: Any, master: torch.Tensor | None, start: int, shard: Any) -> None:
    operation = "quantize_master_weights"
    if not isinstance(weight, QuantizedTensorStorage) or not any(weight.get_usages().values()):
        raise ArgumentError(
            operation,
            f"a weight {type(weight).__name__} without quantized data",
            "quantized tensors with data",
            "pass the parameters of quantized_model_init",
        )
    end = start + (0 if master is None else master.numel())
    if start < 0 or end > prod(weight.shape):
        raise ArgumentError(
            operation,
            f"a shard of elements {start} to {end}",
            f"0 to {prod(weight.shape)}, the weight's",
            "correct start_offsets",
        )
    if shard is not None and not isinstance(weight, (Float8TensorStorage, IdentityTensorStorage)):
        raise UnsupportedError(
            operation,
            f"fsdp_shard_model_weights with a {type(weight).__name__}",
            "these with per-tensor FP8 and identity weights",
            "let the whole weight be written",
        )


def _one_weight(weight: Any, master: torch.Tensor | None, start: int, group: Any, shard: Any) -> None:
    if isinstance(weight, IdentityTensorStorage):
        if master is not None:
            target: Any = weight._hp_data if shard is None else shard
            begin = start if shard is None else 0
            target.view(-1)[begin : begin + master.numel()].copy_(master.view(-1))
        return
    if isinstance(weight, Float8TensorStorage):
        _per_tensor(weight, master, start, group, shard)
        return
    whole = master
    if master is None or master.numel() != weight.numel():
        whole = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
        if master is not None:
            whole[start : start + master.numel()] = master.view(-1)
    assert whole is not None
    if spans(True, group):
        whole = whole.float().contiguous()
        if whole is master:
            whole = whole.clone()
        all_reduce("quantize_master_weights", whole, group)
    weight.quantize_(whole.view(weight.shape))


def _per_tensor(weight: Any, master: torch.Tensor | None, start: int, group: Any, shard: Any) -> None:
    quantizer = weight._quantizer
    rule = quantizer.operand
    device = weight.device
    amax = torch.zeros(1, dtype=torch.float32, device=device)
    if master is not None and master.numel():
        amax = master.abs().amax().float().reshape(1)
    if spans(True, group):
        all_reduce("quantize_master_weights", amax, group, "max")
    if isinstance(quantizer, Float8Quantizer):
        scale = quantizer.scale.reshape(1)
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.reshape(quantizer.amax.shape)))
    else:
        scale = scale_of(amax, rule.dtype.max, rule.power_of_two, rule.epsilon)
    weight._scale_inv.copy_(1 / scale)
    if master is not None and master.numel():
        n = master.numel()
        lines = torch.nn.functional.pad(master.reshape(-1).float(), (0, -n % 16)).view(16, -1)
        made = run.quantize(lines, rule, True, False, scale=scale).row_data
        assert made is not None
        data = made[:, : lines.shape[1]].reshape(-1)[:n]
        if shard is not None:
            shard.view(torch.uint8).view(-1)[:n].copy_(data)
        else:
            flat = weight._data.reshape(-1)  # a copy, of a view without dense memory
            flat[start : start + n] = data
            if not weight._data.is_contiguous():
                weight._data.copy_(flat.view(weight._data.shape))
    torch.autograd.graph.increment_version(weight)


def cast_master_weights_to_fp8(*args: Any, **kwargs: Any) -> None:
    """The older name of `quantize_master_weights`."""
    deprecated("cast_master_weights_to_fp8", "quantize_master_weights")
    quantize_master_weights(*args, **kwargs)


def post_all_gather_processing(model_weights: Sequence[Any]) -> None:
    """Make the columnwise copies of weights anew, of the rowwise data that was gathered."""
    with torch.no_grad():
        for weight in model_weights:
            if isinstance(weight, QuantizedTensorStorage) and weight._row_data is not None:
                if weight._derives_columnwise():
                    weight._make_columnwise()


def clear_columnwise_cache(tensor: Any) -> None:
    """Drop a columnwise copy that can be made of the rowwise one."""
    if isinstance(tensor, QuantizedTensorStorage) and tensor._row_data is not None and tensor._col_data is not None:
        if tensor._derives_columnwise():
            tensor.update_usage(columnwise_usage=False)


def is_custom(obj: Any) -> bool:
    """Whether a quantizer, or a tensor's quantizer, brings its own GEMM."""
    if isinstance(obj, QuantizedTensorStorage):
        obj = obj._quantizer
    return bool(getattr(obj, "custom", False))
