"""Forms of optimizer state in low precision, by name: options of this package."""

from __future__ import annotations


def _form(main: str, moments: str) -> dict[str, str]:
    return {"main_params_dtype": main, "exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}


#: What state in fp32 is compared with.
LOW_PRECISION = {
    "remainder": _form("remainder", "float32"),
    "remainder, bf16": _form("remainder", "bfloat16"),
    "remainder, int8": _form("remainder", "int8"),
    "bf16, int8": _form("bfloat16", "int8"),
}
