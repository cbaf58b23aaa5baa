"""Small models and data of the programs: each has something that a training script may have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.forked import in_fork as in_fork

#: Columns of a batch, and the hidden width of every model.
WIDTH, HIDDEN = 6, 8


def noise(shape: Any, *seeds: int) -> Tensor:
    """Multiples of 1/8 from -1 to 1, fp32, the same for the same seeds."""
    seed = sum((each + 1) * 1009**place for place, each in enumerate(seeds)) % (2**31)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, tuple(shape), generator=generator) / 8


def batch(rank: int, iteration: int, microbatch: int) -> Tensor:
    """The input of one microbatch on one rank, fp32 [4, WIDTH]."""
    return noise((4, WIDTH), rank, iteration, microbatch)


def grad_like(param: nn.Parameter, *seeds: int) -> Tensor:
    """A gradient that may be assigned to `param.grad`."""
    dtype = getattr(param, "grad_dtype", None) or param.dtype
    return noise(param.shape, *seeds).to(dtype) / 4


@torch.jit.script
def norms_in_script(tensors: list[Tensor]) -> list[float]:
    """Norms, computed by TorchScript, which reads tensors in C++."""
    return [float(each.float().norm()) for each in tensors]


def halve_grad(param: nn.Parameter) -> None:
    """A hook that changes the gradient that backward has left."""
    param.grad.mul_(0.5)


def pick(model: nn.Module, place: int) -> nn.Parameter:
    """One of the params of the model that are trained; counts on from the first after the last."""
    params = [param for param in model.parameters() if param.requires_grad]
    return params[place % len(params)]


class Note:
    """A hook that records that it was called; it can be pickled."""

    def __init__(self, seen: list[str], word: str) -> None:
        self.seen, self.word = seen, word

    def __call__(self, *args: Any) -> None:
        self.seen.append(self.word)


class Counting(torch.optim.Optimizer):
    """Writes into its param groups: how often it has updated, and the part of the lr to which that
    warms it up."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "step": 0, "warmed": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            group["warmed"] = min(1.0, group["step"] / 4)
            for param in (each for each in group["params"] if each.grad is not None):
                state = self.state[param]
                state["sum"] = state.get("sum", torch.zeros_like(param)) * 0.5 + param.grad
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
                    state["sum"] * group["lr"] * group["warmed"]
                )


class Trained(nn.Module):
    """What all models have: a loss by itself, an entry beside `forward`, a branch, activation
    checkpointing."""

    #: Whether backward computes the middle of the model again, and how.
    recompute: str | None = None
    #: Whether the side layer is used (of models that have one).
    branch = True

    def forward(self, x: Tensor) -> Tensor:
        """The loss of one batch, fp32 0-D."""
        return self._error(self.outputs(x), x)

    def loss(self, x: Tensor) -> Tensor:
        """Another entry, which the hooks of the module itself do not see."""
        return self._error(self.outputs(x), x) * 0.5

    def outputs(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _error(self, outputs: Tensor, x: Tensor) -> Tensor:
        return (outputs.float() - x[:, : outputs.shape[1]]).square().mean()

    def _middle(self, layers: nn.Module, hidden: Tensor) -> Tensor:
        if self.recompute is None:
            return layers(hidden)
        return checkpoint(layers, hidden, use_reentrant=self.recompute == "reentrant")


class Cast(nn.Module):
    """A layer that takes its input in any dtype: mixed models keep norms in fp32."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden.to(self.layer.weight.dtype))


class Perceptron(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.first = Cast(nn.Linear(WIDTH, HIDDEN))
        self.middle = nn.Sequential(
            Cast(nn.LayerNorm(HIDDEN)), nn.GELU(), Cast(nn.Linear(HIDDEN, HIDDEN)), nn.GELU()
        )
        self.last = Cast(nn.Linear(HIDDEN, 5))

    def outputs(self, x: Tensor) -> Tensor:
        return self.last(self._middle(self.middle, self.first(x)))


class Normed(Trained):
    """BatchNorm keeps statistics in module buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Cast(nn.Linear(WIDTH, HIDDEN))
        self.norm = Cast(nn.BatchNorm1d(HIDDEN))
        self.last = Cast(nn.Linear(HIDDEN, 3))

    def outputs(self, x: Tensor) -> Tensor:
        return self.last(functional.gelu(self.norm(self.first(x))))


class Tied(Trained):
    """The output layer's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, HIDDEN)
        self.middle = nn.Sequential(Cast(nn.Linear(HIDDEN, HIDDEN)), nn.GELU())
        self.head = nn.Linear(HIDDEN, 17, bias=False)
        self.head.weight = self.embedding.weight

    def outputs(self, x: Tensor) -> Tensor:
        tokens = (x * 8).long() + 8  # 0 to 16
        hidden = self._middle(self.middle, self.embedding(tokens)).mean(dim=1)
        return functional.linear(hidden.to(self.head.weight.dtype), self.head.weight)[:, :WIDTH]


class Convolution(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.first = Cast(nn.Conv1d(1, 3, kernel_size=3))
        self.middle = nn.Sequential(nn.GELU(), Cast(nn.Conv1d(3, 2, kernel_size=2)))

    def outputs(self, x: Tensor) -> Tensor:
        return self._middle(self.middle, self.first(x[:, None])).flatten(1)


class Recurrent(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(2, 5, batch_first=True)
        self.last = Cast(nn.Linear(5, 3))

    def outputs(self, x: Tensor) -> Tensor:
        hidden, _ = self.recurrent(x.view(4, 3, 2).to(self.recurrent.weight_ih_l0.dtype))
        return self.last(hidden[:, -1])


class Branching(Trained):
    """A side layer that is used only while `branch` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Cast(nn.Linear(WIDTH, HIDDEN))
        self.side = Cast(nn.Linear(HIDDEN, HIDDEN))
        self.middle = nn.Sequential(nn.GELU(), Cast(nn.Linear(HIDDEN, HIDDEN)))
        self.last = Cast(nn.Linear(HIDDEN, 4))

    def outputs(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.branch:
            hidden = hidden + self.side(hidden)
        return self.last(self._middle(self.middle, hidden))


class OwnParams(Trained):
    """The top module has params of its own, one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(HIDDEN))
        self.first = Cast(nn.Linear(WIDTH, HIDDEN, bias=False))
        self.last = Cast(nn.Linear(HIDDEN, 6))

    def outputs(self, x: Tensor) -> Tensor:
        return self.last(functional.gelu(self.first(x) * self.scale + self.shift)) * self.scale


class Hollow(Trained):
    """A param without elements has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, HIDDEN))
        self.first = Cast(nn.Linear(WIDTH, HIDDEN))
        self.last = Cast(nn.Linear(HIDDEN, 4))

    def outputs(self, x: Tensor) -> Tensor:
        return self.last(functional.gelu(self.first(x) + self.nothing.sum(0)))


class PartlyFrozen(Trained):
    """The layer in the middle is frozen from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Cast(nn.Linear(WIDTH, HIDDEN))
        self.side = Cast(nn.Linear(HIDDEN, HIDDEN)).requires_grad_(False)
        self.last = Cast(nn.Linear(HIDDEN, 5))

    def outputs(self, x: Tensor) -> Tensor:
        return self.last(functional.gelu(self.side(self.first(x))))


class WeightNormed(Trained):
    """The weight of the last layer is computed from two params."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Cast(nn.Linear(WIDTH, HIDDEN))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, 5))

    def outputs(self, x: Tensor) -> Tensor:
        return self.last(functional.gelu(self.first(x)).to(self.last.weight.dtype))


class Strided(Trained):
    """A module buffer is every second column of a tensor, of which another one is the rest."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(HIDDEN, 2 * HIDDEN)
        self.register_buffer("even", table[:, ::2])
        self.register_buffer("odd", table[:, 1::2])
        self.first = Cast(nn.Linear(WIDTH, HIDDEN))
        self.last = Cast(nn.Linear(HIDDEN, 5))

    def outputs(self, x: Tensor) -> Tensor:
        hidden = self.first(x).float()
        return self.last(functional.gelu(hidden @ self.even.float() - hidden @ self.odd.float()))


def make(kind: type[Trained], dtype: str, seed: int) -> Trained:
    """A new model.

    Args:
        kind: one of the classes above.
        dtype: of its params; "mixed" for bf16 with norms in fp32. BatchNorm stays in fp32.
        seed: of its initial weights.
    """
    torch.manual_seed(seed)
    model = kind()
    model.to(torch.bfloat16 if dtype == "mixed" else getattr(torch, dtype))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d) or (
            dtype == "mixed" and isinstance(module, nn.LayerNorm)
        ):
            module.float()
    return model
