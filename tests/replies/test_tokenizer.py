# SPDX-License-Identifier: Apache-2.0
"""The model's tokenizer: text and tokens, and errors that say what to do."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.replies import tokenizer as module
from mockengine.replies.tokenizer import Tokenizer, TokenizerError

MODEL = Path(__file__).parents[2] / "deploy" / "model"


def test_a_folder_and_its_file_are_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    of_file = Tokenizer.load(MODEL / "tokenizer.json")
    assert of_file.path == tokenizer.path
    assert (of_file.vocab_size, of_file.eos_ids) == (tokenizer.vocab_size, tokenizer.eos_ids) == (32_000, (2, 0))


def test_another_model_folder_shares_the_file() -> None:
    assert Tokenizer.load(MODEL.with_name("model-moe")).eos_ids == (2, 0)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_encoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_encoding_adds_no_special_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("Hello, world!")
    assert not tokenizer.special_ids & set(tokens)
    assert b"".join(tokenizer.token_bytes[token] for token in tokens) == b"Hello, world!"


def test_added_tokens_are_single_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("<think>x</think><tool_call>")
    added = [tokenizer.added_ids[text] for text in ("<think>", "</think>", "<tool_call>")]
    assert [token for token in tokens if token in tokenizer.special_ids] == added


def test_a_lone_surrogate_becomes_a_question_mark(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_words_can_be_read_one_after_the_other(tokenizer: Tokenizer) -> None:
    words = tokenizer.word_ids
    assert len(words) > 10_000
    assert all(word.isascii() and word.islower() for word in tokenizer.decode(words[:200]).split())
    assert len(tokenizer.decode(words[:200]).split()) == 200


def test_eos_of_config_json_is_taken_without_a_generation_config(tmp_path: Path) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert Tokenizer.load(tmp_path).eos_ids == (3,)
    (tmp_path / "config.json").unlink()
    assert Tokenizer.load(tmp_path).eos_ids == ()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer.json", "gpt2", "not a tokenizer"),
        ("tokenizer.json", "[]", "not a tokenizer"),
        ("generation_config.json", "[", "not a JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id 'x'"),
    ],
)
def test_a_broken_file_is_named_with_its_flaw(tmp_path: Path, name: str, content: str, said: str) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=said) as raised:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / name) in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file: name a model folder"):
        Tokenizer.load(tmp_path)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(TokenizerError, match=r"pip install 'mockengine\[text\]'"):
        module.load_llguidance()


def test_nothing_of_the_extra_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, mockengine.replies.structured.writer, mockengine.replies.tokenizer;"
        "sys.exit('llguidance' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
