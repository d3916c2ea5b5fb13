"""The page at `/`: its files, and in headless Chromium where there is one, a person chatting."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.errors import ApiError
from gateway.front import FrontOptions
from tests.fake_ring import Script
from tests.front_server import Served, run_front

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with run_front(tmp_path_factory.mktemp("tiny"), FrontOptions()) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "media_type"),
    [("/", "text/html"), ("/page/style.css", "text/css"), ("/page/app.js", "text/javascript")],
)
def test_files_come_with_their_type_and_a_strict_policy(served: Served, path: str, media_type: str) -> None:
    response = served.http.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith(media_type)
    assert "default-src 'self'" in response.headers["content-security-policy"]


def test_nothing_else_is_served_from_the_folder(served: Served) -> None:
    for path in ("/page/__init__.py", "/page/index.html", "/page/../app.py", "/page/"):
        assert served.http.get(path).status_code == 404, path


def test_the_page_asks_for_a_key_like_everything_else(tmp_path: Path) -> None:
    with run_front(tmp_path, FrontOptions(api_keys=("a-key",))) as served:
        for path in ("/", "/page/app.js"):
            assert served.http.get(path).status_code == 401
            assert served.http.get(path, headers={"authorization": "Bearer a-key"}).status_code == 200


@needs_chromium
def test_a_person_chats(served: Served) -> None:
    from playwright.sync_api import sync_playwright

    end = min(served.tokenizer.eos_token_ids)
    served.ring.reset(Script(token_ids=[*served.ids("Hello <b>there</b>, friend."), end], delay_s=0.02))
    troubles: list[str] = []
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = browser.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.goto(served.url)
        page.wait_for_function("document.querySelector('#model').textContent === 'tiny'")
        page.fill("#prompt", "Hi")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".timing")
        assert page.inner_text("article.user") == "Hi"
        assert page.inner_text("article.assistant") == "Hello <b>there</b>, friend."  # text, never HTML
        assert page.locator("article.assistant .piece").count() > 3  # as tokens arrived
        assert [part.get_attribute("class") for part in page.locator(".bar i").all()] == [
            "queue", "prefill", "transfer", "decode",
        ]  # fmt: skip
        widths = [part.bounding_box() for part in page.locator(".bar i").all()]
        assert all(box is not None and box["width"] > 0 for box in widths)

        served.ring.reset(Script(error=ApiError(503, "no decode worker is alive", None, "not_ready")))
        page.fill("#prompt", "Again")
        page.click("#send")
        page.wait_for_selector("article.error")
        assert "no decode worker is alive" in page.inner_text("article.error")
        sent = served.ring.generations[-1]
        assert sent.prompt_ids  # the whole conversation went along

        served.ring.reset(Script(token_ids=served.ids("one two"), is_hanging=True))
        page.fill("#prompt", "Stop me")
        page.click("#send")
        page.wait_for_selector("article.assistant >> text=one two")
        page.click("#stop")
        assert served.ring.wait_ending(10) == "closed"
        page.wait_for_selector("#send", state="visible")

        page.click("#new")
        assert page.locator("article").count() == 0
        browser.close()
    assert [trouble for trouble in troubles if "503" not in trouble] == []
