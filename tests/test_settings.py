# SPDX-License-Identifier: Apache-2.0
"""Settings: what the class promises, one meaning in every source, and which source wins."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import hypothesis
import pytest
import yaml
import zmq
from annotated_types import Ge, Le
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from mockengine.settings import Description, Settings, as_text, describe
from mockengine.settings_rules import combination_problems
from mockengine.settings_sources import SettingsError, load
from mockengine.settings_types import ReasonError, acceptance_rates

# Values of the settings whose values are neither numbers nor choices.
_ENDPOINTS = st.sampled_from(["tcp://*:5557", "tcp://*:0", "tcp://router:1", "tcp://[::1]:5557", "ipc:///tmp/kv"])
_SAMPLES: dict[str, SearchStrategy[object]] = {
    "handshake_address": st.sampled_from(
        [
            "tcp://127.0.0.1:1",
            "tcp://frontend:65535",
            "tcp://my_project-vllm_1:29550",
            "tcp://frontend.vllm.svc.cluster.local.:29550",
            f"tcp://{'a.' * 126}a:1",
            "tcp://[::1]:29550",
            "tcp://[::ffff:10.0.0.1]:29550",
            "tcp://[fe80::1%eth0.100]:5",
            "ipc:///tmp/a b",
            "ipc://@abstract",
            "ipc://" + "x" * 107,
        ]
    ),
    "admin_host": st.sampled_from(["127.0.0.1", "0.0.0.0", "::", "::1", "fe80::1%eth0", "localhost"]),  # noqa: S104
    "admin_token": st.sampled_from(["secret-enough", "é" * 8]),
    "state_file": st.sampled_from(["/var/lib/mockengine/state.json", "state", "a folder/state", "é"]),
    "tokenizer": st.sampled_from(["/models/mock", "tokenizer.json", "a folder/tokenizer.json"]),
    "faults": st.sampled_from(["/etc/mockengine/faults.yaml", '[{"what": "hang"}]']),
    "reply_script": st.sampled_from(["/etc/mockengine/replies.yaml", "rules.jsonl", "a folder/é"]),
    "reply_dataset": st.sampled_from(["/data/ShareGPT_V3.json", "replies.jsonl"]),
    "parallel_config_hash": st.text("0123456789abcdef", min_size=64, max_size=64),
    "vllm_version": st.sampled_from(["auto", "0.19", "0.19.1", "0.30", "0.33.0", "0.100"]),
    "block_size": st.sampled_from([1, 8, 16, 32, 64, 128, 256]),
    "reasoning_length": st.sampled_from(["none", "0", "17", "uniform:1:9"]),
    "reasoning_form": st.sampled_from(["qwen3", "/etc/form.toml"]),
    "tool_call_form": st.sampled_from(["hermes", "/etc/form.toml"]),
    "output_length": st.sampled_from(["max_tokens", "17", "uniform:1:9", "normal:99.5:0", "histogram:lengths.txt"]),
    "supported_tasks": st.sampled_from(["generate", "embed, token_embed", '["classify", "token_classify"]']),
    # Words need a tokenizer.
    "reply_source": st.sampled_from(["random", "echo"]),
    # Fitted needs a profile.
    "timing": st.sampled_from(["instant", "per_request", "step"]),
    "timing_profile": st.sampled_from(["/etc/mockengine/profile.yaml", "a profile"]),
    "kv_events_endpoint": _ENDPOINTS,
    "kv_events_replay_endpoint": _ENDPOINTS,
    "kv_engine_id": st.sampled_from(["prefill", "a b", "é"]),
    "nixl_side_channel_host": st.sampled_from(["localhost", "prefill-0.prefill.svc", "10.0.0.7", "::1"]),
    "kv_events_topic": st.sampled_from(["kv-events", "kv@pod-1@model"]),
    "acceptance_rate": st.sampled_from(["0.7", "1", "0", "0.8,0.6,0.6", "0.8, 0.6, 0", "[1, 1.0, 0.25]"]),
}
# Values beside which every value of any other setting works.
_LEEWAY = {
    "handshake_address": "tcp://frontend:1",
    "data_parallel_size": 65_536,
    "max_model_len": 1,
    "block_size": 256,
    "num_gpu_blocks": 10_000_000,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 65_536,
}
# What a setting works beside only.
_NEEDED: dict[str, dict[str, object]] = {
    "timing": {"load_model": "vllm"},
    "timing_profile": {"load_model": "vllm", "timing": "fitted"},
    **{name: {"load_model": "vllm", "timing": "step"} for name in Settings.model_fields if name.startswith("step_")},
    **{name: {"timing": "per_request"} for name in ("ttft_ms", "prefill_ms_per_token")},
    "time_factor_under_load": {"load_model": "vllm", "timing": "per_request"},
    "scheduling_policy": {"load_model": "vllm"},
    "long_prefill_token_threshold": {"load_model": "vllm"},
    "ttft_stddev_ms": {"timing": "per_request", "ttft_ms": 1.0},
    "itl_stddev_ms": {"timing": "per_request", "itl_ms": 1.0},
    "prefill_stddev_ms_per_token": {"timing": "per_request", "prefill_ms_per_token": 1.0},
    "kv_events_endpoint": {"load_model": "vllm"},
    **{name: {"tokenizer": "/models/mock"} for name in ("reasoning_length", "tool_call_probability")},
    "reply_dataset": {"tokenizer": "/models/mock"},
    "reply_dataset_lookup": {"tokenizer": "/models/mock", "reply_dataset": "/data/replies.jsonl"},
    **{name: {"spec_tokens": 3} for name in ("acceptance_rate", "per_request_spec_decode_metrics")},
    **{
        name: {"load_model": "vllm", "kv_events_endpoint": "tcp://*:5557"}
        for name in ("kv_events_replay_endpoint", "kv_events_topic", "kv_events_buffer_steps")
    },
}
_NEEDED["embedding_dim"] = {"supported_tasks": "embed"}
_NEEDED["num_labels"] = {"supported_tasks": "classify"}
_NEEDED["kv_role"] = {"load_model": "vllm"}
_NEEDED |= {
    name: {"load_model": "vllm", "kv_role": "both"}
    for name in Settings.model_fields
    if name.startswith(("kv_transfer_", "kv_hold_", "kv_engine_", "nixl_"))
}
_NEEDED |= {name: {"max_loras": 1} for name in ("max_cpu_loras", "lora_load_ms", "check_lora_paths")}
_DESCRIPTIONS = describe()
_NAMES = tuple(Settings.model_fields)


def _values_of(name: str, field: FieldInfo) -> SearchStrategy[object]:
    if name in _SAMPLES:
        return _SAMPLES[name]
    if field.annotation is bool:
        return st.booleans()
    if get_origin(field.annotation) is Literal:
        return st.sampled_from(get_args(field.annotation))
    low: Any = next(fact.ge for fact in field.metadata if isinstance(fact, Ge))
    high: Any = next(fact.le for fact in field.metadata if isinstance(fact, Le))
    return st.floats(low, high) if field.annotation is float else st.integers(low, high)


def _given(*argv: str, **environ: str) -> dict[str, tuple[object, str]]:
    """Load, and return value and origin of what is not a default."""
    loaded = load(argv, environ)
    return {
        name: (getattr(loaded.settings, name), origin) for name, origin in loaded.origins.items() if origin != "default"
    }


def _write(directory: Path, text: str | bytes) -> str:
    file = directory / "settings.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(file)


# One meaning in every source.


@pytest.mark.parametrize("name", _NAMES)
@hypothesis.settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_value_means_the_same_as_flag_variable_and_yaml(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    value = data.draw(_values_of(name, Settings.model_fields[name]))
    others = {key: other for key, other in _LEEWAY.items() if key != name} | _NEEDED.get(name, {})
    expected = Settings.model_validate(others | {name: value})
    description, text = _DESCRIPTIONS[name], as_text(value)
    flags = [f"{_DESCRIPTIONS[key].flag}={other}" for key, other in others.items()]
    file = _write(tmp_path_factory.getbasetemp(), yaml.safe_dump({name: value}, allow_unicode=True))

    from_flag = load([*flags, f"{description.flag}={text}"], {}).settings
    from_two_words = load([*flags, description.flag, text], {}).settings
    from_variable = load(flags, {description.variable: text}).settings
    from_yaml = load([*flags, "--config", file], {}).settings

    assert [from_flag, from_two_words, from_variable, from_yaml] == [expected] * 4


def test_a_secret_is_never_shown() -> None:
    settings = load([], {"MOCKENGINE_ADMIN_TOKEN": "secret-enough"}).settings
    assert as_text(settings.admin_token) == "**********"
    assert "secret-enough" not in repr(settings)
    with pytest.raises(SettingsError) as refused:
        load([], {"MOCKENGINE_ADMIN_TOKEN": "secret"})
    assert str(refused.value).endswith(
        "MOCKENGINE_ADMIN_TOKEN: what is given is not allowed (use text of 8 to 1024 characters)"
    )


def test_nothing_given_gives_the_defaults() -> None:
    loaded = load([], {})

    assert loaded.settings == Settings()
    assert loaded.origins == dict.fromkeys(_NAMES, "default")


def test_a_flag_wins_over_a_variable_over_yaml_over_the_default(tmp_path: Path) -> None:
    file = _write(tmp_path, "seed: 1\nvocab_size: 100\n\nblock_size: 8\n")

    given = _given("--seed", "3", MOCKENGINE_CONFIG=file, MOCKENGINE_SEED="2", MOCKENGINE_VOCAB_SIZE="200")

    assert given == {
        "block_size": (8, f"{file}:4"),
        "vocab_size": (200, "MOCKENGINE_VOCAB_SIZE"),
        "seed": (3, "--seed"),
    }


def test_the_config_flag_wins_over_the_config_variable(tmp_path: Path) -> None:
    file = _write(tmp_path, "seed: 1\n")

    assert _given("--config", file, MOCKENGINE_CONFIG="/nowhere") == {"seed": (1, f"{file}:1")}


def test_of_a_flag_given_twice_the_last_one_counts() -> None:
    assert _given("--seed=1", "--seed", "2") == {"seed": (2, "--seed")}


@pytest.mark.parametrize(
    ("argv", "value", "origin"),
    [
        (["--log-requests"], True, "--log-requests"),
        (["--log-requests", "--seed", "0"], True, "--log-requests"),
        (["--no-log-requests"], False, "--no-log-requests"),
        (["--log-requests=false"], False, "--log-requests"),
        (["--log-requests", "false"], False, "--log-requests"),
        (["--log-requests", "off"], False, "--log-requests"),
        (["--no-log-requests", "--log-requests"], True, "--log-requests"),
    ],
)
def test_a_switch_can_be_written_in_many_ways(argv: list[str], value: bool, origin: str) -> None:  # noqa: FBT001
    assert _given(*argv)["log_requests"] == (value, origin)


@pytest.mark.parametrize("empty", ["", " ", "\t"])
def test_an_empty_variable_counts_as_unset(empty: str) -> None:
    assert _given(MOCKENGINE_SEED=empty, MOCKENGINE_CONFIG=empty, MOCKENGINE_DATA_PARALLEL_SIZE=empty) == {}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "seed:\n", "seed: null\n", "seed: ~\n", "seed: ''\n"])
def test_yaml_without_a_value_counts_as_unset(text: str, tmp_path: Path) -> None:
    assert _given("--config", _write(tmp_path, text)) == {}


def test_yaml_is_read_as_the_text_that_is_there(tmp_path: Path) -> None:
    text = "\ufeffvllm_version: 0.30\nmax_num_seqs: 010\nseed: '7'\nlog_requests: no\nrejoin: off\n"

    given = _given("--config", _write(tmp_path, text))

    assert {name: value for name, (value, _) in given.items()} == {
        "vllm_version": "0.30",
        "rejoin": False,
        "max_num_seqs": 10,
        "seed": 7,
        "log_requests": False,
    }


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MOCKENGINE_PORT", "tcp://10.0.0.1:29550"),
        ("MOCKENGINE_SERVICE_HOST", "10.0.0.1"),
        ("MOCKENGINE_SERVICE_PORT", "29550"),
        ("MOCKENGINE_SERVICE_PORT_HANDSHAKE", "29550"),
        ("MOCKENGINE_PORT_29550_TCP", "tcp://10.0.0.1:29550"),
        ("MOCKENGINE_PORT_29550_TCP_PROTO", "tcp"),
        ("MOCKENGINE_PORT_29550_TCP_PORT", "29550"),
        ("MOCKENGINE_PORT_29550_TCP_ADDR", "fd00::1"),
        ("MOCKENGINE_SEED_SERVICE_HOST", "10.0.0.1"),
        ("MOCKENGINE_SEED_PORT", "udp://10.0.0.1:53"),
    ],
)
def test_variables_that_kubernetes_makes_for_a_service_are_ignored(variable: str, value: str) -> None:
    assert _given(**{variable: value}) == {}


def test_the_six_flags_of_vllms_mock_keep_spelling_and_default() -> None:
    flags = {description.flag: description.default for description in _DESCRIPTIONS.values()}

    assert {
        "--handshake-address": "tcp://127.0.0.1:29550",
        "--engine-count": "1",
        "--output-token-chunk-size": "1",
        "--vocab-size": "32000",
        "--seed": "0",
        "--log-requests": "true",
    }.items() <= flags.items()


# Names, addresses in brackets, and characters that mean something elsewhere in an address.
_HOSTS = st.text("a1.-_", max_size=8) | st.text("a1:.%").map("[{}]".format) | st.text("a1.:[]%;@*/ é", max_size=8)


@hypothesis.settings(deadline=None)
@given(address=st.builds("tcp://{}:{}".format, _HOSTS, st.integers(1, 65_535)))
@example(f"tcp://{'a.' * 126}a:1")
@example("tcp://my_project-vllm_1.:1")
@example("tcp://[fe80::1%eth0.100]:5")
@example("ipc://@abstract")
@example("ipc://" + "x" * 107)
def test_zmq_takes_every_address_that_is_allowed(address: str) -> None:
    try:
        Settings(handshake_address=address)
    except ValidationError:
        return
    with zmq.Context() as context, context.socket(zmq.DEALER) as connection:
        connection.linger = 0
        connection.connect(address)


# The class.


@pytest.mark.parametrize("description", _DESCRIPTIONS.values(), ids=_NAMES)
def test_every_setting_says_all_that_a_person_needs(description: Description) -> None:
    sentence = description.sentence

    assert description.group
    assert description.allowed
    assert sentence.endswith(".")
    assert ". " not in sentence


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().seed = 1  # type: ignore[misc]


def test_settings_read_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOCKENGINE_SEED", "5")
    monkeypatch.setenv("MOCKENGINE_VOCAB_SIZE", "")

    assert Settings() == Settings(seed=5, vocab_size=32_000)


def test_settings_made_in_code_refuse_a_combination_that_cannot_work() -> None:
    with pytest.raises(ValidationError, match="max_num_batched_tokens, max_num_seqs: a step could not"):
        Settings(max_num_batched_tokens=1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"tokenizer": None, "reply_dataset": "replies.jsonl"},
            "without a tokenizer no text can be said (set tokenizer to the folder of the frontend's model)",
        ),
        ({"tokenizer": "model", "reply_dataset": "replies.jsonl"}, None),
        ({"tokenizer": None, "reply_dataset": None}, None),
        (
            {"reply_dataset": None, "reply_dataset_lookup": "in_order"},
            "there is nothing to look up (set reply_dataset, or leave it out)",
        ),
        ({"reply_dataset": "replies.jsonl", "reply_dataset_lookup": "in_order"}, None),
        ({"reply_dataset": None, "reply_dataset_lookup": "prompt"}, None),
    ],
)
def test_replies_of_a_data_set_take_a_data_set_and_a_tokenizer(values: dict[str, object], said: str | None) -> None:
    assert list(combination_problems(values)) == ([] if said is None else [(tuple(values), said)])


def test_the_data_parallel_size_is_that_of_this_process_unless_given() -> None:
    assert Settings(start_rank=2, engine_count=3).effective_data_parallel_size == 5
    assert Settings(start_rank=2, engine_count=3, data_parallel_size=8).effective_data_parallel_size == 8


@pytest.mark.parametrize(
    ("address", "works"),
    [
        ("tcp://127.0.0.1:29555", False),
        ("tcp://localhost:29555", False),
        ("tcp://[::1]:29555", False),
        ("tcp://127.0.0.1:29550", True),
        ("tcp://frontend:29555", True),
        ("ipc:///run/29555", True),
    ],
)
def test_the_admin_port_is_not_the_handshake_of_the_same_machine(address: str, *, works: bool) -> None:
    problems = list(combination_problems({"handshake_address": address, "admin_port": 29555}))
    assert (not problems) is works
    if not works:
        ((names, text),) = problems
        assert names == ("handshake_address", "admin_port")
        assert text == "the frontend's handshake socket listens at port 29555 of this machine (use another admin_port)"


@pytest.mark.parametrize(
    ("values", "works"),
    [
        ({"load_model": "off", "scheduling_policy": "priority"}, False),
        ({"load_model": "vllm", "scheduling_policy": "priority"}, True),
        ({"load_model": "off", "long_prefill_token_threshold": 512}, False),
        ({"load_model": "off", "time_factor_under_load": 2.0}, False),
        ({"load_model": "off", "time_factor_under_load": 1.0}, True),
        ({"kv_events_endpoint": None, "kv_events_topic": "kv-events"}, False),
        ({"kv_events_endpoint": None, "kv_events_buffer_steps": 100}, False),
        ({"kv_events_endpoint": "tcp://*:5557", "kv_events_buffer_steps": 100}, True),
        ({"load_model": "off", "kv_role": "producer"}, False),
        ({"load_model": "vllm", "kv_role": "producer"}, True),
        ({"kv_role": "none", "kv_transfer_ms": 1.0}, False),
        ({"kv_role": "none", "nixl_side_channel_host": "prefill"}, False),
        ({"kv_role": "none", "kv_engine_id": "prefill"}, False),
        ({"kv_role": "consumer", "kv_transfer_ms": 1.0}, True),
        ({"start_rank": 9, "engine_count": 2, "kv_role": "both", "nixl_side_channel_port": 65_525}, True),
        ({"start_rank": 9, "engine_count": 2, "kv_role": "both", "nixl_side_channel_port": 65_526}, False),
        ({"kv_role": "both", "spec_tokens": 2}, False),
        ({"spec_tokens": 0, "acceptance_rate": "0.7"}, False),
        ({"spec_tokens": 0, "per_request_spec_decode_metrics": "none"}, False),
        ({"spec_tokens": 2, "per_request_spec_decode_metrics": "none"}, True),
        ({"supported_tasks": "generate", "embedding_dim": 64}, False),
        ({"supported_tasks": "generate,token_embed", "embedding_dim": 64}, True),
        ({"supported_tasks": "embed", "num_labels": 3}, False),
        ({"supported_tasks": "classify", "num_labels": 3}, True),
    ],
)
def test_what_would_have_no_effect_is_refused(values: dict[str, Any], *, works: bool) -> None:
    problems = list(combination_problems(values))
    assert (not problems) is works
    assert [names for names, _ in problems] == ([] if works else [tuple(values)])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"spec_tokens": 3, "acceptance_rate": "0.7"}, None),
        ({"spec_tokens": 3, "acceptance_rate": "0.9,0.7,0.7"}, None),
        ({"spec_tokens": 3, "acceptance_rate": "0.9,0.7"}, "the list is 2 long (use 3 rates"),
        ({"spec_tokens": 3, "acceptance_rate": "[0.9]"}, "the list is 1 long (use 3 rates"),
        ({"output_token_chunk_size": 1, "spec_tokens": 3}, None),
        ({"output_token_chunk_size": 2, "spec_tokens": 0}, None),
        ({"output_token_chunk_size": 2, "spec_tokens": 3}, "both say how many tokens an output has"),
        ({"load_model": "vllm", "max_num_batched_tokens": 4, "spec_tokens": 3}, None),
        ({"load_model": "vllm", "max_num_batched_tokens": 3, "spec_tokens": 3}, "max_num_batched_tokens of at least 4"),
        ({"load_model": "off", "max_num_batched_tokens": 3, "spec_tokens": 3}, None),
    ],
)
def test_drafts_that_cannot_be_are_refused(values: dict[str, Any], said: str | None) -> None:
    problems = list(combination_problems(values))
    assert [names for names, _ in problems] == ([] if said is None else [tuple(values)])
    assert all(said is not None and said in text for _, text in problems)


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("0.7", 0.7),
        ("1", 1.0),
        ("0.8,0.6", (0.8, 0.6)),
        ("0.8, 0.6", (0.8, 0.6)),
        ("[0.8,0.6]", (0.8, 0.6)),
        ("[0]", (0.0,)),
    ],
)
def test_rates_are_a_number_or_a_list(text: str, rates: float | tuple[float, ...]) -> None:
    assert acceptance_rates(text) == rates


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *(
            (text, "neither a number nor a list")
            for text in ("", "x", "0.5,", "0.5;0.4", "[]", "[true]", '["1"]', "[" * 9_999)
        ),
        *((text, "between 0 and 1") for text in ("1.5", "-0.1", "NaN", "1e999", "0.5,-0.1")),
        ("0.5,0.6", "no rate can be greater"),
    ],
)
def test_what_is_no_rate_is_told(text: str, reason: str) -> None:
    with pytest.raises(ReasonError, match=reason):
        acceptance_rates(text)


def test_a_pace_is_scaled_like_every_other_duration() -> None:
    assert Settings(itl_ms=20, time_scale=0.1).pace_s == pytest.approx(0.002)
    assert Settings(itl_ms=20, time_scale=0).most_bytes_ahead == 2**20


def test_a_combination_that_lacks_a_value_is_not_judged() -> None:
    assert list(combination_problems({"start_rank": 65_535})) == []
