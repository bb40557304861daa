"""Statistics that are written at once stand in the files as the package writes them one by one."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.debug.conftest import config

SCALARS = [("layer_weight_max", 1.25, 3), ("layer_weight_mse", 1e-7, 3), ("layer_%s_{}", float("nan"), 123456789)]


class Kept:
    """A user's logger."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def log_scalar(self, name: str, value: float, iteration: int, **kwargs: Any) -> None:
        self.seen.append((name, value, iteration))


class Upper(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = record.msg.upper()
        return True


def written(session: Any) -> list[str]:
    return session.lines("nvdlfw_inspect_statistics_logs")  # type: ignore[no-any-return]


@pytest.mark.parametrize("filtered", [False, True])
def test_as_one_by_one(debugging: Any, filtered: bool) -> None:
    from nvdlfw_inspect.logging import MetricLogger

    from te_torch.debug.stats import log

    session = debugging(config({"layer_types": ["none"]}, LogTensorStats={"stats": ["max"], "tensors": ["weight"]}))
    kept = Kept()
    MetricLogger.add_logger(kept)
    (own,) = [logger for logger in MetricLogger.enabled_loggers if logger is not kept]
    keep = Upper()
    if filtered:  # what does more than write lines is asked for each
        own.stats_logger.addFilter(keep)
    try:
        log(SCALARS)
        at_once = written(session)
        for name, value, iteration in SCALARS:
            own.log_scalar(name, value, iteration=iteration)
        log([])
        assert written(session) == at_once * 2 and len(at_once) == len(SCALARS)
        assert at_once[0].startswith(
            "INFO - LAYER" if filtered else "INFO - layer_weight_max \t\t\t\t iteration=000003"
        )
        assert str(kept.seen) == str(SCALARS)
    finally:
        own.stats_logger.removeFilter(keep)
        MetricLogger.enabled_loggers.remove(kept)
