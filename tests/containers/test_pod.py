# SPDX-License-Identifier: Apache-2.0
"""The pods of deploy/kubernetes, run as their rendered manifests say: they serve, and whatever dies, serve again."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from uuid import uuid4

import httpx
import openai
import pytest

from tests.support.docker import container, docker
from tests.support.manifest_checks import Bundle, Workload
from tests.support.manifests import KUBERNETES, render_chart, render_kustomization
from tests.support.pod import Pod, PodContainer

pytestmark = pytest.mark.containers

MODEL = "mock"


@pytest.fixture(scope="module")
def base(engine_image: str, frontend_image: str) -> Workload:
    """The Deployment of the base, whose images are those that were built."""
    (workload,) = Bundle(render_kustomization(KUBERNETES / "base")).workloads
    assert [container["image"] for container in workload.containers] == [engine_image, frontend_image]
    return workload


@pytest.fixture(scope="module")
def running(base: Workload) -> Iterator[Pod]:
    """One pod for all: each test leaves it as it found it, serving."""
    with Pod(base.template, base.config_maps) as pod:
        yield pod


@pytest.fixture
def pod(running: Pod) -> Pod:
    running.wait_for(lambda: running.is_ready, "ready")
    return running


def ask(pod: Pod) -> str:
    """Stream a chat completion, and return its text."""
    client = openai.OpenAI(base_url=f"{pod.url('http')}/v1", api_key="none", max_retries=0, timeout=20)
    with client:
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello there"}], max_tokens=9, stream=True
        )
        chunks = [chunk.choices[0] for chunk in stream]
    assert chunks[-1].finish_reason == "length"
    return "".join(chunk.delta.content or "" for chunk in chunks)


def causes(container: PodContainer, since: int = 0) -> list[tuple[str, int]]:
    """Return what ended each life of a container after the first `since`, and its exit code."""
    return [(life.cause, life.exit_code) for life in container.lives[since:]]


def wait_for_another_life(pod: Pod, *names: str) -> None:
    """Wait until each of these containers has ended once more and the pod is ready again."""
    before = {name: len(pod.container(name).lives) for name in names}

    def healed() -> bool:
        return pod.is_ready and all(len(pod.container(name).lives) > before[name] for name in names)

    for name in names:
        pod.container(name).kill()
    pod.wait_for(healed, f"ready again without the {' and '.join(names)} that was killed")


def test_a_chat_is_streamed(pod: Pod) -> None:
    assert len(ask(pod).split()) >= 3


def test_metrics_of_both_are_served(pod: Pod) -> None:
    ask(pod)
    assert "vllm:num_requests_waiting" in httpx.get(f"{pod.url('http')}/metrics").text
    assert "mockengine_ready 1" in httpx.get(f"{pod.url('engine-admin')}/metrics").text


def test_sidecar_that_was_killed_is_replaced_and_the_frontend_stays(pod: Pod) -> None:
    engine, frontend = pod.container("engine"), pod.container("frontend")
    lives = len(engine.lives), len(frontend.lives)
    text = ask(pod)
    wait_for_another_life(pod, "engine")
    assert causes(engine, lives[0]) == [("exited", 137)]
    # The engine that came back goes on where the other one was killed.
    assert causes(frontend, lives[1]) == []
    assert ask(pod) == text


def test_frontend_that_was_killed_is_replaced_and_the_engine_stays(pod: Pod) -> None:
    engine, frontend = pod.container("engine"), pod.container("frontend")
    lives = len(engine.lives), len(frontend.lives)
    text = ask(pod)
    wait_for_another_life(pod, "frontend")
    assert causes(frontend, lives[1]) == [("exited", 137)]
    assert causes(engine, lives[0]) == []
    assert ask(pod) == text


def test_both_killed_at_once_are_replaced(pod: Pod) -> None:
    text = ask(pod)
    wait_for_another_life(pod, "engine", "frontend")
    assert ask(pod) == text


def test_pod_of_the_chart_serves_with_several_ranks(engine_image: str, frontend_image: str) -> None:
    (workload,) = Bundle(render_chart("--set=dataParallelSize=4")).workloads
    assert [container["image"] for container in workload.containers] == [engine_image, frontend_image]
    with Pod(workload.template, workload.config_maps) as pod:
        pod.wait_for(lambda: pod.is_ready, "ready")
        assert len(ask(pod).split()) >= 3
        ranks = httpx.get(f"{pod.url('engine-admin')}/ready").json()["ranks"]
        assert [rank["engine"] for rank in ranks] == [0, 1, 2, 3]


def test_frontend_of_the_chart_wants_the_key_that_helm_test_shows(engine_image: str, frontend_image: str) -> None:
    manifests = render_chart('--set-json=frontend.extraEnv=[{"name": "VLLM_API_KEY", "value": "secret"}]')
    (workload,) = Bundle(manifests).workloads
    assert [container["image"] for container in workload.containers] == [engine_image, frontend_image]
    (smoke,) = (manifest for manifest in manifests if manifest["kind"] == "Pod")
    (variable,) = smoke["spec"]["containers"][0]["env"]
    with Pod(workload.template, workload.config_maps) as pod:
        pod.wait_for(lambda: pod.is_ready, "ready")
        url = pod.url("http")
        assert httpx.get(f"{url}/v1/models").status_code == 401
        command = [sys.executable, "-m", "mockengine", "smoke", f"--url={url}"]
        environment = os.environ | {variable["name"]: variable["value"]}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr


@contextmanager
def unread_stream(pod: Pod) -> Iterator[Iterator[bytes]]:
    """Ask for more than fits into the buffers on the way, so that the request runs until the rest is read."""
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 30_000, "stream": True, "return_token_ids": True}
    small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)])
    with (
        httpx.Client(transport=small, timeout=60) as client,
        client.stream("POST", f"{pod.url('http')}/v1/completions", json=body) as response,
    ):
        pieces = response.iter_raw()
        next(pieces)
        yield pieces


def is_refused(url: str) -> bool:
    try:
        httpx.get(url, timeout=2)
    except httpx.ConnectError:
        return True
    except httpx.HTTPError:
        return False
    return False


def test_deleted_pod_ends_its_streams_first_then_the_frontend_then_the_engine(base: Workload) -> None:
    with Pod(base.template, base.config_maps) as pod:
        pod.wait_for(lambda: pod.is_ready, "ready")
        took: list[float] = []
        with unread_stream(pod) as pieces:
            deleting = threading.Thread(target=lambda: took.append(pod.delete()))
            deleting.start()
            pod.wait_for(lambda: is_refused(pod.url("http")), "closed for new clients")
            assert deleting.is_alive()
            rest = b"".join(pieces).splitlines()
        deleting.join()
        events = [line for line in rest if line]
        assert events[-1] == b"data: [DONE]"
        assert json.loads(events[-2].removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
        engine, frontend = pod.container("engine"), pod.container("frontend")
        assert [causes(engine), causes(frontend)] == [[("deleted", 0)], [("deleted", 0)]]
        (leaving,) = (line for line in engine.lives[0].log.splitlines() if '"engine leaving"' in line)
        assert json.loads(leaving)["in_flight"] == 0
        assert frontend.lives[0].at < engine.lives[0].at
        assert took[0] < pod.grace_s


@pytest.fixture
def network() -> Iterator[str]:
    name = f"mockengine-test-{uuid4().hex[:12]}"
    docker("network", "create", name)
    yield name
    docker("network", "rm", name)


@pytest.fixture(scope="module")
def separate(engine_image: str, frontend_image: str) -> list[Workload]:
    """Return the frontend and the ranks of the overlay whose engines have pods of their own."""
    workloads = Bundle(render_kustomization(KUBERNETES / "overlays" / "data-parallel")).workloads
    images = [container["image"] for workload in workloads for container in workload.containers]
    assert images == [frontend_image, engine_image]
    return workloads


@pytest.fixture
def ranks(separate: list[Workload], network: str) -> Iterator[list[Pod]]:
    """All pods of the StatefulSet."""
    _, workload = separate
    assert workload.manifest["spec"]["replicas"] == 2
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Pod(
                    workload.template,
                    workload.config_maps,
                    labels={"apps.kubernetes.io/pod-index": str(index)},
                    network=[f"--network={network}"],
                )
            )
            for index in range(2)
        ]


def frontend_at_its_service(separate: list[Workload], network: str) -> Pod:
    frontend, _ = separate
    options = [f"--network={network}", "--network-alias=mockengine-handshake"]
    return Pod(frontend.template, frontend.config_maps, network=options)


def serve(frontend: Pod, ranks: list[Pod]) -> str:
    """Wait until all are ready, and return the reply."""
    frontend.wait_for(lambda: all(pod.is_ready for pod in [frontend, *ranks]), "ready with all ranks")
    return ask(frontend)


def test_frontend_that_lost_a_rank_goes_on_with_the_one_that_replaces_it(
    separate: list[Workload], network: str, ranks: list[Pod]
) -> None:
    with frontend_at_its_service(separate, network) as pod:
        text = serve(pod, ranks)
        wait_for_another_life(ranks[1], "engine")
        assert serve(pod, ranks) == text
        assert causes(pod.container("frontend")) == []


def test_ranks_find_the_next_frontend_at_another_address_by_its_service(
    separate: list[Workload], network: str, ranks: list[Pod], engine_image: str
) -> None:
    with frontend_at_its_service(separate, network) as first:
        text = serve(first, ranks)
        taken = first.url("http")
    # What takes the address of the last frontend, so that the next one gets another.
    other = ("--entrypoint=sleep", "--no-healthcheck", f"--network={network}")
    with (
        container(engine_image, "infinity", options=other),
        frontend_at_its_service(separate, network) as second,
    ):
        assert second.url("http") != taken
        assert serve(second, ranks) == text
