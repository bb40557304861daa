"""te_torch.debug.features.api under its documented name."""

from te_torch.debug.features.api import TEConfigAPIMapper as TEConfigAPIMapper
from te_torch.debug.features.api import TEDefaultFeatures as TEDefaultFeatures
from te_torch.debug.features.api import TransformerEngineAPI as TransformerEngineAPI
