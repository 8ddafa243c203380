# SPDX-License-Identifier: Apache-2.0
"""vllm-tf-sinks doctor: what it says of a sound environment, and of each way in which one is not."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from vllm_tf_sinks.patches.table import PATCHES


def doctor(vllm, env=None, **job):
    """The exit status and the report."""
    status, printed = vllm.run("support.cli_jobs:command", env=env, arguments=["doctor", "--json"], **job)
    return status, json.loads(printed)


def test_command_is_installed():
    (script,) = entry_points(group="console_scripts", name="vllm-tf-sinks")
    assert script.value == "vllm_tf_sinks.cli:main"


def test_sound_environment(vllm):
    status, report = doctor(vllm)
    assert (status, report["problems"]) == (0, [])
    assert report["versions"]["vllm"].startswith(vllm.version)
    assert all(report["versions"][name] for name in ("python", "torch", "transformers", "vllm-tf-sinks"))
    assert report["variable"]["value"] == "1"
    assert report["loaded"]["yes"]
    assert [row["name"] for row in report["patches"]] == [patch.name for patch in PATCHES]
    assert {row["state"] for row in report["patches"]} <= {"applied", "not needed"}
    assert all(row["reason"] for row in report["patches"])
    assert (report["device"], report["attention_backends"]) == ("CPU", ["CPU_ATTN"])


def test_text_fits_its_width_and_names_everything(vllm):
    status, printed = vllm.run("support.cli_jobs:command", env={"COLUMNS": "80"}, arguments=["doctor"])
    assert status == 0
    assert max(map(len, printed.splitlines())) <= 80
    for word in (vllm.version, "VLLM_TF_SINKS", "VLLM_PLUGINS", "CPU_ATTN", *(patch.name for patch in PATCHES)):
        assert word in printed


@pytest.mark.parametrize(
    ("env", "what", "do"),
    [
        ({"VLLM_PLUGINS": ""}, "VLLM_PLUGINS='' does not name tf_sinks", "Unset VLLM_PLUGINS"),
        ({"VLLM_PLUGINS": "lora"}, "VLLM_PLUGINS='lora' does not name tf_sinks", "lora,tf_sinks"),
        ({"VLLM_TF_SINKS": "yes"}, "VLLM_TF_SINKS='yes' is not a valid value. Use one of 1: ", "does not start"),
    ],
)
def test_setting_that_keeps_the_plugin_away(vllm, env, what, do):
    status, report = doctor(vllm, env)
    (problem,) = report["problems"]
    assert status == 1
    assert what in problem["what"]
    assert do in problem["do"]


@pytest.mark.parametrize("value", ["1", "strict"])
def test_patch_that_does_not_fit(vllm, value):
    status, report = doctor(vllm, {"VLLM_TF_SINKS": value}, tamper="support.tampers:lose_a_target")
    assert status == 1
    states = {row["name"]: row["state"] for row in report["patches"]}
    assert states["sinks.find"] == "does not fit"
    assert states["sinks.layers"] == "off"
    (problem,) = report["problems"]
    assert "sinks.find does not fit this vLLM" in problem["what"]


def test_untested_version_is_marked(vllm):
    renumber = "support.meanings:renumber"
    status, report = doctor(vllm, tamper=renumber)
    assert (status, report["tested"]) == (0, False)
    applied = {row["reason"] for row in report["patches"] if row["state"] == "applied"}
    assert applied == {"untested version"}
    _, printed = vllm.run("support.cli_jobs:command", arguments=["doctor"], tamper=renumber)
    assert "untested version of vLLM: each model is checked once it is loaded" in " ".join(printed.split())


def test_plugin_that_is_off_is_no_problem(vllm):
    status, report = doctor(vllm, {"VLLM_TF_SINKS": "0", "VLLM_PLUGINS": "tf_sinks"})
    assert status == 0
    assert report["loaded"]["yes"]
    assert {row["state"] for row in report["patches"]} == {"off"}


def test_without_vllm_says_so():
    program = "import sys; sys.modules['vllm'] = None; from vllm_tf_sinks.cli import main; sys.exit(main(['doctor']))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "vLLM cannot be imported" in done.stdout
    assert "Install vLLM" in done.stdout
