# SPDX-License-Identifier: Apache-2.0
"""`docker compose up` as it is written down, on a real Docker engine."""

import json
import os
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from tests.support.compose import (
    BASE,
    EXAMPLE,
    MODEL_NAME,
    STREAM_ITL_MS,
    VARIANTS,
    Project,
    Stream,
    environment,
    listed_variables,
    project,
    variant,
)
from tests.support.docker import Container, docker, inspect, try_docker
from tests.support.stack import ROOT, wait_until

pytestmark = pytest.mark.containers

UP_DEADLINE_S = 30.0
NO_CAPABILITIES = "0" * 16
GIVEN = {"MOCKENGINE_SEED": "7", "MOCKENGINE_LOG_LEVEL": "debug", "MOCKENGINE_OUTPUT_TOKEN_CHUNK_SIZE": "2"}

HUB_MODEL = "somebody/tiny"
FETCH = """
folder=/models/hub/hub/models--somebody--tiny
mkdir -p $folder/refs $folder/snapshots/1
printf 1 > $folder/refs/main
cp /models/mock/*.json $folder/snapshots/1
"""


@pytest.fixture(scope="module")
def images(engine_image: str, frontend_image: str) -> tuple[str, str]:
    """Both images, which compose does not build then."""
    return engine_image, frontend_image


@pytest.fixture(scope="module")
def up(images: tuple[str, str]) -> Iterator[tuple[Project, float]]:  # noqa: ARG001 - they must be there
    """The stack as it is, told a few settings by variables, and how long its start took, in seconds."""
    with project(**GIVEN) as stack:
        yield stack, stack.up()


@pytest.fixture(scope="module")
def stack(up: tuple[Project, float]) -> Project:
    return up[0]


def test_it_is_up_and_healthy_in_time(up: tuple[Project, float]) -> None:
    stack, seconds = up

    assert seconds < UP_DEADLINE_S
    assert {service: stack.container(service).state["Health"]["Status"] for service in ("engine", "frontend")} == {
        "engine": "healthy",
        "frontend": "healthy",
    }


def test_a_chat_completion_is_streamed_through_it(stack: Project) -> None:
    chunks = list(
        stack.client().chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": "Say hello."}],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    texts = [choice.delta.content for choice in choices if choice.delta.content]
    usage = chunks[-1].usage
    assert len(texts) == 6, "two tokens in each, as MOCKENGINE_OUTPUT_TOKEN_CHUNK_SIZE says"
    assert choices[-1].finish_reason == "length"
    assert usage is not None
    assert usage.completion_tokens == 12


def test_the_engines_log_is_json_with_a_pair_for_every_request(stack: Project) -> None:
    replies = [
        stack.client().completions.create(model=MODEL_NAME, prompt=f"Number {number}", max_tokens=4)
        for number in range(5)
    ]

    def ids(event: str) -> list[str]:
        log = stack.container("engine").json_log()
        return sorted(entry["request_id"] for entry in log if entry["event"] == event)

    finished = wait_until(lambda: ids("request finished"), lambda found: found == ids("request started"), "finished")
    assert len(finished) == len(set(finished)) >= 5
    for reply in replies:
        assert len([one for one in finished if one.startswith(reply.id)]) == 1


def test_settings_come_from_the_variables_outside(stack: Project) -> None:
    engine = stack.container("engine")
    told = json.loads(engine.run("mockengine", "settings", "--json").stdout)
    stack.client().completions.create(model=MODEL_NAME, prompt="Hello", max_tokens=4)
    started = [entry for entry in engine.json_log() if entry["event"] == "request started"]

    names = {variable: variable.removeprefix("MOCKENGINE_").lower() for variable in GIVEN}
    assert {variable: str(told[name]["value"]) for variable, name in names.items()} == GIVEN
    assert {entry["chunk_size"] for entry in started} == {2}


def test_both_run_without_any_privilege(stack: Project) -> None:
    for service in ("engine", "frontend"):
        container = stack.container(service)
        host = inspect(container.name)["HostConfig"]
        status = dict(re.findall(r"(\w+):\t(.*)", container.run("cat", "/proc/1/status").stdout))

        assert host["ReadonlyRootfs"] is True
        assert status["Uid"].split() == ["10001"] * 4
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {NO_CAPABILITIES}
        assert status["NoNewPrivs"] == "1"
        assert 0 < host["PidsLimit"] <= 1024
        assert 0 < host["Memory"] <= 2 * 1024**3
        assert host["LogConfig"] == {"Type": "json-file", "Config": {"max-file": "3", "max-size": "10m"}}
        assert host["RestartPolicy"]["Name"] == "unless-stopped"


def test_volumes_can_be_written(stack: Project) -> None:
    state = stack.container("engine").run("cat", "/var/lib/mockengine/state.json")
    hub = stack.container("frontend").run("touch", "/models/hub/probe")

    assert json.loads(state.stdout)["ranks"] == [0]
    assert hub.returncode == 0, hub.stderr


def test_only_the_api_is_published_and_on_this_machine_only(stack: Project) -> None:
    ports = {
        service: inspect(stack.container(service).name)["NetworkSettings"]["Ports"]
        for service in ("engine", "frontend")
    }

    published = {key: value for service in ports.values() for key, value in service.items() if value}
    assert published == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(stack.port)}]}


def test_the_load_generator_ends_well(stack: Project) -> None:
    result = stack.compose("run", "--rm", "--no-TTY", "load", files=(variant("load"),))

    assert re.search(r"Successful requests: +200\b", result)
    assert re.search(r"Failed requests: +0\b", result)


def test_a_second_engine_with_the_same_state_file_is_refused(stack: Project) -> None:
    up = ("up", "--detach", "--no-build", "--no-recreate")

    stack.compose(*up, "--scale", "engine=2", "engine")

    Container(f"{stack.name}-engine-2").wait_for_line("is used by another engine that runs")
    stack.compose(*up, "--scale", "engine=1", "engine")
    assert stack.serves()


@pytest.mark.parametrize(("name", "engines"), [("dp", ["engine"]), ("scale", ["engine", "engine-2"])])
@pytest.mark.usefixtures("images")
def test_every_rank_serves_and_stopping_leaves_exit_code_0(name: str, engines: list[str]) -> None:
    with project(name) as stack:
        assert stack.up() < UP_DEADLINE_S
        assert [stack.ask_rank(rank) for rank in range(4)] == [200] * 4
        logs = {engine: stack.container(engine).json_log() for engine in engines}
        served = {engine: [e["engine"] for e in log if e["event"] == "request started"] for engine, log in logs.items()}
        expected = {"dp": {"engine": [0, 1, 2, 3]}, "scale": {"engine": [0, 1], "engine-2": [2, 3]}}
        assert served == expected[name]

        stack.compose("stop")

        assert stack.exit_codes() == dict.fromkeys([*engines, "frontend"], 0)


@pytest.mark.parametrize(("drain_s", "ending"), [("0", "abort"), ("30", "length")])
@pytest.mark.usefixtures("images")
def test_down_ends_a_stream_in_good_order_and_leaves_exit_code_0(drain_s: str, ending: str) -> None:
    with project(MOCKENGINE_SHUTDOWN_TIMEOUT_S=drain_s, MOCKENGINE_ITL_MS=STREAM_ITL_MS) as stack:
        stack.up()
        stream = Stream(stack.client())

        stack.compose("down")

        assert stream.ending() == ending
        told, died = stack.events("kill"), stack.events("die")
        assert {name: event["Actor"]["Attributes"]["exitCode"] for name, event in died.items()} == {
            "engine": "0",
            "frontend": "0",
        }
        assert {name: event["Actor"]["Attributes"]["signal"] for name, event in told.items()} == {
            "engine": "15",
            "frontend": "15",
        }
        assert max(event["timeNano"] for event in told.values()) < stream.ended_at * 1e9, "it ended before"


ALONE = [(name,) for name in VARIANTS]
TOGETHER = [pair for pair in combinations(VARIANTS, 2) if pair != ("dp", "scale")]


@pytest.mark.parametrize("names", [(), *ALONE, *TOGETHER], ids="+".join)
def test_compose_accepts_each_variant_and_any_two(names: tuple[str, ...]) -> None:
    files = [flag for path in (BASE, *map(variant, names)) for flag in ("--file", str(path))]

    found = try_docker(
        *("compose", "--env-file", os.devnull, *files, "config", "--format", "json"),
        environment=environment(
            VLLM_VERSION="0.32.0",
            MODEL="Qwen/Qwen3-0.6B",
            MOCKENGINE_BLOCK_SIZE="32",
            FRONTEND_FLAGS="--tool-call-parser=hermes --chat-template='a b'",
        ),
    )

    assert (found.returncode, found.stderr) == (0, "")
    services = json.loads(found.stdout)["services"]
    for engine in {"engine", "engine-2"} & set(services):
        assert services[engine]["environment"]["MOCKENGINE_VLLM_VERSION"] == "0.32.0"
        assert services[engine]["environment"]["MOCKENGINE_BLOCK_SIZE"] == "32"
    assert services["frontend"]["image"] == (
        "vllm/vllm-openai-cpu:v0.32.0" if "python" in names else "mockengine-frontend:0.32.0"
    )
    assert ("build" in services["frontend"]) is ("python" not in names)
    assert services["frontend"]["command"][:3] == [
        "Qwen/Qwen3-0.6B",
        "--served-model-name=Qwen/Qwen3-0.6B",
        f"--data-parallel-size={4 if {'dp', 'scale'} & set(names) else 1}",
    ]
    assert services["frontend"]["command"][-2:] == ["--tool-call-parser=hermes", "--chat-template=a b"]


def test_the_number_of_ranks_of_dp_is_a_variable() -> None:
    files = [flag for path in (BASE, variant("dp")) for flag in ("--file", str(path))]

    found = docker(
        *("compose", "--env-file", os.devnull, *files, "config", "--format", "json"),
        environment=environment(DATA_PARALLEL_SIZE="2"),
    )

    services = json.loads(found)["services"]
    assert services["engine"]["environment"]["MOCKENGINE_ENGINE_COUNT"] == "2"
    assert "--data-parallel-size=2" in services["frontend"]["command"]


def test_compose_accepts_a_gateway_beside_it_as_the_docs_have_it(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "docker.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```yaml\n(include:.*?)```", page, re.DOTALL)
    file = tmp_path / "compose.yml"
    file.write_text(example.replace("../mockengine/docker-compose.yml", str(BASE)), encoding="utf-8")

    found = docker("compose", "--file", str(file), "config", "--format", "json", environment=environment())

    services = json.loads(found)["services"]
    assert set(services) == {"engine", "frontend", "gateway"}
    assert services["gateway"]["depends_on"]["frontend"]["condition"] == "service_healthy"


def test_an_including_stack_sees_the_file_of_variables_beside_the_included_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _unset_all(monkeypatch)
    included = tmp_path / "included"
    included.mkdir()
    (included / BASE.name).write_text(BASE.read_text(encoding="utf-8"), encoding="utf-8")
    (included / ".env").write_text("MOCKENGINE_SEED=5\nVLLM_API_KEY=secret\n", encoding="utf-8")
    file = tmp_path / "compose.yml"
    file.write_text(f"include: [{{path: included/{BASE.name}}}]\n", encoding="utf-8")

    services = json.loads(docker("compose", "--file", str(file), "config", "--format", "json"))["services"]

    assert services["engine"]["environment"]["MOCKENGINE_SEED"] == "5"
    assert services["frontend"]["environment"]["VLLM_API_KEY"] == "secret"


def _unset_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every variable that compose reads out of the shell: even an empty one wins over a file's."""
    for name in listed_variables():
        monkeypatch.delenv(name, raising=False)


def test_every_line_of_the_example_reaches_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _unset_all(monkeypatch)
    settings = re.findall(r"^#(MOCKENGINE_\w+)=(.*)$", EXAMPLE.read_text(encoding="utf-8"), re.MULTILINE)
    env = tmp_path / ".env"
    env.write_text("".join(f"{name}={value or 'given'}\n" for name, value in settings), encoding="utf-8")

    found = docker("compose", "--env-file", str(env), "--file", str(BASE), "config", "--format", "json")

    given = json.loads(found)["services"]["engine"]["environment"]
    assert given == {name: value or "given" for name, value in settings}
    assert len(given) > 20


@pytest.mark.usefixtures("engine_image")
def test_a_model_of_the_hub_is_served_under_its_own_name(frontend_image: str) -> None:
    with project(MODEL=HUB_MODEL, HF_HUB_OFFLINE="1") as stack:
        # As if it had been fetched before: there is no hub here.
        stack.compose("create", "--no-build")
        docker(
            "run", "--rm", "--volume", f"{stack.name}_hub:/models/hub", "--entrypoint=sh", frontend_image, "-c", FETCH
        )

        stack.up()

        assert [model.id for model in stack.client().models.list()] == [HUB_MODEL]
        reply = stack.client().completions.create(model=HUB_MODEL, prompt="Hello", max_tokens=3)
        assert reply.choices[0].finish_reason == "length"
