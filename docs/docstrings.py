"""Read docstrings as griffe does, with the library's own conventions.

- "Example:" is a section, as "Examples:" is.
- A public name between single backticks is a link to its entry, unless the function has a parameter of that name.
- ``**unknown`` collects misspelled options in order to refuse them: it is not part of a signature.
- ``*args: P.args`` is shown as ``*args: Any``.
"""

import re

import griffe

from statetx import __all__ as PUBLIC

REFERENCE = re.compile(rf"(?<![`\[])`(?:statetx\.)?({'|'.join(PUBLIC)})`(?!`)")


def link(text: str, own: set[str]) -> str:
    return REFERENCE.sub(lambda m: m[0] if m[1] in own else f"[`{m[1]}`][statetx.{m[1]}]", text)


class Conventions(griffe.Extension):
    def on_function(self, *, func, **_):
        if "unknown" in func.parameters:
            del func.parameters["unknown"]
        for parameter in func.parameters:
            if str(parameter.annotation) in ("P.args", "P.kwargs"):  # those of the function that is wrapped
                parameter.annotation = griffe.ExprName("Any", parent=func)

    def on_class(self, *, cls, **_):
        cls.bases = [base for base in cls.bases if str(base) not in ("Explained", "Rule")]  # private

    def on_object(self, *, obj, **_):
        if obj.docstring:
            own = {obj.name, *(p.name for p in getattr(obj, "parameters", ()))}
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = link(text, own)
