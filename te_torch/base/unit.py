"""`Unit`: the base of all modules. A call asks once whether a compiler traces it and which plan fits it."""

from __future__ import annotations

from typing import Any

import torch

from te_core.tape import taped
from te_torch.autocast import NOWHERE, Now, precision_in_eager, precision_now
from te_torch.base.plans import Plan, Prepared
from te_torch.base.sharding import MarkedModule
from te_torch.function import apply
from te_torch.likeness import enrolled
from te_torch.noting import noting
from te_torch.surroundings import dispatch_modes, functorch_active

_MOST_PLANS = 16  # that a module keeps; the one that was used least recently goes first
_NO_OPTIONS = torch.Tensor, torch.nn.Module


class Unit(MarkedModule):
    """A module that keeps what it decided in its calls, as plans (te_torch/base/plans.py)."""

    _in_regions = False  # whether regions of low precision change what it does
    _reads_settings = False  # whether environment variables change what it does: see `_settings`
    _as_made: tuple[Any, Any]
    _plan_kind = Plan
    _has_parts = False  # whether parts of it ask by themselves what a checkpoint runs again

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._as_made = cls.forward, cls.__call__  # what a call runs, unless a program sets another one on the class

    def __init__(self) -> None:
        super().__init__()
        self._renew()

    def _renew(self) -> None:
        """What belongs to this process and this object."""
        self._token = enrolled(self)
        self._plans: tuple[Plan, ...] = ()  # the one that was used last comes first
        self._version = 0  # another one after each change of an attribute: plans are of one

    def __getstate__(self) -> dict[str, Any]:
        """Without compiled code and what `_renew` makes."""
        of_this = ("_compiled_call_impl", "_gathered", "_plans", "_token", "_version")
        return {k: v for k, v in self.__dict__.items() if k not in of_this}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._renew()

    def _replicate_for_data_parallel(self) -> Any:
        """A replica has parameters of its own."""
        replica = super()._replicate_for_data_parallel()
        replica.__dict__["_plans"] = ()
        return replica

    def __setattr__(self, name: str, value: Any) -> None:
        """What a user sets anew counts from the next forward on: plans were made of what was there before.

        Tensors and modules advance no version: a plan collects tensors in each call and compares modules; FSDP2
        exchanges tensors in every forward.
        """
        changed = self.__dict__.get(name, self) is not value
        super().__setattr__(name, value)
        if changed and not isinstance(value, _NO_OPTIONS):
            self._advance(name)

    def __delattr__(self, name: str) -> None:
        """What a user takes away is missing from the next forward on."""
        option = name in self.__dict__ and not isinstance(self.__dict__[name], _NO_OPTIONS)
        super().__delattr__(name)
        if option:
            self._advance(name)

    def _advance(self, name: str) -> None:
        """End the plans, for an attribute has another value or is gone."""
        if "_version" in self.__dict__ and not torch.compiler.is_compiling():
            self.__dict__["_version"] += 1
            self._changed(name)

    @property
    def _inspected(self) -> bool:
        """Whether somebody looks on, or may."""
        return False

    def _settings(self) -> Any:
        """What environment variables and torch say that this module's calls depend on."""

    def _changed(self, name: str) -> None:
        """An attribute has another value."""

    def _call(self, inputs: tuple[Any, ...], options: tuple[Any, ...] = ()) -> Any:
        """What this module makes of these tensors with these options, which are compared by value."""
        if torch.compiler.is_compiling():
            return self._traced(inputs, options)
        if self._reads_settings:
            options = (options, self._settings())
        now = precision_in_eager(self, self._has_parts) if self._in_regions else NOWHERE
        if not dispatch_modes() and not functorch_active():
            for plan in self._plans:
                outputs = plan.run(self, inputs, options, now)
                if outputs is not None:
                    if plan is not self._plans[0]:
                        self._plan_first(plan)
                    self.__dict__.update(plan.last)  # Module.__setattr__ would cost a microsecond each
                    return self._returned(outputs, inputs)
        return self._unplanned(inputs, options, now)

    def _unplanned(self, inputs: tuple[Any, ...], options: tuple[Any, ...], now: Now) -> Any:
        """The same, with everything decided anew."""
        made = self._prepare(inputs, options, now)
        call, tensors = made.call, made.tensors
        outputs = apply(call, made.state, made.recompute, *tensors, extra=made.extra, caller=self._token)
        noting.by(self, made.sources, made.weights, *options[:1])
        self._plan(made, inputs, options, now)
        return self._returned(outputs, inputs)

    def _traced(self, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
        """The same in traced code."""
        made = self._prepare(inputs, options, precision_now(self) if self._in_regions else NOWHERE)
        return self._returned(apply(made.call, made.state, made.recompute, *made.tensors, extra=made.extra), inputs)

    def _plan(self, made: Prepared, inputs: tuple[Any, ...], options: tuple[Any, ...], now: Now) -> None:
        """Keep what was decided for the next call that is like this one."""
        if taped.when() != "never" and not dispatch_modes():
            plan = self._plan_kind.of(self, made, inputs, options, now)
            if plan is not None:
                self._plan_first(plan)

    def _plan_first(self, plan: Plan) -> None:
        others = [other for other in self._plans if other is not plan and not other.same(plan)]
        self.__dict__["_plans"] = (plan, *others[: _MOST_PLANS - 1])

    def _prepare(self, inputs: tuple[Any, ...], options: tuple[Any, ...], now: Now) -> Prepared:
        """Which layer this call runs, and on which tensors."""
        raise NotImplementedError

    def _returned(self, outputs: tuple[Any, ...], inputs: tuple[Any, ...]) -> Any:
        """What the module's forward returns of the layer's outputs."""
        return outputs if len(outputs) > 1 else outputs[0]

    def _tensor(self, name: str) -> torch.Tensor:
        """A parameter, or what stands in its place (a parametrization). Module.__getattr__ would cost a microsecond."""
        found = self._parameters.get(name)
        return getattr(self, name) if found is None else found
