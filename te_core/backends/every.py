"""What a type checker is to see: every backend has every operation, with its arguments. Nobody imports this."""

from __future__ import annotations

from te_core.backend import Backend
from te_core.backends.cpu import backend as cpu
from te_core.backends.cuda import backend as cuda
from te_core.backends.meta import backend as meta

CPU: Backend = cpu
CUDA: Backend = cuda
META: Backend = meta
