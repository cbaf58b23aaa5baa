"""How long an optimizer step takes without communication, beside an undistributed one made of torch's own parts.

    python benchmarks/step.py [--numel 32000000] [--repeats 7] [--quick] [--json FILE]

Both update the same bf16 params from the same fp32 grads, clip by the global norm and round back to bf16, in one
process of one thread. "torch" is what a careful user writes: foreach norm, clip, AdamW(fused=True) on fp32 copies, a
copy back for each param. Repeats are interleaved; medians and ratios are printed, beside the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter, ParameterList

from megatron_distopt import DistOptConfig, distribute

#: See [Note: bytes of a step] in megatron_distopt/optimizer/sharded.py.
NBYTES_AN_ELEMENT = 42
WIDTH = 1024


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    numel = 4_000_000 if args.quick else args.numel
    steps = {"ours": ours(make_model(numel)), "torch": torch_parts(make_model(numel))}
    medians = measure(steps, repeats=3 if args.quick else args.repeats)
    copy = copy_bandwidth(numel)
    result = {
        "numel": numel,
        "torch_version": torch.__version__,
        "seconds": medians,
        "ours_gigabytes_per_second": NBYTES_AN_ELEMENT * numel / medians["ours"] / 1e9,
        "copy_gigabytes_per_second": copy / 1e9,
        "torch_over_ours": medians["torch"] / medians["ours"],
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(f"ours is {result['torch_over_ours']:.2f} times as fast as torch's parts")
    dist.destroy_process_group()


def make_model(numel: int) -> Module:
    """Matrices with a bias each, as a transformer has them."""
    params = [Parameter(torch.randn(WIDTH, WIDTH).bfloat16()) for _ in range(numel // (WIDTH * WIDTH))]
    params += [Parameter(torch.randn(WIDTH).bfloat16()) for _ in params]
    return ParameterList(params)


def groups_of(params: list[Parameter]) -> list[dict[str, object]]:
    """Weight decay for matrices only."""
    matrices = [param for param in params if param.ndim > 1]
    return [{"params": matrices}, {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0}]


def ours(model: Module) -> Callable[[], None]:
    """The sharded step on one rank, which owns everything."""
    config = DistOptConfig(accelerator="torch", clip_grad=1.0)
    optimizer = distribute(model, config, param_groups=groups_of(list(model.parameters())))
    fill = [buffer.grad.normal_() for buffer in optimizer.sharded.buffers]
    assert fill, "the model has params"
    return lambda: _discard(optimizer.sharded.step())


def torch_parts(model: Module) -> Callable[[], None]:
    """The same, undistributed, from torch's own functions."""
    params = list(model.parameters())
    mains = [Parameter(param.detach().float()) for param in params]
    grads = [torch.randn_like(main) for main in mains]
    groups = groups_of(mains)
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.01, fused=True)

    def step() -> None:
        for main_param, grad in zip(mains, grads, strict=True):
            main_param.grad = grad
        torch.nn.utils.clip_grad_norm_(mains, 1.0, foreach=True)
        optimizer.step()
        with torch.no_grad():
            for param, main_param in zip(params, mains, strict=True):
                param.copy_(main_param)

    return step


def measure(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each, repeats interleaved, after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def copy_bandwidth(numel: int) -> float:
    """Bytes read and written a second by a plain copy."""
    source, target = torch.ones(numel), torch.empty(numel)
    best = min(_timed(target, source) for _ in range(5))
    return 2 * source.numel() * source.element_size() / best


def _timed(target: Tensor, source: Tensor) -> float:
    start = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - start


def _discard(result: object) -> None:
    del result


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=32_000_000, help="elements of the model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="4 million elements, 3 repeats")
    parser.add_argument("--json", type=Path, help="where to write the result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
