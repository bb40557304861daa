"""Layers that are recorded once and replayed."""
