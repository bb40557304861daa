"""What has to hold of a built site: every link and picture leads somewhere, every public name is described."""

from __future__ import annotations

import html.parser
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tools.website import header, reference


class _Reader(html.parser.HTMLParser):
    """What a page links to, and the places in it that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.places |= {value for name in ("id", "name") if (value := given.get(name))}
        self.links += [value for name in ("href", "src") if (value := given.get(name))]


def dead_links(folder: Path) -> Iterator[str]:
    """Links of the pages in a folder to files or places in them that are not there."""
    pages = {page.resolve(): _Reader(page.read_text()) for page in sorted(folder.rglob("*.html"))}
    for page, read in pages.items():
        for link in dict.fromkeys(read.links):
            to = urlsplit(link)
            if to.scheme or to.netloc:
                continue
            file = (page.parent / unquote(to.path)).resolve() if to.path else page
            place = unquote(to.fragment)
            if not file.exists() or (place and file in pages and place not in pages[file].places):
                yield f"{page.relative_to(folder.resolve())} links to {link}, which is not there"


def described(folder: Path) -> set[str]:
    """The names that a site describes, of its inventory."""
    content = (folder / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split(" ", 1)[0] for line in zlib.decompress(content).decode().splitlines()}


def undescribed(folder: Path) -> Iterator[str]:
    """Public names that no page describes."""
    functions = {one.function for one in header.declarations((header.INCLUDE / "te_core.h").read_text())} - {""}
    wanted = functions.union(reference.places(reference.values()).values())
    yield from (f"the reference does not describe {name}" for name in sorted(wanted - described(folder)))
