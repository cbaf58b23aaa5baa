"""`python -m megatron_distopt SCRIPT ...`: see plugin/runner.py."""

import sys

from megatron_distopt.plugin.runner import main

if __name__ == "__main__":
    try:
        main()
    # Functions that run at exit read sys.last_value, which Python does not set for SystemExit.
    except SystemExit as error:
        if error.code:
            sys.last_value = error
            raise
