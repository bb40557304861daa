"""`Linear`: y = x w^T + b, and the split of one weight into named parts that LayerNormLinear shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.layers import linear as core
from te_torch.base.module import normal_init
from te_torch.base.options import check_options
from te_torch.base.weights import check_whole
from te_torch.calls import OF_LINEAR
from te_torch.export import layers
from te_torch.forks import fork_of
from te_torch.function import of_table
from te_torch.modules.layer import LayerModule
from te_torch.runtime import default_device, outside_autocast
from te_torch.values import is_size

LINEAR = of_table(
    "linear",
    core.LinearSaved,
    linears=lambda s: (s,),
    copies=lambda saved: (saved.w,),
    plain=layers.linear,
    slots=OF_LINEAR,
)


class RowsError(ArgumentError, RuntimeError):
    """Parts of a weight that cannot be spread over ranks; a RuntimeError, as documented, too."""


class SplitParameters(LayerModule):
    """A module with a weight [out, in] and bias [out], in one piece or in named parts of the output."""

    ub_name: str | None = None  # of the weight's GEMMs, in ub_cfgs

    def _add_linear_parameters(
        self,
        shape: tuple[int, int],
        bias: bool,
        split: Any,
        init_method: Callable[[torch.Tensor], Any] | None,
        **placement: Any,
    ) -> None:
        """A weight of this shape: all of its rows, this rank's columns."""
        init = init_method or normal_init
        self._parts = split_sizes(type(self).__name__, split, shape[0])
        if self.tp_size > 1 and self.parallel_mode == "column":
            wrong = [f"{prefix}weight of {rows} rows" for prefix, rows in self._parts.items() if rows % self.tp_size]
            if wrong:
                raise RowsError(
                    type(self).__name__,
                    f"{', '.join(wrong)} over {self.tp_size} ranks",
                    "rows of each part that tp_size divides",
                    "correct out_features or parameters_split",
                )
            self._parts = {prefix: rows // self.tp_size for prefix, rows in self._parts.items()}
        for prefix, size in self._parts.items():
            self._add_parameter(f"{prefix}weight", (size, shape[1]), init, **placement)
        self.use_bias = bias
        for prefix, size in self._parts.items():
            self._add_bias(f"{prefix}bias", size, bias, **placement)

    def _finish_weights(self, fuse: bool, delay: bool) -> None:
        """What follows once the parameters are there: marks, quantized storage, and where weight gradients go."""
        self._part_names = {kind: tuple(f"{p}{kind}" for p in self._parts) for kind in ("weight", "bias")}
        self.weight_names, self.bias_names = map(list, self._part_names.values())
        self._mark_parallel(1 if self.parallel_mode == "row" else 0, *self.weight_names)
        if self.use_bias and self.parallel_mode == "column":
            self._mark_parallel(0, *self.bias_names)
        elif self.parallel_mode == "row":
            self._mark_sequence(*self.bias_names)
        check_whole(type(self).__name__, self._parts, fuse or delay)
        self._quantize_parameters()
        self._accumulate(fuse, delay)

    def _weight_names(self) -> tuple[str, ...]:
        return self._part_names["weight"]

    def _options(self) -> dict[str, Any]:
        parts = {prefix.rstrip("_"): size for prefix, size in self._parts.items()}
        sizes = {"in_features": self.in_features, "out_features": self.out_features, "bias": self.use_bias}
        return {**sizes, "return_bias": self.return_bias, "parameters_split": None if "" in parts else parts}

    def _parts_of(self, name: str) -> list[torch.Tensor]:
        return [getattr(self, n) for n in self._weight_names()]

    def _spread(self) -> tuple[tuple[str | None, str | None], ...]:
        return ((self.parallel_mode, self.ub_name),)

    def _arguments(self, dtype: torch.dtype, precision: int) -> dict[str, torch.Tensor | None]:
        weight: torch.Tensor | None = self._parameters.get("weight")
        if weight is None or weight.dtype != dtype:  # hardly ever
            parts = [self._weight(name, dtype, precision) for name in self._part_names["weight"]]
            weight = parts[0] if "" in self._parts else _joined(parts)
        bias = None if self.return_bias else self._bias("bias", dtype)
        return {**super()._arguments(dtype, precision), "weight": weight, "bias": bias}

    def _bias(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        bias: torch.Tensor | None = self._parameters.get("bias")
        if bias is not None and bias.dtype == dtype:  # nearly always
            return bias
        if not self.use_bias:
            return None
        # Each part by itself, as a plan converts them (`Plan._made`): torch.cat would make a wider dtype of two.
        parts = [self._tensor(name).to(dtype) for name in self._part_names["bias"]]
        return parts[0] if "" in self._parts else _joined(parts)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    if torch._C._is_any_autocast_enabled():
        with outside_autocast(parts[0]):
            return torch.cat(parts)
    return torch.cat(parts)


def split_sizes(operation: str, split: Any, total: int) -> dict[str, int]:
    """{parameter prefix: rows}; one part without a prefix if nothing is split."""
    if split is None:
        return {"": total}
    got = f"parameters_split={split!r}"
    if isinstance(split, Mapping):
        sizes = dict(split)
    elif isinstance(split, Sequence) and not isinstance(split, str):
        if not split or total % len(split):
            raise ArgumentError(
                operation,
                f"{got} of {total} rows",
                "names that divide the rows evenly",
                "give a dict of name: size for unequal parts",
            )
        sizes = {name: total // len(split) for name in split}
    else:
        raise TypeError(f"{operation}: parameters_split must be a tuple, a list or a dict, not {type(split).__name__}")
    if not all(isinstance(name, str) for name in sizes):
        raise TypeError(f"{operation}: the names in parameters_split must be strings: {list(sizes)!r}")
    if not sizes or not all(map(is_size, sizes.values())) or sum(sizes.values()) != total:
        raise ArgumentError(
            operation, got, f"parts of at least a row whose sizes add up to {total}", "correct the sizes"
        )
    parts = {f"{name.rstrip('_')}_": int(size) for name, size in sizes.items()}
    if len(parts) < len(sizes):
        raise ArgumentError(operation, got, "names that differ in more than trailing underscores", "rename one")
    return parts


class Linear(SplitParameters, layer=LINEAR):
    """y = x w^T + b, in the precision of the active `autocast` region.

    Raises:
        ArgumentError: An argument has a value that is not allowed, or sizes do not divide by the ranks.

    Example:
        from te_torch.recipe import Float8CurrentScaling

        layer = te.Linear(256, 512, bias=False, params_dtype=torch.bfloat16, device="cpu")
        with te.autocast(recipe=Float8CurrentScaling(), emulate=True):
            y = layer(torch.randn(32, 256, dtype=torch.bfloat16))  # [32, 512]
    """

    _takes_quantized = True

    def __init__(
        self,
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
        parameters_split: Any = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        check_options("Linear", options)
        super().__init__(name)
        self._spread_over(tp_size, tp_group, sequence_parallel)
        self._take_shape(in_features, out_features, parallel_mode)
        self._take_overlap(options)
        self.symmetric_ar_type = symmetric_ar_type
        self.return_bias, self.save_original_input = return_bias, bool(save_original_input)
        self._fork = fork_of(get_rng_state_tracker, rng_tracker_name)
        self._add_linear_parameters(
            (out_features, self.in_features),
            bias,
            parameters_split,
            init_method,
            dtype=params_dtype or torch.get_default_dtype(),
            device=device or default_device(),
        )
        self._finish_weights(fuse_wgrad_accumulation, delay_wgrad_compute)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """out [*, out_features], or (out, bias) with `return_bias`, where the bias is not added."""
        return self._call((inp,), (is_first_microbatch, fp8_output, fp8_grad))
