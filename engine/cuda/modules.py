"""FlashInfer's modules that are built ahead: which ones a model needs, and which GPUs can run them.

FlashInfer loads `data/aot/NAME/NAME.so` on any GPU, also on one that it was not built for, which fails at the first
step. So `bench.gpu_checks.prebuild` lists the architectures beside the modules, and `find_gap` compares. Imports
neither torch nor FlashInfer.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from engine.attention.shape import AttentionShape

ARCHITECTURES = "architectures.txt"  # in the folder of modules: one line, such as "8.0 8.9 9.0a"
HEAD_DIMS = (64, 128, 256, 512)  # that fa2 has
PADDED_HEAD_DIMS = (80, 96, 112)  # attended as 128: fa2 compiles for 96, but its rows would meet in shared memory
SINK_HEAD_DIMS = (64,)  # of models with sinks: gpt-oss
FA3_HEAD_DIMS = (64, 128, 256)
LATENT_DIMS, ROTATED_DIM = (128, 256, 512), 64  # of latents that FlashInfer has; what is rotated is padded to this
EXPANDED_DIMS = (192, 128)  # of keys and values: DeepSeek's; all others have equal ones
MOST_LATENT_HEADS = 128
SHORT = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3"}  # dtypes in the names of modules
LEAST_CAPABILITY = (8, 0)  # engine/cuda/splits.py knows the tiles of no older one
FA3_CAPABILITY = (9, 0)  # H100, H200: fa3's kernels use instructions that no later GPU has

FLASHINFER = "0.7.2"  # the version whose plans engine/cuda/splits.py knows, and whose jit_args have this order

Capability = tuple[int, int]  # compute capability, such as (9, 0)
Kernels = Literal["fa2", "fa3"]


def find_other_version(version: str) -> str:
    """Why this FlashInfer must not be used, and what to install; empty if it may be.

    Others divide contexts of captured steps otherwise: with 0.7.4 one long context beside many answers is refused by
    its planner, when a service is under load.
    """
    if version == FLASHINFER or version.startswith(f"{FLASHINFER}.post"):
        return ""
    return f"FlashInfer {version} has other plans than {FLASHINFER}: pip install 'flashinfer-python=={FLASHINFER}.*'"


def pad_head(head_dim: int) -> int:
    """The dimensions of a head of keys or values in a GPU's pages, zeros last. 288: MiniCPM3's latents, 256 + 32."""
    return 128 if head_dim in PADDED_HEAD_DIMS else 320 if head_dim == 288 else head_dim


def pad_expanded(dims: tuple[int, int]) -> tuple[int, int]:
    """Dimensions of keys and values that latents are expanded to, zeros last."""
    return dims if dims == EXPANDED_DIMS else (pad_head(max(dims)),) * 2


def pad_latent_heads(num_heads: int) -> int:
    """Query heads of latents, of which FlashInfer's tile of 64 or 128 rows must hold a whole number.

    Else it would miss a key that the first of a tile's tokens may see, and refuses such plans for some lengths. A
    tile's rows are there anyway: 20 heads take the time of 32 with one new token or two.
    """
    return 1 << (num_heads - 1).bit_length()


class BuiltAhead(NamedTuple):
    """The modules that FlashInfer finds in its folder."""

    modules: frozenset[str]
    architectures: tuple[str, ...]  # empty: not listed


def name_modules(
    shape: AttentionShape, windows: Iterable[int | None], dtype: str, kv_dtype: str, kernels: Kernels = "fa2",
    has_sinks: bool = False,
) -> frozenset[str]:  # fmt: skip
    """Modules that FlashInfer loads for layers with these windows: one for all with a window, one for all without.

    Prompts and answers share fa2's: both are computed by tensor cores. dtypes as torch prints them, without "torch.".
    Those with sinks have names of our own. Latents take one, and the heads that they are expanded to another.
    """
    q, kv, size = SHORT[dtype], SHORT[kv_dtype], shape.head_dim
    if shape.value_dim:
        latents = (
            f"batch_mla_attention_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{q}_dtype_idx_i32_head_dim_ckv_{shape.value_dim}"
            f"_head_dim_kpe_{size - shape.value_dim}_profiler_False_planabi2{'_sm90' * (kernels == 'fa3')}"
        )
        dims = pad_expanded(shape.expanded)
        heads = replace(shape, head_dim=dims[0], value_dim=0, expanded=dims)
        return name_modules(heads, [None], dtype, dtype, kernels) | {latents}
    kind = "attention_sink" if has_sinks else "kv_cache"
    suffix = "kv_stride_equal" if kernels == "fa2" else "sm90"
    return frozenset(
        f"batch_prefill_with_{kind}_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{q}_dtype_idx_i32_head_dim_qk_{size}"
        f"_head_dim_vo_{shape.expanded[1] or size}_posenc_0_use_swa_{window is not None}"
        f"_use_logits_cap_{shape.softcap > 0}_f16qk_False_{suffix}"
        for window in windows
    )


def specify_sinks(
    shape: AttentionShape, window: int | None, dtypes: tuple[Any, Any], index_dtype: Any, variant: str
) -> list[Any]:
    """FlashInfer's `jit_args` for fa2 with sinks, which `run` then takes, and the scale after them.

    dtypes: torch's, of queries and of pages; variant: FlashInfer's attention_sink_decl for fa2.
    """
    own, kv = dtypes
    own_name, kv_name = (str(one).removeprefix("torch.") for one in dtypes)
    (name,) = name_modules(shape, [window], own_name, kv_name, has_sinks=True)
    tensors_and_scalars = ["sink"], ["float"], ["sm_scale"], ["double"]
    options = 0, window is not None, False, False, False, "equal", "full"  # no positions, window, cap, halves, fp8
    return [
        name, own, kv, own, index_dtype, shape.head_dim, shape.head_dim, *tensors_and_scalars, "AttentionSink", variant,
        *options,
    ]  # fmt: skip


def runs_on(architecture: str, capability: Capability) -> bool:
    """Whether a GPU runs code that was compiled for an architecture.

    "9.0a": on 9.0 alone. "8.0", "12.0f": also on later ones of the same generation. "12.0+PTX": on all later ones.
    """
    found = re.fullmatch(r"(\d+)\.(\d+)(a|f|\+PTX|)", architecture)
    if found is None:
        raise ValueError(f"{architecture!r} is no architecture of CUDA: it looks like 8.0 or 9.0a")
    target, suffix = (int(found[1]), int(found[2])), found[3]
    if suffix == "a":
        return capability == target
    return capability >= target and (suffix == "+PTX" or capability[0] == target[0])


def find_gap(needed: Collection[str], built: BuiltAhead, capability: Capability, no_compiler: str) -> str | None:
    """Why FlashInfer would fail at its first step on this GPU, and what to do; None if it would not.

    no_compiler: why FlashInfer cannot compile modules here; empty: it can.
    """
    if built.modules & set(needed) and not any(runs_on(one, capability) for one in built.architectures):
        have, own = (
            " ".join(built.architectures) or f"unknown architectures (no {ARCHITECTURES})",
            "{}.{}".format(*capability),
        )
        return f"FlashInfer's modules are built for {have}, this GPU is {own}: build them for {own} (docs/GPU.md)"
    missing = sorted(set(needed) - built.modules)
    if missing and no_compiler:
        what = describe(missing[0])
        return f"FlashInfer has no module built ahead for {what}, and {no_compiler}: build it (docs/GPU.md)"
    return None


def choose_kernels(
    shape: AttentionShape, windows: Collection[int | None], dtype: str, kv_dtype: str, built: BuiltAhead,
    capability: Capability, no_compiler: str, has_sinks: bool = False,
) -> tuple[tuple[Kernels, ...], str]:  # fmt: skip
    """Kernels that this GPU attends with, and why. fa2: everything; fa3: long prompts. Empty: FlashInfer would fail.

    fa3 takes our pages: their keys and values have equal strides. It multiplies e4m3 keys only by e4m3 queries.
    """
    if capability < LEAST_CAPABILITY:
        return (), "FlashInfer is used from compute capability 8.0 on"
    if shape.value_dim:
        return _choose_for_latents(shape, dtype, kv_dtype, built, capability, no_compiler)
    needed = name_modules(shape, windows, dtype, kv_dtype, has_sinks=has_sinks)
    if gap := find_gap(needed, built, capability, no_compiler):
        return (), gap
    if capability != FA3_CAPABILITY or kv_dtype != dtype or has_sinks or shape.head_dim not in FA3_HEAD_DIMS:
        return ("fa2",), "FlashInfer, fa2"
    if gap := find_gap(name_modules(shape, windows, dtype, kv_dtype, "fa3"), built, capability, no_compiler):
        return ("fa2",), f"FlashInfer, fa2 also for prompts: {gap}"
    return ("fa2", "fa3"), "FlashInfer, fa2 and for prompts fa3"


def _choose_for_latents(
    shape: AttentionShape, dtype: str, kv_dtype: str, built: BuiltAhead, capability: Capability, no_compiler: str
) -> tuple[tuple[Kernels, ...], str]:  # fmt: skip
    """One kind for prompts and answers: fa3 on a Hopper that has its modules."""
    is_hopper = capability == FA3_CAPABILITY
    if kv_dtype != dtype and not (is_hopper and (dtype, shape.value_dim) == ("bfloat16", LATENT_DIMS[-1])):
        return (), f"FlashInfer has no latents in {kv_dtype} on this GPU for this model: unset --kv-dtype"
    gaps: list[str] = []
    kinds: tuple[Kernels, ...] = ("fa3", "fa2") if is_hopper else ("fa2",)
    for kind in kinds:
        gap = find_gap(name_modules(shape, [None], dtype, kv_dtype, kind), built, capability, no_compiler)
        if gap is None:
            return (kind,), "; ".join((f"FlashInfer, {kind} for latents", *gaps))
        gaps.append(gap)
    return (), gaps[-1]


def describe(module: str) -> str:
    """A name of `name_modules` in words."""
    q, kv, size = re.findall(r"dtype_q_(\w+?)_|dtype_kv_(\w+?)_|head_dim_(?:qk|ckv)_(\d+)_", module)
    window, cap = (", a window" * ("use_swa_True" in module), ", a soft cap" * ("use_logits_cap_True" in module))
    sinks, fa3 = (", sinks" * ("_attention_sink_" in module), ", fa3" * module.endswith("_sm90"))
    what = "latents" if "_mla_" in module else "heads"
    return f"{q[0]} with KV in {kv[1]}, {what} of {size[2]}{window}{cap}{sinks}{fa3}"


def find_built() -> BuiltAhead:
    """The modules beside the installed FlashInfer; does not import it."""
    spec = find_spec("flashinfer")
    if spec is None or spec.origin is None:
        return BuiltAhead(frozenset(), ())
    folder = Path(spec.origin).parent / "data" / "aot"
    listed = folder / ARCHITECTURES
    architectures = tuple(listed.read_text().split()) if listed.is_file() else ()
    return BuiltAhead(frozenset(path.stem for path in folder.glob("*/*.so")), architectures)
