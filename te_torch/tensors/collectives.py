"""What torch.distributed's collectives write: their operators do not say it, and write after they have returned."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from te_core.errors import UnsupportedError


def writes_of(func: Any) -> tuple[bool, ...] | None:
    """Which arguments a collective changes; None of any other operator.

    Their schemas say nothing of it. All that change a tensor (`broadcast_`, `allreduce_`, `recv_`...) end with an
    underscore, and write to their first argument alone.
    """
    if func.namespace != "c10d":
        return None
    return (_writes(func), *[False] * (len(func._schema.arguments) - 1))


def _writes(func: Any) -> bool:
    return bool(func._schema.name.endswith("_"))


def run(func: Any, args: list[Any], kwargs: dict[str, Any], changes: bool) -> Any:
    """Call a collective on values that nobody else holds, wait (on a GPU its stream waits, not the host), and tell the
    callers that it is done.

    They wait, too, and a second wait for a message of gloo's would be one for the next message. A message that is sent
    alone holds what it sends. Every call is an asynchronous one: of others NCCL hands back a null pointer, which Python
    cannot tell from something to wait for.
    """
    if changes and dist.distributed_c10d._world.pg_coalesce_state:
        raise UnsupportedError(
            str(func),
            "a quantized tensor to write to, among calls that are sent together (batch_isend_irecv, coalescing)",
            "plain tensors there, quantized ones in a call of their own",
            "receive into a plain tensor and copy_() it, or call the collective by itself",
        )
    if not _writes(func):
        return func(*args, **kwargs)
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "async_op" in names:
        given["async_op"] = True
    result = func(**given)
    (result[-1] if isinstance(result, tuple) else result).wait()
    c10d: Any = torch._C._distributed_c10d
    there: Any = torch.futures.Future()
    there.set_result(None)
    done = c10d._create_work_from_future(there).boxed()
    return (*result[:-1], done) if isinstance(result, tuple) else done


_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def follow_owner(func: Any, args: list[Any], kwargs: dict[str, Any], written: list[Any]) -> None:
    """Under ZeroRedundancyOptimizer: beside the values that a weight's owner sends come its scale and its maximum.

    Under delayed scaling what is sent is what the owner's scale could hold. Of a weight that has outgrown it nobody
    else would note the maximum, and scales that are not reduced over these ranks would part for good. (Elsewhere a
    sender may have a plain tensor, and send nothing more.)
    """
    if func is not torch.ops.c10d.broadcast_.default or not _inside(_ZERO):
        return
    for t in written:
        quantizer = t._quantizer
        follows = quantizer._lasting() if quantizer is not None and quantizer._notes() else None
        if not follows:
            continue
        scale, amax = follows
        sent = torch.stack([scale.detach().reshape(()), amax.detach().reshape(())])
        run(func, [[sent], *args[1:]], {k: [sent] if k == "tensors" else v for k, v in kwargs.items()}, True)
        if t._memory.margin is None:  # else the scale begins with these values
            scale.copy_(sent[0])
            amax.copy_(torch.maximum(amax, sent[1]))


def _inside(module: str) -> bool:
    """Whether a function of this module is being called."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def refuse_bucket(t: Any) -> None:
    """Refuse what assigns `data` to lay a parameter into memory that it sends: a quantized one takes values alone."""
    if sys._getframe(2).f_globals.get("__name__") == _ZERO:
        raise UnsupportedError(
            "ZeroRedundancyOptimizer",
            f"parameters_as_bucket_view=True (or overlap_with_ddp) with a {type(t).__name__}",
            "plain parameters as views of buckets",
            "leave the option out: quantized parameters are then sent one by one",
        )
