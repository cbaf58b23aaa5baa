"""Pretraining."""

import hashlib
import json

import torch
from torch.nn.parallel import DistributedDataParallel as torchDDP

from megatron import get_args, get_num_microbatches, get_timers, print_rank_last
from megatron.checkpointing import load_checkpoint, save_checkpoint
from megatron.core import mpu, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.initialize import initialize_megatron
from megatron.model import DistributedDataParallel as LocalDDP
from megatron.model import Float16Module
from megatron.optimizer import get_megatron_optimizer
from megatron.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.switches import DEVICE
from megatron.utils import unwrap_model


def pretrain(
    train_valid_test_dataset_provider,
    model_provider,
    model_type,
    forward_step_func,
    extra_args_provider=None,
    args_defaults=None,
):
    """Collective: initializes, builds, loads, trains and saves.

    Args:
        train_valid_test_dataset_provider: from the first iteration to an iterator of microbatches.
        model_provider: from (pre_process, post_process) to a module.
        forward_step_func: from (iterator, model) to (output, function of the output to (loss, what
            to log)).
    """
    initialize_megatron(extra_args_provider, args_defaults)
    args = get_args()
    model, optimizer, opt_param_scheduler = setup_model_and_optimizer(model_provider, model_type)
    iterator = train_valid_test_dataset_provider(args.iteration)
    records = train(forward_step_func, model, optimizer, opt_param_scheduler, iterator)
    if args.curves:
        write_curves(args.curves, records, model, optimizer)
    torch.distributed.barrier()


def get_model(model_provider_func, model_type=ModelType.encoder_or_decoder, wrap_with_ddp=True):
    """[the chunk of this rank], with its wrappers."""
    args = get_args()
    model = model_provider_func(
        pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage()
    )
    model.model_type = model_type
    model.to(DEVICE)
    for param in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    if args.fp16 or args.bf16:
        model = Float16Module(model, args)
    if wrap_with_ddp and args.DDP_impl == "torch":
        model = torchDDP(model, process_group=mpu.get_data_parallel_group())
    elif wrap_with_ddp:
        model = LocalDDP(
            model, args.accumulate_allreduce_grads_in_fp32, args.use_contiguous_buffers_in_local_ddp
        )
    return [model]


def get_optimizer_param_scheduler(optimizer):
    args = get_args()
    return OptimizerParamScheduler(
        optimizer,
        max_lr=args.lr,
        lr_decay_steps=args.train_iters * args.global_batch_size,
        wd=args.weight_decay,
    )


def setup_model_and_optimizer(
    model_provider_func, model_type, no_wd_decay_cond=None, scale_lr_cond=None, lr_mult=1.0
):
    args = get_args()
    model = get_model(model_provider_func, model_type)
    optimizer = get_megatron_optimizer(model, no_wd_decay_cond, scale_lr_cond, lr_mult)
    opt_param_scheduler = get_optimizer_param_scheduler(optimizer)
    if args.load is not None:
        args.iteration = load_checkpoint(model, optimizer, opt_param_scheduler)
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        assert args.DDP_impl == "local", "several stages need --DDP-impl local"
    return model, optimizer, opt_param_scheduler


def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler):
    """Collective: (what to log, 1 if the update was skipped, grad norm, number of zeros)."""
    args, timers = get_args(), get_timers()
    if args.DDP_impl == "local" and args.use_contiguous_buffers_in_local_ddp:
        for partition in model:
            partition.zero_grad_buffer()
    optimizer.zero_grad()
    timers("forward-backward", log_level=1).start(barrier=args.barrier_with_L1_time)
    losses_reduced = get_forward_backward_func()(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=get_num_microbatches(),
        dtype=args.params_dtype,
        tensor_shape=(args.seq_length, args.micro_batch_size, args.hidden_size),
        grad_scaler=optimizer.scale_loss,
        sequence_parallel=args.sequence_parallel,
        timers=None,
    )
    timers("forward-backward").stop()
    if args.nan_at == [args.curr_iteration + 1, args.rank]:
        _put_nan(model)
    skipped_iter, grad_norm, num_zeros_in_grad = _update(model, optimizer, opt_param_scheduler)
    loss_dict = {}
    for key in losses_reduced[0] if mpu.is_pipeline_last_stage(ignore_virtual=True) else ():
        loss_dict[key] = sum(loss[key] for loss in losses_reduced) / len(losses_reduced)
    return loss_dict, skipped_iter, grad_norm, num_zeros_in_grad


def _update(model, optimizer, opt_param_scheduler):
    args, timers = get_args(), get_timers()
    optimizer.reduce_model_grads(args, timers)
    timers("optimizer", log_level=1).start(barrier=args.barrier_with_L1_time)
    update_successful, grad_norm, num_zeros_in_grad = optimizer.step(args, timers)
    timers("optimizer").stop()
    if update_successful:
        optimizer.gather_model_params(args, timers)
        opt_param_scheduler.step(increment=_samples_per_step())
    return int(not update_successful), grad_norm, num_zeros_in_grad


def _samples_per_step():
    args = get_args()
    return get_num_microbatches() * args.micro_batch_size * args.data_parallel_size


def _put_nan(model):
    param = next(param for param in model[0].parameters() if param.requires_grad)
    grad = param.main_grad if hasattr(param, "main_grad") else param.grad
    grad.view(-1)[0] = torch.nan


def train(forward_step_func, model, optimizer, opt_param_scheduler, train_data_iterator):
    """Collective: what was logged, by iteration."""
    args, records = get_args(), []
    for chunk in model:
        chunk.train()
    for iteration in range(args.iteration + 1, args.train_iters + 1):
        args.curr_iteration = iteration - 1  # the number of those before it
        result = train_step(
            forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler
        )
        args.consumed_train_samples += args.global_batch_size
        loss_scale = optimizer.get_loss_scale().item()
        records.append(
            training_log(*result, iteration, optimizer.param_groups[0]["lr"], loss_scale, optimizer)
        )
        leaving = iteration == args.train_iters or (
            args.exit_interval and iteration % args.exit_interval == 0
        )
        if args.save and (leaving or (args.save_interval and iteration % args.save_interval == 0)):
            save_checkpoint(iteration, model, optimizer, opt_param_scheduler)
        if leaving:
            break
    return records


def training_log(
    loss_dict,
    skipped_iter,
    grad_norm,
    num_zeros_in_grad,
    iteration,
    learning_rate,
    loss_scale,
    optimizer,
):
    """Prints a line and returns it as a dict."""
    args = get_args()
    record = {
        "iteration": iteration,
        "loss": next((loss.item() for loss in loss_dict.values()), None),
        "grad_norm": None if grad_norm is None else float(grad_norm),
        "loss_scale": loss_scale,
        "skipped": skipped_iter,
        "num_zeros": None if num_zeros_in_grad is None else int(num_zeros_in_grad),
        "lr": learning_rate,
    }
    if args.log_optimizer_states_to_tensorboard:
        record["optimizer_states"] = _optimizer_states(optimizer)
    if iteration % args.log_interval == 0:
        print_rank_last(" | ".join(f"{key}: {value}" for key, value in record.items()))
    return record


def _optimizer_states(optimizer):
    """Collective: squared norms over all ranks."""
    sums = torch.zeros(3)
    for group in optimizer.param_groups:
        for param in group["params"]:
            sums[0] += torch.norm(optimizer.state[param]["exp_avg_sq"]).item() ** 2
            sums[1] += torch.norm(optimizer.state[param]["exp_avg"]).item() ** 2
            sums[2] += torch.norm(param).item() ** 2
    torch.distributed.all_reduce(sums)
    return dict(zip(("variance_l2", "momentum_l2", "weight_l2"), sums.sqrt().tolist(), strict=True))


def write_curves(filename, records, model, optimizer):
    """Collective: rank 0 writes what the last rank has logged, and what every rank holds."""
    mine = {
        "params": {
            name: _sha256(param) for name, param in unwrap_model(model)[0].named_parameters()
        },
        "optimizer_module": type(optimizer).__module__,
    }
    everyones = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, (records, mine))
    if torch.distributed.get_rank() == 0:
        with open(filename, "w") as file:
            json.dump(
                {"iterations": everyones[-1][0], "ranks": [rank for _, rank in everyones]},
                file,
                indent=1,
            )


def _sha256(param):
    return hashlib.sha256(
        param.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
    ).hexdigest()
