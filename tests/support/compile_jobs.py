# SPDX-License-Identifier: Apache-2.0
"""Engines that compile their models."""

import inspect


def compiling() -> dict:
    """The arguments of an engine that compiles.

    Where Triton's interpreter runs the kernels, none of them is warmed up: it knows no loop whose counter is a
    tensor, as that of the sampler for top-k and top-p.
    """
    from vllm.triton_utils import HAS_TRITON

    return {"enforce_eager": False, **({"kernel_config": {"enable_jit_warmup": False}} if HAS_TRITON else {})}


def keeps_graphs() -> bool:
    """Whether vLLM keeps graphs of this backend on disk; from 0.33 it tells its decorator not to."""
    from vllm.compilation.decorators import support_torch_compile

    return "use_aot_compile" not in inspect.signature(support_torch_compile).parameters
