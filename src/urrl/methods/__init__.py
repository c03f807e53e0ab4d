"""The methods, by name. Adding one: one file, one line here, one oracle test."""

from urrl.errors import UserError
from urrl.methods.alim import ALIM
from urrl.methods.average import Average
from urrl.methods.base import Batch, Method, Step
from urrl.methods.cc import CC
from urrl.methods.cr_dpll import CRDPLL
from urrl.methods.irnet import IRNet
from urrl.methods.pico import PiCO
from urrl.methods.pico_plus import PiCOPlus
from urrl.methods.proden import PRODEN
from urrl.methods.rabs import RABS
from urrl.methods.rc import RC
from urrl.methods.supervised import Supervised
from urrl.methods.urrl import URRL

METHODS: dict[str, type[Method]] = {
    "urrl": URRL,
    "proden": PRODEN,
    "rc": RC,
    "cc": CC,
    "rabs": RABS,
    "pico": PiCO,
    "pico_plus": PiCOPlus,
    "cr_dpll": CRDPLL,
    "alim": ALIM,
    "irnet": IRNet,
    "average": Average,
    "supervised": Supervised,
}


def method_name(name: str) -> str:
    """The key of METHODS for a name as people write it: CR-DPLL, PiCO+."""
    key = name.lower().replace("-", "_").replace("+", "_plus")
    if key not in METHODS:
        raise UserError(f"method {name!r} is unknown; there are: {', '.join(METHODS)}")
    return key


__all__ = ["METHODS", "Batch", "Method", "Step", "method_name"]
