"""Build or import a model once; run it on the best ONNX Runtime device of a machine you do not control.

    import rlx_ort

    runner = rlx_ort.load("model.onnx")
    outputs = runner.run_fastest({"x": x})

The public names are loaded when they are first used: importing the package imports neither ONNX Runtime nor ONNX. They
are written once, in `__init__.pyi`, which type checkers read; those of `rlx_ort.compat` are found and not listed.
"""

from __future__ import annotations

import gc
import importlib
from pathlib import Path
from typing import Any

# In a checkout that is not installed, `converters`, `providers` and `calibration` are beside this folder.
_checkout = Path(__file__).resolve().parents[1]
if not (_checkout / "rlx_ort" / "providers").exists() and (_checkout / "providers" / "ort_provider.py").is_file():
    __path__.append(str(_checkout))

_STUB: bytes = __loader__.get_data(str(Path(__file__).with_suffix(".pyi")))
_LISTED, _UNLISTED = (
    {line.split()[3]: line.split()[1] for line in part.splitlines() if line[:5] == "from "}
    for part in _STUB.decode("utf-8").split("# RLX's names")
)
_MODULE_OF = _LISTED | _UNLISTED
__all__ = sorted([*_LISTED, "__version__"])


def __getattr__(name: str) -> Any:
    """Return a public name from the module it lives in, and keep it here."""
    if name == "__version__":
        value: Any = _version()
    elif (module := _MODULE_OF.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        collecting = gc.isenabled()
        gc.disable()  # imports create no garbage, and collecting takes a fifth of the time
        try:
            value = getattr(importlib.import_module(module), name)
        finally:
            if collecting:
                gc.enable()
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(__name__)
    except PackageNotFoundError:  # a checkout that is not installed
        import tomllib

        project = tomllib.loads((_checkout / "pyproject.toml").read_text(encoding="utf-8"))
        return str(project["project"]["version"])


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
