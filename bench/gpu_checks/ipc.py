"""Pages of one process read by another: correctness, the effect of a killed owner, and speed, also of steps beside.

    python -m bench.gpu_checks.ipc copy|kill|time|across|beside

Each part runs in its own process, since it may destroy that process's CUDA context. Has not run on a card.
"""

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from unittest.mock import patch

import torch
from google.protobuf.json_format import Parse

from bench.gpu_checks.card import MissedError, require, scale_for
from bench.gpu_checks.ipc_exporter import SHAPE_8B, page_content
from bench.gpu_checks.loop import build_requests, run_jobs
from bench.gpu_checks.models import build_random_engine
from engine.kv import gpu as gpu_module
from engine.kv.pool import Pool
from kvtransfer.cuda_ipc import CudaIpcReader, GpuMemory
from kvtransfer.grpc_bytes import GrpcReader
from kvtransfer.reader import PageRef, Reader, ReadError, read_advert
from protos import kv_pb2
from runtime.rpc import open_channel

EXPORTER = (sys.executable, "-m", "bench.gpu_checks.ipc_exporter", "cuda")
PROMPT_PAGES = 128  # 2,048 tokens of 16 a page
PART_S = 95.0
EXPORTER_S = 30.0  # longest wait for an exporter's reply
NUM_KILLS = 6  # each starts a process with torch and CUDA
KILL_REPEATS = 1000  # copies of PROMPT_PAGES in one: a quarter of a terabyte takes some 100 ms
NUM_TIMES = 20
GRPC_PAGES = {"cuda": PROMPT_PAGES, "cpu": 8}
READ_S = 30.0
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

    async def run() -> str:
        pool = Pool(SHAPE_8B.with_pages(GRPC_PAGES[device.type]), device)
        with Exporter(_serving(device), pool.num_pages) as exporter:
            reader = GrpcReader(exporter.peer, pool, open_channel, READ_S)
            seconds = await time_reads(reader, pool.num_pages)
            found = await check_reader(reader, exporter, pool)
            await reader.close()
        return f"{seconds * 1e3:.0f} ms, {pool.num_pages * pool.page_bytes / seconds / 1e9:.2f} GB/s; {found}"

    return asyncio.run(run())


def time_beside(device: torch.device) -> str:
    """TPOT of one stream while KV arrives without a pause (by gRPC on a CPU)"""
    if device.type == "cuda":
        return _run_part("beside", device)
    return run_beside(Pool(SHAPE_8B.with_pages(GRPC_PAGES["cpu"]), device), _serving(device))


def _serving(device: torch.device) -> Sequence[str]:
    return (*EXPORTER[:-1], f"grpc-{device.type}")


def _run_part(name: str, device: torch.device) -> str:
    if device.type != "cuda":
        return "skipped: CUDA IPC needs a GPU"
    return run_apart("bench.gpu_checks.ipc", name)


def run_apart(module: str, argument: str) -> str:
    """Run a module of checks in its own process; returns its last line."""
    command = [sys.executable, "-m", module, argument]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PART_S, check=False)
    if ended.returncode == MISSED_STATUS:
        raise MissedError(ended.stdout.splitlines()[-1])
    assert ended.returncode == 0, f"exit {ended.returncode}: {' '.join(ended.stderr.splitlines()[-15:])}"
    return ended.stdout.splitlines()[-1]


class Exporter:
    """The process of ipc_exporter.py. Ends with the `with` block."""

    def __init__(self, command: Sequence[str], num_pages: int) -> None:
        self._process = subprocess.Popen(
            [*command, str(num_pages)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.peer = Parse(self._read(), kv_pb2.Peer())

    def __enter__(self) -> "Exporter":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream
            stream.close()

    def recycle(self, *pages: int) -> None:
        assert self._process.stdin
        for page in pages:
            self._process.stdin.write(f"recycle {page}\n")
            self._process.stdin.flush()
            assert self._read() == "done\n"

    def kill(self) -> None:
        """kill -9, and wait for the end. Idempotent."""
        self._process.kill()
        self._process.wait(EXPORTER_S)

    def _read(self) -> str:
        """The next line. If it takes too long, kills the process and fails."""
        assert self._process.stdout
        with ThreadPoolExecutor(1) as executor:
            reading = executor.submit(self._process.stdout.readline)
            try:
                return reading.result(EXPORTER_S)
            except TimeoutError:
                self._process.kill()
                raise


def copy_pages(pool: Pool, command: Sequence[str]) -> str:
    async def run() -> str:
        with Exporter(command, pool.num_pages) as exporter, ThreadPoolExecutor(1) as executor:
            reader = await CudaIpcReader.open(exporter.peer, pool, executor)
            found = await check_reader(reader, exporter, pool)
            await reader.close()
            return found

    return asyncio.run(run())


async def check_reader(reader: Reader, exporter: Exporter, pool: Pool) -> str:
    """All pages of the exporter, which has as many as the pool, arrive unchanged; a recycled one is refused."""
    exporter.recycle(*range(pool.num_pages))
    pages = random.Random(0).sample(range(pool.num_pages), pool.num_pages)
    into = list(range(pool.num_pages))
    await reader.read([PageRef(page, 1) for page in pages], into)
    for row, page in zip(pool.load(into), pages, strict=True):
        assert (row == page_content(page, 1, pool.page_bytes)).all(), f"page {page} differs"
    exporter.recycle(pages[-1])
    try:
        await reader.read([PageRef(page, 1) for page in pages], into)
        raise AssertionError("a recycled page was believed")
    except ReadError as error:
        assert error.reason == "generation", error
    return f"{pool.num_pages} pages of {pool.page_bytes} bytes equal, a recycled one refused"


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
            memory = read_advert(exporter.peer.ranks[0], CudaIpcReader.transport, GpuMemory)
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
    gpu = pool.gpu
    assert gpu is not None
    count = pool.num_pages // 2
    gigabytes = count * pool.page_bytes / 1e9

    async def run() -> float:
        with Exporter(command, count) as exporter, ThreadPoolExecutor(1) as executor:
            reader = await CudaIpcReader.open(exporter.peer, pool, executor)
            seconds = await time_reads(reader, count)
            await reader.close()
            return seconds

    engine_s = asyncio.run(run())
    with patch.object(gpu_module, "ENGINE_BYTES", 1 << 62):  # never
        kernel_s = asyncio.run(run())
    target, source = pool.tensor[:count], pool.tensor[count : 2 * count]
    times = []
    for _ in range(NUM_TIMES):
        started = time.perf_counter()
        gpu.run(lambda: target.copy_(source))
        times.append(time.perf_counter() - started)
    copy_s = median(times)
    detail = (
        f"{count} pages: {gigabytes / engine_s:.1f} GB/s by copy engine ({engine_s * 1e3:.2f} ms), "
        f"{gigabytes / kernel_s:.1f} by kernel, {gigabytes / copy_s:.1f} within the device: ratio "
        f"{copy_s / engine_s:.2f} (goal {GOAL})"
    )
    return require(copy_s / engine_s >= GOAL, detail, pool.tensor.device)


def read_across(pool: Pool, command: Sequence[str]) -> str:
    """See check_ipc_across. Links between cards are slower than memory, so there is no goal."""
    found = copy_pages(pool, command)
    try:
        return f"{found}; {time_copies(pool, command)}"
    except MissedError as error:
        return f"{found}; {error}"


def run_beside(pool: Pool, command: Sequence[str]) -> str:
    """See time_beside."""
    device = pool.tensor.device
    scale, stop, reads = scale_for(device), threading.Event(), list[float]()
    engine = build_random_engine(scale.large, device, 1, 4 * scale.prompt_tokens)
    requests = build_requests(1, 64, scale.num_steps, engine.config.vocab_size)

    async def read_on(peer: kv_pb2.Peer) -> None:
        with ThreadPoolExecutor(1) as executor:
            reader: Reader = GrpcReader(peer, pool, open_channel, READ_S)
            if pool.gpu is not None:
                reader = await CudaIpcReader.open(peer, pool, executor)
            pages = range(pool.num_pages)
            while not stop.is_set():
                started = time.perf_counter()
                await reader.read([PageRef(page, 0) for page in pages], pages)
                reads.append(time.perf_counter() - started)
            await reader.close()

    quiet = run_jobs(engine, requests).tpot_s
    with Exporter(command, pool.num_pages) as exporter, ThreadPoolExecutor(1) as executor:
        reading = executor.submit(lambda: asyncio.run(read_on(exporter.peer)))
        while not reads and not reading.done():
            time.sleep(0.01)
        beside = run_jobs(engine, requests).tpot_s
        stop.set()
        reading.result()
    rate = pool.num_pages * pool.page_bytes / median(reads) / 1e9
    detail = (
        f"{scale.large}: {beside * 1e3:.2f} ms beside {rate:.1f} GB/s, {quiet * 1e3:.2f} without: "
        f"{beside / quiet:.2f} (goal {GOAL_BESIDE})"
    )
    return require(beside <= GOAL_BESIDE * quiet, detail, device)


SECOND = (*EXPORTER[:-1], "cuda:1")
PARTS: dict[str, tuple[Callable[[Pool, Sequence[str]], str], int, Sequence[str]]] = {
    "copy": (copy_pages, 16, EXPORTER),
    "kill": (kill_exporters, PROMPT_PAGES, EXPORTER),
    "time": (time_copies, 2 * PROMPT_PAGES, EXPORTER),
    "across": (read_across, 2 * PROMPT_PAGES, SECOND),
    "beside": (run_beside, PROMPT_PAGES, EXPORTER),
}
"""name |-> what runs, pages of its pool, the other process"""


if __name__ == "__main__":
    run, num_pages, command = PARTS[sys.argv[1]]
    try:
        print(run(Pool(SHAPE_8B.with_pages(num_pages), torch.device("cuda")), command))
    except MissedError as error:
        print(error)
        sys.exit(MISSED_STATUS)
