# SPDX-License-Identifier: Apache-2.0
"""The bundled model folders: their files agree, any text can be encoded, and ids drawn at random read like words.

The tokenizer is read here as every byte-level BPE is defined, without a tokenizer library: what the libraries make of
it is seen in the tests with real frontends.
"""

import json
import random
import re
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from deploy import make_model

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
FOLDERS = [DEPLOY / "model", DEPLOY / "model-moe"]
FIRST_BYTE_ID = 8
FIRST_PIECE_ID = 264
FIRST_WORD_ID = 2250
TEXTS = [
    "",
    "Hello, world!",
    "Once upon a time, there was an unbelievable antidisestablishmentarian.",
    "naïve café 🦊 👩‍👩‍👧 中文字 \u200d\n\n\t tabs  and   spaces   ",
    "def f(x):\n    return {'a': [1, 2.5], \"b\": None}\r\n",
    "\x00\x01\x7f\x80\xff",
]

# GPT-2's way to cut text before the merges, which `"use_regex": true` stands for, as far as the standard library goes.
PIECES_OF_TEXT = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


@cache
def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def vocabulary() -> dict[str, int]:
    vocabulary: dict[str, int] = read(FOLDERS[0], "tokenizer.json")["model"]["vocab"]
    return vocabulary


@cache
def ranks() -> dict[tuple[str, str], int]:
    merges = read(FOLDERS[0], "tokenizer.json")["model"]["merges"]
    return {(left, right): rank for rank, (left, right) in enumerate(merge.split(" ") for merge in merges)}


@cache
def bytes_of_ids() -> dict[int, bytes]:
    byte_of = {character: byte for byte, character in make_model.byte_alphabet().items()}
    return {
        number: bytes(byte_of[character] for character in token)
        for token, number in vocabulary().items()
        if number >= FIRST_BYTE_ID
    }


def encode(text: str) -> list[int]:
    """Encode text that has no added tokens in it: of two neighbours, always those that the earliest merge joins."""
    alphabet = make_model.byte_alphabet()
    tokens = []
    for piece in PIECES_OF_TEXT.findall(text):
        symbols = [alphabet[byte] for byte in piece.encode()]
        while found := [(ranks()[pair], at) for at, pair in enumerate(pairwise(symbols)) if pair in ranks()]:
            _, at = min(found)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        tokens += symbols
    return [vocabulary()[token] for token in tokens]


def decode(ids: Iterable[int]) -> bytes:
    return b"".join(bytes_of_ids()[number] for number in ids)


def word(number: int) -> re.Match[str] | None:
    return re.fullmatch(" [a-z]{2,}", decode([number]).decode(errors="replace"))


def test_every_id_below_32000_stands_for_one_token() -> None:
    assert sorted(vocabulary().values()) == list(range(32_000))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_configuration_agrees_with_the_tokenizer(folder: Path) -> None:
    config = read(folder, "config.json")
    assert config["vocab_size"] == len(vocabulary())
    assert config["max_position_embeddings"] == read(folder, "tokenizer_config.json")["model_max_length"] == 32_768
    special = {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>", "pad_token_id": "<|pad|>"}
    assert {key: config[key] for key in special} == {key: vocabulary()[token] for key, token in special.items()}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_end_of_a_turn_and_of_a_text_end_a_reply(folder: Path) -> None:
    assert read(folder, "generation_config.json")["eos_token_id"] == [
        vocabulary()["<|im_end|>"],
        vocabulary()["<|endoftext|>"],
    ]
    names = read(folder, "tokenizer_config.json")
    assert (names["bos_token"], names["eos_token"], names["pad_token"]) == ("<|endoftext|>", "<|im_end|>", "<|pad|>")


def test_added_tokens_are_the_first_ids_in_every_file() -> None:
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|pad|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
    ]
    added = read(FOLDERS[0], "tokenizer.json")["added_tokens"]
    assert [(token["id"], token["content"]) for token in added] == list(enumerate(tokens))
    assert [token["special"] for token in added] == [True] * 4 + [False] * 4
    assert [vocabulary()[token] for token in tokens] == list(range(FIRST_BYTE_ID))
    decoder = read(FOLDERS[0], "tokenizer_config.json")["added_tokens_decoder"]
    assert {str(token.pop("id")): token for token in map(dict, added)} == decoder


def test_every_byte_is_a_token() -> None:
    assert {vocabulary()[character] for character in make_model.byte_alphabet().values()} == set(
        range(FIRST_BYTE_ID, FIRST_PIECE_ID)
    )


def test_every_merge_joins_two_tokens_to_a_third_and_each_token_is_made_by_one_of_them() -> None:
    made = [left + right for left, right in ranks()]
    assert {token for pair in ranks() for token in pair} <= set(vocabulary())
    assert sorted(made) == sorted(token for token, number in vocabulary().items() if number >= FIRST_PIECE_ID)


def test_ids_from_2250_on_are_words_with_a_leading_space() -> None:
    ids = range(make_model.FIRST_WORD_ID, 32_000)
    assert ids.start == FIRST_WORD_ID
    assert [number for number in ids if not word(number)] == []
    assert [number for number in ids if make_model._is_unwanted(decode([number]).decode().strip())] == []


def test_common_words_come_first() -> None:
    first = {decode([number]) for number in range(FIRST_WORD_ID, FIRST_WORD_ID + 4_000)}
    assert {b" the", b" time", b" people", b" because", b" between", b" number"} <= first


def test_nearly_all_ids_drawn_at_random_read_like_words() -> None:
    drawn = random.Random(1).choices(range(FIRST_BYTE_ID, 32_000), k=10_000)  # noqa: S311 - no secret
    assert sum(word(number) is not None for number in drawn) / len(drawn) > 0.93


def test_every_word_is_encoded_as_its_one_token() -> None:
    for number in random.Random(2).sample(range(FIRST_WORD_ID, 32_000), k=500):  # noqa: S311 - no secret
        assert encode(decode([number]).decode()) == [number]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    assert decode(encode(text)) == text.encode()


def test_nothing_but_bytes_and_merges_stands_between_text_and_tokens() -> None:
    tokenizer = read(FOLDERS[0], "tokenizer.json")
    assert tokenizer["normalizer"] is None
    assert tokenizer["post_processor"] is None
    assert tokenizer["pre_tokenizer"] == tokenizer["decoder"]
    assert tokenizer["pre_tokenizer"]["type"] == "ByteLevel"
    assert tokenizer["pre_tokenizer"]["add_prefix_space"] is False


def test_the_mixture_of_experts_folder_shares_all_but_its_configuration() -> None:
    dense, experts = FOLDERS
    for name in make_model.SHARED_FILES:
        link = experts / name
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert link.resolve() == (dense / name).resolve()
    assert sorted(path.name for path in experts.iterdir()) == sorted(["config.json", *make_model.SHARED_FILES])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_configuration_is_what_the_generator_writes(folder: Path) -> None:
    assert read(folder, "config.json") == make_model.model_config(mixture_of_experts=folder.name == "model-moe")
    assert read(folder, "generation_config.json") == make_model.generation_config(vocabulary())
    assert read(folder, "tokenizer_config.json") == make_model.tokenizer_config(vocabulary())


def test_the_tokenizer_stays_small() -> None:
    assert (FOLDERS[0] / "tokenizer.json").stat().st_size < 1_200_000


def test_too_few_words_are_refused_with_what_is_needed(tmp_path: Path) -> None:
    few = tmp_path / "words"
    few.write_text("hello\nworld\n")
    with pytest.raises(SystemExit, match=r"give 2 words and \d+ pieces, but 29750 and 1986 are needed"):
        make_model.build_vocabulary(make_model.read_words([few]))
    with pytest.raises(SystemExit, match="give 0 words"):
        make_model.build_vocabulary({})


def test_words_are_taken_once_common_lists_first_and_only_if_they_are_plain(tmp_path: Path) -> None:
    common, rare = tmp_path / "common", tmp_path / "rare"
    common.write_text("tree\nbe\nIsland\nit's\nbe\nnaïve\na\n")
    rare.write_text("be\nash\n")
    assert make_model.read_words([common, rare]) == {"be": 0, "tree": 0, "ash": 1}
