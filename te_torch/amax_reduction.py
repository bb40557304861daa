"""Maxima over the processes that train together: before an update, row 0 of each history becomes that of all ranks.

One all-reduce for each step, direction and group takes all states that the update is about to read. As with any
collective, the ranks of a group have to run the same modules in the same order, and to end the same regions and
backward passes. Whether they did travels along: a head of numbers on which all have to agree, made of the modules'
names in their models (te_torch.module_paths), their rules, and how many regions an exception has ended.

The buffers of a group have one length whatever ran, so ranks that disagree exchange as many numbers, and see it by the
head. What ran together for the first time is looked at before anything else happens; where it needs longer buffers,
all ranks that agree then lengthen theirs. On the CPU every head is looked at. On a GPU that would wait for the device:
the head of a step is copied to the host on the side, and looked at in the next reductions, once it has arrived.

Nothing here runs in a job of one process.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from te_core.errors import ArgumentError, UnsupportedError
from te_core.precision import Precision
from te_torch.amax_disagreement import Entry, Report, told
from te_torch.exchange import all_gather_object, all_reduce, keep_for_graphs, of_group
from te_torch.module_paths import places

_AVAILABLE = dist.is_available()
_REDUCTIONS = ("forward amax reduction", "backward amax reduction")  # in errors
_SMALLEST = 1024  # numbers in a buffer; doubled until what ran fits
_AGREE = 5  # numbers that have to be equal on all ranks: two words of a digest, direction, modules, regions abandoned
_HEAD = 2 * _AGREE + 1  # each as v and -v, so that a maximum shows the smallest too; and whether all look at once
_WAITING = 32  # heads on their way to the host, before a reduction waits for the oldest
_PLANS = 16  # that a state keeps


def spans_ranks(group: Any) -> bool:
    """Whether a group (None: the default one) has several processes, this one among them."""
    return _AVAILABLE and dist.is_initialized() and dist.get_world_size(group) > 1


def checked_group(group: Any) -> Any:
    """An `amax_reduction_group`, once it is clear that it is a process group (or torch's mark of one that this process
    is not in). Outside of a distributed job nobody would ask it anything."""
    if _AVAILABLE and (isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER):
        return group
    raise ArgumentError(
        "autocast",
        f"amax_reduction_group={group!r}",
        "a process group of torch.distributed, or None: all ranks",
        'pass torch.distributed.new_group(ranks), or mesh["dp"].get_group(), say',
    )


def reduce(states: list[Any], direction: int, key: tuple[int, ...]) -> None:
    """Raise row 0 of the histories of one direction to the maximum over the group of each state's last region.

    `key` names the direction and the states by their tokens.
    """
    if not (_AVAILABLE and dist.is_initialized()):
        return
    found = states[0].update_plans
    whole = ("reduce", dist.group.WORLD, *key, *[s.group for s in states])
    plans = found.get(whole)
    if plans is None:
        if len(found) > _PLANS:
            found.clear()
        members: dict[tuple[Any, torch.device], list[Any]] = {}
        for state in states:
            if state.precision.history.reduce_amax and spans_ranks(state.group) and not state.scale_fwd.is_meta:
                group = dist.group.WORLD if state.group is None else state.group
                members.setdefault((group, state.scale_fwd.device), []).append(state)
        # A plan for each group and device, in an order that is every rank's.
        ordered = sorted(members, key=lambda m: (m[0].group_name, m[1].type, m[1].index or 0))
        plans = found[whole] = [_ReductionPlan(m[0], members[m], direction) for m in ordered]
    for plan in plans:
        plan.run()


def abandoned(groups: Iterable[Any], precision: Precision) -> None:
    """An exception has ended a region of these groups, so that it is not reduced.

    What this rank reduces next is of a later step than what the others then reduce: they see it by the head.
    """
    if precision.history is not None and precision.history.reduce_amax:
        for team in {of_group(dist.group.WORLD if g is None else g, _Team) for g in groups if spans_ranks(g)}:
            team.abandoned += 1


# ----------------------------------------------------------------------------------------------- the plan


class _Team:
    """What this process knows of a group, all of which the other ranks of the group know alike."""

    def __init__(self) -> None:
        self.length = _SMALLEST  # of all buffers
        self.settled: set[bytes] = set()  # digests of what ran on all ranks before
        self.abandoned = 0
        self.reductions = 0
        self.waiting: deque[tuple[_Mark, Report, int]] = deque()
        self.marks: dict[torch.device, list[_Mark]] = {}  # free ones
        self.plans: weakref.WeakSet[_ReductionPlan] = weakref.WeakSet()
        # A name is given once, at a module's first reduction, and stays when the module is wrapped or moved. The
        # second module of a name is another one, also when the first is gone: ranks do not forget at the same time.
        self.names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self.given: Counter[str] = Counter()

    def entries(self, states: list[Any], direction: int) -> tuple[Entry, ...]:
        """What the ranks have to agree on, state by state."""
        new = [s for s in states if s not in self.names]
        for state, (owner, path) in zip(new, places(new) if new else (), strict=True):
            name = None if owner is None else self.names.get(owner)
            if name is None:
                path = path or "a module without a place"
                self.given[path] += 1
                name = path if self.given[path] == 1 else f"{path} ({self.given[path]})"
                if owner is not None:
                    self.names[owner] = name
            self.names[state] = name
        return tuple(Entry(self.names[s], _rule_of(s, direction)) for s in states)

    def look_back(self) -> None:
        """Judge the heads that have arrived on the host."""
        while self.waiting:
            mark, mine, number = self.waiting[0]
            if not mark.arrived():
                if len(self.waiting) < _WAITING - 1:  # one more is on its way
                    return
                mark.wait()
            self.waiting.popleft()
            head = mark.host.tolist()
            self.marks[mark.device].append(mark)
            _judge(head, mine, None, self.reductions - number)


def _looks_at_once(device: torch.device) -> bool:
    """Whether to look at a head costs nothing there."""
    return device.type == "cpu"


def _placed(numbers: list[float], device: torch.device) -> torch.Tensor:
    """A tensor there of these numbers, which the host does not wait for."""
    pinned = device.type == "cuda"
    return torch.tensor(numbers, pin_memory=pinned).to(device, non_blocking=pinned)


class _ReductionPlan:
    """Rows of histories, the buffer that they are reduced in, and where each lies in it."""

    def __init__(self, group: Any, states: list[Any], direction: int) -> None:
        self.group, self.team = group, of_group(group, _Team)
        self.direction, self.entries = direction, self.team.entries(states, direction)
        self.digest = hashlib.blake2b(repr((direction, self.entries)).encode(), digest_size=6).digest()
        # .data: autograd does not count this as a change of the history, nor does the update that follows.
        histories = [s.amax_history_bwd.data if direction else s.amax_history_fwd.data for s in states]
        self.device = histories[0].device
        self.sizes = [h.shape[1] for h in histories]
        with torch.inference_mode(False):  # a model calibrated in inference is trained later
            self.rows = [h[0] for h in histories]
        self.at_once = _looks_at_once(self.device) or self.digest not in self.team.settled
        self._refuse_capture()
        self._prepare()
        self.team.plans.add(self)

    def _prepare(self) -> None:
        """The buffer of the group's length, with this rank's head; without the rows if they do not fit yet."""
        team = self.team
        words = [int.from_bytes(self.digest[i : i + 3], "big") for i in (0, 3)]  # of 24 bits: exact in float32
        agree = [*words, self.direction, len(self.rows), team.abandoned]
        self.report = Report(dist.get_rank(), self.direction, team.abandoned, self.entries)
        self.expected = [float(v) for v in (*agree, *[-v for v in agree], -1 if self.at_once else 0)]
        with torch.inference_mode(False):
            head = _placed(self.expected, self.device)
            self.buffer = torch.zeros(team.length, device=self.device)
            self.head = self.buffer[:_HEAD]
            self.fits = _HEAD + sum(self.sizes) <= team.length
            self.parts = list(self.buffer[_HEAD:][: sum(self.sizes)].split(self.sizes)) if self.fits else []
        self.all_parts = [self.head, *self.parts]
        self.all_rows = [head, *self.rows[: len(self.parts)]]

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _refuse_capture(self) -> None:
        """What a graph replays nobody looks at: it has to be what all ranks ran before, and its buffers eager ones."""
        if self._capturing():
            raise UnsupportedError(
                "amax reduction",
                "modules whose first reduction is inside a CUDA graph's capture",
                "modules that all ranks have run together before",
                "run a step of the same regions before the capture",
            )

    def run(self) -> None:
        """Reduce; raise where the ranks disagree, before a history changes."""
        team, capturing = self.team, self._capturing()
        if self.at_once:
            self._refuse_capture()
        if self.report.abandoned != team.abandoned:
            self._refuse_capture()
            self._prepare()
        if capturing:
            keep_for_graphs(self.buffer, self.all_rows[0])
        torch._foreach_copy_(self.all_parts, self.all_rows)
        team.reductions += 1
        all_reduce(_REDUCTIONS[self.direction], self.buffer, self.group, "max")
        if self.at_once:
            head = self.head.tolist()
            if head != self.expected:
                _judge(head, self.report, self.group)
            self._settle()
        elif not capturing:  # it is looked at later
            free = team.marks.setdefault(self.device, [])
            mark = free.pop() if free else _Mark(self.device)
            mark.take(self.head)
            try:
                team.look_back()  # at those before: whether this one has arrived already is a matter of luck
            finally:
                team.waiting.append((mark, self.report, team.reductions))
        if self.fits:
            torch._foreach_copy_(self.rows, self.parts)
        else:  # all ranks agree, so all of them come here
            while team.length < _HEAD + sum(self.sizes):
                team.length *= 2
            for plan in team.plans:  # now: a later capture could not
                plan._prepare()
            self.run()

    def _settle(self) -> None:
        """All ranks ran this: later heads need not be waited for."""
        team = self.team
        if self.digest not in team.settled:
            if len(team.settled) > 4096:
                team.settled.clear()
            team.settled.add(self.digest)
        if not _looks_at_once(self.device):
            self.at_once = False
            self.expected[-1] = 0.0
            self.all_rows[0].copy_(_placed(self.expected, self.device))


def _judge(head: list[float], mine: Report, group: Any, late: int = 0) -> None:
    """Raise if the ranks of a group disagreed in the reduction that this head is of, so many reductions ago."""
    most, least = head[:_AGREE], [0.0 - v for v in head[_AGREE:-1]]  # no -0
    if most != least:
        # Where all ranks look at this one, all of them come here.
        everyone = all_gather_object("amax reduction", mine, group) if not late and head[-1] == -1 else None
        raise ArgumentError("amax reduction", *told(mine, everyone, least[2:], most[2:], late))


def _rule_of(state: Any, direction: int) -> str:
    """All that the scales of a state depend on besides its history."""
    history = state.amax_history_bwd if direction else state.amax_history_fwd
    operand = state.precision.grad if direction else state.precision.input
    rule = state.precision.history
    algo = rule.amax_algo if isinstance(rule.amax_algo, str) else "an own amax_compute_algo"
    own = "" if rule.scale_algo is None else ", an own scaling_factor_compute_algo"
    rows, scales = history.shape
    return f"{scales} scales of {operand.dtype.name}, history of {rows}, {algo}, margin {rule.margin}{own}"


class _Mark:
    """A head on its way to the host."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.host = torch.empty(_HEAD, pin_memory=True)
        self.event = torch.cuda.Event()
        self.device = device

    def take(self, head: torch.Tensor) -> None:
        self.host.copy_(head, non_blocking=True)
        self.event.record(torch.cuda.current_stream(self.device))

    def arrived(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()
