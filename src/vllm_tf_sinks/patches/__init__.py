# SPDX-License-Identifier: Apache-2.0
"""How vLLM is changed: the catalogue, preflight, applying all or none of a group, and the way back."""
