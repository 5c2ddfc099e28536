"""Parameters, FLOPs and kept activations of the layers and the head of a decoder. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar

from megatron.config.decoder import ALIBI, ROPE, has_window
from megatron.config.experts import expert_layers
from megatron.costs import memory
from megatron.costs.cost import OPERATIONS, Costs, Kept, Product, Shared, Work, scores
from megatron.costs.dimensions import Features, ModelDimensions, known_vocab_size
from megatron.costs.expert_cost import ExpertCosts
from megatron.costs.memory import BYTES, Memory, loss_bytes
from tds.partition import partition_balanced, partition_uniform_chunks
from tds.schedule import LOOP

# The parts of which layers of every model are made: their parameters, products and kept activations.
#
# | part | parameters in products | FLOPs of a token, forward |
# |---|---|---|
# | attention | 4 h a d: queries, keys, values, output | 8 h a d, and 4 s a d for scores and their sums |
# | feed-forward | 2 h f; gated 3 h f | 4 h f; gated 6 h f |
# | head | h v | 2 h v |

ELEMENTWISE = 64
"""Cost of passing over one number (norm, softmax) in FLOPs of a matrix product. With it a head counts 2.77 layers where
212 ms beside 75 ms were measured, 2.83 layers (h 256, v 8192, s 256, two CPU cores)."""
KEPT = 2**24
"""Probabilities that T5's blocked attention keeps for backward at most: ``megatron.ops.biased_attention.KEPT``."""
GATHERED_COPIES = 4
"""Of the keys and values of whole sequences, in a backward of context parallelism: these, the gradients of two runs of
queries, and their sum by rank."""


def between_bytes(hidden: int, masks: int, sequence: int, *, is_joined: bool = False) -> int:
    """Return the bytes that layers keep between the products, where ``sequence`` ranks share the tokens.

    Args:
        hidden: bytes of the hidden states that norms read, and as many that products do.
        masks: bytes of the masks of dropout.
        is_joined: the inputs of the products are whole.
    """
    return hidden + (hidden + masks) // sequence if is_joined else (2 * hidden + masks) // sequence


def attention_width(sizes: ModelDimensions) -> int:
    """Return a d: the size of all heads together."""
    return sizes.num_attention_heads * sizes.kv_hidden_size


def attention_parameters(
    sizes: ModelDimensions, tensor: int = 1, keys: int | None = None, has_entering_bias: bool = False
) -> int:
    """Return the parameters of one attention on one of ``tensor`` ranks; the output's bias is whole.

    Args:
        keys: size of all keys together, and of all values; None: as that of the queries.
        has_entering_bias: the products that make queries, keys and values have biases in any case.
    """
    h, width = sizes.hidden_size, attention_width(sizes)
    keys = width if keys is None else keys
    cut = 2 * h * (width + keys) + (width + 2 * keys if sizes.hidden_bias or has_entering_bias else 0)
    return cut // tensor + (h if sizes.hidden_bias else 0)


def feed_forward_parameters(sizes: ModelDimensions, tensor: int = 1) -> int:
    """Return the parameters of one feed-forward layer on one of ``tensor`` ranks; the output's bias is whole."""
    h, f, matrices = sizes.hidden_size, sizes.ff_hidden_size, _matrices(sizes)
    cut = matrices * h * f + ((matrices - 1) * f if sizes.hidden_bias else 0)
    return cut // tensor + (h if sizes.hidden_bias else 0)


def table_parameters(sizes: ModelDimensions, tensor: int = 1) -> int:
    """Return the rows of the word table on one rank times h: the input embedding, and an untied head alike."""
    return -(-known_vocab_size(sizes) // tensor) * sizes.hidden_size


def projections_flops(sizes: ModelDimensions, keys: int | None = None) -> int:
    """Return the FLOPs of one token in the four products of an attention: 8 h a d; ``keys`` as above."""
    width = attention_width(sizes)
    return 4 * sizes.hidden_size * (width + (width if keys is None else keys))


def feed_forward_flops(sizes: ModelDimensions) -> int:
    """Return the FLOPs of one token in a feed-forward layer: 4 h f, gated 6 h f."""
    return 2 * _matrices(sizes) * sizes.hidden_size * sizes.ff_hidden_size


def layer_products(sizes: ModelDimensions, tokens: int, tensor: int, keys: int | None = None) -> tuple[Product, ...]:
    """Return the products with weights of a layer on one of ``tensor`` ranks: attention and feed-forward."""
    return (*attention_products(sizes, tokens, tensor, keys), *feed_forward_products(sizes, tokens, tensor))


def attention_products(
    sizes: ModelDimensions, tokens: int, tensor: int, keys: int | None = None
) -> tuple[Product, ...]:
    """Return the products of queries, keys and values, and of the output."""
    h, width = sizes.hidden_size, attention_width(sizes)
    keys = width if keys is None else keys
    return Product(tokens, h, (width + 2 * keys) // tensor, is_column=True), Product(tokens, width // tensor, h)


def feed_forward_products(sizes: ModelDimensions, tokens: int, tensor: int) -> tuple[Product, ...]:
    """Return the two products of a feed-forward layer; a gated one makes gate and value in one."""
    h, f = sizes.hidden_size, sizes.ff_hidden_size
    entering = Product(tokens, h, (_matrices(sizes) - 1) * f // tensor, is_column=True)
    return entering, Product(tokens, f // tensor, h)


def head_cost(sizes: ModelDimensions) -> int:
    """Return the cost of one token in the head and its softmax, in FLOPs of a matrix product."""
    return (2 * sizes.hidden_size + ELEMENTWISE) * known_vocab_size(sizes)


def feed_forward_kept(sizes: ModelDimensions) -> int:
    """Return how many numbers between its two products a feed-forward layer keeps for a token.

    2 f: before and after the activation. ReLU keeps its result alone; a gated layer gate, value, activation, product.
    """
    return sizes.ff_hidden_size * _kept_of_width(sizes)


def _kept_of_width(sizes: ModelDimensions) -> int:
    return 4 if _is_gated(sizes) else 1 if sizes.activation == "relu" else 2


def seen(length: int, window: int = 0) -> float:
    """Return how many keys a query sees on average, the causal half of ``length``; ``window``: of so many behind it."""
    keys = min(window + 1, length) if window else length
    return keys - keys**2 / (2 * length)


_expert_layers = lru_cache(expert_layers)


def _matrices(sizes: ModelDimensions) -> int:
    return 3 if _is_gated(sizes) else 2


def _is_gated(sizes: ModelDimensions) -> bool:
    return sizes.activation.startswith("gated-")


# What a decoder costs. Its units: embedding, L layers, final norm, head.
#
# | count | formula | |
# |---|---|---|
# | N | parameters in matrix products: without input embeddings, with the head | a tied head counts |
# | FLOPs per token, causal half counted | 6 N + 6 L a d s | the convention of our MFU |
# | FLOPs per token, full attention matrix | 12 L a d s in place of 6 | the convention of many papers |
# | ... of a layer with a window of N tokens | w (2 - w / s) in place of s, w = N + 1 | what lies within counts |
#
# | feature | parameters of a layer | bytes of a token, or of a stage |
# |---|---|---|
# | g groups of a queries | 2 h (a + g) d in attention | (2 a + 2 g) d numbers |
# | rotary positions, and norms of queries and keys | ; 2 d, over all heads (a + g) d | (a + g) d numbers more each |
# | norms before, after, both | 2, 2, 4 norms | as many inputs of norms |
# | ALiBi's biases, within documents | | w a / t s^2 of a stage, w b a / t s^2 of a micro-batch |
# | a window without ALiBi | | s^2 of a stage |
#
# Turning queries and keys by their positions and capping scores are not counted.
#
# Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 5.1.


@dataclass(frozen=True)
class DecoderCosts(Costs):
    """The costs of a decoder of ``sizes`` on samples of ``seq_length`` tokens.

    Args:
        is_causal: a token sees those before it alone.
        is_fused: attention is one kernel, which keeps no number for each query and key and skips what is masked.
        is_blocked: attention in 32 bits and more goes block by block, as on a CPU.
        mask_bytes: of an element of a mask of hidden dropout; 0: nothing is dropped.
        has_segments: documents are kept apart.
        is_by_length: what a query sees goes by where its document begins, with no mask in memory.
        context: ranks over which sequences are cut; ``cuts_heads``: attention exchanges heads and not keys.
        expert: ranks that share out the experts of a layer; ``cuts_experts``: over the tensor ranks, too.
    """

    is_causal: ClassVar[bool] = True
    sizes: Features
    seq_length: int
    is_fused: bool = field(default=True, kw_only=True)
    is_on_cpu: bool = field(default=False, kw_only=True, compare=False)
    is_blocked: bool = field(default=False, kw_only=True)
    mask_bytes: int = field(default=1, kw_only=True)
    has_segments: bool = field(default=False, kw_only=True)
    is_by_length: bool = field(default=False, kw_only=True)
    context: int = field(default=1, kw_only=True)
    cuts_heads: bool = field(default=False, kw_only=True)
    expert: int = field(default=1, kw_only=True)
    cuts_experts: bool = field(default=True, kw_only=True)

    @property
    def num_parameters(self) -> int:
        return self.stage_parameters([0, self.num_units])[0] if self.expert == 1 else self.shared_out(1).num_parameters

    @property
    def num_active_parameters(self) -> int:
        whole = self.shared_out(1)
        held, active = (
            sum(whole.layer_parameters(layer=layer, is_active=some) for layer in range(self.sizes.num_layers))
            for some in (False, True)
        )
        return whole.num_parameters - held + active

    @property
    def expert_ranks(self) -> int:
        return self.expert

    def shared_out(self, ranks: int) -> DecoderCosts:
        return self if ranks == self.expert else replace(self, expert=ranks)

    @property
    def with_experts(self) -> tuple[bool, ...]:
        """Which layers have experts."""
        sizes = self.sizes
        return (
            _expert_layers(sizes.moe_layer_freq, sizes.num_layers) if sizes.num_experts else (False,) * sizes.num_layers
        )

    @property
    def experts(self) -> ExpertCosts:
        """The costs of a half with experts."""
        sizes = self.sizes
        return ExpertCosts(sizes, _matrices(sizes), _kept_of_width(sizes), self.expert, self.cuts_experts)

    @property
    def own_length(self) -> int:
        """Tokens of a sample that a rank has."""
        return self.seq_length // self.context

    @property
    def keys(self) -> int:
        """Size of all keys of a layer together, and of all values."""
        return self.sizes.num_query_groups * self.sizes.kv_hidden_size

    @property
    def attention_kept(self) -> int:
        """Numbers of a token that attention keeps of queries, keys, values and its output.

        Queries and keys count once more for what they were before they were turned, and before their norms. Context
        parallelism leaves nothing of what they were; an all-to-all keeps the output twice.
        """
        both = attention_width(self.sizes) + self.keys
        if self.context > 1:
            twice = attention_width(self.sizes) if self.cuts_heads else 0
            return both * (2 + (self.sizes.qk_norm != "none")) + twice
        return both * (2 + (self.sizes.position_embedding_type == ROPE) + (self.sizes.qk_norm != "none"))

    @property
    def norm_vectors(self) -> int:
        """Vectors of a norm: what it scales by and what it shifts by."""
        return 2 if self.sizes.normalization == "LayerNorm" and self.sizes.norm_bias else 1

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.norm_vectors * self.sizes.hidden_size

    @property
    def num_norms(self) -> int:
        """Norms of a layer, those of queries and keys aside."""
        return 4 if self.sizes.norm_placement == "both" else 2

    @property
    def seen_by_layer(self) -> list[float]:
        """Keys that a query sees on average, of each layer, by what lies within its window."""
        sizes = self.sizes
        windows = [sizes.window_size if has_window(sizes, layer) else 0 for layer in range(sizes.num_layers)]
        return [seen(self.seq_length, window) for window in windows]

    @property
    def unit_names(self) -> list[str]:
        layers = [f"layer {number}" for number in range(self.sizes.num_layers)]
        return ["embedding", *layers, "final norm", "head"]

    @property
    def unit_costs(self) -> list[float]:
        sizes, h = self.sizes, self.sizes.hidden_size
        attention = projections_flops(sizes, self.keys)
        products = [attention + self._feed_forward_flops(layer) for layer in range(sizes.num_layers)]
        each = zip(products, self.seen_by_layer, strict=True)
        layers = [own + 4 * keys * attention_width(sizes) for own, keys in each]
        layer = max(layers, default=attention + feed_forward_flops(sizes))
        norm, head = ELEMENTWISE * h / layer, head_cost(sizes) / layer
        return [norm, *[each / layer for each in layers], norm, head]

    @property
    def flops_per_sample(self) -> float:
        return self.seq_length * self.flops_per_token()

    def flops_per_token(self, *, causal: bool = True) -> float:
        """Return the FLOPs of forward and backward for one token; ``causal`` counts half of the attention matrix."""
        sizes = self.sizes
        head = known_vocab_size(sizes) * sizes.hidden_size
        layers = sum(self.layer_parameters(layer=layer, is_active=True) for layer in range(sizes.num_layers))
        products = layers + self.norm_parameters + head
        scores = attention_width(sizes) * 2 * sum(self.seen_by_layer)
        return 6.0 * products + (6.0 if causal else 12.0) * scores

    def layer_parameters(self, tensor: int = 1, layer: int = 0, *, is_active: bool = False) -> int:
        """Return the parameters of one layer on one of ``tensor`` ranks; norms and output biases are whole.

        Args:
            is_active: of experts only those that a token goes through.
        """
        inner = attention_parameters(self.sizes, tensor, self.keys, self.sizes.add_qkv_bias)
        norms = self.num_norms * self.norm_parameters + self._head_norm_parameters(tensor)
        if self.with_experts[layer]:
            return inner + self.experts.parameters(tensor, is_active=is_active) + norms
        return inner + feed_forward_parameters(self.sizes, tensor) + norms

    def _feed_forward_flops(self, layer: int) -> int:
        return self.experts.flops if self.with_experts[layer] else feed_forward_flops(self.sizes)

    def _head_norm_parameters(self, tensor: int) -> int:
        """Return the parameters of the norms of queries and keys: whole of a head, cut of all heads."""
        kind, d = self.sizes.qk_norm, self.sizes.kv_hidden_size
        sizes = {"none": 0, "head": 2 * d, "all": (attention_width(self.sizes) + self.keys) // tensor}
        return self.norm_vectors * sizes[kind]

    def unit_parameters(self, tensor: int = 1) -> list[int]:
        sizes = self.sizes
        table = table_parameters(sizes, tensor) if sizes.untie_embeddings else 0
        positions = sizes.max_position_embeddings * sizes.hidden_size if sizes.has_learned_positions else 0
        norm = self.norm_parameters if sizes.embed_layernorm else 0
        kinds = dict(zip(self.with_experts, range(sizes.num_layers), strict=True))  # layers of a kind are alike
        each = {has: self.layer_parameters(tensor, layer) for has, layer in kinds.items()}
        layers = [each[has] for has in self.with_experts]
        return [table + positions + norm, *layers, self.norm_parameters, table]

    def apart_parameters(self, tensor: int = 1) -> list[int]:
        own = self.experts.apart(tensor) if self.sizes.num_experts else 0
        return [0, *[own * has for has in self.with_experts], 0, 0]

    def shared_parameters(self, tensor: int = 1) -> list[Shared]:
        if self.sizes.untie_embeddings:
            return []
        return [Shared(table_parameters(self.sizes, tensor), (0, self.num_units - 1))]

    def unit_kept(
        self, samples: int, tensor: int, width: int, sequence: int = 1, *, is_joined: bool = False
    ) -> list[Kept]:
        """34 h bytes of a token in 16 bits when f = 4 h, a d = h and t = 1; the head reads all tokens."""
        sizes, h = self.sizes, self.sizes.hidden_size
        whole = between_bytes(2 * h * width, 2 * h * self.mask_bytes, sequence, is_joined=is_joined)
        whole += (self.num_norms - 2) * h * width // sequence
        tokens, core = samples * self.own_length, self._core_kept(samples, tensor, width)
        attention = tokens * (whole + self.attention_kept * width // tensor) + core
        half = {False: tokens * feed_forward_kept(sizes) * width // tensor}
        if sizes.num_experts:
            half[True] = self.experts.kept(tokens, tensor, width, sequence, is_joined=is_joined)
        layers = [Kept(attention + half[has], tokens * h * width // sequence, core) for has in self.with_experts]
        hidden = tokens * h * width
        embedding = Kept(tokens * h * (self.mask_bytes + (width if sizes.embed_layernorm else 0)) // sequence)
        return [embedding, *layers, Kept(hidden // sequence), Kept(hidden)]

    def attention_work(
        self, samples: int, tensor: int, width: int, sequence: int = 1, *, is_joined: bool = False
    ) -> int:
        """As ``Costs`` says, with one thread: scratch memory, and gradients of layer, context, query, key and value.

        Experts of the last layer let go of more ahead of it, and may work in more themselves.
        """
        tokens = samples * self.own_length
        half = tokens * (feed_forward_kept(self.sizes) * width // tensor)
        if not self.sizes.num_experts:
            return self._attention_work(samples, tensor, width, sequence, half, is_joined=is_joined)
        if self.with_experts[-1]:
            half = self.experts.kept(tokens, tensor, width, sequence, is_joined=is_joined)
        own = self._attention_work(samples, tensor, width, sequence, half, is_joined=is_joined)
        return max(own, self.experts.work(tokens, tensor, width, sequence))

    def _attention_work(
        self, samples: int, tensor: int, width: int, sequence: int, half: int, *, is_joined: bool
    ) -> int:
        """Return what a backward of attention works in; ``half``: bytes that the feed-forward half has let go."""
        if self.context > 1:
            gathered = 0 if self.cuts_heads else sum(self.context_messages(samples, tensor, width))
            return max(GATHERED_COPIES * gathered - half, 0)
        if not self.is_blocked or width < 4:
            return 0
        sizes, h = self.sizes, self.sizes.hidden_size
        heads = samples * sizes.num_attention_heads // tensor
        rooms = memory.backward_bytes(heads, self.seq_length, sizes.kv_hidden_size, width)
        gradients = (h // sequence + 4 * attention_width(sizes) // tensor) * width
        gone = between_bytes(h * width, h * self.mask_bytes, sequence, is_joined=is_joined)
        return max(rooms + samples * self.seq_length * (gradients - gone) - half, 0)

    def context_messages(self, samples: int, tensor: int, width: int) -> tuple[int, ...]:
        """As ``Costs`` says: gathered keys and values, or queries, keys, values and the context of all ranks."""
        numbers = 2 * attention_width(self.sizes) + 2 * self.keys if self.cuts_heads else 2 * self.keys
        return (samples * self.seq_length * numbers // tensor * width,) if self.context > 1 else ()

    def expert_messages(self, samples: int, tensor: int, width: int) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = [()] * self.num_units
        if self.expert > 1:
            each = self.experts.messages(samples * self.own_length, tensor, width)
            found[1:-2] = [each if has else () for has in self.with_experts]
        return found

    def unit_work(self, samples: int, tensor: int, width: int) -> list[Work]:
        sizes, h = self.sizes, self.sizes.hidden_size
        tokens = samples * self.own_length
        vocabulary = -(-known_vocab_size(sizes) // tensor)
        hidden, of_token = tokens * h * width, 4 * tokens
        dense = Work(
            products=layer_products(sizes, tokens, tensor, self.keys),
            core=self._scores(samples, tensor),
            operations=OPERATIONS["layer"],
            sums=(hidden, hidden),
            back=(hidden, hidden),
        )
        layers = [dense] * sizes.num_layers
        if sizes.num_experts:
            own = attention_products(sizes, tokens, tensor, self.keys)
            number = 1 + self.experts.num_sums  # attention has one
            mixed = replace(
                dense,
                products=(*own, *self.experts.products(tokens, tensor)),
                operations=OPERATIONS["layer"] + OPERATIONS["experts"],
                sums=(hidden,) * number,
                back=(hidden,) * number,
            )
            layers = [mixed if has else dense for has in self.with_experts]
        return [
            Work(operations=OPERATIONS["embedding"], sums=(hidden,)),
            *layers,
            Work(operations=OPERATIONS["norm"]),
            Work(
                products=(Product(tokens, h, vocabulary),),
                operations=OPERATIONS["head"],
                sums=(of_token,) * 3,  # largest logit, that of the label, the sum
                back=(hidden,),
            ),
        ]

    def _scores(self, samples: int, tensor: int) -> tuple[Product, ...]:
        """Return the products of all heads of a rank; a fused kernel makes half of a causal matrix."""
        number = samples * self.sizes.num_attention_heads / tensor
        half = 0.5 if self.is_causal and self.is_fused else 1.0
        return scores(self.own_length, self.seq_length, self.sizes.kv_hidden_size, number * half)

    def _core_kept(self, samples: int, tensor: int, width: int) -> int:
        """Return the bytes of probabilities, before and after dropout, and of its mask: 5 a s / h of s b h.

        Fused attention has none. In fp32 on a CPU it keeps two numbers of each query.
        """
        queries = samples * self.sizes.num_attention_heads // tensor * self.own_length
        if self.is_fused:
            return 2 * width * queries if self.is_blocked and width == 4 else 0
        return queries * self.seq_length * (2 * width + 1)

    def shared_kept(self, samples: int, tensor: int, width: int) -> list[Shared]:
        if not self.has_segments or self.is_by_length or self.sizes.position_embedding_type != ALIBI:
            return []
        layers = tuple(range(1, 1 + self.sizes.num_layers))
        return [Shared(samples * self._mask_bytes(tensor, width), layers)]

    def memory_per_stage(self, bounds: Sequence[int], **how: Any) -> list[Memory]:
        """As ``Costs`` says, with the masks that a stage keeps for every micro-batch."""
        mask = self._mask_bytes(how.get("tensor", 1), BYTES[how.get("dtype", "fp32")])
        found = super().memory_per_stage(bounds, **how)
        return [replace(memory, activations=memory.activations + mask) for memory in found] if mask else found

    def _mask_bytes(self, tensor: int, width: int) -> int:
        """Return the bytes of ALiBi's biases, or of a window."""
        if self.is_by_length:
            return 0
        square = self.own_length * self.seq_length
        if self.sizes.position_embedding_type == ALIBI:
            return width * self.sizes.num_attention_heads // tensor * square
        return square if 0 < self.sizes.window_size < self.seq_length - 1 else 0

    def logit_bytes(self, samples: int, tensor: int, width: int) -> int:
        return samples * self.own_length * -(-known_vocab_size(self.sizes) // tensor) * (width + 4)

    def loss_bytes(self, samples: int, tensor: int, width: int, *, forwards: int = 1) -> int:
        tokens = samples * self.own_length
        has_cap = self.sizes.final_logit_softcapping > 0
        return loss_bytes(
            self.sizes, tokens, tensor, width, forwards=forwards, is_on_cpu=self.is_on_cpu, has_cap=has_cap
        )

    def stage_bounds(self, stages: int, chunks: int = 1, placement: str = LOOP) -> list[int]:
        """As ``Costs`` says; with several chunks by the rule of ``tds.partition.partition_uniform_chunks``."""
        costs, number = self.unit_costs, self.sizes.num_layers
        if stages == 1:
            return [0, len(costs)]
        first, last = costs[0], costs[-2] + costs[-1]
        if chunks > 1:
            counts = partition_uniform_chunks(number, stages, chunks, first, last, placement)
            return [0, *[1 + bound for bound in accumulate(counts[:-1])], len(costs)]
        layers = costs[1:-2]
        layers[:1] = [cost + first for cost in layers[:1]]
        layers[-1:] = [cost + last for cost in layers[-1:]]
        inner = partition_balanced(layers, stages)[1:-1]
        return [0, *[bound + 1 for bound in inner], len(costs)]


def dropout_costs(config: Any, is_on_cpu: bool) -> dict[str, Any]:
    """Return what dropout makes of attention and of the masks.

    Attention that drops keeps its probabilities on a CPU, and where masks do not depend on the layout. A CPU keeps
    masks as numbers that it multiplies by.
    """
    model, dtype = config.model, config.precision.dtype or "fp32"
    return {
        "is_fused": not (model.attention_dropout and (is_on_cpu or model.layout_independent_dropout)),
        "mask_bytes": 0 if not model.hidden_dropout else BYTES.get(dtype, 4) if is_on_cpu else 1,
    }


SHORTEST_BY_LENGTH = 512
"""``2 * megatron.ops.document_attention.SHORT``."""
HEADS_IN_BLOCKS = (16, 256)
"""``LEAST`` and ``MOST`` of ``megatron.ops.flex_attention``."""


def mask_reason(config: Any, kind: str, *, is_causal: bool = True) -> str | None:
    """Return why documents are kept apart by a mask on a device of ``kind``; None: by where each begins.

    CUDA is taken to have Triton, and FlashAttention for 16 bits.
    """
    model, dtype = config.model, config.precision.dtype or "fp32"
    if model.attention_dropout:
        return f"--attention-dropout {model.attention_dropout:g} needs it, 0 does not"
    if kind == "cpu":
        return None
    if kind != "cuda":
        return f"{kind} has no attention by lengths"
    has_more = not is_causal or model.position_embedding_type == ALIBI or model.attn_logit_softcapping > 0
    is_long = config.batch.seq_length > SHORTEST_BY_LENGTH
    if is_long and not has_more and dtype in ("bf16", "fp16") and model.kv_hidden_size % 8 == 0:
        return None
    if dtype == "fp64":
        return "kernels on CUDA take fp32 and 16 bits"
    least, most = HEADS_IN_BLOCKS
    if not least <= model.kv_hidden_size <= most:
        return f"flex_attention takes heads of {least} to {most}, got {model.kv_hidden_size}"
    return None


def context_costs(config: Any) -> dict[str, Any]:
    """Return how the sequences and the experts of ``config`` are cut over ranks."""
    parallel = config.parallel
    expert = parallel.expert_model_parallel_size if config.model.num_experts else 1
    return {
        "context": parallel.context_parallel_size,
        "cuts_heads": parallel.cp_comm_type == "a2a",
        "expert": expert,
        "cuts_experts": parallel.cuts_experts,
    }


def costs(config: Any, is_on_cpu: bool = False) -> Costs:
    """Return the costs of the decoder of ``config``, a ``Config``; what it keeps depends on where it is trained."""
    model, has_segments = config.model, config.data.keeps_documents_apart
    is_plain = model.has_plain_attention and not model.attention_dropout
    cut = context_costs(config)
    needs_starts = has_segments or cut["context"] > 1
    return DecoderCosts(
        model,
        config.batch.seq_length,
        is_on_cpu=is_on_cpu,
        is_blocked=is_on_cpu and is_plain and cut["context"] == 1,
        has_segments=has_segments,
        is_by_length=needs_starts and mask_reason(config, "cpu" if is_on_cpu else "cuda") is None,
        **cut,
        **dropout_costs(config, is_on_cpu),
    )
