"""Networks that are no workloads: the planner was written with those of ``graphs.workloads`` in view, and these say how it does
elsewhere. Small ones of the published kinds, with random weights, in training mode. [torch]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.errors import InputError
from graphs.ir import Graph
from graphs.workloads import Built, transformers_library

from .steps import graph_of

CLASSES = 100
TOKENS = 512  # of every vocabulary


def other_graph(name: str) -> Graph:
    """The training step of one of ``OTHERS``, with the roofline's costs."""
    if name not in OTHERS:
        raise InputError(f"unknown network {name!r}; there are: {', '.join(OTHERS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, inputs, loss = OTHERS[name]()
    return graph_of(name, (model.train(), inputs, loss))


def _images(batch: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(CLASSES, (batch,))}


def _classified(model: nn.Module, batch: int, size: int) -> Built:
    """A network of images that returns scores."""
    return model, (torch.randn(batch, 3, size, size), torch.randint(CLASSES, (batch,))), F.cross_entropy


# Defined here.


class _Dense(nn.Module):
    """Huang et al. 2017: every layer reads what all before it have made."""

    def __init__(self, blocks: int, layers: int, growth: int) -> None:
        super().__init__()
        wide = 2 * growth
        self.stem = nn.Conv2d(3, wide, 3, padding=1)
        self.blocks, self.narrow = nn.ModuleList(), nn.ModuleList()
        for _ in range(blocks):
            self.blocks.append(nn.ModuleList(self._layer(wide + i * growth, growth) for i in range(layers)))
            wide += layers * growth
            self.narrow.append(nn.Sequential(nn.BatchNorm2d(wide), nn.ReLU(), nn.Conv2d(wide, wide // 2, 1), nn.AvgPool2d(2)))
            wide //= 2
        self.head = nn.Linear(wide, CLASSES)

    @staticmethod
    def _layer(wide: int, growth: int) -> nn.Sequential:
        squeezed = nn.Sequential(nn.BatchNorm2d(wide), nn.ReLU(), nn.Conv2d(wide, 4 * growth, 1, bias=False))
        grown = nn.Sequential(nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False))
        return nn.Sequential(squeezed, grown)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, narrow in zip(self.blocks, self.narrow, strict=True):
            made = [x]
            for layer in block:  # type: ignore[attr-defined]
                made.append(layer(torch.cat(made, 1)))
            x = narrow(torch.cat(made, 1))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def _dense() -> Built:
    return _classified(_Dense(3, 8, 16), 8, 32)


class _Inception(nn.Module):
    """Szegedy et al. 2015: four branches side by side, joined."""

    def __init__(self, wide: int, branch: int) -> None:
        super().__init__()
        self.one = self._made(wide, branch, 1)
        self.three = nn.Sequential(self._made(wide, branch, 1), self._made(branch, branch, 3))
        self.five = nn.Sequential(self._made(wide, branch, 1), self._made(branch, branch, 5))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), self._made(wide, branch, 1))

    @staticmethod
    def _made(wide: int, to: int, kernel: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(wide, to, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(to), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


def _inception() -> Built:
    stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    parts: list[nn.Module] = [stem]
    for branch in (16, 24, 32):
        wide = 64 if branch == 16 else 4 * (branch - 8)
        parts += [_Inception(wide, branch), _Inception(4 * branch, branch), _Inception(4 * branch, branch), nn.MaxPool2d(2)]
    return _classified(nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES)), 8, 64)


class _Gru(nn.Module):
    """Cho et al. 2014, two layers, unrolled over time."""

    def __init__(self, wide: int, layers: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(wide, wide) for _ in range(layers))
        self.head = nn.Linear(wide, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states = [x.new_zeros(x.shape[0], x.shape[2]) for _ in self.cells]
        for below in x.unbind(1):
            for i, cell in enumerate(self.cells):
                below = states[i] = cell(below, states[i])
        out: Tensor = self.head(states[-1])
        return out


def _gru() -> Built:
    return _Gru(256, 2), (torch.randn(64, 24, 256), torch.randint(CLASSES, (64,))), F.cross_entropy


class _Mixer(nn.Module):
    """Tolstikhin et al. 2021: perceptrons over patches and over channels in turn."""

    def __init__(self, wide: int, patches: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, wide, 8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for _ in range(2 * depth))
        self.over = nn.ModuleList(self._mlp(size) for _ in range(depth) for size in (patches, wide))
        self.head = nn.Linear(wide, CLASSES)

    @staticmethod
    def _mlp(wide: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(wide, 2 * wide), nn.GELU(), nn.Linear(2 * wide, wide))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for i, (norm, mlp) in enumerate(zip(self.norms, self.over, strict=True)):
            y = norm(x)
            x = x + (mlp(y) if i % 2 else mlp(y.transpose(1, 2)).transpose(1, 2))
        out: Tensor = self.head(x.mean(1))
        return out


def _mixer() -> Built:
    return _classified(_Mixer(256, 64, 8), 8, 64)


# Those of transformers, which take their inputs by name and return their loss.


def _tokens(batch: int, seq: int) -> dict[str, Tensor]:
    tokens = torch.randint(TOKENS, (batch, seq))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _t5() -> Built:
    library = transformers_library()
    sizes = {"d_model": 256, "d_kv": 32, "d_ff": 512, "num_layers": 4, "num_heads": 8}
    config = library.T5Config(vocab_size=TOKENS, **sizes, pad_token_id=0, decoder_start_token_id=0, use_cache=False)
    return library.T5ForConditionalGeneration(config), _tokens(4, 128), None


def _swin() -> Built:
    library = transformers_library()
    sizes = {"image_size": 64, "patch_size": 2, "embed_dim": 48, "depths": [2, 2, 4], "num_heads": [3, 6, 12], "window_size": 4}
    return library.SwinForImageClassification(library.SwinConfig(**sizes, num_labels=CLASSES)), _images(8, 64), None


def _convnext() -> Built:
    library = transformers_library()
    config = library.ConvNextConfig(depths=[2, 2, 6, 2], hidden_sizes=[32, 64, 128, 256], num_labels=CLASSES)
    return library.ConvNextForImageClassification(config), _images(8, 96), None


def _efficientnet() -> Built:
    library = transformers_library()
    config = library.EfficientNetConfig(width_coefficient=0.5, depth_coefficient=1.0, hidden_dim=640, num_labels=CLASSES)
    return library.EfficientNetForImageClassification(config), _images(8, 96), None


def _regnet() -> Built:
    library = transformers_library()
    sizes = {"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256], "depths": [2, 4, 8, 2], "groups_width": 16}
    return library.RegNetForImageClassification(library.RegNetConfig(**sizes, num_labels=CLASSES)), _images(8, 96), None


def _segformer() -> Built:
    library = transformers_library()
    config = library.SegformerConfig(depths=[2, 2, 2, 2], hidden_sizes=[16, 32, 64, 128], decoder_hidden_size=64, num_labels=20)
    inputs = {"pixel_values": torch.randn(4, 3, 128, 128), "labels": torch.randint(20, (4, 128, 128))}
    return library.SegformerForSemanticSegmentation(config), inputs, None


def _whisper() -> Built:
    library = transformers_library()
    layers = {"encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 128, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "max_source_positions": 200, "num_mel_bins": 40}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = library.WhisperConfig(vocab_size=TOKENS, **layers, **sizes, **ends, use_cache=False)
    inputs = {"input_features": torch.randn(4, 40, 400), "labels": torch.randint(TOKENS, (4, 64))}
    return library.WhisperForConditionalGeneration(config), inputs, None


def _mistral() -> Built:
    library = transformers_library()
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = library.MistralConfig(vocab_size=TOKENS, **sizes, num_hidden_layers=6, use_cache=False)
    return library.MistralForCausalLM(config), _tokens(4, 256), None


def _mamba() -> Built:
    library = transformers_library()
    config = library.MambaConfig(vocab_size=TOKENS, hidden_size=128, num_hidden_layers=4, use_cache=False)
    return library.MambaForCausalLM(config), _tokens(8, 20), None


def _clip() -> Built:
    library = transformers_library()
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": TOKENS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = library.CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 64, "patch_size": 8})
    tokens = torch.randint(2, TOKENS, (8, 32))
    return library.CLIPModel(config), {"input_ids": tokens, "pixel_values": torch.randn(8, 3, 64, 64), "return_loss": True}, None


OTHERS: Mapping[str, Callable[[], Built]] = {
    "densenet": _dense,
    "inception": _inception,
    "regnet": _regnet,
    "efficientnet": _efficientnet,
    "convnext": _convnext,
    "swin": _swin,
    "mixer": _mixer,
    "segformer": _segformer,
    "clip": _clip,
    "t5": _t5,
    "whisper": _whisper,
    "mistral": _mistral,
    "mamba": _mamba,
    "gru": _gru,
}
