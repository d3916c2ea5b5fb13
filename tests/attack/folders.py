"""Mutated folders of models and adapters: each is served, or refused with a sentence that names a file of it.

    python -m tests.attack.folders [--cases 3000] [--first 0] [--seed 1] [--seconds 1800] [--jobs 2] [--only 1234]

Every case runs in a fork with limits: a traceback, a hang and a crash are found whatever the code does. Prints each
failure, with its number for `--only`, and the figures; exit status 1 if there is one.
"""

import argparse
import asyncio
import faulthandler
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
from prometheus_client import CollectorRegistry

from decode_worker.grammar.vocabulary import read_vocabulary
from engine.adapters.peft import PeftReader, find_digest
from engine.compose import build_engine, open_model
from engine.formats.gguf_folder import make_gguf_folder
from engine.llm import GREEDY, LLM
from engine.models.table import build_table
from engine.weights.table import Shard
from gateway.access.keys import Keys
from gateway.app import add_model
from gateway.images.processor_process import ImageReader, ReaderReady, ReaderStart
from gateway.request.prepare import ApiOptions, ServedModels
from gateway.text.trial import load_tokenizer
from runtime.config_parts import NO_DRAFT
from runtime.fork import Fork, Limits
from runtime.hardware import num_cores
from tests.support.checkpoints import write_checkpoint
from tests.support.checkpoints_vision import leave_out_torchvision, write_vlm_checkpoint
from tests.support.draft_heads import write_eagle3, write_medusa, write_target
from tests.support.fake_engine_client import FakeEngineClient
from tests.support.gguf_files import write_gguf_models
from tests.support.instruction_sets import link_kernels
from tests.support.lora import write_adapter
from tests.support.quantised import write_models
from tests.support.tiny_tokenizer import write_byte_level, write_sentencepiece
from worker.startup.models import check_models

LIMITS = Limits(cpu_s=60.0, wall_s=150.0, memory_bytes=12 << 30)
CRASH = "crash.txt"
TEXTS = ("tokenizer.json", "tokenizer_config.json")


class Outcome(msgspec.Struct):
    """kind: taken, refused; or, which are failures, unnamed, traceback, hang, crash."""

    kind: str
    said: str = ""


@dataclass(frozen=True)
class Base:
    """A good folder, and what the service does with one: steps that are tried one after the other."""

    folder: Path
    steps: Sequence[Callable[[Path], object]]


# -- what is done with a folder --------------------------------------------------------------------------------------


def check(folder: Path) -> None:
    """`baton serve`, before it starts anything."""
    check_models(str(folder), NO_DRAFT)


def start_gateway(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    served = ServedModels(ApiOptions(), CollectorRegistry(), Keys())
    add_model(served, FakeEngineClient(), tokenizer, ["m"]).segments.encode("hello world")
    served.offload.close()


def read_grammar_vocabulary(folder: Path) -> None:
    read_vocabulary(folder, 400)


def run_model(folder: Path) -> None:
    LLM(str(folder), device="cpu", context_tokens=64).generate_ids([[1]], GREEDY, 1)


def read_images(folder: Path) -> None:
    leave_out_torchvision()
    answer = asyncio.run(ImageReader(-1).answer(ReaderStart(str(folder), "qwen2_5_vl", 1 << 20)))
    if not isinstance(answer, ReaderReady):
        raise ValueError(getattr(answer, "message", answer))


def load_gguf(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as cache:
        made = make_gguf_folder(folder / "tiny.gguf", Path(cache))
        for step in (start_gateway, run_model):
            step(made)


def load_adapter(model: Path, folder: Path) -> None:
    find_digest(folder)
    config, _ = open_model(model)
    sites = {(layer, name): None for layer, table in enumerate(build_table(config).layers) for name in table.products}
    PeftReader(config, Shard(0, 1), torch.float32, 64).read(folder, sites)


def load_draft_head(model: Path, folder: Path) -> None:
    build_engine(
        str(model), str(folder), "auto", "cpu", 1, 16, 4, lambda *_: (16, 8), lambda done, total: None, 64
    )  # fmt: skip


def write_bases(folder: Path) -> list[Base]:
    """Takes seconds."""
    text = write_byte_level(folder / "text")
    other = write_sentencepiece(folder / "other text")

    def with_text(made: Path, text: Path) -> Path:
        for name in TEXTS:
            shutil.copy(text / name, made)
        return made

    whole = (check, start_gateway, read_grammar_vocabulary, run_model)
    llama = with_text(write_checkpoint(folder / "llama", "llama", vocab=362, shards=3), text)
    bases = [Base(llama, whole)]
    for family in ("qwen3_moe", "gemma3_text", "qwen3_5_text", "gpt_oss"):
        bases.append(Base(with_text(write_checkpoint(folder / family, family, vocab=408), other), whole))
    for name in ("awq", "ct-int8"):
        quantised, _plain = write_models(folder / name, name)
        bases.append(Base(with_text(quantised, other), (check, run_model)))
    write_target(folder / "starcoder2", "starcoder2")  # by transformers' code
    bases.append(Base(with_text(folder / "starcoder2", other), (check, run_model)))
    bases.append(Base(write_vlm_checkpoint(folder / "vlm", "qwen2_5_vl"), (*whole, read_images)))
    (folder / "gguf").mkdir()
    path, _plain = write_gguf_models(folder / "gguf parts", "Q8_0")
    shutil.copy(path, folder / "gguf" / "tiny.gguf")
    bases.append(Base(folder / "gguf", (load_gguf,)))
    write_adapter(folder / "lora", llama, "llama", seed=1)
    bases.append(Base(folder / "lora", (lambda one: load_adapter(llama, one),)))
    target = write_target(folder / "target")
    write_eagle3(folder / "head", target)
    write_medusa(folder / "medusa", target)
    for name in ("head", "medusa"):
        bases.append(Base(folder / name, (lambda one: load_draft_head(folder / "target", one),)))
    return bases


# -- mutations -------------------------------------------------------------------------------------------------------

NUMBERS = (0, -1, 1, 2, 3, 7, 1 << 31, 10**9, 1 << 53, 1 << 63, 10**30, 0.5, -0.0, 1e-300, 1e308, float("nan"))
GGUF_KEYS = (b"block_count", b"head_count", b"embedding_length", b"context_length", b"key_length", b"eos_token")
DEEP = "[" * 100_000 + "]" * 100_000
VALUES: Sequence[Any] = (
    *NUMBERS, None, True, False, "", "x", "../../x", "a" * 100_000, [], {}, [None], [[]], {"a": 1}, [1, "x"], ["x"] * 3,
    {"type": "x"}, [{"id": 0}], "{{ 10 ** 300000000 }}", "{% for", "(a+)+b",
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 5000},
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}] * 40},
    {"type": "Split", "pattern": {"Regex": r"(o+)\1b"}, "behavior": "Isolated", "invert": False},
)  # fmt: skip


def walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places in a JSON value, few of each long list or object."""
    yield path
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in [*keys[:40], *keys[40:400:90]]:
        yield from walk(value[key], (*path, key))


def mutate_value(dice: random.Random, value: Any) -> Any:
    """The value with one place changed."""
    depth = dice.choice((1, 1, 2, 9))  # most keys that matter are near the top
    path = dice.choice([one for one in walk(value) if len(one) <= depth])
    if not path:
        return dice.choice(VALUES)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    old = holder[path[-1]]
    match dice.randrange(6):
        case 0 if isinstance(holder, dict):
            del holder[path[-1]]
        case 1 if isinstance(old, int) and not isinstance(old, bool):
            holder[path[-1]] = dice.choice((old * 1000, old + 1, -old, old << 40, float(old), str(old), old * 10**7))
        case 2 if isinstance(old, list) and old:
            holder[path[-1]] = dice.choice((old * 2, old[:-1], old[0], old * 5000 if len(old) < 50 else [old]))
        case 3 if isinstance(old, str):
            holder[path[-1]] = dice.choice((old + "x", old[:-1], [old], old * 1000))
        case _:
            holder[path[-1]] = dice.choice(VALUES)
    return value


def mutate_bytes(dice: random.Random, data: bytes) -> bytes:
    at = dice.randrange(len(data) + 1)
    match dice.randrange(6):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + dice.randbytes(dice.choice((1, 8, 200))) + data[at:]
        case 2:
            return b""
        case 3:
            return data + b"\0" * dice.choice((1, 1000))
        case 4:
            return dice.choice((DEEP.encode(), b'{"a":' * 100_000, b"\xff\xfe{}", b"null", b"[]", b"{}", b'"x"', b"7"))
    changed = bytearray(data)
    for _ in range(dice.choice((1, 4, 32))):
        if changed:
            changed[dice.randrange(min(len(changed), dice.choice((64, 4096, 1 << 30))))] = dice.randrange(256)
    return bytes(changed)


def mutate_safetensors(dice: random.Random, data: bytes) -> bytes:
    """Its header as JSON."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = DEEP if dice.randrange(10) == 0 else json.dumps(mutate_value(dice, header))
    return len(text).to_bytes(8, "little") + text.encode() + data[8 + length :]


def mutate_gguf(dice: random.Random, data: bytes) -> bytes:
    """A number of its metadata, which stands behind its key."""
    key = dice.choice(GGUF_KEYS)
    at = data.find(key)
    number = dice.choice((0, 1, 3, 1000, 1 << 20, 10**9, (1 << 32) - 1))
    begin = data.find(b"\x04\x00\x00\x00", at) + 4  # type u32
    return data[:begin] + number.to_bytes(4, "little") + data[begin + 4 :] if at >= 0 else mutate_bytes(dice, data)


def replace_file(dice: random.Random, path: Path) -> None:
    path.unlink()
    match dice.randrange(6):
        case 0:
            os.mkfifo(path)
        case 1:
            path.symlink_to("/dev/zero")
        case 2:
            path.mkdir()
        case 3:
            path.symlink_to("/nonexistent")
        case 4:
            with path.open("wb") as file:  # sparse
                file.truncate(1 << 40)
        case 5:
            pass  # missing


def mutate(dice: random.Random, folder: Path) -> None:
    """Changes one file."""
    path = dice.choice(sorted(folder.iterdir()))
    how, data = dice.random(), path.read_bytes()
    if how < 0.08:
        replace_file(dice, path)
    elif how < 0.22:
        path.write_bytes(mutate_bytes(dice, data))
    elif path.suffix == ".safetensors":
        path.write_bytes(mutate_safetensors(dice, data))
    elif path.suffix == ".gguf":
        path.write_bytes(mutate_gguf(dice, data))
    elif path.suffix == ".json":
        path.write_text(json.dumps(mutate_value(dice, json.loads(data))))
    else:
        path.write_text(dice.choice(("{{ 10 ** 300000000 }}", "{% for", "{{ x }", "{{ messages[0].a.b.c }}")))


# -- cases -----------------------------------------------------------------------------------------------------------


def try_folder(steps: Sequence[Callable[[Path], object]], folder: Path, names: Sequence[str]) -> Outcome:
    """Runs in a fork. `names`: one of which a refusal must have. A crash says in CRASH, beside the folder, where."""
    faulthandler.enable((folder.parent / CRASH).open("w"))
    torch.set_num_threads(1)
    try:
        for step in steps:
            step(folder)
    except (ValueError, OSError) as error:
        said = f"{type(error).__name__}: {error}"
        return Outcome("refused" if any(name in said for name in names) else "unnamed", said[:2000])
    except BaseException as error:
        places = [f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" for frame in _frames(error.__traceback__)]
        ours = [place for place in places if "site-packages" not in place and "lib/python" not in place]
        return Outcome("traceback", f"{type(error).__name__}: {error!s:.300} at {' '.join([*ours[-3:], places[-1]])}")
    return Outcome("taken")


def _frames(traceback: Any) -> Iterator[Any]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def run_case(bases: Sequence[Base], work: Path, seed: int, number: int) -> tuple[Base, Outcome]:
    dice = random.Random(f"{seed} {number}")
    base = dice.choice(bases)
    folder = work / "case"
    shutil.copytree(base.folder, folder)
    names = [*(path.name for path in folder.iterdir()), "*.safetensors"]  # or the kind of file that is missing
    mutate(dice, folder)
    begin = dice.randrange(len(base.steps))  # also by hand, where nothing was checked before
    fork = Fork(LIMITS, lambda _: try_folder(base.steps[begin:], folder, names))
    answer = fork.ask_now()
    fork.end()
    shutil.rmtree(folder)
    if isinstance(answer, msgspec.Raw):
        return base, msgspec.msgpack.decode(answer, type=Outcome)
    where = (work / CRASH).read_text()
    return base, Outcome("crash" if answer == "crashed" else "hang", f"step {begin} of {base.folder.name}: {where}")


def run(cases: Sequence[int], seed: int, seconds: float, show: Callable[[str], None]) -> Counter[str]:
    """Outcome |-> how many. Shows failures. In a process without other threads: see `Fork`."""
    torch.set_num_threads(1)  # forks would wait for threads that they do not have
    counts, end_s = Counter[str](), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name, ExitStack() as patches:
        (Path(name) / "cache").mkdir()
        cache = str(link_kernels(Path(name) / "cache"))
        patches.enter_context(mock.patch.dict("os.environ", XDG_CACHE_HOME=cache))
        bases = write_bases(Path(name) / "bases")
        for number in cases:
            if time.monotonic() > end_s:
                break
            began = time.monotonic()
            base, outcome = run_case(bases, Path(name), seed, number)
            counts[outcome.kind] += 1
            took_s = time.monotonic() - began
            if outcome.kind not in ("taken", "refused") or len(cases) == 1 or took_s > 30:
                show(f"{number} {base.folder.name} {outcome.kind} {took_s:.1f} s {outcome.said}")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--jobs", type=int, default=num_cores())
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    cases = range(given.first, given.first + given.cases) if given.only is None else [given.only]
    work = partial(run, seed=given.seed, seconds=given.seconds, show=partial(print, flush=True))
    if given.jobs == 1:
        counts = work(cases)
    else:
        with ProcessPoolExecutor(given.jobs, get_context("spawn")) as processes:
            shares = [cases[first :: given.jobs] for first in range(given.jobs)]
            counts = sum(processes.map(work, shares), Counter[str]())
    print(f"{sum(counts.values())} folders:", ", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    return int(set(counts) - {"taken", "refused"} != set())


if __name__ == "__main__":
    sys.exit(main())
