"""Learning rate and weight decay as functions of the consumed samples."""

import math

from .utils import print_rank_0


class OptimizerParamScheduler:
    """Writes `lr` and `weight_decay` of every param group at each step."""

    def __init__(
        self,
        optimizer,
        max_lr,
        min_lr,
        lr_warmup_steps,
        lr_decay_steps,
        lr_decay_style,
        start_wd,
        end_wd,
        wd_incr_steps,
    ):
        assert 0.0 <= min_lr <= max_lr, f"min_lr {min_lr} must be between 0 and max_lr {max_lr}"
        assert lr_warmup_steps < lr_decay_steps, f"{lr_warmup_steps} warmup steps of {lr_decay_steps}"
        self.optimizer, self.num_steps = optimizer, 0
        self.max_lr, self.min_lr = float(max_lr), min_lr
        self.lr_warmup_steps, self.lr_decay_steps, self.lr_decay_style = lr_warmup_steps, lr_decay_steps, lr_decay_style
        self.start_wd, self.end_wd, self.wd_incr_steps = start_wd, end_wd, wd_incr_steps
        self.step(0)
        print_rank_0(f"the learning rate decays as: {lr_decay_style}")

    def get_wd(self):
        done = min(self.num_steps / self.wd_incr_steps, 1.0)
        return self.start_wd + done * (self.end_wd - self.start_wd)

    def get_lr(self):
        if self.lr_warmup_steps > 0 and self.num_steps <= self.lr_warmup_steps:
            return self.max_lr * self.num_steps / self.lr_warmup_steps
        if self.lr_decay_style == "constant":
            return self.max_lr
        done = min((self.num_steps - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps), 1.0)
        left = 1.0 - done if self.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        return self.min_lr + left * (self.max_lr - self.min_lr)

    def step(self, increment):
        """`increment` in samples."""
        self.num_steps += increment
        lr, wd = self.get_lr(), self.get_wd()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = wd * group.get("wd_mult", 1.0)

    def state_dict(self):
        names = "max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style start_wd end_wd wd_incr_steps num_steps"
        return {name: getattr(self, name) for name in names.split()}

    def load_state_dict(self, state_dict):
        """Takes the values of the checkpoint; meant for a scheduler that has not stepped."""
        for name, value in state_dict.items():
            if name != "num_steps":
                setattr(self, name, value)
        self.step(increment=state_dict["num_steps"])
