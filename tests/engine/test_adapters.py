"""Adapters (LoRA) behind products: the merged model's tokens, in one batch with others and with the base."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft.utils.other import get_pattern_key
from torch import Tensor

from engine.adapters import peft
from engine.adapters.ops import AdapterOps
from engine.adapters.peft import find_alphas, find_digest
from engine.adapters.rows import AdapterTiles, AdapterWeights, divide_columns, sort_rows
from engine.adapters.slots import AdapterLimits
from engine.batch import ForwardRow, take_turns
from engine.compose import FullEngine, build_engine
from engine.cpu import cpu_adapters
from engine.cpu.ops import CpuOps
from engine.cuda.captured import capture_graphs
from engine.cuda.graph_shapes import Shape
from engine.cuda.ops import CudaOps
from engine.runner import Runner
from tests.support.checkpoints import write_checkpoint
from tests.support.combinations import combination
from tests.support.families import VOCAB
from tests.support.lora import greedy, write_adapter
from wire.sampling import SamplingParams

PROMPTS = [
    torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (40, 7, 19)
]
LIMITS, PAGE = AdapterLimits(3, 8), 16
COUNT = 8


def build(
    folder: Path, dtype: str = "float32", limits: AdapterLimits = LIMITS, draft: str = "", **options: Any
) -> FullEngine:
    return build_engine(
        str(folder), draft, dtype, "cpu", 2, PAGE, 4, lambda *_: (64, 8), lambda done, total: None,
        adapter_limits=limits, **options,
    )  # fmt: skip


def answer(engine: FullEngine, slots: list[int], count: int = COUNT, runner: Runner | None = None) -> list[list[int]]:
    """Greedy answers to PROMPTS in one batch, each with the adapter of its slot. runner: None: the engine's."""
    rows, answers = engine.rows, [list[int]() for _ in slots]
    for row, (prompt, slot) in enumerate(zip(PROMPTS, slots, strict=False)):
        rows.open(row, np.array(prompt, np.int32), SamplingParams(temperature=0), len(prompt), slot)
        rows.write_pages(row, 0, list(range(8 * row, 8 * row + 8)))
    for step in range(count):
        asked = []
        for row, own in enumerate(answers):
            length = len(PROMPTS[row]) + len(own)
            begin = length - 1 if own else 0
            source, target = take_turns(row, step)
            asked.append(ForwardRow(row, begin, length - begin, 1, state_from=source, state_to=target))
        for own, token in zip(answers, (runner or engine.runner).launch(asked).collect().tokens, strict=True):
            own.append(token)
    for row in range(len(slots)):
        rows.close(row)
    return answers


def load(engine: FullEngine, slot: int, folder: Path) -> None:
    assert engine.adapters is not None and engine.read_adapter is not None
    engine.adapters.hosted[folder.name] = engine.read_adapter(folder)
    engine.rows.fill_slot(slot, folder.name)


@pytest.mark.parametrize(
    "family",
    [
        "llama", combination("phi3"), combination("glm"), "qwen3_moe", combination("gemma4_e2b"),
        combination("qwen3_5_text"), combination("gpt_oss"), "lfm2", "deepseek_v3", combination("minicpm3"),
    ],
)  # fmt: skip
def test_each_row_has_its_own_adapter_or_none(family: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", family)
    merged = [
        write_adapter(tmp_path / "one", base, family, seed=1, r=4, lora_alpha=8),
        write_adapter(tmp_path / "two", base, family, seed=2, r=8, lora_alpha=6, use_rslora=True),
    ]
    engine, plain = build(base), build(base, limits=AdapterLimits(0, 1))
    load(engine, 0, tmp_path / "one")
    load(engine, 2, tmp_path / "two")
    expected = [greedy(merged[0], PROMPTS[0], COUNT), greedy(merged[1], PROMPTS[1], COUNT), answer(plain, [-1] * 3)[2]]
    assert answer(engine, [0, 2, -1]) == expected
    assert answer(engine, [-1] * 3) == answer(plain, [-1] * 3)
    load(engine, 0, tmp_path / "two")
    assert answer(engine, [0]) == [greedy(merged[1], PROMPTS[0], COUNT)]


PATTERNS = {  # in the order in which PEFT writes them
    r".*\.layers\.1\..*(q_proj|k_proj)": 32, "0.self_attn.v_proj": 5, r"^model\.layers\.0.*\.down_proj": 2,
    r"layers\.[1-9]\d*\.mlp\.up_proj": 0.5, "v_proj": 3,
}  # fmt: skip


def test_patterns_choose_alphas_and_ranks_as_in_peft(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "llama")
    ranks = {r".*\.1\..*o_proj": 6, "gate_proj": 2}
    merged = write_adapter(tmp_path / "one", base, "llama", seed=1, alpha_pattern=PATTERNS, rank_pattern=ranks)
    engine = build(base)
    load(engine, 0, tmp_path / "one")
    assert answer(engine, [0]) == [greedy(merged, PROMPTS[0], COUNT)]
    names = [f"{start}layers.{n}.{end}" for start in ("model.", "model.language_model.", "") for n in (0, 1, 12)
             for end in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")]  # fmt: skip
    expected = {name: PATTERNS.get(get_pattern_key(list(PATTERNS), name), 8) for name in names}
    assert find_alphas({"alpha_pattern": PATTERNS}, names) == expected


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_packed_products_add_the_same_and_leave_the_base_as_it_is(quantization: Any, tmp_path: Path) -> None:
    """Gate and up are 100 wide: their last panels are partly padding."""
    base = write_checkpoint(tmp_path / "base", "llama", hidden=192, intermediate=100, dtype=torch.bfloat16)
    write_adapter(tmp_path / "one", base, "llama", seed=1)
    engine, plain = (
        build(base, "bfloat16", limits, quantization=quantization) for limits in (LIMITS, AdapterLimits(0, 1))
    )
    load(engine, 1, tmp_path / "one")
    mixed, alone = logits(engine, [1, -1]), logits(plain, [-1, -1])
    assert torch.equal(mixed[1], alone[1]) and torch.equal(logits(engine, [-1, -1]), alone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuOps, "add_adapters_", AdapterOps.add_adapters_)
        twin = logits(engine, [1, -1])
    torch.testing.assert_close(mixed[0], twin[0], rtol=0.05, atol=0.15)
    assert (mixed[0] - alone[0]).abs().max() > 1


def logits(engine: FullEngine, slots: list[int]) -> Tensor:
    """[rows, 5] the top log-probabilities after PROMPTS, by their tokens' order."""
    rows, asked = engine.rows, []
    for row, (prompt, slot) in enumerate(zip(PROMPTS, slots, strict=False)):
        rows.open(row, np.array(prompt, np.int32), SamplingParams(temperature=0), len(prompt), slot)
        rows.write_pages(row, 0, list(range(8 * row, 8 * row + 8)))
        asked.append(ForwardRow(row, 0, len(prompt), 1, chosen_logprobs=VOCAB))
    found = engine.runner.launch(asked).collect().logprobs
    table = torch.zeros(len(slots), VOCAB)
    for row, one in enumerate(found):
        assert one is not None
        table[row, torch.tensor(one.top_ids)] = torch.tensor(one.top_logprobs)
        rows.close(row)
    return table


SLOTS = np.array([-1, 2, 0, 2, -1, *[1] * 37, 3, 2, -1], np.int32)


@pytest.mark.parametrize("ops", [AdapterOps(), CpuOps(), CudaOps()], ids=lambda ops: type(ops).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("depth, sizes, alternates", [(96, [70, 33, 5], False), (1500, [48, 48], True)])
def test_kernels_add_what_the_definition_says(
    ops: AdapterOps, dtype: torch.dtype, depth: int, sizes: list[int], alternates: bool
) -> None:
    if isinstance(ops, CudaOps) and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter does not multiply bfloat16")
    seeded, rank, num_slots = torch.Generator().manual_seed(0), 6, 4

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=seeded).to(dtype)

    blocks = divide_columns(sizes, 16, alternates=True) if alternates else divide_columns(sizes)
    a, b = randn(num_slots, len(sizes) * rank, depth) * 0.1, randn(num_slots, rank, sum(sizes))
    weights = AdapterWeights(a, b, torch.tensor([rank, rank, rank, 0], dtype=torch.int32), torch.from_numpy(blocks))
    rows, out = randn(len(SLOTS), depth), randn(len(SLOTS), sum(sizes))
    part_of = torch.cat([torch.full((end - begin,), part) for begin, end, part in blocks.tolist()])
    truth = out.double()
    for row, slot in enumerate(SLOTS.tolist()):
        if slot in (0, 1, 2):
            shrunk = (a[slot].double() @ rows[row].double()).view(len(sizes), rank)
            truth[row] += (b[slot].double() * shrunk[part_of].T).sum(0)
    host = sort_rows(SLOTS)
    host.check(len(SLOTS), num_slots)
    ops.add_adapters_(out, rows, AdapterTiles(*map(torch.from_numpy, host)), weights)
    torch.testing.assert_close(out.double(), truth, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def test_the_cpu_takes_nothing_that_does_not_fit() -> None:
    host = sort_rows(SLOTS)
    sort_rows(np.zeros(0, np.int32)).check(0, 4)  # a step of a prompt alone has no rows with logits
    for bad in (host._replace(rows=host.rows + 9), host._replace(tiles=host.tiles * 2)):
        with pytest.raises(ValueError, match="adapters"):
            bad.check(len(SLOTS), 4)
    weights = AdapterWeights(torch.zeros(2, 4, 8), torch.zeros(2, 4, 8), *[torch.zeros(2, dtype=torch.int32)] * 2)
    with pytest.raises(ValueError, match="adapters"):
        cpu_adapters.add_adapters_(
            torch.zeros(3, 8), torch.zeros(3, 9), AdapterTiles(*map(torch.from_numpy, host)), weights
        )


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "dora": (dict(use_dora=True), "use_dora True"),
    "whole modules": (dict(modules_to_save=["lm_head"]), r"modules_to_save \['lm_head'\]"),
    "initialisation": (dict(init_lora_weights="pissa"), "init_lora_weights 'pissa'"),
    "biases": (dict(bias="all"), "bias 'all'"),
    "another method": (dict(peft_type="IA3"), "peft_type 'IA3'"),
    "an unknown setting": (dict(use_future=3), "use_future 3"),
    "alpha": (dict(lora_alpha=-1), "lora_alpha"),
    "no alpha": (dict(lora_alpha=None), r"adapter_config\.json: lora_alpha must be a number"),
    "rank": (dict(r=[4]), r"adapter_config\.json: r must be an integer"),
    "a pattern that is none": (dict(alpha_pattern={"(": 4}), r"adapter_config\.json: has alpha_pattern '\('"),
    "hours of matching": (dict(alpha_pattern={"(.|.)*[^a-z._]": 4}), r"adapter_config\.json: alpha_pattern .* takes"),
    "memory of a pattern": (dict(alpha_pattern={"((a{999}){999}){999}": 4}), r"json: has alpha_pattern '\(\(a\{999"),
    "a pattern's alpha": (dict(alpha_pattern={"q_proj": "x"}), r"adapter_config\.json: alpha_pattern must be a number"),
}


@pytest.mark.parametrize("settings, message", BAD.values(), ids=BAD)
def test_what_would_be_computed_differently_is_refused(
    settings: dict[str, Any], message: str, adapter: tuple[FullEngine, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(peft, "MATCH_S", 0.1)
    engine, folder = adapter
    config = json.loads((folder / "adapter_config.json").read_text()) | settings
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    assert engine.read_adapter is not None
    with pytest.raises(ValueError, match=message):
        engine.read_adapter(tmp_path)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[FullEngine, Path]:
    folder = tmp_path_factory.mktemp("adapter")
    base = write_checkpoint(folder / "base", "llama")
    write_adapter(folder / "one", base, "llama", seed=1)
    return build(base), folder / "one"


def test_an_adapter_of_another_model_or_rank_is_refused(adapter: tuple[FullEngine, Path], tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", "llama", hidden=192)
    write_adapter(tmp_path / "wrong", other, "llama", seed=1)
    write_adapter(tmp_path / "large", other, "llama", seed=1, r=9)
    write_adapter(tmp_path / "head", other, "llama", seed=1, targets=["lm_head", "q_proj"])
    read = adapter[0].read_adapter
    assert read is not None
    for name, message in {"wrong": "another model", "large": "--max-lora-rank 9", "head": "lm_head"}.items():
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read(tmp_path / "none")
    (tmp_path / "wrong" / "adapter_model.safetensors").write_bytes(b"1234567890")
    with pytest.raises(ValueError, match="truncated"):
        read(tmp_path / "wrong")


def test_an_adapter_of_what_absorbed_queries_take_is_refused(tmp_path: Path) -> None:
    """kv_b_proj of latent attention, which is no product of rows."""
    base = write_checkpoint(tmp_path / "base", "deepseek_v3")
    write_adapter(tmp_path / "one", base, "deepseek_v3", seed=1, targets=["kv_b_proj"])
    read = build(base).read_adapter
    assert read is not None
    with pytest.raises(ValueError, match=r"adapts layers.0.self_attn.kv_b_proj, which Baton does not"):
        read(tmp_path / "one")


def test_the_digest_is_of_the_content(adapter: tuple[FullEngine, Path], tmp_path: Path) -> None:
    folder = adapter[1]
    config = json.loads((folder / "adapter_config.json").read_text())
    digests = {find_digest(folder)}
    for number, change in enumerate([dict(base_model_name_or_path="x", lora_dropout=0.5), dict(lora_alpha=3)]):
        copy = tmp_path / str(number)
        copy.mkdir()
        (copy / "adapter_config.json").write_text(json.dumps(config | change))
        data = (folder / "adapter_model.safetensors").read_bytes()
        (copy / "adapter_model.safetensors").write_bytes(data)
        digests.add(find_digest(copy))
    assert len(digests) == 2, "only what changes tokens counts"


def count_replays(replays: list[str], compute: Callable[[], None]) -> Callable[[], None]:
    """A capture whose replays are counted."""
    compute()

    def replay() -> None:
        replays.append("forward or choice")
        compute()

    return replay


def test_steps_as_graphs_are_those_launched_one_by_one(adapter: tuple[FullEngine, Path], tmp_path: Path) -> None:
    eager, folder = adapter
    load(eager, 0, folder)
    expected = answer(eager, [0, -1, 0])
    engine, replays = build(folder.parent / "base"), list[str]()
    captured = [Shape(1), Shape(4), Shape(4, 2)]
    capture_graphs(engine.runner, captured, partial(count_replays, replays), padding_page=63)
    load(engine, 2, folder)
    assert answer(engine, [2, -1, 2]) == expected
    assert answer(engine, [-1, -1, -1]) == answer(eager, [-1, -1, -1])
    assert len(replays) == 2 * 2 * (COUNT - 1), "a step is a forward and a choice of tokens"


def test_a_draft_model_drafts_for_rows_with_adapters_in_graphs_too(adapter: tuple[FullEngine, Path]) -> None:
    """It has no adapters."""
    folder = adapter[1]
    engine, replays = build(folder.parent / "base", draft=str(folder.parent / "base")), list[str]()
    load(engine, 2, folder)
    assert engine.draft_runner is not None
    expected = answer(engine, [-1, -1, -1], runner=engine.draft_runner)
    assert answer(engine, [2, -1, 2], runner=engine.draft_runner) == expected

    capture_graphs(engine.draft_runner, [Shape(4)], partial(count_replays, replays), padding_page=63)
    assert answer(engine, [2, -1, 2], runner=engine.draft_runner) == expected
    assert len(replays) == 2 * (COUNT - 1)
