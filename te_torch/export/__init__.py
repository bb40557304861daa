"""What an exporter sees of the layers: each in torch's operators, with a few of our own for FP8."""
