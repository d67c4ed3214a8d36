"""The names of a decoder's tensors: ours, Hugging Face's and GGUF's, as tables.

Ours are `embed`, `layers.{i}.q` with i counted over the whole model, `layers.{i}.experts.{n}.gate`
of its expert n, `final_norm`, `lm_head`. Says which of them a stage holds and what shape each has.
Knows nothing of files and imports no torch.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from orca_dist.errors import ModelError
from orca_dist.spec import ATTENTION, MLP, ModelSpec, NormPlacement, QkNorm

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

_HF_ATTENTION: Mapping[str, str] = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
}
_HF_MLP: Mapping[str, str] = {
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_HF_EXPERTS: Mapping[str, tuple[str, Mapping[str, str]]] = {  # of a family: where, and an MLP's
    "mixtral": ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
_HF_NORMS: Mapping[NormPlacement, Mapping[str, str]] = {
    NormPlacement.BEFORE: {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    },
    NormPlacement.AFTER: {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    NormPlacement.BOTH: {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}
_HF_QK_NORMS: Mapping[str, str] = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_GGUF_MODULES: Mapping[str, str] = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
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
    return {hf: shapes[_kind(ours)] for ours, hf in names.items()}


def gguf_tensors(num_layers: int) -> dict[str, str]:
    """GGUF name -> Hugging Face's, of every tensor that llama, qwen2 or qwen3 may have."""
    tensors = dict(_GGUF_TOP)
    modules = {**_HF_ATTENTION, **_HF_MLP, **_HF_NORMS[NormPlacement.BEFORE], **_HF_QK_NORMS}
    for index in range(num_layers):
        for name, module in _GGUF_MODULES.items():
            for kind in ("weight", "bias"):
                hf = f"model.layers.{index}.{modules[name]}.{kind}"
                tensors[f"blk.{index}.{module}.{kind}"] = hf
    return tensors


def _layer(spec: ModelSpec, index: int) -> dict[str, str]:
    prefix = f"model.layers.{index}."
    qk_norms = {} if spec.qk_norm is QkNorm.NONE else _HF_QK_NORMS
    modules = {**_HF_ATTENTION, **_mlp(spec, index), **_HF_NORMS[spec.norms], **qk_norms}
    weights = {name: f"{prefix}{module}.weight" for name, module in modules.items()}
    return weights | {f"{name}_bias": f"{prefix}{modules[name]}.bias" for name in spec.biases}


def _mlp(spec: ModelSpec, index: int) -> Mapping[str, str]:
    experts = spec.experts_of(index)
    if experts is None:
        return _HF_MLP
    block, mlp = _HF_EXPERTS[spec.model_type]
    return {"router": f"{block}.gate"} | {
        f"experts.{number}.{name}": f"{block}.experts.{number}.{module}"
        for number in range(experts.num_experts)
        for name, module in mlp.items()
    }


def _kind(name: str) -> str:
    """Ours, whatever the layer and the expert."""
    parts = name.removeprefix("layers.").split(".")
    return ".".join(part for part in parts if not part.isdigit())


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
    """Kind of tensor -> shape; matrices are [outputs, inputs]."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices = {
        "embed": (spec.vocab_size, hidden),
        "lm_head": (spec.vocab_size, hidden),
        "q": (q_size, hidden),
        "k": (kv_size, hidden),
        "v": (kv_size, hidden),
        "o": (hidden, q_size),
        **_mlp_shapes("", hidden, inner),
    }
    if spec.experts is not None:
        matrices["router"] = (spec.experts.num_experts, hidden)
        matrices |= _mlp_shapes("experts.", hidden, spec.experts.intermediate_size)
    norms = dict.fromkeys((*_HF_NORMS[NormPlacement.BOTH], "final_norm"), (hidden,))
    is_full = spec.qk_norm is QkNorm.FULL
    qk_norms = {
        "q_norm": (q_size if is_full else spec.head_dim,),
        "k_norm": (kv_size if is_full else spec.head_dim,),
    }
    biases = {f"{name}_bias": matrices[name][:1] for name in ATTENTION + MLP}
    return {**matrices, **norms, **qk_norms, **biases}


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    wide = (inner, hidden)
    return {f"{prefix}gate": wide, f"{prefix}up": wide, f"{prefix}down": wide[::-1]}
