"""The methods, by name. Adding one: one file, one line here, one oracle test."""

from urrl.errors import UserError
from urrl.methods.average import Average
from urrl.methods.base import Batch, Method, Step
from urrl.methods.supervised import Supervised
from urrl.methods.urrl import URRL

METHODS: dict[str, type[Method]] = {"urrl": URRL, "average": Average, "supervised": Supervised}


def find_method(name: str) -> type[Method]:
    if name not in METHODS:
        raise UserError(f"method {name!r} is unknown; there are: {', '.join(METHODS)}")
    return METHODS[name]


__all__ = ["METHODS", "Batch", "Method", "Step", "find_method"]
