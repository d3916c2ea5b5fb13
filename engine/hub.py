"""Finds a model by its name: a folder, a GGUF file, or a model of the Hugging Face hub."""

from collections.abc import Callable
from pathlib import Path

from engine.weights.files import GGUF, is_path
from wire.files import check_access

DOWNLOADED = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "*.txt"]
NOT_DOWNLOADED = ["*.bin", "*.py", "*.pt", "*.pth", "[!0-9]*/*", "consolidated*"]  # folders such as 1_Pooling are


def resolve_model_folder(name_or_path: str, make_gguf_folder: Callable[[Path], Path]) -> Path:
    """A folder stays as it is, and a GGUF file gets one; else it is a hub id, in the local cache or to be downloaded.

    Fetches only configs, safetensors and tokenizer files. Raises FileNotFoundError that says what to do if the name is
    neither, the hub does not know it, or the hub cannot be reached; DeniedError.
    """
    folder = Path(name_or_path).expanduser()
    check_access(folder)
    if folder.is_dir():
        return folder
    if folder.suffix == GGUF and folder.is_file():
        return make_gguf_folder(folder)
    if is_path(name_or_path):
        raise FileNotFoundError(f"model folder {name_or_path!r} does not exist")
    from huggingface_hub import snapshot_download  # not for models that are folders

    try:
        found = snapshot_download(name_or_path, allow_patterns=DOWNLOADED, ignore_patterns=NOT_DOWNLOADED)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"model {name_or_path!r} is not a folder here and could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}). Offline: copy the "
            "model's folder (config.json, *.safetensors, tokenizer files) to this machine and pass its path, or fill "
            "the cache elsewhere with `hf download` and point HF_HOME at it. Private or gated: set HF_TOKEN."
        ) from error
    return Path(found)
