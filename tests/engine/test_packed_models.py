"""Packed weights in files that workers share, and models that use them."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.compose import load_model
from engine.cpu import cache as weight_file
from engine.cpu.cache import MappedWeights, share_weights
from engine.layers.linear import WidenedLinear
from engine.weights import folders
from engine.weights.folders import CannotShareError
from tests.support.checkpoints import write_checkpoint
from tests.support.forks import ForkedCode
from tests.support.instruction_sets import no_compiler

__all__ = ["no_compiler"]  # a fixture

CPU = torch.device("cpu")


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_products_are_torchs(tmp_path: Path) -> None:
    decoder = load_model(write_checkpoint(tmp_path, "llama", layers=1), "bfloat16", CPU)
    assert isinstance(decoder.lm_head, WidenedLinear)
    assert decoder.logits(torch.randn(2, decoder.config.hidden_size).bfloat16()).dtype is torch.float32


def test_int8_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", layers=1)
    with pytest.raises(ValueError, match="--quantization int8 is for CPUs"):
        load_model(folder, "auto", torch.device("cuda"), quantization="int8")
    with pytest.raises(ValueError, match="set --dtype bfloat16 or auto"):
        load_model(folder, "float32", CPU, quantization="int8")


def take(store: weight_file.Weights) -> list[int]:
    """Two tensors, and their contents."""
    return [int(store.take(chr(code), 100, partial(torch.fill_, value=code))[0]) for code in b"ab"]


def test_a_file_is_written_once_and_made_anew_when_it_is_damaged(tmp_path: Path) -> None:
    packings: list[object] = []

    def pack_all(store: weight_file.Weights) -> None:
        packings.append(store)
        take(store)

    def open_file() -> list[int]:
        return take(share_weights(tmp_path, "model", 1000, pack_all))

    assert open_file() == open_file() == [97, 98] and len(packings) == 1
    path = tmp_path / "model.weights"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-16] + (1 << 40).to_bytes(8, "little") + whole[-8:], b"", whole[1000:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="not a file of packed weights"):
            MappedWeights(path)
        assert open_file() == [97, 98]
    assert len(packings) == 5 and path.read_bytes() == whole
    with pytest.raises(ValueError, match="c has -1 bytes in the cache file, expected 5"):
        MappedWeights(path).take("c", 5, lambda memory: None)


def test_a_file_that_cannot_be_written_is_explained_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(store: weight_file.Weights) -> None:
        take(store)
        raise OSError(28, "No space left on device")

    with pytest.raises(CannotShareError, match="No space left on device"):
        share_weights(tmp_path, "model", 1000, fail)
    with pytest.raises(CannotShareError, match="set XDG_CACHE_HOME to a folder with more"):
        share_weights(tmp_path, "model", 1 << 60, fail)
    monkeypatch.setattr(folders, "LOCK_S", 0.0)
    with (
        folders.locked(tmp_path / "model.lock"),
        pytest.raises(CannotShareError, match="another process has held"),
    ):
        share_weights(tmp_path, "model", 1000, fail)
    assert {path.name for path in tmp_path.iterdir()} == {"model.lock"}


def test_files_that_nobody_opens_or_writes_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = list[Path]()
    for name, age_s in (("old", weight_file.UNUSED_S + 60), ("young", 60)):
        share_weights(tmp_path, name, 1000, take)
        before = (tmp_path / f"{name}.weights").stat().st_mtime - age_s
        os.utime(tmp_path / f"{name}.weights", (before, before))
    for name in ("killed", "writing", "new"):
        (tmp_path / f"{name}.part").write_bytes(b"some")
    monkeypatch.setattr(weight_file, "_check_room", lambda folder, _: room.extend(sorted(folder.glob("*.part"))))
    with folders.locked(tmp_path / "writing.lock"):
        share_weights(tmp_path, "new", 1000, take)
    assert {path.stem for path in tmp_path.glob("*.weights")} == {"young", "new"}
    assert room == [tmp_path / "writing.part"] == list(tmp_path.glob("*.part")), "before room is looked for"


def test_processes_that_start_at_once_pack_once(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\nfrom pathlib import Path\nfrom engine.cpu.cache import share_weights\n"
        "def pack(store):\n"
        "    print('packs', flush=True)\n"
        "    store.take('a', 100, lambda memory: memory.fill_(7))\n"
        "    time.sleep(600 if sys.argv[2] == 'hang' else 0.2)\n"
        "print(int(share_weights(Path(sys.argv[1]), 'm', 100, pack).take('a', 100, None)[0]))\n"
    )

    def start(how: str) -> subprocess.Popen[str]:
        return ForkedCode([sys.executable, "-c", script, tmp_path, how], stdout=subprocess.PIPE, text=True)

    first = start("hang")
    assert first.stdout is not None and first.stdout.readline() == "packs\n"
    others = [start("go") for _ in range(2)]
    first.kill()
    first.communicate()
    printed = sorted(other.communicate(timeout=60)[0] for other in others)
    assert printed == ["7\n", "packs\n7\n"]
