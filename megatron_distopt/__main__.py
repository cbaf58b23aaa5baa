"""`python -m megatron_distopt SCRIPT ...`: see plugin/runner.py."""

from megatron_distopt.plugin.runner import main

if __name__ == "__main__":
    main()
