"""What modules keep up where an engine shards them: FSDP2 (`fully_shard`) puts parameters of its own in the place of
theirs, in every step anew, and the memory of what it gathered is gone as the forward of a unit ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.modules.module import _global_parameter_registration_hooks as _registration_hooks

from te_core.errors import ArgumentError
from te_torch.values import NamedOptions


class Shardable(NamedOptions, torch.nn.Module):
    """A module that may be sharded by itself."""

    #: Whether its parameters lose their memory as its forward ends. FSDP2 makes a class of its own for such modules:
    #: so nobody else pays for the question.
    _frees_parameters = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._frees_parameters = any(base.__module__.startswith("torch.distributed.") for base in cls.__mro__)


class MarkedModule(Shardable):
    """A module whose parameters carry attributes for trainers, and keep them where torch exchanges the parameters.

    A new parameter has none: one of `fully_shard`, of `to_empty`, of `load_state_dict(assign=True)`, of `deepcopy`. One
    that a program assigns is the program's, and gets none: trainers mark their own, some only what has no mark yet.
    """

    _marks: Mapping[str, Mapping[str, Any]] = MappingProxyType({})  # by the parameter's name
    #: (what FSDP2 gathered, its shard) by the parameter's name: an attribute of the former would be saved with it.
    _gathered: Mapping[str, tuple[torch.Tensor, Any]] = MappingProxyType({})
    _replicated = False  # by DistributedDataParallel (base/replicated.py)

    def _mark(self, name: str, **marks: Any) -> None:
        """Attach these to a parameter, and to each that torch puts in its place."""
        self.__dict__["_marks"] = {**self._marks, name: {**self._marks.get(name, {}), **marks}}
        getattr(self, name).__dict__.update(marks)

    def _mark_again(self) -> None:
        for name, marks in self._marks.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                _attach(parameter, marks)

    def __setattr__(self, name: str, value: Any) -> None:
        # Asked without `isinstance(value, Parameter)`, which runs Python for other classes of parameters.
        if isinstance(value, torch.Tensor) and (value.__class__ is Parameter or getattr(value, "_is_param", False)):
            before = self.__dict__.get("_parameters", {}).get(name)
            marks = self._marks.get(name)
            by_fsdp2 = hasattr(value, "_local_tensor") or hasattr(before, "_local_tensor")
            if marks is not None and by_fsdp2:
                _attach(value, marks)  # type: ignore[arg-type]
            if before is not None and value.__class__ is Parameter and hasattr(before, "_local_tensor"):
                self.__dict__.setdefault("_gathered", {})[name] = value, before
            plain = value.__class__ is Parameter or by_fsdp2  # a quantized one that a program assigns has to be linked
            if before is not None and plain and not _registration_hooks:
                self._parameters[name] = value  # type: ignore[assignment]  # in every step of FSDP2's: Module takes 3 us
                return
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """A parameter may be exchanged, but not taken away: what the layer computes goes by its constructor."""
        if param is None and self._parameters.get(name) is not None:
            kind = type(self).__name__
            raise ArgumentError(
                kind,
                f"{name} = None after it was made with one",
                "another Parameter",
                f"make a {kind} without it (bias=False, where it has that option), or zero it",
            )
        super().register_parameter(name, param)

    def _shard_of(self, parameter: torch.Tensor) -> Any:
        return next((shard for gathered, shard in self._gathered.values() if gathered is parameter), None)

    def _contents_of(self, parameter: torch.Tensor) -> tuple[Any, ...] | None:
        """What is equal as long as a parameter has the contents that it has, for who holds `_storage_of(parameter)`.

        Of one that FSDP2 gathered these are its shard's: its own memory comes and goes, and counts no change meanwhile.
        None: nothing would tell, as with what FSDP1 gathers, and with tensors of inference mode.
        """
        if parameter.is_inference() or (parameter._base is not None and hasattr(parameter._base, "_full_param_padded")):
            return None
        shard = self._shard_of(parameter) if self._gathered else None
        if shard is None:
            # Not by the address: memory that is sent away and brought back (offloading) lies elsewhere.
            return parameter.untyped_storage()._cdata, parameter.storage_offset(), parameter._version, parameter.shape
        own = shard._local_tensor  # an optimizer's change counts outside, one of the local tensor inside
        return own.untyped_storage()._cdata, own.storage_offset(), own._version, shard._version, parameter.shape

    def _storage_of(self, parameter: torch.Tensor) -> torch.UntypedStorage:
        """The memory by which `_contents_of` tells parameters apart."""
        shard = self._shard_of(parameter)
        return parameter.untyped_storage() if shard is None else shard._local_tensor.untyped_storage()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._mark_again()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_again()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._mark_again()
        return self


def _attach(parameter: Parameter, marks: Mapping[str, Any]) -> None:
    """What somebody has set on this very parameter stays."""
    for name, value in marks.items():
        if not hasattr(parameter, name):  # not by `__dict__`, which a compiler that traces FSDP1 cannot follow
            setattr(parameter, name, value)
