class UserError(ValueError):
    """A user's mistake: one line, exit code 2. A ValueError, as scikit-learn's users expect of bad input."""

    def __init__(self, message: object):
        super().__init__(printable(message))


class Busy(UserError):
    """Another process is at work there."""


class Lost(Exception):
    """The other processes of the job cannot be reached any more."""


def printable(text: object) -> str:
    """One line that any terminal takes, whatever names and files of others are quoted in it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def one_line(error: object) -> str:
    """What went wrong, for the end of a message."""
    return " ".join(str(error).split()) or type(error).__name__
