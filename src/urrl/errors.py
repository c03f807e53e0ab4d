class UserError(ValueError):
    """A user's mistake: one line, exit code 2. A ValueError, as scikit-learn's users expect of bad input."""
