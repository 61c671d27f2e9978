"""The site's part of the build: CONTRIBUTING, ARCHITECTURE and CHANGELOG become pages, and links to files outside docs lead to them."""

import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "ARCHITECTURE.md": "architecture.md", "CHANGELOG.md": "changelog.md"}


def on_files(files, config):
    for source, page in PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        for other, its_page in PAGES.items():
            text = text.replace(f"]({other})", f"]({its_page})")
        text = re.sub(r"\[([^\]]+)\]\(examples/[^)]*\)", r"\1", text)  # no page of the site
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, **_):
    return re.sub(r"\]\(\.\./([A-Z]+\.md)", lambda m: f"]({PAGES.get(m[1], m[1])}", markdown)
