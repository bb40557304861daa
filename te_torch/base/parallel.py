"""What modules whose weights are spread over ranks share: the group, local sizes, marks for trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.meeting import Facts, agree_once, words
from te_core.layers.parallel import Split
from te_core.precision import Precision
from te_torch.autocast import active
from te_torch.base.documented import Documented
from te_torch.base.sharding import MarkedModule
from te_torch.doors import never_traced
from te_torch.parallel.communicator import GroupCommunicator
from te_torch.parallel.groups import check_reduction, group_of
from te_torch.parallel.overlap import Flags, check_name, flags_of, idle_flags, overlap_of
from te_torch.runtime import constant_at_trace, runtime_for

#: Options that a rank may have for itself: they change nothing of what the ranks compute together.
_OWN = frozenset(
    ("name", "device", "init_method", "output_layer_init_method", "get_rng_state_tracker", "tp_group", "tp_size",
     "seq_length", "micro_batch_size", "fuse_wgrad_accumulation")
)  # fmt: skip


class Team:
    """A module's process group, and on what its ranks have agreed. A copy of the module has the same one; a pickled
    module has none."""

    __slots__ = ("agreed", "group")

    def __init__(self, group: Any) -> None:
        self.group, self.agreed = group, set[str]()

    def __deepcopy__(self, memo: Any) -> Team:
        return self

    def __reduce__(self) -> Any:
        return Team, (None,)


class TensorParallel(Documented, MarkedModule):
    """A module that may be one of several ranks' parts of a layer."""

    parallel_mode: str | None = None
    symmetric_ar_type: str | None = None
    overlap_flags: Flags | None = None  # which GEMMs overlap with their communication
    _team: Team | None = None
    _around: Facts = {}
    _calls: dict[Any, Any]

    @property
    def tp_group(self) -> Any:
        """The process group that the weights are spread over; None where there is none (yet)."""
        return None if self._team is None else self._team.group

    @tp_group.setter
    def tp_group(self, group: Any) -> None:
        self.__dict__["_team"] = None if group is None else Team(group_of(type(self).__name__, group))

    def _spread_over(self, tp_size: int | None, tp_group: Any, sequence_parallel: bool | None) -> None:
        """Take over the constructor's group: from it the size follows, where it is given."""
        self.tp_size = size_of(type(self).__name__, tp_size, tp_group)
        self.sequence_parallel = bool(sequence_parallel) and self.tp_size > 1
        self.tp_group = tp_group

    def _local(self, name: str, size: int) -> int:
        """This rank's part of a size."""
        if size % self.tp_size:
            raise ArgumentError(
                type(self).__name__,
                f"{name}={size} over {self.tp_size} ranks",
                f"a {name} that tp_size divides",
                f"correct {name}",
            )
        return size // self.tp_size

    def _take_shape(self, in_features: int, out_features: int, parallel_mode: str | None) -> None:
        """The sizes of this rank's part of a weight."""
        self.parallel_mode = mode = None if parallel_mode is None else str(parallel_mode).lower()
        self.in_features, self.out_features = in_features, out_features
        if self.tp_size > 1 and mode == "row":
            self.in_features = self._local("in_features", in_features)
        elif self.tp_size > 1 and mode == "column":
            self.out_features = self._local("out_features", out_features)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the group that the weights are spread over, before the first forward; its size is `tp_size`."""
        operation = f"{type(self).__name__}.set_tensor_parallel_group"
        if tp_group is not None:
            check_group(operation, tp_group, self.tp_size)
        self.tp_group = tp_group
        self._calls.clear()

    def _take_overlap(self, options: Mapping[str, Any]) -> None:
        """Which GEMMs overlap, of a constructor that takes the name of its weight."""
        operation, name = type(self).__name__, options["ub_name"]
        flags = flags_of(operation, options)
        check_name(operation, flags, name, self.parallel_mode)
        self.overlap_flags, self.ub_name = flags, name

    def flags_without_effect(self) -> str:
        """Why flags of overlap do nothing, whatever the call is; "" where they do something, or there are none."""
        return idle_flags(self.overlap_flags, self.tp_size, self.sequence_parallel)

    def decide_anew(self) -> None:
        """Forget what calls depend on: it changed outside of the module."""
        self._calls.clear()
        self.__dict__["_version"] += 1

    def _split(
        self, mode: str | None, precision: Precision | None, name: str | None, dtype: torch.dtype
    ) -> Split | None:
        """How a weight of this mode and (for overlap) name is spread; None where it is whole."""
        if self.tp_size == 1 or mode is None:
            return None
        if self.sequence_parallel and precision is not None and precision.history is not None:
            operation, over = f"{type(self).__name__}.forward", None if active.region is None else active.region.group
            groups = () if self._team is None else (self._team.group,)
            check_reduction(operation, precision.history, over, groups, "tensor-parallel", "sequence_parallel=True")
        symmetric = None if self.sequence_parallel or mode == "column" else self.symmetric_ar_type
        overlap = None
        if self.overlap_flags is not None and name is not None:
            overlap = overlap_of(self, name, mode, precision, dtype)
        return Split(mode, self.tp_size, self.sequence_parallel, symmetric, overlap)

    def _communicator(self, *splits: Any) -> GroupCommunicator | None:
        """What connects the ranks of these weights, for one call of this module."""
        if not any(splits):
            return None
        if self._team is None or self._team.group is None:
            raise UnsupportedError(
                f"{type(self).__name__}.forward",
                f"tp_size={self.tp_size} without a group",
                "the process group of the ranks that the weights are spread over",
                "pass tp_group to the constructor, or call set_tensor_parallel_group before the first forward",
            )
        try:
            return GroupCommunicator(self._team.group, self._team.agreed, self._around)
        except ValueError as error:  # torch does not know the group any more
            raise ArgumentError(
                f"{type(self).__name__}.forward",
                f"a tp_group that is gone ({error})",
                "a group of torch.distributed as it is now: destroy_process_group ends all groups",
                "make the group again, and call set_tensor_parallel_group with it",
            ) from error

    def _meet(self, facts: Facts, device: torch.device) -> None:
        """See that all ranks of the group, if there is one, run what these facts say."""
        if self.tp_size > 1 and self.tp_group is not None and device.type != "meta":
            agree_once(runtime_for(torch.empty(0, device=device)), self._communicator(True), facts)

    # ------------------------------------------------------------------------------- marks for trainers

    def _mark_parallel(self, dim: int, *names: str) -> None:
        """Tell trainers along which side tensor parallelism cuts these parameters."""
        for name in names:
            self._mark(name, tensor_model_parallel=True, partition_dim=dim, partition_stride=1)

    def _mark_sequence(self, *names: str) -> None:
        """Tell them whether these parameters see the tokens of one rank only, so that gradients are to be summed."""
        for name in names:
            if self._parameters.get(name) is not None:
                self._mark(name, sequence_parallel=self.sequence_parallel)


def compare_options(module: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Have ranks compare these options of a module made of others when the first of its spread parts runs."""
    first = next((m for m in module.modules() if isinstance(m, TensorParallel) and m.parallel_mode), None)
    if first is not None:
        kind = type(module).__name__
        own = {
            f"{kind} {name}": str(value) if isinstance(value, torch.dtype) else words(value)
            for name, value in options.items()
            if name not in _OWN
        }
        first._around = {**own, **first._around}


def size_of(operation: str, tp_size: int | None, tp_group: Any) -> int:
    """The number of ranks, by the group if there is one."""
    given = 1 if tp_size is None else int(tp_size)
    if tp_group is None:
        return given
    tp_group = group_of(operation, tp_group)
    if not dist.is_initialized():
        raise ArgumentError(
            operation,
            "tp_group without torch.distributed",
            "a group of an initialised process",
            "call torch.distributed.init_process_group first",
        )
    if given != 1 or dist.get_rank(tp_group) < 0:
        check_group(operation, tp_group, given)
    return dist.get_world_size(tp_group)


def check_group(operation: str, tp_group: Any, size: int) -> None:
    """The group is one of this process, and of this size."""
    tp_group = group_of(operation, tp_group)
    if not dist.is_initialized() or dist.get_rank(tp_group) < 0:
        raise ArgumentError(
            operation,
            "a group that this process is not in",
            "a process group with this rank in it",
            "make the groups on all ranks, and pass each rank its own",
        )
    found = dist.get_world_size(tp_group)
    if found != size:
        raise ArgumentError(
            operation,
            f"a group of {found} ranks with tp_size={size}",
            "a group of tp_size ranks: the weights have been cut into so many parts",
            "correct tp_size, or the group",
        )


def eagerly(module: Any, *args: Any) -> Any:
    """What torch.compile runs in the place of a spread module's forward: the same, behind a graph break.

    A region that traced code has entered does not reach over it, so there it is an error, and not another precision.
    """
    region = active.region
    if region is not None and region.traced:
        _refuse_traced_region()
    return _forward(module, *args)


@never_traced("a module whose weights are spread over ranks runs eagerly: its collectives are no operators")
def _forward(module: Any, *args: Any) -> Any:
    return module.forward(*args)


@constant_at_trace
def _refuse_traced_region() -> None:
    raise UnsupportedError(
        "torch.compile",
        "te.autocast inside the compiled function, around a module whose weights are spread over ranks",
        "a region around the compiled function: such modules run eagerly, behind a graph break",
        "move the region out of the compiled function",
    )
