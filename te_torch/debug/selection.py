"""Which layers a section of the configuration selects, where nvdlfw_inspect 0.2.2 has an error and no answer.

`layer_numbers: 3` is `layer_numbers: [3]`; a layer that `exact_layer_names` does not list is one that the section does
not select.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from nvdlfw_inspect import config_manager


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

    config_manager.is_layer_in_cfg = selected
    config_manager.LayerSpec._parse_layer_numbers = parsed
