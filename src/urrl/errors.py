class UserError(Exception):
    """A user's mistake: one line, exit code 2."""
