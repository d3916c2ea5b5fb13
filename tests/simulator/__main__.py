"""python -m tests.simulator --seeds 0:20000 · --seed 17 --trace · --mutation NAME · --models · --answers"""

import argparse
import gc
import sys
import time
from collections import Counter
from contextlib import nullcontext

from tests.simulator.answer_mutations import ANSWER_MUTATIONS
from tests.simulator.answers import run_answers
from tests.simulator.models import run_models
from tests.simulator.mutations import MODEL_MUTATIONS, MUTATIONS
from tests.simulator.schedule import Outcome, run_schedule

ALL = {**MUTATIONS, **MODEL_MUTATIONS, **ANSWER_MUTATIONS}


def main() -> int:
    options = _parse()
    gc.freeze()  # the collector skips what was imported
    first, last = (options.seed, options.seed + 1) if options.seed is not None else map(int, options.seeds.split(":"))
    started = time.perf_counter()
    ends: Counter[str] = Counter()
    num_events = num_failed = 0
    run = run_schedule
    if options.models or options.mutation in MODEL_MUTATIONS:
        run = run_models
    if options.answers or options.mutation in ANSWER_MUTATIONS:
        run = run_answers
    with ALL[options.mutation]() if options.mutation else nullcontext():
        for seed in range(first, last):
            outcome = run(seed)
            ends.update(end[:24] for end in outcome.ends)
            num_events += outcome.num_events
            if options.trace:
                show(outcome)
            if outcome.error:
                num_failed += 1
                print(f"seed {seed}: {outcome.error}", flush=True)
                if num_failed == options.stop_after:
                    break
    seconds = time.perf_counter() - started
    count = seed + 1 - first
    print(f"{count} schedules, {num_events} events, {num_failed} failed, {seconds:.1f} s, {count / seconds:.0f}/s")
    print("ends of requests:", dict(ends.most_common(12)))
    return 1 if num_failed else 0


def show(outcome: Outcome) -> None:
    for now, what, details in outcome.trace:
        print(f"{now:9.4f}  {what:8} " + "  ".join(str(detail) for detail in details))
    for number, end in enumerate(outcome.ends):
        print(f"r{number}: {end}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator")
    parser.add_argument("--seeds", default="0:20000", help="first:last, last not included")
    parser.add_argument("--seed", type=int, help="one schedule alone")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    parser.add_argument("--mutation", choices=sorted(ALL), help="break this rule")
    parser.add_argument("--models", action="store_true", help="schedules of models that sleep")
    parser.add_argument("--answers", action="store_true", help="schedules of stored answers")
    parser.add_argument("--stop-after", type=int, default=5, help="failures until it gives up")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
