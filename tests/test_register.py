# SPDX-License-Identifier: Apache-2.0
"""register(): cheap, the same however often and wherever it is called, and nothing to native models."""

import importlib.metadata
import json
import subprocess
import sys

import pytest

CHEAP = """
import json, sys, time
import vllm
before = set(sys.modules)
start = time.perf_counter()
from vllm_tf_sinks import register
imported = time.perf_counter()
register()
registered = time.perf_counter()
register()
again = time.perf_counter()
times = [imported - start, registered - imported, again - registered]
print(json.dumps({"modules": sorted(set(sys.modules) - before), "times": times}))
"""

NO_SIDE_EFFECTS = """
import json, sys
import vllm_tf_sinks, vllm_tf_sinks.plugin
heavy = sorted({"torch", "transformers", "vllm"} & set(sys.modules))
from vllm import envs
from vllm_tf_sinks import status
states = sorted({row.state.value for row in status()})
print(json.dumps({"heavy": heavy, "states": states, "declared": "VLLM_TF_SINKS" in envs.environment_variables}))
"""


def fresh(vllm, program: str):
    """What `program` prints as JSON in a new process with this vLLM."""
    done = subprocess.run(
        [sys.executable, "-c", program], env=vllm.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_same(served, expected):
    """Two servings gave the same tokens and the same numbers, bit by bit."""
    for one, other in zip(served, expected, strict=True):
        assert one[0] == other[0]
        assert (one[1] == other[1]).all()
        assert (one[2] == other[2]).all()


def test_entry_point():
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="tf_sinks")
    assert entry.value == "vllm_tf_sinks.plugin:register"


def test_importing_has_no_side_effects(vllm):
    assert fresh(vllm, NO_SIDE_EFFECTS) == {"heavy": [], "states": ["off"], "declared": False}


def test_register_imports_no_model_code(vllm):
    report = fresh(vllm, CHEAP)
    ours = {name for name in report["modules"] if name.startswith("vllm_tf_sinks")}
    others = {name.split(".")[0] for name in set(report["modules"]) - ours}
    assert not others & {"torch", "transformers"}
    assert not [name for name in report["modules"] if name.startswith("vllm.") and name != "vllm.envs"]
    assert not ours & {"vllm_tf_sinks.attention.sink_layers", "vllm_tf_sinks.lm_head.install"}
    print("import {:.1f} ms, register() {:.1f} ms, again {:.1f} ms".format(*(1e3 * t for t in report["times"])))


@pytest.fixture(scope="module")
def expected(vllm):
    """What a process that registers says, one wrapper more around each target that is patched."""
    here = vllm.run("support.register_jobs:registered")
    upstream = vllm.run("support.register_jobs:untouched_depths")
    more = {path: here["depths"][path] - upstream[path] for path in upstream}
    assert set(more.values()) <= {0, 1}
    assert sum(more.values()) == list(here["states"].values()).count("applied") > 0
    return here


@pytest.mark.parametrize("when", ["before", "after", "imported"])
def test_forked_processes_are_patched_once(vllm, expected, when):
    assert vllm.run("support.register_jobs:in_a_child", start="fork", when=when) == expected


def test_spawned_process_is_patched_once(vllm, expected):
    assert vllm.run("support.register_jobs:in_a_child", start="spawn", when="imported") == expected


def test_looking_for_the_backend_does_not_use_the_trigger_up(vllm):
    assert "applied" in vllm.run("support.patching:trigger_survives_find_spec").values()


@pytest.mark.parametrize("model_impl", ["vllm", "auto"])
def test_native_model_is_untouched(vllm, checkpoint, model_impl):
    serve = {"checkpoint": checkpoint(vllm, "llama"), "model_impl": model_impl}
    on, states, imported = vllm.run("support.register_jobs:native", **serve)
    off, _, _ = vllm.run("support.register_jobs:native", env={"VLLM_PLUGINS": "none-such"}, **serve)
    assert_same(on, off)
    assert not imported
    assert set(states.values()) == {"pending"}
