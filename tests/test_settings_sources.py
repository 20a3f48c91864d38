# SPDX-License-Identifier: Apache-2.0
"""What a person reads when something is wrong with the settings: every problem, each in a line of its own."""

from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from mockengine.settings import describe
from mockengine.settings_sources import SettingsError, load

_SEEDS = "a whole number from 0 to 18446744073709551615"
_YAML_FORM = "(use one line `name: value` for each setting)"
_NEGATED = "is not allowed (use --no-log-requests alone, or --log-requests with true or false)"
_PORT = "it does not end with a port from 1 to 65535"
_HOST = "the host is neither a host name nor an IP address"
_IPV6 = "what the brackets hold is no IPv6 address"
_PATH = "the path is empty, too long or contains a NUL"
_ADDRESSES = "tcp://HOST:PORT, tcp://[IPV6]:PORT or ipc://PATH with a path of at most 107 bytes"
_NO_HINT = "(correct or remove it; mockengine --help names them all)"


def _problems(*argv: str, **environ: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(argv, environ)
    return list(caught.value.problems)


def _write(directory: Path, text: str | bytes) -> str:
    file = directory / "settings.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(file)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--seed=-1"], f"--seed: -1 is not allowed (use {_SEEDS})"),
        (["--seed", "-1"], f"--seed: -1 is not allowed (use {_SEEDS})"),
        (["--seed", "18446744073709551616"], f"--seed: 18446744073709551616 is not allowed (use {_SEEDS})"),
        (["--seed", "9" * 5000], f"--seed: {'9' * 60}… is not allowed (use {_SEEDS})"),
        (["--seed", "2.5"], f"--seed: 2.5 is not allowed (use {_SEEDS})"),
        (["--seed", "٣"], f"--seed: ٣ is not allowed (use {_SEEDS})"),
        (["--seed", "7 8"], f"--seed: '7 8' is not allowed (use {_SEEDS})"),
        (["--seed", "\x1b[2J"], rf"--seed: '\x1b[2J' is not allowed (use {_SEEDS})"),
        (["--seed"], f"--seed: the value is missing (use {_SEEDS})"),
        (["--seed="], f"--seed: the value is missing (use {_SEEDS})"),
        (["--seed", "--rejoin"], f"--seed: the value is missing (use {_SEEDS})"),
        (["--config"], "--config: the value is missing (use the path of a YAML file)"),
        (["--engine-count", "two"], "--engine-count: two is not allowed (use a whole number of ranks from 1 to 64)"),
        (["--join-timeout-s", "5s"], "--join-timeout-s: 5s is not allowed (use a number of seconds from 0 to 86400)"),
        (["--join-timeout-s", "nan"], "--join-timeout-s: nan is not allowed (use a number of seconds from 0 to 86400)"),
        (["--block-size", "24"], "--block-size: 24 is not allowed (use 1, 8, 16, 32, 64, 128 or 256 tokens)"),
        (["--log-level", "INFO"], "--log-level: INFO is not allowed (use debug, info, warning or error)"),
        (["--log-requests=maybe"], "--log-requests: maybe is not allowed (use true or false)"),
        (["--log-requests", "maybe"], "--log-requests: maybe is not allowed (use true or false)"),
        (["--log-requests", ""], "--log-requests: the value is missing (use true or false)"),
        (["--log-requests="], "--log-requests: the value is missing (use true or false)"),
        (["--rejoin", "settings"], "--rejoin: settings is not allowed (use true or false)"),
        (["--no-log-requests=true"], f"--no-log-requests: true {_NEGATED}"),
        (["--no-log-requests", "false"], f"--no-log-requests: false {_NEGATED}"),
        (["--no-log-requests", ""], f"--no-log-requests: '' {_NEGATED}"),
        (["--no-log-requests=\x1b"], rf"--no-log-requests: '\x1b' {_NEGATED}"),
        (
            ["--parallel-config-hash", "ab"],
            "--parallel-config-hash: ab is not allowed (use 64 digits out of 0-9 and a-f)",
        ),
        (["--engine_count", "2"], "--engine_count: there is no such flag (did you mean --engine-count?)"),
        (["--enginecount=2"], "--enginecount: there is no such flag (did you mean --engine-count?)"),
        (["-seed", "2"], "-seed: there is no such flag (did you mean --seed?)"),
        (["--no-log-request"], "--no-log-request: there is no such flag (did you mean --no-log-requests?)"),
        (["--gpu"], f"--gpu: there is no such flag {_NO_HINT}"),
        (["serve"], "serve: not expected here (a command comes first, a value right after its flag)"),
    ],
)
def test_a_wrong_flag_is_explained(argv: list[str], problem: str) -> None:
    assert _problems(*argv) == [problem]


@pytest.mark.parametrize(
    ("argv", "environ", "problem"),
    [
        (["--seed=x", "--seed=1"], {}, f"--seed: x is not allowed (use {_SEEDS})"),
        (["--seed=1"], {"MOCKENGINE_SEED": "x"}, f"MOCKENGINE_SEED: x is not allowed (use {_SEEDS})"),
        (["--rejoin=x", "--no-rejoin"], {}, "--rejoin: x is not allowed (use true or false)"),
    ],
)
def test_a_wrong_value_is_explained_although_another_one_wins(
    argv: list[str], environ: dict[str, str], problem: str
) -> None:
    assert _problems(*argv, **environ) == [problem]


def test_a_wrong_value_in_the_file_is_explained_although_a_flag_wins(tmp_path: Path) -> None:
    file = _write(tmp_path, "seed: x\n")

    assert _problems("--config", file, "--seed=1") == [f"{file}:1: seed: x is not allowed (use {_SEEDS})"]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:29550", "it does not begin with tcp:// or ipc://"),
        ("udp://host:1", "it does not begin with tcp:// or ipc://"),
        ("tcp://127.0.0.1", _PORT),
        ("tcp://host:", _PORT),
        ("tcp://host:0", _PORT),
        ("tcp://host:65536", _PORT),
        ("tcp://host:000080", _PORT),
        ("tcp://host:٨٠", _PORT),
        ("tcp://host:80/", _PORT),
        ("tcp://256.1.1.1:99", "the host is no IPv4 address"),
        ("tcp://1.2.3:99", "the host is no IPv4 address"),
        ("tcp://1:99", "the host is no IPv4 address"),
        ("tcp://::1:29550", "an IPv6 address stands in brackets"),
        ("tcp://a:b:99", "an IPv6 address stands in brackets"),
        ("tcp://[1.2.3]:99", _IPV6),
        ("tcp://[1.2.3.4]:99", _IPV6),
        ("tcp://[:::]:99", _IPV6),
        ("tcp://[]:99", _IPV6),
        ("tcp://[host]:99", _IPV6),
        ("tcp://[fe80::1%]:99", _IPV6),
        ("tcp://[fe80::1%a@b]:99", _IPV6),
        ("tcp://:99", _HOST),
        ("tcp://*:29550", _HOST),
        ("tcp://a@b:99", _HOST),
        ("tcp://ü.de:99", _HOST),
        ("tcp://eth0;1.2.3.4:99", _HOST),
        ("tcp://a b:99", _HOST),
        ("tcp://-a:99", _HOST),
        ("tcp://a-.b:99", _HOST),
        ("tcp://_a:99", _HOST),
        ("tcp://a..b:99", _HOST),
        (f"tcp://{'a' * 64}:99", _HOST),
        (f"tcp://{'a.' * 126}aa:99", _HOST),
        ("ipc://", _PATH),
        ("ipc://" + "x" * 108, _PATH),
        ("ipc://" + "é" * 54, _PATH),
        ("ipc:///tmp/a\0b", _PATH),
    ],
)
def test_an_address_that_cannot_be_connected_to_is_refused(address: str, reason: str) -> None:
    [problem] = _problems("--handshake-address", address)

    assert problem.startswith("--handshake-address: ")
    assert problem.endswith(f" is not allowed: {reason} (use {_ADDRESSES})")


@pytest.mark.parametrize("version", ["0.18", "0.18.9", "0.1", "0.2", "v0.33", "0.33.0+cpu", "1.0", "0.33.", "latest"])
def test_a_release_that_is_not_spoken_is_refused(version: str) -> None:
    assert _problems("--vllm-version", version) == [
        f"--vllm-version: {version} is not allowed (use auto, or a release from 0.19 on, such as 0.33 or 0.33.0)"
    ]


def test_a_variable_that_is_no_setting_is_refused() -> None:
    problems = _problems(
        MOCKENGINE_SEDE="3", mockengine_seed="4", MOCKENGINE_PORT="8000", MOCKENGINE_GPU="a b", OTHER="1"
    )

    assert problems == [
        "MOCKENGINE_SEDE: there is no such variable, its value 3 would be ignored (did you mean MOCKENGINE_SEED?)",
        "mockengine_seed: there is no such variable, its value 4 would be ignored (did you mean MOCKENGINE_SEED?)",
        (
            "MOCKENGINE_PORT: there is no such variable, its value 8000 would be ignored "
            "(correct or unset it; mockengine --help names them all)"
        ),
        (
            "MOCKENGINE_GPU: there is no such variable, its value 'a b' would be ignored "
            "(correct or unset it; mockengine --help names them all)"
        ),
    ]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("a: b: c\n", [f"{{file}}:1: not YAML: mapping values are not allowed here {_YAML_FORM}"]),
        (
            "seed: 1\n\tb: 2\n",
            [f"{{file}}:2: not YAML: found character '\\t' that cannot start any token {_YAML_FORM}"],
        ),
        ("seed: 1\n\nlog: \x01\n", [f"{{file}}:3: not YAML: special characters are not allowed {_YAML_FORM}"]),
        ("seed: 1\n---\nseed: 2\n", [f"{{file}}:2: not YAML: but found another document {_YAML_FORM}"]),
        ("[" * 2_000, [f"{{file}}:1: not YAML: nested too deeply {_YAML_FORM}"]),
        ("\n- seed\n", [f"{{file}}:2: not a mapping {_YAML_FORM}"]),
        ("seed\n", [f"{{file}}:1: not a mapping {_YAML_FORM}"]),
        ("seed: 1\nseed: 2\n", ["{file}:2: seed: set on line 1 already (remove one of the two)"]),
        ("\nengine-count: 2\n", ["{file}:2: engine-count: there is no such setting (did you mean engine_count?)"]),
        (
            "gpu: 1\n",
            [f"{{file}}:1: gpu: there is no such setting {_NO_HINT}"],
        ),
        (
            "[a]: 1\n",
            [f"{{file}}:1: 'a sequence': there is no such setting {_NO_HINT}"],
        ),
        ("rejoin: [1]\n", ["{file}:1: rejoin: a sequence is not allowed (use true or false)"]),
        ("rejoin: {a: 1}\n", ["{file}:1: rejoin: a mapping is not allowed (use true or false)"]),
        (
            "engine_count: yes\nrejoin: 3\n",
            [
                "{file}:1: engine_count: yes is not allowed (use a whole number of ranks from 1 to 64)",
                "{file}:2: rejoin: 3 is not allowed (use true or false)",
            ],
        ),
    ],
)
def test_a_wrong_file_is_explained(text: str, problems: list[str], tmp_path: Path) -> None:
    file = _write(tmp_path, text)

    assert _problems("--config", file) == [problem.format(file=file) for problem in problems]


def test_a_file_that_is_not_text_is_explained(tmp_path: Path) -> None:
    file = _write(tmp_path, b"seed\xff: 1\n")

    assert _problems(MOCKENGINE_CONFIG=file) == [
        f"MOCKENGINE_CONFIG: {file}: byte 4 is not UTF-8 (use a text file in YAML)"
    ]


def test_a_file_that_cannot_be_read_is_explained(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere.yaml")

    assert _problems("--config", missing) == [
        f"--config: {missing}: No such file or directory (use the path of a readable YAML file)"
    ]
    assert _problems("--config", str(tmp_path)) == [
        f"--config: {tmp_path}: Is a directory (use the path of a readable YAML file)"
    ]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (
            ["--start-rank=2", "--engine-count=4", "--data-parallel-size=5"],
            (
                "start_rank 2 (--start-rank), engine_count 4 (--engine-count), data_parallel_size 5 "
                "(--data-parallel-size): the last rank would be 5, the highest of 5 is 4 "
                "(use a data_parallel_size of at least 6, or a smaller start_rank or engine_count)"
            ),
        ),
        (
            ["--start-rank=65535", "--engine-count=2"],
            (
                "start_rank 65535 (--start-rank), engine_count 2 (--engine-count): the last rank would be 65536, "
                "the highest there is is 65535 (use a start_rank of at most 65534)"
            ),
        ),
        (
            ["--max-num-batched-tokens=255"],
            (
                "max_num_batched_tokens 255 (--max-num-batched-tokens), max_num_seqs 256 (default): a step could not "
                "give every running request one token, so vLLM refuses this too "
                "(use a max_num_batched_tokens of at least 256, or a smaller max_num_seqs)"
            ),
        ),
        (
            ["--num-gpu-blocks=100", "--max-model-len=1601"],
            (
                "max_model_len 1601 (--max-model-len), block_size 16 (default), num_gpu_blocks 100 (--num-gpu-blocks): "
                "the KV cache holds 1600 tokens, fewer than the longest request, so vLLM refuses this too "
                "(use a num_gpu_blocks of at least 101, or a max_model_len of at most 1600)"
            ),
        ),
    ],
)
def test_a_combination_that_cannot_work_is_explained(argv: list[str], problem: str) -> None:
    assert _problems(*argv) == [problem]


@pytest.mark.parametrize(
    "argv",
    [
        ["--start-rank=2", "--engine-count=4", "--data-parallel-size=6"],
        ["--start-rank=65534", "--engine-count=2"],
        ["--max-num-batched-tokens=256"],
        ["--num-gpu-blocks=100", "--max-model-len=1600"],
    ],
)
def test_a_combination_that_just_works_is_accepted(argv: list[str]) -> None:
    assert "default" in load(argv, {}).origins.values()


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    file = _write(tmp_path, "vocab_size: 0\nsead: 1\n")

    with pytest.raises(SettingsError) as caught:
        load(
            ["--seed", "x", "--start-rank=2", "--bogus", "1", "--config", file],
            {"MOCKENGINE_DATA_PARALLEL_SIZE": "2", "MOCKENGINE_MAX_NUM_SEQS": "0", "MOCKENGINE_SEDE": "1"},
        )

    assert str(caught.value).splitlines() == [
        "the settings have 7 problems:",
        f"  --bogus: there is no such flag {_NO_HINT}",
        "  MOCKENGINE_SEDE: there is no such variable, its value 1 would be ignored (did you mean MOCKENGINE_SEED?)",
        f"  {file}:2: sead: there is no such setting (did you mean seed?)",
        "  MOCKENGINE_MAX_NUM_SEQS: 0 is not allowed (use a whole number of requests from 1 to 65536)",
        f"  {file}:1: vocab_size: 0 is not allowed (use a whole number of tokens from 1 to 2147483647)",
        f"  --seed: x is not allowed (use {_SEEDS})",
        (
            "  start_rank 2 (--start-rank), engine_count 1 (default), data_parallel_size 2 "
            "(MOCKENGINE_DATA_PARALLEL_SIZE): the last rank would be 2, the highest of 2 is 1 "
            "(use a data_parallel_size of at least 3, or a smaller start_rank or engine_count)"
        ),
    ]


_ANY_TEXT: SearchStrategy[str] = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    st.sampled_from(["0", "true", "--seed", "--config", "é", "\udcff"]),
)
_VARIABLES = tuple(description.variable for description in describe().values())


@hypothesis.settings(deadline=None)
@given(argv=st.lists(_ANY_TEXT), value=_ANY_TEXT, variable=st.sampled_from(_VARIABLES))
def test_text_of_any_kind_is_understood_or_explained_in_lines(argv: list[str], value: str, variable: str) -> None:
    # A last flag that does not exist: there is always something to explain.
    problems = _problems("--bogus", *argv, **{variable: value})

    assert all(problem.isprintable() for problem in problems)


def test_a_value_in_a_combination_that_cannot_work_is_shown_like_any_other() -> None:
    (problem,) = _problems("--timing-profile=\x1b[2J a profile")
    assert problem.startswith("timing instant (default), timing_profile '\\x1b[2J a profile' (--timing-profile): ")
