# SPDX-License-Identifier: Apache-2.0
"""Hooks: the example's package makes its model right; contradictions are errors, broken plugins are left out."""

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
from support.fork_server import JobError
from support.jobs import PROMPTS

from vllm_tf_sinks import hookimpl
from vllm_tf_sinks.errors import HookError
from vllm_tf_sinks.hooks import PROJECT, Decision, Plugins

EXACT = 1e-5
BUILD = "support.hook_jobs:tinted_llama"
EXAMPLE = {"tinted_llama": "tinted_llama_hooks"}


@pytest.fixture
def tinted(vllm, checkpoint):
    return checkpoint(vllm, "tinted_llama", BUILD)


def distance(vllm, folder, **options):
    """The largest difference of the rows that the example's package leads to from Hugging Face's."""
    served = vllm.run("support.hook_jobs:served_with_example", checkpoint=folder, trust_remote_code=True, **options)
    sequences = [[*prompt, *new] for prompt, (new, _, _) in zip(PROMPTS, served, strict=True)]
    expected = vllm.run("support.hook_jobs:reference", checkpoint=folder, sequences=sequences)
    return max(
        max(abs(prompt - rows[: len(tokens) - 1]).max(), abs(decode - rows[len(tokens) - 1 : -1]).max())
        for tokens, (_, decode, prompt), rows in zip(PROMPTS, served, expected, strict=True)
    )


def test_example_makes_its_model_right(vllm, tinted):
    assert distance(vllm, tinted) < EXACT
    assert distance(vllm, tinted, tamper="support.tampers:drop_sinks") > 0.05


def test_without_the_example_its_model_is_refused(vllm, tinted):
    with pytest.raises(
        JobError, match=r"TintedLlamaAttention\.forward passes the sink .* depends on arguments of the method"
    ):
        vllm.run("support.jobs:served_rows", checkpoint=tinted, trust_remote_code=True)


def test_observer_is_told_what_was_decided(vllm, tinted, checkpoint):
    options = {"packages": EXAMPLE, "trust_remote_code": True}
    _, told = vllm.run("support.hook_jobs:served", checkpoint=tinted, **options)
    assert told == [("sinks", "attention sinks in 3 layers", False), ("head", "elementwise", False)]
    doubled = checkpoint(vllm, "offset_llama", "remote", sink_form="doubled")
    error, told = vllm.run("support.hook_jobs:refused", checkpoint=doubled, **options)
    assert told == [("sinks", error, True)]


def plugin(name: str, **hooks) -> EntryPoint:
    """An installed plugin with these functions."""
    module = ModuleType(f"plugin_{len(sys.modules)}")
    for hook, function in hooks.items():
        setattr(module, hook, hookimpl(function))
    sys.modules[module.__name__] = module
    return EntryPoint(name, module.__name__, PROJECT)


PARAMETER, OTHER = object(), object()


def test_nobody_answers():
    silent = plugin("silent", attention_sink=lambda module: None)
    assert Plugins().call("attention_sink", module=1) is None
    assert Plugins([silent]).call("attention_sink", module=1) is None


def test_answer_names_its_plugin():
    plugins = Plugins(
        [plugin("one", attention_sink=lambda module: PARAMETER), plugin("two", output_head=lambda: OTHER)]
    )
    answer = plugins.call("attention_sink", module=1)
    assert (answer.plugin, answer.value) == ("one", PARAMETER)
    assert plugins.names == ["one", "two"]


def test_same_answer_twice_is_no_conflict():
    both = [plugin(name, attention_sink=lambda module: PARAMETER) for name in ("one", "two")]
    assert Plugins(both).call("attention_sink", module=1).value is PARAMETER


def test_conflicting_answers_name_both_plugins():
    one = plugin("one", attention_sink=lambda module: PARAMETER)
    two = plugin("two", attention_sink=lambda module: OTHER)
    with pytest.raises(HookError, match=r"hook plugins 'one' and 'two' return different values for attention_sink"):
        Plugins([one, two]).call("attention_sink", module=1)


def fail(*_):
    raise RuntimeError("it fails")


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (EntryPoint("broken", "no_such_module", PROJECT), "No module named 'no_such_module'"),
        (plugin("broken", attention_sinks=lambda module: 1), "unknown hook 'attention_sinks'"),
        (plugin("broken", attention_sink=lambda layer: 1), "'layer'"),
        (plugin("broken", attention_sink=lambda module: fail()), "RuntimeError in attention_sink: it fails"),
    ],
    ids=["import", "no such hook", "no such argument", "raises"],
)
def test_broken_plugin_is_left_out(broken, why):
    asked = []
    plugins = Plugins([broken, plugin("sound", attention_sink=lambda module: asked.append(module) or PARAMETER)])
    assert plugins.call("attention_sink", module=1).plugin == "sound"
    assert plugins.call("attention_sink", module=2).plugin == "sound"
    assert asked == [1, 2]
    assert why in plugins.broken["broken"]
    assert plugins.names == ["sound"]


def test_broken_observer_is_left_out():
    told = []
    observers = [
        plugin("broken", decided=lambda decision: fail()),
        plugin("sound", decided=lambda decision: told.append(decision)),
    ]
    plugins = Plugins(observers)
    for outcome in ("one", "two"):
        plugins.notify(Decision("Model", "head", outcome))
    assert [decision.outcome for decision in told] == ["one", "two"]
    assert list(plugins.broken) == ["broken"]
