"""Base of quantizers: what turns a plain tensor into a quantized one, and by which rule."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from te_core.errors import ArgumentError
from te_core.precision import Operand
from te_core.quantized import Format as StorageFormat
from te_core.recipe import Format
from te_core.recipe_fields import require_delayed, require_format
from te_torch.runtime import default_device
from te_torch.tensors import kinds, run
from te_torch.tensors.buffers import Buffers, matrix_of
from te_torch.values import check_flags, check_numbers


class Quantizer:
    """Builds quantized tensors by one rule.

    `rowwise_usage` and `columnwise_usage` say which copies it makes; `internal` that it returns storages instead of
    torch tensors. Tensors keep a copy of their quantizer, to be quantized anew by it. `operand` is the rule as the core
    has it (None: no quantization). Scales are always stored as documented, so `optimize_for_gemm` changes nothing.
    """

    custom = False
    nonfinite: torch.Tensor | None = None  # int64 [2]: raised by the NaNs and infinities that are cast
    _RECIPE: Any = None  # the recipe class whose modules may use these tensors
    #: Attributes that two quantizers of equal value share, for a class itself, not for what is derived from it; None:
    #: a quantizer equals only itself.
    _VALUE: tuple[str, ...] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_VALUE" not in cls.__dict__:
            cls._VALUE = None

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self._check(rowwise=rowwise, columnwise=columnwise)
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False
        self.optimize_for_gemm = False

    def _check(self, amax_epsilon: float = 0.0, **flags: bool) -> None:
        """Refuse values that a rule cannot have."""
        check_flags(type(self).__name__, **flags)
        check_numbers(type(self).__name__, amax_epsilon=amax_epsilon)

    # ------------------------------------------------------------------------------- what a subclass says

    @property
    def operand(self) -> Operand | None:
        """The rule as plain data."""
        raise NotImplementedError(f"{type(self).__name__} has no rule of the core")

    def _inputs(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """The tensors that this cast reads besides x (scale, amax, rng)."""
        return {}

    def _lasting(self) -> tuple[torch.Tensor, ...] | None:
        """The scale and the amax of all its casts, or nothing; None where a cast reads others, or is no common one."""
        cls = type(self)
        return () if cls._inputs is Quantizer._inputs and cls._cast is Quantizer._cast else None

    def _notes(self) -> tuple[torch.Tensor, ...]:
        """The tensors that this cast writes besides its result: an update that is skipped leaves them alone."""
        return ()

    def _options(self) -> tuple[Any, ...]:
        """What a tensor of this quantizer knows beyond its format."""
        return ()

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Note the statistics of a tensor that stays in high precision; most rules keep none."""

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Whether a piece of this shape can be quantized by itself, for an all-gather of quantized pieces."""
        return True

    def is_requantization_safe(self) -> bool:
        """Whether the same values, quantized again later, give the same tensor: no state, no draw."""
        return False

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether an all-gather moves the rowwise copy alone."""
        return False

    def _get_compatible_recipe(self) -> Any:
        return self._RECIPE

    # ------------------------------------------------------------------------------------- making tensors

    @property
    def format(self) -> StorageFormat:
        """The storage format of what it makes."""
        rule = self.operand
        assert rule is not None
        return rule.format

    def __call__(self, tensor: torch.Tensor) -> Any:
        """The tensor, quantized."""
        return self.quantize(tensor)

    def quantize(self, tensor: torch.Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> Any:
        """The tensor, quantized; into `out` if given. `dtype` is what the result presents as."""
        if out is not None:
            return self.update_quantized(tensor, out)
        if not self.internal and torch.is_grad_enabled() and tensor.requires_grad:
            return _Quantize.apply(tensor, self, dtype)
        return self._made(tensor, dtype)

    def _made(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> Any:
        made = self.quantize_impl(_dense(tensor))
        if dtype is not None and dtype != made._dtype:
            made = made.to_dtype(dtype)
        return made

    def quantize_impl(self, tensor: torch.Tensor) -> Any:
        """A plain tensor, quantized: what a new format overrides."""
        return self._wrap(self._cast(tensor, self.rowwise_usage, self.columnwise_usage), tensor.shape, tensor.dtype)

    def multi_quantize(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        """Each tensor, quantized."""
        return [self.quantize(t) for t in tensors]

    def _cast(self, tensor: torch.Tensor, rowwise: bool, columnwise: bool) -> Buffers:
        if not (rowwise or columnwise):
            raise ArgumentError(
                type(self).__name__, "neither rowwise nor columnwise usage", "at least one", "call set_usage()"
            )
        x = run.plain(tensor)
        rule = self.operand
        assert rule is not None
        with torch.no_grad():
            return run.quantize(x, rule, rowwise, columnwise, nonfinite=self.nonfinite, **self._inputs(x))

    def _cast_into(self, tensor: torch.Tensor, storage: Any) -> bool:
        """Quantize a matrix straight into a storage's buffers; False where they are not as a cast writes them."""
        if type(self)._cast is not Quantizer._cast or not run.is_real(tensor) or tensor.is_meta:
            return False
        rule = self.operand
        views = storage._views_to_write()
        if views is None or rule is None or rule.format is not storage._format:
            return False
        with torch.no_grad():
            x = run.plain(tensor)
            run.quantize_into(views, x, rule, **self._inputs(x))
        return True

    def _wrap(self, buffers: Buffers, shape: Sequence[int], dtype: torch.dtype, requires_grad: bool = False) -> Any:
        kind = kinds.of_format(self.format)
        quantizer = self.copy()
        cls = kind.storage if self.internal else kind.tensor
        made = cls._of(tuple(shape), dtype, self.format, buffers, quantizer, self._options())
        return made.requires_grad_() if requires_grad and not self.internal else made

    def update_quantized(self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Quantize `src` into the buffers of `dst`; not if `noop_flag` (float32, on the device) is 1."""
        if tuple(src.shape) != tuple(dst.shape):
            raise ArgumentError(
                "update_quantized", f"a source of shape {tuple(src.shape)}", f"{tuple(dst.shape)}", "correct the shape"
            )
        with torch.no_grad():
            dst._update(self, _dense(src), noop_flag)
        return dst

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """An uninitialised quantized tensor (on the GPU, if there is one and no device is named)."""
        shape = tuple(shape)
        place = torch.device(device) if device is not None else default_device()
        buffers = run.empty(self.format, matrix_of(shape), self.rowwise_usage, self.columnwise_usage, place)
        if pin_memory:
            buffers = Buffers(*[None if b is None else b.pin_memory() for b in buffers])
        return self._wrap(buffers, shape, dtype, requires_grad)

    # Without data, for compilers: `__tensor_unflatten__` of the class that is made, given what `alloc_tensors` and
    # `create_metadata` return, is a tensor as `make_empty` makes it.

    def alloc_tensors(self, shape: Iterable[int], *, device: Any = None) -> dict[str, torch.Tensor]:
        """Uninitialised buffers of a tensor of this shape, by the names under which `__tensor_flatten__` lists them."""
        made = self.make_empty(shape, device=device)
        return {name: getattr(made, name) for name in made.__tensor_flatten__()[0]}

    def inner_tensor_specs(self, shape: Iterable[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each of them, without making one."""
        return {n: (tuple(t.shape), t.dtype) for n, t in self.alloc_tensors(shape, device="meta").items()}

    def create_metadata(self, shape: Iterable[int], *, dtype: torch.dtype, requires_grad: bool = False) -> Any:
        """What a tensor of this shape is besides its buffers; whether it requires a gradient is no part of that."""
        return self.make_empty(shape, dtype=dtype, device="meta").__tensor_flatten__()[1]

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """The keyword arguments of a storage's constructor that are no buffers."""
        metadata = self.make_empty((0, 0), dtype=fake_dtype, device="meta").get_metadata()
        return {k: v for k, v in metadata.items() if not isinstance(v, torch.Tensor) and v is not None}

    # --------------------------------------------------------------------------------------------- usages

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose which copies are made; None leaves a choice as it is."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        """Which copies are made."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self) -> Any:
        """A quantizer of its own with the same rule, without process group; scale and amax are shared."""
        made: Any = copy.copy(self)
        if getattr(made, "amax_reduction_group", None) is not None:
            made.amax_reduction_group = None
        return made

    # ------------------------------------------------------------------------------------ export, identity

    def onnx_quantize(self, tensor: torch.Tensor) -> torch.Tensor:
        """The cast in operators that ONNX knows."""
        raise NotImplementedError(f"{type(self).__name__} has no ONNX form")

    def onnx_dequantize(self, tensor: Any) -> torch.Tensor:
        """The values of what `onnx_quantize` gave, in operators that ONNX knows."""
        raise NotImplementedError(f"{type(self).__name__} has no ONNX form")

    def _value(self) -> tuple[Any, ...]:
        assert self._VALUE is not None
        if getattr(self, "amax_reduction_group", None) is not None:
            raise TypeError(f"{type(self).__name__} with a process group is no constant: leave the group out")
        names = (*self._VALUE, "rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm")
        return (type(self), *[getattr(self, n) for n in names])

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if self._VALUE is None or type(other) is not type(self):
            return False
        return self._value() == other._value()

    def __hash__(self) -> int:
        return id(self) if self._VALUE is None else hash(self._value())

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if "amax_reduction_group" in state:
            state["amax_reduction_group"] = None
        return state

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rowwise={self.rowwise_usage}, columnwise={self.columnwise_usage})"


def _dense(t: Any) -> torch.Tensor:
    """The values, if quantized already."""
    return t.dequantize() if hasattr(t, "_quantizer") else t


def spans(with_reduction: bool, group: Any) -> bool:
    """Whether maxima are reduced over several processes."""
    if not with_reduction or not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size(group) > 1


class _Quantize(torch.autograd.Function):
    """Quantization as the identity that it is to autograd."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, quantizer: Quantizer, dtype: torch.dtype | None) -> Any:
        return quantizer._made(tensor.detach(), dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _dense(grad), None, None


# ---------------------------------------------------------------------------------------- roles and requests


@dataclass(frozen=True)
class QuantizerRole:
    """What an operand is, as a custom recipe's factory is told."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        parts = [f"{n}={v}" for n in ("module_type", "tensor_type", "name") if (v := getattr(self, n))]
        return "|".join(parts) or "QuantizerRole()"


@dataclass(frozen=True)
class QuantizerRequest:
    """Asks the module for a quantizer that needs the module's own state."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Asks for delayed scaling; all requests of one module have equal fields."""

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        require_format(self, [form for form in Format if form is not Format.E2M1])
        require_delayed(self)


# ------------------------------------------------------------------------------------------ saving for backward


def prepare_for_saving(*tensors: Any) -> tuple[list[torch.Tensor | None], list[Any]]:
    """Tensors for `ctx.save_for_backward`, and what is needed to put storages together again."""
    flat: list[torch.Tensor | None] = []
    objects: list[Any] = []
    for t in tensors:
        if t is None or isinstance(t, torch.Tensor):
            flat.append(t)
            objects.append(None)
        else:
            inner, rest = t.prepare_for_saving()
            flat.extend(inner)
            objects.append(rest)
    return flat, objects


def restore_from_saved(
    tensors: list[Any], saved_tensors: Sequence[torch.Tensor | None], return_saved_tensors: bool = False
) -> Any:
    """What was given to `prepare_for_saving`; `tensors` is the second thing it returned."""
    remaining = list(saved_tensors)
    made: list[Any] = []
    for t in tensors:
        if t is None:
            made.append(remaining.pop(0))
        else:
            remaining = list(t.restore_from_saved(remaining))
            made.append(t)
    return (made, remaining) if return_saved_tensors else made


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:
    """What was saved in an autograd context with `tensor_objects`, which is let go of."""
    objects = ctx.tensor_objects
    if objects is None:
        raise AttributeError("ctx.tensor_objects: restored already, or never set")
    made = restore_from_saved(objects, ctx.saved_tensors, return_saved_tensors)
    ctx.tensor_objects = None
    return made
