"""The distributed optimizer: every data-parallel rank updates one piece of each gradient buffer.

Quirks of the real ones are kept and listed in README.md. `DistributedOptimizer` is one of two
classes.
"""

import math

import torch

from megatron.core import mpu

from ..switches import FILE_LAYOUT
from .device import FLOAT, HALVES, current_device, untyped_storage
from .fused_adam import Adam
from .optimizer import (
    MixedPrecisionOptimizer,
    _zero_grad_group_helper,
    copy_attributes,
    copy_groups,
    timed,
)

STATE_KEYS = ("param", "exp_avg", "exp_avg_sq")


class Range:
    """Elements [start, end) of something 1-D."""

    def __init__(self, start, end):
        self.start, self.end, self.size = start, end, end - start

    def normalize(self, start=0):
        return Range(start, start + self.size)

    def of(self, tensor):
        return tensor.view(-1)[self.start : self.end]


class _Sharded(MixedPrecisionOptimizer):
    """What both file layouts have in common."""

    @classmethod
    def build_model_gbuf_param_range_map(cls, model, dtype, gbuf_world_range):
        """Of each param that meets this rank's piece: where the intersection lies in buffer, piece
        and param."""
        param_range_map = {}
        for param, (start, end) in model._grad_buffer_param_index_map[dtype].items():
            world = Range(max(start, gbuf_world_range.start), min(end, gbuf_world_range.end))
            if world.size > 0:
                param_range_map[param] = {
                    "gbuf_world": world,
                    "gbuf_local": world.normalize(world.start - gbuf_world_range.start),
                    "param": world.normalize(world.start - start),
                }
        return param_range_map

    @classmethod
    def build_model_gbuf_range(cls, model, dtype):
        ranks, numel = mpu.get_data_parallel_world_size(), model._grad_buffers[dtype].numel
        size = math.ceil(numel / ranks)
        world_all = [Range(r * size, min(numel, (r + 1) * size)) for r in range(ranks)]
        world = world_all[mpu.get_data_parallel_rank()]
        return {
            "local": world.normalize(),
            "world": world,
            "world_all": world_all,
            "param_map": cls.build_model_gbuf_param_range_map(model, dtype, world),
            "max_range_size": size,
        }

    @classmethod
    def build_model_gbuf_range_map(cls, model):
        return {dtype: cls.build_model_gbuf_range(model, dtype) for dtype in model._grad_buffers}

    @classmethod
    def build_model_param_gbuf_map(cls, model_gbuf_ranges):
        """Param to (chunk, dtype)."""
        return {
            param: (model_index, dtype)
            for model_index, by_dtype in enumerate(model_gbuf_ranges)
            for dtype, gbuf_range in by_dtype.items()
            for param in gbuf_range["param_map"]
        }

    @classmethod
    def build_optimizer_group_ranges(cls, param_groups, model_gbuf_ranges):
        """(param to (group, place in the group), groups of this rank), both in the order of the
        buffers.

        with per-rank files it leaves out groups of which the rank has nothing.
        """
        group_of = {param: i for i, group in enumerate(param_groups) for param in group["params"]}
        group_ranges = [{"params": [], "orig_group": group} for group in param_groups]
        for by_dtype in model_gbuf_ranges:
            for gbuf_range in by_dtype.values():
                for param in gbuf_range["param_map"]:
                    group_ranges[group_of[param]]["params"].append(param)
        if FILE_LAYOUT == "per_rank":
            group_ranges = [group_range for group_range in group_ranges if group_range["params"]]
        index_map = {
            p: (i, j) for i, group in enumerate(group_ranges) for j, p in enumerate(group["params"])
        }
        return index_map, group_ranges

    @classmethod
    def build_model_and_main_param_groups(cls, model_gbuf_ranges, param_gbuf_map, opt_group_ranges):
        """Five lists of groups of tensors, see __init__; writes the shards into the param groups of
        the optimizer."""
        result = ([], [], [], [], [])
        for group_range in opt_group_ranges:
            model_halves, model_floats, shard_halves, shard_floats, mains = ([] for _ in result)
            for model_param in group_range["params"]:
                assert model_param.requires_grad, "a frozen param in a param group"
                model_index, dtype = param_gbuf_map[model_param]
                in_param = model_gbuf_ranges[model_index][dtype]["param_map"][model_param]["param"]
                if model_param.type() in HALVES:
                    shard = in_param.of(model_param.detach())
                    main = shard.clone().float()
                    copy_attributes(main, model_param)
                    model_halves.append(model_param)
                    shard_halves.append(shard)
                    mains.append(main)
                elif model_param.type() == FLOAT:
                    shard = in_param.of(model_param)
                    model_floats.append(model_param)
                    shard_floats.append(shard)
                else:
                    raise TypeError(f"a param is {param.type()}, not {FLOAT} or one of {HALVES}")  # noqa: F821
                copy_attributes(shard, model_param)
            group_range["orig_group"]["params"] = [*shard_floats, *mains]
            for groups, group in zip(
                result, (model_halves, model_floats, shard_halves, shard_floats, mains), strict=True
            ):
                groups.append(group)
        return result

    def __init__(
        self,
        optimizer,
        clip_grad,
        log_num_zeros_in_grad,
        params_have_main_grad,
        use_contiguous_buffers_in_local_ddp,
        fp16,
        bf16,
        params_dtype,
        grad_scaler,
        models,
    ):
        super().__init__(
            optimizer,
            clip_grad,
            log_num_zeros_in_grad,
            params_have_main_grad,
            use_contiguous_buffers_in_local_ddp,
            fp16,
            bf16,
            params_dtype,
            grad_scaler,
            models,
        )
        assert use_contiguous_buffers_in_local_ddp, (
            "the distributed optimizer needs contiguous buffers"
        )
        self._check_optimizer(optimizer)
        self.model_gbuf_ranges = [self.build_model_gbuf_range_map(model) for model in models]
        self.model_param_gbuf_map = self.build_model_param_gbuf_map(self.model_gbuf_ranges)
        self.model_param_group_index_map, self.opt_group_ranges = self.build_optimizer_group_ranges(
            optimizer.param_groups, self.model_gbuf_ranges
        )
        (
            self.model_float16_groups,
            self.model_fp32_groups,
            self.shard_float16_groups,
            self.shard_fp32_groups,
            self.shard_fp32_from_float16_groups,
        ) = self.build_model_and_main_param_groups(
            self.model_gbuf_ranges, self.model_param_gbuf_map, self.opt_group_ranges
        )
        self.param_buffers = [
            {dtype: self._alias(buffer) for dtype, buffer in model._grad_buffers.items()}
            for model in models
        ]
        optimizer.param_groups = [
            group_range["orig_group"] for group_range in self.opt_group_ranges
        ]
        optimizer.load_state_dict(optimizer.state_dict())

    def _check_optimizer(self, optimizer):
        pass

    def _alias(self, grad_buffer):
        """The memory of a gradient buffer as params of `params_dtype`, which are not wider than
        gradients."""
        storage = untyped_storage(grad_buffer.data)
        return torch.tensor(storage, dtype=self.params_dtype)[: grad_buffer.numel_padded]

    def get_model_param_range_map(self, param):
        model_index, dtype = self.model_param_gbuf_map[param]
        return self.model_gbuf_ranges[model_index][dtype]["param_map"][param]

    def get_model_parallel_group(self):
        """All ranks: each holds other shards."""
        return None

    def zero_grad(self, set_to_none=True):
        for groups in (
            self.model_float16_groups,
            self.model_fp32_groups,
            self.shard_float16_groups,
            self.shard_fp32_groups,
            self.shard_fp32_from_float16_groups,
        ):
            for group in groups:
                _zero_grad_group_helper(group, set_to_none)

    @staticmethod
    def get_model_buffer_dp_views(model_buffers):
        """[(chunk, dtype, buffer, its pieces by rank)]."""
        ranks, items = mpu.get_data_parallel_world_size(), []
        for model_index, buffers in enumerate(model_buffers):
            for dtype, buffer in buffers.items():
                assert buffer.numel() % ranks == 0, (
                    f"{buffer.numel()} elements cannot be split by {ranks}"
                )
                items.append(
                    (model_index, dtype, buffer, list(buffer.split(buffer.numel() // ranks)))
                )
        return items

    def get_model_grad_buffer_dp_views(self):
        return self.get_model_buffer_dp_views(
            [
                {dtype: buffer.data for dtype, buffer in model._grad_buffers.items()}
                for model in self.models
            ]
        )

    def get_model_param_buffer_dp_views(self):
        return self.get_model_buffer_dp_views(self.param_buffers)

    def reduce_model_grads(self, args, timers):
        """Collective: embeddings before the reduce-scatter, unlike the optimizers that hold
        everything."""
        self._reduce_partial_grads(args, timers)
        with timed(timers, args, "embedding-grads-all-reduce"):
            self.allreduce_embedding_grads(args)
        with timed(timers, args, "grads-reduce-scatter"):
            rank, group = mpu.get_data_parallel_rank(), mpu.get_data_parallel_group()
            for _, _, buffer, pieces in self.get_model_grad_buffer_dp_views():
                buffer.div_(mpu.get_data_parallel_world_size())
                torch.distributed._reduce_scatter_base(pieces[rank], buffer, group=group)

    def gather_model_params(self, args, timers):
        """Collective: from the pieces in the param buffers to the params."""
        with timed(timers, args, "params-all-gather"):
            rank, group = mpu.get_data_parallel_rank(), mpu.get_data_parallel_group()
            for _, _, buffer, pieces in self.get_model_param_buffer_dp_views():
                torch.distributed.all_gather_into_tensor(buffer, pieces[rank], group=group)
            for model, buffers in zip(self.models, self.param_buffers, strict=True):
                for dtype, param_map in model._grad_buffer_param_index_map.items():
                    for param, (start, end) in param_map.items():
                        param.view(-1).detach().copy_(buffers[dtype][start:end])

    def _collect_main_grad_data_for_unscaling(self):
        return [param.grad.data for param in self.get_parameters()]

    def _pairs(self):
        """(model param, its shard among the params of the optimizer)."""
        for model_groups, shard_groups in (
            (self.model_float16_groups, self.shard_fp32_from_float16_groups),
            (self.model_fp32_groups, self.shard_fp32_groups),
        ):
            for model_group, shard_group in zip(model_groups, shard_groups, strict=True):
                yield from zip(model_group, shard_group, strict=True)

    def _copy_model_grads_to_main_grads(self):
        for model_param, shard in self._pairs():
            shard.grad = (
                self.get_model_param_range_map(model_param)["param"]
                .of(model_param.main_grad)
                .float()
            )

    def _copy_main_params_to_model_params(self):
        """Into the param buffers, rounding to `params_dtype`; `gather_model_params` does the
        rest."""
        for model_param, shard in self._pairs():
            model_index, dtype = self.model_param_gbuf_map[model_param]
            world = self.get_model_param_range_map(model_param)["gbuf_world"]
            world.of(self.param_buffers[model_index][dtype]).data.copy_(shard)


class _PerRankState(_Sharded):
    """Per-rank files: all of the state in `state_dict()`, for a file a rank; nothing reloads the
    main params."""

    def state_dict(self):
        mains = self.shard_fp32_from_float16_groups
        return self._with_grad_scaler(
            {"optimizer": self.optimizer.state_dict(), "shard_fp32_from_float16_groups": mains}
        )

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._load_grad_scaler(state_dict)
        copy_groups(
            state_dict["shard_fp32_from_float16_groups"], self.shard_fp32_from_float16_groups
        )


class _GatheredState(_Sharded):
    """Gathered file: `state_dict()` has what is the same on all ranks, the rest goes through the
    first of them."""

    def _check_optimizer(self, optimizer):
        assert isinstance(optimizer, Adam), (
            f"{type(optimizer).__name__} is not Adam, whose state the checkpoint has"
        )

    def _copy_model_params_to_main_params(self):
        for model_param, shard in self._pairs():
            shard.data.copy_(
                self.get_model_param_range_map(model_param)["param"].of(model_param.detach())
            )

    def state_dict(self):
        inner = {key: value for key, value in self.optimizer.state_dict().items() if key != "state"}
        for group in inner["param_groups"]:
            del group["params"]
        return self._with_grad_scaler({"optimizer": inner})

    def load_state_dict(self, state_dict):
        """Makes room for the state, which `load_parameter_state` fills; a `step` of a param is not
        among it."""
        places = [group["params"] for group in self.optimizer.state_dict()["param_groups"]]
        state = {}
        for _, _, _, _, param_range, (group, order) in self._shards():
            numel = param_range["gbuf_world"].size
            state[places[group][order]] = {
                key: torch.empty(numel, dtype=torch.float, device=current_device())
                for key in STATE_KEYS[1:]
            }
        groups = [
            {**group, "params": list(places[i])}
            for i, group in enumerate(state_dict["optimizer"]["param_groups"])
        ]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self._load_grad_scaler(state_dict)

    def _shards(self):
        """(chunk, dtype, buffer, model param, its ranges, (group, place)) of this rank, in the
        order of the buffers."""
        for model_index, by_dtype in enumerate(self.model_gbuf_ranges):
            for dtype, gbuf_range in by_dtype.items():
                buffer = self.models[model_index]._grad_buffers[dtype]
                for param, param_range in gbuf_range["param_map"].items():
                    yield (
                        model_index,
                        dtype,
                        buffer,
                        param,
                        param_range,
                        self.model_param_group_index_map[param],
                    )

    def _tensors_by_range(self, model_index, dtype):
        """[(range in the piece, {key: tensor})]; in a group of two dtypes these are the wrong
        tensors."""
        found = []
        for index, of_dtype, _, _, param_range, (group, order) in self._shards():
            if (index, of_dtype) == (model_index, dtype):
                main = self.optimizer.param_groups[group]["params"][order]
                found.append(
                    (param_range["gbuf_local"], {"param": main, **self.optimizer.state[main]})
                )
        return found

    def save_parameter_state(self, filename):
        """Collective: the first data-parallel rank writes {chunk: {dtype: {key: fp32, 1-D
        [numel_padded]}}}."""
        rank, ranks = mpu.get_data_parallel_rank(), list(mpu._DATA_PARALLEL_GLOBAL_RANKS)
        state = {}
        for model_index, model in enumerate(self.models):
            assert len(model._grad_buffers) == 1, (
                f"{len(model._grad_buffers)} grad dtypes, where a file has one"
            )
            for dtype, buffer in model._grad_buffers.items():
                world = {}
                for key in STATE_KEYS:
                    local = torch.empty(buffer.numel_padded // len(ranks))
                    for local_range, tensors in self._tensors_by_range(model_index, dtype):
                        local_range.of(local).data.copy_(tensors[key].detach())
                    received = [torch.empty_like(local) for _ in ranks] if rank == 0 else None
                    torch.distributed.gather(
                        local, received, ranks[0], mpu.get_data_parallel_group_gloo()
                    )
                    world[key] = torch.cat(received) if rank == 0 else None
                state.setdefault(model_index, {})[dtype] = world
        if rank == 0:
            torch.save(state, filename)

    def load_parameter_state(self, filename):
        """Collective: the first data-parallel rank reads and scatters."""
        rank, ranks = mpu.get_data_parallel_rank(), list(mpu._DATA_PARALLEL_GLOBAL_RANKS)
        state = torch.load(filename) if rank == 0 else None
        for model_index, model in enumerate(self.models):
            for dtype, buffer in model._grad_buffers.items():
                for key in STATE_KEYS:
                    local = torch.empty(buffer.numel_padded // len(ranks))
                    sent = (
                        list(state[model_index][dtype][key].split(local.numel()))
                        if rank == 0
                        else None
                    )
                    torch.distributed.scatter(
                        local, sent, ranks[0], mpu.get_data_parallel_group_gloo()
                    )
                    for local_range, tensors in self._tensors_by_range(model_index, dtype):
                        tensors[key].data.copy_(local_range.of(local))


DistributedOptimizer = _PerRankState if FILE_LAYOUT == "per_rank" else _GatheredState
DistributedOptimizer.__name__ = DistributedOptimizer.__qualname__ = "DistributedOptimizer"
