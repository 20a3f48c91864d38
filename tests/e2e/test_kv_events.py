# SPDX-License-Identifier: Apache-2.0
"""A real frontend tells routers where the KV-cache events of its engine are."""

import httpx
import pytest
import zmq

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from mockengine.transport.kv_publisher import KvEventsPlan, KvPublisher
from tests.support.bare_engine import BareEngine
from tests.support.stack import MODEL

pytestmark = pytest.mark.rust_frontend


def test_frontend_names_the_endpoints_that_the_engine_has_bound() -> None:
    plan = KvEventsPlan(endpoint="tcp://*:0", replay_endpoint="tcp://*:0", topic="kv", host="127.0.0.1")
    with zmq.Context() as context, RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL) as frontend:
        publisher = KvPublisher(context, plan, rank=0)
        try:
            with BareEngine(frontend.handshake_address) as engine:
                engine.hello()
                engine.take_init()
                engine.introduce(kv_events_config=publisher.config())
                engine.ready()
                frontend.wait_healthy()
                said = httpx.get(f"{frontend.url}/kv_event_sources").json()
        finally:
            publisher.close()
    assert said == {"0": publisher.config()}
