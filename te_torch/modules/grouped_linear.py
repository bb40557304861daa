"""`GroupedLinear`: a linear for each group of rows, the experts of a mixture-of-experts layer.

Splits in a list never wait for the GPU. On Hopper products read sizes on the device, in bfloat16 and float16, plain or
with delayed, current or block scaling: a tensor on the GPU stays there, and new sizes lead to no new recording.
Elsewhere a tensor on the GPU costs a copy to the host in each forward, counted in `GroupedLinear.host_copies`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch

from te_core import env
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers import grouped_linear as core
from te_core.layers.entries import Asked
from te_core.layers.linear import Needs
from te_core.layers.table import LAYERS
from te_core.tensor import dense_strides
from te_torch.base.checkpoint_state import WithExtraState
from te_torch.base.module import BaseModule, normal_init
from te_torch.base.options import check_options
from te_torch.base.quantized_init import check_recipe_fits, initialising
from te_torch.base.weights import Gradients
from te_torch.calls import families, named
from te_torch.doors import either, never_traced
from te_torch.draws import random_pair
from te_torch.export import layers
from te_torch.export.mode import exporting
from te_torch.forks import fork_of
from te_torch.function import Call, Extra, Layer, apply, register
from te_torch.module_names import within
from te_torch.modules.grouped_traced import apply_traced, checked_sizes, groups_of, on_host_copy, rows_of
from te_torch.modules.layer import empty_bias, keeps_original, returned_bias
from te_torch.precisions import draws
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import TO_CORE, check_input, default_device, to_core, to_core_shape

_SINGLE = "NVTE_GROUPED_LINEAR_SINGLE_PARAM"


def _layer(num_gemms: int) -> Layer:
    name = f"grouped_linear_{num_gemms}"
    return named(name) or Layer(
        name,
        core.forward,
        core.backward,
        core.GroupedSaved,
        weights=tuple(range(1, 1 + num_gemms)),
        linears=lambda spec: spec.parts,
        copies=lambda saved: saved[1 + 2 * num_gemms :],
        plain=layers.grouped_linear,
    )


def _layer_of_stack(num_gemms: int) -> Layer:
    """The same with one weight [num_gemms, out_features, in_features]."""
    name = f"grouped_stack_{num_gemms}"
    return named(name) or Layer(
        name, core.forward_of_stack, core.backward_of_stack, core.GroupedSaved, weights=(1,),
        linears=lambda spec: spec.parts,
    )  # fmt: skip


families["grouped_linear"], families["grouped_stack"] = _layer, _layer_of_stack


class GroupedLinear(BaseModule):
    """y_i = x_i w_i^T + b_i for groups of rows x_i of one input, in the precision of the active `autocast` region.

    Each group is quantized by itself, with scales of its own. Under `torch.compile` the splits may be a list, whose
    numbers the compiler guards on, or a tensor, whose values no program depends on.

    Raises:
        ArgumentError: An argument has a value that is not allowed.

    Example:
        experts = te.GroupedLinear(2, 256, 512, bias=False, device="cpu")
        y = experts(torch.randn(32, 256), [20, 12])  # [32, 512]
    """

    #: Forwards that had to copy their splits from a GPU, over all modules.
    host_copies = 0
    #: Whether `single_grouped_weight` is on without being asked for.
    _one_weight = False

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        check_options("GroupedLinear", options)
        _check_options(options)
        super().__init__(name)
        self.num_gemms = self.gemms = num_gemms
        asked = env.switch(_SINGLE)
        self.single_grouped_weight = self._one_weight or bool(asked and single_grouped_weight)
        self.single_grouped_bias = bool(asked and single_grouped_bias and bias)
        self.wgrad_store = Gradients(1 if self.single_grouped_weight else num_gemms)
        self._spread_over(tp_size, tp_group, sequence_parallel)
        if self.tp_size > 1 and bias:
            raise ArgumentError(
                "GroupedLinear", f"bias=True with tp_size={self.tp_size}", "bias=False there", "leave it out"
            )
        self._take_shape(in_features, out_features, parallel_mode)
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = bool(save_original_input)
        self._fork = fork_of(get_rng_state_tracker, rng_tracker_name)
        self._names, self._bias_names = (tuple(f"{kind}{i}" for i in range(num_gemms)) for kind in ("weight", "bias"))
        place = {"dtype": params_dtype or torch.get_default_dtype(), "device": device or default_device()}
        shape, init = (self.out_features, self.in_features), init_method or normal_init
        if self.single_grouped_weight:
            if initialising():
                do = "leave single_grouped_weight out, or construct the module outside"
                raise UnsupportedError("GroupedLinear", "single_grouped_weight inside quantized_model_init",
                                       "a weight for each group there", do)  # fmt: skip
            self._add_parameter("weight", (num_gemms, *shape), partial(_each_part, init), **place)
        if self.single_grouped_bias:
            self._add_parameter("bias", (num_gemms, self.out_features), torch.nn.init.zeros_, **place)
        for i in range(num_gemms):
            if not self.single_grouped_weight:
                self._add_parameter(f"weight{i}", shape, init, **place)
            if not self.single_grouped_bias:
                self._add_bias(f"bias{i}", self.out_features, bias, **place)
        weights = self._weight_names()
        biases = ("bias",) if self.single_grouped_bias else self._bias_names
        # The dimension of the groups comes first.
        self._mark_parallel(int(self.single_grouped_weight) + (self.parallel_mode == "row"), *weights)
        if bias and self.parallel_mode == "column":
            self._mark_parallel(int(self.single_grouped_bias), *biases)
        elif self.parallel_mode == "row":
            self._mark_sequence(*biases)
        self._quantize_parameters()
        self._accumulate(fuse_wgrad_accumulation, delay_wgrad_compute)

    def _weight_names(self) -> tuple[str, ...]:
        return ("weight",) if self.single_grouped_weight else self._names

    def _gemm_names(self) -> tuple[str, ...]:
        return self._names

    def _parts_of(self, name: str) -> list[torch.Tensor]:
        if not self.single_grouped_weight:
            return super()._parts_of(name)
        return [self._tensor("weight").detach()[self._names.index(name)]]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """As every module's; what is one parameter here may be one for each group there, and the other way round."""
        for kind, names in (("weight", self._names), ("bias", self._bias_names)):
            whole, parts = f"{prefix}{kind}", [prefix + name for name in names]
            if kind in self._parameters:
                if whole not in state_dict and all(part in state_dict for part in parts):
                    state_dict[whole] = torch.stack([state_dict.pop(part) for part in parts])
            elif whole in state_dict:
                state_dict.update(zip(parts, state_dict.pop(whole).unbind(), strict=False))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """As every module's; of this one asked for by itself, `["_extra_state"]` is its state, packed as documented."""
        if not args and options.get("destination") is None:
            options["destination"] = WithExtraState(self, options.get("prefix", ""))
        return super().state_dict(*args, **options)

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> Any:
        """out [*, out_features], or (out, biases) with `return_bias`, where the biases are not added.

        The rows of inp are sorted by group, `m_splits` says how many each group has (0 allowed). `out` and
        `dgrad_out` are buffers of at least as many rows for the result and for the gradient of inp, which then
        lie in them.
        """
        tracing = either(False, True) and not exporting.on
        if tracing and (out is not None or dgrad_out is not None):
            return _into_buffers(self, inp, m_splits, is_first_microbatch, out, dgrad_out)
        if isinstance(inp, QuantizedTorch):
            raise TypeError(
                f"GroupedLinear.forward{within(self)}: got a quantized input. Allowed: a plain one. To do: dequantize."
            )
        check_input("GroupedLinear.forward", inp, self.in_features)
        given: Any = m_splits
        if not tracing and not (isinstance(m_splits, torch.Tensor) and m_splits.is_cuda):
            given = checked_sizes(self.num_gemms, rows_of(inp), m_splits)
        inp, precision, state, recompute = self._enter(inp)
        dtype, grad = inp.dtype, torch.is_grad_enabled()
        stacked = self.single_grouped_weight and not either(False, True)
        if self.single_grouped_weight:
            whole = self._weight("weight", dtype, precision)
            weights = [whole] if stacked else [*whole.unbind()]
        else:
            weights = [self._weight(name, dtype, precision, i) for i, name in enumerate(self._names)]
        if self.use_bias:
            one = self.single_grouped_bias
            found = self._tensor("bias").unbind() if one else [getattr(self, n) for n in self._bias_names]
            biases = [b if b.dtype == dtype else b.to(dtype) for b in found]
        else:
            biases = [empty_bias(inp)] * self.num_gemms
        added: list[Any] = [None] * self.num_gemms if self.return_bias or not self.use_bias else biases
        key = (
            precision,
            dtype,
            grad and inp.requires_grad,
            tuple([grad and w.requires_grad for w in weights]),
            tuple([grad and b is not None and b.requires_grad for b in added]),
            None if self.inspector is None else self._watched(precision),
            weights[0].dtype if self._primary else None,
            stacked,
        )
        names, extra = self._with_extra(self._names, is_first_microbatch), None
        if names:
            each = weights[0].detach().unbind() if stacked else weights
            extra = self._extra(names, each, precision, state, recompute, is_first_microbatch)
            if stacked and isinstance(extra, Extra):
                extra.parameters = [self._tensor("weight")]
        rng = random_pair(inp, self._fork) if precision and draws(precision) else None
        call = self._find_call(key)
        if tracing:
            inputs = (inp, *weights, *added, rng)
            result = apply_traced(call, state, recompute, m_splits, inputs, extra)  # type: ignore[arg-type]
        else:
            extra = extra or Extra(None, False, None, None)
            # An export's call is its key, and numbers are part of its file.
            groups = core.Groups(given) if isinstance(call, str) else groups_of(call, inp, weights[0], given)
            own = out is not None or dgrad_out is not None
            extra.splits = self._into(groups, inp, out, dgrad_out) if own else groups  # type: ignore[union-attr]
            (result,) = apply(call, state, recompute, inp, *weights, *added, rng, extra=extra)
            if out is not None and result.requires_grad:
                _in_buffers[out.data_ptr()] = result
        if not self.return_bias:
            return result
        return result, [returned_bias(self, bias, (f"bias{i}",)) for i, bias in enumerate(biases)]

    def _into(
        self, groups: core.Groups, inp: torch.Tensor, out: torch.Tensor | None, dgrad_out: torch.Tensor | None
    ) -> core.Groups:
        """These groups, with the caller's buffers for their results."""
        y = None if out is None else _buffer("out", out, inp, self.out_features)
        dx = None if dgrad_out is None else _buffer("dgrad_out", dgrad_out, inp, self.in_features)
        _check_apart(inp=inp, out=out, dgrad_out=dgrad_out)
        before = None if out is None else _in_buffers.get(out.data_ptr())
        if before is not None:
            torch.autograd.graph.increment_version(before)
        return groups._replace(out=y, dx=dx)

    def _facts(self) -> tuple[Any, ...]:
        return *super()._facts(), self.save_original_input, self.single_grouped_weight

    def _new_call(self, precision: int, dtype: torch.dtype, *key: Any) -> Call:
        before, weights, biases, _, weight_dtype, stacked = key
        weights = weights * self.num_gemms if stacked else weights
        rules = [self._precision(precision, gemm) if precision else None for gemm in range(self.num_gemms)]
        check_recipe_fits(self, rules[0])
        kind = None if weight_dtype is None else TO_CORE[weight_dtype]
        products: list[dict[str, Any]] = [
            {
                "precision": rule,
                "needs": Needs(before, weight, bias),
                "inspect": request,
                "weight_dtype": kind,
                "original_input": keeps_original(self, precision, rule),
            }
            for rule, weight, bias, request in zip(rules, weights, biases, self._requests(), strict=True)
        ]
        asked = Asked({"num_gemms": self.num_gemms}, TO_CORE[dtype], products=products)
        spec = LAYERS["grouped_linear"].spec(asked)
        needed = before or any(weights) or any(biases)
        layer = (_layer_of_stack if stacked else _layer)(self.num_gemms)
        return register(layer, spec, needed, self._inspectors())

    def _options(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in ("num_gemms", "in_features", "out_features")}
        single = {k: True for k in ("single_grouped_weight", "single_grouped_bias") if getattr(self, k)}
        return {**sizes, "bias": self.use_bias, "return_bias": self.return_bias, **single}


def _each_part(init: Callable[[torch.Tensor], Any], stack: torch.Tensor) -> None:
    """Draw one matrix after the other, as they are drawn where each is a parameter."""
    for part in stack:
        init(part)


def _count_copy() -> None:
    GroupedLinear.host_copies += 1


on_host_copy.append(_count_copy)
#: GroupedLinear.forward for traced code: never traced, it writes into memory of the caller's.
_into_buffers = never_traced("GroupedLinear with buffers of the caller's runs eagerly")(GroupedLinear.forward)

#: By the address of a caller's buffer: the result in it. The next one makes autograd notice where that was saved.
_in_buffers: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def _buffer(name: str, buffer: torch.Tensor, inp: torch.Tensor, width: int) -> Any:
    """The part of a caller's buffer that this call fills, as the core sees it."""
    rows = inp.numel() // max(1, inp.shape[-1])
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(
            f"GroupedLinear.forward: {name} must be a tensor, not {type(buffer).__name__}. To do: pass one."
        )
    lasting = torch.is_inference_mode_enabled() or not buffer.is_inference()
    if (
        buffer.ndim != 2
        or not lasting
        or type(buffer) not in (torch.Tensor, torch.nn.Parameter)
        or not buffer.is_contiguous()
        or buffer.requires_grad
        or buffer.dtype != inp.dtype
        or buffer.device != inp.device
        or buffer.shape[0] < rows
        or buffer.shape[1] != width
    ):
        grad = ", requires_grad" if buffer.requires_grad else "" if lasting else ", made in inference mode"
        raise ArgumentError(
            "GroupedLinear.forward",
            f"{name} {tuple(buffer.shape)} of {buffer.dtype} on {buffer.device}{grad}",
            f"a dense [{rows} or more, {width}] of {inp.dtype} on {inp.device} without gradient",
            "correct the buffer",
        )
    # Not a view: it may be changed in place, and what else lies in a caller's pool has versions of its own.
    shape = (*inp.shape[:-1], width)
    place = buffer.untyped_storage(), buffer.storage_offset(), shape, dense_strides(shape)
    part = buffer.new_empty(0).set_(*place)
    return to_core_shape(part) if part.is_meta else to_core(part)


def _check_apart(**tensors: torch.Tensor | None) -> None:
    """Refuse memory of two purposes: the GEMMs of groups would read what others have written."""
    spans = [
        (name, t.data_ptr(), t.data_ptr() + t.numel() * t.element_size())
        for name, t in tensors.items()
        if t is not None and not t.is_meta
    ]
    for (name, begin, end), (other, first, last) in combinations(spans, 2):
        if begin < last and first < end:
            raise ArgumentError(
                "GroupedLinear.forward", f"{other} in the memory of {name}", "memory of its own", "pass another buffer"
            )


def _check_options(options: dict[str, Any]) -> None:
    """What the constructor refuses by itself, as documented."""
    op = "GroupedLinear"
    for name in ("ub_overlap_rs", "ub_overlap_ag"):
        if options[name]:
            raise ArgumentError(op, f"{name}=True", f"{name}=False", "leave it out: grouped GEMMs do not overlap")
    grouped = options["use_grouped_tensor"]
    variable = "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"
    if grouped is None and env.option(variable) is not None:
        warnings.warn(f"{variable} is deprecated: pass use_grouped_tensor", FutureWarning, stacklevel=3)
        grouped = env.option(variable)
    if grouped is not None and not isinstance(grouped, bool):
        raise TypeError(f"{op}: use_grouped_tensor must be a bool or None, not {type(grouped).__name__}")
    if grouped:
        warnings.warn(
            f"{op}: use_grouped_tensor=True changes nothing in this release: the groups' GEMMs run one after another",
            stacklevel=3,
        )
    for name in ("single_grouped_weight", "single_grouped_bias"):
        if options[name] and not env.switch(_SINGLE):
            warnings.warn(f"{op}: {name} needs {_SINGLE}=1 and is disabled", stacklevel=3)


__all__ = ["GroupedLinear"]
