"""Finds out what `baton doctor` reports: small questions to the system, torch and packages, none judged.

A question that fails has an answer too: the error's text, or nothing where there is nothing. Imports torch.
"""

import os
import resource
import shutil
import sysconfig
from pathlib import Path

import torch

from bench.products import check_products
from cli.doctor_facts import GpuFacts, Machine, Model
from engine.compose import choose_for_layers, load_any_config, pad_parts
from engine.cpu.build import NATIVE, BuildError, find_compiler, load_kernel, runnable_instruction_sets
from engine.cuda.toolkit import explain_no_compiler
from engine.engine import choose_device
from engine.fallback.config import FallbackConfig
from engine.formats.checks import check_kv_dtype
from engine.heads.read_head import is_draft_head, read_head
from engine.kv.pool import PoolShape
from engine.models.config import ModelConfig
from engine.models.table import shard_config
from engine.stages import check_stages
from engine.weights.table import Shard
from gateway.text.trial import load_tokenizer
from gateway.tools.dialect import find_dialect
from runtime.config import ServeConfig
from runtime.gpus import VISIBLE, ask_driver, visible_gpus
from runtime.hardware import available_memory_bytes, find_unknown_limits, find_version, num_cores
from wire.kv_layout import PagePart
from wire.names import MTP
from wire.pooling import read_pooling
from worker.startup.device_limits import read_headers
from worker.startup.models import check_models

HOST_NAMESPACE = {"pid": "pid:[4026531836]", "ipc": "ipc:[4026531839]"}  # fixed in the kernel's proc_ns.h


def examine_machine() -> Machine:
    """Takes seconds: builds the CPU kernel where that was not done yet, and opens each GPU."""
    driver = ask_driver()
    gpus = tuple(map(examine_gpu, range(torch.cuda.device_count() if torch.cuda.is_available() else 0)))
    cpp_compiler, kernel_error, memory_file_error = "", "", ""
    try:
        cpp_compiler = " ".join(find_compiler())
        load_kernel("cpu_paged")
    except BuildError as error:
        kernel_error = str(error)
    try:
        os.close(os.memfd_create("baton-doctor"))
    except (OSError, AttributeError) as error:
        memory_file_error = str(error)
    products, are_products_slow = try_products() if not kernel_error and not gpus else ("", False)
    return Machine(
        num_cores=num_cores(),
        num_host_cores=os.cpu_count() or 1,
        memory_bytes=available_memory_bytes(),
        unknown_limits=find_unknown_limits(),
        instruction_sets=tuple(name for name in runnable_instruction_sets() if name != NATIVE),
        cpp_compiler=cpp_compiler,
        kernel_error=kernel_error,
        products=products,
        are_products_slow=are_products_slow,
        c_compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "",
        has_python_header=(Path(sysconfig.get_path("include")) / "Python.h").exists(),
        own_namespaces=tuple(kind.upper() for kind in HOST_NAMESPACE if has_own_namespace(kind)),
        memory_file_error=memory_file_error,
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        torch=torch.__version__,
        torch_cuda=torch.version.cuda or "",
        driver=driver.version,
        num_driver_gpus=driver.num_gpus,
        visible_gpus=visible_gpus(),
        visible_setting=os.environ.get(VISIBLE, ""),
        gpus=gpus,
        triton=find_version("triton"),
        flashinfer=find_version("flashinfer-python"),
        no_cuda_compiler=explain_no_compiler(),
        nixl=find_version("nixl-cu13") or find_version("nixl-cu12"),
        rdma_devices=tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))),
    )


def examine_model(config: ServeConfig, model_name: str) -> Model:
    """Reads configurations and headers, no weights, and fetches nothing.

    Raises OSError when the model is not on this machine, ValueError when a worker could not use it.
    """
    device = choose_device(config.device)
    check_kv_dtype(config.kv_dtype, device)
    found = check_models(model_name, config.draft_model)
    folders = [folder for folder in found if folder is not None]
    if len(folders) < len(found):
        raise FileNotFoundError("its files are still to be fetched")
    is_mtp = config.draft_model == MTP
    draft = folders[1] if len(folders) > 1 and not is_mtp else None
    headers = read_headers(folders[0], draft, config.dtype, config.kv_dtype, config.quantization)
    model, dtype, kv_dtype = headers.config, headers.dtype, headers.kv_dtype
    parts: list[PagePart] = []
    drafting = [_read_draft(folder, model, is_mtp=is_mtp) for folder in folders[1:]]
    for one in (model, *drafting):
        for size in (config.prefill_tp, config.decode_tp):
            if isinstance(one, ModelConfig):
                shard_config(one, Shard(0, size))
        check_stages(one, max(config.prefill_pp, config.decode_pp))
        shape = PoolShape(1, pad_parts(one.kv_parts, device), config.page_tokens, kv_dtype)
        parts += shape.page_parts(shape.parts)
    attention = choose_for_layers(
        model.attention_shapes, model.windows, config.page_tokens, device, dtype, kv_dtype, model.has_sinks
    )
    return Model(
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        head_dim=model.attention_shapes[0].head_dim,
        has_native_code=isinstance(model, ModelConfig),
        context_tokens=model.context_tokens,
        parts=tuple(parts),
        weight_bytes=headers.file_bytes,
        attention=attention.backend.name,
        attention_reason=attention.reason,
        is_fallback=attention.is_fallback,
        shape=headers.shape,
        embeds=read_pooling(folders[0]) is not None,
        tools=_examine_tools(config.tool_format, folders[0]),
    )


def _examine_tools(setting: str, folder: Path) -> str:
    """How the chat template in a folder has calls written."""
    try:
        found = find_dialect(setting, load_tokenizer(folder).tried.probes)
    except (ValueError, OSError) as error:
        return f"no calls are read: {error}"
    return f"{'calls as ' + found.format.name if found.format else 'none'}: {found.why}"


def _read_draft(
    folder: Path, model: ModelConfig | FallbackConfig, *, is_mtp: bool
) -> ModelConfig | FallbackConfig:  # fmt: skip
    """The config of what drafts: a model, a head, or with the model's own folder its MTP layer."""
    return read_head(folder, model, is_mtp=is_mtp) if is_mtp or is_draft_head(folder) else load_any_config(folder)


def examine_gpu(index: int) -> GpuFacts:
    """Opens the GPU, which takes some of its memory until this process ends."""
    facts = torch.cuda.get_device_properties(index)
    try:
        free_bytes = torch.cuda.mem_get_info(index)[0]
    except RuntimeError:  # full to the brim: not even a context fits
        free_bytes = 0
    others = (other for other in range(torch.cuda.device_count()) if other != index)
    readable = (index, *(other for other in others if torch.cuda.can_device_access_peer(index, other)))
    uuids = tuple(str(torch.cuda.get_device_properties(one).uuid) for one in readable)
    return GpuFacts(facts.name, facts.total_memory, free_bytes, (facts.major, facts.minor), uuids[0], uuids)


def try_products() -> tuple[str, bool]:
    """Measure matrix products. Returns the rates that they reach, in words, and whether these are slow."""
    torch.set_num_threads(num_cores())
    ceilings, rates = check_products()
    few, many = rates
    reached = (
        f"{ceilings.describe()}; {few.num_rows} row reads at {few.reading:.2f} of that, "
        f"{many.num_rows} rows multiply at {many.multiplying:.2f}: a model of 1B reads prompts at "
        f"{many.operations / 2e9:,.0f} tokens/s, others in proportion"
    )
    return reached, any(one.is_slow for one in rates)


def has_own_namespace(kind: str) -> bool:
    """Whether this process is in another namespace than the host's first process."""
    link = Path(f"/proc/self/ns/{kind}")
    return link.is_symlink() and str(link.readlink()) != HOST_NAMESPACE[kind]
