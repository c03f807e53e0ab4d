"""Learning from candidate labels that may be wrong."""

__version__ = "0.1.0"
