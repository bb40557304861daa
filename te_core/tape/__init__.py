"""A layer's call is recorded once and replayed: `taped.py` says when, `recorder.py` how, `tape.py` what it is then."""
