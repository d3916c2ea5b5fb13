"""Histories are read where answers were generated: two prefill and two decode workers, hand-off forced."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.services.test_kv_files import COUNT, PAGE, VOCAB, Service, served, write_model
from tests.support.live import wait_until
from tests.support.oracle import random_prompt

PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
FIRST, NEW, TURNS, LONG = 600, 30, 3, 450  # tokens of a first prompt, of a later turn's, turns, a long answer


@pytest.mark.timeout(600)
def test_no_history_is_computed_twice(tmp_path: Path) -> None:
    """Prefill workers die after each turn. Their next incarnations read what decode workers have, answers included."""
    flags = ("--prefill-workers=2", "--decode-workers=2", "--local-prefill-max-tokens=0", "--drain-s=0")
    with served(write_model(tmp_path / "model", "llama"), *flags) as service:
        prompts = [random_prompt(FIRST, VOCAB, seed=index) for index in range(4)]
        num_asked, num_new, num_computed, num_read = 0, 0, 0.0, 0.0
        for turn in range(TURNS):
            for index, prompt in enumerate(prompts):
                num_asked, num_new = num_asked + len(prompt), num_new + (NEW if turn else FIRST)
                tokens, _ = service.ask(prompt)
                prompts[index] = [*prompt, *tokens, *random_prompt(NEW, VOCAB, seed=99 + turn)]
            num_computed += sum(service.live.metric(name, "prompt_tokens_total") for name in PREFILLS)
            num_read += sum(service.read(name, "decode") for name in PREFILLS)
            service.kill(*PREFILLS)
        num_computed += sum(service.live.metric(name, "prompt_tokens_total") for name in DECODES)
        most = 0.05 * num_asked + TURNS * len(prompts) * (PAGE + COUNT)  # ends of pages, and of answers
        assert num_computed - num_new <= most, (num_computed, num_new, num_asked, num_read)
        assert num_read >= (TURNS - 1) * len(prompts) * FIRST
        check_that_an_answer_moves(service)


def check_that_an_answer_moves(service: Service) -> None:
    """Its decode worker ends; another one reads what it had, and goes on without a prefill worker."""
    prompt = random_prompt(FIRST, VOCAB, seed=77)
    with ThreadPoolExecutor(1) as pool:
        before = {name: service.live.metric(name, "generation_tokens_total") for name in DECODES}
        asked = pool.submit(service.surface.ask_one, prompt, max_tokens=LONG)

        def find_busy() -> list[str]:
            return [one for one in DECODES if service.live.metric(one, "generation_tokens_total") > before[one] + 20]

        wait_until(lambda: bool(find_busy()))
        (busy,) = find_busy()
        (other,) = {*DECODES} - {busy}
        num_read = service.read(other, "decode")
        service.live.send(busy, signal.SIGTERM)
        told = asked.result()
    assert told.tokens == service.oracle.answer(prompt, LONG, guess=told.tokens)
    assert told.timing.attempts > 1, "it was over before its worker ended"
    assert service.read(other, "decode") - num_read >= FIRST
    service.live.wait_shown(f"{busy} ended with exit status 0")
    del service.live.metrics_urls[busy]
