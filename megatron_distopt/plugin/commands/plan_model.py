"""The sizes of a GPT, and how they are cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_distopt.errors import ConfigError, refusal

__all__ = ["Cut", "GptSizes", "check_cut"]

#: Megatron makes the width of a gated MLP a multiple of this.
_GATED_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class GptSizes:
    """What decides the shapes of the params.

    Args:
        layers, hidden: number and width.
        vocab: tokens.
        vocab_multiple: `vocab` is padded to a multiple of this times the tensor-parallel size; 0 for one that is
            padded already.
        seq: tokens of a sequence.
        positions: rows of the learned position embedding, `seq` where None, 0 for rotary or no positions.
        heads: of attention; None where it does not matter.
        kv_heads: heads that keys and values have; `heads` where None.
        head_dim: `hidden / heads` where None.
        ffn: width of the MLP; 4 times `hidden` where None, 8/3 times of a gated one.
        experts: in the MLP of each layer; 0 for an MLP without.
        expert_ffn: width of an expert; `ffn` where None.
        top_k: experts that a token goes to.
        is_gated: the MLP has a gate beside its up projection.
        is_tied: the output layer is the word embedding.
        has_bias: linear layers have one.
        has_qkv_bias: the projection to queries, keys and values has one, whatever `has_bias` says.
        is_rms: norms have a weight and no bias.
    """

    layers: int
    hidden: int
    vocab: int
    vocab_multiple: int = 128
    seq: int = 2048
    positions: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    experts: int = 0
    expert_ffn: int | None = None
    top_k: int = 2
    is_gated: bool = False
    is_tied: bool = True
    has_bias: bool = True
    has_qkv_bias: bool = False
    is_rms: bool = False

    @property
    def ffn_width(self) -> int:
        """Of the MLP, gate not counted."""
        if self.ffn is not None:
            return self.ffn
        return self.hidden * 8 // 3 // _GATED_MULTIPLE * _GATED_MULTIPLE if self.is_gated else 4 * self.hidden

    @property
    def query_width(self) -> int:
        """Of all queries together."""
        return self.hidden if self.heads is None else self.heads * self._head_dim

    @property
    def kv_width(self) -> int:
        """Of all keys together, and of all values."""
        return self.query_width if self.kv_heads is None else self.kv_heads * self._head_dim

    @property
    def num_positions(self) -> int:
        """Rows of the position embedding."""
        return self.seq if self.positions is None else self.positions

    def padded_vocab(self, tp: int) -> int:
        """Rows of the word embedding of all tensor-parallel ranks.

        >>> GptSizes(layers=1, hidden=8, vocab=50257).padded_vocab(2)
        50432
        """
        multiple = self.vocab_multiple * tp
        return -(-self.vocab // multiple) * multiple if multiple else self.vocab

    @property
    def _head_dim(self) -> int:
        if self.head_dim is not None:
            return self.head_dim
        if self.heads is None or self.hidden % self.heads:
            got, rule = f"{self.hidden} over {self.heads} heads", "divide evenly"
            raise ConfigError(refusal("hidden size", got, rule, "Write --heads N, or give kv_channels in the config"))
        return self.hidden // self.heads


@dataclass(frozen=True)
class Cut:
    """Sizes of the groups that a model is cut over.

    Args:
        dp: data-parallel ranks, which hold the same params.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        ep: expert-parallel ranks, which are data-parallel ranks of all other params.
    """

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return self.dp * self.tp * self.pp

    def place_of(self, rank: int) -> tuple[int, int]:
        """Stage and data-parallel rank, in Megatron's order: tensor-parallel ranks are neighbours, stages far apart.

        >>> Cut(dp=4, tp=2, pp=3).place_of(13)
        (1, 2)
        """
        return rank // (self.tp * self.dp), rank // self.tp % self.dp

    def data_ranks(self, rank: int) -> range:
        """The data-parallel group of a rank.

        >>> list(Cut(dp=4, tp=2, pp=3).data_ranks(13))
        [9, 11, 13, 15]
        """
        first = rank - self.place_of(rank)[1] * self.tp
        return range(first, first + self.dp * self.tp, self.tp)

    def expert_ranks(self, rank: int) -> range:
        """Those of its data-parallel group that hold the same experts.

        >>> list(Cut(dp=4, tp=2, pp=3, ep=2).expert_ranks(13))
        [9, 13]
        """
        return self.data_ranks(rank)[self.place_of(rank)[1] % self.ep :: self.ep]


def check_cut(gpt: GptSizes, cut: Cut) -> None:
    """Refuses what Megatron would refuse.

    Raises:
        ConfigError: something does not divide evenly, or experts are asked for that are not there.
    """
    if cut.ep > 1 and not gpt.experts:
        rule, remedy = "be 1 for a model without experts", "Write --experts N, or leave --ep out"
        raise ConfigError(refusal("--ep", cut.ep, rule, remedy))
    for what, number, flag, size in (
        ("layers", gpt.layers, "--pp", cut.pp),
        ("hidden elements", gpt.hidden, "--tp", cut.tp if gpt.heads is None else 1),
        ("heads", gpt.heads or 0, "--tp", cut.tp),
        ("key and value heads", gpt.kv_heads or 0, "--tp", cut.tp),
        ("MLP width", gpt.ffn_width, "--tp", cut.tp),
        ("expert width", gpt.expert_ffn or gpt.ffn_width, "--tp", cut.tp),
        ("vocabulary", gpt.padded_vocab(cut.tp), "--tp", cut.tp),
        ("experts", gpt.experts, "--ep", cut.ep),
        ("data-parallel ranks", cut.dp, "--ep", cut.ep),
    ):
        if number % size:
            rule, remedy = f"be divisible by {flag} {size}", f"Write a {flag} that divides {number}"
            raise ConfigError(refusal(f"number of {what}", number, rule, remedy))
