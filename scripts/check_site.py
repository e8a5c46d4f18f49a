#!/usr/bin/env python3
"""Checks built HTML pages: nothing is loaded from outside, and every link to a file of the site finds it.

    sphinx-build -W --keep-going -b html docs build/docs && python scripts/check_site.py build/docs

Prints each finding, and exits with 1 if there is one. Ordinary links (`<a href>`) may lead anywhere.
"""

import pathlib
import re
import sys
import urllib.parse
from collections.abc import Iterator
from html.parser import HTMLParser

EXTERNAL = re.compile(r"^\s*(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
# What a browser loads by itself: the attributes of any element but links, and URLs in styles.
LOADED = ("src", "srcset", "data", "poster", "background", "href", "xlink:href", "action", "formaction", "ping")
STYLES = re.compile(r"""(?:url\(\s*['"]?|@import\s+['"])([^'")]+)""")


class Page(HTMLParser):
    """Collects the URLs of a page: those that it loads, and those that a reader may follow."""

    def __init__(self, text: str):
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._in_style = tag == "style"
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.names.add(value)
            if not value:
                continue
            if tag in ("a", "area") and name == "href":
                self.links.append(value)
            elif name == "style":
                self.loaded += STYLES.findall(value)
            elif name == "srcset":
                self.loaded += [part.split()[0] for part in value.split(",") if part.split()]
            elif name in LOADED:
                self.loaded.append(value)

    handle_startendtag = handle_starttag

    def handle_data(self, data):
        if self._in_style:
            self.loaded += STYLES.findall(data)


def findings(site: pathlib.Path) -> Iterator[str]:
    """What is wrong with the pages below `site`, a line each."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: no page"
    for path, page in pages.items():
        for url in page.loaded:
            if EXTERNAL.match(url):
                yield f"{path.relative_to(site)}: loads {url}"
        for url in page.links:
            problem = _broken(url, path, pages)
            if problem:
                yield f"{path.relative_to(site)}: {problem}"
    for path in sorted(site.rglob("*.css")):
        for url in STYLES.findall(path.read_text()):
            if EXTERNAL.match(url):
                yield f"{path.relative_to(site)}: loads {url}"


def _broken(url: str, path: pathlib.Path, pages: dict[pathlib.Path, Page]) -> str | None:
    """Why a link from `path` does not lead to a file of the site, and an element of it; None: it does, or leads outside."""
    if re.match(r"[a-z][a-z0-9+.-]*:|//", url, re.IGNORECASE):
        return None
    file, _, fragment = url.partition("#")
    target = (path.parent / urllib.parse.unquote(file.partition("?")[0])).resolve() if file else path
    if not target.exists():
        return f"there is no {url}"
    known = {page_path.resolve(): page for page_path, page in pages.items()}.get(target.resolve())
    if known and fragment and urllib.parse.unquote(fragment) not in known.names:
        return f"there is no element #{fragment} in {target.name}"
    return None


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python scripts/check_site.py FOLDER", file=sys.stderr)
        return 2
    found = list(findings(pathlib.Path(sys.argv[1])))
    print("\n".join(found) or "no page loads anything from outside, and all links lead somewhere")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
