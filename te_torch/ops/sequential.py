"""`Sequential`: torch's, in which operations that follow one another run as one chain."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.tokens import enrolled, of_token
from te_torch.doors import either
from te_torch.ops.fuser import OperationFuser
from te_torch.ops.op import BasicOperation, FusibleOperation
from te_torch.runtime import constant_at_trace


class Sequential(torch.nn.Sequential):
    """Modules one after another; operations of `te_torch.ops` that follow one another are one chain, and are fused.

    Example:
        mlp = te.ops.Sequential(te.ops.LayerNorm(64, device="cpu"), te.ops.Linear(64, 128, device="cpu"), te.ops.GELU())
        y = mlp(torch.randn(32, 64))  # [32, 128]
    """

    _module_groups: list[Any] | None = None
    _grouped: tuple[Any, ...] = ()  # the modules that the groups are of

    def __init__(self, *args: Any) -> None:
        named = len(args) == 1 and isinstance(args[0], Mapping)
        super().__init__(*((OrderedDict(args[0]),) if named else args))
        self._token = enrolled(self)  # by which traced code has it grouped

    def __add__(self, other: Iterable[torch.nn.Module]) -> Sequential:
        return type(self)(*self, *other)

    def __iadd__(self, other: Iterable[torch.nn.Module]) -> Sequential:
        self.extend(other)
        return self

    @classmethod
    def _make_module_groups(cls, modules: Iterable[torch.nn.Module]) -> list[Any]:
        """Modules, and a chain for the operations that follow one another."""
        groups: list[Any] = []
        for fusible, some in groupby(modules, lambda m: isinstance(m, FusibleOperation)):
            found: list[Any] = list(some)
            groups += [OperationFuser(found)] if fusible else found
        return groups

    def _group(self) -> None:
        """Make the groups, if the modules are others than those they are of."""
        modules = tuple(self._modules.values())
        if self._module_groups is None or self._grouped != modules:
            self._grouped, self._module_groups = modules, self._make_module_groups(modules)

    def forward(
        self, input: torch.Tensor, *extra_inputs: torch.Tensor, op_kwargs: Mapping[Any, dict[str, Any]] | None = None
    ) -> Any:
        """The output, or a tuple of it and the extra outputs of operations."""
        either(Sequential._group, _group_traced)(self)
        groups: Any = self._module_groups
        if len(groups) == 1 and not extra_inputs and not op_kwargs:  # nearly always
            return groups[0](input)
        kwargs = {id(self._target(key)): given for key, given in (op_kwargs or {}).items()}
        x, used, returned = input, 0, []
        for group in groups:
            if not isinstance(group, OperationFuser):
                x = group(x)
                continue
            extra = extra_inputs[used : used + group.num_extra_inputs]
            used += group.num_extra_inputs
            found = group(x, *extra, basic_op_kwargs=[kwargs.get(id(op), {}) for op in group._basic_ops])
            x, *some = found if isinstance(found, tuple) else (found,)
            returned += some
        return (x, *returned) if returned else x

    def _target(self, key: Any) -> BasicOperation:
        """The operation that `op_kwargs` names."""
        module = key if isinstance(key, torch.nn.Module) else self[key]
        if not isinstance(module, BasicOperation) or not any(module is m for m in self.modules()):
            raise ArgumentError(
                "Sequential.forward",
                f"op_kwargs for a {type(module).__name__}",
                "basic operations of this Sequential (of ops.Linear, those in its basic_ops)",
                "name one of them",
            )
        return module

    def __getstate__(self) -> dict[str, Any]:
        """Without the chains, which the next forward makes again."""
        return {**self.__dict__, "_module_groups": None, "_grouped": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._token = enrolled(self)


def _group_traced(model: Sequential) -> None:
    _group_at_trace(model._token)


@constant_at_trace
def _group_at_trace(token: int) -> None:
    of_token(token)._group()
