# SPDX-License-Identifier: Apache-2.0
"""The load model behind a real Rust frontend, and its pace where no frontend is in the way."""

import time
from collections.abc import Callable, Iterator

import msgpack
import pytest

from mockengine.testing.double import DEADLINE_S, FrontendDouble
from mockengine.testing.engine import EngineProcess
from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from mockengine.testing.sockets import receive
from tests.support import load_checks, transfer_checks
from tests.support.load import fleet
from tests.support.load_checks import PACED_ITL_S, PACED_TTFT_S, Fleet, quietest
from tests.support.stack import MODEL


@pytest.fixture(scope="module")
def rust_fleet() -> Iterator[Fleet]:
    executable = rust_frontend(DEFAULT_VERSION)

    def start(size: int) -> RustFrontend:
        return RustFrontend(executable, MODEL, data_parallel_size=size, extra_args=transfer_checks.FRONTEND_ARGS)

    with fleet(start, load_checks.ENGINES | transfer_checks.ENGINES) as ranks:
        yield ranks


@pytest.mark.rust_frontend
@pytest.mark.parametrize("check", [*load_checks.ALL, *load_checks.RUST], ids=lambda check: check.__name__)
def test_load(rust_fleet: Fleet, check: Callable[[Fleet], None]) -> None:
    check(rust_fleet)


@pytest.mark.rust_frontend
@pytest.mark.parametrize("check", transfer_checks.ALL, ids=lambda check: check.__name__)
def test_transfers(rust_fleet: Fleet, check: Callable[[Fleet], None]) -> None:
    check(rust_fleet)


@pytest.mark.parametrize("requests", [1, 256])
def test_pace_at_the_engines_output(requests: int) -> None:
    prompt_tokens, reply_tokens = 8, 200
    per_prompt_token_s = (PACED_TTFT_S - PACED_ITL_S) / (requests * prompt_tokens)
    with (
        FrontendDouble() as double,
        EngineProcess(
            *(f"--handshake-address={double.handshake_address}", "--no-log-requests"),
            *("--load-model=vllm", "--no-enable-prefix-caching", "--timing=step"),
            *(f"--step-base-ms={PACED_ITL_S}s", f"--step-ms-per-prefill-token={per_prompt_token_s}s"),
        ),
    ):
        double.handshake()

        def measure(attempt: int) -> float:
            # While its prompt is computed all others arrive, so that theirs are computed together.
            double.add(f"{attempt}-first", prompt=[0] * (requests * prompt_tokens), max_tokens=1)
            sent_s = {}
            for number in range(requests):
                request_id = f"{attempt}-{number}"
                sent_s[request_id] = time.monotonic()
                double.add(request_id, prompt=[1 + number] * prompt_tokens, max_tokens=reply_tokens)
            heard_s = _hear(double, 1 + requests * reply_tokens)
            assert all(heard_s[request_id][0] - sent >= PACED_TTFT_S for request_id, sent in sent_s.items())
            # Whoever came with the first one says nothing while the prompts of the others are computed.
            all_speak_s = max(heard_s[request_id][0] for request_id in sent_s)
            paces = [_pace_s([at for at in heard_s[request_id] if at >= all_speak_s]) for request_id in sent_s]
            assert max(paces) - min(paces) < 0.02 * PACED_ITL_S
            return max(paces) / PACED_ITL_S

        assert 0.98 <= quietest(measure) <= 1.02


def _hear(double: FrontendDouble, tokens: int) -> dict[str, list[float]]:
    """Return when each request's outputs came, until so many tokens have.

    The double's own ears would be too slow: they judge each output of each step.
    """
    heard_s: dict[str, list[float]] = {}
    while tokens > 0:
        frames = receive(double._outputs[0], DEADLINE_S, "outputs")
        now = time.monotonic()
        for output in msgpack.unpackb(frames[0])[1]:
            heard_s.setdefault(output[0], []).append(now)
            tokens -= len(output[1])
    return heard_s


def _pace_s(moments: list[float]) -> float:
    return (moments[-1] - moments[0]) / (len(moments) - 1)
