# SPDX-License-Identifier: Apache-2.0
"""The page for people, in a real browser, of an engine behind a real frontend."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Dialog, Page, expect, sync_playwright

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from mockengine.testing.processes import free_port
from tests.support.stack import MODEL, MODEL_NAME, Stack, serving

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
PHONE = {"width": 375, "height": 667}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = shutil.which("chromium")
    assert executable is not None, "there is no chromium (on Debian: apt-get install chromium)"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=[*FLAGS])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Stack, str]]:
    port = free_port()
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL, data_parallel_size=2)
    with frontend, serving(frontend, f"--admin-port={port}", "--engine-count=2", "--itl-ms=20") as stack:
        yield stack, f"http://127.0.0.1:{port}"


@pytest.fixture
def page(browser: Browser, served: tuple[Stack, str]) -> Iterator[Page]:
    """The page, on which nothing may go wrong."""
    _, url = served
    with browser.new_context() as context:
        page = context.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(url)
        yield page
        assert problems == []
    httpx.delete(f"{url}/v1/faults", trust_env=False)


def _put(url: str, **rule: object) -> None:
    assert httpx.post(f"{url}/v1/faults", json=rule, trust_env=False).status_code == 200


def _status(stack: Stack) -> int:
    body = {"model": MODEL_NAME, "prompt": "Hi", "max_tokens": 2}
    return httpx.post(f"{stack.url}/v1/completions", json=body, timeout=20, trust_env=False).status_code


def test_it_shows_how_the_engine_is_and_goes_on_doing_so(page: Page, served: tuple[Stack, str]) -> None:
    stack, _ = served
    expect(page.locator(".badge")).to_have_text("ready")
    expect(page.locator("table").first.locator("tbody tr")).to_have_count(2)
    with stack.client() as client:
        stream = client.completions.create(model=MODEL_NAME, prompt="Hi", max_tokens=30_000, stream=True)
        expect(page.locator("dl div", has_text="running").locator("dd")).to_have_text("1", timeout=20_000)
        expect(page.locator("dl div", has_text="tokens per second").locator("dd")).not_to_have_text("0")
        stream.close()
    expect(page.locator("dl div", has_text="running").locator("dd")).to_have_text("0", timeout=20_000)
    expect(page.get_by_label("log")).to_contain_text("request finished")


def test_a_fault_is_switched_off_and_on(page: Page, served: tuple[Stack, str]) -> None:
    stack, url = served
    _put(url, name="flaky", what={"fault": "error", "retryable": True})
    switch = page.get_by_role("switch", name="flaky")
    expect(switch).to_be_checked(timeout=20_000)
    assert _status(stack) == 503
    switch.click()
    expect(switch).not_to_be_checked()
    assert _status(stack) == 200
    switch.click()
    expect(switch).to_be_checked()
    assert _status(stack) == 503
    expect(page.locator("tr", has_text="flaky").locator("td").nth(4)).to_have_text("2")
    page.get_by_role("button", name="remove").click()
    expect(page.get_by_text("There are no rules.")).to_be_visible()
    assert _status(stack) == 200


def test_a_rank_is_drained_and_rejoins(page: Page) -> None:
    row = page.locator("tbody tr").first
    row.get_by_role("button", name="drain").click()
    expect(row).to_contain_text("drained")
    row.get_by_role("button", name="rejoin").click()
    expect(row).to_contain_text("serves")


def test_what_clients_say_is_never_taken_for_the_page(page: Page, served: tuple[Stack, str]) -> None:
    stack, url = served
    _put(url, name="odd", what={"fault": "hang"}, when={"lora": "<img src=x onerror=alert(1)>"})
    headers = {"X-Request-Id": "<script>document.title='taken'</script>"}
    body = {"model": MODEL_NAME, "prompt": "Hi", "max_tokens": 2}
    httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=20, trust_env=False)
    expect(page.get_by_text("<img src=x onerror=alert(1)>")).to_be_visible(timeout=20_000)
    assert page.locator("img").count() == 0
    assert page.title() == "mockengine"


def test_a_token_is_asked_for_once(browser: Browser) -> None:
    port = free_port()
    frontend = RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL)
    flags = (f"--admin-port={port}", "--admin-token=secret-enough")
    with frontend, serving(frontend, *flags), browser.new_context() as context:
        page = context.new_page()
        asked: list[str] = []

        def answer(dialog: Dialog) -> None:
            asked.append(dialog.message)
            dialog.accept("secret-enough")

        page.on("dialog", answer)
        page.goto(f"http://127.0.0.1:{port}")
        page.get_by_role("button", name="drain").click()
        page.get_by_role("button", name="rejoin").click()
        expect(page.locator("tbody tr").first).to_contain_text("serves")
        assert asked == ["The engine's admin_token:"]


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_it_can_be_read_on_a_phone_in_the_dark_and_in_the_light(
    browser: Browser, served: tuple[Stack, str], scheme: str, tmp_path: Path
) -> None:
    _, url = served
    with browser.new_context(viewport=PHONE, color_scheme=scheme) as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(url)
        # Nothing is wider than the screen.
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        background = page.evaluate("getComputedStyle(document.documentElement).colorScheme")
        assert background == "light dark"
        page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
        button = page.get_by_role("button", name="drain").first.bounding_box()
        assert button is not None
        assert button["height"] >= 30


def test_the_routes_are_described(browser: Browser, served: tuple[Stack, str]) -> None:
    _, url = served
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{url}/docs")
        expect(page.get_by_role("heading", name="POST /v1/faults", exact=True)).to_be_visible()
        expect(page.get_by_role("heading", name="PATCH /v1/settings")).to_be_visible()
        page.locator("summary").first.click()
        expect(page.locator("details pre").first).to_be_visible()
