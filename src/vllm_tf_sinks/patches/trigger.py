# SPDX-License-Identifier: Apache-2.0
"""Run something once, as soon as a module has been imported."""

from collections.abc import Callable
from types import ModuleType

import wrapt

_waiting: set[str] = set()


def when_imported(module_name: str, action: Callable[[], None]) -> None:
    """Call `action` after `module_name` is imported, or now if it is; once however often this is called."""
    if module_name in _waiting:
        return
    _waiting.add(module_name)

    def imported(_module: ModuleType) -> None:
        _waiting.discard(module_name)
        action()

    wrapt.register_post_import_hook(imported, module_name)
