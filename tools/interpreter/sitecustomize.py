# SPDX-License-Identifier: Apache-2.0
"""Run Triton's kernels on a CPU, in Triton's own interpreter: Python imports this module when it starts.

vLLM takes Triton as present where exactly one of its backends has an active driver. Triton has none for
CPUs, so this module adds one before vLLM is imported. A kernel in the interpreter takes milliseconds to
seconds, but it is the code that a GPU runs.
"""

import os
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined

import triton.language as tl
from triton.backends import backends
from triton.runtime import driver
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


class CPUDriver:
    """What Triton and vLLM ask a driver, answered for the CPU."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> SimpleNamespace:
        return SimpleNamespace(backend="cpu", arch="", warp_size=1)

    def get_active_torch_device(self) -> Any:
        import torch  # slow to import, and not every process needs it

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu


class NoCompiler:
    """What torch.compile asks a compiler for the key of its cache: kernels are interpreted, and compiled by none."""

    def __init__(self, target: SimpleNamespace) -> None:
        pass

    @staticmethod
    def supports_target(target: SimpleNamespace) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted"


create_splat = InterpreterBuilder.create_splat


def create_splat_of_truth(builder: InterpreterBuilder, block: Any, scalar: TensorHandle) -> TensorHandle:
    """A block filled with a scalar; a comparison's result keeps its type, which Triton 3.9 takes for its operands'."""
    if scalar.data.dtype == bool:
        scalar = TensorHandle(scalar.data, tl.int1)
    return create_splat(builder, block, scalar)


InterpreterBuilder.create_splat = create_splat_of_truth
backends["cpu"] = SimpleNamespace(driver=CPUDriver, compiler=NoCompiler)
driver.set_active(CPUDriver())
