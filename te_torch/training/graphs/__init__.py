"""CUDA graphs of modules: a forward and a backward as one launch each.

`make.py` holds the documented functions. Below it: `arguments.py` and `schedule.py` (what the caller asked for, and in
which order), `traces.py` (what warm-up and capture must not leave behind), `record.py` (which FP8 states ran),
`unit.py` (one callable being captured), `weights.py` (weights quantized once for several microbatches), `replay.py`
(what the caller gets) and `device.py` (all that is CUDA's).
"""
