# SPDX-License-Identifier: Apache-2.0
"""Serve every causal LM type of Transformers, tiny and random, and compare it with Hugging Face.

    python tools/census.py --vllm 0.32.0/5.25.0  # all types; goes on where it was interrupted
    python tools/census.py --vllm 0.34.0 doge    # this type again

`VLLM/TRANSFORMERS` names a pair, a version of vLLM alone the pair that tools/overlay.py makes of it. Writes
docs/compatibility.json and docs/compatibility.md.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import compatibility
from overlay import overlay
from support.fork_server import ForkServer
from support.parity import Verdict, check, worst
from tqdm import tqdm

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "census"
PLUGIN, UPSTREAM = "1", "0"  # values of VLLM_TF_SINKS
AT_A_TIME = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default="0.32.0", metavar="PAIR", help="a vLLM version, or VLLM/TRANSFORMERS")
    parser.add_argument("--no-upstream", action="store_true", help="leave out vLLM without the plugin")
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types; all by default")
    options = parser.parse_args()
    settings = [PLUGIN] if options.no_upstream else [PLUGIN, UPSTREAM]
    version = options.vllm.partition("/")[0]
    fork_servers = [ForkServer(version, overlay(options.vllm)) for _ in range(AT_A_TIME)]
    try:
        transformers = fork_servers[0].run("importlib.metadata:version", distribution_name="transformers")
        pair = f"{version}/{transformers}"
        measured = _measure(fork_servers, options.types, settings, _Partial(pair, bool(options.types)))
    finally:
        for fork_server in fork_servers:
            fork_server.close()
    models = compatibility.load()
    for name, ways in measured.items():
        _enter(models, name, pair, ways)
    compatibility.save(models)
    for which in ("upstream", "plugin"):
        found = compatibility.counts(models, pair, which)
        print(f"{pair} {which}: " + ", ".join(f"{number} {outcome}" for outcome, number in found.items()))


class _Partial:
    """What an interrupted census of all types has measured."""

    def __init__(self, pair: str, is_part: bool) -> None:
        self.path = CACHE / f"{pair.replace('/', '-transformers-')}.json"
        self.is_part = is_part
        self.measured: dict[str, list[dict]] = {}
        if self.path.exists() and not is_part:
            self.measured = json.loads(self.path.read_text())

    def add(self, name: str, ways: list[dict]) -> None:
        self.measured[name] = ways
        if not self.is_part:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.measured))

    def done(self) -> dict[str, list[dict]]:
        if not self.is_part:
            self.path.unlink(missing_ok=True)
        return self.measured


def _measure(
    fork_servers: list[ForkServer], types: list[str], settings: list[str], partial: _Partial
) -> dict[str, list[dict]]:
    """Model type -> what `check` says of each way to tie it."""
    ways = fork_servers[0].run("support.small:ways")
    if unknown := set(types) - ways.keys():
        raise SystemExit(f"no causal LM types: {', '.join(sorted(unknown))}")
    wanted = [name for name in types or ways if name not in partial.measured]
    free: SimpleQueue[ForkServer] = SimpleQueue()
    for fork_server in fork_servers:
        free.put(fork_server)

    def measure(name: str) -> tuple[str, list[dict]]:
        fork_server = free.get()
        try:
            return name, [check(fork_server, name, tied, settings) for tied in ways[name]]
        finally:
            free.put(fork_server)

    with ThreadPoolExecutor(len(fork_servers)) as pool, tqdm(total=len(wanted), unit="type") as bar:
        for name, found in pool.map(measure, wanted):
            partial.add(name, found)
            bar.update()
            bar.set_postfix_str(f"{name}: {_verdict(found, PLUGIN).outcome}")
    return partial.done()


def _verdict(ways: list[dict], setting: str) -> Verdict:
    return worst([Verdict(**way[setting]) for way in ways])


def _enter(models: dict, name: str, pair: str, ways: list[dict]) -> None:
    """Write what was measured of one type into `models`."""
    model = models.setdefault(name, {"vllm": {}})
    model |= {"head": ways[0].get("head", ""), "sinks": ways[0].get("sinks", 0)}
    entry = model["vllm"].setdefault(pair, {})
    plugin = _verdict(ways, PLUGIN)
    entry |= {"plugin": plugin.outcome, "reason": plugin.reason}
    if UPSTREAM in ways[0]:
        entry["upstream"] = _verdict(ways, UPSTREAM).outcome


if __name__ == "__main__":
    main()
