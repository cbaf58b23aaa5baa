"""What is common to the optimizers of all hosts: a `Session`, and the public calls on it.

A host's class inherits `SessionCalls` and has one `Session`, which asks a `HostState` for what
differs between hosts.
"""

from megatron_distopt.session.host_state import HostState
from megatron_distopt.session.run_session import Session
from megatron_distopt.session.session_calls import SessionCalls

__all__ = ["HostState", "Session", "SessionCalls"]
