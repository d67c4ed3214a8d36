"""A model as its cost sees it: how many weights each layer has, how large its KV is."""

from __future__ import annotations

from dataclasses import dataclass

from orca_dist.spec import ModelSpec, NormPlacement, QkNorm

GPT_VOCAB = 50257  # of GPT-2's and GPT-3's tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes in elements. A gated MLP has three matrices (Llama), a plain one two (GPT).

    `layer_vectors` and `final_vectors` are norms and biases, which take memory and no time that
    counts. `is_tied`: the head is the embedding, held once where a stage has both.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    gated: bool
    layer_vectors: int = 0
    final_vectors: int = 0
    is_tied: bool = False

    @property
    def layer_weights(self) -> int:
        """Matrices of a layer: queries, keys, values and output, then the MLP."""
        hidden, dim = self.hidden_size, self.head_dim
        attention = 2 * hidden * self.num_heads * dim + 2 * hidden * self.num_kv_heads * dim
        return attention + (3 if self.gated else 2) * hidden * self.intermediate_size

    @property
    def head_weights(self) -> int:
        """Of the LM head; the embedding has as many."""
        return self.hidden_size * self.vocab_size

    def stage_weights(self, num_layers: int, *, is_first: bool, is_last: bool) -> int:
        """All that a stage holds: layers, and at the pipeline's ends embedding and head."""
        layers = num_layers * (self.layer_weights + self.layer_vectors)
        num_ends = 1 if is_first and is_last and self.is_tied else is_first + is_last
        return layers + num_ends * self.head_weights + is_last * self.final_vectors

    @property
    def kv_elements(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim


def shape_of(spec: ModelSpec) -> ModelShape:
    """Every family that can be served has a gated MLP."""
    return ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        gated=True,
        layer_vectors=_layer_vectors(spec),
        final_vectors=spec.hidden_size,
        is_tied=spec.tie_word_embeddings,
    )


def _layer_vectors(spec: ModelSpec) -> int:
    """Norms of the hidden size, those of queries and keys, and biases."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qk_norms = {QkNorm.NONE: 0, QkNorm.HEAD: 2 * spec.head_dim, QkNorm.FULL: q_size + kv_size}
    outputs = {"q": q_size, "k": kv_size, "v": kv_size, "o": hidden}
    outputs |= {"gate": inner, "up": inner, "down": hidden}
    num_norms = 4 if spec.norms is NormPlacement.BOTH else 2
    return num_norms * hidden + qk_norms[spec.qk_norm] + sum(outputs[name] for name in spec.biases)


def gpt_shape(num_layers: int, hidden_size: int, *, head_dim: int = 128) -> ModelShape:
    """GPT-style: an MLP four times as wide, as many KV heads as heads."""
    num_heads = hidden_size // head_dim
    return ModelShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=4 * hidden_size,
        vocab_size=GPT_VOCAB,
        gated=False,
    )
