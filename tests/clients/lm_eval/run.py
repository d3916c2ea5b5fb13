"""The same lm-eval tasks on Baton and on transformers in one process: `python -m tests.clients.lm_eval.run`.

lm-eval is installed into build/lm_eval. Prints a table of scores. Exits with 1 if a score, a generated text or the set
of greedy continuations differs, or a log-likelihood by more than 1e-3.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.paths import TARGET_DIR
from tests.support.live import serve

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
PYTHON = ROOT / "build" / "lm_eval" / "bin" / "python"
REQUIREMENT = "lm-eval[api,hf]>=0.4.13,<0.5"
TASKS = ("baton_choices", "baton_answers")
TOLERANCE = 1e-3


def install() -> None:
    """Fill the environment; PIP_ARGS are further arguments of pip, such as an index of CPU wheels."""
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PYTHON.parents[1])], check=True)
    more = os.environ.get("PIP_ARGS", "").split()
    subprocess.run([str(PYTHON), "-m", "pip", "install", "--quiet", *more, REQUIREMENT], check=True)


def evaluate(model: str, arguments: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Scores and samples of the tasks, by task."""
    command = [str(PYTHON), "-m", "lm_eval", "--model", model, "--tasks", ",".join(TASKS), "--include_path", str(HERE)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--device", "cpu", "--log_samples", "--output_path", str(folder)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "HF_HOME": str(ROOT / "build" / "hf")}
    subprocess.run(command, cwd=HERE, env=env, check=True)  # paths in the tasks' files are relative to their folder
    (results,) = folder.rglob("results_*.json")
    samples = {task: _lines(next(folder.rglob(f"samples_{task}_*.jsonl"))) for task in TASKS}
    return json.loads(results.read_text(encoding="utf-8"))["results"], samples


def _lines(path: Path) -> list[Any]:
    samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(samples, key=lambda sample: int(sample["doc_id"]))


def differences(ours: dict[str, list[Any]], theirs: dict[str, list[Any]]) -> tuple[float, list[str]]:
    """The largest difference between log-likelihoods, and all other differences."""
    largest, found = 0.0, []
    for task in TASKS:
        for own, other in zip(ours[task], theirs[task], strict=True):
            for mine, reference in zip(_flat(own["resps"]), _flat(other["resps"]), strict=True):
                place = f"{task} {own['doc_id']}: {mine!r}, transformers {reference!r}"
                if isinstance(mine, str) or isinstance(reference, str):
                    if mine != reference:
                        found.append(place)
                    continue
                largest = max(largest, abs(float(mine[0]) - float(reference[0])))
                if str(mine[1]) != str(reference[1]):
                    found.append(place)
    return largest, found


def _flat(responses: list[Any]) -> list[Any]:
    """One entry per request: a text, or a log-likelihood and whether it is greedy."""
    return [response for request in responses for response in request]


def main() -> int:
    """Returns the exit code."""
    install()
    with tempfile.TemporaryDirectory() as folder:
        reference = {"pretrained": TARGET_DIR, "dtype": "float32", "add_bos_token": False}
        scores, samples = evaluate("hf", reference, Path(folder) / "hf")
        with serve("demo", "--dtype=float32") as live:
            service = {
                "model": "baton-demo",
                "base_url": f"{live.url}/v1/completions",
                "tokenizer": TARGET_DIR,
                "tokenizer_backend": "huggingface",
                "max_length": 4096,
                "num_concurrent": 4,
            }
            own_scores, own_samples = evaluate("local-completions", service, Path(folder) / "baton")
    table = Table("task", "metric", "Baton", "transformers")
    are_same = True
    for task in TASKS:
        for metric, score in scores[task].items():
            if isinstance(score, float) and "stderr" not in metric:
                own = own_scores[task][metric]
                are_same &= own == score
                table.add_row(task, metric.split(",")[0], f"{own:.4f}", f"{score:.4f}")
    console = Console()
    console.print(table)
    largest, found = differences(own_samples, samples)
    console.print(f"largest difference of log-likelihoods: {largest:.1e}")
    for line in found:
        console.print(line, markup=False)
    return 0 if are_same and not found and largest <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
