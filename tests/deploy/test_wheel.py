"""The wheel in an environment of its own, far from the checkout: it is whole, it answers, and it is not shadowed."""

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

import baton
from engine.kernels.build import FOLDER as KERNELS
from tests.support.instruction_sets import link_kernels
from tests.support.live import CHECKOUT, HTTP, Live, serve

WAIT_S = 120.0
VERSION = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
BUILT = {"cpu_layers", "cpu_math"}  # kernels that the wheel must build itself
ADVICE = f"{baton.ADVICE}\n"


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

    def refusal(self, **environment: str) -> str:
        """What `baton --version` says instead; empty if it starts."""
        done = self.baton("--version", **environment)
        assert (done.returncode, bool(done.stdout)) in ((0, True), (1, False)), done
        return done.stderr

    def files(self) -> dict[Path, int]:
        """path |-> when it was written, without Python's bytecode."""
        found = [path for path in self.packages.rglob("*") if "__pycache__" not in path.parts]
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
def live(installed: Environment) -> Iterator[Live]:
    with serve("demo", installed=installed.script, env={"XDG_CACHE_HOME": str(installed.cache)}) as service:
        yield service


def test_the_wheel_has_what_it_imports_and_reads_and_nothing_that_needs_a_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {Path(name): archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    assert {path.parts[0] for path in texts} == {*baton.PACKAGES, "baton.py"}
    checkout = {
        path.relative_to(CHECKOUT) for name in (*baton.PACKAGES, "tests") for path in (CHECKOUT / name).rglob("*.py")
    }
    left_out = {name_module(path) for path in checkout - texts.keys()}
    assert {"tests", "bench.gpu_check", "demo.train"} <= left_out
    for path, text in texts.items():
        if path.suffix == ".py":
            lacking = left_out & find_imports(text)
            assert not lacking, path
    for place in (KERNELS, *(CHECKOUT / name for name in ("gateway/page", "demo/target", "demo/draft"))):
        files = {path.relative_to(CHECKOUT) for path in place.iterdir() if path.is_file()}
        assert files and files <= texts.keys()


def test_every_package_is_the_wheels(installed: Environment) -> None:
    code = f"from importlib import import_module; print(*(import_module(name).__file__ for name in {baton.PACKAGES}))"
    done = call(installed.python, "-c", code, cwd=installed.cache)
    assert done.stdout.split() == [str(installed.packages / name / "__init__.py") for name in baton.PACKAGES], done


def test_every_command_is_there(installed: Environment) -> None:
    done = installed.baton("--help")  # imports all commands
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


def test_kernels_are_built_in_the_users_cache(installed: Environment, live: Live) -> None:
    report = json.loads(installed.baton("doctor", "--json").stdout)
    if not report["machine"]["cpp_compiler"]:
        pytest.skip("no C++ compiler")
    assert report["machine"]["kernel_error"] == ""
    found = {path.name.partition("-")[0]: path for path in (installed.cache / "baton").glob("*.so")}
    assert found.keys() >= BUILT | {"cpu_linear", "cpu_paged", "cpu_sampling"}, live.read_log()
    assert not any(found[name].is_symlink() for name in BUILT)


@pytest.mark.parametrize("found", ["cli/__init__.py", "runtime.py"])
def test_a_package_hidden_by_another_is_a_refusal(installed: Environment, tmp_path: Path, found: str) -> None:
    (tmp_path / "gateway").mkdir()  # without __init__.py: it hides nothing
    assert installed.refusal(PYTHONPATH=str(tmp_path)) == ""
    hiding = tmp_path / found
    hiding.parent.mkdir(exist_ok=True)
    hiding.write_text("raise SystemExit('not ours')")
    name = found.partition("/")[0].removesuffix(".py")
    place = f"the package {name} of {installed.packages} is hidden by {hiding}"
    expected = f"baton: {place}: take that off PYTHONPATH, or {ADVICE}"
    assert installed.refusal(PYTHONPATH=str(tmp_path)) == expected


def test_a_file_that_another_distribution_has_overwritten_or_deleted_is_a_refusal(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(wheel, tmp_path / "environment")
    other = tmp_path / "other-1.0-py3-none-any.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("cli/main.py", "raise SystemExit('not ours')")
        archive.writestr("other-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
        archive.writestr("other-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("other-1.0.dist-info/RECORD", "")
    place = environment.packages
    environment.install(other)
    assert environment.refusal() == f"baton: cli/main.py in {place} is now that of other 1.0: {ADVICE}"
    pip("--python", environment.python, "uninstall", "--yes", "other")
    assert environment.refusal() == f"baton: cli/main.py is missing in {place}: {ADVICE}"
    environment.install(wheel)
    assert environment.refusal() == ""
    with (place / "cli" / "main.py").open("a") as file:
        file.write("# edited\n")
    assert environment.refusal() == ""
    (place / "cli" / "__init__.py").unlink()
    assert environment.refusal() == f"baton: the package cli is missing in {place}: {ADVICE}"
