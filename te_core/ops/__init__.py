"""One function per operation: states the contract, checks arguments, makes outputs, asks the backend."""

from typing import TYPE_CHECKING

from te_core.arguments import explained
from te_core.described import Describer
from te_core.ops import raw
from te_core.ops.declare import BESIDE, OPERATIONS

if TYPE_CHECKING:
    from te_core.ops.raw import *  # noqa: F403  (names and types of the functions that are made below)

__all__ = sorted(name for name, one in OPERATIONS.items() if one.public)
globals().update({name: explained(getattr(raw, name)) for name in __all__})
globals().update({name: getattr(raw, name) for name in BESIDE})
__all__ = sorted([*__all__, *BESIDE])

_describer = Describer()
_describer.of = {**{name: one.described() for name, one in OPERATIONS.items()}, **BESIDE}
_describer.describe(globals()[name] for name in __all__)
