"""What goes into one engine, and what is refused before anything large is allocated."""

from pathlib import Path

import pytest

from engine.engine import Engine, build_engine
from tests.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Checkpoints by their context."""
    return {
        context: write_checkpoint(tmp_path_factory.mktemp(str(context)), "llama", layers=1, context=context)
        for context in (64, 256)
    }


def build(model: Path, draft: Path | str, max_context_tokens: int) -> Engine:
    return build_engine(
        str(model), str(draft), "float32", "cpu", 1, 16, 4, lambda _context, _bytes, _free: 4,
        lambda _done, _total: None,
        max_context_tokens,
    )  # fmt: skip


@pytest.mark.parametrize(("target", "max_context_tokens"), [(256, 64), (256, 16), (64, 0)])
def test_a_draft_needs_only_the_context_in_use(folders: dict[int, Path], target: int, max_context_tokens: int) -> None:
    engine = build(folders[target], folders[64], max_context_tokens)
    assert engine.draft_runner is not None
    assert engine.config.context_tokens == target


@pytest.mark.parametrize(("max_context_tokens", "context"), [(0, 256), (65, 65), (256, 256), (1000, 256)])
def test_a_draft_of_a_smaller_context_is_refused(
    folders: dict[int, Path], max_context_tokens: int, context: int
) -> None:
    said = f"takes 64 tokens, less than a context of {context}: set --max-context-tokens 64 or less"
    with pytest.raises(ValueError, match=said):
        build(folders[256], folders[64], max_context_tokens)


def test_a_draft_of_another_vocabulary_is_refused(folders: dict[int, Path], tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, "llama", layers=1, vocab=300)
    with pytest.raises(ValueError, match="its vocab_size is 300, the model's 320"):
        build(folders[64], other, 0)


def test_a_config_that_is_no_object_is_told(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", layers=1)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json holds a list, not a JSON object"):
        build(folder, "", 0)
