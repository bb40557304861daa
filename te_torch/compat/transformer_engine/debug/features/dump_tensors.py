"""te_torch.debug.features.dump_tensors under its documented name."""

from te_torch.debug.features.dump_tensors import DumpTensors as DumpTensors
