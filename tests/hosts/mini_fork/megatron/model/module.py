"""The base of all modules, and the wrapper of 16-bit models."""

import torch

from megatron.core import mpu


def param_is_not_shared(param):
    return not getattr(param, "shared", False)


class MegatronModule(torch.nn.Module):
    def __init__(self, share_embeddings_and_output_weights=True):
        super().__init__()
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights

    def state_dict_for_save_checkpoint(self, prefix="", keep_vars=False):
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)


class Float16Module(MegatronModule):
    """Converts the module to 16 bits in place, and its output on the last stage back to fp32."""

    def __init__(self, module, args):
        super().__init__()
        self.add_module("module", module.half() if args.fp16 else module.bfloat16())
        if args.fp32_norms:
            for norm in (m for m in module.modules() if isinstance(m, torch.nn.LayerNorm)):
                norm.float()

    def set_input_tensor(self, input_tensor):
        return self.module.set_input_tensor(input_tensor)

    def forward(self, *inputs, **kwargs):
        outputs = self.module(*inputs, **kwargs)
        return outputs.float() if mpu.is_pipeline_last_stage() else outputs
