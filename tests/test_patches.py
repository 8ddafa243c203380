# SPDX-License-Identifier: Apache-2.0
"""The patch machinery on real vLLM: states, the way back, other plugins, and a vLLM that does not fit."""

import pytest
from support.fork_server import JobError

ROW = "sinks.find"  # the row whose target the tests take away
HAS_SINKS = (0, 30)  # from here vLLM's own attention function raises where a sink was dropped
HAS_MLA = (0, 28)


def number(vllm) -> tuple[int, ...]:
    return tuple(map(int, vllm.version.split(".")))


def of_group(states: dict[str, str], group: str) -> set[str]:
    return {state for name, state in states.items() if name.startswith(f"{group}.")}


def test_life_of_the_rows(vllm):
    life = vllm.run("support.patching:life")
    assert set(life["before"].values()) == {"off"}
    assert set(life["waiting"].values()) == {"pending"}
    expected = {
        "sinks.config": "applied",
        "sinks.find": "applied",
        "sinks.layers": "applied",
        "sinks.attention": "not needed" if number(vllm) >= HAS_SINKS else "applied",
        "sinks.mla_attention": "applied" if HAS_MLA <= number(vllm) < HAS_SINKS else "not needed",
    }
    after = life["after"]
    assert {name: state for name, state in after.items() if name.startswith("sinks.")} == expected
    assert set(after.values()) <= {"applied", "not needed"}
    assert life["again"] == after
    assert not life["warnings"]
    (line,) = life["info"]  # one a process, however often register() is called
    assert f"vLLM {vllm.version}" in line
    assert all(name in line for name in after)


@pytest.mark.parametrize(
    ("value", "on", "off"),
    [("0", [], ["sinks", "head"]), ("sinks", ["sinks"], ["head"]), ("head", ["head"], ["sinks"])],
)
def test_rows_that_are_switched_off(vllm, value, on, off):
    life = vllm.run("support.patching:life", env={"VLLM_TF_SINKS": value})
    for group in off:
        assert of_group(life["after"], group) <= {"off"}
        assert of_group(life["waiting"], group) <= {"off"}
    for group in on:
        assert of_group(life["after"], group) <= {"applied", "not needed"}
    assert len(life["info"]) == len(on)  # nothing is done and nothing said under 0


def test_each_row_finds_its_target_where_it_is_needed(vllm):
    taken = vllm.run("support.patching:targets_taken")
    assert {"sinks.find", "sinks.layers"} <= set(taken)
    method = taken["sinks.layers"].rpartition(".")[2]
    newer = number(vllm) >= HAS_SINKS
    assert method == ("_create_attention_instances" if newer else "create_attention_instances")
    if not newer:
        assert taken["sinks.attention"].endswith("ALL_ATTENTION_FUNCTIONS[vllm]")
    if HAS_MLA <= number(vllm) < HAS_SINKS:
        assert taken["sinks.mla_attention"].endswith("ALL_ATTENTION_FUNCTIONS[vllm_mla]")


def test_names_and_signatures_stay(vllm):
    replaced = vllm.run("support.patching:replaced")
    assert len(replaced) >= 2
    for target in replaced:
        assert target["wraps_the_original"], target["path"]
        now, original = target["names"]
        assert now == original
        now, original = target["signatures"]
        assert now == original


def test_revert_restores_the_originals_and_register_applies_again(vllm):
    outcome = vllm.run("support.patching:there_and_back")
    (untouched,) = outcome["depths"]
    applied = None
    for step, changed, depths, states in outcome["stages"]:
        if step == "register":
            assert changed
            assert changed == (applied or changed)
            assert depths == {untouched + 1}  # never two wrappers of ours
            applied = changed
            assert "applied" in states.values()
        else:
            assert not changed
            assert set(states.values()) == {"off"}


def test_revert_before_the_import_holds(vllm):
    outcome = vllm.run("support.patching:reverted_before_the_import")
    for stage in ("waiting", "off"):
        assert set(outcome[stage].values()) == {("off", "reverted")}
    assert outcome["again"]["sinks.find"] == "applied"


@pytest.mark.parametrize("wrapper", ["closure", "proxy"])
def test_revert_restores_the_wrapper_of_another_plugin(vllm, wrapper):
    outcome = vllm.run("support.patching:another_plugin", order="before", wrapper=wrapper)
    assert outcome["first"] == (("off", "reverted"), "as found")
    assert outcome["again"] == "applied"


@pytest.mark.parametrize("wrapper", ["closure", "proxy"])
def test_revert_refuses_where_another_plugin_wrapped_ours(vllm, wrapper):
    outcome = vllm.run("support.patching:another_plugin", order="after", wrapper=wrapper)
    reason = "not reverted: another plugin wrapped or replaced it since. Undo that plugin first"
    assert outcome["first"] == (("applied", reason), "theirs")
    assert outcome["second"] == (("off", "reverted"), "as found")
    assert outcome["again"] == "applied"


def test_register_again_after_another_plugin_put_the_original_back(vllm):
    outcome = vllm.run("support.patching:put_back_by_another_plugin")
    assert outcome["row"] == ("off", "reverted")
    assert outcome["again"] == "applied"


MISFITS = [
    ("missing", r"this vLLM has no .*base:Base\.pipeline_parallel"),
    ("signature", r"pipeline_parallel has the signature \(self, plan\), expected \(self, \.\.\.\)"),
    ("replacement", r"AttributeError: module 'vllm_tf_sinks\.attention\.sink_layers' has no attribute 'find_after_"),
]
TOO_OLD = r"vLLM 0\.26\.0 is older than 0\.27\.1"
UNTESTED = ["newer", "nonsense", "development"]


@pytest.mark.parametrize(("kind", "reason"), MISFITS)
def test_misfit_leaves_the_group_off(vllm, kind, reason):
    outcome = vllm.run("support.patching:misfit", kind=kind, env={"VLLM_TF_SINKS": "sinks"})
    assert not outcome["error"]
    assert {name.partition(".")[0] for name in outcome["changed"]} == {"guard"}  # a group of its own
    (warning,) = outcome["warnings"]
    assert outcome["version"] in warning
    assert ROW in warning
    rows = outcome["rows"]
    state, why = rows.pop(ROW)
    assert state == "does not fit"
    assert_matches(reason, why)
    assert_matches(reason, warning)
    others = {name: row for name, row in rows.items() if row[0] != "not needed" and not name.startswith("guard.")}
    assert all(row[0] == "off" for row in others.values())
    assert others["sinks.layers"] == ("off", f"{ROW} does not fit")


def test_older_vllm_stays_as_it_is(vllm):
    outcome = vllm.run("support.patching:misfit", kind="too_old")
    assert not outcome["error"]
    assert not outcome["changed"]
    (warning,) = outcome["warnings"]
    assert_matches(TOO_OLD, warning)
    assert {state for state, _ in outcome["rows"].values()} == {"does not fit"}


@pytest.mark.parametrize("kind", UNTESTED)
def test_untested_version_is_patched_and_marked(vllm, kind):
    outcome = vllm.run("support.patching:misfit", kind=kind)
    assert not outcome["warnings"]
    applied = {name: reason for name, (state, reason) in outcome["rows"].items() if state == "applied"}
    assert {ROW, "check.build", "check.loaded"} <= set(applied)
    assert set(applied.values()) == {"untested version"}
    (line,) = outcome["info"]
    assert f"on vLLM {outcome['version']} (untested version): applied: " in line


def test_build_of_a_tested_version_is_tested(vllm):
    outcome = vllm.run("support.patching:misfit", kind="build")
    assert outcome["rows"][ROW] == ("applied", "")
    assert outcome["rows"]["check.loaded"] == ("not needed", "this version of vLLM was tested")
    assert "untested" not in outcome["info"][0]


def test_probe_that_breaks_is_a_misfit(vllm):
    outcome = vllm.run("support.patching:misfit", kind="probe", env={"VLLM_TF_SINKS": "sinks"})
    assert {name.partition(".")[0] for name in outcome["changed"]} == {"guard"}
    assert outcome["rows"]["sinks.attention"] == ("does not fit", "RuntimeError: the probe broke")


@pytest.mark.parametrize("kind", ["missing", "signature", "replacement", "too_old"])
def test_strict_raises(vllm, kind):
    outcome = vllm.run("support.patching:misfit", kind=kind, env={"VLLM_TF_SINKS": "strict"})
    assert not outcome["changed"]
    assert outcome["version"] in outcome["error"]
    assert ROW in outcome["error"]
    assert "VLLM_TF_SINKS=strict forbids that" in outcome["error"]


@pytest.mark.parametrize("kind", UNTESTED)
def test_strict_refuses_an_untested_version(vllm, kind):
    outcome = vllm.run("support.patching:misfit", kind=kind, env={"VLLM_TF_SINKS": "strict"})
    assert not outcome["changed"]
    assert f"vLLM {outcome['version']} is an untested version. VLLM_TF_SINKS=strict forbids that" in outcome["error"]


def test_strict_raises_at_every_import(vllm):
    first, second = vllm.run("support.patching:misfit_at_import", kind="too_old", env={"VLLM_TF_SINKS": "strict"})
    assert_matches(TOO_OLD, first)
    assert second == first


def test_strict_keeps_an_engine_from_starting(vllm, checkpoint):
    folder = checkpoint(vllm, "gpt_oss")
    with pytest.raises(JobError, match=r"PatchError.*this vLLM has no .*VLLM_TF_SINKS=strict forbids that"):
        vllm.run(
            "support.patching:served_with_misfit",
            kind="missing",
            checkpoint=folder,
            env={"VLLM_TF_SINKS": "strict"},
        )


@pytest.mark.parametrize("kind", ["missing", "too_old"])
def test_native_model_is_served_all_the_same(vllm, checkpoint, kind):
    folder = checkpoint(vllm, "llama")
    served, rows = vllm.run("support.patching:served_with_misfit", kind=kind, checkpoint=folder, model_impl="vllm")
    assert rows[ROW][0] == "does not fit"
    expected = vllm.run("support.jobs:served_rows", checkpoint=folder, model_impl="vllm")
    assert_same(served, expected)


def assert_matches(pattern: str, text: str):
    import re

    assert re.search(pattern, text, re.DOTALL), f"{pattern!r} is not in {text!r}"


def assert_same(served, expected):
    """Two servings gave the same tokens and the same numbers, bit by bit."""
    for one, other in zip(served, expected, strict=True):
        assert one[0] == other[0]
        assert (one[1] == other[1]).all()
        assert (one[2] == other[2]).all()
