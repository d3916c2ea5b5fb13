"""Pictures for the documents, from the real thing: `make screenshots` writes docs/images/*.png.

A service with the demo model answers; headless Chromium shows the page, tmux the terminal. Needs both.
"""

import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.text import Text

from tests.support.live import CHECKOUT, HAND_OFF_FLAGS, HTTP, WAIT_S, Live, serve, wait_until

IMAGES = CHECKOUT / "docs" / "images"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TMUX = ("tmux", "-L", f"baton-{Path(tempfile.gettempdir()).name}-screenshots")
COLUMNS, LINES = 112, 34
QUESTIONS = (
    "Write a short poem.",
    "Extract the name and age as JSON: Anna is 31 years old and lives in Paris.",
    "What is the capital of France?",
)
AGAIN = "What is the capital of Italy?"
COLOURS = 256  # of a picture: less than half of the bytes
POOL = "--kv-memory-mib=16"  # so that a few clients fill a part of it that is seen
NUM_BUSY = 12  # clients while the status is shown


def shoot_page(browser: Browser, url: str, name: str, width: int, scheme: str) -> None:
    """A conversation after others, as a person would have it."""
    context = browser.new_context(
        viewport={"width": width, "height": 720}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#model >> text=baton-demo")
    for question in QUESTIONS:
        page.evaluate("document.getElementById('new').click()")  # behind the menu where it is narrow
        page.fill("#prompt", question)
        page.press("#prompt", "Enter")
        page.wait_for_selector(".timing")
    page.fill("#prompt", AGAIN)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".timing >> nth=1")
    page.wait_for_selector("#service.up")
    page.mouse.move(0, 0)
    page.screenshot(path=IMAGES / f"{name}.png")
    context.close()


class Terminal:
    """A pane of tmux with a shell of the checkout."""

    def __init__(self, name: str, lines: int = LINES) -> None:
        self._name = name
        shell = f"PS1='$ ' PATH={Path(sys.executable).parent}:$PATH exec bash --norc --noprofile"
        size = ("-x", str(COLUMNS), "-y", str(lines))
        subprocess.run([*TMUX, "new-session", "-d", "-s", name, *size, "-c", str(CHECKOUT), shell], check=True)

    def run(self, command: str) -> None:
        """On an empty screen."""
        self.type("clear", "Enter")
        self.type(command, "Enter")

    def type(self, *keys: str) -> None:
        """Texts, or tmux's names of keys."""
        subprocess.run([*TMUX, "send-keys", "-t", self._name, *keys], check=True)

    def read(self) -> str:
        """What it shows, with colours."""
        command = [*TMUX, "capture-pane", "-e", "-p", "-t", self._name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip()

    def wait(self, *texts: str) -> None:
        wait_until(lambda: all(text in Text.from_ansi(self.read()).plain for text in texts), WAIT_S, self.read)


@contextmanager
def terminals() -> Iterator[None]:
    """Ends what was started in them."""
    try:
        yield
    finally:
        subprocess.run([*TMUX, "kill-server"], check=False)


def shoot_text(browser: Browser, name: str, title: str, *panes: str) -> None:
    """Terminals, one below the other."""
    console = Console(record=True, width=COLUMNS, force_terminal=True, file=StringIO())
    for number, pane in enumerate(panes):
        if number:
            console.rule(style="dim")
        console.print(Text.from_ansi(pane))
    context = browser.new_context(viewport={"width": 1100, "height": 200})
    page = context.new_page()
    page.route("http*://**", lambda route: route.abort())  # the fonts that the drawing names
    page.set_content(f"<body style='margin: 0'>{console.export_svg(title=title)}")
    page.locator("svg").first.screenshot(path=IMAGES / f"{name}.png")
    context.close()


def shoot_status(browser: Browser, live: Live) -> None:
    """While clients are answered."""
    is_over = threading.Event()

    def ask() -> None:
        body = {"model": "baton-demo", "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
        while not is_over.is_set():
            HTTP.post(f"{live.url}/v1/completions", json=body, timeout=WAIT_S)

    clients = [threading.Thread(target=ask) for _ in range(NUM_BUSY)]
    for client in clients:
        client.start()
    terminal = Terminal("status", lines=8)
    terminal.run(f"baton status --watch --url {live.url}")
    terminal.wait("decode-1", "6 running")
    shoot_text(browser, "status", "baton status --watch", terminal.read())
    is_over.set()
    for client in clients:
        client.join()


def shoot_terminal(browser: Browser) -> None:
    """A service, and a chat beside it."""
    service, chat = Terminal("service"), Terminal("chat", lines=12)
    service.run("baton serve")
    service.wait("Ctrl-C stops the service.")
    chat.run("baton chat")
    chat.wait("/help lists commands")
    chat.type("/set temperature=0", "Enter")
    for question, answer in ((QUESTIONS[-1], "is Paris"), (AGAIN, "is Rome"), ("/stats", "TTFT")):
        chat.type(question, "Enter")
        chat.wait(answer)
    shoot_text(browser, "terminal", "baton", service.read(), chat.read())
    service.type("C-c")
    service.wait("decode-0 info drained")


def main() -> None:
    if missing := [name for name, found in (("Chromium", CHROMIUM), ("tmux", shutil.which("tmux"))) if not found]:
        sys.exit(f"make screenshots needs {' and '.join(missing)}: install it by the system's package manager")
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as player, terminals():
        browser = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with serve("demo", hands_over=False) as live:  # as `baton serve` is without options
            live.wait_until_whole()
            shoot_page(browser, live.url, "page", 1200, "light")
            shoot_page(browser, live.url, "page-dark", 1200, "dark")
            shoot_page(browser, live.url, "page-narrow", 390, "light")
        with serve("demo", "--decode-workers=2", POOL, *HAND_OFF_FLAGS) as live:
            live.wait_until_whole()
            shoot_status(browser, live)
        shoot_terminal(browser)
        browser.close()
    for path in IMAGES.glob("*.png"):
        Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


if __name__ == "__main__":
    main()
