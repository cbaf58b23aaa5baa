"""A program as Python text, which the ranks and the reference execute."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from tests.differential.idioms import IDIOMS
from tests.differential.programs import Action, Iteration, Microbatch, Phase, Program

__all__ = ["GROUPS", "OPTIMIZERS", "SCHEDULERS", "ZERO", "namespace_of", "program_text", "written"]

#: eps is large so that rounding in a gradient near zero does not become a step of lr; see
#: compare.py.
OPTIMIZERS = {
    "AdamW": "AdamW({params}, lr={lr}, weight_decay=0.1, eps=1e-2)",
    "AdamW fused": "AdamW({params}, lr={lr}, weight_decay=0.1, eps=1e-2, fused=True)",
    "Adam": "Adam({params}, lr={lr}, weight_decay=0.1, eps=1e-2)",
    "Adam amsgrad": "Adam({params}, lr={lr}, eps=1e-2, amsgrad=True, maximize=True)",
    "NAdam": "NAdam({params}, lr={lr}, weight_decay=0.1, eps=1e-2)",
    "RAdam": "RAdam({params}, lr={lr}, weight_decay=0.1, eps=1e-2)",
    "Adamax": "Adamax({params}, lr={lr}, weight_decay=0.1, eps=1e-2)",
    "SGD": "SGD({params}, lr={lr}, weight_decay=0.1)",
    "SGD momentum": "SGD({params}, lr={lr}, weight_decay=0.1, momentum=0.9, nesterov=True)",
    "SGD dampening": "SGD({params}, lr={lr}, momentum=0.9, dampening=0.5)",
    "RMSprop": "RMSprop({params}, lr={lr}, weight_decay=0.1, eps=1e-1, momentum=0.5)",
    "Adagrad": "Adagrad({params}, lr={lr}, weight_decay=0.1, eps=1e-1, lr_decay=0.1)",
    "Adadelta": "Adadelta({params}, lr={lr}, weight_decay=0.1, eps=1e-2)",
    "ASGD": "ASGD({params}, lr={lr}, weight_decay=0.1, t0=2)",
    "Counting": "Counting({params}, lr={lr}, weight_decay=0.1)",  # of models.py
}

GROUPS = {
    "one": "model.parameters()",
    "named": "model.named_parameters()",
    "trained": "[p for p in model.parameters() if p.requires_grad]",
    "two": """[
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.01},
    ]""",
    "each": '[{"params": [p], "lr": 0.01 + 0.01 * (i % 3)} for i, p in '
    "enumerate(model.parameters())]",
    "some": "list(model.parameters())[:-1]",
}

SCHEDULERS = {
    "StepLR": "StepLR({optimizer}, step_size=2, gamma=0.5)",
    "LambdaLR": "LambdaLR({optimizer}, lambda step: 1 / (1 + step))",
    "OneCycleLR": "OneCycleLR({optimizer}, max_lr=0.04, total_steps=40, cycle_momentum={cycles})",
    "CosineAnnealingLR": "CosineAnnealingLR({optimizer}, T_max=5)",
}

ZERO = {
    "optimizer": "optimizer.zero_grad()",
    "optimizer, not to None": "optimizer.zero_grad(set_to_none=False)",
    "model": "model.zero_grad()",
    "model, not to None": "model.zero_grad(set_to_none=False)",
    "None for each": "for p in model.parameters():\n    p.grad = None",
    "zero_ of "
    "each": "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.zero_()",
    "kept": "",
}

_IMPORTS = "import collections\nimport copy\nimport gc\nimport io\nimport pickle\n\nimport torch\n"
_ENTRIES = {"model": "forward", "forward": "model.forward", "loss": "model.loss"}


def program_text(program: Program) -> str:
    """The phases of a program as functions of a world, see `ReferenceWorld`."""
    phases = [_phase_text(program, number, phase) for number, phase in enumerate(program.phases)]
    return "\n\n".join([_IMPORTS, *phases])


def namespace_of(text: str) -> dict[str, Any]:
    """What the text of a program defines, with models.py around it."""
    import tests.differential.models as models

    namespace: dict[str, Any] = {**vars(models), "__name__": "tests.differential.program"}
    exec(compile(text, "<program>", "exec"), namespace)
    return namespace


def _phase_text(program: Program, number: int, phase: Phase) -> str:
    lines = [*_beginning(program, number)]
    for place, iteration in enumerate(phase.iterations):
        lines += ["", f"# iteration {place}", *_iteration(program, iteration, 100 * number + place)]
    if number + 1 < len(program.phases):
        lines += ["", *_checkpoint(program, number)]
    lines += ["", *_ending()]
    return f"def phase_{number}(world):\n" + textwrap.indent("\n".join(lines), "    ")


def _beginning(program: Program, number: int) -> Iterator[str]:
    seed = f"{3 + number} + rank" if program.other_seeds else f"{3 + number}"
    yield "rank, size = world.rank, world.size"
    yield "counted, kept, ema, aliases, averaged = [], None, {}, [], []"
    yield f"model = make({program.kind}, {program.dtype!r}, seed={seed})"
    if program.recompute:
        yield f"model.recompute = {program.recompute!r}"
    yield "forward = model"
    if program.compiled == "before":
        yield 'forward = torch.compile(model, backend="eager")'
    if number:
        yield f'model.load_state_dict(torch.load(world.folder / "weights{number - 1}"))'
    yield f"optimizer = {_optimizer(program)}"
    if program.scheduler_before and program.scheduler:
        yield f"scheduler = {_scheduler(program)}"
    yield from _actions(program.start)
    options = "".join(f", {name}={value!r}" for name, value in program.options)
    yield f"optimizer = world.distribute(model, optimizer{options})"
    yield from _built_afterwards(program)
    yield from _actions(program.ready if not number else ())
    if number:
        yield from _resumed(program, number - 1)


def _built_afterwards(program: Program) -> Iterator[str]:
    if program.compiled == "after":
        yield 'forward = torch.compile(model, backend="eager")'
    if program.compiled == "method":
        yield 'model.compile(backend="eager")'
    if program.scheduler and not program.scheduler_before:
        yield f"scheduler = {_scheduler(program)}"
    if program.grad_scaler:
        yield 'scaler = torch.amp.GradScaler("cpu", init_scale=64.0)'


def _optimizer(program: Program) -> str:
    # A step that is small against the spacing of 16-bit weights would be lost in the tolerance.
    lr = "0.02" if program.dtype == "float32" else "0.05"
    text = OPTIMIZERS[program.optimizer].format(params=GROUPS[program.groups], lr=lr)
    return text if program.optimizer == "Counting" else f"torch.optim.{text}"


def _scheduler(program: Program) -> str:
    has_momentum = program.optimizer not in ("Adagrad", "Adadelta", "ASGD", "Counting")
    text = SCHEDULERS[program.scheduler or ""].format(optimizer="optimizer", cycles=has_momentum)
    return f"torch.optim.lr_scheduler.{text}"


def _checkpoint(program: Program, number: int) -> Iterator[str]:
    yield f'optimizer.save(world.folder / "checkpoint{number}")'
    if program.option.get("async_save"):
        yield "optimizer.finish_saving()"
    yield "if rank == 0:"
    yield f'    torch.save(model.state_dict(), world.folder / "weights{number}")'
    if program.scheduler:
        yield f'    torch.save(scheduler.state_dict(), world.folder / "scheduler{number}")'
    yield 'world.all_ranks("written", None)'


def _resumed(program: Program, number: int) -> Iterator[str]:
    yield f'optimizer.load(world.folder / "checkpoint{number}")'
    if program.scheduler:
        yield (
            f'scheduler.load_state_dict(torch.load(world.folder / "scheduler{number}", '
            "weights_only=False))"
        )


def _ending() -> Iterator[str]:
    yield 'world.see("model", model.state_dict())'
    yield 'world.see("ema", ema)'
    yield 'world.see("hooks", counted)'
    yield 'world.see("lr", [float(group["lr"]) for group in optimizer.param_groups])'


def _actions(actions: tuple[Action, ...]) -> Iterator[str]:
    for action in actions:
        yield f"# {action.name}"
        yield textwrap.dedent(IDIOMS[action.name].text.format(n=action.n)).strip()


def _iteration(program: Program, iteration: Iteration, place: int) -> Iterator[str]:
    yield from _actions(iteration.weights)
    last = len(iteration.microbatches) - 1
    micros = [
        _microbatch(program, micro, place, i) for i, micro in enumerate(iteration.microbatches)
    ]
    if iteration.no_sync:
        micros = [
            text if i == last else _inside("with optimizer.no_sync():", text)
            for i, text in enumerate(micros)
        ]
    if iteration.step == "closure":
        body = ["loss = None", "optimizer.zero_grad()", *micros, "return loss"]
        yield _inside("def closure():", "\n".join(body))
        yield 'world.see("loss of the closure", optimizer.step(closure))'
    else:
        yield from micros
        yield from _actions(iteration.grads)
        yield from _step(program, iteration)
    if program.scheduler and iteration.step != "none":
        yield "scheduler.step()"
    yield from _actions(iteration.after)
    yield ZERO[iteration.zero]


def _inside(head: str, body: str) -> str:
    return f"{head}\n{textwrap.indent(body, '    ')}"


def _microbatch(program: Program, micro: Microbatch, place: int, number: int) -> str:
    lines = [f"loss = {_ENTRIES[micro.entry]}(batch(rank, {place}, {number}))"]
    if micro.infinite is not None:
        lines += [f"if rank == {micro.infinite} % size:", '    loss = loss * float("inf")']
    lines += ['world.see("loss", loss)', f"{_scaled(program, micro)}.backward()"]
    if micro.idle is None:
        return "\n".join(lines)
    # A rank without data leaves the microbatch out; alone it would have nothing to train on.
    return _inside(f"if size == 1 or rank != {micro.idle} % size:", "\n".join(lines))


def _scaled(program: Program, micro: Microbatch) -> str:
    if program.grad_scaler:
        return "scaler.scale(loss)"
    return (
        "optimizer.scale_loss(loss)"
        if program.option.get("loss_scale") and micro.is_scaled
        else "loss"
    )


def _step(program: Program, iteration: Iteration) -> Iterator[str]:
    if iteration.step == "none":
        return
    if iteration.step == "not on one rank":
        yield "if size == 1 or rank != size - 1:\n    optimizer.step()"
    elif program.grad_scaler:
        yield "world.average_now()\nscaler.step(optimizer)\nscaler.update()"
    else:
        yield 'world.see("result of the step", optimizer.step())'
    if iteration.step == "twice":
        yield "optimizer.step()"


def written(program: Program, found: str) -> str:
    """What a failure is reported as: the program as a value, which rerun.py runs again, what it
    does, and why."""
    return f"{program!r}\n\n{program_text(program)}\n\n{found}\n"
