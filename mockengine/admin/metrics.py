# SPDX-License-Identifier: Apache-2.0
"""The engine's own numbers for Prometheus. Those of vLLM (`vllm:…`) are the frontend's to tell."""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from mockengine.admin.view import View
from mockengine.status import LATENESS_BUCKETS_S, Counts, Lateness, Status

_PREFIX: Final = "mockengine"


def make_registry(view: View) -> CollectorRegistry:
    """Return a registry that reads the view whenever it is asked."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_EngineCollector(view))
    ProcessCollector(namespace=_PREFIX, registry=registry)
    return registry


class _EngineCollector(Collector):
    def __init__(self, view: View) -> None:
        self._view = view

    def describe(self) -> list[Metric]:
        """Say nothing in advance: the names are the engine's own."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        version = {self._view.version: 1}
        yield _gauges("build_info", "Always 1; the label tells the version.", "version", version)
        yield from _of_status(self._view.status())
        yield from _of_counts(self._view.counts)
        yield _counter("log_lines_dropped", "Lines of the log that were lost.", self._view.log_lines_dropped())


def _of_status(status: Status) -> Iterator[Metric]:
    ready_text = "1 while every rank has joined and its frontend is connected, else 0."
    yield GaugeMetricFamily(f"{_PREFIX}_ready", ready_text, value=status.is_ready)
    running = {str(rank.engine): rank.running for rank in status.ranks}
    yield _gauges("requests_running", "Requests that are stepped.", "engine", running)
    waiting = {str(rank.engine): rank.waiting for rank in status.ranks}
    yield _gauges("requests_waiting", "Requests accepted and not stepped yet.", "engine", waiting)
    buffered = {str(client): size for client, size in enumerate(status.buffered_bytes)}
    yield _gauges("buffered_bytes", "What waits for an API server that does not read.", "client", buffered)


def _of_counts(counts: Counts) -> Iterator[Metric]:
    yield _counter("joins", "Frontends joined.", counts.joins)
    yield _counter("frontends_lost", "Frontends that went away.", counts.frontends_lost)
    yield _counters("requests_finished", "Requests that ended, by how.", "finish_reason", counts.finished)
    yield _counter("requests_refused", "Requests answered with an error instead of being accepted.", counts.refused)
    yield _counter("prompt_tokens", "Tokens in the prompts of accepted requests.", counts.prompt_tokens)
    yield _counter("output_tokens", "Tokens said.", counts.output_tokens)
    yield _counters("messages_dropped", "Messages that could not be read, by what is wrong.", "reason", counts.dropped)
    stalls = {str(client): count for client, count in sorted(dict(counts.stalls).items())}
    yield _counters("client_stalls", "Times that requests waited for a client that does not read.", "client", stalls)
    yield _counters("faults", "Faults that have struck on purpose, by name.", "fault", dict(counts.faults))
    yield _lateness(counts.lateness)


def _lateness(lateness: Lateness) -> Metric:
    bounds = [*map(str, LATENESS_BUCKETS_S), "+Inf"]
    family = HistogramMetricFamily(f"{_PREFIX}_step_lateness_seconds", "How long after they were due steps were made.")
    family.add_metric([], list(zip(bounds, accumulate(lateness.buckets), strict=True)), lateness.sum_s)
    return family


def _gauges(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=[label])
    for label_value, value in values.items():
        family.add_metric([label_value], value)
    return family


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(f"{_PREFIX}_{name}", text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=[label])
    for label_value, value in values.items():
        family.add_metric([label_value], value)
    return family
