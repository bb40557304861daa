"""Calls of layers, recorded once and replayed: `taped.py` decides, `recorder.py` records, `tape.py` replays."""
