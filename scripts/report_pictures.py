"""The pictures of the docs: pages of the commands in a real Chromium, in light and dark, 1280 and 400 pixels wide.

    python scripts/report_pictures.py [NAME ...]         needs chromium, chromedriver, selenium and Pillow

`report` of ResNet-18 and DistilBERT as PyTorch exports them, which needs torch, torchvision and transformers, and of a
decoder of more than 5,000 nodes; `bench` and `compare` of the text classifier of the examples on the CPU and on WebGPU
(scripts/software_gpu.py brings one in software); and the status page of a server with 20 models under load. Each page
must be quiet, without a request to others, drawn in three seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from click.testing import CliRunner
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "tests" / "helpers")]

import make_text_classifier  # noqa: E402  # a folder of the examples
import tiny_llama  # noqa: E402
from headless_chromium import headless_chromium, prefer_theme  # noqa: E402  # a helper of the tests
from served_models import serving_under_load  # noqa: E402  # another one

import rlx_ort  # noqa: E402
from rlx_ort.cli import main as rlx  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
MOST_BYTES = 200_000
DRAWN_S = 3.0
HEIGHT, VIEWS = 1350, (("light", 1280), ("dark", 1280), ("light", 400), ("dark", 400))
SERVED = "serving-status"
SIZES = ("--dim", "batch=4", "--dim", "tokens=32")


def _export(model: Any, inputs: Any, path: Path, shapes: Any) -> None:
    import torch

    torch.onnx.export(model, inputs, path, dynamo=True, external_data=False, dynamic_shapes=shapes, verbose=False)


def _resnet(path: Path) -> None:
    import torch
    import torchvision

    model, images = torchvision.models.resnet18().eval(), torch.randn(2, 3, 224, 224)
    _export(model, (images,), path, ({0: torch.export.Dim("batch")},))


def _distilbert(path: Path) -> None:
    import torch
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    model = DistilBertForSequenceClassification(DistilBertConfig(vocab_size=2000)).eval()
    inputs = (torch.ones(2, 16, dtype=torch.long),) * 2
    _export(model, inputs, path, ({0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", min=2, max=512)},) * 2)


def _decoder(path: Path) -> None:
    sizes = tiny_llama.Sizes(layers=64)
    rlx_ort.save_onnx(tiny_llama.build_prefill(sizes, tiny_llama.make_weights(sizes)), path)


def _classifier(path: Path) -> None:
    onnx.save(make_text_classifier.make_model(make_text_classifier.make_weights()), path)


PICTURED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "report-resnet18": (_resnet, ("report", "--only", "cpu", "--dim", "batch=1")),
    "report-distilbert": (_distilbert, ("report", "--only", "cpu", "--dim", "batch=1", "--dim", "tokens=128")),
    "report-decoder": (_decoder, ("report", "--only", "cpu", "--dim", "batch=1", "--dim", "seq=16")),
    "bench": (_classifier, ("bench", "--runs", "40", *SIZES)),
    "compare": (_classifier, ("compare", "--device", "cpu", "--device", "webgpu", "--assisted", *SIZES)),
}


def written(name: str, folder: Path) -> str:
    """Write a page by its command, and return its address."""
    write, (command, *rest) = PICTURED[name]
    model, page = folder / f"{write.__name__[1:]}.onnx", folder / f"{name}.html"
    write(model)
    made = CliRunner().invoke(rlx, [command, str(model), *rest, "--html", str(page)])
    if made.exit_code:
        raise SystemExit(f"{name}: {made.output}") from made.exception
    return page.as_uri()


def taken(browser: Any, page: str, theme: str, width: int) -> tuple[bytes, list[str], float]:
    """Return the picture of a page as a PNG, what is wrong with the page, and the seconds of a core to draw it."""
    size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    prefer_theme(browser, theme)
    browser.get("about:blank")
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.execute_cdp_cmd("Performance.disable", {})
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    browser.get(page)
    browser.execute_async_script("setTimeout(arguments[0], 1500)")
    wrong = [entry["message"] for entry in browser.get_log("browser")]
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    wrong += [f"asks for {url}" for url in sent if not url.startswith((page, "data:"))]
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    drawn_s = {each["name"]: each["value"] for each in metrics}["TaskDuration"]
    wrong += ["is drawn too slowly"] * (drawn_s > DRAWN_S)
    stream = io.BytesIO()
    shot = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    shot.quantize(200).save(stream, format="png", optimize=True)
    if stream.tell() > MOST_BYTES:
        wrong.append(f"a picture of {stream.tell():,} bytes")
    return stream.getvalue(), wrong, drawn_s


def main() -> int:
    """Write the pictures, and return 0 if nothing is wrong with them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join([*PICTURED, SERVED])}; all by default")
    names = parser.parse_args().names or [*PICTURED, SERVED]
    failed = False
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as stack,
        headless_chromium("--hide-scrollbars", recorded=True) as browser,
    ):
        for name in names:
            if name == SERVED:
                page = f"http://{stack.enter_context(serving_under_load(Path(folder), seconds=90)).http}/"
            else:
                page = written(name, Path(folder))
            for theme, width in VIEWS:
                data, wrong, drawn_s = taken(browser, page, theme, width)
                (PICTURES / f"{name}-{theme}-{width}.png").write_bytes(data)
                print(f"{name:18} {theme:5} {width:4} drawn in {drawn_s:.2f} s, {len(data):9,} bytes", *wrong)
                failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
