"""The programs in `scripts/`, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


def load_script(name: str) -> ModuleType:
    """Return a program as a module of its own; imports of its neighbours work, and the import path stays as it is."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, known = [*sys.path], sys.modules.get(name)
    sys.path.insert(0, str(SCRIPTS))
    sys.modules[name] = module  # dataclasses look it up
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
        del sys.modules[name]
        if known is not None:
            sys.modules[name] = known
    return module
