"""Settings of Sphinx for `make site`; `python -m tools.website` writes what they read."""

from __future__ import annotations

import enum
import inspect
import sys
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bindings" / "jax")]

from sphinx.util.inspect import stringify_signature  # noqa: E402  behind the paths

from te_core import __version__  # noqa: E402
from te_core.described import shown  # noqa: E402
from tools.website.docstrings import restructured  # noqa: E402

project, author, version, release = "te-runtime", "te-runtime contributors", __version__, __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "reference/**.md"]
html_theme, html_title, html_show_sourcelink, html_copy_source = "furo", f"te-runtime {__version__}", False, False
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "friendly", "github-dark"

smartquotes_action = "D"  # dashes, no quotes: "bshd" is a value

# Links to headings as the repository's pages write them.
myst_heading_anchors = 5
myst_enable_extensions = ["attrs_block"]

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_maximum_signature_line_length = 100
c_maximum_signature_line_length = 100


def setup(app: Any) -> None:
    """Docstrings are read by our own rules, and signatures are those that tests compare."""
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-skip-member", _skipped)


def _docstring(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    of_type = what == "data" and "".join(lines[:1]) in (type(value).__doc__ or "")  # no comment of ours
    lines[:] = [] if of_type else restructured(lines)


def _skipped(app: Any, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Fields, which are described as arguments, and what they hold; methods, properties and members of enums stay."""
    stays = callable(value) or isinstance(value, (property, cached_property, classmethod, staticmethod, enum.Enum))
    foreign = isinstance(value, FunctionType) and not value.__module__.startswith("te_")
    return True if foreign or (what == "class" and not stays) else None


class _Shown(str):
    """A default as descriptions show it."""

    __repr__ = str.__str__


def _signature(
    app: Any, what: str, name: str, value: Any, options: Any, signature: str | None, gives: str | None
) -> tuple[str, None] | None:
    """Of a class that of its constructor, also where a metaclass answers calls."""
    made = vars(value).get("__init__", value.__init__) if what == "class" else None
    if made is None or issubclass(value, enum.Enum) or not getattr(made, "__module__", "").startswith("te_"):
        return None
    found = inspect.signature(made)
    own = list(found.parameters.values())[1:]
    own = [one if one.default is one.empty else one.replace(default=_Shown(shown(one.default))) for one in own]
    return stringify_signature(found.replace(parameters=own), show_annotation=False, show_return_annotation=False), None
