"""Fixtures of the tests of te_torch."""

from __future__ import annotations

import pytest

from te_torch.attention.choose import FUSED, UNFUSED
from tests.attention_steps import only


@pytest.fixture(params=[FUSED, UNFUSED])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each backend of attention that a CPU has, let through alone."""
    only(monkeypatch, request.param)
    return request.param
