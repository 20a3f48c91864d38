# SPDX-License-Identifier: Apache-2.0
"""A fit finds the model behind benchmarks that something else made, and says how far off it is."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mockengine.fit.command import Fit, fit, main
from mockengine.fit.profile import Coefficients, Profile, ProfileError, load, save
from mockengine.fit.results import Run, read_runs
from mockengine.fit.simulator import Limits, Model, replay
from tests.support.known_deployment import LIMITS, PADDED_TO, TRAVEL_S, TRUTH, Deployment, Served, bench

FIXTURES = Path(__file__).parent / "fixtures"
SYNCHRONOUS = Limits(8, 300, async_scheduling=False)


def saved(folder: Path, name: str, document: object) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document))
    return path


def benches(folder: Path, rates: Sequence[float], seed: int, **changes: Any) -> list[Path]:
    documents = [bench(rate, seed + number, **changes) for number, rate in enumerate(rates)]
    return [saved(folder, f"{seed}-{rate:g}", document) for rate, document in zip(rates, documents, strict=True)]


def errors(outcome: Fit) -> list[dict[str, float]]:
    """Return the errors of the runs that were held out."""
    return [run["errors"] for run in outcome.profile.runs if run["held_out"]]


def said_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("mockengine fit: ")
    return stderr.removeprefix("mockengine fit: ").rstrip("\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benches")


@pytest.fixture(scope="module")
def learned(folder: Path) -> list[Path]:
    return benches(folder, [1, 6, 12, 20, 30], 100, count=100)


# The replay.


@pytest.mark.parametrize("clients", [1, 5, 1_000])
@pytest.mark.parametrize(
    "limits", [Limits(8, 64), Limits(256, 8_192), SYNCHRONOUS, replace(SYNCHRONOUS, max_num_seqs=256)]
)
def test_replay_is_what_a_scheduler_does_step_by_step(clients: int, limits: Limits) -> None:
    rng = np.random.default_rng(7)
    count = 120
    prompts, outputs = rng.integers(1, 200, count), rng.integers(1, 40, count)
    sent = np.cumsum(rng.exponential(0.02, count))
    sent -= sent[0]
    requests = [
        Served(int(prompt), int(output), float(at), TRAVEL_S)
        for prompt, output, at in zip(prompts, outputs, sent, strict=True)
    ]
    Deployment(requests, TRUTH.duration_s, limits, clients).serve()
    run = Run(
        name="",
        request_rate=50.0,
        max_concurrency=clients,
        wanted_s=sent,
        sent_s=sent,
        are_arrivals_measured=True,
        prompt_tokens=prompts,
        output_tokens=outputs,
        ttft_s=np.ones(count),
        gaps_s=(np.ones(1),) * count,
        failed=0,
    )
    replayed = replay(run, Model(TRUTH, TRAVEL_S), limits)
    assert replayed.sent_s == pytest.approx([each.sent_s for each in requests])
    assert replayed.first_token_s == pytest.approx([each.tokens_s[0] for each in requests])
    assert replayed.last_token_s == pytest.approx([each.tokens_s[-1] for each in requests])


# The fit.


def test_held_out_runs_are_foretold(folder: Path, learned: list[Path]) -> None:
    outcome = fit(read_runs(learned), read_runs(benches(folder, [3, 16, 24], 500)), LIMITS)
    for each in errors(outcome):
        assert all(abs(each[f"tpot_{statistic}"]) <= 0.05 for statistic in ("mean", "p50", "p99"))
        assert all(abs(each[f"ttft_{statistic}"]) <= 0.10 for statistic in ("mean", "p50", "p99"))
        assert abs(each["throughput_mean"]) <= 0.02
    steps = outcome.model.steps
    # Half the padding counts as base.
    padding_s = TRUTH.per_decode_s * (PADDED_TO - 1) / 2
    assert steps.base_s == pytest.approx(TRUTH.base_s + padding_s, rel=0.05)
    assert steps.per_prefill_token_s == pytest.approx(TRUTH.per_prefill_token_s, rel=0.08)
    assert outcome.model.overhead_s == pytest.approx(2 * TRAVEL_S, rel=0.35)
    assert 0.03 < outcome.profile.coefficients.step_jitter < 0.09


def test_long_prompts_in_chunks_and_a_full_batch_are_foretold(folder: Path) -> None:
    changes: dict[str, Any] = {"limits": Limits(16, 2_048), "prompt": (200, 6_000), "count": 60}
    runs = read_runs(benches(folder, [0.3, 1, 2, 3.5], 200, **changes))
    outcome = fit(runs, read_runs(benches(folder, [0.6, 1.5], 600, **changes)), Limits(16, 2_048))
    for each in errors(outcome):
        assert abs(each["tpot_mean"]) <= 0.05
        assert abs(each["ttft_mean"]) <= 0.10


def test_bundled_tokens_and_unknown_arrivals_do_no_harm(folder: Path) -> None:
    documents = [bench(rate, 300 + number, count=60) for number, rate in enumerate([1, 8, 16, 24])]
    for document in documents:
        document["itls"] = [[sum(gaps[at : at + 4]) for at in range(0, len(gaps), 4)] for gaps in document["itls"]]
    del documents[1]["start_times"]
    paths = [saved(folder, f"bundled-{number}", document) for number, document in enumerate(documents)]
    outcome = fit(read_runs(paths), read_runs(benches(folder, [4, 12], 700)), LIMITS)
    assert all(abs(each["tpot_mean"]) <= 0.05 and abs(each["ttft_mean"]) <= 0.10 for each in errors(outcome))
    assert any("bundled-1.json does not say when requests were sent" in note for note in outcome.profile.notes)


def test_a_wrong_limit_is_doubted(folder: Path) -> None:
    runs = read_runs(benches(folder, [1, 8, 16], 400, limits=Limits(8, 8_192), count=60))
    assert any("--max-num-seqs" in note for note in fit(runs, [], LIMITS).profile.notes)


def test_same_input_gives_the_same_profile(learned: list[Path]) -> None:
    runs = read_runs(learned[1:3])
    assert fit(runs, [], LIMITS).profile == fit(runs, [], LIMITS).profile


def test_how_the_deployment_schedules_is_found_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = replace(LIMITS, async_scheduling=False)
    results = [str(path) for path in benches(folder, [2, 16, 24], 800, limits=limits, count=60)]
    assert main([*results, "--output", str(tmp_path / "profile.yaml")]) == 0
    assert "Scheduling is synchronous." in capsys.readouterr().out
    assert load(tmp_path / "profile.yaml").async_scheduling is False


# Reading.


@pytest.mark.parametrize("name", ["rust", "python"])
def test_results_of_a_real_client_are_read(name: str) -> None:
    path = FIXTURES / f"bench_serve_{name}.json"
    document = json.loads(path.read_text())
    (run,) = read_runs([path])
    assert run.load == (20.0, document["max_concurrency"])
    assert run.are_arrivals_measured
    assert run.prompt_tokens.sum() == document["total_input_tokens"]
    assert run.output_tokens.sum() == document["total_output_tokens"]
    assert 1_000 * run.ttft_s.mean() == pytest.approx(document["mean_ttft_ms"])
    assert 1_000 * (run.decode_s / (run.output_tokens - 1)).mean() == pytest.approx(document["mean_tpot_ms"], rel=1e-3)
    # The one that was recorded with a limit held requests back; without a limit a request is sent when it is wanted.
    waits = run.sent_s - run.wanted_s
    assert waits.min() >= 0
    assert (waits.max() > 0.01) == (run.max_concurrency is not None)


def test_results_one_after_another_are_read(tmp_path: Path) -> None:
    documents = [bench(rate, 1, count=20) for rate in (1, 2)]
    path = tmp_path / "all.json"
    path.write_text("\n".join(map(json.dumps, documents)))
    assert [(run.name, run.request_rate) for run in read_runs([path])] == [(f"{path}#1", 1.0), (f"{path}#2", 2.0)]


def test_failed_requests_are_left_out(tmp_path: Path) -> None:
    document = bench(5, 1, count=30)
    document["output_lens"][3] = 0
    document["ttfts"][3], document["itls"][3] = 0.0, []
    (run,) = read_runs([saved(tmp_path, "failed", document)])
    assert (run.failed, len(run.sent_s)) == (1, 29)


def test_requests_that_a_client_held_back_are_wanted_earlier(tmp_path: Path) -> None:
    document = bench(5, 1, count=30) | {"max_concurrency": 4, "request_rate": "inf"}
    (run,) = read_runs([saved(tmp_path, "inf", document)])
    assert run.load == (np.inf, 4)
    assert not run.wanted_s.any()
    held_back = document | {"queue_times": [0.5] * 30, "request_rate": 5}
    (run,) = read_runs([saved(tmp_path, "held", held_back)])
    assert run.sent_s - run.wanted_s == pytest.approx(0.5)


# The command.


def test_command_writes_a_profile_and_tells_the_errors(
    tmp_path: Path, learned: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "profile.yaml"
    words = [*learned[:2], "--async-scheduling", "--hold-out", learned[2], "--output", output]
    assert main([str(word) for word in words]) == 0
    stdout = capsys.readouterr().out
    profile = load(output)
    assert profile.max_num_seqs == 256
    assert [run["held_out"] for run in profile.runs] == [False, False, True]
    assert profile.coefficients.step_base_ms == pytest.approx(6.3, rel=0.1)
    assert f"{learned[2]} (held out)" in stdout
    for figure in ("TTFT mean, ms", "TTFT p99, ms", "TPOT p50, ms", "throughput, tok/s"):
        assert stdout.count(figure) == 3
    assert f"--timing fitted --timing-profile {output}" in stdout


def test_runs_under_one_load_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [saved(tmp_path, str(seed), bench(5, seed, count=20)) for seed in (1, 2)]
    said = said_of(capsys, *paths)
    assert said == (
        f"{paths[0]}, {paths[1]}: all at request_rate 5, so how a step grows with the batch cannot be told "
        "(give results at two or more rates, from nearly idle to saturated)"
    )


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([1, 2], "no result of a serving benchmark, it holds a list"),
        ({"elapsed": 3}, "no result of a serving benchmark, it has no request_rate"),
        ({"request_rate": 4, "input_lens": [3]}, "output_lens, ttfts, itls missing or empty"),
        (bench(5, 1, count=20) | {"ttfts": [0.1]}, "the lists of requests differ in length: [1, 20]"),
        (bench(5, 1, count=20) | {"request_rate": -1}, "request_rate, a time or a length is negative"),
        (bench(5, 1, count=20) | {"itls": 5}, "a field has not the form that vLLM gives it"),
        (bench(5, 1, count=5), "5 requests succeeded, at least 20 are needed (use a larger --num-prompts)"),
    ],
)
def test_a_file_that_says_too_little_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], document: object, words: str
) -> None:
    path = saved(tmp_path, "wrong", document)
    said = said_of(capsys, path)
    assert said.startswith(f"{path}: ")
    assert words in said
    assert said.endswith(")")


def test_a_file_that_is_no_json_or_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.txt"
    assert "No such file or directory (give the path of a readable file)" in said_of(capsys, path)
    path.write_text("Successful requests: 5")
    assert "not JSON: Expecting value" in said_of(capsys, path)
    path.write_text("")
    assert "not JSON: Expecting value" in said_of(capsys, path)
    path.write_bytes(b"\xff\xfe")
    assert "byte 0 is not UTF-8" in said_of(capsys, path)


def test_replies_of_one_token_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for rate in (1, 2):
        document = bench(rate, 1, count=20)
        document |= {"output_lens": [1] * 20, "itls": [[]] * 20}
        paths.append(saved(tmp_path, str(rate), document))
    assert "no reply has a second token" in said_of(capsys, *paths)


def test_one_run_of_replies_of_one_token_does_no_harm(tmp_path: Path) -> None:
    documents = [bench(rate, 1, count=20) for rate in (1, 2, 8)]
    documents[1] |= {"output_lens": [1] * 20, "itls": [[]] * 20}
    runs = read_runs([saved(tmp_path, str(number), document) for number, document in enumerate(documents)])
    assert fit(runs, [], LIMITS).profile.coefficients.step_base_ms == pytest.approx(6.3, rel=0.1)


def test_limits_that_vllm_refuses_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (tmp_path / "any.json", "--max-num-seqs", 64, "--max-num-batched-tokens", 32)
    assert said_of(capsys, *words).startswith("--max-num-batched-tokens 32: fewer than --max-num-seqs 64")


def test_wrong_use_is_told_by_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["a.json", "--max-num-seqs", "none"]) == 2
    assert "none is not allowed (use a whole number from 1 to 2147483647)" in capsys.readouterr().err


# The profile.


PROFILE = Profile(
    coefficients=Coefficients(
        step_base_ms=6.25,
        step_ms_per_prefill_token=0.05,
        step_ms_per_decode=0.08,
        step_ms_per_context_token=3e-5,
        step_jitter=0.05,
    ),
    max_num_seqs=256,
    max_num_batched_tokens=8_192,
    overhead_ms=4.0,
    most_decodes=100,
    notes=["At most 100."],
)


WHOLE = "".join(f"{each.name}: 0\n" for each in fields(Coefficients))
"""What a profile must hold."""


def test_profile_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    save(PROFILE, path)
    assert load(path) == PROFILE


def test_profile_of_a_person_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    known = replace(PROFILE, model="a model", gpu="a GPU", engine="vLLM", source="https://example.org", max_num_seqs=0)
    save(known, path)
    assert load(path) == known


def test_what_was_set_otherwise_is_told() -> None:
    same = {"max_num_seqs": 256, "max_num_batched_tokens": 8_192}
    known = replace(PROFILE, async_scheduling=True, most_decodes=256)
    assert known.differences(**same, async_scheduling=True) == []
    assert known.differences(max_num_seqs=64, max_num_batched_tokens=2_048, async_scheduling=False) == [
        "max_num_seqs: 64 here, 256 there",
        "max_num_batched_tokens: 2048 here, 8192 there",
        "async_scheduling: false here, true there",
    ]
    (extrapolated,) = replace(known, max_num_seqs=0, most_decodes=100).differences(**same, async_scheduling=True)
    assert "more than 100 decodes were not measured" in extrapolated
    assert replace(known, max_num_seqs=0, most_decodes=0).differences(**same, async_scheduling=True) == []


def test_profile_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="No such file or directory"):
        save(PROFILE, tmp_path / "none" / "profile.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step_base_ms: 6", "step_ms_per_prefill_token: missing"),
        ("step_base_ms: fast", "step_base_ms: 'fast' is not allowed"),
        ("step_base_ms: -1", "step_base_ms: -1 is not allowed"),
        ("step_base_ms: .inf", "step_base_ms: inf is not allowed"),
        ("[1, 2]", "no profile, it holds a list"),
        ("step_base: 6", "step_base: no such entry (use some of step_base_ms, "),
        (WHOLE + "async_scheduling: maybe", "async_scheduling: 'maybe' is not allowed"),
        (WHOLE + "model: [1]", "model: [1] is not allowed (use text)"),
        (WHOLE + "notes: none", "notes: 'none' is not allowed (use a list)"),
        ("a: [", "not YAML"),
    ],
)
def test_profile_that_makes_no_sense_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError) as refused:
        load(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert words in str(refused.value)
