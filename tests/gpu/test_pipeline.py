"""Two stages on CUDA against the same stages on CPU. One card does: the links go over the host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from orca_dist.core import Sampling
from tests.fixtures.checkpoints import LOUD_VOCAB_SIZE, loud_llama
from tests.fixtures.live import live, local_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [[5, 9, 17], [300], list(range(40, 77))]


@pytest.mark.parametrize("cuda_graphs", ["on", "off"])
def test_logits_equal_the_cpus(tmp_path: Path, cuda_graphs: str) -> None:
    folder = loud_llama(tmp_path / "loud")
    with live(folder, local_config(2)) as front:
        expected = front.generate(PROMPTS, 12, Sampling(return_logits=True))
    with live(folder, local_config(2, device="cuda", cuda_graphs=cuda_graphs)) as front:
        assert {stage.device for stage in front.engine.info().stages} == {"cuda:0"}
        answers = front.generate(PROMPTS, 12, Sampling(return_logits=True))
    for answer, cpu in zip(answers, expected, strict=True):
        assert answer.tokens == cpu.tokens
        np.testing.assert_allclose(
            answer.logits(LOUD_VOCAB_SIZE), cpu.logits(LOUD_VOCAB_SIZE), atol=1e-3, rtol=0
        )
