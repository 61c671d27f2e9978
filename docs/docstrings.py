"""Read docstrings as griffe does, with "Example:" for "Examples:"."""

import griffe


class Sections(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
