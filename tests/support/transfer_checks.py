# SPDX-License-Identifier: Apache-2.0
"""What a router does with a prefill and a decode instance, as vLLM's toy proxy does it. One function per behaviour.

Both instances are ranks behind one frontend, which tells them apart no less than two frontends would.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import pytest

from tests.support.load import BLOCK_TOKENS, NUM_GPU_BLOCKS, Metrics
from tests.support.load_checks import Fleet

_TRANSFER_S = 0.4
_PER_TOKEN_S = 0.001
_HOLD_S = 0.5
_TOKENS = 100

ENGINES: dict[str, Sequence[str]] = {
    "prefill": ("--kv-role=producer", f"--kv-hold-ms={_HOLD_S}s", "--kv-engine-id=prefill"),
    "decode": (
        "--kv-role=consumer",
        f"--kv-transfer-ms={_TRANSFER_S}s",
        f"--kv-transfer-ms-per-token={_PER_TOKEN_S}s",
    ),
}
FRONTEND_ARGS = ("--enable-prompt-tokens-details",)
"""Has frontends say how many tokens were cached."""

_SEND = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def a_router_sends_a_prompt_here_and_what_is_answered_there(fleet: Fleet) -> None:
    prefill, decode, prompt = fleet["prefill"], fleet["decode"], list(range(3_000, 3_000 + _TOKENS))
    before = decode.metrics()
    first = prefill.ask(prompt, 1, kv_transfer_params=_SEND)
    params = first["kv_transfer_params"]
    assert params | {
        "remote_request_id": None,
        "remote_block_ids": [len(ids) for ids in params["remote_block_ids"]],
    } == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [7],
        "remote_engine_id": f"prefill_dp{prefill.number}",
        "remote_request_id": None,
        "remote_host": "localhost",
        "remote_port": 5_600 + prefill.number,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": _TOKENS,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_registration_generation": 1,
        "remote_prefill_cached_tokens": 0,
    }
    sent = time.monotonic()
    reply = decode.ask(prompt, 8, kv_transfer_params=params)
    assert time.monotonic() - sent >= _TRANSFER_S + _TOKENS * _PER_TOKEN_S
    assert _text(reply) == _text(fleet["chunks of 1"].ask(prompt, 8))
    # Frontends say what the producer had cached: all that it has not was computed somewhere.
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    _has_loaded(before, _ended(fleet, before, "decode"), local=0, external=_TOKENS)


def blocks_are_kept_for_a_while(fleet: Fleet) -> None:
    prefill = fleet["prefill"]
    before = prefill.metrics()
    prefill.ask(list(range(4_000, 4_000 + _TOKENS)), 1, kv_transfer_params=_SEND)
    kept = prefill.wait_for(lambda said: said.usage > 0 and not said.running, "kept blocks")
    assert kept.usage == pytest.approx(-(-_TOKENS // BLOCK_TOKENS) / (NUM_GPU_BLOCKS - 1))
    _ended(fleet, before, "prefill")


def only_what_is_missing_is_loaded(fleet: Fleet) -> None:
    prefill, decode, prompt = fleet["prefill"], fleet["decode"], list(range(5_000, 5_000 + _TOKENS))
    for cached in (0, 96):
        before = decode.metrics()
        params = prefill.ask(prompt, 1, kv_transfer_params=_SEND)["kv_transfer_params"]
        assert params["remote_prefill_cached_tokens"] == cached
        reply = decode.ask(prompt, 2, kv_transfer_params=params)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        _has_loaded(before, _ended(fleet, before, "decode"), local=cached, external=_TOKENS - cached)


def params_that_cannot_be_followed_cost_the_request_nothing_else(fleet: Fleet) -> None:
    decode = fleet["decode"]
    broken: list[Mapping[str, Any]] = [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_block_ids": "all", "remote_host": 5},
    ]
    for number, params in enumerate(broken):
        before = decode.metrics()
        decode.ask(list(range(6_000 + 200 * number, 6_000 + 200 * number + _TOKENS)), 2, kv_transfer_params=params)
        _has_loaded(before, _ended(fleet, before, "decode"), local=0, external=0)


def who_gives_up_while_it_loads_leaves_nothing_behind(fleet: Fleet) -> None:
    prefill, decode, prompt = fleet["prefill"], fleet["decode"], list(range(7_000, 7_000 + _TOKENS))
    params = prefill.ask(prompt, 1, kv_transfer_params=_SEND)["kv_transfer_params"]
    with pytest.raises(httpx.ReadTimeout):
        decode.ask(prompt, 8, patience_s=_TRANSFER_S / 2, kv_transfer_params=params)
    decode.wait_for(lambda said: said.usage > 0, "blocks that are being loaded")
    decode.wait_for(lambda said: said.is_idle, "the end of that")


def _text(reply: Mapping[str, Any]) -> str:
    return str(reply["choices"][0]["text"])


def _ended(fleet: Fleet, before: Metrics, name: str) -> Metrics:
    """Wait until one request more has ended and nothing is held any more."""
    expected = before.value("vllm:request_success_total") + 1
    return fleet[name].wait_for(
        lambda said: said.value("vllm:request_success_total") == expected and said.is_idle, "the end of a request"
    )


def _has_loaded(before: Metrics, after: Metrics, local: int, external: int) -> None:
    """Check what a frontend says of one request whose prompt was partly cached, here and by another instance."""

    def counted(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    by_source = {
        source: counted("vllm:prompt_tokens_by_source_total", source=source)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert by_source == {
        "local_compute": _TOKENS - local - external,
        "local_cache_hit": local,
        "external_kv_transfer": external,
    }
    assert counted("vllm:prompt_tokens_total") == _TOKENS
    assert counted("vllm:prompt_tokens_cached_total") == local + external
    assert counted("vllm:external_prefix_cache_queries_total") == _TOKENS - local
    assert counted("vllm:external_prefix_cache_hits_total") == external
    assert counted("vllm:prompt_tokens_cached_by_source_total", source="p2p") == external
    for name in ("vllm:time_to_first_token_seconds", "vllm:request_queue_time_seconds"):
        took = after.histogram(name).since(before.histogram(name))
        assert took.count == 1
        assert took.total >= (_TRANSFER_S + external * _PER_TOKEN_S if external else 0)


ALL: list[Callable[[Fleet], None]] = [
    a_router_sends_a_prompt_here_and_what_is_answered_there,
    blocks_are_kept_for_a_while,
    only_what_is_missing_is_loaded,
    params_that_cannot_be_followed_cost_the_request_nothing_else,
    who_gives_up_while_it_loads_leaves_nothing_behind,
]
