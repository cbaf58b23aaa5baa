"""An exponential moving average of the main params, in fp32, on the rank that owns them.

After each step that was made, an average becomes `average + (1 - decay) * (main - average)`; the
first time it is a copy. It is bit-identical to torch's `AveragedModel(model,
multi_avg_fn=get_ema_multi_avg_fn(decay))` over fp32 params. That holds for a param without a
gradient, too, and for one that begins to train later: its average begins as its value. Averages are
fp32, because a step changes less than the last bit of a 16-bit average. Source:
torch/optim/swa_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_distopt.optimizer.low_precision.low_precision_tensor import as_plain
from megatron_distopt.optimizer.main_params import FlatParam

#: The kind of averages in a checkpoint.
AVERAGE = "main_average"
#: How many elements of a main param in low precision are converted to fp32 at a time.
_STRETCH = 1 << 22


class Averages:
    """Updates the averages of one optimizer, which are in its flat params."""

    def __init__(self, decay: float) -> None:
        self.weight = 1 - decay  # the weight of the main params in a step
        # whether a step was averaged, here or in a loaded run; until then nothing uses the averages
        self.has_begun = False
        self.are_shown = False  # whether the model has them in place of its params

    @torch.no_grad()
    def update(
        self,
        flat_params: Sequence[FlatParam],
        is_taken: Callable[[], bool],
        found_inf: Tensor | None,
    ) -> None:
        """Updates the averages after a step.

        `is_taken` says whether the step was made, and may wait for the device. `found_inf`, fp32
        0-D on the device, is 1 if the step was skipped.
        """
        weight = self.weight if found_inf is None else self.weight * (1 - found_inf)
        is_first = not self.has_begun
        if is_first and not is_taken():
            return
        self.has_begun = True
        for flat in flat_params:
            if flat.average is None:
                continue
            here = weight.to(flat.average.device) if isinstance(weight, Tensor) else weight
            for start in range(0, flat.average.numel(), _STRETCH):
                part = flat.average[start : start + _STRETCH]
                values = as_plain(flat.main[start : start + _STRETCH])
                if is_first:
                    part.copy_(values)
                else:
                    part.lerp_(values, here)
