# SPDX-License-Identifier: Apache-2.0
"""Jobs that register, revert and look at the patches, in a fork that has vLLM but not its backend."""

import functools
import importlib
import inspect
import logging
import sys
from contextlib import contextmanager

from vllm_tf_sinks import PatchError, register, revert, status
from vllm_tf_sinks.patches.patch import Target
from vllm_tf_sinks.patches.patcher import _patcher, summary
from vllm_tf_sinks.patches.table import PATCHES

BACKEND = "vllm.model_executor.models.transformers"
MISSING = f"{BACKEND}.base:Base.pipeline_parallel"  # the target that jobs take away or change
MISSING_ROW = "sinks.find"


def import_backend():
    return importlib.import_module(BACKEND)


def rows() -> dict[str, tuple[str, str]]:
    """Each row's state and reason."""
    return {row.patch.name: (row.state.value, row.reason) for row in status()}


def states() -> dict[str, str]:
    return {name: state for name, (state, _) in rows().items()}


def states_after_import() -> dict[str, str]:
    register()
    import_backend()
    return states()


def current() -> dict[str, object]:
    """What is at each target of the catalogue that this vLLM has."""
    targets = [Target.find(path) for patch in PATCHES for path in patch.targets]
    return {target.path: target.get() for target in targets if target}


def depth(function) -> int:
    """How many wrappers are around a function."""
    return 1 + depth(function.__wrapped__) if hasattr(function, "__wrapped__") else 0


@contextmanager
def logged():
    """The records that the plugin logs."""
    records: list[logging.LogRecord] = []

    def keep(record):  # as a filter, which stays when vLLM configures logging anew
        records.append(record)
        return True

    logger = logging.getLogger("vllm.tf_sinks")
    logger.setLevel(logging.INFO)
    logger.addFilter(keep)
    try:
        yield records
    finally:
        logger.removeFilter(keep)


def messages(records, level: int) -> list[str]:
    return [record.getMessage() for record in records if record.levelno == level]


def life() -> dict:
    """The states before register(), before the backend is imported, and after; and what was logged."""
    assert BACKEND not in sys.modules
    with logged() as records:
        before = states()
        register()
        waiting = states()
        import_backend()
        after = states()
        register()
        again = states()
    return {
        "before": before,
        "waiting": waiting,
        "after": after,
        "again": again,
        "info": messages(records, logging.INFO),
        "warnings": messages(records, logging.WARNING),
    }


def targets_taken() -> dict[str, str]:
    """For each row that this vLLM needs, the target that is patched."""
    import_backend()
    return {patch.name: patch.find().path for patch in PATCHES if not patch.has()}


def replaced() -> list[dict]:
    """What register() did to each target, compared with what was there."""
    import_backend()
    originals = current()
    register()
    return [
        {
            "path": path,
            "wraps_the_original": getattr(now, "__wrapped__", None) is originals[path],
            "names": [(f.__name__, f.__qualname__, f.__module__) for f in (now, originals[path])],
            "signatures": [str(inspect.signature(f)) for f in (now, originals[path])],
        }
        for path, now in current().items()
        if now is not originals[path]
    ]


def there_and_back() -> dict:
    """register, revert, register and revert again."""
    import_backend()
    originals = current()
    stages = []
    for step in (register, revert, revert, register, register, revert):
        step()
        now = current()
        changed = [path for path in now if now[path] is not originals[path]]
        stages.append((step.__name__, changed, {depth(now[path]) for path in changed}, states()))
    return {"stages": stages, "depths": {depth(f) for f in originals.values()}}


def reverted_before_the_import() -> dict:
    register()
    revert()
    waiting = rows()
    import_backend()
    off = rows()
    register()
    return {"waiting": waiting, "off": off, "again": states()}


def _wrapped(original):
    """What another plugin wraps a method in."""

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return original(*args, **kwargs)

    return wrapper


def _proxied(original):
    import wrapt

    return wrapt.FunctionWrapper(original, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))


WRAPPERS = {"closure": _wrapped, "proxy": _proxied}


def another_plugin(order: str, wrapper: str) -> dict:
    """Another plugin wraps a target of ours, before us or after us. We revert, it is undone, and we revert again.

    Returns:
        the row after each revert(); whether each left the target to the other plugin, to us, or as it was;
        and the state after another register().
    """
    base = importlib.import_module(f"{BACKEND}.base")
    import_backend()
    original = vars(base.Base)["pipeline_parallel"]
    wrap = WRAPPERS[wrapper]
    if order == "before":
        base.Base.pipeline_parallel = wrap(original)
    found = vars(base.Base)["pipeline_parallel"]
    register()
    ours = vars(base.Base)["pipeline_parallel"]
    if order == "after":
        base.Base.pipeline_parallel = wrap(ours)
    theirs = vars(base.Base)["pipeline_parallel"]

    def left() -> str:
        current = vars(base.Base)["pipeline_parallel"]
        return "as found" if current is found else "ours" if current is ours else "theirs" if current is theirs else "?"

    revert()
    first = rows()[MISSING_ROW], left()
    base.Base.pipeline_parallel = ours if order == "after" else original
    revert()
    second = rows()[MISSING_ROW], left()
    register()
    return {"first": first, "second": second, "again": states()[MISSING_ROW]}


def put_back_by_another_plugin() -> dict:
    """Another plugin restores what was there before ours."""
    import_backend()
    base = importlib.import_module(f"{BACKEND}.base")
    original = vars(base.Base)["pipeline_parallel"]
    register()
    base.Base.pipeline_parallel = original
    revert()
    row = rows()[MISSING_ROW]
    register()
    return {"row": row, "again": states()[MISSING_ROW]}


def _take_target_away():
    base = importlib.import_module(f"{BACKEND}.base")
    del base.Base.pipeline_parallel


def _change_signature():
    base = importlib.import_module(f"{BACKEND}.base")

    def pipeline_parallel(self, plan):
        raise AssertionError

    base.Base.pipeline_parallel = pipeline_parallel


def _another_version(version):
    sys.modules["vllm.version"].__version__ = version


def _break_replacement():
    from vllm_tf_sinks.attention import sink_layers

    del sink_layers.find_after_pipeline_split


def _break_probe():
    from vllm_tf_sinks import compat

    def broken():
        raise RuntimeError("the probe broke")

    probe = compat.attention.layers_take_sinks
    _patcher.patches = tuple(patch._replace(has=broken) if patch.has is probe else patch for patch in PATCHES)


MISFITS = {
    "missing": _take_target_away,
    "signature": _change_signature,
    "too_old": lambda: _another_version("0.26.0"),
    "newer": lambda: _another_version("0.99.0+cu129"),
    "nonsense": lambda: _another_version("a fork of ours"),
    "development": lambda: _another_version("0.33.1.dev7+g1234567.cpu"),
    "build": lambda: _another_version("0.32.0+cu129"),
    "replacement": _break_replacement,
    "probe": _break_probe,
}


def misfit(kind: str, reverts: bool = False) -> dict:
    """What register() makes of a vLLM that is changed as `kind` says."""
    import_backend()
    MISFITS[kind]()
    originals = current()
    error = ""
    with logged() as records:
        for _ in range(2):
            try:
                register()
            except PatchError as raised:
                error = str(raised)
    now = current()
    return {
        "error": error,
        "rows": rows(),
        "changed": [p.name for p in PATCHES if any(now.get(path) is not originals.get(path) for path in p.targets)],
        "warnings": messages(records, logging.WARNING),
        "info": messages(records, logging.INFO),
        "version": sys.modules["vllm.version"].__version__,
    }


def misfit_at_import(kind: str, imports: int = 2) -> list[str]:
    """What each of several imports of the backend raises, with `kind` wrong before the first."""
    register()
    MISFITS[kind]()
    raised = []
    for _ in range(imports):
        try:
            import_backend()
            raised.append("")
        except PatchError as error:
            raised.append(str(error))
    return raised


def served_with_misfit(kind: str, checkpoint: str, **engine):
    """Rows served by a vLLM that is changed as `kind` says."""
    from support.jobs import served_rows

    import_backend()
    MISFITS[kind]()
    return served_rows(checkpoint, **engine), rows()


def trigger_survives_find_spec() -> dict[str, str]:
    import importlib.util

    register()
    assert importlib.util.find_spec(BACKEND) is not None
    assert BACKEND not in sys.modules
    import_backend()
    return states()


def line() -> str:
    return summary()
