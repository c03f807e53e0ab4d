class UserError(ValueError):
    """A user's mistake: one line, exit code 2. A ValueError, as scikit-learn's users expect of bad input."""


class Lost(Exception):
    """The other processes of the job cannot be reached any more."""
