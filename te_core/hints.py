"""The command that adds an extra to this installation, for errors to name: no index has the project itself.

(The line for a single library, which indices do have, is `libraries.pip_install`.)
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

NAME = "te-runtime"


def install(extra: str) -> str:
    """`pip install ...`, as it works here: from the clone or wheel that this came from, else package by package."""
    known = list(metadata.distributions(name=NAME))
    for distribution in known:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        url = origin.get("url", "")
        path = unquote(urlparse(url).path)
        if origin.get("dir_info", {}).get("editable") and Path(path).is_dir():
            return f'pip install -e "{path}[{extra}]"'
        if url and (not url.startswith("file:") or Path(path).exists()):
            return f'pip install "{NAME}[{extra}] @ {url}"'
    for distribution in known:
        asked = (text.partition(";") for text in distribution.requires or ())
        # What the extra asks for, without the marker that says so.
        needed = [need.strip() for need, _, marker in asked if f"extra == '{extra}'" in marker.replace('"', "'")]
        if needed:
            return " ".join(["pip install", *(f'"{requirement}"' for requirement in needed)])
    return f'pip install -e "{Path(__file__).resolve().parents[1]}[{extra}]"'  # a source tree on the path
