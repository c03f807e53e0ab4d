"""Learning from candidate labels that may be wrong."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from urrl.estimator import PartialLabelClassifier, URRLClassifier, candidate_score
    from urrl.parse import from_annotations, parse_candidates

__version__ = "0.1.0"
__all__ = ["PartialLabelClassifier", "URRLClassifier", "candidate_score", "from_annotations", "parse_candidates"]


def __getattr__(name: str) -> Any:
    """What users import by name, and torch with it, only when they do."""
    if name not in __all__:
        raise AttributeError(f"module 'urrl' has no attribute {name!r}")
    from importlib import import_module

    module = "urrl.parse" if name in ("from_annotations", "parse_candidates") else "urrl.estimator"
    return getattr(import_module(module), name)
