"""Which kernels a process gets, by what it has imported: each in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def interpreted(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)


def test_without_triton_a_gpu_has_torchs() -> None:
    script = (
        "import sys, torch; sys.modules['triton'] = None\n"
        "import orca_kernels\n"
        "torch.cuda.get_device_capability = lambda device: (9, 0)\n"
        "print(orca_kernels.kernels_for(torch.device('cuda', 0), torch.bfloat16, 1).name)\n"
    )
    ran = interpreted(script)
    assert ran.stdout == "torch\n", ran.stderr
    assert ran.stderr.count("plain torch") == 1


def test_a_cpu_never_imports_triton() -> None:
    script = (
        "import sys, torch\nfrom orca_kernels import kernels_for\n"
        "kernels_for(torch.device('cpu'), torch.float32, 1)\n"
        "print([name for name in sys.modules if name.startswith('orca_kernels.triton')])\n"
    )
    ran = interpreted(script)
    assert ran.stdout == "[]\n", ran.stderr


def test_a_tape_never_imports_torchs_compiler() -> None:
    """It would take a stage more than a second, at its first decode."""
    script = (
        "import sys, torch\nfrom orca_kernels import kernels_for\n"
        "capture = kernels_for(torch.device('cpu'), torch.float32, 1).capture\n"
        "x = torch.ones(3)\n"
        "print(capture(lambda: x * 2)().tolist(), 'torch._dynamo' in sys.modules)\n"
    )
    ran = interpreted(script)
    assert ran.stdout == "[2.0, 2.0, 2.0] False\n", ran.stderr
