"""Products of packed weights beside the ceilings of this machine, measured in the same process."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from engine.cpu.build import find_instruction_set
from engine.cpu.cache import Weights
from engine.cpu.cpu_math import Math, choose_math, measure_rate, measure_reading
from engine.cpu.packed import PackedLinear, pack
from engine.cpu.packed_groups import ROW_BITS, GroupsShape, PackedGroups, round_groups
from engine.formats.groups import GROUP, Groups, with_zeros

BF16 = torch.bfloat16
PRODUCT = (16_384, 2048)  # outputs, depth: gate and up of Llama-3.2-1B
NUM_WEIGHTS = 6  # used in turn, more than caches hold
FORMATS = ("torch", "bf16", "int8", "int4", "4-bit groups", "8-bit groups")  # torch's is bfloat16
SLOW = 0.5  # of the nearer ceiling
SPELLS = 4
ROUNDS = 100_000  # of multiplying registers: milliseconds, so that waking threads does not count

Linear = Callable[[Tensor], object]
Calls = Mapping[str, Callable[[int], object]]  # name |-> call with the round's number


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The machine's limits, per second: bytes read from memory, operations in registers."""

    isa: str
    num_bytes: float
    operations: Mapping[bool, float]  # is_8bit |-> operations
    loaded: float  # operations in bfloat16 of tiles that are loaded from L1; 0 without tiles

    def describe(self) -> str:
        bf16, int8 = (f"{self.operations[is_8bit] / 1e9:.0f} GFLOP/s" for is_8bit in (False, True))
        reading = f"{self.num_bytes / 1e9:.1f} GB/s"
        loaded = f"; tiles loaded from L1: {self.loaded / 1e9:.0f} GFLOP/s in bf16" if self.loaded else ""
        return f"{self.isa}: reads {reading}, multiplies {bf16} in bf16 and {int8} in int8 in registers{loaded}"

    def named(self) -> dict[str, float]:
        """Operations a second by what bounds them."""
        loaded = {"bf16 tiles from L1": self.loaded} if self.loaded else {}
        return {"bf16 in registers": self.operations[False], "int8 in registers": self.operations[True], **loaded}


@dataclass(frozen=True, slots=True)
class Rate:
    """Speed of a product, per second."""

    num_rows: int
    num_bytes: float
    operations: float
    reading: float  # share of the ceiling
    multiplying: float

    @property
    def is_slow(self) -> bool:
        """Far below both ceilings. Around 8 to 16 rows either may be the nearer one."""
        return max(self.reading, self.multiplying) < SLOW


def measure_ceilings(num_threads: int) -> Ceilings:
    """The best of several spells, as others may keep a core busy during one; takes seconds. Raises BuildError."""
    math = {is_8bit: choose_math(is_8bit) for is_8bit in (False, True)}
    reading, loaded, operations = 0.0, 0.0, dict.fromkeys(math, 0.0)
    for _ in range(SPELLS):
        reading = max(reading, measure_reading(num_threads))
        for is_8bit, kind in math.items():
            operations[is_8bit] = max(operations[is_8bit], measure_rate(kind, is_8bit, num_threads, ROUNDS))
        if math[False] is Math.TILES:
            loaded = max(loaded, measure_rate(Math.TILES, False, num_threads, ROUNDS, has_loads=True))
    return Ceilings(find_instruction_set(), reading, operations, loaded)


def rate(num_rows: int, seconds: float, ceilings: Ceilings, is_8bit: bool = False) -> Rate:
    """The rate of a product that took `seconds`."""
    num_values = PRODUCT[0] * PRODUCT[1]
    num_bytes, operations = num_values * (1 if is_8bit else 2) / seconds, 2 * num_rows * num_values / seconds
    multiplying = operations / ceilings.operations[is_8bit]
    return Rate(num_rows, num_bytes, operations, num_bytes / ceilings.num_bytes, multiplying)


class Products:
    """Weights of one shape, in the formats that are asked for."""

    def __init__(self) -> None:
        self._weight = torch.randn(PRODUCT).mul_(0.02).to(BF16)
        self._linears: dict[str, list[Linear]] = {}

    def calls(self, num_rows: int, names: Sequence[str] = FORMATS) -> Calls:
        """By `names`."""
        x = torch.randn(num_rows, PRODUCT[1]).to(BF16)
        for name in names:
            if name not in self._linears:
                self._linears[name] = [self._build(name) for _ in range(NUM_WEIGHTS)]
        return {name: cycle([partial(linear, x) for linear in self._linears[name]]) for name in names}

    def _build(self, name: str) -> Linear:
        if name == "torch":
            return partial(functional.linear, weight=self._weight.clone())
        if name in ("int4", "4-bit groups"):  # a file's own have rows of more bits
            return PackedLinear(pack_groups(round_groups(self._weight), 8 if name == "int4" else ROW_BITS))
        if name == "8-bit groups":
            codes = torch.randint(0, 256, PRODUCT, dtype=torch.uint8)
            return PackedLinear(pack_groups(with_zeros(codes, torch.ones(PRODUCT[0], PRODUCT[1] // GROUP), 128, 8)))
        return PackedLinear(pack(self._weight, is_8bit=name == "int8"))


def pack_groups(groups: Groups, row_bits: int = ROW_BITS) -> PackedGroups:
    """In memory of its own."""
    shape = GroupsShape.of(groups, row_bits=row_bits)
    memory = Weights().take("", shape.num_bytes, lambda memory: PackedGroups(memory, shape).fill(groups))
    return PackedGroups(memory, shape)


def take_turns(calls: Calls, rounds: int) -> dict[str, list[float]]:
    """Name |-> seconds of each round, after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call(number)
            seconds[name].append(time.perf_counter() - started)
    return {name: values[1:] for name, values in seconds.items()}


def cycle(calls: Sequence[Callable[[], object]]) -> Callable[[int], object]:
    """Calls one after the other, one per round, so that none finds its operands in the cache."""
    return lambda number: calls[number % len(calls)]()


def check_products(rounds: int = 5) -> tuple[Ceilings, list[Rate]]:
    """The ceilings, and the rates in bfloat16 of one row and of many, in a few seconds. Raises BuildError."""
    ceilings, products = measure_ceilings(torch.get_num_threads()), Products()
    rates = []
    for num_rows in (1, 128):
        seconds = take_turns(products.calls(num_rows, ["bf16"]), rounds)["bf16"]
        rates.append(rate(num_rows, median(seconds), ceilings))
    return ceilings, rates
