class UserError(ValueError):
    """A user's mistake: one line, exit code 2. A ValueError, as scikit-learn's users expect of bad input."""


class Busy(UserError):
    """Another process is at work there."""


class Lost(Exception):
    """The other processes of the job cannot be reached any more."""


def one_line(error: object) -> str:
    """What went wrong, for the end of a message."""
    return " ".join(str(error).split()) or type(error).__name__
