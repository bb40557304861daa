"""Where statistics wait for the end of an iteration, under documented names."""
