"""The older name of tests/world.py."""

from __future__ import annotations

from tests.world import bits

__all__ = ["bits"]
