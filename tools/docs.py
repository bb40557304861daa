"""`make docs`: keep the documents true. Over README.md, AGENTS.md, CHANGELOG.md and docs/**/*.md it

* renews what is generated: the text between `<!-- output of: python ... -->` and `<!-- end of output -->`. Under
  `<!-- output, in figures of one processor, of: python ... -->` it stays where only its figures are others: sums of
  floats are not the same on every processor;
* runs the examples: the ```python blocks of a page in one process, in order, but for one that stands under
  `<!-- not run: the reason -->`. Those that are not run because `it needs a GPU` are run with --gpu;
* follows every link to a file of the repository, and to a heading of a page;
* writes tests/messages.txt, what wrong calls say (tests/messages compares it).

With --check nothing is written; a page whose generated text has changed then fails. --no-examples runs none of them,
as tests/docs does it: what is left is quick enough for `make check`.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
from contextlib import redirect_stdout
from multiprocessing import TimeoutError, get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 300  # seconds for a page's examples, or for all its generated text

_OUTPUT = re.compile(
    r"(?P<head><!-- output(?P<loose>, in figures of one processor,)? of: (?P<command>.*?) -->\n)"
    r"(?P<text>.*?)(?P<tail><!-- end of output -->)",
    re.DOTALL,
)
_FIGURE = re.compile(r"\d[\d.e+-]*")
_GAP = re.compile(r"[\s-]+")  # columns are as wide as their figures
_NEEDS_GPU = "<!-- not run: it needs a GPU -->"
_EXAMPLE = re.compile(r"(?P<skip><!-- not run: .+? -->\n+)?^```python\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!\w+:)(?P<file>[^)#\s]*)(?:#(?P<place>[^)\s]*))?\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def pages() -> list[Path]:
    """The documents."""
    first = [ROOT / name for name in ("README.md", "AGENTS.md", "CHANGELOG.md")]
    return [page for page in first if page.is_file()] + sorted((ROOT / "docs").glob("**/*.md"))


def python(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """This interpreter, with the project on its path."""
    paths = [str(ROOT), str(ROOT / "bindings" / "jax"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT)


#: What most generated text imports: the processes that make it are forked from one that has imported these.
IMPORTED = ["numpy", "torch", "matplotlib.pyplot"]


def output_of(arguments: list[str]) -> str:
    """What `python ARGUMENTS` prints, run in this process, which ends afterwards."""
    sys.path[:0] = [str(ROOT), str(ROOT / "bindings" / "jax")]
    os.chdir(ROOT)
    printed = io.StringIO()
    kind, name, *rest = arguments if arguments[0] in ("-c", "-m") else ("", *arguments)
    sys.argv = [name, *rest]
    try:
        with redirect_stdout(printed):
            if kind == "-c":
                exec(compile(name, "<generated text>", "exec"), {"__name__": "__main__"})
            elif kind == "-m":
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise ValueError(f"`python {shlex.join(arguments)}` ended with {ended.code}") from None
    except BaseException:
        raise ValueError(f"`python {shlex.join(arguments)}` failed:\n{traceback.format_exc()}") from None
    return f"{printed.getvalue().rstrip()}\n"


def words(text: str) -> str:
    """A text without its figures."""
    return _GAP.sub(" ", _FIGURE.sub("0", text))


def renew(text: str) -> str:
    """The page with its generated parts made anew, each by a process of its own and several at once."""
    found = list(_OUTPUT.finditer(text))
    commands = [shlex.split(match["command"]) for match in found]
    if other := [match["command"] for match, (program, *_) in zip(found, commands, strict=True) if program != "python"]:
        raise ValueError(f"generated text comes from `python ...`, not from `{other[0]}`")
    if not found:
        return text
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with context.Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        made = iter(pool.map_async(output_of, [rest for _, *rest in commands], chunksize=1).get(TIMEOUT))

    def renewed(match: re.Match[str]) -> str:
        new = next(made)
        kept = match["loose"] and words(new) == words(match["text"])
        return match[0] if kept else f"{match['head']}{new}{match['tail']}"

    return _OUTPUT.sub(renewed, text)


def needs_gpu(text: str) -> bool:
    """Whether a page has examples that need a GPU."""
    return any(_NEEDS_GPU in (match["skip"] or "") for match in _EXAMPLE.finditer(text))


def run_examples(text: str, gpu: bool = False) -> str | None:
    """Run a page's examples, with `gpu` those too that need one; the error they end in, if any. Line numbers in it are
    the page's.
    """
    code, at = "", 1
    for match in _EXAMPLE.finditer(text):
        if not match["skip"] or (gpu and _NEEDS_GPU in match["skip"]):
            line = text.count("\n", 0, match.start("code")) + 1
            code += "\n" * (line - at) + match["code"]
            at = line + match["code"].count("\n")
    if not code:
        return None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "page.py").write_text(code)
        ended = python(["page.py"], Path(folder))
    return ended.stderr if ended.returncode else None


def places(text: str) -> set[str]:
    """The headings of a page as links name them: small letters, no punctuation, and -1 behind the second of a name."""
    found: dict[str, int] = {}
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
        if found[name]:
            found[f"{name}-{found[name]}"] = 0
    return set(found)


def dead_links(page: Path, text: str) -> list[str]:
    """Links to files, or to headings of pages, that are not there."""
    found = []
    for link in _LINK.finditer(_FENCE.sub("", text)):
        to = page.parent / link["file"] if link["file"] else page
        heading = link["place"] if to.suffix == ".md" else None
        if not to.exists() or (heading and heading not in places(text if to == page else to.read_text())):
            found.append(link[0][2:-1])
    return found


def main() -> int:
    """Go over all pages; 0 if nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on generated text that changed")
    parser.add_argument("--no-examples", action="store_true", help="run no examples")
    parser.add_argument("--gpu", action="store_true", help="run the examples that need a GPU, too")
    given = parser.parse_args()
    problems = 0
    for page in pages():
        name, text = page.relative_to(ROOT), page.read_text()
        found = [f"links to {to}, which is not there" for to in dead_links(page, text)]
        try:
            new = renew(text)
            if new != text and given.check:
                found.append("its generated text is out of date: make docs")
            elif new != text:
                page.write_text(new)
            if not given.no_examples and (error := run_examples(new, given.gpu)):
                found.append(f"an example fails:\n{error}")
        except (ValueError, TimeoutError, subprocess.TimeoutExpired) as failed:
            found.append(str(failed))
        problems += len(found)
        print(f"{name}: {'ok' if not found else ''}", *found, sep="\n  " if found else "", flush=True)
    if (ROOT / "tests" / "messages").is_dir() and not given.check:
        ended = python(["-c", "from tests.messages import rows; rows.main()"], ROOT)
        problems += bool(ended.returncode)
        print(f"tests/messages.txt: {'ok' if not ended.returncode else ended.stderr}", flush=True)
    print(f"docs: {problems} problems" if problems else "docs: ok")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
