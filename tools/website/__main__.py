"""`make site`: the documents and the reference as pages that a browser shows, in build/site/html.

They work from a file path, and fetch nothing from a network. Ends with 1 where a link leads nowhere, where Sphinx warns
of something, or where the reference lacks a public name.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from sphinx.cmd.build import main as sphinx

from tools.website import checks, sources

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "site"
INDEX = '<!doctype html><title>te-runtime</title><meta http-equiv="refresh" content="0; url=README.html">'


def main() -> int:
    """Build the site and look at what came out; the number of problems, at most 1."""
    start = time.perf_counter()
    shutil.rmtree(BUILD, ignore_errors=True)  # a docstring may change while its page does not
    sources.write(BUILD / "source")
    folders = ["-c", str(Path(__file__).parent), str(BUILD / "source"), str(BUILD / "html")]
    failed = sphinx(["-b", "html", "-W", "--keep-going", "-q", "-j", str(os.cpu_count()), *folders])
    found = [] if failed else [*checks.dead_links(BUILD / "html"), *checks.undescribed(BUILD / "html")]
    print(*found, sep="\n", end="\n" * bool(found))
    (BUILD / "html" / "index.html").write_text(INDEX)
    verdict = "FAILED" if failed or found else "ok, open build/site/html/index.html"
    print(f"site: {verdict} ({time.perf_counter() - start:.0f} s)")
    return bool(failed or found)


if __name__ == "__main__":
    sys.exit(main())
