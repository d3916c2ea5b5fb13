"""Chat templates by anybody: what one takes of time, memory and output ends with its own request."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from gateway.errors import ApiError
from gateway.text import templates, trial
from gateway.text.template import ChatTemplate, Conversation, TemplateRefusalError
from gateway.text.template_process import CPU_S, FORKS, pack_conversation
from gateway.text.templates import Templates
from gateway.text.tokenizer import Tokenizer
from gateway.text.trial import load_tokenizer
from runtime.fork import Limits
from tests.support.api_server import PLAIN, SERVED, run_api
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, write_byte_level

WAIT_S = 60.0
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {  # asked for "go", each breaks a limit; asked for something else, it answers
    "loops": (LOOPS, f"takes longer than {CPU_S:g} s"),
    "one operation": ("{% set n = messages | length %}{{ (n + 9) ** 300000000 }}", f"takes longer than {CPU_S:g} s"),
    "memory": ("{{ messages[0].content * 2000000000 }}", "too much memory"),
    "output": ("{{ messages[0].content * 5000000 }}", "more than 1000000 bytes"),
    "depth": ("{% macro deep(n) %}{{ deep(n) }}{% endmacro %}{{ deep(1) }}", "nests too deep|too much memory"),
}


def template(source: str) -> ChatTemplate:
    whole = f"{{% if messages[0].content == 'go' %}}{source}{{% endif %}}<{{{{ messages[0].content }}}}>"
    return ChatTemplate(whole, whole, {}, 1_000_000)


def run(sources: list[str], test: Callable[[Templates], Awaitable[None]]) -> None:
    async def main() -> None:
        rendering = Templates()
        for source in sources:
            rendering.add(template(source))
        try:
            await rendering.start()
            await test(rendering)
        finally:
            await rendering.close()

    asyncio.run(main())


async def stop_busy(pid: int | None, count: int) -> list[int]:
    """Stops the forks that compute, once so many do: their CPU time stands still, however slow the machine."""
    async with asyncio.timeout(WAIT_S):
        while len(busy := [fork for fork in forks_of(pid) if cpu_s(fork) > CPU_S / 20]) < count:  # noqa: ASYNC110  no event for it
            await asyncio.sleep(0.005)
    for fork in busy:
        os.kill(fork, signal.SIGSTOP)
    return busy


async def ask(rendering: Templates, number: int, text: str, owner: str = "") -> str:
    packed = pack_conversation(number, Conversation([{"role": "user", "content": text}]))
    return await rendering.render(packed, owner)


async def task_or_later(task: Awaitable[str], again: Callable[[], Awaitable[str]]) -> str:
    """What came of it; asked again where a busy machine gave it less CPU time within 20 s than it may take."""
    for _ in range(5):
        try:
            return await task
        except ApiError as error:
            if "the machine is busy" not in error.message:
                raise
        task = again()
    return await task


def test_a_template_that_breaks_a_limit_ends_its_own_request_only() -> None:
    """Another owner is answered while the slow ones still compute."""

    async def test(rendering: Templates) -> None:
        for number, (name, (_, why)) in enumerate(HOSTILE.items()):
            hostile = [
                asyncio.create_task(ask(rendering, number, "go", "stranger")) for _ in range(1 + (name == "loops"))
            ]
            busy = await stop_busy(rendering.pid, len(hostile)) if "takes longer" in why else []
            assert await ask(rendering, number, "hi", "other") == "<hi>"
            assert not busy or not any(task.done() for task in hostile), name
            for fork in busy:
                os.kill(fork, signal.SIGCONT)
            for task in hostile:
                with pytest.raises(TemplateRefusalError, match=why):
                    await task_or_later(task, partial(ask, rendering, number, "go", "stranger"))
            assert await ask(rendering, number, "hi", "stranger") == "<hi>"

    run([source for source, _ in HOSTILE.values()], test)


def test_rendering_ends_with_its_request_and_a_process_that_is_killed_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fork whose request is cancelled is killed, before its CPU time is up, and its place is free."""

    async def test(rendering: Templates) -> None:
        assert await ask(rendering, 0, "hi") == "<hi>"
        pid = rendering.pid
        before = forks_of(pid)
        tasks = [asyncio.create_task(ask(rendering, 0, "go", f"owner {at}")) for at in range(FORKS)]
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await ask(rendering, 0, "hi") == "<hi>"
        async with asyncio.timeout(WAIT_S):
            while forks_of(pid) & before:  # noqa: ASYNC110  no event for it
                await asyncio.sleep(0.01)
        assert cpu_s(pid, of_ended=True) < FORKS * CPU_S / 2
        assert rendering.pid == pid and len(forks_of(pid)) == FORKS
        assert rendering.child is not None
        rendering.child.kill()
        assert await ask(rendering, 0, "hi") == "<hi>"
        monkeypatch.setattr(templates, "Render", lambda packed: msgspec.Raw(b"\xc1"))
        with pytest.raises(ApiError) as refused:
            await ask(rendering, 0, "hi")
        assert refused.value.status == 503

    run([LOOPS], test)


def forks_of(pid: int | None) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def cpu_s(pid: int | None, *, of_ended: bool = False) -> float:
    """CPU time of a process, or of its forks that have ended."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[13 if of_ended else 11 :][:2]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_a_client_gets_a_400_that_names_the_template(tmp_path: Path) -> None:
    def write(folder: Path) -> Path:
        write_byte_level(folder)
        (folder / "chat_template.jinja").write_text(template(HOSTILE["output"][0]).plain)
        return folder

    with run_api(tmp_path, PLAIN, write) as served:
        served.engine.script = served.script("hello")
        answers = []
        for text in ("go", "hi"):
            body = {"model": SERVED, "messages": [{"role": "user", "content": text}], "max_tokens": 5}
            answers.append(served.http.post("/v1/chat/completions", json=body))
    assert [answer.status_code for answer in answers] == [400, 200]
    error = answers[0].json()["error"]
    assert error["message"].startswith("the model's chat template refuses these messages: ")
    assert "bytes" in error["message"]
    assert error["param"] == "messages"


# -- at the start ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ 10 ** 300000000 }}", "takes longer than 2 s"),  # when it is compiled
        (LOOPS, "takes longer than 2 s"),
        ("{{ messages[0].content * 4000000000 }}", None),  # refuses all conversations
        ("{{ 'a' * 400000000 }}", None),
        ("{% for", None),
    ],
)
def test_a_template_cannot_hold_up_the_start(
    tmp_path: Path, source: str, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "RENDER_LIMITS", replace(trial.RENDER_LIMITS, cpu_s=0.5))
    write_byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(source)
    if why is None:
        assert load_tokenizer(tmp_path).tried.sample == ""
    else:
        with pytest.raises(ValueError, match=rf"chat_template\.jinja {why}"):
            load_tokenizer(tmp_path)


def replacing(content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": "ж"}, "content": content}


def split(regex: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [replacing("жж")] * 40}},
        {"normalizer": replacing("a" * 1000)},
        {"pre_tokenizer": split(r"(ж+)\1b")},
        {"pre_tokenizer": split("(ж+)+b")},  # the library panics
    ],
    ids=["normalizers", "long replacement", "slow regular expression", "given up"],
)
def test_a_tokenizer_that_multiplies_is_refused(
    tmp_path: Path, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "LIMITS", Limits(0.6, WAIT_S, 1 << 30))
    path = write_byte_level(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=r"tokenizer(_config)?\.json (takes|crashes|needs|cannot)"):
        load_tokenizer(tmp_path)


def test_a_good_folder_is_loaded_with_what_its_template_made_of_samples(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_byte_level(tmp_path), 100)
    assert tokenizer.tried.sample == "<|user|>.<|end|><|assistant|>.<|end|><|user|>.<|end|><|assistant|>"
    assert tokenizer.template.plain == CHAT_TEMPLATE and tokenizer.context_tokens == 100


def test_a_text_that_a_regular_expression_gives_up_is_a_400(tmp_path: Path) -> None:
    path = write_byte_level(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": split("(a+)+b")}))
    tokenizer = Tokenizer(tmp_path)
    with pytest.raises(ApiError, match="tokenizer cannot read this text"):
        tokenizer.encode("a" * 99, add_special_tokens=False)
    assert tokenizer.encode("hello", add_special_tokens=False)
