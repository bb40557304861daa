"""The backend that computes nothing. See backend.py."""
