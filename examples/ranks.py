"""What a program of several processes does around its work: the group of its ranks, and an end on each of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from te_cli.arguments import UserError, mistakes_end, usual_device

#: What torchrun tells each process.
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def group_of_torchrun(program: str) -> Iterator[str]:
    """The process group of all ranks, by NCCL on GPUs ("cuda") and by gloo elsewhere ("cpu"): which of them comes out.

    It is taken down where all went well only: after an error the others may never come to that.
    """
    kind = usual_device()
    with mistakes_end(program):
        missing = [name for name in _OF_TORCHRUN if name not in os.environ]
        if missing:
            raise UserError(
                f"{', '.join(missing)} not set: this process is no rank of a group. Start the program by torchrun: "
                f"torchrun --nproc-per-node 2 examples/{program}"
            )
        if kind == "cuda":
            local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
            if local >= gpus:
                raise UserError(
                    f"rank {local} of this machine has no GPU of its own: torch sees {gpus}. Start as many ranks"
                )
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        yield kind
        dist.destroy_process_group()


def ended(main: Callable[[], int]) -> NoReturn:
    """Run a program and end its process, as a script ends, but without closing the interpreter.

    gloo's threads take the interpreter to let go of a collective's tensors, after it is complete. One that comes while
    the interpreter closes aborts the process ("terminate called without an active exception"), and
    `destroy_process_group` ends them only if nothing holds the groups, as torch's caches of DTensors do. After an
    error, closing would take NCCL's communicators down, which may wait for other ranks; torchrun ends those once this
    one has gone.
    """
    code: Any = 1
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    leave(code)


def leave(code: Any = 0) -> NoReturn:
    """End the process with what `sys.exit` would be given, once all is said: see `ended`."""
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
