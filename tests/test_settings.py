# SPDX-License-Identifier: Apache-2.0
"""VLLM_TF_SINKS: its five values, and how vLLM is told of it."""

import pytest
from support.fork_server import JobError

from vllm_tf_sinks.settings import VALUES, VARIABLE, read_settings

ALWAYS = {"guard", "check"}
BOTH = {"sinks", "head", *ALWAYS}
FIVE = ["1", "0", "sinks", "head", "strict"]


@pytest.mark.parametrize(
    ("value", "groups", "strict"),
    [
        (None, BOTH, False),
        ("", BOTH, False),
        ("1", BOTH, False),
        ("0", set(), False),
        ("sinks", {"sinks", *ALWAYS}, False),
        ("head", {"head", *ALWAYS}, False),
        ("strict", BOTH, True),
        (" Strict ", BOTH, True),
    ],
)
def test_values(value, groups, strict):
    settings = read_settings({} if value is None else {VARIABLE: value})
    assert settings.groups == groups
    assert settings.strict == strict


@pytest.mark.parametrize("value", ["2", "true", "on", "sinks,head"])
def test_another_value_names_the_five(value):
    with pytest.raises(ValueError, match=f"VLLM_TF_SINKS='{value}' is not a valid value") as raised:
        read_settings({VARIABLE: value})
    assert list(VALUES) == FIVE
    assert all(f"{name}: " in str(raised.value) for name in FIVE)


def test_another_value_keeps_vllm_from_loading_a_model(vllm, checkpoint):
    folder = checkpoint(vllm, "llama")
    with pytest.raises(
        JobError, match=r"ValueError: VLLM_TF_SINKS='yes'.*1: .*0: .*sinks: .*head: .*strict: "
    ) as raised:
        vllm.run("support.jobs:served_rows", env={VARIABLE: "yes"}, checkpoint=folder)
    assert "Starting to load model" not in str(raised.value)


def test_vllm_knows_the_variable(vllm, checkpoint):
    folder = checkpoint(vllm, "llama")
    env = {VARIABLE: "strict", "VLLM_NONE_SUCH": "1"}
    warnings = vllm.run("support.settings_jobs:environment_warnings", env=env, checkpoint=folder)
    assert any("VLLM_NONE_SUCH" in warning for warning in warnings)
    assert not any(VARIABLE in warning for warning in warnings)


def test_vllm_does_not_refuse_the_variable(vllm, checkpoint):
    serve = {"checkpoint": checkpoint(vllm, "llama"), "fail_on_environ_validation": True}
    assert vllm.run("support.jobs:served_rows", env={VARIABLE: "1"}, **serve)
    with pytest.raises(JobError, match="Unknown vLLM environment variable detected: VLLM_NONE_SUCH"):
        vllm.run("support.jobs:served_rows", env={"VLLM_NONE_SUCH": "1"}, **serve)


def test_compile_key_tells_the_settings_apart(vllm):
    def key(**env):
        return vllm.run("support.settings_jobs:compile_key", env=env)

    keys = {
        "on": key(),
        "off": key(VLLM_TF_SINKS="0"),
        "sinks": key(VLLM_TF_SINKS="sinks"),
        "head": key(VLLM_TF_SINKS="head"),
        "absent": key(VLLM_PLUGINS="none-such"),
    }
    factors = {name: factor for name, (factor, _) in keys.items()}
    assert factors.pop("absent") is None
    assert len(set(factors.values())) == len(factors)
    assert len({hashed for _, hashed in keys.values()}) == len(keys)
    assert keys["on"] == key(VLLM_TF_SINKS="1")


def test_ray_hands_the_variable_on(vllm, checkpoint):
    folder = checkpoint(vllm, "llama")
    carried = vllm.run("support.settings_jobs:carried_by_ray", env={VARIABLE: "sinks"}, checkpoint=folder)
    assert carried["workers"][VARIABLE] == carried["engines"][VARIABLE] == "sinks"
    unset = vllm.run("support.settings_jobs:carried_by_ray", checkpoint=folder)
    assert VARIABLE in unset["names"]  # as vLLM's own variables are, whatever they are called
    assert VARIABLE not in unset["workers"]

    def groups(variables, **env):
        job = "support.settings_jobs:worker_of_ray"
        rows = vllm.run(job, env=env, config=carried["config"], variables=variables)
        return {name.partition(".")[0] for name, state in rows.items() if state == "applied"} - {"guard"}

    assert groups(carried["workers"]) == {"sinks"}
    assert groups(unset["workers"]) == {"sinks", "head"}
    assert groups(carried["workers"], VLLM_TF_SINKS="head") == {"head"}  # what a node has itself stays
