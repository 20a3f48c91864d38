# SPDX-License-Identifier: Apache-2.0
"""Files that settings name are read at the start, and what is wrong with them names the setting."""

from pathlib import Path
from typing import Any

import pytest

from mockengine.cli import main
from mockengine.engine_setup import SetupError, set_up
from mockengine.settings import Settings
from tests.support.stack import MODEL

FITTED = {"load_model": "vllm", "timing": "fitted"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tokenizer": "{folder}/absent"}, "tokenizer: .*absent: no such file"),
        ({"tokenizer": "{folder}/text"}, "tokenizer: .*text: not "),
        ({"output_length": "histogram:{folder}/absent"}, "output_length: .*absent: No such file or directory"),
        (
            {"output_length": "histogram:{folder}/text"},
            "output_length: .*text, line 1: 'some text' is neither",
        ),
        ({"tool_call_form": "xml"}, "tool_call_form: xml: no such form: .*hermes, llama3_json, mistral, qwen3_coder"),
        ({"tool_call_form": "{folder}/absent.toml"}, "tool_call_form: .*absent.toml: No such file or directory"),
        ({**FITTED, "timing_profile": "{folder}/absent"}, "timing_profile: .*absent: No such file or directory"),
        ({**FITTED, "timing_profile": "{folder}/text"}, "timing_profile: .*text: no profile"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_with_its_setting(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    (tmp_path / "text").write_text("some text\n")
    given = {name: value.format(folder=tmp_path) for name, value in settings.items()}

    with pytest.raises(SetupError, match=said):
        set_up(Settings(**given))


def test_the_engine_exits_with_1_and_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokenizer", str(tmp_path / "absent")]) == 1
    assert capsys.readouterr().err.startswith("mockengine: tokenizer: ")


def test_settings_become_what_is_said() -> None:
    setup = set_up(Settings(tokenizer=str(MODEL), reply_source="words", output_length="uniform:5:9", seed=3))

    assert setup.replies.tokenizer is not None
    assert setup.replies.writer is not None
    assert setup.replies.seed == 3
    assert setup.replies.output_length is not None
    assert {setup.replies.output_length(key) for key in range(100)} == {5, 6, 7, 8, 9}
