"""GGUF files of qwen2 and qwen3: the same model as before, or a refusal by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from orca_dist.core import Request, Sampling
from orca_dist.errors import ModelError
from orca_dist.spec import RopeType, load_spec
from orca_dist.text import Tokenizer
from orca_dist.weights import check_folder
from orca_dist.weights.gguf import convert_gguf
from tests.fixtures.checkpoints import LOUD_VOCAB_SIZE, loud_model
from tests.fixtures.ggufs import llama_gguf
from tests.fixtures.thread_pipeline import thread_pipeline

PROMPT = [5, 9, 17, 300, 41, 260, 7, 7]
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3, biases": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
}
QWEN_TEXT = {"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_bos_token": False}


def made(folder: Path, name: str) -> Path:
    """Two layers; values that bf16 holds exactly, in fp32."""
    from transformers import AutoModelForCausalLM

    loud_model(folder, {"num_hidden_layers": 2, **FAMILIES[name]})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=list(FAMILIES))
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("original"), request.param)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("qwen3"), "qwen3")


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


def test_logits_are_those_of_the_original(original: Path, tmp_path: Path) -> None:
    """In transformers to the bit; and ours, on two stages."""
    source = llama_gguf(tmp_path / "m.gguf", original, metadata=QWEN_TEXT)
    folder = convert_gguf(source, tmp_path / "out")
    check_folder(folder, load_spec(folder))
    expected = logits(original)
    assert torch.equal(logits(folder), expected)
    request = Request(
        id=1, prompt=tuple(PROMPT), max_tokens=1, sampling=Sampling(return_logits=True)
    )
    with thread_pipeline(folder, 2) as pipeline:
        ours = pipeline.alone(request).logits(LOUD_VOCAB_SIZE)
    np.testing.assert_allclose(ours, expected.numpy(), atol=1e-4, rtol=0)


def test_transformers_reads_the_same_tensors_of_the_file_itself(
    original: Path, tmp_path: Path
) -> None:
    """Its reader is not ours: the file is laid out as others expect it."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = llama_gguf(tmp_path / "m.gguf", original, metadata=QWEN_TEXT)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(original))
    read = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    saved = load_file(original / "model.safetensors")
    assert read.keys() == saved.keys()
    assert all(torch.equal(torch.as_tensor(read[name]), saved[name]) for name in saved)


def test_the_config_is_the_originals(original: Path, tmp_path: Path) -> None:
    source = llama_gguf(tmp_path / "m.gguf", original, metadata=QWEN_TEXT)
    converted = load_spec(convert_gguf(source, tmp_path / "out"))
    assert repr(converted) == repr(load_spec(original)).replace("'float32'", "'bfloat16'")


def test_quantised_rows_stay_in_their_order(qwen3: Path, tmp_path: Path) -> None:
    """Unlike a llama's: Q8_0 rounds each value by less than 1 % of its block's largest."""
    source = llama_gguf(tmp_path / "m.gguf", qwen3, kind="Q8_0", metadata=QWEN_TEXT)
    folder = convert_gguf(source, tmp_path / "out")
    exact, rounded = (_q_proj(each) for each in (qwen3, folder))
    assert (exact - rounded).abs().max() < 0.01 * exact.abs().max()


def _q_proj(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].float()


def test_text_is_split_as_qwen_does_and_nothing_put_before(qwen3: Path, tmp_path: Path) -> None:
    source = llama_gguf(tmp_path / "m.gguf", qwen3, metadata=QWEN_TEXT)
    tokenizer = Tokenizer.load(convert_gguf(source, tmp_path / "out"))
    assert len(tokenizer.encode("12")) == 2
    assert tokenizer.eos_token_ids == {2}


def test_yarn_is_kept(qwen3: Path, tmp_path: Path) -> None:
    scaling = {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 64,
    }
    source = llama_gguf(tmp_path / "m.gguf", qwen3, metadata={**QWEN_TEXT, **scaling})
    rope = load_spec(convert_gguf(source, tmp_path / "out")).rope
    assert (rope.rope_type, rope.factor, rope.original_max_len) == (RopeType.YARN, 4.0, 64)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"extra": {"rope_freqs.weight": np.ones(16, np.float32)}}, r"rope_freqs\.weight has no"),
        ({"extra": {"blk.0.ffn_up.bias": np.ones(96, np.float32)}}, r"no place in a qwen3 model"),
        ({"without": ("blk.1.attn_k_norm.weight",)}, r"1\.self_attn\.k_norm\.weight is missing"),
        ({"metadata": {"qwen3.block_count": None}}, r"qwen3\.block_count is missing"),
        ({"metadata": {"qwen3.expert_count": 4}}, r"mixture-of-experts"),
        ({"metadata": {"general.architecture": "qwen3moe"}}, r"'qwen3moe' is not supported"),
        ({"metadata": {"qwen3.attention.key_length": 16}}, r"rotary embedding of 32 of 16"),
    ],
)
def test_what_can_not_be_kept_is_refused(
    qwen3: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    source = llama_gguf(tmp_path / "m.gguf", qwen3, **changes)
    with pytest.raises(ModelError, match=problem):
        convert_gguf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
