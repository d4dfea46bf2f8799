"""A server with models of every type of tensor, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served_models import Served, save_echo, save_product, serving

from rlx_ort.serving.options import HttpOptions
from rlx_ort.serving.protocol import DATATYPES


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server whose clients may load and unload models."""
    folder = tmp_path_factory.mktemp("models")
    for dtype in DATATYPES:
        save_echo(folder, dtype)
    save_product(folder / "product.onnx")
    save_product(folder / "total.onnx", total=True)
    for version, factor in ((1, 1.0), (3, 3.0)):
        (folder / "versions" / str(version)).mkdir(parents=True)
        save_product(folder / "versions" / str(version) / "model.onnx", factor)
    with serving(folder, http=HttpOptions(most_bytes=4 << 20, repository_control=True)) as found:
        yield found
