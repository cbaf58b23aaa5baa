"""`python -m megatron_distopt SCRIPT ...`: see plugin/runner.py."""

from megatron_distopt.plugin.runner import main

__all__ = ()

if __name__ == "__main__":
    main()
