"""What was run, and where: the first table of docs/hosts.md, as data. A row is added by who ran it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tried:
    """One run of a host with this package.

    Args:
        host: whose.
        version: or commit.
        what: was run.
        where: devices, backend, versions of what matters.
        date: year-month-day of the last run.
        result: "passes", or what did not.
    """

    host: str
    version: str
    what: str
    where: str
    date: str
    result: str


TRIED = (
    Tried(
        "plain (any torch module)",
        "torch 2.13.0",
        "`tests/hosts/test_plain.py`, `tests/optimizer/`: DP 1, 2, 3, 4; fp32, bf16, fp16, mixed",
        "CPU, gloo, torch 2.13.0",
        "2026-11-21",
        "passes",
    ),
    Tried(
        "plain torch; the small fork of 2023; megatron-core 0.16.1",
        "torch 2.13.0",
        "`tests/sim/`: both overlaps, deferred checks, background saves, 16-bit reduce dtype, fp16, "
        "NaN policies, streams of the user's own, TP 2 and PP 2 in the Megatrons, in orders that seeds decide",
        "simulated accelerator on a CPU, torch 2.13.0",
        "2026-11-23",
        "passes; to the bit as on the CPU",
    ),
    Tried(
        "megatron-core (PyPI)",
        "0.16.1",
        "`tests/hosts/`: GPTModel, DP, TP, PP, virtual PP and products up to 4 ranks, fp32, bf16, fp16, with the "
        "host's overlaps; checkpoints at another layout, ours and through its `dist_checkpointing`; "
        "`scripts/quickstart.sh` with both launchers",
        "CPU, gloo, torch 2.13.0, deepspeed 0.19.8",
        "2026-11-21",
        "passes",
    ),
    Tried(
        "Megatron-DeepSpeed",
        "4efb479d",
        "its `pretrain_gpt.py`, unedited, runner with both launchers, entry point: DP 1, "
        "2, 4, 5, TP 2, PP 2, accumulation, fp32, bf16, fp16, its checkpoints both ways, those of its undistributed "
        "optimizer, ours at another data-parallel size: `tests/hosts/test_megatron_deepspeed.py`",
        "CPU, gloo, torch 2.13.0, deepspeed 0.19.8",
        "2026-11-23",
        "passes; the norm in fp32 up to 2.1e-6 from the fork's, see below",
    ),
    Tried(
        "Megatron-LM",
        "23.04 (2360d732)",
        "its `pretrain_gpt.py`, unedited, runner: DP 2, PP 2, fp32, bf16; its checkpoints (per-rank files) both ways",
        "CPU, gloo, torch 2.13.0; stand-ins for apex, CUDA and fused kernels around the fork",
        "2026-11-21",
        "passes",
    ),
    Tried(
        "Megatron-LM",
        "23.06 (4f8e9ac4)",
        "the same: DP 2, TP 2, PP 2, sequence parallel, fp32, bf16, fp16, SGD; its gathered file both ways",
        "CPU, gloo, torch 2.13.0; stand-ins for apex, CUDA and fused kernels around the fork",
        "2026-11-21",
        "passes",
    ),
    Tried(
        "Megatron-LM",
        "23.08 (375395c1)",
        "the same: DP 2, bf16",
        "CPU, gloo, torch 2.13.0; stand-ins for apex, CUDA and fused kernels around the fork",
        "2026-11-21",
        "passes",
    ),
    Tried(
        "Megatron-LM",
        "core_v0.12.3 (3ea68ad6)",
        "its `pretrain_gpt.py`, unedited, runner, local layers, mock data: DP 2, fp32 and bf16, 12 iterations, "
        "against "
        "its undistributed optimizer (its distributed one wants TransformerEngine); `--overlap-grad-reduce "
        "--overlap-param-gather`; evaluation, `--exit-interval`; resumed from `--ckpt-format torch`: "
        "`tests/hosts/test_main_line.py`",
        "CPU, gloo, torch 2.13.0, Python 3.11; stand-ins for CUDA around the tree (`tests/support/main_line`)",
        "2026-11-23",
        "passes; `--ckpt-format torch_dist` with `--save` is refused at the start, `--ckpt-format torch` is the "
        "way out; in bf16 with `--clip-grad 1e9` losses and params equal to the bit",
    ),
    Tried(
        "Megatron-LM",
        "core_v0.16.1 (55ac7082)",
        "its `pretrain_gpt.py`, unedited, runner, local layers, mock data: DP 2, fp32 and bf16, 12 iterations, "
        "against "
        "the host's own distributed and undistributed optimizers; `--overlap-grad-reduce "
        "--overlap-param-gather`; evaluation, `--exit-interval`; resumed from torch_dist, torch, "
        "`--async-save`, `--dist-ckpt-optim-fully-reshardable`, torch_dist at DP 1 as well, and from DP 1; "
        "two nodes of two ranks as network namespaces, to the bit as one: "
        "`tests/hosts/test_main_line.py`",
        "CPU, gloo, torch 2.13.0, Python 3.11; stand-ins for CUDA around the tree (`tests/support/main_line`)",
        "2026-11-23",
        "passes; in bf16 with `--clip-grad 1e9` losses and params equal to the bit",
    ),
    Tried(
        "Megatron-LM",
        "core_v0.19.0 (5be96267)",
        "its `pretrain_gpt.py`, unedited, runner, local layers, mock data: DP 2, fp32 and bf16, 12 iterations, "
        "against "
        "the host's own distributed and undistributed optimizers; `--overlap-grad-reduce "
        "--overlap-param-gather`; evaluation, `--exit-interval`; resumed from torch_dist, torch, "
        "`--async-save`, `--dist-ckpt-optim-fully-reshardable`, torch_dist at DP 1 as well: "
        "`tests/hosts/test_main_line.py`",
        "CPU, gloo, torch 2.13.0, Python 3.11; stand-ins for CUDA around the tree (`tests/support/main_line`), "
        "triton importable, `typing.override` supplied",
        "2026-11-23",
        "passes; in bf16 with `--clip-grad 1e9` losses and params equal to the bit",
    ),
    Tried(
        "bigcode Megatron-LM",
        "7c325cd3",
        "the same with multi-query attention: DP 2, TP 2 with and without sequence parallel, fp32, bf16; checkpoints "
        "(gathered file)",
        "CPU, gloo, torch 2.13.0; stand-ins for apex, CUDA and fused kernels around the fork",
        "2026-11-21",
        "passes",
    ),
    Tried(
        "epfLLM Megatron-LLM",
        "806a8330",
        "its `finetune.py --model_name gpt`, `--use_distributed_optimizer`: DP 2, fp32, bf16; own resume, from its "
        "checkpoints (per-rank files)",
        "CPU, gloo, torch 2.13.0; stand-ins for apex, flash-attention, CUDA and fused kernels around the fork",
        "2026-11-21",
        "passes; the fork itself cannot resume",
    ),
    Tried(
        "a small fork of 2023 on megatron-core 0.2.0",
        "`tests/hosts/mini_fork`",
        "`tests/hosts/test_megatron_2023_*.py`: both file layouts, all install methods, both launchers, DP 1 to 6, "
        "TP 2, PP 2, experts, Ulysses, mixed dtypes, multi-query, checkpoints at another layout, refusals",
        "CPU, gloo, torch 2.13.0, deepspeed 0.19.8",
        "2026-11-21",
        "passes",
    ),
)

_HEADER = ("host", "version or commit", "what was run", "where", "date", "result")


def as_markdown(rows: Sequence[Tried] = TRIED) -> str:
    """The table, as docs/hosts.md has it between its two marker comments.

    >>> print(as_markdown([Tried("mine", "1.0", "a step", "CPU", "2026-01-02", "passes")]))
    | host | version or commit | what was run | where | date | result |
    |---|---|---|---|---|---|
    | mine | 1.0 | a step | CPU | 2026-01-02 | passes |
    """
    cells = [(row.host, row.version, row.what, row.where, row.date, row.result) for row in rows]
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in [_HEADER, *cells]]
    return "\n".join([lines[0], "|---" * len(_HEADER) + "|", *lines[1:]])
