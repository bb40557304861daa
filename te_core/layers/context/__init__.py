"""Attention of sequences that lie cut over ranks. See schedule.py."""
