"""A model as its cost sees it: how many weights each layer has, how large its KV is."""

from __future__ import annotations

from dataclasses import dataclass

from orca_dist.spec import Experts, ModelSpec, NormPlacement, QkNorm

GPT_VOCAB = 50257  # of GPT-2's and GPT-3's tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes in elements. A gated MLP has three matrices (Llama), a plain one two (GPT).

    `layer_vectors` and `final_vectors` are norms and biases, which take memory and no time that
    counts. `is_tied`: the head is the embedding, held once where a stage has both. `experts`: what
    some layers, or all, have in place of the MLP.
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
    experts: Experts | None = None

    @property
    def layer_weights(self) -> int:
        """Matrices of a layer that has an MLP: queries, keys, values and output, then that."""
        matrices = 3 if self.gated else 2
        return self._attention_weights + matrices * self.hidden_size * self.intermediate_size

    def mixture_weights(self, num_experts: float) -> float:
        """Of a layer that has experts, as if it had as many as this."""
        assert self.experts is not None, "some layers have experts"
        router = self.hidden_size * self.experts.num_experts
        each = 3 * self.hidden_size * self.experts.intermediate_size
        return self._attention_weights + router + num_experts * each

    def num_mixtures(self, layers: range) -> int:
        """How many of them have experts."""
        return sum(each in layers for each in self.experts.layers) if self.experts else 0

    def experts_read(self, rows: int) -> float:
        """Of a layer, that some row goes through, about: E (1 - (1 - K / E)^rows)."""
        assert self.experts is not None, "some layers have experts"
        total, chosen = self.experts.num_experts, self.experts.num_chosen
        return total * (1 - (1 - chosen / total) ** rows)

    @property
    def _attention_weights(self) -> int:
        hidden, dim = self.hidden_size, self.head_dim
        return 2 * hidden * self.num_heads * dim + 2 * hidden * self.num_kv_heads * dim

    @property
    def head_weights(self) -> int:
        """Of the LM head; the embedding has as many."""
        return self.hidden_size * self.vocab_size

    def stage_weights(self, layers: range) -> int:
        """All that the stage of `layers` holds: at the pipeline's ends embedding and head, too."""
        is_first, is_last = layers.start == 0, layers.stop == self.num_layers
        num_ends = 1 if is_first and is_last and self.is_tied else is_first + is_last
        ends = num_ends * self.head_weights + is_last * self.final_vectors
        return self._held_weights(layers) + len(layers) * self.layer_vectors + ends

    def _held_weights(self, layers: range) -> int:
        """Their matrices, those of all experts among them."""
        num_mixtures = self.num_mixtures(layers)
        plain = (len(layers) - num_mixtures) * self.layer_weights
        if self.experts is None:
            return plain
        return plain + num_mixtures * int(self.mixture_weights(self.experts.num_experts))

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
        experts=spec.experts,
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
