"""What an operation of a chain is: basic ones, fused ones, and what one keeps between its forward and its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.precision import Precision
from te_core.quantize.state import BACKWARD_SLOTS, FORWARD_SLOTS, Scales
from te_core.recipe import Recipe
from te_torch.autocast import active
from te_torch.base.module import BaseModule
from te_torch.precisions import number_of, precision_of, recipe_of
from te_torch.tensors.base import QuantizerRole
from te_torch.tensors.float8 import Float8Quantizer
from te_torch.tensors.identity import IdentityQuantizer

MODES = ("forward", "backward")


class OperationContext:
    """What one operation keeps from its forward for its backward, besides attributes of its own."""

    requires_grad = True  # whether backward comes to this operation
    input_requires_grad = True  # whether it comes to what is before
    precision: Precision | None = None  # what the recipe of the chain says; None in high precision
    to_save: tuple[Any, ...] = ()
    saved_tensors: tuple[Any, ...]

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors, plain or quantized, for backward, which finds them in `saved_tensors`."""
        self.to_save = tensors


class FusibleOperation(torch.nn.Module):
    """A basic operation, or several fused into one."""

    basic_ops: Any  # of a fused one
    _fuser: Any  # OperationFuser

    def __init__(self) -> None:
        super().__init__()

    def pre_first_fuser_forward(self) -> None:
        """Called before the first forward of a chain."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called before each forward of a chain; `requires_grad` says whether backward comes to this operation."""

    def fuser_forward(self, *args: Any, **given: Any) -> Any:
        """(the output, the extra outputs of each basic operation), of their contexts and the input.

        By name it is given basic_op_extra_inputs, basic_op_kwargs, prev_op_grad_output_quantizer and
        next_op_input_quantizer: the first two have an element for each basic operation.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward of its own")

    def fuser_backward(self, *args: Any, **given: Any) -> Any:
        """(the input's gradient, for each basic operation its parameters' gradients, and its extra inputs'), of their
        contexts and the output's gradient. By name it is given basic_op_grad_extra_outputs.
        """
        raise NotImplementedError(f"{type(self).__name__} has no backward of its own")


class BasicOperation(FusibleOperation, BaseModule):
    """An operation with parameters and quantizers of its own: a user's defines `op_forward` and `op_backward`.

    One with extra inputs or outputs says how many, and defines `fuser_forward` and `fuser_backward` in their place.
    """

    num_extra_inputs = 0
    num_extra_outputs = 0
    _extra_tensor_channels_locked = False
    _input_channels: Mapping[int, Any] = MappingProxyType({})
    _output_channels: Mapping[int, Any] = MappingProxyType({})  # with whether the caller gets the output, too
    _quantizers: Mapping[str, list[Any]] = MappingProxyType({})  # by mode
    _followed = 0  # the number of the precision that they are of

    def __init__(self) -> None:
        super().__init__()
        if type(self).num_quantizers is BasicOperation.num_quantizers:  # it has no state to save
            del self._modules["fp8_state"]
            self.__dict__["fp8_state"] = None

    # ----------------------------------------------------------------------------------------- extra tensors

    def set_extra_input_channel(self, index: int, channel: str | None) -> Any:
        """Take an extra input from the operation that writes to this channel; None: from the caller."""
        return self._set_channel("input", index, channel, channel)

    def set_extra_output_channel(self, index: int, channel: str | None, *, output_to_caller: bool = True) -> Any:
        """Write an extra output to a channel, and return it to the caller, too, if `output_to_caller`."""
        if not isinstance(output_to_caller, bool):
            raise TypeError(f"set_extra_output_channel: output_to_caller={output_to_caller!r} is no bool")
        return self._set_channel("output", index, channel, channel and (channel, output_to_caller))

    def _set_channel(self, kind: str, index: int, channel: Any, value: Any) -> Any:
        operation = f"{type(self).__name__}.set_extra_{kind}_channel"
        count = getattr(self, f"num_extra_{kind}s")
        if not 0 <= index < count:
            raise IndexError(f"{operation}: index {index} is out of range: there are {count}")
        if channel is not None and (not isinstance(channel, str) or not channel):
            raise ArgumentError(operation, f"channel={channel!r}", "a non-empty string, or None", "name the channel")
        if self._extra_tensor_channels_locked:
            raise RuntimeError(
                f"{operation}: a chain has already captured its channel routing. To do: set channels before the first "
                "forward"
            )
        before = getattr(self, f"_{kind}_channels")
        others = {slot: other for slot, other in before.items() if slot != index}
        setattr(self, f"_{kind}_channels", others if channel is None else {**others, index: value})
        return self

    # ------------------------------------------------------------------------------------------- quantizers

    def num_quantizers(self, mode: str) -> int:
        """How many quantizers it has in a mode: "forward" (inputs and weights in turn) or "backward" (gradients)."""
        return 0

    def get_quantizer_roles(self, mode: str) -> list[Any]:  # type: ignore[override]
        """What each of them quantizes, for a custom recipe."""
        names, count = ("input", "weight") if mode == "forward" else ("grad_output",) * 2, self.num_quantizers(mode)
        return [QuantizerRole(self.module_type, names[i % 2], self.name) for i in range(count)]

    def get_quantizer(self, mode: str, index: int) -> Any:
        """A quantizer, by the recipe in force; None where there is none."""
        found = self._quantizers.get(mode)
        return found[index] if found else None

    def get_input_quantizer(self) -> Any:
        """What the operation before may quantize its output with: not where backward reads that as it is."""
        return None if self._override == "high_precision" else self.get_quantizer("forward", 0)

    def get_grad_output_quantizer(self) -> Any:
        """What the operation after may quantize its gradient with: not where backward runs in high precision."""
        return None if self._override is not None else self.get_quantizer("backward", 0)

    @property
    def _override(self) -> str | None:
        """What the recipe's `backward_override` says."""
        precision = precision_of(self._followed)
        return None if precision is None else precision.backward

    @property
    def gemms(self) -> int:  # type: ignore[override]
        """Groups of slots in the scaling state: an input, a weight and a gradient each."""
        if "wgrad_store" not in self.__dict__:
            return 0  # num_quantizers may read what a constructor has not set yet
        return max(-(-self.num_quantizers("forward") // 2), self.num_quantizers("backward"))

    def _weight_names(self) -> tuple[str, ...]:
        return ()

    def quantizer_roles(self, gemm: int) -> tuple[Any, ...]:
        """As every module's, of the roles by mode."""
        forward, backward = map(self.get_quantizer_roles, MODES)
        return *[*forward[2 * gemm :], None, None][:2], *[*backward[gemm:], None][:1], None, None

    def reset_recipe_state(self, *, recipe: Recipe | None) -> None:
        """Have quantizers of a recipe of another class than they are of; None takes them away."""
        if type(recipe) is not type(recipe_of(self._followed)):
            self._follow(0 if recipe is None else number_of(recipe))

    def _follow(self, number: int) -> None:
        """Have the quantizers of a precision."""
        precision = precision_of(number)
        if number == self._followed or not self.gemms:
            return
        own = self._of_custom(number) if precision is not None and precision.factory is not None else number
        found: dict[str, list[Any]] = {mode: [] for mode in (MODES if number else ())}
        for mode, quantizers in found.items():
            for i in range(self.num_quantizers(mode)):
                rule: Any = self._precision(own, i // 2 if mode == "forward" else i)
                operand = rule.grad if mode == "backward" else rule.weight if i % 2 else rule.input
                quantizers.append(self._quantizer(operand, None, "", 0) or IdentityQuantizer())
        self.__dict__.update(_quantizers=found, _followed=number)

    def _enter_chain(self, device: torch.device) -> tuple[int, Any, bool]:
        """(number of the precision of this call, scaling state, whether a checkpoint runs it again)."""
        number, state, again = 0 if active.region is None else active.region.precision, None, False
        if any(map(self.num_quantizers, MODES)):
            _, number, state, again = self._enter(torch.empty(0, device=device))
        rule = precision_of(number)
        if rule is not None and rule.input is not None and rule.input.scaling == "calibrate":
            number, state = 0, None  # calibration runs in high precision
        self._follow(number)
        if state is not None:
            self._point(state.scales(again))
        return number, state, again

    def _point(self, scales: Scales) -> None:
        """Let quantizers read and raise what this call reads and raises of the state."""
        for mode, quantizers in self._quantizers.items():
            scale, amax, counts = (getattr(scales, f"{mode}_{name}") for name in ("scale", "amax", "nonfinite"))
            for i, quantizer in enumerate(quantizers):
                at = FORWARD_SLOTS * (i // 2) + i % 2 if mode == "forward" else BACKWARD_SLOTS * i
                quantizer.nonfinite = None if counts is None else counts.owner[at]
                if isinstance(quantizer, Float8Quantizer):
                    quantizer.scale = scale.owner[at : at + 1]
                    quantizer.amax = torch.zeros_like(quantizer.scale) if amax is None else amax.owner[at : at + 1]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_quantizers": {}, "_followed": 0}

    # ---------------------------------------------------------------------------------------------- running

    def pre_first_fuser_forward(self) -> None:
        """Give parameters on the meta device memory and values."""
        if any(p.is_meta for p in self._parameters.values() if p is not None):
            self.reset_parameters()

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The output. It may be quantized with the next operation's quantizer, if there is one."""
        raise NotImplementedError(f"{type(self).__name__} defines no op_forward")

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> tuple[Any, Any]:
        """(the input's gradient, a gradient for each parameter)."""
        raise NotImplementedError(f"{type(self).__name__} defines no op_backward")

    def fuser_forward(self, *args: Any, **given: Any) -> Any:
        """`op_forward`, of an operation without extra tensors."""
        self._refuse_extra("fuser_forward")
        (ctx,), input_ = args
        del given["basic_op_extra_inputs"]
        return self.op_forward(ctx, input_, **given.pop("basic_op_kwargs")[0], **given), [()]

    def fuser_backward(self, *args: Any, **given: Any) -> Any:
        """`op_backward`, of an operation without extra tensors."""
        self._refuse_extra("fuser_backward")
        (ctx,), grad_output = args
        grad_input, grad_params = self.op_backward(ctx, grad_output)
        return grad_input, [grad_params], [()]

    def _refuse_extra(self, function: str) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            raise RuntimeError(
                f"{type(self).__name__} has {self.num_extra_inputs} extra inputs and {self.num_extra_outputs} extra "
                f"outputs: it has to define {function}"
            )

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> Any:
        """The operation as a chain of its own."""
        return self._fuser([self])(input, *extra_inputs, basic_op_kwargs=[kwargs])


class Own(BasicOperation):
    """An operation of ours: `_run` is its forward, and `_back` its backward, without what it has no parameters for."""

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None, **kwargs):
        """As every operation's."""
        return self._run(ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer)

    def op_backward(self, ctx, grad_output):
        """As every operation's."""
        found = self._back(ctx, grad_output)
        return found if isinstance(found, tuple) else (found, ())

    def _run(self, ctx: Any, x: Any, prev: Any, after: Any) -> Any:
        raise NotImplementedError

    def _back(self, ctx: Any, dy: Any) -> Any:
        raise NotImplementedError


class FusedOperation(FusibleOperation):
    """Several basic operations as one. It defines `fuser_forward`, `fuser_backward` or both, and keeps no state."""

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        super().__init__()
        if not basic_ops:
            raise ArgumentError(type(self).__name__, "no operations", "one or more", "pass those that it fuses")
        self.basic_ops = torch.nn.ModuleList(basic_ops)

    def forward(
        self, input: torch.Tensor, *extra_inputs: torch.Tensor, basic_op_kwargs: list[dict[str, Any]] | None = None
    ) -> Any:
        """The operations as a chain of their own."""
        return self._fuser([self])(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
