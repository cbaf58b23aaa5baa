"""The optimizers that hold everything on every rank, and the base of the distributed one."""

from abc import ABC, abstractmethod
from contextlib import contextmanager

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron.core import mpu, tensor_parallel
from megatron.model.module import param_is_not_shared
from megatron.utils import print_rank_0, unwrap_model

from ..switches import DEVICE
from .clip_grads import clip_grad_norm_fp32, count_zeros_fp32
from .device import FLOAT, HALVES


def _zero_grad_group_helper(group, set_to_none):
    for param in group:
        if param.grad is not None:
            if set_to_none:
                param.grad = None
            else:
                param.grad.detach_().zero_()


def _copy_all(this, that):
    for source, target in zip(this, that, strict=True):
        target.copy_(source)


@contextmanager
def timed(timers, args, name):
    timers(name, log_level=1).start(barrier=args.barrier_with_L1_time)
    yield
    timers(name).stop()


def _promoted(name):
    """An attribute of the inner optimizer, live in both directions."""
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, v: setattr(self.optimizer, name, v)
    )


class MegatronOptimizer(ABC):
    """What the training loop calls.

    Args:
        optimizer: a torch-style one over the parameters of `models`.
        params_have_main_grad: gradients are in `param.main_grad`.
        models: list of chunks, DDP outermost.
    """

    state = _promoted("state")
    param_groups = _promoted("param_groups")

    def __init__(
        self,
        optimizer,
        clip_grad,
        log_num_zeros_in_grad,
        params_have_main_grad,
        use_contiguous_buffers_in_local_ddp,
        models,
    ):
        assert optimizer, "an inner optimizer is needed"
        assert params_have_main_grad or not use_contiguous_buffers_in_local_ddp, (
            "contiguous buffers hold main grads"
        )
        self.optimizer, self.models = optimizer, models
        self.clip_grad, self.log_num_zeros_in_grad = clip_grad, log_num_zeros_in_grad
        self.params_have_main_grad = params_have_main_grad
        self.use_contiguous_buffers_in_local_ddp = use_contiguous_buffers_in_local_ddp

    def get_parameters(self):
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def get_main_grads_for_grad_norm(self):
        """Gradients, those of shared and of replicated params once."""
        return [
            param.grad
            for param in self.get_parameters()
            if param.grad is not None
            and param_is_not_shared(param)
            and tensor_parallel.param_is_not_tensor_parallel_duplicate(param)
        ]

    def get_model_parallel_group(self):
        return mpu.get_model_parallel_group()

    def clip_grad_norm(self, clip_grad):
        return clip_grad_norm_fp32(
            self.get_parameters(),
            self.get_main_grads_for_grad_norm(),
            clip_grad,
            model_parallel_group=self.get_model_parallel_group(),
        )

    def count_zeros(self):
        return count_zeros_fp32(
            self.get_parameters(), model_parallel_group=self.get_model_parallel_group()
        )

    def scale_loss(self, loss):
        return self.get_loss_scale() * loss

    @abstractmethod
    def zero_grad(self, set_to_none=True): ...

    @abstractmethod
    def get_loss_scale(self): ...

    @abstractmethod
    def reload_model_params(self): ...

    @abstractmethod
    def state_dict(self): ...

    @abstractmethod
    def load_state_dict(self, state_dict): ...

    @abstractmethod
    def step(self, args, timers): ...

    def _clip_and_step(self, args, timers):
        """Grad norm and number of zeros, where they were asked for."""
        with timed(timers, args, "optimizer-clip-main-grad"):
            grad_norm = self.clip_grad_norm(self.clip_grad) if self.clip_grad > 0.0 else None
        with timed(timers, args, "optimizer-count-zeros"):
            num_zeros = self.count_zeros() if self.log_num_zeros_in_grad else None
        with timed(timers, args, "optimizer-inner-step"):
            self.optimizer.step()
        return grad_norm, num_zeros

    def gather_model_params(self, args, timers):  # noqa: B027
        """Nothing: every rank has updated all of them."""

    def _allreduce_coalesced(self, args, wanted):
        """Collective: sums gradients of the named params that are `wanted` over the tensor-parallel
        group."""
        grads = [
            (param.main_grad if args.DDP_impl == "local" else param.grad).data
            for model in unwrap_model(self.models)
            for name, param in model.named_parameters()
            if wanted(name, param)
        ]
        if grads:
            coalesced = _flatten_dense_tensors(grads)
            torch.distributed.all_reduce(coalesced, group=mpu.get_tensor_model_parallel_group())
            _copy_all(_unflatten_dense_tensors(coalesced, grads), grads)

    def allreduce_layernorm_grads(self, args):
        if mpu.get_tensor_model_parallel_world_size() > 1 and args.sequence_parallel:
            self._allreduce_coalesced(
                args, lambda _, param: getattr(param, "sequence_parallel", False)
            )

    def allreduce_key_value_grads(self, args):
        """Each tensor-parallel rank has seen its own heads only; whether so, the callers ask, as in
        the child."""
        if args.attention_head_type != "multiquery":
            raise AttributeError("the attention has no key_value")
        self._allreduce_coalesced(args, lambda name, _: ".key_value." in name)

    def allreduce_embedding_grads(self, args):
        if (
            mpu.is_rank_in_embedding_group(ignore_virtual=True)
            and mpu.get_pipeline_model_parallel_world_size() > 1
        ):
            first = mpu.is_pipeline_first_stage(ignore_virtual=True)
            model = unwrap_model(self.models[0 if first else -1])
            if model.share_embeddings_and_output_weights:
                weight = model.shared_embedding_or_output_weight()
                grad = weight.main_grad if args.DDP_impl == "local" else weight.grad
                torch.distributed.all_reduce(grad, group=mpu.get_embedding_group())

    def _reduce_partial_grads(self, args, timers):
        """Collective: over the tensor-parallel group; without sequence parallelism the model has
        summed key-values."""
        with timed(timers, args, "layernorm-grads-all-reduce"):
            self.allreduce_layernorm_grads(args)
        is_split = mpu.get_tensor_model_parallel_world_size() > 1
        if args.attention_head_type == "multiquery" and is_split and args.sequence_parallel:
            with timed(timers, args, "key-value-grads-all-reduce"):
                self.allreduce_key_value_grads(args)

    def reduce_model_grads(self, args, timers):
        """Collective."""
        self._reduce_partial_grads(args, timers)
        if args.DDP_impl == "local":
            with timed(timers, args, "grads-all-reduce"):
                for model in self.models:
                    model.allreduce_gradients()
        with timed(timers, args, "embedding-grads-all-reduce"):
            self.allreduce_embedding_grads(args)


class MixedPrecisionOptimizer(MegatronOptimizer):
    """With fp32 copies of 16-bit params, and a loss scale.

    Args:
        args: those of `MegatronOptimizer`; before the last of them fp16, bf16, params_dtype and
            grad_scaler. A grad_scaler of None stands for a scale of 1 without a test for overflow;
            fp16 needs one.
    """

    def __init__(self, *args):
        *of_all, self.fp16, self.bf16, self.params_dtype, self.grad_scaler, models = args
        super().__init__(*of_all, models)
        assert self.grad_scaler is not None or not self.fp16, (
            "fp16 does not go without a loss scale"
        )
        self.found_inf, self._scale_one = (
            torch.zeros(1, device=DEVICE),
            torch.ones(1, device=DEVICE),
        )

    def get_loss_scale(self):
        return self._scale_one if self.grad_scaler is None else self.grad_scaler.scale

    def reload_model_params(self):
        self._copy_model_params_to_main_params()

    def _unscale_main_grads_and_check_for_nan(self):
        """Collective: whether any rank has an inf or nan."""
        self.found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(
            self._collect_main_grad_data_for_unscaling(), self.found_inf, self.grad_scaler.inv_scale
        )
        torch.distributed.all_reduce(
            self.found_inf, op=torch.distributed.ReduceOp.MAX, group=self.get_model_parallel_group()
        )
        return self.found_inf.item() > 0

    @torch.no_grad()
    def step(self, args, timers):
        """Collective: (successful, grad norm, number of zeros)."""
        with timed(timers, args, "optimizer-copy-to-main-grad"):
            self._copy_model_grads_to_main_grads()
        if self.grad_scaler:
            with timed(timers, args, "optimizer-unscale-and-check-inf"):
                found_inf = self._unscale_main_grads_and_check_for_nan()
            self.grad_scaler.update(found_inf)
            if found_inf:
                return False, None, None
        grad_norm, num_zeros = self._clip_and_step(args, timers)
        with timed(timers, args, "optimizer-copy-main-to-model-params"):
            self._copy_main_params_to_model_params()
        return True, grad_norm, num_zeros

    def _with_grad_scaler(self, state_dict):
        return state_dict | (
            {"grad_scaler": self.grad_scaler.state_dict()} if self.grad_scaler else {}
        )

    def _load_grad_scaler(self, state_dict):
        if "grad_scaler" not in state_dict:
            if self.fp16:
                print_rank_0("***WARNING*** the checkpoint has no grad scaler")
        elif self.grad_scaler:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        else:
            print_rank_0("***WARNING*** the grad scaler of the checkpoint is not wanted here")


class Float16OptimizerWithFloat16Params(MixedPrecisionOptimizer):
    """All of the fp32 copies on every rank."""

    def __init__(self, optimizer, *args):
        super().__init__(optimizer, *args)
        self.float16_groups, self.fp32_from_float16_groups, self.fp32_from_fp32_groups = [], [], []
        for group in self.optimizer.param_groups:
            halves, mains, floats = [], [], []
            for i, param in enumerate(group["params"]):
                if param.type() in HALVES:
                    main = param.detach().clone().float()
                    copy_attributes(main, param)
                    group["params"][i] = main
                    halves.append(param)
                    mains.append(main)
                elif param.type() == FLOAT:
                    floats.append(param)
                else:
                    raise TypeError(f"a param is {param.type()}, not {FLOAT} or one of {HALVES}")
            self.float16_groups.append(halves)
            self.fp32_from_float16_groups.append(mains)
            self.fp32_from_fp32_groups.append(floats)

    def zero_grad(self, set_to_none=True):
        for groups in (
            self.float16_groups,
            self.fp32_from_float16_groups,
            self.fp32_from_fp32_groups,
        ):
            for group in groups:
                _zero_grad_group_helper(group, set_to_none)

    def _collect_main_grad_data_for_unscaling(self):
        groups = (*self.fp32_from_float16_groups, *self.fp32_from_fp32_groups)
        return [param.grad.data for group in groups for param in group if param.grad is not None]

    def _get_model_and_main_params_data_float16(self):
        model = [param.data for group in self.float16_groups for param in group]
        main = [param.data for group in self.fp32_from_float16_groups for param in group]
        return model, main

    def _copy_model_grads_to_main_grads(self):
        for model_group, main_group in zip(
            self.float16_groups, self.fp32_from_float16_groups, strict=True
        ):
            for model_param, main_param in zip(model_group, main_group, strict=True):
                if self.params_have_main_grad:
                    main_param.grad = model_param.main_grad.float()
                elif model_param.grad is not None:
                    main_param.grad = model_param.grad.float()
                model_param.grad = None
        if self.params_have_main_grad:
            for param in (param for group in self.fp32_from_fp32_groups for param in group):
                param.grad = param.main_grad

    def _copy_main_params_to_model_params(self):
        model, main = self._get_model_and_main_params_data_float16()
        _copy_all(main, model)

    def _copy_model_params_to_main_params(self):
        _copy_all(*self._get_model_and_main_params_data_float16())

    def state_dict(self):
        return self._with_grad_scaler(
            {
                "optimizer": self.optimizer.state_dict(),
                "fp32_from_fp16_params": self.fp32_from_float16_groups,
            }
        )

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._load_grad_scaler(state_dict)
        copy_groups(state_dict["fp32_from_fp16_params"], self.fp32_from_float16_groups)


class FP32Optimizer(MegatronOptimizer):
    def __init__(self, *args):
        super().__init__(*args)
        self._scale = torch.ones(1, device=DEVICE)

    def zero_grad(self, set_to_none=True):
        for group in self.optimizer.param_groups:
            _zero_grad_group_helper(group["params"], set_to_none)

    def get_loss_scale(self):
        return self._scale

    def reload_model_params(self):
        pass

    @torch.no_grad()
    def step(self, args, timers):
        """Collective: (True, grad norm, number of zeros)."""
        with timed(timers, args, "optimizer-copy-to-main-grad"):
            if self.params_have_main_grad:
                for param in self.get_parameters():
                    param.grad = param.main_grad
        return True, *self._clip_and_step(args, timers)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)


def copy_attributes(target, param):
    tensor_parallel.copy_tensor_model_parallel_attributes(target, param)
    if hasattr(param, "shared"):
        target.shared = param.shared


def copy_groups(saved_groups, current_groups):
    """Tensor by tensor; as in the real forks the longer list is cut off silently."""
    for saved_group, current_group in zip(saved_groups, current_groups, strict=False):
        for saved, current in zip(saved_group, current_group, strict=False):
            current.data.copy_(saved.data)
