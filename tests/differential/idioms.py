"""What training scripts do between the calls of a training loop: the alphabet of the programs.

Each idiom is a few lines of plain torch. They use `model`, `optimizer`, `rank`, `size`, `world`,
and `{n}`, a small number of the program that tells which param, rank or value is meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["IDIOMS", "Idiom", "Place", "Refusable"]


class Place(Enum):
    """Where in a program an idiom may stand."""

    #: Before `distribute`, behind the optimizer.
    START = "start"
    #: Right behind `distribute`.
    READY = "ready"
    #: Before the forward passes of an iteration.
    WEIGHTS = "weights"
    #: Between backward and step.
    GRADS = "grads"
    #: Behind the step.
    AFTER = "after"


class Refusable(Enum):
    """Where an error of ours is as good as the right result."""

    NEVER = "never"
    ALWAYS = "always"
    #: On more than one rank, where `p.grad` is not the average.
    SEVERAL_RANKS = "several ranks"
    #: With `overlap_grad_reduce`, where communication of the gradient has begun.
    OVERLAP = "overlap"


@dataclass(frozen=True)
class Idiom:
    """Lines of a program."""

    places: tuple[Place, ...]  # where they may stand
    text: str  # of the lines
    refusable: Refusable = Refusable.NEVER  # see `Refusable`
    kinds: tuple[str, ...] = ()  # the models that have what the lines need; all where empty
    # the dtypes of models for which the lines are right; all where empty
    dtypes: tuple[str, ...] = ()
    # further requirements on the program: "one phase", "betas", "no loss scale", "takes fractions"
    # (torch's other optimizers raise where the lr is a Fraction), "no scheduler"
    # (torch's own fail where a group is added), "not reentrant" (torch refuses such a backward),
    # "not fused" (torch's fused kernels take tensors of other strides for the same ones), "not
    # drawn" for those that other idioms cannot stand beside
    needs: tuple[str, ...] = ()


_START, _WEIGHTS, _GRADS, _AFTER = (
    (Place.START,),
    (Place.READY, Place.WEIGHTS),
    (Place.GRADS,),
    (Place.AFTER,),
)
_ANY = (*_WEIGHTS, *_AFTER)
_UNIFORM = ("float32", "bfloat16")
_FIXED, _SEVERAL, _OVERLAP = Refusable.ALWAYS, Refusable.SEVERAL_RANKS, Refusable.OVERLAP

_CHANGED_WEIGHTS = {
    "load_state_dict": Idiom(
        _ANY,
        """
        state = model.state_dict()
        for name, p in model.named_parameters():
            state[name] = noise(p.shape, {n}, 1).to(p.dtype) / 2
        model.load_state_dict(state)
        """,
    ),
    "load_one_weight": Idiom(
        _ANY,
        """
        name, p = list(model.named_parameters())[{n} % len(list(model.parameters()))]
        model.load_state_dict({{name: noise(p.shape, {n}, 2).to(p.dtype)}}, strict=False)
        """,
    ),
    "init": Idiom(
        _ANY,
        "torch.nn.init.uniform_(pick(model, {n}), -0.5, 0.5, "
        "generator=torch.Generator().manual_seed({n}))",
        # torch has no uniform_ for fp16 on every CPU.
        dtypes=("float32", "bfloat16", "mixed"),
    ),
    "data_copy": Idiom(_ANY, "pick(model, {n}).data.copy_(noise(pick(model, {n}).shape, {n}, 3))"),
    "data_clamp": Idiom(_ANY, "for p in model.parameters():\n    p.data.clamp_(-0.2, 0.2)"),
    "data_fill_before": Idiom(_START, "pick(model, {n}).data.fill_(0.25)"),
    "new_data": Idiom(_ANY, "p = pick(model, {n})\np.data = noise(p.shape, {n}, 4).to(p.dtype)"),
    "new_data_same_values": Idiom(
        _ANY, "for p in model.parameters():\n    p.data = p.data.clone()"
    ),
    "vector_to_parameters": Idiom(
        _ANY,
        """
        vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
        """,
        kinds=("Perceptron", "Tied", "Convolution", "Branching", "OwnParams", "PartlyFrozen"),
        dtypes=_UNIFORM,
    ),
    "round_trip": Idiom(
        _ANY,
        """
        dtype = next(model.parameters()).dtype
        model.bfloat16().to(dtype) if dtype == torch.float32 else model.float().to(dtype)
        """,
        # torch converts gradients that are there as well; here they are not to be touched.
        _SEVERAL,
        kinds=(
            "Perceptron",
            "Tied",
            "Convolution",
            "Recurrent",
            "Branching",
            "OwnParams",
            "PartlyFrozen",
        ),
        dtypes=("float32", "bfloat16", "float16"),
    ),
    "one_element": Idiom(
        _ANY, "p = pick(model, {n})\nwith torch.no_grad():\n    p[(0,) * p.dim()] = 0.25"
    ),
    "all_times": Idiom(
        _ANY, "with torch.no_grad():\n    for p in model.parameters():\n        p.mul_(0.75)"
    ),
    "add_to_weight": Idiom(_ANY, "with torch.no_grad():\n    pick(model, {n}).add_(0.125)"),
    "foreach_weights": Idiom(
        _ANY, "with torch.no_grad():\n    torch._foreach_mul_(list(model.parameters()), 0.5)"
    ),
    "alias_of_data": Idiom(
        _ANY,
        """
        aliases.extend(p.data for p in model.parameters() if not aliases)
        torch._foreach_mul_(aliases, 0.5)
        """,
        # Behind `p.data = ...` torch's alias is of another tensor than ours.
        needs=("not drawn",),
    ),
    "other_strides": Idiom(
        _ANY,
        """
        for p in model.parameters():
            p.data = p.data.t().contiguous().t() if p.dim() == 2 else p.data
        """,
        needs=("not fused",),
    ),
    "other_strides_before": Idiom(
        _START,
        """
        for p in model.parameters():
            p.data = p.data.t().contiguous().t() if p.dim() == 2 else p.data
        """,
        needs=("not fused",),
    ),
    "memory_shared": Idiom(_ANY, "model.share_memory()", _FIXED),
    "memory_shared_before": Idiom(_START, "model.share_memory()", _FIXED),
    "aliases_before": Idiom(
        _START,
        """
        # Ours are told in a warning that these keep the values of now.
        kept = [p.data for p in model.parameters()]
        """,
        needs=("not drawn",),
    ),
    "reload": Idiom(_WEIGHTS, "optimizer.reload_model_params()", needs=("not drawn",)),
    "model_then_optimizer_back": Idiom(
        _AFTER,
        """
        if kept is not None:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        """,
        needs=("not drawn",),
    ),
    "optimizer_then_model_back": Idiom(
        _AFTER,
        """
        if kept is not None:
            optimizer.load_state_dict(kept[1])
            model.load_state_dict(kept[0])
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        """,
        needs=("not drawn",),
    ),
    "optimizer_back": Idiom(
        _AFTER,
        """
        if kept is not None:
            optimizer.load_state_dict(kept)
        kept = copy.deepcopy(optimizer.state_dict())
        """,
        needs=("not drawn",),
    ),
    "weights_on_one_rank": Idiom(
        _ANY,
        "if rank == {n} % size:\n    with torch.no_grad():\n        pick(model, {n}).mul_(0.5)",
        _FIXED,
        needs=("not drawn",),
    ),
    "rewind": Idiom(
        _ANY,
        """
        if kept is not None:
            model.load_state_dict(kept)
        kept = {{key: value.clone() for key, value in model.state_dict().items()}}
        """,
    ),
}

_CHANGED_MODULES = {
    "layer_scripted": Idiom(
        _START,
        "model.last.layer = torch.jit.script(model.last.layer)",
        kinds=("Perceptron",),
        # A script module cannot be pickled, converted or frozen.
        needs=("not drawn",),
    ),
    "load_state_dict_assign": Idiom(
        _WEIGHTS,
        """
        state = {{key: value.clone() for key, value in model.state_dict().items()}}
        model.load_state_dict(state, assign=True)
        """,
        _FIXED,
    ),
    "replaced_parameter": Idiom(
        _WEIGHTS,
        "model.last.layer.weight = torch.nn.Parameter(model.last.layer.weight.detach().clone())",
        _FIXED,
        kinds=("Perceptron", "Normed", "Recurrent", "Branching", "OwnParams", "PartlyFrozen"),
    ),
    "tied_by_data": Idiom(
        _WEIGHTS,
        "model.side.layer.weight.data = model.middle[1].layer.weight.data",
        _FIXED,
        kinds=("Branching",),
    ),
    "untied": Idiom(
        _WEIGHTS,
        "model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())",
        _FIXED,
        kinds=("Tied",),
    ),
    "parametrization_removed": Idiom(
        (Place.WEIGHTS,),
        """
        if torch.nn.utils.parametrize.is_parametrized(model.last):
            torch.nn.utils.parametrize.remove_parametrizations(model.last, "weight")
        """,
        _FIXED,
        kinds=("WeightNormed",),
    ),
    "module_deleted": Idiom(
        _WEIGHTS,
        "model.branch = False\noptimizer.zero_grad()\ndel model.side",
        kinds=("Branching",),
        needs=("not drawn",),
    ),
    "other_dtype": Idiom(_WEIGHTS, "model.to(torch.float64)", _FIXED, dtypes=("float32",)),
    "other_module_buffers": Idiom(
        _START, 'model.register_buffer("extra", torch.zeros(2 + rank))', _FIXED
    ),
    "other_frozen_params": Idiom(
        _START,
        'model.register_parameter("extra", torch.nn.Parameter(torch.zeros(2 + rank), '
        "requires_grad=False))",
        _FIXED,
    ),
    "lazy_layer": Idiom(_START, "model.lazy = torch.nn.LazyLinear(3)", _FIXED),
    "integer_param": Idiom(
        _START,
        "model.integer = torch.nn.Parameter(torch.arange(3) + rank, requires_grad=False)",
        needs=("not drawn",),
    ),
    "freeze": Idiom(
        _ANY,
        # The first param stays: a loss that depends on no trained param has no backward.
        "others = list(model.parameters())[1:]\nothers[{n} % len(others)].requires_grad_(False)",
    ),
    "freeze_before": Idiom(
        _START,
        # The first param stays: a loss that depends on no trained param has no backward.
        "others = list(model.parameters())[1:]\nothers[{n} % len(others)].requires_grad_(False)",
    ),
    "unfreeze": Idiom(_ANY, "for p in model.parameters():\n    p.requires_grad_(True)"),
    "side_on": Idiom(_ANY, "model.branch = True", kinds=("Branching",)),
    "side_off": Idiom(_ANY, "model.branch = False", kinds=("Branching",)),
    "side_on_one_rank": Idiom(_ANY, "model.branch = rank == {n} % size", kinds=("Branching",)),
}

_AS_AN_OPTIMIZER = {
    "lr": Idiom(_ANY, 'for group in optimizer.param_groups:\n    group["lr"] *= 0.5'),
    "lr_of_last_group": Idiom(_ANY, 'optimizer.param_groups[-1]["lr"] = 0.005'),
    "weight_decay": Idiom(
        _ANY, 'for group in optimizer.param_groups:\n    group["weight_decay"] = 0.2'
    ),
    "lr_of_numpy": Idiom(
        _ANY,
        """
        import numpy
        for group in optimizer.param_groups:
            group["lr"] = numpy.float32(group["lr"])
        """,
        needs=("one phase", "no scheduler"),  # torch.load refuses numpy's numbers
    ),
    "lr_fraction": Idiom(
        _ANY,
        """
        from fractions import Fraction
        for group in optimizer.param_groups:
            group["lr"] = Fraction(float(group["lr"])).limit_denominator(1000)
        """,
        needs=("one phase", "no scheduler", "takes fractions"),
    ),
    "lr_array": Idiom(
        _ANY,
        'import numpy\noptimizer.param_groups[0]["lr"] = numpy.array(0.015)',
        _FIXED,
        needs=("one phase", "no scheduler", "not drawn"),
    ),
    "decay_false": Idiom((*_START, *_ANY), 'optimizer.param_groups[0]["weight_decay"] = False'),
    "own_option": Idiom(
        (*_START, *_ANY), 'optimizer.param_groups[0]["scales"] = torch.tensor([1.0, {n}])'
    ),
    "betas": Idiom(
        _ANY,
        'for group in optimizer.param_groups:\n    group["betas"] = (0.5, 0.75)',
        needs=("betas",),
    ),
    # Adagrad makes its state in the constructor, and older releases of torch nowhere else.
    "state_replaced": Idiom(
        _ANY,
        """
        if "initial_accumulator_value" not in optimizer.param_groups[0]:
            optimizer.state = collections.defaultdict(dict)
        """,
    ),
    "state_popped": Idiom(
        _ANY,
        """
        if "initial_accumulator_value" not in optimizer.param_groups[0]:
            optimizer.state.pop(pick(model, {n}), None)
        """,
    ),
    "state_of_each_group_emptied": Idiom(
        _ANY,
        """
        for group in optimizer.param_groups:
            if "initial_accumulator_value" not in group:
                optimizer.state[group["params"][0]] = {{}}
        """,
    ),
    "moments_scaled": Idiom(
        _AFTER,
        """
        for state in list(optimizer.state.values()):
            if torch.is_tensor(state.get("exp_avg")):
                state["exp_avg"].mul_(0.5)
        """,
        # It is in shards, and on one rank a param that was never updated shows zeros.
        _FIXED,
    ),
    "groups_replaced": Idiom(
        _ANY, "optimizer.param_groups = [{{**group}} for group in optimizer.param_groups]", _FIXED
    ),
    "add_param_group_frozen": Idiom(
        (Place.WEIGHTS,),
        """
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(p is model.side.layer.weight for p in held):
            model.side.requires_grad_(True)
            optimizer.add_param_group({{"params": list(model.side.parameters()), "lr": 0.01}})
        """,
        kinds=("PartlyFrozen",),
        needs=("one phase", "only trained", "no scheduler"),
    ),
    "add_param_group_new": Idiom(
        (Place.WEIGHTS,),
        """
        torch.manual_seed({n} + rank)
        added = Cast(torch.nn.Linear(HIDDEN, HIDDEN)).to(next(model.parameters()).dtype)
        model.middle.append(added)
        optimizer.add_param_group({{"params": list(added.parameters())}})
        """,
        kinds=("Perceptron", "Tied", "Branching"),
        needs=("one phase", "not compiled", "no scheduler"),
    ),
    "second_optimizer": Idiom(
        _WEIGHTS,
        """
        optimizer.release()
        optimizer.zero_grad()
        adamw = torch.optim.AdamW(model.parameters(), lr=0.002, eps=1e-2)
        optimizer = world.distribute(model, adamw)
        """,
        needs=("not drawn",),
    ),
    "param_groups_params": Idiom(
        _ANY,
        """
        names = {{p: name for name, p in model.named_parameters()}}
        groups = optimizer.param_groups
        world.see("groups", [[names.get(p) for p in group["params"]] for group in groups])
        """,
    ),
    "state_dict_back": Idiom(_ANY, "optimizer.load_state_dict(optimizer.state_dict())"),
    "state_dict_saved": Idiom(
        _ANY,
        """
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file))
        """,
        _SEVERAL,
    ),
    "state_through_torch": Idiom(
        _ANY,
        "before = list(counted)\nworld.through_torch(model, optimizer, {n})\ncounted[:] = before  "
        "# of hooks",
    ),
    "optimizer_deepcopy": Idiom(_ANY, "copy.deepcopy(optimizer)", _FIXED),
    "optimizer_pickle": Idiom(_ANY, "pickle.dumps(optimizer)", _FIXED),
    "step_hooks": Idiom(
        _WEIGHTS,
        """
        optimizer.register_step_pre_hook(Note(counted, "before the step"))
        optimizer.register_step_post_hook(Note(counted, "after the step"))
        """,
    ),
    "state_dict_hooks": Idiom(
        _WEIGHTS,
        """
        optimizer.register_state_dict_pre_hook(Note(counted, "before the state dict"))
        optimizer.state_dict()
        """,
    ),
    "repr": Idiom(_ANY, 'world.see("repr", type(repr(optimizer)).__name__)'),
    "last_step": Idiom(
        _AFTER,
        'world.see("updated", bool(optimizer.last_step and optimizer.last_step.updated))',
        needs=("stepped",),
    ),
}

_COPIES_AND_READS = {
    "model_deepcopy": Idiom(
        _ANY,
        """
        twin = copy.deepcopy(model)
        twin(batch(rank, 50, {n})).backward()
        world.see("twin", list(twin.state_dict().values()))
        """,
    ),
    "model_pickle": Idiom(
        _ANY,
        """
        twin = pickle.loads(pickle.dumps(model))
        world.see("twin", twin(batch(rank, 51, {n})))
        """,
        kinds=(
            "Perceptron",
            "Normed",
            "Tied",
            "Convolution",
            "Recurrent",
            "Branching",
            "OwnParams",
            "Strided",
        ),
    ),
    "evaluate": Idiom(
        _ANY,
        """
        model.eval()
        with torch.no_grad():
            world.see("evaluated", model(batch(rank, 52, {n})))
        model.train()
        """,
    ),
    "evaluate_loss": Idiom(
        _ANY,
        'with torch.inference_mode():\n    world.see("evaluated", model.loss(batch(7, 53, {n})))',
    ),
    "see_weights": Idiom(_ANY, 'world.see("weights", list(model.parameters()))'),
    "see_state_dict": Idiom(_ANY, 'world.see("weights", model.state_dict())'),
    "ema": Idiom(
        _AFTER,
        """
        for name, p in model.named_parameters():
            ema[name] = ema.get(name, torch.zeros(p.shape)) * 0.5 + p.detach().float() * 0.5
        """,
    ),
    "swa": Idiom(
        _AFTER,
        """
        averaged.append(averaged[-1] if averaged else torch.optim.swa_utils.AveragedModel(model))
        averaged[-1].update_parameters(model)
        world.see("averaged", list(averaged[-1].parameters()))
        """,
        # A model whose dtype is changed midway is another than its average.
        needs=("not drawn",),
    ),
    "one_param_saved": Idiom(
        _ANY,
        """
        file = io.BytesIO()
        torch.save(pick(model, {n}), file)
        world.see("saved alone", file.tell() < 3000 + 4 * pick(model, {n}).numel())
        """,
    ),
    "weight_norm_in_a_fork": Idiom(
        _ANY,
        """
        norms = lambda: sum(float(p.detach().float().norm()) for p in model.parameters())
        world.see("norm", in_fork(norms))
        """,
    ),
    "dropped_in_a_fork": Idiom(
        _ANY,
        """
        def drop():
            nonlocal optimizer
            optimizer = None
            gc.collect()
            return sum(float(p.detach().float().norm()) for p in model.parameters())
        world.see("norm", in_fork(drop))
        """,
    ),
    "weights_read_in_script": Idiom(
        _ANY, 'world.see("norms", norms_in_script([*model.parameters()]))'
    ),
    "layer_in_script": Idiom(
        _ANY,
        """
        layer = model.last.layer
        x = noise((2, layer.weight.shape[1]), {n}, 5).to(layer.weight.dtype)
        world.see("layer", torch.jit.script(layer)(x))
        """,
        kinds=("Perceptron", "Branching"),
        # TorchScript takes neither hooks nor parametrizations.
        needs=("not drawn",),
    ),
    "weight_norm": Idiom(
        _ANY, 'world.see("norm", sum(float(p.detach().float().norm()) for p in model.parameters()))'
    ),
}

_GRADIENTS = {
    "grad_before": Idiom(
        _START, "for p in model.parameters():\n    p.grad = torch.full_like(p, 0.125)"
    ),
    "backward_before": Idiom(
        _START, "model(batch(rank, 54, {n})).backward()", needs=("no loss scale",)
    ),
    "zero_grad": Idiom(_WEIGHTS, "optimizer.zero_grad()"),
    "clip_grad_norm": Idiom(
        _GRADS, 'world.see("norm", optimizer.clip_grad_norm_(0.25))', needs=("no loss scale",)
    ),
    "clip_grad_norm_of_torch": Idiom(
        _GRADS,
        """
        world.average_now()
        # In the dtype of the gradients: that of the params where a program has assigned them all.
        world.see("norm", float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)))
        """,
        _SEVERAL,
        needs=("no loss scale",),
    ),
    "clip_grad_value": Idiom(
        _GRADS,
        "world.average_now()\ntorch.nn.utils.clip_grad_value_(model.parameters(), 0.0625)",
        _SEVERAL,
        needs=("no loss scale",),
    ),
    "grad_written": Idiom(
        _GRADS,
        "p = pick(model, {n})\np.grad = grad_like(p, {n}, rank)",
        _OVERLAP,
        needs=("no loss scale",),
    ),
    "grad_of_other_strides": Idiom(
        _GRADS,
        """
        for p in model.parameters():
            p.grad = grad_like(p, {n}, rank).mT.contiguous().mT if p.dim() > 1 else p.grad
        """,
        _OVERLAP,
        needs=("no loss scale",),
    ),
    "grad_written_all": Idiom(
        _GRADS,
        "for p in model.parameters():\n    p.grad = grad_like(p, {n}, rank)",
        _OVERLAP,
        needs=("no loss scale",),
    ),
    "grad_by_autograd": Idiom(
        _GRADS,
        """
        trained = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(model(batch(rank, 55, {n})), trained, allow_unused=True)
        for p, grad in zip(trained, found):
            p.grad = None if grad is None else grad.to(getattr(p, "grad_dtype", None) or p.dtype)
        """,
        _OVERLAP,
        needs=("no loss scale", "not reentrant"),
    ),
    "grad_of_autograd": Idiom(
        (*_GRADS, *_AFTER),
        """
        trained = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(model(batch(rank, 57, {n})), trained, allow_unused=True)
        """,
        needs=("not reentrant",),
    ),
    "grad_penalty": Idiom(
        _GRADS,
        """
        trained = [p for p in model.parameters() if p.requires_grad]
        loss = model(batch(rank, 58, {n}))
        found = torch.autograd.grad(loss, trained, allow_unused=True, create_graph=True)
        sum(grad.float().square().sum() for grad in found if grad is not None).backward()
        """,
        _OVERLAP,
        needs=("no loss scale", "not reentrant", "not compiled"),
    ),
    "grad_dropped": Idiom(_GRADS, "pick(model, {n}).grad = None", _OVERLAP),
    "grad_dropped_on_one_rank": Idiom(
        _GRADS, "if rank == {n} % size:\n    pick(model, {n}).grad = None", _OVERLAP
    ),
    "grads_scaled": Idiom(
        _GRADS,
        """
        world.average_now()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        """,
        _SEVERAL,
    ),
    "grads_read_in_script": Idiom(
        _GRADS,
        """
        world.average_now()
        present = [p.grad for p in model.parameters() if p.grad is not None]
        world.see("norms", norms_in_script(present))
        """,
        _SEVERAL,
    ),
    "grads_read": Idiom(
        _GRADS,
        """
        world.average_now()
        world.see("grads", [None if p.grad is None else p.grad.float() for p in model.parameters()])
        """,
        _SEVERAL,
    ),
    # A param without elements is not told of over ranks, see docs/torch.md.
    "grad_is_none": Idiom(
        (*_GRADS, *_AFTER),
        'world.see("no grad", [p.grad is None for p in model.parameters() if p.numel()])',
    ),
    "full_grad": Idiom(
        (*_GRADS,),
        """
        held = [p for group in optimizer.param_groups for p in group["params"]]
        trained = [p for p in held if p.requires_grad]
        world.see("grad", optimizer.full_grad(trained[{n} % len(trained)]))
        """,
    ),
    "param_hook": Idiom(
        _ANY, "pick(model, {n}).register_hook(lambda grad: grad * 2)", needs=("not compiled",)
    ),
    "param_hook_before": Idiom(_START, "pick(model, {n}).register_hook(lambda grad: grad * 2)"),
    "accumulated_hook": Idiom(
        (*_START, *_WEIGHTS),
        'pick(model, {n}).register_post_accumulate_grad_hook(Note(counted, "accumulated"))',
    ),
    "accumulated_hook_edits": Idiom(
        (*_START, *_WEIGHTS),
        "pick(model, {n}).register_post_accumulate_grad_hook(halve_grad)",
        _SEVERAL,
        needs=("no overlap",),
    ),
    "grad_of_part": Idiom(
        _GRADS,
        """
        (trained := pick(model, {n})).grad = None
        model(batch(rank, 56, {n})).backward(inputs=[trained])
        """,
        _OVERLAP,
        needs=("no loss scale", "not reentrant"),
    ),
    "module_hooks": Idiom(
        (*_START, *_WEIGHTS),
        """
        model.register_forward_hook(Note(counted, "forward"))
        model.register_full_backward_hook(Note(counted, "backward"))
        """,
        needs=("not compiled",),
    ),
}

#: By name.
IDIOMS: dict[str, Idiom] = {
    **_CHANGED_WEIGHTS,
    **_CHANGED_MODULES,
    **_AS_AN_OPTIMIZER,
    **_COPIES_AND_READS,
    **_GRADIENTS,
}
