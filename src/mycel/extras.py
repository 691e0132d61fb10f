"""What is not installed with mycel itself, and which extra brings it.

The core plans with numpy, scipy and numba alone. Whatever needs more says so through ``needs``, before it begins.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from mycel.errors import MissingExtraError, UsageError

__all__ = ["EXTRAS", "needs", "transformers_module", "without"]

#: Modules that only some of mycel needs, and the extra that installs each.
EXTRAS = {
    "torch": "run",
    "pyroute2": "run",
    "matplotlib": "plots",
    "ortools": "solver",
    "transformers": "examples",
    "accelerate": "examples",
    "torchft": "elastic",
    "monarch": "controller",
    "gymnasium": "rl",
    "tenseal": "encrypted",
}


def needs(what: str, *modules: str) -> None:
    """Makes sure that modules of extras are there; imports none of them.

    Args:
        what: that needs them, as a person would name it, such as ``mycel bench`` or ``method steps``.
        modules: keys of ``EXTRAS``.

    Raises:
        MissingExtraError: one is not installed; the message says how it can be.
    """
    missing = [module for module in modules if not _is_there(module)]
    if missing:
        raise MissingExtraError(_sentence(what, missing))


def _is_there(module: str) -> bool:
    if module in sys.modules:  # of which some, made by hand, say not where they are from
        return sys.modules[module] is not None
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def without(error: ModuleNotFoundError, what: str) -> MissingExtraError | None:
    """What to say of a module that was not found on the way; ``None`` where it is not one of the extras'."""
    module = (error.name or "").partition(".")[0]
    return MissingExtraError(_sentence(what, [module])) if module in EXTRAS else None


def _sentence(what: str, missing: list[str]) -> str:
    extras = ",".join(dict.fromkeys(EXTRAS[module] for module in missing))
    verb = "is" if len(missing) == 1 else "are"
    return f"{what} needs {' and '.join(missing)}, which {verb} not installed: pip install 'mycel[{extras}]'"


def transformers_module(name: str, attribute: str) -> Any:
    """A module of Hugging Face transformers that has an attribute: asked for features, not versions.

    Args:
        name: of the module.
        attribute: that it has to have.

    Raises:
        UsageError: it cannot be imported, or lacks it.
    """
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"Hugging Face transformers with {name} is needed, which could not be imported ({error}); "
            "pip install 'transformers>=5.0'"
        ) from error
    if not hasattr(module, attribute):
        raise UsageError(f"{name} has no {attribute}; this transformers is too old or too new: looked for both")
    return module
