# SPDX-License-Identifier: Apache-2.0
"""Sink models served by real vLLM give Hugging Face's logprobs, and do not when the sinks are dropped."""

import pytest
from support.fork_server import JobError

EXACT = 1e-5
DROPPED = 0.05
DROP = "support.tampers:drop_sinks"

MODELS = ["gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"]
FORMS = ["plain", "cast", "local", "holder"]


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_equal_hugging_face(vllm, checkpoint, difference, name):
    folder = checkpoint(vllm, name)
    assert difference(vllm, folder) < EXACT
    assert difference(vllm, folder, tamper=DROP) > DROPPED


@pytest.mark.parametrize("form", FORMS)
def test_remote_code_passes_its_sink_in_another_way(vllm, checkpoint, difference, form):
    folder = checkpoint(vllm, "offset_llama", "remote", sink_form=form)
    assert difference(vllm, folder, trust_remote_code=True) < EXACT
    assert difference(vllm, folder, trust_remote_code=True, tamper=DROP) > DROPPED


# In our words below a function of the traceback; vLLM since 0.30 refuses it itself
HIDDEN = r"in {}\n(.|\n)*Hidden passes a sink \(s_aux\) to Attention|does not dispatch"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            "doubled",
            r"Doubled\.forward passes the sink 'self\.softmax_offset \* 2'.*changes the parameter's values",
        ),
        (
            "computed",
            r"Computed\.forward passes the sink 'offset'.*it depends on arguments of the method \(hidden_states\)",
        ),
        ("hidden", HIDDEN.format("remove_guard")),
    ],
)
def test_sink_that_is_no_parameter_is_refused(vllm, checkpoint, form, message):
    folder = checkpoint(vllm, "offset_llama", "remote", sink_form=form)
    with pytest.raises(JobError, match=message):
        vllm.run("support.jobs:served_rows", checkpoint=folder, trust_remote_code=True)


def test_sink_that_no_dry_run_showed_is_refused_at_the_first_forward(vllm, checkpoint):
    folder = checkpoint(vllm, "offset_llama", "remote", sink_form="hidden")
    serve = {"checkpoint": folder, "trust_remote_code": True, "tamper": "support.tampers:dry_run_nothing"}
    with pytest.raises(JobError, match=HIDDEN.format("_model_forward")):
        vllm.run("support.jobs:served_rows", **serve)


def test_rounded_sinks_stay_within_the_rounding_of_bfloat16(vllm, checkpoint, difference):
    """A sink s enters as s(1 + e), |e| <= 2^-9, so a weight is off by a factor of exp(6 * 2^-9) at most."""
    folder = checkpoint(vllm, "gpt_oss", exact_sinks=False)
    assert difference(vllm, folder) < 0.1
