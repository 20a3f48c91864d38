# SPDX-License-Identifier: Apache-2.0
"""Files that settings name are read at the start, and what is wrong with them names the setting."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mockengine.cli import main
from mockengine.engine_setup import SetupError, set_up
from mockengine.replies.wish import NO_WISH, Wish
from mockengine.settings import Settings
from mockengine.wire.handshake import Init
from mockengine.wire.sampling import SamplingParams
from tests.support.scripts import asking
from tests.support.stack import MODEL

FITTED = {"load_model": "vllm", "timing": "fitted"}
MODEL_SET = {"tokenizer": str(MODEL)}


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
        (
            {"tool_call_form": "xml"},
            "tool_call_form: xml: no such form: .*hermes, .*llama3_json, .*mistral, .*qwen3_coder",
        ),
        ({"tool_call_form": "{folder}/absent.toml"}, "tool_call_form: .*absent.toml: No such file or directory"),
        ({"reasoning_form": "xml"}, "reasoning_form: xml: no such form: .*kimi, .*qwen3, "),
        (
            {**MODEL_SET, "reasoning_form": "kimi", "reasoning_length": "5"},
            "tokenizer: .*tokenizer.json has no tokens ◁think▷ and ◁/think▷ .use reasoning_length=none, ",
        ),
        ({"reply_script": "{folder}/absent"}, "reply_script: .*\n  .*absent:1: No such file or directory"),
        (
            {"reply_script": "{folder}/rules"},
            "reply_script: the file has 2 problems:\n  .*rules:1: text: .*set tokenizer .*\n  .*rules:2: the rule has",
        ),
        ({**MODEL_SET, "reply_dataset": "{folder}/absent"}, "reply_dataset: .*absent: No such file or directory"),
        (
            {**MODEL_SET, "reply_dataset": "{folder}/text"},
            "reply_dataset: the file has a problem .*\n  .*text:1: not JSON: ",
        ),
        ({**FITTED, "timing_profile": "{folder}/absent"}, "timing_profile: .*absent: No such file or directory"),
        ({**FITTED, "timing_profile": "{folder}/text"}, "timing_profile: .*text: no profile"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_with_its_setting(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    (tmp_path / "text").write_text("some text\n")
    (tmp_path / "rules").write_text("- reply: {text: hello}\n- match: {}\n")
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


def test_the_client_goes_before_the_script_and_that_before_the_data_set(tmp_path: Path) -> None:
    script, dataset = tmp_path / "rules.yaml", tmp_path / "records.jsonl"
    script.write_text("- match: {prompt_contains: hello}\n  reply: {text: script, output_tokens: 5}\n")
    dataset.write_text(
        '{"prompt": "hello", "completion": "set", "output_tokens": 7}\n{"prompt": "x", "completion": "y"}\n'
    )
    setup = set_up(Settings(tokenizer=str(MODEL), reply_script=str(script), reply_dataset=str(dataset)))
    tokenizer = setup.replies.tokenizer

    def wish(prompt: str, **extra_args: object) -> Wish:
        asked = asking(prompt, tokenizer)
        asked.params = SamplingParams(extra_args=extra_args)
        found = NO_WISH
        for source in setup.replies.wishes:
            found = found.over(source.wish_for(asked) or NO_WISH)
        return found

    assert wish("hello", mock_text="client") == Wish(text="client")
    assert wish("hello") == Wish(text="script", output_tokens=5)
    assert wish("x") == Wish(text="y")
    assert wish("z") == NO_WISH


def test_whoever_sets_up_hears_of_changes_to_the_script(tmp_path: Path) -> None:
    heard: list[tuple[str, object]] = []

    class Listener:
        def script_reloaded(self, file: str, rules: int) -> None:
            heard.append((file, rules))

        def script_refused(self, file: str, problems: Sequence[str]) -> None:
            heard.append((file, list(problems)))

        def fault_fired(self, *_: object) -> None:
            raise AssertionError("there are no faults")

    script = tmp_path / "rules.yaml"
    script.write_text("[]")
    _, scripted = set_up(Settings(reply_script=str(script)), Listener()).replies.wishes
    for text in ("- reply: {token_ids: [1]}", "- reply"):
        script.write_text(text)
        assert scripted.wish_for(asking([5])) == Wish(token_ids=[1])
    assert heard == [(str(script), 1), (str(script), [f"{script}:1: str 'reply' where a rule, a mapping, is expected"])]


INIT = Init(("tcp://localhost:1",), ("tcp://localhost:2",))


def test_durations_of_calls_are_scaled_like_all_others() -> None:
    setup = set_up(Settings(sleep_ms=100, wake_up_ms=50, max_loras=2, lora_load_ms=10, time_scale=3))
    config = setup.config(INIT)
    assert (config.control.sleep_s, config.control.wake_up_s) == pytest.approx((0.3, 0.15))
    assert config.loras is not None
    assert (config.loras.max_loras, config.loras.max_cpu_loras) == (2, 2)
    assert config.loras.load_s == pytest.approx(0.03)


def test_without_slots_there_are_no_adapters() -> None:
    assert set_up(Settings()).config(INIT).loras is None


@pytest.mark.parametrize("is_checked", [False, True])
def test_adapters_are_looked_for_when_told_to(tmp_path: Path, *, is_checked: bool) -> None:
    (tmp_path / "l1").mkdir()
    (tmp_path / "l1" / "adapter_config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    loras = set_up(Settings(max_loras=1, check_lora_paths=is_checked)).config(INIT).loras
    assert loras is not None
    assert loras.is_there(str(tmp_path / "l1"))
    for path in (str(tmp_path / "empty"), str(tmp_path / "absent"), "org/name", "", "\0", "~nobody/x", "x" * 100_000):
        assert loras.is_there(path) is not is_checked
