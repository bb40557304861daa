"""What calls cost besides their work: copies between host and device, allocations, launches, waits of the host.

    with counted() as counts:
        y, back = te.linear(x, weight)
    assert not counts.to_host and not counts.waits

While a block runs, functions of the driver, of runtimes and of tapes are exchanged for ones that count, in all threads.
Outside of blocks nothing counts, and no call of a layer asks whether it should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from threading import RLock
from typing import Any

from te_core.backends.cpu import backend as host
from te_core.backends.cuda import backend as cuda
from te_core.backends.cuda.cudnn import Attended, Handle
from te_core.backends.cuda.gemm_run import Multiplied, Prepared
from te_core.backends.cuda.memory import Fill
from te_core.driver import Driver
from te_core.functional import arrays
from te_core.kernels.loader import Kernel, Launch, TableLaunch
from te_core.runtime import Runtime
from te_core.tape.tape import Tape


@dataclass
class Counts:
    """What was counted since the block began. On the host runtime nothing is launched, and nobody waits."""

    to_device: int = 0  # copies from the host; by the host's runtime, copies of what it is given
    to_host: int = 0
    allocations: int = 0  # of tensors, by whatever allocator; scratch memory where it grows
    launches: int = 0  # of kernels, products, graphs of attention; fills
    waits: int = 0  # of the host for a device, or for what another library computes


def _launches(step: object) -> bool:
    """Whether a step of a tape is given to the device."""
    return isinstance(step, (Launch, TableLaunch, Multiplied, Attended, Fill))


def _always(what: str) -> Callable[..., dict[str, int]]:
    return lambda *_: {what: 1}


#: What is exchanged: (where it is, its name, what a call of it adds).
_WATCHED: tuple[tuple[Any, str, Callable[..., dict[str, int]]], ...] = (
    (Runtime, "empty", lambda rt, *_: {"allocations": rt.device.kind != "meta"}),
    (Tape, "replay", lambda tape, *_: {"allocations": len(tape.takes), "launches": sum(map(_launches, tape.steps))}),
    (Kernel, "__call__", lambda kernel, rt, *_: {"launches": rt.recorder is None}),
    (Kernel, "_launch_with", _always("launches")),
    (Prepared, "run", _always("launches")),
    (Handle, "execute", _always("launches")),
    (cuda, "zero", lambda rt, out: {"launches": bool(out.size) and rt.recorder is None}),
    (host, "copy_from_host", _always("to_device")),
    (host, "copy_to_host", lambda rt, tensor: {"to_host": bool(tensor.size)}),
    (Driver, "copy_to_device", _always("to_device")),
    (Driver, "copy_to_host", _always("to_host")),
    (Driver, "synchronize", _always("waits")),
    (Driver, "elapsed_ms", _always("waits")),
    (arrays, "_finished", _always("waits")),
    (arrays._CupyMemory, "record_stream", _always("waits")),
)


class _Watch:
    """Who counts now, and the functions that were exchanged for it."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.counting: tuple[Counts, ...] = ()
        self.before: tuple[Any, ...] = ()


_watch = _Watch()


def _counted(function: Any, adds: Callable[..., dict[str, int]]) -> Any:
    @wraps(function)
    def counting(*given: Any, **named: Any) -> Any:
        added = adds(*given)
        with _watch.lock:
            for counts in _watch.counting:
                for name, number in added.items():
                    setattr(counts, name, getattr(counts, name) + number)
        return function(*given, **named)

    return counting


@contextmanager
def counted() -> Iterator[Counts]:
    """Count within the block. Blocks may lie in one another, and in several threads: each counts all."""
    counts = Counts()
    with _watch.lock:
        if not _watch.counting:
            _watch.before = tuple(getattr(place, name) for place, name, _ in _WATCHED)
            for (place, name, adds), function in zip(_WATCHED, _watch.before, strict=True):
                setattr(place, name, _counted(function, adds))
        _watch.counting += (counts,)
    try:
        yield counts
    finally:
        with _watch.lock:
            _watch.counting = tuple(other for other in _watch.counting if other is not counts)
            if not _watch.counting:
                for (place, name, _), function in zip(_WATCHED, _watch.before, strict=True):
                    setattr(place, name, function)
                _watch.before = ()
