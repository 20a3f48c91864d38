# SPDX-License-Identifier: Apache-2.0
"""A model folder that takes images, without weights, and images for it: all of it made on the spot.

It is a tiny LLaVA around the bundled model: frontends need only configurations to prepare an image, and the tokenizer
with one token more. An image takes `IMAGE_TOKENS` tokens of a prompt, whatever its size.
"""

import base64
import struct
import zlib
from pathlib import Path
from typing import Any, Final

from tests.support.derived_model import read, tokenizer_with, write_model

IMAGE_TOKENS: Final = 4
_PLACEHOLDER: Final = "<image>"
_IMAGE_SIZE: Final = 28
_PATCH_SIZE: Final = 14
_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}" + _PLACEHOLDER + "{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_vision_model(folder: Path) -> Path:
    """Write the folder and return it."""
    tokenizer, described, (token_id,) = tokenizer_with(_PLACEHOLDER)
    processor = {"processor_class": "LlavaProcessor"}
    files = {
        "config.json": _config(token_id),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": described | processor | {"chat_template": _TEMPLATE},
        "preprocessor_config.json": processor | _preprocessing(),
        "processor_config.json": processor
        | {
            "image_token": _PLACEHOLDER,
            "patch_size": _PATCH_SIZE,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    }
    return write_model(folder, files)


def question_about(colour: tuple[int, int, int], text: str = "What is it?") -> list[dict[str, Any]]:
    """Return the messages of a chat that asks about an image of one colour."""
    data = base64.b64encode(png(40, 30, colour)).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return [{"role": "user", "content": [image, {"type": "text", "text": text}]}]


def png(width: int, height: int, colour: tuple[int, int, int]) -> bytes:
    """Return an image of one colour as a PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    # Eight bits, true colour; each row begins with its filter, which is none.
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes(colour) * width) * height
    parts = (b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"".join(parts)


def _config(token_id: int) -> dict[str, Any]:
    text = read("config.json")
    del text["architectures"]
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        # Both names are in use.
        "image_token_index": token_id,
        "image_token_id": token_id,
        "image_seq_length": IMAGE_TOKENS,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "dtype": text["dtype"],
        "text_config": text | {"vocab_size": token_id + 1},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": _IMAGE_SIZE,
            "patch_size": _PATCH_SIZE,
            "projection_dim": 32,
        },
    }


def _preprocessing() -> dict[str, Any]:
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": _IMAGE_SIZE},
        "do_center_crop": True,
        "crop_size": {"height": _IMAGE_SIZE, "width": _IMAGE_SIZE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
