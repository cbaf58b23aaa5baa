"""The arguments, the timers and the batch size of this process."""

from types import SimpleNamespace

_STATE = SimpleNamespace(args=None, timers=None)


def set_global_variables(args, timers):
    assert _STATE.args is None, "the arguments were set before"
    _STATE.args, _STATE.timers = args, timers


def get_args():
    assert _STATE.args is not None, "no arguments yet"
    return _STATE.args


def get_timers():
    assert _STATE.timers is not None, "no timers yet"
    return _STATE.timers


def get_num_microbatches():
    args = get_args()
    return args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
