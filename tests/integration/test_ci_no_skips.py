"""The plugin that makes a skipped test fail a CI run, on small suites of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).resolve().parents[1] / "ci_no_skips.py"
CONFIG = "[pytest]\nmarkers =\n    gpu: needs a CUDA device\n    root: needs root\n"
SKIPPED = "import pytest\n\ndef test_it():\n    pytest.skip('why')\n"
XFAILED = "import pytest\n\n@pytest.mark.xfail\ndef test_it():\n    assert False\n"
MODULE_SKIPPED = "import pytest\n\npytest.skip('why', allow_module_level=True)\n"
ROOT = "import pytest\n\n@pytest.mark.root\ndef test_it():\n    pytest.skip('why')\n"
GPU = "import pytest\n\n@pytest.mark.gpu\ndef test_it():\n    pytest.skip('why')\n"


def _exit_code(folder: Path, suite: dict[str, str], *, ci: str, jobs: int = 0) -> int:
    (folder / "pytest.ini").write_text(CONFIG)
    (folder / "no_skips_plugin.py").write_text(PLUGIN.read_text())
    for name, text in {**suite, "test_passes.py": "def test_it(): ...\n"}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no_skips_plugin",
            "-p",
            "xdist",
            "-n",
            str(jobs),
        ],
        cwd=folder,
        env={
            **os.environ,
            "CI": ci,
            "PYTHONPATH": str(folder),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        stdout=subprocess.DEVNULL,
        check=False,
    ).returncode


@pytest.mark.parametrize(
    "text", [SKIPPED, XFAILED, MODULE_SKIPPED], ids=["skip", "xfail", "module"]
)
@pytest.mark.parametrize("jobs", [0, 2])
def test_a_skip_fails_the_run_in_ci(tmp_path: Path, text: str, jobs: int) -> None:
    code = _exit_code(tmp_path, {"test_a.py": text}, ci="true", jobs=jobs)
    assert code == pytest.ExitCode.TESTS_FAILED


def test_a_skip_is_allowed_elsewhere(tmp_path: Path) -> None:
    assert _exit_code(tmp_path, {"test_a.py": SKIPPED}, ci="") == pytest.ExitCode.OK


def test_gpu_tests_may_skip_in_ci(tmp_path: Path) -> None:
    suite = {"test_a.py": GPU, "tests/gpu/test_b.py": MODULE_SKIPPED}
    assert _exit_code(tmp_path, suite, ci="true") == pytest.ExitCode.OK


def test_root_s_tests_may_skip_in_ci_for_others(tmp_path: Path) -> None:
    code = pytest.ExitCode.OK if os.geteuid() else pytest.ExitCode.TESTS_FAILED
    assert _exit_code(tmp_path, {"test_a.py": ROOT}, ci="true") == code
