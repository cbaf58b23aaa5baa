"""The main job: a GPT of megatron-core learns to write Python from the source of the standard
library, on two ranks.

It takes about three minutes: a measurement of a few seconds chooses precision, number of iterations
and batch size.

    scripts/quickstart.sh                                   # installs what it needs and runs this,
    or deepspeed --num_accelerators 2 examples/quickstart.py --use-distributed-optimizer torchrun
    --nproc-per-node 2 examples/quickstart.py --use-distributed-optimizer

NCCL where there are NVIDIA GPUs, one a rank; gloo on the CPU elsewhere. Results go to
runs/quickstart.
"""

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import megatron_on_cpu
import torch
from byte_gpt import plot, report, sample
from byte_gpt.choose import Choice, Insisted
from byte_gpt.data import Text, load
from byte_gpt.measure import measure
from byte_gpt.memory import measure_memory, undistributed_memory
from byte_gpt.progress import reporting
from byte_gpt.settings import Precision, Settings, Source
from byte_gpt.train import train, validation_bits_per_byte
from byte_gpt.trainer import training

RUNS = Path(__file__).resolve().parent.parent / "runs"
# Of the launcher and of the imports above, where scripts/quickstart.sh does not say when it began.
LAUNCH_SECONDS = 15.0
# seconds since 1970
BEGAN = float(os.environ.get("QUICKSTART_BEGAN", time.time() - LAUNCH_SECONDS))


def main() -> None:
    args = parse_args()
    try:
        settings = settings_of(args)
        text = load(args.data, seq_length=settings.seq_length)
    except (OSError, ValueError) as error:
        sys.exit(f"quickstart: {error}")  # on every rank, before the first collective
    device = initialize(args.local_rank)
    try:
        run_all(args, settings, text, device)
    finally:
        torch.distributed.destroy_process_group()


def settings_of(args: argparse.Namespace) -> Settings:
    """Without what is chosen later, but for checking what was given."""
    return Settings(
        iterations=Settings.iterations if args.iterations is None else args.iterations,
        seed=args.seed,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )


def insisted(args: argparse.Namespace) -> Insisted:
    return Insisted(Precision.parse(args.precision) if args.precision else None, args.iterations)


def run_all(args: argparse.Namespace, settings: Settings, text: Text, device: torch.device) -> None:
    order0 = text.order0_bits_per_byte()
    say(f"text: {text.name}, {text.nbytes:,} bytes, order-0 entropy {order0:.3f} bits a byte")
    choice = measure(
        settings, insisted(args), text, device, seconds_before=lambda: time.time() - BEGAN
    )
    say(f"chosen: {choice.reason}")
    settings = chosen(settings, choice)
    runs = [run(settings, source, text, device) for source in sources(args)]
    ranks = torch.distributed.get_world_size()
    summary = report.summarize(
        runs[0],
        choice,
        order0_bits_per_byte=order0,
        ranks=ranks,
        launcher=launcher(),
        device=device_name(device),
    )
    if torch.distributed.get_rank() == 0:
        finish(args.output, summary, runs, settings)


def chosen(settings: Settings, choice: Choice) -> Settings:
    return replace(
        settings,
        precision=choice.precision,
        iterations=choice.iterations,
        micro_batch_size=choice.micro_batch_size,
    )


def sources(args: argparse.Namespace) -> list[Source]:
    """Without the flag ours is inert, so it is megatron-core's plain optimizer that trains."""
    if not args.use_distributed_optimizer:
        return [Source.HOST]
    return [Source.OURS, Source.HOST] if args.compare else [Source.OURS]


def finish(
    folder: Path, summary: report.Summary, runs: list[report.Run], settings: Settings
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    report.write(folder, summary, runs)
    title = (
        f"GPT on bytes, {settings.precision.name.lower()}, {summary.ranks} ranks, {summary.device}"
    )
    plot.plot(
        folder / "curves.png",
        runs,
        order0_bits_per_byte=summary.order0_bits_per_byte,
        title=title,
        ranks=summary.ranks,
    )
    print(f"\nThe model writes:\n\n{runs[0].sample}\n\n{report.describe(summary)}")
    if len(runs) == 2:
        print(report.describe_comparison(*runs))
    print(f"took in all       {time.time() - BEGAN:.0f} s")
    print(f"written           {folder}/summary.json, metrics.jsonl, curves.png", flush=True)


def run(settings: Settings, source: Source, text: Text, device: torch.device) -> report.Run:
    """Collective: train from the seed with one of the optimizers."""
    rank = torch.distributed.get_rank()
    with training(settings, source, text, device) as trainer:
        built = type(trainer.optimizer.chained_optimizers[0])
        title = f"training with {built.__name__} of {built.__module__}"
        with reporting(title, settings.iterations, rank=rank) as on_iteration:
            history = train(trainer, on_iteration)
        validation = validation_bits_per_byte(trainer, text)
        memory = measure_memory(trainer)
        undistributed = undistributed_memory(trainer)
        written = sample.write(trainer) if rank == 0 else ""
    return report.Run(source, history, validation, memory, undistributed, written)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--use-distributed-optimizer",
        action="store_true",
        help="without it, all state on every rank",
    )
    names = [each.name.lower() for each in Precision]
    parser.add_argument(
        "--precision", choices=names, help="of the model params (what is measured to be fastest)"
    )
    parser.add_argument("--iterations", type=int, help="how many (as many as three minutes allow)")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument(
        "--data", type=Path, help="a text of your own instead of the standard library"
    )
    parser.add_argument(
        "--compare", action="store_true", help="train again with megatron-core's own optimizer"
    )
    parser.add_argument("--output", type=Path, default=RUNS / "quickstart")
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0"))
    )
    args = parser.parse_args()
    if args.compare and not args.use_distributed_optimizer:
        parser.error(
            "--compare sets two distributed optimizers side by side: add "
            "--use-distributed-optimizer"
        )
    return args


def initialize(local_rank: int) -> torch.device:
    """Collective: the process group over this machine's devices, and the device of this rank."""
    megatron_on_cpu.install()
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        torch.distributed.init_process_group("nccl")
        return torch.device("cuda", local_rank)
    torch.distributed.init_process_group("gloo")
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    torch.set_num_threads(max(1, cores // torch.distributed.get_world_size()))
    return torch.device("cpu")


def launcher() -> str:
    """torchrun leaves its run's name in the environment; the DeepSpeed launcher the number of local
    ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return "deepspeed" if "LOCAL_SIZE" in os.environ else "none"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def say(line: str) -> None:
    if torch.distributed.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
