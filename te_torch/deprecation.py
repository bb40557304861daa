"""Public names that go. Such a name works for one more minor version at least, and warns of its end."""

from __future__ import annotations

import warnings

from te_torch.runtime import constant_at_trace


@constant_at_trace
def deprecated(name: str, use: str, level: int = 1, goes: str = "", /) -> None:
    """Warn the caller of `name`: what to use in its place, and the version of te-runtime in which it goes.

    Without `goes` the name is an older one of Transformer Engine's and stays for the scripts that use it. `level` is 1
    where the deprecated function itself warns, and one more for each function between.
    """
    end = f"; te-runtime {goes} will not have it" if goes else ""
    warnings.warn(f"{name} is deprecated: use {use}{end}", DeprecationWarning, stacklevel=level + 3)
