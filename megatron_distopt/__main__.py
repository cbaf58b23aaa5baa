"""`python -m megatron_distopt SCRIPT ...`: see plugin/runner.py."""

import sys

from megatron_distopt.plugin.runner import main

if __name__ == "__main__":
    try:
        main()
    # of which Python says nothing to what runs at the exit, unlike of other exceptions
    except SystemExit as error:
        if error.code:
            sys.last_value = error
            raise
