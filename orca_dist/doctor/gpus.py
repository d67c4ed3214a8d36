"""The GPUs of this node, as the driver's own tool and torch see them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from orca_dist.doctor.facts import Gpu, GpuFacts

MIB = 2**20
QUERY = "--query-gpu=index,name,memory.total,memory.used,driver_version"
TOOL_TIMEOUT_S = 20.0
TORCH_TIMEOUT_S = 90.0  # reading a CUDA build from a network file system takes its time
DEVICE_FILE = Path("/dev/nvidiactl")
# A process of its own: the first look at CUDA decides for a process which GPUs it has.
TORCH_QUESTION = (
    "import torch; "
    "print('cuda' if torch.version.cuda else 'none'); "
    "torch.cuda.init() if torch.version.cuda else None; "
    "print(torch.cuda.device_count())"
)


def gpu_facts(*, ask_torch: bool, device_file: Path = DEVICE_FILE) -> GpuFacts:
    """nvidia-smi's answer, and torch's where there are GPUs and `ask_torch`."""
    facts = _driver_facts(device_file)
    return replace(facts, torch_problem=_torch_problem()) if ask_torch and facts.gpus else facts


def _driver_facts(device_file: Path) -> GpuFacts:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        found = device_file.exists()
        return GpuFacts(problem=f"{device_file} is here, nvidia-smi is not" if found else "")
    try:
        done = subprocess.run(
            [tool, QUERY, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return GpuFacts(problem=f"nvidia-smi: {error}")
    if done.returncode:
        return GpuFacts(problem=f"nvidia-smi: {_last_line(done.stdout + done.stderr)}")
    return _parsed(done.stdout)


def _parsed(table: str) -> GpuFacts:
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line]
    try:
        gpus = tuple(
            Gpu(
                index=int(index),
                name=name,
                memory_bytes=int(total) * MIB,
                used_bytes=int(used) * MIB,
            )
            for index, name, total, used, _ in rows
        )
    except ValueError:
        return GpuFacts(problem=f"nvidia-smi says {' '.join(table.split())[:80]}")
    return GpuFacts(gpus=gpus, driver=rows[0][-1] if rows else "")


def _torch_problem() -> str:
    # Ray hides all GPUs from actors that reserve none.
    hiding = ("CUDA_VISIBLE_DEVICES",)
    environment = {name: value for name, value in os.environ.items() if name not in hiding}
    try:
        done = subprocess.run(
            [sys.executable, "-c", TORCH_QUESTION],
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"torch can't be asked: {error}"
    if done.stdout.startswith("none"):
        return "this torch is built without CUDA"
    return f"torch: {_last_line(done.stderr)}" if done.returncode else ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
