"""Pages of one process read by another: correctness, the effect of a killed owner, and speed, also of steps beside.

    python -m bench.gpu_checks.ipc copy|kill|time|across|beside|nixl DEVICE

Each part runs in its own process, since it may destroy that process's CUDA context. Has not run on a GPU.
"""

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from statistics import median
from unittest.mock import patch

import torch

from bench.gpu_checks.card import MissedError, require, scale_for
from bench.gpu_checks.loop import build_requests, run_jobs
from bench.gpu_checks.models import build_random_engine
from engine.cuda import gpu as gpu_module
from engine.cuda.pool import GpuPool
from engine.kv.pool import Pool
from kvtransfer.cuda_ipc import GpuMemory
from kvtransfer.nixl_agent import NOT_INSTALLED, is_installed
from kvtransfer.reader import PageRef, Reader, ReadError
from kvtransfer.transports import open_reader
from tests.support.pool_process import COMMAND, Exporter, build_large_pool, build_local, page_content

NUM_LAYERS = 32  # an 8B model: 2 MiB a page
PROMPT_PAGES = 128  # 2,048 tokens of 16 a page
FEW_PAGES = 8  # on a CPU, where speed does not matter
PART_S = 95.0
NUM_KILLS = 6  # each starts a process with torch and CUDA
KILL_REPEATS = 1000  # copies of PROMPT_PAGES in one: a quarter of a terabyte takes some 100 ms
NUM_TIMES = 20
GOAL = 0.7  # of a copy's speed within the device
GOAL_BESIDE = 1.15  # of TPOT without arriving KV
MISSED_STATUS = 3  # of a part's process


def check_ipc_copy(device: torch.device) -> str:
    """Pages of another process arrive as they are there, and a recycled one is refused."""
    return _run_part("copy", device)


def check_ipc_kill(device: torch.device) -> str:
    """Owners are killed while their pages are copied. A lost context of the reader is a finding, not a failure."""
    return _run_part("kill", device)


def time_ipc(device: torch.device) -> str:
    """The pages of a 2,048-token prompt of an 8B model, by copy engine and kernel, against a copy within the device"""
    return _run_part("time", device)


def check_ipc_across(device: torch.device) -> str:
    """Pages of another GPU's memory, as `copy` and `time` on one"""
    return "skipped: one GPU" if torch.cuda.device_count() < 2 else _run_part("across", device)


def time_grpc(device: torch.device) -> str:
    """The same pages by gRPC through main memory: right, and how fast"""
    return read_pages(_build_pool(device), _command("grpc", device.type), "grpc")


def check_nixl(device: torch.device) -> str:
    """Pages through NIXL arrive as they are there, and a recycled one is refused: by what UCX uses, and how fast."""
    return _run_part("nixl", device) if is_installed() else f"skipped: {NOT_INSTALLED}"


def time_beside(device: torch.device) -> str:
    """TPOT of one stream while KV arrives without a pause (by gRPC on a CPU)"""
    if device.type == "cuda":
        return _run_part("beside", device)
    return run_beside(_build_pool(device), _command("grpc", device.type))


def _build_pool(device: torch.device, num_pages: int = PROMPT_PAGES) -> Pool:
    return build_large_pool(NUM_LAYERS, num_pages if device.type == "cuda" else FEW_PAGES, device)


def _command(transport: str, device: str) -> Sequence[str]:
    """Starts an exporter."""
    return *COMMAND, f"transport={transport}", f"device={device}", f"layers={NUM_LAYERS}"


def _run_part(name: str, device: torch.device) -> str:
    """Run a part in its own process; returns its last line."""
    if device.type != "cuda" and name != "nixl":
        return "skipped: CUDA IPC needs a GPU"
    command = [sys.executable, "-m", "bench.gpu_checks.ipc", name, device.type]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PART_S, check=False)
    if ended.returncode == MISSED_STATUS:
        raise MissedError(ended.stdout.splitlines()[-1])
    assert ended.returncode == 0, f"exit {ended.returncode}: {' '.join(ended.stderr.splitlines()[-15:])}"
    return ended.stdout.splitlines()[-1]


@asynccontextmanager
async def reading(
    pool: Pool, command: Sequence[str], transport: str, num_pages: int
) -> AsyncIterator[tuple[Reader, Exporter]]:
    """An exporter of `num_pages`, and a reader of them into the pool."""
    local = build_local(pool, "reader")
    with Exporter(command, num_pages) as exporter:
        reader = await open_reader(local, transport, exporter.peer)
        yield reader, exporter
        await reader.close()
    local.close()


def read_pages(pool: Pool, command: Sequence[str], transport: str) -> str:
    """All pages of the exporter, which has as many as the pool, arrive unchanged; a recycled one is refused. Timed."""
    num_pages, page_bytes = pool.num_pages, pool.page_bytes

    async def run() -> str:
        async with reading(pool, command, transport, num_pages) as (reader, exporter):
            seconds = await time_reads(reader, num_pages)
            exporter.recycle(*range(num_pages))
            pages = random.Random(0).sample(range(num_pages), num_pages)
            await reader.read([PageRef(page, 1) for page in pages], range(num_pages))
            for row, page in zip(pool.load(range(num_pages)), pages, strict=True):
                assert (row == page_content(page, 1, page_bytes)).all(), f"page {page} differs"
            exporter.recycle(pages[-1])
            try:
                await reader.read([PageRef(page, 1) for page in pages], range(num_pages))
                raise AssertionError("a recycled page was believed")
            except ReadError as error:
                assert error.reason == "generation", error
            rate = num_pages * page_bytes / seconds / 1e9
            found = f"{num_pages} pages of {page_bytes} bytes equal, a recycled one refused"
            return f"{reader.transport}: {found}; {seconds * 1e3:.1f} ms, {rate:.2f} GB/s"

    return asyncio.run(run())


async def time_reads(reader: Reader, num_pages: int) -> float:
    """Median seconds of reading `num_pages` pages of generation 0 to the same places."""
    sources = [PageRef(page, 0) for page in random.Random(0).sample(range(num_pages), num_pages)]
    times = []
    for _ in range(NUM_TIMES):
        started = time.perf_counter()
        await reader.read(sources, range(num_pages))
        times.append(time.perf_counter() - started)
    return median(times)


def kill_exporters(pool: Pool, command: Sequence[str], num_kills: int = NUM_KILLS, repeats: int = KILL_REPEATS) -> str:
    """See check_ipc_kill. The kills are spread over the duration of a copy."""
    pages = list(range(pool.num_pages)) * repeats
    num_midway, failures = 0, []
    copy_s = 0.0  # of an undisturbed copy, the first
    for kill in range(-1, num_kills):
        with Exporter(command, pool.num_pages) as exporter, ThreadPoolExecutor(1) as executor:
            memory = GpuMemory.read(exporter.peer.ranks[0], "cuda_ipc")
            assert memory
            opened = pool.open_peer(memory.handle, pool.num_pages, pool.page_bytes)
            started = time.perf_counter()
            copying = executor.submit(opened.copy, pages, pages)
            if kill < 0:
                copying.result()
                copy_s = time.perf_counter() - started
            else:
                time.sleep(copy_s * (kill + 0.5) / num_kills)
                exporter.kill()
                num_midway += not copying.done()
            for step in (copying.result, opened.close):
                try:
                    step()
                except RuntimeError as error:
                    failures.append(str(error).splitlines()[0])
        try:
            pool.load([0])
        except RuntimeError as error:
            return f"FINDING: the reader's context is lost after kill {kill + 1}: {error}; before: {failures}"
    finding = f"; FINDING: {len(failures)} calls failed: {failures[0]}" if failures else ", no call failed"
    return f"{num_kills} owners killed, {num_midway} in mid-copy ({copy_s * 1e3:.0f} ms): context works{finding}"


def time_copies(pool: Pool, command: Sequence[str]) -> str:
    """See time_ipc. All times include the host's part; a copy within the device none of the reader's checks."""
    assert isinstance(pool, GpuPool)
    gpu, count = pool.gpu, pool.num_pages // 2

    async def run() -> float:
        async with reading(pool, command, "cuda_ipc", count) as (reader, _exporter):
            return await time_reads(reader, count)

    engine_s = asyncio.run(run())
    with patch.object(gpu_module, "ENGINE_BYTES", 1 << 62):  # never
        kernel_s = asyncio.run(run())
    target, source = pool.tensor[:count], pool.tensor[count : 2 * count]
    times = []
    for _ in range(NUM_TIMES):
        started = time.perf_counter()
        gpu.run(lambda: target.copy_(source))
        times.append(time.perf_counter() - started)
    copy_s, gigabytes = median(times), count * pool.page_bytes / 1e9
    detail = (
        f"{count} pages: {gigabytes / engine_s:.1f} GB/s by copy engine ({engine_s * 1e3:.2f} ms), "
        f"{gigabytes / kernel_s:.1f} by kernel, {gigabytes / copy_s:.1f} within the device: ratio "
        f"{copy_s / engine_s:.2f} (goal {GOAL})"
    )
    return require(copy_s / engine_s >= GOAL, detail, pool.tensor.device)


def read_across(pool: Pool, command: Sequence[str]) -> str:
    """See check_ipc_across. Links between GPUs are slower than memory, so there is no goal."""
    found = read_pages(pool, command, "cuda_ipc")
    try:
        return f"{found}; {time_copies(pool, command)}"
    except MissedError as error:
        return f"{found}; {error}"


def run_beside(pool: Pool, command: Sequence[str]) -> str:
    """See time_beside."""
    device, num_pages = pool.tensor.device, pool.num_pages
    scale, stop, reads = scale_for(device), threading.Event(), list[float]()
    engine = build_random_engine(scale.large, device, 1, 4 * scale.prompt_tokens)
    requests = build_requests(1, 64, scale.num_steps, engine.config.vocab_size)

    async def read_on() -> None:
        async with reading(pool, command, "cuda_ipc" if pool.gpu_uuid else "grpc", num_pages) as (reader, _exporter):
            while not stop.is_set():
                started = time.perf_counter()
                await reader.read([PageRef(page, 0) for page in range(num_pages)], range(num_pages))
                reads.append(time.perf_counter() - started)

    quiet = run_jobs(engine, requests).tpot_s
    with ThreadPoolExecutor(1) as executor:
        going_on = executor.submit(lambda: asyncio.run(read_on()))
        while not reads and not going_on.done():
            time.sleep(0.01)
        beside = run_jobs(engine, requests).tpot_s
        stop.set()
        going_on.result()
    rate = num_pages * pool.page_bytes / median(reads) / 1e9
    detail = (
        f"{scale.large}: {beside * 1e3:.2f} ms beside {rate:.1f} GB/s, {quiet * 1e3:.2f} without: "
        f"{beside / quiet:.2f} (goal {GOAL_BESIDE})"
    )
    return require(beside <= GOAL_BESIDE * quiet, detail, device)


PARTS: dict[str, tuple[Callable[[Pool, Sequence[str]], str], int, tuple[str, str]]] = {
    "copy": (lambda pool, command: read_pages(pool, command, "cuda_ipc"), 16, ("auto", "cuda")),
    "kill": (kill_exporters, PROMPT_PAGES, ("auto", "cuda")),
    "time": (time_copies, 2 * PROMPT_PAGES, ("auto", "cuda")),
    "across": (read_across, 2 * PROMPT_PAGES, ("auto", "cuda:1")),
    "beside": (run_beside, PROMPT_PAGES, ("auto", "cuda")),
    "nixl": (lambda pool, command: read_pages(pool, command, "nixl"), PROMPT_PAGES, ("nixl", sys.argv[-1])),
}
"""name |-> what runs, pages of its pool, the exporter's transport and device"""


if __name__ == "__main__":
    run, num_pages, exporter = PARTS[sys.argv[1]]
    try:
        print(run(_build_pool(torch.device(sys.argv[2]), num_pages), _command(*exporter)))
    except MissedError as error:
        print(error)
        sys.exit(MISSED_STATUS)
