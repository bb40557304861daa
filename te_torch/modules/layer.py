"""`LayerModule`: a module that runs one layer of the core's table, and asks the table for the layer's spec by name."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter

from te_core.errors import ArgumentError
from te_core.layers.entries import Asked
from te_core.layers.entries import Layer as Entry
from te_core.layers.table import LAYERS
from te_core.precision import Precision
from te_core.quantize.operands import repeats
from te_torch.autocast import Now
from te_torch.base.module import BaseModule
from te_torch.base.plans import Prepared
from te_torch.base.quantized_init import check_recipe_fits
from te_torch.base.residual import enter_stream
from te_torch.base.watching import Choice
from te_torch.calls import Layer
from te_torch.carried import HANDING
from te_torch.doors import either
from te_torch.draws import random_pair
from te_torch.function import Call, register
from te_torch.module_names import warn_once
from te_torch.noting import Drawn, Of, noting
from te_torch.precisions import draws, recipe_of
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import TO_CORE, check_input
from te_torch.values import check_flags

_KEPT = "save_original_input"  # an option that changes the spec of a product, not that of the layer


class LayerModule(BaseModule):
    """Its class names the layer, `class Linear(LayerModule, layer=LINEAR)`. Options of the layer are attributes.

    What `forward` hands to `_call` as options is: is_first_microbatch, then fp8_output and fp8_grad, if it takes them.
    """

    return_bias: bool
    hands_over = False  # a module around it asks for quantized outputs where its attention reads them
    _layer: Layer
    _entry: Entry
    _optional: tuple[str, ...]  # those of the constructor's arguments that are options of the layer
    _takes_quantized = False  # a quantized input is read as it is
    _operation, _features, _last_bias = "", "in_features", "bias"
    _part_names: dict[str, tuple[str, ...]] = {}  # an argument of the layer: the parameters it is made of

    def __init_subclass__(cls, layer: Layer | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if layer is not None:
            cls._layer, cls._entry, cls._operation = layer, LAYERS[layer.entry], f"{cls.__name__}.forward"
            code = cls.__init__.__code__
            taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            cls._optional = tuple(name for name in (*cls._entry.options, _KEPT) if name in taken)

    def _arguments(self, dtype: torch.dtype, precision: int) -> dict[str, torch.Tensor | None]:
        """The layer's tensors between its input and its draws, by their names in the table and in its order."""
        return {}

    def _bias(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """A bias in this dtype; None without biases."""
        raise NotImplementedError

    def _spread(self) -> tuple[tuple[str | None, str | None], ...]:
        """Of each weight how it is spread over ranks, and its name for overlap."""
        raise NotImplementedError

    def _by_mode(self) -> tuple[Any, ...]:
        """What the spec depends on, and is set without an end to the module's calls."""
        return ()

    def _facts(self) -> tuple[Any, ...]:
        return *super()._facts(), *[getattr(self, name) for name in self._optional], *self._by_mode()

    def _prepare(self, inputs: tuple[Any, ...], options: tuple[Any, ...], now: Now, stream: Any = None) -> Prepared:
        first_microbatch, *quantized = options
        x = inputs[0]
        check_input(self._operation, x, getattr(self, self._features))
        if not self._takes_quantized and isinstance(x, QuantizedTorch):
            x = x.dequantize()
        inp, precision, state, recompute = self._enter(x, now)
        named = self._arguments(inp.dtype, precision)
        branch, of_branch = enter_stream(inputs, stream, inp)
        given = {"x": inp, **named, **dict(zip(("residual", "residual_bias"), branch, strict=False))}
        wanted = [name for name, t in given.items() if t is not None and t.requires_grad]
        products = self._entry.products
        key = (
            precision,
            inp.dtype,
            tuple(wanted) if torch.is_grad_enabled() else (),
            self._by_mode(),
            stream,
            None if self.inspector is None else self._watched(precision),
            named[products[0]].dtype if self._primary else None,  # type: ignore[union-attr]
            *quantized,
        )
        rng = random_pair(inp, self._fork) if precision and draws(precision) else None
        names, extra = self._with_extra(products, first_microbatch), None
        if names:
            weights: Any = [named[name] for name in names]
            extra = self._extra(names, weights, precision, state, recompute, first_microbatch)
        of_named = [None if t is None else self._part_names.get(name, name) for name, t in named.items()]
        sources = 0, *of_named, None if rng is None else Drawn(self._fork), *of_branch
        tensors = inp, *named.values(), rng, *branch
        return Prepared(self._find_call(key), state, recompute, tensors, sources, extra, names)

    def _spec_options(self, stream: Any) -> dict[str, Any]:
        """The layer's options by name; the stream as `given_of` has it."""
        adds, p = stream or (False, 0.0)
        given = {"stream": stream is not None, "hidden_dropout": p if adds else None}
        own = {name: getattr(self, name) for name in self._optional}
        return {name: option.default for name, option in self._entry.options.items()} | given | own

    def _new_call(
        self,
        precision: int,
        dtype: torch.dtype,
        wanted: tuple[str, ...],
        _mode: Any,
        stream: Any,
        _watched: Any,
        weight_dtype: torch.dtype | None,
        *quantized: Any,
    ) -> Call:
        fp8_output, fp8_grad = quantized or (False, False)
        operation, seen = f"{type(self).__name__}.forward", self.inspector
        handed = isinstance(fp8_output, str) and fp8_output.startswith(HANDING)  # to another part, in traced code
        check_flags(operation, fp8_output=handed or fp8_output, fp8_grad=fp8_grad)
        if fp8_output and isinstance(seen, Choice) and seen.current and not self.hands_over:
            raise AssertionError(
                f"{operation} of {self.name}: fp8_output=True while a feature of precision debugging touches the "
                "layer. Allowed: plain outputs. To do: leave fp8_output out, or the layer of the config."
            )
        rules = [self._precision(precision, gemm) for gemm in range(self.gemms)]
        check_recipe_fits(self, rules[0])
        products: list[dict[str, Any]] = [
            {
                "precision": rule,
                "inspect": request,
                "weight_dtype": None if weight_dtype is None else TO_CORE[weight_dtype],
                "quantize_output": bool(fp8_output),
                "quantize_grad": fp8_grad,
                "original_input": _KEPT in self._optional and keeps_original(self, precision, rule),
                "parallel": self._split(mode, rule, name, dtype),
            }
            for rule, request, (mode, name) in zip(rules, self._requests(), self._spread(), strict=True)
        ]
        asked = Asked(self._spec_options(stream), TO_CORE[dtype], frozenset(wanted), products=products)
        comm = self._communicator(*[product["parallel"] for product in products])
        return register(self._layer, self._entry.spec(asked), bool(wanted), self._inspectors(), comm)

    def _returned(self, outputs: tuple[Any, ...], inputs: tuple[Any, ...]) -> Any:
        out, *rest = outputs
        if not self.return_bias:
            return outputs if rest else out
        name = self._last_bias
        bias = self._bias(name, out.dtype)
        names = self._part_names.get(name, (name,))
        return out, empty_bias(out) if bias is None else returned_bias(self, bias, names), *rest


def keeps_original(module: Any, number: int, precision: Precision | None) -> bool:
    """Whether a product in this precision (its own, of the module's number) keeps its input as it came.

    With `save_original_input` what backward is handed is the caller's input itself, which it quantizes again. Where
    another module keeps that input anyway, such as the one whose output it is, this saves the quantized copy.
    """
    if not module.save_original_input or precision is None or precision.input is None:
        return False  # nothing is quantized: the input itself is what is kept
    if precision.backward is not None or repeats(precision.input):
        return precision.backward is None
    recipe = recipe_of(number)
    if (precision.input.columnwise or precision.input).scaling != "delayed":
        warn_once(
            module, "save_original_input is ignored: backward cannot quantize this input again and get the same values"
        )
    elif recipe is not None and recipe.custom():
        warn_once(module, "save_original_input is ignored: under delayed scaling the scale may have changed since")
    else:
        raise ArgumentError(
            f"{type(module).__name__}.forward",
            "save_original_input=True. DelayedScaling recipe is not supported with save_original_input: its scale may "
            "have changed before backward quantizes the input again",
            "a recipe whose scales follow from the input, such as Float8CurrentScaling",
            "leave save_original_input out",
        )
    return False


def empty_bias(out: torch.Tensor) -> torch.Tensor:
    """The bias that `return_bias` gives beside `out` where there is none: plain, though `out` may be quantized."""
    return torch.empty(0, dtype=out.dtype, device=out.device)


def returned_bias(module: BaseModule, bias: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
    """The bias as `return_bias` gives it, to be read after the module's forward: a copy, where an engine frees the
    parameter's memory then (FSDP1 hands out views of one flat tensor).

    A reentrant checkpoint runs its function without gradients first, and makes what that returns its own results: the
    parameter itself would be none any more, and backward would not end.
    """
    if module._frees_parameters or (
        bias.__class__ is not Parameter and either(torch.Tensor._is_view, _never)(bias)  # no graph break
    ):
        return bias.clone()
    bias = bias if torch.is_grad_enabled() else bias.detach()
    note: Any = either(noting.came, _never)
    note(bias, Of(module, names))
    return bias


def _never(*_: Any) -> bool:
    return False
