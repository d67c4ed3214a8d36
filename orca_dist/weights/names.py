"""The names of a llama-like model's tensors: ours, Hugging Face's and GGUF's, as tables.

Ours are `embed`, `layers.{i}.q` with i counted over the whole model, `final_norm`,
`lm_head`. Says which of them a stage holds and what shape each has. Knows nothing
of files and imports no torch.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from orca_dist.errors import ModelError
from orca_dist.spec import ModelSpec

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

ATTENTION = ("q", "k", "v", "o")
MLP = ("gate", "up", "down")

_HF_MODULES: Mapping[str, str] = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "post_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_GGUF_MODULES: Mapping[str, str] = {
    "input_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "post_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_GGUF_TOP: Mapping[str, str] = {
    "token_embd.weight": EMBED,
    "output_norm.weight": FINAL_NORM,
    "output.weight": LM_HEAD,
}


def stage_tensors(spec: ModelSpec, layers: range, available: Container[str]) -> dict[str, str]:
    """Our name -> Hugging Face's, of every tensor that the stage of `layers` holds.

    `available` are the checkpoint's own names: a file that is tied and yet has a head
    keeps it, as transformers does. Raises ModelError where an untied one has no head.
    """
    tensors = {"embed": EMBED} if layers.start == 0 else {}
    for index in layers:
        tensors |= {f"layers.{index}.{name}": hf for name, hf in _layer(spec, index).items()}
    if layers.stop == spec.num_layers:
        tensors |= {"final_norm": FINAL_NORM, "lm_head": _head(spec, available)}
    return tensors


def model_tensors(spec: ModelSpec, available: Container[str]) -> dict[str, str]:
    """Our name -> Hugging Face's, of the whole model."""
    return stage_tensors(spec, range(spec.num_layers), available)


def tensor_shapes(spec: ModelSpec, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Hugging Face's name -> the shape it must have, for the tensors of `names`."""
    shapes = _local_shapes(spec)
    return {hf: shapes[ours.rsplit(".", 1)[-1]] for ours, hf in names.items()}


def gguf_tensors(num_layers: int) -> dict[str, str]:
    """GGUF name -> Hugging Face's, of every tensor that a llama may have, biases too."""
    tensors = dict(_GGUF_TOP)
    for index in range(num_layers):
        for name, module in _GGUF_MODULES.items():
            for kind in ("weight", "bias"):
                hf = f"model.layers.{index}.{_HF_MODULES[name]}.{kind}"
                tensors[f"blk.{index}.{module}.{kind}"] = hf
    return tensors


def _layer(spec: ModelSpec, index: int) -> dict[str, str]:
    prefix = f"model.layers.{index}."
    names = {name: f"{prefix}{module}.weight" for name, module in _HF_MODULES.items()}
    biased = (ATTENTION if spec.attention_bias else ()) + (MLP if spec.mlp_bias else ())
    return names | {f"{name}_bias": f"{prefix}{_HF_MODULES[name]}.bias" for name in biased}


def _head(spec: ModelSpec, available: Container[str]) -> str:
    if LM_HEAD in available:
        return LM_HEAD
    if spec.tie_word_embeddings:
        return EMBED
    raise ModelError(
        f"{LM_HEAD} is missing: config.json says tie_word_embeddings = false, so the "
        "checkpoint must hold it; set tie_word_embeddings = true if the head is the embedding"
    )


def _local_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Our name without its layer -> shape; matrices are [outputs, inputs]."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices = {
        "embed": (spec.vocab_size, hidden),
        "lm_head": (spec.vocab_size, hidden),
        "q": (q_size, hidden),
        "k": (kv_size, hidden),
        "v": (kv_size, hidden),
        "o": (hidden, q_size),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    norms = dict.fromkeys(("input_norm", "post_norm", "final_norm"), (hidden,))
    biases = {f"{name}_bias": matrices[name][:1] for name in ATTENTION + MLP}
    return {**matrices, **norms, **biases}
