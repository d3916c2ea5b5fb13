"""The process that reads clients' images: `python -m gateway.images.processor_process FD`.

It loads the model's processor once, then forks for each image. The fork decodes the file and asks the processor for the
text that stands for the image in prompts. It has limits of CPU time and memory and ends with its image.
"""

import asyncio
import gc
import hashlib
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

from gateway.images.families import PROCESSORS
from runtime.child import serve_parent
from runtime.fork import Busy, Limits, Refused, as_answer, work_in_fork
from wire.files import blamed, blamed_tokenizer, check_folder
from wire.image_files import read_image
from wire.image_formats import FORMATS

CPU_S = 10  # for one image
WALL_S = 60.0  # the same where the CPU is shared with others
NICE = 10  # steps of workers on the same cores go first
MEMORY_BYTES = 2 << 30


class ReaderStart(msgspec.Struct, tag=True):
    """The first call; answered by ReaderReady or Refused."""

    folder: str  # of the model
    family: str  # of PROCESSORS
    max_pixels: int


class ReadFile(msgspec.Struct, tag=True):
    """Answered by ReadImage, Refused or Busy."""

    file: bytes


class ReaderReady(msgspec.Struct, tag=True):
    """The processor is loaded."""

    fingerprint: str  # of its settings
    placeholder: str  # what stands for an image in a rendered chat


class ReadImage(msgspec.Struct, tag=True):
    """An image as the processor has read it."""

    text: str  # in the placeholder's place
    rows: int  # of image tokens, where the processor counts them so; else 0
    columns: int


Call = ReaderStart | ReadFile
Answer = ReaderReady | ReadImage | Refused | Busy


class ImageReader:
    """Answers the gateway's calls."""

    def __init__(self, fd: int) -> None:
        """fd: of the gateway's calls."""
        self._fd = fd

    async def answer(self, call: Call) -> Answer | msgspec.Raw:
        if isinstance(call, ReaderStart):
            self._max_pixels = call.max_pixels
            try:
                return self._load(Path(call.folder), call.family)
            except (OSError, ValueError) as error:
                return Refused(f"the model's image processor cannot be loaded: {error}")
        limits = Limits(CPU_S, WALL_S, MEMORY_BYTES)
        found = await work_in_fork(self._fd, limits, lambda: process(self._processor, call.file, self._max_pixels))
        return as_answer(found, slow=f"it takes longer than {CPU_S} s to decode", crashed="the decoder crashed on it")

    def _load(self, folder: Path, family: str) -> ReaderReady:
        """ValueError or OSError name the file that is wrong."""
        check_folder(folder)
        with blamed(_settings_of(folder)):
            self._processor = load_processor(folder, family)
            for name in FORMATS.values():  # loads what is loaded at first use: each fork would do it
                file = BytesIO()
                Image.new("RGB", (64, 64)).save(file, name)
                tried = process(self._processor, file.getvalue(), self._max_pixels)
                if isinstance(tried, Refused):
                    raise ValueError(f"it takes no {name}: {tried.message}")
            gc.collect()
            gc.freeze()
            return ReaderReady(fingerprint(self._processor), str(self._processor.image_token))


def load_processor(folder: Path, family: str) -> Any:
    """transformers' own processor of a model, without what it has for videos and sound. Raises as transformers does."""
    from transformers import AutoImageProcessor, AutoTokenizer

    name, its_class = PROCESSORS[family]
    pixels: Any = AutoImageProcessor
    with blamed_tokenizer(folder):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    own = {"backend": "pil", "local_files_only": True}
    parts = {
        "image_processor": pixels.from_pretrained(str(folder), **own, trust_remote_code=False),
        "tokenizer": tokenizer,
    }
    base = getattr(import_module(f"transformers.models.{name}.processing_{name}"), its_class)
    # the check refuses processors with parts that are None
    lenient = type(its_class, (base,), {"check_argument_for_proper_class": lambda self, *arguments: None})
    settings, _ = base.get_processor_dict(str(folder), local_files_only=True, trust_remote_code=False)
    return lenient.from_args_and_dict([parts.get(part) for part in base.get_attributes()], settings)  # type: ignore[attr-defined]


def _settings_of(folder: Path) -> Path:
    """The file that describes the processor."""
    names = ("preprocessor_config.json", "processor_config.json")
    return next((path for name in names if (path := folder / name).exists()), folder / names[0])


def fingerprint(processor: Any) -> str:
    """Equal for processors that make the same of each image."""
    settings: Mapping[str, Any] = {name: value for name, value in vars(processor).items() if name.startswith("image_")}
    told = [f"{name}={settings[name]!s}" for name in sorted(settings)]
    return hashlib.sha256("\n".join([type(processor).__name__, *told]).encode()).hexdigest()


def process(processor: Any, file: bytes, max_pixels: int) -> ReadImage | Refused:
    """Runs in a process of its own, within limits."""
    try:
        image = read_image(file, max_pixels)
        settings = {**processor._merge_kwargs()["images_kwargs"], "return_tensors": "np"}
        settings |= {"do_rescale": False, "do_normalize": False}  # only sizes are wanted
        inputs, (text,) = processor._process_images([image], **settings)
    except MemoryError:
        return Refused("it needs too much memory")
    except ValueError as error:  # of the processor: a shape that the model cannot take
        return Refused(str(error)[:200])
    rows = columns = 0
    if "image_grid_thw" in inputs:  # of patches, of which each token stands for a square
        rows, columns = (int(size) // processor.image_processor.merge_size for size in inputs["image_grid_thw"][0][1:])
    return ReadImage(text, rows, columns)


def _leave_out_torch() -> None:
    """Processors compute with numpy here: without torch this process starts in a second and takes 70 MiB."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would warn of that
    # Pixtral's processor takes a function from a module that needs torchvision, of which this is the twin
    twin = import_module("transformers.models.pixtral.image_processing_pil_pixtral")
    sys.modules["transformers.models.pixtral.image_processing_pixtral"] = twin


if __name__ == "__main__":
    os.nice(NICE)
    _leave_out_torch()
    asyncio.run(serve_parent(int(sys.argv[1]), Call, ImageReader(int(sys.argv[1])).answer))
