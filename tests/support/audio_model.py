# SPDX-License-Identifier: Apache-2.0
"""A model folder that takes sounds, without weights: a tiny Qwen2-Audio around the bundled model."""

from pathlib import Path
from typing import Final

from tests.support.derived_model import read, tokenizer_with, write_model

PLACEHOLDER: Final = "<|AUDIO|>"
SAMPLES_PER_S: Final = 16_000
_MEL_BINS: Final = 128


def make_audio_model(folder: Path) -> Path:
    """Write the folder and return it."""
    tokenizer, described, (token_id, *_, last) = tokenizer_with(PLACEHOLDER, "<|audio_bos|>", "<|audio_eos|>")
    text = read("config.json")
    del text["architectures"]
    processor = {"processor_class": "Qwen2AudioProcessor"}
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "audio_token_index": token_id,
        "dtype": text["dtype"],
        "text_config": text | {"vocab_size": last + 1},
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": _MEL_BINS,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "d_model": 32,
            "max_source_positions": 1_500,
        },
    }
    preprocessor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": _MEL_BINS,
        "sampling_rate": SAMPLES_PER_S,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
        "padding_value": 0.0,
        "return_attention_mask": True,
    }
    files = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": described | processor,
        "preprocessor_config.json": processor | preprocessor,
        "processor_config.json": processor,
    }
    return write_model(folder, files)
