# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, on tiny models and for one round: that they measure what they say, and no times."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import attention, compiled, gpu, logits, measure, memory, report, sharded, startup, throughput
from benchmarks.lab import NEWER, OLDER, SMALL, Lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory, vllm):
    """All of it on the version under test, also what is meant for another."""
    with Lab(SMALL, tmp_path_factory.mktemp("lab"), newer=vllm.version, older=vllm.version) as lab:
        yield lab


def test_runs_are_taken_in_turn():
    order = []
    runs = {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}
    samples = measure.in_turn(runs, 3)
    assert "".join(order) == "abbaab"
    assert samples["a"].values == (1, 4, 5)
    assert (samples["b"] - samples["a"]).values == (1, -1, 1)
    assert (samples["b"] / samples["a"]).median == 1.2
    assert samples["a"].quartiles == (2.5, 4.5)
    assert [samples["a"].verdict(limit) for limit in (5, 3, 2)] == [measure.MET, measure.NOISE, measure.MISSED]


def test_the_page_keeps_what_is_around_the_figures(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")
    line = report.Line("this", "that", "none", "1", "2", "-1", measure.MISSED)
    section = report.Section([line], [report.Table("Growth", ["n"], [["1"]])], "a machine")
    report.write_page({"subject": section}, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| this | that | 1 | 2 | -1 | none | **missed** |" in text
    assert "### Growth" in text


def test_what_is_measured_anew_replaces_its_own_section_only(tmp_path):
    path = tmp_path / "kept.json"
    first, second, third = (report.Section([report.Line(name, *"abcd", "")], machine=name) for name in "123")
    for subject, section in [("startup", first), ("logits", second), ("startup", third)]:
        report.keep(subject, section, path)
    assert report.load(path) == {"startup": third, "logits": second}


def test_the_page_shows_what_was_kept():
    assert f"{report.START}\n\n{report.figures(report.load())}\n\n{report.END}" in report.PAGE.read_text()


@pytest.mark.parametrize("subject", [startup, logits, memory, attention, throughput, compiled, sharded])
def test_subject(lab, subject):
    if subject is attention and lab.older != OLDER:
        pytest.skip(f"vLLM {lab.older} checks sinks itself, and is not guarded")
    if subject is compiled and lab.newer != NEWER:
        pytest.skip("takes minutes: on one version")
    section = subject.measure(lab)
    assert section.lines
    for line in section.lines:
        assert len(line.cells) == 7
        assert line.what
        assert line.ours
        assert line.verdict in ("", measure.MET, measure.MISSED, measure.NOISE)
    for table in section.tables:
        assert all(len(row) == len(table.head) for row in table.rows)
    if subject is logits:
        assert section.lines[0].verdict == measure.MET, "a head that is a projection only has another function"
    if subject is memory:
        assert section.lines[0].verdict == measure.MET, "a scale allocates"


def test_gpu(lab, tmp_path):
    bench = gpu.Bench("cpu", gpu.SMALL, tmp_path, lab.vllm(lab.newer))
    steps = dict(bench.steps())
    names = ["sinks after loading, CPU_ATTN", "parity, CPU_ATTN, bfloat16", "throughput, plugin on"]
    sinks, parity, tokens = (steps[name]()[0][1] for name in names)
    assert sinks == "torch.bfloat16 in 2 layers, the checkpoint's"
    assert parity.startswith("agrees: prompt mean 0.00")
    assert "output tokens/s" in tokens


def test_gpu_reports_what_is_refused_and_what_there_is_no_time_for(lab, tmp_path):
    bench = gpu.Bench("cpu", gpu.SMALL, tmp_path, lab.vllm(lab.newer))
    ((_, result),) = bench.parity("FLASH_MLA", "bfloat16")
    assert result.startswith("refused: ")
    assert gpu.measured({"slow": lambda: [["slow", "done"]]}.items(), minutes=0) == [
        ["slow", "not run: 0 minutes are over"]
    ]
