"""The base of every decoder-only language model: embedding, blocks, and a head (final norm and output matrix).

B sequences of L positions, of which this rank has l; D model width, V vocabulary, P pairs of rotary channels.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from spurline.comm.sequence import HeadTailShard
from spurline.models.common.block import DecoderBlock
from spurline.models.common.cache import KVCache
from spurline.models.common.context import BlockContext
from spurline.models.common.decoder_config import DecoderConfig
from spurline.models.common.init import residual_std
from spurline.models.common.linear import Embedding, OutputMatrix
from spurline.models.common.loss import LossSum, chunked_loss_sum
from spurline.models.common.mask import attention_mask
from spurline.models.common.norm import RMSNorm
from spurline.models.common.rope import Rope, rope_tables
from spurline.models.common.stage import cut_stage
from spurline.parallel.context import ContextParallel, own
from spurline.parallel.tensor import TensorParallel

D = TypeVar("D", bound="Decoder")


class Decoder(nn.Module):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size) in `compute_dtype`.

    A family overrides `make_attention(layer)`. Under tensor parallelism, a rank holds a shard of the positions between
    blocks, and of the vocabulary in the logits. Under context parallelism, its tp group holds a shard of the positions
    from the embedding to the loss; logits cover all positions.

    `stage(first, end)` is one pipeline stage of the model: some layers, plus the embedding on the first stage and the
    head on the last. Modules that a stage does not have are None.
    """

    takes_kv_cache = True
    embedding: Embedding | None
    norm: RMSNorm | None
    output: OutputMatrix | None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        self.output_std = residual_std(config.num_layers)
        self.embedding = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict(
            {str(layer): DecoderBlock(config, layer, self.make_attention(layer)) for layer in range(config.num_layers)}
        )
        self.norm = RMSNorm(config.dim, config.norm_eps)
        # Tied: the embedding is also the output matrix, one parameter in one place, even when it is split or sharded.
        self.output = None if config.tied_embeddings else OutputMatrix(config.dim, config.vocab_size)
        self.is_first_stage = self.is_last_stage = True
        self.tp = TensorParallel()
        self.cp = ContextParallel()

    @property
    def tensor_parallel_dims(self) -> dict[str, int]:
        return {} if self.output is None else {"output.weight": 0}

    def make_attention(self, layer: int) -> nn.Module:
        """The attention of block number `layer`, called as attention(x_BLD, context) -> (B, L, D).

        It may read `self.config`, and `self.output_std`, the standard deviation of initial weights that write into the
        residual stream. Attributes that a subclass sets in its own constructor do not exist yet.
        """
        raise NotImplementedError

    def forward(
        self,
        tokens_BL: Tensor,
        cache: KVCache | None = None,
        labels_BL: Tensor | None = None,
        loss_sum: LossSum | None = None,
        hidden_BlD: Tensor | None = None,
        **extras: Any,
    ) -> Tensor:
        """Logits; with labels, loss_sum(logits, labels) instead, without holding the logits of all positions.

        With a KV cache, tokens continue those of the previous call, and only the last position's logits are returned:
        (B, 1, V). Extras are further arguments of the family's `block_context`.

        A pipeline stage takes the same arguments and, from the second stage on, the hidden states (B, l, D) that the
        previous stage returned; all stages but the last return hidden states.
        """
        x_BlD = self.hidden_states(tokens_BL, cache, hidden_BlD, **extras)
        if not self.is_last_stage:
            return x_BlD
        if labels_BL is not None and loss_sum is not None:
            hidden_BLD = self.final_norm(x_BlD, self.num_own_positions(tokens_BL))
            return self.loss(hidden_BLD, tokens_BL, labels_BL, loss_sum, **extras)
        hidden_BLD = self.all_final_norm(x_BlD, tokens_BL, cache)
        return self.logits(hidden_BLD if cache is None else hidden_BLD[:, -1:])

    def last_hidden_state(self, tokens_BL: Tensor, cache: KVCache | None = None, **extras: Any) -> Tensor:
        """The hidden states after the final norm, for all positions: (B, L) -> (B, L, D)."""
        return self.all_final_norm(self.hidden_states(tokens_BL, cache, **extras), tokens_BL, cache)

    def all_final_norm(self, x_BlD: Tensor, tokens_BL: Tensor, cache: KVCache | None) -> Tensor:
        """The hidden states of full sequences after the final norm, on every rank: (B, l, D) -> (B, L, D)."""
        shard = self.shard_of(tokens_BL, cache)
        return self.cp.all_gather_positions(self.final_norm(x_BlD, self.num_own_positions(tokens_BL, cache)), shard)

    def shard_of(self, tokens_BL: Tensor, cache: KVCache | None = None) -> HeadTailShard | None:
        """Which positions are this rank's under context parallelism; None: all of them, as with a KV cache."""
        return self.cp.shard(tokens_BL.shape[1]) if cache is None else None

    def num_own_positions(self, tokens_BL: Tensor, cache: KVCache | None = None) -> int:
        """How many positions of the sequences this rank's tp group holds."""
        shard = self.shard_of(tokens_BL, cache)
        return tokens_BL.shape[1] if shard is None else shard.num_real

    def hidden_states(
        self, tokens_BL: Tensor, cache: KVCache | None = None, hidden_BlD: Tensor | None = None, **extras: Any
    ) -> Tensor:
        """The hidden states after the last block, for this rank's positions: (B, L) -> (B, l, D).

        From the second pipeline stage on, hidden_BlD is the output of the previous stage's last block.
        """
        if (hidden_BlD is None) != self.is_first_stage:
            this = "this is the first" if self.is_first_stage else "this is another one"
            raise ValueError(
                f"{type(self).__name__}: hidden_BlD must be given to every pipeline stage but the first; {this}"
            )
        x_BlD = self.embed(own(tokens_BL, self.shard_of(tokens_BL, cache))) if hidden_BlD is None else hidden_BlD
        return self.run_blocks(x_BlD, self.block_context(tokens_BL, cache, **extras), cache)

    def embed(self, tokens_BL: Tensor) -> Tensor:
        """(B, L) -> (B, l, D), in `compute_dtype`: every module follows the dtype of its input."""
        assert self.embedding is not None, "this pipeline stage has no embedding"
        return self.embedding(tokens_BL).to(self.compute_dtype)

    def block_context(
        self,
        tokens_BL: Tensor,
        cache: KVCache | None = None,
        documents_BL: Tensor | None = None,
        shard: HeadTailShard | None = None,
    ) -> BlockContext:
        """What all blocks need besides activations; with document ids, each position attends to its own document only.

        It depends only on the shape of the tokens, not on their values. A cache advances by L positions. `shard`
        overrides which positions this rank holds (default: `shard_of`).
        """
        length, device = tokens_BL.shape[1], tokens_BL.device
        shard = shard or self.shard_of(tokens_BL, cache)
        mask = attention_mask(documents_BL, shard if self.cp.attends_from_own_positions else None, tokens_BL)
        if shard is not None:
            return BlockContext(self.rope(shard.positions(device)), shard.num_real, mask, shard)
        positions_L = torch.arange(length, device=device) if cache is None else cache.advance(length, device)
        return BlockContext(self.rope(positions_L), length, mask)

    def rope(self, positions_L: Tensor) -> Rope:
        """Cosine and sine of the rotary angles: (L,) or (B, L) -> two of (.., L, P)."""
        config = self.config
        return rope_tables(positions_L, config.rope_dim, config.rope_theta, config.yarn, config.llama3_rope)

    def run_blocks(self, x_BlD: Tensor, context: BlockContext, cache: KVCache | None = None) -> Tensor:
        """All blocks, one after another: (B, l, D) -> (B, l, D)."""
        for layer, block in self.layers.items():
            x_BlD = block(x_BlD, context.with_cache(None if cache is None else cache.layers[int(layer)]))
        return x_BlD

    def final_norm(self, x_BlD: Tensor, length: int) -> Tensor:
        """The first half of the head: (B, l, D) -> (B, L, D)."""
        assert self.norm is not None, "this pipeline stage has no head"
        return self.tp.all_gather_sequence(self.norm(x_BlD), length)

    def logits(self, hidden_BLD: Tensor) -> Tensor:
        """The second half of the head (`lm_head` elsewhere): (B, L, D) -> (B, L, V)."""
        if self.output is not None:
            return self.output(hidden_BLD)
        assert self.embedding is not None, "this pipeline stage has no head"
        return self.embedding.logits(hidden_BLD)

    def loss(
        self, hidden_BLD: Tensor, tokens_BL: Tensor, labels_BL: Tensor, loss_sum: LossSum, **extras: Any
    ) -> Tensor:
        """The summed loss of hidden states after the final norm; a family may add terms of its own.

        Under context parallelism, hidden states and loss cover only this rank's positions; tokens and labels are full
        sequences.
        """
        (loss,) = self.loss_sums([hidden_BLD], [own(labels_BL, self.shard_of(tokens_BL))], loss_sum)
        return loss

    def loss_sums(self, hidden: list[Tensor], labels: list[Tensor], loss_sum: LossSum) -> list[Tensor]:
        """The summed loss of each of several normalized hidden states, through this model's output matrix."""
        own_vocab_size = -(-self.config.vocab_size // (1 if self.tp.group is None else self.tp.group.size()))

        def losses(hidden: list[Tensor], lm_head: Callable[[Tensor], Tensor]) -> list[Tensor]:
            return [
                chunked_loss_sum(hidden_BLD, labels_BL, lm_head, loss_sum, own_vocab_size)
                for hidden_BLD, labels_BL in zip(hidden, labels, strict=True)
            ]

        return losses(hidden, self.logits) if self.output is None else self.output(hidden, losses)

    def first_and_last_units(self) -> tuple[nn.Module | None, nn.Module | None]:
        """The modules besides blocks that are FSDP2 units of their own, in forward order.

        A tied embedding is also used outside its own forward, so it stays in the root unit.
        """
        return (self.embedding if self.output is not None or not self.is_last_stage else None), self.output

    def stage(
        self: D, first_layer: int, end_layer: int, *, is_first: bool | None = None, is_last: bool | None = None
    ) -> D:
        """Layers first_layer to end_layer - 1 as a model of its own: one pipeline stage. Cut before parallelizing.

        The first stage has the embedding and the last one the head: by default, the stages with the first and the last
        layer. Pass is_first or is_last where the embedding or the head is a stage without layers: stage(0, 0),
        stage(0, 4, is_first=False). Parameters keep their names, so a stage's state_dict is a subset of the full
        model's, and `initialize` gives them the same values. A stage shares no memory with this model or with other
        stages, so build the model on the meta device.
        """
        return cut_stage(self, first_layer, end_layer, is_first, is_last)

    def first_stage_modules(self) -> set[str]:
        """Names of the modules, besides layers, that the first pipeline stage has."""
        return {"embedding"}

    def last_stage_modules(self) -> set[str]:
        """Names of the modules, besides layers, that the last pipeline stage has."""
        return {"norm", "output", "embedding"} if self.config.tied_embeddings else {"norm", "output"}

    def parameters_on_two_stages(self) -> list[str]:
        """Parameters of which the first and the last pipeline stage each have a copy, such as tied embeddings.

        The copies start equal; whoever runs the stages must keep them equal by giving both the sum of their gradients.
        """
        both = self.first_stage_modules() & self.last_stage_modules()
        return [name for name, _ in self.named_parameters() if name.partition(".")[0] in both]
