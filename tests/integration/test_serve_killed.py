"""A server on a Ray of its own: killed outright it leaves nothing behind, and its stages know
nothing of its secrets.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.serving import gone, serving

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]

STAGES_WITHIN_S = 15.0
ALL_WITHIN_S = 90.0  # Ray's own agents look after their raylet only now and then
KEY = "a-key-that-no-stage-sees"


def test_no_process_outlives_a_killed_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCA_API_KEYS", f"alice:{KEY}")
    monkeypatch.setenv("ORCA_API_KEY", KEY)
    with serving(loud_llama(tmp_path), "--kv-tokens", "2048", "--launcher", "ray") as server:
        stages = [psutil.Process(pid) for pid in server.stage_pids(api_key=KEY)]
        everything = server.children()
        assert {stage.pid for stage in stages} <= {child.pid for child in everything}
        for process in everything:
            assert f"alice:{KEY}" not in process.environ().values()
        server.process.kill()
        assert gone(stages, STAGES_WITHIN_S)
        assert gone(everything, ALL_WITHIN_S)
