"""The pictures of docs/report.md: pages of five models in a real Chromium.

    python scripts/report_pictures.py [NAME ...]         needs chromium, chromedriver and selenium

Three image classifiers of the ONNX wheel, the text classifier of the examples on two devices, and a decoder of twelve
layers. With WebGPU (scripts/software_gpu.py brings one in software) two of them are split.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import onnx.backend.test
from click.testing import CliRunner
from PIL import Image
from selenium import webdriver

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import make_text_classifier  # noqa: E402  # a folder of the examples
import tiny_llama  # noqa: E402

import rlx_ort  # noqa: E402
from rlx_ort.cli import main as rlx  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
LIGHT = Path(onnx.backend.test.__file__).parent / "data" / "light"
MOST_BYTES = 200_000


class Picture(NamedTuple):
    """A command that writes a page, and a script that the page runs before the picture is taken."""

    command: tuple[str, ...]
    act: str = ""
    theme: str = "light"
    height: int = 1100


def _mode(value: str) -> str:
    find = "document.querySelector('select[aria-label=\"Colour by\"]')"
    return f"const mode = {find}; mode.value = '{value}'; mode.dispatchEvent(new Event('change'));"


ALL = "[...document.querySelectorAll('button')].find((button) => button.textContent === 'show all').click();"
SIZES = ("--dim", "batch=4", "--dim", "tokens=32")
SCROLL = "[...document.querySelectorAll('h2')].find((title) => title.textContent.startsWith('Nodes')).scrollIntoView();"
PICTURED = {
    "resnet50": Picture(("report", "resnet50.onnx", "--only", "cpu"), _mode("measured_ns") + ALL, height=1050),
    "densenet121": Picture(("report", "densenet121.onnx", "--only", "cpu"), SCROLL, height=1500),
    "inception_v1": Picture(
        ("report", "inception_v1.onnx", "--only", "cpu"), _mode("predicted_ns") + ALL, "dark", 1050
    ),
    "decoder": Picture(("report", "decoder.onnx", "--only", "webgpu")),
    "classifier": Picture(
        ("compare", "classifier.onnx", "--device", "cpu", "--device", "webgpu", "--assisted", *SIZES)
    ),
}


def write_models(folder: Path) -> None:
    """Write the models of the pictures."""
    for name in ("resnet50", "densenet121", "inception_v1"):
        shutil.copy(LIGHT / f"light_{name}.onnx", folder / f"{name}.onnx")
    onnx.save(make_text_classifier.make_model(make_text_classifier.make_weights()), folder / "classifier.onnx")
    sizes = tiny_llama.Sizes(layers=12)
    rlx_ort.save_onnx(tiny_llama.build_prefill(sizes, tiny_llama.make_weights(sizes)), folder / "decoder.onnx")


def taken(browser: Any, page: Path, picture: Picture) -> bytes:
    """Return the picture of a page as a PNG."""
    browser.set_window_size(1280, picture.height)
    feature = {"name": "prefers-color-scheme", "value": picture.theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(page.as_uri())
    browser.execute_async_script(f"{picture.act} setTimeout(arguments[0], 500)")
    stream = io.BytesIO()
    shot = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    shot.quantize(96).save(stream, format="png", optimize=True)
    return stream.getvalue()


def main() -> int:
    """Write the pictures, and return 0 if all are small enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURED)}; all by default")
    names = parser.parse_args().names
    PICTURES.mkdir(exist_ok=True)
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or ""
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    large = []
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        for name in names or PICTURED:
            picture, page = PICTURED[name], Path(folder) / f"{name}.html"
            command, model, *rest = picture.command
            CliRunner().invoke(rlx, [command, str(Path(folder) / model), *rest, "--html", str(page)])
            data = taken(browser, page, picture)
            (PICTURES / f"report-{name}.png").write_bytes(data)
            print(f"{name:14} page {page.stat().st_size:9,} bytes, picture {len(data):9,} bytes")
            large += [name] * (len(data) > MOST_BYTES)
    browser.quit()
    return int(bool(large))


if __name__ == "__main__":
    sys.exit(main())
