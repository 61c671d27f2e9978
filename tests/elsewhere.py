"""A user's module that another one calls: `test_walk` reaches states through its variables."""


class Held:
    weight = None


weight = None
hidden = None


def scale(x):
    return x * weight.value


def scale_by_name(x):
    """Looks a variable up where no walk over objects can see it."""
    return x * globals()["".join(("hid", "den"))].value


def scale_by_module(x):
    import elsewhere

    return x * elsewhere.weight.value


def scale_by_import(x):
    from elsewhere import weight as imported

    return x * imported.value
