"""Learning rate and weight decay as functions of the consumed samples."""


class OptimizerParamScheduler:
    """Writes `lr`, which decays to 0, and `weight_decay` of every param group at each step."""

    def __init__(self, optimizer, max_lr, lr_decay_steps, wd):
        self.optimizer, self.num_steps = optimizer, 0
        self.max_lr, self.lr_decay_steps, self.wd = float(max_lr), lr_decay_steps, wd
        self.step(0)

    def step(self, increment):
        """`increment` in samples."""
        self.num_steps += increment
        lr = (1.0 - min(self.num_steps / self.lr_decay_steps, 1.0)) * self.max_lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.wd * group.get("wd_mult", 1.0)

    def state_dict(self):
        return {
            name: getattr(self, name) for name in ("max_lr", "lr_decay_steps", "wd", "num_steps")
        }

    def load_state_dict(self, state_dict):
        """Takes the values of the checkpoint; meant for a scheduler that has not stepped."""
        for name, value in state_dict.items():
            if name != "num_steps":
                setattr(self, name, value)
        self.step(increment=state_dict["num_steps"])
