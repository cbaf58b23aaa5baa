"""Checkpoints: a file of the model, and the optimizer in a file a rank or with its tensors gathered
in one."""

import os
import random
import sys

import numpy as np
import torch

from megatron.core import mpu

from .global_vars import get_args
from .switches import FILE_LAYOUT
from .utils import is_rank_0, print_rank_0, unwrap_model


def _common_path(checkpoints_path, iteration):
    """The folder of this tensor and pipeline rank."""
    name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
    return os.path.join(checkpoints_path, f"iter_{iteration:07d}", name)


if FILE_LAYOUT == "per_rank":

    def get_checkpoint_names(checkpoints_path, iteration, use_distributed_optimizer):
        """(file of the model, file of the optimizer), which is one file without the distributed
        optimizer."""
        path = _common_path(checkpoints_path, iteration)
        if not use_distributed_optimizer:
            return (os.path.join(path, "model_optim_rng.pt"),) * 2
        optimizer_path = f"{path}_{mpu.get_data_parallel_rank():03d}"
        return os.path.join(path, "model_rng.pt"), os.path.join(optimizer_path, "optim.pt")

else:

    def get_checkpoint_name(checkpoints_path, iteration):
        return os.path.join(_common_path(checkpoints_path, iteration), "model_optim_rng.pt")

    def get_distributed_optimizer_checkpoint_name(model_checkpoint_name):
        return os.path.join(os.path.dirname(model_checkpoint_name), "distrib_optim.pt")


def get_checkpoint_tracker_filename(checkpoints_path):
    return os.path.join(checkpoints_path, "latest_checkpointed_iteration.txt")


def read_metadata(tracker_filename):
    """Collective: the largest iteration that a rank has read."""
    with open(tracker_filename) as file:
        iteration = torch.tensor([int(file.read())])
    torch.distributed.all_reduce(iteration, op=torch.distributed.ReduceOp.MAX)
    return iteration.item()


def get_rng_state():
    """A list, as of one rank."""
    return [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
        }
    ]


def save_checkpoint(iteration, model, optimizer, opt_param_scheduler):
    """Collective."""
    args = get_args()
    print_rank_0(f"checkpoint of iteration {iteration} goes to {args.save}")
    model_state = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
    model_state["model"] = unwrap_model(model)[0].state_dict_for_save_checkpoint()
    if not args.no_save_rng:
        model_state["rng_state"] = get_rng_state()
    if FILE_LAYOUT == "per_rank":
        _save_per_rank(iteration, model_state, optimizer, opt_param_scheduler)
    else:
        _save_gathered(iteration, model_state, optimizer, opt_param_scheduler)
    torch.distributed.barrier()
    print_rank_0(f"checkpoint of iteration {iteration} is in {args.save}")
    if is_rank_0():
        with open(get_checkpoint_tracker_filename(args.save), "w") as file:
            file.write(str(iteration))
    torch.distributed.barrier()


def _optimizer_state(optimizer, opt_param_scheduler):
    if get_args().no_save_optim:
        return {}
    return {
        "optimizer": optimizer.state_dict(),
        "opt_param_scheduler": opt_param_scheduler.state_dict(),
    }


def _write(state_dict, name):
    os.makedirs(os.path.dirname(name), exist_ok=True)
    torch.save(state_dict, name)


def _save_per_rank(iteration, model_state, optimizer, opt_param_scheduler):
    distributed = get_args().use_distributed_optimizer
    model_name, optim_name = get_checkpoint_names(get_args().save, iteration, distributed)
    first = mpu.get_data_parallel_rank() == 0
    optim_state = _optimizer_state(optimizer, opt_param_scheduler) if first or distributed else {}
    if distributed:
        if first:
            _write(model_state, model_name)
        if optim_state:
            _write(optim_state, optim_name)
    elif first:
        _write({**model_state, **optim_state}, model_name)


def _save_gathered(iteration, model_state, optimizer, opt_param_scheduler):
    name = get_checkpoint_name(get_args().save, iteration)
    if get_args().use_distributed_optimizer:
        os.makedirs(os.path.dirname(name), exist_ok=True)
        optimizer.save_parameter_state(get_distributed_optimizer_checkpoint_name(name))
    if mpu.get_data_parallel_rank() == 0:
        _write({**model_state, **_optimizer_state(optimizer, opt_param_scheduler)}, name)


def _load_base_checkpoint(load_dir):
    """Collective: (state of the model, state of the optimizer, iteration), all None without a
    tracker file."""
    tracker_filename = get_checkpoint_tracker_filename(load_dir)
    if not os.path.isfile(tracker_filename):
        print_rank_0(f"no {tracker_filename}, so nothing is loaded")
        return None, None, None
    iteration = read_metadata(tracker_filename)
    if FILE_LAYOUT == "per_rank":
        distributed = get_args().use_distributed_optimizer
        other, _ = get_checkpoint_names(load_dir, iteration, not distributed)
        assert not os.path.isfile(other), (
            f"{other} was saved {'without' if distributed else 'with'} distopt"
        )
        names = get_checkpoint_names(load_dir, iteration, distributed)
    else:
        names = (get_checkpoint_name(load_dir, iteration),) * 2
    try:
        model_state = torch.load(names[0], map_location="cpu", weights_only=False)
        same = names[0] == names[1]
        optim_state = (
            model_state if same else torch.load(names[1], map_location="cpu", weights_only=False)
        )
    except BaseException as error:  # noqa: BLE001
        print_rank_0(f"no checkpoint can be read, leaving: {error}")
        sys.exit()
    return model_state, optim_state, iteration


def check_checkpoint_args(checkpoint_args):
    args = get_args()
    for name in (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "padded_vocab_size",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
    ):
        saved, given = getattr(checkpoint_args, name), getattr(args, name)
        assert saved == given, f"{name} is {given}, and {saved} in the checkpoint"


def load_checkpoint(model, optimizer, opt_param_scheduler):
    """Collective: the iteration to go on from."""
    args = get_args()
    load_dir = args.load
    model_state, optim_state, saved_iteration = _load_base_checkpoint(load_dir)
    if model_state is None:
        return 0
    iteration = 0 if args.finetune else model_state["iteration"]
    if not args.finetune:
        check_checkpoint_args(model_state["args"])
        args.consumed_train_samples = model_state["args"].consumed_train_samples
    unwrap_model(model)[0].load_state_dict(model_state["model"])
    if not args.finetune and not args.no_load_optim:
        try:
            _load_optimizer(optimizer, opt_param_scheduler, optim_state, load_dir, saved_iteration)
        except KeyError as error:
            print_rank_0(f"the optimizer in {load_dir} has no {error}, leaving")
            sys.exit()
    elif args.fp16 or (args.bf16 and FILE_LAYOUT == "gathered"):
        optimizer.reload_model_params()
    if not args.finetune and not args.no_load_rng:
        _load_rng_state(model_state, load_dir)
    torch.distributed.barrier()
    print_rank_0(f"going on from {load_dir}, iteration {iteration}")
    return iteration


def _load_optimizer(optimizer, opt_param_scheduler, state_dict, load_dir, iteration):
    optimizer.load_state_dict(state_dict["optimizer"])
    if FILE_LAYOUT == "gathered" and get_args().use_distributed_optimizer:
        name = get_checkpoint_name(load_dir, iteration)
        optimizer.load_parameter_state(get_distributed_optimizer_checkpoint_name(name))
    opt_param_scheduler.load_state_dict(state_dict["opt_param_scheduler"])


def _load_rng_state(state_dict, load_dir):
    try:
        rng_state = state_dict["rng_state"][0]
    except KeyError:
        print_rank_0(f"no random state in {load_dir}, leaving")
        sys.exit()
    random.setstate(rng_state["random_rng_state"])
    np.random.set_state(rng_state["np_rng_state"])
    torch.set_rng_state(rng_state["torch_rng_state"])
