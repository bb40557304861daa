"""Machines that are not there, which several files share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.recordings import tapes

if TYPE_CHECKING:
    from tests.core.fake_cuda import Make


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """Makes a machine. Tapes are none, before and behind."""
    from te_core.tape import taped
    from tests.core.fake_cuda import Machine

    monkeypatch.setattr(taped, "COUNTS", taped.Counts())
    with tapes(None):
        yield partial(Machine, monkeypatch, tmp_path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, Any]:
    """(a runtime of a GPU that is not there, what its cuDNN is asked)."""
    from tests.core import fake_cudnn

    return fake_cudnn.runtime(monkeypatch, tmp_path)
