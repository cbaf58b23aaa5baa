"""How long does the update of optimizer state in low precision take on a CPU, per element and per byte of traffic?

Precisions take turns in every round, and each is updated with the compiled conversions and with torch's operators. A
ratio per byte of 1 means that the update is as fast as that of fp32 state, for what it moves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from megatron_distopt.optimizer import kept, native
from megatron_distopt.optimizer.blocked_adam import AdamW
from megatron_distopt.optimizer.low_precision_adam import LowPrecisionAdam
from megatron_distopt.optimizer.precision import FULL, Precision

PRECISIONS = (
    FULL,
    Precision("remainder"),
    Precision("float32", "bfloat16", "bfloat16"),
    Precision("remainder", "bfloat16", "bfloat16"),
    Precision("remainder", "float16", "float16"),
    Precision("remainder", "float8_e4m3fn", "float8_e4m3fn"),
    Precision("remainder", "int8", "int8"),
    Precision("bfloat16", "int8", "int8"),
)
#: Bytes read and written of a main param and of its model param.
MAINS = {"float32": 10, "remainder": 8, "bfloat16": 4}


def nbytes(precision: Precision) -> int:
    """Bytes an element that an update reads and writes, the fp32 gradient included."""
    return 4 + MAINS[precision.main_params_dtype] + 2 * round(precision.nbytes_of_moments)


def optimizer(precision: Precision, numel: int) -> AdamW | LowPrecisionAdam:
    """An optimizer of one flat param."""
    model = torch.randn(numel).bfloat16()
    main = model.float() if precision.main_params_dtype == "float32" else precision.mains([model])[0]
    main.grad = torch.randn(numel) * 1e-3
    params = [{"params": [main]}]
    made = AdamW(params, lr=1e-3, fused=True) if precision.is_full else LowPrecisionAdam(params, precision=precision)
    made.round_into({main: model})
    return made


@contextmanager
def conversions(*, compiled: bool) -> Iterator[None]:
    """With the compiled conversions, or with torch's operators."""
    if compiled:
        yield
        return
    with mock.patch.object(kept, "library", lambda *_: None), mock.patch.object(native, "library", lambda *_: None):
        yield


def seconds_of(optimizer: AdamW | LowPrecisionAdam, *, compiled: bool) -> float:
    """Of one update: of this process's CPU where it has one thread, because others may use the machine."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    with conversions(compiled=compiled):
        start = clock()
        optimizer.step()
        return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=1 << 23)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a million elements, three rounds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    numel, rounds = (1 << 20, 3) if options.quick else (options.numel, options.rounds)
    torch.set_num_threads(options.threads)
    optimizers = [optimizer(each, numel) for each in PRECISIONS]
    times: dict[tuple[int, bool], list[float]] = {}
    for _ in range(rounds + 1):
        for index, each in enumerate(optimizers):
            for compiled in (True, False):
                times.setdefault((index, compiled), []).append(seconds_of(each, compiled=compiled))
    medians = {key: statistics.median(each[1:]) * 1e9 / numel for key, each in times.items()}
    rows, full = [], medians[0, True] / nbytes(FULL)
    for index, each in enumerate(PRECISIONS):
        ours, torchs = medians[index, True], medians[index, False]
        per_byte = [value / nbytes(each) / full for value in (torchs, ours)]
        name = f"{each.main_params_dtype}, {each.exp_avg_dtype}, {each.exp_avg_sq_dtype}"
        rows.append({"precision": name, "nbytes": nbytes(each), "torch_ns": torchs, "compiled_ns": ours})
        print(
            f"{name:42s} {nbytes(each):3d} bytes  torch's operators {torchs:6.2f} ns ({per_byte[0]:5.2f} a byte)",
            end="",
        )
        print(f"  compiled {ours:6.2f} ns ({per_byte[1]:5.2f} a byte)")
    if options.json:
        about = {"torch": torch.__version__, "threads": options.threads, "numel": numel, "rounds": rounds}
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
