"""The basic operations."""
