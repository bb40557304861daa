"""Rows of messages of parallel; tests/messages/test_messages.py says how to add one."""

from __future__ import annotations

from tests.messages.rows import Rows

ROWS = Rows()
