# SPDX-License-Identifier: Apache-2.0
"""The patches of vLLM: their table, the checks before they are applied, and their reversal."""
