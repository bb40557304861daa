"""torch's device, stream and allocator as a `Runtime`; torch tensor <-> core `Tensor`, with no DLPack between.

Outputs are allocated by torch's caching allocator and owned by torch tensors from the start, so memory
accounting, streams and CUDA graphs see nothing unusual.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial, wraps
from typing import Any, TypeVar, cast

import torch

from te_core import dtypes
from te_core.dtypes import DType
from te_core.errors import ArgumentError, UnsupportedError
from te_core.runtime import Runtime
from te_core.tape.tape import Take
from te_core.tensor import CPU, META, Device, Tensor, cuda_device


class _CoreTypes(dict[torch.dtype, DType]):
    def __missing__(self, dtype: torch.dtype) -> DType:
        """Complex numbers, say, of which nothing here knows the parts."""
        raise ArgumentError(
            "te_torch", f"a tensor of {dtype}", "float32, bfloat16 or float16", "convert it, or pass its real parts"
        )


TO_CORE: dict[torch.dtype, DType] = _CoreTypes(
    {getattr(torch, d.torch_name): d for d in dtypes.ALL if hasattr(torch, d.torch_name) and d.bits >= 8}
)
TO_TORCH: dict[DType, torch.dtype] = {core: t for t, core in TO_CORE.items()}

F = TypeVar("F", bound=Callable[..., Any])

#: What activations and parameters may be.
FLOATS = frozenset(TO_TORCH[d] for d in dtypes.ACTIVATION_DTYPES)

_DEVICES: list[Device] = [cuda_device(i) for i in range(16)]  # by index: a look-up per tensor, not a call
_runtimes: dict[tuple[int, int], Runtime] = {}
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def constant_at_trace(function: F) -> F:
    """Mark a function of constants for tracing compilers: called at trace time, its result a constant of the graph.

    What torch.compiler.assume_constant_result does, without its import of the whole compiler (two seconds). A number
    that changed between calls is a compiler's symbol, which torch before 2.13 does not hand to such a function: it is
    made a constant before, and another one is compiled anew. Tuples come as plain ones.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @wraps(function)
    def at_trace(*args: Any) -> Any:
        return function(*_fixed(args))

    del at_trace._dynamo_marked_constant  # type: ignore[attr-defined]  # wraps copied it
    return cast("F", at_trace)


def _fixed(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple([_fixed(element) for element in value])
    if isinstance(value, (torch.SymInt, torch.SymFloat)):  # torch.export, whose tracer is no compiler
        return int(value) if isinstance(value, torch.SymInt) else float(value)
    # A key of a dictionary is what a compiler makes a constant of, be it a number of either kind.
    return list({value: None})[0] if isinstance(value, (int, float)) else value


@constant_at_trace
def warn(text: str, category: type[Warning] = UserWarning, stacklevel: int = 2) -> None:
    """warnings.warn of the function that calls this; in traced code as it is traced, where a compiler would break."""
    warnings.warn(text, category, stacklevel=stacklevel + 2)


@constant_at_trace
def deprecated(name: str, use: str, level: int = 1, goes: str = "", /) -> None:
    """Warn the caller of `name`, a public name that goes: what to use in its place, and the version of te-runtime in
    which it goes, one more minor version from now at least.

    Without `goes` the name is an older one of Transformer Engine's and stays for the scripts that use it. `level` is 1
    where the deprecated function itself warns, and one more for each function between.
    """
    end = f"; te-runtime {goes} will not have it" if goes else ""
    warnings.warn(f"{name} is deprecated: use {use}{end}", DeprecationWarning, stacklevel=level + 3)


def untraced(function: F, reason: str) -> F:
    """The function as traced code calls it: never traced. To be asked for at trace time (`constant_at_trace`): to
    import the compiler takes two seconds that others need not wait.
    """
    import torch._dynamo

    return torch._dynamo.disable(function, reason=reason)


def default_device() -> torch.device:
    """CUDA where there is a device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def drawn(draw: Callable[[Any], Any], subject: Any) -> Any:
    """draw(subject), which asks torch's generator for numbers.

    A capture that an error ended leaves the generator of its device in the belief that it goes on, and every draw
    fails, until a capture ends well (torch 2.11). So that the process goes on, an empty one is made.
    """
    try:
        return draw(subject)
    except RuntimeError as error:
        if "outside graph capture" not in str(error) or torch.cuda.is_current_stream_capturing():
            raise
    with warnings.catch_warnings(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        warnings.simplefilter("ignore")  # the graph is empty
    return draw(subject)


def amp_dtype(kind: str) -> torch.dtype | None:
    """What torch.autocast computes in on this kind of device; None where it is off (a meta device knows none)."""
    return None if kind == "meta" or not torch.is_autocast_enabled(kind) else torch.get_autocast_dtype(kind)


def amp_cast(t: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype of torch.autocast, where that is on."""
    dtype = amp_dtype(t.device.type)
    return t if dtype is None else t.to(dtype)


def outside_autocast(t: torch.Tensor) -> AbstractContextManager[Any]:
    """For work that torch.autocast must leave alone: it would convert it, or refuse a half that is not its own."""
    if not torch._C._is_any_autocast_enabled() or amp_dtype(t.device.type) is None:
        return nullcontext()
    return torch.autocast(t.device.type, enabled=False)


def _quick_empty(kind: str) -> Any:
    """What torch's compiler has its code allocate with, (shape, strides, dtype) -> tensor; None where torch has none.

    No parsing of options and no dispatch: a third of torch.empty's time. For CUDA it allocates on the current device.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    try:  # private functions: used if they do what is expected of them
        made = guards._empty_strided_cpu((2, 3), (3, 1), torch.bfloat16)  # type: ignore[union-attr]
    except (AttributeError, RuntimeError, TypeError):
        return None
    able = made.shape == (2, 3) and made.stride() == (3, 1) and made.dtype is torch.bfloat16
    return getattr(guards, f"_empty_strided_{kind}", None) if able else None


@lru_cache(maxsize=4096)  # a run has few shapes, and each allocation asks
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a dense tensor, as torch has them: an empty dimension counts as one of 1."""
    step = 1
    strides = []
    for n in reversed(shape):
        strides.append(step)
        step *= n or 1
    return tuple(reversed(strides))


def _stream_of(stream: int, device: torch.device) -> Any:
    return torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device)


class TorchAllocator:
    """torch's caching allocator: every tensor's owner is the torch tensor of that shape and dtype."""

    __slots__ = ("_index", "_quick", "alignment", "device", "torch_device", "where")

    def __init__(self, torch_device: torch.device, device: Device) -> None:
        self.alignment = 256 if torch_device.type == "cuda" else 16  # torch gives multiples of 512 and of 64
        self.torch_device = torch_device
        self.device = device
        self._index = torch_device.index if torch_device.type == "cuda" else None
        self.where = -1 if self._index is None else self._index  # what `get_device` says of its tensors
        self._quick = _quick_empty(torch_device.type)

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """Uninitialised memory; torch allocates on its current stream, which is the runtime's."""
        index = self._index
        if self._quick is None or (index is not None and _current_device() != index):
            t = torch.empty(shape, dtype=TO_TORCH[dtype], device=self.torch_device)
        else:
            t = self._quick(tuple(shape), _strides(shape), TO_TORCH[dtype])
        return Tensor(t.data_ptr(), shape, dtype, self.device, t)

    address_of = staticmethod(torch.Tensor.data_ptr)

    def makers(self, given: dict[Any, Any], takes: Sequence[Take]) -> dict[int, Callable[[], torch.Tensor]]:
        """By slot, what takes the memory of a tape (te_core/tape), one call in C each; the tape keeps it in `given`."""
        if self._index is not None and _current_device() != self._index:
            return {take.slot: self._maker(take, None) for take in takes}
        try:
            found: dict[int, Callable[[], torch.Tensor]] = given[self]
        except KeyError:
            found = given[self] = {take.slot: self._maker(take, self._quick) for take in takes}
        return found

    def _maker(self, take: Take, quick: Any) -> Callable[[], torch.Tensor]:
        shape, dtype = take.shape, TO_TORCH[take.dtype]
        if quick is None:
            return partial(torch.empty, shape, dtype=dtype, device=self.torch_device)
        return partial(quick, tuple(shape), _strides(shape), dtype)

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """torch gives the memory to nobody before the work that is on `stream` when it is freed is done."""
        owner = tensor.memory
        if self._index is not None and isinstance(owner, torch.Tensor):
            owner.record_stream(_stream_of(stream, self.torch_device))

    def beside(self, stream: int) -> TorchAllocator:
        """One whose memory belongs to another stream than torch's current one."""
        return self if self._index is None else _StreamAllocator(self.torch_device, self.device, stream)


class _StreamAllocator(TorchAllocator):
    """The same for a stream that is not torch's current one."""

    __slots__ = ("_stream",)

    def __init__(self, torch_device: torch.device, device: Device, stream: int) -> None:
        super().__init__(torch_device, device)
        self._stream = _stream_of(stream, torch_device)

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """Uninitialised memory of that stream."""
        t = self._made(shape, TO_TORCH[dtype])
        return Tensor(t.data_ptr(), shape, dtype, self.device, t)

    def _maker(self, take: Take, quick: Any) -> Callable[[], torch.Tensor]:
        return partial(self._made, take.shape, TO_TORCH[take.dtype])

    def _made(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty(shape, dtype=dtype, device=self.torch_device)


class ShapeAllocator(TorchAllocator):
    """The same for tensors without memory (meta and fake ones)."""

    __slots__ = ()

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.device = META
        self._index = None  # of no GPU
        self.where = -2  # nowhere

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """A tensor of that shape with no memory behind it."""
        return Tensor(0, shape, dtype, META, torch.empty(shape, dtype=TO_TORCH[dtype], device=self.torch_device))


_cpu = Runtime.cpu(TorchAllocator(torch.device("cpu"), CPU))


def runtime_for(t: torch.Tensor) -> Runtime:
    """The runtime of the tensor's device and its current stream (one look-up).

    In a capture each call has a fresh one: its scratch memory goes back, when the call ends, to the pool that torch
    keeps for the graph, so that neither eager code nor another graph is ever given it.
    """
    if t.is_cuda:
        index = t.get_device()
        key = (index, _current_stream(index))  # type: ignore[misc]
        found = _runtimes.get(key)
        if found is None:
            found = _runtimes[key] = Runtime.cuda(
                index, key[1], TorchAllocator(torch.device("cuda", index), _DEVICES[index])
            )
        # The default stream cannot be captured: nobody asks there, for a fifth of a microsecond.
        return found.fresh() if key[1] and _capturing() else found
    if t.is_cpu:
        return _cpu
    if t.is_meta:
        return shape_runtime(t.device)
    raise ArgumentError(
        "te_torch", f"a tensor on {t.device}", "CUDA, CPU and meta tensors", "move the module and its input there"
    )


def shape_runtime(device: torch.device) -> Runtime:
    """A runtime that makes outputs of the right shape on `device` and computes nothing."""
    return Runtime.meta(ShapeAllocator(device))


def no_memory(operation: str, what: str) -> UnsupportedError:
    """What is raised for a tensor whose values do not lie in memory as its shape says."""
    return UnsupportedError(
        operation, what, "tensors with values in memory", "make it dense, or call the layer outside of the transform"
    )


def nested(operation: str) -> UnsupportedError:
    """What is raised for a nested tensor, of which nothing has one shape."""
    return UnsupportedError(
        operation,
        "a nested tensor",
        "tensors of one shape",
        "pad it (torch.nested.to_padded_tensor), or join its parts and say cu_seqlens (qkv_format='thd')",
    )


def is_dtensor(t: Any) -> bool:
    """Whether it is a part of a tensor that is spread over processes, as torch.distributed.tensor has them."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # who has a DTensor has imported it
    return module is not None and isinstance(t, module.DTensor)


def refuse_dtensor(t: Any) -> None:
    """Raise for a DTensor: its values lie in a tensor of this process, which may be a part of them, and no layer says
    what its result would be a part of.
    """
    if is_dtensor(t):
        raise UnsupportedError(
            "te_torch",
            f"a DTensor of shape {tuple(t.shape)} with placements {tuple(t.placements)}",
            "plain tensors, as modules that fully_shard wrapped have them in their forward",
            "pass t.to_local() or t.full_tensor(); spread parameters by fully_shard and call the module it wrapped "
            "(or its unshard() before), or split them by tp_group",
        )


#: Below lie addresses of tensors whose memory was freed: where they begin in it, FSDP1's parameters being views.
LOW = 1 << 33


def was_freed(t: torch.Tensor) -> bool:
    """Whether a plain tensor has lost its memory (some interpreters have memory at low addresses, too)."""
    return (
        t.data_ptr() < LOW
        and t.numel() > 0
        and not t.is_meta
        and not t._is_zerotensor()
        and not t.untyped_storage().data_ptr()
    )


def freed(t: torch.Tensor) -> UnsupportedError:
    """What is raised for it."""
    return UnsupportedError(
        "te_torch",
        f"a {type(t).__name__} of shape {tuple(t.shape)} without memory, as FSDP leaves a parameter behind its unit's "
        "forward",
        "tensors with values in memory",
        "read the parameter inside that forward (and return a clone of it), or call unshard() of its unit before",
    )


def to_core(t: torch.Tensor, strided: bool = False) -> Tensor:
    """A core view of a torch tensor, which becomes its owner. What is there is taken as it lies: the tensor must be
    contiguous, unless `strided`. Of one whose sign waits (torch's negative bit) the view is of a copy, only to be read.
    """
    if t.is_neg():
        t = t.resolve_neg()
    strides = None if t.is_contiguous() else t.stride()
    if strides is not None and not strided:
        raise ArgumentError(
            "te_torch",
            f"a tensor of shape {tuple(t.shape)} with strides {strides}",
            "a contiguous one here",
            "pass t.contiguous()",
        )
    return in_place(t, strides)


def in_place(t: torch.Tensor, strides: Any = None) -> Tensor:
    """The same of a tensor that is known to be contiguous, and to have no sign that waits."""
    device = _DEVICES[t.get_device()] if t.is_cuda else CPU
    address = t.data_ptr()
    if not address:  # nothing is in it, or this is no memory for a kernel
        refuse_dtensor(t)
    return Tensor(address, t.shape, TO_CORE[t.dtype], device, t, strides)


def to_core_shape(t: torch.Tensor) -> Tensor:
    """A core view without memory, for shape inference."""
    return Tensor(0, tuple(t.shape), TO_CORE[t.dtype], META, t)


def to_torch(t: Tensor) -> torch.Tensor:
    """The torch tensor behind a dense core tensor made by a torch runtime or by `to_core`."""
    owner: Any = t.owner
    if type(owner) is Tensor:
        return piece_to_torch(t)
    return owner if owner.shape == t.shape else owner.view(t.shape)


def check_input(operation: str, inp: torch.Tensor, width: int) -> None:
    """The input is a float tensor of the module's width."""
    if getattr(inp, "dtype", None) not in FLOATS:
        check_dtype(operation, inp)
    try:
        fits = inp.ndim > 0 and inp.shape[-1] == width
    except RuntimeError as error:
        raise nested(operation) from error
    if not fits:
        raise ArgumentError(
            operation, f"an input of shape {tuple(inp.shape)}", f"[*, {width}]", "check the module's in_features"
        )


def check_dtype(operation: str, t: torch.Tensor) -> None:
    """Activations and parameters are tensors in float32, bfloat16 or float16."""
    dtype: Any = getattr(t, "dtype", None)
    if dtype in FLOATS:
        return
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(operation, f"an input of type {type(t).__name__}", "a tensor", "pass a tensor")
    raise ArgumentError(
        operation, str(dtype), "float32, bfloat16 or float16", "convert the tensor to one of these types"
    )


def piece_to_torch(t: Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A torch view of a dense core tensor that lies anywhere in memory whose owner is a contiguous torch tensor.

    `dtype` names another type of the same width (the bytes of FP8 data as uint8).
    """
    owner: Any = t.owner
    while type(owner) is Tensor:  # a piece's owner is the block it lies in
        owner = owner.owner
    dtype = dtype or TO_TORCH[t.dtype]
    begin = t.ptr if t.device is META else t.ptr - owner.data_ptr() if t.size else 0
    flat = owner.reshape(-1).view(torch.uint8)
    return flat[begin : begin + t.size * dtype.itemsize].view(dtype).view(t.shape)
