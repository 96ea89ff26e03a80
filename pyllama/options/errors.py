"""How parsing ends early: a fault of the user (`OptionError`) or a wish for information (`Information`)."""


class OptionError(Exception):
    """A bad option or value. `str()` is the text for stderr; the program exits with code 1."""


class Information(Exception):
    """`--help`, `--version` and the like: `str()` is the text for stdout; the program exits with code 0."""
