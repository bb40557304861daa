"""What Sphinx reads: the documents of the repository with a navigation, and the pages that are generated.

The folder of sources lies like the repository, so that links between the documents and to its files hold in both.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from tools.docs import pages as documents
from tools.website import header, reference

ROOT = Path(__file__).resolve().parents[2]

_ROW = re.compile(r"^\| \[(?P<title>[^\]]+)\]\((?P<page>[^)#]+\.md)\)", re.MULTILINE)
_TABLE = re.compile(r"^\| (?P<group>[^|\[]+?) \| \|\n\|[-|]+\|\n(?P<rows>(?:\|.*\n?)+)", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]+)\]\((?!\w+:)(?P<to>[^)#\s]+)(?P<place>#[^)\s]*)?\)")

Groups = dict[str, list[str]]  # caption -> entries of a table of contents


def guides(text: str, there: list[str]) -> Groups:
    """The guides by group, from the tables of docs/guides/README.md; `there` are the guides that have to be in one."""
    groups = {}
    for table in _TABLE.finditer(text):
        rows = list(_ROW.finditer(table["rows"]))
        groups[table["group"]] = [f"{row['title']} <docs/guides/{row['page'].removesuffix('.md')}>" for row in rows]
    listed = {match["page"] for match in _ROW.finditer(text)}
    if lost := sorted(set(there) - listed - {"README.md"}):
        raise ValueError(f"docs/guides/README.md: no table has {', '.join(lost)}: add a line for each")
    return groups


def navigation(reference_pages: Iterable[str] = ()) -> Groups:
    """Every page of the site, by group."""
    folder = ROOT / "docs" / "guides"
    groups = guides((folder / "README.md").read_text(), [page.name for page in folder.glob("*.md")])
    groups[next(iter(groups))].insert(0, "All guides <docs/guides/README>")
    depth = [f"docs/{page.stem}" for page in sorted((ROOT / "docs").glob("*.md"))]
    groups["Depth"] = [*depth, "What is new <CHANGELOG>", "For contributors <AGENTS>"]
    groups["Reference"] = list(reference_pages)
    groups["Libraries"] = [f"docs/notes/{page.stem}" for page in sorted((ROOT / "docs" / "notes").glob("*.md"))]
    return groups


def contents(groups: Groups) -> Iterator[str]:
    """Tables of contents, which a theme shows beside each page."""
    for caption, entries in groups.items():
        yield from ("", "```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```")


def write(folder: Path) -> None:
    """Fill an empty folder with the sources."""
    made = {f"reference/{name}.md": text for name, text in {**reference.pages(), **header.pages()}.items()}
    groups = navigation(name.removesuffix(".md") for name in made)
    known = set(documents())
    texts = {page.relative_to(ROOT).as_posix(): _adapted(page, known) for page in sorted(known)}
    texts["README.md"] = "\n".join([texts["README.md"], *contents(groups), ""])
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("*.md", "__pycache__"))
    for name, text in (texts | made).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for file in ROOT.glob("[!.]*"):  # what documents link to beside each other
        if file.suffix != ".md" and file.name not in ("docs", "build", "dist"):
            (folder / file.name).symlink_to(file)


def _adapted(page: Path, known: Collection[Path]) -> str:
    """A document whose links lead to what a site has: to the README.md of a folder, and to pages outside as files."""

    def link(match: re.Match[str]) -> str:
        text, to = match["text"], page.parent / match["to"]
        if to.is_dir():
            return f"[{text}]({match['to'].rstrip('/')}/README.md)" if (to / "README.md").resolve() in known else text
        outside = to.suffix == ".md" and to.resolve() not in known
        return f"[{text}](path:{match['to']})" if outside else match[0]

    return _LINK.sub(link, page.read_text())
