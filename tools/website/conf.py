"""Settings of Sphinx for `make site`; `python -m tools.website` writes what they read."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bindings" / "jax")]

from te_core import __version__  # noqa: E402  behind the paths
from tools.website.docstrings import restructured  # noqa: E402

project, author, version, release = "te-runtime", "te-runtime contributors", __version__, __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "reference/**.md"]
html_theme, html_title, html_show_sourcelink, html_copy_source = "furo", f"te-runtime {__version__}", False, False
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "friendly", "github-dark"

# Links to headings as the repository's pages write them.
myst_heading_anchors = 5
myst_enable_extensions = ["deflist", "fieldlist"]

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = False
python_maximum_signature_line_length = 100
c_maximum_signature_line_length = 100
c_extra_keywords: list[str] = []
suppress_warnings = ["myst.header", "sphinx_autodoc_typehints"]


def setup(app: Any) -> None:
    """Docstrings are read by our own rules."""
    app.connect("autodoc-process-docstring", _docstring)


def _docstring(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    lines[:] = restructured(lines)
