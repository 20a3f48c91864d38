# SPDX-License-Identifier: Apache-2.0
"""Both images: what is in them, and how they behave with a read-only root and no rights at all."""

import hashlib
import json
import statistics
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from mockengine import __version__
from mockengine.testing.fetch import DEFAULT_VERSION
from tests.support.docker import HARDENED, Container, container, docker, inspect, moment, try_docker
from tests.support.stack import MODEL, MOE_MODEL, ROOT

pytestmark = pytest.mark.containers

USER = "10001:10001"
OFFLINE = (*HARDENED, "--network=none")
MB = 1_000_000

# Prints what no program here reads, then what does not belong into an image that installs nothing.
FIND_LEFTOVERS = r"""
find /opt/mockengine /usr/local -xdev \( \
  -type d \( -name tests -o -name test -o -name include -o -name ensurepip -o -name 'pip*' \) -o \
  -name '*.h' -o -name '*.a' -o -name '*.pyi' -o -name '*.pyx' -o -name '*.whl' \)
for tool in pip pip3 gcc cc g++ make; do command -v $tool; done
python -m pip --version 2>/dev/null
python -c 'import ensurepip' 2>/dev/null && echo ensurepip
true
"""

FIND_UNCOMPILED = """
import importlib.util, os, sys
import mockengine.service, mockengine.health, mockengine.cli
found = [m for m in list(sys.modules.values()) if (getattr(m, "__file__", None) or "").endswith(".py")]
assert len(found) > 200, len(found)
compiled = importlib.util.cache_from_source
print("\\n".join(m.__file__ for m in found if not os.path.exists(compiled(m.__file__))), end="")
"""

TIME_HEALTH = """
import json, subprocess, sys, time
def seconds(*command):
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start
runs = [(seconds(sys.executable, "-c", "pass"), seconds("mockengine", "health")) for _ in range(9)]
print(json.dumps(runs))
"""


def _config(image: str) -> dict[str, Any]:
    config: dict[str, Any] = inspect(image)["Config"]
    return config


def _bytes_above_base(image: str) -> int:
    """Return the size of the layers that the Dockerfile adds; its first instruction is the label."""
    history = docker("history", "--no-trunc", "--human=false", "--format", "{{json .}}", image).splitlines()
    total = 0
    for step in map(json.loads, history):
        total += int(step["Size"])
        if "org.opencontainers.image.title" in step["CreatedBy"]:
            return total
    raise AssertionError(f"{image} has no label")


def _in_image(image: str, *command: str) -> str:
    """Run a command instead of the entrypoint, and return what it writes."""
    return docker("run", "--rm", *OFFLINE, f"--entrypoint={command[0]}", image, *command[1:])


def _seconds_to_stop(stopped: Container) -> float:
    """Stop a container, and return how long that took by Docker's own clock."""
    started = stopped.state["StartedAt"]
    docker("stop", "--time=10", stopped.name)
    until = moment(stopped.state["FinishedAt"]) + timedelta(seconds=1)
    events = docker(
        *("events", "--since", started, "--until", until.isoformat().replace("+00:00", "Z")),
        *("--filter", f"container={stopped.name}", "--format", "{{json .}}"),
    )
    times = {event["Action"]: int(event["timeNano"]) for event in map(json.loads, events.splitlines())}
    return (times["die"] - times["kill"]) / 1e9


def _times_to_stop(image: str, line: str) -> list[float]:
    """Stop containers that have written this line, up to three, until one has taken less than a second.

    On a machine that is busy with other things a stop takes as long as those let it.
    """
    times = list[float]()
    while len(times) < 3 and not any(seconds < 1 for seconds in times):
        with container(image, options=(*OFFLINE, "--no-healthcheck")) as running:
            running.wait_for_line(line)
            times.append(_seconds_to_stop(running))
            assert running.wait_for_end() == 0
    return times


# --- the engine's image


@pytest.fixture
def engine(engine_image: str) -> Iterator[Container]:
    """An engine that waits for a frontend, with no network and no rights."""
    with container(engine_image, options=OFFLINE) as running:
        running.wait_for_line("engine joining")
        yield running


def test_the_engine_image_adds_at_most_110_mb_to_its_base(engine_image: str) -> None:
    assert 20 * MB < _bytes_above_base(engine_image) <= 110 * MB


def test_the_engine_image_says_how_it_is_run(engine_image: str) -> None:
    config = _config(engine_image)
    assert config["User"] == USER
    assert config["Entrypoint"] == ["mockengine"]
    assert not config["Cmd"]
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"] == ["CMD", "mockengine", "health"]
    assert config["ExposedPorts"] == {"29555/tcp": {}}
    # A volume of the image would be made anew, without a name, for every container.
    assert not config.get("Volumes")


def test_the_engine_image_sets_only_the_admin_port(engine_image: str) -> None:
    environment = [line for line in _config(engine_image)["Env"] if line.startswith("MOCKENGINE_")]
    assert environment == ["MOCKENGINE_ADMIN_HOST=0.0.0.0", "MOCKENGINE_ADMIN_PORT=29555"]


def test_the_engine_image_says_what_it_is(engine_image: str) -> None:
    labels = _config(engine_image)["Labels"]
    assert labels["org.opencontainers.image.title"] == "mockengine"
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert _in_image(engine_image, "mockengine", "--version") == f"mockengine {__version__}"


def test_the_engine_image_holds_nothing_that_only_builds_and_tests_need(engine_image: str) -> None:
    assert _in_image(engine_image, "sh", "-c", FIND_LEFTOVERS) == ""


def test_the_engine_image_has_the_profiles(engine_image: str) -> None:
    profiles = sorted(path.name for path in (ROOT / "deploy" / "profiles").iterdir())
    assert _in_image(engine_image, "ls", "/profiles").splitlines() == profiles


def test_whatever_the_engine_imports_is_compiled_already(engine_image: str) -> None:
    assert _in_image(engine_image, "python", "-c", FIND_UNCOMPILED) == ""


def test_the_engine_runs_without_rights_and_logs_json(engine: Container) -> None:
    status = engine.run("cat", "/proc/1/status").stdout
    assert "\nUid:\t10001\t10001\t10001\t10001\n" in status
    assert "\nCapEff:\t0000000000000000\n" in status
    assert "\nNoNewPrivs:\t1\n" in status
    assert engine.run("sh", "-c", "touch /var/lib/mockengine/x /tmp/x").returncode != 0
    assert "engine joining" in [line["event"] for line in engine.json_log()]


def test_the_engine_stops_within_a_second(engine_image: str) -> None:
    times = _times_to_stop(engine_image, "engine joining")
    assert min(times) < 1, times


def test_the_last_line_of_a_stopped_engine_says_that_it_left(engine: Container) -> None:
    docker("stop", engine.name)
    assert engine.json_log()[-1]["event"] == "engine left"


def test_the_engine_is_healthy_while_it_waits_for_a_frontend(engine_image: str) -> None:
    with container(engine_image, options=(*OFFLINE, "--health-interval=500ms")) as running:
        running.wait_for_health("healthy")


def test_the_health_command_is_quick(engine: Container) -> None:
    assert engine.run("mockengine", "health").returncode == 0
    pairs: list[tuple[float, float]] = json.loads(engine.run("python", "-c", TIME_HEALTH).stdout)
    bare, health = (statistics.median(times) for times in zip(*pairs, strict=True))
    # On a busy machine Python's own start takes more than its usual 15 ms, and all else with it.
    assert health < max(0.2, 8 * bare), (health, bare)


def test_the_health_command_notices_that_nothing_listens(engine_image: str) -> None:
    finished = try_docker("run", "--rm", *OFFLINE, engine_image, "health")
    assert finished.returncode == 1
    assert "29555" in finished.stdout + finished.stderr


def test_a_misspelt_variable_is_refused(engine_image: str) -> None:
    finished = try_docker("run", "--rm", *OFFLINE, "--env=MOCKENGINE_BLOCKSIZE=16", engine_image)
    assert finished.returncode == 2
    assert "did you mean MOCKENGINE_BLOCK_SIZE" in finished.stderr


def test_a_volume_at_the_state_folder_can_be_written(engine_image: str) -> None:
    options = ("--rm", *OFFLINE, "--volume=/var/lib/mockengine", "--entrypoint=sh")
    docker("run", *options, engine_image, "-c", "touch /var/lib/mockengine/state.json")


# --- the frontend's image


@pytest.fixture
def frontend(frontend_image: str) -> Iterator[Container]:
    """A frontend that waits for an engine, with no network but its own and no rights; its health is asked by hand."""
    with container(frontend_image, options=(*OFFLINE, "--no-healthcheck")) as running:
        running.wait_for_line("waiting for engines")
        yield running


@pytest.fixture
def joined(frontend: Container, engine_image: str) -> Iterator[Container]:
    """An engine in the frontend's network that has joined it."""
    options = (*HARDENED, f"--network=container:{frontend.name}", "--no-healthcheck")
    with container(engine_image, options=options) as running:
        running.wait_for_line("engine ready")
        frontend.wait_for_line("ready to accept requests")
        yield running


def test_the_frontend_image_is_the_executable_and_little_else(frontend_image: str) -> None:
    assert 40 * MB < _bytes_above_base(frontend_image) <= 70 * MB
    assert _in_image(frontend_image, "vllm-rs", "--version") == f"vllm-rs {DEFAULT_VERSION}"
    assert _in_image(frontend_image, "sh", "-c", "command -v python3 pip gcc curl || true") == ""


def test_the_frontend_image_says_what_it_is_and_how_it_is_run(frontend_image: str) -> None:
    config = _config(frontend_image)
    assert config["User"] == USER
    assert config["Entrypoint"] == ["vllm-rs"]
    assert config["Cmd"][:4] == ["serve", "/models/mock", "--served-model-name", "mock"]
    assert config["Healthcheck"]["Test"] == ["CMD", "frontend-health"]
    assert config["ExposedPorts"] == {"8000/tcp": {}, "29550/tcp": {}}
    assert config["Labels"]["org.opencontainers.image.version"] == DEFAULT_VERSION


@pytest.mark.parametrize("folder", [MODEL, MOE_MODEL], ids=lambda path: path.name)
def test_the_bundled_model_folders_can_be_read_whole(folder: Any, frontend_image: str) -> None:
    place = "/models/mock" if folder == MODEL else "/models/mock-moe"
    files = sorted(path.name for path in folder.glob("*.json"))
    assert len(files) == 4
    digests = _in_image(frontend_image, "sha256sum", *(f"{place}/{name}" for name in files)).splitlines()
    wanted = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {place}/{name}" for name in files]
    assert digests == wanted


def test_the_notices_of_what_is_bundled_are_in_the_frontend_image(frontend_image: str) -> None:
    assert "Apache License" in _in_image(frontend_image, "cat", "/usr/share/doc/vllm/LICENSE")
    assert "WordNet" in _in_image(frontend_image, "cat", "/models/mock/README.md")


def test_the_frontend_image_can_talk_to_a_model_hub(frontend_image: str) -> None:
    assert "BEGIN CERTIFICATE" in _in_image(frontend_image, "cat", "/etc/ssl/certs/ca-certificates.crt")
    options = ("--rm", *OFFLINE, "--volume=/models/hub", "--entrypoint=sh")
    docker("run", *options, frontend_image, "-c", 'touch "$HF_HOME/x"')


def test_the_frontend_stops_within_a_second(frontend_image: str) -> None:
    times = _times_to_stop(frontend_image, "waiting for engines")
    assert min(times) < 1, times


def test_a_frontend_without_an_engine_is_not_healthy_and_goes_on(frontend: Container) -> None:
    checked = frontend.run("frontend-health")
    assert checked.returncode == 1
    assert "no engine has joined" in checked.stderr
    assert frontend.state["Status"] == "running"


def test_an_answer_that_is_not_http_is_not_healthy_and_ends_nothing(frontend: Container) -> None:
    checked = frontend.run("env", "HEALTH_PORT=29550", "frontend-health")
    assert checked.returncode == 1
    assert frontend.state["Status"] == "running"


@pytest.mark.usefixtures("joined")
def test_a_frontend_with_an_engine_is_healthy(frontend: Container) -> None:
    checked = frontend.run("frontend-health")
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_health_check_ends_a_frontend_whose_engine_has_gone(frontend: Container, joined: Container) -> None:
    docker("stop", joined.name)
    checked = frontend.run("frontend-health")
    assert "ended the frontend" in checked.stderr
    assert frontend.wait_for_end() == 0


def test_the_health_check_can_be_told_to_end_nothing(frontend: Container, joined: Container) -> None:
    docker("stop", joined.name)
    checked = frontend.run("env", "EXIT_WHEN_UNHEALTHY=0", "frontend-health")
    assert checked.returncode == 1
    assert "engine has gone" in checked.stderr
    assert frontend.run("env", "EXIT_WHEN_UNHEALTHY=0", "frontend-health").returncode == 1
    assert frontend.state["Status"] == "running"


def test_docker_itself_finds_the_frontend_healthy_and_ends_it_when_its_engine_has_gone(
    frontend_image: str, engine_image: str
) -> None:
    with container(frontend_image, options=(*OFFLINE, "--health-interval=500ms")) as frontend:
        options = (*HARDENED, f"--network=container:{frontend.name}", "--no-healthcheck")
        with container(engine_image, options=options) as engine:
            frontend.wait_for_health("healthy")
            docker("stop", engine.name)
        assert frontend.wait_for_end() == 0
