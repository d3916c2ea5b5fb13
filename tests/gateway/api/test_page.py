"""The page at `/`: its files, and a chat in headless Chromium where installed."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, FilePayload, Page, sync_playwright

from gateway.errors import ApiError
from gateway.request.prepare import ApiOptions
from tests.support.api_server import Served, run_api
from tests.support.fake_engine_client import TIMING, Script
from tests.support.tiny_tokenizer import write_byte_level
from tests.support.vision import data_uri, picture, write_vision

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
HELD_MODELS = """
const send = fetch, held = new Promise((release) => { window.release = release; });
window.fetch = async (path, ...rest) => { if (path === "v1/models") await held; return send(path, ...rest); };
"""
BROWSERS: list[Browser] = []  # that which runs
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with run_api(tmp_path_factory.mktemp("tiny"), ApiOptions()) as served:
        yield served


SCRIPTS = ("app", "chats", "elements", "markdown", "messages", "prompt", "service", "workers")
FILES = {"": "text/html", "page/style.css": "text/css", **{f"page/{name}.js": "text/javascript" for name in SCRIPTS}}


def test_only_its_files_are_served_with_their_type_and_a_strict_policy(served: Served) -> None:
    for path, media_type in {**FILES, "page/examples.json": "application/json"}.items():
        response = served.http.get(f"/{path}")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(media_type)
        assert "default-src 'self'" in response.headers["content-security-policy"]
    for path in ("/page/__init__.py", "/page/index.html", "/page/../app.py", "/page/"):
        assert served.http.get(path).status_code == 404, path


@pytest.fixture(scope="module", autouse=True)
def chromium() -> Iterator[None]:
    """One for all tests: it takes a second of CPU to start."""
    if CHROMIUM is None:
        yield
        return
    with sync_playwright() as player:
        BROWSERS.append(player.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS)))
        yield
        BROWSERS.pop().close()


@contextmanager
def opened(url: str, width: int = 1200) -> Iterator[Page]:
    """The page in Chromium, in a profile of its own; errors on the page fail the test at the end."""
    errors: list[str] = []
    with BROWSERS[0].new_context(viewport={"width": width, "height": 600}) as profile:
        page = profile.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(url)
        yield page
    assert [error for error in errors if not re.search("status of|ERR_FAILED", error)] == []  # Chromium's own reports


def send(page: Page, text: str) -> None:
    page.wait_for_selector("#model >> text=tiny")
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def send_and_read(page: Page, text: str) -> list[dict[str, str]]:
    """The messages that the page sends."""
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, text)
    body = asked.value.post_data_json
    assert body is not None
    messages: list[dict[str, str]] = body["messages"]
    return messages


def answer_by(page: Page, *deltas: dict[str, Any]) -> None:
    """From now on each request gets these deltas."""
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def roles_and_texts(page: Page) -> list[tuple[str, str]]:
    """What is shown."""
    articles = page.locator("article").all()
    return [(str(one.get_attribute("class")), one.locator(".text").inner_text()) for one in articles]


def is_in_view(page: Page, selector: str) -> bool:
    box, size = page.locator(selector).bounding_box(), page.viewport_size
    assert box is not None and size is not None
    return box["y"] >= 0 and box["y"] + box["height"] <= size["height"] and box["x"] + box["width"] <= size["width"]


@needs_chromium
def test_a_person_enters_the_key(tmp_path: Path) -> None:
    with run_api(tmp_path, ApiOptions(api_keys=("a-key",))) as served:
        served.engine.reset(served.script("Hello."))
        with opened(served.url) as page:
            page.wait_for_selector("#error >> text=asks for an API key")
            page.fill("#key", "a-key")
            page.press("#key", "Tab")
            page.wait_for_selector("#model >> text=tiny")
            assert page.is_hidden("#error")
            send(page, "Hi")
            page.wait_for_selector("article.assistant .text >> text=Hello.")


@needs_chromium
def test_an_example_is_asked_by_a_click_and_why_nothing_is_handed_off_is_said(tmp_path: Path) -> None:
    with run_api(tmp_path, ApiOptions(), write=with_examples) as served, opened(served.url) as page:
        page.route("**/status", lambda route: route.fulfill(json={"no_hand_off": "both share cores"}))
        page.wait_for_selector("#model >> text=tiny")
        buttons = page.locator("#examples button")
        page.wait_for_selector("#examples button >> nth=1")
        assert buttons.all_inner_texts() == ["One?", "Two?"]
        served.engine.reset(replace(served.script("Hello."), timing=replace(TIMING, transport="", transfer_bytes=0)))
        buttons.nth(1).click()
        page.wait_for_selector(".timing >> text=No hand-off: both share cores.")
        assert page.inner_text("article.user .text") == "Two?" and not page.is_visible("#examples")


def with_examples(folder: Path) -> Path:
    (folder / "examples.json").write_text('["One?", "Two?"]')
    return write_byte_level(folder)


@needs_chromium
def test_a_new_chat_during_an_answer_has_nothing_of_it(served: Served) -> None:
    with opened(served.url) as page:
        served.engine.reset(Script(token_ids=served.ids("one two"), is_hanging=True))
        send(page, "Old question")
        page.wait_for_selector("article.assistant .text >> text=one two")
        page.click("#new")
        assert served.engine.wait_ending(10) == "closed"
        page.wait_for_selector("#send", state="visible")
        assert page.locator("#chat > :not(#hint)").count() == 0  # neither article nor bar
        served.engine.reset(served.script("three"))
        assert send_and_read(page, "New question") == [{"role": "user", "content": "New question"}]
        page.wait_for_selector("article.assistant .text >> text=three")


@needs_chromium
def test_a_second_enter_before_the_model_is_known_sends_nothing(served: Served) -> None:
    served.engine.reset(served.script("Hello."))
    with opened("about:blank") as page:
        page.add_init_script(HELD_MODELS)
        page.goto(served.url)
        for _ in range(2):
            page.fill("#prompt", "Hi")
            page.press("#prompt", "Enter")
        page.evaluate("release()")
        page.wait_for_selector(".timing")
        assert page.locator("article.user").count() == 1
    assert len(served.engine.generations) == 1


@needs_chromium
@pytest.mark.parametrize("width", [360, 1200])
def test_a_person_chats(served: Served, width: int) -> None:
    served.engine.reset(replace(served.script("Hello <b>there</b>, friend."), delay_s=0.02))
    with opened(served.url, width) as page:
        send(page, "Hi")
        page.wait_for_selector(".timing")
        assert page.inner_text("article.user .text") == "Hi"
        assert page.inner_text("article.assistant .text") == "Hello <b>there</b>, friend."  # text, not HTML
        assert [part.get_attribute("class") for part in page.locator(".bar i").all()] == [
            "queue", "prefill", "transfer", "decode",
        ]  # fmt: skip
        widths = [part.bounding_box() for part in page.locator(".bar i").all()]
        assert all(box is not None and box["width"] > 0 for box in widths)
        assert all(is_in_view(page, f".key span >> nth={number}") for number in range(4)), "the legend wraps"
        assert page.evaluate("document.documentElement.scrollWidth") <= width

        served.engine.reset(Script(token_ids=served.ids("one two"), is_hanging=True))
        send(page, "Stop me")
        page.wait_for_selector("article.assistant .text >> text=one two")
        page.click("#stop")
        assert served.engine.wait_ending(10) == "closed"
        page.wait_for_selector("#send", state="visible")
        if page.is_visible("#menu"):
            page.click("#menu")
        page.click("#new")
        assert page.locator("article").count() == 0


@needs_chromium
def test_an_error_is_in_view_and_the_prompt_can_be_sent_again(served: Served) -> None:
    with opened(served.url, 360) as page:
        served.engine.reset(served.script("a\n" * 40))
        send(page, "A long answer")
        page.wait_for_selector(".timing")
        served.engine.reset(Script(error=ApiError(503, "no decode worker is alive", None, "not_ready")))
        send(page, "Again")
        page.wait_for_selector("#error >> text=no decode worker is alive")
        assert is_in_view(page, "#error") and is_in_view(page, "#send")
        assert page.input_value("#prompt") == "Again" and page.locator("article.user").count() == 1
        served.engine.reset(served.script("Hello."))
        messages = send_and_read(page, page.input_value("#prompt"))
        assert [one["role"] for one in messages] == ["user", "assistant", "user"], "the whole conversation is sent"
        page.wait_for_selector("article.assistant .text >> text=Hello.")
        assert page.is_hidden("#error")


@needs_chromium
def test_a_chat_survives_a_reload(served: Served) -> None:
    with opened(served.url) as page:
        served.engine.reset(served.script("Hello."))
        send(page, "Hi")
        page.wait_for_selector(".timing")
        served.engine.reset(Script(is_hanging=True))
        send(page, "Cut off")
        assert served.engine.hanging.get(timeout=60)
        page.reload()
        assert page.locator("article .text").all_inner_texts() == ["Hi", "Hello."]
        assert page.input_value("#prompt") == "Cut off" and page.is_hidden("#hint")
        page.click("#new")
        page.reload()
        assert page.locator("article").count() == 0 and page.is_visible("#hint")


@needs_chromium
def test_conversations_stay_in_the_browser_until_they_are_deleted(served: Served) -> None:
    with opened(served.url) as page:
        for question, answer in (("First question", "One."), ("Second question", "Two.")):
            page.click("#new")
            served.engine.reset(served.script(answer))
            send(page, question)
            page.wait_for_selector(".timing")
        another = page.context.new_page()
        another.goto(served.url)
        assert another.locator("article").count() == 0, "a new tab begins anew"
        assert another.locator("#chats .chat").all_inner_texts() == ["Second question", "First question"]
        another.click("#chats .chat >> nth=1")
        assert roles_and_texts(another) == [("user", "First question"), ("assistant", "One.")]
        assert another.locator(".bar").count() == 1 and another.inner_text("[aria-current]") == "First question"
        another.once("dialog", lambda dialog: dialog.dismiss())
        another.click("[aria-label='Delete First question']")
        assert another.locator("#chats .chat").count() == 2
        another.once("dialog", lambda dialog: dialog.accept())
        another.click("[aria-label='Delete First question']")
        assert another.locator("#chats .chat").all_inner_texts() == ["Second question"]
        assert another.locator("article").count() == 0 and another.is_visible("#hint")
        page.wait_for_function("document.querySelectorAll('#chats .chat').length === 1")  # the other tab hears of it
        page.evaluate(
            "() => void (Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); })"
        )
        served.engine.reset(served.script("Three."))
        send(page, "More")
        page.wait_for_selector("#error >> text=This browser keeps no more")
        page.wait_for_selector("article.assistant .text >> text=Three.")


@needs_chromium
def test_messages_are_edited_and_answers_tried_again(served: Served) -> None:
    with opened(served.url) as page:
        for question, answer in (("One", "First."), ("Two", "Second.")):
            served.engine.reset(served.script(answer))
            send(page, question)
            page.wait_for_selector(f"article.assistant .text >> text={answer}")
            page.wait_for_selector("#send", state="visible")
        before = roles_and_texts(page)
        page.press("#prompt", "ArrowUp")
        assert page.input_value("#prompt") == "Two" and page.is_visible("#editing"), "the last one"
        page.press("#prompt", "Escape")
        assert page.input_value("#prompt") == "" and page.is_hidden("#editing") and roles_and_texts(page) == before

        page.click("article.user >> nth=0 >> text=Edit")
        served.engine.reset(Script(error=ApiError(503, "no decode worker is alive", None, "not_ready")))
        send(page, "Three")
        page.wait_for_selector("#error >> text=no decode worker is alive")
        assert roles_and_texts(page) == before, "nothing is lost"
        assert page.input_value("#prompt") == "Three" and page.is_visible("#editing")
        served.engine.reset(served.script("Third."))
        assert send_and_read(page, page.input_value("#prompt")) == [{"role": "user", "content": "Three"}]
        page.wait_for_selector("article.assistant .text >> text=Third.")
        page.wait_for_selector("#send", state="visible")
        assert roles_and_texts(page) == [("user", "Three"), ("assistant", "Third.")]

        served.engine.reset(served.script("Fourth."))
        page.click("article.assistant >> text=Retry")
        page.wait_for_selector("article.assistant .text >> text=Fourth.")
        assert roles_and_texts(page) == [("user", "Three"), ("assistant", "Fourth.")]


MARKDOWN = """\
# Title with `code`
A *word*, **two words**, ~~none~~, snake_case_name and 2 * 3 * 4.
A [good](https://example.org/a_b_c) link, a [bad](javascript:alert(1)) one, https://example.org/x.

1. one
2. two
   - nested **bold**

   more of two
3. three

| a | b |
|---|--:|
| 1 | x \\| y |
| 2 | 3 | 4 |

> quoted
> - item

```html
<script>alert("in code")</script>
```
<img src=x onerror="document.title='owned'"><script>document.title = "owned"</script>
![picture](https://example.org/p.png)
---
```python
unfinished = 1"""


@needs_chromium
def test_markdown_is_shown_and_html_stays_text(served: Served) -> None:
    with opened(served.url) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        served.engine.reset(served.script(MARKDOWN))
        send(page, "Hi")
        page.wait_for_selector(".timing")
        text = page.locator("article.assistant .text")
        assert text.locator("img, script, iframe, style").count() == 0 and page.title() == "Baton"
        assert [one.get_attribute("href") for one in text.locator("a").all()] == [
            "https://example.org/a_b_c", "https://example.org/x", "https://example.org/p.png",
        ]  # fmt: skip
        assert text.locator("h3").inner_text() == "Title with code"
        assert text.locator("em").all_inner_texts() == ["word"]
        assert text.locator("strong").all_inner_texts() == ["two words", "bold"]
        assert text.locator(":scope > ol > li").count() == 3 and text.locator("ol > li > ul > li").count() == 1
        assert text.locator("td").all_inner_texts() == ["1", "x | y", "", "2", "3", "4"]
        assert text.locator("blockquote li").inner_text() == "item" and text.locator("hr").count() == 1
        shown = text.inner_text()
        assert "[bad](javascript:alert(1))" in shown and "onerror=\"document.title='owned'\"" in shown
        assert text.locator("pre").all_inner_texts() == ['<script>alert("in code")</script>', "unfinished = 1"]
        page.click(".codebar >> nth=0 >> text=Copy")
        page.wait_for_selector(".codebar >> nth=0 >> text=Copied")
        assert page.evaluate("navigator.clipboard.readText()") == '<script>alert("in code")</script>'
        page.click("article.assistant .actions >> text=Copy")
        page.wait_for_selector("article.assistant .actions >> text=Copied")
        assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN


@needs_chromium
def test_markdown_that_comes_in_parts_looks_as_at_once_and_loses_no_letter(served: Served) -> None:
    texts = [
        MARKDOWN,
        "a\n" * 50,
        "- " * 3000,
        "**a" * 3000,
        "`" * 3000,
        "[" * 3000,
        "> " * 3000,
        "|" * 3000,
        "*a_b" * 3000,
    ]
    with opened(served.url) as page:
        lost = page.evaluate(
            """async (texts) => {
                const { render } = await import("/page/markdown.js");
                const letters = (text) => text.replace(/[^a-zA-Z]/g, "");
                return texts.filter((text) => {
                    const grown = document.createElement("div"), whole = document.createElement("div");
                    const step = Math.ceil(text.length / 400);
                    for (let end = step; end < text.length + step; end += step) render(grown, text.slice(0, end));
                    render(whole, text);
                    whole.querySelectorAll("button, .codebar span").forEach((one) => one.remove());
                    grown.querySelectorAll("button, .codebar span").forEach((one) => one.remove());
                    const plain = text.replaceAll("```html", "").replaceAll("```python", "")
                        .replace("https://example.org/a_b_c", "").replace("https://example.org/p.png", "");
                    return grown.innerHTML !== whole.innerHTML || letters(whole.textContent) !== letters(plain);
                });
            }""",
            texts,
        )
    assert lost == []


WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@needs_chromium
def test_tool_calls_are_folded_and_their_results_go_back(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    parts: list[dict[str, Any]] = [
        {**call, "function": {"name": "get_weather", "arguments": '{"city"'}},
        {"function": {"arguments": ': "Rome"}'}},
    ]
    with opened(served.url) as page:
        page.click("#settings summary")
        page.fill("#tools", "[")
        page.press("#tools", "Tab")
        send(page, "Weather in Rome?")
        page.wait_for_selector("#error >> text=Tools in the settings are no JSON")
        page.click("#settings summary")
        page.fill("#tools", json.dumps([WEATHER]))
        answer_by(page, *({"tool_calls": [{"index": 0, **part}]} for part in parts))
        with page.expect_request("**/v1/chat/completions") as asked:
            send(page, page.input_value("#prompt"))
        assert (asked.value.post_data_json or {})["tools"] == [WEATHER]
        page.wait_for_selector(".call[open] >> text=Tool call: get_weather")
        assert page.inner_text(".call pre") == '{\n  "city": "Rome"\n}'
        page.fill("[aria-label='Result of get_weather']", "18 degrees")
        page.unroute("**/v1/chat/completions")
        answer_by(page, {"content": "It is warm."})
        with page.expect_request("**/v1/chat/completions") as asked:
            page.click("text=Send result")
        assert (asked.value.post_data_json or {})["messages"][1:] == [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "18 degrees"},
        ]
        page.wait_for_selector("article.assistant .text >> text=It is warm.")
        assert page.get_attribute(".call", "open") is None, "it is folded"
        page.click(".call summary")
        assert "18 degrees" in page.inner_text(".call")


def worker(role: str, used_pages: int, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"role": role, "address": "127.0.0.1:9", "running": 2, "used_pages": used_pages}
    return {**found, "free_pages": 100 - used_pages, "alive": True, "trouble": "", "transport": "shm", **fields}


@needs_chromium
def test_the_workers_state_is_live(served: Served) -> None:
    states: list[dict[str, Any]] = [
        {"workers": [worker("prefill", 0), worker("decode", 25)], "trouble": ""},
        {
            "workers": [worker("prefill", 0), worker("decode", 50, alive=False, trouble="it is gone")],
            "trouble": "degraded",
        },
    ]
    with opened("about:blank") as page:
        page.route("**/status", lambda route: route.fulfill(json=states[0]))
        page.clock.install()
        page.goto(served.url)
        page.wait_for_selector("#service.up >> text=2 workers")
        assert page.locator("#workers-list li").all_inner_texts()[1].split("\n")[:2] == [
            "decode-0",
            "2 running, KV 25%",
        ]
        states.pop(0)
        page.clock.run_for(2500)
        page.wait_for_selector("#service.some >> text=1 of 2 workers")
        assert "it is gone" in page.inner_text("#workers-list") and page.inner_text("#trouble") == "degraded"
        page.unroute("**/status")
        page.route("**/status", lambda route: route.fulfill(status=401, json={}))
        page.clock.run_for(2500)
        page.wait_for_selector("#workers", state="hidden")
        assert page.get_attribute("#settings", "open") is None, "a key is asked for where something is sent"
        page.unroute("**/status")
        page.route("**/status", lambda route: route.abort())
        page.clock.run_for(2500)
        page.wait_for_selector("#service.down >> text=no answer")


@needs_chromium
def test_all_is_done_by_keys(served: Served) -> None:
    with opened(served.url, 360) as page:
        page.wait_for_selector("#model >> text=tiny")
        served.engine.reset(Script(token_ids=served.ids("one two"), is_hanging=True))
        page.focus("#prompt")
        page.keyboard.type("a")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("b")
        page.keyboard.press("Enter")
        page.wait_for_selector("article.assistant .text >> text=one two")
        page.keyboard.press("Escape")
        assert served.engine.wait_ending(10) == "closed"
        page.wait_for_selector("#send", state="visible")
        assert roles_and_texts(page) == [("user", "a\nb"), ("assistant", "one two")]
        assert page.evaluate("document.activeElement.id") == "prompt"
        assert page.is_hidden("#new"), "the side is closed and takes no focus"
        page.focus("#menu")
        page.keyboard.press("Enter")
        page.wait_for_selector("#new", state="visible")
        assert page.get_attribute("#menu", "aria-expanded") == "true"
        page.keyboard.press("Escape")
        page.wait_for_selector("#new", state="hidden")
        page.click("#menu")
        page.click("#new")
        assert page.locator("article").count() == 0
        assert page.evaluate("document.activeElement.id") == "prompt"


@needs_chromium
def test_reasoning_folds_when_the_answer_begins(served: Served) -> None:
    with opened(served.url) as page:
        answer_by(page, {"reasoning_content": "Two and "}, {"reasoning_content": "two."}, {"content": "Four."})
        send(page, "2 + 2?")
        page.wait_for_selector(".timing")
        reasoning = page.locator("article.assistant .reasoning")
        assert reasoning.get_attribute("open") is None
        page.click("article.assistant summary")
        assert reasoning.inner_text() == "Reasoning\nTwo and two."
        page.unroute("**/v1/chat/completions")
        served.engine.reset(served.script("Hello."))
        assert send_and_read(page, "More")[1] == {"role": "assistant", "content": "Four."}


@needs_chromium
def test_images_are_taken_by_button_paste_and_drop(tmp_path: Path) -> None:
    red, green, blue = map(picture, ("red", "green", "blue"))
    with run_api(tmp_path / "vision", ApiOptions(), write_vision) as seeing, opened(seeing.url, 360) as page:
        page.wait_for_selector("#attach")
        with page.expect_file_chooser() as chooser:
            page.click("#attach")
        chooser.value.set_files([FilePayload(name="red.png", mimeType="image/png", buffer=red)])
        page.wait_for_selector("#attached img")
        give(page, "paste", "picture.png", "image/png", green)
        page.wait_for_selector("#attached img >> nth=1")
        give(page, "drop", "picture.png", "image/png", blue)
        page.wait_for_selector("#attached img >> nth=2")
        give(page, "drop", "notes.txt", "text/plain", b"abc")
        page.wait_for_selector("#error >> text=notes.txt is no PNG, JPEG, WebP or GIF.")
        assert is_in_view(page, "#send") and page.evaluate("document.documentElement.scrollWidth") <= 360
        page.click("#attached button >> nth=1")
        give(page, "drop", "cut.png", "image/png", red[:60])
        page.wait_for_selector("#attached img >> nth=2")
        send(page, "What are these?")
        page.wait_for_selector("#error >> text=Image 3: it is damaged")
        page.click("#attached button >> nth=2")
        seeing.engine.reset(seeing.script("Two colours."))
        content: Any = send_and_read(page, page.input_value("#prompt"))[0]["content"]
        assert content[-1]["text"] == "What are these?", "it came back with its images"
        assert [part["image_url"]["url"] for part in content[:-1]] == [data_uri(red), data_uri(blue)]
        page.wait_for_selector(".timing")
        assert [image.data for image in seeing.engine.generations[0].images] == [red, blue]
        page.reload()
        page.wait_for_selector("article.user img >> nth=1")
        assert page.inner_text("article.user .text") == "What are these?" and page.locator("#attached img").count() == 0


@needs_chromium
def test_a_model_of_texts_is_given_no_images(served: Served) -> None:
    with opened(served.url) as page:
        page.wait_for_selector("#model >> text=tiny")
        assert page.is_hidden("#attach")
        give(page, "drop", "picture.png", "image/png", picture())
        page.wait_for_selector("#error >> text=tiny takes no images.")
        assert page.locator("#attached img").count() == 0


def give(page: Page, event: str, name: str, kind: str, file: bytes) -> None:
    """Paste a file into the prompt, or drop it on the page. event: its name in the DOM."""
    page.evaluate(
        """([event, name, kind, bytes]) => {
            const given = new DataTransfer(), prompt = document.getElementById("prompt");
            given.items.add(new File([new Uint8Array(bytes)], name, { type: kind }));
            prompt.dispatchEvent(event === "paste"
                ? new ClipboardEvent(event, { clipboardData: given, bubbles: true, cancelable: true })
                : new DragEvent(event, { dataTransfer: given, bubbles: true, cancelable: true }));
        }""",
        [event, name, kind, list(file)],
    )
