"""`orca-dist bench offline` on real stages: what it reports adds up."""

from __future__ import annotations

from pathlib import Path

import pytest

from orca_dist.bench.jobs import Job
from orca_dist.bench.offline import run_offline
from orca_dist.config import LogConfig
from orca_dist.errors import ConfigError
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import local_config


def test_an_offline_run_adds_up(tmp_path: Path) -> None:
    folder = loud_llama(tmp_path / "model")
    jobs = [Job(prompt=tuple(range(5, 5 + n)), out=2 * n, at_s=0.05 * n) for n in range(1, 6)]
    heard: list[tuple[int, int]] = []
    result = run_offline(
        folder, local_config(2), jobs, LogConfig(), lambda done, total: heard.append((done, total))
    )
    assert (result.prompt_tokens, result.output_tokens) == (15, 30)
    assert result.total_tok_s == pytest.approx(45 / result.wall_s)
    assert result.output_tok_s == pytest.approx(30 / result.wall_s)
    assert result.wall_s >= 0.25, "the last came then"
    assert 0 < result.ttft_s < result.wall_s
    assert heard == [(done, 5) for done in range(1, 6)]
    assert all(0 < stage.busy <= 1 for stage in result.stages)
    assert result.peak_rss_mb > 100
    with pytest.raises(ConfigError, match="request 0 of the workload: prompt 4000 and out 200"):
        run_offline(folder, local_config(1), [Job(prompt=(1,) * 4000, out=200)], LogConfig())
