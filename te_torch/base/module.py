"""What the FP8-capable modules share: precision of a call, scaling state, initialisation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_core.plan_cache import drop_oldest
from te_core.precision import Precision
from te_torch.autocast import Now, Region, precision_now, prepare_default
from te_torch.base.checkpoint_state import adopting
from te_torch.base.parallel import TensorParallel, eagerly
from te_torch.base.quantized_init import begin, carry_over, initialisation, initialising, link, quantize_parameter
from te_torch.base.unit import Unit
from te_torch.base.watching import Choice, watching
from te_torch.base.weights import CachedWeight, Gradients, add_gradients, extra_for
from te_torch.calls import Call, key_of
from te_torch.carried import HANDING
from te_torch.compiled_runs import Traced, in_checkpoint, rule_key
from te_torch.custom import custom_precisions
from te_torch.export.mode import custom_recipe, exporting, not_warmed_up
from te_torch.forks import Fork
from te_torch.function import Extra
from te_torch.likeness import alike, of_token
from te_torch.module_names import name_of, next_name, shown, within
from te_torch.nonfinite import counted
from te_torch.precisions import (
    is_custom,
    number_of_precision,
    number_of_several,
    part_of,
    precision_of,
    reads_quantized,
    recipe_of,
    says_by_module,
)
from te_torch.runtime import amp_cast, amp_dtype, constant_at_trace, default_device, drawn, warn
from te_torch.state import BACKWARD, FORWARD, ScalingState, make_state, make_states
from te_torch.surroundings import check_surroundings
from te_torch.tensors import QuantizerRole
from te_torch.utils import get_default_init_method
from te_torch.values import is_size
from te_torch.weight_copies import Copies, Held, copies_at_trace

_MOST_CALLS = 256  # that a module keeps
_KEYED = frozenset(("inspector", "training"))  # attributes that every key of a call has that depends on them


def materialised(meta: torch.nn.Parameter) -> torch.nn.Parameter:
    """A parameter like this one, which has no memory, with memory on the default device."""
    parameter = torch.nn.Parameter(torch.empty_like(meta, device=default_device()), meta.requires_grad)
    parameter.__dict__.update(meta.__dict__)
    return parameter


normal_init = get_default_init_method()


class CallingModule(Unit):
    """A module that runs core layers: it keeps its calls by what they depend on.

    A tracing compiler cannot look into a dictionary that is filled as it looks. It says what the module is like, in
    constants (all that torch 2.11 lets through to a function at trace time), and gets the call's key from any module
    that is like it: so modules that are alike share what is compiled, as layers do that are compiled one by one.
    """

    _number = 0  # the class, by number

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._number = next(_kinds)

    def _renew(self) -> None:
        self._calls: dict[Any, Call] = {}
        self._last: Call | None = None  # of the last forward: what precision_report() reads
        # Kept here, too: a stand-in of torch's tracers has our `__dict__`, and a class of its own.
        self._kind = self._number
        super()._renew()

    def __getstate__(self) -> dict[str, Any]:
        """Without calls, which belong to this process."""
        of_this = ("_calls", "_kind", "_last", "_nonfinite", "_ran_under")
        return {k: v for k, v in super().__getstate__().items() if k not in of_this}

    def _find_call(self, key: tuple[Any, ...]) -> Call | str:
        """The call of this key: one look-up, or made now. Its own key under tracing."""
        if torch.compiler.is_compiling():
            return _trace_call(self._kind, self._facts(), key)
        found = self._calls.get(key)
        if found is None:
            while len(self._calls) >= _MOST_CALLS:  # such as a fresh inspector, or a user's own function, in every step
                drop_oldest(self._calls)
            found = self._calls[key] = self._new_call(*key)
            self._tell_recipe(found)
        self.__dict__["_last"] = found  # Module.__setattr__ would cost a microsecond
        return found

    def _tell_recipe(self, call: Call) -> None:
        """Warn, as documented, of a recipe that is of another kind than the one that this module ran in before."""
        precisions = [linear.precision for linear in call.layer.linears(call.spec) if linear.precision is not None]
        recipe = recipe_of(number_of_precision(precisions[0], None)) if precisions else None
        if recipe is None:
            return
        before, kind = self.__dict__.get("_ran_under"), type(recipe)
        if before is not None and not (issubclass(kind, before) or issubclass(before, kind)):
            text = (
                f"Recipe type changed from {before.__name__} to {kind.__name__} in {type(self).__name__}{within(self)}"
            )
            warn(f"{text}: it quantizes otherwise from now on", UserWarning, 3)
        self.__dict__["_ran_under"] = kind

    def _changed(self, name: str) -> None:
        if name[0] != "_" and name not in _KEYED:
            self._calls.clear()

    def _slow_forward(self, *args: Any, **options: Any) -> Any:
        """What torch calls in the place of forward while TorchScript traces."""
        if not exporting.on:  # torch.jit.trace would note what a layer gave once, and call it a constant
            raise UnsupportedError(
                "torch.jit.trace",
                f"a {type(self).__name__}",
                "torch.compile, torch.export, te.onnx_export",
                "use one of these, or trace torch.nn layers",
            )
        return super()._slow_forward(*args, **options)

    def _new_call(self, *key: Any) -> Call:
        """What this module does in the precision, dtype, needs and modes that the key says."""
        raise NotImplementedError

    def _facts(self) -> tuple[Any, ...]:
        """All that `_new_call` reads besides the key, in constants; what says nothing of itself is like no other."""
        return (self._token,)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """A checkpoint with FP8 state makes a module stateful before its first forward."""
        with adopting(self):
            super()._load_from_state_dict(state_dict, prefix, *args)


_kinds = itertools.count(1)


@constant_at_trace
def _trace_call(kind: int, facts: tuple[Any, ...], key: tuple[Any, ...]) -> str:
    modules = alike(kind, facts)
    found: Call = modules[0]._new_call(*key)
    if len(modules) == 1:  # otherwise it cannot be told which of them is traced; what runs says so (`last_compiled`)
        modules[0]._last = found
    return key_of(found) + next((k for k in key if isinstance(k, str) and k.startswith(HANDING)), "")


class BaseModule(TensorParallel, CallingModule):
    """A module whose GEMMs run in the precision of the active `autocast` region."""

    _in_regions = True
    gemms = 1  # matrix products with scaling state of their own
    module_type = "linear"  # what a custom recipe's factory is told
    own_precision = False  # another one follows from the region's, by `_of_custom`, whatever the recipe is
    #: Roles of a quantized output and input gradient under a custom recipe; None: the factory is not asked for them.
    output_quantizer_role: Any = None
    grad_input_quantizer_role: Any = None
    #: What a capture says of the microbatch where the caller does not; `_special` is set then.
    _microbatch: bool | None = None
    fp8_state: ScalingState | None

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        prepare_default()
        self.name = name if name is not None else next_name()
        #: Of te_core.layers.inspector.Inspector's kind: one for all products of the module, or one for each (or None).
        self.inspector: Any = None
        self.register_module("fp8_state", None)
        self._initialisers: dict[str, Callable[[torch.Tensor], Any]] = {}
        self._fork: Fork | None = None  # what it draws in, if it was given an RNG tracker
        self.fuse_wgrad_accumulation = self.delay_wgrad_compute = False
        self.wgrad_store = Gradients(self.gemms)
        self._weight_cache: dict[str, CachedWeight] = {}
        self._copies = Held()  # the same of compiled code
        self._custom: dict[int, int] = {}  # by a custom recipe's number: that of its precisions for the module's GEMMs
        self._special = False  # weight gradients are fused or delayed
        self._primary = False  # weights are held quantized
        self._held: tuple[str, ...] = ()  # as what, in words
        self._linked = 0
        self._wgrad_hooks: list[Callable[[], Any]] = []
        self._quantize_later: list[Any] = []  # weights on the meta device that quantized_model_init will quantize
        if watching.new is not None:
            watching.new(self)

    # ------------------------------------------------------------------------------------ inspectors

    @property
    def _inspected(self) -> bool:
        """Whether somebody looks on, or may."""
        return self.inspector is not None

    def _inspectors(self) -> tuple[Any, ...] | None:
        """One for each product; None where nobody looks."""
        given = self.inspector
        if isinstance(given, Choice):
            given = given.current
        if given is None:
            return None
        found = tuple(given) if isinstance(given, (tuple, list)) else (given,) * self.gemms
        wrong = next(
            (i for i in found if i is not None and not (hasattr(i, "request") and hasattr(i, "inspect"))), None
        )
        if wrong is not None or len(found) != self.gemms:
            raise ArgumentError(
                f"{type(self).__name__}.inspector",
                f"{len(found)} inspectors" if wrong is None else f"{wrong!r} without `request` and `inspect`",
                f"one inspector for all products, or {self.gemms}: one for each, or None",
                "correct module.inspector; te_core.layers.inspector.Inspector says what one has",
            )
        return found

    def _watched(self, precision: int) -> tuple[int, ...] | None:
        """What the key of a call in this precision says of them: which objects they are (a call keeps its own)."""
        if isinstance(self.inspector, Choice):
            if torch.compiler.is_compiling():
                _refuse_traced_choice(self._token, precision, self.inspector.generation)
                return None
            self.inspector.choose(self, precision)
        found = self._inspectors()
        return None if found is None else tuple([id(inspector) for inspector in found])

    def _requests(self) -> tuple[Any, ...]:
        """The points that each of them wants to see."""
        found = self._inspectors() or (None,) * self.gemms
        return tuple(None if inspector is None else frozenset(inspector.request) for inspector in found)

    # ------------------------------------------------------------------------------------ parameters

    def _add_parameter(
        self, name: str, shape: tuple[int, ...], init: Callable[[torch.Tensor], Any], **placement: Any
    ) -> None:
        """Register a parameter; on the meta device it is filled later, by reset_parameters()."""
        parameter = torch.nn.Parameter(torch.empty(shape, **placement))
        self.register_parameter(name, parameter)
        self._initialisers[name] = init
        if parameter.device.type != "meta":
            self._initialise(name)

    def _add_bias(self, name: str, rows: int, there: bool, **placement: Any) -> None:
        """Register a bias of zeros. As documented, without one the attribute is an empty tensor and no parameter."""
        if there:
            self._add_parameter(name, (rows,), torch.nn.init.zeros_, **placement)
        else:
            setattr(self, name, torch.empty(0, **placement))

    def _initialise(self, name: str) -> None:
        parameter = self._parameters[name]
        fork = self._fork if parameter is not None and parameter.ndim > 1 else None
        with torch.no_grad(), nullcontext() if fork is None else fork():
            drawn(self._initialisers[name], parameter)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise all parameters anew; those on the meta device get memory on the default device."""
        if defer_init:
            return
        for name in self._initialisers:
            parameter = self._parameters.get(name)
            if parameter is None:
                continue
            if parameter.device.type == "meta":
                self._parameters[name] = materialised(parameter)
            self._initialise(name)
        later, self._quantize_later = self._quantize_later, []
        for name, gemm, how in later:
            self._primary = quantize_parameter(self, name, gemm, how) or self._primary

    # ------------------------------------------------------------------------------------- precision

    def _enter(self, inp: torch.Tensor, now: Now | None = None) -> tuple[torch.Tensor, int, ScalingState | None, bool]:
        """(input in the compute dtype, precision by number, scaling state, whether this is a recomputation).

        `now` is what `precision_now` said, where the caller has asked already.
        """
        precision, recompute, region, tracing, read = precision_now(self) if now is None else now
        if torch._C._is_any_autocast_enabled():
            inp = amp_cast(inp)
        if not precision:
            return inp, 0, None, recompute
        if self.own_precision or (is_custom(precision) if tracing else says_by_module(precision)):
            if exporting.on and is_custom(precision):
                raise custom_recipe()
            precision = self._of_custom(precision)
            if not precision:
                return inp, 0, None, recompute
        if tracing and exporting.on:
            return inp, precision, self._state_to_export(precision), recompute
        collects = region is not None and region.traced == tracing and region.ran is not None
        if tracing:
            return inp, precision, self._traced_state(inp.device, precision, region, collects), recompute  # type: ignore[return-value]
        rule: Any = precision_of(precision)
        if rule.history is None:
            counts = counted(self, None, inp.device, recompute) if rule.check_finite else None
            return inp, precision, counts, recompute  # type: ignore[return-value]
        state: Any = self._modules["fp8_state"]  # a third of the cost of self.fp8_state
        if state is None or state.precision is not rule:
            check_surroundings()  # else its memory would be the mode's
            state = make_state(self, inp.device, rule, recipe_of(precision))
        if collects:
            region.ran.states[state.token] = None  # type: ignore[union-attr]
            state.__dict__["group"] = region.group  # type: ignore[union-attr]
        if self._primary:
            self._link_weights(state)
        if read is not None:
            state = read.of_state(state, recompute)
        if rule.check_finite:
            return inp, precision, counted(self, state, inp.device, recompute), recompute  # type: ignore[return-value]
        return inp, precision, state, recompute

    def _state_to_export(self, precision: int) -> ScalingState | None:
        """The scales that go into an exported program: those there are, for a trace makes none."""
        rule, state = precision_of(precision), self._scaling()
        if rule is None or rule.history is None:
            return None
        if state is None:
            raise not_warmed_up(f"{type(self).__name__}{within(self)}")
        return state

    def _traced_state(
        self, device: torch.device, precision: int, region: Region | None, collects: bool
    ) -> Traced | None:
        """The same of traced code. A region inside of it updates by itself what ran there."""
        rule = _trace_state(self._kind, self._facts(), device, precision)
        if not rule:
            return None
        state = self.fp8_state
        if state is None:  # of an export, which makes none
            raise not_warmed_up(f"{type(self).__name__}{within(self)}", "torch.export")
        if collects:
            ran: Any = region.ran  # type: ignore[union-attr]
            ran.traced = [*[pair for pair in ran.traced if pair[0] is not state], (state, precision)]
        return Traced(state, rule)

    def _traced(self, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
        return eagerly(self, *inputs, *options) if self.tp_size > 1 else super()._traced(inputs, options)

    def _of_custom(self, number: int) -> int:
        """The number of what a custom recipe's factory says for this module."""
        if torch.compiler.is_compiling():
            _trace_custom(self._kind, self._facts(), number)
            return self._custom[number]
        return self._asked(number)

    def _asked(self, number: int) -> int:
        found = self._custom.get(number)
        if found is None:
            while len(self._custom) >= _MOST_CALLS:
                drop_oldest(self._custom)
            found = self._custom[number] = number_of_several(custom_precisions(self, number))
        return found

    def _facts(self) -> tuple[Any, ...]:
        """An inspected module is like no other, and so is one whose weights are spread: each has a group of its own."""
        return self.gemms, self._held, None if self.inspector is None and self.tp_size == 1 else self._token

    def quantizer_roles(self, gemm: int) -> tuple[Any, ...]:
        """The roles of a GEMM's input, weight, output gradient, output and input gradient, for a custom recipe."""
        name = self.name
        if self.gemms > 1:
            name += f".{self._gemm_names()[gemm].removesuffix('_weight')}"
        inp, weight, grad = (QuantizerRole(self.module_type, t, name) for t in ("input", "weight", "grad_output"))
        out = self.output_quantizer_role if gemm == self.gemms - 1 else None
        return inp, weight, grad, out, self.grad_input_quantizer_role if gemm == 0 else None

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[Any]:
        """The roles in the documented order of slots: three a GEMM forward, two backward."""
        slots = (0, 1, 3) if fwd else (2, 4)
        found = [roles[i] for roles in map(self.quantizer_roles, range(self.gemms)) for i in slots]
        if len(found) != num_quantizers:
            raise ValueError(f"{name_of(self)}: {len(found)} quantizers in this direction, not {num_quantizers}")
        return found

    def _precision(self, number: int, gemm: int) -> Precision | None:
        """The precision of one of the module's GEMMs, given the number that `_enter` returned."""
        return precision_of(part_of(number, gemm))

    def _with_extra(self, weights: tuple[str, ...], first_microbatch: bool | None) -> tuple[str, ...]:
        """Those of a layer's GEMM weights whose `_extra` a forward asks for: all of them, or none."""
        return weights if self._special or first_microbatch is not None else ()

    def _extra(
        self,
        names: Sequence[str],
        weights: Sequence[torch.Tensor],
        precision: int,
        state: ScalingState | None,
        recompute: bool,
        first_microbatch: bool | None,
    ) -> Extra | Copies | None:
        """The weight cache, `main_grad` and delayed gradients of this forward; None where there are none."""
        if first_microbatch is None:
            first_microbatch = self._microbatch
        if torch.compiler.is_compiling():
            if self._special:
                _refuse_traced_gradients()
            if exporting.on or first_microbatch is None or not precision:
                return None
            parts = [self._parts_of(n) for n in names]
            return copies_at_trace(self, precision, weights, parts, first_microbatch, not in_checkpoint())
        scales = None if state is None else state.scales(recompute)
        precisions = [self._precision(precision, i) if precision else None for i in range(len(weights))]
        return extra_for(self, names, weights, [self._parts_of(n) for n in names], precisions, scales, first_microbatch)

    def _parts_of(self, name: str) -> list[torch.Tensor]:
        """The parameters that a GEMM's weight is made of."""
        return [getattr(self, name)]

    def backward_dw(self) -> None:
        """Compute the weight gradients that `delay_wgrad_compute` put off: those of the oldest waiting backward."""
        if self.delay_wgrad_compute:
            add_gradients(self, [getattr(self, name) for name in self._weight_names()])
            for hook in self._wgrad_hooks:
                hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Have `backward_dw()` call this once the gradients are there: what a trainer's own hooks would have done."""
        self._wgrad_hooks.append(hook)

    def need_backward_dw(self) -> bool:
        """Whether `backward_dw()` has to be called after backward."""
        return self.delay_wgrad_compute

    def _weight_names(self) -> tuple[str, ...]:
        """The GEMM weights, in the order of the layer's inputs."""
        return ("weight",)

    def _gemm_names(self) -> tuple[str, ...]:
        """What the GEMMs are called by: their weights, also those that are parts of one parameter."""
        return self._weight_names()

    def _accumulate(self, fuse: bool, delay: bool) -> None:
        """Take over the constructor's options of weight gradients."""
        self.fuse_wgrad_accumulation, self.delay_wgrad_compute = fuse, delay
        self._special = fuse or delay
        if delay:
            for name in self._weight_names():
                getattr(self, name).skip_backward_post_hook = True

    def _link_weights(self, state: ScalingState, runs: bool = True) -> None:
        """Let quantized parameters requantize with this state's scales, wherever its buffers now are."""
        if self._linked == state.layout:
            return
        for gemm, name in enumerate(self._weight_names()):
            link(getattr(self, name), state, gemm)
        if runs:
            begin(self)
        self._linked = state.layout if runs else 0

    def _link_anew(self) -> None:
        """The same of weights that have taken the place of others: of a copy's, too."""
        self._linked = 0
        if self._primary and (state := self._scaling()) is not None:
            self._link_weights(state, runs=False)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """As every module's.

        Args:
            name: Name of the parameter.
            param: Parameter, or None.
        """
        super().register_parameter(name, param)
        if self.__dict__.get("_primary"):
            self._link_anew()

    def _quantize_parameters(self) -> None:
        """Inside `quantized_model_init`: hold the GEMM weights as quantized tensors from now on."""
        if initialising():
            how = initialisation()
            for gemm, name in enumerate(self._weight_names()):
                if self._parameters[name].is_meta:  # type: ignore[union-attr]
                    self._quantize_later.append((name, gemm, how))
                else:
                    self._primary = quantize_parameter(self, name, gemm, how) or self._primary

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """As every module's; what is attached to quantized weights stays with them."""
        self._copies = Held()
        if not self._primary:
            return super()._apply(fn, recurse)
        before = {name: dict(self._parameters[name].__dict__) for name in self._weight_names()}
        super()._apply(fn, recurse)  # exchanges the contents of such parameters, attributes included
        for name, attributes in before.items():
            carry_over(attributes, self._parameters[name])  # type: ignore[arg-type]
        self._link_anew()
        return self

    @property
    def primary_weights_in_fp8(self) -> bool:
        """Whether the GEMM weights are held quantized."""
        return self._primary

    def _weight(self, name: str, dtype: torch.dtype, precision: int, gemm: int = 0) -> torch.Tensor:
        """A GEMM weight in the compute dtype; one that is only read quantized, in the parameter's own."""
        weight = self._tensor(name)
        if weight.dtype == dtype:
            return weight
        self._require_autocast(name, weight, dtype)
        return weight if reads_quantized(precision, gemm) else weight.to(dtype)

    def _require_autocast(self, name: str, weight: torch.Tensor, dtype: torch.dtype) -> None:
        if amp_dtype(weight.device.type) is None:
            raise TypeError(
                f"{type(self).__name__}{within(self)}: Data types for parameters must match the input's outside "
                f"torch.autocast: {name} is {weight.dtype}, the input {dtype}. Convert the input or use torch.autocast."
            )

    # ---------------------------------------------------------------------------------- state of FP8

    def adjust_amax_history_length(self, length: int, fwd: bool | None = None) -> None:
        """Cut the amax histories (fwd=True: forward ones, False: backward ones), or fill them up with zeros."""
        if not is_size(length):
            raise ArgumentError("adjust_amax_history_length", f"length={length}", "an integer >= 1", "correct it")
        if self.fp8_state is not None:
            self.fp8_state.resize_history(length, None if fwd is None else FORWARD if fwd else BACKWARD)

    def get_fp8_meta_tensors(self) -> dict[str, list[torch.Tensor]] | None:
        """Copies of scales and histories, as `reset_fp8_meta_tensors` takes them; None without state."""
        state = self._scaling()
        return None if state is None else state.copies()

    def reset_fp8_meta_tensors(self, fp8_meta_tensors: dict[str, list[torch.Tensor]] | None = None) -> None:
        """Set scales and histories to these values, or to those of a new state."""
        if self._scaling() is not None or (self.fp8_state is not None and fp8_meta_tensors is not None):
            self.fp8_state.assign(fp8_meta_tensors)  # type: ignore[union-attr]

    def __getstate__(self) -> dict[str, Any]:
        seen = None if isinstance(self.inspector, Choice) else self.inspector
        fresh: dict[str, Any] = {"_weight_cache": {}, "_copies": Held(), "_custom": {}, "_linked": 0}
        return {**super().__getstate__(), **fresh, "inspector": seen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._link_anew()
        if watching.new is not None:
            watching.new(self)

    def extra_repr(self) -> str:
        """What a printed module shows."""
        held = {type(getattr(self, name)).__name__ for name in self._weight_names()} if self._primary else ()
        return ", ".join([shown(**self._options()), *(f"weight={name}" for name in held)])

    def _options(self) -> dict[str, Any]:
        """Sizes and options, by the names that the constructor gives them."""
        return {}

    def __repr__(self) -> str:
        """As torch prints modules, without a child that is not there (yet)."""
        whole = object.__new__(type(self))
        whole.__dict__.update(
            self.__dict__,
            _modules={k: m for k, m in self._modules.items() if m is not None and getattr(m, "in_use", True)},
        )
        return torch.nn.Module.__repr__(whole)


@constant_at_trace
def _refuse_traced_gradients() -> None:
    raise UnsupportedError(
        "torch.compile",
        "a module with fuse_wgrad_accumulation or delay_wgrad_compute",
        "these in eager mode",
        "leave the option out, or do not compile this module",
    )


@constant_at_trace
def _refuse_traced_choice(token: int, precision: int, generation: str) -> None:
    module = of_token(token)
    module.inspector.refuse_traced(module, precision)


# A tracing compiler calls these two at trace time, outside the graph, before it has looked at what they change.


@constant_at_trace
def _trace_state(kind: int, facts: tuple[Any, ...], device: torch.device, precision: int) -> str:
    """The name of the rule that the module's state follows; "" where it needs none."""
    rule = precision_of(precision)
    if rule is not None and rule.check_finite:
        raise UnsupportedError(
            "autocast",
            "check_finite=True around a compiled module",
            "check_finite in eager code",
            "leave check_finite out, or do not compile this module",
        )
    if rule is None or rule.history is None:
        return ""
    if torch.compiler.is_exporting():  # buffers are those of the trace: states that were made now would not last
        return rule_key(precision)
    modules = [m for m in alike(kind, facts) if next((p.device for p in m.parameters()), device) == device]
    make_states(modules, device, rule, recipe_of(precision))
    begin(*modules)
    return rule_key(precision)


@constant_at_trace
def _trace_custom(kind: int, facts: tuple[Any, ...], number: int) -> None:
    for module in alike(kind, facts):
        module._asked(number)


def wants_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether any of these requires a gradient."""
    for t in tensors:
        if t is not None and t.requires_grad:
            return True
    return False
