"""Mutated packages: a typed error or a package, within a second, and nothing written outside.

The batch of the gate is small and always the same; `RLX_FUZZ_COUNT=20000` runs as many.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from sample_packages.mutations import Fuzzer

BATCH = int(os.environ.get("RLX_FUZZ_COUNT", "300"))


def test_mutations_end_in_a_typed_error_or_a_package(tmp_path: Path) -> None:
    """No mutation crashes, hangs or writes elsewhere, and most are refused."""
    fuzzer = Fuzzer(tmp_path)
    found = Counter(fuzzer.run(number).split(": ")[1] for number in range(BATCH))
    assert found["IntegrityError"] > BATCH // 2
    assert sum(found.values()) == BATCH


def test_the_original_is_taken(tmp_path: Path) -> None:
    """The fuzzer's way of using a package takes the one that nobody changed."""
    fuzzer = Fuzzer(tmp_path)
    (fuzzer.work / "out").mkdir()
    assert fuzzer._use(fuzzer.original) == "taken"
