"""Statistics on their way to the loggers of nvdlfw_inspect: a step has hundreds of lines, and the next step waits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from nvdlfw_inspect.logging import FileLogger, MetricLogger

_MARK = "\0"


Scalars = Sequence[tuple[str, float, int]]  # name, value, iteration


def log(scalars: Scalars) -> None:
    """Hand them to every logger that is enabled."""
    if not scalars:
        return
    for logger in MetricLogger.enabled_loggers:
        own = getattr(logger, "stats_logger", None)
        if type(logger) is FileLogger and isinstance(own, logging.Logger) and _is_plain(own):
            _write(own, scalars)
        else:
            for name, value, iteration in scalars:
                logger.log_scalar(name, value, iteration=iteration)


def _is_plain(logger: logging.Logger) -> bool:
    """Whether it does nothing but write lines into files."""
    plain = all(type(h) is logging.FileHandler and not h.filters and h.level <= logging.INFO for h in logger.handlers)
    return plain and not (logger.filters or logger.propagate) and logger.isEnabledFor(logging.INFO)


def _write(logger: logging.Logger, scalars: Scalars) -> None:
    """What `log_scalar` of each would write, at once: the time, the level and the rest of a line are all the same."""
    texts = [
        f"{name} \t\t\t\t iteration={iteration:06d} \t\t\t\t value={value:.4f}" for name, value, iteration in scalars
    ]
    for handler in logger.handlers:
        record: Any = logging.LogRecord(logger.name, logging.INFO, __file__, 0, _MARK, None, None)
        before, _, after = handler.format(record).partition(_MARK)
        record.msg = f"{after}\n{before}".join(texts)
        handler.handle(record)
