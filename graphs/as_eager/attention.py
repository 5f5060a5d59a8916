"""In evaluation PyTorch's encoder leaves out what is padded: how much it computes depends on data, which no trace has. [torch]"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from graphs.errors import CaptureError
from graphs.torch_private.patching import patched


@contextlib.contextmanager
def padding_refused(name: str) -> Iterator[None]:
    """Raise CaptureError inside where an ``nn.TransformerEncoder`` would make nested tensors of what it is given: a trace would
    compute what is padded too, where eager execution returns zeros. ``name`` is the model's."""
    original: Any = nn.TransformerEncoder.forward
    signature = inspect.signature(original)

    def forward(self: nn.TransformerEncoder, src: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, src, *args, **kwargs).arguments
        if given.get("src_key_padding_mask") is not None and given.get("mask") is None and _leaves_out(self, src):
            raise CaptureError(
                f"{name} calls an nn.TransformerEncoder in evaluation, without gradients and with a padding mask; it then "
                f"computes only what is not padded, and how much that is depends on data. Make it with enable_nested_tensor=False"
            )
        return original(self, src, *args, **kwargs)

    with patched(nn.TransformerEncoder, "forward", forward):
        yield


def _leaves_out(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Whether it makes nested tensors where it gets a padding mask, if that begins on the right."""
    first = encoder.layers[0]
    if not getattr(encoder, "use_nested_tensor", False) or first.training or torch.is_autocast_enabled():
        return False
    tensors = (src, *first.parameters())
    if src.dim() != 3 or torch.overrides.has_torch_function(tensors):
        return False
    differentiates = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return torch.backends.mha.get_fastpath_enabled() and not differentiates
