# SPDX-License-Identifier: Apache-2.0
"""A package that is missing: models of the backend are refused by its name, and native models are served."""

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from support.fork_server import JobError

SOURCE = Path(__file__).resolve().parent.parent / "src"
NEEDED = [re.match(r"[\w-]+", line).group() for line in requires("vllm-tf-sinks") if "extra ==" not in line]
IN_COMMANDS_ONLY = {"tqdm"}  # `verify` needs it, and vLLM does itself


@pytest.mark.parametrize("package", NEEDED)
def test_model_without_a_package(vllm, checkpoint, difference, package):
    folder = checkpoint(vllm, "granite")
    job = {"job": "support.broken_jobs:served_without", "package": package}
    if package in IN_COMMANDS_ONLY:
        assert difference(vllm, folder, **job) < 1e-4
        return
    message = (
        rf"BrokenInstallError: The installation of vllm-tf-sinks is incomplete: No module named '{package}'\. Install"
    )
    with pytest.raises(JobError, match=message):
        difference(vllm, folder, **job)


@pytest.mark.parametrize("package", NEEDED)
def test_native_model_without_a_package(vllm, checkpoint, package):
    folder = checkpoint(vllm, "llama")
    served = vllm.run("support.broken_jobs:served_without", package=package, checkpoint=folder, model_impl="vllm")
    assert len(served) == 2


@pytest.mark.parametrize("package", NEEDED)
def test_plugin_that_is_off_needs_no_package(vllm, checkpoint, package):
    folder = checkpoint(vllm, "llama")
    job = "support.broken_jobs:served_without"
    assert vllm.run(job, env={"VLLM_TF_SINKS": "0"}, package=package, checkpoint=folder)


def test_doctor_names_a_missing_package(vllm):
    status, printed = vllm.run("support.broken_jobs:doctor_without", package="pluggy")
    assert status == 1
    assert "pluggy" in printed
    assert "pip install" in printed


def test_entry_point_needs_the_standard_library_only():
    program = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import vllm_tf_sinks.plugin"
    subprocess.run([sys.executable, "-S", "-c", program], check=True, env={})
