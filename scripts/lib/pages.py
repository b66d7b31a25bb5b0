"""Adds files outside of docs/ to the site if its pages link to them.

The pages of a repository link to each other, and to tests and scripts, as files. In the site

* README.md, benchmarks/README.md and CHANGELOG.md are pages;
* every other file that a page links to is a page under source/, which shows it.

So no file is copied by hand, and each link works in both places.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PLACES = {
    "README.md": "readme.md",
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
}
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)
"""A picture for light pages and one for dark ones, as a repository shows them."""
LINK = re.compile(r"\]\(([^)\s#]+)((?:#[^)\s]*)?(?: \"[^\"]*\")?)\)")
LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".md": "markdown", "": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that come from elsewhere in the repository."""
    ours = [file.src_uri for file in files if file.src_uri.endswith(".md")]
    for source, place in PLACES.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    shown = {
        target
        for page in [*(f"docs/{uri}" for uri in ours), *PLACES]
        for link, _ in LINK.findall((ROOT / page).read_text())
        if (target := _below_root(page, link)) is not None
        if not target.startswith("docs/") and target not in PLACES
    }
    for path in sorted(shown):
        page = File.generated(config, _place(path), content=_shown(path))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lets the links of the repository's files lead to their pages."""
    place = page.file.src_uri
    source = next((ours for ours, there in PLACES.items() if there == place), f"docs/{place}")
    if place.startswith("source/"):
        return markdown
    # The reader may have chosen another theme than that of the system.
    markdown = PICTURE.sub(r"![\2](\3#only-light)![\2](\1#only-dark)", markdown)

    def in_site(found: re.Match[str]) -> str:
        target = _below_root(source, found[1])
        if target is None:
            return found[0]
        return f"]({os.path.relpath(_place(target), os.path.dirname(place))}{found[2]})"

    return LINK.sub(in_site, markdown)


def _below_root(page: str, link: str) -> str | None:
    """The file of the repository that a link on a page names; None if it names none."""
    target = os.path.normpath(os.path.join(os.path.dirname(page), link))
    return target if (ROOT / target).is_file() else None


def _place(path: str) -> str:
    if path in PLACES:
        return PLACES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def _shown(path: str) -> str:
    language = LANGUAGES.get(os.path.splitext(path)[1], "text")
    head = "---\nsearch: { exclude: true }\n---\n"
    return f"{head}# {path}\n\n~~~~~~{language}\n{(ROOT / path).read_text()}\n~~~~~~\n"
