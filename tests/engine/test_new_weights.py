"""Other weights in place: an engine then computes as one built with them; a GPU's tensors keep their places."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import ForwardRow
from engine.compose import PARTS, FullEngine, build_engine, check_new_weights, open_device, read_new_weights
from engine.formats.products import GpuFormat
from engine.layers.linear import Quantization
from engine.models import load
from engine.models.decoder import Decoder
from engine.models.load import DecoderT, OpenFormat, Source
from engine.new_weights import WEIGHTS, HostFormat, find_copies, find_values, take_copies
from engine.weights.formats import PlainFormat
from tests.support.checkpoints import write_checkpoint
from tests.support.forward import Steps
from wire.sampling import SamplingParams

CPU = torch.device("cpu")
VOCAB, PROMPT = 300, np.arange(20, 80, dtype=np.int32)
FAMILIES = ("llama", "qwen3_moe", "gpt_oss", "gemma4_e2b", "deepseek_v3", "lfm2", "qwen3_5_text")  # one of each part
FORMATS: dict[str, Callable[..., PlainFormat]] = {
    "plain": PlainFormat,
    "groups": lambda reader, ops: GpuFormat(reader, ops, "int4"),
}


def build(folder: Path, dtype: str, quantization: Quantization) -> FullEngine:
    return build_engine(
        str(folder), "", dtype, "cpu", 1, 16, 4, lambda *_: (8, 0), lambda _done, _total: None,
        quantization=quantization,
    )  # fmt: skip


def answer(engine: FullEngine) -> list[int]:
    engine.rows.open(0, PROMPT, SamplingParams(temperature=0.0), len(PROMPT))
    engine.rows.write_pages(0, 0, range(5))
    tokens = engine.runner.launch([ForwardRow(0, 0, len(PROMPT), 1)]).collect().tokens
    for step in range(10):
        tokens += engine.runner.launch([ForwardRow(0, len(PROMPT) + step, 1, 1)]).collect().tokens
    engine.rows.close(0)
    return tokens


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("auto", "int4")])
def test_an_engine_computes_with_the_new_weights_alone(tmp_path: Path, dtype: str, quantization: Quantization) -> None:
    old, new = (write_checkpoint(tmp_path / str(seed), "llama", vocab=VOCAB, seed=seed) for seed in (1, 2))
    engine, other = build(old, dtype, quantization), build(new, dtype, quantization)
    before, expected = answer(engine), answer(other)
    assert before != expected
    take = read_new_weights(engine, new, check_new_weights(engine, new))
    assert answer(engine) == before, "they wait"
    take()
    assert answer(engine) == expected
    assert check_new_weights(engine, new) == other.weights


def test_what_has_changed_since_it_was_looked_at_is_refused(tmp_path: Path) -> None:
    old, new = (write_checkpoint(tmp_path / str(seed), "llama", vocab=VOCAB, seed=seed) for seed in (1, 2))
    engine = build(old, "float32", "none")
    weights = check_new_weights(engine, new)
    write_checkpoint(new, "llama", vocab=VOCAB, seed=3)
    with pytest.raises(ValueError, match="expected"):
        read_new_weights(engine, new, weights)


def test_the_difference_to_another_model_is_named(tmp_path: Path) -> None:
    engine = build(write_checkpoint(tmp_path / "old", "llama", vocab=VOCAB), "float32", "none")
    shapes: list[tuple[dict[str, Any], str]] = [
        ({"hidden": 64}, "hidden_size is 64, here it is 128"),
        ({"layers": 1}, "layers is"),
        ({"vocab": 310}, "vocab_size is 310, here it is 300"),
        ({"context": 64}, "context_tokens is 64"),
    ]
    for shape, said in shapes:
        other = write_checkpoint(tmp_path / str(shape), "llama", **{"vocab": VOCAB} | shape)
        with pytest.raises(ValueError, match=said):
            check_new_weights(engine, other)
    with pytest.raises(FileNotFoundError):
        check_new_weights(engine, tmp_path / "nothing")
    (file,) = (tmp_path / "old").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="safetensors"):
        check_new_weights(engine, tmp_path / "old")


def load_by(folder: Path, build_format: Callable[..., PlainFormat]) -> Decoder:
    """As read_new_weights loads for a GPU, with this format."""

    def build(build: Callable[[OpenFormat], DecoderT], source: Source) -> DecoderT:
        return build(lambda reader, ops: cast(PlainFormat, HostFormat(build_format(reader, ops))))

    return load.load_model(folder, "float32", open_device(CPU), replace(PARTS, build=build))


def find_tensors(decoder: Decoder) -> Iterator[Tensor]:
    for name in WEIGHTS:
        yield from (value for _, value in find_values(getattr(decoder, name)) if isinstance(value, Tensor))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_copies_are_of_all_weights_and_leave_tensors_in_their_places(tmp_path: Path, family: str, format: str) -> None:
    folders = [write_checkpoint(tmp_path / str(seed), family, seed=seed) for seed in (1, 2)]
    old, new, expected = (load_by(folder, FORMATS[format]) for folder in (*folders, folders[1]))
    for tensor in find_tensors(old):
        tensor.data = tensor.data.clone()  # a file's mapping is not written to
    places = [tensor.data_ptr() for tensor in find_tensors(old)]
    take_copies(find_copies(old, new))
    assert [tensor.data_ptr() for tensor in find_tensors(old)] == places
    outputs = []
    for decoder in (old, expected):
        steps = Steps(folders[1])
        steps.decoder = decoder
        outputs.append(steps.step((0, 0, 70)))
    for here, there in zip(*outputs, strict=True):
        assert torch.equal(here, there)


def test_a_part_that_differs_in_more_than_its_elements_is_named(tmp_path: Path) -> None:
    old, other = (
        load_by(write_checkpoint(tmp_path / str(size), "llama", intermediate=size), PlainFormat) for size in (256, 128)
    )
    with pytest.raises(
        ValueError, match=r"_layers\[0\]\.mlp\..* is \(torch.Size\(\[512, 128\]\), torch.float32\) here"
    ):
        find_copies(old, other)
