"""Processes that train together, for tests: started once a session, given one function after another.

A test is what each of the ranks does and asserts (tests/parallel/steps.py has `by_ranks`, and what such tests share):

    @pytest.mark.parametrize("add", [1.0, 5.0])
    @by_ranks()
    def test_a_sum(rank: Rank, add: float) -> None:
        number = torch.full((1,), add, device=rank.device)
        dist.all_reduce(number)
        assert number.item() == add * rank.world

Or it compares what a function at the top level of its file returned: `assert ranks.run(everyones_sum, 5.0) == [...]`.
A way of running a module over ranks that gives the bits of another one is an entry of tests/parallel/test_ways.py.

The fixtures are in tests/parallel/conftest.py: `ranks` runs a test with two gloo ranks on the CPU, with four, and with
NCCL on two GPUs and on four; `two` leaves out the four, `four` the two, `gloo_ranks` the GPUs; `pair` is two gloo ranks
alone, for what depends neither on their number nor on the device; `ranks_of` gives any others. With four ranks
`make test-more`, and with four GPUs `make gpu`, runs the tests marked `four_ranks` (or their cases with the parameters
that the mark names), `make test-full` all. `by_ranks` takes the fixture's name: `ranks` without one.

Where GPUs are fewer than ranks, they are shared (`make gpu-ranks`): to NCCL each rank is then on a host of its own, and
what it sends goes through sockets.

A function goes by its name (a lambda or a closure cannot be sent) and finds a default process group of its own, made
for this run: what one test leaves in a group does not meet the next one. Arguments and results are pickled; tensors
among the results have to be on the CPU.

`run` returns the results by rank, or raises RanksError, which shows for each rank that did not return its traceback
or exit code, where it stood, and what it printed. A test of failures takes `outcomes`, which raises nothing. Once one
rank has failed, the others have as long as the group's timeout to end by themselves; then they count as hung. A rank
on a GPU may end as a death: torch's watchdog aborts it where a collective waits in vain (`Outcome.waited_in_vain`), but
not where a group's ranks first meet, which NCCL waits for without end. After a death or a hang (on GPUs after an
exception too: NCCL may still wait) all ranks are ended, and the next run starts them anew. Those on the CPU are forked
from a process that has imported torch and te_torch, which takes seconds, and done nothing else; those on GPUs begin by
themselves, which takes these seconds.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe, connection, get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.backends import cuda_devices
from tests.recordings import going_well

ROOT = Path(__file__).resolve().parents[2]
LOOPBACK = [name for name in ("lo", "lo0") if Path(f"/sys/class/net/{name}").exists()]
START = 180.0  # seconds in which a process has to be there, or to have imported what it is to run
#: Seconds beyond the group's timeout. A rank on a GPU may be ended by torch's watchdog: it looks ten times a second,
#: gives the others time to write what they did (`WATCHDOG`), prints stacks, and aborts a process with a CUDA context.
GRACE = 60.0
#: A watchdog that has found a collective late waits four times so many milliseconds before it ends the process, for a
#: dump of what the ranks did: a minute, unless told otherwise, and a test has nobody to read the dump.
WATCHDOG = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
BEGUN = {"begun": True}  # what a rank says as it comes to the function
#: Before ranks are forked: else each imports them, and again after a death. (Every optimizer imports torch._dynamo.)
IMPORTED = [
    "pytest",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
    "te_torch",
]
_starting = threading.Lock()  # of a process, which finds its environment in this one's
SHOWN = 2000  # characters of a rank's output, from its beginning and from its end
SHOWN_OF_A_DEATH = 4 * SHOWN  # of an abort there are also stacks, in C++ and of all threads


@dataclass(frozen=True)
class Rank:
    """What a function is told of the process that it runs in."""

    number: int
    world: int
    device: str  # "cpu" or "cuda", which is this rank's own GPU, or its share of one


@dataclass(frozen=True)
class Outcome:
    """What became of a function on one rank."""

    rank: int
    how: str  # "returned", "raised", "died" or "hung"
    value: Any = None  # what was returned
    error: str = ""  # the class of what was raised
    text: str = ""  # its traceback, or the exit code
    output: str = ""  # what was printed in this run; of a hung rank also where it stood

    def __str__(self) -> str:
        parts = [f"rank {self.rank} {self.how} {self.error}".rstrip(), self.text.rstrip(), self.output.rstrip()]
        return "\n".join(part for part in parts if part)

    def waited_in_vain(self) -> bool:
        """Whether it ended, and said so, as NCCL's ranks do whose partner does not come: torch's watchdog finds the
        collective late and aborts the process, or NCCL has told of the lost connection before."""
        said = f"{self.text}\n{self.output}".lower()
        return self.how in ("raised", "died") and ("watchdog" in said or "nccl error" in said)


def wait_no_longer_than(seconds: float) -> None:
    """On a rank: how long its collectives of the default group wait from here on, for the others that come as far.

    For ranks that are to wait in vain: a timeout that short from the beginning would also meet those that start slowly.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    dist.barrier()
    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


class RanksError(AssertionError):
    """Some ranks did not return."""


class Ranks:
    """`world` processes of one group, started at the first run."""

    def __init__(self, world: int, device: str = "cpu", **env: str) -> None:
        self.world, self.device, self.env = world, device, env
        self.starts = 0  # how often the processes were started
        self.seconds = 0.0  # that the last run took, from when all ranks had come to the function
        self._processes: list[_Process] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._runs = 0

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 240.0, group_timeout: float = 120.0
    ) -> list[Any]:
        """What `function(rank, *args)` returned, by rank."""
        found = self.outcomes(function, *args, timeout=timeout, group_timeout=group_timeout)
        failed = [str(o) for o in found if o.how != "returned"]
        if failed:
            raise RanksError(f"{function.__name__} on {self.world} ranks\n\n" + "\n\n".join(failed))
        return [o.value for o in found]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout: float = 240.0, group_timeout: float = 120.0
    ) -> list[Outcome]:
        """What became of `function(rank, *args)`, by rank; after `timeout` seconds a rank counts as hung.

        `group_timeout` is that of the default process group: how long a collective waits for the others. Neither counts
        what it takes to start processes, to import the function there, and to make their group; nor does `seconds`.
        """
        if not self._processes:
            self.starts += 1
            folder = Path(self._folder.name)
            self._processes = [_Process(Rank(i, self.world, self.device), folder, self.env) for i in range(self.world)]
            for process in self._processes:
                process.pipe.poll(START)  # each sends its first word, or ends
        self._runs += 1
        store = str(Path(self._folder.name) / f"store-{self._runs}")
        order = pickle.dumps((function.__module__, function.__qualname__, args, store, group_timeout))
        for process in self._processes:
            process.begin(order)
        found: dict[int, Outcome] = {}
        begun = time.monotonic()
        deadline = begun + 2 * START
        while len(found) < self.world and (left := deadline - time.monotonic()) > 0:
            waiting = {p.pipe: p for p in self._processes if p.rank.number not in found}
            for pipe in connection.wait(list(waiting), left):
                outcome = waiting[pipe].outcome()  # type: ignore[index]
                if outcome is None:
                    if all(p.begun for p in self._processes):
                        begun = time.monotonic()
                        failed = any(o.how != "returned" for o in found.values())
                        deadline = deadline if failed else begun + timeout
                    continue
                found[outcome.rank] = outcome
                if outcome.how != "returned":
                    deadline = min(deadline, time.monotonic() + group_timeout + GRACE)
        for process in self._processes:
            if process.rank.number not in found:
                found[process.rank.number] = process.hung()
        self.seconds = time.monotonic() - begun
        usable = ("returned", "raised") if self.device == "cpu" else ("returned",)
        if any(o.how not in usable for o in found.values()):
            self.stop()
        return [found[i] for i in range(self.world)]

    def stop(self) -> None:
        """End the processes; a later run starts new ones."""
        for process in self._processes:
            process.stop()
        self._processes = []

    def close(self) -> None:
        """The same, for good."""
        self.stop()
        self._folder.cleanup()


def environment(rank: Rank) -> dict[str, str]:
    """What a rank's process finds beside the test's own environment."""
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if LOOPBACK:
        env["GLOO_SOCKET_IFNAME"] = LOOPBACK[0]
    if rank.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""  # torch.compile asks for a stream, and many processes crowd a GPU
        return env
    env |= WATCHDOG
    if rank.world > cuda_devices():
        env |= {"NCCL_HOSTID": f"rank-{rank.number}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    return env


class _Process:
    """The test's side of one rank: its process, the pipe to it, and the file that it prints to."""

    def __init__(self, rank: Rank, folder: Path, more: dict[str, str]) -> None:
        self.rank = rank
        self.pipe, theirs = Pipe()
        read, self._lifeline = os.pipe()
        lifeline = connection.Connection(read, writable=False)
        handle, self._log = tempfile.mkstemp(prefix=f"rank-{rank.number}-", dir=folder)
        self._begins = 0  # where the output of this run begins
        self.begun = False  # whether it has come to the function
        os.close(handle)
        context: Any = get_context("spawn" if rank.device == "cuda" else "forkserver")  # CUDA bears no fork
        context.set_forkserver_preload(IMPORTED)
        with _starting, patch.dict(os.environ, environment(rank) | more):
            given = rank, theirs, lifeline, self._log, dict(os.environ)
            self._process = context.Process(target=_serve, args=given, daemon=True)
            self._process.start()
        theirs.close()
        lifeline.close()

    def begin(self, order: bytes) -> None:
        self._begins, self.begun = os.path.getsize(self._log), False
        try:
            self.pipe.send_bytes(order)
        except OSError:
            pass  # it ended between two runs: `outcome` says so

    def outcome(self) -> Outcome | None:
        """What it sent, or how it ended; None of words by which it says that it is there, and where."""
        number = self.rank.number
        try:
            sent = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self._process.join()
            said = self._output(SHOWN_OF_A_DEATH)
            return Outcome(number, "died", text=f"exit code {self._process.exitcode}", output=said)
        self.begun = self.begun or sent == BEGUN
        return Outcome(number, **sent, output=self._output()) if "how" in sent else None

    def hung(self) -> Outcome:
        """It did not answer in time: where it stands."""
        os.kill(self._process.pid, signal.SIGUSR1)  # _serve has faulthandler print the stacks, its own at last
        end = time.monotonic() + START
        while " in _serve" not in self._output() and time.monotonic() < end:
            time.sleep(0.02)
        return Outcome(self.rank.number, "hung", output=self._output())

    def stop(self) -> None:
        self.pipe.close()
        self._process.kill()
        self._process.join()
        os.close(self._lifeline)

    def _output(self, shown: int = SHOWN) -> str:
        with open(self._log, errors="replace") as file:
            file.seek(self._begins)
            text = file.read()
        return text if len(text) <= 2 * shown else f"{text[:shown]}\n...\n{text[-shown:]}"


# ------------------------------------------------------------------------------------- in the rank's process


def _serve(
    rank: Rank, pipe: connection.Connection, lifeline: connection.Connection, log: str, env: dict[str, str]
) -> None:
    """Run what the test sends, until it closes the pipe."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    sys.stdout = sys.stderr = open(log, "a", buffering=1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for handle in (1, 2):
        os.dup2(sys.stdout.fileno(), handle)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_the_test, args=(lifeline,), daemon=True).start()
    importlib.import_module("torch.distributed")
    pipe.send_bytes(pickle.dumps({}))
    while True:
        try:
            order = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_result(rank, order, lambda: pipe.send_bytes(pickle.dumps(BEGUN))))


def _end_with_the_test(lifeline: connection.Connection) -> None:
    """A test that was killed closes nothing else: no rank outlives it, wherever it hangs."""
    lifeline.poll(None)
    os._exit(1)


def _result(rank: Rank, order: bytes, begun: Callable[[], None]) -> bytes:
    try:
        module, name, args, store, seconds = pickle.loads(order)
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        with _group(rank, store, seconds):
            begun()
            with going_well():
                value = function(rank, *args)
        if rank.device == "cuda":
            _return_memory()
        return pickle.dumps({"how": "returned", "value": value})
    except BaseException as error:  # also what pytest.fail and pytest.skip raise
        return pickle.dumps({"how": "raised", "error": type(error).__name__, "text": traceback.format_exc()})


def _return_memory() -> None:
    """Ranks stay for the session and share their GPUs with other tests: cached memory goes back after each run."""
    import torch

    torch.cuda.empty_cache()


def meet(rank: Rank, word: str, store: Any = None) -> None:
    """Wait until all ranks have come as far as this, by a store: no message of the group's is needed."""
    if store is None:
        store = importlib.import_module("torch.distributed").distributed_c10d._get_default_store()
    store.set(f"{word} {rank.number}", "")
    store.wait([f"{word} {i}" for i in range(rank.world)], timedelta(seconds=START))


@contextmanager
def _group(rank: Rank, store: str, seconds: float) -> Iterator[None]:
    """The default process group of one run."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    torch.set_num_threads(1)
    if rank.device == "cuda":
        torch.cuda.set_device(rank.number % torch.cuda.device_count())
    meeting = dist.FileStore(store, rank.world)
    meet(rank, "here", meeting)  # a short timeout shall not count what another rank still imports
    dist.init_process_group(
        "nccl" if rank.device == "cuda" else "gloo",
        store=dist.PrefixStore("group", meeting),
        rank=rank.number,
        world_size=rank.world,
        timeout=timedelta(seconds=START),  # connecting takes seconds where cores are shared: that is not what is tested
    )
    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))
    meet(rank, "connected", meeting)  # a rank that fails at once takes its group down: not while others still connect
    try:
        yield
        if dist.is_initialized():
            dist.barrier()  # no rank takes its group down while another one still talks
    except BaseException:
        if dist.is_initialized() and rank.device == "cpu":  # NCCL would wait for what the others never join
            dist.destroy_process_group()
        raise
    if dist.is_initialized():
        dist.destroy_process_group()
