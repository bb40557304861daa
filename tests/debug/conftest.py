"""What a test of configured features runs in: nvdlfw_inspect, initialised with its configuration, and ended; and the
layers that it looks at."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import te_torch as te
from tests import recipes

FEATURES = Path(__file__).resolve().parents[2] / "te_torch" / "debug" / "features"


class Session:
    """An initialised nvdlfw_inspect: `step`, and what it has written."""

    def __init__(self, folder: Path, config: Any, *feature_dirs: Path, **options: Any) -> None:
        from nvdlfw_inspect import api

        self.api, self.folder = api, folder
        folders = [str(FEATURES), *map(str, feature_dirs)]
        options.setdefault("default_logging_enabled", True)
        api.initialize(config_file=config, feature_dirs=folders, log_dir=str(folder), **options)

    def step(self) -> None:
        self.api.step()

    def lines(self, kind: str = "nvdlfw_inspect_logs") -> list[str]:
        """What a file holds, without the times."""
        text = (self.folder / kind / "nvdlfw_inspect_globalrank-0.log").read_text()
        return [line.split(" - ", 1)[1] for line in text.splitlines()]

    def statistics(self) -> dict[tuple[str, int], float]:
        """{(name, iteration): value}."""
        found = {}
        for line in self.lines("nvdlfw_inspect_statistics_logs"):
            name, iteration, value = line.removeprefix("INFO - ").split(" \t\t\t\t ")
            key = name, int(iteration.removeprefix("iteration="))
            assert key not in found
            found[key] = float(value.removeprefix("value="))
        return found


@pytest.fixture
def debugging(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Begins a session; its end is the test's."""
    pytest.importorskip("nvdlfw_inspect", reason="the extra `debug` brings nvdlfw_inspect")
    from nvdlfw_inspect import api
    from nvdlfw_inspect.utils import SingleMessageLogger

    yield lambda config, *dirs, **options: Session(tmp_path, config, *dirs, **options)
    api.end_debug()
    SingleMessageLogger.logged_messages.clear()
    for name in ("nvdlfw_inspect", "Default Statistics"):
        logging.getLogger(name).handlers.clear()


def config(layers: dict[str, Any] | None = None, **features: dict[str, Any]) -> dict[str, Any]:
    """A configuration of one section."""
    chosen = {name: {"enabled": True, **keys} for name, keys in features.items()}
    return {"one": {"enabled": True, "layers": layers or {"layer_types": ["all"]}, "transformer_engine": chosen}}


WIDTH, WIDE, ROWS = 64, 96, 32
MODULES: dict[str, Callable[..., Any]] = {
    "Linear": te.Linear,
    "LayerNormLinear": te.LayerNormLinear,
    "LayerNormMLP": te.LayerNormMLP,
    "GroupedLinear": lambda *sizes, **options: te.GroupedLinear(2, *sizes, **options),
}


def made(kind: str, device: str = "cpu", **options: Any) -> Any:
    """A layer in bfloat16, the same each time."""
    torch.manual_seed(1)
    return MODULES[kind](WIDTH, WIDE, name="layer", params_dtype=torch.bfloat16, device=device, **options)


def values(device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """An input that wants its gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator).to(device, torch.bfloat16).requires_grad_()


def step(module: Any, x: torch.Tensor, recipe: str | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """Output and gradients by name, which are cleared."""
    splits = {2: [16, 16], 3: [16, 0, 16]}
    with recipes.region(recipe):
        y = module(x, splits[module.num_gemms]) if isinstance(module, te.GroupedLinear) else module(x, **options)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype))
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    found = {"y": y.detach(), "x": x.grad, **grads}
    module.zero_grad()
    x.grad = None
    return found  # type: ignore[return-value]


def differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """The names of what is not equal in two steps."""
    return [name for name in b if not torch.equal(a[name], b[name])]
