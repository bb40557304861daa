"""te_torch.debug.stats under its documented name."""

from te_torch.debug.stats import STATS_BUFFERS as STATS_BUFFERS
