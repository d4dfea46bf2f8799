"""A program that opens a model package beside it and prints where the model ran and what came out.

`build.py` freezes it to one folder, which runs on machines without Python.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from rlx_ort.deploy.open import open_package


def main() -> None:
    """Run the package that the command line names, or `model.ortpackage` beside the program, on made-up inputs."""
    here = Path(sys.executable if getattr(sys, "frozen", False) else __file__).resolve().parent
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else here / "model.ortpackage"
    with open_package(package) as runner:
        compiled = runner.compile(runner.fastest())
        inputs = {
            name: np.ones([dim if isinstance(dim, int) else 1 for dim in kind.shape], kind.dtype.numpy)
            for name, kind in compiled.input_specs.items()
        }
        outputs = compiled.run(inputs)
        document = {
            "frozen": bool(getattr(sys, "frozen", False)),
            "device": compiled.device.label,
            "placement": {provider: len(nodes) for provider, nodes in compiled.placement.nodes_by_ep.items()},
            "sums": [float(np.sum(output)) for output in outputs],
        }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
