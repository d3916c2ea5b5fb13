"""Draft heads in a decode worker's loop: every draft is what plain torch computes, and no answer depends on them."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decode_worker.speculation.drafters import Draft, HeadDrafter, NgramDrafter, Wanted
from decode_worker.speculation.lengths import CostMeter
from engine.batch import ForwardRow
from engine.compose import build_engine
from engine.engine import Engine
from tests.support import sequence_params
from tests.support.checkpoints import write_checkpoint
from tests.support.combinations import combination
from tests.support.decoding import LyingDrafter, TreeDrafter, build_eager_speculator, build_scheduler, decode
from tests.support.draft_heads import (
    MEDUSA,
    Head,
    draft_truth,
    write_eagle3,
    write_medusa,
    write_medusa_oracle,
    write_mtp,
    write_oracle,
    write_target,
)
from tests.support.tiny_models import VOCAB, tiny_config, tiny_model
from wire.sampling import SamplingParams
from worker import receiving
from worker.params import SequenceParams
from worker.scheduler import Scheduler
from worker.sequences import Sequence

GREEDY = SamplingParams(temperature=0.0)
PAGE_TOKENS = 8
SHARED = [(number * 7) % 100 + 3 for number in range(4 * PAGE_TOKENS)]  # whole pages


def build(model: Path, draft_model: str, num_pages: int) -> Engine:
    return build_engine(
        str(model), draft_model, "float32", "cpu", 1, PAGE_TOKENS, 16, lambda *_: (num_pages, 40),
        lambda _done, _total: None, 120,
    )  # fmt: skip


def ask(handle: int, prompt: Seq[int], max_tokens: int = 20, **others: Any) -> SequenceParams:
    given: dict[str, Any] = {"sampling": GREEDY, "drafter": "draft", "max_draft_tokens": 3} | others
    packed = np.array(prompt, np.int32).tobytes()
    return SequenceParams(str(handle), packed, len(prompt) - 1, max_tokens, gateway="g", handle=handle, **given)


class CheckedDrafter(HeadDrafter):
    """Compares each draft with the truth. answers: of each handle, in the end. trees: these are checked by the model in
    place of the drafts."""

    def __init__(
        self, engine: Engine, target: Any, head: Head, answers: Mapping[int, list[int]],
        trees: TreeDrafter | None = None,
    ) -> None:  # fmt: skip
        assert engine.draft_runner is not None
        super().__init__(engine.draft_runner, CostMeter(), 64)
        self._trees = trees
        self._target, self._truth, self._answers = target, head, answers
        self.num_checked = 0
        self.wrong: list[int] = []  # handles

    def propose(self, wanted: Seq[Wanted]) -> list[Draft]:
        drafts = super().propose(wanted)
        for one, draft in zip(wanted, drafts, strict=True):
            guesses = list(draft.token_ids)
            if guesses:
                tokens, params = one.sequence.tokens, one.sequence.params
                rest = self._answers[params.handle][len(tokens) - params.num_prompt :]
                truth = draft_truth(self._target, self._truth, tokens, guesses[:-1], rest)
                self.num_checked += 1
                if guesses != [int(row.argmax()) for row in truth]:  # what is raised here ends the drafts alone
                    self.wrong.append(params.handle)
        return drafts if self._trees is None else self._trees.propose(wanted)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", *map(combination, ("qwen3_5_text", "deepseek_v3"))])
def test_each_draft_is_the_truth_whatever_became_of_the_pages(tmp_path: Path, kind: str) -> None:
    """After prompts in chunks, preemption, and cached pages of prompts that go on with other tokens."""
    if kind in MEDUSA:
        target = write_target(tmp_path / "model")
        head = write_medusa(tmp_path / "head", target, MEDUSA[kind])
    elif kind != "eagle3":
        target, head = write_mtp(tmp_path / "model", kind)
    else:
        target = write_target(tmp_path / "model")
        head = write_eagle3(tmp_path / "head", target, has_all_words=True)
    engine = build(tmp_path / "model", head.draft_model, 40)
    requests = [
        ask(1, [*SHARED, 5, 6, 7]), ask(2, [*SHARED, 90]), ask(3, SHARED + [5, 6, 7, 8] * 2), ask(4, SHARED[:-1]),
        ask(5, SHARED * 2, 30), ask(6, SHARED + [90, 91] * 4), *(ask(7 + i, SHARED[i:], 20) for i in range(3)),
    ]  # fmt: skip
    plain = decode(engine, [replace(one, drafter="off") for one in requests], at_once=1)
    for at_once, num_pages, has_trees in ((1, 40, False), (6, 24, False), (6, 24, True)):
        if has_trees and engine.why_chains is not None:
            continue
        trees = TreeDrafter(plain.tokens, VOCAB, 0.9) if has_trees else None
        drafter = CheckedDrafter(engine, target, head, plain.tokens, trees)
        speculator = build_eager_speculator({"draft": drafter}, step_s=1.0)
        answers = decode(
            engine, requests, speculator, at_once=at_once, num_pages=num_pages, chunk_tokens=PAGE_TOKENS,
            is_checked=True,
        )  # fmt: skip
        assert answers.tokens == plain.tokens
        assert not drafter.wrong and drafter.num_checked > (80 if at_once == 1 else 30)
        assert trees is None or (trees.num_forked > 20 and answers.num_accepted == trees.num_right > 20)
        assert answers.scheduler.kv.num_hit > 0
        assert has_trees or bool(answers.scheduler.num_preemptions) == (at_once > 1)


def test_drafts_go_on_from_what_another_worker_computed(tmp_path: Path) -> None:
    """Only pages are handed over, the last one in part, after pages that are cached here."""
    target = write_target(tmp_path / "model")
    head = write_eagle3(tmp_path / "head", target, has_all_words=True)
    prefill, here = (build(tmp_path / "model", head.draft_model, 60) for _ in range(2))
    requests = [
        ask(handle, [*SHARED, 7, handle, *SHARED[: 8 + 3 * handle]], local_prefill_max_tokens=0)
        for handle in range(1, 5)
    ]
    plain = decode(here, [replace(one, drafter="off", local_prefill_max_tokens=200) for one in requests])

    def receive(scheduler: Scheduler, sequence: Sequence) -> None:
        """Pages of the engine `prefill` that begin with what is here."""
        params, begin = sequence.params, sequence.computed
        there = build_scheduler(prefill)
        held = there.admit(replace(params, handle=0, max_tokens=0, local_prefill_max_tokens=200), 0.0, is_kept=True)
        held.row = 0
        prefill.rows.open(0, np.array(held.tokens, np.int32), GREEDY, len(held.tokens))
        prefill.rows.write_pages(0, 0, held.pages)
        for first in range(0, params.end, 11):
            prefill.runner.launch([ForwardRow(0, first, min(11, params.end - first))]).collect()
        prefill.rows.close(0)
        pages = held.pages[begin // PAGE_TOKENS :]
        into, _ = receiving.begin_read(scheduler, sequence.id, params.attempt, begin, params.end, len(pages))
        here.pool.pages[into] = prefill.pool.pages[pages]
        receiving.finish_read(scheduler, sequence.id, params.end, 0.0)

    drafter = CheckedDrafter(here, target, head, plain.tokens)
    speculator = build_eager_speculator({"draft": drafter}, step_s=1.0)
    answers = decode(here, requests, speculator, at_once=1, is_checked=True, receive=receive)
    assert answers.tokens == plain.tokens
    assert not drafter.wrong and drafter.num_checked > 50 and answers.scheduler.kv.num_hit >= 3 * len(SHARED)


def test_a_page_is_found_only_if_the_next_token_is_the_same(tmp_path: Path) -> None:
    target = write_target(tmp_path / "model")
    head = write_eagle3(tmp_path / "head", target)
    engine = build(tmp_path / "model", head.draft_model, 40)
    first, same, other = ask(1, [*SHARED, 5, 6]), ask(2, [*SHARED, 5, 9]), ask(3, [*SHARED, 90, 6])
    answers = decode(engine, [first, same, other], at_once=1)
    found = [end.timing.cached_tokens for end in answers.ends.values() if end.timing is not None]
    assert found == [0, len(SHARED), len(SHARED) - PAGE_TOKENS]


@pytest.mark.parametrize("drafter", ["draft", "off"])
def test_pages_of_answers_have_the_heads_kv_and_say_so(tmp_path: Path, drafter: str) -> None:
    """Prefill workers use no page without it, also from files."""
    write_eagle3(tmp_path / "head", write_target(tmp_path / "model"))
    engine = build(tmp_path / "model", str(tmp_path / "head"), 40)
    assert engine.draft_runner is not None and engine.pool.draft_tensor is not None
    speculator = build_eager_speculator({"draft": HeadDrafter(engine.draft_runner, CostMeter(), 64)})

    def read(params: SequenceParams) -> tuple[int, Tensor, list[int]]:
        answers = decode(engine, [params], speculator, chunk_tokens=11)
        kv, tokens = answers.scheduler.kv, np.frombuffer(params.prompt, np.int32).tolist() + answers.tokens[1]
        pages = kv.cache.find(kv.keys_of(ask(1, tokens)))
        assert engine.pool.draft_tensor is not None
        return sum(map(kv.cache.has_draft, pages)), engine.pool.draft_tensor[pages].clone(), tokens

    num_marked, found, tokens = read(ask(1, SHARED[3:], 30, drafter=drafter))
    assert num_marked == len(found) == (len(tokens) - 2) // PAGE_TOKENS
    num_marked, expected, _ = read(ask(1, tokens, 1))
    assert num_marked == len(expected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # other chunks: noise


def test_behind_pages_without_a_heads_kv_none_is_said_to_have_it() -> None:
    scheduler = sequence_params.build_scheduler(20, 4)
    scheduler.kv.num_after = 1
    for params in (sequence_params.answer(1, 9, 10, first=5), sequence_params.answer(2, 9, 20, first=5)):
        sequence = scheduler.admit(params, 0.0)
        sequence_params.run(scheduler)
        marked = [scheduler.kv.cache.has_draft(page) for page in scheduler.kv.cache.find(sequence.keys)]
        assert marked == ([True] * 4 if params.handle == 1 else [True, False, *[True] * 2, *[False] * 3])
        scheduler.kv.cache._has_draft[scheduler.kv.cache.find(sequence.keys)[1]] = False  # as one from files


@pytest.mark.parametrize("num_pages", [60, 26], ids=["", "preemption"])
@pytest.mark.parametrize("write", [write_oracle, write_medusa_oracle])
def test_a_head_that_knows_is_always_right(
    tmp_path: Path, write: Callable[[Path], tuple[Any, Head]], num_pages: int
) -> None:
    """At any temperature: draft and answer are chosen with the same noise."""
    write(tmp_path)
    engine = build(tmp_path / "model", str(tmp_path / "head"), num_pages)
    requests = [
        ask(handle, SHARED[handle:], 30, max_draft_tokens=8, sampling=replace(
            GREEDY, temperature=handle % 3 / 2, frequency_penalty=handle % 2, seed=handle,
        ))
        for handle in range(1, 9)
    ]  # fmt: skip
    assert engine.draft_runner is not None
    speculator = build_eager_speculator({"draft": HeadDrafter(engine.draft_runner, CostMeter(), 64)})
    answers = decode(engine, requests, speculator, chunk_tokens=PAGE_TOKENS, is_checked=True)
    assert answers.tokens == decode(engine, [replace(one, drafter="off") for one in requests]).tokens
    assert bool(answers.scheduler.num_preemptions) == (num_pages == 26)
    assert answers.num_accepted == answers.num_drafted > 100


@pytest.mark.parametrize("write", [write_eagle3, write_medusa])
def test_a_random_head_changes_no_token(tmp_path: Path, write: Callable[[Path, Any], Head]) -> None:
    target = write_target(tmp_path / "model")
    head = write(tmp_path / "head", target)
    engine = build(tmp_path / "model", head.draft_model, 60)
    samplings = [
        GREEDY, SamplingParams(seed=1), SamplingParams(temperature=1.7, top_k=20, seed=2),
        SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.5, seed=3),
    ]  # fmt: skip
    requests = [
        ask(number, SHARED[number:], 30, sampling=sampling, num_logprobs=2, min_tokens=5 * (number % 2),
            stop_token_ids=frozenset(range(0, VOCAB, 9)))
        for number, sampling in enumerate(samplings * 2, start=1)
    ]  # fmt: skip
    assert engine.draft_runner is not None
    speculator = build_eager_speculator({"draft": HeadDrafter(engine.draft_runner, CostMeter(), 64)})
    drafted, plain = (
        decode(engine, requests, speculator),
        decode(engine, [replace(one, drafter="off") for one in requests]),
    )
    assert drafted.tokens == plain.tokens and drafted.num_drafted > drafted.num_accepted
    assert {handle: end.finish_reason for handle, end in drafted.ends.items()} == {
        handle: end.finish_reason for handle, end in plain.ends.items()
    }


def test_medusa_heads_have_no_kv_and_draft_no_more_than_they_are(tmp_path: Path) -> None:
    """Pages and their keys are those of a worker without them."""
    target = write_target(tmp_path / "model")
    head = write_medusa(tmp_path / "head", target, num_heads=2)
    plain, engine = build(tmp_path / "model", "", 40), build(tmp_path / "model", head.draft_model, 40)
    assert engine.pool.page_bytes == plain.pool.page_bytes and not engine.num_after and engine.has_head
    assert engine.draft_runner is not None
    speculator = build_eager_speculator({"draft": HeadDrafter(engine.draft_runner, CostMeter(), 64)})
    planned = list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculator, "note_drafts", lambda step, right: planned.append(step.num_drafts))
        requests = [ask(1, [*SHARED, 5], 30, max_draft_tokens=8), ask(2, [*SHARED, 90], 30, max_draft_tokens=8)]
        answers = decode(engine, requests, speculator, at_once=1)
    assert max(planned) == 2
    assert [end.timing.cached_tokens for end in answers.ends.values() if end.timing] == [0, len(SHARED)]


@pytest.mark.parametrize(
    ("drafter", "model_type"),
    [("ngram", "qwen3_5_text"), ("ngram", "deepseek_v2"),
     *(("lying", name) for name in ("qwen3_5_text", "lfm2", "deepseek_v3")), combination("lying", "qwen3_next")],
)  # fmt: skip
def test_states_and_latents_go_back_behind_a_wrong_draft(tmp_path: Path, model_type: str, drafter: str) -> None:
    """Models with recurrent layers, also those that run by transformers' code, and with latent attention."""
    if model_type.startswith("deepseek"):
        write_checkpoint(tmp_path, model_type, vocab=VOCAB)
    else:
        tiny_model(tiny_config(model_type)).save_pretrained(tmp_path)
    engine = build_engine(
        str(tmp_path), "", "float32", "cpu", 1, PAGE_TOKENS, 16, lambda *_: (60, 40), lambda _done, _total: None, 120,
    )  # fmt: skip
    requests = [
        ask(handle, SHARED[handle:], 40, drafter=drafter, sampling=replace(GREEDY, temperature=handle % 2, seed=handle))
        for handle in range(1, 7)
    ]
    plain = decode(engine, [replace(one, drafter="off") for one in requests])
    drafters = {"ngram": NgramDrafter(), "lying": LyingDrafter(plain.tokens, VOCAB)}
    speculator = build_eager_speculator({drafter: drafters[drafter]}, step_s=1.0)
    answers = decode(engine, requests, speculator, is_checked=True, chunk_tokens=PAGE_TOKENS)
    assert answers.tokens == plain.tokens
    assert answers.num_accepted < answers.num_drafted and (answers.num_accepted or drafter == "ngram")
    again = decode(engine, requests, speculator, at_once=2, num_pages=24, is_checked=True)
    assert again.tokens == plain.tokens
