"""The part of a model that sees images: transformers' own code, with nothing of the language model.

A file becomes pixels by the model's image processor, and pixels become rows in the place of image tokens.
"""

import inspect
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor

from engine.json_values import Json
from engine.models.assemble import OTHER_PARTS
from engine.ops.base import HALVES
from engine.vision.image_rows import Encoding
from engine.vision.wholes import WHOLES
from engine.weights.checkpoint import FLOATS, SafetensorsCheckpoint
from wire.files import read_json_object
from wire.image_files import read_image

PixelInputs = Mapping[str, Tensor]  # arguments of get_image_features, of one image
LARGEST = (4096, 4096)  # pixels; processors make larger ones smaller
TEXT_PARTS = ("language_model", "text_model")


class VisionTower:
    """Holds weights only. `read` and `encode` may run on any thread, `encode` on one at a time."""

    def __init__(self, model: Any, processor: Any, options: Mapping[str, Any], dtype: torch.dtype) -> None:
        """model: a PreTrainedModel without its language model, on its device; options: for the image processor.

        dtype: of encodings.
        """
        self._model = model.eval().requires_grad_(False)
        self._processor, self._options = processor, options
        self.num_bytes = sum(weight.nbytes for weight in model.parameters())
        self._takes = set(inspect.signature(inspect.unwrap(model.get_image_features)).parameters)
        weight = next(model.parameters())
        self._device, self._dtype, self._own_dtype = weight.device, dtype, weight.dtype
        self.joins = self._device.type == "cuda"  # images in one forward; each then rounds otherwise than alone
        self._stream: Any = None  # beside the steps of the language model
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def read(self, file: bytes) -> PixelInputs:
        """A file as pixels on the host. ValueError if it is not an image that the model's processor takes."""
        try:
            found = self._processor(images=[read_image(file)], return_tensors="pt", **self._options)
        except Exception as error:  # decoders and processors raise anything
            raise ValueError(f"not an image that the model can read: {type(error).__name__}: {error}") from error
        return {name: torch.as_tensor(value) for name, value in found.items() if name in self._takes}

    @torch.inference_mode()
    def encode(self, images: Sequence[PixelInputs]) -> list[Encoding]:
        """In one forward for all whose inputs have the same shapes, if it `joins`. Waits for the device."""
        alike = dict[tuple[object, ...], list[int]]()
        for index, image in enumerate(images):
            shapes = tuple(value.shape for value in image.values())
            alike.setdefault(shapes if self.joins else (index,), []).append(index)
        found = dict[int, Encoding]()
        with torch.cuda.stream(self._stream):
            for group in alike.values():
                joined = {name: torch.cat([images[index][name] for index in group]) for name in images[group[0]]}
                found.update(zip(group, self._encode_alike(joined, len(group)), strict=True))
        if self._stream is not None:
            self._stream.synchronize()
        return [found[index] for index in range(len(images))]

    def encode_largest(self) -> None:
        """An image of as many pixels as any may have, to see how much memory that takes."""
        file = BytesIO()
        Image.new("RGB", LARGEST).save(file, "PNG")
        self.encode([self.read(file.getvalue())])

    def _encode_alike(self, joined: PixelInputs, count: int) -> list[Encoding]:
        """joined: of `count` images, one after the other."""
        given = {
            name: value.to(self._device, self._own_dtype if value.is_floating_point() else value.dtype)
            for name, value in joined.items()
        }
        output = self._model.get_image_features(**given, return_dict=True)
        deep = getattr(output, "deepstack_features", None)
        rows = self._split(output.pooler_output, count)
        if not deep:
            return [Encoding(own, None) for own in rows]
        layers = [self._split(layer, count) for layer in deep]
        return [Encoding(own, torch.stack(of_layers)) for own, *of_layers in zip(rows, *layers, strict=True)]

    def _split(self, parts: Sequence[Tensor] | Tensor, count: int) -> list[Tensor]:
        """Parts [.., n, H] of `count` images, equally many of each |-> [n, H] of each image."""
        own = len(parts) // count
        of_each = [parts[at : at + own] for at in range(0, own * count, own)]
        return [torch.cat([part.flatten(0, -2) for part in its]).to(self._dtype) for its in of_each]


def load_tower(folder: Path, dtype: torch.dtype, device: torch.device) -> VisionTower | None:
    """None: the checkpoint has no such part. ValueError if Baton gives the model no images, or for a damaged file.

    A CPU without instructions for `dtype` computes in float32: there torch takes seven times as long in others.
    """
    config = read_json_object(folder / "config.json")
    if config.get("vision_config") is None:
        return None
    _check(config, folder)
    try:
        is_slow = device.type == "cpu" and dtype in HALVES and not HALVES[dtype]()
        model, processor, lacking = _load(folder, torch.float32 if is_slow else dtype)
    except Exception as error:  # transformers' code of any model
        raise ValueError(f"transformers cannot load how {folder} sees images: {error}") from error
    if lacking:
        raise ValueError(f"the checkpoint lacks parts of its vision tower, or has others: {', '.join(lacking[:8])}")
    return VisionTower(model.to(device), processor, _find_options(model.config), dtype)


def _load(folder: Path, dtype: torch.dtype) -> tuple[Any, Any, list[str]]:
    """The model without its language model, its image processor, and the tensors that it lacks."""
    from transformers import AutoConfig, AutoImageProcessor, AutoModel  # seconds
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # on stderr
    configs, processors, models = cast(Any, (AutoConfig, AutoImageProcessor, AutoModel))
    config = configs.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config.audio_config = config.quantization_config = None
    processor = processors.from_pretrained(folder, backend="pil", local_files_only=True, trust_remote_code=False)
    model, report = _without_text(models._model_mapping[type(config)]).from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        trust_remote_code=False,
    )
    return model, processor, sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])])


def _check(config: Json, folder: Path) -> None:
    kind = config.get("model_type")
    whole = WHOLES.get(kind) if isinstance(kind, str) else None
    if whole is None or whole.image_token is None:
        able = ", ".join(name for name, one in WHOLES.items() if one.image_token is not None)
        raise ValueError(f"images for model_type {kind!r} are not supported; supported: {able}")
    for name, entry in SafetensorsCheckpoint(folder).entries.items():
        if entry.dtype not in FLOATS and name.removeprefix("model.").startswith(OTHER_PARTS):
            raise ValueError(f"the vision tower is stored as {entry.dtype} ({name}); supported: {', '.join(FLOATS)}")


def _without_text(kind: Any) -> Any:
    """The model's class, less its language model. transformers finds its names of weights by the class's."""

    def build(self: Any, config: Any) -> None:
        kind.__init__(self, config)
        for part in TEXT_PARTS:
            if hasattr(self, part):
                setattr(self, part, None)

    fields = {"__init__": build, "__module__": kind.__module__, "_keys_to_ignore_on_load_unexpected": [""]}
    return type(kind.__name__, (kind,), fields)


def _find_options(config: Any) -> dict[str, Any]:
    """The options that transformers' processor of the model passes to its image processor."""
    if config.vision_config.model_type == "pixtral":
        return {"patch_size": config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)}
    return {"do_pan_and_scan": False} if config.model_type == "gemma3" else {}
