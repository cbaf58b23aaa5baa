"""Loss scales."""

import torch

from ..switches import DEVICE


class MegatronGradScaler:
    def __init__(self, initial_scale):
        assert initial_scale > 0.0, f"initial scale {initial_scale} must be positive"
        self._scale = torch.tensor([initial_scale], dtype=torch.float, device=DEVICE)

    @property
    def scale(self):
        return self._scale

    @property
    def inv_scale(self):
        return self._scale.double().reciprocal().float()


class ConstantGradScaler(MegatronGradScaler):
    def update(self, found_inf):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


class DynamicGradScaler(MegatronGradScaler):
    """Backs off after `hysteresis` overflows, grows after `growth_interval` steps without one."""

    def __init__(
        self, initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis
    ):
        super().__init__(initial_scale)
        assert 0.0 < min_scale <= initial_scale, (
            f"min scale {min_scale} must be in (0, {initial_scale}]"
        )
        assert growth_factor > 1.0 > backoff_factor > 0.0, (
            f"grows by {growth_factor}, backs off by {backoff_factor}"
        )
        assert growth_interval > 0 and hysteresis > 0, (
            "growth interval and hysteresis must be positive"
        )
        self.min_scale = torch.tensor([min_scale], dtype=torch.float, device=DEVICE)
        self.growth_factor = torch.tensor([growth_factor], dtype=torch.float, device=DEVICE)
        self.backoff_factor = torch.tensor([backoff_factor], dtype=torch.float, device=DEVICE)
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self._growth_tracker, self._hysteresis_tracker = 0, hysteresis

    def update(self, found_inf):
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self._scale = torch.max(self._scale * self.backoff_factor, self.min_scale)
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self._growth_tracker, self._hysteresis_tracker = 0, self.hysteresis
            self._scale = self._scale * self.growth_factor

    def state_dict(self):
        return {
            "scale": self._scale,
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, state_dict):
        self._scale = state_dict["scale"]
        self._growth_tracker = state_dict["growth_tracker"]
        self._hysteresis_tracker = state_dict["hysteresis_tracker"]
