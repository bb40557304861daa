"""Sequences that lie cut over ranks: groups, and what becomes of data."""
