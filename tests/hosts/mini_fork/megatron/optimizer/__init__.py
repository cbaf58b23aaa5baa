"""Makes the optimizer that the arguments ask for."""

from megatron import get_args

from .distrib_optimizer import DistributedOptimizer
from .fused_adam import SGD, Adam  # noqa: F401
from .grad_scaler import ConstantGradScaler, DynamicGradScaler
from .optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer


def get_param_groups(modules, no_weight_decay_cond, scale_lr_cond, lr_mult):
    """Up to four groups: with and without weight decay, with and without `lr_mult`."""
    members = {
        "wd_no_scale_lr": (1.0, 1.0, []),
        "wd_scale_lr": (1.0, lr_mult, []),
        "no_wd_no_scale_lr": (0.0, 1.0, []),
        "no_wd_scale_lr": (0.0, lr_mult, []),
    }
    for module in modules:
        for name, param in module.named_parameters():
            if not param.requires_grad:
                continue
            if no_weight_decay_cond is not None:
                no_wd = no_weight_decay_cond(name, param)
            else:
                no_wd = name.endswith(".bias") or param.ndim == 1
            scale_lr = scale_lr_cond is not None and scale_lr_cond(name, param)
            members[("no_wd_" if no_wd else "wd_") + ("scale_lr" if scale_lr else "no_scale_lr")][
                2
            ].append(param)
    return [
        {"name": name, "params": params, "wd_mult": wd, "lr_mult": lr}
        for name, (wd, lr, params) in members.items()
        if params
    ]


def _get_base_optimizer(args, param_groups):
    common = {"lr": args.lr, "weight_decay": args.weight_decay}
    adam = {**common, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_eps}
    if args.cpu_optimizer:
        assert args.optimizer == "adam", "--cpu-optimizer is for Adam"
        if args.cpu_torch_adam:
            return torch.optim.AdamW(param_groups, **adam)  # noqa: F821
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(param_groups, **adam)
    if args.optimizer == "sgd":
        return SGD(param_groups, **common, momentum=args.sgd_momentum)
    if args.ds_fused_adam:
        global Adam  # noqa: PLW0603
        from deepspeed.ops.adam import FusedAdam

        Adam = FusedAdam
    return Adam(param_groups, **adam)


def _get_grad_scaler(args):
    if args.loss_scale:
        return ConstantGradScaler(args.loss_scale)
    if not args.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=args.initial_loss_scale,
        min_scale=args.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=args.loss_scale_window,
        hysteresis=args.hysteresis,
    )


def get_megatron_optimizer(model, no_weight_decay_cond=None, scale_lr_cond=None, lr_mult=1.0):
    """The optimizer of these chunks."""
    args = get_args()
    optimizer = _get_base_optimizer(
        args, get_param_groups(model, no_weight_decay_cond, scale_lr_cond, lr_mult)
    )
    contiguous = args.use_contiguous_buffers_in_local_ddp
    common = (optimizer, args.clip_grad, args.log_num_zeros_in_grad, contiguous, contiguous)
    if args.fp16 or args.bf16 or args.use_distributed_optimizer:
        kind = (
            DistributedOptimizer
            if args.use_distributed_optimizer
            else Float16OptimizerWithFloat16Params
        )
        return kind(*common, args.fp16, args.bf16, args.params_dtype, _get_grad_scaler(args), model)
    return FP32Optimizer(*common, model)
