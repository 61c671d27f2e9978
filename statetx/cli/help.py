"""``python -m statetx help``: public names by group, one of them in full, or what is nearest to some words."""

from __future__ import annotations

import functools
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._errors import ERRORS_PAGE
from .._text import suggestion, text_width
from .function import BadInput

_GROUPS = {
    "Errors and warnings": ("._errors",),
    "States": (".kinds", "._objects", "._states", "._lift.rules"),
    "Rematerialization": (".transforms.remat", ".transforms.stack", "._loops"),
    "Plans and budgets": (".planner",),
    "Memory": (".memory", ".residuals"),
    "Devices": ("._targets",),
    "Training": (".training",),
    "Transforms": (".transforms",),
    "Others": ("",),
}
"""Groups of public names, by the beginning of the name of their module; the first that fits."""

_MOST_FOUND, _MOST_PAGES = 8, 3
QUESTIONS = (
    "how-to/*.md",
    "migrate/*.md",
    "faq.md",
    "features.md",
    "loops.md",
    "planning.md",
    "quickstart.md",
    "residuals.md",
)
"""The pages that are searched, which the wheel has, too (pyproject.toml)."""

_UNTOLD = frozenset("a an and by do for how i in is my n of on or the to what".split())


def show(words: list[str]) -> str:
    """The help of these words of the command line.

    Raises:
        BadInput: no name and no text has them.
    """
    if not words:
        return _all_names()
    name = words[0].removeprefix("statetx.")
    if len(words) == 1 and (value := _value_of(name)) is not None:
        return _explained(name, value[0])
    return _found(words)


# -- names -----------------------------------------------------------------------------------------------------------


def _value_of(name: str) -> tuple[Any] | None:
    """A public object by its dotted name, in a tuple; None if there is none."""
    import statetx

    value: Any = statetx
    for part in name.split("."):
        if part.startswith("_") or part not in dir(value):
            return None
        value = getattr(value, part)
    return (value,)


def _groups() -> dict[str, list[str]]:
    import statetx

    groups: dict[str, list[str]] = {group: [] for group in _GROUPS}
    for name in statetx.__all__:
        value = getattr(statetx, name)
        if inspect.ismodule(value):
            continue
        module = statetx._MODULE_OF.get(name) or value.__module__.removeprefix("statetx")
        is_error = isinstance(value, type) and issubclass(value, Exception)
        group = next(group for group, begins in _GROUPS.items() if module.startswith(begins))
        groups["Errors and warnings" if is_error else group].append(name)
    for name in ("policies", "testing"):
        groups[f"statetx.{name}"] = [f"{name}.{item}" for item in getattr(statetx, name).__all__]
    return {group: names for group, names in groups.items() if names}


def _all_names() -> str:
    lines = []
    for group, names in _groups().items():
        lines += [group, *_listed(names), ""]
    return "\n".join(
        [*lines, "One in full: python -m statetx help NAME", "By words: python -m statetx help every layer"]
    )


def _listed(names: list[str]) -> Iterator[str]:
    """A line for each name, with the beginning of its docstring."""
    most = max(map(len, names)) + 2
    width = max(text_width() - most - 2, 20)
    for name in names:
        entry = _value_of(name)
        assert entry is not None
        yield f"  {name.ljust(most)}{textwrap.shorten(_summary(entry[0]), width, placeholder='...')}".rstrip()


def _summary(value: Any) -> str:
    """The first paragraph of a docstring; empty for a value, such as a policy, whose class has only Python's own."""
    if not isinstance(value, type) and (type(value).__doc__ or "").startswith(f"{type(value).__name__}("):
        return ""
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


# -- words -----------------------------------------------------------------------------------------------------------


def _found(words: list[str]) -> str:
    """The names and pages that have most of the words: in their name or title, summary or headings, or text."""
    phrase = " ".join(words)
    asked = _words(phrase) - _UNTOLD
    names = [name for names in _groups().values() for name in names]
    hint = suggestion(phrase.removeprefix("statetx."), names) if len(words) == 1 else ""
    by_name, by_page = (
        _nearest({name: _texts(name) for name in names}, asked, phrase),
        _nearest(_pages(), asked, phrase),
    )
    best = max(by_name, by_page)
    if not best.num_words or (hint and not best.has_phrase):
        raise BadInput(f"help: statetx has no {phrase}.{hint}")
    blocks = [(by_name, _listed(by_name.entries[:_MOST_FOUND])), (by_page, _addresses(by_page.entries[:_MOST_PAGES]))]
    lines = [f"The nearest to {phrase}:"]
    for nearest, listed in sorted(blocks, key=lambda block: block[0], reverse=True):
        if nearest.num_words:
            lines += ["", *listed]
    return "\n".join(lines)


Texts = tuple[str, str, str]
"""The texts to search, the most telling first."""


class Found(NamedTuple):
    """The entries that have most of the asked words, the best first. The better search is the greater one.

    Attributes:
        num_words: how many of the words the entries have.
        has_phrase: whether the best has the words one after the other.
        weight: where the best has them.
    """

    num_words: int
    has_phrase: bool
    weight: int
    entries: list[str]


def _nearest(texts: dict[str, Texts], asked: set[str], phrase: str) -> Found:
    ranks = {}
    for name, parts in texts.items():
        weighted = tuple(zip((4, 2, 1), map(_words, parts), strict=True))
        hits = [max((weight for weight, part in weighted if _has(part, word)), default=0) for word in asked]
        has_phrase = phrase.lower() in "\n".join(parts).lower()
        ranks[name] = sum(map(bool, hits)), has_phrase, sum(hits)
    nearest = sorted(ranks, key=lambda name: ranks[name], reverse=True)
    num_words, has_phrase, weight = ranks[nearest[0]] if nearest else (0, False, 0)
    return Found(num_words, has_phrase, weight, [name for name in nearest if ranks[name][0] == num_words])


def _texts(name: str) -> Texts:
    """A name, the beginning of its docstring, and all of its text."""
    entry = _value_of(name)
    assert entry is not None
    return name, _summary(entry[0]), (inspect.getdoc(entry[0]) or "") + section(name)


def _pages() -> dict[str, Texts]:
    """The pages of the documentation that answer questions: path to title, headings and text."""
    pages = {}
    for path in sorted(path for pattern in QUESTIONS for path in _docs().glob(pattern)):
        text = path.read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*?)(?: \{.*)?$", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S), re.M)
        pages[path.relative_to(_docs()).as_posix().removesuffix(".md")] = headings[0], "\n".join(headings[1:]), text
    return pages


def _addresses(paths: list[str]) -> Iterator[str]:
    """Two lines for each page: its title, and where it is."""
    pages = _pages()
    for path in paths:
        yield f"  {pages[path][0]}"
        yield f"    {ERRORS_PAGE.removesuffix('errors/')}{path.removesuffix('index').rstrip('/')}/"


def _docs() -> pathlib.Path:
    """The folder of the pages: part of an installed package, or docs of a clone."""
    installed = pathlib.Path(__file__).with_name("pages")
    return installed if installed.is_dir() else pathlib.Path(__file__).parents[2] / "docs"


def _words(text: str) -> set[str]:
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+", text) + re.findall(r"[A-Za-z]+", text)
    return {part.lower() for part in parts}


def _has(words: set[str], asked: str) -> bool:
    """Whether one of the words is the asked one, but for an ending: layer and layers, save and saved."""
    stem = asked.rstrip("s") if len(asked) > 3 else asked
    is_longer = lambda word: len(stem) > 2 and word.startswith(stem) and len(word) < len(stem) + 4
    return asked in words or any(map(is_longer, words))


# -- one name --------------------------------------------------------------------------------------------------------


def _explained(name: str, value: Any) -> str:
    """The entry of an error on the errors page, else the signature and the docstring of a public name."""
    if isinstance(value, type) and issubclass(value, Exception) and (text := section(value.__name__)):
        return f"{value.__name__}: {inspect.getdoc(value)}\n\n{text}"
    if inspect.ismodule(value):
        items = [item for item in getattr(value, "__all__", ()) if not inspect.ismodule(getattr(value, item))]
        return "\n".join([f"{name}: {inspect.getdoc(value)}", "", *_listed([f"{name}.{item}" for item in items])])
    if isinstance(value, (property, functools.cached_property)):
        return f"{name}, a property\n" + textwrap.indent(inspect.getdoc(value) or "", "    ")
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        return f"{name}: {value!r}, of type {type(value).__name__}. {_summary(value)}".rstrip()
    lines = [signature(name.rpartition(".")[2], value), textwrap.indent(inspect.getdoc(value) or "", "    ")]
    for key, item in vars(value).items() if inspect.isclass(value) else ():
        fun = getattr(item, "__func__", item)
        if inspect.isfunction(fun) and not key.startswith("_"):
            lines += ["", textwrap.indent(signature(key, fun), "    "), f"        {_summary(fun)}"]
    return "\n".join(lines)


class _Annotation:
    """An annotation that prints like its source, without quotes."""

    def __init__(self, annotation: Any):
        self._text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    def __repr__(self) -> str:
        return self._text


def signature(name: str, fun: Any) -> str:
    """The name and the parameters of a function; a line for each parameter if one line of the terminal is too short."""
    try:
        inspected = inspect.signature(fun)
    except (TypeError, ValueError):  # a builtin
        return f"{name}(...)"
    bare = lambda annotation: annotation if annotation is inspected.empty else _Annotation(annotation)
    parameters = [p.replace(annotation=bare(p.annotation)) for p in inspected.parameters.values()]
    returned = bare(inspected.return_annotation)
    line = f"{name}{inspected.replace(parameters=parameters, return_annotation=returned)}"
    if len(line) <= text_width():
        return line
    texts: list[str] = []
    kinds = [p.kind for p in parameters]
    for p, following in zip(parameters, [*kinds[1:], None], strict=True):
        if p.kind is p.KEYWORD_ONLY and "*" not in texts and p.VAR_POSITIONAL not in kinds:
            texts.append("*")
        texts.append(str(p))
        if p.kind is p.POSITIONAL_ONLY and following is not p.POSITIONAL_ONLY:
            texts.append("/")
    end = "" if returned is inspected.empty else f" -> {returned!r}"
    return "\n".join([f"{name}(", *(f"    {text}," for text in texts), f"){end}"])


def section(error: str) -> str:
    """The part of docs/errors.md under the heading of an error; empty if there is none."""
    path = _docs() / "errors.md"
    if not path.is_file():
        return ""
    _, heading, body = path.read_text(encoding="utf-8").partition(f"\n## {error}\n")
    # Without the directives for the site's generator.
    text = re.sub(r"^(:::.*\n(?: +.*\n)*|```.*\n)", "", body.split("\n## ")[0] + "\n", flags=re.M)
    return text.strip() if heading else ""
