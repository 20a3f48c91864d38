# SPDX-License-Identifier: Apache-2.0
"""The compose files say what the docs, the images and the settings say; no Docker needed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from mockengine import __version__
from mockengine.settings import describe
from mockengine.settings_docs import COMPOSE_DEFAULTS
from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from mockengine.testing.processes import free_port
from tests.support.compose import BASE, FOLDER, VARIANTS, command, listed_variables, read, variant
from tests.support.stack import MODEL, MODEL_NAME, ROOT, serving

OBSERVABILITY = FOLDER / "observability"
FILES = [BASE, *map(variant, VARIANTS)]
_VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::-((?:[^{}]|\$\{[^{}]*\})*))?\}")


def _services(path: Path) -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = read(path)["services"]
    return services


def _used(text: str) -> Iterator[tuple[str, str]]:
    """Every variable with its default, also those within a default."""
    for name, default in _VARIABLE.findall(text):
        yield name, default
        yield from _used(default)


def test_the_variants_are_those_that_the_docs_name() -> None:
    assert VARIANTS == ["dp", "load", "observability", "python", "scale"]
    page = (ROOT / "docs" / "docker.md").read_text(encoding="utf-8")
    assert [name for name in VARIANTS if f"`{name}.yml`" not in page] == []


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_begins_with_the_command_that_starts_it(name: str) -> None:
    text = variant(name).read_text(encoding="utf-8")

    assert f"\n#   docker compose -f docker-compose.yml -f deploy/compose/{name}.yml up\n" in text.split("services:")[0]


def test_every_setting_reaches_the_engine() -> None:
    given = _services(BASE)["engine"]["environment"]

    assert set(given) == {setting.variable for setting in describe().values()}
    assert {variable for variable, value in given.items() if value != f"${{{variable}:-}}"} == {
        describe()[name].variable for name in COMPOSE_DEFAULTS
    }
    for name, expected in COMPOSE_DEFAULTS.items():
        variable = describe()[name].variable
        default = f"${{VLLM_VERSION:-{expected}}}" if name == "vllm_version" else expected
        assert given[variable] == f"${{{variable}:-{default}}}"


def test_images_are_those_of_this_version() -> None:
    services = _services(BASE)

    assert services["engine"]["image"] == f"mockengine:{__version__}"
    assert services["frontend"]["image"] == f"mockengine-frontend:${{VLLM_VERSION:-{DEFAULT_VERSION}}}"
    assert _services(variant("python"))["frontend"]["image"] == (
        f"vllm/vllm-openai-cpu:v${{VLLM_VERSION:-{DEFAULT_VERSION}}}"
    )


def test_every_variable_is_listed_with_its_default() -> None:
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    used = {pair for path in FILES for pair in _used(path.read_text(encoding="utf-8"))}
    names_alone = {
        name
        for path in FILES
        for service in _services(path).values()
        for name, value in service.get("environment", {}).items()
        if value is None
    }

    assert {name for name, _ in used} | names_alone == set(listed_variables())
    plain = {(name, default) for name, default in used if default and "$" not in default}
    assert len(plain) > 10
    # Empty in the example: which model it is decides its name too.
    assert {pair for pair in plain if "\n#{}={}\n".format(*pair) not in example} == {
        ("MODEL", "mock"),
        ("MODEL", "/models/mock"),
    }


def test_everything_that_runs_is_hardened_and_kept_within_limits() -> None:
    judged = []
    for path in FILES:
        for name, service in _services(path).items():
            if "extends" in service or (path != BASE and name in _services(BASE)):
                continue
            judged.append(name)
            assert service["read_only"] is True, name
            assert service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
            assert service["restart"] == "unless-stopped", name
            assert {"mem_limit", "pids_limit"} <= set(service), name
            assert service["logging"] == {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}}, name
            assert not {"privileged", "network_mode", "pid", "cap_add", "user"} & set(service), name
    assert sorted(judged) == ["engine", "frontend", "grafana", "prometheus"]


def test_variants_do_not_weaken_what_they_change() -> None:
    for name in VARIANTS:
        for service in _services(variant(name)).values():
            if service.get("image", "").startswith(("prom/", "grafana/")):
                continue
            assert not {"read_only", "cap_drop", "cap_add", "security_opt", "privileged", "user"} & set(service), name


def test_nobody_waits_for_health_but_a_client() -> None:
    waiting = {name for path in FILES for name, service in _services(path).items() if "depends_on" in service}

    assert waiting == {"load"}


def test_ports_are_published_on_this_machine_only_unless_told_otherwise() -> None:
    published = [port for path in FILES for service in _services(path).values() for port in service.get("ports") or []]

    assert sorted(published) == [
        "${HTTP_ADDRESS:-127.0.0.1}:${HTTP_PORT:-8000}:8000",
        "127.0.0.1:${GRAFANA_PORT:-3000}:3000",
        "127.0.0.1:${PROMETHEUS_PORT:-9090}:9090",
    ]


@pytest.mark.parametrize(("name", "ranks"), [("dp", "${DATA_PARALLEL_SIZE:-4}"), ("scale", "4")])
def test_more_ranks_change_their_number_and_nothing_else(name: str, ranks: str) -> None:
    changed = command(_services(variant(name))["frontend"])

    base = command(_services(BASE)["frontend"])
    assert [one for one in zip(changed, base, strict=True) if one[0] != one[1]] == [
        (f"--data-parallel-size={ranks}", "--data-parallel-size=1")
    ]


def test_the_frontend_and_the_engine_of_dp_have_the_same_ranks() -> None:
    services = _services(variant("dp"))

    ranks = services["engine"]["environment"]["MOCKENGINE_ENGINE_COUNT"]
    assert f"--data-parallel-size={ranks}" in command(services["frontend"])


def test_the_frontend_drains_for_less_than_docker_waits() -> None:
    frontend = _services(BASE)["frontend"]

    [drains] = [flag for flag in command(frontend) if flag.startswith("--shutdown-timeout=")]
    assert drains == "--shutdown-timeout=${FRONTEND_SHUTDOWN_TIMEOUT_S:-30}"
    assert int(frontend["stop_grace_period"].removesuffix("s")) > 30


def test_two_engines_play_every_rank_once() -> None:
    services = _services(variant("scale"))
    ranks: list[int] = []
    for name in ("engine", "engine-2"):
        given = services[name]["environment"]
        start, count = int(given["MOCKENGINE_START_RANK"]), int(given["MOCKENGINE_ENGINE_COUNT"])
        ranks += range(start, start + count)
        assert given["MOCKENGINE_DATA_PARALLEL_SIZE"] == "4"

    assert ranks == [0, 1, 2, 3]
    assert services["engine-2"]["volumes"] != _services(BASE)["engine"]["volumes"]


def test_files_that_are_mounted_exist() -> None:
    mounted = [
        volume.split(":")[0]
        for path in FILES
        for service in _services(path).values()
        for volume in service.get("volumes", [])
        if volume.startswith(".")
    ]

    assert len(mounted) == 7
    assert [path for path in mounted if not (ROOT / path).exists()] == []


def test_images_of_others_are_pinned() -> None:
    services = _services(variant("observability"))

    assert {name: re.sub(r"\d+\.\d+\.\d+$", "X", service["image"]) for name, service in services.items()} == {
        "prometheus": "prom/prometheus:vX",
        "grafana": "grafana/grafana:X",
    }


def _jobs() -> dict[str, dict[str, Any]]:
    config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text(encoding="utf-8"))
    return {job["job_name"]: job["dns_sd_configs"][0] for job in config["scrape_configs"]}


def test_prometheus_asks_the_services_at_their_ports() -> None:
    [port] = [
        int(flag.removeprefix("--port=")) for flag in command(_services(BASE)["frontend"]) if flag.startswith("--port=")
    ]

    assert {name: (job["names"], job["port"]) for name, job in _jobs().items()} == {
        "frontend": (["frontend"], port),
        "engine": (["engine"], int(COMPOSE_DEFAULTS["admin_port"])),
    }
    assert _services(variant("scale"))["engine-2"]["networks"]["default"]["aliases"] == ["engine"]


def test_grafana_asks_prometheus_and_nobody_can_change_what_is_given() -> None:
    source = yaml.safe_load((OBSERVABILITY / "datasource.yml").read_text(encoding="utf-8"))["datasources"][0]
    provider = yaml.safe_load((OBSERVABILITY / "dashboards.yml").read_text(encoding="utf-8"))["providers"][0]
    given = _services(variant("observability"))["grafana"]["environment"]
    mounts = [volume.split(":")[1] for volume in _services(variant("observability"))["grafana"]["volumes"]]

    assert (source["url"], source["editable"]) == ("http://prometheus:9090", False)
    assert (provider["disableDeletion"], provider["allowUiUpdates"]) == (True, False)
    assert given["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"].startswith(provider["options"]["path"] + "/")
    assert given["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in mounts
    assert given["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    for panel in _panels():
        assert panel["type"] == "row" or panel["datasource"]["uid"] == source["uid"]


def _panels() -> list[dict[str, Any]]:
    dashboard = json.loads((OBSERVABILITY / "dashboard.json").read_text(encoding="utf-8"))
    assert dashboard["editable"] is False
    panels: list[dict[str, Any]] = dashboard["panels"]
    return panels


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = _panels()
    places = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]

    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    assert len(set(places)) == len(places)
    assert max(x for x, _ in places) < 24


def _queries() -> list[str]:
    return [target["expr"] for panel in _panels() for target in panel.get("targets", [])]


@pytest.mark.rust_frontend
def test_every_metric_of_the_dashboard_exists() -> None:
    port = free_port()
    with (
        RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL) as frontend,
        serving(frontend, f"--admin-port={port}") as stack,
    ):
        stack.client().completions.create(model=MODEL_NAME, prompt="Hello", max_tokens=3)
        texts = [stack.get("/metrics").text, httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text]
    exported = "\n".join(texts)
    names = set(re.findall(r"^([a-z0-9_:]+)[ {]", exported, re.MULTILINE))

    asked = {name for query in _queries() for name in re.findall(r"(?:vllm:|mockengine_|http_)[a-z0-9_:]+", query)}
    assert len(asked) > 20
    assert asked - names == set()
    grouped = [
        pair for query in _queries() for pair in re.findall(r"by \(([a-z_, ]+)\) \((?:rate\()?([a-z0-9_:]+)", query)
    ]
    assert len(grouped) > 20
    for labels, name in grouped:
        # One request is enough for every one of them to have a line.
        lines = re.findall(rf"^{name}\{{(.*)\}} ", exported, re.MULTILINE)
        assert lines != [], name
        assert [label for label in labels.split(", ") if not re.search(rf'\b{label}="', lines[0])] == [], name
