# SPDX-License-Identifier: Apache-2.0
"""The model's tokenizer: from text to tokens and back, and what each token stands for.

llguidance brings a whole tokenizer along, so the package `tokenizers`, which pulls a client of the Hugging Face hub and
its dependencies, is not needed. Neither is imported before a tokenizer is loaded.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from llguidance import LLTokenizer

TOKENIZER_FILE: Final = "tokenizer.json"
_EOS_FILES: Final = ("generation_config.json", "config.json")
_WHOLE_WORD: Final = re.compile(rb" [a-z]{2,}")


class TokenizerError(Exception):
    """A tokenizer cannot be had; names the file or the package, the cause and what to do."""


def load_llguidance() -> ModuleType:
    """Import llguidance, which is in the extra `text`.

    Raises:
        TokenizerError: it is not installed.

    """
    try:
        import llguidance  # noqa: PLC0415  # 10 MB and 0.1 s that most engines never need
    except ImportError as error:
        raise TokenizerError(
            f"the package llguidance cannot be imported ({error}): install it with pip install 'mockengine[text]'"
        ) from error
    return llguidance


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        path: its `tokenizer.json`.
        masks: llguidance's tokenizer, with which grammars are compiled.
        eos_ids: the tokens that end a reply, the first of them the usual one; empty if no file beside names any.
        added_ids: added tokens such as `<tool_call>`, from their text to their id. No other text becomes one of them.

    """

    def __init__(self, path: Path, masks: "LLTokenizer", eos_ids: Sequence[int], added_ids: Mapping[str, int]) -> None:
        self.path = path
        self.masks = masks
        self.eos_ids = tuple(eos_ids)
        self.added_ids = added_ids

    @classmethod
    def load(cls, model: Path) -> "Tokenizer":
        """Load the tokenizer of a model folder, or a `tokenizer.json`.

        EOS ids are those of `generation_config.json` beside it, else of `config.json`.

        Raises:
            TokenizerError: no such file, one that cannot be read, or llguidance is missing.

        """
        path = model / TOKENIZER_FILE if model.is_dir() else model
        llguidance = load_llguidance()
        text = _read(path)
        eos_ids = _eos_ids(path.parent)
        try:
            # A name that is not JSON would be looked up on the Hugging Face hub.
            description = json.loads(text)
            added = {str(token["content"]): int(token["id"]) for token in description.get("added_tokens") or ()}
            masks = llguidance.LLTokenizer(text, eos_token=list(eos_ids) or None)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TokenizerError(
                f"{path}: not a tokenizer in the format of Hugging Face's tokenizers ({error}): "
                "name a folder or file with the tokenizer.json of the model that the frontend serves"
            ) from error
        return cls(path, masks, eos_ids, added)

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included; a model's `vocab_size` may be larger."""
        return self.masks.vocab_size

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, as the frontend makes them with `add_special_tokens` false.

        Text of added tokens becomes these tokens. A lone surrogate, which no text has, becomes a question mark.
        """
        return self.masks.tokenize_str(text.encode("utf-8", "replace").decode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, added tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self.masks.decode_str(list(tokens))

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes of every token, by id; those of an added token are its text."""
        decode = self.masks.decode_bytes
        return tuple(decode([token]) for token in range(self.vocab_size))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that no text is made of: added ones and EOS."""
        is_special = self.masks.is_special_token
        return frozenset(token for token in range(self.vocab_size) if is_special(token))

    @cached_property
    def word_ids(self) -> tuple[int, ...]:
        """Tokens that are a space and a whole word of small letters: any of them after each other can be read."""
        words = (token for token, spelled in enumerate(self.token_bytes) if _WHOLE_WORD.fullmatch(spelled))
        return tuple(token for token in words if token not in self.special_ids)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TokenizerError(f"{path}: no such file: name a model folder that has a {TOKENIZER_FILE}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}: name a model folder with a {TOKENIZER_FILE}") from error


def _eos_ids(folder: Path) -> tuple[int, ...]:
    for name in _EOS_FILES:
        path = folder / name
        if not path.exists():
            continue
        try:
            named: Any = json.loads(_read(path)).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise TokenizerError(f"{path}: not a JSON object ({error}): mend it or take it away") from error
        ids = named if isinstance(named, list) else [named]
        if ids and all(type(token) is int and token >= 0 for token in ids):
            return tuple(ids)
        if named is not None:
            raise TokenizerError(f"{path}: eos_token_id {named!r} is neither a token id nor a list of them: mend it")
    return ()
