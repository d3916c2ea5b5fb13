"""The Python example, with code generated as its README says: on the demo model, and with an image."""

import shutil
import subprocess
import sys
from pathlib import Path

from gateway.request.prepare import ApiOptions
from tests.support.api_server import run_api
from tests.support.live import Live
from tests.support.vision import picture, write_vision

ROOT = Path(__file__).parents[3]
PROTOC = "-m grpc_tools.protoc -I../.. --python_out=. --grpc_python_out=. ../../protos/inference.proto"


def _python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=100)


def test_the_python_example(demo: Live, tmp_path: Path) -> None:
    assert f"python {PROTOC}" in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    folder = tmp_path / "examples" / "python"
    shutil.copytree(ROOT / "examples" / "python", folder)
    (tmp_path / "protos").mkdir()
    shutil.copy(ROOT / "protos" / "inference.proto", tmp_path / "protos")
    made = _python(folder, *PROTOC.split())
    assert made.returncode == 0, made.stderr
    done = _python(folder, "client.py", demo.grpc_address)
    assert done.returncode == 0, done.stderr
    for line in (
        "model: baton-demo, 4096 tokens",
        "chat: 12 + 30 = 40 + 2 = 42.",
        'call: get_weather({"city": "Paris"})',
        "chat: It is sunny and 21 degrees in Paris.",
    ):
        assert line in done.stdout.splitlines()
    (tmp_path / "red.png").write_bytes(picture())
    with run_api(tmp_path / "vision", ApiOptions(), write_vision) as served:
        served.engine.reset(served.script("Red."))
        done = _python(folder, "client.py", f"127.0.0.1:{served.grpc_port}", str(tmp_path / "red.png"))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "chat: Red."), done.stderr
    assert [image.data for image in served.engine.generations[-1].images] == [picture()]
    refused = _python(folder, "client.py", "127.0.0.1:1")
    assert refused.returncode == 1
    assert refused.stderr.strip().startswith("UNAVAILABLE")
