"""The command line."""

import argparse
import os

import torch

from .switches import FLAGS
from .utils import print_rank_0


class _Parser(argparse.ArgumentParser):
    """Spells its flags as MINI_FORK_FLAGS says; the names of the attributes do not depend on
    that."""

    def add_argument(self, *names, **options):
        if FLAGS == "underscore":
            names = [
                f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
                for name in names
            ]
        return super().add_argument(*names, **options)


def _add_numbers(parser):
    whole = {
        "num-layers": 2, "hidden-size": 16, "num-attention-heads": 4, "ffn-hidden-size": None,
        "seq-length": 8,
        "max-position-embeddings": None, "vocab-size": 64, "micro-batch-size": 2,
        "global-batch-size": None,
        "train-iters": 4, "seed": 1234, "save-interval": None, "exit-interval": None,
        "log-interval": 1,
        "tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1,
        "loss-scale-window": 1000, "hysteresis": 2, "expert-model-parallel-size": 1,
        "ds-sequence-parallel-size": None, "local_rank": None,
    }  # fmt: skip
    real = {
        "lr": 1e-2, "weight-decay": 0.01,
        "adam-beta1": 0.9, "adam-beta2": 0.999, "adam-eps": 1e-8, "sgd-momentum": 0.9,
        "clip-grad": 1.0,
        "loss-scale": None, "initial-loss-scale": 2.0**32, "min-loss-scale": 1.0,
        "init-method-std": 0.1,
        "layernorm-epsilon": 1e-5,
    }  # fmt: skip
    for defaults, kind in ((whole, int), (real, float)):
        for name, default in defaults.items():
            parser.add_argument(f"--{name}", type=kind, default=default)


def _add_switches(parser):
    for name in (
        "fp16", "bf16", "use-distributed-optimizer", "accumulate-allreduce-grads-in-fp32",
        "log-num-zeros-in-grad",
        "log-optimizer-states-to-tensorboard", "sequence-parallel", "no-save-optim",
        "no-load-optim", "no-save-rng",
        "no-load-rng", "finetune", "deepspeed", "cpu-optimizer", "cpu-torch-adam", "ds-fused-adam",
        "untie-embeddings-and-output-weights",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    name = "use_contiguous_buffers_in_local_ddp"
    parser.add_argument("--no-contiguous-buffers-in-local-ddp", dest=name, action="store_false")
    parser.set_defaults(barrier_with_L1_time=True)


def _add_choices(parser):
    parser.add_argument("--optimizer", default="adam", choices=["adam", "sgd"])
    parser.add_argument("--DDP-impl", default="local", choices=["local", "torch"])
    parser.add_argument("--save")
    parser.add_argument("--load")
    parser.add_argument("--deepspeed_config")


def _add_test_flags(parser):
    """What no real fork has."""
    parser.add_argument(
        "--fp32-norms", action="store_true", help="norm params stay fp32 in a 16-bit model"
    )
    parser.add_argument(
        "--experts", action="store_true", help="a param in each layer that differs by rank"
    )
    parser.add_argument(
        "--multi-query", action="store_true", help="one head of keys and values, on all TP ranks"
    )
    parser.add_argument(
        "--frozen-param", action="store_true", help="position embeddings do not train"
    )
    parser.add_argument("--grid-grads", action="store_true", help="grads are multiples of 2**-8")
    parser.add_argument(
        "--nan-at", type=int, nargs=2, metavar=("ITERATION", "RANK"), help="nan in a grad there"
    )
    parser.add_argument(
        "--curves", metavar="FILE", help="JSON with what was logged and hashes of the params"
    )


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    """The command line as a namespace, not yet checked."""
    parser = _Parser(description="Mini fork arguments", allow_abbrev=False)
    for add in (_add_numbers, _add_switches, _add_choices, _add_test_flags):
        add(parser)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
    args.rank, args.world_size = int(os.getenv("RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
    return args


def validate_args(args, defaults={}):  # noqa: B006
    """Fills in what follows from other arguments, refuses what does not fit, prints all on rank 0;
    returns args."""
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.attention_head_type = "multiquery" if args.multi_query else "multihead"
    _validate_sizes(args)
    _validate_precision(args)
    if args.use_distributed_optimizer:
        assert args.DDP_impl == "local", "the distributed optimizer needs --DDP-impl local"
        assert args.use_contiguous_buffers_in_local_ddp, (
            "the distributed optimizer needs contiguous buffers"
        )
    if args.DDP_impl != "local":
        args.use_contiguous_buffers_in_local_ddp = False
    args.iteration = args.curr_iteration = args.consumed_train_samples = 0
    _print_args(args)
    return args


def _validate_sizes(args):
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    args.padded_vocab_size = args.vocab_size
    args.virtual_pipeline_model_parallel_size = args.pipeline_model_parallel_split_rank = None
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if args.ds_sequence_parallel_size is not None:
        assert model_parallel == 1, (
            "--ds-sequence-parallel-size works without tensor and pipeline parallelism"
        )
        model_parallel = args.ds_sequence_parallel_size
    assert args.world_size % model_parallel == 0, (
        f"{args.world_size} ranks cannot be split by {model_parallel}"
    )
    args.data_parallel_size = args.world_size // model_parallel
    step = args.micro_batch_size * args.data_parallel_size
    args.global_batch_size = args.global_batch_size or step
    assert args.global_batch_size % step == 0, (
        f"global batch {args.global_batch_size} is not a multiple of {step}"
    )
    assert args.num_layers % args.pipeline_model_parallel_size == 0, (
        "layers must divide evenly into stages"
    )
    args.sequence_parallel = args.sequence_parallel and args.tensor_model_parallel_size > 1
    assert not (args.experts and args.sequence_parallel), (
        "experts do not know --sequence-parallel here"
    )


def _validate_precision(args):
    assert not (args.fp16 and args.bf16), "--fp16 and --bf16 exclude each other"
    args.params_dtype = torch.half if args.fp16 else torch.bfloat16 if args.bf16 else torch.float
    if args.bf16 and not args.accumulate_allreduce_grads_in_fp32:
        args.accumulate_allreduce_grads_in_fp32 = True
        print_rank_0("--bf16 turns on fp32 gradients")
    if args.accumulate_allreduce_grads_in_fp32:
        assert args.DDP_impl == "local", "fp32 gradients need --DDP-impl local"
        assert args.use_contiguous_buffers_in_local_ddp, "fp32 gradients need contiguous buffers"


def _print_args(args):
    if args.rank == 0:
        lines = [
            f"  {name} {'.' * max(3, 48 - len(name))} {value}" for name, value in vars(args).items()
        ]
        print_rank_0(
            "\n".join(
                [
                    "----- arguments -----",
                    *sorted(lines, key=str.lower),
                    "----- end of arguments -----",
                ]
            )
        )
