# SPDX-License-Identifier: Apache-2.0
"""Model folders that tests make out of the bundled one."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.stack import MODEL


def read(name: str) -> Any:
    """Return what a file of the bundled model says."""
    return json.loads((MODEL / name).read_text(encoding="utf-8"))


def tokenizer_with(*names: str) -> tuple[Any, Any, list[int]]:
    """Return the bundled tokenizer with special tokens more, its description, and the ids of these."""
    tokenizer, described = read("tokenizer.json"), read("tokenizer_config.json")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    first = len(tokenizer["model"]["vocab"])
    for token_id, name in enumerate(names, first):
        token: dict[str, Any] = {"content": name, **flags, "special": True}
        tokenizer["added_tokens"].append({"id": token_id, **token})
        described["added_tokens_decoder"][str(token_id)] = token
    return tokenizer, described, list(range(first, first + len(names)))


def write_model(folder: Path, files: Mapping[str, Any]) -> Path:
    """Write the files of a folder, and what the bundled one says of sampling; return the folder."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    shutil.copy(MODEL / "generation_config.json", folder)
    return folder
