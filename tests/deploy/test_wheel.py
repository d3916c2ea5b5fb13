"""The wheel in an environment of its own, far from the checkout: it is whole, and nothing hides its packages."""

import ast
import json
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from demo.paths import TARGET_DIR
from engine.cpu.build import FOLDER as KERNELS
from tests.support.instruction_sets import link_kernels
from tests.support.live import CHECKOUT, HTTP, Live, serve

WAIT_S = 120.0
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
BUILT = {"cpu_layers"}  # kernels that the wheel must build itself
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["sources"]  # in the checkout |-> in the wheel


def call(*words: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program that finds no checkout."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = inherited | environment
    return subprocess.run(words, capture_output=True, text=True, env=environment, cwd=cwd, timeout=WAIT_S)


def pip(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *words], check=True, timeout=WAIT_S)


class Environment:
    """A virtual environment with the wheel, which sees the dependencies of the environment that runs the tests.

    cache: what its processes get as $XDG_CACHE_HOME. At first it has kernels alone, as far as we have built the same.
    """

    def __init__(self, wheel: Path, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python, self.script = folder / "bin" / "python", folder / "bin" / "baton"
        self.install(wheel)
        [self.packages] = folder.resolve().glob("lib/python*/site-packages")
        others = [path for path in sys.path if path.endswith("site-packages")]
        (self.packages / "dependencies.pth").write_text("\n".join(others))  # whose own .pth files are not read
        self.cache = folder / "cache"
        self.cache.mkdir()
        link_kernels(self.cache, *BUILT)

    def install(self, wheel: Path) -> None:
        pip("--python", self.python, "install", "--no-deps", "--no-index", "--no-compile", "--force-reinstall", wheel)

    def baton(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return call(self.script, *words, cwd=self.cache, XDG_CACHE_HOME=str(self.cache), **environment)

    def run(self, code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Python that finds modules of its working directory."""
        return call(self.python, "-c", code, cwd=cwd, XDG_CACHE_HOME=str(self.cache))

    def files(self) -> dict[Path, int]:
        """path |-> when it was written, without Python's bytecode."""
        found = [path for path in self.packages.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        return {path: path.stat().st_mtime_ns for path in found}


def name_module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def find_imports(text: bytes) -> set[str]:
    """Modules, and what may be one."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, CHECKOUT)
    [built] = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    environment = Environment(wheel, tmp_path_factory.mktemp("installed"))
    before = environment.files()
    yield environment
    assert environment.files() == before, "an installation may be read-only"


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with others' modules of each name that our packages have."""
    folder = tmp_path_factory.mktemp("foreign")
    for name in PACKAGES:
        (folder / f"{name}.py").write_text("raise SystemExit('not ours')")
    return folder


@pytest.fixture(scope="module")
def live(installed: Environment, foreign: Path) -> Iterator[Live]:
    """Others' modules come first on its path."""
    environment = {"XDG_CACHE_HOME": str(installed.cache), "PYTHONPATH": str(foreign)}
    with serve("demo", installed=installed.script, env=environment) as service:
        yield service


def test_the_wheel_has_what_it_imports_and_reads_and_nothing_that_needs_a_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {Path(name): archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    assert {path.parts[0] for path in texts} == {"baton"}, "one name is installed"
    texts = {path.relative_to("baton"): text for path, text in texts.items()}
    assert {path.parts[0] for path in texts} == {*PACKAGES, "__init__.py", "__main__.py"}
    checkout = {path.relative_to(CHECKOUT) for name in (*PACKAGES, "tests") for path in (CHECKOUT / name).rglob("*.py")}
    left_out = {name_module(path) for path in checkout - texts.keys()}
    assert {"tests", "bench.gpu_check", "demo.train"} <= left_out
    for path, text in texts.items():
        if path.suffix == ".py":
            lacking = left_out & find_imports(text)
            assert not lacking, path
    for place in (KERNELS, *(CHECKOUT / name for name in ("gateway/page", "demo/target", "demo/draft"))):
        files = {path.relative_to(CHECKOUT) for path in place.iterdir() if path.is_file()}
        assert files and files <= texts.keys()


def test_every_command_is_there_beside_modules_of_others(installed: Environment, foreign: Path) -> None:
    done = installed.baton("--help", PYTHONPATH=str(foreign))  # imports all commands
    assert done.returncode == 0 and "doctor" in done.stdout, done.stderr
    assert installed.baton("--version").stdout.strip() == VERSION
    assert call(installed.python, "-m", "baton", "--version", cwd=installed.cache).stdout.strip() == VERSION


def test_it_answers_the_official_client(live: Live) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    [model] = [one.id for one in client.models.list()]
    question: Any = {"role": "user", "content": "What is 12 plus 30?"}
    answer = client.chat.completions.create(model=model, messages=[question], temperature=0)
    assert "42" in (answer.choices[0].message.content or "")
    assert HTTP.get(f"{live.url}/version").json() == {"version": VERSION}
    page = CHECKOUT / "gateway" / "page"
    for path, name in (("", "index.html"), ("page/app.js", "app.js"), ("page/style.css", "style.css")):
        assert HTTP.get(f"{live.url}/{path}").content == (page / name).read_bytes()
    assert "12 plus 30" in HTTP.get(f"{live.url}/page/examples.json").text


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there is no /proc to look into processes")
def test_only_workers_hold_torch(live: Live) -> None:
    supervisor = live.process.pid
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    holders = [int(pid) for pid in children if "libtorch" in Path(f"/proc/{pid}/maps").read_text()]
    assert len(children) == 1 + len(live.status()) and sorted(holders) == sorted(one["pid"] for one in live.status())


@pytest.mark.nightly
def test_kernels_are_built_in_the_users_cache(installed: Environment, live: Live) -> None:
    report = json.loads(installed.baton("doctor", "--json").stdout)
    if not report["machine"]["cpp_compiler"]:
        pytest.skip("no C++ compiler")
    assert report["machine"]["kernel_error"] == ""
    found = {path.name.partition("-")[0]: path for path in (installed.cache / "baton").glob("*.so")}
    assert found.keys() >= BUILT | {"cpu_linear", "cpu_paged", "cpu_sampling"}, live.read_log()
    assert not any(found[name].is_symlink() for name in BUILT)


@pytest.mark.nightly
def test_a_program_computes_a_model_beside_modules_of_its_own(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "cli.py").write_text("own = True")
    code = f"""
import cli, sys
from baton import LLM, SamplingParams
llm = LLM({str(TARGET_DIR)!r})
print(cli.own, llm.generate(["<|user|>What is 12 plus 30?<|end|><|assistant|>"], SamplingParams(temperature=0)))
print(sys.modules[type(llm).__module__].__file__)
"""
    done = installed.run(code, tmp_path)
    answer, file = done.stdout.splitlines()
    assert answer.startswith("True") and "42" in answer, done
    assert file == str(installed.packages / "baton" / "engine" / "llm.py")


def test_a_package_that_another_has_taken_is_an_error_that_names_both(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "engine.py").touch()
    done = installed.run("import sys, baton, engine\nprint('torch' in sys.modules)\nfrom baton import LLM", tmp_path)
    assert (done.returncode, done.stdout) == (1, "False\n"), done
    ours = installed.packages / "baton" / "engine" / "__init__.py"
    refusal = f"its own package engine, {ours}, but {tmp_path / 'engine.py'} is already imported by this name"
    assert refusal in done.stderr.splitlines()[-1] and done.stderr.count("Traceback") == 1, "one error"
