"""A folder of features that does not exist: nvdlfw_inspect is told to warn of it and to go on without.

Its 0.2.2 raises an AssertionError. What it does is seen when it is imported, which may be before this package or after:
after, by a finder that looks for its one module, and goes when that was found.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_MODULE = "nvdlfw_inspect.debug_manager"
_LOADS = "_load_namespace_apis_and_features"


def those_there_are(folders: Any) -> Any:
    """Folders that exist, with a warning for each that does not. What is no list of them is returned as it is."""
    if isinstance(folders, str) and folders:
        folders = [folders]
    if not isinstance(folders, list):
        return folders
    for folder in folders:
        if not os.path.exists(folder):
            from nvdlfw_inspect.logging import get_logger

            text = f"feature_dirs: {folder} does not exist: its features are left out"
            get_logger().log_message(text, level=logging.WARNING)
            warnings.warn(text, stacklevel=5)
    return [folder for folder in folders if os.path.exists(folder)]


def adapt(module: ModuleType) -> None:
    """Have the manager of this module load the folders that there are."""
    manager = getattr(module, "DebugManager", None)
    load = getattr(manager, _LOADS, None)
    if load is None or hasattr(load, "__wrapped__"):  # a version that loads in another way
        return

    @wraps(load)
    def adapted(self: Any, feature_dirs: Any) -> None:
        load(self, those_there_are(feature_dirs))

    setattr(manager, _LOADS, adapted)


class _Finder(MetaPathFinder, Loader):
    """Has the module loaded by whoever finds it, and adapts it."""

    def __init__(self) -> None:
        self._own: Any = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None:
            self._own, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        adapt(module)


def watch() -> None:
    """Adapt it now, or when it is imported."""
    if _MODULE in sys.modules:
        adapt(sys.modules[_MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
