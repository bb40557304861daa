"""What the programs beside this file share: their arguments, a small task, and the check that FP8 ran."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Arguments(NamedTuple):
    what: str  # train, load
    device: str
    folder: Path


def arguments() -> Arguments:
    return Arguments(sys.argv[1], sys.argv[2], Path(sys.argv[3]))


def task(device: str, width: int = 32, rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """An input and what a model shall make of it."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, width, generator=generator)
    return x.to(device), (x @ torch.randn(width, width, generator=generator) * 0.2).to(device)


def plain_model(width: int = 32) -> torch.nn.Module:
    """Of torch's layers alone: for clients to convert."""
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(width, 2 * width),
        torch.nn.GELU(),
        torch.nn.LayerNorm(2 * width),
        torch.nn.Linear(2 * width, width),
    )


def check_fp8(model: torch.nn.Module, layers: int, backward: tuple[str, ...] = ("dgrad", "wgrad")) -> None:
    """Every layer multiplied in FP8: forward, and in backward somewhere each of these."""
    import te_torch

    report = te_torch.precision_report(model)
    rows = report.as_dict()["gemms"]
    assert not report.idle and not report.fallbacks, report
    ran = [row for row in rows if row["a"] and row["gemm"] in ("fprop", "dgrad", "wgrad")]  # attention is not asked to
    assert sum(row["gemm"] == "fprop" for row in ran) == layers, report
    assert all(row["a"].startswith("float8") and row["b"].startswith("float8") for row in ran), report
    assert set(backward) <= {row["gemm"] for row in ran}, report


def falls(losses: list[float], by: float = 0.8) -> None:
    assert losses[-1] < by * losses[0], losses


def keep(folder: Path, **values: Any) -> None:
    """For the process that loads."""
    plain = {k: v.detach().cpu() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    torch.save(plain, folder / "seen.pt")


def kept(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "seen.pt", weights_only=True)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(found.detach().cpu(), wanted), (found.detach().cpu() - wanted).abs().max()


def in_ranks(run: Callable[..., None], size: int, *args: Any) -> None:
    """run(rank, *args) in a process for each rank."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run, args=(rank, *args)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert not any(process.exitcode for process in ranks)
