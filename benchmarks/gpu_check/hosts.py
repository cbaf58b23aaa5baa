from gpu_check.checks import Check

CHECKS: tuple[Check, ...] = ()
