"""Small models of many families of transformers on a CUDA device: planned steps have the bits and the bytes of plain PyTorch's.

Their configurations are as small as their families allow, with random weights.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs.capture import capture

from .test_gpu import deterministic, needs_cuda
from .test_gpu_layers import assert_plain_in_the_planned_bytes

__all__ = ["deterministic"]

WORDS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
PAIR: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
IMAGE: dict[str, Any] = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}

# Which AutoModel, and its configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": (
        "CausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "ffn_dim": 96,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 64,
            "pad_token_id": 0,
        },
    ),
    "bloom": ("CausalLM", {"vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "mixtral": ("CausalLM", {**WORDS, "num_key_value_heads": 2, "num_local_experts": 4}),
    "qwen3": ("CausalLM", {**WORDS, "num_key_value_heads": 2, "head_dim": 16}),
    "gemma2": ("CausalLM", {**WORDS, "num_key_value_heads": 2, "head_dim": 16}),
    "mamba": ("CausalLM", {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
    "xlnet": ("CausalLM", {"vocab_size": 64, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96}),
    "t5": (
        "Seq2SeqLM",
        {"vocab_size": 64, "d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16, "decoder_start_token_id": 0},
    ),
    "bart": ("Seq2SeqLM", {**PAIR, "forced_eos_token_id": 2}),
    "deberta-v2": ("MaskedLM", {**WORDS, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "modernbert": (
        "MaskedLM",
        {**WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "funnel": ("MaskedLM", {"vocab_size": 64, "block_sizes": [1, 1], "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 96}),
    "swin": ("ImageClassification", {**IMAGE, "window_size": 4}),
    "convnext": ("ImageClassification", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.2}),
    "regnet": ("ImageClassification", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}),
    "wav2vec2": (
        "",
        {
            **WORDS,
            "conv_dim": [32, 32],
            "conv_stride": [5, 2],
            "conv_kernel": [10, 3],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "mask_time_prob": 0.0,
            "layerdrop": 0.0,
        },
    ),
    "whisper": ("SpeechSeq2Seq", {**PAIR, "max_source_positions": 30, "num_mel_bins": 16}),
}


def built(name: str, device: str) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind, options = FAMILIES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, f"AutoModel{kind and 'For'}{kind}").from_config(
            transformers.AutoConfig.for_model(name, **options)
        )
    words = torch.randint(3, 64, (4, 32))
    inputs = {
        "CausalLM": {"input_ids": words, "labels": words},
        "Seq2SeqLM": {"input_ids": words, "labels": words},
        "MaskedLM": {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words},
        "ImageClassification": {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 2, (4,))},
        "SpeechSeq2Seq": {"input_features": torch.randn(2, 16, 60), "labels": words[:2]},
        "": {"input_values": torch.randn(2, 1600)},
    }[kind]
    return model.to(device).train(), {key: tensor.to(device) for key, tensor in inputs.items()}


def loss_of(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    made: Tensor = output.last_hidden_state.square().mean() if loss is None else loss
    return made


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_plain_pytorch_in_the_planned_bytes(name: str, tmp_path: Path) -> None:
    model, inputs = built(name, "cuda")
    assert_plain_in_the_planned_bytes(capture(model, inputs, loss=loss_of), inputs, tmp_path)
