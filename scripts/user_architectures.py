"""The architectures of `user_models.py`: each as users build it with its framework, with few layers of little width.

Every function returns an `Architecture`. A module of PyTorch takes its inputs by name and returns a tensor or a tuple.
"""

# mypy: disable-error-code="misc"
# PyTorch has no types where these are checked, so nn.Module is Any.

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import sklearn.compose
import sklearn.ensemble
import sklearn.linear_model
import sklearn.neural_network
import sklearn.pipeline
import sklearn.preprocessing
import sklearn.svm
import timm.models.efficientnet
import timm.models.resnet
import torch
import torchvision
import transformers
import xgboost
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "helpers")]

from model_corpus import Input, seeded  # noqa: E402  # a helper of the tests

VOCABULARY = 96


@dataclass(frozen=True)
class Architecture:
    """A model of a framework, its inputs, and the sizes it is run with."""

    model: Any
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    cases: tuple[Mapping[str, int], ...]
    opsets: tuple[int, ...] = (17,)
    """The opsets of PyTorch's older exporter; the newer one writes the opset that it chooses."""


ARCHITECTURES: dict[str, Callable[[], Architecture]] = {}


def architecture(build: Callable[[], Architecture]) -> Callable[[], Architecture]:
    """List a function under its name."""
    ARCHITECTURES[build.__name__] = build
    return build


TEXT = ({"batch": 1, "seq": 7}, {"batch": 3, "seq": 12}, {"batch": 16, "seq": 9})
IMAGES = ({"batch": 1}, {"batch": 3}, {"batch": 16})
IDS = Input("input_ids", ("batch", "seq"), dtype="int64", low=3, high=VOCABULARY)
MASK = Input("attention_mask", ("batch", "seq"), "mask", "int64")


def image(size: int, name: str = "pixel_values") -> Input:
    """Return an input of square images."""
    return Input(name, ("batch", 3, size, size))


class Text(nn.Module):
    """An encoder or decoder of tokens, with their mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the first output."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)[0]


class SentenceEmbedding(Text):
    """An encoder as sentence-transformers wraps it: the mean over the tokens, normalised."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return an embedding a row."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)[0]
        mask = attention_mask.unsqueeze(-1).expand(hidden.size()).float()
        mean = (hidden * mask).sum(1) / torch.clamp(mask.sum(1), min=1e-9)
        return nn.functional.normalize(mean, p=2, dim=1)


class TextToText(nn.Module):
    """An encoder and a decoder of tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of the decoder."""
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            use_cache=False,
            return_dict=True,
        ).logits


class Vision(nn.Module):
    """A model of images from transformers."""

    def __init__(self, model: nn.Module, *fields: str) -> None:
        super().__init__()
        self.model = model
        self.fields = fields

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the fields of its output."""
        found = self.model(pixel_values=pixel_values, return_dict=True)
        return tuple(found[field] for field in self.fields)


def text(model: nn.Module, wrap: type[Text] = Text, **other: Any) -> Architecture:
    """Return a model of tokens; its cache is off."""
    model.config.use_cache = False
    return Architecture(wrap(model), (IDS, MASK), ("output",), TEXT, **other)


def vision(model: nn.Module, size: int, *fields: str, **other: Any) -> Architecture:
    """Return a model of images from transformers."""
    return Architecture(Vision(model, *fields), (image(size),), fields, IMAGES, **other)


def plain(model: nn.Module, size: int, **other: Any) -> Architecture:
    """Return a module that takes images."""
    return Architecture(model, (image(size, "x"),), ("y",), IMAGES, **other)


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
BERT = {**SMALL, "max_position_embeddings": 64}


@architecture
def bert() -> Architecture:
    """BERT with a head that classifies."""
    config = transformers.BertConfig(**BERT, num_labels=3)
    return text(transformers.BertForSequenceClassification(config), opsets=(17, 20))


@architecture
def distilbert() -> Architecture:
    """DistilBERT, the bare encoder."""
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=64
    )
    return text(transformers.DistilBertModel(config))


@architecture
def roberta() -> Architecture:
    """RoBERTa with a head that labels tokens; its positions come from the tokens."""
    config = transformers.RobertaConfig(**BERT, num_labels=5)
    return text(transformers.RobertaForTokenClassification(config))


@architecture
def deberta() -> Architecture:
    """DeBERTa v2 with its relative positions."""
    config = transformers.DebertaV2Config(
        **BERT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16, max_relative_positions=32
    )
    return text(transformers.DebertaV2Model(config))


@architecture
def minilm() -> Architecture:
    """MiniLM as sentence-transformers runs it."""
    return text(transformers.BertModel(transformers.BertConfig(**BERT)), SentenceEmbedding)


@architecture
def mpnet() -> Architecture:
    """MPNet as sentence-transformers runs it, with relative positions."""
    return text(transformers.MPNetModel(transformers.MPNetConfig(**BERT)), SentenceEmbedding)


@architecture
def gpt2() -> Architecture:
    """GPT-2 with its language model head."""
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    return text(transformers.GPT2LMHeadModel(config), opsets=(17, 20))


@architecture
def llama() -> Architecture:
    """Llama with grouped heads, rotary positions and RMS norms."""
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, max_position_embeddings=64)
    return text(transformers.LlamaForCausalLM(config))


@architecture
def t5() -> Architecture:
    """T5, encoder and decoder."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    decoder = Input("decoder_input_ids", ("batch", "steps"), dtype="int64", low=3, high=VOCABULARY)
    cases = tuple({**sizes, "steps": steps} for sizes, steps in zip(TEXT, (3, 5, 4), strict=True))
    model = TextToText(transformers.T5ForConditionalGeneration(config))
    return Architecture(model, (IDS, MASK, decoder), ("logits",), cases)


@architecture
def vit() -> Architecture:
    """A vision transformer."""
    config = transformers.ViTConfig(**SMALL_VISION, image_size=32, patch_size=8, num_labels=5)
    return vision(transformers.ViTForImageClassification(config), 32, "logits", opsets=(17, 20))


SMALL_VISION = {key: value for key, value in SMALL.items() if key != "vocab_size"}


@architecture
def swin() -> Architecture:
    """Swin with shifted windows, of an image that the windows do not divide."""
    config = transformers.SwinConfig(
        image_size=40, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=5
    )
    return vision(transformers.SwinForImageClassification(config), 40, "logits")


@architecture
def segformer() -> Architecture:
    """SegFormer, which resizes its feature maps."""
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 24, 32],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        num_labels=4,
    )
    return vision(transformers.SegformerForSemanticSegmentation(config), 64, "logits")


@architecture
def detr() -> Architecture:
    """DETR on a ResNet of transformers."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], layer_type="basic", out_features=["stage4"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=7,
        num_labels=4,
    )
    return vision(transformers.DetrForObjectDetection(config), 64, "logits", "pred_boxes")


class Clip(nn.Module):
    """CLIP's two towers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, pixel_values: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of images over texts, and the embeddings of the texts."""
        found = self.model(input_ids=input_ids, pixel_values=pixel_values, attention_mask=attention_mask)
        return found.logits_per_image, found.text_embeds


@architecture
def clip() -> Architecture:
    """CLIP: texts against images."""
    config = transformers.CLIPConfig(
        text_config={**SMALL, "max_position_embeddings": 32, "eos_token_id": 2},
        vision_config={**SMALL_VISION, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    pixels = Input("pixel_values", ("images", 3, 32, 32))
    cases = tuple({**sizes, "images": images} for sizes, images in zip(TEXT, (1, 2, 16), strict=True))
    outputs = ("logits_per_image", "text_embeds")
    return Architecture(Clip(transformers.CLIPModel(config)), (IDS, pixels, MASK), outputs, cases)


@architecture
def resnet() -> Architecture:
    """A ResNet of timm with a block a stage."""
    block = timm.models.resnet.BasicBlock
    model = timm.models.resnet.ResNet(block, [1, 1, 1, 1], channels=(16, 24, 32, 48), num_classes=10)
    return plain(model, 32, opsets=(17, 20))


@architecture
def mobilenet_v3() -> Architecture:
    """MobileNet v3 small of torchvision, of a quarter of the width."""
    return plain(torchvision.models.mobilenet_v3_small(num_classes=10, width_mult=0.25), 64)


@architecture
def efficientnet() -> Architecture:
    """EfficientNet B0 of timm, of a quarter of the width."""
    model = timm.models.efficientnet._gen_efficientnet("efficientnet_b0", 0.25, 0.5, num_classes=10)
    return plain(model, 64)


@architecture
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


@architecture
def unet() -> Architecture:
    """A U-Net, of images of any size."""
    sizes = ({"height": 32, "width": 48}, {"height": 64, "width": 32}, {"height": 32, "width": 32})
    cases = tuple({**batch, **size} for batch, size in zip(IMAGES, sizes, strict=True))
    return Architecture(Unet(), (Input("x", ("batch", 3, "height", "width")),), ("y",), cases)


class Yolo(nn.Module):
    """A detector with one scale, whose boxes are decoded and thinned out in the graph."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        widths = [3, 8, 16, 32]
        self.backbone = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.SiLU())
                for before, after in itertools.pairwise(widths)
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


@architecture
def yolo() -> Architecture:
    """A detector with NonMaxSuppression, whose output is as long as there are boxes."""
    return Architecture(Yolo(), (image(64, "images"),), ("boxes", "scores", "labels"), IMAGES)


class Speech(nn.Module):
    """A model of samples."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_values: torch.Tensor) -> torch.Tensor:
        """Return the logits of each frame."""
        return self.model(input_values=input_values, return_dict=True).logits


@architecture
def wav2vec2() -> Architecture:
    """wav2vec 2.0 with its CTC head."""
    config = transformers.Wav2Vec2Config(
        **{**SMALL, "vocab_size": 12},
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    cases = ({"batch": 1, "samples": 400}, {"batch": 3, "samples": 333}, {"batch": 16, "samples": 200})
    inputs = (Input("input_values", ("batch", "samples")),)
    return Architecture(Speech(transformers.Wav2Vec2ForCTC(config)), inputs, ("logits",), cases)


class Transcriber(nn.Module):
    """Whisper without its cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_features: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of the decoder."""
        return self.model(
            input_features=input_features, decoder_input_ids=decoder_input_ids, use_cache=False, return_dict=True
        ).logits


@architecture
def whisper() -> Architecture:
    """Whisper: spectrograms to tokens."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=30,
        max_target_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    tokens = Input("decoder_input_ids", ("batch", "steps"), dtype="int64", low=3, high=VOCABULARY)
    cases = ({"batch": 1, "steps": 3}, {"batch": 3, "steps": 6}, {"batch": 16, "steps": 4})
    inputs = (Input("input_features", ("batch", 16, 60)), tokens)
    model = Transcriber(transformers.WhisperForConditionalGeneration(config))
    return Architecture(model, inputs, ("logits",), cases)


class Crnn(nn.Module):
    """A reader of text lines: convolutions over the image, a recurrent network over its columns."""

    def __init__(self) -> None:
        super().__init__()
        widths = [1, 8, 16, 32]
        layers: list[nn.Module] = []
        for at, (before, after) in enumerate(itertools.pairwise(widths)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
            layers += [nn.MaxPool2d((2, 2) if at < 2 else (2, 1))]
        self.features = nn.Sequential(*layers)
        self.rnn = nn.LSTM(32 * 4, 24, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(48, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of each column."""
        found = self.features(x)
        found = found.permute(0, 3, 1, 2).flatten(2)
        return nn.functional.log_softmax(self.head(self.rnn(found)[0]), -1)


@architecture
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


def _recurrent(kind: type[nn.Module]) -> Architecture:
    cases = ({"batch": 1, "seq": 6}, {"batch": 3, "seq": 11}, {"batch": 16, "seq": 8})
    return Architecture(Recurrent(kind), (Input("x", ("batch", "seq", 8)),), ("y",), cases)


@architecture
def lstm() -> Architecture:
    """An LSTM over sequences of any length."""
    return _recurrent(nn.LSTM)


@architecture
def gru() -> Architecture:
    """A GRU over sequences of any length."""
    return _recurrent(nn.GRU)


ROWS = ({"batch": 1}, {"batch": 5}, {"batch": 16})


def _table(columns: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return features, a class of three and a number for 240 rows."""
    features = seeded(7, (240, columns), -1, 1)
    signal = features[:, 0] * 2 - features[:, 1] * features[:, 2] + np.sin(3 * features[:, 3])
    return features, np.digitize(signal, [-0.6, 0.6]), signal.astype(np.float32)


FEATURES = (Input("features", ("batch", 6)),)


@architecture
def sklearn_classifier() -> Architecture:
    """A pipeline over numbers and words: scaling, one column a word, a logistic regression."""
    numbers, classes, _ = _table(4)
    words = Input("colour", (240, 1), "text").array({}, 3)
    columns = sklearn.compose.ColumnTransformer(
        [
            ("numbers", sklearn.preprocessing.StandardScaler(), [0, 1, 2, 3]),
            ("words", sklearn.preprocessing.OneHotEncoder(handle_unknown="ignore"), [4]),
        ]
    )
    model = sklearn.pipeline.make_pipeline(columns, sklearn.linear_model.LogisticRegression(max_iter=500))
    model.fit(np.concatenate([numbers.astype(object), words], 1), classes)
    inputs = (*(Input(f"n{at}", ("batch", 1)) for at in range(4)), Input("colour", ("batch", 1), "text", "str"))
    return Architecture(model, inputs, ("label", "probabilities"), ROWS)


@architecture
def sklearn_forest() -> Architecture:
    """A random forest that classifies."""
    features, classes, _ = _table(6)
    model = sklearn.ensemble.RandomForestClassifier(12, max_depth=5, random_state=0).fit(features, classes)
    return Architecture(model, FEATURES, ("label", "probabilities"), ROWS)


@architecture
def sklearn_regressor() -> Architecture:
    """Scaling and a small neural network that predicts a number."""
    features, _, numbers = _table(6)
    network = sklearn.neural_network.MLPRegressor(hidden_layer_sizes=(24, 16), max_iter=300, random_state=0)
    model = sklearn.pipeline.make_pipeline(sklearn.preprocessing.StandardScaler(), network).fit(features, numbers)
    return Architecture(model, FEATURES, ("variable",), ROWS)


@architecture
def sklearn_svm() -> Architecture:
    """A support vector machine with a radial kernel that classifies."""
    features, classes, _ = _table(6)
    model = sklearn.pipeline.make_pipeline(sklearn.preprocessing.MinMaxScaler(), sklearn.svm.SVC(random_state=0))
    return Architecture(model.fit(features, classes), FEATURES, ("label", "scores"), ROWS)


@architecture
def lightgbm_classifier() -> Architecture:
    """LightGBM of three classes."""
    features, classes, _ = _table(6)
    model = lightgbm.LGBMClassifier(n_estimators=8, num_leaves=10, verbose=-1, n_jobs=1, random_state=0)
    return Architecture(model.fit(features, classes), FEATURES, ("label", "probabilities"), ROWS)


@architecture
def xgboost_regressor() -> Architecture:
    """XGBoost that predicts a number."""
    features, _, numbers = _table(6)
    model = xgboost.XGBRegressor(n_estimators=10, max_depth=4, n_jobs=1, random_state=0).fit(features, numbers)
    return Architecture(model, FEATURES, ("variable",), ROWS)
