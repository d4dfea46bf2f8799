"""The architectures of `user_models.py`: each as users build it with its framework, with few layers of little width.

Those of transformers are tables of `user_models.toml`; every function here returns one of another framework.
"""

# mypy: disable-error-code="misc"
# PyTorch has no types where these are checked, so nn.Module is Any.

from __future__ import annotations

import functools
import itertools
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import timm.models.efficientnet
import timm.models.resnet
import torch
import torchvision
import transformers
import xgboost
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, StandardScaler
from sklearn.svm import SVC
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "helpers")]

from model_corpus import Input, seeded  # noqa: E402  # a helper of the tests

TABLES = tomllib.loads(Path(__file__).with_name("user_models.toml").read_text(encoding="utf-8"))
TEXT = ({"batch": 1, "seq": 7}, {"batch": 3, "seq": 12}, {"batch": 16, "seq": 9})
IMAGES = ({"batch": 1}, {"batch": 3}, {"batch": 16})
ROWS = ({"batch": 1}, {"batch": 5}, {"batch": 16})


@dataclass(frozen=True)
class Architecture:
    """A model of a framework, its inputs, and the sizes it is run with."""

    model: Any
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    cases: tuple[Mapping[str, int], ...]
    opsets: tuple[int, ...] = (17,)
    """The opsets of PyTorch's older exporter; the newer one writes the opset that it chooses."""


class Called(nn.Module):
    """A model of transformers that takes its inputs by place, in the order of `names`, and returns some fields."""

    def __init__(self, model: nn.Module, names: Sequence[str], table: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.fields, self.call, self.mean = table.get("fields", [0]), table.get("call", {}), table.get("mean", False)

    def forward(self, *arrays: torch.Tensor) -> Any:
        """Return the fields, or their mean over the tokens, normalised."""
        given = dict(zip(self.names, arrays, strict=True))
        output = self.model(**given, **self.call, return_dict=True)
        if self.mean:
            mask = given["attention_mask"].unsqueeze(-1).expand(output[0].size()).float()
            mean = (output[0] * mask).sum(1) / torch.clamp(mask.sum(1), min=1e-9)
            return nn.functional.normalize(mean, p=2, dim=1)
        fields = tuple(output[field] for field in self.fields)
        return fields if len(fields) > 1 else fields[0]


def of_table(table: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a table of `user_models.toml`."""
    kind = getattr(transformers, table["class"])
    model = kind(kind.config_class(**{**TABLES["configs"].get(table.get("base"), {}), **table.get("config", {})}))
    if "image" in table:
        inputs: tuple[Input, ...] = (image(table["image"]),)
    else:
        entries = [TABLES["inputs"][name] for name in table.get("inputs", ("ids", "mask"))]
        inputs = tuple(Input(**{**entry, "dims": tuple(entry["dims"])}) for entry in entries)
    if "fields" not in table:
        model.config.use_cache = False
    cases = tuple(table.get("cases", IMAGES if "image" in table else TEXT))
    called = Called(model, [each.name for each in inputs], table)
    return Architecture(
        called, inputs, tuple(table.get("fields", ["output"])), cases, tuple(table.get("opsets", (17,)))
    )


def image(size: int, name: str = "pixel_values") -> Input:
    """Return an input of square images."""
    return Input(name, ("batch", 3, size, size))


def plain(model: nn.Module, size: int, **other: Any) -> Architecture:
    """Return a module that takes images."""
    return Architecture(model, (image(size, "x"),), ("y",), IMAGES, **other)


def resnet() -> Architecture:
    """A ResNet of timm with a block a stage."""
    block = timm.models.resnet.BasicBlock
    model = timm.models.resnet.ResNet(block, [1, 1, 1, 1], channels=(16, 24, 32, 48), num_classes=10)
    return plain(model, 32, opsets=(17, 20))


def mobilenet_v3() -> Architecture:
    """MobileNet v3 small of torchvision, of a quarter of the width."""
    return plain(torchvision.models.mobilenet_v3_small(num_classes=10, width_mult=0.25), 64)


def efficientnet() -> Architecture:
    """EfficientNet B0 of timm, of a quarter of the width."""
    model = timm.models.efficientnet._gen_efficientnet("efficientnet_b0", 0.25, 0.5, num_classes=10)
    return plain(model, 64)


def convnext() -> Architecture:
    """ConvNeXt of torchvision."""
    block = torchvision.models.convnext.CNBlockConfig
    settings = [block(16, 32, 1), block(32, 48, 1), block(48, 64, 2), block(64, None, 1)]
    return plain(torchvision.models.ConvNeXt(settings, layer_scale=0.5, num_classes=10), 64)


class Unet(nn.Module):
    """A U-Net of two levels that resizes bilinearly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bottom = self._double(3, 8), self._double(8, 16), self._double(16, 32)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.third, self.fourth = self._double(32, 16), self._double(24, 8)
        self.head = nn.Conv2d(8, 2, 1)

    @staticmethod
    def _double(before: int, after: int) -> nn.Sequential:
        pair = [nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)]
        return nn.Sequential(pair[0], nn.BatchNorm2d(after), nn.ReLU(), pair[1], nn.BatchNorm2d(after), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two classes a pixel."""
        first = self.first(x)
        second = self.second(self.pool(first))
        bottom = self.bottom(self.pool(second))
        third = self.third(torch.cat([self.up(bottom), second], 1))
        raised = nn.functional.interpolate(third, size=first.shape[-2:], mode="bilinear", align_corners=False)
        return self.head(self.fourth(torch.cat([raised, first], 1)))


def unet() -> Architecture:
    """A U-Net, of images of any size."""
    sizes = ({"height": 32, "width": 48}, {"height": 64, "width": 32}, {"height": 32, "width": 32})
    cases = tuple({**batch, **size} for batch, size in zip(IMAGES, sizes, strict=True))
    return Architecture(Unet(), (Input("x", ("batch", 3, "height", "width")),), ("y",), cases)


class Yolo(nn.Module):
    """A detector with one scale, whose boxes are decoded and thinned out in the graph."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.SiLU())
                for before, after in itertools.pairwise([3, 8, 16, 32])
            )
        )
        self.head = nn.Conv2d(32, 4 + classes, 1)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return boxes, scores and classes of what is left."""
        found = self.head(self.backbone(images))
        batch, _, height, width = found.shape
        found = found.flatten(2).transpose(1, 2)
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centre = torch.stack([columns, rows], -1).reshape(1, -1, 2).to(images.dtype) + 0.5
        middle = (centre + found[..., :2].tanh()) * 8
        size = found[..., 2:4].exp() * 12
        boxes = torch.cat([middle - size / 2, middle + size / 2], -1).flatten(0, 1)
        scores, labels = found[..., 4:].sigmoid().max(-1)
        number = torch.arange(batch).unsqueeze(1).expand(batch, height * width).flatten()
        apart = boxes + (number * 1000).unsqueeze(1).to(boxes.dtype)  # boxes of different images do not overlap
        kept = torchvision.ops.nms(apart, scores.flatten(), 0.3)
        return boxes[kept], scores.flatten()[kept], labels.flatten()[kept]


def yolo() -> Architecture:
    """A detector with NonMaxSuppression, whose output is as long as there are boxes."""
    return Architecture(Yolo(), (image(64, "images"),), ("boxes", "scores", "labels"), IMAGES)


class Crnn(nn.Module):
    """A reader of text lines: convolutions over the image, a recurrent network over its columns."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for at, (before, after) in enumerate(itertools.pairwise([1, 8, 16, 32])):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
            layers += [nn.MaxPool2d((2, 2) if at < 2 else (2, 1))]
        self.features = nn.Sequential(*layers)
        self.rnn = nn.LSTM(32 * 4, 24, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(48, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of each column."""
        columns = self.features(x).permute(0, 3, 1, 2).flatten(2)
        return nn.functional.log_softmax(self.head(self.rnn(columns)[0]), -1)


def crnn() -> Architecture:
    """A CRNN as OCR tools run it, of lines of any width."""
    cases = ({"batch": 1, "width": 64}, {"batch": 3, "width": 100}, {"batch": 16, "width": 48})
    return Architecture(Crnn(), (Input("x", ("batch", 1, 32, "width")),), ("y",), cases, opsets=(17, 20))


class Recurrent(nn.Module):
    """Two recurrent layers with a head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(8, 24, 2, batch_first=True)
        self.head = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return four values a step."""
        return self.head(self.rnn(x)[0])


def recurrent(kind: type[nn.Module]) -> Architecture:
    """Return a recurrent network over sequences of any length."""
    cases = ({"batch": 1, "seq": 6}, {"batch": 3, "seq": 11}, {"batch": 16, "seq": 8})
    return Architecture(Recurrent(kind), (Input("x", ("batch", "seq", 8)),), ("y",), cases)


def _rows(columns: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return features, a class of three and a number for 240 rows."""
    features = seeded(7, (240, columns), -1, 1)
    signal = features[:, 0] * 2 - features[:, 1] * features[:, 2] + np.sin(3 * features[:, 3])
    return features, np.digitize(signal, [-0.6, 0.6]), signal.astype(np.float32)


def fitted(model: Any, *outputs: str) -> Architecture:
    """Return a model of six numbers a row after its training; one output is a number, the first of two a class."""
    features, classes, numbers = _rows(6)
    model.fit(features, numbers if len(outputs) == 1 else classes)
    return Architecture(model, (Input("features", ("batch", 6)),), outputs, ROWS)


def sklearn_classifier() -> Architecture:
    """A pipeline over numbers and words: scaling, one column a word, a logistic regression."""
    numbers, classes, _ = _rows(4)
    words = Input("colour", (240, 1), "text").array({}, 3)
    parts = [("numbers", StandardScaler(), [0, 1, 2, 3]), ("words", OneHotEncoder(handle_unknown="ignore"), [4])]
    model = make_pipeline(ColumnTransformer(parts), LogisticRegression(max_iter=500))
    model.fit(np.concatenate([numbers.astype(object), words], 1), classes)
    inputs = (*(Input(f"n{at}", ("batch", 1)) for at in range(4)), Input("colour", ("batch", 1), "text", "str"))
    return Architecture(model, inputs, ("label", "probabilities"), ROWS)


def sklearn_forest() -> Architecture:
    """A random forest that classifies."""
    return fitted(RandomForestClassifier(12, max_depth=5, random_state=0), "label", "probabilities")


def sklearn_regressor() -> Architecture:
    """Scaling and a small neural network that predicts a number."""
    network = MLPRegressor(hidden_layer_sizes=(24, 16), max_iter=300, random_state=0)
    return fitted(make_pipeline(StandardScaler(), network), "variable")


def sklearn_svm() -> Architecture:
    """A support vector machine with a radial kernel that classifies."""
    return fitted(make_pipeline(MinMaxScaler(), SVC(random_state=0)), "label", "scores")


def lightgbm_classifier() -> Architecture:
    """LightGBM of three classes."""
    model = lightgbm.LGBMClassifier(n_estimators=8, num_leaves=10, verbose=-1, n_jobs=1, random_state=0)
    return fitted(model, "label", "probabilities")


def xgboost_regressor() -> Architecture:
    """XGBoost that predicts a number."""
    return fitted(xgboost.XGBRegressor(n_estimators=10, max_depth=4, n_jobs=1, random_state=0), "variable")


_BUILT = (
    *(resnet, mobilenet_v3, efficientnet, convnext, unet, yolo, crnn, sklearn_classifier, sklearn_forest),
    *(sklearn_regressor, sklearn_svm, lightgbm_classifier, xgboost_regressor),
)
ARCHITECTURES: dict[str, Callable[[], Architecture]] = {
    **{name: functools.partial(of_table, table) for name, table in TABLES["models"].items()},
    **{build.__name__: build for build in _BUILT},
    "lstm": functools.partial(recurrent, nn.LSTM),
    "gru": functools.partial(recurrent, nn.GRU),
}
