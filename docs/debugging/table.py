"""What the examples of docs/guides/14-a-bad-loss.md print: `table.py` the report, `table.py bisect` what bisect finds.

python docs/debugging/table.py pictures     draw the page's pictures anew (matplotlib, and a browser for page.png)
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))


def examples() -> list[str]:
    """The code of the page, in order."""
    page = HERE.parent / "guides" / "14-a-bad-loss.md"
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def run(count: int) -> tuple[dict[str, Any], str]:
    """The first examples: their names, and what the last of them prints."""
    names: dict[str, Any] = {}
    said = io.StringIO()
    for code in examples()[:count]:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(code.replace("print(seen)\n", "print(*str(seen).splitlines()[:7], sep='\\n')\n"), names)
    return names, said.getvalue().rstrip()


def draw() -> None:
    """The pictures of the page."""
    from tools import browser

    names, _ = run(2)
    names["seen"].to_png(HERE)
    with tempfile.TemporaryDirectory() as folder:
        page = names["seen"].to_html(Path(folder) / "page.html", "A bad loss, followed to its layer")
        browser.show(page, HERE / "page.png", (1180, 830))


def main() -> None:
    """What the page shows of the examples, as a block of text."""
    what = sys.argv[1] if len(sys.argv) > 1 else "report"
    if what == "pictures":
        draw()
        return
    import os

    os.chdir(tempfile.mkdtemp())
    print("```text", run(2 if what == "report" else 4)[1], "```", sep="\n")


if __name__ == "__main__":
    main()
