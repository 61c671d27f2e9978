"""The site's part of the build: CONTRIBUTING, ARCHITECTURE and CHANGELOG become pages, and links to files outside docs lead to them.

Each entry of a page of the reference becomes a page, and a line of the page with a link to it. Console blocks become code without
prompts, which can be copied and run, and blocks of class `output`.
"""

import doctest
import functools
import pathlib
import re
import textwrap

import griffe
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "ARCHITECTURE.md": "architecture.md", "CHANGELOG.md": "changelog.md"}

# Factors of a page's rank in the search, by the start of its path. tests/test_search.py has the queries that need them: an error's
# name leads to its message, cause and fix, and pages about the library's own code come after pages about its use.
BOOSTS = {
    "errors.md": 1.5,
    "how-to/debug-leaks.md": 0.4,
    "how-to/choose-a-policy.md": 2.5,
    "how-to/memory-profile.md": 1.5,
    "how-to/microbatches.md": 2,
    "migrate/programs.md": 0.5,
    "quickstart.md": 1.5,
    **dict.fromkeys(["architecture.md", "changelog.md", "contributing.md", "releasing.md"], 0.1),
}


# Pictures of the gallery, which are links to themselves: their type is too small for a phone.
GALLERY = re.compile(r"^!\[(.*)\]\((images/gallery/.*)\)$", re.M)

CONSOLE = re.compile(r"^( *)```pycon\n(.*?)^\1```$", re.M | re.S)


def without_prompts(block):
    """A console block as blocks of code, each followed by what it prints."""
    indent, parts, code = block[1], [], ""
    for example in doctest.DocTestParser().get_examples(textwrap.dedent(block[2])):
        code += example.source
        if example.want:
            parts += [f"``` py\n{code}```", f"``` {{ .text .output .no-copy }}\n{example.want}```"]
            code = ""
    if code:
        parts.append(f"``` py\n{code}```")
    return textwrap.indent("\n\n".join(parts), indent)


ENTRY = re.compile(r"^::: (statetx\.\S+)\n((?:    .*\n)*)", re.M)
ERROR = ["show_root_heading: false", "heading_level: 4", "show_bases: true", "merge_init_into_class: false"]


def with_options(entry):
    """An entry of the reference with the options that follow from its place: below a heading it is a level deeper, and what has no name
    in `statetx` itself is shown without its module. On the page of errors the headings are the names.
    """
    name, given = entry[1], [line.strip() for line in entry[2].splitlines()[1:]]
    short, levels = name.rpartition(".")[2], re.findall(r"^(#+) ", entry.string[: entry.start()], re.M)
    options = [] if not levels or len(levels[-1]) == 1 else ["heading_level: 3"]
    if not entry.string[: entry.start()].strip():  # a page of its own
        options = ["heading_level: 1"]
    if short in names_of_errors(entry.string):
        options = ERROR
    elif not is_public(name):
        options = [*options, f"heading: {short}", f"toc_label: {short}"]
    names = {line.partition(":")[0] for line in given}
    lines = [*given, *(line for line in options if line.partition(":")[0] not in names)]
    return "\n".join([f"::: {name}", *(["    options:"] if lines else []), *(f"      {line}" for line in lines), ""])


def is_public(name):
    return re.fullmatch(r"statetx\.((policies|testing)\.)?\w+", name) is not None


def entries_by_page(source):
    """The entries of a page of the reference, by the page that each gets: a class of results, or one whose name differs from that
    of a function by its case alone, is on the page of the entry before it.
    """
    pages, last = {}, None
    for entry in ENTRY.finditer(source.read_text()):
        if last is None or is_public(entry[1]):
            last = f"api/{source.stem}/{entry[1].rpartition('.')[2].lower()}.md"
        pages.setdefault(last, []).append(entry)
    return pages


@functools.cache
def library():
    return griffe.load("statetx", search_paths=[ROOT])


def summary(entry):
    """The line of an entry on its page of the reference: a link with the first sentence of the docstring."""
    docstring = library()[entry[1].removeprefix("statetx.")].docstring
    sentence = re.split(r"(?<=[.:])\s", " ".join(docstring.value.split("\n\n")[0].split()))[0]
    shown = entry[1].removeprefix("statetx.") if is_public(entry[1]) else entry[1].rpartition(".")[2]
    return f"- [`{shown}`][{entry[1]}]: {sentence.rstrip('.:')}.\n"


def names_of_errors(markdown):
    """The headings of the page of errors, which are names."""
    return set(re.findall(r"^## (\w+)$", markdown, re.M)) if markdown.startswith("# Errors\n") else set()


def with_entries(nav):
    """The navigation, in which each page of the reference is followed by those of its entries."""
    if isinstance(nav, list):
        return [with_entries(item) for item in nav]
    if isinstance(nav, str):
        return nav
    [(title, value)] = nav.items()
    if not isinstance(value, str):
        return {title: with_entries(value)}
    pages = entries_by_page(ROOT / "docs" / value) if value.startswith("api/") else {}
    return {
        title: [value, *({entries[0][1].rpartition(".")[2]: path} for path, entries in pages.items())]
        if pages
        else value
    }


def on_config(config):
    config.nav = with_entries(config.nav)
    config.extra["version"] = re.search('__version__ = "(.*)"', (ROOT / "statetx" / "__init__.py").read_text())[1]
    return config


def on_files(files, config):
    for source, page in PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        for other, its_page in PAGES.items():
            text = text.replace(f"]({other})", f"]({its_page})")
        text = re.sub(r"\[([^\]]+)\]\(examples/[^)]*\)", r"\1", text)  # no page of the site
        files.append(File.generated(config, page, content=text))
    for source in sorted((ROOT / "docs" / "api").glob("*.md")):
        for path, entries in entries_by_page(source).items():
            title = f"---\ntitle: {entries[0][1]}\n---\n"
            files.append(File.generated(config, path, content=title + "\n".join(entry[0] for entry in entries)))
    return files


def on_page_markdown(markdown, page, **_):
    if page.file.src_uri.startswith("decisions/"):  # for contributors, who have the list of records
        page.meta["search"] = {"exclude": True}
    for path, boost in BOOSTS.items():
        if page.file.src_uri.startswith(path):
            page.meta["search"] = {"boost": boost}
    if page.file.src_uri.count("/") == 1 and page.file.src_uri.startswith("api/"):
        markdown = ENTRY.sub(summary, markdown)
    markdown = re.sub(r"\]\((?:[\w./-]*\.md)?#(statetx\.[\w.]+)\)", r"][\1]", markdown)  # the entry may have a page
    markdown = ENTRY.sub(with_options, CONSOLE.sub(without_prompts, markdown))
    markdown = GALLERY.sub(r"[![\1](\2)](\2)", markdown)
    return re.sub(r"\]\(\.\./([A-Z]+\.md)", lambda m: f"]({PAGES.get(m[1], m[1])}", markdown)
