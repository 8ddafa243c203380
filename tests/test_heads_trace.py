# SPDX-License-Identifier: Apache-2.0
"""What the trace of a head makes of calls that Transformers' own heads rarely or never have."""

import pytest

EAGER = "full, eager"
OWN_FORWARD = "Own.forward, run eagerly: "

# form -> kind, weights, description
EXPECTED = {
    "plain": ("projection only", [], ["lm_head(x)"]),
    "nothing_done": ("projection only", [], ["lm_head(x)", "float(x)"]),
    "soft_cap": ("elementwise", [], ["lm_head(x)", "x / 3", "tanh(x)", "x * 3"]),
    "last_cast": ("elementwise", [], ["lm_head(x)", "x * 0.5", "float(x)"]),
    "infinity": ("elementwise", [], ["lm_head(x)", "clamp(x, min=-inf, max=0.5)"]),
    "cast_between": ("full", [], ["lm_head(x)", "float(x)", "x * 2"]),
    "in_place": ("elementwise", [], ["lm_head(x)", "x * 2"]),
    "in_place_of_a_view": (EAGER, [], ["lm_head(x)"]),
    "not_used": ("elementwise", [], ["x * 2", "lm_head(x)"]),
    "rms_norm": (
        "full",
        ["scale"],
        [
            "float(x)",
            "pow(x, 2)",
            "x + 1e-06",
            "rsqrt(x)",
            "x1 * x",
            "to(x, dtype of the hidden states)",
            "scale * x",
            "lm_head(x)",
        ],
    ),
    "power_in_place": ("full", [], ["x * 2", "pow(x, 2)", "lm_head(x)"]),
    "property": ("full", [], ["x.mT", "x * 2", "x.mT", "lm_head(x)"]),
    "slice": ("full", [], ["lm_head(x)", "getitem(x, [Ellipsis, slice(None, 24, None)])"]),
    "bias": ("full", ["bias"], ["lm_head(x)", "x + bias"]),
    "both_sides": (
        EAGER,
        [],
        ["lm_head(x)", "norm(x0, p=fro, dim=-1, keepdim=True, dtype=None)", "x1 * x"],
    ),
    "rows": (EAGER, [], ["x * 3", "lm_head(x)"]),
    "constant": (EAGER, [], [f"{OWN_FORWARD}it uses a tensor of shape (16,) that is no weight"]),
    "set_item": (EAGER, [], [f"{OWN_FORWARD}__setitem__ changes a tensor in place"]),
    "reads": (EAGER, [], [f"{OWN_FORWARD}it reads numbers by item"]),
    "splits": (EAGER, [], [f"{OWN_FORWARD}split gives several tensors"]),
}


@pytest.fixture(scope="module")
def classified(vllm):
    return vllm.run("support.trace_jobs:classified")


def test_each_form_is_tried(classified):
    assert classified.keys() == EXPECTED.keys()


@pytest.mark.parametrize("form", EXPECTED)
def test_kind_and_description(classified, form):
    assert tuple(classified[form]) == EXPECTED[form]


def test_weights_are_read_anew_and_casts_follow_the_input(vllm):
    assert vllm.run("support.trace_jobs:replaced_weight") == (True, True)
