"""te_torch.debug.features.fake_quant under its documented name."""

from te_torch.debug.features.fake_quant import FakeQuant as FakeQuant
