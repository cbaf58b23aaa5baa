"""What a user does, by its line in the tables of docs/user_actions.md, and the cases that show its
effect. A name is a case of the tables in test_promise_table.py, or a test function beside it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cases:
    """The cases of one user action; none where the action is not possible."""

    torch: tuple[str, ...] = ()
    of_2023: tuple[str, ...] = ()
    core: tuple[str, ...] = ()


CASES = {
    "change weights before the first step": Cases(
        torch=("bf16 weights loaded midway",),
        of_2023=("changed_before_the_first_step",),
        core=("weights_changed_at_first",),
    ),
    "change weights in place later": Cases(
        torch=(
            "bf16 weights initialised midway",
            "bf16 weights clamped midway",
            "bf16 weights written through an alias of their data",
        ),
        of_2023=("weights_changed",),
        core=("weights_changed", "weights_changed_in_fp32"),
    ),
    "change weights, then call `reload_model_params()`": Cases(
        torch=("bf16 weights loaded midway",),
        of_2023=("weights_changed_and_reloaded",),
        core=("weights_changed_and_reloaded",),
    ),
    "`param.data = tensor`": Cases(
        torch=("another tensor as data of a bf16 param",),
        of_2023=("data_replaced", "data_replaced_in_fp32"),
        core=("data_replaced", "data_replaced_on_one_rank", "data_replaced_before"),
    ),
    "`param.data = tensor`, then `reload_model_params()`": Cases(
        torch=("another tensor as data of a bf16 param",),
        of_2023=("data_replaced_and_reloaded",),
        core=("data_replaced_and_reloaded",),
    ),
    "`model.bfloat16().float()`": Cases(
        torch=("to bf16 and back",),
        of_2023=("converted_there_and_back",),
        core=("converted_there_and_back",),
    ),
    "leave parameters in another dtype, shape or device": Cases(
        torch=("param is converted",), of_2023=("converted_on_one_rank",), core=("converted",)
    ),
    "tie with `b.weight.data = a.weight.data`": Cases(
        torch=("tied by data before", "tied by data"),
        of_2023=("tied_by_data", "tied_by_data_before"),
        core=("tied_by_data",),
    ),
    "hold a `state_dict()` or a view from before": Cases(
        torch=("aliases from before",), of_2023=("aliases_before",), core=("aliases_before",)
    ),
    "`model.share_memory()`, before or after": Cases(
        torch=("memory is shared", "memory is shared before"),
        of_2023=("memory_shared", "memory_shared_before"),
        core=("memory_shared", "memory_shared_before"),
    ),
    "replace a Parameter, `load_state_dict(assign=True)`": Cases(
        torch=("param is replaced", "state dict is assigned"),
        of_2023=("param_replaced",),
        core=("param_replaced",),
    ),
    "freeze parameters during training": Cases(
        torch=("frozen midway with overlap",), of_2023=("frozen",), core=("frozen",)
    ),
    "unfreeze parameters during training": Cases(
        torch=("frozen before, unfrozen midway", "frozen layer unfrozen midway with overlap"),
        of_2023=("unfrozen",),
        core=("unfrozen",),
    ),
    "start from other weights on each rank": Cases(
        torch=("other weights on each rank at the start",),
        of_2023=("ranks_start_apart",),
        core=("ranks_start_apart",),
    ),
    "have module buffers that differ between ranks": Cases(
        torch=("module_buffers_that_training_changes_are_those_of_the_first_rank",),
        of_2023=("module_buffers_differ",),
        core=("module_buffers_differ",),
    ),
    "read or change parameters during their gather, by compiled code too": Cases(
        torch=(
            "weights averaged with param overlap",
            "model.forward with param overlap",
            "compiled afterwards, with param overlap",
            "compiled before, with param overlap",
            "weights read by TorchScript with param overlap",
            "a script module in the model, with param overlap",
        ),
        of_2023=(
            "weights_read_overlapped",
            "weights_changed_overlapped",
            "methods_called_overlapped",
            "compiled_overlapped",
        ),
        core=("weights_changed_overlapped",),
    ),
    "`model.zero_grad()`, `param.grad = None`": Cases(
        torch=("model.zero_grad", "p.grad = None"),
        of_2023=("cleared_as_in_torch",),
        core=("cleared_as_in_torch",),
    ),
    "`optimizer.zero_grad(set_to_none=False)`": Cases(
        torch=("zero_grad not to None",),
        of_2023=("grads_zeroed_in_place",),
        core=("grads_zeroed_in_place",),
    ),
    "step again without clearing gradients": Cases(
        torch=("gradients kept with overlap",),
        of_2023=("grads_kept_on_one_rank",),
        core=("grads_kept",),
    ),
    "have a `param.grad` from before": Cases(
        torch=("gradients from before", "gradients from before, then zero_grad"),
        of_2023=("grads_from_before",),
        core=("grads_from_before",),
    ),
    "write `param.grad`": Cases(
        torch=("a gradient written by hand", "gradients written by hand alone"),
        of_2023=("grads_written",),
        core=("grads_written",),
    ),
    "`torch.nn.utils.clip_grad_norm_`": Cases(
        torch=("clip by torch",), of_2023=("clipped_by_torch",), core=("clipped_by_torch",)
    ),
    "change `main_grad` after backward": Cases(
        of_2023=("main_grads_scaled",), core=("main_grads_scaled",)
    ),
    "train parameters that get no gradient": Cases(
        torch=("a branch used from the third step on",),
        of_2023=("param_without_gradient",),
        core=("param_without_gradient",),
    ),
    "forget to scale the loss in fp16": Cases(
        torch=("loss is not scaled",), of_2023=("loss_not_scaled",), core=("loss_not_scaled",)
    ),
    "`torch.amp.GradScaler`": Cases(
        torch=("GradScaler",), of_2023=("torchs_scaler",), core=("torchs_scaler",)
    ),
    "`add_param_group`": Cases(
        torch=("add_param_group of new params",), of_2023=("group_added",), core=("group_added",)
    ),
    'edit `param_groups[i]["params"]`': Cases(
        torch=("members are edited",),
        of_2023=("params_taken_out", "params_taken_out_on_one_rank"),
        core=("params_taken_out", "params_taken_out_on_one_rank"),
    ),
    "write numbers of numpy, `False` or tensors into `param_groups`": Cases(
        torch=(
            "lr of numpy, then the state dict back",
            "lr a fraction",
            "decay switched off by False",
            "a tensor as an option of one's own",
        ),
        of_2023=("options_of_other_kinds",),
        core=("options_of_other_kinds",),
    ),
    "edit other options of `param_groups`": Cases(
        torch=("lr and betas edited", "a scheduler"),
        of_2023=("options_edited",),
        core=("options_edited",),
    ),
    "`optimizer.param_groups = [...]`": Cases(
        torch=("param_groups replaced",), of_2023=("groups_replaced",), core=("groups_replaced",)
    ),
    "build one of torch's schedulers": Cases(
        torch=("lr and betas edited", "a scheduler"),
        of_2023=("torchs_schedule",),
        core=("torchs_schedule",),
    ),
    "give `amsgrad`, `maximize`, `nesterov`, `dampening`": Cases(
        torch=("test_given_optimizer_when_it_has_options_of_its_own_then_the_update_is_its_own",),
        of_2023=(
            "amsgrad",
            "test_base_optimizer_of_2023_when_it_has_options_of_its_own_then_it_is_used_itself",
        ),
    ),
    "write a class named AdamW": Cases(
        torch=("test_given_optimizer_when_it_has_options_of_its_own_then_the_update_is_its_own",),
        of_2023=("own_class_named_as_torchs",),
    ),
    "`optimizer.state.clear()`, `.pop(param)`, or assign a new dict": Cases(
        torch=(
            "optimizer.state replaced midway",
            "state of a param popped",
            "state of a bf16 param emptied, then saved",
        ),
        of_2023=("state_cleared", "state_replaced", "state_reset"),
        core=("state_cleared", "state_replaced", "state_reset"),
    ),
    "scale moments in place": Cases(
        torch=("moments scaled in place",), of_2023=("moments_scaled",), core=("moments_scaled",)
    ),
    "assign tensors to `optimizer.state[param]`, or a count": Cases(
        torch=("a moment is assigned", "a count is written"),
        of_2023=("moments_assigned",),
        core=("moments_assigned",),
    ),
    "`step(closure)`": Cases(torch=("a closure",), of_2023=("closure",), core=("closure",)),
    "register hooks on a `torch.optim.Optimizer`": Cases(
        torch=("step hooks",), of_2023=("hooks",), core=("hooks",)
    ),
    "register hooks for all optimizers": Cases(
        torch=(
            "test_hooks_for_all_optimizers_when_a_step_is_made_then_they_see_that_of_the_user_alone",
        ),
        of_2023=("hooks_on_all",),
        core=("hooks_on_all",),
    ),
    "`torch.compile(optimizer.step)`, or compile a training step": Cases(
        torch=("test_step_when_it_is_compiled_then_it_is_as_without_and_no_graph",),
        of_2023=("step_compiled",),
        core=("step_compiled",),
    ),
    "read parameters in a forked process, or drop the optimizer there": Cases(
        torch=(
            "params read in a forked process, with param overlap",
            "optimizer dropped in a forked process, with overlaps",
        ),
        of_2023=("read_in_a_fork",),
        core=("read_in_a_fork",),
    ),
    "save, load or make another collective call on some ranks only": Cases(
        torch=("save on one rank, another call on the other",),
        of_2023=("other_calls_on_ranks",),
        core=("other_calls_on_ranks",),
    ),
    "have unequal numbers of batches in `DistributedDataParallel.join()`": Cases(
        torch=(
            "numbers of batches differ, in DDP's join",
            "numbers of batches differ, in torch's Join",
        )
    ),
    "copy or pickle the optimizer": Cases(
        torch=("optimizer is copied", "optimizer is pickled"),
        of_2023=("optimizer_copied",),
        core=("optimizer_copied",),
    ),
    "`torch.save` of one parameter": Cases(
        torch=("params_that_are_saved_alone_are_small",),
        of_2023=("param_saved", "test_param_when_saved_alone_then_nothing_but_it_is_written"),
        core=("param_saved",),
    ),
}
