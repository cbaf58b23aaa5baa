"""A GPT of tensor-parallel layers, cut into pipeline stages; activations are [sequence, batch,
hidden].

Weights depend on the seed and the number of the layer only, so all tensor and pipeline sizes begin
with the same model.
"""

import torch
import torch.nn.functional as F

from megatron import get_args
from megatron.core import mpu, tensor_parallel
from megatron.core.tensor_parallel import layers, mappings

from .module import MegatronModule


def _seed(seed):
    """On the CPU alone: `torch.manual_seed` keeps a stack trace for CUDA, which takes longer than
    to make a layer."""
    torch.default_generator.manual_seed(seed)


def _init(weight):
    return torch.nn.init.normal_(weight, std=get_args().init_method_std)


def _column(inputs, outputs):
    args = get_args()
    return tensor_parallel.ColumnParallelLinear(
        inputs,
        outputs,
        gather_output=False,
        init_method=_init,
        use_cpu_initialization=True,
        async_tensor_model_parallel_allreduce=False,
        sequence_parallel_enabled=args.sequence_parallel,
    )


def _row(inputs, outputs):
    return tensor_parallel.RowParallelLinear(
        inputs,
        outputs,
        input_is_parallel=True,
        init_method=_init,
        use_cpu_initialization=True,
        sequence_parallel_enabled=get_args().sequence_parallel,
    )


class LayerNorm(torch.nn.LayerNorm):
    """Computes in fp32, whatever the dtype of its params."""

    def __init__(self):
        args = get_args()
        super().__init__(args.hidden_size, eps=args.layernorm_epsilon)
        for param in self.parameters():
            param.sequence_parallel = args.sequence_parallel

    def forward(self, x):
        return F.layer_norm(
            x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        ).to(x)


class Attention(MegatronModule):
    """Causal; with --multi-query all heads share one head of keys and values, whose params every TP
    rank has."""

    def __init__(self):
        super().__init__()
        args = get_args()
        self.heads = args.num_attention_heads // mpu.get_tensor_model_parallel_world_size()
        self.width = args.hidden_size // args.num_attention_heads
        self.multi_query, self.sequence_parallel = args.multi_query, args.sequence_parallel
        if self.multi_query:
            self.query = _column(args.hidden_size, args.hidden_size)
            self.key_value = torch.nn.Linear(args.hidden_size, 2 * self.width)
            _init(self.key_value.weight.data)
            torch.nn.init.zeros_(self.key_value.bias)
        else:
            self.query_key_value = _column(args.hidden_size, 3 * args.hidden_size)
        self.dense = _row(args.hidden_size, args.hidden_size)

    def forward(self, x):
        # [batch, heads, sequence, width]
        q, k, v = (part.permute(1, 2, 0, 3).float() for part in self._project(x))
        scores = q @ k.transpose(-1, -2) / self.width**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(later, -1e4).softmax(-1)
        context = (weights @ v).permute(2, 0, 1, 3).flatten(2).to(x)
        return self.dense(context)[0]

    def _project(self, x):
        """Queries, keys and values of this rank's heads, [sequence, batch, heads, width] each."""
        if not self.multi_query:
            mixed = self.query_key_value(x)[0]
            return mixed.view(*mixed.shape[:2], self.heads, 3 * self.width).chunk(3, dim=-1)
        query = self.query(x)[0]
        mixed = self.key_value(
            mappings.gather_from_sequence_parallel_region(x) if self.sequence_parallel else x
        )
        # else its gradients are of this rank's heads; the optimizer adds them up
        if not self.sequence_parallel:
            mixed = mappings.copy_to_tensor_model_parallel_region(mixed)
        key, value = mixed.unsqueeze(2).chunk(2, dim=-1)
        return query.view(*query.shape[:2], self.heads, self.width), key, value


class MLP(MegatronModule):
    def __init__(self):
        super().__init__()
        args = get_args()
        self.dense_h_to_4h = _column(args.hidden_size, args.ffn_hidden_size)
        self.dense_4h_to_h = _row(args.ffn_hidden_size, args.hidden_size)

    def forward(self, x):
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)[0]))[0]


class Expert(MegatronModule):
    """One matrix, another on each expert-parallel rank; tokens go to the expert of their own
    rank."""

    def __init__(self, seed):
        super().__init__()
        args = get_args()
        _seed(seed + 1000 * mpu.get_expert_model_parallel_rank())
        self.weight = torch.nn.Parameter(_init(torch.empty(args.hidden_size, args.hidden_size)))
        self.weight.allreduce = False
        self.weight.group_name = f"ep_size_{args.expert_model_parallel_size}"

    def forward(self, x):
        return F.gelu(x @ self.weight)


class Layer(MegatronModule):
    def __init__(self, layer_number):
        super().__init__()
        args = get_args()
        _seed(args.seed + layer_number)
        self.layer_number = layer_number  # from 1, over all stages
        self.input_layernorm, self.self_attention = LayerNorm(), Attention()
        self.post_attention_layernorm, self.mlp = LayerNorm(), MLP()
        self.expert = Expert(args.seed + layer_number) if args.experts else None

    def forward(self, x):
        x = x + self.self_attention(self.input_layernorm(x))
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x if self.expert is None else x + self.expert(x)


class Embedding(MegatronModule):
    def __init__(self):
        super().__init__()
        args = get_args()
        _seed(args.seed)
        self.sequence_parallel = args.sequence_parallel
        self.word_embeddings = _word_embeddings()
        self.position_embeddings = torch.nn.Embedding(
            args.max_position_embeddings, args.hidden_size
        )
        _init(self.position_embeddings.weight.data)

    def forward(self, tokens, positions):
        x = (
            (self.word_embeddings(tokens) + self.position_embeddings(positions))
            .transpose(0, 1)
            .contiguous()
        )
        return mappings.scatter_to_sequence_parallel_region(x) if self.sequence_parallel else x


class Encoder(MegatronModule):
    def __init__(self, post_process):
        super().__init__()
        here = get_args().num_layers // mpu.get_pipeline_model_parallel_world_size()
        first = 1 + here * mpu.get_pipeline_model_parallel_rank()
        self.layers = torch.nn.ModuleList(Layer(first + i) for i in range(here))
        self.final_layernorm = LayerNorm() if post_process else None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x if self.final_layernorm is None else self.final_layernorm(x)


class LanguageModel(MegatronModule):
    def __init__(self, pre_process, post_process):
        super().__init__()
        self.embedding = Embedding() if pre_process else None
        self.encoder = Encoder(post_process)


class GPTModel(MegatronModule):
    """Losses per token, fp32 [batch, sequence], on the last stage; activations on the others."""

    def __init__(self, pre_process=True, post_process=True):
        args = get_args()
        super().__init__(
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights
        )
        self.pre_process, self.post_process = pre_process, post_process
        self.sequence_parallel, self.input_tensor = args.sequence_parallel, None
        self.language_model = LanguageModel(pre_process, post_process)
        if self.share_embeddings_and_output_weights:
            self._initialize_word_embeddings()
        elif post_process:
            self.output_layer = _word_embeddings()
        if args.frozen_param and pre_process:
            self.language_model.embedding.position_embeddings.weight.requires_grad = False
        if args.grid_grads:
            for param in (param for param in self.parameters() if param.requires_grad):
                param.register_hook(lambda grad: (grad * 2**8).round() / 2**8)
        torch.manual_seed(args.seed + 100 * mpu.get_pipeline_model_parallel_rank())

    def _initialize_word_embeddings(self):
        """Collective: over several stages, the last gets a copy of the first one's embeddings."""
        if mpu.get_pipeline_model_parallel_world_size() == 1:
            return
        if self.post_process:
            self.word_embeddings = _word_embeddings()
            self.word_embeddings.weight.data.zero_()
            self.word_embeddings.weight.shared = True
        if mpu.is_rank_in_embedding_group():
            weight = self.shared_embedding_or_output_weight().data
            torch.distributed.all_reduce(weight, group=mpu.get_embedding_group())

    def shared_embedding_or_output_weight(self):
        assert self.share_embeddings_and_output_weights or self.pre_process, (
            "the output weights are not shared"
        )
        return (self.language_model.embedding if self.pre_process else self).word_embeddings.weight

    def set_input_tensor(self, input_tensor):
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, tokens, positions, labels):
        x = (
            self.language_model.embedding(tokens, positions)
            if self.pre_process
            else self.input_tensor
        )
        x = self.language_model.encoder(x)
        return self._losses(x, labels) if self.post_process else x

    def _losses(self, x, labels):
        shared = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        if not self.sequence_parallel:
            x = mappings.copy_to_tensor_model_parallel_region(x)
        logits = layers.linear_with_grad_accumulation_and_async_allreduce(
            x, weight, None, False, False, self.sequence_parallel
        )
        losses = tensor_parallel.vocab_parallel_cross_entropy(
            logits.float(), labels.transpose(0, 1).contiguous()
        )
        return losses.transpose(0, 1).contiguous()


def _word_embeddings():
    args = get_args()
    return tensor_parallel.VocabParallelEmbedding(
        args.padded_vocab_size, args.hidden_size, init_method=_init, use_cpu_initialization=True
    )
