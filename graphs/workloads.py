"""The models that come with the program: a name becomes a model, its inputs and its loss. Nothing is downloaded. [torch]

Architectures are those of transformers, built from a configuration with random weights; what it does not have is defined here.
All are in training mode, with the dropout their architecture has by default. The default sizes have the real depth and train a
step within seconds on two CPU cores; images are smaller and vocabularies shorter than in the papers, so that activations, and not
parameters, are most of the bytes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.collection import asked_for, chosen, is_own
from graphs.errors import InputError, quoted
from graphs.files import check_readable
from graphs.torch_private.names import tree_map_only
from graphs.tracing.memoryless import is_on_meta
from graphs.tracing.refusals import told

Built = tuple[nn.Module, Any, Callable[..., Tensor] | None]

CLASSES = 1000  # of every image model, as in ImageNet


def build(
    name: str,
    *,
    device: torch.device | str = "cpu",
    batch: int | None = None,
    seq: int | None = None,
    depth: int | None = None,
    size: int | None = None,
    vocab: int | None = None,
    seed: int = 0,
) -> Built:
    """Model (in training mode), inputs and loss of a workload, in the form ``graphs.capture.capture`` takes.

    name    one of ``graphs.collection.WORKLOADS``, which may have sizes ("gpt2-depth96-seq512")
    batch, seq, depth, size, vocab  see ``Workload.sizes`` there; None: its default
    device  "meta" takes no memory: its step can be planned, as on the CPU
    seed    of weights and inputs; they are drawn on the CPU, so that they are the same on every device. The global generators
            are as before afterwards

    Raises InputError for an unknown name, a size the model does not have or cannot take, and where transformers is missing.
    """
    plain, sizes = chosen(name, batch=batch, seq=seq, depth=depth, size=size, vocab=vocab)
    where = _device(device)
    with _seeded(seed), where if where.type == "meta" else contextlib.nullcontext():
        model, inputs, loss = _BUILDERS[plain](**sizes)
        tie_weights = getattr(model, "tie_weights", None)
        if where.type == "meta" and callable(tie_weights):  # transformers 5.0 does not, there
            tie_weights()
    return model.train().to(where), _moved(inputs, where), loss


def load_workload(
    name: str,
    *,
    device: torch.device | str | None = None,
    batch: int | None = None,
    seq: int | None = None,
    depth: int | None = None,
    size: int | None = None,
    vocab: int | None = None,
    seed: int = 0,
) -> Built:
    """A workload of the collection (``"resnet50"``), or a user's own (``"path.py:function"``).

    The function returns ``(model, inputs)``, where the model returns its loss, or ``(model, inputs, loss)``. It is called with
    the sizes that are given, and with ``device`` where it has such a parameter; model and inputs are then moved to the device,
    unless the model is on the meta device.
    The model stays in the mode (training or evaluation) in which it is returned.

    device  None: cuda where there is one, else cpu

    Raises InputError where the file, the function or what it returns cannot be used, and as ``build`` does.
    """
    where = _device(device)
    if not is_own(name):
        return build(name, device=where, batch=batch, seq=seq, depth=depth, size=size, vocab=vocab, seed=seed)
    path, _, called = name.rpartition(":")
    if not path.endswith(".py") or not called.isidentifier():
        raise InputError(f"{quoted(name)}: a workload of your own is written path.py:function")
    asked = asked_for(batch=batch, seq=seq, depth=depth, size=size, vocab=vocab)
    check_readable(path)
    with _seeded(seed, where), _beside(Path(path)):
        function = getattr(_imported(Path(path)), called, None)
        if not callable(function):
            raise InputError(f"{path} has no function {called}")
        built = _called(name, function, asked, where)
    model, inputs, loss = built if len(built) == 3 else (*built, None)
    return (model, inputs, loss) if is_on_meta(model) else (model.to(where), _moved(inputs, where), loss)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"unknown device {device!r}; there are: cpu, cuda") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise InputError("no CUDA device is available; use the device cpu")
    return where


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the generators of the CPU and of ``device``, and give them their states back afterwards."""
    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        for each in cuda:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


def _moved(inputs: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)


# A user's own file.


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[None]:
    """Let a file import its neighbours, as it can when it is run as a script. The working directory is then as it was."""
    folder = str(path.resolve().parent)
    before = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        os.chdir(before)  # names of files to be written are relative to it
        with contextlib.suppress(ValueError):  # the file may have taken it out itself
            sys.path.remove(folder)


def _imported(path: Path) -> ModuleType:
    name = f"belady_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InputError(f"{path} cannot be imported: {told(error)}") from error
    return module


def _called(name: str, function: Callable[..., Any], asked: Mapping[str, int], device: torch.device) -> tuple[Any, ...]:
    """What the user's function returned, checked."""
    parameters = inspect.signature(function).parameters
    everything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for what in asked:
        if what not in parameters and not everything:
            raise InputError(f"{name} has no parameter {what!r}, so it cannot be chosen")
    taken = {**asked, **({"device": device} if "device" in parameters else {})}
    try:
        built = function(**taken)
    except Exception as error:
        raise InputError(f"{name} failed: {told(error)}") from error
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        raise InputError(f"{name} must return (model, inputs) or (model, inputs, loss), not {_shown(built)}")
    if not isinstance(built[0], nn.Module):
        raise InputError(f"{name} must return a torch.nn.Module first, not {_shown(built[0])}")
    if len(built) == 3 and built[2] is not None and not callable(built[2]):
        raise InputError(f"{name} must return a loss function third, not {_shown(built[2])}")
    return built


def _shown(thing: object) -> str:
    return f"{len(thing)} things" if isinstance(thing, tuple) else f"a {type(thing).__name__}"


# Builders. A model of transformers takes its inputs by name and returns its loss.


def transformers_library() -> Any:
    """The library of that name. Raises InputError where it is missing."""
    try:
        import transformers
    except ImportError as error:
        raise InputError(f"this workload needs transformers ({error}); install it: pip install 'belady[zoo]'") from error
    return transformers


def _images(batch: int, size: int) -> Tensor:
    return torch.randn(batch, 3, size, size)


def _labels(batch: int) -> Tensor:
    return torch.randint(CLASSES, (batch,))


def _multiple(what: str, size: int, of: int) -> None:
    if size % of:
        raise InputError(f"{what}: the side of the image must be a multiple of {of} pixels, not {size}")


def _layers(what: str, depth: int, known: Mapping[int, Any]) -> Any:
    if depth not in known:
        raise InputError(f"{what}: depth must be one of {', '.join(map(str, known))}, not {depth}")
    return known[depth]


def _mlp(batch: int, depth: int) -> Built:
    width, classes = 512, 10
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(width, classes))
    return model, (torch.randn(batch, width), torch.randint(classes, (batch,))), F.cross_entropy


def _resnet50(batch: int, depth: int, size: int) -> Built:
    blocks = {14: [1, 1, 1, 1], 26: [2, 2, 2, 2], 50: [3, 4, 6, 3], 101: [3, 4, 23, 3], 152: [3, 8, 36, 3]}
    library = transformers_library()
    config = library.ResNetConfig(depths=_layers("resnet50", depth, blocks), num_labels=CLASSES)
    return library.ResNetForImageClassification(config), {"pixel_values": _images(batch, size), "labels": _labels(batch)}, None


def _vgg16(batch: int, depth: int, size: int) -> Built:
    """Simonyan and Zisserman 2015; the first fully connected layer is as wide as the image leaves it."""
    _multiple("vgg16", size, 32)
    stages = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
    layers: list[nn.Module] = []
    channels = 3
    for count, wide in zip(_layers("vgg16", depth, stages), (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.ReLU(inplace=True)]
            channels = wide
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(channels * (size // 32) ** 2, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    layers += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, CLASSES)]
    return nn.Sequential(*layers), (_images(batch, size), _labels(batch)), F.cross_entropy


def _mobilenet_v2(batch: int, size: int) -> Built:
    library = transformers_library()
    config = library.MobileNetV2Config(image_size=size, num_labels=CLASSES)
    model = library.MobileNetV2ForImageClassification(config)
    return model, {"pixel_values": _images(batch, size), "labels": _labels(batch)}, None


class UNet(nn.Module):
    """Ronneberger et al. 2015, with padded convolutions; ``depth`` halvings, ``width`` channels at the top.

    (batch, 3, side, side) -> (batch, classes, side, side); the side is a multiple of 2 ** depth
    """

    def __init__(self, depth: int, width: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(_double(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.join = nn.ModuleList(_double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            skipped.append(x)
        skipped.pop()
        for grow, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((skipped.pop(), grow(x)), dim=1))
        out: Tensor = self.head(x)
        return out


def _double(channels: int, wide: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, wide, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(wide, wide, 3, padding=1),
        nn.ReLU(inplace=True),
    )


def _unet(batch: int, depth: int, size: int) -> Built:
    classes = 21
    _multiple(f"unet of depth {depth}", size, 2**depth)
    target = torch.randint(classes, (batch, size, size))
    return UNet(depth, 32, classes), (_images(batch, size), target), F.cross_entropy


def _vit(batch: int, depth: int, size: int) -> Built:
    _multiple("vit", size, 16)
    library = transformers_library()
    config = library.ViTConfig(
        image_size=size,
        patch_size=16,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=depth,
        num_attention_heads=6,
        num_labels=CLASSES,
    )
    model = library.ViTForImageClassification(config)
    return model, {"pixel_values": _images(batch, size), "labels": _labels(batch)}, None


def _bert(batch: int, seq: int, depth: int, vocab: int) -> Built:
    library = transformers_library()
    config = library.BertConfig(vocab_size=vocab, num_hidden_layers=depth, max_position_embeddings=max(512, seq))
    tokens = {name: torch.randint(vocab, (batch, seq)) for name in ("input_ids", "labels")}
    return library.BertForMaskedLM(config), {**tokens, "attention_mask": torch.ones(batch, seq, dtype=torch.long)}, None


def _gpt2(batch: int, seq: int, depth: int, vocab: int) -> Built:
    library = transformers_library()
    config = library.GPT2Config(
        vocab_size=vocab,
        n_layer=depth,
        n_positions=max(1024, seq),
        use_cache=False,
        bos_token_id=vocab - 1,
        eos_token_id=vocab - 1,
    )
    model = library.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what it falls back to, with a log line: its name does not tell
    return model, _next_token(batch, seq, vocab), None


def _llama(batch: int, seq: int, depth: int, vocab: int) -> Built:
    library = transformers_library()
    config = library.LlamaConfig(
        vocab_size=vocab,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=depth,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=max(2048, seq),
        use_cache=False,
        bos_token_id=vocab - 1,
        eos_token_id=vocab - 1,
    )
    return library.LlamaForCausalLM(config), _next_token(batch, seq, vocab), None


def _next_token(batch: int, seq: int, vocab: int) -> dict[str, Tensor]:
    if seq < 2:
        raise InputError(f"a language model predicts the next token, so seq must be at least 2, not {seq}")
    tokens = torch.randint(vocab, (batch, seq))
    return {"input_ids": tokens, "labels": tokens.clone()}


class LSTM(nn.Module):
    """Hochreiter and Schmidhuber 1997, unrolled over time: one cell a layer and time step.

    (batch, seq, width) -> (batch, classes), read off the last state of the last layer
    """

    def __init__(self, depth: int, width: int, classes: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        nothing = x.new_zeros(x.shape[0], x.shape[2])
        states = [(nothing, nothing) for _ in self.cells]
        for step in x.unbind(1):
            below = step
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(below, states[layer])
                below = states[layer][0]
        out: Tensor = self.head(states[-1][0])
        return out


def _lstm(batch: int, seq: int, depth: int) -> Built:
    width, classes = 512, 10
    return LSTM(depth, width, classes), (torch.randn(batch, seq, width), torch.randint(classes, (batch,))), F.cross_entropy


_BUILDERS: Mapping[str, Callable[..., Built]] = {
    "mlp": _mlp,
    "resnet50": _resnet50,
    "vgg16": _vgg16,
    "mobilenet_v2": _mobilenet_v2,
    "unet": _unet,
    "vit": _vit,
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "lstm": _lstm,
}
