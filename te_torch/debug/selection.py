"""Which layers a section of the configuration selects, where nvdlfw_inspect 0.2.2 has an error and no answer.

`layer_numbers: 3` is `layer_numbers: [3]`; a layer that `exact_layer_names` does not list is one that the section does
not select. A key under `layers` that is no selector is a warning: the package does not read it.
"""

from __future__ import annotations

import warnings
from functools import wraps
from typing import Any

from nvdlfw_inspect import config_manager

_SELECTORS = ("exact_layer_names", "layer_name_regex_pattern", "layer_numbers", "layer_types")


def adapt() -> None:
    """Once for a process; another time changes nothing."""
    selects, parse = config_manager.is_layer_in_cfg, config_manager.LayerSpec._parse_layer_numbers
    if hasattr(selects, "__wrapped__"):
        return

    @wraps(selects)
    def selected(layer_name: str, cfg: Any) -> bool:
        listed = cfg.layers.exact_layer_names
        return bool(selects(layer_name, cfg)) if listed is None else layer_name in listed

    @wraps(parse)
    def parsed(self: Any, numbers: Any) -> Any:
        return parse(self, [numbers] if type(numbers) is int else numbers)

    initialize = config_manager.LayerSpec.initialize

    @wraps(initialize)
    def initialized(self: Any, cfg: Any) -> None:
        for key in cfg:
            if key not in _SELECTORS:
                warnings.warn(
                    f"precision debugging: layers: {key!r} selects nothing. Allowed: {', '.join(_SELECTORS)}.",
                    stacklevel=2,
                )
        initialize(self, cfg)

    config_manager.LayerSpec.initialize = initialized
    config_manager.is_layer_in_cfg = selected
    config_manager.LayerSpec._parse_layer_numbers = parsed
