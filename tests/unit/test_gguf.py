"""GGUF conversion: the same model as before, or a refusal by name and no folder."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from orca_dist.errors import ModelError
from orca_dist.spec import load_spec
from orca_dist.text import ChatTemplate, Tokenizer
from orca_dist.weights import check_folder
from orca_dist.weights.gguf import convert_gguf, write_model
from orca_dist.weights.gguf_file import GgufFile
from tests.fixtures.byte_level import byte_level_tokenizer
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.disk import largest_file
from tests.fixtures.ggufs import llama_gguf, requantised
from tests.fixtures.k_quants import block_values, random_blocks

PROMPT = torch.tensor([[5, 9, 17, 300, 41, 260, 7, 7]])
Q_BIAS = "blk.1.attn_q.bias"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Biased everywhere; values that bf16 holds exactly, in fp32."""
    import transformers

    folder = loud_llama(
        tmp_path_factory.mktemp("original"), num_layers=2, attention_bias=True, mlp_bias=True
    )
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, tied, no biases."""
    return loud_llama(tmp_path_factory.mktemp("plain"), num_layers=1, tie=True)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers whose rows fill the blocks of 256 that K-quants need."""
    return loud_llama(tmp_path_factory.mktemp("wide"), hidden_size=256, num_layers=8)


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(PROMPT).logits


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_logits_are_those_of_the_original(original: Path, tmp_path: Path, kind: str) -> None:
    """Values are exact in all three, so a wrong order of q or k rows can't hide."""
    folder = convert_gguf(llama_gguf(tmp_path / "m.gguf", original, kind=kind), tmp_path / "out")
    check_folder(folder, load_spec(folder))
    if kind == "F16":  # has fewer exponents than bf16: the smallest values are rounded
        torch.testing.assert_close(logits(folder), logits(original), atol=1e-4, rtol=0)
    else:
        assert torch.equal(logits(folder), logits(original))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_tensors_become_their_bf16_values(
    original: Path, tmp_path: Path, kind: str
) -> None:
    folder = convert_gguf(llama_gguf(tmp_path / "m.gguf", original, kind=kind), tmp_path / "out")
    ours, theirs = (
        load_file(folder / "model.safetensors"),
        load_file(original / "model.safetensors"),
    )
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        stored = requantised(values.numpy(), kind) if values.ndim > 1 else values.numpy()
        assert torch.equal(ours[name], torch.from_numpy(stored.copy()).to(torch.bfloat16)), name


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_become_their_bf16_values(wide: Path, tmp_path: Path, kind: str) -> None:
    """As in real files: one kind for most matrices, another where rows don't fill its blocks."""
    shapes = {"attn_q": (256, 256), "attn_v": (128, 256), "ffn_up": (96, 256)}
    stored = {
        f"blk.0.{name}.weight": random_blocks(shape, kind, seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    source = llama_gguf(tmp_path / "m.gguf", wide, kind="Q8_0", extra=stored)
    folder = convert_gguf(source, tmp_path / "out")
    check_folder(folder, load_spec(folder))
    ours = load_file(folder / "model.safetensors")
    q, v, up = (torch.from_numpy(block_values(each)) for each in stored.values())
    paired_q = q.reshape(4, 32, 2, 256).transpose(1, 2).reshape(256, 256)
    layer = "model.layers.0"
    assert_rounded(ours[f"{layer}.self_attn.q_proj.weight"], paired_q)
    assert_rounded(ours[f"{layer}.self_attn.v_proj.weight"], v)
    assert_rounded(ours[f"{layer}.mlp.up_proj.weight"], up)


def assert_rounded(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """`exact` to within bf16's half step (8 bits), and fp32's noise where terms cancel."""
    assert ours.dtype == torch.bfloat16
    assert exact.abs().max() > 0.5
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-6)


def test_large_tensors_go_in_parts(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = llama_gguf(tmp_path / "m.gguf", original, kind="Q8_0")
    convert_gguf(source, tmp_path / "whole")
    monkeypatch.setattr("orca_dist.weights.gguf_weights._CHUNK_ELEMENTS", 200)
    convert_gguf(source, tmp_path / "parts")
    whole, parts = (tmp_path / name / "model.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


def test_a_large_model_goes_into_shards(original: Path, tmp_path: Path) -> None:
    source = llama_gguf(tmp_path / "m.gguf", original)
    one = load_file(convert_gguf(source, tmp_path / "one") / "model.safetensors")
    limit = 25_000  # less than the embedding's 40,960
    folder = convert_gguf(source, tmp_path / "many", max_shard_bytes=limit)
    shards = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    total = len(shards)
    numbers = range(1, total + 1)
    assert list(shards) == [f"model-{i:05d}-of-{total:05d}.safetensors" for i in numbers]
    sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in shards.values()]
    counts = [len(shard) for shard in shards.values()]
    assert all(size <= limit or n == 1 for size, n in zip(sizes, counts, strict=True))
    assert total <= 2 * sum(sizes) / limit + 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert index["weight_map"] == {name: file for file in shards for name in shards[file]}
    merged = {name: tensor for shard in shards.values() for name, tensor in shard.items()}
    assert merged.keys() == one.keys()
    assert all(torch.equal(merged[name], one[name]) for name in one)
    check_folder(folder, load_spec(folder))
    assert torch.equal(logits(folder), logits(original))


def test_memory_holds_about_one_tensor(
    tmp_path: Path, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the metadata, which the reader keeps in Python objects from the start."""
    monkeypatch.setattr("orca_dist.weights.gguf_weights._CHUNK_ELEMENTS", 4096)
    source = GgufFile(llama_gguf(tmp_path / "m.gguf", wide, kind="Q8_0"))
    write_model(source, tmp_path)  # what is imported and cached once
    (tmp_path / "out").mkdir()
    tracemalloc.start()
    try:
        write_model(source, tmp_path / "out", max_shard_bytes=200_000)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tensors = [load_file(path) for path in (tmp_path / "out").glob("*.safetensors")]
    sizes = [tensor.nbytes for shard in tensors for tensor in shard.values()]
    assert sum(sizes) > 20 * max(sizes)
    assert peak_bytes < 3 * max(sizes)


def test_the_config_is_the_originals(original: Path, plain: Path, tmp_path: Path) -> None:
    for index, folder in enumerate((original, plain)):
        source = llama_gguf(tmp_path / f"{index}.gguf", folder)
        converted = load_spec(convert_gguf(source, tmp_path / str(index)))
        assert repr(converted) == repr(load_spec(folder)).replace("'float32'", "'bfloat16'")
    assert "rms_norm_eps=1e-06" in repr(converted)


def test_the_tokenizer_is_the_originals(plain: Path, tmp_path: Path) -> None:
    theirs = Tokenizer.load(byte_level_tokenizer(tmp_path / "theirs"))
    folder = convert_gguf(llama_gguf(tmp_path / "m.gguf", plain), tmp_path / "out")
    ours = Tokenizer.load(folder)
    for text in ("the 1212 then", "<|im_start|>how", " \n\u4e2d\U0001f642", "12<|im_end|>12"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert (ours.eos_token_ids, ours.special_ids) == ({2}, {0, 1, 2})
    assert ChatTemplate.load(folder).render([{"role": "user", "content": "a"}]) == "<|im_start|>a"


def test_both_ends_of_text_count(plain: Path, tmp_path: Path) -> None:
    source = llama_gguf(tmp_path / "m.gguf", plain, metadata={"tokenizer.ggml.eot_token_id": 0})
    folder = convert_gguf(source, tmp_path / "out")
    assert Tokenizer.load(folder).eos_token_ids == {0, 2}
    assert load_spec(folder).eos_token_ids == (2, 0)


@pytest.mark.parametrize(("add", "want"), [(True, [1]), (False, [])])
def test_bos_is_added_where_the_file_says_so(
    plain: Path, tmp_path: Path, add: bool, want: list[int]
) -> None:
    metadata = {"tokenizer.ggml.add_bos_token": add}
    source = llama_gguf(tmp_path / "m.gguf", plain, metadata=metadata)
    tokenizer = Tokenizer.load(convert_gguf(source, tmp_path / "out"))
    assert tokenizer.encode("a")[:-1] == want
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a")[-1:]


def test_gpt2_splits_digits_by_its_own_rule(plain: Path, tmp_path: Path) -> None:
    """Only there can the merge of 1 and 2 apply."""
    source = llama_gguf(tmp_path / "m.gguf", plain, metadata={"tokenizer.ggml.pre": "gpt-2"})
    folder = convert_gguf(source, tmp_path / "out")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert library.encode("12").tokens == ["12"]


def test_user_defined_tokens_are_matched_but_not_special(plain: Path, tmp_path: Path) -> None:
    kinds = [4, 3, 3] + [1] * 262
    source = llama_gguf(tmp_path / "m.gguf", plain, metadata={"tokenizer.ggml.token_type": kinds})
    tokenizer = Tokenizer.load(convert_gguf(source, tmp_path / "out"))
    assert tokenizer.encode("a<|endoftext|>")[1:] == [0]
    assert tokenizer.decode([0]) == "<|endoftext|>"


BAD_METADATA = [
    (
        {"general.architecture": "phi3"},
        r"architecture 'phi3' is not supported; supported: lla",
    ),
    ({"llama.rope.dimension_count": 8}, r"rotary embedding of 8 of 16"),
    ({"llama.expert_count": 8}, r"mixture-of-experts"),
    ({"split.count": 2, "split.no": 0}, r"m\.gguf is part 1 of 2 of one model: merge them"),
    (
        {"split.count": 3, "split.no": 2, "general.architecture": "other"},
        r"m\.gguf is part 3 of 3 of one model: .*llama-gguf-split --merge",
    ),
    ({"llama.block_count": None}, r"llama\.block_count is missing"),
    ({"llama.attention.head_count": [4, 2]}, r"head_count = \[4, 2\]"),
    ({"llama.feed_forward_length": 48}, r"ffn_gate\.weight has shape \[96, 64\].*\[48, 64\]"),
    ({"tokenizer.ggml.model": "t5"}, r"tokenizer\.ggml\.model = 't5'.*supported: gpt2, llama"),
    ({"tokenizer.ggml.model": "llama"}, r"no token for byte 0x00"),
    ({"tokenizer.ggml.token_type": [1, 1]}, r"265 tokens have 2 types"),
    ({"tokenizer.ggml.pre": "mystery"}, r"tokenizer\.ggml\.pre = 'mystery'.*supported: smollm"),
    ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges is missing"),
]


@pytest.mark.parametrize(("metadata", "problem"), BAD_METADATA)
def test_what_can_not_be_kept_is_refused(
    plain: Path, tmp_path: Path, metadata: dict[str, Any], problem: str
) -> None:
    source = llama_gguf(tmp_path / "m.gguf", plain, metadata=metadata)
    assert_refused(source, tmp_path, problem)


def test_an_unknown_tensor_type_is_refused(plain: Path, tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.weight": np.ones((64, 64), np.int32)}
    source = llama_gguf(tmp_path / "m.gguf", plain, extra=extra)
    assert_refused(source, tmp_path, r"blk\.0\.attn_q\.weight is I32.*supported: F32, F16")


def test_an_unknown_tensor_is_refused(plain: Path, tmp_path: Path) -> None:
    extra = {"rope_factors_long.weight": np.ones(8, np.float32)}
    source = llama_gguf(tmp_path / "m.gguf", plain, extra=extra)
    assert_refused(source, tmp_path, r"rope_factors_long\.weight has no place in a llama model")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (Q_BIAS, r"model\.layers\.1\.self_attn\.q_proj\.bias is missing"),
        ("output_norm.weight", r"model\.norm\.weight is missing"),
        ("token_embd.weight", r"token_embd\.weight is missing"),
    ],
)
def test_a_missing_tensor_is_named(original: Path, tmp_path: Path, name: str, problem: str) -> None:
    assert_refused(llama_gguf(tmp_path / "m.gguf", original, without=(name,)), tmp_path, problem)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.5, 0.99])
def test_a_cut_file_is_refused(plain: Path, tmp_path: Path, share: float) -> None:
    source = llama_gguf(tmp_path / "m.gguf", plain)
    whole = source.read_bytes()
    source.write_bytes(whole[: int(len(whole) * share)])
    assert_refused(source, tmp_path, r"m\.gguf is cut short or not a GGUF file")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert_refused(tmp_path / "gone.gguf", tmp_path, r"gone\.gguf can't be read")


def test_a_taken_target_is_left_alone(plain: Path, tmp_path: Path) -> None:
    source = llama_gguf(tmp_path / "m.gguf", plain)
    target = convert_gguf(source, tmp_path / "out")
    before = (target / "config.json").stat()
    with pytest.raises(ModelError, match="exists already"):
        convert_gguf(source, target)
    assert (target / "config.json").stat() == before


def test_a_disk_that_refuses_leaves_nothing_and_a_second_try_works(
    plain: Path, tmp_path: Path
) -> None:
    source = llama_gguf(tmp_path / "m.gguf", plain)
    with largest_file(50_000):
        assert_refused(source, tmp_path, r"out can't be written: .*File too large")
    assert (convert_gguf(source, tmp_path / "out") / "model.safetensors").exists()


def test_a_disk_that_fills_in_a_later_shard_leaves_nothing(wide: Path, tmp_path: Path) -> None:
    """The first has 295,424 bytes of tensors, the second 311,808."""
    source = llama_gguf(tmp_path / "m.gguf", wide)
    with pytest.raises(ModelError, match="can't be written"), largest_file(300_000):
        convert_gguf(source, tmp_path / "out", max_shard_bytes=330_000)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_an_interrupted_conversion_leaves_nothing(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr("orca_dist.weights.gguf_weights.dequantize", interrupt)
    source = llama_gguf(tmp_path / "m.gguf", plain)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_transformers_reads_the_folder(plain: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = convert_gguf(llama_gguf(tmp_path / "m.gguf", plain), tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(folder)
    text = "the 1212 then <|im_end|>"
    assert theirs(text).input_ids == Tokenizer.load(folder).encode(text)
    assert theirs.eos_token_id == 2
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def assert_refused(source: Path, workplace: Path, problem: str) -> None:
    """One line that says so, and nothing new on disk."""
    before = sorted(workplace.iterdir())
    with pytest.raises(ModelError, match=problem) as caught:
        convert_gguf(source, workplace / "out")
    assert not re.search(r"\n", str(caught.value))
    assert sorted(workplace.iterdir()) == before
